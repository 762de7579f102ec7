//! Rules of the ONNX standard that a graph must keep: names defined once, before their use.

use std::collections::HashSet;

use crate::proto::GraphProto;

use crate::error::StructureError;
use crate::model::node_label;

/// Checks single assignment, order and definedness of the main graph and of the bodies in it, whose names are unique.
pub(crate) fn structure(graph: &GraphProto) -> Result<(), StructureError> {
    check(graph, &mut HashSet::new(), "a graph input", "the list of outputs")
}

/// `defined` holds the values around the graph, and is what it was on return.
fn check<'a>(
    graph: &'a GraphProto,
    defined: &mut HashSet<&'a str>,
    input_kind: &str,
    output_list: &str,
) -> Result<(), StructureError> {
    let mut own: Vec<&str> = Vec::new();
    let duplicate = |name: &str, by: String| StructureError::Duplicate { name: name.to_owned(), by };
    for input in &graph.input {
        if input.name.is_empty() {
            return Err(StructureError::UnnamedInput);
        }
        if !defined.insert(&input.name) {
            return Err(duplicate(&input.name, input_kind.to_owned()));
        }
        own.push(&input.name);
    }
    let mut initializers: HashSet<&str> = HashSet::new();
    let sparse = graph.sparse_initializer.iter().filter_map(|s| s.values.as_ref());
    for tensor in graph.initializer.iter().chain(sparse) {
        if tensor.name.is_empty() {
            return Err(StructureError::UnnamedInitializer);
        }
        // An initializer may give an input its default.
        if !initializers.insert(&tensor.name) {
            return Err(duplicate(&tensor.name, "an initializer".to_owned()));
        }
        if defined.insert(&tensor.name) {
            own.push(&tensor.name);
        }
    }

    let later: HashSet<&str> = graph.node.iter().flat_map(|n| &n.output).map(String::as_str).collect();
    let read = |defined: &HashSet<&str>, name: &str, user: &dyn Fn() -> String| match name {
        name if name.is_empty() || defined.contains(name) => Ok(()),
        name if later.contains(name) => Err(StructureError::Order { name: name.to_owned(), user: user() }),
        name => Err(StructureError::Undefined { name: name.to_owned(), user: user() }),
    };
    for node in &graph.node {
        let user = || format!("node {} ({})", node_label(node), node.op_type);
        for input in &node.input {
            read(defined, input, &user)?;
        }
        for (attribute, body) in node.bodies() {
            let place = format!("{attribute} of {}", user());
            check(body, defined, &format!("an input of {place}"), &format!("the list of outputs of {place}"))?;
        }
        for output in node.output.iter().filter(|o| !o.is_empty()) {
            if !defined.insert(output) {
                return Err(duplicate(output, user()));
            }
            own.push(output);
        }
    }
    for output in &graph.output {
        read(defined, &output.name, &|| output_list.to_owned())?;
    }
    for name in own {
        defined.remove(name);
    }
    Ok(())
}
