//! Side conditions of the rules about reductions.

use meganeura_ir::ReduceOp;

use super::language::{Scalar, TensorLang};
use super::movement::{axes, matching_runs, shape};
use super::rewrite::{Bindings, Match};

/// `r`: the reduced shape, if every reduced axis has size 1.
pub fn reduces_unit_axes_only(m: &Match) -> Option<Bindings> {
    let (x, a) = (m.sizes('x')?, m.axes('a')?);
    if a.iter().any(|&axis| x[axis] != 1) {
        return None;
    }
    Some(vec![('r', shape(&m.result()?.shape))])
}

/// `r`: the axes of `x` that `b` reduces, and those that `a` then does.
pub fn axes_of_both_reductions(m: &Match) -> Option<Bindings> {
    let (a, b) = (m.axes('a')?, m.axes('b')?);
    let kept: Vec<usize> = (0..m.sizes('x')?.rank()).filter(|axis| !b.contains(axis)).collect();
    let mut both: Vec<usize> = b.iter().copied().chain(a.iter().map(|&i| kept[i])).collect();
    both.sort_unstable();
    Some(vec![('r', axes(both))])
}

/// `b`: the axes of `x` to reduce, `q`: the order of those that remain.
pub fn axes_before_transpose(m: &Match) -> Option<Bindings> {
    let (a, p) = (m.axes('a')?, m.axes('p')?);
    let mut reduced: Vec<usize> = a.iter().map(|&axis| p[axis]).collect();
    reduced.sort_unstable();
    let kept: Vec<usize> = (0..p.len()).filter(|axis| !reduced.contains(axis)).collect();
    let order: Option<Vec<usize>> =
        p.iter().filter(|axis| !reduced.contains(axis)).map(|axis| kept.iter().position(|k| k == axis)).collect();
    Some(vec![('b', axes(reduced)), ('q', axes(order?))])
}

/// `b`: the axes of `x` to reduce, `r`: the reduced shape, if the reshape neither merges nor splits across the reduced axes.
pub fn axes_before_reshape(m: &Match) -> Option<Bindings> {
    let (x, s, a) = (m.sizes('x')?, m.shape('s')?, m.axes('a')?);
    let mut reduced = Vec::new();
    for (from, to) in matching_runs(x, s)? {
        let mut wide = to.filter(|&axis| s[axis] != 1).map(|axis| a.contains(&axis));
        match wide.next() {
            Some(first) if wide.any(|w| w != first) => return None,
            Some(true) => reduced.extend(from),
            _ => {}
        }
    }
    Some(vec![('b', axes(reduced)), ('r', shape(&m.result()?.shape))])
}

/// What reduces a broadcast: the axes `v` of `x`, the rest to be broadcast to the axes `u` of `r`; and the number of repeats reduced.
fn reduced_broadcast(m: &Match) -> Option<(Bindings, usize)> {
    let (s, a, b) = (m.shape('s')?, m.axes('a')?, m.axes('b')?);
    if s.numel() == 0 {
        return None;
    }
    let repeats = a.iter().filter(|axis| !b.contains(axis)).map(|&axis| s[axis]).product();
    let inner = (0..b.len()).filter(|&i| a.contains(&b[i]));
    let kept: Vec<usize> = (0..s.rank()).filter(|axis| !a.contains(axis)).collect();
    let mapped = kept.iter().enumerate().filter(|(_, axis)| b.contains(axis)).map(|(to, _)| to);
    Some((vec![('v', axes(inner)), ('u', axes(mapped)), ('r', shape(&m.result()?.shape))], repeats))
}

pub fn extremum_of_repeats(m: &Match) -> Option<Bindings> {
    if !matches!(m.reduction('o')?, ReduceOp::Max | ReduceOp::Min) {
        return None;
    }
    Some(reduced_broadcast(m)?.0)
}

/// Also `k`: the number of repeats, to be broadcast from no axes, `n`.
pub fn count_of_repeats(m: &Match) -> Option<Bindings> {
    let (mut bindings, repeats) = reduced_broadcast(m)?;
    let dtype = m.ty('x')?.dtype;
    let count = Scalar::new(dtype, repeats as f64);
    if count.value() != repeats as f64 {
        return None;
    }
    bindings.extend([('n', axes([])), ('k', TensorLang::Scalar(count))]);
    Some(bindings)
}
