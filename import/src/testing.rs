//! Builds small ONNX models for tests, and evaluates them with the reference interpreter.

use crate::proto::attribute_proto::AttributeType;
use crate::proto::tensor_proto::DataType;
use crate::proto::tensor_shape_proto::{Dimension, dimension};
pub use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, type_proto,
};
use meganeura_ir::interpreter::{Environment, Value, interpret};
use meganeura_ir::{DType, Graph, Tensor, TensorType};
use prost::Message;

use crate::{Bindings, ImportError, ImportOptions, Model};

pub fn data_type(dtype: DType) -> i32 {
    let data_type = match dtype {
        DType::F32 => DataType::Float,
        DType::F16 => DataType::Float16,
        DType::BF16 => DataType::Bfloat16,
        DType::F64 => DataType::Double,
        DType::I8 => DataType::Int8,
        DType::I16 => DataType::Int16,
        DType::I32 => DataType::Int32,
        DType::I64 => DataType::Int64,
        DType::U8 => DataType::Uint8,
        DType::U16 => DataType::Uint16,
        DType::U32 => DataType::Uint32,
        DType::U64 => DataType::Uint64,
        DType::Bool => DataType::Bool,
    };
    data_type as i32
}

pub fn tensor_proto(name: &str, tensor: &Tensor) -> TensorProto {
    TensorProto {
        name: name.to_owned(),
        data_type: data_type(tensor.dtype()),
        dims: tensor.shape().iter().map(|&d| d as i64).collect(),
        raw_data: tensor.bytes().to_vec(),
        ..Default::default()
    }
}

/// A node with attributes.
#[derive(Clone)]
pub struct NodeBuilder(pub NodeProto);

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeBuilder {
    let owned = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect();
    NodeBuilder(NodeProto { op_type: op.to_owned(), input: owned(inputs), output: owned(outputs), ..Default::default() })
}

impl NodeBuilder {
    fn attribute(mut self, name: &str, ty: AttributeType, value: AttributeProto) -> Self {
        self.0.attribute.push(AttributeProto { name: name.to_owned(), r#type: ty as i32, ..value });
        self
    }

    pub fn int(self, name: &str, i: i64) -> Self {
        self.attribute(name, AttributeType::Int, AttributeProto { i, ..Default::default() })
    }

    pub fn ints(self, name: &str, ints: &[i64]) -> Self {
        self.attribute(name, AttributeType::Ints, AttributeProto { ints: ints.to_vec(), ..Default::default() })
    }

    pub fn float(self, name: &str, f: f32) -> Self {
        self.attribute(name, AttributeType::Float, AttributeProto { f, ..Default::default() })
    }

    pub fn floats(self, name: &str, floats: &[f32]) -> Self {
        self.attribute(name, AttributeType::Floats, AttributeProto { floats: floats.to_vec(), ..Default::default() })
    }

    pub fn string(self, name: &str, s: &str) -> Self {
        self.attribute(name, AttributeType::String, AttributeProto { s: s.as_bytes().to_vec(), ..Default::default() })
    }

    pub fn strings(self, name: &str, strings: &[&str]) -> Self {
        let strings = strings.iter().map(|s| s.as_bytes().to_vec()).collect();
        self.attribute(name, AttributeType::Strings, AttributeProto { strings, ..Default::default() })
    }

    pub fn tensor(self, name: &str, tensor: &Tensor) -> Self {
        let t = Some(tensor_proto("", tensor));
        self.attribute(name, AttributeType::Tensor, AttributeProto { t, ..Default::default() })
    }

    pub fn graph(self, name: &str, graph: GraphProto) -> Self {
        self.attribute(name, AttributeType::Graph, AttributeProto { g: Some(graph), ..Default::default() })
    }

    pub fn type_proto(self, name: &str, tp: TypeProto) -> Self {
        self.attribute(name, AttributeType::TypeProto, AttributeProto { tp: Some(tp), ..Default::default() })
    }

    /// The attribute `name` takes its value from the attribute `from` of the function that holds the node.
    pub fn reference(self, name: &str, ty: AttributeType, from: &str) -> Self {
        self.attribute(name, ty, AttributeProto { ref_attr_name: from.to_owned(), ..Default::default() })
    }

    pub fn domain(mut self, domain: &str) -> Self {
        self.0.domain = domain.to_owned();
        self
    }
}

/// A graph for an attribute. Inputs and outputs have no declared types.
pub fn body(inputs: &[&str], nodes: Vec<NodeBuilder>, outputs: &[&str]) -> GraphProto {
    let untyped =
        |names: &[&str]| names.iter().map(|&name| ValueInfoProto { name: name.to_owned(), ..Default::default() }).collect();
    let node = nodes.into_iter().map(|n| n.0).collect();
    GraphProto { input: untyped(inputs), node, output: untyped(outputs), ..Default::default() }
}

/// A function of the domain `f`, at opset 18.
pub fn function(name: &str, inputs: &[&str], nodes: Vec<NodeBuilder>, outputs: &[&str]) -> FunctionProto {
    let owned = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect();
    FunctionProto {
        domain: "f".to_owned(),
        name: name.to_owned(),
        input: owned(inputs),
        output: owned(outputs),
        node: nodes.into_iter().map(|n| n.0).collect(),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 18 }],
        ..Default::default()
    }
}

/// `"4,batch,?"`: fixed, symbolic and unnamed sizes; empty for a scalar.
pub fn value_info(name: &str, dtype: DType, dims: &str) -> ValueInfoProto {
    let dim = |text: &str| {
        let value = match text.parse() {
            Ok(size) => Some(dimension::Value::DimValue(size)),
            Err(_) if text == "?" => None,
            Err(_) => Some(dimension::Value::DimParam(text.to_owned())),
        };
        Dimension { value, ..Default::default() }
    };
    let dims = dims.split(',').filter(|d| !d.is_empty()).map(dim).collect();
    let tensor = type_proto::Tensor { elem_type: data_type(dtype), shape: Some(TensorShapeProto { dim: dims }) };
    let ty = TypeProto { value: Some(TypeValue::TensorType(tensor)), ..Default::default() };
    ValueInfoProto { name: name.to_owned(), r#type: Some(ty), ..Default::default() }
}

/// A whole model.
#[derive(Clone)]
pub struct ModelBuilder(pub ModelProto);

impl ModelBuilder {
    pub fn new(opset: i64) -> Self {
        ModelBuilder(ModelProto {
            ir_version: 8,
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset }],
            graph: Some(GraphProto::default()),
            ..Default::default()
        })
    }

    /// Imports an operator set besides the standard one.
    pub fn import(mut self, domain: &str, version: i64) -> Self {
        self.0.opset_import.push(OperatorSetIdProto { domain: domain.to_owned(), version });
        self
    }

    fn graph(mut self, edit: impl FnOnce(&mut GraphProto)) -> Self {
        edit(self.0.graph.get_or_insert_with(GraphProto::default));
        self
    }

    pub fn input(self, name: &str, dtype: DType, dims: &str) -> Self {
        self.graph(|g| g.input.push(value_info(name, dtype, dims)))
    }

    pub fn output(self, name: &str) -> Self {
        self.graph(|g| g.output.push(ValueInfoProto { name: name.to_owned(), ..Default::default() }))
    }

    pub fn declared_output(self, name: &str, dtype: DType, dims: &str) -> Self {
        self.graph(|g| g.output.push(value_info(name, dtype, dims)))
    }

    pub fn initializer(self, name: &str, tensor: &Tensor) -> Self {
        self.tensor(tensor_proto(name, tensor))
    }

    pub fn tensor(self, proto: TensorProto) -> Self {
        self.graph(|g| g.initializer.push(proto))
    }

    pub fn node(self, node: NodeBuilder) -> Self {
        self.graph(|g| g.node.push(node.0))
    }

    pub fn function(mut self, function: FunctionProto) -> Self {
        self.0.functions.push(function);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }

    pub fn open(&self) -> Result<Model, ImportError> {
        Model::from_onnx(self.bytes(), &ImportOptions::default())
    }
}

pub fn f32s(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_f32(shape, values)
}

pub fn i64s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::I64, shape, values)
}

pub fn i32s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::I32, shape, values)
}

pub fn u8s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::U8, shape, values)
}

/// Different quarters between -1.25 and 1.25, in an order that `seed` changes.
pub fn quarters(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    f32s(shape, &(0..count).map(|i| ((i * 7 + i / 5 + seed * 3) % 11) as f32 / 4.0 - 1.25).collect::<Vec<_>>())
}

pub fn bools(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::Bool, shape, values)
}

/// The outputs of a specialised model, in f64, on `inputs` and the weights in the file.
pub fn evaluate(model: &Model, graph: &Graph, inputs: &[Tensor]) -> Vec<(TensorType, Vec<f64>)> {
    let weights: Vec<Tensor> = model.parameters().iter().map(|p| model.weight(&p.name).unwrap()).collect();
    let environment = Environment::<f64>::from_tensors(inputs, &weights);
    let evaluation = interpret(graph, &environment).unwrap();
    let types = graph.outputs().iter().map(|o| graph.ty(o.node).clone());
    types.zip(evaluation.outputs()).map(|(ty, value)| (ty, numbers(value))).collect()
}

pub fn numbers(value: &Value<f64>) -> Vec<f64> {
    match value {
        Value::Float(v) => v.clone(),
        Value::Int(v) => v.iter().map(|&v| v as f64).collect(),
        Value::Bool(v) => v.iter().map(|&v| v as u8 as f64).collect(),
    }
}

/// Specialises at the declared sizes and evaluates.
pub fn run(builder: &ModelBuilder, inputs: &[Tensor]) -> Vec<(TensorType, Vec<f64>)> {
    let model = builder.open().unwrap();
    let specialized = model.specialize(&Bindings::default()).unwrap();
    evaluate(&model, &specialized.graph, inputs)
}

/// Memory that a thread has allocated, so that tests can see what a file makes the import allocate.
pub mod allocation {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    thread_local! {
        static LIVE: Cell<usize> = const { Cell::new(0) };
        static PEAK: Cell<usize> = const { Cell::new(0) };
    }

    struct Counting;

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    // SAFETY: memory comes from the system's allocator; the counters are plain cells and allocate nothing.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            let live = LIVE.get().saturating_add(layout.size());
            LIVE.set(live);
            PEAK.set(PEAK.get().max(live));
            // SAFETY: the caller's promises are those that the system's allocator asks for.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
            LIVE.set(LIVE.get().saturating_sub(layout.size()));
            // SAFETY: as above.
            unsafe { System.dealloc(pointer, layout) }
        }
    }

    /// The result of `work`, and the bytes that it had allocated at once on this thread.
    pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
        let before = LIVE.get();
        PEAK.set(before);
        let result = work();
        (result, PEAK.get().saturating_sub(before))
    }
}
