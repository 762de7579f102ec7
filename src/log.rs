//! The log of a run: one JSON object per line, so that any tool can follow it while it grows.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// What is about to run.
    Start {
        samples: usize,
        batch: usize,
        steps: u64,
        first_step: u64,
        parameters: usize,
        trained: usize,
        seed: u64,
        device: String,
    },
    /// One optimiser step. `step` counts from 1, `epoch` from 0; `seconds` since the start of the run.
    Step {
        step: u64,
        epoch: u64,
        loss: f64,
        learning_rate: f64,
        /// What the loss was multiplied by, where it is scaled.
        #[serde(skip_serializing_if = "Option::is_none")]
        loss_scale: Option<f64>,
        /// The gradients were not finite, so that the step changed no weights.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        skipped: bool,
        samples_per_second: f64,
        seconds: f64,
    },
    /// A pass over the evaluation data after `step` steps.
    Evaluation { step: u64, samples: usize, loss: f64, metric: Option<&'static str>, value: Option<f64>, seconds: f64 },
    /// The evaluations after `step` stopped getting better; the best one was after `best_step` steps.
    Stopped { step: u64, best_step: u64 },
    /// A checkpoint that is complete on disk.
    Checkpoint { step: u64, path: PathBuf },
}

/// A log file. Every line is on its way to disk when [`RunLog::write`] returns.
#[derive(Debug)]
pub struct RunLog {
    file: File,
    path: PathBuf,
}

/// The log cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the log {path}: {source}")]
pub struct LogError {
    pub path: PathBuf,
    pub source: std::io::Error,
}

impl RunLog {
    /// Starts a log at `path`, or continues the one that is there if `resume`.
    pub fn open(path: &Path, resume: bool) -> Result<Self, LogError> {
        let file = OpenOptions::new().create(true).write(true).append(resume).truncate(!resume).open(path);
        let file = file.map_err(|source| LogError { path: path.to_path_buf(), source })?;
        Ok(RunLog { file, path: path.to_path_buf() })
    }

    pub fn write(&mut self, event: &Event) -> Result<(), LogError> {
        let line = serde_json::to_vec(event).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        line.map_err(|source| LogError { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Event {
        let (loss_scale, skipped) = (None, false);
        Event::Step { step, epoch: 0, loss: 0.5, learning_rate: 0.1, loss_scale, skipped, samples_per_second: 10.0, seconds: 1.0 }
    }

    #[test]
    fn each_line_is_a_json_object_with_its_event() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let mut log = RunLog::open(&path, false).unwrap();
        log.write(&step(1)).unwrap();
        log.write(&Event::Checkpoint { step: 1, path: "c/step-1.safetensors".into() }).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines[0]["event"], "step");
        assert_eq!(lines[0]["loss"], 0.5);
        assert_eq!(lines[1]["event"], "checkpoint");
    }

    #[test]
    fn a_resumed_log_grows_and_a_new_one_starts_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        for (resume, lines) in [(false, 1), (true, 2), (false, 1)] {
            RunLog::open(&path, resume).unwrap().write(&step(1)).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), lines);
        }
    }

    #[test]
    fn an_unwritable_log_names_its_path() {
        let error = RunLog::open(Path::new("/nonexistent/run.jsonl"), false).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/run.jsonl"));
    }
}
