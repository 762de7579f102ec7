//! `meganeura import`: what is in a model, and the artifact that all commands take.

use std::path::PathBuf;

use clap::Args;
use meganeura::import::ImportError;
use meganeura::{Dim, Error, Model};
use serde_json::json;

use super::table::Table;
use super::{Failure, ModelArgs, check_writable, print, print_json, warn_all};

/// Check an ONNX model, show what is in it, and write it as one safetensors file
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meganeura import model.onnx --dim batch=8 -o model.safetensors")]
pub struct ImportArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The safetensors file to write: weights under their names, and the structure
    #[arg(short = 'o', value_name = "OUT", conflicts_with = "check")]
    out: Option<PathBuf>,
    /// Keep only this output and what it needs (may be repeated)
    #[arg(long = "output", value_name = "NAME")]
    outputs: Vec<String>,
    /// Only report: list every unsupported operator at once, write nothing
    #[arg(long)]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ImportArgs) -> Result<(), Failure> {
    if let Some(out) = &args.out {
        check_writable(out)?;
    }
    let mut model = args.model.open(&args.outputs)?;
    let bindings = args.model.bindings(&model);
    let complete = model.inputs().iter().all(|input| input.ranked && input.dims.iter().all(|d| matches!(d, Dim::Fixed(_))));
    if complete || bindings != meganeura::Bindings::default() {
        match model.specialize(&bindings) {
            Ok(specialized) => warn_all(&specialized.warnings),
            // The data that the model runs on will tell.
            Err(Error::Import { source, .. }) if matches!(*source, ImportError::ValuesNeeded { .. }) => {
                eprintln!("note: {source}")
            }
            Err(error) => return Err(error.into()),
        }
    }
    warn_copies(&model)?;
    report(&model, args.json)?;
    if let Some(out) = &args.out {
        model.set_bindings(bindings);
        model.save(out)?;
        eprintln!("wrote {}", out.display());
    }
    Ok(())
}

/// Weights that the file holds more than once: they train apart.
fn warn_copies(model: &Model) -> Result<(), Failure> {
    let copies = model.copies()?;
    let equal = copies.equal.iter().map(|names| format!("{} are equal", names.join(", ")));
    let transposed = copies.transposed.iter().map(|(a, b)| format!("{b} is {a}, transposed"));
    let each: Vec<String> =
        equal.chain(transposed).map(|what| format!("{what}: copies of one weight will train apart")).collect();
    warn_all(&each);
    Ok(())
}

/// Inputs, outputs, parameters and operators, on stdout.
pub fn report(model: &Model, json: bool) -> Result<(), Failure> {
    let shape = |dims: &[Dim]| format!("[{}]", dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(","));
    let mut inputs = Table::new(["name", "dtype", "shape"]);
    for input in model.inputs() {
        let shape = if input.ranked { shape(&input.dims) } else { "any".to_string() };
        inputs.row([input.name.clone(), input.dtype.to_string(), shape]);
    }
    let mut outputs = Table::new(["name", "dtype", "shape"]);
    for output in model.outputs() {
        let dtype = output.dtype.map_or("undeclared".to_string(), |d| d.to_string());
        outputs.row([output.name.clone(), dtype, output.dims.as_deref().map_or("undeclared".to_string(), shape)]);
    }
    let parameters = parameters(model);
    let mut shared = Table::new(["name", "nodes that read it"]);
    for (name, count) in model.imported().shared() {
        shared.row([name.to_string(), count.to_string()]);
    }
    let mut adapters = Table::new(["weight", "rank", "alpha", "factors"]);
    for adapter in model.adapters() {
        let factors = adapter.factors().map(|(name, factor)| format!("{name} {}", factor.shape())).join(", ");
        adapters.row([adapter.weight().to_string(), adapter.rank().to_string(), adapter.alpha().to_string(), factors]);
    }
    let mut ops = Table::new(["op", "nodes"]);
    for (op, count) in model.imported().op_counts() {
        ops.row([op.clone(), count.to_string()]);
    }
    if json {
        let warnings: Vec<String> = model.warnings().iter().map(ToString::to_string).collect();
        return print_json(&json!({
            "file": model.path(),
            "producer": model.imported().producer(),
            "inputs": inputs.json(),
            "outputs": outputs.json(),
            "parameters": parameters.json(),
            "shared": shared.json(),
            "adapters": adapters.json(),
            "ops": model.imported().op_counts(),
            "warnings": warnings,
        }));
    }
    let elements = |trainable: bool| -> usize {
        model.parameters().iter().filter(|p| p.trainable == trainable).map(|p| p.shape.numel()).sum()
    };
    let sections = [
        inputs.text("inputs"),
        outputs.text("outputs"),
        parameters.text("parameters"),
        shared.text("shared weights"),
        adapters.text("adapters"),
        ops.text("operators"),
    ];
    let totals = format!("{} trainable numbers, {} others\n", elements(true), elements(false));
    print(&format!("{}\n{totals}", sections.join("\n")))
}

/// Every parameter with its shape, dtype, and whether it trains and why.
pub fn parameters(model: &Model) -> Table {
    let mut table = Table::new(["name", "shape", "dtype", "trainable", "why"]);
    for p in model.parameters() {
        let trainable = if p.trainable { "yes" } else { "no" };
        table.row([p.name.clone(), p.shape.to_string(), p.stored.to_string(), trainable.to_string(), p.reason.to_string()]);
    }
    table
}
