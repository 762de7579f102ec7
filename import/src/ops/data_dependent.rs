//! Operators whose result has a shape that the values of an operand decide. These values must be known.

use std::collections::BTreeMap;

use meganeura_ir::{DType, NodeId, Op, Tensor};

use super::{Row, Rule, row};
use crate::context::{self, Context, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Compress",              2..=2, &[1],    Rule::One(compress)),
    row("NonMaxSuppression",     2..=5, &[0, 1, 2, 3, 4], Rule::One(non_max_suppression)),
    row("NonZero",               1..=1, &[0],    Rule::One(non_zero)),
    row("Unique",                1..=1, &[0],    Rule::Many(unique)),
];

/// Comparisons of boxes while the graph is built.
const MAX_OVERLAPS: usize = 1 << 26;

/// A vector of i64 constants.
fn indices(c: &mut Context, values: &[usize]) -> Result<NodeId, OpError> {
    let values: Vec<i64> = values.iter().map(|&v| v as i64).collect();
    c.constant_tensor(Tensor::from_i64(DType::I64, [values.len()], &values))
}

/// The data and its `axis`; without the attribute, all elements in a row.
fn along_axis(c: &mut Context) -> Result<(NodeId, usize), OpError> {
    let x = c.input(0)?;
    let shape = c.shape(x);
    match c.int("axis")? {
        Some(axis) => Ok((x, context::axis(axis, shape.rank())?)),
        None => Ok((c.reshape(x, [shape.numel()])?, 0)),
    }
}

/// The slices along `axis` where the condition holds; of all elements, taken as one axis, without `axis`.
pub(super) fn compress(c: &mut Context) -> Result<NodeId, OpError> {
    let condition = c.known_ints(1)?.ok_or(OpError::MissingInput(1))?;
    let (x, axis) = along_axis(c)?;
    let kept: Vec<usize> = (0..condition.len()).filter(|&i| condition[i] != 0).collect();
    let size = c.shape(x)[axis];
    if let Some(&index) = kept.last().filter(|&&i| i >= size) {
        return Err(OpError::Index { index: index as i64, size });
    }
    let kept = indices(c, &kept)?;
    Ok(c.push(Op::Gather { axis }, &[x, kept])?)
}

/// The positions of the elements that are not zero: one row per axis, one column per element.
pub(super) fn non_zero(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.known_input(0)?.ok_or(OpError::MissingInput(0))?;
    let shape = x.shape().clone();
    table_size(shape.numel())?;
    let values = x.to_f64_vec();
    let found: Vec<Vec<usize>> = (0..values.len()).filter(|&i| values[i] != 0.0).map(|i| shape.unravel(i)).collect();
    let rows: Vec<i64> = (0..shape.rank()).flat_map(|axis| found.iter().map(move |p| p[axis] as i64)).collect();
    c.constant_tensor(Tensor::from_i64(DType::I64, [shape.rank(), found.len()], &rows))
}

/// An order-preserving image of an element: NaN is one value, above all others.
fn sort_keys(x: &Tensor) -> Vec<i128> {
    let float = |v: f64| {
        if v.is_nan() {
            return i128::MAX;
        }
        // Adding 0 makes -0 and 0 equal.
        let bits = (v + 0.0).to_bits() as i64;
        i128::from(if bits < 0 { bits ^ i64::MAX } else { bits })
    };
    match x.dtype() {
        dtype if dtype.is_float() => x.to_f64_vec().into_iter().map(float).collect(),
        DType::U64 => x.to_i64_vec().into_iter().map(|v| i128::from(v as u64)).collect(),
        _ => x.to_i64_vec().into_iter().map(i128::from).collect(),
    }
}

/// What is known of one distinct slice.
struct Group {
    first: usize,
    count: usize,
}

/// The distinct slices along an axis (without one, the distinct elements), ascending or in the order of their first occurrence; for
/// each its first position and its count; and for each position the number of its slice among the distinct ones.
pub(super) fn unique(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let sorted = c.flag("sorted", true)?;
    let known = c.known_input(0)?.ok_or(OpError::MissingInput(0))?;
    let (x, axis) = along_axis(c)?;
    let shape = c.shape(x);
    table_size(shape.numel())?;
    let (size, trail) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let keys = sort_keys(&known);
    let slice = |i: usize| -> Vec<i128> {
        let lines = keys.chunks(trail.max(1)).skip(i).step_by(size.max(1));
        lines.flatten().copied().collect()
    };
    let slices: Vec<Vec<i128>> = (0..size).map(slice).collect();
    let mut groups: BTreeMap<&[i128], Group> = BTreeMap::new();
    for (i, slice) in slices.iter().enumerate() {
        groups.entry(slice).or_insert(Group { first: i, count: 0 }).count += 1;
    }
    let mut order: Vec<(&[i128], Group)> = groups.into_iter().collect();
    if !sorted {
        order.sort_by_key(|(_, group)| group.first);
    }
    let place: BTreeMap<&[i128], usize> = order.iter().enumerate().map(|(i, (slice, _))| (*slice, i)).collect();
    let firsts: Vec<usize> = order.iter().map(|(_, group)| group.first).collect();
    let counts: Vec<usize> = order.iter().map(|(_, group)| group.count).collect();
    let inverse: Vec<usize> = slices.iter().filter_map(|slice| place.get(slice.as_slice()).copied()).collect();
    let firsts = indices(c, &firsts)?;
    let values = c.push(Op::Gather { axis }, &[x, firsts])?;
    Ok(vec![values, firsts, indices(c, &inverse)?, indices(c, &counts)?])
}

/// Corners of a box, in f32 as the operator's threshold is.
#[derive(Clone, Copy)]
struct Corners {
    low: [f32; 2],
    high: [f32; 2],
}

impl Corners {
    /// From two opposite corners.
    fn diagonal(b: [f32; 4]) -> Self {
        Corners { low: [b[0].min(b[2]), b[1].min(b[3])], high: [b[0].max(b[2]), b[1].max(b[3])] }
    }

    /// From the centre and the sizes.
    fn centred(b: [f32; 4]) -> Self {
        let (w, h) = (b[2] / 2.0, b[3] / 2.0);
        Corners { low: [b[0] - w, b[1] - h], high: [b[0] + w, b[1] + h] }
    }

    fn area(self) -> f32 {
        (self.high[0] - self.low[0]) * (self.high[1] - self.low[1])
    }

    /// The area of the intersection over that of the union; 0 where the boxes do not meet or one is empty.
    fn overlap(self, other: Self) -> f32 {
        let side = |axis: usize| (self.high[axis].min(other.high[axis]) - self.low[axis].max(other.low[axis])).max(0.0);
        let intersection = side(0) * side(1);
        let (a, b) = (self.area(), other.area());
        let union = a + b - intersection;
        if intersection <= 0.0 || a <= 0.0 || b <= 0.0 || union <= 0.0 { 0.0 } else { intersection / union }
    }
}

/// Per batch and class, the boxes in descending order of score that overlap none chosen before by more than the threshold:
/// rows of batch, class and box.
pub(super) fn non_max_suppression(c: &mut Context) -> Result<NodeId, OpError> {
    let centred = c.flag("center_point_box", false)?;
    let boxes = c.known_input(0)?.ok_or(OpError::MissingInput(0))?;
    let scores = c.known_input(1)?.ok_or(OpError::MissingInput(1))?;
    let limit = c.known_scalar(2)?.unwrap_or(0.0).max(0.0) as usize;
    let threshold = c.known_scalar(3)?.unwrap_or(0.0) as f32;
    let least_score = c.known_scalar(4)?;
    let &[batches, count, 4] = &boxes.shape()[..] else { return Err(c.operand_error(0, "it is [batches, boxes, 4]")) };
    let classes = match &scores.shape()[..] {
        &[b, classes, n] if b == batches && n == count => classes,
        _ => return Err(c.operand_error(1, "it is [batches, classes, boxes]")),
    };
    let work = batches.saturating_mul(classes).saturating_mul(count).saturating_mul(limit.min(count));
    if work > MAX_OVERLAPS {
        return Err(OpError::unsupported(format!("{work} comparisons of boxes")));
    }
    let corners: Vec<Corners> = boxes
        .to_f32_vec()
        .chunks_exact(4)
        .map(|b| {
            let b = [b[0], b[1], b[2], b[3]];
            if centred { Corners::centred(b) } else { Corners::diagonal(b) }
        })
        .collect();
    let mut rows = Vec::new();
    for (line, scores) in scores.to_f64_vec().chunks(count.max(1)).enumerate() {
        let (batch, class) = (line / classes, line % classes);
        let mut candidates: Vec<usize> = (0..count).filter(|&i| least_score.is_none_or(|least| scores[i] > least)).collect();
        candidates.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let mut chosen: Vec<usize> = Vec::new();
        for i in candidates {
            if chosen.len() >= limit {
                break;
            }
            let own = corners[batch * count + i];
            if chosen.iter().all(|&other| own.overlap(corners[batch * count + other]) <= threshold) {
                chosen.push(i);
                rows.extend([batch as i64, class as i64, i as i64]);
            }
        }
    }
    c.constant_tensor(Tensor::from_i64(DType::I64, [rows.len() / 3, 3], &rows))
}
