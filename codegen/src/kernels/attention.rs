//! The attention family: weights are never in memory. The forward pass keeps a running maximum and sum per query; the backward passes
//! recompute weights from the log-sum-exp.
//!
//! Inside, scores that are not kept are a large negative number, never an infinity, and their weights are set to zero.

mod tile;
mod tiled;
mod tiles;

use meganeura_ir::{AttentionOperand, BinaryOp, CompareOp, DType, Graph, NodeId, UnaryOp};

use crate::attention::{Attention, Role, attention};
use crate::body::{ExprId, Loop, SlotId};
use crate::fuse as root;
use crate::index::{Index, unravel};
use crate::kernels::{KernelEmitter, WORKGROUP, Workgroup, global_invocation};
use crate::profile::DeviceProfile;

/// Columns that one invocation accumulates, and products that it writes out rather than loops over.
const COLUMNS: usize = 64;

/// Whether the family has a kernel for `node` on such a device.
pub fn has_kernel(graph: &Graph, node: NodeId, profile: &DeviceProfile) -> bool {
    let Some(a) = attention(graph, node) else { return false };
    let operands = &graph.node(node).operands;
    let bound = operands.len() < profile.max_storage_bindings as usize;
    let empty = operands.iter().any(|&o| graph.ty(o).shape.numel() == 0);
    let loops = |size: usize| 1 + size.div_ceil(COLUMNS) as u64;
    let rows = match a.role {
        Role::Gradient(AttentionOperand::Key | AttentionOperand::Value) => a.sharing() * a.queries + a.sharing(),
        _ => a.keys,
    };
    bound && !empty && (rows as u64).saturating_mul(loops(a.size) + loops(a.value_size)) < profile.max_loop_iterations
}

/// What a workgroup of the kernel of `node` takes.
pub fn workgroup(graph: &Graph, node: NodeId, profile: &DeviceProfile) -> Workgroup {
    let tiled = attention(graph, node).and_then(|spec| tiles::tiles(&spec, profile).map(|tiles| tiles.words(&spec)));
    match tiled {
        Some(words) => Workgroup { invocations: tiles::WORKGROUP as u32, vectors: [words, 0], ..Workgroup::default() },
        None => Workgroup { invocations: WORKGROUP as u32, ..Workgroup::default() },
    }
}

/// The distance between the columns of a gradient that one invocation computes of a row, all of them at that distance; `None` where it computes
/// some neighbours.
pub fn column_stride(spec: &Attention, profile: &DeviceProfile) -> Option<usize> {
    match tiles::tiles(spec, profile) {
        Some(tiles) => Some(tiles.column_stride(spec.size)),
        None => (spec.size.max(spec.value_size) <= COLUMNS).then_some(1),
    }
}

/// Emits the kernel; returns the grid. `epilogue` names the gradient that the rest of the group follows from, and where it lies relative to the root.
pub(super) fn emit<'g>(
    kernel: &mut KernelEmitter<'g>,
    node: NodeId,
    epilogue: Option<&'g (NodeId, root::Place)>,
    profile: &DeviceProfile,
) -> [u32; 3] {
    let Some(spec) = attention(kernel.graph, node) else { unreachable!("the root is an attention") };
    let tiles = tiles::tiles(&spec, profile);
    let memory = tiles.map(|tiles| tile::Memory::new(kernel, tiles.stage_words(&spec), tiles.words(&spec)));
    let mut family = Family { kernel, spec, memory, epilogue };
    match (family.spec.role, tiles) {
        (Role::Output | Role::LogSumExp, Some(tiles)) => family.forward_tiled(tiles, profile),
        (Role::Output | Role::LogSumExp, None) => family.forward_direct(profile),
        (Role::Gradient(AttentionOperand::Query), Some(tiles)) => family.query_gradient_tiled(tiles, profile),
        (Role::Gradient(AttentionOperand::Query), None) => family.query_gradient_direct(profile),
        (Role::Gradient(_), Some(tiles)) => family.key_gradients_tiled(tiles, profile),
        (Role::Gradient(_), None) => family.key_gradients_direct(profile),
    }
}

struct Family<'k, 'g> {
    kernel: &'k mut KernelEmitter<'g>,
    spec: Attention,
    memory: Option<tile::Memory>,
    epilogue: Option<&'g (NodeId, root::Place)>,
}

/// A row or a column: its index, and the condition under which it exists.
#[derive(Clone)]
struct Place {
    at: Index,
    within: Option<ExprId>,
}

impl Place {
    fn sure(at: Index) -> Place {
        Place { at, within: None }
    }
}

/// Where the elements of one row lie, by column.
type RowAt<'a> = &'a dyn Fn(&Attention, &Index) -> Vec<Index>;

/// A query against a key.
struct Score {
    /// Meaningless where it is not kept.
    value: ExprId,
    keep: Option<ExprId>,
    /// The derivative of the cap.
    slope: Option<ExprId>,
}

/// The columns of a row that one invocation computes.
struct Part {
    columns: Vec<Place>,
    sums: Vec<SlotId>,
}

impl<'g> Family<'_, 'g> {
    fn number(&mut self, value: f32) -> ExprId {
        self.kernel.e.b.f32(value)
    }

    fn binary(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> ExprId {
        self.kernel.e.b.binary(op, a, b)
    }

    fn scaled(&mut self, x: ExprId, factor: f64) -> ExprId {
        if factor == 1.0 {
            return x;
        }
        let factor = self.number(factor as f32);
        self.binary(BinaryOp::Mul, x, factor)
    }

    /// `exp(a - b)`
    fn exp_of_difference(&mut self, a: ExprId, b: ExprId) -> ExprId {
        let difference = self.binary(BinaryOp::Sub, a, b);
        self.kernel.e.b.unary(UnaryOp::Exp, difference)
    }

    fn select(&mut self, condition: Option<ExprId>, a: ExprId, b: f32) -> ExprId {
        let Some(condition) = condition else { return a };
        let b = self.number(b);
        self.kernel.e.b.select(condition, a, b)
    }

    fn both(&mut self, a: Option<ExprId>, b: Option<ExprId>) -> Option<ExprId> {
        match (a, b) {
            (Some(a), Some(b)) => Some(self.kernel.e.b.and(a, b)),
            (a, b) => a.or(b),
        }
    }

    fn add_to(&mut self, slot: SlotId, a: ExprId, b: ExprId) {
        let b_ = &mut self.kernel.e.b;
        let before = b_.read(slot);
        let after = b_.mul_add(a, b, before);
        b_.assign(slot, after);
    }

    /// Where the causal rule lets `query` see `key`; `None` if it always does.
    fn visible(&mut self, query: &Index, key: &Index) -> Option<ExprId> {
        let offset = self.spec.dims.causal?;
        let last = query.shift(offset);
        if last.range().0 >= key.range().1 {
            return None;
        }
        let b = &mut self.kernel.e.b;
        let (key, last) = (b.index(key), b.index(&last));
        Some(b.compare(CompareOp::Le, key, last))
    }

    /// From the scaled product of a query and a key, without the causal rule.
    fn score(&mut self, batch: &[Index], query: &Place, key: &Place, product: ExprId) -> Score {
        let (mut value, mut slope) = (product, None);
        if let Some(cap) = self.spec.dims.softcap {
            let inner = self.scaled(value, 1.0 / cap.0);
            let inner = self.kernel.e.b.unary(UnaryOp::Tanh, inner);
            value = self.scaled(inner, cap.0);
            let (square, one) = (self.binary(BinaryOp::Mul, inner, inner), self.number(1.0));
            slope = Some(self.binary(BinaryOp::Sub, one, square));
        }
        let within = self.both(query.within, key.within);
        let mut keep = within;
        if let Some(mask) = self.spec.mask {
            let at = self.spec.mask_at(batch, &query.at, &key.at);
            let outer = self.kernel.e.begin_guard(within);
            let element = self.kernel.e.eval(mask, &at);
            self.kernel.e.end_guard(outer);
            let kept = if self.kernel.graph.ty(mask).dtype == DType::Bool {
                element
            } else {
                value = self.binary(BinaryOp::Add, value, element);
                self.above_minus_infinity(element)
            };
            keep = self.both(keep, Some(kept));
        }
        Score { value, keep, slope }
    }

    fn above_minus_infinity(&mut self, x: ExprId) -> ExprId {
        let zero = self.number(0.0);
        let b = &mut self.kernel.e.b;
        let infinite = b.unary(UnaryOp::IsInf, x);
        let negative = b.compare(CompareOp::Lt, x, zero);
        let never = b.and(infinite, negative);
        b.unary(UnaryOp::Not, never)
    }

    /// The weight of a score whose query has this log-sum-exp.
    fn weight(&mut self, score: &Score, log_sum_exp: ExprId) -> ExprId {
        let mut p = self.exp_of_difference(score.value, log_sum_exp);
        if self.spec.dims.guarded {
            let nan = self.kernel.e.b.unary(UnaryOp::IsNan, p);
            let number = self.kernel.e.b.unary(UnaryOp::Not, nan);
            p = self.select(Some(number), p, 0.0);
        }
        self.select(score.keep, p, 0.0)
    }

    /// `p * (dp - delta)`, through the cap: the cotangent of the scaled product.
    fn score_cotangent(&mut self, score: &Score, p: ExprId, dp: ExprId, delta: ExprId) -> ExprId {
        let difference = self.binary(BinaryOp::Sub, dp, delta);
        let mut ds = self.binary(BinaryOp::Mul, p, difference);
        if let Some(slope) = score.slope {
            ds = self.binary(BinaryOp::Mul, ds, slope);
        }
        ds
    }

    /// The factor that makes a weighted sum an average, and whether it counts, where guards ask.
    fn normalizer(&mut self, sum: ExprId) -> (ExprId, Option<ExprId>) {
        let (zero, one) = (self.number(0.0), self.number(1.0));
        let inverse = self.binary(BinaryOp::Div, one, sum);
        let b = &mut self.kernel.e.b;
        let positive = b.compare(CompareOp::Gt, sum, zero);
        let inverse = self.select(Some(positive), inverse, f32::NAN);
        let b = &mut self.kernel.e.b;
        let counts = self.spec.dims.guarded.then(|| {
            let nan = b.unary(UnaryOp::IsNan, inverse);
            b.unary(UnaryOp::Not, nan)
        });
        (inverse, counts)
    }

    /// One element of a row.
    fn element(&mut self, node: NodeId, row: impl Fn(&Attention, &Index) -> Vec<Index>, column: &Place) -> ExprId {
        let at = row(&self.spec, &column.at);
        let outer = self.kernel.e.begin_guard(column.within);
        let value = self.kernel.e.eval(node, &at);
        self.kernel.e.end_guard(outer);
        value
    }

    /// `sum_c a[row, c] * b[row, c]` over `size` columns.
    fn dot(&mut self, size: usize, a: (NodeId, RowAt), b: (NodeId, RowAt)) -> ExprId {
        let zero = self.number(0.0);
        let sum = self.kernel.e.b.declare(zero);
        let looped = size / COLUMNS * COLUMNS;
        if looped > 0 {
            let (token, first) = self.begin_for(looped, COLUMNS);
            for c in 0..COLUMNS {
                let column = first.shift(c as i64);
                let (x, y) = (self.element(a.0, a.1, &Place::sure(column.clone())), self.element(b.0, b.1, &Place::sure(column)));
                self.add_to(sum, x, y);
            }
            self.kernel.e.b.end_for(token);
        }
        for c in looped..size {
            let column = Index::constant(c as i64);
            let (x, y) = (self.element(a.0, a.1, &Place::sure(column.clone())), self.element(b.0, b.1, &Place::sure(column)));
            self.add_to(sum, x, y);
        }
        self.kernel.e.b.read(sum)
    }

    /// The share of `size` columns that invocation `part` of `parts` accumulates.
    fn part(&mut self, size: usize, part: &Index, parts: usize) -> Part {
        let width = size.div_ceil(parts);
        let zero = self.number(0.0);
        let columns: Vec<Place> = (0..width)
            .map(|c| {
                let at = part.scale(width as i64).shift(c as i64);
                let within = self.kernel.e.b.below(&at, size);
                Place { at: at.bounded(0, size as i64 - 1), within }
            })
            .collect();
        let sums = columns.iter().map(|_| self.kernel.e.b.declare(zero)).collect();
        Part { columns, sums }
    }

    /// The buffer of a result that this kernel writes.
    fn target(&self, role: Role) -> Option<(NodeId, usize)> {
        let position = |node| attention(self.kernel.graph, node).is_some_and(|a| a.role == role);
        let i = self.kernel.group.stored.iter().position(|s| position(s.node))?;
        Some((self.kernel.group.stored[i].node, self.kernel.targets[i]))
    }

    /// Whether the kernel has to compute a gradient.
    fn computes(&self, role: Role) -> bool {
        self.ends(role).is_some() || self.target(role).is_some()
    }

    /// The epilogue, if it follows from this gradient.
    fn ends(&self, role: Role) -> Option<&'g (NodeId, root::Place)> {
        self.epilogue.filter(|(node, _)| attention(self.kernel.graph, *node).is_some_and(|a| a.role == role))
    }

    /// Stores one row's columns of a gradient, and what follows from them.
    fn store_row(&mut self, role: Role, within: Option<ExprId>, columns: &[Place], at: &[Vec<Index>], values: &[ExprId]) {
        if let Some(target) = self.target(role) {
            for ((column, at), &value) in columns.iter().zip(at).zip(values) {
                let within = self.both(within, column.within);
                self.store(target, at, within, value);
            }
        }
        let Some((node, place)) = self.ends(role) else { return };
        let stored = &self.kernel.group.stored;
        let follows: Vec<usize> = (0..stored.len()).filter(|&i| attention(self.kernel.graph, stored[i].node).is_none()).collect();
        self.kernel.e.known_row = Some((*node, columns.iter().map(|c| c.at.clone()).zip(values.iter().copied()).collect()));
        for (column, at) in columns.iter().zip(at) {
            let within = self.both(within, column.within);
            let at = self.kernel.root_at(*node, place, at);
            self.kernel.store_within(within, &follows, &at);
        }
        self.kernel.e.known_row = None;
    }

    fn store(&mut self, (node, buffer): (NodeId, usize), at: &[Index], within: Option<ExprId>, value: ExprId) {
        let linear = crate::index::ravel(at, &self.kernel.graph.ty(node).shape);
        let b = &mut self.kernel.e.b;
        if within.is_some() {
            b.begin_if();
        }
        let index = b.index(&linear);
        b.store(buffer, index, value);
        if let Some(within) = within {
            b.end_if(within);
        }
    }

    /// Divides `rows` of `batch` among invocations, each of which takes one of `parts` of the columns: batch, row and part.
    fn rows(
        &mut self,
        batch: &[usize],
        rows: usize,
        parts: usize,
        profile: &DeviceProfile,
    ) -> (Vec<Index>, Index, Index, [u32; 3]) {
        let shape: Vec<usize> = batch.iter().copied().chain([rows, parts]).collect();
        let (i, workgroups) = global_invocation(&mut self.kernel.e.b, shape.iter().product(), WORKGROUP, profile);
        let mut at = unravel(&i, &shape);
        let part = at.pop().unwrap_or_default();
        let row = at.pop().unwrap_or_default();
        (at, row, part, workgroups)
    }

    fn begin_for(&mut self, end: usize, step: usize) -> (Loop, Index) {
        let start = self.kernel.e.b.i32(0);
        self.kernel.e.b.begin_for(start, end, step)
    }

    /// Runs `body` for each key that the causal rule lets the query see, or for each query that sees the key.
    fn if_visible(&mut self, query: &Index, key: &Index, body: impl FnOnce(&mut Self)) {
        let visible = self.visible(query, key);
        if visible.is_some() {
            self.kernel.e.b.begin_if();
        }
        body(self);
        if let Some(visible) = visible {
            self.kernel.e.b.end_if(visible);
        }
    }

    /// One invocation per query: an online softmax over the keys.
    fn forward_direct(&mut self, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let parts = spec.value_size.div_ceil(COLUMNS).max(1);
        let (batch, query, part, workgroups) = self.rows(&spec.batch, spec.queries, parts, profile);
        let (lowest, zero) = (self.number(f32::MIN), self.number(0.0));
        let (max, sum) = (self.kernel.e.b.declare(lowest), self.kernel.e.b.declare(zero));
        let out = self.part(spec.value_size, &part, parts);

        let (token, key) = self.begin_for(spec.keys, 1);
        self.if_visible(&query, &key, |this| {
            let product = this.dot(
                spec.size,
                (spec.query, &|a, c| a.query_at(&batch, &query, Some(c))),
                (spec.key, &|a, c| a.key_at(&batch, &key, c)),
            );
            let product = this.scaled(product, spec.dims.scale.0);
            let score = this.score(&batch, &Place::sure(query.clone()), &Place::sure(key.clone()), product);
            let value = this.select(score.keep, score.value, f32::MIN);
            let b = &mut this.kernel.e.b;
            let before = b.read(max);
            let larger = b.compare(CompareOp::Gt, value, before);
            let after = b.select(larger, value, before);
            let correction = this.exp_of_difference(before, after);
            let p = this.exp_of_difference(value, after);
            let p = this.select(score.keep, p, 0.0);
            this.kernel.e.b.assign(max, after);
            this.rescale(sum, correction, p);
            if let Some(value_node) = spec.value {
                for (column, &slot) in out.columns.iter().zip(&out.sums) {
                    let v = this.element(value_node, |a, c| a.key_at(&batch, &key, c), column);
                    let weighted = this.binary(BinaryOp::Mul, p, v);
                    this.rescale(slot, correction, weighted);
                }
            }
        });
        self.kernel.e.b.end_for(token);

        let total = self.kernel.e.b.read(sum);
        if let Some(target) = self.target(Role::Output) {
            let (inverse, counts) = self.normalizer(total);
            for (column, &slot) in out.columns.iter().zip(&out.sums) {
                let value = self.kernel.e.b.read(slot);
                let value = self.binary(BinaryOp::Mul, value, inverse);
                let value = self.select(counts, value, 0.0);
                self.store(target, &spec.query_at(&batch, &query, Some(&column.at)), column.within, value);
            }
        }
        if let Some(target) = self.target(Role::LogSumExp) {
            let log = self.kernel.e.b.unary(UnaryOp::Log, total);
            let max = self.kernel.e.b.read(max);
            let value = self.binary(BinaryOp::Add, max, log);
            let first = (parts > 1).then(|| {
                let b = &mut self.kernel.e.b;
                let (part, zero) = (b.index(&part), b.i32(0));
                b.compare(CompareOp::Eq, part, zero)
            });
            self.store(target, &spec.query_at(&batch, &query, None), first, value);
        }
        workgroups
    }

    /// `slot = slot * factor + addend`
    fn rescale(&mut self, slot: SlotId, factor: ExprId, addend: ExprId) {
        let b = &mut self.kernel.e.b;
        let before = b.read(slot);
        let after = b.mul_add(before, factor, addend);
        b.assign(slot, after);
    }

    /// The score of a pair, its weight, and the cotangent of the scaled product if the values and the delta are asked for.
    fn pair(&mut self, batch: &[Index], query: &Index, key: &Index, with_cotangent: bool) -> (ExprId, Option<ExprId>) {
        let spec = self.spec.clone();
        let Some(backward) = spec.backward else { unreachable!("derivatives have cotangents") };
        let product = self.dot(
            spec.size,
            (spec.query, &|a, c| a.query_at(batch, query, Some(c))),
            (spec.key, &|a, c| a.key_at(batch, key, c)),
        );
        let product = self.scaled(product, spec.dims.scale.0);
        let score = self.score(batch, &Place::sure(query.clone()), &Place::sure(key.clone()), product);
        let row = spec.query_at(batch, query, None);
        let log_sum_exp = self.kernel.e.eval(backward.log_sum_exp, &row);
        let p = self.weight(&score, log_sum_exp);
        let value = spec.value.filter(|_| with_cotangent);
        let ds = value.map(|value| {
            let dp = self.dot(
                spec.value_size,
                (backward.cotangent, &|a, c| a.query_at(batch, query, Some(c))),
                (value, &|a, c| a.key_at(batch, key, c)),
            );
            let delta = self.kernel.e.eval(backward.delta, &row);
            self.score_cotangent(&score, p, dp, delta)
        });
        (p, ds)
    }

    /// One invocation per query.
    fn query_gradient_direct(&mut self, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let parts = spec.size.div_ceil(COLUMNS);
        let (batch, query, part, workgroups) = self.rows(&spec.batch, spec.queries, parts, profile);
        let out = self.part(spec.size, &part, parts);
        let (token, key) = self.begin_for(spec.keys, 1);
        self.if_visible(&query, &key, |this| {
            let (_, Some(ds)) = this.pair(&batch, &query, &key, true) else { unreachable!("asked for") };
            for (column, &slot) in out.columns.iter().zip(&out.sums) {
                let k = this.element(spec.key, |a, c| a.key_at(&batch, &key, c), column);
                this.add_to(slot, ds, k);
            }
        });
        self.kernel.e.b.end_for(token);
        self.store_part(Role::Gradient(AttentionOperand::Query), &out, spec.dims.scale.0, |a, c| {
            a.query_at(&batch, &query, Some(c))
        });
        workgroups
    }

    /// One invocation per key, over the queries of all that share it.
    fn key_gradients_direct(&mut self, profile: &DeviceProfile) -> [u32; 3] {
        let spec = self.spec.clone();
        let Some(backward) = spec.backward else { unreachable!("derivatives have cotangents") };
        let parts = spec.size.max(spec.value_size).div_ceil(COLUMNS);
        let own = spec.own_batch();
        let (own_at, key, part, workgroups) = self.rows(&own, spec.keys, parts, profile);
        let [for_keys, for_values] = [AttentionOperand::Key, AttentionOperand::Value].map(|of| self.computes(Role::Gradient(of)));
        let keys = for_keys.then(|| self.part(spec.size, &part, parts));
        let values = for_values.then(|| self.part(spec.value_size, &part, parts));

        let shared: Vec<usize> = spec.shared.iter().map(|&a| spec.batch[a]).collect();
        let (outer, at) = self.kernel.e.b.begin_loops(&shared);
        let mut batch = own_at.clone();
        spec.shared.iter().zip(at).for_each(|(&axis, index)| batch[axis] = index);
        let (token, query) = self.begin_for(spec.queries, 1);
        self.if_visible(&query, &key, |this| {
            let (p, ds) = this.pair(&batch, &query, &key, for_keys);
            let row = |a: &Attention, c: &Index| a.query_at(&batch, &query, Some(c));
            if let (Some(part), Some(ds)) = (&keys, ds) {
                for (column, &slot) in part.columns.iter().zip(&part.sums) {
                    let q = this.element(spec.query, row, column);
                    this.add_to(slot, ds, q);
                }
            }
            if let Some(part) = &values {
                for (column, &slot) in part.columns.iter().zip(&part.sums) {
                    let dy = this.element(backward.cotangent, row, column);
                    this.add_to(slot, p, dy);
                }
            }
        });
        self.kernel.e.b.end_for(token);
        self.kernel.e.b.end_loops(outer);
        for (of, part, factor) in [(AttentionOperand::Key, keys, spec.dims.scale.0), (AttentionOperand::Value, values, 1.0)] {
            if let Some(part) = part {
                self.store_part(Role::Gradient(of), &part, factor, |a, c| a.key_at(&own_at, &key, c));
            }
        }
        workgroups
    }

    fn store_part(&mut self, role: Role, part: &Part, factor: f64, at: impl Fn(&Attention, &Index) -> Vec<Index>) {
        let values: Vec<ExprId> = part.sums.iter().map(|&slot| self.kernel.e.b.read(slot)).collect();
        let values: Vec<ExprId> = values.into_iter().map(|value| self.scaled(value, factor)).collect();
        let at: Vec<Vec<Index>> = part.columns.iter().map(|column| at(&self.spec, &column.at)).collect();
        self.store_row(role, None, &part.columns, &at, &values);
    }
}
