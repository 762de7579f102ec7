//! The graph: an append-only arena of interned nodes in topological order.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use crate::typing::{TypeError, check_size, infer};
use crate::{DType, InputId, Op, ParameterId, TensorType};

/// Index of a node in its graph. Operands have smaller ids than their users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

impl NodeId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation and its single result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    pub op: Op,
    pub operands: Vec<NodeId>,
    pub ty: TensorType,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InputInfo {
    pub name: String,
    pub ty: TensorType,
}

/// What a parameter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// A weight of the model.
    Weight,
    /// Running statistics and other state that gradients never reach.
    Statistic,
    /// State of the optimiser.
    Optimizer,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParameterInfo {
    /// Unique in the graph: the name under which the weight came in and leaves.
    pub name: String,
    /// The type in arithmetic.
    pub ty: TensorType,
    /// The dtype in files, which checkpoints keep.
    pub stored: DType,
    pub role: ParameterRole,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutputInfo {
    pub name: String,
    pub node: NodeId,
}

/// After a run, `parameter` holds the value of `node`. All updates of a run read the values from before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Update {
    pub parameter: ParameterId,
    pub node: NodeId,
}

/// A static dataflow graph. Every size is concrete.
///
/// Nodes are interned: pushing an op on operands that it already has returns the existing node, so common
/// subexpressions never exist twice.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    interned: HashMap<(Op, Vec<NodeId>), NodeId>,
    inputs: Vec<InputInfo>,
    parameters: Vec<ParameterInfo>,
    outputs: Vec<OutputInfo>,
    updates: Vec<Update>,
    /// Per node: what it was built for.
    origins: Vec<Option<Arc<str>>>,
    origin: Option<Arc<str>>,
}

/// Why a node, an output or an update cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    #[error(transparent)]
    Type(#[from] TypeError),
    #[error("operand %{0} is not in the graph")]
    UnknownNode(u32),
    #[error("the name {0:?} is taken")]
    DuplicateName(String),
    #[error("an update of {name:?} has type {found}, the parameter {expected}")]
    UpdateType { name: String, expected: TensorType, found: TensorType },
    #[error("parameter {0:?} is updated twice")]
    DuplicateUpdate(String),
}

impl Graph {
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares an input and returns its node.
    pub fn input(&mut self, name: impl Into<String>, ty: TensorType) -> Result<NodeId, GraphError> {
        let id = self.declare_input(InputInfo { name: name.into(), ty })?;
        self.push(Op::Input(id), &[])
    }

    /// Declares a parameter and returns its node.
    pub fn parameter(&mut self, info: ParameterInfo) -> Result<NodeId, GraphError> {
        let id = self.declare_parameter(info)?;
        self.push(Op::Parameter(id), &[])
    }

    /// Declares an input that has no node yet.
    pub(crate) fn declare_input(&mut self, info: InputInfo) -> Result<InputId, GraphError> {
        check_size("input", &info.ty.shape)?;
        if self.inputs.iter().any(|i| i.name == info.name) {
            return Err(GraphError::DuplicateName(info.name));
        }
        self.inputs.push(info);
        Ok(InputId(self.inputs.len() as u32 - 1))
    }

    /// Declares a parameter that has no node yet.
    pub(crate) fn declare_parameter(&mut self, info: ParameterInfo) -> Result<ParameterId, GraphError> {
        check_size("parameter", &info.ty.shape)?;
        if self.parameters.iter().any(|p| p.name == info.name) {
            return Err(GraphError::DuplicateName(info.name));
        }
        self.parameters.push(info);
        Ok(ParameterId(self.parameters.len() as u32 - 1))
    }

    /// Adds `op` applied to `operands`, or finds it.
    pub fn push(&mut self, op: Op, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        if let Some(unknown) = operands.iter().find(|n| n.index() >= self.nodes.len()) {
            return Err(GraphError::UnknownNode(unknown.0));
        }
        let ty = match &op {
            Op::Input(i) => self.inputs.get(i.0 as usize).map(|i| i.ty.clone()).ok_or(GraphError::UnknownNode(i.0))?,
            Op::Parameter(p) => self.parameters.get(p.0 as usize).map(|p| p.ty.clone()).ok_or(GraphError::UnknownNode(p.0))?,
            _ => infer(&op, &operands.iter().map(|n| &self.nodes[n.index()].ty).collect::<Vec<_>>())?,
        };
        Ok(self.intern(op, operands.to_vec(), ty))
    }

    fn intern(&mut self, op: Op, operands: Vec<NodeId>, ty: TensorType) -> NodeId {
        let key = (op, operands);
        if let Some(&id) = self.interned.get(&key) {
            return id;
        }
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(Node { op: key.0.clone(), operands: key.1.clone(), ty });
        self.origins.push(self.origin.clone());
        self.interned.insert(key, id);
        id
    }

    /// Says what the nodes that are pushed from now on are built for: a name for messages. [`Graph::rewrite`] and [`Graph::split`] keep it.
    pub fn set_origin(&mut self, origin: Option<Arc<str>>) {
        self.origin = origin;
    }

    /// What the node was built for, at first.
    pub fn origin(&self, node: NodeId) -> Option<&Arc<str>> {
        self.origins.get(node.index())?.as_ref()
    }

    /// Names a node as a result of the graph.
    pub fn output(&mut self, name: impl Into<String>, node: NodeId) -> Result<(), GraphError> {
        let name = name.into();
        self.check(node)?;
        if self.outputs.iter().any(|o| o.name == name) {
            return Err(GraphError::DuplicateName(name));
        }
        self.outputs.push(OutputInfo { name, node });
        Ok(())
    }

    /// Makes a run replace `parameter` by the value of `node`, of equal type.
    pub fn update(&mut self, parameter: ParameterId, node: NodeId) -> Result<(), GraphError> {
        self.check(node)?;
        let info = self.parameters.get(parameter.0 as usize).ok_or(GraphError::UnknownNode(parameter.0))?;
        let found = self.ty(node);
        if *found != info.ty {
            let (expected, found) = (info.ty.clone(), found.clone());
            return Err(GraphError::UpdateType { name: info.name.clone(), expected, found });
        }
        if self.updates.iter().any(|u| u.parameter == parameter) {
            return Err(GraphError::DuplicateUpdate(info.name.clone()));
        }
        self.updates.push(Update { parameter, node });
        Ok(())
    }

    fn check(&self, node: NodeId) -> Result<(), GraphError> {
        if node.index() < self.nodes.len() { Ok(()) } else { Err(GraphError::UnknownNode(node.0)) }
    }

    /// Forgets which nodes are outputs.
    pub fn clear_outputs(&mut self) {
        self.outputs.clear();
    }

    /// Makes a run change no parameter.
    pub fn clear_updates(&mut self) {
        self.updates.clear();
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All node ids, operands before users.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    pub fn ty(&self, id: NodeId) -> &TensorType {
        &self.nodes[id.index()].ty
    }

    pub fn inputs(&self) -> &[InputInfo] {
        &self.inputs
    }

    pub fn parameters(&self) -> &[ParameterInfo] {
        &self.parameters
    }

    pub fn outputs(&self) -> &[OutputInfo] {
        &self.outputs
    }

    pub fn updates(&self) -> &[Update] {
        &self.updates
    }

    /// The id of the parameter named `name`.
    pub fn parameter_id(&self, name: &str) -> Option<ParameterId> {
        self.parameters.iter().position(|p| p.name == name).map(|i| ParameterId(i as u32))
    }

    pub fn output_node(&self, name: &str) -> Option<NodeId> {
        self.outputs.iter().find(|o| o.name == name).map(|o| o.node)
    }

    /// The nodes that outputs and updates need, operands before users.
    pub fn live(&self) -> Vec<NodeId> {
        let mut live = vec![false; self.nodes.len()];
        for root in self.roots() {
            live[root.index()] = true;
        }
        for id in self.ids().rev() {
            if live[id.index()] {
                for operand in &self.node(id).operands {
                    live[operand.index()] = true;
                }
            }
        }
        self.ids().filter(|id| live[id.index()]).collect()
    }

    /// Nodes named by outputs, then by updates.
    pub fn roots(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.outputs.iter().map(|o| o.node).chain(self.updates.iter().map(|u| u.node))
    }

    /// Rebuilds the live part of the graph, passing every non-leaf node through `rewrite`, which receives the new graph, the old
    /// node and its operands in the new graph. Inputs, parameters, outputs and updates keep their names and order.
    pub fn rewrite<E: From<GraphError>>(
        &self,
        mut rewrite: impl FnMut(&mut Graph, &Node, &[NodeId]) -> Result<NodeId, E>,
    ) -> Result<Graph, E> {
        let mut out = Graph { inputs: self.inputs.clone(), parameters: self.parameters.clone(), ..Graph::default() };
        let mut map: HashMap<NodeId, NodeId> = HashMap::new();
        for id in self.live() {
            let node = self.node(id);
            out.origin = self.origin(id).cloned();
            let operands: Vec<NodeId> = node.operands.iter().map(|o| map[o]).collect();
            let new = match &node.op {
                op if op.is_leaf() => out.push(op.clone(), &[]).map_err(E::from)?,
                _ => rewrite(&mut out, node, &operands)?,
            };
            map.insert(id, new);
        }
        out.origin = None;
        for o in &self.outputs {
            out.output(o.name.clone(), map[&o.node]).map_err(E::from)?;
        }
        for u in &self.updates {
            out.update(u.parameter, map[&u.node]).map_err(E::from)?;
        }
        Ok(out)
    }

    /// The same graph with every composite replaced by primitives, and dead nodes gone.
    pub fn decomposed(&self) -> Result<Graph, GraphError> {
        self.rewrite(|g, node, operands| match &node.op {
            Op::Composite(c) => c.decompose(g, operands),
            op => g.push(op.clone(), operands),
        })
    }

    /// Checks every invariant of the graph: see [`VerifyError`].
    pub fn verify(self) -> Result<Verified, VerifyError> {
        for id in self.ids() {
            let node = self.node(id);
            if let Some(&operand) = node.operands.iter().find(|o| **o >= id) {
                return Err(VerifyError::Order { node: id, operand });
            }
            let operands: Vec<&TensorType> = node.operands.iter().map(|o| self.ty(*o)).collect();
            let ty = match &node.op {
                Op::Input(i) => self.inputs[i.0 as usize].ty.clone(),
                Op::Parameter(p) => self.parameters[p.0 as usize].ty.clone(),
                op => infer(op, &operands).map_err(|source| VerifyError::Type { node: id, source })?,
            };
            if ty != node.ty {
                return Err(VerifyError::Declared { node: id, declared: node.ty.clone(), inferred: ty });
            }
        }
        Ok(Verified(self))
    }
}

/// A graph that passed [`Graph::verify`]. Lowering takes nothing else.
#[derive(Clone, Debug)]
pub struct Verified(Graph);

impl Verified {
    pub fn into_inner(self) -> Graph {
        self.0
    }
}

impl Deref for Verified {
    type Target = Graph;
    fn deref(&self) -> &Graph {
        &self.0
    }
}

/// A broken invariant of a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error("%{} uses %{}, which does not precede it", node.0, operand.0)]
    Order { node: NodeId, operand: NodeId },
    #[error("%{}: {source}", node.0)]
    Type { node: NodeId, source: TypeError },
    #[error("%{} is declared {declared}, its op gives {inferred}", node.0)]
    Declared { node: NodeId, declared: TensorType, inferred: TensorType },
}

#[cfg(test)]
mod tests;
