//! Writing elements to computed positions.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, ReduceOp, ScatterOp, Shape, Tensor, reduce_identity};

use super::indexing::{linear_rows, normalized, position};
use super::movement::slice_axis;
use super::{Row, Rule, row};
use crate::context::{self, Context, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Scatter",               3..=3, &[],     Rule::One(scatter_elements)),
    row("ScatterElements",       3..=3, &[],     Rule::One(scatter_elements)),
    row("ScatterND",             3..=3, &[],     Rule::One(scatter_nd)),
];

const REDUCTIONS: [(&str, ScatterOp); 5] = [
    ("none", ScatterOp::Set),
    ("add", ScatterOp::Add),
    ("mul", ScatterOp::Mul),
    ("max", ScatterOp::Max),
    ("min", ScatterOp::Min),
];

/// The attribute `reduction`.
fn reduction(c: &Context) -> Result<ScatterOp, OpError> {
    let value = c.string_or("reduction", "none")?;
    let Some((_, op)) = REDUCTIONS.iter().find(|(name, _)| *name == value) else {
        let reason = "it is none, add, mul, max or min";
        return Err(OpError::Attribute { name: "reduction", value: value.to_owned(), reason });
    };
    let x = c.input(0)?;
    if *op != ScatterOp::Set && c.ty(x).dtype == DType::Bool {
        return Err(c.operand_error(0, "booleans are only replaced, not reduced"));
    }
    Ok(*op)
}

/// `x` with `updates[i.., j, k..]` combined into `x[i.., indices[i.., j, k..], k..]`, the index on `axis`.
pub(super) fn scatter_elements(c: &mut Context) -> Result<NodeId, OpError> {
    let (op, axis) = (reduction(c)?, c.int_or("axis", 0)?);
    let (x, indices, updates) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let (full, shape) = (c.shape(x), c.shape(indices));
    let axis = context::axis(axis, full.rank())?;
    if shape.rank() != full.rank() || (0..shape.rank()).any(|a| a != axis && shape[a] > full[a]) {
        return Err(c.operand_error(1, "the indices do not fit the data"));
    }
    if c.shape(updates) != shape {
        return Err(c.operand_error(2, "one update per index is needed"));
    }
    let indices = normalized(c, indices, full[axis])?;
    if shape.numel() == 0 {
        return Ok(x);
    }
    // Indices may cover the first elements of the other axes only.
    let mut covered = shape.to_vec();
    covered[axis] = full[axis];
    let mut part = x;
    for (other, &size) in covered.iter().enumerate() {
        part = slice_axis(c, part, other, 0, size)?;
    }
    let (lead, trail) = (shape[..axis].iter().product::<usize>(), shape[axis + 1..].iter().product::<usize>());
    let part = c.reshape(part, [lead, full[axis], trail])?;
    let indices = c.reshape(indices, [lead, shape[axis], trail])?;
    let updates = c.reshape(updates, [lead, shape[axis], trail])?;
    let combined = scatter_along(c, op, part, indices, updates)?;
    let mut y = c.reshape(combined, covered.as_slice())?;
    for other in 0..full.rank() {
        if covered[other] == full[other] {
            continue;
        }
        let mut rest = slice_axis(c, x, other, covered[other], full[other] - covered[other])?;
        for (a, &size) in covered.iter().enumerate().filter(|(a, _)| *a != other) {
            rest = slice_axis(c, rest, a, 0, size)?;
        }
        y = c.push(Op::Concat { axis: other }, &[y, rest])?;
        covered[other] = full[other];
    }
    Ok(y)
}

/// `updates: [lead, j, trail]` combined into `x: [lead, n, trail]` at the positions along axis 1 that `indices` names.
///
/// Every element looks at the updates of its own line only: lines times `n` times `j` comparisons.
fn scatter_along(c: &mut Context, op: ScatterOp, x: NodeId, indices: NodeId, updates: NodeId) -> Result<NodeId, OpError> {
    let (target, source) = (c.shape(x), c.shape(indices));
    let dtype = c.ty(x).dtype;
    if target[0] == 1 && target[2] == 1 {
        let [line, indices, updates] =
            [c.reshape(x, [target[1]])?, c.reshape(indices, [source[1]])?, c.reshape(updates, [source[1]])?];
        let y = c.push(Op::Scatter { op, axis: 0 }, &[line, indices, updates])?;
        return Ok(c.reshape(y, target)?);
    }
    let grid = Shape::from([target[0], target[1], source[1], target[2]]);
    let here = position(c, c.ty(indices).dtype, &grid, 1)?;
    let indices = c.broadcast_without(indices, &grid, &[1])?;
    let updates = c.broadcast_without(updates, &grid, &[1])?;
    let hit = c.compare(CompareOp::Eq, indices, here)?;
    let (reduce, combine) = match op {
        ScatterOp::Set => return last_update(c, x, hit, updates),
        ScatterOp::Add => (ReduceOp::Sum, BinaryOp::Add),
        ScatterOp::Mul => (ReduceOp::Prod, BinaryOp::Mul),
        ScatterOp::Max => (ReduceOp::Max, BinaryOp::Max),
        ScatterOp::Min => (ReduceOp::Min, BinaryOp::Min),
    };
    let identity = c.constant_tensor(reduce_identity(reduce, dtype))?;
    let identity = c.broadcast_to(identity, &grid)?;
    let updates = c.select(hit, updates, identity)?;
    let reduced = c.reduce(reduce, updates, &[2])?;
    Ok(c.binary(combine, x, reduced)?)
}

/// `x: [lead, n, trail]`, or the last of `updates: [lead, n, j, trail]` that hits.
fn last_update(c: &mut Context, x: NodeId, hit: NodeId, updates: NodeId) -> Result<NodeId, OpError> {
    let grid = c.shape(hit);
    let order = position(c, DType::I32, &grid, 2)?;
    let nobody = c.constant_like(order, -1.0)?;
    let order_of_hits = c.select(hit, order, nobody)?;
    let last = c.reduce(ReduceOp::Max, order_of_hits, &[2])?;
    let repeated = c.broadcast_without(last, &grid, &[2])?;
    let wins = c.compare(CompareOp::Eq, order, repeated)?;
    let value = pick(c, wins, updates, &[2])?;
    let zero = c.constant_like(last, 0.0)?;
    let written = c.compare(CompareOp::Ge, last, zero)?;
    Ok(c.select(written, value, x)?)
}

/// The element of `x` where `mask` holds, which it does at most once along `axes`; zero or false where it does not.
pub(super) fn pick(c: &mut Context, mask: NodeId, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    if c.ty(x).dtype == DType::Bool {
        let both = c.binary(BinaryOp::And, mask, x)?;
        return Ok(c.reduce(ReduceOp::Max, both, axes)?);
    }
    let zero = c.constant_like(x, 0.0)?;
    let x = c.select(mask, x, zero)?;
    Ok(c.reduce(ReduceOp::Sum, x, axes)?)
}

/// Each vector along the last axis of the indices names a slice of `x`, which the update of the same position is combined into.
pub(super) fn scatter_nd(c: &mut Context) -> Result<NodeId, OpError> {
    let op = reduction(c)?;
    let (x, indices, updates) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let shape = c.shape(x);
    let (rows, indexed) = linear_rows(c, indices, &shape, 0)?;
    let positions = c.shape(rows);
    let expected: Shape = positions.iter().chain(&shape[indexed..]).copied().collect();
    if c.shape(updates) != expected {
        return Err(c.operand_error(2, "one slice of the data per index is needed"));
    }
    if expected.numel() == 0 {
        return Ok(x);
    }
    let inner = &shape[indexed..];
    let flat = |rows: usize| [rows].into_iter().chain(inner.iter().copied()).collect::<Shape>();
    let target = c.reshape(x, flat(shape[..indexed].iter().product()))?;
    let updates = c.reshape(updates, flat(positions.numel()))?;
    if let (ScatterOp::Set, Some(known)) = (op, c.known(rows)) {
        let y = replace_rows(c, target, &known.to_i64_vec(), updates)?;
        return Ok(c.reshape(y, shape)?);
    }
    let rows = c.reshape(rows, [positions.numel()])?;
    let y = c.push(Op::Scatter { op, axis: 0 }, &[target, rows, updates])?;
    Ok(c.reshape(y, shape)?)
}

/// `x` with `updates[i]` in the row `rows[i]`; the last of equal ones wins. Each row knows its source, so that nothing is searched.
fn replace_rows(c: &mut Context, x: NodeId, rows: &[i64], updates: NodeId) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let mut source = vec![None; table_size(shape[0])?];
    for (i, &row) in rows.iter().enumerate() {
        source[row as usize] = Some(i as i64);
    }
    let replaced: Vec<i64> = source.iter().map(|s| s.is_some().into()).collect();
    let source: Vec<i64> = source.into_iter().map(|s| s.unwrap_or(0)).collect();
    let source = c.constant_tensor(Tensor::from_i64(DType::I64, [source.len()], &source))?;
    let replaced = c.constant_tensor(Tensor::from_i64(DType::Bool, [replaced.len()], &replaced))?;
    let updates = c.push(Op::Gather { axis: 0 }, &[updates, source])?;
    let replaced = c.push(Op::Broadcast { shape, axes: vec![0] }, &[replaced])?;
    Ok(c.select(replaced, updates, x)?)
}
