//! What had better be computed again than read from memory.

use std::collections::BTreeSet;

use meganeura_ir::{BinaryOp, DType, Graph, NodeId, Op, UnaryOp};

use super::{Fuser, Use, in_memory};

/// A reduction of at most this many elements may run as a loop inside a map.
const SHORT_REDUCTION: usize = 64;
/// The most elements of a node that is computed again rather than stored.
const MINOR_ELEMENTS: usize = 1 << 14;
/// Nodes between a statistic and its reduction.
const STATISTIC_NODES: usize = 16;
/// Of so many elements one is few.
const FEW: usize = 16;

impl Fuser<'_> {
    /// Whether `id` is arithmetic on few values: a trip through memory and a dispatch cost more than computing it again wherever it is
    /// read. Reads inside loops move out of them where they can.
    pub(super) fn is_minor(&self, id: NodeId, uses: &BTreeSet<Use>) -> bool {
        let n = self.graph.node(id);
        let read = n.operands.iter().filter(|o| in_memory(self.graph, **o)).count();
        n.op.is_pointwise()
            && read <= 2
            && n.ty.shape.numel() <= MINOR_ELEMENTS
            && !self.rests_on_reduction(id)
            && uses.iter().all(|u| !u.prologue)
    }

    /// Whether `id` moves or scales a contraction's result by its statistics, as a norm and a softmax do: that result is in memory for their
    /// sake, and reading it again costs no more than reading `id`.
    pub(super) fn is_centered(&self, id: NodeId) -> bool {
        let mut id = id;
        for depth in 0..STATISTIC_NODES {
            let n = self.graph.node(id);
            let few = |o: &NodeId| self.is_statistic(*o, n.ty.shape.numel());
            id = match (&n.op, n.operands.as_slice()) {
                _ if self.contractions.contains_key(&id) => return depth > 0,
                (Op::Reshape(_) | Op::Transpose(_), [x]) => *x,
                (Op::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul), [x, y]) if few(y) => *x,
                (Op::Binary(BinaryOp::Add | BinaryOp::Mul), [x, y]) if few(x) => *y,
                _ => return false,
            };
        }
        false
    }

    /// Whether `id` repeats what follows from a long reduction and has far fewer than `count` elements.
    fn is_statistic(&self, id: NodeId, count: usize) -> bool {
        let n = self.graph.node(id);
        match &n.op {
            Op::Broadcast { .. } | Op::Reshape(_) | Op::Transpose(_) => self.is_statistic(n.operands[0], count),
            _ => n.ty.shape.numel() <= count / FEW && self.rests_on_reduction(id),
        }
    }

    /// Whether `id` follows from a long reduction by arithmetic on its few results, as the scale of a norm does.
    pub(super) fn rests_on_reduction(&self, id: NodeId) -> bool {
        let count = self.graph.ty(id).shape.numel();
        let mut open = vec![id];
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            let n = self.graph.node(id);
            if n.ty.shape.numel() != count || !seen.insert(id) || seen.len() > STATISTIC_NODES {
                continue;
            }
            match &n.op {
                Op::Reduce { .. } | Op::ArgReduce { .. } if !is_short(self.graph, id) => return true,
                op if op.is_pointwise() || matches!(op, Op::Reshape(_)) => open.extend(&n.operands),
                _ => {}
            }
        }
        false
    }
}

pub fn is_short(graph: &Graph, reduction: NodeId) -> bool {
    let n = graph.node(reduction);
    let from = graph.ty(n.operands[0]).shape.numel();
    from <= SHORT_REDUCTION * n.ty.shape.numel().max(1)
}

/// Whether computing the node again costs less than a trip through memory: movement, and arithmetic with constants and counters. Random numbers
/// count as light so that no mask waits in memory for the backward pass.
pub fn is_light(graph: &Graph, id: NodeId) -> bool {
    let n = graph.node(id);
    match &n.op {
        Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast { .. } | Op::Slice(_) => true,
        Op::Pad(_) | Op::Unfold(_) | Op::RandomUniform { .. } => true,
        // Rounding takes a dozen instructions, and what it makes may take half the memory.
        Op::Cast(to) => !matches!(to, DType::F16 | DType::BF16),
        Op::Unary(UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Not) => true,
        Op::Binary(BinaryOp::Pow | BinaryOp::Rem) => false,
        Op::Binary(_) | Op::Compare(_) | Op::Select => n.operands.iter().filter(|o| !is_text(graph, **o)).count() <= 1,
        _ => false,
    }
}

/// Whether the node is one constant, repeated, or counts: such values are text.
fn is_text(graph: &Graph, id: NodeId) -> bool {
    let n = graph.node(id);
    match &n.op {
        Op::Constant(value) => value.shape().numel() == 1,
        Op::Iota { .. } => true,
        Op::Broadcast { .. } | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) => is_text(graph, n.operands[0]),
        _ => false,
    }
}
