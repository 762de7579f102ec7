use super::*;
use crate::{Composite, Real, WindowDims};

fn apply(composite: Composite, x: Tensor) -> Tensor {
    eval(Op::Composite(composite), &[x])
}

/// The values of each pointwise composite at -1, 0 and 1, from tables of the normal distribution, tanh and the logistic function.
#[test]
fn activations_have_their_values() {
    let x = f64s([3], &[-1.0, 0.0, 1.0]);
    let cases = [
        (Composite::Gelu, [-0.15865525393145707, 0.0, 0.8413447460685429]),
        (Composite::GeluTanh, [-0.15880800939172324, 0.0, 0.8411919906082768]),
        (Composite::Silu, [-0.2689414213699951, 0.0, 0.7310585786300049]),
        (Composite::Relu, [0.0, 0.0, 1.0]),
    ];
    for (composite, expected) in cases {
        let name = composite.name();
        let y = apply(composite, x.clone());
        assert!(relative_l2(&y.to_f64_vec(), &expected) < 1e-15, "{name}: {:?}", y.to_f64_vec());
    }
    let ints = Tensor::from_i64(DType::I32, [3], &[-5, 0, 5]);
    assert_eq!(apply(Composite::Relu, ints), Tensor::from_i64(DType::I32, [3], &[0, 0, 5]));
}

#[test]
fn softmax_sums_to_one_without_overflow() {
    let expected = [0.09003057317038046, 0.24472847105479764, 0.6652409557748218];
    for offset in [0.0, 1e6, -1e6] {
        let x = f64s([3], &[1.0 + offset, 2.0 + offset, 3.0 + offset]);
        assert!(relative_l2(&apply(Composite::Softmax { axis: 0 }, x.clone()).to_f64_vec(), &expected) < 1e-9);
        let log = expected.map(f64::ln);
        assert!(relative_l2(&apply(Composite::LogSoftmax { axis: 0 }, x).to_f64_vec(), &log) < 1e-9);
    }
    let y = apply(Composite::Softmax { axis: 0 }, f64s([2, 2], &[0.0, 0.0, 0.0, f64::NEG_INFINITY]));
    assert_eq!(y, f64s([2, 2], &[0.5, 1.0, 0.5, 0.0]));
    assert_eq!(apply(Composite::Softmax { axis: 1 }, f64s([0, 3], &[])), f64s([0, 3], &[]));
}

#[test]
fn normalisation_gives_unit_variance() {
    let epsilon = Real(0.0);
    let y = apply(Composite::Normalize { axes: vec![0], epsilon }, f64s([4], &[1.0, 2.0, 3.0, 4.0]));
    // (x - 2.5) / sqrt(1.25)
    let expected = [-1.3416407864998738, -0.4472135954999579, 0.4472135954999579, 1.3416407864998738];
    assert!(relative_l2(&y.to_f64_vec(), &expected) < 1e-15);
    let y = apply(Composite::Normalize { axes: vec![0, 1], epsilon: Real(0.75) }, f64s([2, 1], &[0.0, 1.0]));
    assert_eq!(y, f64s([2, 1], &[-0.5, 0.5]));
    let y = apply(Composite::RmsNormalize { axes: vec![1], epsilon }, f64s([1, 2], &[3.0, 4.0]));
    // x / sqrt(12.5)
    assert!(relative_l2(&y.to_f64_vec(), &[0.8485281374238571, 1.1313708498984762]) < 1e-15);
    let y = apply(Composite::RmsNormalize { axes: vec![0], epsilon: Real(3.0) }, f64s([2, 1], &[1.0, 1.0]));
    assert_eq!(y, f64s([2, 1], &[0.5, 0.5]));
}

#[test]
fn max_pooling_ignores_padding_and_keeps_nan() {
    let pool = |x: Tensor, size, stride, pads| {
        let window = WindowDims { size: vec![size], stride: vec![stride], dilation: vec![1], pads: vec![pads] };
        apply(Composite::MaxPool(window), x)
    };
    let x = f64s([1, 5], &[-3.0, -1.0, -4.0, -1.0, -5.0]);
    assert_eq!(pool(x.clone(), 2, 2, (1, 0)), f64s([1, 3], &[-3.0, -1.0, -1.0]));
    assert_eq!(pool(x, 3, 1, (0, 0)), f64s([1, 3], &[-1.0, -1.0, -1.0]));
    let y = pool(f64s([3], &[1.0, f64::NAN, 2.0]), 2, 1, (0, 1)).to_f64_vec();
    assert!(y[0].is_nan() && y[1].is_nan() && y[2] == 2.0);
    let ints = Tensor::from_i64(DType::I8, [3], &[-7, -8, -9]);
    assert_eq!(pool(ints, 2, 1, (1, 0)), Tensor::from_i64(DType::I8, [3], &[-7, -7, -8]));
}

#[test]
fn decomposing_a_graph_keeps_its_values() {
    for (name, g) in sample_graphs() {
        if !g.nodes().iter().any(|n| matches!(n.op, Op::Composite(_))) {
            continue;
        }
        let inputs: Vec<Tensor> = g.inputs().iter().map(|x| random_tensor(&x.ty, 17)).collect();
        let env = Environment::<f64>::from_tensors(&inputs, []);
        let (whole, parts) = (interpret(&g, &env).unwrap(), interpret(&g.decomposed().unwrap(), &env).unwrap());
        assert_eq!(whole.outputs(), parts.outputs(), "{name}");
    }
}
