//! What a node is expected to cost, before schedules are known: memory traffic, arithmetic, and a share of dispatches.
//!
//! Pointwise ops and movement fuse into their neighbours, so they pay for arithmetic only. Contractions, reductions and
//! indexing become kernels: they also pay for the bytes they touch and for a dispatch.

use meganeura_ir::{BinaryOp, Composite, DotDims, Graph, Op, Shape, TensorType, UnaryOp};

/// One floating-point operation of a nominal GPU of 10 TFLOP/s, 0.1 ps: the unit of costs.
const FLOP: u64 = 1;
/// One byte of device memory at 500 GB/s.
const BYTE: u64 = 20;
/// One kernel launch and its barrier, 2 us.
const DISPATCH: u64 = 20_000_000;
/// Any node at all: of two equal graphs, the smaller one is better.
const NODE: u64 = 100;

/// The cost of computing `op` once, on operands of the given types. Unit: a tenth of a picosecond on a nominal GPU.
pub fn node_cost(op: &Op, operands: &[&TensorType], result: &TensorType) -> u64 {
    let elements = result.shape.numel() as u64;
    let kernel = || DISPATCH + BYTE * (bytes(result) + operands.iter().map(|t| bytes(t)).sum::<u64>());
    let read = operands.first().map_or(0, |t| t.shape.numel() as u64);
    let work = match op {
        Op::Input(_) | Op::Parameter(_) | Op::Constant(_) => return 0,
        Op::Iota { .. } => elements,
        Op::RandomUniform { .. } => elements * 256 * FLOP,
        Op::Unary(u) => elements * unary_flops(*u),
        Op::Binary(b) => elements * binary_flops(*b),
        Op::Compare(_) | Op::Select | Op::Cast(_) => elements * FLOP,
        Op::Reshape(_) | Op::Broadcast { .. } | Op::Slice(_) | Op::Unfold(_) => 0,
        // Strided access wastes part of each memory transaction.
        Op::Transpose(_) => elements * 2 * FLOP,
        Op::Pad(_) | Op::Concat { .. } => elements * 2 * FLOP,
        Op::Dot(dims) => kernel() + 2 * elements * FLOP * contracted(dims, operands),
        Op::Conv(_) => kernel() + 2 * elements * FLOP * taps(operands),
        Op::Reduce { .. } | Op::ArgReduce { .. } => kernel() + read * FLOP,
        Op::Fold { .. } | Op::Gather { .. } | Op::Scatter { .. } => kernel(),
        Op::Composite(c) => match c {
            Composite::Gelu | Composite::GeluTanh | Composite::Silu => elements * 16 * FLOP,
            Composite::Relu => elements * FLOP,
            Composite::Attention(_) | Composite::AttentionLse(_) => kernel() + 2 * pairs(operands) * FLOP,
            Composite::AttentionGradient { .. } => kernel() + 4 * pairs(operands) * FLOP,
            _ => kernel() + read * 8 * FLOP,
        },
    };
    NODE + work
}

/// The cost of the nodes that outputs and updates need.
pub fn graph_cost(graph: &Graph) -> u64 {
    let cost = |id| {
        let node = graph.node(id);
        let operands: Vec<&TensorType> = node.operands.iter().map(|&o| graph.ty(o)).collect();
        node_cost(&node.op, &operands, &node.ty)
    };
    graph.live().into_iter().map(cost).sum()
}

/// Of words: what a device stores in less counts as much.
fn bytes(ty: &TensorType) -> u64 {
    4 * ty.shape.numel() as u64
}

fn unary_flops(u: UnaryOp) -> u64 {
    use UnaryOp::*;
    match u {
        Neg | Abs | Sign | Floor | Ceil | Round | Not | IsNan | IsInf => FLOP,
        Sqrt | Rsqrt | Reciprocal => 4 * FLOP,
        _ => 8 * FLOP,
    }
}

fn binary_flops(b: BinaryOp) -> u64 {
    match b {
        BinaryOp::Div | BinaryOp::Rem => 6 * FLOP,
        BinaryOp::Pow => 16 * FLOP,
        _ => FLOP,
    }
}

/// Multiplications of all scores of an attention, and of all weights with values as long as the keys.
fn pairs(operands: &[&TensorType]) -> u64 {
    let [query, key, ..] = operands else { return 0 };
    let rank = key.shape.rank();
    2 * query.shape.numel() as u64 * rank.checked_sub(2).map_or(0, |axis| key.shape[axis] as u64)
}

/// Products per element of a Dot.
fn contracted(dims: &DotDims, operands: &[&TensorType]) -> u64 {
    let size = |shape: &Shape| dims.lhs_contract.iter().map(|&a| shape[a] as u64).product();
    operands.first().map_or(0, |x| size(&x.shape))
}

/// Products per element of a convolution.
fn taps(operands: &[&TensorType]) -> u64 {
    operands.get(1).map_or(0, |w| w.shape.iter().skip(1).map(|&d| d as u64).product())
}
