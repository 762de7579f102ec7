//! Functions of square matrices.

use std::collections::BTreeMap;

use meganeura_ir::{ArgOp, BinaryOp, CompareOp, DType, NodeId, Op, Shape, TensorType, UnaryOp};

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

/// Gauss's elimination: the product of the pivots, negated by each exchange of rows or of columns. The pivot is the largest of all
/// elements that are left, so that it vanishes only where all of them do, and the derivative stays right at singular matrices.
fn eliminate(c: &mut Context, mut x: NodeId) -> Result<NodeId, OpError> {
    let (batch, size) = (c.shape(x)[0], c.shape(x)[1]);
    let lines = |n: usize| Shape::from([batch, n]);
    let mut product = c.splat(&TensorType::new(DType::F32, [batch]), 1.0)?;
    for n in (2..=size).rev() {
        let square = Shape::from([batch, n, n]);
        let [row, column] = largest(c, x)?;
        let [first_row, first_column] = [is_zero(c, row)?, is_zero(c, column)?];
        let exchanged_once = c.binary(BinaryOp::Xor, first_row, first_column)?;

        // The first row takes the place of the pivot's, then the first column.
        let rows = marked(c, row, &square, 1)?;
        let pivot_row = pick(c, rows, x, &[1])?;
        let first = slice_axis(c, x, 1, 0, 1)?;
        let first = c.broadcast_to(first, &square)?;
        let x_below = c.select(rows, first, x)?;
        let below = slice_axis(c, x_below, 1, 1, n - 1)?;
        let (wide, line) = (Shape::from([batch, n - 1, n]), lines(n));
        let columns = marked(c, column, &wide, 2)?;
        let pivot_column = pick(c, columns, below, &[2])?;
        let first = slice_axis(c, below, 2, 0, 1)?;
        let first = c.broadcast_to(first, &wide)?;
        let below = c.select(columns, first, below)?;
        let rest = slice_axis(c, below, 2, 1, n - 1)?;
        let columns = marked(c, column, &line, 1)?;
        let pivot = pick(c, columns, pivot_row, &[1])?;
        let first = slice_axis(c, pivot_row, 1, 0, 1)?;
        let first = c.broadcast_to(first, &line)?;
        let pivot_row = c.select(columns, first, pivot_row)?;
        let pivot_row = slice_axis(c, pivot_row, 1, 1, n - 1)?;

        let negated = c.unary(UnaryOp::Neg, pivot)?;
        let signed = c.select(exchanged_once, negated, pivot)?;
        product = c.mul(product, signed)?;
        let vanishes = is_zero(c, pivot)?;
        let one = c.constant_like(pivot, 1.0)?;
        let divisor = c.select(vanishes, one, pivot)?;
        let divisor = c.broadcast_without(divisor, &lines(n - 1), &[1])?;
        let factor = c.div(pivot_column, divisor)?;
        let smaller = Shape::from([batch, n - 1, n - 1]);
        let factor = c.broadcast_without(factor, &smaller, &[2])?;
        let pivot_row = c.broadcast_without(pivot_row, &smaller, &[1])?;
        let removed = c.mul(factor, pivot_row)?;
        x = c.sub(rest, removed)?;
    }
    let last = c.reshape(x, [batch])?;
    Ok(c.mul(product, last)?)
}

/// Row and column of the element of the largest magnitude in each of the matrices `x: [batch, n, n]`.
fn largest(c: &mut Context, x: NodeId) -> Result<[NodeId; 2], OpError> {
    let (batch, n) = (c.shape(x)[0], c.shape(x)[1]);
    let magnitude = c.unary(UnaryOp::Abs, x)?;
    let magnitude = c.reshape(magnitude, [batch, n * n])?;
    let place = c.push(Op::ArgReduce { op: ArgOp::Max, axis: 1 }, &[magnitude])?;
    let n = c.constant_like(place, n as f64)?;
    Ok([c.div(place, n)?, c.binary(BinaryOp::Rem, place, n)?])
}

fn is_zero(c: &mut Context, x: NodeId) -> Result<NodeId, OpError> {
    let zero = c.constant_like(x, 0.0)?;
    Ok(c.compare(CompareOp::Eq, x, zero)?)
}

/// Whether the position along `axis` of `shape: [batch, ..]` is that of `index: [batch]`.
fn marked(c: &mut Context, index: NodeId, shape: &Shape, axis: usize) -> Result<NodeId, OpError> {
    let here = position(c, DType::I64, shape, axis)?;
    let index = c.broadcast_without(index, shape, &(1..shape.rank()).collect::<Vec<_>>())?;
    Ok(c.compare(CompareOp::Eq, here, index)?)
}
