//! Which parameters train, and why.

use std::collections::HashMap;

use glob::Pattern;
use meganeura_import::ModelParameter;
use meganeura_ir::{ParameterRole, Shape};

use crate::error::Error;
use crate::groups::{Grouping, TrainedGroup};
use crate::model::Model;
use crate::trainer::TrainOptions;

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
    /// What training with `options` does with each parameter, in file order. Nothing is compiled for it.
    ///
    /// # Errors
    /// A pattern matches nothing, or nothing is left to train.
    pub fn training_plan(&self, options: &TrainOptions) -> Result<Vec<ParameterPlan>, Error> {
        let trained = trained(self, options)?;
        let mut rates = HashMap::new();
        for TrainedGroup { optimizer, learning_rate, weights } in groups(self, &trained, options)? {
            let of_group = Rates { learning_rate, weight_decay: optimizer.weight_decay() };
            rates.extend(weights.into_iter().map(|name| (name, of_group)));
        }
        let plan = |p: &ModelParameter| {
            let (_, reason) = judge(p, options);
            ParameterPlan { name: p.name.clone(), shape: p.shape.clone(), rates: rates.get(&p.name).copied(), reason }
        };
        Ok(self.parameters().iter().map(plan).collect())
    }
}

/// Whether a parameter trains, and why: chosen by `train`, or all that train by default, without those that match `freeze`.
fn judge(parameter: &ModelParameter, options: &TrainOptions) -> (bool, String) {
    let matching = |patterns: &[Pattern]| patterns.iter().find(|pattern| pattern.matches(&parameter.name)).cloned();
    let chosen = match options.train.as_slice() {
        [] => (parameter.trainable, parameter.reason.to_owned()),
        _ if parameter.role != ParameterRole::Weight => (false, parameter.reason.to_owned()),
        patterns => match matching(patterns) {
            Some(pattern) => (true, format!("--train {pattern}")),
            None => (false, "no --train matches".to_owned()),
        },
    };
    match matching(&options.freeze) {
        Some(pattern) if chosen.0 => (false, format!("--freeze {pattern}")),
        _ => chosen,
    }
}

/// The weights that train.
pub(crate) fn trained(model: &Model, options: &TrainOptions) -> Result<Vec<String>, Error> {
    let TrainOptions { train, freeze, .. } = options;
    let parameters = model.parameters();
    if let Some(pattern) = train.iter().chain(freeze).find(|pattern| !parameters.iter().any(|p| pattern.matches(&p.name))) {
        let examples = parameters.iter().take(3).map(|p| format!("{:?}", p.name)).collect();
        return Err(Error::NoMatch { pattern: pattern.as_str().to_string(), examples });
    }
    let names: Vec<String> = parameters.iter().filter(|p| judge(p, options).0).map(|p| p.name.clone()).collect();
    match (names.is_empty(), train.is_empty() && freeze.is_empty()) {
        (false, _) => Ok(names),
        (true, true) => Err(Error::NothingToTrain { reason: "the model has no trainable weights" }),
        (true, false) => Err(Error::NothingToTrain { reason: "--train and --freeze leave no weight" }),
    }
}

/// The weights that train, by how they do.
pub(crate) fn groups(model: &Model, trained: &[String], options: &TrainOptions) -> Result<Vec<TrainedGroup>, Error> {
    let TrainOptions { optimizer, learning_rate, no_decay_norms, ref groups, .. } = *options;
    let grouping = Grouping { optimizer, learning_rate, groups, no_decay_norms };
    let rank = |name: &str| model.parameters().iter().find(|p| p.name == name).map_or(0, |p| p.shape.rank());
    grouping.divide(&trained.iter().map(|name| (name.as_str(), rank(name))).collect::<Vec<_>>())
}
