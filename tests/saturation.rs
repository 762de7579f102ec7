//! What the compiler's rules rewrite computes the same: every test model, forward and backward, as its file says and rewritten.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use common::{fixture, published};
use meganeura::data::{Samples, Target};
use meganeura::{
    Bindings, Dataset, Device, DeviceSelector, Loss, Mode, Model, Objective, Phase, Tensor, WithRespectTo, rewrite_graphs,
};

/// Relative L2 error.
const TOLERANCE: f64 = 1e-5;
/// Of a tensor's gradient, relative to the gradient of all.
const ROUNDING: f64 = 1e-7;

/// Tensors of a run with rewriting and of one without. The choice is the process's, so one test makes it at a time.
fn both<T>(run: impl Fn(&Arc<Device>) -> T) -> [T; 2] {
    static CHOICE: Mutex<()> = Mutex::new(());
    let _held = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open(&DeviceSelector::Auto).expect("a Vulkan device");
    let results = [true, false].map(|rewrite| {
        rewrite_graphs(rewrite);
        run(&device)
    });
    rewrite_graphs(true);
    results
}

/// `noise` is an error that each tensor may have beyond the tolerance.
fn agree(name: &str, [rewritten, as_written]: &[BTreeMap<String, Tensor>; 2], noise: f64) {
    assert!(rewritten.keys().eq(as_written.keys()));
    let error = |key: &String| {
        let (found, expected) = (rewritten[key].to_f64_vec(), as_written[key].to_f64_vec());
        let difference: Vec<f64> = found.iter().zip(&expected).map(|(a, b)| if a == b { 0.0 } else { a - b }).collect();
        norm(&difference) / (norm(&expected) + noise / TOLERANCE).max(f64::MIN_POSITIVE)
    };
    let worst = as_written.keys().map(|key| (error(key), key)).max_by(|a, b| a.0.total_cmp(&b.0));
    let (error, tensor) = worst.expect("a result");
    eprintln!("{name}: {error:.1e} in {tensor}, of {} tensors", as_written.len());
    assert!(error <= TOLERANCE, "{name}, {tensor}: {error:e}");
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn outputs_agree(model: &Path, data: &Path) {
    let (model, data) = (Model::open(model).unwrap(), Dataset::open(data).unwrap());
    let inputs = Samples::whole(&data, model.inputs(), Target::Absent).unwrap().tensors();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let name = model.path().display().to_string();
    agree(&name, &both(|device| model.run(device, &inputs).unwrap().into_iter().collect()), 0.0);
}

fn gradients_agree(folder: &str, file: &str) {
    let folder = fixture(&format!("corpus/{folder}"));
    let model = Model::open(folder.join(file)).unwrap();
    let data = Dataset::open(folder.join("data.npz")).unwrap();
    let loss = std::fs::read_to_string(folder.join("loss.txt")).unwrap();
    let objective = Objective::new(Loss::from_name(loss.trim()).unwrap());
    let batch_norm = if folder.ends_with("resnet-bn-train") { Mode::Train } else { Mode::File };
    let bindings = Bindings { phase: Phase { batch_norm, ..Phase::default() }, ..Bindings::default() };
    let wrt = WithRespectTo::Parameters;
    let gradients = both(|device| model.gradients(device, &data, &objective, wrt, &bindings).unwrap());
    let gradients = gradients.map(|found| found.gradients);
    // Where a gradient nearly vanishes, as that of a query's bias may, it is what rounding leaves of larger numbers.
    let all = norm(&gradients[1].values().flat_map(Tensor::to_f64_vec).collect::<Vec<_>>());
    agree(&format!("{}, gradients", model.path().display()), &gradients, ROUNDING * all);
}

macro_rules! models {
    ($($test:ident: $model:literal, $data:literal;)*) => {$(
        #[test]
        fn $test() {
            outputs_agree(&fixture(concat!("corpus/", $model, ".onnx")), &fixture(concat!("corpus/", $data, ".npz")));
        }
    )*};
}

models!(
    gpt2_by_dynamo: "exports/gpt2-tiny-dynamo", "exports/gpt2-tiny-dynamo";
    gpt2_by_torchscript: "exports/gpt2-tiny-legacy", "exports/gpt2-tiny-legacy";
    llama_with_a_mask_by_dynamo: "exports/llama-tiny-dyn-dynamo", "exports/llama-tiny-dyn-dynamo";
    llama_with_a_mask_by_torchscript: "exports/llama-tiny-legacy", "exports/llama-tiny-legacy";
    lstm_by_torchscript: "exports/lstm-legacy", "exports/lstm-legacy";
    mlp_by_dynamo: "mlp/mlp-dyn-dynamo", "mlp/mlp-dyn-dynamo";
    mlp_by_torchscript: "mlp/mlp-legacy", "mlp/mlp-legacy";
    unet_by_dynamo: "exports/unet-dynamo", "exports/unet-dynamo";
    vit_by_dynamo: "exports/vit-dynamo", "exports/vit-dynamo";
);

macro_rules! trained {
    ($($test:ident: $folder:literal, $file:literal;)*) => {$(
        #[test]
        fn $test() {
            let folder = concat!("corpus/", $folder);
            outputs_agree(&fixture(&format!("{folder}/{}", $file)), &fixture(&format!("{folder}/data.npz")));
            gradients_agree($folder, $file);
        }
    )*};
}

trained!(
    action_expert_trained: "action-expert", "model.onnx";
    action_expert_trained_by_torchscript: "action-expert", "model-torchscript.onnx";
    llama_trained: "llama", "model.onnx";
    llama_trained_by_torchscript: "llama", "model-torchscript.onnx";
    resnet_trained: "resnet", "model.onnx";
    resnet_trained_by_torchscript: "resnet", "model-torchscript.onnx";
    resnet_in_training: "resnet-bn-train", "model.onnx";
    resnet_in_training_by_torchscript: "resnet-bn-train", "model-torchscript.onnx";
    unet_trained: "unet", "model.onnx";
    unet_trained_by_torchscript: "unet", "model-torchscript.onnx";
    whisper_trained: "whisper", "model.onnx";
    whisper_trained_by_torchscript: "whisper", "model-torchscript.onnx";
);

#[test]
fn published_models() {
    for id in [
        "arabic_name_decoder",
        "arabic_name_encoder",
        "basic_pitch_nmp",
        "dnsmos_model_v8",
        "magika_v3_3",
        "ppocr_v2_cls",
        "ppocr_v6_tiny_det",
        "ppocr_v6_tiny_rec",
        "silero_vad_16k_sequence",
        "silero_vad_openvino_16k",
    ] {
        let Some(model) = published(&format!("{id}.onnx")) else { continue };
        outputs_agree(&model, &fixture(&format!("published/{id}.npz")));
    }
}
