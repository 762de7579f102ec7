//! Running sums and products.

use meganeura_ir::{BinaryOp, NodeId, Op, PadDim, ReduceOp, Shape, WindowDims, reduce_identity};

use super::{Row, Rule, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("CumProd",               2..=2, &[1],    Rule::One(|c| cumulative(c, ReduceOp::Prod, BinaryOp::Mul))),
    row("CumSum",                2..=2, &[1],    Rule::One(|c| cumulative(c, ReduceOp::Sum, BinaryOp::Add))),
];

/// Lines up to this length are reduced from their ends directly.
const BLOCK: usize = 256;

/// What a result element covers.
#[derive(Clone, Copy)]
struct Span {
    /// Not the element itself.
    exclusive: bool,
    /// The elements after it instead of those before it.
    reverse: bool,
}

/// `y[i] = x[0] + .. + x[i]` along an axis that operand 1 names, or the product.
fn cumulative(c: &mut Context, reduce: ReduceOp, combine: BinaryOp) -> Result<NodeId, OpError> {
    let span = Span { exclusive: c.flag("exclusive", false)?, reverse: c.flag("reverse", false)? };
    let axis = c.known_ints(1)?.ok_or(OpError::MissingInput(1))?;
    let &[axis] = axis.as_slice() else { return Err(c.operand_error(1, "one axis is needed")) };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let axis = context::axis(axis, shape.rank())?;
    if shape.numel() == 0 {
        return Ok(x);
    }
    let (lead, n, trail) = (shape[..axis].iter().product::<usize>(), shape[axis], shape[axis + 1..].iter().product::<usize>());
    let lines = c.reshape(x, [lead, n, trail])?;
    let lines = c.transpose(lines, &[0, 2, 1])?;
    let lines = c.reshape(lines, [lead * trail, n])?;
    let scanned = scan(c, lines, reduce, combine, span)?;
    let y = c.reshape(scanned, [lead, trail, n])?;
    let y = c.transpose(y, &[0, 2, 1])?;
    Ok(c.reshape(y, shape)?)
}

/// Along the last axis of `x: [lines, n]`: within blocks, then over the blocks.
fn scan(c: &mut Context, x: NodeId, reduce: ReduceOp, combine: BinaryOp, span: Span) -> Result<NodeId, OpError> {
    let (lines, n) = (c.shape(x)[0], c.shape(x)[1]);
    let identity = c.constant_tensor(reduce_identity(reduce, c.ty(x).dtype))?;
    if n <= BLOCK {
        let (ahead, own) = (n as isize - 1 + isize::from(span.exclusive), -isize::from(span.exclusive));
        let pads = if span.reverse { (own, ahead) } else { (ahead, own) };
        let window = WindowDims { size: vec![n], stride: vec![1], dilation: vec![1], pads: vec![pads] };
        let covered = c.push(Op::Unfold(window), &[x, identity])?;
        return Ok(c.reduce(reduce, covered, &[2])?);
    }
    let blocks = n.div_ceil(BLOCK);
    let padding = PadDim { low: 0, high: blocks * BLOCK - n, interior: 0 };
    let padded = c.push(Op::Pad(vec![PadDim::default(), padding]), &[x, identity])?;
    let grid = Shape::from([lines, blocks, BLOCK]);
    let within = c.reshape(padded, [lines * blocks, BLOCK])?;
    let within = scan(c, within, reduce, combine, span)?;
    let within = c.reshape(within, grid.clone())?;
    let totals = c.reshape(padded, grid.clone())?;
    let totals = c.reduce(reduce, totals, &[2])?;
    let before = scan(c, totals, reduce, combine, Span { exclusive: true, ..span })?;
    let before = c.broadcast_without(before, &grid, &[2])?;
    let whole = c.binary(combine, within, before)?;
    let whole = c.reshape(whole, [lines, blocks * BLOCK])?;
    super::movement::slice_axis(c, whole, 1, 0, n)
}
