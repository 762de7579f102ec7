//! Layers that act differently in training: Dropout against PyTorch's distribution, and what training and evaluation make of them.

mod common;

use std::path::{Path, PathBuf};

use common::{device, fixture, meganeura, npz, relative_l2, succeed, write_npz};
use meganeura::{
    Bindings, Dataset, Length, Loss, Mode, Model, Objective, Phase, RANDOM_KEY, Tensor, TrainOptions, Trainer, random_key,
};

const DRAWS: usize = 20_000;

fn model() -> Model {
    Model::open(fixture("dropout/model.onnx")).unwrap()
}

fn expected(name: &str) -> Vec<f64> {
    npz(&fixture("dropout/expect.npz"), name)
}

/// The fixture's sample, `count` times.
fn samples(count: usize) -> Tensor {
    let row: Vec<f32> = expected("in_x").into_iter().map(|v| v as f32).collect();
    Tensor::from_f32([count, row.len()], &row.repeat(count))
}

fn run(x: &Tensor, seed: u64, dropout: Mode) -> Vec<f64> {
    let bindings = Bindings { phase: Phase { dropout, ..Phase::default() }, ..Bindings::default() };
    let key = random_key(seed, 0);
    model().run_with(&device(), &[("x", x), (RANDOM_KEY, &key)], &bindings).unwrap()[0].1.to_f64_vec()
}

#[test]
fn dropout_has_pytorchs_distribution() {
    let found = run(&samples(DRAWS), 3, Mode::File);
    for (class, (mean, deviation)) in expected("mean").into_iter().zip(expected("std")).enumerate() {
        let values: Vec<f64> = found.iter().skip(class).step_by(3).copied().collect();
        let average = values.iter().sum::<f64>() / DRAWS as f64;
        let spread = (values.iter().map(|v| (v - average).powi(2)).sum::<f64>() / DRAWS as f64).sqrt();
        assert!((average - mean).abs() < 5.0 * deviation / (DRAWS as f64).sqrt(), "{average} instead of {mean}");
        assert!((spread / deviation - 1.0).abs() < 0.03, "{spread} instead of {deviation}");
    }
}

#[test]
fn seeds_decide_what_drops_and_inference_drops_nothing() {
    let x = samples(8);
    let first = run(&x, 1, Mode::File);
    assert_eq!(first, run(&x, 1, Mode::Train));
    assert_ne!(first, run(&x, 2, Mode::File));
    let inference = run(&x, 1, Mode::Off);
    assert!(relative_l2(&inference, &expected("eval").repeat(8)) < 1e-6);
}

#[test]
fn the_run_command_infers_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (folder.path().join("in.npz"), folder.path().join("out.npz"));
    write_npz(&data, &[("x", samples(8))]);
    let run = |more: &[&str]| {
        let (model, data, out) = (fixture("dropout/model.onnx"), data.to_str().unwrap(), out.to_str().unwrap());
        let output = meganeura([&["run", model.to_str().unwrap(), "--data", data, "-o", out][..], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (npz(Path::new(out), "y"), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (inference, told) = run(&[]);
    assert!(told.contains("Dropout acts as in inference, where the file says training"), "{told}");
    assert!(relative_l2(&inference, &expected("eval").repeat(8)) < 1e-6);
    let (dropped, told) = run(&["--dropout", "file", "--seed", "9"]);
    assert!(!told.contains("Dropout"), "{told}");
    assert_eq!(dropped, library_run(9));
    assert_ne!(dropped, run(&["--dropout", "train", "--seed", "10"]).0);
}

fn library_run(seed: u64) -> Vec<f64> {
    run(&samples(8), seed, Mode::File)
}

/// Samples and targets that differ.
fn training_data(folder: &Path) -> PathBuf {
    let path = folder.join("train.npz");
    let values: Vec<f32> = (0..10 * 6).map(|i| ((i * 7 + i / 5) % 11) as f32 / 4.0 - 1.25).collect();
    let label: Vec<i64> = (0..10).map(|i| i % 3).collect();
    let label = Tensor::from_i64(meganeura::DType::I64, [10], &label);
    write_npz(&path, &[("x", Tensor::from_f32([10, 6], &values)), ("label", label)]);
    path
}

fn train(data: &Path, out: &Path, more: &[&str]) {
    let model = fixture("dropout/model.onnx");
    let paths = [model.to_str().unwrap(), "--data", data.to_str().unwrap(), "-o", out.to_str().unwrap()];
    let fixed = ["--loss", "cross_entropy", "--batch", "4", "--lr", "0.01", "--steps", "7"];
    succeed([&["train"], &paths[..], &fixed, more].concat());
}

#[test]
fn a_run_with_dropout_resumes_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let data = training_data(folder.path());
    let path = |name: &str| folder.path().join(name);
    train(&data, &path("whole"), &["--seed", "7"]);
    train(&data, &path("off"), &["--seed", "7", "--dropout", "off"]);
    let run = path("run").to_str().unwrap().to_string();
    let checkpoints = ["--seed", "7", "--every", "1", "--keep", "10", "--checkpoint", &run];
    train(&data, &path("part"), &checkpoints);
    for step in 4..=7 {
        std::fs::remove_file(path("run").join(format!("step-{step}.safetensors"))).unwrap();
    }
    train(&data, &path("resumed"), &[&checkpoints[..], &["--resume", &run]].concat());
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    assert!(read("whole") == read("part") && read("whole") == read("resumed"));
    assert!(read("whole") != read("off"));
}

#[test]
fn steps_drop_differently_and_evaluation_drops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let data = Dataset::open(training_data(folder.path())).unwrap();
    let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
    let options = |dropout| TrainOptions {
        // Every step has all samples, and changes nothing.
        batch: Some(10),
        learning_rate: 0.0,
        length: Length::Steps(3),
        bindings: Bindings { phase: Phase { dropout, ..Phase::default() }, ..Bindings::default() },
        ..TrainOptions::new(objective.clone())
    };
    let (model, device) = (model(), device());
    let losses = |dropout| {
        let mut trainer = Trainer::new(&model, &device, &data, options(dropout)).unwrap();
        let mut losses = Vec::new();
        let remember = |report: &meganeura::StepReport| {
            losses.push(report.loss);
            Ok::<_, meganeura::Error>(())
        };
        trainer.train_to(3, remember).unwrap();
        let evaluated = trainer.evaluator(&model, &data, None).unwrap().run().unwrap().loss;
        (losses, evaluated)
    };
    let (dropped, evaluated) = losses(Mode::File);
    assert!(dropped[0] != dropped[1] && dropped[1] != dropped[2], "{dropped:?}");
    let (kept, without) = losses(Mode::Off);
    assert!(kept.iter().all(|loss| (loss - evaluated).abs() < 1e-6) && evaluated == without, "{kept:?}, {evaluated}");
}

#[test]
fn the_seed_of_grad_decides_what_drops() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (fixture("dropout/model.onnx"), training_data(folder.path()));
    let grad = |seed: &str, out: &str| {
        let out = folder.path().join(out);
        let paths = [model.to_str().unwrap(), "--data", data.to_str().unwrap(), "-o", out.to_str().unwrap()];
        succeed([&["grad"], &paths[..], &["--loss", "cross_entropy", "--seed", seed]].concat());
        std::fs::read(out).unwrap()
    };
    let first = grad("1", "a");
    assert!(first == grad("1", "b") && first != grad("2", "c"));
}
