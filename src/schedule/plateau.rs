//! Learning rates that follow the results of evaluations, by the formulas of `ReduceLROnPlateau`.

use serde::{Deserialize, Serialize};

/// The settings of [`Decay::Plateau`](super::Decay), with the meanings and defaults of `ReduceLROnPlateau`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plateau {
    pub factor: f64,
    /// Evaluations that may pass without a better one.
    pub patience: u64,
    /// How much better an evaluation must be than the best.
    pub threshold: f64,
    /// Whether `threshold` is a share of the best, not a difference.
    pub relative: bool,
    /// Evaluations after a reduction that do not count.
    pub cooldown: u64,
    /// The smallest rate.
    pub min: f64,
    /// Reductions by no more than this are not made.
    pub epsilon: f64,
    pub by: PlateauBy,
}

/// Which result of an evaluation [`Decay::Plateau`](super::Decay) follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlateauBy {
    Loss,
    Metric,
}

/// What [`Decay::Plateau`](super::Decay) remembers of the evaluations so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    best: Option<f64>,
    /// Evaluations since the best one, or since the last reduction.
    bad: u64,
    /// Evaluations to come that do not count.
    cooldown: u64,
    reductions: u64,
}

impl Plateau {
    /// Takes the result of an evaluation into account. `rises` tells whether more is better.
    pub(super) fn observe(&self, state: &mut PlateauState, value: f64, rises: bool) {
        let share = if rises { self.threshold + 1.0 } else { 1.0 - self.threshold };
        let better = match (state.best, self.relative) {
            // A first result that is not a number is not the best.
            (None, _) => value.is_finite(),
            (Some(best), true) if rises => value > best * share,
            (Some(best), true) => value < best * share,
            (Some(best), false) if rises => value > best + self.threshold,
            (Some(best), false) => value < best - self.threshold,
        };
        if better {
            (state.best, state.bad) = (Some(value), 0);
        } else {
            state.bad += 1;
        }
        if state.cooldown > 0 {
            (state.cooldown, state.bad) = (state.cooldown - 1, 0);
        }
        if state.bad > self.patience {
            *state = PlateauState { bad: 0, cooldown: self.cooldown, reductions: state.reductions + 1, ..*state };
        }
    }

    /// What has become of the rate `peak`.
    pub(super) fn reduced(&self, peak: f64, state: &PlateauState) -> f64 {
        let reduce = |rate: f64| {
            let lower = (rate * self.factor).max(self.min);
            if rate - lower > self.epsilon { lower } else { rate }
        };
        (0..state.reductions).fold(peak, |rate, _| reduce(rate))
    }
}
