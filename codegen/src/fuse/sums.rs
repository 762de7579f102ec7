//! The contractions of a graph, and those that are only added up.

use std::collections::{BTreeSet, HashMap};

use meganeura_ir::{BinaryOp, Graph, NodeId, Op};

use super::Sum;
use crate::access::contract_shape;

/// The most contractions that one kernel adds up.
const MAX_TERMS: usize = 4;

/// The contractions of `graph`, by the node that one kernel computes: alone, or added up where only the sum is read; and the nodes that
/// are only parts of such sums.
pub fn contractions(graph: &Graph) -> (HashMap<NodeId, Sum>, BTreeSet<NodeId>) {
    let mut readers: HashMap<NodeId, usize> = HashMap::new();
    for id in graph.live().into_iter().flat_map(|id| &graph.node(id).operands).chain(&graph.roots().collect::<Vec<_>>()) {
        *readers.entry(*id).or_default() += 1;
    }
    let (mut sums, mut parts): (HashMap<NodeId, Sum>, BTreeSet<NodeId>) = Default::default();
    for id in graph.live() {
        let n = graph.node(id);
        match (&n.op, n.operands.as_slice()) {
            (Op::Dot(_) | Op::Conv(_), _) => {
                sums.insert(id, Sum { value: id, terms: vec![id] });
            }
            (Op::Binary(BinaryOp::Add), &[x, y]) if x != y && readers[&x] == 1 && readers[&y] == 1 => {
                let (Some(a), Some(b)) = (sums.get(&x), sums.get(&y)) else { continue };
                let terms = [a.terms.as_slice(), &b.terms].concat();
                if terms.len() <= MAX_TERMS && terms.iter().all(|&term| alike(graph, term, terms[0])) {
                    for part in [x, y] {
                        sums.remove(&part);
                        parts.insert(part);
                    }
                    sums.insert(id, Sum { value: id, terms });
                }
            }
            _ => {}
        }
    }
    (sums, parts)
}

/// Whether two contractions divide their results in the same way.
pub fn alike(graph: &Graph, a: NodeId, b: NodeId) -> bool {
    let (a, b) = (contract_shape(graph, a), contract_shape(graph, b));
    a.batch == b.batch && a.m == b.m && a.n == b.n
}
