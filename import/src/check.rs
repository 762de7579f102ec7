//! Rules of the ONNX standard that a graph must keep: names defined once, before their use.

use std::collections::HashSet;

use crate::proto::GraphProto;

use crate::error::StructureError;
use crate::model::node_label;

/// Checks single assignment, order and definedness of the main graph.
pub(crate) fn structure(graph: &GraphProto) -> Result<(), StructureError> {
    let mut defined: HashSet<&str> = HashSet::new();
    let duplicate = |name: &str, by: String| StructureError::Duplicate { name: name.to_owned(), by };
    for input in &graph.input {
        if input.name.is_empty() {
            return Err(StructureError::UnnamedInput);
        }
        if !defined.insert(&input.name) {
            return Err(duplicate(&input.name, "a graph input".to_owned()));
        }
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
        defined.insert(&tensor.name);
    }

    let later: HashSet<&str> = graph.node.iter().flat_map(|n| &n.output).map(String::as_str).collect();
    let check = |defined: &HashSet<&str>, name: &str, user: String| match name {
        name if name.is_empty() || defined.contains(name) => Ok(()),
        name if later.contains(name) => Err(StructureError::Order { name: name.to_owned(), user }),
        name => Err(StructureError::Undefined { name: name.to_owned(), user }),
    };
    for node in &graph.node {
        let user = || format!("node {} ({})", node_label(node), node.op_type);
        for input in &node.input {
            check(&defined, input, user())?;
        }
        for output in node.output.iter().filter(|o| !o.is_empty()) {
            if !defined.insert(output) {
                return Err(duplicate(output, user()));
            }
        }
    }
    for output in &graph.output {
        check(&defined, &output.name, "the list of outputs".to_owned())?;
    }
    Ok(())
}
