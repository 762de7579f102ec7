//! What a request for an inference must be, whichever protocol it came by.

use std::time::{Duration, Instant};

use meganeura_ir::{DType, Tensor};
use tokio::sync::oneshot;

use crate::datatype;
use crate::engine::{InferJob, Reply, stopped};
use crate::frontend::Frontend;
use crate::refusal::Refusal;
use crate::served::{AxisSize, ModelCard, TensorCard};

/// Inputs as they came, and what is wanted of the answer.
pub(crate) struct InferRequest {
    pub model: usize,
    pub inputs: Vec<(String, Tensor)>,
    /// Names of outputs; all where it is empty.
    pub outputs: Vec<String>,
    /// A deadline that the client sets.
    pub timeout: Option<Duration>,
    pub arrived: Instant,
}

/// An answer with the outputs that were asked for, in the dtypes of the card.
pub(crate) struct InferResponse {
    pub outputs: Vec<(String, Tensor)>,
    pub weight_version: u64,
    pub batch: usize,
    /// Microseconds in the queue, and in the execution.
    pub queue_us: u64,
    pub execution_us: u64,
}

impl Frontend {
    /// Answers a request, and counts it.
    ///
    /// # Errors
    /// The request does not fit the model, the server is busy, the deadline passes, or the device fails.
    pub async fn infer(&self, request: InferRequest) -> Result<InferResponse, Refusal> {
        let (model, arrived) = (request.model, request.arrived);
        let response = self.try_infer(request).await;
        let queue = response.as_ref().map_or(Duration::ZERO, |response| Duration::from_micros(response.queue_us));
        self.metrics.inference(model, response.is_ok(), arrived.elapsed(), queue);
        response
    }

    async fn try_infer(&self, request: InferRequest) -> Result<InferResponse, Refusal> {
        let card = self.card(request.model)?;
        if let Some(unknown) = request.outputs.iter().find(|name| card.outputs.iter().all(|o| o.name != **name)) {
            return Err(Refusal::invalid(format!(
                "model {:?} has no output {:?}; {}",
                card.name,
                shown(unknown),
                names("outputs", &card.outputs)
            )));
        }
        // Each would be a copy.
        let earlier = |(index, name): &(usize, &String)| request.outputs.iter().take(*index).any(|other| other == *name);
        if let Some((_, twice)) = request.outputs.iter().enumerate().find(earlier) {
            return Err(Refusal::invalid(format!("output {twice:?} is asked for twice")));
        }
        let (inputs, rows) = check_inputs(card, request.inputs, self.options.max_batch)?;
        let limit = request.timeout.map_or(self.options.deadline, |timeout| timeout.min(self.options.deadline));
        let deadline = request.arrived + limit;
        let (reply, answer) = oneshot::channel();
        self.engine.infer(InferJob { model: request.model, inputs, rows, arrived: request.arrived, deadline, reply })?;
        let answer = match tokio::time::timeout_at(deadline.into(), answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(stopped()))?,
            Err(_) => return Err(Refusal::unavailable(format!("no answer within {:.3} s", limit.as_secs_f64()))),
        };
        Ok(respond(card, answer, &request.outputs))
    }
}

/// How errors name an input.
pub(crate) fn place_of(input: &str) -> String {
    format!("input {:?}", shown(input))
}

/// The text of a name that a client sent, cut short.
pub(crate) fn shown(name: &str) -> String {
    let mut shown: String = name.chars().take(64).collect();
    if shown.len() < name.len() {
        shown.push('…');
    }
    shown
}

fn names(what: &str, cards: &[TensorCard]) -> String {
    let names: Vec<&str> = cards.iter().map(|card| card.name.as_str()).collect();
    format!("its {what} are {}", names.join(", "))
}

/// Inputs in the order of the card, as the engine takes them; and the samples in them, where the model is batched.
pub(crate) fn check_inputs(
    card: &ModelCard,
    inputs: Vec<(String, Tensor)>,
    max_batch: usize,
) -> Result<(Vec<Tensor>, Option<usize>), Refusal> {
    let mut found: Vec<Option<Tensor>> = vec![None; card.inputs.len()];
    for (name, tensor) in inputs {
        let index = card.inputs.iter().position(|input| input.name == name);
        let Some(place) = index.and_then(|index| found.get_mut(index)) else {
            return Err(Refusal::invalid(format!(
                "model {:?} has no input {:?}; {}",
                card.name,
                shown(&name),
                names("inputs", &card.inputs)
            )));
        };
        if place.replace(tensor).is_some() {
            return Err(Refusal::invalid(format!("input {name:?} is given twice")));
        }
    }
    let mut checked = Vec::with_capacity(found.len());
    let mut rows: Option<usize> = None;
    for (input, tensor) in card.inputs.iter().zip(found) {
        let name = &input.name;
        let tensor = tensor.ok_or_else(|| Refusal::invalid(format!("input {name:?} is missing")))?;
        check_type(input, &tensor)?;
        if card.batched {
            let samples = tensor.shape().first().copied().unwrap_or(0);
            match *rows.get_or_insert(samples) {
                _ if samples == 0 => return Err(Refusal::invalid(format!("input {name:?} holds no sample"))),
                first if first != samples => {
                    return Err(Refusal::invalid(format!("input {name:?} has {samples} samples, the inputs before {first}")));
                }
                _ if samples > max_batch => {
                    return Err(Refusal::invalid(format!(
                        "{samples} samples are more than the {max_batch} that one request may have"
                    )));
                }
                _ => {}
            }
        }
        checked.push(device_tensor(name, tensor)?);
    }
    Ok((checked, rows))
}

fn check_type(card: &TensorCard, tensor: &Tensor) -> Result<(), Refusal> {
    let name = &card.name;
    if tensor.dtype() != card.dtype {
        let (expected, found) = (datatype::name(card.dtype), datatype::name(tensor.dtype()));
        return Err(Refusal::invalid(format!("input {name:?} has datatype {expected}, not {found}")));
    }
    let Some(shape) = &card.shape else { return Ok(()) };
    let fits = |(size, found): (&AxisSize, &usize)| match size {
        AxisSize::Fixed(size) => size == found,
        AxisSize::Any(_) => true,
    };
    if shape.len() != tensor.shape().rank() || !shape.iter().zip(tensor.shape().iter()).all(fits) {
        let expected: Vec<String> = shape.iter().map(shape_text).collect();
        return Err(Refusal::invalid(format!("input {name:?} has shape [{}], not {}", expected.join(", "), tensor.shape())));
    }
    Ok(())
}

fn shape_text(size: &AxisSize) -> String {
    match size {
        AxisSize::Fixed(size) => size.to_string(),
        AxisSize::Any(name) => name.clone(),
    }
}

/// The tensor as the graph takes it: floats as f32, wide integers within the 32 bits of a device word, bools as 0 or 1.
fn device_tensor(name: &str, tensor: Tensor) -> Result<Tensor, Refusal> {
    let outside = |value: String| {
        let dtype = datatype::name(tensor.dtype());
        Refusal::invalid(format!("input {name:?} holds {value}, outside the 32-bit range in which devices hold {dtype}"))
    };
    match tensor.dtype() {
        dtype if dtype.is_float() => tensor.cast_finite(DType::F32).map_err(|e| Refusal::invalid(format!("input {name:?}: {e}"))),
        DType::I64 => match tensor.to_i64_vec().into_iter().find(|&value| i32::try_from(value).is_err()) {
            Some(value) => Err(outside(value.to_string())),
            None => Ok(tensor),
        },
        DType::U64 => {
            let mut values = tensor.bytes().as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
            match values.find(|&value| u32::try_from(value).is_err()) {
                Some(value) => Err(outside(value.to_string())),
                None => Ok(tensor),
            }
        }
        DType::Bool => match tensor.bytes().iter().find(|&&byte| byte > 1) {
            Some(byte) => Err(Refusal::invalid(format!("input {name:?} holds the byte {byte}, which is no BOOL"))),
            None => Ok(tensor),
        },
        _ => Ok(tensor),
    }
}

fn respond(card: &ModelCard, reply: Reply, wanted: &[String]) -> InferResponse {
    let dtype = |name: &str| card.outputs.iter().find(|output| output.name == name).map(|output| output.dtype);
    let mut outputs: Vec<(String, Tensor)> = reply.outputs;
    if !wanted.is_empty() {
        outputs = wanted.iter().filter_map(|name| outputs.iter().find(|(output, _)| output == name).cloned()).collect();
    }
    let declared = |(name, tensor): (String, Tensor)| match dtype(&name) {
        Some(dtype) if dtype != tensor.dtype() => (name, tensor.cast(dtype)),
        _ => (name, tensor),
    };
    InferResponse {
        outputs: outputs.into_iter().map(declared).collect(),
        weight_version: reply.weight_version,
        batch: reply.batch,
        queue_us: reply.timing.queue.as_micros() as u64,
        execution_us: reply.timing.device.as_micros() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> ModelCard {
        let any = |name: &str| AxisSize::Any(name.to_string());
        let tensor = |name: &str, dtype, shape| TensorCard { name: name.to_string(), dtype, shape: Some(shape) };
        ModelCard {
            name: "m".into(),
            inputs: vec![tensor("x", DType::F16, vec![any("n"), AxisSize::Fixed(2)]), tensor("ids", DType::I64, vec![any("n")])],
            batched: true,
            ..ModelCard::default()
        }
    }

    fn check(x: Tensor, ids: Tensor) -> Result<(Vec<Tensor>, Option<usize>), String> {
        let inputs = vec![("ids".to_string(), ids), ("x".to_string(), x)];
        check_inputs(&card(), inputs, 4).map_err(|e| e.message)
    }

    #[test]
    fn inputs_are_ordered_and_floats_widen() {
        let x = Tensor::from_f64(DType::F16, [1, 2], &[0.5, 1.0]);
        let ids = Tensor::from_i64(DType::I64, [1], &[7]);
        assert_eq!(check(x, ids.clone()), Ok((vec![Tensor::from_f32([1, 2], &[0.5, 1.0]), ids], Some(1))));
    }

    #[test]
    fn what_does_not_fit_the_card_is_refused() {
        let x = |rows: usize| Tensor::from_f64(DType::F16, [rows, 2], &vec![0.5; rows * 2]);
        let ids = |rows: usize| Tensor::from_i64(DType::I64, [rows], &vec![1; rows]);
        for (x, ids, reason) in [
            (x(2), ids(1), "the inputs before"),
            (x(5), ids(5), "more than the 4"),
            (x(0), ids(0), "no sample"),
            (Tensor::from_f32([1, 2], &[0.0; 2]), ids(1), "FP16, not FP32"),
            (Tensor::from_f64(DType::F16, [1, 3], &[0.0; 3]), ids(1), "has shape [n, 2]"),
            (x(1), Tensor::from_i64(DType::I64, [1], &[1 << 40]), "32-bit range"),
        ] {
            let message = check(x, ids).unwrap_err();
            assert!(message.contains(reason), "{message}");
        }
        let twice = vec![("x".to_string(), x(1)), ("x".to_string(), x(1))];
        assert!(check_inputs(&card(), twice, 4).is_err_and(|e| e.message.contains("twice")));
        assert!(check_inputs(&card(), vec![("y".to_string(), x(1))], 4).is_err_and(|e| e.message.contains("no input \"y\"")));
        assert!(check_inputs(&card(), vec![("x".to_string(), x(1))], 4).is_err_and(|e| e.message.contains("missing")));
    }
}
