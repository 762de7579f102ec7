//! Optimisers: gradients to updates of the graph, by PyTorch's formulas.

mod averaging;
mod clipping;
mod numbers;
mod rules;
mod scaling;
#[cfg(test)]
mod tests;

use meganeura_ir::{DType, Graph, GraphError, NodeId, ParameterId, ParameterInfo, TensorType};

pub use averaging::{Accumulation, EMA_PREFIX, ema_inputs, ema_value, exponential_moving_average};
pub use clipping::{Clipped, clip_by_global_norm};
use rules::Weight;
pub use scaling::{LossScale, LossScaling};

use crate::formula::formula;

/// How gradients change weights.
///
/// State is one parameter of role [`Optimizer`](meganeura_ir::ParameterRole::Optimizer) per weight and quantity, named
/// `optimizer/<quantity>/<weight>`, which starts at zero. What changes from step to step is a scalar f32 input of the graph: see
/// [`Optimizer::step_inputs`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.SGD`
    Sgd { momentum: f64, dampening: f64, nesterov: bool, weight_decay: f64 },
    /// `torch.optim.Adam`: weight decay is added to the gradient.
    Adam { beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64, amsgrad: bool },
    /// `torch.optim.AdamW`: weight decay shrinks the weight, apart from the gradient.
    AdamW { beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64, amsgrad: bool },
    /// Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (2023), with the defaults of the package lion-pytorch.
    Lion { beta1: f64, beta2: f64, weight_decay: f64 },
    /// `torch.optim.Adafactor`. `epsilon1` bounds the variance from below, `epsilon2` the root mean square of the weight.
    Adafactor { beta2_decay: f64, epsilon1: f64, epsilon2: f64, clip_threshold: f64, weight_decay: f64 },
    /// `torch.optim.RMSprop`
    RmsProp { alpha: f64, epsilon: f64, momentum: f64, centered: bool, weight_decay: f64 },
    /// `torch.optim.Adagrad`
    Adagrad { learning_rate_decay: f64, initial_accumulator: f64, epsilon: f64, weight_decay: f64 },
}

/// Why an optimiser cannot be applied.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OptimizerError {
    #[error("there is no optimizer {name:?}; there are {}", known.join(", "))]
    UnknownName { name: String, known: Vec<&'static str> },
    #[error("{optimizer}: {attribute} is {value}, {expected} is needed")]
    Attribute { optimizer: &'static str, attribute: &'static str, value: f64, expected: &'static str },
    #[error("sgd: Nesterov momentum needs a momentum and no dampening")]
    Nesterov,
    #[error("the graph has no parameter {0}")]
    UnknownParameter(u32),
    #[error("the gradient of {name:?} is {found}, the parameter {expected}")]
    GradientType { name: String, expected: TensorType, found: TensorType },
    #[error("{name:?} is {ty}: only floats are trained")]
    NotFloat { name: String, ty: TensorType },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// Names of the graph inputs that change from step to step.
mod input {
    pub const LEARNING_RATE: &str = "optimizer/learning_rate";
    /// What a gradient adds to the momentum buffer: `1 - dampening`, but 1 at the first step.
    pub const GRADIENT_WEIGHT: &str = "optimizer/gradient_weight";
    /// `learning_rate / (1 - beta1^step)`
    pub const STEP_SIZE: &str = "optimizer/step_size";
    /// `sqrt(1 - beta2^step)`
    pub const BIAS_CORRECTION: &str = "optimizer/bias_correction2_sqrt";
    /// `1 - learning_rate * weight_decay`
    pub const SHRINK: &str = "optimizer/shrink";
    /// `step^beta2_decay`
    pub const VARIANCE_WEIGHT: &str = "optimizer/one_minus_beta2";
    /// `min(learning_rate, 1 / sqrt(step))`
    pub const RELATIVE_STEP: &str = "optimizer/relative_step";
    /// What a weight adds to its moving average: `1 - decay`, but 1 at the first step.
    pub const EMA_WEIGHT: &str = "optimizer/ema_weight";
}

/// The name of an input in a group of parameters; the first group's are the plain ones.
fn input_name(base: &str, group: usize) -> String {
    match group {
        0 => base.to_owned(),
        _ => format!("{base}/{group}"),
    }
}

impl Optimizer {
    /// Every optimiser by its name on the command line, with PyTorch's defaults.
    pub const TABLE: [(&'static str, Optimizer); 7] = [
        ("sgd", Optimizer::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }),
        ("adam", Optimizer::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, amsgrad: false }),
        ("adamw", Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, amsgrad: false }),
        ("lion", Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }),
        (
            "adafactor",
            Optimizer::Adafactor {
                beta2_decay: -0.8,
                epsilon1: f32::EPSILON as f64,
                epsilon2: 1e-3,
                clip_threshold: 1.0,
                weight_decay: 0.0,
            },
        ),
        ("rmsprop", Optimizer::RmsProp { alpha: 0.99, epsilon: 1e-8, momentum: 0.0, centered: false, weight_decay: 0.0 }),
        ("adagrad", Optimizer::Adagrad { learning_rate_decay: 0.0, initial_accumulator: 0.0, epsilon: 1e-10, weight_decay: 0.0 }),
    ];

    /// The optimiser of that name, with its defaults.
    pub fn from_name(name: &str) -> Result<Optimizer, OptimizerError> {
        Self::TABLE.iter().find(|(n, _)| *n == name).map(|(_, o)| *o).ok_or_else(|| OptimizerError::UnknownName {
            name: name.to_owned(),
            known: Self::TABLE.iter().map(|(n, _)| *n).collect(),
        })
    }

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Adam { .. } => "adam",
            Optimizer::AdamW { .. } => "adamw",
            Optimizer::Lion { .. } => "lion",
            Optimizer::Adafactor { .. } => "adafactor",
            Optimizer::RmsProp { .. } => "rmsprop",
            Optimizer::Adagrad { .. } => "adagrad",
        }
    }

    pub fn weight_decay(&self) -> f64 {
        let mut optimizer = *self;
        *optimizer.weight_decay_mut()
    }

    /// The same optimiser with another weight decay.
    pub fn with_weight_decay(mut self, value: f64) -> Self {
        *self.weight_decay_mut() = value;
        self
    }

    fn weight_decay_mut(&mut self) -> &mut f64 {
        match self {
            Optimizer::Sgd { weight_decay, .. }
            | Optimizer::Adam { weight_decay, .. }
            | Optimizer::AdamW { weight_decay, .. }
            | Optimizer::Lion { weight_decay, .. }
            | Optimizer::Adafactor { weight_decay, .. }
            | Optimizer::RmsProp { weight_decay, .. }
            | Optimizer::Adagrad { weight_decay, .. } => weight_decay,
        }
    }

    /// The values of the graph's inputs at `step` (from 1), computed in f64.
    pub fn step_inputs(&self, step: u64, learning_rate: f64) -> Vec<(String, f32)> {
        self.group_inputs(0, step, learning_rate)
    }

    /// As [`Optimizer::step_inputs`], for the group of that number.
    pub fn group_inputs(&self, group: usize, step: u64, learning_rate: f64) -> Vec<(String, f32)> {
        let numbers = self.numbers(step.max(1) as f64, learning_rate);
        numbers.map(|(name, value)| (input_name(name, group), value as f32)).collect()
    }

    /// The values of [`Optimizer::group_inputs`], in its order, without memory for their names.
    pub fn group_values(&self, step: u64, learning_rate: f64) -> impl Iterator<Item = f32> + '_ {
        self.numbers(step.max(1) as f64, learning_rate).map(|(_, value)| value as f32)
    }

    /// The value of the one input of a group that [`Optimizer::apply_counted`] added.
    pub fn counted_input(group: usize, learning_rate: f64) -> (String, f32) {
        (input_name(input::LEARNING_RATE, group), learning_rate as f32)
    }

    /// Appends the state and the update of each parameter from its gradient, and the inputs that [`Optimizer::step_inputs`] fills.
    ///
    /// # Errors
    /// An attribute is out of its range, or a parameter is unknown, not a float, or of another type than its gradient.
    pub fn apply(&self, g: &mut Graph, gradients: &[(ParameterId, NodeId)]) -> Result<(), OptimizerError> {
        self.apply_group(g, 0, gradients)
    }

    /// As [`Optimizer::apply`], for parameters that have inputs of their own, which [`Optimizer::group_inputs`] fills: learning rate and
    /// weight decay may differ from group to group.
    ///
    /// # Errors
    /// As [`Optimizer::apply`].
    pub fn apply_group(&self, g: &mut Graph, group: usize, gradients: &[(ParameterId, NodeId)]) -> Result<(), OptimizerError> {
        self.apply_with(g, group, gradients, &[])
    }

    /// As [`Optimizer::apply_group`], where `step` is a scalar of the graph, from 1, and the learning rate the only input of the group.
    ///
    /// # Errors
    /// As [`Optimizer::apply`].
    pub fn apply_counted(
        &self,
        g: &mut Graph,
        group: usize,
        gradients: &[(ParameterId, NodeId)],
        step: NodeId,
    ) -> Result<(), OptimizerError> {
        let learning_rate = scalar(g, &input_name(input::LEARNING_RATE, group))?;
        let mut numbers = Vec::new();
        for (index, (name, _)) in self.numbers(1.0, 1.0).enumerate() {
            let node = formula(g, |f| {
                let [step, learning_rate] = f.terms([step, learning_rate]);
                self.numbers(step, learning_rate).nth(index).map_or(learning_rate, |(_, number)| number)
            })?;
            numbers.push((name, node));
        }
        self.apply_with(g, group, gradients, &numbers)
    }

    fn apply_with(
        &self,
        g: &mut Graph,
        group: usize,
        gradients: &[(ParameterId, NodeId)],
        scalars: &[(&'static str, NodeId)],
    ) -> Result<(), OptimizerError> {
        self.check_attributes()?;
        for &(parameter, gradient) in gradients {
            check_gradient(g, parameter, gradient)?;
        }
        for &(parameter, gradient) in gradients {
            self.update(Weight::new(g, parameter, gradient, group, scalars)?)?;
        }
        Ok(())
    }

    fn update(&self, mut w: Weight) -> Result<(), OptimizerError> {
        match *self {
            Optimizer::Sgd { momentum, dampening, nesterov, weight_decay } => {
                w.decay_gradient(weight_decay)?;
                let direction = match momentum {
                    0.0 => w.gradient,
                    _ => w.momentum(momentum, dampening, nesterov)?,
                };
                w.step(input::LEARNING_RATE, direction)
            }
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay, amsgrad } => {
                w.decay_gradient(weight_decay)?;
                let direction = w.adam([beta1, beta2], epsilon, amsgrad)?;
                w.step(input::STEP_SIZE, direction)
            }
            Optimizer::AdamW { beta1, beta2, epsilon, amsgrad, .. } => {
                let direction = w.adam([beta1, beta2], epsilon, amsgrad)?;
                w.shrink()?;
                w.step(input::STEP_SIZE, direction)
            }
            Optimizer::Lion { beta1, beta2, .. } => {
                let direction = w.lion([beta1, beta2])?;
                w.shrink()?;
                w.step(input::LEARNING_RATE, direction)
            }
            Optimizer::Adafactor { epsilon1, epsilon2, clip_threshold, .. } => {
                let direction = w.adafactor([epsilon1, epsilon2], clip_threshold)?;
                w.shrink()?;
                w.step(input::RELATIVE_STEP, direction)
            }
            Optimizer::RmsProp { alpha, epsilon, momentum, centered, weight_decay } => {
                w.decay_gradient(weight_decay)?;
                let direction = w.rmsprop(alpha, epsilon, momentum, centered)?;
                w.step(input::LEARNING_RATE, direction)
            }
            Optimizer::Adagrad { initial_accumulator, epsilon, weight_decay, .. } => {
                w.decay_gradient(weight_decay)?;
                let direction = w.adagrad(initial_accumulator, epsilon)?;
                w.step(input::LEARNING_RATE, direction)
            }
        }
    }

    fn check_attributes(&self) -> Result<(), OptimizerError> {
        use Range::{Any, AtLeastOne, Fraction, NotNegative, NotPositive};
        let attributes = match *self {
            Optimizer::Sgd { momentum, dampening, .. } => {
                vec![("momentum", momentum, NotNegative), ("dampening", dampening, Any)]
            }
            Optimizer::Adam { beta1, beta2, epsilon, .. } | Optimizer::AdamW { beta1, beta2, epsilon, .. } => {
                vec![("beta1", beta1, Fraction), ("beta2", beta2, Fraction), ("epsilon", epsilon, NotNegative)]
            }
            Optimizer::Lion { beta1, beta2, .. } => vec![("beta1", beta1, Fraction), ("beta2", beta2, Fraction)],
            Optimizer::Adafactor { beta2_decay, epsilon1, epsilon2, clip_threshold, .. } => vec![
                ("beta2_decay", beta2_decay, NotPositive),
                ("epsilon1", epsilon1, NotNegative),
                ("epsilon2", epsilon2, NotNegative),
                ("clip_threshold", clip_threshold, AtLeastOne),
            ],
            Optimizer::RmsProp { alpha, epsilon, momentum, .. } => {
                vec![("alpha", alpha, Fraction), ("epsilon", epsilon, NotNegative), ("momentum", momentum, NotNegative)]
            }
            Optimizer::Adagrad { learning_rate_decay, initial_accumulator, epsilon, .. } => vec![
                ("learning_rate_decay", learning_rate_decay, NotNegative),
                ("initial_accumulator", initial_accumulator, NotNegative),
                ("epsilon", epsilon, NotNegative),
            ],
        };
        let shared = ("weight_decay", self.weight_decay(), NotNegative);
        for (attribute, value, range) in attributes.into_iter().chain([shared]) {
            range.check(self.name(), attribute, value)?;
        }
        match *self {
            Optimizer::Sgd { momentum, dampening, nesterov: true, .. } if momentum == 0.0 || dampening != 0.0 => {
                Err(OptimizerError::Nesterov)
            }
            _ => Ok(()),
        }
    }
}

/// The numbers that an attribute may be.
#[derive(Clone, Copy, Debug)]
enum Range {
    Any,
    NotNegative,
    NotPositive,
    AtLeastOne,
    Fraction,
}

impl Range {
    fn check(self, optimizer: &'static str, attribute: &'static str, value: f64) -> Result<(), OptimizerError> {
        let (fits, expected) = match self {
            Range::Any => (true, "a finite number"),
            Range::NotNegative => (value >= 0.0, "a number of at least 0"),
            Range::NotPositive => (value <= 0.0, "a number of at most 0"),
            Range::AtLeastOne => (value >= 1.0, "a number of at least 1"),
            Range::Fraction => ((0.0..1.0).contains(&value), "a number from 0 up to 1"),
        };
        match fits && value.is_finite() {
            true => Ok(()),
            false => Err(OptimizerError::Attribute { optimizer, attribute, value, expected }),
        }
    }
}

fn check_gradient(g: &Graph, parameter: ParameterId, gradient: NodeId) -> Result<(), OptimizerError> {
    let info = info(g, parameter)?;
    if !info.ty.dtype.is_float() {
        return Err(OptimizerError::NotFloat { name: info.name.clone(), ty: info.ty.clone() });
    }
    let found = &g.nodes().get(gradient.index()).ok_or(GraphError::UnknownNode(gradient.0))?.ty;
    if *found != info.ty {
        let (name, expected, found) = (info.name.clone(), info.ty.clone(), found.clone());
        return Err(OptimizerError::GradientType { name, expected, found });
    }
    Ok(())
}

fn info(g: &Graph, parameter: ParameterId) -> Result<&ParameterInfo, OptimizerError> {
    g.parameters().get(parameter.0 as usize).ok_or(OptimizerError::UnknownParameter(parameter.0))
}

/// The scalar f32 input of that name, declared at first use.
fn scalar(g: &mut Graph, name: &str) -> Result<NodeId, GraphError> {
    match g.inputs().iter().position(|i| i.name == name) {
        Some(index) => g.push(meganeura_ir::Op::Input(meganeura_ir::InputId(index as u32)), &[]),
        None => g.input(name, TensorType::scalar(DType::F32)),
    }
}
