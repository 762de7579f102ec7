//! The body of a kernel: a structured, typed program over scalars, and the builder that keeps it free of repetition.
//!
//! Expressions are interned. Each is defined once, in the outermost open scope where everything that it needs exists, so
//! loop-invariant code leaves its loop by construction.

mod builder;

use meganeura_ir::{BinaryOp, CompareOp, DType, UnaryOp};

pub use self::builder::{Builder, Loop};
use crate::index::VarId;
use crate::profile::DeviceProfile;

/// The type of a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    F32,
    /// In memory only, and on the way to matrix units: arithmetic is f32.
    F16,
    I32,
    U32,
    Bool,
}

impl Scalar {
    /// How elements of `dtype` lie in device memory.
    pub fn stored(dtype: DType, profile: &DeviceProfile) -> Self {
        if profile.stores_halves(dtype) { Scalar::F16 } else { dtype.device().into() }
    }

    /// Bytes of an element in workgroup memory.
    pub fn shared_bytes(self) -> u32 {
        if self == Scalar::F16 { 2 } else { 4 }
    }
}

impl From<meganeura_ir::DeviceType> for Scalar {
    fn from(t: meganeura_ir::DeviceType) -> Self {
        match t {
            meganeura_ir::DeviceType::F32 => Scalar::F32,
            meganeura_ir::DeviceType::I32 => Scalar::I32,
            meganeura_ir::DeviceType::U32 => Scalar::U32,
            meganeura_ir::DeviceType::Bool => Scalar::Bool,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExprId(pub u32);

/// A mutable variable or a workgroup array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Literal {
    /// By bits.
    F32(u32),
    I32(i32),
    U32(u32),
    Bool(bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Expr {
    Literal(Literal),
    /// An iteration variable, of type i32.
    Var(VarId),
    Unary(UnaryOp, ExprId),
    Binary(BinaryOp, ExprId, ExprId),
    Compare(CompareOp, ExprId, ExprId),
    /// `(condition, if true, if false)`
    Select(ExprId, ExprId, ExprId),
    Convert(Scalar, ExprId),
    /// Quotient of non-negative i32 values by a constant.
    IndexDiv(ExprId, i32),
    /// Remainder of non-negative i32 values by a constant.
    IndexMod(ExprId, i32),
    /// An element of a storage buffer.
    Load {
        buffer: usize,
        index: ExprId,
    },
    /// Four neighbouring elements of a storage buffer, `index` counted in vectors. Only [`Expr::Component`] reads it.
    LoadVector {
        buffer: usize,
        index: ExprId,
    },
    /// An element of a workgroup array. Never interned: memory changes.
    LoadShared {
        array: SlotId,
        index: ExprId,
    },
    /// Four neighbouring elements of a workgroup array of vectors, `index` counted in vectors. Only [`Expr::Component`] reads it. Never
    /// interned.
    LoadSharedVector {
        array: SlotId,
        index: ExprId,
    },
    /// An element of a vector, of 0 to 3.
    Component(ExprId, u8),
    /// The value of a mutable variable now. Never interned.
    Read(SlotId),
    /// `a * b + c`
    MulAdd(ExprId, ExprId, ExprId),
    /// An f32 rounded to f16 or bf16.
    Quantize(DType, ExprId),
    /// The larger of `a` and the magnitude of `b`, both f32; of `a` or NaN where `b` is NaN.
    MaxMagnitude(ExprId, ExprId),
    /// The bits of an f32 as u32, or those of a u32 as f32.
    Bitcast(Scalar, ExprId),
    /// The random f32 of a key, a stream and a position, all u32.
    RandomUniform {
        key: [ExprId; 4],
        stream: u32,
        index: ExprId,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Stmt {
    /// Defines an expression.
    Let(ExprId),
    /// Declares a mutable variable.
    Declare {
        slot: SlotId,
        value: ExprId,
    },
    Assign {
        slot: SlotId,
        value: ExprId,
    },
    /// `for (var = start; var < end; var += step)`
    For {
        var: VarId,
        start: ExprId,
        end: i32,
        step: i32,
        body: Vec<Stmt>,
    },
    If {
        condition: ExprId,
        body: Vec<Stmt>,
    },
    Store {
        buffer: usize,
        index: ExprId,
        value: ExprId,
    },
    StoreShared {
        array: SlotId,
        index: ExprId,
        value: ExprId,
    },
    /// Stores four neighbouring elements of a workgroup array of vectors, `index` counted in vectors.
    StoreSharedVector {
        array: SlotId,
        index: ExprId,
        values: [ExprId; 4],
    },
    /// Raises an element of an atomic workgroup array to at least `value`.
    AtomicMax {
        array: SlotId,
        index: ExprId,
        value: ExprId,
    },
    /// What the invocations of a subgroup do together on matrices.
    Matrix(MatrixStmt),
    Barrier,
    /// Leaves the kernel.
    Return,
}

/// Rows and columns of a cooperative matrix.
pub const MATRIX: usize = 16;

/// The part of a matrix in `c = a * b + c`: `a` and `b` are f16, `c` is f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    A,
    B,
    C,
}

/// A place of a cooperative matrix in a workgroup array: the index of its first element and the distance of its rows, or of its columns
/// where `transposed`. Both count what the array consists of, scalars or vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixPlace {
    pub array: SlotId,
    pub first: ExprId,
    pub pitch: u32,
    pub transposed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MatrixStmt {
    /// Declares a matrix with what lies at a place.
    Load {
        slot: SlotId,
        role: Role,
        place: MatrixPlace,
    },
    /// `c = a * b + c`
    MultiplyAdd {
        a: SlotId,
        b: SlotId,
        c: SlotId,
    },
    /// `c = c * factor`
    Scale {
        c: SlotId,
        factor: ExprId,
    },
    Store {
        c: SlotId,
        place: MatrixPlace,
    },
}

/// A storage buffer of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub scalar: Scalar,
    pub writable: bool,
    /// Whether it is declared as vectors of four, since some loads take four elements at once.
    pub vectors: bool,
}

impl Buffer {
    pub fn read(scalar: Scalar) -> Self {
        Buffer { scalar, writable: false, vectors: false }
    }

    pub fn write(scalar: Scalar) -> Self {
        Buffer { scalar, writable: true, vectors: false }
    }
}

/// What a workgroup array consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elements {
    Scalars,
    /// Vectors of four, which load at once.
    Vectors,
    /// Scalars that several invocations may change at once.
    Atomics,
}

/// A workgroup array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedArray {
    pub slot: SlotId,
    /// In scalars.
    pub length: u32,
    pub elements: Elements,
}

/// A finished body.
#[derive(Clone, Debug)]
pub struct Body {
    pub exprs: Vec<(Expr, Scalar)>,
    pub slots: Vec<Scalar>,
    pub shared: Vec<SharedArray>,
    pub buffers: Vec<Buffer>,
    pub stmts: Vec<Stmt>,
    pub workgroup_size: [u32; 3],
    /// Variables bound to builtins.
    pub builtins: Vec<(VarId, Builtin)>,
}

impl Body {
    /// Iterations that all loops of one invocation run at most.
    pub fn iterations(&self) -> u64 {
        fn of(stmts: &[Stmt]) -> u64 {
            stmts.iter().fold(0, |sum, stmt| match stmt {
                Stmt::For { end, step, body, .. } => {
                    let trips = (*end as u64).div_ceil((*step).max(1) as u64);
                    sum.saturating_add(trips.saturating_mul(of(body).saturating_add(1)))
                }
                Stmt::If { body, .. } => sum.saturating_add(of(body)),
                _ => sum,
            })
        }
        of(&self.stmts)
    }
}

/// Where an invocation finds itself. All are i32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// The position in the grid, as one number: workgroups spread over y and z where x is full.
    GlobalLinear { workgroups_x: u32, workgroups_y: u32 },
    /// The workgroup's number in the grid.
    GroupLinear { workgroups_x: u32, workgroups_y: u32 },
    /// The position in the workgroup.
    Local,
}

/// The expressions that `expr` reads.
pub fn operands(expr: &Expr) -> impl Iterator<Item = ExprId> {
    let list: [Option<ExprId>; 5] = match *expr {
        Expr::Literal(_) | Expr::Var(_) | Expr::Read(_) => [None; 5],
        Expr::Unary(_, x)
        | Expr::Convert(_, x)
        | Expr::Quantize(_, x)
        | Expr::Bitcast(_, x)
        | Expr::IndexDiv(x, _)
        | Expr::IndexMod(x, _) => [Some(x), None, None, None, None],
        Expr::Load { index, .. }
        | Expr::LoadVector { index, .. }
        | Expr::LoadShared { index, .. }
        | Expr::LoadSharedVector { index, .. } => [Some(index), None, None, None, None],
        Expr::Component(x, _) => [Some(x), None, None, None, None],
        Expr::Binary(_, a, b) | Expr::Compare(_, a, b) | Expr::MaxMagnitude(a, b) => [Some(a), Some(b), None, None, None],
        Expr::Select(a, b, c) | Expr::MulAdd(a, b, c) => [Some(a), Some(b), Some(c), None, None],
        Expr::RandomUniform { key: [a, b, c, d], index, .. } => [a, b, c, d, index].map(Some),
    };
    list.into_iter().flatten()
}
