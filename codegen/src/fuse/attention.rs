//! What the kernels of attention take along: a prologue that is cheap to compute for every tile, and an epilogue of the gradients.

use std::collections::BTreeSet;

use meganeura_ir::{BinaryOp, NodeId, Op, UnaryOp};

use super::{Domain, Fuser, Place, Stored, Use};
use crate::access::Access;
use crate::attention::{Attention, Role, attention};
use crate::index::Index;
use crate::kernels::attention::column_stride;

/// Rows of one side of an attention for which the other side may be computed again.
const MAX_RECOMPUTED_ROWS: usize = 512;

impl Fuser<'_> {
    /// Whether an attention had better compute `id` for each tile that reads it than find it in memory: the rotation of short sequences.
    pub(super) fn suits_attention(&self, id: NodeId, g: usize) -> bool {
        let Domain::Attention { node, .. } = self.groups[g].domain else { return false };
        let Some(a) = attention(self.graph, node).filter(|_| self.tiles) else { return false };
        let n = self.graph.node(id);
        let cheap = match &n.op {
            Op::Unary(op) => matches!(op, UnaryOp::Neg | UnaryOp::Abs),
            Op::Binary(op) => !matches!(op, BinaryOp::Pow | BinaryOp::Rem | BinaryOp::Div),
            op => op.is_movement() || matches!(op, Op::Select | Op::Compare(_) | Op::Cast(_)),
        };
        // A contraction takes its epilogue along at no cost.
        let epilogue = n.operands.iter().any(|&o| matches!(self.graph.node(o).op, Op::Dot(_) | Op::Conv(_)));
        cheap && !epilogue && a.sharing() * a.queries.max(a.keys) <= MAX_RECOMPUTED_ROWS
    }

    pub(super) fn attention_reads(&mut self, a: &Attention) -> Vec<Access> {
        let batch = self.loop_vars(a.batch.iter().copied());
        let [query, key, column, value_column] =
            [a.queries, a.keys, a.size, a.value_size].map(|size| self.loop_vars([size]).remove(0));
        let row = || a.query_at(&batch, &query, None);
        let backward = a.backward.into_iter().flat_map(|b| {
            [(b.cotangent, a.query_at(&batch, &query, Some(&value_column))), (b.log_sum_exp, row()), (b.delta, row())]
        });
        [(a.query, a.query_at(&batch, &query, Some(&column))), (a.key, a.key_at(&batch, &key, &column))]
            .into_iter()
            .chain(a.value.map(|v| (v, a.key_at(&batch, &key, &value_column))))
            .chain(backward)
            .chain(a.mask.map(|m| (m, a.mask_at(&batch, &query, &key))))
            .map(|(operand, at)| Access { guards: Vec::new(), operand, at })
            .collect()
    }

    /// Where the gradient `id` lies relative to the root of the map `g`, if an attention can end with that map: every element reads only columns of
    /// its own row that the invocation which stores it has computed. This is the rotation of queries and keys, backward.
    pub(super) fn epilogue_place(&self, id: NodeId, g: usize, uses: &BTreeSet<Use>) -> Option<Place> {
        let a = attention(self.graph, id).filter(|a| matches!(a.role, Role::Gradient(_)))?;
        let first = self.companions.get(&id).copied().unwrap_or(id);
        let shape = &self.graph.ty(id).shape;
        let group = &self.groups[g];
        let stride = column_stride(&a, self.profile);
        let column = self.root_indices[g].last()?;
        let mut mine = uses.iter().filter(|u| u.group == g);
        let (_, lead) = mine.clone().next()?.at.split_last()?;
        let in_row = mine.all(|u| {
            let Some((own, others)) = u.at.split_last() else { return false };
            let own = own.unbounded();
            let computed = own.offset() == 0 || stride.is_some_and(|stride| own.offset() % stride as i64 == 0);
            own.terms() == column.terms() && computed && others == lead && !u.prologue
        });
        let beside = self.beside_attention(first);
        let readers: BTreeSet<usize> = beside.iter().flat_map(|stored| self.readers(stored.node)).collect();
        let suits = group.domain == Domain::Map
            && !self.has_loops(g)
            && self.rank_before(g, id, readers).is_some()
            && self.graph.ty(group.root).shape.numel() == shape.numel()
            && self.bindings_with(id, g) + beside.len() <= self.max_bindings;
        let at: Vec<Index> = lead.iter().chain([column]).cloned().collect();
        (in_row && suits).then(|| self.place_of(id, g, &at)).flatten()
    }

    /// Makes the map `g` the epilogue of the kernel that computes the gradient `id`.
    pub(super) fn end_attention(&mut self, id: NodeId, g: usize, place: Place) {
        let node = self.companions.get(&id).copied().unwrap_or(id);
        let mut beside = self.beside_attention(node);
        beside.retain(|stored| stored.node != id);
        let readers = beside.iter().flat_map(|stored| self.readers(stored.node)).collect();
        if let Some(rank) = self.rank_before(g, id, readers) {
            self.ranks[g] = rank;
        }
        self.groups[g].nodes.extend(beside.iter().map(|stored| stored.node));
        self.groups[g].stored.extend(beside);
        self.groups[g].domain = Domain::Attention { node, epilogue: Some((id, place)) };
    }

    /// Stores `id` by the kernel that computes it for an epilogue of its companion, if there is one that can run before `users`.
    pub(super) fn join_companion(&mut self, id: NodeId, users: &BTreeSet<usize>) -> bool {
        let computes =
            |domain: &Domain| matches!(domain, Domain::Attention { node, epilogue: Some((of, _)) } if *node == id && *of != id);
        let Some(g) = self.groups.iter().position(|group| computes(&group.domain)) else { return false };
        let Some(rank) = self.rank_before(g, id, users.clone()) else { return false };
        self.ranks[g] = rank;
        self.groups[g].nodes.insert(id);
        self.groups[g].stored.push(Stored { node: id, place: Place::Linear });
        true
    }

    /// What the kernel of `first` stores besides, by [`companions`](crate::attention::companions).
    pub(super) fn beside_attention(&self, first: NodeId) -> Vec<Stored> {
        let placed = |node: NodeId| self.groups.iter().any(|group| group.nodes.contains(&node));
        let own = self.companions.iter().filter(|(node, of)| **of == first && !placed(**node));
        own.map(|(&node, _)| Stored { node, place: Place::Linear }).collect()
    }
}
