//! Records of equal size, one per sample: in memory up to a limit, the rest in a temporary file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// Records by the index of their sample.
#[derive(Debug)]
pub(crate) struct RecordCache {
    record: usize,
    present: Vec<bool>,
    memory: Vec<u8>,
    /// Holds the records of the samples that `memory` has no room for. Its file has no name, so it goes with the process.
    file: Option<File>,
}

impl RecordCache {
    /// Room for `samples` records of `record` bytes, at most `memory` bytes of it in memory.
    ///
    /// # Errors
    /// A temporary file is needed and cannot be made.
    pub fn new(samples: usize, record: usize, memory: u64) -> io::Result<Self> {
        let fit = usize::try_from(memory).unwrap_or(usize::MAX) / record.max(1);
        let in_memory = samples.min(fit);
        let file = if in_memory < samples { Some(tempfile::tempfile()?) } else { None };
        Ok(RecordCache { record, present: vec![false; samples], memory: vec![0; in_memory * record], file })
    }

    /// Whether the record of a sample is there.
    pub fn contains(&self, sample: usize) -> bool {
        self.present.get(sample).copied().unwrap_or(false)
    }

    /// Bytes that are in a file once all records are there.
    pub fn bytes_in_file(&self) -> u64 {
        self.present.len() as u64 * self.record as u64 - self.memory.len() as u64
    }

    /// Appends the record of a sample to `out`.
    ///
    /// # Errors
    /// The temporary file cannot be read, or the record is not there.
    pub fn read(&mut self, sample: usize, out: &mut Vec<u8>) -> io::Result<()> {
        if !self.contains(sample) {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("no record of sample {sample}")));
        }
        let (start, record) = (sample * self.record, self.record);
        if let Some(found) = self.memory.get(start..start + record) {
            out.extend_from_slice(found);
            return Ok(());
        }
        let file = self.seek(start)?;
        let old = out.len();
        out.resize(old + record, 0);
        file.read_exact(&mut out[old..])
    }

    /// Keeps the record of a sample.
    ///
    /// # Errors
    /// The temporary file cannot be written.
    pub fn write(&mut self, sample: usize, bytes: &[u8]) -> io::Result<()> {
        let start = sample * self.record;
        match self.memory.get_mut(start..start + bytes.len()) {
            Some(place) => place.copy_from_slice(bytes),
            None => self.seek(start)?.write_all(bytes)?,
        }
        self.present[sample] = true;
        Ok(())
    }

    /// The file, at the record that begins at byte `start` of all records.
    fn seek(&mut self, start: usize) -> io::Result<&mut File> {
        let offset = start.saturating_sub(self.memory.len()) as u64;
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_from_memory_and_from_the_file() {
        for memory in [0, 7, 8, 1000] {
            let mut cache = RecordCache::new(4, 4, memory).unwrap();
            assert_eq!(cache.bytes_in_file(), 16 - (memory / 4 * 4).min(16));
            for sample in [2, 0, 3] {
                cache.write(sample, &[sample as u8; 4]).unwrap();
            }
            let mut out = Vec::new();
            [3, 0, 2].iter().for_each(|&sample| cache.read(sample, &mut out).unwrap());
            assert_eq!(out, [3, 3, 3, 3, 0, 0, 0, 0, 2, 2, 2, 2]);
            assert!(!cache.contains(1) && cache.read(1, &mut out).is_err());
        }
    }
}
