//! Sampling at the points of a grid.

use meganeura_ir::{NodeId, Op, Shape};

use super::movement;
use super::sampling::{self, Border, each_image, neighbours, ramp};
use super::{Row, Rule, row};
use crate::context::{Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("AffineGrid",            2..=2, &[1],    Rule::One(affine_grid)),
    row("GridSample",            2..=2, &[],     Rule::One(grid_sample)),
];

/// Opset 16 has other names for two of the filters.
#[rustfmt::skip]
const FILTERS: &[(&str, sampling::Filter)] = &[
    ("linear",   sampling::LINEAR),
    ("bilinear", sampling::LINEAR),
    ("nearest",  sampling::NEAREST),
    ("cubic",    sampling::CUBIC),
    ("bicubic",  sampling::CUBIC),
];

/// Column `index` along the last axis of `x`, which disappears.
fn column(c: &mut Context, x: NodeId, index: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let last = shape.rank() - 1;
    let column = movement::slice_axis(c, x, last, index, 1)?;
    Ok(c.reshape(column, &shape[..last])?)
}

/// `x` at the points of the grid, whose coordinates run from -1 to 1 and name the last axis first.
pub(super) fn grid_sample(c: &mut Context) -> Result<NodeId, OpError> {
    let at_centres = c.flag("align_corners", false)?;
    let filter = c.choice("mode", "linear", FILTERS)?;
    let borders = [("zeros", Border::Zeros), ("border", Border::Edge), ("reflection", Border::Reflection { at_centres })];
    let border = c.choice("padding_mode", "zeros", &borders)?;
    let (x, grid) = (c.input(0)?, c.input(1)?);
    let (shape, points) = (c.shape(x), c.shape(grid));
    if shape.rank() < 3 {
        return Err(c.operand_error(0, "batch, channels and at least one spatial axis are needed"));
    }
    let spatial = shape.rank() - 2;
    if points.rank() != shape.rank() || points[0] != shape[0] || points[spatial + 1] != spatial {
        return Err(c.operand_error(1, "the grid needs the batch of the data and one coordinate per spatial axis"));
    }
    let count: usize = points[1..=spatial].iter().product();
    let grid = c.reshape(grid, [points[0], count, spatial])?;
    let mut positions = Vec::with_capacity(spatial);
    for (axis, &size) in shape[2..].iter().enumerate() {
        let coordinate = column(c, grid, spatial - 1 - axis)?;
        let from_zero = c.shift(coordinate, 1.0)?;
        positions.push(if at_centres {
            c.scale(from_zero, (size as f64 - 1.0) / 2.0)?
        } else {
            let scaled = c.scale(from_zero, size as f64 / 2.0)?;
            c.shift(scaled, -0.5)?
        });
    }
    let images = each_image(c, shape[0])?;
    let y = neighbours(c, x, images, &positions, filter, border)?.interpolate(c)?;
    let result: Shape = shape[..2].iter().chain(&points[1..=spatial]).copied().collect();
    Ok(c.reshape(y, result)?)
}

/// The points of a regular grid from -1 to 1, each through the affine map of its image.
pub(super) fn affine_grid(c: &mut Context) -> Result<NodeId, OpError> {
    let at_centres = c.flag("align_corners", false)?;
    let theta = c.input(0)?;
    let size = c.known_ints(1)?.ok_or(OpError::MissingInput(1))?;
    let size = size.into_iter().map(|d| extent("size", d)).collect::<Result<Vec<_>, _>>()?;
    let spatial = size.len().saturating_sub(2);
    if !(2..=3).contains(&spatial) {
        return Err(c.operand_error(1, "batch, channels and two or three spatial axes are needed"));
    }
    let ty = c.ty(theta).clone();
    if *ty.shape != [size[0], spatial, spatial + 1] {
        return Err(c.operand_error(0, "one matrix with a column more than rows is needed per image"));
    }
    let result: Shape = size[..1].iter().chain(&size[2..]).copied().chain([spatial]).collect();
    let over_points = |c: &mut Context, column: NodeId| {
        c.push(Op::Broadcast { shape: result.clone(), axes: vec![0, spatial + 1] }, &[column]).map_err(OpError::from)
    };
    let shift = column(c, theta, spatial)?;
    let mut sum = over_points(c, shift)?;
    for axis in 0..spatial {
        let points = size[2 + axis] as f64;
        let range = match at_centres {
            true if points > 1.0 => [-1.0, 2.0 / (points - 1.0)],
            // A single point lies in the middle.
            true => [0.0, 0.0],
            false => [1.0 / points - 1.0, 2.0 / points],
        };
        let coordinate = ramp(c, ty.dtype, &result, 1 + axis, range)?;
        let factor = column(c, theta, spatial - 1 - axis)?;
        let factor = over_points(c, factor)?;
        let product = c.mul(factor, coordinate)?;
        sum = c.add(sum, product)?;
    }
    Ok(sum)
}
