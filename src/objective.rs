//! What training minimises: a loss of one of the model's outputs against a target from the data.

use meganeura_autodiff::{Loss, LossError};
use meganeura_import::Bindings;
use meganeura_ir::{DTypeClass, Graph, NodeId, TensorType};

use crate::data::{Samples, TARGET_INPUT, Target};
use crate::error::Error;
use crate::model::Model;
use crate::predictor::by_name;

/// A loss, and between what.
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
    pub prediction: NodeId,
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

    /// The forward pass and the loss for batches of `batch` samples, or for the arrays as they are. Afterwards `samples` gives targets
    /// in the dtype of the graph.
    pub(crate) fn build(
        &self,
        model: &Model,
        samples: &mut Samples,
        batch: Option<usize>,
        bindings: &Bindings,
    ) -> Result<Forward, Error> {
        let output = self.output_name(model)?;
        let mut bindings = bindings.clone();
        for (input, shape) in samples.shapes(batch) {
            bindings.shapes.entry(input).or_insert(shape);
        }
        let mut graph = match batch {
            Some(_) => model.specialize(&bindings)?.graph,
            None => {
                let tensors = samples.tensors();
                let inputs: Vec<_> = by_name(&tensors).into_iter().filter(|(name, _)| *name != TARGET_INPUT).collect();
                model.specialize_on(&bindings, &inputs)?.graph
            }
        };
        let prediction = graph.output_node(output).ok_or(Error::NoOutput)?;
        graph.clear_outputs();
        let target = match samples.target_type(batch) {
            None => None,
            Some(found) => {
                let unfit = |source| unfit(samples, source);
                let ty = self.loss.target_type(graph.ty(prediction), &found).map_err(unfit)?;
                samples.convert_target(ty.dtype);
                Some(graph.input(TARGET_INPUT, ty)?)
            }
        };
        let loss = self.loss.build(&mut graph, prediction, target)?;
        Ok(Forward { graph, prediction, target, loss })
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

fn unfit(samples: &Samples, source: LossError) -> Error {
    let key = samples.target_key().unwrap_or_default().to_string();
    Error::Target { path: samples.path().to_path_buf(), key, source: source.into() }
}
