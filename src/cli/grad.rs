//! `meganeura grad`: one forward and backward pass.

use std::collections::HashMap;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use meganeura::{Bindings, Error, Phase, WithRespectTo, write_tensors};
use serde_json::json;

use super::images::ImageArgs;
use super::objective::ObjectiveArgs;
use super::phase::PhaseArgs;
use super::{DeviceArgs, Failure, ModelArgs, check_writable, print, print_json};

/// Compute a loss and its gradient over the arrays of a file, as one batch
#[derive(Debug, Args)]
#[command(mut_arg("loss", |loss| loss.required(true)))]
#[command(after_help = "Example:\n  meganeura grad model.onnx --data in.npz --loss mse -o grads.safetensors")]
pub struct GradArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Arrays named after the inputs, and the target: .npz, .safetensors or .csv; or a folder of class folders with images
    #[arg(long, value_name = "IN")]
    data: PathBuf,
    #[command(flatten)]
    images: ImageArgs,
    #[command(flatten)]
    objective: ObjectiveArgs,
    #[command(flatten)]
    phase: PhaseArgs,
    /// Decides the random numbers of a model that draws any
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// What to differentiate by
    #[arg(long, value_enum, default_value_t = Wrt::Parameters)]
    wrt: Wrt,
    /// The safetensors file to write: each gradient under the name of its tensor
    #[arg(short = 'o', value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Wrt {
    Parameters,
    Inputs,
}

pub fn run(args: &GradArgs) -> Result<(), Failure> {
    check_writable(&args.out)?;
    let model = args.model.open_to_train()?;
    let objective = args.objective.objective()?;
    let wrt = match args.wrt {
        Wrt::Parameters => WithRespectTo::Parameters,
        Wrt::Inputs => WithRespectTo::Inputs,
    };
    let device = args.device.open()?;
    let bindings = Bindings { phase: args.phase.phase(Phase::default()), ..args.model.bindings(&model) };
    let data = args.images.open(&args.data, &model, &bindings, model.class_names().as_deref())?;
    let found = model.gradients_of_seed(&device, &data, &objective, wrt, &bindings, args.seed)?;
    let metadata = HashMap::from([("loss".to_string(), format!("{:?}", found.loss))]);
    write_tensors(&args.out, &found.gradients, metadata).map_err(Error::from)?;
    let squares = found.gradients.values().flat_map(|t| t.to_f64_vec()).map(|v| v * v);
    let norm = squares.sum::<f64>().sqrt();
    eprintln!("wrote {}", args.out.display());
    match args.json {
        true => print_json(&json!({ "loss": found.loss, "gradient_norm": norm, "tensors": found.gradients.len() })),
        false => print(&format!("loss {:.8}\ngradient norm {norm:.8} over {} tensors\n", found.loss, found.gradients.len())),
    }
}
