//! Images read at computed, fractional positions. Differentiable in the image and in the positions.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, ReduceOp, Shape, Tensor, TensorType, UnaryOp};

use crate::context::Context;
use crate::error::OpError;

/// What lies outside an image.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Border {
    Zeros,
    /// The nearest element.
    Edge,
    /// The mirror image, with the mirror at the centres of the outermost elements or at their outer edges.
    Reflection {
        at_centres: bool,
    },
}

/// The neighbours of a position on one axis, and their weights as polynomials of its fractional part.
#[derive(Clone, Copy)]
pub(super) struct Filter {
    /// To the integer position that the first neighbour is relative to.
    round: UnaryOp,
    /// The first neighbour.
    first: i64,
    neighbours: usize,
    /// Coefficients, one row per power from the highest to the constant, one column per neighbour.
    polynomials: &'static [&'static [f64]],
}

pub(super) const NEAREST: Filter = Filter { round: UnaryOp::Round, first: 0, neighbours: 1, polynomials: &[&[1.0]] };

pub(super) const LINEAR: Filter =
    Filter { round: UnaryOp::Floor, first: 0, neighbours: 2, polynomials: &[&[-1.0, 1.0], &[1.0, 0.0]] };

/// Keys' cubic convolution with coefficient -0.75.
pub(super) const CUBIC: Filter = Filter {
    round: UnaryOp::Floor,
    first: -1,
    neighbours: 4,
    polynomials: &[&[-0.75, 1.25, -1.25, 0.75], &[1.5, -2.25, 1.5, -0.75], &[-0.75, 0.0, 0.75, 0.0], &[0.0, 1.0, 0.0, 0.0]],
};

/// Elements beyond the ends of an axis that positions are told apart; all further ones read the same.
const MARGIN: f64 = 16.0;

/// The neighbours of every position, before they are combined.
pub(super) struct Neighbours {
    /// `[channels, rows, positions, neighbours per axis..]`; zero outside where the border says so.
    pub values: NodeId,
    /// As `values`.
    pub weights: NodeId,
    /// The axes of the neighbours.
    pub axes: Vec<usize>,
}

impl Neighbours {
    /// `[rows, channels, positions]`: values times weights, summed.
    pub fn interpolate(&self, c: &mut Context) -> Result<NodeId, OpError> {
        let weighted = c.mul(self.values, self.weights)?;
        let sum = c.reduce(ReduceOp::Sum, weighted, &self.axes)?;
        Ok(c.transpose(sum, &[1, 0, 2])?)
    }
}

/// One axis of the neighbours: `[rows, positions, neighbours]` each.
struct Taps {
    indices: NodeId,
    weights: NodeId,
    /// Whether they lie in the image, where that matters.
    inside: Option<NodeId>,
}

/// The neighbours of positions in images `x: [n, channels, sizes..]`. `positions` holds one `f32[rows, positions]` per spatial axis,
/// in elements from the centre of the first; `images: i64[rows]` says which image each row reads.
pub(super) fn neighbours(
    c: &mut Context,
    x: NodeId,
    images: NodeId,
    positions: &[NodeId],
    filter: Filter,
    border: Border,
) -> Result<Neighbours, OpError> {
    let shape = c.shape(x);
    let sizes = &shape[2..];
    let Some(&first) = positions.first() else { return Err(c.operand_error(0, "at least one spatial axis is needed")) };
    if sizes.contains(&0) && c.shape(first).numel() > 0 {
        return Err(c.operand_error(0, "nothing can be read from an empty image"));
    }
    let count = filter.neighbours;
    let rank = 2 + sizes.len();
    let all: Shape = c.shape(first).iter().copied().chain(std::iter::repeat_n(count, sizes.len())).collect();

    let mut linear = c.push(Op::Broadcast { shape: all.clone(), axes: vec![0] }, &[images])?;
    let ones = TensorType::new(c.ty(first).dtype, all.clone());
    let mut weights = c.splat(&ones, 1.0)?;
    let mut inside: Option<NodeId> = None;
    for (a, (&size, &position)) in sizes.iter().zip(positions).enumerate() {
        let taps = taps(c, position, size, filter, border)?;
        let axes = vec![0, 1, 2 + a];
        let repeat = Op::Broadcast { shape: all.clone(), axes };
        let indices = c.push(repeat.clone(), &[taps.indices])?;
        linear = c.scale(linear, size as f64)?;
        linear = c.add(linear, indices)?;
        let own = c.push(repeat.clone(), &[taps.weights])?;
        weights = c.mul(weights, own)?;
        if let Some(own) = taps.inside {
            let own = c.push(repeat, &[own])?;
            inside = Some(match inside {
                Some(all) => c.binary(BinaryOp::And, all, own)?,
                None => own,
            });
        }
    }

    let channels_first: Vec<usize> = [1, 0].into_iter().chain(2..shape.rank()).collect();
    let x = c.transpose(x, &channels_first)?;
    let pixels = shape[0] * sizes.iter().product::<usize>();
    let x = c.reshape(x, [shape[1], pixels])?;
    let mut values = c.push(Op::Gather { axis: 1 }, &[x, linear])?;
    let full = c.shape(values);
    let over_channels = Op::Broadcast { shape: full, axes: (1..=rank).collect() };
    if let Some(inside) = inside {
        let inside = c.push(over_channels.clone(), &[inside])?;
        let zero = c.constant_like(values, 0.0)?;
        values = c.select(inside, values, zero)?;
    }
    let weights = c.push(over_channels, &[weights])?;
    Ok(Neighbours { values, weights, axes: (3..=rank).collect() })
}

/// The neighbours of `position: [rows, positions]` on an axis of `size`.
fn taps(c: &mut Context, position: NodeId, size: usize, filter: Filter, border: Border) -> Result<Taps, OpError> {
    let dtype = c.ty(position).dtype;
    let base = c.unary(filter.round, position)?;
    let fraction = c.sub(position, base)?;
    let count = filter.neighbours;
    let shape: Shape = c.shape(position).iter().copied().chain([count]).collect();
    let repeat = Op::Broadcast { shape: shape.clone(), axes: vec![0, 1] };
    let t = c.push(repeat.clone(), &[fraction])?;
    let mut weights = c.splat(&TensorType::new(dtype, shape.clone()), 0.0)?;
    for (power, coefficients) in filter.polynomials.iter().enumerate() {
        let coefficients = c.constant_tensor(Tensor::from_f64(dtype, [count], coefficients))?;
        let coefficients = c.broadcast_along(coefficients, &shape, 2)?;
        weights = if power == 0 {
            coefficients
        } else {
            let product = c.mul(weights, t)?;
            c.add(product, coefficients)?
        };
    }

    let base = match border {
        Border::Reflection { .. } => base,
        // Far outside, positions must not leave the range of integers.
        Border::Zeros | Border::Edge => {
            let (low, high) = (c.constant_like(base, -MARGIN)?, c.constant_like(base, size as f64 + MARGIN)?);
            let base = c.binary(BinaryOp::Max, base, low)?;
            c.binary(BinaryOp::Min, base, high)?
        }
    };
    let base = c.cast(base, DType::I64)?;
    let base = c.push(repeat, &[base])?;
    let offset = c.push(Op::Iota { dtype: DType::I64, shape, axis: 2 }, &[])?;
    let offset = c.shift(offset, filter.first as f64)?;
    let mut indices = c.add(base, offset)?;
    let last = size.saturating_sub(1) as f64;
    let mut inside = None;
    match border {
        Border::Zeros => {
            let clamped = clamp(c, indices, last)?;
            inside = Some(c.compare(CompareOp::Eq, clamped, indices)?);
            indices = clamped;
        }
        Border::Edge => indices = clamp(c, indices, last)?,
        Border::Reflection { at_centres } => {
            let period = if at_centres { 2.0 * last } else { 2.0 * size as f64 }.max(1.0);
            let mirrored = if at_centres { period } else { period - 1.0 };
            let divisor = c.constant_like(indices, period)?;
            let remainder = c.binary(BinaryOp::Rem, indices, divisor)?;
            let positive = c.add(remainder, divisor)?;
            let forth = c.binary(BinaryOp::Rem, positive, divisor)?;
            let end = c.constant_like(forth, mirrored)?;
            let back = c.sub(end, forth)?;
            let nearer = c.binary(BinaryOp::Min, forth, back)?;
            indices = clamp(c, nearer, last)?;
        }
    }
    Ok(Taps { indices, weights, inside })
}

/// Integers within `0..=last`.
fn clamp(c: &mut Context, x: NodeId, last: f64) -> Result<NodeId, OpError> {
    let (low, high) = (c.constant_like(x, 0.0)?, c.constant_like(x, last)?);
    let x = c.binary(BinaryOp::Max, x, low)?;
    Ok(c.binary(BinaryOp::Min, x, high)?)
}

/// `0, 1, ..`: every row reads the image of its number.
pub(super) fn each_image(c: &mut Context, count: usize) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Iota { dtype: DType::I64, shape: Shape::from([count]), axis: 0 }, &[])?)
}

/// `start + step * i` along `axis` of `shape`.
pub(super) fn ramp(
    c: &mut Context,
    dtype: DType,
    shape: &Shape,
    axis: usize,
    [start, step]: [f64; 2],
) -> Result<NodeId, OpError> {
    let ty = TensorType::new(dtype, shape.clone());
    let position = c.push(Op::Iota { dtype, shape: ty.shape, axis }, &[])?;
    let scaled = c.scale(position, step)?;
    Ok(c.shift(scaled, start)?)
}
