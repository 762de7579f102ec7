//! Model-local functions become the nodes of their bodies, and every value gets a name of its own.
//!
//! After [`flatten`] there are no functions, each node knows the version of its operator set, and a name means one value
//! throughout the model: names in bodies that occur elsewhere, and all names in functions, begin with the path of their node.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use crate::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto};
use prost::Message;

use crate::error::{ImportError, StructureError, qualified};
use crate::model::{Opsets, canonical_domain, check_opset, node_label};
use crate::wire::Locator;

/// Bodies in bodies and calls in calls.
const MAX_NESTING: usize = 32;
/// Bytes that the copies of functions take, by their size in the file and a constant for each node.
const MAX_EXPANSION: usize = 1 << 26;
/// What a node takes beyond its size in the file.
const NODE_BYTES: usize = 256;

pub(crate) struct Flattened {
    pub graph: GraphProto,
    /// Names for the tensors that functions hold, by ordinal in the file: each is one tensor, however often the function is called.
    pub function_tensors: HashMap<u64, String>,
}

/// Expands calls of `functions` and makes names unique. `opsets` are those of the model.
pub(crate) fn flatten(mut graph: GraphProto, functions: &[FunctionProto], opsets: &Opsets) -> Result<Flattened, ImportError> {
    let mut flattener = Flattener {
        functions: HashMap::with_capacity(functions.len()),
        names: defined(&graph).map(|name| (name.to_owned(), 0)).collect(),
        calls: Vec::new(),
        budget: MAX_EXPANSION,
        function_tensors: HashMap::new(),
    };
    for function in functions {
        if flattener.functions.insert(key(function), function).is_some() {
            return Err(StructureError::DuplicateFunction { name: function_name(function) }.into());
        }
    }
    let frame = Frame { opsets, call: None };
    let scope = Scope { outer: None, names: HashMap::new(), frame: &frame };
    graph.node = flattener.nodes(std::mem::take(&mut graph.node), &scope, 0)?;
    Ok(Flattened { graph, function_tensors: flattener.function_tensors })
}

/// Domain, name and overload.
type Key<'a> = (&'a str, &'a str, &'a str);

fn key(function: &FunctionProto) -> Key<'_> {
    (canonical_domain(&function.domain), &function.name, &function.overload)
}

fn function_name(function: &FunctionProto) -> String {
    qualified(canonical_domain(&function.domain), &function.name)
}

/// The model, or a call of a function: what nodes take their attributes and operator sets from.
struct Frame<'s> {
    opsets: &'s Opsets,
    call: Option<Call<'s>>,
}

struct Call<'s> {
    function: &'s FunctionProto,
    attributes: &'s [AttributeProto],
    /// What names in the body begin with.
    path: &'s str,
}

impl Call<'_> {
    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        let named = |attributes: &'_ [AttributeProto]| attributes.iter().position(|a| a.name == name);
        match named(self.attributes) {
            Some(at) => self.attributes.get(at),
            None => self.function.attribute_proto.get(named(&self.function.attribute_proto)?),
        }
    }
}

/// New names of the values of one graph or one function body.
struct Scope<'s> {
    /// The graph around this one, whose values it sees.
    outer: Option<&'s Scope<'s>>,
    names: HashMap<String, String>,
    frame: &'s Frame<'s>,
}

impl Scope<'_> {
    /// Gives `name` its new name. Functions do not see the values of their callers.
    fn rename(&self, name: &mut String, user: impl FnOnce() -> String) -> Result<(), StructureError> {
        let mut scope = Some(self);
        while let Some(Scope { outer, names, .. }) = scope {
            if let Some(new) = names.get(name.as_str()) {
                new.clone_into(name);
                return Ok(());
            }
            scope = *outer;
        }
        match self.frame.call {
            Some(_) if !name.is_empty() => Err(StructureError::Undefined { name: name.clone(), user: user() }),
            _ => Ok(()),
        }
    }
}

/// Names of the values that a graph defines, unnamed ones left out.
fn defined(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let sparse = graph.sparse_initializer.iter().filter_map(|s| s.values.as_ref());
    let tensors = graph.initializer.iter().chain(sparse).map(|t| t.name.as_str());
    let results = graph.node.iter().flat_map(|n| &n.output).map(String::as_str);
    graph.input.iter().map(|i| i.name.as_str()).chain(tensors).chain(results).filter(|name| !name.is_empty())
}

struct Flattener<'a> {
    functions: HashMap<Key<'a>, &'a FunctionProto>,
    /// Every name that is taken, and how many others were derived from it.
    names: HashMap<String, usize>,
    /// The functions that are being expanded.
    calls: Vec<Key<'a>>,
    budget: usize,
    function_tensors: HashMap<u64, String>,
}

impl<'a> Flattener<'a> {
    fn spend(&mut self, bytes: usize) -> Result<(), StructureError> {
        self.budget = self.budget.checked_sub(bytes).ok_or(StructureError::Expansion(MAX_EXPANSION))?;
        Ok(())
    }

    /// `name`, or a name made of it that no other value has.
    fn unique(&mut self, name: String) -> Result<String, StructureError> {
        self.spend(name.len())?;
        let mut unique = name.clone();
        while self.names.contains_key(&unique) {
            let derived = self.names.entry(name.clone()).or_default();
            *derived += 1;
            unique = format!("{name}_{derived}");
        }
        self.names.insert(unique.clone(), 0);
        Ok(unique)
    }

    fn nodes(&mut self, nodes: Vec<NodeProto>, scope: &Scope, depth: usize) -> Result<Vec<NodeProto>, ImportError> {
        if depth > MAX_NESTING {
            return Err(StructureError::Nesting(MAX_NESTING).into());
        }
        let mut flat = Vec::with_capacity(nodes.len());
        for mut node in nodes {
            if let Some(call) = &scope.frame.call {
                self.instantiate(&mut node, call)?;
            } else if let Some(a) = node.attribute.iter().find(|a| !a.ref_attr_name.is_empty()) {
                return Err(attribute_reference(&node, a, "it is in no function").into());
            }
            for i in 0..node.input.len() {
                let mut name = std::mem::take(&mut node.input[i]);
                scope.rename(&mut name, || format!("node {} ({})", node_label(&node), node.op_type))?;
                node.input[i] = name;
            }
            for name in &mut node.output {
                scope.rename(name, String::new)?;
            }
            let domain = canonical_domain(&node.domain);
            node.opset = scope.frame.opsets.get(domain);
            if let Some(&function) = self.functions.get(&(domain, node.op_type.as_str(), node.overload.as_str())) {
                self.call(&node, function, depth, &mut flat)?;
                continue;
            }
            if node.attribute.iter().any(|a| a.g.is_some()) {
                let path = path(&node);
                for attribute in &mut node.attribute {
                    if let Some(body) = &mut attribute.g {
                        self.body(body, scope, &format!("{path}/{}", attribute.name), depth + 1)?;
                    }
                }
            }
            flat.push(node);
        }
        Ok(flat)
    }

    /// A node of a function with the attributes of a call.
    fn instantiate(&mut self, node: &mut NodeProto, call: &Call) -> Result<(), StructureError> {
        if let Some(output) = node.output.first() {
            let own = |a: &&AttributeProto| a.ref_attr_name.is_empty();
            if let Some(tensor) = node.attribute.iter().filter(own).find_map(|a| a.t.as_ref()) {
                self.name_tensor(tensor, call, output)?;
            }
        }
        if !node.name.is_empty() {
            node.name = format!("{}/{}", call.path, node.name);
            self.spend(node.name.len())?;
        }
        for attribute in std::mem::take(&mut node.attribute) {
            if attribute.ref_attr_name.is_empty() {
                node.attribute.push(attribute);
                continue;
            }
            // An attribute that neither the call nor the function gives has the default of the operator.
            let Some(given) = call.attribute(&attribute.ref_attr_name) else { continue };
            if given.g.is_some() || !given.graphs.is_empty() {
                return Err(attribute_reference(node, &attribute, "graphs as attributes of functions are not supported"));
            }
            self.spend(given.encoded_len())?;
            node.attribute.push(AttributeProto { name: attribute.name, ..given.clone() });
        }
        Ok(())
    }

    /// Names a tensor of a function after the function.
    fn name_tensor(&mut self, tensor: &TensorProto, call: &Call, name: &str) -> Result<(), StructureError> {
        if let Some(Locator { ordinal, .. }) = Locator::from_bytes(&tensor.raw_data)
            && !self.function_tensors.contains_key(&ordinal)
        {
            let unique = self.unique(format!("{}/{name}", call.function.name))?;
            self.function_tensors.insert(ordinal, unique);
        }
        Ok(())
    }

    /// Appends the nodes of the function that `node` calls.
    fn call(
        &mut self,
        node: &NodeProto,
        function: &'a FunctionProto,
        depth: usize,
        flat: &mut Vec<NodeProto>,
    ) -> Result<(), ImportError> {
        let key = key(function);
        if self.calls.contains(&key) {
            let path = self.calls.iter().chain([&key]).map(|(domain, name, _)| qualified(domain, name)).collect();
            return Err(StructureError::Recursion { path }.into());
        }
        let misfit = |reason| StructureError::Call { node: node_label(node), function: function_name(function), reason };
        if node.input.len() > function.input.len() {
            return Err(misfit("it has more inputs").into());
        }
        if node.output.len() > function.output.len() {
            return Err(misfit("it has more outputs").into());
        }
        let opsets = Opsets::new(&function.opset_import)?;
        check_opset(&opsets)?;

        let path = path(node);
        let mut names = HashMap::new();
        let actual = |names: &[String], at: usize| names.get(at).cloned().unwrap_or_default();
        for (i, formal) in function.input.iter().enumerate() {
            if names.insert(formal.clone(), actual(&node.input, i)).is_some() {
                return Err(misfit("two inputs of the function have one name").into());
            }
        }
        let formals: HashSet<&str> = function.input.iter().map(String::as_str).collect();
        let results = || function.node.iter().flat_map(|n| &n.output).filter(|o| !o.is_empty());
        if results().any(|o| formals.contains(o.as_str())) {
            return Err(misfit("the function defines the name of an input again").into());
        }
        // Outputs that have another name already.
        let mut copies = Vec::new();
        for (i, formal) in function.output.iter().enumerate() {
            let actual = actual(&node.output, i);
            match names.entry(formal.clone()) {
                _ if actual.is_empty() => {}
                Entry::Occupied(known) => copies.push((known.get().clone(), actual)),
                Entry::Vacant(new) => {
                    new.insert(actual);
                }
            }
        }
        for result in results() {
            if !names.contains_key(result) {
                let unique = self.unique(format!("{path}/{result}"))?;
                names.insert(result.clone(), unique);
            }
        }

        self.spend(function.node.iter().map(|n| n.encoded_len() + NODE_BYTES).sum())?;
        let call = Call { function, attributes: &node.attribute, path: &path };
        let frame = Frame { opsets: &opsets, call: Some(call) };
        let scope = Scope { outer: None, names, frame: &frame };
        self.calls.push(key);
        flat.extend(self.nodes(function.node.clone(), &scope, depth + 1)?);
        self.calls.pop();
        flat.extend(copies.into_iter().map(|(from, to)| NodeProto {
            op_type: "Identity".to_owned(),
            input: vec![from],
            output: vec![to],
            opset: opsets.get("").or(node.opset),
            ..NodeProto::default()
        }));
        Ok(())
    }

    /// A graph in an attribute: names in it that are free stay.
    fn body(&mut self, graph: &mut GraphProto, outer: &Scope, path: &str, depth: usize) -> Result<(), ImportError> {
        let mut names = HashMap::new();
        let call = outer.frame.call.as_ref();
        for name in defined(graph) {
            if names.contains_key(name) {
                continue;
            }
            let free = call.is_none() && !self.names.contains_key(name);
            let unique = self.unique(if free { name.to_owned() } else { format!("{path}/{name}") })?;
            names.insert(name.to_owned(), unique);
        }
        if let Some(call) = call {
            for tensor in &graph.initializer {
                self.name_tensor(tensor, call, &tensor.name)?;
            }
        }
        let scope = Scope { outer: Some(outer), names, frame: outer.frame };
        let sparse = graph.sparse_initializer.iter_mut().filter_map(|s| s.values.as_mut());
        let tensors = graph.initializer.iter_mut().chain(sparse).map(|t| &mut t.name);
        let values = graph.input.iter_mut().chain(&mut graph.output).map(|info| &mut info.name);
        for name in values.chain(tensors) {
            scope.rename(name, || format!("the list of outputs of {path}"))?;
        }
        graph.value_info.clear();
        graph.node = self.nodes(std::mem::take(&mut graph.node), &scope, depth)?;
        Ok(())
    }
}

/// What names in the bodies of a node begin with.
fn path(node: &NodeProto) -> String {
    let named = std::iter::once(&node.name).chain(&node.output).find(|name| !name.is_empty());
    named.unwrap_or(&node.op_type).clone()
}

fn attribute_reference(node: &NodeProto, attribute: &AttributeProto, reason: &'static str) -> StructureError {
    StructureError::AttributeReference {
        node: node_label(node),
        attribute: attribute.name.clone(),
        found: attribute.ref_attr_name.clone(),
        reason,
    }
}
