//! Pooling over windows and over whole images.

use meganeura_ir::{Composite, NodeId, Op, ReduceOp, Shape, Tensor, WindowDims};

use super::window::{span, window};
use super::{Row, Rule, row};
use crate::context::{Context, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("AveragePool",           1..=1, &[],     Rule::One(average_pool)),
    row("GlobalAveragePool",     1..=1, &[],     Rule::One(global_average_pool)),
    row("GlobalMaxPool",         1..=1, &[],     Rule::One(global_max_pool)),
    row("MaxPool",               1..=1, &[],     Rule::One(max_pool)),
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

pub(super) fn max_pool(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["storage_order"]);
    if c.has_output(1) {
        return Err(OpError::unsupported("the output Indices"));
    }
    let (x, shape) = spatial(c)?;
    let window = pooling_window(c, &shape[2..])?;
    Ok(c.push(Op::Composite(Composite::MaxPool(window)), &[x])?)
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
