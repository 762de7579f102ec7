//! Side conditions of the rules that find attention.
//!
//! `(attend c s v)` and `(attend c s v m)` stand for the softmax of the last axis of `s`, scaled, capped and masked as `c` and `m` say,
//! times `v`: attention whose products of queries and keys are not found yet. No op is it: unless they are found, nothing comes of it.

use std::collections::HashMap;

use egg::Id;
use meganeura_ir::attention::score_shape;
use meganeura_ir::interpreter::fold;
use meganeura_ir::{AttentionDims, DType, DotDims, Op, Real, Shape, Tensor, TensorType};

use super::analysis::{TensorGraph, op_of, tensor_type};
use super::language::{Attr, Scalar, TensorLang};
use super::movement::{axes, holds, shape};
use super::rewrite::{Bindings, Match};

/// Values this far below zero are as good as -inf where anything else is kept.
const LARGE_NEGATIVE: f64 = -1e30;
/// Elements of the largest constant that is looked at.
const MAX_CONSTANT: usize = 1 << 24;

fn dims(c: AttentionDims) -> TensorLang {
    TensorLang::Attr(Attr::Attention(c))
}

/// `r`: the axis of a softmax that is written as `exp(x)`, over its sums along `a`, repeated.
pub fn quotient_by_sums(m: &Match) -> Option<Bindings> {
    let (a, b, x) = (m.axes('a')?, m.axes('b')?, m.sizes('x')?);
    let &[axis] = a.as_slice() else { return None };
    let kept = (0..x.rank()).filter(|&i| i != axis);
    (m.result()?.dtype.is_float() && kept.eq(b.iter().copied())).then(|| vec![('r', axes([axis]))])
}

/// The shift of logits repeats along the axis of the softmax.
pub fn shift_repeats(m: &Match) -> Option<Bindings> {
    let (a, b) = (m.axes('a')?, m.axes('b')?);
    holds(a.iter().all(|axis| !b.contains(axis)))
}

/// The transpose of a reshape that inserts or removes axes of size 1 only: `q`: the order of the axes of `x`, `t`: the result's shape.
pub fn order_before_unit_reshape(m: &Match) -> Option<Bindings> {
    let (p, s, x) = (m.axes('p')?, m.shape('s')?, m.sizes('x')?);
    let wide = |shape: &Shape| (0..shape.rank()).filter(|&axis| shape[axis] != 1).collect::<Vec<_>>();
    let (before, after) = (wide(x), wide(s));
    if !before.iter().map(|&axis| x[axis]).eq(after.iter().map(|&axis| s[axis])) {
        return None;
    }
    let unit = (0..x.rank()).filter(|&axis| x[axis] == 1);
    let order = p.iter().filter_map(|axis| Some(before[after.iter().position(|a| a == axis)?]));
    let order: Vec<usize> = unit.chain(order).collect();
    Some(vec![('q', axes(order)), ('t', shape(&m.result()?.shape))])
}

/// A constant first operand of a product, which goes last.
pub fn factor_goes_last(m: &Match) -> Option<Bindings> {
    holds(m.splat('k').is_some() && m.splat('x').is_none())
}

/// How weights of `s`, softmax over its last axis, meet values: `p` and `t`: order and shape of the values, `r`: order of the result.
fn weighed(m: &Match, guarded: bool) -> Option<Bindings> {
    let (d, a, s, v) = (m.dot('d')?, m.axes('a')?, m.ty('s')?, m.sizes('v')?);
    let last = s.shape.rank().checked_sub(1)?;
    let rhs_free = d.rhs_free(v.rank());
    let ([column], [key]) = (rhs_free.as_slice(), d.rhs_contract.as_slice()) else { return None };
    let fits = last >= 1 && *a == [last] && d.lhs_contract == [last] && !d.lhs_batch.contains(&(last - 1));
    if !fits || !s.dtype.is_float() {
        return None;
    }
    let own: Vec<Option<usize>> =
        (0..last - 1).map(|axis| Some(d.rhs_batch[d.lhs_batch.iter().position(|&b| b == axis)?])).collect();
    let order = own.iter().flatten().copied().chain([*key, *column]);
    let sizes = own.iter().map(|o| o.map_or(1, |axis| v[axis])).chain([v[*key], v[*column]]).collect();
    let result = d.lhs_batch.iter().copied().chain(d.lhs_free(last + 1)).chain([last]);
    let c = AttentionDims { guarded, ..AttentionDims::scaled(1.0) };
    Some(vec![('p', axes(order)), ('t', shape(&sizes)), ('r', axes(result)), ('c', dims(c))])
}

pub fn weighs_values(m: &Match) -> Option<Bindings> {
    weighed(m, false)
}

/// Weights that are no numbers become zero.
pub fn weighs_values_guarded(m: &Match) -> Option<Bindings> {
    if m.value('z')? != 0.0 { None } else { weighed(m, true) }
}

/// The scores before anything is known of them but a mask.
fn plain<'a>(m: &Match<'a>) -> Option<&'a AttentionDims> {
    m.attention('c').filter(|c| c.scale == Real(1.0) && c.softcap.is_none())
}

/// The tensor that a mask of the scores' shape is broadcast from, and its shape with axes of size 1 where it repeats.
fn unrepeated(m: &Match, mask: char) -> Option<(TensorLang, Shape)> {
    let full = m.sizes(mask)?;
    let sources = m.nodes(mask)?.iter().filter_map(|node| match node {
        TensorLang::Broadcast([_, a, x]) => {
            let (mapped, source) = (m.axes_of(*a)?, *x);
            let sizes: Shape = (0..full.rank()).map(|axis| if mapped.contains(&axis) { full[axis] } else { 1 }).collect();
            Some((m.representative(source)?, sizes))
        }
        _ => None,
    });
    let smallest = sources.min_by_key(|(_, sizes)| sizes.numel());
    smallest.or_else(|| Some((m.representative(m.class(mask)?)?, full.clone())))
}

/// `b`, as `t`: what the mask of a rule is broadcast from.
fn first_mask(m: &Match) -> Option<Bindings> {
    plain(m)?;
    let (source, sizes) = unrepeated(m, 'm')?;
    Some(vec![('b', source), ('t', shape(&sizes))])
}

pub fn adds_bias(m: &Match) -> Option<Bindings> {
    if m.splat('s').is_some() { None } else { first_mask(m) }
}

/// Scores that are not kept become -inf.
pub fn keeps_scores(m: &Match) -> Option<Bindings> {
    if m.value('f')? == f64::NEG_INFINITY { first_mask(m) } else { None }
}

/// Scores that are not kept become a number so large that adding it to them is the same: `k`, beside `z`: zero, and `n`: no axes.
pub fn drowns_scores(m: &Match) -> Option<Bindings> {
    let fill = m.splat('f').filter(|f| f.value().is_finite() && f.value() <= LARGE_NEGATIVE)?;
    let mut bindings = first_mask(m)?;
    bindings.extend(constants(fill, 0.0));
    Some(bindings)
}

/// `k`: `first`, `z`: `second` of the same dtype, `n`: no axes.
fn constants(first: Scalar, second: f64) -> Bindings {
    vec![('k', TensorLang::Scalar(first)), ('z', TensorLang::Scalar(Scalar::new(first.dtype, second))), ('n', axes([]))]
}

/// Two masks, `x` of the rule and the one found before, brought to one shape: `b` as `t`, along `e`, and `o` as `w`, along `g`; together `u`.
fn second_mask(m: &Match) -> Option<Bindings> {
    plain(m)?;
    let (source, new) = unrepeated(m, 'm')?;
    let old = m.sizes('o')?;
    let joint: Shape = new.iter().zip(old.iter()).map(|(&a, &b)| a.max(b)).collect();
    let mapped = |sizes: &Shape| (0..joint.rank()).filter(|&axis| sizes[axis] == joint[axis]).collect::<Vec<_>>();
    let kept = |sizes: &Shape| mapped(sizes).into_iter().map(|axis| sizes[axis]).collect::<Shape>();
    Some(vec![
        ('b', source),
        ('t', shape(&kept(&new))),
        ('e', axes(mapped(&new))),
        ('w', shape(&kept(old))),
        ('g', axes(mapped(old))),
        ('u', shape(&joint)),
    ])
}

/// A bias beside a bias.
pub fn adds_second_bias(m: &Match) -> Option<Bindings> {
    if m.ty('o')?.dtype == DType::Bool || m.splat('s').is_some() { None } else { second_mask(m) }
}

/// A bias below a bool mask, or a bool mask over a bias: `k`: -inf.
fn bias_and_mask(m: &Match) -> Option<Bindings> {
    let mut bindings = second_mask(m)?;
    bindings.extend(constants(Scalar::new(m.ty('s')?.dtype, f64::NEG_INFINITY), 0.0));
    Some(bindings)
}

pub fn adds_bias_below_mask(m: &Match) -> Option<Bindings> {
    if m.ty('o')?.dtype != DType::Bool || m.splat('s').is_some() { None } else { bias_and_mask(m) }
}

pub fn keeps_scores_under_bias(m: &Match) -> Option<Bindings> {
    if m.ty('o')?.dtype == DType::Bool || m.value('f')? != f64::NEG_INFINITY { None } else { bias_and_mask(m) }
}

pub fn keeps_scores_twice(m: &Match) -> Option<Bindings> {
    if m.ty('o')?.dtype != DType::Bool || m.value('f')? != f64::NEG_INFINITY { None } else { second_mask(m) }
}

fn scaled_by(c: &AttentionDims, factor: f64) -> Option<Bindings> {
    let scale = c.scale.0 * factor;
    scale.is_finite().then(|| vec![('e', dims(AttentionDims { scale: Real(scale), ..c.clone() }))])
}

/// `e`: with the constant factor `k`, of the scores, of the queries or of the keys.
pub fn factor_of_products(m: &Match) -> Option<Bindings> {
    scaled_by(m.attention('c')?, m.value('k')?)
}

pub fn divisor_of_products(m: &Match) -> Option<Bindings> {
    scaled_by(m.attention('c')?, 1.0 / m.value('k')?)
}

/// `e`: with the cap `k`.
pub fn caps_scores(m: &Match) -> Option<Bindings> {
    let (c, cap) = (plain(m)?, m.value('k')?);
    let capped = AttentionDims { softcap: Some(Real(cap)), scale: Real(cap), ..c.clone() };
    (cap.is_finite() && cap > 0.0).then(|| vec![('e', dims(capped))])
}

/// `w`: the shape of the values, if a reshape from `s` to `t` regroups batch axes only, along which no values are shared.
pub fn regroups_batch(m: &Match) -> Option<Bindings> {
    let (t, s, v) = (m.shape('t')?, m.sizes('s')?, m.sizes('v')?);
    let (to, from) = (t.rank().checked_sub(2)?, s.rank().checked_sub(2)?);
    if t[to..] != s[from..] || t[..to] != v[..to] {
        return None;
    }
    let values = s[..from].iter().chain(&v[to..]).copied().collect();
    Some(vec![('w', shape(&values)), ('u', shape(&m.result()?.shape))])
}

/// `p`: the order of the queries, `w` and `u`: order and shape of the keys, if the scores are products of both.
pub fn products_of_queries_and_keys(m: &Match) -> Option<Bindings> {
    let (d, q, k): (&DotDims, _, _) = (m.dot('d')?, m.sizes('q')?, m.sizes('k')?);
    let (lhs_free, rhs_free) = (d.lhs_free(q.rank()), d.rhs_free(k.rank()));
    let ([key], [lhs], [rhs]) = (rhs_free.as_slice(), d.lhs_contract.as_slice(), d.rhs_contract.as_slice()) else { return None };
    let shared = lhs_free.len().checked_sub(1)?;
    let queries = d.lhs_batch.iter().chain(&lhs_free).chain([lhs]).copied();
    let keys = d.rhs_batch.iter().chain([key, rhs]).copied();
    let sizes: Shape =
        d.rhs_batch.iter().map(|&a| k[a]).chain(std::iter::repeat_n(1, shared)).chain([k[*key], k[*rhs]]).collect();
    Some(vec![('p', axes(queries)), ('w', axes(keys)), ('u', shape(&sizes))])
}

/// Keys and values that are repeated along a new axis, which is then merged into the axis before: `e`, `f`, `g`: the shapes of queries, keys
/// and values with that axis, of size 1 where they repeat.
pub fn grouped_heads(m: &Match) -> Option<Bindings> {
    let (q, k, v) = (m.sizes('q')?, m.sizes('k')?, m.sizes('v')?);
    let rank = q.rank();
    let keys = repeated_group(m.shape('s')?, m.shape('t')?, m.axes('a')?)?;
    let values = repeated_group(m.shape('u')?, m.shape('w')?, m.axes('b')?)?;
    if keys != values || keys.axis + 2 >= rank || q[keys.axis] != keys.groups * keys.heads {
        return None;
    }
    let split = |shape: &Shape, middle: [usize; 2]| -> Shape {
        shape[..keys.axis].iter().copied().chain(middle).chain(shape[keys.axis + 1..].iter().copied()).collect()
    };
    let one = |unrepeated: &Shape| -> Shape {
        unrepeated[..=keys.axis].iter().copied().chain([1]).chain(unrepeated[keys.axis + 1..].iter().copied()).collect()
    };
    let mut bindings = vec![
        ('e', shape(&split(q, [keys.groups, keys.heads]))),
        ('f', shape(&one(k))),
        ('g', shape(&one(v))),
        ('r', shape(&m.result()?.shape)),
    ];
    if let Some(mask) = m.sizes('m') {
        let middle = if mask[keys.axis] == 1 { [1, 1] } else { [keys.groups, keys.heads] };
        bindings.push(('o', shape(&split(mask, middle))));
    }
    Some(bindings)
}

#[derive(PartialEq, Eq)]
struct Group {
    axis: usize,
    groups: usize,
    heads: usize,
}

/// A broadcast to `to` along one new axis, and a reshape to `merged` that merges it into the axis before.
fn repeated_group(merged: &Shape, to: &Shape, mapped: &[usize]) -> Option<Group> {
    let new = (0..to.rank()).find(|axis| !mapped.contains(axis))?;
    let axis = new.checked_sub(1)?;
    let others = mapped.len() + 1 == to.rank() && mapped.iter().all(|&a| a != new);
    let expected = to[..axis].iter().copied().chain([to[axis] * to[new]]).chain(to[new + 1..].iter().copied());
    (others && expected.eq(merged.iter().copied())).then_some(Group { axis, groups: to[axis], heads: to[new] })
}

/// What a mask that does not depend on data says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstantMask {
    /// Everything is kept as it is.
    Everything,
    /// Query `i` sees the keys `j <= i + offset`, and every query sees at least one.
    Causal(i64),
    Other,
}

/// `e`: the causal rule in the place of a constant mask.
pub fn mask_is_causal(m: &Match) -> Option<Bindings> {
    let c = m.attention('c').filter(|c| c.causal.is_none())?;
    match constant_mask(m)? {
        ConstantMask::Causal(offset) => Some(vec![('e', dims(AttentionDims { causal: Some(offset), ..c.clone() }))]),
        _ => None,
    }
}

pub fn mask_keeps_everything(m: &Match) -> Option<Bindings> {
    holds(constant_mask(m)? == ConstantMask::Everything)
}

fn constant_mask(m: &Match) -> Option<ConstantMask> {
    let scores = score_shape(m.sizes('q')?, m.sizes('k')?);
    let class = m.class('m')?;
    let known = m.egraph().analysis.masks.borrow().get(&class).copied();
    let found = match known {
        Some(found) => found,
        None => {
            let mask = constant(m.egraph(), class, &mut HashMap::new());
            let found = mask.map_or(ConstantMask::Other, |mask| classify(&mask));
            m.egraph().analysis.masks.borrow_mut().insert(class, found);
            found
        }
    };
    let whole = m.sizes('m')?[scores.rank() - 2..] == scores[scores.rank() - 2..];
    (whole || found == ConstantMask::Everything).then_some(found)
}

fn classify(mask: &Tensor) -> ConstantMask {
    let shape = mask.shape();
    let [.., queries, keys] = shape[..] else { return ConstantMask::Other };
    let bools = mask.dtype() == DType::Bool;
    let values = mask.to_f64_vec();
    let kept = |v: f64| if bools { v != 0.0 } else { v == 0.0 };
    let dropped = |v: f64| if bools { v == 0.0 } else { v <= LARGE_NEGATIVE };
    if values.iter().all(|&v| kept(v)) {
        return ConstantMask::Everything;
    }
    let offset = values.iter().take(keys).take_while(|v| kept(**v)).count() as i64 - 1;
    if offset < 0 {
        return ConstantMask::Other;
    }
    let causal = values.iter().enumerate().all(|(i, &v)| {
        let (query, key) = ((i / keys % queries) as i64, (i % keys) as i64);
        if key <= query + offset { kept(v) } else { dropped(v) }
    });
    if causal { ConstantMask::Causal(offset) } else { ConstantMask::Other }
}

/// The value of a class that depends on constants only.
fn constant(egraph: &TensorGraph, class: Id, found: &mut HashMap<Id, Option<Tensor>>) -> Option<Tensor> {
    let class = egraph.find(class);
    if let Some(value) = found.get(&class) {
        return value.clone();
    }
    // A class below itself has no value by that way.
    found.insert(class, None);
    if tensor_type(egraph, class)?.shape.numel() > MAX_CONSTANT {
        return None;
    }
    let value = egraph[class].nodes.iter().find_map(|node| {
        let op = op_of(egraph, node)?;
        if let Op::Constant(value) = &op {
            return Some(value.as_ref().clone());
        }
        if matches!(op, Op::Input(_) | Op::Parameter(_) | Op::RandomUniform { .. }) {
            return None;
        }
        let operands = node.operands().iter().map(|&o| constant(egraph, o, found)).collect::<Option<Vec<_>>>()?;
        fold(&op, &operands.iter().collect::<Vec<_>>()).ok()
    });
    found.insert(class, value.clone());
    value
}

/// The type of `(attend c s v ..)`.
pub fn attended_type(scores: &TensorType, values: &TensorType) -> Option<TensorType> {
    let (rows, columns) = (scores.shape.rank().checked_sub(1)?, values.shape.rank().checked_sub(1)?);
    let sizes = scores.shape[..rows].iter().chain(&values.shape[columns..]).copied().collect::<Shape>();
    Some(TensorType::new(scores.dtype, sizes))
}
