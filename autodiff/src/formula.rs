//! Arithmetic on graph nodes, written as the formula.
//!
//! [`formula`] lends the graph to a closure that combines [`Term`]s with `+ - * /` and methods, so that a derivative or a loss reads
//! as in the literature. The first graph error is kept and returned at the end.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::{Add, Div, Mul, Neg, Sub};

use meganeura_ir::{BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, ReduceOp, Shape, UnaryOp};

/// Builds the term that `build` returns.
pub(crate) fn formula(g: &mut Graph, build: impl for<'f> FnOnce(&'f Formula) -> Term<'f>) -> Result<NodeId, GraphError> {
    let Ok(node) = formula_or(g, |f| Ok::<_, Infallible>(build(f)))?;
    Ok(node)
}

/// Builds the term that `build` returns, or passes on what it returns instead of one.
pub(crate) fn formula_or<T>(
    g: &mut Graph,
    build: impl for<'f> FnOnce(&'f Formula) -> Result<Term<'f>, T>,
) -> Result<Result<NodeId, T>, GraphError> {
    let context = Formula { graph: RefCell::new(std::mem::take(g)), error: RefCell::new(None) };
    let node = build(&context).map(|term| term.node);
    *g = context.graph.into_inner();
    context.error.into_inner().map_or(Ok(node), Err)
}

/// The graph that terms are added to.
pub(crate) struct Formula {
    graph: RefCell<Graph>,
    error: RefCell<Option<GraphError>>,
}

impl Formula {
    /// Handles of nodes that the graph already has.
    pub(crate) fn terms<const N: usize>(&self, nodes: [NodeId; N]) -> [Term<'_>; N] {
        nodes.map(|node| Term { formula: self, node })
    }
}

/// A node under construction. Pointwise operands have equal types; an `f64` becomes a constant of the other operand's type.
#[derive(Clone, Copy)]
pub(crate) struct Term<'f> {
    formula: &'f Formula,
    node: NodeId,
}

/// The right operand of a pointwise operation: a term, or a number that takes the left operand's type.
pub(crate) trait Operand<'f> {
    fn like(self, other: Term<'f>) -> Term<'f>;
}

impl<'f> Operand<'f> for Term<'f> {
    fn like(self, _: Term<'f>) -> Term<'f> {
        self
    }
}

impl<'f> Operand<'f> for f64 {
    fn like(self, other: Term<'f>) -> Term<'f> {
        other.apply(|g, x| g.constant_like(x, self))
    }
}

impl<'f> Term<'f> {
    /// After an error the term stands for itself: [`formula`] discards the result.
    fn apply(self, op: impl FnOnce(&mut Graph, NodeId) -> Result<NodeId, GraphError>) -> Term<'f> {
        if self.formula.error.borrow().is_some() {
            return self;
        }
        match op(&mut self.formula.graph.borrow_mut(), self.node) {
            Ok(node) => Term { node, ..self },
            Err(error) => {
                *self.formula.error.borrow_mut() = Some(error);
                self
            }
        }
    }

    pub(crate) fn unary(self, op: UnaryOp) -> Term<'f> {
        self.apply(|g, x| g.unary(op, x))
    }

    pub(crate) fn binary(self, op: BinaryOp, other: impl Operand<'f>) -> Term<'f> {
        let other = other.like(self);
        self.apply(|g, x| g.binary(op, x, other.node))
    }

    /// A bool term.
    pub(crate) fn compare(self, op: CompareOp, other: impl Operand<'f>) -> Term<'f> {
        let other = other.like(self);
        self.apply(|g, x| g.compare(op, x, other.node))
    }

    /// `self` is bool: `a` where it holds, else `b`.
    pub(crate) fn select(self, a: Term<'f>, b: impl Operand<'f>) -> Term<'f> {
        let b = b.like(a);
        self.apply(|g, condition| g.select(condition, a.node, b.node))
    }

    pub(crate) fn cast(self, dtype: DType) -> Term<'f> {
        self.apply(|g, x| g.cast(x, dtype))
    }

    /// A scalar, repeated to the shape of `other` in its dtype.
    pub(crate) fn splat_like(self, other: Term<'f>) -> Term<'f> {
        self.apply(|g, x| {
            let ty = g.ty(other.node).clone();
            let x = g.cast(x, ty.dtype)?;
            g.broadcast_to(x, &ty.shape)
        })
    }

    /// `op` over `axes`, which disappear.
    pub(crate) fn reduce(self, op: ReduceOp, axes: &[usize]) -> Term<'f> {
        self.apply(|g, x| g.reduce(op, x, axes))
    }

    /// `op` over `axes`, repeated back to the term's shape.
    pub(crate) fn reduce_keep(self, op: ReduceOp, axes: &[usize]) -> Term<'f> {
        self.apply(|g, x| g.reduce_keep(op, x, axes))
    }

    /// The mean over `axes`, repeated back to the term's shape.
    pub(crate) fn mean_keep(self, axes: &[usize]) -> Term<'f> {
        self.apply(|g, x| g.mean_keep(x, axes))
    }

    /// The sum of all elements.
    pub(crate) fn sum(self) -> Term<'f> {
        self.apply(|g, x| g.reduce(ReduceOp::Sum, x, &all_axes(g, x)))
    }

    /// The mean of all elements.
    pub(crate) fn mean(self) -> Term<'f> {
        self.apply(|g, x| g.mean(x, &all_axes(g, x)))
    }

    /// Repeats the term, whose shape is `shape` without `axes`, along them.
    pub(crate) fn broadcast_without(self, shape: &Shape, axes: &[usize]) -> Term<'f> {
        self.apply(|g, x| g.broadcast_without(x, shape, axes))
    }
}

fn all_axes(g: &Graph, x: NodeId) -> Vec<usize> {
    (0..g.ty(x).shape.rank()).collect()
}

impl Neg for Term<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        self.unary(UnaryOp::Neg)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident),*) => { $(
        impl<'f, T: Operand<'f>> $trait<T> for Term<'f> {
            type Output = Term<'f>;
            fn $method(self, other: T) -> Term<'f> {
                self.binary(BinaryOp::$trait, other)
            }
        }

        impl<'f> $trait<Term<'f>> for f64 {
            type Output = Term<'f>;
            fn $method(self, other: Term<'f>) -> Term<'f> {
                self.like(other).binary(BinaryOp::$trait, other)
            }
        }
    )* };
}

operators!(Add add, Sub sub, Mul mul, Div div);
