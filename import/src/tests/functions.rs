use meganeura_ir::DType;

use crate::proto::attribute_proto::AttributeType;
use crate::proto::{AttributeProto, FunctionProto};
use crate::testing::{ModelBuilder, NodeBuilder, body, bools, f32s, function, node, run};
use crate::{ImportError, Model, StructureError, write_onnx};

fn base() -> ModelBuilder {
    ModelBuilder::new(18).input("x", DType::F32, "2")
}

fn call(name: &str, inputs: &[&str], outputs: &[&str]) -> NodeBuilder {
    node(name, inputs, outputs).domain("f")
}

/// `x`, or `slope * x` where it is negative. The slope is 0.5 by default.
fn leaky() -> FunctionProto {
    let nodes = vec![node("LeakyRelu", &["a"], &["b"]).reference("alpha", AttributeType::Float, "slope")];
    let slope = AttributeProto { name: "slope".to_owned(), f: 0.5, r#type: AttributeType::Float as i32, ..Default::default() };
    FunctionProto { attribute_proto: vec![slope], ..function("leaky", &["a"], nodes, &["b"]) }
}

fn numbers(builder: ModelBuilder, x: [f32; 2]) -> Vec<Vec<f64>> {
    run(&builder, &[f32s(&[2], &x)]).into_iter().map(|(_, values)| values).collect()
}

fn structure(builder: ModelBuilder) -> StructureError {
    match builder.open() {
        Err(ImportError::Structure(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn attributes_come_from_the_call_the_function_or_the_operator() {
    let mut plain = leaky();
    plain.name = "plain".to_owned();
    plain.attribute_proto.clear();
    let builder = base()
        .function(leaky())
        .function(plain)
        .node(call("leaky", &["x"], &["a"]).float("slope", 0.25))
        .node(call("leaky", &["x"], &["b"]))
        .node(call("plain", &["x"], &["c"]))
        .output("a")
        .output("b")
        .output("c");
    let [a, b, c] = numbers(builder, [-4., 1.]).try_into().unwrap();
    assert_eq!((a, b), (vec![-1., 1.], vec![-2., 1.]));
    assert!((c[0] + 0.04).abs() < 1e-6, "the operator's own default is 0.01: {c:?}");
}

#[test]
fn functions_call_functions_and_hand_attributes_on() {
    let nodes =
        vec![call("leaky", &["p"], &["q"]).reference("slope", AttributeType::Float, "outer"), call("leaky", &["q"], &["r"])];
    let builder = base()
        .function(function("twice", &["p"], nodes, &["r"]))
        .function(leaky())
        .node(call("twice", &["x"], &["y"]).float("outer", 0.25))
        .node(call("twice", &["y"], &["z"]).float("outer", 2.0))
        .output("y")
        .output("z");
    assert_eq!(numbers(builder, [-8., 3.]), [[-1., 3.], [-1., 3.]]);
}

#[test]
fn values_of_a_function_do_not_meet_those_of_its_caller() {
    // The branch defines the name that the caller gives to the operand which the branch reads.
    let branch = |op| body(&[], vec![node(op, &["a", "b"], &["x"])], &["x"]);
    let nodes = vec![node("If", &["c"], &["t"]).graph("then_branch", branch("Mul")).graph("else_branch", branch("Sub"))];
    let builder = base()
        .function(function("either", &["a", "b", "c"], nodes, &["t"]))
        .initializer("yes", &bools(&[], &[1]))
        .initializer("no", &bools(&[], &[0]))
        .node(call("either", &["x", "x", "yes"], &["t"]))
        .node(call("either", &["t", "x", "no"], &["u"]))
        .output("t")
        .output("u");
    assert_eq!(numbers(builder, [3., -2.]), [[9., 4.], [6., 6.]]);

    let reads_caller = function("reads", &["a"], vec![node("Add", &["a", "x"], &["b"])], &["b"]);
    let error = structure(base().function(reads_caller).node(call("reads", &["x"], &["y"])).output("y"));
    assert!(matches!(&error, StructureError::Undefined { name, .. } if name == "x"), "{error}");
}

#[test]
fn inputs_and_repeated_results_pass_through() {
    let sum = function("sum", &["a", "b"], vec![node("Add", &["a", "b"], &["s"])], &["a", "s", "s"]);
    let builder = base().function(sum).node(call("sum", &["x", "x"], &["p", "q", "r"]));
    let builder = builder.output("p").output("q").output("r");
    assert_eq!(numbers(builder, [1., 2.]), [[1., 2.], [2., 4.], [2., 4.]]);
}

#[test]
fn absent_operands_stay_absent() {
    let clip = function("clip", &["a", "low", "high"], vec![node("Clip", &["a", "low", "high"], &["b"])], &["b"]);
    let builder = base()
        .function(clip)
        .initializer("one", &f32s(&[], &[1.]))
        .node(call("clip", &["x", "", "one"], &["y"]))
        .node(call("clip", &["x", "one"], &["z"]))
        .output("y")
        .output("z");
    assert_eq!(numbers(builder, [-5., 5.]), [[-5., 1.], [1., 5.]]);
}

#[test]
fn a_function_keeps_the_operator_set_that_it_was_written_for() {
    // Softmax normalises over all axes from the given one on before opset 13.
    let mut old = function("old", &["a"], vec![node("Softmax", &["a"], &["b"]).int("axis", 0)], &["b"]);
    old.opset_import[0].version = 11;
    let builder = ModelBuilder::new(18)
        .input("x", DType::F32, "1,2")
        .function(old)
        .node(call("old", &["x"], &["y"]))
        .node(node("Softmax", &["x"], &["z"]).int("axis", 0))
        .output("y")
        .output("z");
    let results = run(&builder, &[f32s(&[1, 2], &[0., 0.])]);
    assert_eq!(results.into_iter().map(|(_, v)| v).collect::<Vec<_>>(), [[0.5, 0.5], [1., 1.]]);

    let mut ancient = leaky();
    ancient.opset_import[0].version = 5;
    let error = base().function(ancient).node(call("leaky", &["x"], &["y"])).output("y").open().unwrap_err();
    assert!(matches!(error, ImportError::Opset(5)), "{error}");
}

#[test]
fn overloads_are_different_functions() {
    let overload = |name: &str, op| FunctionProto {
        overload: name.to_owned(),
        ..function("g", &["a"], vec![node(op, &["a"], &["b"])], &["b"])
    };
    let call = |overload: &str, output: &str| {
        let mut node = call("g", &["x"], &[output]);
        node.0.overload = overload.to_owned();
        node
    };
    let builder = base().function(overload("one", "Neg")).function(overload("two", "Abs"));
    let builder = builder.node(call("one", "y")).node(call("two", "z")).output("y").output("z");
    assert_eq!(numbers(builder, [2., -3.]), [[-2., 3.], [2., 3.]]);
}

#[test]
fn a_weight_in_a_function_is_one_parameter_however_often_it_is_called() {
    let values: Vec<f32> = (0..20).map(|i| (19 - i) as f32).collect();
    let nodes = vec![
        node("Constant", &[], &["w"]).tensor("value", &f32s(&[20], &values)),
        node("ReduceSum", &["w"], &["s"]).int("keepdims", 0),
        node("Mul", &["a", "s"], &["b"]),
    ];
    let builder = base()
        .function(function("scale", &["a"], nodes, &["b"]))
        .node(call("scale", &["x"], &["t"]))
        .node(call("scale", &["t"], &["y"]))
        .output("y");
    let model = builder.open().unwrap();
    let names: Vec<&str> = model.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["scale/w"]);
    assert!(model.parameters()[0].trainable);
    assert_eq!(model.weight("scale/w").unwrap(), f32s(&[20], &values));
    assert_eq!(numbers(builder, [1., -1.]), [[190. * 190., -190. * 190.]]);

    let mut exported = Vec::new();
    write_onnx(&mut exported, &model, &|_| Ok(f32s(&[20], &[0.5; 20]))).unwrap();
    let copy = Model::from_onnx(exported, &Default::default()).unwrap();
    assert_eq!(copy.weight("scale/w").unwrap(), f32s(&[20], &[0.5; 20]));
}

#[test]
fn a_tensor_that_a_call_hands_over_belongs_to_the_call() {
    let nodes =
        vec![node("Constant", &[], &["c"]).reference("value", AttributeType::Tensor, "table"), node("Add", &["a", "c"], &["b"])];
    let table = f32s(&[20], &[2.; 20]);
    let builder = ModelBuilder::new(18)
        .input("x", DType::F32, "20")
        .function(function("shift", &["a"], nodes, &["b"]))
        .node(call("shift", &["x"], &["y"]).tensor("table", &table))
        .output("y");
    let model = builder.open().unwrap();
    assert_eq!(model.parameters()[0].name, "y/c");
    assert_eq!(model.weight("y/c").unwrap(), table);
    assert_eq!(run(&builder, &[f32s(&[20], &[1.; 20])])[0].1, [3.; 20]);
}

#[test]
fn operators_of_functions_count_as_those_of_the_model() {
    let nodes = vec![node("Relu", &["a"], &["t"]), node("Frobnicate", &["t"], &["b"])];
    let builder = base().function(function("odd", &["a"], nodes, &["b"]));
    let error = builder.node(call("odd", &["x"], &["y"])).output("y").open().unwrap_err();
    assert!(error.to_string().contains("Frobnicate (opset 18), 1 node"), "{error}");

    let model = base().function(leaky()).node(call("leaky", &["x"], &["y"])).output("y").open().unwrap();
    assert_eq!(model.op_counts().iter().map(|(op, n)| (op.as_str(), *n)).collect::<Vec<_>>(), [("LeakyRelu", 1)]);
}

#[test]
fn functions_that_cannot_be_expanded_are_refused() {
    let looped = |name: &str, callee: &str| function(name, &["a"], vec![call(callee, &["a"], &["b"])], &["b"]);
    let model = |functions: Vec<FunctionProto>, node: NodeBuilder| {
        structure(functions.into_iter().fold(base(), ModelBuilder::function).node(node).output("y"))
    };
    let x = || call("g", &["x"], &["y"]);
    assert!(matches!(model(vec![looped("g", "g")], x()), StructureError::Recursion { .. }));
    assert!(matches!(model(vec![looped("g", "h"), looped("h", "g")], x()), StructureError::Recursion { .. }));
    assert!(matches!(model(vec![leaky(), leaky()], x()), StructureError::DuplicateFunction { .. }));
    let error = model(vec![leaky()], call("leaky", &["x", "x"], &["y"]));
    assert!(matches!(error, StructureError::Call { .. }), "{error}");
    let error = model(vec![leaky()], call("leaky", &["x"], &["y", "z"]));
    assert!(matches!(error, StructureError::Call { .. }), "{error}");
    let again = function("g", &["a"], vec![node("Abs", &["a"], &["a"])], &["a"]);
    let error = model(vec![again], x());
    assert!(matches!(error, StructureError::Duplicate { .. }), "{error}");
    let error = model(vec![], node("LeakyRelu", &["x"], &["y"]).reference("alpha", AttributeType::Float, "slope"));
    assert!(matches!(error, StructureError::Attribute { .. }), "{error}");
}

#[test]
fn expansion_is_limited() {
    // Each function calls the next ten times.
    let level = |i: usize| {
        let calls = (0..10).map(|k| call(&format!("g{}", i + 1), &["a"], &[if k == 0 { "b" } else { "" }])).collect();
        function(&format!("g{i}"), &["a"], calls, &["b"])
    };
    let model =
        (0..9).map(level).fold(base(), ModelBuilder::function).function(FunctionProto { name: "g9".to_owned(), ..leaky() });
    let error = structure(model.node(call("g0", &["x"], &["y"])).output("y"));
    assert!(matches!(error, StructureError::Limit(_)), "{error}");

    let chain = (0..40).map(|i| function(&format!("g{i}"), &["a"], vec![call(&format!("g{}", i + 1), &["a"], &["b"])], &["b"]));
    let error = structure(chain.fold(base(), ModelBuilder::function).node(call("g0", &["x"], &["y"])).output("y"));
    assert!(matches!(error, StructureError::Nesting(_)), "{error}");
}
