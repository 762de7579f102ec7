use super::{Case, Input, Known, program};
use crate::testing::{NodeBuilder, body, bools, f32s, i64s, node};

pub(super) fn cases() -> Vec<Case> {
    [conditionals(), loops(), scans()].into_iter().flatten().collect()
}

fn conditionals() -> Vec<Case> {
    let choice = |flag: i64, expected: [f32; 2]| {
        let negate = body(&[], vec![node("Neg", &["x0"], &["y"])], &["y"]);
        // The same inner names, and an outer value as the result.
        let double = body(&[], vec![node("Add", &["x0", "x0"], &["y"])], &["y"]);
        let nodes = vec![node("If", &["x1"], &["y0"]).graph("then_branch", negate).graph("else_branch", double)];
        let args = vec![Input(f32s(&[2], &[1., -3.])), Known(bools(&[1], &[flag]))];
        program(13, nodes, args, vec![f32s(&[2], &expected)])
    };
    vec![choice(1, [-1., 3.]), choice(0, [2., -6.])]
}

/// `v <- v + x0`, which goes on while the iteration is less than `last`; the scan output is `v * iteration`.
fn accumulate(last: i64) -> NodeBuilder {
    let nodes = vec![
        node("Add", &["v", "x0"], &["sum"]),
        node("Cast", &["i"], &["factor"]).int("to", 1),
        node("Mul", &["sum", "factor"], &["scaled"]),
        node("Constant", &[], &["last"]).int("value_int", last),
        node("Less", &["i", "last"], &["on"]),
    ];
    let graph = body(&["i", "go", "v"], nodes, &["on", "sum", "scaled"]);
    node("Loop", &["x1", "x2", "x0"], &["y0", "y1"]).graph("body", graph)
}

fn loops() -> Vec<Case> {
    let x = || Input(f32s(&[2], &[1., -1.]));
    let case = |trips, go, last, steps: usize| {
        let (n, values): (f32, Vec<f32>) =
            (steps as f32, (0..steps).flat_map(|i| [1., -1.].map(|x| x * (i + 2) as f32 * i as f32)).collect());
        let expected = vec![f32s(&[2], &[1. + n, -1. - n]), f32s(&[steps, 2], &values)];
        let args = vec![x(), Known(i64s(&[], &[trips])), Known(bools(&[], &[go]))];
        program(16, vec![accumulate(last)], args, expected)
    };
    vec![case(3, 1, 9, 3), case(i64::MAX, 1, 2, 3), case(5, 0, 9, 0), case(0, 1, 9, 0), case(-4, 1, 9, 0)]
}

fn scans() -> Vec<Case> {
    let step = || {
        let nodes = vec![node("Add", &["s", "p"], &["sum"]), node("Identity", &["sum"], &["out"])];
        body(&["s", "p"], nodes, &["sum", "out"])
    };
    let scan = |inputs: &[&str]| node("Scan", inputs, &["y0", "y1"]).graph("body", step()).int("num_scan_inputs", 1);
    let start = || Input(f32s(&[2], &[10., 20.]));
    // Columns, from the last to the first; results as columns, the first of them last.
    let backwards = scan(&["x0", "x1"]).ints("scan_input_axes", &[1]).ints("scan_input_directions", &[1]);
    let backwards = backwards.ints("scan_output_axes", &[-1]).ints("scan_output_directions", &[1]);
    let columns = || Input(f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.]));
    let batch = || vec![Input(f32s(&[2, 1], &[10., 20.])), Input(f32s(&[2, 3, 1], &[1., 2., 3., 4., 5., 6.]))];
    vec![
        program(
            11,
            vec![backwards],
            vec![start(), columns()],
            vec![f32s(&[2], &[16., 35.]), f32s(&[2, 3], &[16., 15., 13., 35., 31., 26.])],
        ),
        program(
            9,
            vec![scan(&["x0", "x1"])],
            vec![start(), Input(f32s(&[0, 2], &[]))],
            vec![f32s(&[2], &[10., 20.]), f32s(&[0, 2], &[])],
        ),
        program(
            8,
            vec![scan(&["", "x0", "x1"])],
            batch(),
            vec![f32s(&[2, 1], &[16., 35.]), f32s(&[2, 3, 1], &[11., 13., 16., 24., 29., 35.])],
        ),
    ]
}
