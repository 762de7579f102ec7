//! Composites: ops that are worth recognising as a whole, each with its decomposition into primitives.
//!
//! A composite exists where its derivative or its kernel is better than what the decomposition would give.
//! To add one: a variant here, its type in [`Composite::infer`], its formula in [`Composite::decompose`], and its derivative in `autodiff`.

use crate::attention::{self, AttentionDims, AttentionOperand};
use crate::graph::{Graph, GraphError, NodeId};
use crate::typing::TypeError;
use crate::{ArgOp, BinaryOp, CompareOp, DType, Op, Real, ReduceOp, Shape, TensorType, UnaryOp, WindowDims};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Composite {
    /// `(x)`: `exp(x - max) / sum(exp(x - max))` along `axis`.
    Softmax { axis: usize },
    /// `(x)`: `x - max - log(sum(exp(x - max)))` along `axis`.
    LogSoftmax { axis: usize },
    /// `(x)`: `(x - mean) / sqrt(variance + epsilon)` over `axes`, biased variance. Scale and bias are ordinary ops around it.
    Normalize { axes: Vec<usize>, epsilon: Real },
    /// `(x)`: `x / sqrt(mean(x^2) + epsilon)` over `axes`.
    RmsNormalize { axes: Vec<usize>, epsilon: Real },
    /// `(x)`: `x / 2 * (1 + erf(x / sqrt 2))`.
    Gelu,
    /// `(x)`: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `(x)`: `x * sigmoid(x)`.
    Silu,
    /// `(x)`: `max(x, 0)`; the derivative at 0 is 0, as in PyTorch.
    Relu,
    /// `(x: [lead.., spatial..]) -> [lead.., out..]`: the largest element of each window. Padding never wins;
    /// the derivative goes to the first of equal elements, as in PyTorch.
    MaxPool(WindowDims),
    /// `(q, k, v)` or `(q, k, v, mask)`: see [`attention`](crate::attention).
    Attention(AttentionDims),
    /// `(q, k)` or `(q, k, mask)`: the logarithm of the sum of the exponentials of each query's scores.
    AttentionLse(AttentionDims),
    /// `(q, k, v, dy, lse, delta)`, and a mask if there is one: the cotangent of `q`, `k` or `v` where that of the result is `dy`.
    AttentionGradient { dims: AttentionDims, of: AttentionOperand },
}

impl Composite {
    pub fn name(&self) -> &'static str {
        match self {
            Composite::Softmax { .. } => "softmax",
            Composite::LogSoftmax { .. } => "log_softmax",
            Composite::Normalize { .. } => "normalize",
            Composite::RmsNormalize { .. } => "rms_normalize",
            Composite::Gelu => "gelu",
            Composite::GeluTanh => "gelu_tanh",
            Composite::Silu => "silu",
            Composite::Relu => "relu",
            Composite::MaxPool(_) => "max_pool",
            Composite::Attention(_) => "attention",
            Composite::AttentionLse(_) => "attention_lse",
            Composite::AttentionGradient { of: AttentionOperand::Query, .. } => "attention_dq",
            Composite::AttentionGradient { of: AttentionOperand::Key, .. } => "attention_dk",
            Composite::AttentionGradient { of: AttentionOperand::Value, .. } => "attention_dv",
        }
    }

    /// The result's type. Operand, except of attention: one float tensor (max pooling and relu also take integers).
    pub fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, TypeError> {
        let name = self.name();
        let one = |integers_too: bool| match operands {
            [x] if x.dtype.is_float() || integers_too && x.dtype.is_int() => Ok((*x).clone()),
            [x] => Err(TypeError::DType { op: name, operand: 0, found: x.dtype, expected: "a float" }),
            _ => Err(TypeError::OperandCount { op: name, expected: 1, found: operands.len() }),
        };
        match self {
            Composite::Softmax { axis } | Composite::LogSoftmax { axis } => {
                let x = one(false)?;
                crate::typing::check_axes(name, &[*axis], x.shape.rank())?;
                Ok(x)
            }
            Composite::Normalize { axes, .. } | Composite::RmsNormalize { axes, .. } => {
                let x = one(false)?;
                crate::typing::check_axes(name, axes, x.shape.rank())?;
                Ok(x)
            }
            Composite::Gelu | Composite::GeluTanh | Composite::Silu => one(false),
            Composite::Relu => one(true),
            Composite::MaxPool(window) => {
                let x = one(true)?;
                let unfolded = crate::typing::unfolded_shape(name, window, &x.shape)?;
                let rank = unfolded.rank() - window.size.len();
                Ok(TensorType::new(x.dtype, &unfolded[..rank]))
            }
            Composite::Attention(_) => attention::infer_output(name, operands),
            Composite::AttentionLse(_) => attention::infer_lse(name, operands),
            Composite::AttentionGradient { of, .. } => attention::infer_gradient(name, *of, operands),
        }
    }

    /// The same function in primitives and simpler composites.
    pub fn decompose(&self, g: &mut Graph, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let x = operands[0];
        let dtype = g.ty(x).dtype;
        match self {
            Composite::Softmax { axis } => {
                let (shifted, sum) = shifted_exponentials(g, x, *axis)?;
                let e = g.unary(UnaryOp::Exp, shifted)?;
                g.binary(BinaryOp::Div, e, sum)
            }
            Composite::LogSoftmax { axis } => {
                let (shifted, sum) = shifted_exponentials(g, x, *axis)?;
                let log = g.unary(UnaryOp::Log, sum)?;
                g.binary(BinaryOp::Sub, shifted, log)
            }
            Composite::Normalize { axes, epsilon } => {
                let (centred, inverse) = normalize_parts(g, x, axes, epsilon.0)?;
                g.binary(BinaryOp::Mul, centred, inverse)
            }
            Composite::RmsNormalize { axes, epsilon } => {
                let inverse = inverse_rms(g, x, axes, epsilon.0)?;
                g.binary(BinaryOp::Mul, x, inverse)
            }
            Composite::Gelu => {
                let cdf = normal_cdf(g, x)?;
                g.binary(BinaryOp::Mul, x, cdf)
            }
            Composite::GeluTanh => {
                let t = gelu_tanh_inner(g, x)?;
                let one = g.constant_like(x, 1.0)?;
                let half = g.constant_like(x, 0.5)?;
                let t = g.binary(BinaryOp::Add, t, one)?;
                let x = g.binary(BinaryOp::Mul, x, half)?;
                g.binary(BinaryOp::Mul, x, t)
            }
            Composite::Silu => {
                let s = g.unary(UnaryOp::Sigmoid, x)?;
                g.binary(BinaryOp::Mul, x, s)
            }
            Composite::Relu => {
                let zero = g.constant_like(x, 0.0)?;
                g.binary(BinaryOp::Max, x, zero)
            }
            Composite::MaxPool(window) => {
                let unfolded = unfold_lowest(g, x, window)?;
                let rank = g.ty(unfolded).shape.rank();
                let axes = (rank - window.size.len()..rank).collect();
                g.push(Op::Reduce { op: ReduceOp::Max, axes }, &[unfolded])
            }
            Composite::Attention(dims) => attention::output(g, dims, operands),
            Composite::AttentionLse(dims) => attention::log_sum_exp(g, dims, operands),
            Composite::AttentionGradient { dims, of } => attention::gradient_of(g, dims, *of, operands),
        }
        .inspect(|&y| debug_assert_eq!(g.ty(y).dtype, dtype))
    }
}

/// `x - max(x)` and the sum of its exponentials along `axis`, broadcast to `x`'s shape.
fn shifted_exponentials(g: &mut Graph, x: NodeId, axis: usize) -> Result<(NodeId, NodeId), GraphError> {
    let max = g.reduce_keep(ReduceOp::Max, x, &[axis])?;
    let shifted = g.binary(BinaryOp::Sub, x, max)?;
    let e = g.unary(UnaryOp::Exp, shifted)?;
    let sum = g.reduce_keep(ReduceOp::Sum, e, &[axis])?;
    Ok((shifted, sum))
}

/// `x - mean` and `1 / sqrt(variance + epsilon)` over `axes`, both in `x`'s shape.
pub fn normalize_parts(g: &mut Graph, x: NodeId, axes: &[usize], epsilon: f64) -> Result<(NodeId, NodeId), GraphError> {
    let mean = g.mean_keep(x, axes)?;
    let centred = g.binary(BinaryOp::Sub, x, mean)?;
    let inverse = inverse_rms(g, centred, axes, epsilon)?;
    Ok((centred, inverse))
}

/// `1 / sqrt(mean(x^2) + epsilon)` over `axes`, in `x`'s shape.
pub fn inverse_rms(g: &mut Graph, x: NodeId, axes: &[usize], epsilon: f64) -> Result<NodeId, GraphError> {
    let square = g.binary(BinaryOp::Mul, x, x)?;
    let sum = g.push(Op::Reduce { op: ReduceOp::Sum, axes: axes.to_vec() }, &[square])?;
    let count: usize = axes.iter().map(|&a| g.ty(x).shape[a]).product();
    let scale = g.constant_like(sum, 1.0 / count as f64)?;
    let mean = g.binary(BinaryOp::Mul, sum, scale)?;
    let epsilon = g.constant_like(mean, epsilon)?;
    let shifted = g.binary(BinaryOp::Add, mean, epsilon)?;
    let inverse = g.unary(UnaryOp::Rsqrt, shifted)?;
    let shape = g.ty(x).shape.clone();
    g.broadcast_without(inverse, &shape, axes)
}

/// `(1 + erf(x / sqrt 2)) / 2`
pub fn normal_cdf(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let root = g.constant_like(x, std::f64::consts::FRAC_1_SQRT_2)?;
    let scaled = g.binary(BinaryOp::Mul, x, root)?;
    let erf = g.unary(UnaryOp::Erf, scaled)?;
    let one = g.constant_like(x, 1.0)?;
    let sum = g.binary(BinaryOp::Add, erf, one)?;
    let half = g.constant_like(x, 0.5)?;
    g.binary(BinaryOp::Mul, sum, half)
}

/// `tanh(sqrt(2 / pi) * (x + 0.044715 x^3))`
pub fn gelu_tanh_inner(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let square = g.binary(BinaryOp::Mul, x, x)?;
    let coefficient = g.constant_like(x, GELU_CUBIC)?;
    let one = g.constant_like(x, 1.0)?;
    let inner = g.binary(BinaryOp::Mul, square, coefficient)?;
    let inner = g.binary(BinaryOp::Add, inner, one)?;
    let inner = g.binary(BinaryOp::Mul, inner, x)?;
    let scale = g.constant_like(x, gelu_tanh_scale())?;
    let inner = g.binary(BinaryOp::Mul, inner, scale)?;
    g.unary(UnaryOp::Tanh, inner)
}

/// The coefficient of `x^3` in [`Composite::GeluTanh`].
pub const GELU_CUBIC: f64 = 0.044715;

/// `sqrt(2 / pi)`
pub fn gelu_tanh_scale() -> f64 {
    (2.0 / std::f64::consts::PI).sqrt()
}

/// The windows of `x`, with the lowest value of its dtype outside.
pub fn unfold_lowest(g: &mut Graph, x: NodeId, window: &WindowDims) -> Result<NodeId, GraphError> {
    let lowest = g.lowest(g.ty(x).dtype)?;
    g.push(Op::Unfold(window.clone()), &[x, lowest])
}

/// For each window of `x`, a mask over `[lead.., out.., window..]` that is true at the first largest element.
pub fn max_pool_mask(g: &mut Graph, x: NodeId, window: &WindowDims) -> Result<NodeId, GraphError> {
    let unfolded = unfold_lowest(g, x, window)?;
    let shape = g.ty(unfolded).shape.clone();
    let lead = shape.rank() - window.size.len();
    let count: usize = window.size.iter().product();
    let flat: Shape = shape[..lead].iter().copied().chain([count]).collect();
    let rows = g.push(Op::Reshape(flat), &[unfolded])?;
    let mask = first_largest_mask(g, rows, lead)?;
    g.push(Op::Reshape(shape), &[mask])
}

/// A mask of `x`'s shape that is true at the first largest element along `axis`.
pub fn first_largest_mask(g: &mut Graph, x: NodeId, axis: usize) -> Result<NodeId, GraphError> {
    let shape = g.ty(x).shape.clone();
    let first = g.push(Op::ArgReduce { op: ArgOp::Max, axis }, &[x])?;
    let first = g.broadcast_without(first, &shape, &[axis])?;
    let position = g.push(Op::Iota { dtype: DType::I64, shape, axis }, &[])?;
    g.compare(CompareOp::Eq, position, first)
}
