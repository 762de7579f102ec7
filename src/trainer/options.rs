//! How to train.

use glob::Pattern;
use meganeura_autodiff::{LossScale, Optimizer};
use meganeura_import::Bindings;

use crate::groups::ParameterGroup;
use crate::lora::LoraOptions;
use crate::objective::Objective;
use crate::prefix::PrefixCache;
use crate::schedule::Decay;

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Passes over the data.
    Epochs(u64),
    /// Optimiser steps.
    Steps(u64),
}

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    pub objective: Objective,
    pub optimizer: Optimizer,
    /// The largest learning rate of the schedule.
    pub learning_rate: f64,
    pub decay: Decay,
    /// Steps over which the learning rate rises to its largest.
    pub warmup: u64,
    /// The largest Euclidean norm of all gradients together; larger ones are scaled down to it.
    pub clip: Option<f64>,
    /// Weights with a learning rate or weight decay of their own.
    pub groups: Vec<ParameterGroup>,
    /// No weight decay of weights with at most one dimension: norms and biases.
    pub no_decay_norms: bool,
    /// What the loss is multiplied by while its gradients are computed, for arithmetic in which small ones would vanish. A step whose gradients are
    /// not finite changes no weights.
    pub loss_scale: Option<LossScale>,
    /// The decay of a moving average of the weights, if there is to be one.
    pub ema: Option<f64>,
    /// Samples per batch. Without it, what the model's inputs fix, else 32; at most what the data holds.
    pub batch: Option<usize>,
    /// Batches per step: the step follows the mean of their gradients.
    pub accumulate: usize,
    pub length: Length,
    /// Which weights train: those with a matching name. All that train by default where this is empty.
    pub train: Vec<Pattern>,
    /// Which of those do not train after all.
    pub freeze: Vec<Pattern>,
    /// Which weights get low-rank adapters. With adapters, new ones or those that the model has, these train, and besides only what `train`
    /// names.
    pub lora: Vec<LoraOptions>,
    /// Decides the order of the samples and all random numbers.
    pub seed: u64,
    /// Whether what training cannot change is computed once per sample, where it is needed more than once.
    pub cache: PrefixCache,
    /// The most device memory that the programs of a step may take, in bytes. To fit, they compute values again that they would otherwise keep
    /// for the backward pass. The evaluation and a frozen prefix take theirs beside.
    pub recompute: Option<u64>,
    /// Sizes that the data does not decide, and the phase of the training steps. Evaluation is always in inference.
    pub bindings: Bindings,
}

impl TrainOptions {
    /// One epoch of AdamW at a constant learning rate of 0.001 on every weight.
    pub fn new(objective: Objective) -> Self {
        TrainOptions {
            objective,
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, amsgrad: false },
            learning_rate: 1e-3,
            decay: Decay::Constant,
            warmup: 0,
            clip: None,
            groups: Vec::new(),
            no_decay_norms: false,
            ema: None,
            loss_scale: None,
            batch: None,
            accumulate: 1,
            length: Length::Epochs(1),
            train: Vec::new(),
            freeze: Vec::new(),
            lora: Vec::new(),
            seed: 0,
            cache: PrefixCache::default(),
            recompute: None,
            bindings: Bindings::default(),
        }
    }
}
