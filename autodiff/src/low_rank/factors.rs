//! The factors of an adapter in the axes of a view of its weight.

use std::collections::BTreeMap;

use meganeura_ir::{DotDims, Graph, GraphError, NodeId, Op, ParameterId, Shape};

use super::view::{Side, View};
use super::{Attached, LowRank};

/// `A` and `B`, rearranged as the view of their weight is.
pub(super) struct Factors {
    /// The sizes and sides of the view's axes.
    axes: Vec<(usize, Side)>,
    /// `[row axes.., rank]`, in the order of the view.
    rows: NodeId,
    /// `[column axes.., rank]`, likewise.
    columns: NodeId,
    pub adapter_rank: usize,
    pub scale: f64,
}

impl Factors {
    /// The factors of `value`, one of the `views` of an adapted weight in the graph `g`: all on the way to it are among them.
    pub fn build(
        (g, views): (&Graph, &BTreeMap<NodeId, View>),
        out: &mut Graph,
        value: NodeId,
        found: &Attached,
    ) -> Result<Self, GraphError> {
        let axes = |value: NodeId| {
            let view = views.get(&value).ok_or(GraphError::UnknownNode(value.0))?;
            let sides = view.sides(&found.adapter.matrix).unwrap_or_default();
            Ok::<Vec<(usize, Side)>, GraphError>(view.axes.iter().map(|axis| axis.size).zip(sides).collect())
        };
        let operand = |value: &NodeId| g.node(*value).operands.first().copied();
        let mut way: Vec<NodeId> = std::iter::successors(Some(value), operand).collect();
        let parameter = way.pop().unwrap_or(value);
        let mut factors = Self::of_parameter(out, axes(parameter)?, found)?;
        for value in way.into_iter().rev() {
            factors = factors.through(out, &g.node(value).op, axes(value)?)?;
        }
        Ok(factors)
    }

    /// The factors of the weight itself.
    fn of_parameter(out: &mut Graph, axes: Vec<(usize, Side)>, found: &Attached) -> Result<Self, GraphError> {
        let LowRank { rank, scale, ref matrix, .. } = *found.adapter;
        let mut parameter = |id: ParameterId| out.push(Op::Parameter(id), &[]);
        let (a, b) = (parameter(found.a)?, parameter(found.b)?);
        let a = out.reshape(a, [rank, matrix.fan_in()])?;
        let a = out.transpose(a, &[1, 0])?;
        let columns = out.reshape(a, sizes_of(&axes, Side::Column, rank))?;
        let rows = out.reshape(b, sizes_of(&axes, Side::Row, rank))?;
        Ok(Factors { axes, rows, columns, adapter_rank: rank, scale })
    }

    /// The factors after a transpose or a change of shape, which leads to `axes`.
    fn through(self, out: &mut Graph, op: &Op, axes: Vec<(usize, Side)>) -> Result<Self, GraphError> {
        let mut moved = |factor: NodeId, side: Side| match op {
            Op::Transpose(perm) => {
                let positions = self.positions(side);
                let order = perm.iter().filter_map(|axis| positions.iter().position(|p| p == axis));
                out.transpose(factor, &order.chain([positions.len()]).collect::<Vec<_>>())
            }
            _ => out.reshape(factor, sizes_of(&axes, side, self.adapter_rank)),
        };
        let (rows, columns) = (moved(self.rows, Side::Row)?, moved(self.columns, Side::Column)?);
        Ok(Factors { axes, rows, columns, ..self })
    }

    /// Axes of the view.
    pub fn rank(&self) -> usize {
        self.axes.len()
    }

    /// Whether `axes` are all the axes of a side, and perhaps some of one element.
    pub fn are(&self, axes: &[usize], side: Side) -> bool {
        let fits = |axis: &usize| self.axes.get(*axis).is_some_and(|(_, found)| *found == side || *found == Side::Unit);
        axes.iter().all(fits) && self.positions(side).iter().all(|axis| axes.contains(axis))
    }

    /// The axes of a side, without those of one element.
    fn positions(&self, side: Side) -> Vec<usize> {
        (0..self.axes.len()).filter(|&axis| self.axes[axis].1 == side).collect()
    }

    /// The factor of a side as `[axes.., rank]`, where `axes` are those of the side in any order, and perhaps some of one element.
    pub fn factor(&self, out: &mut Graph, side: Side, axes: &[usize]) -> Result<NodeId, GraphError> {
        let (factor, positions) = (if side == Side::Row { self.rows } else { self.columns }, self.positions(side));
        let order = axes.iter().filter_map(|axis| positions.iter().position(|p| p == axis));
        let moved = out.transpose(factor, &order.chain([positions.len()]).collect::<Vec<_>>())?;
        let sizes = axes.iter().filter_map(|&axis| self.axes.get(axis)).map(|(size, _)| *size).chain([self.adapter_rank]);
        out.reshape(moved, sizes.collect::<Shape>())
    }

    /// `scale * B A` in the shape of the view.
    pub fn sum(&self, out: &mut Graph) -> Result<NodeId, GraphError> {
        let (rows, columns) = (self.positions(Side::Row), self.positions(Side::Column));
        let dims = DotDims { lhs_contract: vec![rows.len()], rhs_contract: vec![columns.len()], ..DotDims::default() };
        let product = out.push(Op::Dot(dims), &[self.rows, self.columns])?;
        let several: Vec<usize> = rows.iter().chain(&columns).copied().collect();
        let mut order: Vec<usize> = (0..several.len()).collect();
        order.sort_by_key(|&position| several[position]);
        let ordered = out.transpose(product, &order)?;
        let whole = out.reshape(ordered, self.axes.iter().map(|(size, _)| *size).collect::<Shape>())?;
        out.scale(whole, self.scale)
    }
}

/// The sizes of a side's axes, those of one element left out, and the rank.
fn sizes_of(axes: &[(usize, Side)], side: Side, rank: usize) -> Shape {
    axes.iter().filter(|(_, found)| *found == side).map(|(size, _)| *size).chain([rank]).collect()
}
