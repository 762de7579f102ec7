//! A training step as graphs: loss, gradients, what the optimiser makes of them, and the averages that go with it.

use meganeura_autodiff::{
    Accumulation, LossScale, LossScaling, Optimizer, OptimizerError, clip_by_global_norm, ema_inputs, exponential_moving_average,
    vjp,
};
use meganeura_ir::{DType, Graph, Op, ParameterId};

use crate::error::Error;
use crate::gradients::LOSS_OUTPUT;
use crate::groups::TrainedGroup;
use crate::objective::Forward;
use crate::schedule::Schedule;

/// What happens between a loss and new weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Updates<'a> {
    pub groups: &'a [TrainedGroup],
    pub clip: Option<f64>,
    /// Batches whose gradients make one update.
    pub accumulate: usize,
    /// The decay of the weights' moving average.
    pub ema: Option<f64>,
    /// What the loss is multiplied by while its gradients are computed.
    pub loss_scale: Option<LossScale>,
}

/// Outputs after the loss, where it is scaled: the scale, and 1 for a step that changed weights.
const SCALE_OUTPUT: &str = "loss/scale";
const FINITE_OUTPUT: &str = "loss/finite";

/// The graphs of a training run. All declare the same parameters, so that their programs can share them.
#[derive(Clone, Debug)]
pub(crate) struct StepGraphs {
    /// Has the mean loss as its output, and where the loss is scaled the scale, and 1 for a step that changed weights or 0; updates the weights
    /// and the optimiser's state.
    pub update: Graph,
    /// Of a batch that does not complete an update: it only adds its gradients to those before, and reads the inputs of `update`.
    pub accumulate: Option<Graph>,
}

impl Updates<'_> {
    pub fn build(&self, forward: Forward) -> Result<StepGraphs, Error> {
        let Forward { mut graph, mut loss, .. } = forward;
        let ids_of = |group: &TrainedGroup| group.weights.iter().filter_map(|name| graph.parameter_id(name)).collect();
        let divided: Vec<Vec<ParameterId>> = self.groups.iter().map(ids_of).collect();
        let ids = divided.concat();
        let nodes = ids.iter().map(|&id| graph.push(Op::Parameter(id), &[])).collect::<Result<Vec<_>, _>>()?;
        let scaling = self.loss_scale.map(|rule| LossScaling::new(&mut graph, rule)).transpose()?;
        let seed = match &scaling {
            Some(scaling) => scaling.seed(&mut graph, loss)?,
            None => graph.constant_like(loss, 1.0)?,
        };
        let mut by = vjp(&mut graph, &[(loss, seed)], &nodes)?;
        let forward_updates = graph.updates().to_vec();

        let accumulation = match self.accumulate {
            1 => None,
            count => {
                let pairs: Vec<_> = ids.iter().copied().zip(by.iter().copied()).collect();
                Some(Accumulation::new(&mut graph, loss, &pairs, count)?)
            }
        };
        if let Some(accumulation) = &accumulation {
            (loss, by) = (accumulation.loss(), accumulation.gradients().to_vec());
            accumulation.reset(&mut graph)?;
        }
        // What the scaled loss needs: its state, whether the gradients are finite, and the number of the step.
        let mut scaled = None;
        if let Some(scaling) = &scaling {
            let (unscaled, finite) = scaling.unscale(&mut graph, &by)?;
            (by, scaled) = (unscaled, Some((scaling, finite, scaling.step(&mut graph)?)));
        }
        let unconditional = graph.updates().len();
        if let Some(norm) = self.clip {
            by = clip_by_global_norm(&mut graph, &by, norm)?.gradients;
        }
        let mut by = by.into_iter();
        for (index, (group, ids)) in self.groups.iter().zip(&divided).enumerate() {
            let pairs: Vec<_> = ids.iter().copied().zip(by.by_ref()).collect();
            match scaled {
                Some((.., step)) => group.optimizer.apply_counted(&mut graph, index, &pairs, step)?,
                None => group.optimizer.apply_group(&mut graph, index, &pairs)?,
            }
        }
        if let Some((scaling, finite, _)) = scaled {
            scaling.guard(&mut graph, unconditional, finite)?;
        }
        // After a step that changed nothing it still moves towards the weights, as `AveragedModel` does.
        if self.ema.is_some() {
            exponential_moving_average(&mut graph, &ids)?;
        }

        let accumulate = accumulation.map(|accumulation| {
            let mut graph = graph.clone();
            graph.clear_updates();
            forward_updates.iter().try_for_each(|update| graph.update(update.parameter, update.node))?;
            accumulation.keep(&mut graph).map(|()| graph)
        });
        let accumulate = accumulate.transpose()?;
        graph.output(LOSS_OUTPUT, loss)?;
        if let Some((scaling, finite, _)) = scaled {
            graph.output(SCALE_OUTPUT, scaling.scale())?;
            let finite = graph.cast(finite, DType::F32)?;
            graph.output(FINITE_OUTPUT, finite)?;
        }
        Ok(StepGraphs { update: graph, accumulate })
    }

    /// The scalar inputs of a step, which counts from 1.
    pub fn inputs(&self, schedule: &Schedule, step: u64) -> Result<Vec<(String, f32)>, OptimizerError> {
        let groups = self.groups.iter().enumerate();
        let scalars = groups.flat_map(|(index, group)| {
            let learning_rate = schedule.learning_rate_of(group.learning_rate, step);
            match self.loss_scale {
                // The graph alone knows how many steps changed weights.
                Some(_) => vec![Optimizer::counted_input(index, learning_rate)],
                None => group.optimizer.group_inputs(index, step, learning_rate),
            }
        });
        let average = self.ema.map(|decay| ema_inputs(step, decay)).transpose()?;
        Ok(scalars.chain(average).collect())
    }
}
