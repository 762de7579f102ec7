//! Which parameters train, and why.

use std::collections::HashMap;

use glob::Pattern;
use meganeura_import::ModelParameter;
use meganeura_ir::{Graph, ParameterRole, Shape};

use crate::data::{Dataset, Samples};
use crate::error::Error;
use crate::groups::{Grouping, TrainedGroup};
use crate::lora::{Adapter, adapters};
use crate::model::Model;
use crate::trainer::{TrainOptions, batch_size};

/// What training does with a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterPlan {
    pub name: String,
    pub shape: Shape,
    /// How it trains; none if it does not.
    pub rates: Option<Rates>,
    /// Why it trains, or why not.
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// The largest of the schedule.
    pub learning_rate: f64,
    pub weight_decay: f64,
}

impl Model {
    /// What training with `options` does with each parameter, in file order, the factors of an adapter after its weight. Nothing is compiled for
    /// it. New adapters are looked for at the sizes of `data`, or else of the bindings.
    ///
    /// # Errors
    /// A pattern matches nothing, or nothing is left to train; with new adapters, the data does not fit or a size is open.
    pub fn training_plan(&self, options: &TrainOptions, data: Option<&Dataset>) -> Result<Vec<ParameterPlan>, Error> {
        let adapters = match (options.lora.is_empty(), data) {
            (true, _) => self.adapters().to_vec(),
            (false, Some(data)) => adapters(self, &batch_graph(self, options, data)?, options)?,
            (false, None) => adapters(self, &self.specialize(&options.bindings)?.graph, options)?,
        };
        let trained = trained(self, &adapters, options.into())?;
        let mut rates = HashMap::new();
        for TrainedGroup { optimizer, learning_rate, weights } in groups(self, &adapters, &trained, options)? {
            let of_group = Rates { learning_rate, weight_decay: optimizer.weight_decay() };
            rates.extend(weights.into_iter().map(|name| (name, of_group)));
        }
        let mut plan = Vec::new();
        for candidate in candidates(self, &adapters) {
            let (_, reason) = candidate.judge(options.into(), &adapters);
            let Candidate { name, shape, .. } = candidate;
            plan.push(ParameterPlan { rates: rates.get(&name).copied(), name, shape, reason });
        }
        Ok(plan)
    }
}

/// The graph of a batch.
fn batch_graph(model: &Model, options: &TrainOptions, data: &Dataset) -> Result<Graph, Error> {
    let (objective, inputs) = (&options.objective, model.bound_inputs(&options.bindings));
    let samples = Samples::bind(data, &inputs, objective.data_target())?;
    let batch = batch_size(&inputs, &samples, options.batch)?;
    objective.specialize(model, &samples, Some(batch), &options.bindings)
}

/// Which parameters are chosen: as [`TrainOptions::train`] and [`TrainOptions::freeze`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selection<'a> {
    pub train: &'a [Pattern],
    pub freeze: &'a [Pattern],
}

impl<'a> From<&'a TrainOptions> for Selection<'a> {
    fn from(options: &'a TrainOptions) -> Self {
        Selection { train: &options.train, freeze: &options.freeze }
    }
}

/// What may train.
struct Candidate<'a> {
    name: String,
    shape: Shape,
    kind: Kind<'a>,
}

enum Kind<'a> {
    Parameter(&'a ModelParameter),
    /// A factor of an adapter.
    Factor(&'a Adapter),
}

/// The parameters in file order, and after each the factors of its adapter.
fn candidates<'a>(model: &'a Model, adapters: &'a [Adapter]) -> Vec<Candidate<'a>> {
    let mut all = Vec::new();
    for parameter in model.parameters() {
        let (name, shape) = (parameter.name.clone(), parameter.shape.clone());
        all.push(Candidate { name, shape, kind: Kind::Parameter(parameter) });
        for adapter in adapters.iter().filter(|adapter| adapter.weight() == parameter.name) {
            let factors = adapter.factors().map(|(name, factor)| (name, factor.shape().clone()));
            all.extend(factors.map(|(name, shape)| Candidate { name, shape, kind: Kind::Factor(adapter) }));
        }
    }
    all
}

impl Candidate<'_> {
    /// Whether it trains, and why: factors of adapters, and what `train` chooses, or all that train by default where there are no adapters;
    /// without those that match `freeze`.
    fn judge(&self, selection: Selection, adapters: &[Adapter]) -> (bool, String) {
        let matching = |patterns: &[Pattern]| patterns.iter().find(|pattern| pattern.matches(&self.name)).cloned();
        let chosen = match (&self.kind, selection.train) {
            (Kind::Factor(adapter), _) => (true, format!("adapter {}", adapter.describe())),
            (Kind::Parameter(p), []) if p.trainable && !adapters.is_empty() => (false, "adapters train instead".to_owned()),
            (Kind::Parameter(p), []) => (p.trainable, p.reason.to_owned()),
            (Kind::Parameter(p), _) if p.role != ParameterRole::Weight => (false, p.reason.to_owned()),
            (_, patterns) => match matching(patterns) {
                Some(pattern) => (true, format!("--train {pattern}")),
                None => (false, "no --train matches".to_owned()),
            },
        };
        match matching(selection.freeze) {
            Some(pattern) if chosen.0 => (false, format!("--freeze {pattern}")),
            _ => chosen,
        }
    }
}

/// The weights and the factors of adapters that train.
pub(crate) fn trained(model: &Model, adapters: &[Adapter], selection: Selection) -> Result<Vec<String>, Error> {
    let Selection { train, freeze } = selection;
    let candidates = candidates(model, adapters);
    if let Some(pattern) = train.iter().chain(freeze).find(|pattern| !candidates.iter().any(|c| pattern.matches(&c.name))) {
        let examples = candidates.iter().take(3).map(|c| format!("{:?}", c.name)).collect();
        return Err(Error::NoMatch { pattern: pattern.as_str().to_string(), examples });
    }
    let names: Vec<String> =
        candidates.into_iter().filter(|c| c.judge(selection, adapters).0).map(|candidate| candidate.name).collect();
    match (names.is_empty(), train.is_empty() && freeze.is_empty()) {
        (false, _) => Ok(names),
        (true, true) => Err(Error::NothingToTrain { reason: "the model has no trainable weights" }),
        (true, false) => Err(Error::NothingToTrain { reason: "--train and --freeze leave no weight" }),
    }
}

/// What trains, by how it does.
pub(crate) fn groups(
    model: &Model,
    adapters: &[Adapter],
    trained: &[String],
    options: &TrainOptions,
) -> Result<Vec<TrainedGroup>, Error> {
    let TrainOptions { optimizer, learning_rate, no_decay_norms, ref groups, .. } = *options;
    let grouping = Grouping { optimizer, learning_rate, groups, no_decay_norms };
    let ranks: HashMap<String, usize> = candidates(model, adapters).into_iter().map(|c| (c.name, c.shape.rank())).collect();
    let rank = |name: &str| ranks.get(name).copied().unwrap_or(0);
    grouping.divide(&trained.iter().map(|name| (name.as_str(), rank(name))).collect::<Vec<_>>())
}
