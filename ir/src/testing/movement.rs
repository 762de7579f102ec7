use super::{Samples, f32s, typed};
use crate::{DType, Op, PadDim, Shape, SliceDim, WindowDims};

pub(super) fn add(samples: &mut Samples) {
    reshape_transpose_broadcast(samples);
    slice(samples);
    pad(samples);
    concat(samples);
    windows(samples);
}

fn reshape_transpose_broadcast(samples: &mut Samples) {
    let reshapes: [(&[usize], &[usize]); 6] =
        [(&[7, 33], &[33, 7]), (&[257], &[1, 257, 1]), (&[], &[1, 1]), (&[1], &[]), (&[0, 7], &[3, 0]), (&[2, 3, 4], &[24])];
    for (from, to) in reshapes {
        let (ty, to) = (f32s(from), Shape::from(to));
        samples.add(format!("reshape {ty} to {to}"), &[ty], |g, x| g.push(Op::Reshape(to), x));
    }
    let transposes: [(&[usize], &[usize]); 7] = [
        (&[7, 33], &[1, 0]),
        (&[3, 5, 7], &[2, 0, 1]),
        (&[3, 5, 7], &[0, 2, 1]),
        (&[1, 257], &[1, 0]),
        (&[], &[]),
        (&[0, 3], &[1, 0]),
        (&[2, 3, 1, 4, 5], &[4, 2, 0, 3, 1]),
    ];
    for (shape, perm) in transposes {
        for dtype in [DType::F32, DType::I8, DType::Bool] {
            let ty = typed(dtype, shape);
            samples.add(format!("transpose {ty} by {perm:?}"), &[ty], |g, x| g.push(Op::Transpose(perm.to_vec()), &x[..1]));
        }
    }
    let broadcasts: [(&[usize], &[usize], &[usize]); 8] = [
        (&[], &[], &[7, 33]),
        (&[7], &[0], &[7, 33]),
        (&[33], &[1], &[7, 33]),
        (&[3, 5], &[0, 2], &[3, 4, 5]),
        (&[1], &[1], &[257, 1]),
        (&[], &[], &[]),
        (&[3], &[1], &[0, 3]),
        (&[0], &[0], &[0, 7]),
    ];
    for (from, axes, to) in broadcasts {
        for dtype in [DType::F32, DType::U8] {
            let (ty, shape) = (typed(dtype, from), Shape::from(to));
            samples.add(format!("broadcast {ty} along {axes:?} to {shape}"), &[ty], |g, x| {
                g.push(Op::Broadcast { shape, axes: axes.to_vec() }, x)
            });
        }
    }
}

fn slice(samples: &mut Samples) {
    // Start, step and size per axis.
    type Ranges = &'static [(usize, isize, usize)];
    let cases: [(&[usize], Ranges); 8] = [
        (&[257], &[(3, 1, 200)]),
        (&[257], &[(256, -1, 257)]),
        (&[7, 33], &[(6, -2, 4), (1, 3, 11)]),
        (&[7, 33], &[(2, 1, 1), (32, -5, 7)]),
        (&[3, 5, 7], &[(0, 1, 3), (4, -4, 2), (0, 6, 2)]),
        (&[7], &[(0, 1, 0)]),
        (&[0, 3], &[(0, 1, 0), (2, -1, 3)]),
        (&[], &[]),
    ];
    for (shape, ranges) in cases {
        for dtype in [DType::F32, DType::I64] {
            let ty = typed(dtype, shape);
            let dims: Vec<SliceDim> = ranges.iter().map(|&(start, step, size)| SliceDim { start, step, size }).collect();
            samples.add(format!("slice {ty} at {ranges:?}"), &[ty], |g, x| g.push(Op::Slice(dims), x));
        }
    }
}

fn pad(samples: &mut Samples) {
    // Low, high and interior per axis.
    type Pads = &'static [(usize, usize, usize)];
    let cases: [(&[usize], Pads); 7] = [
        (&[33], &[(2, 5, 0)]),
        (&[7, 33], &[(0, 1, 2), (3, 0, 1)]),
        (&[1, 7], &[(1, 0, 4), (0, 2, 0)]),
        (&[3, 1, 5], &[(0, 0, 0), (1, 2, 3), (0, 1, 1)]),
        (&[0, 3], &[(2, 1, 3), (0, 1, 0)]),
        (&[], &[]),
        (&[257], &[(0, 0, 0)]),
    ];
    for (shape, pads) in cases {
        for dtype in [DType::F32, DType::I32, DType::Bool] {
            let ty = typed(dtype, shape);
            let dims: Vec<PadDim> = pads.iter().map(|&(low, high, interior)| PadDim { low, high, interior }).collect();
            samples.add(format!("pad {ty} by {pads:?}"), &[ty, typed(dtype, &[])], |g, x| g.push(Op::Pad(dims), x));
        }
    }
}

fn concat(samples: &mut Samples) {
    let cases: [(usize, &[&[usize]]); 6] = [
        (0, &[&[7]]),
        (0, &[&[7], &[1], &[33]]),
        (1, &[&[7, 3], &[7, 0], &[7, 33]]),
        (1, &[&[2, 1, 5], &[2, 4, 5]]),
        (2, &[&[2, 3, 1], &[2, 3, 6], &[2, 3, 2]]),
        (0, &[&[0, 3], &[0, 3]]),
    ];
    for (axis, shapes) in cases {
        for dtype in [DType::F32, DType::Bool] {
            let types: Vec<_> = shapes.iter().map(|s| typed(dtype, s)).collect();
            samples.add(format!("concat {dtype}{shapes:?} along {axis}"), &types, |g, x| g.push(Op::Concat { axis }, x));
        }
    }
    samples.add("concat f32[7] with itself".into(), &[f32s(&[7])], |g, x| g.push(Op::Concat { axis: 0 }, &[x[0], x[0]]));
}

/// Windows over one to three axes: strides that leave a rest, dilation, uneven pads, crops.
pub(super) fn window_cases() -> Vec<(Vec<usize>, WindowDims)> {
    type Axis = (usize, usize, usize, (isize, isize));
    // The shape, then size, stride, dilation and pads per spatial axis.
    let cases: [(&[usize], &[Axis]); 9] = [
        (&[33], &[(3, 1, 1, (0, 0))]),
        (&[2, 33], &[(4, 3, 2, (2, 1))]),
        (&[2, 3, 7, 9], &[(2, 2, 1, (0, 0)), (2, 2, 1, (0, 0))]),
        (&[1, 2, 7, 9], &[(3, 2, 1, (1, 0)), (2, 1, 2, (0, 2))]),
        (&[2, 7, 8], &[(3, 1, 1, (-1, -2)), (2, 2, 3, (1, -1))]),
        (&[1, 4, 3, 5], &[(2, 1, 1, (1, 0)), (3, 2, 1, (1, 1)), (2, 2, 2, (0, 1))]),
        (&[2, 3], &[(5, 1, 1, (0, 0))]),
        (&[0, 3, 5], &[(2, 1, 1, (0, 0)), (2, 1, 1, (1, 1))]),
        (&[1, 1], &[(1, 1, 1, (0, 0))]),
    ];
    let window = |axes: &[Axis]| WindowDims {
        size: axes.iter().map(|a| a.0).collect(),
        stride: axes.iter().map(|a| a.1).collect(),
        dilation: axes.iter().map(|a| a.2).collect(),
        pads: axes.iter().map(|a| a.3).collect(),
    };
    cases.into_iter().map(|(shape, axes)| (shape.to_vec(), window(axes))).collect()
}

fn windows(samples: &mut Samples) {
    for (i, (shape, window)) in window_cases().into_iter().enumerate() {
        for dtype in [DType::F32, DType::I32] {
            let ty = typed(dtype, &shape);
            let dims = window.clone();
            samples.add(format!("unfold {ty} case {i}"), &[ty, typed(dtype, &[])], |g, x| g.push(Op::Unfold(dims), x));
        }
        let lead = shape.len() - window.size.len();
        let sizes = shape[lead..].to_vec();
        let counts = sizes.iter().enumerate().map(|(a, &size)| window.output_size(a, size));
        let unfolded: Vec<usize> = shape[..lead].iter().copied().chain(counts).chain(window.size.iter().copied()).collect();
        let ty = f32s(&unfolded);
        samples.add(format!("fold {ty} case {i}"), &[ty], |g, x| g.push(Op::Fold { window, sizes }, x));
    }
}
