//! What evaluation reports besides the loss.

use std::str::FromStr;

use meganeura_autodiff::Loss;
use meganeura_ir::{ArgOp, BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, ReduceOp, Tensor, TensorType, UnaryOp};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// A figure of merit, averaged over the evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// The share of targets whose class has the largest prediction; with the loss `bce`, of those on the right side of 0.
    Accuracy,
    /// The share of targets whose class is among the five with the largest prediction.
    Top5,
    /// The mean over classes of `2 * hits / (predicted + actual)`: F1 with macro averaging, over the classes that are predicted or actual.
    F1,
    /// The mean squared difference between prediction and target.
    Mse,
    /// The exponential of the mean cross entropy.
    Perplexity,
}

impl Metric {
    pub const ALL: [(&'static str, Metric); 5] = [
        ("accuracy", Metric::Accuracy),
        ("top5", Metric::Top5),
        ("f1", Metric::F1),
        ("mse", Metric::Mse),
        ("perplexity", Metric::Perplexity),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Accuracy => "accuracy",
            Metric::Top5 => "top5",
            Metric::F1 => "f1",
            Metric::Mse => "mse",
            Metric::Perplexity => "perplexity",
        }
    }

    /// What is reported where nobody chose: the accuracy of classifiers.
    pub fn default_of(loss: &Loss) -> Option<Metric> {
        matches!(loss, Loss::CrossEntropy { .. }).then_some(Metric::Accuracy)
    }

    /// Whether more of it is better.
    pub fn rises(self) -> bool {
        matches!(self, Metric::Accuracy | Metric::Top5 | Metric::F1)
    }

    /// The metric of all data, from the sums of what [`Metric::sum`] gave and of what [`Metric::units`] counted.
    pub(crate) fn value(self, sums: &[f64], units: f64, mean_loss: f64) -> f64 {
        match self {
            Metric::Accuracy | Metric::Top5 | Metric::Mse => sums.first().copied().unwrap_or(f64::NAN) / units,
            Metric::Perplexity => mean_loss.exp(),
            Metric::F1 => {
                let (hits, rest) = sums.split_at(sums.len() / 3);
                let (predicted, actual) = rest.split_at(hits.len());
                let marked: Vec<(f64, f64)> =
                    hits.iter().zip(predicted.iter().zip(actual)).map(|(h, (p, a))| (*h, p + a)).collect();
                let scores: Vec<f64> =
                    marked.iter().filter(|(_, marks)| *marks > 0.0).map(|(h, marks)| 2.0 * h / marks).collect();
                scores.iter().sum::<f64>() / scores.len() as f64
            }
        }
    }

    /// Appends what adds up over batches, an f32 tensor: for F1 hits, predictions and targets of each class, else a scalar.
    pub(crate) fn sum(self, g: &mut Graph, loss: &Loss, prediction: NodeId, target: Option<NodeId>) -> Result<NodeId, Error> {
        let prediction_ty = g.ty(prediction).clone();
        let target_ty = target.map(|t| g.ty(t).clone());
        let unfit =
            |needed| Error::Metric { metric: self.name(), needed, prediction: prediction_ty.clone(), target: target_ty.clone() };
        let target = target.ok_or_else(|| unfit("a target"))?;
        let found = class_axis(&prediction_ty, g.ty(target));
        let classes = || found.ok_or_else(|| unfit("class indices or class probabilities"));
        match self {
            Metric::Perplexity if !matches!(loss, Loss::CrossEntropy { .. }) => Err(unfit("the loss cross_entropy")),
            Metric::Perplexity => Ok(g.constant_like(prediction, 0.0).and_then(|zero| sum_all(g, zero))?),
            Metric::Top5 => {
                let (axis, dense) = classes()?;
                Ok(among_largest(g, prediction, target, axis, dense)?)
            }
            Metric::F1 => {
                let (axis, dense) = classes()?;
                Ok(class_counts(g, prediction, target, axis, dense)?)
            }
            Metric::Accuracy => {
                let hit = if matches!(loss, Loss::BceWithLogits { .. }) {
                    sides_agree(g, prediction, target)?
                } else {
                    let (axis, dense) = classes()?;
                    classes_agree(g, prediction, target, axis, dense)?
                };
                let hit = g.cast(hit, DType::F32)?;
                Ok(sum_all(g, hit)?)
            }
            Metric::Mse => {
                if g.ty(target).shape != prediction_ty.shape {
                    return Err(unfit("a target of the prediction's shape"));
                }
                let target = g.cast(target, prediction_ty.dtype)?;
                let difference = g.sub(prediction, target)?;
                let square = g.mul(difference, difference)?;
                Ok(sum_all(g, square)?)
            }
        }
    }

    /// How many targets [`Metric::sum`] adds up over: those that `loss` does not ignore, or elements.
    pub(crate) fn units(self, loss: &Loss, target: &Tensor, samples: usize) -> f64 {
        match (self, loss) {
            (Metric::Accuracy | Metric::Top5, Loss::CrossEntropy { .. }) => counted_targets(loss, target, samples),
            (Metric::F1 | Metric::Perplexity, _) => samples as f64,
            _ => target.shape().numel() as f64,
        }
    }
}

impl FromStr for Metric {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, metric)| *metric);
        found.ok_or_else(|| format!("choose one of {}", Self::ALL.map(|(n, _)| n).join(", ")))
    }
}

/// What the mean of `loss` over a batch divides by: the weights of the class indices that are not ignored, else the samples.
pub(crate) fn loss_units(loss: &Loss, target: &Tensor, samples: usize) -> f64 {
    match loss {
        Loss::CrossEntropy { ignore_index, class_weights: Some(weights), .. } if target.dtype().is_int() => {
            let counted = target.to_i64_vec().into_iter().filter(|class| Some(*class) != *ignore_index);
            counted.filter_map(|class| weights.get(usize::try_from(class).ok()?)).sum()
        }
        _ => counted_targets(loss, target, samples),
    }
}

/// Class indices that are not ignored, else samples.
fn counted_targets(loss: &Loss, target: &Tensor, samples: usize) -> f64 {
    match loss {
        Loss::CrossEntropy { ignore_index: Some(ignored), .. } if target.dtype().is_int() => {
            target.to_i64_vec().iter().filter(|v| *v != ignored).count() as f64
        }
        _ => samples as f64,
    }
}

/// Where the classes of a prediction lie, as [`Loss`] decides it, and whether the target holds class probabilities.
pub(crate) fn class_axis(prediction: &TensorType, target: &TensorType) -> Option<(usize, bool)> {
    let last = prediction.shape.rank().checked_sub(1)?;
    if target.shape == prediction.shape {
        return target.dtype.is_float().then_some((last.min(1), true));
    }
    let fits = |axis: &usize| prediction.shape.without(&[*axis]) == target.shape;
    [last.min(1), last].into_iter().find(fits).map(|axis| (axis, false))
}

/// Whether the largest prediction is at the target's class. Ignored targets are no class, so they never agree.
fn classes_agree(g: &mut Graph, prediction: NodeId, target: NodeId, axis: usize, dense: bool) -> Result<NodeId, GraphError> {
    let largest = Op::ArgReduce { op: ArgOp::Max, axis };
    let predicted = g.push(largest.clone(), &[prediction])?;
    let wanted = if dense { g.push(largest, &[target])? } else { g.cast(target, DType::I64)? };
    g.compare(CompareOp::Eq, predicted, wanted)
}

/// The class of each target.
fn target_class(g: &mut Graph, target: NodeId, axis: usize, dense: bool) -> Result<NodeId, GraphError> {
    if dense { g.push(Op::ArgReduce { op: ArgOp::Max, axis }, &[target]) } else { g.cast(target, DType::I64) }
}

/// True where a class of `like` along `axis` is that of `class`. Ignored targets are no class.
fn one_hot(g: &mut Graph, like: NodeId, class: NodeId, axis: usize) -> Result<NodeId, GraphError> {
    let shape = g.ty(like).shape.clone();
    let classes = g.push(Op::Iota { dtype: DType::I64, shape: shape.clone(), axis }, &[])?;
    let class = g.broadcast_without(class, &shape, &[axis])?;
    g.compare(CompareOp::Eq, classes, class)
}

/// How many targets have fewer than five classes above theirs. What is not a number is above.
fn among_largest(g: &mut Graph, prediction: NodeId, target: NodeId, axis: usize, dense: bool) -> Result<NodeId, GraphError> {
    const LARGEST: f64 = 5.0;
    let class = target_class(g, target, axis, dense)?;
    let own = one_hot(g, prediction, class, axis)?;
    let zero = g.constant_like(prediction, 0.0)?;
    let logit = g.select(own, prediction, zero)?;
    let logit = g.reduce_keep(ReduceOp::Sum, logit, &[axis])?;
    let below = g.compare(CompareOp::Le, prediction, logit)?;
    let above = g.unary(UnaryOp::Not, below)?;
    let [above, own] = [above, own].map(|flags| {
        let ones = g.cast(flags, DType::F32)?;
        g.reduce(ReduceOp::Sum, ones, &[axis])
    });
    let (above, own) = (above?, own?);
    let limit = g.constant_like(above, LARGEST)?;
    let near = g.compare(CompareOp::Lt, above, limit)?;
    let near = g.cast(near, DType::F32)?;
    let hits = g.mul(near, own)?;
    sum_all(g, hits)
}

/// For each class its hits, its predictions and its targets, one after the other: `[3 * classes]`.
fn class_counts(g: &mut Graph, prediction: NodeId, target: NodeId, axis: usize, dense: bool) -> Result<NodeId, GraphError> {
    let class = target_class(g, target, axis, dense)?;
    let largest = g.push(Op::ArgReduce { op: ArgOp::Max, axis }, &[prediction])?;
    let [actual, predicted] = [class, largest].map(|class| {
        let flags = one_hot(g, prediction, class, axis)?;
        g.cast(flags, DType::F32)
    });
    let (actual, predicted) = (actual?, predicted?);
    let counted = g.reduce_keep(ReduceOp::Sum, actual, &[axis])?;
    let predicted = g.mul(predicted, counted)?;
    let hits = g.mul(predicted, actual)?;
    let others: Vec<usize> = (0..g.ty(prediction).shape.rank()).filter(|&a| a != axis).collect();
    let counts = [hits, predicted, actual].into_iter().map(|x| g.reduce(ReduceOp::Sum, x, &others));
    let counts = counts.collect::<Result<Vec<_>, _>>()?;
    g.push(Op::Concat { axis: 0 }, &counts)
}

/// Whether logit and probability are both above even odds, or both not.
fn sides_agree(g: &mut Graph, logits: NodeId, probabilities: NodeId) -> Result<NodeId, GraphError> {
    let zero = g.constant_like(logits, 0.0)?;
    let half = g.constant_like(probabilities, 0.5)?;
    let predicted = g.compare(CompareOp::Gt, logits, zero)?;
    let wanted = g.compare(CompareOp::Gt, probabilities, half)?;
    let differ = g.binary(BinaryOp::Xor, predicted, wanted)?;
    g.unary(UnaryOp::Not, differ)
}

fn sum_all(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let axes: Vec<usize> = (0..g.ty(x).shape.rank()).collect();
    g.reduce(ReduceOp::Sum, x, &axes)
}

#[cfg(test)]
mod tests {
    use meganeura_ir::interpreter::{Environment, interpret};

    use super::*;

    const CROSS_ENTROPY: Loss = Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: Some(-100), class_weights: None };

    /// The metric of `prediction` against `target`, by the reference interpreter.
    fn mean(metric: Metric, loss: &Loss, prediction: &Tensor, target: &Tensor) -> f64 {
        let mut g = Graph::new();
        let p = g.input("p", prediction.ty().clone()).unwrap();
        let t = g.input("t", target.ty().clone()).unwrap();
        let sum = metric.sum(&mut g, loss, p, Some(t)).unwrap();
        g.output("sum", sum).unwrap();
        let environment = Environment::<f64>::from_tensors([prediction, target], []);
        let sums = interpret(&g, &environment).unwrap().outputs()[0].to_f64_vec();
        metric.value(&sums, metric.units(loss, target, prediction.shape()[0]), 0.5)
    }

    #[test]
    fn accuracy_counts_the_largest_logit() {
        let logits = Tensor::from_f32([3, 2], &[0.1, 0.9, 2.0, 1.0, -1.0, -2.0]);
        let labels = Tensor::from_i64(DType::I64, [3], &[1, 1, 0]);
        assert!((mean(Metric::Accuracy, &CROSS_ENTROPY, &logits, &labels) - 2.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn ignored_targets_are_not_counted() {
        let logits = Tensor::from_f32([1, 3, 2], &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
        let labels = Tensor::from_i64(DType::I64, [1, 3], &[1, 0, -100]);
        assert_eq!(mean(Metric::Accuracy, &CROSS_ENTROPY, &logits, &labels), 0.5);
    }

    #[test]
    fn class_probabilities_and_logits_of_one_class_have_an_accuracy_too() {
        let logits = Tensor::from_f32([2, 2], &[0.0, 1.0, 1.0, 0.0]);
        let probabilities = Tensor::from_f32([2, 2], &[0.2, 0.8, 0.3, 0.7]);
        assert_eq!(mean(Metric::Accuracy, &CROSS_ENTROPY, &logits, &probabilities), 0.5);
        let logits = Tensor::from_f32([4], &[-1.0, 2.0, 3.0, -4.0]);
        let labels = Tensor::from_f32([4], &[0.0, 1.0, 0.0, 1.0]);
        assert_eq!(mean(Metric::Accuracy, &Loss::BceWithLogits { pos_weight: None }, &logits, &labels), 0.5);
    }

    /// Six classes; ranks of the targets are 1, 5, 6 and ignored.
    #[test]
    fn top5_counts_targets_with_fewer_than_five_classes_above() {
        let row = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0];
        let logits = Tensor::from_f32([4, 6], &row.repeat(4));
        let labels = Tensor::from_i64(DType::I64, [4], &[0, 4, 5, -100]);
        assert!((mean(Metric::Top5, &CROSS_ENTROPY, &logits, &labels) - 2.0 / 3.0).abs() < 1e-6);
        let nan = Tensor::from_f32([1, 6], &[f32::NAN; 6]);
        assert_eq!(mean(Metric::Top5, &CROSS_ENTROPY, &nan, &Tensor::from_i64(DType::I64, [1], &[0])), 0.0);
    }

    /// `sklearn.metrics.f1_score([0, 0, 1, 2], [0, 1, 1, 1], average="macro")` is (2/3 + 1/2 + 0) / 3; the class 3 is nowhere.
    #[test]
    fn f1_is_the_mean_over_classes() {
        let predicted = [0usize, 1, 1, 1, 3];
        let logits: Vec<f32> = predicted.iter().flat_map(|&p| (0..4).map(move |c| if c == p { 1.0 } else { 0.0 })).collect();
        let labels = Tensor::from_i64(DType::I64, [5], &[0, 0, 1, 2, -100]);
        let found = mean(Metric::F1, &CROSS_ENTROPY, &Tensor::from_f32([5, 4], &logits), &labels);
        assert!((found - (2.0 / 3.0 + 0.5) / 3.0).abs() < 1e-6, "{found}");
    }

    #[test]
    fn perplexity_is_the_exponential_of_the_loss() {
        let logits = Tensor::from_f32([1, 2], &[0.1, 0.9]);
        let labels = Tensor::from_i64(DType::I64, [1], &[1]);
        assert_eq!(mean(Metric::Perplexity, &CROSS_ENTROPY, &logits, &labels), 0.5_f64.exp());
        let mut g = Graph::new();
        let p = g.input("p", logits.ty().clone()).unwrap();
        assert!(matches!(Metric::Perplexity.sum(&mut g, &Loss::Mse, p, Some(p)), Err(Error::Metric { .. })));
    }

    #[test]
    fn mse_is_the_mean_over_elements() {
        let a = Tensor::from_f32([1, 4], &[0.0, 1.0, 2.0, 3.0]);
        let b = Tensor::from_f32([1, 4], &[0.0, 0.0, 0.0, 1.0]);
        assert_eq!(mean(Metric::Mse, &Loss::Mse, &a, &b), 9.0 / 4.0);
    }

    #[test]
    fn accuracy_without_classes_is_an_error() {
        let mut g = Graph::new();
        let p = g.input("p", TensorType::new(DType::F32, [2, 3])).unwrap();
        let t = g.input("t", TensorType::new(DType::I64, [5])).unwrap();
        assert!(matches!(Metric::Accuracy.sum(&mut g, &CROSS_ENTROPY, p, Some(t)), Err(Error::Metric { .. })));
        assert!(matches!(Metric::Accuracy.sum(&mut g, &Loss::Output, p, None), Err(Error::Metric { .. })));
    }
}
