//! Server and models, as the protocol describes them.

use serde_json::{Value, json};

use crate::datatype;
use crate::frontend::VERSION;
use crate::metrics::Totals;
use crate::served::{AxisSize, ModelCard, TensorCard};

pub(crate) const SERVER: &str = "meganeura";
pub(crate) const SERVER_VERSION: &str = env!("CARGO_PKG_VERSION");
pub(crate) const EXTENSIONS: &[&str] = &["binary_tensor_data", "model_configuration", "statistics"];
/// Models came as ONNX.
pub(crate) const PLATFORM: &str = "onnx_meganeura";

/// The shape of an input or output: -1 where requests decide. One unknown size where not even the number of axes is known.
pub(crate) fn shape(card: &TensorCard) -> Vec<i64> {
    let size = |size: &AxisSize| match size {
        AxisSize::Fixed(size) => i64::try_from(*size).unwrap_or(i64::MAX),
        AxisSize::Any(_) => -1,
    };
    card.shape.as_ref().map_or_else(|| vec![-1], |shape| shape.iter().map(size).collect())
}

/// As [`shape`], without the axis of samples.
pub(crate) fn dims(model: &ModelCard, card: &TensorCard) -> Vec<i64> {
    shape(card).into_iter().skip(usize::from(model.batched)).collect()
}

pub(crate) fn max_batch(model: &ModelCard, max_batch: usize) -> usize {
    if model.batched { max_batch } else { 0 }
}

pub(crate) fn metadata(model: &ModelCard) -> Value {
    let tensors = |cards: &[TensorCard]| -> Vec<Value> {
        let rows = cards.iter();
        rows.map(|card| json!({ "name": card.name, "datatype": datatype::name(card.dtype), "shape": shape(card) })).collect()
    };
    json!({
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": tensors(&model.inputs),
        "outputs": tensors(&model.outputs),
    })
}

pub(crate) fn config(model: &ModelCard, limit: usize) -> Value {
    let tensors = |cards: &[TensorCard]| -> Vec<Value> {
        let rows = cards.iter();
        let datatype = |card: &TensorCard| format!("TYPE_{}", datatype::name(card.dtype));
        rows.map(|card| json!({ "name": card.name, "data_type": datatype(card), "dims": dims(model, card) })).collect()
    };
    json!({
        "name": model.name,
        "platform": PLATFORM,
        "backend": SERVER,
        "max_batch_size": max_batch(model, limit),
        "input": tensors(&model.inputs),
        "output": tensors(&model.outputs),
    })
}

pub(crate) fn statistics(model: &ModelCard, totals: Totals) -> Value {
    let duration = |count: u64, ns: u64| json!({ "count": count, "ns": ns });
    json!({
        "name": model.name,
        "version": VERSION,
        "inference_count": totals.samples,
        "execution_count": totals.executions,
        "inference_stats": {
            "success": duration(totals.successes, totals.success_ns),
            "fail": duration(totals.failures, totals.failure_ns),
            "queue": duration(totals.successes, totals.queue_ns),
            "compute_infer": duration(totals.executions, totals.execution_ns),
        },
    })
}
