//! Recomputation: values that would wait in memory for the backward pass are dropped and computed again, so that a program fits the memory
//! that it may take.
//!
//! The pass works on the sequence of kernels, after fusion: a kernel that runs a second time reads what it read the first time, so no
//! number changes, and the sizes that it counts are those of the program. It plays the sequence and, where memory is short, drops the value
//! that is cheapest to compute again for the bytes and the time that it frees, as in Kirisame et al., "Dynamic Tensor
//! Rematerialization" (arXiv 2006.09616), but with the coming uses known.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use meganeura_ir::{Graph, NodeId};

use crate::access::contract_shape;
use crate::attention::attention;
use crate::fuse::Domain;
use crate::kernels::{Bound, Emitted};
use crate::order::Launch;
use crate::plan::{Layout, Placement, bind};
use crate::program::{ALIGNMENT, Region};
use crate::{CompileError, DeviceProfile};

/// A program may take up to so many times the work of the one that computes everything once.
const MAX_WORK: u64 = 3;
/// Kernels that may have to run again for one value.
const MAX_CHAIN: usize = 256;
/// Budgets that are tried on the way to the smallest one.
const TRIALS: u32 = 12;
/// Operations of a contraction that take as long as moving a byte.
const OPERATIONS_PER_BYTE: u64 = 16;

/// What is to be placed: kernels in execution order, one per launch.
#[derive(Clone, Copy)]
pub struct Sequence<'a> {
    pub graph: &'a Graph,
    pub launches: &'a [Launch],
    pub emitted: &'a [Emitted],
    pub layout: &'a Layout,
    pub profile: &'a DeviceProfile,
}

impl Sequence<'_> {
    /// The kernels in the order in which they run, some more than once, and their placement, in at most `limit` bytes of device memory.
    ///
    /// # Errors
    /// [`CompileError::MemoryLimit`] says what can be reached.
    pub fn fit(&self, limit: Option<u64>) -> Result<(Vec<usize>, Placement), CompileError> {
        let fixed = self.layout.memory.total();
        let whole = self.whole();
        let total = |found: &(Vec<usize>, Placement)| fixed + found.1.scratch.iter().sum::<u64>();
        let Some(limit) = limit.filter(|&limit| total(&whole) > limit) else { return Ok(whole) };

        let work = Work::new(self);
        let play = |budget: u64| work.play(budget).map(|schedule| self.placed(schedule));
        // Holes between values take memory too.
        let mut budget = limit.saturating_sub(fixed);
        for _ in 0..TRIALS / 3 {
            let Some(found) = play(budget) else { break };
            let excess = total(&found).saturating_sub(limit);
            if excess == 0 {
                return Ok(found);
            }
            budget = budget.saturating_sub(excess);
        }
        // These budgets do not depend on the limit: what the error names can be reached.
        let mut best = whole;
        let (mut low, mut high) = (0, best.1.live);
        for _ in 0..TRIALS {
            let budget = low + (high - low) / 2;
            match play(budget) {
                Some(found) => {
                    high = budget;
                    if total(&found) < total(&best) {
                        best = found;
                    }
                }
                None => low = budget,
            }
        }
        let reachable = total(&best);
        if reachable <= limit { Ok(best) } else { Err(CompileError::MemoryLimit { limit, reachable }) }
    }

    /// Whether the kernels, each once, take at most `limit` bytes of device memory.
    pub fn fits(&self, limit: u64) -> bool {
        self.layout.memory.total() + self.whole().1.scratch.iter().sum::<u64>() <= limit
    }

    fn whole(&self) -> (Vec<usize>, Placement) {
        self.placed((0..self.emitted.len()).collect())
    }

    fn placed(&self, schedule: Vec<usize>) -> (Vec<usize>, Placement) {
        let levels: Vec<usize> = schedule.iter().map(|&launch| self.launches[launch].level).collect();
        let placement = bind(self.graph, self.emitted, &schedule, &levels, self.layout, self.profile);
        (schedule, placement)
    }
}

/// An intermediate value in scratch memory.
struct Value {
    bytes: u64,
    producer: usize,
    /// Kernels that read it, in execution order; copies after the last kernel count as one more.
    uses: Vec<usize>,
}

/// A kernel.
struct Task {
    reads: Vec<usize>,
    writes: Vec<usize>,
    /// In bytes moved.
    cost: u64,
    /// The last step before which it may run again: later ones have overwritten what it reads. `None` if it writes more than scratch memory.
    until: Option<usize>,
}

struct Work {
    values: Vec<Value>,
    tasks: Vec<Task>,
}

impl Work {
    fn new(sequence: &Sequence) -> Self {
        let Sequence { graph, launches, emitted, layout, profile } = *sequence;
        let mut work = Work { values: Vec::new(), tasks: Vec::new() };
        let mut index: HashMap<NodeId, usize> = HashMap::new();
        let mut overwritten: BTreeMap<Region, usize> = BTreeMap::new();
        for (step, kernel) in emitted.iter().enumerate() {
            let written = kernel.bound.iter().filter(|b| !matches!(b, Bound::Read(_)));
            overwritten.extend(written.filter_map(|b| Some((*layout.home.get(&b.node())?, step))));
        }
        for (step, (kernel, launch)) in emitted.iter().zip(launches).enumerate() {
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            let mut until = Some(usize::MAX);
            for bound in &kernel.bound {
                let node = bound.node();
                match (bound, layout.home.get(&node)) {
                    (Bound::Read(_), Some(region)) => {
                        let replaced = overwritten.get(region).copied().unwrap_or(usize::MAX);
                        until = until.map(|until| until.min(replaced));
                    }
                    (Bound::Read(_), None) => {
                        if let Some(&value) = index.get(&node) {
                            work.values[value].uses.push(step);
                            reads.push(value);
                        }
                    }
                    (_, Some(_)) => until = None,
                    (_, None) => {
                        let bytes = profile.bytes(graph.ty(node)).next_multiple_of(ALIGNMENT);
                        index.insert(node, work.values.len());
                        writes.push(work.values.len());
                        work.values.push(Value { bytes, producer: step, uses: Vec::new() });
                    }
                }
            }
            work.tasks.push(Task { reads, writes, cost: cost(graph, launch, kernel, profile), until });
        }
        for copy in &layout.copies {
            if let Some(&value) = index.get(&copy.from) {
                work.values[value].uses.push(emitted.len());
            }
        }
        work
    }

    /// A sequence of kernels whose values take at most `budget` bytes at any time, or `None` if none was found.
    fn play(&self, budget: u64) -> Option<Vec<usize>> {
        let mut play = Play {
            work: self,
            budget,
            in_memory: BTreeSet::new(),
            present: vec![false; self.values.len()],
            pins: vec![0; self.values.len()],
            live: 0,
            now: 0,
            schedule: Vec::new(),
            again: self.tasks.iter().map(|t| t.cost).sum::<u64>().saturating_mul(MAX_WORK - 1),
        };
        for step in 0..self.tasks.len() {
            play.now = step;
            play.restore(&self.tasks[step].reads)?;
            play.run(step)?;
            play.unpin(&self.tasks[step].reads);
        }
        play.now = self.tasks.len();
        let copied: Vec<usize> = (0..self.values.len()).filter(|&v| self.values[v].uses.last() == Some(&play.now)).collect();
        play.restore(&copied)?;
        Some(play.schedule)
    }
}

/// The state of memory while kernels are played.
struct Play<'a> {
    work: &'a Work,
    budget: u64,
    in_memory: BTreeSet<usize>,
    /// By value, whether it is in memory.
    present: Vec<bool>,
    /// By value, how many coming kernels hold it.
    pins: Vec<u32>,
    live: u64,
    /// The step whose turn it is.
    now: usize,
    schedule: Vec<usize>,
    /// Work that may still be done again.
    again: u64,
}

impl Play<'_> {
    /// Pins `wanted`, and computes those again that are not in memory.
    fn restore(&mut self, wanted: &[usize]) -> Option<()> {
        let work = self.work;
        self.pin(wanted);
        let mut tasks = BTreeSet::new();
        let missing: Vec<usize> = wanted.iter().copied().filter(|&v| !self.present[v]).collect();
        for value in missing {
            self.chain(value, &mut tasks)?;
        }
        tasks.iter().for_each(|&task| self.pin(&work.tasks[task].reads));
        for &task in &tasks {
            let Task { reads, cost, until, .. } = &work.tasks[task];
            if until.is_none_or(|until| until < self.now) {
                return None;
            }
            self.again = self.again.checked_sub(*cost)?;
            self.run(task)?;
            self.unpin(reads);
        }
        Some(())
    }

    fn run(&mut self, task: usize) -> Option<()> {
        let work = self.work;
        let writes = &work.tasks[task].writes;
        self.pin(writes);
        let needed = writes.iter().filter(|&&v| !self.present[v]).map(|&v| work.values[v].bytes).sum();
        self.make_room(needed)?;
        for &value in writes {
            if !std::mem::replace(&mut self.present[value], true) {
                self.in_memory.insert(value);
                self.live += work.values[value].bytes;
            }
        }
        self.unpin(writes);
        self.schedule.push(task);
        Some(())
    }

    fn pin(&mut self, values: &[usize]) {
        values.iter().for_each(|&v| self.pins[v] += 1);
    }

    fn unpin(&mut self, values: &[usize]) {
        values.iter().for_each(|&v| self.pins[v] -= 1);
    }

    /// Drops values until `needed` bytes are free.
    fn make_room(&mut self, needed: u64) -> Option<()> {
        while self.live + needed > self.budget {
            let candidates = self.in_memory.iter().copied().filter(|&v| self.pins[v] == 0);
            let priced = candidates.filter_map(|value| Some((self.price(value)?, value)));
            let (price, value) = priced.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
            self.drop_value(value);
            if price == 0.0 {
                self.drop_unneeded();
            }
        }
        Some(())
    }

    fn drop_value(&mut self, value: usize) {
        self.present[value] = false;
        self.in_memory.remove(&value);
        self.live -= self.work.values[value].bytes;
    }

    fn drop_unneeded(&mut self) {
        let unneeded = |&v: &usize| self.pins[v] == 0 && matches!(self.demand(v), Some(Demand { first: usize::MAX, .. }));
        let dropped: Vec<usize> = self.in_memory.iter().copied().filter(unneeded).collect();
        dropped.into_iter().for_each(|v| self.drop_value(v));
    }

    /// Work per byte and step that dropping the value costs; `None` where it must stay.
    fn price(&self, value: usize) -> Option<f64> {
        let Demand { first, last } = self.demand(value)?;
        if first == usize::MAX {
            return Some(0.0);
        }
        let mut tasks = BTreeSet::new();
        self.chain(value, &mut tasks)?;
        let possible = tasks.iter().all(|&task| self.work.tasks[task].until.is_some_and(|until| until >= last));
        let work: u64 = tasks.iter().map(|&task| self.work.tasks[task].cost).sum();
        let freed = self.work.values[value].bytes as f64 * (first - self.now + 1) as f64;
        possible.then(|| work as f64 / freed)
    }

    /// When the value is needed, itself or to compute what was dropped; `None` if that takes too long to say.
    fn demand(&self, value: usize) -> Option<Demand> {
        let mut demand = Demand { first: usize::MAX, last: 0 };
        let (mut open, mut seen) = (vec![value], BTreeSet::from([value]));
        while let Some(v) = open.pop() {
            let uses = &self.work.values[v].uses;
            let coming = uses.partition_point(|&step| step < self.now);
            if let (Some(&first), Some(&last)) = (uses.get(coming), uses.last()) {
                demand = Demand { first: demand.first.min(first), last: demand.last.max(last) };
            }
            for &task in &uses[..coming] {
                let dropped = self.work.tasks[task].writes.iter().copied().filter(|&w| !self.present[w]);
                open.extend(dropped.filter(|&w| seen.insert(w)));
            }
            if seen.len() > MAX_CHAIN {
                return None;
            }
        }
        Some(demand)
    }

    /// Adds the kernels that must run to compute the value from what is in memory; `None` if they are too many.
    fn chain(&self, value: usize, tasks: &mut BTreeSet<usize>) -> Option<()> {
        let mut open = vec![value];
        while let Some(v) = open.pop() {
            let task = self.work.values[v].producer;
            if tasks.insert(task) {
                open.extend(self.work.tasks[task].reads.iter().filter(|&&read| !self.present[read]));
            }
            if tasks.len() > MAX_CHAIN {
                return None;
            }
        }
        Some(())
    }
}

/// The first and the last coming step that needs a value.
struct Demand {
    /// `usize::MAX` if none does.
    first: usize,
    last: usize,
}

/// What a kernel takes: the bytes that it moves, and the arithmetic of a contraction.
fn cost(graph: &Graph, launch: &Launch, kernel: &Emitted, profile: &DeviceProfile) -> u64 {
    let moved = kernel.bound.iter().map(|bound| profile.bytes(graph.ty(bound.node()))).sum::<u64>();
    let products = |&dot: &NodeId| {
        let shape = contract_shape(graph, dot);
        let sizes = [&shape.batch, &shape.m, &shape.n, &shape.k];
        sizes.into_iter().flatten().fold(1u64, |product, &size| product.saturating_mul(size as u64))
    };
    let arithmetic = launch.groups.iter().map(|group| match &group.domain {
        Domain::Contract { sums, .. } => {
            let products = sums.iter().flat_map(|sum| &sum.terms).map(products).fold(0, u64::saturating_add);
            products.saturating_mul(2) / OPERATIONS_PER_BYTE
        }
        Domain::Attention { node, .. } => {
            attention(graph, *node).map_or(0, |a| a.products().saturating_mul(2) / OPERATIONS_PER_BYTE)
        }
        Domain::Map | Domain::Row { .. } => 0,
    });
    arithmetic.fold(moved, u64::saturating_add).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forward pass of `layers` values, each read by the next and by its part of a backward pass in reverse.
    fn chain(layers: usize) -> Work {
        let mut work = Work { values: Vec::new(), tasks: Vec::new() };
        let push = |reads: Vec<usize>, work: &mut Work| {
            let step = work.tasks.len();
            for &read in &reads {
                work.values[read].uses.push(step);
            }
            work.values.push(Value { bytes: ALIGNMENT, producer: step, uses: Vec::new() });
            work.tasks.push(Task { reads, writes: vec![step], cost: 1, until: Some(usize::MAX) });
            step
        };
        let mut forward = Vec::new();
        for _ in 0..layers {
            forward.push(push(forward.last().copied().into_iter().collect(), &mut work));
        }
        let mut gradient = None;
        for &value in forward.iter().rev() {
            gradient = Some(push([value].into_iter().chain(gradient).collect(), &mut work));
        }
        work
    }

    /// The most values in memory at once, where each leaves it after its last use before it is computed again.
    fn peak(work: &Work, schedule: &[usize]) -> u64 {
        let mut lifetimes: Vec<crate::liveness::Lifetime> = Vec::new();
        let mut current = vec![None; work.values.len()];
        for (step, &task) in schedule.iter().enumerate() {
            for &read in &work.tasks[task].reads {
                let lifetime: usize = current[read].expect("computed before it is read");
                lifetimes[lifetime].until = step;
            }
            for &written in &work.tasks[task].writes {
                current[written] = Some(lifetimes.len());
                lifetimes.push(crate::liveness::Lifetime { size: work.values[written].bytes, from: step, until: step });
            }
        }
        crate::liveness::Liveness { lifetimes, ..Default::default() }.peak()
    }

    #[test]
    fn a_long_chain_fits_a_fraction_of_its_memory() {
        let work = chain(64);
        let whole: Vec<usize> = (0..work.tasks.len()).collect();
        assert_eq!(work.play(u64::MAX).as_ref(), Some(&whole));
        assert_eq!(peak(&work, &whole), 65 * ALIGNMENT);
        for budget in [48, 32, 24] {
            let schedule = work.play(budget * ALIGNMENT).expect("a schedule");
            assert!(peak(&work, &schedule) <= budget * ALIGNMENT);
            assert!(schedule.len() > whole.len() && schedule.len() <= 3 * whole.len(), "{} kernels", schedule.len());
            // Every kernel still runs, and for the first time in order.
            let mut first: Vec<usize> = Vec::new();
            schedule.iter().for_each(|&task| {
                if !first.contains(&task) {
                    first.push(task);
                }
            });
            assert_eq!(first, whole);
        }
        assert_eq!(work.play(2 * ALIGNMENT), None);
    }

    #[test]
    fn what_an_update_has_overwritten_is_not_read_again() {
        let mut work = chain(16);
        work.tasks.iter_mut().for_each(|task| task.until = Some(17));
        let Some(schedule) = work.play(15 * ALIGNMENT) else { return };
        for (position, &task) in schedule.iter().enumerate() {
            let again = schedule[..position].contains(&task);
            let step = schedule[..position].iter().copied().max().unwrap_or(0) + 1;
            assert!(!again || step <= 17, "kernel {task} runs again before step {step}");
        }
    }
}
