//! Scaled dot-product attention, its log-sum-exp, and its derivatives: types, and the textbook formulas that they decompose into.
//!
//! Queries are `[batch.., Lq, d]`, keys `[batch.., Lk, d]`, values `[batch.., Lk, dv]`. A batch axis of keys and values has the size of the
//! queries' or 1, where all queries along it share keys and values: so grouped heads are `[n, groups, heads, Lq, d]` against
//! `[n, groups, 1, Lk, d]`. A mask has the rank of the queries, and each of its axes the size of the scores `[batch.., Lq, Lk]` or 1. A float
//! mask is added to the scores, a bool mask says which of them are kept.

use crate::graph::{Graph, GraphError, NodeId};
use crate::typing::TypeError;
use crate::{BinaryOp, CompareOp, DType, DotDims, Op, Real, ReduceOp, Shape, TensorType, UnaryOp};

/// What stands between the products of queries and keys and the weights of the values, in the order of the fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttentionDims {
    /// Factor of the products.
    pub scale: Real,
    /// `c * tanh(scores / c)`
    pub softcap: Option<Real>,
    /// Query `i` sees the keys `j <= i + offset` only. Applies beside the mask.
    pub causal: Option<i64>,
    /// A query without scores, or with one that is no number, gives zeros rather than NaN.
    pub guarded: bool,
}

/// An operand of attention that a derivative is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttentionOperand {
    Query,
    Key,
    Value,
}

/// Positions of the operands of [`Composite::AttentionGradient`](crate::Composite::AttentionGradient).
pub mod gradient {
    pub const QUERY: usize = 0;
    pub const KEY: usize = 1;
    pub const VALUE: usize = 2;
    /// The cotangent of the result.
    pub const COTANGENT: usize = 3;
    pub const LOG_SUM_EXP: usize = 4;
    /// For each query, the sum of the products of the result and its cotangent.
    pub const DELTA: usize = 5;
    pub const MASK: usize = 6;
}

impl AttentionDims {
    /// Plain attention with this factor.
    pub fn scaled(scale: f64) -> Self {
        AttentionDims { scale: Real(scale), softcap: None, causal: None, guarded: false }
    }
}

/// The type of the result: `(q, k, v)` or `(q, k, v, mask)` `-> [batch.., Lq, dv]`.
pub(crate) fn infer_output(op: &'static str, operands: &[&TensorType]) -> Result<TensorType, TypeError> {
    let (&[q, k, v], mask) = required(op, operands)?;
    check_key(op, q, k)?;
    check_value(op, k, v)?;
    check_mask(op, q, k, mask)?;
    Ok(TensorType::new(q.dtype, replaced(&q.shape, &v.shape, 1)))
}

/// `(q, k)` or `(q, k, mask)` `-> [batch.., Lq]`.
pub(crate) fn infer_lse(op: &'static str, operands: &[&TensorType]) -> Result<TensorType, TypeError> {
    let (&[q, k], mask) = required(op, operands)?;
    check_key(op, q, k)?;
    check_mask(op, q, k, mask)?;
    Ok(TensorType::new(q.dtype, &q.shape[..q.shape.rank() - 1]))
}

/// The type of one of the operands; see [`gradient`] for the order of operands.
pub(crate) fn infer_gradient(op: &'static str, of: AttentionOperand, operands: &[&TensorType]) -> Result<TensorType, TypeError> {
    let (&[q, k, v, dy, lse, delta], mask) = required(op, operands)?;
    check_key(op, q, k)?;
    check_value(op, k, v)?;
    check_mask(op, q, k, mask)?;
    let rows = TensorType::new(q.dtype, &q.shape[..q.shape.rank() - 1]);
    let result = TensorType::new(q.dtype, replaced(&q.shape, &v.shape, 1));
    for (found, expected) in [(dy, &result), (lse, &rows), (delta, &rows)] {
        if found != expected {
            return Err(TypeError::Mismatch { op, a: expected.clone(), b: found.clone() });
        }
    }
    Ok(match of {
        AttentionOperand::Query => q,
        AttentionOperand::Key => k,
        AttentionOperand::Value => v,
    }
    .clone())
}

/// The first `N` operands, and the mask that may follow.
fn required<'o, 't, const N: usize>(
    op: &'static str,
    operands: &'o [&'t TensorType],
) -> Result<(&'o [&'t TensorType; N], Option<&'t TensorType>), TypeError> {
    match operands.split_first_chunk::<N>() {
        Some((first, [])) => Ok((first, None)),
        Some((first, [mask])) => Ok((first, Some(mask))),
        _ => Err(TypeError::OperandCount { op, expected: N, found: operands.len() }),
    }
}

/// `shape` with its last `count` axes replaced by those of `other`.
fn replaced(shape: &Shape, other: &Shape, count: usize) -> Shape {
    shape[..shape.rank() - count].iter().chain(&other[other.rank() - count..]).copied().collect()
}

fn check_key(op: &'static str, q: &TensorType, k: &TensorType) -> Result<(), TypeError> {
    if !q.dtype.is_float() {
        return Err(TypeError::DType { op, operand: 0, found: q.dtype, expected: "a float" });
    }
    let rank = q.shape.rank();
    let fits = rank >= 2
        && k.dtype == q.dtype
        && k.shape.rank() == rank
        && k.shape[rank - 1] == q.shape[rank - 1]
        && (0..rank - 2).all(|a| k.shape[a] == q.shape[a] || k.shape[a] == 1);
    if fits { Ok(()) } else { Err(TypeError::Mismatch { op, a: q.clone(), b: k.clone() }) }
}

fn check_value(op: &'static str, k: &TensorType, v: &TensorType) -> Result<(), TypeError> {
    let last = k.shape.rank() - 1;
    let fits = v.dtype == k.dtype && v.shape.rank() == last + 1 && v.shape[..last] == k.shape[..last];
    if fits { Ok(()) } else { Err(TypeError::Mismatch { op, a: k.clone(), b: v.clone() }) }
}

fn check_mask(op: &'static str, q: &TensorType, k: &TensorType, mask: Option<&TensorType>) -> Result<(), TypeError> {
    let Some(mask) = mask else { return Ok(()) };
    let scores = score_shape(&q.shape, &k.shape);
    let dtype = mask.dtype == q.dtype || mask.dtype == DType::Bool;
    let sizes = mask.shape.rank() == scores.rank() && mask.shape.iter().zip(scores.iter()).all(|(&m, &s)| m == s || m == 1);
    if dtype && sizes {
        Ok(())
    } else {
        Err(TypeError::Shape { op, operand: mask.clone(), shape: scores, reason: "the mask does not fit the scores" })
    }
}

/// `[batch.., Lq, Lk]`
pub fn score_shape(q: &Shape, k: &Shape) -> Shape {
    let rank = q.rank();
    q[..rank - 1].iter().chain([&k[rank - 2]]).copied().collect()
}

/// `softmax(mask(cap(scale * q k^T))) v`
pub(crate) fn output(g: &mut Graph, dims: &AttentionDims, operands: &[NodeId]) -> Result<NodeId, GraphError> {
    let scores = Scores::build(g, dims, operands[0], operands[1], operands.get(3).copied())?;
    let axis = g.ty(scores.masked).shape.rank() - 1;
    let weights = g.push(Op::Composite(crate::Composite::Softmax { axis }), &[scores.masked])?;
    let weights = guarded(g, dims, weights)?;
    product(g, weights, operands[2], Contract::Row)
}

/// `log(sum(exp(scores)))` of each query.
pub(crate) fn log_sum_exp(g: &mut Graph, dims: &AttentionDims, operands: &[NodeId]) -> Result<NodeId, GraphError> {
    let scores = Scores::build(g, dims, operands[0], operands[1], operands.get(2).copied())?.masked;
    let shape = g.ty(scores).shape.clone();
    let last = shape.rank() - 1;
    let max = g.reduce(ReduceOp::Max, scores, &[last])?;
    let repeated = g.broadcast_without(max, &shape, &[last])?;
    let shifted = g.sub(scores, repeated)?;
    let e = g.unary(UnaryOp::Exp, shifted)?;
    let sum = g.reduce(ReduceOp::Sum, e, &[last])?;
    let log = g.unary(UnaryOp::Log, sum)?;
    g.add(max, log)
}

/// With `p = exp(scores - lse)` and `ds = p * (dy v^T - delta)`, through the cap and the scale: `ds k`, `ds^T q` or `p^T dy`, the latter two
/// summed over the queries that share a key.
pub(crate) fn gradient_of(
    g: &mut Graph,
    dims: &AttentionDims,
    of: AttentionOperand,
    operands: &[NodeId],
) -> Result<NodeId, GraphError> {
    let (q, k, dy) = (operands[gradient::QUERY], operands[gradient::KEY], operands[gradient::COTANGENT]);
    let scores = Scores::build(g, dims, q, k, operands.get(gradient::MASK).copied())?;
    let p = weights_from_lse(g, dims, scores.masked, operands[gradient::LOG_SUM_EXP])?;
    if of == AttentionOperand::Value {
        return transposed_product(g, p, dy, operands[gradient::VALUE]);
    }
    let ds = score_cotangent(g, p, dy, operands[gradient::VALUE], operands[gradient::DELTA])?;
    let ds = scores.through_cap(g, dims, ds)?;
    let ds = g.scale(ds, dims.scale.0)?;
    match of {
        AttentionOperand::Query => product(g, ds, k, Contract::Row),
        _ => transposed_product(g, ds, q, k),
    }
}

/// The stages of the scores, `[batch.., Lq, Lk]`.
struct Scores {
    capped: NodeId,
    masked: NodeId,
}

impl Scores {
    fn build(g: &mut Graph, dims: &AttentionDims, q: NodeId, k: NodeId, mask: Option<NodeId>) -> Result<Scores, GraphError> {
        let products = product(g, q, k, Contract::Column)?;
        let mut scores = g.scale(products, dims.scale.0)?;
        if let Some(cap) = dims.softcap {
            let cap = g.constant_like(scores, cap.0)?;
            let inner = g.div(scores, cap)?;
            let inner = g.unary(UnaryOp::Tanh, inner)?;
            scores = g.mul(inner, cap)?;
        }
        let capped = scores;
        let shape = g.ty(scores).shape.clone();
        if let Some(mask) = mask {
            let repeated = g.broadcast_to(mask, &shape)?;
            scores = match g.ty(mask).dtype {
                DType::Bool => kept(g, repeated, scores)?,
                _ => g.add(scores, repeated)?,
            };
        }
        if let Some(offset) = dims.causal {
            let keep = causal_mask(g, &shape, offset)?;
            scores = kept(g, keep, scores)?;
        }
        Ok(Scores { capped, masked: scores })
    }

    /// The cotangent of the scaled products where that of the scores is `ds`.
    fn through_cap(&self, g: &mut Graph, dims: &AttentionDims, ds: NodeId) -> Result<NodeId, GraphError> {
        let Some(cap) = dims.softcap else { return Ok(ds) };
        let cap = g.constant_like(ds, cap.0)?;
        let inner = g.div(self.capped, cap)?;
        let square = g.mul(inner, inner)?;
        let one = g.constant_like(ds, 1.0)?;
        let slope = g.sub(one, square)?;
        g.mul(ds, slope)
    }
}

/// `scores` where `keep` holds, else -inf.
fn kept(g: &mut Graph, keep: NodeId, scores: NodeId) -> Result<NodeId, GraphError> {
    let never = g.constant_like(scores, f64::NEG_INFINITY)?;
    g.select(keep, scores, never)
}

/// Whether key `j` is at most `i + offset`, for scores of `shape`.
fn causal_mask(g: &mut Graph, shape: &Shape, offset: i64) -> Result<NodeId, GraphError> {
    let rank = shape.rank();
    let plane = Shape::from([shape[rank - 2], shape[rank - 1]]);
    let query = g.push(Op::Iota { dtype: DType::I32, shape: plane.clone(), axis: 0 }, &[])?;
    let key = g.push(Op::Iota { dtype: DType::I32, shape: plane, axis: 1 }, &[])?;
    let last = g.shift(query, offset as f64)?;
    let keep = g.compare(CompareOp::Le, key, last)?;
    g.broadcast_to(keep, shape)
}

fn guarded(g: &mut Graph, dims: &AttentionDims, weights: NodeId) -> Result<NodeId, GraphError> {
    if !dims.guarded {
        return Ok(weights);
    }
    let nan = g.unary(UnaryOp::IsNan, weights)?;
    let zero = g.constant_like(weights, 0.0)?;
    g.select(nan, zero, weights)
}

fn weights_from_lse(g: &mut Graph, dims: &AttentionDims, scores: NodeId, lse: NodeId) -> Result<NodeId, GraphError> {
    let shape = g.ty(scores).shape.clone();
    let lse = g.broadcast_without(lse, &shape, &[shape.rank() - 1])?;
    let shifted = g.sub(scores, lse)?;
    let p = g.unary(UnaryOp::Exp, shifted)?;
    guarded(g, dims, p)
}

/// `p * (dy v^T - delta)`
fn score_cotangent(g: &mut Graph, p: NodeId, dy: NodeId, v: NodeId, delta: NodeId) -> Result<NodeId, GraphError> {
    let shape = g.ty(p).shape.clone();
    let dp = product(g, dy, v, Contract::Column)?;
    let delta = g.broadcast_without(delta, &shape, &[shape.rank() - 1])?;
    let difference = g.binary(BinaryOp::Sub, dp, delta)?;
    g.mul(p, difference)
}

/// Which of the last two axes of the right operand is summed over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contract {
    Row,
    Column,
}

/// Which batch axes of keys and values have their own entries: those of size 1 are shared, where the queries have more.
fn own_axes(full: &Shape, shared: &Shape) -> Vec<usize> {
    (0..full.rank() - 2).filter(|&a| full[a] == shared[a]).collect()
}

/// `[batch.., m, x] x [batch.., n, x]` or `[batch.., x, n]` `-> [batch.., m, n]`, where batch axes of the right operand may be shared.
fn product(g: &mut Graph, lhs: NodeId, rhs: NodeId, contract: Contract) -> Result<NodeId, GraphError> {
    let (left, right) = (g.ty(lhs).shape.clone(), g.ty(rhs).shape.clone());
    let rank = left.rank();
    let own = own_axes(&left, &right);
    let squeezed: Shape = own.iter().copied().chain([rank - 2, rank - 1]).map(|a| right[a]).collect();
    let rhs = g.reshape(rhs, squeezed)?;
    let dims = DotDims {
        lhs_contract: vec![rank - 1],
        rhs_contract: vec![own.len() + usize::from(contract == Contract::Column)],
        rhs_batch: (0..own.len()).collect(),
        lhs_batch: own.clone(),
    };
    let result = g.push(Op::Dot(dims), &[lhs, rhs])?;
    let order: Vec<usize> = own.iter().copied().chain((0..rank).filter(|a| !own.contains(a))).collect();
    let back: Vec<usize> = (0..rank).filter_map(|axis| order.iter().position(|&o| o == axis)).collect();
    g.transpose(result, &back)
}

/// `weights^T x` for `weights: [batch.., Lq, Lk]` and `x: [batch.., Lq, n]`, summed over the batch axes that `like`, of whose shape the
/// result is, shares.
fn transposed_product(g: &mut Graph, weights: NodeId, x: NodeId, like: NodeId) -> Result<NodeId, GraphError> {
    let shape = g.ty(like).shape.clone();
    let full = g.ty(weights).shape.clone();
    let own = own_axes(&full, &shape);
    let summed: Vec<usize> = (0..full.rank() - 1).filter(|a| !own.contains(a)).collect();
    let dims = DotDims { lhs_batch: own.clone(), rhs_batch: own, lhs_contract: summed.clone(), rhs_contract: summed };
    let result = g.push(Op::Dot(dims), &[weights, x])?;
    g.reshape(result, shape)
}
