//! A step whose loss or gradients are not finite changes nothing: neither it nor the steps after it touch the weights, so they are still there
//! to find out why.

use std::collections::BTreeMap;

use meganeura_ir::{
    BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, PadDim, ParameterId, ParameterInfo, ParameterRole, ReduceOp,
    TensorType, UnaryOp, Update,
};

/// The parameter that is 1 after a step that was not finite, and 0 before. Checkpoints do not hold it.
pub(crate) const STOPPED: &str = "optimizer/stopped";

/// What decides whether updates happen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    stopped: ParameterId,
    /// `STOPPED` as it was before the step, as a bool.
    before: NodeId,
}

impl Guard {
    /// Declares the state.
    pub fn new(g: &mut Graph) -> Result<Self, GraphError> {
        let ty = TensorType::scalar(DType::F32);
        let info = ParameterInfo { name: STOPPED.into(), ty: ty.clone(), stored: DType::F32, role: ParameterRole::Optimizer };
        let state = g.parameter(info)?;
        let zero = g.splat(&ty, 0.0)?;
        let before = g.compare(CompareOp::Gt, state, zero)?;
        let stopped = g.parameter_id(STOPPED).ok_or_else(|| GraphError::DuplicateName(STOPPED.into()))?;
        Ok(Guard { stopped, before })
    }

    /// Makes `updates`, and all that the graph has, depend on whether the float scalars `witnesses` are finite. Returns, as an f32 scalar,
    /// whether they were not, in this step or before.
    pub fn updates(&self, g: &mut Graph, updates: &[Update], witnesses: &[NodeId]) -> Result<NodeId, GraphError> {
        let mut bad = self.before;
        for &witness in witnesses {
            for test in [UnaryOp::IsNan, UnaryOp::IsInf] {
                let found = g.unary(test, witness)?;
                bad = g.binary(BinaryOp::Or, bad, found)?;
            }
        }
        for update in updates {
            let old = g.push(Op::Parameter(update.parameter), &[])?;
            let shape = g.ty(old).shape.clone();
            let skipped = g.broadcast_to(bad, &shape)?;
            let node = g.select(skipped, old, update.node)?;
            g.update(update.parameter, node)?;
        }
        g.cast(bad, DType::F32)
    }

    /// Makes the steps after this one know.
    pub fn remember(&self, g: &mut Graph, bad: NodeId) -> Result<(), GraphError> {
        g.update(self.stopped, bad)
    }
}

/// Elements that one workgroup reduces.
const ROW: usize = 1024;

/// The largest absolute value in any of the tensors, NaN if there is one: a scalar f32.
pub(crate) fn largest(g: &mut Graph, tensors: &[NodeId]) -> Result<NodeId, GraphError> {
    // Vectors of equal length go on as one.
    let mut vectors: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
    for &tensor in tensors {
        let size = g.ty(tensor).shape.numel();
        let magnitude = g.unary(UnaryOp::Abs, tensor)?;
        let magnitude = g.cast(magnitude, DType::F32)?;
        vectors.entry(size).or_default().push(g.reshape(magnitude, [size])?);
    }
    let zero = g.splat(&TensorType::scalar(DType::F32), 0.0)?;
    let mut scalars = vec![zero];
    while let Some((size, group)) = vectors.pop_last() {
        if size <= ROW {
            let reduced = group.into_iter().map(|vector| g.reduce(ReduceOp::Max, vector, &[0]));
            scalars.extend(reduced.collect::<Result<Vec<_>, _>>()?);
            continue;
        }
        let rows = size.div_ceil(ROW);
        let mut largest = g.splat(&TensorType::new(DType::F32, [rows]), 0.0)?;
        for vector in group {
            let padding = PadDim { high: rows * ROW - size, ..PadDim::default() };
            let padded = if padding.high == 0 { vector } else { g.push(Op::Pad(vec![padding]), &[vector, zero])? };
            let matrix = g.reshape(padded, [rows, ROW])?;
            let reduced = g.reduce(ReduceOp::Max, matrix, &[1])?;
            largest = g.binary(BinaryOp::Max, largest, reduced)?;
        }
        vectors.entry(rows).or_default().push(largest);
    }
    // A tree is shallow.
    while let [_, _, ..] = scalars[..] {
        let pairs = scalars.chunks(2).map(|pair| match *pair {
            [a, b] => g.binary(BinaryOp::Max, a, b),
            _ => Ok(pair[0]),
        });
        scalars = pairs.collect::<Result<_, _>>()?;
    }
    Ok(scalars[0])
}

#[cfg(test)]
mod tests {
    use meganeura_ir::Tensor;
    use meganeura_ir::interpreter::{Environment, interpret};

    use super::*;

    #[test]
    fn the_largest_element_of_many_is_found_wherever_it_is() {
        let sizes = [[1, 3], [3000, 1], [1500, 2], [0, 4], [1024, 1]];
        for (which, bad, expected) in [(1, -7.5, 7.5), (2, 9.0, 9.0), (4, f64::NAN, f64::NAN), (0, f64::INFINITY, f64::INFINITY)]
        {
            let mut g = Graph::new();
            let (mut nodes, mut values) = (Vec::new(), Vec::new());
            for (i, shape) in sizes.into_iter().enumerate() {
                nodes.push(g.input(format!("x{i}"), TensorType::new(DType::F32, shape)).unwrap());
                let mut elements = vec![0.25; shape[0] * shape[1]];
                if which == i {
                    *elements.last_mut().unwrap() = bad;
                }
                values.push(Tensor::from_f64(DType::F32, shape, &elements));
            }
            let found = largest(&mut g, &nodes).unwrap();
            g.output("largest", found).unwrap();
            let environment = Environment::<f64>::from_tensors(&values, []);
            let found = interpret(&g, &environment).unwrap().outputs()[0].to_f64_vec()[0];
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{found}, expected {expected}");
        }
    }
}
