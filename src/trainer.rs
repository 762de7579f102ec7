//! [`Trainer`]: fine-tunes a model on a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use glob::Pattern;
use meganeura_autodiff::{EMA_PREFIX, Optimizer};
use meganeura_import::{Bindings, Dim, ModelInput};
use meganeura_ir::{ParameterId, ParameterInfo, ParameterRole, Tensor};
use meganeura_runtime::{Device, ParameterStore, Session, Ticket};

use crate::checkpoint::{Checkpoint, Progress, ResumeError};
use crate::data::{Dataset, Samples, epoch_order};
use crate::error::{Error, NonFinite};
use crate::evaluator::{Evaluation, Evaluator};
use crate::groups::{Grouping, ParameterGroup, TrainedGroup};
use crate::metric::Metric;
use crate::model::Model;
use crate::objective::Objective;
use crate::predictor::{by_name, compile, place_weights, random_input};
use crate::prefix::{Feed, FrozenPrefix, PrefixCache, cut_frozen_prefix};
use crate::schedule::{Decay, Schedule};
use crate::training_step::Updates;

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
    /// Decides the order of the samples and all random numbers.
    pub seed: u64,
    /// Whether what training cannot change is computed once per sample, where it is needed more than once.
    pub cache: PrefixCache,
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
            batch: None,
            accumulate: 1,
            length: Length::Epochs(1),
            train: Vec::new(),
            freeze: Vec::new(),
            seed: 0,
            cache: PrefixCache::default(),
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
}

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
    options: TrainOptions,
    groups: Vec<TrainedGroup>,
    batch: usize,
    schedule: Schedule,
    /// Of the training graph, by id.
    parameters: Vec<ParameterInfo>,
    trained: Vec<String>,
    reads_logits: bool,
    /// Steps that were completed.
    step: u64,
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
        let forward = objective.build(model, &mut samples, Some(batch), &options.bindings)?;
        objective.check_targets(&samples, forward.prediction_type(), batch)?;
        let trained = trained(model, &options.train, &options.freeze)?;
        let per_step = samples_per_step(&samples, batch, options.accumulate)?;
        let groups = groups(model, &trained, &options)?;
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
        let program = compile(graphs.update, device)?;
        let store = place_weights(model, device, &program)?;
        let session = Session::new(device, program, &store)?;
        let accumulating = graphs.accumulate.map(|graph| compile(graph, device)).transpose()?;
        let accumulating = accumulating.map(|program| session.beside(program)).transpose()?;
        let schedule = Schedule { peak: options.learning_rate, decay: options.decay.clone(), warmup: options.warmup, total };
        let order = (0, epoch_order(options.seed, 0, samples.count()));
        let feed = Feed::new(samples, prefix, &reads, batch, &store, cache)?;
        Ok(Trainer {
            store,
            session,
            accumulating,
            feed,
            batch,
            schedule,
            parameters,
            trained,
            groups,
            reads_logits,
            step: 0,
            order,
            options,
        })
    }

    /// Samples per step.
    pub fn batch(&self) -> usize {
        self.batch * self.options.accumulate
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

    /// Names of the weights that train.
    pub fn trained(&self) -> &[String] {
        &self.trained
    }

    /// Trains until `last` steps are complete, and tells `on_step` about each. The host prepares a step while the device computes the one
    /// before it.
    ///
    /// # Errors
    /// The device fails, a loss is not finite ([`Error::NonFiniteLoss`]), or `on_step` fails.
    pub fn train_to<E: From<Error>>(
        &mut self,
        last: u64,
        mut on_step: impl FnMut(&StepReport) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut submitted = self.step;
        let mut in_flight: Option<(Ticket, StepReport)> = None;
        loop {
            let next = if submitted < last {
                submitted += 1;
                Some(self.submit(submitted)?)
            } else {
                None
            };
            let exhausted = next.is_none();
            if let Some((ticket, mut report)) = std::mem::replace(&mut in_flight, next) {
                report.loss = self.loss(ticket)?;
                if !report.loss.is_finite() {
                    let bad = self.first_non_finite(report.step)?;
                    return Err(Error::NonFiniteLoss { step: report.step, loss: report.loss, bad }.into());
                }
                self.step = report.step;
                on_step(&report)?;
            }
            if exhausted && in_flight.is_none() {
                return Ok(());
            }
        }
    }

    /// What was not finite in a step: its data, else a parameter.
    fn first_non_finite(&mut self, step: u64) -> Result<Option<NonFinite>, Error> {
        let finite = |tensor: &Tensor| !tensor.dtype().is_float() || tensor.to_f64_vec().iter().all(|v| v.is_finite());
        let (_, rows) = self.rows(step);
        for sample in rows {
            let inputs = self.feed.batch(&[sample])?;
            if let Some((name, _)) = inputs.into_iter().find(|(_, tensor)| !finite(tensor)) {
                return Ok(Some(NonFinite::Data { name, sample }));
            }
        }
        for id in (0..self.parameters.len() as u32).map(ParameterId) {
            if let Some((name, _)) = self.read_ids(&[id])?.into_iter().find(|(_, tensor)| !finite(tensor)) {
                return Ok(Some(NonFinite::Parameter { name }));
            }
        }
        Ok(None)
    }

    fn submit(&mut self, step: u64) -> Result<(Ticket, StepReport), Error> {
        let learning_rate = self.schedule.learning_rate(step);
        let (epoch, rows) = self.rows(step);
        let scalars = updates(&self.groups, &self.options).inputs(&self.schedule, step)?;
        let scalars: Vec<(String, Tensor)> = scalars.into_iter().map(|(name, value)| (name, Tensor::scalar_f32(value))).collect();
        let (before, last) = rows.split_at(rows.len() - self.batch);
        // Each batch draws its own random numbers.
        let draws = (step - 1) * self.options.accumulate as u64 + 1;
        for (rows, draw) in before.chunks(self.batch).zip(draws..) {
            let mut inputs = [self.feed.batch(rows)?, scalars.clone()].concat();
            if let Some(accumulating) = &mut self.accumulating {
                inputs.extend(random_input(accumulating.program(), self.options.seed, draw));
                let _unread = accumulating.submit(&by_name(&inputs))?;
            }
        }
        let mut inputs = [self.feed.batch(last)?, scalars].concat();
        let draw = draws + before.len() as u64 / self.batch as u64;
        inputs.extend(random_input(self.session.program(), self.options.seed, draw));
        let ticket = self.session.submit(&by_name(&inputs))?;
        Ok((ticket, StepReport { step, epoch, loss: f64::NAN, learning_rate }))
    }

    fn loss(&mut self, ticket: Ticket) -> Result<f64, Error> {
        let outputs = self.session.wait(ticket)?;
        Ok(outputs.first().and_then(Tensor::scalar_f64).unwrap_or(f64::NAN))
    }

    /// The epoch of a step, and its samples.
    fn rows(&mut self, step: u64) -> (u64, Vec<usize>) {
        let (epoch, position) = ((step - 1) / self.steps_per_epoch(), (step - 1) % self.steps_per_epoch());
        if self.order.0 != epoch {
            self.order = (epoch, epoch_order(self.options.seed, epoch, self.feed.samples().count()));
        }
        let start = position as usize * self.batch();
        (epoch, self.order.1[start..start + self.batch()].to_vec())
    }

    /// An evaluation of the weights being trained on other data, in batches of the same size.
    ///
    /// # Errors
    /// The data does not fit the model, the loss or the metric; the device cannot hold or run the evaluation.
    pub fn evaluator(&self, model: &Model, data: &Dataset, metric: Option<Metric>) -> Result<Evaluator, Error> {
        let (objective, bindings) = (&self.options.objective, &self.options.bindings);
        let frozen = (self.options.cache, self.trained.as_slice());
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

    /// Gives `model` today's values of what was trained, as [`Trainer::tuned`].
    ///
    /// # Errors
    /// The device fails, or `model` is another than the one being trained.
    pub fn update(&mut self, model: &mut Model) -> Result<(), Error> {
        let weights = self.tuned()?;
        model.set_weights(weights.into_iter().filter(|(name, _)| model.imported().parameter(name).is_some()).collect::<Vec<_>>())
    }

    /// Everything that [`Trainer::resume`] needs to go on from here.
    ///
    /// # Errors
    /// The device fails.
    pub fn checkpoint(&mut self) -> Result<Checkpoint, Error> {
        Ok(Checkpoint { tensors: self.read(|_| true)?, progress: self.progress() })
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
        }
    }

    /// Goes on where a checkpoint was made: the steps that follow are those that the run which made it would have done.
    ///
    /// # Errors
    /// The checkpoint was made with other data, batches, seed, loss or optimiser, or belongs to another model.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let (found, expected) = (&checkpoint.progress, self.progress());
        let same = [
            ("samples", found.samples.to_string(), expected.samples.to_string()),
            ("batch", found.batch.to_string(), expected.batch.to_string()),
            ("accumulate", found.accumulate.to_string(), expected.accumulate.to_string()),
            ("seed", found.seed.to_string(), expected.seed.to_string()),
            ("loss", found.loss.clone(), expected.loss),
            ("optimizer", found.optimizer.clone(), expected.optimizer),
        ];
        if let Some((what, found, expected)) = same.into_iter().find(|(_, found, expected)| found != expected) {
            return Err(ResumeError::Mismatch { what, found, expected }.into());
        }
        let mut values = Vec::with_capacity(self.parameters.len());
        for (id, parameter) in (0..).map(ParameterId).zip(&self.parameters) {
            let name = parameter.name.clone();
            let tensor = checkpoint.tensors.get(&name).ok_or_else(|| ResumeError::MissingTensor { name: name.clone() })?;
            if *tensor.ty() != parameter.ty {
                let (found, expected) = (tensor.ty().to_string(), parameter.ty.to_string());
                return Err(ResumeError::TensorType { name, found, expected }.into());
            }
            values.push((id, tensor));
        }
        self.session.write_parameters(&values)?;
        self.step = found.step;
        Ok(())
    }

    fn read(&mut self, wanted: impl Fn(&ParameterInfo) -> bool) -> Result<BTreeMap<String, Tensor>, Error> {
        let ids = (0..).map(ParameterId).zip(&self.parameters).filter(|(_, p)| wanted(p)).map(|(id, _)| id);
        self.read_ids(&ids.collect::<Vec<_>>())
    }

    fn read_ids(&mut self, ids: &[ParameterId]) -> Result<BTreeMap<String, Tensor>, Error> {
        let tensors = self.session.read_parameters(ids)?;
        Ok(ids.iter().map(|id| self.parameters[id.0 as usize].name.clone()).zip(tensors).collect())
    }
}

pub(crate) fn batch_size(inputs: &[ModelInput], samples: &Samples, wanted: Option<usize>) -> Result<usize, Error> {
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
pub(crate) fn trained(model: &Model, train: &[Pattern], freeze: &[Pattern]) -> Result<Vec<String>, Error> {
    let parameters = model.parameters();
    if let Some(pattern) = train.iter().chain(freeze).find(|pattern| !parameters.iter().any(|p| pattern.matches(&p.name))) {
        let examples = parameters.iter().take(3).map(|p| format!("{:?}", p.name)).collect();
        return Err(Error::NoMatch { pattern: pattern.as_str().to_string(), examples });
    }
    let matches = |patterns: &[Pattern], name: &str| patterns.iter().any(|pattern| pattern.matches(name));
    let chosen = parameters.iter().filter(|p| match train {
        [] => p.trainable,
        _ => p.role == ParameterRole::Weight && matches(train, &p.name),
    });
    let names: Vec<String> = chosen.filter(|p| !matches(freeze, &p.name)).map(|p| p.name.clone()).collect();
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
fn groups(model: &Model, trained: &[String], options: &TrainOptions) -> Result<Vec<TrainedGroup>, Error> {
    let TrainOptions { optimizer, learning_rate, no_decay_norms, ref groups, .. } = *options;
    let grouping = Grouping { optimizer, learning_rate, groups, no_decay_norms };
    let rank = |name: &str| model.parameters().iter().find(|p| p.name == name).map_or(0, |p| p.shape.rank());
    grouping.divide(&trained.iter().map(|name| (name.as_str(), rank(name))).collect::<Vec<_>>())
}

/// What a step does with gradients.
fn updates<'a>(groups: &'a [TrainedGroup], options: &TrainOptions) -> Updates<'a> {
    Updates { groups, clip: options.clip, accumulate: options.accumulate, ema: options.ema }
}
