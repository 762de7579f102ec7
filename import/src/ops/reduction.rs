//! Reductions over axes.

use meganeura_ir::{ArgOp, NodeId, Op, ReduceOp, Shape, UnaryOp};

use super::movement;
use super::{Row, Rule, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("ArgMax",                1..=1, &[],     Rule::Arg(ArgOp::Max)),
    row("ArgMin",                1..=1, &[],     Rule::Arg(ArgOp::Min)),
    row("ReduceL1",              1..=2, &[1],    Rule::Reduce(l1)),
    row("ReduceL2",              1..=2, &[1],    Rule::Reduce(l2)),
    row("ReduceLogSum",          1..=2, &[1],    Rule::Reduce(log_sum)),
    row("ReduceLogSumExp",       1..=2, &[1],    Rule::Reduce(log_sum_exp)),
    row("ReduceMax",             1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Max, x, axes)?))),
    row("ReduceMean",            1..=2, &[1],    Rule::Reduce(mean)),
    row("ReduceMin",             1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Min, x, axes)?))),
    row("ReduceProd",            1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Prod, x, axes)?))),
    row("ReduceSum",             1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Sum, x, axes)?))),
    row("ReduceSumSquare",       1..=2, &[1],    Rule::Reduce(sum_square)),
];

/// Reduces an operand over sorted axes, which disappear.
pub(super) type Reduction = fn(&mut Context, NodeId, &[usize]) -> Result<NodeId, OpError>;

/// The shape of `shape` with `axes` reduced to size 1.
fn kept(shape: &Shape, axes: &[usize]) -> Shape {
    shape.iter().enumerate().map(|(a, &d)| if axes.contains(&a) { 1 } else { d }).collect()
}

/// Axes are an attribute before opset 18 (`ReduceSum`: 13) and an operand from then on; none means all.
pub(super) fn lower(c: &mut Context, reduce: Reduction) -> Result<NodeId, OpError> {
    let keep = c.flag("keepdims", true)?;
    let empty_is_noop = c.flag("noop_with_empty_axes", false)?;
    let axes = match c.ints("axes")? {
        Some(axes) => Some(axes.to_vec()),
        None => c.known_ints(1)?,
    };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axes = match axes {
        Some(axes) if !axes.is_empty() => c.axes(&axes, shape.rank())?,
        _ if empty_is_noop => return Ok(x),
        _ => (0..shape.rank()).collect(),
    };
    let y = reduce(c, x, &axes)?;
    if keep { Ok(c.reshape(y, kept(&shape, &axes))?) } else { Ok(y) }
}

pub(super) fn l1(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    let x = c.unary(UnaryOp::Abs, x)?;
    Ok(c.reduce(ReduceOp::Sum, x, axes)?)
}

pub(super) fn l2(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    let y = sum_square(c, x, axes)?;
    Ok(c.unary(UnaryOp::Sqrt, y)?)
}

pub(super) fn sum_square(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    let x = c.mul(x, x)?;
    Ok(c.reduce(ReduceOp::Sum, x, axes)?)
}

pub(super) fn log_sum(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    let y = c.reduce(ReduceOp::Sum, x, axes)?;
    Ok(c.unary(UnaryOp::Log, y)?)
}

/// `max + log(sum(exp(x - max)))`, with an infinite maximum left out.
pub(super) fn log_sum_exp(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    let max = c.reduce(ReduceOp::Max, x, axes)?;
    let infinite = c.unary(UnaryOp::IsInf, max)?;
    let zero = c.constant_like(max, 0.0)?;
    let max = c.select(infinite, zero, max)?;
    let shape = c.shape(x);
    let repeated = c.broadcast_without(max, &shape, axes)?;
    let shifted = c.sub(x, repeated)?;
    let exponentials = c.unary(UnaryOp::Exp, shifted)?;
    let log = log_sum(c, exponentials, axes)?;
    Ok(c.add(log, max)?)
}

pub(super) fn mean(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    if c.ty(x).dtype.is_float() {
        return Ok(c.mean(x, axes)?);
    }
    let shape = c.shape(x);
    let count: usize = axes.iter().map(|&a| shape[a]).product();
    let sum = c.reduce(ReduceOp::Sum, x, axes)?;
    let count = c.constant_like(sum, count as f64)?;
    Ok(c.div(sum, count)?)
}

pub(super) fn arg(c: &mut Context, op: ArgOp) -> Result<NodeId, OpError> {
    let (axis, keep, last) = (c.int_or("axis", 0)?, c.flag("keepdims", true)?, c.flag("select_last_index", false)?);
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axis = context::axis(axis, shape.rank())?;
    let mut index = if last {
        let reversed = movement::reverse_axes(c, x, &[axis])?;
        let index = c.push(Op::ArgReduce { op, axis }, &[reversed])?;
        let end = c.constant_like(index, shape[axis] as f64 - 1.0)?;
        c.sub(end, index)?
    } else {
        c.push(Op::ArgReduce { op, axis }, &[x])?
    };
    if keep {
        index = c.reshape(index, kept(&shape, &[axis]))?;
    }
    Ok(index)
}
