//! Arithmetic, comparison, logic and casts.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, UnaryOp};

use super::{ANY, Row, Rule, narrow, row};
use crate::context::{self, Context};
use crate::error::OpError;
use crate::narrow::Narrow;
use crate::tensor::{self, arithmetic};

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Abs",                   1..=1, &[],     Rule::Unary(UnaryOp::Abs)),
    row("Acos",                  1..=1, &[],     Rule::Unary(UnaryOp::Acos)),
    row("Acosh",                 1..=1, &[],     Rule::Unary(UnaryOp::Acosh)),
    row("Add",                   2..=2, &[],     Rule::Binary(BinaryOp::Add)),
    row("And",                   2..=2, &[],     Rule::Binary(BinaryOp::And)),
    row("Asin",                  1..=1, &[],     Rule::Unary(UnaryOp::Asin)),
    row("Asinh",                 1..=1, &[],     Rule::Unary(UnaryOp::Asinh)),
    row("Atan",                  1..=1, &[],     Rule::Unary(UnaryOp::Atan)),
    row("Atanh",                 1..=1, &[],     Rule::Unary(UnaryOp::Atanh)),
    row("BitwiseAnd",            2..=2, &[],     Rule::Binary(BinaryOp::And)),
    row("BitwiseNot",            1..=1, &[],     Rule::Unary(UnaryOp::Not)),
    row("BitwiseOr",             2..=2, &[],     Rule::Binary(BinaryOp::Or)),
    row("BitwiseXor",            2..=2, &[],     Rule::Binary(BinaryOp::Xor)),
    row("Cast",                  1..=1, &[],     Rule::One(cast)),
    row("CastLike",              2..=2, &[],     Rule::One(cast_like)),
    row("Ceil",                  1..=1, &[],     Rule::Unary(UnaryOp::Ceil)),
    row("Cos",                   1..=1, &[],     Rule::Unary(UnaryOp::Cos)),
    row("Cosh",                  1..=1, &[],     Rule::Unary(UnaryOp::Cosh)),
    row("Div",                   2..=2, &[],     Rule::Binary(BinaryOp::Div)),
    row("Equal",                 2..=2, &[],     Rule::Compare(CompareOp::Eq)),
    row("Erf",                   1..=1, &[],     Rule::Unary(UnaryOp::Erf)),
    row("Exp",                   1..=1, &[],     Rule::Unary(UnaryOp::Exp)),
    row("Floor",                 1..=1, &[],     Rule::Unary(UnaryOp::Floor)),
    row("Greater",               2..=2, &[],     Rule::Compare(CompareOp::Gt)),
    row("GreaterOrEqual",        2..=2, &[],     Rule::Compare(CompareOp::Ge)),
    row("IsInf",                 1..=1, &[],     Rule::One(is_inf)),
    row("IsNaN",                 1..=1, &[],     Rule::Unary(UnaryOp::IsNan)),
    row("Less",                  2..=2, &[],     Rule::Compare(CompareOp::Lt)),
    row("LessOrEqual",           2..=2, &[],     Rule::Compare(CompareOp::Le)),
    row("Log",                   1..=1, &[],     Rule::Unary(UnaryOp::Log)),
    row("Max",                   1..=ANY, &[],   Rule::Variadic(BinaryOp::Max)),
    row("Mean",                  1..=ANY, &[],   Rule::One(mean)),
    row("Min",                   1..=ANY, &[],   Rule::Variadic(BinaryOp::Min)),
    row("Mod",                   2..=2, &[],     Rule::One(modulo)),
    row("Mul",                   2..=2, &[],     Rule::Binary(BinaryOp::Mul)),
    row("Neg",                   1..=1, &[],     Rule::Unary(UnaryOp::Neg)),
    row("Not",                   1..=1, &[],     Rule::Unary(UnaryOp::Not)),
    row("Or",                    2..=2, &[],     Rule::Binary(BinaryOp::Or)),
    row("Pow",                   2..=2, &[],     Rule::One(pow)),
    row("Reciprocal",            1..=1, &[],     Rule::Unary(UnaryOp::Reciprocal)),
    row("Round",                 1..=1, &[],     Rule::Unary(UnaryOp::Round)),
    row("Sign",                  1..=1, &[],     Rule::Unary(UnaryOp::Sign)),
    row("Sin",                   1..=1, &[],     Rule::Unary(UnaryOp::Sin)),
    row("Sinh",                  1..=1, &[],     Rule::Unary(UnaryOp::Sinh)),
    row("Sqrt",                  1..=1, &[],     Rule::Unary(UnaryOp::Sqrt)),
    row("Sub",                   2..=2, &[],     Rule::Binary(BinaryOp::Sub)),
    row("Sum",                   1..=ANY, &[],   Rule::Variadic(BinaryOp::Add)),
    row("Tan",                   1..=1, &[],     Rule::Unary(UnaryOp::Tan)),
    row("Where",                 3..=3, &[],     Rule::One(where_)),
    row("Xor",                   2..=2, &[],     Rule::Binary(BinaryOp::Xor)),
];

/// Attributes that say nothing about the numbers of wide types: they are for 8-bit floats.
const CAST_ATTRIBUTES: [&str; 2] = ["saturate", "round_mode"];

/// Two operands at their common shape. Before opset 7, `axis` aligns the axes of the second with those of the first.
fn pair(c: &mut Context) -> Result<[NodeId; 2], OpError> {
    let (a, mut b) = (c.input(0)?, c.input(1)?);
    if c.opset < 7
        && c.flag("broadcast", false)?
        && let Some(axis) = c.int("axis")?
    {
        let (rank, mut shape) = (c.rank(a), c.shape(b).to_vec());
        let misfit = || c.operand_error(1, "it has more axes than the first operand from `axis` on");
        let filled = rank.checked_sub(context::axis(axis, rank)?).filter(|&axes| axes >= shape.len()).ok_or_else(misfit)?;
        shape.resize(filled, 1);
        b = c.reshape(b, shape)?;
    }
    match *c.broadcast(&[a, b])? {
        [a, b] => Ok([a, b]),
        _ => Err(OpError::MissingInput(1)),
    }
}

pub(super) fn binary(c: &mut Context, op: BinaryOp) -> Result<NodeId, OpError> {
    let [a, b] = pair(c)?;
    Ok(c.binary(op, a, b)?)
}

pub(super) fn variadic(c: &mut Context, op: BinaryOp) -> Result<NodeId, OpError> {
    let operands = c.all_inputs()?;
    let operands = c.broadcast(&operands)?;
    let mut result = operands[0];
    for &operand in &operands[1..] {
        result = c.binary(op, result, operand)?;
    }
    Ok(result)
}

pub(super) fn compare(c: &mut Context, op: CompareOp) -> Result<NodeId, OpError> {
    let [a, b] = pair(c)?;
    Ok(c.compare(op, a, b)?)
}

/// `x * factor`; integers are multiplied as reals and truncated.
pub(super) fn scale(c: &mut Context, x: NodeId, factor: f64) -> Result<NodeId, OpError> {
    let dtype = c.ty(x).dtype;
    if dtype.is_float() || factor.fract() == 0.0 {
        return Ok(c.scale(x, factor)?);
    }
    let real = c.cast(x, DType::F32)?;
    let product = c.scale(real, factor)?;
    Ok(c.cast(product, dtype)?)
}

pub(super) fn mean(c: &mut Context) -> Result<NodeId, OpError> {
    let count = c.input_count() as f64;
    let sum = variadic(c, BinaryOp::Add)?;
    let count = c.constant_like(sum, count)?;
    Ok(c.div(sum, count)?)
}

/// `fmod = 1`: the sign of the dividend. `fmod = 0`, integers only: the sign of the divisor, as in Python.
pub(super) fn modulo(c: &mut Context) -> Result<NodeId, OpError> {
    let fmod = c.flag("fmod", false)?;
    let pair = [c.input(0)?, c.input(1)?];
    let dtype = c.ty(pair[0]).dtype;
    if !fmod && dtype.is_float() {
        let reason = "floats need fmod = 1";
        return Err(OpError::Attribute { name: "fmod", value: "0".to_owned(), reason });
    }
    let pair = c.broadcast(&pair)?;
    let (a, b) = (pair[0], pair[1]);
    let remainder = c.binary(BinaryOp::Rem, a, b)?;
    let unsigned = matches!(dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64);
    if fmod || unsigned {
        return Ok(remainder);
    }
    let zero = c.constant_like(remainder, 0.0)?;
    let negative = c.compare(CompareOp::Lt, remainder, zero)?;
    let divisor_negative = c.compare(CompareOp::Lt, b, zero)?;
    let signs_differ = c.binary(BinaryOp::Xor, negative, divisor_negative)?;
    let inexact = c.compare(CompareOp::Ne, remainder, zero)?;
    let moves = c.binary(BinaryOp::And, signs_differ, inexact)?;
    let moved = c.add(remainder, b)?;
    Ok(c.select(moves, moved, remainder)?)
}

/// The result has the dtype of the base. Exponents 1, 2 and 3 become products, which are exact for negative bases on every
/// device.
pub(super) fn pow(c: &mut Context) -> Result<NodeId, OpError> {
    let y = c.input(1)?;
    let [base, mut exponent] = pair(c)?;
    if c.is_uniform(y, 1.0) {
        return Ok(base);
    }
    if c.is_uniform(y, 2.0) {
        return Ok(c.mul(base, base)?);
    }
    if c.is_uniform(y, 3.0) {
        let square = c.mul(base, base)?;
        return Ok(c.mul(square, base)?);
    }
    let dtype = c.ty(base).dtype;
    if dtype.is_int() && c.ty(exponent).dtype.is_float() {
        let base = c.cast(base, DType::F32)?;
        let power = c.binary(BinaryOp::Pow, base, exponent)?;
        return Ok(c.cast(power, dtype)?);
    }
    exponent = c.cast(exponent, dtype)?;
    Ok(c.binary(BinaryOp::Pow, base, exponent)?)
}

pub(super) fn is_inf(c: &mut Context) -> Result<NodeId, OpError> {
    let (negative, positive) = (c.flag("detect_negative", true)?, c.flag("detect_positive", true)?);
    let x = c.input(0)?;
    let infinite = c.unary(UnaryOp::IsInf, x)?;
    let zero = c.constant_like(x, 0.0)?;
    let sign = match (negative, positive) {
        (true, true) => return Ok(infinite),
        (true, false) => c.compare(CompareOp::Lt, x, zero)?,
        (false, true) => c.compare(CompareOp::Gt, x, zero)?,
        (false, false) => {
            let ty = c.ty(infinite).clone();
            return Ok(c.splat(&ty, 0.0)?);
        }
    };
    Ok(c.binary(BinaryOp::And, infinite, sign)?)
}

pub(super) fn where_(c: &mut Context) -> Result<NodeId, OpError> {
    let operands = c.all_inputs()?;
    let operands = c.broadcast(&operands)?;
    Ok(c.select(operands[0], operands[1], operands[2])?)
}

/// To a float of 16 bits or more: f32.
pub(super) fn cast(c: &mut Context) -> Result<NodeId, OpError> {
    let to = c.int("to")?.ok_or(OpError::MissingAttribute("to"))?;
    cast_to(c, i32::try_from(to).unwrap_or(0))
}

/// Operand 0 as elements of a `TensorProto.DataType`.
fn cast_to(c: &mut Context, data_type: i32) -> Result<NodeId, OpError> {
    match crate::narrow::narrow(data_type) {
        Some(narrow) => cast_to_narrow(c, narrow),
        None => {
            let dtype = tensor::dtype(data_type)?;
            c.ignore(&CAST_ATTRIBUTES);
            let x = c.input(0)?;
            Ok(c.cast(x, arithmetic(dtype))?)
        }
    }
}

fn cast_to_narrow(c: &mut Context, to: Narrow) -> Result<NodeId, OpError> {
    let saturate = c.flag("saturate", true)?;
    let mode = c.choice("round_mode", "up", &narrow::ROUND_MODES)?;
    let x = c.input(0)?;
    c.set_narrow(Some(to));
    narrow::cast(c, x, to, saturate, mode)
}

pub(super) fn cast_like(c: &mut Context) -> Result<NodeId, OpError> {
    if let Some(narrow) = c.narrow(1) {
        return cast_to_narrow(c, narrow);
    }
    c.ignore(&CAST_ATTRIBUTES);
    let (x, like) = (c.input(0)?, c.input(1)?);
    let dtype = c.ty(like).dtype;
    Ok(c.cast(x, dtype)?)
}
