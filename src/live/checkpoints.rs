//! Checkpoints of a live model: files `version-N.safetensors`, each a model that every command opens.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meganeura_import::ImportOptions;
use meganeura_ir::Tensor;
use meganeura_runtime::CheckpointError;
use meganeura_runtime::checkpoint::remove_partial_files;

use super::LiveError;
use crate::checkpoint::numbered_files;
use crate::error::Error;
use crate::model::Model;

const PREFIX: &str = "version-";

/// The folder of one model's checkpoints.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
    keep: usize,
}

/// What [`Folder::newest`] finds.
pub(super) struct Newest {
    /// A version and its model.
    pub found: Option<(u64, Model)>,
    /// What is wrong with the checkpoints that are newer.
    pub problems: Vec<String>,
}

/// A checkpoint that is on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    pub version: u64,
    pub path: PathBuf,
}

/// One version of the weights, on the host. [`Snapshot::save`] needs no device and may run on any thread.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(super) model: Arc<Model>,
    pub(super) changed: Arc<BTreeMap<String, Tensor>>,
    pub(super) version: u64,
    pub(super) folder: Folder,
}

impl Snapshot {
    /// Writes the checkpoint, which appears whole or not at all, then removes the oldest beyond those to keep.
    ///
    /// # Errors
    /// The file cannot be written, or a weight is too large for the dtype of the file. Earlier checkpoints are untouched.
    pub fn save(&self) -> Result<Saved, Error> {
        let path = self.folder.path.join(format!("{PREFIX}{}.safetensors", self.version));
        self.model.save_with(&path, &self.changed)?;
        let older = self.folder.list()?.into_iter().filter(|(version, _)| *version < self.version);
        for (_, old) in older.skip(self.folder.keep - 1) {
            match fs::remove_file(&old) {
                // Somebody else did.
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(CheckpointError { action: "remove", path: old, source }.into());
                }
                _ => {}
            }
        }
        Ok(Saved { version: self.version, path })
    }
}

impl Folder {
    /// Makes the folder where it is missing, and removes what a killed process left half-written.
    pub fn create(path: &Path, keep: usize) -> Result<Self, Error> {
        let failed = |source| CheckpointError { action: "make the folder", path: path.to_path_buf(), source };
        fs::create_dir_all(path).map_err(failed)?;
        remove_partial_files(path)?;
        Ok(Folder { path: path.to_path_buf(), keep: keep.max(1) })
    }

    fn list(&self) -> Result<Vec<(u64, PathBuf)>, Error> {
        let failed = |source| CheckpointError { action: "list", path: self.path.clone(), source };
        Ok(numbered_files(&self.path, PREFIX).map_err(failed)?)
    }

    /// The newest checkpoint that can be opened.
    ///
    /// # Errors
    /// The folder cannot be read, or the checkpoint is of another model than `model`.
    pub fn newest(&self, model: &Model, options: &ImportOptions) -> Result<Newest, Error> {
        let mut problems = Vec::new();
        for (version, path) in self.list()? {
            match Model::open_with(&path, options) {
                Ok(found) => match difference(model, &found) {
                    Some(difference) => return Err(LiveError::ForeignCheckpoint { path, difference }.into()),
                    None => return Ok(Newest { found: Some((version, found)), problems }),
                },
                Err(error) => problems.push(error.to_string()),
            }
        }
        Ok(Newest { found: None, problems })
    }
}

/// What tells the models apart, if they differ in more than values.
fn difference(model: &Model, found: &Model) -> Option<String> {
    let parameter = model.parameters().iter().find_map(|p| match found.imported().parameter(&p.name) {
        None => Some(format!("it has no {:?}", p.name)),
        Some(q) if (&q.shape, q.stored) != (&p.shape, p.stored) => {
            Some(format!("{:?} is {}{}, not {}{}", p.name, q.stored, q.shape, p.stored, p.shape))
        }
        Some(_) => None,
    });
    let outputs = |model: &Model| model.outputs().iter().map(|o| o.name.clone()).collect::<Vec<_>>();
    match parameter {
        Some(parameter) => Some(parameter),
        None if model.parameters().len() != found.parameters().len() => Some("it has more weights".into()),
        None if model.inputs() != found.inputs() => Some("its inputs are others".into()),
        None if outputs(model) != outputs(found) => Some("its outputs are others".into()),
        None => None,
    }
}
