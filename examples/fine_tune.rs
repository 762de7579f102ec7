//! Fine-tunes a classifier: opens a model, trains it on one file, evaluates it on another, and writes it back.
//!
//!     cargo run --release --example fine_tune
//!     cargo run --release --example fine_tune -- model.onnx train.npz test.npz tuned.onnx
//!
//! Without arguments it takes a small network that knows half of the digits, and teaches it the others.

use std::path::PathBuf;

use meganeura::{
    Dataset, Decay, Device, DeviceSelector, Error, Evaluation, Length, Loss, Metric, Model, Objective, Optimizer, TrainOptions,
    Trainer,
};

fn main() -> Result<(), Error> {
    let given: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let file = |index: usize, name: &str| given.get(index).cloned().unwrap_or_else(|| PathBuf::from("fixtures").join(name));

    let device = Device::open(&DeviceSelector::Auto)?;
    let mut model = Model::open(file(0, "digits-cnn.onnx"))?;
    let (train, test) = (Dataset::open(file(1, "digits-train.npz"))?, Dataset::open(file(2, "digits-test.npz"))?);

    let options = TrainOptions {
        optimizer: Optimizer::from_name("adamw")?,
        learning_rate: 0.01,
        decay: Decay::Cosine { min: 0.0, steps: None },
        batch: Some(32),
        length: Length::Epochs(4),
        no_decay_norms: true,
        ..TrainOptions::new(Objective::new(Loss::from_name("cross_entropy")?))
    };
    let mut trainer = Trainer::new(&model, &device, &train, options)?;
    let mut evaluator = trainer.evaluator(&model, &test, Some(Metric::Accuracy))?;
    println!("before: {}", describe(&trainer.evaluate(&mut evaluator)?));
    for epoch in 1.. {
        let last = (epoch * trainer.steps_per_epoch()).min(trainer.total_steps());
        let mut losses = Vec::new();
        trainer.train_to(last, |step| {
            losses.push(step.loss);
            Ok::<_, Error>(())
        })?;
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        println!("epoch {epoch}: loss {mean:.4}; on unseen samples {}", describe(&trainer.evaluate(&mut evaluator)?));
        if last == trainer.total_steps() {
            break;
        }
    }

    trainer.update(&mut model)?;
    let tuned = given.get(3).cloned().unwrap_or_else(|| std::env::temp_dir().join("tuned.onnx"));
    model.export_onnx(&tuned)?;
    println!("wrote {}", tuned.display());
    Ok(())
}

fn describe(evaluation: &Evaluation) -> String {
    let accuracy = evaluation.metric.map_or(f64::NAN, |(_, value)| value);
    format!("loss {:.4}, accuracy {accuracy:.3}", evaluation.loss)
}
