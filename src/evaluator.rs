//! Loss and metric of a model over a data set, each sample counted exactly once.

use std::sync::Arc;

use meganeura_import::{Bindings, Phase};
use meganeura_ir::{Composite, DType, Graph, NodeId, Op, Shape, Tensor, TensorType};
use meganeura_runtime::{Device, ParameterStore, Session};
use serde::{Deserialize, Serialize};

use crate::data::{Array, Dataset, Samples, TARGET_INPUT, batch_type};
use crate::error::Error;
use crate::gradients::LOSS_OUTPUT;
use crate::lora::{self, Adapter};
use crate::metric::{Metric, loss_units};
use crate::model::Model;
use crate::objective::{Forward, Objective};
use crate::predictor::{by_name, compile, random_input};
use crate::prefix::{Feed, PrefixCache, cut_frozen_prefix};

/// Names in the programs of an evaluation.
const METRIC_OUTPUT: &str = "metric/sum";
const PREDICTION: &str = "loss/prediction";

impl Evaluation {
    /// Whether this is a better result than `other`: of the metric where there is one, else of the loss.
    pub fn improves_on(&self, other: &Evaluation) -> bool {
        match (self.metric, other.metric) {
            (Some((metric, value)), Some((_, other))) if metric.rises() => value > other,
            (Some((_, value)), Some((_, other))) => value < other,
            _ => self.loss < other.loss,
        }
    }
}

/// The result of a pass over a data set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    pub samples: usize,
    /// The mean over all samples (over all targets that are not ignored, for class indices).
    pub loss: f64,
    pub metric: Option<(Metric, f64)>,
}

/// A forward program over the weights of a parameter store, with the data to run it on. Layers act as in inference: BatchNormalization
/// by the running statistics, Dropout not at all.
pub struct Evaluator {
    feed: Feed,
    objective: Objective,
    metric: Option<Metric>,
    batch: usize,
    session: Session,
    remainder: Option<Remainder>,
}

/// The samples that do not fill a batch: the model runs on a batch that the last sample fills up, and the loss, a program of its own,
/// judges only the rows of the real ones.
struct Remainder {
    samples: usize,
    loss: Session,
}

impl Evaluator {
    #[expect(clippy::too_many_arguments, reason = "an evaluation of what a trainer was made of")]
    pub(crate) fn new(
        model: &Model,
        store: &Arc<ParameterStore>,
        data: &Dataset,
        objective: &Objective,
        metric: Option<Metric>,
        batch: usize,
        bindings: &Bindings,
        (cache, trained, adapters): (PrefixCache, &[String], &[Adapter]),
    ) -> Result<Self, Error> {
        let device = store.device();
        let bindings = &Bindings { phase: Phase::INFERENCE, ..bindings.clone() };
        let mut samples = Samples::bind(data, &model.bound_inputs(bindings), objective.data_target())?;
        let graph = lora::attach(objective.specialize(model, &samples, Some(batch), bindings)?, adapters)?;
        let forward = objective.build(model, graph, &mut samples, Some(batch))?;
        let count = samples.count();
        let cut = |ty: &TensorType, rows: usize| match ty.shape.first() {
            Some(&first) if first == batch => Ok(batch_type(ty, rows)),
            _ => Err(Error::Remainder { samples: count, batch, prediction: forward.prediction_type().clone() }),
        };
        match batch.min(count) {
            full if full == batch => objective.check_targets(&samples, forward.prediction_type(), batch)?,
            few => objective.check_targets(&samples, &cut(forward.prediction_type(), few)?, few)?,
        }
        let remainder = match count % batch {
            0 => None,
            rest => {
                let prediction = cut(forward.prediction_type(), rest)?;
                let target = forward.target.map(|target| cut(forward.graph.ty(target), rest)).transpose()?;
                Some(Remainder {
                    samples: rest,
                    loss: loss_alone(device, objective, metric, prediction, forward.softmax, target)?,
                })
            }
        };
        let (forward, prefix) = cut_frozen_prefix(forward, cache, trained, &samples, batch)?;
        let Forward { mut graph, prediction, softmax, target, loss } = forward;
        measure(&mut graph, objective, metric, prediction, softmax, target, loss)?;
        if remainder.is_some() {
            graph.output(PREDICTION, prediction)?;
        }
        let feed = Feed::new(samples, prefix, &graph, batch, store, cache)?;
        let session = Session::new(device, compile(graph, device)?, store)?;
        Ok(Evaluator { feed, objective: objective.clone(), metric, batch, session, remainder })
    }

    /// Samples in the data.
    pub fn samples(&self) -> usize {
        self.feed.samples().count()
    }

    /// Runs over all samples with the weights as they are now.
    ///
    /// # Errors
    /// The device fails.
    pub fn run(&mut self) -> Result<Evaluation, Error> {
        let mut pass = Pass::default();
        loop {
            if let Some(evaluation) = self.advance(&mut pass)? {
                return Ok(evaluation);
            }
        }
    }

    /// Runs the next batch of a pass; the result after the last one.
    pub(crate) fn advance(&mut self, pass: &mut Pass) -> Result<Option<Evaluation>, Error> {
        let (count, start) = (self.feed.samples().count(), pass.next);
        let batch = self.batch;
        let rows_from = |start: usize| (start..start + batch).map(|row| row.min(count - 1)).collect::<Vec<usize>>();
        let rows = rows_from(start);
        let mut inputs = self.feed.batch(&rows)?;
        if start + batch < count {
            self.feed.prefetch(&rows_from(start + batch));
        }
        inputs.extend(random_input(self.session.program(), 0, start as u64));
        let mut outputs = self.session.run(&by_name(&inputs))?;
        let real = self.batch.min(count - start);
        let target = self.feed.samples().targets(&rows[..real]);
        if let Some(remainder) = self.remainder.as_mut().filter(|r| real < self.batch && r.samples == real) {
            let prediction = outputs.pop().map(|p| first_rows(&p, real));
            let named = [(PREDICTION, prediction.as_ref()), (TARGET_INPUT, target.as_ref())];
            let named: Vec<(&str, &Tensor)> = named.into_iter().filter_map(|(name, t)| Some((name, t?))).collect();
            outputs = remainder.loss.run(&named)?;
        }
        pass.totals.add(&self.objective, self.metric, &outputs, target.as_ref(), real);
        pass.next += self.batch;
        Ok((pass.next >= count).then(|| std::mem::take(pass).totals.means(count, self.metric)))
    }
}

/// The program of the loss and the metric of a given prediction.
fn loss_alone(
    device: &Arc<Device>,
    objective: &Objective,
    metric: Option<Metric>,
    prediction: TensorType,
    softmax: Option<usize>,
    target: Option<TensorType>,
) -> Result<Session, Error> {
    let mut graph = Graph::new();
    let prediction = graph.input(PREDICTION, prediction)?;
    let target = target.map(|ty| graph.input(TARGET_INPUT, ty)).transpose()?;
    let loss = objective.loss.build(&mut graph, prediction, target)?;
    measure(&mut graph, objective, metric, prediction, softmax, target, loss)?;
    let program = compile(graph, device)?;
    let store = ParameterStore::new(device, &program)?;
    Ok(Session::new(device, program, &store)?)
}

/// Makes loss and metric outputs, in this order.
fn measure(
    graph: &mut Graph,
    objective: &Objective,
    metric: Option<Metric>,
    prediction: NodeId,
    softmax: Option<usize>,
    target: Option<NodeId>,
    loss: NodeId,
) -> Result<(), Error> {
    graph.output(LOSS_OUTPUT, loss)?;
    if let Some(metric) = metric {
        // Distances are between what the model gives and the target, ranks are those of the logits.
        let prediction = match (metric, softmax) {
            (Metric::Mse, Some(axis)) => graph.push(Op::Composite(Composite::Softmax { axis }), &[prediction])?,
            _ => prediction,
        };
        let sum = metric.sum(graph, &objective.loss, prediction, target)?;
        graph.output(METRIC_OUTPUT, sum)?;
    }
    Ok(())
}

/// The first `rows` rows of a tensor.
fn first_rows(tensor: &Tensor, rows: usize) -> Tensor {
    let array = Array::from(tensor.clone());
    array.rows(&(0..rows).collect::<Vec<_>>())
}

/// How far a pass over the data has come.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    next: usize,
    totals: Totals,
}

#[derive(Debug, Default)]
struct Totals {
    loss: f64,
    loss_units: f64,
    metric: Vec<f64>,
    metric_units: f64,
}

impl Totals {
    fn add(
        &mut self,
        objective: &Objective,
        metric: Option<Metric>,
        outputs: &[Tensor],
        target: Option<&Tensor>,
        samples: usize,
    ) {
        let scalar = |index: usize| outputs.get(index).and_then(Tensor::scalar_f64).unwrap_or(f64::NAN);
        let none = Tensor::zeros(TensorType::new(DType::F32, Shape::from([0])));
        let target = target.unwrap_or(&none);
        let units = loss_units(&objective.loss, target, samples);
        if units > 0.0 {
            self.loss += scalar(0) * units;
            self.loss_units += units;
        }
        if let Some(metric) = metric {
            let sums = outputs.get(1).map_or(vec![f64::NAN], Tensor::to_f64_vec);
            self.metric.resize(sums.len(), 0.0);
            self.metric.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            self.metric_units += metric.units(&objective.loss, target, samples);
        }
    }

    fn means(&self, samples: usize, metric: Option<Metric>) -> Evaluation {
        let loss = self.loss / self.loss_units;
        let metric = metric.map(|m| (m, m.value(&self.metric, self.metric_units, loss)));
        Evaluation { samples, loss, metric }
    }
}
