//! What is known of each e-class: the attribute it stands for, or the type of its tensor and the constant that fills it.
//!
//! A class whose tensor is one repeated constant gets that constant, broadcast, as a member: constants fold here.

use std::cell::RefCell;
use std::collections::HashMap;

use egg::{Analysis, DidMerge, EGraph, Id};
use meganeura_ir::interpreter::fold;
use meganeura_ir::{DTypeClass, Graph, NodeId, Op, Shape, Tensor, TensorType, infer, int_range};

use super::attention::{ConstantMask, attended_type};
use super::language::{Attr, OpIndex, Scalar, TensorLang, structured_op};

pub type TensorGraph = EGraph<TensorLang, Facts>;

/// What is known of one e-class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    Attribute(Attr),
    Tensor {
        ty: TensorType,
        /// The value of every element, where it is one known constant.
        splat: Option<Scalar>,
    },
    /// A node that breaks its type rule. Nothing is ever merged with it.
    IllTyped,
}

/// The ops that e-nodes carry by index.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    carried: Vec<Carried>,
    index: HashMap<Op, OpIndex>,
    /// What is known of masks that depend on constants only.
    pub masks: RefCell<HashMap<Id, ConstantMask>>,
}

#[derive(Clone, Debug)]
struct Carried {
    op: Op,
    /// The type and the value of a leaf.
    leaf: Option<(TensorType, Option<Scalar>)>,
}

impl Facts {
    fn op(&self, index: OpIndex) -> &Op {
        &self.carried[index.0 as usize].op
    }

    /// Leaves are never shared, so that large constants are not hashed; the graph has interned them.
    fn carry(&mut self, op: &Op, ty: &TensorType) -> OpIndex {
        let next = OpIndex(self.carried.len() as u32);
        if op.is_leaf() {
            let splat = if let Op::Constant(t) = op { Scalar::of_uniform(t) } else { None };
            self.carried.push(Carried { op: op.clone(), leaf: Some((ty.clone(), splat)) });
            return next;
        }
        if let Some(&index) = self.index.get(op) {
            return index;
        }
        self.index.insert(op.clone(), next);
        self.carried.push(Carried { op: op.clone(), leaf: None });
        next
    }
}

/// The e-graph of the live part of `graph`, and the e-class of each live node in the order of [`Graph::live`].
pub fn to_egraph(graph: &Graph) -> (TensorGraph, Vec<(NodeId, TensorLang, Id)>) {
    let mut egraph = TensorGraph::new(Facts::default());
    let mut classes: HashMap<NodeId, Id> = HashMap::new();
    let mut nodes = Vec::new();
    for id in graph.live() {
        let node = graph.node(id);
        let operands: Vec<Id> = node.operands.iter().map(|o| classes[o]).collect();
        let enode = TensorLang::from_op(&node.op, &operands, |a| egraph.add(a)).unwrap_or_else(|| {
            let index = egraph.analysis.carry(&node.op, &node.ty);
            TensorLang::Carried(index, operands)
        });
        let class = egraph.add(enode.clone());
        classes.insert(id, class);
        nodes.push((id, enode, class));
    }
    (egraph, nodes)
}

/// The op of a tensor e-node; `None` for an attribute.
pub fn op_of(egraph: &TensorGraph, node: &TensorLang) -> Option<Op> {
    match node {
        TensorLang::Attr(_) => None,
        TensorLang::Scalar(s) => s.to_tensor().ok().map(|t| Op::Constant(t.into())),
        TensorLang::Carried(index, _) => Some(egraph.analysis.op(*index).clone()),
        _ => {
            let attributes: Option<Vec<&Attr>> = node.attributes().iter().map(|&a| attribute(egraph, a)).collect();
            structured_op(node, &attributes?)
        }
    }
}

pub fn attribute(egraph: &TensorGraph, id: Id) -> Option<&Attr> {
    match &egraph[id].data {
        Fact::Attribute(a) => Some(a),
        _ => None,
    }
}

pub fn tensor_type(egraph: &TensorGraph, id: Id) -> Option<&TensorType> {
    match &egraph[id].data {
        Fact::Tensor { ty, .. } => Some(ty),
        _ => None,
    }
}

pub fn splat(egraph: &TensorGraph, id: Id) -> Option<Scalar> {
    match &egraph[id].data {
        Fact::Tensor { splat, .. } => *splat,
        _ => None,
    }
}

impl Analysis<TensorLang> for Facts {
    type Data = Fact;

    fn make(egraph: &mut TensorGraph, node: &TensorLang, _: Id) -> Fact {
        match node {
            TensorLang::Attr(a) => return Fact::Attribute(a.clone()),
            TensorLang::Scalar(s) => return Fact::Tensor { ty: TensorType::scalar(s.dtype), splat: Some(*s) },
            TensorLang::Carried(index, _) => {
                if let Some((ty, splat)) = &egraph.analysis.carried[index.0 as usize].leaf {
                    return Fact::Tensor { ty: ty.clone(), splat: *splat };
                }
            }
            TensorLang::Attend(children) => {
                let types = || attended_type(tensor_type(egraph, *children.get(1)?)?, tensor_type(egraph, *children.get(2)?)?);
                return types().map_or(Fact::IllTyped, |ty| Fact::Tensor { ty, splat: None });
            }
            _ => {}
        }
        tensor_fact(egraph, node).unwrap_or(Fact::IllTyped)
    }

    fn merge(&mut self, a: &mut Fact, b: Fact) -> DidMerge {
        match (a, b) {
            (Fact::Tensor { splat: known @ None, .. }, Fact::Tensor { splat: found @ Some(_), .. }) => {
                *known = found;
                DidMerge(true, false)
            }
            (a, b) => DidMerge(false, *a != b),
        }
    }

    fn modify(egraph: &mut TensorGraph, id: Id) {
        let Fact::Tensor { ty, splat: Some(value) } = &egraph[id].data else { return };
        let (shape, value) = (ty.shape.clone(), *value);
        let repeated = broadcast_scalar(egraph, value, shape);
        egraph.union(id, repeated);
    }
}

/// `value` in every element of `shape`.
fn broadcast_scalar(egraph: &mut TensorGraph, value: Scalar, shape: Shape) -> Id {
    let scalar = egraph.add(TensorLang::Scalar(value));
    if shape.rank() == 0 {
        return scalar;
    }
    let shape = egraph.add(TensorLang::Attr(Attr::Shape(shape)));
    let axes = egraph.add(TensorLang::Attr(Attr::Axes(Vec::new())));
    egraph.add(TensorLang::Broadcast([shape, axes, scalar]))
}

fn tensor_fact(egraph: &TensorGraph, node: &TensorLang) -> Option<Fact> {
    let op = op_of(egraph, node)?;
    let operands = node.operands();
    let types: Option<Vec<&TensorType>> = operands.iter().map(|&o| tensor_type(egraph, o)).collect();
    let ty = infer(&op, &types?).ok()?;
    let splats: Option<Vec<Scalar>> = operands.iter().map(|&o| splat(egraph, o)).collect();
    let splat = splats.and_then(|s| fold_splat(&op, &s));
    Some(Fact::Tensor { ty, splat })
}

/// The constant that fills the result of `op` on operands that constants fill.
fn fold_splat(op: &Op, operands: &[Scalar]) -> Option<Scalar> {
    match op {
        Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast { .. } | Op::Slice(_) => operands.first().copied(),
        _ if op.is_pointwise() => fold_scalar(op, operands),
        _ => None,
    }
}

/// The value of a pointwise op on scalars. What leaves the finite numbers, or an integer's range on devices, stays unfolded.
fn fold_scalar(op: &Op, operands: &[Scalar]) -> Option<Scalar> {
    let tensors: Vec<Tensor> = operands.iter().map(|s| s.to_tensor().ok()).collect::<Option<_>>()?;
    let result = fold(op, &tensors.iter().collect::<Vec<_>>()).ok()?;
    let scalar = Scalar::of_uniform(&result)?;
    operands.iter().chain([&scalar]).all(is_exact).then_some(scalar)
}

fn is_exact(scalar: &Scalar) -> bool {
    match scalar.dtype.class() {
        DTypeClass::Bool => true,
        DTypeClass::Float => scalar.value().is_finite(),
        DTypeClass::Int => {
            let (low, high) = int_range(scalar.dtype);
            (low as f64..=high as f64).contains(&scalar.value())
        }
    }
}
