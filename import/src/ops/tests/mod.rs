//! One table of cases per family: an operator with attributes at some opset, operands, and the numbers that the standard
//! prescribes.

mod contraction;
mod data;
mod math;
mod reduction;

use std::collections::BTreeSet;

use meganeura_ir::Tensor;

use crate::testing::{ModelBuilder, NodeBuilder, node, run};

/// An operand of a case.
pub(super) enum Arg {
    /// Supplied when the model runs.
    Input(Tensor),
    /// An initializer.
    Known(Tensor),
    Absent,
}

pub(super) struct Case {
    opset: i64,
    node: NodeBuilder,
    args: Vec<Arg>,
    expected: Vec<Tensor>,
}

/// A case of `op` with attributes that `attributes` adds.
pub(super) fn case(
    op: &str,
    opset: i64,
    attributes: impl Fn(NodeBuilder) -> NodeBuilder,
    args: Vec<Arg>,
    expected: Vec<Tensor>,
) -> Case {
    Case { opset, node: attributes(node(op, &[], &[])), args, expected }
}

pub(super) fn plain(op: &str, opset: i64, args: Vec<Arg>, expected: Tensor) -> Case {
    case(op, opset, |n| n, args, vec![expected])
}

pub(super) use Arg::{Absent, Input, Known};

impl Case {
    /// What is wrong, if anything.
    fn check(mut self) -> Vec<String> {
        let mut wrong = Vec::new();
        let what = format!("{} of opset {}", self.node.0.op_type, self.opset);
        let mut builder = ModelBuilder::new(self.opset);
        let mut inputs = Vec::new();
        for (i, arg) in self.args.into_iter().enumerate() {
            let name = format!("x{i}");
            match arg {
                Input(tensor) => {
                    let dims: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
                    builder = builder.input(&name, tensor.dtype(), &dims.join(","));
                    inputs.push(tensor);
                }
                Known(tensor) => builder = builder.initializer(&name, &tensor),
                Absent => {
                    self.node.0.input.push(String::new());
                    continue;
                }
            }
            self.node.0.input.push(name);
        }
        for i in 0..self.expected.len() {
            let name = format!("y{i}");
            self.node.0.output.push(name.clone());
            builder = builder.output(&name);
        }
        let results = run(&builder.node(self.node), &inputs);
        for (i, ((ty, found), expected)) in results.into_iter().zip(&self.expected).enumerate() {
            if ty != *expected.ty() {
                wrong.push(format!("output {i} of {what} is {ty}, expected {}", expected.ty()));
                continue;
            }
            let expected = expected.to_f64_vec();
            let agrees = |(found, expected): (&f64, &f64)| {
                let close = (found - expected).abs() <= 1e-6 * (1.0 + expected.abs());
                close || found == expected || found.is_nan() && expected.is_nan()
            };
            if !found.iter().zip(&expected).all(agrees) {
                wrong.push(format!("output {i} of {what}: found {found:?}, expected {expected:?}"));
            }
        }
        wrong
    }
}

fn cases() -> Vec<Case> {
    [math::cases(), data::cases(), reduction::cases(), contraction::cases()].into_iter().flatten().collect()
}

#[test]
fn every_operator_gives_the_numbers_of_the_standard() {
    let wrong: Vec<String> = cases().into_iter().flat_map(Case::check).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_operator_of_the_table_has_a_case() {
    let tested: BTreeSet<String> = cases().into_iter().map(|c| c.node.0.op_type).collect();
    let missing: Vec<&str> = super::table().map(|(_, op)| op).filter(|op| !tested.contains(*op)).collect();
    assert!(missing.is_empty(), "operators without a test: {missing:?}");
}

#[test]
fn no_operator_is_listed_twice() {
    let mut seen = BTreeSet::new();
    for row in super::table() {
        assert!(seen.insert(row), "{row:?} is listed twice");
    }
}

/// com.microsoft operators have no tests in ONNX's data.
#[test]
fn every_standard_operator_occurs_in_the_measured_coverage() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/coverage.json");
    let text = std::fs::read_to_string(path).expect("docs/coverage.json is part of the checkout");
    let coverage: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let tests = coverage["tests"].as_array().expect("it lists tests");
    let measured: BTreeSet<&str> = tests.iter().filter_map(|test| test["operator"].as_str()).collect();
    let missing: Vec<_> = super::table().filter(|(domain, op)| domain.is_empty() && !measured.contains(op)).collect();
    assert!(missing.is_empty(), "operators that no test of ONNX measures: {missing:?}");
}
