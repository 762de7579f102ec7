//! Normalisation.

use meganeura_ir::{
    BinaryOp, CompareOp, Composite, DType, NodeId, Op, Real, ReduceOp, Shape, Tensor, TensorType, UnaryOp, WindowDims,
};

use super::attention::both;
use super::movement::slice_axis;
use super::{Row, Rule, microsoft, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("BatchNormalization",    5..=5, &[],     Rule::Many(batch)),
    row("GroupNormalization",    3..=3, &[],     Rule::One(group)),
    row("InstanceNormalization", 3..=3, &[],     Rule::One(instance)),
    row("LayerNormalization",    2..=3, &[],     Rule::Many(layer)),
    row("LRN",                   1..=1, &[],     Rule::One(local_response)),
    row("RMSNormalization",      2..=2, &[],     Rule::One(rms)),
    row("SimplifiedLayerNormalization", 2..=2, &[], Rule::Many(simplified)),
    microsoft("EmbedLayerNormalization", 7..=9, &[], Rule::Many(embed_layer)),
    microsoft("SkipLayerNormalization", 3..=5, &[], Rule::Many(skip_layer)),
    microsoft("SkipSimplifiedLayerNormalization", 3..=4, &[], Rule::Many(skip_simplified)),
];

fn epsilon(c: &Context) -> Result<f64, OpError> {
    c.float_or("epsilon", f64::from(1e-5f32))
}

/// The default of onnxruntime's own operators.
fn fused_epsilon(c: &Context) -> Result<f64, OpError> {
    c.float_or("epsilon", f64::from(1e-12f32))
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

/// `(x - mean) / sqrt(variance + epsilon) * scale + bias`, with the running statistics; in training, with those of the batch, which
/// also move the running ones: `running * momentum + batch * (1 - momentum)`.
pub(super) fn batch(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let (epsilon, momentum) = (epsilon(c)?, c.float_or("momentum", f64::from(0.9f32))?);
    // Before opset 14, a node that has more than one result trains.
    let in_file = c.flag("training_mode", false)?
        || c.opset < 14 && (1..c.output_count()).any(|i| c.declares_output(i))
        || c.opset < 7 && !c.flag("is_test", false)?;
    let training = c.trains("BatchNormalization", |phase| phase.batch_norm, in_file);
    let per_channel = c.flag("spatial", true)?;
    let [x, scale, bias, mean, variance] = [0, 1, 2, 3, 4].map(|i| c.input(i));
    let (x, scale, bias, mean, variance) = (x?, scale?, bias?, mean?, variance?);
    let shape = c.shape(x);
    // [n], [n, c, d..] or, with statistics of every single element, [n, c * d..].
    let rows: Shape = match shape.rank() {
        0 => return Err(c.operand_error(0, "at least a batch axis is needed")),
        1 => [shape[0], 1].into(),
        _ if per_channel => shape.clone(),
        _ => [shape[0], shape[1..].iter().product::<usize>()].into(),
    };
    let settings = [scale, bias, mean, variance];
    let ty = c.ty(scale).clone();
    if let Some(index) = settings.iter().position(|&s| c.shape(s).numel() != rows[1] || *c.ty(s) != ty) {
        return Err(c.operand_error(1 + index, "one element per channel is needed"));
    }
    let running = [mean, variance];
    let settings = if training { [scale, bias, c.statistic(mean), c.statistic(variance)] } else { settings };
    let flat = settings.map(|s| c.reshape(s, [rows[1]]));
    let [scale, bias, mean, variance] = flat;
    let (scale, bias, mean, variance) = (scale?, bias?, mean?, variance?);
    let x = c.reshape(x, rows.clone())?;
    if !training {
        let mean = c.broadcast_along(mean, &rows, 1)?;
        let centred = c.sub(x, mean)?;
        let variance = c.shift(variance, epsilon)?;
        let inverse = c.unary(UnaryOp::Rsqrt, variance)?;
        let factor = c.mul(inverse, scale)?;
        let y = affine(c, centred, factor, bias)?;
        return Ok(vec![c.reshape(y, shape)?, running[0], running[1]]);
    }
    let axes: Vec<usize> = (0..rows.rank()).filter(|&a| a != 1).collect();
    let y = normalize(c, x, axes.clone(), epsilon)?;
    let y = affine(c, y, scale, bias)?;
    let mut results = vec![c.reshape(y, shape)?];
    let batch_mean = c.mean(x, &axes)?;
    let repeated = c.broadcast_along(batch_mean, &rows, 1)?;
    let centred = c.sub(x, repeated)?;
    let square = c.mul(centred, centred)?;
    let batch_variance = c.mean(square, &axes)?;
    for (running, before, batch) in [(running[0], mean, batch_mean), (running[1], variance, batch_variance)] {
        let kept = c.scale(before, momentum)?;
        let moved = c.scale(batch, 1.0 - momentum)?;
        let sum = c.add(kept, moved)?;
        let moved = c.reshape(sum, ty.shape.clone())?;
        c.move_statistic(running, moved);
        results.push(moved);
    }
    Ok(results)
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
    let (x, scale, bias) = (c.input(0)?, c.input(1)?, c.optional(2));
    let axis = context::axis(axis, c.rank(x))?;
    let y = layer_of(c, x, axis, scale, bias, epsilon)?;
    let [mean, inverse] = statistics(c, x, axis, epsilon, true)?;
    Ok(vec![y, mean, inverse])
}

/// `(x - mean) / sqrt(variance + epsilon) * scale + bias` over all axes from `axis` on.
fn layer_of(
    c: &mut Context,
    x: NodeId,
    axis: usize,
    scale: NodeId,
    bias: Option<NodeId>,
    epsilon: f64,
) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let mut y = normalize(c, x, (axis..shape.rank()).collect(), epsilon)?;
    let scale = c.broadcast_into(scale, &shape)?;
    y = c.mul(y, scale)?;
    if let Some(bias) = bias {
        let bias = c.broadcast_into(bias, &shape)?;
        y = c.add(y, bias)?;
    }
    Ok(y)
}

/// Over all axes from `axis` on, which keep size 1: the mean, and the inverse root of the mean square of `x - mean` (`centred`) or
/// of `x`.
fn statistics(c: &mut Context, x: NodeId, axis: usize, epsilon: f64, centred: bool) -> Result<[NodeId; 2], OpError> {
    let shape = c.shape(x);
    let axes: Vec<usize> = (axis..shape.rank()).collect();
    let kept: Shape = shape.iter().enumerate().map(|(a, &d)| if a < axis { d } else { 1 }).collect();
    let mean = c.mean(x, &axes)?;
    let mut rest = x;
    if centred {
        let repeated = c.mean_keep(x, &axes)?;
        rest = c.sub(x, repeated)?;
    }
    let square = c.mul(rest, rest)?;
    let variance = c.mean(square, &axes)?;
    let variance = c.shift(variance, epsilon)?;
    let inverse = c.unary(UnaryOp::Rsqrt, variance)?;
    Ok([c.reshape(mean, kept.clone())?, c.reshape(inverse, kept)?])
}

pub(super) fn rms(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["stash_type"]);
    let (axis, epsilon) = (c.int_or("axis", -1)?, epsilon(c)?);
    let (x, scale) = (c.input(0)?, c.input(1)?);
    let axis = context::axis(axis, c.rank(x))?;
    rms_of(c, x, axis, scale, epsilon)
}

/// `x / sqrt(mean(x^2) + epsilon) * scale` over all axes from `axis` on.
pub(super) fn rms_of(c: &mut Context, x: NodeId, axis: usize, scale: NodeId, epsilon: f64) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let axes = (axis..shape.rank()).collect();
    let y = c.push(Op::Composite(Composite::RmsNormalize { axes, epsilon: Real(epsilon) }), &[x])?;
    let scale = c.broadcast_into(scale, &shape)?;
    Ok(c.mul(y, scale)?)
}

/// `x / (bias + alpha / size * sum x^2)^beta`, the sum over `size` neighbouring channels.
pub(super) fn local_response(c: &mut Context) -> Result<NodeId, OpError> {
    let (alpha, beta) = (c.float_or("alpha", f64::from(1e-4f32))?, c.float_or("beta", 0.75)?);
    let bias = c.float_or("bias", 1.0)?;
    let size = c.int("size")?.ok_or(OpError::MissingAttribute("size"))?;
    let error = || OpError::Attribute { name: "size", value: size.to_string(), reason: "at least one channel is summed" };
    let size = context::extent("size", size).ok().filter(|&size| size > 0).ok_or_else(error)?;
    let x = c.input(0)?;
    let shape = check_channels(c, x)?;
    let rest = shape[2..].iter().product::<usize>();
    let square = c.mul(x, x)?;
    let square = c.reshape(square, [shape[0], shape[1], rest])?;
    let channels_last = c.transpose(square, &[0, 2, 1])?;
    // Neighbours beyond all channels add nothing.
    let (before, after) = (((size - 1) / 2).min(shape[1]), (size / 2).min(shape[1]));
    let (width, pads) = (before + 1 + after, vec![(before as isize, after as isize)]);
    let window = WindowDims { size: vec![width], stride: vec![1], dilation: vec![1], pads };
    let zero = c.constant_tensor(Tensor::from_f64(c.ty(x).dtype, Shape::scalar(), &[0.0]))?;
    let windows = c.push(Op::Unfold(window), &[channels_last, zero])?;
    let sum = c.reduce(ReduceOp::Sum, windows, &[3])?;
    let sum = c.transpose(sum, &[0, 2, 1])?;
    let sum = c.reshape(sum, shape)?;
    let scaled = c.scale(sum, alpha / size as f64)?;
    let base = c.shift(scaled, bias)?;
    let beta = c.constant_like(base, beta)?;
    let divisor = c.binary(BinaryOp::Pow, base, beta)?;
    Ok(c.div(x, divisor)?)
}

/// RMS normalisation before the standard had it. Further result: the inverse root of the mean square.
pub(super) fn simplified(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let y = rms(c)?;
    let (x, epsilon) = (c.input(0)?, epsilon(c)?);
    let axis = context::axis(c.int_or("axis", -1)?, c.rank(x))?;
    let [_, inverse] = statistics(c, x, axis, epsilon, false)?;
    Ok(vec![y, inverse])
}

/// Operand `index`, one element per element of the last axis, of `size`; `None` if it is absent.
fn per_element(c: &Context, index: usize, size: usize) -> Result<Option<NodeId>, OpError> {
    match c.optional(index) {
        Some(node) if *c.shape(node) != [size] => {
            Err(c.operand_error(index, "one element per element of the last axis is needed"))
        }
        node => Ok(node),
    }
}

/// `x + skip + bias`, where `skip` may lack the batch; its last axis, and the size of that.
fn residual(c: &mut Context, bias: usize) -> Result<(NodeId, usize, usize), OpError> {
    let (x, skip) = (c.input(0)?, c.input(1)?);
    let shape = c.shape(x);
    let axis = context::axis(-1, shape.rank())?;
    let skip = c.broadcast_into(skip, &shape)?;
    let mut sum = c.add(x, skip)?;
    if let Some(bias) = c.optional(bias) {
        let bias = c.broadcast_along(bias, &shape, axis)?;
        sum = c.add(sum, bias)?;
    }
    Ok((sum, axis, shape[axis]))
}

/// Layer normalisation of a sum. Further results: mean, inverse standard deviation, the sum.
pub(super) fn skip_layer(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let epsilon = fused_epsilon(c)?;
    let (sum, axis, size) = residual(c, 4)?;
    let (scale, bias) = (per_element(c, 2, size)?.ok_or(OpError::MissingInput(2))?, per_element(c, 3, size)?);
    let y = layer_of(c, sum, axis, scale, bias, epsilon)?;
    let [mean, inverse] = statistics(c, sum, axis, epsilon, true)?;
    Ok(vec![y, mean, inverse, sum])
}

/// RMS normalisation of a sum. Further results: mean, inverse root of the mean square, the sum.
pub(super) fn skip_simplified(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let epsilon = fused_epsilon(c)?;
    let (sum, axis, size) = residual(c, 3)?;
    let scale = per_element(c, 2, size)?.ok_or(OpError::MissingInput(2))?;
    let y = rms_of(c, sum, axis, scale, epsilon)?;
    let [mean, inverse] = statistics(c, sum, axis, epsilon, false)?;
    Ok(vec![y, mean, inverse, sum])
}

/// BERT's first layer: normalises the sum of the embeddings of words, positions and segments. Further results: the number of
/// words that the mask lets through, and the sum.
pub(super) fn embed_layer(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    c.ignore(&["mask_index_type"]);
    let epsilon = fused_epsilon(c)?;
    let (words, table, places) = (c.input(0)?, c.input(2)?, c.input(3)?);
    let ids = c.shape(words);
    let [batch, sequence] = *ids else { return Err(c.operand_error(0, "batch and sequence are needed")) };
    for index in [2, 3] {
        let table = c.input(index)?;
        if c.rank(table) != 2 {
            return Err(c.operand_error(index, "an embedding is a matrix"));
        }
    }
    let mut sum = c.push(Op::Gather { axis: 0 }, &[table, words])?;
    let shape = c.shape(sum);
    let places = match c.optional(8) {
        Some(positions) => c.push(Op::Gather { axis: 0 }, &[places, positions])?,
        None if c.shape(places)[0] < sequence => return Err(c.operand_error(3, "it has fewer positions than words")),
        None => slice_axis(c, places, 0, 0, sequence)?,
    };
    let places = c.broadcast_into(places, &shape)?;
    sum = c.add(sum, places)?;
    if let Some((segments, table)) = both(c, 1, 4)? {
        let segments = c.push(Op::Gather { axis: 0 }, &[table, segments])?;
        let segments = c.broadcast_into(segments, &shape)?;
        sum = c.add(sum, segments)?;
    }
    let (scale, bias) = (per_element(c, 5, shape[2])?.ok_or(OpError::MissingInput(5))?, per_element(c, 6, shape[2])?);
    let y = layer_of(c, sum, 2, scale, bias, epsilon)?;
    let count = match c.optional(7) {
        Some(mask) => {
            let ones = c.constant_like(mask, 1.0)?;
            let ones = c.compare(CompareOp::Eq, mask, ones)?;
            let ones = c.cast(ones, DType::I32)?;
            c.reduce(ReduceOp::Sum, ones, &[1])?
        }
        None => c.splat(&TensorType::new(DType::I32, [batch]), 0.0)?,
    };
    Ok(vec![y, count, sum])
}
