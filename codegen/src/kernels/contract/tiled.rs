//! Contractions through workgroup memory: invocations hold small tiles of the result in registers.

use meganeura_ir::BinaryOp;

use super::pace::Pace;
use super::staging::Staging;
use super::{Contraction, VECTOR};
use crate::body::{ExprId, SlotId, Stmt};
use crate::index::Index;
use crate::profile::DeviceProfile;

/// A workgroup computes a tile of the result. Its `slices` divide the sum; in each, `threads.0 x threads.1` invocations hold
/// `elements.0 x elements.1` sums each, and load `depth` terms in a step, `ahead` steps before it.
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
pub(super) const TILINGS: [Tiling; 9] = [
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

/// Padding of a row of a tile in workgroup memory, against bank conflicts.
const PADDING: usize = 4;
/// The most accumulators that an invocation holds.
const MAX_ACCUMULATORS: usize = 64;

impl Tiling {
    fn tile(&self) -> (usize, usize) {
        (self.threads.0 * self.elements.0, self.threads.1 * self.elements.1)
    }

    pub(super) fn invocations(&self) -> usize {
        self.threads.0 * self.threads.1 * self.slices
    }

    /// Elements of the two tiles in workgroup memory.
    pub(super) fn shared(&self) -> [usize; 2] {
        let (m, n) = self.tile();
        [m, n].map(|side| self.slices * (side + PADDING) * self.depth)
    }

    /// Elements in workgroup memory through which slices add their sums.
    pub(super) fn exchange(&self) -> usize {
        if self.slices > 1 { self.slices * self.threads.0 * self.tile().1 } else { 0 }
    }

    pub(super) fn fits(&self, sums: usize, profile: &DeviceProfile) -> bool {
        let bytes = 4 * (self.shared().iter().sum::<usize>() + self.exchange());
        bytes <= profile.max_workgroup_bytes as usize
            && self.invocations() <= profile.max_workgroup_invocations as usize
            && self.elements.0 * self.elements.1 * sums <= MAX_ACCUMULATORS
    }

    /// The place of the invocation that is `local` in its workgroup.
    fn seat(&self, local: &Index) -> Seat {
        let per_slice = (self.threads.0 * self.threads.1) as i64;
        let (slice, thread) = (local.div(per_slice), local.rem(per_slice));
        let (m, n) = (thread.div(self.threads.1 as i64), thread.rem(self.threads.1 as i64));
        Seat { slice, thread, m, n }
    }

    /// An estimate of the time that a contraction takes.
    pub(super) fn time(&self, sizes: [usize; 4], profile: &DeviceProfile) -> usize {
        self.pace.estimate(sizes, self.tile(), self.slices * self.depth, profile)
    }
}

impl Contraction<'_, '_> {
    pub(super) fn tiled(&mut self, tiling: &Tiling, profile: &DeviceProfile) -> [u32; 3] {
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
                let active = b.below(place, results);
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
        let pipeline = self.pipeline(&Staging {
            tile: tiling.tile(),
            firsts,
            slice: &seat.slice,
            thread: &seat.thread,
            invocations: threads.0 * threads.1,
            slices,
            depth,
            ahead,
            halves: [false; 2],
        });
        self.each_step(&pipeline, |this, step| {
            let tiles = [(lhs_tile, tile_m), (rhs_tile, tile_n)];
            let values = this.values(&pipeline, step).into_iter().zip(tiles);
            for ((side, elements), (values, (array, tile))) in pipeline.sides.iter().zip(&pipeline.staged).zip(values) {
                let pitch = tile + PADDING;
                let own = seat.slice.scale((pitch * depth) as i64);
                for (element, run) in elements.iter().zip(values.chunks(side.width)) {
                    let place = own.add(&element.column.scale(pitch as i64)).add(&element.row);
                    let distance = if side.along_k { pitch as i64 } else { 1 };
                    this.store_run(array, &place, distance, run);
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
