//! Clients that send one request after another for some seconds, and what came of it:
//! `cargo run --release --example load -- ADDRESS MODEL --clients 16 --seconds 10`. With `--train FILE`, a training request as JSON, the same
//! again while the server trains on it. Only addresses of this machine are accepted.

#[path = "../tests/common/client.rs"]
mod client;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use client::{Client, Reply};
use serde_json::{Value, json};

/// Training requests of one step, of which the median counts.
const STEPS: usize = 21;
/// Steps of the request that is in progress meanwhile: more than there is time for.
const MANY_STEPS: u64 = 1_000_000;

/// What to measure.
struct Plan {
    address: SocketAddr,
    model: String,
    clients: usize,
    time: Duration,
    training: Option<Value>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(plan) = plan(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) else {
        eprintln!("usage: load ADDRESS MODEL --clients N --seconds N [--train FILE]");
        return ExitCode::from(2);
    };
    if !plan.address.ip().is_loopback() {
        eprintln!("{} is not this machine", plan.address);
        return ExitCode::from(2);
    }
    match run(&plan) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn plan(arguments: &[&str]) -> Option<Plan> {
    let [address, model, "--clients", clients, "--seconds", seconds, rest @ ..] = arguments else { return None };
    let training = match rest {
        [] => None,
        ["--train", file] => Some(serde_json::from_slice(&std::fs::read(file).ok()?).ok()?),
        _ => return None,
    };
    let time = Duration::from_secs(seconds.parse().ok()?);
    Some(Plan { address: address.parse().ok()?, model: (*model).into(), clients: clients.parse().ok()?, time, training })
}

type Headers = Vec<(&'static str, String)>;

/// One answered request, in seconds: as the client saw it, and the execution alone, as the server tells it.
struct Sample {
    latency: f64,
    execution: f64,
}

fn run(plan: &Plan) -> Result<(), String> {
    let Some(training) = &plan.training else { return measure(plan) };
    let train = |steps: u64| {
        let mut request = training.clone();
        request["steps"] = json!(steps);
        let path = format!("/v2/models/{}/train", plan.model);
        let mut client = Client::connect(plan.address);
        client.0.set_read_timeout(None).map_err(|e| e.to_string())?;
        let reply = client.try_request("POST", &path, &[], request.to_string().as_bytes());
        reply.ok_or("the connection ended").map(|reply| (reply.status, reply.text())).map_err(String::from)
    };
    let mut steps = Vec::new();
    for _ in 0..STEPS {
        let started = Instant::now();
        match train(1)? {
            (200, _) => steps.push(started.elapsed().as_secs_f64() * 1e3),
            (status, text) => return Err(format!("{status}: {text}")),
        }
    }
    println!("a training request of one step: p50 {:.3} ms", quantile(steps, 0.5));
    println!("without training:");
    measure(plan)?;
    println!("while the server trains:");
    std::thread::scope(|scope| {
        let trained = scope.spawn(|| train(MANY_STEPS));
        let steps = || metric(plan.address, "meganeura_training_steps_total").ok_or("the server has no metrics");
        let seconds = || metric(plan.address, "meganeura_training_seconds_total").ok_or("the server has no metrics");
        let (before, begun, started) = (steps()?, seconds()?, Instant::now());
        measure(plan)?;
        let share = (seconds()? - begun) / started.elapsed().as_secs_f64();
        println!("{} steps of training in {:.0} % of the time", steps()? - before, share * 100.0);
        if trained.is_finished() {
            return Err(format!("training ended too early: {:?}", trained.join()));
        }
        let path = format!("/v2/models/{}/rollback", plan.model);
        let reply = Client::connect(plan.address).try_request("POST", &path, &[], b"");
        reply.filter(|reply| reply.status == 200).map(drop).ok_or_else(|| "training does not stop".into())
    })
}

fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(((values.len() as f64 - 1.0) * q) as usize).copied().unwrap_or(f64::NAN)
}

fn measure(plan: &Plan) -> Result<(), String> {
    let Plan { address, model, clients, time, .. } = plan;
    let (headers, body) = request(*address, model)?;
    let path = format!("/v2/models/{model}/infer");
    let executions = || metric(*address, "meganeura_executions_total").ok_or("the server has no metrics");
    ask(&mut Client::connect(*address), &path, &headers, &body)?;
    let before = executions()?;
    let started = Instant::now();
    let client = || {
        let mut connection = Client::connect(*address);
        let mut samples = Vec::new();
        while started.elapsed() < *time {
            samples.push(ask(&mut connection, &path, &headers, &body)?);
        }
        Ok::<_, String>(samples)
    };
    let samples: Result<Vec<Vec<Sample>>, String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..*clients).map(|_| scope.spawn(client)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a client panicked".into()))).collect()
    });
    let samples: Vec<Sample> = samples?.into_iter().flatten().collect();
    let seconds = started.elapsed().as_secs_f64();
    let executions = executions()? - before;
    let quantile = |value: fn(&Sample) -> f64, q: f64| quantile(samples.iter().map(|sample| value(sample) * 1e3).collect(), q);
    println!("{} requests in {seconds:.1} s: {:.0} per second", samples.len(), samples.len() as f64 / seconds);
    println!("{executions} executions: {:.3} per request", executions / samples.len() as f64);
    println!("latency p50 {:.3} ms, p99 {:.3} ms", quantile(|s| s.latency, 0.5), quantile(|s| s.latency, 0.99));
    println!("execution p50 {:.3} ms", quantile(|s| s.execution, 0.5));
    println!("beyond the execution p50 {:.3} ms", quantile(|s| s.latency - s.execution, 0.5));
    Ok(())
}

fn ask(connection: &mut Client, path: &str, headers: &Headers, body: &[u8]) -> Result<Sample, String> {
    let started = Instant::now();
    let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let reply = connection.try_request("POST", path, &headers, body).ok_or("the connection ended")?;
    let latency = started.elapsed().as_secs_f64();
    if reply.status != 200 {
        return Err(String::from_utf8_lossy(&reply.body).into_owned());
    }
    let length = reply.headers.iter().find(|(name, _)| name == "inference-header-content-length");
    let length = length.and_then(|(_, value)| value.parse().ok()).unwrap_or(reply.body.len());
    let answer = json_of(&reply, length)?;
    Ok(Sample { latency, execution: answer["parameters"]["execution_us"].as_f64().unwrap_or(f64::NAN) / 1e6 })
}

fn json_of(reply: &Reply, length: usize) -> Result<Value, String> {
    serde_json::from_slice(reply.body.get(..length).unwrap_or_default()).map_err(|e| e.to_string())
}

/// One sample of zeros in binary, made from the model's metadata: headers and body.
fn request(address: SocketAddr, model: &str) -> Result<(Headers, Vec<u8>), String> {
    let reply = Client::connect(address).try_request("GET", &format!("/v2/models/{model}"), &[], b"");
    let reply = reply.filter(|reply| reply.status == 200).ok_or("the model is not there")?;
    let metadata = json_of(&reply, reply.body.len())?;
    let mut binary = 0;
    let input = |input: &Value| {
        let shape: Vec<u64> = input["shape"].as_array().into_iter().flatten().map(|size| size.as_u64().unwrap_or(1)).collect();
        let width = match input["datatype"].as_str() {
            Some("BOOL" | "INT8" | "UINT8") => 1,
            Some("FP16" | "BF16" | "INT16" | "UINT16") => 2,
            Some("FP32" | "INT32" | "UINT32") => 4,
            _ => 8,
        };
        let bytes = shape.iter().product::<u64>() as usize * width;
        binary += bytes;
        let parameters = json!({ "binary_data_size": bytes });
        json!({ "name": input["name"], "datatype": input["datatype"], "shape": shape, "parameters": parameters })
    };
    let inputs: Vec<Value> = metadata["inputs"].as_array().into_iter().flatten().map(input).collect();
    let mut body = json!({ "inputs": inputs, "parameters": { "binary_data_output": true } }).to_string().into_bytes();
    let headers = vec![("Inference-Header-Content-Length", body.len().to_string())];
    body.resize(body.len() + binary, 0);
    Ok((headers, body))
}

fn metric(address: SocketAddr, name: &str) -> Option<f64> {
    let reply = Client::connect(address).try_request("GET", "/metrics", &[], b"")?;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    text.lines().find(|line| line.starts_with(name))?.rsplit(' ').next()?.parse().ok()
}
