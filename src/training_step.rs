//! A training step as graphs: loss, gradients, what the optimiser makes of them, and the averages that go with it.

use meganeura_autodiff::{Accumulation, OptimizerError, clip_by_global_norm, ema_inputs, exponential_moving_average, gradients};
use meganeura_ir::{Graph, Op, ParameterId};

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
}

/// The graphs of a training run. All declare the same parameters, so that their programs can share them.
#[derive(Clone, Debug)]
pub(crate) struct StepGraphs {
    /// Has the mean loss as its output; updates the weights and the optimiser's state.
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
        let mut by = gradients(&mut graph, loss, &nodes)?;
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
        if let Some(norm) = self.clip {
            by = clip_by_global_norm(&mut graph, &by, norm)?.gradients;
        }
        let mut by = by.into_iter();
        for (index, (group, ids)) in self.groups.iter().zip(&divided).enumerate() {
            let pairs: Vec<_> = ids.iter().copied().zip(by.by_ref()).collect();
            group.optimizer.apply_group(&mut graph, index, &pairs)?;
        }
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
        Ok(StepGraphs { update: graph, accumulate })
    }

    /// The scalar inputs of a step, which counts from 1.
    pub fn inputs(&self, schedule: &Schedule, step: u64) -> Result<Vec<(String, f32)>, OptimizerError> {
        let groups = self.groups.iter().enumerate();
        let scalars = groups.flat_map(|(index, group)| {
            let learning_rate = schedule.learning_rate_of(group.learning_rate, step);
            group.optimizer.group_inputs(index, step, learning_rate)
        });
        let average = self.ema.map(|decay| ema_inputs(step, decay)).transpose()?;
        Ok(scalars.chain(average).collect())
    }
}
