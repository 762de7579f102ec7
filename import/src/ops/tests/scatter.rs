use meganeura_ir::{DType, Tensor};

use super::{Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, bools, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [elements(), slices(), marks()].into_iter().flatten().collect()
}

fn elements() -> Vec<Case> {
    let x = || Input(f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.]));
    let axis = |n: NodeBuilder| n.int("axis", 1);
    let reduced = |reduction: &'static str| move |n: NodeBuilder| axis(n).string("reduction", reduction);
    // Row 0 writes twice to position 2, row 1 to position 0.
    let indices = || Input(i64s(&[2, 2], &[2, -1, 0, -3]));
    let updates = || Input(f32s(&[2, 2], &[10., 20., -5., -6.]));
    let line = || Input(f32s(&[4], &[1., 2., 3., 4.]));
    let scattered = |attributes: &dyn Fn(NodeBuilder) -> NodeBuilder, expected: [f32; 6]| {
        case("ScatterElements", 18, attributes, vec![x(), indices(), updates()], vec![f32s(&[2, 3], &expected)])
    };
    vec![
        scattered(&axis, [1., 2., 20., -6., 5., 6.]),
        scattered(&reduced("add"), [1., 2., 33., -7., 5., 6.]),
        scattered(&reduced("mul"), [1., 2., 600., 120., 5., 6.]),
        scattered(&reduced("max"), [1., 2., 20., 4., 5., 6.]),
        scattered(&reduced("min"), [1., 2., 3., -6., 5., 6.]),
        // Fewer lines than the data has, and more indices than elements.
        case(
            "ScatterElements",
            16,
            |n| n.string("reduction", "add"),
            vec![x(), Input(i64s(&[3, 2], &[1, 0, 1, 0, 0, 0])), Input(f32s(&[3, 2], &[1., 2., 3., 4., 5., 6.]))],
            vec![f32s(&[2, 3], &[6., 14., 3., 8., 5., 6.])],
        ),
        plain(
            "ScatterElements",
            13,
            vec![line(), Known(i64s(&[3], &[-1, 0, -1])), Input(f32s(&[3], &[7., 8., 9.]))],
            f32s(&[4], &[8., 2., 3., 9.]),
        ),
        plain("ScatterElements", 13, vec![line(), Input(i64s(&[0], &[])), Input(f32s(&[0], &[]))], f32s(&[4], &[1., 2., 3., 4.])),
        case(
            "ScatterElements",
            13,
            axis,
            vec![Input(bools(&[2, 2], &[1, 1, 0, 0])), Input(i64s(&[2, 1], &[0, 1])), Input(bools(&[2, 1], &[0, 1]))],
            vec![bools(&[2, 2], &[0, 1, 0, 1])],
        ),
        case(
            "Scatter",
            9,
            axis,
            vec![x(), Input(i64s(&[1, 2], &[1, 0])), Input(f32s(&[1, 2], &[8., 9.]))],
            vec![f32s(&[2, 3], &[9., 8., 3., 4., 5., 6.])],
        ),
    ]
}

fn slices() -> Vec<Case> {
    let x = || Input(f32s(&[3, 2], &[1., 2., 3., 4., 5., 6.]));
    let rows = || i64s(&[3, 1], &[2, 0, -1]);
    let updates = || Input(f32s(&[3, 2], &[10., 20., 30., 40., 50., 60.]));
    let replaced = || f32s(&[3, 2], &[30., 40., 3., 4., 50., 60.]);
    let reduced = |reduction: &'static str, expected: [f32; 6]| {
        let args = vec![x(), Input(rows()), updates()];
        case("ScatterND", 18, |n| n.string("reduction", reduction), args, vec![f32s(&[3, 2], &expected)])
    };
    vec![
        plain("ScatterND", 11, vec![x(), Input(rows()), updates()], replaced()),
        plain("ScatterND", 11, vec![x(), Known(rows()), updates()], replaced()),
        reduced("add", [31., 42., 3., 4., 65., 86.]),
        reduced("mul", [30., 80., 3., 4., 2500., 7200.]),
        reduced("max", [30., 40., 3., 4., 50., 60.]),
        reduced("min", [1., 2., 3., 4., 5., 6.]),
        // Whole indices of single elements, and an index of nothing: the slice is all of the data.
        plain(
            "ScatterND",
            13,
            vec![x(), Input(i64s(&[2, 2], &[0, 1, -1, -2])), Input(f32s(&[2], &[7., 8.]))],
            f32s(&[3, 2], &[1., 7., 3., 4., 8., 6.]),
        ),
        plain(
            "ScatterND",
            13,
            vec![Input(f32s(&[2], &[1., 2.])), Known(i64s(&[0], &[])), Input(f32s(&[2], &[3., 4.]))],
            f32s(&[2], &[3., 4.]),
        ),
        plain(
            "ScatterND",
            13,
            vec![x(), Input(i64s(&[0, 1], &[])), Input(f32s(&[0, 2], &[]))],
            f32s(&[3, 2], &[1., 2., 3., 4., 5., 6.]),
        ),
        case(
            "GatherND",
            12,
            |n| n.int("batch_dims", 1),
            vec![x(), Known(i64s(&[3, 1], &[1, 0, -1]))],
            vec![f32s(&[3], &[2., 3., 6.])],
        ),
    ]
}

fn marks() -> Vec<Case> {
    let small = |dtype: DType, values: &[i64]| Input(Tensor::from_i64(dtype, [values.len()], values));
    let depth = |n: i64| Known(i64s(&[], &[n]));
    let off_on = || Input(f32s(&[2], &[2., 9.]));
    let tied = || Input(f32s(&[2, 1, 3], &[1., 3., 3., 5., 5., 0.]));
    vec![
        // An index out of range marks nothing.
        case(
            "OneHot",
            11,
            |n| n,
            vec![small(DType::I64, &[1, -1, 3]), depth(3), off_on()],
            vec![f32s(&[3, 3], &[2., 9., 2., 2., 2., 9., 2., 2., 2.])],
        ),
        case(
            "OneHot",
            11,
            |n| n.int("axis", 0),
            vec![Input(f32s(&[2], &[1., -3.])), Known(f32s(&[1], &[3.])), Input(i64s(&[2], &[0, 1]))],
            vec![i64s(&[3, 2], &[0, 1, 1, 0, 0, 0])],
        ),
        case("OneHot", 11, |n| n, vec![Input(i64s(&[], &[1])), depth(2), off_on()], vec![f32s(&[2], &[2., 9.])]),
        case(
            "OneHot",
            11,
            |n| n.int("axis", -2),
            vec![Input(i64s(&[1, 2], &[0, 1])), depth(2), off_on()],
            vec![f32s(&[1, 2, 2], &[9., 2., 2., 9.])],
        ),
        plain("Hardmax", 13, vec![tied()], f32s(&[2, 1, 3], &[0., 1., 0., 1., 0., 0.])),
        case("Hardmax", 11, |n| n.int("axis", 0), vec![tied()], vec![f32s(&[2, 1, 3], &[0., 0., 0., 1., 0., 0.])]),
        case("Hardmax", 13, |n| n.int("axis", 0), vec![tied()], vec![f32s(&[2, 1, 3], &[0., 0., 1., 1., 1., 0.])]),
        case("Hardmax", 11, |n| n.int("axis", 3), vec![tied()], vec![f32s(&[2, 1, 3], &[1.; 6])]),
    ]
}
