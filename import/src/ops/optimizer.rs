//! Steps of optimisers as operators: `ai.onnx.preview.training`. Operands are the learning rate, the number of updates so far, the
//! tensors, their gradients, and their moments, kind by kind; results are the new tensors and the new moments.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Shape, UnaryOp};

use super::{ANY, Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    training("Adagrad",   Rule::Many(adagrad)),
    training("Adam",      Rule::Many(adam)),
    training("Momentum",  Rule::Many(momentum)),
];

const fn training(op: &'static str, rule: Rule) -> Row {
    Row { domain: "ai.onnx.preview.training", ..row(op, 2..=ANY, &[], rule) }
}

/// The tensors that one step updates: for each, itself, its gradient, then its moments.
fn tensors<const N: usize>(c: &Context) -> Result<Vec<[NodeId; N]>, OpError> {
    let operands = c.all_inputs()?.split_off(2);
    if !operands.len().is_multiple_of(N) {
        let (found, expected) = (c.input_count(), format!("2 and a multiple of {N}"));
        return Err(OpError::InputCount { found, expected });
    }
    let count = operands.len() / N;
    let group = |i: usize| std::array::from_fn(|kind| operands[kind * count + i]);
    let groups: Vec<[NodeId; N]> = (0..count).map(group).collect();
    for (i, group) in groups.iter().enumerate() {
        if let Some(kind) = group.iter().position(|&x| c.ty(x) != c.ty(group[0])) {
            return Err(c.operand_error(2 + kind * count + i, "it has another type than the tensor that is updated"));
        }
    }
    Ok(groups)
}

/// Results kind by kind, from results tensor by tensor.
fn by_kind<const N: usize>(results: Vec<[NodeId; N]>) -> Vec<NodeId> {
    (0..N).flat_map(|kind| results.iter().map(move |result| result[kind])).collect()
}

/// The learning rate and the number of updates, as scalars of f32.
fn rate_and_count(c: &mut Context) -> Result<(NodeId, NodeId), OpError> {
    let mut scalar = |index| -> Result<NodeId, OpError> {
        let x = c.input(index)?;
        if c.shape(x).numel() != 1 {
            return Err(c.operand_error(index, "one element is needed"));
        }
        let x = c.reshape(x, Shape::scalar())?;
        Ok(c.cast(x, DType::F32)?)
    };
    Ok((scalar(0)?, scalar(1)?))
}

/// `g + coefficient * x`: the gradient with that of the L2 penalty.
fn regularized(c: &mut Context, x: NodeId, g: NodeId, coefficient: f64) -> Result<NodeId, OpError> {
    if coefficient == 0.0 {
        return Ok(g);
    }
    let penalty = c.scale(x, coefficient)?;
    Ok(c.add(g, penalty)?)
}

/// `a * x + b * y`
fn blend(c: &mut Context, a: f64, x: NodeId, b: f64, y: NodeId) -> Result<NodeId, OpError> {
    let (x, y) = (c.scale(x, a)?, c.scale(y, b)?);
    Ok(c.add(x, y)?)
}

/// `x - rate * direction`
fn descend(c: &mut Context, x: NodeId, rate: NodeId, direction: NodeId) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let rate = c.broadcast_to(rate, &shape)?;
    let step = c.mul(rate, direction)?;
    Ok(c.sub(x, step)?)
}

/// `x / (sqrt(square) + epsilon)`
fn over_root(c: &mut Context, x: NodeId, square: NodeId, epsilon: f64) -> Result<NodeId, OpError> {
    let root = c.unary(UnaryOp::Sqrt, square)?;
    let root = c.shift(root, epsilon)?;
    Ok(c.div(x, root)?)
}

/// `h += g^2`, `x -= r / (1 + t * decay) * g / (sqrt(h) + epsilon)`
pub(super) fn adagrad(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let (penalty, decay) = (c.float_or("norm_coefficient", 0.0)?, c.float_or("decay_factor", 0.0)?);
    let epsilon = c.float_or("epsilon", f64::from(1e-6f32))?;
    let tensors = tensors(c)?;
    let (rate, count) = rate_and_count(c)?;
    let slowdown = c.scale(count, decay)?;
    let slowdown = c.shift(slowdown, 1.0)?;
    let rate = c.div(rate, slowdown)?;
    let mut results = Vec::with_capacity(tensors.len());
    for [x, g, h] in tensors {
        let g = regularized(c, x, g, penalty)?;
        let square = c.mul(g, g)?;
        let h = c.add(h, square)?;
        let direction = over_root(c, g, h, epsilon)?;
        results.push([descend(c, x, rate, direction)?, h]);
    }
    Ok(by_kind(results))
}

/// `v = alpha v + (1 - alpha) g`, `h = beta h + (1 - beta) g^2`, `x -= r' * v / (sqrt(h) + epsilon)`, then shrunk by
/// `norm_coefficient_post`. After the first update `r' = r sqrt(1 - beta^t) / (1 - alpha^t)`, else `r`.
pub(super) fn adam(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let (alpha, beta) = (c.float_or("alpha", f64::from(0.9f32))?, c.float_or("beta", f64::from(0.999f32))?);
    let epsilon = c.float_or("epsilon", f64::from(1e-6f32))?;
    let (penalty, shrinkage) = (c.float_or("norm_coefficient", 0.0)?, c.float_or("norm_coefficient_post", 0.0)?);
    let tensors = tensors(c)?;
    let (rate, count) = rate_and_count(c)?;
    let (zero, one) = (c.constant_like(count, 0.0)?, c.constant_like(count, 1.0)?);
    let at_least_one = c.binary(BinaryOp::Max, count, one)?;
    let mut remainder = |base: f64| -> Result<NodeId, OpError> {
        let base = c.constant_like(at_least_one, base)?;
        let power = c.binary(BinaryOp::Pow, base, at_least_one)?;
        Ok(c.sub(one, power)?)
    };
    let (first, second) = (remainder(alpha)?, remainder(beta)?);
    let root = c.unary(UnaryOp::Sqrt, second)?;
    let correction = c.div(root, first)?;
    let corrected = c.mul(rate, correction)?;
    let started = c.compare(CompareOp::Gt, count, zero)?;
    let rate = c.select(started, corrected, rate)?;
    let mut results = Vec::with_capacity(tensors.len());
    for [x, g, v, h] in tensors {
        let g = regularized(c, x, g, penalty)?;
        let v = blend(c, alpha, v, 1.0 - alpha, g)?;
        let square = c.mul(g, g)?;
        let h = blend(c, beta, h, 1.0 - beta, square)?;
        let direction = over_root(c, v, h, epsilon)?;
        let x = descend(c, x, rate, direction)?;
        results.push([if shrinkage == 0.0 { x } else { c.scale(x, 1.0 - shrinkage)? }, v, h]);
    }
    Ok(by_kind(results))
}

/// `v = alpha v + beta' g`, where `beta'` is 1 at the first update and `beta` later; `x -= r v`, or with Nesterov's momentum
/// `x -= r (g + alpha v)`.
pub(super) fn momentum(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let needed = |name: &'static str| c.float(name)?.ok_or(OpError::MissingAttribute(name));
    let (alpha, beta, penalty) = (needed("alpha")?, needed("beta")?, needed("norm_coefficient")?);
    let nesterov = match c.string_or("mode", "")? {
        "standard" => false,
        "nesterov" => true,
        "" => return Err(OpError::MissingAttribute("mode")),
        other => {
            let reason = "it is standard or nesterov";
            return Err(OpError::Attribute { name: "mode", value: other.to_owned(), reason });
        }
    };
    let tensors = tensors(c)?;
    let (rate, count) = rate_and_count(c)?;
    let (zero, one, beta) = (c.constant_like(count, 0.0)?, c.constant_like(count, 1.0)?, c.constant_like(count, beta)?);
    let started = c.compare(CompareOp::Gt, count, zero)?;
    let beta = c.select(started, beta, one)?;
    let mut results = Vec::with_capacity(tensors.len());
    for [x, g, v] in tensors {
        let g = regularized(c, x, g, penalty)?;
        let shape = c.shape(x);
        let beta = c.broadcast_to(beta, &shape)?;
        let (kept, added) = (c.scale(v, alpha)?, c.mul(beta, g)?);
        let v = c.add(kept, added)?;
        let direction = if nesterov { blend(c, 1.0, g, alpha, v)? } else { v };
        results.push([descend(c, x, rate, direction)?, v]);
    }
    Ok(by_kind(results))
}
