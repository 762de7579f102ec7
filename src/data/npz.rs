//! NPZ: a ZIP archive of NPY arrays. Stored entries stay in the mapped file, compressed ones are inflated.

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use meganeura_ir::{DType, Tensor};
use memmap2::Mmap;
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::{Array, DataError, npy};

/// Whether the bytes start as a ZIP archive does, with or without entries.
pub(super) fn recognises(bytes: &[u8]) -> bool {
    bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(b"PK\x05\x06")
}

/// Every array of the archive, under its name without `.npy`.
pub(super) fn read(path: &Path, map: Arc<Mmap>) -> Result<BTreeMap<String, Array>, DataError> {
    let damaged = |e: ZipError| DataError::Damaged { path: path.to_path_buf(), reason: e.to_string() };
    let mut archive = ZipArchive::new(Cursor::new(&map[..])).map_err(damaged)?;
    let mut arrays = BTreeMap::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(damaged)?;
        let Some(name) = entry.name().strip_suffix(".npy").map(String::from) else { continue };
        let wrong = |reason| DataError::Array { path: path.to_path_buf(), array: name.clone(), reason };
        let array = if entry.compression() == CompressionMethod::Stored {
            let start = entry.data_start() as usize;
            let end = start.saturating_add(entry.size() as usize);
            stored(&map, start, end).map_err(wrong)?
        } else {
            inflated(&mut entry).map_err(wrong)?
        };
        arrays.insert(name, array);
    }
    Ok(arrays)
}

fn stored(map: &Arc<Mmap>, start: usize, end: usize) -> Result<Array, String> {
    let bytes = map.get(start..end).ok_or("lies outside the file")?;
    let header = npy::parse_header(bytes)?;
    let data = start + header.data..end;
    if header.big_endian || header.fortran {
        return npy::to_tensor(&header, map[data].to_vec()).map(Array::from);
    }
    Array::mapped(header.ty, map.clone(), data).map_err(|e| format!("is incomplete: {e}"))
}

fn inflated(entry: &mut impl Read) -> Result<Array, String> {
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes).map_err(|e| format!("cannot be decompressed: {e}"))?;
    let header = npy::parse_header(&bytes)?;
    bytes.drain(..header.data);
    npy::to_tensor(&header, bytes).map(Array::from)
}

/// Writes arrays as an uncompressed NPZ, as `numpy.savez` does. NumPy has no bfloat16: such tensors are written as float32.
pub fn write_npz<'a>(writer: impl Write + Seek, arrays: impl IntoIterator<Item = (&'a str, &'a Tensor)>) -> std::io::Result<()> {
    let mut zip = ZipWriter::new(writer);
    for (name, tensor) in arrays {
        let widened = (tensor.dtype() == DType::BF16).then(|| tensor.cast(DType::F32));
        let tensor = widened.as_ref().unwrap_or(tensor);
        let large = tensor.bytes().len() >= u32::MAX as usize / 2;
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(large);
        zip.start_file(format!("{name}.npy"), options).map_err(std::io::Error::other)?;
        zip.write_all(&npy::header(tensor.ty()))?;
        zip.write_all(tensor.bytes())?;
    }
    zip.finish().map_err(std::io::Error::other)?.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Dataset;

    fn archive(method: CompressionMethod) -> Vec<u8> {
        let tensor = Tensor::from_f32([2, 3], &[1.0, -2.0, 3.5, 0.0, 4.0, 5.0]);
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        zip.start_file("in/x.npy", SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(&npy::header(tensor.ty())).unwrap();
        zip.write_all(tensor.bytes()).unwrap();
        zip.finish().unwrap().into_inner()
    }

    fn open(bytes: &[u8]) -> Result<Dataset, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.npz");
        std::fs::write(&path, bytes).unwrap();
        Dataset::open(path)
    }

    #[test]
    fn stored_and_compressed_arrays_read_alike() {
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let data = open(&archive(method)).unwrap();
            let tensor = data.array("in/x").unwrap().tensor();
            assert_eq!(tensor, Tensor::from_f32([2, 3], &[1.0, -2.0, 3.5, 0.0, 4.0, 5.0]));
        }
    }

    #[test]
    fn a_truncated_archive_is_an_error_at_every_length() {
        let bytes = archive(CompressionMethod::Stored);
        for end in 0..bytes.len() {
            assert!(open(&bytes[..end]).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn flipped_bytes_never_panic() {
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let bytes = archive(method);
            for at in 0..bytes.len() {
                let mut flipped = bytes.clone();
                flipped[at] ^= 0xff;
                if let Ok(data) = open(&flipped) {
                    data.arrays().for_each(|(_, array)| drop(array.tensor()));
                }
            }
        }
    }

    #[test]
    fn another_reader_agrees_with_what_is_written() {
        let tensor = Tensor::from_f32([2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let half = tensor.cast(DType::BF16);
        let mut bytes = Cursor::new(Vec::new());
        write_npz(&mut bytes, [("a", &tensor), ("out/b", &half)]).unwrap();
        let mut reader = ndarray_npy::NpzReader::new(bytes).unwrap();
        for name in ["a", "out/b"] {
            let array: ndarray::ArrayD<f32> = reader.by_name(name).unwrap();
            assert_eq!(array.iter().copied().collect::<Vec<_>>(), [1.0, 2.0, 3.0, 4.0]);
        }
    }
}
