//! Reading elements at computed positions.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, Shape, Tensor, TensorType};

use super::movement;
use super::{Row, Rule, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Gather",                2..=2, &[],     Rule::One(gather)),
    row("GatherElements",        2..=2, &[],     Rule::One(gather_elements)),
    row("GatherND",              2..=2, &[],     Rule::One(gather_nd)),
];

/// An index into an axis of `size`; negative ones count from the end.
fn in_range(index: i64, size: usize) -> Result<usize, OpError> {
    let n = size as i64;
    if (-n..n).contains(&index) { Ok(index.rem_euclid(n) as usize) } else { Err(OpError::Index { index, size }) }
}

/// Indices with negative ones counted from the end of an axis of `size`. Known ones are checked.
pub(super) fn normalized(c: &mut Context, indices: NodeId, size: usize) -> Result<NodeId, OpError> {
    if !c.ty(indices).dtype.is_int() {
        return Err(c.operand_error(1, "indices are integers"));
    }
    if size == 0 && c.shape(indices).numel() > 0 {
        return Err(c.operand_error(1, "an empty axis has nothing to index"));
    }
    if let Some(known) = c.known(indices) {
        let values = known.to_i64_vec().into_iter().map(|i| Ok(in_range(i, size)? as i64));
        let values: Vec<i64> = values.collect::<Result<_, OpError>>()?;
        return c.constant_tensor(Tensor::from_i64(known.dtype(), known.shape().clone(), &values));
    }
    if matches!(c.ty(indices).dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64) {
        return Ok(indices);
    }
    let zero = c.constant_like(indices, 0.0)?;
    let negative = c.compare(CompareOp::Lt, indices, zero)?;
    let moved = c.shift(indices, size as f64)?;
    Ok(c.select(negative, moved, indices)?)
}

/// `out[a.., i.., b..] = x[a.., indices[i..], b..]`
pub(super) fn gather(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int_or("axis", 0)?;
    let (x, indices) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    let axis = context::axis(axis, shape.rank())?;
    let indices = normalized(c, indices, shape[axis])?;
    // One known position is a slice: a movement, whose derivative is one too.
    if let Some(index) = c.known(indices).filter(|i| i.shape().numel() == 1) {
        let result = meganeura_ir::gathered_shape(&shape, index.shape(), axis);
        let start = index.to_i64_vec()[0] as usize;
        let part = movement::slice_axis(c, x, axis, start, 1)?;
        return Ok(c.reshape(part, result)?);
    }
    Ok(c.push(Op::Gather { axis }, &[x, indices])?)
}

/// `i * stride`, in i64.
pub(super) fn scaled(c: &mut Context, indices: NodeId, stride: usize) -> Result<NodeId, OpError> {
    let indices = c.cast(indices, DType::I64)?;
    if stride == 1 { Ok(indices) } else { Ok(c.scale(indices, stride as f64)?) }
}

/// The position along `axis`, at every element of `shape`.
pub(super) fn position(c: &mut Context, dtype: DType, shape: &Shape, axis: usize) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Iota { dtype, shape: shape.clone(), axis }, &[])?)
}

/// `linear + i_axis * stride` over the positions of `shape`.
pub(super) fn add_position(
    c: &mut Context,
    linear: NodeId,
    shape: &Shape,
    axis: usize,
    stride: usize,
) -> Result<NodeId, OpError> {
    let position = position(c, DType::I64, shape, axis)?;
    let offset = scaled(c, position, stride)?;
    Ok(c.add(linear, offset)?)
}

/// `out[i.., j, k..] = x[i.., indices[i.., j, k..], k..]`, the index on `axis`.
pub(super) fn gather_elements(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int_or("axis", 0)?;
    let (x, indices) = (c.input(0)?, c.input(1)?);
    let (from, shape) = (c.shape(x), c.shape(indices));
    let axis = context::axis(axis, from.rank())?;
    if shape.rank() != from.rank() || (0..shape.rank()).any(|a| a != axis && shape[a] > from[a]) {
        return Err(c.operand_error(1, "the indices do not fit the data"));
    }
    let strides = from.strides();
    let indices = normalized(c, indices, from[axis])?;
    let mut linear = scaled(c, indices, strides[axis])?;
    for other in (0..shape.rank()).filter(|&a| a != axis) {
        linear = add_position(c, linear, &shape, other, strides[other])?;
    }
    let flat = c.reshape(x, [from.numel()])?;
    Ok(c.push(Op::Gather { axis: 0 }, &[flat, linear])?)
}

/// Each vector along the last axis of the indices names a slice of the data, within the batch of the first `batch_dims` axes.
pub(super) fn gather_nd(c: &mut Context) -> Result<NodeId, OpError> {
    let batch = c.int_or("batch_dims", 0)?;
    let (x, indices) = (c.input(0)?, c.input(1)?);
    let from = c.shape(x);
    let batch = usize::try_from(batch).unwrap_or(usize::MAX);
    let (linear, indexed) = linear_rows(c, indices, &from, batch)?;
    let rows: Shape = [from[..indexed].iter().product()].into_iter().chain(from[indexed..].iter().copied()).collect();
    let rows = c.reshape(x, rows)?;
    Ok(c.push(Op::Gather { axis: 0 }, &[rows, linear])?)
}

/// For vectors of indices along the last axis of `indices` (operand 1), which name slices of a tensor of shape `from` within the
/// batch of its first `batch` axes: the positions of these slices when the indexed axes are taken as one, and the number of
/// these axes, batch included.
pub(super) fn linear_rows(c: &mut Context, indices: NodeId, from: &Shape, batch: usize) -> Result<(NodeId, usize), OpError> {
    let shape = c.shape(indices);
    let Some((&width, positions)) = shape.split_last() else {
        return Err(c.operand_error(1, "at least one axis is needed"));
    };
    let indexed = batch.saturating_add(width);
    if indexed > from.rank() || batch > positions.len() || from[..batch] != positions[..batch] {
        return Err(c.operand_error(1, "the indices do not fit the data"));
    }
    let positions = Shape::from(positions);
    let strides = Shape::from(&from[..indexed]).strides();
    if let Some(known) = c.known(indices) {
        let known = known.to_i64_vec();
        let row = |p: usize| -> Result<i64, OpError> {
            let within = positions.unravel(p).into_iter().zip(&strides[..batch]).map(|(i, stride)| i * stride).sum::<usize>();
            let vector = known[p * width..(p + 1) * width].iter().zip(&from[batch..]).zip(&strides[batch..]);
            let each = vector.map(|((&index, &size), &stride)| Ok(in_range(index, size)? * stride));
            Ok((within + each.sum::<Result<usize, OpError>>()?) as i64)
        };
        let rows: Vec<i64> = (0..positions.numel()).map(row).collect::<Result<_, _>>()?;
        return Ok((c.constant_tensor(Tensor::from_i64(DType::I64, positions.clone(), &rows))?, indexed));
    }
    let mut linear = c.splat(&TensorType::new(DType::I64, positions.clone()), 0.0)?;
    for (axis, &stride) in strides[..batch].iter().enumerate() {
        linear = add_position(c, linear, &positions, axis, stride)?;
    }
    for k in 0..width {
        let column = movement::slice_axis(c, indices, positions.rank(), k, 1)?;
        let column = c.reshape(column, positions.clone())?;
        let column = normalized(c, column, from[batch + k])?;
        let offset = scaled(c, column, strides[batch + k])?;
        linear = c.binary(BinaryOp::Add, linear, offset)?;
    }
    Ok((linear, indexed))
}
