//! One element of an axis is marked.

use meganeura_ir::{ArgOp, CompareOp, DType, NodeId, Op, Shape};

use super::indexing::position;
use super::movement::slice_axis;
use super::{Row, Rule, row};
use crate::context::{self, Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Hardmax",               1..=1, &[],     Rule::One(hardmax)),
    row("OneHot",                3..=3, &[1],    Rule::One(one_hot)),
];

/// 1 at the first of the largest elements: along one axis from opset 13 on; before, along all axes from `axis` on, taken as one.
pub(super) fn hardmax(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int_or("axis", if c.opset < 13 { 1 } else { -1 })?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let rank = shape.rank();
    let axis = if c.opset < 13 && axis == rank as i64 { rank } else { context::axis(axis, rank)? };
    if shape.numel() == 0 {
        return Ok(x);
    }
    let (rows, axis) = if c.opset < 13 {
        let rows = [shape[..axis].iter().product::<usize>(), shape[axis..].iter().product()];
        (c.reshape(x, rows)?, 1)
    } else {
        (x, axis)
    };
    let grid = c.shape(rows);
    let first = c.push(Op::ArgReduce { op: ArgOp::Max, axis }, &[rows])?;
    let first = c.broadcast_without(first, &grid, &[axis])?;
    let here = position(c, DType::I64, &grid, axis)?;
    let mark = c.compare(CompareOp::Eq, here, first)?;
    let dtype = c.ty(x).dtype;
    let y = c.cast(mark, dtype)?;
    Ok(c.reshape(y, shape)?)
}

/// `values[1]` where the position on the new axis equals the index (negative ones count from the end), `values[0]` elsewhere;
/// an index out of range marks nothing.
pub(super) fn one_hot(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int_or("axis", -1)?;
    let depth = c.known_scalar(1)?.ok_or(OpError::MissingInput(1))?;
    if depth.fract() != 0.0 {
        return Err(OpError::Attribute { name: "depth", value: depth.to_string(), reason: "it is a whole number" });
    }
    let depth = extent("depth", depth as i64)?;
    let (indices, values) = (c.input(0)?, c.input(2)?);
    if c.ty(indices).dtype == DType::Bool {
        return Err(c.operand_error(0, "indices are numbers"));
    }
    if *c.shape(values) != [2] {
        return Err(c.operand_error(2, "two elements are needed, off and on"));
    }
    let positions = c.shape(indices);
    let axis = context::axis(axis, positions.rank() + 1)?;
    let mut sizes = positions.to_vec();
    sizes.insert(axis, depth);
    let grid = Shape::from(sizes);
    let dtype = match c.ty(indices).dtype {
        unsigned @ (DType::U32 | DType::U64) => unsigned,
        // Narrow integers may not hold the depth.
        _ => DType::I64,
    };
    let mut indices = c.cast(indices, dtype)?;
    if dtype == DType::I64 {
        let zero = c.constant_like(indices, 0.0)?;
        let negative = c.compare(CompareOp::Lt, indices, zero)?;
        let moved = c.shift(indices, depth as f64)?;
        indices = c.select(negative, moved, indices)?;
    }
    let indices = c.broadcast_without(indices, &grid, &[axis])?;
    let here = position(c, dtype, &grid, axis)?;
    let on = c.compare(CompareOp::Eq, here, indices)?;
    let value = |c: &mut Context, i| -> Result<NodeId, OpError> {
        let one = slice_axis(c, values, 0, i, 1)?;
        let scalar = c.reshape(one, Shape::scalar())?;
        Ok(c.broadcast_to(scalar, &grid)?)
    };
    let (off_value, on_value) = (value(c, 0)?, value(c, 1)?);
    Ok(c.select(on, on_value, off_value)?)
}
