//! Expected numbers are those of onnxruntime on the CPU; it has packed operands on the GPU only, whose numbers are those of the
//! same operands apart.

use meganeura_ir::DType;

use super::microsoft::fused;
use super::{Absent, Case, Input, Known};
use crate::Bindings;
use crate::testing::{ModelBuilder, NodeBuilder, f32s, i32s, i64s, node, quarters as q};

pub(super) fn cases() -> Vec<Case> {
    [rotations(), multi_head(), projected(), grouped()].into_iter().flatten().collect()
}

fn rotations() -> Vec<Case> {
    vec![
        fused(
            "RotaryEmbedding",
            |n| n,
            vec![Input(q(&[1, 2, 4], 0)), Input(i64s(&[1, 2], &[3, 1])), Input(q(&[4, 1], 3)), Input(q(&[4, 1], 4))],
            vec![f32s(&[1, 2, 4], &[-0.3125, 1.9375, 1.1875, 1.5625, 0.375, 0.1875, -0.1875, 0.9375])],
        ),
        fused(
            "RotaryEmbedding",
            |n| n.int("interleaved", 1),
            vec![Input(q(&[1, 1, 2, 4], 0)), Input(i64s(&[1], &[1])), Input(q(&[4, 2], 3)), Input(q(&[4, 2], 4))],
            vec![f32s(&[1, 1, 2, 4], &[1.375, -0.1875, 1.1875, 1.5625, 0.1875, 0.25, -1.1875, -0.5625])],
        ),
        fused(
            "RotaryEmbedding",
            |n| n.int("num_heads", 1).int("rotary_embedding_dim", 2),
            vec![Input(q(&[1, 2, 4], 0)), Input(i64s(&[1], &[2])), Input(q(&[4, 1], 3)), Input(q(&[4, 1], 4))],
            vec![f32s(&[1, 2, 4], &[1.375, -0.1875, -0.5, 1.25, -0.4375, -0.6875, 1.25, 0.25])],
        ),
    ]
}

fn multi_head() -> Vec<Case> {
    vec![
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 4], 0)), Input(q(&[1, 3, 4], 1)), Input(q(&[1, 3, 2], 2))],
            vec![f32s(&[1, 2, 2], &[0.0991205, 0.0804721, -0.0594549, 0.3878613])],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2).float("scale", 0.5),
            vec![
                Input(q(&[1, 2, 4], 0)),
                Input(q(&[1, 3, 4], 1)),
                Input(q(&[1, 3, 2], 2)),
                Input(q(&[10], 3)),
                Input(i32s(&[1, 3], &[1, 0, 1])),
            ],
            vec![f32s(&[1, 2, 2], &[-1.4358065, 0.7067918, -1.8822312, 0.8264037])],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2).float("mask_filter_value", -1.0),
            vec![Input(q(&[1, 2, 4], 0)), Input(q(&[1, 3, 4], 1)), Input(q(&[1, 3, 2], 2)), Absent, Input(i32s(&[1], &[2]))],
            vec![f32s(&[1, 2, 2], &[0.2549897, -0.0245784, 0.3245802, 0.027355])],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2),
            vec![
                Input(q(&[1, 2, 4], 0)),
                Input(q(&[1, 3, 4], 1)),
                Input(q(&[1, 3, 2], 2)),
                Absent,
                Input(i32s(&[1, 2, 3], &[0, 1, 1, 1, 1, 0])),
                Input(q(&[1, 1, 2, 3], 3)),
            ],
            vec![f32s(&[1, 2, 2], &[0.2720063, 0.075676, 0.5543634, -0.6213207])],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2).int("unidirectional", 1),
            vec![
                Input(q(&[1, 2, 4], 0)),
                Input(q(&[1, 2, 4], 1)),
                Input(q(&[1, 2, 4], 2)),
                Absent,
                Absent,
                Absent,
                Input(q(&[1, 2, 1, 2], 3)),
                Input(q(&[1, 2, 1, 2], 4)),
            ],
            vec![
                f32s(&[1, 2, 4], &[0.0677247, -0.5312696, -0.0677247, -1.0677247, -0.744097, 0.5379356, 0.4471782, -0.5528218]),
                f32s(&[1, 2, 3, 2], &[1., 0., -0.5, 1.25, 1., 0.25, -1., 0.75, 0.25, -0.75, -0.75, 1.]),
                f32s(&[1, 2, 3, 2], &[-1., 0.75, 0.25, -0.75, -1., 1., -0.25, -1.25, 1., 0., 0., -1.]),
            ],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 4], 0)), Input(q(&[1, 2, 3, 2], 1)), Input(q(&[1, 2, 3, 2], 2)), Input(q(&[12], 3))],
            vec![f32s(
                &[1, 2, 4],
                &[0.072678, -0.1072661, -0.0168917, -0.9187588, -0.1142781, 0.4478908, -0.2378372, -0.2900984],
            )],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 2, 3, 2], 0))],
            vec![f32s(&[1, 2, 4], &[0.1031303, -0.7937395, 0.0329528, -0.9670472, 0.1468697, -0.7062605, 0.0110414, -0.9889587])],
        ),
        fused(
            "MultiHeadAttention",
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 4], 0)), Input(q(&[1, 2, 2, 2, 2], 1))],
            vec![f32s(
                &[1, 2, 4],
                &[0.4186618, -0.5813382, -0.3703315, -0.5186742, 0.7807198, -0.2192803, -0.6714111, 0.6856444],
            )],
        ),
    ]
}

fn projected() -> Vec<Case> {
    vec![
        fused(
            "Attention",
            |n| n.int("num_heads", 2).int("unidirectional", 1),
            vec![Input(q(&[1, 2, 2], 0)), Input(q(&[2, 12], 1)), Input(q(&[12], 2))],
            vec![f32s(&[1, 2, 4], &[0.625, 0.375, -2., 0.5, 0.5626212, -0.1864089, -1.7576754, 0.4192251])],
        ),
        fused(
            "Attention",
            |n| n.int("num_heads", 2).ints("qkv_hidden_sizes", &[4, 4, 2]),
            vec![Input(q(&[1, 2, 2], 0)), Input(q(&[2, 10], 1)), Absent, Input(i32s(&[1, 2], &[1, 0]))],
            vec![f32s(&[1, 2, 2], &[-0.625, 1.5, -0.625, 1.5])],
        ),
        fused(
            "Attention",
            |n| n.int("num_heads", 2).float("scale", 0.5).float("mask_filter_value", -1.0),
            vec![Input(q(&[1, 2, 2], 0)), Input(q(&[2, 12], 1)), Input(q(&[12], 2)), Input(i32s(&[2], &[2, 1]))],
            vec![f32s(&[1, 2, 4], &[0.4793832, -0.9355512, -1.2179775, 0.2393258, 0.5079449, -0.6784954, -1.4133449, 0.3044483])],
        ),
        fused(
            "Attention",
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 2], 0)), Input(q(&[2, 12], 1)), Input(q(&[12], 2)), Absent, Input(q(&[2, 1, 2, 1, 2], 3))],
            vec![
                f32s(&[1, 2, 4], &[0.0122901, -0.8677099, -0.5176774, 0.0789508, 0.4428449, -0.3063281, -1.5614018, 0.3668455]),
                f32s(
                    &[2, 1, 2, 3, 2],
                    &[
                        1., 0., -1.875, 0.5625, -0.5625, 0.5625, -1., 0.75, 0.3125, -2., -1.1875, -0.875, -0.25, -1., 0.625,
                        0.375, 0.4375, -1.3125, 0.75, -0.25, -2., 0.5, -0.875, 0.125,
                    ],
                ),
            ],
        ),
        fused(
            "Attention",
            |n| n.int("num_heads", 2),
            vec![Input(q(&[1, 2, 2], 0)), Input(q(&[2, 12], 1)), Input(q(&[12], 2)), Absent, Absent, Input(q(&[1, 1, 2, 2], 4))],
            vec![f32s(&[1, 2, 4], &[0.4579916, -1.1280756, -1.0799927, 0.1933309, 0.5959411, 0.1134699, -1.8968024, 0.4656008])],
        ),
    ]
}

fn grouped() -> Vec<Case> {
    vec![
        fused(
            "GroupQueryAttention",
            |n| n.int("num_heads", 2).int("kv_num_heads", 1).float("scale", 0.5),
            vec![
                Input(q(&[1, 2, 16], 0)),
                Input(q(&[1, 2, 8], 1)),
                Input(q(&[1, 2, 8], 2)),
                Absent,
                Absent,
                Input(i32s(&[1], &[1])),
                Known(i32s(&[1], &[2])),
            ],
            vec![
                f32s(
                    &[1, 2, 16],
                    &[
                        0.25, -0.75, 1., 0., -1., 1., 0., -1., 0.25, -0.75, 1., 0., -1., 1., 0., -1., 0.7377884, -0.2622115,
                        -0.9511538, 0.7316827, -0.2683173, -1.195048, 0.4877884, -0.2683173, 0.6633559, -0.3366441, -0.6534235,
                        0.6200339, -0.3799661, -0.8601015, 0.4133559, -0.3799661,
                    ],
                ),
                f32s(&[1, 1, 2, 8], &[-0.5, 1.25, 0.25, -0.75, 1., 0.25, -0.75, 1., 0., -1., 1., 0., -1., 0.75, -0.25, -1.]),
                f32s(&[1, 1, 2, 8], &[0.25, -0.75, 1., 0., -1., 1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25, 0.5, -0.25]),
            ],
        ),
        fused(
            "GroupQueryAttention",
            |n| n.int("num_heads", 2).int("kv_num_heads", 1).float("softcap", 0.5).int("causal", 0),
            vec![Input(q(&[1, 2, 32], 0)), Absent, Absent, Absent, Absent, Input(i32s(&[1], &[1])), Known(i32s(&[1], &[2]))],
            vec![
                f32s(
                    &[1, 2, 16],
                    &[
                        0.5, -0.3748415, -0.0015851, 0.3751585, -0.5, 1.2499999, 0.3751585, -0.6248415, 0.5, -0.3748767,
                        -0.0012328, 0.3751233, -0.5, 1.2499999, 0.3751233, -0.6248767, 0.5000001, -0.373656, -0.0134407,
                        0.3763441, -0.5000001, 1.2500001, 0.3763441, -0.623656, 0.5, -0.375, 0., 0.375, -0.5, 1.25, 0.375,
                        -0.625,
                    ],
                ),
                f32s(
                    &[1, 1, 2, 8],
                    &[0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25, -0.25, -1.25, 0.75, -0.25, -1.25, 0.5, -0.5, -1.25],
                ),
                f32s(
                    &[1, 1, 2, 8],
                    &[0.5, -0.25, -1.25, 0.5, -0.5, 1.25, 0.5, -0.5, 0.5, -0.5, 1.25, 0.25, -0.5, 1.25, 0.25, -0.75],
                ),
            ],
        ),
        fused(
            "GroupQueryAttention",
            |n| n.int("num_heads", 2).int("kv_num_heads", 1),
            vec![
                Input(q(&[2, 1, 16], 0)),
                Input(q(&[2, 1, 8], 1)),
                Input(q(&[2, 1, 8], 2)),
                Input(q(&[2, 1, 2, 8], 3)),
                Input(q(&[2, 1, 2, 8], 4)),
                Input(i32s(&[2], &[1, 2])),
                Known(i32s(&[1], &[3])),
            ],
            vec![
                f32s(
                    &[2, 1, 16],
                    &[
                        -0.5748929, 0.2398715, 0.175107, -0.8248929, -0.0101285, 0.175107, -0.8248929, -0.0101285, 0.1757439,
                        -0.6608926, 0.9257439, -0.0742561, -0.9108927, 0.9257439, -0.0742561, -0.9108927, 0.7328097, -0.1531491,
                        -0.9312387, 0.7242146, -0.2671904, -1.1726435, 0.596851, -0.2757856, 0.6822574, -0.2084844, -0.7290294,
                        0.648386, -0.3177426, -0.945158, 0.5415155, -0.3516139,
                    ],
                ),
                f32s(
                    &[2, 1, 3, 8],
                    &[
                        1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -0.5, 1.25, 0.25, -0.75, 1., 0.25, -0.75, 1., 0., 0., 0., 0.,
                        0., 0., 0., 0., -0.5, 1.25, 0.25, -0.75, 1.25, 0.25, -0.75, 1., 0., -0.75, 1., 0., -1., 0.75, 0., -1.,
                        0., -1., 1., 0., -1., 0.75, -0.25, -1.,
                    ],
                ),
                f32s(
                    &[2, 1, 3, 8],
                    &[
                        -1., 0.75, -0.25, -1.25, 0.5, -0.25, -1.25, 0.5, 0.25, -0.75, 1., 0., -1., 1., 0., -1., 0., 0., 0., 0.,
                        0., 0., 0., 0., 0.25, -0.75, 1., 0., -0.75, 1., 0., -1., 0.75, 0., -1., 0.75, -0.25, -1.25, 0.75, -0.25,
                        0.75, -0.25, -1., 0.75, -0.25, -1.25, 0.5, -0.25,
                    ],
                ),
            ],
        ),
        fused(
            "GroupQueryAttention",
            |n| n.int("num_heads", 2).int("kv_num_heads", 1).int("local_window_size", 2).int("smooth_softmax", 1),
            vec![
                Input(q(&[1, 3, 16], 0)),
                Input(q(&[1, 3, 8], 1)),
                Input(q(&[1, 3, 8], 2)),
                Absent,
                Absent,
                Input(i32s(&[1], &[2])),
                Known(i32s(&[1], &[3])),
            ],
            vec![
                f32s(
                    &[1, 3, 16],
                    &[
                        0.1167257, -0.3501771, 0.4669028, 0., -0.4669028, 0.4669028, 0., -0.4669028, 0.2135449, -0.6406348,
                        0.8541797, 0., -0.8541797, 0.8541797, 0., -0.8541797, 0.6057128, -0.2406449, -0.7301357, 0.591185,
                        -0.2551727, -0.9271974, 0.3941233, -0.2551727, 0.4000889, -0.2394555, -0.3212669, 0.3603042, -0.2792402,
                        -0.4413683, 0.2402028, -0.2792402, -0.834639, 0.3383785, -0.4514502, 0.9703251, 0.3383785, -0.4740646,
                        0.9477108, 0.1578821, -0.1068858, 0.0547381, -0.3543326, 0.4663992, 0.0547381, -0.4142515, 0.4064803,
                        -0.0025904,
                    ],
                ),
                f32s(
                    &[1, 1, 3, 8],
                    &[
                        -0.5, 1.25, 0.25, -0.75, 1., 0.25, -0.75, 1., 0., -1., 1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25,
                        0.5, -0.25, -1.25, 0.5, -0.5,
                    ],
                ),
                f32s(
                    &[1, 1, 3, 8],
                    &[
                        0.25, -0.75, 1., 0., -1., 1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25, 0.5, -0.25, -1.25, 0.5,
                        -0.5, 1.25, 0.5, -0.5, 1.25, 0.25,
                    ],
                ),
            ],
        ),
        fused(
            "GroupQueryAttention",
            |n| n.int("num_heads", 2).int("kv_num_heads", 1),
            vec![
                Input(q(&[1, 1, 16], 0)),
                Input(q(&[1, 1, 8], 1)),
                Input(q(&[1, 1, 8], 2)),
                Input(q(&[1, 1, 2, 8], 3)),
                Input(q(&[1, 1, 2, 8], 4)),
                Known(i32s(&[1], &[2])),
                Known(i32s(&[1], &[3])),
                Absent,
                Absent,
                Absent,
                Input(q(&[1, 2, 1, 3], 5)),
                Input(q(&[2], 6)),
            ],
            vec![
                f32s(
                    &[1, 1, 16],
                    &[
                        -0.2555081, 0.1486899, 0.2850578, -0.3913181, 0.0128798, 0.2517738, -0.424602, 0.0128798, -0.080585,
                        0.1112034, 0.7458207, -0.2199617, -0.0281732, 0.6437517, -0.3220307, -0.0281732,
                    ],
                ),
                f32s(
                    &[1, 1, 3, 8],
                    &[
                        1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25, 0.5, -0.25, -1.25, 0.5, -0.5, 1.25, 0.5, -0.5, 1.25,
                        0.25, -0.75, 1., 0.25, -0.75, 1.,
                    ],
                ),
                f32s(
                    &[1, 1, 3, 8],
                    &[
                        -1., 0.75, -0.25, -1.25, 0.5, -0.25, -1.25, 0.5, -0.5, 1.25, 0.5, -0.5, 1.25, 0.25, -0.75, 1.25, 0.25,
                        -0.75, 1., 0., -1., 1., 0., -1.,
                    ],
                ),
            ],
        ),
        fused(
            "GroupQueryAttention",
            |n| n.int("num_heads", 1).int("kv_num_heads", 1).int("do_rotary", 1).int("rotary_interleaved", 1),
            vec![
                Input(q(&[1, 1, 16], 0)),
                Input(q(&[1, 1, 16], 1)),
                Input(q(&[1, 1, 16], 2)),
                Input(q(&[1, 1, 1, 16], 3)),
                Input(q(&[1, 1, 1, 16], 4)),
                Known(i32s(&[1], &[1])),
                Known(i32s(&[1], &[2])),
                Known(q(&[3, 8], 5)),
                Known(q(&[3, 8], 6)),
            ],
            vec![
                f32s(
                    &[1, 1, 16],
                    &[
                        -0.3688967, -0.007324, 0.3811033, -0.6188967, -0.257324, 0.3811033, -0.6188967, -0.257324, 0.1311033,
                        0.492676, -0.257324, 0.1311033, 0.492676, -0.507324, -0.1188967, 0.492676,
                    ],
                ),
                f32s(
                    &[1, 1, 2, 16],
                    &[
                        1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25, 0.5, -0.25, -1.25, 0.5, -0.5, 1.25, 0.5, -1.375,
                        -0.1875, -0.1875, 0.5625, 1.4375, -0.4375, -1.1875, -0.5, 0., 0.75, 1., -1., -0.5625, -0.75, 0.1875,
                        0.75,
                    ],
                ),
                f32s(
                    &[1, 1, 2, 16],
                    &[
                        -1., 0.75, -0.25, -1.25, 0.5, -0.25, -1.25, 0.5, -0.5, 1.25, 0.5, -0.5, 1.25, 0.25, -0.75, 1.25, 0.25,
                        -0.75, 1., 0., -1., 1., 0., -1., 0.75, -0.25, -1., 0.75, -0.25, -1.25, 0.5, -0.25,
                    ],
                ),
            ],
        ),
    ]
}

/// What is said about a node of onnxruntime's operators on float operands of these sizes, and integer ones where a name says so.
fn refusal(op: &str, operands: &[(&str, &str)], attributes: impl Fn(NodeBuilder) -> NodeBuilder) -> String {
    let names: Vec<&str> = operands.iter().map(|&(name, _)| name).collect();
    let mut builder = ModelBuilder::new(18).import("com.microsoft", 1).output("y");
    for &(name, dims) in operands.iter().filter(|(name, _)| !name.is_empty()) {
        let dtype = if name.starts_with("int") { DType::I32 } else { DType::F32 };
        builder = builder.input(name, dtype, dims);
    }
    let node = attributes(node(op, &names, &["y"]).domain("com.microsoft"));
    let model = builder.node(node).open().unwrap();
    model.specialize(&Bindings::default()).unwrap_err().to_string()
}

#[test]
fn what_attention_lacks_is_named() {
    let absent = ("", "");
    let heads = |n: NodeBuilder| n.int("num_heads", 2);
    let grouped = |n: NodeBuilder| n.int("num_heads", 2).int("kv_num_heads", 2);
    let (q, k, v) = (("q", "1,2,4"), ("k", "1,3,4"), ("v", "1,3,4"));
    let of_group = [q, ("k", "1,2,4"), ("v", "1,2,4"), absent, absent, ("int_lengths", "1"), ("int_total", "")];
    let quantised = |n| grouped(n).string("k_quant_type", "PER_TENSOR");
    let table: [(String, &str); 8] = [
        (refusal("MultiHeadAttention", &[q, k, v], |n| n), "attribute \"num_heads\" is missing"),
        (refusal("MultiHeadAttention", &[q, k, v], |n| n.int("num_heads", 3)), "input 0"),
        (refusal("MultiHeadAttention", &[q, k, v], |n| heads(n).int("unidirectional", 1)), "another sequence is not supported"),
        (refusal("MultiHeadAttention", &[q, k, v, absent, ("int_mask", "5")], heads), "a padding mask of shape"),
        (refusal("MultiHeadAttention", &[q, k, ("v", "1,2,4")], heads), "input 2"),
        (refusal("GroupQueryAttention", &of_group, grouped), "int_total"),
        (refusal("GroupQueryAttention", &of_group, quantised), "a quantised cache is not supported"),
        (refusal("Attention", &[("x", "1,2,4"), ("w", "4,12")], |n| heads(n).int("do_rotary", 1)), "attribute do_rotary"),
    ];
    for (found, expected) in table {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    }
}
