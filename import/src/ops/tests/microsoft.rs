//! Expected numbers are those of onnxruntime on the CPU.

use meganeura_ir::Tensor;

use super::{Absent, Arg, Case, Input, Known, case};
use crate::testing::{NodeBuilder, f32s, i32s, quarters as q, u8s};

pub(super) fn cases() -> Vec<Case> {
    [products(), activations(), blocks(), normalizations()].into_iter().flatten().collect()
}

/// A case of an operator of onnxruntime.
pub(super) fn fused(op: &str, attributes: impl Fn(NodeBuilder) -> NodeBuilder, args: Vec<Arg>, expected: Vec<Tensor>) -> Case {
    case(op, 18, |n| attributes(n.domain("com.microsoft")), args, expected)
}

fn products() -> Vec<Case> {
    vec![
        fused(
            "FusedMatMul",
            |n| n.int("transA", 1).float("alpha", 0.5),
            vec![Input(q(&[2, 2], 0)), Input(q(&[2, 3], 1))],
            vec![f32s(&[2, 3], &[0.5, -1.03125, -0.21875, -0.59375, 0.9375, 0.21875])],
        ),
        fused(
            "FusedMatMul",
            |n| n.int("transB", 1),
            vec![Input(q(&[2, 2, 3], 0)), Input(q(&[2, 3], 1))],
            vec![f32s(&[2, 2, 2], &[1.125, 1.3125, -0.4375, -0.8125, -0.5, -0.875, -0.375, -0.6875])],
        ),
        fused(
            "FusedMatMul",
            |n| n.int("transBatchA", 1).int("transA", 1).int("transBatchB", 1),
            vec![Input(q(&[2, 2, 2], 0)), Input(q(&[2, 2, 2], 1))],
            vec![f32s(&[2, 2, 2], &[0.875, -1.5, -0.75, 0.5, -1.0625, 1.625, 0.125, -0.6875])],
        ),
        fused(
            "TransposeMatMul",
            |n| n.int("transA", 1),
            vec![Input(q(&[2], 0)), Input(q(&[2, 3], 1))],
            vec![f32s(&[3], &[0.25, -1.0625, -0.1875])],
        ),
        fused(
            "FusedGemm",
            |n| {
                n.int("transB", 1)
                    .float("alpha", 0.5)
                    .float("beta", 2.0)
                    .string("activation", "LeakyRelu")
                    .float("activation_alpha", 0.25)
            },
            vec![Input(q(&[2, 2], 0)), Input(q(&[3, 2], 1)), Input(q(&[3], 2))],
            vec![f32s(&[2, 3], &[1.125, -0.4609375, 1.4375, 1.40625, -0.5078125, 1.90625])],
        ),
        fused(
            "FusedGemm",
            |n| n.string("activation", "HardSigmoid").float("activation_alpha", 0.5).float("activation_beta", 0.25),
            vec![Input(q(&[2, 2], 0)), Input(q(&[2, 2], 1))],
            vec![f32s(&[2, 2], &[0.625, 0., 0.53125, 0.])],
        ),
        fused(
            "FusedConv",
            |n| n.string("activation", "Relu").ints("pads", &[0, 1, 0, 0]),
            vec![Input(q(&[1, 1, 2, 3], 0)), Input(q(&[2, 1, 2, 2], 1)), Input(q(&[2], 2))],
            vec![f32s(&[1, 2, 1, 3], &[0., 1.625, 0., 0.1875, 0., 0.])],
        ),
        fused(
            "FusedConv",
            |n| n.string("activation", "Relu"),
            vec![Input(q(&[1, 1, 2, 3], 0)), Input(q(&[1, 1, 2, 2], 1)), Absent, Input(q(&[1, 1, 1, 2], 2))],
            vec![f32s(&[1, 1, 1, 2], &[1.625, 0.])],
        ),
        fused(
            "FusedConv",
            |n| n.string("activation", "Clip").floats("activation_params", &[-0.5, 0.5]),
            vec![Input(q(&[1, 1, 2, 3], 0)), Input(q(&[1, 1, 2, 2], 1))],
            vec![f32s(&[1, 1, 1, 2], &[0.5, -0.4375])],
        ),
        fused(
            "FusedConv",
            |n| n.string("activation", "Tanh"),
            vec![Input(q(&[1, 1, 2, 3], 0)), Input(q(&[1, 1, 2, 2], 1))],
            vec![f32s(&[1, 1, 1, 2], &[0.8798267, -0.4115701])],
        ),
        fused(
            "FusedConv",
            |n| n.string("activation", "Sigmoid"),
            vec![Input(q(&[1, 1, 2, 3], 0)), Input(q(&[1, 1, 2, 2], 1))],
            vec![f32s(&[1, 1, 1, 2], &[0.7981868, 0.3923368])],
        ),
    ]
}

fn activations() -> Vec<Case> {
    vec![
        fused(
            "BiasGelu",
            |n| n,
            vec![Input(q(&[2, 3], 0)), Input(q(&[3], 1))],
            vec![f32s(&[2, 3], &[-0.0701035, 1.6798965, -0.1003234, 0.5800295, 1.3997892, -0.1003234])],
        ),
        fused(
            "FastGelu",
            |n| n,
            vec![Input(q(&[2, 3], 0)), Input(q(&[3], 1))],
            vec![f32s(&[2, 3], &[-0.0702046, 1.6797954, -0.1003247, 0.5799606, 1.3995715, -0.1003247])],
        ),
        fused("FastGelu", |n| n, vec![Input(q(&[4], 0))], vec![f32s(&[4], &[-0.1322858, 0.345714, -0.154286, 1.1177142])]),
        fused("Gelu", |n| n, vec![Input(q(&[4], 0))], vec![f32s(&[4], &[-0.1320622, 0.3457312, -0.1542688, 1.1179378])]),
        fused("QuickGelu", |n| n, vec![Input(q(&[4], 0))], vec![f32s(&[4], &[-0.1330657, 0.3503884, -0.1496116, 1.1169343])]),
        fused(
            "QuickGelu",
            |n| n.float("alpha", 1.0),
            vec![Input(q(&[4], 0))],
            vec![f32s(&[4], &[-0.2783752, 0.3112296, -0.1887704, 0.9716249])],
        ),
    ]
}

fn blocks() -> Vec<Case> {
    vec![
        fused(
            "MatMulNBits",
            |n| n.int("N", 2).int("K", 20).int("block_size", 16).int("accuracy_level", 1),
            vec![
                Input(q(&[1, 20], 0)),
                Known(u8s(
                    &[2, 2, 8],
                    &[
                        217, 163, 130, 69, 78, 10, 19, 4, 44, 208, 166, 233, 128, 155, 248, 186, 161, 139, 143, 239, 71, 208,
                        171, 0, 100, 219, 141, 8, 195, 186, 216, 44,
                    ],
                )),
                Known(q(&[2, 2], 1)),
            ],
            vec![f32s(&[1, 2], &[3.9375, 1.3125])],
        ),
        fused(
            "MatMulNBits",
            |n| n.int("N", 2).int("K", 32).int("block_size", 16).int("bits", 4).int("accuracy_level", 1),
            vec![
                Input(q(&[1, 32], 0)),
                Known(u8s(
                    &[2, 2, 8],
                    &[
                        22, 220, 5, 138, 20, 76, 123, 108, 103, 7, 1, 31, 2, 171, 134, 165, 65, 157, 195, 98, 117, 255, 206, 251,
                        97, 175, 243, 166, 215, 176, 180, 99,
                    ],
                )),
                Known(q(&[4], 1)),
                Known(u8s(&[2], &[224, 34])),
                Absent,
                Input(q(&[2], 3)),
            ],
            vec![f32s(&[1, 2], &[12.5, -9.25])],
        ),
        fused(
            "MatMulNBits",
            |n| n.int("N", 2).int("K", 16).int("block_size", 16).int("bits", 4).int("accuracy_level", 1),
            vec![
                Input(q(&[2, 16], 0)),
                Known(u8s(&[2, 1, 8], &[148, 184, 216, 134, 96, 79, 108, 124, 184, 227, 18, 239, 136, 91, 172, 146])),
                Known(q(&[2, 1], 1)),
                Known(q(&[2, 1], 2)),
            ],
            vec![f32s(&[2, 2], &[-13.75, 69.0625, 14.625, -53.125])],
        ),
        fused(
            "MatMulNBits",
            |n| n.int("N", 2).int("K", 16).int("block_size", 16).int("bits", 8).int("accuracy_level", 1),
            vec![
                Input(q(&[1, 16], 0)),
                Known(u8s(
                    &[2, 1, 16],
                    &[
                        65, 82, 184, 152, 129, 86, 194, 100, 84, 227, 67, 58, 182, 159, 12, 21, 96, 213, 102, 201, 81, 61, 202,
                        224, 20, 14, 171, 86, 146, 38, 220, 115,
                    ],
                )),
                Known(q(&[2, 1], 1)),
                Known(u8s(&[2, 1], &[229, 203])),
            ],
            vec![f32s(&[1, 2], &[-92.375, 121.5625])],
        ),
        fused(
            "MatMulNBits",
            |n| n.int("N", 2).int("K", 16).int("block_size", 16).int("bits", 2).int("accuracy_level", 1),
            vec![Input(q(&[1, 16], 0)), Known(u8s(&[2, 1, 4], &[180, 59, 196, 13, 145, 103, 255, 50])), Known(q(&[2, 1], 1))],
            vec![f32s(&[1, 2], &[-0.375, -2.5])],
        ),
    ]
}

fn normalizations() -> Vec<Case> {
    vec![
        fused(
            "SkipLayerNormalization",
            |n| n.float("epsilon", 0.5),
            vec![Input(q(&[2, 1, 3], 0)), Input(q(&[1, 3], 1)), Input(q(&[3], 2)), Input(q(&[3], 3)), Input(q(&[3], 4))],
            vec![f32s(&[2, 1, 3], &[0.7239212, -0.91106, -1.1104316, 0.8687773, -0.9185587, -1.6998541])],
        ),
        fused(
            "SkipLayerNormalization",
            |n| n,
            vec![Input(q(&[1, 2, 3], 0)), Input(q(&[1, 2, 3], 1)), Input(q(&[3], 2))],
            vec![f32s(&[1, 2, 3], &[-0.2906191, -0.959043, -0.1162476, 0., -0.9185586, -1.2247448])],
        ),
        fused(
            "SkipSimplifiedLayerNormalization",
            |n| n.float("epsilon", 0.5),
            vec![Input(q(&[2, 3], 0)), Input(q(&[2, 3], 1)), Input(q(&[3], 2)), Input(q(&[3], 4))],
            vec![f32s(&[2, 3], &[-0.3018517, -0.8232319, -0.2195285, -0.0883883, -1.0606601, -0.3535534])],
        ),
        case(
            "SimplifiedLayerNormalization",
            18,
            |n| n.float("epsilon", 0.5),
            vec![Input(q(&[2, 3], 0)), Input(q(&[3], 2))],
            vec![
                f32s(&[2, 3], &[-0.2867697, -0.3441236, -0.4588315, 0.2946278, -0.1767767, -0.4714046]),
                f32s(&[2, 1], &[0.9176629, 0.9428091]),
            ],
        ),
        fused(
            "EmbedLayerNormalization",
            |n| n,
            vec![
                Input(i32s(&[2, 2], &[2, 0, 1, 1])),
                Input(i32s(&[2, 2], &[0, 1, 1, 1])),
                Input(q(&[3, 2], 0)),
                Input(q(&[2, 2], 1)),
                Input(q(&[2, 2], 2)),
                Input(q(&[2], 3)),
                Input(q(&[2], 4)),
                Input(i32s(&[2, 2], &[1, 0, 1, 1])),
            ],
            vec![
                f32s(&[2, 2, 2], &[-1., 0.75, 0., 0.75, -2., 0.75, 0., 0.75]),
                i32s(&[2], &[1, 2]),
                f32s(&[2, 2, 2], &[0., 0., 0., -0.25, 0., 2.5, 0.75, 0.5]),
            ],
        ),
        fused(
            "EmbedLayerNormalization",
            |n| n.float("epsilon", 0.5),
            vec![
                Input(i32s(&[1, 2], &[2, 0])),
                Absent,
                Input(q(&[3, 2], 0)),
                Input(q(&[3, 2], 1)),
                Absent,
                Input(q(&[2], 3)),
                Input(q(&[2], 4)),
                Absent,
                Input(i32s(&[1, 2], &[2, 1])),
            ],
            vec![f32s(&[1, 2, 2], &[-0.2723931, 0.75, -1.4685212, 0.75]), i32s(&[1], &[0])],
        ),
    ]
}
