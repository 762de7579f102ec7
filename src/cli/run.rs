//! `meganeura run`: inference on the arrays of a file.

use std::path::PathBuf;

use clap::Args;
use meganeura::data::{Samples, Target, write_npz};
use meganeura::import::Warning;
use meganeura::runtime::atomic_write;
use meganeura::{Bindings, Error, Phase, RANDOM_KEY, Tensor, random_key};

use super::images::ImageArgs;
use super::phase::PhaseArgs;
use super::table::Table;
use super::{DeviceArgs, Failure, ModelArgs, check_writable, print, print_json, warn_all};

/// Run a model on the arrays of a file
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meganeura run model.onnx --data in.npz -o out.npz")]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Arrays named after the inputs: .npz, .safetensors or .csv; or a folder of class folders with images
    #[arg(long, value_name = "IN")]
    data: PathBuf,
    #[command(flatten)]
    images: ImageArgs,
    /// The .npz to write: arrays under the names of the outputs
    #[arg(short = 'o', value_name = "OUT")]
    out: Option<PathBuf>,
    /// Compute only this output (may be repeated)
    #[arg(long = "output", value_name = "NAME")]
    outputs: Vec<String>,
    #[command(flatten)]
    phase: PhaseArgs,
    /// Decides the random numbers of a model that draws any
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &RunArgs) -> Result<(), Failure> {
    if let Some(out) = &args.out {
        check_writable(out)?;
    }
    let model = args.model.open(&args.outputs)?;
    let bindings = Bindings { phase: args.phase.phase(Phase::INFERENCE), ..args.model.bindings(&model) };
    let data = args.images.open(&args.data, &model, &bindings, None)?;
    let samples = Samples::whole(&data, &model.bound_inputs(&bindings), Target::Absent).map_err(Error::from)?;
    let device = args.device.open()?;
    let inputs = samples.tensors();
    let mut inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let specialized = model.specialize_on(&bindings, &inputs)?;
    let phases: Vec<_> = specialized.warnings.iter().filter(|warning| matches!(warning, Warning::Phase { .. })).collect();
    warn_all(&phases);
    let key = random_key(args.seed, 0);
    inputs.push((RANDOM_KEY, &key));
    let outputs = model.run_specialized(&device, specialized, &inputs)?;
    if let Some(out) = &args.out {
        let arrays = outputs.iter().map(|(name, tensor)| (name.as_str(), tensor));
        atomic_write(out, |file| write_npz(std::io::BufWriter::new(file), arrays)).map_err(Error::from)?;
        eprintln!("wrote {}", out.display());
    }
    let table = summary(&outputs);
    if args.json { print_json(&table.json()) } else { print(&table.text("outputs")) }
}

/// Type and range of each output.
fn summary(outputs: &[(String, Tensor)]) -> Table {
    let mut table = Table::new(["name", "dtype", "shape", "min", "mean", "max"]);
    for (name, tensor) in outputs {
        let values = tensor.to_f64_vec();
        let (min, max) = values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let [min, mean, max] = [min, mean, max].map(|v| if values.is_empty() { "-".to_string() } else { format!("{v:.6}") });
        table.row([name.clone(), tensor.dtype().to_string(), tensor.shape().to_string(), min, mean, max]);
    }
    table
}
