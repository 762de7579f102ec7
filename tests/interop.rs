//! What other programs make of the files that are written. Needs a Python with torch, onnxruntime and safetensors: see `common::python`.

mod common;

use std::path::Path;
use std::process::Command;

use common::{digits, fixture, python, succeed, write_npz};

const SCRIPT: &str = r#"
import sys
import numpy, onnx, onnxruntime
from onnx import numpy_helper
from safetensors.torch import load_file

original, weights, exported, data, outputs = sys.argv[1:]
model = onnx.load(original)
stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
loaded = load_file(weights)
assert loaded, "no weights"
for name, tensor in loaded.items():
    assert name in stored, f"{name} is no initializer of the original"
    assert tuple(tensor.shape) == stored[name].shape, f"{name}: {tuple(tensor.shape)} instead of {stored[name].shape}"
    assert str(tensor.dtype) == f"torch.{stored[name].dtype}", f"{name}: {tensor.dtype} instead of {stored[name].dtype}"
floats = {name for name, array in stored.items() if array.dtype == numpy.float32 and array.size > 1}
assert floats <= set(loaded), f"missing: {floats - set(loaded)}"
changed = [name for name, tensor in loaded.items() if not numpy.array_equal(tensor.numpy(), stored[name])]
assert changed, "training changed nothing"

onnx.checker.check_model(exported)
tuned = {t.name: numpy_helper.to_array(t) for t in onnx.load(exported).graph.initializer}
for name, tensor in loaded.items():
    assert numpy.array_equal(tensor.numpy(), tuned[name]), f"{name} differs between the two exports"
session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
arrays = numpy.load(data)
inputs = {i.name: arrays[i.name] for i in session.get_inputs()}
ours = numpy.load(outputs)
for output, theirs in zip(session.get_outputs(), session.run(None, inputs)):
    error = numpy.linalg.norm(ours[output.name] - theirs) / numpy.linalg.norm(theirs)
    assert error <= 1e-4, f"{output.name}: {error}"
print(len(loaded), "weights,", len(changed), "changed")
"#;

#[test]
fn torch_reads_the_weights_and_onnxruntime_runs_the_model() {
    let Some(python) = python() else {
        eprintln!("skipped: no Python environment; `cargo xtask test` makes one");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let original = fixture("digits-cnn.onnx").to_str().unwrap().to_string();
    let (image, label) = digits(9);
    write_npz(Path::new(&file("data.npz")), &[("image", image), ("label", label)]);
    let (data, tuned, exported, outputs) = (file("data.npz"), file("tuned.safetensors"), file("tuned.onnx"), file("out.npz"));
    succeed(["train", &original, "--data", &data, "--loss", "cross_entropy", "--steps", "3", "-o", &tuned]);
    succeed(["export", &tuned, "--onnx", &exported]);
    succeed(["run", &tuned, "--data", &data, "-o", &outputs]);
    let output = Command::new(python).args(["-c", SCRIPT, &original, &tuned, &exported, &data, &outputs]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
