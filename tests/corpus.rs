//! Models that PyTorch exported twice, against PyTorch's outputs, loss, gradients, weights after three optimiser steps, and the curve of its
//! loss over two hundred.

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::{device, fixture, npz, relative_l2, safetensors};
use meganeura::data::{Samples, Target};
use meganeura::{
    Bindings, Dataset, Device, Length, Loss, Mode, Model, Objective, Optimizer, Phase, Shape, StepReport, Tensor, TrainOptions,
    Trainer, WithRespectTo,
};

/// Relative L2 error of outputs and of weights after training.
const OUTPUT_TOLERANCE: f64 = 1e-4;
const WEIGHT_TOLERANCE: f64 = 1e-4;
const LOSS_TOLERANCE: f64 = 1e-5;
const GRADIENT_TOLERANCE: f64 = 1e-3;
const COSINE: f64 = 0.9999;
/// Of the initial loss, between the curves of losses at any step.
const CURVE_TOLERANCE: f64 = 0.01;

/// What one exporter wrote: names and parameters as in PyTorch.
const DYNAMO: &str = "model.onnx";
/// What the other wrote: some parameters renamed, transposed or merged into others.
const TORCHSCRIPT: &str = "model-torchscript.onnx";

/// Models of which [`TORCHSCRIPT`] has other parameters than PyTorch's module: the norms of resnet are part of its convolutions, and the tied
/// weight of llama is there twice. Their gradients are PyTorch's, but they train as the PyTorch modules that fixtures/curves.py makes of them.
const CHANGED: [&str; 2] = ["llama", "resnet"];

struct Case {
    folder: PathBuf,
    objective: Objective,
    data: Dataset,
    phase: Phase,
}

impl Case {
    fn open(name: &str) -> Self {
        let folder = fixture(&format!("corpus/{name}"));
        let loss = std::fs::read_to_string(folder.join("loss.txt")).unwrap();
        let objective = Objective::new(Loss::from_name(loss.trim()).unwrap());
        // One exporter drops the training mode of batch normalisation.
        let batch_norm = if name == "resnet-bn-train" { Mode::Train } else { Mode::File };
        let phase = Phase { batch_norm, ..Phase::default() };
        Case { data: Dataset::open(folder.join("data.npz")).unwrap(), objective, folder, phase }
    }

    fn model(&self, file: &str) -> Model {
        Model::open(self.folder.join(file)).unwrap()
    }

    fn expected(&self, name: &str) -> Vec<f64> {
        npz(&self.folder.join("expect.npz"), name)
    }

    fn bindings(&self) -> Bindings {
        Bindings { phase: self.phase, ..Bindings::default() }
    }

    /// PyTorch's tensors in `file`, with what stands for each of them in `model`, if one tensor does.
    fn tensors(&self, file: &str, model: &Model) -> Vec<(Vec<f64>, Option<Stored>)> {
        if file.contains("torchscript") {
            let named = |name| Some(Stored(vec![Place { name, transposed: None }]));
            return safetensors(&self.folder.join(file)).into_iter().map(|(name, values)| (values, named(name))).collect();
        }
        let pytorch = self.model(DYNAMO);
        let expected = safetensors(&self.folder.join(file));
        expected.into_iter().map(|(name, values)| (values, Stored::find(model, &name, &pytorch.weight(&name).unwrap()))).collect()
    }
}

/// The tensors of a model that stand for one parameter of PyTorch: copies add their gradients up.
struct Stored(Vec<Place>);

struct Place {
    name: String,
    /// Its own shape, if it is the transposed matrix.
    transposed: Option<Shape>,
}

impl Stored {
    /// The tensors of that value. Norms have many equal ones: there the name must be the same, or the tensor the only one.
    fn find(model: &Model, name: &str, value: &Tensor) -> Option<Self> {
        let values = value.to_f64_vec();
        let equal = model.parameters().iter().filter(|p| p.shape.numel() == values.len()).filter_map(|p| {
            let tensor = model.weight(&p.name).unwrap();
            let found = tensor.to_f64_vec();
            let shape = (found != values).then(|| tensor.shape().clone());
            let equal = found == values || transposed(&found, tensor.shape()) == values;
            equal.then(|| Place { name: p.name.clone(), transposed: shape })
        });
        let mut places: Vec<Place> = equal.collect();
        if value.shape().rank() < 2 && places.iter().any(|place| place.name == name) {
            places.retain(|place| place.name == name);
        }
        let certain = places.len() == 1 || value.shape().rank() > 1 && !places.is_empty();
        certain.then_some(Stored(places))
    }

    /// The sum of tensors of the model, as PyTorch has it.
    fn sum<'t>(&self, tensor: impl Fn(&str) -> Option<&'t Tensor>) -> Option<Vec<f64>> {
        let values = |place: &Place| Some(place.values(tensor(&place.name)?));
        let terms = self.0.iter().map(values).collect::<Option<Vec<_>>>()?;
        terms.into_iter().reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect())
    }
}

impl Place {
    fn values(&self, tensor: &Tensor) -> Vec<f64> {
        match &self.transposed {
            Some(shape) => transposed(&tensor.to_f64_vec(), shape),
            None => tensor.to_f64_vec(),
        }
    }
}

fn transposed(values: &[f64], shape: &[usize]) -> Vec<f64> {
    let [rows, columns] = shape else { return Vec::new() };
    (0..columns * rows).map(|i| values[i % rows * columns + i / rows]).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn outputs(device: &Arc<Device>, model: &Model, data: &Dataset, bindings: &Bindings) -> Vec<(String, Tensor)> {
    let samples = Samples::whole(data, &model.bound_inputs(bindings), Target::Absent).unwrap();
    let inputs = samples.tensors();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    model.run_with(device, &inputs, &Bindings { shapes: Default::default(), ..bindings.clone() }).unwrap()
}

fn outputs_loss_and_gradients_agree(name: &str, file: &str) {
    let (case, device) = (Case::open(name), device());
    let model = case.model(file);
    let found = outputs(&device, &model, &case.data, &case.bindings());
    let error = relative_l2(&found[0].1.to_f64_vec(), &case.expected("out/output"));
    assert!(error <= OUTPUT_TOLERANCE, "output: {error:e}");

    let found = model.gradients(&device, &case.data, &case.objective, WithRespectTo::Parameters, &case.bindings()).unwrap();
    let expected = case.expected("loss")[0];
    assert!(((found.loss - expected) / expected).abs() <= LOSS_TOLERANCE, "loss {} instead of {expected}", found.loss);
    let tensors = case.tensors(&format!("grads{}.safetensors", variant(name, file)), &model);
    for (expected, stored) in tensors {
        let stored = stored.expect("every parameter is in the file");
        let gradient = stored.sum(|name| found.gradients.get(name)).expect("every parameter has a gradient");
        let name = &stored.0[0].name;
        let error = relative_l2(&gradient, &expected);
        assert!(error <= GRADIENT_TOLERANCE, "gradient of {name}: {error:e}");
        let cosine = cosine(&gradient, &expected);
        assert!(cosine > COSINE || expected.iter().all(|v| *v == 0.0), "gradient of {name}: cosine {cosine}");
    }
}

/// What is added to the names of references where the module differs.
fn variant(name: &str, file: &str) -> &'static str {
    if file == TORCHSCRIPT && CHANGED.contains(&name) { "-torchscript" } else { "" }
}

fn curve(name: &str, file: &str) -> Vec<f64> {
    npz(&fixture("corpus/curves.npz"), &format!("{name}{}", variant(name, file)))
}

fn three_steps_agree(name: &str, file: &str, optimizer: Optimizer, learning_rate: f64, expected: &str) {
    let (case, device) = (Case::open(name), device());
    let mut model = case.model(file);
    // By value, so before it changes.
    let tensors = case.tensors(&format!("{expected}{}.safetensors", variant(name, file)), &model);
    let length = Length::Steps(3);
    let bindings = case.bindings();
    let options = TrainOptions { optimizer, learning_rate, length, bindings, ..TrainOptions::new(case.objective.clone()) };
    let mut trainer = Trainer::new(&model, &device, &case.data, options).unwrap();
    assert_eq!(trainer.batch(), trainer.samples());
    let mut losses = Vec::new();
    let mut train_to = |trainer: &mut Trainer, step| {
        let remember = |report: &StepReport| {
            losses.push(report.loss);
            Ok::<_, meganeura::Error>(())
        };
        trainer.train_to(step, remember).unwrap();
        losses.clone()
    };
    let (losses, first) = (train_to(&mut trainer, 3), case.expected("loss")[0]);
    assert!(((losses[0] - first) / first).abs() <= LOSS_TOLERANCE, "{losses:?}");
    trainer.update(&mut model).unwrap();
    assert!(!tensors.is_empty());
    for (expected, stored) in tensors {
        let Stored(places) = stored.expect("every parameter is in the file");
        for place in places {
            let error = relative_l2(&place.values(&model.weight(&place.name).unwrap()), &expected);
            assert!(error <= WEIGHT_TOLERANCE, "{}: {error:e}", place.name);
        }
    }
    if matches!(optimizer, Optimizer::AdamW { .. }) {
        let after = match case.phase.batch_norm {
            // In training, as the other losses.
            Mode::Train => train_to(&mut trainer, 4)[3],
            _ => trainer.evaluator(&model, &case.data, None).unwrap().run().unwrap().loss,
        };
        let expected = if variant(name, file).is_empty() { case.expected("loss_after")[0] } else { curve(name, file)[3] };
        assert!(((after - expected) / expected).abs() <= 10.0 * LOSS_TOLERANCE, "loss {after} instead of {expected}");
    }
}

fn two_hundred_steps_agree(name: &str, file: &str) {
    let (case, device, expected) = (Case::open(name), device(), curve(name, file));
    let (length, bindings) = (Length::Steps(expected.len() as u64), case.bindings());
    let options =
        TrainOptions { optimizer: ADAMW, learning_rate: 1e-3, length, bindings, ..TrainOptions::new(case.objective.clone()) };
    let mut trainer = Trainer::new(&case.model(file), &device, &case.data, options).unwrap();
    let mut worst = 0.0f64;
    let mut compare = |report: &StepReport| {
        let (step, share) = (report.step as usize, CURVE_TOLERANCE * expected[0]);
        let wanted = expected[step - 1];
        worst = worst.max((report.loss - wanted).abs() / expected[0]);
        assert!((report.loss - wanted).abs() <= share, "step {step}: loss {} instead of {wanted}", report.loss);
        Ok::<_, meganeura::Error>(())
    };
    trainer.train_to(200, &mut compare).unwrap();
    eprintln!("{name}, {file}: within {:.4} % of the initial loss", 100.0 * worst);
}

const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, amsgrad: false };
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.0 };

macro_rules! corpus {
    ($($module:ident = $name:literal, $file:ident: $($check:ident)*;)*) => {$(
        mod $module {
            use super::*;

            const NAME: &str = $name;
            const FILE: &str = $file;

            $(corpus!(@ $check);)*
        }
    )*};
    (@ backward) => {
        #[test]
        fn outputs_loss_and_gradients_are_pytorchs() {
            outputs_loss_and_gradients_agree(NAME, FILE);
        }
    };
    (@ steps) => {
        #[test]
        fn three_steps_of_adamw_are_pytorchs() {
            three_steps_agree(NAME, FILE, ADAMW, 1e-3, "adamw3");
        }

        #[test]
        fn three_steps_of_sgd_are_pytorchs() {
            three_steps_agree(NAME, FILE, SGD, 1e-2, "sgd3");
        }

        #[test]
        fn two_hundred_steps_follow_pytorchs_curve() {
            two_hundred_steps_agree(NAME, FILE);
        }
    };
}

corpus! {
    action_expert = "action-expert", DYNAMO: backward steps;
    action_expert_by_torchscript = "action-expert", TORCHSCRIPT: backward steps;
    llama = "llama", DYNAMO: backward steps;
    llama_by_torchscript = "llama", TORCHSCRIPT: backward steps;
    resnet = "resnet", DYNAMO: backward steps;
    resnet_by_torchscript = "resnet", TORCHSCRIPT: backward steps;
    resnet_in_training = "resnet-bn-train", DYNAMO: backward steps;
    resnet_in_training_by_torchscript = "resnet-bn-train", TORCHSCRIPT: backward steps;
    unet = "unet", DYNAMO: backward steps;
    unet_by_torchscript = "unet", TORCHSCRIPT: backward steps;
    whisper = "whisper", DYNAMO: backward steps;
    whisper_by_torchscript = "whisper", TORCHSCRIPT: backward steps;
}

/// Elements of one channel in a batch, over which the norm of that name takes its statistics.
fn elements(norm: &str) -> f64 {
    let side = match norm.split('.').collect::<Vec<_>>()[..] {
        ["bn1", ..] => 20,
        ["layer1", ..] | ["layer2", _, "bn1", ..] => 10,
        ["layer2", ..] | ["layer3", _, "bn1", ..] => 5,
        ["layer3", ..] | ["layer4", _, "bn1", ..] => 3,
        _ => 2,
    };
    f64::from(4 * side * side)
}

/// The standard's running variance takes the biased variance of the batch, PyTorch's the unbiased one.
#[test]
fn running_statistics_follow_the_batch() {
    let (case, device) = (Case::open("resnet-bn-train"), device());
    let expected = safetensors(&case.folder.join("buffers.safetensors"));
    for (file, phase) in [(DYNAMO, case.phase), (TORCHSCRIPT, Phase::default())] {
        let mut model = case.model(file);
        let initial = expected.iter().map(|(name, values)| {
            let value = if name.ends_with("running_var") { 1.0 } else { 0.0 };
            (name.clone(), Tensor::from_f32([values.len()], &vec![value; values.len()]))
        });
        model.set_weights(initial.collect::<Vec<_>>()).unwrap();
        let bindings = Bindings { phase, ..Bindings::default() };
        let options =
            TrainOptions { learning_rate: 0.0, length: Length::Steps(1), bindings, ..TrainOptions::new(case.objective.clone()) };
        let mut trainer = Trainer::new(&model, &device, &case.data, options).unwrap();
        trainer.train_to(1, |_| Ok::<_, meganeura::Error>(())).unwrap();
        trainer.update(&mut model).unwrap();
        for (name, expected) in &expected {
            let mut found = model.weight(name).unwrap().to_f64_vec();
            if name.ends_with("running_var") {
                let n = elements(name);
                found.iter_mut().for_each(|v| *v = 0.9 + (*v - 0.9) * n / (n - 1.0));
            }
            let error = relative_l2(&found, expected);
            assert!(error <= WEIGHT_TOLERANCE, "{file}: {name}: {error:e}");
        }
        // Evaluation normalises by them.
        let evaluated = trainer.evaluator(&model, &case.data, None).unwrap().run().unwrap().loss;
        let bindings = Bindings { phase: Phase::INFERENCE, ..Bindings::default() };
        let of_file = model.gradients(&device, &case.data, &case.objective, WithRespectTo::Parameters, &bindings).unwrap().loss;
        assert!((evaluated / of_file - 1.0).abs() <= LOSS_TOLERANCE, "{evaluated} instead of {of_file}");
        assert!((evaluated / case.expected("loss")[0] - 1.0).abs() > 0.01, "the statistics of the batch");
    }
}

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
