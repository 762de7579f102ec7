use meganeura_ir::{DType, Tensor};

use super::{Absent, Case, Input, Known, case, plain};
use crate::testing::{bools, f32s, i64s};

fn counting(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    f32s(shape, &(0..n).map(|i| i as f32).collect::<Vec<_>>())
}

fn k(values: &[i64]) -> super::Arg {
    Known(i64s(&[values.len()], values))
}

pub(super) fn cases() -> Vec<Case> {
    [shapes(), joins(), slices(), pads(), indexing(), makers()].into_iter().flatten().collect()
}

fn shapes() -> Vec<Case> {
    let x = || Input(counting(&[2, 3]));
    let as_shape = |shape: &[usize]| counting(shape);
    vec![
        plain("Identity", 16, vec![x()], as_shape(&[2, 3])),
        plain("Reshape", 14, vec![x(), k(&[3, -1])], as_shape(&[3, 2])),
        plain("Reshape", 14, vec![x(), k(&[0, 1, 3])], as_shape(&[2, 1, 3])),
        case("Reshape", 14, |n| n.int("allowzero", 1), vec![Input(counting(&[0, 3])), k(&[3, 0])], vec![as_shape(&[3, 0])]),
        plain("Flatten", 13, vec![Input(counting(&[2, 3, 2]))], as_shape(&[2, 6])),
        case("Flatten", 13, |n| n.int("axis", 0), vec![x()], vec![as_shape(&[1, 6])]),
        case("Flatten", 13, |n| n.int("axis", 2), vec![x()], vec![as_shape(&[6, 1])]),
        plain("Squeeze", 13, vec![Input(counting(&[1, 3, 1])), k(&[-1])], as_shape(&[1, 3])),
        plain("Squeeze", 13, vec![Input(counting(&[1, 3, 1]))], as_shape(&[3])),
        case("Squeeze", 11, |n| n.ints("axes", &[0]), vec![Input(counting(&[1, 3, 1]))], vec![as_shape(&[3, 1])]),
        plain("Unsqueeze", 13, vec![x(), k(&[0, -1])], as_shape(&[1, 2, 3, 1])),
        case("Unsqueeze", 11, |n| n.ints("axes", &[1]), vec![x()], vec![as_shape(&[2, 1, 3])]),
        plain("Transpose", 13, vec![x()], f32s(&[3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0])),
        case("Transpose", 13, |n| n.ints("perm", &[1, 0, 2]), vec![Input(counting(&[1, 2, 2]))], vec![as_shape(&[2, 1, 2])]),
        plain("Shape", 13, vec![x()], i64s(&[2], &[2, 3])),
        case("Shape", 15, |n| n.int("start", -1), vec![x()], vec![i64s(&[1], &[3])]),
        case("Shape", 15, |n| n.int("end", 1), vec![x()], vec![i64s(&[1], &[2])]),
        plain("Size", 13, vec![x()], i64s(&[], &[6])),
        plain(
            "Expand",
            13,
            vec![Input(f32s(&[2, 1], &[1.0, 2.0])), k(&[3, 1, 2])],
            f32s(&[3, 2, 2], &[1., 1., 2., 2., 1., 1., 2., 2., 1., 1., 2., 2.]),
        ),
        plain("Expand", 13, vec![x(), k(&[1, 1])], as_shape(&[2, 3])),
        plain("Tile", 13, vec![Input(f32s(&[1, 2], &[1.0, 2.0])), k(&[2, 2])], f32s(&[2, 4], &[1., 2., 1., 2., 1., 2., 1., 2.])),
        plain("Tile", 13, vec![x(), k(&[1, 0])], f32s(&[2, 0], &[])),
    ]
}

fn joins() -> Vec<Case> {
    let x = || Input(counting(&[2, 3]));
    vec![
        case(
            "Concat",
            13,
            |n| n.int("axis", -1),
            vec![x(), Input(f32s(&[2, 1], &[9.0, 8.0]))],
            vec![f32s(&[2, 4], &[0., 1., 2., 9., 3., 4., 5., 8.])],
        ),
        case("Concat", 13, |n| n.int("axis", 0), vec![x(), Input(f32s(&[0, 3], &[]))], vec![counting(&[2, 3])]),
        case(
            "Split",
            13,
            |n| n.int("axis", 1),
            vec![x(), k(&[1, 2])],
            vec![f32s(&[2, 1], &[0., 3.]), f32s(&[2, 2], &[1., 2., 4., 5.])],
        ),
        case(
            "Split",
            11,
            |n| n.int("axis", 1).ints("split", &[2, 1]),
            vec![x()],
            vec![f32s(&[2, 2], &[0., 1., 3., 4.]), f32s(&[2, 1], &[2., 5.])],
        ),
        case("Split", 13, |n| n, vec![x()], vec![f32s(&[1, 3], &[0., 1., 2.]), f32s(&[1, 3], &[3., 4., 5.])]),
        case(
            "Split",
            18,
            |n| n.int("axis", 1).int("num_outputs", 2),
            vec![x()],
            vec![f32s(&[2, 2], &[0., 1., 3., 4.]), f32s(&[2, 1], &[2., 5.])],
        ),
        case("Dropout", 13, |n| n, vec![x(), Known(f32s(&[], &[0.5]))], vec![counting(&[2, 3]), bools(&[2, 3], &[1; 6])]),
        case("Dropout", 13, |n| n, vec![x(), Known(f32s(&[], &[0.5])), Known(bools(&[], &[0]))], vec![counting(&[2, 3])]),
        case("Dropout", 7, |n| n.float("ratio", 0.5), vec![x()], vec![counting(&[2, 3])]),
    ]
}

fn slices() -> Vec<Case> {
    let x = || Input(counting(&[6]));
    let result = |values: &[f32]| f32s(&[values.len()], values);
    vec![
        plain("Slice", 13, vec![x(), k(&[1]), k(&[4])], result(&[1., 2., 3.])),
        plain("Slice", 13, vec![x(), k(&[-2]), k(&[i64::MAX]), k(&[0])], result(&[4., 5.])),
        plain("Slice", 13, vec![x(), k(&[0]), k(&[i64::MAX]), k(&[-1]), k(&[4])], result(&[0., 4.])),
        plain("Slice", 13, vec![x(), k(&[-1]), k(&[i64::MIN]), k(&[0]), k(&[-2])], result(&[5., 3., 1.])),
        plain("Slice", 13, vec![x(), k(&[100]), k(&[1]), k(&[0]), k(&[-3])], result(&[5., 2.])),
        plain("Slice", 13, vec![x(), k(&[4]), k(&[2])], result(&[])),
        case(
            "Slice",
            9,
            |n| n.ints("starts", &[2]).ints("ends", &[-1]).ints("axes", &[0]),
            vec![x()],
            vec![result(&[2., 3., 4.])],
        ),
        plain("Slice", 13, vec![Input(counting(&[2, 3])), k(&[1, 0]), k(&[2, 2]), k(&[1, 0])], f32s(&[2, 1], &[1., 4.])),
        plain("Trilu", 14, vec![Input(counting(&[2, 3]))], f32s(&[2, 3], &[0., 1., 2., 0., 4., 5.])),
        case(
            "Trilu",
            14,
            |n| n.int("upper", 0),
            vec![Input(counting(&[2, 3])), Known(i64s(&[], &[1]))],
            vec![f32s(&[2, 3], &[0., 1., 0., 3., 4., 5.])],
        ),
        plain("Trilu", 14, vec![Input(bools(&[2, 2], &[1, 1, 1, 1])), Known(i64s(&[], &[1]))], bools(&[2, 2], &[0, 1, 0, 0])),
    ]
}

fn pads() -> Vec<Case> {
    let x = || Input(f32s(&[3], &[1., 2., 3.]));
    let mode = |mode: &'static str, pads: &[i64], expected: &[f32]| {
        case("Pad", 19, move |n| n.string("mode", mode), vec![x(), k(pads)], vec![f32s(&[expected.len()], expected)])
    };
    vec![
        plain("Pad", 13, vec![x(), k(&[1, 2])], f32s(&[6], &[0., 1., 2., 3., 0., 0.])),
        plain("Pad", 13, vec![x(), k(&[1, -1]), Known(f32s(&[], &[9.0]))], f32s(&[3], &[9., 1., 2.])),
        plain("Pad", 18, vec![Input(counting(&[1, 2])), k(&[1, 0]), Absent, k(&[-1])], f32s(&[1, 3], &[0., 0., 1.])),
        case("Pad", 7, |n| n.ints("pads", &[1, 0]).float("value", 5.0), vec![x()], vec![f32s(&[4], &[5., 1., 2., 3.])]),
        mode("edge", &[2, 1], &[1., 1., 1., 2., 3., 3.]),
        mode("reflect", &[2, 3], &[3., 2., 1., 2., 3., 2., 1., 2.]),
        mode("wrap", &[1, 2], &[3., 1., 2., 3., 1., 2.]),
    ]
}

fn indexing() -> Vec<Case> {
    let x = || Input(counting(&[2, 3]));
    let image = || Input(f32s(&[1, 1, 1, 2], &[1., 2.]));
    let scales = |s: &[f32]| Known(f32s(&[s.len()], s));
    vec![
        plain("Gather", 13, vec![x(), Input(i64s(&[1, 2], &[1, -2]))], f32s(&[1, 2, 3], &[3., 4., 5., 0., 1., 2.])),
        case("Gather", 13, |n| n.int("axis", 1), vec![x(), k(&[2, 0])], vec![f32s(&[2, 2], &[2., 0., 5., 3.])]),
        case("Gather", 13, |n| n.int("axis", -1), vec![x(), Known(i64s(&[], &[-1]))], vec![f32s(&[2], &[2., 5.])]),
        case(
            "GatherElements",
            13,
            |n| n.int("axis", 1),
            vec![x(), Input(i64s(&[2, 2], &[0, -1, 1, 1]))],
            vec![f32s(&[2, 2], &[0., 2., 4., 4.])],
        ),
        plain("GatherElements", 13, vec![x(), Input(i64s(&[1, 3], &[1, 0, 1]))], f32s(&[1, 3], &[3., 1., 5.])),
        plain("GatherND", 13, vec![x(), Input(i64s(&[2, 2], &[0, 1, -1, 2]))], f32s(&[2], &[1., 5.])),
        plain("GatherND", 13, vec![x(), Input(i64s(&[2, 1], &[1, 0]))], f32s(&[2, 3], &[3., 4., 5., 0., 1., 2.])),
        case("GatherND", 13, |n| n.int("batch_dims", 1), vec![x(), Input(i64s(&[2, 1], &[2, 0]))], vec![f32s(&[2], &[2., 3.])]),
        plain(
            "Resize",
            13,
            vec![image(), Absent, scales(&[1., 1., 2., 3.])],
            f32s(&[1, 1, 2, 6], &[1., 1., 1., 2., 2., 2., 1., 1., 1., 2., 2., 2.]),
        ),
        plain("Resize", 10, vec![image(), scales(&[1., 1., 1., 2.])], f32s(&[1, 1, 1, 4], &[1., 1., 2., 2.])),
        case(
            "Resize",
            19,
            |n| n.string("coordinate_transformation_mode", "asymmetric").string("nearest_mode", "floor"),
            vec![Input(f32s(&[1, 1, 1, 4], &[1., 2., 3., 4.])), Absent, Absent, k(&[1, 1, 1, 3])],
            // Positions 0, 4/3, 8/3.
            vec![f32s(&[1, 1, 1, 3], &[1., 2., 3.])],
        ),
    ]
}

fn makers() -> Vec<Case> {
    let value = i64s(&[2], &[3, 4]);
    let seven = i64s(&[1], &[7]);
    vec![
        case("Constant", 13, |n| n.tensor("value", &value), vec![], vec![value.clone()]),
        case("Constant", 13, |n| n.float("value_float", 2.5), vec![], vec![f32s(&[], &[2.5])]),
        case("Constant", 13, |n| n.floats("value_floats", &[2.5, 1.0]), vec![], vec![f32s(&[2], &[2.5, 1.0])]),
        case("Constant", 13, |n| n.int("value_int", 3), vec![], vec![i64s(&[], &[3])]),
        case("Constant", 13, |n| n.ints("value_ints", &[3]), vec![], vec![i64s(&[1], &[3])]),
        plain("ConstantOfShape", 9, vec![k(&[2, 1])], f32s(&[2, 1], &[0., 0.])),
        case("ConstantOfShape", 9, |n| n.tensor("value", &seven), vec![Known(i64s(&[0], &[]))], vec![i64s(&[], &[7])]),
        plain("Range", 11, vec![Known(i64s(&[], &[10])), Known(i64s(&[], &[4])), Known(i64s(&[], &[-3]))], i64s(&[2], &[10, 7])),
        plain(
            "Range",
            11,
            vec![Known(f32s(&[], &[1.0])), Known(f32s(&[], &[2.0])), Known(f32s(&[], &[0.375]))],
            f32s(&[3], &[1.0, 1.375, 1.75]),
        ),
        plain("Range", 11, vec![Known(i64s(&[], &[5])), Known(i64s(&[], &[4])), Known(i64s(&[], &[1]))], i64s(&[0], &[])),
        case("EyeLike", 9, |n| n.int("k", 1), vec![Input(counting(&[2, 3]))], vec![f32s(&[2, 3], &[0., 1., 0., 0., 0., 1.])]),
        case(
            "EyeLike",
            9,
            |n| n.int("dtype", 6),
            vec![Input(counting(&[2, 2]))],
            vec![Tensor::from_i64(DType::I32, [2, 2], &[1, 0, 0, 1])],
        ),
    ]
}
