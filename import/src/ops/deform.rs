//! Deformable convolution.

use meganeura_ir::{DotDims, NodeId, Op, Shape};

use super::contraction::{add_bias, groups};
use super::movement;
use super::sampling::{Border, LINEAR, each_image, neighbours, ramp};
use super::window::window;
use super::{Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("DeformConv",            3..=5, &[],     Rule::One(deform_conv)),
];

/// A convolution whose kernel reads the data at positions that `offset` moves, times `mask`.
pub(super) fn deform_conv(c: &mut Context) -> Result<NodeId, OpError> {
    let offset_groups = groups(c, "offset_group")?;
    let groups = groups(c, "group")?;
    let (x, w, offset, mask) = (c.input(0)?, c.input(1)?, c.input(2)?, c.optional(4));
    let (shape, weight) = (c.shape(x), c.shape(w));
    if shape.rank() < 3 {
        return Err(c.operand_error(0, "batch, channels and at least one spatial axis are needed"));
    }
    let (spatial, channels) = (shape.rank() - 2, shape[1]);
    if weight.rank() != shape.rank() || weight[1].checked_mul(groups) != Some(channels) || !weight[0].is_multiple_of(groups) {
        return Err(c.operand_error(1, "channels, groups and weight do not match"));
    }
    if !channels.is_multiple_of(offset_groups) {
        let value = offset_groups.to_string();
        return Err(OpError::Attribute { name: "offset_group", value, reason: "it must divide the channels" });
    }
    let kernel = &weight[2..];
    let window = window(c, &shape[2..], Some(kernel))?;
    let output: Vec<usize> = (0..spatial).map(|a| window.output_size(a, shape[2 + a])).collect();
    let (taps, points): (usize, usize) = (kernel.iter().product(), output.iter().product());
    let per_tap = |count: usize| -> Shape { [shape[0], offset_groups * taps * count].iter().chain(&output).copied().collect() };
    if c.shape(offset) != per_tap(spatial) {
        return Err(c.operand_error(2, "one offset per group, kernel element, spatial axis and result is needed"));
    }
    if mask.is_some_and(|mask| c.shape(mask) != per_tap(1)) {
        return Err(c.operand_error(4, "one factor per group, kernel element and result is needed"));
    }

    // Rows are pairs of an image and a group of offsets; positions are pairs of a kernel element and a result.
    let rows = shape[0] * offset_groups;
    let dtype = c.ty(offset).dtype;
    let offset = c.reshape(offset, [rows, taps, spatial, points])?;
    let lattice: Shape = kernel.iter().chain(&output).copied().collect();
    let mut positions = Vec::with_capacity(spatial);
    for a in 0..spatial {
        let first = ramp(c, dtype, &lattice, spatial + a, [-window.pads[a].0 as f64, window.stride[a] as f64])?;
        let within = ramp(c, dtype, &lattice, a, [0.0, window.dilation[a] as f64])?;
        let regular = c.add(first, within)?;
        let regular = c.reshape(regular, [taps * points])?;
        let regular = c.push(Op::Broadcast { shape: Shape::from([rows, taps * points]), axes: vec![1] }, &[regular])?;
        let moved = movement::slice_axis(c, offset, 2, a, 1)?;
        let moved = c.reshape(moved, [rows, taps * points])?;
        positions.push(c.add(regular, moved)?);
    }
    let per_group = channels / offset_groups;
    let images: Shape = [rows, per_group].iter().chain(&shape[2..]).copied().collect();
    let images = c.reshape(x, images)?;
    let every = each_image(c, rows)?;
    let mut columns = neighbours(c, images, every, &positions, LINEAR, Border::Zeros)?.interpolate(c)?;
    if let Some(mask) = mask {
        let mask = c.reshape(mask, [rows, taps * points])?;
        let mask = c.push(Op::Broadcast { shape: Shape::from([rows, per_group, taps * points]), axes: vec![0, 2] }, &[mask])?;
        columns = c.mul(columns, mask)?;
    }
    // [n, groups, channels per group and kernel element, points] x [groups, outputs, the same] -> [groups, outputs, n, points]
    let inner = weight[1] * taps;
    let columns = c.reshape(columns, [shape[0], groups, inner, points])?;
    let matrices = c.reshape(w, [groups, weight[0] / groups, inner])?;
    let dims = DotDims { lhs_batch: vec![0], rhs_batch: vec![1], lhs_contract: vec![2], rhs_contract: vec![2] };
    let product = c.push(Op::Dot(dims), &[matrices, columns])?;
    let product = c.transpose(product, &[2, 0, 1, 3])?;
    let result: Shape = [shape[0], weight[0]].into_iter().chain(output).collect();
    let y = c.reshape(product, result)?;
    add_bias(c, y, 3)
}
