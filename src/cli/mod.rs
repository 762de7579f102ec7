//! Commands, their shared arguments, and how they end: data goes to stdout, all else to stderr; the exit code is 0 for success, 1 where a
//! run or a check failed, 2 for bad usage or bad input.

mod bench;
mod devices;
mod dot;
mod export;
mod grad;
mod images;
mod import;
mod inspect;
mod objective;
mod optimizer;
mod phase;
mod plan;
mod progress;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod table;
mod train;
mod training;

use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand, ValueEnum};
use meganeura::live::DeviceSource;
use meganeura::plan_cache::{PlanCache, PlanCacheChoice, use_plan_cache};
use meganeura::{Bindings, DType, Device, DeviceSelector, Error, ImportOptions, Limits, Model, Shape, Tensor};

#[derive(Debug, Parser)]
#[command(name = "meganeura", version, about, max_term_width = 100)]
#[command(after_help = "Example:\n  meganeura train model.onnx --data train.npz --loss cross_entropy -o tuned.safetensors")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Import(import::ImportArgs),
    Inspect(inspect::InspectArgs),
    Run(run::RunArgs),
    Train(Box<train::TrainArgs>),
    Grad(grad::GradArgs),
    Export(export::ExportArgs),
    Bench(bench::BenchArgs),
    Devices(devices::DevicesArgs),
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
}

pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Import(args) => import::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Grad(args) => grad::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Devices(args) => devices::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(*args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}

/// Why a command ends early.
#[derive(Debug)]
struct Failure {
    message: String,
    code: u8,
}

/// Exit code where a run or a check failed.
const FAILED: u8 = 1;
/// Exit code for bad usage and bad input.
const BAD_INPUT: u8 = 2;

impl Failure {
    fn input(message: impl Into<String>) -> Self {
        Failure { message: message.into(), code: BAD_INPUT }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let failed = matches!(
            error,
            Error::NonFiniteLoss { .. }
                | Error::NonFiniteGradients { .. }
                | Error::Session(_)
                | Error::Parameter(_)
                | Error::Verify(_)
        );
        Failure { message: error.to_string(), code: if failed { FAILED } else { BAD_INPUT } }
    }
}

/// Writes text to stdout. A reader that went away is no error.
fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure { message: format!("cannot write to stdout: {e}"), code: FAILED })
        }
        _ => Ok(()),
    }
}

/// A JSON value on lines of its own.
fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(&format!("{value:#}\n"))
}

/// A model file and the sizes it is to have.
#[derive(Debug, Args)]
struct ModelArgs {
    /// An .onnx model, or a .safetensors file that meganeura wrote
    file: PathBuf,
    /// Size of a symbolic dimension
    #[arg(long = "dim", value_name = "NAME=N", value_parser = parse_dim)]
    dims: Vec<(String, usize)>,
    /// Shape of an input, for instance image=8,3,224,224
    #[arg(long = "input", value_name = "NAME=SHAPE", value_parser = parse_shape)]
    inputs: Vec<(String, Vec<usize>)>,
    /// Elements of an input of at most one axis whose values decide shapes, for instance axes=0,-1
    #[arg(long = "value", value_name = "NAME=VALUES", value_parser = parse_values, allow_hyphen_values = true)]
    values: Vec<(String, Vec<f64>)>,
    /// Undo quantisation, as training always does: quantised weights become float parameters
    #[arg(long)]
    dequantize: bool,
    /// Raise or lower a limit of what a model file may ask for, for instance nodes=2000000; see docs/LIMITS.md
    #[arg(long = "limit", value_name = "NAME=N", value_parser = parse_limit)]
    limits: Vec<(String, u64)>,
}

impl ModelArgs {
    fn bindings(&self, model: &Model) -> Bindings {
        let mut bindings = Bindings {
            dims: self.dims.iter().cloned().collect(),
            shapes: self.inputs.iter().cloned().collect(),
            ..Bindings::default()
        };
        for (name, values) in &self.values {
            let input = model.inputs().iter().find(|input| input.name == *name);
            let scalar = values.len() == 1 && input.is_some_and(|input| input.ranked && input.dims.is_empty());
            let shape = if scalar { Shape::scalar() } else { Shape::from([values.len()]) };
            // Names and types are checked where the values are used.
            let dtype = input.map_or(DType::I64, |input| input.dtype);
            bindings.values.insert(name.clone(), Tensor::from_f64(dtype, shape, values));
        }
        bindings
    }

    /// Opens the model and shows what is worth knowing about it.
    fn open(&self, outputs: &[String]) -> Result<Model, Failure> {
        self.open_as(outputs, self.dequantize)
    }

    /// As [`ModelArgs::open`], with every weight a float.
    fn open_to_train(&self) -> Result<Model, Failure> {
        self.open_as(&[], true)
    }

    fn open_as(&self, outputs: &[String], dequantize: bool) -> Result<Model, Failure> {
        let outputs = (!outputs.is_empty()).then(|| outputs.to_vec());
        let mut limits = Limits::default();
        for (name, value) in &self.limits {
            limits.set(name, *value).map_err(|e| Failure::input(e.to_string()))?;
        }
        let model = Model::open_with(&self.file, &ImportOptions { outputs, dequantize, limits })?;
        warn_all(model.warnings());
        Ok(model)
    }
}

fn warn_all<W: fmt::Display>(warnings: &[W]) {
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
}

fn parse_dim(text: &str) -> Result<(String, usize), String> {
    let (name, size) = text.rsplit_once('=').ok_or("write NAME=N, for instance batch=8")?;
    Ok((name.to_string(), size.parse().map_err(|_| format!("{size:?} is not a size"))?))
}

fn parse_limit(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.rsplit_once('=').ok_or("write NAME=N, for instance nodes=2000000")?;
    Ok((name.to_string(), value.parse().map_err(|_| format!("{value:?} is not a number"))?))
}

/// `NAME=0,-1`; nothing after `=` is an empty vector.
fn parse_values(text: &str) -> Result<(String, Vec<f64>), String> {
    let (name, values) = text.rsplit_once('=').ok_or("write NAME=VALUES, for instance axes=0,-1")?;
    let values = values.split(',').map(str::trim).filter(|v| !v.is_empty());
    let values = values.map(|v| v.parse().map_err(|_| format!("{v:?} is not a number"))).collect::<Result<_, _>>()?;
    Ok((name.to_string(), values))
}

/// `NAME=8,3,224,224` or `NAME=8x3x224x224`; nothing after `=` is a scalar.
fn parse_shape(text: &str) -> Result<(String, Vec<usize>), String> {
    let (name, sizes) = text.rsplit_once('=').ok_or("write NAME=SHAPE, for instance image=8,3,224,224")?;
    let sizes = sizes.trim_matches(['[', ']', '(', ')']);
    let sizes = sizes.split([',', 'x']).map(str::trim).filter(|s| !s.is_empty());
    let sizes = sizes.map(|s| s.parse().map_err(|_| format!("{s:?} is not a size"))).collect::<Result<_, _>>()?;
    Ok((name.to_string(), sizes))
}

/// Where and how exactly to compute.
#[derive(Debug, Args)]
struct DeviceArgs {
    /// auto, an index from `meganeura devices`, or a part of a name
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceSelector,
    /// How exactly to compute
    #[arg(long, value_enum, default_value_t = Precision::Strict)]
    precision: Precision,
    /// Where compiled plans are kept: a folder, or off [default: $MEGANEURA_CACHE, or meganeura in the user's cache]
    #[arg(long, value_name = "FOLDER")]
    plan_cache: Option<PlanCacheChoice>,
}

/// What arithmetic a program may use.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Precision {
    /// 32-bit floats throughout
    Strict,
    /// Products on the device's matrix units, where it has them: operands rounded to 16 bits, sums of 32
    Accelerated,
}

impl Precision {
    /// Tells where a device does not offer it.
    fn note(self, device: &Device) {
        if matches!(self, Precision::Accelerated) && device.profile().matrix_unit.is_none() {
            eprintln!("note: {} has no matrix units that work: it computes as --precision strict does", device.info().name);
        }
    }
}

impl From<Precision> for meganeura::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Strict => meganeura::Precision::Strict,
            Precision::Accelerated => meganeura::Precision::Accelerated,
        }
    }
}

impl DeviceArgs {
    /// Makes programs come from the cache that the user chose.
    fn choose_plan_cache(&self) {
        use_plan_cache(self.plan_cache.clone().map_or_else(PlanCache::of_user, |choice| choice.0));
    }

    /// The device, for those who open it again when it fails.
    fn source(&self) -> DeviceSource {
        self.choose_plan_cache();
        DeviceSource::new(self.device.clone()).at(self.precision.into())
    }

    fn open(&self) -> Result<Arc<Device>, Failure> {
        self.choose_plan_cache();
        let device = Device::open_at(&self.device, self.precision.into()).map_err(Error::from)?;
        self.precision.note(&device);
        Ok(device)
    }
}

/// Checks that a file can be created or replaced at `path`, before any work is done for it. What is there stays untouched.
fn check_writable(path: &Path) -> Result<(), Failure> {
    let refuse = |reason: String| Err(Failure::input(format!("cannot write {}: {reason}", path.display())));
    let Some(name) = path.file_name() else { return refuse("it names no file".to_string()) };
    if path.is_dir() {
        return refuse("it is a folder".to_string());
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let probe = folder.join(format!(".{}.{}.probe", name.to_string_lossy(), std::process::id()));
    match std::fs::File::create_new(&probe).and_then(|_| std::fs::remove_file(&probe)) {
        Ok(()) => Ok(()),
        Err(e) => refuse(e.to_string()),
    }
}

/// As [`check_writable`], for files in a folder, which is made where it is missing.
fn check_folder(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(|e| Failure::input(format!("cannot make the folder {}: {e}", folder.display())))?;
    check_writable(&folder.join("probe"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(|h| h.to_string()).unwrap_or_default();
            assert!(help.contains(&format!("meganeura {}", command.get_name())), "{}", command.get_name());
        }
    }

    #[test]
    fn sizes_and_shapes_are_parsed() {
        assert_eq!(parse_dim("batch=8"), Ok(("batch".into(), 8)));
        assert_eq!(parse_dim("a=b=2"), Ok(("a=b".into(), 2)));
        assert!(parse_dim("batch").is_err() && parse_dim("batch=-1").is_err());
        for text in ["x=8,3,4", "x=8x3x4", "x=[8, 3, 4]"] {
            assert_eq!(parse_shape(text), Ok(("x".into(), vec![8, 3, 4])));
        }
        assert_eq!(parse_shape("x="), Ok(("x".into(), vec![])));
        assert!(parse_shape("x=8,a").is_err());
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused_and_probing_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        check_writable(&folder.path().join("out.safetensors")).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        for bad in [folder.path().to_path_buf(), folder.path().join("missing/out"), PathBuf::from("/")] {
            assert_eq!(check_writable(&bad).unwrap_err().code, BAD_INPUT);
        }
    }
}
