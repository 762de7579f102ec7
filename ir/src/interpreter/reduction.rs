//! Reduce and ArgReduce.

use super::pointwise::{float_binary, int_binary};
use super::value::{Elements, Real, Value};
use super::walk::walk;
use crate::{ArgOp, BinaryOp, ReduceOp, TensorType, reduce_identity};

pub(super) fn reduce<T: Real>(op: ReduceOp, axes: &[usize], ty: &TensorType, x: &Value<T>, result: &TensorType) -> Value<T> {
    let combine = match op {
        ReduceOp::Sum => BinaryOp::Add,
        ReduceOp::Prod => BinaryOp::Mul,
        ReduceOp::Max => BinaryOp::Max,
        ReduceOp::Min => BinaryOp::Min,
    };
    let mut strides = vec![0; ty.shape.rank()];
    let kept = (0..ty.shape.rank()).filter(|a| !axes.contains(a));
    for (axis, stride) in kept.zip(result.shape.strides()) {
        strides[axis] = stride as isize;
    }
    let count = result.shape.numel();
    if x.is_empty() {
        let identity: Value<T> = Value::from_tensor(&reduce_identity(op, ty.dtype));
        return identity.pick(&vec![0; count]);
    }
    Value::from_elements(
        result.dtype,
        match x.elements(ty.dtype) {
            Elements::Float(v) => Elements::Float(accumulate(&v, float_binary(combine), &ty.shape, &strides, count)),
            Elements::Int(v) => Elements::Int(accumulate(&v, int_binary(combine), &ty.shape, &strides, count)),
        },
    )
}

/// Combines the elements of `x` that share a position of `walk(shape, strides, 0)`; each of `count` positions has at least one.
fn accumulate<E: Copy>(x: &[E], combine: fn(E, E) -> E, shape: &[usize], strides: &[isize], count: usize) -> Vec<E> {
    let mut sums: Vec<Option<E>> = vec![None; count];
    let mut elements = x.iter();
    walk(shape, strides, 0, |p| {
        if let Some(&element) = elements.next() {
            sums[p] = Some(sums[p].map_or(element, |sum| combine(sum, element)));
        }
    });
    sums.into_iter().flatten().collect()
}

/// A NaN counts as both the largest and the smallest element, as in [`Op::Reduce`](crate::Op::Reduce).
pub(super) fn arg_reduce<T: Real>(op: ArgOp, axis: usize, ty: &TensorType, x: &Value<T>) -> Value<T> {
    match x.elements(ty.dtype) {
        Elements::Float(v) => Value::Int(first_best(&v, axis, ty, |new: f64, best: f64| {
            !best.is_nan()
                && (new.is_nan()
                    || match op {
                        ArgOp::Max => new > best,
                        ArgOp::Min => new < best,
                    })
        })),
        Elements::Int(v) => Value::Int(first_best(&v, axis, ty, |new, best| match op {
            ArgOp::Max => new > best,
            ArgOp::Min => new < best,
        })),
    }
}

fn first_best<E: Copy>(x: &[E], axis: usize, ty: &TensorType, better: impl Fn(E, E) -> bool) -> Vec<i64> {
    let outer: usize = ty.shape[..axis].iter().product();
    let inner: usize = ty.shape[axis + 1..].iter().product();
    let size = ty.shape[axis];
    let mut out = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            let at = |k: usize| x[(o * size + k) * inner + i];
            let best = (1..size).fold(0, |best, k| if better(at(k), at(best)) { k } else { best });
            out.push(best as i64);
        }
    }
    out
}
