//! A published model trains end to end: PP-OCR's classifier of the direction of text lines, 53 convolutions and 35 normalisations whose
//! exporter dropped the training mode.
//!
//! `cargo xtask test` fetches the model into `.corpus/published/`; where it is not there, the test says so and passes. The lines are drawn
//! here: words of letters with ascenders and descenders, upright or turned by 180 degrees.

mod common;

use std::time::Instant;

use common::{device, published};
use meganeura::{
    Bindings, DType, Dataset, Length, Loss, Mode, Model, Objective, Optimizer, Phase, Tensor, TrainOptions, Trainer,
};

/// The height is the model's; lines as short as these suffice.
const HEIGHT: usize = 48;
const WIDTH: usize = 96;
const SAMPLES: usize = 16;
const BATCH: usize = 8;
const STEPS: u64 = 20;

/// A generator of numbers below `below`, the same ones everywhere (Numerical Recipes' linear congruential one).
struct Numbers(u32);

impl Numbers {
    fn next(&mut self, below: u32) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(self.0) * u64::from(below)) >> 32) as usize
    }
}

/// Ink f32 [HEIGHT, WIDTH] from 0 to 1: letters are a stem and a bowl, some with an ascender or a descender, on one baseline.
fn line(numbers: &mut Numbers) -> Vec<f32> {
    let mut ink = vec![0.0; HEIGHT * WIDTH];
    let mut fill = |left: usize, top: usize, width: usize, height: usize| {
        for y in top..(top + height).min(HEIGHT) {
            ink[y * WIDTH..][left.min(WIDTH)..(left + width).min(WIDTH)].fill(1.0);
        }
    };
    let (middle, baseline, thick) = (18, 34, 3);
    let mut left = 3 + numbers.next(4);
    while left + 10 < WIDTH {
        let width = 7 + numbers.next(4);
        // Upright lines have more ascenders than descenders, as Latin text has.
        let (top, bottom) = match numbers.next(8) {
            0..=3 => (6 + numbers.next(4), baseline),
            4 => (middle, baseline + 8),
            _ => (middle, baseline),
        };
        fill(left, top, thick, bottom - top);
        fill(left, middle, width, thick);
        fill(left + width - thick, middle, thick, baseline - middle);
        if numbers.next(2) == 0 {
            fill(left, baseline - thick, width, thick);
        }
        left += width + 3 + if numbers.next(5) == 0 { 6 } else { 0 };
    }
    ink
}

/// Images f32 [samples, 3, HEIGHT, WIDTH] from -1 to 1, and 1 for those that are turned.
fn lines(samples: usize, seed: u32) -> (Tensor, Tensor) {
    let mut numbers = Numbers(seed);
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for sample in 0..samples {
        let mut ink = line(&mut numbers);
        if sample % 2 == 1 {
            ink.reverse();
        }
        let noise = |ink: f32, numbers: &mut Numbers| 0.8 - 1.6 * ink + (numbers.next(100) as f32 - 50.0) / 500.0;
        let plane: Vec<f32> = ink.into_iter().map(|ink| noise(ink, &mut numbers)).collect();
        (0..3).for_each(|_| pixels.extend(&plane));
        labels.push(sample as i64 % 2);
    }
    (Tensor::from_f32([samples, 3, HEIGHT, WIDTH], &pixels), Tensor::from_i64(DType::I64, [samples], &labels))
}

#[test]
fn the_direction_classifier_trains_from_end_to_end() {
    let Some(path) = published("ppocr_v2_cls.onnx") else { return };
    let mut model = Model::open(path).unwrap();
    let count = |op: &str| model.imported().op_counts().get(op).copied();
    assert_eq!((count("Conv"), count("BatchNormalization")), (Some(53), Some(35)));
    let (device, (x, label)) = (device(), lines(SAMPLES, 1));
    let data = Dataset::from_tensors([("x", x), ("label", label)]);
    let options = TrainOptions {
        optimizer: Optimizer::from_name("adamw").unwrap(),
        learning_rate: 1e-3,
        batch: Some(BATCH),
        length: Length::Steps(STEPS),
        bindings: Bindings { phase: Phase { batch_norm: Mode::Train, ..Phase::default() }, ..Bindings::default() },
        ..TrainOptions::new(Objective::new(Loss::from_name("cross_entropy").unwrap()))
    };
    let before: Vec<Tensor> = model.parameters().iter().map(|p| model.weight(&p.name).unwrap()).collect();
    let started = Instant::now();
    let mut trainer = Trainer::new(&model, &device, &data, options).unwrap();
    eprintln!("prepared in {:.1} s", started.elapsed().as_secs_f64());
    assert!(trainer.frozen_prefix().is_none());
    let mut losses = Vec::new();
    trainer
        .train_to::<meganeura::Error>(STEPS, |report| {
            losses.push(report.loss);
            Ok(())
        })
        .unwrap();
    trainer.update(&mut model).unwrap();
    eprintln!("{losses:.4?} in {:.1} s", started.elapsed().as_secs_f64());
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert_eq!(losses.len(), STEPS as usize);
    assert!(mean(&losses[15..]) < 0.5 * mean(&losses[..5]), "{losses:?}");

    // Every weight moved, and every running statistic.
    for (parameter, before) in model.parameters().iter().zip(before) {
        assert_ne!(model.weight(&parameter.name).unwrap(), before, "{}", parameter.name);
    }
    let evaluated = trainer.evaluator(&model, &data, None).unwrap().run().unwrap().loss;
    assert!(evaluated.is_finite());
}
