//! Reshaping, moving, repeating, slicing and joining.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, PadDim, Shape, SliceDim, Tensor, TensorType};

use super::constants::{diagonal, shape_operand};
use super::{ANY, Row, Rule, row};
use crate::context::{self, Context, extent, table_size};
use crate::error::OpError;
use crate::value::Value;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Concat",                1..=ANY, &[],   Rule::One(concat)),
    row("Expand",                2..=2, &[1],    Rule::One(expand)),
    row("Flatten",               1..=1, &[],     Rule::One(flatten)),
    row("Identity",              1..=1, &[],     Rule::Values(identity)),
    row("Pad",                   1..=4, &[1, 2, 3], Rule::One(pad)),
    row("Reshape",               2..=2, &[1],    Rule::One(reshape)),
    row("Slice",                 1..=5, &[1, 2, 3, 4], Rule::One(slice)),
    row("Split",                 1..=2, &[1],    Rule::Many(split)),
    row("Squeeze",               1..=2, &[1],    Rule::One(squeeze)),
    row("Tile",                  2..=2, &[1],    Rule::One(tile)),
    row("Transpose",             1..=1, &[],     Rule::One(transpose)),
    row("Trilu",                 1..=2, &[1],    Rule::One(trilu)),
    row("Unsqueeze",             1..=2, &[1],    Rule::One(unsqueeze)),
];

pub(super) fn identity(c: &mut Context) -> Result<Vec<Value>, OpError> {
    Ok(vec![c.value(0).ok_or(OpError::MissingInput(0))?.clone()])
}

/// 0 keeps a size (unless `allowzero`), -1 takes what is left.
pub(super) fn reshape(c: &mut Context) -> Result<NodeId, OpError> {
    let allow_zero = c.flag("allowzero", false)?;
    let target = c.known_ints(1)?.ok_or(OpError::MissingInput(1))?;
    let x = c.input(0)?;
    let found = c.ty(x).clone();
    let misfit = || OpError::Reshape { found: found.clone(), target: target.clone() };
    let mut sizes = Vec::with_capacity(target.len());
    let mut free = None;
    for (axis, &size) in target.iter().enumerate() {
        sizes.push(match size {
            0 if !allow_zero => *found.shape.get(axis).ok_or_else(misfit)?,
            -1 if free.is_none() => {
                free = Some(axis);
                1
            }
            size => extent("shape", size).map_err(|_| misfit())?,
        });
    }
    if let Some(axis) = free {
        let rest = Shape::new(sizes.clone()).checked_numel().ok_or_else(misfit)?;
        sizes[axis] = found.shape.numel().checked_div(rest).ok_or_else(misfit)?;
    }
    let shape = Shape::new(sizes);
    if shape.checked_numel() != Some(found.shape.numel()) {
        return Err(misfit());
    }
    Ok(c.reshape(x, shape)?)
}

pub(super) fn flatten(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int_or("axis", 1)?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let rank = shape.rank();
    let axis = if axis == rank as i64 { rank } else { context::axis(axis, rank)? };
    Ok(c.reshape(x, [shape[..axis].iter().product::<usize>(), shape[axis..].iter().product()])?)
}

pub(super) fn transpose(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let rank = c.rank(x);
    let perm: Vec<usize> = match c.ints("perm")? {
        Some(perm) => perm.iter().map(|&a| context::axis(a, rank)).collect::<Result<_, _>>()?,
        None => (0..rank).rev().collect(),
    };
    Ok(c.transpose(x, &perm)?)
}

pub(super) fn squeeze(c: &mut Context) -> Result<NodeId, OpError> {
    let axes = c.attribute_or_input("axes", 13, 1)?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axes = match axes {
        Some(axes) => c.axes(&axes, shape.rank())?,
        None => (0..shape.rank()).filter(|&a| shape[a] == 1).collect(),
    };
    if axes.iter().any(|&a| shape[a] != 1) {
        return Err(c.operand_error(0, "only axes of size 1 can be squeezed"));
    }
    Ok(c.reshape(x, shape.without(&axes))?)
}

pub(super) fn unsqueeze(c: &mut Context) -> Result<NodeId, OpError> {
    let axes = c.attribute_or_input("axes", 13, 1)?.ok_or(OpError::MissingAttribute("axes"))?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let rank = shape.rank() + axes.len();
    let axes = c.axes(&axes, rank)?;
    let mut sizes = shape.iter().copied();
    let unsqueezed: Shape = (0..rank).map(|a| if axes.contains(&a) { 1 } else { sizes.next().unwrap_or(1) }).collect();
    Ok(c.reshape(x, unsqueezed)?)
}

/// Two-sided: sizes of 1 in the given shape keep those of the operand.
pub(super) fn expand(c: &mut Context) -> Result<NodeId, OpError> {
    let given = shape_operand(c, 1)?;
    let x = c.input(0)?;
    let found = c.ty(x).clone();
    let error = || OpError::Broadcast { b: TensorType::new(found.dtype, given.clone()), a: found.clone() };
    let shape = Shape::broadcast(&found.shape, &given).ok_or_else(error)?;
    Ok(c.broadcast_to(x, &shape)?)
}

pub(super) fn concat(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int("axis")?.ok_or(OpError::MissingAttribute("axis"))?;
    let operands = c.all_inputs()?;
    let axis = context::axis(axis, c.rank(operands[0]))?;
    match operands.as_slice() {
        [x] => Ok(*x),
        operands => Ok(c.push(Op::Concat { axis }, operands)?),
    }
}

/// `size` elements of `axis` from `start`.
pub(super) fn slice_axis(c: &mut Context, x: NodeId, axis: usize, start: usize, size: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    if start == 0 && size == shape[axis] {
        return Ok(x);
    }
    let whole = shape.iter().map(|&size| SliceDim { start: 0, step: 1, size });
    let dims = whole.enumerate().map(|(a, dim)| if a == axis { SliceDim { start, step: 1, size } } else { dim });
    Ok(c.push(Op::Slice(dims.collect()), &[x])?)
}

/// `x` with `axes` reversed.
pub(super) fn reverse_axes(c: &mut Context, x: NodeId, axes: &[usize]) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let dim = |(axis, &size): (usize, &usize)| match axes.contains(&axis) && size > 0 {
        true => SliceDim { start: size - 1, step: -1, size },
        false => SliceDim { start: 0, step: 1, size },
    };
    Ok(c.push(Op::Slice(shape.iter().enumerate().map(dim).collect()), &[x])?)
}

pub(super) fn split(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let axis = c.int_or("axis", 0)?;
    let sizes = c.attribute_or_input("split", 13, 1)?;
    let parts = c.int("num_outputs")?.unwrap_or(c.output_count() as i64);
    let x = c.input(0)?;
    let axis = context::axis(axis, c.rank(x))?;
    let total = c.shape(x)[axis];
    let sizes: Vec<usize> = match sizes {
        Some(sizes) => sizes.iter().map(|&s| extent("split", s)).collect::<Result<_, _>>()?,
        None => {
            let parts = extent("num_outputs", parts)?.max(1);
            let each = total.div_ceil(parts);
            (0..parts).map(|i| each.min(total.saturating_sub(i * each))).collect()
        }
    };
    if sizes.iter().sum::<usize>() != total {
        let value = format!("{sizes:?}");
        return Err(OpError::Attribute { name: "split", value, reason: "the parts do not add up to the axis" });
    }
    let mut start = 0;
    let mut results = Vec::with_capacity(sizes.len());
    for size in sizes {
        results.push(slice_axis(c, x, axis, start, size)?);
        start += size;
    }
    Ok(results)
}

/// `start:end:step` of an axis of `size`, as NumPy clamps it.
fn slice_dim(start: i64, end: i64, step: i64, size: usize) -> Result<SliceDim, OpError> {
    let n = size as i64;
    let step = step.clamp(-n.max(1), n.max(1));
    let from_end = |v: i64| if v < 0 { v.saturating_add(n) } else { v };
    let (low, high) = match step {
        0 => return Err(OpError::Attribute { name: "steps", value: "0".to_owned(), reason: "steps are not zero" }),
        1.. => (0, n),
        _ => (-1, n - 1),
    };
    let (start, end) = (from_end(start).clamp(low, high), from_end(end).clamp(low, high));
    let distance = (end - start) * step.signum();
    let count = if distance <= 0 { 0 } else { (distance + step.abs() - 1) / step.abs() };
    let start = if count == 0 { 0 } else { start as usize };
    Ok(SliceDim { start, step: step as isize, size: count as usize })
}

/// Attributes before opset 10, operands from then on.
pub(super) fn slice(c: &mut Context) -> Result<NodeId, OpError> {
    let (starts, ends, axes, steps) = if c.opset < 10 {
        let list = |name| Ok::<_, OpError>(c.ints(name)?.map(<[i64]>::to_vec));
        (list("starts")?, list("ends")?, list("axes")?, None)
    } else {
        (c.known_ints(1)?, c.known_ints(2)?, c.known_ints(3)?, c.known_ints(4)?)
    };
    let starts = starts.ok_or(OpError::MissingAttribute("starts"))?;
    let ends = ends.ok_or(OpError::MissingAttribute("ends"))?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axes = axes.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = steps.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        let value = format!("{starts:?}");
        return Err(OpError::Attribute { name: "starts", value, reason: "starts, ends, axes and steps have different lengths" });
    }
    c.axes(&axes, shape.rank())?;
    let mut dims: Vec<SliceDim> = shape.iter().map(|&size| SliceDim { start: 0, step: 1, size }).collect();
    for i in 0..starts.len() {
        let axis = context::axis(axes[i], shape.rank())?;
        dims[axis] = slice_dim(starts[i], ends[i], steps[i], shape[axis])?;
    }
    let whole = dims.iter().zip(shape.iter()).all(|(d, &size)| *d == SliceDim { start: 0, step: 1, size });
    if whole { Ok(x) } else { Ok(c.push(Op::Slice(dims), &[x])?) }
}

pub(super) fn pad(c: &mut Context) -> Result<NodeId, OpError> {
    let mode = c.string_or("mode", "constant")?;
    let attribute_value = c.float_or("value", 0.0)?;
    let pads = c.attribute_or_input("pads", 11, 1)?.ok_or(OpError::MissingAttribute("pads"))?;
    let axes = if c.opset >= 18 { c.known_ints(3)? } else { None };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axes = match axes {
        Some(axes) => {
            c.axes(&axes, shape.rank())?;
            axes.iter().map(|&a| context::axis(a, shape.rank())).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..shape.rank()).collect(),
    };
    let too_large = pads.iter().any(|p| p.unsigned_abs() >= 1 << 31);
    if pads.len() != 2 * axes.len() || too_large {
        let value = format!("{pads:?}");
        return Err(OpError::Attribute { name: "pads", value, reason: "two sizes below 2^31 per axis are needed" });
    }
    let mut widths = vec![(0i64, 0i64); shape.rank()];
    for (i, &axis) in axes.iter().enumerate() {
        widths[axis] = (pads[i], pads[axes.len() + i]);
    }
    if mode != "constant" {
        return pad_by_index(c, x, mode, &widths);
    }
    let dtype = c.ty(x).dtype;
    let value = match c.optional(2).filter(|_| c.opset >= 11) {
        Some(value) => c.reshape(value, Shape::scalar())?,
        None => c.constant_tensor(Tensor::from_f64(dtype, Shape::scalar(), &[attribute_value]))?,
    };
    let value = c.cast(value, dtype)?;
    let cropped = crop(c, x, &widths)?;
    let dims: Vec<PadDim> =
        widths.iter().map(|&(low, high)| PadDim { low: low.max(0) as usize, high: high.max(0) as usize, interior: 0 }).collect();
    if dims.iter().all(|d| *d == PadDim::default()) {
        return Ok(cropped);
    }
    Ok(c.push(Op::Pad(dims), &[cropped, value])?)
}

/// The part of `x` that negative pads leave.
fn crop(c: &mut Context, x: NodeId, widths: &[(i64, i64)]) -> Result<NodeId, OpError> {
    let mut y = x;
    for (axis, &(low, high)) in widths.iter().enumerate() {
        let (low, high) = ((-low).max(0) as usize, (-high).max(0) as usize);
        let size = c.shape(y)[axis].checked_sub(low + high).ok_or_else(|| c.operand_error(0, "more is cropped than there is"))?;
        y = slice_axis(c, y, axis, low, size)?;
    }
    Ok(y)
}

/// `x` at the start of zeros of `shape`, which has room for it.
pub(super) fn pad_zeros(c: &mut Context, x: NodeId, shape: &Shape) -> Result<NodeId, OpError> {
    let from = c.shape(x);
    if from == *shape {
        return Ok(x);
    }
    let dims = from.iter().zip(shape.iter()).map(|(&from, &to)| PadDim { low: 0, high: to.saturating_sub(from), interior: 0 });
    let dims = dims.collect();
    let zero = c.constant_tensor(Tensor::from_f64(c.ty(x).dtype, Shape::scalar(), &[0.0]))?;
    Ok(c.push(Op::Pad(dims), &[x, zero])?)
}

/// Pads that repeat elements of the tensor: one gather per padded axis.
fn pad_by_index(c: &mut Context, x: NodeId, mode: &str, widths: &[(i64, i64)]) -> Result<NodeId, OpError> {
    let source: fn(i64, i64) -> i64 = match mode {
        "edge" => |i, n| i.clamp(0, n - 1),
        "wrap" => |i, n| i.rem_euclid(n),
        "reflect" => |i, n| {
            let period = (2 * (n - 1)).max(1);
            let i = i.rem_euclid(period);
            i.min(period - i).min(n - 1)
        },
        other => return Err(OpError::unsupported(format!("padding mode {other:?}"))),
    };
    let mut y = x;
    for (axis, &(low, high)) in widths.iter().enumerate().filter(|(_, w)| **w != (0, 0)) {
        let n = c.shape(y)[axis] as i64;
        let total = table_size(extent("pads", n + low + high)?)?;
        if n == 0 && total > 0 {
            return Err(c.operand_error(0, "an empty axis has nothing to repeat"));
        }
        let indices: Vec<i64> = (0..total as i64).map(|i| source(i - low, n)).collect();
        let indices = c.constant_tensor(Tensor::from_i64(DType::I64, [total], &indices))?;
        y = c.push(Op::Gather { axis }, &[y, indices])?;
    }
    Ok(y)
}

pub(super) fn tile(c: &mut Context) -> Result<NodeId, OpError> {
    let repeats = shape_operand(c, 1)?;
    let mut x = c.input(0)?;
    if repeats.rank() != c.rank(x) {
        return Err(c.operand_error(1, "one count per axis is needed"));
    }
    for axis in 0..repeats.rank() {
        let shape = c.shape(x);
        let (lead, size) = (shape[..axis].iter().product::<usize>(), shape[axis..].iter().product::<usize>());
        x = repeat(c, x, [lead, size], repeats[axis])?;
        let mut tiled = shape.to_vec();
        tiled[axis] = tiled[axis].checked_mul(repeats[axis]).ok_or_else(|| c.operand_error(1, "the result is too large"))?;
        x = c.reshape(x, tiled)?;
    }
    Ok(x)
}

/// `x`, seen as rows of `shape`, with each row `count` times in sequence: `[lead, count, size]`.
pub(super) fn repeat(c: &mut Context, x: NodeId, [lead, size]: [usize; 2], count: usize) -> Result<NodeId, OpError> {
    let rows = c.reshape(x, [lead, size])?;
    Ok(c.push(Op::Broadcast { shape: Shape::from([lead, count, size]), axes: vec![0, 2] }, &[rows])?)
}

/// Keeps the upper (default) or lower triangle of the last two axes; `k` moves the diagonal.
pub(super) fn trilu(c: &mut Context) -> Result<NodeId, OpError> {
    let upper = c.flag("upper", true)?;
    let k = c.known_scalar(1)?.unwrap_or(0.0) as i64;
    let x = c.input(0)?;
    let ty = c.ty(x).clone();
    if ty.shape.rank() < 2 {
        return Err(c.operand_error(0, "at least two axes are needed"));
    }
    let keep = diagonal(c, &ty.shape, k, if upper { CompareOp::Ge } else { CompareOp::Le })?;
    if ty.dtype == DType::Bool {
        return Ok(c.binary(BinaryOp::And, keep, x)?);
    }
    let zero = c.splat(&ty, 0.0)?;
    Ok(c.select(keep, x, zero)?)
}
