//! Losses with PyTorch's numbers, and steps of optimisers with those of ONNX's reference implementation.

use meganeura_ir::{DType, Tensor};

use super::{Arg, Case, Input, case};
use crate::testing::{NodeBuilder, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [losses(), optimizers()].into_iter().flatten().collect()
}

fn losses() -> Vec<Case> {
    let scores = || Input(f32s(&[2, 3], &[1., 2., -1., 0.5, 0., 0.25]));
    let target = |values: &[i64]| Input(Tensor::from_i64(DType::I32, [values.len()], values));
    let weight = || Input(f32s(&[3], &[1., 2., 0.5]));
    let log_p = f32s(&[2, 3], &[-1.349_012_1, -0.349_012_17, -3.349_012_1, -0.869_338_04, -1.369_338, -1.119_338]);
    let scalar = |value: f32| vec![f32s(&[], &[value])];
    let none = |n: NodeBuilder| n.string("reduction", "none");
    let ignore = |index: i64| move |n: NodeBuilder| n.int("ignore_index", index);
    let nll = "NegativeLogLikelihoodLoss";
    let sce = "SoftmaxCrossEntropyLoss";
    vec![
        case(nll, 13, none, vec![scores(), target(&[1, 2]), weight()], vec![f32s(&[2], &[-4., -0.125])]),
        case(nll, 13, |n| n, vec![scores(), target(&[1, 2]), weight()], scalar(-1.65)),
        case(nll, 22, |n| n.string("reduction", "sum"), vec![scores(), target(&[1, 2])], scalar(-2.25)),
        case(nll, 13, ignore(2), vec![scores(), target(&[1, 2])], scalar(-2.)),
        // Ignored indices need not be classes, and what they would choose may be infinite.
        case(nll, 13, |n| none(ignore(-7)(n)), vec![scores(), target(&[-7, 2]), weight()], vec![f32s(&[2], &[0., -0.125])]),
        case(nll, 13, ignore(0), vec![Input(f32s(&[2, 2], &[f32::NEG_INFINITY, 1., 2., 3.])), target(&[0, 1])], scalar(-3.)),
        case(
            nll,
            13,
            none,
            vec![Input(f32s(&[1, 2, 2], &[1., 2., 3., 4.])), Input(i64s(&[1, 2], &[1, 0]))],
            vec![f32s(&[1, 2], &[-3., -2.])],
        ),
        case(sce, 13, |n| n, vec![scores(), target(&[1, 2])], vec![f32s(&[], &[0.734_175_1]), log_p.clone()]),
        case(sce, 12, |n| n, vec![scores(), target(&[1, 2]), weight()], scalar(0.503_077_3)),
        case(sce, 13, |n| n.string("reduction", "sum"), vec![scores(), target(&[1, 2]), weight()], scalar(1.257_693_3)),
    ]
}

fn optimizers() -> Vec<Case> {
    let pair = |a: f32, b: f32| f32s(&[2], &[a, b]);
    let (x, g) = (|| Input(pair(1., -2.)), || Input(pair(0.5, 1.)));
    let step = |count: i64| [Input(f32s(&[], &[0.1])), Input(i64s(&[], &[count]))];
    let args = |count: i64, tensors: Vec<Arg>| step(count).into_iter().chain(tensors).collect::<Vec<_>>();
    let decayed = |n: NodeBuilder, decay| n.domain("ai.onnx.preview.training").float("norm_coefficient", decay);
    let training = move |n| decayed(n, 0.01);
    let rates = |n: NodeBuilder| n.float("alpha", 0.9).float("beta", 0.99).float("epsilon", 1e-3);
    let momentum = |mode: &'static str| move |n| training(n).float("alpha", 0.9).float("beta", 0.5).string("mode", mode);
    let (v, h) = (|| Input(pair(0.1, 0.)), || Input(pair(0.04, 0.09)));
    vec![
        case(
            "Adam",
            1,
            |n| rates(training(n)).float("norm_coefficient_post", 0.02),
            args(3, vec![x(), g(), v(), h()]),
            vec![pair(0.937_431_2, -1.979_378_5), pair(0.141, 0.098), pair(0.042_201, 0.098_704)],
        ),
        // The first update has no bias to correct.
        case(
            "Adam",
            1,
            |n| rates(decayed(n, 0.0)),
            args(0, vec![x(), g(), v(), h()]),
            vec![pair(0.932_099_1, -2.031_665_5), pair(0.14, 0.1), pair(0.0421, 0.0991)],
        ),
        case(
            "Adagrad",
            1,
            |n| training(n).float("decay_factor", 0.5).float("epsilon", 1e-3),
            args(2, vec![x(), g(), h()]),
            vec![pair(0.953_536_15, -2.047_763_3), pair(0.3001, 1.0504)],
        ),
        case("Momentum", 1, momentum("standard"), args(0, vec![x(), g(), v()]), vec![pair(0.94, -2.098), pair(0.6, 0.98)]),
        case("Momentum", 1, momentum("nesterov"), args(2, vec![x(), g(), v()]), vec![pair(0.91795, -2.1421), pair(0.345, 0.49)]),
        // Several tensors: operands and results kind by kind.
        case(
            "Momentum",
            1,
            |n| momentum("standard")(n),
            args(0, vec![x(), Input(f32s(&[1], &[0.])), g(), Input(f32s(&[1], &[2.])), v(), Input(f32s(&[1], &[1.]))]),
            vec![pair(0.94, -2.098), f32s(&[1], &[-0.29]), pair(0.6, 0.98), f32s(&[1], &[2.9])],
        ),
    ]
}
