//! Sparse initializers become dense ones: what reads them cannot tell the difference.

use meganeura_ir::{DType, TensorType};

use crate::error::ImportError;
use crate::limits::{Limit, Limits};
use crate::proto::{GraphProto, SparseTensorProto, TensorProto};
use crate::tensor::{Storage, TensorError, checked_shape};

/// Replaces the sparse initializers of `graph`. Their dense data is kept in `storage`.
pub(crate) fn densify(graph: &mut GraphProto, storage: &mut Storage, limits: &Limits) -> Result<(), ImportError> {
    let mut total = 0u64;
    for sparse in std::mem::take(&mut graph.sparse_initializer) {
        let name = sparse.values.as_ref().map(|v| v.name.clone()).unwrap_or_default();
        let error = |source| ImportError::Tensor { name: name.clone(), source };
        let ty = dense_type(&sparse).map_err(error)?;
        total = total.saturating_add(ty.bytes() as u64);
        limits.check(Limit::DenseBytes, total)?;
        let bytes = dense(&sparse, &ty, storage).map_err(error)?;
        let data_type = sparse.values.map(|v| v.data_type).unwrap_or_default();
        let raw_data = storage.keep(&bytes);
        graph.initializer.push(TensorProto { name, data_type, dims: sparse.dims, raw_data, ..TensorProto::default() });
    }
    Ok(())
}

fn dense_type(sparse: &SparseTensorProto) -> Result<TensorType, TensorError> {
    let values = sparse.values.as_ref().ok_or(TensorError::Sparse("it has no values"))?;
    Ok(TensorType::new(crate::tensor::dtype(values.data_type)?, checked_shape(&sparse.dims)?))
}

/// The elements in row-major order, zero where no value is given.
fn dense(sparse: &SparseTensorProto, ty: &TensorType, storage: &Storage) -> Result<Vec<u8>, TensorError> {
    let (Some(values), Some(indices)) = (&sparse.values, &sparse.indices) else {
        return Err(TensorError::Sparse("its values or indices are missing"));
    };
    let (values, indices) = (storage.read(values)?, storage.read(indices)?);
    if indices.dtype() != DType::I64 {
        return Err(TensorError::Sparse("its indices are no 64-bit integers"));
    }
    let (count, rank) = (values.shape().numel(), ty.shape.rank());
    let positions = indices.to_i64_vec();
    let positions: Option<Vec<usize>> = match (values.shape().rank(), indices.shape().as_ref()) {
        (1, [n]) if *n == count => positions.iter().map(|&p| usize::try_from(p).ok()).collect(),
        (1, [n, axes]) if *n == count && *axes == rank => positions.chunks(rank.max(1)).map(|p| linear(p, &ty.shape)).collect(),
        _ => return Err(TensorError::Sparse("values and indices have shapes that do not fit each other")),
    };
    let positions = positions.ok_or(TensorError::Sparse("an index lies outside the tensor"))?;
    if positions.last().is_some_and(|&last| last >= ty.shape.numel()) {
        return Err(TensorError::Sparse("an index lies outside the tensor"));
    }
    if positions.windows(2).any(|w| w[0] >= w[1]) {
        return Err(TensorError::Sparse("its indices are not in ascending order"));
    }
    let size = ty.dtype.size();
    let mut bytes = vec![0; ty.bytes()];
    for (position, element) in positions.into_iter().zip(values.bytes().chunks_exact(size)) {
        if let Some(place) = bytes.get_mut(position * size..(position + 1) * size) {
            place.copy_from_slice(element);
        }
    }
    Ok(bytes)
}

/// The row-major position of an index.
fn linear(index: &[i64], sizes: &[usize]) -> Option<usize> {
    index.iter().zip(sizes).try_fold(0usize, |position, (&i, &size)| {
        let i = usize::try_from(i).ok().filter(|i| *i < size)?;
        Some(position * size + i)
    })
}
