use std::f64::consts::{E, FRAC_PI_3, FRAC_PI_4, FRAC_PI_6, LN_2, LN_10, SQRT_2};

use super::*;
use crate::{BinaryOp, CompareOp, DTypeClass};

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

/// Arguments and values: exact ones, and others from tables of the functions.
fn float_values(op: UnaryOp) -> &'static [(f64, f64)] {
    use UnaryOp::*;
    match op {
        Neg => &[(2.5, -2.5), (0.0, -0.0), (-INF, INF), (NAN, NAN)],
        Abs => &[(-2.5, 2.5), (3.0, 3.0), (-INF, INF), (NAN, NAN)],
        Sign => &[(-2.5, -1.0), (1e-300, 1.0), (0.0, 0.0), (INF, 1.0), (NAN, NAN)],
        Exp => &[(0.0, 1.0), (1.0, E), (-INF, 0.0), (1000.0, INF), (NAN, NAN)],
        Log => &[(1.0, 0.0), (10.0, LN_10), (0.0, -INF), (-1.0, NAN)],
        Sqrt => &[(2.0, SQRT_2), (0.0, 0.0), (-1.0, NAN)],
        Rsqrt => &[(4.0, 0.5), (0.0, INF), (INF, 0.0), (-1.0, NAN)],
        Reciprocal => &[(8.0, 0.125), (-0.5, -2.0), (0.0, INF), (INF, 0.0)],
        Sin => &[(0.0, 0.0), (1.0, 0.8414709848078965), (-1.0, -0.8414709848078965)],
        Cos => &[(0.0, 1.0), (1.0, 0.5403023058681398)],
        Tan => &[(0.0, 0.0), (1.0, 1.5574077246549023)],
        Asin => &[(0.5, FRAC_PI_6), (-0.5, -FRAC_PI_6), (2.0, NAN)],
        Acos => &[(0.5, FRAC_PI_3), (1.0, 0.0), (2.0, NAN)],
        Atan => &[(1.0, FRAC_PI_4), (-1.0, -FRAC_PI_4)],
        Sinh => &[(1.0, 1.1752011936438014), (-1.0, -1.1752011936438014)],
        Cosh => &[(1.0, 1.5430806348152437), (0.0, 1.0)],
        Tanh => &[(1.0, 0.7615941559557649), (100.0, 1.0), (-100.0, -1.0), (1e-10, 1e-10)],
        Asinh => &[(1.0, 0.881373587019543), (-1.0, -0.881373587019543)],
        Acosh => &[(2.0, 1.3169578969248166), (1.0, 0.0), (0.5, NAN)],
        Atanh => &[(0.5, 0.5493061443340548), (1.0, INF), (2.0, NAN)],
        Sigmoid => &[(0.0, 0.5), (1.0, 0.7310585786300049), (-1000.0, 0.0), (1000.0, 1.0)],
        Softplus => &[(0.0, LN_2), (1000.0, 1000.0), (-50.0, 1.928749847963918e-22), (-INF, 0.0), (NAN, NAN)],
        Erf => &[(0.5, 0.5204998778130465), (-2.0, -0.9953222650189527), (1e-10, 1.1283791670955126e-10), (6.0, 1.0)],
        Floor => &[(1.5, 1.0), (-1.5, -2.0), (3.0, 3.0), (-INF, -INF)],
        Ceil => &[(1.5, 2.0), (-1.5, -1.0), (3.0, 3.0)],
        Round => &[(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, 0.0), (-1.5, -2.0), (2.4999, 2.0)],
        IsNan => &[(NAN, 1.0), (INF, 0.0), (0.0, 0.0)],
        IsInf => &[(INF, 1.0), (-INF, 1.0), (NAN, 0.0), (1e308, 0.0)],
        Not => &[],
    }
}

#[test]
fn every_function_of_a_float_has_its_values() {
    for &op in UnaryOp::ALL {
        let (x, y): (Vec<f64>, Vec<f64>) = float_values(op).iter().copied().unzip();
        assert!(!x.is_empty() || op == UnaryOp::Not, "{}", op.name());
        if x.is_empty() {
            continue;
        }
        let dtype = if matches!(op, UnaryOp::IsNan | UnaryOp::IsInf) { DType::Bool } else { DType::F64 };
        let expected = Tensor::from_f64(dtype, [y.len()], &y);
        assert_close(&eval(Op::Unary(op), &[f64s([x.len()], &x)]), &expected, op.name());
    }
}

#[test]
fn functions_of_integers_wrap() {
    let i8s = |v: &[i64]| Tensor::from_i64(DType::I8, [v.len()], v);
    let u8s = |v: &[i64]| Tensor::from_i64(DType::U8, [v.len()], v);
    assert_eq!(eval(Op::Unary(UnaryOp::Neg), &[i8s(&[5, -128])]), i8s(&[-5, -128]));
    assert_eq!(eval(Op::Unary(UnaryOp::Abs), &[i8s(&[-5, 7, -128])]), i8s(&[5, 7, -128]));
    assert_eq!(eval(Op::Unary(UnaryOp::Sign), &[i8s(&[-5, 0, 7])]), i8s(&[-1, 0, 1]));
    assert_eq!(eval(Op::Unary(UnaryOp::Not), &[i8s(&[0, 5])]), i8s(&[-1, -6]));
    assert_eq!(eval(Op::Unary(UnaryOp::Not), &[u8s(&[0, 5])]), u8s(&[255, 250]));
    assert_eq!(eval(Op::Unary(UnaryOp::Neg), &[u8s(&[0, 1])]), u8s(&[0, 255]));
    assert_eq!(eval(Op::Unary(UnaryOp::Not), &[bools([2], &[true, false])]), bools([2], &[false, true]));
}

/// Operands and values.
fn float_pairs(op: BinaryOp) -> &'static [(f64, f64, f64)] {
    use BinaryOp::*;
    match op {
        Add => &[(1.5, 2.25, 3.75), (INF, -INF, NAN)],
        Sub => &[(1.5, 2.25, -0.75)],
        Mul => &[(1.5, -2.0, -3.0), (0.0, INF, NAN)],
        Div => &[(1.0, 8.0, 0.125), (1.0, 0.0, INF), (0.0, 0.0, NAN)],
        Rem => &[(5.5, 2.0, 1.5), (-5.5, 2.0, -1.5), (5.5, -2.0, 1.5), (1.0, 0.0, NAN), (1.0, INF, 1.0)],
        Pow => &[(2.0, 10.0, 1024.0), (-2.0, 3.0, -8.0), (-2.0, 0.5, NAN), (0.0, 0.0, 1.0), (4.0, -0.5, 0.5), (NAN, 0.0, 1.0)],
        Max => &[(1.0, 2.0, 2.0), (-1.0, -2.0, -1.0), (NAN, 1.0, NAN), (1.0, NAN, NAN), (INF, NAN, NAN)],
        Min => &[(1.0, 2.0, 1.0), (-1.0, -2.0, -2.0), (NAN, 1.0, NAN), (1.0, NAN, NAN), (-INF, NAN, NAN)],
        And | Or | Xor => &[],
    }
}

fn int_pairs(op: BinaryOp) -> &'static [(i64, i64, i64)] {
    use BinaryOp::*;
    match op {
        Add => &[(2, 3, 5), (127, 1, -128)],
        Sub => &[(2, 3, -1), (-128, 1, 127)],
        Mul => &[(7, -6, -42), (64, 4, 0), (127, 127, 1)],
        Div => &[(7, 2, 3), (-7, 2, -3), (7, -2, -3), (5, 0, 0), (-128, -1, -128)],
        Rem => &[(7, 3, 1), (-7, 3, -1), (7, -3, 1), (5, 0, 0), (-128, -1, 0)],
        Pow => &[(2, 6, 64), (-3, 3, -27), (0, 0, 1), (5, 0, 1), (2, 7, -128), (2, -1, 0), (1, -5, 1), (-1, -3, -1), (0, -1, 0)],
        Max => &[(2, 3, 3), (-2, -3, -2)],
        Min => &[(2, 3, 2), (-2, -3, -3)],
        And => &[(0b1100, 0b1010, 0b1000), (-1, 5, 5)],
        Or => &[(0b1100, 0b1010, 0b1110), (-1, 5, -1)],
        Xor => &[(0b1100, 0b1010, 0b0110), (-1, 5, -6)],
    }
}

#[test]
fn every_function_of_two_numbers_has_its_values() {
    for &op in BinaryOp::ALL {
        let cases = float_pairs(op);
        assert_eq!(cases.is_empty(), matches!(op, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor));
        for &(a, b, expected) in cases {
            let y = eval(Op::Binary(op), &[f64s([], &[a]), f64s([], &[b])]);
            assert_close(&y, &f64s([], &[expected]), &format!("{} {a} {b}", op.name()));
        }
        for &(a, b, expected) in int_pairs(op) {
            let i8 = |v| Tensor::from_i64(DType::I8, [1], &[v]);
            assert_eq!(eval(Op::Binary(op), &[i8(a), i8(b)]), i8(expected), "{} {a} {b}", op.name());
        }
    }
}

#[test]
fn logic_of_bools() {
    let (a, b) = (bools([4], &[false, false, true, true]), bools([4], &[false, true, false, true]));
    let eval = |op| eval(Op::Binary(op), &[a.clone(), b.clone()]);
    assert_eq!(eval(BinaryOp::And), bools([4], &[false, false, false, true]));
    assert_eq!(eval(BinaryOp::Or), bools([4], &[false, true, true, true]));
    assert_eq!(eval(BinaryOp::Xor), bools([4], &[false, true, true, false]));
}

#[test]
fn unsigned_integers_of_64_bits_are_not_signed() {
    let u64s = |v: &[u64]| {
        Tensor::from_bytes(TensorType::new(DType::U64, [v.len()]), v.iter().flat_map(|v| v.to_le_bytes()).collect()).unwrap()
    };
    let (a, b) = (u64s(&[u64::MAX, 7]), u64s(&[2, 7]));
    let eval = |op| eval(op, &[a.clone(), b.clone()]);
    assert_eq!(eval(Op::Binary(BinaryOp::Div)), u64s(&[u64::MAX / 2, 1]));
    assert_eq!(eval(Op::Binary(BinaryOp::Max)), u64s(&[u64::MAX, 7]));
    assert_eq!(eval(Op::Compare(CompareOp::Gt)), bools([2], &[true, false]));
    assert_eq!(super::eval(Op::Cast(DType::F64), &[a]), f64s([2], &[18446744073709551615.0, 7.0]));
}

#[test]
fn comparisons_order_numbers_and_no_nan() {
    // The second operand is smaller, equal, larger, and NaN.
    let expected = |op| match op {
        CompareOp::Eq => [false, true, false, false],
        CompareOp::Ne => [true, false, true, true],
        CompareOp::Lt => [false, false, true, false],
        CompareOp::Le => [false, true, true, false],
        CompareOp::Gt => [true, false, false, false],
        CompareOp::Ge => [true, true, false, false],
    };
    for &op in CompareOp::ALL {
        let y = eval(Op::Compare(op), &[f64s([4], &[2.0, 2.0, 2.0, 2.0]), f64s([4], &[1.0, 2.0, 3.0, NAN])]);
        assert_eq!(y, bools([4], &expected(op)), "{}", op.name());
        let y = eval(Op::Compare(op), &[i64s([3], &[-2, -2, -2]), i64s([3], &[-3, -2, -1])]);
        assert_eq!(y, bools([3], &expected(op)[..3]), "{}", op.name());
        let y = eval(Op::Compare(op), &[bools([2], &[true, false]), bools([2], &[false, false])]);
        assert_eq!(y, bools([2], &expected(op)[..2]), "{}", op.name());
    }
}

#[test]
fn select_ignores_the_side_not_taken() {
    let condition = bools([3], &[true, false, true]);
    let y = eval(Op::Select, &[condition.clone(), f64s([3], &[1.0, NAN, 3.0]), f64s([3], &[NAN, 5.0, NAN])]);
    assert_eq!(y, f64s([3], &[1.0, 5.0, 3.0]));
    let y = eval(Op::Select, &[condition.clone(), i64s([3], &[1, 2, 3]), i64s([3], &[4, 5, 6])]);
    assert_eq!(y, i64s([3], &[1, 5, 3]));
    let y = eval(Op::Select, &[condition, bools([3], &[true; 3]), bools([3], &[false; 3])]);
    assert_eq!(y, bools([3], &[true, false, true]));
}

#[test]
fn casts_truncate_saturate_and_wrap() {
    let floats = f64s([6], &[1.9, -1.9, 300.0, -300.0, NAN, INF]);
    let cast = |x: &Tensor, dtype| eval(Op::Cast(dtype), std::slice::from_ref(x)).to_f64_vec();
    assert_eq!(cast(&floats, DType::I8), [1.0, -1.0, 127.0, -128.0, 0.0, 127.0]);
    assert_eq!(cast(&floats, DType::U8), [1.0, 0.0, 255.0, 0.0, 0.0, 255.0]);
    assert_eq!(cast(&floats, DType::Bool), [1.0; 6]);
    assert_eq!(cast(&f64s([2], &[0.0, -0.0]), DType::Bool), [0.0, 0.0]);
    let ints = i64s([4], &[0, -1, 300, 1 << 40]);
    assert_eq!(cast(&ints, DType::I8), [0.0, -1.0, 44.0, 0.0]);
    assert_eq!(cast(&ints, DType::U16), [0.0, 65535.0, 300.0, 0.0]);
    assert_eq!(cast(&ints, DType::Bool), [0.0, 1.0, 1.0, 1.0]);
    assert_eq!(cast(&ints, DType::F32), [0.0, -1.0, 300.0, (1u64 << 40) as f64]);
    assert_eq!(cast(&bools([2], &[true, false]), DType::I32), [1.0, 0.0]);
    assert_eq!(cast(&bools([2], &[true, false]), DType::F16), [1.0, 0.0]);
    assert_eq!(cast(&f64s([1], &[0.1]), DType::F16), [0.0999755859375]);
}

#[test]
fn pointwise_ops_keep_any_shape() {
    for shape in [&[][..], &[1], &[7, 33], &[0, 7], &[3, 0]] {
        for dtype in DType::ALL {
            let x = random_tensor(&TensorType::new(dtype, shape), 1);
            let y = eval(Op::Compare(CompareOp::Eq), &[x.clone(), x.clone()]);
            assert_eq!(y, bools(shape, &vec![true; x.shape().numel()]));
            if dtype.class() != DTypeClass::Bool {
                assert_eq!(eval(Op::Binary(BinaryOp::Max), &[x.clone(), x.clone()]), x);
            }
        }
    }
}
