//! Recurrences that stand in for attention: linear attention, and the causal convolution before it.

use meganeura_ir::{Composite, ConvDims, DotDims, NodeId, Op, TensorType, UnaryOp};

use super::attention::{head_count, split_heads};
use super::movement::slice_axis;
use super::{Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("CausalConvWithState",   2..=4, &[],     Rule::Many(causal_conv)),
    row("LinearAttention",       3..=6, &[],     Rule::Many(linear_attention)),
];

/// Steps of a recurrence that are written out.
const MAX_STEPS: usize = 1024;

/// A depthwise convolution along the last axis that sees the present and what came before. Further result: its last inputs.
pub(super) fn causal_conv(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let activation = c.string_or("activation", "none")?;
    let (x, w) = (c.input(0)?, c.input(1)?);
    let (shape, kernel) = (c.shape(x), c.shape(w));
    if shape.rank() != 3 {
        return Err(c.operand_error(0, "batch, channels and length are needed"));
    }
    if kernel.rank() != 3 || kernel[..2] != [shape[1], 1] || kernel[2] == 0 {
        return Err(c.operand_error(1, "one kernel per channel is needed"));
    }
    let ty = TensorType::new(c.ty(x).dtype, [shape[0], shape[1], kernel[2] - 1]);
    let past = match c.optional(3) {
        Some(past) if *c.ty(past) != ty => return Err(c.operand_error(3, "it holds kernel - 1 inputs per channel")),
        Some(past) => past,
        None => c.splat(&ty, 0.0)?,
    };
    let padded = c.push(Op::Concat { axis: 2 }, &[past, x])?;
    let dims = ConvDims {
        stride: vec![1],
        pads: vec![(0, 0)],
        input_dilation: vec![1],
        kernel_dilation: vec![1],
        groups: shape[1].max(1),
    };
    let mut y = c.push(Op::Conv(dims), &[padded, w])?;
    if let Some(bias) = c.optional(2) {
        let bias = c.broadcast_along(bias, &shape, 1)?;
        y = c.add(y, bias)?;
    }
    y = match activation {
        "none" => y,
        "silu" | "swish" => c.push(Op::Composite(Composite::Silu), &[y])?,
        other => {
            let value = other.to_owned();
            return Err(OpError::Attribute { name: "activation", value, reason: "the standard knows none, silu and swish" });
        }
    };
    let present = slice_axis(c, padded, 2, shape[2], kernel[2] - 1)?;
    Ok(vec![y, present])
}

/// Per step: the state decays (`gated`), is read at the key to correct the value (`delta`), takes the outer product of key and
/// value, and is read at the query.
pub(super) fn linear_attention(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    c.ignore(&["chunk_size"]);
    let (heads, groups) = (head_count(c, "q_num_heads")?, head_count(c, "kv_num_heads")?);
    let (gated, delta) = match c.string_or("update_rule", "gated_delta")? {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => {
            let value = other.to_owned();
            let reason = "the standard knows linear, gated, delta and gated_delta";
            return Err(OpError::Attribute { name: "update_rule", value, reason });
        }
    };
    let scale = c.float_or("scale", 0.0)?;
    let query = c.input(0)?;
    let query = split_heads(c, query, heads, 0)?;
    let (key, value) = (c.input(1)?, c.input(2)?);
    let (key, value) = (split_heads(c, key, groups, 1)?, split_heads(c, value, groups, 2)?);
    let (q, k, v) = (c.shape(query), c.shape(key), c.shape(value));
    if !heads.is_multiple_of(groups) || k[0] != q[0] || k[2..] != q[2..] {
        return Err(c.operand_error(1, "the keys do not fit the queries"));
    }
    if v[..3] != k[..3] {
        return Err(c.operand_error(2, "the values do not fit the keys"));
    }
    let (batch, steps, size, width) = (q[0], q[2], q[3], v[3]);
    if steps > MAX_STEPS {
        return Err(OpError::unsupported(format!("LinearAttention over {steps} steps ({MAX_STEPS} are)")));
    }
    let decay = gate(c, 4, gated, groups, &[1, size])?;
    let beta = gate(c, 5, delta, groups, &[1])?;
    for gate in [decay, beta].into_iter().flatten() {
        let shape = c.shape(gate);
        if (shape[0], shape[2]) != (batch, steps) {
            return Err(c.operand_error(if Some(gate) == decay { 4 } else { 5 }, "it does not fit the keys"));
        }
    }
    let ty = TensorType::new(c.ty(value).dtype, [batch, groups, size, width]);
    let mut state = match c.optional(3) {
        Some(past) if *c.ty(past) != ty => return Err(c.operand_error(3, "the state does not fit keys and values")),
        Some(past) => past,
        None => c.splat(&ty, 0.0)?,
    };

    let scale = if scale == 0.0 { 1.0 / (size as f64).sqrt() } else { scale };
    let query = c.scale(query, scale)?;
    let decay = decay.map(|decay| c.unary(UnaryOp::Exp, decay)).transpose()?;
    let mut results = Vec::with_capacity(steps);
    for step in 0..steps {
        let at = |c: &mut Context, x: NodeId| slice_axis(c, x, 2, step, 1);
        let (key, mut value, query) = (at(c, key)?, at(c, value)?, at(c, query)?);
        if let Some(decay) = decay {
            let factor = at(c, decay)?;
            let factor = c.transpose(factor, &[0, 1, 3, 2])?;
            let factor = c.broadcast_to(factor, &ty.shape)?;
            state = c.mul(state, factor)?;
        }
        if let Some(beta) = beta {
            let read = product(c, key, state)?;
            let error = c.sub(value, read)?;
            let rate = at(c, beta)?;
            let shape = c.shape(error);
            let rate = c.broadcast_to(rate, &shape)?;
            value = c.mul(error, rate)?;
        }
        let column = c.transpose(key, &[0, 1, 3, 2])?;
        let written = product(c, column, value)?;
        state = c.add(state, written)?;
        let rows = c.reshape(query, [batch, groups, heads / groups, size])?;
        let read = product(c, rows, state)?;
        results.push(c.reshape(read, [batch, 1, heads * width])?);
    }
    let result = match results.as_slice() {
        [] => c.splat(&TensorType::new(ty.dtype, [batch, 0, heads * width]), 0.0)?,
        [one] => *one,
        results => c.push(Op::Concat { axis: 1 }, results)?,
    };
    Ok(vec![result, state])
}

/// `[batch, groups, m, k] x [batch, groups, k, n]`
fn product(c: &mut Context, a: NodeId, b: NodeId) -> Result<NodeId, OpError> {
    let dims = DotDims { lhs_batch: vec![0, 1], rhs_batch: vec![0, 1], lhs_contract: vec![3], rhs_contract: vec![2] };
    Ok(c.push(Op::Dot(dims), &[a, b])?)
}

/// Operand `index`, which the update rule needs or forbids, as `[batch, groups or 1, steps, width]`.
fn gate(c: &mut Context, index: usize, needed: bool, groups: usize, widths: &[usize]) -> Result<Option<NodeId>, OpError> {
    let Some(x) = c.optional(index) else {
        return if needed { Err(OpError::MissingInput(index)) } else { Ok(None) };
    };
    if !needed {
        return Err(c.operand_error(index, "the update rule has no use for it"));
    }
    let last = c.shape(x).last().copied();
    let shared = widths == [1] && last == Some(1);
    if !shared && !widths.iter().any(|width| last == Some(groups * width)) {
        return Err(c.operand_error(index, "one rate per head is needed"));
    }
    split_heads(c, x, if shared { 1 } else { groups }, index).map(Some)
}
