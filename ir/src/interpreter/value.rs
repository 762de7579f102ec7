//! Values of the interpreter.

use std::fmt::Debug;

use crate::{DType, DTypeClass, Tensor, TensorType};

/// The precision of the interpreter's floats: `f32` or `f64`.
pub trait Real: Copy + Debug + Default + PartialEq + Send + Sync + 'static {
    /// Rounds to nearest.
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Real for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// The elements of a tensor, row-major, in the representation of its dtype's class. A `u64` above `i64::MAX` is held by its bits.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<T> {
    Float(Vec<T>),
    Int(Vec<i64>),
    Bool(Vec<bool>),
}

/// A value that does not have the type it is used at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{ty} needs {} elements, found {found} elements of class {class:?}", ty.shape.numel())]
pub struct ValueError {
    pub ty: TensorType,
    pub class: DTypeClass,
    pub found: usize,
}

impl<T: Real> Value<T> {
    pub fn from_tensor(tensor: &Tensor) -> Self {
        match tensor.dtype().class() {
            DTypeClass::Float => Value::Float(tensor.to_f64_vec().into_iter().map(T::from_f64).collect()),
            DTypeClass::Int => Value::Int(tensor.to_i64_vec()),
            DTypeClass::Bool => Value::Bool(tensor.to_i64_vec().into_iter().map(|v| v != 0).collect()),
        }
    }

    /// A tensor of type `ty`: floats round to its dtype, integers wrap.
    ///
    /// # Errors
    /// If the class or the element count differs from the type's.
    pub fn to_tensor(&self, ty: &TensorType) -> Result<Tensor, ValueError> {
        self.check(ty)?;
        let shape = ty.shape.clone();
        Ok(match self {
            Value::Float(v) => Tensor::from_f64(ty.dtype, shape, &v.iter().map(|v| v.to_f64()).collect::<Vec<_>>()),
            Value::Int(v) => Tensor::from_i64(ty.dtype, shape, v),
            Value::Bool(v) => Tensor::from_i64(ty.dtype, shape, &v.iter().map(|&v| v.into()).collect::<Vec<_>>()),
        })
    }

    pub fn class(&self) -> DTypeClass {
        match self {
            Value::Float(_) => DTypeClass::Float,
            Value::Int(_) => DTypeClass::Int,
            Value::Bool(_) => DTypeClass::Bool,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Value::Float(v) => v.len(),
            Value::Int(v) => v.len(),
            Value::Bool(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every element as `f64` (bool as 0 or 1).
    pub fn to_f64_vec(&self) -> Vec<f64> {
        match self {
            Value::Float(v) => v.iter().map(|v| v.to_f64()).collect(),
            Value::Int(v) => v.iter().map(|&v| v as f64).collect(),
            Value::Bool(v) => v.iter().map(|&v| v.into()).collect(),
        }
    }

    /// Whether the value can stand for a tensor of type `ty`.
    pub fn check(&self, ty: &TensorType) -> Result<(), ValueError> {
        if self.class() == ty.dtype.class() && self.len() == ty.shape.numel() {
            Ok(())
        } else {
            Err(ValueError { ty: ty.clone(), class: self.class(), found: self.len() })
        }
    }

    /// The elements at `positions`.
    pub(super) fn pick(&self, positions: &[usize]) -> Self {
        match self {
            Value::Float(v) => Value::Float(positions.iter().map(|&i| v[i]).collect()),
            Value::Int(v) => Value::Int(positions.iter().map(|&i| v[i]).collect()),
            Value::Bool(v) => Value::Bool(positions.iter().map(|&i| v[i]).collect()),
        }
    }

    /// Elements of `dtype` from floats, rounded, if it is a float; otherwise from integers, wrapped.
    pub(super) fn from_elements(dtype: DType, elements: Elements) -> Self {
        match elements {
            Elements::Float(v) => Value::Float(v.into_iter().map(T::from_f64).collect()),
            Elements::Int(v) if dtype == DType::Bool => Value::Bool(v.into_iter().map(|v| v != 0).collect()),
            Elements::Int(v) => Value::Int(v.into_iter().map(|v| wrap(dtype, v)).collect()),
        }
    }

    /// The elements of a value of `dtype` in the widest representation.
    pub(super) fn elements(&self, dtype: DType) -> Elements {
        match self {
            Value::Float(_) => Elements::Float(self.to_f64_vec()),
            Value::Int(v) => Elements::Int(v.iter().map(|&v| widen(dtype, v)).collect()),
            Value::Bool(v) => Elements::Int(v.iter().map(|&v| v.into()).collect()),
        }
    }
}

/// Elements in the representation that arithmetic uses: integers and bools without wrapping.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Elements {
    Float(Vec<f64>),
    Int(Vec<i128>),
}

/// The number that `value` stands for.
pub(super) fn widen(dtype: DType, value: i64) -> i128 {
    if dtype == DType::U64 { (value as u64).into() } else { value.into() }
}

/// `value` modulo the width of an integer dtype, held as [`Value::Int`] holds it.
pub(super) fn wrap(dtype: DType, value: i128) -> i64 {
    match dtype {
        DType::I8 => (value as i8).into(),
        DType::I16 => (value as i16).into(),
        DType::I32 => (value as i32).into(),
        DType::U8 => (value as u8).into(),
        DType::U16 => (value as u16).into(),
        DType::U32 => (value as u32).into(),
        _ => value as i64,
    }
}
