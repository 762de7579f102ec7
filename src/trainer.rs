//! [`Trainer`]: fine-tunes a model on a device.

mod failure;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use glob::Pattern;
use meganeura_autodiff::{EMA_PREFIX, LossScale, Optimizer};
use meganeura_codegen::program::Memory;
use meganeura_import::{Bindings, Dim, ModelInput};
use meganeura_ir::{ParameterId, ParameterInfo, ParameterRole, Tensor};
use meganeura_runtime::{Device, ParameterStore, Session, Ticket};

use crate::checkpoint::{Checkpoint, Progress, ResumeError};
use crate::data::{Dataset, Samples, epoch_order, write_epoch_order};
use crate::diagnosis::Diagnosis;
use crate::error::Error;
use crate::evaluator::{Evaluation, Evaluator};
use crate::groups::{Grouping, ParameterGroup, TrainedGroup};
use crate::guard::STOPPED;
use crate::lora::{self, Adapter, LoraOptions, new_adapters};
use crate::metric::Metric;
use crate::model::Model;
use crate::objective::Objective;
use crate::predictor::place_weights;
use crate::prefix::{Feed, FrozenPrefix, PrefixCache, cut_frozen_prefix};
use crate::schedule::{Decay, Schedule};
use crate::step_inputs::StepInputs;
use crate::training_step::Updates;
use failure::Kept;

/// Samples per batch where neither the caller nor the model says.
const DEFAULT_BATCH: usize = 32;

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Passes over the data.
    Epochs(u64),
    /// Optimiser steps.
    Steps(u64),
}

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    pub objective: Objective,
    pub optimizer: Optimizer,
    /// The largest learning rate of the schedule.
    pub learning_rate: f64,
    pub decay: Decay,
    /// Steps over which the learning rate rises to its largest.
    pub warmup: u64,
    /// The largest Euclidean norm of all gradients together; larger ones are scaled down to it.
    pub clip: Option<f64>,
    /// Weights with a learning rate or weight decay of their own.
    pub groups: Vec<ParameterGroup>,
    /// No weight decay of weights with at most one dimension: norms and biases.
    pub no_decay_norms: bool,
    /// What the loss is multiplied by while its gradients are computed, for arithmetic in which small ones would vanish. A step whose gradients are
    /// not finite changes no weights.
    pub loss_scale: Option<LossScale>,
    /// The decay of a moving average of the weights, if there is to be one.
    pub ema: Option<f64>,
    /// Samples per batch. Without it, what the model's inputs fix, else 32; at most what the data holds.
    pub batch: Option<usize>,
    /// Batches per step: the step follows the mean of their gradients.
    pub accumulate: usize,
    pub length: Length,
    /// Which weights train: those with a matching name. All that train by default where this is empty.
    pub train: Vec<Pattern>,
    /// Which of those do not train after all.
    pub freeze: Vec<Pattern>,
    /// Which weights get low-rank adapters. With adapters, new ones or those that the model has, these train, and besides only what `train`
    /// names.
    pub lora: Vec<LoraOptions>,
    /// Decides the order of the samples and all random numbers.
    pub seed: u64,
    /// Whether what training cannot change is computed once per sample, where it is needed more than once.
    pub cache: PrefixCache,
    /// The most device memory that the programs of a step may take, in bytes. To fit, they compute values again that they would otherwise keep
    /// for the backward pass. The evaluation and a frozen prefix take theirs beside.
    pub recompute: Option<u64>,
    /// Sizes that the data does not decide, and the phase of the training steps. Evaluation is always in inference.
    pub bindings: Bindings,
}

impl TrainOptions {
    /// One epoch of AdamW at a constant learning rate of 0.001 on every weight.
    pub fn new(objective: Objective) -> Self {
        TrainOptions {
            objective,
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, amsgrad: false },
            learning_rate: 1e-3,
            decay: Decay::Constant,
            warmup: 0,
            clip: None,
            groups: Vec::new(),
            no_decay_norms: false,
            ema: None,
            loss_scale: None,
            batch: None,
            accumulate: 1,
            length: Length::Epochs(1),
            train: Vec::new(),
            freeze: Vec::new(),
            lora: Vec::new(),
            seed: 0,
            cache: PrefixCache::default(),
            recompute: None,
            bindings: Bindings::default(),
        }
    }
}

/// A completed optimiser step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Counts from 1.
    pub step: u64,
    /// Counts from 0.
    pub epoch: u64,
    /// The mean loss of the batch before the step changed the weights.
    pub loss: f64,
    pub learning_rate: f64,
    /// What the loss was multiplied by, where it is scaled.
    pub loss_scale: Option<f64>,
    /// The gradients were not finite, so that the step changed no weights.
    pub skipped: bool,
}

/// What the outputs of a step say.
struct Outcome {
    loss: f64,
    /// It changed nothing because it is not finite, and nor do the steps after it.
    stopped: bool,
    loss_scale: Option<f64>,
    skipped: bool,
}

/// Steps in a row without finite gradients after which no scale of the loss can help.
const MAX_SKIPPED: u64 = 100;

/// A training run: forward pass, loss, gradients and updates as one program, with the weights on the device.
///
/// Each epoch visits the samples in an order that the seed decides. What does not fill a last batch waits for the next epoch, which
/// has another order.
pub struct Trainer {
    store: Arc<ParameterStore>,
    session: Session,
    /// For the batches of a step but the last.
    accumulating: Option<Session>,
    feed: Feed,
    /// Of the batch that was prepared last.
    inputs: StepInputs,
    /// Which inputs are the scalars of the updates.
    scalars: Vec<Option<usize>>,
    /// Of the step that was waited for last.
    outputs: Vec<Tensor>,
    diagnosis: Diagnosis,
    kept: Kept,
    options: TrainOptions,
    groups: Vec<TrainedGroup>,
    batch: usize,
    schedule: Schedule,
    /// Of the training graph, by id.
    parameters: Vec<ParameterInfo>,
    trained: Vec<String>,
    /// As they were before the first step.
    adapters: Vec<Adapter>,
    /// Names of the parameters that a step changes, optimiser state included.
    changed: BTreeSet<String>,
    reads_logits: bool,
    /// Steps that were completed.
    step: u64,
    /// The last of these that changed no weights, in a row.
    skipped: u64,
    /// An epoch and the order of its samples.
    order: (u64, Vec<usize>),
}

impl Trainer {
    /// Compiles the training step and places the weights on the device.
    ///
    /// # Errors
    /// The data does not fit the model or the loss, a pattern matches no parameter, an op has no derivative, or the device cannot hold or
    /// run the step.
    pub fn new(model: &Model, device: &Arc<Device>, data: &Dataset, options: TrainOptions) -> Result<Self, Error> {
        let objective = &options.objective;
        let inputs = model.bound_inputs(&options.bindings);
        let mut samples = Samples::bind(data, &inputs, objective.data_target())?;
        let batch = batch_size(&inputs, &samples, options.batch)?;
        let graph = objective.specialize(model, &samples, Some(batch), &options.bindings)?;
        let adapters = match options.lora.as_slice() {
            [] => model.adapters().to_vec(),
            lora => new_adapters(model, &graph, lora, options.seed)?,
        };
        let forward = objective.build(model, lora::attach(graph, &adapters)?, &mut samples, Some(batch))?;
        objective.check_targets(&samples, forward.prediction_type(), batch)?;
        let trained = trained(model, &adapters, &options.train, &options.freeze)?;
        let per_step = samples_per_step(&samples, batch, options.accumulate)?;
        let groups = groups(model, &adapters, &trained, &options)?;
        let steps_per_epoch = (samples.count() / per_step) as u64;
        let total = match options.length {
            Length::Epochs(epochs) => epochs * steps_per_epoch,
            Length::Steps(steps) => steps,
        };
        let cache = if total > steps_per_epoch { options.cache } else { PrefixCache::Off };
        let (forward, prefix) = cut_frozen_prefix(forward, cache, &trained, &samples, batch)?;
        let reads_logits = forward.softmax.is_some();
        let graphs = updates(&groups, &options).build(forward)?;
        let (parameters, reads) = (graphs.update.parameters().to_vec(), graphs.update.clone());
        let programs = graphs.compile(device, options.recompute)?;
        let program = programs.update;
        let changed: BTreeSet<String> = program.parameters.iter().filter(|p| p.updated).map(|p| p.name.clone()).collect();
        let outputs = program.outputs.iter().map(|output| Tensor::zeros(output.ty.clone())).collect();
        let store = place_weights(model, &adapters, device, &program)?;
        let session = Session::new(device, program, &store)?;
        let accumulating = programs.accumulate.map(|program| session.beside(program)).transpose()?;
        let schedule = Schedule { peak: options.learning_rate, decay: options.decay.clone(), warmup: options.warmup, total };
        let order = (0, epoch_order(options.seed, 0, samples.count()));
        let inputs = StepInputs::new(session.program());
        let scalars = updates(&groups, &options).inputs(&schedule, 1)?;
        let scalars = scalars.iter().map(|(name, _)| inputs.position(name)).collect();
        let feed = Feed::new(samples, prefix, &reads, batch, &store, cache)?;
        let mut trainer = Trainer {
            store,
            session,
            accumulating,
            feed,
            inputs,
            scalars,
            outputs,
            diagnosis: programs.diagnosis,
            kept: Kept::default(),
            batch,
            schedule,
            parameters,
            trained,
            adapters,
            groups,
            reads_logits,
            changed,
            step: 0,
            skipped: 0,
            order,
            options,
        };
        let kept: Vec<ParameterId> = trainer.ids(|p| p.role != ParameterRole::Optimizer && trainer.changed.contains(&p.name));
        trainer.kept.tensors = trainer.read_ids(&kept)?;
        for (name, value) in trainer.options.loss_scale.iter().flat_map(LossScale::initial_state) {
            let tensor = Tensor::scalar_f32(value);
            for id in trainer.ids(|p| p.name == name) {
                trainer.session.write_parameter(id, &tensor)?;
            }
            trainer.kept.tensors.insert(name.to_owned(), tensor);
        }
        Ok(trainer)
    }

    /// Samples per step.
    pub fn batch(&self) -> usize {
        self.batch * self.options.accumulate
    }

    /// Bytes of device memory that the programs of a step take.
    pub fn memory(&self) -> u64 {
        let total = |session: &Session| session.program().memory.total();
        let Memory { parameters, optimizer, .. } = &self.session.program().memory;
        let shared = parameters.iter().chain(optimizer).sum::<u64>();
        total(&self.session) + self.accumulating.as_ref().map_or(0, |session| total(session) - shared)
    }

    /// The weights that train, by learning rate and weight decay.
    pub fn groups(&self) -> &[TrainedGroup] {
        &self.groups
    }

    /// Samples in the data.
    pub fn samples(&self) -> usize {
        self.feed.samples().count()
    }

    /// Steps of one pass over the data.
    pub fn steps_per_epoch(&self) -> u64 {
        (self.feed.samples().count() / self.batch()) as u64
    }

    /// Steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        self.schedule.total
    }

    /// Steps that were completed.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether the loss reads the operand of the softmax in which the model ends, see [`Objective`].
    pub fn reads_logits(&self) -> bool {
        self.reads_logits
    }

    /// What is computed once per sample, if anything is.
    pub fn frozen_prefix(&self) -> Option<FrozenPrefix> {
        self.feed.frozen_prefix()
    }

    /// The adapters of the model, as they were before the first step.
    pub fn adapters(&self) -> &[Adapter] {
        &self.adapters
    }

    /// Names of the weights that train.
    pub fn trained(&self) -> &[String] {
        &self.trained
    }

    /// Trains until `last` steps are complete, and tells `on_step` about each. The host prepares a step while the device computes the one
    /// before it.
    ///
    /// # Errors
    /// The device fails, `on_step` fails, or a loss or a gradient is not finite: [`Error::NonFiniteLoss`] and
    /// [`Error::NonFiniteGradients`] name the first tensor that is not. The weights are then those before that step. Where the loss is scaled,
    /// such gradients end the run only after many steps in a row.
    pub fn train_to<E: From<Error>>(
        &mut self,
        last: u64,
        mut on_step: impl FnMut(&StepReport) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut submitted = self.step;
        let mut in_flight: Option<(Ticket, StepReport)> = None;
        loop {
            // A step that may be the last of too many is waited for.
            let ahead = in_flight.is_none() || self.skipped + 1 < MAX_SKIPPED;
            let next = if submitted < last && ahead {
                submitted += 1;
                Some(self.submit(submitted)?)
            } else {
                None
            };
            if let Some((ticket, mut report)) = std::mem::replace(&mut in_flight, next) {
                self.complete(ticket, &mut report)?;
                on_step(&report)?;
            }
            if in_flight.is_none() && submitted >= last {
                return Ok(());
            }
        }
    }

    fn submit(&mut self, step: u64) -> Result<(Ticket, StepReport), Error> {
        let last = self.options.accumulate - 1;
        for batch in 0..last {
            self.prepare(step, batch)?;
            if let Some(accumulating) = &mut self.accumulating {
                let _unread = accumulating.submit_ordered(self.inputs.tensors())?;
            }
        }
        self.prepare(step, last)?;
        let ticket = self.session.submit_ordered(self.inputs.tensors())?;
        let (epoch, learning_rate) = ((step - 1) / self.steps_per_epoch(), self.schedule.learning_rate(step));
        Ok((ticket, StepReport { step, epoch, loss: f64::NAN, learning_rate, loss_scale: None, skipped: false }))
    }

    /// Writes the inputs of one of the batches of a step.
    fn prepare(&mut self, step: u64, batch: usize) -> Result<(), Error> {
        let rows = self.rows(step);
        let rows = &self.order.1[rows][batch * self.batch..][..self.batch];
        self.feed.write_batch(rows, &mut self.inputs)?;
        let values = updates(&self.groups, &self.options);
        for (position, value) in self.scalars.iter().zip(values.values(&self.schedule, step)) {
            position.iter().for_each(|&position| self.inputs.set_scalar(position, value));
        }
        // Each batch draws its own random numbers.
        let draw = (step - 1) * self.options.accumulate as u64 + 1 + batch as u64;
        self.inputs.set_random_key(self.options.seed, draw);
        Ok(())
    }

    /// Waits for a step, and reports what came of it.
    fn complete(&mut self, ticket: Ticket, report: &mut StepReport) -> Result<(), Error> {
        let Outcome { loss, stopped, loss_scale, skipped } = self.outcome(ticket)?;
        if stopped || !loss.is_finite() {
            return Err(self.explain(report.step, loss)?);
        }
        (report.loss, report.loss_scale, report.skipped) = (loss, loss_scale, skipped);
        self.step = report.step;
        self.skipped = if skipped { self.skipped + 1 } else { 0 };
        match loss_scale {
            Some(scale) if self.skipped >= MAX_SKIPPED => Err(self.explain_skips(report.step, scale)?),
            _ => Ok(()),
        }
    }

    fn outcome(&mut self, ticket: Ticket) -> Result<Outcome, Error> {
        self.session.wait_into(ticket, &mut self.outputs)?;
        let scalar = |index: usize| self.outputs.get(index).and_then(Tensor::scalar_f64);
        Ok(Outcome {
            loss: scalar(0).unwrap_or(f64::NAN),
            stopped: scalar(1) != Some(0.0),
            loss_scale: scalar(2),
            skipped: scalar(3) == Some(0.0),
        })
    }

    /// The samples of a step, as positions in the order of its epoch.
    fn rows(&mut self, step: u64) -> Range<usize> {
        let (epoch, position) = ((step - 1) / self.steps_per_epoch(), (step - 1) % self.steps_per_epoch());
        if self.order.0 != epoch {
            write_epoch_order(self.options.seed, epoch, &mut self.order.1);
            self.order.0 = epoch;
        }
        let start = position as usize * self.batch();
        start..start + self.batch()
    }

    /// An evaluation of the weights being trained on other data, in batches of the same size.
    ///
    /// # Errors
    /// The data does not fit the model, the loss or the metric; the device cannot hold or run the evaluation.
    pub fn evaluator(&self, model: &Model, data: &Dataset, metric: Option<Metric>) -> Result<Evaluator, Error> {
        let (objective, bindings) = (&self.options.objective, &self.options.bindings);
        let frozen = (self.options.cache, self.trained.as_slice(), self.adapters.as_slice());
        Evaluator::new(model, &self.store, data, objective, metric, self.batch, bindings, frozen)
    }

    /// Runs an evaluation of the weights as they are, or of their moving average where there is one.
    ///
    /// # Errors
    /// The device fails.
    pub fn evaluate(&mut self, evaluator: &mut Evaluator) -> Result<Evaluation, Error> {
        // Before the first step the average is of nothing.
        let averaged = if self.step == 0 { Vec::new() } else { self.averaged() };
        let (weights, averages): (Vec<_>, Vec<_>) = averaged.into_iter().unzip();
        let (kept, averages) = (self.session.read_parameters(&weights)?, self.session.read_parameters(&averages)?);
        self.session.write_parameters(&weights.iter().copied().zip(&averages).collect::<Vec<_>>())?;
        let evaluation = evaluator.run();
        self.session.write_parameters(&weights.iter().copied().zip(&kept).collect::<Vec<_>>())?;
        evaluation
    }

    /// Each weight that has a moving average, and the average.
    fn averaged(&self) -> Vec<(ParameterId, ParameterId)> {
        let id = |name: &str| self.parameters.iter().position(|p| p.name == name).map(|index| ParameterId(index as u32));
        let pair = |p: &ParameterInfo| Some((id(p.name.strip_prefix(EMA_PREFIX)?)?, id(&p.name)?));
        self.parameters.iter().filter_map(pair).collect()
    }

    /// Today's weights and statistics, by name, in the dtype of training.
    ///
    /// # Errors
    /// The device fails.
    pub fn weights(&mut self) -> Result<BTreeMap<String, Tensor>, Error> {
        self.read(|p| p.role != ParameterRole::Optimizer)
    }

    /// Today's values of what was trained, by name, in the dtype of training: of weights with a moving average, the average.
    ///
    /// # Errors
    /// The device fails.
    pub fn tuned(&mut self) -> Result<BTreeMap<String, Tensor>, Error> {
        let parameters = &self.session.program().parameters;
        let tuned = parameters.iter().filter(|p| {
            let info = self.parameters.get(p.id.0 as usize);
            p.updated && info.is_some_and(|i| i.role != ParameterRole::Optimizer || i.name.starts_with(EMA_PREFIX))
        });
        let tuned: Vec<ParameterId> = tuned.map(|p| p.id).collect();
        let (averages, mut weights): (BTreeMap<_, _>, BTreeMap<_, _>) =
            self.read_ids(&tuned)?.into_iter().partition(|(name, _)| name.starts_with(EMA_PREFIX));
        // Before the first step the averages are of nothing.
        if self.step > 0 {
            let named = averages.into_iter().filter_map(|(name, t)| Some((name.strip_prefix(EMA_PREFIX)?.to_owned(), t)));
            weights.extend(named);
        }
        Ok(weights)
    }

    /// Gives `model` today's values of what was trained, as [`Trainer::tuned`], and its adapters.
    ///
    /// # Errors
    /// The device fails, or `model` is another than the one being trained.
    pub fn update(&mut self, model: &mut Model) -> Result<(), Error> {
        let (weights, factors): (BTreeMap<_, _>, BTreeMap<_, _>) =
            self.tuned()?.into_iter().partition(|(name, _)| model.imported().parameter(name).is_some());
        if !self.adapters.is_empty() {
            model.adapt(self.adapters.clone(), weights.keys().cloned())?;
        }
        model.set_weights(weights.into_iter().chain(factors))
    }

    /// Everything that [`Trainer::resume`] needs to go on from here.
    ///
    /// # Errors
    /// The device fails.
    pub fn checkpoint(&mut self) -> Result<Checkpoint, Error> {
        let tensors = self.read(|p| p.name != STOPPED)?;
        let changed = tensors.iter().filter(|(name, _)| self.changed.contains(*name));
        self.kept = Kept { step: self.step, tensors: changed.map(|(name, tensor)| (name.clone(), tensor.clone())).collect() };
        Ok(Checkpoint { tensors, progress: self.progress() })
    }

    fn progress(&self) -> Progress {
        Progress {
            step: self.step,
            samples: self.feed.samples().count(),
            batch: self.batch,
            accumulate: self.options.accumulate,
            seed: self.options.seed,
            loss: self.options.objective.loss.name().to_string(),
            optimizer: self.options.optimizer.name().to_string(),
            adapters: self.adapters.iter().map(Adapter::describe).collect(),
            loss_scale: self.options.loss_scale.map(|rule| format!("{rule:?}")),
        }
    }

    /// Goes on where a checkpoint was made: the steps that follow are those that the run which made it would have done.
    ///
    /// # Errors
    /// The checkpoint was made with other data, batches, seed, loss or optimiser, or belongs to another model.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let (found, expected) = (&checkpoint.progress, self.progress());
        let text = |loss_scale: &Option<String>| loss_scale.clone().unwrap_or_else(|| "off".to_string());
        let same = [
            ("samples", found.samples.to_string(), expected.samples.to_string()),
            ("batch", found.batch.to_string(), expected.batch.to_string()),
            ("accumulate", found.accumulate.to_string(), expected.accumulate.to_string()),
            ("seed", found.seed.to_string(), expected.seed.to_string()),
            ("loss", found.loss.clone(), expected.loss),
            ("optimizer", found.optimizer.clone(), expected.optimizer),
            ("loss scale", text(&found.loss_scale), text(&expected.loss_scale)),
        ];
        let differing = |some: &[String], other: &[String]| {
            some.iter().find(|adapter| !other.contains(adapter)).cloned().unwrap_or_else(|| "none".to_string())
        };
        let (here, there) = (expected.adapters.as_slice(), found.adapters.as_slice());
        let adapter = ("the adapter", differing(there, here), differing(here, there));
        if let Some((what, found, expected)) = same.into_iter().chain([adapter]).find(|(_, found, expected)| found != expected) {
            return Err(ResumeError::Mismatch { what, found, expected }.into());
        }
        for parameter in self.parameters.iter().filter(|p| p.name != STOPPED) {
            let name = parameter.name.clone();
            let tensor = checkpoint.tensors.get(&name).ok_or_else(|| ResumeError::MissingTensor { name: name.clone() })?;
            if *tensor.ty() != parameter.ty {
                let (found, expected) = (tensor.ty().to_string(), parameter.ty.to_string());
                return Err(ResumeError::TensorType { name, found, expected }.into());
            }
        }
        let kept = Kept { step: found.step, tensors: checkpoint.tensors.clone() };
        self.restore(&kept)?;
        self.kept = kept;
        Ok(())
    }

    fn read(&mut self, wanted: impl Fn(&ParameterInfo) -> bool) -> Result<BTreeMap<String, Tensor>, Error> {
        self.read_ids(&self.ids(wanted))
    }

    fn ids(&self, wanted: impl Fn(&ParameterInfo) -> bool) -> Vec<ParameterId> {
        (0..).map(ParameterId).zip(&self.parameters).filter(|(_, p)| wanted(p)).map(|(id, _)| id).collect()
    }

    fn read_ids(&mut self, ids: &[ParameterId]) -> Result<BTreeMap<String, Tensor>, Error> {
        let tensors = self.session.read_parameters(ids)?;
        Ok(ids.iter().map(|id| self.parameters[id.0 as usize].name.clone()).zip(tensors).collect())
    }
}

fn batch_size(inputs: &[ModelInput], samples: &Samples, wanted: Option<usize>) -> Result<usize, Error> {
    let fixed = inputs.iter().find_map(|input| match input.dims.first() {
        Some(Dim::Fixed(size)) => Some(*size),
        _ => None,
    });
    match (wanted, fixed) {
        (Some(0), _) => Err(Error::EmptyBatch),
        (Some(batch), _) => Ok(batch.min(samples.count())),
        (None, Some(batch)) if batch > samples.count() => Err(Error::BatchTooLarge { samples: samples.count(), batch }),
        (None, fixed) => Ok(fixed.unwrap_or(DEFAULT_BATCH).clamp(1, samples.count())),
    }
}

/// The weights that train: chosen by `train`, or all that train by default, without those that match `freeze`.
/// Adapters train too, and besides them only what `train` names.
fn trained(model: &Model, adapters: &[Adapter], train: &[Pattern], freeze: &[Pattern]) -> Result<Vec<String>, Error> {
    let parameters = model.parameters();
    let factors: Vec<String> = adapters.iter().flat_map(Adapter::factors).map(|(name, _)| name).collect();
    let names = || parameters.iter().map(|p| &p.name).chain(&factors);
    if let Some(pattern) = train.iter().chain(freeze).find(|pattern| !names().any(|name| pattern.matches(name))) {
        let examples = names().take(3).map(|name| format!("{name:?}")).collect();
        return Err(Error::NoMatch { pattern: pattern.as_str().to_string(), examples });
    }
    let matches = |patterns: &[Pattern], name: &str| patterns.iter().any(|pattern| pattern.matches(name));
    let chosen = parameters.iter().filter(|p| match train {
        [] => p.trainable && adapters.is_empty(),
        _ => p.role == ParameterRole::Weight && matches(train, &p.name),
    });
    let chosen = chosen.map(|p| &p.name).chain(&factors);
    let names: Vec<String> = chosen.filter(|name| !matches(freeze, name)).cloned().collect();
    match (names.is_empty(), train.is_empty() && freeze.is_empty()) {
        (false, _) => Ok(names),
        (true, true) => Err(Error::NothingToTrain { reason: "the model has no trainable weights" }),
        (true, false) => Err(Error::NothingToTrain { reason: "--train and --freeze leave no weight" }),
    }
}

/// Samples of all the batches of a step.
fn samples_per_step(samples: &Samples, batch: usize, accumulate: usize) -> Result<usize, Error> {
    match batch.checked_mul(accumulate) {
        Some(0) => Err(Error::EmptyBatch),
        Some(all) if all <= samples.count() => Ok(all),
        all => Err(Error::BatchTooLarge { samples: samples.count(), batch: all.unwrap_or(usize::MAX) }),
    }
}

/// The weights that train, by how they do.
fn groups(model: &Model, adapters: &[Adapter], trained: &[String], options: &TrainOptions) -> Result<Vec<TrainedGroup>, Error> {
    let TrainOptions { optimizer, learning_rate, no_decay_norms, ref groups, .. } = *options;
    let grouping = Grouping { optimizer, learning_rate, groups, no_decay_norms };
    let factors = adapters.iter().flat_map(Adapter::factors).map(|(name, factor)| (name, factor.shape().rank()));
    let ranks: HashMap<String, usize> =
        model.parameters().iter().map(|p| (p.name.clone(), p.shape.rank())).chain(factors).collect();
    let rank = |name: &str| ranks.get(name).copied().unwrap_or(0);
    grouping.divide(&trained.iter().map(|name| (name.as_str(), rank(name))).collect::<Vec<_>>())
}

/// What a step does with gradients.
fn updates<'a>(groups: &'a [TrainedGroup], options: &TrainOptions) -> Updates<'a> {
    let TrainOptions { clip, accumulate, ema, loss_scale, .. } = *options;
    Updates { groups, clip, accumulate, ema, loss_scale }
}
