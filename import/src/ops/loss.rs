//! Losses over class indices.

use meganeura_ir::{CompareOp, Composite, NodeId, Op, ReduceOp, Shape, Tensor};

use super::indexing::position;
use super::scatter::pick;
use super::{Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("NegativeLogLikelihoodLoss", 2..=3, &[], Rule::One(negative_log_likelihood)),
    row("SoftmaxCrossEntropyLoss",   2..=3, &[], Rule::Many(softmax_cross_entropy)),
];

/// `-w[t] * x[n, t, ..]` for the class `t` of each position, 0 where it is ignored; the mean is weighted by `w[t]`.
pub(super) fn negative_log_likelihood(c: &mut Context) -> Result<NodeId, OpError> {
    let log_p = c.input(0)?;
    reduced_loss(c, log_p)
}

/// The same of the logarithm of the softmax over the classes, which is the second result.
pub(super) fn softmax_cross_entropy(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let scores = c.input(0)?;
    if c.rank(scores) < 2 {
        return Err(c.operand_error(0, "batch and classes are needed"));
    }
    let log_p = c.push(Op::Composite(Composite::LogSoftmax { axis: 1 }), &[scores])?;
    Ok(vec![reduced_loss(c, log_p)?, log_p])
}

/// The loss for `log_p: [n, classes, ..]`, with the target and the weights of the classes as operands 1 and 2.
fn reduced_loss(c: &mut Context, log_p: NodeId) -> Result<NodeId, OpError> {
    let reduction = c.string_or("reduction", "mean")?;
    let ignored = c.int("ignore_index")?;
    let target = c.input(1)?;
    let (shape, ty) = (c.shape(log_p), c.ty(target).clone());
    if shape.rank() < 2 || !c.ty(log_p).dtype.is_float() {
        return Err(c.operand_error(0, "batch and classes of floats are needed"));
    }
    if !ty.dtype.is_int() || shape.without(&[1]) != ty.shape {
        return Err(c.operand_error(1, "one class index per position is needed"));
    }
    let classes = position(c, ty.dtype, &shape, 1)?;
    let spread = c.broadcast_without(target, &shape, &[1])?;
    let chosen = c.compare(CompareOp::Eq, classes, spread)?;
    let likelihood = pick(c, chosen, log_p, &[1])?;
    let mut weight = match c.optional(2) {
        Some(weights) => {
            let weights = c.broadcast_along(weights, &shape, 1)?;
            Some(pick(c, chosen, weights, &[1])?)
        }
        None => None,
    };
    let zero = c.constant_like(likelihood, 0.0)?;
    let mut loss = c.sub(zero, likelihood)?;
    if let Some(ignored) = ignored {
        let ignored = c.constant_tensor(Tensor::from_i64(ty.dtype, Shape::scalar(), &[ignored]))?;
        let ignored = c.broadcast_to(ignored, &ty.shape)?;
        let counts = c.compare(CompareOp::Ne, target, ignored)?;
        loss = c.select(counts, loss, zero)?;
        let one = c.constant_like(loss, 1.0)?;
        weight = Some(c.select(counts, weight.unwrap_or(one), zero)?);
    }
    if let Some(weight) = weight {
        loss = c.mul(loss, weight)?;
    }
    let all: Vec<usize> = (0..ty.shape.rank()).collect();
    match reduction {
        "none" => Ok(loss),
        "sum" => Ok(c.reduce(ReduceOp::Sum, loss, &all)?),
        "mean" => match weight {
            Some(weight) => {
                let (sum, total) = (c.reduce(ReduceOp::Sum, loss, &all)?, c.reduce(ReduceOp::Sum, weight, &all)?);
                Ok(c.div(sum, total)?)
            }
            None => Ok(c.mean(loss, &all)?),
        },
        other => {
            let reason = "it is none, sum or mean";
            Err(OpError::Attribute { name: "reduction", value: other.to_owned(), reason })
        }
    }
}
