//! Pooling of regions of interest.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, ReduceOp, Shape, Tensor, TensorType, UnaryOp};

use super::movement;
use super::sampling::{Border, LINEAR, Neighbours, neighbours, ramp};
use super::{Row, Rule, row};
use crate::context::{Context, extent, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("MaxRoiPool",            2..=2, &[1],    Rule::One(max_roi_pool)),
    row("RoiAlign",              3..=3, &[1],    Rule::One(roi_align)),
];

/// Operand 0, batches of images, and the number of regions in operand 1, each of `width` numbers.
fn images_and_regions(c: &Context, width: usize) -> Result<(NodeId, NodeId, Shape, usize), OpError> {
    let (x, rois) = (c.input(0)?, c.input(1)?);
    let (shape, regions) = (c.shape(x), c.shape(rois));
    if shape.rank() != 4 {
        return Err(c.operand_error(0, "batch, channels, height and width are needed"));
    }
    if regions.rank() != 2 || regions[1] != width {
        return Err(c.operand_error(1, "regions do not have this form"));
    }
    if regions[0] > 0 && shape.contains(&0) {
        return Err(c.operand_error(0, "there is nothing to read"));
    }
    let count = regions[0];
    Ok((x, rois, shape, count))
}

/// Column `index` of the regions, times `scale`: `[regions]`.
fn edge(c: &mut Context, rois: NodeId, index: usize, scale: f64) -> Result<NodeId, OpError> {
    let count = c.shape(rois)[0];
    let column = movement::slice_axis(c, rois, 1, index, 1)?;
    let column = c.reshape(column, [count])?;
    Ok(c.scale(column, scale)?)
}

/// One value per region, repeated over `shape`.
fn per_region(c: &mut Context, x: NodeId, shape: &Shape) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Broadcast { shape: shape.clone(), axes: vec![0] }, &[x])?)
}

/// The samples of the bins along one axis, `[regions, bins, samples]` each.
struct Samples {
    positions: NodeId,
    /// How many samples each region has in a bin, where regions differ.
    counts: Option<Vec<usize>>,
}

#[derive(Clone, Copy)]
struct Bins {
    /// Edges of the regions: columns of the operand.
    columns: [usize; 2],
    bins: usize,
    /// Samples per bin; 0 takes one per element, rounded up.
    ratio: usize,
    scale: f64,
    half_pixel: bool,
}

/// One sample per element of a bin, rounded up. Only known regions tell how many these are.
fn adaptive_counts(c: &mut Context, axis: Bins) -> Result<Vec<usize>, OpError> {
    let rois = c.known_input(1)?.ok_or(OpError::MissingInput(1))?.to_f32_vec();
    let scale = axis.scale as f32;
    let count = |roi: &[f32]| {
        let [start, end] = axis.columns.map(|column| roi[column] * scale);
        let length = if axis.half_pixel { (end - 0.5) - (start - 0.5) } else { (end - start).max(1.0) };
        let samples = (length / axis.bins as f32).ceil().max(0.0);
        extent("sampling_ratio", samples as i64)
    };
    rois.chunks_exact(4).map(count).collect()
}

fn samples(c: &mut Context, rois: NodeId, axis: Bins) -> Result<Samples, OpError> {
    let [start, end] = axis.columns;
    let mut start = edge(c, rois, start, axis.scale)?;
    let end = edge(c, rois, end, axis.scale)?;
    let mut length = c.sub(end, start)?;
    if axis.half_pixel {
        start = c.shift(start, -0.5)?;
    } else {
        let one = c.constant_like(length, 1.0)?;
        length = c.binary(BinaryOp::Max, length, one)?;
    }
    // Divisions rather than products with reciprocals, which miss edges that positions are compared with.
    let bins = c.constant_like(length, axis.bins as f64)?;
    let bin = c.div(length, bins)?;
    let regions = c.shape(rois)[0];
    let counts = if axis.ratio > 0 { None } else { Some(adaptive_counts(c, axis)?) };
    let most = counts.as_ref().map_or(axis.ratio, |counts| counts.iter().copied().max().unwrap_or(0)).max(1);
    let shape = Shape::from([regions, axis.bins, most]);
    table_size(most.saturating_mul(regions))?;
    let dtype = c.ty(rois).dtype;
    let (bin, start) = (per_region(c, bin, &shape)?, per_region(c, start, &shape)?);
    let number = ramp(c, dtype, &shape, 1, [0.0, 1.0])?;
    let offset = c.mul(number, bin)?;
    let first = c.add(start, offset)?;
    // Within a bin: the centres of equal parts.
    let parts: Vec<f64> = match &counts {
        Some(counts) => counts.iter().map(|&count| count.max(1) as f64).collect(),
        None => vec![axis.ratio as f64; regions],
    };
    let parts = c.constant_tensor(Tensor::from_f64(dtype, [regions], &parts))?;
    let parts = per_region(c, parts, &shape)?;
    let centre = ramp(c, dtype, &shape, 2, [0.5, 1.0])?;
    let within = c.mul(centre, bin)?;
    let within = c.div(within, parts)?;
    Ok(Samples { positions: c.add(first, within)?, counts })
}

/// Whether `position` is at most one element outside an axis of `size`.
fn near(c: &mut Context, position: NodeId, size: usize) -> Result<NodeId, OpError> {
    let (low, high) = (c.constant_like(position, -1.0)?, c.constant_like(position, size as f64)?);
    let low = c.compare(CompareOp::Ge, position, low)?;
    let high = c.compare(CompareOp::Le, position, high)?;
    Ok(c.binary(BinaryOp::And, low, high)?)
}

fn at_least_one(name: &'static str, value: i64) -> Result<usize, OpError> {
    let error = || OpError::Attribute { name, value: value.to_string(), reason: "at least one bin is needed" };
    extent(name, value).ok().filter(|&bins| bins > 0).ok_or_else(error)
}

#[derive(Clone, Copy, PartialEq)]
enum Pooling {
    Average,
    Max,
}

/// Pools samples of the bins of each region, read between the elements.
pub(super) fn roi_align(c: &mut Context) -> Result<NodeId, OpError> {
    let default = if c.opset < 16 { "output_half_pixel" } else { "half_pixel" };
    let half_pixel =
        c.choice("coordinate_transformation_mode", default, &[("half_pixel", true), ("output_half_pixel", false)])?;
    let pooling = c.choice("mode", "avg", &[("avg", Pooling::Average), ("max", Pooling::Max)])?;
    let [height, width] = ["output_height", "output_width"].map(|name| c.int_or(name, 1));
    let (height, width) = (at_least_one("output_height", height?)?, at_least_one("output_width", width?)?);
    let ratio = extent("sampling_ratio", c.int_or("sampling_ratio", 0)?)?;
    let scale = c.float_or("spatial_scale", 1.0)?;
    let (x, rois, shape, regions) = images_and_regions(c, 4)?;
    let images = c.input(2)?;
    if *c.shape(images) != [regions] || !c.ty(images).dtype.is_int() {
        return Err(c.operand_error(2, "one image per region is needed"));
    }
    let axis = |columns, bins| Bins { columns, bins, ratio, scale, half_pixel };
    let rows = samples(c, rois, axis([1, 3], height))?;
    let columns = samples(c, rois, axis([0, 2], width))?;

    // [regions, height, width, samples down, samples across]
    let [down, across] = [&rows, &columns].map(|samples| c.shape(samples.positions)[2]);
    let grid = Shape::from([regions, height, width, down, across]);
    let y = c.push(Op::Broadcast { shape: grid.clone(), axes: vec![0, 1, 3] }, &[rows.positions])?;
    let x_position = c.push(Op::Broadcast { shape: grid.clone(), axes: vec![0, 2, 4] }, &[columns.positions])?;
    let near_y = near(c, y, shape[2])?;
    let near_x = near(c, x_position, shape[3])?;
    let near = c.binary(BinaryOp::And, near_y, near_x)?;
    let count: usize = grid[1..].iter().product();
    let mut positions = [y, x_position];
    for (position, size) in positions.iter_mut().zip(&shape[2..]) {
        let (first, last) = (c.constant_like(*position, 0.0)?, c.constant_like(*position, *size as f64 - 1.0)?);
        let inside = c.binary(BinaryOp::Max, *position, first)?;
        let inside = c.binary(BinaryOp::Min, inside, last)?;
        *position = c.reshape(inside, [regions, count])?;
    }
    let images = c.cast(images, DType::I64)?;
    let neighbours = neighbours(c, x, images, &positions, LINEAR, Border::Edge)?;
    let sampled = match pooling {
        Pooling::Average => neighbours.interpolate(c)?,
        Pooling::Max => largest_part(c, &neighbours)?,
    };
    let full: Shape = [regions, shape[1]].into_iter().chain(grid[1..].iter().copied()).collect();
    let sampled = c.reshape(sampled, full.clone())?;
    let near = c.push(Op::Broadcast { shape: full.clone(), axes: vec![0, 2, 3, 4, 5] }, &[near])?;
    let zero = c.constant_like(sampled, 0.0)?;
    let sampled = c.select(near, sampled, zero)?;
    pool_samples(c, sampled, pooling, [&rows.counts, &columns.counts])
}

/// The standard's maximum is over the weighted neighbours, not over interpolated values.
fn largest_part(c: &mut Context, neighbours: &Neighbours) -> Result<NodeId, OpError> {
    let weighted = c.mul(neighbours.values, neighbours.weights)?;
    let largest = c.reduce(ReduceOp::Max, weighted, &neighbours.axes)?;
    Ok(c.transpose(largest, &[1, 0, 2])?)
}

/// Over the last two axes of `[regions, channels, height, width, samples down, samples across]`, of which region `r` has the first
/// `counts[r]` each.
fn pool_samples(c: &mut Context, sampled: NodeId, pooling: Pooling, counts: [&Option<Vec<usize>>; 2]) -> Result<NodeId, OpError> {
    let ty = c.ty(sampled).clone();
    let regions = ty.shape[0];
    let [Some(down), Some(across)] = counts else {
        return match pooling {
            Pooling::Average => Ok(c.mean(sampled, &[4, 5])?),
            Pooling::Max => Ok(c.reduce(ReduceOp::Max, sampled, &[4, 5])?),
        };
    };
    let mut exists = c.splat(&TensorType::new(DType::Bool, ty.shape.clone()), 1.0)?;
    for (axis, counts) in [(4, down), (5, across)] {
        let counts: Vec<i64> = counts.iter().map(|&n| n as i64).collect();
        let counts = c.constant_tensor(Tensor::from_i64(DType::I64, [regions], &counts))?;
        let counts = per_region(c, counts, &ty.shape)?;
        let number = c.push(Op::Iota { dtype: DType::I64, shape: ty.shape.clone(), axis }, &[])?;
        let counted = c.compare(CompareOp::Lt, number, counts)?;
        exists = c.binary(BinaryOp::And, exists, counted)?;
    }
    let totals: Vec<f64> = down.iter().zip(across).map(|(&a, &b)| a as f64 * b as f64).collect();
    let neutral = match pooling {
        Pooling::Average => c.constant_like(sampled, 0.0)?,
        Pooling::Max => c.constant_like(sampled, f64::NEG_INFINITY)?,
    };
    let counted = c.select(exists, sampled, neutral)?;
    let result: Shape = ty.shape[..4].into();
    match pooling {
        Pooling::Average => {
            let shares: Vec<f64> = totals.iter().map(|total| 1.0 / total.max(1.0)).collect();
            let shares = c.constant_tensor(Tensor::from_f64(ty.dtype, [regions], &shares))?;
            let shares = per_region(c, shares, &result)?;
            let sum = c.reduce(ReduceOp::Sum, counted, &[4, 5])?;
            Ok(c.mul(sum, shares)?)
        }
        Pooling::Max => {
            let largest = c.reduce(ReduceOp::Max, counted, &[4, 5])?;
            let empty: Vec<i64> = totals.iter().map(|&total| i64::from(total == 0.0)).collect();
            let empty = c.constant_tensor(Tensor::from_i64(DType::Bool, [regions], &empty))?;
            let empty = per_region(c, empty, &result)?;
            let zero = c.constant_like(largest, 0.0)?;
            Ok(c.select(empty, zero, largest)?)
        }
    }
}

/// The largest element of each bin of each region, whose edges are rounded to elements. Regions name their image first.
pub(super) fn max_roi_pool(c: &mut Context) -> Result<NodeId, OpError> {
    let pooled = match c.ints("pooled_shape")? {
        Some(_) => c.extents("pooled_shape", 2, 1)?,
        None => return Err(OpError::MissingAttribute("pooled_shape")),
    };
    let scale = c.float_or("spatial_scale", 1.0)?;
    let (x, rois, shape, regions) = images_and_regions(c, 5)?;
    let image = edge(c, rois, 0, 1.0)?;
    let image = c.cast(image, DType::I64)?;
    let mut y = c.push(Op::Gather { axis: 0 }, &[x, image])?;
    // [regions, channels, height, width] -> [.., height, bins across] -> [.., bins down, bins across]
    for (axis, columns) in [(3, [1, 3]), (2, [2, 4])] {
        let (bins, size) = (pooled[axis - 2], shape[axis]);
        let within = within_bins(c, rois, columns, scale, Shape::from([regions, bins, size]))?;
        let mut full = c.shape(y).to_vec();
        full.insert(axis, bins);
        let full = Shape::from(full);
        let kept: Vec<usize> = (0..5).filter(|&a| a != axis).collect();
        let values = c.push(Op::Broadcast { shape: full.clone(), axes: kept }, &[y])?;
        let within = c.push(Op::Broadcast { shape: full, axes: vec![0, axis, axis + 1] }, &[within])?;
        let lowest = c.constant_like(values, f64::NEG_INFINITY)?;
        let values = c.select(within, values, lowest)?;
        y = c.reduce(ReduceOp::Max, values, &[axis + 1])?;
    }
    // Bins without elements are zero.
    let lowest = c.constant_like(y, f64::NEG_INFINITY)?;
    let empty = c.compare(CompareOp::Eq, y, lowest)?;
    let zero = c.constant_like(y, 0.0)?;
    debug_assert_eq!(*c.shape(y), [regions, shape[1], pooled[0], pooled[1]]);
    Ok(c.select(empty, zero, y)?)
}

/// Whether each element lies in each bin of each region: bool `[regions, bins, size]`.
fn within_bins(c: &mut Context, rois: NodeId, columns: [usize; 2], scale: f64, shape: Shape) -> Result<NodeId, OpError> {
    let mut rounded = |column| {
        let edge = edge(c, rois, column, scale)?;
        // Halves away from zero.
        let (magnitude, sign) = (c.unary(UnaryOp::Abs, edge)?, c.unary(UnaryOp::Sign, edge)?);
        let up = c.shift(magnitude, 0.5)?;
        let whole = c.unary(UnaryOp::Floor, up)?;
        Ok::<_, OpError>(c.mul(whole, sign)?)
    };
    let (start, end) = (rounded(columns[0])?, rounded(columns[1])?);
    let (start, end) = (c.cast(start, DType::I64)?, c.cast(end, DType::I64)?);
    let length = c.sub(end, start)?;
    let length = c.shift(length, 1.0)?;
    let one = c.constant_like(length, 1.0)?;
    let length = c.binary(BinaryOp::Max, length, one)?;
    let (length, start) = (per_region(c, length, &shape)?, per_region(c, start, &shape)?);
    // Bin `b` runs from `b * length / bins`, rounded down, to `(b + 1) * length / bins`, rounded up.
    let bins = shape[1] as f64;
    let mut bound = |first: f64, up: f64| {
        let number = ramp(c, DType::I64, &shape, 1, [first, 1.0])?;
        let product = c.mul(number, length)?;
        let product = c.shift(product, up)?;
        let divisor = c.constant_like(product, bins)?;
        let offset = c.div(product, divisor)?;
        Ok::<_, OpError>(c.add(start, offset)?)
    };
    let (low, high) = (bound(0.0, 0.0)?, bound(1.0, bins - 1.0)?);
    let element = ramp(c, DType::I64, &shape, 2, [0.0, 1.0])?;
    let above = c.compare(CompareOp::Ge, element, low)?;
    let below = c.compare(CompareOp::Lt, element, high)?;
    Ok(c.binary(BinaryOp::And, above, below)?)
}
