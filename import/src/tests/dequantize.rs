use meganeura_ir::{DType, Tensor};

use crate::testing::{ModelBuilder, evaluate, f32s, node};
use crate::{ArtifactError, Bindings, ImportError, ImportOptions, Model, write_artifact, write_onnx};

fn i8s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::I8, shape, values)
}

fn u8s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::U8, shape, values)
}

fn open(builder: &ModelBuilder, dequantize: bool) -> Model {
    Model::from_onnx(builder.bytes(), &ImportOptions { dequantize, ..ImportOptions::default() }).unwrap()
}

fn outputs(model: &Model) -> Vec<Vec<f64>> {
    let specialized = model.specialize(&Bindings::default()).unwrap();
    assert_eq!(specialized.warnings, []);
    let results = evaluate(model, &specialized.graph, &[f32s(&[1, 2], &[1.0, 10.0])]);
    results.into_iter().map(|(_, values)| values).collect()
}

/// Names and values of the parameters.
fn parameters(model: &Model) -> Vec<(&str, Vec<f64>)> {
    model.parameters().iter().map(|p| (p.name.as_str(), model.weight(&p.name).unwrap().to_f64_vec())).collect()
}

fn start() -> ModelBuilder {
    ModelBuilder::new(21).input("x", DType::F32, "1,2")
}

/// A weight with a scale and a zero point per column, and a bias that two nodes dequantise.
fn with_dequantize_linear() -> ModelBuilder {
    start()
        .initializer("w", &u8s(&[2, 3], &[0, 1, 2, 3, 4, 5]))
        .initializer("scale", &f32s(&[3], &[0.5, 1.0, 2.0]))
        .initializer("zero", &u8s(&[3], &[0, 1, 2]))
        .initializer("b", &Tensor::from_i64(DType::I32, [3], &[4, 8, -12]))
        .initializer("b_scale", &f32s(&[], &[0.25]))
        .node(node("DequantizeLinear", &["w", "scale", "zero"], &["wf"]).int("axis", 1))
        .node(node("MatMul", &["x", "wf"], &["product"]))
        .node(node("DequantizeLinear", &["b", "b_scale"], &["bf"]))
        .node(node("Add", &["product", "bf"], &["y"]))
        .node(node("DequantizeLinear", &["b", "b_scale"], &["b_again"]))
        .output("y")
        .output("b_again")
}

/// A weight that is cast, shifted by a number that is cast as well, and scaled.
fn with_cast() -> ModelBuilder {
    start()
        .initializer("w", &i8s(&[2, 2], &[-3, 1, 5, 7]))
        .initializer("zero", &i8s(&[1], &[1]))
        .initializer("scale", &f32s(&[2], &[0.5, 2.0]))
        .node(node("Cast", &["w"], &["cast"]).int("to", 1))
        .node(node("Cast", &["zero"], &["zero_cast"]).int("to", 1))
        .node(node("Sub", &["cast", "zero_cast"], &["shifted"]))
        .node(node("Mul", &["scale", "shifted"], &["wf"]))
        .node(node("MatMul", &["x", "wf"], &["y"]))
        .output("y")
}

#[test]
fn quantised_weights_become_float_parameters_of_the_same_name() {
    let model = open(&with_dequantize_linear(), true);
    assert_eq!(parameters(&model), [("w", vec![0.0, 0.0, 0.0, 1.5, 3.0, 6.0]), ("b", vec![1.0, 2.0, -3.0])]);
    assert!(model.parameters().iter().all(|p| p.trainable && p.stored == DType::F32));
    assert_eq!(outputs(&model), [vec![16.0, 32.0, 57.0], vec![1.0, 2.0, -3.0]]);

    let model = open(&with_cast(), true);
    assert_eq!(parameters(&model), [("w", vec![-2.0, 0.0, 2.0, 12.0])]);
    assert_eq!(outputs(&model), [vec![18.0, 120.0]]);
}

#[test]
fn without_the_option_quantised_weights_run_as_written() {
    for builder in [with_dequantize_linear(), with_cast()] {
        let model = open(&builder, false);
        assert!(model.parameter("w").is_none());
        assert_eq!(outputs(&model), outputs(&open(&builder, true)));
    }
}

#[test]
fn weights_of_four_bits_are_dequantised_too() {
    let mut packed = crate::testing::tensor_proto("w", &u8s(&[1], &[0x2f]));
    packed.data_type = crate::proto::tensor_proto::DataType::Int4 as i32;
    packed.dims = vec![2, 1];
    let builder = start()
        .tensor(packed)
        .initializer("scale", &f32s(&[], &[0.5]))
        .node(node("DequantizeLinear", &["w", "scale"], &["wf"]))
        .node(node("MatMul", &["x", "wf"], &["y"]))
        .output("y");
    assert_eq!(outputs(&open(&builder, false)), [vec![9.5]]);
    let model = open(&builder, true);
    assert_eq!(parameters(&model), [("w", vec![-0.5, 1.0])]);
    assert_eq!(outputs(&model), [vec![9.5]]);
}

#[test]
fn data_that_is_quantised_and_dequantised_stays_as_it_is() {
    let builder = start()
        .initializer("scale", &f32s(&[], &[4.0]))
        .initializer("zero", &u8s(&[], &[0]))
        .initializer("other", &f32s(&[], &[2.0]))
        .node(node("QuantizeLinear", &["x", "scale", "zero"], &["q"]))
        .node(node("DequantizeLinear", &["q", "scale", "zero"], &["y"]))
        .node(node("DequantizeLinear", &["q", "other", "zero"], &["z"]))
        .output("y")
        .output("z");
    assert_eq!(outputs(&open(&builder, false)), [vec![0.0, 8.0], vec![0.0, 4.0]]);
    // Another scale is no inverse.
    assert_eq!(outputs(&open(&builder, true)), [vec![1.0, 10.0], vec![0.0, 4.0]]);
}

/// As onnxruntime's dynamic quantisation writes a product, with a scale and a zero point per column.
fn with_dynamic_product() -> ModelBuilder {
    start()
        .initializer("w", &u8s(&[2, 3], &[0, 1, 2, 3, 4, 5]))
        .initializer("w_scale", &f32s(&[3], &[0.5, 1.0, 2.0]))
        .initializer("w_zero", &u8s(&[3], &[0, 1, 2]))
        .node(node("DynamicQuantizeLinear", &["x"], &["q", "q_scale", "q_zero"]))
        .node(node("MatMulInteger", &["q", "w", "q_zero", "w_zero"], &["sum"]))
        .node(node("Cast", &["sum"], &["real"]).int("to", 1))
        .node(node("Mul", &["q_scale", "w_scale"], &["scales"]))
        .node(node("Mul", &["real", "scales"], &["y"]))
        .output("y")
}

#[test]
fn products_with_dynamically_quantised_data_become_products_of_floats() {
    let exact = [15.0, 30.0, 60.0];
    let model = open(&with_dynamic_product(), true);
    assert_eq!(parameters(&model), [("w", vec![0.0, 0.0, 0.0, 1.5, 3.0, 6.0])]);
    assert_eq!(outputs(&model), [exact]);
    // As written, the data has 255 levels between 0 and 10.
    let quantised = outputs(&open(&with_dynamic_product(), false));
    assert!(quantised[0].iter().zip(exact).all(|(a, b)| (a - b).abs() <= 6.0 * 5.0 / 255.0), "{quantised:?}");
}

#[test]
fn a_weight_with_another_use_or_an_unknown_scale_stays_quantised() {
    let other_use = with_dequantize_linear().node(node("Identity", &["w"], &["raw"])).output("raw");
    assert!(open(&other_use, true).parameter("w").is_none());
    let exposed = with_cast().output("shifted");
    assert!(open(&exposed, true).parameter("w").is_none());
    let by_input = start()
        .initializer("w", &i8s(&[2], &[1, 2]))
        .node(node("Cast", &["w"], &["cast"]).int("to", 1))
        .node(node("Mul", &["cast", "x"], &["y"]))
        .output("y");
    assert!(open(&by_input, true).parameter("w").is_none());
}

#[test]
fn the_artifact_holds_floats_and_onnx_is_refused() {
    let model = open(&with_dequantize_linear(), true);
    let weights = |name: &str| model.weight(name);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut file = Vec::new();
    write_artifact(&mut file, &model, &weights).unwrap();
    std::fs::write(&path, file).unwrap();
    let copy = Model::open(&path).unwrap();
    assert_eq!((parameters(&copy), outputs(&copy)), (parameters(&model), outputs(&model)));

    match write_onnx(&mut Vec::new(), &model, &weights) {
        Err(ImportError::Artifact(ArtifactError::Dequantized(name))) => assert_eq!(name, "b"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_artifact_of_quantised_weights_can_be_dequantised() {
    let model = open(&with_cast(), false);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut file = Vec::new();
    write_artifact(&mut file, &model, &|name: &str| model.weight(name)).unwrap();
    std::fs::write(&path, file).unwrap();
    let copy = Model::open_with(&path, &ImportOptions { dequantize: true, ..ImportOptions::default() }).unwrap();
    assert_eq!(parameters(&copy), [("w", vec![-2.0, 0.0, 2.0, 12.0])]);
    assert_eq!(outputs(&copy), [vec![18.0, 120.0]]);
}
