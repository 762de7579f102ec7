//! The numbers that change from step to step, as formulas of the step and the learning rate: on the host in f64, or in the graph, where
//! only the graph knows how many steps there were.

use std::ops::{Add, Div, Mul};

use meganeura_ir::{BinaryOp, CompareOp, UnaryOp};

use super::{Optimizer, input};
use crate::formula::Term;

/// A number of a step.
pub(super) trait Number: Copy + Add<f64, Output = Self> + Mul<f64, Output = Self> + Div<Output = Self> {
    fn sqrt(self) -> Self;
    fn rsqrt(self) -> Self;
    fn power(self, exponent: f64) -> Self;
    fn least(self, other: Self) -> Self;
    /// `1 - base^self`
    fn complement_of_power(self, base: f64) -> Self;
    /// `first` where `self` is 1, else `later`.
    fn first_or(self, first: f64, later: f64) -> Self;
}

impl Number for f64 {
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    fn rsqrt(self) -> Self {
        self.sqrt().recip()
    }

    fn power(self, exponent: f64) -> Self {
        self.powf(exponent)
    }

    fn least(self, other: Self) -> Self {
        self.min(other)
    }

    fn complement_of_power(self, base: f64) -> Self {
        1.0 - base.powf(self)
    }

    fn first_or(self, first: f64, later: f64) -> Self {
        if self <= 1.0 { first } else { later }
    }
}

impl Number for Term<'_> {
    fn sqrt(self) -> Self {
        self.unary(UnaryOp::Sqrt)
    }

    fn rsqrt(self) -> Self {
        self.unary(UnaryOp::Rsqrt)
    }

    fn power(self, exponent: f64) -> Self {
        self.binary(BinaryOp::Pow, exponent)
    }

    fn least(self, other: Self) -> Self {
        self.binary(BinaryOp::Min, other)
    }

    /// `2 h / (1 + h)` with `h = tanh(-step ln(base) / 2)`, which keeps its digits in f32 where the power is almost 1.
    fn complement_of_power(self, base: f64) -> Self {
        if base == 0.0 {
            return self * 0.0 + 1.0;
        }
        let h = (self * (-0.5 * base.ln())).unary(UnaryOp::Tanh);
        h * 2.0 / (h + 1.0)
    }

    fn first_or(self, first: f64, later: f64) -> Self {
        let later = self * 0.0 + later;
        self.compare(CompareOp::Le, 1.0).select(later * 0.0 + first, later)
    }
}

impl Optimizer {
    /// The scalars that the updates read, by name, at a step that counts from 1.
    pub(super) fn numbers<N: Number>(&self, step: N, learning_rate: N) -> impl Iterator<Item = (&'static str, N)> {
        let plain = || Some((input::LEARNING_RATE, learning_rate));
        let shrink = || Some((input::SHRINK, learning_rate * -self.weight_decay() + 1.0));
        let step_size = |beta1| Some((input::STEP_SIZE, learning_rate / step.complement_of_power(beta1)));
        let correction = |beta2| Some((input::BIAS_CORRECTION, step.complement_of_power(beta2).sqrt()));
        let numbers: [Option<(&'static str, N)>; 3] = match *self {
            Optimizer::Sgd { momentum, dampening, .. } => {
                let weighs = momentum != 0.0 && dampening != 0.0;
                [plain(), weighs.then(|| (input::GRADIENT_WEIGHT, step.first_or(1.0, 1.0 - dampening))), None]
            }
            Optimizer::Adam { beta1, beta2, .. } => [step_size(beta1), correction(beta2), None],
            Optimizer::AdamW { beta1, beta2, .. } => [step_size(beta1), correction(beta2), shrink()],
            Optimizer::Lion { .. } => [plain(), shrink(), None],
            Optimizer::Adafactor { beta2_decay, .. } => [
                Some((input::RELATIVE_STEP, learning_rate.least(step.rsqrt()))),
                Some((input::VARIANCE_WEIGHT, step.power(beta2_decay))),
                shrink(),
            ],
            Optimizer::RmsProp { .. } => [plain(), None, None],
            Optimizer::Adagrad { learning_rate_decay, .. } => {
                [Some((input::LEARNING_RATE, learning_rate / ((step + -1.0) * learning_rate_decay + 1.0))), None, None]
            }
        };
        numbers.into_iter().flatten()
    }
}
