use meganeura_ir::{DType, Tensor};

use super::{Case, Input, case};
use crate::testing::{NodeBuilder, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    let ml = |n: NodeBuilder| n.domain("ai.onnx.ml");
    let labels = |n: NodeBuilder| ml(n).ints("keys_int64s", &[1, 5, 1]).floats("values_floats", &[0.5, 1.5, 2.5]);
    let numbers = |n: NodeBuilder| ml(n).floats("keys_floats", &[1., f32::NAN]).ints("values_int64s", &[7, 8]);
    vec![
        case(
            "ArrayFeatureExtractor",
            1,
            ml,
            vec![Input(f32s(&[2, 3], &[0., 1., 2., 3., 4., 5.])), Input(i64s(&[1, 2], &[2, 0]))],
            vec![f32s(&[2, 2], &[2., 0., 5., 3.])],
        ),
        case(
            "ArrayFeatureExtractor",
            1,
            ml,
            vec![Input(f32s(&[3], &[0., 1., 2.])), Input(i64s(&[1], &[1]))],
            vec![f32s(&[1, 1], &[1.])],
        ),
        case(
            "Binarizer",
            1,
            |n| ml(n).float("threshold", 1.),
            vec![Input(f32s(&[3], &[0.5, 1., 1.5]))],
            vec![f32s(&[3], &[0., 0., 1.])],
        ),
        // The last of equal keys counts.
        case(
            "LabelEncoder",
            2,
            |n| labels(n).float("default_float", -1.),
            vec![Input(i64s(&[3], &[5, 1, 2]))],
            vec![f32s(&[3], &[1.5, 2.5, -1.])],
        ),
        case("LabelEncoder", 4, numbers, vec![Input(f32s(&[3], &[f32::NAN, 1., 2.]))], vec![i64s(&[3], &[8, 7, -1])]),
        // Feature 0 at most 1 leads to a leaf; else feature 1 decides, and a missing one counts as true.
        case(
            "TreeEnsemble",
            5,
            |n| tree(ml(n)),
            vec![Input(f32s(&[4, 2], &[1., 0., 2., 3., 2., 4., 2., f32::NAN]))],
            vec![f32s(&[4, 2], &[5., 0., 0., 7., 0., -2., 0., 7.])],
        ),
        case(
            "TreeEnsemble",
            5,
            |n| tree(ml(n)).int("aggregate_function", 3),
            vec![Input(f32s(&[1, 2], &[2., 4.]))],
            vec![f32s(&[1, 2], &[0., -2.])],
        ),
    ]
}

fn tree(n: NodeBuilder) -> NodeBuilder {
    n.int("n_targets", 2)
        .ints("tree_roots", &[0])
        .ints("nodes_featureids", &[0, 1])
        .tensor("nodes_modes", &Tensor::from_i64(DType::U8, [2], &[0, 1]))
        .tensor("nodes_splits", &f32s(&[2], &[1., 3.5]))
        .ints("nodes_truenodeids", &[0, 1])
        .ints("nodes_trueleafs", &[1, 1])
        .ints("nodes_falsenodeids", &[1, 2])
        .ints("nodes_falseleafs", &[0, 1])
        .ints("nodes_missing_value_tracks_true", &[0, 1])
        .ints("leaf_targetids", &[0, 1, 1])
        .tensor("leaf_weights", &f32s(&[3], &[5., 7., -2.]))
}
