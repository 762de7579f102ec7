//! Random numbers have no prescribed values: their distributions are tested, at a fixed key.

use meganeura_ir::{DType, ParameterRole, Tensor, TensorType, random_key};

use crate::testing::{ModelBuilder, NodeBuilder, bools, evaluate, f32s, node};
use crate::{Bindings, ImportError, Mode, Phase, RANDOM_KEY, Specialized};

/// Operators whose results are random.
pub(super) const OPERATORS: [&str; 6] =
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

const COUNT: usize = 20_000;

fn phased(dropout: Mode, batch_norm: Mode) -> Bindings {
    Bindings { phase: Phase { dropout, batch_norm }, ..Bindings::default() }
}

/// The result of a node whose operands are `x` and initializers, under the key of a step.
fn drawn(node: NodeBuilder, x: Option<&Tensor>, bindings: &Bindings, step: u64) -> Result<(TensorType, Vec<f64>), ImportError> {
    let mut builder = ModelBuilder::new(22).output("y");
    if let Some(x) = x {
        let dims: Vec<String> = x.shape().iter().map(usize::to_string).collect();
        builder = builder.input("x", x.dtype(), &dims.join(","));
    }
    builder = builder.initializer("half", &f32s(&[], &[0.5])).initializer("fifth", &f32s(&[], &[0.2]));
    builder = builder.initializer("true", &bools(&[], &[1])).initializer("one", &f32s(&[], &[1.0]));
    let model = builder.node(node).open()?;
    let Specialized { graph, .. } = model.specialize(bindings)?;
    let key = random_key(5, step);
    let random = graph.inputs().last().is_some_and(|input| input.name == RANDOM_KEY);
    let inputs: Vec<Tensor> = x.into_iter().chain(random.then_some(&key)).cloned().collect();
    Ok(evaluate(&model, &graph, &inputs).remove(0))
}

fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    (mean, values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count)
}

fn near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() < tolerance, "{found} instead of {expected}");
}

#[test]
fn uniform_numbers_fill_their_range() {
    let uniform = |n: NodeBuilder| n.float("low", -1.0).float("high", 3.0).float("seed", 4.0);
    let like = f32s(&[4, COUNT / 4], &vec![0.0; COUNT]);
    for (node, x) in [
        (uniform(node("RandomUniform", &[], &["y"])).ints("shape", &[4, COUNT as i64 / 4]), None),
        (uniform(node("RandomUniformLike", &["x"], &["y"])), Some(&like)),
    ] {
        let (ty, values) = drawn(node, x, &Bindings::default(), 1).unwrap();
        assert_eq!(ty, *like.ty());
        assert!(values.iter().all(|v| (-1.0..3.0).contains(v)));
        let (mean, variance) = moments(&values);
        near(mean, 1.0, 0.05);
        near(variance, 16.0 / 12.0, 0.05);
    }
}

#[test]
fn normal_numbers_have_the_moments_of_the_normal_distribution() {
    let normal = |n: NodeBuilder| n.float("mean", 2.0).float("scale", 3.0);
    let like = Tensor::from_i64(DType::I64, [COUNT], &vec![0; COUNT]);
    for (node, x) in [
        (normal(node("RandomNormal", &[], &["y"])).ints("shape", &[COUNT as i64]), None),
        (normal(node("RandomNormalLike", &["x"], &["y"])).int("dtype", 1), Some(&like)),
    ] {
        let (ty, values) = drawn(node, x, &Bindings::default(), 1).unwrap();
        assert_eq!(ty.dtype, DType::F32);
        let (mean, variance) = moments(&values);
        near(mean, 2.0, 0.1);
        near(variance, 9.0, 0.45);
        let standard: Vec<f64> = values.iter().map(|v| (v - 2.0) / 3.0).collect();
        near(standard.iter().map(|v| v.powi(3)).sum::<f64>() / COUNT as f64, 0.0, 0.12);
        near(standard.iter().map(|v| v.powi(4)).sum::<f64>() / COUNT as f64, 3.0, 0.35);
        // Within one, two and three standard deviations.
        for (bound, share) in [(1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)] {
            near(standard.iter().filter(|v| v.abs() < bound).count() as f64 / COUNT as f64, share, 0.02);
        }
    }
    let integers = node("RandomNormalLike", &["x"], &["y"]);
    assert!(drawn(integers, Some(&like), &Bindings::default(), 1).unwrap_err().to_string().contains("random i64"));
}

#[test]
fn bernoulli_hits_as_often_as_the_operand_says() {
    let probabilities: Vec<f32> = (0..COUNT).map(|i| [0.0, 0.25, 0.75, 1.0][i % 4]).collect();
    let x = f32s(&[COUNT], &probabilities);
    let (ty, values) = drawn(node("Bernoulli", &["x"], &["y"]).int("dtype", 7), Some(&x), &Bindings::default(), 1).unwrap();
    assert_eq!(ty.dtype, DType::I64);
    for (i, expected) in [0.0, 0.25, 0.75, 1.0].into_iter().enumerate() {
        let (mean, _) = moments(&values.iter().skip(i).step_by(4).copied().collect::<Vec<_>>());
        near(mean, expected, if expected.fract() == 0.0 { 1e-9 } else { 0.03 });
    }
}

#[test]
fn multinomial_draws_classes_by_their_probability() {
    let probabilities = [[0.1f32, 0.2, 0.7], [0.5, 0.5, 0.0]];
    let x = f32s(&[2, 3], &probabilities.as_flattened().iter().map(|p| p.ln() + 3.0).collect::<Vec<_>>());
    let node = node("Multinomial", &["x"], &["y"]).int("sample_size", COUNT as i64);
    let (ty, values) = drawn(node, Some(&x), &Bindings::default(), 1).unwrap();
    assert_eq!(ty, TensorType::new(DType::I32, [2, COUNT]));
    for (row, probabilities) in values.chunks(COUNT).zip(probabilities) {
        for (class, probability) in probabilities.into_iter().enumerate() {
            let share = row.iter().filter(|v| **v == class as f64).count() as f64 / COUNT as f64;
            near(share, probability.into(), 0.02);
        }
    }
}

#[test]
fn dropout_drops_its_ratio_and_scales_the_rest() {
    let x = f32s(&[COUNT], &vec![2.0; COUNT]);
    let dropout = || node("Dropout", &["x", "fifth", "true"], &["y"]);
    let (_, values) = drawn(dropout(), Some(&x), &Bindings::default(), 1).unwrap();
    assert!(values.iter().all(|v| *v == 0.0 || (v - 2.5).abs() < 1e-6));
    near(values.iter().filter(|v| **v == 0.0).count() as f64 / COUNT as f64, 0.2, 0.02);
    assert_eq!(values, drawn(dropout(), Some(&x), &Bindings::default(), 1).unwrap().1, "the same step");
    let next = drawn(dropout(), Some(&x), &Bindings::default(), 2).unwrap().1;
    let both = values.iter().zip(&next).filter(|(a, b)| **a == 0.0 && **b == 0.0).count();
    near(both as f64 / COUNT as f64, 0.04, 0.01);
}

#[test]
fn the_phase_decides_whether_dropout_drops() {
    let x = f32s(&[COUNT], &vec![2.0; COUNT]);
    let in_training = || node("Dropout", &["x", "half", "true"], &["y"]);
    let in_inference = || node("Dropout", &["x", "half"], &["y"]);
    let dropped = |node, mode| {
        let (_, values) = drawn(node, Some(&x), &phased(mode, Mode::File), 1).unwrap();
        values.into_iter().filter(|v| *v == 0.0).count() > 0
    };
    assert!(dropped(in_training(), Mode::File) && dropped(in_inference(), Mode::Train));
    assert!(!dropped(in_training(), Mode::Off) && !dropped(in_inference(), Mode::File));
    let all = drawn(node("Dropout", &["x", "one", "true"], &["y"]), Some(&x), &Bindings::default(), 1);
    assert!(all.unwrap_err().to_string().contains("ratio = 1"));
}

#[test]
fn what_acts_against_the_file_is_told() {
    let model =
        ModelBuilder::new(13).input("x", DType::F32, "4").output("y").node(node("Dropout", &["x"], &["y"])).open().unwrap();
    let warnings = |dropout| model.specialize(&phased(dropout, Mode::Train)).unwrap().warnings;
    let told = warnings(Mode::Train);
    assert!(told.len() == 1 && told[0].to_string() == "Dropout acts as in training, where the file says inference", "{told:?}");
    assert!(warnings(Mode::Off).is_empty());
}

#[test]
fn random_tensors_of_one_model_differ() {
    let normal = |y: &str| node("RandomUniform", &[], &[y]).ints("shape", &[3]);
    let model = ModelBuilder::new(22).output("a").output("b").node(normal("a")).node(normal("b")).open().unwrap();
    let graph = model.specialize(&Bindings::default()).unwrap().graph;
    let values = evaluate(&model, &graph, &[random_key(0, 0)]);
    assert!(graph.inputs().len() == 1 && values[0] != values[1], "{values:?}");
}

/// A batch normalisation that is applied twice: batch means 2 and then 0, biased variances 1 and then 1.
fn twice_normalized() -> crate::Model {
    let operands = |x| [x, "scale", "bias", "running_mean", "running_var"];
    let norm = |x, y| node("BatchNormalization", &operands(x), &[y]).float("epsilon", 0.0).float("momentum", 0.5);
    let builder = ModelBuilder::new(15).input("x", DType::F32, "2,2").output("y");
    let values = [("scale", [1.0, 2.0]), ("bias", [0.0, 0.0]), ("running_mean", [10.0, 10.0]), ("running_var", [4.0, 4.0])];
    let builder = values.iter().fold(builder, |builder, (name, values)| builder.initializer(name, &f32s(&[2], values)));
    builder.node(norm("x", "h")).node(norm("h", "y")).open().unwrap()
}

#[test]
fn batch_normalization_trains_where_the_phase_says_so_though_the_file_does_not() {
    let model = twice_normalized();
    let x = f32s(&[2, 2], &[1.0, 1.0, 3.0, 3.0]);
    let frozen = model.specialize(&Bindings::default()).unwrap().graph;
    assert!(frozen.updates().is_empty());
    let Specialized { graph, warnings, .. } = model.specialize(&phased(Mode::File, Mode::Train)).unwrap();
    assert!(warnings.iter().any(|w| w.to_string().contains("BatchNormalization acts as in training")), "{warnings:?}");
    assert_eq!(evaluate(&model, &graph, std::slice::from_ref(&x))[0].1, [-1.0, -2.0, 1.0, 2.0]);
    // 10 -> 6 -> 3 for both channels; 4 -> 2.5 -> (2.5 + 1) / 2 and (2.5 + 4) / 2, the second channel scaled by 2 in between.
    let mut graph = graph;
    graph.clear_outputs();
    for update in graph.updates().to_vec() {
        let info = &graph.parameters()[update.parameter.0 as usize];
        assert_eq!(info.role, ParameterRole::Statistic);
        let name = info.name.clone();
        graph.output(name, update.node).unwrap();
    }
    let names: Vec<&str> = graph.outputs().iter().map(|o| o.name.as_str()).collect();
    assert_eq!(names, ["running_mean", "running_var"]);
    let moved = evaluate(&model, &graph, &[x]);
    assert_eq!((&moved[0].1[..], &moved[1].1[..]), (&[3.0, 3.0][..], &[1.75, 3.25][..]));
}

#[test]
fn batch_normalization_is_affine_where_the_phase_says_so_though_the_file_trains() {
    let operands = ["x", "scale", "bias", "mean", "variance"];
    let norm = node("BatchNormalization", &operands, &["y", "m", "v"]).float("epsilon", 0.0).int("training_mode", 1);
    let builder = ModelBuilder::new(15).input("x", DType::F32, "2,1").output("y").output("m");
    let values = [("scale", 2.0), ("bias", 1.0), ("mean", 10.0), ("variance", 4.0)];
    let builder = values.iter().fold(builder, |builder, (name, value)| builder.initializer(name, &f32s(&[1], &[*value])));
    let model = builder.node(norm).open().unwrap();
    let graph = model.specialize(&phased(Mode::File, Mode::Off)).unwrap().graph;
    let found = evaluate(&model, &graph, &[f32s(&[2, 1], &[8.0, 14.0])]);
    assert_eq!((&found[0].1[..], &found[1].1[..]), (&[-1.0, 5.0][..], &[10.0][..]));
}
