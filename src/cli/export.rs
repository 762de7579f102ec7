//! `meganeura export`: today's weights in other programs' formats.

use std::path::PathBuf;

use clap::Args;

use super::{Failure, ModelArgs, check_writable};

/// Write today's weights as safetensors, or inside the original ONNX model
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
    /// Weights under their original names, shapes and dtypes
    #[arg(long, value_name = "OUT")]
    safetensors: Option<PathBuf>,
    /// The original ONNX model with today's weights
    #[arg(long, value_name = "OUT")]
    onnx: Option<PathBuf>,
}

pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let Format { safetensors, onnx } = &args.format;
    safetensors.iter().chain(onnx).try_for_each(|out| check_writable(out))?;
    let model = args.model.open(&[])?;
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
