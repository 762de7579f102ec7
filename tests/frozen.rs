//! Training the last layers over a cached frozen prefix gives what training over the whole model gives.

mod common;

use common::{device, digits, fixture, relative_l2};
use meganeura::data::{Array, epoch_order};
use meganeura::{
    Bindings, DType, Dataset, Error, Length, Loss, Metric, Model, NonFinite, Objective, Pattern, PrefixCache, Tensor,
    TrainOptions, Trainer,
};

struct Run {
    losses: Vec<f64>,
    weights: Vec<f64>,
    evaluation: f64,
    frozen: Option<meganeura::FrozenPrefix>,
}

/// Three epochs on the digits model, of the parameters that `train` matches, and an evaluation of an odd number of samples.
fn run(train: &str, cache: PrefixCache) -> Run {
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let dataset = |samples| {
        let (image, label) = digits(samples);
        Dataset::from_tensors([("image", image), ("label", label)])
    };
    let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
    let options = TrainOptions {
        batch: Some(8),
        length: Length::Epochs(3),
        train: vec![Pattern::new(train).unwrap()],
        learning_rate: 0.01,
        cache,
        ..TrainOptions::new(objective)
    };
    let mut trainer = Trainer::new(&model, &device(), &dataset(36), options).unwrap();
    let mut losses = Vec::new();
    let total = trainer.total_steps();
    trainer
        .train_to::<meganeura::Error>(total, |report| {
            losses.push(report.loss);
            Ok(())
        })
        .unwrap();
    let mut evaluator = trainer.evaluator(&model, &dataset(13), Some(Metric::Accuracy)).unwrap();
    evaluator.run().unwrap();
    let evaluation = evaluator.run().unwrap().loss;
    let weights = trainer.weights().unwrap().values().flat_map(|w| w.to_f64_vec()).collect();
    Run { losses, weights, evaluation, frozen: trainer.frozen_prefix() }
}

#[test]
fn a_cached_prefix_changes_no_number() {
    let plain = run("fc.*", PrefixCache::Off);
    assert_eq!(plain.frozen, None);
    for memory in [1 << 20, 0, 5000] {
        let cached = run("fc.*", PrefixCache::Memory(memory));
        let frozen = cached.frozen.expect("the convolutions are frozen");
        assert_eq!(frozen.bytes_in_file > 0, memory < 1 << 20);
        assert!(relative_l2(&cached.losses, &plain.losses) <= 1e-6, "{:?} {:?}", cached.losses, plain.losses);
        assert!(relative_l2(&cached.weights, &plain.weights) <= 1e-6);
        assert!((cached.evaluation - plain.evaluation).abs() <= 1e-6 * plain.evaluation);
        eprintln!("bitwise equal: {}", cached.losses == plain.losses && cached.weights == plain.weights);
    }
}

#[test]
fn where_the_first_layer_trains_nothing_is_kept() {
    assert_eq!(run("*", PrefixCache::default()).frozen, None);
}

#[test]
fn data_that_is_not_finite_is_named() {
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let (image, label) = digits(6);
    let mut pixels = image.to_f64_vec();
    pixels[4 * 64 + 3] = f64::NAN;
    let image = Tensor::from_f64(DType::F32, [6, 1, 8, 8], &pixels);
    let data = Dataset::from_tensors([("image", image), ("label", label)]);
    let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
    for cache in [PrefixCache::Off, PrefixCache::default()] {
        let train = vec![Pattern::new("fc.*").unwrap()];
        let options =
            TrainOptions { batch: Some(6), length: Length::Epochs(2), train, cache, ..TrainOptions::new(objective.clone()) };
        let mut trainer = Trainer::new(&model, &device(), &data, options).unwrap();
        match trainer.train_to::<Error>(2, |_| Ok(())) {
            Err(Error::NonFiniteLoss { step: 1, bad: Some(NonFinite::Data { name, sample: 4 }), .. }) => {
                assert_eq!(name, if cache == PrefixCache::Off { "image" } else { "frozen/0" });
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Steps on samples that an application brings are those of a run over data that holds them, with a frozen prefix and without one.
#[test]
fn steps_on_given_samples_are_steps_of_a_run() {
    let (image, label) = digits(24);
    let rows = |tensor: &Tensor, rows: &[usize]| Array::from(tensor.clone()).rows(rows);
    let model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    for (train, cache) in [("*", PrefixCache::Off), ("fc.*", PrefixCache::Off), ("fc.*", PrefixCache::default())] {
        let trainer = || {
            let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
            let options = TrainOptions {
                batch: Some(4),
                accumulate: 2,
                length: Length::Steps(5),
                train: vec![Pattern::new(train).unwrap()],
                learning_rate: 0.01,
                seed: 2,
                cache,
                ..TrainOptions::new(objective)
            };
            let data = Dataset::from_tensors([("image", image.clone()), ("label", label.clone())]);
            Trainer::new(&model, &device(), &data, options).unwrap()
        };
        let (mut whole, mut stepped) = (trainer(), trainer());
        assert_eq!(stepped.frozen_prefix().is_some(), cache != PrefixCache::Off);
        let mut losses = Vec::new();
        whole
            .train_to::<Error>(5, |report| {
                losses.push(*report);
                Ok(())
            })
            .unwrap();
        let mut predictor =
            stepped.predictor(&model, &Bindings { dims: [("batch".into(), 24)].into(), ..Default::default() }).unwrap();
        let mut logits = predictor.run(&[("image", &image)]).unwrap();
        for (step, expected) in losses.iter().enumerate() {
            let order = epoch_order(2, step as u64 / 3, 24);
            let turn = &order[step % 3 * 8..][..8];
            let samples = Dataset::from_tensors([("image", rows(&image, turn)), ("label", rows(&label, turn))]);
            assert_eq!(stepped.step_on(&samples).unwrap(), *expected, "{train}, step {step}");
            let after = predictor.run(&[("image", &image)]).unwrap();
            assert_ne!(after, logits, "the next guess is made with what was learned");
            logits = after;
        }
        assert_eq!(stepped.weights().unwrap(), whole.weights().unwrap());
        let few = Dataset::from_tensors([("image", rows(&image, &[0])), ("label", rows(&label, &[0]))]);
        assert!(matches!(stepped.step_on(&few), Err(Error::StepSamples { found: 1, expected: 8 })));
    }
}
