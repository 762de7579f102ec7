//! Reverse mode over a graph.

use meganeura_ir::{Graph, GraphError, NodeId, TensorType};

use crate::rules::{Cotangent, cotangent};

/// Why a graph cannot be differentiated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AutodiffError {
    #[error("a loss is a float scalar, %{} is {ty}", node.0)]
    Loss { node: NodeId, ty: TensorType },
    #[error("%{} is {ty}: only floats have derivatives", node.0)]
    NotFloat { node: NodeId, ty: TensorType },
    #[error("the cotangent of %{} is {found}, the node {expected}", node.0)]
    CotangentType { node: NodeId, expected: TensorType, found: TensorType },
    #[error("%{0} is not in the graph")]
    UnknownNode(u32),
    #[error("{op} (%{}) is not differentiable: {reason}", node.0)]
    NotDifferentiable { node: NodeId, op: &'static str, reason: &'static str },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// Appends the gradient of `loss`, a float scalar, with respect to each node of `wrt`: nodes of the same types, zeros where `loss` does
/// not depend on the node.
///
/// Integers and bools pass no gradient, as in PyTorch. New nodes have the origin of the node whose derivative they compute.
///
/// # Errors
/// `loss` is not a float scalar, a node of `wrt` is not a float, or an op on the way has no derivative.
pub fn gradients(g: &mut Graph, loss: NodeId, wrt: &[NodeId]) -> Result<Vec<NodeId>, AutodiffError> {
    let ty = type_of(g, loss)?;
    if !ty.dtype.is_float() || ty.shape.rank() != 0 {
        return Err(AutodiffError::Loss { node: loss, ty });
    }
    let one = g.splat(&ty, 1.0)?;
    vjp(g, &[(loss, one)], wrt)
}

/// Appends the vector-Jacobian product: for each node of `wrt` the sum, over the pairs `(output, cotangent)`, of the cotangent times the
/// derivative of the output. A cotangent has its output's type, a result that of its node.
///
/// # Errors
/// As [`gradients`], and where a cotangent's type differs from its output's.
pub fn vjp(g: &mut Graph, outputs: &[(NodeId, NodeId)], wrt: &[NodeId]) -> Result<Vec<NodeId>, AutodiffError> {
    for &node in wrt {
        check_float(g, node)?;
    }
    for &(node, seed) in outputs {
        let expected = check_float(g, node)?;
        let found = type_of(g, seed)?;
        if found != expected {
            return Err(AutodiffError::CotangentType { node, expected, found });
        }
    }
    let active = depending_on(g, wrt);
    let mut cotangents: Vec<Option<NodeId>> = vec![None; active.len()];
    for &(node, seed) in outputs {
        if active[node.index()] {
            accumulate(g, &mut cotangents[node.index()], seed)?;
        }
    }
    // Rules append nodes; only the original ones have cotangents.
    for index in (0..active.len()).rev() {
        let Some(dy) = cotangents[index] else { continue };
        let id = NodeId(index as u32);
        let node = g.node(id).clone();
        g.set_origin(g.origin(id).cloned());
        for (position, &operand) in node.operands.iter().enumerate() {
            if !active[operand.index()] {
                continue;
            }
            match cotangent(g, &node, id, dy, position)? {
                Cotangent::Value(value) => {
                    debug_assert_eq!(g.ty(value), g.ty(operand), "cotangent of {} operand {position}", node.op.name());
                    accumulate(g, &mut cotangents[operand.index()], value)?;
                }
                Cotangent::Zero => {}
                Cotangent::Undefined(reason) => {
                    return Err(AutodiffError::NotDifferentiable { node: id, op: node.op.name(), reason });
                }
            }
        }
    }
    g.set_origin(None);
    wrt.iter()
        .map(|&node| match cotangents[node.index()] {
            Some(cotangent) => Ok(cotangent),
            None => Ok(g.constant_like(node, 0.0)?),
        })
        .collect()
}

/// Which nodes are float functions of a node of `wrt`.
fn depending_on(g: &Graph, wrt: &[NodeId]) -> Vec<bool> {
    let mut depends = vec![false; g.nodes().len()];
    for &node in wrt {
        depends[node.index()] = true;
    }
    for id in g.ids() {
        let node = g.node(id);
        depends[id.index()] |= node.ty.dtype.is_float() && node.operands.iter().any(|o| depends[o.index()]);
    }
    depends
}

fn accumulate(g: &mut Graph, sum: &mut Option<NodeId>, term: NodeId) -> Result<(), GraphError> {
    *sum = Some(match *sum {
        Some(previous) => g.add(previous, term)?,
        None => term,
    });
    Ok(())
}

fn type_of(g: &Graph, node: NodeId) -> Result<TensorType, AutodiffError> {
    g.nodes().get(node.index()).map(|n| n.ty.clone()).ok_or(AutodiffError::UnknownNode(node.0))
}

fn check_float(g: &Graph, node: NodeId) -> Result<TensorType, AutodiffError> {
    let ty = type_of(g, node)?;
    if ty.dtype.is_float() { Ok(ty) } else { Err(AutodiffError::NotFloat { node, ty }) }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::{CompareOp, DType, Op, UnaryOp};

    use super::*;
    use crate::testing::{evaluate, reals};

    fn float(sizes: &[usize]) -> TensorType {
        TensorType::new(DType::F64, sizes)
    }

    #[test]
    fn paths_that_join_add() {
        let mut g = Graph::new();
        let x = g.input("x", float(&[])).unwrap();
        let square = g.mul(x, x).unwrap();
        let sine = g.unary(UnaryOp::Sin, x).unwrap();
        let product = g.mul(square, sine).unwrap();
        let loss = g.add(product, x).unwrap();
        let d = gradients(&mut g, loss, &[x, square, sine, loss]).unwrap();
        let v = 0.7_f64;
        let values = evaluate(&g, &[reals([], &[v])], &d);
        let expected = [2.0 * v * v.sin() + v * v * v.cos() + 1.0, v.sin(), v * v, 1.0];
        for (found, expected) in values.iter().zip(expected) {
            assert!((found[0] - expected).abs() < 1e-14, "{found:?}, expected {expected}");
        }
    }

    #[test]
    fn a_derivative_can_be_differentiated() {
        let mut g = Graph::new();
        let x = g.input("x", float(&[])).unwrap();
        let y = g.unary(UnaryOp::Tanh, x).unwrap();
        let first = gradients(&mut g, y, &[x]).unwrap()[0];
        let second = gradients(&mut g, first, &[x]).unwrap()[0];
        let t = 0.4_f64.tanh();
        let found = evaluate(&g, &[reals([], &[0.4])], &[second])[0][0];
        assert!((found + 2.0 * t * (1.0 - t * t)).abs() < 1e-14);
    }

    #[test]
    fn what_the_loss_does_not_depend_on_gets_zeros() {
        let mut g = Graph::new();
        let x = g.input("x", float(&[2])).unwrap();
        let unused = g.input("unused", float(&[3])).unwrap();
        let compared = g.compare(CompareOp::Gt, x, x).unwrap();
        let counted = g.cast(compared, DType::F64).unwrap();
        let loss = g.reduce(meganeura_ir::ReduceOp::Sum, counted, &[0]).unwrap();
        let d = gradients(&mut g, loss, &[x, unused]).unwrap();
        let values = evaluate(&g, &[reals([2], &[1.0, 2.0]), reals([3], &[0.0; 3])], &d);
        assert_eq!(values, [vec![0.0; 2], vec![0.0; 3]]);
    }

    #[test]
    fn nodes_outside_the_paths_cost_nothing() {
        let mut g = Graph::new();
        let (x, w) = (g.input("x", float(&[])).unwrap(), g.input("w", float(&[])).unwrap());
        let frozen = g.unary(UnaryOp::Atan, x).unwrap();
        let loss = g.mul(frozen, w).unwrap();
        let before = g.nodes().len();
        let d = gradients(&mut g, loss, &[w]).unwrap();
        let added: Vec<&Op> = g.nodes()[before..].iter().map(|n| &n.op).collect();
        assert!(added.iter().all(|op| matches!(op, Op::Constant(_) | Op::Binary(_))), "{added:?}");
        assert_eq!(evaluate(&g, &[reals([], &[1.0]), reals([], &[5.0])], &d)[0][0], 1.0_f64.atan());
    }

    #[test]
    fn several_outputs_add_their_cotangents() {
        let mut g = Graph::new();
        let x = g.input("x", float(&[2])).unwrap();
        let y = g.unary(UnaryOp::Neg, x).unwrap();
        let seed = g.splat(&float(&[2]), 3.0).unwrap();
        let d = vjp(&mut g, &[(y, seed), (x, seed), (y, seed)], &[x]).unwrap();
        assert_eq!(evaluate(&g, &[reals([2], &[1.0, 2.0])], &d)[0], [-3.0, -3.0]);
    }

    #[test]
    fn wrong_types_are_errors() {
        let mut g = Graph::new();
        let x = g.input("x", float(&[2])).unwrap();
        let i = g.input("i", TensorType::scalar(DType::I64)).unwrap();
        let s = g.input("s", float(&[])).unwrap();
        assert!(matches!(gradients(&mut g, x, &[x]), Err(AutodiffError::Loss { .. })));
        assert!(matches!(gradients(&mut g, i, &[x]), Err(AutodiffError::Loss { .. })));
        assert!(matches!(gradients(&mut g, s, &[i]), Err(AutodiffError::NotFloat { .. })));
        assert!(matches!(vjp(&mut g, &[(x, s)], &[x]), Err(AutodiffError::CotangentType { .. })));
        assert!(matches!(gradients(&mut g, NodeId(99), &[x]), Err(AutodiffError::UnknownNode(99))));
    }
}
