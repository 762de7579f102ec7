//! The factors of an adapter in the axes of a view of its weight.

use std::collections::BTreeMap;

use meganeura_ir::{DotDims, Graph, GraphError, NodeId, Op, ParameterId, Shape};

use super::Attached;
use super::view::{Side, View};

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
        let view = views.get(&value).ok_or(GraphError::UnknownNode(value.0))?;
        let sides = view.sides(&found.adapter.matrix).unwrap_or_default();
        let axes: Vec<(usize, Side)> = view.axes.iter().map(|axis| axis.size).zip(sides).collect();
        let (rank, scale) = (found.adapter.rank, found.adapter.scale);
        let node = g.node(value);
        let (rows, columns) = match (&node.op, node.operands.first()) {
            (op, Some(&operand)) => {
                let inner = Self::build((g, views), out, operand, found)?;
                let mut moved = |factor: NodeId, side: Side| match op {
                    Op::Transpose(perm) => {
                        let positions = inner.positions(side);
                        let order = perm.iter().filter_map(|axis| positions.iter().position(|p| p == axis));
                        out.transpose(factor, &order.chain([positions.len()]).collect::<Vec<_>>())
                    }
                    _ => out.reshape(factor, sizes_of(&axes, side, rank)),
                };
                (moved(inner.rows, Side::Row)?, moved(inner.columns, Side::Column)?)
            }
            _ => {
                let mut parameter = |id: ParameterId| out.push(Op::Parameter(id), &[]);
                let (a, b) = (parameter(found.a)?, parameter(found.b)?);
                let rows = out.reshape(b, sizes_of(&axes, Side::Row, rank))?;
                let columns = found.adapter.matrix.fan_in();
                let a = out.reshape(a, [rank, columns])?;
                let a = out.transpose(a, &[1, 0])?;
                (rows, out.reshape(a, sizes_of(&axes, Side::Column, rank))?)
            }
        };
        Ok(Factors { axes, rows, columns, adapter_rank: rank, scale })
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
