//! Model-local functions: defined once, without recursion, and not more nodes than the limits allow once they are inlined.

use std::collections::HashMap;

use crate::error::StructureError;
use crate::limits::{Limit, Limits};
use crate::model::canonical_domain;
use crate::proto::{FunctionProto, GraphProto, NodeProto};

/// Domain, name and overload of a function.
type Key<'a> = (&'a str, &'a str, &'a str);

fn key(function: &FunctionProto) -> Key<'_> {
    (canonical_domain(&function.domain), &function.name, &function.overload)
}

#[derive(Clone, Copy)]
enum State {
    Open,
    /// Nodes after inlining.
    Counted(u64),
}

/// Checks the functions, and the size of the graph once all calls are inlined.
pub(super) fn expansion(graph: &GraphProto, functions: &[FunctionProto], limits: &Limits) -> Result<(), StructureError> {
    let mut by_key: HashMap<Key, &FunctionProto> = HashMap::new();
    for function in functions {
        if function.name.is_empty() {
            return Err(StructureError::UnnamedFunction);
        }
        if by_key.insert(key(function), function).is_some() {
            return Err(StructureError::DuplicateFunction { name: function.name.clone() });
        }
    }
    let mut counter = Counter { functions: by_key, limits, states: HashMap::new(), path: Vec::new() };
    for function in functions {
        counter.function(function)?;
    }
    let total = counter.nodes(&graph.node)?;
    limits.check(Limit::ExpandedNodes, total).map_err(StructureError::from)
}

struct Counter<'a> {
    functions: HashMap<Key<'a>, &'a FunctionProto>,
    limits: &'a Limits,
    states: HashMap<Key<'a>, State>,
    /// Functions whose bodies are being counted, outermost first.
    path: Vec<&'a str>,
}

impl<'a> Counter<'a> {
    fn nodes(&mut self, nodes: &[NodeProto]) -> Result<u64, StructureError> {
        let mut total = 0u64;
        for node in nodes {
            let own = match self.find(node) {
                Some(function) => self.function(function)?,
                None => 1,
            };
            total = total.saturating_add(own);
            for graph in node.attribute.iter().flat_map(|a| a.g.iter().chain(&a.graphs)) {
                total = total.saturating_add(self.nodes(&graph.node)?);
            }
        }
        Ok(total)
    }

    fn find(&self, node: &NodeProto) -> Option<&'a FunctionProto> {
        self.functions.get(&(canonical_domain(&node.domain), node.op_type.as_str(), node.overload.as_str())).copied()
    }

    fn function(&mut self, function: &'a FunctionProto) -> Result<u64, StructureError> {
        let key = key(function);
        match self.states.get(&key) {
            Some(State::Counted(nodes)) => return Ok(*nodes),
            Some(State::Open) => {
                let path = self.path.iter().chain([&key.1]).map(|name| (*name).to_owned()).collect();
                return Err(StructureError::Recursion { path });
            }
            None => {}
        }
        self.states.insert(key, State::Open);
        self.path.push(key.1);
        self.limits.check(Limit::FunctionDepth, self.path.len() as u64)?;
        let nodes = self.nodes(&function.node)?;
        self.path.pop();
        self.states.insert(key, State::Counted(nodes));
        Ok(nodes)
    }
}
