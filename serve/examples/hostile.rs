//! Mixed load with malformed requests against a server that runs already, and what became of it:
//! `cargo run --example hostile -- ADDRESS MODEL --seconds 1800`. Only addresses of this machine are accepted.

#[path = "../tests/common/client.rs"]
mod client;
#[path = "../tests/common/hostile.rs"]
mod hostile;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use client::Client;
use hostile::{Random, Target, attack, check_health, kinds};
use serde_json::{Value, json};

const THREADS: u64 = 6;
/// Of so many requests one is valid.
const VALID: usize = 4;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, model, flag, seconds] = arguments.as_slice() else { return usage() };
    let (Ok(address), Ok(seconds), "--seconds") = (address.parse::<SocketAddr>(), seconds.parse(), flag.as_str()) else {
        return usage();
    };
    if !address.ip().is_loopback() {
        eprintln!("{address} is not this machine");
        return ExitCode::from(2);
    }
    match run(address, model, Duration::from_secs(seconds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: hostile ADDRESS MODEL --seconds N");
    ExitCode::from(2)
}

fn run(address: SocketAddr, model: &str, time: Duration) -> Result<(), String> {
    let target = Target { address, model: model.into(), valid: valid(address, model)?, max_body: 64 << 20 };
    check_health(&target)?;
    let started = Instant::now();
    let (malformed, answered) = (AtomicU64::new(0), AtomicU64::new(0));
    let failures = Mutex::new(Vec::new());
    let attacker = |thread: u64| {
        let mut random = Random(thread);
        while started.elapsed() < time {
            let result = if random.below(VALID) == 0 {
                answered.fetch_add(1, Ordering::Relaxed);
                check_health(&target)
            } else {
                malformed.fetch_add(1, Ordering::Relaxed);
                attack(random.below(kinds()), random.next(), &target)
            };
            if let (Err(error), Ok(mut failures)) = (result, failures.lock()) {
                eprintln!("{error}");
                failures.push(error);
            }
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| {
            scope.spawn(move || attacker(thread));
        });
        let mut next = Duration::ZERO;
        while started.elapsed() < time {
            if started.elapsed() >= next {
                let resident = metric(address, "meganeura_resident_bytes").unwrap_or(f64::NAN) / f64::from(1 << 20);
                println!("{:6.0} s: {resident:.1} MiB resident", started.elapsed().as_secs_f64());
                next += (time / 20).max(Duration::from_secs(1));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    check_health(&target)?;
    let failures = failures.into_inner().map_err(|e| e.to_string())?;
    let (malformed, answered) = (malformed.into_inner(), answered.into_inner());
    println!("{malformed} malformed requests of {} kinds, {answered} valid ones, {} failures", kinds(), failures.len());
    if failures.is_empty() { Ok(()) } else { Err(format!("{} failures", failures.len())) }
}

/// A request of one sample of zeros, made from the model's metadata.
fn valid(address: SocketAddr, model: &str) -> Result<Value, String> {
    let reply = Client::connect(address).try_request("GET", &format!("/v2/models/{model}"), &[], b"");
    let reply = reply.filter(|reply| reply.status == 200).ok_or("the model is not there")?;
    let metadata: Value = serde_json::from_slice(&reply.body).map_err(|e| e.to_string())?;
    let input = |input: &Value| {
        let shape: Vec<u64> = input["shape"].as_array().into_iter().flatten().map(|size| size.as_u64().unwrap_or(1)).collect();
        let zero = if input["datatype"] == "BOOL" { json!(false) } else { json!(0) };
        let data = vec![zero; shape.iter().product::<u64>() as usize];
        json!({ "name": input["name"], "datatype": input["datatype"], "shape": shape, "data": data })
    };
    let inputs: Vec<Value> = metadata["inputs"].as_array().into_iter().flatten().map(input).collect();
    Ok(json!({ "inputs": inputs }))
}

fn metric(address: SocketAddr, name: &str) -> Option<f64> {
    let reply = Client::connect(address).try_request("GET", "/metrics", &[], b"")?;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    text.lines().find(|line| line.starts_with(name))?.rsplit(' ').next()?.parse().ok()
}
