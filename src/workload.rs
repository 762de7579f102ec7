//! What a model is asked to do on arrays of given sizes, as one graph with the inputs of a run: to infer, to find gradients, to step.

use std::fmt;
use std::str::FromStr;

use meganeura_autodiff::Optimizer;
use meganeura_import::{Bindings, Dim, RANDOM_KEY};
use meganeura_ir::{DTypeClass, Graph, Tensor, random_key};

use crate::data::{Dataset, Samples, SplitMix64, Target};
use crate::error::Error;
use crate::gradients::{WithRespectTo, gradient_graph};
use crate::groups::TrainedGroup;
use crate::model::Model;
use crate::objective::{Forward, Objective};
use crate::predictor::by_name;
use crate::schedule::{Decay, PlateauState, Schedule};
use crate::training_step::Updates;

/// How much of a training step a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkPhase {
    /// The forward pass.
    Inference,
    /// The forward pass, the loss, and the gradient of every weight that trains by default.
    Training,
    /// The same, and an optimiser's update of the weights.
    Step,
}

impl WorkPhase {
    pub const ALL: [WorkPhase; 3] = [WorkPhase::Inference, WorkPhase::Training, WorkPhase::Step];

    pub fn name(self) -> &'static str {
        match self {
            WorkPhase::Inference => "inference",
            WorkPhase::Training => "training",
            WorkPhase::Step => "step",
        }
    }
}

impl fmt::Display for WorkPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for WorkPhase {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let known = || WorkPhase::ALL.map(WorkPhase::name).join(", ");
        WorkPhase::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| format!("there is no phase {name:?}: {}", known()))
    }
}

/// A graph and one run's worth of inputs.
#[derive(Clone, Debug)]
pub struct Workload {
    pub graph: Graph,
    pub inputs: Vec<(String, Tensor)>,
}

impl Model {
    /// The graph of a phase. Sizes and values come from `data`; without it, sizes from the model and `bindings`, and values from a seed.
    /// The step is of AdamW at a learning rate of 1e-6 unless `optimizer` says otherwise.
    ///
    /// # Errors
    /// A training phase has no objective; the data does not fit the model or the loss; a size is open; an op has no derivative.
    pub fn workload(
        &self,
        phase: WorkPhase,
        objective: Option<&Objective>,
        optimizer: Option<Optimizer>,
        data: Option<&Dataset>,
        bindings: &Bindings,
    ) -> Result<Workload, Error> {
        let objective = match (phase, objective) {
            (WorkPhase::Inference, _) => None,
            (_, Some(objective)) => Some(objective),
            (_, None) => return Err(Error::NoObjective { phase: phase.name() }),
        };
        let made;
        let data = match data {
            Some(data) => data,
            None => {
                made = self.synthetic_data(objective, bindings)?;
                &made
            }
        };
        let target = objective.map_or(Target::Absent, Objective::data_target);
        let mut samples = Samples::whole(data, &self.bound_inputs(bindings), target)?;
        let (graph, mut scalars) = match objective {
            None => (self.specialize_on(bindings, &by_name(&samples.tensors()))?.graph, Vec::new()),
            Some(objective) => {
                let graph = objective.specialize(self, &samples, None, bindings)?;
                let forward = objective.build(self, graph, &mut samples, None)?;
                self.training_graph(phase, forward, optimizer)?
            }
        };
        let takes = |name: &str| graph.inputs().iter().any(|input| input.name == name);
        let mut inputs = samples.tensors();
        inputs.retain(|(name, _)| takes(name));
        if takes(RANDOM_KEY) {
            inputs.push((RANDOM_KEY.to_string(), random_key(0, 0)));
        }
        inputs.append(&mut scalars);
        Ok(Workload { graph, inputs })
    }

    /// The graph of a training phase, and its scalar inputs.
    fn training_graph(
        &self,
        phase: WorkPhase,
        mut forward: Forward,
        optimizer: Option<Optimizer>,
    ) -> Result<(Graph, Vec<(String, Tensor)>), Error> {
        let weights = self.differentiable(&mut forward.graph, WithRespectTo::Parameters)?;
        if weights.is_empty() {
            return Err(Error::NothingToTrain { reason: "the model has no trainable weights" });
        }
        if phase == WorkPhase::Training {
            return Ok((gradient_graph(forward, weights)?, Vec::new()));
        }
        const LEARNING_RATE: f64 = 1e-6;
        let optimizer = match optimizer {
            Some(optimizer) => optimizer,
            None => Optimizer::from_name("adamw")?,
        };
        let weights = weights.into_iter().map(|(name, _)| name).collect();
        let groups = [TrainedGroup { optimizer, learning_rate: LEARNING_RATE, weights }];
        let updates = Updates { groups: &groups, clip: None, accumulate: 1, ema: None, loss_scale: None };
        let graph = updates.build(forward)?.update;
        let (decay, plateau) = (Decay::Constant, PlateauState::default());
        let schedule = Schedule { peak: LEARNING_RATE, decay, warmup: 0, total: 1, plateau };
        let scalars = updates.inputs(&schedule, 1)?;
        Ok((graph, scalars.into_iter().map(|(name, value)| (name, Tensor::scalar_f32(value))).collect()))
    }

    /// Arrays for every input, and for the target: floats from a seed, all other elements 0 or 1.
    fn synthetic_data(&self, objective: Option<&Objective>, bindings: &Bindings) -> Result<Dataset, Error> {
        let mut random = SplitMix64(0);
        let mut fill = |ty: &meganeura_ir::TensorType| {
            let values: Vec<f64> = (0..ty.shape.numel())
                .map(|_| match ty.dtype.class() {
                    DTypeClass::Float => random.symmetric(1.0),
                    DTypeClass::Int | DTypeClass::Bool => (random.next() & 1) as f64,
                })
                .collect();
            Tensor::from_f64(ty.dtype, ty.shape.clone(), &values)
        };
        let mut arrays = Vec::new();
        for input in self.bound_inputs(bindings) {
            let size = |dim: &Dim| match dim {
                Dim::Fixed(size) => Ok(*size),
                Dim::Symbol(name) => Err(Error::OpenSize { input: input.name.clone(), dim: name.clone() }),
            };
            let shape = input.dims.iter().map(size).collect::<Result<_, Error>>()?;
            arrays.push((input.name.clone(), fill(&meganeura_ir::TensorType { dtype: input.dtype, shape })));
        }
        if let Some(objective) = objective {
            let inputs: Vec<(&str, &Tensor)> = arrays.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            let graph = self.specialize_on(bindings, &inputs)?.graph;
            let prediction = objective.output_node(self, &graph)?;
            if let Some(target) = objective.loss.target_types(graph.ty(prediction))?.first() {
                let key = objective.target.clone().unwrap_or_else(|| "target".to_string());
                arrays.push((key, fill(&target.ty)));
            }
        }
        Ok(Dataset::from_tensors(arrays))
    }
}
