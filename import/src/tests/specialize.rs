use meganeura_ir::{DType, Op, Tensor};

use crate::testing::{ModelBuilder, evaluate, f32s, i64s, node, run};
use crate::{BindingError, Bindings, Dim, ImportError, Warning};

fn bindings(dims: &[(&str, usize)], shapes: &[(&str, &[usize])]) -> Bindings {
    Bindings {
        dims: dims.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect(),
        shapes: shapes.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect(),
        ..Bindings::default()
    }
}

/// `y = reshape(x, [batch * length, -1]) . w`, with the shape computed as exporters do.
fn sample() -> ModelBuilder {
    ModelBuilder::new(17)
        .input("x", DType::F32, "batch,length,2")
        .input("mask", DType::F32, "batch,?")
        .initializer("w", &f32s(&[2, 1], &[1.0, 10.0]))
        .initializer("zero", &i64s(&[], &[0]))
        .initializer("one", &i64s(&[], &[1]))
        .initializer("rest", &i64s(&[1], &[-1]))
        .initializer("first", &i64s(&[1], &[0]))
        .node(node("Shape", &["x"], &["shape"]))
        .node(node("Gather", &["shape", "zero"], &["batch"]))
        .node(node("Gather", &["shape", "one"], &["length"]))
        .node(node("Mul", &["batch", "length"], &["rows"]))
        .node(node("Unsqueeze", &["rows", "first"], &["rows1"]))
        .node(node("Concat", &["rows1", "rest"], &["target"]).int("axis", 0))
        .node(node("Reshape", &["x", "target"], &["flat"]))
        .node(node("MatMul", &["flat", "w"], &["y"]))
        .output("y")
        .output("mask")
}

#[test]
fn shapes_are_computed_while_the_graph_is_built() {
    let model = sample().open().unwrap();
    let specialized = model.specialize(&bindings(&[], &[("x", &[2, 3, 2]), ("mask", &[2, 7])])).unwrap();
    assert_eq!(specialized.dims, [("batch", 2), ("length", 3), ("mask.1", 7)].map(|(n, d)| (n.to_owned(), d)).into());
    let ops: Vec<_> = specialized.graph.nodes().iter().map(|n| n.op.name()).collect();
    assert_eq!(ops, ["input", "input", "parameter", "reshape", "dot"]);
    let x = f32s(&[2, 3, 2], &[1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.]);
    let results = evaluate(&model, &specialized.graph, &[x, f32s(&[2, 7], &[0.; 14])]);
    assert_eq!(results[0].1, [21., 43., 65., 87., 109., 131.]);
}

#[test]
fn all_missing_sizes_are_asked_for_at_once() {
    let model = sample().open().unwrap();
    let error = model.specialize(&bindings(&[("batch", 2)], &[])).unwrap_err();
    let ImportError::Binding(BindingError::Missing(missing)) = &error else { panic!("{error}") };
    assert_eq!(missing.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), ["length", "mask.1"]);
    assert!(error.to_string().contains("length (axis 1 of input x)"), "{error}");
}

#[test]
fn sizes_that_disagree_or_do_not_exist_are_errors() {
    let model = sample().open().unwrap();
    let error = |b: Bindings| match model.specialize(&b).unwrap_err() {
        ImportError::Binding(e) => e,
        other => panic!("{other}"),
    };
    let contradiction = error(bindings(&[("batch", 3)], &[("x", &[2, 3, 2])]));
    assert_eq!(contradiction, BindingError::Contradiction { name: "batch".into(), first: 3, second: 2 });
    let contradiction = error(bindings(&[], &[("x", &[2, 3, 2]), ("mask", &[4, 3])]));
    assert!(matches!(contradiction, BindingError::Contradiction { .. }));
    assert!(matches!(error(bindings(&[("bach", 3)], &[])), BindingError::UnknownDim { .. }));
    assert!(matches!(error(bindings(&[], &[("z", &[1])])), BindingError::UnknownInput { .. }));
    assert!(matches!(error(bindings(&[], &[("x", &[1])])), BindingError::Rank { expected: 3, .. }));
}

/// `y = x * halves[::2]`, as torch.onnx.export writes the sizes.
fn doubled() -> ModelBuilder {
    ModelBuilder::new(17)
        .input("x", DType::F32, "half,3")
        .input("halves", DType::F32, "2*half,3")
        .initializer("start", &i64s(&[1], &[0]))
        .initializer("end", &i64s(&[1], &[i64::MAX]))
        .initializer("axis", &i64s(&[1], &[0]))
        .initializer("step", &i64s(&[1], &[2]))
        .node(node("Slice", &["halves", "start", "end", "axis", "step"], &["even"]))
        .node(node("Mul", &["x", "even"], &["y"]))
        .declared_output("y", DType::F32, "half,3")
}

#[test]
fn sizes_that_are_expressions_are_computed_or_solved() {
    let model = doubled().open().unwrap();
    for bindings in [
        bindings(&[("half", 4)], &[]),
        bindings(&[("2*half", 8)], &[]),
        bindings(&[], &[("halves", &[8, 3])]),
        bindings(&[], &[("x", &[4, 3]), ("halves", &[8, 3])]),
    ] {
        let specialized = model.specialize(&bindings).unwrap();
        assert_eq!(specialized.dims, [("half".to_owned(), 4)].into());
        assert_eq!(specialized.warnings, []);
        let shapes: Vec<_> = specialized.graph.inputs().iter().map(|i| i.ty.shape.to_vec()).collect();
        assert_eq!(shapes, [[4, 3], [8, 3]]);
    }
    let error = |b| match model.specialize(&b).unwrap_err() {
        ImportError::Binding(e) => e,
        other => panic!("{other}"),
    };
    let odd = error(bindings(&[], &[("halves", &[7, 3])]));
    assert_eq!(odd.to_string(), "no size makes \"2*half\" equal to 7");
    let contradiction = error(bindings(&[("half", 3)], &[("halves", &[8, 3])]));
    assert_eq!(contradiction.to_string(), "no size makes \"2*half\" equal to 8 where half = 3");
    let BindingError::Missing(missing) = error(bindings(&[], &[])) else { panic!() };
    assert_eq!(missing.len(), 1);
}

#[test]
fn sizes_that_do_not_follow_are_asked_for() {
    let open = |dims: &str| ModelBuilder::new(17).input("x", DType::F32, dims).output("x").open().unwrap();
    let shape = |size| bindings(&[], &[("x", &[size])]);
    for dims in ["a + b", "n//2", "n**2"] {
        let error = open(dims).specialize(&shape(3)).unwrap_err();
        assert!(matches!(&error, ImportError::Binding(BindingError::Missing(m)) if !m.is_empty()), "{dims}: {error}");
    }
    let mut both = shape(3);
    both.dims.insert("n".to_owned(), 7);
    assert_eq!(open("n//2").specialize(&both).unwrap().graph.inputs()[0].ty.shape.to_vec(), [3]);
    let error = open("n - 5").specialize(&bindings(&[("n", 2)], &[])).unwrap_err();
    assert!(matches!(error, ImportError::Binding(BindingError::NoSize { .. })), "{error}");
    for name in ["s77", "unk__214", "p2o.DynamicDimension.0", "batch x heads"] {
        assert_eq!(open(name).specialize(&bindings(&[(name, 3)], &[])).unwrap().dims, [(name.to_owned(), 3)].into());
    }
    let unnamed = open("-1");
    assert_eq!(unnamed.inputs()[0].dims, [Dim::Symbol("x.0".to_owned())]);
}

#[test]
fn given_shapes_override_declared_sizes_with_a_warning() {
    let builder = ModelBuilder::new(17).input("x", DType::F32, "4,2").node(node("Relu", &["x"], &["y"])).declared_output(
        "y",
        DType::F32,
        "4,2",
    );
    let model = builder.open().unwrap();
    let specialized = model.specialize(&bindings(&[], &[("x", &[1, 2])])).unwrap();
    assert_eq!(specialized.graph.inputs()[0].ty.shape.to_vec(), [1, 2]);
    let [overridden, declared] = specialized.warnings.as_slice() else { panic!("{:?}", specialized.warnings) };
    assert!(matches!(overridden, Warning::OverriddenShape { .. }));
    assert_eq!(declared.to_string(), "y is declared f32[4,2] but is f32[1,2]");
}

#[test]
fn default_sizes_count_where_none_are_given() {
    let mut model = sample().open().unwrap();
    model.set_bindings(bindings(&[("batch", 2), ("length", 5), ("mask.1", 1)], &[]));
    let specialized = model.specialize(&bindings(&[("length", 4)], &[])).unwrap();
    assert_eq!(specialized.graph.inputs()[0].ty.shape.to_vec(), [2, 4, 2]);
    let specialized = model.specialize(&bindings(&[], &[("x", &[3, 1, 2])])).unwrap();
    assert_eq!(specialized.graph.inputs()[0].ty.shape.to_vec(), [3, 1, 2]);
}

#[test]
fn parameter_ids_do_not_depend_on_sizes_or_use() {
    let model = ModelBuilder::new(17)
        .input("x", DType::F32, "n")
        .initializer("a", &f32s(&[1], &[1.]))
        .initializer("b", &f32s(&[1], &[2.]))
        .node(node("Mul", &["x", "b"], &["xb"]))
        .node(node("Add", &["xb", "a"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    for n in [1, 4] {
        let graph = model.specialize(&bindings(&[("n", n)], &[])).unwrap().graph;
        assert_eq!(graph.parameters().iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    }
}

#[test]
fn a_parameter_that_is_used_twice_is_one_parameter() {
    let model = ModelBuilder::new(17)
        .input("ids", DType::I64, "3")
        .initializer("embedding", &f32s(&[4, 2], &[0., 1., 2., 3., 4., 5., 6., 7.]))
        .node(node("Gather", &["embedding", "ids"], &["h"]))
        .node(node("Transpose", &["embedding"], &["t"]))
        .node(node("MatMul", &["h", "t"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    let graph = model.specialize(&Bindings::default()).unwrap().graph;
    assert_eq!(graph.parameters().len(), 1);
    assert_eq!(graph.nodes().iter().filter(|n| matches!(n.op, Op::Parameter(_))).count(), 1);
}

#[test]
fn narrow_and_wide_floats_compute_in_f32_and_keep_their_dtype() {
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        let model = ModelBuilder::new(17)
            .input("x", dtype, "2")
            .initializer("w", &Tensor::from_f64(dtype, [2], &[0.5, 2.0]))
            .node(node("Mul", &["x", "w"], &["y"]))
            .declared_output("y", dtype, "2")
            .open()
            .unwrap();
        let specialized = model.specialize(&Bindings::default()).unwrap();
        let parameter = &specialized.graph.parameters()[0];
        assert_eq!((parameter.ty.dtype, parameter.stored), (DType::F32, dtype));
        assert_eq!(specialized.warnings, []);
        assert_eq!(evaluate(&model, &specialized.graph, &[f32s(&[2], &[3., 4.])])[0].1, [1.5, 8.0]);
    }
}

#[test]
fn known_values_fold_and_uniform_ones_stay_scalars() {
    let model = ModelBuilder::new(17)
        .input("x", DType::F32, "64,64")
        .initializer("shape", &i64s(&[2], &[64, 64]))
        .node(node("ConstantOfShape", &["shape"], &["zeros"]))
        .node(node("Exp", &["zeros"], &["ones"]))
        .node(node("Add", &["x", "ones"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    let graph = model.specialize(&Bindings::default()).unwrap().graph;
    let ops: Vec<_> = graph.nodes().iter().map(|n| n.op.name()).collect();
    assert_eq!(ops, ["input", "constant", "broadcast", "add"]);
}

#[test]
fn integers_beyond_32_bits_are_refused_where_they_reach_the_device() {
    let slice_end = i64s(&[1], &[i64::MAX]);
    let builder = |node| {
        ModelBuilder::new(17)
            .input("x", DType::I64, "3")
            .initializer("zero", &i64s(&[1], &[0]))
            .initializer("huge", &slice_end)
            .node(node)
            .output("y")
    };
    let harmless = builder(node("Slice", &["x", "zero", "huge"], &["y"]));
    assert_eq!(run(&harmless, &[i64s(&[3], &[1, 2, 3])])[0].1, [1., 2., 3.]);
    let harmful = builder(node("Min", &["x", "huge"], &["y"])).open().unwrap();
    let error = harmful.specialize(&Bindings::default()).unwrap_err();
    assert!(matches!(&error, ImportError::IntegerRange { output, value: i64::MAX, .. } if output == "y"), "{error}");
}

#[test]
fn errors_name_the_node_and_the_reason() {
    let fails = |builder: ModelBuilder| builder.open().unwrap().specialize(&Bindings::default()).unwrap_err().to_string();
    let base = || ModelBuilder::new(17).input("x", DType::F32, "2,3").input("s", DType::I64, "2").output("y");
    let error = fails(base().node(node("Reshape", &["x", "s"], &["y"])));
    assert_eq!(
        error,
        "node that computes \"y\" (Reshape, opset 17): the values of input s decide a shape; run the model on data, \
         or bind the values"
    );
    let error = fails(base().node(node("Concat", &["x"], &["y"])));
    assert!(error.contains("attribute \"axis\" is missing"), "{error}");
    let error = fails(base().node(node("Concat", &["x"], &["y"]).float("axis", 1.0)));
    assert!(error.contains("attribute \"axis\" is no integer"), "{error}");
    let error = fails(base().node(node("Relu", &["x", "x"], &["y"])));
    assert!(error.contains("2 inputs, 1 are allowed"), "{error}");
    let error = fails(base().node(node("Transpose", &["x"], &["y"]).ints("perm", &[0, 5])));
    assert!(error.contains("axis 5 of a tensor of rank 2"), "{error}");
    let error = fails(base().initializer("w", &f32s(&[4], &[0.; 4])).node(node("Add", &["x", "w"], &["y"])));
    assert!(error.contains("f32[2,3] and f32[4] do not broadcast"), "{error}");
}

#[test]
fn results_that_nothing_reads_need_no_support() {
    let batch_norm = |outputs: &[&str]| {
        let operands = ["x", "scale", "bias", "mean", "variance"];
        let builder = ModelBuilder::new(9).input("x", DType::F32, "2,1").output("y");
        let builder = operands[1..].iter().fold(builder, |builder, name| builder.input(name, DType::F32, "1"));
        let results = ["y", "running_mean", "running_variance", "saved_mean"];
        let builder = builder.node(node("BatchNormalization", &operands, &results));
        outputs.iter().fold(builder, |builder, name| builder.output(name)).open().unwrap()
    };
    batch_norm(&["running_mean"]).specialize(&Bindings::default()).unwrap();
    let error = batch_norm(&["saved_mean"]).specialize(&Bindings::default()).unwrap_err();
    assert!(error.to_string().contains("saved_mean"), "{error}");
}

#[test]
fn unknown_attributes_are_reported() {
    let model = ModelBuilder::new(17)
        .input("x", DType::F32, "2")
        .node(node("Relu", &["x"], &["y"]).int("mystery", 1))
        .output("y")
        .open()
        .unwrap();
    let warnings = model.specialize(&Bindings::default()).unwrap().warnings;
    assert!(matches!(warnings.as_slice(), [Warning::IgnoredAttribute { attribute, .. }] if attribute == "mystery"));
}

#[test]
fn zero_sizes_and_scalars_are_legal() {
    let builder = ModelBuilder::new(17)
        .input("x", DType::F32, "0,3")
        .input("s", DType::F32, "")
        .node(node("Mul", &["x", "s"], &["y"]))
        .node(node("ReduceSum", &["y"], &["z"]).int("keepdims", 0))
        .output("y")
        .output("z");
    let results = run(&builder, &[f32s(&[0, 3], &[]), f32s(&[], &[2.0])]);
    assert!(results[0].1.is_empty());
    assert_eq!(results[1].1, [0.0]);
}

/// `y = reshape(x, target + offset)`, where the target is an input.
fn reshaping() -> ModelBuilder {
    ModelBuilder::new(17)
        .input("x", DType::F32, "2,3")
        .input("target", DType::I64, "rank")
        .initializer("offset", &i64s(&[1], &[1]))
        .node(node("Add", &["target", "offset"], &["shape"]))
        .node(node("Reshape", &["x", "shape"], &["y"]))
        .output("y")
}

#[test]
fn inputs_whose_values_decide_shapes_are_named() {
    let model = reshaping().open().unwrap();
    let error = model.specialize(&bindings(&[], &[("target", &[2])])).unwrap_err();
    let ImportError::ValuesNeeded { node, inputs, .. } = &error else { panic!("{error}") };
    assert_eq!((node.op.as_str(), inputs.as_slice()), ("Reshape", ["target".to_owned()].as_slice()));
}

#[test]
fn inputs_that_decide_shapes_become_constants_of_the_specialisation() {
    let model = reshaping().open().unwrap();
    let (x, target) = (f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.]), i64s(&[2], &[2, -2]));
    let data = [("x", &x), ("target", &target)];
    let (specialized, bound) = model.specialize_on(&bindings(&[], &[("target", &[2])]), &data).unwrap();
    assert_eq!(bound.values.keys().collect::<Vec<_>>(), ["target"]);
    assert_eq!(specialized.graph.inputs().iter().map(|i| i.name.as_str()).collect::<Vec<_>>(), ["x"]);
    let y = specialized.graph.outputs()[0].node;
    assert_eq!(*specialized.graph.ty(y).shape, [3, 2]);

    let stored: Bindings = serde_json::from_str(&serde_json::to_string(&bound).unwrap()).unwrap();
    assert_eq!(stored, bound);
}

#[test]
fn a_value_of_another_type_is_an_error() {
    let model = reshaping().open().unwrap();
    let values = [("target".to_owned(), f32s(&[2], &[2., -2.]))].into();
    let error = model.specialize(&Bindings { values, ..Bindings::default() }).unwrap_err();
    assert!(matches!(error, ImportError::Binding(BindingError::Value { .. })), "{error}");
}
