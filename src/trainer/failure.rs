//! What went wrong in a step that is not finite.

use std::collections::BTreeMap;

use meganeura_ir::{ParameterId, ParameterRole, Tensor};

use super::Trainer;
use super::steps::Source;
use crate::error::{Error, NonFinite, Skipped};
use crate::guard::STOPPED;
use crate::schedule::PlateauState;

/// Steps that may be repeated to find out why a weight is not finite.
const MAX_REPLAY: u64 = 10_000;

/// A state from which a run can be repeated. Optimiser state that is not there is zero, other parameters are unchanged.
#[derive(Default)]
pub(super) struct Kept {
    pub step: u64,
    pub tensors: BTreeMap<String, Tensor>,
    /// The learning rate's state since then, after so many steps.
    pub plateaus: Vec<(u64, PlateauState)>,
    /// A step since then was on samples that nobody keeps.
    pub unrepeatable: bool,
}

impl Kept {
    /// The learning rate's state before a step.
    fn plateau(&self, step: u64) -> PlateauState {
        self.plateaus.iter().rev().find(|(after, _)| *after < step).map(|(_, state)| *state).unwrap_or_default()
    }
}

impl Trainer {
    /// Why a step was not finite. Afterwards the weights are those before the step that went wrong, where these can be had.
    pub(super) fn explain(&mut self, step: u64, loss: f64, source: Source<'_>) -> Result<Error, Error> {
        self.session.finish()?;
        self.forget_stop()?;
        let bad = self.first_non_finite(step, source)?;
        if let Some(NonFinite::Parameter { .. }) = bad
            && let Some(error) = self.replay(step - 1)?
        {
            return Ok(error);
        }
        Ok(match loss.is_finite() {
            true => Error::NonFiniteGradients { step, skipped: None, bad },
            false => Error::NonFiniteLoss { step, loss, bad },
        })
    }

    /// Why so many steps in a row had gradients that are not finite. The last was at the loss scale `scale`.
    pub(super) fn explain_skips(&mut self, step: u64, scale: f64, source: Source<'_>) -> Result<Error, Error> {
        let bad = self.first_non_finite(step, source)?;
        Ok(Error::NonFiniteGradients { step, skipped: Some(Skipped { steps: self.skipped, scale }), bad })
    }

    /// Repeats the run from the state that was kept up to the step that made the weights bad, and looks at that one.
    fn replay(&mut self, step: u64) -> Result<Option<Error>, Error> {
        let first = self.kept.step + 1;
        if self.kept.unrepeatable || step < first || step - first > MAX_REPLAY {
            return Ok(None);
        }
        let kept = std::mem::take(&mut self.kept);
        let restored = self.restore(&kept.tensors, kept.step);
        self.kept = kept;
        restored?;
        for step in first..step {
            self.schedule.plateau = self.kept.plateau(step);
            let (ticket, _) = self.submit(step, Source::Turn)?;
            self.outcome(ticket)?;
            self.step = step;
        }
        self.schedule.plateau = self.kept.plateau(step);
        let bad = self.first_non_finite(step, Source::Turn)?;
        Ok(bad.map(|bad| Error::NonFiniteGradients { step, skipped: None, bad: Some(bad) }))
    }

    /// Lets updates happen again.
    fn forget_stop(&mut self) -> Result<(), Error> {
        if let Some(id) = self.parameters.iter().position(|p| p.name == STOPPED) {
            self.session.write_parameter(ParameterId(id as u32), &Tensor::scalar_f32(0.0))?;
        }
        Ok(())
    }

    /// What was not finite in a step: its data, else a parameter that it changes, else the first of the values that were computed.
    fn first_non_finite(&mut self, step: u64, source: Source<'_>) -> Result<Option<NonFinite>, Error> {
        let finite = |tensor: &Tensor| !tensor.dtype().is_float() || tensor.to_f64_vec().iter().all(|v| v.is_finite());
        for batch in 0..self.options.accumulate {
            let samples: Vec<usize> = match source {
                Source::Turn => {
                    let rows = self.rows(step, batch);
                    self.order.1[rows].to_vec()
                }
                Source::Given(_) => (batch * self.batch..(batch + 1) * self.batch).collect(),
            };
            for sample in samples {
                let inputs = match source {
                    Source::Turn => self.feed.batch(&[sample])?,
                    Source::Given(samples) => samples.batch(&[sample])?,
                };
                if let Some((name, _)) = inputs.into_iter().find(|(_, tensor)| !finite(tensor)) {
                    return Ok(Some(NonFinite::Data { name, sample }));
                }
            }
        }
        let mut infinite = Vec::new();
        for id in (0..self.parameters.len() as u32).map(ParameterId) {
            if let Some((name, _)) = self.read_ids(&[id])?.into_iter().find(|(_, tensor)| !finite(tensor)) {
                // A mask may be infinite from the start.
                if self.changed.contains(&name) && self.kept.tensors.get(&name).is_none_or(finite) {
                    return Ok(Some(NonFinite::Parameter { name }));
                }
                infinite.push(id);
            }
        }
        for batch in 0..self.options.accumulate {
            self.prepare(step, batch, source)?;
            let inputs = self.inputs.named();
            if let Some(bad) = self.diagnosis.find(&self.session, &inputs, &infinite)? {
                return Ok(Some(NonFinite::Tensor(bad.into())));
            }
        }
        Ok(None)
    }

    /// Puts the run back to the state `tensors` after `step` steps, as [`Kept`] has it.
    pub(super) fn restore(&mut self, tensors: &BTreeMap<String, Tensor>, step: u64) -> Result<(), Error> {
        let zeros: Vec<Tensor> = self.parameters.iter().map(|p| Tensor::zeros(p.ty.clone())).collect();
        let parameters = (0..).map(ParameterId).zip(&self.parameters).zip(&zeros);
        let values = parameters.filter_map(|((id, parameter), zero)| match tensors.get(&parameter.name) {
            None if parameter.role == ParameterRole::Optimizer => Some((id, zero)),
            tensor => tensor.map(|tensor| (id, tensor)),
        });
        let values: Vec<_> = values.collect();
        self.session.write_parameters(&values)?;
        (self.step, self.skipped) = (step, 0);
        Ok(())
    }
}
