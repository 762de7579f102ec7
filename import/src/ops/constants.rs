//! Nodes that make tensors from nothing but settings.

use meganeura_ir::{CompareOp, DType, NodeId, Op, Shape, Tensor, TensorType};

use super::{Row, Rule, row};
use crate::context::{Context, extent};
use crate::error::OpError;
use crate::tensor::{self, TensorError, arithmetic};

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Constant",              0..=0, &[],     Rule::One(constant)),
    row("ConstantOfShape",       1..=1, &[0],    Rule::One(constant_of_shape)),
    row("EyeLike",               1..=1, &[],     Rule::One(eye_like)),
    row("Range",                 3..=3, &[0, 1, 2], Rule::One(range)),
];

pub(super) fn constant(c: &mut Context) -> Result<NodeId, OpError> {
    let tensor = if let Some(tensor) = c.tensor("value")? {
        tensor.cast_finite(arithmetic(tensor.dtype())).map_err(TensorError::from)?
    } else if let Some(value) = c.float("value_float")? {
        Tensor::scalar_f32(value as f32)
    } else if let Some(values) = c.floats("value_floats")? {
        Tensor::from_f32([values.len()], values)
    } else if let Some(value) = c.int("value_int")? {
        Tensor::from_i64(DType::I64, Shape::scalar(), &[value])
    } else if let Some(values) = c.ints("value_ints")? {
        Tensor::from_i64(DType::I64, [values.len()], values)
    } else {
        return Err(OpError::unsupported("a constant of strings or of sparse values"));
    };
    c.constant_tensor(tensor)
}

/// A shape that operand `index` gives.
pub(super) fn shape_operand(c: &mut Context, index: usize) -> Result<Shape, OpError> {
    let sizes = c.known_ints(index)?.ok_or(OpError::MissingInput(index))?;
    sizes.into_iter().map(|d| extent("shape", d)).collect()
}

pub(super) fn constant_of_shape(c: &mut Context) -> Result<NodeId, OpError> {
    let value = c.tensor("value")?.unwrap_or_else(|| Tensor::scalar_f32(0.0));
    let shape = shape_operand(c, 0)?;
    let value = value.cast_finite(arithmetic(value.dtype())).map_err(TensorError::from)?;
    let scalar = value.reshaped(Shape::scalar()).map_err(|e| OpError::Attribute {
        name: "value",
        value: e.ty.to_string(),
        reason: "one element is needed",
    })?;
    let scalar = c.constant_tensor(scalar)?;
    Ok(c.broadcast_to(scalar, &shape)?)
}

/// Ones on diagonal `k` of a matrix of the operand's shape.
pub(super) fn eye_like(c: &mut Context) -> Result<NodeId, OpError> {
    let (dtype, k) = (c.int("dtype")?, c.int_or("k", 0)?);
    let x = c.input(0)?;
    let ty = c.ty(x).clone();
    let dtype = match dtype {
        Some(number) => arithmetic(tensor::dtype(i32::try_from(number).unwrap_or(0))?),
        None => ty.dtype,
    };
    if ty.shape.rank() != 2 {
        return Err(c.operand_error(0, "a matrix is needed"));
    }
    let on = diagonal(c, &ty.shape, k, CompareOp::Eq)?;
    Ok(c.cast(on, dtype)?)
}

/// Whether `column - row` compares with `k`, over the last two axes of `shape`.
pub(super) fn diagonal(c: &mut Context, shape: &Shape, k: i64, op: CompareOp) -> Result<NodeId, OpError> {
    let rank = shape.rank();
    let iota = |axis| Op::Iota { dtype: DType::I32, shape: shape.clone(), axis };
    // Offsets beyond the matrix act alike; within 32 bits they are exact.
    let k = k.clamp(-(1 << 30), 1 << 30);
    let row = c.push(iota(rank - 2), &[])?;
    let column = c.push(iota(rank - 1), &[])?;
    let offset = c.sub(column, row)?;
    let k = c.constant_like(offset, k as f64)?;
    Ok(c.compare(op, offset, k)?)
}

/// `start, start + delta, ..`, up to `limit` without it.
pub(super) fn range(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let dtype = c.ty(x).dtype;
    let count = if dtype.is_float() {
        let [start, limit, delta] = [0, 1, 2].map(|i| c.known_scalar(i));
        let (start, limit, delta) = (start?.unwrap_or(0.0), limit?.unwrap_or(0.0), delta?.unwrap_or(1.0));
        let count = ((limit - start) / delta).ceil();
        if delta == 0.0 || !count.is_finite() {
            return Err(c.operand_error(2, "the range never ends"));
        }
        extent("count", count.max(0.0) as i64)?
    } else {
        let [start, limit, delta] = [0, 1, 2].map(|i| c.known_ints(i));
        let one = |values: Option<Vec<i64>>| values.and_then(|v| <[i64; 1]>::try_from(v).ok()).map(|[v]| i128::from(v));
        let (Some(start), Some(limit), Some(delta)) = (one(start?), one(limit?), one(delta?)) else {
            return Err(c.operand_error(0, "one element each is needed"));
        };
        if delta == 0 {
            return Err(c.operand_error(2, "the range never ends"));
        }
        let distance = (limit - start) * delta.signum();
        let count = if distance <= 0 { 0 } else { (distance + delta.abs() - 1) / delta.abs() };
        extent("count", i64::try_from(count).unwrap_or(i64::MAX))?
    };
    let ty = TensorType::new(dtype, [count]);
    let iota = c.push(Op::Iota { dtype, shape: ty.shape.clone(), axis: 0 }, &[])?;
    let (start, delta) = (c.input(0)?, c.input(2)?);
    let start = c.reshape(start, Shape::scalar())?;
    let delta = c.reshape(delta, Shape::scalar())?;
    let start = c.broadcast_to(start, &ty.shape)?;
    let delta = c.broadcast_to(delta, &ty.shape)?;
    let offset = c.mul(iota, delta)?;
    Ok(c.add(start, offset)?)
}
