//! Training over HTTP: a batch and how to train on it, checkpoints, and the way back.

use std::time::Duration;

use axum::extract::{Request, State};
use meganeura_ir::Tensor;
use serde::{Deserialize, Serialize};

use crate::body::receive;
use crate::http::{Answered, ModelPath, Named, Shared, parse_input, parse_inputs};
use crate::infer::shown;
use crate::json::{TensorJson, few, parse};
use crate::log::log;
use crate::refusal::Refusal;
use crate::served::{Checkpoint, ModelCard, Rollback, TrainJob, TrainOutcome};

/// The body of a training request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainRequestJson<'a> {
    /// As for an inference; the first axis of every tensor is that of the samples.
    #[serde(borrow, deserialize_with = "few")]
    inputs: Vec<TensorJson<'a>>,
    /// What the loss compares with. Its name counts for nothing.
    #[serde(borrow, default)]
    targets: Option<TensorJson<'a>>,
    loss: String,
    /// Which output the loss judges; needed where there are several.
    #[serde(default)]
    output: Option<String>,
    #[serde(default = "default_optimizer")]
    optimizer: String,
    lr: f64,
    #[serde(default = "one")]
    steps: u64,
}

fn default_optimizer() -> String {
    "sgd".into()
}

fn one() -> u64 {
    1
}

pub(crate) async fn train(State(frontend): Shared, path: ModelPath, request: Request) -> Answered<axum::Json<TrainOutcome>> {
    let (parts, body) = request.into_parts();
    let model = Named::find(&frontend, path)?;
    let received = receive(&frontend, &parts.headers, body).await?;
    let job = parse_job(&received.bytes, frontend.options.max_body, frontend.options.max_train_steps)?;
    let card = frontend.card(model)?;
    check_names(card, &job.inputs)?;
    let steps = job.steps;
    let outcome = within(frontend.options.train_deadline, frontend.engine.train(model, job)).await?;
    log(
        "trained",
        serde_json::json!({ "model": card.name, "steps": steps, "published": outcome.published, "weight_version": outcome.weight_version }),
    );
    Ok(axum::Json(outcome))
}

fn parse_job(body: &[u8], max_bytes: usize, max_steps: u64) -> Answered<TrainJob> {
    let request: TrainRequestJson = parse(body)?;
    if !(1..=max_steps).contains(&request.steps) {
        return Err(Refusal::invalid(format!("steps is {}, it must be 1 to {max_steps}", request.steps)));
    }
    if !(request.lr.is_finite() && request.lr >= 0.0) {
        return Err(Refusal::invalid("lr must be a number of at least 0"));
    }
    let targets = request.targets.map(|targets| parse_input("targets", &targets, &mut &[][..], max_bytes));
    Ok(TrainJob {
        inputs: parse_inputs(&request.inputs, &[], max_bytes)?,
        targets: targets.transpose()?,
        loss: request.loss,
        output: request.output,
        optimizer: request.optimizer,
        learning_rate: request.lr,
        steps: request.steps,
    })
}

/// Every input of the model is to be there, once.
fn check_names(card: &ModelCard, inputs: &[(String, Tensor)]) -> Answered<()> {
    let given = |name: &str| inputs.iter().filter(|(input, _)| input == name).count();
    if let Some((name, _)) = inputs.iter().find(|(name, _)| card.inputs.iter().all(|input| input.name != *name)) {
        return Err(Refusal::invalid(format!("inputs: model {:?} has no input {:?}", card.name, shown(name))));
    }
    match card.inputs.iter().map(|input| (&input.name, given(&input.name))).find(|(_, given)| *given != 1) {
        None => Ok(()),
        Some((name, 0)) => Err(Refusal::invalid(format!("inputs: {name:?} is missing"))),
        Some((name, _)) => Err(Refusal::invalid(format!("inputs: {name:?} is given twice"))),
    }
}

pub(crate) async fn checkpoint(State(frontend): Shared, path: ModelPath) -> Answered<axum::Json<Checkpoint>> {
    let model = Named::find(&frontend, path)?;
    let checkpoint = within(frontend.options.train_deadline, frontend.engine.checkpoint(model)).await?;
    log("checkpoint", describe(&frontend.card(model)?.name, &checkpoint));
    Ok(axum::Json(checkpoint))
}

pub(crate) async fn roll_back(State(frontend): Shared, path: ModelPath) -> Answered<axum::Json<Rollback>> {
    let model = Named::find(&frontend, path)?;
    let rollback = within(frontend.options.train_deadline, frontend.engine.roll_back(model)).await?;
    log("rollback", describe(&frontend.card(model)?.name, &rollback));
    Ok(axum::Json(rollback))
}

fn describe(model: &str, what: &impl Serialize) -> serde_json::Value {
    let mut fields = serde_json::to_value(what).unwrap_or_default();
    if let Some(fields) = fields.as_object_mut() {
        fields.insert("model".into(), model.into());
    }
    fields
}

async fn within<T>(limit: Duration, answer: impl Future<Output = Answered<T>>) -> Answered<T> {
    let late = || Refusal::unavailable(format!("no answer within {:.0} s; the work goes on", limit.as_secs_f64()));
    tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| Err(late()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(change: &str) -> Result<TrainJob, String> {
        let text = format!(
            r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}}],
                "targets":{{"name":"y","datatype":"INT64","shape":[1],"data":[3]}},"loss":"cross_entropy"{change}}}"#
        );
        parse_job(text.as_bytes(), 1 << 20, 10).map_err(|e| e.message)
    }

    #[test]
    fn what_is_left_out_has_a_default() {
        let job = job(r#","lr":0.1"#).unwrap();
        assert_eq!((job.optimizer.as_str(), job.steps, job.learning_rate), ("sgd", 1, 0.1));
        assert_eq!(job.targets.map(|t| t.to_i64_vec()), Some(vec![3]));
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (change, reason) in [
            ("", "lr"),
            (r#","lr":-1"#, "lr"),
            (r#","lr":1,"steps":0"#, "steps is 0"),
            (r#","lr":1,"steps":11"#, "1 to 10"),
            (r#","lr":1,"stesp":1"#, "stesp"),
        ] {
            let message = job(change).unwrap_err();
            assert!(message.contains(reason), "{message}");
        }
    }
}
