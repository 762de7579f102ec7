//! `TensorProto` to [`Tensor`]: raw data in the mapped file, typed fields, and external files.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::proto::TensorProto;
use crate::proto::tensor_proto::{DataLocation, DataType};
use meganeura_ir::{DType, MAX_ELEMENTS, MAX_RANK, RangeError, Shape, Tensor, TensorType};
use memmap2::{Mmap, UncheckedAdvice};
use prost::Message;

use crate::error::ImportError;
use crate::external::ExternalFiles;
use crate::limits::{Limit, LimitError, Limits};
use crate::narrow::{Narrow, narrow};
use crate::wire::{self, Locator};

/// Why the data of a tensor cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    #[error("element type {0} is not supported")]
    DType(String),
    #[error("the shape {0:?} is negative, too large, or of a rank above {MAX_RANK}")]
    Shape(Vec<i64>),
    #[error("{ty} needs {expected} {unit}, the file holds {found}")]
    Size { ty: TensorType, expected: usize, found: usize, unit: &'static str },
    #[error("the artifact holds {found} where the model needs {expected}")]
    Type { found: TensorType, expected: TensorType },
    #[error("its data lies outside the file")]
    OutOfFile,
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error("it holds its data more than once: {0}")]
    TwoEncodings(&'static str),
    #[error("it is stored in segments, which is not supported")]
    Segment,
    #[error("element {value} of a tensor of {dtype} is outside the range of its type")]
    Element { value: i64, dtype: DType },
    #[error("the sparse tensor is malformed: {0}")]
    Sparse(&'static str),
    #[error("it is refused: {0}")]
    Limit(#[from] LimitError),
    #[error("the external file {location:?} is refused: {reason}")]
    Confinement { location: String, reason: &'static str },
    #[error("the external file {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("external data entry {key} = {value:?} is no number")]
    ExternalEntry { key: String, value: String },
    #[error("bytes {offset}..{offset}+{len} lie outside the external file {location:?}")]
    ExternalRange { location: String, offset: u64, len: u64 },
    #[error("the artifact holds no data for it")]
    NotInArtifact,
}

/// Element types that tensors may have, by `TensorProto.DataType`.
const DTYPES: [(DataType, DType); 13] = [
    (DataType::Float, DType::F32),
    (DataType::Float16, DType::F16),
    (DataType::Bfloat16, DType::BF16),
    (DataType::Double, DType::F64),
    (DataType::Int8, DType::I8),
    (DataType::Int16, DType::I16),
    (DataType::Int32, DType::I32),
    (DataType::Int64, DType::I64),
    (DataType::Uint8, DType::U8),
    (DataType::Uint16, DType::U16),
    (DataType::Uint32, DType::U32),
    (DataType::Uint64, DType::U64),
    (DataType::Bool, DType::Bool),
];

/// The dtype of a `TensorProto.DataType` number.
pub(crate) fn dtype(data_type: i32) -> Result<DType, TensorError> {
    let named = DataType::try_from(data_type);
    DTYPES.iter().find(|(d, _)| Ok(*d) == named).map(|(_, dtype)| *dtype).ok_or_else(|| {
        TensorError::DType(named.map_or_else(|_| format!("number {data_type}"), |d| format!("{d:?}").to_lowercase()))
    })
}

/// As [`dtype`], with narrow element types as the dtype that holds their values.
pub(crate) fn held_dtype(data_type: i32) -> Result<DType, TensorError> {
    narrow(data_type).map_or_else(|| dtype(data_type), |narrow| Ok(narrow.held()))
}

/// The dtype in which values of `stored` are computed: every float is f32.
pub(crate) fn arithmetic(stored: DType) -> DType {
    if stored.is_float() { DType::F32 } else { stored }
}

/// The declared type of a tensor, checked before anything is allocated.
pub(crate) fn tensor_type(proto: &TensorProto) -> Result<TensorType, TensorError> {
    Ok(TensorType::new(held_dtype(proto.data_type)?, checked_shape(&proto.dims)?))
}

/// A shape that a tensor can have.
pub(crate) fn checked_shape(dims: &[i64]) -> Result<Shape, TensorError> {
    let refuse = || TensorError::Shape(dims.iter().copied().take(MAX_RANK + 1).collect());
    if dims.len() > MAX_RANK {
        return Err(refuse());
    }
    let sizes: Vec<usize> = dims.iter().map(|&d| usize::try_from(d)).collect::<Result<_, _>>().map_err(|_| refuse())?;
    let shape = Shape::new(sizes);
    match shape.checked_numel() {
        Some(n) if n < MAX_ELEMENTS && shape.iter().all(|&d| d < MAX_ELEMENTS) => Ok(shape),
        _ => Err(refuse()),
    }
}

/// The model's own bytes, and the files next to it that hold external data.
#[derive(Debug)]
pub(crate) struct Storage {
    /// What locators point into.
    main: Bytes,
    /// Data that the import made: locators into it begin where `main` ends.
    kept: Vec<u8>,
    kept_tensors: u64,
    external: ExternalFiles,
    limits: Limits,
}

/// Bytes in memory or in a mapped file.
#[derive(Debug)]
pub(crate) enum Bytes {
    Owned(Vec<u8>),
    Mapped(Mmap),
}

impl Bytes {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped(map) => map,
        }
    }
}

/// Maps a whole file. An empty file maps to nothing.
pub(crate) fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read only. A file that another process truncates meanwhile faults on access, as with every mapped file;
    // this program replaces files by renaming and never writes into one that may be mapped.
    unsafe { Mmap::map(file) }
}

/// Lets go of the memory that `bytes` of a mapped file take. Who reads them again gets them from the file again.
pub(crate) fn release(map: &Mmap, bytes: &[u8]) {
    #[cfg(unix)]
    if let Some(offset) = bytes.as_ptr().addr().checked_sub(map.as_ptr().addr())
        && offset.checked_add(bytes.len()).is_some_and(|end| end <= map.len())
        && !bytes.is_empty()
    {
        // SAFETY: the range lies in the map, which is a read-only view of a file: pages that are dropped come back with the
        // same content.
        let advised = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes.len()) };
        // Advice that is not taken costs memory and nothing else.
        drop(advised);
    }
}

/// Where the elements of a tensor are.
enum Source<'a> {
    Located(&'a [u8]),
    External(Arc<Mmap>, Range<u64>),
    Typed,
}

impl Storage {
    pub fn new(main: Bytes, folder: PathBuf, limits: &Limits) -> Self {
        let external = ExternalFiles::new(folder, limits.clone());
        Storage { main, kept: Vec::new(), kept_tensors: 0, external, limits: limits.clone() }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The serialised model.
    pub fn model(&self) -> &[u8] {
        self.main.as_slice()
    }

    /// Lets go of the memory that reading the file took.
    pub fn release(&self) {
        if let Bytes::Mapped(map) = &self.main {
            release(map, map);
        }
    }

    /// The bytes that a locator points to.
    pub fn located(&self, range: Range<u64>) -> Option<&[u8]> {
        let end = self.main.as_slice().len() as u64;
        match range.start.checked_sub(end) {
            Some(start) if !self.kept.is_empty() => wire::slice(&self.kept, start..range.end.checked_sub(end)?),
            _ => wire::slice(self.main.as_slice(), range),
        }
    }

    /// Keeps data that the import made, and returns what stands for it in `raw_data`.
    pub fn keep(&mut self, data: &[u8]) -> Vec<u8> {
        let start = (self.main.as_slice().len() + self.kept.len()) as u64;
        self.kept.extend(data);
        self.kept_tensors += 1;
        // No tensor of the file has this ordinal.
        let ordinal = u64::MAX - self.kept_tensors;
        Locator { ordinal, range: Some(start..start + data.len() as u64) }.to_bytes()
    }

    /// Checks that a tensor is within the limits and that its data is there and has the right size. Reads none of it.
    pub fn check(&self, proto: &TensorProto) -> Result<TensorType, TensorError> {
        let ty = tensor_type(proto)?;
        self.limits.check(Limit::Rank, ty.shape.rank() as u64)?;
        self.limits.check(Limit::Elements, ty.shape.numel() as u64)?;
        match packed(proto)? {
            Some((_, packed)) => self.source(&packed, &tensor_type(&packed)?)?,
            None => self.source(proto, &ty)?,
        };
        Ok(ty)
    }

    /// The elements of `proto`, in the dtype of the file.
    pub fn read(&self, proto: &TensorProto) -> Result<Tensor, TensorError> {
        let ty = self.check(proto)?;
        if let Some((narrow, packed)) = packed(proto)? {
            return Ok(narrow.unpack(ty.shape, self.read(&packed)?.bytes()));
        }
        match self.source(proto, &ty)? {
            Source::Typed => from_typed(ty, proto),
            Source::Located(bytes) => {
                let tensor = from_raw(ty, bytes);
                if let Bytes::Mapped(map) = &self.main {
                    release(map, bytes);
                }
                tensor
            }
            Source::External(map, range) => {
                let bytes = wire::slice(&map, range).ok_or(TensorError::OutOfFile)?;
                let tensor = from_raw(ty, bytes);
                release(&map, bytes);
                tensor
            }
        }
    }

    /// What `look` makes of the elements as they lie in a file: little-endian. `None` where they do not lie so.
    pub fn peek<T>(&self, proto: &TensorProto, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let ty = self.check(proto).ok().filter(|_| narrow(proto.data_type).is_none())?;
        match self.source(proto, &ty).ok()? {
            Source::Typed => None,
            Source::Located(bytes) => Some(look(bytes)),
            Source::External(map, range) => wire::slice(&map, range).map(look),
        }
    }

    fn source(&self, proto: &TensorProto, ty: &TensorType) -> Result<Source<'_>, TensorError> {
        if proto.segment.is_some() {
            return Err(TensorError::Segment);
        }
        let typed = typed_elements(proto);
        let range = Locator::from_bytes(&proto.raw_data).and_then(|locator| locator.range);
        let internal = typed > 0 || range.is_some();
        let is_external = proto.data_location == Some(DataLocation::External as i32);
        if is_external || !internal && !proto.external_data.is_empty() {
            if internal {
                return Err(TensorError::TwoEncodings("in the file and as external data"));
            }
            return self.external_source(proto, ty);
        }
        let size = |found, expected, unit| TensorError::Size { ty: ty.clone(), expected, found, unit };
        match range {
            Some(_) if typed > 0 => Err(TensorError::TwoEncodings("in raw_data and in a typed field")),
            Some(range) => {
                let bytes = self.located(range).ok_or(TensorError::OutOfFile)?;
                let (found, expected) = (bytes.len(), ty.bytes());
                if found == expected { Ok(Source::Located(bytes)) } else { Err(size(found, expected, "bytes")) }
            }
            None => {
                let (found, expected) = (typed_field(ty.dtype, proto), ty.shape.numel());
                if found == expected && typed == found { Ok(Source::Typed) } else { Err(size(found, expected, "elements")) }
            }
        }
    }

    fn external_source(&self, proto: &TensorProto, ty: &TensorType) -> Result<Source<'_>, TensorError> {
        let entry = |key: &str| proto.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
        let number = |key: &str| match entry(key) {
            None => Ok(None),
            Some(value) => value
                .parse::<u64>()
                .map(Some)
                .map_err(|_| TensorError::ExternalEntry { key: key.to_owned(), value: value.to_owned() }),
        };
        let location = entry("location").unwrap_or_default().to_owned();
        let offset = number("offset")?.unwrap_or(0);
        let expected = ty.bytes();
        let len = number("length")?.unwrap_or(expected as u64);
        if len != expected as u64 {
            let found = usize::try_from(len).unwrap_or(usize::MAX);
            return Err(TensorError::Size { ty: ty.clone(), expected, found, unit: "bytes" });
        }
        if len == 0 {
            return Ok(Source::Located(&[]));
        }
        let map = self.external.map(&location)?;
        let range = offset..offset.saturating_add(len);
        if wire::slice(&map, range.clone()).is_none() {
            return Err(TensorError::ExternalRange { location, offset, len });
        }
        Ok(Source::External(map, range))
    }
}

/// The name and the value of a serialised `TensorProto`, such as the files of ONNX's test data hold.
///
/// # Errors
/// If the bytes are no tensor of numbers, or its data is elsewhere.
pub fn read_tensor(bytes: &[u8]) -> Result<(String, Tensor), ImportError> {
    let proto = TensorProto::decode(bytes)?;
    fn read(proto: &TensorProto) -> Result<Tensor, TensorError> {
        let ty = tensor_type(proto)?;
        if let Some((narrow, packed)) = packed(proto)? {
            return Ok(narrow.unpack(ty.shape, read(&packed)?.bytes()));
        }
        if !proto.external_data.is_empty() {
            return Err(TensorError::OutOfFile);
        }
        if proto.raw_data.is_empty() { from_typed(ty, proto) } else { from_raw(ty, &proto.raw_data) }
    }
    match read(&proto) {
        Ok(tensor) => Ok((proto.name, tensor)),
        Err(source) => Err(ImportError::Tensor { name: proto.name, source }),
    }
}

/// A narrow tensor as the bytes that files hold.
pub(crate) fn packed(proto: &TensorProto) -> Result<Option<(Narrow, TensorProto)>, TensorError> {
    let Some(narrow) = narrow(proto.data_type) else { return Ok(None) };
    let packed = narrow.packed(proto).ok_or_else(|| TensorError::Shape(proto.dims.clone()))?;
    Ok(Some((narrow, packed)))
}

/// A tensor from little-endian bytes.
pub(crate) fn from_raw(ty: TensorType, bytes: &[u8]) -> Result<Tensor, TensorError> {
    let size = |ty| TensorError::Size { expected: TensorType::bytes(&ty), found: bytes.len(), ty, unit: "bytes" };
    if bytes.len() != ty.bytes() {
        return Err(size(ty));
    }
    let bytes = match ty.dtype {
        DType::Bool => bytes.iter().map(|&b| (b != 0) as u8).collect(),
        _ => bytes.to_vec(),
    };
    Tensor::from_bytes(ty, bytes).map_err(|e| size(e.ty))
}

/// Elements in all typed fields.
fn typed_elements(proto: &TensorProto) -> usize {
    let integers = proto.int32_data.len() + proto.int64_data.len() + proto.uint64_data.len();
    proto.float_data.len() + proto.double_data.len() + proto.string_data.len() + integers
}

/// Elements in the typed field that the standard assigns to an element type.
fn typed_field(dtype: DType, proto: &TensorProto) -> usize {
    match dtype {
        DType::F32 => proto.float_data.len(),
        DType::F64 => proto.double_data.len(),
        DType::I64 => proto.int64_data.len(),
        DType::U32 | DType::U64 => proto.uint64_data.len(),
        DType::F16 | DType::BF16 | DType::I8 | DType::I16 | DType::I32 | DType::U8 | DType::U16 | DType::Bool => {
            proto.int32_data.len()
        }
    }
}

/// A tensor from the typed field of its element type.
fn from_typed(ty: TensorType, proto: &TensorProto) -> Result<Tensor, TensorError> {
    /// Half floats travel as their bits, and some writers extend the sign.
    const BITS: std::ops::RangeInclusive<i64> = i16::MIN as i64..=u16::MAX as i64;
    fn bytes<T: Copy, const N: usize>(values: &[T], le: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|&v| le(v)).collect()
    }
    let range = match ty.dtype {
        DType::F32 => return wrap(ty, bytes(&proto.float_data, f32::to_le_bytes)),
        DType::F64 => return wrap(ty, bytes(&proto.double_data, f64::to_le_bytes)),
        DType::I64 => return wrap(ty, bytes(&proto.int64_data, i64::to_le_bytes)),
        DType::U64 => return wrap(ty, bytes(&proto.uint64_data, u64::to_le_bytes)),
        DType::I32 => return wrap(ty, bytes(&proto.int32_data, i32::to_le_bytes)),
        DType::Bool => return wrap(ty, bytes(&proto.int32_data, |v| [u8::from(v != 0)])),
        DType::F16 | DType::BF16 => BITS,
        DType::U32 => 0..=u32::MAX.into(),
        DType::I8 => i8::MIN.into()..=i8::MAX.into(),
        DType::I16 => i16::MIN.into()..=i16::MAX.into(),
        DType::U8 => 0..=u8::MAX.into(),
        DType::U16 => 0..=u16::MAX.into(),
    };
    let (dtype, size) = (ty.dtype, ty.dtype.size());
    let narrow = proto.int32_data.iter().map(|&v| i64::from(v));
    let unsigned = proto.uint64_data.iter().map(|&v| i64::try_from(v).unwrap_or(i64::MAX));
    let mut bytes = Vec::with_capacity(ty.bytes());
    for value in narrow.chain(unsigned) {
        if !range.contains(&value) {
            return Err(TensorError::Element { value, dtype });
        }
        bytes.extend(value.to_le_bytes().iter().take(size));
    }
    wrap(ty, bytes)
}

fn wrap(ty: TensorType, bytes: Vec<u8>) -> Result<Tensor, TensorError> {
    Tensor::from_bytes(ty, bytes).map_err(|e| TensorError::Size { ty: e.ty, expected: e.expected, found: e.found, unit: "bytes" })
}
