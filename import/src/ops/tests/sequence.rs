use super::{Case, Input, Known, program};
use crate::testing::{body, bools, f32s, i64s, node};

pub(super) fn cases() -> Vec<Case> {
    [splits(), edits(), maps(), optionals()].into_iter().flatten().collect()
}

fn splits() -> Vec<Case> {
    let x = || Input(f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.]));
    vec![
        program(
            11,
            vec![
                node("SplitToSequence", &["x0", "x1"], &["q"]).int("axis", -1),
                node("SequenceLength", &["q"], &["y0"]),
                node("SequenceAt", &["q", "x2"], &["y1"]),
            ],
            vec![x(), Known(i64s(&[], &[2])), Known(i64s(&[], &[-1]))],
            vec![i64s(&[], &[2]), f32s(&[2, 1], &[3., 6.])],
        ),
        program(
            11,
            vec![
                node("SplitToSequence", &["x0", "x1"], &["q"]).int("axis", 1),
                node("SequenceAt", &["q", "x2"], &["y0"]),
                node("ConcatFromSequence", &["q"], &["y1"]).int("axis", 1),
            ],
            vec![x(), Known(i64s(&[3], &[1, 0, 2])), Known(i64s(&[], &[1]))],
            vec![f32s(&[2, 0], &[]), f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.])],
        ),
        program(
            11,
            vec![
                node("SplitToSequence", &["x0"], &["q"]).int("keepdims", 0).int("axis", 1),
                node("ConcatFromSequence", &["q"], &["y0"]).int("axis", -2).int("new_axis", 1),
            ],
            vec![x()],
            vec![f32s(&[3, 2], &[1., 4., 2., 5., 3., 6.])],
        ),
    ]
}

fn edits() -> Vec<Case> {
    let [a, b, c] = [1f32, 2., 3.].map(|v| move || Input(f32s(&[1], &[v])));
    let position = |at: i64| Known(i64s(&[], &[at]));
    vec![
        // [a, b], then c before the last, then without the first, then without the last.
        program(
            11,
            vec![
                node("SequenceConstruct", &["x0", "x1"], &["q"]),
                node("SequenceInsert", &["q", "x2", "x3"], &["r"]),
                node("SequenceErase", &["r", "x4"], &["s"]),
                node("SequenceErase", &["s"], &["t"]),
                node("ConcatFromSequence", &["r"], &["y0"]).int("axis", 0),
                node("ConcatFromSequence", &["s"], &["y1"]).int("axis", 0),
                node("ConcatFromSequence", &["t"], &["y2"]).int("axis", 0),
            ],
            vec![a(), b(), c(), position(-1), position(0)],
            vec![f32s(&[3], &[1., 3., 2.]), f32s(&[2], &[3., 2.]), f32s(&[1], &[3.])],
        ),
        program(
            11,
            vec![
                node("SequenceEmpty", &[], &["q"]).int("dtype", 7),
                node("SequenceLength", &["q"], &["y0"]),
                node("SequenceInsert", &["q", "x0"], &["r"]),
                node("SequenceInsert", &["r", "x1"], &["s"]),
                node("ConcatFromSequence", &["s"], &["y1"]).int("axis", 0),
            ],
            vec![Input(i64s(&[1], &[5])), Input(i64s(&[2], &[6, 7]))],
            vec![i64s(&[], &[0]), i64s(&[3], &[5, 6, 7])],
        ),
    ]
}

fn maps() -> Vec<Case> {
    let scaled = body(
        &["e", "f", "w"],
        vec![node("Mul", &["e", "w"], &["p"]), node("Sub", &["p", "f"], &["d"]), node("Shape", &["e"], &["s"])],
        &["d", "s"],
    );
    let nodes = vec![
        node("SequenceConstruct", &["x0", "x1"], &["q"]),
        node("SequenceConstruct", &["x1", "x0"], &["r"]),
        node("SequenceMap", &["q", "r", "x2"], &["m", "n"]).graph("body", scaled),
        node("ConcatFromSequence", &["m"], &["y0"]).int("axis", 0),
        node("ConcatFromSequence", &["n"], &["y1"]).int("axis", 0),
    ];
    let args = vec![Input(f32s(&[1], &[2.])), Input(f32s(&[2], &[3., 5.])), Input(f32s(&[], &[10.]))];
    let expected = vec![f32s(&[4], &[17., 15., 28., 48.]), i64s(&[2], &[1, 2])];
    vec![program(17, nodes, args, expected)]
}

fn optionals() -> Vec<Case> {
    vec![program(
        18,
        vec![
            node("Optional", &["x0"], &["o"]),
            node("OptionalHasElement", &["o"], &["y0"]),
            node("OptionalHasElement", &[""], &["y1"]),
            node("OptionalGetElement", &["o"], &["y2"]),
        ],
        vec![Input(f32s(&[1], &[2.]))],
        vec![bools(&[], &[1]), bools(&[], &[0]), f32s(&[1], &[2.])],
    )]
}
