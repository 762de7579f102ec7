//! Derivatives of Gather and Scatter, each the other's.

use std::collections::HashSet;

use meganeura_ir::{BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, ScatterOp, Shape, TensorType};

use super::Cotangent::{self, Value, Zero};
use super::INTEGER_OPERAND;
use crate::formula::formula;

/// `dx[.., indices, ..] += dy`
pub(super) fn gather(
    g: &mut Graph,
    axis: usize,
    [x, indices]: [NodeId; 2],
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    if operand != 0 {
        return Ok(INTEGER_OPERAND);
    }
    let ty = g.ty(x).clone();
    let zeros = g.splat(&ty, 0.0)?;
    let indices = clamp(g, indices, ty.shape[axis])?;
    g.push(Op::Scatter { op: ScatterOp::Add, axis }, &[zeros, indices, dy]).map(Value)
}

/// The operands of a Scatter.
#[derive(Clone, Copy)]
pub(super) struct Scattered {
    pub(super) axis: usize,
    pub(super) x: NodeId,
    pub(super) indices: NodeId,
    pub(super) updates: NodeId,
}

pub(super) fn scatter(
    g: &mut Graph,
    op: ScatterOp,
    s: Scattered,
    y: NodeId,
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    if operand == 1 {
        return Ok(INTEGER_OPERAND);
    }
    if g.ty(s.x).shape.numel() == 0 {
        return Ok(Zero);
    }
    let into_x = operand == 0;
    let cotangent = match op {
        ScatterOp::Add if into_x => dy,
        ScatterOp::Add => s.gather(g, dy)?,
        ScatterOp::Set if into_x => {
            let zeros = g.constant_like(s.updates, 0.0)?;
            s.scatter(g, ScatterOp::Set, dy, zeros)?
        }
        ScatterOp::Set => {
            let du = s.gather(g, dy)?;
            return s.where_stored(g, du).map(Value);
        }
        ScatterOp::Max | ScatterOp::Min => s.extreme(g, y, dy, into_x)?,
        ScatterOp::Mul => s.product(g, dy, into_x)?,
    };
    if into_x { Ok(Value(cotangent)) } else { s.where_inside(g, cotangent).map(Value) }
}

impl Scattered {
    fn scatter(&self, g: &mut Graph, op: ScatterOp, x: NodeId, updates: NodeId) -> Result<NodeId, GraphError> {
        g.push(Op::Scatter { op, axis: self.axis }, &[x, self.indices, updates])
    }

    /// What each update finds in `x`; arbitrary where its index is out of range.
    fn gather(&self, g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
        g.push(Op::Gather { axis: self.axis }, &[x, self.indices])
    }

    /// Equal shares among the elements, of `x` and of the updates, that equal the result.
    fn extreme(&self, g: &mut Graph, y: NodeId, dy: NodeId, into_x: bool) -> Result<NodeId, GraphError> {
        let y_updates = self.gather(g, y)?;
        let hit_x = g.compare(CompareOp::Eq, self.x, y)?;
        let hit_updates = g.compare(CompareOp::Eq, self.updates, y_updates)?;
        let dtype = g.ty(self.x).dtype;
        let (ones_x, ones_updates) = (g.cast(hit_x, dtype)?, g.cast(hit_updates, dtype)?);
        let count = self.scatter(g, ScatterOp::Add, ones_x, ones_updates)?;
        let share = g.div(dy, count)?;
        let (hit, share) = if into_x { (hit_x, share) } else { (hit_updates, self.gather(g, share)?) };
        let zero = g.constant_like(share, 0.0)?;
        g.select(hit, share, zero)
    }

    /// The product of the other factors: 0 if one of them is 0, else the product of the nonzero ones without this one.
    fn product(&self, g: &mut Graph, dy: NodeId, into_x: bool) -> Result<NodeId, GraphError> {
        let (zeros_x, nonzero_x) = split_zeros(g, self.x)?;
        let (zeros_updates, nonzero_updates) = split_zeros(g, self.updates)?;
        let zeros = self.scatter(g, ScatterOp::Add, zeros_x, zeros_updates)?;
        let nonzero = self.scatter(g, ScatterOp::Mul, nonzero_x, nonzero_updates)?;
        let parts = if into_x {
            [dy, zeros, nonzero, zeros_x, nonzero_x]
        } else {
            [self.gather(g, dy)?, self.gather(g, zeros)?, self.gather(g, nonzero)?, zeros_updates, nonzero_updates]
        };
        formula(g, |f| {
            let [dy, zeros, nonzero, own_zeros, own] = f.terms(parts);
            (zeros - own_zeros).compare(CompareOp::Eq, 0.0).select(dy * nonzero / own, 0.0)
        })
    }

    /// `updates` where the index is in range, 0 where it is not.
    fn where_inside(&self, g: &mut Graph, updates: NodeId) -> Result<NodeId, GraphError> {
        let size = g.ty(self.x).shape[self.axis];
        if constant_indices(g, self.indices).is_some_and(|all| within(&all, size)) {
            return Ok(updates);
        }
        let clamped = clamp(g, self.indices, size)?;
        let inside = g.compare(CompareOp::Eq, clamped, self.indices)?;
        self.where_index(g, inside, updates)
    }

    /// `updates` where they survive a [`ScatterOp::Set`]: the index is in range, and no later one is equal.
    fn where_stored(&self, g: &mut Graph, updates: NodeId) -> Result<NodeId, GraphError> {
        let size = g.ty(self.x).shape[self.axis];
        if constant_indices(g, self.indices).is_some_and(|all| within(&all, size) && distinct(&all)) {
            return Ok(updates);
        }
        let shape = g.ty(self.indices).shape.clone();
        let position = Op::Iota { dtype: DType::I64, shape: Shape::from([shape.numel()]), axis: 0 };
        let position = g.push(position, &[])?;
        let position = g.reshape(position, shape)?;
        let nobody = g.splat(&TensorType::new(DType::I64, [size]), -1.0)?;
        let last = g.push(Op::Scatter { op: ScatterOp::Set, axis: 0 }, &[nobody, self.indices, position])?;
        let last = g.push(Op::Gather { axis: 0 }, &[last, self.indices])?;
        let stored = g.compare(CompareOp::Eq, last, position)?;
        self.where_index(g, stored, updates)
    }

    /// `updates` where `condition`, one bool per index, holds; else 0.
    fn where_index(&self, g: &mut Graph, condition: NodeId, updates: NodeId) -> Result<NodeId, GraphError> {
        let shape = g.ty(updates).shape.clone();
        let axes = (self.axis..self.axis + g.ty(condition).shape.rank()).collect();
        let condition = g.push(Op::Broadcast { shape, axes }, &[condition])?;
        let zero = g.constant_like(updates, 0.0)?;
        g.select(condition, updates, zero)
    }
}

/// 1 where `x` is zero, else 0; and `x` with its zeros replaced by 1.
fn split_zeros(g: &mut Graph, x: NodeId) -> Result<(NodeId, NodeId), GraphError> {
    let (zero, one) = (g.constant_like(x, 0.0)?, g.constant_like(x, 1.0)?);
    let is_zero = g.compare(CompareOp::Eq, x, zero)?;
    Ok((g.cast(is_zero, g.ty(x).dtype)?, g.select(is_zero, one, x)?))
}

/// The nearest indices in `0..size`, which a Gather reads and a Scatter would drop.
fn clamp(g: &mut Graph, indices: NodeId, size: usize) -> Result<NodeId, GraphError> {
    if constant_indices(g, indices).is_some_and(|all| within(&all, size)) {
        return Ok(indices);
    }
    let (first, last) = (g.constant_like(indices, 0.0)?, g.constant_like(indices, size.saturating_sub(1) as f64)?);
    let indices = g.binary(BinaryOp::Max, indices, first)?;
    g.binary(BinaryOp::Min, indices, last)
}

/// The values of indices that are known.
fn constant_indices(g: &Graph, indices: NodeId) -> Option<Vec<i64>> {
    match &g.node(indices).op {
        Op::Constant(t) => Some(t.to_i64_vec()),
        _ => None,
    }
}

fn within(indices: &[i64], size: usize) -> bool {
    indices.iter().all(|i| (0..size as i64).contains(i))
}

fn distinct(indices: &[i64]) -> bool {
    indices.iter().collect::<HashSet<_>>().len() == indices.len()
}

#[cfg(test)]
mod tests {
    use meganeura_ir::Tensor;

    use super::*;
    use crate::testing::{check, grid, indices};

    #[test]
    fn gather_adds_what_it_read_more_than_once() {
        let x = || grid([3, 4, 2], -1.0, 1.0);
        check("middle axis", &[x(), indices([5], &[3, 0, 3, 1, 3])], |g, x| g.push(Op::Gather { axis: 1 }, x));
        check("index matrix", &[x(), indices([2, 2], &[2, 0, 0, 2])], |g, x| g.push(Op::Gather { axis: 0 }, x));
        check("scalar index", &[x(), indices([], &[1])], |g, x| g.push(Op::Gather { axis: 2 }, x));
        check("no index", &[x(), indices([0], &[])], |g, x| g.push(Op::Gather { axis: 0 }, x));
        check("of nothing", &[grid([0, 2], -1.0, 1.0), indices([0], &[])], |g, x| g.push(Op::Gather { axis: 0 }, x));
    }

    #[test]
    fn gather_of_indices_out_of_range_reaches_the_nearest_end() {
        check("clamped", &[grid([3], -1.0, 1.0), indices([4], &[-5, 9, 1, 3])], |g, x| g.push(Op::Gather { axis: 0 }, x));
    }

    #[test]
    fn constant_indices_need_no_clamping() {
        check("constant", &[grid([3, 2], -1.0, 1.0)], |g, x| {
            let index = g.constant(indices([2], &[2, 0]))?;
            g.push(Op::Gather { axis: 0 }, &[x[0], index])
        });
    }

    /// Distinct values for the operand and the updates, so that no two are near a tie.
    fn operands(x: &[usize], updates: &[usize]) -> (Tensor, Tensor) {
        (grid(x, -1.5, 1.5), grid(updates, -2.03, 1.91))
    }

    #[test]
    fn every_scatter_differentiates_with_equal_and_lost_indices() {
        for &op in ScatterOp::ALL {
            let scatter = |axis| Op::Scatter { op, axis };
            let (x, u) = operands(&[2, 4, 2], &[2, 5, 2]);
            check(op.name(), &[x, indices([5], &[3, 0, 3, 1, 3]), u], |g, x| g.push(scatter(1), x));
            let (x, u) = operands(&[3, 2], &[2, 2, 2]);
            check(op.name(), &[x, indices([2, 2], &[2, -1, 7, 2]), u], |g, x| g.push(scatter(0), x));
            let (x, u) = operands(&[3], &[]);
            check(op.name(), &[x, indices([], &[1]), u], |g, x| g.push(scatter(0), x));
            let (x, u) = operands(&[0, 2], &[3, 2]);
            check(op.name(), &[x, indices([3], &[0, 1, 2]), u], |g, x| g.push(scatter(0), x));
            let (x, u) = operands(&[3, 2], &[0, 2]);
            check(op.name(), &[x, indices([0], &[]), u], |g, x| g.push(scatter(0), x));
        }
    }

    #[test]
    fn products_scattered_onto_zeros_differentiate() {
        let x = Tensor::from_f64(DType::F64, [3], &[0.0, 2.0, 0.0]);
        let u = Tensor::from_f64(DType::F64, [5], &[3.0, 0.0, 5.0, 0.0, 7.0]);
        let scatter = Op::Scatter { op: ScatterOp::Mul, axis: 0 };
        check("scatter_mul", &[x, indices([5], &[0, 1, 1, 2, 2]), u], |g, x| g.push(scatter.clone(), x));
    }

    #[test]
    fn constant_unique_indices_need_no_mask() {
        for &op in ScatterOp::ALL {
            let (x, u) = operands(&[4], &[2]);
            check(op.name(), &[x, u], |g, x| {
                let index = g.constant(indices([2], &[3, 0]))?;
                g.push(Op::Scatter { op, axis: 0 }, &[x[0], index, x[1]])
            });
        }
    }
}
