//! Cross entropy with class indices or class probabilities.

use meganeura_ir::{CompareOp, Composite, DType, Graph, GraphError, NodeId, Op, ReduceOp, Shape, Tensor, TensorType};

use crate::formula::{Term, formula};

/// What `torch.nn.CrossEntropyLoss` can be told.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossEntropy<'a> {
    pub smoothing: f64,
    pub ignore_index: Option<i64>,
    /// One for each class.
    pub weights: Option<&'a [f64]>,
}

/// Where classes may lie in a prediction of `rank`, the preferred axis first.
pub(super) fn class_axes(rank: usize) -> Vec<usize> {
    match rank {
        0 => vec![],
        1 => vec![0],
        2 => vec![1],
        _ => vec![1, rank - 1],
    }
}

/// The class axis of a prediction whose target holds class indices; `None` for a dense target.
pub(super) fn index_axis(prediction: &Shape, target: &TensorType) -> Option<usize> {
    let fits = |&axis: &usize| target.dtype.is_int() && prediction.without(&[axis]) == target.shape;
    class_axes(prediction.rank()).into_iter().find(fits)
}

/// The class axis of a prediction whose target holds class probabilities. The prediction is no scalar.
pub(super) fn dense_axis(prediction: &Shape) -> usize {
    prediction.rank().min(2) - 1
}

impl CrossEntropy<'_> {
    /// `(1 - s) * mean(-w[target] logp[target]) + s / c * mean(-sum_c w logp)`, both over the targets that are not ignored, and both
    /// divided by the sum of `w[target]`.
    pub(super) fn of_indices(self, g: &mut Graph, prediction: NodeId, target: NodeId, axis: usize) -> Result<NodeId, GraphError> {
        let ty = g.ty(prediction).clone();
        let log_p = g.push(Op::Composite(Composite::LogSoftmax { axis }), &[prediction])?;
        let class = g.push(Op::Iota { dtype: DType::I64, shape: ty.shape.clone(), axis }, &[])?;
        let classes = ty.shape[axis] as f64;
        let weights = self.weights_like(g, prediction, axis)?;
        let counted = match self.ignore_index {
            Some(ignored) => Some(differs(g, target, ignored)?),
            None => None,
        };
        formula(g, |f| {
            let [log_p, class, target] = f.terms([log_p, class, target]);
            let counted = counted.map(|mask| f.terms([mask])[0]);
            let weights = weights.map(|weights| f.terms([weights])[0]);
            let chosen = class.compare(CompareOp::Eq, target.broadcast_without(&ty.shape, &[axis]));
            let log_p = weights.map_or(log_p, |weights| weights * log_p);
            let share = weights.map(|weights| chosen.select(weights, 0.0).reduce(ReduceOp::Sum, &[axis]));
            let likelihood = mean_of_counted(chosen.select(log_p, 0.0).reduce(ReduceOp::Sum, &[axis]), counted, share, ty.dtype);
            if self.smoothing == 0.0 {
                return -likelihood;
            }
            let uniform = mean_of_counted(log_p.reduce(ReduceOp::Sum, &[axis]), counted, share, ty.dtype);
            -((1.0 - self.smoothing) * likelihood + self.smoothing / classes * uniform)
        })
    }

    /// `mean(-sum_c w t logp)` with `t = (1 - s) * target + s / c`.
    pub(super) fn of_probabilities(self, g: &mut Graph, prediction: NodeId, target: NodeId) -> Result<NodeId, GraphError> {
        let shape = g.ty(prediction).shape.clone();
        let axis = dense_axis(&shape);
        let classes = shape[axis] as f64;
        let log_p = g.push(Op::Composite(Composite::LogSoftmax { axis }), &[prediction])?;
        let weights = self.weights_like(g, prediction, axis)?;
        formula(g, |f| {
            let [log_p, target] = f.terms([log_p, target]);
            let smoothed = match self.smoothing {
                0.0 => target,
                s => (1.0 - s) * target + s / classes,
            };
            let weighted = weights.map_or(smoothed, |weights| f.terms([weights])[0] * smoothed);
            -(weighted * log_p).reduce(ReduceOp::Sum, &[axis]).mean()
        })
    }

    /// The weight of each element's class.
    fn weights_like(self, g: &mut Graph, prediction: NodeId, axis: usize) -> Result<Option<NodeId>, GraphError> {
        let Some(weights) = self.weights else { return Ok(None) };
        let ty = g.ty(prediction).clone();
        let constant = g.constant(Tensor::from_f64(ty.dtype, [weights.len()], weights))?;
        g.push(Op::Broadcast { shape: ty.shape, axes: vec![axis] }, &[constant]).map(Some)
    }
}

/// Where an integer tensor differs from a number.
fn differs(g: &mut Graph, x: NodeId, value: i64) -> Result<NodeId, GraphError> {
    let ty = g.ty(x).clone();
    let value = g.constant(Tensor::from_i64(ty.dtype, Shape::scalar(), &[value]))?;
    let value = g.broadcast_to(value, &ty.shape)?;
    g.compare(CompareOp::Ne, x, value)
}

/// The sum of `x` over the sum of `share`, which is 1 where absent, both where `counted` holds.
fn mean_of_counted<'f>(x: Term<'f>, counted: Option<Term<'f>>, share: Option<Term<'f>>, dtype: DType) -> Term<'f> {
    let sum = |x: Term<'f>| counted.map_or(x, |mask| mask.select(x, 0.0)).sum();
    match (share, counted) {
        (Some(share), _) => sum(x) / sum(share),
        (None, Some(mask)) => sum(x) / mask.cast(dtype).sum(),
        (None, None) => x.mean(),
    }
}
