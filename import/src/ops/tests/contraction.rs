use super::{Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, f32s};

pub(super) fn cases() -> Vec<Case> {
    [products(), convolutions(), transposed()].into_iter().flatten().collect()
}

fn products() -> Vec<Case> {
    let a = || Input(f32s(&[2, 2], &[1., 2., 3., 4.]));
    let b = || Input(f32s(&[2, 3], &[1., 0., 2., 0., 1., 1.]));
    let v = || Input(f32s(&[2], &[1., -1.]));
    let batch = || Input(f32s(&[2, 1, 2], &[1., 2., 3., 4.]));
    vec![
        plain("MatMul", 13, vec![a(), b()], f32s(&[2, 3], &[1., 2., 4., 3., 4., 10.])),
        plain("MatMul", 13, vec![v(), b()], f32s(&[3], &[1., -1., 1.])),
        plain("MatMul", 13, vec![a(), v()], f32s(&[2], &[-1., -1.])),
        plain("MatMul", 13, vec![v(), v()], f32s(&[], &[2.])),
        plain("MatMul", 13, vec![batch(), b()], f32s(&[2, 1, 3], &[1., 2., 4., 3., 4., 10.])),
        // Both operands repeat: [2,1,1,2] x [3,2,1].
        plain(
            "MatMul",
            13,
            vec![Input(f32s(&[2, 1, 1, 2], &[1., 2., 3., 4.])), Input(f32s(&[3, 2, 1], &[1., 0., 0., 1., 1., 1.]))],
            f32s(&[2, 3, 1, 1], &[1., 2., 3., 3., 4., 7.]),
        ),
        plain("MatMul", 13, vec![v(), Input(f32s(&[2, 2, 1], &[1., 2., 3., 5.]))], f32s(&[2, 1], &[-1., -2.])),
        plain("MatMul", 13, vec![Input(f32s(&[2, 0], &[])), Input(f32s(&[0, 1], &[]))], f32s(&[2, 1], &[0., 0.])),
        plain("Gemm", 13, vec![a(), b()], f32s(&[2, 3], &[1., 2., 4., 3., 4., 10.])),
        case(
            "Gemm",
            13,
            |n| n.int("transA", 1).float("alpha", 2.0).float("beta", 0.5),
            vec![a(), b(), Input(f32s(&[3], &[2., 4., 6.]))],
            vec![f32s(&[2, 3], &[3., 8., 13., 5., 10., 19.])],
        ),
        case(
            "Gemm",
            7,
            |n| n.int("transB", 1),
            vec![a(), a(), Input(f32s(&[2, 1], &[1., 2.]))],
            vec![f32s(&[2, 2], &[6., 12., 13., 27.])],
        ),
    ]
}

fn convolutions() -> Vec<Case> {
    let line = || Input(f32s(&[1, 1, 4], &[1., 2., 3., 4.]));
    let w = || Input(f32s(&[1, 1, 3], &[1., 0., -1.]));
    let y = |values: &[f32]| vec![f32s(&[1, 1, values.len()], values)];
    let two_channels = || Input(f32s(&[1, 2, 2], &[1., 2., 3., 4.]));
    vec![
        case("Conv", 11, |n| n, vec![line(), w()], y(&[-2., -2.])),
        case("Conv", 11, |n| n.ints("pads", &[2, 0]).ints("strides", &[2]), vec![line(), w()], y(&[-1., -2.])),
        case(
            "Conv",
            11,
            |n| n.ints("pads", &[1, 1]).ints("dilations", &[2]).ints("kernel_shape", &[3]),
            vec![line(), w()],
            y(&[-4., 1.]),
        ),
        case(
            "Conv",
            11,
            |n| n.string("auto_pad", "SAME_UPPER"),
            vec![line(), w(), Known(f32s(&[1], &[10.]))],
            y(&[8., 8., 8., 13.]),
        ),
        case("Conv", 11, |n| n.string("auto_pad", "VALID"), vec![line(), w()], y(&[-2., -2.])),
        // One group mixes channels, two keep them apart.
        case("Conv", 11, |n| n, vec![two_channels(), Input(f32s(&[1, 2, 1], &[1., 10.]))], y(&[31., 42.])),
        case(
            "Conv",
            11,
            |n| n.int("group", 2),
            vec![two_channels(), Input(f32s(&[2, 1, 1], &[1., 10.]))],
            vec![f32s(&[1, 2, 2], &[1., 2., 30., 40.])],
        ),
        case(
            "Conv",
            11,
            |n| n,
            vec![Input(f32s(&[1, 1, 2, 2], &[1., 2., 3., 4.])), Input(f32s(&[1, 1, 2, 1], &[1., -1.]))],
            vec![f32s(&[1, 1, 1, 2], &[-2., -2.])],
        ),
    ]
}

/// Each input element adds the kernel, times itself, at `stride` times its position.
fn transposed() -> Vec<Case> {
    let x = || Input(f32s(&[1, 1, 2], &[1., 10.]));
    let w = || Input(f32s(&[1, 1, 3], &[1., 2., 3.]));
    let y = |values: &[f32]| vec![f32s(&[1, 1, values.len()], values)];
    let stride = |n: NodeBuilder| n.ints("strides", &[2]);
    vec![
        case("ConvTranspose", 11, |n| n, vec![x(), w()], y(&[1., 12., 23., 30.])),
        case("ConvTranspose", 11, stride, vec![x(), w()], y(&[1., 2., 13., 20., 30.])),
        case(
            "ConvTranspose",
            11,
            |n| stride(n).ints("pads", &[1, 0]).ints("output_padding", &[1]),
            vec![x(), w()],
            y(&[2., 13., 20., 30., 0.]),
        ),
        case("ConvTranspose", 11, |n| stride(n).ints("output_shape", &[4]), vec![x(), w()], y(&[2., 13., 20., 30.])),
        case("ConvTranspose", 11, |n| stride(n).string("auto_pad", "SAME_UPPER"), vec![x(), w()], y(&[1., 2., 13., 20.])),
        case("ConvTranspose", 11, |n| stride(n).string("auto_pad", "SAME_LOWER"), vec![x(), w()], y(&[2., 13., 20., 30.])),
        case(
            "ConvTranspose",
            11,
            |n| n.ints("dilations", &[2]),
            vec![x(), w(), Input(f32s(&[1], &[100.]))],
            y(&[101., 110., 102., 120., 103., 130.]),
        ),
        // [C = 2, M / group = 2]: output channels mix both input channels.
        case(
            "ConvTranspose",
            11,
            |n| n,
            vec![Input(f32s(&[1, 2, 1], &[1., 10.])), Input(f32s(&[2, 2, 1], &[1., 2., 3., 4.]))],
            vec![f32s(&[1, 2, 1], &[31., 42.])],
        ),
        case(
            "ConvTranspose",
            11,
            |n| n.int("group", 2),
            vec![Input(f32s(&[1, 2, 1], &[1., 10.])), Input(f32s(&[2, 2, 1], &[1., 2., 3., 4.]))],
            vec![f32s(&[1, 4, 1], &[1., 2., 30., 40.])],
        ),
    ]
}
