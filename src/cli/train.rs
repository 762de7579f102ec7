//! `meganeura train`: fine-tuning.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use meganeura::checkpoint::{self, Checkpoint, CheckpointFolder, ResumeError};
use meganeura::import::Head;
use meganeura::log::{Event, Parameter, RunLog};
use meganeura::tensorboard::EventFile;
use meganeura::{
    Bindings, Change, Dataset, Decay, Error, FrozenPrefix, HeadOptions, Length, LoraOptions, LossScale, Metric, Model,
    ParameterPlan, Pattern, Phase, PlateauBy, PrefixCache, Settings, TrainOptions, Trainer,
};

use super::export::export_peft;
use super::images::ImageArgs;
use super::objective::ObjectiveArgs;
use super::optimizer::OptimizerArgs;
use super::phase::PhaseArgs;
use super::progress::Progress;
use super::training::{Best, Record, Run, describe, watched};
use super::{DeviceArgs, Failure, ModelArgs, check_folder, check_writable, plan, print_json};

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
    /// Samples along the first axis: .npz, .safetensors or .csv; or a folder of class folders with images (png or jpeg)
    #[arg(long, value_name = "TRAIN")]
    data: PathBuf,
    #[command(flatten)]
    images: ImageArgs,
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
    /// one-cycle:rise=0.3,div=25,final-div=1e4; counted in steps, of which steps=N limits linear, cosine and polynomial. Or, by the results
    /// of evaluations, plateau:factor=0.1,patience=10,threshold=1e-4,threshold-mode=rel,cooldown=0,min=0,by=loss (or by=metric)
    #[arg(long, default_value = "constant")]
    schedule: Decay,
    /// Steps over which the learning rate rises
    #[arg(long, default_value_t = 0, value_name = "N")]
    warmup: u64,
    /// What the loss is multiplied by while its gradients are computed: dynamic, as PyTorch's GradScaler does it, off, or a number
    /// [default: off: accelerated products scale their operands by themselves]
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
    /// Go on although options differ from those that the checkpoint was made with
    #[arg(long, requires = "resume")]
    resume_override: bool,
    /// Print which parameters train, why, and how, and stop
    #[arg(long)]
    dry_run: bool,
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
    #[arg(short = 'o', value_name = "OUT", required_unless_present = "dry_run")]
    out: Option<PathBuf>,
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
            loss_scale: self.loss_scale.and_then(|given| given.0),
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

    /// The layer that was replaced, if one was to be.
    fn resize_head(&self, model: &mut Model, seed: u64) -> Result<Option<Head>, Failure> {
        let Some(classes) = self.classes else { return Ok(None) };
        let (output, weight) = (self.objective.objective()?.output, self.head.clone());
        let options = HeadOptions { classes, output, weight, keep_rows: self.keep_rows, seed };
        let head = model.resize_head(&options)?;
        eprintln!("{}: {classes} classes instead of {}", head.weight.name, head.classes);
        Ok(Some(head))
    }

    /// What the run needs and cannot make later: every file that it will write.
    fn check_outputs(&self) -> Result<Option<CheckpointFolder>, Failure> {
        [self.out.as_ref(), self.log.as_ref(), self.plot.as_ref(), self.merged.as_ref()]
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

    /// What training does with each parameter, told where somebody chose among them.
    fn plan(
        &self,
        model: &Model,
        options: &TrainOptions,
        data: Option<&Dataset>,
        head: Option<&Head>,
    ) -> Result<Vec<ParameterPlan>, Failure> {
        let mut plan = model.training_plan(options, data)?;
        let of_head: Vec<&str> =
            head.iter().flat_map(|head| [Some(&head.weight), head.bias.as_ref()]).flatten().map(|t| t.name.as_str()).collect();
        for parameter in plan.iter_mut().filter(|p| p.rates.is_some() && of_head.contains(&p.name.as_str())) {
            parameter.reason = "the new head".to_owned();
        }
        let TrainOptions { train, freeze, lora, groups, no_decay_norms, .. } = options;
        let chosen = [train.is_empty(), freeze.is_empty(), lora.is_empty(), groups.is_empty(), !no_decay_norms].contains(&false);
        if chosen || head.is_some() || self.dry_run && !self.json {
            eprint!("{}", plan::table(&plan));
        }
        Ok(plan)
    }

    /// The data, and the held-out data. Names of classes go into the model.
    fn data(&self, model: &mut Model, bindings: &Bindings) -> Result<(Dataset, Option<Dataset>), Failure> {
        let mut classes = model.class_names();
        if self.classes.is_some() && self.data.is_dir() {
            // A new head has the classes of the data, after those that it keeps.
            let found = self.images.open(&self.data, model, bindings, None)?;
            let found = found.images().map(|images| images.classes().to_vec()).unwrap_or_default();
            let mut all = classes.filter(|_| self.keep_rows).unwrap_or_default();
            found.into_iter().for_each(|class| {
                if !all.contains(&class) {
                    all.push(class)
                }
            });
            classes = Some(all);
        }
        let data = self.images.open(&self.data, model, bindings, classes.as_deref())?;
        let classes = data.images().map(|images| images.classes().to_vec());
        if let Some(classes) = &classes {
            model.set_class_names(classes)?;
        }
        let held_out = self.eval.as_ref().map(|path| match path.is_dir() {
            true => self.images.open(path, model, bindings, classes.as_deref()),
            false => Ok(Dataset::open(path).map_err(Error::from)?),
        });
        Ok((data, held_out.transpose()?))
    }

    /// Continues where a checkpoint was made. Returns the best evaluation until then, and the weights it was of.
    fn resume(&self, trainer: &mut Trainer, checkpoint: &Checkpoint, watched: &Settings) -> Result<Option<Best>, Failure> {
        let mut changes = trainer.changes(checkpoint);
        changes.extend(Change::between(&checkpoint.progress.settings, watched));
        if !changes.is_empty() && !self.resume_override {
            return Err(Error::from(ResumeError::Changed { changes }).into());
        }
        let comparable = changes.iter().all(|change| !watched.contains_key(&change.flag));
        changes.iter().for_each(|change| eprintln!("warning: {change}"));
        trainer.resume_with_changes(checkpoint)?;
        Ok(Best::of(checkpoint).filter(|_| comparable))
    }
}

pub fn run(args: &TrainArgs) -> Result<(), Failure> {
    let resumed = args.resumed()?;
    let seed = args.seed.or(resumed.as_ref().map(|c| c.progress.seed)).unwrap_or(0);
    let mut model = args.model.open_to_train()?;
    let head = args.resize_head(&mut model, seed)?;
    let options = args.options(&model, seed)?;
    // Only new adapters depend on the data, by the sizes of the graph.
    let data = match args.dry_run && args.lora.is_empty() {
        true => None,
        false => Some(args.data(&mut model, &options.bindings)?),
    };
    let plan = args.plan(&model, &options, data.as_ref().map(|(data, _)| data), head.as_ref())?;
    let (Some(out), Some((data, held_out)), false) = (&args.out, data, args.dry_run) else {
        return if args.json { print_json(&plan::json(plan)) } else { Ok(()) };
    };
    let folder = args.check_outputs()?;
    let metric = args.metric.or(Metric::default_of(&options.objective.loss)).filter(|_| held_out.is_some());
    if let Decay::Plateau(plateau) = &options.decay
        && (held_out.is_none() || plateau.by == PlateauBy::Metric && metric.is_none())
    {
        return Err(Failure::input("--schedule plateau follows evaluations: give --eval, and --metric with by=metric"));
    }

    let device = args.device.open()?;
    let preparing = Instant::now();
    let mut trainer = Trainer::new(&model, &device, &data, options)?;
    let evaluator = held_out.map(|data| trainer.evaluator(&model, &data, metric)).transpose()?;
    let watched = watched(evaluator.as_ref(), metric, args.keep_best);
    let best = match &resumed {
        Some(checkpoint) => args.resume(&mut trainer, checkpoint, &watched)?,
        None => None,
    };
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
    let after = resumed.as_ref().map(|checkpoint| checkpoint.progress.step);
    let log = args.log.as_ref().map(|path| RunLog::open(path, after)).transpose().map_err(Error::from)?;
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
        fresh: resumed.is_none(),
        trainer,
        evaluator,
        folder,
        best,
        watched,
        patience: args.patience,
        keep_best: args.keep_best,
        record: Record::new(log, events, progress),
    };
    run.record.log(&start)?;
    run.record.log(&Event::Parameters { parameters: plan.into_iter().map(Parameter::from).collect() })?;
    let outcome = run.train();
    run.record.finish();
    outcome?;

    run.trainer.update(&mut model)?;
    if let Some(Best { so_far, weights: Some(weights) }) = run.best.take() {
        eprintln!("the weights are those after {} steps: {}", so_far.step, describe(&so_far.evaluation));
        model.set_weights(weights)?;
    }
    model.save(out)?;
    eprintln!("wrote {}", out.display());
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
    run.summary(out, args.json)
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
