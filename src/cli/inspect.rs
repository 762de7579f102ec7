//! `meganeura inspect`: each stage of a model, for people.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use meganeura::codegen::program::Program;
use meganeura::codegen::{CompileOptions, CompileReport, Compiled, DeviceProfile, Precision};
use meganeura::plan_cache::{Planned, compile};
use meganeura::{Dataset, Error, Model, WorkPhase, compile_options, rewrite_graphs};
use serde_json::{Map, Value, json};

use super::dot::dot;
use super::objective::ObjectiveArgs;
use super::{DeviceArgs, Failure, ModelArgs, import, print, print_json, warn_all};

/// Show a model: what is in it, its graph, its plan, or a kernel
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meganeura inspect model.onnx --dim batch=1 --plan")]
#[command(mut_arg("output", |output| output.long("loss-output")))]
pub struct InspectArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Keep only this output and what it needs (may be repeated)
    #[arg(long = "output", value_name = "NAME")]
    outputs: Vec<String>,
    #[command(flatten)]
    view: View,
    #[command(flatten)]
    device: DeviceArgs,
    /// With --plan or --wgsl: of the training step with this loss instead of inference
    #[command(flatten)]
    objective: ObjectiveArgs,
    /// With --plan or --wgsl: inference, training (with gradients) or step (with AdamW too) [default: step with a loss, else inference]
    #[arg(long, value_name = "PHASE")]
    phase: Option<WorkPhase>,
    /// Arrays that sizes come from, with --loss: .npz, .safetensors or .csv
    #[arg(long, value_name = "IN")]
    data: Option<PathBuf>,
    /// With --plan or --wgsl: the most device memory that the program may take, in MiB, as for train
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    recompute: Option<u64>,
    /// Plan for a kind of device instead of the one at hand
    #[arg(long, value_enum, value_name = "KIND", conflicts_with = "device")]
    kind: Option<Kind>,
    /// Leave the graph as the file says: neither composites nor equal graphs that cost less are looked for
    #[arg(long)]
    unsaturated: bool,
    /// With --plan: where the plan came from and how long each stage took, on stderr
    #[arg(long, requires = "plan")]
    timing: bool,
    /// Print JSON: of the summary, of the parameters, and of what the plan costs
    #[arg(long, conflicts_with_all = ["graph", "wgsl", "dot"])]
    json: bool,
}

/// A device that need not be there.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Any GPU: what Vulkan and Metal guarantee
    Generic,
    /// A CPU behind Vulkan
    Software,
    /// A large NVIDIA GPU, with matrix units where --precision is accelerated
    Nvidia,
    /// Apple silicon behind Metal
    Apple,
}

impl Kind {
    fn profile(self, precision: Precision) -> DeviceProfile {
        match self {
            Kind::Generic => DeviceProfile::generic(),
            Kind::Software => DeviceProfile::software(),
            Kind::Nvidia => DeviceProfile::nvidia(precision),
            Kind::Apple => DeviceProfile::apple(),
        }
    }
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct View {
    /// The typed graph as text
    #[arg(long)]
    graph: bool,
    /// Dispatches, kernels and memory for the device
    #[arg(long)]
    plan: bool,
    /// The shader of a kernel: its number in the plan, or a part of its label
    #[arg(long, value_name = "KERNEL")]
    wgsl: Option<String>,
    /// The typed graph as Graphviz source
    #[arg(long)]
    dot: bool,
    /// The parameters only
    #[arg(long)]
    parameters: bool,
}

pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    rewrite_graphs(!args.unsaturated);
    let model = match (args.objective.given()?, args.outputs.as_slice()) {
        (Some(_), []) => args.model.open_to_train()?,
        _ => args.model.open(&args.outputs)?,
    };
    let view = &args.view;
    if view.graph || view.dot {
        let specialized = model.specialize(&args.model.bindings(&model))?;
        warn_all(&specialized.warnings);
        return print(&if view.dot { dot(&specialized.graph) } else { specialized.graph.to_string() });
    }
    if view.parameters {
        let table = import::parameters(&model);
        return if args.json { print_json(&table.json()) } else { print(&table.text("parameters")) };
    }
    match &view.wgsl {
        Some(kernel) => print(&shader(&compiled(args, &model)?.compiled.program, kernel)?),
        None if view.plan => {
            let Planned { compiled, source } = compiled(args, &model)?;
            if args.timing {
                eprint!("plan {source}\n{}", timing(&compiled));
            }
            let Compiled { program, report, .. } = compiled;
            if args.json { print_json(&costs(&report)) } else { print(&format!("{report}\n{program}")) }
        }
        None => import::report(&model, args.json),
    }
}

fn compiled(args: &InspectArgs, model: &Model) -> Result<Planned, Failure> {
    args.device.choose_plan_cache();
    let profile = match args.kind {
        Some(kind) => kind.profile(args.device.precision.into()),
        None => args.device.open()?.profile().clone(),
    };
    let bindings = args.model.bindings(model);
    let objective = args.objective.given()?;
    let phase = args.phase.unwrap_or(if objective.is_some() { WorkPhase::Step } else { WorkPhase::Inference });
    let data = args.data.as_ref().map(Dataset::open).transpose().map_err(Error::from)?;
    let graph = match (phase, &data) {
        (WorkPhase::Inference, None) => model.specialize(&bindings)?.graph,
        _ => model.workload(phase, objective.as_ref(), None, data.as_ref(), &bindings)?.graph,
    };
    let options = CompileOptions { memory_limit: args.recompute.map(|mib| mib << 20), ..compile_options() };
    Ok(compile(&graph.verify().map_err(Error::from)?, &profile, &options).map_err(Error::from)?)
}

/// Milliseconds of each stage of the compiler.
fn timing(compiled: &Compiled) -> String {
    let total = ("total", compiled.stages.iter().map(|(_, time)| *time).sum());
    let stages = compiled.stages.iter().chain([&total]);
    stages.map(|(stage, time)| format!("{:>9.1} ms  {stage}\n", time.as_secs_f64() * 1e3)).collect()
}

/// What a plan costs, in bytes and dispatches.
fn costs(report: &CompileReport) -> Value {
    let spaces: Map<String, Value> = report.spaces().map(|(space, bytes)| (space.name().to_owned(), bytes.into())).collect();
    json!({
        "dispatches": report.dispatches,
        "recomputed": report.recomputed,
        "kernels": report.kernels,
        "barriers": report.barriers,
        "bytes": spaces,
        "peak": report.memory.total(),
        "activations": report.activations(),
        "bound": report.bound,
    })
}

fn shader(program: &Program, wanted: &str) -> Result<String, Failure> {
    let by_number = wanted.parse::<usize>().ok().and_then(|index| program.kernels.get(index));
    let found = by_number.or_else(|| program.kernels.iter().find(|kernel| kernel.label.contains(wanted)));
    found.map(|kernel| kernel.wgsl.clone()).ok_or_else(|| {
        let labels: Vec<String> = program.kernels.iter().enumerate().map(|(i, k)| format!("  {i}  {}", k.label)).collect();
        Failure::input(format!("no kernel {wanted:?}; there are\n{}", labels.join("\n")))
    })
}
