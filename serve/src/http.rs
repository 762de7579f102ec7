//! The routes of the protocol over HTTP.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{self, HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use meganeura_ir::Tensor;
use serde_json::{Value, json};

use crate::body::{Packing, Received, hold, receive};
use crate::describe;
use crate::frontend::{Frontend, Reserved, VERSION};
use crate::infer::{InferRequest, InferResponse, place_of};
use crate::json::{Data, InferRequestJson, TensorJson, flag, number, parse_tensor, tensor_type};
use crate::log::log;
use crate::refusal::Refusal;
use crate::{datatype, grpc, train};

/// The length of the JSON part of a body that tensors in binary follow.
pub(crate) const HEADER_LENGTH: &str = "inference-header-content-length";
/// The version of the weights that an answer was computed with.
pub(crate) const WEIGHT_VERSION: &str = "weight-version";

/// What needs no token: it tells nothing of the models.
const OPEN: [&str; 2] = ["/", "/v2/health/live"];

/// JSON above this size is parsed, and an answer with more bytes of tensors is written, beside the threads that serve connections.
const PARSE_ASIDE: usize = 256 << 10;

pub(crate) type Shared = State<Arc<Frontend>>;
pub(crate) type Answered<T = Response> = Result<T, Refusal>;

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let fault = Fault::of(&self);
        let mut response = (self.kind.status(), axum::Json(json!({ "error": self.message }))).into_response();
        if let Some(fault) = fault {
            response.extensions_mut().insert(fault);
        }
        if self.kind.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// All routes, gRPC's among them.
pub(crate) fn router(frontend: Arc<Frontend>) -> Router {
    let mut router = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/v2", get(server))
        .route("/v2/", get(server))
        .route("/v2/health/live", get(|| async { StatusCode::OK }))
        .route("/v2/health/ready", get(ready))
        .route("/v2/models/stats", get(all_statistics))
        .route("/v2/repository/index", post(index));
    for version in ["", "/versions/{version}"] {
        let path = |rest: &str| format!("/v2/models/{{name}}{version}{rest}");
        router = router
            .route(&path(""), get(metadata))
            .route(&path("/ready"), get(model_ready))
            .route(&path("/config"), get(config))
            .route(&path("/stats"), get(statistics))
            .route(&path("/curves"), get(curves))
            .route(&path("/infer"), post(infer));
        if frontend.options.max_train_steps > 0 {
            router = router
                .route(&path("/train"), post(train::train))
                .route(&path("/checkpoint"), post(train::checkpoint))
                .route(&path("/rollback"), post(train::roll_back));
        }
    }
    router
        .route(&format!("/{}/{{method}}", grpc::SERVICE), post(grpc::call))
        .fallback(|request: Request| async move {
            Refusal::not_found(format!("there is nothing at {}", crate::infer::shown(request.uri().path())))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            Refusal::method(format!("{} is not allowed here", request.method()))
        })
        .layer(middleware::from_fn_with_state(frontend.clone(), around))
        .with_state(frontend)
}

/// Around every request: the token, errors as JSON, counters and the log.
async fn around(State(frontend): Shared, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let is_grpc = grpc::is_grpc(request.headers());
    let (method, path) = (request.method().clone(), crate::infer::shown(request.uri().path()));
    let open = OPEN.contains(&path.as_str());
    let authorized = if open { Ok(()) } else { frontend.authorize(request.headers()) };
    let allowed = authorized.and_then(|()| refuse_other_sites(&request));
    let response = match allowed {
        Ok(()) => next.run(request).await,
        Err(refusal) if is_grpc => grpc::refuse(refusal),
        Err(refusal) => refusal.into_response(),
    };
    let response = if is_grpc { response } else { in_json(response) };
    let (protocol, code) = match grpc::code(&response) {
        Some(code) if is_grpc => ("grpc", code),
        _ => ("http", response.status().as_u16()),
    };
    frontend.metrics.request(protocol, code);
    let fault = response.extensions().get::<Fault>();
    if frontend.options.log_requests || fault.is_some() {
        let milliseconds = (started.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        let mut fields =
            json!({ "protocol": protocol, "method": method.as_str(), "path": path, "code": code, "milliseconds": milliseconds });
        if let Some(Fault(reason)) = fault {
            fields["reason"] = json!(reason);
        }
        log("request", fields);
    }
    response
}

/// Why the server gave no answer though the request was right, for the log.
#[derive(Clone)]
pub(crate) struct Fault(String);

impl Fault {
    pub fn of(refusal: &Refusal) -> Option<Self> {
        let Refusal { kind, message, detail } = refusal;
        let told = || detail.as_ref().map_or_else(|| message.clone(), |detail| format!("{message}: {detail}"));
        kind.status().is_server_error().then(|| Fault(told()))
    }
}

/// Any page that somebody visits may make the browser post to a server on the same machine. Browsers say so.
fn refuse_other_sites(request: &Request) -> Answered<()> {
    let site = request.headers().get("sec-fetch-site").map(HeaderValue::as_bytes);
    match site {
        Some(b"cross-site" | b"same-site") if request.method() != http::Method::GET => {
            Err(Refusal::forbidden("a page of another site sent this"))
        }
        _ => Ok(()),
    }
}

/// Errors that no handler of ours made say why in JSON as well.
fn in_json(response: Response) -> Response {
    let (status, headers) = (response.status(), response.headers());
    let is_json = headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    if is_json || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let reason = status.canonical_reason().unwrap_or("error").to_ascii_lowercase();
    (status, axum::Json(json!({ "error": reason }))).into_response()
}

async fn page(headers: HeaderMap) -> Response {
    const PAGE: &str = include_str!("page.html");
    let html = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, PAGE_POLICY)];
    match Packing::accepted(&headers).and_then(|packing| Some((packing, packing.pack(PAGE.as_bytes())?))) {
        Some((packing, packed)) => (html, [(header::CONTENT_ENCODING, packing.name())], packed).into_response(),
        None => (html, PAGE).into_response(),
    }
}

/// The page talks to this server only.
const PAGE_POLICY: &str =
    "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'";

async fn metrics(State(frontend): Shared) -> Response {
    let text = frontend.metrics.text(frontend.engine.queued());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn server() -> axum::Json<Value> {
    axum::Json(json!({ "name": describe::SERVER, "version": describe::SERVER_VERSION, "extensions": describe::EXTENSIONS }))
}

async fn ready(State(frontend): Shared) -> Answered<StatusCode> {
    match frontend.is_ready() {
        true => Ok(StatusCode::OK),
        false => Err(Refusal::unavailable("the server is stopping")),
    }
}

/// The model that a path names.
pub(crate) struct Named(Vec<String>);

impl Named {
    pub fn find(frontend: &Frontend, path: Result<Path<Vec<String>>, PathRejection>) -> Answered<usize> {
        let Path(parts) = path.map_err(|e| Refusal::invalid(e.body_text()))?;
        let Named(parts) = Named(parts);
        let part = |index: usize| parts.get(index).map(String::as_str).unwrap_or_default();
        frontend.find(part(0), part(1))
    }
}

pub(crate) type ModelPath = Result<Path<Vec<String>>, PathRejection>;

async fn metadata(State(frontend): Shared, path: ModelPath) -> Answered<axum::Json<Value>> {
    let model = Named::find(&frontend, path)?;
    Ok(axum::Json(describe::metadata(frontend.card(model)?)))
}

async fn model_ready(State(frontend): Shared, path: ModelPath) -> Answered<StatusCode> {
    Named::find(&frontend, path)?;
    ready(State(frontend)).await
}

async fn config(State(frontend): Shared, path: ModelPath) -> Answered<axum::Json<Value>> {
    let model = Named::find(&frontend, path)?;
    Ok(axum::Json(describe::config(frontend.card(model)?, frontend.options.max_batch)))
}

async fn statistics(State(frontend): Shared, path: ModelPath) -> Answered<axum::Json<Value>> {
    let model = Named::find(&frontend, path)?;
    Ok(axum::Json(json!({ "model_stats": [describe::statistics(frontend.card(model)?, frontend.metrics.totals(model))] })))
}

async fn all_statistics(State(frontend): Shared) -> axum::Json<Value> {
    let models = frontend.cards.iter().enumerate();
    let all: Vec<Value> = models.map(|(model, card)| describe::statistics(card, frontend.metrics.totals(model))).collect();
    axum::Json(json!({ "model_stats": all }))
}

async fn index(State(frontend): Shared) -> axum::Json<Value> {
    let models = frontend.cards.iter();
    let rows: Vec<Value> =
        models.map(|card| json!({ "name": card.name, "version": VERSION, "state": "READY", "reason": "" })).collect();
    axum::Json(json!(rows))
}

async fn curves(State(frontend): Shared, path: ModelPath) -> Answered<axum::Json<Value>> {
    let model = Named::find(&frontend, path)?;
    let (card, curves) = (frontend.card(model)?, frontend.metrics.curves(model));
    let facts: Vec<Value> = card.facts.iter().map(|(name, text)| json!([name, text])).collect();
    Ok(axum::Json(json!({
        "latency_ms": curves.latency,
        "loss": curves.loss,
        "weight_version": frontend.metrics.weight_version(model),
        "facts": facts,
        "trains": frontend.options.max_train_steps > 0,
    })))
}

/// How the answer to a request is to be written.
struct Wanted {
    id: Option<String>,
    /// Whether every output is binary unless it says otherwise.
    binary: bool,
    /// Outputs with a will of their own.
    outputs: Vec<(String, Option<bool>)>,
}

async fn infer(State(frontend): Shared, path: ModelPath, request: Request) -> Answered {
    let (parts, body) = request.into_parts();
    let model = Named::find(&frontend, path)?;
    let received = receive(&frontend, &parts.headers, body).await?;
    let arrived = Instant::now();
    let header_length = header_length(&parts.headers)?;
    let max_bytes = frontend.options.max_body;
    let parse = move || {
        let parsed = parse_infer(model, &received, header_length, max_bytes, arrived);
        (parsed, received)
    };
    let (parsed, received) = aside(header_length.is_none(), parts.headers.get(header::CONTENT_LENGTH), parse).await?;
    let (request, wanted) = parsed?;
    let response = frontend.infer(request).await?;
    drop(received);
    let size = response.outputs.iter().map(|(_, tensor)| tensor.bytes().len()).sum();
    let mut memory = Reserved::default();
    frontend.reserve(&mut memory, size)?;
    let (name, packing) = (frontend.card(model)?.name.clone(), Packing::accepted(&parts.headers));
    let write = move || write_response(&name, response, &wanted, packing);
    let (headers, bytes) = match size < PARSE_ASIDE {
        true => write()?,
        false => tokio::task::spawn_blocking(write).await.map_err(|_| Refusal::internal("the answer could not be written"))??,
    };
    frontend.reserve(&mut memory, bytes.len())?;
    Ok((headers, Body::from(hold(bytes, &Arc::new(memory)))).into_response())
}

/// Runs `parse` on a thread for long work where the body may be large JSON.
async fn aside<T: Send + 'static>(
    is_json: bool,
    length: Option<&HeaderValue>,
    parse: impl FnOnce() -> T + Send + 'static,
) -> Answered<T> {
    let length = length.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if !is_json || length.is_some_and(|length| length < PARSE_ASIDE) {
        return Ok(parse());
    }
    tokio::task::spawn_blocking(parse).await.map_err(|_| Refusal::internal("the request could not be read"))
}

fn header_length(headers: &HeaderMap) -> Answered<Option<usize>> {
    let wrong = || Refusal::invalid("Inference-Header-Content-Length must be a whole number");
    let Some(value) = headers.get(HEADER_LENGTH) else { return Ok(None) };
    value.to_str().ok().and_then(|text| text.trim().parse().ok()).map(Some).ok_or_else(wrong)
}

fn parse_infer(
    model: usize,
    received: &Received,
    header_length: Option<usize>,
    max_bytes: usize,
    arrived: Instant,
) -> Answered<(InferRequest, Wanted)> {
    let body = &received.bytes;
    let json_length = header_length.unwrap_or(body.len());
    let Some((json, binary)) = body.split_at_checked(json_length) else {
        return Err(Refusal::invalid(format!("the JSON part is to have {json_length} bytes, the whole body has {}", body.len())));
    };
    let request: InferRequestJson = crate::json::parse(json)?;
    let inputs = parse_inputs(&request.inputs, binary, max_bytes)?;
    let outputs = request.outputs.iter().map(|output| {
        refuse_parameters(&output.parameters, &["shared_memory_region", "classification"])?;
        let own = output.parameters.contains_key("binary_data");
        Ok((output.name.clone(), own.then(|| flag(&output.parameters, "binary_data")).transpose()?))
    });
    let wanted = Wanted {
        binary: flag(&request.parameters, "binary_data_output")?,
        outputs: outputs.collect::<Answered<_>>()?,
        id: request.id,
    };
    let timeout = number(&request.parameters, "timeout")?.filter(|&us| us > 0).map(Duration::from_micros);
    let outputs = wanted.outputs.iter().map(|(name, _)| name.clone()).collect();
    Ok((InferRequest { model, inputs, outputs, timeout, arrived }, wanted))
}

pub(crate) fn refuse_parameters(parameters: &serde_json::Map<String, Value>, unsupported: &[&str]) -> Answered<()> {
    match unsupported.iter().find(|name| parameters.contains_key(**name)) {
        Some(name) => Err(Refusal::invalid(format!("parameter {name:?} is not supported"))),
        None => Ok(()),
    }
}

/// The tensors of a request: elements in JSON, or bytes of the binary part in the order of the inputs.
pub(crate) fn parse_inputs(inputs: &[TensorJson], binary: &[u8], max_bytes: usize) -> Answered<Vec<(String, Tensor)>> {
    let mut rest = binary;
    let mut total = 0usize;
    let mut tensors = Vec::with_capacity(inputs.len());
    for input in inputs {
        let tensor = parse_input(&place_of(&input.name), input, &mut rest, max_bytes)?;
        total = total.saturating_add(tensor.bytes().len());
        if total > max_bytes {
            return Err(Refusal::too_large(format!("the inputs take more than {max_bytes} bytes")));
        }
        tensors.push((input.name.clone(), tensor));
    }
    match rest.len() {
        0 => Ok(tensors),
        left => Err(Refusal::invalid(format!("{left} bytes after the last input belong to none"))),
    }
}

/// One tensor, whose bytes are the next of `rest` where it is binary. `place` is what errors name.
pub(crate) fn parse_input(place: &str, input: &TensorJson, rest: &mut &[u8], max_bytes: usize) -> Answered<Tensor> {
    refuse_parameters(&input.parameters, &["shared_memory_region"])?;
    let ty = tensor_type(place, datatype::parse(place, &input.datatype)?, &input.shape, max_bytes)?;
    match (number(&input.parameters, "binary_data_size")?, input.data) {
        (Some(_), Some(_)) => Err(Refusal::invalid(format!("{place} has data and binary_data_size"))),
        (None, None) => Err(Refusal::invalid(format!("{place} has no data"))),
        (None, Some(data)) => parse_tensor(place, ty, data),
        (Some(size), None) => {
            let split = usize::try_from(size).ok().and_then(|size| rest.split_at_checked(size));
            let (bytes, after) = split.ok_or_else(|| {
                Refusal::invalid(format!("{place} is to have {size} bytes, {} bytes are left in the body", rest.len()))
            })?;
            *rest = after;
            let (expected, shape) = (ty.bytes(), ty.shape.clone());
            Tensor::from_bytes(ty, bytes.to_vec())
                .map_err(|_| Refusal::invalid(format!("{place} of shape {shape} takes {expected} bytes, not {size}")))
        }
    }
}

fn write_response(
    model: &str,
    response: InferResponse,
    wanted: &Wanted,
    packing: Option<Packing>,
) -> Answered<(HeaderMap, Bytes)> {
    let mut binary = Vec::new();
    let mut outputs = Vec::with_capacity(response.outputs.len());
    for (name, tensor) in &response.outputs {
        let own = wanted.outputs.iter().find(|(output, _)| output == name).and_then(|(_, own)| *own);
        outputs.push(OutputJson::new(name, tensor, own.unwrap_or(wanted.binary))?);
        if own.unwrap_or(wanted.binary) {
            binary.extend_from_slice(tensor.bytes());
        }
    }
    let is_binary = outputs.iter().any(|output| output.parameters.is_some());
    let body = ResponseJson {
        model_name: model,
        model_version: VERSION,
        id: wanted.id.as_deref(),
        parameters: json!({
            "weight_version": response.weight_version,
            "batch_size": response.batch,
            "queue_us": response.queue_us,
            "execution_us": response.execution_us,
        }),
        outputs,
    };
    let mut bytes = serde_json::to_vec(&body).map_err(|e| Refusal::internal(e.to_string()))?;
    let json_length = bytes.len();
    bytes.append(&mut binary);
    let mut headers = HeaderMap::new();
    headers.insert(WEIGHT_VERSION, response.weight_version.into());
    let kind = if is_binary { "application/octet-stream" } else { "application/json" };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if is_binary {
        headers.insert(HEADER_LENGTH, json_length.into());
    }
    let packed = packing.and_then(|packing| Some((packing, packing.pack(&bytes)?)));
    let bytes = match packed {
        Some((packing, packed)) => {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(packing.name()));
            packed
        }
        None => bytes,
    };
    Ok((headers, bytes.into()))
}

#[derive(serde::Serialize)]
struct ResponseJson<'a> {
    model_name: &'a str,
    model_version: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    parameters: Value,
    outputs: Vec<OutputJson<'a>>,
}

#[derive(serde::Serialize)]
struct OutputJson<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: &'a [usize],
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Data<'a>>,
}

impl<'a> OutputJson<'a> {
    fn new(name: &'a str, tensor: &'a Tensor, binary: bool) -> Answered<Self> {
        let data = Data(tensor);
        if !binary && data.holds_non_finite() {
            return Err(Refusal::invalid(format!(
                "output {name:?} holds NaN or infinity, for which JSON has no word: ask for it with binary_data"
            )));
        }
        let parameters = binary.then(|| json!({ "binary_data_size": tensor.bytes().len() }));
        let datatype = datatype::name(tensor.dtype());
        Ok(OutputJson { name, datatype, shape: tensor.shape(), parameters, data: (!binary).then_some(data) })
    }
}
