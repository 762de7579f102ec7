//! Constant folding while the graph is built.

use std::collections::HashMap;
use std::sync::Arc;

use meganeura_ir::{Graph, GraphError, NodeId, Op, Shape, Tensor, TensorType, interpreter};

use crate::phase::PhaseState;

/// Constants of at most this many elements fold: larger float tables stay expressions, which kernels compute as they go.
const MAX_FLOAT_ELEMENTS: usize = 1 << 12;
/// As [`MAX_FLOAT_ELEMENTS`], for integers and booleans, which may decide shapes.
const MAX_INTEGER_ELEMENTS: usize = 1 << 20;

/// Elements that folding reads and writes in one specialisation; what comes after stays in the graph. Loops that are unrolled could
/// otherwise take any time and memory.
const MAX_WORK: usize = 1 << 27;

/// A graph under construction, and the values of its nodes that are known.
#[derive(Default)]
pub(crate) struct Folder {
    pub graph: Graph,
    known: HashMap<NodeId, Arc<Tensor>>,
    work: usize,
    pub state: PhaseState,
}

impl Folder {
    /// Adds a constant.
    pub fn constant(&mut self, value: Tensor) -> Result<NodeId, GraphError> {
        let value = Arc::new(value);
        let node = self.graph.push(Op::Constant(value.clone()), &[])?;
        self.known.insert(node, value);
        Ok(node)
    }

    /// The value of a node that depends on constants only, where it is small enough to be kept.
    pub fn known(&mut self, node: NodeId) -> Option<Arc<Tensor>> {
        if !self.known.contains_key(&node) {
            let n = self.graph.node(node).clone();
            let operands: Vec<Arc<Tensor>> = n.operands.iter().map(|o| self.known.get(o).cloned()).collect::<Option<_>>()?;
            let limit = if n.ty.dtype.is_float() { MAX_FLOAT_ELEMENTS } else { MAX_INTEGER_ELEMENTS };
            let value = match &n.op {
                Op::Constant(value) => value.clone(),
                Op::Input(_) | Op::Parameter(_) => return None,
                _ if n.ty.shape.numel() > limit => return None,
                op => {
                    self.work = self.work.saturating_add(work(op, &n.ty, &operands));
                    if self.work > MAX_WORK {
                        return None;
                    }
                    let operands: Vec<&Tensor> = operands.iter().map(Arc::as_ref).collect();
                    Arc::new(interpreter::fold(op, &operands).ok()?)
                }
            };
            self.known.insert(node, value);
        }
        self.known.get(&node).cloned()
    }

    /// Evaluates what can be known among the nodes from index `first` on.
    pub fn settle(&mut self, first: usize) {
        for id in self.graph.ids().skip(first) {
            self.known(id);
        }
    }

    /// The node that users of `node` should read: its value as a constant, if known. A value that is the same everywhere is one
    /// scalar, repeated.
    pub fn materialized(&mut self, node: NodeId) -> Result<NodeId, GraphError> {
        let Some(value) = self.known(node) else { return Ok(node) };
        let size = value.dtype().size();
        let mut elements = value.bytes().chunks_exact(size);
        let uniform = match elements.next() {
            Some(first) if value.shape().numel() > 1 => elements.all(|e| e == first).then(|| first.to_vec()),
            _ => None,
        };
        let constant = match uniform {
            Some(bytes) => {
                let ty = TensorType::new(value.dtype(), Shape::scalar());
                match Tensor::from_bytes(ty, bytes) {
                    Ok(scalar) => {
                        let scalar = self.constant(scalar)?;
                        self.graph.push(Op::Broadcast { shape: value.shape().clone(), axes: Vec::new() }, &[scalar])?
                    }
                    Err(_) => node,
                }
            }
            None => self.graph.push(Op::Constant(value.clone()), &[])?,
        };
        self.known.insert(constant, value);
        Ok(constant)
    }
}

/// Elements that the evaluation of an op reads and writes, about.
fn work(op: &Op, result: &TensorType, operands: &[Arc<Tensor>]) -> usize {
    let read = operands.iter().map(|o| o.shape().numel());
    let each = match op {
        Op::Dot(dims) => dims.rhs_contract.iter().map(|&axis| operands[1].shape()[axis]).product(),
        Op::Conv(_) => operands[1].shape().numel(),
        _ => 1,
    };
    result.shape.numel().saturating_mul(each).saturating_add(read.sum())
}
