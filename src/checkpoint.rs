//! Checkpoints of a training run: a folder of files `step-N.safetensors`, each enough to continue exactly.
//!
//! A file holds the weights and statistics under their own names, in the dtype of training, the optimiser's state under `optimizer/..`,
//! perhaps the weights of the best evaluation under `best/..`, and in its metadata the [`Progress`] of the run. It appears in one step, so whatever kills the process, the newest file is whole.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use meganeura_ir::Tensor;
use meganeura_runtime::CheckpointError;
use meganeura_runtime::checkpoint::remove_partial_files;
use serde::{Deserialize, Serialize};

use crate::evaluator::Evaluation;
use crate::schedule::PlateauState;
use crate::settings::Change;
use crate::tensor_file::{read_tensors, write_tensors};

/// The key of the progress in a file's metadata.
const PROGRESS_KEY: &str = "meganeura.progress";

/// Where a run stands, and what decides how it goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Completed optimiser steps. With the number of samples, the batch and the seed it decides which samples come next.
    pub step: u64,
    pub seed: u64,
    /// The options that decide what the run gives, by the names of their flags.
    pub settings: BTreeMap<String, String>,
    #[serde(default)]
    pub plateau: PlateauState,
    /// Of a run that is evaluated.
    #[serde(default)]
    pub best: Option<BestSoFar>,
}

/// The best evaluation of a run so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestSoFar {
    /// Steps that were complete.
    pub step: u64,
    pub evaluation: Evaluation,
    /// Evaluations since then.
    pub since: u64,
}

/// What is before the names of the weights of the best evaluation.
pub const BEST_PREFIX: &str = "best/";

/// A moment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub progress: Progress,
    /// Weights, statistics and the optimiser's state, by name.
    pub tensors: BTreeMap<String, Tensor>,
}

/// Why a run cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    #[error("cannot read the checkpoints in {}: {source}", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("{} holds no checkpoint (step-N.safetensors) to resume from", path.display())]
    None { path: PathBuf },
    #[error("no checkpoint in {} is readable; the newest: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error(
        "options are not those of the checkpoint: {}; give those that the run had, or --resume-override to go on with the new ones",
        changes.iter().map(Change::to_string).collect::<Vec<_>>().join(", ")
    )]
    Changed { changes: Vec<Change> },
    #[error("the checkpoint has no {name:?}: it belongs to another model or to other trained parameters")]
    MissingTensor { name: String },
    #[error("the checkpoint's {name:?} is {found}, the model needs {expected}")]
    TensorType { name: String, found: String, expected: String },
}

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
    keep: usize,
}

impl CheckpointFolder {
    /// Makes the folder where it is missing, and removes what a killed run left half-written. The newest `keep` checkpoints stay (at
    /// least one).
    pub fn create(path: &Path, keep: usize) -> Result<Self, CheckpointError> {
        let failed = |source| CheckpointError { action: "make the folder", path: path.to_path_buf(), source };
        fs::create_dir_all(path).map_err(failed)?;
        remove_partial_files(path)?;
        Ok(CheckpointFolder { path: path.to_path_buf(), keep: keep.max(1) })
    }

    /// Whether the folder holds no checkpoint yet.
    pub fn is_empty(&self) -> Result<bool, CheckpointError> {
        let list = list(&self.path).map_err(|source| CheckpointError { action: "list", path: self.path.clone(), source })?;
        Ok(list.is_empty())
    }

    /// Writes a checkpoint, then removes the oldest beyond those to keep. Returns its path.
    pub fn save(&self, checkpoint: &Checkpoint) -> Result<PathBuf, CheckpointError> {
        let path = self.path.join(format!("step-{}.safetensors", checkpoint.progress.step));
        let progress = serde_json::to_string(&checkpoint.progress).map_err(|e| CheckpointError {
            action: "describe",
            path: path.clone(),
            source: e.into(),
        })?;
        write_tensors(&path, &checkpoint.tensors, HashMap::from([(PROGRESS_KEY.to_string(), progress)]))?;
        let list = list(&self.path).map_err(|source| CheckpointError { action: "list", path: self.path.clone(), source })?;
        let older = list.into_iter().filter(|(step, _)| *step < checkpoint.progress.step);
        for (_, old) in older.skip(self.keep - 1) {
            fs::remove_file(&old).map_err(|source| CheckpointError { action: "remove", path: old, source })?;
        }
        Ok(path)
    }
}

/// The newest readable checkpoint of a folder, and what is wrong with those that are newer.
///
/// # Errors
/// There is none.
pub fn newest(folder: &Path) -> Result<(Checkpoint, Vec<String>), ResumeError> {
    let path = || folder.to_path_buf();
    let files = list(folder).map_err(|source| ResumeError::Folder { path: path(), source })?;
    let mut problems = Vec::new();
    for (_, file) in files {
        match read(&file) {
            Ok(checkpoint) => return Ok((checkpoint, problems)),
            Err(reason) => problems.push(format!("{}: {reason}", file.display())),
        }
    }
    match problems.into_iter().next() {
        None => Err(ResumeError::None { path: path() }),
        Some(reason) => Err(ResumeError::Unreadable { path: path(), reason }),
    }
}

fn read(path: &Path) -> Result<Checkpoint, String> {
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    let (tensors, metadata) = read_tensors(&bytes)?;
    let progress = metadata.get(PROGRESS_KEY).ok_or("it is no checkpoint: the progress of the run is missing")?;
    let progress = serde_json::from_str(progress).map_err(|e| e.to_string())?;
    Ok(Checkpoint { progress, tensors })
}

/// The checkpoints of a folder with their steps, the newest first.
fn list(folder: &Path) -> std::io::Result<Vec<(u64, PathBuf)>> {
    numbered_files(folder, "step-")
}

/// The files `<prefix>N.safetensors` of a folder with their numbers, the largest first.
pub(crate) fn numbered_files(folder: &Path, prefix: &str) -> std::io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|n| n.strip_prefix(prefix)?.strip_suffix(".safetensors")?.parse().ok());
        found.extend(number.map(|number| (number, entry.path())));
    }
    found.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    fn checkpoint(step: u64) -> Checkpoint {
        let settings = [("lr".to_string(), "0.1".to_string())].into();
        let evaluation = Evaluation { samples: 3, loss: 0.1 + 0.2, metric: Some((Metric::Top5, 1.0 / 3.0)) };
        let best = Some(BestSoFar { step: 1, evaluation, since: 2 });
        let progress = Progress { step, seed: u64::MAX, settings, plateau: PlateauState::default(), best };
        let tensors = [("w", 1.0), ("optimizer/momentum/w", 2.0)];
        let tensors = tensors.map(|(name, v)| (name.to_string(), Tensor::from_f32([2], &[v, step as f32])));
        Checkpoint { progress, tensors: tensors.into() }
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_comes_back_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointFolder::create(folder.path(), 5).unwrap();
        assert!(checkpoints.is_empty().unwrap());
        for step in [2, 9, 10] {
            checkpoints.save(&checkpoint(step)).unwrap();
        }
        assert_eq!(newest(folder.path()).unwrap(), (checkpoint(10), vec![]));
    }

    #[test]
    fn only_the_newest_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointFolder::create(folder.path(), 2).unwrap();
        for step in [8, 9, 10, 11] {
            checkpoints.save(&checkpoint(step)).unwrap();
        }
        assert_eq!(names(folder.path()), ["step-10.safetensors", "step-11.safetensors"]);
    }

    #[test]
    fn a_damaged_file_is_passed_over_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointFolder::create(folder.path(), 5).unwrap();
        checkpoints.save(&checkpoint(1)).unwrap();
        let newer = checkpoints.save(&checkpoint(2)).unwrap();
        let bytes = fs::read(&newer).unwrap();
        fs::write(&newer, &bytes[..bytes.len() - 1]).unwrap();
        let (found, problems) = newest(folder.path()).unwrap();
        assert_eq!(found.progress.step, 1);
        assert!(problems.len() == 1 && problems[0].contains("step-2.safetensors"), "{problems:?}");
    }

    #[test]
    fn a_folder_without_checkpoints_or_without_readable_ones_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(newest(folder.path()), Err(ResumeError::None { .. })));
        fs::write(folder.path().join("step-3.safetensors"), b"x").unwrap();
        assert!(matches!(newest(folder.path()), Err(ResumeError::Unreadable { .. })));
        assert!(matches!(newest(&folder.path().join("absent")), Err(ResumeError::Folder { .. })));
    }
}
