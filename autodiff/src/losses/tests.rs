use super::*;
use crate::testing::{assert_close, check, evaluate, graph_of, grid, indices, reals};

fn value(loss: Loss, prediction: &Tensor, target: Option<&Tensor>) -> f64 {
    let tensors: Vec<Tensor> = [Some(prediction), target].into_iter().flatten().cloned().collect();
    let mut g = Graph::new();
    let nodes: Vec<NodeId> = tensors.iter().enumerate().map(|(i, t)| g.input(i.to_string(), t.ty().clone()).unwrap()).collect();
    let node = loss.build(&mut g, nodes[0], nodes.get(1).copied()).unwrap();
    evaluate(&g, &tensors, &[node])[0][0]
}

/// The derivative with respect to the prediction.
fn check_loss(name: &str, loss: Loss, prediction: &Tensor, target: &Tensor) {
    let constant = target.clone();
    check(name, std::slice::from_ref(prediction), |g, x| {
        let target = g.constant(constant.clone())?;
        Ok(loss.build(g, x[0], Some(target)).unwrap())
    });
}

/// `-log softmax(row)[class]` for one row.
fn negative_log_likelihood(row: &[f64], class: usize) -> f64 {
    row.iter().map(|v| (v - row[class]).exp()).sum::<f64>().ln()
}

fn cross_entropy(label_smoothing: f64) -> Loss {
    Loss::CrossEntropy { label_smoothing, ignore_index: Some(-100), class_weights: None }
}

#[test]
fn every_name_is_in_the_table_once() {
    for (name, loss) in Loss::TABLE {
        assert_eq!(loss.name(), name);
        assert_eq!(Loss::from_name(name), Ok(loss));
    }
    assert!(Loss::from_name("hinge").unwrap_err().to_string().contains("cross_entropy, mse"));
}

#[test]
fn cross_entropy_averages_over_the_rows_that_count() {
    let x = grid([4, 3], -2.0, 2.0);
    let rows: Vec<Vec<f64>> = x.to_f64_vec().chunks(3).map(<[f64]>::to_vec).collect();
    let target = indices([4], &[2, -100, 0, 1]);
    let expected = [(0, 2), (2, 0), (3, 1)].map(|(r, c)| negative_log_likelihood(&rows[r], c)).iter().sum::<f64>() / 3.0;
    assert_close("mean", &[value(cross_entropy(0.0), &x, Some(&target))], &[expected], 1e-12);
    check_loss("cross_entropy", cross_entropy(0.0), &x, &target);
    let all = Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: None, class_weights: None };
    check_loss("no ignored index", all, &x, &indices([4], &[2, 1, 0, 1]));
}

#[test]
fn cross_entropy_smooths_towards_the_uniform_distribution() {
    let x = grid([2, 3], -2.0, 2.0);
    let target = indices([2], &[2, 0]);
    let rows: Vec<Vec<f64>> = x.to_f64_vec().chunks(3).map(<[f64]>::to_vec).collect();
    let smoothed = |row: &[f64], class: usize| -> f64 {
        (0..3).map(|c| (0.1 / 3.0 + if c == class { 0.9 } else { 0.0 }) * negative_log_likelihood(row, c)).sum()
    };
    let expected = (smoothed(&rows[0], 2) + smoothed(&rows[1], 0)) / 2.0;
    assert_close("indices", &[value(cross_entropy(0.1), &x, Some(&target))], &[expected], 1e-12);
    check_loss("indices", cross_entropy(0.1), &x, &target);
    let dense = reals([2, 3], &[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
    assert_close("dense", &[value(cross_entropy(0.1), &x, Some(&dense))], &[expected], 1e-12);
    check_loss("dense", cross_entropy(0.1), &x, &dense);
}

#[test]
fn cross_entropy_finds_the_class_axis() {
    // Class axis 1 of an image, the last axis of a sequence, the only axis of a vector.
    let image = grid([2, 3, 2, 2], -2.0, 2.0);
    let at = |n: usize, c: usize, p: usize| image.to_f64_vec()[(n * 3 + c) * 4 + p];
    let classes = [0, 1, 2, 0, 2, 2, 1, 0];
    let expected: f64 =
        (0..8).map(|i| negative_log_likelihood(&[0, 1, 2].map(|c| at(i / 4, c, i % 4)), classes[i] as usize)).sum::<f64>() / 8.0;
    let target = indices([2, 2, 2], &classes);
    assert_close("image", &[value(cross_entropy(0.0), &image, Some(&target))], &[expected], 1e-12);
    check_loss("image", cross_entropy(0.0), &image, &target);

    let text = grid([2, 4, 3], -2.0, 2.0);
    let rows: Vec<Vec<f64>> = text.to_f64_vec().chunks(3).map(<[f64]>::to_vec).collect();
    let expected = rows.iter().zip(classes).map(|(row, c)| negative_log_likelihood(row, c as usize)).sum::<f64>() / 8.0;
    let target = indices([2, 4], &classes);
    assert_close("text", &[value(cross_entropy(0.0), &text, Some(&target))], &[expected], 1e-12);
    check_loss("text", cross_entropy(0.2), &text, &target);

    let vector = grid([5], -2.0, 2.0);
    let expected = negative_log_likelihood(&vector.to_f64_vec(), 3);
    assert_close("vector", &[value(cross_entropy(0.0), &vector, Some(&indices([], &[3])))], &[expected], 1e-12);
}

#[test]
fn elementwise_losses_follow_their_formulas() {
    let x = reals([2, 3], &[-3.0, -0.5, 0.25, 1.0, 2.5, 40.0]);
    let t = reals([2, 3], &[0.5, 0.0, 0.75, 1.0, 0.125, 0.25]);
    let mean = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        x.to_f64_vec().iter().zip(t.to_f64_vec()).map(|(&x, t)| f(x, t)).sum::<f64>() / 6.0
    };
    let huber = |d: f64| if d.abs() < 1.5 { d * d / 2.0 } else { 1.5 * (d.abs() - 0.75) };
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let bce = |x: f64, t: f64| -t * sigmoid(x).ln() + (1.0 - t) * (x + (1.0 + (-x).exp()).ln());
    let kl = |x: f64, t: f64| if t == 0.0 { 0.0 } else { t * (t.ln() - x) };
    for (loss, expected) in [
        (Loss::Mse, mean(&|x, t| (x - t) * (x - t))),
        (Loss::L1, mean(&|x, t| (x - t).abs())),
        (Loss::Huber { delta: 1.5 }, mean(&|x, t| huber(x - t))),
        (Loss::BceWithLogits { pos_weight: None }, mean(&bce)),
        (Loss::Kl, mean(&kl)),
    ] {
        assert_close(loss.name(), &[value(loss.clone(), &x, Some(&t))], &[expected], 1e-12);
        let elsewhere = grid([3, 4], -2.0, 2.0);
        check_loss(loss.clone().name(), loss, &elsewhere, &grid([3, 4], 0.03, 0.98));
    }
    assert_close("output", &[value(Loss::Output, &x, None)], &[mean(&|x, _| x)], 1e-12);
    check("output", &[x], |g, x| Ok(Loss::Output.build(g, x[0], None).unwrap()));
    assert_eq!(value(Loss::Output, &reals([], &[3.0]), None), 3.0);
}

/// Values and first derivatives that PyTorch 2.9 gives, in double precision.
#[test]
fn losses_have_the_values_of_pytorch() {
    let x = reals([2, 3], &[0.5, -1.25, 2.0, 1.5, 0.25, -0.75]);
    let p = reals([2, 3], &[0.125, 0.0, 0.875, 0.25, 0.5, 0.25]);
    let cases = [
        (cross_entropy(0.0), indices([2], &[2, 0]), 0.28164729625462837, 0.08841009105372215),
        (cross_entropy(0.2), indices([2], &[-100, 1]), 1.5640059427405575, 0.0),
        (cross_entropy(0.2), p.clone(), 1.1066472962546285, 0.005076757720388805),
        (Loss::Mse, p.clone(), 0.9322916666666666, 0.125),
        (Loss::L1, p.clone(), 0.875, 0.16666666666666666),
        (Loss::Huber { delta: 1.1 }, p.clone(), 0.46234375, 0.0625),
        (Loss::BceWithLogits { pos_weight: None }, p.clone(), 0.6903596300908245, 0.08290988853364244),
        (Loss::Kl, p.clone(), -0.5902484886827258, -0.020833333333333332),
    ];
    for (loss, target, value, slope) in cases {
        let tensors = [x.clone(), target];
        let (mut g, node) = graph_of(&tensors, |g, x| Ok(loss.build(g, x[0], Some(x[1])).unwrap()));
        let prediction = crate::testing::float_inputs(&mut g)[0];
        let d = crate::gradients(&mut g, node, &[prediction]).unwrap()[0];
        let found = evaluate(&g, &tensors, &[node, d]);
        assert_close(loss.name(), &[found[0][0], found[1][0]], &[value, slope], 1e-12);
    }
}

#[test]
fn integer_and_bool_targets_convert() {
    let x = reals([3], &[1.0, -2.0, 0.5]);
    let float = reals([3], &[1.0, 0.0, 1.0]);
    let int = indices([3], &[1, 0, 1]);
    assert_eq!(value(Loss::Mse, &x, Some(&int)), value(Loss::Mse, &x, Some(&float)));
    let bools = int.cast(DType::Bool);
    assert_eq!(
        value(Loss::BceWithLogits { pos_weight: None }, &x, Some(&bools)),
        value(Loss::BceWithLogits { pos_weight: None }, &x, Some(&float))
    );
    let unsigned = indices([3], &[1, 0, 2]).cast(DType::U8);
    let logits = grid([3, 3], -1.0, 1.0);
    let signed = value(cross_entropy(0.0), &logits, Some(&indices([3], &[1, 0, 2])));
    assert_eq!(value(cross_entropy(0.0), &logits, Some(&unsigned)), signed);
}

#[test]
fn targets_that_do_not_fit_are_named() {
    let prediction = TensorType::new(DType::F32, [4, 3]);
    let target = |dtype, shape: &[usize]| cross_entropy(0.0).target_type(&prediction, &TensorType::new(dtype, shape));
    assert_eq!(target(DType::I32, &[4]), Ok(TensorType::new(DType::I64, [4])));
    assert_eq!(target(DType::F64, &[4, 3]), Ok(prediction.clone()));
    let message = target(DType::I64, &[3]).unwrap_err().to_string();
    assert_eq!(
        message,
        "cross_entropy of a prediction f32[4,3] takes i64[4] (class indices) or f32[4,3] (class probabilities), found i64[3]"
    );
    assert!(target(DType::F32, &[4]).is_err());
    let mse = Loss::Mse.target_type(&prediction, &TensorType::new(DType::Bool, [4, 3]));
    assert!(matches!(mse, Err(LossError::Target { .. })));
    let scalar = cross_entropy(0.0).target_types(&TensorType::scalar(DType::F32));
    assert_eq!(scalar, Err(LossError::NoClasses { loss: "cross_entropy" }));
    let integer = Loss::Output.target_types(&TensorType::scalar(DType::I32));
    assert!(matches!(integer, Err(LossError::Prediction { .. })));
}

#[test]
fn class_indices_out_of_range_are_found() {
    let prediction = TensorType::new(DType::F32, [4, 3]);
    let check = |values: &[i64]| cross_entropy(0.0).check_target(&prediction, &indices([4], values));
    assert_eq!(check(&[0, 1, -100, 2]), Ok(()));
    let error = LossError::Label { loss: "cross_entropy", value: 3, position: 2, classes: 3 };
    assert_eq!(check(&[0, 1, 3, 2]), Err(error));
}

#[test]
fn missing_targets_and_wrong_attributes_are_errors() {
    let (mut g, x) = graph_of(&[grid([2, 3], -1.0, 1.0)], |_, x| Ok(x[0]));
    assert_eq!(Loss::Mse.build(&mut g, x, None), Err(LossError::MissingTarget { loss: "mse" }));
    assert_eq!(Loss::Output.build(&mut g, x, Some(x)), Err(LossError::UnusedTarget { loss: "output" }));
    for loss in [Loss::Huber { delta: 0.0 }, cross_entropy(1.5), cross_entropy(f64::NAN)] {
        assert!(matches!(loss.build(&mut g, x, Some(x)), Err(LossError::Attribute { .. })));
    }
}
