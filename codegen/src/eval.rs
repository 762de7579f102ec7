//! Evaluates graph nodes symbolically at an index: the mechanism behind every fusion.
//!
//! Asking for a node at an index emits what computes that one element. Pointwise ops become expressions, movement becomes index arithmetic,
//! reductions become loops in the outermost scope where their index exists, and nodes that live in memory become loads.

use std::collections::HashMap;

use meganeura_ir::{
    ArgOp, BinaryOp, CompareOp, DType, DTypeClass, DeviceType, Graph, NodeId, Op, ReduceOp, ScatterOp, Tensor, reduce_identity,
};

use crate::access::{Access, Guard, folded, movement};
use crate::body::{Builder, ExprId, Literal, Scalar, Stmt};
use crate::index::{Index, ravel, unravel};
use crate::profile::DeviceProfile;
use crate::program::packed;

/// The invocations that share one row: they split each reduction among them.
#[derive(Clone, Debug)]
pub struct Lanes {
    pub local: Index,
    pub count: usize,
}

pub struct Evaluator<'a> {
    pub graph: &'a Graph,
    pub b: Builder,
    /// Nodes that live in memory, and the buffer that holds them.
    pub buffers: HashMap<NodeId, usize>,
    /// Nodes whose value at the kernel's own element is known: the accumulator of a contraction.
    pub known: HashMap<NodeId, ExprId>,
    /// A node of which one row is known, and its columns: an attention's gradient.
    pub known_row: Option<(NodeId, Vec<(Index, ExprId)>)>,
    /// Set in row kernels with several invocations per row.
    pub lanes: Option<Lanes>,
    /// Whether elements come in runs of four: loads take four at once where the first of them lies at a multiple of four.
    pub vectors: bool,
    /// What must hold for the current index to be valid; loads read element 0 otherwise.
    guard: Option<ExprId>,
    memo: HashMap<(NodeId, Vec<Index>, Option<ExprId>), Vec<ExprId>>,
}

impl<'a> Evaluator<'a> {
    pub fn new(graph: &'a Graph) -> Self {
        Evaluator {
            graph,
            b: Builder::default(),
            buffers: HashMap::new(),
            known: HashMap::new(),
            known_row: None,
            lanes: None,
            vectors: false,
            guard: None,
            memo: HashMap::new(),
        }
    }

    /// Starts an element of contractions' results, whose sums are given.
    pub fn begin_element(&mut self, sums: impl IntoIterator<Item = (NodeId, ExprId)>) {
        self.known.extend(sums);
        self.memo.clear();
    }

    /// From here, indices are valid only where `condition` holds. Returns the outer guard for [`end_guard`](Self::end_guard).
    pub fn begin_guard(&mut self, condition: Option<ExprId>) -> Option<ExprId> {
        let outer = self.guard;
        self.guard = match (outer, condition) {
            (Some(a), Some(b)) => Some(self.b.and(a, b)),
            (a, b) => a.or(b),
        };
        outer
    }

    pub fn end_guard(&mut self, outer: Option<ExprId>) {
        self.guard = outer;
    }

    /// Whether the node is a loop that a condition saves.
    fn is_rare(&self, node: NodeId) -> bool {
        matches!(self.graph.node(node).op, Op::Scatter { .. }) && !self.buffers.contains_key(&node)
    }

    fn scalar(&self, node: NodeId) -> Scalar {
        self.graph.ty(node).dtype.device().into()
    }

    /// The element of `node` at `at`.
    pub fn eval(&mut self, node: NodeId, at: &[Index]) -> ExprId {
        if let Some(&e) = self.known.get(&node) {
            return e;
        }
        if let Some(e) = self.in_known_row(node, at) {
            return e;
        }
        let key = (node, at.to_vec(), self.guard);
        if let Some(found) = self.memo.get(&key)
            && let Some(&e) = found.iter().find(|e| self.b.visible(**e))
        {
            return e;
        }
        let e = self.eval_new(node, at);
        self.memo.entry(key).or_default().push(e);
        e
    }

    /// The value of `node` at `at` where its row is known. A column that is not was read under a guard which fails, so that any value does.
    fn in_known_row(&self, node: NodeId, at: &[Index]) -> Option<ExprId> {
        let (_, columns) = self.known_row.as_ref().filter(|(known, _)| *known == node)?;
        let column = at.last()?.unbounded();
        let found = columns.iter().find(|(own, _)| own.unbounded() == column).or(columns.first());
        found.map(|&(_, value)| value)
    }

    fn eval_new(&mut self, node: NodeId, at: &[Index]) -> ExprId {
        if let Some(&buffer) = self.buffers.get(&node) {
            return self.load(buffer, node, at);
        }
        let n = self.graph.node(node);
        match &n.op {
            Op::Constant(value) => self.constant(value),
            Op::Iota { axis, .. } => {
                let i = self.b.index(&at[*axis]);
                self.b.convert(self.scalar(node), i)
            }
            Op::RandomUniform { shape, stream } => {
                let key = [0, 1, 2, 3].map(|word| self.eval(n.operands[0], &[Index::constant(word)]));
                let index = self.b.index(&ravel(at, shape));
                let index = self.b.convert(Scalar::U32, index);
                self.b.random_uniform(key, *stream, index)
            }
            Op::Unary(op) => {
                let x = self.eval(n.operands[0], at);
                self.b.unary(*op, x)
            }
            Op::Binary(op) => {
                let x = self.eval(n.operands[0], at);
                let y = self.eval(n.operands[1], at);
                self.b.binary(*op, x, y)
            }
            Op::Compare(op) => {
                let x = self.eval(n.operands[0], at);
                let y = self.eval(n.operands[1], at);
                self.b.compare(*op, x, y)
            }
            Op::Select if self.is_rare(n.operands[1]) => {
                let [condition, otherwise] = [0, 2].map(|i| self.eval(n.operands[i], at));
                let value = self.b.declare(otherwise);
                self.b.begin_rare_if();
                let x = self.eval(n.operands[1], at);
                self.b.assign(value, x);
                self.b.end_if(condition);
                self.b.read(value)
            }
            Op::Select => {
                let [condition, x, y] = [0, 1, 2].map(|i| self.eval(n.operands[i], at));
                self.b.select(condition, x, y)
            }
            Op::Cast(to) => {
                let x = self.eval(n.operands[0], at);
                self.cast(x, self.graph.ty(n.operands[0]).dtype, *to)
            }
            op if op.is_movement() => {
                let alternatives = movement(self.graph, node, at);
                self.first_of(&alternatives)
            }
            Op::Gather { axis } => {
                let rank = self.graph.ty(n.operands[1]).shape.rank();
                let size = self.graph.ty(n.operands[0]).shape[*axis];
                let index = self.eval(n.operands[1], &at[*axis..axis + rank]);
                let index = self.clamped(index, size);
                let mut source = at[..*axis].to_vec();
                source.push(index);
                source.extend_from_slice(&at[axis + rank..]);
                self.eval(n.operands[0], &source)
            }
            Op::Reduce { op, axes } => self.reduce(node, *op, axes, at),
            Op::ArgReduce { op, axis } => self.arg_reduce(node, *op, *axis, at),
            Op::Fold { .. } => self.fold(node, at),
            Op::Scatter { op, axis } => self.scatter(node, *op, *axis, at),
            op => unreachable!("{} lives in memory or was decomposed", op.name()),
        }
    }

    /// An index that was read from memory, confined to `0..size`.
    fn clamped(&mut self, index: ExprId, size: usize) -> Index {
        let index = self.b.convert(Scalar::I32, index);
        let (zero, last) = (self.b.i32(0), self.b.i32(size as i32 - 1));
        let index = self.b.binary(BinaryOp::Max, index, zero);
        let index = self.b.binary(BinaryOp::Min, index, last);
        self.b.opaque(index, size)
    }

    fn load(&mut self, buffer: usize, node: NodeId, at: &[Index]) -> ExprId {
        let linear = ravel(at, &self.graph.ty(node).shape);
        if self.vectors
            && let Some((vector, component)) = linear.in_vectors()
            && !self.b.buffers[buffer].writable
            && matches!(self.b.buffers[buffer].scalar, Scalar::F32 | Scalar::F16)
        {
            let index = self.guarded_index(&vector);
            return self.b.load_component(buffer, index, component);
        }
        let index = self.guarded_index(&linear);
        self.b.load(buffer, index)
    }

    /// The position of a load, or 0 where the guard does not hold.
    fn guarded_index(&mut self, linear: &Index) -> ExprId {
        let index = self.b.index(linear);
        match self.guard {
            Some(guard) if linear.as_constant().is_none() => {
                let zero = self.b.i32(0);
                self.b.select(guard, index, zero)
            }
            _ => index,
        }
    }

    fn constant(&mut self, value: &Tensor) -> ExprId {
        let literal = scalar_literal(value);
        self.b.literal(literal)
    }

    /// A zero of the node's type.
    pub fn zero(&mut self, node: NodeId) -> ExprId {
        let zero = Tensor::from_f64(self.graph.ty(node).dtype, [], &[0.0]);
        self.constant(&zero)
    }

    /// The conjunction of `guards`, or `None` where they are empty.
    fn condition(&mut self, guards: &[Guard]) -> Option<ExprId> {
        let mut all = None;
        for guard in guards {
            let holds = match guard {
                Guard::Never => self.b.literal(Literal::Bool(false)),
                Guard::Within { index, extent } => {
                    let (low, high) = index.range();
                    let i = self.b.index(index);
                    let above = (low < 0).then(|| {
                        let zero = self.b.i32(0);
                        self.b.compare(CompareOp::Ge, i, zero)
                    });
                    let below = (high >= *extent as i64).then(|| {
                        let extent = self.b.i32(*extent as i32);
                        self.b.compare(CompareOp::Lt, i, extent)
                    });
                    match (above, below) {
                        (Some(a), Some(b)) => self.b.and(a, b),
                        (Some(a), None) | (None, Some(a)) => a,
                        (None, None) => continue,
                    }
                }
                Guard::Multiple { index, of } => {
                    let rest = self.b.index(&index.rem(*of as i64));
                    let zero = self.b.i32(0);
                    self.b.compare(CompareOp::Eq, rest, zero)
                }
            };
            all = Some(match all {
                Some(all) => self.b.and(all, holds),
                None => holds,
            });
        }
        all
    }

    /// Runs `body` where `condition` must hold as well.
    fn guarded<R>(&mut self, condition: Option<ExprId>, body: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.begin_guard(condition);
        let result = body(self);
        self.end_guard(outer);
        result
    }

    /// The value of the first alternative whose guards hold.
    fn first_of(&mut self, alternatives: &[Access]) -> ExprId {
        let (first, rest) = alternatives.split_first().expect("at least one alternative");
        if first.guards.contains(&Guard::Never) && !rest.is_empty() {
            return self.first_of(rest);
        }
        // The last alternative needs no test, but its index is out of range where an earlier one holds.
        let condition = self.condition(&first.guards);
        let value = self.guarded(condition, |this| this.eval(first.operand, &first.at));
        match condition {
            Some(condition) if !rest.is_empty() => {
                let otherwise = self.first_of(rest);
                self.b.select(condition, value, otherwise)
            }
            _ => value,
        }
    }

    /// The element that `access` reads, or zero where its guards fail.
    pub fn access_or_zero(&mut self, access: &Access) -> ExprId {
        if access.guards.contains(&Guard::Never) {
            return self.zero(access.operand);
        }
        let condition = self.condition(&access.guards);
        let value = self.guarded(condition, |this| this.eval(access.operand, &access.at));
        match condition {
            Some(condition) => {
                let zero = self.zero(access.operand);
                self.b.select(condition, value, zero)
            }
            None => value,
        }
    }

    /// As [`access_or_zero`](Self::access_or_zero), and zero where `within` fails too.
    pub fn access_within(&mut self, access: &Access, within: Option<ExprId>) -> ExprId {
        let value = self.guarded(within, |this| this.access_or_zero(access));
        match within {
            Some(within) => {
                let zero = self.zero(access.operand);
                self.b.select(within, value, zero)
            }
            None => value,
        }
    }

    fn cast(&mut self, x: ExprId, from: DType, to: DType) -> ExprId {
        match (from.class(), to.class()) {
            (DTypeClass::Float, DTypeClass::Bool) => {
                let zero = self.b.f32(0.0);
                self.b.compare(CompareOp::Ne, x, zero)
            }
            (DTypeClass::Int, DTypeClass::Bool) => {
                let zero = match self.b.scalar(x) {
                    Scalar::U32 => self.b.literal(Literal::U32(0)),
                    _ => self.b.i32(0),
                };
                self.b.compare(CompareOp::Ne, x, zero)
            }
            (_, DTypeClass::Float) => {
                let x = self.b.convert(Scalar::F32, x);
                match to {
                    DType::F16 | DType::BF16 if from != to => self.b.quantize(to, x),
                    _ => x,
                }
            }
            (_, DTypeClass::Int) => {
                let x = self.b.convert(to.device().into(), x);
                self.narrowed(x, to)
            }
            (DTypeClass::Bool, DTypeClass::Bool) => x,
        }
    }

    /// Wraps an integer to the width of `to`.
    fn narrowed(&mut self, x: ExprId, to: DType) -> ExprId {
        let bits = to.size() * 8;
        if bits >= 32 {
            return x;
        }
        let mask = (1u32 << bits) - 1;
        if to.device() == DeviceType::U32 {
            let mask = self.b.literal(Literal::U32(mask));
            return self.b.binary(BinaryOp::And, x, mask);
        }
        let (mask, sign) = (self.b.i32(mask as i32), self.b.i32(1 << (bits - 1)));
        let low = self.b.binary(BinaryOp::And, x, mask);
        let flipped = self.b.binary(BinaryOp::Xor, low, sign);
        self.b.binary(BinaryOp::Sub, flipped, sign)
    }

    /// Loops over `extents`, this invocation's share of them if lanes split the row.
    fn loops(&mut self, extents: &[usize], body: impl FnOnce(&mut Self, Vec<Index>)) {
        match self.lanes.clone() {
            Some(lanes) => {
                let start = self.b.index(&lanes.local);
                let (token, i) = self.b.begin_for(start, extents.iter().product(), lanes.count);
                body(self, unravel(&i, extents));
                self.b.end_for(token);
            }
            None => self.serial_loops(extents, body),
        }
    }

    fn serial_loops(&mut self, extents: &[usize], body: impl FnOnce(&mut Self, Vec<Index>)) {
        let (tokens, at) = self.b.begin_loops(extents);
        body(self, at);
        self.b.end_loops(tokens);
    }

    fn reduce(&mut self, node: NodeId, op: ReduceOp, axes: &[usize], at: &[Index]) -> ExprId {
        let x = self.graph.node(node).operands[0];
        let ty = self.graph.ty(x).clone();
        let identity = scalar_literal(&reduce_identity(op, ty.dtype));
        let extents: Vec<usize> = axes.iter().map(|&a| ty.shape[a]).collect();
        let identity = self.b.literal(identity);
        if extents.contains(&0) {
            return identity;
        }
        let combine = reduction(op, ty.dtype);
        let hoist = self.b.begin_hoist(at, self.guard);
        let sum = self.b.declare(identity);
        self.loops(&extents, |this, inner| {
            let value = this.eval(x, &interleaved(at, axes, &inner));
            let before = this.b.read(sum);
            let after = this.b.binary(combine, before, value);
            this.b.assign(sum, after);
        });
        let mut result = self.b.read(sum);
        if let Some(lanes) = self.lanes.clone() {
            result = self.across_lanes(&lanes, &[result], |b, mine, other| vec![b.binary(combine, mine[0], other[0])])[0];
        }
        self.b.end_hoist(hoist);
        result
    }

    /// Combines one value per lane into one, by a tree in workgroup memory.
    fn across_lanes(
        &mut self,
        lanes: &Lanes,
        values: &[ExprId],
        combine: impl Fn(&mut Builder, &[ExprId], &[ExprId]) -> Vec<ExprId>,
    ) -> Vec<ExprId> {
        let b = &mut self.b;
        let local = b.index(&lanes.local);
        let arrays: Vec<_> = values.iter().map(|&v| b.shared(b.scalar(v), lanes.count as u32)).collect();
        for (&array, &value) in arrays.iter().zip(values) {
            b.stmt(Stmt::StoreShared { array, index: local, value });
        }
        b.stmt(Stmt::Barrier);
        let mut half = lanes.count / 2;
        while half > 0 {
            let width = b.i32(half as i32);
            let active = b.compare(CompareOp::Lt, local, width);
            let partner = b.index(&lanes.local.shift(half as i64));
            b.begin_if();
            let mine: Vec<_> = arrays.iter().map(|&a| b.load_shared(a, local)).collect();
            let other: Vec<_> = arrays.iter().map(|&a| b.load_shared(a, partner)).collect();
            for (&array, value) in arrays.iter().zip(combine(b, &mine, &other)) {
                b.stmt(Stmt::StoreShared { array, index: local, value });
            }
            b.end_if(active);
            b.stmt(Stmt::Barrier);
            half /= 2;
        }
        let zero = b.i32(0);
        arrays.iter().map(|&a| b.load_shared(a, zero)).collect()
    }

    fn arg_reduce(&mut self, node: NodeId, op: ArgOp, axis: usize, at: &[Index]) -> ExprId {
        let x = self.graph.node(node).operands[0];
        let ty = self.graph.ty(x).clone();
        let better = match op {
            ArgOp::Max => CompareOp::Gt,
            ArgOp::Min => CompareOp::Lt,
        };
        let hoist = self.b.begin_hoist(at, self.guard);
        // Start from the first element, so that ties and NaN keep the first index.
        let first = self.eval(x, &interleaved(at, &[axis], &[Index::constant(0)]));
        let zero = self.b.i32(0);
        let (best, position) = (self.b.declare(first), self.b.declare(zero));
        self.loops(&[ty.shape[axis]], |this, inner| {
            let value = this.eval(x, &interleaved(at, &[axis], &inner));
            let i = this.b.index(&inner[0]);
            let (old, old_i) = (this.b.read(best), this.b.read(position));
            let wins = this.b.compare(better, value, old);
            let (new, new_i) = (this.b.select(wins, value, old), this.b.select(wins, i, old_i));
            this.b.assign(best, new);
            this.b.assign(position, new_i);
        });
        let mut result = self.b.read(position);
        if let Some(lanes) = self.lanes.clone() {
            let value = self.b.read(best);
            let pair = self.across_lanes(&lanes, &[value, result], |b, mine, other| {
                let wins = b.compare(better, other[0], mine[0]);
                let ties = b.compare(CompareOp::Eq, other[0], mine[0]);
                let earlier = b.compare(CompareOp::Lt, other[1], mine[1]);
                let ties = b.and(ties, earlier);
                let wins = b.binary(BinaryOp::Or, wins, ties);
                vec![b.select(wins, other[0], mine[0]), b.select(wins, other[1], mine[1])]
            });
            result = pair[1];
        }
        self.b.end_hoist(hoist);
        result
    }

    fn fold(&mut self, node: NodeId, at: &[Index]) -> ExprId {
        let Op::Fold { window, .. } = &self.graph.node(node).op else { unreachable!("fold") };
        let zero = self.zero(node);
        let hoist = self.b.begin_hoist(at, self.guard);
        let sum = self.b.declare(zero);
        self.serial_loops(&window.size, |this, k| {
            let access = folded(this.graph, node, at, &k);
            let value = this.access_or_zero(&access);
            let before = this.b.read(sum);
            let after = this.b.binary(BinaryOp::Add, before, value);
            this.b.assign(sum, after);
        });
        let result = self.b.read(sum);
        self.b.end_hoist(hoist);
        result
    }

    /// Pulls: every element of the result looks through all indices for those that name it, in order, so that the result is deterministic.
    fn scatter(&mut self, node: NodeId, op: ScatterOp, axis: usize, at: &[Index]) -> ExprId {
        let n = self.graph.node(node);
        let [x, indices, updates] = [n.operands[0], n.operands[1], n.operands[2]];
        let dtype = n.ty.dtype;
        let count = self.graph.ty(indices).shape.to_vec();
        let start = self.eval(x, at);
        if count.contains(&0) {
            return start;
        }
        let value = self.b.declare(start);
        let target = self.b.index(&at[axis]);
        self.serial_loops(&count, |this, j| {
            let index = this.eval(indices, &j);
            let index = this.b.convert(Scalar::I32, index);
            let hit = this.b.compare(CompareOp::Eq, index, target);
            let source: Vec<_> = at[..axis].iter().chain(&j).chain(&at[axis + 1..]).cloned().collect();
            this.b.begin_rare_if();
            let update = this.eval(updates, &source);
            let old = this.b.read(value);
            let new = match op {
                ScatterOp::Set => update,
                ScatterOp::Add => this.b.binary(reduction(ReduceOp::Sum, dtype), old, update),
                ScatterOp::Mul => this.b.binary(reduction(ReduceOp::Prod, dtype), old, update),
                ScatterOp::Max => this.b.binary(reduction(ReduceOp::Max, dtype), old, update),
                ScatterOp::Min => this.b.binary(reduction(ReduceOp::Min, dtype), old, update),
            };
            this.b.assign(value, new);
            this.b.end_if(hit);
        });
        self.b.read(value)
    }
}

/// The binary op that a reduction repeats.
fn reduction(op: ReduceOp, dtype: DType) -> BinaryOp {
    match op {
        ReduceOp::Sum => BinaryOp::Add,
        ReduceOp::Prod => BinaryOp::Mul,
        ReduceOp::Max if dtype == DType::Bool => BinaryOp::Or,
        ReduceOp::Min if dtype == DType::Bool => BinaryOp::And,
        ReduceOp::Max => BinaryOp::Max,
        ReduceOp::Min => BinaryOp::Min,
    }
}

/// The index of a reduction's operand: `inner` at `axes`, `outer` in order at the others.
pub fn interleaved(outer: &[Index], axes: &[usize], inner: &[Index]) -> Vec<Index> {
    let mut outer = outer.iter();
    (0..outer.len() + axes.len())
        .map(|axis| match axes.iter().position(|&a| a == axis) {
            Some(i) => inner[i].clone(),
            None => outer.next().expect("one index per kept axis").clone(),
        })
        .collect()
}

/// The value of a one-element tensor as a device literal.
pub fn scalar_literal(value: &Tensor) -> Literal {
    let word = one_word_each(value)[0];
    match value.dtype().device() {
        DeviceType::F32 => Literal::F32(word),
        DeviceType::I32 => Literal::I32(word as i32),
        DeviceType::U32 => Literal::U32(word),
        DeviceType::Bool => Literal::Bool(word != 0),
    }
}

/// Elements as they lie in device memory.
pub fn device_words(value: &Tensor, profile: &DeviceProfile) -> Vec<u32> {
    if profile.stores_halves(value.dtype()) {
        return packed(value.bytes()).collect();
    }
    one_word_each(value)
}

/// Elements in the form in which kernels compute with them. 64-bit integers saturate to 32 bits.
fn one_word_each(value: &Tensor) -> Vec<u32> {
    let words = |word: fn(i64) -> u32| value.to_i64_vec().into_iter().map(word).collect();
    match value.dtype().device() {
        DeviceType::F32 => value.to_f32_vec().into_iter().map(f32::to_bits).collect(),
        DeviceType::I32 => words(|v| v.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32 as u32),
        DeviceType::U32 => words(|v| v.clamp(0, i64::from(u32::MAX)) as u32),
        DeviceType::Bool => words(|v| u32::from(v != 0)),
    }
}
