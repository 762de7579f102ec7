//! `meganeura export`: today's weights in other programs' formats.

use std::path::{Path, PathBuf};

use clap::Args;

use meganeura::Model;

use super::{Failure, ModelArgs, check_folder, check_writable};

/// Write today's weights as safetensors, or inside the original ONNX model, or its adapters
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meganeura export tuned.safetensors --onnx tuned.onnx")]
pub struct ExportArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
struct Format {
    /// Weights under their original names, shapes and dtypes; adapters become part of them
    #[arg(long, value_name = "OUT")]
    safetensors: Option<PathBuf>,
    /// The original ONNX model with today's weights
    #[arg(long, value_name = "OUT")]
    onnx: Option<PathBuf>,
    /// The low-rank adapters alone, as PEFT keeps them: adapter_model.safetensors and adapter_config.json in this folder
    #[arg(long, value_name = "DIR")]
    peft: Option<PathBuf>,
}

pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let Format { safetensors, onnx, peft } = &args.format;
    safetensors.iter().chain(onnx).try_for_each(|out| check_writable(out))?;
    peft.iter().try_for_each(|folder| check_folder(folder))?;
    let mut model = args.model.open(&[])?;
    if let Some(folder) = peft {
        export_peft(&model, folder)?;
    }
    model.merge_adapters()?;
    if let Some(out) = safetensors {
        model.save(out)?;
        eprintln!("wrote {}", out.display());
    }
    if let Some(out) = onnx {
        model.export_onnx(out)?;
        eprintln!("wrote {}", out.display());
    }
    Ok(())
}

/// Writes adapters for PEFT, and warns where PyTorch can have no layer of that name.
pub(super) fn export_peft(model: &Model, folder: &Path) -> Result<(), Failure> {
    model.export_peft(folder)?;
    for adapter in model.adapters().iter().filter(|adapter| adapter.module() == adapter.weight()) {
        eprintln!("warning: the exporter of the model renamed {:?}: PEFT will look for a layer of that name", adapter.weight());
    }
    eprintln!("wrote {}", folder.display());
    Ok(())
}
