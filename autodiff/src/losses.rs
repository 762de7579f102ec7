//! Losses: a prediction and a target to a float scalar, by PyTorch's definitions with mean reduction.

use meganeura_ir::{
    CompareOp, Composite, DType, DTypeClass, Graph, GraphError, NodeId, Op, ReduceOp, Shape, Tensor, TensorType, UnaryOp,
};

use crate::formula::{Term, formula};

/// What training minimises.
///
/// For cross entropy the class axis is chosen by the target's shape. Index targets lack the class axis: axis 1 of the prediction
/// (`[n, c, d..]` against `[n, d..]`, PyTorch's layout; axis 0 of a vector), else the last axis (`[n, t, c]` against `[n, t]`, the
/// layout of language models); where both fit, axis 1. Dense targets have the prediction's shape, and axis 1 holds the classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// `torch.nn.functional.cross_entropy`: logits against class indices or class probabilities. The mean is over the indices that
    /// differ from `ignore_index`; an index outside `0..c` is the caller's error, see [`Loss::check_target`].
    CrossEntropy { label_smoothing: f64, ignore_index: Option<i64> },
    /// `torch.nn.functional.mse_loss`
    Mse,
    /// `torch.nn.functional.l1_loss`
    L1,
    /// `torch.nn.functional.huber_loss`
    Huber { delta: f64 },
    /// `torch.nn.functional.binary_cross_entropy_with_logits`: logits against probabilities.
    BceWithLogits,
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
    pub const TABLE: [(&'static str, Loss); 7] = [
        ("cross_entropy", Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: Some(-100) }),
        ("mse", Loss::Mse),
        ("bce", Loss::BceWithLogits),
        ("l1", Loss::L1),
        ("huber", Loss::Huber { delta: 1.0 }),
        ("kl", Loss::Kl),
        ("output", Loss::Output),
    ];

    /// The loss of that name, with its defaults.
    pub fn from_name(name: &str) -> Result<Loss, LossError> {
        Self::TABLE
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, loss)| *loss)
            .ok_or_else(|| LossError::UnknownName { name: name.to_owned(), known: Self::TABLE.iter().map(|(n, _)| *n).collect() })
    }

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Loss::CrossEntropy { .. } => "cross_entropy",
            Loss::Mse => "mse",
            Loss::BceWithLogits => "bce",
            Loss::L1 => "l1",
            Loss::Huber { .. } => "huber",
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
            Loss::Mse | Loss::L1 | Loss::Huber { .. } => vec![like(NUMBERS, "values")],
            Loss::BceWithLogits => vec![like(ANY, "probabilities")],
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
        if let Loss::CrossEntropy { label_smoothing, ignore_index } = *self {
            return Ok(match index_axis(&ty.shape, &target_ty) {
                Some(axis) => index_cross_entropy(g, prediction, target, axis, label_smoothing, ignore_index)?,
                None => dense_cross_entropy(g, prediction, target, label_smoothing)?,
            });
        }
        Ok(formula(g, |f| {
            let [x, t] = f.terms([prediction, target]);
            self.elementwise(x, t).mean()
        })?)
    }

    /// The loss of each element, for the losses that have one.
    fn elementwise<'f>(&self, x: Term<'f>, t: Term<'f>) -> Term<'f> {
        let difference = x - t;
        match *self {
            Loss::Mse => difference * difference,
            Loss::L1 => difference.unary(UnaryOp::Abs),
            Loss::Huber { delta } => {
                let distance = difference.unary(UnaryOp::Abs);
                let quadratic = 0.5 * difference * difference;
                distance.compare(CompareOp::Lt, delta).select(quadratic, delta * (distance - 0.5 * delta))
            }
            Loss::BceWithLogits => (1.0 - t) * x + (-x).unary(UnaryOp::Softplus),
            Loss::Kl => {
                let entropy = t.compare(CompareOp::Ne, 0.0).select(t * t.unary(UnaryOp::Log), 0.0);
                entropy - t * x
            }
            Loss::CrossEntropy { .. } | Loss::Output => x,
        }
    }

    fn check_attributes(&self) -> Result<(), LossError> {
        let check = |attribute, value: f64, fits: bool, expected| match fits {
            true => Ok(()),
            false => Err(LossError::Attribute { loss: self.name(), attribute, value, expected }),
        };
        match *self {
            Loss::CrossEntropy { label_smoothing: s, .. } => {
                check("label_smoothing", s, (0.0..=1.0).contains(&s), "a number from 0 to 1")
            }
            Loss::Huber { delta } => check("delta", delta, delta > 0.0 && delta.is_finite(), "a positive number"),
            Loss::Mse | Loss::L1 | Loss::BceWithLogits | Loss::Kl | Loss::Output => Ok(()),
        }
    }
}

/// Where classes may lie in a prediction of `rank`, the preferred axis first.
fn class_axes(rank: usize) -> Vec<usize> {
    match rank {
        0 => vec![],
        1 => vec![0],
        2 => vec![1],
        _ => vec![1, rank - 1],
    }
}

/// The class axis of a prediction whose target holds class indices; `None` for a dense target.
fn index_axis(prediction: &Shape, target: &TensorType) -> Option<usize> {
    let fits = |&axis: &usize| target.dtype.is_int() && prediction.without(&[axis]) == target.shape;
    class_axes(prediction.rank()).into_iter().find(fits)
}

/// `(1 - s) * mean(-logp[target]) + s / c * mean(-sum_c logp)`, both means over the targets that are not ignored.
fn index_cross_entropy(
    g: &mut Graph,
    prediction: NodeId,
    target: NodeId,
    axis: usize,
    smoothing: f64,
    ignore_index: Option<i64>,
) -> Result<NodeId, GraphError> {
    let ty = g.ty(prediction).clone();
    let log_p = g.push(Op::Composite(Composite::LogSoftmax { axis }), &[prediction])?;
    let class = g.push(Op::Iota { dtype: DType::I64, shape: ty.shape.clone(), axis }, &[])?;
    let classes = ty.shape[axis] as f64;
    let counted = match ignore_index {
        Some(ignored) => {
            let ignored = g.constant(Tensor::from_i64(DType::I64, Shape::scalar(), &[ignored]))?;
            let shape = g.ty(target).shape.clone();
            let ignored = g.broadcast_to(ignored, &shape)?;
            Some(g.compare(CompareOp::Ne, target, ignored)?)
        }
        None => None,
    };
    formula(g, |f| {
        let [log_p, class, target] = f.terms([log_p, class, target]);
        let counted = counted.map(|mask| f.terms([mask])[0]);
        let chosen = class.compare(CompareOp::Eq, target.broadcast_without(&ty.shape, &[axis]));
        let likelihood = mean_where(chosen.select(log_p, 0.0).reduce(ReduceOp::Sum, &[axis]), counted, ty.dtype);
        if smoothing == 0.0 {
            return -likelihood;
        }
        let uniform = mean_where(log_p.reduce(ReduceOp::Sum, &[axis]), counted, ty.dtype);
        -((1.0 - smoothing) * likelihood + smoothing / classes * uniform)
    })
}

/// The mean of `x` where `counted` holds.
fn mean_where<'f>(x: Term<'f>, counted: Option<Term<'f>>, dtype: DType) -> Term<'f> {
    match counted {
        Some(mask) => mask.select(x, 0.0).sum() / mask.cast(dtype).sum(),
        None => x.mean(),
    }
}

/// `mean(-sum_c t logp)` with `t = (1 - s) * target + s / c`.
fn dense_cross_entropy(g: &mut Graph, prediction: NodeId, target: NodeId, smoothing: f64) -> Result<NodeId, GraphError> {
    let shape = g.ty(prediction).shape.clone();
    let axis = shape.rank().min(2) - 1;
    let classes = shape[axis] as f64;
    let log_p = g.push(Op::Composite(Composite::LogSoftmax { axis }), &[prediction])?;
    formula(g, |f| {
        let [log_p, target] = f.terms([log_p, target]);
        let target = if smoothing == 0.0 { target } else { (1.0 - smoothing) * target + smoothing / classes };
        -(target * log_p).reduce(ReduceOp::Sum, &[axis]).mean()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, check, evaluate, graph_of, grid, indices, reals};

    fn value(loss: Loss, prediction: &Tensor, target: Option<&Tensor>) -> f64 {
        let tensors: Vec<Tensor> = [Some(prediction), target].into_iter().flatten().cloned().collect();
        let mut g = Graph::new();
        let nodes: Vec<NodeId> =
            tensors.iter().enumerate().map(|(i, t)| g.input(i.to_string(), t.ty().clone()).unwrap()).collect();
        let node = loss.build(&mut g, nodes[0], nodes.get(1).copied()).unwrap();
        evaluate(&g, &tensors, &[node])[0][0]
    }

    /// The derivative with respect to the prediction.
    fn check_loss(name: &str, loss: Loss, prediction: &Tensor, target: &Tensor) {
        let constant = target.clone();
        check(name, std::slice::from_ref(prediction), |g, x| {
            let target = g.constant(constant.clone())?;
            Ok(loss.build(g, x[0], Some(target)).unwrap())
        });
    }

    /// `-log softmax(row)[class]` for one row.
    fn negative_log_likelihood(row: &[f64], class: usize) -> f64 {
        row.iter().map(|v| (v - row[class]).exp()).sum::<f64>().ln()
    }

    fn cross_entropy(label_smoothing: f64) -> Loss {
        Loss::CrossEntropy { label_smoothing, ignore_index: Some(-100) }
    }

    #[test]
    fn every_name_is_in_the_table_once() {
        for (name, loss) in Loss::TABLE {
            assert_eq!(loss.name(), name);
            assert_eq!(Loss::from_name(name), Ok(loss));
        }
        assert!(Loss::from_name("hinge").unwrap_err().to_string().contains("cross_entropy, mse"));
    }

    #[test]
    fn cross_entropy_averages_over_the_rows_that_count() {
        let x = grid([4, 3], -2.0, 2.0);
        let rows: Vec<Vec<f64>> = x.to_f64_vec().chunks(3).map(<[f64]>::to_vec).collect();
        let target = indices([4], &[2, -100, 0, 1]);
        let expected = [(0, 2), (2, 0), (3, 1)].map(|(r, c)| negative_log_likelihood(&rows[r], c)).iter().sum::<f64>() / 3.0;
        assert_close("mean", &[value(cross_entropy(0.0), &x, Some(&target))], &[expected], 1e-12);
        check_loss("cross_entropy", cross_entropy(0.0), &x, &target);
        let all = Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: None };
        check_loss("no ignored index", all, &x, &indices([4], &[2, 1, 0, 1]));
    }

    #[test]
    fn cross_entropy_smooths_towards_the_uniform_distribution() {
        let x = grid([2, 3], -2.0, 2.0);
        let target = indices([2], &[2, 0]);
        let rows: Vec<Vec<f64>> = x.to_f64_vec().chunks(3).map(<[f64]>::to_vec).collect();
        let smoothed = |row: &[f64], class: usize| -> f64 {
            (0..3).map(|c| (0.1 / 3.0 + if c == class { 0.9 } else { 0.0 }) * negative_log_likelihood(row, c)).sum()
        };
        let expected = (smoothed(&rows[0], 2) + smoothed(&rows[1], 0)) / 2.0;
        assert_close("indices", &[value(cross_entropy(0.1), &x, Some(&target))], &[expected], 1e-12);
        check_loss("indices", cross_entropy(0.1), &x, &target);
        let dense = reals([2, 3], &[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
        assert_close("dense", &[value(cross_entropy(0.1), &x, Some(&dense))], &[expected], 1e-12);
        check_loss("dense", cross_entropy(0.1), &x, &dense);
    }

    #[test]
    fn cross_entropy_finds_the_class_axis() {
        // Class axis 1 of an image, the last axis of a sequence, the only axis of a vector.
        let image = grid([2, 3, 2, 2], -2.0, 2.0);
        let at = |n: usize, c: usize, p: usize| image.to_f64_vec()[(n * 3 + c) * 4 + p];
        let classes = [0, 1, 2, 0, 2, 2, 1, 0];
        let expected: f64 =
            (0..8).map(|i| negative_log_likelihood(&[0, 1, 2].map(|c| at(i / 4, c, i % 4)), classes[i] as usize)).sum::<f64>()
                / 8.0;
        let target = indices([2, 2, 2], &classes);
        assert_close("image", &[value(cross_entropy(0.0), &image, Some(&target))], &[expected], 1e-12);
        check_loss("image", cross_entropy(0.0), &image, &target);

        let text = grid([2, 4, 3], -2.0, 2.0);
        let rows: Vec<Vec<f64>> = text.to_f64_vec().chunks(3).map(<[f64]>::to_vec).collect();
        let expected = rows.iter().zip(classes).map(|(row, c)| negative_log_likelihood(row, c as usize)).sum::<f64>() / 8.0;
        let target = indices([2, 4], &classes);
        assert_close("text", &[value(cross_entropy(0.0), &text, Some(&target))], &[expected], 1e-12);
        check_loss("text", cross_entropy(0.2), &text, &target);

        let vector = grid([5], -2.0, 2.0);
        let expected = negative_log_likelihood(&vector.to_f64_vec(), 3);
        assert_close("vector", &[value(cross_entropy(0.0), &vector, Some(&indices([], &[3])))], &[expected], 1e-12);
    }

    #[test]
    fn elementwise_losses_follow_their_formulas() {
        let x = reals([2, 3], &[-3.0, -0.5, 0.25, 1.0, 2.5, 40.0]);
        let t = reals([2, 3], &[0.5, 0.0, 0.75, 1.0, 0.125, 0.25]);
        let mean = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
            x.to_f64_vec().iter().zip(t.to_f64_vec()).map(|(&x, t)| f(x, t)).sum::<f64>() / 6.0
        };
        let huber = |d: f64| if d.abs() < 1.5 { d * d / 2.0 } else { 1.5 * (d.abs() - 0.75) };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let bce = |x: f64, t: f64| -t * sigmoid(x).ln() + (1.0 - t) * (x + (1.0 + (-x).exp()).ln());
        let kl = |x: f64, t: f64| if t == 0.0 { 0.0 } else { t * (t.ln() - x) };
        for (loss, expected) in [
            (Loss::Mse, mean(&|x, t| (x - t) * (x - t))),
            (Loss::L1, mean(&|x, t| (x - t).abs())),
            (Loss::Huber { delta: 1.5 }, mean(&|x, t| huber(x - t))),
            (Loss::BceWithLogits, mean(&bce)),
            (Loss::Kl, mean(&kl)),
        ] {
            assert_close(loss.name(), &[value(loss, &x, Some(&t))], &[expected], 1e-12);
            let elsewhere = grid([3, 4], -2.0, 2.0);
            check_loss(loss.name(), loss, &elsewhere, &grid([3, 4], 0.03, 0.98));
        }
        assert_close("output", &[value(Loss::Output, &x, None)], &[mean(&|x, _| x)], 1e-12);
        check("output", &[x], |g, x| Ok(Loss::Output.build(g, x[0], None).unwrap()));
        assert_eq!(value(Loss::Output, &reals([], &[3.0]), None), 3.0);
    }

    /// Values and first derivatives that PyTorch 2.9 gives, in double precision.
    #[test]
    fn losses_have_the_values_of_pytorch() {
        let x = reals([2, 3], &[0.5, -1.25, 2.0, 1.5, 0.25, -0.75]);
        let p = reals([2, 3], &[0.125, 0.0, 0.875, 0.25, 0.5, 0.25]);
        let cases = [
            (cross_entropy(0.0), indices([2], &[2, 0]), 0.28164729625462837, 0.08841009105372215),
            (cross_entropy(0.2), indices([2], &[-100, 1]), 1.5640059427405575, 0.0),
            (cross_entropy(0.2), p.clone(), 1.1066472962546285, 0.005076757720388805),
            (Loss::Mse, p.clone(), 0.9322916666666666, 0.125),
            (Loss::L1, p.clone(), 0.875, 0.16666666666666666),
            (Loss::Huber { delta: 1.1 }, p.clone(), 0.46234375, 0.0625),
            (Loss::BceWithLogits, p.clone(), 0.6903596300908245, 0.08290988853364244),
            (Loss::Kl, p.clone(), -0.5902484886827258, -0.020833333333333332),
        ];
        for (loss, target, value, slope) in cases {
            let tensors = [x.clone(), target];
            let (mut g, node) = graph_of(&tensors, |g, x| Ok(loss.build(g, x[0], Some(x[1])).unwrap()));
            let prediction = crate::testing::float_inputs(&mut g)[0];
            let d = crate::gradients(&mut g, node, &[prediction]).unwrap()[0];
            let found = evaluate(&g, &tensors, &[node, d]);
            assert_close(loss.name(), &[found[0][0], found[1][0]], &[value, slope], 1e-12);
        }
    }

    #[test]
    fn integer_and_bool_targets_convert() {
        let x = reals([3], &[1.0, -2.0, 0.5]);
        let float = reals([3], &[1.0, 0.0, 1.0]);
        let int = indices([3], &[1, 0, 1]);
        assert_eq!(value(Loss::Mse, &x, Some(&int)), value(Loss::Mse, &x, Some(&float)));
        let bools = int.cast(DType::Bool);
        assert_eq!(value(Loss::BceWithLogits, &x, Some(&bools)), value(Loss::BceWithLogits, &x, Some(&float)));
        let unsigned = indices([3], &[1, 0, 2]).cast(DType::U8);
        let logits = grid([3, 3], -1.0, 1.0);
        let signed = value(cross_entropy(0.0), &logits, Some(&indices([3], &[1, 0, 2])));
        assert_eq!(value(cross_entropy(0.0), &logits, Some(&unsigned)), signed);
    }

    #[test]
    fn targets_that_do_not_fit_are_named() {
        let prediction = TensorType::new(DType::F32, [4, 3]);
        let target = |dtype, shape: &[usize]| cross_entropy(0.0).target_type(&prediction, &TensorType::new(dtype, shape));
        assert_eq!(target(DType::I32, &[4]), Ok(TensorType::new(DType::I64, [4])));
        assert_eq!(target(DType::F64, &[4, 3]), Ok(prediction.clone()));
        let message = target(DType::I64, &[3]).unwrap_err().to_string();
        assert_eq!(
            message,
            "cross_entropy of a prediction f32[4,3] takes i64[4] (class indices) or f32[4,3] (class probabilities), found i64[3]"
        );
        assert!(target(DType::F32, &[4]).is_err());
        let mse = Loss::Mse.target_type(&prediction, &TensorType::new(DType::Bool, [4, 3]));
        assert!(matches!(mse, Err(LossError::Target { .. })));
        let scalar = cross_entropy(0.0).target_types(&TensorType::scalar(DType::F32));
        assert_eq!(scalar, Err(LossError::NoClasses { loss: "cross_entropy" }));
        let integer = Loss::Output.target_types(&TensorType::scalar(DType::I32));
        assert!(matches!(integer, Err(LossError::Prediction { .. })));
    }

    #[test]
    fn class_indices_out_of_range_are_found() {
        let prediction = TensorType::new(DType::F32, [4, 3]);
        let check = |values: &[i64]| cross_entropy(0.0).check_target(&prediction, &indices([4], values));
        assert_eq!(check(&[0, 1, -100, 2]), Ok(()));
        let error = LossError::Label { loss: "cross_entropy", value: 3, position: 2, classes: 3 };
        assert_eq!(check(&[0, 1, 3, 2]), Err(error));
    }

    #[test]
    fn missing_targets_and_wrong_attributes_are_errors() {
        let (mut g, x) = graph_of(&[grid([2, 3], -1.0, 1.0)], |_, x| Ok(x[0]));
        assert_eq!(Loss::Mse.build(&mut g, x, None), Err(LossError::MissingTarget { loss: "mse" }));
        assert_eq!(Loss::Output.build(&mut g, x, Some(x)), Err(LossError::UnusedTarget { loss: "output" }));
        for loss in [Loss::Huber { delta: 0.0 }, cross_entropy(1.5), cross_entropy(f64::NAN)] {
            assert!(matches!(loss.build(&mut g, x, Some(x)), Err(LossError::Attribute { .. })));
        }
    }
}
