//! What a file says about itself, whether or not its operators are supported.

use std::collections::BTreeMap;

use prost::Message;

use crate::error::{ImportError, qualified};
use crate::model::canonical_domain;
use crate::proto::tensor_proto::DataType;
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{ModelProto, TypeProto, ValueInfoProto};
use crate::wire;

/// Operators and interface of an ONNX model, unchecked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// Version of each operator set that the model imports, by domain; the standard domain is the empty one.
    pub opsets: BTreeMap<String, i64>,
    /// The operators of the main graph's nodes, in order: `Add`, or `com.microsoft::FusedMatMul`.
    pub operators: Vec<String>,
    /// Inputs, those with a default included.
    pub inputs: Vec<ValueKind>,
    pub outputs: Vec<ValueKind>,
}

/// The kind of a model's input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// A tensor whose elements have this type, in the standard's spelling: `float16`, `string`, `float8e4m3fn`.
    Tensor(String),
    SparseTensor,
    Sequence,
    Optional,
    Map,
    Undeclared,
}

impl Outline {
    /// Reads the bytes of an `.onnx` file.
    ///
    /// # Errors
    /// If they are no ONNX model.
    pub fn read(bytes: &[u8]) -> Result<Outline, ImportError> {
        let proto = ModelProto::decode(wire::skeleton(bytes)?.as_slice())?;
        let graph = proto.graph.as_ref().ok_or(ImportError::NoGraph)?;
        let kinds = |values: &[ValueInfoProto]| values.iter().map(|v| kind(v.r#type.as_ref())).collect();
        Ok(Outline {
            operators: graph.node.iter().map(|n| qualified(canonical_domain(&n.domain), &n.op_type)).collect(),
            inputs: kinds(&graph.input),
            outputs: kinds(&graph.output),
            opsets: proto.opset_import.iter().map(|o| (canonical_domain(&o.domain).to_owned(), o.version)).collect(),
        })
    }
}

fn kind(ty: Option<&TypeProto>) -> ValueKind {
    match ty.and_then(|t| t.value.as_ref()) {
        Some(TypeValue::TensorType(tensor)) => ValueKind::Tensor(
            DataType::try_from(tensor.elem_type)
                .map_or_else(|_| format!("number {}", tensor.elem_type), |d| format!("{d:?}").to_lowercase()),
        ),
        Some(TypeValue::SparseTensorType(_)) => ValueKind::SparseTensor,
        Some(TypeValue::SequenceType(_)) => ValueKind::Sequence,
        Some(TypeValue::OptionalType(_)) => ValueKind::Optional,
        Some(TypeValue::MapType(_)) => ValueKind::Map,
        None => ValueKind::Undeclared,
    }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::DType;

    use super::*;
    use crate::testing::{ModelBuilder, node};

    #[test]
    fn an_outline_names_operators_that_are_not_supported() {
        let model = ModelBuilder::new(17).input("x", DType::F16, "2").output("y");
        let model = model.node(node("Unheard", &["x"], &["h"]).domain("org.example")).node(node("Relu", &["h"], &["y"]));
        let outline = Outline::read(&model.bytes()).unwrap();
        assert_eq!(outline.operators, ["org.example::Unheard", "Relu"]);
        assert_eq!(outline.inputs, [ValueKind::Tensor("float16".to_owned())]);
        assert_eq!(outline.outputs, [ValueKind::Undeclared]);
        assert_eq!(outline.opsets, [(String::new(), 17)].into());
        assert!(Outline::read(b"no model").is_err());
    }
}
