//! Derivatives of composites, where the formula is more stable or smaller than the derivative of the decomposition.

use std::collections::HashMap;

use meganeura_ir::composite::{
    GELU_CUBIC, first_largest_mask, gelu_tanh_inner, gelu_tanh_scale, inverse_rms, max_pool_mask, normal_cdf, normalize_parts,
};
use meganeura_ir::{CompareOp, Composite, Graph, GraphError, NodeId, Op, ReduceOp, UnaryOp, WindowDims};

use super::Cotangent::{self, Undefined, Value};
use super::INTEGER_OPERAND;
use super::attention::attention;
use crate::formula::formula;
use crate::{AutodiffError, vjp};

/// `1 / sqrt(2 pi)`
const NORMAL_DENSITY_AT_0: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 / 2.0;

pub(super) fn composite(
    g: &mut Graph,
    c: &Composite,
    operands: &[NodeId],
    y: NodeId,
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    let x = operands[0];
    let dx = match c {
        // Rows without elements.
        Composite::Softmax { axis } | Composite::LogSoftmax { axis } if g.ty(y).shape[*axis] == 0 => Ok(dy),
        Composite::Softmax { axis } => softmax(g, *axis, y, dy),
        Composite::LogSoftmax { axis } => log_softmax(g, *axis, y, dy),
        Composite::Normalize { axes, epsilon } => {
            let (_, inverse) = normalize_parts(g, x, axes, epsilon.0)?;
            formula(g, |f| {
                let [inverse, y, dy] = f.terms([inverse, y, dy]);
                inverse * (dy - dy.mean_keep(axes) - y * (dy * y).mean_keep(axes))
            })
        }
        Composite::RmsNormalize { axes, epsilon } => {
            let inverse = inverse_rms(g, x, axes, epsilon.0)?;
            formula(g, |f| {
                let [inverse, y, dy] = f.terms([inverse, y, dy]);
                inverse * (dy - y * (dy * y).mean_keep(axes))
            })
        }
        Composite::Gelu => {
            let cdf = normal_cdf(g, x)?;
            formula(g, |f| {
                let [x, cdf, dy] = f.terms([x, cdf, dy]);
                let density = NORMAL_DENSITY_AT_0 * (-0.5 * x * x).unary(UnaryOp::Exp);
                dy * (cdf + x * density)
            })
        }
        Composite::GeluTanh => {
            let t = gelu_tanh_inner(g, x)?;
            formula(g, |f| {
                let [x, t, dy] = f.terms([x, t, dy]);
                let inner_slope = gelu_tanh_scale() * (1.0 + 3.0 * GELU_CUBIC * x * x);
                dy * 0.5 * (1.0 + t + x * (1.0 - t * t) * inner_slope)
            })
        }
        Composite::Silu => formula(g, |f| {
            let [x, dy] = f.terms([x, dy]);
            let s = x.unary(UnaryOp::Sigmoid);
            dy * s * (1.0 + x * (1.0 - s))
        }),
        Composite::Relu => formula(g, |f| {
            let [x, dy] = f.terms([x, dy]);
            x.compare(CompareOp::Gt, 0.0).select(dy, 0.0)
        }),
        Composite::MaxPool(window) => max_pool(g, window, x, dy),
        Composite::Attention(dims) => return attention(g, dims, operands, y, dy, operand),
        Composite::AttentionLse(_) | Composite::AttentionGradient { .. } => return of_decomposition(g, c, operands, dy, operand),
    };
    dx.map(Value)
}

/// `y * (dy - sum(dy * y))`, which has the same value for every constant added to `dy`: with that of the largest element subtracted, nothing
/// cancels where `y` is nearly 1.
fn softmax(g: &mut Graph, axis: usize, y: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    let largest = first_largest_mask(g, y, axis)?;
    formula(g, |f| {
        let [largest, y, dy] = f.terms([largest, y, dy]);
        let dy = dy - largest.select(dy, 0.0).reduce_keep(ReduceOp::Sum, &[axis]);
        y * (dy - (dy * y).reduce_keep(ReduceOp::Sum, &[axis]))
    })
}

/// `dy - exp(y) * sum(dy)`, whose elements add up to 0: that of the largest element, where the difference cancels if `exp(y)` is nearly 1, is what
/// the others leave.
fn log_softmax(g: &mut Graph, axis: usize, y: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    let largest = first_largest_mask(g, y, axis)?;
    formula(g, |f| {
        let [largest, y, dy] = f.terms([largest, y, dy]);
        let is_other = largest.unary(UnaryOp::Not);
        let dx = dy - y.unary(UnaryOp::Exp) * dy.reduce_keep(ReduceOp::Sum, &[axis]);
        is_other.select(dx, -is_other.select(dx, 0.0).reduce_keep(ReduceOp::Sum, &[axis]))
    })
}

/// The derivative of the decomposition with respect to one operand, as if the others did not depend on it.
pub(super) fn of_decomposition(
    g: &mut Graph,
    c: &Composite,
    operands: &[NodeId],
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    if !g.ty(operands[operand]).dtype.is_float() {
        return Ok(INTEGER_OPERAND);
    }
    let mut parts = Graph::new();
    let outer: Vec<NodeId> = operands.iter().copied().chain([dy]).collect();
    let inputs =
        outer.iter().enumerate().map(|(i, &o)| parts.input(i.to_string(), g.ty(o).clone())).collect::<Result<Vec<_>, _>>()?;
    let y = c.decompose(&mut parts, &inputs[..operands.len()])?;
    let cotangents = match vjp(&mut parts, &[(y, inputs[operands.len()])], &[inputs[operand]]) {
        Ok(cotangents) => cotangents,
        Err(AutodiffError::Graph(error)) => return Err(error),
        Err(_) => return Ok(Undefined("its decomposition is not differentiable")),
    };
    for &cotangent in &cotangents {
        parts.output("cotangent", cotangent)?;
    }
    let mut embedded: HashMap<NodeId, NodeId> = HashMap::new();
    for id in parts.live() {
        let node = parts.node(id);
        let new = match node.op {
            Op::Input(input) => outer[input.0 as usize],
            _ => g.push(node.op.clone(), &node.operands.iter().map(|o| embedded[o]).collect::<Vec<_>>())?,
        };
        embedded.insert(id, new);
    }
    Ok(Value(embedded[&cotangents[0]]))
}

/// Each window's cotangent goes to its first largest element; overlapping windows add.
fn max_pool(g: &mut Graph, window: &WindowDims, x: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    let mask = max_pool_mask(g, x, window)?;
    let shape = g.ty(mask).shape.clone();
    let spatial = window.size.len();
    let window_axes: Vec<usize> = (shape.rank() - spatial..shape.rank()).collect();
    let spread = g.broadcast_without(dy, &shape, &window_axes)?;
    let zero = g.constant_like(spread, 0.0)?;
    let chosen = g.select(mask, spread, zero)?;
    let x_shape = &g.ty(x).shape;
    let sizes = x_shape[x_shape.rank() - spatial..].to_vec();
    g.push(Op::Fold { window: window.clone(), sizes }, &[chosen])
}

#[cfg(test)]
mod tests {
    use meganeura_ir::Tensor;
    use meganeura_ir::interpreter::{Environment, Real, interpret};

    use super::*;
    use crate::testing::{assert_close, check, graph_of, grid, input_cotangents, reals};

    fn window(size: &[usize], stride: &[usize], pads: &[(isize, isize)]) -> WindowDims {
        let [size, stride] = [size.to_vec(), stride.to_vec()];
        WindowDims { dilation: vec![1; size.len()], size, stride, pads: pads.to_vec() }
    }

    fn cases() -> Vec<(Composite, Tensor)> {
        let epsilon = meganeura_ir::Real(1e-2);
        vec![
            (Composite::Softmax { axis: 1 }, grid([2, 5, 3], -2.0, 2.0)),
            (Composite::Softmax { axis: 0 }, grid([1], -2.0, 2.0)),
            (Composite::LogSoftmax { axis: 1 }, grid([3, 4], -2.0, 2.0)),
            (Composite::Normalize { axes: vec![1, 2], epsilon }, grid([2, 3, 3], -2.0, 2.0)),
            (Composite::Normalize { axes: vec![0], epsilon }, grid([5, 2], -2.0, 2.0)),
            (Composite::RmsNormalize { axes: vec![1], epsilon }, grid([3, 7], -2.0, 2.0)),
            (Composite::Gelu, grid([3, 5], -3.0, 3.0)),
            (Composite::GeluTanh, grid([3, 5], -3.0, 3.0)),
            (Composite::Silu, grid([3, 5], -3.0, 3.0)),
            (Composite::Relu, grid([3, 5], -3.0, 3.0)),
            (Composite::MaxPool(window(&[3], &[2], &[(1, 0)])), grid([2, 7], -3.0, 3.0)),
            (Composite::MaxPool(window(&[2, 3], &[1, 2], &[(0, 1), (1, 1)])), grid([2, 4, 5], -3.0, 3.0)),
        ]
    }

    #[test]
    fn every_composite_derivative_is_the_limit_of_differences() {
        for (composite, x) in cases() {
            let op = Op::Composite(composite.clone());
            check(composite.name(), &[x], |g, x| g.push(op.clone(), x));
        }
    }

    #[test]
    fn every_composite_derivative_is_that_of_its_decomposition() {
        for (composite, x) in cases() {
            let x = [x];
            let (whole, y) = graph_of(&x, |g, x| g.push(Op::Composite(composite.clone()), x));
            let (parts, z) = graph_of(&x, |g, x| composite.decompose(g, x));
            let expected = input_cotangents(&parts, z, &x);
            assert_close(composite.name(), &input_cotangents(&whole, y, &x)[0], &expected[0], 1e-9);
        }
    }

    #[test]
    fn composites_of_nothing_differentiate() {
        let epsilon = meganeura_ir::Real(1e-5);
        for (composite, shape) in [
            (Composite::Softmax { axis: 1 }, vec![0, 3]),
            (Composite::LogSoftmax { axis: 1 }, vec![3, 0]),
            (Composite::Normalize { axes: vec![1], epsilon }, vec![2, 0]),
            (Composite::RmsNormalize { axes: vec![0], epsilon }, vec![3, 0]),
            (Composite::Gelu, vec![0]),
            (Composite::Relu, vec![0]),
            (Composite::MaxPool(window(&[2], &[1], &[(0, 0)])), vec![0, 4]),
        ] {
            let op = Op::Composite(composite.clone());
            check(composite.name(), &[grid(shape, -1.0, 1.0)], |g, x| g.push(op.clone(), x));
        }
    }

    #[test]
    fn relu_is_flat_at_zero_and_max_pooling_takes_the_first_of_equals() {
        let (g, y) = graph_of(&[reals([1], &[0.0])], |g, x| g.push(Op::Composite(Composite::Relu), x));
        assert_eq!(input_cotangents(&g, y, &[reals([1], &[0.0])])[0], [0.0]);

        let tied = [reals([1, 4], &[0.0, 5.0, 5.0, 5.0])];
        let pool = Op::Composite(Composite::MaxPool(window(&[4], &[1], &[(0, 0)])));
        let (g, y) = graph_of(&tied, |g, x| g.push(pool.clone(), x));
        let d = &input_cotangents(&g, y, &tied)[0];
        assert!(d[1] != 0.0 && [d[0], d[2], d[3]] == [0.0; 3], "{d:?}");
    }

    /// The cotangents of `composite` for a given one of its result, computed in `T`, where all numbers are those that f32 holds.
    fn cotangents_in<T: Real>(composite: &Composite, x: &Tensor, dy: &Tensor) -> Vec<f64> {
        let mut g = Graph::new();
        let [x_node, dy_node] = [("x", x), ("dy", dy)].map(|(name, t)| g.input(name, t.ty().clone()).unwrap());
        let y = g.push(Op::Composite(composite.clone()), &[x_node]).unwrap();
        let dx = vjp(&mut g, &[(y, dy_node)], &[x_node]).unwrap()[0];
        g.output("dx", dx).unwrap();
        let environment = Environment::<T>::from_tensors(&[x.clone(), dy.clone()], &[]);
        interpret(&g, &environment).unwrap().outputs()[0].to_f64_vec()
    }

    #[test]
    fn every_element_of_a_nearly_certain_softmax_has_its_own_slope() {
        for gap in [0.0, 1.0, 10.0, 20.0, 50.0, 80.0] {
            // The largest element comes first, in the middle, twice, last.
            let rows = [[gap, 0.0, -0.7, 0.4], [0.25, gap, 0.3, -1.5], [gap, gap, 0.0, -0.5], [0.0, -2.0, 1.0, gap + 1.0]];
            let x = Tensor::from_f32([4, 4], &rows.concat().iter().map(|v| *v as f32).collect::<Vec<_>>());
            let dense =
                Tensor::from_f32([4, 4], &[3.1, -1.7, 0.9, 2.3, -0.2, 0.6, 1.9, -2.2, 0.7, 1.3, -0.8, 2.9, 1.1, -0.4, 0.55, 5.3]);
            // Of a cross entropy, whose target is the largest element of two rows.
            let chosen = Tensor::from_f32(
                [4, 4],
                &[-0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.25, 0.0, -0.25, 0.0, 0.0, 0.0, 0.0, 0.0, -0.25],
            );
            for composite in [Composite::Softmax { axis: 1 }, Composite::LogSoftmax { axis: 1 }] {
                for dy in [&dense, &chosen] {
                    let [found, expected] = [cotangents_in::<f32>(&composite, &x, dy), cotangents_in::<f64>(&composite, &x, dy)];
                    for (found, expected) in found.iter().zip(&expected) {
                        let error = (found - expected).abs();
                        assert!(
                            error <= 1e-4 * expected.abs() + f64::from(f32::MIN_POSITIVE),
                            "{composite:?}, gap {gap}: {found} instead of {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn large_arguments_stay_finite() {
        for composite in [Composite::Softmax { axis: 0 }, Composite::LogSoftmax { axis: 0 }, Composite::Silu, Composite::GeluTanh]
        {
            let x = [reals([3], &[-1e4, 0.0, 1e4])];
            let (g, y) = graph_of(&x, |g, x| g.push(Op::Composite(composite.clone()), x));
            assert!(input_cotangents(&g, y, &x)[0].iter().all(|d| d.is_finite()), "{}", composite.name());
        }
    }
}
