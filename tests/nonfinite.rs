//! A step that is not finite ends the run, names the first tensor that went bad, and leaves the weights as they were before it.

mod common;

use std::collections::BTreeMap;

use common::{device, fixture};
use meganeura::{
    BadTensor, DType, Dataset, Error, Length, Loss, Model, NonFinite, Objective, Optimizer, Pass, Tensor, TrainOptions, Trainer,
};

const SAMPLES: usize = 8;

/// Samples of which `bad` holds `value` throughout, and targets of 0.
fn data(bad: usize, value: f64, outputs: usize) -> Dataset {
    let x = (0..SAMPLES * 3).map(|i| if i / 3 == bad { value } else { 0.1 + i as f64 * 0.01 });
    let x = Tensor::from_f64(DType::F32, [SAMPLES, 3], &x.collect::<Vec<_>>());
    let y = Tensor::from_f64(DType::F32, [SAMPLES, outputs], &vec![0.0; SAMPLES * outputs]);
    Dataset::from_tensors([("x", x), ("y", y)])
}

fn options(batch: usize, accumulate: usize, clip: Option<f64>) -> TrainOptions {
    TrainOptions {
        optimizer: Optimizer::from_name("adamw").unwrap(),
        learning_rate: 1e-3,
        batch: Some(batch),
        accumulate,
        clip,
        length: Length::Steps(100),
        ..TrainOptions::new(Objective::new(Loss::from_name("mse").unwrap()))
    }
}

fn train(trainer: &mut Trainer, last: u64) -> Result<Vec<f64>, Error> {
    let mut losses = Vec::new();
    trainer.train_to::<Error>(last, |report| {
        losses.push(report.loss);
        Ok(())
    })?;
    Ok(losses)
}

/// The weights of a run that ends after `steps` steps.
fn weights_after(model: &Model, data: &Dataset, options: TrainOptions, steps: u64) -> BTreeMap<String, Tensor> {
    let mut trainer = Trainer::new(model, &device(), data, options).unwrap();
    train(&mut trainer, steps).unwrap();
    trainer.weights().unwrap()
}

#[test]
fn an_overflow_in_the_forward_pass_is_named() {
    let model = Model::open(fixture("nonfinite/overflow.onnx")).unwrap();
    for (bad, accumulate) in [(0, 1), (5, 1), (5, 2)] {
        let data = data(bad, 60.0, 3);
        let mut trainer = Trainer::new(&model, &device(), &data, options(2, accumulate, None)).unwrap();
        let error = train(&mut trainer, 8).unwrap_err();
        let Error::NonFiniteLoss { step, bad: Some(NonFinite::Tensor(ref tensor)), .. } = error else { panic!("{error:?}") };
        let BadTensor { op, origin, pass, ty, element, operands } = tensor.as_ref();
        assert_eq!((*op, origin.as_deref(), *pass), ("exp", Some("\"exponential\""), Pass::Forward), "{error}");
        assert_eq!(ty.shape.to_vec(), [2, 4]);
        let (index, value) = element.as_ref().expect("an element");
        assert_eq!((index[1], *value), (0, f64::INFINITY));
        // The mask's -inf is in the operand, and meant.
        assert!(operands[0].max > 88.8 && operands[0].bad == 2, "{operands:?}");
        assert!(step <= 4 && trainer.step() == step - 1);
        assert_eq!(trainer.weights().unwrap(), weights_after(&model, &data, options(2, accumulate, None), step - 1));
    }
}

#[test]
fn a_quotient_of_zeros_in_the_backward_pass_is_named() {
    let model = Model::open(fixture("nonfinite/quotient.onnx")).unwrap();
    for (bad, accumulate, clip) in [(0, 1, None), (3, 1, None), (3, 1, Some(1.0)), (6, 2, None)] {
        let data = data(bad, 0.0, 4);
        let mut trainer = Trainer::new(&model, &device(), &data, options(2, accumulate, clip)).unwrap();
        let error = train(&mut trainer, 8).unwrap_err();
        let Error::NonFiniteGradients { step, bad: Some(NonFinite::Tensor(ref tensor)), .. } = error else { panic!("{error:?}") };
        assert_eq!((tensor.origin.as_deref(), tensor.pass), (Some("\"root\""), Pass::Backward), "{error}");
        assert!(error.to_string().contains("the derivative of node \"root\""), "{error}");
        assert!(step <= 4 && trainer.step() == step - 1, "{step}");
        assert_eq!(trainer.weights().unwrap(), weights_after(&model, &data, options(2, accumulate, clip), step - 1));
        // Another attempt finds the same.
        assert!(matches!(train(&mut trainer, 8).unwrap_err(), Error::NonFiniteGradients { step: again, .. } if again == step));
    }
}

#[test]
fn a_checkpoint_shortens_the_way_to_the_bad_step() {
    let model = Model::open(fixture("nonfinite/quotient.onnx")).unwrap();
    let data = data(3, 0.0, 4);
    let mut plain = Trainer::new(&model, &device(), &data, options(2, 1, None)).unwrap();
    let Error::NonFiniteGradients { step, .. } = train(&mut plain, 8).unwrap_err() else { panic!("a gradient") };
    let mut trainer = Trainer::new(&model, &device(), &data, options(2, 1, None)).unwrap();
    train(&mut trainer, step - 1).unwrap();
    let checkpoint = trainer.checkpoint().unwrap();
    assert!(matches!(train(&mut trainer, 8).unwrap_err(), Error::NonFiniteGradients { step: found, .. } if found == step));
    assert_eq!(trainer.checkpoint().unwrap(), checkpoint);
}

#[test]
fn adapters_stay_as_they_were() {
    let model = Model::open(fixture("nonfinite/quotient.onnx")).unwrap();
    let data = data(3, 0.0, 4);
    for (accumulate, clip) in [(1, None), (1, Some(1.0)), (2, None)] {
        let lora = vec!["hidden.weight:rank=2,alpha=4".parse().unwrap()];
        let options = TrainOptions { lora, ..options(2, accumulate, clip) };
        let mut trainer = Trainer::new(&model, &device(), &data, options.clone()).unwrap();
        let error = train(&mut trainer, 8).unwrap_err();
        let Error::NonFiniteGradients { step, skipped: None, bad: Some(NonFinite::Tensor(ref tensor)) } = error else {
            panic!("{error:?}")
        };
        assert_eq!((tensor.origin.as_deref(), tensor.pass), (Some("\"root\""), Pass::Backward), "{error}");
        assert_eq!(trainer.weights().unwrap(), weights_after(&model, &data, options, step - 1));
    }
}

#[test]
fn a_step_on_samples_of_an_application_changes_nothing_either() {
    let model = Model::open(fixture("nonfinite/overflow.onnx")).unwrap();
    let given = |samples: usize, value: f64| {
        let x = Tensor::from_f64(DType::F32, [samples, 3], &vec![value; samples * 3]);
        Dataset::from_tensors([("x", x), ("y", Tensor::from_f64(DType::F32, [samples, 3], &vec![0.0; samples * 3]))])
    };
    for accumulate in [1, 2] {
        let trainer = || Trainer::new(&model, &device(), &data(SAMPLES, 0.0, 3), options(2, accumulate, None)).unwrap();
        let (mut interrupted, mut plain) = (trainer(), trainer());
        let samples = plain.batch();
        for value in [0.1, 0.2] {
            let report = plain.step_on(&given(samples, value)).unwrap();
            assert_eq!(interrupted.step_on(&given(samples, value)).unwrap(), report);
            match interrupted.step_on(&given(samples, 60.0)).unwrap_err() {
                Error::NonFiniteLoss { step, bad: Some(NonFinite::Tensor(tensor)), .. } => {
                    assert_eq!((step, tensor.origin.as_deref()), (report.step + 1, Some("\"exponential\"")));
                }
                error => panic!("{error:?}"),
            }
            match interrupted.step_on(&given(samples, f64::NAN)).unwrap_err() {
                Error::NonFiniteLoss { bad: Some(NonFinite::Data { name, sample }), .. } => {
                    assert_eq!((name.as_str(), sample), ("x", 0))
                }
                error => panic!("{error:?}"),
            }
        }
        assert_eq!((interrupted.step(), train(&mut interrupted, 4).unwrap()), (2, train(&mut plain, 4).unwrap()));
        assert_eq!(interrupted.weights().unwrap(), plain.weights().unwrap());
    }
}
