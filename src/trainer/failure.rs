//! What went wrong in a step that is not finite.

use std::collections::BTreeMap;

use meganeura_ir::{ParameterId, ParameterRole, Tensor};

use super::Trainer;
use crate::error::{Error, NonFinite, Skipped};
use crate::guard::STOPPED;

/// Steps that may be repeated to find out why a weight is not finite.
const MAX_REPLAY: u64 = 10_000;

/// A state from which a run can be repeated. Optimiser state that is not there is zero, other parameters are unchanged.
#[derive(Default)]
pub(super) struct Kept {
    pub step: u64,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Trainer {
    /// Why a step was not finite. Afterwards the weights are those before the step that went wrong, where these can be had.
    pub(super) fn explain(&mut self, step: u64, loss: f64) -> Result<Error, Error> {
        self.session.finish()?;
        self.forget_stop()?;
        let bad = self.first_non_finite(step)?;
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
    pub(super) fn explain_skips(&mut self, step: u64, scale: f64) -> Result<Error, Error> {
        let bad = self.first_non_finite(step)?;
        Ok(Error::NonFiniteGradients { step, skipped: Some(Skipped { steps: self.skipped, scale }), bad })
    }

    /// Repeats the run from the state that was kept up to the step that made the weights bad, and looks at that one.
    fn replay(&mut self, step: u64) -> Result<Option<Error>, Error> {
        let first = self.kept.step + 1;
        if step < first || step - first > MAX_REPLAY {
            return Ok(None);
        }
        let kept = std::mem::take(&mut self.kept);
        let restored = self.restore(&kept);
        self.kept = kept;
        restored?;
        for step in first..step {
            let (ticket, _) = self.submit(step)?;
            self.outcome(ticket)?;
            self.step = step;
        }
        let bad = self.first_non_finite(step)?;
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
    fn first_non_finite(&mut self, step: u64) -> Result<Option<NonFinite>, Error> {
        let finite = |tensor: &Tensor| !tensor.dtype().is_float() || tensor.to_f64_vec().iter().all(|v| v.is_finite());
        let rows = self.rows(step);
        for sample in self.order.1[rows].iter().copied() {
            let inputs = self.feed.batch(&[sample])?;
            if let Some((name, _)) = inputs.into_iter().find(|(_, tensor)| !finite(tensor)) {
                return Ok(Some(NonFinite::Data { name, sample }));
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
            self.prepare(step, batch)?;
            let inputs = self.inputs.named();
            if let Some(bad) = self.diagnosis.find(&self.session, &inputs, &infinite)? {
                return Ok(Some(NonFinite::Tensor(bad.into())));
            }
        }
        Ok(None)
    }

    /// Puts the run back to a state that was kept.
    pub(super) fn restore(&mut self, kept: &Kept) -> Result<(), Error> {
        let zeros: Vec<Tensor> = self.parameters.iter().map(|p| Tensor::zeros(p.ty.clone())).collect();
        let parameters = (0..).map(ParameterId).zip(&self.parameters).zip(&zeros);
        let values = parameters.filter_map(|((id, parameter), zero)| match kept.tensors.get(&parameter.name) {
            None if parameter.role == ParameterRole::Optimizer => Some((id, zero)),
            tensor => tensor.map(|tensor| (id, tensor)),
        });
        let values: Vec<_> = values.collect();
        self.session.write_parameters(&values)?;
        (self.step, self.skipped) = (kept.step, 0);
        Ok(())
    }
}
