//! The operations of a graph: a closed enum of primitives, and the composites that decompose into them.

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::composite::Composite;
use crate::{DType, Shape, Tensor};

/// Index of an input in [`Graph::inputs`](crate::Graph::inputs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InputId(pub u32);

/// Index of a parameter in [`Graph::parameters`](crate::Graph::parameters).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId(pub u32);

/// One operation. Operands are held by the node; attributes live here.
///
/// No op broadcasts implicitly: pointwise operands have equal shapes, and [`Op::Broadcast`] makes them so.
/// Operand counts and the type of each result are defined by [`infer`](crate::infer).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    // Leaves.
    /// A tensor that the caller supplies at every run.
    Input(InputId),
    /// A tensor that persists between runs and that updates may replace.
    Parameter(ParameterId),
    Constant(Arc<Tensor>),
    /// `out[.., i, ..] = i` along `axis`.
    Iota {
        dtype: DType,
        shape: Shape,
        axis: usize,
    },

    // Random numbers.
    /// `(key: u32 [4])`: f32 numbers of 24 bits, uniform in `[0, 1)`: a function of the key, the stream and the position. See
    /// [`random_key`](crate::random_key).
    RandomUniform {
        shape: Shape,
        /// Tells the random tensors of one graph apart.
        stream: u32,
    },

    // Pointwise. Operands have equal shapes.
    Unary(UnaryOp),
    Binary(BinaryOp),
    /// Two operands of one dtype, a bool result.
    Compare(CompareOp),
    /// `(condition: bool, a, b)`: `a` where the condition holds, else `b`. The side not taken may be anything, NaN included.
    Select,
    /// To another dtype. Floats truncate towards zero on the way to integers; anything to bool is `!= 0`.
    Cast(DType),

    // Movement.
    /// The same elements in row-major order under another shape.
    Reshape(Shape),
    /// `out[i_0, ..] = x[..]` where output axis `a` is operand axis `perm[a]`.
    Transpose(Vec<usize>),
    /// Operand axis `i` becomes output axis `axes[i]` (strictly increasing, equal sizes); every other output axis repeats.
    Broadcast {
        shape: Shape,
        axes: Vec<usize>,
    },
    /// `out[i] = x[start + i * step]` on each axis; steps may be negative.
    Slice(Vec<SliceDim>),
    /// `(x, value: scalar)`: `low` values before, `high` after and `interior` between neighbours, on each axis.
    Pad(Vec<PadDim>),
    /// One or more operands, joined along `axis`.
    Concat {
        axis: usize,
    },
    /// `(x, value: scalar)`: the sliding windows of the trailing axes, `[lead.., spatial..] -> [lead.., out.., window..]`;
    /// positions outside `x` read `value`. Never materialised: consumers read `x` through index arithmetic.
    Unfold(WindowDims),
    /// The transpose of [`Op::Unfold`]: `[lead.., out.., window..] -> [lead.., sizes..]`, overlapping elements add.
    Fold {
        window: WindowDims,
        sizes: Vec<usize>,
    },

    // Contraction.
    /// Result axes: batch, then the free axes of the left operand, then those of the right.
    Dot(DotDims),
    /// `(x: [n, c, spatial..], w: [o, c / groups, kernel..]) -> [n, o, out..]`, a cross-correlation.
    Conv(ConvDims),

    // Reduction.
    /// Removes `axes` (sorted, unique). The empty reduction is the identity of `op` (max: -inf or the lowest integer).
    Reduce {
        op: ReduceOp,
        axes: Vec<usize>,
    },
    /// The first index of the largest or smallest element along `axis`, which it removes. Result: i64.
    ArgReduce {
        op: ArgOp,
        axis: usize,
    },

    // Indexing. Indices are integers in `0..size`; others read the nearest end.
    /// `(x, indices)`: `out[a.., i.., b..] = x[a.., indices[i..], b..]`.
    Gather {
        axis: usize,
    },
    /// `(x, indices, updates)`: `x` with each `updates[a.., i.., b..]` combined into `x[a.., indices[i..], b..]`.
    /// Indices outside `0..size` are dropped. With [`ScatterOp::Set`] the last of equal indices wins.
    Scatter {
        op: ScatterOp,
        axis: usize,
    },

    Composite(Composite),
}

/// Functions of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnaryOp {
    Neg,
    Abs,
    /// -1, 0 or 1.
    Sign,
    Exp,
    Log,
    Sqrt,
    /// `1 / sqrt(x)`
    Rsqrt,
    Reciprocal,
    Sin,
    Cos,
    Tan,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Tanh,
    Asinh,
    Acosh,
    Atanh,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `log(1 + exp(x))`, without overflow.
    Softplus,
    Erf,
    Floor,
    Ceil,
    /// To the nearest integer, halves to even.
    Round,
    /// Logical not of a bool, bitwise not of an integer.
    Not,
    /// Float to bool.
    IsNan,
    /// Float to bool; either sign.
    IsInf,
}

/// Functions of two elements of one dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
    /// Integers truncate towards zero; division by an integer zero gives 0.
    Div,
    /// C's `fmod`: the sign of the dividend. An integer divisor of zero gives 0.
    Rem,
    /// IEEE `pow` for floats; integers by repeated multiplication.
    Pow,
    /// NaN if either is NaN.
    Max,
    /// NaN if either is NaN.
    Min,
    /// Of bools or of integer bits; likewise `Or` and `Xor`.
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CompareOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReduceOp {
    Sum,
    Max,
    Min,
    Prod,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ArgOp {
    Max,
    Min,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScatterOp {
    Set,
    Add,
    Mul,
    Max,
    Min,
}

/// `x[start], x[start + step], ..`: `size` elements of one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceDim {
    pub start: usize,
    pub step: isize,
    pub size: usize,
}

/// Padding of one axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PadDim {
    pub low: usize,
    pub high: usize,
    /// Values inserted between each two neighbours.
    pub interior: usize,
}

/// A sliding window over the last `size.len()` axes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WindowDims {
    pub size: Vec<usize>,
    pub stride: Vec<usize>,
    pub dilation: Vec<usize>,
    /// Elements added before and after; negative values crop.
    pub pads: Vec<(isize, isize)>,
}

impl WindowDims {
    /// Windows along axis `axis` of an input of `input` elements; 0 where the window does not fit.
    pub fn output_size(&self, axis: usize, input: usize) -> usize {
        window_count(input, self.size[axis], self.stride[axis], self.dilation[axis], self.pads[axis])
    }
}

/// Positions of a window of `size` elements over `input` padded elements.
fn window_count(input: usize, size: usize, stride: usize, dilation: usize, pads: (isize, isize)) -> usize {
    let padded = input as i128 + pads.0 as i128 + pads.1 as i128;
    let extent = (size as i128 - 1) * dilation as i128 + 1;
    if padded < extent { 0 } else { usize::try_from((padded - extent) / stride as i128 + 1).unwrap_or(usize::MAX) }
}

/// Which axes of a [`Op::Dot`]'s operands pair up. Paired axes have equal sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DotDims {
    pub lhs_batch: Vec<usize>,
    pub rhs_batch: Vec<usize>,
    pub lhs_contract: Vec<usize>,
    pub rhs_contract: Vec<usize>,
}

impl DotDims {
    /// Axes of the left operand (of `rank`) that are neither batch nor contracted, in order.
    pub fn lhs_free(&self, rank: usize) -> Vec<usize> {
        (0..rank).filter(|a| !self.lhs_batch.contains(a) && !self.lhs_contract.contains(a)).collect()
    }

    /// Axes of the right operand (of `rank`) that are neither batch nor contracted, in order.
    pub fn rhs_free(&self, rank: usize) -> Vec<usize> {
        (0..rank).filter(|a| !self.rhs_batch.contains(a) && !self.rhs_contract.contains(a)).collect()
    }
}

/// Attributes of a convolution; vectors have one entry per spatial axis.
///
/// With `d = input_dilation`, the input acts as if `d - 1` zeros stood between neighbours:
/// `out[n, o, p] = sum_{c, k} x'[n, c, p * stride - pads.0 + k * kernel_dilation] * w[o, c, k]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConvDims {
    pub stride: Vec<usize>,
    /// Zeros added before and after the dilated input; negative values crop.
    pub pads: Vec<(isize, isize)>,
    pub input_dilation: Vec<usize>,
    pub kernel_dilation: Vec<usize>,
    pub groups: usize,
}

impl ConvDims {
    /// Output size along spatial axis `axis`.
    pub fn output_size(&self, axis: usize, input: usize, kernel: usize) -> usize {
        let dilated = if input == 0 { 0 } else { (input - 1) * self.input_dilation[axis] + 1 };
        window_count(dilated, kernel, self.stride[axis], self.kernel_dilation[axis], self.pads[axis])
    }
}

/// An `f64` attribute, compared and hashed by its bits so that ops can be interned.
#[derive(Clone, Copy, Debug)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}
impl Eq for Real {}
impl PartialOrd for Real {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Real {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}
impl Hash for Real {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

macro_rules! names {
    ($t:ident { $($variant:ident = $name:literal),* $(,)? }) => {
        impl $t {
            pub const ALL: &'static [$t] = &[$($t::$variant),*];

            /// The name in the text form and in messages.
            pub fn name(self) -> &'static str {
                match self { $($t::$variant => $name),* }
            }

            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some($t::$variant),)* _ => None }
            }
        }
    };
}

names!(UnaryOp {
    Neg = "neg", Abs = "abs", Sign = "sign", Exp = "exp", Log = "log", Sqrt = "sqrt", Rsqrt = "rsqrt",
    Reciprocal = "reciprocal", Sin = "sin", Cos = "cos", Tan = "tan", Asin = "asin", Acos = "acos", Atan = "atan",
    Sinh = "sinh", Cosh = "cosh", Tanh = "tanh", Asinh = "asinh", Acosh = "acosh", Atanh = "atanh",
    Sigmoid = "sigmoid", Softplus = "softplus", Erf = "erf", Floor = "floor", Ceil = "ceil", Round = "round",
    Not = "not", IsNan = "is_nan", IsInf = "is_inf",
});
names!(BinaryOp {
    Add = "add", Sub = "sub", Mul = "mul", Div = "div", Rem = "rem", Pow = "pow", Max = "max", Min = "min",
    And = "and", Or = "or", Xor = "xor",
});
names!(CompareOp { Eq = "eq", Ne = "ne", Lt = "lt", Le = "le", Gt = "gt", Ge = "ge" });
names!(ReduceOp { Sum = "reduce_sum", Max = "reduce_max", Min = "reduce_min", Prod = "reduce_prod" });
names!(ArgOp { Max = "arg_max", Min = "arg_min" });
names!(ScatterOp {
    Set = "scatter_set", Add = "scatter_add", Mul = "scatter_mul", Max = "scatter_max", Min = "scatter_min",
});

impl Op {
    /// The name in the text form and in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input(_) => "input",
            Op::Parameter(_) => "parameter",
            Op::Constant(_) => "constant",
            Op::Iota { .. } => "iota",
            Op::RandomUniform { .. } => "random_uniform",
            Op::Unary(u) => u.name(),
            Op::Binary(b) => b.name(),
            Op::Compare(c) => c.name(),
            Op::Select => "select",
            Op::Cast(_) => "cast",
            Op::Reshape(_) => "reshape",
            Op::Transpose(_) => "transpose",
            Op::Broadcast { .. } => "broadcast",
            Op::Slice(_) => "slice",
            Op::Pad(_) => "pad",
            Op::Concat { .. } => "concat",
            Op::Unfold(_) => "unfold",
            Op::Fold { .. } => "fold",
            Op::Dot(_) => "dot",
            Op::Conv(_) => "conv",
            Op::Reduce { op, .. } => op.name(),
            Op::ArgReduce { op, .. } => op.name(),
            Op::Gather { .. } => "gather",
            Op::Scatter { op, .. } => op.name(),
            Op::Composite(c) => c.name(),
        }
    }

    /// Whether each result element depends on the operands' elements at the same index only.
    pub fn is_pointwise(&self) -> bool {
        matches!(self, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_))
    }

    /// Whether the op only rearranges, repeats or pads elements.
    pub fn is_movement(&self) -> bool {
        matches!(
            self,
            Op::Reshape(_)
                | Op::Transpose(_)
                | Op::Broadcast { .. }
                | Op::Slice(_)
                | Op::Pad(_)
                | Op::Concat { .. }
                | Op::Unfold(_)
        )
    }

    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Input(_) | Op::Parameter(_) | Op::Constant(_) | Op::Iota { .. })
    }
}
