//! Attributes: named once, and holding what their type says.

use std::collections::HashSet;

use crate::proto::attribute_proto::AttributeType;
use crate::proto::{AttributeProto, FunctionProto, NodeProto};

/// What is wrong with an attribute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributeError {
    #[error("an attribute has no name")]
    Unnamed,
    #[error("attribute {0:?} is given twice")]
    Duplicate(String),
    #[error("attribute {name:?} has the type number {found}, which is none of the standard")]
    Type { name: String, found: i32 },
    #[error("attribute {name:?} is declared {declared} and holds {found}")]
    Content { name: String, declared: &'static str, found: &'static str },
    #[error("attribute {name:?} takes its value from attribute {reference:?} of a function, but no such attribute is in scope")]
    Reference { name: String, reference: String },
}

/// A type, its name in messages, and whether an attribute holds a value of it that differs from what an empty attribute holds.
type Kind = (AttributeType, &'static str, fn(&AttributeProto) -> bool);

#[rustfmt::skip]
const KINDS: [Kind; 14] = [
    (AttributeType::Float,         "a float",                |a| a.f != 0.0),
    (AttributeType::Int,           "an integer",             |a| a.i != 0),
    (AttributeType::String,        "a string",               |a| !a.s.is_empty()),
    (AttributeType::Tensor,        "a tensor",               |a| a.t.is_some()),
    (AttributeType::Graph,         "a graph",                |a| a.g.is_some()),
    (AttributeType::SparseTensor,  "a sparse tensor",        |a| a.sparse_tensor.is_some()),
    (AttributeType::TypeProto,     "a type",                 |a| a.tp.is_some()),
    (AttributeType::Floats,        "a list of floats",       |a| !a.floats.is_empty()),
    (AttributeType::Ints,          "a list of integers",     |a| !a.ints.is_empty()),
    (AttributeType::Strings,       "a list of strings",      |a| !a.strings.is_empty()),
    (AttributeType::Tensors,       "a list of tensors",      |a| !a.tensors.is_empty()),
    (AttributeType::Graphs,        "a list of graphs",       |a| !a.graphs.is_empty()),
    (AttributeType::SparseTensors, "a list of sparse tensors", |_| false),
    (AttributeType::TypeProtos,    "a list of types",        |a| !a.type_protos.is_empty()),
];

/// Types whose value is a message, which must be there.
const MESSAGES: [AttributeType; 3] = [AttributeType::Tensor, AttributeType::Graph, AttributeType::TypeProto];

/// Checks the attributes of a node in the body of `function`, or in a graph.
pub(super) fn check(node: &NodeProto, function: Option<&FunctionProto>) -> Result<(), AttributeError> {
    let mut names = HashSet::new();
    for attribute in &node.attribute {
        let name = || attribute.name.clone();
        if attribute.name.is_empty() {
            return Err(AttributeError::Unnamed);
        }
        if !names.insert(attribute.name.as_str()) {
            return Err(AttributeError::Duplicate(name()));
        }
        if !attribute.ref_attr_name.is_empty() && function.is_none() {
            return Err(AttributeError::Reference { name: name(), reference: attribute.ref_attr_name.clone() });
        }
        content(attribute)?;
    }
    Ok(())
}

/// Checks that an attribute holds a value of its type and of no other.
fn content(attribute: &AttributeProto) -> Result<(), AttributeError> {
    let name = || attribute.name.clone();
    let mut held = KINDS.iter().filter(|(.., holds)| holds(attribute));
    if attribute.r#type == AttributeType::Undefined as i32 {
        let (first, second) = (held.next(), held.next());
        return match (first, second) {
            (Some((_, declared, _)), Some((_, found, _))) => Err(AttributeError::Content { name: name(), declared, found }),
            _ => Ok(()),
        };
    }
    let Some((ty, declared, holds)) = KINDS.iter().find(|(ty, ..)| *ty as i32 == attribute.r#type) else {
        return Err(AttributeError::Type { name: name(), found: attribute.r#type });
    };
    if let Some((_, found, _)) = held.find(|(other, ..)| other != ty) {
        return Err(AttributeError::Content { name: name(), declared, found });
    }
    if MESSAGES.contains(ty) && attribute.ref_attr_name.is_empty() && !holds(attribute) {
        return Err(AttributeError::Content { name: name(), declared, found: "nothing" });
    }
    Ok(())
}

/// Gives attributes without a type, as files before IR version 4 may have them, the type of what they hold.
pub(crate) fn infer_types(nodes: &mut [NodeProto]) {
    for attribute in nodes.iter_mut().flat_map(|n| &mut n.attribute) {
        if attribute.r#type == AttributeType::Undefined as i32 {
            let held = KINDS.iter().find(|(.., holds)| holds(attribute));
            attribute.r#type = held.map_or(AttributeType::Undefined, |(ty, ..)| *ty) as i32;
        }
        for graph in attribute.g.iter_mut().chain(&mut attribute.graphs) {
            infer_types(&mut graph.node);
        }
    }
}
