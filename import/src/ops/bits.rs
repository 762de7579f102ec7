//! Bit patterns.

use meganeura_ir::{BinaryOp, DType, NodeId, Tensor, TensorType};

use super::{Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;
use crate::tensor;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("BitCast",               1..=1, &[],     Rule::One(bit_cast)),
    row("BitShift",              2..=2, &[],     Rule::One(bit_shift)),
];

/// Products with and quotients by powers of two. A shift by the width or more gives 0: there the power wraps to 0, and a quotient
/// by 0 is 0.
pub(super) fn bit_shift(c: &mut Context) -> Result<NodeId, OpError> {
    let op = match c.string_or("direction", "")? {
        "LEFT" => BinaryOp::Mul,
        "RIGHT" => BinaryOp::Div,
        "" => return Err(OpError::MissingAttribute("direction")),
        other => {
            let reason = "it is LEFT or RIGHT";
            return Err(OpError::Attribute { name: "direction", value: other.to_owned(), reason });
        }
    };
    let pair = [c.input(0)?, c.input(1)?];
    if let Some(index) = pair.iter().position(|&x| !matches!(c.ty(x).dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64)) {
        return Err(c.operand_error(index, "unsigned integers are needed"));
    }
    let pair = c.broadcast(&pair)?;
    let two = c.constant_like(pair[1], 2.0)?;
    let power = c.binary(BinaryOp::Pow, two, pair[1])?;
    Ok(c.binary(op, pair[0], power)?)
}

/// The same bits as another dtype of the same width. Integers wrap into each other; between floats and integers, the value must be
/// known, in 32 bits.
pub(super) fn bit_cast(c: &mut Context) -> Result<NodeId, OpError> {
    let to = c.int("to")?.ok_or(OpError::MissingAttribute("to"))?;
    let to = tensor::dtype(i32::try_from(to).unwrap_or(0))?;
    let x = c.input(0)?;
    let from = c.ty(x).dtype;
    let misfit = || OpError::unsupported(format!("BitCast from {from} to {to}"));
    match (from.is_float(), to.is_float()) {
        // Every float is f32 here, whatever its width in the file.
        (true, true) if matches!(to, DType::F32 | DType::F64) => Ok(x),
        (false, false) if from == to => Ok(x),
        (false, false) if from.size() != to.size() || from.size() == 8 => Err(misfit()),
        (false, false) => Ok(c.cast(x, to)?),
        (true, false) | (false, true) if from.size() == 4 && to.size() == 4 => {
            let Some(value) = c.known(x) else {
                return Err(OpError::unsupported(format!("BitCast from {from} to {to} of values that change")));
            };
            let ty = TensorType::new(to, value.shape().clone());
            let bits = Tensor::from_bytes(ty, value.into_bytes()).map_err(|_| misfit())?;
            c.constant_tensor(bits)
        }
        _ => Err(misfit()),
    }
}
