//! The contraction family: `c[b, m, n] = sum_k lhs(b, m, k) * rhs(b, n, k)`, with operands read through index arithmetic and
//! a prologue, and an epilogue on the accumulators.

mod cooperative;
mod pace;
mod schedule;
mod staging;
mod tiled;

use meganeura_ir::{BinaryOp, CompareOp, NodeId};

#[cfg(test)]
pub(crate) use self::cooperative::MATRIX_TILINGS;
#[cfg(test)]
pub(crate) use self::schedule::ONLY_MATRIX_TILING;
use self::schedule::{Schedule, schedule};
pub use self::schedule::{takes_matrix_units, workgroup};
use crate::access::{ContractAt, ContractShape, contract_lhs, contract_result, contract_rhs, contract_shape};
use crate::body::{Builtin, ExprId, SlotId, Stmt};
use crate::fuse::{Place, Sum};
use crate::index::{Index, unravel};
use crate::kernels::{KernelEmitter, WORKGROUP, global_invocation, workgroup_number};
use crate::profile::DeviceProfile;

/// Elements of a vector in workgroup memory.
const VECTOR: usize = 4;

struct Contraction<'k, 'g> {
    kernel: &'k mut KernelEmitter<'g>,
    sums: &'g [Sum],
    /// The term at hand, and its shape.
    dot: NodeId,
    shape: ContractShape,
    batch: Vec<Index>,
    place: Place,
}

/// A position along `m` or `n`: the flat index, and the condition under which it exists.
#[derive(Clone)]
struct Coordinate {
    at: Vec<Index>,
    within: Option<ExprId>,
}

/// Emits the kernel; returns the grid.
pub(super) fn contract<'g>(kernel: &mut KernelEmitter<'g>, sums: &'g [Sum], place: &Place, profile: &DeviceProfile) -> [u32; 3] {
    let dot = sums[0].terms[0];
    let shape = contract_shape(kernel.graph, dot);
    let schedule = schedule(kernel.graph, sums, profile);
    let mut c = Contraction { kernel, sums, dot, shape, batch: Vec::new(), place: place.clone() };
    match schedule {
        Schedule::Direct { m, n } => c.direct(m, n, profile),
        Schedule::Lanes { across, lanes } => c.lanes(across, lanes, profile),
        Schedule::Tiled(tiling) => c.tiled(&tiling, profile),
        Schedule::Cooperative(tiling) => c.cooperative(&tiling, profile),
    }
}

impl Contraction<'_, '_> {
    /// Every term with the accumulators that it adds to.
    fn terms<'s>(&self, slots: &'s [SlotId]) -> Vec<(NodeId, &'s [SlotId])> {
        let each = slots.chunks(slots.len() / self.sums.len());
        let terms = self.sums.iter().zip(each).flat_map(|(sum, slots)| sum.terms.iter().map(move |&term| (term, slots)));
        terms.collect()
    }

    fn begin_term(&mut self, term: NodeId) {
        self.dot = term;
        self.shape = contract_shape(self.kernel.graph, term);
    }

    fn sizes(&self) -> [usize; 4] {
        [&self.shape.batch, &self.shape.m, &self.shape.n, &self.shape.k].map(|d| d.iter().product())
    }

    /// Unravels a flat position that may pass the end of `shape`.
    fn coordinate(&mut self, flat: Index, shape: &[usize]) -> Coordinate {
        let size: usize = shape.iter().product();
        let within = self.kernel.e.b.below(&flat, size);
        Coordinate { at: unravel(&flat.bounded(0, size as i64 - 1), shape), within }
    }

    fn both(&mut self, a: Option<ExprId>, b: Option<ExprId>) -> Option<ExprId> {
        match (a, b) {
            (Some(a), Some(b)) => Some(self.kernel.e.b.and(a, b)),
            (a, b) => a.or(b),
        }
    }

    fn lhs(&mut self, m: &Coordinate, k: &Coordinate) -> ExprId {
        let access = contract_lhs(self.kernel.graph, self.dot, &ContractAt { batch: &self.batch, free: &m.at, k: &k.at });
        let within = self.both(m.within, k.within);
        self.kernel.e.access_within(&access, within)
    }

    fn rhs(&mut self, n: &Coordinate, k: &Coordinate) -> ExprId {
        let access = contract_rhs(self.kernel.graph, self.dot, &ContractAt { batch: &self.batch, free: &n.at, k: &k.at });
        let within = self.both(n.within, k.within);
        self.kernel.e.access_within(&access, within)
    }

    fn accumulators(&mut self, count: usize) -> Vec<SlotId> {
        let zero = self.kernel.e.zero(self.dot);
        (0..count).map(|_| self.kernel.e.b.declare(zero)).collect()
    }

    fn accumulate(&mut self, sums: &[SlotId], lhs: &[ExprId], rhs: &[ExprId]) {
        let b = &mut self.kernel.e.b;
        for (i, &x) in lhs.iter().enumerate() {
            for (j, &y) in rhs.iter().enumerate() {
                let slot = sums[i * rhs.len() + j];
                let before = b.read(slot);
                let after = b.mul_add(x, y, before);
                b.assign(slot, after);
            }
        }
    }

    /// Adds the products at `k`.
    fn step(&mut self, sums: &[SlotId], ms: &[Coordinate], ns: &[Coordinate], k: &Coordinate) {
        let lhs: Vec<_> = ms.iter().map(|m| self.lhs(m, k)).collect();
        let rhs: Vec<_> = ns.iter().map(|n| self.rhs(n, k)).collect();
        self.accumulate(sums, &lhs, &rhs);
    }

    /// The epilogue for each accumulator; `slots` are those of one sum after the other.
    fn finish(&mut self, slots: &[SlotId], m: &[Coordinate], n: &[Coordinate]) {
        for (i, m_at) in m.iter().enumerate() {
            for (j, n_at) in n.iter().enumerate() {
                let own = slots.iter().skip(i * n.len() + j).step_by(m.len() * n.len());
                let values: Vec<_> = own.map(|&slot| self.kernel.e.b.read(slot)).collect();
                self.finish_element(&values, m_at, n_at);
            }
        }
    }

    /// The epilogue: evaluates and stores the group's results where the contractions' are `values`.
    fn finish_element(&mut self, values: &[ExprId], m: &Coordinate, n: &Coordinate) {
        self.kernel.e.begin_element(self.sums.iter().map(|sum| sum.value).zip(values.iter().copied()));
        let at = self.root_at(&m.at, &n.at);
        let within = self.both(m.within, n.within);
        let all: Vec<usize> = (0..self.kernel.group.stored.len()).collect();
        self.kernel.store_within(within, &all, &at);
    }

    /// The root's index where the contraction's result is at `(batch, m, n)`.
    fn root_at(&self, m: &[Index], n: &[Index]) -> Vec<Index> {
        let result = contract_result(self.kernel.graph, self.dot, &self.batch, m, n);
        self.kernel.root_at(self.dot, &self.place, &result)
    }

    fn direct(&mut self, tile_m: usize, tile_n: usize, profile: &DeviceProfile) -> [u32; 3] {
        let [batch, m, n, _] = self.sizes();
        let (m_tiles, n_tiles) = (m.div_ceil(tile_m), n.div_ceil(tile_n));
        let (i, workgroups) = global_invocation(&mut self.kernel.e.b, batch * m_tiles * n_tiles, WORKGROUP, profile);
        let position = unravel(&i, &[batch, m_tiles, n_tiles]);
        self.batch = unravel(&position[0], &self.shape.batch);
        let (m_shape, n_shape) = (self.shape.m.clone(), self.shape.n.clone());
        // Neighbouring invocations take neighbouring elements, so that their loads coalesce.
        let ms: Vec<_> = (0..tile_m).map(|i| self.coordinate(position[1].shift((i * m_tiles) as i64), &m_shape)).collect();
        let ns: Vec<_> = (0..tile_n).map(|j| self.coordinate(position[2].shift((j * n_tiles) as i64), &n_shape)).collect();
        let slots = self.accumulators(tile_m * tile_n * self.sums.len());
        let share = profile.max_loop_iterations / self.sums.iter().map(|sum| sum.terms.len() as u64).sum::<u64>();
        for (term, sums) in self.terms(&slots) {
            self.begin_term(term);
            let k = self.sizes()[3];
            let unrolled = (k as u64).div_ceil(share / 2) as usize;
            if unrolled == 1 {
                let (tokens, at) = self.kernel.e.b.begin_loops(&self.shape.k);
                self.step(sums, &ms, &ns, &Coordinate { at, within: None });
                self.kernel.e.b.end_loops(tokens);
            } else if unrolled > 1 {
                let k_shape = self.shape.k.clone();
                let zero = self.kernel.e.b.i32(0);
                let (token, first) = self.kernel.e.b.begin_for(zero, k, unrolled);
                for i in 0..unrolled {
                    let at = self.coordinate(first.shift(i as i64), &k_shape);
                    self.step(sums, &ms, &ns, &at);
                }
                self.kernel.e.b.end_for(token);
            }
        }
        self.finish(&slots, &ms, &ns);
        workgroups
    }

    fn lanes(&mut self, across: usize, lanes: usize, profile: &DeviceProfile) -> [u32; 3] {
        let [batch, m, n, _] = self.sizes();
        let left = m > n;
        let (long, thin) = if left { (m, n) } else { (n, m) };
        let tiles = long.div_ceil(across);
        let (group, workgroups) = workgroup_number(&mut self.kernel.e.b, batch * tiles, profile);
        let local = self.kernel.e.b.builtin(Builtin::Local, across * lanes);
        let position = unravel(&group, &[batch, tiles]);
        self.batch = unravel(&position[0], &self.shape.batch);
        // Neighbouring invocations load neighbouring elements of the long side's operand.
        let (own, lane, stride) = match self.reads_k_contiguously(left) {
            true => (local.div(lanes as i64), local.rem(lanes as i64), 1),
            false => (local.rem(across as i64), local.div(across as i64), across),
        };
        let (m_shape, n_shape) = (self.shape.m.clone(), self.shape.n.clone());
        let (long_shape, thin_shape) = if left { (&m_shape, &n_shape) } else { (&n_shape, &m_shape) };
        let one = self.coordinate(position[1].scale(across as i64).add(&own), long_shape);
        let few: Vec<_> = (0..thin).map(|i| self.coordinate(Index::constant(i as i64), thin_shape)).collect();
        let (ms, ns) = if left { (vec![one], few) } else { (few, vec![one]) };
        let results = thin * self.sums.len();
        let slots = self.accumulators(results);
        for (term, sums) in self.terms(&slots) {
            self.begin_term(term);
            let k_shape = self.shape.k.clone();
            let start = self.kernel.e.b.index(&lane);
            let (token, at) = self.kernel.e.b.begin_for(start, k_shape.iter().product(), lanes);
            self.step(sums, &ms, &ns, &Coordinate { at: unravel(&at, &k_shape), within: None });
            self.kernel.e.b.end_for(token);
        }

        let scalar = self.kernel.graph.ty(self.dot).dtype.device().into();
        let count = across * lanes;
        let array = self.kernel.e.b.shared(scalar, (count * results) as u32);
        let slot_of = |i: usize| local.shift((i * count) as i64);
        let b = &mut self.kernel.e.b;
        for (i, &slot) in slots.iter().enumerate() {
            let (index, value) = (b.index(&slot_of(i)), b.read(slot));
            b.stmt(Stmt::StoreShared { array, index, value });
        }
        b.stmt(Stmt::Barrier);
        let mut half = lanes / 2;
        while half > 0 {
            let (position, end) = (b.index(&lane), b.i32(half as i32));
            let active = b.compare(CompareOp::Lt, position, end);
            b.begin_if();
            for i in 0..results {
                let (index, other) = (b.index(&slot_of(i)), b.index(&slot_of(i).shift((half * stride) as i64)));
                let (mine, other) = (b.load_shared(array, index), b.load_shared(array, other));
                let value = b.binary(BinaryOp::Add, mine, other);
                b.stmt(Stmt::StoreShared { array, index, value });
            }
            b.end_if(active);
            b.stmt(Stmt::Barrier);
            half /= 2;
        }
        let (position, zero) = (b.index(&lane), b.i32(0));
        let first = b.compare(CompareOp::Eq, position, zero);
        b.begin_if();
        for (i, &slot) in slots.iter().enumerate() {
            let index = b.index(&slot_of(i));
            let value = b.load_shared(array, index);
            b.assign(slot, value);
        }
        self.finish(&slots, &ms, &ns);
        self.kernel.e.b.end_if(first);
        workgroups
    }

    /// An invocation's number in a workgroup that computes a tile, the tile's first positions, and the grid.
    fn tile(&mut self, tile: (usize, usize), invocations: usize, profile: &DeviceProfile) -> (Index, [Index; 2], [u32; 3]) {
        let [batch, m, n, _] = self.sizes();
        let (m_tiles, n_tiles) = (m.div_ceil(tile.0), n.div_ceil(tile.1));
        let (group, workgroups) = workgroup_number(&mut self.kernel.e.b, batch * m_tiles * n_tiles, profile);
        let local = self.kernel.e.b.builtin(Builtin::Local, invocations);
        let position = unravel(&group, &[batch, m_tiles, n_tiles]);
        self.batch = unravel(&position[0], &self.shape.batch);
        (local, [position[1].scale(tile.0 as i64), position[2].scale(tile.1 as i64)], workgroups)
    }
}
