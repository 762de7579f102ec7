//! Safetensors files as data sets.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use meganeura_ir::TensorType;
use memmap2::Mmap;
use safetensors::SafeTensors;

use super::{Array, DataError};
use crate::tensor_file::ir_dtype;

/// Whether the bytes start as a safetensors file does: the length of a header, then the header's opening brace.
pub(super) fn recognises(bytes: &[u8]) -> bool {
    bytes.get(8) == Some(&b'{')
}

/// Every tensor of the file.
pub(super) fn read(path: &Path, map: Arc<Mmap>) -> Result<BTreeMap<String, Array>, DataError> {
    let damaged = |reason: String| DataError::Damaged { path: path.to_path_buf(), reason };
    let file = SafeTensors::deserialize(&map).map_err(|e| damaged(e.to_string()))?;
    let mut arrays = BTreeMap::new();
    for (name, view) in file.tensors() {
        let wrong = |reason| DataError::Array { path: path.to_path_buf(), array: name.clone(), reason };
        let dtype = ir_dtype(view.dtype()).ok_or_else(|| wrong(format!("has elements of type {:?}", view.dtype())))?;
        let start = view.data().as_ptr() as usize - map.as_ptr() as usize;
        let range = start..start + view.data().len();
        let array = Array::mapped(TensorType::new(dtype, view.shape()), map.clone(), range).map_err(|e| wrong(e.to_string()))?;
        arrays.insert(name, array);
    }
    Ok(arrays)
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::data::Dataset;

    fn file() -> Vec<u8> {
        let bytes: Vec<u8> = [1i64, -2, 3].iter().flat_map(|v| v.to_le_bytes()).collect();
        let view = TensorView::new(Dtype::I64, vec![3], &bytes).unwrap();
        safetensors::serialize([("y", view)], None).unwrap()
    }

    fn open(bytes: &[u8]) -> Result<Dataset, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Dataset::open(path)
    }

    #[test]
    fn tensors_are_read_in_place() {
        let data = open(&file()).unwrap();
        assert_eq!(data.array("y").unwrap().tensor().to_i64_vec(), [1, -2, 3]);
        assert_eq!(data.array("y").unwrap().rows(&[1]).to_i64_vec(), [-2]);
    }

    #[test]
    fn a_truncated_file_is_an_error_at_every_length() {
        let bytes = file();
        for end in 0..bytes.len() {
            assert!(open(&bytes[..end]).is_err(), "{end} bytes");
        }
    }
}
