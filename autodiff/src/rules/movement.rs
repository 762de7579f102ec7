//! Derivatives of ops that only move elements: the cotangent moves back.

use meganeura_ir::{DType, Graph, GraphError, NodeId, Op, PadDim, ReduceOp, Shape, SliceDim, TensorType, WindowDims};

use super::Cotangent::{self, Value};
use super::{masked_sum, zero_scalar};

pub(super) fn reshape(g: &mut Graph, x: NodeId, dy: NodeId) -> Result<Cotangent, GraphError> {
    let shape = g.ty(x).shape.clone();
    g.reshape(dy, shape).map(Value)
}

pub(super) fn transpose(g: &mut Graph, perm: &[usize], dy: NodeId) -> Result<Cotangent, GraphError> {
    g.transpose(dy, &inverse_permutation(perm)).map(Value)
}

/// The permutation that undoes `perm`.
pub(super) fn inverse_permutation(perm: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; perm.len()];
    for (to, &from) in perm.iter().enumerate() {
        inverse[from] = to;
    }
    inverse
}

/// Repeated elements add.
pub(super) fn broadcast(g: &mut Graph, shape: &Shape, axes: &[usize], dy: NodeId) -> Result<Cotangent, GraphError> {
    let repeated: Vec<usize> = (0..shape.rank()).filter(|a| !axes.contains(a)).collect();
    g.reduce(ReduceOp::Sum, dy, &repeated).map(Value)
}

/// Back to where the elements came from, zeros elsewhere.
pub(super) fn slice(g: &mut Graph, dims: &[SliceDim], x: NodeId, dy: NodeId) -> Result<Cotangent, GraphError> {
    let descending: Vec<usize> = (0..dims.len()).filter(|&a| dims[a].step < 0).collect();
    let ascending = reverse(g, dy, &descending)?;
    let pads = dims.iter().zip(g.ty(x).shape.iter()).map(|(d, &size)| scatter_range(d, size)).collect();
    let zero = zero_scalar(g, dy)?;
    g.push(Op::Pad(pads), &[ascending, zero]).map(Value)
}

/// The padding that puts the elements of range `d`, in ascending order, back on an axis of `size`.
fn scatter_range(d: &SliceDim, size: usize) -> PadDim {
    let stride = d.step.unsigned_abs();
    match d.size {
        0 => PadDim { low: size, ..PadDim::default() },
        // The step of a single element is arbitrary, and may even be 0.
        1 => PadDim { low: d.start, high: size - d.start - 1, interior: 0 },
        n => {
            let span = (n - 1) * stride;
            let low = if d.step < 0 { d.start - span } else { d.start };
            PadDim { low, high: size - low - span - 1, interior: stride - 1 }
        }
    }
}

/// `x` with `axes` reversed.
pub(super) fn reverse(g: &mut Graph, x: NodeId, axes: &[usize]) -> Result<NodeId, GraphError> {
    if axes.is_empty() {
        return Ok(x);
    }
    let range = |(axis, &size): (usize, &usize)| match axes.contains(&axis) {
        true => SliceDim { start: size.saturating_sub(1), step: -1, size },
        false => SliceDim { start: 0, step: 1, size },
    };
    let dims = g.ty(x).shape.iter().enumerate().map(range).collect();
    g.push(Op::Slice(dims), &[x])
}

/// Operand 0: the elements between the padding. Operand 1, the padding value: the sum of the padding.
pub(super) fn pad(g: &mut Graph, dims: &[PadDim], x: NodeId, dy: NodeId, operand: usize) -> Result<Cotangent, GraphError> {
    if operand == 0 {
        let range = |(p, &size): (&PadDim, &usize)| SliceDim { start: p.low, step: p.interior as isize + 1, size };
        let dims = dims.iter().zip(g.ty(x).shape.iter()).map(range).collect();
        return g.push(Op::Slice(dims), &[dy]).map(Value);
    }
    fill_sum(g, Op::Pad(dims.to_vec()), x, dy).map(Value)
}

/// The sum of `dy` over the places that `op`, of `(x, value)`, fills with its value.
fn fill_sum(g: &mut Graph, op: Op, x: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    let inside = TensorType::new(DType::Bool, g.ty(x).shape.clone());
    let inside = g.splat(&inside, 0.0)?;
    let outside = g.splat(&TensorType::scalar(DType::Bool), 1.0)?;
    let filled = g.push(op, &[inside, outside])?;
    masked_sum(g, filled, dy)
}

pub(super) fn concat(
    g: &mut Graph,
    axis: usize,
    operands: &[NodeId],
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    let offset: usize = operands[..operand].iter().map(|&x| g.ty(x).shape[axis]).sum();
    let range = |(a, &size): (usize, &usize)| SliceDim { start: if a == axis { offset } else { 0 }, step: 1, size };
    let dims = g.ty(operands[operand]).shape.iter().enumerate().map(range).collect();
    g.push(Op::Slice(dims), &[dy]).map(Value)
}

/// Operand 0: overlapping windows add. Operand 1, the value outside: the sum over what lay outside.
pub(super) fn unfold(g: &mut Graph, window: &WindowDims, x: NodeId, dy: NodeId, operand: usize) -> Result<Cotangent, GraphError> {
    if operand == 0 {
        let shape = &g.ty(x).shape;
        let sizes = shape[shape.rank() - window.size.len()..].to_vec();
        return g.push(Op::Fold { window: window.clone(), sizes }, &[dy]).map(Value);
    }
    fill_sum(g, Op::Unfold(window.clone()), x, dy).map(Value)
}

pub(super) fn fold(g: &mut Graph, window: &WindowDims, dy: NodeId) -> Result<Cotangent, GraphError> {
    let zero = zero_scalar(g, dy)?;
    g.push(Op::Unfold(window.clone()), &[dy, zero]).map(Value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, grid};

    fn range(start: usize, step: isize, size: usize) -> SliceDim {
        SliceDim { start, step, size }
    }

    fn padding(low: usize, high: usize, interior: usize) -> PadDim {
        PadDim { low, high, interior }
    }

    #[test]
    fn reshape_and_transpose() {
        check("reshape", &[grid([2, 3, 5], -1.0, 1.0)], |g, x| g.reshape(x[0], [5, 6]));
        check("transpose", &[grid([2, 3, 5], -1.0, 1.0)], |g, x| g.transpose(x[0], &[2, 0, 1]));
        check("transpose of nothing", &[grid([2, 0, 5], -1.0, 1.0)], |g, x| g.transpose(x[0], &[2, 0, 1]));
    }

    #[test]
    fn broadcast_sums_what_it_repeated() {
        let broadcast = |shape: &[usize], axes: &[usize]| Op::Broadcast { shape: shape.into(), axes: axes.to_vec() };
        check("new axes", &[grid([3], -1.0, 1.0)], |g, x| g.push(broadcast(&[2, 3, 4], &[1]), x));
        check("scalar", &[grid([], -1.0, 1.0)], |g, x| g.push(broadcast(&[2, 3], &[]), x));
        check("to nothing", &[grid([3], -1.0, 1.0)], |g, x| g.push(broadcast(&[0, 3], &[1]), x));
    }

    #[test]
    fn slices_of_any_step_pad_back() {
        let cases: [(&str, Vec<usize>, Vec<SliceDim>); 6] = [
            ("forward", vec![7, 4], vec![range(1, 2, 3), range(0, 1, 4)]),
            ("backward", vec![7, 4], vec![range(5, -2, 3), range(3, -1, 4)]),
            ("backward to the first", vec![7], vec![range(6, -3, 3)]),
            ("one element", vec![5, 3], vec![range(2, -4, 1), range(1, 0, 1)]),
            ("none", vec![5, 3], vec![range(2, -4, 0), range(1, 1, 2)]),
            ("of nothing", vec![0, 3], vec![range(0, 1, 0), range(2, -1, 2)]),
        ];
        for (name, shape, dims) in cases {
            check(name, &[grid(shape, -1.0, 1.0)], |g, x| g.push(Op::Slice(dims.clone()), x));
        }
    }

    #[test]
    fn pads_pass_to_the_operand_and_to_the_value() {
        let cases = [
            ("outer", vec![2, 3], vec![padding(1, 2, 0), padding(0, 3, 0)]),
            ("interior", vec![4, 3], vec![padding(1, 0, 2), padding(2, 1, 1)]),
            ("of nothing", vec![0, 3], vec![padding(1, 2, 1), padding(0, 0, 0)]),
            ("of one", vec![1, 1], vec![padding(0, 0, 3), padding(1, 0, 3)]),
        ];
        for (name, shape, dims) in cases {
            check(name, &[grid(shape, -1.0, 1.0), grid([], 0.1, 0.9)], |g, x| g.push(Op::Pad(dims.clone()), x));
        }
    }

    #[test]
    fn concat_slices_each_operand_back() {
        let operands = [grid([2, 3], -1.0, 1.0), grid([2, 0], -1.0, 1.0), grid([2, 5], -1.0, 1.0)];
        check("concat", &operands, |g, x| g.push(Op::Concat { axis: 1 }, x));
        check("concat with itself", &operands[..1], |g, x| g.push(Op::Concat { axis: 0 }, &[x[0], x[0]]));
    }

    fn windows() -> [(&'static str, Vec<usize>, WindowDims); 4] {
        let window = |size: &[usize], stride: &[usize], dilation: &[usize], pads: &[(isize, isize)]| WindowDims {
            size: size.to_vec(),
            stride: stride.to_vec(),
            dilation: dilation.to_vec(),
            pads: pads.to_vec(),
        };
        [
            ("overlapping", vec![2, 7], window(&[3], &[2], &[1], &[(1, 2)])),
            ("two axes", vec![5, 6], window(&[2, 3], &[2, 1], &[2, 1], &[(0, 1), (1, 0)])),
            ("cropped", vec![2, 8], window(&[2], &[3], &[2], &[(-1, -2)])),
            ("too small", vec![2, 2], window(&[5], &[1], &[1], &[(1, 1)])),
        ]
    }

    #[test]
    fn unfold_and_fold_are_each_others_derivative() {
        for (name, shape, window) in windows() {
            let unfold = Op::Unfold(window.clone());
            check(name, &[grid(shape.clone(), -1.0, 1.0), grid([], 0.1, 0.9)], |g, x| g.push(unfold.clone(), x));

            let types = [TensorType::new(DType::F64, shape.clone()), TensorType::scalar(DType::F64)];
            let windows = meganeura_ir::infer(&unfold, &[&types[0], &types[1]]).unwrap().shape;
            let sizes = shape[shape.len() - window.size.len()..].to_vec();
            let fold = Op::Fold { window, sizes };
            check(name, &[grid(windows, -1.0, 1.0)], |g, x| g.push(fold.clone(), x));
        }
    }
}
