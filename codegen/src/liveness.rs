//! When each intermediate value is in memory: from the dispatch that writes it to the last one that reads it.

use std::collections::HashMap;

use meganeura_ir::{Graph, NodeId};

use crate::kernels::{Bound, Emitted};
use crate::plan::Copy;
use crate::profile::DeviceProfile;
use crate::program::{ALIGNMENT, Region};

/// One stay of a value in scratch memory. A value that is computed again has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Device bytes of the value.
    pub size: u64,
    /// The step that writes it.
    pub from: usize,
    /// The last step that needs it.
    pub until: usize,
}

impl Lifetime {
    pub fn aligned(&self) -> u64 {
        self.size.next_multiple_of(ALIGNMENT)
    }

    pub fn meets(&self, other: &Lifetime) -> bool {
        self.from <= other.until && other.from <= self.until
    }
}

/// The stays of all values over a sequence of dispatches.
#[derive(Clone, Debug, Default)]
pub struct Liveness {
    pub lifetimes: Vec<Lifetime>,
    /// Per step and buffer of its kernel: the lifetime that it touches; `None` where the value has a fixed place.
    pub touched: Vec<Vec<Option<usize>>>,
    /// The lifetimes of values that copies read after the last step.
    pub copied: HashMap<NodeId, usize>,
}

impl Liveness {
    /// `schedule` indexes `kernels`, in execution order; a kernel may run more than once. Values with a `home` are not counted.
    pub fn new(
        graph: &Graph,
        kernels: &[Emitted],
        schedule: &[usize],
        home: &HashMap<NodeId, Region>,
        copies: &[Copy],
        profile: &DeviceProfile,
    ) -> Self {
        let mut liveness = Liveness::default();
        let mut current: HashMap<NodeId, usize> = HashMap::new();
        for (step, &kernel) in schedule.iter().enumerate() {
            let touched = kernels[kernel].bound.iter().map(|bound| {
                let node = bound.node();
                if home.contains_key(&node) {
                    return None;
                }
                if let Bound::Write(_) = bound {
                    let size = profile.bytes(graph.ty(node));
                    current.insert(node, liveness.lifetimes.len());
                    liveness.lifetimes.push(Lifetime { size, from: step, until: step });
                }
                let index = current.get(&node).copied()?;
                liveness.lifetimes[index].until = step;
                Some(index)
            });
            let touched = touched.collect();
            liveness.touched.push(touched);
        }
        for copy in copies {
            if let Some(&index) = current.get(&copy.from) {
                liveness.lifetimes[index].until = schedule.len();
                liveness.copied.insert(copy.from, index);
            }
        }
        liveness
    }

    /// Keeps what is read last in a level until its end, so that nothing in the level has to wait for memory.
    pub fn last_through(&mut self, levels: &[usize]) {
        let mut ends: Vec<usize> = (0..levels.len()).collect();
        for step in (1..levels.len()).rev() {
            if levels[step - 1] == levels[step] {
                ends[step - 1] = ends[step];
            }
        }
        for lifetime in &mut self.lifetimes {
            lifetime.until = ends.get(lifetime.until).copied().unwrap_or(lifetime.until);
        }
    }

    /// The most bytes in use at one step: no placement needs less.
    pub fn peak(&self) -> u64 {
        let steps = self.lifetimes.iter().map(|l| l.until + 1).max().unwrap_or(0);
        let mut change = vec![0i128; steps + 1];
        for lifetime in &self.lifetimes {
            change[lifetime.from] += i128::from(lifetime.aligned());
            change[lifetime.until + 1] -= i128::from(lifetime.aligned());
        }
        let mut live = 0;
        let peak = change.into_iter().map(|c| {
            live += c;
            live
        });
        peak.max().map_or(0, |bytes| bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_largest_sum_of_what_meets() {
        let lifetime = |size, from, until| Lifetime { size, from, until };
        let lifetimes = vec![lifetime(100, 0, 2), lifetime(256, 2, 3), lifetime(300, 3, 3), lifetime(1, 4, 9)];
        assert!(lifetimes[0].meets(&lifetimes[1]) && !lifetimes[0].meets(&lifetimes[2]));
        assert_eq!(Liveness { lifetimes, ..Liveness::default() }.peak(), 256 + 512);
        assert_eq!(Liveness::default().peak(), 0);
    }
}
