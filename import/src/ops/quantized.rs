//! Operators on quantised tensors. Products and sums are of integers in 32 bits, which wrap beyond as the standard allows; what
//! follows is in f32.

use meganeura_ir::{BinaryOp, DType, DotDims, NodeId, Op, ReduceOp, Shape, TensorType, UnaryOp};

use super::activation::by_sign;
use super::contraction::{convolve, matrix_product};
use super::quantization::{Affine, Dynamic, Element, round, setting};
use super::{ANY, Row, Rule, microsoft, row};
use crate::context::{self, Context};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("ConvInteger",                   2..=4, &[2, 3],                Rule::One(conv_integer)),
    row("MatMulInteger",                 2..=4, &[2, 3],                Rule::One(matmul_integer)),
    row("QLinearConv",                   8..=9, &[1, 2, 4, 5, 6, 7],    Rule::One(qlinear_conv)),
    row("QLinearMatMul",                 8..=8, &[1, 2, 4, 5, 6, 7],    Rule::One(qlinear_matmul)),
    microsoft("DynamicQuantizeMatMul",   3..=5, &[2, 3],                Rule::One(dynamic_quantize_matmul)),
    microsoft("MatMulIntegerToFloat",    4..=7, &[2, 3, 4, 5],          Rule::One(matmul_integer_to_float)),
    microsoft("QGemm",                   6..=9, &[1, 2, 4, 5, 7, 8],    Rule::One(qgemm)),
    microsoft("QLinearAdd",              7..=8, &[1, 2, 4, 5, 6, 7],    Rule::One(qlinear_add)),
    microsoft("QLinearConcat",           5..=ANY, &[0, 1],              Rule::One(qlinear_concat)),
    microsoft("QLinearGlobalAveragePool", 4..=5, &[1, 2, 3, 4],         Rule::One(qlinear_global_average_pool)),
    microsoft("QLinearLeakyRelu",        4..=5, &[1, 2, 3, 4],          Rule::One(qlinear_leaky_relu)),
    microsoft("QLinearMul",              7..=8, &[1, 2, 4, 5, 6, 7],    Rule::One(qlinear_mul)),
    microsoft("QLinearSigmoid",          4..=5, &[1, 2, 3, 4],          Rule::One(qlinear_sigmoid)),
];

/// Where a vector of settings lies in a matrix: one per row, or one per column.
const ROWS_AXIS: i64 = -2;
const COLUMNS_AXIS: i64 = -1;
/// Where a vector of settings lies in the weight of a convolution, and in its result.
const KERNEL_AXIS: i64 = 0;
const CHANNEL_AXIS: i64 = 1;

/// Operand `x` minus the zero point in operand `zero`, if there is one, in i32.
fn centered(c: &mut Context, x: usize, zero: usize, axis: i64) -> Result<NodeId, OpError> {
    let x = c.input(x)?;
    centered_node(c, x, zero, axis)
}

fn centered_node(c: &mut Context, x: NodeId, zero: usize, axis: i64) -> Result<NodeId, OpError> {
    let x = c.cast(x, DType::I32)?;
    match c.optional(zero) {
        Some(node) if !c.is_uniform(node, 0.0) => {
            let shape = c.shape(x);
            let zero = setting(c, zero, &shape, axis, DType::I32)?;
            Ok(c.sub(x, zero)?)
        }
        _ => Ok(x),
    }
}

/// The product of the scales in operands `factors`, over the scale in operand `divisor`, at `shape`. Each comes with the axis that a
/// vector lies along.
fn combined_scale(c: &mut Context, factors: &[(usize, i64)], divisor: Option<usize>, shape: &Shape) -> Result<NodeId, OpError> {
    let mut scale = c.splat(&TensorType::new(DType::F32, shape.clone()), 1.0)?;
    for (i, &(index, axis)) in factors.iter().enumerate() {
        let factor = setting(c, index, shape, axis, DType::F32)?;
        scale = if i == 0 { factor } else { c.mul(scale, factor)? };
    }
    match divisor {
        Some(index) => {
            let divisor = setting(c, index, shape, CHANNEL_AXIS, DType::F32)?;
            Ok(c.div(scale, divisor)?)
        }
        None => Ok(scale),
    }
}

/// `sum * scale`, an i32 and an f32.
fn scaled(c: &mut Context, sum: NodeId, scale: NodeId) -> Result<NodeId, OpError> {
    let sum = c.cast(sum, DType::F32)?;
    Ok(c.mul(sum, scale)?)
}

/// `x`, in units of the result's scale, as elements of the type of the zero point in operand `zero`; without it, of operand `like`.
fn requantized(c: &mut Context, x: NodeId, zero: usize, like: usize) -> Result<NodeId, OpError> {
    let to = Element::of_operand(c, if c.optional(zero).is_some() { zero } else { like })?;
    let shape = c.shape(x);
    let offset = match c.optional(zero) {
        Some(_) => Some(setting(c, zero, &shape, CHANNEL_AXIS, DType::F32)?),
        None => None,
    };
    round(c, x, offset, to, true)
}

fn matmul_integer(c: &mut Context) -> Result<NodeId, OpError> {
    let (a, b) = (centered(c, 0, 2, ROWS_AXIS)?, centered(c, 1, 3, COLUMNS_AXIS)?);
    matrix_product(c, a, b)
}

fn qlinear_matmul(c: &mut Context) -> Result<NodeId, OpError> {
    let (a, b) = (centered(c, 0, 2, ROWS_AXIS)?, centered(c, 3, 5, COLUMNS_AXIS)?);
    let sum = matrix_product(c, a, b)?;
    let shape = c.shape(sum);
    let scale = combined_scale(c, &[(1, ROWS_AXIS), (4, COLUMNS_AXIS)], Some(6), &shape)?;
    let y = scaled(c, sum, scale)?;
    requantized(c, y, 7, 0)
}

/// The result and the bias are f32.
fn matmul_integer_to_float(c: &mut Context) -> Result<NodeId, OpError> {
    let (a, b) = (centered(c, 0, 4, ROWS_AXIS)?, centered(c, 1, 5, COLUMNS_AXIS)?);
    let sum = matrix_product(c, a, b)?;
    let shape = c.shape(sum);
    let scale = combined_scale(c, &[(2, ROWS_AXIS), (3, COLUMNS_AXIS)], None, &shape)?;
    let y = scaled(c, sum, scale)?;
    add_bias(c, y, 6)
}

/// Quantises `A`, an f32, by its own range.
fn dynamic_quantize_matmul(c: &mut Context) -> Result<NodeId, OpError> {
    let a = c.input(0)?;
    let a = Dynamic::of(c, a)?;
    let elements = c.cast(a.elements, DType::I32)?;
    let shape = c.shape(elements);
    let zero = c.cast(a.zero, DType::I32)?;
    let zero = c.broadcast_to(zero, &shape)?;
    let centered_a = c.sub(elements, zero)?;
    let b = centered(c, 1, 3, COLUMNS_AXIS)?;
    let sum = matrix_product(c, centered_a, b)?;
    let shape = c.shape(sum);
    let scale = combined_scale(c, &[(2, COLUMNS_AXIS)], None, &shape)?;
    let a_scale = c.broadcast_to(a.scale, &shape)?;
    let scale = c.mul(a_scale, scale)?;
    let y = scaled(c, sum, scale)?;
    add_bias(c, y, 4)
}

fn add_bias(c: &mut Context, y: NodeId, index: usize) -> Result<NodeId, OpError> {
    let Some(bias) = c.optional(index) else { return Ok(y) };
    let shape = c.shape(y);
    let bias = c.broadcast_into(bias, &shape)?;
    Ok(c.add(y, bias)?)
}

/// `alpha * A' B' + C`, whose unit is `alpha` times the scales of `A` and `B`. Without a scale of its own the result is f32.
fn qgemm(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 1.0)?;
    let (trans_a, trans_b) = (c.flag("transA", false)?, c.flag("transB", false)?);
    let a = centered(c, 0, 2, if trans_a { COLUMNS_AXIS } else { ROWS_AXIS })?;
    let b = centered(c, 3, 5, if trans_b { ROWS_AXIS } else { COLUMNS_AXIS })?;
    if let Some((index, _)) = [(0, a), (3, b)].into_iter().find(|&(_, x)| c.rank(x) != 2) {
        return Err(c.operand_error(index, "a matrix is needed"));
    }
    let dims = DotDims { lhs_contract: vec![!trans_a as usize], rhs_contract: vec![trans_b as usize], ..DotDims::default() };
    let sum = c.push(Op::Dot(dims), &[a, b])?;
    let sum = add_bias(c, sum, 6)?;
    let shape = c.shape(sum);
    let divisor = c.optional(7).map(|_| 7);
    let scale = combined_scale(c, &[(1, ROWS_AXIS), (4, COLUMNS_AXIS)], divisor, &shape)?;
    let scale = if alpha == 1.0 { scale } else { c.scale(scale, alpha)? };
    let y = scaled(c, sum, scale)?;
    if divisor.is_some() { requantized(c, y, 8, 0) } else { Ok(y) }
}

fn conv_integer(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, w) = (centered(c, 0, 2, CHANNEL_AXIS)?, centered(c, 1, 3, KERNEL_AXIS)?);
    convolve(c, x, w)
}

fn qlinear_conv(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, w) = (centered(c, 0, 2, CHANNEL_AXIS)?, centered(c, 3, 5, KERNEL_AXIS)?);
    if c.rank(w) != c.rank(x) {
        return Err(c.operand_error(3, "the weight needs as many axes as the data"));
    }
    let mut sum = convolve(c, x, w)?;
    let shape = c.shape(sum);
    if c.optional(8).is_some() {
        let bias = setting(c, 8, &shape, CHANNEL_AXIS, DType::I32)?;
        sum = c.add(sum, bias)?;
    }
    let scale = combined_scale(c, &[(1, CHANNEL_AXIS), (4, CHANNEL_AXIS)], Some(6), &shape)?;
    let y = scaled(c, sum, scale)?;
    requantized(c, y, 7, 0)
}

/// Both operands in units of the result's scale, added.
fn qlinear_add(c: &mut Context) -> Result<NodeId, OpError> {
    let (a, b) = (centered(c, 0, 2, CHANNEL_AXIS)?, centered(c, 3, 5, CHANNEL_AXIS)?);
    let pair = c.broadcast(&[a, b])?;
    let shape = c.shape(pair[0]);
    let mut terms = Vec::with_capacity(2);
    for (x, scale) in pair.into_iter().zip([1, 4]) {
        let scale = combined_scale(c, &[(scale, CHANNEL_AXIS)], Some(6), &shape)?;
        terms.push(scaled(c, x, scale)?);
    }
    let sum = c.add(terms[0], terms[1])?;
    requantized(c, sum, 7, 0)
}

fn qlinear_mul(c: &mut Context) -> Result<NodeId, OpError> {
    let (a, b) = (centered(c, 0, 2, CHANNEL_AXIS)?, centered(c, 3, 5, CHANNEL_AXIS)?);
    let pair = c.broadcast(&[a, b])?;
    let product = c.binary(BinaryOp::Mul, pair[0], pair[1])?;
    let shape = c.shape(product);
    let scale = combined_scale(c, &[(1, CHANNEL_AXIS), (4, CHANNEL_AXIS)], Some(6), &shape)?;
    let y = scaled(c, product, scale)?;
    requantized(c, y, 7, 0)
}

/// `X` through a function of real numbers.
fn through(c: &mut Context, function: impl FnOnce(&mut Context, NodeId) -> Result<NodeId, OpError>) -> Result<NodeId, OpError> {
    let x = c.input(0)?;
    let shape = c.shape(x);
    let to = Element::of_operand(c, 0)?;
    let real = Affine::read(c, [1, 2], &shape, CHANNEL_AXIS, 0)?.dequantize(c, x)?;
    let y = function(c, real)?;
    Affine::read(c, [3, 4], &shape, CHANNEL_AXIS, 0)?.quantize(c, y, to, true)
}

fn qlinear_sigmoid(c: &mut Context) -> Result<NodeId, OpError> {
    through(c, |c, x| Ok(c.unary(UnaryOp::Sigmoid, x)?))
}

fn qlinear_leaky_relu(c: &mut Context) -> Result<NodeId, OpError> {
    let alpha = c.float_or("alpha", 0.01)?;
    through(c, |c, x| {
        let negative = c.scale(x, alpha)?;
        by_sign(c, x, x, negative)
    })
}

/// The mean over the spatial axes, which keep size 1.
fn qlinear_global_average_pool(c: &mut Context) -> Result<NodeId, OpError> {
    let channels_last = c.flag("channels_last", false)?;
    let x = centered(c, 0, 2, CHANNEL_AXIS)?;
    let shape = c.shape(x);
    if shape.rank() < 3 {
        return Err(c.operand_error(0, "batch, channels and at least one spatial axis are needed"));
    }
    let first = if channels_last { 1 } else { 2 };
    let axes: Vec<usize> = (first..first + shape.rank() - 2).collect();
    let count: usize = axes.iter().map(|&a| shape[a]).product();
    let sum = c.reduce(ReduceOp::Sum, x, &axes)?;
    let kept: Shape = shape.iter().enumerate().map(|(a, &d)| if axes.contains(&a) { 1 } else { d }).collect();
    let sum = c.reshape(sum, kept.clone())?;
    let scale = combined_scale(c, &[(1, CHANNEL_AXIS)], Some(3), &kept)?;
    let count = c.constant_like(scale, count as f64)?;
    let scale = c.div(scale, count)?;
    let y = scaled(c, sum, scale)?;
    requantized(c, y, 4, 0)
}

/// Operands: the result's scale and zero point, then each part with its own.
fn qlinear_concat(c: &mut Context) -> Result<NodeId, OpError> {
    let axis = c.int("axis")?.ok_or(OpError::MissingAttribute("axis"))?;
    let to = Element::of_operand(c, 1)?;
    let mut parts = Vec::new();
    for index in (2..c.input_count()).step_by(3) {
        let x = c.input(index)?;
        let shape = c.shape(x);
        let real = Affine::read(c, [index + 1, index + 2], &shape, CHANNEL_AXIS, 0)?.dequantize(c, x)?;
        parts.push(Affine::read(c, [0, 1], &shape, CHANNEL_AXIS, 0)?.quantize(c, real, to, true)?);
    }
    let rank = parts.first().map_or(0, |&part| c.rank(part));
    let axis = context::axis(axis, rank)?;
    Ok(c.push(Op::Concat { axis }, &parts)?)
}
