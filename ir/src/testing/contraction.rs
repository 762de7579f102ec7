use super::{Samples, f32s, typed};
use crate::{ConvDims, DType, DotDims, Op};

pub(super) fn add(samples: &mut Samples) {
    dot(samples);
    conv(samples);
}

/// Operand shapes, batch axes and contracted axes of either side.
type DotCase = (&'static [usize], &'static [usize], [&'static [usize]; 2], [&'static [usize]; 2]);

fn dot(samples: &mut Samples) {
    const NONE: [&[usize]; 2] = [&[], &[]];
    let cases: [DotCase; 24] = [
        // Matrix products, in each layout of each operand.
        (&[7, 33], &[33, 5], NONE, [&[1], &[0]]),
        (&[7, 33], &[5, 33], NONE, [&[1], &[1]]),
        (&[33, 7], &[33, 5], NONE, [&[0], &[0]]),
        (&[33, 7], &[5, 33], NONE, [&[0], &[1]]),
        (&[65, 17], &[17, 66], NONE, [&[1], &[0]]),
        // Single rows, columns and products; a long sum.
        (&[1, 257], &[257, 33], NONE, [&[1], &[0]]),
        (&[33, 257], &[257, 1], NONE, [&[1], &[0]]),
        (&[257], &[257, 7], NONE, [&[0], &[0]]),
        (&[7, 1], &[1, 33], NONE, [&[1], &[0]]),
        (&[2, 4097], &[4097, 3], NONE, [&[1], &[0]]),
        // Scalar results, outer products, scalars.
        (&[257], &[257], NONE, [&[0], &[0]]),
        (&[3, 7], &[7, 3], NONE, [&[0, 1], &[1, 0]]),
        (&[7], &[33], NONE, NONE),
        (&[], &[7], NONE, NONE),
        (&[], &[], NONE, NONE),
        // Batches: leading, in the middle, last, several, of size 1.
        (&[3, 7, 5], &[3, 5, 9], [&[0], &[0]], [&[2], &[1]]),
        (&[3, 7, 5], &[9, 3, 5], [&[0], &[1]], [&[2], &[2]]),
        (&[7, 5, 3], &[5, 9, 3], [&[2], &[2]], [&[1], &[0]]),
        (&[2, 7, 3, 5], &[2, 9, 3, 5], [&[0, 2], &[0, 2]], [&[3], &[3]]),
        (&[3, 7], &[3, 7], [&[0, 1], &[0, 1]], NONE),
        (&[1, 7, 5], &[1, 5, 2], [&[0], &[0]], [&[2], &[1]]),
        // Several contracted and free axes, in unlike orders.
        (&[2, 3, 5, 4], &[5, 6, 3], NONE, [&[1, 2], &[2, 0]]),
        // Empty results, and empty sums.
        (&[0, 7], &[7, 3], NONE, [&[1], &[0]]),
        (&[7, 0], &[0, 33], NONE, [&[1], &[0]]),
    ];
    for (i, (a, b, batch, contract)) in cases.into_iter().enumerate() {
        let dims = DotDims {
            lhs_batch: batch[0].to_vec(),
            rhs_batch: batch[1].to_vec(),
            lhs_contract: contract[0].to_vec(),
            rhs_contract: contract[1].to_vec(),
        };
        let dtypes: &[DType] = if i == 0 { &[DType::F32, DType::F16, DType::F64, DType::I32, DType::U8] } else { &[DType::F32] };
        for &dtype in dtypes {
            let dims = dims.clone();
            let name = format!("dot {dtype} {a:?} {b:?} batch {batch:?} contract {contract:?}");
            samples.add(name, &[typed(dtype, a), typed(dtype, b)], |g, x| g.push(Op::Dot(dims), x));
        }
    }
    samples.add("dot of one operand with itself".into(), &[f32s(&[7, 33])], |g, x| {
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() };
        g.push(Op::Dot(dims), &[x[0], x[0]])
    });
}

struct ConvCase {
    name: &'static str,
    x: &'static [usize],
    w: &'static [usize],
    stride: &'static [usize],
    pads: &'static [(isize, isize)],
    input_dilation: &'static [usize],
    kernel_dilation: &'static [usize],
    groups: usize,
}

const PLAIN: ConvCase = ConvCase {
    name: "plain",
    x: &[1, 3, 7, 9],
    w: &[4, 3, 3, 3],
    stride: &[1, 1],
    pads: &[(0, 0), (0, 0)],
    input_dilation: &[1, 1],
    kernel_dilation: &[1, 1],
    groups: 1,
};

const LINE: ConvCase = ConvCase {
    name: "1-D",
    x: &[2, 3, 33],
    w: &[5, 3, 4],
    stride: &[1],
    pads: &[(0, 0)],
    input_dilation: &[1],
    kernel_dilation: &[1],
    groups: 1,
};

const CONVS: [ConvCase; 24] = [
    PLAIN,
    ConvCase { name: "1x1", x: &[2, 7, 3, 5], w: &[9, 7, 1, 1], ..PLAIN },
    ConvCase { name: "same padding", pads: &[(1, 1), (1, 1)], ..PLAIN },
    ConvCase { name: "asymmetric pads and kernel", x: &[2, 3, 7, 9], w: &[5, 3, 2, 4], pads: &[(0, 2), (3, 1)], ..PLAIN },
    ConvCase { name: "negative pads", pads: &[(-1, 0), (2, -3)], ..PLAIN },
    ConvCase { name: "stride that leaves a rest", stride: &[2, 3], pads: &[(1, 0), (0, 1)], ..PLAIN },
    ConvCase { name: "stride above the kernel", w: &[2, 3, 1, 2], stride: &[3, 4], ..PLAIN },
    ConvCase { name: "kernel dilation", w: &[4, 3, 2, 3], kernel_dilation: &[3, 2], pads: &[(1, 2), (2, 0)], ..PLAIN },
    ConvCase { name: "input dilation", x: &[2, 3, 4, 5], input_dilation: &[2, 3], pads: &[(2, 1), (0, 2)], ..PLAIN },
    ConvCase {
        name: "everything",
        x: &[2, 4, 5, 6],
        w: &[6, 2, 2, 3],
        stride: &[2, 3],
        pads: &[(2, -1), (1, 3)],
        input_dilation: &[3, 2],
        kernel_dilation: &[2, 3],
        groups: 2,
    },
    ConvCase { name: "groups", x: &[2, 6, 5, 4], w: &[9, 2, 3, 2], groups: 3, ..PLAIN },
    ConvCase { name: "depthwise", x: &[1, 7, 6, 5], w: &[7, 1, 3, 3], pads: &[(1, 1), (1, 1)], groups: 7, ..PLAIN },
    ConvCase { name: "depthwise with a multiplier", x: &[2, 3, 6, 5], w: &[6, 1, 3, 2], stride: &[2, 1], groups: 3, ..PLAIN },
    ConvCase { name: "one output position", x: &[1, 3, 3, 3], ..PLAIN },
    ConvCase { name: "many channels", x: &[1, 33, 4, 3], w: &[65, 33, 2, 2], ..PLAIN },
    LINE,
    ConvCase { name: "1-D strided and padded", stride: &[3], pads: &[(2, 1)], ..LINE },
    ConvCase { name: "1-D dilated depthwise", w: &[3, 1, 3], kernel_dilation: &[4], pads: &[(8, 0)], groups: 3, ..LINE },
    ConvCase {
        name: "3-D",
        x: &[1, 2, 4, 5, 3],
        w: &[3, 2, 2, 3, 2],
        stride: &[1, 2, 1],
        pads: &[(1, 0), (0, 1), (1, 1)],
        input_dilation: &[1, 1, 2],
        kernel_dilation: &[2, 1, 1],
        groups: 1,
    },
    ConvCase {
        name: "no spatial axes",
        x: &[5, 7],
        w: &[3, 7],
        stride: &[],
        pads: &[],
        input_dilation: &[],
        kernel_dilation: &[],
        groups: 1,
    },
    ConvCase { name: "empty batch", x: &[0, 3, 7, 9], ..PLAIN },
    ConvCase { name: "no channels", x: &[1, 0, 7, 9], w: &[4, 0, 3, 3], ..PLAIN },
    ConvCase { name: "kernel that does not fit", x: &[1, 3, 2, 9], ..PLAIN },
    ConvCase { name: "empty input, padded", x: &[1, 3, 0, 4], pads: &[(2, 2), (1, 1)], ..PLAIN },
];

fn conv(samples: &mut Samples) {
    for case in CONVS {
        let dims = ConvDims {
            stride: case.stride.to_vec(),
            pads: case.pads.to_vec(),
            input_dilation: case.input_dilation.to_vec(),
            kernel_dilation: case.kernel_dilation.to_vec(),
            groups: case.groups,
        };
        let dtypes: &[DType] = if case.name == "everything" { &[DType::F32, DType::I32] } else { &[DType::F32] };
        for &dtype in dtypes {
            let dims = dims.clone();
            let operands = [typed(dtype, case.x), typed(dtype, case.w)];
            samples.add(format!("conv {dtype} {}", case.name), &operands, |g, x| g.push(Op::Conv(dims), x));
        }
    }
}
