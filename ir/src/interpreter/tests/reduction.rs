use super::*;
use crate::{ArgOp, ReduceOp};

fn reduce(op: ReduceOp, axes: &[usize], x: &Tensor) -> Tensor {
    eval(Op::Reduce { op, axes: axes.to_vec() }, std::slice::from_ref(x))
}

#[test]
fn reductions_over_any_axes() {
    let x = f64s([2, 3], &[1.0, 5.0, 3.0, 4.0, 2.0, 6.0]);
    let expected = |op| match op {
        ReduceOp::Sum => ([9.0, 12.0], [5.0, 7.0, 9.0], 21.0),
        ReduceOp::Max => ([5.0, 6.0], [4.0, 5.0, 6.0], 6.0),
        ReduceOp::Min => ([1.0, 2.0], [1.0, 2.0, 3.0], 1.0),
        ReduceOp::Prod => ([15.0, 48.0], [4.0, 10.0, 18.0], 720.0),
    };
    for &op in ReduceOp::ALL {
        let (rows, columns, all) = expected(op);
        assert_eq!(reduce(op, &[1], &x), f64s([2], &rows), "{}", op.name());
        assert_eq!(reduce(op, &[0], &x), f64s([3], &columns), "{}", op.name());
        assert_eq!(reduce(op, &[0, 1], &x), f64s([], &[all]), "{}", op.name());
        assert_eq!(reduce(op, &[], &x), x, "{}", op.name());
    }
}

#[test]
fn a_middle_axis_reduces() {
    let x = i64s([2, 2, 2], &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(reduce(ReduceOp::Sum, &[1], &x), i64s([2, 2], &[4, 6, 12, 14]));
    assert_eq!(reduce(ReduceOp::Sum, &[0, 2], &x), i64s([2], &[14, 22]));
}

#[test]
fn empty_reductions_give_the_identity() {
    for &op in ReduceOp::ALL {
        let (float, int, bool) = match op {
            ReduceOp::Sum => (0.0, 0, None),
            ReduceOp::Prod => (1.0, 1, None),
            ReduceOp::Max => (f64::NEG_INFINITY, -128, Some(false)),
            ReduceOp::Min => (f64::INFINITY, 127, Some(true)),
        };
        assert_eq!(reduce(op, &[1], &f64s([2, 0], &[])), f64s([2], &[float; 2]));
        assert_eq!(reduce(op, &[0], &Tensor::from_i64(DType::I8, [0], &[])), Tensor::from_i64(DType::I8, [], &[int]));
        assert_eq!(reduce(op, &[1], &f64s([0, 3], &[])), f64s([0], &[]));
        if let Some(identity) = bool {
            assert_eq!(reduce(op, &[0], &bools([0], &[])), bools([], &[identity]));
        }
    }
}

#[test]
fn reductions_of_bools_are_any_and_all() {
    let x = bools([3, 2], &[true, true, false, true, false, false]);
    assert_eq!(reduce(ReduceOp::Max, &[1], &x), bools([3], &[true, true, false]));
    assert_eq!(reduce(ReduceOp::Min, &[1], &x), bools([3], &[true, false, false]));
}

#[test]
fn nan_propagates() {
    let x = f64s([2, 3], &[1.0, f64::NAN, 3.0, 4.0, 5.0, 6.0]);
    for &op in ReduceOp::ALL {
        let y = reduce(op, &[1], &x).to_f64_vec();
        assert!(y[0].is_nan() && !y[1].is_nan(), "{}", op.name());
    }
}

#[test]
fn sums_wrap_and_accumulate_in_double_precision() {
    let u8s = |shape: &[usize], v: &[i64]| Tensor::from_i64(DType::U8, shape, v);
    assert_eq!(reduce(ReduceOp::Sum, &[0], &u8s(&[3], &[200, 50, 9])), u8s(&[], &[3]));
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3])).unwrap();
    let y = g.reduce(ReduceOp::Sum, x, &[0]).unwrap();
    g.output("y", y).unwrap();
    let env = Environment { inputs: vec![Value::Float(vec![16777216.0f32, 1.0, 1.0])], parameters: vec![] };
    assert_eq!(interpret(&g, &env).unwrap().outputs(), [&Value::Float(vec![16777218.0])]);
}

#[test]
fn the_first_of_equal_extremes_is_found() {
    let arg = |op, axis, x: &Tensor| eval(Op::ArgReduce { op, axis }, std::slice::from_ref(x));
    let expected = |op| match op {
        ArgOp::Max => ([1, 0], [0, 0, 1, 1]),
        ArgOp::Min => ([0, 1], [1, 1, 0, 0]),
    };
    let x = f64s([2, 4], &[1.0, 7.0, 7.0, 1.0, 9.0, 2.0, 9.0, 2.0]);
    for &op in ArgOp::ALL {
        let (rows, _) = expected(op);
        assert_eq!(arg(op, 1, &x), i64s([2], &rows), "{}", op.name());
    }
    assert_eq!(arg(ArgOp::Max, 0, &x), i64s([4], &[1, 0, 1, 1]));
    assert_eq!(arg(ArgOp::Min, 0, &x), i64s([4], &[0, 1, 0, 0]));
    assert_eq!(arg(ArgOp::Max, 0, &i64s([3], &[-5, -1, -1])), i64s([], &[1]));
    assert_eq!(arg(ArgOp::Max, 0, &bools([3], &[false, true, true])), i64s([], &[1]));
    assert_eq!(arg(ArgOp::Max, 1, &f64s([0, 3], &[])), i64s([0], &[]));
}

#[test]
fn a_nan_is_the_extreme() {
    for &op in ArgOp::ALL {
        let x = f64s([4], &[1.0, f64::NAN, f64::INFINITY, f64::NAN]);
        assert_eq!(eval(Op::ArgReduce { op, axis: 0 }, &[x]), i64s([], &[1]), "{}", op.name());
    }
}
