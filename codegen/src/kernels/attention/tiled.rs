//! Attention through workgroup memory: a workgroup keeps one tile of queries, or of keys, and passes over the tiles of the other side.

use meganeura_ir::{AttentionOperand, BinaryOp, CompareOp, NodeId, UnaryOp};

use super::tile::{Load, Seat, Source, interleaves};
use super::tiles::{Tiles, WORKGROUP};
use super::{Family, Place, Score};
use crate::attention::{Attention, Role};
use crate::body::{Builtin, ExprId, Loop, SlotId};
use crate::index::{Index, unravel};
use crate::kernels::workgroup_number;
use crate::profile::DeviceProfile;

/// What a workgroup keeps.
struct Kept {
    batch: Vec<Index>,
    first: Index,
    /// An invocation's own rows in the tile.
    rows: Vec<Index>,
    /// Those rows of the tensor; what is past the end reads the last row, and is not stored.
    places: Vec<Place>,
}

impl Kept {
    /// The places as such that exist.
    fn sure(&self) -> Vec<Place> {
        self.places.iter().map(|place| Place::sure(place.at.clone())).collect()
    }
}

/// What stage `j` of the products with weights brings: as many rows of each source as the grid is wide.
fn weighted_loads<'a>(tiles: Tiles, sources: &[Source<'a>], passed: &Index, j: usize) -> Vec<Load<'a>> {
    let lanes = tiles.grid.1;
    let load = |source: &Source<'a>| Load {
        source: *source,
        first: passed.shift((j * lanes) as i64),
        count: lanes,
        columns: 0..source.size,
        width: tiles.whole(source.size),
        interleaved: interleaves(source.size, tiles.grid.1),
    };
    sources.iter().map(load).collect()
}

impl Family<'_, '_> {
    /// Divides `count` rows of `batch` among workgroups; the last ones first where they have the most to do.
    fn seat(
        &mut self,
        tiles: Tiles,
        (batch, count): (&[usize], usize),
        last_first: bool,
        profile: &DeviceProfile,
    ) -> (Seat, Kept, [u32; 3]) {
        let parts = count.div_ceil(tiles.kept());
        let shape: Vec<usize> = batch.iter().copied().chain([parts]).collect();
        let (group, workgroups) = workgroup_number(&mut self.kernel.e.b, shape.iter().product(), profile);
        let local = self.kernel.e.b.builtin(Builtin::Local, WORKGROUP);
        let mut batch = unravel(&group, &shape);
        let part = batch.pop().unwrap_or_default();
        let part = if last_first { part.scale(-1).shift(parts as i64 - 1) } else { part };
        let (row, column) = (local.div(tiles.grid.1 as i64), local.rem(tiles.grid.1 as i64));
        let seat = Seat { local, invocations: WORKGROUP, row, column, grid: tiles.grid };
        let first = part.scale(tiles.kept() as i64);
        let rows = seat.rows(tiles.kept());
        let places = rows
            .iter()
            .map(|row| {
                let within = self.place(first.add(row), count).within;
                Place { at: self.kernel.e.b.clamped(first.add(row), count), within }
            })
            .collect();
        (seat, Kept { batch, first, rows, places }, workgroups)
    }

    /// Adds to the sums of each pair of sources, of which a workgroup keeps the first, the products of a tile of both. What the stage after the
    /// last brings is loaded meanwhile.
    fn staged_products(
        &mut self,
        (seat, tiles): (&Seat, Tiles),
        pairs: &[(Source, Source, &[SlotId])],
        (kept, passed): (&Index, &Index),
        after: &[Load],
    ) -> Vec<ExprId> {
        let stages: Vec<([Load; 2], &[SlotId])> = pairs
            .iter()
            .flat_map(|&(ref own, ref other, sums)| {
                tiles.parts(own.size).into_iter().map(move |columns| {
                    let own = own.part(kept, tiles.kept(), &columns);
                    ([own, other.part(passed, tiles.passed(), &columns)], sums)
                })
            })
            .collect();
        let mut ahead = stages.first().map_or(Vec::new(), |(loads, _)| self.fetch(seat, loads));
        for (i, (loads, sums)) in stages.iter().enumerate() {
            let both = self.put(seat, i, loads, &ahead, &[]);
            self.barrier();
            ahead = self.fetch(seat, stages.get(i + 1).map_or(after, |(loads, _)| loads));
            if let [own, other] = both[..] {
                self.add_products(seat, sums, (own, other), loads[0].columns.len());
            }
        }
        ahead
    }

    /// Adds to sums the product of weights, those of an invocation row by row, and the rows of their source that are passed over. `ahead` is
    /// what [`weighted_loads`](Self::weighted_loads) of the first stage, of the given number, name.
    fn staged_weighted(
        &mut self,
        (seat, tiles, kept): (&Seat, Tiles, &Kept),
        products: &[(Vec<ExprId>, Source, &[SlotId])],
        passed: &Index,
        (first_stage, mut ahead): (usize, Vec<ExprId>),
    ) {
        let (rows, lanes) = (tiles.kept(), tiles.grid.1);
        let sources: Vec<Source> = products.iter().map(|(_, source, _)| *source).collect();
        for j in 0..tiles.elements.1 {
            let loads = weighted_loads(tiles, &sources, passed, j);
            let both = self.put(seat, first_stage + j, &loads, &ahead, &vec![(rows, lanes); products.len()]);
            let (values, weights) = both.split_at(products.len());
            for (&tile, (own, ..)) in weights.iter().zip(products) {
                for (row, own) in kept.rows.iter().zip(own.chunks(tiles.elements.1)) {
                    self.put_one(tile, row, &seat.column, own[j]);
                }
            }
            self.barrier();
            if j + 1 < tiles.elements.1 {
                ahead = self.fetch(seat, &weighted_loads(tiles, &sources, passed, j + 1));
            }
            for ((&tile, &value), (_, source, sums)) in weights.iter().zip(values).zip(products) {
                self.add_weighted(seat, sums, tile, (value, source.size));
            }
        }
        // The first stage of the next tile takes the half of memory that the first of this one took.
        if (first_stage + tiles.elements.1) % 2 == 1 {
            self.barrier();
        }
    }

    fn visible_score(&mut self, batch: &[Index], query: &Place, key: &Place, product: ExprId) -> Score {
        let mut score = self.score(batch, query, key, product);
        let visible = self.visible(&query.at, &key.at);
        score.keep = self.both(score.keep, visible);
        score
    }

    /// Tiles of keys, and of those that the causal rule lets a tile of queries see the last, counted from the last of all.
    fn key_tiles(&mut self, tiles: Tiles, first_query: &Index) -> (usize, Index) {
        let count = self.spec.keys.div_ceil(tiles.passed());
        let Some(offset) = self.spec.dims.causal else { return (count, Index::constant(0)) };
        let (end, last) = (self.spec.keys as i64 - 1, count as i64 - 1);
        let b = &mut self.kernel.e.b;
        let last_key = b.index(&first_query.shift(tiles.kept() as i64 - 1 + offset));
        let (zero, end, size, last) = (b.i32(0), b.i32(end as i32), b.i32(tiles.passed() as i32), b.i32(last as i32));
        let last_key = b.binary(BinaryOp::Max, last_key, zero);
        let last_key = b.binary(BinaryOp::Min, last_key, end);
        let tile = b.binary(BinaryOp::Div, last_key, size);
        let start = b.binary(BinaryOp::Sub, last, tile);
        (count, b.opaque(start, count))
    }

    /// Passes over the tiles of queries that see some key of a tile.
    fn begin_query_tiles(&mut self, tiles: Tiles, first_key: &Index) -> (Loop, Index) {
        let count = self.spec.queries.div_ceil(tiles.passed());
        let offset = self.spec.dims.causal;
        let b = &mut self.kernel.e.b;
        let start = match offset {
            None => b.i32(0),
            Some(offset) => {
                let first = b.index(&first_key.shift(-offset));
                let (zero, size) = (b.i32(0), b.i32(tiles.passed() as i32));
                let first = b.binary(BinaryOp::Max, first, zero);
                b.binary(BinaryOp::Div, first, size)
            }
        };
        b.begin_for(start, count, 1)
    }

    fn larger(&mut self, a: ExprId, b: ExprId) -> ExprId {
        let larger = self.kernel.e.b.compare(CompareOp::Gt, a, b);
        self.kernel.e.b.select(larger, a, b)
    }

    fn read_all(&mut self, slots: &[SlotId]) -> Vec<ExprId> {
        slots.iter().map(|&slot| self.kernel.e.b.read(slot)).collect()
    }

    fn sum(&mut self, values: Vec<ExprId>) -> ExprId {
        let zero = self.number(0.0);
        values.into_iter().reduce(|a, b| self.binary(BinaryOp::Add, a, b)).unwrap_or(zero)
    }

    pub(super) fn forward_tiled(&mut self, tiles: Tiles, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let Some(value) = spec.value else { unreachable!("the log-sum-exp alone has no tiles") };
        let causal = spec.dims.causal.is_some();
        let (seat, kept, workgroups) = self.seat(tiles, (&spec.batch, spec.queries), causal, profile);
        let Some(partial) = self.memory.as_ref().map(|memory| memory.behind(tiles.shared_row())) else {
            unreachable!("tiled kernels have workgroup memory")
        };
        let (per_row, lanes) = (tiles.elements.1, tiles.grid.1);
        let elements = seat.elements(spec.value_size).len();
        let lowest = self.number(f32::MIN);
        let maxima: Vec<SlotId> = kept.rows.iter().map(|_| self.kernel.e.b.declare(lowest)).collect();
        let sums = self.accumulators(kept.rows.len());
        let out = self.accumulators(kept.rows.len() * elements);
        let query_at = |a: &Attention, row: &Index, c: &Index| a.query_at(&kept.batch, row, Some(c));
        let key_at = |a: &Attention, row: &Index, c: &Index| a.key_at(&kept.batch, row, c);
        let queries = Source { node: spec.query, at: &query_at, rows: spec.queries, size: spec.size, factor: spec.dims.scale.0 };
        let keys = Source { node: spec.key, at: &key_at, rows: spec.keys, size: spec.size, factor: 1.0 };
        let values = Source { node: value, at: &key_at, rows: spec.keys, size: spec.value_size, factor: 1.0 };
        let (count, start) = self.key_tiles(tiles, &kept.first);
        let (last, height) = (count as i64 - 1, tiles.passed() as i64);
        let start = self.kernel.e.b.index(&start);
        let (token, t) = self.kernel.e.b.begin_for(start, count, 1);
        let first_key = t.scale(-1).shift(last).scale(height);
        let products = self.accumulators(kept.rows.len() * per_row);
        let after = weighted_loads(tiles, &[values], &first_key, 0);
        let ahead = self.staged_products((&seat, tiles), &[(queries, keys, &products)], (&kept.first, &first_key), &after);
        let products = self.read_all(&products);
        let columns = seat.columns(tiles.passed());
        let key_places: Vec<Place> = columns.iter().map(|c| self.place(first_key.add(c), spec.keys)).collect();
        let mut scores = Vec::new();
        for (row, products) in kept.sure().iter().zip(products.chunks(per_row)) {
            for (key, &product) in key_places.iter().zip(products) {
                let score = self.visible_score(&kept.batch, row, key, product);
                let masked = self.select(score.keep, score.value, f32::MIN);
                scores.push((score.keep, masked));
            }
        }
        // The largest score of a row is that of its invocations' largest.
        for (row, scores) in kept.rows.iter().zip(scores.chunks(per_row)) {
            let own = scores.iter().map(|&(_, score)| score).reduce(|a, b| self.larger(a, b)).unwrap_or(lowest);
            self.put_one(partial, row, &seat.column, own);
        }
        self.barrier();
        let mut weights = Vec::new();
        for (r, row) in kept.rows.iter().enumerate() {
            let before = self.kernel.e.b.read(maxima[r]);
            let others = self.row(partial, row, lanes);
            let after = others.into_iter().fold(before, |a, b| self.larger(b, a));
            let correction = self.exp_of_difference(before, after);
            self.kernel.e.b.assign(maxima[r], after);
            let mut own = Vec::new();
            for &(keep, score) in &scores[r * per_row..(r + 1) * per_row] {
                let weight = self.exp_of_difference(score, after);
                own.push(self.select(keep, weight, 0.0));
            }
            weights.extend(&own);
            let own = self.sum(own);
            self.rescale(sums[r], correction, own);
            for &slot in &out[r * elements..(r + 1) * elements] {
                let value = self.kernel.e.b.read(slot);
                let value = self.binary(BinaryOp::Mul, value, correction);
                self.kernel.e.b.assign(slot, value);
            }
        }
        let stages = tiles.parts(spec.size).len();
        self.staged_weighted((&seat, tiles, &kept), &[(weights, values, &out)], &first_key, (stages, ahead));
        self.kernel.e.b.end_for(token);

        for (row, &sum) in kept.rows.iter().zip(&sums) {
            let own = self.kernel.e.b.read(sum);
            self.put_one(partial, row, &seat.column, own);
        }
        self.barrier();
        let columns = self.result_columns(&seat, spec.value_size);
        let (output, log_sum_exp) = (self.target(Role::Output), self.target(Role::LogSumExp));
        for (r, query) in kept.places.iter().enumerate() {
            let all = self.row(partial, &kept.rows[r], lanes);
            let total = self.sum(all);
            if let Some(target) = output {
                let (inverse, counts) = self.normalizer(total);
                for (c, column) in columns.iter().enumerate() {
                    let value = self.kernel.e.b.read(out[r * columns.len() + c]);
                    let value = self.binary(BinaryOp::Mul, value, inverse);
                    let value = self.select(counts, value, 0.0);
                    let within = self.both(query.within, column.within);
                    self.store(target, &spec.query_at(&kept.batch, &query.at, Some(&column.at)), within, value);
                }
            }
            if let Some(target) = log_sum_exp {
                let log = self.kernel.e.b.unary(UnaryOp::Log, total);
                let max = self.kernel.e.b.read(maxima[r]);
                let value = self.binary(BinaryOp::Add, max, log);
                let b = &mut self.kernel.e.b;
                let (column, zero) = (b.index(&seat.column), b.i32(0));
                let first = b.compare(CompareOp::Eq, column, zero);
                let within = self.both(query.within, Some(first));
                self.store(target, &spec.query_at(&kept.batch, &query.at, None), within, value);
            }
        }
        workgroups
    }

    /// One value per query.
    fn of_queries(&mut self, node: NodeId, batch: &[Index], queries: &[Index]) -> Vec<ExprId> {
        let rows = queries.iter().map(|query| self.spec.query_at(batch, query, None)).collect::<Vec<_>>();
        rows.iter().map(|at| self.kernel.e.eval(node, at)).collect()
    }

    pub(super) fn query_gradient_tiled(&mut self, tiles: Tiles, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let (Some(value), Some(backward)) = (spec.value, spec.backward) else { unreachable!("derivatives read everything") };
        let causal = spec.dims.causal.is_some();
        let (seat, kept, workgroups) = self.seat(tiles, (&spec.batch, spec.queries), causal, profile);
        let own: Vec<Index> = kept.places.iter().map(|place| place.at.clone()).collect();
        let [log_sum_exps, deltas] = [backward.log_sum_exp, backward.delta].map(|node| self.of_queries(node, &kept.batch, &own));
        let out = self.accumulators(kept.rows.len() * seat.elements(spec.size).len());
        let query_at = |a: &Attention, row: &Index, c: &Index| a.query_at(&kept.batch, row, Some(c));
        let key_at = |a: &Attention, row: &Index, c: &Index| a.key_at(&kept.batch, row, c);
        let queries = Source { node: spec.query, at: &query_at, rows: spec.queries, size: spec.size, factor: spec.dims.scale.0 };
        let cotangents =
            Source { node: backward.cotangent, at: &query_at, rows: spec.queries, size: spec.value_size, factor: 1.0 };
        let keys = Source { node: spec.key, at: &key_at, rows: spec.keys, size: spec.size, factor: 1.0 };
        let values = Source { node: value, at: &key_at, rows: spec.keys, size: spec.value_size, factor: 1.0 };
        let (count, start) = self.key_tiles(tiles, &kept.first);
        let start = self.kernel.e.b.index(&start);
        let (token, t) = self.kernel.e.b.begin_for(start, count, 1);
        let first_key = t.scale(-1).shift(count as i64 - 1).scale(tiles.passed() as i64);
        let per_row = tiles.elements.1;
        let [products, weight_cotangents] = [(); 2].map(|()| self.accumulators(kept.rows.len() * per_row));
        let pairs = [(queries, keys, &products[..]), (cotangents, values, &weight_cotangents[..])];
        let after = weighted_loads(tiles, &[keys], &first_key, 0);
        let ahead = self.staged_products((&seat, tiles), &pairs, (&kept.first, &first_key), &after);
        let [products, weight_cotangents] = [&products, &weight_cotangents].map(|sums| self.read_all(sums));
        let columns = seat.columns(tiles.passed());
        let key_places: Vec<Place> = columns.iter().map(|c| self.place(first_key.add(c), spec.keys)).collect();
        let mut score_cotangents = Vec::new();
        for (r, query) in kept.sure().iter().enumerate() {
            for (c, key) in key_places.iter().enumerate() {
                let i = r * per_row + c;
                let score = self.visible_score(&kept.batch, query, key, products[i]);
                let weight = self.weight(&score, log_sum_exps[r]);
                score_cotangents.push(self.score_cotangent(&score, weight, weight_cotangents[i], deltas[r]));
            }
        }
        let stages = tiles.parts(spec.size).len() + tiles.parts(spec.value_size).len();
        self.staged_weighted((&seat, tiles, &kept), &[(score_cotangents, keys, &out)], &first_key, (stages, ahead));
        self.kernel.e.b.end_for(token);

        let role = Role::Gradient(AttentionOperand::Query);
        self.store_tile(role, &seat, &kept, &out, &Source { factor: spec.dims.scale.0, ..queries });
        workgroups
    }

    pub(super) fn key_gradients_tiled(&mut self, tiles: Tiles, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let (Some(value), Some(backward)) = (spec.value, spec.backward) else { unreachable!("derivatives read everything") };
        let (seat, kept, workgroups) = self.seat(tiles, (&spec.own_batch(), spec.keys), false, profile);
        let [for_keys, for_values] = [AttentionOperand::Key, AttentionOperand::Value].map(|of| self.computes(Role::Gradient(of)));
        let [out_keys, out_values] = [(for_keys, spec.size), (for_values, spec.value_size)]
            .map(|(wanted, size)| wanted.then(|| self.accumulators(kept.rows.len() * seat.elements(size).len())));
        let key_at = |a: &Attention, row: &Index, c: &Index| a.key_at(&kept.batch, row, c);
        let keys = Source { node: spec.key, at: &key_at, rows: spec.keys, size: spec.size, factor: spec.dims.scale.0 };
        let values = Source { node: value, at: &key_at, rows: spec.keys, size: spec.value_size, factor: 1.0 };

        let shared: Vec<usize> = spec.shared.iter().map(|&a| spec.batch[a]).collect();
        let (outer, at) = self.kernel.e.b.begin_loops(&shared);
        let mut batch = kept.batch.clone();
        spec.shared.iter().zip(at).for_each(|(&axis, index)| batch[axis] = index);
        let (token, tile) = self.begin_query_tiles(tiles, &kept.first);
        let first_query = tile.scale(tiles.passed() as i64);
        let query_at = |a: &Attention, row: &Index, c: &Index| a.query_at(&batch, row, Some(c));
        let queries = Source { node: spec.query, at: &query_at, rows: spec.queries, size: spec.size, factor: 1.0 };
        let cotangents =
            Source { node: backward.cotangent, at: &query_at, rows: spec.queries, size: spec.value_size, factor: 1.0 };
        let columns = seat.columns(tiles.passed());
        let own: Vec<Index> = columns.iter().map(|c| self.kernel.e.b.clamped(first_query.add(c), spec.queries)).collect();
        let [log_sum_exps, deltas] = [backward.log_sum_exp, backward.delta].map(|node| self.of_queries(node, &batch, &own));
        let per_row = tiles.elements.1;
        let [products, weight_cotangents] =
            [true, for_keys].map(|wanted| if wanted { self.accumulators(kept.rows.len() * per_row) } else { Vec::new() });
        let pairs = [(keys, queries, &products[..]), (values, cotangents, &weight_cotangents[..])];
        let pairs = &pairs[..if for_keys { 2 } else { 1 }];
        let sources: Vec<Source> = [(for_keys, queries), (for_values, cotangents)]
            .into_iter()
            .filter_map(|(wanted, source)| wanted.then_some(source))
            .collect();
        let after = weighted_loads(tiles, &sources, &first_query, 0);
        let ahead = self.staged_products((&seat, tiles), pairs, (&kept.first, &first_query), &after);
        let [products, weight_cotangents] = [&products, &weight_cotangents].map(|sums| self.read_all(sums));
        let query_places: Vec<Place> = columns.iter().map(|c| self.place(first_query.add(c), spec.queries)).collect();
        let (mut weights, mut score_cotangents) = (Vec::new(), Vec::new());
        for (r, key) in kept.sure().iter().enumerate() {
            for (c, query) in query_places.iter().enumerate() {
                let i = r * per_row + c;
                let score = self.visible_score(&batch, query, key, products[i]);
                let weight = self.weight(&score, log_sum_exps[c]);
                weights.push(weight);
                if let Some(&dp) = weight_cotangents.get(i) {
                    score_cotangents.push(self.score_cotangent(&score, weight, dp, deltas[c]));
                }
            }
        }
        let weighted: Vec<(Vec<ExprId>, Source, &[SlotId])> =
            [(score_cotangents, queries, &out_keys), (weights, cotangents, &out_values)]
                .into_iter()
                .filter_map(|(weights, source, sums)| Some((weights, source, &sums.as_ref()?[..])))
                .collect();
        let stages = pairs.iter().map(|(source, ..)| tiles.parts(source.size).len()).sum();
        self.staged_weighted((&seat, tiles, &kept), &weighted, &first_query, (stages, ahead));
        self.kernel.e.b.end_for(token);
        self.kernel.e.b.end_loops(outer);

        if let Some(out) = out_keys {
            self.store_tile(Role::Gradient(AttentionOperand::Key), &seat, &kept, &out, &keys);
        }
        if let Some(out) = out_values {
            self.store_tile(Role::Gradient(AttentionOperand::Value), &seat, &kept, &out, &values);
        }
        workgroups
    }

    /// Writes an invocation's elements of a tile to where `like` has its, times its factor.
    fn store_tile(&mut self, role: Role, seat: &Seat, kept: &Kept, sums: &[SlotId], like: &Source) {
        let columns = self.result_columns(seat, like.size);
        for (row, sums) in kept.places.iter().zip(sums.chunks(columns.len())) {
            let values: Vec<ExprId> = sums.iter().map(|&sum| self.kernel.e.b.read(sum)).collect();
            let values: Vec<ExprId> = values.into_iter().map(|value| self.scaled(value, like.factor)).collect();
            let at: Vec<Vec<Index>> = columns.iter().map(|column| (like.at)(&self.spec, &row.at, &column.at)).collect();
            self.store_row(role, row.within, &columns, &at, &values);
        }
    }
}
