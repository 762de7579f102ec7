//! The Open Inference Protocol (version 2) over HTTP and gRPC, for anything that takes tensors and returns tensors.
//!
//! One thread, the [engine](engine), owns what it serves and with it the device. Handlers of requests check what came in against the
//! [`ModelCard`], hand the tensors to the engine through a bounded queue, and wait for the answer until a deadline. The engine lets requests of
//! equal shapes share executions, and puts steps of training between them. This crate knows neither ONNX nor the device: a [`Served`] does.
//!
//! Everything that a client can make large is bounded by [`Options`]; whatever it gets wrong is a [`Refusal`], which both protocols
//! show as their own error.

mod batch;
mod body;
mod connection;
mod datatype;
mod describe;
pub mod engine;
mod frontend;
mod grpc;
mod http;
mod infer;
mod json;
mod log;
mod metrics;
mod options;
mod refusal;
mod served;
mod server;
mod train;

pub use meganeura_ir::{DType, SampleAxis, Shape, Tensor, TensorType};
pub use options::Options;
pub use refusal::{Refusal, RefusalKind};
pub use served::{
    Answer, AxisSize, Checkpoint, ModelCard, Output, Preparation, Progress, Rollback, Served, TensorCard, TrainJob, TrainOutcome,
    Wake,
};
pub use server::{EngineFailed, ServeError, Server, Stop};
