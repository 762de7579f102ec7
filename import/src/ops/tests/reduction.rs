use super::{Case, Input, Known, case, plain};
use crate::testing::{bools, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [reductions(), norms(), pools()].into_iter().flatten().collect()
}

fn reductions() -> Vec<Case> {
    let x = || Input(f32s(&[2, 3], &[1., -2., 3., 4., 0., -6.]));
    let last = |op: &str, expected: [f32; 2]| {
        let attribute = case(op, 11, |n| n.ints("axes", &[-1]).int("keepdims", 0), vec![x()], vec![f32s(&[2], &expected)]);
        let operand = plain(op, 18, vec![x(), Known(i64s(&[1], &[1]))], f32s(&[2, 1], &expected));
        [attribute, operand]
    };
    let positive = || Input(f32s(&[1, 2], &[1.0, 3.0]));
    let mut cases: Vec<Case> = [
        last("ReduceSum", [2., -2.]),
        last("ReduceMean", [2. / 3., -2. / 3.]),
        last("ReduceMax", [3., 4.]),
        last("ReduceMin", [-2., -6.]),
        last("ReduceProd", [-6., 0.]),
        last("ReduceL1", [6., 10.]),
        last("ReduceL2", [14f32.sqrt(), 52f32.sqrt()]),
        last("ReduceSumSquare", [14., 52.]),
        last("ReduceLogSumExp", [3.132_845_2, 4.018_194]),
    ]
    .into_iter()
    .flatten()
    .collect();
    cases.extend([
        plain("ReduceSum", 13, vec![x()], f32s(&[1, 1], &[0.])),
        case(
            "ReduceSum",
            13,
            |n| n.int("noop_with_empty_axes", 1),
            vec![Input(f32s(&[2], &[1., 2.])), Known(i64s(&[0], &[]))],
            vec![f32s(&[2], &[1., 2.])],
        ),
        case("ReduceMean", 11, |n| n.ints("axes", &[0, 1]), vec![Input(i64s(&[1, 2], &[3, 4]))], vec![i64s(&[1, 1], &[3])]),
        case("ReduceMax", 20, |n| n.int("keepdims", 0), vec![Input(bools(&[2], &[0, 1]))], vec![bools(&[], &[1])]),
        plain("ReduceLogSum", 13, vec![positive()], f32s(&[1, 1], &[4f32.ln()])),
        plain("ReduceLogSumExp", 13, vec![Input(f32s(&[2], &[f32::NEG_INFINITY; 2]))], f32s(&[1], &[f32::NEG_INFINITY])),
        plain("ReduceLogSumExp", 13, vec![Input(f32s(&[2], &[1000., 1000.]))], f32s(&[1], &[1000. + 2f32.ln()])),
        plain("ArgMax", 13, vec![Input(f32s(&[3, 2], &[1., 5., 2., 5., 2., 0.]))], i64s(&[1, 2], &[1, 0])),
        case(
            "ArgMax",
            13,
            |n| n.int("select_last_index", 1).int("keepdims", 0),
            vec![Input(f32s(&[3, 2], &[1., 5., 2., 5., 2., 0.]))],
            vec![i64s(&[2], &[2, 1])],
        ),
        case(
            "ArgMin",
            13,
            |n| n.int("axis", -1).int("keepdims", 0),
            vec![Input(f32s(&[2, 2], &[1., 0., 2., 5.]))],
            vec![i64s(&[2], &[1, 0])],
        ),
    ]);
    cases
}

fn norms() -> Vec<Case> {
    let two = |a: f32, b: f32| Input(f32s(&[2], &[a, b]));
    // Each row or group holds -1, 1 (mean 0, variance 1) or 2, 6 (mean 4, variance 4).
    let x = || Input(f32s(&[1, 2, 2], &[-1., 1., 2., 6.]));
    let exact = |n: crate::testing::NodeBuilder| n.float("epsilon", 0.0);
    vec![
        case(
            "BatchNormalization",
            15,
            |n| n.float("epsilon", 1.0),
            vec![x(), two(2., 3.), two(1., -1.), two(1., 2.), two(3., 8.)],
            vec![f32s(&[1, 2, 2], &[-1., 1., -1., 3.])],
        ),
        case("InstanceNormalization", 7, exact, vec![x(), two(2., 3.), two(1., 0.)], vec![f32s(&[1, 2, 2], &[-1., 3., -3., 3.])]),
        case("LayerNormalization", 17, exact, vec![x(), two(2., 3.)], vec![f32s(&[1, 2, 2], &[-2., 3., -2., 3.])]),
        case(
            "LayerNormalization",
            17,
            exact,
            vec![x(), two(1., 1.), two(5., 6.)],
            vec![f32s(&[1, 2, 2], &[4., 7., 4., 7.]), f32s(&[1, 2, 1], &[0., 4.]), f32s(&[1, 2, 1], &[1., 0.5])],
        ),
        case(
            "LayerNormalization",
            17,
            |n| exact(n).int("axis", 1),
            vec![Input(f32s(&[1, 2, 2], &[-1., 1., -1., 1.])), Input(f32s(&[2, 2], &[1., 2., 3., 4.]))],
            vec![f32s(&[1, 2, 2], &[-1., 2., -3., 4.])],
        ),
        case(
            "GroupNormalization",
            18,
            |n| exact(n).int("num_groups", 2),
            vec![x(), two(2., 3.), two(0., 1.)],
            vec![f32s(&[1, 2, 2], &[-2., 2., -2., 4.])],
        ),
        case(
            "GroupNormalization",
            21,
            |n| exact(n).int("num_groups", 1),
            vec![Input(f32s(&[1, 2, 1], &[2., 6.])), two(2., 3.), two(0., 1.)],
            vec![f32s(&[1, 2, 1], &[-2., 4.])],
        ),
        case("RMSNormalization", 23, exact, vec![Input(f32s(&[1, 2], &[1., 7.])), two(2., 3.)], vec![f32s(&[1, 2], &[0.4, 4.2])]),
    ]
}

fn pools() -> Vec<Case> {
    let line = || Input(f32s(&[1, 1, 5], &[1., 5., 2., 4., 3.]));
    let pooled = |values: &[f32]| vec![f32s(&[1, 1, values.len()], values)];
    let k3 = |n: crate::testing::NodeBuilder| n.ints("kernel_shape", &[3]);
    let k2 = |n: crate::testing::NodeBuilder| n.ints("kernel_shape", &[2]);
    vec![
        case("MaxPool", 12, k3, vec![line()], pooled(&[5., 5., 4.])),
        case("MaxPool", 12, |n| k3(n).ints("strides", &[2]).ints("pads", &[1, 0]), vec![line()], pooled(&[5., 5.])),
        case("MaxPool", 12, |n| k2(n).ints("dilations", &[3]), vec![line()], pooled(&[4., 5.])),
        case("MaxPool", 12, |n| k2(n).ints("strides", &[2]).int("ceil_mode", 1), vec![line()], pooled(&[5., 4., 3.])),
        case("MaxPool", 12, |n| k2(n).string("auto_pad", "SAME_UPPER"), vec![line()], pooled(&[5., 5., 4., 4., 3.])),
        case("MaxPool", 12, |n| k2(n).string("auto_pad", "SAME_LOWER"), vec![line()], pooled(&[1., 5., 5., 4., 4.])),
        case("AveragePool", 19, k2, vec![line()], pooled(&[3., 3.5, 3., 3.5])),
        case(
            "AveragePool",
            19,
            |n| k3(n).ints("pads", &[1, 1]).ints("strides", &[2]),
            vec![line()],
            pooled(&[3., 11. / 3., 3.5]),
        ),
        case(
            "AveragePool",
            19,
            |n| k3(n).ints("pads", &[1, 1]).ints("strides", &[2]).int("count_include_pad", 1),
            vec![line()],
            pooled(&[2., 11. / 3., 7. / 3.]),
        ),
        case(
            "AveragePool",
            19,
            |n| k2(n).ints("strides", &[2]).int("ceil_mode", 1).int("count_include_pad", 1),
            vec![line()],
            pooled(&[3., 3., 3.]),
        ),
        plain("GlobalAveragePool", 7, vec![line()], f32s(&[1, 1, 1], &[3.])),
        plain("GlobalMaxPool", 7, vec![Input(f32s(&[1, 2, 1, 2], &[1., 5., 2., 0.]))], f32s(&[1, 2, 1, 1], &[5., 2.])),
    ]
}
