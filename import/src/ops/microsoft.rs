//! Operators of onnxruntime that fuse a product, a bias or an activation with what is beside it.

use meganeura_ir::{Composite, NodeId, Op, UnaryOp};

use super::activation::{clamp, hard_sigmoid_of};
use super::contraction::{conv, gemm, matrix_product};
use super::{Row, Rule, microsoft};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    microsoft("BiasGelu",        2..=2, &[],     Rule::One(|c| gelu(c, Composite::Gelu))),
    microsoft("FastGelu",        1..=2, &[],     Rule::One(|c| gelu(c, Composite::GeluTanh))),
    microsoft("FusedConv",       2..=4, &[],     Rule::One(fused_conv)),
    microsoft("FusedGemm",       2..=3, &[],     Rule::One(fused_gemm)),
    microsoft("FusedMatMul",     2..=2, &[],     Rule::One(fused_matmul)),
    microsoft("Gelu",            1..=1, &[],     Rule::One(|c| gelu(c, Composite::Gelu))),
    microsoft("QuickGelu",       1..=1, &[],     Rule::One(quick_gelu)),
    microsoft("TransposeMatMul", 2..=2, &[],     Rule::One(fused_matmul)),
];

/// Of the sum of an operand and a bias along its last axis, if there is one.
fn gelu(c: &mut Context, composite: Composite) -> Result<NodeId, OpError> {
    let mut x = c.input(0)?;
    if let Some(bias) = c.optional(1) {
        let shape = c.shape(x);
        if c.rank(bias) != 1 {
            return Err(c.operand_error(1, "one axis is needed"));
        }
        let bias = c.broadcast_into(bias, &shape)?;
        x = c.add(x, bias)?;
    }
    Ok(c.push(Op::Composite(composite), &[x])?)
}

/// `x * sigmoid(alpha * x)`
pub(super) fn quick_gelu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", f64::from(1.702f32))?;
    let x = c.input(0)?;
    let y = c.scale(x, alpha)?;
    let y = c.unary(UnaryOp::Sigmoid, y)?;
    Ok(c.mul(x, y)?)
}

/// `alpha * A' B'` of transposed operands.
pub(super) fn fused_matmul(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.0)?;
    let a = transposed(c, 0, "transA", "transBatchA")?;
    let b = transposed(c, 1, "transB", "transBatchB")?;
    let y = matrix_product(c, a, b)?;
    if alpha == 1.0 { Ok(y) } else { Ok(c.scale(y, alpha)?) }
}

/// Operand `index` with its first axis moved before the last one (`batch`), then with the last two exchanged (`matrix`).
fn transposed(c: &mut Context, index: usize, matrix: &str, batch: &str) -> Result<NodeId, OpError> {
    let (matrix, batch) = (c.flag(matrix, false)?, c.flag(batch, false)?);
    let x = c.input(index)?;
    let rank = c.rank(x);
    if rank < 2 {
        return Ok(x);
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    if batch {
        perm[..rank - 1].rotate_left(1);
    }
    if matrix {
        perm.swap(rank - 2, rank - 1);
    }
    Ok(c.transpose(x, &perm)?)
}

/// `activation(conv(X, W) + B + Z)`
pub(super) fn fused_conv(c: &mut Context) -> Result<NodeId, OpError> {
    let activation = c.string_or("activation", "")?;
    let parameters: Vec<f64> = c.floats("activation_params")?.unwrap_or_default().iter().map(|&p| f64::from(p)).collect();
    let mut y = conv(c)?;
    if let Some(addend) = c.optional(3) {
        if c.ty(addend) != c.ty(y) {
            return Err(c.operand_error(3, "it has the shape of the result"));
        }
        y = c.add(y, addend)?;
    }
    activate(c, y, activation, [parameters.first().copied(), parameters.get(1).copied()])
}

/// `activation(alpha * A' B' + beta * C)`
pub(super) fn fused_gemm(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["activation_gamma"]);
    let activation = c.string_or("activation", "")?;
    let parameters = [c.float("activation_alpha")?, c.float("activation_beta")?];
    let y = gemm(c)?;
    activate(c, y, activation, parameters)
}

/// The activation that an operator names, with up to two parameters.
fn activate(c: &mut Context, x: NodeId, name: &str, parameters: [Option<f64>; 2]) -> Result<NodeId, OpError> {
    let parameter = |index: usize| {
        let value = || name.to_owned();
        parameters[index].ok_or_else(|| OpError::Attribute {
            name: "activation",
            value: value(),
            reason: "its parameters are missing",
        })
    };
    match name {
        "" => Ok(x),
        "Relu" => Ok(c.push(Op::Composite(Composite::Relu), &[x])?),
        "Sigmoid" => Ok(c.unary(UnaryOp::Sigmoid, x)?),
        "Tanh" => Ok(c.unary(UnaryOp::Tanh, x)?),
        "LeakyRelu" => {
            let negative = c.scale(x, parameter(0)?)?;
            let zero = c.constant_like(x, 0.0)?;
            let above = c.compare(meganeura_ir::CompareOp::Gt, x, zero)?;
            Ok(c.select(above, x, negative)?)
        }
        "Clip" => {
            let (low, high) = (c.constant_like(x, parameter(0)?)?, c.constant_like(x, parameter(1)?)?);
            clamp(c, x, Some(low), Some(high))
        }
        "HardSigmoid" => hard_sigmoid_of(c, x, parameter(0)?, parameter(1)?),
        other => Err(OpError::unsupported(format!("the fused activation {other:?}"))),
    }
}
