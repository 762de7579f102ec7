//! Side conditions of the rules about movement.

use std::ops::Range;

use meganeura_ir::{DType, Shape, SliceDim};

use super::language::{Attr, TensorLang};
use super::rewrite::{Bindings, Match, is_full};

pub fn axes(axes: impl IntoIterator<Item = usize>) -> TensorLang {
    TensorLang::Attr(Attr::Axes(axes.into_iter().collect()))
}

pub fn shape(shape: &Shape) -> TensorLang {
    TensorLang::Attr(Attr::Shape(shape.clone()))
}

fn ranges(ranges: impl IntoIterator<Item = SliceDim>) -> TensorLang {
    TensorLang::Attr(Attr::Slice(ranges.into_iter().collect()))
}

pub fn holds(condition: bool) -> Option<Bindings> {
    condition.then(Vec::new)
}

/// The permutation that undoes `perm`.
fn inverse(perm: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; perm.len()];
    for (to, &from) in perm.iter().enumerate() {
        inverse[from] = to;
    }
    inverse
}

pub fn always(_: &Match) -> Option<Bindings> {
    holds(true)
}

pub fn identity_permutation(m: &Match) -> Option<Bindings> {
    let p = m.axes('p')?;
    holds(p.iter().copied().eq(0..p.len()))
}

pub fn type_is_kept(m: &Match) -> Option<Bindings> {
    holds(m.result()? == m.ty('x')?)
}

pub fn full_ranges(m: &Match) -> Option<Bindings> {
    holds(is_full(m.ranges('d')?, m.sizes('x')?))
}

pub fn equal_shapes(m: &Match) -> Option<Bindings> {
    holds(m.sizes('x')? == m.sizes('y')?)
}

/// `r`: `q`, then `p`.
pub fn permutation_of_both(m: &Match) -> Option<Bindings> {
    let (p, q) = (m.axes('p')?, m.axes('q')?);
    Some(vec![('r', axes(p.iter().map(|&a| q[a])))])
}

/// `r`: where the axes of `x` end up after `b`, then `a`.
pub fn axes_of_both(m: &Match) -> Option<Bindings> {
    let (a, b) = (m.axes('a')?, m.axes('b')?);
    Some(vec![('r', axes(b.iter().map(|&i| a[i])))])
}

/// `r`: the ranges of `x` that `d` takes out of those that `e` takes.
pub fn ranges_of_both(m: &Match) -> Option<Bindings> {
    let (outer, inner) = (m.ranges('d')?, m.ranges('e')?);
    let both = outer.iter().zip(inner).map(|(o, i)| SliceDim {
        start: if o.size == 0 { 0 } else { i.start.saturating_add_signed(o.start as isize * i.step) },
        step: o.step * i.step,
        size: o.size,
    });
    Some(vec![('r', ranges(both))])
}

pub fn inner_cast_is_lossless(m: &Match) -> Option<Bindings> {
    holds(is_lossless(m.ty('x')?.dtype, *m.dtype('u')?))
}

/// Whether every value of `from` is a value of `to`.
fn is_lossless(from: DType, to: DType) -> bool {
    use DType::*;
    let significand = |float| match float {
        BF16 => 8,
        F16 => 11,
        F32 => 24,
        F64 => 53,
        _ => 0,
    };
    let bits = |int: DType| 8 * int.size() - usize::from(is_signed(int));
    match (from, to) {
        _ if from == to => true,
        (Bool, _) => true,
        (_, Bool) => false,
        (F16 | BF16, F32 | F64) | (F32, F64) => true,
        _ if from.is_float() => false,
        _ if to.is_float() => bits(from) <= significand(to),
        _ => bits(from) <= bits(to) && (is_signed(to) || !is_signed(from)),
    }
}

fn is_signed(int: DType) -> bool {
    matches!(int, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// `r`: the transposed shape, if only axes of size 1 change their place.
pub fn moves_unit_axes_only(m: &Match) -> Option<Bindings> {
    let (x, p) = (m.sizes('x')?, m.axes('p')?);
    let moved = p.iter().filter(|&&a| x[a] != 1);
    if moved.is_sorted() { Some(vec![('r', shape(&m.result()?.shape))]) } else { None }
}

pub fn repeats_nothing(m: &Match) -> Option<Bindings> {
    let (s, a) = (m.shape('s')?, m.axes('a')?);
    holds((0..s.rank()).all(|axis| s[axis] == 1 || a.contains(&axis)))
}

/// `r`: where the axes of `x` end up, if the reshape only inserts axes of size 1.
pub fn inserts_unit_axes_only(m: &Match) -> Option<Bindings> {
    let (x, t, a) = (m.sizes('x')?, m.shape('t')?, m.axes('a')?);
    let mut mapped = Vec::new();
    for (axis, &size) in t.iter().enumerate() {
        if x.get(mapped.len()) == Some(&size) {
            mapped.push(a[axis]);
        } else if size != 1 {
            return None;
        }
    }
    (mapped.len() == x.rank()).then(|| vec![('r', axes(mapped))])
}

/// `u`: `x` without its axes of size 1, `r`: where the others end up, if the reshape only inserts and removes axes of size 1.
pub fn changes_unit_axes_only(m: &Match) -> Option<Bindings> {
    let (x, t, s, a) = (m.sizes('x')?, m.shape('t')?, m.shape('s')?, m.axes('a')?);
    let wide = |shape: &Shape| (0..shape.rank()).filter(|&axis| shape[axis] != 1).collect::<Vec<_>>();
    let (before, after) = (wide(t), wide(s));
    if !before.iter().map(|&axis| t[axis]).eq(after.iter().map(|&axis| s[axis])) {
        return None;
    }
    let kept = wide(x);
    let mapped: Option<Vec<usize>> = kept.iter().map(|&i| Some(after[before.iter().position(|&b| b == a[i])?])).collect();
    let squeezed = kept.iter().map(|&i| x[i]).collect();
    Some(vec![('u', shape(&squeezed)), ('r', axes(mapped?))])
}

/// `q`: the order in which `x` must be broadcast, `b`: to which axes, `s`: the transposed shape.
pub fn order_of_mapped_axes(m: &Match) -> Option<Bindings> {
    let (order, mapped) = order_of_mapped(m.axes('p')?, m.axes('a')?);
    Some(vec![('q', axes(order)), ('b', axes(mapped)), ('s', shape(&m.result()?.shape))])
}

/// Transposing by `perm` what is broadcast to `mapped` axes: the operand's permutation, and its new axes.
fn order_of_mapped(perm: &[usize], mapped: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let from = |axis: &usize| mapped.iter().position(|&a| a == perm[*axis]);
    let to: Vec<usize> = (0..perm.len()).filter(|axis| from(axis).is_some()).collect();
    (to.iter().filter_map(from).collect(), to)
}

/// `y` is broadcast, `x` transposed by `p`. `t b q`: the same broadcast before the transpose.
pub fn order_before_transpose(m: &Match) -> Option<Bindings> {
    if m.splat('y').is_some() {
        return None;
    }
    let (order, mapped) = order_of_mapped(&inverse(m.axes('p')?), m.axes('a')?);
    Some(vec![('q', axes(order)), ('b', axes(mapped)), ('t', shape(m.sizes('x')?))])
}

/// `e`: the ranges of `x`, `s`: the sliced shape.
pub fn ranges_of_mapped_axes(m: &Match) -> Option<Bindings> {
    let (d, a) = (m.ranges('d')?, m.axes('a')?);
    Some(vec![('e', ranges(a.iter().map(|&axis| d[axis]))), ('s', shape(&m.result()?.shape))])
}

/// `e`: the ranges of `x`.
pub fn ranges_before_transpose(m: &Match) -> Option<Bindings> {
    let d = m.ranges('d')?;
    Some(vec![('e', ranges(inverse(m.axes('p')?).iter().map(|&axis| d[axis])))])
}

/// Cuts two shapes of equal element count into the smallest runs of axes whose sizes have equal products, in order.
/// Either run of a pair may be empty if the other has axes of size 1 only. `None` for shapes without elements.
pub fn matching_runs(from: &[usize], to: &[usize]) -> Option<Vec<(Range<usize>, Range<usize>)>> {
    if from.contains(&0) || to.contains(&0) {
        return None;
    }
    let mut runs = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < to.len() {
        let start = (i, j);
        let (mut left, mut right) = (1, 1);
        if i < from.len() {
            left = from[i];
            i += 1;
        }
        if j < to.len() {
            right = to[j];
            j += 1;
        }
        while left != right {
            if left < right {
                left *= from.get(i)?;
                i += 1;
            } else {
                right *= to.get(j)?;
                j += 1;
            }
        }
        runs.push((start.0..i, start.1..j));
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_smallest_and_cover_unit_axes() {
        assert_eq!(matching_runs(&[2, 3, 4], &[6, 4]), Some(vec![(0..2, 0..1), (2..3, 1..2)]));
        assert_eq!(matching_runs(&[2, 3], &[1, 2, 3]), Some(vec![(0..1, 0..2), (1..2, 2..3)]));
        assert_eq!(matching_runs(&[5], &[5, 1]), Some(vec![(0..1, 0..1), (1..1, 1..2)]));
        assert_eq!(matching_runs(&[], &[1]), Some(vec![(0..0, 0..1)]));
        assert_eq!(matching_runs(&[0, 3], &[0]), None);
        assert_eq!(matching_runs(&[4, 6], &[6, 4]), Some(vec![(0..2, 0..2)]));
    }

    #[test]
    fn lossless_casts_keep_every_value() {
        for (from, to) in [(DType::I8, DType::F16), (DType::U8, DType::I16), (DType::Bool, DType::F32), (DType::BF16, DType::F64)]
        {
            assert!(is_lossless(from, to), "{from} to {to}");
        }
        for (from, to) in [(DType::I32, DType::F32), (DType::I8, DType::U64), (DType::U32, DType::I32), (DType::F32, DType::F16)]
        {
            assert!(!is_lossless(from, to), "{from} to {to}");
        }
    }
}
