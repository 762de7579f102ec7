//! A model learns from its user inside an application's loop, one step at a time.
//!
//!     cargo run --release --example personalise
//!
//! Each frame brings a written digit. The application shows its guess; where the guess is wrong, the user corrects it. The corrections are
//! remembered, and each frame makes one training step on some of them. Inference and training share the weights on the device, so the next
//! guess is made with what was learned.

use std::time::{Duration, Instant};

use meganeura::data::Array;
use meganeura::{
    Bindings, DType, Dataset, Device, DeviceSelector, Error, Length, Loss, Model, Objective, Optimizer, Predictor, PrefixCache,
    Tensor, TrainOptions, Trainer,
};

const FRAMES: usize = 400;
/// Corrections per training step.
const BATCH: usize = 16;
/// Corrections that are remembered: the oldest are forgotten.
const MEMORY: usize = 128;

fn main() -> Result<(), Error> {
    let device = Device::open(&DeviceSelector::Auto)?;
    let model = Model::open("fixtures/digits-cnn.onnx")?;
    let (written, unseen) = (Digits::open("fixtures/digits-train.npz")?, Digits::open("fixtures/digits-test.npz")?);

    // The trainer is compiled for batches of these sizes. Every step gets samples of its own.
    let sizes = written.samples(&[0; BATCH]);
    let options = TrainOptions {
        optimizer: Optimizer::from_name("adamw")?,
        learning_rate: 2e-3,
        batch: Some(BATCH),
        length: Length::Steps(FRAMES as u64),
        cache: PrefixCache::Off,
        ..TrainOptions::new(Objective::new(Loss::from_name("cross_entropy")?))
    };
    let mut trainer = Trainer::new(&model, &device, &sizes, options)?;
    let batch = |size: usize| Bindings { dims: [("batch".to_owned(), size)].into(), ..Bindings::default() };
    let mut guesser = trainer.predictor(&model, &batch(1))?;
    let mut examiner = trainer.predictor(&model, &batch(unseen.labels.len()))?;
    let before = unseen.accuracy(&mut examiner)?;

    let mut corrected = Vec::new();
    let (mut wrong, mut slowest) = ([0; 4], Duration::ZERO);
    for frame in 0..FRAMES {
        let started = Instant::now();
        let digit = frame % written.labels.len();
        let guess = classes(&guesser.run(&[("image", &written.images.rows(&[digit]))])?)[0];
        if guess != written.labels[digit] {
            wrong[frame * wrong.len() / FRAMES] += 1;
            corrected.push(digit);
        }
        let memory = &corrected[corrected.len().saturating_sub(MEMORY)..];
        if !memory.is_empty() {
            let some: Vec<usize> = (0..BATCH).map(|i| memory[(frame * BATCH + i) % memory.len()]).collect();
            trainer.step_on(&written.samples(&some))?;
        }
        slowest = slowest.max(started.elapsed());
    }

    let after = unseen.accuracy(&mut examiner)?;
    println!("{} steps on {} corrections; the slowest frame took {slowest:.1?}", trainer.step(), corrected.len());
    println!("wrong guesses in each quarter of the {FRAMES} frames: {wrong:?}");
    println!("accuracy on unseen digits: {before:.3} before, {after:.3} after");
    assert!(after > before + 0.2, "the model learns from its user");
    Ok(())
}

/// Written digits and what they are.
struct Digits {
    images: Array,
    labels: Vec<i64>,
}

impl Digits {
    fn open(path: &str) -> Result<Self, Error> {
        let data = Dataset::open(path)?;
        let array = |name: &str| data.input(name, false, None).map(|(_, array)| array);
        Ok(Digits { images: array("image")?, labels: array("label")?.tensor().to_i64_vec() })
    }

    /// Some of them, as data to train on.
    fn samples(&self, indices: &[usize]) -> Dataset {
        let labels: Vec<i64> = indices.iter().map(|&index| self.labels[index]).collect();
        let labels = Tensor::from_i64(DType::I64, [labels.len()], &labels);
        Dataset::from_tensors([("image", self.images.rows(indices)), ("label", labels)])
    }

    /// The share that a predictor for all of them is right about.
    fn accuracy(&self, predictor: &mut Predictor) -> Result<f64, Error> {
        let found = classes(&predictor.run(&[("image", &self.images.tensor())])?);
        let right = found.iter().zip(&self.labels).filter(|(found, label)| found == label).count();
        Ok(right as f64 / self.labels.len() as f64)
    }
}

/// The class with the largest logit in each row of the only output.
fn classes(outputs: &[(String, Tensor)]) -> Vec<i64> {
    let Some((_, logits)) = outputs.first() else { return Vec::new() };
    let classes = logits.shape().last().copied().unwrap_or(1);
    let largest = |row: &[f64]| (0..row.len()).reduce(|best, at| if row[at] > row[best] { at } else { best });
    logits.to_f64_vec().chunks(classes).map(|row| largest(row).unwrap_or(0) as i64).collect()
}
