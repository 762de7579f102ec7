//! Reading elements at computed positions.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, Shape, Tensor, TensorType};

use super::movement;
use super::{Row, Rule, row};
use crate::context::{self, Context, extent, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Gather",                2..=2, &[],     Rule::One(gather)),
    row("GatherElements",        2..=2, &[],     Rule::One(gather_elements)),
    row("GatherND",              2..=2, &[],     Rule::One(gather_nd)),
    row("Resize",                1..=4, &[1, 2, 3], Rule::One(resize)),
];

/// Indices with negative ones counted from the end of an axis of `size`. Known ones are checked.
fn normalized(c: &mut Context, indices: NodeId, size: usize) -> Result<NodeId, OpError> {
    if !c.ty(indices).dtype.is_int() {
        return Err(c.operand_error(1, "indices are integers"));
    }
    let n = size as i64;
    if let Some(known) = c.known(indices) {
        let values = known.to_i64_vec();
        if let Some(&index) = values.iter().find(|i| !(-n..n).contains(i)) {
            return Err(OpError::Index { index, size });
        }
        let values: Vec<i64> = values.into_iter().map(|i| if i < 0 { i + n } else { i }).collect();
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
fn scaled(c: &mut Context, indices: NodeId, stride: usize) -> Result<NodeId, OpError> {
    let indices = c.cast(indices, DType::I64)?;
    if stride == 1 { Ok(indices) } else { Ok(c.scale(indices, stride as f64)?) }
}

/// `linear + i_axis * stride` over the positions of `shape`.
fn add_position(c: &mut Context, linear: NodeId, shape: &Shape, axis: usize, stride: usize) -> Result<NodeId, OpError> {
    let position = c.push(Op::Iota { dtype: DType::I64, shape: shape.clone(), axis }, &[])?;
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
    let (from, shape) = (c.shape(x), c.shape(indices));
    let batch = usize::try_from(batch).unwrap_or(usize::MAX);
    let Some((&width, positions)) = shape.split_last() else {
        return Err(c.operand_error(1, "at least one axis is needed"));
    };
    let indexed = batch.saturating_add(width);
    if indexed > from.rank() || batch > positions.len() || from[..batch] != positions[..batch] {
        return Err(c.operand_error(1, "the indices do not fit the data"));
    }
    let positions = Shape::from(positions);
    let strides = Shape::from(&from[..indexed]).strides();
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
    let rows: Shape = [from[..indexed].iter().product()].into_iter().chain(from[indexed..].iter().copied()).collect();
    let rows = c.reshape(x, rows)?;
    Ok(c.push(Op::Gather { axis: 0 }, &[rows, linear])?)
}

/// Nearest neighbour. An integer scale repeats elements; every other is a gather per axis.
pub(super) fn resize(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["cubic_coeff_a", "exclude_outside", "extrapolation_value", "antialias"]);
    let mode = c.string_or("mode", "nearest")?;
    if mode != "nearest" {
        return Err(OpError::unsupported(format!("interpolation mode {mode:?}")));
    }
    let transform = c.string_or("coordinate_transformation_mode", if c.opset < 11 { "asymmetric" } else { "half_pixel" })?;
    let rounding = c.string_or("nearest_mode", if c.opset < 11 { "floor" } else { "round_prefer_floor" })?;
    let policy = c.string_or("keep_aspect_ratio_policy", "stretch")?;
    if policy != "stretch" {
        return Err(OpError::unsupported(format!("aspect ratio policy {policy:?}")));
    }
    let (scales_at, sizes_at) = if c.opset < 11 { (1, 3) } else { (2, 3) };
    let scales = c.known_input(scales_at)?.map(|t| t.to_f64_vec()).filter(|s| !s.is_empty());
    let sizes = if c.opset < 11 { None } else { c.known_ints(sizes_at)?.filter(|s| !s.is_empty()) };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axes = match c.ints("axes")? {
        Some(axes) => {
            c.axes(axes, shape.rank())?;
            axes.iter().map(|&a| context::axis(a, shape.rank())).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..shape.rank()).collect(),
    };
    let given = sizes.as_ref().map_or_else(|| scales.as_ref().map_or(0, Vec::len), Vec::len);
    if given != axes.len() {
        return Err(c.operand_error(scales_at, "one scale or size per axis is needed"));
    }
    let mut y = x;
    for (i, &axis) in axes.iter().enumerate() {
        let from = shape[axis];
        let (to, scale) = match (&sizes, &scales) {
            (Some(sizes), _) => {
                let to = extent("sizes", sizes[i])?;
                (to, to as f64 / from.max(1) as f64)
            }
            (None, Some(scales)) => (extent("scales", (from as f64 * scales[i]).floor() as i64)?, scales[i]),
            (None, None) => return Err(c.operand_error(scales_at, "scales or sizes are needed")),
        };
        if to == from && scale == 1.0 {
            continue;
        }
        if from == 0 && to > 0 {
            return Err(c.operand_error(0, "an empty axis cannot grow"));
        }
        let source = nearest(transform, rounding, from, to, scale)?;
        y = take(c, y, axis, &source)?;
    }
    Ok(y)
}

/// For each of `to` positions, the nearest of `from`.
fn nearest(transform: &str, rounding: &str, from: usize, to: usize, scale: f64) -> Result<Vec<usize>, OpError> {
    let (old, new) = (from as f64, to as f64);
    let position = |i: f64| match transform {
        "asymmetric" => Some(i / scale),
        "half_pixel" => Some((i + 0.5) / scale - 0.5),
        "pytorch_half_pixel" => Some(if to > 1 { (i + 0.5) / scale - 0.5 } else { 0.0 }),
        "half_pixel_symmetric" => {
            let adjustment = new / (scale * old);
            Some(old / 2.0 * (1.0 - adjustment) + (i + 0.5) / scale - 0.5)
        }
        "align_corners" => Some(if to > 1 { i * (old - 1.0) / (new - 1.0) } else { 0.0 }),
        _ => None,
    };
    let round = |v: f64| match rounding {
        "round_prefer_floor" => Some((v - 0.5).ceil()),
        "round_prefer_ceil" => Some((v + 0.5).floor()),
        "floor" => Some(v.floor()),
        "ceil" => Some(v.ceil()),
        _ => None,
    };
    (0..table_size(to)?)
        .map(|i| {
            let v = position(i as f64).ok_or_else(|| OpError::unsupported(format!("coordinate transformation {transform:?}")))?;
            let v = round(v).ok_or_else(|| OpError::unsupported(format!("nearest mode {rounding:?}")))?;
            Ok(v.clamp(0.0, old - 1.0) as usize)
        })
        .collect()
}

/// `x` at the positions `source` of `axis`.
fn take(c: &mut Context, x: NodeId, axis: usize, source: &[usize]) -> Result<NodeId, OpError> {
    let mut shape = c.shape(x).to_vec();
    let from = shape[axis];
    shape[axis] = source.len();
    let times = source.len() / from.max(1);
    if times > 0 && source.iter().enumerate().all(|(i, &s)| s == i / times) {
        let (rows, size) = (shape[..axis].iter().product::<usize>() * from, shape[axis + 1..].iter().product());
        let repeated = movement::repeat(c, x, [rows, size], times)?;
        return Ok(c.reshape(repeated, shape)?);
    }
    let indices: Vec<i64> = source.iter().map(|&s| s as i64).collect();
    let indices = c.constant_tensor(Tensor::from_i64(DType::I64, [indices.len()], &indices))?;
    Ok(c.push(Op::Gather { axis }, &[x, indices])?)
}
