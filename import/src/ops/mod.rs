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

use meganeura_ir::{ArgOp, BinaryOp, CompareOp, Composite, NodeId, ReduceOp, UnaryOp};

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

#[rustfmt::skip]
static TABLE: &[Row] = &[
    // Arithmetic.
    row("Abs",                   1..=1, &[],     Rule::Unary(UnaryOp::Abs)),
    row("Acos",                  1..=1, &[],     Rule::Unary(UnaryOp::Acos)),
    row("Acosh",                 1..=1, &[],     Rule::Unary(UnaryOp::Acosh)),
    row("Add",                   2..=2, &[],     Rule::Binary(BinaryOp::Add)),
    row("And",                   2..=2, &[],     Rule::Binary(BinaryOp::And)),
    row("Asin",                  1..=1, &[],     Rule::Unary(UnaryOp::Asin)),
    row("Asinh",                 1..=1, &[],     Rule::Unary(UnaryOp::Asinh)),
    row("Atan",                  1..=1, &[],     Rule::Unary(UnaryOp::Atan)),
    row("Atanh",                 1..=1, &[],     Rule::Unary(UnaryOp::Atanh)),
    row("BitwiseAnd",            2..=2, &[],     Rule::Binary(BinaryOp::And)),
    row("BitwiseNot",            1..=1, &[],     Rule::Unary(UnaryOp::Not)),
    row("BitwiseOr",             2..=2, &[],     Rule::Binary(BinaryOp::Or)),
    row("BitwiseXor",            2..=2, &[],     Rule::Binary(BinaryOp::Xor)),
    row("Cast",                  1..=1, &[],     Rule::One(math::cast)),
    row("CastLike",              2..=2, &[],     Rule::One(math::cast_like)),
    row("Ceil",                  1..=1, &[],     Rule::Unary(UnaryOp::Ceil)),
    row("Cos",                   1..=1, &[],     Rule::Unary(UnaryOp::Cos)),
    row("Cosh",                  1..=1, &[],     Rule::Unary(UnaryOp::Cosh)),
    row("Div",                   2..=2, &[],     Rule::Binary(BinaryOp::Div)),
    row("Equal",                 2..=2, &[],     Rule::Compare(CompareOp::Eq)),
    row("Erf",                   1..=1, &[],     Rule::Unary(UnaryOp::Erf)),
    row("Exp",                   1..=1, &[],     Rule::Unary(UnaryOp::Exp)),
    row("Floor",                 1..=1, &[],     Rule::Unary(UnaryOp::Floor)),
    row("Greater",               2..=2, &[],     Rule::Compare(CompareOp::Gt)),
    row("GreaterOrEqual",        2..=2, &[],     Rule::Compare(CompareOp::Ge)),
    row("IsInf",                 1..=1, &[],     Rule::One(math::is_inf)),
    row("IsNaN",                 1..=1, &[],     Rule::Unary(UnaryOp::IsNan)),
    row("Less",                  2..=2, &[],     Rule::Compare(CompareOp::Lt)),
    row("LessOrEqual",           2..=2, &[],     Rule::Compare(CompareOp::Le)),
    row("Log",                   1..=1, &[],     Rule::Unary(UnaryOp::Log)),
    row("Max",                   1..=ANY, &[],   Rule::Variadic(BinaryOp::Max)),
    row("Mean",                  1..=ANY, &[],   Rule::One(math::mean)),
    row("Min",                   1..=ANY, &[],   Rule::Variadic(BinaryOp::Min)),
    row("Mod",                   2..=2, &[],     Rule::One(math::modulo)),
    row("Mul",                   2..=2, &[],     Rule::Binary(BinaryOp::Mul)),
    row("Neg",                   1..=1, &[],     Rule::Unary(UnaryOp::Neg)),
    row("Not",                   1..=1, &[],     Rule::Unary(UnaryOp::Not)),
    row("Or",                    2..=2, &[],     Rule::Binary(BinaryOp::Or)),
    row("Pow",                   2..=2, &[],     Rule::One(math::pow)),
    row("Reciprocal",            1..=1, &[],     Rule::Unary(UnaryOp::Reciprocal)),
    row("Round",                 1..=1, &[],     Rule::Unary(UnaryOp::Round)),
    row("Sign",                  1..=1, &[],     Rule::Unary(UnaryOp::Sign)),
    row("Sin",                   1..=1, &[],     Rule::Unary(UnaryOp::Sin)),
    row("Sinh",                  1..=1, &[],     Rule::Unary(UnaryOp::Sinh)),
    row("Sqrt",                  1..=1, &[],     Rule::Unary(UnaryOp::Sqrt)),
    row("Sub",                   2..=2, &[],     Rule::Binary(BinaryOp::Sub)),
    row("Sum",                   1..=ANY, &[],   Rule::Variadic(BinaryOp::Add)),
    row("Tan",                   1..=1, &[],     Rule::Unary(UnaryOp::Tan)),
    row("Where",                 3..=3, &[],     Rule::One(math::where_)),
    row("Xor",                   2..=2, &[],     Rule::Binary(BinaryOp::Xor)),

    // Activations.
    row("Celu",                  1..=1, &[],     Rule::One(activation::celu)),
    row("Clip",                  1..=3, &[1, 2], Rule::One(activation::clip)),
    row("Elu",                   1..=1, &[],     Rule::One(activation::elu)),
    row("Gelu",                  1..=1, &[],     Rule::One(activation::gelu)),
    row("HardSigmoid",           1..=1, &[],     Rule::One(activation::hard_sigmoid)),
    row("HardSwish",             1..=1, &[],     Rule::One(activation::hard_swish)),
    row("LeakyRelu",             1..=1, &[],     Rule::One(activation::leaky_relu)),
    row("LogSoftmax",            1..=1, &[],     Rule::One(activation::log_softmax)),
    row("Mish",                  1..=1, &[],     Rule::One(activation::mish)),
    row("PRelu",                 2..=2, &[],     Rule::One(activation::prelu)),
    row("Relu",                  1..=1, &[],     Rule::Composite(|| Composite::Relu)),
    row("Selu",                  1..=1, &[],     Rule::One(activation::selu)),
    row("Sigmoid",               1..=1, &[],     Rule::Unary(UnaryOp::Sigmoid)),
    row("Softmax",               1..=1, &[],     Rule::One(activation::softmax)),
    row("Softplus",              1..=1, &[],     Rule::Unary(UnaryOp::Softplus)),
    row("Softsign",              1..=1, &[],     Rule::One(activation::softsign)),
    row("Swish",                 1..=1, &[],     Rule::One(activation::swish)),
    row("Tanh",                  1..=1, &[],     Rule::Unary(UnaryOp::Tanh)),
    row("ThresholdedRelu",       1..=1, &[],     Rule::One(activation::thresholded_relu)),

    // Movement.
    row("Concat",                1..=ANY, &[],   Rule::One(movement::concat)),
    row("Dropout",               1..=3, &[1, 2], Rule::Many(movement::dropout)),
    row("Expand",                2..=2, &[1],    Rule::One(movement::expand)),
    row("Flatten",               1..=1, &[],     Rule::One(movement::flatten)),
    row("Identity",              1..=1, &[],     Rule::One(movement::identity)),
    row("Pad",                   1..=4, &[1, 2, 3], Rule::One(movement::pad)),
    row("Reshape",               2..=2, &[1],    Rule::One(movement::reshape)),
    row("Slice",                 1..=5, &[1, 2, 3, 4], Rule::One(movement::slice)),
    row("Split",                 1..=2, &[1],    Rule::Many(movement::split)),
    row("Squeeze",               1..=2, &[1],    Rule::One(movement::squeeze)),
    row("Tile",                  2..=2, &[1],    Rule::One(movement::tile)),
    row("Transpose",             1..=1, &[],     Rule::One(movement::transpose)),
    row("Trilu",                 1..=2, &[1],    Rule::One(movement::trilu)),
    row("Unsqueeze",             1..=2, &[1],    Rule::One(movement::unsqueeze)),

    // Indexing.
    row("Gather",                2..=2, &[],     Rule::One(indexing::gather)),
    row("GatherElements",        2..=2, &[],     Rule::One(indexing::gather_elements)),
    row("GatherND",              2..=2, &[],     Rule::One(indexing::gather_nd)),
    row("Resize",                1..=4, &[1, 2, 3], Rule::One(indexing::resize)),

    // Shapes and constants.
    row("Constant",              0..=0, &[],     Rule::One(constants::constant)),
    row("ConstantOfShape",       1..=1, &[0],    Rule::One(constants::constant_of_shape)),
    row("EyeLike",               1..=1, &[],     Rule::One(constants::eye_like)),
    row("Range",                 3..=3, &[0, 1, 2], Rule::One(constants::range)),
    row("Shape",                 1..=1, &[],     Rule::One(shape::shape)),
    row("Size",                  1..=1, &[],     Rule::One(shape::size)),

    // Contraction.
    row("Conv",                  2..=3, &[],     Rule::One(contraction::conv)),
    row("ConvTranspose",         2..=3, &[],     Rule::One(contraction::conv_transpose)),
    row("Gemm",                  2..=3, &[],     Rule::One(contraction::gemm)),
    row("MatMul",                2..=2, &[],     Rule::One(contraction::matmul)),

    // Pooling.
    row("AveragePool",           1..=1, &[],     Rule::One(pooling::average_pool)),
    row("GlobalAveragePool",     1..=1, &[],     Rule::One(pooling::global_average_pool)),
    row("GlobalMaxPool",         1..=1, &[],     Rule::One(pooling::global_max_pool)),
    row("MaxPool",               1..=1, &[],     Rule::One(pooling::max_pool)),

    // Reduction.
    row("ArgMax",                1..=1, &[],     Rule::Arg(ArgOp::Max)),
    row("ArgMin",                1..=1, &[],     Rule::Arg(ArgOp::Min)),
    row("ReduceL1",              1..=2, &[1],    Rule::Reduce(reduction::l1)),
    row("ReduceL2",              1..=2, &[1],    Rule::Reduce(reduction::l2)),
    row("ReduceLogSum",          1..=2, &[1],    Rule::Reduce(reduction::log_sum)),
    row("ReduceLogSumExp",       1..=2, &[1],    Rule::Reduce(reduction::log_sum_exp)),
    row("ReduceMax",             1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Max, x, axes)?))),
    row("ReduceMean",            1..=2, &[1],    Rule::Reduce(reduction::mean)),
    row("ReduceMin",             1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Min, x, axes)?))),
    row("ReduceProd",            1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Prod, x, axes)?))),
    row("ReduceSum",             1..=2, &[1],    Rule::Reduce(|c, x, axes| Ok(c.reduce(ReduceOp::Sum, x, axes)?))),
    row("ReduceSumSquare",       1..=2, &[1],    Rule::Reduce(reduction::sum_square)),

    // Normalisation.
    row("BatchNormalization",    5..=5, &[],     Rule::One(normalization::batch)),
    row("GroupNormalization",    3..=3, &[],     Rule::One(normalization::group)),
    row("InstanceNormalization", 3..=3, &[],     Rule::One(normalization::instance)),
    row("LayerNormalization",    2..=3, &[],     Rule::Many(normalization::layer)),
    row("RMSNormalization",      2..=2, &[],     Rule::One(normalization::rms)),
];

/// The row of an operator. `domain` is empty for the standard operators.
pub(crate) fn find(domain: &str, op: &str) -> Option<&'static Row> {
    static INDEX: LazyLock<HashMap<(&str, &str), &Row>> =
        LazyLock::new(|| TABLE.iter().map(|row| ((row.domain, row.op), row)).collect());
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
    TABLE.iter().map(|row| (row.domain, row.op))
}
