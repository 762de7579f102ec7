//! Valid models to start from: exported ones, small ones with subgraphs, functions and sparse tensors, and ones of a single
//! operator.

use std::sync::LazyLock;

use prost::Message;

use crate::proto::attribute_proto::AttributeType;
use crate::proto::tensor_proto::DataType;
use crate::proto::tensor_shape_proto::{Dimension, dimension};
use crate::proto::type_proto::{self, Value};
use crate::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, SparseTensorProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto,
};
use crate::random::Random;

/// Operators that the import knows, by domain.
pub static OPERATORS: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| meganeura_import::operators().collect());

static EXPORTED: LazyLock<Vec<ModelProto>> = LazyLock::new(|| {
    let files: [&[u8]; 2] =
        [include_bytes!("../../fixtures/digits-cnn.onnx"), include_bytes!("../../fixtures/corpus/whisper/model.onnx")];
    files.iter().filter_map(|file| ModelProto::decode(*file).ok()).collect()
});

/// A valid model, or one of a single operator with operands that may not fit.
pub fn seed(random: &mut Random) -> ModelProto {
    match random.below(16) {
        0 => EXPORTED[random.below(EXPORTED.len())].clone(),
        1 => branches(),
        2 => iteration("Loop"),
        3 => iteration("Scan"),
        4 => functions(),
        5 => sparse(),
        6 => chain(),
        _ => single(random),
    }
}

pub fn integers(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    let raw_data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    tensor(name, DataType::Int64, dims, raw_data)
}

pub fn floats(name: &str, dims: &[i64], value: impl Fn(usize) -> f32) -> TensorProto {
    let count = dims.iter().product::<i64>() as usize;
    tensor(name, DataType::Float, dims, (0..count).flat_map(|i| value(i).to_le_bytes()).collect())
}

fn tensor(name: &str, data_type: DataType, dims: &[i64], raw_data: Vec<u8>) -> TensorProto {
    let (name, data_type, dims) = (name.to_owned(), data_type as i32, dims.to_vec());
    TensorProto { name, data_type, dims, raw_data, ..TensorProto::default() }
}

pub fn value(name: &str, data_type: DataType, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| {
        let value = text.parse().map_or_else(|_| dimension::Value::DimParam((*text).to_owned()), dimension::Value::DimValue);
        Dimension { value: Some(value), ..Dimension::default() }
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let ty = Value::TensorType(type_proto::Tensor { elem_type: data_type as i32, shape });
    let r#type = Some(TypeProto { value: Some(ty), ..TypeProto::default() });
    ValueInfoProto { name: name.to_owned(), r#type, ..ValueInfoProto::default() }
}

fn untyped(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: name.to_owned(), ..ValueInfoProto::default() }
}

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    NodeProto { op_type: op.to_owned(), input: owned(inputs), output: owned(outputs), ..NodeProto::default() }
}

fn with(mut node: NodeProto, attributes: Vec<AttributeProto>) -> NodeProto {
    node.attribute = attributes;
    node
}

pub fn attribute(name: &str, ty: AttributeType) -> AttributeProto {
    AttributeProto { name: name.to_owned(), r#type: ty as i32, ..AttributeProto::default() }
}

fn graph_attribute(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto { g: Some(graph), ..attribute(name, AttributeType::Graph) }
}

fn opsets(list: &[(&str, i64)]) -> Vec<OperatorSetIdProto> {
    list.iter().map(|(domain, version)| OperatorSetIdProto { domain: (*domain).to_owned(), version: *version }).collect()
}

fn model(graph: GraphProto) -> ModelProto {
    ModelProto {
        ir_version: 8,
        opset_import: opsets(&[("", 20), ("com.microsoft", 1)]),
        graph: Some(graph),
        ..ModelProto::default()
    }
}

/// Several operators in a row, with symbolic sizes.
fn chain() -> ModelProto {
    model(GraphProto {
        input: vec![value("x", DataType::Float, &["batch", "3"]), value("z", DataType::Float, &["2*batch", "3"])],
        initializer: vec![
            floats("w", &[3, 4], |i| i as f32 / 8.0),
            floats("b", &[4], |i| i as f32),
            integers("target", &[2], &[-1, 2]),
            integers("ends", &[1], &[1]),
            integers("axis", &[1], &[0]),
        ],
        node: vec![
            node("Gemm", &["x", "w", "b"], &["h"]),
            node("Relu", &["h"], &["r"]),
            node("Softmax", &["r"], &["s"]),
            node("Reshape", &["s", "target"], &["t"]),
            node("Slice", &["t", "axis", "ends", "axis"], &["y"]),
            node("ReduceMean", &["z"], &["m"]),
        ],
        output: vec![untyped("y"), value("s", DataType::Float, &["batch", "4"]), untyped("m")],
        ..GraphProto::default()
    })
}

fn branches() -> ModelProto {
    let branch = |op: &str, output: &str| GraphProto {
        node: vec![node(op, &["x", "w"], &[output])],
        output: vec![untyped(output)],
        ..GraphProto::default()
    };
    let attributes = vec![graph_attribute("then_branch", branch("Add", "a")), graph_attribute("else_branch", branch("Mul", "m"))];
    model(GraphProto {
        input: vec![value("x", DataType::Float, &["2", "3"])],
        initializer: vec![tensor("condition", DataType::Bool, &[], vec![1]), floats("w", &[3], |i| i as f32)],
        node: vec![with(node("If", &["condition"], &["y"]), attributes)],
        output: vec![untyped("y")],
        ..GraphProto::default()
    })
}

/// Adds the rows of `x` up, in three steps of a Loop or in a Scan.
fn iteration(op: &str) -> ModelProto {
    let is_scan = op == "Scan";
    let scalar = |name: &str, data_type| value(name, data_type, &[]);
    let state = value("state", DataType::Float, &["3"]);
    let body = match is_scan {
        true => GraphProto {
            input: vec![state, value("row", DataType::Float, &["3"])],
            node: vec![node("Add", &["state", "row"], &["sum"]), node("Identity", &["sum"], &["copy"])],
            output: vec![untyped("sum"), untyped("copy")],
            ..GraphProto::default()
        },
        false => GraphProto {
            input: vec![scalar("step", DataType::Int64), scalar("going", DataType::Bool), state],
            node: vec![
                node("Identity", &["going"], &["on"]),
                node("Gather", &["x", "step"], &["row"]),
                node("Add", &["state", "row"], &["sum"]),
                node("Identity", &["sum"], &["copy"]),
            ],
            output: vec![untyped("on"), untyped("sum"), untyped("copy")],
            ..GraphProto::default()
        },
    };
    let mut attributes = vec![graph_attribute("body", body)];
    if is_scan {
        attributes.push(AttributeProto { i: 1, ..attribute("num_scan_inputs", AttributeType::Int) });
    }
    let inputs: &[&str] = if is_scan { &["start", "x"] } else { &["count", "always", "start"] };
    model(GraphProto {
        input: vec![value("x", DataType::Float, &["3", "3"])],
        initializer: vec![
            floats("start", &[3], |_| 0.5),
            integers("count", &[], &[3]),
            tensor("always", DataType::Bool, &[], vec![1]),
        ],
        node: vec![with(node(op, inputs, &["total", "steps"]), attributes)],
        output: vec![untyped("total"), untyped("steps")],
        ..GraphProto::default()
    })
}

fn functions() -> ModelProto {
    let function = |name: &str, nodes: Vec<NodeProto>| FunctionProto {
        name: name.to_owned(),
        domain: "local".to_owned(),
        input: vec!["a".to_owned()],
        output: vec!["b".to_owned()],
        attribute: vec!["axis".to_owned()],
        node: nodes,
        opset_import: opsets(&[("", 20), ("local", 1)]),
        ..FunctionProto::default()
    };
    let call = |name: &str, from: &str, to: &str| NodeProto { domain: "local".to_owned(), ..node(name, &[from], &[to]) };
    let reference = AttributeProto { ref_attr_name: "axis".to_owned(), ..attribute("axis", AttributeType::Int) };
    let inner = function("inner", vec![with(node("Softmax", &["a"], &["s"]), vec![reference]), node("Exp", &["s"], &["b"])]);
    let outer = function("outer", vec![call("inner", "a", "i"), call("inner", "i", "b")]);
    let axis = AttributeProto { i: 1, ..attribute("axis", AttributeType::Int) };
    let mut model = model(GraphProto {
        input: vec![value("x", DataType::Float, &["2", "3"])],
        node: vec![call("outer", "x", "h"), with(call("inner", "h", "y"), vec![axis])],
        output: vec![untyped("y")],
        ..GraphProto::default()
    });
    model.opset_import = opsets(&[("", 20), ("local", 1)]);
    model.functions = vec![outer, inner];
    model
}

fn sparse() -> ModelProto {
    let sparse = SparseTensorProto {
        values: Some(floats("w", &[2], |i| i as f32 + 1.0)),
        indices: Some(integers("", &[2], &[1, 5])),
        dims: vec![2, 3],
    };
    model(GraphProto {
        input: vec![value("x", DataType::Float, &["2", "3"])],
        sparse_initializer: vec![sparse],
        node: vec![node("Mul", &["x", "w"], &["y"])],
        output: vec![untyped("y")],
        ..GraphProto::default()
    })
}

/// Names of attributes of the standard's operators.
#[rustfmt::skip]
pub const ATTRIBUTES: [&str; 64] = [
    "activations", "align_corners", "alpha", "auto_pad", "axes", "axis", "batch_axis", "batch_dims", "beta", "bias", "block_size",
    "blocksize", "ceil_mode", "center_point_box", "coordinate_transformation_mode", "count_include_pad", "detect_negative",
    "detect_positive", "dilations", "direction", "do_rotary", "dtype", "end", "epsilon", "equation", "exclusive", "fmod", "gamma",
    "group", "hidden_size", "ignore_index", "is_causal", "k", "keepdims", "kernel_shape", "keepgates", "kv_num_heads", "lambd",
    "largest", "linear_before_reset", "mode", "nearest_mode", "noop_with_empty_axes", "num_groups", "num_heads", "num_outputs",
    "onesided", "output_dtype", "output_padding", "output_shape", "pads", "perm", "reduction", "reverse", "scale",
    "select_last_index", "seed", "shape", "size", "split", "start", "storage_order", "strides", "to",
];

/// Words that string attributes take.
#[rustfmt::skip]
const WORDS: [&str; 20] = [
    "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", "constant", "reflect", "edge", "wrap", "nearest", "linear", "cubic", "mean",
    "sum", "none", "forward", "bidirectional", "ij,jk->ik", "...i,i->...", "DCR", "tanh",
];

/// An attribute with a value of some type.
pub fn random_attribute(random: &mut Random) -> AttributeProto {
    let name = ATTRIBUTES[random.below(ATTRIBUTES.len())];
    let list = |random: &mut Random| (0..random.below(6)).map(|_| random.integer()).collect::<Vec<_>>();
    match random.below(8) {
        0 => AttributeProto { f: random.float(), ..attribute(name, AttributeType::Float) },
        1 => AttributeProto { s: WORDS[random.below(WORDS.len())].into(), ..attribute(name, AttributeType::String) },
        2 => {
            let values = list(random);
            AttributeProto { t: Some(integers("", &[values.len() as i64], &values)), ..attribute(name, AttributeType::Tensor) }
        }
        3 => AttributeProto { floats: vec![random.float(); random.below(4)], ..attribute(name, AttributeType::Floats) },
        4 | 5 => AttributeProto { ints: list(random), ..attribute(name, AttributeType::Ints) },
        _ => AttributeProto { i: random.integer(), ..attribute(name, AttributeType::Int) },
    }
}

/// One operator on operands of many kinds.
fn single(random: &mut Random) -> ModelProto {
    let (domain, op) = OPERATORS[random.below(OPERATORS.len())];
    let small: Vec<i64> = (0..random.below(5)).map(|_| random.integer()).collect();
    let mut initializer = vec![
        floats("weight", &[4, 3, 2, 2], |i| i as f32 / 16.0),
        floats("matrix", &[3, 4], |i| i as f32 / 4.0),
        floats("vector", &[3], |i| i as f32 + 1.0),
        floats("scalar", &[], |_| 0.5),
        integers("list", &[small.len() as i64], &small),
        integers("number", &[], &[random.integer()]),
        tensor("flag", DataType::Bool, &[], vec![1]),
        tensor("bytes", DataType::Uint8, &[3, 4], (0..12).collect()),
    ];
    // Few operators take operands of every kind: mostly there are some of the kinds that most take.
    let pool: &[&str] = match random.below(3) {
        0 => &["image", "weight", "vector", "vector", "vector", "vector"],
        1 => &["table", "matrix", "indices", "list", "number", "scalar", "logical"],
        _ => &[
            "image", "table", "sequence", "indices", "logical", "weight", "matrix", "vector", "scalar", "list", "number", "flag",
            "bytes", "",
        ],
    };
    let count = random.below(pool.len().min(6) + 1);
    let in_order = random.one_in(2);
    let inputs: Vec<&str> =
        (0..count).map(|i| if in_order { pool[i % pool.len()] } else { pool[random.below(pool.len())] }).collect();
    let outputs = &["y", "y1", "y2"][..1 + random.below(3)];
    let mut node = NodeProto { domain: domain.to_owned(), ..node(op, &inputs, outputs) };
    for _ in 0..random.below(4) {
        let attribute = random_attribute(random);
        if node.attribute.iter().all(|a| a.name != attribute.name) {
            node.attribute.push(attribute);
        }
    }
    initializer.retain(|tensor| inputs.contains(&tensor.name.as_str()));
    model(GraphProto {
        input: vec![
            value("image", DataType::Float, &["2", "3", "5", "4"]),
            value("table", DataType::Float, &["2", "3"]),
            value("sequence", DataType::Float, &["n", "2", "3"]),
            value("indices", DataType::Int64, &["2"]),
            value("logical", DataType::Bool, &["2", "3"]),
        ],
        initializer,
        node: vec![node],
        output: outputs.iter().map(|name| untyped(name)).collect(),
        ..GraphProto::default()
    })
}
