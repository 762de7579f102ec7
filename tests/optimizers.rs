//! Optimisers on the device against PyTorch, and what a trainer makes of groups, micro-batches and averages.

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use common::{device, digits, fixture};
use meganeura::codegen::{CompileOptions, compile};
use meganeura::ir::{Graph, ParameterId, ParameterInfo, ParameterRole};
use meganeura::runtime::{ParameterStore, Session};
use meganeura::{
    DType, Dataset, Error, GroupRate, Length, Loss, Metric, Model, Objective, Optimizer, ParameterGroup, Pattern, Tensor,
    TrainOptions, Trainer,
};
use ndarray::{ArrayD, Axis};
use ndarray_npy::NpzReader;

const STEPS: u64 = 20;
const WEIGHTS: [&str; 3] = ["matrix", "vector", "kernel"];

/// Cases of fixtures/optimizers.py with the defaults of their optimiser.
const CASES: [&str; 7] = ["sgd", "adam", "adamw", "lion", "adafactor", "rmsprop", "adagrad"];

fn f32s(array: ndarray::ArrayViewD<f64>) -> Tensor {
    Tensor::from_f64(DType::F32, array.shape(), &array.iter().copied().collect::<Vec<_>>())
}

#[test]
fn every_optimizer_reaches_the_weights_of_pytorch_on_the_device() {
    let mut file = NpzReader::new(File::open(fixture("optimizers.npz")).unwrap()).unwrap();
    let mut array = |name: &str| -> ArrayD<f64> { file.by_name(&format!("{name}.npy")).unwrap() };
    let rates = array("learning_rates");
    let slopes: Vec<ArrayD<f64>> = WEIGHTS.iter().map(|name| array(&format!("gradient/{name}"))).collect();
    let start: Vec<Tensor> = WEIGHTS.iter().map(|name| f32s(array(&format!("weight/{name}")).view())).collect();

    // One program for all cases: each is a group with weights of its own.
    let mut g = Graph::new();
    let inputs: Vec<_> = WEIGHTS.iter().zip(&start).map(|(name, t)| g.input(*name, t.ty().clone()).unwrap()).collect();
    let mut values = Vec::new();
    for (group, case) in CASES.iter().enumerate() {
        let mut pairs = Vec::new();
        for ((name, tensor), &slope) in WEIGHTS.iter().zip(&start).zip(&inputs) {
            let (name, ty) = (format!("{case}/{name}"), tensor.ty().clone());
            let node =
                g.parameter(ParameterInfo { name: name.clone(), ty, stored: DType::F32, role: ParameterRole::Weight }).unwrap();
            let id = g.parameter_id(&name).unwrap();
            let half = g.scale(node, 0.5).unwrap();
            pairs.push((id, g.add(slope, half).unwrap()));
            values.push((id, tensor));
        }
        Optimizer::from_name(case).unwrap().apply_group(&mut g, group, &pairs).unwrap();
    }
    let device = device();
    let program = compile(&g.verify().unwrap(), device.profile(), &CompileOptions::default()).unwrap().program;
    let store = ParameterStore::new(&device, &program).unwrap();
    let mut session = Session::new(&device, Arc::new(program), &store).unwrap();
    session.write_parameters(&values).unwrap();
    for step in 1..=STEPS {
        let at = step as usize - 1;
        let mut inputs: Vec<(String, Tensor)> =
            WEIGHTS.iter().zip(&slopes).map(|(name, all)| (name.to_string(), f32s(all.index_axis(Axis(0), at)))).collect();
        for (group, case) in CASES.iter().enumerate() {
            let scalars = Optimizer::from_name(case).unwrap().group_inputs(group, step, rates[[at]]);
            inputs.extend(scalars.into_iter().map(|(name, value)| (name, Tensor::scalar_f32(value))));
        }
        session.run(&inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect::<Vec<_>>()).unwrap();
    }
    let ids: Vec<ParameterId> = values.iter().map(|(id, _)| *id).collect();
    let mut found = session.read_parameters(&ids).unwrap().into_iter();
    for case in CASES {
        for name in WEIGHTS {
            let expected = array(&format!("optimizer/{case}/{name}"));
            for (found, expected) in found.next().unwrap().to_f64_vec().iter().zip(expected.index_axis(Axis(0), 2)) {
                assert!(
                    (found - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                    "{case}, {name}: {found}, PyTorch has {expected}"
                );
            }
        }
    }
}

fn data(samples: usize) -> Dataset {
    let (image, label) = digits(samples);
    Dataset::from_tensors([("image", image), ("label", label)])
}

fn options(loss: &str) -> TrainOptions {
    let objective = Objective::new(Loss::from_name(loss).unwrap());
    TrainOptions { learning_rate: 0.01, length: Length::Steps(4), seed: 3, ..TrainOptions::new(objective) }
}

/// The trainer after its run, and its losses.
fn trained(model: &Model, options: TrainOptions) -> (Trainer, Vec<f64>) {
    let mut trainer = Trainer::new(model, &device(), &data(30), options).unwrap();
    let mut losses = Vec::new();
    let total = trainer.total_steps();
    trainer
        .train_to(total, |step| {
            losses.push(step.loss);
            Ok::<_, Error>(())
        })
        .unwrap();
    (trainer, losses)
}

fn distance(a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>) -> f64 {
    let pairs = a.iter().flat_map(|(name, a)| a.to_f64_vec().into_iter().zip(b[name].to_f64_vec()));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn micro_batches_train_as_their_large_batch() {
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let sgd = Optimizer::Sgd { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.01 };
    let run = |batch, accumulate| {
        let options = TrainOptions {
            optimizer: sgd,
            batch: Some(batch),
            accumulate,
            clip: Some(1.0),
            ema: Some(0.5),
            ..options("cross_entropy")
        };
        trained(&model, options)
    };
    let ((mut large, expected), (mut small, found)) = (run(12, 1), run(4, 3));
    assert_eq!((large.batch(), small.batch()), (12, 12));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-5, "{found}, of the large batch {expected}");
    }
    assert!(distance(&small.weights().unwrap(), &large.weights().unwrap()) < 1e-5);

    let resumed = TrainOptions { batch: Some(4), accumulate: 2, ..options("cross_entropy") };
    let mut resumed = Trainer::new(&model, &device(), &data(30), resumed).unwrap();
    assert!(resumed.resume(&small.checkpoint().unwrap()).is_err());
}

#[test]
fn the_average_is_evaluated_and_written_and_training_goes_on_without_it() {
    let mut model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let run = |ema| trained(&model, TrainOptions { batch: Some(8), ema, ..options("cross_entropy") });
    let ((mut plain, _), (mut averaged, _)) = (run(None), run(Some(0.9)));
    let weights = averaged.weights().unwrap();
    assert_eq!(distance(&weights, &plain.weights().unwrap()), 0.0);

    let mut evaluator = averaged.evaluator(&model, &data(10), Some(Metric::Accuracy)).unwrap();
    let evaluation = averaged.evaluate(&mut evaluator).unwrap();
    assert_eq!(distance(&averaged.weights().unwrap(), &weights), 0.0);
    assert_ne!(evaluation, evaluator.run().unwrap());

    // The model with the averages, evaluated before a first step, is what was evaluated.
    averaged.update(&mut model).unwrap();
    let mut fresh =
        Trainer::new(&model, &device(), &data(30), TrainOptions { batch: Some(8), ..options("cross_entropy") }).unwrap();
    let mut evaluator = fresh.evaluator(&model, &data(10), Some(Metric::Accuracy)).unwrap();
    assert_eq!(fresh.evaluate(&mut evaluator).unwrap(), evaluation);
}

#[test]
fn a_group_that_learns_nothing_stays() {
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let pattern = Pattern::new("conv*").unwrap();
    let groups = vec![ParameterGroup { pattern, learning_rate: Some(GroupRate::Multiple(0.0)), weight_decay: None }];
    let options = TrainOptions { batch: Some(8), groups, no_decay_norms: true, ..options("cross_entropy") };
    let mut before = Trainer::new(&model, &device(), &data(30), options.clone()).unwrap();
    let before = before.weights().unwrap();
    let (mut trainer, _) = trained(&model, options);
    assert_eq!(trainer.groups().len(), 4);
    for (name, after) in trainer.weights().unwrap() {
        assert_eq!(after == before[&name], name.starts_with("conv"), "{name}");
    }
}
