//! Expected numbers follow from the formulas by hand: scales are powers of two.

use meganeura_ir::{DType, Tensor};

use super::{Absent, Arg, Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, f32s};

pub(super) fn cases() -> Vec<Case> {
    [linear(), dynamic(), products(), convolutions(), contributed()].into_iter().flatten().collect()
}

fn of(dtype: DType, shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(dtype, shape, values)
}

fn u8s(shape: &[usize], values: &[i64]) -> Tensor {
    of(DType::U8, shape, values)
}

fn i8s(shape: &[usize], values: &[i64]) -> Tensor {
    of(DType::I8, shape, values)
}

fn i32s(shape: &[usize], values: &[i64]) -> Tensor {
    of(DType::I32, shape, values)
}

fn scale(value: f32) -> Arg {
    Known(f32s(&[], &[value]))
}

fn microsoft(n: NodeBuilder) -> NodeBuilder {
    n.domain("com.microsoft")
}

fn linear() -> Vec<Case> {
    let x = || Input(f32s(&[6], &[-3.0, -1.0, 1.0, 3.0, 5.0, 1e30]));
    let matrix = || Input(f32s(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    vec![
        // Halves go to the even neighbour before the zero point is added: -1.5, -0.5, 0.5, 1.5, 2.5.
        plain("QuantizeLinear", 10, vec![x(), scale(2.0), Known(u8s(&[], &[3]))], u8s(&[6], &[1, 3, 3, 5, 5, 255])),
        plain("QuantizeLinear", 13, vec![x(), scale(2.0)], u8s(&[6], &[0, 0, 0, 2, 2, 255])),
        plain("QuantizeLinear", 21, vec![x(), scale(2.0), Known(i8s(&[1], &[-1]))], i8s(&[6], &[-3, -1, -1, 1, 1, 127])),
        case(
            "QuantizeLinear",
            21,
            |n| n.int("output_dtype", 5),
            vec![x(), scale(0.5)],
            vec![of(DType::I16, &[6], &[-6, -2, 2, 6, 10, 32767])],
        ),
        case(
            "QuantizeLinear",
            13,
            |n| n.int("axis", -1),
            vec![matrix(), Known(f32s(&[2], &[1.0, 2.0])), Known(u8s(&[2], &[0, 10]))],
            vec![u8s(&[3, 2], &[1, 11, 3, 12, 5, 13])],
        ),
        // Blocks of two rows; the last one is short.
        case(
            "QuantizeLinear",
            21,
            |n| n.int("axis", 0).int("block_size", 2),
            vec![matrix(), Known(f32s(&[2, 2], &[1.0, 2.0, 0.5, 4.0])), Known(u8s(&[2, 2], &[0, 1, 2, 3]))],
            vec![u8s(&[3, 2], &[1, 2, 3, 3, 12, 5])],
        ),
        // To four bits, to two bits, and to floats of 8 bits.
        case("QuantizeLinear", 23, |n| n.int("output_dtype", 22), vec![x(), scale(0.25)], vec![i8s(&[6], &[-8, -4, 4, 7, 7, 7])]),
        case("QuantizeLinear", 25, |n| n.int("output_dtype", 25), vec![x(), scale(1.0)], vec![u8s(&[6], &[0, 0, 1, 3, 3, 3])]),
        case(
            "QuantizeLinear",
            23,
            |n| n.int("output_dtype", 17),
            vec![Input(f32s(&[4], &[17.0, 19.0, -21.0, 1000.0])), scale(1.0)],
            vec![f32s(&[4], &[16.0, 20.0, -20.0, 448.0])],
        ),
        plain(
            "DequantizeLinear",
            10,
            vec![Input(u8s(&[3], &[0, 128, 255])), scale(0.5), Known(u8s(&[], &[128]))],
            f32s(&[3], &[-64.0, 0.0, 63.5]),
        ),
        plain("DequantizeLinear", 13, vec![Input(i32s(&[2], &[-70000, 3])), scale(0.5)], f32s(&[2], &[-35000.0, 1.5])),
        case(
            "DequantizeLinear",
            21,
            |n| n.int("axis", 1).int("block_size", 2),
            vec![Input(i8s(&[1, 3], &[-4, 6, 8])), Known(f32s(&[1, 2], &[0.5, 2.0])), Known(i8s(&[1, 2], &[1, 2]))],
            vec![f32s(&[1, 3], &[-2.5, 2.5, 12.0])],
        ),
    ]
}

fn dynamic() -> Vec<Case> {
    let case_of = |x: &[f32], y: &[i64], scale: f32, zero: i64| {
        let outputs = vec![u8s(&[x.len()], y), f32s(&[], &[scale]), u8s(&[], &[zero])];
        case("DynamicQuantizeLinear", 11, |n| n, vec![Input(f32s(&[x.len()], x))], outputs)
    };
    vec![
        case_of(&[-55.0, 0.0, 200.0], &[0, 55, 255], 1.0, 55),
        case_of(&[51.0, 102.0, 127.5], &[102, 204, 255], 0.5, 0),
        case_of(&[-127.5, -0.75], &[0, 253], 0.5, 255),
        case_of(&[0.0, 0.0], &[0, 0], 1.0, 0),
    ]
}

fn products() -> Vec<Case> {
    let a = || Input(u8s(&[2, 2], &[255, 0, 1, 2]));
    let b = || Input(i8s(&[2, 2], &[127, -128, 3, 4]));
    let zero = |value: i64| Known(u8s(&[], &[value]));
    vec![
        plain("MatMulInteger", 10, vec![a(), b()], i32s(&[2, 2], &[32385, -32640, 133, -120])),
        plain(
            "MatMulInteger",
            10,
            vec![a(), b(), Known(u8s(&[2], &[255, 1])), Known(i8s(&[2], &[-1, 4]))],
            i32s(&[2, 2], &[-1020, 0, 4, 0]),
        ),
        // The sums of the first case, times 0.5 * 0.25 / 16, plus 1: -255, 252.01, -0.9375, 1.04.
        plain(
            "QLinearMatMul",
            10,
            vec![a(), scale(0.5), zero(0), b(), scale(0.25), Known(i8s(&[], &[0])), scale(16.0), Known(i8s(&[], &[1]))],
            i8s(&[2, 2], &[127, -128, 2, 0]),
        ),
    ]
}

fn convolutions() -> Vec<Case> {
    let x = || Input(u8s(&[1, 1, 3], &[2, 5, 9]));
    let w = || Input(u8s(&[2, 1, 2], &[1, 3, 10, 0]));
    let pads = |n: NodeBuilder| n.ints("pads", &[1, 0]);
    vec![
        // The padding is the zero point: 0 after the subtraction.
        case(
            "ConvInteger",
            10,
            pads,
            vec![x(), w(), Known(u8s(&[], &[2])), Known(u8s(&[2], &[1, 5]))],
            vec![i32s(&[1, 2, 3], &[0, 6, 14, 0, -15, -20])],
        ),
        case(
            "QLinearConv",
            10,
            pads,
            vec![
                x(),
                scale(0.5),
                Known(u8s(&[], &[2])),
                w(),
                Known(f32s(&[2], &[0.5, 1.0])),
                Known(u8s(&[2], &[1, 5])),
                scale(1.0),
                Known(u8s(&[], &[100])),
                Known(i32s(&[2], &[4, -2])),
            ],
            vec![u8s(&[1, 2, 3], &[101, 102, 104, 99, 92, 89])],
        ),
    ]
}

fn contributed() -> Vec<Case> {
    let of_two = |op: &str, expected: &[i64]| {
        let args = vec![
            Input(u8s(&[2, 1], &[4, 10])),
            scale(0.5),
            Known(u8s(&[], &[2])),
            Input(u8s(&[2], &[3, 8])),
            scale(2.0),
            Known(u8s(&[], &[4])),
            scale(1.0),
            Known(u8s(&[], &[7])),
        ];
        case(op, 13, microsoft, args, vec![u8s(&[2, 2], expected)])
    };
    let of_one = |op: &str, values: &[i64], out: (f32, i64), attributes: fn(NodeBuilder) -> NodeBuilder, expected: Tensor| {
        let args = vec![
            Input(i8s(&[1, 2, values.len() / 2], values)),
            scale(0.5),
            Known(i8s(&[], &[1])),
            scale(out.0),
            Known(i8s(&[], &[out.1])),
        ];
        case(op, 13, move |n| microsoft(attributes(n)), args, vec![expected])
    };
    let a = || Input(u8s(&[1, 2], &[3, 5]));
    let b = || Input(u8s(&[2, 1], &[2, 7]));
    vec![
        case(
            "DequantizeLinear",
            13,
            microsoft,
            vec![Input(i8s(&[2], &[-4, 6])), scale(0.5), Known(i8s(&[], &[1]))],
            vec![f32s(&[2], &[-2.5, 2.5])],
        ),
        case("QuantizeLinear", 13, microsoft, vec![Input(f32s(&[2], &[1.5, -8.0])), scale(0.5)], vec![u8s(&[2], &[3, 0])]),
        // 1 and 4 with -2 and 8: sums -1, 9, 2, 12; products -2, 8, -8, 32.
        of_two("QLinearAdd", &[6, 16, 9, 19]),
        of_two("QLinearMul", &[5, 15, 0, 39]),
        // -2 and 2 and 0 and 4: 1 / (1 + e^2) = 0.1192 and so on, in units of 1/128.
        of_one("QLinearSigmoid", &[-3, 5, 1, 9], (1.0 / 128.0, -128), |n| n, i8s(&[1, 2, 2], &[-113, -15, -64, -2])),
        of_one("QLinearLeakyRelu", &[-3, 5, 1, 9], (0.25, 10), |n| n.float("alpha", 0.25), i8s(&[1, 2, 2], &[8, 18, 10, 26])),
        of_one("QLinearGlobalAveragePool", &[-3, 6, 1, 9], (0.25, 0), |n| n, i8s(&[1, 2, 1], &[1, 8])),
        of_one("QLinearGlobalAveragePool", &[-3, 6, 1, 9], (0.25, 0), |n| n.int("channels_last", 1), i8s(&[1, 1, 2], &[-4, 13])),
        case(
            "QLinearConcat",
            13,
            |n| microsoft(n).int("axis", 0),
            vec![
                scale(0.5),
                Known(u8s(&[], &[1])),
                Input(u8s(&[2], &[4, 5])),
                scale(1.0),
                Known(u8s(&[], &[3])),
                Input(u8s(&[1], &[9])),
                scale(0.25),
                Absent,
            ],
            vec![u8s(&[3], &[3, 5, 5])],
        ),
        // (1 * 1 + 3 * 6 + 5) * 0.5 * 2 * 0.5.
        case(
            "QGemm",
            13,
            |n| microsoft(n).float("alpha", 0.5),
            vec![
                a(),
                scale(0.5),
                Known(u8s(&[], &[2])),
                b(),
                scale(2.0),
                Known(u8s(&[], &[1])),
                Input(i32s(&[1], &[5])),
                scale(4.0),
                Known(u8s(&[], &[9])),
            ],
            vec![u8s(&[1, 1], &[12])],
        ),
        case(
            "MatMulIntegerToFloat",
            13,
            microsoft,
            vec![a(), b(), scale(0.5), scale(2.0), Known(u8s(&[], &[2])), Known(u8s(&[], &[1])), Input(f32s(&[1], &[0.25]))],
            vec![f32s(&[1, 1], &[19.25])],
        ),
        // The range -55 to 200 quantises to itself, with zero point 55.
        case(
            "DynamicQuantizeMatMul",
            13,
            microsoft,
            vec![Input(f32s(&[1, 2], &[-55.0, 200.0])), Input(u8s(&[2, 1], &[3, 2])), scale(0.5), Known(u8s(&[], &[1]))],
            vec![f32s(&[1, 1], &[45.0])],
        ),
    ]
}
