mod cases;
mod graphs;
mod raise;
mod sketch;

use std::collections::BTreeSet;

use meganeura_ir::{Graph, NodeId};

use super::rewrite::compile;
use super::rules::RULES;
use super::{Limits, Saturated, StopReason, explore};
use cases::CASES;
use sketch::{Sketch, assert_classes_agree};

/// The e-graph after one rule alone.
fn after_rule(name: &str, build: fn(&mut Sketch) -> NodeId) -> (Graph, Saturated) {
    let rewrites = compile(RULES.iter().filter(|r| r.name == name)).unwrap();
    let mut sketch = Sketch::default();
    let y = build(&mut sketch);
    let graph = sketch.finish(y);
    let saturated = explore(&graph, &Limits::default(), &rewrites).unwrap();
    assert_eq!(saturated.report.stop, StopReason::Saturated, "{name}");
    (graph, saturated)
}

#[test]
fn every_rule_has_a_case_and_its_own_name() {
    let rules: BTreeSet<&str> = RULES.iter().map(|r| r.name).collect();
    let cases: BTreeSet<&str> = CASES.iter().map(|c| c.rule).collect();
    assert_eq!(rules.len(), RULES.len());
    assert_eq!(rules, cases);
}

#[test]
fn every_rule_fires_where_it_should() {
    for case in CASES {
        let (_, saturated) = after_rule(case.rule, case.fires);
        assert!(!saturated.report.fired.is_empty(), "{} does not fire", case.rule);
    }
}

#[test]
fn no_rule_fires_where_it_must_not() {
    for case in CASES {
        let (_, saturated) = after_rule(case.rule, case.refuses);
        assert_eq!(saturated.report.fired, [], "{} fires", case.rule);
    }
}

#[test]
fn every_rule_keeps_values() {
    for case in CASES {
        for build in [case.fires, case.refuses] {
            let (graph, saturated) = after_rule(case.rule, build);
            assert_classes_agree(&saturated.egraph, &saturated.nodes, &graph, case.rule);
        }
    }
}

#[test]
fn all_rules_together_keep_the_values_of_every_case() {
    let rewrites = compile(RULES).unwrap();
    for case in CASES {
        for build in [case.fires, case.refuses] {
            let mut sketch = Sketch::default();
            let y = build(&mut sketch);
            let graph = sketch.finish(y);
            let saturated = explore(&graph, &Limits::default(), &rewrites).unwrap();
            assert_eq!(saturated.report.stop, StopReason::Saturated, "{}", case.rule);
            assert_classes_agree(&saturated.egraph, &saturated.nodes, &graph, case.rule);
        }
    }
}
