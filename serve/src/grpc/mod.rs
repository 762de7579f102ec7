//! The protocol over gRPC: the service `inference.GRPCInferenceService`, on the same listeners as HTTP.

mod messages;
mod wire;

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{self, HeaderMap, header};
use axum::response::Response;
use http_body_util::{BodyExt, Full};
use meganeura_ir::{DType, Tensor, TensorType};
use prost::Message;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use crate::body::{hold, receive};
use crate::frontend::{Frontend, Reserved, VERSION};
use crate::http::{Answered, Fault, Shared, WEIGHT_VERSION};
use crate::infer::{InferRequest, place_of};
use crate::json::tensor_type;
use crate::refusal::Refusal;
use crate::served::TensorCard;
use crate::{datatype, describe};
use messages::*;

pub(crate) const SERVICE: &str = "inference.GRPCInferenceService";

/// What stands before a message in its stream: whether it is packed, and its length.
const PREFIX: usize = 5;
/// Where a status is in the head of a response, or in its extensions until the trailers are sent.
const GRPC_STATUS: &str = "grpc-status";

/// The code that a call ended with.
#[derive(Clone, Copy)]
struct Ended(Code);

/// Memory that is set aside for an answer.
#[derive(Clone)]
struct Memory(Arc<Reserved>);

pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// A call that gets no further.
pub(crate) fn refuse(refusal: Refusal) -> Response {
    let fault = Fault::of(&refusal);
    let mut response = Status::from(refusal).into_http();
    response.extensions_mut().extend(fault.map(with).unwrap_or_default());
    response
}

fn with<T: Clone + Send + Sync + 'static>(extension: T) -> http::Extensions {
    let mut extensions = http::Extensions::new();
    extensions.insert(extension);
    extensions
}

/// The code that a response to a call carries.
pub(crate) fn code(response: &Response) -> Option<u16> {
    let in_head = || response.headers().get(GRPC_STATUS)?.to_str().ok()?.parse().ok();
    response.extensions().get::<Ended>().map(|ended| ended.0 as i32 as u16).or_else(in_head)
}

pub(crate) async fn call(State(frontend): Shared, Path(method): Path<String>, request: Request) -> Response {
    if !is_grpc(request.headers()) {
        let refusal = Refusal::encoding("calls have the content type application/grpc");
        return axum::response::IntoResponse::into_response(refusal);
    }
    let (parts, body) = request.into_parts();
    let arrived = Instant::now();
    let received = match receive(&frontend, &parts.headers, body).await {
        Ok(received) => received,
        Err(refusal) => return refuse(refusal),
    };
    if method == "ModelInfer"
        && let Err(refusal) = wire::check(received.bytes.get(PREFIX..).unwrap_or_default(), frontend.options.max_body)
    {
        return refuse(refusal);
    }
    let timeout = deadline(&parts.headers);
    let call = Call { frontend, request: http::Request::from_parts(parts, Full::new(received.bytes.clone())) };
    match method.as_str() {
        "ServerLive" => call.answer(|_, Empty {}| async { Ok(Flag { value: true }) }).await,
        "ServerReady" => call.answer(|f, Empty {}| async move { Ok(Flag { value: f.is_ready() }) }).await,
        "ModelReady" => call.answer(|f, r: ModelRequest| async move { model_ready(&f, &r) }).await,
        "ServerMetadata" => call.answer(|_, Empty {}| async { Ok(server_metadata()) }).await,
        "ModelMetadata" => call.answer(|f, r: ModelRequest| async move { model_metadata(&f, &r) }).await,
        "ModelConfig" => call.answer(|f, r: ModelRequest| async move { model_config(&f, &r) }).await,
        "ModelStatistics" => call.answer(|f, r: ModelRequest| async move { model_statistics(&f, &r) }).await,
        "RepositoryIndex" => call.answer(|f, Empty {}| async move { Ok(repository_index(&f)) }).await,
        "ModelInfer" => call.answer(move |f, r| async move { model_infer(&f, r, timeout, arrived).await }).await,
        _ => refuse(Refusal::unimplemented(format!("method {:?} is not supported", crate::infer::shown(&method)))),
    }
}

/// The client's deadline, from `grpc-timeout`.
fn deadline(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value.saturating_mul(3600)),
        "M" => Duration::from_secs(value.saturating_mul(60)),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

struct Call {
    frontend: Arc<Frontend>,
    request: http::Request<Full<bytes::Bytes>>,
}

impl Call {
    /// Decodes the message, answers it, and encodes the answer.
    async fn answer<Q, A, F>(self, answer: impl FnOnce(Arc<Frontend>, Q) -> F + Send + 'static) -> Response
    where
        Q: Message + Default + Send + 'static,
        A: Message + Default + Send + 'static,
        F: Future<Output = Answered<A>> + Send + 'static,
    {
        let (ended, outcome) = tokio::sync::oneshot::channel::<Answered<()>>();
        let pending = Some(Pending { frontend: self.frontend.clone(), handler: answer, ended });
        let unary = Unary { pending, message: std::marker::PhantomData };
        let mut grpc = tonic::server::Grpc::new(ProstCodec::<A, Q>::default())
            .max_decoding_message_size(self.frontend.options.max_body)
            .max_encoding_message_size(usize::MAX);
        let response = grpc.unary(unary, self.request).await;
        let memory = response.extensions().get::<Memory>().cloned();
        let mut response = response.map(|body| match memory {
            None => Body::new(body),
            Some(Memory(memory)) => Body::new(body.map_frame(move |frame| frame.map_data(|bytes| hold(bytes, &memory)))),
        });
        // Without an outcome the message could not be decoded, and the head says so.
        if let Ok(outcome) = outcome.await {
            let code = outcome.as_ref().map_or_else(|refusal| refusal.kind.code(), |()| Code::Ok);
            response.extensions_mut().insert(Ended(code));
            response.extensions_mut().extend(outcome.err().and_then(|refusal| Fault::of(&refusal)).map(with).unwrap_or_default());
        }
        response
    }
}

/// A handler as tonic takes it.
struct Unary<H, Q> {
    pending: Option<Pending<H>>,
    message: std::marker::PhantomData<fn(Q)>,
}

/// A call that is not answered yet.
struct Pending<H> {
    frontend: Arc<Frontend>,
    handler: H,
    /// Gets what comes of it.
    ended: tokio::sync::oneshot::Sender<Answered<()>>,
}

impl<H, Q, A, F> tower::Service<tonic::Request<Q>> for Unary<H, Q>
where
    H: FnOnce(Arc<Frontend>, Q) -> F + Send + 'static,
    F: Future<Output = Answered<A>> + Send + 'static,
    Q: Send + 'static,
    A: Message + 'static,
{
    type Response = tonic::Response<A>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let pending = self.pending.take();
        Box::pin(async move {
            let once = || Status::internal("a call is answered once");
            let Pending { frontend, handler, ended } = pending.ok_or_else(once)?;
            let answer = handler(frontend.clone(), request.into_inner());
            let mut memory = Reserved::default();
            let answer = answer.await.and_then(|answer| {
                frontend.reserve(&mut memory, answer.encoded_len())?;
                Ok(answer)
            });
            let _ = ended.send(answer.as_ref().map(drop).map_err(Clone::clone));
            let mut response = tonic::Response::new(answer?);
            response.extensions_mut().insert(Memory(Arc::new(memory)));
            Ok(response)
        })
    }
}

fn model_ready(frontend: &Frontend, request: &ModelRequest) -> Answered<Flag> {
    frontend.find(&request.name, &request.version)?;
    Ok(Flag { value: frontend.is_ready() })
}

fn server_metadata() -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: describe::SERVER.into(),
        version: describe::SERVER_VERSION.into(),
        extensions: describe::EXTENSIONS.iter().map(|name| (*name).to_string()).collect(),
    }
}

fn model_metadata(frontend: &Frontend, request: &ModelRequest) -> Answered<ModelMetadataResponse> {
    let card = frontend.card(frontend.find(&request.name, &request.version)?)?;
    let tensor = |card: &TensorCard| TensorMetadata {
        name: card.name.clone(),
        datatype: datatype::name(card.dtype).into(),
        shape: describe::shape(card),
    };
    Ok(ModelMetadataResponse {
        name: card.name.clone(),
        versions: vec![VERSION.into()],
        platform: describe::PLATFORM.into(),
        inputs: card.inputs.iter().map(tensor).collect(),
        outputs: card.outputs.iter().map(tensor).collect(),
    })
}

fn model_config(frontend: &Frontend, request: &ModelRequest) -> Answered<ModelConfigResponse> {
    let card = frontend.card(frontend.find(&request.name, &request.version)?)?;
    let input = |input: &TensorCard| ConfigInput {
        name: input.name.clone(),
        data_type: datatype::number(input.dtype),
        dims: describe::dims(card, input),
    };
    let output = |output: &TensorCard| ConfigOutput {
        name: output.name.clone(),
        data_type: datatype::number(output.dtype),
        dims: describe::dims(card, output),
    };
    let config = ModelConfig {
        name: card.name.clone(),
        platform: describe::PLATFORM.into(),
        backend: describe::SERVER.into(),
        max_batch_size: i32::try_from(describe::max_batch(card, frontend.options.max_batch)).unwrap_or(i32::MAX),
        input: card.inputs.iter().map(input).collect(),
        output: card.outputs.iter().map(output).collect(),
    };
    Ok(ModelConfigResponse { config: Some(config) })
}

fn model_statistics(frontend: &Frontend, request: &ModelRequest) -> Answered<ModelStatisticsResponse> {
    let chosen = match request.name.as_str() {
        "" => (0..frontend.cards.len()).collect(),
        name => vec![frontend.find(name, &request.version)?],
    };
    let statistics = chosen.into_iter().map(|model| {
        let (card, totals) = (frontend.card(model)?, frontend.metrics.totals(model));
        let duration = |count, ns| Some(StatisticDuration { count, ns });
        Ok(ModelStatistics {
            name: card.name.clone(),
            version: VERSION.into(),
            inference_count: totals.samples,
            execution_count: totals.executions,
            inference_stats: Some(InferStatistics {
                success: duration(totals.successes, totals.success_ns),
                fail: duration(totals.failures, totals.failure_ns),
                queue: duration(totals.successes, totals.queue_ns),
                compute_infer: duration(totals.executions, totals.execution_ns),
            }),
        })
    });
    Ok(ModelStatisticsResponse { model_stats: statistics.collect::<Answered<_>>()? })
}

fn repository_index(frontend: &Frontend) -> RepositoryIndexResponse {
    let index = |name: &String| ModelIndex {
        name: name.clone(),
        version: VERSION.into(),
        state: "READY".into(),
        ..ModelIndex::default()
    };
    RepositoryIndexResponse { models: frontend.cards.iter().map(|card| index(&card.name)).collect() }
}

async fn model_infer(
    frontend: &Frontend,
    request: ModelInferRequest,
    timeout: Option<Duration>,
    arrived: Instant,
) -> Answered<ModelInferResponse> {
    let model = frontend.find(&request.model_name, &request.model_version)?;
    let inputs = parse_inputs(&request, frontend.options.max_body)?;
    let mut outputs = Vec::with_capacity(request.outputs.len());
    for output in request.outputs {
        refuse_parameters(&output.parameters, &["shared_memory_region", "classification"])?;
        outputs.push(output.name);
    }
    let own = match request.parameters.get("timeout").and_then(|parameter| parameter.choice.as_ref()) {
        None => None,
        Some(ParameterChoice::Int64(us)) if *us >= 0 => Some(us.unsigned_abs()),
        Some(ParameterChoice::Uint64(us)) => Some(*us),
        Some(_) => return Err(Refusal::invalid("parameter \"timeout\" must be a whole number of at least 0")),
    };
    let own = own.filter(|&us| us > 0).map(Duration::from_micros);
    let timeout = own.into_iter().chain(timeout).min();
    let response = frontend.infer(InferRequest { model, inputs, outputs, timeout, arrived }).await?;
    let number = |value: u64| InferParameter { choice: Some(ParameterChoice::Int64(i64::try_from(value).unwrap_or(i64::MAX))) };
    let parameters = [
        (WEIGHT_VERSION.replace('-', "_"), number(response.weight_version)),
        ("batch_size".to_string(), number(response.batch as u64)),
        ("queue_us".to_string(), number(response.queue_us)),
        ("execution_us".to_string(), number(response.execution_us)),
    ];
    let describe = |(name, tensor): &(String, Tensor)| InferTensor {
        name: name.clone(),
        datatype: datatype::name(tensor.dtype()).into(),
        shape: tensor.shape().iter().map(|&size| size as i64).collect(),
        parameters: HashMap::new(),
        contents: None,
    };
    Ok(ModelInferResponse {
        model_name: request.model_name,
        model_version: VERSION.into(),
        id: request.id,
        parameters: parameters.into(),
        outputs: response.outputs.iter().map(describe).collect(),
        raw_output_contents: response.outputs.into_iter().map(|(_, tensor)| tensor.into_bytes().into()).collect(),
    })
}

fn refuse_parameters(parameters: &HashMap<String, InferParameter>, unsupported: &[&str]) -> Answered<()> {
    match unsupported.iter().find(|name| parameters.contains_key(**name)) {
        Some(name) => Err(Refusal::invalid(format!("parameter {name:?} is not supported"))),
        None => Ok(()),
    }
}

/// The tensors of a request: all raw, or all typed.
fn parse_inputs(request: &ModelInferRequest, max_bytes: usize) -> Answered<Vec<(String, Tensor)>> {
    let raw = &request.raw_input_contents;
    if !raw.is_empty() && raw.len() != request.inputs.len() {
        return Err(Refusal::invalid(format!("{} inputs have {} raw contents", request.inputs.len(), raw.len())));
    }
    let mut total = 0usize;
    let inputs = request.inputs.iter().enumerate().map(|(index, input)| {
        let name = &input.name;
        let place = &place_of(name);
        refuse_parameters(&input.parameters, &["shared_memory_region"])?;
        let negative = || Refusal::invalid(format!("{place} has a negative size: {:?}", input.shape));
        let shape = input.shape.iter().map(|&size| usize::try_from(size).map_err(|_| negative()));
        let ty = tensor_type(place, datatype::parse(place, &input.datatype)?, &shape.collect::<Answered<Vec<_>>>()?, max_bytes)?;
        total = total.saturating_add(ty.bytes());
        if total > max_bytes {
            return Err(Refusal::too_large(format!("the inputs take more than {max_bytes} bytes")));
        }
        let bytes = match (raw.get(index), &input.contents) {
            (Some(_), Some(_)) => return Err(Refusal::invalid(format!("{place} has contents and raw contents"))),
            (Some(raw), None) => raw.to_vec(),
            (None, Some(contents)) => typed(place, ty.dtype, contents)?,
            (None, None) => return Err(Refusal::invalid(format!("{place} has no data"))),
        };
        Ok((name.clone(), tensor(place, ty, bytes)?))
    });
    inputs.collect()
}

fn tensor(place: &str, ty: TensorType, bytes: Vec<u8>) -> Answered<Tensor> {
    let (shape, expected, found) = (ty.shape.clone(), ty.bytes(), bytes.len());
    Tensor::from_bytes(ty, bytes)
        .map_err(|_| Refusal::invalid(format!("{place} of shape {shape} takes {expected} bytes, not {found}")))
}

/// Elements in the field that belongs to a dtype, as bytes.
fn typed(place: &str, dtype: DType, contents: &InferTensorContents) -> Answered<Vec<u8>> {
    fn collect<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> Option<[u8; N]>) -> Option<Vec<u8>> {
        let mut all = Vec::with_capacity(values.len() * N);
        for &value in values {
            all.extend_from_slice(&bytes(value)?);
        }
        Some(all)
    }
    let c = contents;
    let bytes = match dtype {
        DType::Bool => collect(&c.bool_contents, |v| Some([u8::from(v)])),
        DType::I8 => collect(&c.int_contents, |v| Some(i8::try_from(v).ok()?.to_le_bytes())),
        DType::I16 => collect(&c.int_contents, |v| Some(i16::try_from(v).ok()?.to_le_bytes())),
        DType::I32 => collect(&c.int_contents, |v| Some(v.to_le_bytes())),
        DType::I64 => collect(&c.int64_contents, |v| Some(v.to_le_bytes())),
        DType::U8 => collect(&c.uint_contents, |v| Some(u8::try_from(v).ok()?.to_le_bytes())),
        DType::U16 => collect(&c.uint_contents, |v| Some(u16::try_from(v).ok()?.to_le_bytes())),
        DType::U32 => collect(&c.uint_contents, |v| Some(v.to_le_bytes())),
        DType::U64 => collect(&c.uint64_contents, |v| Some(v.to_le_bytes())),
        DType::F32 => collect(&c.fp32_contents, |v| Some(v.to_le_bytes())),
        DType::F64 => collect(&c.fp64_contents, |v| Some(v.to_le_bytes())),
        DType::F16 | DType::BF16 => {
            return Err(Refusal::invalid(format!("{place}: {} has no typed contents, send raw ones", datatype::name(dtype))));
        }
    };
    bytes.ok_or_else(|| Refusal::invalid(format!("{place} holds values outside the range of {}", datatype::name(dtype))))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn timeouts_are_parsed() {
        let parsed = |text: &'static str| {
            deadline(&[("grpc-timeout".parse().unwrap(), HeaderValue::from_static(text))].into_iter().collect())
        };
        assert_eq!(parsed("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parsed("2S"), Some(Duration::from_secs(2)));
        assert_eq!([parsed("S"), parsed(""), parsed("12"), parsed("1x")], [None; 4]);
    }

    #[test]
    fn typed_contents_are_checked() {
        let contents = InferTensorContents { int_contents: vec![1, 300], fp32_contents: vec![0.5], ..Default::default() };
        assert_eq!(typed("x", DType::I16, &contents), Ok(vec![1, 0, 44, 1]));
        assert!(typed("x", DType::I8, &contents).is_err());
        assert_eq!(typed("x", DType::F32, &contents), Ok(0.5f32.to_le_bytes().to_vec()));
        assert!(typed("x", DType::F16, &contents).is_err());
    }
}
