//! Offsets of intermediate values: those that are never in memory at the same time share it.

use crate::liveness::Lifetime;

/// Where each value lies, and how large the buffers are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Bytes of each buffer.
    pub buffers: Vec<u64>,
    /// Buffer and offset, by the order of the lifetimes.
    pub places: Vec<(usize, u64)>,
}

impl Packing {
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().sum()
    }
}

/// Sorts lifetimes for placement. What comes first finds memory empty, so it should be what fits nowhere else.
type Priority = fn(&Lifetime) -> (u64, u64);

const PRIORITIES: [Priority; 3] =
    [|l| (l.aligned(), steps(l)), |l| (l.aligned().saturating_mul(steps(l)), l.aligned()), |l| (steps(l), l.aligned())];

fn steps(l: &Lifetime) -> u64 {
    (l.until - l.from) as u64 + 1
}

/// Packs values into buffers of at most `limit` bytes, which no value exceeds. No placement is below `bound` bytes.
///
/// Greedy by priority (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", arXiv 2001.03288), over several
/// priorities; a value goes into the smallest hole that holds it, else where the buffers grow least.
pub fn pack(lifetimes: &[Lifetime], bound: u64, limit: u64) -> Packing {
    let mut best: Option<Packing> = None;
    for priority in PRIORITIES {
        if best.as_ref().is_some_and(|found| found.bytes() <= bound) {
            break;
        }
        let mut order: Vec<usize> = (0..lifetimes.len()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(priority(&lifetimes[i])), i));
        let packing = place_in_order(lifetimes, &order, limit);
        if best.as_ref().is_none_or(|found| packing.bytes() < found.bytes()) {
            best = Some(packing);
        }
    }
    best.unwrap_or_default()
}

/// A placed value: offset, end, and which it is.
type Placed = (u64, u64, usize);

fn place_in_order(lifetimes: &[Lifetime], order: &[usize], limit: u64) -> Packing {
    let mut packing = Packing { buffers: Vec::new(), places: vec![(0, 0); lifetimes.len()] };
    // Per buffer, by offset.
    let mut placed: Vec<Vec<Placed>> = Vec::new();
    for &index in order {
        let lifetime = &lifetimes[index];
        let size = lifetime.aligned();
        let options = placed.iter().zip(&packing.buffers).enumerate().filter_map(|(b, (placed, &height))| {
            let neighbours = placed.iter().filter(|(.., other)| lifetimes[*other].meets(lifetime));
            best_place(neighbours, size, height, limit).map(|(growth, slack, offset)| (growth, slack, b, offset))
        });
        let (_, _, buffer, offset) = options.chain([(size, 0, placed.len(), 0)]).min().unwrap_or_default();
        if buffer == placed.len() {
            placed.push(Vec::new());
            packing.buffers.push(0);
        }
        packing.buffers[buffer] = packing.buffers[buffer].max(offset + size);
        packing.places[index] = (buffer, offset);
        let at = placed[buffer].partition_point(|p| p.0 < offset);
        placed[buffer].insert(at, (offset, offset + size, index));
    }
    packing
}

/// The best place for `size` bytes in a buffer between `neighbours`, which are sorted by offset: by how much the buffer grows, then by what
/// is left of the hole. `None` where the buffer would exceed `limit`.
fn best_place<'a>(neighbours: impl Iterator<Item = &'a Placed>, size: u64, height: u64, limit: u64) -> Option<(u64, u64, u64)> {
    let mut best: Option<(u64, u64, u64)> = None;
    let mut free = 0;
    for &(offset, end, _) in neighbours {
        if offset >= free + size {
            best = best.min_some((0, offset - free - size, free));
        }
        free = free.max(end);
    }
    let top = free + size;
    if top <= limit {
        best = best.min_some((top.saturating_sub(height), height.saturating_sub(top), free));
    }
    best
}

trait MinSome<T> {
    fn min_some(self, other: T) -> Option<T>;
}

impl<T: Ord> MinSome<T> for Option<T> {
    /// The smaller of both, or the one that there is.
    fn min_some(self, other: T) -> Option<T> {
        Some(match self {
            Some(found) => found.min(other),
            None => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::liveness::Liveness;

    fn checked(lifetimes: &[Lifetime], limit: u64) -> (Packing, u64) {
        let bound = Liveness { lifetimes: lifetimes.to_vec(), ..Liveness::default() }.peak();
        let packing = pack(lifetimes, bound, limit);
        for (i, a) in lifetimes.iter().enumerate() {
            let (buffer, offset) = packing.places[i];
            assert!(offset + a.aligned() <= packing.buffers[buffer] && packing.buffers[buffer] <= limit);
            for (j, b) in lifetimes[..i].iter().enumerate() {
                let (other, at) = packing.places[j];
                let apart = buffer != other || offset + a.aligned() <= at || at + b.aligned() <= offset;
                assert!(apart || !a.meets(b), "{i} and {j} overlap");
            }
        }
        (packing, bound)
    }

    fn lifetime(size: u64, from: usize, until: usize) -> Lifetime {
        Lifetime { size, from, until }
    }

    #[test]
    fn values_that_never_meet_share_memory() {
        let chain: Vec<Lifetime> = (0..10).map(|i| lifetime(1024, i, i + 1)).collect();
        let (packing, bound) = checked(&chain, 1 << 20);
        assert_eq!((packing.bytes(), bound), (2048, 2048));
        assert_eq!(checked(&[], 1024).0, Packing::default());
    }

    #[test]
    fn buffers_stay_within_the_limit() {
        let all: Vec<Lifetime> = (0..7).map(|_| lifetime(600, 0, 1)).collect();
        let (packing, bound) = checked(&all, 2048);
        assert_eq!((packing.buffers.len(), packing.bytes()), (4, bound));
    }

    #[test]
    fn a_forward_and_backward_pass_packs_to_its_bound() {
        let layers = 24;
        let mut lifetimes = Vec::new();
        for i in 0..layers {
            let size = 4096 + 256 * (i as u64 * 7 % 11);
            lifetimes.push(lifetime(size, i, 2 * layers - i));
            lifetimes.push(lifetime(3 * size, i, i + 1));
            lifetimes.push(lifetime(2 * size, 2 * layers - i, 2 * layers - i + 1));
        }
        let (packing, bound) = checked(&lifetimes, 1 << 24);
        assert!(packing.bytes() as f64 <= 1.05 * bound as f64, "{} of {bound}", packing.bytes());
    }
}
