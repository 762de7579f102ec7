//! A training step as graphs: loss, gradients, what the optimiser makes of them, and the averages that go with it.

use std::sync::Arc;

use meganeura_autodiff::{
    Accumulation, LossScale, LossScaling, Optimizer, OptimizerError, clip_by_global_norm, ema_inputs, ema_value,
    exponential_moving_average, vjp,
};
use meganeura_codegen::program::Memory;
use meganeura_codegen::{CompileError, CompileOptions, Program};
use meganeura_ir::{DType, Graph, NodeId, Op, ParameterId};
use meganeura_runtime::Device;

use crate::diagnosis::Diagnosis;
use crate::error::Error;
use crate::gradients::LOSS_OUTPUT;
use crate::groups::TrainedGroup;
use crate::guard::{Guard, STOPPED};
use crate::objective::Forward;
use crate::predictor::compile_with;
use crate::rewriting::compile_options;
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
    /// Outputs the mean loss; 1 where the step changed nothing because the loss or, with clipping, the norm of the gradients is not finite, else 0;
    /// and where the loss is scaled the scale, and 1 for a step that changed weights or 0. Updates the weights and the optimiser's state.
    pub update: Graph,
    /// Of a batch that does not complete an update: it only adds its gradients to those before, and reads the inputs of `update`.
    pub accumulate: Option<Graph>,
    /// The forward and backward pass of a batch, to look at.
    pub diagnosis: Diagnosis,
}

/// The programs of a training run.
#[derive(Debug)]
pub(crate) struct StepPrograms {
    pub update: Arc<Program>,
    pub accumulate: Option<Arc<Program>>,
    pub diagnosis: Diagnosis,
}

impl StepGraphs {
    /// Compiles the graphs, into programs that take at most `memory` bytes together.
    pub fn compile(self, device: &Device, memory: Option<u64>) -> Result<StepPrograms, Error> {
        let StepGraphs { update, accumulate, diagnosis } = self;
        let compile = |graph: &Graph, memory_limit: Option<u64>| {
            compile_with(graph.clone(), device, &CompileOptions { memory_limit, ..compile_options() })
        };
        let (Some(graph), Some(limit)) = (&accumulate, memory) else {
            let accumulate = accumulate.map(|graph| compile(&graph, None)).transpose()?;
            return Ok(StepPrograms { update: compile(&update, memory)?, accumulate, diagnosis });
        };
        // The programs share the parameters. The one that updates them gives way first.
        let own = |program: &Program| {
            let Memory { parameters, optimizer, .. } = &program.memory;
            program.memory.total() - parameters.iter().chain(optimizer).sum::<u64>()
        };
        let whole = compile(graph, None)?;
        let smallest = match compile(&update, Some(limit.saturating_sub(own(&whole)))) {
            Ok(update) => return Ok(StepPrograms { update, accumulate: Some(whole), diagnosis }),
            Err(Error::Compile(CompileError::MemoryLimit { reachable, .. })) => reachable,
            Err(error) => return Err(error),
        };
        let update = compile(&update, Some(smallest))?;
        match compile(graph, Some(limit.saturating_sub(own(&update)))) {
            Err(Error::Compile(CompileError::MemoryLimit { reachable, .. })) => {
                Err(CompileError::MemoryLimit { limit, reachable: reachable + own(&update) }.into())
            }
            accumulate => Ok(StepPrograms { update, accumulate: Some(accumulate?), diagnosis }),
        }
    }
}

impl Updates<'_> {
    pub fn build(&self, forward: Forward) -> Result<StepGraphs, Error> {
        let Forward { mut graph, mut loss, .. } = forward;
        let ids_of = |group: &TrainedGroup| group.weights.iter().filter_map(|name| graph.parameter_id(name)).collect();
        let divided: Vec<Vec<ParameterId>> = self.groups.iter().map(ids_of).collect();
        let ids = divided.concat();
        let nodes = ids.iter().map(|&id| graph.push(Op::Parameter(id), &[])).collect::<Result<Vec<_>, _>>()?;
        let backward = NodeId(graph.nodes().len() as u32);
        let scaling = self.loss_scale.map(|rule| LossScaling::new(&mut graph, rule)).transpose()?;
        let seed = match &scaling {
            Some(scaling) => scaling.seed(&mut graph, loss)?,
            None => graph.constant_like(loss, 1.0)?,
        };
        let mut by = vjp(&mut graph, &[(loss, seed)], &nodes)?;
        let roots: Vec<NodeId> = [loss].into_iter().chain(by.iter().copied()).collect();
        let forward_updates = graph.updates().to_vec();

        let accumulation = match self.accumulate {
            1 => None,
            count => {
                let pairs: Vec<_> = ids.iter().copied().zip(by.iter().copied()).collect();
                Some(Accumulation::new(&mut graph, loss, &pairs, count)?)
            }
        };
        let batch_loss = loss;
        if let Some(accumulation) = &accumulation {
            (loss, by) = (accumulation.loss(), accumulation.gradients().to_vec());
        }
        // What the scaled loss needs: its state, whether the gradients are finite, and the number of the step.
        let mut scaled = None;
        if let Some(scaling) = &scaling {
            let (unscaled, finite) = scaling.unscale(&mut graph, &by)?;
            (by, scaled) = (unscaled, Some((scaling, finite, scaling.step(&mut graph)?)));
        }
        let unconditional = graph.updates().len();
        let mut witnesses = vec![loss];
        if let Some(norm) = self.clip {
            let clipped = clip_by_global_norm(&mut graph, &by, norm)?;
            by = clipped.gradients;
            // The norm of gradients that the scaled loss skips says nothing.
            witnesses.push(match scaled {
                Some((_, finite, _)) => {
                    let zero = graph.constant_like(clipped.norm, 0.0)?;
                    graph.select(finite, clipped.norm, zero)?
                }
                None => clipped.norm,
            });
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
        let guard = Guard::new(&mut graph)?;
        let updates = graph.updates().to_vec();
        graph.clear_updates();
        let bare = graph.clone();

        let bad = guard.updates(&mut graph, &updates, &witnesses)?;
        guard.remember(&mut graph, bad)?;
        if let Some(accumulation) = &accumulation {
            accumulation.reset(&mut graph)?;
        }
        graph.output(LOSS_OUTPUT, loss)?;
        graph.output(STOPPED, bad)?;

        let accumulate = accumulation.map(|accumulation| {
            let mut graph = bare.clone();
            guard.updates(&mut graph, &forward_updates, &[batch_loss])?;
            accumulation.keep(&mut graph).map(|()| graph)
        });
        if let Some((scaling, finite, _)) = scaled {
            graph.output(SCALE_OUTPUT, scaling.scale())?;
            let finite = graph.cast(finite, DType::F32)?;
            graph.output(FINITE_OUTPUT, finite)?;
        }
        let diagnosis = Diagnosis { graph: bare, backward, roots };
        Ok(StepGraphs { update: graph, accumulate: accumulate.transpose()?, diagnosis })
    }

    /// The values of [`Updates::inputs`], in its order.
    pub fn values(&self, schedule: &Schedule, step: u64) -> impl Iterator<Item = f32> {
        let scaled = self.loss_scale.is_some();
        let values = self.groups.iter().flat_map(move |group| {
            let learning_rate = schedule.learning_rate_of(group.learning_rate, step);
            // The graph alone knows how many steps changed weights.
            let counted = scaled.then_some(learning_rate as f32);
            let numbers = (!scaled).then(|| group.optimizer.group_values(step, learning_rate));
            counted.into_iter().chain(numbers.into_iter().flatten())
        });
        values.chain(self.ema.map(|decay| ema_value(step, decay)))
    }

    /// The scalar inputs of a step, which counts from 1.
    pub fn inputs(&self, schedule: &Schedule, step: u64) -> Result<Vec<(String, f32)>, OptimizerError> {
        let groups = self.groups.iter().enumerate();
        let scalars = groups.flat_map(|(index, group)| {
            let learning_rate = schedule.learning_rate_of(group.learning_rate, step);
            match self.loss_scale {
                Some(_) => vec![Optimizer::counted_input(index, learning_rate)],
                None => group.optimizer.group_inputs(index, step, learning_rate),
            }
        });
        let average = self.ema.map(|decay| ema_inputs(step, decay)).transpose()?;
        Ok(scalars.chain(average).collect())
    }
}
