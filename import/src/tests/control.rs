use std::path::Path;

use meganeura_ir::testing::relative_l2;
use meganeura_ir::{DType, Tensor};

use super::corpus::array;
use crate::proto::GraphProto;
use crate::testing::{ModelBuilder, NodeBuilder, body, bools, evaluate, f32s, i64s, node, run, tensor_proto};
use crate::{Bindings, ImportError, Model, OpError, StructureError, write_artifact, write_onnx};

fn base() -> ModelBuilder {
    ModelBuilder::new(18).input("x", DType::F32, "2").input("flag", DType::Bool, "")
}

fn branches(condition: &str, then_branch: GraphProto, else_branch: GraphProto) -> NodeBuilder {
    node("If", &[condition], &["y"]).graph("then_branch", then_branch).graph("else_branch", else_branch)
}

fn unary(op: &str) -> GraphProto {
    body(&[], vec![node(op, &["x"], &["r"])], &["r"])
}

fn bound(flag: bool) -> Bindings {
    Bindings { values: [("flag".to_owned(), bools(&[], &[flag as i64]))].into(), ..Bindings::default() }
}

fn with_weight(mut graph: GraphProto, name: &str, value: f32) -> GraphProto {
    graph.initializer.push(tensor_proto(name, &f32s(&[2], &[value; 2])));
    graph
}

/// Both branches hold a weight of the same name.
fn weighted() -> ModelBuilder {
    let product = |value| with_weight(body(&[], vec![node("Mul", &["x", "w"], &["r"])], &["r"]), "w", value);
    base().node(branches("flag", product(3.), product(5.))).output("y")
}

fn results(model: &Model, flag: bool, x: [f32; 2]) -> Vec<f64> {
    let specialized = model.specialize(&bound(flag)).unwrap();
    evaluate(model, &specialized.graph, &[f32s(&[2], &x)]).remove(0).1
}

#[test]
fn an_input_that_decides_a_branch_is_named_with_the_way_to_the_condition() {
    let builder = base()
        .node(node("ReduceSum", &["x"], &["sum"]).int("keepdims", 0))
        .node(node("Greater", &["sum", "zero"], &["positive"]))
        .node(node("And", &["positive", "flag"], &["both"]))
        .initializer("zero", &f32s(&[], &[0.]));
    let model = builder.node(branches("both", unary("Neg"), unary("Abs"))).output("y").open().unwrap();
    let error = model.specialize(&Bindings::default()).unwrap_err();
    let ImportError::ValuesNeeded { what, inputs, path, .. } = &error else { panic!("{error}") };
    assert_eq!((*what, inputs.as_slice()), ("the condition", &["x".to_owned(), "flag".to_owned()][..]));
    assert_eq!(path, &["x", "sum", "positive", "both"]);
    assert!(error.to_string().contains("(x → sum → positive → both)"), "{error}");

    let data = [("x", &f32s(&[2], &[1., 2.])), ("flag", &bools(&[], &[1]))];
    let (specialized, bindings) = model.specialize_on(&Bindings::default(), &data).unwrap();
    assert_eq!(bindings.values.len(), 2);
    assert_eq!(evaluate(&model, &specialized.graph, &[])[0].1, [-1., -2.]);
}

#[test]
fn weights_in_branches_are_parameters_with_names_of_their_own() {
    let model = weighted().open().unwrap();
    let names: Vec<&str> = model.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["w", "y/else_branch/w"]);
    assert!(model.parameters().iter().all(|p| p.trainable));
    assert_eq!(results(&model, true, [1., 2.]), [3., 6.]);
    assert_eq!(results(&model, false, [1., 2.]), [5., 10.]);
}

#[test]
fn weights_in_branches_are_written_back() {
    let model = weighted().open().unwrap();
    let new = |name: &str| -> Result<Tensor, ImportError> { Ok(f32s(&[2], &[if name == "w" { 7. } else { 11. }; 2])) };
    let (mut onnx, mut artifact) = (Vec::new(), Vec::new());
    write_onnx(&mut onnx, &model, &new).unwrap();
    write_artifact(&mut artifact, &model, &new).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, artifact).unwrap();
    for copy in [Model::from_onnx(onnx, &Default::default()).unwrap(), Model::open(path).unwrap()] {
        assert_eq!(copy.parameters(), model.parameters());
        assert_eq!(results(&copy, true, [1., 2.]), [7., 14.]);
        assert_eq!(results(&copy, false, [1., 2.]), [11., 22.]);
    }
}

#[test]
fn a_branch_that_never_runs_needs_no_support() {
    let mut deeper = unary("Frobnicate");
    deeper.node.push(node("Undertake", &["r"], &["s"]).0);
    deeper.output[0].name = "s".to_owned();
    let model = base().node(branches("flag", unary("Neg"), deeper)).output("y").open().unwrap();
    assert_eq!(results(&model, true, [1., -2.]), [-1., 2.]);
    assert_eq!(model.op_counts()["Frobnicate"], 1);
    let error = model.specialize(&bound(false)).unwrap_err();
    let ImportError::UnsupportedOps(ops) = &error else { panic!("{error}") };
    assert_eq!(ops.iter().map(|o| o.op.as_str()).collect::<Vec<_>>(), ["Frobnicate", "Undertake"]);

    // Where the import fails anyway, it lists those of branches too; bodies of loops always count.
    let both = base().node(branches("flag", unary("Neg"), unary("Frobnicate"))).node(node("Huh", &["y"], &["z"])).output("z");
    assert!(matches!(both.open(), Err(ImportError::UnsupportedOps(ops)) if ops.len() == 2));
    let looped = body(&["i", "c", "v"], vec![node("Frobnicate", &["v"], &["w"])], &["c", "w"]);
    let looped = base().node(node("Loop", &["", "flag", "x"], &["y"]).graph("body", looped)).output("y");
    assert!(matches!(looped.open(), Err(ImportError::UnsupportedOps(_))));
}

#[test]
fn bodies_see_what_is_defined_around_them_and_nothing_else() {
    // What only a body reads is needed: a node, and a weight.
    let reads = || body(&[], vec![node("Add", &["double", "w"], &["r"])], &["r"]);
    let model = base()
        .initializer("w", &f32s(&[2], &[1., 2.]))
        .node(node("Add", &["x", "x"], &["double"]))
        .node(branches("flag", reads(), unary("Neg")))
        .output("y");
    assert_eq!(results(&model.open().unwrap(), true, [1., 1.]), [3., 4.]);

    let foreign = body(&[], vec![node("Neg", &["inner"], &["r"])], &["r"]);
    let own = body(&[], vec![node("Neg", &["x"], &["inner"])], &["inner"]);
    let error = base().node(branches("flag", own, foreign)).output("y").open().unwrap_err();
    assert!(matches!(&error, ImportError::Structure(StructureError::Undefined { name, .. }) if name == "inner"), "{error}");
    let twice = body(&[], vec![node("Neg", &["x"], &["r"]), node("Abs", &["x"], &["r"])], &["r"]);
    let error = base().node(branches("flag", twice, unary("Neg"))).output("y").open().unwrap_err();
    assert!(matches!(&error, ImportError::Structure(StructureError::Duplicate { .. })), "{error}");
}

fn looped(nodes: Vec<NodeBuilder>, inputs: &[&str]) -> NodeBuilder {
    node("Loop", inputs, &["y"]).graph("body", body(&["i", "c", "v"], nodes, &["on", "w"]))
}

#[test]
fn loops_that_data_ends_are_refused_with_the_inputs_that_decide() {
    let step = || node("Add", &["v", "v"], &["w"]);
    let sum = || node("ReduceSum", &["w"], &["sum"]).int("keepdims", 0);
    let nodes = || vec![step(), sum(), node("Less", &["sum", "limit"], &["on"])];
    let builder = || base().initializer("limit", &f32s(&[], &[9.])).initializer("yes", &bools(&[], &[1]));
    let model = builder().node(looped(nodes(), &["", "yes", "x"])).output("y").open().unwrap();
    let error = model.specialize(&Bindings::default()).unwrap_err();
    let ImportError::ValuesNeeded { what, inputs, .. } = &error else { panic!("{error}") };
    assert_eq!((*what, inputs.as_slice()), ("the condition of the loop", &["x".to_owned()][..]));
    // On data it runs: 1 + 1 doubles until it is 9 or more.
    let data = [("x", &f32s(&[2], &[1., 1.])), ("flag", &bools(&[], &[1]))];
    let (specialized, _) = model.specialize_on(&Bindings::default(), &data).unwrap();
    assert_eq!(evaluate(&model, &specialized.graph, &[bools(&[], &[1])])[0].1, [8., 8.]);

    // Nothing that could be bound decides here.
    let on_weight = vec![step(), node("ReduceSum", &["big"], &["s"]).int("keepdims", 0), node("Less", &["s", "limit"], &["on"])];
    let model = builder().initializer("big", &f32s(&[2], &[1., 2.])).node(looped(on_weight, &["", "yes", "x"])).output("y");
    let error = model.open().unwrap().specialize(&Bindings::default()).unwrap_err();
    assert!(matches!(&error, ImportError::Node { source, .. } if matches!(**source, OpError::Undecided { .. })), "{error}");
}

#[test]
fn loops_end_at_a_limit() {
    let forever = vec![node("Add", &["v", "v"], &["w"]), node("Identity", &["c"], &["on"])];
    let model = base().initializer("yes", &bools(&[], &[1])).node(looped(forever, &["", "yes", "x"])).output("y");
    let error = model.open().unwrap().specialize(&Bindings::default()).unwrap_err();
    assert!(matches!(&error, ImportError::Node { source, .. } if matches!(**source, OpError::Limit { .. })), "{error}");
    let unended = looped(vec![node("Add", &["v", "v"], &["w"]), node("Identity", &["c"], &["on"])], &["", "", "x"]);
    let error = base().node(unended).output("y").open().unwrap().specialize(&Bindings::default()).unwrap_err();
    assert!(error.to_string().contains("without trip count"), "{error}");
}

#[test]
fn a_loop_may_carry_a_sequence_and_decide_branches_by_its_iteration() {
    let even = vec![
        node("Mod", &["i", "two"], &["m"]),
        node("Equal", &["m", "zero"], &["even"]),
        branches("even", unary("Neg"), unary("Abs")),
        node("SequenceInsert", &["v", "y"], &["w"]),
        node("Identity", &["c"], &["on"]),
    ];
    let mut inner = looped(even, &["three", "", "none"]);
    inner.0.output = vec!["all".to_owned()];
    let builder = ModelBuilder::new(18)
        .input("x", DType::F32, "2")
        .initializer("three", &i64s(&[], &[3]))
        .initializer("two", &i64s(&[], &[2]))
        .initializer("zero", &i64s(&[], &[0]))
        .node(node("SequenceEmpty", &[], &["none"]))
        .node(inner)
        .node(node("ConcatFromSequence", &["all"], &["joined"]).int("axis", 0).int("new_axis", 1))
        .output("joined");
    let (ty, values) = run(&builder, &[f32s(&[2], &[1., -2.])]).remove(0);
    assert_eq!(ty.shape.to_vec(), [3, 2]);
    assert_eq!(values, [-1., 2., 1., 2., -1., 2.]);
}

#[test]
fn errors_in_bodies_name_the_node_and_those_around_it() {
    let misfit = || body(&[], vec![NodeBuilder(node("MatMul", &["x", "flag"], &["r"]).0)], &["r"]);
    let model = base().node(branches("flag", misfit(), unary("Neg"))).output("y").open().unwrap();
    let error = model.specialize(&bound(true)).unwrap_err();
    assert!(error.to_string().contains("that computes \"r\" in that computes \"y\" (MatMul"), "{error}");
}

fn fixture(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/control").join(file)
}

/// A model that an exporter wrote gives PyTorch's outputs.
fn check_export(name: &str) -> Model {
    let model = Model::open(fixture(&format!("{name}.onnx"))).unwrap();
    let expect = fixture("expect.npz");
    let read = |kind: &str, value: &str| array(&expect, &[format!("{name}/{kind}/{value}")]);
    let inputs: Vec<(String, Tensor)> = model.inputs().iter().map(|i| (i.name.clone(), read("in", &i.name))).collect();
    let data: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let shapes = inputs.iter().map(|(name, value)| (name.clone(), value.shape().to_vec())).collect();
    let (specialized, bound) = model.specialize_on(&Bindings { shapes, ..Bindings::default() }, &data).unwrap();
    let free: Vec<Tensor> = inputs.iter().filter(|(n, _)| !bound.values.contains_key(n)).map(|(_, t)| t.clone()).collect();
    for (output, (ty, found)) in model.outputs().iter().zip(evaluate(&model, &specialized.graph, &free)) {
        let expected = read("out", &output.name);
        assert_eq!(&ty, expected.ty(), "{name}: {}", output.name);
        let error = relative_l2(&found, &expected.to_f64_vec());
        assert!(error < 1e-6, "{name}: {} is off by {error}", output.name);
    }
    model
}

#[test]
fn functions_of_onnxscript_give_pytorchs_numbers() {
    let model = check_export("functions");
    assert_eq!(model.parameters().iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["table/columns"]);
}

#[test]
fn a_flag_among_the_inputs_chooses_the_branch_of_a_merged_export() {
    let model = check_export("branch");
    let names: Vec<&str> = model.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["cached.weight", "cached.bias", "fresh.weight", "fresh.bias"]);
}

#[test]
fn a_loop_of_torchscript_gives_pytorchs_numbers() {
    check_export("loop");
}
