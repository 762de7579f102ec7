//! Learning rates over the steps of a run.

use std::f64::consts::PI;
use std::str::FromStr;

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    /// It does not.
    #[default]
    Constant,
    /// Half a cosine wave, to zero after the last step.
    Cosine,
    /// A straight line, to zero after the last step.
    Linear,
}

impl Decay {
    pub const ALL: [(&'static str, Decay); 3] =
        [("constant", Decay::Constant), ("cosine", Decay::Cosine), ("linear", Decay::Linear)];

    /// The share of the peak rate at `progress`, from 0 at the end of the warm-up to 1 after the last step.
    fn factor(self, progress: f64) -> f64 {
        match self {
            Decay::Constant => 1.0,
            Decay::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            Decay::Linear => 1.0 - progress,
        }
    }
}

impl FromStr for Decay {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, decay)| *decay);
        found.ok_or_else(|| format!("choose one of {}", Self::ALL.map(|(n, _)| n).join(", ")))
    }
}

/// A linear warm-up to `peak`, then `decay`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The largest learning rate.
    pub peak: f64,
    pub decay: Decay,
    /// Steps of warm-up. The last of them runs at `peak`.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
}

impl Schedule {
    /// The learning rate of `step`, which counts from 1.
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let decaying = self.total.saturating_sub(self.warmup).max(1) as f64;
        let progress = ((step - self.warmup - 1) as f64 / decaying).min(1.0);
        self.peak * self.decay.factor(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, warmup: u64, total: u64) -> Vec<f64> {
        let schedule = Schedule { peak: 2.0, decay, warmup, total };
        (1..=total).map(|step| schedule.learning_rate(step)).collect()
    }

    #[test]
    fn constant_without_warmup_is_the_peak_throughout() {
        assert_eq!(rates(Decay::Constant, 0, 4), [2.0; 4]);
    }

    #[test]
    fn warmup_rises_in_equal_steps_to_the_peak() {
        assert_eq!(rates(Decay::Constant, 4, 6), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]);
    }

    #[test]
    fn linear_falls_in_equal_steps_after_the_warmup() {
        assert_eq!(rates(Decay::Linear, 1, 5), [2.0, 2.0, 1.5, 1.0, 0.5]);
    }

    #[test]
    fn cosine_is_at_half_the_peak_halfway() {
        let rates = rates(Decay::Cosine, 0, 8);
        assert_eq!(rates[0], 2.0);
        assert!((rates[4] - 1.0).abs() < 1e-12);
        assert!(rates.is_sorted_by(|a, b| a > b));
    }

    #[test]
    fn steps_past_the_end_stay_at_the_last_rate_of_the_curve() {
        let schedule = Schedule { peak: 1.0, decay: Decay::Linear, warmup: 0, total: 2 };
        assert_eq!(schedule.learning_rate(10), 0.0);
    }
}
