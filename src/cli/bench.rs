//! `meganeura bench`: how long a model takes on a device.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use meganeura::bench::{BenchOptions, Measurement, median};
use meganeura::runtime::atomic_write;
use meganeura::{Dataset, Error, WorkPhase};
use serde_json::{Value, json};

use super::objective::ObjectiveArgs;
use super::table::Table;
use super::{DeviceArgs, Failure, ModelArgs, check_writable, print, print_json};

/// Measure how long a model takes, and which kernels take it
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meganeura bench model.onnx --dim batch=8 --loss cross_entropy --profile trace.json")]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What to measure [default: latency and inference, with a loss all]
    #[arg(long = "phase", value_enum, value_name = "PHASE")]
    phases: Vec<Phase>,
    /// Arrays named after the inputs, and the target [default: numbers from a seed]
    #[arg(long, value_name = "IN")]
    data: Option<PathBuf>,
    #[command(flatten)]
    objective: ObjectiveArgs,
    /// Runs of which the median counts
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Runs before those, at least: on a GPU they last for half a second, in which it raises its clock
    #[arg(long, value_name = "N", default_value_t = 5)]
    warm_up: u16,
    /// Show the time of each kernel
    #[arg(long)]
    kernels: bool,
    /// The trace of the last phase to write, for ui.perfetto.dev
    #[arg(long, value_name = "TRACE.json")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Phase {
    /// A forward pass from arrays of the host to arrays of the host
    Latency,
    /// A forward pass whose inputs and outputs stay on the device
    Inference,
    /// Forward pass, loss, and gradients
    Training,
    /// The same, and AdamW's update
    Step,
}

impl Phase {
    fn work(self) -> WorkPhase {
        match self {
            Phase::Latency | Phase::Inference => WorkPhase::Inference,
            Phase::Training => WorkPhase::Training,
            Phase::Step => WorkPhase::Step,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Phase::Latency => "latency",
            phase => phase.work().name(),
        }
    }

    /// The times of this phase in a measurement.
    fn times(self, measured: &Measurement) -> &[Duration] {
        match self {
            Phase::Latency => &measured.with_transfers,
            _ => &measured.times,
        }
    }
}

pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    if let Some(path) = &args.profile {
        check_writable(path)?;
    }
    let objective = args.objective.given()?;
    let phases = match (args.phases.as_slice(), &objective) {
        ([], Some(_)) => Phase::value_variants(),
        ([], None) => &[Phase::Latency, Phase::Inference],
        (chosen, _) => chosen,
    };
    let trains = phases.iter().any(|phase| phase.work() != WorkPhase::Inference);
    let model = if trains { args.model.open_to_train()? } else { args.model.open(&[])? };
    let data = args.data.as_ref().map(Dataset::open).transpose().map_err(Error::from)?;
    let device = args.device.open()?;
    let kernels = args.kernels || args.profile.is_some() || args.json;
    let options = BenchOptions { warm_up: args.warm_up.into(), runs: args.runs.into(), kernels };
    let mut measured: Vec<(Phase, Measurement)> = Vec::new();
    for &phase in phases {
        let known = measured.iter().find(|(other, _)| other.work() == phase.work()).map(|(_, m)| m.clone());
        let measurement = match known {
            Some(measurement) => measurement,
            None => {
                let bindings = args.model.bindings(&model);
                let workload = model.workload(phase.work(), objective.as_ref(), None, data.as_ref(), &bindings)?;
                model.measure(&device, workload, options)?
            }
        };
        measured.push((phase, measurement));
    }
    if let (Some(path), Some((phase, last))) = (&args.profile, measured.last()) {
        let trace = last.trace(phase.name());
        atomic_write(path, |file| Ok(serde_json::to_writer(std::io::BufWriter::new(file), &trace)?)).map_err(Error::from)?;
        eprintln!("wrote {}", path.display());
    }
    let name = &device.info().name;
    if args.json {
        let phases: Vec<Value> = measured.iter().map(|(phase, measurement)| row_json(*phase, measurement)).collect();
        return print_json(
            &json!({ "device": name, "driver": device.info().driver, "driver_info": device.info().driver_info, "phases": phases }),
        );
    }
    print(&format!("{name}\n{}", summary(&measured).text("phases")))?;
    if args.kernels {
        for (phase, measurement) in measured.iter().filter(|(phase, _)| *phase != Phase::Latency) {
            print(&kernel_table(measurement).text(&format!("kernels of {}", phase.name())))?;
        }
    }
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Where the program came from.
fn plan_source(measured: &Measurement) -> &'static str {
    if measured.cached { "cached" } else { "compiled" }
}

/// The sum over all dispatches, where there is a timer.
fn on_device(measured: &Measurement) -> Option<f64> {
    let sum = measured.dispatches.iter().map(|d| d.time).sum();
    (!measured.dispatches.is_empty()).then(|| milliseconds(sum))
}

fn summary(measured: &[(Phase, Measurement)]) -> Table {
    let columns = [
        "phase",
        "median ms",
        "min",
        "max",
        "kernels ms",
        "dispatches",
        "groups",
        "shaders",
        "MiB",
        "plan",
        "compile ms",
        "open ms",
    ];
    let mut table = Table::new(columns);
    for (phase, measurement) in measured {
        let times = phase.times(measurement);
        let ms = |time: Option<Duration>| time.map_or("-".to_string(), |time| format!("{:.3}", milliseconds(time)));
        let report = &measurement.report;
        table.row([
            phase.name().to_string(),
            ms(Some(median(times))),
            ms(times.iter().min().copied()),
            ms(times.iter().max().copied()),
            on_device(measurement).map_or("-".to_string(), |sum| format!("{sum:.3}")),
            report.dispatches.to_string(),
            (report.barriers + 1).to_string(),
            report.kernels.to_string(),
            format!("{:.1}", report.memory.total() as f64 / f64::from(1 << 20)),
            plan_source(measurement).to_string(),
            format!("{:.0}", milliseconds(measurement.compile)),
            format!("{:.0}", milliseconds(measurement.open)),
        ]);
    }
    table
}

fn kernel_table(measured: &Measurement) -> Table {
    let mut table = Table::new(["ms", "share", "dispatches", "kernel"]);
    let total = on_device(measured).unwrap_or_default();
    for (label, count, time) in measured.by_kernel() {
        let share = format!("{:.1} %", 100.0 * milliseconds(time) / total);
        table.row([format!("{:.3}", milliseconds(time)), share, count.to_string(), label]);
    }
    table
}

fn row_json(phase: Phase, measured: &Measurement) -> Value {
    let times = phase.times(measured);
    let report = &measured.report;
    let kernels = measured.by_kernel().into_iter();
    let kernels = kernels.map(|(label, count, time)| json!({ "kernel": label, "dispatches": count, "ms": milliseconds(time) }));
    json!({
        "phase": phase.name(),
        "median_ms": milliseconds(median(times)),
        "times_ms": times.iter().map(|t| milliseconds(*t)).collect::<Vec<_>>(),
        "kernels_ms": on_device(measured),
        "dispatches": report.dispatches,
        "barrier_groups": report.barriers + 1,
        "shaders": report.kernels,
        "memory_bytes": report.memory.total(),
        "plan": plan_source(measured),
        "compile_ms": milliseconds(measured.compile),
        "open_ms": milliseconds(measured.open),
        "kernels": kernels.collect::<Vec<_>>(),
    })
}
