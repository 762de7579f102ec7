//! Side conditions of the rules about Dot.
//!
//! Where the axes of a result end up is followed by labels: an axis of the result is known by the operand axis it comes from.

use meganeura_ir::DotDims;

use super::language::{Attr, TensorLang};
use super::movement::{axes, matching_runs, shape};
use super::rewrite::{Bindings, Match};

#[derive(Clone, Copy, PartialEq)]
enum Label {
    Lhs(usize),
    Rhs(usize),
}

/// The axes of the result of a Dot of operands of these ranks. Batch axes go by the axis of the left operand.
fn result_labels(dims: &DotDims, lhs_rank: usize, rhs_rank: usize) -> Vec<Label> {
    let batch = dims.lhs_batch.iter().copied().map(Label::Lhs);
    let lhs = dims.lhs_free(lhs_rank).into_iter().map(Label::Lhs);
    let rhs = dims.rhs_free(rhs_rank).into_iter().map(Label::Rhs);
    batch.chain(lhs).chain(rhs).collect()
}

/// Exchanges the operands of a Dot.
fn swapped(dims: &DotDims) -> DotDims {
    DotDims {
        lhs_batch: dims.rhs_batch.clone(),
        rhs_batch: dims.lhs_batch.clone(),
        lhs_contract: dims.rhs_contract.clone(),
        rhs_contract: dims.lhs_contract.clone(),
    }
}

fn map_axes(list: &[usize], to: impl Fn(usize) -> Option<usize>) -> Option<Vec<usize>> {
    list.iter().map(|&axis| to(axis)).collect()
}

fn pairing(dims: DotDims) -> TensorLang {
    TensorLang::Attr(Attr::Dot(dims))
}

/// The permutation that turns the axes `from` into the axes `to`.
fn permutation(from: &[Label], to: &[Label]) -> Option<Vec<usize>> {
    to.iter().map(|label| from.iter().position(|f| f == label)).collect()
}

/// `e`: the pairing without the transpose of the left operand, `r`: the order of its result.
pub fn pairs_before_lhs_transpose(m: &Match) -> Option<Bindings> {
    let (d, p, rhs_rank) = (m.dot('d')?, m.axes('p')?, m.sizes('y')?.rank());
    let before = |list: &[usize]| list.iter().map(|&a| p[a]).collect();
    let dims = DotDims { lhs_batch: before(&d.lhs_batch), lhs_contract: before(&d.lhs_contract), ..d.clone() };
    let relabel = |label| if let Label::Lhs(a) = label { Label::Lhs(p[a]) } else { label };
    let wanted: Vec<Label> = result_labels(d, p.len(), rhs_rank).into_iter().map(relabel).collect();
    let order = permutation(&result_labels(&dims, p.len(), rhs_rank), &wanted)?;
    Some(vec![('e', pairing(dims)), ('r', axes(order))])
}

/// `e`: the pairing without the transpose of the right operand, `r`: the order of its result.
pub fn pairs_before_rhs_transpose(m: &Match) -> Option<Bindings> {
    let (d, p, lhs_rank) = (m.dot('d')?, m.axes('p')?, m.sizes('x')?.rank());
    let before = |list: &[usize]| list.iter().map(|&a| p[a]).collect();
    let dims = DotDims { rhs_batch: before(&d.rhs_batch), rhs_contract: before(&d.rhs_contract), ..d.clone() };
    let relabel = |label| if let Label::Rhs(a) = label { Label::Rhs(p[a]) } else { label };
    let wanted: Vec<Label> = result_labels(d, lhs_rank, p.len()).into_iter().map(relabel).collect();
    let order = permutation(&result_labels(&dims, lhs_rank, p.len()), &wanted)?;
    Some(vec![('e', pairing(dims)), ('r', axes(order))])
}

/// A right operand that is broadcast from `rhs_rank` axes to `mapped`, along batch axes only: those become free axes of
/// the left operand. The new pairing, and the order of its result.
fn repeats_over_batch(d: &DotDims, mapped: &[usize], ranks: (usize, usize)) -> Option<(DotDims, Vec<usize>)> {
    let (lhs_rank, rhs_rank) = ranks;
    let source = |axis: usize| mapped.iter().position(|&a| a == axis);
    let pairs = d.lhs_batch.iter().zip(&d.rhs_batch);
    let (lhs_batch, rhs_batch): (Vec<usize>, Vec<usize>) = pairs.filter_map(|(&l, &r)| Some((l, source(r)?))).unzip();
    if lhs_batch.len() == d.lhs_batch.len() {
        return None;
    }
    let rhs_contract = map_axes(&d.rhs_contract, source)?;
    map_axes(&d.rhs_free(rhs_rank), source)?;
    let dims = DotDims { lhs_batch, rhs_batch, lhs_contract: d.lhs_contract.clone(), rhs_contract };
    let wanted: Option<Vec<Label>> = result_labels(d, lhs_rank, rhs_rank)
        .into_iter()
        .map(|label| if let Label::Rhs(a) = label { source(a).map(Label::Rhs) } else { Some(label) })
        .collect();
    let order = permutation(&result_labels(&dims, lhs_rank, mapped.len()), &wanted?)?;
    Some((dims, order))
}

/// `e`: the pairing without the broadcast of the right operand, `r`: the order of its result.
pub fn rhs_repeats_over_batch(m: &Match) -> Option<Bindings> {
    let (d, s, a) = (m.dot('d')?, m.shape('s')?, m.axes('a')?);
    let (dims, order) = repeats_over_batch(d, a, (m.sizes('x')?.rank(), s.rank()))?;
    Some(vec![('e', pairing(dims)), ('r', axes(order))])
}

/// `e`: the pairing without the broadcast of the left operand, `r`: the order of its result.
pub fn lhs_repeats_over_batch(m: &Match) -> Option<Bindings> {
    let (d, s, a) = (m.dot('d')?, m.shape('s')?, m.axes('a')?);
    let (lhs_rank, rhs_rank) = (s.rank(), m.sizes('y')?.rank());
    let (dims, _) = repeats_over_batch(&swapped(d), a, (rhs_rank, lhs_rank))?;
    let dims = swapped(&dims);
    let source = |axis: usize| a.iter().position(|&mapped| mapped == axis);
    let wanted: Option<Vec<Label>> = result_labels(d, lhs_rank, rhs_rank)
        .into_iter()
        .map(|label| match label {
            Label::Lhs(axis) => source(axis).map(Label::Lhs).or_else(|| Some(Label::Rhs(partner(d, axis)?))),
            rhs => Some(rhs),
        })
        .collect();
    let order = permutation(&result_labels(&dims, a.len(), rhs_rank), &wanted?)?;
    Some(vec![('e', pairing(dims)), ('r', axes(order))])
}

/// The batch axis of the right operand that pairs with one of the left.
fn partner(d: &DotDims, lhs_axis: usize) -> Option<usize> {
    Some(d.rhs_batch[d.lhs_batch.iter().position(|&b| b == lhs_axis)?])
}

/// For an operand that is reshaped from `from` to `to`: the axis of `from` that is axis `axis` of `to`, if no other
/// elements move along with it.
fn axis_before_reshape(from: &[usize], to: &[usize], axis: usize) -> Option<usize> {
    let (before, after) = matching_runs(from, to)?.into_iter().find(|(_, after)| after.contains(&axis))?;
    let alone = after.clone().all(|a| a == axis || to[a] == 1);
    let found = before.clone().find(|&b| from[b] == to[axis])?;
    (alone && before.clone().all(|b| b == found || from[b] == 1)).then_some(found)
}

/// `e`: the pairing without the reshape of the left operand, `r`: the result's shape, if only free axes are split or merged.
pub fn lhs_reshapes_free_axes(m: &Match) -> Option<Bindings> {
    let (d, s, x) = (m.dot('d')?, m.shape('s')?, m.sizes('x')?);
    let source = |axis| axis_before_reshape(x, s, axis);
    let dims =
        DotDims { lhs_batch: map_axes(&d.lhs_batch, source)?, lhs_contract: map_axes(&d.lhs_contract, source)?, ..d.clone() };
    Some(vec![('e', pairing(dims)), ('r', shape(&m.result()?.shape))])
}

/// `e`: the pairing without the reshape of the right operand, `r`: the result's shape, if only free axes are split or merged.
pub fn rhs_reshapes_free_axes(m: &Match) -> Option<Bindings> {
    let (d, s, y) = (m.dot('d')?, m.shape('s')?, m.sizes('y')?);
    let source = |axis| axis_before_reshape(y, s, axis);
    let dims =
        DotDims { rhs_batch: map_axes(&d.rhs_batch, source)?, rhs_contract: map_axes(&d.rhs_contract, source)?, ..d.clone() };
    Some(vec![('e', pairing(dims)), ('r', shape(&m.result()?.shape))])
}

/// The pairing of the same operands with batch axes in the order of `wanted`, the transposed result.
fn with_batch_of(d: &DotDims, wanted: &[Label]) -> Option<DotDims> {
    let lhs_batch: Option<Vec<usize>> =
        wanted.iter().take(d.lhs_batch.len()).map(|label| if let Label::Lhs(a) = *label { Some(a) } else { None }).collect();
    let lhs_batch = lhs_batch?;
    let rhs_batch = map_axes(&lhs_batch, |a| partner(d, a))?;
    Some(DotDims { lhs_batch, rhs_batch, ..d.clone() })
}

/// The axes of the transposed Dot, by the axes of its operands, and the ranks of those.
fn transposed_labels(m: &Match) -> Option<(Vec<Label>, usize, usize)> {
    let (lhs, rhs) = (m.sizes('x')?.rank(), m.sizes('y')?.rank());
    let labels = result_labels(m.dot('d')?, lhs, rhs);
    Some((m.axes('p')?.iter().map(|&a| labels[a]).collect(), lhs, rhs))
}

/// `e`: the pairing whose result is already transposed, operands in place: only batch axes change their order.
pub fn order_of_dot_batch(m: &Match) -> Option<Bindings> {
    let (wanted, lhs, rhs) = transposed_labels(m)?;
    let dims = with_batch_of(m.dot('d')?, &wanted)?;
    (result_labels(&dims, lhs, rhs) == wanted).then(|| vec![('e', pairing(dims))])
}

/// `e`: the pairing of the exchanged operands whose result is already transposed.
pub fn order_of_swapped_dot(m: &Match) -> Option<Bindings> {
    let (wanted, lhs, rhs) = transposed_labels(m)?;
    let dims = with_batch_of(m.dot('d')?, &wanted)?;
    let batch = dims.lhs_batch.iter().copied().map(Label::Lhs);
    let free_rhs = dims.rhs_free(rhs).into_iter().map(Label::Rhs);
    let free_lhs = dims.lhs_free(lhs).into_iter().map(Label::Lhs);
    batch.chain(free_rhs).chain(free_lhs).eq(wanted).then(|| vec![('e', pairing(swapped(&dims)))])
}
