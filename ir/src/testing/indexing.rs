use super::{Samples, f32s, typed};
use crate::{DType, DTypeClass, Op, ScatterOp, Shape, Tensor, gathered_shape};

pub(super) fn add(samples: &mut Samples) {
    iota(samples);
    gather(samples);
    scatter(samples);
}

fn iota(samples: &mut Samples) {
    let cases: [(&[usize], usize); 6] = [(&[257], 0), (&[7, 33], 0), (&[7, 33], 1), (&[3, 1, 5], 1), (&[0, 7], 1), (&[1], 0)];
    for (i, (shape, axis)) in cases.into_iter().enumerate() {
        for dtype in DType::ALL {
            // One shape for the other dtypes; small enough for the narrowest.
            if dtype == DType::Bool || dtype != DType::F32 && i != 2 {
                continue;
            }
            let ty = typed(dtype, shape);
            samples.add(format!("iota {ty} along {axis}"), &[], |g, _| {
                g.push(Op::Iota { dtype, shape: Shape::from(shape), axis }, &[])
            });
        }
    }
}

/// The indexed shape, the indices' shape, the axis.
const CASES: [(&[usize], &[usize], usize); 9] = [
    (&[7], &[33], 0),
    (&[7, 33], &[5], 0),
    (&[7, 33], &[5], 1),
    (&[3, 4, 5], &[2, 3], 1),
    (&[3, 257], &[], 0),
    (&[2, 3, 4], &[1], 2),
    (&[7, 0], &[3], 0),
    (&[7, 3], &[0], 0),
    (&[1, 7], &[5], 0),
];

fn gather(samples: &mut Samples) {
    for (i, (shape, indices, axis)) in CASES.into_iter().enumerate() {
        let (dtypes, index_dtypes) = dtypes(i);
        for &dtype in dtypes {
            for &index in index_dtypes {
                let (ty, index) = (typed(dtype, shape), typed(index, indices));
                let name = format!("gather {ty} along {axis} at {index}");
                samples.add(name, &[ty, index], |g, x| g.push(Op::Gather { axis }, x));
            }
        }
    }
}

fn scatter(samples: &mut Samples) {
    for &op in ScatterOp::ALL {
        for (i, (shape, indices, axis)) in CASES.into_iter().enumerate() {
            let (dtypes, index_dtypes) = dtypes(i);
            for &dtype in dtypes.iter().filter(|d| d.class() != DTypeClass::Bool) {
                for &index in index_dtypes {
                    let (ty, index) = (typed(dtype, shape), typed(index, indices));
                    let updates = typed(dtype, &gathered_shape(&ty.shape, &index.shape, axis));
                    let name = format!("{} {ty} along {axis} at {index}", op.name());
                    samples.add(name, &[ty, index, updates], |g, x| g.push(Op::Scatter { op, axis }, x));
                }
            }
        }
        let inputs = [f32s(&[7, 5]), f32s(&[3, 5])];
        samples.add(format!("{} at unique indices", op.name()), &inputs, |g, x| {
            let indices = g.constant(Tensor::from_i64(DType::I64, [3], &[6, 0, 3]))?;
            g.push(Op::Scatter { op, axis: 0 }, &[x[0], indices, x[1]])
        });
    }
    samples.add(
        "scatter_set of bools".into(),
        &[typed(DType::Bool, &[7]), typed(DType::I64, &[3]), typed(DType::Bool, &[3])],
        |g, x| g.push(Op::Scatter { op: ScatterOp::Set, axis: 0 }, x),
    );
}

/// Dtypes of the elements and of the indices: several in one case, f32 and i64 in the others.
fn dtypes(case: usize) -> (&'static [DType], &'static [DType]) {
    if case == 3 {
        (&[DType::F32, DType::F16, DType::I32, DType::U8, DType::Bool], &[DType::I64, DType::I32, DType::U8])
    } else {
        (&[DType::F32], &[DType::I64])
    }
}
