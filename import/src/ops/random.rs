//! Random numbers, Dropout's included: functions of the input [`RANDOM_KEY`](crate::RANDOM_KEY). Seeds of single nodes are not used.

use std::f64::consts::TAU;

use meganeura_ir::{ArgOp, CompareOp, DType, NodeId, Op, Shape, TensorType, UnaryOp};

use super::{Row, Rule, row};
use crate::context::{Context, extent};
use crate::error::OpError;
use crate::tensor::{self, arithmetic};

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Bernoulli",             1..=1, &[],     Rule::One(bernoulli)),
    row("Dropout",               1..=3, &[1, 2], Rule::Many(dropout)),
    row("Multinomial",           1..=1, &[],     Rule::One(multinomial)),
    row("RandomNormal",          0..=0, &[],     Rule::One(|c| { let ty = attribute_type(c)?; normal(c, &ty) })),
    row("RandomNormalLike",      1..=1, &[],     Rule::One(|c| { let ty = operand_type(c)?; normal(c, &ty) })),
    row("RandomUniform",         0..=0, &[],     Rule::One(|c| { let ty = attribute_type(c)?; uniform(c, &ty) })),
    row("RandomUniformLike",     1..=1, &[],     Rule::One(|c| { let ty = operand_type(c)?; uniform(c, &ty) })),
];

/// The dtype that attribute `dtype` names.
fn dtype(c: &Context, default: DType) -> Result<DType, OpError> {
    match c.int("dtype")? {
        Some(number) => Ok(arithmetic(tensor::dtype(i32::try_from(number).unwrap_or(0))?)),
        None => Ok(default),
    }
}

/// The type of a result that attributes describe.
fn attribute_type(c: &Context) -> Result<TensorType, OpError> {
    let dtype = dtype(c, DType::F32)?;
    let sizes = c.ints("shape")?.ok_or(OpError::MissingAttribute("shape"))?;
    let shape = sizes.iter().map(|&size| extent("shape", size)).collect::<Result<Shape, _>>()?;
    Ok(TensorType::new(dtype, shape))
}

/// The type of a result of the shape of operand 0.
fn operand_type(c: &Context) -> Result<TensorType, OpError> {
    let like = c.ty(c.input(0)?);
    Ok(TensorType::new(dtype(c, like.dtype)?, like.shape.clone()))
}

/// New numbers in `[0, 1)`.
fn draw(c: &mut Context, shape: &Shape) -> Result<NodeId, OpError> {
    c.ignore(&["seed"]);
    c.random_uniform(shape.clone())
}

fn float_result(c: &mut Context, x: NodeId, ty: &TensorType) -> Result<NodeId, OpError> {
    if ty.dtype.is_float() { Ok(c.cast(x, ty.dtype)?) } else { Err(OpError::unsupported(format!("random {}", ty.dtype))) }
}

fn uniform(c: &mut Context, ty: &TensorType) -> Result<NodeId, OpError> {
    let (low, high) = (c.float_or("low", 0.0)?, c.float_or("high", 1.0)?);
    let numbers = draw(c, &ty.shape)?;
    let scaled = c.scale(numbers, high - low)?;
    let shifted = c.shift(scaled, low)?;
    float_result(c, shifted, ty)
}

/// By Box and Muller: `sqrt(-2 ln(1 - u)) cos(2 pi v)`.
fn normal(c: &mut Context, ty: &TensorType) -> Result<NodeId, OpError> {
    let (mean, scale) = (c.float_or("mean", 0.0)?, c.float_or("scale", 1.0)?);
    let (u, v) = (draw(c, &ty.shape)?, draw(c, &ty.shape)?);
    let one = c.constant_like(u, 1.0)?;
    let rest = c.sub(one, u)?;
    let log = c.unary(UnaryOp::Log, rest)?;
    let square = c.scale(log, -2.0)?;
    let radius = c.unary(UnaryOp::Sqrt, square)?;
    let angle = c.scale(v, TAU)?;
    let cosine = c.unary(UnaryOp::Cos, angle)?;
    let standard = c.mul(radius, cosine)?;
    let scaled = c.scale(standard, scale)?;
    let shifted = c.shift(scaled, mean)?;
    float_result(c, shifted, ty)
}

/// 1 with the probability that the operand holds.
fn bernoulli(c: &mut Context) -> Result<NodeId, OpError> {
    let ty = operand_type(c)?;
    let numbers = draw(c, &ty.shape)?;
    let probability = c.input(0)?;
    let probability = c.cast(probability, DType::F32)?;
    let hit = c.compare(CompareOp::Lt, numbers, probability)?;
    Ok(c.cast(hit, ty.dtype)?)
}

/// Classes, drawn from rows of unnormalised log-probabilities: the largest of the sums with Gumbel-distributed noise.
fn multinomial(c: &mut Context) -> Result<NodeId, OpError> {
    let dtype = dtype(c, DType::I32)?;
    let samples = extent("sample_size", c.int_or("sample_size", 1)?)?;
    let x = c.input(0)?;
    let [batch, classes] = *c.shape(x) else { return Err(c.operand_error(0, "batch and classes are needed")) };
    if classes == 0 {
        return Err(c.operand_error(0, "there is no class to draw"));
    }
    let shape = Shape::from([batch, samples, classes]);
    let numbers = draw(c, &shape)?;
    // Strictly between 0 and 1, also in f32.
    let step = f64::from(1u32 << 24).recip();
    let narrowed = c.scale(numbers, 1.0 - step)?;
    let inner = c.shift(narrowed, step / 2.0)?;
    let log = c.unary(UnaryOp::Log, inner)?;
    let exponential = c.unary(UnaryOp::Neg, log)?;
    let log = c.unary(UnaryOp::Log, exponential)?;
    let noise = c.unary(UnaryOp::Neg, log)?;
    let repeated = c.push(Op::Broadcast { shape, axes: vec![0, 2] }, &[x])?;
    let sum = c.add(repeated, noise)?;
    let drawn = c.push(Op::ArgReduce { op: ArgOp::Max, axis: 2 }, &[sum])?;
    Ok(c.cast(drawn, dtype)?)
}

/// In training `x * mask / (1 - ratio)`, where the mask holds with probability `1 - ratio`. Otherwise the operand itself, and a mask of
/// ones.
fn dropout(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    c.ignore(&["seed"]);
    let x = c.input(0)?;
    let ty = c.ty(x).clone();
    // Opset 7 to 11 have no training mode.
    let in_file = match c.opset {
        12.. => c.known_scalar(2)?.is_some_and(|training| training != 0.0),
        7.. => false,
        _ => !c.flag("is_test", false)?,
    };
    let training = c.trains("Dropout", |phase| phase.dropout, in_file);
    let ratio = match (c.opset < 12, training) {
        (true, _) => c.float("ratio")?,
        (false, true) => c.known_scalar(1)?,
        (false, false) => None,
    };
    let ratio = if training { ratio.unwrap_or(0.5) } else { 0.0 };
    let mask = if c.opset >= 10 { DType::Bool } else { ty.dtype };
    if ratio == 0.0 {
        return Ok(vec![x, c.splat(&TensorType::new(mask, ty.shape), 1.0)?]);
    }
    if !(0.0..1.0).contains(&ratio) {
        return Err(OpError::Attribute { name: "ratio", value: ratio.to_string(), reason: "it lies between 0 and 1" });
    }
    let numbers = draw(c, &ty.shape)?;
    let dropped = c.constant_like(numbers, ratio)?;
    let kept = c.compare(CompareOp::Ge, numbers, dropped)?;
    let (scale, zero) = (c.constant_like(x, 1.0 / (1.0 - ratio))?, c.constant_like(x, 0.0)?);
    let factor = c.select(kept, scale, zero)?;
    Ok(vec![c.mul(x, factor)?, c.cast(kept, mask)?])
}
