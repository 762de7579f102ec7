//! Reordering along an axis.

use meganeura_ir::{ArgOp, BinaryOp, CompareOp, DType, NodeId, Op, PadDim, ReduceOp, Shape, UnaryOp, reduce_identity};

use super::indexing::{add_position, position, scaled};
use super::scatter::pick;
use super::{Row, Rule, row};
use crate::context::{self, Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("ReverseSequence",       2..=2, &[],     Rule::One(reverse_sequence)),
    row("TopK",                  1..=2, &[1],    Rule::Many(top_k)),
];

/// Rows up to this length compare all pairs at once.
const BLOCK: usize = 1024;

/// Values and positions of the `k` largest (or smallest) elements along `axis`, best first; of equal ones the first comes first.
/// NaN counts as the largest number.
pub(super) fn top_k(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    c.ignore(&["sorted"]);
    let (axis, largest) = (c.int_or("axis", -1)?, c.flag("largest", true)?);
    let k = if c.opset < 10 {
        vec![c.int("k")?.ok_or(OpError::MissingAttribute("k"))?]
    } else {
        c.known_ints(1)?.ok_or(OpError::MissingInput(1))?
    };
    let &[k] = k.as_slice() else { return Err(c.operand_error(1, "one number is needed")) };
    let x = c.input(0)?;
    if c.ty(x).dtype == DType::Bool {
        return Err(c.operand_error(0, "numbers are needed"));
    }
    let shape = c.shape(x);
    let axis = context::axis(axis, shape.rank())?;
    let (n, wanted) = (shape[axis], extent("k", k)?);
    if wanted > n {
        return Err(OpError::Attribute { name: "k", value: k.to_string(), reason: "the axis has fewer elements" });
    }
    // The axis last, and the others as rows.
    let mut perm: Vec<usize> = (0..shape.rank()).filter(|&a| a != axis).collect();
    perm.push(axis);
    let mut result: Vec<usize> = perm.iter().map(|&a| shape[a]).collect();
    let lead = result[..result.len() - 1].iter().product();
    let last = c.transpose(x, &perm)?;
    let rows = c.reshape(last, [lead, n])?;
    let mut keys = rows;
    if c.ty(rows).dtype.is_float() {
        let nan = c.unary(UnaryOp::IsNan, rows)?;
        let infinity = c.constant_like(rows, f64::INFINITY)?;
        keys = c.select(nan, infinity, rows)?;
    }
    let indices = best(c, keys, wanted, largest)?;
    let values = take_along(c, rows, indices)?;
    result.pop();
    result.push(wanted);
    let inverse: Vec<usize> = (0..perm.len()).map(|a| perm.iter().position(|&p| p == a).unwrap_or(a)).collect();
    [values, indices]
        .into_iter()
        .map(|y| {
            let y = c.reshape(y, result.as_slice())?;
            Ok(c.transpose(y, &inverse)?)
        })
        .collect()
}

/// Positions (i64) of the `k` best of each row of `keys: [rows, n]`.
fn best(c: &mut Context, keys: NodeId, k: usize, largest: bool) -> Result<NodeId, OpError> {
    let (rows, n) = (c.shape(keys)[0], c.shape(keys)[1]);
    if k == 1 {
        let op = if largest { ArgOp::Max } else { ArgOp::Min };
        let first = c.push(Op::ArgReduce { op, axis: 1 }, &[keys])?;
        return Ok(c.reshape(first, [rows, 1])?);
    }
    // A block keeps at most a quarter of its elements.
    let block = BLOCK.max(k.saturating_mul(4));
    if n <= block {
        return ranked(c, keys, k, largest);
    }
    let blocks = n.div_ceil(block);
    let worst = reduce_identity(if largest { ReduceOp::Max } else { ReduceOp::Min }, c.ty(keys).dtype);
    let worst = c.constant_tensor(worst)?;
    let pads = vec![PadDim::default(), PadDim { low: 0, high: blocks * block - n, interior: 0 }];
    let padded = c.push(Op::Pad(pads), &[keys, worst])?;
    let padded = c.reshape(padded, [rows * blocks, block])?;
    let local = ranked(c, padded, k, largest)?;
    let candidates = take_along(c, padded, local)?;
    let candidates = c.reshape(candidates, [rows, blocks * k])?;
    let winners = best(c, candidates, k, largest)?;
    let local = c.reshape(local, [rows, blocks, k])?;
    let positions = add_position(c, local, &Shape::from([rows, blocks, k]), 1, block)?;
    let positions = c.reshape(positions, [rows, blocks * k])?;
    take_along(c, positions, winners)
}

/// As [`best`]: an element's place is the number of elements that come before it.
fn ranked(c: &mut Context, keys: NodeId, k: usize, largest: bool) -> Result<NodeId, OpError> {
    let (rows, n) = (c.shape(keys)[0], c.shape(keys)[1]);
    let pairs = Shape::from([rows, n, n]);
    let own = c.broadcast_without(keys, &pairs, &[2])?;
    let other = c.broadcast_without(keys, &pairs, &[1])?;
    let better = c.compare(if largest { CompareOp::Gt } else { CompareOp::Lt }, other, own)?;
    let equal = c.compare(CompareOp::Eq, other, own)?;
    let (own_position, other_position) = (position(c, DType::I32, &pairs, 1)?, position(c, DType::I32, &pairs, 2)?);
    let earlier = c.compare(CompareOp::Lt, other_position, own_position)?;
    let tied = c.binary(BinaryOp::And, equal, earlier)?;
    let before = c.binary(BinaryOp::Or, better, tied)?;
    let before = c.cast(before, DType::I32)?;
    let rank = c.reduce(ReduceOp::Sum, before, &[2])?;

    let grid = Shape::from([rows, k, n]);
    let rank = c.broadcast_without(rank, &grid, &[1])?;
    let place = position(c, DType::I32, &grid, 1)?;
    let placed = c.compare(CompareOp::Eq, rank, place)?;
    let positions = position(c, DType::I64, &grid, 2)?;
    pick(c, placed, positions, &[2])
}

/// `x[row, indices[row, i]]`
fn take_along(c: &mut Context, x: NodeId, indices: NodeId) -> Result<NodeId, OpError> {
    let (rows, n, k) = (c.shape(x)[0], c.shape(x)[1], c.shape(indices)[1]);
    let grid = Shape::from([rows, k, n]);
    let x = c.broadcast_without(x, &grid, &[1])?;
    let indices = c.broadcast_without(indices, &grid, &[2])?;
    let positions = position(c, DType::I64, &grid, 2)?;
    let chosen = c.compare(CompareOp::Eq, positions, indices)?;
    pick(c, chosen, x, &[2])
}

/// Reverses the first `lengths[b]` elements of the time axis in each batch `b`; the others stay.
pub(super) fn reverse_sequence(c: &mut Context) -> Result<NodeId, OpError> {
    let (batch_axis, time_axis) = (c.int_or("batch_axis", 1)?, c.int_or("time_axis", 0)?);
    let (x, lengths) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    let (batch, time) = match (batch_axis, time_axis) {
        (0, 1) | (1, 0) => (batch_axis as usize, time_axis as usize),
        _ => {
            let value = format!("{time_axis} with batch_axis = {batch_axis}");
            return Err(OpError::Attribute { name: "time_axis", value, reason: "one is axis 0, the other axis 1" });
        }
    };
    if shape.rank() < 2 {
        return Err(c.operand_error(0, "at least two axes are needed"));
    }
    if *c.shape(lengths) != [shape[batch]] || !c.ty(lengths).dtype.is_int() {
        return Err(c.operand_error(1, "one length per batch is needed"));
    }
    if let Some(known) = c.known(lengths)
        && let Some(&index) = known.to_i64_vec().iter().find(|l| !(0..=shape[time] as i64).contains(l))
    {
        return Err(OpError::Index { index, size: shape[time] });
    }
    if shape.numel() == 0 {
        return Ok(x);
    }
    let grid = Shape::from(&shape[..2]);
    let lengths = c.cast(lengths, DType::I64)?;
    let lengths = c.push(Op::Broadcast { shape: grid.clone(), axes: vec![batch] }, &[lengths])?;
    let step = position(c, DType::I64, &grid, time)?;
    let inside = c.compare(CompareOp::Lt, step, lengths)?;
    let last = c.shift(lengths, -1.0)?;
    let mirrored = c.sub(last, step)?;
    let source = c.select(inside, mirrored, step)?;
    let strides = grid.strides();
    let source = scaled(c, source, strides[time])?;
    let source = add_position(c, source, &grid, batch, strides[batch])?;
    let steps: Shape = [grid.numel()].into_iter().chain(shape[2..].iter().copied()).collect();
    let steps = c.reshape(x, steps)?;
    Ok(c.push(Op::Gather { axis: 0 }, &[steps, source])?)
}
