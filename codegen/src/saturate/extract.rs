//! Extraction: one node per e-class, so that the graph they form costs little when shared nodes are paid once.
//!
//! It starts from the input's own nodes and descends: a step gives one class another node, or takes every user away from one
//! class at a time, and is kept if the exact cost of the graph falls. So the result is never worse than the input. Classes that
//! the input does not have start with the node that adds least to it.

use std::collections::HashMap;

use egg::{Id, Language};
use meganeura_ir::{Graph, GraphError, NodeId, Op, TensorType};

use super::analysis::{TensorGraph, op_of, tensor_type};
use super::cost::node_cost;
use super::language::TensorLang;

/// Passes over all classes before the descent stops regardless.
const MAX_PASSES: usize = 12;

/// One way to compute a class.
struct Candidate {
    op: Op,
    operands: Vec<usize>,
    cost: u64,
}

/// The tensor classes of an e-graph, numbered in the order of their ids, and the node chosen for each.
pub struct Extraction {
    candidates: Vec<Vec<Candidate>>,
    choice: Vec<usize>,
    /// Uses of each class by roots and by the chosen nodes of used classes.
    uses: Vec<u32>,
    /// The classes of outputs, then those of updates.
    roots: Vec<usize>,
}

/// Another choice for a class.
#[derive(Clone, Copy)]
struct Switch {
    class: usize,
    candidate: usize,
}

/// Uses that a switch takes and gives, one class each.
#[derive(Default)]
struct Changes {
    acquired: Vec<usize>,
    released: Vec<usize>,
}

impl Extraction {
    /// Starts from `nodes`, the input's live nodes, operands first; `roots` are the ids of outputs and updates.
    pub fn new(egraph: &TensorGraph, nodes: &[(NodeId, TensorLang, Id)], roots: &[Id]) -> Self {
        let mut ids: Vec<Id> = egraph.classes().map(|c| c.id).filter(|&id| tensor_type(egraph, id).is_some()).collect();
        ids.sort_unstable();
        let number: HashMap<Id, usize> = ids.iter().enumerate().map(|(n, &id)| (id, n)).collect();

        let candidate = |node: &TensorLang| {
            let types: Option<Vec<&TensorType>> = node.operands().iter().map(|&o| tensor_type(egraph, o)).collect();
            let operands = node.operands().iter().map(|o| number.get(&egraph.find(*o)).copied());
            let op = op_of(egraph, node)?;
            Some((op, types?, operands.collect::<Option<Vec<usize>>>()?))
        };
        let mut found: Vec<Vec<(&TensorLang, Candidate)>> = Vec::with_capacity(ids.len());
        for &id in &ids {
            let of_node = |node| {
                let (op, types, operands) = candidate(node)?;
                let cost = node_cost(&op, &types, tensor_type(egraph, id)?);
                Some((node, Candidate { op, operands, cost }))
            };
            found.push(egraph[id].nodes.iter().filter_map(of_node).collect());
        }
        keep_computable(&mut found);
        let mut candidates = Vec::with_capacity(ids.len());
        let mut position: Vec<HashMap<&TensorLang, usize>> = Vec::with_capacity(ids.len());
        for found in found {
            position.push(found.iter().enumerate().map(|(n, (node, _))| (*node, n)).collect());
            candidates.push(found.into_iter().map(|(_, candidate)| candidate).collect::<Vec<_>>());
        }

        let mut choice = vec![None; ids.len()];
        for (_, node, id) in nodes {
            let canonical = node.clone().map_children(|c| egraph.find(c));
            let class = number[&egraph.find(*id)];
            // The first node of a class precedes all others, so that these choices have no cycle.
            if choice[class].is_none() {
                choice[class] = position[class].get(&canonical).copied();
            }
        }
        let choice = least_additions(&candidates, choice);
        let roots: Vec<usize> = roots.iter().map(|r| number[&egraph.find(*r)]).collect();
        let mut extraction = Extraction { uses: vec![0; ids.len()], candidates, choice, roots };
        extraction.count_uses();
        extraction
    }

    /// The cost of the chosen graph.
    pub fn cost(&self) -> u64 {
        self.live().map(|c| self.chosen(c).cost).sum()
    }

    /// Descends until no step helps.
    pub fn improve(&mut self) {
        for _ in 0..MAX_PASSES {
            let switched = self.switch_each() + self.bypass_each();
            if switched == 0 {
                break;
            }
        }
    }

    /// The chosen graph: inputs, parameters, outputs and updates as in `source`.
    pub fn build(&self, source: &Graph) -> Result<Graph, GraphError> {
        let mut graph = Graph::new();
        for input in source.inputs() {
            graph.input(input.name.clone(), input.ty.clone())?;
        }
        for parameter in source.parameters() {
            graph.parameter(parameter.clone())?;
        }
        let mut built: Vec<Option<NodeId>> = vec![None; self.choice.len()];
        for class in self.topological_order() {
            let node = self.chosen(class);
            let operands: Vec<NodeId> = node.operands.iter().filter_map(|&o| built[o]).collect();
            built[class] = Some(graph.push(node.op.clone(), &operands)?);
        }
        let mut roots = self.roots.iter().filter_map(|&r| built[r]);
        for (output, node) in source.outputs().iter().zip(&mut roots) {
            graph.output(output.name.clone(), node)?;
        }
        for (update, node) in source.updates().iter().zip(roots) {
            graph.update(update.parameter, node)?;
        }
        Ok(graph)
    }

    fn chosen(&self, class: usize) -> &Candidate {
        &self.candidates[class][self.choice[class]]
    }

    fn live(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.uses.len()).filter(|&c| self.uses[c] > 0)
    }

    /// Tries every other node of every live class.
    fn switch_each(&mut self) -> usize {
        let mut switched = 0;
        for class in (0..self.candidates.len()).rev() {
            for candidate in 0..self.candidates[class].len() {
                if self.uses[class] > 0 && candidate != self.choice[class] {
                    switched += usize::from(self.attempt(&[Switch { class, candidate }]));
                }
            }
        }
        switched
    }

    /// Tries to leave out each live class with several users: a single user that switches away saves nothing.
    fn bypass_each(&mut self) -> usize {
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.candidates.len()];
        for class in self.live() {
            for &operand in &self.chosen(class).operands {
                if users[operand].last() != Some(&class) {
                    users[operand].push(class);
                }
            }
        }
        let shared = (0..users.len()).filter(|&c| users[c].len() > 1);
        shared.filter(|&class| self.bypass(class, &users[class])).count()
    }

    fn bypass(&mut self, class: usize, users: &[usize]) -> bool {
        let users = users.iter().filter(|&&u| self.uses[u] > 0 && self.chosen(u).operands.contains(&class));
        let away = |&user: &usize| {
            let others = self.candidates[user].iter().enumerate().filter(|(_, c)| !c.operands.contains(&class));
            let candidate = others.min_by_key(|(n, c)| (c.cost, *n))?.0;
            Some(Switch { class: user, candidate })
        };
        let switches: Option<Vec<Switch>> = users.map(away).collect();
        switches.is_some_and(|s| s.len() > 1 && self.attempt(&s))
    }

    /// Switches if that lowers the cost and makes no cycle.
    fn attempt(&mut self, switches: &[Switch]) -> bool {
        let previous: Vec<Switch> = switches.iter().map(|s| Switch { candidate: self.choice[s.class], ..*s }).collect();
        let mut changes = Changes::default();
        if self.switch(switches, &mut changes) < 0 && !self.has_cycle(switches.iter().map(|s| s.class)) {
            return true;
        }
        previous.iter().for_each(|s| self.choice[s.class] = s.candidate);
        // What died in a cycle still counts as used: uses are what they were, rather than what switching back makes of them.
        changes.released.iter().for_each(|&class| self.uses[class] += 1);
        changes.acquired.iter().for_each(|&class| self.uses[class] -= 1);
        false
    }

    /// Switches, and returns by how much the cost changes.
    fn switch(&mut self, switches: &[Switch], changes: &mut Changes) -> i64 {
        let previous: Vec<usize> = switches.iter().map(|s| self.choice[s.class]).collect();
        let mut change = 0;
        for s in switches {
            change += self.candidates[s.class][s.candidate].cost as i64;
            change += self.acquire(self.candidates[s.class][s.candidate].operands.clone(), &mut changes.acquired);
        }
        for s in switches {
            self.choice[s.class] = s.candidate;
        }
        for (s, &candidate) in switches.iter().zip(&previous) {
            change -= self.candidates[s.class][candidate].cost as i64;
            change -= self.release(self.candidates[s.class][candidate].operands.clone(), &mut changes.released);
        }
        change
    }

    /// Adds one use of each class, and of what that brings to life; returns the cost of the latter. `acquired` gets every use.
    fn acquire(&mut self, mut classes: Vec<usize>, acquired: &mut Vec<usize>) -> i64 {
        let mut cost = 0;
        while let Some(class) = classes.pop() {
            acquired.push(class);
            self.uses[class] += 1;
            if self.uses[class] == 1 {
                cost += self.chosen(class).cost as i64;
                classes.extend_from_slice(&self.chosen(class).operands);
            }
        }
        cost
    }

    /// Takes one use from each class, and from what that kills; returns the cost of the latter. `released` gets every use.
    fn release(&mut self, mut classes: Vec<usize>, released: &mut Vec<usize>) -> i64 {
        let mut cost = 0;
        while let Some(class) = classes.pop() {
            released.push(class);
            self.uses[class] -= 1;
            if self.uses[class] == 0 {
                cost += self.chosen(class).cost as i64;
                classes.extend_from_slice(&self.chosen(class).operands);
            }
        }
        cost
    }

    fn count_uses(&mut self) {
        self.uses.fill(0);
        self.acquire(self.roots.clone(), &mut Vec::new());
    }

    /// Whether the chosen nodes form a cycle that `from` reach.
    fn has_cycle(&self, from: impl Iterator<Item = usize>) -> bool {
        #[derive(Clone, Copy, PartialEq)]
        enum Visit {
            New,
            Open,
            Done,
        }
        let mut visits = vec![Visit::New; self.choice.len()];
        let mut stack: Vec<(usize, bool)> = from.map(|class| (class, false)).collect();
        while let Some((class, operands_done)) = stack.pop() {
            match visits[class] {
                _ if operands_done => visits[class] = Visit::Done,
                Visit::Open => return true,
                Visit::Done => {}
                Visit::New => {
                    visits[class] = Visit::Open;
                    stack.push((class, true));
                    stack.extend(self.chosen(class).operands.iter().map(|&o| (o, false)));
                }
            }
        }
        false
    }

    /// The live classes, operands before users.
    fn topological_order(&self) -> Vec<usize> {
        let mut order = Vec::new();
        let mut seen = vec![false; self.choice.len()];
        let mut stack: Vec<(usize, bool)> = self.roots.iter().rev().map(|&r| (r, false)).collect();
        while let Some((class, operands_done)) = stack.pop() {
            if operands_done {
                order.push(class);
            } else if !std::mem::replace(&mut seen[class], true) {
                stack.push((class, true));
                stack.extend(self.chosen(class).operands.iter().rev().map(|&o| (o, false)));
            }
        }
        order
    }
}

/// Drops nodes with an operand that no op computes.
fn keep_computable(found: &mut [Vec<(&TensorLang, Candidate)>]) {
    loop {
        let computable: Vec<bool> = found.iter().map(|f| !f.is_empty()).collect();
        let before: usize = found.iter().map(Vec::len).sum();
        found.iter_mut().for_each(|f| f.retain(|(_, c)| c.operands.iter().all(|&o| computable[o])));
        if found.iter().map(Vec::len).sum::<usize>() == before {
            return;
        }
    }
}

/// Completes `input`, the choices of the input's classes: every other class takes the node that adds least to the input.
fn least_additions(candidates: &[Vec<Candidate>], input: Vec<Option<usize>>) -> Vec<usize> {
    let mut choice = input.clone();
    let mut added: Vec<Option<u64>> = input.iter().map(|c| c.map(|_| 0)).collect();
    let mut changed = true;
    while changed {
        changed = false;
        for class in (0..candidates.len()).filter(|&c| input[c].is_none()) {
            for (n, candidate) in candidates[class].iter().enumerate() {
                let operands: Option<Vec<u64>> = candidate.operands.iter().map(|&o| added[o]).collect();
                let Some(operands) = operands else { continue };
                let total = operands.into_iter().fold(candidate.cost.max(1), u64::saturating_add);
                if added[class].is_none_or(|best| total < best) {
                    (added[class], choice[class], changed) = (Some(total), Some(n), true);
                }
            }
        }
    }
    choice.into_iter().map(|c| c.unwrap_or(0)).collect()
}
