//! Scaled dot-product attention, and the update of a cache of keys and values.

use meganeura_ir::{
    AttentionDims, BinaryOp, CompareOp, Composite, DType, DotDims, GraphError, NodeId, Op, PadDim, Real, Shape, TensorType,
    UnaryOp,
};

use super::constants::diagonal;
use super::movement::slice_axis;
use super::{Row, Rule, row};
use crate::body::{Control, expect, tensors};
use crate::context::{self, Context, extent};
use crate::error::OpError;
use crate::value::Value;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Attention",             3..=7, &[],     Rule::Many(attention)),
    Row { domain: "ai.onnx.preview", ..row("FlexAttention", 3..=3, &[], Rule::Control(flex_attention)) },
    row("TensorScatter",         2..=3, &[],     Rule::One(tensor_scatter)),
];

/// Operands of attention: queries `[batch, heads, sequence, size]`, keys `[batch, groups, total, size]` and values
/// `[batch, groups, total, value size]`. Each group of keys and values serves equally many neighbouring heads.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub query: NodeId,
    pub key: NodeId,
    pub value: NodeId,
}

/// What stands between the products of queries and keys and the weights of the values. Masks broadcast to
/// `[batch, heads, sequence, total]`.
#[derive(Default)]
pub(super) struct Weighting {
    /// Factor of the products; `1 / sqrt(size)` if absent.
    pub scale: Option<f64>,
    /// Scores are squeezed into `-softcap..softcap`; 0 leaves them.
    pub softcap: f64,
    /// Added to the scores.
    pub bias: Vec<NodeId>,
    /// Scores where one of these does not hold become -inf.
    pub keep: Vec<NodeId>,
    /// One more score per head, `[heads]`, whose weight goes to no value.
    pub sink: Option<NodeId>,
}

/// Every stage of attention: scores and weights `[batch, heads, sequence, total]`, the result `[batch, heads, sequence, value size]`.
pub(super) struct Attended {
    pub scores: NodeId,
    pub capped: NodeId,
    pub masked: NodeId,
    pub weights: NodeId,
    pub result: NodeId,
}

/// `softmax(mask(softcap(scale * query key^T))) value`. A row of which nothing is kept is NaN, as in the standard.
pub(super) fn attend(c: &mut Context, heads: Heads, weighting: &Weighting) -> Result<Attended, OpError> {
    let scores = scores(c, heads, weighting.scale)?;
    let capped = softcap(c, scores, weighting.softcap)?;
    let masked = mask(c, capped, weighting)?;
    let weights = match weighting.sink {
        Some(sink) => softmax_with_sink(c, masked, sink)?,
        None => softmax(c, masked)?,
    };
    let result = match weighting.sink {
        Some(_) => weigh(c, weights, heads.value)?,
        None => composite(c, heads, weighting)?,
    };
    Ok(Attended { scores, capped, masked, weights, result })
}

/// The result of attention whose shapes [`scores`] has checked, without a sink: groups of heads are an axis of their own.
fn composite(c: &mut Context, heads: Heads, weighting: &Weighting) -> Result<NodeId, OpError> {
    let [query, key, value] = [heads.query, heads.key, heads.value].map(|x| c.shape(x));
    let (groups, neighbours) = (key[1], query[1] / key[1]);
    let softcap = (weighting.softcap > 0.0).then_some(Real(weighting.softcap));
    let scale = Real(weighting.scale.unwrap_or_else(|| 1.0 / (query[3] as f64).sqrt()));
    let dims = AttentionDims { scale, softcap, causal: None, guarded: false };
    let mut operands = vec![
        c.reshape(heads.query, [query[0], groups, neighbours, query[2], query[3]])?,
        c.reshape(heads.key, [key[0], groups, 1, key[2], key[3]])?,
        c.reshape(heads.value, [value[0], groups, 1, value[2], value[3]])?,
    ];
    let dtype = c.ty(heads.query).dtype;
    if let Some(mask) = joint_mask(c, weighting, dtype)? {
        let shape = c.shape(mask);
        let [groups, neighbours] = if shape[1] == 1 { [1, 1] } else { [groups, neighbours] };
        operands.push(c.reshape(mask, [shape[0], groups, neighbours, shape[2], shape[3]])?);
    }
    let result = c.push(Op::Composite(Composite::Attention(dims)), &operands)?;
    Ok(c.reshape(result, [query[0], query[1], query[2], value[3]])?)
}

/// All masks in one of 4 axes: bool where there is no bias, else added to the scores.
fn joint_mask(c: &mut Context, weighting: &Weighting, dtype: DType) -> Result<Option<NodeId>, OpError> {
    let [bias, keep] = [(&weighting.bias, BinaryOp::Add), (&weighting.keep, BinaryOp::And)].map(|(masks, op)| {
        let mut joint: Option<NodeId> = None;
        for &mask in masks {
            let shape = c.shape(mask);
            let lead = 4usize.saturating_sub(shape.rank());
            let mask = c.reshape(mask, std::iter::repeat_n(1, lead).chain(shape.iter().copied()).collect::<Shape>())?;
            joint = Some(match joint {
                Some(other) => {
                    let (a, b) = c.broadcast_pair(other, mask)?;
                    c.binary(op, a, b)?
                }
                None => mask,
            });
        }
        Ok::<_, GraphError>(joint)
    });
    match (bias?, keep?) {
        (Some(bias), Some(keep)) => {
            let (keep, bias) = c.broadcast_pair(keep, bias)?;
            let ty = TensorType::new(dtype, c.shape(bias));
            let never = c.splat(&ty, f64::NEG_INFINITY)?;
            Ok(Some(c.select(keep, bias, never)?))
        }
        (bias, keep) => Ok(bias.or(keep)),
    }
}

/// `scale * query key^T`: `[batch, heads, sequence, total]`. Checks the shapes of all three operands.
pub(super) fn scores(c: &mut Context, heads: Heads, scale: Option<f64>) -> Result<NodeId, OpError> {
    let (query, key, value) = (c.shape(heads.query), c.shape(heads.key), c.shape(heads.value));
    for (index, shape) in [&query, &key, &value].into_iter().enumerate() {
        if shape.rank() != 4 {
            return Err(c.operand_error(index, "batch, heads, sequence and size are needed"));
        }
    }
    let groups = key[1];
    if key[0] != query[0] || key[3] != query[3] || query[1].checked_rem(groups) != Some(0) {
        return Err(c.operand_error(1, "the keys do not fit the queries"));
    }
    if value[..3] != key[..3] {
        return Err(c.operand_error(2, "the values do not fit the keys"));
    }
    let grouped = c.reshape(heads.query, [query[0], groups, query[1] / groups * query[2], query[3]])?;
    let products = batched(c, grouped, heads.key, 3)?;
    let scores = c.scale(products, scale.unwrap_or_else(|| 1.0 / (query[3] as f64).sqrt()))?;
    Ok(c.reshape(scores, [query[0], query[1], query[2], key[2]])?)
}

pub(super) fn softmax(c: &mut Context, scores: NodeId) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Composite(Composite::Softmax { axis: 3 }), &[scores])?)
}

/// Sums of the values, `[batch, heads, sequence, value size]`, by weights `[batch, heads, sequence, total]`.
pub(super) fn weigh(c: &mut Context, weights: NodeId, value: NodeId) -> Result<NodeId, OpError> {
    let (w, v) = (c.shape(weights), c.shape(value));
    let grouped = c.reshape(weights, [w[0], v[1], w[1] / v[1] * w[2], w[3]])?;
    let result = batched(c, grouped, value, 2)?;
    Ok(c.reshape(result, [w[0], w[1], w[2], v[3]])?)
}

/// Products of matrices: batch axes 0 and 1, axis 3 of `a` contracted with axis `contract` of `b`.
fn batched(c: &mut Context, a: NodeId, b: NodeId, contract: usize) -> Result<NodeId, OpError> {
    let dims = DotDims { lhs_batch: vec![0, 1], rhs_batch: vec![0, 1], lhs_contract: vec![3], rhs_contract: vec![contract] };
    Ok(c.push(Op::Dot(dims), &[a, b])?)
}

/// `cap * tanh(x / cap)`
fn softcap(c: &mut Context, x: NodeId, cap: f64) -> Result<NodeId, OpError> {
    if cap <= 0.0 {
        return Ok(x);
    }
    let y = c.scale(x, 1.0 / cap)?;
    let y = c.unary(UnaryOp::Tanh, y)?;
    Ok(c.scale(y, cap)?)
}

fn mask(c: &mut Context, scores: NodeId, weighting: &Weighting) -> Result<NodeId, OpError> {
    let shape = c.shape(scores);
    let mut masked = scores;
    for &bias in &weighting.bias {
        let bias = c.broadcast_into(bias, &shape)?;
        masked = c.add(masked, bias)?;
    }
    for &keep in &weighting.keep {
        let keep = c.broadcast_into(keep, &shape)?;
        let never = c.constant_like(masked, f64::NEG_INFINITY)?;
        masked = c.select(keep, masked, never)?;
    }
    Ok(masked)
}

fn softmax_with_sink(c: &mut Context, scores: NodeId, sink: NodeId) -> Result<NodeId, OpError> {
    let shape = c.shape(scores);
    let column = Shape::from([shape[0], shape[1], shape[2], 1]);
    let sink = c.broadcast_along(sink, &column, 1)?;
    let extended = c.push(Op::Concat { axis: 3 }, &[scores, sink])?;
    let weights = softmax(c, extended)?;
    slice_axis(c, weights, 3, 0, shape[3])
}

/// `[batch, sequence, heads * size]` as `[batch, heads, sequence, size]`. `index` is the operand that is to blame.
pub(super) fn split_heads(c: &mut Context, x: NodeId, heads: usize, index: usize) -> Result<NodeId, OpError> {
    let x = separate_heads(c, x, heads, index)?;
    Ok(c.transpose(x, &[0, 2, 1, 3])?)
}

/// `[batch, sequence, heads * size]` as `[batch, sequence, heads, size]`. `index` is the operand that is to blame.
pub(super) fn separate_heads(c: &mut Context, x: NodeId, heads: usize, index: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    if shape.rank() != 3 || shape[2].checked_rem(heads) != Some(0) {
        return Err(c.operand_error(index, "batch, sequence, and equally large heads are needed"));
    }
    Ok(c.reshape(x, [shape[0], shape[1], heads, shape[2] / heads])?)
}

/// `[batch, heads, sequence, size]` as `[batch, sequence, heads * size]`.
pub(super) fn merge_heads(c: &mut Context, x: NodeId) -> Result<NodeId, OpError> {
    let shape = c.shape(x);
    let x = c.transpose(x, &[0, 2, 1, 3])?;
    Ok(c.reshape(x, [shape[0], shape[2], shape[1] * shape[3]])?)
}

/// A count of heads, which must be there.
pub(super) fn head_count(c: &Context, name: &'static str) -> Result<usize, OpError> {
    let heads = c.int(name)?.ok_or(OpError::MissingAttribute(name))?;
    let error = || OpError::Attribute { name, value: heads.to_string(), reason: "at least one head is needed" };
    extent(name, heads).ok().filter(|&heads| heads > 0).ok_or_else(error)
}

/// `past` and `new`, joined along axis 2.
pub(super) fn append(c: &mut Context, past: Option<NodeId>, new: NodeId) -> Result<NodeId, OpError> {
    match past {
        Some(past) => Ok(c.push(Op::Concat { axis: 2 }, &[past, new])?),
        None => Ok(new),
    }
}

/// The operands at `first` and `second`, which come together or not at all.
pub(super) fn both(c: &Context, first: usize, second: usize) -> Result<Option<(NodeId, NodeId)>, OpError> {
    match (c.optional(first), c.optional(second)) {
        (Some(a), Some(b)) => Ok(Some((a, b))),
        (None, None) => Ok(None),
        (a, _) => Err(OpError::MissingInput(if a.is_none() { first } else { second })),
    }
}

/// Whether position `i` of `count` lies below `limits`, one per element of the batch: `[batch, 1, 1, count]`.
pub(super) fn below(c: &mut Context, limits: NodeId, count: usize, index: usize) -> Result<NodeId, OpError> {
    let found = c.ty(limits).clone();
    if found.shape.rank() != 1 || !found.dtype.is_int() {
        return Err(c.operand_error(index, "one length per element of the batch is needed"));
    }
    let shape = Shape::from([found.shape[0], 1, 1, count]);
    let position = c.push(Op::Iota { dtype: found.dtype, shape: shape.clone(), axis: 3 }, &[])?;
    let limits = c.push(Op::Broadcast { shape, axes: vec![0] }, &[limits])?;
    Ok(c.compare(CompareOp::Lt, position, limits)?)
}

/// The standard's operator, of 3 or 4 axes. Further results: all keys and values, and a stage of the scores.
pub(super) fn attention(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    c.ignore(&["softmax_precision"]);
    let (causal, stage) = (c.flag("is_causal", false)?, c.int_or("qk_matmul_output_mode", 0)?);
    let mut weighting = Weighting { scale: c.float("scale")?, softcap: c.float_or("softcap", 0.0)?, ..Default::default() };
    let (mut query, mut key, mut value) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let merged = c.rank(query) == 3;
    if merged {
        let (heads, groups) = (head_count(c, "q_num_heads")?, head_count(c, "kv_num_heads")?);
        query = split_heads(c, query, heads, 0)?;
        key = split_heads(c, key, groups, 1)?;
        value = split_heads(c, value, groups, 2)?;
    } else {
        c.ignore(&["q_num_heads", "kv_num_heads"]);
    }
    for (index, node) in [query, key, value].into_iter().enumerate() {
        if c.rank(node) != 4 {
            return Err(c.operand_error(index, "3 axes, or 4, are needed, as many as those of the queries"));
        }
    }
    let past = both(c, 4, 5)?;
    let new = c.shape(key)[2];
    key = append(c, past.map(|p| p.0), key)?;
    value = append(c, past.map(|p| p.1), value)?;
    let (sequence, total) = (c.shape(query)[2], c.shape(key)[2]);

    if let Some(mask) = c.optional(3) {
        let mask = extend_mask(c, mask, total)?;
        if c.ty(mask).dtype == DType::Bool { &mut weighting.keep } else { &mut weighting.bias }.push(mask);
    }
    if causal {
        let keep = diagonal(c, &Shape::from([sequence, total]), (total - new) as i64, CompareOp::Le)?;
        weighting.keep.push(keep);
    }
    if let Some(lengths) = c.optional(6) {
        if past.is_some() {
            return Err(c.operand_error(6, "lengths are for a cache outside of the operator, not for past keys"));
        }
        let keep = below(c, lengths, total, 6)?;
        weighting.keep.push(keep);
    }

    let attended = attend(c, Heads { query, key, value }, &weighting)?;
    let result = if merged { merge_heads(c, attended.result)? } else { attended.result };
    let scores = match stage {
        0 => attended.scores,
        1 => attended.capped,
        2 => attended.masked,
        3 => attended.weights,
        other => {
            let (name, value) = ("qk_matmul_output_mode", other.to_string());
            return Err(OpError::Attribute { name, value, reason: "the standard knows 0 to 3" });
        }
    };
    Ok(vec![result, key, value, scores])
}

/// `prob_mod(softmax(score_mod(scale * query key^T))) value`, of 4 axes.
pub(super) fn flex_attention(control: &mut Control) -> Result<Vec<Value>, OpError> {
    let mut c = control.context();
    let heads = Heads { query: c.input(0)?, key: c.input(1)?, value: c.input(2)? };
    let scale = c.float("scale")?;
    let scores = scores(&mut c, heads, scale)?;
    let scores = modified(control, "score_mod", scores)?;
    let weights = softmax(&mut control.context(), scores)?;
    let weights = modified(control, "prob_mod", weights)?;
    let result = weigh(&mut control.context(), weights, heads.value)?;
    Ok(vec![Value::Tensor(result)])
}

/// What the body of attribute `name` makes of `x`; `x` itself without one.
fn modified(control: &mut Control, name: &'static str, x: NodeId) -> Result<NodeId, OpError> {
    if !control.context().has_attribute(name) {
        return Ok(x);
    }
    let body = control.body(name)?;
    let results = tensors(control.run(body, vec![Value::Tensor(x)])?, name)?;
    expect(results.len(), "outputs", 1)?;
    let c = control.context();
    if c.ty(results[0]) != c.ty(x) {
        return Err(OpError::unsupported(format!("{name} that changes {} to {}", c.ty(x), c.ty(results[0]))));
    }
    Ok(results[0])
}

/// From opset 24 on, a mask that is shorter than the keys lets through none of the others.
fn extend_mask(c: &mut Context, mask: NodeId, total: usize) -> Result<NodeId, OpError> {
    let found = c.ty(mask).clone();
    let Some((&last, lead)) = found.shape.split_last().filter(|(last, _)| c.opset >= 24 && **last < total) else {
        return Ok(mask);
    };
    let value = if found.dtype == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
    let value = c.splat(&TensorType::scalar(found.dtype), value)?;
    let mut pads = vec![PadDim::default(); lead.len()];
    pads.push(PadDim { high: total - last, ..PadDim::default() });
    Ok(c.push(Op::Pad(pads), &[mask, value])?)
}

/// Writes `update` into `past` from a position of `axis` on, which each element of the batch has of its own.
pub(super) fn tensor_scatter(c: &mut Context) -> Result<NodeId, OpError> {
    let circular = match c.string_or("mode", "linear")? {
        "linear" => false,
        "circular" => true,
        other => {
            let value = other.to_owned();
            return Err(OpError::Attribute { name: "mode", value, reason: "the standard knows linear and circular" });
        }
    };
    let axis = c.int_or("axis", -2)?;
    let (past, update) = (c.input(0)?, c.input(1)?);
    let (shape, new) = (c.shape(past), c.shape(update));
    let axis = context::axis(axis, shape.rank())?;
    if axis == 0 {
        return Err(OpError::Attribute { name: "axis", value: "0".to_owned(), reason: "axis 0 is the batch" });
    }
    if new.rank() != shape.rank() || new[axis] > shape[axis] || (0..shape.rank()).any(|a| a != axis && new[a] != shape[a]) {
        return Err(c.operand_error(1, "the update does not fit the cache"));
    }
    let (size, count) = (shape[axis], new[axis]);
    let Some(starts) = c.optional(2) else {
        let rest = slice_axis(c, past, axis, count, size - count)?;
        return Ok(c.push(Op::Concat { axis }, &[update, rest])?);
    };
    if *c.shape(starts) != [shape[0]] || !c.ty(starts).dtype.is_int() {
        return Err(c.operand_error(2, "one position per element of the batch is needed"));
    }
    if count == 0 {
        return Ok(past);
    }
    let (lead, inner): (usize, usize) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());

    // Which position of the update each position of the cache takes: `[batch, rows, size]`.
    let starts = c.cast(starts, DType::I64)?;
    let table = Shape::from([shape[0], lead.checked_div(shape[0]).unwrap_or(0), size]);
    let starts = c.push(Op::Broadcast { shape: table.clone(), axes: vec![0] }, &[starts])?;
    let position = c.push(Op::Iota { dtype: DType::I64, shape: table.clone(), axis: 2 }, &[])?;
    let mut source = c.sub(position, starts)?;
    if circular {
        let modulus = c.constant_like(source, size as f64)?;
        source = c.binary(BinaryOp::Rem, source, modulus)?;
        source = c.add(source, modulus)?;
        source = c.binary(BinaryOp::Rem, source, modulus)?;
    }
    let (zero, end) = (c.constant_like(source, 0.0)?, c.constant_like(source, count as f64)?);
    let begun = c.compare(CompareOp::Ge, source, zero)?;
    let unfinished = c.compare(CompareOp::Lt, source, end)?;
    let written = c.binary(BinaryOp::And, begun, unfinished)?;

    let last = c.constant_like(source, (count - 1) as f64)?;
    let source = c.binary(BinaryOp::Max, source, zero)?;
    let source = c.binary(BinaryOp::Min, source, last)?;
    let taken = take_rows(c, update, source, [lead, count, inner])?;
    let rows = c.reshape(past, [lead, size, inner])?;
    let written = c.reshape(written, [lead, size])?;
    let written = c.push(Op::Broadcast { shape: Shape::from([lead, size, inner]), axes: vec![0, 1] }, &[written])?;
    let y = c.select(written, taken, rows)?;
    Ok(c.reshape(y, shape)?)
}

/// `out[r, i] = x[r, source[r, i]]`: `x` seen as `[rows, count, inner]`, `source` as `[rows, positions]` of i64.
pub(super) fn take_rows(c: &mut Context, x: NodeId, source: NodeId, [rows, count, inner]: [usize; 3]) -> Result<NodeId, OpError> {
    let positions = c.shape(source).numel().checked_div(rows).unwrap_or(0);
    let source = c.reshape(source, [rows, positions])?;
    let row = c.push(Op::Iota { dtype: DType::I64, shape: Shape::from([rows, positions]), axis: 0 }, &[])?;
    let start = c.scale(row, count as f64)?;
    let source = c.add(start, source)?;
    let x = c.reshape(x, [rows * count, inner])?;
    Ok(c.push(Op::Gather { axis: 0 }, &[x, source])?)
}
