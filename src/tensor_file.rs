//! Plain safetensors files: named tensors and a map of strings.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::Path;

use meganeura_ir::{DType, Tensor, TensorType};
use meganeura_runtime::{CheckpointError, atomic_write};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};

/// Element types and their names in a file.
const DTYPES: [(Dtype, DType); 13] = [
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
    (Dtype::F64, DType::F64),
    (Dtype::I8, DType::I8),
    (Dtype::I16, DType::I16),
    (Dtype::I32, DType::I32),
    (Dtype::I64, DType::I64),
    (Dtype::U8, DType::U8),
    (Dtype::U16, DType::U16),
    (Dtype::U32, DType::U32),
    (Dtype::U64, DType::U64),
    (Dtype::BOOL, DType::Bool),
];

/// The graph's element type for one of a file, if there is one.
pub(crate) fn ir_dtype(dtype: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(file, _)| *file == dtype).map(|(_, ir)| *ir)
}

/// The file's element type for one of the graph. Every one has one.
fn file_dtype(dtype: DType) -> Dtype {
    DTYPES.iter().find(|(_, ir)| *ir == dtype).map_or(Dtype::F32, |(file, _)| *file)
}

/// Writes a safetensors file in one step: after a crash the file is whole, or what it was before.
///
/// # Errors
/// The file cannot be written; what was at `path` is untouched.
pub fn write_tensors(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: HashMap<String, String>,
) -> Result<(), CheckpointError> {
    let mut offset = 0;
    let mut info = |tensor: &Tensor| {
        let start = offset;
        offset += tensor.bytes().len();
        let (dtype, shape) = (file_dtype(tensor.dtype()), tensor.shape().to_vec());
        TensorInfo { dtype, shape, data_offsets: (start, offset) }
    };
    let infos = tensors.iter().map(|(name, tensor)| (name.clone(), info(tensor))).collect();
    atomic_write(path, |file| {
        let metadata = Metadata::new(Some(metadata), infos).map_err(io::Error::other)?;
        let mut header = serde_json::to_vec(&metadata)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut out = io::BufWriter::new(file);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        tensors.values().try_for_each(|tensor| out.write_all(tensor.bytes()))?;
        out.flush()
    })
}

/// Named tensors, and a map of strings.
pub(crate) type TensorFile = (BTreeMap<String, Tensor>, HashMap<String, String>);

/// The content of a safetensors file. The error says what is wrong with the file.
pub(crate) fn read_tensors(bytes: &[u8]) -> Result<TensorFile, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.tensors() {
        let dtype = ir_dtype(view.dtype()).ok_or_else(|| format!("tensor {name:?} has type {:?}", view.dtype()))?;
        let tensor = Tensor::from_bytes(TensorType::new(dtype, view.shape()), view.data().to_vec()).map_err(|e| e.to_string())?;
        tensors.insert(name, tensor);
    }
    Ok((tensors, metadata.metadata().clone().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_reader_finds_names_shapes_dtypes_and_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let tensors: BTreeMap<String, Tensor> = DType::ALL
            .iter()
            .map(|&d| (format!("t/{d}"), Tensor::from_i64(d, [1, 3], &[0, 1, 1])))
            .chain([("empty".to_string(), Tensor::from_f32([0, 2], &[]))])
            .collect();
        write_tensors(&path, &tensors, HashMap::from([("step".into(), "3".into())])).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), tensors.len());
        for (name, tensor) in &tensors {
            let view = file.tensor(name).unwrap();
            assert_eq!(ir_dtype(view.dtype()), Some(tensor.dtype()));
            assert_eq!((view.shape(), view.data()), (&tensor.shape()[..], tensor.bytes()));
        }
        let (read, metadata) = read_tensors(&bytes).unwrap();
        assert_eq!((read, metadata["step"].as_str()), (tensors, "3"));
    }
}
