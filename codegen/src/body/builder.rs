//! Builds a [`Body`]: expressions are interned, and each is defined in the outermost scope where it can be.

use std::collections::HashMap;
use std::rc::Rc;

use meganeura_ir::{BinaryOp, CompareOp, DType, UnaryOp};

use super::{
    Body, Buffer, Builtin, Elements, Expr, ExprId, Literal, MatrixPlace, MatrixStmt, Role, Scalar, SharedArray, SlotId, Stmt,
    operands,
};
use crate::index::{Atom, Index, VarId};

/// An open loop.
#[must_use]
pub struct Loop(Option<(VarId, ExprId, i32, i32)>);

/// Scopes that are set aside.
#[must_use]
pub struct Hoist(Vec<Scope>);

struct Scope {
    id: u32,
    stmts: Vec<Stmt>,
    /// Loads inside do not leave it.
    pins_loads: bool,
}

/// Builds a [`Body`].
pub struct Builder {
    exprs: Vec<(Expr, Scalar)>,
    /// The scope that defines each expression; `None` for literals.
    home: Vec<Option<u32>>,
    interned: HashMap<Expr, Vec<ExprId>>,
    scopes: Vec<Scope>,
    next_scope: u32,
    vars: HashMap<VarId, u32>,
    next_var: VarId,
    slots: Vec<Scalar>,
    shared: Vec<SharedArray>,
    pub buffers: Vec<Buffer>,
    builtins: Vec<(VarId, Builtin)>,
    opaque: Vec<ExprId>,
    lowered: HashMap<Index, Vec<ExprId>>,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            exprs: Vec::new(),
            home: Vec::new(),
            interned: HashMap::new(),
            scopes: vec![Scope { id: 0, stmts: Vec::new(), pins_loads: false }],
            next_scope: 1,
            vars: HashMap::new(),
            next_var: 0,
            slots: Vec::new(),
            shared: Vec::new(),
            buffers: Vec::new(),
            builtins: Vec::new(),
            opaque: Vec::new(),
            lowered: HashMap::new(),
        }
    }
}

impl Builder {
    pub fn finish(mut self, workgroup_size: [u32; 3]) -> Body {
        let root = self.scopes.remove(0);
        assert!(self.scopes.is_empty(), "every scope is closed");
        Body {
            exprs: self.exprs,
            slots: self.slots,
            shared: self.shared,
            buffers: self.buffers,
            stmts: root.stmts,
            workgroup_size,
            builtins: self.builtins,
        }
    }

    pub fn buffer(&mut self, buffer: Buffer) -> usize {
        self.buffers.push(buffer);
        self.buffers.len() - 1
    }

    /// A variable bound to a builtin, in `0..extent`.
    pub fn builtin(&mut self, builtin: Builtin, extent: usize) -> Index {
        let id = self.new_var();
        self.vars.insert(id, 0);
        self.builtins.push((id, builtin));
        Index::var(id, extent)
    }

    fn new_var(&mut self) -> VarId {
        self.next_var += 1;
        self.next_var - 1
    }

    fn new_slot(&mut self, scalar: Scalar) -> SlotId {
        self.slots.push(scalar);
        SlotId(self.slots.len() as u32 - 1)
    }

    fn shared_array(&mut self, scalar: Scalar, length: u32, elements: Elements) -> SlotId {
        let slot = self.new_slot(scalar);
        self.shared.push(SharedArray { slot, length, elements });
        slot
    }

    /// A workgroup array.
    pub fn shared(&mut self, scalar: Scalar, length: u32) -> SlotId {
        self.shared_array(scalar, length, Elements::Scalars)
    }

    /// A workgroup array of u32 that several invocations may raise at once.
    pub fn shared_atomics(&mut self, length: u32) -> SlotId {
        self.shared_array(Scalar::U32, length, Elements::Atomics)
    }

    /// A workgroup array of vectors of four; `length`, in scalars, is a multiple of four.
    pub fn shared_vectors(&mut self, scalar: Scalar, length: u32) -> SlotId {
        self.shared_array(scalar, length, Elements::Vectors)
    }

    pub fn scalar(&self, e: ExprId) -> Scalar {
        self.exprs[e.0 as usize].1
    }

    pub fn expr(&self, e: ExprId) -> &Expr {
        &self.exprs[e.0 as usize].0
    }

    /// Position in the scope stack of the innermost scope that `expr` depends on.
    fn depth(&self, expr: &Expr) -> usize {
        let position = |id: u32| self.scopes.iter().position(|s| s.id == id).expect("operands are in open scopes");
        match expr {
            Expr::Var(v) => position(self.vars[v]),
            Expr::Read(_) | Expr::LoadShared { .. } | Expr::LoadSharedVector { .. } => self.scopes.len() - 1,
            _ => {
                let pinned = match expr {
                    Expr::Load { .. } | Expr::LoadVector { .. } => self.scopes.iter().rposition(|s| s.pins_loads).unwrap_or(0),
                    _ => 0,
                };
                operands(expr).filter_map(|o| self.home[o.0 as usize]).map(position).max().unwrap_or(0).max(pinned)
            }
        }
    }

    /// Whether `e` is defined in an open scope.
    pub fn visible(&self, e: ExprId) -> bool {
        self.home[e.0 as usize].is_none_or(|h| self.scopes.iter().any(|s| s.id == h))
    }

    fn push(&mut self, expr: Expr, scalar: Scalar) -> ExprId {
        let internable = !matches!(expr, Expr::Read(_) | Expr::LoadShared { .. } | Expr::LoadSharedVector { .. });
        if internable
            && let Some(found) = self.interned.get(&expr)
            && let Some(&e) = found.iter().find(|e| self.visible(**e))
        {
            return e;
        }
        let id = ExprId(self.exprs.len() as u32);
        let home = (!matches!(expr, Expr::Literal(_))).then(|| self.depth(&expr));
        self.exprs.push((expr.clone(), scalar));
        self.home.push(home.map(|depth| self.scopes[depth].id));
        if let Some(depth) = home {
            self.scopes[depth].stmts.push(Stmt::Let(id));
        }
        if internable {
            self.interned.entry(expr).or_default().push(id);
        }
        id
    }

    pub fn f32(&mut self, value: f32) -> ExprId {
        self.push(Expr::Literal(Literal::F32(value.to_bits())), Scalar::F32)
    }

    pub fn i32(&mut self, value: i32) -> ExprId {
        self.push(Expr::Literal(Literal::I32(value)), Scalar::I32)
    }

    pub fn literal(&mut self, literal: Literal) -> ExprId {
        let scalar = match literal {
            Literal::F32(_) => Scalar::F32,
            Literal::I32(_) => Scalar::I32,
            Literal::U32(_) => Scalar::U32,
            Literal::Bool(_) => Scalar::Bool,
        };
        self.push(Expr::Literal(literal), scalar)
    }

    pub fn unary(&mut self, op: UnaryOp, x: ExprId) -> ExprId {
        let scalar = match op {
            UnaryOp::IsNan | UnaryOp::IsInf => Scalar::Bool,
            _ => self.scalar(x),
        };
        self.push(Expr::Unary(op, x), scalar)
    }

    pub fn binary(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> ExprId {
        let scalar = self.scalar(a);
        self.push(Expr::Binary(op, a, b), scalar)
    }

    pub fn compare(&mut self, op: CompareOp, a: ExprId, b: ExprId) -> ExprId {
        self.push(Expr::Compare(op, a, b), Scalar::Bool)
    }

    pub fn and(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinaryOp::And, a, b)
    }

    pub fn select(&mut self, condition: ExprId, a: ExprId, b: ExprId) -> ExprId {
        let scalar = self.scalar(a);
        if a == b { a } else { self.push(Expr::Select(condition, a, b), scalar) }
    }

    pub fn mul_add(&mut self, a: ExprId, b: ExprId, c: ExprId) -> ExprId {
        let scalar = self.scalar(a);
        self.push(Expr::MulAdd(a, b, c), scalar)
    }

    pub fn convert(&mut self, scalar: Scalar, x: ExprId) -> ExprId {
        let narrow = if scalar == Scalar::F16 { self.narrow(x) } else { None };
        match narrow {
            Some(narrow) => narrow,
            None if self.scalar(x) == scalar => x,
            None => self.push(Expr::Convert(scalar, x), scalar),
        }
    }

    /// The f16 that `x`, an f32, was before it was converted, if it was one: or a choice between such, and zero.
    fn narrow(&mut self, x: ExprId) -> Option<ExprId> {
        self.was_f16(x).then(|| self.narrowed(x))
    }

    fn was_f16(&self, x: ExprId) -> bool {
        match *self.expr(x) {
            Expr::Convert(_, from) => self.scalar(from) == Scalar::F16,
            Expr::Literal(Literal::F32(bits)) => bits == 0,
            Expr::Select(_, a, b) => self.was_f16(a) && self.was_f16(b),
            _ => false,
        }
    }

    fn narrowed(&mut self, x: ExprId) -> ExprId {
        match *self.expr(x) {
            Expr::Convert(_, half) if self.scalar(half) == Scalar::F16 => half,
            Expr::Select(condition, a, b) => {
                let (a, b) = (self.narrowed(a), self.narrowed(b));
                self.select(condition, a, b)
            }
            _ => self.push(Expr::Convert(Scalar::F16, x), Scalar::F16),
        }
    }

    pub fn quantize(&mut self, dtype: DType, x: ExprId) -> ExprId {
        self.push(Expr::Quantize(dtype, x), Scalar::F32)
    }

    pub fn random_uniform(&mut self, key: [ExprId; 4], stream: u32, index: ExprId) -> ExprId {
        self.push(Expr::RandomUniform { key, stream, index }, Scalar::F32)
    }

    pub fn load(&mut self, buffer: usize, index: ExprId) -> ExprId {
        let scalar = self.buffers[buffer].scalar;
        let raw = if scalar == Scalar::Bool { Scalar::U32 } else { scalar };
        let word = self.push(Expr::Load { buffer, index }, raw);
        match scalar {
            Scalar::Bool => {
                let zero = self.literal(Literal::U32(0));
                self.compare(CompareOp::Ne, word, zero)
            }
            Scalar::F16 => self.convert(Scalar::F32, word),
            _ => word,
        }
    }

    /// Element `component` of vector `index` of a storage buffer that is only read.
    pub fn load_component(&mut self, buffer: usize, index: ExprId, component: u8) -> ExprId {
        let scalar = self.buffers[buffer].scalar;
        self.buffers[buffer].vectors = true;
        let vector = self.push(Expr::LoadVector { buffer, index }, scalar);
        let element = self.push(Expr::Component(vector, component), scalar);
        self.convert(Scalar::F32, element)
    }

    pub fn max_magnitude(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.push(Expr::MaxMagnitude(a, b), Scalar::F32)
    }

    pub fn bitcast(&mut self, scalar: Scalar, x: ExprId) -> ExprId {
        self.push(Expr::Bitcast(scalar, x), scalar)
    }

    pub fn load_shared(&mut self, array: SlotId, index: ExprId) -> ExprId {
        let scalar = self.slots[array.0 as usize];
        self.push(Expr::LoadShared { array, index }, scalar)
    }

    /// The elements of vector `index` of an array of vectors.
    pub fn load_shared_vector(&mut self, array: SlotId, index: ExprId) -> [ExprId; 4] {
        let scalar = self.slots[array.0 as usize];
        let vector = self.push(Expr::LoadSharedVector { array, index }, scalar);
        [0, 1, 2, 3].map(|i| self.push(Expr::Component(vector, i), scalar))
    }

    /// Expressions so far that load one element of a storage buffer, and those that load four.
    pub fn loads(&self) -> (usize, usize) {
        let count = |wanted: fn(&Expr) -> bool| self.exprs.iter().filter(|(e, _)| wanted(e)).count();
        (count(|e| matches!(e, Expr::Load { .. })), count(|e| matches!(e, Expr::LoadVector { .. })))
    }

    /// Emits a statement in the innermost scope.
    pub fn stmt(&mut self, stmt: Stmt) {
        self.scopes.last_mut().expect("the root scope is open").stmts.push(stmt);
    }

    pub fn store(&mut self, buffer: usize, index: ExprId, value: ExprId) {
        let value = match self.buffers[buffer].scalar {
            Scalar::Bool => self.convert(Scalar::U32, value),
            scalar => self.convert(scalar, value),
        };
        self.stmt(Stmt::Store { buffer, index, value });
    }

    /// A mutable variable in the innermost scope.
    pub fn declare(&mut self, value: ExprId) -> SlotId {
        let slot = self.new_slot(self.scalar(value));
        self.stmt(Stmt::Declare { slot, value });
        slot
    }

    pub fn assign(&mut self, slot: SlotId, value: ExprId) {
        self.stmt(Stmt::Assign { slot, value });
    }

    pub fn read(&mut self, slot: SlotId) -> ExprId {
        let scalar = self.slots[slot.0 as usize];
        self.push(Expr::Read(slot), scalar)
    }

    /// A matrix with what lies at `place`.
    pub fn load_matrix(&mut self, role: Role, place: MatrixPlace) -> SlotId {
        let slot = self.new_slot(if role == Role::C { Scalar::F32 } else { Scalar::F16 });
        self.stmt(Stmt::Matrix(MatrixStmt::Load { slot, role, place }));
        slot
    }

    fn open(&mut self) {
        self.scopes.push(Scope { id: self.next_scope, stmts: Vec::new(), pins_loads: false });
        self.next_scope += 1;
    }

    fn close(&mut self) -> Vec<Stmt> {
        self.scopes.pop().expect("a scope is open").stmts
    }

    /// Opens `for var in (start..end).step_by(step)`. A loop of one trip is no loop.
    pub fn begin_for(&mut self, start: ExprId, end: usize, step: usize) -> (Loop, Index) {
        if end == 1 && step == 1 && *self.expr(start) == Expr::Literal(Literal::I32(0)) {
            return (Loop(None), Index::constant(0));
        }
        let var = self.new_var();
        self.open();
        let scope = self.scopes.last().expect("just opened").id;
        self.vars.insert(var, scope);
        // From 0, the last trip starts at a multiple of the step.
        let from_zero = *self.expr(start) == Expr::Literal(Literal::I32(0));
        let extent = if from_zero { end.saturating_sub(1) / step * step + 1 } else { end };
        (Loop(Some((var, start, end as i32, step as i32))), Index::var_unfolded(var, extent))
    }

    pub fn end_for(&mut self, token: Loop) {
        if let Loop(Some((var, start, end, step))) = token {
            let body = self.close();
            self.stmt(Stmt::For { var, start, end, step, body });
        }
    }

    /// Opens nested loops over `extents`, outermost first.
    pub fn begin_loops(&mut self, extents: &[usize]) -> (Vec<Loop>, Vec<Index>) {
        let zero = self.i32(0);
        extents.iter().map(|&extent| self.begin_for(zero, extent, 1)).unzip()
    }

    pub fn end_loops(&mut self, tokens: Vec<Loop>) {
        tokens.into_iter().rev().for_each(|token| self.end_for(token));
    }

    pub fn begin_if(&mut self) {
        self.open();
    }

    /// As [`begin_if`](Self::begin_if), and what is loaded inside is loaded only where the condition holds.
    pub fn begin_rare_if(&mut self) {
        self.open();
        self.scopes.last_mut().expect("just opened").pins_loads = true;
    }

    pub fn end_if(&mut self, condition: ExprId) {
        let body = self.close();
        self.stmt(Stmt::If { condition, body });
    }

    /// Sets the innermost scopes aside, so that what follows lands in the outermost scope where `at` and the guard exist.
    pub fn begin_hoist(&mut self, at: &[Index], guard: Option<ExprId>) -> Hoist {
        let mut depth = 0;
        let needed: Vec<ExprId> = at.iter().map(|index| self.index(index)).chain(guard).collect();
        for e in needed {
            if let Some(home) = self.home[e.0 as usize] {
                let position = self.scopes.iter().position(|s| s.id == home).expect("just built");
                depth = depth.max(position);
            }
        }
        Hoist(self.scopes.split_off(depth + 1))
    }

    pub fn end_hoist(&mut self, token: Hoist) {
        self.scopes.extend(token.0);
    }

    /// An atom whose value is `e`, confined to `0..extent`.
    pub fn opaque(&mut self, e: ExprId, extent: usize) -> Index {
        self.opaque.push(e);
        Index::opaque(self.opaque.len() as u32 - 1, extent, Default::default())
    }

    /// The value of an index, as i32.
    pub fn index(&mut self, index: &Index) -> ExprId {
        if let Some(found) = self.lowered.get(index)
            && let Some(&e) = found.iter().find(|e| self.visible(**e))
        {
            return e;
        }
        let mut sum: Option<ExprId> = None;
        for (atom, coefficient) in index.terms() {
            let value = self.atom(atom);
            let term = match *coefficient {
                1 => value,
                c => {
                    let c = self.i32(c as i32);
                    self.binary(BinaryOp::Mul, value, c)
                }
            };
            sum = Some(match sum {
                Some(sum) => self.binary(BinaryOp::Add, sum, term),
                None => term,
            });
        }
        let offset = index.offset() as i32;
        let e = match sum {
            None => self.i32(offset),
            Some(sum) if offset == 0 => sum,
            Some(sum) => {
                let offset = self.i32(offset);
                self.binary(BinaryOp::Add, sum, offset)
            }
        };
        self.lowered.entry(index.clone()).or_default().push(e);
        e
    }

    /// The condition that `index` is less than `end`, unless it always is.
    pub fn below(&mut self, index: &Index, end: usize) -> Option<ExprId> {
        (index.range().1 >= end as i64).then(|| {
            let (position, end) = (self.index(index), self.i32(end as i32));
            self.compare(CompareOp::Lt, position, end)
        })
    }

    /// `index`, or the last position of `extent` where it may be past the end.
    pub fn clamped(&mut self, index: Index, extent: usize) -> Index {
        if index.range().1 < extent as i64 {
            return index;
        }
        let position = self.clamped_index(&index, extent);
        self.opaque(position, extent)
    }

    /// The value of an index that is not negative, or the last position of `extent` where it is past the end.
    pub fn clamped_index(&mut self, index: &Index, extent: usize) -> ExprId {
        let value = self.index(index);
        let last = self.i32(extent as i32 - 1);
        self.binary(BinaryOp::Min, value, last)
    }

    fn atom(&mut self, atom: &Atom) -> ExprId {
        let quotient = |b: &mut Self, x: &Rc<Index>, c: i64, op: BinaryOp| {
            let nonnegative = x.range().0 >= 0;
            let value = b.index(x);
            match (nonnegative, op) {
                (true, BinaryOp::Div) => b.push(Expr::IndexDiv(value, c as i32), Scalar::I32),
                (true, _) => b.push(Expr::IndexMod(value, c as i32), Scalar::I32),
                (false, op) => {
                    let c = b.i32(c as i32);
                    b.binary(op, value, c)
                }
            }
        };
        match atom {
            Atom::Var { id, .. } => self.push(Expr::Var(*id), Scalar::I32),
            Atom::Div(x, c) => quotient(self, x, *c, BinaryOp::Div),
            Atom::Mod(x, c) => quotient(self, x, *c, BinaryOp::Rem),
            Atom::Bounded { index, .. } => self.index(index),
            Atom::Opaque { id, .. } => self.opaque[*id as usize],
        }
    }
}
