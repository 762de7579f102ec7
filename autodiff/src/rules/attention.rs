//! Derivatives of attention. Those of the result are composites, so that kernels recompute the weights from the log-sum-exp; all others are
//! the derivatives of the decomposition.

use meganeura_ir::{AttentionDims, AttentionOperand, Composite, Graph, GraphError, NodeId, Op, ReduceOp};

use super::Cotangent::{self, Value};
use super::composite::of_decomposition;

/// `operands` as in [`Composite::Attention`], whose result is `y`.
pub(super) fn attention(
    g: &mut Graph,
    dims: &AttentionDims,
    operands: &[NodeId],
    y: NodeId,
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    let of = match operand {
        0 => AttentionOperand::Query,
        1 => AttentionOperand::Key,
        2 => AttentionOperand::Value,
        _ => return of_decomposition(g, &Composite::Attention(dims.clone()), operands, dy, operand),
    };
    let [query, key, value] = [operands[0], operands[1], operands[2]];
    let mask = operands.get(3).copied();
    let scored: Vec<NodeId> = [query, key].into_iter().chain(mask).collect();
    let lse = g.push(Op::Composite(Composite::AttentionLse(dims.clone())), &scored)?;
    let products = g.mul(dy, y)?;
    let last = g.ty(y).shape.rank() - 1;
    let delta = g.reduce(ReduceOp::Sum, products, &[last])?;
    let operands: Vec<NodeId> = [query, key, value, dy, lse, delta].into_iter().chain(mask).collect();
    g.push(Op::Composite(Composite::AttentionGradient { dims: dims.clone(), of }), &operands).map(Value)
}

#[cfg(test)]
mod tests {
    use meganeura_ir::{DType, Real, Tensor};

    use super::*;
    use crate::testing::{assert_close, check, graph_of, grid, input_cotangents};

    fn cases() -> Vec<(&'static str, AttentionDims, Vec<Tensor>)> {
        let plain = AttentionDims::scaled(0.6);
        let bools =
            Tensor::from_i64(DType::Bool, [2, 3, 4], &[1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1]);
        let (q, k, v) = (grid([2, 3, 2], -2.0, 2.0), grid([2, 4, 2], -1.0, 2.0), grid([2, 4, 3], -2.0, 1.0));
        let qkv = || vec![q.clone(), k.clone(), v.clone()];
        let with = |mask: Tensor| qkv().into_iter().chain([mask]).collect::<Vec<_>>();
        let grouped = || vec![grid([2, 3, 2, 2], -2.0, 2.0), grid([2, 1, 4, 2], -1.0, 2.0), grid([2, 1, 4, 3], -2.0, 1.0)];
        vec![
            ("plain", plain.clone(), qkv()),
            ("causal", AttentionDims { causal: Some(1), ..plain.clone() }, qkv()),
            ("capped", AttentionDims { softcap: Some(Real(0.8)), ..plain.clone() }, qkv()),
            ("bias", plain.clone(), with(grid([2, 3, 4], -1.0, 1.0))),
            (
                "bias per key, capped",
                AttentionDims { softcap: Some(Real(0.8)), ..plain.clone() },
                with(grid([1, 1, 4], -1.0, 1.0)),
            ),
            ("bool mask", plain.clone(), with(bools.clone())),
            ("guarded", AttentionDims { guarded: true, causal: Some(-1), ..plain.clone() }, qkv()),
            ("grouped heads", AttentionDims { causal: Some(1), ..plain }, grouped()),
        ]
    }

    #[test]
    fn derivatives_are_the_limit_of_differences() {
        for (name, dims, tensors) in cases() {
            let op = Op::Composite(Composite::Attention(dims.clone()));
            // The slopes of a guard are those of its decomposition, NaN where nothing is kept.
            check(name, &tensors, |g, x| g.push(op.clone(), x));
        }
    }

    #[test]
    fn derivatives_are_those_of_the_decomposition() {
        for (name, dims, tensors) in cases().into_iter().filter(|(_, dims, _)| !dims.guarded) {
            let composite = Composite::Attention(dims);
            let (whole, y) = graph_of(&tensors, |g, x| g.push(Op::Composite(composite.clone()), x));
            let (parts, z) = graph_of(&tensors, |g, x| composite.decompose(g, x));
            let (found, expected) = (input_cotangents(&whole, y, &tensors), input_cotangents(&parts, z, &tensors));
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(name, found, expected, 1e-9);
            }
        }
    }

    #[test]
    fn an_operand_that_depends_on_another_gets_its_own_share_only() {
        let x = [grid([3, 2], -1.0, 1.0), grid([3, 2], -1.0, 1.5), grid([1, 3], -1.0, 1.0)];
        let op = Op::Composite(Composite::Attention(AttentionDims::scaled(1.0)));
        check("one tensor in all places", &x, |g, x| {
            let bias = g.broadcast_to(x[2], &[3, 3].into())?;
            let square = g.mul(bias, bias)?;
            let value = g.mul(x[0], x[1])?;
            g.push(op.clone(), &[x[0], value, value, square])
        });
    }
}
