//! What training does with each parameter, as a table.

use meganeura::ParameterPlan;
use meganeura::log::Parameter;
use serde_json::Value;

use super::table::Table;

pub fn table(plan: &[ParameterPlan]) -> String {
    let mut table = Table::new(["parameter", "shape", "trains", "learning rate", "weight decay", "why"]);
    for ParameterPlan { name, shape, rates, reason } in plan {
        let trains = if rates.is_some() { "yes" } else { "frozen" };
        let [rate, decay] = [rates.map(|r| r.learning_rate), rates.map(|r| r.weight_decay)]
            .map(|value| value.map_or_else(|| "-".to_owned(), |value| value.to_string()));
        table.row([name.clone(), shape.to_string(), trains.to_owned(), rate, decay, reason.clone()]);
    }
    let elements = |trains: bool| -> usize { plan.iter().filter(|p| p.rates.is_some() == trains).map(|p| p.shape.numel()).sum() };
    format!("{}{} numbers train, {} do not\n", table.text("parameters"), elements(true), elements(false))
}

pub fn json(plan: Vec<ParameterPlan>) -> Value {
    serde_json::json!(plan.into_iter().map(Parameter::from).collect::<Vec<_>>())
}
