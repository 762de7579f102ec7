//! Bad input gives one clear error, exit code 2, and leaves what is there alone.

mod common;

use std::path::{Path, PathBuf};

use common::{digits, fixture, meganeura, write_npz};
use meganeura::{DType, Tensor};

/// A folder with good data, and a file that must survive.
struct Scene {
    folder: tempfile::TempDir,
}

const PRECIOUS: &[u8] = b"what was here before";

impl Scene {
    fn new() -> Self {
        let scene = Scene { folder: tempfile::tempdir().unwrap() };
        let (image, label) = digits(8);
        write_npz(&scene.path("good.npz"), &[("image", image), ("label", label)]);
        std::fs::write(scene.path("out"), PRECIOUS).unwrap();
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn arrays(&self, arrays: &[(&str, Tensor)]) -> PathBuf {
        let path = self.path("data.npz");
        write_npz(&path, arrays);
        path
    }

    fn bytes(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Trains and expects the refusal to contain all of `parts`.
    fn train_is_refused(&self, model: &Path, data: &Path, parts: &[&str]) {
        let out = self.path("out");
        let flags = ["--loss", "cross_entropy", "--steps", "1", "-o"].map(Path::new);
        let args = [Path::new("train"), model, Path::new("--data"), data].into_iter().chain(flags).chain([out.as_path()]);
        self.refused(args, parts);
    }

    fn refused<'a>(&self, args: impl IntoIterator<Item = &'a Path>, parts: &[&str]) {
        let output = meganeura(args);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        let errors: Vec<&str> = message.lines().filter(|l| l.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{message}");
        assert!(message.lines().count() <= 12 && !message.contains("panicked") && !message.contains("backtrace"), "{message}");
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in:\n{message}");
        }
        assert_eq!(std::fs::read(self.path("out")).unwrap(), PRECIOUS);
        assert!(output.stdout.is_empty());
    }
}

fn model() -> PathBuf {
    fixture("digits-cnn.onnx")
}

#[test]
fn a_truncated_model() {
    let scene = Scene::new();
    let bytes = std::fs::read(model()).unwrap();
    let truncated = scene.bytes("truncated.onnx", &bytes[..bytes.len() / 2]);
    scene.train_is_refused(&truncated, &scene.path("good.npz"), &["truncated.onnx"]);
}

/// Every refusal of a model begins with its path, names the place, and says it once.
#[test]
fn a_refusal_begins_with_the_path() {
    let scene = Scene::new();
    let good = std::fs::read(model()).unwrap();
    let replaced = |from: &[u8], to: &[u8]| {
        let mut bytes = good.clone();
        let at: Vec<usize> = (0..bytes.len() - from.len()).filter(|&i| bytes[i..].starts_with(from)).collect();
        assert!(!at.is_empty() && from.len() == to.len());
        at.into_iter().for_each(|i| bytes[i..i + to.len()].copy_from_slice(to));
        bytes
    };
    let appended = |bytes: &[u8]| [good.as_slice(), bytes].concat();
    let files: [(&str, Vec<u8>, &[&str]); 8] = [
        ("text", b"version https://git-lfs.github.com/spec/v1".to_vec(), &["no ONNX model"]),
        ("cut", good[..good.len() / 2].to_vec(), &["truncated"]),
        ("two-graphs", appended(&[0x3a, 0]), &["field 7", "twice"]),
        ("two-opsets", appended(&[0x42, 2, 0x10, 9]), &["version 9"]),
        ("operator", replaced(b"Gemm", b"Gexm"), &["Gexm", "opset", "first"]),
        ("attribute", replaced(b"kernel_shape", b"kernel_shade"), &["kernel_shape", "MaxPool, opset"]),
        ("strides", replaced(b"strides", b"padding"), &["Reshape, opset"]),
        ("empty", Vec::new(), &["empty"]),
    ];
    for (name, bytes, parts) in files {
        let path = scene.bytes(&format!("{name}.onnx"), &bytes);
        let output = meganeura([Path::new("import"), &path, Path::new("--dim"), Path::new("batch=1")]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {message}");
        let refusal = message.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or_default().to_owned();
        let rest = refusal.strip_prefix(&format!("{}: ", path.display())).unwrap_or_else(|| panic!("{name}: {message}"));
        assert!(!rest.contains(".onnx"), "{name}: {message}");
        parts.iter().for_each(|part| assert!(message.contains(part), "{name}: {part:?} is not in {message}"));
    }
}

#[test]
fn limits_are_flags() {
    let (scene, model) = (Scene::new(), model());
    let import = |limit: &'static str| [Path::new("import"), &model, Path::new("--limit"), Path::new(limit)];
    scene.refused(import("nodes=1"), &["nodes", "where 1 are allowed", "--limit nodes=N"]);
    scene.refused(import("nodas=1"), &["no limit \"nodas\"", "expanded-nodes"]);
    scene.refused(import("rank=9"), &["at most 8"]);
    let output = meganeura(import("nodes=1000"));
    assert!(output.status.success());
}

#[test]
fn an_empty_and_a_missing_model() {
    let scene = Scene::new();
    let empty = scene.bytes("empty.onnx", b"");
    scene.train_is_refused(&empty, &scene.path("good.npz"), &["empty.onnx", "empty"]);
    scene.train_is_refused(&scene.path("absent.onnx"), &scene.path("good.npz"), &["absent.onnx"]);
}

#[test]
fn an_unknown_operator() {
    let scene = Scene::new();
    let mut bytes = std::fs::read(model()).unwrap();
    let at: Vec<usize> = (0..bytes.len() - 4).filter(|&i| &bytes[i..i + 4] == b"Gemm").collect();
    assert!(!at.is_empty());
    at.into_iter().for_each(|i| bytes[i..i + 4].copy_from_slice(b"Gexm"));
    let unknown = scene.bytes("unknown.onnx", &bytes);
    scene.train_is_refused(&unknown, &scene.path("good.npz"), &["unknown.onnx", "Gexm", "opset"]);
}

#[test]
fn a_truncated_data_file() {
    let scene = Scene::new();
    let bytes = std::fs::read(scene.path("good.npz")).unwrap();
    let truncated = scene.bytes("short.npz", &bytes[..bytes.len() - 30]);
    scene.train_is_refused(&model(), &truncated, &["short.npz", "damaged or incomplete"]);
}

#[test]
fn a_wrong_shape_in_the_data() {
    let scene = Scene::new();
    let image = Tensor::from_f32([4, 1, 8, 7], &[0.0; 4 * 56]);
    let data = scene.arrays(&[("image", image), ("label", digits(4).1)]);
    scene.train_is_refused(&model(), &data, &["data.npz", "\"image\"", "[4,1,8,7]", "[samples,1,8,8]"]);
}

#[test]
fn a_wrong_dtype_in_the_data() {
    let scene = Scene::new();
    let (image, label) = digits(4);
    let data = scene.arrays(&[("image", image.cast(DType::I64)), ("label", label.clone())]);
    scene.train_is_refused(&model(), &data, &["\"image\" is i64", "f32", "astype(\"float32\")"]);
    let data = scene.arrays(&[("image", image), ("label", label.cast(DType::F32))]);
    scene.train_is_refused(&model(), &data, &["\"label\"", "cross_entropy"]);
}

#[test]
fn a_missing_input_and_a_missing_target() {
    let scene = Scene::new();
    let (image, label) = digits(4);
    let data = scene.arrays(&[("picture", image.clone()), ("label", label.clone())]);
    scene.train_is_refused(&model(), &data, &["input \"image\"", "\"in/image\"", "\"picture\""]);
    let data = scene.arrays(&[("image", image), ("digit", label)]);
    scene.train_is_refused(&model(), &data, &["target", "\"label\"", "\"digit\""]);
}

#[test]
fn unequal_numbers_of_samples() {
    let scene = Scene::new();
    let data = scene.arrays(&[("image", digits(4).0), ("label", digits(3).1)]);
    scene.train_is_refused(&model(), &data, &["\"label\" holds 3 samples", "4"]);
}

#[test]
fn a_label_that_is_no_class() {
    let scene = Scene::new();
    let data = scene.arrays(&[("image", digits(3).0), ("label", Tensor::from_i64(DType::I64, [3], &[0, 12, 3]))]);
    scene.train_is_refused(&model(), &data, &["\"label\", sample 1: 12", "10 classes"]);
}

#[test]
fn an_output_that_cannot_be_written() {
    let scene = Scene::new();
    let (model, data) = (model(), scene.path("good.npz"));
    let absent = scene.path("absent/tuned.safetensors");
    for out in [absent.as_path(), scene.folder.path()] {
        let args = [Path::new("train"), &model, Path::new("--data"), &data].into_iter();
        let flags = ["--loss", "cross_entropy", "-o"].map(Path::new);
        scene.refused(args.chain(flags).chain([out]), &["cannot write"]);
    }
}

#[test]
fn no_output_at_all_and_flags_that_mean_nothing() {
    let (scene, model) = (Scene::new(), model());
    let data = scene.path("good.npz");
    let base = [Path::new("train"), &model, Path::new("--data"), &data, Path::new("--loss"), Path::new("cross_entropy")];
    scene.refused(base, &["-o <OUT>"]);
    let out = scene.path("out");
    let more = [Path::new("-o"), &out, Path::new("--optimizer"), Path::new("adam"), Path::new("--momentum"), Path::new("0.9")];
    scene.refused(base.into_iter().chain(more), &["--momentum", "adam"]);
    let more = [Path::new("-o"), &out, Path::new("--freeze"), Path::new("nothing.*")];
    scene.refused(base.into_iter().chain(more), &["nothing.*"]);
}

#[test]
fn a_device_that_is_not_there() {
    let (scene, model) = (Scene::new(), model());
    let data = scene.path("good.npz");
    let args = [Path::new("run"), &model, Path::new("--data"), &data, Path::new("--device"), Path::new("no such device")];
    scene.refused(args, &["no such device"]);
}

#[test]
fn sizes_that_contradict_the_data() {
    let (scene, model) = (Scene::new(), model());
    let data = scene.path("good.npz");
    let args = [Path::new("run"), &model, Path::new("--data"), &data, Path::new("--dim"), Path::new("batch=3")];
    scene.refused(args, &["\"image\"", "[8,1,8,8]", "[3,1,8,8]"]);
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_writes_nothing() {
    let (scene, model) = (Scene::new(), model());
    let (data, out) = (scene.path("good.npz"), scene.path("out"));
    let base = [Path::new("train"), &model, Path::new("--data"), &data, Path::new("-o"), &out];
    let flags = ["--loss", "cross_entropy", "--optimizer", "sgd", "--lr", "1e38", "--steps", "5"].map(Path::new);
    let output = meganeura(base.into_iter().chain(flags));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("error: the loss is") && message.contains("at step"), "{message}");
    assert_eq!(std::fs::read(out).unwrap(), PRECIOUS);
}

#[test]
fn an_image_that_is_cut_and_flags_that_need_images() {
    let (scene, model) = (Scene::new(), model());
    let class = scene.path("images/one");
    std::fs::create_dir_all(&class).unwrap();
    let png = std::fs::read(fixture("images/folder/dark/b.png")).unwrap();
    std::fs::write(class.join("whole.png"), &png).unwrap();
    std::fs::write(class.join("cut.png"), &png[..png.len() / 2]).unwrap();
    scene.train_is_refused(&model, &scene.path("images"), &["cannot use the image", "cut.png"]);

    let (data, out) = (scene.path("good.npz"), scene.path("out"));
    let base = [Path::new("train"), &model, Path::new("--data"), &data, Path::new("-o"), &out];
    let flags = ["--loss", "cross_entropy", "--image-resize", "crop"].map(Path::new);
    scene.refused(base.into_iter().chain(flags), &["good.npz", "no folder of images"]);
    let flags = ["--loss", "cross_entropy", "--schedule", "plateau"].map(Path::new);
    scene.refused(base.into_iter().chain(flags), &["--schedule plateau", "--eval"]);
}
