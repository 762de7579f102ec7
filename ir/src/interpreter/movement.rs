//! Ops that rearrange, repeat and pad elements, and the sum that undoes windows.

use super::value::{Elements, Real, Value};
use super::walk::{positions, walk, window_positions};
use crate::{PadDim, SliceDim, TensorType, WindowDims};

fn signed_strides(ty: &TensorType) -> Vec<isize> {
    ty.shape.strides().into_iter().map(|s| s as isize).collect()
}

pub(super) fn transpose<T: Real>(perm: &[usize], ty: &TensorType, x: &Value<T>, result: &TensorType) -> Value<T> {
    let strides = signed_strides(ty);
    let moved: Vec<isize> = perm.iter().map(|&a| strides[a]).collect();
    x.pick(&positions(&result.shape, &moved, 0))
}

pub(super) fn broadcast<T: Real>(axes: &[usize], ty: &TensorType, x: &Value<T>, result: &TensorType) -> Value<T> {
    let mut repeated = vec![0; result.shape.rank()];
    for (&axis, stride) in axes.iter().zip(signed_strides(ty)) {
        repeated[axis] = stride;
    }
    x.pick(&positions(&result.shape, &repeated, 0))
}

pub(super) fn slice<T: Real>(dims: &[SliceDim], ty: &TensorType, x: &Value<T>) -> Value<T> {
    let sizes: Vec<usize> = dims.iter().map(|d| d.size).collect();
    if sizes.contains(&0) {
        return x.pick(&[]);
    }
    let strides = signed_strides(ty);
    let offset = dims.iter().zip(&strides).map(|(d, s)| d.start as isize * s).sum();
    // A range of one element may have any step.
    let steps: Vec<isize> = dims.iter().zip(&strides).map(|(d, s)| if d.size == 1 { 0 } else { d.step * s }).collect();
    x.pick(&positions(&sizes, &steps, offset))
}

/// Writes the elements of `x` to consecutive positions of `walk(shape, strides, offset)` in `out`.
fn place<T: Real>(out: &mut Value<T>, x: &Value<T>, shape: &[usize], strides: &[isize], offset: isize) {
    fn copy<E: Copy>(out: &mut [E], x: &[E], shape: &[usize], strides: &[isize], offset: isize) {
        let mut elements = x.iter();
        walk(shape, strides, offset, |p| {
            if let Some(&element) = elements.next() {
                out[p] = element;
            }
        });
    }
    match (out, x) {
        (Value::Float(out), Value::Float(x)) => copy(out, x, shape, strides, offset),
        (Value::Int(out), Value::Int(x)) => copy(out, x, shape, strides, offset),
        (Value::Bool(out), Value::Bool(x)) => copy(out, x, shape, strides, offset),
        _ => unreachable!("operands have different classes"),
    }
}

pub(super) fn pad<T: Real>(dims: &[PadDim], ty: &TensorType, x: &Value<T>, value: &Value<T>, result: &TensorType) -> Value<T> {
    let mut out = value.pick(&vec![0; result.shape.numel()]);
    let strides = signed_strides(result);
    let offset = dims.iter().zip(&strides).map(|(d, s)| d.low as isize * s).sum();
    // An axis of at most one element may have any gap.
    let step = |(a, d): (usize, &PadDim)| if ty.shape[a] > 1 { (d.interior + 1) as isize * strides[a] } else { 0 };
    let steps: Vec<isize> = dims.iter().enumerate().map(step).collect();
    place(&mut out, x, &ty.shape, &steps, offset);
    out
}

pub(super) fn concat<T: Real>(axis: usize, types: &[&TensorType], operands: &[&Value<T>], result: &TensorType) -> Value<T> {
    let count = result.shape.numel();
    let mut out = match operands[0] {
        Value::Float(_) => Value::Float(vec![T::default(); count]),
        Value::Int(_) => Value::Int(vec![0; count]),
        Value::Bool(_) => Value::Bool(vec![false; count]),
    };
    let strides = signed_strides(result);
    let mut offset = 0;
    for (ty, x) in types.iter().zip(operands) {
        place(&mut out, x, &ty.shape, &strides, offset);
        offset += ty.shape[axis] as isize * strides[axis];
    }
    out
}

pub(super) fn unfold<T: Real>(window: &WindowDims, ty: &TensorType, x: &Value<T>, value: &Value<T>) -> Value<T> {
    fn windows<E: Copy>(table: &[Option<usize>], planes: usize, plane: usize, x: &[E], value: E) -> Vec<E> {
        let mut out = Vec::with_capacity(planes * table.len());
        for p in 0..planes {
            out.extend(table.iter().map(|position| position.map_or(value, |i| x[p * plane + i])));
        }
        out
    }
    let lead = ty.shape.rank() - window.size.len();
    let (planes, plane) = (ty.shape[..lead].iter().product(), ty.shape[lead..].iter().product());
    let table = window_positions(window, &ty.shape[lead..]);
    match (x, value) {
        (Value::Float(x), Value::Float(v)) => Value::Float(windows(&table, planes, plane, x, v[0])),
        (Value::Int(x), Value::Int(v)) => Value::Int(windows(&table, planes, plane, x, v[0])),
        (Value::Bool(x), Value::Bool(v)) => Value::Bool(windows(&table, planes, plane, x, v[0])),
        _ => unreachable!("operands have different classes"),
    }
}

pub(super) fn fold<T: Real>(window: &WindowDims, sizes: &[usize], x: &Value<T>, result: &TensorType) -> Value<T> {
    let Value::Float(x) = x else {
        unreachable!("fold takes floats");
    };
    let table = window_positions(window, sizes);
    let plane: usize = sizes.iter().product();
    let mut sums = vec![0.0; result.shape.numel()];
    if plane > 0 && !table.is_empty() {
        for (out, windows) in sums.chunks_exact_mut(plane).zip(x.chunks_exact(table.len())) {
            for (element, position) in windows.iter().zip(&table) {
                if let Some(i) = position {
                    out[*i] += element.to_f64();
                }
            }
        }
    }
    Value::from_elements(result.dtype, Elements::Float(sums))
}
