use std::sync::Arc;

use super::*;
use crate::{ArgOp, CompareOp, Composite, Real, ScatterOp, Tensor};

fn ty(dtype: DType, shape: &[usize]) -> TensorType {
    TensorType::new(dtype, shape)
}

fn f32s(shape: &[usize]) -> TensorType {
    ty(DType::F32, shape)
}

fn error(op: Op, operands: &[TensorType]) -> TypeError {
    infer(&op, &operands.iter().collect::<Vec<_>>()).unwrap_err()
}

fn window(size: &[usize]) -> WindowDims {
    let ones = vec![1; size.len()];
    WindowDims { size: size.to_vec(), stride: ones.clone(), dilation: ones, pads: vec![(0, 0); size.len()] }
}

fn conv(stride: usize) -> ConvDims {
    ConvDims { stride: vec![stride], pads: vec![(0, 0)], input_dilation: vec![1], kernel_dilation: vec![1], groups: 1 }
}

#[test]
fn operand_counts_are_checked() {
    let x = f32s(&[7]);
    let cases: Vec<(Op, usize)> = vec![
        (Op::Constant(Arc::new(Tensor::scalar_f32(1.0))), 0),
        (Op::Iota { dtype: DType::I32, shape: Shape::from([3]), axis: 0 }, 0),
        (Op::RandomUniform { shape: Shape::from([3]), stream: 0 }, 1),
        (Op::Unary(UnaryOp::Exp), 1),
        (Op::Binary(BinaryOp::Add), 2),
        (Op::Compare(CompareOp::Lt), 2),
        (Op::Select, 3),
        (Op::Cast(DType::I8), 1),
        (Op::Reshape(Shape::from([7])), 1),
        (Op::Transpose(vec![0]), 1),
        (Op::Broadcast { shape: Shape::from([7]), axes: vec![0] }, 1),
        (Op::Slice(vec![SliceDim { start: 0, step: 1, size: 1 }]), 1),
        (Op::Pad(vec![PadDim::default()]), 2),
        (Op::Unfold(window(&[2])), 2),
        (Op::Fold { window: window(&[2]), sizes: vec![3] }, 1),
        (Op::Dot(DotDims::default()), 2),
        (Op::Conv(conv(1)), 2),
        (Op::Reduce { op: ReduceOp::Sum, axes: vec![0] }, 1),
        (Op::ArgReduce { op: ArgOp::Max, axis: 0 }, 1),
        (Op::Gather { axis: 0 }, 2),
        (Op::Scatter { op: ScatterOp::Add, axis: 0 }, 3),
        (Op::Composite(Composite::Gelu), 1),
    ];
    for (op, expected) in cases {
        let found = expected + 1;
        let name = op.name();
        assert_eq!(error(op, &vec![x.clone(); found]), TypeError::OperandCount { op: name, expected, found });
    }
    assert_eq!(error(Op::Concat { axis: 0 }, &[]), TypeError::OperandCount { op: "concat", expected: 1, found: 0 });
}

#[test]
fn dtypes_are_checked() {
    let (b, i, f) = (ty(DType::Bool, &[3]), ty(DType::I32, &[3]), f32s(&[3]));
    let epsilon = Real(1e-5);
    let cases: Vec<(Op, Vec<TensorType>, usize)> = vec![
        (Op::Iota { dtype: DType::Bool, shape: Shape::from([3]), axis: 0 }, vec![], 0),
        (Op::Unary(UnaryOp::Neg), vec![b.clone()], 0),
        (Op::Unary(UnaryOp::Exp), vec![i.clone()], 0),
        (Op::Unary(UnaryOp::Not), vec![f.clone()], 0),
        (Op::Unary(UnaryOp::IsNan), vec![i.clone()], 0),
        (Op::Binary(BinaryOp::Add), vec![b.clone(), b.clone()], 0),
        (Op::Binary(BinaryOp::Xor), vec![f.clone(), f.clone()], 0),
        (Op::Select, vec![i.clone(), f.clone(), f.clone()], 0),
        (Op::Reduce { op: ReduceOp::Sum, axes: vec![0] }, vec![b.clone()], 0),
        (Op::Fold { window: window(&[1]), sizes: vec![3] }, vec![ty(DType::I32, &[3, 1])], 0),
        (Op::Gather { axis: 0 }, vec![f.clone(), f.clone()], 1),
        (Op::Scatter { op: ScatterOp::Set, axis: 0 }, vec![f.clone(), b.clone(), f.clone()], 1),
        (Op::Composite(Composite::Softmax { axis: 0 }), vec![i.clone()], 0),
        (Op::Composite(Composite::Normalize { axes: vec![0], epsilon }), vec![i], 0),
        (Op::Composite(Composite::Relu), vec![b], 0),
    ];
    for (op, operands, at) in cases {
        let name = op.name();
        let found = error(op, &operands);
        assert!(matches!(found, TypeError::DType { op, operand, .. } if op == name && operand == at), "{name}: {found}");
    }
}

#[test]
fn operands_must_match_each_other() {
    let cases: Vec<(Op, Vec<TensorType>)> = vec![
        (Op::RandomUniform { shape: Shape::from([3]), stream: 0 }, vec![ty(DType::U32, &[2])]),
        (Op::RandomUniform { shape: Shape::from([3]), stream: 0 }, vec![ty(DType::I32, &[4])]),
        (Op::Binary(BinaryOp::Add), vec![f32s(&[3]), f32s(&[1])]),
        (Op::Binary(BinaryOp::Add), vec![f32s(&[3]), ty(DType::F16, &[3])]),
        (Op::Compare(CompareOp::Eq), vec![f32s(&[3]), f32s(&[3, 1])]),
        (Op::Select, vec![ty(DType::Bool, &[3]), f32s(&[3]), f32s(&[4])]),
        (Op::Select, vec![ty(DType::Bool, &[]), f32s(&[3]), f32s(&[3])]),
        (Op::Pad(vec![PadDim::default()]), vec![f32s(&[3]), f32s(&[1])]),
        (Op::Unfold(window(&[2])), vec![f32s(&[3]), ty(DType::F64, &[])]),
        (Op::Concat { axis: 0 }, vec![f32s(&[3, 2]), f32s(&[3, 1])]),
        (Op::Concat { axis: 0 }, vec![f32s(&[3]), f32s(&[])]),
        (
            Op::Dot(DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() }),
            vec![f32s(&[2, 3]), f32s(&[4, 2])],
        ),
        (
            Op::Dot(DotDims { lhs_contract: vec![0, 0], rhs_contract: vec![0, 0], ..DotDims::default() }),
            vec![f32s(&[2]), f32s(&[2])],
        ),
        (Op::Dot(DotDims { lhs_contract: vec![5], rhs_contract: vec![0], ..DotDims::default() }), vec![f32s(&[2]), f32s(&[2])]),
        (Op::Dot(DotDims { lhs_batch: vec![0], ..DotDims::default() }), vec![f32s(&[2]), f32s(&[2])]),
        (Op::Dot(DotDims::default()), vec![ty(DType::Bool, &[2]), ty(DType::Bool, &[2])]),
        (Op::Conv(conv(1)), vec![f32s(&[1, 2, 5]), ty(DType::F16, &[3, 2, 2])]),
        (Op::Scatter { op: ScatterOp::Add, axis: 0 }, vec![f32s(&[7, 3]), ty(DType::I64, &[2]), f32s(&[3, 2])]),
    ];
    for (op, operands) in cases {
        let name = op.name();
        let found = error(op, &operands);
        assert!(matches!(found, TypeError::Mismatch { op, .. } if op == name), "{name}: {found}");
    }
}

#[test]
fn axes_are_in_range_and_in_order() {
    let x = f32s(&[3, 5]);
    let sum = |axes: &[usize]| Op::Reduce { op: ReduceOp::Sum, axes: axes.to_vec() };
    assert_eq!(error(sum(&[2]), std::slice::from_ref(&x)), TypeError::Axis { op: "reduce_sum", axis: 2, rank: 2 });
    assert_eq!(error(sum(&[1, 0]), std::slice::from_ref(&x)), TypeError::AxisOrder { op: "reduce_sum", axes: vec![1, 0] });
    assert_eq!(error(sum(&[1, 1]), std::slice::from_ref(&x)), TypeError::AxisOrder { op: "reduce_sum", axes: vec![1, 1] });
    for op in [
        Op::Concat { axis: 2 },
        Op::ArgReduce { op: ArgOp::Min, axis: 2 },
        Op::Broadcast { shape: Shape::from([3, 5]), axes: vec![0, 2] },
        Op::Composite(Composite::LogSoftmax { axis: 2 }),
    ] {
        let name = op.name();
        assert_eq!(error(op, std::slice::from_ref(&x)), TypeError::Axis { op: name, axis: 2, rank: 2 });
    }
    assert!(matches!(error(Op::Gather { axis: 2 }, &[x, ty(DType::I64, &[1])]), TypeError::Axis { axis: 2, .. }));
}

#[test]
fn sizes_are_limited() {
    let broadcast = |shape: &[usize]| Op::Broadcast { shape: Shape::from(shape), axes: vec![] };
    assert_eq!(error(broadcast(&[1; 9]), &[f32s(&[])]), TypeError::Rank { op: "broadcast", rank: 9 });
    for shape in [&[1 << 31][..], &[1 << 16, 1 << 15], &[usize::MAX, usize::MAX], &[usize::MAX, 2, 0]] {
        assert_eq!(error(broadcast(shape), &[f32s(&[])]), TypeError::TooLarge { op: "broadcast", shape: Shape::from(shape) });
    }
    infer(&broadcast(&[(1 << 31) - 1]), &[&f32s(&[])]).unwrap();
}

#[test]
fn shapes_must_fit_attributes() {
    let cases: Vec<(Op, Vec<TensorType>)> = vec![
        (Op::Reshape(Shape::from([3, 2])), vec![f32s(&[5])]),
        (Op::Reshape(Shape::from([usize::MAX, 8])), vec![f32s(&[5])]),
        (Op::Broadcast { shape: Shape::from([3, 5]), axes: vec![0] }, vec![f32s(&[5])]),
        (Op::Broadcast { shape: Shape::from([3, 5]), axes: vec![0, 1] }, vec![f32s(&[5])]),
        (Op::Fold { window: window(&[2]), sizes: vec![5] }, vec![f32s(&[5, 2])]),
        (Op::Conv(conv(1)), vec![f32s(&[1, 3, 5]), f32s(&[4, 2, 2])]),
        (Op::Conv(ConvDims { groups: 0, ..conv(1) }), vec![f32s(&[1, 3, 5]), f32s(&[4, 3, 2])]),
        (Op::Conv(ConvDims { groups: 3, ..conv(1) }), vec![f32s(&[1, 3, 5]), f32s(&[4, 1, 2])]),
    ];
    for (op, operands) in cases {
        let name = op.name();
        let found = error(op, &operands);
        assert!(matches!(found, TypeError::Shape { op, .. } if op == name), "{name}: {found}");
    }
}

#[test]
fn attributes_must_make_sense() {
    let range = |start, step, size| Op::Slice(vec![SliceDim { start, step, size }]);
    let pads = |low, high, interior| Op::Pad(vec![PadDim { low, high, interior }]);
    let scalar = f32s(&[]);
    let far = WindowDims { pads: vec![(isize::MAX, isize::MAX)], ..window(&[2]) };
    let cases: Vec<(Op, Vec<TensorType>)> = vec![
        (Op::Transpose(vec![0, 0]), vec![f32s(&[3, 5])]),
        (Op::Transpose(vec![0]), vec![f32s(&[3, 5])]),
        (range(5, 1, 1), vec![f32s(&[5])]),
        (range(3, 1, 3), vec![f32s(&[5])]),
        (range(1, -1, 3), vec![f32s(&[5])]),
        (range(1, isize::MAX, 3), vec![f32s(&[5])]),
        (range(1, -1, usize::MAX), vec![f32s(&[5])]),
        (range(0, 1, 1), vec![f32s(&[5, 5])]),
        (pads(usize::MAX, 1, 0), vec![f32s(&[5]), scalar.clone()]),
        (pads(0, 0, usize::MAX), vec![f32s(&[5]), scalar.clone()]),
        (Op::Pad(vec![]), vec![f32s(&[5]), scalar.clone()]),
        (Op::Unfold(window(&[0])), vec![f32s(&[5]), scalar.clone()]),
        (Op::Unfold(window(&[1, 1])), vec![f32s(&[5]), scalar.clone()]),
        (Op::Unfold(far), vec![f32s(&[5]), scalar.clone()]),
        (Op::Unfold(WindowDims { pads: vec![], ..window(&[2]) }), vec![f32s(&[5]), scalar]),
        (Op::Fold { window: window(&[2]), sizes: vec![] }, vec![f32s(&[5, 2])]),
        (Op::Conv(conv(0)), vec![f32s(&[1, 3, 5]), f32s(&[4, 3, 2])]),
        (Op::Conv(conv(1)), vec![f32s(&[1, 3, 5]), f32s(&[4, 3, 0])]),
        (Op::Conv(conv(1)), vec![f32s(&[3, 5]), f32s(&[4, 3, 2])]),
        (Op::Conv(ConvDims { input_dilation: vec![usize::MAX], ..conv(1) }), vec![f32s(&[1, 3, 5]), f32s(&[4, 3, 2])]),
        (Op::ArgReduce { op: ArgOp::Max, axis: 1 }, vec![f32s(&[3, 0])]),
        (Op::Gather { axis: 0 }, vec![f32s(&[0, 3]), ty(DType::I64, &[1])]),
    ];
    for (op, operands) in cases {
        let name = op.name();
        let found = error(op, &operands);
        assert!(matches!(found, TypeError::Attribute { op, .. } if op == name), "{name}: {found}");
    }
}

#[test]
fn result_shapes_follow_from_attributes() {
    let check = |op: Op, operands: &[TensorType], expected: TensorType| {
        assert_eq!(infer(&op, &operands.iter().collect::<Vec<_>>()), Ok(expected), "{}", op.name());
    };
    let dims = DotDims { lhs_batch: vec![1], rhs_batch: vec![2], lhs_contract: vec![0], rhs_contract: vec![1] };
    check(Op::Dot(dims), &[f32s(&[4, 3, 7]), f32s(&[5, 4, 3])], f32s(&[3, 7, 5]));
    // A window of 3 elements 2 apart spans 5: floor((9 + 1 + 2 - 5) / 3) + 1 positions.
    let strided = WindowDims { size: vec![3], stride: vec![3], dilation: vec![2], pads: vec![(1, 2)] };
    check(Op::Unfold(strided.clone()), &[f32s(&[2, 9]), f32s(&[])], f32s(&[2, 3, 3]));
    check(Op::Fold { window: strided, sizes: vec![9] }, &[f32s(&[2, 3, 3])], f32s(&[2, 9]));
    // Zeros between 5 elements make 9.
    let dilated = ConvDims { input_dilation: vec![2], ..conv(2) };
    check(Op::Conv(dilated), &[f32s(&[2, 3, 5]), f32s(&[4, 3, 2])], f32s(&[2, 4, 4]));
    check(Op::Pad(vec![PadDim { low: 1, high: 2, interior: 3 }]), &[f32s(&[4]), f32s(&[])], f32s(&[16]));
    check(Op::Pad(vec![PadDim { low: 1, high: 2, interior: 3 }]), &[f32s(&[0]), f32s(&[])], f32s(&[3]));
    check(Op::Gather { axis: 1 }, &[f32s(&[4, 5, 6]), ty(DType::I32, &[2, 3])], f32s(&[4, 2, 3, 6]));
    check(Op::ArgReduce { op: ArgOp::Max, axis: 0 }, &[f32s(&[4, 5])], ty(DType::I64, &[5]));
    check(Op::Compare(CompareOp::Lt), &[f32s(&[4]), f32s(&[4])], ty(DType::Bool, &[4]));
    check(Op::Concat { axis: 0 }, &[f32s(&[4, 2]), f32s(&[0, 2]), f32s(&[3, 2])], f32s(&[7, 2]));
}
