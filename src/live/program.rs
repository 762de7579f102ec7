//! Programs that a live model needs: compiled on any thread, kept on the host, and brought to whichever device is open.

use std::collections::BTreeMap;
use std::sync::Arc;

use meganeura_autodiff::Optimizer;
use meganeura_codegen::Program;
use meganeura_codegen::profile::DeviceProfile;
use meganeura_codegen::program::Space;
use meganeura_import::{Bindings, Phase};
use meganeura_ir::{DType, Tensor, TensorType};
use meganeura_runtime::Session;

use super::TrainRequest;
use crate::data::{Dataset, Samples, TARGET_INPUT};
use crate::error::Error;
use crate::groups::{Grouping, TrainedGroup};
use crate::model::Model;
use crate::objective::Objective;
use crate::predictor::compile_for;
use crate::training_step::Updates;

/// The shapes of a model's inputs, by name.
pub type InputShapes = BTreeMap<String, Vec<usize>>;

/// A program that is to be compiled. That needs no device: [`Compilation::run`] may run on any thread.
#[derive(Debug)]
pub struct Compilation {
    pub(super) model: Arc<Model>,
    pub(super) profile: DeviceProfile,
    pub(super) bindings: Bindings,
    pub(super) wanted: Wanted,
}

#[derive(Debug)]
pub(super) enum Wanted {
    Inference(InputShapes),
    Training { key: Box<TrainingKey>, samples: Box<Samples>, trained: Vec<String>, clip: Option<f64> },
}

/// A compiled program, for [`Live::install`](super::Live::install).
#[derive(Debug)]
pub struct Compiled(pub(super) CompiledKind);

#[derive(Debug)]
pub(super) enum CompiledKind {
    Inference(Arc<InferenceProgram>),
    Training(Arc<TrainingProgram>),
}

#[derive(Debug)]
pub(super) struct InferenceProgram {
    pub shapes: InputShapes,
    pub program: Arc<Program>,
}

/// What decides a training program.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TrainingKey {
    /// Inputs by name, then the target.
    pub types: Vec<(String, TensorType)>,
    pub objective: Objective,
    pub optimizer: Optimizer,
}

#[derive(Debug)]
pub(super) struct TrainingProgram {
    pub key: TrainingKey,
    pub program: Arc<Program>,
    pub groups: Vec<TrainedGroup>,
    pub clip: Option<f64>,
    /// Of the targets in the graph.
    pub target: Option<DType>,
    pub prediction: TensorType,
    pub batch: usize,
    /// Weights and statistics that a step changes.
    pub updated: Vec<String>,
}

impl Compilation {
    /// Compiles the program.
    ///
    /// # Errors
    /// The sizes do not fit the model, an op has no derivative, or the device is too small for the program.
    pub fn run(self) -> Result<Compiled, Error> {
        let Compilation { model, profile, mut bindings, wanted } = self;
        let kind = match wanted {
            Wanted::Inference(shapes) => {
                bindings.phase = Phase::INFERENCE;
                bindings.shapes.extend(shapes.clone());
                let program = compile_for(model.specialize(&bindings)?.graph, &profile)?;
                CompiledKind::Inference(Arc::new(InferenceProgram { shapes, program }))
            }
            Wanted::Training { key, samples, trained, clip } => {
                let program = training_program(&model, &profile, &bindings, *key, *samples, &trained, clip)?;
                CompiledKind::Training(Arc::new(program))
            }
        };
        Ok(Compiled(kind))
    }
}

fn training_program(
    model: &Model,
    profile: &DeviceProfile,
    bindings: &Bindings,
    key: TrainingKey,
    mut samples: Samples,
    trained: &[String],
    clip: Option<f64>,
) -> Result<TrainingProgram, Error> {
    let batch = samples.count();
    let forward = key.objective.build(model, &mut samples, Some(batch), bindings)?;
    let prediction = forward.prediction_type().clone();
    let target = forward.target.map(|target| forward.graph.ty(target).dtype);
    let rank = |name: &str| model.parameters().iter().find(|p| p.name == name).map_or(0, |p| p.shape.rank());
    // The rate is an input of every step.
    let grouping = Grouping { optimizer: key.optimizer, learning_rate: 1.0, groups: &[], no_decay_norms: false };
    let groups = grouping.divide(&trained.iter().map(|name| (name.as_str(), rank(name))).collect::<Vec<_>>())?;
    let updates = Updates { groups: &groups, clip, accumulate: 1, ema: None };
    let program = compile_for(updates.build(forward)?.update, profile)?;
    let shared = |space: Space| space == Space::Parameters;
    let updated = program.parameters.iter().filter(|p| p.updated && p.region.is_some_and(|r| shared(r.space)));
    let updated = updated.map(|p| p.name.clone()).collect();
    Ok(TrainingProgram { key, program, groups, clip, target, prediction, batch, updated })
}

impl TrainRequest {
    /// The arrays of the request, bound to the inputs of the model.
    pub(super) fn samples(&self, model: &Model, bindings: &Bindings) -> Result<Samples, Error> {
        let target = self.target.iter().map(|target| (TARGET_INPUT.to_string(), target.clone()));
        let data = Dataset::from_tensors(self.inputs.iter().cloned().chain(target));
        Ok(Samples::bind(&data, &model.bound_inputs(bindings), self.objective().data_target())?)
    }

    pub(super) fn objective(&self) -> Objective {
        Objective { loss: self.loss.clone(), output: self.output.clone(), target: Some(TARGET_INPUT.to_string()) }
    }

    pub(super) fn key(&self) -> TrainingKey {
        let ty = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.ty().clone());
        let mut types: Vec<_> = self.inputs.iter().map(ty).collect();
        types.sort();
        types.extend(self.target.iter().map(|target| (TARGET_INPUT.to_string(), target.ty().clone())));
        TrainingKey { types, objective: self.objective(), optimizer: self.optimizer }
    }
}

/// A program on the host, and on the device while it is open.
pub(super) struct Specialization<P> {
    pub compiled: Arc<P>,
    pub session: Option<Session>,
}

/// The programs that were used last.
pub(super) struct Recent<P> {
    /// The least recently used first.
    entries: Vec<Specialization<P>>,
    cap: usize,
}

impl<P> Recent<P> {
    pub fn new(cap: usize) -> Self {
        Recent { entries: Vec::new(), cap: cap.max(1) }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn find(&self, is: impl Fn(&P) -> bool) -> Option<&Arc<P>> {
        self.entries.iter().map(|entry| &entry.compiled).find(|compiled| is(compiled))
    }

    /// Makes the one that `is` the most recent, and returns it.
    pub fn touch(&mut self, is: impl Fn(&P) -> bool) -> Option<&mut Specialization<P>> {
        let position = self.entries.iter().position(|entry| is(&entry.compiled))?;
        let entry = self.entries.remove(position);
        self.entries.push(entry);
        self.entries.last_mut()
    }

    /// Adds the most recent one, and forgets the oldest beyond the cap.
    pub fn add(&mut self, compiled: Arc<P>) {
        self.entries.push(Specialization { compiled, session: None });
        let excess = self.entries.len().saturating_sub(self.cap);
        self.entries.drain(..excess);
    }

    /// A session of any of them.
    pub fn any_session(&self) -> Option<&Session> {
        self.entries.iter().rev().find_map(|entry| entry.session.as_ref())
    }

    pub fn sessions(&mut self) -> impl Iterator<Item = &mut Session> {
        self.entries.iter_mut().filter_map(|entry| entry.session.as_mut())
    }

    /// Takes all sessions off the device.
    pub fn close(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.session = None);
    }
}
