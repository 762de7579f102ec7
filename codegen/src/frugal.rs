//! The order of groups where memory is short: each has a dispatch of its own, and what frees the memory that it takes runs at once.

use std::collections::{HashMap, HashSet};

use meganeura_ir::{Graph, NodeId};

use crate::fuse::Group;
use crate::order::{Edges, Launch};
use crate::profile::DeviceProfile;

/// Puts groups in execution order, as [`crate::order::order`] does, so that gradients wait for their updates no longer than they must.
pub fn frugal_order(graph: &Graph, groups: Vec<Group>, edges: &Edges, profile: &DeviceProfile) -> Vec<Launch> {
    let order = sorted(edges, Pressure::new(graph, &groups, profile));
    let mut slots: Vec<Option<Group>> = groups.into_iter().map(Some).collect();
    let groups = order.into_iter().filter_map(|g| slots[g].take()).enumerate();
    groups.map(|(level, group)| Launch { groups: vec![group], level }).collect()
}

/// A topological order that takes the smallest ready index first, and before it what costs no memory.
fn sorted(edges: &Edges, mut memory: Pressure) -> Vec<usize> {
    edges.sorted_by(|ready| {
        let next = ready.iter().copied().find(|&g| memory.growth(g) <= 0).or(ready.first().copied());
        next.inspect(|&g| memory.run(g))
    })
}

/// Bytes that groups take and free, while they are put in order.
#[derive(Default)]
struct Pressure {
    /// Per group: bytes of the intermediate results that it stores.
    takes: Vec<i64>,
    /// Per group: the intermediate results that it reads.
    reads: Vec<Vec<NodeId>>,
    /// Of each intermediate result: its bytes, and how many groups have yet to read it.
    waiting: HashMap<NodeId, (i64, usize)>,
}

impl Pressure {
    fn new(graph: &Graph, groups: &[Group], profile: &DeviceProfile) -> Self {
        // Outputs and updates have places of their own.
        let kept: HashSet<NodeId> = graph.roots().collect();
        let bytes = |id: NodeId| profile.bytes(graph.ty(id)) as i64;
        let stored = |group: &Group| group.stored.iter().map(|s| s.node).filter(|n| !kept.contains(n)).collect::<Vec<_>>();
        let written: HashSet<NodeId> = groups.iter().flat_map(stored).collect();
        let takes = groups.iter().map(|group| stored(group).into_iter().map(bytes).sum());
        let mut memory = Pressure { takes: takes.collect(), ..Pressure::default() };
        for group in groups {
            let reads: Vec<NodeId> = group.reads.iter().copied().filter(|n| written.contains(n)).collect();
            for &node in &reads {
                memory.waiting.entry(node).or_insert((bytes(node), 0)).1 += 1;
            }
            memory.reads.push(reads);
        }
        memory
    }

    /// Bytes in use after the group runs, less those before.
    fn growth(&self, g: usize) -> i64 {
        let last = self.reads[g].iter().filter_map(|node| self.waiting.get(node)).filter(|(_, readers)| *readers == 1);
        self.takes[g] - last.map(|(bytes, _)| bytes).sum::<i64>()
    }

    fn run(&mut self, g: usize) {
        for node in &self.reads[g] {
            if let Some((_, readers)) = self.waiting.get_mut(node) {
                *readers -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_groups_keep_their_order_but_for_what_costs_nothing() {
        let edges = Edges { after: vec![[2].into(), [].into(), [].into(), [1].into()] };
        let memory = || Pressure { takes: vec![1; 4], reads: vec![Vec::new(); 4], ..Pressure::default() };
        assert_eq!(sorted(&edges, memory()), vec![0, 2, 3, 1]);
        assert_eq!(sorted(&edges, Pressure { takes: vec![1, 1, 1, 0], ..memory() }), vec![3, 0, 1, 2]);
    }
}
