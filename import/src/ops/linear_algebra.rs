//! Functions of square matrices.

use std::collections::BTreeMap;

use meganeura_ir::{ArgOp, CompareOp, DType, NodeId, Op, Shape, Tensor, TensorType, UnaryOp};

use super::indexing::position;
use super::movement::slice_axis;
use super::scatter::pick;
use super::{Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Det",                   1..=1, &[],     Rule::One(det)),
];

/// Determinants up to this size are expanded into products: a polynomial, whose derivative is exact at singular matrices too.
const MAX_EXPANDED: usize = 4;

/// Determinants up to this size are eliminated, step by step.
const MAX_ELIMINATED: usize = 16;

/// The determinant of each matrix of the last two axes.
pub(super) fn det(c: &mut Context) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let shape = c.shape(x);
    let (batch, n) = match &shape[..] {
        [batch @ .., rows, columns] if rows == columns => (Shape::from(batch), *rows),
        _ => return Err(c.operand_error(0, "square matrices are needed")),
    };
    if !c.ty(x).dtype.is_float() {
        return Err(c.operand_error(0, "floats are needed"));
    }
    if n > MAX_ELIMINATED {
        return Err(OpError::unsupported(format!("the determinant of matrices larger than {MAX_ELIMINATED} x {MAX_ELIMINATED}")));
    }
    let matrices = c.reshape(x, [batch.numel(), n, n])?;
    let y = if n <= MAX_EXPANDED { expand(c, matrices)? } else { eliminate(c, matrices)? };
    Ok(c.reshape(y, batch)?)
}

/// Laplace's expansion by the last rows: the minors of the last `k` rows, by their sets of columns, give those of the last
/// `k + 1` rows.
fn expand(c: &mut Context, x: NodeId) -> Result<NodeId, OpError> {
    let (batch, n) = (c.shape(x)[0], c.shape(x)[1]);
    let ty = TensorType::new(c.ty(x).dtype, [batch]);
    let one = c.splat(&ty, 1.0)?;
    let mut minors = BTreeMap::from([(0u32, one)]);
    for row in (0..n).rev() {
        let elements: Vec<NodeId> = (0..n).map(|column| element(c, x, row, column)).collect::<Result<_, _>>()?;
        let mut next: BTreeMap<u32, NodeId> = BTreeMap::new();
        for (&columns, &minor) in &minors {
            for (column, &element) in elements.iter().enumerate().filter(|(column, _)| columns >> column & 1 == 0) {
                let mut term = if columns == 0 { element } else { c.mul(element, minor)? };
                if (columns & ((1 << column) - 1)).count_ones() % 2 == 1 {
                    term = c.unary(UnaryOp::Neg, term)?;
                }
                let set = columns | 1 << column;
                let sum = match next.get(&set) {
                    Some(&sum) => c.add(sum, term)?,
                    None => term,
                };
                next.insert(set, sum);
            }
        }
        minors = next;
    }
    Ok(minors.into_values().next().unwrap_or(one))
}

/// `x[:, row, column]`
fn element(c: &mut Context, x: NodeId, row: usize, column: usize) -> Result<NodeId, OpError> {
    let batch = c.shape(x)[0];
    let row = slice_axis(c, x, 1, row, 1)?;
    let element = slice_axis(c, row, 2, column, 1)?;
    Ok(c.reshape(element, [batch])?)
}

/// Gauss's elimination with partial pivoting: the product of the pivots, negated by each exchange of rows.
fn eliminate(c: &mut Context, mut x: NodeId) -> Result<NodeId, OpError> {
    let (batch, size) = (c.shape(x)[0], c.shape(x)[1]);
    let zero = c.constant_tensor(Tensor::from_i64(DType::I64, Shape::scalar(), &[0]))?;
    let zero = c.broadcast_to(zero, &Shape::from([batch]))?;
    let ty = TensorType::new(c.ty(x).dtype, [batch]);
    let mut product = c.splat(&ty, 1.0)?;
    for n in (1..=size).rev() {
        let column = slice_axis(c, x, 2, 0, 1)?;
        let column = c.reshape(column, [batch, n])?;
        let magnitude = c.unary(UnaryOp::Abs, column)?;
        let pivot_row = c.push(Op::ArgReduce { op: ArgOp::Max, axis: 1 }, &[magnitude])?;
        let square = c.shape(x);
        let rows = position(c, DType::I64, &square, 1)?;
        let chosen = c.broadcast_without(pivot_row, &square, &[1, 2])?;
        let is_pivot = c.compare(CompareOp::Eq, rows, chosen)?;
        let pivots = pick(c, is_pivot, x, &[1])?;

        let pivot = slice_axis(c, pivots, 1, 0, 1)?;
        let pivot = c.reshape(pivot, [batch])?;
        let stays = c.compare(CompareOp::Eq, pivot_row, zero)?;
        let negated = c.unary(UnaryOp::Neg, pivot)?;
        let signed = c.select(stays, pivot, negated)?;
        product = c.mul(product, signed)?;
        if n == 1 {
            break;
        }

        // The first row takes the place of the pivot's.
        let first = slice_axis(c, x, 1, 0, 1)?;
        let first = c.broadcast_to(first, &square)?;
        let exchanged = c.select(is_pivot, first, x)?;
        let below = slice_axis(c, exchanged, 1, 1, n - 1)?;
        let rest = Shape::from([batch, n - 1, n - 1]);
        let own = slice_axis(c, below, 2, 1, n - 1)?;
        let leading = slice_axis(c, below, 2, 0, 1)?;
        let leading = c.reshape(leading, [batch, n - 1])?;
        // All of the column is zero where the pivot is: nothing is left to eliminate.
        let real_zero = c.constant_like(pivot, 0.0)?;
        let one = c.constant_like(pivot, 1.0)?;
        let singular = c.compare(CompareOp::Eq, pivot, real_zero)?;
        let divisor = c.select(singular, one, pivot)?;
        let divisor = c.broadcast_without(divisor, &Shape::from([batch, n - 1]), &[1])?;
        let factor = c.div(leading, divisor)?;
        let factor = c.broadcast_without(factor, &rest, &[2])?;
        let pivots = slice_axis(c, pivots, 1, 1, n - 1)?;
        let pivots = c.broadcast_without(pivots, &rest, &[1])?;
        let removed = c.mul(factor, pivots)?;
        x = c.sub(own, removed)?;
    }
    Ok(product)
}
