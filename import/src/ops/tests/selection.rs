use meganeura_ir::{DType, Tensor};

use super::{Absent, Arg, Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, bools, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [sorted(), reversed(), compressed(), distinct(), suppressed()].into_iter().flatten().collect()
}

fn k(values: &[i64]) -> Arg {
    Known(i64s(&[values.len()], values))
}

fn sorted() -> Vec<Case> {
    let x = || Input(f32s(&[2, 4], &[3., 1., 3., 2., -1., -1., 5., -2.]));
    let smallest = |n: NodeBuilder| n.int("largest", 0);
    let nan = || Input(f32s(&[4], &[1., f32::NAN, f32::INFINITY, 2.]));
    // Longer than a block of the comparison; ties go to the earlier block.
    let long: Vec<i64> = (0..2500).map(|i| i * 7 % 1000).collect();
    let (mut order, keys) = ((0..2500i64).collect::<Vec<_>>(), long.clone());
    order.sort_by_key(|&i| (-keys[i as usize], i));
    let best: Vec<i64> = order[..5].iter().map(|&i| keys[i as usize]).collect();
    vec![
        case("TopK", 11, |n| n, vec![x(), k(&[2])], vec![f32s(&[2, 2], &[3., 3., 5., -1.]), i64s(&[2, 2], &[0, 2, 2, 0])]),
        case(
            "TopK",
            24,
            smallest,
            vec![x(), k(&[3])],
            vec![f32s(&[2, 3], &[1., 2., 3., -2., -1., -1.]), i64s(&[2, 3], &[1, 3, 0, 3, 0, 1])],
        ),
        case(
            "TopK",
            10,
            |n| n.int("axis", 0),
            vec![x(), k(&[1])],
            vec![f32s(&[1, 4], &[3., 1., 5., 2.]), i64s(&[1, 4], &[0, 0, 1, 0])],
        ),
        case(
            "TopK",
            9,
            |n| n.int("axis", 0).int("k", 2),
            vec![Input(f32s(&[2, 1], &[1., 2.]))],
            vec![f32s(&[2, 1], &[2., 1.]), i64s(&[2, 1], &[1, 0])],
        ),
        case("TopK", 11, |n| n, vec![x(), k(&[0])], vec![f32s(&[2, 0], &[]), i64s(&[2, 0], &[])]),
        // NaN counts as the largest number, as in PyTorch.
        case("TopK", 11, |n| n, vec![nan(), k(&[2])], vec![f32s(&[2], &[f32::NAN, f32::INFINITY]), i64s(&[2], &[1, 2])]),
        case("TopK", 11, smallest, vec![nan(), k(&[2])], vec![f32s(&[2], &[1., 2.]), i64s(&[2], &[0, 3])]),
        case("TopK", 11, |n| n, vec![Input(i64s(&[2500], &long)), k(&[5])], vec![i64s(&[5], &best), i64s(&[5], &order[..5])]),
    ]
}

fn reversed() -> Vec<Case> {
    let x = || Input(f32s(&[3, 2], &[0., 1., 2., 3., 4., 5.]));
    vec![
        plain("ReverseSequence", 10, vec![x(), Input(i64s(&[2], &[3, 2]))], f32s(&[3, 2], &[4., 3., 2., 1., 0., 5.])),
        case(
            "ReverseSequence",
            10,
            |n| n.int("batch_axis", 0).int("time_axis", 1),
            vec![x(), Known(i64s(&[3], &[1, 2, 0]))],
            vec![f32s(&[3, 2], &[0., 1., 3., 2., 4., 5.])],
        ),
    ]
}

fn compressed() -> Vec<Case> {
    let x = || Input(f32s(&[2, 3], &[0., 1., 2., 3., 4., 5.]));
    let where_ = |values: &[i64]| Known(bools(&[values.len()], values));
    vec![
        // The condition may be shorter than the axis.
        case("Compress", 11, |n| n.int("axis", -1), vec![x(), where_(&[0, 1])], vec![f32s(&[2, 1], &[1., 4.])]),
        plain("Compress", 9, vec![x(), where_(&[1, 0, 0, 0, 1])], f32s(&[2], &[0., 4.])),
        case("Compress", 11, |n| n.int("axis", 0), vec![x(), where_(&[0, 0])], vec![f32s(&[0, 3], &[])]),
        plain("NonZero", 13, vec![Known(i64s(&[2, 2], &[1, 0, 3, -4]))], i64s(&[2, 3], &[0, 1, 1, 0, 0, 1])),
        // A scalar has no axes.
        plain("NonZero", 9, vec![Known(bools(&[], &[1]))], i64s(&[0, 1], &[])),
    ]
}

fn distinct() -> Vec<Case> {
    let numbers = || Known(i64s(&[6], &[2, 1, 1, 3, 4, 3]));
    let rows = || Known(i64s(&[3, 2], &[1, 0, 0, 5, 1, 0]));
    let (list, pair) = (|v: &[i64]| i64s(&[v.len()], v), |v: &[i64]| i64s(&[v.len() / 2, 2], v));
    let big = Tensor::from_i64(DType::U64, [2], &[3_000_000_000, 1]);
    let unsorted = |n: NodeBuilder| n.int("sorted", 0);
    vec![
        case(
            "Unique",
            11,
            |n| n,
            vec![numbers()],
            vec![list(&[1, 2, 3, 4]), list(&[1, 0, 3, 4]), list(&[1, 0, 0, 2, 3, 2]), list(&[2, 1, 2, 1])],
        ),
        case(
            "Unique",
            11,
            unsorted,
            vec![numbers()],
            vec![list(&[2, 1, 3, 4]), list(&[0, 1, 3, 4]), list(&[0, 1, 1, 2, 3, 2]), list(&[1, 2, 2, 1])],
        ),
        case(
            "Unique",
            11,
            |n| n.int("axis", 0),
            vec![rows()],
            vec![pair(&[0, 5, 1, 0]), list(&[1, 0]), list(&[1, 0, 1]), list(&[1, 2])],
        ),
        case(
            "Unique",
            11,
            |n| n,
            vec![Known(big)],
            vec![Tensor::from_i64(DType::U64, [2], &[1, 3_000_000_000]), list(&[1, 0]), list(&[1, 0]), list(&[1, 1])],
        ),
    ]
}

fn suppressed() -> Vec<Case> {
    // Box 1 overlaps box 0 by a third, box 2 touches nothing.
    let corners = || Known(f32s(&[1, 3, 4], &[0., 0., 1., 1., 1.5, 1., 0.5, 0., 3., 3., 4., 4.]));
    let centres = || Known(f32s(&[1, 3, 4], &[0.5, 0.5, 1., 1., 1., 0.5, 1., 1., 3.5, 3.5, 1., 1.]));
    let scores = || Known(f32s(&[1, 1, 3], &[0.5, 0.9, 0.7]));
    let (limit, third) = (|n: i64| k(&[n]), |iou: f32| Known(f32s(&[1], &[iou])));
    let selected = |boxes: &[i64]| {
        let rows: Vec<i64> = boxes.iter().flat_map(|&b| [0, 0, b]).collect();
        i64s(&[boxes.len(), 3], &rows)
    };
    let centred = |n: NodeBuilder| n.int("center_point_box", 1);
    vec![
        plain("NonMaxSuppression", 11, vec![corners(), scores(), limit(3), third(0.3)], selected(&[1, 2])),
        plain("NonMaxSuppression", 10, vec![corners(), scores(), limit(3), third(0.4)], selected(&[1, 2, 0])),
        plain("NonMaxSuppression", 10, vec![corners(), scores(), limit(1), third(0.4)], selected(&[1])),
        plain("NonMaxSuppression", 10, vec![corners(), scores()], selected(&[])),
        plain("NonMaxSuppression", 10, vec![corners(), scores(), limit(3), Absent, third(0.7)], selected(&[1])),
        case("NonMaxSuppression", 11, centred, vec![centres(), scores(), limit(3), third(0.3)], vec![selected(&[1, 2])]),
    ]
}
