//! What evaluation reports besides the loss.

use std::str::FromStr;

use meganeura_autodiff::Loss;
use meganeura_ir::{ArgOp, BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, ReduceOp, Tensor, TensorType};

use crate::error::Error;

/// A figure of merit, averaged over the evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// The share of targets whose class has the largest prediction; with the loss `bce`, of those on the right side of 0.
    Accuracy,
    /// The mean squared difference between prediction and target.
    Mse,
}

impl Metric {
    pub const ALL: [(&'static str, Metric); 2] = [("accuracy", Metric::Accuracy), ("mse", Metric::Mse)];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Accuracy => "accuracy",
            Metric::Mse => "mse",
        }
    }

    /// What is reported where nobody chose: the accuracy of classifiers.
    pub fn default_of(loss: &Loss) -> Option<Metric> {
        matches!(loss, Loss::CrossEntropy { .. }).then_some(Metric::Accuracy)
    }

    /// Appends the sum of the metric over a batch, an f32 scalar. Divided by [`Metric::units`] it is the mean.
    pub(crate) fn sum(self, g: &mut Graph, loss: &Loss, prediction: NodeId, target: Option<NodeId>) -> Result<NodeId, Error> {
        let prediction_ty = g.ty(prediction).clone();
        let target_ty = target.map(|t| g.ty(t).clone());
        let unfit =
            |needed| Error::Metric { metric: self.name(), needed, prediction: prediction_ty.clone(), target: target_ty.clone() };
        let target = target.ok_or_else(|| unfit("a target"))?;
        match self {
            Metric::Accuracy => {
                let hit = if matches!(loss, Loss::BceWithLogits) {
                    sides_agree(g, prediction, target)?
                } else {
                    let (axis, dense) =
                        class_axis(&prediction_ty, g.ty(target)).ok_or_else(|| unfit("class indices or class probabilities"))?;
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
            (Metric::Accuracy, Loss::CrossEntropy { .. }) => loss_units(loss, target, samples),
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

/// What the mean of `loss` over a batch counts: class indices that are not ignored, else samples.
pub(crate) fn loss_units(loss: &Loss, target: &Tensor, samples: usize) -> f64 {
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

/// Whether logit and probability are both above even odds, or both not.
fn sides_agree(g: &mut Graph, logits: NodeId, probabilities: NodeId) -> Result<NodeId, GraphError> {
    let zero = g.constant_like(logits, 0.0)?;
    let half = g.constant_like(probabilities, 0.5)?;
    let predicted = g.compare(CompareOp::Gt, logits, zero)?;
    let wanted = g.compare(CompareOp::Gt, probabilities, half)?;
    let differ = g.binary(BinaryOp::Xor, predicted, wanted)?;
    g.unary(meganeura_ir::UnaryOp::Not, differ)
}

fn sum_all(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let axes: Vec<usize> = (0..g.ty(x).shape.rank()).collect();
    g.reduce(ReduceOp::Sum, x, &axes)
}

#[cfg(test)]
mod tests {
    use meganeura_ir::interpreter::{Environment, interpret};

    use super::*;

    const CROSS_ENTROPY: Loss = Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: Some(-100) };

    /// The metric of `prediction` against `target`, by the reference interpreter.
    fn mean(metric: Metric, loss: &Loss, prediction: &Tensor, target: &Tensor) -> f64 {
        let mut g = Graph::new();
        let p = g.input("p", prediction.ty().clone()).unwrap();
        let t = g.input("t", target.ty().clone()).unwrap();
        let sum = metric.sum(&mut g, loss, p, Some(t)).unwrap();
        g.output("sum", sum).unwrap();
        let environment = Environment::<f64>::from_tensors([prediction, target], []);
        let sum = interpret(&g, &environment).unwrap().outputs()[0].to_f64_vec()[0];
        sum / metric.units(loss, target, prediction.shape()[0])
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
        assert_eq!(mean(Metric::Accuracy, &Loss::BceWithLogits, &logits, &labels), 0.5);
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
