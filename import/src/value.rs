//! What an ONNX value is while the graph is built.

use meganeura_ir::{DType, NodeId};

/// An ONNX value. An optional value that is present is the value itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Tensor(NodeId),
    Sequence(Sequence),
    /// An optional value that is absent.
    Nothing,
}

/// Tensors of one dtype in an order that is known. Their shapes may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sequence {
    pub dtype: DType,
    pub items: Vec<NodeId>,
}

impl Value {
    pub fn tensor(&self) -> Option<NodeId> {
        match self {
            Value::Tensor(node) => Some(*node),
            Value::Sequence(_) | Value::Nothing => None,
        }
    }

    /// What it is, in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Tensor(_) => "a tensor",
            Value::Sequence(_) => "a sequence",
            Value::Nothing => "an absent optional value",
        }
    }
}
