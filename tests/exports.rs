//! Common architectures as PyTorch's two exporters write them, against PyTorch's outputs.

mod common;

use common::{device, fixture, relative_l2};
use meganeura::data::{Samples, Target};
use meganeura::{Dataset, Model, Tensor};

const TOLERANCE: f64 = 1e-4;

fn agrees(name: &str) {
    let model = Model::open(fixture(&format!("corpus/exports/{name}.onnx"))).unwrap();
    let data = Dataset::open(fixture(&format!("corpus/exports/{name}.npz"))).unwrap();
    let inputs = Samples::whole(&data, model.inputs(), Target::Absent).unwrap().tensors();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    for (i, (output, found)) in model.run(&device(), &inputs).unwrap().into_iter().enumerate() {
        let key = format!("out_{i}_{output}");
        let expected = data.array(&key).unwrap_or_else(|| panic!("no array {key}")).tensor();
        assert_eq!(found.shape(), expected.shape(), "{output}");
        let error = relative_l2(&found.to_f64_vec(), &expected.to_f64_vec());
        assert!(error <= TOLERANCE, "{output}: {error:e}");
    }
}

macro_rules! exports {
    ($($test:ident: $name:literal),* $(,)?) => {$(
        #[test]
        fn $test() {
            agrees($name);
        }
    )*};
}

exports!(
    gpt2_by_dynamo: "gpt2-tiny-dynamo",
    gpt2_by_torchscript: "gpt2-tiny-legacy",
    llama_by_dynamo: "llama-tiny-dyn-dynamo",
    llama_by_torchscript: "llama-tiny-legacy",
    lstm_by_torchscript: "lstm-legacy",
    unet_by_dynamo: "unet-dynamo",
    vit_by_dynamo: "vit-dynamo",
    vit_in_training_mode_by_torchscript: "vit-legacy-train",
);
