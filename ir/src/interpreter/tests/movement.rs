use super::*;
use crate::{PadDim, SliceDim, WindowDims};

/// 0, 1, 2, ..
fn counting(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    f64s(shape, &(0..n).map(|i| i as f64).collect::<Vec<_>>())
}

#[test]
fn reshape_keeps_the_order() {
    let y = eval(Op::Reshape(Shape::from([3, 2])), &[counting(&[2, 3])]);
    assert_eq!(y, f64s([3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
    assert_eq!(eval(Op::Reshape(Shape::from([])), &[counting(&[1, 1])]), f64s([], &[0.0]));
    assert_eq!(eval(Op::Reshape(Shape::from([0, 9])), &[counting(&[7, 0])]), f64s([0, 9], &[]));
}

#[test]
fn transpose_moves_axes() {
    let y = eval(Op::Transpose(vec![1, 0]), &[counting(&[2, 3])]);
    assert_eq!(y, f64s([3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]));
    let y = eval(Op::Transpose(vec![2, 0, 1]), &[counting(&[2, 1, 3])]);
    assert_eq!(y, f64s([3, 2, 1], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]));
    assert_eq!(eval(Op::Transpose(vec![]), &[counting(&[])]), counting(&[]));
    assert_eq!(eval(Op::Transpose(vec![1, 0]), &[counting(&[0, 3])]), counting(&[3, 0]));
    // Two transposes undo each other at odd sizes.
    let x = random_tensor(&TensorType::new(DType::Bool, [7, 33, 1, 5]), 3);
    let y = eval(Op::Transpose(vec![3, 1, 0, 2]), std::slice::from_ref(&x));
    assert_eq!(eval(Op::Transpose(vec![2, 1, 3, 0]), &[y]), x);
}

#[test]
fn broadcast_repeats_along_the_other_axes() {
    let broadcast =
        |x: Tensor, shape: &[usize], axes: &[usize]| eval(Op::Broadcast { shape: Shape::from(shape), axes: axes.to_vec() }, &[x]);
    assert_eq!(broadcast(counting(&[2]), &[2, 3], &[0]), f64s([2, 3], &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]));
    assert_eq!(broadcast(counting(&[3]), &[2, 3], &[1]), f64s([2, 3], &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0]));
    assert_eq!(broadcast(bools([], &[true]), &[2, 1], &[]), bools([2, 1], &[true; 2]));
    assert_eq!(broadcast(counting(&[2, 2]), &[2, 2, 2], &[0, 2]), f64s([2, 2, 2], &[0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0]));
    assert_eq!(broadcast(counting(&[3]), &[0, 3], &[1]), f64s([0, 3], &[]));
}

#[test]
fn slice_steps_either_way() {
    let slice = |x: Tensor, ranges: &[(usize, isize, usize)]| {
        let dims = ranges.iter().map(|&(start, step, size)| SliceDim { start, step, size }).collect();
        eval(Op::Slice(dims), &[x])
    };
    assert_eq!(slice(counting(&[7]), &[(1, 2, 3)]), f64s([3], &[1.0, 3.0, 5.0]));
    assert_eq!(slice(counting(&[7]), &[(6, -3, 3)]), f64s([3], &[6.0, 3.0, 0.0]));
    assert_eq!(slice(counting(&[2, 3]), &[(1, -1, 2), (0, 2, 2)]), f64s([2, 2], &[3.0, 5.0, 0.0, 2.0]));
    assert_eq!(slice(counting(&[7]), &[(6, isize::MAX, 1)]), f64s([1], &[6.0]));
    assert_eq!(slice(counting(&[7]), &[(9, 5, 0)]), f64s([0], &[]));
    assert_eq!(slice(counting(&[0, 3]), &[(0, 1, 0), (2, -1, 2)]), f64s([0, 2], &[]));
    assert_eq!(slice(counting(&[]), &[]), counting(&[]));
}

#[test]
fn pad_surrounds_and_separates() {
    let pad = |x: Tensor, pads: &[(usize, usize, usize)]| {
        let dims = pads.iter().map(|&(low, high, interior)| PadDim { low, high, interior }).collect();
        eval(Op::Pad(dims), &[x, f64s([], &[9.0])])
    };
    assert_eq!(pad(counting(&[3]), &[(1, 2, 0)]), f64s([6], &[9.0, 0.0, 1.0, 2.0, 9.0, 9.0]));
    assert_eq!(pad(counting(&[3]), &[(0, 0, 2)]), f64s([7], &[0.0, 9.0, 9.0, 1.0, 9.0, 9.0, 2.0]));
    let y = pad(counting(&[2, 2]), &[(1, 0, 0), (0, 1, 1)]);
    assert_eq!(y, f64s([3, 4], &[9.0, 9.0, 9.0, 9.0, 0.0, 9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0]));
    assert_eq!(pad(counting(&[1]), &[(0, 1, usize::MAX)]), f64s([2], &[0.0, 9.0]));
    assert_eq!(pad(counting(&[0]), &[(2, 1, 5)]), f64s([3], &[9.0; 3]));
    assert_eq!(pad(counting(&[]), &[]), counting(&[]));
}

#[test]
fn concat_joins_in_order() {
    let y = eval(Op::Concat { axis: 0 }, &[i64s([2], &[1, 2]), i64s([0], &[]), i64s([1], &[3])]);
    assert_eq!(y, i64s([3], &[1, 2, 3]));
    let y = eval(Op::Concat { axis: 1 }, &[f64s([2, 1], &[1.0, 2.0]), f64s([2, 2], &[3.0, 4.0, 5.0, 6.0])]);
    assert_eq!(y, f64s([2, 3], &[1.0, 3.0, 4.0, 2.0, 5.0, 6.0]));
    assert_eq!(eval(Op::Concat { axis: 0 }, &[bools([1], &[true])]), bools([1], &[true]));
}

fn window(size: usize, stride: usize, dilation: usize, pads: (isize, isize)) -> WindowDims {
    WindowDims { size: vec![size], stride: vec![stride], dilation: vec![dilation], pads: vec![pads] }
}

#[test]
fn unfold_lists_windows() {
    let unfold = |w: WindowDims| eval(Op::Unfold(w), &[f64s([4], &[1.0, 2.0, 3.0, 4.0]), f64s([], &[9.0])]);
    assert_eq!(unfold(window(2, 1, 1, (1, 0))), f64s([4, 2], &[9.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0]));
    assert_eq!(unfold(window(2, 2, 2, (0, 1))), f64s([2, 2], &[1.0, 3.0, 3.0, 9.0]));
    assert_eq!(unfold(window(2, 1, 1, (-1, 0))), f64s([2, 2], &[2.0, 3.0, 3.0, 4.0]));
    assert_eq!(unfold(window(1, 1, 1, (0, -2))), f64s([2, 1], &[1.0, 2.0]));
    assert_eq!(unfold(window(5, 1, 1, (0, 0))), f64s([0, 5], &[]));
    let plane = WindowDims { size: vec![2, 2], stride: vec![1, 1], dilation: vec![1, 1], pads: vec![(0, 0), (0, 0)] };
    let y = eval(Op::Unfold(plane), &[counting(&[1, 2, 3]), f64s([], &[9.0])]);
    assert_eq!(y, f64s([1, 1, 2, 2, 2], &[0.0, 1.0, 3.0, 4.0, 1.0, 2.0, 4.0, 5.0]));
}

#[test]
fn fold_adds_where_windows_overlap() {
    let fold = |w: WindowDims, x: Tensor| eval(Op::Fold { window: w, sizes: vec![3] }, &[x]);
    let x = f64s([2, 2], &[1.0, 2.0, 10.0, 20.0]);
    assert_eq!(fold(window(2, 1, 1, (0, 0)), x), f64s([3], &[1.0, 12.0, 20.0]));
    let x = f64s([3, 2], &[1.0, 2.0, 10.0, 20.0, 100.0, 200.0]);
    assert_eq!(fold(window(2, 1, 1, (1, 0)), x), f64s([3], &[12.0, 120.0, 200.0]));
}

#[test]
fn fold_is_the_transpose_of_unfold() {
    let mut tested = 0;
    for (name, g) in sample_graphs() {
        let [node] = &g.nodes().iter().filter(|n| matches!(n.op, Op::Fold { .. })).collect::<Vec<_>>()[..] else { continue };
        let Op::Fold { window, sizes } = &node.op else { continue };
        let unfolded = g.ty(node.operands[0]);
        let x = random_tensor(&TensorType::new(DType::F64, node.ty.shape.clone()), 1);
        let y = random_tensor(&TensorType::new(DType::F64, unfolded.shape.clone()), 2);
        let forward = eval(Op::Unfold(window.clone()), &[x.clone(), f64s([], &[0.0])]);
        let backward = eval(Op::Fold { window: window.clone(), sizes: sizes.clone() }, std::slice::from_ref(&y));
        let inner = |a: &Tensor, b: &Tensor| -> f64 { a.to_f64_vec().iter().zip(b.to_f64_vec()).map(|(a, b)| a * b).sum() };
        let (left, right) = (inner(&forward, &y), inner(&x, &backward));
        assert!((left - right).abs() <= 1e-12 * (1.0 + left.abs()), "{name}: {left} and {right}");
        tested += 1;
    }
    assert!(tested >= 9);
}
