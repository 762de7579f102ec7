//! Fourier transforms as products with tables of sines and cosines, window functions, and the mel scale.

use std::f64::consts::PI;

use meganeura_ir::{DotDims, NodeId, Op, Shape, Tensor, WindowDims};

use super::movement;
use super::{Row, Rule, row};
use crate::context::{self, Context, extent, table_size};
use crate::error::OpError;
use crate::tensor::{self, arithmetic};

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("BlackmanWindow",        1..=1, &[0],    Rule::One(|c| cosine_window(c, &[0.42, -0.5, 0.08]))),
    row("DFT",                   1..=3, &[1, 2], Rule::One(dft)),
    row("HammingWindow",         1..=1, &[0],    Rule::One(|c| cosine_window(c, &[25.0 / 46.0, -21.0 / 46.0]))),
    row("HannWindow",            1..=1, &[0],    Rule::One(|c| cosine_window(c, &[0.5, -0.5]))),
    row("MelWeightMatrix",       5..=5, &[0, 1, 2, 3, 4], Rule::One(mel_weight_matrix)),
    row("STFT",                  2..=4, &[1, 3], Rule::One(stft)),
];

/// Elements of a table of sines and cosines: 64 MiB.
const MAX_TABLE: usize = 1 << 24;

/// One size that operand `index` gives.
fn size_operand(c: &mut Context, index: usize) -> Result<usize, OpError> {
    let size = c.known_ints(index)?.ok_or(OpError::MissingInput(index))?;
    match size[..] {
        [size] => extent("size", size),
        _ => Err(c.operand_error(index, "one element is needed")),
    }
}

fn output_dtype(c: &Context) -> Result<meganeura_ir::DType, OpError> {
    let number = c.int_or("output_datatype", 1)?;
    Ok(arithmetic(tensor::dtype(i32::try_from(number).unwrap_or(0))?))
}

/// `sum_k coefficients[k] * cos(2 pi k n / length)`, where the period is the size, or one less if the window is symmetric.
fn cosine_window(c: &mut Context, coefficients: &[f64]) -> Result<NodeId, OpError> {
    let (dtype, periodic) = (output_dtype(c)?, c.flag("periodic", true)?);
    let size = table_size(size_operand(c, 0)?)?;
    if size == 1 && !periodic {
        return Err(c.operand_error(0, "a symmetric window of one element is 0 / 0"));
    }
    let period = if periodic { size as f64 } else { size as f64 - 1.0 };
    let value = |n: usize| -> f64 {
        let terms = coefficients.iter().enumerate();
        terms.map(|(k, coefficient)| coefficient * (2.0 * PI * k as f64 * n as f64 / period).cos()).sum()
    };
    let values: Vec<f64> = (0..size).map(value).collect();
    c.constant_tensor(Tensor::from_f64(dtype, [size], &values))
}

/// Triangles over the bins of a spectrum, equally spaced on the mel scale.
fn mel_weight_matrix(c: &mut Context) -> Result<NodeId, OpError> {
    let dtype = output_dtype(c)?;
    let [bands, length, rate] = [0, 1, 2].map(|i| size_operand(c, i));
    let (bands, length, rate) = (bands?, length?, rate?);
    let [lower, upper] = [3, 4].map(|i| c.known_scalar(i)?.ok_or(OpError::MissingInput(i)));
    let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
    let (low, high) = (mel(lower?), mel(upper?));
    let bins = length / 2 + 1;
    table_size(bands.saturating_add(2).saturating_mul(bins))?;
    let step = (high - low) / (bands + 2) as f64;
    let bin = |band: usize| {
        let hertz = 700.0 * (10f64.powf((low + band as f64 * step) / 2595.0) - 1.0);
        ((length + 1) as f64 * hertz / rate as f64).floor()
    };
    let edges: Vec<f64> = (0..bands + 2).map(bin).collect();
    if edges.iter().any(|edge| !(0.0..bins as f64).contains(edge)) {
        return Err(c.operand_error(4, "the bands reach beyond the spectrum"));
    }
    let mut weights = vec![0.0; bins * bands];
    for (band, edges) in edges.windows(3).enumerate() {
        let [left, centre, right] = [edges[0], edges[1], edges[2]].map(|edge| edge as usize);
        let mut set = |bin: usize, weight: f64| weights[bin * bands + band] = weight;
        if left == centre {
            set(centre, 1.0);
        }
        (left..=centre).filter(|_| left < centre).for_each(|j| set(j, (j - left) as f64 / (centre - left) as f64));
        (centre..right).for_each(|j| set(j, (right - j) as f64 / (right - centre) as f64));
    }
    c.constant_tensor(Tensor::from_f64(dtype, [bins, bands], &weights))
}

/// A discrete Fourier transform. Real numbers have one part, complex numbers two.
#[derive(Clone, Copy)]
struct Transform {
    /// Points of the transform.
    length: usize,
    inverse: bool,
    /// Only the half of a spectrum that determines the other: as the result, or as the operand of an inverse.
    onesided: bool,
}

impl Transform {
    /// Elements that determine the spectrum of a real signal.
    fn half(self) -> usize {
        self.length / 2 + 1
    }

    /// Elements that are read, at most.
    fn inputs(self) -> usize {
        if self.inverse && self.onesided { self.half() } else { self.length }
    }

    fn outputs(self) -> usize {
        if self.onesided && !self.inverse { self.half() } else { self.length }
    }

    /// Parts of the elements of the result.
    fn output_parts(self) -> usize {
        if self.inverse && self.onesided { 1 } else { 2 }
    }

    fn scale(self, i: usize) -> f64 {
        let scale = if self.inverse { 1.0 / self.length as f64 } else { 1.0 };
        // The other half of a one-sided spectrum is its conjugate.
        let mirrored = self.inverse && self.onesided && i > 0 && 2 * i != self.length;
        scale * if mirrored { 2.0 } else { 1.0 }
    }

    /// The weights of `inputs` elements of `parts` parts each: `[inputs, parts, outputs, output parts]`.
    fn table(self, c: &mut Context, x: NodeId, inputs: usize, parts: usize) -> Result<NodeId, OpError> {
        let shape = Shape::from([inputs, parts, self.outputs(), self.output_parts()]);
        let Some(count) = shape.checked_numel().filter(|&count| count <= MAX_TABLE) else {
            return Err(OpError::unsupported(format!("a Fourier transform of {} points", self.length)));
        };
        let n = self.length;
        let circle: Vec<(f64, f64)> = (0..n).map(|i| (2.0 * PI * i as f64 / n as f64).sin_cos()).collect();
        let mut weights = Vec::with_capacity(count);
        for i in 0..inputs {
            let scale = self.scale(i);
            for from in 0..parts {
                for k in 0..self.outputs() {
                    let (sine, cosine) = circle[i * k % n];
                    let sine = if self.inverse { sine } else { -sine };
                    let rotation = if from == 0 { [cosine, sine] } else { [-sine, cosine] };
                    weights.extend(rotation[..self.output_parts()].iter().map(|weight| weight * scale));
                }
            }
        }
        c.constant_tensor(Tensor::from_f64(c.ty(x).dtype, shape, &weights))
    }
}

/// The number of parts of operand 0, its last axis.
fn parts(c: &Context, shape: &Shape) -> Result<usize, OpError> {
    match shape.last() {
        Some(&parts @ 1..=2) if shape.rank() >= 2 => Ok(parts),
        _ => Err(c.operand_error(0, "the last axis holds one real part, or a real and an imaginary one")),
    }
}

/// A length that an operand gives.
fn known_length(c: &mut Context, index: usize) -> Result<Option<usize>, OpError> {
    if c.optional(index).is_none() {
        return Ok(None);
    }
    match size_operand(c, index)? {
        0 => Err(c.operand_error(index, "at least one element is needed")),
        length => Ok(Some(length)),
    }
}

/// The axis is an attribute before opset 20.
pub(super) fn dft(c: &mut Context) -> Result<NodeId, OpError> {
    let (inverse, onesided) = (c.flag("inverse", false)?, c.flag("onesided", false)?);
    let axis = match c.known_ints(2)? {
        Some(axis) => *axis.first().ok_or_else(|| c.operand_error(2, "one element is needed"))?,
        None => c.int_or("axis", if c.opset < 20 { 1 } else { -2 })?,
    };
    let length = known_length(c, 1)?;
    let x = c.input(0)?;
    let shape = c.shape(x);
    let parts = parts(c, &shape)?;
    let axis = context::axis(axis, shape.rank())?;
    if axis == shape.rank() - 1 {
        return Err(OpError::Attribute { name: "axis", value: axis.to_string(), reason: "the last axis holds the parts" });
    }
    let given = shape[axis];
    let length = length.unwrap_or(if inverse && onesided { 2 * given.saturating_sub(1) } else { given });
    if length == 0 {
        return Err(c.operand_error(0, "there is nothing to transform"));
    }
    let transform = Transform { length, inverse, onesided };
    // A longer signal is cut, a shorter one continues with zeros.
    let inputs = given.min(transform.inputs());
    let x = movement::slice_axis(c, x, axis, 0, inputs)?;
    let table = transform.table(c, x, inputs, parts)?;
    let dims = DotDims { lhs_contract: vec![axis, shape.rank() - 1], rhs_contract: vec![0, 1], ..DotDims::default() };
    let y = c.push(Op::Dot(dims), &[x, table])?;
    // The transformed axis comes back to its place.
    let last = shape.rank() - 2;
    let perm: Vec<usize> = (0..axis).chain([last]).chain(axis..last).chain([last + 1]).collect();
    Ok(c.transpose(y, &perm)?)
}

/// The transforms of overlapping frames of the signal, each times the window: `[n, samples, parts] -> [n, frames, outputs, 2]`.
pub(super) fn stft(c: &mut Context) -> Result<NodeId, OpError> {
    let onesided = c.flag("onesided", true)?;
    let step = known_length(c, 1)?.ok_or(OpError::MissingInput(1))?;
    let length = known_length(c, 3)?;
    let (x, window) = (c.input(0)?, c.optional(2));
    let shape = c.shape(x);
    let parts = parts(c, &shape)?;
    if shape.rank() != 3 {
        return Err(c.operand_error(0, "batch, samples and parts are needed"));
    }
    let length = match (length, window.map(|w| c.shape(w))) {
        (None, None) => shape[1],
        (Some(length), None) => length,
        (length, Some(window)) if window.rank() == 1 && length.is_none_or(|length| window[0] == length) => window[0],
        _ => return Err(c.operand_error(2, "the window needs the length of a frame")),
    };
    if length == 0 || length > shape[1] {
        return Err(c.operand_error(0, "the signal is shorter than a frame"));
    }
    let transform = Transform { length, inverse: false, onesided };
    let table = transform.table(c, x, length, parts)?;
    let samples_last = c.transpose(x, &[0, 2, 1])?;
    let zero = c.constant_tensor(Tensor::from_f64(c.ty(x).dtype, Shape::scalar(), &[0.0]))?;
    let frames = WindowDims { size: vec![length], stride: vec![step], dilation: vec![1], pads: vec![(0, 0)] };
    let mut frames = c.push(Op::Unfold(frames), &[samples_last, zero])?;
    if let Some(window) = window {
        let shape = c.shape(frames);
        let window = c.broadcast_along(window, &shape, 3)?;
        frames = c.mul(frames, window)?;
    }
    let dims = DotDims { lhs_contract: vec![3, 1], rhs_contract: vec![0, 1], ..DotDims::default() };
    Ok(c.push(Op::Dot(dims), &[frames, table])?)
}
