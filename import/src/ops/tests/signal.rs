use meganeura_ir::{DType, Shape, Tensor};

use super::{Absent, Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [windows(), transforms()].into_iter().flatten().collect()
}

fn size(value: i64) -> super::Arg {
    Known(i64s(&[], &[value]))
}

fn windows() -> Vec<Case> {
    let window = |values: &[f32]| f32s(&[values.len()], values);
    let symmetric = |n: NodeBuilder| n.int("periodic", 0);
    let mel = |hertz: f32| Known(f32s(&[], &[hertz]));
    vec![
        plain("HannWindow", 17, vec![size(4)], window(&[0., 0.5, 1., 0.5])),
        case("HannWindow", 17, symmetric, vec![size(3)], vec![window(&[0., 1., 0.])]),
        case("HannWindow", 17, |n| n.int("output_datatype", 6), vec![size(2)], vec![Tensor::from_i64(DType::I32, [2], &[0, 1])]),
        plain("HammingWindow", 17, vec![size(4)], window(&[4. / 46., 25. / 46., 1., 25. / 46.])),
        plain("BlackmanWindow", 17, vec![size(4)], window(&[0., 0.34, 1., 0.34])),
        case("BlackmanWindow", 17, symmetric, vec![size(0)], vec![f32s(&[0], &[])]),
        plain("MelWeightMatrix", 17, vec![size(2), size(16), size(8000), mel(0.), mel(4000.)], f32s(&[9, 2], &MEL)),
    ]
}

/// Of ONNX's reference implementation.
const MEL: [f32; 18] = [1., 0., 0.5, 0.5, 0., 1., 0., 0.5, 0., 0., 0., 0., 0., 0., 0., 0., 0., 0.];

fn transforms() -> Vec<Case> {
    let real = |values: &[f32]| f32s(&[1, values.len(), 1], values);
    let complex = |values: &[f32]| f32s(&[1, values.len() / 2, 2], values);
    let spectrum = [10., 0., -2., 2., -2., 0., -2., -2.];
    let signal = || Input(real(&[1., 2., 3., 4.]));
    let onesided = |n: NodeBuilder| n.int("onesided", 1);
    let inverse = |n: NodeBuilder| n.int("inverse", 1);
    vec![
        plain("DFT", 17, vec![signal()], complex(&spectrum)),
        plain("DFT", 20, vec![signal()], complex(&spectrum)),
        case("DFT", 17, onesided, vec![signal()], vec![complex(&spectrum[..6])]),
        case("DFT", 17, inverse, vec![Input(complex(&spectrum))], vec![complex(&[1., 0., 2., 0., 3., 0., 4., 0.])]),
        case("DFT", 20, |n| onesided(inverse(n)), vec![Input(complex(&spectrum[..6]))], vec![real(&[1., 2., 3., 4.])]),
        // An odd length, where no element of the half is its own mirror image but the first.
        case("DFT", 20, |n| onesided(inverse(n)), vec![Input(complex(&[6., 0., 0., 0.])), size(3)], vec![real(&[2., 2., 2.])]),
        plain("DFT", 20, vec![signal(), size(2)], complex(&[3., 0., -1., 0.])),
        plain("DFT", 20, vec![Input(real(&[1., 2.])), size(4)], complex(&[3., 0., 1., -2., -1., 0., 1., 2.])),
        // i * (1 + 2i) = i - 2 turns by a quarter where the plain sum is 1 + 2i.
        plain("DFT", 20, vec![Input(complex(&[1., 2., 0., 1.])), Absent, size(-2)], complex(&[1., 3., 1., 1.])),
        plain("DFT", 20, vec![Input(f32s(&[2, 2, 1], &[1., 2., 3., 4.])), Absent, size(0)], {
            f32s(&[2, 2, 2], &[4., 0., 6., 0., -2., 0., -2., 0.])
        }),
        plain(
            "STFT",
            17,
            vec![signal(), size(2), Input(f32s(&[2], &[1., 2.]))],
            f32s(&[1, 2, 2, 2], &[5., 0., -3., 0., 11., 0., -5., 0.]),
        ),
        case(
            "STFT",
            17,
            |n| n.int("onesided", 0),
            vec![
                Input(complex(&[1., 2., 0., 1., 5., 0.])),
                size(1),
                Absent,
                Known(Tensor::from_i64(DType::I64, Shape::scalar(), &[2])),
            ],
            vec![f32s(&[1, 2, 2, 2], &[1., 3., 1., 1., 5., 1., -5., 1.])],
        ),
    ]
}
