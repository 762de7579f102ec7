//! The mapping from ONNX operators to the graph: one table, one file per family of operators.
//!
//! Each rule reads attributes with the defaults of the standard, checks, then lowers. Rules cover every opset from 6 on in which
//! the operator computes the same function of its numbers; where only the place of a parameter changed (attribute or input), a
//! rule takes both. Formulas are those of the operator reference at onnx.ai.

mod activation;
mod attention;
mod bits;
mod constants;
mod contraction;
mod control;
mod data_dependent;
mod deform;
mod einsum;
mod grid;
mod indexing;
mod interpolation;
mod linear_algebra;
mod linear_attention;
mod loss;
mod math;
mod matmul_nbits;
mod microsoft;
mod microsoft_attention;
mod ml;
mod movement;
mod narrow;
mod normalization;
mod one_hot;
mod optimizer;
mod pooling;
mod quantization;
mod quantized;
mod random;
mod recurrent;
mod reduction;
mod resize;
mod roi;
mod rotary;
mod sampling;
mod scan;
mod scatter;
mod sequence;
mod shape;
mod signal;
mod sort;
mod spatial;
mod standardization;
#[cfg(test)]
mod tests;
mod trees;
mod window;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use meganeura_ir::{ArgOp, BinaryOp, CompareOp, Composite, NodeId, UnaryOp};

use crate::body::Control;
use crate::context::Context;
use crate::error::OpError;
use crate::value::Value;

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
    /// Operands and results may be sequences and optional values.
    Values(fn(&mut Context) -> Result<Vec<Value>, OpError>),
    /// The node holds graphs.
    Control(fn(&mut Control) -> Result<Vec<Value>, OpError>),
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

/// An operator that onnxruntime contributes.
const fn microsoft(op: &'static str, inputs: RangeInclusive<usize>, statics: &'static [usize], rule: Rule) -> Row {
    Row { domain: "com.microsoft", op, inputs, statics, rule }
}

/// The table of operators, family by family.
static FAMILIES: &[&[Row]] = &[
    activation::ROWS,
    attention::ROWS,
    bits::ROWS,
    constants::ROWS,
    contraction::ROWS,
    control::ROWS,
    data_dependent::ROWS,
    deform::ROWS,
    einsum::ROWS,
    grid::ROWS,
    indexing::ROWS,
    linear_algebra::ROWS,
    linear_attention::ROWS,
    loss::ROWS,
    math::ROWS,
    matmul_nbits::ROWS,
    microsoft::ROWS,
    microsoft_attention::ROWS,
    ml::ROWS,
    movement::ROWS,
    normalization::ROWS,
    one_hot::ROWS,
    optimizer::ROWS,
    pooling::ROWS,
    quantization::ROWS,
    quantized::ROWS,
    random::ROWS,
    recurrent::ROWS,
    reduction::ROWS,
    resize::ROWS,
    roi::ROWS,
    rotary::ROWS,
    scan::ROWS,
    scatter::ROWS,
    sequence::ROWS,
    shape::ROWS,
    signal::ROWS,
    sort::ROWS,
    spatial::ROWS,
    standardization::ROWS,
    trees::ROWS,
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

/// Checks number and kind of the operands.
pub(crate) fn check_inputs(row: &Row, inputs: &[Option<Value>]) -> Result<(), OpError> {
    let found = inputs.len();
    if !row.inputs.contains(&found) {
        let expected = match (*row.inputs.start(), *row.inputs.end()) {
            (low, high) if low == high => low.to_string(),
            (low, ANY) => format!("{low} or more"),
            (low, high) => format!("{low} to {high}"),
        };
        return Err(OpError::InputCount { found, expected });
    }
    if matches!(row.rule, Rule::Values(_) | Rule::Control(_)) {
        return Ok(());
    }
    let other = inputs.iter().enumerate().find_map(|(i, v)| v.as_ref().filter(|v| v.tensor().is_none()).map(|v| (i, v)));
    other.map_or(Ok(()), |(index, value)| Err(value_error(index, Some(value), "a tensor is needed")))
}

/// An error about operand `index`, which is of the wrong kind.
pub(crate) fn value_error(index: usize, value: Option<&Value>, reason: &'static str) -> OpError {
    match value {
        Some(value) => OpError::Value { index, found: value.kind().to_owned(), reason },
        None => OpError::MissingInput(index),
    }
}

/// Adds the nodes of one operator and returns its results, by output position.
pub(crate) fn lower(row: &Row, c: &mut Context) -> Result<Vec<Value>, OpError> {
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
        Rule::Many(rule) => return Ok(rule(c)?.into_iter().map(Value::Tensor).collect()),
        Rule::Values(rule) => return rule(c),
        Rule::Control(_) => return Err(OpError::unsupported("a body here")),
    };
    Ok(vec![Value::Tensor(one)])
}

/// Domain and name of every operator that has a rule.
pub(crate) fn table() -> impl Iterator<Item = (&'static str, &'static str)> {
    rows().map(|row| (row.domain, row.op))
}
