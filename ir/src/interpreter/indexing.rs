//! Iota, random numbers, Gather and Scatter.

use super::pointwise::{float_binary, int_binary};
use super::value::{Elements, Real, Value, widen};
use crate::{BinaryOp, DType, ScatterOp, TensorType, random};

pub(super) fn iota<T: Real>(axis: usize, result: &TensorType) -> Value<T> {
    let inner: usize = result.shape[axis + 1..].iter().product();
    let coordinates = (0..result.shape.numel()).map(|i| i / inner % result.shape[axis]);
    let elements = if result.dtype.is_float() {
        Elements::Float(coordinates.map(|i| i as f64).collect())
    } else {
        Elements::Int(coordinates.map(|i| i as i128).collect())
    };
    Value::from_elements(result.dtype, elements)
}

pub(super) fn random_uniform<T: Real>(stream: u32, key: &Value<T>, result: &TensorType) -> Value<T> {
    let words = indices(DType::U32, key);
    let key = [0, 1, 2, 3].map(|i| words[i] as u32);
    Value::Float((0..result.shape.numel() as u32).map(|i| T::from_f64(random::uniform(key, stream, i))).collect())
}

/// The indexed axis of a tensor, seen as `[outer, size, inner]`.
struct Axis {
    outer: usize,
    size: usize,
    inner: usize,
}

impl Axis {
    fn new(axis: usize, ty: &TensorType) -> Self {
        Axis { outer: ty.shape[..axis].iter().product(), size: ty.shape[axis], inner: ty.shape[axis + 1..].iter().product() }
    }
}

fn indices<T: Real>(dtype: DType, value: &Value<T>) -> Vec<i128> {
    let Value::Int(v) = value else {
        unreachable!("indices are integers");
    };
    v.iter().map(|&i| widen(dtype, i)).collect()
}

pub(super) fn gather<T: Real>(axis: usize, ty: &TensorType, indices_ty: &TensorType, x: &Value<T>, i: &Value<T>) -> Value<T> {
    let Axis { outer, size, inner } = Axis::new(axis, ty);
    let last = size.saturating_sub(1) as i128;
    let rows: Vec<usize> = indices(indices_ty.dtype, i).into_iter().map(|i| i.clamp(0, last) as usize).collect();
    let mut positions = Vec::with_capacity(outer * rows.len() * inner);
    for o in 0..outer {
        for row in &rows {
            let start = (o * size + row) * inner;
            positions.extend(start..start + inner);
        }
    }
    x.pick(&positions)
}

/// Operands: the tensor, the indices, the updates.
pub(super) fn scatter<T: Real>(
    op: ScatterOp,
    axis: usize,
    ty: &TensorType,
    indices_ty: &TensorType,
    operands: &[&Value<T>],
) -> Value<T> {
    let target = Axis::new(axis, ty);
    let rows: Vec<Option<usize>> = indices(indices_ty.dtype, operands[1])
        .into_iter()
        .map(|i| usize::try_from(i).ok().filter(|&i| i < target.size))
        .collect();
    let combine = match op {
        ScatterOp::Set => None,
        ScatterOp::Add => Some(BinaryOp::Add),
        ScatterOp::Mul => Some(BinaryOp::Mul),
        ScatterOp::Max => Some(BinaryOp::Max),
        ScatterOp::Min => Some(BinaryOp::Min),
    };
    let elements = match (operands[0].elements(ty.dtype), operands[2].elements(ty.dtype)) {
        (Elements::Float(x), Elements::Float(updates)) => {
            Elements::Float(combine_rows(x, &updates, &target, &rows, combine.map_or(|_, new| new, float_binary)))
        }
        (Elements::Int(x), Elements::Int(updates)) => {
            Elements::Int(combine_rows(x, &updates, &target, &rows, combine.map_or(|_, new| new, int_binary)))
        }
        _ => unreachable!("operands of {} have different classes", op.name()),
    };
    Value::from_elements(ty.dtype, elements)
}

fn combine_rows<E: Copy>(mut x: Vec<E>, updates: &[E], target: &Axis, rows: &[Option<usize>], combine: fn(E, E) -> E) -> Vec<E> {
    let Axis { outer, size, inner } = *target;
    for o in 0..outer {
        for (r, row) in rows.iter().enumerate() {
            let Some(row) = row else { continue };
            let to = (o * size + row) * inner;
            let from = (o * rows.len() + r) * inner;
            for (x, &update) in x[to..to + inner].iter_mut().zip(&updates[from..from + inner]) {
                *x = combine(*x, update);
            }
        }
    }
    x
}
