//! A training request, cut into pieces: steps, batches of the evaluation, the publication.

use std::sync::Arc;
use std::time::Instant;

use meganeura_autodiff::{Loss, Optimizer};
use meganeura_ir::{ParameterId, Tensor};
use meganeura_runtime::{DeviceError, ParameterStore, Session};

use super::program::{TrainingProgram, TrainingStep, Wanted};
use super::{Compilation, Live, LiveError, check_setting};
use crate::data::Samples;
use crate::error::Error;
use crate::evaluator::Pass;
use crate::groups::TrainedGroup;
use crate::predictor::{by_name, random_input};
use crate::schedule::{Decay, PlateauState, Schedule};
use crate::training_step::Updates;

/// A batch to train on. The first axis of every tensor is the axis of the samples.
#[derive(Clone, Debug)]
pub struct TrainRequest {
    /// By name of the model's inputs.
    pub inputs: Vec<(String, Tensor)>,
    /// Absent for losses that take none.
    pub target: Option<Tensor>,
    pub loss: Loss,
    /// The output that the loss judges. May be absent where the model has one only.
    pub output: Option<String>,
    /// Its state goes on from requests with the same settings, until there is one with others, a rollback, or a failure of the device.
    pub optimizer: Optimizer,
    pub learning_rate: f64,
    /// At least 1.
    pub steps: u64,
}

/// What came of a training request.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainReport {
    /// The loss of the batch before each step.
    pub losses: Vec<f64>,
    pub outcome: Outcome,
    /// The version that is served now.
    pub version: u64,
    /// The loss of what the steps made on the evaluation set.
    pub evaluation: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The weights are served, as a new version.
    Published,
    /// Training goes on from the served version, which never changed. The optimiser's state is zero.
    RolledBack(Rejection),
}

/// Why the result of a training request is not served.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejection {
    #[error("the loss of step {step} is {loss}")]
    Loss { step: u64, loss: f64 },
    #[error("{name:?} holds NaN or infinity")]
    Weight { name: String },
    #[error("the loss on the evaluation set rose from {before} to {after}")]
    Evaluation { before: f64, after: f64 },
}

/// A request in progress.
pub(super) struct Job {
    program: Arc<TrainingProgram>,
    batch: Vec<(String, Tensor)>,
    groups: Vec<TrainedGroup>,
    schedule: Schedule,
    losses: Vec<f64>,
    stage: Stage,
}

enum Stage {
    /// The evaluation of the served version, where that is not known.
    Before(Pass),
    Steps,
    After(Pass),
    Publication {
        evaluation: Option<f64>,
    },
}

impl Live {
    /// The program that a training request needs and that is not there yet. Without it, [`Live::start`] compiles.
    ///
    /// # Errors
    /// The request does not fit the model; the device cannot be opened.
    pub fn missing_training(&mut self, request: &TrainRequest) -> Result<Option<Compilation>, Error> {
        let samples = self.checked(request)?;
        match self.find_training(request) {
            Some(_) => Ok(None),
            None => {
                let wanted = Wanted::Training(Box::new(self.training_step(request, samples)));
                Ok(Some(Compilation { compiler: self.compiler()?, wanted }))
            }
        }
    }

    fn find_training(&self, request: &TrainRequest) -> Option<Arc<TrainingProgram>> {
        let key = request.key();
        self.training.find(|program| program.key == key).cloned()
    }

    fn training_step(&self, request: &TrainRequest, samples: Samples) -> TrainingStep {
        let clip = self.options.training.as_ref().and_then(|training| training.clip);
        TrainingStep { key: request.key(), samples, trained: self.trained.clone(), clip }
    }

    fn checked(&self, request: &TrainRequest) -> Result<Samples, Error> {
        if self.options.training.is_none() {
            return Err(LiveError::NoTraining.into());
        }
        let rate = request.learning_rate;
        check_setting("the learning rate", rate, "a number of at least 0", |v| v.is_finite() && v >= 0.0)?;
        check_setting("the number of steps", request.steps as f64, "at least 1", |v| v >= 1.0)?;
        request.samples(&self.model, &self.options.bindings)
    }

    /// Begins a training request, which [`Live::advance`] carries out.
    ///
    /// # Errors
    /// Another one is in progress, the request does not fit the model, or the device fails or has no memory left.
    pub fn start(&mut self, request: &TrainRequest) -> Result<(), Error> {
        if self.job.is_some() {
            return Err(LiveError::Busy.into());
        }
        let started = self.try_start(request);
        self.settled(started)
    }

    fn try_start(&mut self, request: &TrainRequest) -> Result<(), Error> {
        self.open_device()?;
        let mut samples = self.checked(request)?;
        let program = match self.find_training(request) {
            Some(program) => program,
            None => self.compiler()?.training(self.training_step(request, samples.clone()))?,
        };
        program.key.objective.check_targets(&samples, &program.prediction, program.batch)?;
        if let Some(dtype) = program.target {
            samples.convert_target(dtype);
        }
        let batch = samples.batch(&(0..program.batch).collect::<Vec<_>>())?;
        let plateau = PlateauState::default();
        let schedule = Schedule { peak: request.learning_rate, decay: Decay::Constant, warmup: 0, total: request.steps, plateau };
        self.training_session(&program)?;
        let twin = self.twin(&program.program)?;
        let stage = match twin.evaluator {
            Some(_) if twin.accepted.is_none() => Stage::Before(Pass::default()),
            _ => Stage::Steps,
        };
        let groups = program.groups.iter().map(|group| TrainedGroup { learning_rate: request.learning_rate, ..group.clone() });
        let groups = groups.collect();
        self.job = Some(Job { program, batch, groups, schedule, losses: Vec::new(), stage });
        Ok(())
    }

    /// The session of a training program. Those of one optimiser share its state; those of another are closed.
    fn training_session(&mut self, program: &Arc<TrainingProgram>) -> Result<&mut Session, Error> {
        let optimizer = program.key.optimizer;
        let twin = self.twin(&program.program)?;
        let store = twin.store.clone();
        if twin.optimizer != Some(optimizer) {
            (twin.optimizer, twin.steps) = (Some(optimizer), 0);
            self.training.close();
        }
        let open = self.training.touch(program).session.is_some();
        let session = match self.training.any_session() {
            _ if open => None,
            Some(other) => Some(other.beside(program.program.clone())?),
            None => {
                // The state of sessions that were forgotten is gone.
                self.twin(&program.program)?.steps = 0;
                Some(Session::new(store.device(), program.program.clone(), &store)?)
            }
        };
        let entry = self.training.touch(program);
        if session.is_some() {
            entry.session = session;
        }
        Ok(entry.session.as_mut().ok_or(DeviceError::Dead)?)
    }

    /// Whether a training request is in progress. A failure of the device gives it up.
    pub fn is_training(&self) -> bool {
        self.job.is_some()
    }

    /// Whether a training request is in progress and may go on now, by the share of training. `waiting` says whether requests wait.
    pub fn may_advance(&self, waiting: bool) -> bool {
        self.job.is_some() && self.share.allows(waiting, Instant::now())
    }

    /// When a training request in progress may go on, if no request for inference comes before.
    pub fn may_advance_at(&self) -> Option<Instant> {
        self.job.is_some().then(|| self.share.resumes_at(Instant::now()))
    }

    /// The losses of the training request in progress, so far.
    pub fn losses(&self) -> &[f64] {
        self.job.as_ref().map_or(&[], |job| &job.losses)
    }

    /// Carries out the next piece of the training request in progress: a step, a batch of the evaluation, or the publication. The last
    /// one gives the report.
    ///
    /// # Errors
    /// The device fails. The request is given up then, and what it trained is lost; the served version is not.
    pub fn advance(&mut self) -> Result<Option<TrainReport>, Error> {
        let Some(mut job) = self.job.take() else { return Ok(None) };
        let started = Instant::now();
        let advanced = self.try_advance(&mut job);
        self.share.trained(started.elapsed(), Instant::now());
        match &advanced {
            Ok(None) => self.job = Some(job),
            Ok(Some(_)) => {}
            // What the twin holds now is of no version.
            Err(_) => self.close_twin(),
        }
        self.settled(advanced)
    }

    /// Carries out a training request as a whole.
    ///
    /// # Errors
    /// As [`Live::start`] and [`Live::advance`].
    pub fn train(&mut self, request: &TrainRequest) -> Result<TrainReport, Error> {
        self.start(request)?;
        loop {
            if let Some(report) = self.advance()? {
                return Ok(report);
            }
        }
    }

    fn try_advance(&mut self, job: &mut Job) -> Result<Option<TrainReport>, Error> {
        let twin = self.on_device.as_mut().and_then(|d| d.twin.as_mut());
        let Some(twin) = twin.filter(|twin| !twin.store.device().is_dead()) else { return Err(DeviceError::Dead.into()) };
        let evaluated = match (&mut job.stage, &mut twin.evaluator) {
            (Stage::Before(pass) | Stage::After(pass), Some(evaluator)) => match evaluator.advance(pass)? {
                None => return Ok(None),
                evaluation => evaluation.map(|evaluation| evaluation.loss),
            },
            _ => None,
        };
        match job.stage {
            Stage::Before(_) => {
                twin.accepted = evaluated;
                job.stage = Stage::Steps;
            }
            Stage::After(_) => {
                let rejection = evaluated.zip(twin.accepted).and_then(|(after, before)| self.rejection(before, after));
                match rejection {
                    Some(rejection) => return self.reject(job, rejection, evaluated).map(Some),
                    None => job.stage = Stage::Publication { evaluation: evaluated },
                }
            }
            Stage::Steps => {
                let loss = self.step(job)?;
                job.losses.push(loss);
                let step = job.losses.len() as u64;
                if !loss.is_finite() {
                    return self.reject(job, Rejection::Loss { step, loss }, None).map(Some);
                }
                let evaluates = self.on_device.as_ref().and_then(|d| d.twin.as_ref()).is_some_and(|t| t.evaluator.is_some());
                if step >= job.schedule.total {
                    job.stage = if evaluates { Stage::After(Pass::default()) } else { Stage::Publication { evaluation: None } };
                }
            }
            Stage::Publication { evaluation } => return self.publish(job, evaluation).map(Some),
        }
        Ok(None)
    }

    fn rejection(&self, before: f64, after: f64) -> Option<Rejection> {
        let set = self.options.training.as_ref().and_then(|training| training.evaluation.as_ref())?;
        let limit = before + set.tolerance * before.abs();
        // Whatever a version that is NaN itself compares with, a result that is a number is better.
        let accepted = after <= limit || (before.is_nan() && after.is_finite());
        (!accepted).then_some(Rejection::Evaluation { before, after })
    }

    fn step(&mut self, job: &Job) -> Result<f64, Error> {
        let (seed, draw) = (self.options.seed, self.steps + 1);
        let twin = self.twin(&job.program.program)?;
        twin.steps += 1;
        let step = twin.steps;
        let updates = Updates { groups: &job.groups, clip: job.program.clip, accumulate: 1, ema: None, loss_scale: None };
        let scalars = updates.inputs(&job.schedule, step)?;
        let mut inputs = job.batch.clone();
        inputs.extend(scalars.into_iter().map(|(name, value)| (name, Tensor::scalar_f32(value))));
        inputs.extend(random_input(&job.program.program, seed, draw));
        let outputs = self.training_session(&job.program)?.run(&by_name(&inputs))?;
        self.steps += 1;
        Ok(outputs.first().and_then(Tensor::scalar_f64).unwrap_or(f64::NAN))
    }

    /// Makes what the twin holds the served version, unless it holds what is no number.
    fn publish(&mut self, job: &mut Job, evaluation: Option<f64>) -> Result<TrainReport, Error> {
        let (served, twin) = self.stores()?;
        let ids = ids(&twin, &job.program.updated);
        let values = twin.read_parameters(&ids)?;
        let named: Vec<(String, Tensor)> = job.program.updated.iter().cloned().zip(values).collect();
        let finite = |tensor: &Tensor| tensor.to_f32_vec().iter().all(|v| v.is_finite());
        if let Some((name, _)) = named.iter().find(|(_, tensor)| !finite(tensor)) {
            let rejection = Rejection::Weight { name: name.clone() };
            return self.reject(job, rejection, evaluation);
        }
        served.copy_from(&twin, job.program.updated.iter().map(String::as_str))?;
        Arc::make_mut(&mut self.changed).extend(named);
        self.version += 1;
        if let Some(twin) = self.on_device.as_mut().and_then(|d| d.twin.as_mut()) {
            twin.accepted = evaluation;
        }
        let losses = std::mem::take(&mut job.losses);
        Ok(TrainReport { losses, outcome: Outcome::Published, version: self.version, evaluation })
    }

    /// Makes the twin what is served.
    fn reject(&mut self, job: &mut Job, rejection: Rejection, evaluation: Option<f64>) -> Result<TrainReport, Error> {
        let (served, twin) = self.stores()?;
        twin.copy_from(&served, job.program.updated.iter().map(String::as_str))?;
        self.clear_optimizer()?;
        let losses = std::mem::take(&mut job.losses);
        Ok(TrainReport { losses, outcome: Outcome::RolledBack(rejection), version: self.version, evaluation })
    }

    fn stores(&self) -> Result<(Arc<ParameterStore>, Arc<ParameterStore>), Error> {
        let on_device = self.on_device.as_ref().ok_or(DeviceError::Dead)?;
        let served = on_device.served.clone().ok_or(DeviceError::Dead)?;
        let twin = on_device.twin.as_ref().ok_or(DeviceError::Dead)?;
        Ok((served, twin.store.clone()))
    }
}

fn ids(store: &ParameterStore, names: &[String]) -> Vec<ParameterId> {
    names.iter().filter_map(|name| store.parameters().iter().find(|p| p.name == *name).map(|p| p.id)).collect()
}
