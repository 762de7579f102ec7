use meganeura_ir::{DType, Tensor};

use super::{Absent, Case, Input, Known, case, plain};
use crate::testing::{bools, f32s, i64s};

/// An operator, the function that it computes, and points of its domain.
type UnaryCase = (&'static str, fn(f64) -> f64, [f32; 3]);

#[rustfmt::skip]
const UNARY: &[UnaryCase] = &[
    ("Abs", f64::abs, [-1.5, 0.0, 2.0]),
    ("Acos", f64::acos, [-0.5, 0.0, 0.75]),
    ("Acosh", f64::acosh, [1.0, 1.5, 20.0]),
    ("Asin", f64::asin, [-0.5, 0.0, 0.75]),
    ("Asinh", f64::asinh, [-2.0, 0.0, 3.0]),
    ("Atan", f64::atan, [-2.0, 0.0, 30.0]),
    ("Atanh", f64::atanh, [-0.5, 0.0, 0.9]),
    ("Ceil", f64::ceil, [-1.5, 0.25, 2.0]),
    ("Cos", f64::cos, [-2.0, 0.0, 3.0]),
    ("Cosh", f64::cosh, [-2.0, 0.0, 3.0]),
    ("Exp", f64::exp, [-2.0, 0.0, 3.0]),
    ("Floor", f64::floor, [-1.5, 0.25, 2.0]),
    ("Log", f64::ln, [0.5, 1.0, 30.0]),
    ("Neg", |x| -x, [-1.5, 0.5, 2.0]),
    ("Reciprocal", f64::recip, [-4.0, 0.5, 3.0]),
    ("Round", f64::round_ties_even, [-1.5, 0.5, 2.5]),
    ("Sigmoid", |x| 1.0 / (1.0 + (-x).exp()), [-30.0, 0.0, 2.0]),
    ("Sign", |x| if x == 0.0 { 0.0 } else { x.signum() }, [-1.5, 0.0, 2.0]),
    ("Sin", f64::sin, [-2.0, 0.0, 3.0]),
    ("Sinh", f64::sinh, [-2.0, 0.0, 3.0]),
    ("Softplus", |x| x.exp().ln_1p(), [-30.0, 0.0, 2.0]),
    ("Softsign", |x| x / (1.0 + x.abs()), [-3.0, 0.0, 2.0]),
    ("Sqrt", f64::sqrt, [0.0, 2.25, 2.0]),
    ("Tan", f64::tan, [-1.0, 0.0, 1.25]),
    ("Tanh", f64::tanh, [-3.0, 0.0, 0.5]),
    ("Relu", |x| x.max(0.0), [-3.0, 0.0, 0.5]),
    ("LeakyRelu", |x| if x < 0.0 { f64::from(0.01f32) * x } else { x }, [-3.0, 0.0, 0.5]),
    ("Elu", |x| if x < 0.0 { x.exp_m1() } else { x }, [-3.0, 0.0, 200.0]),
    ("Celu", |x| if x < 0.0 { x.exp_m1() } else { x }, [-3.0, 0.0, 200.0]),
    ("Selu", |x| 1.050_701_022_148_132_3 * if x < 0.0 { 1.673_263_192_176_818_8 * x.exp_m1() } else { x }, [-3.0, 0.0, 200.0]),
    ("HardSigmoid", |x| (0.2 * x + 0.5).clamp(0.0, 1.0), [-3.0, 0.5, 9.0]),
    ("HardSwish", |x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0), [-4.0, 0.5, 9.0]),
    ("Mish", |x| x * x.exp().ln_1p().tanh(), [-4.0, 0.5, 9.0]),
    ("Swish", |x| x / (1.0 + (-x).exp()), [-4.0, 0.5, 9.0]),
    ("ThresholdedRelu", |x| if x > 1.0 { x } else { 0.0 }, [-4.0, 1.0, 9.0]),
    // erf(1/2), erf(1) from tables (DLMF 7.23).
    ("Erf", |x| if x == 0.5 { 0.520_499_877_813_046_5 } else { x.signum() * 0.842_700_792_949_714_9 }, [-1.0, 0.5, 1.0]),
];

pub(super) fn cases() -> Vec<Case> {
    let unary = UNARY.iter().map(|(op, function, points)| {
        let expected: Vec<f64> = points.iter().map(|&x| function(f64::from(x))).collect();
        plain(op, 24, vec![Input(f32s(&[3], points))], Tensor::from_f64(DType::F32, [3], &expected))
    });
    unary.chain(binary()).chain(logic()).chain(casts()).chain(activations()).collect()
}

fn binary() -> Vec<Case> {
    let row = || f32s(&[1, 3], &[1.0, -2.0, 4.0]);
    let column = || f32s(&[2, 1], &[2.0, -0.5]);
    let pair = || vec![Input(row()), Input(column())];
    let table = |values: [f32; 6]| f32s(&[2, 3], &values);
    let ints = |values: &[i64]| i64s(&[values.len()], values);
    vec![
        plain("Add", 7, pair(), table([3.0, 0.0, 6.0, 0.5, -2.5, 3.5])),
        plain("Sub", 14, pair(), table([-1.0, -4.0, 2.0, 1.5, -1.5, 4.5])),
        plain("Mul", 13, pair(), table([2.0, -4.0, 8.0, -0.5, 1.0, -2.0])),
        plain("Div", 13, pair(), table([0.5, -1.0, 2.0, -2.0, 4.0, -8.0])),
        plain("Div", 14, vec![Input(ints(&[7, -7])), Input(ints(&[2, 2]))], ints(&[3, -3])),
        plain("Max", 13, pair(), table([2.0, 2.0, 4.0, 1.0, -0.5, 4.0])),
        plain("Min", 13, pair(), table([1.0, -2.0, 2.0, -0.5, -2.0, -0.5])),
        plain("Max", 8, vec![Input(row())], row()),
        plain("Sum", 13, vec![Input(row()), Input(row()), Input(column())], table([4.0, -2.0, 10.0, 1.5, -4.5, 7.5])),
        plain("Mean", 13, vec![Input(row()), Input(column())], table([1.5, 0.0, 3.0, 0.25, -1.25, 1.75])),
        plain("Pow", 15, vec![Input(row()), Known(f32s(&[], &[2.0]))], f32s(&[1, 3], &[1.0, 4.0, 16.0])),
        plain("Pow", 15, vec![Input(row()), Known(f32s(&[], &[3.0]))], f32s(&[1, 3], &[1.0, -8.0, 64.0])),
        plain("Pow", 12, vec![Input(row()), Known(i64s(&[1], &[1]))], row()),
        plain("Pow", 13, vec![Input(f32s(&[2], &[4.0, 9.0])), Input(f32s(&[2], &[0.5, -0.5]))], f32s(&[2], &[2.0, 1.0 / 3.0])),
        plain("Pow", 13, vec![Input(ints(&[4, 9])), Input(f32s(&[2], &[0.5, 0.5]))], ints(&[2, 3])),
        plain("Mod", 13, vec![Input(ints(&[-4, 7, 5, -6])), Input(ints(&[3, -3, 5, -4]))], ints(&[2, -2, 0, -2])),
        case(
            "Mod",
            13,
            |n| n.int("fmod", 1),
            vec![Input(f32s(&[3], &[-4.5, 7.0, 5.5])), Input(f32s(&[3], &[3.0, -3.0, 5.0]))],
            vec![f32s(&[3], &[-1.5, 1.0, 0.5])],
        ),
        case("Mod", 13, |n| n.int("fmod", 1), vec![Input(ints(&[-4, 7])), Input(ints(&[3, -3]))], vec![ints(&[-1, 1])]),
        plain("BitwiseAnd", 18, vec![Input(ints(&[12, 5])), Input(ints(&[10, 3]))], ints(&[8, 1])),
        plain("BitwiseOr", 18, vec![Input(ints(&[12, 5])), Input(ints(&[10, 3]))], ints(&[14, 7])),
        plain("BitwiseXor", 18, vec![Input(ints(&[12, 5])), Input(ints(&[10, 3]))], ints(&[6, 6])),
        plain("BitwiseNot", 18, vec![Input(ints(&[0, 5]))], ints(&[-1, -6])),
        plain(
            "PRelu",
            16,
            vec![Input(f32s(&[2, 2], &[-1.0, 2.0, -3.0, 4.0])), Input(f32s(&[2], &[0.5, 9.0]))],
            f32s(&[2, 2], &[-0.5, 2.0, -1.5, 4.0]),
        ),
    ]
}

fn logic() -> Vec<Case> {
    let a = || Input(f32s(&[3], &[1.0, 2.0, 3.0]));
    let b = || Input(f32s(&[], &[2.0]));
    let (p, q) = (|| Input(bools(&[4], &[0, 0, 1, 1])), || Input(bools(&[4], &[0, 1, 0, 1])));
    let special = || Input(f32s(&[4], &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0]));
    vec![
        plain("Equal", 13, vec![a(), b()], bools(&[3], &[0, 1, 0])),
        plain("Equal", 13, vec![p(), q()], bools(&[4], &[1, 0, 0, 1])),
        plain("Greater", 13, vec![a(), b()], bools(&[3], &[0, 0, 1])),
        plain("GreaterOrEqual", 16, vec![a(), b()], bools(&[3], &[0, 1, 1])),
        plain("Less", 13, vec![a(), b()], bools(&[3], &[1, 0, 0])),
        plain("LessOrEqual", 16, vec![a(), b()], bools(&[3], &[1, 1, 0])),
        plain("And", 7, vec![p(), q()], bools(&[4], &[0, 0, 0, 1])),
        plain("Or", 7, vec![p(), q()], bools(&[4], &[0, 1, 1, 1])),
        plain("Xor", 7, vec![p(), q()], bools(&[4], &[0, 1, 1, 0])),
        plain("Not", 7, vec![p()], bools(&[4], &[1, 1, 0, 0])),
        plain("IsNaN", 20, vec![special()], bools(&[4], &[1, 0, 0, 0])),
        plain("IsInf", 20, vec![special()], bools(&[4], &[0, 1, 1, 0])),
        case("IsInf", 20, |n| n.int("detect_negative", 0), vec![special()], vec![bools(&[4], &[0, 1, 0, 0])]),
        case("IsInf", 20, |n| n.int("detect_positive", 0), vec![special()], vec![bools(&[4], &[0, 0, 1, 0])]),
        plain(
            "Where",
            16,
            vec![Input(bools(&[2, 1], &[1, 0])), Input(f32s(&[2], &[1.0, 2.0])), Input(f32s(&[], &[9.0]))],
            f32s(&[2, 2], &[1.0, 2.0, 9.0, 9.0]),
        ),
    ]
}

fn casts() -> Vec<Case> {
    let x = || vec![Input(f32s(&[4], &[-1.75, 0.0, 0.5, 300.0]))];
    let to = |number: i64, expected: Tensor| case("Cast", 13, move |n| n.int("to", number), x(), vec![expected]);
    vec![
        to(7, i64s(&[4], &[-1, 0, 0, 300])),
        to(6, Tensor::from_i64(DType::I32, [4], &[-1, 0, 0, 300])),
        to(9, bools(&[4], &[1, 0, 1, 1])),
        to(11, f32s(&[4], &[-1.75, 0.0, 0.5, 300.0])),
        to(10, f32s(&[4], &[-1.75, 0.0, 0.5, 300.0])),
        case("Cast", 9, |n| n.int("to", 1), vec![Input(bools(&[2], &[1, 0]))], vec![f32s(&[2], &[1.0, 0.0])]),
        plain("CastLike", 15, vec![Input(f32s(&[2], &[1.5, -2.5])), Input(i64s(&[], &[0]))], i64s(&[2], &[1, -2])),
    ]
}

fn activations() -> Vec<Case> {
    let x = || Input(f32s(&[4], &[-3.0, -1.0, 1.0, 5.0]));
    let clipped = |values: [f32; 4]| f32s(&[4], &values);
    vec![
        plain("Clip", 13, vec![x(), Known(f32s(&[], &[-2.0])), Known(f32s(&[], &[2.0]))], clipped([-2.0, -1.0, 1.0, 2.0])),
        plain("Clip", 13, vec![x(), Absent, Known(f32s(&[], &[2.0]))], clipped([-3.0, -1.0, 1.0, 2.0])),
        plain("Clip", 12, vec![x(), Input(f32s(&[], &[-2.0]))], clipped([-2.0, -1.0, 1.0, 5.0])),
        plain("Clip", 13, vec![x(), Known(f32s(&[], &[3.0])), Known(f32s(&[], &[2.0]))], clipped([2.0, 2.0, 2.0, 2.0])),
        case("Clip", 7, |n| n.float("min", -2.0).float("max", 2.0), vec![x()], vec![clipped([-2.0, -1.0, 1.0, 2.0])]),
        plain(
            "Clip",
            12,
            vec![Input(i64s(&[3], &[-5, 0, 5])), Known(i64s(&[], &[-1])), Known(i64s(&[], &[1]))],
            i64s(&[3], &[-1, 0, 1]),
        ),
        case("Elu", 7, |n| n.float("alpha", 2.0), vec![Input(f32s(&[2], &[-1.0, 3.0]))], vec![f32s(&[2], &[-1.264_241_1, 3.0])]),
        case(
            "Celu",
            12,
            |n| n.float("alpha", 2.0),
            vec![Input(f32s(&[2], &[-2.0, 3.0]))],
            vec![f32s(&[2], &[-1.264_241_1, 3.0])],
        ),
        case("LeakyRelu", 16, |n| n.float("alpha", 0.5), vec![x()], vec![clipped([-1.5, -0.5, 1.0, 5.0])]),
        case("HardSigmoid", 7, |n| n.float("alpha", 0.5).float("beta", 0.0), vec![x()], vec![clipped([0.0, 0.0, 0.5, 1.0])]),
        case("Swish", 24, |n| n.float("alpha", 2.0), vec![Input(f32s(&[1], &[1.0]))], vec![f32s(&[1], &[0.880_797_1])]),
        case("ThresholdedRelu", 10, |n| n.float("alpha", -2.0), vec![x()], vec![clipped([0.0, -1.0, 1.0, 5.0])]),
        // x Phi(x) with Phi(1) = 0.8413447461.
        plain("Gelu", 20, vec![Input(f32s(&[2], &[1.0, -1.0]))], f32s(&[2], &[0.841_344_8, -0.158_655_25])),
        case(
            "Gelu",
            20,
            |n| n.string("approximate", "tanh"),
            vec![Input(f32s(&[2], &[1.0, -1.0]))],
            vec![f32s(&[2], &[0.841_192, -0.158_808])],
        ),
        // exp(0), exp(ln 3), .. over their sum.
        plain("Softmax", 13, vec![Input(f32s(&[2, 2], &[0.0, 3f32.ln(), 0.0, 0.0]))], f32s(&[2, 2], &[0.25, 0.75, 0.5, 0.5])),
        case(
            "Softmax",
            13,
            |n| n.int("axis", 0),
            vec![Input(f32s(&[2, 2], &[0.0, 0.0, 0.0, 3f32.ln()]))],
            vec![f32s(&[2, 2], &[0.5, 0.25, 0.5, 0.75])],
        ),
        plain("Softmax", 11, vec![Input(f32s(&[1, 2, 2], &[0.0, 0.0, 2f32.ln(), 0.0]))], f32s(&[1, 2, 2], &[0.2, 0.2, 0.4, 0.2])),
        case(
            "Softmax",
            11,
            |n| n.int("axis", 2),
            vec![Input(f32s(&[1, 2, 2], &[0.0, 0.0, 3f32.ln(), 0.0]))],
            vec![f32s(&[1, 2, 2], &[0.5, 0.5, 0.75, 0.25])],
        ),
        plain("LogSoftmax", 13, vec![Input(f32s(&[1, 2], &[0.0, 3f32.ln()]))], f32s(&[1, 2], &[0.25f32.ln(), 0.75f32.ln()])),
    ]
}
