//! Random numbers: refused by name, since a graph is a function of its inputs.

use super::{ANY, Row, Rule, row};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("Bernoulli",             1..=ANY, &[],   Rule::One(|_| Err(random("Bernoulli")))),
    row("Multinomial",           1..=ANY, &[],   Rule::One(|_| Err(random("Multinomial")))),
    row("RandomNormal",          0..=ANY, &[],   Rule::One(|_| Err(random("RandomNormal")))),
    row("RandomNormalLike",      1..=ANY, &[],   Rule::One(|_| Err(random("RandomNormalLike")))),
    row("RandomUniform",         0..=ANY, &[],   Rule::One(|_| Err(random("RandomUniform")))),
    row("RandomUniformLike",     1..=ANY, &[],   Rule::One(|_| Err(random("RandomUniformLike")))),
];

fn random(what: &'static str) -> OpError {
    OpError::Random { what, remedy: "draw the numbers outside and make them an input of the model" }
}
