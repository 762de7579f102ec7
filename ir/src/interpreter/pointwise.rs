//! Functions of elements at one index.

use std::cmp::Ordering;

use super::value::{Elements, Real, Value, widen, wrap};
use crate::{BinaryOp, CompareOp, DType, DTypeClass, UnaryOp};

pub(super) fn unary<T: Real>(op: UnaryOp, dtype: DType, x: &Value<T>) -> Value<T> {
    match x {
        Value::Float(v) => match op {
            UnaryOp::IsNan => Value::Bool(v.iter().map(|v| v.to_f64().is_nan()).collect()),
            UnaryOp::IsInf => Value::Bool(v.iter().map(|v| v.to_f64().is_infinite()).collect()),
            _ => {
                let f = float_unary(op);
                Value::Float(v.iter().map(|v| T::from_f64(f(v.to_f64()))).collect())
            }
        },
        Value::Int(v) => Value::Int(v.iter().map(|&v| wrap(dtype, int_unary(op, widen(dtype, v)))).collect()),
        Value::Bool(v) => Value::Bool(v.iter().map(|v| !v).collect()),
    }
}

fn float_unary(op: UnaryOp) -> fn(f64) -> f64 {
    match op {
        UnaryOp::Neg => |x| -x,
        UnaryOp::Abs => f64::abs,
        UnaryOp::Sign => |x| if x == 0.0 || x.is_nan() { x } else { x.signum() },
        UnaryOp::Exp => f64::exp,
        UnaryOp::Log => f64::ln,
        UnaryOp::Sqrt => f64::sqrt,
        UnaryOp::Rsqrt => |x| 1.0 / x.sqrt(),
        UnaryOp::Reciprocal => |x| 1.0 / x,
        UnaryOp::Sin => f64::sin,
        UnaryOp::Cos => f64::cos,
        UnaryOp::Tan => f64::tan,
        UnaryOp::Asin => f64::asin,
        UnaryOp::Acos => f64::acos,
        UnaryOp::Atan => f64::atan,
        UnaryOp::Sinh => f64::sinh,
        UnaryOp::Cosh => f64::cosh,
        UnaryOp::Tanh => f64::tanh,
        UnaryOp::Asinh => libm::asinh,
        UnaryOp::Acosh => libm::acosh,
        UnaryOp::Atanh => libm::atanh,
        UnaryOp::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
        UnaryOp::Softplus => |x| x.max(0.0) + (-x.abs()).exp().ln_1p(),
        UnaryOp::Erf => libm::erf,
        UnaryOp::Floor => f64::floor,
        UnaryOp::Ceil => f64::ceil,
        UnaryOp::Round => f64::round_ties_even,
        UnaryOp::Not | UnaryOp::IsNan | UnaryOp::IsInf => unreachable!("{} does not map floats to floats", op.name()),
    }
}

fn int_unary(op: UnaryOp, x: i128) -> i128 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign => x.signum(),
        UnaryOp::Not => !x,
        _ => unreachable!("{} of an integer", op.name()),
    }
}

pub(super) fn binary<T: Real>(op: BinaryOp, dtype: DType, a: &Value<T>, b: &Value<T>) -> Value<T> {
    let elements = match (a.elements(dtype), b.elements(dtype)) {
        (Elements::Float(a), Elements::Float(b)) => {
            let f = float_binary(op);
            Elements::Float(a.into_iter().zip(b).map(|(a, b)| f(a, b)).collect())
        }
        (Elements::Int(a), Elements::Int(b)) => {
            let f = int_binary(op);
            Elements::Int(a.into_iter().zip(b).map(|(a, b)| f(a, b)).collect())
        }
        _ => unreachable!("operands of {} have different classes", op.name()),
    };
    Value::from_elements(dtype, elements)
}

pub(super) fn float_binary(op: BinaryOp) -> fn(f64, f64) -> f64 {
    match op {
        BinaryOp::Add => |a, b| a + b,
        BinaryOp::Sub => |a, b| a - b,
        BinaryOp::Mul => |a, b| a * b,
        BinaryOp::Div => |a, b| a / b,
        BinaryOp::Rem => |a, b| a % b,
        BinaryOp::Pow => f64::powf,
        BinaryOp::Max => |a, b| if a > b || a.is_nan() { a } else { b },
        BinaryOp::Min => |a, b| if a < b || a.is_nan() { a } else { b },
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => unreachable!("{} of floats", op.name()),
    }
}

/// On integers, and on bools as 0 and 1. Results wrap afterwards.
pub(super) fn int_binary(op: BinaryOp) -> fn(i128, i128) -> i128 {
    match op {
        BinaryOp::Add => |a, b| a + b,
        BinaryOp::Sub => |a, b| a - b,
        BinaryOp::Mul => i128::wrapping_mul,
        BinaryOp::Div => |a, b| a.checked_div(b).unwrap_or(0),
        BinaryOp::Rem => |a, b| a.checked_rem(b).unwrap_or(0),
        BinaryOp::Pow => int_pow,
        BinaryOp::Max => Ord::max,
        BinaryOp::Min => Ord::min,
        BinaryOp::And => |a, b| a & b,
        BinaryOp::Or => |a, b| a | b,
        BinaryOp::Xor => |a, b| a ^ b,
    }
}

/// `base^exponent` by repeated multiplication; a negative exponent truncates the fraction, as integer division does (0 for base 0).
fn int_pow(base: i128, exponent: i128) -> i128 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut power, mut square, mut bits) = (1i128, base, exponent);
    while bits > 0 {
        if bits & 1 == 1 {
            power = power.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        bits >>= 1;
    }
    power
}

pub(super) fn compare<T: Real>(op: CompareOp, dtype: DType, a: &Value<T>, b: &Value<T>) -> Value<T> {
    // No ordering: a NaN is involved, and only `Ne` holds.
    let holds = |ordering: Option<Ordering>| match op {
        CompareOp::Eq => ordering.is_some_and(Ordering::is_eq),
        CompareOp::Ne => ordering.is_none_or(Ordering::is_ne),
        CompareOp::Lt => ordering.is_some_and(Ordering::is_lt),
        CompareOp::Le => ordering.is_some_and(Ordering::is_le),
        CompareOp::Gt => ordering.is_some_and(Ordering::is_gt),
        CompareOp::Ge => ordering.is_some_and(Ordering::is_ge),
    };
    Value::Bool(match (a.elements(dtype), b.elements(dtype)) {
        (Elements::Float(a), Elements::Float(b)) => a.iter().zip(&b).map(|(a, b)| holds(a.partial_cmp(b))).collect(),
        (Elements::Int(a), Elements::Int(b)) => a.iter().zip(&b).map(|(a, b)| holds(Some(a.cmp(b)))).collect(),
        _ => unreachable!("operands of {} have different classes", op.name()),
    })
}

pub(super) fn select<T: Real>(condition: &Value<T>, a: &Value<T>, b: &Value<T>) -> Value<T> {
    fn choose<E: Copy>(condition: &[bool], a: &[E], b: &[E]) -> Vec<E> {
        condition.iter().zip(a.iter().zip(b)).map(|(&c, (&a, &b))| if c { a } else { b }).collect()
    }
    let Value::Bool(c) = condition else {
        unreachable!("a condition is bool");
    };
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(choose(c, a, b)),
        (Value::Int(a), Value::Int(b)) => Value::Int(choose(c, a, b)),
        (Value::Bool(a), Value::Bool(b)) => Value::Bool(choose(c, a, b)),
        _ => unreachable!("operands of select have different classes"),
    }
}

pub(super) fn cast<T: Real>(from: DType, to: DType, x: &Value<T>) -> Value<T> {
    match (x.elements(from), to.class()) {
        (Elements::Float(v), DTypeClass::Float) => Value::Float(v.into_iter().map(T::from_f64).collect()),
        (Elements::Float(v), DTypeClass::Int) => Value::Int(v.into_iter().map(|v| saturate(to, v)).collect()),
        (Elements::Float(v), DTypeClass::Bool) => Value::Bool(v.into_iter().map(|v| v != 0.0).collect()),
        (Elements::Int(v), DTypeClass::Float) => Value::Float(v.into_iter().map(|v| T::from_f64(v as f64)).collect()),
        (elements, _) => Value::from_elements(to, elements),
    }
}

/// Truncates towards zero, to the nearest value of `dtype`; NaN gives 0.
fn saturate(dtype: DType, value: f64) -> i64 {
    match dtype {
        DType::I8 => (value as i8).into(),
        DType::I16 => (value as i16).into(),
        DType::I32 => (value as i32).into(),
        DType::U8 => (value as u8).into(),
        DType::U16 => (value as u16).into(),
        DType::U32 => (value as u32).into(),
        DType::U64 => (value as u64) as i64,
        _ => value as i64,
    }
}
