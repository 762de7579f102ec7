//! The execution order of groups.

use std::collections::{BTreeSet, HashMap, HashSet};

use meganeura_ir::{Graph, NodeId, Op, ParameterId};

use crate::fuse::Group;

/// Sorts groups so that each follows what it reads and, where possible, the group that replaces a parameter follows all others that
/// read it: then the update can overwrite it in place. What frees at least the memory that it takes runs as soon as it can; otherwise groups
/// keep the order of their roots.
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
    let memory = Pressure::new(graph, &groups, &writer);
    let order = edges.sorted(memory);
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

    /// A topological order that takes the smallest ready index first, and before it what costs no memory.
    fn sorted(&self, mut memory: Pressure) -> Vec<usize> {
        let mut waiting = vec![0usize; self.after.len()];
        self.after.iter().flatten().for_each(|&g| waiting[g] += 1);
        let mut ready: BTreeSet<usize> = (0..waiting.len()).filter(|&g| waiting[g] == 0).collect();
        let mut order = Vec::with_capacity(waiting.len());
        while let Some(g) = ready.iter().copied().find(|&g| memory.growth(g) <= 0).or(ready.first().copied()) {
            ready.remove(&g);
            memory.run(g);
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
    fn new(graph: &Graph, groups: &[Group], writer: &HashMap<NodeId, usize>) -> Self {
        // Outputs and updates have places of their own.
        let kept: HashSet<NodeId> = graph.roots().collect();
        let bytes = |id: NodeId| graph.ty(id).device_bytes() as i64;
        let takes = groups.iter().map(|g| g.stored.iter().map(|s| s.node).filter(|n| !kept.contains(n)).map(bytes).sum());
        let mut memory = Pressure { takes: takes.collect(), ..Pressure::default() };
        for group in groups {
            let reads: Vec<NodeId> =
                group.reads.iter().copied().filter(|n| writer.contains_key(n) && !kept.contains(n)).collect();
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
    fn ready_groups_keep_their_order_and_edges_hold() {
        let mut edges = Edges::new(4);
        edges.add(0, 2);
        edges.add(3, 1);
        let memory = || Pressure { takes: vec![1; 4], reads: vec![Vec::new(); 4], ..Pressure::default() };
        assert_eq!(edges.sorted(memory()), vec![0, 2, 3, 1]);
        assert_eq!(edges.sorted(Pressure { takes: vec![1, 1, 1, 0], ..memory() }), vec![3, 0, 1, 2]);
        assert!(edges.reaches(3, 1) && !edges.reaches(1, 3));
    }
}
