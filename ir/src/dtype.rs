//! Element types.

use std::fmt;
use std::str::FromStr;

/// The element type of a tensor.
///
/// Graphs use every variant. Devices compute with 32-bit words: see [`DType::device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
}

/// What a value of some dtype is in arithmetic: the reference interpreter and kernels have one representation per class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DTypeClass {
    Float,
    Int,
    Bool,
}

/// The 32-bit word with which a device computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceType {
    F32,
    I32,
    U32,
    /// Stored as `u32` 0 or 1.
    Bool,
}

impl DType {
    pub const ALL: [DType; 13] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F64,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Bool,
    ];

    /// Bytes of one element in a file or on the host.
    pub fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    pub fn class(self) -> DTypeClass {
        match self {
            DType::F32 | DType::F16 | DType::BF16 | DType::F64 => DTypeClass::Float,
            DType::Bool => DTypeClass::Bool,
            _ => DTypeClass::Int,
        }
    }

    pub fn is_float(self) -> bool {
        self.class() == DTypeClass::Float
    }

    pub fn is_int(self) -> bool {
        self.class() == DTypeClass::Int
    }

    /// The word that holds this dtype on a device. 64-bit integers narrow to 32 bits: values are checked where they enter.
    pub fn device(self) -> DeviceType {
        match self {
            DType::F32 | DType::F16 | DType::BF16 | DType::F64 => DeviceType::F32,
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => DeviceType::I32,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => DeviceType::U32,
            DType::Bool => DeviceType::Bool,
        }
    }

    /// The name in the text form and in messages: `f32`, `i64`, `bool`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F64 => "f64",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = ();
    fn from_str(s: &str) -> Result<Self, ()> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or(())
    }
}
