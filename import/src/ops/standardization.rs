//! Normalisation without weights.

use meganeura_ir::{CompareOp, Composite, NodeId, Op, Real, ReduceOp, UnaryOp};

use super::{Row, Rule, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("LpNormalization",           1..=1, &[], Rule::One(lp_normalization)),
    row("MeanVarianceNormalization", 1..=1, &[], Rule::One(mean_variance)),
];

/// The operator's formula adds 1e-9 to the standard deviation.
const VARIANCE_EPSILON: f64 = 1e-18;

/// `x / norm(x)` along an axis, the 1- or the 2-norm; 0, with derivative 0, where the norm is 0.
pub(super) fn lp_normalization(c: &mut Context) -> Result<NodeId, OpError> {
    let (axis, p) = (c.int_or("axis", -1)?, c.int_or("p", 2)?);
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axis = context::axis(axis, shape.rank())?;
    let (each, inverse) = match p {
        1 => (c.unary(UnaryOp::Abs, x)?, UnaryOp::Reciprocal),
        2 => (c.mul(x, x)?, UnaryOp::Rsqrt),
        _ => return Err(OpError::Attribute { name: "p", value: p.to_string(), reason: "it is 1 or 2" }),
    };
    let sum = c.reduce(ReduceOp::Sum, each, &[axis])?;
    let (zero, one) = (c.constant_like(sum, 0.0)?, c.constant_like(sum, 1.0)?);
    let vanishes = c.compare(CompareOp::Eq, sum, zero)?;
    let sum = c.select(vanishes, one, sum)?;
    let factor = c.unary(inverse, sum)?;
    let factor = c.select(vanishes, zero, factor)?;
    let factor = c.broadcast_without(factor, &shape, &[axis])?;
    Ok(c.mul(x, factor)?)
}

/// `(x - mean) / deviation` over axes, all but the channels by default.
pub(super) fn mean_variance(c: &mut Context) -> Result<NodeId, OpError> {
    let axes = c.ints("axes")?.unwrap_or(&[0, 2, 3]);
    let x = c.input(0)?;
    let axes = c.axes(axes, c.rank(x))?;
    Ok(c.push(Op::Composite(Composite::Normalize { axes, epsilon: Real(VARIANCE_EPSILON) }), &[x])?)
}
