//! The steps of a run: what goes to the device, and what comes back.

use std::ops::Range;

use meganeura_ir::Tensor;
use meganeura_runtime::Ticket;

use super::{StepReport, Trainer, updates};
use crate::data::{Dataset, Samples, write_epoch_order};
use crate::error::Error;

/// Steps in a row without finite gradients after which no scale of the loss can help.
const MAX_SKIPPED: u64 = 100;

/// Where the samples of a step come from.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// Those of the run's data whose turn it is.
    Turn,
    /// As many as a step takes.
    Given(&'a Samples),
}

/// What the outputs of a step say.
pub(super) struct Outcome {
    loss: f64,
    /// It changed nothing because it is not finite, and nor do the steps after it.
    stopped: bool,
    loss_scale: Option<f64>,
    skipped: bool,
}

impl Trainer {
    /// Trains until `last` steps are complete, and tells `on_step` about each. The host prepares a step while the device computes the one
    /// before it.
    ///
    /// # Errors
    /// The device fails, `on_step` fails, or a loss or a gradient is not finite: [`Error::NonFiniteLoss`] and
    /// [`Error::NonFiniteGradients`] name the first tensor that is not. The weights are then those before that step. Where the loss is scaled,
    /// such gradients end the run only after many steps in a row.
    pub fn train_to<E: From<Error>>(
        &mut self,
        last: u64,
        mut on_step: impl FnMut(&StepReport) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut submitted = self.step;
        let mut in_flight: Option<(Ticket, StepReport)> = None;
        loop {
            // A step that may be the last of too many is waited for.
            let ahead = in_flight.is_none() || self.skipped + 1 < MAX_SKIPPED;
            let next = if submitted < last && ahead {
                submitted += 1;
                Some(self.submit(submitted, Source::Turn)?)
            } else {
                None
            };
            if let Some((ticket, mut report)) = std::mem::replace(&mut in_flight, next) {
                self.complete(ticket, &mut report, Source::Turn)?;
                on_step(&report)?;
            }
            if in_flight.is_none() && submitted >= last {
                return Ok(());
            }
        }
    }

    /// One step on other samples than those that are its turn, which an application has just collected: [`Trainer::batch`] of them, under the
    /// names that the trainer's data has.
    ///
    /// # Errors
    /// The samples do not fit, or are not as many; the device fails; the loss or a gradient is not finite.
    pub fn step_on(&mut self, data: &Dataset) -> Result<StepReport, Error> {
        let objective = &self.options.objective;
        let mut samples = Samples::bind(data, &self.model_inputs, objective.data_target())?;
        if samples.count() != self.batch() {
            return Err(Error::StepSamples { found: samples.count(), expected: self.batch() });
        }
        if let Some(ty) = &self.target {
            samples.convert_target(ty.dtype);
        }
        objective.check_targets(&samples, &self.prediction, self.batch)?;
        let (ticket, mut report) = self.submit(self.step + 1, Source::Given(&samples))?;
        self.complete(ticket, &mut report, Source::Given(&samples))?;
        self.kept.unrepeatable = true;
        Ok(report)
    }

    pub(super) fn submit(&mut self, step: u64, source: Source<'_>) -> Result<(Ticket, StepReport), Error> {
        let last = self.options.accumulate - 1;
        for batch in 0..last {
            self.prepare(step, batch, source)?;
            if let Some(accumulating) = &mut self.accumulating {
                let _unread = accumulating.submit_ordered(self.inputs.tensors())?;
            }
            self.prefetch_after(step, batch, source);
        }
        self.prepare(step, last, source)?;
        let ticket = self.session.submit_ordered(self.inputs.tensors())?;
        self.prefetch_after(step, last, source);
        let (epoch, learning_rate) = ((step - 1) / self.steps_per_epoch(), self.schedule.learning_rate(step));
        Ok((ticket, StepReport { step, epoch, loss: f64::NAN, learning_rate, loss_scale: None, skipped: false }))
    }

    /// Writes the inputs of one of the batches of a step.
    pub(super) fn prepare(&mut self, step: u64, batch: usize, source: Source<'_>) -> Result<(), Error> {
        match source {
            Source::Turn => {
                let rows = self.rows(step, batch);
                self.feed.write_batch(&self.order.1[rows], &mut self.inputs)?;
            }
            Source::Given(samples) => {
                let rows: Vec<usize> = (batch * self.batch..(batch + 1) * self.batch).collect();
                for (name, tensor) in self.feed.batch_of(samples, &rows)? {
                    self.inputs.get_mut(&name).into_iter().for_each(|place| place.clone_from(&tensor));
                }
            }
        }
        let values = updates(&self.groups, &self.options);
        for (position, value) in self.scalars.iter().zip(values.values(&self.schedule, step)) {
            position.iter().for_each(|&position| self.inputs.set_scalar(position, value));
        }
        // Each batch draws its own random numbers.
        let draw = (step - 1) * self.options.accumulate as u64 + 1 + batch as u64;
        self.inputs.set_random_key(self.options.seed, draw);
        Ok(())
    }

    /// Begins to read what comes after one of the batches of a step, where that takes time.
    fn prefetch_after(&mut self, step: u64, batch: usize, source: Source<'_>) {
        let (step, batch) = if batch + 1 < self.options.accumulate { (step, batch + 1) } else { (step + 1, 0) };
        if matches!(source, Source::Turn) && step <= self.schedule.total {
            let rows = self.rows(step, batch);
            self.feed.prefetch(&self.order.1[rows]);
        }
    }

    /// Waits for a step, and reports what came of it.
    fn complete(&mut self, ticket: Ticket, report: &mut StepReport, source: Source<'_>) -> Result<(), Error> {
        let Outcome { loss, stopped, loss_scale, skipped } = self.outcome(ticket)?;
        if stopped || !loss.is_finite() {
            return Err(self.explain(report.step, loss, source)?);
        }
        (report.loss, report.loss_scale, report.skipped) = (loss, loss_scale, skipped);
        self.step = report.step;
        self.skipped = if skipped { self.skipped + 1 } else { 0 };
        match loss_scale {
            Some(scale) if self.skipped >= MAX_SKIPPED => Err(self.explain_skips(report.step, scale, source)?),
            _ => Ok(()),
        }
    }

    pub(super) fn outcome(&mut self, ticket: Ticket) -> Result<Outcome, Error> {
        self.session.wait_into(ticket, &mut self.outputs)?;
        let scalar = |index: usize| self.outputs.get(index).and_then(Tensor::scalar_f64);
        Ok(Outcome {
            loss: scalar(0).unwrap_or(f64::NAN),
            stopped: scalar(1) != Some(0.0),
            loss_scale: scalar(2),
            skipped: scalar(3) == Some(0.0),
        })
    }

    /// The samples of one of the batches of a step, as positions in the order of its epoch.
    pub(super) fn rows(&mut self, step: u64, batch: usize) -> Range<usize> {
        let (epoch, position) = ((step - 1) / self.steps_per_epoch(), (step - 1) % self.steps_per_epoch());
        if self.order.0 != epoch {
            write_epoch_order(self.options.seed, epoch, &mut self.order.1);
            self.order.0 = epoch;
        }
        let start = position as usize * self.batch() + batch * self.batch;
        start..start + self.batch
    }
}
