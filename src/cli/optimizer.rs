//! How `train` changes weights: the flags of optimisers.

use std::str::FromStr;

use clap::Args;
use meganeura::{Optimizer, ParameterGroup};

use super::Failure;

#[derive(Debug, Args)]
#[cfg_attr(test, derive(Clone))]
pub struct OptimizerArgs {
    /// sgd, adam, adamw, lion, adafactor, rmsprop or adagrad
    #[arg(long, default_value = "adamw", value_parser = parse_optimizer)]
    optimizer: Optimizer,
    /// The learning rate
    #[arg(long, default_value_t = 1e-3, value_name = "X", value_parser = parse_rate)]
    pub lr: f64,
    /// Weight decay [default: 0.01 for adamw, else 0]
    #[arg(long, value_name = "X")]
    weight_decay: Option<f64>,
    /// No weight decay of norms and biases, which are the weights of one dimension
    #[arg(long)]
    pub no_decay_norms: bool,
    /// Weights with a learning rate or weight decay of their own, for instance head.*:lr=10x,weight-decay=0 (may be repeated; the first
    /// that matches counts)
    #[arg(long, value_name = "GLOB:SETTINGS")]
    pub group: Vec<ParameterGroup>,
    /// Keep a moving average of the weights of this decay, for instance 0.999: it is what is evaluated and written
    #[arg(long, value_name = "DECAY", value_parser = parse_fraction)]
    pub ema: Option<f64>,
    /// Momentum, of sgd and rmsprop [default: 0]
    #[arg(long, value_name = "X")]
    momentum: Option<f64>,
    /// Dampening of the momentum, of sgd [default: 0]
    #[arg(long, value_name = "X")]
    dampening: Option<f64>,
    /// Nesterov momentum, of sgd
    #[arg(long)]
    nesterov: bool,
    /// Decay rates of the moments, of adam, adamw and lion [default: 0.9,0.999; of lion 0.9,0.99]
    #[arg(long, value_name = "A,B", value_parser = parse_betas)]
    betas: Option<(f64, f64)>,
    /// Divide by the largest second moment so far, of adam and adamw
    #[arg(long)]
    amsgrad: bool,
    /// What is added to divisors, of adam, adamw, rmsprop and adagrad [default: 1e-8; of adagrad 1e-10]
    #[arg(long, value_name = "X")]
    epsilon: Option<f64>,
    /// Decay rate of the mean square, of rmsprop [default: 0.99]
    #[arg(long, value_name = "X")]
    alpha: Option<f64>,
    /// Subtract the squared mean from the mean square, of rmsprop
    #[arg(long)]
    centered: bool,
    /// Decay of the learning rate, of adagrad [default: 0]
    #[arg(long, value_name = "X")]
    lr_decay: Option<f64>,
    /// What sums of squares begin with, of adagrad [default: 0]
    #[arg(long, value_name = "X")]
    initial_accumulator: Option<f64>,
    /// The power of the step that the second moment's weight is, of adafactor [default: -0.8]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    beta2_decay: Option<f64>,
    /// The largest root mean square of an update, of adafactor [default: 1]
    #[arg(long, value_name = "X")]
    clip_threshold: Option<f64>,
}

fn parse_optimizer(name: &str) -> Result<Optimizer, String> {
    Optimizer::from_name(name).map_err(|e| e.to_string())
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match f64::from_str(text) {
        Ok(rate) if rate.is_finite() && rate >= 0.0 => Ok(rate),
        _ => Err("a number of at least 0 is needed".to_string()),
    }
}

fn parse_fraction(text: &str) -> Result<f64, String> {
    match f64::from_str(text.trim()) {
        Ok(value) if (0.0..1.0).contains(&value) => Ok(value),
        _ => Err(format!("{text:?} is not a number from 0 to below 1")),
    }
}

fn parse_betas(text: &str) -> Result<(f64, f64), String> {
    let (a, b) = text.split_once(',').ok_or("write A,B, for instance 0.9,0.999")?;
    Ok((parse_fraction(a)?, parse_fraction(b)?))
}

/// The attribute of an optimiser that a flag sets.
fn number<'a>(optimizer: &'a mut Optimizer, flag: &str) -> Option<&'a mut f64> {
    use Optimizer::{Adafactor, Adagrad, Adam, AdamW, Lion, RmsProp, Sgd};
    match (flag, optimizer) {
        ("momentum", Sgd { momentum, .. } | RmsProp { momentum, .. }) => Some(momentum),
        ("dampening", Sgd { dampening, .. }) => Some(dampening),
        ("betas", Adam { beta1, .. } | AdamW { beta1, .. } | Lion { beta1, .. }) => Some(beta1),
        ("second beta", Adam { beta2, .. } | AdamW { beta2, .. } | Lion { beta2, .. }) => Some(beta2),
        ("epsilon", Adam { epsilon, .. } | AdamW { epsilon, .. } | RmsProp { epsilon, .. } | Adagrad { epsilon, .. }) => {
            Some(epsilon)
        }
        ("alpha", RmsProp { alpha, .. }) => Some(alpha),
        ("lr-decay", Adagrad { learning_rate_decay, .. }) => Some(learning_rate_decay),
        ("initial-accumulator", Adagrad { initial_accumulator, .. }) => Some(initial_accumulator),
        ("beta2-decay", Adafactor { beta2_decay, .. }) => Some(beta2_decay),
        ("clip-threshold", Adafactor { clip_threshold, .. }) => Some(clip_threshold),
        _ => None,
    }
}

/// The switch of an optimiser that a flag sets.
fn switch<'a>(optimizer: &'a mut Optimizer, flag: &str) -> Option<&'a mut bool> {
    match (flag, optimizer) {
        ("nesterov", Optimizer::Sgd { nesterov, .. }) => Some(nesterov),
        ("amsgrad", Optimizer::Adam { amsgrad, .. } | Optimizer::AdamW { amsgrad, .. }) => Some(amsgrad),
        ("centered", Optimizer::RmsProp { centered, .. }) => Some(centered),
        _ => None,
    }
}

impl OptimizerArgs {
    /// # Errors
    /// A flag means nothing to the optimiser.
    pub fn build(&self) -> Result<Optimizer, Failure> {
        let mut optimizer = self.optimizer;
        let name = optimizer.name();
        let unused = |flag: &str| Failure::input(format!("--{flag} means nothing to the optimizer {name}"));
        let numbers = [
            ("momentum", self.momentum),
            ("dampening", self.dampening),
            ("betas", self.betas.map(|betas| betas.0)),
            ("second beta", self.betas.map(|betas| betas.1)),
            ("epsilon", self.epsilon),
            ("alpha", self.alpha),
            ("lr-decay", self.lr_decay),
            ("initial-accumulator", self.initial_accumulator),
            ("beta2-decay", self.beta2_decay),
            ("clip-threshold", self.clip_threshold),
        ];
        for (flag, value) in numbers.into_iter().filter_map(|(flag, value)| Some((flag, value?))) {
            *number(&mut optimizer, flag).ok_or_else(|| unused(flag))? = value;
        }
        let switches = [("nesterov", self.nesterov), ("amsgrad", self.amsgrad), ("centered", self.centered)];
        for (flag, _) in switches.into_iter().filter(|(_, set)| *set) {
            *switch(&mut optimizer, flag).ok_or_else(|| unused(flag))? = true;
        }
        Ok(self.weight_decay.map_or(optimizer, |decay| optimizer.with_weight_decay(decay)))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        optimizer: OptimizerArgs,
    }

    fn built(flags: &str) -> Result<Optimizer, String> {
        let flags = Flags::try_parse_from(std::iter::once("train").chain(flags.split_whitespace())).map_err(|e| e.to_string())?;
        flags.optimizer.build().map_err(|failure| failure.message)
    }

    #[test]
    fn flags_reach_the_optimizer_that_they_belong_to() {
        let sgd = built("--optimizer sgd --momentum 0.9 --nesterov --weight-decay 0.5").unwrap();
        assert_eq!(sgd, Optimizer::Sgd { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: 0.5 });
        let adam = built("--optimizer adam --betas 0.8,0.9 --epsilon 1e-3 --amsgrad").unwrap();
        assert_eq!(adam, Optimizer::Adam { beta1: 0.8, beta2: 0.9, epsilon: 1e-3, weight_decay: 0.0, amsgrad: true });
        let lion = built("--optimizer lion --betas 0.5,0.6").unwrap();
        assert_eq!(lion, Optimizer::Lion { beta1: 0.5, beta2: 0.6, weight_decay: 0.0 });
        let rmsprop = built("--optimizer rmsprop --alpha 0.5 --momentum 0.1 --centered").unwrap();
        assert!(matches!(rmsprop, Optimizer::RmsProp { alpha: 0.5, momentum: 0.1, centered: true, .. }));
        let adafactor = built("--optimizer adafactor --beta2-decay -0.5 --clip-threshold 2").unwrap();
        assert!(matches!(adafactor, Optimizer::Adafactor { beta2_decay: -0.5, clip_threshold: 2.0, .. }));
        let adagrad = built("--optimizer adagrad --lr-decay 0.1 --initial-accumulator 0.2").unwrap();
        assert!(matches!(adagrad, Optimizer::Adagrad { learning_rate_decay: 0.1, initial_accumulator: 0.2, .. }));
        assert_eq!(built(""), Ok(Optimizer::from_name("adamw").unwrap()));
    }

    #[test]
    fn flags_of_another_optimizer_are_refused() {
        for (flags, flag) in [
            ("--momentum 0.9", "--momentum means nothing to the optimizer adamw"),
            ("--optimizer sgd --betas 0.9,0.9", "--betas"),
            ("--optimizer lion --epsilon 1e-8", "--epsilon"),
            ("--optimizer rmsprop --amsgrad", "--amsgrad"),
        ] {
            let message = built(flags).unwrap_err();
            assert!(message.contains(flag), "{message}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(parse_rate("-1").is_err() && parse_rate("nan").is_err() && parse_rate("1e-3") == Ok(1e-3));
        assert!(parse_betas("0.9").is_err() && parse_betas("0.9,1").is_err() && parse_betas("0.9, 0.95") == Ok((0.9, 0.95)));
        assert!(built("--ema 1").is_err() && built("--group head").is_err());
    }
}
