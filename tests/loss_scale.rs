//! Scaled losses in training: steps that overflow change nothing, and others are what they would be without.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{device, digits, fixture, relative_l2, succeed, write_npz};
use meganeura::checkpoint::Checkpoint;
use meganeura::{
    Dataset, Length, Loss, LossScale, Model, NonFinite, Objective, Optimizer, Pass, StepReport, Tensor, TrainOptions, Trainer,
};

fn options(optimizer: &str, loss_scale: Option<LossScale>) -> TrainOptions {
    let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
    let optimizer = Optimizer::from_name(optimizer).unwrap();
    let (length, batch, ema) = (Length::Steps(40), Some(6), Some(0.9));
    TrainOptions { optimizer, learning_rate: 0.01, loss_scale, length, batch, ema, ..TrainOptions::new(objective) }
}

fn trainer(options: TrainOptions) -> Trainer {
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let (image, label) = digits(24);
    Trainer::new(&model, &device(), &Dataset::from_tensors([("image", image), ("label", label)]), options).unwrap()
}

fn steps(trainer: &mut Trainer, last: u64) -> Vec<StepReport> {
    let mut reports = Vec::new();
    trainer
        .train_to(last, |report| {
            reports.push(*report);
            Ok::<_, meganeura::Error>(())
        })
        .unwrap();
    reports
}

fn moved(name: &str) -> bool {
    name.starts_with("optimizer/loss_scale") || name.starts_with("optimizer/ema/") || name.starts_with("optimizer/accumulated")
}

fn unmoved(checkpoint: &Checkpoint) -> BTreeMap<&str, &Tensor> {
    checkpoint.tensors.iter().filter(|(name, _)| !moved(name)).map(|(name, tensor)| (name.as_str(), tensor)).collect()
}

/// f32 ends below 2^128.
fn overflowing() -> LossScale {
    LossScale { initial: 2f64.powi(127), growth_interval: 3, ..LossScale::default() }
}

#[test]
fn a_step_that_overflows_changes_no_weight_and_no_moment() {
    for (optimizer, accumulate, clip) in [("adamw", 1, None), ("adafactor", 2, None), ("adamw", 1, Some(1.0))] {
        let options = TrainOptions { accumulate, clip, learning_rate: 1e-4, ..options(optimizer, Some(overflowing())) };
        let mut trainer = trainer(options);
        let before = trainer.checkpoint().unwrap();
        let first = steps(&mut trainer, 1);
        assert!(first[0].skipped && first[0].loss.is_finite() && first[0].loss_scale == Some(2f64.powi(127)));
        let after = trainer.checkpoint().unwrap();
        assert!(unmoved(&before) == unmoved(&after), "{optimizer}");
        assert_eq!(after.tensors["optimizer/loss_scale"], Tensor::scalar_f32(2f32.powi(126)));
        assert_eq!(after.tensors["optimizer/steps"], Tensor::scalar_f32(0.0));

        // Later the scale is one that fits, grows after three steps, and overflows again.
        let rest = steps(&mut trainer, 40);
        let mut expected = 2f64.powi(126);
        let mut streak = 0;
        for report in &rest {
            assert_eq!(report.loss_scale, Some(expected), "{optimizer}, step {}", report.step);
            streak = if report.skipped { 0 } else { streak + 1 };
            if report.skipped {
                expected /= 2.0;
            } else if streak == 3 {
                // A scale that overflows itself stays.
                (expected, streak) = (if expected < 2f64.powi(127) { expected * 2.0 } else { expected }, 0);
            }
        }
        let taken = rest.iter().filter(|report| !report.skipped).count();
        assert!(taken > 10 && taken < rest.len(), "{taken}");
        let after = trainer.checkpoint().unwrap();
        assert_eq!(after.tensors["optimizer/steps"], Tensor::scalar_f32(taken as f32));
    }
}

#[test]
fn steps_that_do_not_overflow_are_those_of_the_plain_loss() {
    for optimizer in ["sgd", "adam", "adamw", "lion", "adafactor", "rmsprop", "adagrad"] {
        let run = |loss_scale| {
            let mut trainer = trainer(options(optimizer, loss_scale));
            let reports = steps(&mut trainer, 10);
            assert!(reports.iter().all(|report| !report.skipped && report.loss_scale.is_some() == loss_scale.is_some()));
            trainer.weights().unwrap()
        };
        let (plain, scaled) = (run(None), run(Some(LossScale::default())));
        for (name, tensor) in &scaled {
            let error = relative_l2(&tensor.to_f64_vec(), &plain[name].to_f64_vec());
            assert!(error < 1e-5, "{optimizer}, {name}: {error:e}");
        }
    }
}

#[test]
fn gradients_that_never_are_finite_end_the_run() {
    let fixed = LossScale::fixed(f64::from(f32::MAX));
    let (length, learning_rate, batch) = (Length::Steps(200), 0.0, Some(24));
    let mut trainer = trainer(TrainOptions { length, learning_rate, batch, ..options("sgd", Some(fixed)) });
    let error = trainer.train_to(200, |_| Ok::<_, meganeura::Error>(())).unwrap_err();
    let meganeura::Error::NonFiniteGradients { step: 100, skipped: Some(skipped), bad: Some(bad) } = &error else {
        panic!("{error}")
    };
    assert_eq!((skipped.steps, skipped.scale), (100, f64::from(f32::MAX)));
    assert!(matches!(bad, NonFinite::Tensor(tensor) if tensor.pass == Pass::Backward), "{error}");
    assert_eq!(trainer.step(), 100);
    let error = trainer.train_to(200, |_| Ok::<_, meganeura::Error>(())).unwrap_err();
    assert!(matches!(error, meganeura::Error::NonFiniteGradients { step: 101, .. }), "{error}");
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_whatever_its_scale() {
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let (image, label) = digits(24);
    let mut values = image.to_f64_vec();
    values[0] = f64::NAN;
    let image = Tensor::from_f64(image.dtype(), image.shape().clone(), &values);
    let data = Dataset::from_tensors([("image", image), ("label", label)]);
    let mut trainer = Trainer::new(&model, &device(), &data, options("adamw", Some(LossScale::default()))).unwrap();
    let error = trainer.train_to(40, |_| Ok::<_, meganeura::Error>(())).unwrap_err();
    let meganeura::Error::NonFiniteLoss { step, bad: Some(NonFinite::Data { sample: 0, .. }), .. } = error else {
        panic!("{error}")
    };
    let mut before = self::trainer(options("adamw", Some(LossScale::default())));
    steps(&mut before, step - 1);
    assert_eq!(trainer.step(), step - 1);
    assert!(trainer.checkpoint().unwrap().tensors == before.checkpoint().unwrap().tensors);
}

#[test]
fn the_log_has_the_scale_of_each_step() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (image, label) = digits(12);
    write_npz(Path::new(&file("data.npz")), &[("image", image), ("label", label)]);
    let scales = |scale: &str| -> Vec<(Option<f32>, bool)> {
        let original = fixture("digits-cnn.onnx").to_str().unwrap().to_string();
        let run = ["train", &original, "--data", &file("data.npz"), "--loss", "cross_entropy", "--batch", "6", "--steps", "2"];
        succeed([run.as_slice(), &["--loss-scale", scale, "--log", &file("log"), "-o", &file("out.safetensors")]].concat());
        let text = std::fs::read_to_string(file("log")).unwrap();
        let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let steps = events.filter(|event| event["event"] == "step");
        steps.map(|event| (event["loss_scale"].as_f64().map(|scale| scale as f32), event["skipped"] == true)).collect()
    };
    assert_eq!(scales("dynamic"), [(Some(65536.0), false); 2]);
    assert_eq!(scales("3e38"), [(Some(3e38), true); 2]);
    assert_eq!(scales("off"), [(None, false); 2]);
}
