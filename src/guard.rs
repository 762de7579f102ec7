//! A step whose loss or gradient norm is not finite changes nothing: neither it nor the steps after it touch the weights, so they are still
//! there to find out why.

use meganeura_ir::{
    BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, ParameterId, ParameterInfo, ParameterRole, TensorType, UnaryOp,
    Update,
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
