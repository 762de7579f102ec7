//! Rules of the ONNX standard that a model must keep: values defined once, before their use, in every graph; functions that end;
//! attributes that hold what they declare.

mod attributes;
mod data;
mod functions;

use std::collections::{HashMap, HashSet};

use crate::error::{NodeName, StructureError, qualified};
use crate::limits::Limits;
use crate::model::{Opsets, canonical_domain, node_label};
use crate::proto::{FunctionProto, GraphProto, NodeProto};

pub use attributes::AttributeError;
pub(crate) use attributes::infer_types;
pub(crate) use data::Stored;

/// Checks the main graph with its subgraphs, and the model-local functions.
pub(crate) fn structure(
    graph: &GraphProto,
    functions: &[FunctionProto],
    opsets: &Opsets,
    limits: &Limits,
) -> Result<(), StructureError> {
    let mut checker = Checker { opsets, function: None, scopes: Vec::new() };
    checker.graph(graph)?;
    for function in functions {
        let opsets = Opsets::new(&function.opset_import)?;
        let mut checker = Checker { opsets: &opsets, function: Some(function), scopes: Vec::new() };
        checker.function(function)?;
    }
    functions::expansion(graph, functions, limits)
}

/// Who owns a node, in messages.
pub(crate) fn node_name(node: &NodeProto, opsets: &Opsets) -> NodeName {
    let domain = canonical_domain(&node.domain);
    NodeName { name: node_label(node), op: qualified(domain, &node.op_type), opset: opsets.get(domain).unwrap_or_default() }
}

/// The values of one graph.
#[derive(Default)]
struct Scope<'a> {
    /// What is defined so far.
    defined: HashSet<&'a str>,
    /// What some node of the graph defines, now or later, with the node's index.
    produced: HashMap<&'a str, usize>,
}

struct Checker<'a> {
    opsets: &'a Opsets,
    /// The function whose body is checked.
    function: Option<&'a FunctionProto>,
    /// The graph that is checked, last, and the graphs around it.
    scopes: Vec<Scope<'a>>,
}

impl<'a> Checker<'a> {
    fn graph(&mut self, graph: &'a GraphProto) -> Result<(), StructureError> {
        self.scopes.push(Scope::new(&graph.node));
        let mut inputs = HashSet::new();
        for input in &graph.input {
            if input.name.is_empty() {
                return Err(StructureError::UnnamedInput);
            }
            self.define(&input.name, || "a graph input".to_owned())?;
            inputs.insert(input.name.as_str());
        }
        let sparse = graph.sparse_initializer.iter().filter_map(|s| s.values.as_ref());
        for tensor in graph.initializer.iter().chain(sparse) {
            if tensor.name.is_empty() {
                return Err(StructureError::UnnamedInitializer);
            }
            // An initializer may give an input its default, once.
            if !inputs.remove(tensor.name.as_str()) {
                self.define(&tensor.name, || "an initializer".to_owned())?;
            }
        }
        self.nodes(&graph.node)?;
        let mut outputs = HashSet::new();
        for output in &graph.output {
            if output.name.is_empty() {
                return Err(StructureError::UnnamedOutput);
            }
            if !outputs.insert(output.name.as_str()) {
                return Err(StructureError::Duplicate { name: output.name.clone(), by: "the list of outputs".to_owned() });
            }
            self.read(&output.name, None, &graph.node)?;
        }
        self.scopes.pop();
        Ok(())
    }

    fn function(&mut self, function: &'a FunctionProto) -> Result<(), StructureError> {
        self.scopes.push(Scope::new(&function.node));
        for input in &function.input {
            if input.is_empty() {
                return Err(StructureError::UnnamedInput);
            }
            self.define(input, || format!("an input of function {:?}", function.name))?;
        }
        self.nodes(&function.node)?;
        for output in &function.output {
            self.read(output, None, &function.node)?;
        }
        self.scopes.pop();
        Ok(())
    }

    fn nodes(&mut self, nodes: &'a [NodeProto]) -> Result<(), StructureError> {
        for (index, node) in nodes.iter().enumerate() {
            if node.op_type.is_empty() {
                return Err(StructureError::NoOperator { node: node_label(node) });
            }
            for input in &node.input {
                self.read(input, Some(index), nodes)?;
            }
            attributes::check(node, self.function).map_err(|source| self.attribute_error(node, source))?;
            for attribute in &node.attribute {
                for graph in attribute.g.iter().chain(&attribute.graphs) {
                    self.graph(graph)?;
                }
            }
            for output in node.output.iter().filter(|o| !o.is_empty()) {
                self.define(output, || format!("node {}", node_name(node, self.opsets)))?;
            }
        }
        Ok(())
    }

    fn attribute_error(&self, node: &NodeProto, source: AttributeError) -> StructureError {
        StructureError::Attribute { node: Box::new(node_name(node, self.opsets)), source }
    }

    fn define(&mut self, name: &'a str, by: impl Fn() -> String) -> Result<(), StructureError> {
        let Some((scope, outer)) = self.scopes.split_last_mut() else { return Ok(()) };
        if outer.iter().any(|s| s.defined.contains(name)) {
            return Err(StructureError::Shadowed { name: name.to_owned(), by: by() });
        }
        if !scope.defined.insert(name) {
            return Err(StructureError::Duplicate { name: name.to_owned(), by: by() });
        }
        Ok(())
    }

    /// Checks that a value may be read by the node at `index` of `nodes`, or as an output of the graph.
    fn read(&self, name: &str, index: Option<usize>, nodes: &[NodeProto]) -> Result<(), StructureError> {
        if name.is_empty() || self.scopes.iter().any(|s| s.defined.contains(name)) {
            return Ok(());
        }
        let name = name.to_owned();
        let user = match index.and_then(|i| nodes.get(i)) {
            Some(node) => format!("node {}", node_name(node, self.opsets)),
            None => "the list of outputs".to_owned(),
        };
        let producer = self.scopes.iter().rev().find_map(|s| s.produced.get(name.as_str()));
        let local = self.scopes.last().and_then(|s| s.produced.get(name.as_str()));
        match (producer, index, local) {
            (None, ..) => Err(StructureError::Undefined { name, user }),
            (_, Some(user_index), Some(&producer)) if depends(nodes, producer, user_index) => {
                Err(StructureError::Cycle { name, user })
            }
            _ => Err(StructureError::Order { name, user }),
        }
    }
}

impl<'a> Scope<'a> {
    fn new(nodes: &'a [NodeProto]) -> Self {
        let produced = nodes.iter().enumerate().flat_map(|(index, node)| node.output.iter().map(move |o| (o.as_str(), index)));
        Scope { defined: HashSet::new(), produced: produced.collect() }
    }
}

/// Whether `node` depends on `on`: indices into `nodes`.
fn depends(nodes: &[NodeProto], node: usize, on: usize) -> bool {
    let produced = Scope::new(nodes).produced;
    let (mut reached, mut open) = (HashSet::from([node]), vec![node]);
    while let Some(next) = open.pop() {
        if next == on {
            return true;
        }
        let operands = nodes.get(next).into_iter().flat_map(|n| &n.input);
        let producers = operands.filter_map(|name| produced.get(name.as_str()).copied());
        open.extend(producers.filter(|&p| reached.insert(p)));
    }
    false
}
