//! The derivative of every op: one vector-Jacobian product per operand, as the formula.
//!
//! Rules re-derive the forward values that they need; the graph is interned, so nothing is computed twice.

mod attention;
mod composite;
mod contraction;
mod indexing;
mod movement;
mod pointwise;
mod reduction;

use meganeura_ir::{Graph, GraphError, Node, NodeId, Op, TensorType};

use crate::formula::{Formula, Term, formula, formula_or};
use Cotangent::{Undefined, Value};
use indexing::Scattered;

/// What one operand of an op receives from the cotangent of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cotangent {
    /// In the operand's type.
    Value(NodeId),
    /// The derivative vanishes wherever it exists, as in PyTorch.
    Zero,
    /// There is no derivative; the reason.
    Undefined(&'static str),
}

const INTEGER_RESULT: Cotangent = Undefined("its result is not a float");
const INTEGER_OPERAND: Cotangent = Undefined("the operand is not a float");

/// The cotangent of `node`'s operand number `operand`, where `y` is the node itself and `dy` its cotangent.
///
/// Where a float result has float operands, every op of today answers with a value or zero.
pub(crate) fn cotangent(g: &mut Graph, node: &Node, y: NodeId, dy: NodeId, operand: usize) -> Result<Cotangent, GraphError> {
    let at = |i: usize| node.operands[i];
    match &node.op {
        Op::Input(_) | Op::Parameter(_) | Op::Constant(_) | Op::Iota { .. } => Ok(Undefined("a leaf has no operands")),

        Op::RandomUniform { .. } => Ok(INTEGER_OPERAND),

        Op::Unary(op) => pointwise::unary(g, *op, at(0), y, dy),
        Op::Binary(op) => pointwise::binary(g, *op, [at(0), at(1)], y, dy, operand),
        Op::Compare(_) => Ok(INTEGER_RESULT),
        Op::Select => pointwise::select(g, at(0), dy, operand),
        Op::Cast(_) => pointwise::cast(g, at(0), dy),

        Op::Reshape(_) => movement::reshape(g, at(0), dy),
        Op::Transpose(perm) => movement::transpose(g, perm, dy),
        Op::Broadcast { shape, axes } => movement::broadcast(g, shape, axes, dy),
        Op::Slice(dims) => movement::slice(g, dims, at(0), dy),
        Op::Pad(dims) => movement::pad(g, dims, at(0), dy, operand),
        Op::Concat { axis } => movement::concat(g, *axis, &node.operands, dy, operand),
        Op::Unfold(window) => movement::unfold(g, window, at(0), dy, operand),
        Op::Fold { window, .. } => movement::fold(g, window, dy),

        Op::Dot(dims) => contraction::dot(g, dims, [at(0), at(1)], dy, operand),
        Op::Conv(dims) => contraction::conv(g, dims, [at(0), at(1)], dy, operand),

        Op::Reduce { op, axes } => reduction::reduce(g, *op, axes, at(0), y, dy),
        Op::ArgReduce { .. } => Ok(INTEGER_RESULT),

        Op::Gather { axis } => indexing::gather(g, *axis, [at(0), at(1)], dy, operand),
        Op::Scatter { op, axis } => {
            let scattered = Scattered { axis: *axis, x: at(0), indices: at(1), updates: at(2) };
            indexing::scatter(g, *op, scattered, y, dy, operand)
        }

        Op::Composite(c) => composite::composite(g, c, &node.operands, y, dy, operand),
    }
}

/// A cotangent as a formula, which may return early with [`Zero`] or [`Undefined`].
fn rule(g: &mut Graph, build: impl for<'f> FnOnce(&'f Formula) -> Result<Term<'f>, Cotangent>) -> Result<Cotangent, GraphError> {
    Ok(formula_or(g, build)?.map_or_else(|constant| constant, Value))
}

/// A zero scalar of the dtype of `like`.
fn zero_scalar(g: &mut Graph, like: NodeId) -> Result<NodeId, GraphError> {
    let ty = TensorType::scalar(g.ty(like).dtype);
    g.splat(&ty, 0.0)
}

/// `dy` where the bool `mask` holds, summed to a scalar: the cotangent of a value that fills those places.
fn masked_sum(g: &mut Graph, mask: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    formula(g, |f| {
        let [mask, dy] = f.terms([mask, dy]);
        mask.select(dy, 0.0).sum()
    })
}

#[cfg(test)]
mod tests {
    use meganeura_ir::DType;
    use meganeura_ir::testing::{random_tensor, sample_graphs};

    use crate::testing::{Direction, check_direction};

    /// The interpreter does not round; constants have the precision of their dtype.
    fn tolerance(dtype: DType) -> f64 {
        match dtype {
            DType::F64 => 1e-6,
            DType::F16 => 2e-3,
            DType::BF16 => 2e-2,
            _ => 1e-5,
        }
    }

    #[test]
    fn every_sample_graph_differentiates_along_random_directions() {
        let (mut checked, mut skipped) = (0, Vec::new());
        for (name, g) in sample_graphs() {
            let y = g.outputs()[0].node;
            if !g.ty(y).dtype.is_float() || g.inputs().iter().all(|i| !i.ty.dtype.is_float()) {
                continue;
            }
            let tensors: Vec<_> = g.inputs().iter().zip(1..).map(|(i, seed)| random_tensor(&i.ty, seed)).collect();
            let dtypes = || g.nodes().iter().map(|n| n.ty.dtype);
            let tolerance = dtypes().map(tolerance).fold(0.0, f64::max);
            for seed in 11..13 {
                match check_direction(&name, &g, y, &tensors, seed, tolerance) {
                    Direction::Checked => checked += 1,
                    Direction::Skipped => skipped.push(name.clone()),
                }
            }
        }
        assert!(checked > 1000 && skipped.len() * 50 < checked, "{checked} checked, near kinks: {skipped:#?}");
    }
}
