//! The options that decide which numbers a training run gives, as the command line names them. A checkpoint holds them, so that a run does not
//! go on with others unnoticed.

use std::collections::BTreeMap;
use std::fmt::Display;

use glob::Pattern;
use meganeura_autodiff::{Loss, LossScale, Optimizer};
use meganeura_import::{Bindings, Mode};
use meganeura_ir::Tensor;

use crate::objective::Objective;
use crate::trainer::TrainOptions;

/// Values of options, by the names of their flags.
pub type Settings = BTreeMap<String, String>;

/// An option that a checkpoint has otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Without its dashes.
    pub flag: String,
    pub old: String,
    pub new: String,
}

impl Change {
    /// Options that both have, with different values.
    pub fn between(old: &Settings, new: &Settings) -> Vec<Change> {
        let changed = old.iter().filter_map(|(flag, old)| Some((flag, old, new.get(flag).filter(|new| *new != old)?)));
        changed.map(|(flag, old, new)| Change { flag: flag.clone(), old: old.clone(), new: new.clone() }).collect()
    }
}

impl Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "--{} {} became {}", self.flag, self.old, self.new)
    }
}

/// What a run of `samples` samples in batches of `batch` and of `steps` steps is made of.
pub(crate) fn settings(options: &TrainOptions, samples: usize, batch: usize, steps: u64) -> Settings {
    let TrainOptions { objective, optimizer, bindings, .. } = options;
    let Objective { loss, output, target } = objective;
    let schedule = &options.decay;
    let mut all: Vec<(&str, String)> = vec![
        ("data", format!("{samples} samples")),
        ("batch", batch.to_string()),
        ("accumulate", options.accumulate.to_string()),
        ("seed", options.seed.to_string()),
        ("loss", loss.name().to_owned()),
        ("target", optional(target.as_ref())),
        ("output", optional(output.as_ref())),
        ("optimizer", optimizer.name().to_owned()),
        ("lr", options.learning_rate.to_string()),
        ("weight-decay", optimizer.weight_decay().to_string()),
        ("no-decay-norms", options.no_decay_norms.to_string()),
        ("group", listed(&options.groups)),
        ("ema", optional(options.ema)),
        ("schedule", schedule.to_string()),
        ("warmup", options.warmup.to_string()),
        ("clip", optional(options.clip)),
        ("loss-scale", scale(options.loss_scale)),
        ("train", listed(&options.train.iter().map(Pattern::as_str).collect::<Vec<_>>())),
        ("freeze", listed(&options.freeze.iter().map(Pattern::as_str).collect::<Vec<_>>())),
        ("lora", listed(&options.lora)),
        ("dropout", mode(bindings.phase.dropout).to_owned()),
        ("batchnorm", mode(bindings.phase.batch_norm).to_owned()),
    ];
    all.extend(of_bindings(bindings));
    all.extend(of_loss(loss));
    all.extend(of_optimizer(optimizer));
    if schedule.follows_length() {
        all.push(("steps", steps.to_string()));
    }
    all.into_iter().map(|(flag, value)| (flag.to_owned(), value)).collect()
}

fn of_bindings(bindings: &Bindings) -> [(&'static str, String); 3] {
    let Bindings { dims, shapes, values, .. } = bindings;
    let shape = |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let numbers = |tensor: &Tensor| tensor.to_f64_vec().iter().map(f64::to_string).collect::<Vec<_>>().join(",");
    [
        ("dim", listed(&dims.iter().map(|(name, size)| format!("{name}={size}")).collect::<Vec<_>>())),
        ("input", listed(&shapes.iter().map(|(name, sizes)| format!("{name}={}", shape(sizes))).collect::<Vec<_>>())),
        ("value", listed(&values.iter().map(|(name, value)| format!("{name}={}", numbers(value))).collect::<Vec<_>>())),
    ]
}

fn of_loss(loss: &Loss) -> Vec<(&'static str, String)> {
    match loss {
        Loss::CrossEntropy { label_smoothing, ignore_index, class_weights } => vec![
            ("label-smoothing", label_smoothing.to_string()),
            ("ignore-index", optional(*ignore_index)),
            ("class-weights", listed(class_weights.as_deref().unwrap_or_default())),
        ],
        Loss::Huber { delta } | Loss::SmoothL1 { beta: delta } => vec![("delta", delta.to_string())],
        Loss::BceWithLogits { pos_weight } => vec![("pos-weight", listed(pos_weight.as_deref().unwrap_or_default()))],
        Loss::Mse | Loss::L1 | Loss::Kl | Loss::Output => Vec::new(),
    }
}

fn of_optimizer(optimizer: &Optimizer) -> Vec<(&'static str, String)> {
    let betas = |a: f64, b: f64| ("betas", format!("{a},{b}"));
    match *optimizer {
        Optimizer::Sgd { momentum, dampening, nesterov, weight_decay: _ } => {
            vec![("momentum", momentum.to_string()), ("dampening", dampening.to_string()), ("nesterov", nesterov.to_string())]
        }
        Optimizer::Adam { beta1, beta2, epsilon, amsgrad, weight_decay: _ }
        | Optimizer::AdamW { beta1, beta2, epsilon, amsgrad, weight_decay: _ } => {
            vec![betas(beta1, beta2), ("epsilon", epsilon.to_string()), ("amsgrad", amsgrad.to_string())]
        }
        Optimizer::Lion { beta1, beta2, weight_decay: _ } => vec![betas(beta1, beta2)],
        Optimizer::Adafactor { beta2_decay, epsilon1, epsilon2, clip_threshold, weight_decay: _ } => vec![
            ("beta2-decay", beta2_decay.to_string()),
            ("epsilon", format!("{epsilon1},{epsilon2}")),
            ("clip-threshold", clip_threshold.to_string()),
        ],
        Optimizer::RmsProp { alpha, epsilon, momentum, centered, weight_decay: _ } => vec![
            ("alpha", alpha.to_string()),
            ("epsilon", epsilon.to_string()),
            ("momentum", momentum.to_string()),
            ("centered", centered.to_string()),
        ],
        Optimizer::Adagrad { learning_rate_decay, initial_accumulator, epsilon, weight_decay: _ } => vec![
            ("lr-decay", learning_rate_decay.to_string()),
            ("initial-accumulator", initial_accumulator.to_string()),
            ("epsilon", epsilon.to_string()),
        ],
    }
}

fn scale(rule: Option<LossScale>) -> String {
    match rule {
        None => "off".to_owned(),
        Some(rule) if rule == LossScale::default() => "dynamic".to_owned(),
        Some(rule) if rule == LossScale::fixed(rule.initial) => rule.initial.to_string(),
        Some(LossScale { initial, growth, growth_interval, backoff }) => {
            format!("initial={initial},growth={growth},growth-interval={growth_interval},backoff={backoff}")
        }
    }
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::File => "file",
        Mode::Train => "train",
        Mode::Off => "off",
    }
}

fn optional<T: Display>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

fn listed<T: Display>(values: &[T]) -> String {
    match values {
        [] => "none".to_owned(),
        _ => values.iter().map(T::to_string).collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(change: impl FnOnce(&mut TrainOptions)) -> Settings {
        let mut options = TrainOptions::new(Objective::new(Loss::from_name("cross_entropy").unwrap()));
        change(&mut options);
        settings(&options, 10, 2, 5)
    }

    #[test]
    fn every_change_is_told_by_its_flag() {
        let changed = |change: fn(&mut TrainOptions)| {
            Change::between(&of(|_| {}), &of(change)).into_iter().map(|change| change.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(changed(|_| {}), [""; 0]);
        assert_eq!(changed(|o| o.learning_rate = 0.5), ["--lr 0.001 became 0.5"]);
        assert_eq!(
            changed(|o| o.optimizer = Optimizer::from_name("sgd").unwrap()),
            ["--optimizer adamw became sgd", "--weight-decay 0.01 became 0"]
        );
        assert_eq!(changed(|o| o.bindings.phase.batch_norm = Mode::Train), ["--batchnorm file became train"]);
        assert_eq!(changed(|o| o.decay = "step:every=5".parse().unwrap()), ["--schedule constant became step:every=5,gamma=0.1"]);
        assert_eq!(changed(|o| o.freeze = vec![Pattern::new("conv.*").unwrap()]), ["--freeze none became conv.*"]);
        assert_eq!(
            changed(|o| o.groups = vec!["a*:lr=2x,weight-decay=0".parse().unwrap()]),
            ["--group none became a*:lr=2x,weight-decay=0"]
        );
        assert_eq!(
            changed(|o| o.lora = vec!["*.weight:rank=8,alpha=16".parse().unwrap()]),
            ["--lora none became *.weight:rank=8,alpha=16"]
        );
        assert_eq!(changed(|o| o.loss_scale = Some(LossScale::default())), ["--loss-scale off became dynamic"]);
        assert_eq!(changed(|o| o.loss_scale = Some(LossScale::fixed(8.0))), ["--loss-scale off became 8"]);
        let smooth = |o: &mut TrainOptions| {
            o.objective.loss =
                Loss::CrossEntropy { label_smoothing: 0.1, ignore_index: None, class_weights: Some([1.0, 2.0].into()) };
        };
        let expected = ["--class-weights none became 1 2", "--ignore-index -100 became none", "--label-smoothing 0 became 0.1"];
        assert_eq!(changed(smooth), expected);
    }

    #[test]
    fn the_length_counts_where_the_schedule_follows_it() {
        assert!(!of(|_| {}).contains_key("steps"));
        assert_eq!(of(|o| o.decay = "cosine".parse().unwrap())["steps"], "5");
        assert!(!of(|o| o.decay = "cosine:steps=9".parse().unwrap()).contains_key("steps"));
    }
}
