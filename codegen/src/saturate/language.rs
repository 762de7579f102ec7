//! The e-graph's language: the graph's operators, with attributes as typed leaf children so that patterns can bind them.
//!
//! `%2 = transpose %1 {perm=[1,0]}` is `(transpose [1,0] x)`. A pattern binds the permutation by a variable, as in
//! `(transpose ?p ?x)`, and names functions by leaves, as in `(unary neg ?x)`. Operators that no rule looks into
//! are [`TensorLang::Carried`]: an index into a table of [`Op`]s, with the operands as children.

use std::fmt;
use std::str::FromStr;

use egg::{Id, Language};
use meganeura_ir::{
    AttentionDims, BinaryOp, CompareOp, Composite, DType, DotDims, Op, ReduceOp, Shape, SliceDim, Tensor, TensorSizeError,
    TensorType, UnaryOp,
};

egg::define_language! {
    /// One e-node. Attribute children precede operands.
    pub enum TensorLang {
        Attr(Attr),
        Scalar(Scalar),
        // Function, operand.
        "unary" = Unary([Id; 2]),
        // Function, operands.
        "binary" = Binary([Id; 3]),
        // Relation, operands.
        "compare" = Compare([Id; 3]),
        "select" = Select([Id; 3]),
        // Dtype, operand.
        "cast" = Cast([Id; 2]),
        // Shape, operand.
        "reshape" = Reshape([Id; 2]),
        // Permutation, operand.
        "transpose" = Transpose([Id; 2]),
        // Shape, axes, operand.
        "broadcast" = Broadcast([Id; 3]),
        // Ranges, operand.
        "slice" = Slice([Id; 2]),
        // Pairing, operands.
        "dot" = Dot([Id; 3]),
        // Function, axes, operand.
        "reduce" = Reduce([Id; 3]),
        // Axis, operand.
        "softmax" = Softmax([Id; 2]),
        // What is known, scores, values, and a mask if there is one. No op: see `attention`.
        "attend" = Attend(Box<[Id]>),
        // What is known, queries, keys, values, and a mask if there is one.
        "attention" = Attention(Box<[Id]>),
        Carried(OpIndex, Vec<Id>),
    }
}

/// An attribute of an operator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Attr {
    Unary(UnaryOp),
    /// A pointwise composite, in the place of a unary function.
    Pointwise(Composite),
    Binary(BinaryOp),
    Compare(CompareOp),
    Reduce(ReduceOp),
    DType(DType),
    Shape(Shape),
    /// Axes, or a permutation of them.
    Axes(Vec<usize>),
    Slice(Vec<SliceDim>),
    Dot(DotDims),
    Attention(AttentionDims),
}

/// A rank-0 constant: the little-endian bytes of its element, zero-extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scalar {
    pub dtype: DType,
    pub bits: u64,
}

/// Index into the table of carried ops, which [`Facts`](super::analysis::Facts) holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpIndex(pub u32);

impl Scalar {
    /// `value`, rounded to `dtype`.
    pub fn new(dtype: DType, value: f64) -> Self {
        Self::from_bytes(dtype, Tensor::from_f64(dtype, Shape::scalar(), &[value]).bytes())
    }

    /// The one value of all elements, if there is one.
    pub fn of_uniform(tensor: &Tensor) -> Option<Self> {
        let size = tensor.dtype().size();
        let mut elements = tensor.bytes().chunks_exact(size);
        let first = elements.next()?;
        elements.all(|e| e == first).then(|| Self::from_bytes(tensor.dtype(), first))
    }

    fn from_bytes(dtype: DType, bytes: &[u8]) -> Self {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        Scalar { dtype, bits: u64::from_le_bytes(word) }
    }

    pub fn to_tensor(self) -> Result<Tensor, TensorSizeError> {
        let bytes = self.bits.to_le_bytes()[..self.dtype.size()].to_vec();
        Tensor::from_bytes(TensorType::scalar(self.dtype), bytes)
    }

    /// The value; 64-bit integers beyond 2^53 round.
    pub fn value(self) -> f64 {
        self.to_tensor().ok().and_then(|t| t.scalar_f64()).unwrap_or(f64::NAN)
    }
}

impl TensorLang {
    /// How many children are attributes.
    fn attribute_count(&self) -> usize {
        match self {
            TensorLang::Broadcast(_) | TensorLang::Reduce(_) => 2,
            TensorLang::Unary(_)
            | TensorLang::Binary(_)
            | TensorLang::Compare(_)
            | TensorLang::Cast(_)
            | TensorLang::Reshape(_)
            | TensorLang::Transpose(_)
            | TensorLang::Slice(_)
            | TensorLang::Dot(_)
            | TensorLang::Softmax(_)
            | TensorLang::Attend(_)
            | TensorLang::Attention(_) => 1,
            TensorLang::Attr(_) | TensorLang::Scalar(_) | TensorLang::Select(_) | TensorLang::Carried(..) => 0,
        }
    }

    pub fn attributes(&self) -> &[Id] {
        &self.children()[..self.attribute_count()]
    }

    pub fn operands(&self) -> &[Id] {
        &self.children()[self.attribute_count()..]
    }

    /// The e-node of `op`, or `None` for one that is carried. `attribute` makes attributes e-classes.
    pub fn from_op(op: &Op, operands: &[Id], mut attribute: impl FnMut(TensorLang) -> Id) -> Option<TensorLang> {
        let mut attr = |a| attribute(TensorLang::Attr(a));
        Some(match (op, operands) {
            (Op::Constant(t), []) if t.shape().rank() == 0 => TensorLang::Scalar(Scalar::of_uniform(t)?),
            (Op::Unary(f), &[x]) => TensorLang::Unary([attr(Attr::Unary(*f)), x]),
            (Op::Composite(c), &[x]) if is_pointwise(c) => TensorLang::Unary([attr(Attr::Pointwise(c.clone())), x]),
            (Op::Binary(f), &[x, y]) => TensorLang::Binary([attr(Attr::Binary(*f)), x, y]),
            (Op::Compare(f), &[x, y]) => TensorLang::Compare([attr(Attr::Compare(*f)), x, y]),
            (Op::Select, &[c, x, y]) => TensorLang::Select([c, x, y]),
            (Op::Cast(t), &[x]) => TensorLang::Cast([attr(Attr::DType(*t)), x]),
            (Op::Reshape(s), &[x]) => TensorLang::Reshape([attr(Attr::Shape(s.clone())), x]),
            (Op::Transpose(p), &[x]) => TensorLang::Transpose([attr(Attr::Axes(p.clone())), x]),
            (Op::Broadcast { shape, axes }, &[x]) => {
                TensorLang::Broadcast([attr(Attr::Shape(shape.clone())), attr(Attr::Axes(axes.clone())), x])
            }
            (Op::Slice(d), &[x]) => TensorLang::Slice([attr(Attr::Slice(d.clone())), x]),
            (Op::Dot(d), &[x, y]) => TensorLang::Dot([attr(Attr::Dot(d.clone())), x, y]),
            (Op::Reduce { op, axes }, &[x]) => TensorLang::Reduce([attr(Attr::Reduce(*op)), attr(Attr::Axes(axes.clone())), x]),
            (Op::Composite(Composite::Softmax { axis }), &[x]) => TensorLang::Softmax([attr(Attr::Axes(vec![*axis])), x]),
            (Op::Composite(Composite::Attention(dims)), operands) => {
                let dims = attr(Attr::Attention(dims.clone()));
                TensorLang::Attention([dims].iter().chain(operands).copied().collect())
            }
            _ => return None,
        })
    }
}

/// The op of a structured e-node whose attribute children are `attributes`; `None` for attributes, carried ops and scalars.
pub fn structured_op(node: &TensorLang, attributes: &[&Attr]) -> Option<Op> {
    Some(match (node, attributes) {
        (TensorLang::Unary(_), [Attr::Unary(f)]) => Op::Unary(*f),
        (TensorLang::Unary(_), [Attr::Pointwise(c)]) => Op::Composite(c.clone()),
        (TensorLang::Binary(_), [Attr::Binary(f)]) => Op::Binary(*f),
        (TensorLang::Compare(_), [Attr::Compare(f)]) => Op::Compare(*f),
        (TensorLang::Select(_), []) => Op::Select,
        (TensorLang::Cast(_), [Attr::DType(t)]) => Op::Cast(*t),
        (TensorLang::Reshape(_), [Attr::Shape(s)]) => Op::Reshape(s.clone()),
        (TensorLang::Transpose(_), [Attr::Axes(p)]) => Op::Transpose(p.clone()),
        (TensorLang::Broadcast(_), [Attr::Shape(s), Attr::Axes(a)]) => Op::Broadcast { shape: s.clone(), axes: a.clone() },
        (TensorLang::Slice(_), [Attr::Slice(d)]) => Op::Slice(d.clone()),
        (TensorLang::Dot(_), [Attr::Dot(d)]) => Op::Dot(d.clone()),
        (TensorLang::Reduce(_), [Attr::Reduce(op), Attr::Axes(a)]) => Op::Reduce { op: *op, axes: a.clone() },
        (TensorLang::Softmax(_), [Attr::Axes(a)]) => Op::Composite(Composite::Softmax { axis: *a.first()? }),
        (TensorLang::Attention(_), [Attr::Attention(dims)]) => Op::Composite(Composite::Attention(dims.clone())),
        _ => return None,
    })
}

/// Whether a composite is a function of one element.
fn is_pointwise(c: &Composite) -> bool {
    matches!(c, Composite::Gelu | Composite::GeluTanh | Composite::Silu | Composite::Relu)
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::Unary(u) => f.write_str(u.name()),
            Attr::Pointwise(c) => f.write_str(c.name()),
            Attr::Binary(b) => f.write_str(b.name()),
            Attr::Compare(c) => f.write_str(c.name()),
            Attr::Reduce(r) => f.write_str(r.name()),
            Attr::DType(t) => t.fmt(f),
            Attr::Shape(s) => s.fmt(f),
            Attr::Axes(a) => write!(f, "{a:?}"),
            Attr::Slice(d) => write!(f, "{d:?}"),
            Attr::Dot(d) => write!(f, "{d:?}"),
            Attr::Attention(c) => write!(f, "{c:?}"),
        }
    }
}

/// Patterns name functions only; every other attribute is bound by a variable.
impl FromStr for Attr {
    type Err = ();
    fn from_str(name: &str) -> Result<Self, ()> {
        let unary = || UnaryOp::from_name(name).map(Attr::Unary);
        let binary = || BinaryOp::from_name(name).map(Attr::Binary);
        let compare = || CompareOp::from_name(name).map(Attr::Compare);
        let reduce = || ReduceOp::from_name(name).map(Attr::Reduce);
        unary().or_else(binary).or_else(compare).or_else(reduce).ok_or(())
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.value(), self.dtype)
    }
}

/// Never: patterns bind scalars by variables.
impl FromStr for Scalar {
    type Err = ();
    fn from_str(_: &str) -> Result<Self, ()> {
        Err(())
    }
}

impl fmt::Display for OpIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op{}", self.0)
    }
}

/// Never: patterns do not name carried ops.
impl FromStr for OpIndex {
    type Err = ();
    fn from_str(_: &str) -> Result<Self, ()> {
        Err(())
    }
}
