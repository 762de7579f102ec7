//! Contractions on matrix units. Operands are rounded to f16 on their way to workgroup memory, sums are f32.
//!
//! f16 spans far less than f32, so each operand is scaled by a power of two that a workgroup finds as it goes: it follows the largest
//! magnitude so far, and when that grows, what was summed is scaled down to match. Values that are smaller by 2^28 lose accuracy, no value
//! overflows, and values that are not finite stay what they are. An operand of f16 values is taken as it is.

use meganeura_ir::{BinaryOp, CompareOp, UnaryOp};

use super::pace::Pace;
use super::staging::{Pipeline, Side, Staging, Step};
use super::{Contraction, VECTOR};
use crate::body::{Builder, ExprId, Literal, MATRIX, MatrixPlace, MatrixStmt, Role, Scalar, SlotId, Stmt};
use crate::halve::is_exact_in_f16;
use crate::index::Index;
use crate::profile::DeviceProfile;

/// A workgroup computes a tile of the result. Its `slices` divide the sum; in each, `subgroups.0 x subgroups.1` subgroups hold
/// `matrices.0 x matrices.1` matrices each, and load `depth` terms in a step, `ahead` steps before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixTiling {
    subgroups: (usize, usize),
    slices: usize,
    matrices: (usize, usize),
    depth: usize,
    ahead: usize,
    pace: Pace,
}

const fn tiling(
    subgroups: (usize, usize),
    slices: usize,
    matrices: (usize, usize),
    depth: usize,
    ahead: usize,
    pace: Pace,
) -> MatrixTiling {
    MatrixTiling { subgroups, slices, matrices, depth, ahead, pace }
}

/// From large tiles, which need the fewest loads, to small ones, which fill a device with little work.
pub(crate) const MATRIX_TILINGS: [MatrixTiling; 8] = [
    tiling((2, 2), 1, (4, 4), 32, 1, Pace::new(1150, 500, 22000, 2)),
    tiling((4, 4), 1, (2, 2), 32, 1, Pace::new(1270, 1000, 8500, 2)),
    tiling((4, 2), 1, (2, 2), 32, 1, Pace::new(1460, 620, 5750, 3)),
    tiling((2, 2), 1, (2, 2), 32, 1, Pace::new(1430, 480, 4710, 3)),
    tiling((4, 4), 1, (1, 1), 64, 2, Pace::new(1480, 1040, 2050, 3)),
    tiling((2, 4), 2, (1, 1), 32, 2, Pace::new(1290, 710, 1780, 2)),
    tiling((2, 2), 4, (1, 1), 32, 2, Pace::new(1660, 700, 1580, 4)),
    tiling((2, 2), 1, (1, 1), 32, 2, Pace::new(1150, 220, 400, 6)),
];

/// Padding of a row in workgroup memory, in elements: matrices are then read without bank conflicts.
const PADDING: usize = 8;
/// Words for the two peaks: as many as keep arrays aligned.
const PEAKS: usize = 4;
/// Chains of the search for the largest magnitude.
const CHAINS: usize = 4;
/// The most matrices that a subgroup sums, which lie in registers.
const MAX_MATRICES: usize = 16;
/// The largest magnitude of a binade, as the bits to set.
const MANTISSA: u32 = 0x7f_ffff;
const INFINITY: u32 = 0x7f80_0000;
/// The magnitude to which the largest value is scaled is below 2 to this: f16 ends at 2^16, and values may double before anything is done.
const HEADROOM: u32 = 15;
/// The largest scale of which the reciprocal is not subnormal.
const MAX_SCALE: u32 = 253;

impl MatrixTiling {
    fn tile(&self) -> (usize, usize) {
        (self.subgroups.0 * self.matrices.0 * MATRIX, self.subgroups.1 * self.matrices.1 * MATRIX)
    }

    fn subgroups_of_slice(&self) -> usize {
        self.subgroups.0 * self.subgroups.1
    }

    /// The place of the invocation that is `local` in its workgroup.
    fn post(&self, local: &Index) -> Post {
        let per_slice = (self.subgroups_of_slice() * SUBGROUP) as i64;
        let (slice, thread) = (local.div(per_slice), local.rem(per_slice));
        let subgroup = thread.div(SUBGROUP as i64);
        let (m, n) = (subgroup.div(self.subgroups.1 as i64), subgroup.rem(self.subgroups.1 as i64));
        Post { slice, thread, m, n }
    }

    /// With subgroups of the usual 32.
    pub(super) fn invocations(&self) -> usize {
        self.subgroups_of_slice() * self.slices * SUBGROUP
    }

    /// Elements of the tiles of both operands in workgroup memory, whichever way they lie.
    pub(super) fn halves(&self) -> [usize; 2] {
        let (m, n) = self.tile();
        [m, n].map(|tile| {
            self.slices * pitches(tile, self.depth).map(|(rows, pitch)| rows * pitch).into_iter().max().unwrap_or(0) - PADDING
        })
    }

    /// Results that pass through workgroup memory at once: as many as let two workgroups share a multiprocessor, if any do. A driver may
    /// give all workgroups there no more memory than one may take (on an H200, large products then take twice as long).
    fn strip(&self, sums: usize, profile: &DeviceProfile) -> Strip {
        let rows = self.subgroups.0 * MATRIX;
        let strip = |matrices: usize| {
            let columns = self.subgroups.1 * matrices * MATRIX;
            Strip { matrices, rows, columns }
        };
        let widths = (1..=self.matrices.1).rev().filter(|&matrices| self.matrices.1.is_multiple_of(matrices));
        let comfortable = |strip: &Strip| 2 * self.bytes(sums, strip) <= profile.max_workgroup_bytes as usize;
        widths.map(strip).find(comfortable).unwrap_or_else(|| strip(1))
    }

    /// Words in workgroup memory besides, through which results pass, with the peaks.
    pub(super) fn scalars(&self, sums: usize, profile: &DeviceProfile) -> usize {
        sums * self.slices * self.strip(sums, profile).words() + PEAKS
    }

    /// Bytes of workgroup memory.
    fn bytes(&self, sums: usize, strip: &Strip) -> usize {
        2 * self.halves().iter().sum::<usize>() + 4 * (sums * self.slices * strip.words() + PEAKS)
    }

    pub(super) fn fits(&self, sums: usize, profile: &DeviceProfile) -> bool {
        profile.matrix_unit.is_some_and(|unit| unit.subgroup as usize == SUBGROUP)
            && self.bytes(sums, &self.strip(sums, profile)) <= profile.max_workgroup_bytes as usize
            && self.invocations() <= profile.max_workgroup_invocations as usize
            && self.matrices.0 * self.matrices.1 * sums <= MAX_MATRICES
    }

    /// An estimate of the time that a contraction takes.
    pub(super) fn time(&self, sizes: [usize; 4], profile: &DeviceProfile) -> usize {
        self.pace.estimate(sizes, self.tile(), self.slices * self.depth, profile)
    }
}

/// Invocations of a subgroup.
const SUBGROUP: usize = 32;

/// Rows of a tile in workgroup memory and their distance: along the sum, and across it.
pub(super) fn pitches(tile: usize, depth: usize) -> [(usize, usize); 2] {
    [(tile, depth + PADDING), (depth, tile + PADDING)]
}

/// Some of every subgroup's results: `matrices` of a row.
#[derive(Clone, Copy)]
struct Strip {
    matrices: usize,
    rows: usize,
    columns: usize,
}

impl Strip {
    /// Words in workgroup memory, of one slice and sum.
    fn words(&self) -> usize {
        self.rows * self.columns
    }
}

/// Where a subgroup sits in its workgroup.
struct Post {
    slice: Index,
    thread: Index,
    m: Index,
    n: Index,
}

/// Those of both operands; of f16 values there is none.
type Scales = [Option<Scale>; 2];

/// The scale of an operand.
struct Scale {
    /// Where the workgroup keeps the largest magnitude of the values so far, by its bits.
    peaks: SlotId,
    place: i32,
    /// A power of two, and the largest magnitude that it is made for.
    scale: SlotId,
    limit: SlotId,
}

/// What all steps of a kernel share.
struct Cooperation {
    tiling: MatrixTiling,
    local: Index,
    post: Post,
    /// The first positions of the tile in the result.
    firsts: [Index; 2],
    /// The operands' tiles in workgroup memory.
    tiles: [SlotId; 2],
    scales: Scales,
    /// The matrices of one sum after the other.
    sums: Vec<SlotId>,
    strip: Strip,
    /// The strip in workgroup memory.
    results: SlotId,
}

impl Contraction<'_, '_> {
    pub(super) fn cooperative(&mut self, tiling: &MatrixTiling, profile: &DeviceProfile) -> [u32; 3] {
        let (local, firsts, workgroups) = self.tile(tiling.tile(), tiling.invocations(), profile);
        let b = &mut self.kernel.e.b;
        let tiles = tiling.halves().map(|length| b.shared_vectors(Scalar::F16, length as u32));
        let results = b.shared(Scalar::F32, (tiling.scalars(self.sums.len(), profile) - PEAKS) as u32);
        let scales = self.scales();
        let c = Cooperation {
            tiling: *tiling,
            post: tiling.post(&local),
            firsts,
            tiles,
            scales,
            sums: self.zero_matrices(tiling, &local, results),
            strip: tiling.strip(self.sums.len(), profile),
            results,
            local,
        };
        for (term, own) in self.terms(&c.sums) {
            self.begin_term(term);
            self.cooperative_term(&c, own);
        }
        self.finish_strips(&c);
        workgroups
    }

    /// Scales before the first value.
    fn scales(&mut self) -> Scales {
        let (graph, terms) = (self.kernel.graph, || self.sums.iter().flat_map(|sum| &sum.terms));
        let reads = &self.kernel.group.reads;
        let exact = |side: usize| terms().all(|&term| is_exact_in_f16(graph, graph.node(term).operands[side], reads));
        let scaled = [0, 1].map(|side| !exact(side));
        let b = &mut self.kernel.e.b;
        let peaks = scaled.contains(&true).then(|| b.shared_atomics(PEAKS as u32));
        [0, 1].map(|side| {
            let peaks = peaks.filter(|_| scaled[side])?;
            let (scale, limit, none) = (b.f32(f32::from_bits(MAX_SCALE << 23)), b.f32(0.0), b.literal(Literal::U32(0)));
            let place = side as i32;
            let index = b.i32(place);
            b.stmt(Stmt::StoreShared { array: peaks, index, value: none });
            Some(Scale { peaks, place, scale: b.declare(scale), limit: b.declare(limit) })
        })
    }

    /// Matrices of zeros, which only memory can give: those of one sum after the other.
    fn zero_matrices(&mut self, tiling: &MatrixTiling, local: &Index, zeros: SlotId) -> Vec<SlotId> {
        let b = &mut self.kernel.e.b;
        let (zero, count) = (b.f32(0.0), tiling.invocations());
        for first in (0..MATRIX * MATRIX).step_by(count) {
            // The array holds a matrix at least: with more invocations than that has elements, one turn is all.
            let index = b.index(&local.shift(first as i64));
            b.stmt(Stmt::StoreShared { array: zeros, index, value: zero });
        }
        b.stmt(Stmt::Barrier);
        let first = b.i32(0);
        let place = MatrixPlace { array: zeros, first, pitch: MATRIX as u32, transposed: false };
        (0..self.sums.len() * tiling.matrices.0 * tiling.matrices.1).map(|_| b.load_matrix(Role::C, place)).collect()
    }

    /// Adds the products of the term at hand to `own`.
    fn cooperative_term(&mut self, c: &Cooperation, own: &[SlotId]) {
        let MatrixTiling { slices, depth, ahead, .. } = c.tiling;
        let pipeline = self.pipeline(&Staging {
            tile: c.tiling.tile(),
            firsts: c.firsts.each_ref(),
            slice: &c.post.slice,
            thread: &c.post.thread,
            invocations: c.tiling.subgroups_of_slice() * SUBGROUP,
            slices,
            depth,
            ahead,
            halves: c.scales.each_ref().map(Option::is_none),
        });
        self.note_peaks(&c.scales, pipeline.first());
        self.each_step(&pipeline, |this, step| {
            this.kernel.e.b.stmt(Stmt::Barrier);
            this.follow_peaks(&c.scales, &c.sums);
            this.store_halves(c, &pipeline, step);
            this.kernel.e.b.stmt(Stmt::Barrier);
            this.load_ahead(&pipeline, step);
            this.multiply(c, &pipeline.sides, own);
            if let Some(values) = pipeline.after(step) {
                this.note_peaks(&c.scales, values);
            }
        });
    }

    /// Tells the workgroup of values that exceed what their operand's scale is made for.
    fn note_peaks(&mut self, scales: &Scales, values: &[Vec<SlotId>; 2]) {
        for (scale, values) in scales.iter().zip(values) {
            let Some(scale) = scale else { continue };
            let b = &mut self.kernel.e.b;
            let limit = b.read(scale.limit);
            // Several chains, that no step waits for all that come before it.
            let mut chains = [b.f32(0.0); CHAINS];
            for (i, &slot) in values.iter().enumerate() {
                let value = b.read(slot);
                chains[i % CHAINS] = b.max_magnitude(chains[i % CHAINS], value);
            }
            let most = chains.into_iter().reduce(|a, c| b.max_magnitude(a, c)).unwrap_or(limit);
            // NaN is not within any limit.
            let within = b.compare(CompareOp::Le, most, limit);
            let beyond = b.unary(UnaryOp::Not, within);
            b.begin_if();
            let (magnitude, infinity) = (b.literal(Literal::U32(INFINITY | MANTISSA)), b.literal(Literal::U32(INFINITY)));
            let mut peak = b.literal(Literal::U32(0));
            let none = peak;
            for &slot in values {
                let value = b.read(slot);
                let bits = b.bitcast(Scalar::U32, value);
                let bits = b.binary(BinaryOp::And, bits, magnitude);
                let finite = b.compare(CompareOp::Lt, bits, infinity);
                let bits = b.select(finite, bits, none);
                peak = b.binary(BinaryOp::Max, peak, bits);
            }
            let index = b.i32(scale.place);
            b.stmt(Stmt::AtomicMax { array: scale.peaks, index, value: peak });
            b.end_if(beyond);
        }
    }

    /// Makes the scales fit the peaks, and what was summed fit the scales.
    fn follow_peaks(&mut self, scales: &Scales, sums: &[SlotId]) {
        for scale in scales.iter().flatten() {
            let b = &mut self.kernel.e.b;
            let place = b.i32(scale.place);
            let peak = b.load_shared(scale.peaks, place);
            let mantissa = b.literal(Literal::U32(MANTISSA));
            let binade = b.binary(BinaryOp::Or, peak, mantissa);
            let limit = b.bitcast(Scalar::F32, binade);
            let before = b.read(scale.limit);
            let grown = b.compare(CompareOp::Gt, limit, before);
            b.begin_if();
            // 2^(HEADROOM - 1 - e) for a peak in the binade of 2^e.
            let exponent_bits = b.literal(Literal::U32(INFINITY));
            let exponent = b.binary(BinaryOp::And, peak, exponent_bits);
            let (least, most) = (((2 * 127 + HEADROOM - 1) - MAX_SCALE) << 23, (2 * 127 + HEADROOM - 1) << 23);
            let (least, most) = (b.literal(Literal::U32(least)), b.literal(Literal::U32(most)));
            let exponent = b.binary(BinaryOp::Max, exponent, least);
            let bits = b.binary(BinaryOp::Sub, most, exponent);
            let new = b.bitcast(Scalar::F32, bits);
            let old = b.read(scale.scale);
            let inverse = self.reciprocal(old);
            let b = &mut self.kernel.e.b;
            let factor = b.binary(BinaryOp::Mul, new, inverse);
            for &c in sums {
                b.stmt(Stmt::Matrix(MatrixStmt::Scale { c, factor }));
            }
            b.assign(scale.scale, new);
            b.assign(scale.limit, limit);
            b.end_if(grown);
        }
    }

    /// The reciprocal of a power of two, neither of which is subnormal.
    fn reciprocal(&mut self, power: ExprId) -> ExprId {
        let b = &mut self.kernel.e.b;
        let bits = b.bitcast(Scalar::U32, power);
        let one_twice = b.literal(Literal::U32((2 * 127) << 23));
        let bits = b.binary(BinaryOp::Sub, one_twice, bits);
        b.bitcast(Scalar::F32, bits)
    }

    /// What scales results back, the smaller factor first: a large one may lead beyond f32 where both together do not.
    fn back(&mut self, scales: &Scales) -> Vec<SlotId> {
        let mut factors = Vec::new();
        for scale in scales.iter().flatten() {
            let scale = self.kernel.e.b.read(scale.scale);
            factors.push(self.reciprocal(scale));
        }
        let b = &mut self.kernel.e.b;
        if let [x, y] = factors[..] {
            factors = [BinaryOp::Min, BinaryOp::Max].map(|op| b.binary(op, x, y)).to_vec();
        }
        factors.into_iter().map(|factor| b.declare(factor)).collect()
    }

    /// Stores the values of a step as f16.
    fn store_halves(&mut self, c: &Cooperation, pipeline: &Pipeline, step: &Step) {
        let values = self.values(pipeline, step);
        for (i, side) in pipeline.sides.iter().enumerate() {
            let (rows, pitch) = side.lies();
            let own = c.post.slice.scale((rows * pitch) as i64);
            let scale = c.scales[i].as_ref().map(|scale| self.kernel.e.b.read(scale.scale));
            for (element, run) in pipeline.staged[i].iter().zip(values[i].chunks(side.width)) {
                let b = &mut self.kernel.e.b;
                let mut half = |&value: &ExprId| {
                    let scaled = scale.map_or(value, |scale| b.binary(BinaryOp::Mul, value, scale));
                    b.convert(Scalar::F16, scaled)
                };
                let values: Vec<ExprId> = run.iter().map(&mut half).collect();
                let (row, column) = if side.along_k { (&element.row, &element.column) } else { (&element.column, &element.row) };
                self.store_run(c.tiles[i], &own.add(&row.scale(pitch as i64)).add(column), 1, &values);
            }
        }
    }

    /// Multiplies the tiles in workgroup memory.
    fn multiply(&mut self, c: &Cooperation, sides: &[Side; 2], own: &[SlotId]) {
        let (rows, columns) = c.tiling.matrices;
        let b = &mut self.kernel.e.b;
        // The subgroup's matrix of an operand that is the i-th along the result's axis and begins at `k` along the sum.
        let matrix = |b: &mut Builder, left: bool, i: usize, k: usize| {
            let (operand, role, post, count) =
                if left { (0, Role::A, &c.post.m, rows) } else { (1, Role::B, &c.post.n, columns) };
            let side = &sides[operand];
            let (lines, pitch) = side.lies();
            let (at, k) = (post.scale((count * MATRIX) as i64).shift((i * MATRIX) as i64), Index::constant(k as i64));
            let (line, place) = if side.along_k { (&at, &k) } else { (&k, &at) };
            let first = c.post.slice.scale((lines * pitch) as i64).add(&line.scale(pitch as i64)).add(place);
            let first = b.index(&first.div(VECTOR as i64));
            // A lies row by row where its neighbours are along the sum, B where they are not.
            let transposed = side.along_k != left;
            let place = MatrixPlace { array: c.tiles[operand], first, pitch: (pitch / VECTOR) as u32, transposed };
            b.load_matrix(role, place)
        };
        for k in (0..c.tiling.depth).step_by(MATRIX) {
            let left: Vec<SlotId> = (0..rows).map(|i| matrix(b, true, i, k)).collect();
            for j in 0..columns {
                let y = matrix(b, false, j, k);
                for (i, &x) in left.iter().enumerate() {
                    b.stmt(Stmt::Matrix(MatrixStmt::MultiplyAdd { a: x, b: y, c: own[i * columns + j] }));
                }
            }
        }
    }

    /// Brings the results to the epilogue through workgroup memory, a strip at a time, where the slices' sums are added in order.
    fn finish_strips(&mut self, c: &Cooperation) {
        let Cooperation { tiling, strip, .. } = c;
        let (m_shape, n_shape) = (self.shape.m.clone(), self.shape.n.clone());
        let (area, width) = (strip.words(), strip.matrices * MATRIX);
        let back = self.back(&c.scales);
        let (rows, columns) = tiling.matrices;
        let turns = (0..rows).flat_map(|i| (0..columns).step_by(strip.matrices).map(move |j| (i, j)));
        for (i, j) in turns {
            let b = &mut self.kernel.e.b;
            b.stmt(Stmt::Barrier);
            for (s, own) in c.sums.chunks(rows * columns).enumerate() {
                let corner = c.post.m.scale((MATRIX * strip.columns) as i64).add(&c.post.n.scale(width as i64));
                let corner = corner.add(&c.post.slice.scale(area as i64)).shift((s * tiling.slices * area) as i64);
                for (place, &matrix) in own[i * columns + j..][..strip.matrices].iter().enumerate() {
                    let first = b.index(&corner.shift((place * MATRIX) as i64));
                    let place = MatrixPlace { array: c.results, first, pitch: strip.columns as u32, transposed: false };
                    b.stmt(Stmt::Matrix(MatrixStmt::Store { c: matrix, place }));
                }
            }
            b.stmt(Stmt::Barrier);
            let (zero, count) = (b.i32(0), tiling.invocations());
            let (token, share) = b.begin_for(zero, strip.rows * strip.columns / count, 1);
            let at = share.scale(count as i64).add(&c.local);
            let (row, column) = (at.div(strip.columns as i64), at.rem(strip.columns as i64));
            let place = row.scale(strip.columns as i64).add(&column);
            let back: Vec<ExprId> = back.iter().map(|&slot| b.read(slot)).collect();
            let values: Vec<ExprId> = (0..self.sums.len())
                .map(|s| {
                    let part = |b: &mut Builder, slice: usize| {
                        let index = b.index(&place.shift(((s * tiling.slices + slice) * area) as i64));
                        b.load_shared(c.results, index)
                    };
                    let mut total = part(b, 0);
                    for slice in 1..tiling.slices {
                        let part = part(b, slice);
                        total = b.binary(BinaryOp::Add, total, part);
                    }
                    back.iter().fold(total, |total, &back| b.binary(BinaryOp::Mul, total, back))
                })
                .collect();
            // From a place in the strip to one in the tile.
            let spread = |at: &Index, width: usize, matrices: usize, first: usize| {
                let (subgroup, own) = (at.div(width as i64), at.rem(width as i64));
                subgroup.scale((matrices * MATRIX) as i64).add(&own).shift((first * MATRIX) as i64)
            };
            let m = self.coordinate(c.firsts[0].add(&spread(&row, MATRIX, rows, i)), &m_shape);
            let n = self.coordinate(c.firsts[1].add(&spread(&column, width, columns, j)), &n_shape);
            self.finish_element(&values, &m, &n);
            self.kernel.e.b.end_for(token);
        }
    }
}
