//! Checkpoints of a run, and going on from them.

use super::Trainer;
use super::failure::Kept;
use crate::checkpoint::{Checkpoint, Progress, ResumeError};
use crate::error::Error;
use crate::guard::STOPPED;
use crate::settings::{Change, settings};

impl Trainer {
    /// Everything that [`Trainer::resume`] needs to go on from here.
    ///
    /// # Errors
    /// The device fails.
    pub fn checkpoint(&mut self) -> Result<Checkpoint, Error> {
        let tensors = self.read(|p| p.name != STOPPED)?;
        let checkpoint = Checkpoint { tensors, progress: self.progress() };
        self.keep(&checkpoint);
        Ok(checkpoint)
    }

    /// Makes a checkpoint what the run is repeated from.
    fn keep(&mut self, checkpoint: &Checkpoint) {
        let changed = checkpoint.tensors.iter().filter(|(name, _)| self.changed.contains(*name));
        let tensors = changed.map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        let Progress { step, plateau, .. } = checkpoint.progress;
        self.kept = Kept { step, tensors, plateaus: vec![(step, plateau)], unrepeatable: false };
    }

    fn progress(&self) -> Progress {
        Progress {
            step: self.step,
            seed: self.options.seed,
            settings: settings(&self.options, self.samples(), self.batch, self.schedule.total),
            plateau: self.schedule.plateau,
            best: None,
        }
    }

    /// Goes on where a checkpoint was made: the steps that follow are those that the run which made it would have done.
    ///
    /// # Errors
    /// The checkpoint was made with other options, or belongs to another model.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        match self.changes(checkpoint) {
            changes if changes.is_empty() => self.resume_with_changes(checkpoint),
            changes => Err(ResumeError::Changed { changes }.into()),
        }
    }

    /// Options that a checkpoint was made with and this run has otherwise.
    pub fn changes(&self, checkpoint: &Checkpoint) -> Vec<Change> {
        Change::between(&checkpoint.progress.settings, &self.progress().settings)
    }

    /// As [`Trainer::resume`], but with the options of this run, whatever the checkpoint was made with.
    ///
    /// # Errors
    /// The checkpoint belongs to another model, or lacks what the optimiser of this run remembers.
    pub fn resume_with_changes(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        for parameter in self.parameters.iter().filter(|p| p.name != STOPPED) {
            let name = parameter.name.clone();
            let tensor = checkpoint.tensors.get(&name).ok_or_else(|| ResumeError::MissingTensor { name: name.clone() })?;
            if *tensor.ty() != parameter.ty {
                let (found, expected) = (tensor.ty().to_string(), parameter.ty.to_string());
                return Err(ResumeError::TensorType { name, found, expected }.into());
            }
        }
        let Progress { step, plateau, .. } = checkpoint.progress;
        self.restore(&checkpoint.tensors, step)?;
        self.schedule.plateau = plateau;
        self.keep(checkpoint);
        Ok(())
    }
}
