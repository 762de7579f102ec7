//! A step whose loss or gradients are not finite changes nothing: neither it nor the steps after it touch the weights, so they are still there
//! to find out why.

use meganeura_ir::{
    BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, ParameterId, ParameterInfo, ParameterRole, ReduceOp, TensorType,
    UnaryOp, Update,
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

/// The largest absolute value in any of the tensors, NaN if there is one: a scalar f32.
pub(crate) fn largest(g: &mut Graph, tensors: &[NodeId]) -> Result<NodeId, GraphError> {
    let mut largest = vec![g.splat(&TensorType::scalar(DType::F32), 0.0)?];
    for &tensor in tensors {
        if g.ty(tensor).shape.numel() > 0 {
            let magnitude = g.unary(UnaryOp::Abs, tensor)?;
            let all = reduce_all(g, ReduceOp::Max, magnitude)?;
            largest.push(g.cast(all, DType::F32)?);
        }
    }
    // A tree is shallow.
    while let [_, _, ..] = largest[..] {
        let pairs = largest.chunks(2).map(|pair| match *pair {
            [a, b] => g.binary(BinaryOp::Max, a, b),
            _ => Ok(pair[0]),
        });
        largest = pairs.collect::<Result<_, _>>()?;
    }
    Ok(largest[0])
}

/// `op` over all axes, in two stages, so that no kernel runs over all elements as one row.
pub(crate) fn reduce_all(g: &mut Graph, op: ReduceOp, x: NodeId) -> Result<NodeId, GraphError> {
    let rank = g.ty(x).shape.rank();
    let rows = g.reduce(op, x, &(1..rank).collect::<Vec<_>>())?;
    g.reduce(op, rows, if rank == 0 { &[] } else { &[0] })
}
