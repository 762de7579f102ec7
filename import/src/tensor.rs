//! `TensorProto` to [`Tensor`]: raw data in the mapped file, typed fields, and external files confined to the model's folder.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::proto::TensorProto;
use crate::proto::tensor_proto::{DataLocation, DataType};
use half::{bf16, f16};
use meganeura_ir::{DType, MAX_ELEMENTS, MAX_RANK, Shape, Tensor, TensorType};
use memmap2::Mmap;
use prost::Message;

use crate::error::ImportError;
use crate::wire::Locator;

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

/// The dtype in which values of `stored` are computed: every float is f32.
pub(crate) fn arithmetic(stored: DType) -> DType {
    if stored.is_float() { DType::F32 } else { stored }
}

/// The declared type of a tensor, checked before anything is allocated.
pub(crate) fn tensor_type(proto: &TensorProto) -> Result<TensorType, TensorError> {
    let dtype = dtype(proto.data_type)?;
    let too_large = || TensorError::Shape(proto.dims.clone());
    let sizes: Vec<usize> = proto.dims.iter().map(|&d| usize::try_from(d)).collect::<Result<_, _>>().map_err(|_| too_large())?;
    let shape = Shape::new(sizes);
    match shape.checked_numel() {
        Some(n) if n < MAX_ELEMENTS && shape.rank() <= MAX_RANK => Ok(TensorType::new(dtype, shape)),
        _ => Err(too_large()),
    }
}

/// The model's own bytes, and the files next to it that hold external data.
#[derive(Debug)]
pub(crate) struct Storage {
    /// What locators point into.
    pub main: Bytes,
    /// The folder that external files must stay in.
    folder: PathBuf,
    external: Mutex<HashMap<String, Arc<Mmap>>>,
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
pub(crate) fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is read only. A file that another process truncates meanwhile faults on access, as with every mapped file;
    // this program replaces files by renaming and never writes into one that may be mapped.
    unsafe { Mmap::map(&file) }
}

impl Storage {
    pub fn new(main: Bytes, folder: PathBuf) -> Self {
        Storage { main, folder, external: Mutex::default() }
    }

    /// The elements of `proto`, in the dtype of the file.
    pub fn read(&self, proto: &TensorProto) -> Result<Tensor, TensorError> {
        let ty = tensor_type(proto)?;
        if proto.data_location == Some(DataLocation::External as i32) || !proto.external_data.is_empty() {
            return self.read_external(proto, ty);
        }
        if let Some(locator) = Locator::from_bytes(&proto.raw_data) {
            let bytes = locator.slice(self.main.as_slice()).ok_or(TensorError::OutOfFile)?;
            return from_raw(ty, bytes);
        }
        from_typed(ty, proto)
    }

    fn read_external(&self, proto: &TensorProto, ty: TensorType) -> Result<Tensor, TensorError> {
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
        let len = number("length")?.unwrap_or(ty.bytes() as u64);
        if ty.shape.numel() == 0 && len == 0 {
            return from_raw(ty, &[]);
        }
        let map = self.external(&location)?;
        let bytes = Locator { offset, len }.slice(&map).ok_or(TensorError::ExternalRange { location, offset, len })?;
        from_raw(ty, bytes)
    }

    fn external(&self, location: &str) -> Result<Arc<Mmap>, TensorError> {
        let mut files = self.external.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = files.get(location) {
            return Ok(map.clone());
        }
        let path = confine(&self.folder, location)?;
        let map = map_file(&path).map_err(|source| TensorError::Io { path, source })?;
        let map = Arc::new(map);
        files.insert(location.to_owned(), map.clone());
        Ok(map)
    }
}

/// The file that `location` names in `folder`. Only plain names count: no absolute path, no `..`, no symbolic link on the way.
fn confine(folder: &Path, location: &str) -> Result<PathBuf, TensorError> {
    let refuse = |reason| TensorError::Confinement { location: location.to_owned(), reason };
    if location.is_empty() {
        return Err(refuse("it has no name"));
    }
    let mut path = folder.to_path_buf();
    for component in Path::new(location).components() {
        match component {
            Component::CurDir => continue,
            Component::Normal(name) => path.push(name),
            _ => return Err(refuse("it must stay in the model's folder")),
        }
        let metadata = fs::symlink_metadata(&path).map_err(|source| TensorError::Io { path: path.clone(), source })?;
        if metadata.is_symlink() {
            return Err(refuse("it is reached through a symbolic link"));
        }
    }
    if !path.is_file() {
        return Err(refuse("it is no regular file"));
    }
    Ok(path)
}

/// The name and the value of a serialised `TensorProto`, such as the files of ONNX's test data hold.
///
/// # Errors
/// If the bytes are no tensor of numbers, or its data is elsewhere.
pub fn read_tensor(bytes: &[u8]) -> Result<(String, Tensor), ImportError> {
    let proto = TensorProto::decode(bytes)?;
    let read = || {
        let ty = tensor_type(&proto)?;
        if !proto.external_data.is_empty() {
            return Err(TensorError::OutOfFile);
        }
        if proto.raw_data.is_empty() { from_typed(ty, &proto) } else { from_raw(ty, &proto.raw_data) }
    };
    match read() {
        Ok(tensor) => Ok((proto.name, tensor)),
        Err(source) => Err(ImportError::Tensor { name: proto.name, source }),
    }
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

/// A tensor from the typed field that the standard assigns to its element type.
fn from_typed(ty: TensorType, proto: &TensorProto) -> Result<Tensor, TensorError> {
    fn bytes<T: Copy, const N: usize>(values: &[T], le: impl Fn(T) -> [u8; N]) -> (usize, Vec<u8>) {
        (values.len(), values.iter().flat_map(|&v| le(v)).collect())
    }
    let (found, bytes) = match ty.dtype {
        DType::F32 => bytes(&proto.float_data, f32::to_le_bytes),
        DType::F64 => bytes(&proto.double_data, f64::to_le_bytes),
        DType::F16 => bytes(&proto.int32_data, |v| f16::from_bits(v as u16).to_le_bytes()),
        DType::BF16 => bytes(&proto.int32_data, |v| bf16::from_bits(v as u16).to_le_bytes()),
        DType::I8 => bytes(&proto.int32_data, |v| (v as i8).to_le_bytes()),
        DType::I16 => bytes(&proto.int32_data, |v| (v as i16).to_le_bytes()),
        DType::I32 => bytes(&proto.int32_data, i32::to_le_bytes),
        DType::U8 => bytes(&proto.int32_data, |v| [v as u8]),
        DType::U16 => bytes(&proto.int32_data, |v| (v as u16).to_le_bytes()),
        DType::Bool => bytes(&proto.int32_data, |v| [(v != 0) as u8]),
        DType::I64 => bytes(&proto.int64_data, i64::to_le_bytes),
        DType::U32 => bytes(&proto.uint64_data, |v| (v as u32).to_le_bytes()),
        DType::U64 => bytes(&proto.uint64_data, u64::to_le_bytes),
    };
    let size = |ty: TensorType| TensorError::Size { expected: ty.shape.numel(), found, ty, unit: "elements" };
    Tensor::from_bytes(ty, bytes).map_err(|e| size(e.ty))
}
