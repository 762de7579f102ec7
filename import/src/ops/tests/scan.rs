use meganeura_ir::{DType, Tensor};

use super::{Arg, Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, bools, data_type, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [scans(), bits(), shrinks()].into_iter().flatten().collect()
}

fn axis(axis: i64) -> Arg {
    Known(i64s(&[], &[axis]))
}

fn scans() -> Vec<Case> {
    let x = || Input(f32s(&[2, 3], &[1., 2., 3., 4., -5., 0.]));
    let exclusive = |n: NodeBuilder| n.int("exclusive", 1);
    let reverse = |n: NodeBuilder| n.int("reverse", 1);
    let scan = |op, attributes: &dyn Fn(NodeBuilder) -> NodeBuilder, along, expected: [f32; 6]| {
        case(op, 26, attributes, vec![x(), axis(along)], vec![f32s(&[2, 3], &expected)])
    };
    // Longer than a block.
    let long: Vec<i64> = (0..600).collect();
    let triangular: Vec<i64> = (0..600).map(|i| i * (i + 1) / 2).collect();
    let from_end: Vec<i64> = (0..600).map(|i| triangular[599] - triangular[i]).collect();
    vec![
        scan("CumSum", &|n| n, 1, [1., 3., 6., 4., -1., -1.]),
        scan("CumSum", &|n| n, -2, [1., 2., 3., 5., -3., 3.]),
        scan("CumSum", &exclusive, -1, [0., 1., 3., 0., 4., -1.]),
        scan("CumSum", &reverse, 1, [6., 5., 3., -1., -5., 0.]),
        scan("CumSum", &|n| exclusive(reverse(n)), 1, [5., 3., 0., -5., 0., 0.]),
        scan("CumProd", &|n| n, 1, [1., 2., 6., 4., -20., 0.]),
        scan("CumProd", &exclusive, 0, [1., 1., 1., 1., 2., 3.]),
        scan("CumProd", &|n| exclusive(reverse(n)), 1, [6., 3., 1., 0., 0., 1.]),
        plain("CumSum", 14, vec![Input(i64s(&[600], &long)), axis(0)], i64s(&[600], &triangular)),
        case("CumSum", 14, |n| exclusive(reverse(n)), vec![Input(i64s(&[600], &long)), axis(0)], vec![i64s(&[600], &from_end)]),
        plain("CumSum", 11, vec![Input(f32s(&[0, 2], &[])), axis(0)], f32s(&[0, 2], &[])),
    ]
}

fn bits() -> Vec<Case> {
    let of = |dtype, values: &[i64]| Tensor::from_i64(dtype, [values.len()], values);
    let shift = |dtype, direction: &'static str, x: &[i64], by: &[i64], expected: &[i64]| {
        let args = vec![Input(of(dtype, x)), Input(of(dtype, by))];
        case("BitShift", 11, |n| n.string("direction", direction), args, vec![of(dtype, expected)])
    };
    let to = |dtype: DType| move |n: NodeBuilder| n.int("to", data_type(dtype).into());
    vec![
        // A shift by the width or more leaves nothing.
        shift(DType::U8, "LEFT", &[16, 129, 255], &[1], &[32, 2, 254]),
        shift(DType::U8, "RIGHT", &[255, 7, 255], &[7, 1, 8], &[1, 3, 0]),
        shift(DType::U16, "LEFT", &[3, 65535], &[15, 16], &[32768, 0]),
        shift(DType::U32, "RIGHT", &[4294967295, 4294967295], &[31, 32], &[1, 0]),
        shift(DType::U32, "LEFT", &[4294967295], &[4], &[4294967280]),
        shift(DType::U64, "RIGHT", &[1 << 31], &[30], &[2]),
        case("BitCast", 26, to(DType::U8), vec![Input(of(DType::I8, &[-1, 5]))], vec![of(DType::U8, &[255, 5])]),
        case("BitCast", 26, to(DType::I32), vec![Input(of(DType::U32, &[4294967295]))], vec![of(DType::I32, &[-1])]),
        case("BitCast", 26, to(DType::U8), vec![Input(bools(&[2], &[1, 0]))], vec![of(DType::U8, &[1, 0])]),
        case("BitCast", 26, to(DType::F32), vec![Input(f32s(&[1], &[1.5]))], vec![f32s(&[1], &[1.5])]),
        case("BitCast", 26, to(DType::F32), vec![Known(of(DType::I32, &[0x3f80_0000]))], vec![f32s(&[1], &[1.])]),
    ]
}

fn shrinks() -> Vec<Case> {
    let x = || Input(f32s(&[5], &[-2., -0.5, 0., 0.5, 2.]));
    let soft = |n: NodeBuilder| n.float("lambd", 1.5).float("bias", 1.5);
    vec![
        case("Shrink", 9, soft, vec![x()], vec![f32s(&[5], &[-0.5, 0., 0., 0., 0.5])]),
        plain("Shrink", 9, vec![x()], f32s(&[5], &[-2., 0., 0., 0., 2.])),
        case("Shrink", 9, |n| n.float("bias", 1.), vec![Input(i64s(&[3], &[-3, 0, 3]))], vec![i64s(&[3], &[-2, 0, 2])]),
    ]
}
