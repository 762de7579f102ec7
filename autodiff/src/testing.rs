//! Gradient tests against central finite differences, in f64.

use meganeura_ir::interpreter::{Environment, Value, interpret};
use meganeura_ir::testing::random_tensor;
use meganeura_ir::{DType, Graph, GraphError, InputId, NodeId, Op, Shape, Tensor, TensorType};

use crate::vjp;

/// Distinct f64 values, evenly spaced over `low..high` in a shuffled order, none of them on a multiple of their spacing.
pub fn grid(shape: impl Into<Shape>, low: f64, high: f64) -> Tensor {
    let shape = shape.into();
    let n = shape.numel();
    let spacing = (high - low) / n.max(1) as f64;
    // A multiplier coprime to n permutes 0..n.
    let stride = (n * 5 / 8..).find(|&s| gcd(s, n) == 1).unwrap_or(1);
    let values: Vec<f64> = (0..n).map(|i| low + spacing * ((i * stride % n) as f64 + 0.37)).collect();
    Tensor::from_f64(DType::F64, shape, &values)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub fn indices(shape: impl Into<Shape>, values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::I64, shape, values)
}

pub fn reals(shape: impl Into<Shape>, values: &[f64]) -> Tensor {
    Tensor::from_f64(DType::F64, shape, values)
}

/// The values of `nodes`, where `tensors` are the graph's inputs.
pub fn evaluate(g: &Graph, tensors: &[Tensor], nodes: &[NodeId]) -> Vec<Vec<f64>> {
    evaluate_at(g, tensors.iter().map(Value::from_tensor).collect(), nodes)
}

fn evaluate_at(g: &Graph, inputs: Vec<Value<f64>>, nodes: &[NodeId]) -> Vec<Vec<f64>> {
    let mut g = g.clone();
    g.clear_outputs();
    for (i, &node) in nodes.iter().enumerate() {
        g.output(i.to_string(), node).unwrap();
    }
    let evaluation = interpret(&g, &Environment { inputs, parameters: Vec::new() }).unwrap();
    evaluation.outputs().into_iter().map(|v| v.to_f64_vec()).collect()
}

/// The graph of `build` over inputs of the types of `tensors`, and its result.
pub fn graph_of(tensors: &[Tensor], build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId, GraphError>) -> (Graph, NodeId) {
    let mut g = Graph::new();
    let inputs: Vec<NodeId> = tensors.iter().enumerate().map(|(i, t)| g.input(i.to_string(), t.ty().clone()).unwrap()).collect();
    let y = build(&mut g, &inputs).unwrap();
    (g, y)
}

/// The nodes of a graph's float inputs.
pub fn float_inputs(g: &mut Graph) -> Vec<NodeId> {
    let floats: Vec<u32> = (0..g.inputs().len() as u32).filter(|&i| g.inputs()[i as usize].ty.dtype.is_float()).collect();
    floats.into_iter().map(|i| g.push(Op::Input(InputId(i)), &[]).unwrap()).collect()
}

/// The cotangents of a graph's float inputs for a fixed, uneven cotangent of `y`.
pub fn input_cotangents(g: &Graph, y: NodeId, tensors: &[Tensor]) -> Vec<Vec<f64>> {
    let mut g = g.clone();
    let seed = g.constant(seed_cotangent(g.ty(y)).cast(g.ty(y).dtype)).unwrap();
    let wrt = float_inputs(&mut g);
    let cotangents = vjp(&mut g, &[(y, seed)], &wrt).unwrap();
    for (&node, &cotangent) in wrt.iter().zip(&cotangents) {
        assert_eq!(g.ty(node), g.ty(cotangent));
    }
    let g = g.verify().unwrap().into_inner();
    evaluate(&g, tensors, &cotangents)
}

fn seed_cotangent(ty: &TensorType) -> Tensor {
    grid(ty.shape.clone(), -1.0, 1.7)
}

/// Asserts that the derivative of `build` at `tensors`, with respect to each element of each float one, is the limit of finite
/// differences, and that no kink is near.
pub fn check(name: &str, tensors: &[Tensor], build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId, GraphError>) {
    let (g, y) = graph_of(tensors, build);
    let cotangents = input_cotangents(&g, y, tensors);
    let inputs: Vec<Value<f64>> = tensors.iter().map(Value::from_tensor).collect();
    let objective = |inputs: Vec<Value<f64>>| weighted_sum(&g, y, inputs);
    for (input, cotangent) in float_positions(&inputs).zip(&cotangents) {
        for (at, &found) in cotangent.iter().enumerate() {
            let moved = |by: f64| {
                let mut inputs = inputs.clone();
                if let Value::Float(values) = &mut inputs[input] {
                    values[at] += by;
                }
                objective(inputs)
            };
            let expected = slope(moved, 1e-3).unwrap_or_else(|| panic!("{name}: a kink near input {input} element {at}"));
            let error = (found - expected).abs();
            assert!(
                error <= 1e-6 * (1.0 + expected.abs()),
                "{name}, input {input} element {at}: {found}, numerically {expected}"
            );
        }
    }
}

/// What came of [`check_direction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Checked,
    /// A kink is near.
    Skipped,
}

/// Asserts that the derivative of `y` along one direction through all float inputs is the limit of finite differences.
pub fn check_direction(name: &str, g: &Graph, y: NodeId, tensors: &[Tensor], seed: u64, tolerance: f64) -> Direction {
    let inputs: Vec<Value<f64>> = tensors.iter().map(Value::from_tensor).collect();
    let directions: Vec<Vec<f64>> =
        tensors.iter().map(|t| random_tensor(&TensorType::new(DType::F64, t.shape().clone()), seed).to_f64_vec()).collect();
    let moved = |by: f64| {
        let mut inputs = inputs.clone();
        for (value, direction) in inputs.iter_mut().zip(&directions) {
            if let Value::Float(values) = value {
                values.iter_mut().zip(direction).for_each(|(v, d)| *v += by * d);
            }
        }
        weighted_sum(g, y, inputs)
    };
    let Some(expected) = slope(moved, 1e-5) else { return Direction::Skipped };
    let cotangents = input_cotangents(g, y, tensors);
    let terms = || float_positions(&inputs).zip(&cotangents).flat_map(|(i, c)| c.iter().zip(&directions[i]).map(|(c, d)| c * d));
    let (found, scale) = (terms().sum::<f64>(), terms().map(|t| t * t).sum::<f64>().sqrt());
    let error = (found - expected).abs();
    assert!(error <= tolerance * (1.0 + scale), "{name}: {found} along direction {seed}, numerically {expected}");
    Direction::Checked
}

fn float_positions(inputs: &[Value<f64>]) -> impl Iterator<Item = usize> {
    (0..inputs.len()).filter(|&i| matches!(inputs[i], Value::Float(_)))
}

/// `y` against its fixed cotangent; elements that are not finite, as the maximum of nothing, are constant.
fn weighted_sum(g: &Graph, y: NodeId, inputs: Vec<Value<f64>>) -> f64 {
    let values = &evaluate_at(g, inputs, &[y])[0];
    values.iter().zip(seed_cotangent(g.ty(y)).to_f64_vec()).filter(|(y, _)| y.is_finite()).map(|(y, s)| y * s).sum()
}

/// The derivative of `f` at 0 by central differences at two steps; none where the two disagree, so that a kink must be near.
fn slope(f: impl Fn(f64) -> f64, step: f64) -> Option<f64> {
    let difference = |step: f64| (f(step) - f(-step)) / (2.0 * step);
    let (coarse, fine) = (difference(step), difference(step / 2.0));
    // The error of each is quadratic in its step: this combination cancels it.
    ((coarse - fine).abs() <= 1e-3 * (1.0 + fine.abs())).then_some((4.0 * fine - coarse) / 3.0)
}

pub fn assert_close(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance * (1.0 + e.abs()), "{name}, element {i}: {f}, expected {e}");
    }
}
