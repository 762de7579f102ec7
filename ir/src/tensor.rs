//! Host tensors: constants, inputs, outputs and weights outside a device.

use half::{bf16, f16};

use crate::{DType, DTypeClass, Shape, TensorType};

/// A host tensor: its type and its elements, row-major, little-endian, at the dtype's own width (bool: one byte, 0 or 1).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tensor {
    ty: TensorType,
    bytes: Vec<u8>,
}

/// The byte count of a tensor's data does not match its type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{ty} needs {expected} bytes, found {found}")]
pub struct TensorSizeError {
    pub ty: TensorType,
    pub expected: usize,
    pub found: usize,
}

macro_rules! elements {
    ($bytes:expr, $t:ty, $f:expr) => {
        $bytes
            .chunks_exact(size_of::<$t>())
            .map(|c| {
                let mut word = [0; size_of::<$t>()];
                word.copy_from_slice(c);
                $f(<$t>::from_le_bytes(word))
            })
            .collect()
    };
}

/// A number that a dtype cannot hold.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{value:e} is outside the range of {dtype}, in which models compute")]
pub struct RangeError {
    pub value: f64,
    pub dtype: DType,
}

impl Tensor {
    /// Wraps little-endian `bytes`; they must be exactly `ty.bytes()` long.
    pub fn from_bytes(ty: TensorType, bytes: Vec<u8>) -> Result<Self, TensorSizeError> {
        match ty.shape.checked_numel().and_then(|n| n.checked_mul(ty.dtype.size())) {
            Some(expected) if expected == bytes.len() => Ok(Tensor { ty, bytes }),
            expected => Err(TensorSizeError { expected: expected.unwrap_or(usize::MAX), found: bytes.len(), ty }),
        }
    }

    /// All elements zero (false).
    pub fn zeros(ty: TensorType) -> Self {
        let bytes = vec![0; ty.bytes()];
        Tensor { ty, bytes }
    }

    /// A float, integer or bool tensor of `dtype` from `f64` values, rounded to `dtype` (integers truncate and saturate).
    ///
    /// # Panics
    /// If `values.len()` differs from the shape's element count.
    pub fn from_f64(dtype: DType, shape: impl Into<Shape>, values: &[f64]) -> Self {
        let ty = TensorType::new(dtype, shape);
        assert_eq!(ty.shape.numel(), values.len(), "element count of {ty}");
        let mut bytes = Vec::with_capacity(ty.bytes());
        for &v in values {
            match dtype {
                DType::F32 => bytes.extend((v as f32).to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f64(v).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f64(v).to_le_bytes()),
                DType::F64 => bytes.extend(v.to_le_bytes()),
                DType::I8 => bytes.extend((v as i8).to_le_bytes()),
                DType::I16 => bytes.extend((v as i16).to_le_bytes()),
                DType::I32 => bytes.extend((v as i32).to_le_bytes()),
                DType::I64 => bytes.extend((v as i64).to_le_bytes()),
                DType::U8 => bytes.push(v as u8),
                DType::U16 => bytes.extend((v as u16).to_le_bytes()),
                DType::U32 => bytes.extend((v as u32).to_le_bytes()),
                DType::U64 => bytes.extend((v as u64).to_le_bytes()),
                DType::Bool => bytes.push((v != 0.0) as u8),
            }
        }
        Tensor { ty, bytes }
    }

    /// As [`Tensor::from_f64`], exact for 64-bit integers (wrapping into narrower dtypes).
    ///
    /// # Panics
    /// If `values.len()` differs from the shape's element count.
    pub fn from_i64(dtype: DType, shape: impl Into<Shape>, values: &[i64]) -> Self {
        let ty = TensorType::new(dtype, shape);
        assert_eq!(ty.shape.numel(), values.len(), "element count of {ty}");
        match dtype.class() {
            DTypeClass::Float => {
                let shape = ty.shape.clone();
                return Self::from_f64(dtype, shape, &values.iter().map(|&v| v as f64).collect::<Vec<_>>());
            }
            DTypeClass::Bool => return Tensor { ty, bytes: values.iter().map(|&v| (v != 0) as u8).collect() },
            DTypeClass::Int => {}
        }
        let size = dtype.size();
        let bytes = values.iter().flat_map(|v| v.to_le_bytes().into_iter().take(size)).collect();
        Tensor { ty, bytes }
    }

    /// An `f32` tensor.
    ///
    /// # Panics
    /// If `values.len()` differs from the shape's element count.
    pub fn from_f32(shape: impl Into<Shape>, values: &[f32]) -> Self {
        let ty = TensorType::new(DType::F32, shape);
        assert_eq!(ty.shape.numel(), values.len(), "element count of {ty}");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor { ty, bytes }
    }

    pub fn scalar_f32(value: f32) -> Self {
        Self::from_f32(Shape::scalar(), &[value])
    }

    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    pub fn shape(&self) -> &Shape {
        &self.ty.shape
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements, to be overwritten.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// The same elements under another shape of equal element count.
    pub fn reshaped(self, shape: impl Into<Shape>) -> Result<Self, TensorSizeError> {
        Self::from_bytes(TensorType::new(self.ty.dtype, shape), self.bytes)
    }

    /// Every element as `f64` (bool as 0 or 1). 64-bit integers beyond 2^53 round.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        let b = &self.bytes;
        match self.ty.dtype {
            DType::F32 => elements!(b, f32, f64::from),
            DType::F16 => elements!(b, f16, f64::from),
            DType::BF16 => elements!(b, bf16, f64::from),
            DType::F64 => elements!(b, f64, |v| v),
            DType::U64 => elements!(b, u64, |v| v as f64),
            _ => self.to_i64_vec().into_iter().map(|v| v as f64).collect(),
        }
    }

    /// Every element as `f32` (bool as 0 or 1).
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self.ty.dtype {
            DType::F32 => elements!(self.bytes, f32, |v| v),
            _ => self.to_f64_vec().into_iter().map(|v| v as f32).collect(),
        }
    }

    /// Every element as `i64`; floats truncate, u64 beyond `i64::MAX` wraps.
    pub fn to_i64_vec(&self) -> Vec<i64> {
        let b = &self.bytes;
        match self.ty.dtype {
            DType::F32 | DType::F16 | DType::BF16 | DType::F64 => self.to_f64_vec().into_iter().map(|v| v as i64).collect(),
            DType::I8 => elements!(b, i8, i64::from),
            DType::I16 => elements!(b, i16, i64::from),
            DType::I32 => elements!(b, i32, i64::from),
            DType::I64 => elements!(b, i64, |v| v),
            DType::U8 | DType::Bool => b.iter().map(|&v| v as i64).collect(),
            DType::U16 => elements!(b, u16, i64::from),
            DType::U32 => elements!(b, u32, i64::from),
            DType::U64 => elements!(b, u64, |v| v as i64),
        }
    }

    /// The value of a one-element tensor.
    pub fn scalar_f64(&self) -> Option<f64> {
        (self.ty.shape.numel() == 1).then(|| self.to_f64_vec()[0])
    }

    /// The same values as another dtype (floats to integers truncate, anything to bool is `!= 0`).
    pub fn cast(&self, dtype: DType) -> Tensor {
        match (self.ty.dtype.class(), dtype.class()) {
            _ if self.ty.dtype == dtype => self.clone(),
            (DTypeClass::Float, _) | (_, DTypeClass::Float) => Self::from_f64(dtype, self.ty.shape.clone(), &self.to_f64_vec()),
            _ => Self::from_i64(dtype, self.ty.shape.clone(), &self.to_i64_vec()),
        }
    }

    /// As [`Tensor::cast`], where no finite element becomes infinite.
    ///
    /// # Errors
    /// The first element that is too large for `dtype`.
    pub fn cast_finite(&self, dtype: DType) -> Result<Tensor, RangeError> {
        let cast = self.cast(dtype);
        if self.ty.dtype.is_float() && dtype.size() < self.ty.dtype.size() {
            let elements = self.to_f64_vec().into_iter().zip(cast.to_f64_vec());
            if let Some((value, _)) = elements.into_iter().find(|(before, after)| before.is_finite() && !after.is_finite()) {
                return Err(RangeError { value, dtype });
            }
        }
        Ok(cast)
    }
}
