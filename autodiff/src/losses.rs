//! Losses: a prediction and a target to a float scalar, by PyTorch's definitions with mean reduction.

mod cross_entropy;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use meganeura_ir::{CompareOp, DType, DTypeClass, Graph, GraphError, NodeId, Shape, Tensor, TensorType, UnaryOp};

use crate::formula::{Term, formula};
use cross_entropy::{CrossEntropy, class_axes, dense_axis, index_axis};

/// What training minimises.
///
/// For cross entropy the class axis is chosen by the target's shape. Index targets lack the class axis: axis 1 of the prediction
/// (`[n, c, d..]` against `[n, d..]`, PyTorch's layout; axis 0 of a vector), else the last axis (`[n, t, c]` against `[n, t]`, the
/// layout of language models); where both fit, axis 1. Dense targets have the prediction's shape, and axis 1 holds the classes.
#[derive(Clone, Debug, PartialEq)]
pub enum Loss {
    /// `torch.nn.functional.cross_entropy`: logits against class indices or class probabilities. The mean is over the indices that
    /// differ from `ignore_index`, each counting as much as the weight of its class; an index outside `0..c` is the caller's error, see
    /// [`Loss::check_target`]. Probabilities are weighted too, but their mean is over all of them.
    CrossEntropy { label_smoothing: f64, ignore_index: Option<i64>, class_weights: Option<Arc<[f64]>> },
    /// `torch.nn.functional.mse_loss`
    Mse,
    /// `torch.nn.functional.l1_loss`
    L1,
    /// `torch.nn.functional.huber_loss`
    Huber { delta: f64 },
    /// `torch.nn.functional.smooth_l1_loss`
    SmoothL1 { beta: f64 },
    /// `torch.nn.functional.binary_cross_entropy_with_logits`: logits against probabilities. `pos_weight` is one number, or one for each
    /// position on the last axis.
    BceWithLogits { pos_weight: Option<Arc<[f64]>> },
    /// `torch.nn.functional.kl_div` with its default reduction, the mean over all elements: the prediction holds log-probabilities, the
    /// target probabilities.
    Kl,
    /// The prediction is itself a loss, or one loss per sample: its mean. Takes no target.
    Output,
}

/// A kind of target that a loss takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetType {
    /// The type of the graph's target. Data of every class that `accepts` names converts to it.
    pub ty: TensorType,
    pub accepts: &'static [DTypeClass],
    /// What the elements mean.
    pub meaning: &'static str,
}

/// Why a loss cannot be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LossError {
    #[error("there is no loss {name:?}; there are {}", known.join(", "))]
    UnknownName { name: String, known: Vec<&'static str> },
    #[error("{loss}: the prediction is {ty}, a float is needed")]
    Prediction { loss: &'static str, ty: TensorType },
    #[error("{loss}: a scalar prediction has no classes")]
    NoClasses { loss: &'static str },
    #[error("{loss} of a prediction {prediction} takes {}, found {found}", describe(expected))]
    Target { loss: &'static str, prediction: TensorType, found: TensorType, expected: Vec<TargetType> },
    #[error("{loss} needs a target")]
    MissingTarget { loss: &'static str },
    #[error("{loss} takes no target")]
    UnusedTarget { loss: &'static str },
    #[error("{loss}: the target holds class {value} at position {position}, there are {classes} classes")]
    Label { loss: &'static str, value: i64, position: usize, classes: usize },
    #[error("{loss}: {attribute} is {value}, {expected} is needed")]
    Attribute { loss: &'static str, attribute: &'static str, value: f64, expected: &'static str },
    #[error("{loss}: {attribute} has {found} numbers, the prediction {prediction} needs {expected}")]
    Count { loss: &'static str, attribute: &'static str, found: usize, expected: usize, prediction: TensorType },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

fn describe(expected: &[TargetType]) -> String {
    let kinds: Vec<String> = expected.iter().map(|t| format!("{} ({})", t.ty, t.meaning)).collect();
    kinds.join(" or ")
}

const NUMBERS: &[DTypeClass] = &[DTypeClass::Float, DTypeClass::Int];
const ANY: &[DTypeClass] = &[DTypeClass::Float, DTypeClass::Int, DTypeClass::Bool];

impl Loss {
    /// Every loss by its name on the command line, with PyTorch's defaults.
    pub const TABLE: [(&'static str, Loss); 8] = [
        ("cross_entropy", Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: Some(-100), class_weights: None }),
        ("mse", Loss::Mse),
        ("bce", Loss::BceWithLogits { pos_weight: None }),
        ("l1", Loss::L1),
        ("huber", Loss::Huber { delta: 1.0 }),
        ("smooth_l1", Loss::SmoothL1 { beta: 1.0 }),
        ("kl", Loss::Kl),
        ("output", Loss::Output),
    ];

    /// The loss of that name, with its defaults.
    pub fn from_name(name: &str) -> Result<Loss, LossError> {
        Self::TABLE
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, loss)| loss.clone())
            .ok_or_else(|| LossError::UnknownName { name: name.to_owned(), known: Self::TABLE.iter().map(|(n, _)| *n).collect() })
    }

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Loss::CrossEntropy { .. } => "cross_entropy",
            Loss::Mse => "mse",
            Loss::BceWithLogits { .. } => "bce",
            Loss::L1 => "l1",
            Loss::Huber { .. } => "huber",
            Loss::SmoothL1 { .. } => "smooth_l1",
            Loss::Kl => "kl",
            Loss::Output => "output",
        }
    }

    /// The targets that go with a prediction, the preferred one first; none for [`Loss::Output`].
    ///
    /// # Errors
    /// The prediction is not a float, or has no axis of classes.
    pub fn target_types(&self, prediction: &TensorType) -> Result<Vec<TargetType>, LossError> {
        let loss = self.name();
        if !prediction.dtype.is_float() {
            return Err(LossError::Prediction { loss, ty: prediction.clone() });
        }
        let like = |accepts, meaning| TargetType { ty: prediction.clone(), accepts, meaning };
        Ok(match self {
            Loss::CrossEntropy { .. } => {
                let class_axes = class_axes(prediction.shape.rank());
                if class_axes.is_empty() {
                    return Err(LossError::NoClasses { loss });
                }
                let mut types: Vec<TargetType> = Vec::new();
                for axis in class_axes {
                    let ty = TensorType::new(DType::I64, prediction.shape.without(&[axis]));
                    if types.iter().all(|t| t.ty != ty) {
                        types.push(TargetType { ty, accepts: &[DTypeClass::Int], meaning: "class indices" });
                    }
                }
                types.push(like(&[DTypeClass::Float], "class probabilities"));
                types
            }
            Loss::Mse | Loss::L1 | Loss::Huber { .. } | Loss::SmoothL1 { .. } => vec![like(NUMBERS, "values")],
            Loss::BceWithLogits { .. } => vec![like(ANY, "probabilities")],
            Loss::Kl => vec![like(NUMBERS, "probabilities")],
            Loss::Output => Vec::new(),
        })
    }

    /// The type of the graph's target input for data of type `data`: the data's shape, in a dtype that the loss computes with.
    ///
    /// # Errors
    /// No target of that shape and dtype goes with the prediction.
    pub fn target_type(&self, prediction: &TensorType, data: &TensorType) -> Result<TensorType, LossError> {
        let expected = self.target_types(prediction)?;
        if expected.is_empty() {
            return Err(LossError::UnusedTarget { loss: self.name() });
        }
        match expected.iter().find(|t| t.ty.shape == data.shape && t.accepts.contains(&data.dtype.class())) {
            Some(found) => Ok(found.ty.clone()),
            None => Err(LossError::Target { loss: self.name(), prediction: prediction.clone(), found: data.clone(), expected }),
        }
    }

    /// Checks the values of a target: class indices are in `0..c` or equal the ignored index.
    ///
    /// # Errors
    /// As [`Loss::target_type`], and [`LossError::Label`] for the first index out of range.
    pub fn check_target(&self, prediction: &TensorType, data: &Tensor) -> Result<(), LossError> {
        self.target_type(prediction, data.ty())?;
        let Loss::CrossEntropy { ignore_index, .. } = self else { return Ok(()) };
        let Some(axis) = index_axis(&prediction.shape, data.ty()) else { return Ok(()) };
        let classes = prediction.shape[axis];
        let valid = |value: i64| (0..classes as i64).contains(&value) || Some(value) == *ignore_index;
        match data.to_i64_vec().into_iter().enumerate().find(|&(_, value)| !valid(value)) {
            Some((position, value)) => Err(LossError::Label { loss: self.name(), value, position, classes }),
            None => Ok(()),
        }
    }

    /// Appends the loss, a scalar of the prediction's dtype. The target has a type that [`Loss::target_type`] accepts.
    ///
    /// # Errors
    /// The prediction or the target does not fit, or an attribute of the loss is out of its range.
    pub fn build(&self, g: &mut Graph, prediction: NodeId, target: Option<NodeId>) -> Result<NodeId, LossError> {
        let loss = self.name();
        self.check_attributes()?;
        let ty = g.ty(prediction).clone();
        if self.target_types(&ty)?.is_empty() {
            if target.is_some() {
                return Err(LossError::UnusedTarget { loss });
            }
            return Ok(formula(g, |f| f.terms([prediction])[0].mean())?);
        }
        let target = target.ok_or(LossError::MissingTarget { loss })?;
        let target_ty = g.ty(target).clone();
        let computed = self.target_type(&ty, &target_ty)?;
        let target = g.cast(target, computed.dtype)?;
        if let Loss::CrossEntropy { label_smoothing, ignore_index, class_weights } = self {
            let axis = index_axis(&ty.shape, &target_ty);
            let classes = ty.shape[axis.unwrap_or(dense_axis(&ty.shape))];
            if let Some(weights) = class_weights {
                self.check_count("class_weights", weights.len(), classes, &ty)?;
            }
            let (smoothing, weights) = (*label_smoothing, class_weights.as_deref());
            let cross_entropy = CrossEntropy { smoothing, ignore_index: *ignore_index, weights };
            return Ok(match axis {
                Some(axis) => cross_entropy.of_indices(g, prediction, target, axis)?,
                None => cross_entropy.of_probabilities(g, prediction, target)?,
            });
        }
        let weight = match self {
            Loss::BceWithLogits { pos_weight: Some(weights) } => Some(self.weight_like(g, prediction, weights)?),
            _ => None,
        };
        Ok(formula(g, |f| {
            let [x, t] = f.terms([prediction, target]);
            self.elementwise(x, t, weight.map(|weight| f.terms([weight])[0])).mean()
        })?)
    }

    /// The loss of each element, for the losses that have one. `weight` is that of positive targets.
    fn elementwise<'f>(&self, x: Term<'f>, t: Term<'f>, weight: Option<Term<'f>>) -> Term<'f> {
        let difference = x - t;
        let distance = || difference.unary(UnaryOp::Abs);
        match *self {
            Loss::Mse => difference * difference,
            Loss::L1 => distance(),
            Loss::Huber { delta } => {
                let quadratic = 0.5 * difference * difference;
                distance().compare(CompareOp::Lt, delta).select(quadratic, delta * (distance() - 0.5 * delta))
            }
            Loss::SmoothL1 { beta: 0.0 } => distance(),
            Loss::SmoothL1 { beta } => {
                let quadratic = 0.5 * difference * difference / beta;
                distance().compare(CompareOp::Lt, beta).select(quadratic, distance() - 0.5 * beta)
            }
            Loss::BceWithLogits { .. } => {
                let surprise = (-x).unary(UnaryOp::Softplus);
                (1.0 - t) * x + weight.map_or(surprise, |weight| (1.0 + (weight - 1.0) * t) * surprise)
            }
            Loss::Kl => {
                let entropy = t.compare(CompareOp::Ne, 0.0).select(t * t.unary(UnaryOp::Log), 0.0);
                entropy - t * x
            }
            Loss::CrossEntropy { .. } | Loss::Output => x,
        }
    }

    /// One number, or one for each position on the last axis, in the type of `x`.
    fn weight_like(&self, g: &mut Graph, x: NodeId, weights: &[f64]) -> Result<NodeId, LossError> {
        let ty = g.ty(x).clone();
        if weights.len() != 1 {
            self.check_count("pos_weight", weights.len(), ty.shape.last().copied().unwrap_or(1), &ty)?;
        }
        let constant = g.constant(Tensor::from_f64(ty.dtype, [weights.len()], weights))?;
        let constant = if ty.shape.rank() == 0 { g.reshape(constant, Shape::scalar())? } else { constant };
        Ok(g.broadcast_to(constant, &ty.shape)?)
    }

    fn check_count(
        &self,
        attribute: &'static str,
        found: usize,
        expected: usize,
        prediction: &TensorType,
    ) -> Result<(), LossError> {
        match found == expected {
            true => Ok(()),
            false => Err(LossError::Count { loss: self.name(), attribute, found, expected, prediction: prediction.clone() }),
        }
    }

    fn check_attributes(&self) -> Result<(), LossError> {
        let check = |attribute, value: f64, fits: bool, expected| match fits {
            true => Ok(()),
            false => Err(LossError::Attribute { loss: self.name(), attribute, value, expected }),
        };
        let check_weights = |attribute, weights: &Option<Arc<[f64]>>| {
            let mut weights = weights.iter().flat_map(|weights| weights.iter());
            weights.try_for_each(|&w| check(attribute, w, w >= 0.0 && (w as f32).is_finite(), "finite numbers of at least 0"))
        };
        match self {
            Loss::CrossEntropy { label_smoothing: s, class_weights, .. } => {
                check("label_smoothing", *s, (0.0..=1.0).contains(s), "a number from 0 to 1")?;
                check_weights("class_weights", class_weights)
            }
            Loss::Huber { delta } => check("delta", *delta, *delta > 0.0 && delta.is_finite(), "a positive number"),
            Loss::SmoothL1 { beta } => check("beta", *beta, *beta >= 0.0 && beta.is_finite(), "a number of at least 0"),
            Loss::BceWithLogits { pos_weight } => check_weights("pos_weight", pos_weight),
            Loss::Mse | Loss::L1 | Loss::Kl | Loss::Output => Ok(()),
        }
    }
}
