//! Normalisation.

use meganeura_ir::{Composite, NodeId, Op, Real, Shape, UnaryOp};

use super::{Row, Rule, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("BatchNormalization",    5..=5, &[],     Rule::One(batch)),
    row("GroupNormalization",    3..=3, &[],     Rule::One(group)),
    row("InstanceNormalization", 3..=3, &[],     Rule::One(instance)),
    row("LayerNormalization",    2..=3, &[],     Rule::Many(layer)),
    row("RMSNormalization",      2..=2, &[],     Rule::One(rms)),
];

fn epsilon(c: &Context) -> Result<f64, OpError> {
    c.float_or("epsilon", f64::from(1e-5f32))
}

fn normalize(c: &mut Context, x: NodeId, axes: Vec<usize>, epsilon: f64) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Composite(Composite::Normalize { axes, epsilon: Real(epsilon) }), &[x])?)
}

/// `x * scale + bias`, each with one element per channel (axis 1).
fn affine(c: &mut Context, x: NodeId, scale: NodeId, bias: NodeId) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let scale = c.broadcast_along(scale, &shape, 1)?;
    let bias = c.broadcast_along(bias, &shape, 1)?;
    let y = c.mul(x, scale)?;
    Ok(c.add(y, bias)?)
}

fn check_channels(c: &Context, x: NodeId) -> Result<Shape, OpError> {
    let shape = c.shape(x);
    if shape.rank() < 2 { Err(c.operand_error(0, "batch and channels are needed")) } else { Ok(shape) }
}

/// Inference: `(x - mean) / sqrt(variance + epsilon) * scale + bias` with the running statistics.
pub(super) fn batch(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["momentum"]);
    let epsilon = epsilon(c)?;
    if c.flag("training_mode", false)? {
        return Err(OpError::unsupported("BatchNormalization with training_mode = 1"));
    }
    if !c.flag("spatial", true)? {
        return Err(OpError::unsupported("BatchNormalization with spatial = 0"));
    }
    let (x, scale, bias, mean, variance) = (c.input(0)?, c.input(1)?, c.input(2)?, c.input(3)?, c.input(4)?);
    let shape = check_channels(c, x)?;
    let mean = c.broadcast_along(mean, &shape, 1)?;
    let centred = c.sub(x, mean)?;
    let variance = c.shift(variance, epsilon)?;
    let inverse = c.unary(UnaryOp::Rsqrt, variance)?;
    if c.ty(inverse) != c.ty(scale) {
        return Err(c.operand_error(1, "one element per channel is needed"));
    }
    let factor = c.mul(inverse, scale)?;
    affine(c, centred, factor, bias)
}

pub(super) fn instance(c: &mut Context) -> Result<NodeId, OpError> {
    let epsilon = epsilon(c)?;
    let (x, scale, bias) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let shape = check_channels(c, x)?;
    let y = normalize(c, x, (2..shape.rank()).collect(), epsilon)?;
    affine(c, y, scale, bias)
}

/// Scale and bias have one element per group before opset 21, one per channel from then on.
pub(super) fn group(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["stash_type"]);
    let epsilon = epsilon(c)?;
    let groups = c.int("num_groups")?.ok_or(OpError::MissingAttribute("num_groups"))?;
    let (x, scale, bias) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let shape = check_channels(c, x)?;
    let error = || OpError::Attribute { name: "num_groups", value: groups.to_string(), reason: "it must divide the channels" };
    let groups = usize::try_from(groups).ok().filter(|&g| g > 0 && shape[1].is_multiple_of(g)).ok_or_else(error)?;
    let rest: usize = shape[2..].iter().product::<usize>() * (shape[1] / groups);
    let grouped = c.reshape(x, [shape[0], groups, rest])?;
    let y = normalize(c, grouped, vec![2], epsilon)?;
    if c.opset < 21 {
        let y = affine(c, y, scale, bias)?;
        return Ok(c.reshape(y, shape)?);
    }
    let y = c.reshape(y, shape)?;
    affine(c, y, scale, bias)
}

/// Normalises over all axes from `axis` on. Further results: mean and inverse standard deviation.
pub(super) fn layer(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    c.ignore(&["stash_type"]);
    let (axis, epsilon) = (c.int_or("axis", -1)?, epsilon(c)?);
    let (x, scale) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    let axis = context::axis(axis, shape.rank())?;
    let axes: Vec<usize> = (axis..shape.rank()).collect();
    let y = normalize(c, x, axes.clone(), epsilon)?;
    let scale = c.broadcast_into(scale, &shape)?;
    let mut y = c.mul(y, scale)?;
    if let Some(bias) = c.optional(2) {
        let bias = c.broadcast_into(bias, &shape)?;
        y = c.add(y, bias)?;
    }
    let mut results = vec![y];
    if c.has_output(1) || c.has_output(2) {
        let kept: Shape = shape.iter().enumerate().map(|(a, &d)| if a < axis { d } else { 1 }).collect();
        let mean = c.mean(x, &axes)?;
        results.push(c.reshape(mean, kept.clone())?);
        let repeated = c.mean_keep(x, &axes)?;
        let centred = c.sub(x, repeated)?;
        let square = c.mul(centred, centred)?;
        let variance = c.mean(square, &axes)?;
        let variance = c.shift(variance, epsilon)?;
        let inverse = c.unary(UnaryOp::Rsqrt, variance)?;
        results.push(c.reshape(inverse, kept)?);
    }
    Ok(results)
}

/// `x / sqrt(mean(x^2) + epsilon) * scale` over all axes from `axis` on.
pub(super) fn rms(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["stash_type"]);
    let (axis, epsilon) = (c.int_or("axis", -1)?, epsilon(c)?);
    let (x, scale) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    let axes = (context::axis(axis, shape.rank())?..shape.rank()).collect();
    let y = c.push(Op::Composite(Composite::RmsNormalize { axes, epsilon: Real(epsilon) }), &[x])?;
    let scale = c.broadcast_into(scale, &shape)?;
    Ok(c.mul(y, scale)?)
}
