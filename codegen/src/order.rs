//! When groups run, and which run together.
//!
//! Groups run in levels: a level waits for the levels before it, and nothing in it waits for anything else in it. Groups of a level
//! that read the same values share a dispatch, each with workgroups of its own (horizontal fusion).

use std::collections::{BTreeMap, BTreeSet};

use meganeura_ir::{Graph, NodeId};

use crate::fuse::{Domain, Group, writers};
use crate::in_place::live_parameters;
use crate::kernels::Workgroup;
use crate::profile::DeviceProfile;

/// Groups that one dispatch runs.
#[derive(Clone, Debug)]
pub struct Launch {
    pub groups: Vec<Group>,
    pub level: usize,
}

/// The most groups in a dispatch.
const MAX_GROUPS: usize = 8;
/// The most levels that a group which nothing waits for is put off to join others.
const MAX_DELAY: usize = 12;

/// Divides groups into launches, in execution order. Each follows what it reads and, where possible, the group that replaces a parameter
/// follows all others that read it: then the update can overwrite it in place, as `in_place` says.
pub fn order(
    graph: &Graph,
    groups: Vec<Group>,
    edges: &Edges,
    in_place: &BTreeMap<NodeId, NodeId>,
    profile: &DeviceProfile,
) -> Vec<Launch> {
    let mut level = edges.levels();
    let kinds: Vec<Kind> = groups.iter().map(|group| Kind::new(graph, group, in_place, profile)).collect();
    edges.start_late(&mut level);
    let fits = |members: &[usize]| fits(&groups, &kinds, members, profile);
    edges.join_late(&mut level, &kinds, fits);
    let last = |g: usize| edges.after[g].is_empty();
    let joined = join(&level, fits, |a, b| kinds[a].suits(&kinds[b]) || last(a) && last(b) && kinds[a].resembles(&kinds[b]));
    let mut slots: Vec<Option<Group>> = groups.into_iter().map(Some).collect();
    let launch = |(level, members): (usize, Vec<usize>)| {
        let groups = members.into_iter().filter_map(|g| slots[g].take()).collect();
        Launch { groups, level }
    };
    joined.into_iter().map(launch).collect()
}

/// What decides whether groups can share a dispatch.
struct Kind {
    family: u8,
    workgroup: Workgroup,
    /// What the group reads that has more than one element.
    shared: BTreeSet<NodeId>,
    /// Buffers that it saves by overwriting parameters in place.
    replaced: usize,
}

impl Kind {
    fn new(graph: &Graph, group: &Group, in_place: &BTreeMap<NodeId, NodeId>, profile: &DeviceProfile) -> Self {
        let family = match group.domain {
            Domain::Map => 0,
            Domain::Row { .. } => 1,
            Domain::Contract { .. } => 2,
            Domain::Attention { .. } => 3,
        };
        let replaced =
            group.stored.iter().filter_map(|s| in_place.get(&s.node)).filter(|parameter| group.reads.contains(parameter)).count();
        let shared = group.reads.iter().copied().filter(|&n| graph.ty(n).shape.numel() > 1).collect();
        Kind { family, workgroup: Workgroup::of(graph, group, profile), shared, replaced }
    }

    fn resembles(&self, other: &Kind) -> bool {
        self.family == other.family && self.workgroup.invocations == other.workgroup.invocations
    }

    fn suits(&self, other: &Kind) -> bool {
        self.resembles(other) && !self.shared.is_disjoint(&other.shared)
    }
}

/// Whether one kernel can hold these groups.
fn fits(groups: &[Group], kinds: &[Kind], members: &[usize], profile: &DeviceProfile) -> bool {
    let workgroups: Vec<Workgroup> = members.iter().map(|&m| kinds[m].workgroup).collect();
    members.len() <= MAX_GROUPS
        && Workgroup::shared_bytes(&workgroups) <= profile.max_workgroup_bytes as usize
        && bindings(groups, kinds, members) <= profile.max_storage_bindings as usize
}

/// Levels with the groups of their launches, in execution order.
fn join(level: &[usize], fits: impl Fn(&[usize]) -> bool, suits: impl Fn(usize, usize) -> bool) -> Vec<(usize, Vec<usize>)> {
    let mut levels: BTreeMap<usize, Vec<Vec<usize>>> = BTreeMap::new();
    for (g, &at) in level.iter().enumerate() {
        let launches = levels.entry(at).or_default();
        let joins = |members: &&mut Vec<usize>| {
            members.iter().any(|&m| suits(m, g)) && fits(&members.iter().copied().chain([g]).collect::<Vec<_>>())
        };
        match launches.iter_mut().find(joins) {
            Some(members) => members.push(g),
            None => launches.push(vec![g]),
        }
    }
    levels.into_iter().flat_map(|(level, launches)| launches.into_iter().map(move |members| (level, members))).collect()
}

/// Buffers that a kernel of these groups binds.
fn bindings(groups: &[Group], kinds: &[Kind], members: &[usize]) -> usize {
    let reads: BTreeSet<NodeId> = members.iter().flat_map(|&m| &groups[m].reads).copied().collect();
    let stored: usize = members.iter().map(|&m| groups[m].stored.len()).sum();
    reads.len() + stored - members.iter().map(|&m| kinds[m].replaced).sum::<usize>()
}

/// What must wait for what.
pub fn edges(graph: &Graph, groups: &[Group]) -> Edges {
    let writer = writers(groups);
    let mut edges = Edges::new(groups.len());
    for (g, group) in groups.iter().enumerate() {
        for producer in group.reads.iter().filter_map(|n| writer.get(n)) {
            edges.add(*producer, g);
        }
    }
    let parameters = live_parameters(graph);
    for update in graph.updates() {
        let (Some(&by), Some(parameter)) = (writer.get(&update.node), parameters.get(&update.parameter)) else { continue };
        for (reader, group) in groups.iter().enumerate() {
            if reader != by && group.reads.contains(parameter) && !edges.reaches(by, reader) {
                edges.add(reader, by);
            }
        }
    }
    edges
}

pub struct Edges {
    /// Per group: those that wait for it.
    pub after: Vec<BTreeSet<usize>>,
}

impl Edges {
    fn new(count: usize) -> Self {
        Edges { after: vec![BTreeSet::new(); count] }
    }

    fn add(&mut self, before: usize, after: usize) {
        self.after[before].insert(after);
    }

    pub fn reaches(&self, from: usize, to: usize) -> bool {
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

    /// The earliest level of each group.
    fn levels(&self) -> Vec<usize> {
        let mut level = vec![0; self.after.len()];
        for g in self.sorted() {
            for &next in &self.after[g] {
                level[next] = level[next].max(level[g] + 1);
            }
        }
        level
    }

    /// Puts off what depends on no other group, nor on groups that do, until it is needed: its results would wait in memory.
    fn start_late(&self, level: &mut [usize]) {
        let order = self.sorted();
        let mut depends = vec![false; self.after.len()];
        for &g in &order {
            // A chain of groups that begins with leaves may be put off as a whole.
            let chain = self.after[g].len() == 1;
            for &next in &self.after[g] {
                depends[next] |= depends[g] || !chain;
            }
        }
        for &g in order.iter().rev() {
            let needed = self.after[g].iter().map(|&next| level[next]).min();
            if let (false, Some(needed)) = (depends[g], needed) {
                level[g] = level[g].max(needed - 1);
            }
        }
    }

    /// Puts off what nothing waits for until others of its kind run, those first that read the same.
    fn join_late(&self, level: &mut [usize], kinds: &[Kind], fits: impl Fn(&[usize]) -> bool) {
        let mut last: Vec<usize> = (0..self.after.len()).filter(|&g| self.after[g].is_empty()).collect();
        last.sort_by_key(|&g| level[g]);
        let tests: [fn(&Kind, &Kind) -> bool; 2] = [Kind::suits, Kind::resembles];
        for suits in tests {
            let mut alone = Vec::new();
            while let Some((&first, rest)) = last.split_first() {
                let mut together = vec![first];
                for &g in rest.iter().take_while(|&&g| level[g] <= level[first] + MAX_DELAY) {
                    together.push(g);
                    if !(suits(&kinds[first], &kinds[g]) && fits(&together)) {
                        together.pop();
                    }
                }
                let at = together.iter().map(|&g| level[g]).max().unwrap_or(0);
                together.iter().for_each(|&g| level[g] = at);
                if together.len() == 1 {
                    alone.push(first);
                }
                last.retain(|g| !together.contains(g));
            }
            last = alone;
        }
    }

    /// A topological order that takes the smallest ready index first.
    fn sorted(&self) -> Vec<usize> {
        self.sorted_by(|ready| ready.first().copied())
    }

    /// A topological order in which `choose` picks each group among those that wait for no other.
    pub fn sorted_by(&self, mut choose: impl FnMut(&BTreeSet<usize>) -> Option<usize>) -> Vec<usize> {
        let mut waiting = vec![0usize; self.after.len()];
        self.after.iter().flatten().for_each(|&g| waiting[g] += 1);
        let mut ready: BTreeSet<usize> = (0..waiting.len()).filter(|&g| waiting[g] == 0).collect();
        let mut order = Vec::with_capacity(waiting.len());
        while let Some(g) = choose(&ready) {
            ready.remove(&g);
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

    fn edges(count: usize, pairs: &[(usize, usize)]) -> Edges {
        let mut edges = Edges::new(count);
        pairs.iter().for_each(|&(before, after)| edges.add(before, after));
        edges
    }

    #[test]
    fn ready_groups_keep_their_order_and_edges_hold() {
        let edges = edges(4, &[(0, 2), (3, 1)]);
        assert_eq!(edges.sorted(), vec![0, 2, 3, 1]);
        assert!(edges.reaches(3, 1) && !edges.reaches(1, 3));
    }

    #[test]
    fn levels_are_longest_paths_and_leaves_wait_until_they_are_needed() {
        // 0 -> 1 -> 2, and 3 feeds 2 alone.
        let edges = edges(4, &[(0, 1), (1, 2), (3, 2)]);
        let mut level = edges.levels();
        assert_eq!(level, vec![0, 1, 2, 0]);
        edges.start_late(&mut level);
        assert_eq!(level, vec![0, 1, 2, 1]);
    }
}
