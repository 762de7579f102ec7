//! Operators of `ai.onnx.ml` on numbers.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, ReduceOp, Shape, Tensor, UnaryOp};

use super::indexing::{normalized, position};
use super::{Row, Rule, row};
use crate::context::{Context, table_size};
use crate::error::OpError;
use crate::tensor::arithmetic;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    ml("ArrayFeatureExtractor",  2, Rule::One(array_feature_extractor)),
    ml("Binarizer",              1, Rule::One(binarizer)),
    ml("LabelEncoder",           1, Rule::One(label_encoder)),
];

pub(super) const fn ml(op: &'static str, inputs: usize, rule: Rule) -> Row {
    Row { domain: "ai.onnx.ml", ..row(op, inputs..=inputs, &[], rule) }
}

/// The elements of the last axis at the given indices.
pub(super) fn array_feature_extractor(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, indices) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    let Some((&size, lead)) = shape.split_last() else {
        return Err(c.operand_error(0, "at least one axis is needed"));
    };
    let count = c.shape(indices).numel();
    let indices = c.reshape(indices, [count])?;
    let indices = normalized(c, indices, size)?;
    let y = c.push(Op::Gather { axis: lead.len() }, &[x, indices])?;
    // A vector counts as one row.
    if lead.is_empty() { Ok(c.reshape(y, [1, count])?) } else { Ok(y) }
}

/// 1 above the threshold, else 0.
pub(super) fn binarizer(c: &mut Context) -> Result<NodeId, OpError> {
    let threshold = c.float_or("threshold", 0.0)?;
    let x = c.input(0)?;
    let dtype = c.ty(x).dtype;
    if dtype == DType::Bool {
        return Err(c.operand_error(0, "numbers are needed"));
    }
    let reals = c.cast(x, DType::F32)?;
    let threshold = c.constant_like(reals, threshold)?;
    let above = c.compare(CompareOp::Gt, reals, threshold)?;
    Ok(c.cast(above, dtype)?)
}

/// The list of attributes `keys_*` or `values_*`, in the dtype of arithmetic; strings are no tensor here.
fn list(c: &Context, [tensor, ints, floats]: [&str; 3]) -> Result<Option<Tensor>, OpError> {
    if let Some(values) = c.tensor(tensor)? {
        return Ok(Some(values.cast(arithmetic(values.dtype()))));
    }
    if let Some(values) = c.ints(ints)? {
        return Ok(Some(Tensor::from_i64(DType::I64, [values.len()], values)));
    }
    Ok(c.floats(floats)?.map(|values| Tensor::from_f32([values.len()], values)))
}

/// The value of the last key that equals the element, or the default. NaN equals NaN.
pub(super) fn label_encoder(c: &mut Context) -> Result<NodeId, OpError> {
    let keys = list(c, ["keys_tensor", "keys_int64s", "keys_floats"])?;
    let values = list(c, ["values_tensor", "values_int64s", "values_floats"])?;
    let (Some(keys), Some(values)) = (keys, values) else {
        return Err(OpError::unsupported("a LabelEncoder from or to strings"));
    };
    let default = match c.tensor("default_tensor")? {
        Some(default) => default.cast(values.dtype()).scalar_f64(),
        None if values.dtype().is_float() => Some(c.float_or("default_float", -0.0)?),
        None => Some(c.int_or("default_int64", -1)? as f64),
    };
    c.ignore(&["default_float", "default_int64", "default_string"]);
    let Some(default) = default else { return Err(OpError::MissingAttribute("default_tensor")) };
    let x = c.input(0)?;
    let (count, ty) = (table_size(keys.shape().numel())?, c.ty(x).clone());
    if keys.dtype() != ty.dtype {
        return Err(c.operand_error(0, "the keys have another type"));
    }
    if values.shape().numel() != count || count == 0 {
        let reason = "one value per key and at least one key are needed";
        return Err(OpError::Attribute { name: "values", value: values.ty().to_string(), reason });
    }
    let flat = Shape::from([ty.shape.numel()]);
    let grid = Shape::from([ty.shape.numel(), count]);
    let x = c.reshape(x, flat.clone())?;
    let x = c.broadcast_without(x, &grid, &[1])?;
    let keys = c.constant_tensor(keys)?;
    let keys = c.reshape(keys, [count])?;
    let keys = c.broadcast_without(keys, &grid, &[0])?;
    let mut hit = c.compare(CompareOp::Eq, x, keys)?;
    if ty.dtype.is_float() {
        let (x, key) = (c.unary(UnaryOp::IsNan, x)?, c.unary(UnaryOp::IsNan, keys)?);
        let both = c.binary(BinaryOp::And, x, key)?;
        hit = c.binary(BinaryOp::Or, hit, both)?;
    }
    let order = position(c, DType::I64, &grid, 1)?;
    let nobody = c.constant_like(order, -1.0)?;
    let order = c.select(hit, order, nobody)?;
    let last = c.reduce(ReduceOp::Max, order, &[1])?;
    let values = c.constant_tensor(values)?;
    let values = c.reshape(values, [count])?;
    let zero = c.constant_like(last, 0.0)?;
    let at = c.binary(BinaryOp::Max, last, zero)?;
    let value = c.push(Op::Gather { axis: 0 }, &[values, at])?;
    let known = c.compare(CompareOp::Ge, last, zero)?;
    let default = c.constant_like(value, default)?;
    let y = c.select(known, value, default)?;
    Ok(c.reshape(y, ty.shape)?)
}
