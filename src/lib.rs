//! Fine-tunes and runs ONNX models on any GPU with Vulkan or Metal, as one native program.
//!
//! A [`Model`] is a structure that some framework exported, and weights. Running it, differentiating it and training it all happen on a
//! [`Device`]; the weights leave under the names they came in with.
//!
//! ```no_run
//! use meganeura::{Dataset, Device, DeviceSelector, Length, Loss, Metric, Model, Objective, TrainOptions, Trainer};
//!
//! # fn main() -> Result<(), meganeura::Error> {
//! let device = Device::open(&DeviceSelector::Auto)?;
//! let mut model = Model::open("model.onnx")?;
//! let (train, test) = (Dataset::open("train.npz")?, Dataset::open("test.npz")?);
//!
//! let objective = Objective::new(Loss::from_name("cross_entropy")?);
//! let options = TrainOptions { batch: Some(32), length: Length::Epochs(3), ..TrainOptions::new(objective) };
//! let mut trainer = Trainer::new(&model, &device, &train, options)?;
//! trainer.train_to(trainer.total_steps(), |step| {
//!     println!("step {} loss {:.4}", step.step, step.loss);
//!     Ok::<_, meganeura::Error>(())
//! })?;
//! println!("{:?}", trainer.evaluator(&model, &test, Some(Metric::Accuracy))?.run()?);
//!
//! trainer.update(&mut model)?;
//! model.save("tuned.safetensors")?;
//! model.export_onnx("tuned.onnx")?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Model::run`] runs a model once and [`Model::predictor`] keeps it on the device; [`Model::gradients`] gives the gradient of a loss.
//! [`TrainOptions::lora`] trains low-rank adapters instead of the weights themselves; [`Model::export_peft`] writes them alone.
//! [`Trainer::checkpoint`] and [`Trainer::resume`] continue a run exactly. A [`live::Live`] model answers while it is trained. The stages
//! behind this, from the ONNX file to the kernels, are the crates [`import`], [`ir`], [`autodiff`], [`codegen`] and [`runtime`].

pub mod bench;
pub mod checkpoint;
pub mod data;
mod diagnosis;
mod error;
mod evaluator;
mod gradients;
mod groups;
mod guard;
mod head;
mod images;
pub mod live;
pub mod log;
mod lora;
mod metric;
mod model;
mod objective;
mod peft;
pub mod plan_cache;
pub mod plot;
mod predictor;
mod prefix;
mod rewriting;
mod schedule;
mod selection;
mod settings;
mod step_inputs;
mod tensor_file;
pub mod tensorboard;
mod trainer;
mod training_step;
mod workload;

pub use data::{Dataset, ImageOptions, ImagePreprocessing};
pub use diagnosis::{BadTensor, Pass, Range};
pub use error::{Error, NonFinite, Skipped};
pub use evaluator::{Evaluation, Evaluator};
pub use glob::Pattern;
pub use gradients::{Gradients, WithRespectTo};
pub use groups::{GroupRate, ParameterGroup, TrainedGroup};
pub use head::HeadOptions;
pub use lora::{Adapter, LoraError, LoraOptions};
pub use metric::Metric;
pub use model::Model;
pub use objective::Objective;
pub use peft::PeftError;
pub use plan_cache::{PlanCache, use_plan_cache};
pub use predictor::Predictor;
pub use prefix::{FrozenPrefix, PrefixCache};
pub use rewriting::{compile_options, rewrite_graphs};
pub use schedule::{Anneal, Decay, Plateau, PlateauBy, PlateauState, Schedule};
pub use selection::{ParameterPlan, Rates};
pub use settings::{Change, Settings};
pub use tensor_file::write_tensors;
pub use trainer::{Length, StepReport, TrainOptions, Trainer};
pub use workload::{WorkPhase, Workload};

pub use meganeura_autodiff::{self as autodiff, Loss, LossScale, Optimizer};
pub use meganeura_codegen as codegen;
pub use meganeura_codegen::Precision;
pub use meganeura_import::{
    self as import, Bindings, Dim, ImportOptions, Limits, Mode, ModelInput, ModelOutput, ModelParameter, Phase, RANDOM_KEY,
};
pub use meganeura_ir::{self as ir, DType, Shape, Tensor, TensorType, random_key};
pub use meganeura_runtime::{self as runtime, Device, DeviceSelector};
