//! Activations. Where the standard's formula would give `inf * 0` in a derivative, the argument is clamped first.

use meganeura_ir::{BinaryOp, CompareOp, Composite, DType, NodeId, Op, UnaryOp};

use super::{Row, Rule, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Celu",                  1..=1, &[],     Rule::One(celu)),
    row("Clip",                  1..=3, &[1, 2], Rule::One(clip)),
    row("Elu",                   1..=1, &[],     Rule::One(elu)),
    row("Gelu",                  1..=1, &[],     Rule::One(gelu)),
    row("HardSigmoid",           1..=1, &[],     Rule::One(hard_sigmoid)),
    row("HardSwish",             1..=1, &[],     Rule::One(hard_swish)),
    row("LeakyRelu",             1..=1, &[],     Rule::One(leaky_relu)),
    row("LogSoftmax",            1..=1, &[],     Rule::One(log_softmax)),
    row("Mish",                  1..=1, &[],     Rule::One(mish)),
    row("PRelu",                 2..=2, &[],     Rule::One(prelu)),
    row("Relu",                  1..=1, &[],     Rule::Composite(|| Composite::Relu)),
    row("Selu",                  1..=1, &[],     Rule::One(selu)),
    row("Shrink",                1..=1, &[],     Rule::One(shrink)),
    row("Sigmoid",               1..=1, &[],     Rule::Unary(UnaryOp::Sigmoid)),
    row("Softmax",               1..=1, &[],     Rule::One(softmax)),
    row("Softplus",              1..=1, &[],     Rule::Unary(UnaryOp::Softplus)),
    row("Softsign",              1..=1, &[],     Rule::One(softsign)),
    row("Swish",                 1..=1, &[],     Rule::One(swish)),
    row("Tanh",                  1..=1, &[],     Rule::Unary(UnaryOp::Tanh)),
    row("ThresholdedRelu",       1..=1, &[],     Rule::One(thresholded_relu)),
];

/// `x` below `low` becomes `low`, above `high` becomes `high`; NaN stays. The derivative at a bound is that inside.
pub(super) fn clamp(c: &mut Context, x: NodeId, low: Option<NodeId>, high: Option<NodeId>) -> Result<NodeId, OpError> {
    let mut y = x;
    for (bound, beyond) in [(low, CompareOp::Lt), (high, CompareOp::Gt)] {
        let Some(bound) = bound else { continue };
        let shape = c.shape(x);
        let bound = c.broadcast_into(bound, &shape)?;
        let outside = c.compare(beyond, y, bound)?;
        y = c.select(outside, bound, y)?;
    }
    Ok(y)
}

/// `max(0, min(1, alpha * x + beta))`
pub(super) fn hard_sigmoid_of(c: &mut Context, x: NodeId, alpha: f64, beta: f64) -> Result<NodeId, OpError> {
    let y = c.scale(x, alpha)?;
    let y = c.shift(y, beta)?;
    let (zero, one) = (c.constant_like(x, 0.0)?, c.constant_like(x, 1.0)?);
    clamp(c, y, Some(zero), Some(one))
}

/// `if x > 0 { positive } else { negative }`
pub(super) fn by_sign(c: &mut Context, x: NodeId, positive: NodeId, negative: NodeId) -> Result<NodeId, OpError> {
    let zero = c.constant_like(x, 0.0)?;
    let above = c.compare(CompareOp::Gt, x, zero)?;
    Ok(c.select(above, positive, negative)?)
}

/// `exp(min(x, 0) / scale) - 1`
pub(super) fn exp_minus_one(c: &mut Context, x: NodeId, scale: f64) -> Result<NodeId, OpError> {
    let zero = c.constant_like(x, 0.0)?;
    let y = c.binary(BinaryOp::Min, x, zero)?;
    let y = c.scale(y, 1.0 / scale)?;
    let y = c.unary(UnaryOp::Exp, y)?;
    Ok(c.shift(y, -1.0)?)
}

pub(super) fn celu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.0)?;
    let x = c.input(0)?;
    let negative = exp_minus_one(c, x, alpha)?;
    let negative = c.scale(negative, alpha)?;
    by_sign(c, x, x, negative)
}

pub(super) fn clip(c: &mut Context) -> Result<NodeId, OpError> {
    let (low, high) = (c.float("min")?, c.float("max")?);
    let x = c.input(0)?;
    if c.opset >= 11 {
        let (low, high) = (c.optional(1), c.optional(2));
        return clamp(c, x, low, high);
    }
    let low = low.map(|v| c.constant_like(x, v)).transpose()?;
    let high = high.map(|v| c.constant_like(x, v)).transpose()?;
    clamp(c, x, low, high)
}

pub(super) fn elu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.0)?;
    let x = c.input(0)?;
    let negative = exp_minus_one(c, x, 1.0)?;
    let negative = c.scale(negative, alpha)?;
    by_sign(c, x, x, negative)
}

pub(super) fn selu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.673_263_192_176_818_8)?;
    let gamma = c.float_or("gamma", 1.050_701_022_148_132_3)?;
    let x = c.input(0)?;
    let negative = exp_minus_one(c, x, 1.0)?;
    let negative = c.scale(negative, alpha)?;
    let y = by_sign(c, x, x, negative)?;
    Ok(c.scale(y, gamma)?)
}

pub(super) fn gelu(c: &mut Context) -> Result<NodeId, OpError> {
    let composite = match c.string_or("approximate", "none")? {
        "none" => Composite::Gelu,
        "tanh" => Composite::GeluTanh,
        other => return Err(unknown("approximate", other)),
    };
    let x = c.input(0)?;
    Ok(c.push(Op::Composite(composite), &[x])?)
}

fn unknown(name: &'static str, value: &str) -> OpError {
    OpError::Attribute { name, value: value.to_owned(), reason: "the standard knows no such value" }
}

pub(super) fn hard_sigmoid(c: &mut Context) -> Result<NodeId, OpError> {
    let (alpha, beta) = (c.float_or("alpha", 0.2)?, c.float_or("beta", 0.5)?);
    let x = c.input(0)?;
    hard_sigmoid_of(c, x, alpha, beta)
}

/// `x * max(0, min(1, x / 6 + 1 / 2))`
pub(super) fn hard_swish(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let gate = hard_sigmoid_of(c, x, 1.0 / 6.0, 0.5)?;
    Ok(c.mul(x, gate)?)
}

pub(super) fn leaky_relu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 0.01)?;
    let x = c.input(0)?;
    let negative = c.scale(x, alpha)?;
    by_sign(c, x, x, negative)
}

/// `x * tanh(softplus(x))`
pub(super) fn mish(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let y = c.unary(UnaryOp::Softplus, x)?;
    let y = c.unary(UnaryOp::Tanh, y)?;
    Ok(c.mul(x, y)?)
}

pub(super) fn prelu(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, slope) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    // Before opset 7, slopes belong to channels.
    let per_channel = c.opset < 7 && c.rank(slope) == 1 && shape.get(1).is_some_and(|channels| *c.shape(slope) == [*channels]);
    let slope = if per_channel { c.broadcast_along(slope, &shape, 1)? } else { c.broadcast_into(slope, &shape)? };
    let negative = c.mul(x, slope)?;
    by_sign(c, x, x, negative)
}

/// `x / (1 + |x|)`
pub(super) fn softsign(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let y = c.unary(UnaryOp::Abs, x)?;
    let y = c.shift(y, 1.0)?;
    Ok(c.div(x, y)?)
}

/// `x * sigmoid(alpha * x)`
pub(super) fn swish(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.0)?;
    let x = c.input(0)?;
    if alpha == 1.0 {
        return Ok(c.push(Op::Composite(Composite::Silu), &[x])?);
    }
    let y = c.scale(x, alpha)?;
    let y = c.unary(UnaryOp::Sigmoid, y)?;
    Ok(c.mul(x, y)?)
}

pub(super) fn thresholded_relu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.0)?;
    let x = c.input(0)?;
    let (alpha, zero) = (c.constant_like(x, alpha)?, c.constant_like(x, 0.0)?);
    let above = c.compare(CompareOp::Gt, x, alpha)?;
    Ok(c.select(above, x, zero)?)
}

/// `x + bias` below `-lambd`, `x - bias` above `lambd`, 0 between. Integers are taken as reals, and truncated.
pub(super) fn shrink(c: &mut Context) -> Result<NodeId, OpError> {
    let (bias, lambd) = (c.float_or("bias", 0.0)?, c.float_or("lambd", 0.5)?);
    let x = c.input(0)?;
    let dtype = c.ty(x).dtype;
    if dtype == DType::Bool {
        return Err(c.operand_error(0, "numbers are needed"));
    }
    let x = if dtype.is_float() { x } else { c.cast(x, DType::F32)? };
    let (low, high, zero) = (c.constant_like(x, -lambd)?, c.constant_like(x, lambd)?, c.constant_like(x, 0.0)?);
    let (below, above) = (c.compare(CompareOp::Lt, x, low)?, c.compare(CompareOp::Gt, x, high)?);
    let (raised, lowered) = (c.shift(x, bias)?, c.shift(x, -bias)?);
    let y = c.select(above, lowered, zero)?;
    let y = c.select(below, raised, y)?;
    Ok(c.cast(y, dtype)?)
}

pub(super) fn softmax(c: &mut Context) -> Result<NodeId, OpError> {
    along_axis(c, |axis| Composite::Softmax { axis })
}

pub(super) fn log_softmax(c: &mut Context) -> Result<NodeId, OpError> {
    along_axis(c, |axis| Composite::LogSoftmax { axis })
}

/// From opset 13 along one axis; before, along all axes from `axis` on, taken as one.
fn along_axis(c: &mut Context, composite: impl Fn(usize) -> Composite) -> Result<NodeId, OpError> {
    let axis = c.int_or("axis", if c.opset < 13 { 1 } else { -1 })?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let rank = shape.rank();
    if c.opset < 13 && axis == rank as i64 {
        // The coerced rows have one element each.
        let column = c.reshape(x, [shape.numel(), 1])?;
        let y = c.push(Op::Composite(composite(1)), &[column])?;
        return Ok(c.reshape(y, shape)?);
    }
    let axis = context::axis(axis, rank)?;
    let rest: usize = shape[axis..].iter().product();
    if c.opset >= 13 || rest == shape[axis] {
        return Ok(c.push(Op::Composite(composite(axis)), &[x])?);
    }
    let rows = c.reshape(x, [shape[..axis].iter().product(), rest])?;
    let y = c.push(Op::Composite(composite(1)), &[rows])?;
    Ok(c.reshape(y, shape)?)
}
