//! Contractions of sizes at which compilers divide the work in different ways, and graphs of random ops.

use super::{f32s, graph_of, typed};
use crate::{
    BinaryOp, CompareOp, ConvDims, DType, DotDims, Graph, GraphError, NodeId, Op, ParameterId, ParameterInfo, ParameterRole,
    ReduceOp, SliceDim, UnaryOp,
};

/// Products, convolutions and sums of products of all shapes and layouts, with prologues and epilogues. Inputs are meant for
/// [`random_tensor`](super::random_tensor). A name begins with `product`, `convolution`, `integer`, `sum` or `gate`.
pub fn contraction_graphs() -> Vec<(String, Graph)> {
    let graphs = products().into_iter().chain(convolutions()).chain(sums()).chain([integers(), gate(), gate_backward()]);
    graphs.map(|(name, graph)| (name.clone(), graph.unwrap_or_else(|e| panic!("{name} is wrong: {e}")))).collect()
}

type Named = (String, Result<Graph, GraphError>);

fn products() -> Vec<Named> {
    let shapes = [
        (1, 1, 37, 41),
        (1, 37, 1, 300),
        (3, 2, 130, 70),
        (1, 3, 5, 1030),
        (1, 130, 131, 33),
        (2, 17, 33, 65),
        (1, 64, 64, 16),
        (1, 5, 7, 500),
        (1, 257, 40, 20),
        (2, 6, 130, 19),
    ];
    let layouts = [(true, true), (true, false), (false, true), (false, false)];
    let all = shapes.into_iter().flat_map(|shape| layouts.into_iter().map(move |layout| (shape, layout)));
    all.map(|((batch, m, n, k), (lhs, rhs))| {
        (format!("product {batch} x {m} x {n} x {k}, {lhs} {rhs}"), product(batch, m, n, k, lhs, rhs))
    })
    .collect()
}

/// A product of matrices, each transposed or not, with a batch, a bias, a residual and an activation around it.
fn product(batch: usize, m: usize, n: usize, k: usize, lhs_k_last: bool, rhs_k_last: bool) -> Result<Graph, GraphError> {
    let shape = |free: usize, k_last: bool| if k_last { [batch, free, k] } else { [batch, k, free] };
    let inputs = [&shape(m, lhs_k_last)[..], &shape(n, rhs_k_last), &[n], &[batch, m, n]].map(f32s);
    let axis = |k_last: bool| vec![if k_last { 2 } else { 1 }];
    graph_of(&inputs, |g, x| {
        let (lhs_contract, rhs_contract) = (axis(lhs_k_last), axis(rhs_k_last));
        let dims = DotDims { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract, rhs_contract };
        let dot = g.push(Op::Dot(dims), &x[..2])?;
        let bias = g.push(Op::Broadcast { shape: [batch, m, n].into(), axes: vec![2] }, &[x[2]])?;
        let sum = g.add(dot, bias)?;
        let zero = g.constant_like(sum, 0.0)?;
        let relu = g.binary(BinaryOp::Max, sum, zero)?;
        g.output("sum", sum)?;
        g.add(relu, x[3])
    })
}

fn convolutions() -> Vec<Named> {
    // (input, kernel, stride, pads, kernel dilation, input dilation, groups)
    type Case = ([usize; 4], [usize; 4], [usize; 2], [(isize, isize); 2], [usize; 2], [usize; 2], usize);
    let cases: [Case; 5] = [
        ([2, 5, 13, 11], [7, 5, 3, 2], [2, 1], [(1, 2), (0, 1)], [1, 2], [1, 1], 1),
        ([1, 8, 9, 9], [64, 8, 3, 3], [1, 1], [(1, 1), (1, 1)], [1, 1], [1, 1], 1),
        ([1, 6, 7, 8], [9, 2, 3, 3], [1, 2], [(2, -1), (1, 0)], [1, 1], [2, 3], 3),
        ([1, 16, 12, 12], [16, 1, 3, 3], [1, 1], [(1, 1), (1, 1)], [1, 1], [1, 1], 16),
        ([3, 40, 5, 5], [1, 40, 1, 1], [1, 1], [(0, 0), (0, 0)], [1, 1], [1, 1], 1),
    ];
    let graphs = cases.into_iter().enumerate().map(|(i, (x, w, stride, pads, kernel_dilation, input_dilation, groups))| {
        let dims = ConvDims {
            stride: stride.to_vec(),
            pads: pads.to_vec(),
            input_dilation: input_dilation.to_vec(),
            kernel_dilation: kernel_dilation.to_vec(),
            groups,
        };
        (format!("convolution {i}"), graph_of(&[f32s(&x), f32s(&w)], |g, x| g.push(Op::Conv(dims), x)))
    });
    graphs.collect()
}

/// `m x k` by `n x k`
fn rows_by_rows() -> DotDims {
    DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() }
}

fn integers() -> Named {
    let inputs = [&[19, 130], &[23, 130]].map(|shape| typed(DType::I32, shape));
    ("integers".into(), graph_of(&inputs, |g, x| g.push(Op::Dot(rows_by_rows()), x)))
}

/// Products of one shape that are only added up.
fn sums() -> Vec<Named> {
    let cases = [(33, 70, vec![40, 65, 17]), (2, 90, vec![100, 33]), (5, 3, vec![9, 4]), (130, 129, vec![18, 200])];
    let graphs = cases.into_iter().map(|(m, n, ks)| {
        let operands = ks.into_iter().flat_map(|k| [f32s(&[m, k]), f32s(&[n, k])]);
        let inputs: Vec<_> = operands.chain([f32s(&[m, n])]).collect();
        let graph = graph_of(&inputs, |g, x| {
            let (residual, operands) = x.split_last().expect("there are inputs");
            let mut sum = None;
            for pair in operands.chunks(2) {
                let dot = g.push(Op::Dot(rows_by_rows()), pair)?;
                sum = Some(sum.map_or(Ok(dot), |sum| g.add(sum, dot))?);
            }
            g.mul(sum.unwrap_or(*residual), *residual)
        });
        (format!("sum of {m} x {n}"), graph)
    });
    graphs.collect()
}

/// A product and what gates it, in one kernel.
fn gate() -> Named {
    let inputs = [&[70, 96], &[65, 96], &[65, 96]].map(|shape| f32s(shape));
    let graph = graph_of(&inputs, |g, x| {
        let (up, gate) = (g.push(Op::Dot(rows_by_rows()), &[x[0], x[1]])?, g.push(Op::Dot(rows_by_rows()), &[x[0], x[2]])?);
        let gate = g.unary(UnaryOp::Sigmoid, gate)?;
        g.mul(up, gate)
    });
    ("gate".into(), graph)
}

/// The derivatives of what a gate holds back and of the gate, both from one product.
fn gate_backward() -> Named {
    let inputs = [&[70, 96], &[65, 96], &[70, 65], &[70, 65]].map(|shape| f32s(shape));
    let graph = graph_of(&inputs, |g, x| {
        let (cotangent, up) = (g.push(Op::Dot(rows_by_rows()), &[x[0], x[1]])?, x[2]);
        let gate = g.unary(UnaryOp::Sigmoid, x[3])?;
        let of_up = g.mul(cotangent, gate)?;
        g.output("up", of_up)?;
        let of_gate = g.mul(cotangent, up)?;
        let sine = g.unary(UnaryOp::Sin, x[3])?;
        g.mul(of_gate, sine)
    });
    ("gate, backward".into(), graph)
}

/// A graph of one op per choice over pointwise, movement, reducing and contracting ops, which depends on `sizes` and `choices` alone. Some
/// values on the way are outputs besides the last one, and a parameter is updated where a value has its shape.
///
/// A choice holds the op, two operands and an attribute; one that does not fit adds nothing.
pub fn random_graph(sizes: [usize; 2], choices: &[[u8; 4]]) -> Graph {
    let [m, n] = sizes;
    let mut g = Graph::new();
    let mut build = || -> Result<(), GraphError> {
        let mut pool = vec![g.input("x0", f32s(&[m, n]))?, g.input("x1", f32s(&[n, m]))?, g.input("x2", f32s(&[n]))?];
        let info = ParameterInfo { name: "w".into(), ty: f32s(&[m, n]), stored: DType::F32, role: ParameterRole::Weight };
        let parameter = g.parameter(info)?;
        pool.push(parameter);
        for choice in choices {
            let node = grow(&mut g, &pool, *choice)?;
            // Products of products of products leave the range of f32.
            if g.ty(node).shape.numel() <= 4000 && g.ty(node).dtype == DType::F32 {
                let node = if matches!(g.node(node).op, Op::Dot(_) | Op::Binary(BinaryOp::Mul)) {
                    g.unary(UnaryOp::Tanh, node)?
                } else {
                    node
                };
                pool.push(node);
            }
        }
        let made = &pool[3..];
        let replaces = made.iter().rev().find(|&&node| node != parameter && g.ty(node).shape == [m, n].into());
        let kept = made.iter().step_by(4).chain(made.last()).copied().collect::<Vec<_>>();
        if let Some(&node) = replaces {
            g.update(ParameterId(0), node)?;
        }
        for (i, node) in kept.into_iter().enumerate() {
            g.output(format!("y{i}"), node)?;
        }
        Ok(())
    };
    build().unwrap_or_else(|e| panic!("a random graph is wrong: {e}"));
    g
}

/// A node on top of `pool`, or one of the pool.
fn grow(g: &mut Graph, pool: &[NodeId], choice: [u8; 4]) -> Result<NodeId, GraphError> {
    let [kind, first, second, attribute] = choice.map(usize::from);
    let (x, y) = (pool[first % pool.len()], pool[second % pool.len()]);
    let shape = g.ty(x).shape.to_vec();
    let rank = shape.len();
    let rotated: Vec<usize> = (0..rank).map(|axis| (axis + attribute) % rank).collect();
    let reversed: Vec<usize> = shape.iter().rev().copied().collect();
    const FUNCTIONS: [UnaryOp; 6] =
        [UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Tanh, UnaryOp::Sigmoid, UnaryOp::Sin, UnaryOp::Softplus];
    const ARITHMETIC: [BinaryOp; 5] = [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max, BinaryOp::Min];
    const REDUCTIONS: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Max];
    match kind % 16 {
        0 => g.transpose(x, &rotated),
        1 => g.reshape(x, reversed),
        2 if rank < 4 => {
            let wide: Vec<usize> = [3].into_iter().chain(shape).collect();
            g.push(Op::Broadcast { shape: wide.into(), axes: (1..=rank).collect() }, &[x])
        }
        3 | 4 => g.unary(FUNCTIONS[attribute % FUNCTIONS.len()], x),
        5 if rank > 0 => {
            let axes: Vec<usize> = if attribute % 3 == 0 { (0..rank).collect() } else { vec![attribute % rank] };
            g.reduce(REDUCTIONS[attribute % 2], x, &axes)
        }
        6 if rank > 0 && attribute % 2 == 0 => g.mean_keep(x, &[attribute % rank]),
        6 if rank > 0 && shape[0] > 1 => {
            let whole = |size: usize| SliceDim { start: 0, step: 1, size };
            let first = SliceDim { start: shape[0] - 1, step: -1, size: shape[0] - 1 };
            g.push(Op::Slice([first].into_iter().chain(shape[1..].iter().map(|&size| whole(size))).collect()), &[x])
        }
        7 if rank > 0 && g.ty(y).shape == g.ty(x).shape => g.push(Op::Concat { axis: attribute % rank }, &[x, y]),
        13 => g.reshape(x, [shape.iter().product::<usize>()]),
        14 if rank < 4 => g.reshape(x, shape.into_iter().chain([1]).collect::<Vec<_>>()),
        15 if rank > 1 => {
            let (batch, contract) = (attribute % rank, (attribute + 1) % rank);
            let dims = DotDims {
                lhs_batch: vec![batch],
                rhs_batch: vec![batch],
                lhs_contract: vec![contract],
                rhs_contract: vec![contract],
            };
            g.push(Op::Dot(dims), &[x, x])
        }
        8 => g.scale(x, [0.5, -1.0, 0.0, 1.0][attribute % 4]),
        9 if rank > 0 && g.ty(y).shape.rank() > 0 => {
            let (lhs, rhs) = (attribute % rank, attribute / 2 % g.ty(y).shape.rank());
            if shape[lhs] != g.ty(y).shape[rhs] {
                return Ok(x);
            }
            g.push(Op::Dot(DotDims { lhs_contract: vec![lhs], rhs_contract: vec![rhs], ..DotDims::default() }), &[x, y])
        }
        10 => {
            let zero = g.constant_like(x, 0.25)?;
            let above = g.compare(CompareOp::Gt, x, zero)?;
            g.select(above, x, zero)
        }
        _ if g.ty(y).shape == g.ty(x).shape => g.binary(ARITHMETIC[attribute % ARITHMETIC.len()], x, y),
        _ => Ok(x),
    }
}
