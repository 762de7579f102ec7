use super::*;
use crate::ScatterOp;

#[test]
fn iota_counts_along_its_axis() {
    let iota = |dtype, shape: &[usize], axis| eval(Op::Iota { dtype, shape: Shape::from(shape), axis }, &[]);
    assert_eq!(iota(DType::I64, &[2, 3], 0), i64s([2, 3], &[0, 0, 0, 1, 1, 1]));
    assert_eq!(iota(DType::F64, &[2, 3], 1), f64s([2, 3], &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0]));
    assert_eq!(iota(DType::I64, &[0, 3], 1), i64s([0, 3], &[]));
    assert_eq!(iota(DType::I8, &[257], 0).to_i64_vec()[127..130], [127, -128, -127]);
}

#[test]
fn gather_reads_rows_and_clamps() {
    let x = f64s([3, 2], &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
    let gather = |axis, indices: Tensor| eval(Op::Gather { axis }, &[x.clone(), indices]);
    assert_eq!(gather(0, i64s([2], &[2, 0])), f64s([2, 2], &[20.0, 21.0, 0.0, 1.0]));
    assert_eq!(gather(1, i64s([2], &[1, 1])), f64s([3, 2], &[1.0, 1.0, 11.0, 11.0, 21.0, 21.0]));
    assert_eq!(gather(0, i64s([], &[1])), f64s([2], &[10.0, 11.0]));
    assert_eq!(gather(1, i64s([1, 2], &[0, 1])), x.clone().reshaped([3, 1, 2]).unwrap());
    assert_eq!(gather(0, i64s([3], &[-1, 3, i64::MAX])), f64s([3, 2], &[0.0, 1.0, 20.0, 21.0, 20.0, 21.0]));
    assert_eq!(gather(0, Tensor::from_i64(DType::U64, [1], &[-1])), f64s([1, 2], &[20.0, 21.0]));
    assert_eq!(gather(0, i64s([0], &[])), f64s([0, 2], &[]));
    assert_eq!(eval(Op::Gather { axis: 0 }, &[bools([2], &[true, false]), i64s([1], &[1])]), bools([1], &[false]));
}

#[test]
fn scatter_combines_updates_and_drops_strays() {
    let x = [5.0, 6.0, 7.0];
    // Two updates of element 0, one of element 2, and two outside.
    let (indices, updates) = (i64s([5], &[0, 2, 0, 3, -1]), f64s([5], &[2.0, 10.0, 4.0, 100.0, 100.0]));
    for &op in ScatterOp::ALL {
        let expected = match op {
            ScatterOp::Set => [4.0, 6.0, 10.0],
            ScatterOp::Add => [11.0, 6.0, 17.0],
            ScatterOp::Mul => [40.0, 6.0, 70.0],
            ScatterOp::Max => [5.0, 6.0, 10.0],
            ScatterOp::Min => [2.0, 6.0, 7.0],
        };
        let y = eval(Op::Scatter { op, axis: 0 }, &[f64s([3], &x), indices.clone(), updates.clone()]);
        assert_eq!(y, f64s([3], &expected), "{}", op.name());
    }
}

#[test]
fn scatter_places_slices_along_any_axis() {
    let scatter = |axis, indices: Tensor, updates: Tensor| {
        eval(Op::Scatter { op: ScatterOp::Add, axis }, &[i64s([2, 3], &[0; 6]), indices, updates])
    };
    assert_eq!(scatter(0, i64s([1], &[1]), i64s([1, 3], &[1, 2, 3])), i64s([2, 3], &[0, 0, 0, 1, 2, 3]));
    assert_eq!(scatter(1, i64s([2], &[2, 0]), i64s([2, 2], &[1, 2, 3, 4])), i64s([2, 3], &[2, 0, 1, 4, 0, 3]));
    assert_eq!(scatter(1, i64s([], &[1]), i64s([2], &[7, 8])), i64s([2, 3], &[0, 7, 0, 0, 8, 0]));
    assert_eq!(scatter(1, i64s([1, 2], &[1, 1]), i64s([2, 1, 2], &[1, 2, 3, 4])), i64s([2, 3], &[0, 3, 0, 0, 7, 0]));
    assert_eq!(scatter(0, i64s([0], &[]), i64s([0, 3], &[])), i64s([2, 3], &[0; 6]));
}

#[test]
fn scattered_extremes_propagate_nan() {
    for op in [ScatterOp::Max, ScatterOp::Min] {
        let y =
            eval(Op::Scatter { op, axis: 0 }, &[f64s([2], &[1.0, f64::NAN]), i64s([2], &[0, 1]), f64s([2], &[f64::NAN, 1.0])]);
        assert!(y.to_f64_vec().iter().all(|v| v.is_nan()), "{}", op.name());
    }
}
