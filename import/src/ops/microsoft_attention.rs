//! Attention as onnxruntime fuses it: with projections, biases, padding masks, rotation and caches inside.

use meganeura_ir::{BinaryOp, CompareOp, DType, DotDims, NodeId, Op, Shape, TensorType, UnaryOp};

use super::attention::{Heads, Weighting, append, attend, below, both, head_count, merge_heads, split_heads, take_rows};
use super::constants::diagonal;
use super::movement::slice_axis;
use super::normalization::rms_of;
use super::rotary::Angles;
use super::{Row, Rule, microsoft};
use crate::context::{Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    microsoft("Attention",       2..=7, &[],     Rule::Many(attention)),
    microsoft("GroupQueryAttention", 7..=17, &[], Rule::Many(group_query)),
    microsoft("MultiHeadAttention", 1..=10, &[], Rule::Many(multi_head)),
];

/// What padding adds to a score.
fn filter(c: &Context) -> Result<f64, OpError> {
    c.float_or("mask_filter_value", -10000.0)
}

/// An attribute that must be left at zero.
fn refuse(c: &Context, name: &str) -> Result<(), OpError> {
    if c.flag(name, false)? { Err(OpError::unsupported(format!("attribute {name}"))) } else { Ok(()) }
}

/// An operand that must be left out.
fn refuse_operand(c: &Context, index: usize, what: &str) -> Result<(), OpError> {
    if c.optional(index).is_some() { Err(OpError::unsupported(format!("input {index} ({what})"))) } else { Ok(()) }
}

/// `filter` where `keep` does not hold, else 0, in the dtype of `like`.
fn penalty(c: &mut Context, keep: NodeId, like: NodeId, filter: f64) -> Result<NodeId, OpError> {
    let ty = TensorType::new(c.ty(like).dtype, c.shape(keep));
    let (zero, filter) = (c.splat(&ty, 0.0)?, c.splat(&ty, filter)?);
    Ok(c.select(keep, zero, filter)?)
}

/// Where the padding mask of operand `index` lets a key through, for scores `[batch, _, sequence, total]`: a mask, or the lengths
/// of the sequences, or the ends and then the starts of the sequences.
fn kept(c: &mut Context, index: usize, [batch, sequence, total]: [usize; 3]) -> Result<Option<NodeId>, OpError> {
    let Some(mask) = c.optional(index) else { return Ok(None) };
    let shape = c.shape(mask);
    if c.ty(mask).dtype.is_float() {
        return Err(c.operand_error(index, "integers are needed"));
    }
    let expanded = match *shape {
        [n] if n == batch => return below(c, mask, total, index).map(Some),
        [n] if n == 2 * batch => {
            let (ends, starts) = (slice_axis(c, mask, 0, 0, batch)?, slice_axis(c, mask, 0, batch, batch)?);
            let (before_end, before_start) = (below(c, ends, total, index)?, below(c, starts, total, index)?);
            let started = c.unary(UnaryOp::Not, before_start)?;
            return Ok(Some(c.binary(BinaryOp::And, before_end, started)?));
        }
        [n, t] if (n, t) == (batch, total) => Shape::from([batch, 1, 1, total]),
        [n, s, t] if (n, s, t) == (batch, sequence, total) => Shape::from([batch, 1, sequence, total]),
        _ => return Err(OpError::unsupported(format!("a padding mask of shape {shape}"))),
    };
    let mask = c.reshape(mask, expanded)?;
    let mask = c.cast(mask, DType::Bool)?;
    Ok(Some(mask))
}

/// Queries see no key after their own position; `past` keys come before them.
fn causal(c: &mut Context, sequence: usize, total: usize, past: usize) -> Result<NodeId, OpError> {
    diagonal(c, &Shape::from([sequence, total]), past as i64, CompareOp::Le)
}

/// `[batch, sequence, heads, count, size]` as `count` tensors `[batch, heads, sequence, size]`.
fn unpack_heads<const N: usize>(c: &mut Context, x: NodeId, index: usize) -> Result<[NodeId; N], OpError> {
    let shape = c.shape(x);
    if shape.rank() != 5 || shape[3] != N {
        return Err(c.operand_error(index, "batch, sequence, heads, parts and size are needed"));
    }
    let mut parts = [x; N];
    for (i, part) in parts.iter_mut().enumerate() {
        let one = slice_axis(c, x, 3, i, 1)?;
        let one = c.reshape(one, [shape[0], shape[1], shape[2], shape[4]])?;
        *part = c.transpose(one, &[0, 2, 1, 3])?;
    }
    Ok(parts)
}

/// `x: [batch, heads, sequence, size]` plus the next `heads * size` elements of a bias; `start` moves on.
fn add_head_bias(c: &mut Context, x: NodeId, bias: NodeId, start: &mut usize, index: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let count = shape[1] * shape[3];
    if c.rank(bias) != 1 || c.shape(bias).numel() < *start + count {
        return Err(c.operand_error(index, "one element per element of the heads is needed"));
    }
    let part = slice_axis(c, bias, 0, *start, count)?;
    *start += count;
    let part = c.reshape(part, [shape[1], shape[3]])?;
    let part = c.push(Op::Broadcast { shape, axes: vec![1, 3] }, &[part])?;
    Ok(c.add(x, part)?)
}

/// Further results: all keys and all values.
pub(super) fn multi_head(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let heads = head_count(c, "num_heads")?;
    let (unidirectional, filter) = (c.flag("unidirectional", false)?, filter(c)?);
    let scale = c.float("scale")?.filter(|&scale| scale != 0.0);
    refuse_operand(c, 8, "past_sequence_length")?;
    refuse_operand(c, 9, "cache_indirection")?;
    let query = c.input(0)?;
    // Keys that come as heads are those of another sequence, whose projection had its bias.
    let mut projected = false;
    let [mut query, mut key, mut value] = match (c.optional(1), c.optional(2)) {
        (None, None) => unpack_heads::<3>(c, query, 0)?,
        (Some(key), None) => {
            let [key, value] = unpack_heads::<2>(c, key, 1)?;
            [split_heads(c, query, heads, 0)?, key, value]
        }
        (Some(key), Some(value)) if c.rank(key) == 4 && c.rank(value) == 4 => {
            projected = true;
            [split_heads(c, query, heads, 0)?, key, value]
        }
        (Some(key), Some(value)) => {
            [split_heads(c, query, heads, 0)?, split_heads(c, key, heads, 1)?, split_heads(c, value, heads, 2)?]
        }
        (None, Some(_)) => return Err(OpError::MissingInput(1)),
    };
    if c.shape(query)[1] != heads || c.shape(key)[1] != heads {
        let value = heads.to_string();
        return Err(OpError::Attribute { name: "num_heads", value, reason: "the operands have another number of heads" });
    }
    if let Some(bias) = c.optional(3) {
        let mut start = 0;
        query = add_head_bias(c, query, bias, &mut start, 3)?;
        if !projected {
            key = add_head_bias(c, key, bias, &mut start, 3)?;
            value = add_head_bias(c, value, bias, &mut start, 3)?;
        }
    }
    let past = both(c, 6, 7)?;
    key = append(c, past.map(|p| p.0), key)?;
    value = append(c, past.map(|p| p.1), value)?;
    let (q, total) = (c.shape(query), c.shape(key)[2]);

    let mut weighting = Weighting { scale, ..Weighting::default() };
    weighting.bias.extend(c.optional(5));
    if let Some(keep) = kept(c, 4, [q[0], q[2], total])? {
        weighting.bias.push(penalty(c, keep, query, filter)?);
    }
    if unidirectional {
        let before = past.map_or(0, |p| c.shape(p.0)[2]);
        if before + q[2] != total {
            return Err(OpError::unsupported("unidirectional attention to another sequence"));
        }
        weighting.keep.push(causal(c, q[2], total, before)?);
    }
    let attended = attend(c, Heads { query, key, value }, &weighting)?;
    let result = merge_heads(c, attended.result)?;
    Ok(vec![result, key, value])
}

/// Projects to queries, keys and values first. Further result: all keys and values, stacked.
pub(super) fn attention(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let heads = head_count(c, "num_heads")?;
    let (unidirectional, filter) = (c.flag("unidirectional", false)?, filter(c)?);
    let scale = c.float("scale")?.filter(|&scale| scale != 0.0);
    for name in ["do_rotary", "past_present_share_buffer"] {
        refuse(c, name)?;
    }
    c.ignore(&["rotary_embedding_dim"]);
    refuse_operand(c, 6, "past_sequence_length")?;
    let (x, weights) = (c.input(0)?, c.input(1)?);
    let (shape, w) = (c.shape(x), c.shape(weights));
    if shape.rank() != 3 {
        return Err(c.operand_error(0, "batch, sequence and size are needed"));
    }
    if w.rank() != 2 || w[0] != shape[2] {
        return Err(c.operand_error(1, "the weights do not fit the data"));
    }
    let sizes = match c.ints("qkv_hidden_sizes")? {
        Some(sizes) => sizes.iter().map(|&s| extent("qkv_hidden_sizes", s)).collect::<Result<Vec<_>, _>>()?,
        None => vec![w[1] / 3; 3],
    };
    if sizes.len() != 3 || sizes.iter().sum::<usize>() != w[1] {
        let value = format!("{sizes:?}");
        return Err(OpError::Attribute { name: "qkv_hidden_sizes", value, reason: "the sizes do not add up to the weights" });
    }
    let dims = DotDims { lhs_contract: vec![2], rhs_contract: vec![0], ..DotDims::default() };
    let mut projected = c.push(Op::Dot(dims), &[x, weights])?;
    if let Some(bias) = c.optional(2) {
        let shape = c.shape(projected);
        let bias = c.broadcast_along(bias, &shape, 2)?;
        projected = c.add(projected, bias)?;
    }
    let mut parts = [x; 3];
    let mut start = 0;
    for (part, size) in parts.iter_mut().zip(sizes) {
        let one = slice_axis(c, projected, 2, start, size)?;
        *part = split_heads(c, one, heads, 1)?;
        start += size;
    }
    let [query, mut key, mut value] = parts;

    let mut before = 0;
    if let Some(past) = c.optional(4) {
        let found = c.shape(past);
        if found.rank() != 5 || found[0] != 2 {
            return Err(c.operand_error(4, "stacked keys and values are needed"));
        }
        before = found[3];
        for (i, new) in [&mut key, &mut value].into_iter().enumerate() {
            let one = slice_axis(c, past, 0, i, 1)?;
            let one = c.reshape(one, Shape::from(&found[1..]))?;
            *new = append(c, Some(one), *new)?;
        }
    }
    let total = c.shape(key)[2];
    let mut weighting = Weighting { scale, ..Weighting::default() };
    weighting.bias.extend(c.optional(5));
    if let Some(keep) = kept(c, 3, [shape[0], shape[1], total])? {
        weighting.bias.push(penalty(c, keep, query, filter)?);
    }
    if unidirectional {
        weighting.keep.push(causal(c, shape[1], total, before)?);
    }
    let attended = attend(c, Heads { query, key, value }, &weighting)?;
    let mut results = vec![merge_heads(c, attended.result)?];
    if c.has_output(1) {
        if c.ty(key) != c.ty(value) {
            return Err(OpError::unsupported("a present state of keys and values of different sizes"));
        }
        let mut stacked = [key, value];
        for part in &mut stacked {
            let shape: Shape = [1].into_iter().chain(c.shape(*part).iter().copied()).collect();
            *part = c.reshape(*part, shape)?;
        }
        results.push(c.push(Op::Concat { axis: 0 }, &stacked)?);
    }
    Ok(results)
}

/// Where the tokens of a call lie in the cache that it leaves.
struct Placement {
    /// Tokens in the cache before this call, `[batch]` of i64.
    past: NodeId,
    /// Tokens in the cache after this call, `[batch]` of i64.
    total: NodeId,
    /// Positions of the cache.
    capacity: usize,
    /// Whether nothing came before.
    first: bool,
    /// Whether `past` is the same as the length of the given cache, in all elements of the batch.
    full: bool,
}

/// Rotates, extends the cache, attends. Further results: the cache of keys and that of values.
pub(super) fn group_query(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let (heads, groups) = (head_count(c, "num_heads")?, head_count(c, "kv_num_heads")?);
    let is_causal = c.flag("causal", true)?;
    let window = c.int_or("local_window_size", -1)?;
    let (rotary, interleaved) = (c.flag("do_rotary", false)?, c.flag("rotary_interleaved", false)?);
    let smooth = c.int_or("smooth_softmax", -1)? == 1;
    let scale = c.float("scale")?.filter(|&scale| scale != 0.0);
    let softcap = c.float_or("softcap", 0.0)?;
    for name in ["sliding_window_cache", "kv_cache_bit_width", "qk_output"] {
        refuse(c, name)?;
    }
    for name in ["k_quant_type", "v_quant_type"] {
        if c.string_or(name, "NONE")? != "NONE" {
            return Err(OpError::unsupported("GroupQueryAttention with a quantised cache"));
        }
    }
    for (index, what) in [(12, "k_scale"), (13, "v_scale"), (16, "query_seqlens")] {
        refuse_operand(c, index, what)?;
    }

    let [mut query, mut key, value] = projections(c, heads, groups)?;
    if let Some((query_norm, key_norm)) = both(c, 14, 15)? {
        let epsilon = c.float_or("qk_norm_epsilon", f64::from(1e-6f32))?;
        let (query_epsilon, key_epsilon) = (c.float_or("q_norm_epsilon", epsilon)?, c.float_or("k_norm_epsilon", epsilon)?);
        query = rms_of(c, query, 3, query_norm, query_epsilon)?;
        key = rms_of(c, key, 3, key_norm, key_epsilon)?;
    } else {
        c.ignore(&["qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"]);
    }
    let past = both(c, 3, 4)?;
    let (q, new) = (c.shape(query), c.shape(key)[2]);
    if new != q[2] {
        return Err(c.operand_error(1, "as many keys as queries are needed"));
    }
    let given = past.map_or(0, |p| c.shape(p.0).get(2).copied().unwrap_or(0));
    let placement = place(c, q[0], new, given)?;
    let positions = token_positions(c, &placement, q[0], new)?;
    if rotary {
        let positions = match c.optional(9) {
            Some(given) if placement.first => follow(c, given, positions)?,
            given => given.unwrap_or(positions),
        };
        let (cos, sin) = (c.input(7)?, c.input(8)?);
        let angles = Angles { cos, sin, interleaved }.at(c, positions, 9)?;
        query = angles.rotate(c, query, 2)?;
        key = angles.rotate(c, key, 2)?;
    }
    let key = extend_cache(c, past.map(|p| p.0), key, &placement, 3)?;
    let value = extend_cache(c, past.map(|p| p.1), value, &placement, 4)?;

    let mut weighting = Weighting { scale, softcap, ..Weighting::default() };
    if let Some(bias) = c.optional(10) {
        weighting.bias.push(fit_bias(c, bias, placement.capacity)?);
    }
    weighting.keep = visible(c, &placement, positions, is_causal, window)?;
    weighting.sink = c.optional(11);
    if smooth && weighting.sink.is_none() {
        let ty = TensorType::new(c.ty(query).dtype, [heads]);
        weighting.sink = Some(c.splat(&ty, 0.0)?);
    }
    let attended = attend(c, Heads { query, key, value }, &weighting)?;
    let result = merge_heads(c, attended.result)?;
    Ok(vec![result, key, value])
}

/// Queries, keys and values, of one operand or three.
fn projections(c: &mut Context, heads: usize, groups: usize) -> Result<[NodeId; 3], OpError> {
    let query = c.input(0)?;
    if let Some((key, value)) = both(c, 1, 2)? {
        return Ok([split_heads(c, query, heads, 0)?, split_heads(c, key, groups, 1)?, split_heads(c, value, groups, 2)?]);
    }
    let all = heads + 2 * groups;
    let packed = split_heads(c, query, all, 0)?;
    Ok([
        slice_axis(c, packed, 1, 0, heads)?,
        slice_axis(c, packed, 1, heads, groups)?,
        slice_axis(c, packed, 1, heads + groups, groups)?,
    ])
}

/// From the lengths after the call, less one (operand 5), and the longest of them (operand 6). A call without a past starts at 0.
fn place(c: &mut Context, batch: usize, new: usize, given: usize) -> Result<Placement, OpError> {
    let longest = match c.known_ints(6)?.as_deref() {
        Some(&[longest]) => extent("total_sequence_length", longest)?,
        _ => return Err(c.operand_error(6, "one length is needed")),
    };
    if longest < new {
        return Err(c.operand_error(6, "it is shorter than the new tokens"));
    }
    let lengths = c.input(5)?;
    if *c.shape(lengths) != [batch] || !c.ty(lengths).dtype.is_int() {
        return Err(c.operand_error(5, "one length per element of the batch is needed"));
    }
    let known = c.known(lengths).map(|lengths| lengths.to_i64_vec());
    let lengths = c.cast(lengths, DType::I64)?;
    let total = c.shift(lengths, 1.0)?;
    let first = longest == new;
    let past = if first { c.splat(&TensorType::new(DType::I64, [batch]), 0.0)? } else { c.shift(total, -(new as f64))? };
    let full = match (first, known) {
        (true, _) => given == 0,
        (false, Some(known)) => known.iter().all(|&length| length + 1 == (given + new) as i64),
        (false, None) => false,
    };
    Ok(Placement { past, total, capacity: longest.max(given), first, full })
}

/// The position of each new token, `[batch, sequence]`.
fn token_positions(c: &mut Context, placement: &Placement, batch: usize, new: usize) -> Result<NodeId, OpError> {
    let shape = Shape::from([batch, new]);
    let past = c.push(Op::Broadcast { shape: shape.clone(), axes: vec![0] }, &[placement.past])?;
    let offset = c.push(Op::Iota { dtype: DType::I64, shape, axis: 1 }, &[])?;
    Ok(c.add(past, offset)?)
}

/// `positions`, moved by the first of those given: all that onnxruntime reads of them where nothing came before.
fn follow(c: &mut Context, given: NodeId, positions: NodeId) -> Result<NodeId, OpError> {
    let count = c.shape(given).numel();
    if count == 0 {
        return Ok(positions);
    }
    let given = c.reshape(given, [count])?;
    let first = slice_axis(c, given, 0, 0, 1)?;
    let first = c.cast(first, DType::I64)?;
    let shape = c.shape(positions);
    let first = c.broadcast_to(first, &shape)?;
    Ok(c.add(positions, first)?)
}

/// A cache of `capacity` positions: the past tokens, the new ones after them, then zeros.
fn extend_cache(
    c: &mut Context,
    past: Option<NodeId>,
    new: NodeId,
    placement: &Placement,
    index: usize,
) -> Result<NodeId, OpError> {
    let shape = c.shape(new);
    let (capacity, given) = (placement.capacity, past.map_or(0, |past| c.shape(past).get(2).copied().unwrap_or(0)));
    if let Some(past) = past
        && *c.shape(past) != [shape[0], shape[1], given, shape[3]]
    {
        return Err(c.operand_error(index, "the cache does not fit the keys and values"));
    }
    let unfilled = if placement.full { capacity - (given + shape[2]).min(capacity) } else { 1 };
    let zeros = TensorType::new(c.ty(new).dtype, [shape[0], shape[1], unfilled, shape[3]]);
    let zeros = c.splat(&zeros, 0.0)?;
    let parts: Vec<NodeId> = past.into_iter().chain([new, zeros]).filter(|&part| c.shape(part)[2] > 0).collect();
    let joined = match parts.as_slice() {
        [] => return Ok(new),
        [one] => *one,
        parts => c.push(Op::Concat { axis: 2 }, parts)?,
    };
    if placement.full {
        return Ok(joined);
    }

    // Which position of `joined` each position of the cache takes.
    let count = c.shape(joined)[2];
    let table = Shape::from([shape[0], capacity]);
    let position = c.push(Op::Iota { dtype: DType::I64, shape: table.clone(), axis: 1 }, &[])?;
    let start = c.push(Op::Broadcast { shape: table, axes: vec![0] }, &[placement.past])?;
    let offset = c.sub(position, start)?;
    let from_new = c.shift(offset, given as f64)?;
    let zero = c.constant_like(position, (count - 1) as f64)?;
    let end = c.constant_like(offset, shape[2] as f64)?;
    let unfinished = c.compare(CompareOp::Lt, offset, end)?;
    let later = c.select(unfinished, from_new, zero)?;
    let earlier = c.compare(CompareOp::Lt, position, start)?;
    let source = c.select(earlier, position, later)?;
    let spread = Shape::from([shape[0], shape[1], capacity]);
    let source = c.push(Op::Broadcast { shape: spread, axes: vec![0, 2] }, &[source])?;
    let taken = take_rows(c, joined, source, [shape[0] * shape[1], count, shape[3]])?;
    Ok(c.reshape(taken, [shape[0], shape[1], capacity, shape[3]])?)
}

/// A bias for `total` keys, for as many as the cache has room for: no query sees the others.
fn fit_bias(c: &mut Context, bias: NodeId, capacity: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(bias);
    let Some((&last, lead)) = shape.split_last().filter(|(last, _)| **last < capacity) else { return Ok(bias) };
    let mut sizes = lead.to_vec();
    sizes.push(capacity - last);
    let ty = TensorType::new(c.ty(bias).dtype, sizes);
    let rest = c.splat(&ty, 0.0)?;
    Ok(c.push(Op::Concat { axis: lead.len() }, &[bias, rest])?)
}

/// Which keys each query sees: those up to its own position, at most `window` of them, or all that there are.
fn visible(
    c: &mut Context,
    placement: &Placement,
    positions: NodeId,
    is_causal: bool,
    window: i64,
) -> Result<Vec<NodeId>, OpError> {
    if !is_causal {
        return Ok(vec![below(c, placement.total, placement.capacity, 5)?]);
    }
    // Padding after the last token sees what that sees.
    let tokens = c.shape(positions);
    let last = c.shift(placement.total, -1.0)?;
    let last = c.push(Op::Broadcast { shape: tokens.clone(), axes: vec![0] }, &[last])?;
    let position = c.binary(BinaryOp::Min, positions, last)?;
    let shape = Shape::from([tokens[0], 1, tokens[1], placement.capacity]);
    let query = c.push(Op::Broadcast { shape: shape.clone(), axes: vec![0, 2] }, &[position])?;
    let key = c.push(Op::Iota { dtype: DType::I64, shape, axis: 3 }, &[])?;
    let mut keep = vec![c.compare(CompareOp::Le, key, query)?];
    if window > 0 {
        let first = c.shift(query, -(window.min(1 << 30) as f64))?;
        keep.push(c.compare(CompareOp::Gt, key, first)?);
    }
    Ok(keep)
}
