use meganeura_ir::{DType, Tensor};

use crate::testing::{ModelBuilder, evaluate, f32s, i64s, node};
use crate::{Bindings, Dim, HeadError, HeadTensor, ImportError, ImportOptions, Model, write_artifact, write_onnx};

/// `softmax(x w + b)` of three features and two classes.
fn classifier() -> ModelBuilder {
    ModelBuilder::new(17)
        .input("x", DType::F32, "n,3")
        .initializer("w", &f32s(&[3, 2], &[1., 2., 3., 4., 5., 6.]))
        .initializer("b", &f32s(&[1, 2], &[0.5, -0.5]))
        .node(node("MatMul", &["x", "w"], &["product"]))
        .node(node("Add", &["product", "b"], &["logits"]))
        .node(node("Softmax", &["logits"], &["y"]).int("axis", 1))
        .declared_output("y", DType::F32, "n,2")
}

fn error(builder: &ModelBuilder) -> HeadError {
    match builder.open().unwrap().head(None, None) {
        Err(ImportError::Head(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn logits(model: &Model) -> Vec<f64> {
    let bindings = Bindings { dims: [("n".to_owned(), 1)].into(), ..Bindings::default() };
    let graph = model.specialize(&bindings).unwrap().graph;
    let [(_, y)] = &evaluate(model, &graph, &[f32s(&[1, 3], &[1., 0., 2.])])[..] else { panic!("one output") };
    // Only differences of logits are known from probabilities.
    y.iter().map(|p| (p / y[0]).ln()).collect()
}

#[test]
fn a_head_of_other_classes_is_in_every_file_that_leaves() {
    let mut model = classifier().open().unwrap();
    let head = model.head(None, None).unwrap();
    assert_eq!((head.classes, head.weight.clone()), (2, HeadTensor { name: "w".into(), axis: 1 }));
    assert_eq!(head.bias, Some(HeadTensor { name: "b".into(), axis: 1 }));
    let weight = f32s(&[3, 3], &[1., 2., 0., 3., 4., 0., 5., 6., 1.]);
    model.set_head(&head, weight, Some(f32s(&[1, 3], &[0.5, -0.5, 0.25]))).unwrap();
    // x w + b = [11.5, 13.5, 2.25]
    let expected = [0.0, 2.0, -9.25];
    let check = |model: &Model| {
        assert_eq!(model.outputs()[0].dims, Some(vec![Dim::Symbol("n".into()), Dim::Fixed(3)]));
        assert!(model.warnings().is_empty());
        let found = logits(model);
        assert!(found.len() == 3 && found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-6), "{found:?}");
    };
    check(&model);
    let stored = |name: &str| model.weight(name);
    let (mut onnx, mut artifact) = (Vec::new(), Vec::new());
    write_onnx(&mut onnx, &model, &stored).unwrap();
    write_artifact(&mut artifact, &model, &stored).unwrap();
    check(&Model::from_onnx(onnx, &ImportOptions::default()).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, artifact).unwrap();
    let mut reopened = Model::open(&path).unwrap();
    check(&reopened);
    // And the artifact can change again.
    let head = reopened.head(Some("y"), Some("w")).unwrap();
    reopened.set_head(&head, f32s(&[3, 1], &[1., 1., 1.]), Some(f32s(&[1, 1], &[0.]))).unwrap();
    assert_eq!(logits(&reopened), [0.0]);
}

#[test]
fn layers_of_every_kind_have_their_axis_of_classes() {
    let gemm = ModelBuilder::new(17)
        .input("x", DType::F32, "n,3")
        .initializer("w", &f32s(&[2, 3], &[0.5; 6]))
        .initializer("b", &f32s(&[2], &[0.5; 2]))
        .node(node("Gemm", &["x", "w", "b"], &["y"]).int("transB", 1))
        .output("y");
    let transposed = ModelBuilder::new(17)
        .input("x", DType::F32, "n,3")
        .initializer("w", &f32s(&[2, 3], &[0.5; 6]))
        .node(node("Transpose", &["w"], &["wt"]).ints("perm", &[1, 0]))
        .node(node("MatMul", &["x", "wt"], &["y"]))
        .output("y");
    let conv = ModelBuilder::new(17)
        .input("x", DType::F32, "n,3,4,4")
        .initializer("w", &f32s(&[2, 3, 1, 1], &[0.5; 6]))
        .initializer("b", &f32s(&[2, 1, 1], &[0.5; 2]))
        .node(node("Conv", &["x", "w"], &["c"]))
        .node(node("Add", &["c", "b"], &["y"]))
        .output("y");
    for (builder, bias) in [(gemm, true), (transposed, false), (conv, true)] {
        let head = builder.open().unwrap().head(None, None).unwrap();
        assert_eq!((head.weight.axis, head.classes), (0, 2));
        assert_eq!(head.bias, bias.then(|| HeadTensor { name: "b".into(), axis: 0 }));
    }
}

#[test]
fn a_head_that_cannot_change_says_why() {
    let none = ModelBuilder::new(17).input("x", DType::F32, "n,3").node(node("Relu", &["x"], &["y"])).output("y");
    assert_eq!(error(&none), HeadError::NoLayer { output: "y".into() });
    let reshaped = classifier().initializer("shape", &i64s(&[2], &[-1, 2])).node(node("Reshape", &["y", "shape"], &["z"]));
    let mut model = reshaped.output("z").open().unwrap();
    assert!(matches!(model.head(None, None), Err(ImportError::Head(HeadError::Ambiguous { .. }))));
    let elsewhere = HeadError::Elsewhere { what: "constant", name: "shape".into(), classes: 2 };
    assert!(matches!(model.head(Some("z"), None), Err(ImportError::Head(e)) if e == elsewhere));
    assert!(matches!(model.head(Some("nothing"), None), Err(ImportError::UnknownOutput { .. })));
    let unknown = model.head(Some("y"), Some("b"));
    assert!(matches!(unknown, Err(ImportError::Head(HeadError::NoSuchWeight { .. }))));
    let tied = classifier().node(node("Transpose", &["w"], &["wt"])).output("wt").open().unwrap();
    assert!(matches!(tied.head(Some("y"), None), Err(ImportError::Head(HeadError::Layer { .. }))));

    model = classifier().open().unwrap();
    let head = model.head(None, None).unwrap();
    let wrong: [(Tensor, Option<Tensor>); 2] =
        [(f32s(&[2, 3], &[0.; 6]), None), (f32s(&[3, 3], &[0.; 9]), Some(f32s(&[1, 2], &[0.; 2])))];
    for (weight, bias) in wrong {
        assert!(matches!(model.set_head(&head, weight, bias), Err(ImportError::Head(HeadError::Shape { .. }))));
    }
    assert_eq!(logits(&model).len(), 2);
}
