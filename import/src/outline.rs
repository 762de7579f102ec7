//! What a file says about itself, whether or not its operators are supported; and tensors that are files of their own.

use std::collections::BTreeMap;

use meganeura_ir::Tensor;
use prost::Message;

use crate::error::{ImportError, qualified};
use crate::model::{Opsets, canonical_domain};
use crate::ops;
use crate::proto::tensor_proto::DataType;
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{ModelProto, TensorProto, TypeProto, ValueInfoProto};
use crate::tensor;
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
            opsets: Opsets::new(&proto).into_inner(),
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

/// Every operator that the import has a rule for, sorted: `Add`, or `com.microsoft::FusedMatMul`.
pub fn operators() -> Vec<String> {
    let mut names: Vec<String> = ops::table().map(|(domain, op)| qualified(domain, op)).collect();
    names.sort_unstable();
    names
}

/// The tensor in a serialised `TensorProto`, as files of test data are.
///
/// # Errors
/// If the bytes are no such message, or if its element type, shape or data are not those of a tensor of numbers or booleans.
pub fn read_tensor(bytes: &[u8]) -> Result<Tensor, ImportError> {
    let proto = TensorProto::decode(bytes)?;
    tensor::from_proto(&proto).map_err(|source| ImportError::Tensor { name: proto.name, source })
}

#[cfg(test)]
mod tests {
    use meganeura_ir::DType;

    use super::*;
    use crate::testing::{ModelBuilder, f32s, node, tensor_proto};

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

    #[test]
    fn a_tensor_file_holds_raw_or_typed_data() {
        let tensor = f32s(&[3], &[1.0, -2.5, 0.0]);
        let raw = tensor_proto("x", &tensor);
        let typed = TensorProto { raw_data: Vec::new(), float_data: tensor.to_f32_vec(), ..raw.clone() };
        for proto in [&raw, &typed] {
            assert_eq!(read_tensor(&proto.encode_to_vec()).unwrap(), tensor);
        }
        let bools = Tensor::from_i64(DType::Bool, [2], &[1, 0]);
        assert_eq!(read_tensor(&tensor_proto("", &bools).encode_to_vec()).unwrap(), bools);
        let short = TensorProto { raw_data: vec![0; 8], ..raw };
        assert!(matches!(read_tensor(&short.encode_to_vec()), Err(ImportError::Tensor { .. })));
        let strings = TensorProto { data_type: DataType::String as i32, ..typed };
        assert!(matches!(read_tensor(&strings.encode_to_vec()), Err(ImportError::Tensor { .. })));
    }
}
