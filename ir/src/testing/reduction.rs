use super::{Samples, typed};
use crate::{ArgOp, DType, Op, ReduceOp, infer};

pub(super) fn add(samples: &mut Samples) {
    let cases: [(&[usize], &[usize]); 14] = [
        (&[257], &[0]),
        (&[7, 33], &[1]),
        (&[7, 33], &[0]),
        (&[7, 33], &[0, 1]),
        (&[3, 5, 7], &[1]),
        (&[3, 5, 7], &[0, 2]),
        (&[2, 3, 4, 5], &[1, 2]),
        (&[1, 257], &[0]),
        (&[33, 1], &[1]),
        (&[5, 1025], &[1]),
        (&[7, 0], &[1]),
        (&[0, 7], &[1]),
        (&[7, 33], &[]),
        (&[], &[]),
    ];
    for (i, (shape, axes)) in cases.into_iter().enumerate() {
        let dtypes = if i == 2 || i == 10 { &DType::ALL[..] } else { &[DType::F32] };
        for &op in ReduceOp::ALL {
            for &dtype in dtypes {
                let ty = typed(dtype, shape);
                let many = dtype.is_float() && op == ReduceOp::Prod && ty.shape.numel() > 40;
                let op = Op::Reduce { op, axes: axes.to_vec() };
                if infer(&op, &[&ty]).is_ok() {
                    samples.add(format!("{} {ty} over {axes:?}", op.name()), &[ty], |g, x| {
                        // Long products must neither overflow nor vanish.
                        let x = if many { g.scale(x[0], 0.05).and_then(|x| g.shift(x, 1.0))? } else { x[0] };
                        g.push(op, &[x])
                    });
                }
            }
        }
    }
    let cases: [(&[usize], usize); 7] =
        [(&[257], 0), (&[7, 33], 1), (&[7, 33], 0), (&[3, 5, 7], 1), (&[7, 1], 1), (&[0, 3], 1), (&[1], 0)];
    for (i, (shape, axis)) in cases.into_iter().enumerate() {
        let dtypes = if i == 2 { &DType::ALL[..] } else { &[DType::F32] };
        for &op in ArgOp::ALL {
            for &dtype in dtypes {
                let ty = typed(dtype, shape);
                samples.add(format!("{} {ty} along {axis}", op.name()), &[ty], |g, x| g.push(Op::ArgReduce { op, axis }, x));
            }
        }
    }
}
