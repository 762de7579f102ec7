//! A program that renders shares its GPU with a model that infers and trains.
//!
//! The host owns device, queue and command encoder. It wraps its context once, and records runs of dispatches between its own passes:
//! the more chunks, the shorter the time for which its passes wait.
//!
//! ```text
//! cargo run --release --example co_tenancy [FRAMES [BATCH [MODEL]]]
//! ```

mod host;
mod renderer;
mod tenants;

use std::sync::Arc;
use std::time::{Duration, Instant};

use blade_graphics::{Context, ContextDesc};
use host::{Frame, Host, Pass};
use meganeura::{Device, Model};
use tenants::Tenants;

/// Frames that do not count.
const WARM_UP: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let frames: usize = arguments.next().map_or(Ok(20), |text| text.parse())?;
    let batch: usize = arguments.next().map_or(Ok(32), |text| text.parse())?;
    let path = arguments.next().unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/digits-cnn.onnx").to_owned());

    // SAFETY: the system's driver is trusted.
    let context = Arc::new(unsafe { Context::init(ContextDesc { timing: true, ..ContextDesc::default() }) }?);
    let device = Device::with_context(context.clone())?;
    let model = Model::open(path)?;
    println!("{}: {frames} frames, {batch} samples per step", device.info().name);
    println!("{:<38}{:>12}{:>12}", "median, in ms", "1 chunk", "2 chunks");

    let tenants = || Tenants::new(&device, &model, batch);
    let mut alone = tenants()?;
    let mut variants = [(1, tenants()?, Host::new(&context)), (2, tenants()?, Host::new(&context))];
    let mut columns = [Vec::new(), Vec::new()];
    // Variants take turns, so that what else the machine does falls on both.
    for number in 0..WARM_UP + frames.max(1) {
        let (inferred, trained) = (timed(|| alone.inference.run())?, timed(|| alone.training.run())?);
        for ((chunks, tenants, host), column) in variants.iter_mut().zip(&mut columns) {
            let frame = host.render(tenants, *chunks)?;
            if frame.pixels != renderer::expected(frame.number) {
                return Err(format!("frame {} is wrong", frame.number).into());
            }
            if frame.inferred != inferred.0 || frame.trained != trained.0 {
                return Err(format!("the sessions differ from sessions alone in frame {}", frame.number).into());
            }
            if number >= WARM_UP {
                let alone =
                    [("an inference alone, host's clock", inferred.1), ("a training step alone, host's clock", trained.1)];
                column.push(figures(&frame, &host.timings()).into_iter().chain(alone).collect::<Vec<_>>());
            }
        }
    }
    for row in 0..columns[0][0].len() {
        let cell = |frames: &Vec<Vec<(&str, Duration)>>| {
            let mut sorted: Vec<Duration> = frames.iter().map(|figures| figures[row].1).collect();
            sorted.sort();
            sorted[sorted.len() / 2].as_secs_f64() * 1e3
        };
        println!("{:<38}{:>12.3}{:>12.3}", columns[0][0][row].0, cell(&columns[0]), cell(&columns[1]));
    }
    Ok(())
}

/// What a call returns, and how long it takes.
fn timed<T>(call: impl FnOnce() -> Result<T, meganeura::Error>) -> Result<(T, Duration), meganeura::Error> {
    let started = Instant::now();
    Ok((call()?, started.elapsed()))
}

/// The figures of a frame whose passes took `times`. Latencies are from the start of the frame to the last chunk of the worker.
fn figures(frame: &Frame, times: &[Duration]) -> Vec<(&'static str, Duration)> {
    let until =
        |last: Option<usize>| last.and_then(|last| times.get(..=last)).map_or(Duration::ZERO, |passes| passes.iter().sum());
    let latency = |guest: Pass| until(frame.passes.iter().rposition(|pass| *pass == guest));
    let own = frame.passes.iter().zip(times).filter(|(pass, _)| **pass == Pass::Host).map(|(_, time)| *time);
    let stall = frame.passes.iter().zip(times).fold((Duration::ZERO, Duration::ZERO), |(longest, current), (pass, time)| {
        let current = if *pass == Pass::Host { Duration::ZERO } else { current + *time };
        (longest.max(current), current)
    });
    vec![
        ("frame, host's clock", frame.time),
        ("frame, device's clock", times.iter().sum()),
        ("of it the host's passes", own.sum()),
        ("longest wait between host's passes", stall.0),
        ("latency of the inference", latency(Pass::Inference)),
        ("latency of the training step", latency(Pass::Training)),
    ]
}
