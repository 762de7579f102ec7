//! Loss scaling: gradients of a loss that is multiplied by a large number, so that small ones survive narrow arithmetic.

use meganeura_ir::{BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, ParameterId, ReduceOp, TensorType, UnaryOp};

use super::rules::state;
use super::{OptimizerError, Range};
use crate::formula::{Formula, Term, formula};

/// How the scale of the loss moves: `torch.amp.GradScaler`. A step whose gradients are not all finite changes no weight and no state of
/// the optimiser.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub initial: f64,
    /// What the scale is multiplied by after `growth_interval` steps in a row with finite gradients.
    pub growth: f64,
    pub growth_interval: u32,
    /// What it is multiplied by after a step without.
    pub backoff: f64,
}

impl Default for LossScale {
    /// As in PyTorch.
    fn default() -> Self {
        LossScale { initial: 65536.0, growth: 2.0, growth_interval: 2000, backoff: 0.5 }
    }
}

impl LossScale {
    /// A scale that never moves.
    pub fn fixed(scale: f64) -> Self {
        LossScale { initial: scale, growth: 1.0, growth_interval: 1, backoff: 1.0 }
    }

    /// State that does not start at zero, by name.
    pub fn initial_state(&self) -> [(&'static str, f32); 1] {
        [(SCALE, self.initial as f32)]
    }

    fn check(&self) -> Result<(), OptimizerError> {
        let positive = |attribute, value: f64| match (value as f32) > 0.0 && (value as f32).is_finite() {
            true => Ok(()),
            false => {
                let expected = "a finite number above 0";
                Err(OptimizerError::Attribute { optimizer: "loss scaling", attribute, value, expected })
            }
        };
        [("initial", self.initial), ("growth", self.growth), ("backoff", self.backoff)]
            .into_iter()
            .try_for_each(|(name, value)| positive(name, value))?;
        Range::AtLeastOne.check("loss scaling", "growth_interval", f64::from(self.growth_interval))
    }
}

/// The scale by which the next step multiplies the loss.
const SCALE: &str = "optimizer/loss_scale";
/// Steps with finite gradients since the scale last moved.
const STREAK: &str = "optimizer/loss_scale_streak";
/// Steps that changed weights.
const STEPS: &str = "optimizer/steps";

/// The state of a [`LossScale`] in a graph.
#[derive(Clone, Copy, Debug)]
pub struct LossScaling {
    rule: LossScale,
    scale: (ParameterId, NodeId),
    streak: (ParameterId, NodeId),
    steps: (ParameterId, NodeId),
}

impl LossScaling {
    /// Declares the state, which is zero before the first step but for [`LossScale::initial_state`].
    ///
    /// # Errors
    /// A number of the rule is out of its range.
    pub fn new(g: &mut Graph, rule: LossScale) -> Result<Self, OptimizerError> {
        rule.check()?;
        let mut scalar = |name: &str| state(g, name.to_owned(), TensorType::scalar(DType::F32));
        Ok(LossScaling { rule, scale: scalar(SCALE)?, streak: scalar(STREAK)?, steps: scalar(STEPS)? })
    }

    /// The scale of this step.
    pub fn scale(&self) -> NodeId {
        self.scale.1
    }

    /// The cotangent of the loss that makes gradients scaled ones.
    pub fn seed(&self, g: &mut Graph, loss: NodeId) -> Result<NodeId, GraphError> {
        let dtype = g.ty(loss).dtype;
        g.cast(self.scale.1, dtype)
    }

    /// The number of this step among those that change weights, from 1, for [`Optimizer::apply_counted`](super::Optimizer::apply_counted).
    pub fn step(&self, g: &mut Graph) -> Result<NodeId, GraphError> {
        g.shift(self.steps.1, 1.0)
    }

    /// Divides scaled gradients by the scale. Also returns whether they were all finite, a bool.
    pub fn unscale(&self, g: &mut Graph, gradients: &[NodeId]) -> Result<(Vec<NodeId>, NodeId), GraphError> {
        let mut bad = g.splat(&TensorType::scalar(DType::F32), 0.0)?;
        let mut unscaled = Vec::with_capacity(gradients.len());
        for &gradient in gradients {
            let (nan, infinite) = (g.unary(UnaryOp::IsNan, gradient)?, g.unary(UnaryOp::IsInf, gradient)?);
            let either = g.binary(BinaryOp::Or, nan, infinite)?;
            let flags = g.cast(either, DType::F32)?;
            let axes: Vec<usize> = (0..g.ty(flags).shape.rank()).collect();
            let count = g.reduce(ReduceOp::Sum, flags, &axes)?;
            bad = g.add(bad, count)?;
            unscaled.push(formula(g, |f| {
                let [gradient, scale] = f.terms([gradient, self.scale.1]);
                gradient * (1.0 / scale).splat_like(gradient)
            })?);
        }
        let zero = g.constant_like(bad, 0.0)?;
        let finite = g.compare(CompareOp::Eq, bad, zero)?;
        Ok((unscaled, finite))
    }

    /// Makes the updates of the graph from number `first` on leave everything as it is unless `finite` holds, and moves the scale.
    pub fn guard(&self, g: &mut Graph, first: usize, finite: NodeId) -> Result<(), GraphError> {
        let updates = g.updates().to_vec();
        g.clear_updates();
        for (index, update) in updates.into_iter().enumerate() {
            let node = if index < first { update.node } else { keep_unless(g, finite, update.parameter, update.node)? };
            g.update(update.parameter, node)?;
        }
        let LossScale { growth, growth_interval, backoff, .. } = self.rule;
        let interval = f64::from(growth_interval);
        let state = [self.scale.1, self.streak.1, self.steps.1, finite];
        let mut update = |(parameter, _), next: &dyn for<'f> Fn(&'f Formula) -> Term<'f>| {
            let node = formula(g, next)?;
            g.update(parameter, node)
        };
        update(self.scale, &|f| {
            let [scale, streak, _, finite] = f.terms(state);
            let grown = scale * growth;
            // A scale that overflows stays.
            let grown = grown.unary(UnaryOp::IsInf).select(scale, grown);
            let kept = (streak + 1.0).compare(CompareOp::Ge, interval).select(grown, scale);
            finite.select(kept, scale * backoff)
        })?;
        update(self.streak, &|f| {
            let [_, streak, _, finite] = f.terms(state);
            let next = streak + 1.0;
            finite.select(next.compare(CompareOp::Ge, interval).select(streak * 0.0, next), 0.0)
        })?;
        update(self.steps, &|f| {
            let [_, _, steps, finite] = f.terms(state);
            finite.select(steps + 1.0, steps)
        })
    }
}

/// `node` where `finite` holds, else the parameter as it is.
fn keep_unless(g: &mut Graph, finite: NodeId, parameter: ParameterId, node: NodeId) -> Result<NodeId, GraphError> {
    let old = g.push(Op::Parameter(parameter), &[])?;
    let shape = g.ty(node).shape.clone();
    let condition = g.broadcast_to(finite, &shape)?;
    g.select(condition, node, old)
}
