//! For each rule that raises: a graph in which it fires among the others, and one, as close as possible, in which it must not.

use meganeura_ir::{BinaryOp::*, CompareOp, Composite, DType, Graph, NodeId, Op, ReduceOp, UnaryOp::*};

use super::sketch::{Sketch, disagreement};
use crate::saturate::raise::raise;

impl Sketch {
    fn softmax(&mut self, x: NodeId, axis: usize) -> NodeId {
        self.push(Op::Composite(Composite::Softmax { axis }), &[x])
    }

    /// `softmax(s) v` for `s: [2, 5, 6]`.
    fn weighed(&mut self, s: NodeId) -> NodeId {
        let p = self.softmax(s, 2);
        let v = self.x(&[2, 6, 3]);
        self.dot(p, v, &[(0, 0)], &[(2, 1)])
    }

    /// `[2, 5, 6]`
    fn products(&mut self) -> NodeId {
        let (q, k) = (self.x(&[2, 5, 4]), self.x(&[2, 6, 4]));
        self.dot(q, k, &[(0, 0)], &[(2, 2)])
    }

    fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> NodeId {
        self.push(Op::Select, &[condition, a, b])
    }

    fn scalar(&mut self, shape: &[usize], value: f64) -> NodeId {
        let c = self.c(&[], value);
        self.broadcast(c, shape, &[])
    }

    fn bools(&mut self, shape: &[usize]) -> NodeId {
        self.typed(DType::Bool, shape)
    }

    /// `softmax(mask(products)) v`, where `mask` says what is kept.
    fn masked(&mut self, fill: f64, mask: impl FnOnce(&mut Sketch) -> NodeId) -> NodeId {
        let s = self.products();
        self.masked_scores(s, fill, mask)
    }

    fn masked_scores(&mut self, s: NodeId, fill: f64, mask: impl FnOnce(&mut Sketch) -> NodeId) -> NodeId {
        let keep = mask(self);
        let never = self.scalar(&[2, 5, 6], fill);
        let s = self.select(keep, s, never);
        self.weighed(s)
    }

    /// Whether key `j` is at most `i + offset`, as two ranges that are compared.
    fn triangle(&mut self, shape: &[usize], relation: CompareOp, offset: f64) -> NodeId {
        let plane = self.shape(&[5, 6]);
        let [i, j] = [0, 1].map(|axis| self.push(Op::Iota { dtype: DType::I32, shape: plane.clone(), axis }, &[]));
        let last = self.c_typed(DType::I32, &[5, 6], offset);
        let last = self.binary(Add, i, last);
        let keep = self.push(Op::Compare(relation), &[j, last]);
        self.broadcast(keep, shape, &[1, 2])
    }

    /// Keys and values `[2, 3, 6, 4]`, each repeated for `heads` neighbouring heads.
    fn repeated(&mut self, heads: usize, new: usize) -> NodeId {
        let x = self.x(&[2, 3, 6, 4]);
        let kept: Vec<usize> = (0..5).filter(|&a| a != new).collect();
        let mut shape = vec![2, 3, 6, 4];
        shape.insert(new, heads);
        let x = self.broadcast(x, &shape, &kept);
        self.reshape(x, &[2, 3 * heads, 6, 4])
    }

    fn of_heads(&mut self, k: NodeId, v: NodeId, mask: Option<&[usize]>) -> NodeId {
        let q = self.x(&[2, 6, 5, 4]);
        let mut s = self.dot(q, k, &[(0, 0), (1, 1)], &[(3, 3)]);
        if let Some(mask) = mask {
            let axes: Vec<usize> = (0..4).filter(|&a| mask[a] != 1).collect();
            let bias = self.x(&axes.iter().map(|&a| mask[a]).collect::<Vec<_>>());
            let bias = self.broadcast(bias, &[2, 6, 5, 6], &axes);
            s = self.binary(Add, s, bias);
        }
        let p = self.softmax(s, 3);
        self.dot(p, v, &[(0, 0), (1, 1)], &[(3, 2)])
    }
}

const INFINITE: f64 = f64::NEG_INFINITY;

#[rustfmt::skip]
cases! {
    "transpose-of-unit-reshape": |g| { let x = g.x(&[3, 4]); let y = g.reshape(x, &[1, 3, 4]); g.transpose(y, &[2, 0, 1]) },
        not { let x = g.x(&[3, 4]); let y = g.reshape(x, &[2, 6]); g.transpose(y, &[1, 0]) };
    "constant-factor-last": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 2.0)); g.binary(Mul, c, x) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); g.binary(Mul, x, y) };
    "softmax-of-quotient": |g| { let x = g.x(&[2, 3]); let e = g.unary(Exp, x); let s = g.reduce(ReduceOp::Sum, e, &[1]); let s = g.broadcast(s, &[2, 3], &[0]); g.binary(Div, e, s) },
        not { let x = g.x(&[3, 3]); let e = g.unary(Exp, x); let s = g.reduce(ReduceOp::Sum, e, &[1]); let s = g.broadcast(s, &[3, 3], &[1]); g.binary(Div, e, s) };
    "softmax-of-shifted": |g| { let (x, y) = (g.x(&[3, 3]), g.x(&[3])); let y = g.broadcast(y, &[3, 3], &[0]); let x = g.binary(Sub, x, y); g.softmax(x, 1) },
        not { let (x, y) = (g.x(&[3, 3]), g.x(&[3])); let y = g.broadcast(y, &[3, 3], &[1]); let x = g.binary(Sub, x, y); g.softmax(x, 1) };
    "attend": |g| { let s = g.x(&[2, 5, 6]); g.weighed(s) },
        not { let (s, v) = (g.x(&[2, 5, 6]), g.x(&[2, 6, 3])); let p = g.softmax(s, 1); g.dot(p, v, &[(0, 0)], &[(2, 1)]) };
    "attend-guarded": |g| { let s = g.masked_weights(0.0); g.times_values(s) },
        not { let s = g.masked_weights(1.0); g.times_values(s) };
    "attend-reshaped": |g| { let s = g.x(&[4, 5, 6]); let s = g.reshape(s, &[2, 2, 5, 6]); let p = g.softmax(s, 3); let v = g.x(&[2, 2, 6, 3]); g.dot(p, v, &[(0, 0), (1, 1)], &[(3, 2)]) },
        not { let s = g.x(&[2, 10, 3]); let s = g.reshape(s, &[2, 5, 6]); g.weighed(s) };
    "attend-bias": |g| { let (s, b) = (g.products(), g.x(&[6])); let b = g.broadcast(b, &[2, 5, 6], &[2]); let s = g.binary(Add, s, b); g.weighed(s) },
        not { let (s, b) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Sub, s, b); g.weighed(s) };
    "attend-bias-first": |g| { let (s, b) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Add, b, s); g.weighed(s) },
        not { let (s, b) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Max, b, s); g.weighed(s) };
    "attend-mask": |g| g.masked(INFINITE, |g| { let m = g.bools(&[5, 6]); g.broadcast(m, &[2, 5, 6], &[1, 2]) }),
        not g.masked(-10.0, |g| g.bools(&[2, 5, 6]));
    "attend-finite-mask": |g| g.masked(-3e38, |g| { let m = g.bools(&[5, 6]); g.broadcast(m, &[2, 5, 6], &[1, 2]) }),
        not g.masked(-10.0, |g| g.bools(&[2, 5, 6]));
    "attend-second-bias": |g| { let s = g.products(); let (a, b) = (g.x(&[6]), g.x(&[2, 5])); let a = g.broadcast(a, &[2, 5, 6], &[2]); let b = g.broadcast(b, &[2, 5, 6], &[0, 1]); let s = g.binary(Add, s, a); let s = g.binary(Add, s, b); g.weighed(s) },
        not { let s = g.products(); let (a, b) = (g.x(&[2, 5, 6]), g.x(&[2, 5, 6])); let s = g.binary(Mul, s, a); let s = g.binary(Add, s, b); g.weighed(s) };
    "attend-bias-below-mask": |g| { let (s, b) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Add, s, b); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) },
        not { let (s, b) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Add, s, b); g.weighed(s) };
    "attend-mask-under-bias": |g| { let (s, m) = (g.products(), g.bools(&[2, 5, 6])); let f = g.scalar(&[2, 5, 6], INFINITE); let s = g.select(m, s, f); let b = g.x(&[6]); let b = g.broadcast(b, &[2, 5, 6], &[2]); let s = g.binary(Add, s, b); g.weighed(s) },
        not { let (s, m) = (g.products(), g.bools(&[2, 5, 6])); let f = g.scalar(&[2, 5, 6], -5.0); let s = g.select(m, s, f); let b = g.x(&[2, 5, 6]); let s = g.binary(Add, s, b); g.weighed(s) };
    "attend-second-mask": |g| { let (s, m) = (g.products(), g.bools(&[2, 5, 6])); let f = g.scalar(&[2, 5, 6], INFINITE); let s = g.select(m, s, f); g.masked_scores(s, INFINITE, |g| { let m = g.bools(&[5]); g.broadcast(m, &[2, 5, 6], &[1]) }) },
        not { let (s, m) = (g.products(), g.bools(&[2, 5, 6])); let f = g.scalar(&[2, 5, 6], 1.0); let s = g.select(m, s, f); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) };
    "attend-scaled": |g| { let (s, c) = (g.products(), g.scalar(&[2, 5, 6], 0.3)); let s = g.binary(Mul, s, c); g.weighed(s) },
        not { let (s, c) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Mul, s, c); g.weighed(s) };
    "attend-scaled-masked": |g| { let (s, c, b) = (g.products(), g.scalar(&[2, 5, 6], 0.3), g.x(&[2, 5, 6])); let s = g.binary(Mul, s, c); let s = g.binary(Add, s, b); g.weighed(s) },
        not { let (s, c, b) = (g.products(), g.x(&[2, 5, 6]), g.x(&[2, 5, 6])); let s = g.binary(Mul, s, c); let s = g.binary(Add, s, b); g.weighed(s) };
    "attend-divided": |g| { let (s, c) = (g.products(), g.scalar(&[2, 5, 6], 3.0)); let s = g.binary(Div, s, c); g.weighed(s) },
        not { let (s, c) = (g.products(), g.scalar(&[2, 5, 6], 0.0)); let s = g.binary(Div, s, c); g.weighed(s) };
    "attend-divided-masked": |g| { let (s, c, b) = (g.products(), g.scalar(&[2, 5, 6], 3.0), g.x(&[2, 5, 6])); let s = g.binary(Div, s, c); let s = g.binary(Add, s, b); g.weighed(s) },
        not { let (s, c, b) = (g.products(), g.x(&[2, 5, 6]), g.x(&[2, 5, 6])); let s = g.binary(Div, s, c); let s = g.binary(Add, s, b); g.weighed(s) };
    "attend-capped": |g| { let s = g.capped(0.5, 2.0); g.weighed(s) },
        not { let s = g.capped(0.5, -2.0); g.weighed(s) };
    "attend-capped-masked": |g| { let s = g.capped(0.5, 2.0); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) },
        not { let s = g.capped(0.5, -2.0); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) };
    "attend-scaled-query": |g| { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.scalar(&[2, 5, 4], 0.3)); let q = g.binary(Mul, q, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.weighed(s) },
        not { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.x(&[2, 5, 4])); let q = g.binary(Mul, q, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.weighed(s) };
    "attend-scaled-query-masked": |g| { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.scalar(&[2, 5, 4], 0.3)); let q = g.binary(Mul, q, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) },
        not { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.x(&[2, 5, 4])); let q = g.binary(Mul, q, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) };
    "attend-scaled-key": |g| { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.scalar(&[2, 6, 4], 0.3)); let k = g.binary(Mul, k, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.weighed(s) },
        not { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.x(&[2, 6, 4])); let k = g.binary(Mul, k, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.weighed(s) };
    "attend-scaled-key-masked": |g| { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.scalar(&[2, 6, 4], 0.3)); let k = g.binary(Mul, k, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) },
        not { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.x(&[2, 6, 4])); let k = g.binary(Mul, k, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) };
    "attend-divided-query": |g| { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.scalar(&[2, 5, 4], 8.0)); let q = g.binary(Div, q, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.weighed(s) },
        not { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.x(&[2, 5, 4])); let q = g.binary(Div, c, q); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.weighed(s) };
    "attend-divided-query-masked": |g| { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.scalar(&[2, 5, 4], 8.0)); let q = g.binary(Div, q, c); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) },
        not { let (q, k, c) = (g.x(&[2, 5, 4]), g.x(&[2, 6, 4]), g.x(&[2, 5, 4])); let q = g.binary(Div, c, q); let s = g.dot(q, k, &[(0, 0)], &[(2, 2)]); g.masked_scores(s, INFINITE, |g| g.bools(&[2, 5, 6])) };
    "attention": |g| { let s = g.products(); g.weighed(s) },
        not { let (q, k) = (g.x(&[2, 5, 4, 3]), g.x(&[2, 6, 4, 3])); let s = g.dot(q, k, &[(0, 0)], &[(2, 2), (3, 3)]); g.weighed(s) };
    "attention-masked": |g| { let (s, b) = (g.products(), g.x(&[2, 5, 6])); let s = g.binary(Add, s, b); g.weighed(s) },
        not { let (q, k, b) = (g.x(&[2, 5, 4, 3]), g.x(&[2, 6, 4, 3]), g.bools(&[2, 5, 6])); let s = g.dot(q, k, &[(0, 0)], &[(2, 2), (3, 3)]); g.masked_scores(s, INFINITE, |_| b) };
    "grouped-heads": |g| { let (k, v) = (g.repeated(2, 2), g.repeated(2, 2)); g.of_heads(k, v, None) },
        not { let (k, v) = (g.repeated(2, 1), g.repeated(2, 1)); g.of_heads(k, v, None) };
    "grouped-heads-masked": |g| { let (k, v) = (g.repeated(2, 2), g.repeated(2, 2)); g.of_heads(k, v, Some(&[1, 6, 1, 6])) },
        not { let (k, v) = (g.repeated(2, 2), g.repeated(2, 1)); g.of_heads(k, v, Some(&[1, 6, 1, 6])) };
    "causal-mask": |g| g.masked(INFINITE, |g| g.triangle(&[2, 5, 6], CompareOp::Le, 1.0)),
        not g.masked(INFINITE, |g| g.triangle(&[2, 5, 6], CompareOp::Ge, 0.0));
    "mask-of-nothing": |g| { let (s, c) = (g.products(), g.c(&[6], 0.0)); let c = g.broadcast(c, &[2, 5, 6], &[2]); let s = g.binary(Add, s, c); g.weighed(s) },
        not { let (s, c) = (g.products(), g.c(&[6], 1.0)); let c = g.broadcast(c, &[2, 5, 6], &[2]); let s = g.binary(Add, s, c); g.weighed(s) };
}

impl Sketch {
    /// Softmax of masked scores, with `fill` where it is no number.
    fn masked_weights(&mut self, fill: f64) -> NodeId {
        let (s, m) = (self.products(), self.bools(&[2, 5, 6]));
        let never = self.scalar(&[2, 5, 6], INFINITE);
        let s = self.select(m, s, never);
        let p = self.softmax(s, 2);
        let nan = self.unary(IsNan, p);
        let fill = self.scalar(&[2, 5, 6], fill);
        self.select(nan, fill, p)
    }

    fn times_values(&mut self, p: NodeId) -> NodeId {
        let v = self.x(&[2, 6, 3]);
        self.dot(p, v, &[(0, 0)], &[(2, 1)])
    }

    /// `cap * tanh(scale * products)`
    fn capped(&mut self, scale: f64, cap: f64) -> NodeId {
        let (s, scale, cap) = (self.products(), self.scalar(&[2, 5, 6], scale), self.scalar(&[2, 5, 6], cap));
        let s = self.binary(Mul, s, scale);
        let s = self.unary(Tanh, s);
        self.binary(Mul, s, cap)
    }
}

fn graph(build: fn(&mut Sketch) -> NodeId) -> Graph {
    let mut sketch = Sketch::default();
    let y = build(&mut sketch);
    sketch.finish(y)
}

#[test]
fn raising_keeps_the_values_of_every_case() {
    for case in CASES {
        for build in [case.fires, case.refuses] {
            let graph = graph(build);
            assert!(disagreement(&raise(&graph), &graph) < 1e-6, "{}", case.rule);
        }
    }
}

/// What stands in the raised graph.
fn found(build: fn(&mut Sketch) -> NodeId) -> Vec<Op> {
    let raised = raise(&graph(build));
    raised
        .live()
        .into_iter()
        .map(|id| raised.node(id).op.clone())
        .filter(|op| matches!(op, Op::Composite(_) | Op::Dot(_)))
        .collect()
}

#[test]
fn a_causal_mask_however_written_is_an_attribute() {
    let of = |ops: Vec<Op>| match ops.as_slice() {
        [Op::Composite(Composite::Attention(dims))] => dims.causal,
        other => panic!("{other:?}"),
    };
    assert_eq!(of(found(|g| g.masked(INFINITE, |g| g.triangle(&[2, 5, 6], CompareOp::Le, 1.0)))), Some(1));
    assert_eq!(of(found(|g| g.masked(-3.4e38, |g| g.triangle(&[2, 5, 6], CompareOp::Lt, 1.0)))), Some(0));
    // A query that sees nothing is NaN or an average, as the exporter's formula says: no attribute does that.
    let rows_without_keys = found(|g| g.masked(-3.4e38, |g| g.triangle(&[2, 5, 6], CompareOp::Lt, 0.0)));
    assert_eq!(of(rows_without_keys), None);
}

#[test]
fn repeated_keys_and_values_are_read_where_they_lie() {
    let mut sketch = Sketch::default();
    let (k, v) = (sketch.repeated(2, 2), sketch.repeated(2, 2));
    let y = sketch.of_heads(k, v, Some(&[1, 6, 1, 6]));
    let raised = raise(&sketch.finish(y));
    let attention = raised.live().into_iter().map(|id| raised.node(id)).find(|n| matches!(n.op, Op::Composite(_))).unwrap();
    assert_eq!(*raised.ty(attention.operands[1]).shape, [2, 3, 1, 6, 4]);
    assert!(raised.live().into_iter().all(|id| raised.ty(id).shape.numel() <= 2 * 6 * 6 * 6));
}

#[test]
fn what_else_reads_the_weights_keeps_them() {
    let raised = found(|g| {
        let s = g.products();
        let p = g.softmax(s, 2);
        let y = g.times_values(p);
        g.0.output("weights", p).unwrap();
        y
    });
    assert!(raised.iter().all(|op| !matches!(op, Op::Composite(Composite::Attention(_)))), "{raised:?}");
}
