use std::path::Path;

use crate::proto::{StringStringEntryProto, TensorProto};
use meganeura_ir::DType;

use crate::testing::{ModelBuilder, f32s, node, tensor_proto};
use crate::{ImportError, ImportOptions, Limit, Model, TensorError, write_onnx};

fn external(entries: &[(&str, &str)]) -> TensorProto {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto { key: (*key).to_owned(), value: (*value).to_owned() };
    TensorProto {
        raw_data: Vec::new(),
        data_location: Some(1),
        external_data: entries.iter().map(entry).collect(),
        ..tensor_proto("w", &f32s(&[2], &[0.0; 2]))
    }
}

fn save(folder: &Path, proto: TensorProto) -> std::path::PathBuf {
    let model =
        ModelBuilder::new(17).input("x", DType::F32, "2").tensor(proto).node(node("Add", &["x", "w"], &["y"])).output("y");
    let path = folder.join("model.onnx");
    std::fs::write(&path, model.bytes()).unwrap();
    path
}

fn weight(folder: &Path, entries: &[(&str, &str)]) -> Result<meganeura_ir::Tensor, TensorError> {
    Model::open(save(folder, external(entries))).and_then(|model| model.weight("w")).map_err(|e| match e {
        ImportError::Tensor { source, .. } => source,
        other => panic!("{other}"),
    })
}

/// A folder `root/model` with data in it and beside it.
fn folders() -> (tempfile::TempDir, std::path::PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("model");
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    let bytes: Vec<u8> = [9f32, 1.0, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    for file in [root.path().join("secret"), folder.join("data"), folder.join("sub/data")] {
        std::fs::write(file, &bytes).unwrap();
    }
    (root, folder)
}

#[test]
fn external_data_is_read_from_the_models_folder() {
    let (_root, folder) = folders();
    let expected = f32s(&[2], &[1.0, 2.0]);
    assert_eq!(weight(&folder, &[("location", "data"), ("offset", "4"), ("length", "8")]).unwrap(), expected);
    assert_eq!(weight(&folder, &[("location", "./sub/data"), ("offset", "4")]).unwrap(), expected);
}

#[test]
fn external_data_outside_the_folder_is_refused() {
    let (root, folder) = folders();
    let absolute = root.path().join("secret");
    let outside = ["../secret", "sub/../../secret", "sub/../data", absolute.to_str().unwrap(), "/dev/zero"];
    for location in outside.into_iter().chain(["", ".", "/", "sub", "sub\\data", "..\\secret", "C:\\data", "data\0"]) {
        let error = weight(&folder, &[("location", location)]).unwrap_err();
        assert!(matches!(error, TensorError::Confinement { .. }), "{location}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn symbolic_links_are_refused() {
    let (root, folder) = folders();
    std::os::unix::fs::symlink(root.path().join("secret"), folder.join("link")).unwrap();
    std::os::unix::fs::symlink(root.path(), folder.join("up")).unwrap();
    for location in ["link", "up/secret"] {
        let error = weight(&folder, &[("location", location)]).unwrap_err();
        assert!(matches!(error, TensorError::Confinement { .. }), "{location}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn files_with_other_names_and_pipes_are_refused() {
    let (root, folder) = folders();
    std::fs::hard_link(root.path().join("secret"), folder.join("linked")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap();
    assert!(made.success());
    for (location, part) in [("linked", "hard links"), ("pipe", "no regular file"), ("data/x", "no regular file")] {
        let error = weight(&folder, &[("location", location)]).unwrap_err();
        assert!(matches!(error, TensorError::Confinement { .. }) && error.to_string().contains(part), "{location}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn a_model_that_is_no_regular_file_is_refused() {
    let (_root, folder) = folders();
    assert!(matches!(Model::open(&folder), Err(ImportError::NoFile)));
    let pipe = folder.join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(Model::open(pipe), Err(ImportError::NoFile)));
    assert!(matches!(Model::open("/dev/zero"), Err(ImportError::NoFile)));
}

#[test]
fn a_checksum_is_ignored() {
    let (_root, folder) = folders();
    let entries = [("location", "data"), ("offset", "4"), ("length", "8"), ("checksum", "00")];
    assert_eq!(weight(&folder, &entries).unwrap(), f32s(&[2], &[1.0, 2.0]));
}

#[test]
fn the_number_and_size_of_external_files_are_limited() {
    let (_root, folder) = folders();
    let path = save(&folder, external(&[("location", "data"), ("offset", "4")]));
    for (name, limit) in [("external-files", Limit::ExternalFiles), ("external-bytes", Limit::ExternalBytes)] {
        let mut options = ImportOptions::default();
        options.limits.set(name, 0).unwrap();
        let error = Model::open_with(&path, &options).unwrap_err();
        let ImportError::Tensor { source: TensorError::Limit(error), .. } = &error else { panic!("{error}") };
        assert_eq!(error.limit, limit);
    }
}

#[test]
fn ranges_outside_the_external_file_are_errors() {
    let (_root, folder) = folders();
    let range = |offset: &str| weight(&folder, &[("location", "data"), ("offset", offset)]).unwrap_err();
    assert!(matches!(range("8"), TensorError::ExternalRange { .. }));
    assert!(matches!(range("18446744073709551615"), TensorError::ExternalRange { .. }));
    assert!(matches!(range("-1"), TensorError::ExternalEntry { .. }));
    let short = weight(&folder, &[("location", "data"), ("length", "4")]).unwrap_err();
    assert!(matches!(short, TensorError::Size { .. }));
    let missing = weight(&folder, &[("location", "nothing")]).unwrap_err();
    assert!(matches!(missing, TensorError::Io { .. }));
}

#[test]
fn exports_hold_external_data_inside() {
    let (_root, folder) = folders();
    let model = Model::open(save(&folder, external(&[("location", "data"), ("offset", "4")]))).unwrap();
    let mut bytes = Vec::new();
    write_onnx(&mut bytes, &model, &|name| model.weight(name)).unwrap();
    let copy = Model::from_onnx(bytes, &Default::default()).unwrap();
    assert_eq!(copy.weight("w").unwrap(), f32s(&[2], &[1.0, 2.0]));
    assert!(copy.graph.initializer[0].external_data.is_empty());
}
