//! Casts to narrow element types, as arithmetic on the dtype that holds their values.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, UnaryOp};

use crate::context::Context;
use crate::error::OpError;
use crate::narrow::{FloatFormat, Narrow, Specials};

/// How a power of two is chosen, for [`Narrow::Exponent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundMode {
    Up,
    Down,
    /// Ties go up.
    Nearest,
}

pub(super) const ROUND_MODES: [(&str, RoundMode); 3] =
    [("up", RoundMode::Up), ("down", RoundMode::Down), ("nearest", RoundMode::Nearest)];

/// The values of `x` as elements of `to`.
pub(super) fn cast(c: &mut Context, x: NodeId, to: Narrow, saturate: bool, mode: RoundMode) -> Result<NodeId, OpError> {
    match to {
        Narrow::Int { bits, signed } => low_bits(c, x, bits, signed),
        Narrow::Float(format) => {
            let x = c.cast(x, DType::F32)?;
            nearest(c, x, format, saturate)
        }
        Narrow::Exponent => {
            let x = c.cast(x, DType::F32)?;
            power_of_two(c, x, saturate, mode)
        }
    }
}

/// The lowest `bits` of an integer, read as one; floats truncate first.
fn low_bits(c: &mut Context, x: NodeId, bits: u32, signed: bool) -> Result<NodeId, OpError> {
    let wide = if c.ty(x).dtype.is_float() { c.cast(x, DType::I32)? } else { x };
    let wide = c.cast(wide, if signed { DType::I8 } else { DType::U8 })?;
    let mask = c.constant_like(wide, f64::from((1u32 << bits) - 1))?;
    let low = c.binary(BinaryOp::And, wide, mask)?;
    if !signed {
        return Ok(low);
    }
    let half = c.constant_like(low, f64::from(1u32 << (bits - 1)))?;
    let negative = c.compare(CompareOp::Ge, low, half)?;
    let lowered = c.shift(low, -f64::from(1u32 << bits))?;
    Ok(c.select(negative, lowered, low)?)
}

/// `|x|` divided by the largest power of two, from `2^low` on, that is not above it; that power; and its reciprocal. `|x|` is below
/// `2^(low + range)`. All products are with powers of two, so exact.
fn normalized(c: &mut Context, magnitude: NodeId, low: i32, range: u32) -> Result<[NodeId; 3], OpError> {
    let mut quotient = c.scale(magnitude, 2f64.powi(-low))?;
    let mut power = c.constant_like(magnitude, 2f64.powi(low))?;
    let mut reciprocal = c.constant_like(magnitude, 2f64.powi(-low))?;
    for step in (0..range.next_power_of_two().trailing_zeros()).rev().map(|bit| 2f64.powi(1 << bit)) {
        let threshold = c.constant_like(quotient, step)?;
        let above = c.compare(CompareOp::Ge, quotient, threshold)?;
        for (x, factor) in [(&mut quotient, 1.0 / step), (&mut power, step), (&mut reciprocal, 1.0 / step)] {
            let scaled = c.scale(*x, factor)?;
            *x = c.select(above, scaled, *x)?;
        }
    }
    Ok([quotient, power, reciprocal])
}

/// The nearest number of the format, ties to the even mantissa. Beyond the largest: that one if `saturate`, else infinity or NaN.
fn nearest(c: &mut Context, x: NodeId, format: FloatFormat, saturate: bool) -> Result<NodeId, OpError> {
    let (low, high) = (format.min_exponent(), format.max_exponent() + 2);
    let magnitude = c.unary(UnaryOp::Abs, x)?;
    // Whatever is larger overflows alike.
    let bound = c.constant_like(x, 1.5 * 2f64.powi(high - 1))?;
    let magnitude = c.binary(BinaryOp::Min, magnitude, bound)?;
    let [_, power, reciprocal] = normalized(c, magnitude, low, high.abs_diff(low))?;
    let units = 2f64.powi(format.mantissa as i32);
    let rounded = c.mul(magnitude, reciprocal)?;
    let rounded = c.scale(rounded, units)?;
    let rounded = c.unary(UnaryOp::Round, rounded)?;
    let rounded = c.mul(rounded, power)?;
    let rounded = c.scale(rounded, 1.0 / units)?;
    let largest = c.constant_like(x, format.largest())?;
    let overflows = c.compare(CompareOp::Gt, rounded, largest)?;
    let beyond = match format.specials {
        Specials::Ieee if !saturate => c.constant_like(x, f64::INFINITY)?,
        Specials::AllOnes | Specials::MinusZero if !saturate => c.constant_like(x, f64::NAN)?,
        _ => largest,
    };
    let mut result = c.select(overflows, beyond, rounded)?;
    let zero = c.constant_like(x, 0.0)?;
    let negative = c.compare(CompareOp::Lt, x, zero)?;
    let negated = c.unary(UnaryOp::Neg, result)?;
    result = c.select(negative, negated, result)?;
    // Devices may take a comparison with NaN for true.
    let nan = c.unary(UnaryOp::IsNan, x)?;
    Ok(c.select(nan, if format.specials == Specials::None { zero } else { x }, result)?)
}

const MIN_POWER: i32 = -127;
const MAX_POWER: i32 = 127;

/// A power of two next to `|x|`. Beyond the range: its nearest end if `saturate`, else NaN.
fn power_of_two(c: &mut Context, x: NodeId, saturate: bool, mode: RoundMode) -> Result<NodeId, OpError> {
    let magnitude = c.unary(UnaryOp::Abs, x)?;
    let one = c.constant_like(x, 1.0)?;
    // The reciprocal of the smallest power is no f32: numbers below 1 are scaled up first.
    let small = c.compare(CompareOp::Lt, magnitude, one)?;
    let lifted = c.scale(magnitude, 2f64.powi(-MIN_POWER))?;
    let lifted = c.select(small, lifted, magnitude)?;
    let [quotient, power, _] = normalized(c, lifted, 0, (MAX_POWER + 1) as u32)?;
    let up = match mode {
        RoundMode::Up => c.compare(CompareOp::Gt, quotient, one)?,
        RoundMode::Nearest => {
            let half = c.constant_like(x, 1.5)?;
            c.compare(CompareOp::Ge, quotient, half)?
        }
        RoundMode::Down => c.compare(CompareOp::Ne, one, one)?,
    };
    let largest = c.constant_like(x, 2f64.powi(MAX_POWER))?;
    let at_top = c.compare(CompareOp::Ge, power, largest)?;
    let doubled = c.scale(power, 2.0)?;
    let beyond = if saturate { largest } else { c.constant_like(x, f64::NAN)? };
    let doubled = c.select(at_top, beyond, doubled)?;
    let rounded = c.select(up, doubled, power)?;
    // In two steps: devices may read a subnormal factor as zero.
    let lowered = c.scale(rounded, 2f64.powi(MIN_POWER + 64))?;
    let lowered = c.scale(lowered, 2f64.powi(-64))?;
    let rounded = c.select(small, lowered, rounded)?;

    let infinite = c.unary(UnaryOp::IsInf, x)?;
    let rounded = c.select(infinite, beyond, rounded)?;
    let smallest = c.constant_like(x, 2f64.powi(MIN_POWER))?;
    let below = c.compare(CompareOp::Lt, lifted, one)?;
    let beyond = if saturate { smallest } else { c.constant_like(x, f64::NAN)? };
    let rounded = c.select(below, beyond, rounded)?;
    let nan = c.unary(UnaryOp::IsNan, x)?;
    Ok(c.select(nan, x, rounded)?)
}
