//! Matrix products and convolutions.

use meganeura_ir::{ConvDims, DotDims, NodeId, Op, Shape};

use super::window::{halves, span, unknown_auto_pad, window};
use super::{Row, Rule, row};
use super::{math, movement};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Conv",                  2..=3, &[],     Rule::One(conv)),
    row("ConvTranspose",         2..=3, &[],     Rule::One(conv_transpose)),
    row("Gemm",                  2..=3, &[],     Rule::One(gemm)),
    row("MatMul",                2..=2, &[],     Rule::One(matmul)),
];

pub(super) fn matmul(c: &mut Context) -> Result<NodeId, OpError> {
    let (a, b) = (c.input(0)?, c.input(1)?);
    matrix_product(c, a, b)
}

/// NumPy's `matmul` of operands 0 and 1: vectors are promoted, leading axes broadcast.
pub(super) fn matrix_product(c: &mut Context, a: NodeId, b: NodeId) -> Result<NodeId, OpError> {
    let (a_shape, b_shape) = (c.shape(a), c.shape(b));
    if a_shape.rank() == 0 || b_shape.rank() == 0 {
        return Err(c.operand_error(if a_shape.rank() == 0 { 0 } else { 1 }, "at least one axis is needed"));
    }
    let lhs_batch = &a_shape[..a_shape.rank().saturating_sub(2)];
    let rhs_batch = &b_shape[..b_shape.rank().saturating_sub(2)];
    let misfit = || OpError::Broadcast { a: c.ty(a).clone(), b: c.ty(b).clone() };
    let batch = Shape::broadcast(&lhs_batch.into(), &rhs_batch.into()).ok_or_else(misfit)?;
    let rows = &a_shape[lhs_batch.len()..a_shape.rank() - 1];
    let columns = &b_shape[rhs_batch.len() + 1..];
    if a_shape[a_shape.rank() - 1] != b_shape[rhs_batch.len()] {
        return Err(misfit());
    }
    let result: Shape = batch.iter().chain(rows).chain(columns).copied().collect();

    // A right operand without batch multiplies all rows of the left one at once.
    if rhs_batch.iter().all(|&d| d == 1) {
        let matrix: Shape = b_shape[rhs_batch.len()..].into();
        let b = c.reshape(b, matrix)?;
        let dims = DotDims { lhs_contract: vec![a_shape.rank() - 1], rhs_contract: vec![0], ..DotDims::default() };
        let product = c.push(Op::Dot(dims), &[a, b])?;
        return Ok(c.reshape(product, result)?);
    }
    let a_full: Shape = batch.iter().chain(&a_shape[lhs_batch.len()..]).copied().collect();
    let b_full: Shape = batch.iter().chain(&b_shape[rhs_batch.len()..]).copied().collect();
    // A vector has no axis to align the batch with.
    let a = if rows.is_empty() { expand_vector(c, a, &a_full)? } else { c.broadcast_to(a, &a_full)? };
    let b = c.broadcast_to(b, &b_full)?;
    let axes: Vec<usize> = (0..batch.rank()).collect();
    let dims = DotDims {
        lhs_contract: vec![a_full.rank() - 1],
        rhs_contract: vec![batch.rank()],
        lhs_batch: axes.clone(),
        rhs_batch: axes,
    };
    Ok(c.push(Op::Dot(dims), &[a, b])?)
}

fn expand_vector(c: &mut Context, vector: NodeId, shape: &Shape) -> Result<NodeId, OpError> {
    c.broadcast_along(vector, shape, shape.rank() - 1)
}

/// `alpha * A' B' + beta * C`
pub(super) fn gemm(c: &mut Context) -> Result<NodeId, OpError> {
    let (alpha, beta) = (c.float_or("alpha", 1.0)?, c.float_or("beta", 1.0)?);
    let (trans_a, trans_b) = (c.flag("transA", false)?, c.flag("transB", false)?);
    let (a, b) = (c.input(0)?, c.input(1)?);
    if let Some(index) = [a, b].iter().position(|&x| c.rank(x) != 2) {
        return Err(c.operand_error(index, "a matrix is needed"));
    }
    let dims = DotDims { lhs_contract: vec![!trans_a as usize], rhs_contract: vec![trans_b as usize], ..DotDims::default() };
    let mut product = c.push(Op::Dot(dims), &[a, b])?;
    if alpha != 1.0 {
        product = math::scale(c, product, alpha)?;
    }
    let Some(mut addend) = c.optional(2).filter(|_| beta != 0.0) else { return Ok(product) };
    if beta != 1.0 {
        addend = math::scale(c, addend, beta)?;
    }
    let shape = c.shape(product);
    let addend = c.broadcast_into(addend, &shape)?;
    Ok(c.add(product, addend)?)
}

/// Spatial sizes of the operand, and the kernel sizes of the weight.
fn spatial(c: &Context, x: NodeId, w: NodeId) -> Result<(Vec<usize>, Vec<usize>), OpError> {
    let (x, w) = (c.shape(x), c.shape(w));
    if x.rank() < 3 {
        return Err(c.operand_error(0, "batch, channels and at least one spatial axis are needed"));
    }
    if w.rank() != x.rank() {
        return Err(c.operand_error(1, "the weight needs as many axes as the data"));
    }
    Ok((x[2..].to_vec(), w[2..].to_vec()))
}

/// A number of groups, 1 by default.
pub(super) fn groups(c: &Context, name: &'static str) -> Result<usize, OpError> {
    let group = c.int_or(name, 1)?;
    let error = || OpError::Attribute { name, value: group.to_string(), reason: "at least one group is needed" };
    usize::try_from(group).ok().filter(|&g| g > 0).ok_or_else(error)
}

/// Adds operand `index`, a bias per channel, unless it is known to be zero.
pub(super) fn add_bias(c: &mut Context, y: NodeId, index: usize) -> Result<NodeId, OpError> {
    let Some(bias) = c.optional(index) else { return Ok(y) };
    let shape = c.shape(y);
    let repeated = c.broadcast_along(bias, &shape, 1)?;
    if c.is_uniform(bias, 0.0) { Ok(y) } else { Ok(c.add(y, repeated)?) }
}

pub(super) fn conv(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, w) = (c.input(0)?, c.input(1)?);
    let y = convolve(c, x, w)?;
    add_bias(c, y, 2)
}

/// The convolution of `x` with `w` by the node's attributes.
pub(super) fn convolve(c: &mut Context, x: NodeId, w: NodeId) -> Result<NodeId, OpError> {
    let (input, kernel) = spatial(c, x, w)?;
    let window = window(c, &input, Some(&kernel))?;
    let dims = ConvDims {
        stride: window.stride,
        pads: window.pads,
        input_dilation: vec![1; input.len()],
        kernel_dilation: window.dilation,
        groups: groups(c, "group")?,
    };
    Ok(c.push(Op::Conv(dims), &[x, w])?)
}

/// The transpose of a convolution: a convolution of the dilated input with the flipped kernel, input and output channels
/// exchanged.
pub(super) fn conv_transpose(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, w) = (c.input(0)?, c.input(1)?);
    let (input, kernel) = spatial(c, x, w)?;
    let groups = groups(c, "group")?;
    let count = input.len();
    if c.ints("kernel_shape")?.is_some() && c.extents("kernel_shape", count, 1)? != kernel {
        let value = format!("{kernel:?}");
        return Err(OpError::Attribute { name: "kernel_shape", value, reason: "the weight has another shape" });
    }
    let stride = c.extents("strides", count, 1)?;
    let dilation = c.extents("dilations", count, 1)?;
    let extra = match c.ints("output_padding")? {
        Some(v) if v.len() == count && v.iter().all(|p| (0..1 << 31).contains(p)) => v.iter().map(|&p| p as isize).collect(),
        Some(v) => {
            let value = format!("{v:?}");
            return Err(OpError::Attribute { name: "output_padding", value, reason: "one size per spatial axis is needed" });
        }
        None => vec![0; count],
    };
    let auto_pad = c.string_or("auto_pad", "NOTSET")?;
    let output_shape = match c.ints("output_shape")? {
        Some(_) => Some(c.extents("output_shape", count, 1)?),
        None => None,
    };
    let declared = c.pads(count)?;
    let pads: Vec<(isize, isize)> = (0..count)
        .map(|a| {
            let unpadded = (input[a] as isize - 1) * stride[a] as isize + extra[a] + span(kernel[a], dilation[a]);
            let output = match (&output_shape, auto_pad) {
                (Some(shape), _) => shape[a] as isize,
                (None, "SAME_UPPER" | "SAME_LOWER") => (input[a] * stride[a]) as isize,
                (None, "VALID") => return Ok((0, 0)),
                (None, "NOTSET" | "") => return Ok(declared[a]),
                (None, other) => return Err(unknown_auto_pad(other)),
            };
            let total = unpadded - output;
            if total < 0 && output_shape.is_none() {
                // The standard, its shape inference and its reference each give another result.
                return Err(OpError::unsupported("auto_pad with a stride beyond the kernel"));
            }
            Ok(if total < 0 { (0, total) } else { halves(total, auto_pad == "SAME_UPPER") })
        })
        .collect::<Result<_, _>>()?;

    let shape = c.shape(w);
    let (channels, per_group) = (shape[0], shape[1]);
    if !channels.is_multiple_of(groups) || channels != c.shape(x)[1] {
        return Err(c.operand_error(1, "channels and groups do not match"));
    }
    let axes: Vec<usize> = (2..shape.rank()).collect();
    let flipped = movement::reverse_axes(c, w, &axes)?;
    let grouped: Shape = [groups, channels / groups, per_group].into_iter().chain(kernel.iter().copied()).collect();
    let flipped = c.reshape(flipped, grouped)?;
    let perm: Vec<usize> = [0, 2, 1].into_iter().chain(3..3 + count).collect();
    let flipped = c.transpose(flipped, &perm)?;
    let weight: Shape = [groups * per_group, channels / groups].into_iter().chain(kernel.iter().copied()).collect();
    let weight = c.reshape(flipped, weight)?;
    let reach = |a: usize| span(kernel[a], dilation[a]) - 1;
    let dims = ConvDims {
        stride: vec![1; count],
        pads: (0..count).map(|a| (reach(a) - pads[a].0, reach(a) - pads[a].1 + extra[a])).collect(),
        input_dilation: stride,
        kernel_dilation: dilation,
        groups,
    };
    let y = c.push(Op::Conv(dims), &[x, weight])?;
    add_bias(c, y, 2)
}
