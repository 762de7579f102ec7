//! Models that PyTorch exported twice, against PyTorch's outputs, loss, gradients, and weights after three optimiser steps.

mod common;

use std::path::PathBuf;

use common::{device, fixture, npz, relative_l2, safetensors};
use meganeura::data::{Samples, Target};
use meganeura::{
    Bindings, Dataset, Device, Length, Loss, Model, Objective, Optimizer, StepReport, Tensor, TrainOptions, Trainer,
    WithRespectTo,
};

/// Relative L2 error of outputs and of weights after training.
const OUTPUT_TOLERANCE: f64 = 1e-4;
const WEIGHT_TOLERANCE: f64 = 1e-4;
const LOSS_TOLERANCE: f64 = 1e-5;
const GRADIENT_TOLERANCE: f64 = 1e-3;

struct Case {
    folder: PathBuf,
    objective: Objective,
    data: Dataset,
}

impl Case {
    fn open(name: &str) -> Self {
        let folder = fixture(&format!("corpus/{name}"));
        let loss = std::fs::read_to_string(folder.join("loss.txt")).unwrap();
        let objective = Objective::new(Loss::from_name(loss.trim()).unwrap());
        Case { data: Dataset::open(folder.join("data.npz")).unwrap(), objective, folder }
    }

    fn model(&self, file: &str) -> Model {
        Model::open(self.folder.join(file)).unwrap()
    }

    fn expected(&self, name: &str) -> Vec<f64> {
        npz(&self.folder.join("expect.npz"), name)
    }
}

fn outputs(device: &std::sync::Arc<Device>, model: &Model, data: &Dataset, bindings: &Bindings) -> Vec<(String, Tensor)> {
    let samples = Samples::whole(data, &model.bound_inputs(bindings), Target::Absent).unwrap();
    let inputs = samples.tensors();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    model.run(device, &inputs).unwrap()
}

fn outputs_and_loss_agree(name: &str, file: &str) {
    let (case, device) = (Case::open(name), device());
    let model = case.model(file);
    let found = outputs(&device, &model, &case.data, &Bindings::default());
    let error = relative_l2(&found[0].1.to_f64_vec(), &case.expected("out/output"));
    assert!(error <= OUTPUT_TOLERANCE, "output: {error:e}");

    let found = model.gradients(&device, &case.data, &case.objective, WithRespectTo::Parameters, &Bindings::default()).unwrap();
    let expected = case.expected("loss")[0];
    assert!(((found.loss - expected) / expected).abs() <= LOSS_TOLERANCE, "loss {} instead of {expected}", found.loss);
    if file != "model.onnx" {
        return;
    }
    for (name, expected) in safetensors(&case.folder.join("grads.safetensors")) {
        let gradient = found.gradients.get(&name).unwrap_or_else(|| panic!("no gradient of {name}"));
        let error = relative_l2(&gradient.to_f64_vec(), &expected);
        assert!(error <= GRADIENT_TOLERANCE, "gradient of {name}: {error:e}");
    }
}

fn three_steps_agree(name: &str, optimizer: Optimizer, learning_rate: f64, expected: &str) {
    let (case, device) = (Case::open(name), device());
    let mut model = case.model("model.onnx");
    let options =
        TrainOptions { optimizer, learning_rate, length: Length::Steps(3), ..TrainOptions::new(case.objective.clone()) };
    let mut trainer = Trainer::new(&model, &device, &case.data, options).unwrap();
    assert_eq!(trainer.batch(), trainer.samples());
    let mut losses = Vec::new();
    let remember = |report: &StepReport| {
        losses.push(report.loss);
        Ok::<_, meganeura::Error>(())
    };
    trainer.train_to(3, remember).unwrap();
    let first = case.expected("loss")[0];
    assert!(((losses[0] - first) / first).abs() <= LOSS_TOLERANCE, "{losses:?}");
    if matches!(optimizer, Optimizer::AdamW { .. }) {
        let after = trainer.evaluator(&model, &case.data, None).unwrap().run().unwrap().loss;
        let expected = case.expected("loss_after")[0];
        assert!(((after - expected) / expected).abs() <= 10.0 * LOSS_TOLERANCE, "loss {after} instead of {expected}");
    }
    trainer.update(&mut model).unwrap();
    for (name, expected) in safetensors(&case.folder.join(expected)) {
        let error = relative_l2(&model.weight(&name).unwrap().to_f64_vec(), &expected);
        assert!(error <= WEIGHT_TOLERANCE, "{name}: {error:e}");
    }
}

const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, amsgrad: false };
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.0 };

macro_rules! corpus {
    ($($module:ident = $name:literal),* $(,)?) => {$(
        mod $module {
            use super::*;

            #[test]
            fn outputs_loss_and_gradients_are_pytorchs() {
                outputs_and_loss_agree($name, "model.onnx");
            }

            #[test]
            fn the_other_exporters_outputs_and_loss_are_pytorchs() {
                outputs_and_loss_agree($name, "model-torchscript.onnx");
            }

            #[test]
            fn three_steps_of_adamw_are_pytorchs() {
                three_steps_agree($name, ADAMW, 1e-3, "adamw3.safetensors");
            }

            #[test]
            fn three_steps_of_sgd_are_pytorchs() {
                three_steps_agree($name, SGD, 1e-2, "sgd3.safetensors");
            }
        }
    )*};
}

corpus!(whisper = "whisper", resnet = "resnet", action_expert = "action-expert");

/// Outputs for the four samples of the file, then for seven, which must be the same rows again.
fn another_batch_size_gives_the_same_rows(name: &str, output: &str, bindings: impl Fn(usize) -> Bindings) {
    let device = device();
    let path = fixture(&format!("corpus/mlp/{name}.npz"));
    let model = Model::open(fixture(&format!("corpus/mlp/{name}.onnx"))).unwrap();
    let data = Dataset::open(&path).unwrap();
    let expected = npz(&path, output);
    let found = outputs(&device, &model, &data, &Bindings::default());
    let error = relative_l2(&found[0].1.to_f64_vec(), &expected);
    assert!(error <= OUTPUT_TOLERANCE, "{error:e}");

    let rows = [3, 2, 1, 0, 1, 2, 3];
    let seven = data.array("in_x").unwrap().rows(&rows);
    let found = outputs(&device, &model, &Dataset::from_tensors([("x", seven)]), &bindings(7));
    let expected: Vec<f64> = rows.iter().flat_map(|row| expected[row * 10..][..10].to_vec()).collect();
    let error = relative_l2(&found[0].1.to_f64_vec(), &expected);
    assert!(error <= OUTPUT_TOLERANCE, "{error:e}");
}

#[test]
fn a_symbolic_batch_takes_any_size() {
    let bindings = |batch| Bindings { dims: [("batch".to_string(), batch)].into(), ..Bindings::default() };
    another_batch_size_gives_the_same_rows("mlp-dyn-dynamo", "out_0_linear_2", bindings);
}

#[test]
fn a_fixed_batch_is_overridden_by_a_given_shape() {
    let bindings = |batch| Bindings { shapes: [("x".to_string(), vec![batch, 784])].into(), ..Bindings::default() };
    another_batch_size_gives_the_same_rows("mlp-legacy", "out_0_18", bindings);
}
