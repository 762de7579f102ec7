//! Every rule with a graph in which it fires, one in which it must not, and the values of all that it builds, over other sizes too.

/// A table of cases: `"rule": |g| graph in which it fires, not graph in which it does not;`
macro_rules! cases {
    ($($rule:literal: |$g:ident| $fires:expr, not $refuses:expr;)*) => {
        pub const CASES: &[super::Case] = &[$(super::Case { rule: $rule, fires: |$g| $fires, refuses: |$g| $refuses }),*];
    };
}

mod cases;
mod graphs;
mod raise;
mod sketch;

use std::collections::BTreeSet;

use meganeura_ir::{Graph, NodeId};

use super::raise::{RAISE, raising};
use super::rewrite::{Rule, compile};
use super::rules::RULES;
use super::{Limits, Saturated, StopReason, explore};
use sketch::{Sizes, Sketch, assert_classes_agree};

struct Case {
    rule: &'static str,
    fires: fn(&mut Sketch) -> NodeId,
    refuses: fn(&mut Sketch) -> NodeId,
}

/// A table of rules with its cases.
struct Suite {
    rules: &'static [Rule],
    cases: &'static [Case],
    /// Those beside which a rule does its work: rules that raise do it together.
    company: fn(&'static Rule) -> Vec<&'static Rule>,
}

const SUITES: [Suite; 2] = [
    Suite { rules: RULES, cases: cases::CASES, company: |rule| vec![rule] },
    Suite { rules: RAISE, cases: raise::CASES, company: |_| raising().collect() },
];

/// Calls `check` with every rule, its case, and what it does its work beside. A rule without a case fails.
fn for_every_rule(check: impl Fn(&'static Rule, &'static Case, &[&'static Rule])) {
    for Suite { rules, cases, company } in SUITES {
        for rule in rules {
            let case = cases.iter().find(|case| case.rule == rule.name).unwrap_or_else(|| panic!("{} has no case", rule.name));
            check(rule, case, &company(rule));
        }
    }
}

fn explored(graph: &Graph, rules: &[&'static Rule], context: &str) -> Saturated {
    let saturated = explore(graph, &Limits::default(), &compile(rules.iter().copied()).unwrap()).unwrap();
    assert_eq!(saturated.report.stop, StopReason::Saturated, "{context}");
    saturated
}

fn fires(rule: &Rule, build: fn(&mut Sketch) -> NodeId, rules: &[&'static Rule]) -> bool {
    let graph = Sketch::graph(Sizes::AS_WRITTEN, build).unwrap();
    explored(&graph, rules, rule.name).report.fired.iter().any(|(name, _)| *name == rule.name)
}

#[test]
fn every_rule_has_one_case_and_its_own_name() {
    let names: Vec<&str> = SUITES.iter().flat_map(|suite| suite.rules).map(|rule| rule.name).collect();
    let cases: Vec<&str> = SUITES.iter().flat_map(|suite| suite.cases).map(|case| case.rule).collect();
    for all in [&names, &cases] {
        let mut seen = BTreeSet::new();
        let twice: Vec<&&str> = all.iter().filter(|name| !seen.insert(**name)).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
    for_every_rule(|_, _, _| ());
    assert_eq!(cases.len(), names.len(), "cases of rules that are gone");
}

#[test]
fn every_rule_fires_where_it_should() {
    for_every_rule(|rule, case, rules| assert!(fires(rule, case.fires, rules), "{} does not fire", rule.name));
}

#[test]
fn no_rule_fires_where_it_must_not() {
    for_every_rule(|rule, case, rules| assert!(!fires(rule, case.refuses, rules), "{} fires", rule.name));
}

/// On random tensors: as written, of other odd sizes, of sizes of 1 and of none.
#[test]
fn every_rule_keeps_values() {
    for_every_rule(|rule, case, rules| {
        for build in [case.fires, case.refuses] {
            for sizes in Sizes::ALL {
                let context = format!("{}, {sizes:?}", rule.name);
                let Some(graph) = Sketch::graph(sizes, build) else { continue };
                let saturated = explored(&graph, rules, &context);
                assert_classes_agree::<f64>(&saturated, &graph, 1e-6, &context);
                assert_classes_agree::<f32>(&saturated, &graph, 1e-5, &context);
            }
        }
    });
}

#[test]
fn every_rule_is_tried_on_tensors_without_elements() {
    for_every_rule(|rule, case, _| {
        let is_empty = |graph: Graph| graph.live().into_iter().any(|id| graph.ty(id).shape.numel() == 0);
        let tried = Sizes::ALL.into_iter().filter_map(|sizes| Sketch::graph(sizes, case.fires)).any(is_empty);
        assert!(tried, "{}", rule.name);
    });
}

#[test]
fn all_rules_together_keep_the_values_of_every_case() {
    let all: Vec<&Rule> = RULES.iter().collect();
    for case in cases::CASES {
        for build in [case.fires, case.refuses] {
            let graph = Sketch::graph(Sizes::AS_WRITTEN, build).unwrap();
            assert_classes_agree::<f64>(&explored(&graph, &all, case.rule), &graph, 1e-6, case.rule);
        }
    }
}
