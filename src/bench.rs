//! How long a model takes on a device, and which kernels take it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use meganeura_codegen::CompileReport;
use meganeura_runtime::{Device, DispatchTime, Session, SessionError};
use serde_json::{Value, json};

use crate::error::Error;
use crate::model::Model;
use crate::plan_cache::{self, PlanSource, Planned};
use crate::predictor::{by_name, place_weights};
use crate::rewriting::compile_options;
use crate::workload::Workload;

/// How often to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// Runs that do not count, at least: they go on until a GPU that was idle has raised its clock.
    pub warm_up: usize,
    /// Runs of which the median is taken; at least 1.
    pub runs: usize,
    /// Whether to time every dispatch in a run of its own afterwards.
    pub kernels: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        BenchOptions { warm_up: 5, runs: 20, kernels: true }
    }
}

/// How long runs do not count: an idle H200 takes a quarter of a second to raise its clock to six times that of rest.
const WARM_UP: Duration = Duration::from_millis(500);
/// Runs that time each dispatch.
const PROFILES: usize = 5;

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The host's time from submission until the device is done, inputs and outputs staying on the device. One per run.
    pub times: Vec<Duration>,
    /// The same with inputs that come from the host and outputs that go there.
    pub with_transfers: Vec<Duration>,
    /// Of each dispatch, in a pass of its own, so that nothing overlaps; the median of some runs. Empty if not asked for or the device has
    /// no timer.
    pub dispatches: Vec<DispatchTime>,
    pub report: CompileReport,
    /// Whether the program came from the plan cache.
    pub cached: bool,
    /// From the graph to the program.
    pub compile: Duration,
    /// From the program to a session: pipelines and memory.
    pub open: Duration,
}

/// The middle of the times; the later of two.
pub fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

impl Measurement {
    /// Dispatches and time by kernel label, the longest first.
    pub fn by_kernel(&self) -> Vec<(String, usize, Duration)> {
        let mut sums: Vec<(String, usize, Duration)> = Vec::new();
        for dispatch in &self.dispatches {
            match sums.iter_mut().find(|(label, ..)| *label == dispatch.label) {
                Some((_, count, time)) => {
                    *count += 1;
                    *time += dispatch.time;
                }
                None => sums.push((dispatch.label.clone(), 1, dispatch.time)),
            }
        }
        sums.sort_by_key(|(_, _, time)| std::cmp::Reverse(*time));
        sums
    }

    /// The dispatches one after the other as a trace that ui.perfetto.dev opens: Chrome's JSON format, in microseconds.
    pub fn trace(&self, name: &str) -> Value {
        let mut start = 0.0;
        let events = self.dispatches.iter().map(|dispatch| {
            let duration = dispatch.time.as_secs_f64() * 1e6;
            let event = json!({
                "name": dispatch.label, "cat": name, "ph": "X", "ts": start, "dur": duration, "pid": 1, "tid": 1,
                "args": { "dispatch": dispatch.dispatch },
            });
            start += duration;
            event
        });
        json!({ "traceEvents": events.collect::<Vec<_>>(), "displayTimeUnit": "ns", "otherData": { "phase": name } })
    }
}

impl Model {
    /// Compiles a workload and measures it. A training step changes the weights on the device only, not the model's.
    ///
    /// # Errors
    /// The device cannot hold or run the workload.
    pub fn measure(&self, device: &Arc<Device>, workload: Workload, options: BenchOptions) -> Result<Measurement, Error> {
        let Workload { graph, inputs } = workload;
        let started = Instant::now();
        let Planned { compiled, source } = plan_cache::compile(&graph.verify()?, device.profile(), &compile_options())?;
        let compile = started.elapsed();
        let started = Instant::now();
        let program = Arc::new(compiled.program);
        let store = place_weights(self, &[], device, &program)?;
        let mut session = Session::new(device, program, &store)?;
        let open = started.elapsed();
        let inputs = by_name(&inputs);
        session.write_inputs(&inputs)?;
        let started = Instant::now();
        let least = if device.info().is_software() { Duration::ZERO } else { WARM_UP };
        let mut count = 0;
        while count < options.warm_up || started.elapsed() < least {
            session.replay()?;
            count += 1;
        }
        let times = timed(options.runs, || Ok(session.replay()?))?;
        // At once, while the clock is high: what follows waits for the host.
        let dispatches = if options.kernels { profile(&mut session)? } else { Vec::new() };
        for _ in 0..options.warm_up {
            session.run(&inputs)?;
        }
        let with_transfers = timed(options.runs, || Ok(session.run(&inputs).map(drop)?))?;
        Ok(Measurement {
            times,
            with_transfers,
            dispatches,
            report: compiled.report,
            cached: matches!(source, PlanSource::Cache),
            compile,
            open,
        })
    }
}

/// How long each of `count` runs takes.
fn timed(count: usize, mut run: impl FnMut() -> Result<(), Error>) -> Result<Vec<Duration>, Error> {
    let time = |_| {
        let started = Instant::now();
        run().map(|()| started.elapsed())
    };
    (0..count.max(1)).map(time).collect()
}

/// The time of each dispatch, the median of [`PROFILES`] runs; none where the device has no timer.
fn profile(session: &mut Session) -> Result<Vec<DispatchTime>, SessionError> {
    let runs = (0..PROFILES).map(|_| session.profile()).collect::<Result<Vec<_>, _>>();
    let runs = match runs {
        Err(SessionError::NoTimer) => return Ok(Vec::new()),
        runs => runs?,
    };
    let mut times = runs[0].clone();
    for (i, dispatch) in times.iter_mut().enumerate() {
        dispatch.time = median(&runs.iter().map(|run| run[i].time).collect::<Vec<_>>());
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let times = [5, 1, 9].map(Duration::from_millis);
        assert_eq!(median(&times), Duration::from_millis(5));
        assert_eq!(median(&[]), Duration::ZERO);
    }
}
