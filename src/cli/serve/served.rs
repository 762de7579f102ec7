//! [`LiveModel`]: a live model as the engine of the server takes it.

use std::collections::BTreeMap;
use std::time::Instant;

use meganeura::ir::SampleDependence;
use meganeura::live::{DeviceSource, InputShapes, Live, Outcome, TrainReport, TrainRequest};
use meganeura::{Bindings, DType, Dim, Error, Loss, Model, Optimizer, Shape, Tensor};
use meganeura_serve::{
    Answer, AxisSize, Checkpoint, ModelCard, Output, Preparation, Progress, Refusal, Rollback, Served, TensorCard, TrainJob,
    TrainOutcome, Wake,
};

use super::batching::Trial;
use super::compiler::{Compiler, Finished, Purpose};
use super::refusals::refusal;

/// Failures to compile that are remembered, so that the next request of these shapes gets its reason.
const MAX_FAILURES: usize = 64;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Model(#[from] Error),
    #[error("the compiler does not start: {0}")]
    Thread(std::io::Error),
}

pub struct LiveModel {
    card: ModelCard,
    live: Live,
    compiler: Compiler,
    failures: BTreeMap<InputShapes, Refusal>,
    /// A job whose program is being compiled, and the reason why it cannot be.
    waiting: Option<TrainRequest>,
    training_failure: Option<Error>,
    /// Jobs so far.
    jobs: u64,
}

impl LiveModel {
    /// Looks at the model, and begins to compile what is needed first: all sizes of batches up to `max_batch`, where requests decide no other size.
    ///
    /// # Errors
    /// The device cannot be opened, or cannot hold the model.
    pub fn new(
        name: String,
        mut live: Live,
        bindings: &Bindings,
        devices: &DeviceSource,
        max_batch: usize,
    ) -> Result<Self, LoadError> {
        let trial = Trial::new(live.model(), bindings);
        let mut card = card(name, live.model(), bindings, &trial);
        let info = devices.current().map_err(Error::from)?.info().name.clone();
        card.facts.push(("device".into(), info));
        let compiler = Compiler::new().map_err(LoadError::Thread)?;
        if let Some(one) = &trial.one
            && let Some(compilation) = live.missing_inference(one)?
        {
            live.install(compilation.run()?);
        }
        let mut model =
            LiveModel { card, live, compiler, failures: BTreeMap::new(), waiting: None, training_failure: None, jobs: 0 };
        if let Some(one) = trial.one {
            model.warm(&one, max_batch)?;
        }
        Ok(model)
    }

    fn warm(&mut self, one: &InputShapes, max_batch: usize) -> Result<(), Error> {
        let sizes = std::iter::successors(Some(1), |size| Some(size * 2)).take_while(|&size| size < max_batch);
        let sizes: Vec<usize> = if self.card.batched { sizes.chain([max_batch]).collect() } else { Vec::new() };
        for size in sizes {
            let sized = |(name, shape): (&String, &Vec<usize>)| {
                let shape = std::iter::once(size).chain(shape.iter().skip(1).copied()).collect();
                (name.clone(), shape)
            };
            self.order(one.iter().map(sized).collect())?;
        }
        Ok(())
    }

    /// Has a program compiled unless it is there or on its way; says whether it is there.
    fn order(&mut self, shapes: InputShapes) -> Result<bool, Error> {
        let Some(compilation) = self.live.missing_inference(&shapes)? else { return Ok(true) };
        let purpose = Purpose::Inference(shapes);
        if !self.compiler.is_pending(&purpose) {
            self.compiler.order(purpose, compilation);
        }
        Ok(false)
    }

    /// Takes in what was compiled.
    fn collect(&mut self) {
        while let Some(Finished { purpose, result }) = self.compiler.finished() {
            match (purpose, result) {
                (_, Ok(compiled)) => self.live.install(compiled),
                (Purpose::Inference(shapes), Err(error)) => {
                    if self.failures.len() >= MAX_FAILURES {
                        self.failures.pop_first();
                    }
                    self.failures.insert(shapes, refusal(error));
                }
                (Purpose::Training { job }, Err(error)) if job == self.jobs => self.training_failure = Some(error),
                // The job was given up.
                (Purpose::Training { .. }, Err(_)) => {}
            }
        }
    }

    fn names(&self) -> Vec<String> {
        self.card.inputs.iter().map(|input| input.name.clone()).collect()
    }
}

impl Served for LiveModel {
    fn card(&self) -> ModelCard {
        self.card.clone()
    }

    fn weight_version(&self) -> u64 {
        self.live.version()
    }

    fn device_bytes(&self) -> u64 {
        self.live.status().parameter_bytes
    }

    fn prepare(&mut self, shapes: &[Shape], wake: &Wake) -> Result<Preparation, Refusal> {
        self.compiler.wake_by(wake);
        self.collect();
        let shapes: InputShapes = self.names().into_iter().zip(shapes.iter().map(|shape| shape.to_vec())).collect();
        if let Some(reason) = self.failures.remove(&shapes) {
            return Err(reason);
        }
        // Whoever asks for ever new shapes gets in line: the next program that is there wakes the engine, which asks again.
        if self.compiler.is_busy() && self.live.missing_inference(&shapes).map_err(refusal)?.is_some() {
            return Ok(Preparation::Pending);
        }
        match self.order(shapes).map_err(refusal)? {
            true => Ok(Preparation::Ready),
            false => Ok(Preparation::Pending),
        }
    }

    fn run(&mut self, inputs: &[Tensor]) -> Result<Answer, Refusal> {
        let names = self.names();
        let named: Vec<(&str, &Tensor)> = names.iter().map(String::as_str).zip(inputs).collect();
        let answer = self.live.infer(&named).map_err(refusal)?;
        let samples = answer.samples.iter().map(|dependence| match dependence {
            SampleDependence::Separate(at) => Some(*at),
            _ => None,
        });
        let samples = samples.chain(std::iter::repeat(None));
        let outputs = answer.outputs.into_iter().zip(samples).map(|((name, tensor), samples)| Output { name, tensor, samples });
        Ok(Answer { outputs: outputs.collect(), weight_version: answer.version })
    }

    fn begin_training(&mut self, job: TrainJob) -> Result<(), Refusal> {
        let loss = Loss::from_name(&job.loss).map_err(|e| refusal(e.into()))?;
        if loss == Loss::Output && job.targets.is_some() {
            return Err(Refusal::invalid("targets: the loss \"output\" takes none"));
        }
        let request = TrainRequest {
            inputs: job.inputs,
            target: job.targets,
            loss,
            output: job.output,
            optimizer: Optimizer::from_name(&job.optimizer).map_err(|e| refusal(e.into()))?,
            learning_rate: job.learning_rate,
            steps: job.steps,
        };
        // What does not fit is known before anything is compiled.
        self.live.missing_training(&request).map_err(refusal)?;
        self.training_failure = None;
        self.jobs += 1;
        self.waiting = Some(request);
        Ok(())
    }

    fn may_train(&self, requests_wait: bool) -> bool {
        // That a job is gone is told at once.
        self.waiting.is_some() || !self.live.is_training() || self.live.may_advance(requests_wait)
    }

    fn may_train_at(&self) -> Option<Instant> {
        self.live.may_advance_at()
    }

    fn train(&mut self, wake: &Wake) -> Result<Progress, Refusal> {
        self.compiler.wake_by(wake);
        self.collect();
        if let Some(request) = self.waiting.take() {
            if let Some(error) = self.training_failure.take() {
                return Err(refusal(error));
            }
            match self.live.missing_training(&request).map_err(refusal)? {
                None => self.live.start(&request).map_err(refusal)?,
                Some(compilation) => {
                    let purpose = Purpose::Training { job: self.jobs };
                    if !self.compiler.is_pending(&purpose) {
                        self.compiler.order(purpose, compilation);
                    }
                    self.waiting = Some(request);
                    return Ok(Progress::Waits);
                }
            }
        }
        if !self.live.is_training() {
            // An inference lost the device, or a rollback failed half-way.
            return Err(Refusal::unavailable(
                "the job was given up, because the device failed; the weights are those from before",
            ));
        }
        let before = self.live.losses().len();
        match self.live.advance().map_err(refusal)? {
            Some(report) => Ok(Progress::Done(outcome(report))),
            None => {
                let losses = self.live.losses();
                let loss = (losses.len() > before).then(|| losses.last().copied()).flatten();
                Ok(Progress::Continues { loss })
            }
        }
    }

    fn checkpoint(&mut self) -> Result<Box<dyn FnOnce() -> Result<Checkpoint, Refusal> + Send>, Refusal> {
        let snapshot = self.live.snapshot().map_err(refusal)?;
        Ok(Box::new(move || {
            let saved = snapshot.save().map_err(refusal)?;
            let checkpoint = saved.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            Ok(Checkpoint { checkpoint, weight_version: saved.version })
        }))
    }

    fn roll_back(&mut self) -> Result<Rollback, Refusal> {
        let rollback = self.live.rollback().map_err(refusal)?;
        let interrupted = self.waiting.take().is_some();
        Ok(Rollback {
            weight_version: rollback.version,
            restored_version: rollback.checkpoint,
            interrupted: rollback.interrupted || interrupted,
        })
    }
}

fn outcome(report: TrainReport) -> TrainOutcome {
    let reason = match report.outcome {
        Outcome::Published => None,
        Outcome::RolledBack(reason) => Some(reason.to_string()),
    };
    TrainOutcome {
        losses: report.losses,
        weight_version: report.version,
        published: reason.is_none(),
        reason,
        evaluation: report.evaluation,
    }
}

/// What clients may know of a model.
fn card(name: String, model: &Model, bindings: &Bindings, trial: &Trial) -> ModelCard {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => AxisSize::Fixed(*size),
        Dim::Symbol(name) => AxisSize::Any(name.clone()),
    };
    let inputs = model.bound_inputs(bindings).into_iter().map(|input| TensorCard {
        shape: input.ranked.then(|| input.dims.iter().map(size).collect()),
        name: input.name,
        dtype: input.dtype,
    });
    let dims = &bindings.dims;
    let bound = |dim: &Dim| dim.size(dims).map_or_else(|| size(dim), AxisSize::Fixed);
    let found = trial.dtypes.iter().copied().map(Some).chain(std::iter::repeat(None));
    let outputs = model.outputs().iter().zip(found).map(|(output, found)| TensorCard {
        name: output.name.clone(),
        dtype: output.dtype.or(found).unwrap_or(DType::F32),
        shape: output.dims.as_ref().map(|dims| dims.iter().map(bound).collect()),
    });
    let weights: usize = model.parameters().iter().map(|parameter| parameter.shape.numel()).sum();
    ModelCard {
        name,
        inputs: inputs.collect(),
        outputs: outputs.collect(),
        batched: trial.batched,
        facts: vec![("parameters".into(), weights.to_string()), ("producer".into(), model.imported().producer().to_string())],
    }
}
