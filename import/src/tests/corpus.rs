//! Models that PyTorch exported, against PyTorch's outputs.

use std::fs::File;
use std::path::{Path, PathBuf};

use meganeura_ir::testing::relative_l2;
use meganeura_ir::{Tensor, TensorType};
use ndarray_npy::NpzReader;

use crate::testing::evaluate;
use crate::{Bindings, Dim, Model, write_artifact, write_onnx};

fn corpus(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/corpus").join(file)
}

/// An array of an npz file. `keys` are tried in turn.
pub(super) fn array(file: &Path, keys: &[String]) -> Tensor {
    let mut npz = NpzReader::new(File::open(file).unwrap()).unwrap();
    let names = npz.names().unwrap();
    let name = keys.iter().find(|k| names.contains(k)).unwrap_or_else(|| panic!("{keys:?} not among {names:?}")).clone();
    if let Ok(a) = npz.by_name::<ndarray::OwnedRepr<f32>, ndarray::IxDyn>(&name) {
        return Tensor::from_f32(a.shape(), &a.iter().copied().collect::<Vec<_>>());
    }
    if let Ok(a) = npz.by_name::<ndarray::OwnedRepr<bool>, ndarray::IxDyn>(&name) {
        return Tensor::from_i64(meganeura_ir::DType::Bool, a.shape(), &a.iter().map(|&v| v as i64).collect::<Vec<_>>());
    }
    let a = npz.by_name::<ndarray::OwnedRepr<i64>, ndarray::IxDyn>(&name).unwrap();
    Tensor::from_i64(meganeura_ir::DType::I64, a.shape(), &a.iter().copied().collect::<Vec<_>>())
}

/// The largest relative L2 error of an output of `model` on the inputs in `data`, which may be repeated along the first axis.
fn error(model: &Model, data: &Path, expect: &Path, repeat: usize) -> f64 {
    let mut bindings = Bindings::default();
    let mut inputs = Vec::new();
    for input in model.inputs() {
        let tensor = array(data, &[format!("in/{}", input.name), format!("in_{}", input.name)]);
        let mut shape = tensor.shape().to_vec();
        shape[0] *= repeat;
        let bytes = tensor.bytes().repeat(repeat);
        inputs.push(Tensor::from_bytes(TensorType::new(tensor.dtype(), shape.as_slice()), bytes).unwrap());
        bindings.shapes.insert(input.name.clone(), shape);
    }
    let specialized = model.specialize(&bindings).unwrap();
    if repeat == 1 {
        assert_eq!(specialized.warnings, []);
    }
    let results = evaluate(model, &specialized.graph, &inputs);
    let error = model.outputs().iter().zip(results).enumerate().map(|(i, (output, (ty, found)))| {
        let expected = array(expect, &[format!("out/{}", output.name), format!("out_{i}_{}", output.name)]);
        assert_eq!(ty.shape[1..], expected.shape()[1..]);
        relative_l2(&found, &expected.to_f64_vec().repeat(repeat))
    });
    error.fold(0.0, f64::max)
}

fn check(model: &Path, data: &Path, expect: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let original = Model::open(model).unwrap();
    let weights = |name: &str| original.weight(name);
    let (mut artifact, mut onnx) = (Vec::new(), Vec::new());
    write_artifact(&mut artifact, &original, &weights).unwrap();
    write_onnx(&mut onnx, &original, &weights).unwrap();
    let path = folder.path().join("copy.safetensors");
    std::fs::write(&path, artifact).unwrap();
    let copies = [Model::open(path).unwrap(), Model::from_onnx(onnx, &Default::default()).unwrap()];
    for model in [&original].into_iter().chain(&copies) {
        let error = error(model, data, expect, 1);
        assert!(error < 1e-5, "relative error {error}");
    }
}

fn check_training(name: &str) {
    for export in ["model.onnx", "model-torchscript.onnx"] {
        let file = |file: &str| corpus(&format!("{name}/{file}"));
        check(&file(export), &file("data.npz"), &file("expect.npz"));
    }
}

#[test]
fn whisper_gives_pytorchs_outputs() {
    check_training("whisper");
}

#[test]
fn resnet_gives_pytorchs_outputs() {
    check_training("resnet");
}

#[test]
fn action_expert_gives_pytorchs_outputs() {
    check_training("action-expert");
}

#[test]
fn mlp_gives_pytorchs_outputs_at_any_batch_size() {
    for export in ["mlp-dyn-dynamo", "mlp-legacy"] {
        let (onnx, npz) = (corpus(&format!("mlp/{export}.onnx")), corpus(&format!("mlp/{export}.npz")));
        check(&onnx, &npz, &npz);
        let error = error(&Model::open(&onnx).unwrap(), &npz, &npz, 3);
        assert!(error < 1e-5, "{export}: relative error {error}");
    }
}

#[test]
fn parameters_of_a_dynamo_export_are_those_of_pytorch() {
    for name in ["action-expert", "llama", "resnet", "resnet-bn-train", "unet", "whisper"] {
        let model = Model::open(corpus(&format!("{name}/model.onnx"))).unwrap();
        let bytes = std::fs::read(corpus(&format!("{name}/grads.safetensors"))).unwrap();
        let gradients = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut trainable: Vec<&str> = model.parameters().iter().filter(|p| p.trainable).map(|p| p.name.as_str()).collect();
        let mut expected: Vec<&str> = gradients.names();
        trainable.sort_unstable();
        expected.sort_unstable();
        assert_eq!(trainable, expected);
        for parameter in model.parameters().iter().filter(|p| p.trainable) {
            assert_eq!(parameter.shape.to_vec(), gradients.tensor(&parameter.name).unwrap().shape());
        }
    }
}

/// The parameters of the PyTorch modules under their own or other names, and tied ones twice where the exporter transposed a copy; and what does
/// not train.
#[test]
fn parameters_of_other_exports_are_as_many_as_pytorchs() {
    for (name, trained, others) in [
        ("exports/gpt2-tiny-dynamo", 40, &[][..]),
        ("exports/gpt2-tiny-legacy", 41, &[]),
        ("exports/llama-tiny-dyn-dynamo", 29, &["m.model.rotary_emb.inv_freq"]),
        ("exports/llama-tiny-legacy", 30, &["/m/model/rotary_emb/Constant_output_0"]),
        ("exports/unet-dynamo", 104, &["unsqueeze_1", "val_18", "val_21"]),
        ("exports/vit-dynamo", 56, &[]),
        ("exports/vit-legacy-train", 56, &[]),
        ("mlp/mlp-dyn-dynamo", 6, &[]),
        ("mlp/mlp-legacy", 6, &[]),
    ] {
        let model = Model::open(corpus(&format!("{name}.onnx"))).unwrap();
        let still: Vec<&str> = model.parameters().iter().filter(|p| !p.trainable).map(|p| p.name.as_str()).collect();
        assert_eq!(still, others, "{name}");
        assert_eq!(model.parameters().len() - still.len(), trained, "{name}");
    }
}

#[test]
fn the_batch_of_the_dynamic_mlp_has_a_name() {
    let model = Model::open(corpus("mlp/mlp-dyn-dynamo.onnx")).unwrap();
    assert_eq!(model.inputs()[0].dims, [Dim::Symbol("batch".to_owned()), Dim::Fixed(784)]);
    let bindings = Bindings { dims: [("batch".to_owned(), 9)].into(), ..Bindings::default() };
    assert_eq!(model.specialize(&bindings).unwrap().graph.inputs()[0].ty.shape.to_vec(), [9, 784]);
}
