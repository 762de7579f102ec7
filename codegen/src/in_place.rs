//! Which results overwrite the parameter that they update.

use std::collections::{BTreeMap, HashMap};

use meganeura_ir::{Graph, NodeId, Op, ParameterId};

use crate::fuse::{Group, Place, writers};
use crate::order::Edges;

/// By result: the parameter in whose place it is written. A group may do so where it reads the old value at no other element than the one that it
/// writes, and where nothing reads the old value after it: `edges` hold whatever order `groups` run in.
pub fn in_place(graph: &Graph, groups: &[Group], edges: &Edges) -> BTreeMap<NodeId, NodeId> {
    let is_output = |node: NodeId| graph.outputs().iter().any(|output| output.node == node);
    let writer = writers(groups);
    let parameters = live_parameters(graph);
    let mut in_place = BTreeMap::new();
    for update in graph.updates() {
        let (Some(&by), Some(&parameter)) = (writer.get(&update.node), parameters.get(&update.parameter)) else { continue };
        let elementwise =
            !groups[by].reads.contains(&parameter) || reads_where_it_writes(graph, &groups[by], update.node, parameter);
        let mut others = (0..groups.len()).filter(|&g| g != by && groups[g].reads.contains(&parameter));
        if elementwise && !is_output(parameter) && !is_output(update.node) && !others.any(|g| edges.reaches(by, g)) {
            in_place.entry(update.node).or_insert(parameter);
        }
    }
    in_place
}

/// The nodes of parameters that something reads.
pub fn live_parameters(graph: &Graph) -> HashMap<ParameterId, NodeId> {
    let parameter = |id: NodeId| match graph.node(id).op {
        Op::Parameter(parameter) => Some((parameter, id)),
        _ => None,
    };
    graph.live().into_iter().filter_map(parameter).collect()
}

/// Whether the group reads `parameter` only at the element of `node` that it is about to write.
fn reads_where_it_writes(graph: &Graph, group: &Group, node: NodeId, parameter: NodeId) -> bool {
    let same_size = graph.ty(node).shape.numel() == graph.ty(group.root).shape.numel();
    let stored_in_order = group.stored.iter().any(|s| {
        s.node == node
            && match &s.place {
                Place::Linear => true,
                Place::Axes(axes) => axes.iter().flatten().is_sorted(),
            }
    });
    same_size && stored_in_order && group.elementwise.contains(&parameter)
}
