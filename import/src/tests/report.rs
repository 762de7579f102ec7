//! What an import says about the export.

use meganeura_ir::{DType, ParameterRole, Tensor};

use crate::testing::{ModelBuilder, f32s, node};
use crate::{Copies, Model, Warning};

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn equal_and_transposed_weights_are_found() {
    let matrix = f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.]);
    let ones = f32s(&[2, 3], &[1.; 6]);
    let model = ModelBuilder::new(17)
        .initializer("a", &matrix)
        .initializer("permuted", &f32s(&[2, 3], &[6., 5., 4., 3., 2., 1.]))
        .initializer("c", &matrix)
        .initializer("ones", &ones)
        .initializer("more.ones", &ones)
        .initializer("head", &f32s(&[3, 2], &[1., 4., 2., 5., 3., 6.]))
        .node(node("Transpose", &["head"], &["t"]))
        .node(node("Sum", &["a", "permuted", "c", "ones", "more.ones", "t"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    let expected = Copies { equal: vec![strings(&["a", "c"])], transposed: vec![("a".to_owned(), "head".to_owned())] };
    assert_eq!(model.copies().unwrap(), expected);
}

#[test]
fn a_weight_that_several_nodes_read_is_shared() {
    let model = ModelBuilder::new(17)
        .input("ids", DType::I64, "3")
        .initializer("embedding", &f32s(&[4, 2], &[0., 1., 2., 3., 4., 5., 6., 7.]))
        .initializer("scale", &f32s(&[2], &[3., 4.]))
        .node(node("Gather", &["embedding", "ids"], &["h"]))
        .node(node("Mul", &["h", "scale"], &["s"]))
        .node(node("Transpose", &["embedding"], &["t"]))
        .node(node("MatMul", &["s", "t"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    assert_eq!(model.shared(), [("embedding", 2)]);
}

/// `parameter * x` for every parameter, and the model that results.
fn with_parameters(parameters: &[(&str, Tensor)]) -> Model {
    let mut builder = ModelBuilder::new(17).input("x", DType::F32, "1");
    for (index, (name, tensor)) in parameters.iter().enumerate() {
        let output = format!("y{index}");
        builder = builder.initializer(name, tensor).node(node("Mul", &["x", name], &[&output])).output(&output);
    }
    builder.open().unwrap()
}

#[test]
fn renamed_weights_come_with_the_setting_that_keeps_names() {
    let vector = f32s(&[3], &[0.5, 2.0, 1.0]);
    for (name, is_renamed) in [
        ("onnx::MatMul_30", true),
        ("val_17", true),
        ("permute", true),
        ("permute_3", true),
        ("fc.weight", false),
        ("t5.w", false),
    ] {
        let model = with_parameters(&[(name, vector.clone())]);
        match model.warnings() {
            [warning @ Warning::RenamedWeights { count: 1, .. }] if is_renamed => {
                assert!(warning.to_string().contains("optimize=False"), "{warning}");
            }
            warnings => assert!(!is_renamed && warnings.is_empty(), "{name}: {warnings:?}"),
        }
    }
}

#[test]
fn a_merged_normalisation_is_told_from_a_convolution_with_bias() {
    let open = |weight: &str, bias: &str| {
        let builder = ModelBuilder::new(17).input("x", DType::F32, "1,1,4,4");
        let builder =
            builder.initializer(weight, &f32s(&[2, 1, 1, 2], &[1., 2., 3., 4.])).initializer(bias, &f32s(&[2], &[0.5; 2]));
        builder.node(node("Conv", &["x", weight, bias], &["y"])).output("y").open().unwrap()
    };
    for (weight, bias, folded) in
        [("onnx::Conv_28", "onnx::Conv_29", true), ("conv.weight", "conv.weight_bias", true), ("conv.weight", "conv.bias", false)]
    {
        let model = open(weight, bias);
        let found = model.warnings().iter().find(|w| matches!(w, Warning::FoldedBatchNorm { count: 1 }));
        assert_eq!(found.is_some(), folded, "{weight}, {bias}");
        if let Some(warning) = found {
            assert!(warning.to_string().contains("training will run without normalisation"), "{warning}");
        }
    }
}

#[test]
fn tensors_that_the_exporter_merged_are_reported_and_statistics_stay() {
    let model = ModelBuilder::new(17)
        .input("x", DType::F32, "2,3")
        .initializer("bn.weight", &f32s(&[3], &[1.; 3]))
        .initializer("bn.bias", &f32s(&[3], &[0.; 3]))
        .node(node("Identity", &["bn.bias"], &["bn.running_mean"]))
        .node(node("Identity", &["bn.weight"], &["bn.running_var"]))
        .node(node("Identity", &["x"], &["/pool/Identity_output_0"]))
        .node(node(
            "BatchNormalization",
            &["/pool/Identity_output_0", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"],
            &["y"],
        ))
        .output("y")
        .open()
        .unwrap();
    let [mean, var] = model.warnings() else { panic!("{:?}", model.warnings()) };
    assert_eq!(*mean, Warning::MergedTensors { kept: "bn.bias".into(), lost: "bn.running_mean".into() });
    assert!(var.to_string().contains("keep_initializers_as_inputs=True"), "{var}");
    assert!(model.parameters().iter().all(|p| p.role == ParameterRole::Statistic));
}

#[test]
fn buffers_are_recognised_by_what_they_hold() {
    let causal: Vec<f32> = (0..16).map(|i| if i % 4 > i / 4 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let frequencies: Vec<f32> = (0..8).map(|i| 10000f32.powf(-(i as f32) / 8.0)).collect();
    let model = with_parameters(&[
        ("attn.bias", f32s(&[1, 1, 4, 4], &causal)),
        ("val_3", f32s(&[1, 8, 1], &frequencies)),
        ("model.22.anchors", f32s(&[2, 2], &[0.5, 1.5, 0.5, 2.5])),
        ("fc.weight", f32s(&[2, 2], &[0.5, 1.5, 0.5, 2.5])),
    ]);
    let found: Vec<_> = model.parameters().iter().map(|p| (p.trainable, p.reason)).collect();
    assert_eq!(
        found,
        [
            (false, "a mask, by its content"),
            (false, "frequencies, by their content"),
            (false, "a buffer, by its name"),
            (true, "a float initializer"),
        ]
    );
    assert_eq!(model.warnings(), [Warning::Buffers { count: 2, example: "attn.bias".into() }]);
}

#[test]
fn an_input_without_elements_is_reported() {
    let model = ModelBuilder::new(17).input("x", DType::F32, "0,3").output("x").open().unwrap();
    assert_eq!(model.warnings(), [Warning::ZeroSize { input: "x".into() }]);
}
