//! What a node of the attention family computes, and where it reads its operands.

use meganeura_ir::attention::{gradient, score_shape};
use meganeura_ir::{AttentionDims, AttentionOperand, Composite, Graph, NodeId, Op};

use crate::index::Index;

/// Which of the family's results a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Output,
    LogSumExp,
    Gradient(AttentionOperand),
}

/// A node of the attention family.
#[derive(Clone, Debug)]
pub struct Attention {
    pub dims: AttentionDims,
    pub role: Role,
    pub query: NodeId,
    pub key: NodeId,
    /// Absent for the log-sum-exp alone.
    pub value: Option<NodeId>,
    pub backward: Option<Backward>,
    pub mask: Option<NodeId>,
    /// Batch axes of the queries.
    pub batch: Vec<usize>,
    /// Batch axes along which queries share keys and values.
    pub shared: Vec<usize>,
    mask_shape: Vec<usize>,
    pub queries: usize,
    pub keys: usize,
    /// Elements of a query and of a key.
    pub size: usize,
    /// Elements of a value; 0 where there are none.
    pub value_size: usize,
}

/// What derivatives read besides the operands of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    pub cotangent: NodeId,
    pub log_sum_exp: NodeId,
    pub delta: NodeId,
}

/// The attention that `node` is, if it is one.
pub fn attention(graph: &Graph, node: NodeId) -> Option<Attention> {
    let Op::Composite(composite) = &graph.node(node).op else { return None };
    let operands = &graph.node(node).operands;
    let (dims, role, required) = match composite {
        Composite::Attention(dims) => (dims, Role::Output, 3),
        Composite::AttentionLse(dims) => (dims, Role::LogSumExp, 2),
        Composite::AttentionGradient { dims, of } => (dims, Role::Gradient(*of), gradient::MASK),
        _ => return None,
    };
    let (query, key) = (operands[gradient::QUERY], operands[gradient::KEY]);
    let value = (role != Role::LogSumExp).then(|| operands[gradient::VALUE]);
    let backward = matches!(role, Role::Gradient(_)).then(|| Backward {
        cotangent: operands[gradient::COTANGENT],
        log_sum_exp: operands[gradient::LOG_SUM_EXP],
        delta: operands[gradient::DELTA],
    });
    let mask = operands.get(required).copied();
    let (q, k) = (&graph.ty(query).shape, &graph.ty(key).shape);
    let rank = q.rank();
    let scores = score_shape(q, k);
    Some(Attention {
        dims: dims.clone(),
        role,
        query,
        key,
        value,
        backward,
        mask,
        batch: q[..rank - 2].to_vec(),
        shared: (0..rank - 2).filter(|&a| q[a] != k[a]).collect(),
        mask_shape: mask.map_or(Vec::new(), |m| graph.ty(m).shape.to_vec()),
        queries: scores[rank - 2],
        keys: scores[rank - 1],
        size: q[rank - 1],
        value_size: value.map_or(0, |v| graph.ty(v).shape[rank - 1]),
    })
}

impl Attention {
    /// Queries along the shared axes: how many batches read one key.
    pub fn sharing(&self) -> usize {
        self.shared.iter().map(|&a| self.batch[a]).product()
    }

    /// Multiplications of scores and weights.
    pub fn products(&self) -> u64 {
        let scores = self.batch.iter().chain([&self.queries, &self.keys]).fold(1u64, |n, &size| n.saturating_mul(size as u64));
        let passes = if self.backward.is_some() { 2 } else { 1 };
        scores.saturating_mul(passes * (self.size + self.value_size) as u64)
    }

    /// Batch axes of keys and values.
    pub fn own_batch(&self) -> Vec<usize> {
        (0..self.batch.len()).map(|a| if self.shared.contains(&a) { 1 } else { self.batch[a] }).collect()
    }

    /// Of a tensor with one row per query.
    pub fn query_at(&self, batch: &[Index], query: &Index, column: Option<&Index>) -> Vec<Index> {
        batch.iter().chain([query]).chain(column).cloned().collect()
    }

    /// Of a tensor with one row per key.
    pub fn key_at(&self, batch: &[Index], key: &Index, column: &Index) -> Vec<Index> {
        let own = (0..batch.len()).map(|a| if self.shared.contains(&a) { Index::default() } else { batch[a].clone() });
        own.chain([key.clone(), column.clone()]).collect()
    }

    pub fn mask_at(&self, batch: &[Index], query: &Index, key: &Index) -> Vec<Index> {
        let at = batch.iter().chain([query, key]);
        at.zip(&self.mask_shape).map(|(i, &size)| if size == 1 { Index::default() } else { i.clone() }).collect()
    }
}

/// Nodes that the kernel of another node computes on the way, and that node: the log-sum-exp beside the result, and the derivative of the
/// values beside that of the keys. Both read the same operands, and the one that comes first makes the kernel.
pub fn companions(graph: &Graph, max_bindings: usize) -> Vec<(NodeId, NodeId)> {
    let family: Vec<(NodeId, Attention)> = graph.live().into_iter().filter_map(|id| Some((id, attention(graph, id)?))).collect();
    let of_keys = |role: Role| matches!(role, Role::Gradient(AttentionOperand::Key | AttentionOperand::Value));
    let together = |(first, a): &&(NodeId, Attention), (second, b): &(NodeId, Attention)| {
        let scored = a.dims == b.dims && [a.query, a.key] == [b.query, b.key] && a.mask == b.mask;
        let forward = a.role == Role::Output && b.role == Role::LogSumExp;
        let backward = of_keys(a.role)
            && of_keys(b.role)
            && a.role != b.role
            && graph.node(*first).operands == graph.node(*second).operands
            && graph.node(*first).operands.len() + 2 <= max_bindings;
        first < second && scored && (forward || backward)
    };
    family.iter().filter_map(|second| Some((second.0, family.iter().find(|first| together(first, second))?.0))).collect()
}
