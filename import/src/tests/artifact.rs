use std::path::Path;

use crate::proto::ModelProto;
use meganeura_ir::{DType, Tensor};
use prost::Message;
use safetensors::SafeTensors;

use crate::testing::{ModelBuilder, evaluate, f32s, i64s, node};
use crate::{
    ArtifactError, Attachments, Bindings, ImportError, ImportOptions, Model, write_artifact, write_artifact_with, write_onnx,
};

/// Weights in several dtypes and in a Constant node, integers, and a symbolic size.
fn sample() -> ModelBuilder {
    let table: Vec<f32> = (0..18).map(|i| i as f32).collect();
    ModelBuilder::new(17)
        .input("x", DType::F32, "n,3")
        .initializer("half", &Tensor::from_f64(DType::F16, [3], &[0.5, 1.0, 1.5]))
        .initializer("wide", &Tensor::from_f64(DType::F64, [1], &[0.25]))
        .initializer("empty", &f32s(&[0, 3], &[]))
        .initializer("target", &i64s(&[2], &[-1, 6]))
        .node(node("Constant", &[], &["table"]).tensor("value", &f32s(&[3, 6], &table)))
        .node(node("Mul", &["x", "half"], &["a"]))
        .node(node("Add", &["a", "wide"], &["b"]))
        .node(node("Concat", &["b", "empty"], &["c"]).int("axis", 0))
        .node(node("MatMul", &["c", "table"], &["d"]))
        .node(node("Reshape", &["d", "target"], &["y"]))
        .node(node("Relu", &["x"], &["aside"]))
        .output("y")
        .output("aside")
}

fn stored(model: &Model) -> impl Fn(&str) -> Result<Tensor, ImportError> + '_ {
    |name| model.weight(name)
}

fn artifact(model: &Model) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_artifact(&mut bytes, model, &stored(model)).unwrap();
    bytes
}

fn reopened(folder: &Path, bytes: &[u8]) -> Result<Model, ImportError> {
    let path = folder.join("model.safetensors");
    std::fs::write(&path, bytes).unwrap();
    Model::open(path)
}

fn results(model: &Model) -> Vec<Vec<f64>> {
    let bindings = Bindings { dims: [("n".to_owned(), 2)].into(), ..Bindings::default() };
    let graph = model.specialize(&bindings).unwrap().graph;
    let x = f32s(&[2, 3], &[1., 2., 3., 4., -5., 6.]);
    evaluate(model, &graph, &[x]).into_iter().map(|(_, values)| values).collect()
}

#[test]
fn an_artifact_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, sample().bytes()).unwrap();
    let mut model = Model::open(&path).unwrap();
    model.set_bindings(Bindings { dims: [("n".to_owned(), 7)].into(), ..Bindings::default() });
    let bytes = artifact(&model);
    let copy = reopened(folder.path(), &bytes).unwrap();
    assert_eq!(copy.parameters(), model.parameters());
    assert_eq!(copy.inputs(), model.inputs());
    assert_eq!(copy.outputs(), model.outputs());
    assert_eq!(copy.warnings(), model.warnings());
    assert_eq!(copy.bindings(), model.bindings());
    assert_eq!(copy.source(), Some("model.onnx"));
    for parameter in model.parameters() {
        assert_eq!(copy.weight(&parameter.name).unwrap(), model.weight(&parameter.name).unwrap());
    }
    assert_eq!(results(&copy), results(&model));
    assert_eq!(artifact(&copy), bytes, "writing again changes nothing");
}

#[test]
fn any_safetensors_reader_finds_the_weights() {
    let model = sample().open().unwrap();
    let bytes = artifact(&model);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), model.parameters().len());
    let half = file.tensor("half").unwrap();
    assert_eq!((half.dtype(), half.shape()), (safetensors::Dtype::F16, &[3][..]));
    assert_eq!(half.data(), model.weight("half").unwrap().bytes());
    assert_eq!(file.tensor("wide").unwrap().dtype(), safetensors::Dtype::F64);
    assert_eq!(file.tensor("table").unwrap().shape(), [3, 6]);
    assert_eq!(file.tensor("empty").unwrap().shape(), [0, 3]);
}

#[test]
fn new_weights_are_written_in_the_dtype_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = sample().open().unwrap();
    let doubled = |name: &str| {
        let tensor = model.weight(name)?;
        let values: Vec<f64> = tensor.to_f64_vec().iter().map(|v| 2.0 * v).collect();
        Ok(Tensor::from_f64(DType::F32, tensor.shape().clone(), &values))
    };
    let (mut safetensors, mut onnx) = (Vec::new(), Vec::new());
    write_artifact(&mut safetensors, &model, &doubled).unwrap();
    write_onnx(&mut onnx, &model, &doubled).unwrap();
    for copy in [reopened(folder.path(), &safetensors).unwrap(), Model::from_onnx(onnx, &ImportOptions::default()).unwrap()] {
        assert_eq!(copy.weight("half").unwrap(), Tensor::from_f64(DType::F16, [3], &[1.0, 2.0, 3.0]));
        assert_eq!(copy.weight("wide").unwrap(), Tensor::from_f64(DType::F64, [1], &[0.5]));
    }
}

#[test]
fn an_exported_model_is_the_original_but_for_its_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut builder = sample();
    builder.0.producer_name = "test".to_owned();
    // A field that no schema here knows.
    let mut original = builder.bytes();
    original.extend([0xfa, 0x07, 0x03, b'n', b'e', b'w']);
    let model = Model::from_onnx(original.clone(), &ImportOptions::default()).unwrap();
    for source in [&model, &reopened(folder.path(), &artifact(&model)).unwrap()] {
        let mut bytes = Vec::new();
        write_onnx(&mut bytes, source, &stored(source)).unwrap();
        assert_eq!(ModelProto::decode(bytes.as_slice()).unwrap(), ModelProto::decode(original.as_slice()).unwrap());
        assert!(bytes.windows(6).any(|w| w == [0xfa, 0x07, 0x03, b'n', b'e', b'w']));
    }
}

#[test]
fn an_artifact_of_some_outputs_keeps_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let options = ImportOptions { outputs: Some(vec!["aside".to_owned()]), ..ImportOptions::default() };
    let model = Model::from_onnx(sample().bytes(), &options).unwrap();
    assert_eq!(model.parameters().len(), 0);
    let copy = reopened(folder.path(), &artifact(&model)).unwrap();
    assert_eq!(copy.outputs().iter().map(|o| o.name.as_str()).collect::<Vec<_>>(), ["aside"]);
    assert_eq!(results(&copy), results(&model));
}

#[test]
fn weights_of_the_wrong_type_are_refused() {
    let model = sample().open().unwrap();
    let wrong: [Tensor; 2] = [f32s(&[4], &[0.0; 4]), i64s(&[3], &[0; 3])];
    for tensor in wrong {
        let error = write_artifact(&mut Vec::new(), &model, &|_| Ok(tensor.clone())).unwrap_err();
        assert!(matches!(error, ImportError::Artifact(ArtifactError::WeightType { .. })), "{error}");
    }
}

#[test]
fn foreign_and_damaged_artifacts_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let foreign = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    let error = reopened(folder.path(), &foreign).unwrap_err();
    assert!(matches!(error, ImportError::Artifact(ArtifactError::NoStructure)), "{error}");

    let bytes = artifact(&sample().open().unwrap());
    for length in (0..bytes.len()).step_by(37).chain([bytes.len() - 1]) {
        assert!(reopened(folder.path(), &bytes[..length]).is_err(), "{length} bytes were accepted");
    }
    let at = bytes.windows(9).position(|w| w == b"structure").unwrap() + 20;
    let mut damaged = bytes.clone();
    damaged[at] ^= 1;
    assert!(reopened(folder.path(), &damaged).is_err());
}

#[test]
fn attached_tensors_come_back_and_are_no_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::from_onnx(sample().bytes(), &ImportOptions::default()).unwrap();
    assert_eq!((model.attached_description(), model.attached("note")), (None, None));
    let tensors = [("note".to_owned(), f32s(&[1, 3], &[1., 2., 3.]))];
    let mut attachments = Attachments { description: Some("what it is".to_owned()), tensors: tensors.into() };
    let mut bytes = Vec::new();
    write_artifact_with(&mut bytes, &model, &stored(&model), &attachments).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, view) in file.tensors() {
        let size = view.data().len() / view.shape().iter().product::<usize>().max(1);
        assert_eq!((view.data().as_ptr() as usize - bytes.as_ptr() as usize) % size.max(1), 0, "{name} is not aligned");
    }
    let again = reopened(folder.path(), &bytes).unwrap();
    assert_eq!(again.attached_description(), Some("what it is"));
    assert_eq!(again.attached("note"), Some(f32s(&[1, 3], &[1., 2., 3.])));
    assert_eq!(again.parameters(), model.parameters());
    assert_eq!(results(&again), results(&model));

    attachments.tensors = [("half".to_owned(), f32s(&[1], &[1.]))].into();
    let refused = write_artifact_with(&mut Vec::new(), &model, &stored(&model), &attachments);
    assert!(matches!(refused, Err(ImportError::Artifact(ArtifactError::Attachment(name))) if name == "half"));
}

#[test]
fn metadata_leaves_with_both_formats_once_for_each_key() {
    let bytes = sample().bytes();
    let mut model = Model::from_onnx(bytes.clone(), &ImportOptions::default()).unwrap();
    assert!(model.metadata().is_empty());
    for (key, value) in [("names", "{0: 'a'}"), ("task", "classify"), ("names", "{0: 'b'}")] {
        model.set_metadata(key, value).unwrap();
    }
    let mut onnx = Vec::new();
    write_onnx(&mut onnx, &model, &stored(&model)).unwrap();
    let entries = ModelProto::decode(onnx.as_slice()).unwrap().metadata_props;
    let entries: Vec<(&str, &str)> = entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str())).collect();
    assert_eq!(entries, [("task", "classify"), ("names", "{0: 'b'}")]);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, artifact(&model)).unwrap();
    assert_eq!(Model::open(&path).unwrap().metadata(), model.metadata());
    let without: Vec<u8> = {
        let mut out = Vec::new();
        write_onnx(&mut out, &Model::from_onnx(bytes, &ImportOptions::default()).unwrap(), &stored(&model)).unwrap();
        out
    };
    assert!(onnx.starts_with(&without), "nothing else changes");
}
