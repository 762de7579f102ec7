use std::collections::HashSet;

use super::*;
use crate::interpreter::{Environment, interpret};
use crate::{ArgOp, BinaryOp, CompareOp, Composite, Op, ReduceOp, ScatterOp, UnaryOp};

/// The ops that are not listed by an `ALL`. The matches make a new variant a compile error: give it a sample and a name below.
const OTHERS: [&str; 31] = [
    "input",
    "constant",
    "iota",
    "random_uniform",
    "select",
    "cast",
    "reshape",
    "transpose",
    "broadcast",
    "slice",
    "pad",
    "concat",
    "unfold",
    "fold",
    "dot",
    "conv",
    "gather",
    "softmax",
    "log_softmax",
    "normalize",
    "rms_normalize",
    "gelu",
    "gelu_tanh",
    "silu",
    "relu",
    "max_pool",
    "attention",
    "attention_lse",
    "attention_dq",
    "attention_dk",
    "attention_dv",
];

fn is_known(op: &Op) -> bool {
    match op {
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Reduce { .. } | Op::ArgReduce { .. } | Op::Scatter { .. } => true,
        Op::Composite(c) => match c {
            Composite::Softmax { .. }
            | Composite::LogSoftmax { .. }
            | Composite::Normalize { .. }
            | Composite::RmsNormalize { .. }
            | Composite::Gelu
            | Composite::GeluTanh
            | Composite::Silu
            | Composite::Relu
            | Composite::MaxPool(_)
            | Composite::Attention(_)
            | Composite::AttentionLse(_)
            | Composite::AttentionGradient { .. } => OTHERS.contains(&c.name()),
        },
        Op::Input(_) | Op::Constant(_) | Op::Iota { .. } | Op::Select | Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) => true,
        Op::Broadcast { .. } | Op::Slice(_) | Op::Pad(_) | Op::Concat { .. } | Op::Unfold(_) | Op::Fold { .. } => true,
        Op::Dot(_) | Op::Conv(_) | Op::Gather { .. } | Op::RandomUniform { .. } => true,
        Op::Parameter(_) => false,
    }
}

#[test]
fn every_op_has_a_sample() {
    assert!(sample_graphs().iter().all(|(_, g)| g.nodes().iter().all(|n| is_known(&n.op))));
    let found: HashSet<&'static str> =
        sample_graphs().iter().flat_map(|(_, g)| g.nodes().iter().map(|n| n.op.name()).collect::<Vec<_>>()).collect();
    let expected = (UnaryOp::ALL.iter().map(|o| o.name()))
        .chain(BinaryOp::ALL.iter().map(|o| o.name()))
        .chain(CompareOp::ALL.iter().map(|o| o.name()))
        .chain(ReduceOp::ALL.iter().map(|o| o.name()))
        .chain(ArgOp::ALL.iter().map(|o| o.name()))
        .chain(ScatterOp::ALL.iter().map(|o| o.name()))
        .chain(OTHERS);
    let missing: Vec<_> = expected.filter(|name| !found.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn samples_verify_and_evaluate_to_finite_numbers_of_their_type() {
    let mut names = HashSet::new();
    for (name, g) in sample_graphs() {
        assert!(names.insert(name.clone()), "{name:?} twice");
        let inputs: Vec<Tensor> = g.inputs().iter().enumerate().map(|(i, x)| random_tensor(&x.ty, i as u64)).collect();
        let g = g.verify().unwrap();
        let evaluation = interpret::<f64>(&g, &Environment::from_tensors(&inputs, [])).unwrap();
        let y = evaluation.outputs()[0];
        y.check(g.ty(g.outputs()[0].node)).unwrap();
        // Empty reductions are infinite; the padding of an empty window is the lowest number.
        let empty = g.inputs().iter().any(|x| x.ty.shape.numel() == 0) || name.contains("max_pool");
        assert!(empty || y.to_f64_vec().iter().all(|v| v.is_finite()), "{name}");
    }
}

#[test]
fn random_floats_are_apart_and_within_bounds() {
    let ty = TensorType::new(DType::F32, [7, 33]);
    let tensor = random_tensor(&ty, 3);
    assert_eq!(tensor, random_tensor(&ty, 3));
    assert_ne!(tensor, random_tensor(&ty, 4));
    let mut values = tensor.to_f64_vec();
    values.sort_by(f64::total_cmp);
    assert!(values[0] > -2.0 && values[230] < 2.0);
    assert!(values.windows(2).all(|w| w[1] - w[0] > 1.9 / 231.0));
}

#[test]
fn random_integers_stay_small() {
    let signed = random_tensor(&TensorType::new(DType::I8, [257]), 1).to_i64_vec();
    assert!(signed.iter().all(|v| (-4..=4).contains(v)) && signed.contains(&-4) && signed.contains(&4));
    let unsigned = random_tensor(&TensorType::new(DType::U8, [257]), 1).to_i64_vec();
    assert!(unsigned.iter().all(|v| (0..=8).contains(v)) && unsigned.contains(&8));
}

#[test]
fn relative_error_is_that_of_the_whole_vector() {
    assert_eq!(relative_l2(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    assert_eq!(relative_l2(&[3.0, 5.0], &[3.0, 4.0]), 0.2);
    assert_eq!(relative_l2(&[2.0], &[0.0]), 2.0);
    assert_eq!(relative_l2(&[], &[]), 0.0);
    assert_eq!(relative_l2(&[f64::NAN, f64::INFINITY], &[f64::NAN, f64::INFINITY]), 0.0);
    assert_eq!(relative_l2(&[f64::NAN, 1.0], &[0.0, 1.0]), f64::INFINITY);
}
