//! What a saturation did.

use std::fmt;

use serde::{Deserialize, Serialize};

/// When to stop. Never seconds: programs and results would change from run to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// E-nodes, attributes included.
    pub nodes: usize,
    pub iterations: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { nodes: 200_000, iterations: 16 }
    }
}

/// Why a saturation stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// No rule found anything new.
    Saturated,
    /// At this many iterations.
    IterationLimit(usize),
    /// At this many e-nodes.
    NodeLimit(usize),
}

/// What a saturation did. Its `Display` is one summary line and one line per rule that fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Rules that merged something, with how often, in the order of the table.
    pub fired: Vec<(String, usize)>,
    /// E-nodes at the end.
    pub nodes: usize,
    /// E-classes at the end.
    pub classes: usize,
    pub iterations: usize,
    pub stop: StopReason,
    /// Cost of the given graph, in the unit of [`node_cost`](super::cost::node_cost).
    pub cost_before: u64,
    /// Cost of the returned graph, at most `cost_before`.
    pub cost_after: u64,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopReason::Saturated => f.write_str("saturated"),
            StopReason::IterationLimit(n) => write!(f, "iteration limit reached at {n}"),
            StopReason::NodeLimit(n) => write!(f, "node limit reached at {n}"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { nodes, classes, iterations, stop, cost_before, cost_after, .. } = self;
        let saved = 100.0 * cost_before.saturating_sub(*cost_after) as f64 / (*cost_before).max(1) as f64;
        writeln!(
            f,
            "{stop} after {iterations} iterations: {nodes} nodes in {classes} classes, \
             cost {cost_before} -> {cost_after} (-{saved:.2} %)"
        )?;
        self.fired.iter().try_for_each(|(rule, count)| writeln!(f, "{count:>8} {rule}"))
    }
}
