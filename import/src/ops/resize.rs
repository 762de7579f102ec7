//! Resampling: every axis on its own, with weights that are known when the graph is built.

use meganeura_ir::NodeId;

use super::interpolation::{Tap, interpolate, overwrite};
use super::{Row, Rule, row};
use crate::context::{self, Context, extent, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Resize",                1..=4, &[1, 2, 3], Rule::One(resize)),
    row("Upsample",              1..=2, &[1],    Rule::One(upsample)),
];

/// Where a position of the result lies in the operand.
#[derive(Clone, Copy, PartialEq)]
enum Transform {
    Asymmetric,
    HalfPixel,
    PytorchHalfPixel,
    HalfPixelSymmetric,
    AlignCorners,
    CropAndResize,
}

#[rustfmt::skip]
const TRANSFORMS: &[(&str, Transform)] = &[
    ("asymmetric",           Transform::Asymmetric),
    ("half_pixel",           Transform::HalfPixel),
    ("pytorch_half_pixel",   Transform::PytorchHalfPixel),
    ("half_pixel_symmetric", Transform::HalfPixelSymmetric),
    ("align_corners",        Transform::AlignCorners),
    ("tf_crop_and_resize",   Transform::CropAndResize),
];

/// To an integer position.
type Rounding = fn(f64) -> f64;

#[rustfmt::skip]
const ROUNDINGS: &[(&str, Rounding)] = &[
    ("round_prefer_floor", |v| (v - 0.5).ceil()),
    ("round_prefer_ceil",  |v| (v + 0.5).floor()),
    ("floor",              f64::floor),
    ("ceil",               f64::ceil),
];

#[derive(Clone, Copy)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

const MODES: &[(&str, Mode)] = &[("nearest", Mode::Nearest), ("linear", Mode::Linear), ("cubic", Mode::Cubic)];

/// How sizes are understood: as they are, or as bounds of a common scale.
#[derive(Clone, Copy)]
enum Policy {
    Stretch,
    NotLarger,
    NotSmaller,
}

const POLICIES: &[(&str, Policy)] =
    &[("stretch", Policy::Stretch), ("not_larger", Policy::NotLarger), ("not_smaller", Policy::NotSmaller)];

/// Which elements around a position count, and how much.
#[derive(Clone, Copy)]
enum Filter {
    Nearest(Rounding),
    Linear,
    /// Keys' cubic convolution with coefficient `a`.
    Cubic {
        a: f64,
    },
}

impl Filter {
    /// Elements further away than this have no weight.
    fn reach(self) -> f64 {
        match self {
            Filter::Nearest(_) => 0.0,
            Filter::Linear => 1.0,
            Filter::Cubic { .. } => 2.0,
        }
    }

    /// The weight of an element at `distance`.
    fn weight(self, distance: f64) -> f64 {
        let d = distance.abs();
        match self {
            Filter::Nearest(_) => 1.0,
            Filter::Linear => (1.0 - d).max(0.0),
            Filter::Cubic { a } if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
            Filter::Cubic { a } if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
            Filter::Cubic { .. } => 0.0,
        }
    }
}

/// What holds for every axis.
struct Resampling {
    transform: Transform,
    filter: Filter,
    antialias: bool,
    exclude_outside: bool,
    extrapolation: f64,
}

/// One axis that changes.
#[derive(Clone, Copy)]
struct Axis {
    from: usize,
    to: usize,
    scale: f64,
    /// `from * scale`, which need not be an integer.
    width: f64,
    /// The part of the operand that the result covers, in units of its length.
    region: (f64, f64),
}

/// Weights below this are rounding errors of positions.
const NEGLIGIBLE: f64 = 1e-12;

impl Axis {
    fn position(&self, transform: Transform, i: usize) -> f64 {
        let (i, last) = (i as f64, self.from as f64 - 1.0);
        let half_pixel = (i + 0.5) / self.scale - 0.5;
        match transform {
            Transform::Asymmetric => i / self.scale,
            Transform::HalfPixel => half_pixel,
            Transform::PytorchHalfPixel if self.to > 1 => half_pixel,
            Transform::PytorchHalfPixel => 0.0,
            Transform::HalfPixelSymmetric => self.from as f64 / 2.0 * (1.0 - self.to as f64 / self.width) + half_pixel,
            Transform::AlignCorners if self.width == 1.0 => 0.0,
            Transform::AlignCorners => i * last / (self.width - 1.0),
            Transform::CropAndResize => {
                // Rounded to f32 as in other runtimes: decimal fractions then fall where they are meant to.
                let (start, end) = (self.region.0 as f32, self.region.1 as f32);
                let (first, length) = (f64::from(start * last as f32), f64::from(end - start) * last);
                let within = if self.width == 1.0 { 0.5 } else { i / (self.width - 1.0) };
                first + within * length
            }
        }
    }

    /// The elements that make up the value at `position`.
    fn taps(&self, resampling: &Resampling, position: f64) -> Vec<Tap> {
        let filter = resampling.filter;
        if let Filter::Nearest(round) = filter {
            return vec![Tap { index: round(position) as i64, weight: 1.0 }];
        }
        let stretch = self.stretch(resampling);
        let reach = filter.reach() * stretch;
        let (first, end) = ((position - reach).ceil() as i64, (position + reach).floor() as i64);
        let weighted = (first..=end).map(|index| Tap { index, weight: filter.weight((index as f64 - position) / stretch) });
        let mut taps: Vec<Tap> = weighted.filter(|tap| tap.weight.abs() > NEGLIGIBLE).collect();
        if resampling.exclude_outside {
            taps.retain(|tap| (0..self.from as i64).contains(&tap.index));
        }
        let total: f64 = taps.iter().map(|tap| tap.weight).sum();
        taps.iter_mut().for_each(|tap| tap.weight /= total);
        taps
    }

    /// An antialiasing filter covers as many more elements as there are fewer results.
    fn stretch(&self, resampling: &Resampling) -> f64 {
        if resampling.antialias { (1.0 / self.scale).max(1.0) } else { 1.0 }
    }
}

pub(super) fn resize(c: &mut Context) -> Result<NodeId, OpError> {
    // Before opset 11 there is no choice of coordinates, and scales are the second operand.
    let old = c.opset < 11;
    let filter = match c.choice("mode", "nearest", MODES)? {
        Mode::Nearest => {
            Filter::Nearest(c.choice("nearest_mode", if old { "floor" } else { "round_prefer_floor" }, ROUNDINGS)?)
        }
        Mode::Linear => Filter::Linear,
        Mode::Cubic => Filter::Cubic { a: c.float_or("cubic_coeff_a", -0.75)? },
    };
    let resampling = Resampling {
        transform: c.choice("coordinate_transformation_mode", if old { "asymmetric" } else { "half_pixel" }, TRANSFORMS)?,
        filter,
        antialias: c.flag("antialias", false)?,
        exclude_outside: c.flag("exclude_outside", false)?,
        extrapolation: c.float_or("extrapolation_value", 0.0)?,
    };
    c.ignore(&["nearest_mode", "cubic_coeff_a"]);
    let policy = c.choice("keep_aspect_ratio_policy", "stretch", POLICIES)?;
    let scales_at = if old { 1 } else { 2 };
    let scales = c.known_input(scales_at)?.map(|t| t.to_f64_vec()).filter(|s| !s.is_empty());
    let sizes = if old { None } else { c.known_ints(3)?.filter(|s| !s.is_empty()) };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axes = match c.ints("axes")? {
        Some(axes) => {
            c.axes(axes, shape.rank())?;
            axes.iter().map(|&a| context::axis(a, shape.rank())).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..shape.rank()).collect(),
    };
    let regions = regions(c, resampling.transform, axes.len())?;
    let from: Vec<usize> = axes.iter().map(|&a| shape[a]).collect();
    let changes = match (scales, sizes) {
        (None, Some(sizes)) if sizes.len() == axes.len() => by_sizes(&from, &sizes, &regions, policy)?,
        (Some(scales), None) if scales.len() == axes.len() => by_scales(&from, &scales, &regions)?,
        (Some(_), Some(_)) => return Err(c.operand_error(3, "either scales or sizes are given")),
        _ => return Err(c.operand_error(scales_at, "one scale or size per axis is needed")),
    };
    resample(c, x, &axes, &changes, &resampling)
}

/// The coordinates and the rounding of `Resize` before opset 11.
pub(super) fn upsample(c: &mut Context) -> Result<NodeId, OpError> {
    let filter = match c.choice("mode", "nearest", &MODES[..2])? {
        Mode::Nearest => Filter::Nearest(f64::floor),
        Mode::Linear | Mode::Cubic => Filter::Linear,
    };
    let transform = Transform::Asymmetric;
    let resampling = Resampling { transform, filter, antialias: false, exclude_outside: false, extrapolation: 0.0 };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let scales = match c.floats("scales")? {
        Some(scales) => scales.iter().copied().map(f64::from).collect(),
        None => c.known_input(1)?.ok_or(OpError::MissingInput(1))?.to_f64_vec(),
    };
    if scales.len() != shape.rank() {
        return Err(c.operand_error(0, "one scale per axis is needed"));
    }
    let axes: Vec<usize> = (0..shape.rank()).collect();
    let changes = by_scales(&shape, &scales, &vec![(0.0, 1.0); axes.len()])?;
    resample(c, x, &axes, &changes, &resampling)
}

/// The region of each axis, whole unless the transform crops.
fn regions(c: &mut Context, transform: Transform, count: usize) -> Result<Vec<(f64, f64)>, OpError> {
    if transform != Transform::CropAndResize {
        return Ok(vec![(0.0, 1.0); count]);
    }
    let roi = c.known_input(1)?.ok_or(OpError::MissingInput(1))?.to_f64_vec();
    if roi.len() != 2 * count || roi.iter().any(|v| !v.is_finite()) {
        return Err(c.operand_error(1, "a start and an end per axis are needed"));
    }
    Ok((0..count).map(|i| (roi[i], roi[count + i])).collect())
}

fn by_sizes(from: &[usize], sizes: &[i64], regions: &[(f64, f64)], policy: Policy) -> Result<Vec<Axis>, OpError> {
    let sizes = sizes.iter().map(|&size| extent("sizes", size)).collect::<Result<Vec<_>, _>>()?;
    let scales = || from.iter().zip(&sizes).map(|(&from, &to)| to as f64 / from.max(1) as f64);
    let common = match policy {
        Policy::Stretch => None,
        Policy::NotLarger => scales().reduce(f64::min),
        Policy::NotSmaller => scales().reduce(f64::max),
    };
    let axes = scales().zip(from.iter().zip(&sizes)).zip(regions);
    Ok(axes
        .map(|((own, (&from, &size)), &region)| match common {
            None => Axis { from, to: size, scale: own, width: size as f64, region },
            Some(scale) => {
                let width = scale * from as f64;
                Axis { from, to: (width + 0.5).floor() as usize, scale, width, region }
            }
        })
        .collect())
}

fn by_scales(from: &[usize], scales: &[f64], regions: &[(f64, f64)]) -> Result<Vec<Axis>, OpError> {
    let axes = from.iter().zip(scales).zip(regions);
    axes.map(|((&from, &scale), &region)| {
        if !(scale.is_finite() && scale > 0.0) {
            let (name, value) = ("scales", scale.to_string());
            return Err(OpError::Attribute { name, value, reason: "scales are positive" });
        }
        if region != (0.0, 1.0) {
            // The standard multiplies the size by that of the region; its implementations do not.
            return Err(OpError::unsupported("scales together with a region of interest"));
        }
        // The product in f32 is what the standard's shape inference computes.
        let to = extent("scales", (from as f32 * scale as f32).floor() as i64)?;
        Ok(Axis { from, to, scale, width: from as f64 * scale, region })
    })
    .collect()
}

fn resample(c: &mut Context, x: NodeId, axes: &[usize], changes: &[Axis], resampling: &Resampling) -> Result<NodeId, OpError> {
    let mut y = x;
    for (&axis, change) in axes.iter().zip(changes) {
        let Axis { from, to, scale, .. } = *change;
        if to == from && scale == 1.0 && change.region == (0.0, 1.0) {
            continue;
        }
        if from == 0 && to > 0 {
            return Err(c.operand_error(0, "an empty axis cannot grow"));
        }
        if resampling.transform == Transform::AlignCorners && change.width != to as f64 {
            c.note("the corners align with a fractional size, as in the standard's tests; other runtimes round it first");
        }
        let reach = (2.0 * resampling.filter.reach() * change.stretch(resampling)).min(from as f64 * 2.0) as usize + 1;
        table_size(to.saturating_mul(reach))?;
        let positions: Vec<f64> = (0..to).map(|i| change.position(resampling.transform, i)).collect();
        if resampling.transform == Transform::CropAndResize {
            let last = from as f64 - 1.0;
            let taps: Vec<Vec<Tap>> = positions.iter().map(|p| change.taps(resampling, p.clamp(0.0, last))).collect();
            let outside: Vec<bool> = positions.iter().map(|p| *p < 0.0 || *p > last).collect();
            y = interpolate(c, y, axis, &taps)?;
            y = overwrite(c, y, axis, &outside, resampling.extrapolation)?;
        } else {
            let taps: Vec<Vec<Tap>> = positions.iter().map(|&position| change.taps(resampling, position)).collect();
            y = interpolate(c, y, axis, &taps)?;
        }
    }
    Ok(y)
}
