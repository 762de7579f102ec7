//! One table of cases per family: an operator with attributes at some opset, operands, and the numbers that the standard
//! prescribes.

mod attention;
mod contraction;
mod control;
mod data;
mod einsum;
mod loss;
mod math;
mod microsoft;
mod microsoft_attention;
mod ml;
mod quantization;
mod random;
mod recurrent;
mod reduction;
mod scan;
mod scatter;
mod selection;
mod sequence;
mod signal;
mod spatial;

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
    nodes: Vec<NodeBuilder>,
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
    let mut node = attributes(node(op, &[], &[]));
    let named = |(i, arg): (usize, &Arg)| if matches!(arg, Absent) { String::new() } else { format!("x{i}") };
    node.0.input = args.iter().enumerate().map(named).collect();
    node.0.output = (0..expected.len()).map(|i| format!("y{i}")).collect();
    Case { opset, nodes: vec![node], args, expected }
}

/// A case of several nodes, which read `x0`, `x1`, .. and compute `y0`, `y1`, ..
pub(super) fn program(opset: i64, nodes: Vec<NodeBuilder>, args: Vec<Arg>, expected: Vec<Tensor>) -> Case {
    Case { opset, nodes, args, expected }
}

pub(super) fn plain(op: &str, opset: i64, args: Vec<Arg>, expected: Tensor) -> Case {
    case(op, opset, |n| n, args, vec![expected])
}

pub(super) use Arg::{Absent, Input, Known};

impl Case {
    /// A model that imports the operator's set.
    fn builder(&self) -> ModelBuilder {
        let domains: BTreeSet<&str> = self.nodes.iter().map(|n| n.0.domain.as_str()).filter(|d| !d.is_empty()).collect();
        domains.into_iter().fold(ModelBuilder::new(self.opset), |builder, domain| match domain {
            "ai.onnx.ml" | "ai.onnx.preview.training" => ModelBuilder::new(NEWEST).import(domain, self.opset),
            domain => builder.import(domain, 1),
        })
    }

    /// What is wrong, if anything.
    fn check(self) -> Vec<String> {
        let mut wrong = Vec::new();
        let ops: Vec<&str> = self.nodes.iter().map(|n| n.0.op_type.as_str()).collect();
        let what = format!("{} of opset {}", ops.join(", "), self.opset);
        let mut builder = self.builder();
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
                Absent => {}
            }
        }
        for i in 0..self.expected.len() {
            builder = builder.output(&format!("y{i}"));
        }
        let results = run(&self.nodes.into_iter().fold(builder, ModelBuilder::node), &inputs);
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

/// The standard operators beside those of another domain.
const NEWEST: i64 = 23;

fn cases() -> Vec<Case> {
    [
        attention::cases(),
        microsoft::cases(),
        microsoft_attention::cases(),
        math::cases(),
        data::cases(),
        reduction::cases(),
        contraction::cases(),
        control::cases(),
        sequence::cases(),
        einsum::cases(),
        loss::cases(),
        ml::cases(),
        quantization::cases(),
        recurrent::cases(),
        scan::cases(),
        scatter::cases(),
        selection::cases(),
        signal::cases(),
        spatial::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[test]
fn every_operator_gives_the_numbers_of_the_standard() {
    let wrong: Vec<String> = cases().into_iter().flat_map(Case::check).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_operator_of_the_table_has_a_case() {
    let own = |(domain, op): (&str, &str)| (domain.to_owned(), op.to_owned());
    let random = random::OPERATORS.map(|op| own(("", op)));
    let tested = cases().into_iter().flat_map(|c| c.nodes).map(|n| (n.0.domain, n.0.op_type));
    let tested: BTreeSet<(String, String)> = tested.chain(random).collect();
    let missing: Vec<(&str, &str)> = super::table().filter(|&row| !tested.contains(&own(row))).collect();
    assert!(missing.is_empty(), "operators without a test: {missing:?}");
}

#[test]
fn no_operator_is_listed_twice() {
    let mut seen = BTreeSet::new();
    for row in super::table() {
        assert!(seen.insert(row), "{row:?} is listed twice");
    }
}

/// Measured by ONNX's tests, or listed as without any.
#[test]
fn the_coverage_document_names_every_operator() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/COVERAGE.md");
    let document = std::fs::read_to_string(path).expect("docs/COVERAGE.md is part of the checkout");
    let words: BTreeSet<&str> = document.split(|c: char| c.is_whitespace() || ",.|".contains(c)).collect();
    // A domain has dots, too.
    let last = |domain: &str| domain.rsplit('.').next().unwrap_or_default().to_owned();
    let name = |(domain, op): (&str, &str)| if domain.is_empty() { op.to_owned() } else { format!("{}::{op}", last(domain)) };
    let missing: Vec<String> = super::table().map(name).filter(|name| !words.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "run `cargo xtask corpus`: the document lacks {missing:?}");
}
