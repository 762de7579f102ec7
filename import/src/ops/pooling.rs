//! Pooling over windows and over whole images.

use meganeura_ir::composite::unfold_lowest;
use meganeura_ir::{
    BinaryOp, CompareOp, Composite, DType, NodeId, Op, ReduceOp, ScatterOp, Shape, Tensor, TensorType, UnaryOp, WindowDims,
};

use super::constants::shape_operand;
use super::window::{span, window};
use super::{Row, Rule, movement, row};
use crate::context::{Context, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("AveragePool",           1..=1, &[],     Rule::One(average_pool)),
    row("GlobalAveragePool",     1..=1, &[],     Rule::One(global_average_pool)),
    row("GlobalLpPool",          1..=1, &[],     Rule::One(global_lp_pool)),
    row("GlobalMaxPool",         1..=1, &[],     Rule::One(global_max_pool)),
    row("LpPool",                1..=1, &[],     Rule::One(lp_pool)),
    row("MaxPool",               1..=1, &[],     Rule::Many(max_pool)),
    row("MaxUnpool",             2..=3, &[2],    Rule::One(max_unpool)),
];

/// The spatial sizes of operand 0.
fn spatial(c: &Context) -> Result<(NodeId, Shape), OpError> {
    let x = c.input(0)?;
    let shape = c.shape(x);
    if shape.rank() < 3 {
        return Err(c.operand_error(0, "batch, channels and at least one spatial axis are needed"));
    }
    Ok((x, shape))
}

/// The pooling window. With `ceil_mode` the last pad grows until the last, partial window fits, unless that window would start in
/// the padding.
fn pooling_window(c: &Context, input: &[usize]) -> Result<WindowDims, OpError> {
    let mut window = window(c, input, None)?;
    if !c.flag("ceil_mode", false)? {
        return Ok(window);
    }
    for (a, &size) in input.iter().enumerate() {
        let (low, high) = window.pads[a];
        let (stride, size, span) = (window.stride[a] as isize, size as isize, span(window.size[a], window.dilation[a]));
        let free = size + low + high - span;
        if free < 0 {
            continue;
        }
        let mut last = (free + stride - 1) / stride;
        if last * stride >= size + low {
            last -= 1;
        }
        window.pads[a].1 = last * stride + span - size - low;
    }
    Ok(window)
}

/// The second result says where in the operand the maxima are.
pub(super) fn max_pool(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let columns_first = c.flag("storage_order", false)?;
    let (x, shape) = spatial(c)?;
    let window = pooling_window(c, &shape[2..])?;
    let y = c.push(Op::Composite(Composite::MaxPool(window.clone())), &[x])?;
    let mut results = vec![y];
    if c.has_output(1) {
        let position = max_position(c, x, y, &window)?;
        results.push(if columns_first { column_major(c, position, &shape)? } else { position });
    }
    Ok(results)
}

/// The row-major position in `x` of the first element of each window that equals its maximum `y`.
fn max_position(c: &mut Context, x: NodeId, y: NodeId, window: &WindowDims) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let values = unfold_lowest(c, x, window)?;
    let position = c.push(Op::Iota { dtype: DType::I64, shape: Shape::from([shape.numel()]), axis: 0 }, &[])?;
    let position = c.reshape(position, shape.clone())?;
    // Padding has the lowest value, which may be the maximum, but it has no position.
    let nowhere = c.splat(&TensorType::scalar(DType::I64), -1.0)?;
    let positions = c.push(Op::Unfold(window.clone()), &[position, nowhere])?;
    let full = c.shape(values);
    let axes: Vec<usize> = (shape.rank()..full.rank()).collect();
    let largest = c.broadcast_without(y, &full, &axes)?;
    let is_largest = c.compare(CompareOp::Eq, values, largest)?;
    let zero = c.constant_like(positions, 0.0)?;
    let somewhere = c.compare(CompareOp::Ge, positions, zero)?;
    let found = c.binary(BinaryOp::And, is_largest, somewhere)?;
    let never = c.constant_like(positions, f64::from(i32::MAX))?;
    let candidates = c.select(found, positions, never)?;
    Ok(c.reduce(ReduceOp::Min, candidates, &axes)?)
}

/// A row-major position in a tensor of `shape` as one in which the first spatial axis varies fastest.
fn column_major(c: &mut Context, position: NodeId, shape: &Shape) -> Result<NodeId, OpError> {
    let strides = shape.strides();
    let image = shape[2..].iter().product::<usize>();
    let quotient = |c: &mut Context, x: NodeId, by: usize, op: BinaryOp| {
        let divisor = c.constant_like(x, by as f64)?;
        c.binary(op, x, divisor).map_err(OpError::from)
    };
    let within = quotient(c, position, image.max(1), BinaryOp::Rem)?;
    let mut result = c.sub(position, within)?;
    let mut stride = 1;
    for axis in 2..shape.rank() {
        let coordinate = quotient(c, within, strides[axis].max(1), BinaryOp::Div)?;
        let coordinate = quotient(c, coordinate, shape[axis].max(1), BinaryOp::Rem)?;
        let offset = c.scale(coordinate, stride as f64)?;
        result = c.add(result, offset)?;
        stride *= shape[axis];
    }
    Ok(result)
}

/// Puts elements back where `MaxPool` found them, between zeros. A larger `output_shape` adds zeros at the ends.
pub(super) fn max_unpool(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, shape) = spatial(c)?;
    let window = window(c, &shape[2..], None)?;
    let indices = c.input(1)?;
    if c.shape(indices) != shape || !c.ty(indices).dtype.is_int() {
        return Err(c.operand_error(1, "one position per element is needed"));
    }
    let grown = |a: usize| -> Option<usize> {
        let (low, high) = window.pads[a];
        let size = (shape[2 + a].checked_sub(1)?.checked_mul(window.stride[a])?).checked_add(window.size[a])?;
        usize::try_from(isize::try_from(size).ok()?.checked_sub(low.checked_add(high)?)?).ok()
    };
    let sizes = (0..shape.rank() - 2).map(grown).collect::<Option<Vec<_>>>();
    let sizes = sizes.ok_or_else(|| c.operand_error(0, "the pads leave nothing, or the result is too large"))?;
    let inferred: Shape = shape[..2].iter().copied().chain(sizes).collect();
    let Some(count) = inferred.checked_numel() else { return Err(c.operand_error(0, "the result is too large")) };
    let target = if c.optional(2).is_some() { shape_operand(c, 2)? } else { inferred.clone() };
    if target.rank() != inferred.rank() || target.iter().zip(inferred.iter()).any(|(target, size)| target < size) {
        return Err(c.operand_error(2, "the shape has no room for the result"));
    }
    let empty = TensorType::new(c.ty(x).dtype, [count]);
    let zeros = c.splat(&empty, 0.0)?;
    let (flat, indices) = (c.reshape(x, [shape.numel()])?, c.reshape(indices, [shape.numel()])?);
    let y = c.push(Op::Scatter { op: ScatterOp::Set, axis: 0 }, &[zeros, indices, flat])?;
    let y = c.reshape(y, inferred)?;
    movement::pad_zeros(c, y, &target)
}

/// `(sum |x|^p)^(1 / p)` over `axes`, which disappear. Where the sum is 0, so is the derivative.
fn lp_norm(c: &mut Context, x: NodeId, axes: &[usize], p: f64) -> Result<NodeId, OpError> {
    let powers = if p == 2.0 {
        c.mul(x, x)?
    } else {
        let magnitude = c.unary(UnaryOp::Abs, x)?;
        let exponent = c.constant_like(magnitude, p)?;
        if p == 1.0 { magnitude } else { c.binary(BinaryOp::Pow, magnitude, exponent)? }
    };
    let sum = c.reduce(ReduceOp::Sum, powers, axes)?;
    if p == 1.0 {
        return Ok(sum);
    }
    let (zero, one) = (c.constant_like(sum, 0.0)?, c.constant_like(sum, 1.0)?);
    let vanishes = c.compare(CompareOp::Eq, sum, zero)?;
    let safe = c.select(vanishes, one, sum)?;
    let root = if p == 2.0 {
        c.unary(UnaryOp::Sqrt, safe)?
    } else {
        let exponent = c.constant_like(safe, 1.0 / p)?;
        c.binary(BinaryOp::Pow, safe, exponent)?
    };
    Ok(c.select(vanishes, zero, root)?)
}

fn order(c: &Context) -> Result<f64, OpError> {
    let p = c.int_or("p", 2)?;
    if p < 1 {
        return Err(OpError::Attribute { name: "p", value: p.to_string(), reason: "norms have an order of at least 1" });
    }
    Ok(p as f64)
}

pub(super) fn lp_pool(c: &mut Context) -> Result<NodeId, OpError> {
    let p = order(c)?;
    let (x, shape) = spatial(c)?;
    let window = pooling_window(c, &shape[2..])?;
    let zero = c.constant_tensor(Tensor::from_f64(c.ty(x).dtype, Shape::scalar(), &[0.0]))?;
    let windows = c.push(Op::Unfold(window), &[x, zero])?;
    let axes: Vec<usize> = (shape.rank()..c.rank(windows)).collect();
    lp_norm(c, windows, &axes, p)
}

pub(super) fn average_pool(c: &mut Context) -> Result<NodeId, OpError> {
    let include_pad = c.flag("count_include_pad", false)?;
    let (x, shape) = spatial(c)?;
    let window = pooling_window(c, &shape[2..])?;
    let declared = if include_pad { super::window::window(c, &shape[2..], None)?.pads } else { vec![(0, 0); shape.rank() - 2] };
    let counts: Vec<Vec<f64>> =
        (0..shape.rank() - 2).map(|a| window_counts(&window, a, shape[2 + a], declared[a])).collect::<Result<_, _>>()?;
    let dtype = c.ty(x).dtype;
    let zero = c.constant_tensor(Tensor::from_f64(dtype, Shape::scalar(), &[0.0]))?;
    let windows = c.push(Op::Unfold(window), &[x, zero])?;
    let rank = c.rank(windows);
    let axes: Vec<usize> = (shape.rank()..rank).collect();
    let mut y = c.reduce(ReduceOp::Sum, windows, &axes)?;
    let result = c.shape(y);
    for (a, counts) in counts.iter().enumerate() {
        let factors: Vec<f64> = counts.iter().map(|count| 1.0 / count).collect();
        y = match factors.split_first() {
            Some((first, rest)) if rest.iter().all(|f| f == first) => c.scale(y, *first)?,
            _ => {
                let factors = c.constant_tensor(Tensor::from_f64(dtype, [factors.len()], &factors))?;
                let factors = c.broadcast_along(factors, &result, 2 + a)?;
                c.mul(y, factors)?
            }
        };
    }
    Ok(y)
}

/// For each window along spatial axis `a` of `input` elements, how many of its positions lie in the input extended by `pads`.
/// At least 1, so that a window of padding alone averages to zero.
fn window_counts(window: &WindowDims, a: usize, input: usize, pads: (isize, isize)) -> Result<Vec<f64>, OpError> {
    let (low, high) = (-pads.0, input as isize + pads.1);
    let (size, dilation) = (window.size[a] as isize, window.dilation[a] as isize);
    let windows = table_size(window.output_size(a, input))?;
    let count = |w: usize| {
        let start = (w * window.stride[a]) as isize - window.pads[a].0;
        // Positions start + k * dilation below a bound.
        let below = |bound: isize| (bound - start + dilation - 1).div_euclid(dilation).clamp(0, size);
        (below(high) - below(low)).max(1) as f64
    };
    Ok((0..windows).map(count).collect())
}

fn global(
    c: &mut Context,
    reduce: impl Fn(&mut Context, NodeId, &[usize]) -> Result<NodeId, OpError>,
) -> Result<NodeId, OpError> {
    let (x, shape) = spatial(c)?;
    let axes: Vec<usize> = (2..shape.rank()).collect();
    let reduced = reduce(c, x, &axes)?;
    Ok(c.reshape(reduced, shape.iter().enumerate().map(|(a, &d)| if a < 2 { d } else { 1 }).collect::<Shape>())?)
}

pub(super) fn global_average_pool(c: &mut Context) -> Result<NodeId, OpError> {
    global(c, |c, x, axes| Ok(c.mean(x, axes)?))
}

pub(super) fn global_max_pool(c: &mut Context) -> Result<NodeId, OpError> {
    global(c, |c, x, axes| Ok(c.reduce(ReduceOp::Max, x, axes)?))
}

pub(super) fn global_lp_pool(c: &mut Context) -> Result<NodeId, OpError> {
    let p = order(c)?;
    global(c, |c, x, axes| lp_norm(c, x, axes, p))
}
