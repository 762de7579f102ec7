//! A training run with all that watches it: checkpoints, evaluations, logs, and the best weights.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use meganeura::checkpoint::{BEST_PREFIX, BestSoFar, Checkpoint, CheckpointFolder};
use meganeura::log::{Event, RunLog};
use meganeura::plot::loss_curve;
use meganeura::runtime::atomic_write;
use meganeura::tensorboard::EventFile;
use meganeura::{Error, Evaluation, Evaluator, Metric, Settings, StepReport, Tensor, Trainer};
use serde_json::json;

use super::progress::Progress;
use super::{Failure, print, print_json};

/// A training run with all that watches it.
pub struct Run {
    pub trainer: Trainer,
    pub evaluator: Option<Evaluator>,
    pub folder: Option<CheckpointFolder>,
    /// Steps between checkpoints.
    pub every: u64,
    /// Whether it goes on from no checkpoint.
    pub fresh: bool,
    pub best: Option<Best>,
    /// The options that decide what evaluations give.
    pub watched: Settings,
    /// Evaluations without a better one before the run stops.
    pub patience: Option<u64>,
    pub keep_best: bool,
    pub record: Record,
}

/// The best evaluation so far.
pub struct Best {
    pub so_far: BestSoFar,
    /// Of the model, where they are to be kept.
    pub weights: Option<Vec<(String, Tensor)>>,
}

impl Best {
    /// What a checkpoint says of it.
    pub fn of(checkpoint: &Checkpoint) -> Option<Best> {
        let so_far = checkpoint.progress.best.clone()?;
        let named = |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix(BEST_PREFIX)?.to_owned(), tensor.clone()));
        let weights: Vec<_> = checkpoint.tensors.iter().filter_map(named).collect();
        Some(Best { so_far, weights: (!weights.is_empty()).then_some(weights) })
    }
}

/// The options that decide what evaluations give, by the names of their flags.
pub fn watched(evaluator: Option<&Evaluator>, metric: Option<Metric>, keep_best: bool) -> Settings {
    let Some(evaluator) = evaluator else { return Settings::new() };
    let values = [
        ("eval", format!("{} samples", evaluator.samples())),
        ("metric", metric.map_or("none", Metric::name).to_owned()),
        ("keep-best", keep_best.to_string()),
    ];
    values.into_iter().map(|(flag, value)| (flag.to_owned(), value)).collect()
}

/// What is remembered and shown of a run.
pub struct Record {
    log: Option<RunLog>,
    events: Option<EventFile>,
    progress: Progress,
    started: Instant,
    /// `(step, loss)`
    losses: Vec<(u64, f64)>,
    evaluations: Vec<(u64, Evaluation)>,
}

impl Run {
    pub fn train(&mut self) -> Result<(), Failure> {
        if self.fresh {
            self.evaluate()?;
        }
        self.record.progress.start();
        let total = self.trainer.total_steps();
        while self.trainer.step() < total && !self.is_exhausted() {
            let step = self.trainer.step();
            let next_multiple = |interval: u64| (step / interval + 1) * interval;
            let checkpoint = self.folder.as_ref().map(|_| next_multiple(self.every));
            let evaluation = self.evaluator.as_ref().map(|_| next_multiple(self.trainer.steps_per_epoch()));
            let stop = [Some(total), checkpoint, evaluation].into_iter().flatten().min().unwrap_or(total);
            let record = &mut self.record;
            self.trainer.train_to(stop, |report| record.step(report))?;
            if evaluation == Some(stop) || stop == total {
                self.evaluate()?;
            }
            // After the evaluation, of which a resumed run has to know.
            if checkpoint == Some(stop) || stop == total || self.is_exhausted() {
                self.checkpoint()?;
            }
        }
        if let Some(best) = self.best.as_ref().filter(|_| self.is_exhausted()) {
            let (step, best_step) = (self.trainer.step(), best.so_far.step);
            self.record.progress.note(&format!("stopped after {step} steps: no evaluation after {best_step} was better"));
            self.record.log(&Event::Stopped { step, best_step })?;
        }
        Ok(())
    }

    /// Whether too many evaluations in a row were no better than the best.
    fn is_exhausted(&self) -> bool {
        let since = self.best.as_ref().map_or(0, |best| best.so_far.since);
        self.patience.is_some_and(|most| since >= most)
    }

    fn checkpoint(&mut self) -> Result<(), Failure> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let mut checkpoint = self.trainer.checkpoint()?;
        checkpoint.progress.settings.extend(self.watched.clone());
        if let Some(Best { so_far, weights }) = &self.best {
            checkpoint.progress.best = Some(so_far.clone());
            let kept = weights.iter().flatten().map(|(name, tensor)| (format!("{BEST_PREFIX}{name}"), tensor.clone()));
            checkpoint.tensors.extend(kept);
        }
        let path = folder.save(&checkpoint).map_err(Error::from)?;
        self.record.log(&Event::Checkpoint { step: checkpoint.progress.step, path })
    }

    fn evaluate(&mut self) -> Result<(), Failure> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(()) };
        let step = self.trainer.step();
        let evaluation = self.trainer.evaluate(evaluator)?;
        if step > 0 {
            self.trainer.observe(&evaluation)?;
        }
        match &mut self.best {
            Some(best) if !evaluation.improves_on(&best.so_far.evaluation) => best.so_far.since += 1,
            best => {
                let weights = if self.keep_best { Some(self.trainer.tuned()?.into_iter().collect()) } else { None };
                *best = Some(Best { so_far: BestSoFar { step, evaluation, since: 0 }, weights });
            }
        }
        self.record.evaluation(step, evaluation)
    }

    pub fn summary(&self, out: &Path, json: bool) -> Result<(), Failure> {
        let record = &self.record;
        let before = record.evaluations.first().filter(|_| self.fresh);
        let evaluation = |found: Option<&(u64, Evaluation)>| {
            found.map(|(_, e)| json!({ "loss": e.loss, "metric": e.metric.map(|m| m.0.name()), "value": e.metric.map(|m| m.1) }))
        };
        let seconds = record.started.elapsed().as_secs_f64();
        let loss = record.losses.last().map(|l| l.1);
        if json {
            return print_json(&json!({
                "steps": self.trainer.step(),
                "loss": loss,
                "before": evaluation(before),
                "after": evaluation(record.evaluations.last()),
                "seconds": seconds,
                "output": out,
            }));
        }
        let loss = loss.map(|l| format!(", last loss {l:.6}")).unwrap_or_default();
        let mut text = format!("{} steps in {seconds:.1} s{loss}\n", self.trainer.step());
        for (when, found) in [("before", before), ("after", record.evaluations.last())] {
            if let Some((_, e)) = found {
                text += &format!("{when}: {}\n", describe(e));
            }
        }
        print(&text)
    }
}

impl Record {
    pub fn new(log: Option<RunLog>, events: Option<EventFile>, progress: Progress) -> Self {
        Record { log, events, progress, started: Instant::now(), losses: Vec::new(), evaluations: Vec::new() }
    }

    /// Takes away what was on the terminal only while the run went on.
    pub fn finish(&self) {
        self.progress.finish();
    }

    pub fn log(&mut self, event: &Event) -> Result<(), Failure> {
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

    pub fn plot(&self, path: &Path) -> Result<(), Failure> {
        let evaluations: Vec<(u64, f64)> = self.evaluations.iter().map(|(step, e)| (*step, e.loss)).collect();
        let svg = loss_curve(&self.losses, &evaluations).map_err(Error::from)?;
        atomic_write(path, |file| file.write_all(svg.as_bytes())).map_err(Error::from)?;
        eprintln!("wrote {}", path.display());
        Ok(())
    }
}

pub fn describe(evaluation: &Evaluation) -> String {
    let metric = evaluation.metric.map(|(metric, value)| format!(", {} {value:.4}", metric.name())).unwrap_or_default();
    format!("loss {:.6}{metric} over {} samples", evaluation.loss, evaluation.samples)
}
