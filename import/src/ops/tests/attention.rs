//! Expected numbers are those of the reference implementation in the `onnx` package.

use super::{Absent, Case, Input, case};
use crate::testing::{bools, f32s, i64s, quarters as q};

pub(super) fn cases() -> Vec<Case> {
    [attention(), caches(), rotations(), recurrences()].into_iter().flatten().collect()
}

fn attention() -> Vec<Case> {
    vec![
        case(
            "Attention",
            23,
            |n| n,
            vec![Input(q(&[1, 2, 2, 2], 0)), Input(q(&[1, 1, 3, 2], 1)), Input(q(&[1, 1, 3, 3], 2))],
            vec![
                f32s(
                    &[1, 2, 2, 3],
                    &[
                        0.1735398, -0.8264602, 0.9676366, 0.1819415, -0.8180585, 0.955767, 0.0483354, -0.9516646, 0.9102631,
                        0.0453084, -0.9546916, 0.8570434,
                    ],
                ),
                q(&[1, 1, 3, 2], 1),
                q(&[1, 1, 3, 3], 2),
                f32s(
                    &[1, 2, 2, 3],
                    &[
                        0.8838835, -0.4861359, -0.7954952, 1.281631, -0.7513009, -0.1325825, -0.5303301, 0.3093592, 0.0883883,
                        -0.2209709, 0.0883883, 0.9280776,
                    ],
                ),
            ],
        ),
        case(
            "Attention",
            23,
            |n| n.float("scale", 0.5),
            vec![
                Input(q(&[1, 2, 2, 2], 0)),
                Input(q(&[1, 1, 3, 2], 1)),
                Input(q(&[1, 1, 3, 3], 2)),
                Input(bools(&[2, 3], &[1, 0, 1, 1, 1, 0])),
            ],
            vec![f32s(
                &[1, 2, 2, 3],
                &[
                    0.1915734, -0.8084266, 0.9415734, 0.2020168, -0.7979832, 1., 0.0980842, -0.9019158, 0.8480843, 0.1113824,
                    -0.8886176, 1.,
                ],
            )],
        ),
        case(
            "Attention",
            23,
            |n| n.int("q_num_heads", 2).int("kv_num_heads", 1).int("is_causal", 1),
            vec![
                Input(q(&[1, 2, 4], 0)),
                Input(q(&[1, 1, 2], 1)),
                Input(q(&[1, 1, 2], 2)),
                Absent,
                Input(q(&[1, 1, 2, 2], 4)),
                Input(q(&[1, 1, 2, 2], 5)),
            ],
            vec![
                f32s(&[1, 2, 4], &[0.0340498, -0.9659502, 0.0580741, -0.9419259, 0.2686507, -0.7313493, 0.210768, -0.789232]),
                f32s(&[1, 1, 3, 2], &[-1., 0.75, -0.25, -1.25, -0.5, 1.25]),
                f32s(&[1, 1, 3, 2], &[-0.25, -1.25, 0.5, -0.5, 0.25, -0.75]),
            ],
        ),
        case(
            "Attention",
            23,
            |n| n.float("softcap", 0.5).int("qk_matmul_output_mode", 1),
            vec![Input(q(&[1, 1, 2, 2], 0)), Input(q(&[1, 1, 2, 2], 1)), Input(q(&[1, 1, 2, 2], 2)), Input(q(&[2, 2], 3))],
            vec![
                f32s(&[1, 1, 2, 2], &[0.3522104, -0.6477896, 0.7679769, -0.2320231]),
                q(&[1, 1, 2, 2], 1),
                q(&[1, 1, 2, 2], 2),
                f32s(&[1, 1, 2, 2], &[0.4716821, -0.3748505, 0.4940979, -0.4528087]),
            ],
        ),
        case(
            "Attention",
            23,
            |n| n.int("is_causal", 1).int("qk_matmul_output_mode", 2),
            vec![Input(q(&[1, 1, 2, 2], 0)), Input(q(&[1, 1, 2, 2], 1)), Input(q(&[1, 1, 2, 2], 2))],
            vec![
                f32s(&[1, 1, 2, 2], &[0.25, -0.75, 0.3368413, -0.6631587]),
                q(&[1, 1, 2, 2], 1),
                q(&[1, 1, 2, 2], 2),
                f32s(&[1, 1, 2, 2], &[0.8838835, f32::NEG_INFINITY, 1.281631, -0.7513009]),
            ],
        ),
        case(
            "Attention",
            23,
            |n| n.int("is_causal", 1).int("qk_matmul_output_mode", 3),
            vec![Input(q(&[1, 1, 2, 2], 0)), Input(q(&[1, 1, 2, 2], 1)), Input(q(&[1, 1, 2, 2], 2))],
            vec![
                f32s(&[1, 1, 2, 2], &[0.25, -0.75, 0.3368413, -0.6631587]),
                q(&[1, 1, 2, 2], 1),
                q(&[1, 1, 2, 2], 2),
                f32s(&[1, 1, 2, 2], &[1., 0., 0.8842116, 0.1157884]),
            ],
        ),
        case(
            "Attention",
            24,
            |n| n,
            vec![
                Input(q(&[2, 1, 1, 2], 0)),
                Input(q(&[2, 1, 3, 2], 1)),
                Input(q(&[2, 1, 3, 2], 2)),
                Input(q(&[2, 1, 1, 2], 3)),
                Absent,
                Absent,
                Input(i64s(&[2], &[1, 2])),
            ],
            vec![f32s(&[2, 1, 1, 2], &[0.25, -0.75, 0.3223013, -0.6776987])],
        ),
        case(
            "Attention",
            24,
            |n| n,
            vec![
                Input(q(&[1, 1, 2, 2], 0)),
                Input(q(&[1, 1, 3, 2], 1)),
                Input(q(&[1, 1, 3, 2], 2)),
                Input(bools(&[2, 2], &[1, 1, 0, 0])),
            ],
            vec![f32s(&[1, 1, 2, 2], &[0.4019625, -0.5980375, f32::NAN, f32::NAN])],
        ),
        case(
            "FlexAttention",
            26,
            |n| n.domain("ai.onnx.preview").float("scale", 0.5),
            vec![Input(q(&[1, 2, 2, 2], 0)), Input(q(&[1, 1, 3, 2], 1)), Input(q(&[1, 1, 3, 3], 2))],
            vec![f32s(
                &[1, 2, 2, 3],
                &[
                    0.1484085, -0.8515916, 0.954738, 0.1557244, -0.8442756, 0.9427122, 0.0573448, -0.9426552, 0.9111826,
                    0.0555796, -0.9444205, 0.8747495,
                ],
            )],
        ),
    ]
}

fn caches() -> Vec<Case> {
    vec![
        case(
            "TensorScatter",
            24,
            |n| n,
            vec![Input(q(&[2, 3, 2], 0)), Input(q(&[2, 2, 2], 1))],
            vec![f32s(&[2, 3, 2], &[-0.5, 1.25, 0.25, -0.75, 0.25, -0.5, 1., 0.25, -0.75, 1., 0.25, -0.75])],
        ),
        case(
            "TensorScatter",
            24,
            |n| n,
            vec![Input(q(&[2, 3, 2], 0)), Input(q(&[2, 2, 2], 1)), Input(i64s(&[2], &[1, 0]))],
            vec![f32s(&[2, 3, 2], &[-1.25, 0.5, -0.5, 1.25, 0.25, -0.75, 1., 0.25, -0.75, 1., 0.25, -0.75])],
        ),
        case(
            "TensorScatter",
            24,
            |n| n.int("axis", -1).string("mode", "circular"),
            vec![Input(q(&[2, 2, 4], 0)), Input(q(&[2, 2, 2], 1)), Input(i64s(&[2], &[3, 1]))],
            vec![f32s(&[2, 2, 4], &[1.25, 0.5, -0.5, -0.5, -0.75, -0.5, 1.25, 0.25, -0.75, 1., 0.25, -0.75, 1., -0.75, 1., 1.])],
        ),
    ]
}

fn rotations() -> Vec<Case> {
    vec![
        case(
            "RotaryEmbedding",
            23,
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 4], 0)), Input(q(&[4, 1], 3)), Input(q(&[4, 1], 4)), Input(i64s(&[1, 2], &[3, 1]))],
            vec![f32s(&[1, 2, 4], &[-0.3125, 1.9375, 1.1875, 1.5625, 0.375, 0.1875, -0.1875, 0.9375])],
        ),
        case(
            "RotaryEmbedding",
            23,
            |n| n.int("rotary_embedding_dim", 2),
            vec![Input(q(&[1, 1, 2, 4], 0)), Input(q(&[4, 1], 3)), Input(q(&[4, 1], 4)), Input(i64s(&[1, 2], &[0, 2]))],
            vec![f32s(&[1, 1, 2, 4], &[-0.75, 1.75, -0.5, 1.25, -0.375, 0.4375, 1.25, 0.25])],
        ),
        case(
            "RotaryEmbedding",
            23,
            |n| n.int("interleaved", 1),
            vec![Input(q(&[1, 1, 2, 4], 0)), Input(q(&[1, 2, 2], 1)), Input(q(&[1, 2, 2], 2))],
            vec![f32s(&[1, 1, 2, 4], &[0.5, -0.5625, 0.3125, 1.9375, 0.5625, 0.125, -0.9375, -0.1875])],
        ),
    ]
}

fn recurrences() -> Vec<Case> {
    vec![
        case(
            "CausalConvWithState",
            27,
            |n| n,
            vec![Input(q(&[1, 2, 3], 0)), Input(q(&[2, 1, 2], 1))],
            vec![f32s(&[1, 2, 3], &[-1.5625, 1.25, -0.875, -0.9375, 0.125, 0.4375]), f32s(&[1, 2, 1], &[-0.5, -0.5])],
        ),
        case(
            "CausalConvWithState",
            27,
            |n| n.string("activation", "silu"),
            vec![Input(q(&[1, 2, 1], 0)), Input(q(&[2, 1, 3], 1)), Input(q(&[2], 2)), Input(q(&[1, 2, 2], 3))],
            vec![f32s(&[1, 2, 1], &[-0.2041702, 0.6175619]), f32s(&[1, 2, 2], &[0., -1.25, 0.75, 0.5])],
        ),
        case(
            "LinearAttention",
            27,
            |n| n.int("q_num_heads", 2).int("kv_num_heads", 1).string("update_rule", "linear"),
            vec![Input(q(&[1, 2, 4], 0)), Input(q(&[1, 2, 2], 1)), Input(q(&[1, 2, 1], 2))],
            vec![f32s(&[1, 2, 2], &[0.2209709, 0.3204077, -0.3646019, -0.121534]), f32s(&[1, 1, 2, 1], &[-0.3125, 0.875])],
        ),
        case(
            "LinearAttention",
            27,
            |n| n.int("q_num_heads", 1).int("kv_num_heads", 1).string("update_rule", "gated").float("scale", 0.5),
            vec![
                Input(q(&[1, 2, 2], 0)),
                Input(q(&[1, 2, 2], 1)),
                Input(q(&[1, 2, 1], 2)),
                Input(q(&[1, 1, 2, 1], 3)),
                Input(q(&[1, 2, 2], 4)),
            ],
            vec![f32s(&[1, 2, 1], &[-0.0736746, 0.4071068]), f32s(&[1, 1, 2, 1], &[0.0016547, 0.6520327])],
        ),
        case(
            "LinearAttention",
            27,
            |n| n.int("q_num_heads", 2).int("kv_num_heads", 2),
            vec![
                Input(q(&[1, 2, 4], 0)),
                Input(q(&[1, 2, 4], 1)),
                Input(q(&[1, 2, 2], 2)),
                Absent,
                Input(q(&[1, 2, 2], 4)),
                Input(q(&[1, 2, 1], 5)),
            ],
            vec![
                f32s(&[1, 2, 2], &[-0.0552427, -0.1408689, -0.0836632, 0.0353518]),
                f32s(&[1, 2, 2, 1], &[-1.2142543, -0.3704917, 0.0606444, -0.1032424]),
            ],
        ),
        case(
            "LinearAttention",
            27,
            |n| n.int("q_num_heads", 1).int("kv_num_heads", 1).string("update_rule", "delta"),
            vec![
                Input(q(&[1, 2, 2], 0)),
                Input(q(&[1, 2, 2], 1)),
                Input(q(&[1, 2, 1], 2)),
                Absent,
                Absent,
                Input(q(&[1, 2, 1], 5)),
            ],
            vec![f32s(&[1, 2, 1], &[-0.0552427, -0.8468105]), f32s(&[1, 1, 2, 1], &[0.286377, -0.8435059])],
        ),
    ]
}
