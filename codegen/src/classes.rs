//! Launches whose kernels are the same but for the values that they read and write: the layers of a model.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use meganeura_ir::{Graph, NodeId, Op, TensorType};

use crate::fuse::{Domain, Group, Stored, Sum};
use crate::order::Launch;

/// A launch, and the first one of its class, which is itself where there is none before it.
pub struct Member {
    pub first: usize,
    /// The nodes that make the kernel, by id: those of one class correspond.
    pub nodes: Vec<NodeId>,
}

/// What an emitted kernel depends on: nodes by their place among those of the launch.
#[derive(PartialEq, Eq, Hash)]
struct Class<'a> {
    nodes: Vec<Node<'a>>,
    groups: Vec<Outline>,
}

#[derive(PartialEq, Eq, Hash)]
struct Node<'a> {
    /// Absent where the launch only reads the node.
    op: Option<&'a Op>,
    ty: &'a TensorType,
    operands: Vec<NodeId>,
}

#[derive(PartialEq, Eq, Hash)]
struct Outline {
    root: NodeId,
    domain: Domain,
    stored: Vec<Stored>,
    /// For each stored node the parameter that it overwrites.
    overwritten: Vec<Option<NodeId>>,
    reads: Vec<NodeId>,
    nodes: Vec<NodeId>,
}

/// Divides launches into classes. `in_place` maps stored nodes to the parameters that they overwrite.
pub fn classes(graph: &Graph, launches: &[Launch], in_place: &BTreeMap<NodeId, NodeId>) -> Vec<Member> {
    let mut known: HashMap<Class, usize> = HashMap::new();
    let member = |(index, launch): (usize, &Launch)| {
        let (nodes, class) = class(graph, launch, in_place);
        let first = match known.entry(class) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => *entry.insert(index),
        };
        Member { first, nodes }
    };
    launches.iter().enumerate().map(member).collect()
}

fn class<'a>(graph: &'a Graph, launch: &Launch, in_place: &BTreeMap<NodeId, NodeId>) -> (Vec<NodeId>, Class<'a>) {
    let mut computed: BTreeSet<NodeId> = BTreeSet::new();
    let mut nodes: BTreeSet<NodeId> = BTreeSet::new();
    for group in &launch.groups {
        nodes.extend(&group.reads);
        nodes.extend(group.stored.iter().filter_map(|s| in_place.get(&s.node)));
        computed.extend(reached(graph, group));
    }
    nodes.extend(&computed);
    let nodes: Vec<NodeId> = nodes.into_iter().collect();
    let local = |id: &NodeId| NodeId(nodes.partition_point(|n| n < id) as u32);
    let node = |id: &NodeId| {
        let n = graph.node(*id);
        let is_computed = computed.contains(id);
        let operands = if is_computed { n.operands.iter().map(local).collect() } else { Vec::new() };
        Node { op: is_computed.then_some(&n.op), ty: &n.ty, operands }
    };
    let groups = launch.groups.iter().map(|group| Outline {
        root: local(&group.root),
        domain: renamed(&group.domain, local),
        stored: group.stored.iter().map(|s| Stored { node: local(&s.node), place: s.place.clone() }).collect(),
        overwritten: group.stored.iter().map(|s| in_place.get(&s.node).map(local)).collect(),
        reads: group.reads.iter().map(local).collect(),
        nodes: group.nodes.iter().map(local).collect(),
    });
    let class = Class { nodes: nodes.iter().map(node).collect(), groups: groups.collect() };
    (nodes, class)
}

/// What the kernel of `group` evaluates: all from which its results follow, up to what it reads.
fn reached(graph: &Graph, group: &Group) -> BTreeSet<NodeId> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<NodeId> = group.nodes.iter().chain(group.stored.iter().map(|s| &s.node)).copied().collect();
    while let Some(id) = open.pop() {
        if !group.reads.contains(&id) && reached.insert(id) {
            open.extend(&graph.node(id).operands);
        }
    }
    reached
}

fn renamed(domain: &Domain, local: impl Fn(&NodeId) -> NodeId) -> Domain {
    match domain {
        Domain::Map => Domain::Map,
        Domain::Row { rows } => Domain::Row { rows: rows.clone() },
        Domain::Contract { sums, place } => {
            let sum = |sum: &Sum| Sum { value: local(&sum.value), terms: sum.terms.iter().map(&local).collect() };
            Domain::Contract { sums: sums.iter().map(sum).collect(), place: place.clone() }
        }
        Domain::Attention { node, epilogue } => {
            let epilogue = epilogue.as_ref().map(|(of, place)| (local(of), place.clone()));
            Domain::Attention { node: local(node), epilogue }
        }
    }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::testing::{contraction_graphs, random_graph, rotated_gradients};
    use meganeura_ir::{DType, DotDims, Op, TensorType};

    use super::*;
    use crate::fuse::fuse;
    use crate::in_place::in_place;
    use crate::kernels::{Emitted, emit_launch};
    use crate::order::{edges, order};
    use crate::{DeviceProfile, Precision, wgsl};

    /// How many launches share the kernel of another, which must be the kernel that each would have on its own.
    fn shared(graph: &Graph, profile: &DeviceProfile) -> usize {
        let groups = fuse(graph, profile);
        let edges = edges(graph, &groups);
        let in_place = in_place(graph, &groups, &edges);
        let launches = order(graph, groups, &edges, &in_place, profile);
        let members = classes(graph, &launches, &in_place);
        let text = |kernel: &Emitted| (wgsl::print(&kernel.parts, &kernel.buffers, kernel.workgroups), kernel.bound.clone());
        for (launch, member) in launches.iter().zip(&members) {
            let own = emit_launch(graph, launch, &in_place, profile);
            let first = emit_launch(graph, &launches[member.first], &in_place, profile);
            assert_eq!(text(&own), text(&first.over(&members[member.first].nodes, &member.nodes)));
        }
        members.iter().enumerate().filter(|(i, member)| member.first != *i).count()
    }

    /// Two products alike but for what their left operands were made of: one is exact in f16, and both are in memory.
    fn exact_and_not() -> Graph {
        let mut g = Graph::new();
        let ty = |dtype| TensorType::new(dtype, [512, 512]);
        let half = g.input("h", ty(DType::F16)).unwrap();
        let [w, w2] = ["w", "w2"].map(|name| g.input(name, ty(DType::F32)).unwrap());
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
        let a = g.cast(half, DType::F32).unwrap();
        let p = g.push(Op::Dot(dims.clone()), &[a, w]).unwrap();
        let p = g.mul(p, p).unwrap();
        let q = g.push(Op::Dot(dims), &[p, w2]).unwrap();
        let q = g.mul(q, q).unwrap();
        g.output("a", a).unwrap();
        g.output("q", q).unwrap();
        g
    }

    #[test]
    fn launches_of_a_class_have_the_kernel_of_its_first() {
        let repeated = (0..40u8).map(|seed| {
            let choice = |i: u8| [i.wrapping_mul(seed | 1), i ^ seed, i.wrapping_add(seed), i / 2];
            let once: Vec<[u8; 4]> = (0..12).map(choice).collect();
            random_graph([5, 7], &[once.clone(), once.clone(), once].concat())
        });
        let named = contraction_graphs().into_iter().chain(rotated_gradients()).map(|(_, graph)| graph);
        let graphs: Vec<Graph> = repeated.chain(named).chain([exact_and_not()]).collect();
        for profile in [DeviceProfile::generic(), DeviceProfile::software(), DeviceProfile::nvidia(Precision::Accelerated)] {
            assert!(graphs.iter().map(|graph| shared(graph, &profile)).sum::<usize>() > 0, "nothing is shared");
        }
    }
}
