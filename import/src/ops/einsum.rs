//! Einstein's summation convention.

use std::collections::BTreeMap;

use meganeura_ir::{DType, DotDims, NodeId, Op, ReduceOp, Shape, SliceDim};

use super::{ANY, Row, Rule, row};
use crate::context::Context;
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Einsum",                1..=ANY, &[],   Rule::One(einsum)),
];

/// What an axis is called in an equation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    /// An axis of the ellipsis, counted from its end.
    Ellipsis(usize),
    Letter(u8),
}

/// The labels of one operand or of the result, with the place of its ellipsis.
#[derive(Default)]
struct Term {
    before: Vec<u8>,
    /// What follows the ellipsis, if there is one.
    after: Option<Vec<u8>>,
}

impl Term {
    fn parse(text: &str) -> Option<Term> {
        let letters = |text: &str| text.bytes().all(|b| b.is_ascii_alphabetic()).then(|| text.as_bytes().to_vec());
        match text.split_once("...") {
            Some((before, after)) => Some(Term { before: letters(before)?, after: Some(letters(after)?) }),
            None => Some(Term { before: letters(text)?, after: None }),
        }
    }

    fn letters(&self) -> impl Iterator<Item = u8> {
        self.before.iter().chain(self.after.iter().flatten()).copied()
    }

    /// One label per axis, with an ellipsis of `width` axes.
    fn labels(&self, width: usize) -> Vec<Label> {
        let mut labels: Vec<Label> = self.before.iter().map(|&l| Label::Letter(l)).collect();
        if let Some(after) = &self.after {
            labels.extend((0..width).rev().map(Label::Ellipsis));
            labels.extend(after.iter().map(|&l| Label::Letter(l)));
        }
        labels
    }
}

/// A tensor whose axes are labelled, each label once.
struct Labelled {
    node: NodeId,
    labels: Vec<Label>,
}

impl Labelled {
    fn axis(&self, label: Label) -> Option<usize> {
        self.labels.iter().position(|&l| l == label)
    }
}

/// `"ij,jk->ik"`: products of elements, summed over the labels that the result lacks. Operands are joined from left to right.
pub(super) fn einsum(c: &mut Context) -> Result<NodeId, OpError> {
    let equation = c.string_or("equation", "")?;
    let error = |reason| OpError::Attribute { name: "equation", value: equation.to_owned(), reason };
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match text.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (text.as_str(), None),
    };
    let not_letters = || error("terms are letters and at most one ellipsis");
    let terms: Vec<Term> = left.split(',').map(Term::parse).collect::<Option<_>>().ok_or_else(not_letters)?;
    let operands = c.all_inputs()?;
    if terms.len() != operands.len() {
        return Err(error("one term per operand is needed"));
    }
    if let Some(index) = operands.iter().position(|&x| c.ty(x).dtype == DType::Bool) {
        return Err(c.operand_error(index, "numbers are needed"));
    }
    let mut sizes: BTreeMap<Label, usize> = BTreeMap::new();
    let mut labelled = Vec::with_capacity(operands.len());
    let mut ellipsis = 0;
    for (index, (term, &node)) in terms.iter().zip(&operands).enumerate() {
        let shape = c.shape(node);
        let width = shape.rank().checked_sub(term.letters().count());
        let width = width.filter(|&width| width == 0 || term.after.is_some());
        let width = width.ok_or_else(|| c.operand_error(index, "the equation names another number of axes"))?;
        ellipsis = ellipsis.max(width);
        let labels = term.labels(width);
        for (&label, &size) in labels.iter().zip(shape.iter()) {
            let known = sizes.entry(label).or_insert(size);
            match (*known, size) {
                (a, b) if a == b => {}
                (1, b) => *known = b,
                (_, 1) => {}
                _ => return Err(c.operand_error(index, "a label has different sizes")),
            }
        }
        labelled.push((node, labels));
    }
    let result = match right {
        Some(right) => Term::parse(right).ok_or_else(not_letters)?.labels(ellipsis),
        None => implicit_result(&terms).labels(ellipsis),
    };
    let repeated = (1..result.len()).any(|i| result[..i].contains(&result[i]));
    if repeated || result.iter().any(|label| !sizes.contains_key(label)) {
        return Err(error("the result names labels of the operands, each at most once"));
    }

    let mut left: Option<Labelled> = None;
    for i in 0..labelled.len() {
        let (node, labels) = labelled[i].clone();
        let right = distinct(c, node, labels, &sizes)?;
        let needed = |label: &Label| result.contains(label) || labelled[i + 1..].iter().any(|(_, l)| l.contains(label));
        left = Some(match left {
            None => summed(c, right, needed)?,
            Some(left) => {
                let alone = |x: &Labelled| x.labels.clone();
                let (of_left, of_right) = (alone(&left), alone(&right));
                let left = summed(c, left, |label| needed(label) || of_right.contains(label))?;
                let right = summed(c, right, |label| needed(label) || of_left.contains(label))?;
                product(c, left, right, needed)?
            }
        });
    }
    let y = left.ok_or_else(|| error("one term per operand is needed"))?;
    // A label of size 1 in every operand that has it may be left out of all of them.
    let perm: Vec<usize> = result.iter().filter_map(|&label| y.axis(label)).collect();
    let transposed = c.transpose(y.node, &perm)?;
    let shape: Shape = result.iter().map(|label| sizes.get(label).copied().unwrap_or(1)).collect();
    Ok(c.reshape(transposed, shape)?)
}

/// Without `->`: the ellipsis, then the letters that occur once, in alphabetical order.
fn implicit_result(terms: &[Term]) -> Term {
    let mut counts: BTreeMap<u8, usize> = BTreeMap::new();
    for letter in terms.iter().flat_map(Term::letters) {
        *counts.entry(letter).or_default() += 1;
    }
    let once = counts.into_iter().filter(|(_, count)| *count == 1).map(|(letter, _)| letter).collect();
    Term { before: Vec::new(), after: Some(once) }
}

/// `x` with every label once: repeated labels take the diagonal. Axes of size 1 disappear, as they repeat anyway.
fn distinct(c: &mut Context, x: NodeId, labels: Vec<Label>, sizes: &BTreeMap<Label, usize>) -> Result<Labelled, OpError> {
    let shape = c.shape(x);
    let wide: Vec<usize> = (0..labels.len()).filter(|&a| shape[a] != 1).collect();
    let mut labels: Vec<Label> = wide.iter().map(|&a| labels[a]).collect();
    let mut node = c.reshape(x, wide.iter().map(|&a| shape[a]).collect::<Shape>())?;
    while let Some((first, second)) = repeated_pair(&labels) {
        let size = sizes.get(&labels[first]).copied().unwrap_or(1);
        // Both axes last, then every (size + 1)-th element of the two taken as one.
        let kept: Vec<usize> = (0..labels.len()).filter(|&a| a != first && a != second).collect();
        let perm: Vec<usize> = kept.iter().copied().chain([first, second]).collect();
        let moved = c.transpose(node, &perm)?;
        let lead: Vec<usize> = c.shape(moved)[..kept.len()].to_vec();
        let flat = c.reshape(moved, lead.iter().copied().chain([size * size]).collect::<Shape>())?;
        let whole = lead.iter().map(|&size| SliceDim { start: 0, step: 1, size });
        let diagonal = SliceDim { start: 0, step: size as isize + 1, size };
        node = c.push(Op::Slice(whole.chain([diagonal]).collect()), &[flat])?;
        labels = kept.iter().map(|&a| labels[a]).chain([labels[first]]).collect();
    }
    Ok(Labelled { node, labels })
}

/// Two axes of one label.
fn repeated_pair(labels: &[Label]) -> Option<(usize, usize)> {
    (0..labels.len()).find_map(|i| labels[i + 1..].iter().position(|&l| l == labels[i]).map(|j| (i, i + 1 + j)))
}

/// `x` summed over the labels that are not `needed`.
fn summed(c: &mut Context, x: Labelled, needed: impl Fn(&Label) -> bool) -> Result<Labelled, OpError> {
    let axes: Vec<usize> = (0..x.labels.len()).filter(|&a| !needed(&x.labels[a])).collect();
    let node = c.reduce(ReduceOp::Sum, x.node, &axes)?;
    Ok(Labelled { node, labels: x.labels.into_iter().filter(needed).collect() })
}

/// The product, summed over the common labels that are not `needed`.
fn product(c: &mut Context, x: Labelled, y: Labelled, needed: impl Fn(&Label) -> bool) -> Result<Labelled, OpError> {
    let mut dims = DotDims::default();
    let mut labels = Vec::new();
    for (axis, label) in x.labels.iter().enumerate() {
        let Some(other) = y.axis(*label) else { continue };
        if needed(label) {
            dims.lhs_batch.push(axis);
            dims.rhs_batch.push(other);
            labels.push(*label);
        } else {
            dims.lhs_contract.push(axis);
            dims.rhs_contract.push(other);
        }
    }
    labels.extend(dims.lhs_free(x.labels.len()).into_iter().map(|a| x.labels[a]));
    labels.extend(dims.rhs_free(y.labels.len()).into_iter().map(|a| y.labels[a]));
    if !dims.lhs_contract.is_empty() {
        let node = c.push(Op::Dot(dims), &[x.node, y.node])?;
        return Ok(Labelled { node, labels });
    }
    let size = |label: &Label| x.axis(*label).map(|a| c.shape(x.node)[a]).or_else(|| y.axis(*label).map(|a| c.shape(y.node)[a]));
    let shape: Shape = labels.iter().filter_map(size).collect();
    let (x, y) = (spread(c, &x, &labels, &shape)?, spread(c, &y, &labels, &shape)?);
    Ok(Labelled { node: c.mul(x, y)?, labels })
}

/// `x` repeated to `shape`, whose axes are `labels`.
fn spread(c: &mut Context, x: &Labelled, labels: &[Label], shape: &Shape) -> Result<NodeId, OpError> {
    let (axes, perm): (Vec<usize>, Vec<usize>) =
        labels.iter().enumerate().filter_map(|(axis, label)| x.axis(*label).map(|own| (axis, own))).unzip();
    let node = c.transpose(x.node, &perm)?;
    if c.shape(node) == *shape {
        return Ok(node);
    }
    Ok(c.push(Op::Broadcast { shape: shape.clone(), axes }, &[node])?)
}
