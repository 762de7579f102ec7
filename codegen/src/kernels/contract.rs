//! The contraction family: `c[b, m, n] = sum_k lhs(b, m, k) * rhs(b, n, k)`, with operands read through index arithmetic and
//! a prologue, and an epilogue on the accumulators.

use meganeura_ir::{CompareOp, NodeId};

use crate::access::{ContractAt, ContractShape, contract_lhs, contract_result, contract_rhs, contract_shape};
use crate::body::{Builtin, ExprId, SlotId, Stmt};
use crate::fuse::Place;
use crate::index::{Index, ravel, unravel};
use crate::kernels::{KernelEmitter, WORKGROUP, global_invocation, workgroup_number};
use crate::profile::{DeviceKind, DeviceProfile};

/// How the result is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Each invocation computes `m x n` elements from its own loads.
    Direct { m: usize, n: usize },
    /// Each workgroup of `16 x 16` invocations computes a tile of `16 m x 16 n` elements, through workgroup memory, `k` at a time.
    Tiled { m: usize, n: usize, k: usize },
}

/// Invocations along each side of a tiled workgroup.
const SIDE: usize = 16;

pub fn schedule(shape: &ContractShape, profile: &DeviceProfile) -> Schedule {
    let [batch, m, n, k] = [&shape.batch, &shape.m, &shape.n, &shape.k].map(|d| d.iter().product::<usize>());
    if profile.kind == DeviceKind::Software {
        return Schedule::Direct { m: m.clamp(1, 4), n: n.clamp(1, 4) };
    }
    let enough_memory = |m: usize, n: usize, k: usize| (m + n) * SIDE * k * 4 <= profile.max_workgroup_bytes as usize;
    let tiles = |m_tile: usize, n_tile: usize| batch * m.div_ceil(m_tile * SIDE) * n.div_ceil(n_tile * SIDE);
    if profile.max_workgroup_invocations as usize >= SIDE * SIDE && k >= 16 {
        for (tm, tn) in [(4, 4), (2, 2)] {
            if m > 8 * tm && n > 8 * tn && (tiles(tm, tn) >= 64 || (tm, tn) == (2, 2)) && enough_memory(tm, tn, 16) {
                return Schedule::Tiled { m: tm, n: tn, k: 16 };
            }
        }
    }
    let outputs = batch * m * n;
    let side = |size: usize| if outputs >= 1 << 18 { size.clamp(1, 4) } else { 1 };
    Schedule::Direct { m: side(m), n: side(n) }
}

struct Contraction<'k, 'g> {
    kernel: &'k mut KernelEmitter<'g>,
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

/// Emits the kernel; returns the workgroup size and the grid.
pub fn contract(kernel: &mut KernelEmitter, dot: NodeId, place: &Place, profile: &DeviceProfile) -> (u32, [u32; 3]) {
    let shape = contract_shape(kernel.graph, dot);
    let schedule = schedule(&shape, profile);
    let mut c = Contraction { kernel, dot, shape, batch: Vec::new(), place: place.clone() };
    match schedule {
        Schedule::Direct { m, n } => (WORKGROUP as u32, c.direct(m, n, profile)),
        Schedule::Tiled { m, n, k } => ((SIDE * SIDE) as u32, c.tiled(m, n, k, profile)),
    }
}

impl Contraction<'_, '_> {
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

    /// The epilogue: evaluates and stores the group's results for each accumulator.
    fn finish(&mut self, sums: &[SlotId], m: &[Coordinate], n: &[Coordinate]) {
        let all: Vec<usize> = (0..self.kernel.group.stored.len()).collect();
        for (i, m) in m.iter().enumerate() {
            for (j, n_at) in n.iter().enumerate() {
                let value = self.kernel.e.b.read(sums[i * n.len() + j]);
                self.kernel.e.begin_element(self.dot, value);
                let at = self.root_at(&m.at, &n_at.at);
                let within = self.both(m.within, n_at.within);
                let kernel = &mut *self.kernel;
                let outer = kernel.e.begin_guard(within);
                if within.is_some() {
                    kernel.e.b.begin_if();
                }
                let stores = kernel.evaluate(&all, &at);
                kernel.store(&stores);
                if let Some(within) = within {
                    kernel.e.b.end_if(within);
                }
                kernel.e.end_guard(outer);
            }
        }
    }

    /// The root's index where the contraction's result is at `(batch, m, n)`.
    fn root_at(&self, m: &[Index], n: &[Index]) -> Vec<Index> {
        let graph = self.kernel.graph;
        let result = contract_result(graph, self.dot, &self.batch, m, n);
        let root_shape = self.kernel.root_shape();
        match &self.place {
            Place::Axes(axes) => {
                let mut at = vec![Index::default(); root_shape.len()];
                for (axis, index) in axes.iter().zip(result) {
                    if let Some(axis) = axis {
                        at[*axis] = index;
                    }
                }
                at
            }
            Place::Linear => unravel(&ravel(&result, &graph.ty(self.dot).shape), root_shape),
        }
    }

    fn direct(&mut self, tile_m: usize, tile_n: usize, profile: &DeviceProfile) -> [u32; 3] {
        let [batch, m, n, k] = self.sizes();
        let (m_tiles, n_tiles) = (m.div_ceil(tile_m), n.div_ceil(tile_n));
        let (i, workgroups) = global_invocation(&mut self.kernel.e.b, batch * m_tiles * n_tiles, WORKGROUP, profile);
        let position = unravel(&i, &[batch, m_tiles, n_tiles]);
        self.batch = unravel(&position[0], &self.shape.batch);
        let (m_shape, n_shape) = (self.shape.m.clone(), self.shape.n.clone());
        // Neighbouring invocations take neighbouring elements, so that their loads coalesce.
        let ms: Vec<_> = (0..tile_m).map(|i| self.coordinate(position[1].shift((i * m_tiles) as i64), &m_shape)).collect();
        let ns: Vec<_> = (0..tile_n).map(|j| self.coordinate(position[2].shift((j * n_tiles) as i64), &n_shape)).collect();
        let sums = self.accumulators(tile_m * tile_n);
        if k > 0 {
            let unrolled = (k as u64).div_ceil(profile.max_loop_iterations / 2) as usize;
            if unrolled == 1 {
                let (tokens, at) = self.kernel.e.b.begin_loops(&self.shape.k);
                self.step(&sums, &ms, &ns, &Coordinate { at, within: None });
                self.kernel.e.b.end_loops(tokens);
            } else {
                let k_shape = self.shape.k.clone();
                let zero = self.kernel.e.b.i32(0);
                let (token, first) = self.kernel.e.b.begin_for(zero, k, unrolled);
                for i in 0..unrolled {
                    let at = self.coordinate(first.shift(i as i64), &k_shape);
                    self.step(&sums, &ms, &ns, &at);
                }
                self.kernel.e.b.end_for(token);
            }
        }
        self.finish(&sums, &ms, &ns);
        workgroups
    }

    fn tiled(&mut self, per_m: usize, per_n: usize, tile_k: usize, profile: &DeviceProfile) -> [u32; 3] {
        let [batch, m, n, k] = self.sizes();
        let (tile_m, tile_n) = (per_m * SIDE, per_n * SIDE);
        let (m_tiles, n_tiles) = (m.div_ceil(tile_m), n.div_ceil(tile_n));
        let (group, workgroups) = workgroup_number(&mut self.kernel.e.b, batch * m_tiles * n_tiles, profile);
        let local = self.kernel.e.b.builtin(Builtin::Local, SIDE * SIDE);
        let position = unravel(&group, &[batch, m_tiles, n_tiles]);
        self.batch = unravel(&position[0], &self.shape.batch);
        let scalar = self.kernel.graph.ty(self.dot).dtype.device().into();
        let lhs_tile = self.kernel.e.b.shared(scalar, (tile_m * tile_k) as u32);
        let rhs_tile = self.kernel.e.b.shared(scalar, (tile_n * tile_k) as u32);
        let (own_m, own_n) = (local.div(SIDE as i64), local.rem(SIDE as i64));
        let sums = self.accumulators(per_m * per_n);

        let zero = self.kernel.e.b.i32(0);
        let (token, k0) = self.kernel.e.b.begin_for(zero, k, tile_k);
        for (array, tile, first, left) in [(lhs_tile, tile_m, &position[1], true), (rhs_tile, tile_n, &position[2], false)] {
            let k_fastest = self.reads_k_contiguously(left);
            for e in 0..tile * tile_k / (SIDE * SIDE) {
                let linear = local.shift((e * SIDE * SIDE) as i64);
                let (row, column) = if k_fastest {
                    (linear.div(tile_k as i64), linear.rem(tile_k as i64))
                } else {
                    (linear.rem(tile as i64), linear.div(tile as i64))
                };
                let free_shape = if left { self.shape.m.clone() } else { self.shape.n.clone() };
                let free = self.coordinate(first.scale(tile as i64).add(&row), &free_shape);
                let k_shape = self.shape.k.clone();
                let at_k = self.coordinate(k0.add(&column), &k_shape);
                let value = if left { self.lhs(&free, &at_k) } else { self.rhs(&free, &at_k) };
                let b = &mut self.kernel.e.b;
                let index = b.index(&column.scale(tile as i64).add(&row));
                b.stmt(Stmt::StoreShared { array, index, value });
            }
        }
        let b = &mut self.kernel.e.b;
        b.stmt(Stmt::Barrier);
        let (inner, kk) = b.begin_for(zero, tile_k, 1);
        let mut column = |array, tile: usize, own: &Index, per: usize| -> Vec<ExprId> {
            (0..per)
                .map(|i| {
                    let index = b.index(&kk.scale(tile as i64).add(&own.shift((i * SIDE) as i64)));
                    b.load_shared(array, index)
                })
                .collect()
        };
        let lhs = column(lhs_tile, tile_m, &own_m, per_m);
        let rhs = column(rhs_tile, tile_n, &own_n, per_n);
        self.accumulate(&sums, &lhs, &rhs);
        let b = &mut self.kernel.e.b;
        b.end_for(inner);
        b.stmt(Stmt::Barrier);
        b.end_for(token);

        let (m_shape, n_shape) = (self.shape.m.clone(), self.shape.n.clone());
        let own = |first: &Index, tile: usize, own: &Index, i: usize| first.scale(tile as i64).add(&own.shift((i * SIDE) as i64));
        let ms: Vec<_> = (0..per_m).map(|i| self.coordinate(own(&position[1], tile_m, &own_m, i), &m_shape)).collect();
        let ns: Vec<_> = (0..per_n).map(|j| self.coordinate(own(&position[2], tile_n, &own_n, j), &n_shape)).collect();
        self.finish(&sums, &ms, &ns);
        workgroups
    }

    /// Whether neighbours along `k` are neighbours in memory for the left or right operand.
    fn reads_k_contiguously(&self, left: bool) -> bool {
        let graph = self.kernel.graph;
        let batch: Vec<Index> = self.shape.batch.iter().map(|_| Index::default()).collect();
        let free: Vec<Index> = (if left { &self.shape.m } else { &self.shape.n }).iter().map(|_| Index::default()).collect();
        let k: Vec<Index> = self.shape.k.iter().enumerate().map(|(i, &d)| Index::var(i as u32, d)).collect();
        let at = ContractAt { batch: &batch, free: &free, k: &k };
        let access = if left { contract_lhs(graph, self.dot, &at) } else { contract_rhs(graph, self.dot, &at) };
        let linear = ravel(&access.at, &graph.ty(access.operand).shape);
        match k.iter().rposition(|i| i.as_constant().is_none()) {
            Some(last) => linear
                .terms()
                .iter()
                .any(|(atom, c)| *c == 1 && Index::var_unfolded(last as u32, self.shape.k[last]).terms()[0].0 == *atom),
            None => false,
        }
    }
}
