//! Training the last layers over a cached frozen prefix gives what training over the whole model gives.

mod common;

use common::{device, digits, fixture, relative_l2};
use meganeura::{
    DType, Dataset, Error, Length, Loss, Metric, Model, NonFinite, Objective, Pattern, PrefixCache, Tensor, TrainOptions, Trainer,
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
