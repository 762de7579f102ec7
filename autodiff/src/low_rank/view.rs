//! Values that hold the elements of a parameter, and which of its axes each of their axes comes from.

use std::collections::BTreeMap;

use meganeura_ir::{Graph, NodeId, Op, ParameterId, Shape};

use super::WeightMatrix;

/// A parameter, perhaps transposed and reshaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub parameter: ParameterId,
    pub axes: Vec<Axis>,
}

/// An axis of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    pub size: usize,
    /// The axes of the parameter, as bits, whose elements lie along it. Of no meaning where the size is 1.
    pub sources: u64,
}

/// What an axis is to the matrix of its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Row,
    Column,
    /// Of one element: what the reader takes it for.
    Unit,
}

/// Every live value that is a view of a parameter.
pub(super) fn views(g: &Graph) -> BTreeMap<NodeId, View> {
    let mut views: BTreeMap<NodeId, View> = BTreeMap::new();
    for id in g.live() {
        let node = g.node(id);
        let view = match (&node.op, node.operands.first()) {
            (Op::Parameter(parameter), _) => {
                let axes = node.ty.shape.iter().enumerate().map(|(axis, &size)| Axis { size, sources: 1 << axis });
                Some(View { parameter: *parameter, axes: axes.collect() })
            }
            (op, Some(operand)) => views.get(operand).and_then(|view| view.through(op)),
            _ => None,
        };
        if let Some(view) = view {
            views.insert(id, view);
        }
    }
    views
}

impl View {
    /// The view after one more op, if that keeps it one.
    pub fn through(&self, op: &Op) -> Option<View> {
        let axes = match op {
            Op::Transpose(perm) => perm.iter().map(|&axis| self.axes.get(axis).copied()).collect(),
            Op::Reshape(shape) => reshaped(&self.axes, shape),
            _ => None,
        };
        Some(View { parameter: self.parameter, axes: axes? })
    }

    /// The side of each axis; `None` where elements of rows and columns lie along one.
    pub fn sides(&self, matrix: &WeightMatrix) -> Option<Vec<Side>> {
        self.axes.iter().map(|axis| matrix.side(axis.sources, axis.size)).collect()
    }

    pub fn size(&self, axis: usize) -> usize {
        self.axes.get(axis).map_or(1, |axis| axis.size)
    }

    /// The axes of the parameter that lie along `axes`.
    pub fn sources(&self, axes: impl Iterator<Item = usize>) -> u64 {
        let several = axes.filter_map(|axis| self.axes.get(axis)).filter(|axis| axis.size != 1);
        several.fold(0, |all, axis| all | axis.sources)
    }

    /// Whether nothing lies between the parameter and its reader.
    pub fn is_parameter(&self, g: &Graph) -> bool {
        let shape = g.parameters().get(self.parameter.0 as usize).map(|p| &p.ty.shape);
        let own = |(axis, found): (usize, &Axis)| found.size == 1 || found.sources == 1 << axis;
        shape.is_some_and(|shape| shape.iter().copied().eq(self.axes.iter().map(|axis| axis.size)))
            && self.axes.iter().enumerate().all(own)
    }
}

/// The axes of `shape`, to which the smallest runs of `axes` with as many elements were reshaped. `None` for no elements.
fn reshaped(axes: &[Axis], shape: &Shape) -> Option<Vec<Axis>> {
    let mut from = axes.iter().filter(|axis| axis.size != 1);
    let mut result: Vec<Axis> = shape.iter().map(|&size| Axis { size, sources: 0 }).collect();
    let mut to = (0..shape.rank()).filter(|&axis| shape[axis] != 1);
    while let Some(first) = from.next() {
        let (mut old, mut sources) = (first.size, first.sources);
        let mut run = vec![to.next()?];
        let mut new = shape[*run.first()?];
        while old != new {
            if old < new {
                let next = from.next()?;
                (old, sources) = (old.checked_mul(next.size)?, sources | next.sources);
            } else {
                let next = to.next()?;
                new = new.checked_mul(shape[next])?;
                run.push(next);
            }
        }
        if old == 0 {
            return None;
        }
        run.into_iter().for_each(|axis| result[axis].sources = sources);
    }
    Some(result)
}
