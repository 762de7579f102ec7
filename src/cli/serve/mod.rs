//! `meganeura serve`: models behind the Open Inference Protocol.

mod batching;
mod compiler;
#[cfg(test)]
mod faults;
mod refusals;
mod served;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use meganeura::live::{EvaluationSet, Live, LiveOptions, LiveTraining};
use meganeura::{Bindings, Dataset, Error, ImportOptions, Limits, Loss, Objective, Pattern};
use meganeura_serve::{Options, ServeError, Served, Server};

use super::{BAD_INPUT, DeviceArgs, FAILED, Failure, parse_dim, parse_limit};
use served::{LiveModel, LoadError};

/// Serve models over HTTP and gRPC, and train them while they answer
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  meganeura serve model.onnx
  meganeura serve detector.onnx classifier.safetensors --listen 0.0.0.0:8080 --token-file token --max-batch 32
  meganeura serve model.onnx --train-endpoint --checkpoint run/ --eval test.npz --loss cross_entropy")]
pub struct ServeArgs {
    /// Models: .onnx, or .safetensors that meganeura wrote; or folders of them
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The name of a model, in the order of the files [default: that of the file, without its extension]
    #[arg(long, value_name = "NAME")]
    model_name: Vec<String>,
    /// Size of a symbolic dimension that requests do not decide
    #[arg(long = "dim", value_name = "NAME=N", value_parser = parse_dim)]
    dims: Vec<(String, usize)>,
    /// Raise or lower a limit of what a model file may ask for, for instance nodes=2000000; see docs/LIMITS.md
    #[arg(long = "limit", value_name = "NAME=N", value_parser = parse_limit)]
    limits: Vec<(String, u64)>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    batching: BatchingArgs,
    #[command(flatten)]
    training: TrainingArgs,
    /// Log every request, not only what the server got wrong
    #[arg(long)]
    log_requests: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Network")]
struct NetworkArgs {
    /// Where HTTP and gRPC are served
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Another address, for clients that want gRPC on a port of its own
    #[arg(long, value_name = "ADDRESS")]
    grpc_listen: Option<SocketAddr>,
    /// What requests must bear: Authorization: Bearer TOKEN. Other users of this machine may see it; a file hides it
    #[arg(long, value_name = "TOKEN", conflicts_with = "token_file")]
    token: Option<String>,
    /// A file whose first line is the token
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Bytes of one body
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = parse_size)]
    max_body: usize,
    /// Bytes of all bodies that are being served, and of answers on their way
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = parse_size)]
    max_memory: usize,
    /// Requests that wait; more get 429
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_queue: usize,
    #[arg(long, default_value_t = 512, value_name = "N")]
    /// Open connections; more get 503
    max_connections: usize,
    /// Seconds from a request to its answer
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_seconds)]
    deadline: Duration,
    /// Seconds for the body of a request to come
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_seconds)]
    body_timeout: Duration,
    /// Seconds for the head of a request to come, and for which a connection may be idle
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_seconds)]
    idle_timeout: Duration,
    /// Seconds for what was begun to finish, once the server stops
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_seconds)]
    drain: Duration,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Batching")]
struct BatchingArgs {
    /// Samples of one execution, and of one request
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = parse_batch)]
    max_batch: usize,
    /// How long a request may wait for others to share its execution, in milliseconds; one that comes alone does not wait
    #[arg(long, default_value = "2", value_name = "MS", value_parser = parse_milliseconds)]
    max_delay: Duration,
    /// Programs to keep for each model, one for each set of input shapes
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = parse_batch)]
    max_specializations: usize,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
struct TrainingArgs {
    /// Let requests train the models, write checkpoints, and roll back
    #[arg(long)]
    train_endpoint: bool,
    /// Folder for checkpoints, with a folder for each model; the newest one is served. Without it, training lasts as long as the server
    #[arg(long, value_name = "DIR", requires = "train_endpoint")]
    checkpoint: Option<PathBuf>,
    /// Checkpoints to keep
    #[arg(long, value_name = "K", default_value_t = 3, requires = "checkpoint")]
    keep: usize,
    /// The share of the device's time that training gets while requests wait, of 0 to 1
    #[arg(long, value_name = "X", default_value_t = 0.5, requires = "train_endpoint")]
    train_share: f64,
    /// Steps of one training request
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "train_endpoint", value_parser = clap::value_parser!(u64).range(1..))]
    max_train_steps: u64,
    /// Train only the parameters whose name matches (may be repeated)
    #[arg(long, value_name = "GLOB", requires = "train_endpoint")]
    train: Vec<Pattern>,
    /// Do not train the parameters whose name matches (may be repeated)
    #[arg(long, value_name = "GLOB", requires = "train_endpoint")]
    freeze: Vec<Pattern>,
    /// The largest norm of all gradients together
    #[arg(long, value_name = "X", requires = "train_endpoint")]
    clip: Option<f64>,
    /// Held-out data: what makes its loss rise is not served
    #[arg(long, value_name = "EVAL", requires_all = ["train_endpoint", "loss"])]
    eval: Option<PathBuf>,
    /// The loss on the held-out data
    #[arg(long, requires = "eval", value_parser = |name: &str| Loss::from_name(name))]
    loss: Option<Loss>,
    /// By which part of itself the loss on the held-out data may rise
    #[arg(long, value_name = "X", default_value_t = 0.0, requires = "eval")]
    tolerance: f64,
    /// Decides all random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

pub fn run(args: ServeArgs) -> Result<(), Failure> {
    let named = name_models(&args.files, &args.model_name)?;
    let options = args.options()?;
    let live = args.live_options()?;
    let (devices, checkpoints) = (Arc::new(args.device.source()), args.training.checkpoint.clone());
    let (max_batch, several) = (options.max_batch, named.len() > 1);
    let (evaluates, precision) = (args.training.eval.is_some(), args.device.precision);
    let load = move || {
        let models = named.into_iter().map(|(name, path)| {
            let folder = checkpoints.as_ref().map(|folder| if several { folder.join(&name) } else { folder.clone() });
            let bindings = live.bindings.clone();
            let mut live = Live::open(&path, LiveOptions { checkpoints: folder, ..live.clone() }, devices.clone())?;
            if evaluates {
                // The evaluation compiles, which else the first training request would wait for, and inference with it.
                live.evaluate()?;
            }
            live.problems().iter().for_each(|problem| eprintln!("warning: {problem}"));
            Ok(Box::new(LiveModel::new(name, live, &bindings, &devices, max_batch)?) as Box<dyn Served>)
        });
        let models = models.collect::<Result<Vec<_>, LoadError>>()?;
        precision.note(&*devices.current().map_err(Error::from)?);
        Ok(models)
    };
    let server = Server::start(options, Box::new(load)).map_err(failure)?;
    for address in server.addresses() {
        eprintln!("serving at http://{address}");
    }
    server.run().map_err(|error| Failure { message: error.to_string(), code: FAILED })
}

fn failure(error: ServeError<LoadError>) -> Failure {
    match error {
        ServeError::Load(LoadError::Model(error)) => error.into(),
        ServeError::Load(LoadError::Thread(_)) | ServeError::Engine | ServeError::Start(_) => {
            Failure { message: error.to_string(), code: FAILED }
        }
        _ => Failure { message: error.to_string(), code: BAD_INPUT },
    }
}

impl ServeArgs {
    fn options(&self) -> Result<Options, Failure> {
        let (network, training) = (&self.network, &self.training);
        let token = match &network.token_file {
            Some(path) => Some(read_token(path)?),
            None => network.token.clone(),
        };
        Ok(Options {
            listen: network.listen,
            grpc_listen: network.grpc_listen,
            token,
            max_batch: self.batching.max_batch,
            max_delay: self.batching.max_delay,
            max_queue: network.max_queue,
            max_body: network.max_body,
            max_memory: network.max_memory.max(network.max_body),
            max_connections: network.max_connections,
            deadline: network.deadline,
            body_timeout: network.body_timeout,
            header_timeout: network.idle_timeout,
            drain: network.drain,
            max_train_steps: if training.train_endpoint { training.max_train_steps } else { 0 },
            log_requests: self.log_requests,
            ..Options::default()
        })
    }

    fn live_options(&self) -> Result<LiveOptions, Failure> {
        let training = &self.training;
        let evaluation = match (&training.eval, &training.loss) {
            (Some(path), Some(loss)) => Some(EvaluationSet {
                data: Dataset::open(path).map_err(Error::from)?,
                objective: Objective::new(loss.clone()),
                batch: None,
                tolerance: training.tolerance,
            }),
            _ => None,
        };
        let mut limits = Limits::default();
        for (name, value) in &self.limits {
            limits.set(name, *value).map_err(|e| Failure::input(e.to_string()))?;
        }
        Ok(LiveOptions {
            import: ImportOptions { limits, dequantize: training.train_endpoint, ..ImportOptions::default() },
            bindings: Bindings { dims: self.dims.iter().cloned().collect(), ..Bindings::default() },
            specializations: self.batching.max_specializations,
            seed: training.seed,
            training: training.train_endpoint.then(|| LiveTraining {
                share: training.train_share,
                train: training.train.clone(),
                freeze: training.freeze.clone(),
                clip: training.clip,
                evaluation,
                ..LiveTraining::default()
            }),
            checkpoints: None,
            keep: training.keep,
        })
    }
}

/// The files to serve, each with the name of its model.
fn name_models(paths: &[PathBuf], names: &[String]) -> Result<Vec<(String, PathBuf)>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let found = models_in(path)?;
            if found.is_empty() {
                return Err(Failure::input(format!("there is no model in {}", path.display())));
            }
            files.extend(found);
        } else {
            files.push(path.clone());
        }
    }
    if names.len() > files.len() {
        return Err(Failure::input(format!("{} names are given for {} models", names.len(), files.len())));
    }
    if let Some(bad) = names.iter().find(|name| name.is_empty() || name.contains('/')) {
        return Err(Failure::input(format!("{bad:?} is no name for a model: it stands in paths")));
    }
    let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let names = names.iter().cloned().map(Some).chain(std::iter::repeat(None));
    Ok(files.into_iter().zip(names).map(|(path, name)| (name.unwrap_or_else(|| stem(&path)), path)).collect())
}

fn models_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let unreadable = |e: std::io::Error| Failure::input(format!("cannot read {}: {e}", folder.display()));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "onnx" || extension == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read_token(path: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(path).map_err(|e| Failure::input(format!("cannot read {}: {e}", path.display())))?;
    match text.lines().next().map(str::trim) {
        Some(token) if !token.is_empty() => Ok(token.to_string()),
        _ => Err(Failure::input(format!("{} holds no token", path.display()))),
    }
}

/// `64M`, `1G`, or a number of bytes.
fn parse_size(text: &str) -> Result<usize, String> {
    const UNITS: [(char, u32); 3] = [('K', 10), ('M', 20), ('G', 30)];
    let unit = UNITS.into_iter().find(|(unit, _)| text.ends_with(*unit));
    let (digits, shift) = unit.map_or((text, 0), |(unit, shift)| (text.trim_end_matches(unit), shift));
    let size = digits.parse::<usize>().ok().and_then(|size| size.checked_mul(1 << shift));
    size.filter(|&size| size > 0).ok_or_else(|| format!("{text:?} is no size: write for instance 64M"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds
        .filter(|time| *time > Duration::ZERO && time.as_secs() < 1 << 24)
        .ok_or_else(|| format!("{text:?} is no number of seconds"))
}

fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    let time = text.parse::<f64>().ok().and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
    time.filter(|time| time.as_secs() < 3600).ok_or_else(|| format!("{text:?} is no number of milliseconds"))
}

fn parse_batch(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| (1..=1 << 16).contains(n)).ok_or_else(|| format!("{text:?} is no number of 1 to 65536"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_parsed() {
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1000"), Ok(1000));
        assert!(parse_size("0").is_err() && parse_size("M").is_err() && parse_size("99999999999999999999G").is_err());
        assert_eq!(parse_milliseconds("0.5"), Ok(Duration::from_micros(500)));
        assert!(parse_milliseconds("-1").is_err() && parse_seconds("0").is_err() && parse_seconds("inf").is_err());
    }

    #[test]
    fn models_are_named_after_their_files_unless_told() {
        let files = [PathBuf::from("a/x.onnx"), PathBuf::from("y.safetensors")];
        let named = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            name_models(&files, &names)
                .map(|named| named.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
                .map_err(|e| e.message)
        };
        assert_eq!(named(&[]), Ok(vec!["x".to_string(), "y".to_string()]));
        assert_eq!(named(&["z"]), Ok(vec!["z".to_string(), "y".to_string()]));
        assert!(named(&["a", "b", "c"]).is_err() && named(&["a/b"]).is_err());
    }
}
