//! Weighted sums of elements along one axis, with elements and weights that are known when the graph is built.

use meganeura_ir::{DType, NodeId, Op, ReduceOp, Shape, SliceDim, Tensor, WindowDims};

use super::movement;
use crate::context::{Context, table_size};
use crate::error::OpError;

/// An element and its weight. Elements outside the axis stand for its nearest end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tap {
    pub index: i64,
    pub weight: f64,
}

impl Tap {
    /// The element on an axis of `size`.
    fn element(self, size: usize) -> usize {
        self.index.clamp(0, size as i64 - 1) as usize
    }
}

/// Results after which weights may repeat.
const MAX_PHASES: usize = 16;

/// Elements that the results of one period may read.
const MAX_WIDTH: i64 = 64;

/// Weights that differ by less are the same.
const TOLERANCE: f64 = 1e-9;

/// Along `axis`, the sum of `taps[i]` at each position `i` of the result.
pub(super) fn interpolate(c: &mut Context, x: NodeId, axis: usize, taps: &[Vec<Tap>]) -> Result<NodeId, OpError> {
    let ty = c.ty(x).clone();
    let from = ty.shape[axis];
    if taps.iter().all(|taps| matches!(taps[..], [tap] if tap.weight == 1.0)) {
        let source: Vec<usize> = taps.iter().flatten().map(|tap| tap.element(from)).collect();
        return take(c, x, axis, &source);
    }
    if !ty.dtype.is_float() {
        return Err(OpError::unsupported("interpolation between integers"));
    }
    if taps.iter().any(Vec::is_empty) {
        return Err(c.operand_error(0, "no element is near enough"));
    }
    // [lead, axis, trail] -> [lead, trail, axis]
    let (lead, trail) = (ty.shape[..axis].iter().product::<usize>(), ty.shape[axis + 1..].iter().product::<usize>());
    let rows = c.reshape(x, [lead, from, trail])?;
    let sum = match Pattern::of(taps) {
        Some(pattern) => {
            let rows = c.transpose(rows, &[0, 2, 1])?;
            let sum = pattern.slide(c, rows, taps.len())?;
            c.transpose(sum, &[0, 2, 1])?
        }
        None => gather(c, rows, taps)?,
    };
    let mut result = ty.shape.to_vec();
    result[axis] = taps.len();
    Ok(c.reshape(sum, result)?)
}

/// `[lead, axis, trail] -> [lead, taps, trail]`
fn gather(c: &mut Context, x: NodeId, taps: &[Vec<Tap>]) -> Result<NodeId, OpError> {
    let ty = c.ty(x).clone();
    let (to, count) = (taps.len(), taps.iter().map(Vec::len).max().unwrap_or(0));
    let total = table_size(to.saturating_mul(count))?;
    let (mut indices, mut weights) = (Vec::with_capacity(total), Vec::with_capacity(total));
    for taps in taps {
        // Unused places repeat an element that counts, so that an infinity elsewhere stays out.
        let unused = taps.iter().take(1).cycle().map(|tap| Tap { weight: 0.0, ..*tap });
        for tap in taps.iter().copied().chain(unused).take(count) {
            indices.push(tap.element(ty.shape[1]) as i64);
            weights.push(tap.weight);
        }
    }
    let indices = c.constant_tensor(Tensor::from_i64(DType::I64, [to, count], &indices))?;
    let neighbours = c.push(Op::Gather { axis: 1 }, &[x, indices])?;
    let weights = c.constant_tensor(Tensor::from_f64(ty.dtype, [to, count], &weights))?;
    let shape = c.shape(neighbours);
    let weights = c.push(Op::Broadcast { shape, axes: vec![1, 2] }, &[weights])?;
    let weighted = c.mul(neighbours, weights)?;
    Ok(c.reduce(ReduceOp::Sum, weighted, &[2])?)
}

/// Weights that repeat after `phases` results, `step` elements further on. Unlike a gather, a sliding window has a derivative
/// that reads no more than it does.
#[derive(Debug, PartialEq)]
struct Pattern {
    step: usize,
    /// The first element of the first window.
    first: i64,
    width: usize,
    /// `[phases, width]`
    weights: Vec<f64>,
    phases: usize,
}

impl Pattern {
    fn of(taps: &[Vec<Tap>]) -> Option<Pattern> {
        let phases = (1..=MAX_PHASES.min(taps.len() / 2)).find(|&phases| repeats_after(taps, phases))?;
        let period = &taps[..phases];
        let step = taps[phases].first()?.index - taps[0].first()?.index;
        let first = period.iter().flatten().map(|tap| tap.index).min()?;
        let last = period.iter().flatten().map(|tap| tap.index).max()?;
        let width = last - first + 1;
        if width > MAX_WIDTH {
            return None;
        }
        let width = width as usize;
        let mut weights = vec![0.0; phases * width];
        for (phase, taps) in period.iter().enumerate() {
            taps.iter().for_each(|tap| weights[phase * width + (tap.index - first) as usize] += tap.weight);
        }
        Some(Pattern { step: step as usize, first, width, weights, phases })
    }

    /// `[lead, trail, axis] -> [lead, trail, to]`
    fn slide(&self, c: &mut Context, x: NodeId, to: usize) -> Result<NodeId, OpError> {
        let ty = c.ty(x).clone();
        let windows = to.div_ceil(self.phases);
        let end = self.first + ((windows - 1) * self.step + self.width) as i64;
        let (low, high) = (-self.first as isize, (end - ty.shape[2] as i64) as isize);
        let x = repeat_ends(c, x, low.max(0) as usize, high.max(0) as usize)?;
        let dims = WindowDims {
            size: vec![self.width],
            stride: vec![self.step],
            dilation: vec![1],
            pads: vec![(low.min(0), high.min(0))],
        };
        let zero = c.constant_tensor(Tensor::from_f64(ty.dtype, Shape::scalar(), &[0.0]))?;
        let unfolded = c.push(Op::Unfold(dims), &[x, zero])?;
        let shape = Shape::from([ty.shape[0], ty.shape[1], windows, self.phases, self.width]);
        let elements = c.push(Op::Broadcast { shape: shape.clone(), axes: vec![0, 1, 2, 4] }, &[unfolded])?;
        let table = Shape::from([self.phases, self.width]);
        let weights = c.constant_tensor(Tensor::from_f64(ty.dtype, table.clone(), &self.weights))?;
        let weights = c.push(Op::Broadcast { shape: shape.clone(), axes: vec![3, 4] }, &[weights])?;
        let mut weighted = c.mul(elements, weights)?;
        if self.weights.contains(&0.0) {
            // An infinity without weight stays out.
            let counts: Vec<i64> = self.weights.iter().map(|&weight| i64::from(weight != 0.0)).collect();
            let counts = c.constant_tensor(Tensor::from_i64(DType::Bool, table, &counts))?;
            let counts = c.push(Op::Broadcast { shape, axes: vec![3, 4] }, &[counts])?;
            let zero = c.constant_like(weighted, 0.0)?;
            weighted = c.select(counts, weighted, zero)?;
        }
        let sum = c.reduce(ReduceOp::Sum, weighted, &[4])?;
        let sum = c.reshape(sum, [ty.shape[0], ty.shape[1], windows * self.phases])?;
        movement::slice_axis(c, sum, 2, 0, to)
    }
}

/// Whether all taps are those of `phases` results earlier, the same number of elements further on.
fn repeats_after(taps: &[Vec<Tap>], phases: usize) -> bool {
    let (Some(start), Some(next)) = (taps[0].first(), taps[phases].first()) else { return false };
    let step = next.index - start.index;
    let same = |a: &Tap, b: &Tap| b.index - a.index == step && (b.weight - a.weight).abs() < TOLERANCE;
    let moved = |(a, b): (&Vec<Tap>, &Vec<Tap>)| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b));
    step > 0 && taps.iter().zip(&taps[phases..]).all(moved)
}

/// The ends of the last axis of `x: [a, b, size]`, `low` and `high` times more.
fn repeat_ends(c: &mut Context, x: NodeId, low: usize, high: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let repeated = |c: &mut Context, start: usize, count: usize| {
        let end = movement::slice_axis(c, x, 2, start, 1)?;
        Ok::<_, OpError>(c.broadcast_to(end, &Shape::from([shape[0], shape[1], count]))?)
    };
    let mut parts = Vec::with_capacity(3);
    if low > 0 {
        parts.push(repeated(c, 0, low)?);
    }
    parts.push(x);
    if high > 0 {
        parts.push(repeated(c, shape[2] - 1, high)?);
    }
    match parts[..] {
        [only] => Ok(only),
        _ => Ok(c.push(Op::Concat { axis: 2 }, &parts)?),
    }
}

/// `x` at the positions `source` of `axis`: a repetition or a slice where it is one, else a gather.
fn take(c: &mut Context, x: NodeId, axis: usize, source: &[usize]) -> Result<NodeId, OpError> {
    let mut shape = c.shape(x).to_vec();
    let (from, to) = (shape[axis], source.len());
    shape[axis] = to;
    let times = to / from.max(1);
    if times > 0 && source.iter().enumerate().all(|(i, &s)| s == i / times) {
        let (rows, size) = (shape[..axis].iter().product::<usize>() * from, shape[axis + 1..].iter().product());
        let repeated = movement::repeat(c, x, [rows, size], times)?;
        return Ok(c.reshape(repeated, shape)?);
    }
    if let [start, second, ..] = *source
        && let Some(step) = second.checked_sub(start).filter(|&step| step > 0)
        && source.iter().enumerate().all(|(i, &s)| s == start + i * step)
    {
        let whole = |&size: &usize| SliceDim { start: 0, step: 1, size };
        let mut dims: Vec<SliceDim> = shape.iter().map(whole).collect();
        dims[axis] = SliceDim { start, step: step as isize, size: to };
        return Ok(c.push(Op::Slice(dims), &[x])?);
    }
    let indices: Vec<i64> = source.iter().map(|&s| s as i64).collect();
    let indices = c.constant_tensor(Tensor::from_i64(DType::I64, [to], &indices))?;
    Ok(c.push(Op::Gather { axis }, &[x, indices])?)
}

/// `value` where `condition` holds along `axis`, else `x`.
pub(super) fn overwrite(c: &mut Context, x: NodeId, axis: usize, condition: &[bool], value: f64) -> Result<NodeId, OpError> {
    if !condition.contains(&true) {
        return Ok(x);
    }
    let shape = c.shape(x);
    let holds: Vec<i64> = condition.iter().map(|&holds| i64::from(holds)).collect();
    let holds = c.constant_tensor(Tensor::from_i64(DType::Bool, [holds.len()], &holds))?;
    let holds = c.broadcast_along(holds, &shape, axis)?;
    let value = c.constant_like(x, value)?;
    Ok(c.select(holds, value, x)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(positions: &[f64]) -> Vec<Vec<Tap>> {
        let taps = |&p: &f64| {
            let (index, t) = (p.floor() as i64, p - p.floor());
            vec![Tap { index, weight: 1.0 - t }, Tap { index: index + 1, weight: t }]
        };
        positions.iter().map(taps).collect()
    }

    #[test]
    fn weights_that_repeat_are_a_pattern() {
        let doubled = Pattern::of(&linear(&[-0.25, 0.25, 0.75, 1.25, 1.75])).unwrap();
        let weights = vec![0.25, 0.75, 0.0, 0.0, 0.75, 0.25];
        assert_eq!(doubled, Pattern { step: 1, first: -1, width: 3, weights, phases: 2 });
        let halved = Pattern::of(&linear(&[0.5, 2.5, 4.5])).unwrap();
        assert_eq!(halved, Pattern { step: 2, first: 0, width: 2, weights: vec![0.5, 0.5], phases: 1 });
    }

    #[test]
    fn weights_that_do_not_repeat_are_none() {
        assert_eq!(Pattern::of(&linear(&[0.0, 0.3, 0.7, 1.2])), None);
        assert_eq!(Pattern::of(&linear(&[0.5])), None);
        // The same place over and over is no progress.
        assert_eq!(Pattern::of(&linear(&[0.5, 0.5, 0.5, 0.5])), None);
        let mut cut = linear(&[-0.25, 0.25, 0.75, 1.25]);
        cut[0].remove(0);
        assert_eq!(Pattern::of(&cut), None);
    }
}
