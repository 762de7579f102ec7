//! What spans several batches: gradients summed over micro-batches, and the moving average of weights.

use meganeura_ir::{Graph, GraphError, NodeId, Op, ParameterId, TensorType};

use super::rules::state;
use super::{OptimizerError, Range, info, input, scalar};
use crate::formula::formula;

/// The mean of a loss and its gradients over micro-batches, in state that starts at zero.
///
/// Two programs share the state: one runs for every micro-batch but the last and has the updates of [`Accumulation::keep`]; the other runs
/// for the last, trains on [`Accumulation::gradients`] and has the updates of [`Accumulation::reset`].
#[derive(Clone, Debug)]
pub struct Accumulation {
    states: Vec<ParameterId>,
    totals: Vec<NodeId>,
}

impl Accumulation {
    /// Appends `state + value / count` for the loss and for each gradient. The state of a gradient is named
    /// `optimizer/accumulated/<weight>`.
    ///
    /// # Errors
    /// `count` is 0 or a parameter is unknown.
    pub fn new(g: &mut Graph, loss: NodeId, gradients: &[(ParameterId, NodeId)], count: usize) -> Result<Self, OptimizerError> {
        Range::AtLeastOne.check("accumulation", "micro-batches", count as f64)?;
        let mut values = vec![("optimizer/accumulated_loss".to_owned(), loss)];
        for &(parameter, gradient) in gradients {
            values.push((format!("optimizer/accumulated/{}", info(g, parameter)?.name), gradient));
        }
        let mut accumulation = Accumulation { states: Vec::new(), totals: Vec::new() };
        for (name, value) in values {
            let ty: TensorType = g.nodes().get(value.index()).ok_or(GraphError::UnknownNode(value.0))?.ty.clone();
            let (id, sum) = state(g, name, ty)?;
            accumulation.states.push(id);
            accumulation.totals.push(formula(g, |f| {
                let [sum, value] = f.terms([sum, value]);
                sum + value * (1.0 / count as f64)
            })?);
        }
        Ok(accumulation)
    }

    /// The mean loss of the micro-batches so far.
    pub fn loss(&self) -> NodeId {
        self.totals[0]
    }

    /// The mean gradients, in the order given.
    pub fn gradients(&self) -> &[NodeId] {
        &self.totals[1..]
    }

    /// Makes the graph keep what is summed.
    pub fn keep(&self, g: &mut Graph) -> Result<(), GraphError> {
        self.states.iter().zip(&self.totals).try_for_each(|(&state, &total)| g.update(state, total))
    }

    /// Makes the graph begin again at zero.
    pub fn reset(&self, g: &mut Graph) -> Result<(), GraphError> {
        self.states.iter().zip(&self.totals).try_for_each(|(&state, &total)| {
            let zero = g.constant_like(total, 0.0)?;
            g.update(state, zero)
        })
    }
}

/// What the name of a weight's average begins with; the weight's name follows.
pub const EMA_PREFIX: &str = "optimizer/ema/";

/// Appends the moving average of what the updates make of `parameters`: `average = decay * average + (1 - decay) * weight`, which begins at
/// the weights after the first step. It is `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.
///
/// # Errors
/// A parameter is unknown.
pub fn exponential_moving_average(g: &mut Graph, parameters: &[ParameterId]) -> Result<(), OptimizerError> {
    let share = scalar(g, input::EMA_WEIGHT)?;
    for &parameter in parameters {
        let info = info(g, parameter)?;
        let (name, ty) = (format!("{EMA_PREFIX}{}", info.name), info.ty.clone());
        let updated = g.updates().iter().find(|u| u.parameter == parameter).map(|u| u.node);
        let weight = match updated {
            Some(node) => node,
            None => g.push(Op::Parameter(parameter), &[])?,
        };
        let (id, average) = state(g, name, ty)?;
        let next = formula(g, |f| {
            let [average, weight, share] = f.terms([average, weight, share]);
            average + share.splat_like(average) * (weight - average)
        })?;
        g.update(id, next)?;
    }
    Ok(())
}

/// The value of the input that [`exponential_moving_average`] adds, at `step` (from 1).
///
/// # Errors
/// The decay is not a number from 0 up to 1.
pub fn ema_inputs(step: u64, decay: f64) -> Result<(String, f32), OptimizerError> {
    Range::Fraction.check("ema", "decay", decay)?;
    Ok((input::EMA_WEIGHT.to_owned(), ema_value(step, decay)))
}

/// The value of [`ema_inputs`], of a decay that it accepts.
pub fn ema_value(step: u64, decay: f64) -> f32 {
    if step <= 1 { 1.0 } else { (1.0 - decay) as f32 }
}
