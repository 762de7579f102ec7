//! One group of several that read the same value at the same place.

use std::collections::BTreeSet;
use std::mem::take;

use meganeura_ir::NodeId;

use super::{Domain, Fuser, Use};

impl Fuser<'_> {
    /// Makes one group of the maps that read the contraction `id` at their own element, so that it runs in the registers of one kernel and is
    /// never in memory. `uses` are those of `id`.
    pub(super) fn unite_readers(&mut self, id: NodeId, uses: &mut BTreeSet<Use>) {
        let mut users: Vec<usize> = uses.iter().map(|u| u.group).collect::<BTreeSet<_>>().into_iter().collect();
        users.sort_by_key(|&g| self.ranks[g]);
        let mut kept: Vec<usize> = Vec::new();
        for g in users {
            let united = kept.iter().find_map(|&into| Some((into, self.united_rank(id, into, g, uses)?)));
            match united {
                Some((into, rank)) => {
                    self.unite(into, g, rank);
                    *uses = take(uses).into_iter().map(|u| u.moved(g, into)).collect();
                }
                None => kept.push(g),
            }
        }
    }

    /// The rank of the union of the maps `a` and `b`, of which `a` has the smaller one, if both can be the epilogue of the contraction `id`.
    fn united_rank(&self, id: NodeId, a: usize, b: usize, uses: &BTreeSet<Use>) -> Option<NodeId> {
        let shape = |g: usize| &self.graph.ty(self.groups[g].root).shape;
        let is_map = |g: usize| self.groups[g].domain == Domain::Map && !self.has_loops(g);
        if !is_map(a) || !is_map(b) || shape(a) != shape(b) {
            return None;
        }
        let place = self.stored_place(id, a, uses)?;
        if self.stored_place(id, b, uses)? != place || self.graph.ty(id).shape.numel() != shape(a).numel() {
            return None;
        }
        let operands = self.contractions.get(&id)?.terms.iter().flat_map(|&term| &self.graph.node(term).operands);
        let read: BTreeSet<NodeId> = self.frontier[a].union(&self.frontier[b]).chain(operands).copied().collect();
        let stored = self.groups[a].stored.len() + self.groups[b].stored.len();
        // `id` is among what is read, and will not be.
        if read.len() - 1 + stored > self.max_bindings {
            return None;
        }
        self.rank_of_both(a, b)
    }

    /// A rank for both groups that lies after all they read and before all that reads them; `a` has the smaller rank.
    fn rank_of_both(&self, a: usize, b: usize) -> Option<NodeId> {
        let (first, last) = (self.ranks[a], self.ranks[b]);
        let read = |g: usize| self.groups[g].stored.iter().flat_map(|s| self.readers(s.node)).collect::<BTreeSet<_>>();
        if self.runs_at(b, first, &BTreeSet::new()) {
            return Some(first);
        }
        self.runs_at(b, last, &read(a)).then_some(last)
    }

    /// A rank for `g` before all of `readers`: its own, or that of `id`, whose turn it is.
    pub(super) fn rank_before(&self, g: usize, id: NodeId, readers: BTreeSet<usize>) -> Option<NodeId> {
        [self.ranks[g], id].into_iter().find(|&rank| self.runs_at(g, rank, &readers))
    }

    /// Whether `g` can have this rank: after all that stores what it reads, as far as that is decided, and before `readers`.
    fn runs_at(&self, g: usize, rank: NodeId, readers: &BTreeSet<usize>) -> bool {
        let read = &self.groups[g].reads;
        let stores = |other: usize| other != g && self.groups[other].stored.iter().any(|s| read.contains(&s.node));
        let mut writers = (0..self.groups.len()).filter(|&other| stores(other));
        writers.all(|writer| self.ranks[writer] < rank) && readers.iter().all(|&reader| self.ranks[reader] > rank)
    }

    /// The groups that read `node`, as far as that is decided.
    pub(super) fn readers(&self, node: NodeId) -> impl Iterator<Item = usize> + '_ {
        (0..self.groups.len()).filter(move |&g| self.groups[g].reads.contains(&node))
    }

    /// Moves all of `from`, which is empty then, into `into`, whose root has the same shape.
    fn unite(&mut self, into: usize, from: usize, rank: NodeId) {
        let group = &mut self.groups[from];
        let (stored, reads, nodes) = (take(&mut group.stored), take(&mut group.reads), take(&mut group.nodes));
        let group = &mut self.groups[into];
        group.stored.extend(stored);
        group.reads.extend(reads);
        group.nodes.extend(nodes);
        let (frontier, leaves) = (take(&mut self.frontier[from]), take(&mut self.leaf_reads[from]));
        self.frontier[into].extend(frontier);
        self.leaf_reads[into].extend(leaves);
        self.ranks[into] = rank;
        for uses in self.uses.values_mut().filter(|uses| uses.iter().any(|u| u.group == from)) {
            *uses = take(uses).into_iter().map(|u| u.moved(from, into)).collect();
        }
    }
}
