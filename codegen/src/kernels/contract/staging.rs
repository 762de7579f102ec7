//! How the operands of a tiled contraction come to workgroup memory: each invocation brings some elements of either tile, in runs of four
//! where they are neighbours in memory.

use super::cooperative::pitches;
use super::{Contraction, Coordinate};
use crate::access::{ContractAt, contract_lhs, contract_rhs};
use crate::body::{ExprId, Scalar, SlotId, Stmt};
use crate::index::{Index, ravel, unravel};

/// Elements of a run.
const RUN: usize = 4;

/// The tile of one operand.
pub(super) struct Side {
    left: bool,
    /// Positions along the result's axis, and along the sum.
    tile: usize,
    depth: usize,
    /// The first position along the result's axis.
    first: Index,
    /// Whether neighbours in memory are neighbours along the sum.
    pub along_k: bool,
    /// Elements that are brought together: neighbours in memory.
    pub width: usize,
    /// Whether they come as f16.
    pub halves: bool,
}

/// Elements of a tile that an invocation brings together.
pub(super) struct Staged {
    /// Of the first one: along the result's axis, in the tile.
    pub row: Index,
    /// Along the sum, in the step.
    pub column: Index,
    /// Along the result's axis, of each; of all where they are neighbours along the sum.
    free: Vec<Coordinate>,
}

/// How a workgroup brings the operands of its tile to workgroup memory: each of `slices` sums its own share, `depth` terms in a step.
pub(super) struct Staging<'i> {
    pub tile: (usize, usize),
    /// The first positions of the tile in the result.
    pub firsts: [&'i Index; 2],
    pub slice: &'i Index,
    /// An invocation's number in its slice, which has so many.
    pub thread: &'i Index,
    pub invocations: usize,
    pub slices: usize,
    pub depth: usize,
    /// Steps before which their values are loaded: at least one.
    pub ahead: usize,
    /// Which operands come as f16.
    pub halves: [bool; 2],
}

/// Operands on their way to workgroup memory.
pub(super) struct Pipeline {
    pub sides: [Side; 2],
    pub staged: [Vec<Staged>; 2],
    /// The first position of the slice along the sum.
    first: Index,
    depth: usize,
    /// Steps of the slice.
    count: usize,
    /// Values of both operands that were loaded for coming steps, which take these sets in turn.
    sets: Vec<[Vec<SlotId>; 2]>,
}

/// A step, and the set of values that it takes.
pub(super) struct Step {
    at: Index,
    set: usize,
}

impl Pipeline {
    /// The values of the first step.
    pub(super) fn first(&self) -> &[Vec<SlotId>; 2] {
        &self.sets[0]
    }

    /// Those of the step after `step`, if there is one.
    pub(super) fn after(&self, step: &Step) -> Option<&[Vec<SlotId>; 2]> {
        let last = step.at.as_constant() == Some(self.count as i64 - 1);
        (!last).then(|| &self.sets[(step.set + 1) % self.sets.len()])
    }
}

impl Side {
    /// Rows in workgroup memory, and their distance, where neighbours in memory stay neighbours.
    pub(super) fn lies(&self) -> (usize, usize) {
        let [along, across] = pitches(self.tile, self.depth);
        if self.along_k { along } else { across }
    }
}

impl Contraction<'_, '_> {
    /// The tile of an operand, read in the direction in which most of its elements load four at a time.
    pub(super) fn side(&mut self, left: bool, tile: usize, depth: usize, first: &Index) -> Side {
        let contiguous = self.reads_k_contiguously(left);
        let side = |along_k, width| Side { left, tile, depth, first: first.clone(), along_k, width, halves: false };
        let in_runs = [contiguous, !contiguous].map(|along_k| side(along_k, RUN));
        in_runs.into_iter().find(|side| self.loads_vectors(side)).unwrap_or_else(|| side(contiguous, 1))
    }

    /// Whether a run takes fewer loads than its elements: tried on one.
    fn loads_vectors(&mut self, side: &Side) -> bool {
        let buffers = self.kernel.e.b.buffers.clone();
        let (scalars, vectors) = self.kernel.e.b.loads();
        let zero = Index::default();
        let free = self.free_coordinates(side, &zero);
        let staged = [Staged { row: zero.clone(), column: zero.clone(), free }];
        self.values_of(side, &staged, &zero);
        let (more_scalars, more_vectors) = self.kernel.e.b.loads();
        let worthwhile = more_vectors > vectors && more_scalars - scalars <= RUN * (more_vectors - vectors);
        if !worthwhile {
            self.kernel.e.b.buffers = buffers;
        }
        worthwhile
    }

    /// What an invocation brings of a tile that `invocations` share.
    pub(super) fn staged(&mut self, side: &Side, thread: &Index, invocations: usize) -> Vec<Staged> {
        let (rows, columns) = if side.along_k { (1, side.width) } else { (side.width, 1) };
        let (across, along) = ((side.tile / rows) as i64, (side.depth / columns) as i64);
        (0..side.tile * side.depth / side.width / invocations)
            .map(|e| {
                let linear = thread.shift((e * invocations) as i64);
                let (row, column) = match side.along_k {
                    true => (linear.div(along), linear.rem(along)),
                    false => (linear.rem(across), linear.div(across)),
                };
                let (row, column) = (row.scale(rows as i64), column.scale(columns as i64));
                let free = self.free_coordinates(side, &row);
                Staged { row, column, free }
            })
            .collect()
    }

    fn free_coordinates(&mut self, side: &Side, row: &Index) -> Vec<Coordinate> {
        let shape = if side.left { self.shape.m.clone() } else { self.shape.n.clone() };
        self.run(&side.first.add(row), &shape, if side.along_k { 1 } else { side.width })
    }

    /// `width` neighbours from `flat` on, which may pass the end of `shape`: all at once where that comes between runs.
    fn run(&mut self, flat: &Index, shape: &[usize], width: usize) -> Vec<Coordinate> {
        let size: usize = shape.iter().product();
        let start = match flat.as_constant() {
            Some(at) if at % RUN as i64 == 0 => Some((Index::constant(at / RUN as i64), 0)),
            _ => flat.in_vectors(),
        };
        match start {
            Some((run, 0)) if width == RUN && size.is_multiple_of(RUN) => {
                let runs = size / RUN;
                let within = self.kernel.e.b.below(&run, runs);
                let first = run.bounded(0, runs as i64 - 1).scale(RUN as i64);
                (0..RUN).map(|i| Coordinate { at: unravel(&first.shift(i as i64), shape), within }).collect()
            }
            _ => (0..width).map(|i| self.coordinate(flat.shift(i as i64), shape)).collect(),
        }
    }

    /// The values of staged elements of a tile in the step that begins at `k0`.
    fn values_of(&mut self, side: &Side, staged: &[Staged], k0: &Index) -> Vec<ExprId> {
        let k_shape = self.shape.k.clone();
        let outer = std::mem::replace(&mut self.kernel.e.vectors, side.width == RUN);
        let mut values = Vec::with_capacity(staged.len() * side.width);
        for element in staged {
            let ks = self.run(&k0.add(&element.column), &k_shape, if side.along_k { side.width } else { 1 });
            for i in 0..side.width {
                let (free, k) = if side.along_k { (&element.free[0], &ks[i]) } else { (&element.free[i], &ks[0]) };
                let value = if side.left { self.lhs(free, k) } else { self.rhs(free, k) };
                values.push(if side.halves { self.kernel.e.b.convert(Scalar::F16, value) } else { value });
            }
        }
        self.kernel.e.vectors = outer;
        values
    }

    /// The pipeline of the term at hand, with the values of its first steps loaded.
    pub(super) fn pipeline(&mut self, staging: &Staging) -> Pipeline {
        let Staging { tile, firsts, depth, .. } = *staging;
        let mut sides = [self.side(true, tile.0, depth, firsts[0]), self.side(false, tile.1, depth, firsts[1])];
        for (side, halves) in sides.iter_mut().zip(staging.halves) {
            side.halves = halves;
        }
        let staged = sides.each_ref().map(|side| self.staged(side, staging.thread, staging.invocations));
        // Each slice sums a run of whole steps.
        let count = self.sizes()[3].div_ceil(staging.slices * depth);
        let first = staging.slice.scale((count * depth) as i64);
        let mut pipeline = Pipeline { sides, staged, first, depth, count, sets: Vec::new() };
        for step in 0..staging.ahead.min(count) {
            let values = self.load(&pipeline, &Index::constant(step as i64));
            let set = values.map(|values| values.into_iter().map(|value| self.kernel.e.b.declare(value)).collect());
            pipeline.sets.push(set);
        }
        pipeline
    }

    /// The values of the staged elements of both tiles in a step.
    fn load(&mut self, pipeline: &Pipeline, step: &Index) -> [Vec<ExprId>; 2] {
        let k0 = pipeline.first.add(&step.scale(pipeline.depth as i64));
        [0, 1].map(|i| self.values_of(&pipeline.sides[i], &pipeline.staged[i], &k0))
    }

    /// Emits `body` for all steps: in a loop, once for each set of values in turn.
    pub(super) fn each_step(&mut self, pipeline: &Pipeline, mut body: impl FnMut(&mut Self, &Step)) {
        let (count, sets) = (pipeline.count, pipeline.sets.len());
        let turns = count / sets;
        if turns > 0 {
            let zero = self.kernel.e.b.i32(0);
            let (token, turn) = self.kernel.e.b.begin_for(zero, turns, 1);
            for set in 0..sets {
                body(self, &Step { at: turn.scale(sets as i64).shift(set as i64), set });
            }
            self.kernel.e.b.end_for(token);
        }
        for set in 0..count % sets {
            body(self, &Step { at: Index::constant((turns * sets + set) as i64), set });
        }
    }

    /// The values of a step.
    pub(super) fn values(&mut self, pipeline: &Pipeline, step: &Step) -> [Vec<ExprId>; 2] {
        let set = pipeline.sets[step.set].each_ref();
        set.map(|slots| slots.iter().map(|&slot| self.kernel.e.b.read(slot)).collect())
    }

    /// Loads the values of the step that takes the set of values of `step` next. After the last one, it is the last again: what is loaded
    /// then is not used.
    pub(super) fn load_ahead(&mut self, pipeline: &Pipeline, step: &Step) {
        let (next, count) = (step.at.shift(pipeline.sets.len() as i64), pipeline.count);
        if next.range().0 >= count as i64 {
            return;
        }
        let next = self.kernel.e.b.clamped(next, count);
        let values = self.load(pipeline, &next);
        for (&slot, value) in pipeline.sets[step.set].iter().flatten().zip(values.into_iter().flatten()) {
            self.kernel.e.b.assign(slot, value);
        }
    }

    /// Stores a run at `place` and every `step` after it, in a workgroup array of vectors.
    pub(super) fn store_run(&mut self, array: SlotId, place: &Index, step: i64, values: &[ExprId]) {
        let b = &mut self.kernel.e.b;
        if let (&[x, y, z, w], 1, Some((vector, 0))) = (values, step, place.in_vectors()) {
            let index = b.index(&vector);
            b.stmt(Stmt::StoreSharedVector { array, index, values: [x, y, z, w] });
            return;
        }
        for (i, &value) in values.iter().enumerate() {
            let index = b.index(&place.shift(i as i64 * step));
            b.stmt(Stmt::StoreShared { array, index, value });
        }
    }

    /// Whether neighbours along `k` are neighbours in memory for the left or right operand.
    pub(super) fn reads_k_contiguously(&self, left: bool) -> bool {
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
