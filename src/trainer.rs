//! [`Trainer`]: fine-tunes a model on a device.

mod failure;
mod options;
mod resume;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use meganeura_autodiff::{EMA_PREFIX, LossScale};
use meganeura_codegen::program::Memory;
use meganeura_import::{Bindings, Dim, ModelInput, Phase};
use meganeura_ir::{ParameterId, ParameterInfo, ParameterRole, Tensor, TensorType};
use meganeura_runtime::{Device, ParameterStore, Session};

use crate::data::{Dataset, Samples, epoch_order};
use crate::diagnosis::Diagnosis;
use crate::error::Error;
use crate::evaluator::{Evaluation, Evaluator};
use crate::groups::TrainedGroup;
use crate::lora::{self, Adapter};
use crate::metric::Metric;
use crate::model::Model;
use crate::predictor::{Predictor, place_weights};
use crate::prefix::{Feed, FrozenPrefix, PrefixCache, cut_frozen_prefix};
use crate::schedule::{Decay, PlateauBy, PlateauState, Schedule};
use crate::selection::{groups, trained};
use crate::step_inputs::StepInputs;
use crate::training_step::Updates;
use failure::Kept;
pub use options::{Length, TrainOptions};

/// Samples per batch where neither the caller nor the model says.
const DEFAULT_BATCH: usize = 32;

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

/// A training run: forward pass, loss, gradients and updates as one program, with the weights on the device.
///
/// Each epoch visits the samples in an order that the seed decides. What does not fill a last batch waits for the next epoch, which
/// has another order.
///
/// ```
/// use meganeura::{Dataset, Device, DeviceSelector, Error, Length, Loss, Metric, Model, Objective, TrainOptions, Trainer};
///
/// # fn main() -> Result<(), Error> {
/// let device = Device::open(&DeviceSelector::Auto)?;
/// let mut model = Model::open("fixtures/digits-cnn.onnx")?;
/// let (train, test) = (Dataset::open("fixtures/digits-train.npz")?, Dataset::open("fixtures/digits-test.npz")?);
///
/// let objective = Objective::new(Loss::from_name("cross_entropy")?);
/// let options = TrainOptions { batch: Some(32), learning_rate: 0.01, length: Length::Steps(20), ..TrainOptions::new(objective) };
/// let mut trainer = Trainer::new(&model, &device, &train, options)?;
/// let mut evaluator = trainer.evaluator(&model, &test, Some(Metric::Accuracy))?;
/// let before = trainer.evaluate(&mut evaluator)?;
/// trainer.train_to(trainer.total_steps(), |step| {
///     println!("step {}: loss {:.4} at a learning rate of {}", step.step, step.loss, step.learning_rate);
///     Ok::<_, Error>(())
/// })?;
/// assert!(trainer.evaluate(&mut evaluator)?.improves_on(&before));
///
/// // The weights are on the device until somebody asks for them.
/// trainer.update(&mut model)?;
/// # Ok(())
/// # }
/// ```
///
/// [`Trainer::step_on`] and [`Trainer::predictor`] train inside an application's loop: see `examples/personalise.rs`.
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
    /// Of the model, with the sizes of the data.
    model_inputs: Vec<ModelInput>,
    /// Of a batch.
    prediction: TensorType,
    target: Option<TensorType>,
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
        let model_inputs = model.bound_inputs(&options.bindings);
        let mut samples = Samples::bind(data, &model_inputs, objective.data_target())?;
        let batch = batch_size(&model_inputs, &samples, options.batch)?;
        let graph = objective.specialize(model, &samples, Some(batch), &options.bindings)?;
        let adapters = lora::adapters(model, &graph, &options)?;
        let forward = objective.build(model, lora::attach(graph, &adapters)?, &mut samples, Some(batch))?;
        objective.check_targets(&samples, forward.prediction_type(), batch)?;
        let trained = trained(model, &adapters, (&options).into())?;
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
        let prediction = forward.prediction_type().clone();
        let target = forward.target.map(|target| forward.graph.ty(target).clone());
        let graphs = updates(&groups, &options).build(forward)?;
        let (parameters, reads) = (graphs.update.parameters().to_vec(), graphs.update.clone());
        let programs = graphs.compile(device, options.recompute)?;
        let program = programs.update;
        let changed: BTreeSet<String> = program.parameters.iter().filter(|p| p.updated).map(|p| p.name.clone()).collect();
        let outputs = program.outputs.iter().map(|output| Tensor::zeros(output.ty.clone())).collect();
        let store = place_weights(model, &adapters, device, &program)?;
        let session = Session::new(device, program, &store)?;
        let accumulating = programs.accumulate.map(|program| session.beside(program)).transpose()?;
        let (peak, decay, plateau) = (options.learning_rate, options.decay.clone(), PlateauState::default());
        let schedule = Schedule { peak, decay, warmup: options.warmup, total, plateau };
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
            model_inputs,
            prediction,
            target,
            step: 0,
            skipped: 0,
            order,
            options,
        };
        let kept: Vec<ParameterId> = trainer.ids(|p| p.role != ParameterRole::Optimizer && trainer.changed.contains(&p.name));
        trainer.kept = Kept { tensors: trainer.read_ids(&kept)?, ..Kept::default() };
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

    /// The model on the device with the weights that are being trained: each run sees them as the step before it left them. Layers act as in
    /// inference.
    ///
    /// # Errors
    /// As [`Model::predictor`].
    pub fn predictor(&self, model: &Model, bindings: &Bindings) -> Result<Predictor, Error> {
        let bindings = Bindings { phase: Phase::INFERENCE, ..bindings.clone() };
        Predictor::sharing(&self.store, model.specialize(&bindings)?.graph)
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

    /// Lets the learning rate follow the result of an evaluation, where the schedule is [`Decay::Plateau`].
    ///
    /// # Errors
    /// The schedule follows a metric, and the evaluation has none.
    pub fn observe(&mut self, evaluation: &Evaluation) -> Result<(), Error> {
        let Decay::Plateau(plateau) = &self.schedule.decay else { return Ok(()) };
        match (plateau.by, evaluation.metric) {
            (PlateauBy::Loss, _) => self.schedule.observe(evaluation.loss, false),
            (PlateauBy::Metric, Some((metric, value))) => self.schedule.observe(value, metric.rises()),
            (PlateauBy::Metric, None) => return Err(Error::NoMetric),
        }
        self.kept.plateaus.push((self.step, self.schedule.plateau));
        Ok(())
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

/// Samples per batch: what is wanted, else what the inputs fix, else [`DEFAULT_BATCH`].
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

/// Samples of all the batches of a step.
fn samples_per_step(samples: &Samples, batch: usize, accumulate: usize) -> Result<usize, Error> {
    match batch.checked_mul(accumulate) {
        Some(0) => Err(Error::EmptyBatch),
        Some(all) if all <= samples.count() => Ok(all),
        all => Err(Error::BatchTooLarge { samples: samples.count(), batch: all.unwrap_or(usize::MAX) }),
    }
}

/// What a step does with gradients.
fn updates<'a>(groups: &'a [TrainedGroup], options: &TrainOptions) -> Updates<'a> {
    let TrainOptions { clip, accumulate, ema, loss_scale, .. } = *options;
    Updates { groups, clip, accumulate, ema, loss_scale }
}
