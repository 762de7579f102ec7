//! The execution order of groups.

use std::collections::{BTreeSet, HashMap};

use meganeura_ir::{Graph, NodeId, Op, ParameterId};

use crate::fuse::Group;

/// Sorts groups so that each follows what it reads and, where possible, the group that replaces a parameter follows all others that
/// read it: then the update can overwrite it in place. Otherwise groups keep the order of their roots.
pub fn order(graph: &Graph, groups: Vec<Group>) -> Vec<Group> {
    let mut writer: HashMap<NodeId, usize> = HashMap::new();
    for (g, group) in groups.iter().enumerate() {
        writer.extend(group.stored.iter().map(|s| (s.node, g)));
    }
    let mut edges = Edges::new(groups.len());
    for (g, group) in groups.iter().enumerate() {
        for producer in group.reads.iter().filter_map(|n| writer.get(n)) {
            edges.add(*producer, g);
        }
    }
    let parameters: HashMap<ParameterId, NodeId> = graph
        .live()
        .into_iter()
        .filter_map(|id| match graph.node(id).op {
            Op::Parameter(p) => Some((p, id)),
            _ => None,
        })
        .collect();
    for update in graph.updates() {
        let (Some(&by), Some(parameter)) = (writer.get(&update.node), parameters.get(&update.parameter)) else { continue };
        for (reader, group) in groups.iter().enumerate() {
            if reader != by && group.reads.contains(parameter) && !edges.reaches(by, reader) {
                edges.add(reader, by);
            }
        }
    }
    let order = edges.sorted();
    let mut slots: Vec<Option<Group>> = groups.into_iter().map(Some).collect();
    order.into_iter().filter_map(|g| slots[g].take()).collect()
}

struct Edges {
    after: Vec<BTreeSet<usize>>,
}

impl Edges {
    fn new(count: usize) -> Self {
        Edges { after: vec![BTreeSet::new(); count] }
    }

    fn add(&mut self, before: usize, after: usize) {
        self.after[before].insert(after);
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        let mut seen = vec![false; self.after.len()];
        let mut open = vec![from];
        while let Some(g) = open.pop() {
            if g == to {
                return true;
            }
            if !std::mem::replace(&mut seen[g], true) {
                open.extend(&self.after[g]);
            }
        }
        false
    }

    /// A topological order that takes the smallest ready index first.
    fn sorted(&self) -> Vec<usize> {
        let mut waiting = vec![0usize; self.after.len()];
        self.after.iter().flatten().for_each(|&g| waiting[g] += 1);
        let mut ready: BTreeSet<usize> = (0..waiting.len()).filter(|&g| waiting[g] == 0).collect();
        let mut order = Vec::with_capacity(waiting.len());
        while let Some(g) = ready.pop_first() {
            order.push(g);
            for &next in &self.after[g] {
                waiting[next] -= 1;
                if waiting[next] == 0 {
                    ready.insert(next);
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_groups_keep_their_order_and_edges_hold() {
        let mut edges = Edges::new(4);
        edges.add(0, 2);
        edges.add(3, 1);
        assert_eq!(edges.sorted(), vec![0, 2, 3, 1]);
        assert!(edges.reaches(3, 1) && !edges.reaches(1, 3));
    }
}
