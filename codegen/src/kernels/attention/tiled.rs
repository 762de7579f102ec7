//! Attention through workgroup memory: a workgroup of `16 x 16` invocations keeps one tile of queries, or of keys, and passes over the tiles of
//! the other side.

use meganeura_ir::{AttentionOperand, BinaryOp, CompareOp, NodeId, UnaryOp};

use super::{Family, Place, Score};
use crate::attention::{Attention, Role};
use crate::body::{Builtin, ExprId, Scalar, SlotId, Stmt};
use crate::index::{Index, unravel};
use crate::kernels::{KernelEmitter, workgroup_number};
use crate::profile::{DeviceKind, DeviceProfile};

/// Invocations along each side of a workgroup.
pub const SIDE: usize = 16;
pub const WORKGROUP: usize = SIDE * SIDE;

/// Queries and keys of one tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    queries: usize,
    keys: usize,
}

/// The largest tiles that fit into workgroup memory and leave enough workgroups to fill a device.
pub fn tiles(spec: &Attention, profile: &DeviceProfile) -> Option<Tiles> {
    const ENOUGH_WORKGROUPS: usize = 128;
    let by_keys = matches!(spec.role, Role::Gradient(AttentionOperand::Key | AttentionOperand::Value));
    if profile.kind == DeviceKind::Software
        || (profile.max_workgroup_invocations as usize) < WORKGROUP
        || spec.role == Role::LogSumExp
    {
        return None;
    }
    let candidates = [(64, 32), (32, 32), (32, 16), (16, 16)];
    let oriented =
        candidates.map(
            |(kept, passed)| {
                if by_keys { Tiles { queries: passed, keys: kept } } else { Tiles { queries: kept, keys: passed } }
            },
        );
    let fitting: Vec<Tiles> =
        oriented.into_iter().filter(|t| t.words(spec) * 4 <= profile.max_workgroup_bytes as usize).collect();
    let workgroups = |t: &Tiles| {
        let rows = if by_keys { spec.keys.div_ceil(t.keys) } else { spec.queries.div_ceil(t.queries) };
        let batch = if by_keys { spec.own_batch() } else { spec.batch.clone() };
        batch.iter().product::<usize>() * rows
    };
    fitting.iter().find(|t| workgroups(t) >= ENOUGH_WORKGROUPS).or(fitting.last()).copied()
}

fn padded(size: usize) -> usize {
    size.next_multiple_of(SIDE)
}

impl Tiles {
    /// Words of workgroup memory.
    pub fn words(&self, spec: &Attention) -> usize {
        let (queries, keys) = (self.queries + 1, self.keys + 1);
        let (size, value_size) = (padded(spec.size), padded(spec.value_size));
        match spec.role {
            Role::Output | Role::LogSumExp => size * (queries + keys) + value_size * self.keys + self.queries * keys,
            Role::Gradient(AttentionOperand::Query) => (size + value_size) * (queries + keys) + self.queries * keys,
            Role::Gradient(_) => (size + value_size) * (queries + keys) + 2 * self.keys * queries,
        }
    }
}

/// The workgroup memory of a kernel: one array, so that kernels which share a dispatch share it.
pub struct Memory {
    array: SlotId,
    used: usize,
}

impl Memory {
    pub fn new(kernel: &mut KernelEmitter, words: usize) -> Self {
        Memory { array: kernel.e.b.shared(Scalar::F32, words as u32), used: 0 }
    }
}

/// Where an invocation finds itself: its workgroup's batch and tile, and its own row and column of 16.
struct Position {
    batch: Vec<Index>,
    tile: Index,
    local: Index,
    row: Index,
    column: Index,
}

/// Where an element lies, by row and column.
type ElementAt<'a> = &'a dyn Fn(&Attention, &Index, &Index) -> Vec<Index>;

/// One side of the products of two tiles: for each of an invocation's elements where it starts, and how far its next element is.
struct Side {
    array: SlotId,
    starts: Vec<Index>,
    stride: i64,
}

/// A tile in workgroup memory: column by column, each with a word to spare, or row by row.
#[derive(Clone, Copy)]
struct Tile {
    array: SlotId,
    base: usize,
    rows: usize,
    stride: usize,
    by_column: bool,
}

impl Tile {
    /// Rows `own`, `own + 16`, ..: over columns.
    fn rows(&self, own: &Index) -> Side {
        let starts = own_elements(&own.shift(self.base as i64), self.rows);
        Side { array: self.array, starts, stride: self.stride as i64 }
    }

    /// `count` columns `own`, `own + 16`, ..: over rows.
    fn columns(&self, own: &Index, count: usize) -> Side {
        let columns = own_elements(own, count);
        let (step, stride) = if self.by_column { (self.stride as i64, 1) } else { (1, self.stride as i64) };
        Side { array: self.array, starts: columns.iter().map(|c| c.scale(step).shift(self.base as i64)).collect(), stride }
    }
}

/// `own`, `own + 16`, .. below `count`, a multiple of 16.
fn own_elements(own: &Index, count: usize) -> Vec<Index> {
    (0..count / SIDE).map(|i| own.shift((i * SIDE) as i64)).collect()
}

/// Scores or weights of a tile, `[rows, columns + 1]`.
#[derive(Clone, Copy)]
struct Weights {
    array: SlotId,
    base: usize,
    columns: usize,
}

impl Weights {
    fn at(&self, row: &Index, column: &Index) -> Index {
        row.scale(self.columns as i64 + 1).add(column).shift(self.base as i64)
    }

    /// Rows `own`, `own + 16`, .. of `rows`: over columns.
    fn rows(&self, own: &Index, rows: usize) -> Side {
        let starts = own_elements(own, rows).iter().map(|row| self.at(row, &Index::constant(0))).collect();
        Side { array: self.array, starts, stride: 1 }
    }
}

impl Family<'_, '_> {
    fn position(&mut self, batch: &[usize], tiles: usize, profile: &DeviceProfile) -> (Position, [u32; 3]) {
        let shape: Vec<usize> = batch.iter().copied().chain([tiles]).collect();
        let (group, workgroups) = workgroup_number(&mut self.kernel.e.b, shape.iter().product(), profile);
        let local = self.kernel.e.b.builtin(Builtin::Local, WORKGROUP);
        let mut batch = unravel(&group, &shape);
        let tile = batch.pop().unwrap_or_default();
        let (row, column) = (local.div(SIDE as i64), local.rem(SIDE as i64));
        (Position { batch, tile, local, row, column }, workgroups)
    }

    fn barrier(&mut self) {
        self.kernel.e.b.stmt(Stmt::Barrier);
    }

    /// The next words of workgroup memory: array and offset.
    fn shared(&mut self, words: usize) -> (SlotId, usize) {
        let Some(memory) = &mut self.memory else { unreachable!("tiled kernels have workgroup memory") };
        memory.used += words;
        (memory.array, memory.used - words)
    }

    fn tile(&mut self, rows: usize, size: usize, by_column: bool) -> Tile {
        let size = padded(size);
        let (words, stride) = if by_column { ((rows + 1) * size, rows + 1) } else { (rows * size, size) };
        let (array, base) = self.shared(words);
        Tile { array, base, rows, stride, by_column }
    }

    fn weights(&mut self, rows: usize, columns: usize) -> Weights {
        let (array, base) = self.shared(rows * (columns + 1));
        Weights { array, base, columns }
    }

    /// The row at `at` of `count`, which may be past the end.
    fn place(&mut self, at: Index, count: usize) -> Place {
        let b = &mut self.kernel.e.b;
        let within = (at.range().1 >= count as i64).then(|| {
            let (i, end) = (b.index(&at), b.i32(count as i32));
            b.compare(CompareOp::Lt, i, end)
        });
        Place { at: at.bounded(0, count as i64 - 1), within }
    }

    /// Copies `size` columns of the rows from `first` on into the tile; rows past `count` are zero.
    fn load(&mut self, tile: Tile, (node, at): (NodeId, ElementAt), (first, count, size): (&Index, usize, usize), local: &Index) {
        let elements = tile.rows * size;
        for start in (0..elements).step_by(WORKGROUP) {
            let linear = local.shift(start as i64);
            let b = &mut self.kernel.e.b;
            let partial = (start + WORKGROUP > elements).then(|| {
                let (i, end) = (b.index(&linear), b.i32(elements as i32));
                b.compare(CompareOp::Lt, i, end)
            });
            if partial.is_some() {
                b.begin_if();
            }
            let linear = linear.bounded(0, elements as i64 - 1);
            let (row, column) = (linear.div(size as i64), linear.rem(size as i64));
            let place = self.place(first.add(&row), count);
            let value = self.element_or_zero(node, &at(&self.spec, &place.at, &column), place.within);
            let (outer, inner) = if tile.by_column { (&column, &row) } else { (&row, &column) };
            let to = outer.scale(tile.stride as i64).add(inner).shift(tile.base as i64);
            let b = &mut self.kernel.e.b;
            let index = b.index(&to);
            b.stmt(Stmt::StoreShared { array: tile.array, index, value });
            if let Some(partial) = partial {
                self.kernel.e.b.end_if(partial);
            }
        }
    }

    fn element_or_zero(&mut self, node: NodeId, at: &[Index], within: Option<ExprId>) -> ExprId {
        let outer = self.kernel.e.begin_guard(within);
        let value = self.kernel.e.eval(node, at);
        self.kernel.e.end_guard(outer);
        self.select(within, value, 0.0)
    }

    fn accumulators(&mut self, count: usize) -> Vec<SlotId> {
        let zero = self.number(0.0);
        (0..count).map(|_| self.kernel.e.b.declare(zero)).collect()
    }

    /// Adds the sums of `depth` products of each pair of elements of the two sides, row by row.
    fn multiply(&mut self, sums: &[SlotId], lhs: &Side, rhs: &Side, depth: usize) {
        let (token, k) = self.begin_for(depth, 1);
        let [rows, columns] = [lhs, rhs].map(|side| self.side_at(side, &k));
        for (i, &x) in rows.iter().enumerate() {
            for (j, &y) in columns.iter().enumerate() {
                self.add_to(sums[i * columns.len() + j], x, y);
            }
        }
        self.kernel.e.b.end_for(token);
    }

    fn side_at(&mut self, side: &Side, k: &Index) -> Vec<ExprId> {
        let b = &mut self.kernel.e.b;
        let at = side.starts.iter().map(|start| start.add(&k.scale(side.stride)));
        at.map(|at| {
            let index = b.index(&at);
            b.load_shared(side.array, index)
        })
        .collect()
    }

    /// The products of two tiles, over all of their columns.
    fn products(&mut self, lhs: &Side, rhs: &Side, size: usize) -> Vec<ExprId> {
        let sums = self.accumulators(lhs.starts.len() * rhs.starts.len());
        self.multiply(&sums, lhs, rhs, size);
        sums.iter().map(|&slot| self.kernel.e.b.read(slot)).collect()
    }

    fn visible_score(&mut self, batch: &[Index], query: &Place, key: &Place, product: ExprId) -> Score {
        let mut score = self.score(batch, query, key, product);
        let visible = self.visible(&query.at, &key.at);
        score.keep = self.both(score.keep, visible);
        score
    }

    fn store_weight(&mut self, weights: Weights, row: &Index, column: &Index, value: ExprId) {
        let b = &mut self.kernel.e.b;
        let index = b.index(&weights.at(row, column));
        b.stmt(Stmt::StoreShared { array: weights.array, index, value });
    }

    /// The tiles of keys that the causal rule lets a tile of queries see, last first.
    fn begin_key_tiles(&mut self, tiles: Tiles, first_query: &Index) -> (crate::body::Loop, Index) {
        let count = self.spec.keys.div_ceil(tiles.keys);
        let last = count as i64 - 1;
        let (offset, end) = (self.spec.dims.causal, self.spec.keys as i64 - 1);
        let b = &mut self.kernel.e.b;
        let start = match offset {
            None => b.i32(0),
            Some(offset) => {
                let last_key = b.index(&first_query.shift(tiles.queries as i64 - 1 + offset));
                let (zero, end, size, last) = (b.i32(0), b.i32(end as i32), b.i32(tiles.keys as i32), b.i32(last as i32));
                let last_key = b.binary(BinaryOp::Max, last_key, zero);
                let last_key = b.binary(BinaryOp::Min, last_key, end);
                let tile = b.binary(BinaryOp::Div, last_key, size);
                b.binary(BinaryOp::Sub, last, tile)
            }
        };
        let (token, t) = b.begin_for(start, count, 1);
        (token, t.scale(-1).shift(last))
    }

    /// The tiles of queries that see some key of a tile.
    fn begin_query_tiles(&mut self, tiles: Tiles, first_key: &Index) -> (crate::body::Loop, Index) {
        let count = self.spec.queries.div_ceil(tiles.queries);
        let offset = self.spec.dims.causal;
        let b = &mut self.kernel.e.b;
        let start = match offset {
            None => b.i32(0),
            Some(offset) => {
                let first = b.index(&first_key.shift(-offset));
                let (zero, size) = (b.i32(0), b.i32(tiles.queries as i32));
                let first = b.binary(BinaryOp::Max, first, zero);
                b.binary(BinaryOp::Div, first, size)
            }
        };
        b.begin_for(start, count, 1)
    }

    pub(super) fn forward_tiled(&mut self, tiles: Tiles, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let Some(value) = spec.value else { unreachable!("the log-sum-exp alone has no tiles") };
        let (p, workgroups) = self.position(&spec.batch, spec.queries.div_ceil(tiles.queries), profile);
        let first_query = p.tile.scale(tiles.queries as i64);
        let [q, k] = [tiles.queries, tiles.keys].map(|rows| self.tile(rows, spec.size, true));
        let v = self.tile(tiles.keys, spec.value_size, false);
        let weights = self.weights(tiles.queries, tiles.keys);
        let (per_query, per_key, per_column) = (tiles.queries / SIDE, tiles.keys / SIDE, padded(spec.value_size) / SIDE);
        let lowest = self.number(f32::MIN);
        let maxima: Vec<SlotId> = (0..per_query).map(|_| self.kernel.e.b.declare(lowest)).collect();
        let sums = self.accumulators(per_query);
        let out = self.accumulators(per_query * per_column);
        let queries: Vec<Place> =
            own_elements(&p.row, tiles.queries).into_iter().map(|row| self.place(first_query.add(&row), spec.queries)).collect();
        self.load(
            q,
            (spec.query, &|a, row, c| a.query_at(&p.batch, row, Some(c))),
            (&first_query, spec.queries, spec.size),
            &p.local,
        );

        let (token, tile) = self.begin_key_tiles(tiles, &first_query);
        let first_key = tile.scale(tiles.keys as i64);
        self.load(k, (spec.key, &|a, row, c| a.key_at(&p.batch, row, c)), (&first_key, spec.keys, spec.size), &p.local);
        self.load(v, (value, &|a, row, c| a.key_at(&p.batch, row, c)), (&first_key, spec.keys, spec.value_size), &p.local);
        self.barrier();
        let products = self.products(&q.rows(&p.row), &k.rows(&p.column), spec.size);
        let columns = own_elements(&p.column, tiles.keys);
        let keys: Vec<Place> = columns.iter().map(|c| self.place(first_key.add(c), spec.keys)).collect();
        let rows = own_elements(&p.row, tiles.queries);
        let mut scores = Vec::new();
        for (i, &product) in products.iter().enumerate() {
            let (r, c) = (i / per_key, i % per_key);
            let score = self.visible_score(&p.batch, &queries[r], &keys[c], product);
            let masked = self.select(score.keep, score.value, f32::MIN);
            self.store_weight(weights, &rows[r], &columns[c], masked);
            scores.push((score.keep, masked));
        }
        self.barrier();
        let before: Vec<ExprId> = maxima.iter().map(|&slot| self.kernel.e.b.read(slot)).collect();
        let (inner, key) = self.begin_for(tiles.keys, 1);
        let row_scores = self.side_at(&weights.rows(&p.row, tiles.queries), &key);
        for (&slot, &score) in maxima.iter().zip(&row_scores) {
            let b = &mut self.kernel.e.b;
            let largest = b.read(slot);
            let larger = b.compare(CompareOp::Gt, score, largest);
            let largest = b.select(larger, score, largest);
            b.assign(slot, largest);
        }
        self.kernel.e.b.end_for(inner);
        let after: Vec<ExprId> = maxima.iter().map(|&slot| self.kernel.e.b.read(slot)).collect();
        self.barrier();
        for (i, &(keep, masked)) in scores.iter().enumerate() {
            let weight = self.exp_of_difference(masked, after[i / per_key]);
            let weight = self.select(keep, weight, 0.0);
            self.store_weight(weights, &rows[i / per_key], &columns[i % per_key], weight);
        }
        for r in 0..per_query {
            let correction = self.exp_of_difference(before[r], after[r]);
            for &slot in [sums[r]].iter().chain(&out[r * per_column..(r + 1) * per_column]) {
                let value = self.kernel.e.b.read(slot);
                let value = self.binary(BinaryOp::Mul, value, correction);
                self.kernel.e.b.assign(slot, value);
            }
        }
        self.barrier();
        let (inner, key) = self.begin_for(tiles.keys, 1);
        let row_weights = self.side_at(&weights.rows(&p.row, tiles.queries), &key);
        let values = self.side_at(&v.columns(&p.column, padded(spec.value_size)), &key);
        for (r, &weight) in row_weights.iter().enumerate() {
            let b = &mut self.kernel.e.b;
            let sum = b.read(sums[r]);
            let sum = b.binary(BinaryOp::Add, sum, weight);
            b.assign(sums[r], sum);
            for (c, &value) in values.iter().enumerate() {
                self.add_to(out[r * per_column + c], weight, value);
            }
        }
        self.kernel.e.b.end_for(inner);
        self.barrier();
        self.kernel.e.b.end_for(token);

        let columns = own_elements(&p.column, padded(spec.value_size));
        let columns: Vec<Place> = columns.into_iter().map(|c| self.place(c, spec.value_size)).collect();
        let (output, log_sum_exp) = (self.target(Role::Output), self.target(Role::LogSumExp));
        for (r, query) in queries.iter().enumerate() {
            let total = self.kernel.e.b.read(sums[r]);
            if let Some(target) = output {
                let (inverse, counts) = self.normalizer(total);
                for (c, column) in columns.iter().enumerate() {
                    let value = self.kernel.e.b.read(out[r * per_column + c]);
                    let value = self.binary(BinaryOp::Mul, value, inverse);
                    let value = self.select(counts, value, 0.0);
                    let within = self.both(query.within, column.within);
                    self.store(target, &spec.query_at(&p.batch, &query.at, Some(&column.at)), within, value);
                }
            }
            if let Some(target) = log_sum_exp {
                let log = self.kernel.e.b.unary(UnaryOp::Log, total);
                let max = self.kernel.e.b.read(maxima[r]);
                let value = self.binary(BinaryOp::Add, max, log);
                let b = &mut self.kernel.e.b;
                let (column, zero) = (b.index(&p.column), b.i32(0));
                let first = b.compare(CompareOp::Eq, column, zero);
                let within = self.both(query.within, Some(first));
                self.store(target, &spec.query_at(&p.batch, &query.at, None), within, value);
            }
        }
        workgroups
    }

    /// One value per query.
    fn of_query(&mut self, node: NodeId, batch: &[Index], query: &Place) -> ExprId {
        let at = self.spec.query_at(batch, &query.at, None);
        self.element_or_zero(node, &at, query.within)
    }

    pub(super) fn query_gradient_tiled(&mut self, tiles: Tiles, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let (Some(value), Some(backward)) = (spec.value, spec.backward) else { unreachable!("derivatives read everything") };
        let (p, workgroups) = self.position(&spec.batch, spec.queries.div_ceil(tiles.queries), profile);
        let first_query = p.tile.scale(tiles.queries as i64);
        let [q, k] = [tiles.queries, tiles.keys].map(|rows| self.tile(rows, spec.size, true));
        let [dy, v] = [tiles.queries, tiles.keys].map(|rows| self.tile(rows, spec.value_size, true));
        let weights = self.weights(tiles.queries, tiles.keys);
        let (per_key, per_column) = (tiles.keys / SIDE, padded(spec.size) / SIDE);
        let rows = own_elements(&p.row, tiles.queries);
        let queries: Vec<Place> = rows.iter().map(|row| self.place(first_query.add(row), spec.queries)).collect();
        let [log_sum_exps, deltas] = [backward.log_sum_exp, backward.delta]
            .map(|node| queries.iter().map(|query| self.of_query(node, &p.batch, query)).collect::<Vec<_>>());
        let out = self.accumulators(queries.len() * per_column);
        let row = |a: &Attention, row: &Index, c: &Index| a.query_at(&p.batch, row, Some(c));
        self.load(q, (spec.query, &row), (&first_query, spec.queries, spec.size), &p.local);
        self.load(dy, (backward.cotangent, &row), (&first_query, spec.queries, spec.value_size), &p.local);

        let (token, tile) = self.begin_key_tiles(tiles, &first_query);
        let first_key = tile.scale(tiles.keys as i64);
        let row = |a: &Attention, row: &Index, c: &Index| a.key_at(&p.batch, row, c);
        self.load(k, (spec.key, &row), (&first_key, spec.keys, spec.size), &p.local);
        self.load(v, (value, &row), (&first_key, spec.keys, spec.value_size), &p.local);
        self.barrier();
        let products = self.products(&q.rows(&p.row), &k.rows(&p.column), spec.size);
        let weight_cotangents = self.products(&dy.rows(&p.row), &v.rows(&p.column), spec.value_size);
        let columns = own_elements(&p.column, tiles.keys);
        let keys: Vec<Place> = columns.iter().map(|c| self.place(first_key.add(c), spec.keys)).collect();
        for (i, (&product, &dp)) in products.iter().zip(&weight_cotangents).enumerate() {
            let (r, c) = (i / per_key, i % per_key);
            let score = self.visible_score(&p.batch, &queries[r], &keys[c], product);
            let weight = self.weight(&score, log_sum_exps[r]);
            let ds = self.score_cotangent(&score, weight, dp, deltas[r]);
            self.store_weight(weights, &rows[r], &columns[c], ds);
        }
        self.barrier();
        self.multiply(&out, &weights.rows(&p.row, tiles.queries), &k.columns(&p.column, padded(spec.size)), tiles.keys);
        self.barrier();
        self.kernel.e.b.end_for(token);

        let at = |a: &Attention, row: &Index, c: &Index| a.query_at(&p.batch, row, Some(c));
        self.store_tile(Role::Gradient(AttentionOperand::Query), &out, &queries, (&p.column, spec.size), at);
        workgroups
    }

    pub(super) fn key_gradients_tiled(&mut self, tiles: Tiles, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let (Some(value), Some(backward)) = (spec.value, spec.backward) else { unreachable!("derivatives read everything") };
        let (p, workgroups) = self.position(&spec.own_batch(), spec.keys.div_ceil(tiles.keys), profile);
        let first_key = p.tile.scale(tiles.keys as i64);
        let [q, k] = [tiles.queries, tiles.keys].map(|rows| self.tile(rows, spec.size, true));
        let [dy, v] = [tiles.queries, tiles.keys].map(|rows| self.tile(rows, spec.value_size, true));
        let [weights, cotangents] = [(); 2].map(|()| self.weights(tiles.keys, tiles.queries));
        let per_query = tiles.queries / SIDE;
        let rows = own_elements(&p.row, tiles.keys);
        let keys: Vec<Place> = rows.iter().map(|row| self.place(first_key.add(row), spec.keys)).collect();
        let [for_keys, for_values] = [AttentionOperand::Key, AttentionOperand::Value].map(|of| self.computes(Role::Gradient(of)));
        let out_keys = for_keys.then(|| self.accumulators(keys.len() * padded(spec.size) / SIDE));
        let out_values = for_values.then(|| self.accumulators(keys.len() * padded(spec.value_size) / SIDE));
        let own_row = |a: &Attention, row: &Index, c: &Index| a.key_at(&p.batch, row, c);
        self.load(k, (spec.key, &own_row), (&first_key, spec.keys, spec.size), &p.local);
        self.load(v, (value, &own_row), (&first_key, spec.keys, spec.value_size), &p.local);

        let shared: Vec<usize> = spec.shared.iter().map(|&a| spec.batch[a]).collect();
        let (outer, at) = self.kernel.e.b.begin_loops(&shared);
        let mut batch = p.batch.clone();
        spec.shared.iter().zip(at).for_each(|(&axis, index)| batch[axis] = index);
        let (token, tile) = self.begin_query_tiles(tiles, &first_key);
        let first_query = tile.scale(tiles.queries as i64);
        let row = |a: &Attention, row: &Index, c: &Index| a.query_at(&batch, row, Some(c));
        self.load(q, (spec.query, &row), (&first_query, spec.queries, spec.size), &p.local);
        self.load(dy, (backward.cotangent, &row), (&first_query, spec.queries, spec.value_size), &p.local);
        self.barrier();
        let products = self.products(&k.rows(&p.row), &q.rows(&p.column), spec.size);
        let weight_cotangents = for_keys.then(|| self.products(&v.rows(&p.row), &dy.rows(&p.column), spec.value_size));
        let columns = own_elements(&p.column, tiles.queries);
        let queries: Vec<Place> = columns.iter().map(|c| self.place(first_query.add(c), spec.queries)).collect();
        let [log_sum_exps, deltas] = [backward.log_sum_exp, backward.delta]
            .map(|node| queries.iter().map(|query| self.of_query(node, &batch, query)).collect::<Vec<_>>());
        for (i, &product) in products.iter().enumerate() {
            let (r, c) = (i / per_query, i % per_query);
            let score = self.visible_score(&batch, &queries[c], &keys[r], product);
            let weight = self.weight(&score, log_sum_exps[c]);
            self.store_weight(weights, &rows[r], &columns[c], weight);
            if let Some(dp) = &weight_cotangents {
                let ds = self.score_cotangent(&score, weight, dp[i], deltas[c]);
                self.store_weight(cotangents, &rows[r], &columns[c], ds);
            }
        }
        self.barrier();
        if let Some(out) = &out_keys {
            self.multiply(out, &cotangents.rows(&p.row, tiles.keys), &q.columns(&p.column, padded(spec.size)), tiles.queries);
        }
        if let Some(out) = &out_values {
            self.multiply(out, &weights.rows(&p.row, tiles.keys), &dy.columns(&p.column, padded(spec.value_size)), tiles.queries);
        }
        self.barrier();
        self.kernel.e.b.end_for(token);
        self.kernel.e.b.end_loops(outer);

        if let Some(out) = out_keys {
            self.store_tile(Role::Gradient(AttentionOperand::Key), &out, &keys, (&p.column, spec.size), own_row);
        }
        if let Some(out) = out_values {
            self.store_tile(Role::Gradient(AttentionOperand::Value), &out, &keys, (&p.column, spec.value_size), own_row);
        }
        workgroups
    }

    /// Writes an invocation's elements of a tile: `size` columns from its own on.
    fn store_tile(
        &mut self,
        role: Role,
        sums: &[SlotId],
        rows: &[Place],
        (own, size): (&Index, usize),
        at: impl Fn(&Attention, &Index, &Index) -> Vec<Index>,
    ) {
        let columns: Vec<Place> = own_elements(own, padded(size)).into_iter().map(|c| self.place(c, size)).collect();
        for (row, sums) in rows.iter().zip(sums.chunks(columns.len())) {
            let values: Vec<ExprId> = sums.iter().map(|&sum| self.kernel.e.b.read(sum)).collect();
            let at: Vec<Vec<Index>> = columns.iter().map(|column| at(&self.spec, &row.at, &column.at)).collect();
            self.store_row(role, row.within, &columns, &at, &values);
        }
    }
}
