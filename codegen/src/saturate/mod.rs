//! Equality saturation: the graphs that a table of rules finds equal to a given one, in one e-graph, and the cheapest of them.
//!
//! [`saturate`] turns the live part of a [`Graph`] into an e-graph ([`language`], [`analysis`]), applies the rules ([`rules`])
//! until nothing new is found or a limit is met, and extracts ([`extract`]) the graph that costs least ([`cost`]). Limits count
//! nodes and iterations, so that the same graph gives the same result on every run and machine.

mod analysis;
mod attention;
mod contraction;
pub mod cost;
mod extract;
mod language;
mod movement;
mod raise;
mod reduction;
mod report;
mod rewrite;
mod rules;
mod scalars;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;
use std::time::Duration;

use egg::{Id, Rewrite, Runner, SimpleScheduler, Symbol};
use meganeura_ir::{Graph, GraphError, NodeId};

pub use raise::raise;
pub use report::{Limits, Report, StopReason};

use analysis::{Facts, TensorGraph, to_egraph};
use extract::Extraction;
use language::TensorLang;

/// Why a graph cannot be saturated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SaturateError {
    #[error("the extracted graph is malformed: {0}")]
    Graph(#[from] GraphError),
    #[error("rule {0:?} is malformed")]
    Rule(&'static str),
    #[error("saturation stopped: {0}")]
    Stopped(String),
}

type Rewrites = Vec<Rewrite<TensorLang, Facts>>;

/// The cheapest graph found equal to `graph`, and what was done to find it.
///
/// Inputs, parameters, outputs and updates keep their names and order; values agree to single-precision rounding. The
/// result costs at most what `graph` does ([`cost::graph_cost`]); where nothing cheaper is found, it is `graph` itself.
/// Equal graphs and limits give equal results.
pub fn saturate(graph: &Graph, limits: &Limits) -> Result<(Graph, Report), SaturateError> {
    static REWRITES: LazyLock<Result<Rewrites, &'static str>> = LazyLock::new(|| rewrite::compile(rules::RULES));
    let rewrites = REWRITES.as_ref().map_err(|name| SaturateError::Rule(name))?;
    saturate_with(graph, limits, rewrites)
}

fn saturate_with(graph: &Graph, limits: &Limits, rewrites: &Rewrites) -> Result<(Graph, Report), SaturateError> {
    let Saturated { egraph, nodes, mut report } = explore(graph, limits, rewrites)?;
    let roots: Vec<Id> = roots(graph, &nodes);
    let mut extraction = Extraction::new(&egraph, &nodes, &roots);
    extraction.improve();
    if extraction.cost() >= report.cost_before {
        return Ok((graph.clone(), report));
    }
    report.cost_after = extraction.cost();
    Ok((extraction.build(graph)?, report))
}

/// An e-graph after the rules.
struct Saturated {
    egraph: TensorGraph,
    /// The live nodes of the given graph, operands first.
    nodes: Vec<(NodeId, TensorLang, Id)>,
    /// With `cost_after` as before.
    report: Report,
}

fn explore(graph: &Graph, limits: &Limits, rewrites: &Rewrites) -> Result<Saturated, SaturateError> {
    let (egraph, nodes) = to_egraph(graph);
    let runner = Runner::<TensorLang, Facts>::new(Facts::default())
        .with_egraph(egraph)
        .with_scheduler(SimpleScheduler)
        .with_node_limit(limits.nodes)
        .with_iter_limit(limits.iterations)
        .with_time_limit(Duration::MAX)
        .run(rewrites);
    let stop = match runner.stop_reason {
        Some(egg::StopReason::Saturated) => StopReason::Saturated,
        Some(egg::StopReason::IterationLimit(n)) => StopReason::IterationLimit(n),
        Some(egg::StopReason::NodeLimit(n)) => StopReason::NodeLimit(n),
        other => return Err(SaturateError::Stopped(format!("{other:?}"))),
    };
    let times = |rule: &str| runner.iterations.iter().filter_map(|i| i.applied.get(&Symbol::from(rule))).sum();
    let fired = rules::RULES.iter().chain(raise::RAISE).map(|r| (r.name.to_owned(), times(r.name))).filter(|f| f.1 > 0).collect();
    let cost = cost::graph_cost(graph);
    let report = Report {
        fired,
        nodes: runner.egraph.total_number_of_nodes(),
        classes: runner.egraph.number_of_classes(),
        iterations: runner.iterations.len(),
        stop,
        cost_before: cost,
        cost_after: cost,
    };
    Ok(Saturated { egraph: runner.egraph, nodes, report })
}

/// The classes of outputs, then those of updates.
fn roots(graph: &Graph, nodes: &[(NodeId, TensorLang, Id)]) -> Vec<Id> {
    let class = |node: NodeId| nodes.binary_search_by_key(&node, |n| n.0).ok().map(|i| nodes[i].2);
    graph.roots().filter_map(class).collect()
}
