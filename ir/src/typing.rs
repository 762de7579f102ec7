//! Type rules: the result type of every op, or why the operands do not fit. The verifier runs the same rules.

use crate::{
    BinaryOp, ConvDims, DType, DotDims, MAX_RANK, Op, PadDim, ReduceOp, Shape, SliceDim, TensorType, UnaryOp, WindowDims,
    random_key_type,
};

/// Operands that an op cannot take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TypeError {
    #[error("{op} takes {expected} operands, found {found}")]
    OperandCount { op: &'static str, expected: usize, found: usize },
    #[error("{op} takes {expected} as operand {operand}, found {found}")]
    DType { op: &'static str, operand: usize, found: DType, expected: &'static str },
    #[error("{op}: operands have different types, {a} and {b}")]
    Mismatch { op: &'static str, a: TensorType, b: TensorType },
    #[error("{op}: axis {axis} of a tensor of rank {rank}")]
    Axis { op: &'static str, axis: usize, rank: usize },
    #[error("{op}: axes {axes:?} are not strictly increasing")]
    AxisOrder { op: &'static str, axes: Vec<usize> },
    #[error("{op}: rank {rank} is above the limit of {MAX_RANK}")]
    Rank { op: &'static str, rank: usize },
    #[error("{op}: {shape} has too many elements")]
    TooLarge { op: &'static str, shape: Shape },
    #[error("{op}: {operand} does not fit {shape}: {reason}")]
    Shape { op: &'static str, operand: TensorType, shape: Shape, reason: &'static str },
    #[error("{op} of {operand}: {reason}")]
    Attribute { op: &'static str, operand: TensorType, reason: &'static str },
}

/// The largest element count of one tensor: byte offsets and 32-bit device indices stay exact.
pub const MAX_ELEMENTS: usize = 1 << 31;

/// The type of the result of `op`.
///
/// Leaves other than [`Op::Constant`] and [`Op::Iota`] have no rule here: their type is declared by the graph.
pub fn infer(op: &Op, operands: &[&TensorType]) -> Result<TensorType, TypeError> {
    let name = op.name();
    let count = |expected: usize| {
        if operands.len() == expected {
            Ok(())
        } else {
            Err(TypeError::OperandCount { op: name, expected, found: operands.len() })
        }
    };
    let ty = match op {
        Op::Input(_) | Op::Parameter(_) => unreachable!("the graph declares the types of inputs and parameters"),
        Op::Constant(t) => {
            count(0)?;
            t.ty().clone()
        }
        Op::Iota { dtype, shape, axis } => {
            count(0)?;
            check_axes(name, &[*axis], shape.rank())?;
            if *dtype == DType::Bool {
                return Err(TypeError::DType { op: name, operand: 0, found: *dtype, expected: "a number" });
            }
            TensorType::new(*dtype, shape.clone())
        }
        Op::RandomUniform { shape, .. } => {
            count(1)?;
            same(name, &random_key_type(), operands[0])?;
            TensorType::new(DType::F32, shape.clone())
        }
        Op::Unary(u) => {
            count(1)?;
            unary(*u, operands[0])?
        }
        Op::Binary(b) => {
            count(2)?;
            same(name, operands[0], operands[1])?;
            let dtype = operands[0].dtype;
            match b {
                BinaryOp::And | BinaryOp::Or | BinaryOp::Xor if dtype.is_float() => {
                    return Err(TypeError::DType { op: name, operand: 0, found: dtype, expected: "bool or an integer" });
                }
                BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => {}
                _ if dtype == DType::Bool => {
                    return Err(TypeError::DType { op: name, operand: 0, found: dtype, expected: "a number" });
                }
                _ => {}
            }
            operands[0].clone()
        }
        Op::Compare(_) => {
            count(2)?;
            same(name, operands[0], operands[1])?;
            TensorType::new(DType::Bool, operands[0].shape.clone())
        }
        Op::Select => {
            count(3)?;
            if operands[0].dtype != DType::Bool {
                return Err(TypeError::DType { op: name, operand: 0, found: operands[0].dtype, expected: "bool" });
            }
            same(name, operands[1], operands[2])?;
            if operands[0].shape != operands[1].shape {
                return Err(TypeError::Mismatch { op: name, a: operands[0].clone(), b: operands[1].clone() });
            }
            operands[1].clone()
        }
        Op::Cast(dtype) => {
            count(1)?;
            TensorType::new(*dtype, operands[0].shape.clone())
        }
        Op::Reshape(shape) => {
            count(1)?;
            if shape.checked_numel() != Some(operands[0].shape.numel()) {
                return Err(misfit(name, operands[0], shape, "the element counts differ"));
            }
            TensorType::new(operands[0].dtype, shape.clone())
        }
        Op::Transpose(perm) => {
            count(1)?;
            let x = operands[0];
            let mut sorted = perm.clone();
            sorted.sort_unstable();
            if !sorted.into_iter().eq(0..x.shape.rank()) {
                return Err(attribute(name, x, "perm is not a permutation of the axes"));
            }
            TensorType::new(x.dtype, perm.iter().map(|&a| x.shape[a]).collect::<Shape>())
        }
        Op::Broadcast { shape, axes } => {
            count(1)?;
            let x = operands[0];
            check_axes(name, axes, shape.rank())?;
            if axes.len() != x.shape.rank() {
                return Err(misfit(name, x, shape, "one output axis per operand axis is needed"));
            }
            if axes.iter().zip(x.shape.iter()).any(|(&a, &d)| shape[a] != d) {
                return Err(misfit(name, x, shape, "mapped axes have different sizes"));
            }
            TensorType::new(x.dtype, shape.clone())
        }
        Op::Slice(dims) => {
            count(1)?;
            slice(name, dims, operands[0])?
        }
        Op::Pad(dims) => {
            count(2)?;
            scalar_of(name, operands[0], operands[1])?;
            pad(name, dims, operands[0])?
        }
        Op::Concat { axis } => concat(name, *axis, operands)?,
        Op::Unfold(window) => {
            count(2)?;
            scalar_of(name, operands[0], operands[1])?;
            TensorType::new(operands[0].dtype, unfolded_shape(name, window, &operands[0].shape)?)
        }
        Op::Fold { window, sizes } => {
            count(1)?;
            fold(name, window, sizes, operands[0])?
        }
        Op::Dot(dims) => {
            count(2)?;
            dot(name, dims, operands[0], operands[1])?
        }
        Op::Conv(dims) => {
            count(2)?;
            conv(name, dims, operands[0], operands[1])?
        }
        Op::Reduce { op, axes } => {
            count(1)?;
            let x = operands[0];
            check_axes(name, axes, x.shape.rank())?;
            if x.dtype == DType::Bool && matches!(op, ReduceOp::Sum | ReduceOp::Prod) {
                return Err(TypeError::DType { op: name, operand: 0, found: x.dtype, expected: "a number" });
            }
            TensorType::new(x.dtype, x.shape.without(axes))
        }
        Op::ArgReduce { axis, .. } => {
            count(1)?;
            let x = operands[0];
            check_axes(name, &[*axis], x.shape.rank())?;
            if x.shape[*axis] == 0 {
                return Err(attribute(name, x, "the axis is empty"));
            }
            TensorType::new(DType::I64, x.shape.without(&[*axis]))
        }
        Op::Gather { axis } => {
            count(2)?;
            let (x, indices) = (operands[0], operands[1]);
            check_axes(name, &[*axis], x.shape.rank())?;
            integer(name, 1, indices)?;
            if x.shape[*axis] == 0 && indices.shape.numel() > 0 {
                return Err(attribute(name, x, "nothing to gather from an empty axis"));
            }
            TensorType::new(x.dtype, gathered_shape(&x.shape, &indices.shape, *axis))
        }
        Op::Scatter { axis, .. } => {
            count(3)?;
            let (x, indices, updates) = (operands[0], operands[1], operands[2]);
            check_axes(name, &[*axis], x.shape.rank())?;
            integer(name, 1, indices)?;
            let expected = TensorType::new(x.dtype, gathered_shape(&x.shape, &indices.shape, *axis));
            same(name, &expected, updates)?;
            x.clone()
        }
        Op::Composite(c) => c.infer(operands)?,
    };
    check_size(name, &ty.shape)?;
    Ok(ty)
}

/// Rank and element count within limits.
pub(crate) fn check_size(op: &'static str, shape: &Shape) -> Result<(), TypeError> {
    if shape.rank() > MAX_RANK {
        return Err(TypeError::Rank { op, rank: shape.rank() });
    }
    // Sizes beside a zero count too, so that strides cannot overflow either.
    match shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1))) {
        Some(n) if n < MAX_ELEMENTS => Ok(()),
        _ => Err(TypeError::TooLarge { op, shape: shape.clone() }),
    }
}

/// Axes in range and strictly increasing.
pub(crate) fn check_axes(op: &'static str, axes: &[usize], rank: usize) -> Result<(), TypeError> {
    if let Some(&axis) = axes.iter().find(|&&a| a >= rank) {
        return Err(TypeError::Axis { op, axis, rank });
    }
    if !axes.is_sorted_by(|a, b| a < b) {
        return Err(TypeError::AxisOrder { op, axes: axes.to_vec() });
    }
    Ok(())
}

/// Whether positions in the padded tensor stay far from overflow.
fn moderate(pads: &[(isize, isize)]) -> bool {
    pads.iter().all(|p| p.0.unsigned_abs() < MAX_ELEMENTS && p.1.unsigned_abs() < MAX_ELEMENTS)
}

/// The shape of the windows of `x`.
pub(crate) fn unfolded_shape(op: &'static str, window: &WindowDims, x: &Shape) -> Result<Shape, TypeError> {
    let spatial = window.size.len();
    let operand = || TensorType::new(DType::F32, x.clone());
    if [window.stride.len(), window.dilation.len(), window.pads.len()] != [spatial; 3] || spatial > x.rank() {
        return Err(attribute(op, &operand(), "the window's attributes do not match the rank"));
    }
    if [&window.size, &window.stride, &window.dilation].iter().any(|v| v.contains(&0)) {
        return Err(attribute(op, &operand(), "window sizes, strides and dilations are at least 1"));
    }
    if !moderate(&window.pads) {
        return Err(attribute(op, &operand(), "a pad is too large"));
    }
    let lead = x.rank() - spatial;
    let out = (0..spatial).map(|a| window.output_size(a, x[lead + a]));
    Ok(x[..lead].iter().copied().chain(out).chain(window.size.iter().copied()).collect())
}

/// The shape of `x[.., indices, ..]`.
pub fn gathered_shape(x: &Shape, indices: &Shape, axis: usize) -> Shape {
    x[..axis].iter().chain(indices.iter()).chain(&x[axis + 1..]).copied().collect()
}

fn misfit(op: &'static str, operand: &TensorType, shape: &Shape, reason: &'static str) -> TypeError {
    TypeError::Shape { op, operand: operand.clone(), shape: shape.clone(), reason }
}

fn attribute(op: &'static str, operand: &TensorType, reason: &'static str) -> TypeError {
    TypeError::Attribute { op, operand: operand.clone(), reason }
}

fn same(op: &'static str, a: &TensorType, b: &TensorType) -> Result<(), TypeError> {
    if a == b { Ok(()) } else { Err(TypeError::Mismatch { op, a: a.clone(), b: b.clone() }) }
}

fn scalar_of(op: &'static str, x: &TensorType, value: &TensorType) -> Result<(), TypeError> {
    same(op, &TensorType::scalar(x.dtype), value)
}

fn integer(op: &'static str, operand: usize, x: &TensorType) -> Result<(), TypeError> {
    if x.dtype.is_int() { Ok(()) } else { Err(TypeError::DType { op, operand, found: x.dtype, expected: "an integer" }) }
}

fn unary(u: UnaryOp, x: &TensorType) -> Result<TensorType, TypeError> {
    use UnaryOp::*;
    let wrong = |expected| Err(TypeError::DType { op: u.name(), operand: 0, found: x.dtype, expected });
    match u {
        Neg | Abs | Sign if x.dtype == DType::Bool => wrong("a number"),
        Neg | Abs | Sign => Ok(x.clone()),
        Not if x.dtype.is_float() => wrong("bool or an integer"),
        Not => Ok(x.clone()),
        _ if !x.dtype.is_float() => wrong("a float"),
        IsNan | IsInf => Ok(TensorType::new(DType::Bool, x.shape.clone())),
        _ => Ok(x.clone()),
    }
}

fn slice(op: &'static str, dims: &[SliceDim], x: &TensorType) -> Result<TensorType, TypeError> {
    if dims.len() != x.shape.rank() {
        return Err(attribute(op, x, "one range per axis is needed"));
    }
    for (d, &size) in dims.iter().zip(x.shape.iter()) {
        if d.size == 0 {
            continue;
        }
        let last = d.start as i128 + (d.size as i128 - 1) * d.step as i128;
        if d.start >= size || !(0..size as i128).contains(&last) {
            return Err(attribute(op, x, "a range leaves the tensor"));
        }
    }
    Ok(TensorType::new(x.dtype, dims.iter().map(|d| d.size).collect::<Shape>()))
}

fn pad(op: &'static str, dims: &[PadDim], x: &TensorType) -> Result<TensorType, TypeError> {
    if dims.len() != x.shape.rank() {
        return Err(attribute(op, x, "one padding per axis is needed"));
    }
    let shape = dims
        .iter()
        .zip(x.shape.iter())
        .map(|(p, &d)| {
            let gaps = d.saturating_sub(1).checked_mul(p.interior)?;
            d.checked_add(gaps)?.checked_add(p.low)?.checked_add(p.high)
        })
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| attribute(op, x, "the padded size overflows"))?;
    Ok(TensorType::new(x.dtype, shape))
}

fn concat(op: &'static str, axis: usize, operands: &[&TensorType]) -> Result<TensorType, TypeError> {
    let Some(first) = operands.first() else {
        return Err(TypeError::OperandCount { op, expected: 1, found: 0 });
    };
    check_axes(op, &[axis], first.shape.rank())?;
    let mut shape = first.shape.to_vec();
    shape[axis] = 0;
    for x in operands {
        let same_rank = x.shape.rank() == first.shape.rank();
        if x.dtype != first.dtype || !same_rank || x.shape.without(&[axis]) != first.shape.without(&[axis]) {
            return Err(TypeError::Mismatch { op, a: (*first).clone(), b: (*x).clone() });
        }
        shape[axis] += x.shape[axis];
    }
    Ok(TensorType::new(first.dtype, shape))
}

fn fold(op: &'static str, window: &WindowDims, sizes: &[usize], x: &TensorType) -> Result<TensorType, TypeError> {
    let spatial = window.size.len();
    if !x.dtype.is_float() {
        return Err(TypeError::DType { op, operand: 0, found: x.dtype, expected: "a float" });
    }
    if sizes.len() != spatial || x.shape.rank() < 2 * spatial {
        return Err(attribute(op, x, "the window's attributes do not match the rank"));
    }
    let lead = x.shape.rank() - 2 * spatial;
    let folded: Shape = x.shape[..lead].iter().chain(sizes).copied().collect();
    if unfolded_shape(op, window, &folded)? != x.shape {
        return Err(misfit(op, x, &folded, "these are not its windows"));
    }
    Ok(TensorType::new(x.dtype, folded))
}

fn dot(op: &'static str, dims: &DotDims, a: &TensorType, b: &TensorType) -> Result<TensorType, TypeError> {
    if a.dtype != b.dtype || a.dtype == DType::Bool {
        return Err(TypeError::Mismatch { op, a: a.clone(), b: b.clone() });
    }
    let pairs = |l: &[usize], r: &[usize]| {
        l.len() == r.len() && l.iter().zip(r).all(|(&l, &r)| l < a.shape.rank() && r < b.shape.rank() && a.shape[l] == b.shape[r])
    };
    let unique = |x: &[usize], y: &[usize]| {
        let mut all: Vec<_> = x.iter().chain(y).collect();
        all.sort_unstable();
        all.windows(2).all(|w| w[0] != w[1])
    };
    if !pairs(&dims.lhs_batch, &dims.rhs_batch)
        || !pairs(&dims.lhs_contract, &dims.rhs_contract)
        || !unique(&dims.lhs_batch, &dims.lhs_contract)
        || !unique(&dims.rhs_batch, &dims.rhs_contract)
    {
        return Err(TypeError::Mismatch { op, a: a.clone(), b: b.clone() });
    }
    let batch = dims.lhs_batch.iter().map(|&i| a.shape[i]);
    let lhs = dims.lhs_free(a.shape.rank()).into_iter().map(|i| a.shape[i]);
    let rhs = dims.rhs_free(b.shape.rank()).into_iter().map(|i| b.shape[i]);
    Ok(TensorType::new(a.dtype, batch.chain(lhs).chain(rhs).collect::<Shape>()))
}

fn conv(op: &'static str, dims: &ConvDims, x: &TensorType, w: &TensorType) -> Result<TensorType, TypeError> {
    let spatial = dims.stride.len();
    if x.dtype != w.dtype || x.dtype == DType::Bool {
        return Err(TypeError::Mismatch { op, a: x.clone(), b: w.clone() });
    }
    let attributes = [dims.pads.len(), dims.input_dilation.len(), dims.kernel_dilation.len()];
    if attributes != [spatial; 3] || x.shape.rank() != spatial + 2 || w.shape.rank() != spatial + 2 {
        return Err(attribute(op, x, "the attributes do not match the rank"));
    }
    let at_least_one = [&dims.stride, &dims.input_dilation, &dims.kernel_dilation];
    if at_least_one.iter().any(|v| v.contains(&0)) || w.shape[2..].contains(&0) {
        return Err(attribute(op, x, "strides, dilations and kernel sizes are at least 1"));
    }
    if dims.groups == 0 || !w.shape[0].is_multiple_of(dims.groups) || w.shape[1].checked_mul(dims.groups) != Some(x.shape[1]) {
        return Err(misfit(op, x, &w.shape, "channels, groups and kernel do not match"));
    }
    let fits = |a: usize| x.shape[2 + a].saturating_sub(1).checked_mul(dims.input_dilation[a]).is_some_and(|n| n < MAX_ELEMENTS);
    if !moderate(&dims.pads) || !(0..spatial).all(fits) {
        return Err(attribute(op, x, "a pad or the dilated input is too large"));
    }
    let out = (0..spatial).map(|a| dims.output_size(a, x.shape[2 + a], w.shape[2 + a]));
    Ok(TensorType::new(x.dtype, [x.shape[0], w.shape[0]].into_iter().chain(out).collect::<Shape>()))
}

#[cfg(test)]
mod tests;
