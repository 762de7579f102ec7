//! Derivatives of reductions.

use meganeura_ir::{CompareOp, Graph, GraphError, NodeId, ReduceOp};

use super::Cotangent;
use super::rule;

pub(super) fn reduce(
    g: &mut Graph,
    op: ReduceOp,
    axes: &[usize],
    x: NodeId,
    y: NodeId,
    dy: NodeId,
) -> Result<Cotangent, GraphError> {
    let ty = g.ty(x).clone();
    rule(g, |f| {
        let [x, y, dy] = f.terms([x, y, dy]);
        let spread = dy.broadcast_without(&ty.shape, axes);
        Ok(match op {
            ReduceOp::Sum => spread,
            // Equal shares among the extreme elements, as torch.amax.
            ReduceOp::Max | ReduceOp::Min => {
                let extreme = x.compare(CompareOp::Eq, y.broadcast_without(&ty.shape, axes));
                let count = extreme.cast(ty.dtype).reduce_keep(ReduceOp::Sum, axes);
                extreme.select(spread / count, 0.0)
            }
            // The product of the other elements: 0 if one of them is 0, else the product of the nonzero ones without this one.
            ReduceOp::Prod => {
                let zero = x.compare(CompareOp::Eq, 0.0);
                let nonzero = x.compare(CompareOp::Ne, 0.0).select(x, 1.0);
                let zeros = zero.cast(ty.dtype);
                let other_zeros = zeros.reduce_keep(ReduceOp::Sum, axes) - zeros;
                let others = nonzero.reduce_keep(ReduceOp::Prod, axes) / nonzero;
                other_zeros.compare(CompareOp::Eq, 0.0).select(spread * others, 0.0)
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use meganeura_ir::Op;

    use super::*;
    use crate::testing::{assert_close, check, graph_of, grid, input_cotangents, reals};

    #[test]
    fn every_reduction_over_every_kind_of_axes() {
        for &op in ReduceOp::ALL {
            for (shape, axes) in [
                (vec![3, 4], vec![1]),
                (vec![3, 4], vec![0]),
                (vec![2, 3, 4], vec![0, 2]),
                (vec![5], vec![0]),
                (vec![2, 3], vec![]),
                (vec![], vec![]),
                (vec![0, 3], vec![1]),
                (vec![2, 0], vec![1]),
            ] {
                let reduce = Op::Reduce { op, axes };
                check(op.name(), &[grid(shape, -1.5, 1.6)], |g, x| g.push(reduce.clone(), x));
            }
        }
    }

    #[test]
    fn products_with_zeros_differentiate() {
        let x = reals([4, 3], &[2.0, 3.0, -4.0, 0.0, 3.0, 5.0, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0]);
        check("prod", &[x], |g, x| g.reduce(ReduceOp::Prod, x[0], &[1]));
    }

    #[test]
    fn extremes_share_among_ties() {
        let x = [reals([5], &[1.0, 4.0, 0.0, 4.0, 4.0])];
        let (g, y) = graph_of(&x, |g, x| g.reduce(ReduceOp::Max, x[0], &[0]));
        let one = input_cotangents(&g, y, &[reals([5], &[0.0, 4.0, 0.0, 0.0, 0.0])])[0][1];
        let tied = input_cotangents(&g, y, &x);
        assert_close("max", &tied[0], &[0.0, one / 3.0, 0.0, one / 3.0, one / 3.0], 1e-12);
    }
}
