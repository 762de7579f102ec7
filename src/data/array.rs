//! One named array of a data file, memory-mapped where possible.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use meganeura_ir::{Tensor, TensorSizeError, TensorType};
use memmap2::Mmap;

use super::{DataError, batch_type};

/// A row-major, little-endian array. Cloning shares the data.
#[derive(Clone, Debug)]
pub struct Array {
    ty: TensorType,
    bytes: Bytes,
}

#[derive(Clone, Debug)]
enum Bytes {
    Mapped { map: Arc<Mmap>, range: Range<usize> },
    Owned(Arc<Vec<u8>>),
}

/// Maps a file into memory.
pub(super) fn map(path: &Path) -> Result<Arc<Mmap>, DataError> {
    let io = |source| DataError::Io { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read only. As with every memory-mapped reader, another process must not truncate the file meanwhile.
    Ok(Arc::new(unsafe { Mmap::map(&file) }.map_err(io)?))
}

impl Array {
    /// A range of a mapped file, which must hold exactly the bytes of `ty`.
    pub(super) fn mapped(ty: TensorType, map: Arc<Mmap>, range: Range<usize>) -> Result<Self, TensorSizeError> {
        let found = map.get(range.clone()).map_or(0, <[u8]>::len);
        let expected = ty.shape.checked_numel().and_then(|n| n.checked_mul(ty.dtype.size())).unwrap_or(usize::MAX);
        if found != expected {
            return Err(TensorSizeError { ty, expected, found });
        }
        Ok(Array { ty, bytes: Bytes::Mapped { map, range } })
    }

    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Size of the first axis, or `None` for a scalar.
    pub fn samples(&self) -> Option<usize> {
        self.ty.shape.first().copied()
    }

    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped { map, range } => &map[range.clone()],
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// The whole array.
    pub fn tensor(&self) -> Tensor {
        Tensor::from_bytes(self.ty.clone(), self.bytes().to_vec()).expect("the size was checked when the array was made")
    }

    /// The samples at `indices`, in that order: shape `[indices.len(), ..]`. A scalar is the same for every sample.
    ///
    /// # Panics
    /// If an index is not below [`Array::samples`].
    pub fn rows(&self, indices: &[usize]) -> Tensor {
        let Some(samples) = self.samples() else { return self.tensor() };
        let bytes = self.bytes();
        let row = bytes.len() / samples.max(1);
        let mut out = Vec::with_capacity(row * indices.len());
        for &index in indices {
            assert!(index < samples, "sample {index} of {samples}");
            out.extend_from_slice(&bytes[index * row..][..row]);
        }
        Tensor::from_bytes(batch_type(&self.ty, indices.len()), out).expect("rows of a checked array")
    }

    /// As [`Array::rows`], cast to the dtype of `tensor`, over it; without an allocation where it has that dtype and size already.
    pub fn write_rows(&self, indices: &[usize], tensor: &mut Tensor) {
        let bytes = self.bytes();
        let row = self.samples().map_or(0, |samples| bytes.len() / samples.max(1));
        let found = |&index: &usize| bytes.get(index * row..(index + 1) * row);
        let fits = self.ty.dtype == tensor.dtype() && tensor.bytes().len() == row * indices.len();
        if row == 0 || !fits || indices.iter().any(|index| found(index).is_none()) {
            *tensor = self.rows(indices).cast(tensor.dtype());
            return;
        }
        let rows = indices.iter().filter_map(found);
        tensor.bytes_mut().chunks_exact_mut(row).zip(rows).for_each(|(place, row)| place.copy_from_slice(row));
    }
}

impl From<Tensor> for Array {
    fn from(tensor: Tensor) -> Self {
        Array { ty: tensor.ty().clone(), bytes: Bytes::Owned(Arc::new(tensor.into_bytes())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_gathered_in_the_asked_order() {
        let array = Array::from(Tensor::from_f32([3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
        let rows = array.rows(&[2, 0, 2]);
        assert_eq!(rows, Tensor::from_f32([3, 2], &[4.0, 5.0, 0.0, 1.0, 4.0, 5.0]));
    }

    #[test]
    fn samples_without_elements_are_legal() {
        let array = Array::from(Tensor::from_f32([3, 0], &[]));
        assert_eq!(array.rows(&[1, 1]).shape().to_vec(), [2, 0]);
    }
}
