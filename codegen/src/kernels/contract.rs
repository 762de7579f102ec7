//! The contraction family: `c[b, m, n] = sum_k lhs(b, m, k) * rhs(b, n, k)`, with operands read through index arithmetic and
//! a prologue, and an epilogue on the accumulators.

mod cooperative;
mod pace;
mod staging;

use meganeura_ir::{BinaryOp, CompareOp, DType, Graph, NodeId, Op};

pub(crate) use self::cooperative::MATRIX_TILINGS;
use self::cooperative::MatrixTiling;
use self::pace::Pace;
use self::staging::Steps;
use crate::access::{ContractAt, ContractShape, contract_lhs, contract_result, contract_rhs, contract_shape};
use crate::body::{Builtin, ExprId, SlotId, Stmt};
use crate::fuse::{Place, Sum};
use crate::index::{Index, unravel};
use crate::kernels::{KernelEmitter, WORKGROUP, Workgroup, global_invocation, workgroup_number};
use crate::profile::{DeviceKind, DeviceProfile};

/// How the result is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Each invocation computes `m x n` elements from its own loads.
    Direct { m: usize, n: usize },
    /// For a result that is thin on one side: each workgroup computes `across` positions of the other side, `lanes` invocations each, which
    /// share the sum.
    Lanes { across: usize, lanes: usize },
    /// Through workgroup memory.
    Tiled(Tiling),
    /// Through workgroup memory and matrix units.
    Cooperative(MatrixTiling),
}

/// A workgroup computes a tile of the result. Its `slices` divide the sum; in each, `threads.0 x threads.1` invocations hold
/// `elements.0 x elements.1` sums each, and load `depth` terms at a time, `ahead` times before they are used: as often as registers permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    threads: (usize, usize),
    slices: usize,
    elements: (usize, usize),
    depth: usize,
    ahead: usize,
    pace: Pace,
}

const fn tiling(
    threads: (usize, usize),
    slices: usize,
    elements: (usize, usize),
    depth: usize,
    ahead: usize,
    pace: Pace,
) -> Tiling {
    Tiling { threads, slices, elements, depth, ahead, pace }
}

/// Where an invocation of a tiled workgroup sits.
struct Seat {
    slice: Index,
    /// Its number in the slice, and that along each side of the tile.
    thread: Index,
    m: Index,
    n: Index,
}

/// From large tiles, which need the fewest loads, to small ones, which fill a device with little work.
const TILINGS: [Tiling; 9] = [
    tiling((16, 16), 1, (8, 4), 16, 1, Pace::new(1000, 770, 5940, 3)),
    tiling((16, 16), 1, (4, 8), 16, 1, Pace::new(1000, 770, 5940, 3)),
    tiling((16, 16), 1, (4, 4), 16, 1, Pace::new(930, 520, 2530, 3)),
    tiling((8, 8), 4, (8, 4), 8, 1, Pace::new(860, 600, 940, 4)),
    tiling((8, 8), 4, (4, 8), 8, 1, Pace::new(860, 600, 940, 4)),
    tiling((8, 8), 4, (4, 4), 16, 1, Pace::new(1010, 690, 650, 3)),
    tiling((8, 8), 4, (4, 4), 8, 2, Pace::new(620, 390, 450, 3)),
    tiling((4, 4), 16, (4, 4), 8, 1, Pace::new(1270, 750, 400, 4)),
    tiling((4, 4), 16, (4, 4), 4, 1, Pace::new(770, 440, 290, 4)),
];

/// Elements of a vector in workgroup memory.
const VECTOR: usize = 4;
/// Padding of a row of a tile in workgroup memory, against bank conflicts.
const PADDING: usize = 4;
/// Positions on the thin side of a result that lanes compute, in registers.
const THIN: usize = 4;
/// The most accumulators that an invocation holds.
const MAX_ACCUMULATORS: usize = 64;
/// Sums shorter than this are not divided.
const SHORT_SUM: usize = 16;

impl Tiling {
    fn tile(&self) -> (usize, usize) {
        (self.threads.0 * self.elements.0, self.threads.1 * self.elements.1)
    }

    fn invocations(&self) -> usize {
        self.threads.0 * self.threads.1 * self.slices
    }

    /// Elements of the two tiles in workgroup memory.
    fn shared(&self) -> [usize; 2] {
        let (m, n) = self.tile();
        [m, n].map(|side| self.slices * (side + PADDING) * self.depth)
    }

    /// Elements in workgroup memory through which slices add their sums.
    fn exchange(&self) -> usize {
        if self.slices > 1 { self.slices * self.threads.0 * self.tile().1 } else { 0 }
    }

    fn fits(&self, profile: &DeviceProfile) -> bool {
        let bytes = 4 * (self.shared().iter().sum::<usize>() + self.exchange());
        bytes <= profile.max_workgroup_bytes as usize && self.invocations() <= profile.max_workgroup_invocations as usize
    }

    /// The place of the invocation that is `local` in its workgroup.
    fn seat(&self, local: &Index) -> Seat {
        let per_slice = (self.threads.0 * self.threads.1) as i64;
        let (slice, thread) = (local.div(per_slice), local.rem(per_slice));
        let (m, n) = (thread.div(self.threads.1 as i64), thread.rem(self.threads.1 as i64));
        Seat { slice, thread, m, n }
    }

    /// An estimate of the time that a contraction takes.
    fn time(&self, [batch, m, n, k]: [usize; 4], profile: &DeviceProfile) -> usize {
        let (tile_m, tile_n) = self.tile();
        let tiles = batch * m.div_ceil(tile_m) * n.div_ceil(tile_n);
        self.pace.time(tiles.div_ceil(profile.compute_units as usize), k.div_ceil(self.slices * self.depth))
    }
}

#[cfg(test)]
thread_local! {
    /// The one of [`MATRIX_TILINGS`] that a test tries, whatever it takes.
    pub(crate) static ONLY_MATRIX_TILING: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

fn schedule(graph: &Graph, sums: &[Sum], profile: &DeviceProfile) -> Schedule {
    let terms = || sums.iter().flat_map(|sum| &sum.terms);
    let shape = contract_shape(graph, sums[0].terms[0]);
    let [batch, m, n] = [&shape.batch, &shape.m, &shape.n].map(|d| d.iter().product::<usize>());
    let k = terms().map(|&term| contract_shape(graph, term).k.iter().product::<usize>()).sum();
    let sizes = [batch, m, n, k];
    if profile.kind == DeviceKind::Software {
        return Schedule::Direct { m: m.clamp(1, 4), n: n.clamp(1, 4) };
    }
    if k >= SHORT_SUM && m.min(n) <= THIN && profile.max_workgroup_invocations >= LANES_WORKGROUP as u32 {
        let wanted = (batch * m.max(n)).div_ceil(2 * profile.compute_units as usize).next_power_of_two();
        let lanes = (LANES_WORKGROUP / wanted.min(LANES_WORKGROUP)).clamp(4, 64).min(k.next_power_of_two() / 4);
        return Schedule::Lanes { across: LANES_WORKGROUP / lanes, lanes };
    }
    if k >= SHORT_SUM && m > THIN && n > THIN {
        let fitting = TILINGS
            .iter()
            .filter(|tiling| tiling.fits(profile) && tiling.elements.0 * tiling.elements.1 * sums.len() <= MAX_ACCUMULATORS)
            .map(|tiling| (tiling.time(sizes, profile), Schedule::Tiled(*tiling)));
        #[cfg(test)]
        let fitting = fitting.filter(|_| ONLY_MATRIX_TILING.get().is_none());
        // Elements of a window are loaded one by one, which takes longer than matrix units save.
        let halvable = terms().all(|&term| {
            let float = matches!(graph.ty(term).dtype, DType::F32 | DType::F16 | DType::BF16);
            float && matches!(graph.node(term).op, Op::Dot(_))
        });
        let matrix = MATRIX_TILINGS.iter().filter(|tiling| halvable && tiling.fits(sums.len(), profile));
        #[cfg(test)]
        let matrix = matrix.filter(|tiling| ONLY_MATRIX_TILING.get().is_none_or(|only| **tiling == MATRIX_TILINGS[only]));
        let matrix = matrix.map(|tiling| (tiling.time(sizes, profile), Schedule::Cooperative(*tiling)));
        if let Some((_, best)) = fitting.chain(matrix).min_by_key(|(time, _)| *time) {
            return best;
        }
    }
    let outputs = batch * m * n;
    let side = |size: usize| if outputs >= 1 << 18 { size.clamp(1, 4) } else { 1 };
    Schedule::Direct { m: side(m), n: side(n) }
}

/// Invocations of a workgroup whose lanes share sums.
const LANES_WORKGROUP: usize = 256;

/// What a workgroup of the kernel takes.
pub fn workgroup(graph: &Graph, sums: &[Sum], profile: &DeviceProfile) -> Workgroup {
    let shape = contract_shape(graph, sums[0].terms[0]);
    let thin = [&shape.m, &shape.n].map(|d| d.iter().product::<usize>()).into_iter().min().unwrap_or(1);
    let none = [0, 0];
    let (invocations, vectors, halves, scalars) = match schedule(graph, sums, profile) {
        Schedule::Direct { .. } => (WORKGROUP, none, none, 0),
        Schedule::Lanes { .. } => (LANES_WORKGROUP, none, none, LANES_WORKGROUP * thin * sums.len()),
        Schedule::Tiled(tiling) => (tiling.invocations(), tiling.shared(), none, tiling.exchange()),
        Schedule::Cooperative(tiling) => (tiling.invocations(), none, tiling.halves(), tiling.scalars(sums.len(), profile)),
    };
    Workgroup { invocations: invocations as u32, vectors, halves, scalars }
}

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
        let b = &mut self.kernel.e.b;
        let within = (flat.range().1 >= size as i64).then(|| {
            let (i, end) = (b.index(&flat), b.i32(size as i32));
            b.compare(CompareOp::Lt, i, end)
        });
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

    fn tiled(&mut self, tiling: &Tiling, profile: &DeviceProfile) -> [u32; 3] {
        let Tiling { threads, slices, elements, .. } = *tiling;
        let (tile_m, tile_n) = tiling.tile();
        let (local, [first_m, first_n], workgroups) = self.tile((tile_m, tile_n), tiling.invocations(), profile);
        let scalar = self.kernel.graph.ty(self.dot).dtype.device().into();
        let [lhs_tile, rhs_tile] = tiling.shared().map(|length| self.kernel.e.b.shared_vectors(scalar, length as u32));
        let seat = tiling.seat(&local);
        let per_sum = elements.0 * elements.1;
        let slots = self.accumulators(per_sum * self.sums.len());

        for (term, sums) in self.terms(&slots) {
            self.begin_term(term);
            self.tiled_term(tiling, &seat, [&first_m, &first_n], [lhs_tile, rhs_tile], sums);
        }

        let (m_shape, n_shape) = (self.shape.m.clone(), self.shape.n.clone());
        // The position in a tile of an invocation's i-th element.
        let in_tile = |own: &Index, threads: usize, i: usize| {
            own.shift((i / VECTOR * threads) as i64).scale(VECTOR as i64).shift((i % VECTOR) as i64)
        };
        if slices == 1 {
            let at_m = |i| first_m.add(&in_tile(&seat.m, threads.0, i));
            let at_n = |j| first_n.add(&in_tile(&seat.n, threads.1, j));
            let ms: Vec<_> = (0..elements.0).map(|i| self.coordinate(at_m(i), &m_shape)).collect();
            let ns: Vec<_> = (0..elements.1).map(|j| self.coordinate(at_n(j), &n_shape)).collect();
            self.finish(&slots, &ms, &ns);
            return workgroups;
        }
        // One row of every invocation's sums at a time goes through workgroup memory, where all slices' are added in order. The workgroup
        // then shares the results among all its invocations, neighbours to neighbours.
        let results = threads.0 * tile_n;
        let exchange = self.kernel.e.b.shared(scalar, (slices * results) as u32);
        for row in 0..elements.0 {
            let places: Vec<Index> = (0..results).step_by(tiling.invocations()).map(|first| local.shift(first as i64)).collect();
            let mut totals: Vec<Vec<ExprId>> = vec![Vec::new(); places.len()];
            for sums in slots.chunks(per_sum) {
                let b = &mut self.kernel.e.b;
                for (j, &sum) in sums[row * elements.1..(row + 1) * elements.1].iter().enumerate() {
                    let row = seat.slice.scale(results as i64).add(&seat.m.scale(tile_n as i64));
                    let place = row.add(&in_tile(&seat.n, threads.1, j));
                    let (index, value) = (b.index(&place), b.read(sum));
                    b.stmt(Stmt::StoreShared { array: exchange, index, value });
                }
                b.stmt(Stmt::Barrier);
                for (place, totals) in places.iter().zip(&mut totals) {
                    let place = place.clone().bounded(0, results as i64 - 1);
                    let inside = self.kernel.e.b.clamped_index(&place, results);
                    let b = &mut self.kernel.e.b;
                    let mut total = None;
                    for s in 0..slices {
                        let offset = b.i32((s * results) as i32);
                        let index = b.binary(BinaryOp::Add, inside, offset);
                        let part = b.load_shared(exchange, index);
                        total = Some(total.map_or(part, |total| b.binary(BinaryOp::Add, total, part)));
                    }
                    totals.extend(total);
                }
                self.kernel.e.b.stmt(Stmt::Barrier);
            }
            for (place, values) in places.iter().zip(&totals) {
                let b = &mut self.kernel.e.b;
                let active = (place.range().1 >= results as i64).then(|| {
                    let (index, end) = (b.index(place), b.i32(results as i32));
                    b.compare(CompareOp::Lt, index, end)
                });
                if active.is_some() {
                    b.begin_if();
                }
                let outer = self.kernel.e.begin_guard(active);
                let place = place.clone().bounded(0, results as i64 - 1);
                let (row_in_tile, column) = (place.div(tile_n as i64), place.rem(tile_n as i64));
                let m = self.coordinate(first_m.add(&in_tile(&row_in_tile, threads.0, row)), &m_shape);
                let n = self.coordinate(first_n.add(&column), &n_shape);
                self.finish_element(values, &m, &n);
                self.kernel.e.end_guard(outer);
                if let Some(active) = active {
                    self.kernel.e.b.end_if(active);
                }
            }
        }
        workgroups
    }

    /// Adds the products of the term at hand to `sums`.
    fn tiled_term(&mut self, tiling: &Tiling, seat: &Seat, firsts: [&Index; 2], tiles: [SlotId; 2], sums: &[SlotId]) {
        let Tiling { threads, slices, elements, depth, ahead, .. } = *tiling;
        let ([lhs_tile, rhs_tile], (tile_m, tile_n)) = (tiles, tiling.tile());
        let k = self.sizes()[3];
        // Each slice sums a run of whole steps.
        let count = k.div_ceil(slices * depth);
        let steps = Steps { first: seat.slice.scale((count * depth) as i64), depth, count };
        let sides = [(true, tile_m, firsts[0]), (false, tile_n, firsts[1])]
            .map(|(left, tile, first)| self.side(left, tile, depth, first));
        let staged = sides.each_ref().map(|side| self.staged(side, &seat.thread, threads.0 * threads.1));
        let pipeline = self.pipeline(sides, staged, steps, ahead);
        self.each_step(&pipeline, |this, step| {
            let mut values = this.values(&pipeline, step).into_iter();
            let tiles = [(lhs_tile, tile_m), (rhs_tile, tile_n)];
            for ((side, elements), (array, tile)) in pipeline.sides.iter().zip(&pipeline.staged).zip(tiles) {
                let pitch = tile + PADDING;
                let own = seat.slice.scale((pitch * depth) as i64);
                for element in elements {
                    let place = own.add(&element.column.scale(pitch as i64)).add(&element.row);
                    let distance = if side.along_k { pitch as i64 } else { 1 };
                    let values: Vec<ExprId> = values.by_ref().take(side.width).collect();
                    this.store_run(array, &place, distance, &values);
                }
            }
            this.kernel.e.b.stmt(Stmt::Barrier);
            this.load_ahead(&pipeline, step);
            let b = &mut this.kernel.e.b;
            let zero = b.i32(0);
            let (inner, kk) = b.begin_for(zero, depth, 1);
            let mut column = |array, tile: usize, own: &Index, threads: usize, elements: usize| -> Vec<ExprId> {
                let pitch = (tile + PADDING) / VECTOR;
                let row = seat.slice.scale((pitch * depth) as i64).add(&kk.scale(pitch as i64)).add(own);
                let vectors = (0..elements / VECTOR).map(|v| b.index(&row.shift((v * threads) as i64))).collect::<Vec<_>>();
                vectors.into_iter().flat_map(|index| b.load_shared_vector(array, index)).collect()
            };
            let lhs = column(lhs_tile, tile_m, &seat.m, threads.0, elements.0);
            let rhs = column(rhs_tile, tile_n, &seat.n, threads.1, elements.1);
            this.accumulate(sums, &lhs, &rhs);
            let b = &mut this.kernel.e.b;
            b.end_for(inner);
            b.stmt(Stmt::Barrier);
        });
    }
}
