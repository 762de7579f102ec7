use super::movement::window_cases;
use super::{Samples, typed};
use crate::{Composite, DType, Op, Real, TensorType, infer};

pub(super) fn add(samples: &mut Samples) {
    along_axes(samples);
    pointwise(samples);
    max_pool(samples);
}

fn push(samples: &mut Samples, composite: Composite, ty: TensorType) {
    let op = Op::Composite(composite);
    if infer(&op, &[&ty]).is_ok() {
        samples.add(format!("{} of {ty}, sample {}", op.name(), samples.0.len()), &[ty], |g, x| g.push(op, x));
    }
}

fn along_axes(samples: &mut Samples) {
    let epsilon = Real(1e-5);
    let cases: [(&[usize], &[usize]); 9] = [
        (&[257], &[0]),
        (&[7, 33], &[1]),
        (&[7, 33], &[0]),
        (&[3, 5, 7], &[1]),
        (&[3, 5, 7], &[0, 2]),
        (&[2, 3, 4, 5], &[2, 3]),
        (&[7, 1], &[1]),
        (&[0, 7], &[1]),
        (&[3, 1025], &[1]),
    ];
    for (shape, axes) in cases {
        let dtypes: &[DType] = if shape == [7, 33] { &[DType::F32, DType::F16, DType::F64] } else { &[DType::F32] };
        for &dtype in dtypes {
            let ty = typed(dtype, shape);
            if let &[axis] = axes {
                push(samples, Composite::Softmax { axis }, ty.clone());
                push(samples, Composite::LogSoftmax { axis }, ty.clone());
            }
            push(samples, Composite::Normalize { axes: axes.to_vec(), epsilon }, ty.clone());
            push(samples, Composite::RmsNormalize { axes: axes.to_vec(), epsilon }, ty);
        }
    }
}

fn pointwise(samples: &mut Samples) {
    for composite in [Composite::Gelu, Composite::GeluTanh, Composite::Silu, Composite::Relu] {
        for dtype in DType::ALL {
            push(samples, composite.clone(), typed(dtype, &[7, 33]));
        }
        for shape in [&[257][..], &[], &[0, 3], &[1]] {
            push(samples, composite.clone(), typed(DType::F32, shape));
        }
    }
}

fn max_pool(samples: &mut Samples) {
    for (shape, window) in window_cases() {
        for dtype in [DType::F32, DType::I32] {
            push(samples, Composite::MaxPool(window.clone()), typed(dtype, &shape));
        }
    }
}
