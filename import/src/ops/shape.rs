//! Shapes as values: always constants here, since every size is concrete.

use meganeura_ir::{DType, NodeId, Shape, Tensor};

use super::{Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;
use crate::specialize::as_i64;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Shape",                 1..=1, &[],     Rule::One(shape)),
    row("Size",                  1..=1, &[],     Rule::One(size)),
];

/// Sizes of axes `start..end` as i64; both bounds are clamped.
pub(super) fn shape(c: &mut Context) -> Result<NodeId, OpError> {
    let (start, end) = (c.int_or("start", 0)?, c.int("end")?);
    let x = c.input(0)?;
    let sizes = as_i64(&c.shape(x));
    let rank = sizes.len() as i64;
    let clamp = |v: i64| (if v < 0 { v.saturating_add(rank) } else { v }).clamp(0, rank) as usize;
    let (start, end) = (clamp(start), clamp(end.unwrap_or(rank)));
    let sizes = &sizes[start..end.max(start)];
    c.constant_tensor(Tensor::from_i64(DType::I64, [sizes.len()], sizes))
}

pub(super) fn size(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let count = c.shape(x).numel() as i64;
    c.constant_tensor(Tensor::from_i64(DType::I64, Shape::scalar(), &[count]))
}
