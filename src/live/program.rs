//! Programs that a live model needs: compiled on any thread, kept on the host, and brought to whichever device is open.

use std::collections::BTreeMap;
use std::sync::Arc;

use meganeura_autodiff::Optimizer;
use meganeura_codegen::Program;
use meganeura_codegen::profile::DeviceProfile;
use meganeura_codegen::program::{ParameterBinding, Space};
use meganeura_import::{Bindings, Phase};
use meganeura_ir::{DType, Graph, NodeId, SampleAxis, SampleDependence, Tensor, TensorType, sample_dependence};
use meganeura_runtime::Session;

use super::TrainRequest;
use crate::data::{Dataset, Samples, TARGET_INPUT};
use crate::error::Error;
use crate::groups::{Grouping, TrainedGroup};
use crate::model::Model;
use crate::objective::Objective;
use crate::predictor::compile_for;
use crate::rewriting::compile_options;
use crate::training_step::Updates;

/// The shapes of a model's inputs, by name.
pub type InputShapes = BTreeMap<String, Vec<usize>>;

/// A program that is to be compiled. That needs no device: [`Compilation::run`] may run on any thread.
#[derive(Debug)]
pub struct Compilation {
    pub(super) compiler: Compiler,
    pub(super) wanted: Wanted,
}

#[derive(Debug)]
pub(super) enum Wanted {
    Inference(InputShapes),
    Training(Box<TrainingStep>),
}

/// What all programs of a live model are made from.
#[derive(Debug)]
pub(super) struct Compiler {
    pub model: Arc<Model>,
    pub profile: DeviceProfile,
    pub bindings: Bindings,
}

/// What a training program is made from.
#[derive(Debug)]
pub(super) struct TrainingStep {
    pub key: TrainingKey,
    pub samples: Samples,
    pub trained: Vec<String>,
    pub clip: Option<f64>,
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
    /// How each output depends on the samples of the inputs' first axis.
    pub samples: Arc<[SampleDependence]>,
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
        Ok(Compiled(match self.wanted {
            Wanted::Inference(shapes) => CompiledKind::Inference(self.compiler.inference(shapes)?),
            Wanted::Training(step) => CompiledKind::Training(self.compiler.training(*step)?),
        }))
    }
}

impl Compiler {
    pub fn inference(self, shapes: InputShapes) -> Result<Arc<InferenceProgram>, Error> {
        let mut bindings = Bindings { phase: Phase::INFERENCE, ..self.bindings };
        bindings.shapes.extend(shapes.clone());
        let graph = self.model.specialize(&bindings)?.graph;
        let samples = output_samples(&graph, &shapes);
        let program = compile_for(graph, &self.profile, &compile_options())?;
        Ok(Arc::new(InferenceProgram { shapes, program, samples }))
    }

    pub fn training(self, step: TrainingStep) -> Result<Arc<TrainingProgram>, Error> {
        let TrainingStep { key, mut samples, trained, clip } = step;
        let batch = samples.count();
        let graph = key.objective.specialize(&self.model, &samples, Some(batch), &self.bindings)?;
        let forward = key.objective.build(&self.model, graph, &mut samples, Some(batch))?;
        let prediction = forward.prediction_type().clone();
        let target = forward.target.map(|target| forward.graph.ty(target).dtype);
        let rank = |name: &str| self.model.parameters().iter().find(|p| p.name == name).map_or(0, |p| p.shape.rank());
        // The rate is an input of every step.
        let grouping = Grouping { optimizer: key.optimizer, learning_rate: 1.0, groups: &[], no_decay_norms: false };
        let groups = grouping.divide(&trained.iter().map(|name| (name.as_str(), rank(name))).collect::<Vec<_>>())?;
        let updates = Updates { groups: &groups, clip, accumulate: 1, ema: None, loss_scale: None };
        let program = compile_for(updates.build(forward)?.update, &self.profile, &compile_options())?;
        let is_weight = |p: &&ParameterBinding| p.updated && p.region.is_some_and(|r| r.space == Space::Parameters);
        let updated = program.parameters.iter().filter(is_weight).map(|p| p.name.clone()).collect();
        Ok(Arc::new(TrainingProgram { key, program, groups, clip, target, prediction, batch, updated }))
    }
}

/// How the outputs depend on the samples, where the first axis of every input counts them.
fn output_samples(graph: &Graph, shapes: &InputShapes) -> Arc<[SampleDependence]> {
    let firsts: Vec<Option<&usize>> = shapes.values().map(|shape| shape.first()).collect();
    let batch = match firsts.as_slice() {
        [Some(first), rest @ ..] if rest.iter().all(|other| *other == Some(first)) => **first,
        _ => return graph.outputs().iter().map(|_| SampleDependence::Joint).collect(),
    };
    let input = |name: &str| match shapes.contains_key(name) {
        true => SampleDependence::Separate(SampleAxis { axis: 0, span: 1 }),
        false => SampleDependence::Joint,
    };
    let inputs: Vec<SampleDependence> = graph.inputs().iter().map(|i| input(&i.name)).collect();
    let of_nodes = sample_dependence(graph, batch, &inputs);
    let of_output = |node: NodeId| of_nodes.get(node.index()).copied().unwrap_or(SampleDependence::Joint);
    graph.outputs().iter().map(|output| of_output(output.node)).collect()
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

    /// The one of `compiled`, which is the most recent from now on. Where it was not there, the oldest beyond the cap is forgotten.
    pub fn touch(&mut self, compiled: &Arc<P>) -> &mut Specialization<P> {
        let is = |entry: &Specialization<P>| Arc::ptr_eq(&entry.compiled, compiled);
        let entry = match self.entries.iter().position(is) {
            Some(position) => self.entries.remove(position),
            None => Specialization { compiled: compiled.clone(), session: None },
        };
        let excess = (self.entries.len() + 1).saturating_sub(self.cap);
        self.entries.drain(..excess);
        let newest = self.entries.len();
        self.entries.push(entry);
        &mut self.entries[newest]
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
