//! The mapping from ONNX operators to the graph: one table, one file per family of operators.
//!
//! Each rule reads attributes with the defaults of the standard, checks, then lowers. Rules cover every opset from 7 on in which
//! the operator computes the same function of its numbers; where only the place of a parameter changed (attribute or input), a
//! rule takes both. Formulas are those of the operator reference at onnx.ai.

mod activation;
mod constants;
mod contraction;
mod indexing;
mod math;
mod movement;
mod normalization;
mod pooling;
mod reduction;
mod shape;
#[cfg(test)]
mod tests;
mod window;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use meganeura_ir::{ArgOp, BinaryOp, CompareOp, Composite, NodeId, UnaryOp};

use crate::context::Context;
use crate::error::OpError;

/// How an operator becomes nodes.
#[derive(Clone, Copy)]
pub(crate) enum Rule {
    Unary(UnaryOp),
    /// Two operands, broadcast.
    Binary(BinaryOp),
    /// One operand or more, broadcast.
    Variadic(BinaryOp),
    Compare(CompareOp),
    /// A composite without attributes.
    Composite(fn() -> Composite),
    Reduce(reduction::Reduction),
    Arg(ArgOp),
    One(fn(&mut Context) -> Result<NodeId, OpError>),
    Many(fn(&mut Context) -> Result<Vec<NodeId>, OpError>),
}

/// One operator.
pub(crate) struct Row {
    pub domain: &'static str,
    pub op: &'static str,
    /// Operands, absent ones included.
    pub inputs: RangeInclusive<usize>,
    /// Operands that are settings rather than data: a weight that is used nowhere else is none.
    pub statics: &'static [usize],
    pub rule: Rule,
}

const ANY: usize = usize::MAX;

const fn row(op: &'static str, inputs: RangeInclusive<usize>, statics: &'static [usize], rule: Rule) -> Row {
    Row { domain: "", op, inputs, statics, rule }
}

/// The table of operators, family by family.
static FAMILIES: &[&[Row]] = &[
    activation::ROWS,
    constants::ROWS,
    contraction::ROWS,
    indexing::ROWS,
    math::ROWS,
    movement::ROWS,
    normalization::ROWS,
    pooling::ROWS,
    reduction::ROWS,
    shape::ROWS,
];

fn rows() -> impl Iterator<Item = &'static Row> {
    FAMILIES.iter().copied().flatten()
}

/// The row of an operator. `domain` is empty for the standard operators.
pub(crate) fn find(domain: &str, op: &str) -> Option<&'static Row> {
    static INDEX: LazyLock<HashMap<(&str, &str), &Row>> =
        LazyLock::new(|| rows().map(|row| ((row.domain, row.op), row)).collect());
    INDEX.get(&(domain, op)).copied()
}

/// Adds the nodes of one operator and returns its results, by output position.
pub(crate) fn lower(row: &Row, c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let found = c.input_count();
    if !row.inputs.contains(&found) {
        let expected = match (*row.inputs.start(), *row.inputs.end()) {
            (low, high) if low == high => low.to_string(),
            (low, ANY) => format!("{low} or more"),
            (low, high) => format!("{low} to {high}"),
        };
        return Err(OpError::InputCount { found, expected });
    }
    let one = match row.rule {
        Rule::Unary(op) => {
            let x = c.input(0)?;
            c.unary(op, x)?
        }
        Rule::Binary(op) => math::binary(c, op)?,
        Rule::Variadic(op) => math::variadic(c, op)?,
        Rule::Compare(op) => math::compare(c, op)?,
        Rule::Composite(composite) => {
            let x = c.input(0)?;
            c.push(meganeura_ir::Op::Composite(composite()), &[x])?
        }
        Rule::Reduce(reduce) => reduction::lower(c, reduce)?,
        Rule::Arg(op) => reduction::arg(c, op)?,
        Rule::One(rule) => rule(c)?,
        Rule::Many(rule) => return rule(c),
    };
    Ok(vec![one])
}

pub(crate) fn table() -> impl Iterator<Item = (&'static str, &'static str)> {
    rows().map(|row| (row.domain, row.op))
}
