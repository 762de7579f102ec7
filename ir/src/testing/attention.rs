use super::{Samples, f32s, graph_of, typed};
use crate::{
    AttentionDims, AttentionOperand, BinaryOp, Composite, DType, Graph, GraphError, NodeId, Op, PadDim, Real, SliceDim,
    TensorType,
};

pub(super) fn add(samples: &mut Samples) {
    for case in CASES {
        for composite in case.composites() {
            let op = Op::Composite(composite);
            let operands = case.operands(&op);
            samples.add(format!("{} {}", op.name(), case.name), &operands, |g, x| g.push(op, x));
        }
    }
}

/// All derivatives of a causal attention of grouped heads, those of queries and keys rotated as positions are, of several head sizes. Where a name
/// ends with `kept`, what is rotated is a result as well. Inputs are meant for [`random_tensor`](super::random_tensor).
pub fn rotated_gradients() -> Vec<(String, Graph)> {
    let cases = [6, 32, 64].into_iter().flat_map(|size| [(size, false), (size, true)]);
    let named = cases.map(|(size, kept)| {
        let name = format!("rotated gradients of size {size}{}", if kept { ", kept" } else { "" });
        let graph = rotated_gradient(size, kept).unwrap_or_else(|e| panic!("{name} is wrong: {e}"));
        (name, graph)
    });
    named.collect()
}

fn rotated_gradient(size: usize, kept: bool) -> Result<Graph, GraphError> {
    const LENGTH: usize = 20;
    let [query, key, rows, angles] =
        [&[1, 2, 3, LENGTH, size][..], &[1, 2, 1, LENGTH, size], &[1, 2, 3, LENGTH], &[LENGTH, size / 2]];
    graph_of(&[query, key, key, query, rows, rows, angles, angles].map(f32s), |g, x| {
        let dims = AttentionDims { causal: Some(0), ..AttentionDims::scaled(0.3) };
        let mut gradient = |of| g.push(Op::Composite(Composite::AttentionGradient { dims: dims.clone(), of }), &x[..6]);
        let (value, key, query) =
            (gradient(AttentionOperand::Value)?, gradient(AttentionOperand::Key)?, gradient(AttentionOperand::Query)?);
        for (name, node) in [("value", value), ("key", key), ("query", query)].into_iter().take(if kept { 3 } else { 1 }) {
            g.output(name, node)?;
        }
        let key = g.reshape(key, [1, 2, LENGTH, size])?;
        let [first, second] = turned(g, key, [x[6], x[7]])?;
        let zero = g.constant_like(first, 0.0)?;
        let zero = g.reduce(crate::ReduceOp::Max, zero, &[0, 1, 2, 3])?;
        let mut padded = |half, low, high| {
            let pad = |low, high| PadDim { low, high, interior: 0 };
            g.push(Op::Pad(vec![pad(0, 0), pad(0, 0), pad(0, 0), pad(low, high)]), &[half, zero])
        };
        let (first, second) = (padded(first, 0, size / 2)?, padded(second, size / 2, 0)?);
        let key = g.add(first, second)?;
        g.output("rotated key", key)?;
        let query = g.reshape(query, [1, 6, LENGTH, size])?;
        let halves = turned(g, query, [x[6], x[7]])?;
        g.push(Op::Concat { axis: 3 }, &halves)
    })
}

/// The halves of the last axis of `x`, turned by angles `[length, half]` whose cosine and sine are given.
fn turned(g: &mut Graph, x: NodeId, [cos, sin]: [NodeId; 2]) -> Result<[NodeId; 2], GraphError> {
    let shape = g.ty(x).shape.to_vec();
    let half = shape[3] / 2;
    let mut part = |start| {
        let whole = shape[..3].iter().map(|&size| SliceDim { start: 0, step: 1, size });
        g.push(Op::Slice(whole.chain([SliceDim { start, step: 1, size: half }]).collect()), &[x])
    };
    let (a, b) = (part(0)?, part(half)?);
    let to = g.ty(a).shape.clone();
    let (cos, sin) = (g.broadcast_to(cos, &to)?, g.broadcast_to(sin, &to)?);
    let (ac, bs, bc, as_) = (g.mul(a, cos)?, g.mul(b, sin)?, g.mul(b, cos)?, g.mul(a, sin)?);
    Ok([g.add(ac, bs)?, g.binary(BinaryOp::Sub, bc, as_)?])
}

/// Sizes, and what stands between scores and weights.
struct Case {
    name: &'static str,
    /// `[batch.., Lq, d]`
    q: &'static [usize],
    /// `[batch.., Lk, d]`
    k: &'static [usize],
    value_size: usize,
    mask: Option<(DType, &'static [usize])>,
    softcap: Option<f64>,
    causal: Option<i64>,
    guarded: bool,
}

const PLAIN: Case =
    Case { name: "plain", q: &[2, 7, 5], k: &[2, 9, 5], value_size: 5, mask: None, softcap: None, causal: None, guarded: false };

const CASES: [Case; 15] = [
    PLAIN,
    Case { name: "without a batch", q: &[7, 3], k: &[6, 3], value_size: 4, ..PLAIN },
    Case { name: "of one query", q: &[3, 1, 8], k: &[3, 37, 8], value_size: 8, ..PLAIN },
    Case { name: "of one key", q: &[2, 7, 5], k: &[2, 1, 5], value_size: 3, ..PLAIN },
    Case { name: "of size 1", q: &[2, 6, 1], k: &[2, 5, 1], value_size: 1, ..PLAIN },
    Case { name: "of more than a tile", q: &[1, 2, 67, 17], k: &[1, 2, 35, 17], value_size: 19, ..PLAIN },
    Case { name: "of large heads", q: &[1, 5, 97], k: &[1, 6, 97], value_size: 133, ..PLAIN },
    Case { name: "causal", q: &[2, 33, 5], k: &[2, 33, 5], causal: Some(0), ..PLAIN },
    Case { name: "causal after a cache", q: &[2, 5, 4], k: &[2, 21, 4], causal: Some(16), ..PLAIN },
    Case { name: "of grouped heads", q: &[2, 2, 3, 7, 4], k: &[2, 2, 1, 18, 4], causal: Some(11), ..PLAIN },
    Case { name: "of one key for all heads", q: &[3, 2, 6, 4], k: &[1, 2, 5, 4], value_size: 2, ..PLAIN },
    Case { name: "with a bias per key", q: &[2, 2, 6, 4], k: &[2, 2, 19, 4], mask: Some((DType::F32, &[2, 1, 1, 19])), ..PLAIN },
    Case { name: "with a whole bias", mask: Some((DType::F32, &[2, 7, 9])), softcap: Some(0.7), ..PLAIN },
    Case { name: "with a bool mask", k: &[2, 41, 5], mask: Some((DType::Bool, &[1, 7, 41])), guarded: true, ..PLAIN },
    Case {
        name: "with everything",
        q: &[2, 1, 2, 20, 6],
        k: &[1, 1, 1, 34, 6],
        value_size: 3,
        mask: Some((DType::F32, &[1, 1, 2, 1, 34])),
        softcap: Some(1.5),
        causal: Some(14),
        guarded: true,
    },
];

impl Case {
    fn composites(&self) -> Vec<Composite> {
        use AttentionOperand::*;
        let dims =
            AttentionDims { scale: Real(0.4), softcap: self.softcap.map(Real), causal: self.causal, guarded: self.guarded };
        let gradients = [Query, Key, Value].map(|of| Composite::AttentionGradient { dims: dims.clone(), of });
        [Composite::Attention(dims.clone()), Composite::AttentionLse(dims)].into_iter().chain(gradients).collect()
    }

    fn operands(&self, op: &Op) -> Vec<TensorType> {
        let rank = self.q.len();
        let with_last = |shape: &[usize], size: usize| f32s(&[&shape[..rank - 1], &[size]].concat());
        let (q, k, v) = (f32s(self.q), f32s(self.k), with_last(self.k, self.value_size));
        let rows = f32s(&self.q[..rank - 1]);
        let mut operands = match op {
            Op::Composite(Composite::AttentionLse(_)) => vec![q, k],
            Op::Composite(Composite::AttentionGradient { .. }) => {
                vec![q, k, v, with_last(self.q, self.value_size), rows.clone(), rows]
            }
            _ => vec![q, k, v],
        };
        operands.extend(self.mask.map(|(dtype, shape)| typed(dtype, shape)));
        operands
    }
}
