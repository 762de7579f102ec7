//! Files that break a rule, one for each rule: each is refused with the error of its kind, without a panic, and without memory
//! that the file does not justify.

use meganeura_ir::DType;
use prost::Message;

use crate::proto::attribute_proto::AttributeType;
use crate::proto::type_proto::{self, Sequence};
use crate::proto::{
    AttributeProto, FunctionProto, GraphProto, OperatorSetIdProto, StringStringEntryProto, TensorProto, TypeProto,
    ValueInfoProto, tensor_proto,
};
use crate::testing::{ModelBuilder, NodeBuilder, TypeValue, allocation, bools, f32s, i64s, node, tensor_proto, value_info};
use crate::{AttributeError as A, BindingError as B, ImportError as E, StructureError as S, TensorError as T, WireError as W};
use crate::{Bindings, ImportOptions, Limits, Model};

/// Beyond the file itself.
const MEMORY: usize = 16 << 20;

struct Case {
    what: &'static str,
    file: Vec<u8>,
    limits: Limits,
    is_expected: fn(&E) -> bool,
    /// A part of the message.
    says: &'static str,
}

macro_rules! case {
    ($what:expr, $file:expr, $pattern:pat, $says:expr) => {
        Case { what: $what, file: $file, limits: Limits::default(), is_expected: |e| matches!(e, $pattern), says: $says }
    };
}

/// A case that takes a limit below its default.
macro_rules! limited {
    ($limit:expr, $value:expr, $file:expr, $pattern:pat) => {{
        let mut limits = Limits::default();
        limits.set($limit, $value).unwrap();
        Case { what: $limit, file: $file, limits, is_expected: |e| matches!(e, $pattern), says: $limit }
    }};
}

/// Opens, reads every weight, specialises.
fn import(case: &Case) -> Result<(), E> {
    let options = ImportOptions { limits: case.limits.clone(), ..ImportOptions::default() };
    let model = Model::from_onnx(case.file.clone(), &options)?;
    for parameter in model.parameters() {
        model.weight(&parameter.name)?;
    }
    model.specialize(&Bindings::default()).map(|_| ())
}

fn refused(cases: Vec<Case>) {
    for case in cases {
        let what = case.what;
        let (result, peak) = allocation::peak(|| import(&case));
        let error = result.expect_err(what);
        assert!((case.is_expected)(&error), "{what}: {error:?}");
        let message = error.to_string();
        assert!(message.contains(case.says), "{what}: {message}");
        assert!(message.len() < 600 && message.lines().count() < 6, "{what}: {message}");
        assert!(peak < 8 * case.file.len() + MEMORY, "{what}: {peak} bytes of memory for a file of {}", case.file.len());
    }
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn tag(number: u64, wire_type: u64) -> Vec<u8> {
    varint(number << 3 | wire_type)
}

/// A length-delimited field.
fn field(number: u64, payload: &[u8]) -> Vec<u8> {
    [tag(number, 2), varint(payload.len() as u64), payload.to_vec()].concat()
}

/// `y = relu(x)`, with parts added to the model message.
fn with(parts: &[&[u8]]) -> Vec<u8> {
    [&relu().bytes(), parts.concat().as_slice()].concat()
}

/// A model whose graph message ends with these bytes.
fn with_graph(parts: &[u8]) -> Vec<u8> {
    let mut builder = relu();
    let graph = builder.0.graph.take().unwrap().encode_to_vec();
    [builder.bytes(), field(7, &[graph.as_slice(), parts].concat())].concat()
}

fn base() -> ModelBuilder {
    ModelBuilder::new(17).input("x", DType::F32, "2,3")
}

fn unary(from: &str, to: &str) -> NodeBuilder {
    node("Relu", &[from], &[to])
}

fn relu() -> ModelBuilder {
    base().node(unary("x", "y")).output("y")
}

/// `y = x + w` for a damaged tensor `w`.
fn weight(edit: impl Fn(&mut TensorProto)) -> Vec<u8> {
    let mut proto = tensor_proto("w", &f32s(&[3], &[1., 2., 3.]));
    edit(&mut proto);
    base().tensor(proto).node(node("Add", &["x", "w"], &["y"])).output("y").bytes()
}

fn edited(edit: impl Fn(&mut crate::proto::ModelProto)) -> Vec<u8> {
    let mut builder = relu();
    edit(&mut builder.0);
    builder.bytes()
}

fn attribute(name: &str, ty: AttributeType) -> AttributeProto {
    AttributeProto { name: name.to_owned(), r#type: ty as i32, ..AttributeProto::default() }
}

/// A model whose only node has these attributes.
fn with_attributes(attributes: Vec<AttributeProto>) -> Vec<u8> {
    let mut softmax = node("Softmax", &["x"], &["y"]);
    softmax.0.attribute = attributes;
    base().node(softmax).output("y").bytes()
}

/// `If` over two graphs that hold `nodes`, after which `late` is computed.
fn with_subgraph(inputs: &[&str], nodes: &[NodeBuilder], output: &str) -> Vec<u8> {
    let named = |name: &str| ValueInfoProto { name: name.to_owned(), ..ValueInfoProto::default() };
    let graph = GraphProto {
        input: inputs.iter().map(|name| named(name)).collect(),
        node: nodes.iter().map(|n| n.0.clone()).collect(),
        output: vec![named(output)],
        ..GraphProto::default()
    };
    let branch = |name| AttributeProto { g: Some(graph.clone()), ..attribute(name, AttributeType::Graph) };
    let mut choice = node("If", &["condition"], &["y"]);
    choice.0.attribute = vec![branch("then_branch"), branch("else_branch")];
    let builder = base().initializer("condition", &bools(&[], &[1])).node(choice);
    builder.node(unary("x", "late")).output("y").output("late").bytes()
}

fn function(name: &str, nodes: &[NodeBuilder]) -> FunctionProto {
    FunctionProto {
        name: name.to_owned(),
        domain: "local".to_owned(),
        input: vec!["a".to_owned()],
        output: vec!["b".to_owned()],
        node: nodes.iter().map(|n| n.0.clone()).collect(),
        opset_import: opsets(&[("", 17), ("local", 1)]),
        ..FunctionProto::default()
    }
}

fn opsets(list: &[(&str, i64)]) -> Vec<OperatorSetIdProto> {
    list.iter().map(|(domain, version)| OperatorSetIdProto { domain: (*domain).to_owned(), version: *version }).collect()
}

fn call(name: &str, from: &str, to: &str) -> NodeBuilder {
    node(name, &[from], &[to]).domain("local")
}

/// A model that calls the first function.
fn with_functions(functions: Vec<FunctionProto>) -> Vec<u8> {
    let mut builder = base().node(call(&functions[0].name, "x", "y")).output("y");
    builder.0.opset_import = opsets(&[("", 17), ("local", 1)]);
    builder.0.functions = functions;
    builder.bytes()
}

/// `count` functions, each of which calls the next one as often as `calls` says.
fn chain(count: usize, calls: usize) -> Vec<FunctionProto> {
    let body = |level: usize| -> Vec<NodeBuilder> {
        if level + 1 == count {
            return vec![unary("a", "b")];
        }
        let value = |index: usize| if index == calls { "b".to_owned() } else { format!("v{index}") };
        let from = |index: usize| if index == 0 { "a".to_owned() } else { value(index) };
        (0..calls).map(|i| call(&format!("f{}", level + 1), &from(i), &value(i + 1))).collect()
    };
    (0..count).map(|level| function(&format!("f{level}"), &body(level))).collect()
}

fn with_input(edit: impl Fn(&mut ValueInfoProto)) -> Vec<u8> {
    let mut info = value_info("x", DType::F32, "2,3");
    edit(&mut info);
    let mut builder = ModelBuilder::new(17).node(unary("x", "y")).output("y");
    builder.0.graph.as_mut().unwrap().input = vec![info];
    builder.bytes()
}

fn set_type(info: &mut ValueInfoProto, value: TypeValue) {
    info.r#type = Some(TypeProto { value: Some(value), ..TypeProto::default() });
}

#[test]
fn files_that_are_no_protobuf_messages() {
    let whole = relu().bytes();
    let deep_type = (0..100).fold(Vec::new(), |inner, _| field(4, &field(1, &inner)));
    let deep_graph = (0..17).fold(Vec::new(), |inner, _| field(1, &field(5, &field(6, &inner))));
    let ints = field(1, &field(5, &field(8, &[0x80, 0x80])));
    refused(vec![
        case!("nothing", Vec::new(), E::Empty, "empty"),
        case!("a pointer of git-lfs", b"version https://git-lfs.github.com/spec/v1\n".to_vec(), E::Wire(_), "no ONNX"),
        case!("a page", b"<!DOCTYPE html><html></html>".to_vec(), E::Wire(_), "byte"),
        case!("zeros", vec![0; 64], E::Wire(W::WireType { .. }), "field 0"),
        case!("a cut file", whole[..whole.len() - 9].to_vec(), E::Wire(W::Truncated { .. }), "truncated"),
        case!("a length beyond the file", with(&[&tag(7, 2), &varint(1 << 40)]), E::Wire(W::Truncated { .. }), "byte"),
        case!("the largest length", with(&[&tag(7, 2), &varint(u64::MAX)]), E::Wire(W::Truncated { .. }), "byte"),
        case!("an endless integer", with(&[&tag(5, 0), &[0x80; 11]]), E::Wire(W::Varint { .. }), "integer"),
        case!("an integer of 70 bits", with(&[&tag(5, 0), &[0xff; 9], &[2]]), E::Wire(W::Varint { .. }), "integer"),
        case!("a group", with(&[&tag(5, 3)]), E::Wire(W::WireType { wire_type: 3, .. }), "wire type 3"),
        case!("an unknown wire type", with(&[&tag(5, 7)]), E::Wire(W::WireType { wire_type: 7, .. }), "wire type 7"),
        case!("a number as text", with(&[&field(5, b"1")]), E::Wire(W::WireType { field: 5, .. }), "wire type 2"),
        case!("a graph as number", [&tag(7, 0)[..], &[1]].concat(), E::Wire(W::WireType { field: 7, .. }), "field 7"),
        case!(
            "cut packed floats",
            with_graph(&field(1, &field(5, &field(7, &[0; 5])))),
            E::Wire(W::Packed { size: 4, .. }),
            "5 bytes"
        ),
        case!("cut packed doubles", with_graph(&field(5, &field(10, &[0; 12]))), E::Wire(W::Packed { size: 8, .. }), "12 bytes"),
        case!("cut packed integers", with_graph(&ints), E::Wire(W::Truncated { .. }), "byte"),
        case!("two graphs", with(&[&field(7, &[])]), E::Wire(W::Repeated { field: 7, .. }), "twice"),
        case!(
            "a tensor with two names",
            with_graph(&field(5, &[field(8, b"a"), field(8, b"b")].concat())),
            E::Wire(W::Repeated { field: 8, .. }),
            "twice"
        ),
        case!(
            "a tensor with two contents",
            with_graph(&field(5, &[field(9, b"a"), field(9, b"b")].concat())),
            E::Wire(W::Repeated { field: 9, .. }),
            "twice"
        ),
        case!("types without end", with_graph(&field(11, &field(2, &deep_type))), E::Wire(W::Depth), "deep"),
        case!("graphs in graphs", with_graph(&deep_graph), E::Wire(W::Limit(_)), "subgraph-depth"),
        case!("a name that is no text", with_graph(&field(1, &field(4, &[0xff, 0xfe]))), E::Decode(_), "no ONNX model"),
        case!("no graph", field(2, b"exporter"), E::NoGraph, "no graph"),
    ]);
}

#[test]
fn files_that_ask_for_too_much() {
    let attributes: Vec<AttributeProto> = (0..1001).map(|i| attribute(&format!("a{i}"), AttributeType::Int)).collect();
    let long = "n".repeat(20_000);
    let empty_values: Vec<u8> = field(13, &[]).repeat(100_000);
    refused(vec![
        case!("many attributes", with_attributes(attributes), E::Wire(W::Limit(_)), "attributes of one node"),
        case!("a long name", base().node(unary("x", &long)).output(&long).bytes(), E::Wire(W::Limit(_)), "name-bytes"),
        limited!("file-bytes", 20, relu().bytes(), E::Wire(W::Limit(_))),
        limited!("structure-bytes", 1 << 20, with_graph(&empty_values), E::Wire(W::Limit(_))),
        limited!("nodes", 1, base().node(unary("x", "z")).node(unary("z", "y")).output("y").bytes(), E::Wire(W::Limit(_))),
        limited!("rank", 0, weight(|_| {}), E::Tensor { source: T::Limit(_), .. }),
        limited!("elements", 2, weight(|_| {}), E::Tensor { source: T::Limit(_), .. }),
        limited!("weight-bytes", 11, weight(|_| {}), E::Limit(_)),
        case!("a doubling of functions", with_functions(chain(40, 2)), E::Structure(S::Limit(_)), "expanded-nodes"),
        case!("a long chain of functions", with_functions(chain(65, 1)), E::Structure(S::Limit(_)), "function-depth"),
    ]);
}

#[test]
fn versions_that_do_not_exist() {
    let opset = |list: &[(&str, i64)]| edited(|m| m.opset_import = opsets(list));
    refused(vec![
        case!("no opset", opset(&[]), E::NoOpset, "no operator set"),
        case!("opset 5", opset(&[("", 5)]), E::Opset(5), "opset 5"),
        case!("opset 0", opset(&[("", 0)]), E::Structure(S::OpsetVersion { version: 0, .. }), "version 0"),
        case!("a negative opset", opset(&[("", -1)]), E::Structure(S::OpsetVersion { .. }), "version -1"),
        case!("two opsets", opset(&[("", 17), ("ai.onnx", 18)]), E::Structure(S::OpsetTwice { .. }), "17"),
        case!("version 0 of a domain", opset(&[("", 17), ("ai.onnx.ml", 0)]), E::Structure(S::OpsetVersion { .. }), "ai.onnx.ml"),
        case!("an old IR version", edited(|m| m.ir_version = 2), E::IrVersion(2), "IR version 2"),
        case!("no IR version", edited(|m| m.ir_version = 0), E::IrVersion(0), "IR version 0"),
        case!("only a foreign domain", opset(&[("com.microsoft", 1)]), E::UnsupportedOps(_), "domain is not imported"),
    ]);
}

#[test]
fn graphs_that_break_the_rules() {
    let one = f32s(&[1], &[1.]);
    refused(vec![
        case!(
            "a value computed twice",
            base().node(unary("x", "y")).node(unary("x", "y")).output("y").bytes(),
            E::Structure(S::Duplicate { .. }),
            "Relu, opset 17"
        ),
        case!(
            "an input twice",
            base().input("x", DType::F32, "1").output("x").bytes(),
            E::Structure(S::Duplicate { .. }),
            "input"
        ),
        case!(
            "an initializer twice",
            base().initializer("w", &one).initializer("w", &one).output("w").bytes(),
            E::Structure(S::Duplicate { .. }),
            "initializer"
        ),
        case!(
            "a default twice",
            base().initializer("x", &one).initializer("x", &one).output("x").bytes(),
            E::Structure(S::Duplicate { .. }),
            "initializer"
        ),
        case!("an output twice", base().output("x").output("x").bytes(), E::Structure(S::Duplicate { .. }), "outputs"),
        case!(
            "a node that replaces an input",
            base().node(unary("x", "x")).output("x").bytes(),
            E::Structure(S::Duplicate { .. }),
            "\"x\""
        ),
        case!(
            "a value that nothing defines",
            base().node(unary("ghost", "y")).output("y").bytes(),
            E::Structure(S::Undefined { .. }),
            "ghost"
        ),
        case!("an output that nothing defines", base().output("ghost").bytes(), E::Structure(S::Undefined { .. }), "ghost"),
        case!(
            "the wrong order",
            base().node(unary("z", "y")).node(unary("x", "z")).output("y").bytes(),
            E::Structure(S::Order { .. }),
            "topological"
        ),
        case!(
            "a cycle",
            base().node(unary("z", "y")).node(unary("y", "z")).output("y").bytes(),
            E::Structure(S::Cycle { .. }),
            "cycle"
        ),
        case!(
            "a node that reads itself",
            base().node(unary("y", "y")).output("y").bytes(),
            E::Structure(S::Cycle { .. }),
            "cycle"
        ),
        case!(
            "an input without a name",
            base().input("", DType::F32, "1").output("x").bytes(),
            E::Structure(S::UnnamedInput),
            "input"
        ),
        case!(
            "an initializer without a name",
            base().initializer("", &one).output("x").bytes(),
            E::Structure(S::UnnamedInitializer),
            "initializer"
        ),
        case!("an output without a name", base().output("").bytes(), E::Structure(S::UnnamedOutput), "output"),
        case!(
            "a node without operator",
            base().node(node("", &["x"], &["y"])).output("y").bytes(),
            E::Structure(S::NoOperator { .. }),
            "\"y\""
        ),
        case!(
            "an unknown operator",
            base().node(node("Frobnicate", &["x"], &["y"])).output("y").bytes(),
            E::UnsupportedOps(_),
            "Frobnicate (opset 17)"
        ),
        case!(
            "an unknown domain",
            base().node(unary("x", "y").domain("org.example")).output("y").bytes(),
            E::UnsupportedOps(_),
            "org.example::Relu"
        ),
        case!(
            "a missing operand",
            base().node(node("Relu", &[""], &["y"])).output("y").bytes(),
            E::Node { .. },
            "input 0 is missing"
        ),
        case!(
            "too many operands",
            base().node(node("Relu", &["x", "x"], &["y"])).output("y").bytes(),
            E::Node { .. },
            "2 inputs"
        ),
    ]);
}

#[test]
fn subgraphs_that_break_the_rules() {
    refused(vec![
        case!(
            "a hidden value",
            with_subgraph(&[], &[unary("x", "condition")], "condition"),
            E::Structure(S::Shadowed { .. }),
            "condition"
        ),
        case!("a hidden input", with_subgraph(&["x"], &[unary("x", "z")], "z"), E::Structure(S::Shadowed { .. }), "\"x\""),
        case!(
            "a value that nothing defines",
            with_subgraph(&[], &[unary("ghost", "z")], "z"),
            E::Structure(S::Undefined { .. }),
            "ghost"
        ),
        case!(
            "a value computed twice",
            with_subgraph(&[], &[unary("x", "z"), unary("x", "z")], "z"),
            E::Structure(S::Duplicate { .. }),
            "\"z\""
        ),
        case!("a value that comes later", with_subgraph(&[], &[unary("late", "z")], "z"), E::Structure(S::Order { .. }), "late"),
        case!("a cycle", with_subgraph(&[], &[unary("b", "a"), unary("a", "b")], "b"), E::Structure(S::Cycle { .. }), "cycle"),
        case!("an input without a name", with_subgraph(&[""], &[unary("x", "z")], "z"), E::Structure(S::UnnamedInput), "input"),
        case!(
            "an output that nothing defines",
            with_subgraph(&[], &[unary("x", "z")], "ghost"),
            E::Structure(S::Undefined { .. }),
            "ghost"
        ),
    ]);
}

#[test]
fn functions_that_break_the_rules() {
    let identity = || function("f", &[unary("a", "b")]);
    let mut old = identity();
    old.opset_import = opsets(&[("", 0)]);
    refused(vec![
        case!(
            "a function that calls itself",
            with_functions(vec![function("f", &[call("f", "a", "b")])]),
            E::Structure(S::Recursion { .. }),
            "f calls f"
        ),
        case!(
            "functions that call each other",
            with_functions(vec![function("f", &[call("g", "a", "b")]), function("g", &[call("f", "a", "b")])]),
            E::Structure(S::Recursion { .. }),
            "f calls g calls f"
        ),
        case!(
            "a function twice",
            with_functions(vec![identity(), identity()]),
            E::Structure(S::DuplicateFunction { .. }),
            "\"f\""
        ),
        case!(
            "a function without a name",
            with_functions(vec![identity(), function("", &[])]),
            E::Structure(S::UnnamedFunction | S::Undefined { .. }),
            ""
        ),
        case!(
            "a value that nothing defines",
            with_functions(vec![function("f", &[unary("x", "b")])]),
            E::Structure(S::Undefined { .. }),
            "\"x\""
        ),
        case!(
            "an output that nothing defines",
            with_functions(vec![function("f", &[unary("a", "c")])]),
            E::Structure(S::Undefined { .. }),
            "\"b\""
        ),
        case!("an impossible opset", with_functions(vec![old]), E::Structure(S::OpsetVersion { .. }), "version 0"),
    ]);
}

#[test]
fn attributes_that_break_the_rules() {
    let axis = || AttributeProto { i: 1, ..attribute("axis", AttributeType::Int) };
    let floats = AttributeProto { floats: vec![1.0], ..axis() };
    let reference = AttributeProto { ref_attr_name: "axis".to_owned(), ..attribute("axis", AttributeType::Int) };
    let untyped = AttributeProto { r#type: 0, s: b"1".to_vec(), ..axis() };
    let unknown = AttributeProto { r#type: 99, ..axis() };
    let text = AttributeProto { s: b"1".to_vec(), ..attribute("axis", AttributeType::String) };
    refused(vec![
        case!(
            "an attribute twice",
            with_attributes(vec![axis(), axis()]),
            E::Structure(S::Attribute { source: A::Duplicate(_), .. }),
            "Softmax, opset 17"
        ),
        case!(
            "an attribute without a name",
            with_attributes(vec![attribute("", AttributeType::Int)]),
            E::Structure(S::Attribute { source: A::Unnamed, .. }),
            "name"
        ),
        case!(
            "an unknown type",
            with_attributes(vec![unknown]),
            E::Structure(S::Attribute { source: A::Type { found: 99, .. }, .. }),
            "99"
        ),
        case!(
            "a value of another type",
            with_attributes(vec![floats]),
            E::Structure(S::Attribute { source: A::Content { .. }, .. }),
            "a list of floats"
        ),
        case!(
            "two values",
            with_attributes(vec![untyped]),
            E::Structure(S::Attribute { source: A::Content { .. }, .. }),
            "a string"
        ),
        case!(
            "a tensor that is not there",
            with_attributes(vec![attribute("axis", AttributeType::Tensor)]),
            E::Structure(S::Attribute { source: A::Content { .. }, .. }),
            "nothing"
        ),
        case!(
            "a reference without a function",
            with_attributes(vec![reference]),
            E::Structure(S::Attribute { source: A::Reference { .. }, .. }),
            "function"
        ),
        case!("a type that the operator does not take", with_attributes(vec![text]), E::Node { .. }, "is no integer"),
    ]);
}

#[test]
fn tensors_that_break_the_rules() {
    let typed = |edit: &dyn Fn(&mut TensorProto)| {
        weight(|p| {
            p.raw_data.clear();
            edit(p);
        })
    };
    let location = StringStringEntryProto { key: "location".to_owned(), value: "data".to_owned() };
    refused(vec![
        case!("too few bytes", weight(|p| p.raw_data.truncate(11)), E::Tensor { source: T::Size { found: 11, .. }, .. }, "\"w\""),
        case!("too many bytes", weight(|p| p.raw_data.push(0)), E::Tensor { source: T::Size { found: 13, .. }, .. }, "13"),
        case!("no bytes", weight(|p| p.raw_data.clear()), E::Tensor { source: T::Size { found: 0, .. }, .. }, "holds 0"),
        case!("a negative size", weight(|p| p.dims = vec![-3]), E::Tensor { source: T::Shape(_), .. }, "-3"),
        case!(
            "sizes whose product overflows",
            weight(|p| p.dims = vec![1 << 40, 1 << 40]),
            E::Tensor { source: T::Shape(_), .. },
            "too large"
        ),
        case!(
            "sizes that are zero times huge",
            weight(|p| p.dims = vec![0, i64::MAX]),
            E::Tensor { source: T::Shape(_), .. },
            "too large"
        ),
        case!("2^32 elements", weight(|p| p.dims = vec![1 << 30, 4]), E::Tensor { source: T::Shape(_), .. }, "too large"),
        case!(
            "2^30 elements in 12 bytes",
            weight(|p| p.dims = vec![1 << 30]),
            E::Tensor { source: T::Size { .. }, .. },
            "holds 12"
        ),
        case!("nine axes", weight(|p| p.dims = vec![1; 9]), E::Tensor { source: T::Shape(_), .. }, "rank"),
        case!("a hundred thousand axes", weight(|p| p.dims = vec![1; 100_000]), E::Tensor { source: T::Shape(_), .. }, "rank"),
        case!("strings", weight(|p| p.data_type = 8), E::Tensor { source: T::DType(_), .. }, "string"),
        case!("an unknown type", weight(|p| p.data_type = 99), E::Tensor { source: T::DType(_), .. }, "99"),
        case!("no type", weight(|p| p.data_type = 0), E::Tensor { source: T::DType(_), .. }, "undefined"),
        case!("data twice", weight(|p| p.float_data = vec![1.; 3]), E::Tensor { source: T::TwoEncodings(_), .. }, "raw_data"),
        case!("too few floats", typed(&|p| p.float_data = vec![1.; 2]), E::Tensor { source: T::Size { .. }, .. }, "12"),
        case!(
            "floats among the integers",
            typed(&|p| p.int32_data = vec![1; 3]),
            E::Tensor { source: T::Size { .. }, .. },
            "elements"
        ),
        case!(
            "a byte of 300",
            base()
                .tensor(TensorProto {
                    data_type: 3,
                    dims: vec![1],
                    int32_data: vec![300],
                    name: "w".to_owned(),
                    ..TensorProto::default()
                })
                .node(node("Identity", &["w"], &["y"]))
                .output("y")
                .bytes(),
            E::Tensor { source: T::Element { value: 300, .. }, .. },
            "300"
        ),
        case!(
            "data inside and outside",
            weight(|p| {
                p.data_location = Some(1);
                p.external_data = vec![location.clone()];
            }),
            E::Tensor { source: T::TwoEncodings(_), .. },
            "external"
        ),
        case!(
            "a segment",
            weight(|p| p.segment = Some(tensor_proto::Segment { begin: 0, end: 1 })),
            E::Tensor { source: T::Segment, .. },
            "segments"
        ),
        case!(
            "a constant of the wrong length",
            {
                let mut constant = node("Constant", &[], &["c"]).tensor("value", &i64s(&[2], &[1, 2]));
                constant.0.attribute[0].t.as_mut().unwrap().raw_data.truncate(9);
                base().node(constant).node(node("Reshape", &["x", "c"], &["y"])).output("y").bytes()
            },
            E::Node { .. },
            "holds 9"
        ),
        case!(
            "a large constant of the wrong length",
            {
                let mut constant = node("Constant", &[], &["c"]).tensor("value", &f32s(&[30], &[1.; 30]));
                constant.0.attribute[0].t.as_mut().unwrap().raw_data.truncate(9);
                base().node(constant).output("c").bytes()
            },
            E::Tensor { source: T::Size { .. }, .. },
            "\"c\""
        ),
    ]);
}

#[test]
fn inputs_that_cannot_be() {
    let text =
        |info: &mut ValueInfoProto| set_type(info, TypeValue::TensorType(type_proto::Tensor { elem_type: 8, shape: None }));
    let sequence = |info: &mut ValueInfoProto| set_type(info, TypeValue::SequenceType(Sequence { elem_type: None }));
    let dims = |dims: &'static str| with_input(move |info| *info = value_info("x", DType::F32, dims));
    refused(vec![
        case!("strings", with_input(text), E::InputType { .. }, "string"),
        case!("a sequence", with_input(sequence), E::InputType { .. }, "\"x\""),
        case!("no type", with_input(|info| info.r#type = None), E::InputType { .. }, "no declared type"),
        case!("a negative size", dims("-2,3"), E::InputType { .. }, "negative"),
        case!("nine axes", dims("1,1,1,1,1,1,1,1,1"), E::InputType { .. }, "rank"),
        case!("2^40 elements", dims("1048576,1048576"), E::InputType { .. }, "too large"),
        case!("an open size", dims("n,3"), E::Binding(B::Missing(_)), "--dim"),
        case!("an impossible size", dims("2 - 3"), E::Binding(B::NoSize { .. }), "2 - 3"),
    ]);
}

#[test]
fn operators_that_would_take_all_memory() {
    let grown = |op: &str, target: &[i64]| {
        let builder = base().initializer("target", &i64s(&[target.len()], target));
        builder.node(node(op, &["x", "target"], &["y"])).output("y").bytes()
    };
    let constant = base().initializer("target", &i64s(&[2], &[1 << 20, 1 << 20]));
    refused(vec![
        case!("an expansion", grown("Expand", &[1 << 20, 1 << 20, 2, 3]), E::Node { .. }, "Expand, opset 17"),
        case!("a repetition", grown("Tile", &[1 << 30, 1 << 30]), E::Node { .. }, "Tile"),
        case!("a padding", grown("Pad", &[1 << 30, 1 << 30, 1 << 30, 1 << 30]), E::Node { .. }, "Pad"),
        case!("a reshape", grown("Reshape", &[i64::MAX, 2]), E::Node { .. }, "Reshape"),
        case!(
            "zeros",
            constant.node(node("ConstantOfShape", &["target"], &["y"])).output("y").bytes(),
            E::Node { .. },
            "ConstantOfShape"
        ),
        case!(
            "an operand of unknown value",
            base().input("s", DType::I64, "2").node(node("Reshape", &["x", "s"], &["y"])).output("y").bytes(),
            E::ValuesNeeded { .. },
            "Reshape"
        ),
    ]);
}
