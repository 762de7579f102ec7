//! What training minimises: a loss of one of the model's outputs against a target from the data.

use meganeura_autodiff::{Loss, LossError};
use meganeura_import::Bindings;
use meganeura_ir::{BinaryOp, Composite, DTypeClass, Graph, NodeId, Op, ReduceOp, Shape, TensorType, UnaryOp};

use crate::data::{Samples, TARGET_INPUT, Target};
use crate::error::Error;
use crate::metric::class_axis;
use crate::model::Model;
use crate::predictor::by_name;

/// A loss, and between what.
///
/// Cross entropy takes logits. Where the output is a softmax over its classes, the loss reads the operand of the softmax, so that a model which
/// ends in probabilities trains as one which ends in logits, and no logarithm of a rounded probability is taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    pub loss: Loss,
    /// The output that the loss judges. May be absent where the model has one only.
    pub output: Option<String>,
    /// The name of the target in the data. May be absent where it is `target`, `label` or `y`.
    pub target: Option<String>,
}

/// The forward pass with its loss, in one graph. The graph has no outputs yet.
#[derive(Debug)]
pub(crate) struct Forward {
    pub graph: Graph,
    /// What the loss judges.
    pub prediction: NodeId,
    /// The axis of the softmax that makes the output of the prediction, if there is one.
    pub softmax: Option<usize>,
    pub target: Option<NodeId>,
    /// A scalar.
    pub loss: NodeId,
}

impl Forward {
    pub fn prediction_type(&self) -> &TensorType {
        self.graph.ty(self.prediction)
    }
}

impl Objective {
    /// A loss of the model's only output.
    pub fn new(loss: Loss) -> Self {
        Objective { loss, output: None, target: None }
    }

    /// The target that a data set must have.
    pub fn data_target(&self) -> Target<'_> {
        match self.loss {
            Loss::Output => Target::Absent,
            _ => Target::Key(self.target.as_deref()),
        }
    }

    fn output_name<'a>(&self, model: &'a Model) -> Result<&'a str, Error> {
        let known = || model.outputs().iter().map(|o| o.name.clone()).collect();
        match (&self.output, model.outputs()) {
            (Some(name), outputs) => {
                let found = outputs.iter().find(|o| o.name == *name).map(|o| o.name.as_str());
                found.ok_or_else(|| Error::UnknownOutput { name: name.clone(), known: known() })
            }
            (None, []) => Err(Error::NoOutput),
            (None, [only]) => Ok(&only.name),
            (None, _) => Err(Error::AmbiguousOutput { known: known() }),
        }
    }

    /// What the loss judges, in a graph of the model.
    pub(crate) fn output_node(&self, model: &Model, graph: &Graph) -> Result<NodeId, Error> {
        graph.output_node(self.output_name(model)?).ok_or(Error::NoOutput)
    }

    /// The model for batches of `batch` samples, or for the arrays as they are.
    pub(crate) fn specialize(
        &self,
        model: &Model,
        samples: &Samples,
        batch: Option<usize>,
        bindings: &Bindings,
    ) -> Result<Graph, Error> {
        self.output_name(model)?;
        let mut bindings = bindings.clone();
        for (input, shape) in samples.shapes(batch) {
            bindings.shapes.entry(input).or_insert(shape);
        }
        Ok(match batch {
            Some(_) => model.specialize(&bindings)?.graph,
            None => model.specialize_on(&bindings, &by_name(&samples.tensors()))?.graph,
        })
    }

    /// The forward pass, a graph of [`Objective::specialize`], with the loss. Afterwards `samples` gives targets in the dtype of the graph.
    pub(crate) fn build(
        &self,
        model: &Model,
        mut graph: Graph,
        samples: &mut Samples,
        batch: Option<usize>,
    ) -> Result<Forward, Error> {
        let mut prediction = self.output_node(model, &graph)?;
        graph.clear_outputs();
        let mut softmax = None;
        let target = match samples.target_type(batch) {
            None => None,
            Some(found) => {
                let unfit = |source| unfit(samples, source);
                let ty = self.loss.target_type(graph.ty(prediction), &found).map_err(unfit)?;
                samples.convert_target(ty.dtype);
                if let (Loss::CrossEntropy { .. }, Some((logits, axis))) = (&self.loss, softmax_operand(&graph, prediction))
                    && class_axis(graph.ty(prediction), &ty).is_some_and(|(class_axis, _)| class_axis == axis)
                {
                    (prediction, softmax) = (logits, Some(axis));
                }
                Some(graph.input(TARGET_INPUT, ty)?)
            }
        };
        let loss = self.loss.build(&mut graph, prediction, target)?;
        Ok(Forward { graph, prediction, softmax, target, loss })
    }

    /// Checks every target against the prediction of a batch: a class index outside the model's classes would train on nonsense.
    pub(crate) fn check_targets(&self, samples: &Samples, prediction: &TensorType, batch: usize) -> Result<(), Error> {
        let indices = matches!(self.loss, Loss::CrossEntropy { .. })
            && samples.target_type(None).is_some_and(|ty| ty.dtype.class() == DTypeClass::Int);
        if !indices {
            return Ok(());
        }
        let count = samples.count();
        for start in (0..count).step_by(batch) {
            // The last batch is full too: it reaches back.
            let start = start.min(count - batch);
            let rows: Vec<usize> = (start..start + batch).collect();
            let Some(target) = samples.targets(&rows) else { return Ok(()) };
            let per_sample = (target.shape().numel() / batch).max(1);
            self.loss.check_target(prediction, &target).map_err(|source| match source {
                LossError::Label { value, position, classes, .. } => Error::Class {
                    path: samples.path().to_path_buf(),
                    key: samples.target_key().unwrap_or_default().to_string(),
                    sample: start + position / per_sample,
                    value,
                    classes,
                },
                source => unfit(samples, source),
            })?;
        }
        Ok(())
    }
}

/// Logits whose softmax along the given axis `node` is: of the composite, or of exponentials divided by their sum, where exporters write it so.
fn softmax_operand(g: &Graph, node: NodeId) -> Option<(NodeId, usize)> {
    let operands = &g.node(node).operands;
    match (&g.node(node).op, operands.as_slice()) {
        (Op::Composite(Composite::Softmax { axis }), [x]) => Some((*x, *axis)),
        (Op::Binary(BinaryOp::Div), &[exponentials, divisor]) => {
            let sum = expanded(g, divisor);
            let Op::Reduce { op: ReduceOp::Sum, axes } = &g.node(sum).op else { return None };
            let (&[axis], true) = (axes.as_slice(), g.node(sum).operands == [exponentials]) else { return None };
            let (Op::Unary(UnaryOp::Exp), &[x]) = (&g.node(exponentials).op, g.node(exponentials).operands.as_slice()) else {
                return None;
            };
            let rows = sources(g, divisor, sum)?;
            let kept = |a: usize| (a != axis).then(|| a - usize::from(a > axis));
            let shape = &g.ty(node).shape;
            let whole = rows.iter().enumerate().all(|(a, source)| shape.get(a) == Some(&1) || *source == kept(a));
            whole.then(|| (without_shift(g, x, axis), axis))
        }
        _ => None,
    }
}

/// `x` where `node` is `x - y` and `y` repeats along `axis`, which changes no softmax along it.
fn without_shift(g: &Graph, node: NodeId, axis: usize) -> NodeId {
    match (&g.node(node).op, g.node(node).operands.as_slice()) {
        (Op::Binary(BinaryOp::Sub), &[x, shift]) => {
            let repeats = sources(g, shift, expanded(g, shift)).is_some_and(|rows| rows.get(axis) == Some(&None));
            if repeats && g.ty(shift).shape.get(axis) != Some(&1) { x } else { node }
        }
        _ => node,
    }
}

/// What a value is reshaped and broadcast from.
fn expanded(g: &Graph, mut node: NodeId) -> NodeId {
    while let (Op::Reshape(_) | Op::Broadcast { .. }, &[x]) = (&g.node(node).op, g.node(node).operands.as_slice()) {
        node = x;
    }
    node
}

/// For each axis of `node`, which axis of `from` it is, if any, where only broadcasts and changes of sizes of 1 lie between them.
fn sources(g: &Graph, node: NodeId, from: NodeId) -> Option<Vec<Option<usize>>> {
    let shape = &g.ty(node).shape;
    if node == from {
        return Some((0..shape.rank()).map(Some).collect());
    }
    let &[x] = g.node(node).operands.as_slice() else { return None };
    let inner = sources(g, x, from)?;
    match &g.node(node).op {
        Op::Broadcast { axes, .. } => {
            let source = |axis| axes.iter().position(|&a| a == axis).and_then(|position| inner.get(position).copied().flatten());
            Some((0..shape.rank()).map(source).collect())
        }
        Op::Reshape(_) => {
            let several = |shape: &Shape| (0..shape.rank()).filter(|&a| shape[a] != 1).collect::<Vec<_>>();
            let (old, new) = (several(&g.ty(x).shape), several(shape));
            let same = old.iter().map(|&a| g.ty(x).shape[a]).eq(new.iter().map(|&a| shape[a]));
            let mut found = vec![None; shape.rank()];
            new.iter().zip(&old).for_each(|(&to, &from)| found[to] = inner[from]);
            same.then_some(found)
        }
        _ => None,
    }
}

fn unfit(samples: &Samples, source: LossError) -> Error {
    let key = samples.target_key().unwrap_or_default().to_string();
    Error::Target { path: samples.path().to_path_buf(), key, source: source.into() }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::DType;

    use super::*;

    fn logits(g: &mut Graph) -> NodeId {
        g.input("x", TensorType::new(DType::F32, [4, 3])).unwrap()
    }

    #[test]
    fn the_operand_of_a_softmax_is_found_however_it_is_written() {
        let mut g = Graph::new();
        let x = logits(&mut g);
        let composite = Composite::Softmax { axis: 1 };
        let decomposed = composite.decompose(&mut g, &[x]).unwrap();
        let whole = g.push(Op::Composite(composite), &[x]).unwrap();
        assert_eq!(softmax_operand(&g, decomposed), Some((x, 1)));
        assert_eq!(softmax_operand(&g, whole), Some((x, 1)));

        let exp = g.unary(UnaryOp::Exp, x).unwrap();
        let sum = g.reduce(ReduceOp::Sum, exp, &[1]).unwrap();
        let column = g.reshape(sum, [4, 1]).unwrap();
        let sums = g.broadcast_to(column, &[4, 3].into()).unwrap();
        let y = g.binary(BinaryOp::Div, exp, sums).unwrap();
        assert_eq!(softmax_operand(&g, y), Some((x, 1)));
    }

    #[test]
    fn what_is_no_softmax_is_left_alone() {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [3, 3])).unwrap();
        let exp = g.unary(UnaryOp::Exp, x).unwrap();
        let sum = g.reduce(ReduceOp::Sum, exp, &[1]).unwrap();
        // The sums of rows, repeated along the other axis.
        let sums = g.push(Op::Broadcast { shape: [3, 3].into(), axes: vec![1] }, &[sum]).unwrap();
        let y = g.binary(BinaryOp::Div, exp, sums).unwrap();
        assert_eq!(softmax_operand(&g, y), None);
        assert_eq!(softmax_operand(&g, x), None);
        // A difference along the axis itself is part of the logits.
        let first = g.reduce(ReduceOp::Max, x, &[0]).unwrap();
        let shift = g.broadcast_without(first, &[3, 3].into(), &[0]).unwrap();
        let shifted = g.sub(x, shift).unwrap();
        let y = g.push(Op::Composite(Composite::Softmax { axis: 1 }), &[shifted]).unwrap();
        assert_eq!(softmax_operand(&g, y), Some((shifted, 1)));
        assert_eq!(without_shift(&g, shifted, 1), shifted);
    }
}
