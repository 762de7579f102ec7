//! Models that others published, against the outputs of onnxruntime and against central differences in f64.
//!
//! `cargo xtask test` fetches the models from their packages into `.corpus/published/`; a test whose model is not there says so and
//! passes. `fixtures/published/ID.npz` holds inputs and outputs, `ID-gradient.npz` the derivatives of `sum(output * cotangent)` at some
//! elements of each parameter, with a mark where the function is smooth.

mod common;

use std::path::PathBuf;

use common::{device, fixture, relative_l2};
use meganeura::data::{Samples, Target};
use meganeura::{Bindings, Dataset, ImportOptions, Model, Tensor};

const OUTPUT_TOLERANCE: f64 = 1e-4;
/// Quantised models round inside.
const QUANTIZED_TOLERANCE: f64 = 1e-2;
const GRADIENT_TOLERANCE: f64 = 1e-3;
/// What the central differences themselves err by, in one element, for losses of about 1.
const DIFFERENCE_NOISE: f64 = 2e-9;

/// The file of a published model, or `None` where it could not be fetched.
fn published(id: &str) -> Option<PathBuf> {
    common::published(&format!("{id}.onnx"))
}

fn data(id: &str) -> Dataset {
    Dataset::open(fixture(&format!("published/{id}.npz"))).unwrap()
}

fn values(data: &Dataset, key: &str) -> Vec<f64> {
    data.array(key).unwrap_or_else(|| panic!("no array {key}")).tensor().to_f64_vec()
}

fn outputs_agree(id: &str, tolerance: f64) {
    let Some(path) = published(id) else { return };
    outputs_of(&Model::open(path).unwrap(), id, tolerance);
}

fn outputs_of(model: &Model, reference: &str, tolerance: f64) {
    let data = data(reference);
    let inputs = Samples::whole(&data, model.inputs(), Target::Absent).unwrap().tensors();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    for (name, found) in model.run(&device(), &inputs).unwrap() {
        let expected = values(&data, &format!("out/{name}"));
        let error = relative_l2(&found.to_f64_vec(), &expected);
        assert!(error <= tolerance, "output {name}: {error:e}");
    }
}

fn gradients_agree(id: &str) {
    let Some(path) = published(id) else { return };
    gradients_of(&Model::open(path).unwrap(), id, str::to_owned);
}

/// Every parameter in the reference, at the elements where the function is smooth. `parameter` gives the model's name of each.
fn gradients_of(model: &Model, reference: &str, parameter: impl Fn(&str) -> String) {
    let (inputs, expected) = (data(reference), data(&format!("{reference}-gradient")));
    let inputs = Samples::whole(&inputs, model.inputs(), Target::Absent).unwrap().tensors();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let cotangents = expected.arrays().filter_map(|(key, array)| Some((key.strip_prefix("cot/")?, array.tensor())));
    let cotangents: Vec<(&str, Tensor)> = cotangents.collect();
    let cotangents: Vec<(&str, &Tensor)> = cotangents.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let found = model.vjp(&device(), &inputs, &cotangents, &Bindings::default()).unwrap();
    for (key, _) in expected.arrays() {
        let Some(name) = key.strip_prefix("grad/") else { continue };
        let [indices, smooth, expected] = ["idx", "smooth", "grad"].map(|kind| values(&expected, &format!("{kind}/{name}")));
        let found = found.get(&parameter(name)).unwrap_or_else(|| panic!("no gradient of {name}")).to_f64_vec();
        let kept = || (0..indices.len()).filter(|&i| smooth[i] != 0.0);
        let at: Vec<f64> = kept().map(|i| found[indices[i] as usize]).collect();
        let expected: Vec<f64> = kept().map(|i| expected[i]).collect();
        let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
        let error = norm(&at.iter().zip(&expected).map(|(a, e)| a - e).collect::<Vec<_>>());
        let allowed = GRADIENT_TOLERANCE * norm(&expected) + DIFFERENCE_NOISE * (expected.len() as f64).sqrt();
        assert!(error <= allowed, "gradient of {name}: {at:?} instead of {expected:?}");
    }
}

macro_rules! agrees {
    ($($id:ident),* $(,)?) => {$(
        mod $id {
            #[test]
            fn outputs_agree_with_onnxruntime() {
                super::outputs_agree(stringify!($id), super::OUTPUT_TOLERANCE);
            }

            #[test]
            fn gradients_agree_with_central_differences() {
                super::gradients_agree(stringify!($id));
            }
        }
    )*};
}

agrees!(
    arabic_name_decoder,
    arabic_name_encoder,
    basic_pitch_nmp,
    dnsmos_model_v8,
    magika_v3_3,
    ppocr_v2_cls,
    ppocr_v6_tiny_det,
    ppocr_v6_tiny_rec,
    silero_vad_16k_sequence,
    silero_vad_openvino_16k,
);

#[test]
fn a_quantized_model_agrees_with_onnxruntime() {
    outputs_agree("smart_turn_v3_2_int8", QUANTIZED_TOLERANCE);
}

#[test]
fn a_dequantized_model_agrees_with_the_model_of_real_numbers() {
    let Some(path) = published("smart_turn_v3_2_int8") else { return };
    let model = Model::open_with(path, &ImportOptions { dequantize: true, ..ImportOptions::default() }).unwrap();
    outputs_of(&model, "smart_turn_f32", OUTPUT_TOLERANCE);
    // The reference names a weight after what dequantised it, the model after what the file holds.
    gradients_of(&model, "smart_turn_f32", |name| {
        let stored = format!("{}_quantized", name.trim_end_matches("_DequantizeLinear_Output"));
        if model.imported().parameter(&stored).is_some() { stored } else { name.to_owned() }
    });
}

#[test]
fn models_with_operators_that_are_not_supported_name_all_of_them() {
    let refused = |id: &str| published(id).map(|path| Model::open(path).unwrap_err().to_string());
    for (id, ops) in [
        ("text2tashkeel_rawi_int8", &["com.microsoft::DynamicQuantizeLSTM"][..]),
        ("ort_logreg_iris", &["ai.onnx.ml::LinearClassifier", "ai.onnx.ml::ZipMap"]),
    ] {
        let Some(message) = refused(id) else { continue };
        assert!(ops.iter().all(|op| message.contains(op)), "{message}");
    }
}
