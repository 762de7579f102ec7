//! Dot and Conv.

use super::value::{Real, Value, wrap};
use super::walk::{advance, walk};
use crate::{ConvDims, DotDims, TensorType};

pub(super) fn dot<T: Real>(dims: &DotDims, a_ty: &TensorType, b_ty: &TensorType, a: &Value<T>, b: &Value<T>) -> Value<T> {
    let lhs_free = dims.lhs_free(a_ty.shape.rank());
    let rhs_free = dims.rhs_free(b_ty.shape.rank());
    let product = |ty: &TensorType, axes: &[usize]| axes.iter().map(|&a| ty.shape[a]).product::<usize>();
    let sizes = Sizes {
        batch: product(a_ty, &dims.lhs_batch),
        rows: product(a_ty, &lhs_free),
        columns: product(b_ty, &rhs_free),
        depth: product(a_ty, &dims.lhs_contract),
    };
    let lhs_axes = [&dims.lhs_batch[..], &lhs_free, &dims.lhs_contract].concat();
    let rhs_axes = [&dims.rhs_batch[..], &rhs_free, &dims.rhs_contract].concat();
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => {
            let a = permuted(a_ty, &lhs_axes, |i| a[i].to_f64());
            let b = permuted(b_ty, &rhs_axes, |i| b[i].to_f64());
            Value::Float(products(&sizes, &a, &b, |row, column| {
                // Not `sum`, which starts from -0.
                T::from_f64(row.iter().zip(column).fold(0.0, |sum, (x, y)| sum + x * y))
            }))
        }
        (Value::Int(a), Value::Int(b)) => {
            let a = permuted(a_ty, &lhs_axes, |i| a[i]);
            let b = permuted(b_ty, &rhs_axes, |i| b[i]);
            Value::Int(products(&sizes, &a, &b, |row, column| {
                let sum = row.iter().zip(column).fold(0i64, |sum, (x, y)| sum.wrapping_add(x.wrapping_mul(*y)));
                wrap(a_ty.dtype, sum.into())
            }))
        }
        _ => unreachable!("dot takes two tensors of numbers of one class"),
    }
}

struct Sizes {
    batch: usize,
    rows: usize,
    columns: usize,
    depth: usize,
}

/// The elements of a tensor with its axes in the order `axes`.
fn permuted<E>(ty: &TensorType, axes: &[usize], element: impl Fn(usize) -> E) -> Vec<E> {
    let strides = ty.shape.strides();
    let shape: Vec<usize> = axes.iter().map(|&a| ty.shape[a]).collect();
    let moved: Vec<isize> = axes.iter().map(|&a| strides[a] as isize).collect();
    let mut out = Vec::with_capacity(ty.shape.numel());
    walk(&shape, &moved, 0, |i| out.push(element(i)));
    out
}

/// `inner` of each row of `a: [batch, rows, depth]` with each row of `b: [batch, columns, depth]`.
fn products<E, R>(sizes: &Sizes, a: &[E], b: &[E], inner: impl Fn(&[E], &[E]) -> R) -> Vec<R> {
    let Sizes { batch, rows, columns, depth } = *sizes;
    let mut out = Vec::with_capacity(batch * rows * columns);
    for n in 0..batch {
        for i in n * rows..(n + 1) * rows {
            for j in n * columns..(n + 1) * columns {
                out.push(inner(&a[i * depth..(i + 1) * depth], &b[j * depth..(j + 1) * depth]));
            }
        }
    }
    out
}

/// One product that contributes to an output position: where in the input plane, and where in the kernel.
struct Tap {
    input: usize,
    kernel: usize,
}

pub(super) fn conv<T: Real>(
    dims: &ConvDims,
    x_ty: &TensorType,
    w_ty: &TensorType,
    x: &Value<T>,
    w: &Value<T>,
    result: &TensorType,
) -> Value<T> {
    let sums = ConvSums { dims, x: x_ty, w: w_ty, result };
    match (x, w) {
        (Value::Float(x), Value::Float(w)) => {
            Value::Float(sums.over(0.0, |sum, i, k| sum + x[i].to_f64() * w[k].to_f64(), T::from_f64))
        }
        (Value::Int(x), Value::Int(w)) => {
            let add = |sum: i64, i: usize, k: usize| sum.wrapping_add(x[i].wrapping_mul(w[k]));
            Value::Int(sums.over(0, add, |sum| wrap(result.dtype, sum.into())))
        }
        _ => unreachable!("conv takes two tensors of numbers of one class"),
    }
}

struct ConvSums<'a> {
    dims: &'a ConvDims,
    x: &'a TensorType,
    w: &'a TensorType,
    result: &'a TensorType,
}

impl ConvSums<'_> {
    /// For each element of the result, `add` of all positions in the input and in the kernel that meet.
    fn over<S: Copy, R>(&self, zero: S, add: impl Fn(S, usize, usize) -> S, finish: impl Fn(S) -> R) -> Vec<R> {
        let (x, w, result) = (&self.x.shape, &self.w.shape, &self.result.shape);
        let (batch, outputs) = (result[0], result[1]);
        let (channels, group_channels) = (x[1], w[1]);
        let plane: usize = x[2..].iter().product();
        let kernel: usize = w[2..].iter().product();
        let taps = taps(self.dims, &x[2..], &w[2..], &result[2..]);
        let mut out = Vec::with_capacity(result.numel());
        for n in 0..batch {
            for o in 0..outputs {
                let group = o / (outputs / self.dims.groups);
                let first_channel = n * channels + group * group_channels;
                for taps in &taps {
                    let mut sum = zero;
                    for c in 0..group_channels {
                        let (x, w) = ((first_channel + c) * plane, (o * group_channels + c) * kernel);
                        sum = taps.iter().fold(sum, |sum, t| add(sum, x + t.input, w + t.kernel));
                    }
                    out.push(finish(sum));
                }
            }
        }
        out
    }
}

/// For each output position, the kernel positions that meet an input element.
fn taps(dims: &ConvDims, input: &[usize], kernel: &[usize], output: &[usize]) -> Vec<Vec<Tap>> {
    let count: usize = output.iter().product();
    let mut position = vec![0; output.len()];
    (0..count)
        .map(|_| {
            let taps = taps_at(dims, input, kernel, &position);
            advance(&mut position, output);
            taps
        })
        .collect()
}

fn taps_at(dims: &ConvDims, input: &[usize], kernel: &[usize], position: &[usize]) -> Vec<Tap> {
    let count: usize = kernel.iter().product();
    let mut k = vec![0; kernel.len()];
    let mut taps = Vec::with_capacity(count);
    for tap in 0..count {
        let at = (0..input.len()).try_fold(0, |at, a| {
            let dilated = (position[a] * dims.stride[a] + k[a] * dims.kernel_dilation[a]) as isize - dims.pads[a].0;
            let dilated = usize::try_from(dilated).ok()?;
            let i = dilated / dims.input_dilation[a];
            (dilated % dims.input_dilation[a] == 0 && i < input[a]).then(|| at * input[a] + i)
        });
        taps.extend(at.map(|input| Tap { input, kernel: tap }));
        advance(&mut k, kernel);
    }
    taps
}
