//! Large operands of products as f16 in memory, for devices with matrix units.
//!
//! A product reads each element of an operand hundreds of times. Where it is large, it pays to round the operand once, to values of two bytes
//! that its kernel takes as they are. The operand is scaled by a power of two, which brings its largest finite magnitude into the range of
//! f16, and the result back. Elements smaller by 2^29 lose accuracy, and those smaller by 2^39 become zero.

use std::collections::{BTreeMap, BTreeSet};

use meganeura_ir::{BinaryOp, CompareOp, DType, Graph, GraphError, Node, NodeId, Op, ReduceOp, UnaryOp};

use crate::access::contract_shape;
use crate::kernels::takes_matrix_units;
use crate::profile::DeviceProfile;

/// Picoseconds that a product saves for each million multiplications, where one of its operands has two bytes: 15 % of 11,000.
const SAVED: u64 = 1_650;
/// Picoseconds for each thousand elements of finding the largest magnitude, rounding, and writing: 10 bytes at 3.9 TB/s.
const ELEMENTS: u64 = 2_600;
/// Picoseconds of the three dispatches, which wait for each other.
const DISPATCHES: u64 = 12_000_000;
/// The power of two to which the largest value is scaled, give or take one.
const LARGEST: f64 = 14.0;
/// The largest power of two of which the reciprocal is no subnormal.
const MAX_SCALE: f64 = 126.0;
/// The most elements of which the largest is found at once.
const ROW: usize = 4096;

/// The same graph, with those operands of products as f16 for which that takes less time.
pub fn halve(graph: &Graph, profile: &DeviceProfile) -> Result<Graph, GraphError> {
    let worthwhile = |saved: u64, elements: u64| saved > DISPATCHES + elements * ELEMENTS / 1000;
    match profile.matrix_unit {
        Some(_) => halve_where(graph, |dot| takes_matrix_units(graph, dot, profile), worthwhile),
        None => Ok(graph.clone()),
    }
}

/// Halves the operands of the products which `suits`, where `worthwhile` holds of the picoseconds that they save and their elements.
fn halve_where(
    graph: &Graph,
    suits: impl Fn(NodeId) -> bool,
    worthwhile: impl Fn(u64, u64) -> bool,
) -> Result<Graph, GraphError> {
    let is_product = |id: &NodeId| matches!(graph.node(*id).op, Op::Dot(_)) && suits(*id);
    let mut saved: BTreeMap<NodeId, u64> = BTreeMap::new();
    for id in graph.live().into_iter().filter(is_product) {
        let shape = contract_shape(graph, id);
        let sizes = [&shape.batch, &shape.m, &shape.n, &shape.k];
        let products = sizes.into_iter().flatten().fold(1u64, |product, &size| product.saturating_mul(size as u64));
        let rounded = |x: &NodeId| graph.ty(*x).dtype == DType::F32 && !is_exact_in_f16(graph, *x, &BTreeSet::new());
        let operands: BTreeSet<NodeId> = graph.node(id).operands.iter().map(|&x| source(graph, x)).filter(rounded).collect();
        operands.into_iter().for_each(|x| *saved.entry(x).or_default() += products.saturating_mul(SAVED) / 1_000_000);
    }
    saved.retain(|&x, saved| worthwhile(*saved, graph.ty(x).shape.numel() as u64));
    if saved.is_empty() {
        return Ok(graph.clone());
    }
    let mut live = graph.live().into_iter().filter(|&id| !graph.node(id).op.is_leaf());
    graph.rewrite(|g, node, operands| {
        let product = live.next().filter(is_product);
        let Some(product) = product else { return g.push(node.op.clone(), operands) };
        let mut operands = operands.to_vec();
        let mut back = Vec::new();
        for (new, &old) in operands.iter_mut().zip(&graph.node(product).operands) {
            if saved.contains_key(&source(graph, old)) {
                let x = source(g, *new);
                let scale = scale(g, x)?;
                let half = rounded(g, x, scale)?;
                let moved = moved(g, *new, half)?;
                *new = g.cast(moved, DType::F32)?;
                back.push(g.unary(UnaryOp::Reciprocal, scale)?);
            }
        }
        if let [x, y] = back[..] {
            // The smaller first: a large one may lead beyond f32 where both together do not.
            back = vec![g.binary(BinaryOp::Min, x, y)?, g.binary(BinaryOp::Max, x, y)?];
        }
        let result = g.push(node.op.clone(), &operands)?;
        back.into_iter().try_fold(result, |result, back| {
            let back = g.broadcast_to(back, &node.ty.shape)?;
            g.mul(result, back)
        })
    })
}

/// Whether every element of `node` is the value of an f16, as far as that shows without a look at what produced the values in `reads`.
pub fn is_exact_in_f16(graph: &Graph, node: NodeId, reads: &BTreeSet<NodeId>) -> bool {
    let Node { op, operands, ty } = graph.node(node);
    match (ty.dtype, op) {
        (DType::F16 | DType::I8 | DType::U8 | DType::Bool, _) => true,
        _ if reads.contains(&node) => false,
        (DType::F32, Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast { .. } | Op::Slice(_)) => {
            is_exact_in_f16(graph, operands[0], reads)
        }
        _ => false,
    }
}

/// Where the elements of an operand come from: it may be that, in another order or shape.
fn source(graph: &Graph, mut x: NodeId) -> NodeId {
    while let Op::Transpose(_) | Op::Reshape(_) = graph.node(x).op {
        x = graph.node(x).operands[0];
    }
    x
}

/// `half` in the order and shape that `x` has of its source.
fn moved(g: &mut Graph, x: NodeId, half: NodeId) -> Result<NodeId, GraphError> {
    let node = g.node(x).clone();
    match node.op {
        Op::Transpose(_) | Op::Reshape(_) => {
            let operand = moved(g, node.operands[0], half)?;
            g.push(node.op, &[operand])
        }
        _ => Ok(half),
    }
}

/// The power of two that brings the finite elements of `x` into the range of f16: a scalar.
fn scale(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let count = g.ty(x).shape.numel();
    let row = (1..=ROW).rev().find(|row| count.is_multiple_of(*row)).unwrap_or(1);
    let x = g.reshape(x, [count / row, row])?;
    let infinity = g.constant_like(x, f64::INFINITY)?;
    let zero = g.constant_like(x, 0.0)?;
    let magnitude = g.unary(UnaryOp::Abs, x)?;
    let finite = g.compare(CompareOp::Lt, magnitude, infinity)?;
    let magnitude = g.select(finite, magnitude, zero)?;
    let rows = g.reduce(ReduceOp::Max, magnitude, &[1])?;
    let peak = g.reduce(ReduceOp::Max, rows, &[0])?;
    let least = g.constant_like(peak, f32::MIN_POSITIVE.into())?;
    let peak = g.binary(BinaryOp::Max, peak, least)?;
    let exponent = g.unary(UnaryOp::Log, peak)?;
    let exponent = g.scale(exponent, std::f64::consts::LOG2_E)?;
    let exponent = g.unary(UnaryOp::Floor, exponent)?;
    let exponent = g.unary(UnaryOp::Neg, exponent)?;
    let exponent = g.shift(exponent, LARGEST)?;
    let most = g.constant_like(exponent, MAX_SCALE)?;
    let exponent = g.binary(BinaryOp::Min, exponent, most)?;
    let two = g.constant_like(exponent, 2.0)?;
    g.binary(BinaryOp::Pow, two, exponent)
}

/// `x` by `scale`, as f16.
fn rounded(g: &mut Graph, x: NodeId, scale: NodeId) -> Result<NodeId, GraphError> {
    let scale = g.broadcast_to(scale, &g.ty(x).shape.clone())?;
    let scaled = g.mul(x, scale)?;
    g.cast(scaled, DType::F16)
}

#[cfg(test)]
mod tests {
    use meganeura_ir::interpreter::{Environment, interpret};
    use meganeura_ir::testing::{contraction_graphs, random_tensor, relative_l2};
    use meganeura_ir::{DotDims, Tensor, TensorType};

    use super::*;
    use crate::profile::Precision;

    fn casts(graph: &Graph) -> usize {
        graph.live().into_iter().filter(|&id| graph.node(id).op == Op::Cast(DType::F16)).count()
    }

    fn outputs(graph: &Graph, inputs: &[Tensor]) -> Vec<Vec<f64>> {
        let values = interpret(graph, &Environment::<f64>::from_tensors(inputs, [])).unwrap();
        values.outputs().iter().map(|output| output.to_f64_vec()).collect()
    }

    /// `x @ y^T`, and its product with `x`, of `n x n` matrices.
    fn products(n: usize) -> Graph {
        let mut g = Graph::new();
        let [x, y] = ["x", "y"].map(|name| g.input(name, TensorType::new(DType::F32, [n, n])).unwrap());
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
        let turned = g.transpose(y, &[1, 0]).unwrap();
        let z = g.push(Op::Dot(dims.clone()), &[x, turned]).unwrap();
        let z = g.push(Op::Dot(dims), &[z, x]).unwrap();
        g.output("z", z).unwrap();
        g
    }

    #[test]
    fn products_of_halves_are_products_but_for_rounding() {
        for (name, graph) in contraction_graphs() {
            let inputs: Vec<Tensor> = graph.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
            let halved = halve_where(&graph, |_| true, |_, elements| elements > 1).unwrap();
            for (found, expected) in outputs(&halved, &inputs).iter().zip(&outputs(&graph, &inputs)) {
                let error = relative_l2(found, expected);
                assert!(error <= 1e-3, "{name}: {error:e}");
            }
        }
    }

    #[test]
    fn large_operands_are_rounded_once_where_a_device_has_matrix_units() {
        let accelerated = DeviceProfile::nvidia(Precision::Accelerated);
        let large = halve(&products(4096), &accelerated).unwrap();
        assert_eq!(casts(&large), 3);
        assert_eq!(casts(&halve(&products(512), &accelerated).unwrap()), 0);
        assert_eq!(casts(&halve(&products(4096), &DeviceProfile::nvidia(Precision::Strict)).unwrap()), 0);
    }

    #[test]
    fn magnitudes_survive_and_what_is_not_finite_stays_in_its_row() {
        let graph = products(8);
        let halved = halve_where(&graph, |_| true, |_, _| true).unwrap();
        let scaled = |seed, by: f32| {
            let values = random_tensor(&TensorType::new(DType::F32, [8, 8]), seed).to_f32_vec();
            Tensor::from_f32([8, 8], &values.iter().map(|v| v * by).collect::<Vec<_>>())
        };
        for (x, y) in [(1e-15, 1e-9), (1e12, 1e9), (0.0, 1.0), (1e-30, 1e25), (1e-12, 1e-8), (1e-18, 1e34), (1e18, 1e-38)] {
            let inputs = [scaled(1, x), scaled(2, y)];
            let found = interpret(&halved, &Environment::<f32>::from_tensors(&inputs, [])).unwrap();
            let found: Vec<Vec<f64>> = found.outputs().iter().map(|output| output.to_f64_vec()).collect();
            let expected = outputs(&graph, &inputs);
            if x == 0.0 {
                assert_eq!(found, expected);
            } else {
                assert!(relative_l2(&found[0], &expected[0]) <= 1e-3, "{x} {y}");
            }
        }
        let mut values = scaled(1, 1.0).to_f32_vec();
        values[3 * 8 + 2] = f32::INFINITY;
        let first_product = {
            let mut g = graph.clone();
            let product = g.live().into_iter().find(|&id| matches!(g.node(id).op, Op::Dot(_))).unwrap();
            g.clear_outputs();
            g.output("z", product).unwrap();
            g
        };
        let inputs = [Tensor::from_f32([8, 8], &values), scaled(2, 1.0)];
        let halved = halve_where(&first_product, |_| true, |_, _| true).unwrap();
        let (found, expected) = (outputs(&halved, &inputs), outputs(&first_product, &inputs));
        for (i, (found, expected)) in found[0].iter().zip(&expected[0]).enumerate() {
            assert_eq!(i / 8 == 3, !found.is_finite());
            assert!(!expected.is_finite() || (found - expected).abs() <= 1e-2, "{i}: {found} {expected}");
        }
    }
}
