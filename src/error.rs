//! What can go wrong between a file and its tuned weights.

use std::path::PathBuf;

use meganeura_autodiff::{AutodiffError, LossError, OptimizerError};
use meganeura_codegen::CompileError;
use meganeura_import::ImportError;
use meganeura_ir::{GraphError, RangeError, TensorType, VerifyError};
use meganeura_runtime::{CheckpointError, DeviceError, ParameterError, SessionError};

use crate::checkpoint::ResumeError;
use crate::data::{DataError, PreprocessingError};
use crate::diagnosis::BadTensor;
use crate::live::LiveError;
use crate::log::LogError;
use crate::lora::LoraError;
use crate::peft::PeftError;
use crate::plot::PlotError;

/// Where the first number that is not finite was found.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NonFinite {
    #[error("{name:?} of sample {sample} holds NaN or infinity")]
    Data { name: String, sample: usize },
    #[error("{name:?} holds NaN or infinity since an earlier step; a smaller learning rate or --clip may help")]
    Parameter { name: String },
    #[error("{0}; a smaller learning rate or --clip may help")]
    Tensor(Box<BadTensor>),
}

/// Steps in a row whose gradients were not finite, whatever the loss was scaled by.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(", nor are those of the {} steps before it, whatever the loss was scaled by (at last {scale:e})", steps - 1)]
pub struct Skipped {
    pub steps: u64,
    /// The last scale.
    pub scale: f64,
}

/// Any error of this crate. The text says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}", path = .path.display())]
    Import { path: PathBuf, source: Box<ImportError> },
    #[error(transparent)]
    Data(Box<DataError>),
    #[error(transparent)]
    Preprocessing(#[from] PreprocessingError),
    #[error("the model has no output {name:?}; its outputs are {}", known.join(", "))]
    UnknownOutput { name: String, known: Vec<String> },
    #[error("the model has several outputs, {}: choose the one to train with --output", known.join(", "))]
    AmbiguousOutput { known: Vec<String> },
    #[error("a model of 0 classes is none")]
    NoClasses,
    #[error("the model has no output")]
    NoOutput,
    #[error("no parameter matches {pattern:?}; the first names are {}", examples.join(", "))]
    NoMatch { pattern: String, examples: Vec<String> },
    #[error("the phase {phase} needs a loss: give --loss")]
    NoObjective { phase: &'static str },
    #[error("size {dim:?} of input {input:?} is open: give --dim {dim}=N, or data")]
    OpenSize { input: String, dim: String },
    #[error("nothing to train: {reason}")]
    NothingToTrain { reason: &'static str },
    #[error("{samples} samples do not fill one step of {batch}: choose a smaller --batch or --accumulate")]
    BatchTooLarge { samples: usize, batch: usize },
    #[error("a step takes {expected} samples, {found} were given")]
    StepSamples { found: usize, expected: usize },
    #[error("the schedule follows a metric, and the evaluation has none: choose one with --metric, or by=loss")]
    NoMetric,
    #[error("a batch of 0 samples is no batch")]
    EmptyBatch,
    #[error("{path}: array {key:?} does not fit: {source}", path = .path.display())]
    Target { path: PathBuf, key: String, source: Box<LossError> },
    #[error("{path}: array {key:?}, sample {sample}: {value} is not one of the model's {classes} classes", path = .path.display())]
    Class { path: PathBuf, key: String, sample: usize, value: i64, classes: usize },
    #[error("metric {metric} needs {needed}; the prediction is {prediction}{}", target.as_ref().map(|t| format!(", the target {t}")).unwrap_or_default())]
    Metric { metric: &'static str, needed: &'static str, prediction: TensorType, target: Option<TensorType> },
    #[error(
        "{samples} samples do not divide into batches of {batch}, and the prediction {prediction} has no axis of samples to cut: choose a --batch that divides"
    )]
    Remainder { samples: usize, batch: usize, prediction: TensorType },
    #[error("the loss is {loss} at step {step}: {}", .bad.as_ref().map_or("a smaller learning rate or --clip may help".to_string(), ToString::to_string))]
    NonFiniteLoss { step: u64, loss: f64, bad: Option<NonFinite> },
    #[error(
        "the gradients of step {step} are not finite{}: {}",
        .skipped.map(|s| s.to_string()).unwrap_or_default(),
        .bad.as_ref().map_or("their norm overflows".to_string(), ToString::to_string)
    )]
    NonFiniteGradients { step: u64, skipped: Option<Skipped>, bad: Option<NonFinite> },
    #[error(
        "cannot keep the values of the frozen prefix in a temporary file: {0}; more memory (--cache) or --cache off avoids it"
    )]
    Cache(std::io::Error),
    #[error("the model has no parameter {0:?}")]
    UnknownParameter(String),
    #[error("weight {name:?} is {found}, the model has {expected}")]
    WeightType { name: String, found: TensorType, expected: TensorType },
    #[error("weight {name:?}: {source}")]
    WeightRange { name: String, source: RangeError },
    #[error(transparent)]
    Lora(Box<LoraError>),
    #[error(transparent)]
    Peft(#[from] PeftError),
    #[error(transparent)]
    Resume(#[from] ResumeError),
    #[error(transparent)]
    Loss(#[from] LossError),
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    #[error(transparent)]
    Autodiff(#[from] AutodiffError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error("internal error, please report it: the graph does not verify: {0}")]
    Verify(#[from] VerifyError),
    #[error("the model cannot be compiled for this device: {0}")]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    #[error(transparent)]
    Write(#[from] CheckpointError),
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Plot(#[from] PlotError),
    #[error(transparent)]
    Live(#[from] LiveError),
}

impl Error {
    /// What went wrong on the device, if it was that.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            Error::Device(error)
            | Error::Session(SessionError::Device(error) | SessionError::Parameter(ParameterError::Device(error)))
            | Error::Parameter(ParameterError::Device(error)) => Some(error),
            _ => None,
        }
    }
}

impl From<LoraError> for Error {
    fn from(error: LoraError) -> Self {
        Error::Lora(Box::new(error))
    }
}

impl From<DataError> for Error {
    fn from(error: DataError) -> Self {
        Error::Data(Box::new(error))
    }
}
