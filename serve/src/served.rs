//! [`Served`]: what the engine asks of a model on a device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use meganeura_ir::{DType, SampleAxis, Shape, Tensor};
use serde::Serialize;

use crate::refusal::Refusal;

/// A size of an axis, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AxisSize {
    Fixed(usize),
    /// Requests decide; the name is for people.
    Any(String),
}

/// An input or an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorCard {
    pub name: String,
    pub dtype: DType,
    /// Absent where the model does not say how many axes there are.
    pub shape: Option<Vec<AxisSize>>,
}

/// What clients may know of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelCard {
    pub name: String,
    pub inputs: Vec<TensorCard>,
    pub outputs: Vec<TensorCard>,
    /// Whether the first axis of every input counts samples, of any number, which the model keeps apart: so requests may share an execution.
    pub batched: bool,
    /// Facts for people, as name and text.
    pub facts: Vec<(String, String)>,
}

/// Whether a model can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preparation {
    Ready,
    /// Something is being made on another thread, which wakes the engine.
    Pending,
}

/// Makes the engine ask again. May be called from any thread, at any time.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// An output of one execution.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: String,
    pub tensor: Tensor,
    /// Where the samples lie; present where the card says that the model is batched.
    pub samples: Option<SampleAxis>,
}

/// What one execution gives: all outputs, of one version of the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// In the order of the card.
    pub outputs: Vec<Output>,
    pub weight_version: u64,
}

/// A model with its weights and programs on a device. It stays on the engine's thread.
///
/// After a [`Refusal`] the next call starts afresh: whoever implements this opens a lost device again.
pub trait Served {
    fn card(&self) -> ModelCard;

    /// The version of the weights that is served.
    fn weight_version(&self) -> u64;

    /// Bytes that the model takes on the device.
    fn device_bytes(&self) -> u64 {
        0
    }

    /// Makes ready to run on inputs of these shapes, in the order of the card.
    ///
    /// # Errors
    /// The model does not run at these shapes.
    fn prepare(&mut self, shapes: &[Shape], wake: &Wake) -> Result<Preparation, Refusal>;

    /// Runs the model on inputs in the order of the card, whose shapes were prepared. Floats are f32, whatever the card says.
    ///
    /// # Errors
    /// The device fails.
    fn run(&mut self, inputs: &[Tensor]) -> Result<Answer, Refusal>;

    /// Begins to train. One job at a time.
    ///
    /// # Errors
    /// The model is not to be trained, or not like this.
    fn begin_training(&mut self, job: TrainJob) -> Result<(), Refusal> {
        let _ = job;
        Err(Refusal::unimplemented("this model does not train"))
    }

    /// Whether a piece of training may run now, where requests wait or not: the operator's share decides.
    fn may_train(&self, requests_wait: bool) -> bool {
        !requests_wait
    }

    /// When the job in progress may go on, if no request comes before; absent where it waits for something else.
    fn may_train_at(&self) -> Option<Instant> {
        None
    }

    /// Runs a piece of the job that was begun: at most one step.
    ///
    /// # Errors
    /// The job is over, without result.
    fn train(&mut self, wake: &Wake) -> Result<Progress, Refusal> {
        let _ = wake;
        Err(Refusal::unimplemented("this model does not train"))
    }

    /// What writes a checkpoint of the weights that are served. The engine calls it on another thread.
    ///
    /// # Errors
    /// There is no place for checkpoints.
    fn checkpoint(&mut self) -> Result<Box<dyn FnOnce() -> Result<Checkpoint, Refusal> + Send>, Refusal> {
        Err(Refusal::unimplemented("this model has no checkpoints"))
    }

    /// Serves the weights of the newest checkpoint, as a new version. A job in progress is given up.
    ///
    /// # Errors
    /// There is no checkpoint, or it cannot be read.
    fn roll_back(&mut self) -> Result<Rollback, Refusal> {
        Err(Refusal::unimplemented("this model has no checkpoints"))
    }
}

/// A batch to train on, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainJob {
    /// By name of the model's inputs, in the dtypes of the card.
    pub inputs: Vec<(String, Tensor)>,
    pub targets: Option<Tensor>,
    pub loss: String,
    /// The output that the loss judges.
    pub output: Option<String>,
    pub optimizer: String,
    pub learning_rate: f64,
    /// At least 1.
    pub steps: u64,
}

/// How far a piece of training came.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// The job goes on. `loss` is that of the step that was made, if one was.
    Continues {
        loss: Option<f64>,
    },
    /// Nothing to do until the engine is woken.
    Waits,
    Done(TrainOutcome),
}

/// What came of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainOutcome {
    /// The loss of the batch before each step.
    pub losses: Vec<f64>,
    /// The version that is served now.
    pub weight_version: u64,
    /// Whether the steps made it.
    pub published: bool,
    /// Why they did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The loss on the operator's evaluation set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<f64>,
}

/// A checkpoint that is complete on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    /// Its name within the operator's folder.
    pub checkpoint: String,
    pub weight_version: u64,
}

/// What going back did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rollback {
    /// The new version, which has old weights.
    pub weight_version: u64,
    /// The version whose weights they are; absent where they are those that were served first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restored_version: Option<u64>,
    /// Whether a job was given up.
    pub interrupted: bool,
}

/// Where the time of an answer went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timing {
    pub queue: Duration,
    pub device: Duration,
}
