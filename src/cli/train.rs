//! `meganeura train`: fine-tuning.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use meganeura::checkpoint::{self, Checkpoint, CheckpointFolder};
use meganeura::log::{Event, RunLog};
use meganeura::plot::loss_curve;
use meganeura::runtime::atomic_write;
use meganeura::tensorboard::EventFile;
use meganeura::{
    Bindings, Dataset, Decay, Error, Evaluation, Evaluator, FrozenPrefix, HeadOptions, Length, LoraOptions, LossScale, Metric,
    Model, Pattern, Phase, PrefixCache, StepReport, Tensor, TrainOptions, TrainedGroup, Trainer,
};
use serde_json::json;

use super::export::export_peft;
use super::objective::ObjectiveArgs;
use super::optimizer::OptimizerArgs;
use super::phase::PhaseArgs;
use super::progress::Progress;
use super::{DeviceArgs, Failure, ModelArgs, check_folder, check_writable, print, print_json};

/// Fine-tune a model
#[derive(Debug, Args)]
#[command(mut_arg("loss", |loss| loss.required(true)))]
#[command(after_help = "Examples:
  meganeura train model.onnx --data train.npz --loss cross_entropy -o tuned.safetensors
  meganeura train model.onnx --data train.npz --eval test.npz --loss cross_entropy --epochs 5 --batch 32 \\
      --optimizer adamw --lr 1e-3 --schedule cosine --checkpoint run/ --log run.jsonl --plot loss.svg -o tuned.safetensors")]
pub struct TrainArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Samples along the first axis: .npz, .safetensors or .csv
    #[arg(long, value_name = "TRAIN")]
    data: PathBuf,
    #[command(flatten)]
    objective: ObjectiveArgs,
    /// Held-out data: evaluated before, after each epoch, and at the end
    #[arg(long, value_name = "EVAL")]
    eval: Option<PathBuf>,
    /// What evaluation reports besides the loss: accuracy, top5, f1, mse or perplexity [default: accuracy for cross_entropy]
    #[arg(long, requires = "eval")]
    metric: Option<Metric>,
    /// Replace the last layer by one of N classes
    #[arg(long, value_name = "N")]
    classes: Option<usize>,
    /// The weight of the layer to replace [default: that of the last layer before the output]
    #[arg(long, value_name = "NAME", requires = "classes")]
    head: Option<String>,
    /// Old classes keep their weights; only further ones begin anew
    #[arg(long, requires = "classes")]
    keep_rows: bool,
    #[command(flatten)]
    phase: PhaseArgs,
    #[command(flatten)]
    length: LengthArgs,
    /// Stop after N evaluations in a row that are no better than the best: by the metric, or by the loss without one
    #[arg(long, value_name = "N", requires = "eval", value_parser = clap::value_parser!(u64).range(1..))]
    patience: Option<u64>,
    /// Write the weights of the best evaluation of this run instead of the last
    #[arg(long, requires = "eval")]
    keep_best: bool,
    /// Samples per batch [default: what the model fixes, else 32]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Batches per step, which follows the mean of their gradients
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_count)]
    accumulate: usize,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    /// The learning rate after the warm-up, with settings after a colon: constant, linear:end=0, cosine:min=1e-5,
    /// step:every=100,gamma=0.1, multi-step:at=100/200,gamma=0.1, exponential:gamma=0.99, polynomial:power=2 or
    /// one-cycle:rise=0.3,div=25,final-div=1e4; counted in steps, of which steps=N limits linear, cosine and polynomial
    #[arg(long, default_value = "constant")]
    schedule: Decay,
    /// Steps over which the learning rate rises
    #[arg(long, default_value_t = 0, value_name = "N")]
    warmup: u64,
    /// What the loss is multiplied by while its gradients are computed: dynamic, as PyTorch's GradScaler does it, off, or a number
    /// [default: off with --precision strict]
    #[arg(long, value_name = "dynamic|off|N", value_parser = parse_loss_scale)]
    loss_scale: Option<LossScaleArg>,
    /// The largest norm of all gradients together
    #[arg(long, value_name = "X")]
    clip: Option<f64>,
    /// Train only the parameters whose name matches (may be repeated)
    #[arg(long, value_name = "GLOB")]
    train: Vec<Pattern>,
    /// Do not train the parameters whose name matches (may be repeated)
    #[arg(long, value_name = "GLOB")]
    freeze: Vec<Pattern>,
    /// Train low-rank adapters of the weights whose name matches, and no others but those of --train; for instance
    /// *.q_proj.weight:rank=8,alpha=16 (may be repeated; the first that matches counts)
    #[arg(long, value_name = "GLOB:rank=R,alpha=A")]
    lora: Vec<LoraOptions>,
    /// Also write the adapters for PEFT, into this folder
    #[arg(long, value_name = "DIR")]
    peft: Option<PathBuf>,
    /// Also write the model with its adapters made part of the weights
    #[arg(long, value_name = "OUT")]
    merged: Option<PathBuf>,
    /// Decides the order of the samples and all random numbers [default: 0, or what the resumed run had]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Memory for values that training cannot change, which are computed once per sample, for instance 500M or 2G (more goes to a
    /// temporary file); or off [default: 1G]
    #[arg(long, value_name = "MEM", value_parser = parse_cache)]
    cache: Option<PrefixCache>,
    /// The most device memory that a training step may take, in MiB: to fit, it computes values of the forward pass again instead of
    /// keeping them
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    recompute: Option<u64>,
    /// Folder for checkpoints step-N.safetensors
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Steps between checkpoints [default: an epoch]
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// Checkpoints to keep
    #[arg(long, value_name = "K", default_value_t = 3, requires = "checkpoint", value_parser = parse_count)]
    keep: usize,
    /// Go on from the newest checkpoint in this folder
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// Write one JSON object per step and event
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Write event files for TensorBoard into this folder
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
    /// Draw the loss over the steps
    #[arg(long, value_name = "SVG")]
    plot: Option<PathBuf>,
    /// The safetensors file for the tuned model. Without it the result would be lost
    #[arg(short = 'o', value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct LengthArgs {
    /// Passes over the data [default: 1]
    #[arg(long, value_name = "N")]
    epochs: Option<u64>,
    /// Optimiser steps
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
}

/// `off`, or a number of bytes, perhaps in units of K, M or G.
fn parse_cache(text: &str) -> Result<PrefixCache, String> {
    if text == "off" {
        return Ok(PrefixCache::Off);
    }
    let units = [('K', 1u64 << 10), ('M', 1 << 20), ('G', 1 << 30)];
    let unit = units.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(*unit)?, *bytes)));
    let (digits, unit) = unit.unwrap_or((text, 1));
    let bytes = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    bytes.map(PrefixCache::Memory).ok_or_else(|| "write off, or a size such as 500M or 2G".to_string())
}

/// What `--loss-scale` says.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LossScaleArg(Option<LossScale>);

fn parse_loss_scale(text: &str) -> Result<LossScaleArg, String> {
    let fixed = || text.parse().ok().filter(|scale: &f64| *scale > 0.0 && (*scale as f32).is_finite());
    match text {
        "off" => Ok(LossScaleArg(None)),
        "dynamic" => Ok(LossScaleArg(Some(LossScale::default()))),
        _ => fixed()
            .map(|scale| LossScaleArg(Some(LossScale::fixed(scale))))
            .ok_or("write dynamic, off, or a number above 0".into()),
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "a number of at least 1 is needed".to_string())
}

impl TrainArgs {
    fn options(&self, model: &Model, seed: u64) -> Result<TrainOptions, Failure> {
        let objective = self.objective.objective()?;
        let length = match (self.length.epochs, self.length.steps) {
            (_, Some(steps)) => Length::Steps(steps),
            (epochs, None) => Length::Epochs(epochs.unwrap_or(1)),
        };
        Ok(TrainOptions {
            optimizer: self.optimizer.build()?,
            learning_rate: self.optimizer.lr,
            groups: self.optimizer.group.clone(),
            no_decay_norms: self.optimizer.no_decay_norms,
            ema: self.optimizer.ema,
            decay: self.schedule.clone(),
            warmup: self.warmup,
            clip: self.clip,
            loss_scale: self.loss_scale.map_or_else(|| self.device.loss_scale(), |given| given.0),
            batch: self.batch,
            accumulate: self.accumulate,
            length,
            train: self.train.clone(),
            freeze: self.freeze.clone(),
            lora: self.lora.clone(),
            seed,
            cache: self.cache.unwrap_or_default(),
            recompute: self.recompute.map(|mib| mib << 20),
            bindings: Bindings { phase: self.phase.phase(Phase::default()), ..self.model.bindings(model) },
            ..TrainOptions::new(objective)
        })
    }

    fn resize_head(&self, model: &mut Model, seed: u64) -> Result<(), Failure> {
        let Some(classes) = self.classes else { return Ok(()) };
        let (output, weight) = (self.objective.objective()?.output, self.head.clone());
        let options = HeadOptions { classes, output, weight, keep_rows: self.keep_rows, seed };
        let head = model.resize_head(&options)?;
        eprintln!("{}: {classes} classes instead of {}", head.weight.name, head.classes);
        Ok(())
    }

    /// What the run needs and cannot make later: every file that it will write.
    fn check_outputs(&self) -> Result<Option<CheckpointFolder>, Failure> {
        [Some(&self.out), self.log.as_ref(), self.plot.as_ref(), self.merged.as_ref()]
            .into_iter()
            .flatten()
            .try_for_each(|path| check_writable(path))?;
        if let Some(folder) = &self.peft {
            check_folder(folder)?;
        }
        let Some(path) = &self.checkpoint else { return Ok(None) };
        let folder = CheckpointFolder::create(path, self.keep).map_err(Error::from)?;
        if self.resume.as_ref() != Some(path) && !folder.is_empty().map_err(Error::from)? {
            let path = path.display();
            return Err(Failure::input(format!(
                "{path} holds checkpoints of another run: choose another folder, or --resume {path}"
            )));
        }
        Ok(Some(folder))
    }

    fn resumed(&self) -> Result<Option<Checkpoint>, Failure> {
        let Some(folder) = &self.resume else { return Ok(None) };
        let (checkpoint, problems) = checkpoint::newest(folder).map_err(Error::from)?;
        problems.iter().for_each(|problem| eprintln!("warning: passed over {problem}"));
        Ok(Some(checkpoint))
    }
}

pub fn run(args: &TrainArgs) -> Result<(), Failure> {
    let folder = args.check_outputs()?;
    let resumed = args.resumed()?;
    let seed = args.seed.or(resumed.as_ref().map(|c| c.progress.seed)).unwrap_or(0);
    let mut model = args.model.open_to_train()?;
    args.resize_head(&mut model, seed)?;
    let options = args.options(&model, seed)?;
    let data = Dataset::open(&args.data).map_err(Error::from)?;
    let held_out = args.eval.as_ref().map(Dataset::open).transpose().map_err(Error::from)?;

    let device = args.device.open()?;
    let preparing = Instant::now();
    let mut trainer = Trainer::new(&model, &device, &data, options)?;
    if let Some(checkpoint) = &resumed {
        trainer.resume(checkpoint)?;
    }
    let metric = args.metric.or(Metric::default_of(&args.objective.objective()?.loss));
    let evaluator = held_out.map(|data| trainer.evaluator(&model, &data, metric)).transpose()?;
    let (trained, total) = (trainer.trained().len(), trainer.total_steps());
    eprintln!(
        "{}: {trained} of {} parameters train on {} samples, {total} steps of {}; prepared in {:.1} s",
        device.info().name,
        model.parameters().len(),
        trainer.samples(),
        trainer.batch(),
        preparing.elapsed().as_secs_f64()
    );
    for adapter in trainer.adapters() {
        eprintln!("adapter of {}", adapter.describe());
    }
    for group in trainer.groups().iter().filter(|_| trainer.groups().len() > 1) {
        let TrainedGroup { optimizer, learning_rate, weights } = group;
        let (first, more) = (weights.first().map_or("", |name| name), weights.len().saturating_sub(1));
        let decay = optimizer.weight_decay();
        eprintln!("group of {first:?} and {more} more: learning rate {learning_rate}, weight decay {decay}");
    }
    eprintln!("a step takes {:.1} MiB of device memory", trainer.memory() as f64 / f64::from(1 << 20));
    if trainer.reads_logits() {
        eprintln!("the model ends in a softmax: the loss reads its operand");
    }
    if let Some(FrozenPrefix { operations, bytes_per_sample, bytes_in_file, .. }) = trainer.frozen_prefix() {
        let file = if bytes_in_file > 0 { format!(", {bytes_in_file} bytes in a temporary file") } else { String::new() };
        eprintln!(
            "{operations} operations before the weights that train run once per sample: {bytes_per_sample} bytes each{file}"
        );
    }
    let log = args.log.as_ref().map(|path| RunLog::open(path, resumed.is_some())).transpose().map_err(Error::from)?;
    let events = args.tensorboard.as_deref().map(EventFile::create).transpose().map_err(Error::from)?;
    let start = Event::Start {
        samples: trainer.samples(),
        batch: trainer.batch(),
        steps: total,
        first_step: trainer.step(),
        parameters: model.parameters().len(),
        trained,
        seed,
        device: device.info().name.clone(),
    };
    let progress = Progress::new(trainer.step(), total, trainer.batch());
    let mut run = Run {
        every: args.every.unwrap_or(trainer.steps_per_epoch()),
        trainer,
        evaluator,
        folder,
        best: None,
        patience: args.patience,
        keep_best: args.keep_best,
        record: Record { log, events, progress, started: Instant::now(), losses: Vec::new(), evaluations: Vec::new() },
    };
    run.record.log(&start)?;
    let outcome = run.train();
    run.record.progress.finish();
    outcome?;

    run.trainer.update(&mut model)?;
    if let Some(Best { step, weights: Some(weights), evaluation, .. }) = run.best.take() {
        eprintln!("the weights are those after {step} steps: {}", describe(&evaluation));
        model.set_weights(weights)?;
    }
    model.save(&args.out)?;
    eprintln!("wrote {}", args.out.display());
    if let Some(folder) = &args.peft {
        export_peft(&model, folder)?;
    }
    if let Some(path) = &args.merged {
        model.merge_adapters()?;
        model.save(path)?;
        eprintln!("wrote {}", path.display());
    }
    if let Some(path) = &args.plot {
        run.record.plot(path)?;
    }
    run.summary(&args.out, args.json)
}

/// A training run with all that watches it.
struct Run {
    trainer: Trainer,
    evaluator: Option<Evaluator>,
    folder: Option<CheckpointFolder>,
    /// Steps between checkpoints.
    every: u64,
    best: Option<Best>,
    /// Evaluations without a better one before the run stops.
    patience: Option<u64>,
    keep_best: bool,
    record: Record,
}

/// The best evaluation so far.
struct Best {
    step: u64,
    evaluation: Evaluation,
    /// Evaluations since then.
    since: u64,
    /// Of the model, where they are to be kept.
    weights: Option<Vec<(String, Tensor)>>,
}

/// What is remembered and shown of a run.
struct Record {
    log: Option<RunLog>,
    events: Option<EventFile>,
    progress: Progress,
    started: Instant,
    /// `(step, loss)`
    losses: Vec<(u64, f64)>,
    evaluations: Vec<(u64, Evaluation)>,
}

impl Run {
    fn train(&mut self) -> Result<(), Failure> {
        self.evaluate()?;
        self.record.progress.start();
        let total = self.trainer.total_steps();
        while self.trainer.step() < total {
            let step = self.trainer.step();
            let next_multiple = |interval: u64| (step / interval + 1) * interval;
            let checkpoint = self.folder.as_ref().map(|_| next_multiple(self.every));
            let evaluation = self.evaluator.as_ref().map(|_| next_multiple(self.trainer.steps_per_epoch()));
            let stop = [Some(total), checkpoint, evaluation].into_iter().flatten().min().unwrap_or(total);
            let record = &mut self.record;
            self.trainer.train_to(stop, |report| record.step(report))?;
            if checkpoint == Some(stop) || stop == total {
                self.checkpoint()?;
            }
            if evaluation == Some(stop) || stop == total {
                self.evaluate()?;
                if let Some(best) = self.best.as_ref().filter(|best| self.patience.is_some_and(|most| best.since >= most)) {
                    let best_step = best.step;
                    self.record.progress.note(&format!("stopped after {stop} steps: no evaluation after {best_step} was better"));
                    self.record.log(&Event::Stopped { step: stop, best_step })?;
                    return if checkpoint == Some(stop) { Ok(()) } else { self.checkpoint() };
                }
            }
        }
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<(), Failure> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let checkpoint = self.trainer.checkpoint()?;
        let path = folder.save(&checkpoint).map_err(Error::from)?;
        self.record.log(&Event::Checkpoint { step: checkpoint.progress.step, path })
    }

    fn evaluate(&mut self) -> Result<(), Failure> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(()) };
        let step = self.trainer.step();
        let evaluation = self.trainer.evaluate(evaluator)?;
        match &mut self.best {
            Some(best) if !evaluation.improves_on(&best.evaluation) => best.since += 1,
            best => {
                let weights = if self.keep_best { Some(self.trainer.tuned()?.into_iter().collect()) } else { None };
                *best = Some(Best { step, evaluation, since: 0, weights });
            }
        }
        self.record.evaluation(step, evaluation)
    }

    fn summary(&self, out: &Path, json: bool) -> Result<(), Failure> {
        let record = &self.record;
        let evaluation = |found: Option<&(u64, Evaluation)>| {
            found.map(|(_, e)| json!({ "loss": e.loss, "metric": e.metric.map(|m| m.0.name()), "value": e.metric.map(|m| m.1) }))
        };
        let seconds = record.started.elapsed().as_secs_f64();
        let loss = record.losses.last().map(|l| l.1);
        if json {
            return print_json(&json!({
                "steps": self.trainer.step(),
                "loss": loss,
                "before": evaluation(record.evaluations.first()),
                "after": evaluation(record.evaluations.last()),
                "seconds": seconds,
                "output": out,
            }));
        }
        let loss = loss.map(|l| format!(", last loss {l:.6}")).unwrap_or_default();
        let mut text = format!("{} steps in {seconds:.1} s{loss}\n", self.trainer.step());
        for (when, found) in [("before", record.evaluations.first()), ("after", record.evaluations.last())] {
            if let Some((_, e)) = found {
                text += &format!("{when}: {}\n", describe(e));
            }
        }
        print(&text)
    }
}

impl Record {
    fn log(&mut self, event: &Event) -> Result<(), Failure> {
        match &mut self.log {
            Some(log) => Ok(log.write(event).map_err(Error::from)?),
            None => Ok(()),
        }
    }

    fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        let StepReport { step, epoch, loss, learning_rate, loss_scale, skipped } = *report;
        self.losses.push((step, loss));
        self.progress.step(step, loss);
        if let (true, Some(scale)) = (skipped, loss_scale) {
            self.progress.note(&format!("step {step} changed nothing: gradients of the loss times {scale} are not finite"));
        }
        let (samples_per_second, seconds) = (self.progress.speed(step), self.seconds());
        if let Some(events) = &mut self.events {
            let values = [("train/loss", loss), ("train/learning_rate", learning_rate)];
            let scale = loss_scale.map(|scale| ("train/loss_scale", scale));
            events.scalars(step, &values.into_iter().chain(scale).collect::<Vec<_>>()).map_err(Error::from)?;
        }
        self.log(&Event::Step { step, epoch, loss, learning_rate, loss_scale, skipped, samples_per_second, seconds })
    }

    fn evaluation(&mut self, step: u64, evaluation: Evaluation) -> Result<(), Failure> {
        self.progress.note(&format!("evaluation after {step} steps: {}", describe(&evaluation)));
        self.evaluations.push((step, evaluation));
        let Evaluation { samples, loss, metric } = evaluation;
        let (metric, value) = metric.map(|(metric, value)| (metric.name(), value)).unzip();
        let seconds = self.seconds();
        if let Some(events) = &mut self.events {
            let metric = metric.map(|metric| format!("evaluation/{metric}"));
            let values = [Some(("evaluation/loss", loss)), metric.as_deref().zip(value)];
            events.scalars(step, &values.into_iter().flatten().collect::<Vec<_>>()).map_err(Error::from)?;
        }
        self.log(&Event::Evaluation { step, samples, loss, metric, value, seconds })
    }

    fn plot(&self, path: &Path) -> Result<(), Failure> {
        let evaluations: Vec<(u64, f64)> = self.evaluations.iter().map(|(step, e)| (*step, e.loss)).collect();
        let svg = loss_curve(&self.losses, &evaluations).map_err(Error::from)?;
        atomic_write(path, |file| file.write_all(svg.as_bytes())).map_err(Error::from)?;
        eprintln!("wrote {}", path.display());
        Ok(())
    }
}

fn describe(evaluation: &Evaluation) -> String {
    let metric = evaluation.metric.map(|(metric, value)| format!(", {} {value:.4}", metric.name())).unwrap_or_default();
    format!("loss {:.6}{metric} over {} samples", evaluation.loss, evaluation.samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(parse_count("0").is_err() && parse_count("2") == Ok(2));
        assert_eq!(parse_cache("off"), Ok(PrefixCache::Off));
        assert_eq!((parse_cache("3K"), parse_cache("9")), (Ok(PrefixCache::Memory(3072)), Ok(PrefixCache::Memory(9))));
        assert_eq!(parse_loss_scale("off"), Ok(LossScaleArg(None)));
        assert_eq!(parse_loss_scale("dynamic"), Ok(LossScaleArg(Some(LossScale::default()))));
        assert_eq!(parse_loss_scale("128"), Ok(LossScaleArg(Some(LossScale::fixed(128.0)))));
        assert!(["0", "-1", "inf", "nan", "1e39", "on"].iter().all(|text| parse_loss_scale(text).is_err()));
        assert!(parse_cache("G").is_err() && parse_cache("99999999999G").is_err());
    }
}
