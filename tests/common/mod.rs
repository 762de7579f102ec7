//! What the tests of the whole program share.

#![allow(dead_code)]

pub mod http;
pub mod serving;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use meganeura::{DType, Device, DeviceSelector, Tensor};
use ndarray::ArrayD;
use ndarray_npy::NpzReader;
use safetensors::SafeTensors;

pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

/// A file that `cargo xtask test` fetches, or `None` where it is not there.
pub fn published(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".corpus/published").join(name);
    if !path.exists() {
        eprintln!("skipped: {} is not there; `cargo xtask test` fetches it", path.display());
        return None;
    }
    Some(path)
}

/// Where this variable is set, models run and train as their files say: neither raised nor saturated.
const UNSATURATED: &str = "MEGANEURA_TEST_UNSATURATED";

pub fn device() -> Arc<Device> {
    if std::env::var_os(UNSATURATED).is_some() {
        meganeura::rewrite_graphs(false);
    }
    Device::open(&DeviceSelector::Auto).expect("a Vulkan device")
}

/// An array of an NPZ file as f64.
pub fn npz(path: &Path, name: &str) -> Vec<f64> {
    let mut reader = NpzReader::new(File::open(path).expect("the NPZ file")).expect("an NPZ file");
    if let Ok(array) = reader.by_name::<ndarray::OwnedRepr<f32>, ndarray::IxDyn>(name) {
        return array.iter().map(|&v| f64::from(v)).collect();
    }
    let array: ArrayD<f64> = reader.by_name(name).unwrap_or_else(|e| panic!("{name} in {}: {e}", path.display()));
    array.iter().copied().collect()
}

/// Every f32 tensor of a safetensors file.
pub fn safetensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(path).expect("the safetensors file");
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let values = |data: &[u8]| data.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect();
    file.tensors().into_iter().map(|(name, view)| (name, values(view.data()))).collect()
}

/// `|a - b| / |b|`
pub fn relative_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum();
    let norm: f64 = b.iter().map(|y| y * y).sum();
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

pub fn meganeura<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_meganeura")).args(args).output().expect("the program starts")
}

/// Runs the program, which must succeed; its stdout.
pub fn succeed<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> String {
    let output = meganeura(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// Writes an NPZ file.
pub fn write_npz(path: &Path, arrays: &[(&str, Tensor)]) {
    let file = File::create(path).expect("a new file");
    meganeura::data::write_npz(file, arrays.iter().map(|(name, tensor)| (*name, tensor))).expect("the NPZ file is written");
}

/// Images and labels that fit the digits model: the label decides where an image is bright.
pub fn digits(samples: usize) -> (Tensor, Tensor) {
    let labels: Vec<i64> = (0..samples as i64).map(|i| i * 7 % 10).collect();
    let pixel = |label: i64, p: i64| if p % 10 == label { 1.0 } else { ((p * 37 + label * 11) % 17) as f32 / 40.0 };
    let pixels: Vec<f32> = labels.iter().flat_map(|&label| (0..64).map(move |p| pixel(label, p))).collect();
    (Tensor::from_f32([samples, 1, 8, 8], &pixels), Tensor::from_i64(DType::I64, [samples], &labels))
}

/// A Python with onnx, onnxruntime, safetensors and torch: of `MEGANEURA_PYTHON`, or of the virtual environment that
/// `cargo xtask test` makes.
pub fn python() -> Option<PathBuf> {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let chosen = std::env::var_os("MEGANEURA_PYTHON").map(PathBuf::from).unwrap_or(made);
    chosen.exists().then_some(chosen)
}
