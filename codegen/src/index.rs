//! Symbolic index arithmetic.
//!
//! Movement ops are not kernels: they change the index at which an operand is read. An [`Index`] is that position as a function of a
//! kernel's iteration variables: an integer affine form over [`Atom`]s, kept simple by interval analysis, so that most chains of reshapes,
//! transposes and slices collapse to a stride or two.

use std::collections::BTreeSet;
use std::rc::Rc;

/// Identifies an iteration variable within one kernel.
pub type VarId = u32;

/// An indivisible term of an [`Index`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Atom {
    /// An iteration variable in `0..extent`.
    Var { id: VarId, extent: i64 },
    /// Quotient by a constant above 1. For a negative dividend the value is unspecified.
    Div(Rc<Index>, i64),
    /// Remainder by a constant above 1. For a negative dividend the value is unspecified.
    Mod(Rc<Index>, i64),
    /// An index that a guard confines to `low..=high` wherever its value matters.
    Bounded { index: Rc<Index>, low: i64, high: i64 },
    /// A value read from a tensor, in `0..extent`. `id` identifies it; `vars` are the variables that it depends on.
    Opaque { id: u32, extent: i64, vars: BTreeSet<VarId> },
}

/// `constant + sum(coefficient * atom)`, terms sorted by atom, coefficients not zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Index {
    terms: Vec<(Atom, i64)>,
    constant: i64,
}

impl Atom {
    /// Smallest and largest value.
    fn range(&self) -> (i64, i64) {
        match self {
            Atom::Var { extent, .. } | Atom::Opaque { extent, .. } => (0, (*extent - 1).max(0)),
            Atom::Div(x, c) => {
                let (low, high) = x.range();
                if low >= 0 { (low / c, high / c) } else { (low.min(0), high.max(0)) }
            }
            Atom::Mod(x, c) => {
                let (low, high) = x.range();
                if low >= 0 { (0, high.min(c - 1)) } else { (1 - c, c - 1) }
            }
            Atom::Bounded { low, high, .. } => (*low, *high),
        }
    }

    fn collect_vars(&self, vars: &mut BTreeSet<VarId>) {
        match self {
            Atom::Var { id, .. } => {
                vars.insert(*id);
            }
            Atom::Div(x, _) | Atom::Mod(x, _) | Atom::Bounded { index: x, .. } => x.collect_vars(vars),
            Atom::Opaque { vars: inner, .. } => vars.extend(inner),
        }
    }
}

impl Index {
    pub fn constant(value: i64) -> Self {
        Index { terms: Vec::new(), constant: value }
    }

    /// A variable in `0..extent`; the constant 0 if that is its only value.
    pub fn var(id: VarId, extent: usize) -> Self {
        if extent <= 1 { Self::constant(0) } else { Self::atom(Atom::Var { id, extent: extent as i64 }) }
    }

    /// A variable in `0..extent`, whatever the extent: loops may start past 0 or take no trip.
    pub fn var_unfolded(id: VarId, extent: usize) -> Self {
        Self::atom(Atom::Var { id, extent: extent as i64 })
    }

    pub fn opaque(id: u32, extent: usize, vars: BTreeSet<VarId>) -> Self {
        if extent <= 1 { Self::constant(0) } else { Self::atom(Atom::Opaque { id, extent: extent as i64, vars }) }
    }

    fn atom(atom: Atom) -> Self {
        Index { terms: vec![(atom, 1)], constant: 0 }
    }

    pub fn terms(&self) -> &[(Atom, i64)] {
        &self.terms
    }

    pub fn offset(&self) -> i64 {
        self.constant
    }

    pub fn as_constant(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }

    /// Smallest and largest value, by interval arithmetic.
    pub fn range(&self) -> (i64, i64) {
        self.terms.iter().fold((self.constant, self.constant), |(low, high), (atom, c)| {
            let (l, h) = atom.range();
            if *c > 0 { (low + c * l, high + c * h) } else { (low + c * h, high + c * l) }
        })
    }

    fn collect_vars(&self, vars: &mut BTreeSet<VarId>) {
        for (atom, _) in &self.terms {
            atom.collect_vars(vars);
        }
    }

    /// The variables that the value depends on.
    pub fn vars(&self) -> BTreeSet<VarId> {
        let mut vars = BTreeSet::new();
        self.collect_vars(&mut vars);
        vars
    }

    pub fn add(&self, other: &Index) -> Index {
        let mut terms = self.terms.clone();
        for (atom, c) in &other.terms {
            add_term(&mut terms, atom, *c);
        }
        Index { terms, constant: self.constant + other.constant }.recombined()
    }

    pub fn shift(&self, offset: i64) -> Index {
        Index { terms: self.terms.clone(), constant: self.constant + offset }
    }

    pub fn scale(&self, factor: i64) -> Index {
        if factor == 0 {
            return Self::constant(0);
        }
        Index { terms: self.terms.iter().map(|(a, c)| (a.clone(), c * factor)).collect(), constant: self.constant * factor }
    }

    /// Replaces `k * (x % c) + k * c * (x / c)` by `k * x`.
    fn recombined(mut self) -> Index {
        'search: loop {
            for (position, (atom, k)) in self.terms.iter().enumerate() {
                let Atom::Mod(x, c) = atom else { continue };
                let quotient = Atom::Div(x.clone(), *c);
                let Some(other) = self.terms.iter().position(|(a, f)| *a == quotient && *f == k * c) else { continue };
                let whole = x.scale(*k);
                let mut terms = self.terms.clone();
                terms.remove(position.max(other));
                terms.remove(position.min(other));
                for (a, f) in &whole.terms {
                    add_term(&mut terms, a, *f);
                }
                self = Index { terms, constant: self.constant + whole.constant };
                continue 'search;
            }
            return self;
        }
    }

    /// Splits into `(q, r)` with `self = c * q + r`, `r` free of multiples of `c`.
    fn split(&self, c: i64) -> (Index, Index) {
        let (mut quotient, mut rest) = (Vec::new(), Vec::new());
        for (atom, k) in &self.terms {
            if k % c == 0 {
                quotient.push((atom.clone(), k / c));
            } else {
                rest.push((atom.clone(), *k));
            }
        }
        let q = self.constant.div_euclid(c);
        (Index { terms: quotient, constant: q }, Index { terms: rest, constant: self.constant - q * c })
    }

    /// The position in vectors of four and the component, for values of which the latter is the same everywhere.
    pub fn in_vectors(&self) -> Option<(Index, u8)> {
        let aligned = !self.terms.is_empty() && self.terms.iter().all(|(_, k)| k % 4 == 0);
        aligned.then(|| {
            let (vector, component) = self.split(4);
            (vector, component.constant as u8)
        })
    }

    /// The quotient by `c >= 1`, for values that are not negative.
    pub fn div(&self, c: i64) -> Index {
        if c == 1 {
            return self.clone();
        }
        let (low, high) = self.range();
        if low >= 0 {
            if high < c {
                return Self::constant(0);
            }
            let (quotient, rest) = self.split(c);
            let (rest_low, rest_high) = rest.range();
            if rest_low >= 0 && rest_high < c {
                return quotient;
            }
            if rest_low >= 0 && quotient.range().0 >= 0 && !quotient.terms.is_empty() {
                return quotient.add(&rest.div(c));
            }
            if let Some((reduced, g)) = self.without_common_factor(c) {
                return reduced.div(c / g);
            }
        }
        Self::atom(Atom::Div(Rc::new(self.clone()), c))
    }

    /// The remainder by `c >= 1`, for values that are not negative.
    pub fn rem(&self, c: i64) -> Index {
        if c == 1 {
            return Self::constant(0);
        }
        let (low, high) = self.range();
        if low >= 0 {
            if high < c {
                return self.clone();
            }
            let (_, rest) = self.split(c);
            let (rest_low, rest_high) = rest.range();
            if rest_low >= 0 && rest_high < c {
                return rest;
            }
            if rest_low >= 0 && rest != *self {
                return rest.rem(c);
            }
            if let Some((reduced, g)) = self.without_common_factor(c) {
                return reduced.rem(c / g).scale(g).shift(self.constant.rem_euclid(g));
            }
        }
        Self::atom(Atom::Mod(Rc::new(self.clone()), c))
    }

    /// `self / g` (rounded down) with the greatest common divisor `g > 1` of `c` and all coefficients, if there is one.
    fn without_common_factor(&self, c: i64) -> Option<(Index, i64)> {
        let g = self.terms.iter().fold(c, |g, (_, k)| gcd(g, *k));
        (g > 1 && !self.terms.is_empty()).then(|| {
            let terms = self.terms.iter().map(|(a, k)| (a.clone(), k / g)).collect();
            (Index { terms, constant: self.constant.div_euclid(g) }, g)
        })
    }

    /// The same index, known to lie in `low..=high` wherever it matters.
    pub fn bounded(self, low: i64, high: i64) -> Index {
        let (l, h) = self.range();
        if l >= low && h <= high {
            return self;
        }
        Self::atom(Atom::Bounded { index: Rc::new(self), low, high })
    }

    /// The same index, without what guards say of it as a whole.
    pub fn unbounded(&self) -> Index {
        match self.terms.as_slice() {
            [(Atom::Bounded { index, .. }, 1)] => index.unbounded().shift(self.constant),
            _ => self.clone(),
        }
    }

    /// The value under an assignment of the variables (for tests). Opaque atoms have no value.
    #[cfg(test)]
    fn eval(&self, vars: &dyn Fn(VarId) -> i64) -> i64 {
        self.terms.iter().fold(self.constant, |sum, (atom, c)| {
            sum + c * match atom {
                Atom::Var { id, .. } => vars(*id),
                Atom::Div(x, c) => x.eval(vars).div_euclid(*c),
                Atom::Mod(x, c) => x.eval(vars).rem_euclid(*c),
                Atom::Bounded { index, .. } => index.eval(vars),
                Atom::Opaque { .. } => unreachable!("tests have no opaque atoms"),
            }
        })
    }
}

fn add_term(terms: &mut Vec<(Atom, i64)>, atom: &Atom, coefficient: i64) {
    match terms.binary_search_by(|(a, _)| a.cmp(atom)) {
        Ok(i) => {
            terms[i].1 += coefficient;
            if terms[i].1 == 0 {
                terms.remove(i);
            }
        }
        Err(i) => terms.insert(i, (atom.clone(), coefficient)),
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a.abs() } else { gcd(b, a % b) }
}

/// The row-major position of `at` in a tensor of `shape`.
pub fn ravel(at: &[Index], shape: &[usize]) -> Index {
    let mut stride = 1;
    let mut linear = Index::default();
    for (i, &size) in at.iter().zip(shape).rev() {
        linear = linear.add(&i.scale(stride));
        stride *= size as i64;
    }
    linear
}

/// The multi-index of row-major position `linear` in a tensor of `shape` (not empty).
pub fn unravel(linear: &Index, shape: &[usize]) -> Vec<Index> {
    let mut rest = linear.clone();
    let mut at = vec![Index::default(); shape.len()];
    for (axis, &size) in shape.iter().enumerate().rev() {
        let size = size as i64;
        let leading = shape[..axis].iter().all(|&d| d == 1);
        at[axis] = if leading { rest.clone() } else { rest.rem(size) };
        rest = if leading { Index::default() } else { rest.div(size) };
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn v(id: VarId, extent: usize) -> Index {
        Index::var(id, extent)
    }

    #[test]
    fn unravelling_and_ravelling_cancel() {
        let i = v(0, 2 * 3 * 4 * 5);
        let at = unravel(&i, &[2, 3, 4, 5]);
        assert_eq!(ravel(&at, &[2, 3, 4, 5]), i);
        let regrouped = unravel(&ravel(&at, &[2, 3, 4, 5]), &[6, 20]);
        assert_eq!(regrouped, vec![i.div(20), i.rem(20)]);
    }

    #[test]
    fn splitting_an_axis_of_independent_variables_needs_no_division() {
        let linear = ravel(&[v(0, 4), v(1, 6), v(2, 8)], &[4, 6, 8]);
        assert_eq!(unravel(&linear, &[24, 8]), vec![v(0, 4).scale(6).add(&v(1, 6)), v(2, 8)]);
        assert_eq!(unravel(&linear, &[4, 48]), vec![v(0, 4), v(1, 6).scale(8).add(&v(2, 8))]);
    }

    #[test]
    fn a_range_outside_the_divisor_keeps_the_division() {
        assert_eq!(v(0, 10).div(4).terms().len(), 1);
        assert!(matches!(v(0, 10).div(4).terms()[0].0, Atom::Div(..)));
        assert_eq!(v(0, 4).div(4), Index::constant(0));
        assert_eq!(v(0, 4).shift(-1).range(), (-1, 2));
    }

    proptest! {
        #[test]
        fn simplified_arithmetic_equals_plain_arithmetic(
            steps in prop::collection::vec((0u8..6, 1i64..9, 0u32..3), 1..12),
            values in prop::array::uniform3(0i64..7),
        ) {
            let lookup = |id: VarId| values[id as usize];
            let mut index = v(0, 7);
            let mut expected = values[0];
            for (kind, c, var) in steps {
                let safe = index.range().0 >= 0;
                match kind {
                    0 => { index = index.add(&v(var, 7).scale(c)); expected += values[var as usize] * c; }
                    1 => { index = index.scale(c); expected *= c; }
                    2 if safe => { index = index.div(c); expected /= c; }
                    3 if safe => { index = index.rem(c); expected %= c; }
                    4 => { index = index.shift(c); expected += c; }
                    5 if safe => { index = index.div(c).scale(c).add(&index.rem(c)); }
                    _ => {}
                }
                if index.range().1 > 1 << 30 { break; }
                prop_assert_eq!(index.eval(&lookup), expected);
                let (low, high) = index.range();
                prop_assert!(low <= expected && expected <= high);
            }
        }
    }
}
