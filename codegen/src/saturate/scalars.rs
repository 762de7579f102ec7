//! Side conditions of the rules about constants and pointwise arithmetic.

use meganeura_ir::{BinaryOp, Composite, DType, Shape, UnaryOp};

use super::language::{Attr, Scalar, TensorLang};
use super::movement::{axes, holds, shape};
use super::rewrite::{Bindings, Match};

fn c_is(m: &Match, value: f64) -> Option<Bindings> {
    holds(m.value('c')? == value)
}

fn c_is_float(m: &Match, value: f64) -> Option<Bindings> {
    holds(m.ty('c')?.dtype.is_float() && m.value('c')? == value)
}

pub fn c_is_zero(m: &Match) -> Option<Bindings> {
    c_is(m, 0.0)
}

/// Of a float, `0 * x` is NaN where `x` is infinite.
pub fn c_is_integer_zero(m: &Match) -> Option<Bindings> {
    holds(m.ty('c')?.dtype.is_int() && m.value('c')? == 0.0)
}

pub fn c_is_one(m: &Match) -> Option<Bindings> {
    c_is(m, 1.0)
}

pub fn c_is_float_one(m: &Match) -> Option<Bindings> {
    c_is_float(m, 1.0)
}

pub fn c_is_two(m: &Match) -> Option<Bindings> {
    c_is(m, 2.0)
}

pub fn c_is_three(m: &Match) -> Option<Bindings> {
    c_is(m, 3.0)
}

pub fn c_is_half(m: &Match) -> Option<Bindings> {
    c_is(m, 0.5)
}

pub fn c_is_minus_half(m: &Match) -> Option<Bindings> {
    c_is(m, -0.5)
}

pub fn c_is_minus_one_float(m: &Match) -> Option<Bindings> {
    c_is_float(m, -1.0)
}

/// `k`, to be repeated over `t` from no axes, `n`.
fn repeated(constant: Scalar, over: &Shape) -> Bindings {
    vec![('t', shape(over)), ('n', axes([])), ('k', TensorLang::Scalar(constant))]
}

/// `k`: the constant `c`, over `t`: the shape of `x`, which is no constant itself.
pub fn constant_like_x(m: &Match) -> Option<Bindings> {
    if m.splat('x').is_some() {
        return None;
    }
    Some(repeated(m.splat('c')?, m.sizes('x')?))
}

/// `k`: the constant `c`, over `t`: the shape of the result. Single precision only: the order of scaling and summing
/// matters to the range of narrower floats.
pub fn constant_like_result(m: &Match) -> Option<Bindings> {
    let constant = m.splat('c')?;
    if constant.dtype != DType::F32 || m.splat('x').is_some() {
        return None;
    }
    Some(repeated(constant, &m.result()?.shape))
}

/// `k`: `value` over `t`: the shape of `x`, if it is normal in `dtype` and rounding it costs no more than single precision does.
fn new_constant(m: &Match, dtype: DType, value: f64) -> Option<Bindings> {
    let constant = Scalar::new(dtype, value);
    let rounded = constant.value();
    let normal = rounded.is_finite() && rounded.abs() >= f32::MIN_POSITIVE.into();
    if !normal || !matches!(dtype, DType::F32 | DType::F64) {
        return None;
    }
    Some(repeated(constant, m.sizes('x')?))
}

pub fn product_of_constants(m: &Match) -> Option<Bindings> {
    new_constant(m, m.ty('c')?.dtype, m.value('c')? * m.value('d')?)
}

pub fn quotient_c_over_d(m: &Match) -> Option<Bindings> {
    new_constant(m, m.ty('c')?.dtype, m.value('c')? / m.value('d')?)
}

pub fn quotient_d_over_c(m: &Match) -> Option<Bindings> {
    new_constant(m, m.ty('c')?.dtype, m.value('d')? / m.value('c')?)
}

pub fn negated_constant(m: &Match) -> Option<Bindings> {
    new_constant(m, m.ty('c')?.dtype, -m.value('c')?)
}

/// `k`: `1 / c`, a power of two.
pub fn reciprocal_is_exact(m: &Match) -> Option<Bindings> {
    let c = m.value('c')?;
    let significand_bits = (1u64 << (f64::MANTISSA_DIGITS - 1)) - 1;
    if c.to_bits() & significand_bits != 0 {
        return None;
    }
    new_constant(m, m.ty('c')?.dtype, 1.0 / c)
}

/// Whether a commutative function's operands are out of order: constants go last, otherwise the older class goes first.
pub fn commutes_into_order(m: &Match) -> Option<Bindings> {
    use BinaryOp::*;
    let commutes = matches!(m.binary('o')?, Add | Mul | Max | Min | And | Or | Xor);
    let rank = |v| Some((m.splat(v).is_some(), m.class(v)?));
    holds(commutes && rank('y')? < rank('x')?)
}

pub fn f_undoes_itself(m: &Match) -> Option<Bindings> {
    holds(matches!(m.unary('f')?, UnaryOp::Neg | UnaryOp::Not))
}

pub fn f_repeats_itself(m: &Match) -> Option<Bindings> {
    use UnaryOp::*;
    holds(matches!(m.attribute('f')?, Attr::Unary(Abs | Sign | Floor | Ceil | Round) | Attr::Pointwise(Composite::Relu)))
}
