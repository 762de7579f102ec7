//! Event files that TensorBoard shows: scalars over steps.
//!
//! A file is a sequence of TFRecords, each a length, its checksum, a serialised `Event`, and its checksum. Field numbers are those of
//! TensorFlow's `event.proto` and `summary.proto`; the checksum is CRC-32C, masked as in TensorFlow's `crc32c.h`.

use std::fs::{File, create_dir_all};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::log::LogError;

/// A growing event file.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Starts a new file in `folder`, which is made where it is missing. TensorBoard shows all files of a folder as one run.
    ///
    /// # Errors
    /// The folder or the file cannot be made.
    pub fn create(folder: &Path) -> Result<Self, LogError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("events.out.tfevents.{:010}.{}.{}", now.as_secs(), now.subsec_nanos(), std::process::id());
        let path = folder.join(name);
        let file = create_dir_all(folder).and_then(|()| File::create_new(&path));
        let file = file.map_err(|source| LogError { path: path.clone(), source })?;
        let mut events = EventFile { file, path };
        events.write(&version_event(now.as_secs_f64()))?;
        Ok(events)
    }

    /// Adds values of a step, each under its tag.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<(), LogError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.write(&scalar_event(now.as_secs_f64(), step, values))
    }

    fn write(&mut self, event: &[u8]) -> Result<(), LogError> {
        self.file.write_all(&record(event)).map_err(|source| LogError { path: self.path.clone(), source })
    }
}

const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const DELIMITED: u8 = 2;
const FIXED32: u8 = 5;

fn tag(out: &mut Vec<u8>, field: u8, wire_type: u8) {
    out.push(field << 3 | wire_type);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn delimited(out: &mut Vec<u8>, field: u8, content: &[u8]) {
    tag(out, field, DELIMITED);
    varint(out, content.len() as u64);
    out.extend_from_slice(content);
}

fn event(wall_time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    tag(&mut event, 1, FIXED64);
    event.extend(wall_time.to_le_bytes());
    event
}

fn version_event(wall_time: f64) -> Vec<u8> {
    let mut event = event(wall_time);
    delimited(&mut event, 3, b"brain.Event:2");
    event
}

fn scalar_event(wall_time: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut event = event(wall_time);
    tag(&mut event, 2, VARINT);
    varint(&mut event, step);
    let mut summary = Vec::new();
    for (name, number) in values {
        let mut value = Vec::new();
        delimited(&mut value, 1, name.as_bytes());
        tag(&mut value, 2, FIXED32);
        value.extend((*number as f32).to_le_bytes());
        delimited(&mut summary, 1, &value);
    }
    delimited(&mut event, 5, &summary);
    event
}

fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend_from_slice(event);
    out.extend(masked_crc(event).to_le_bytes());
    out
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    let step =
        |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()));
    !bytes.iter().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of the CRC catalogue, and the masked checksum of an empty record's length.
    #[test]
    fn the_checksum_is_that_of_tensorflow() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    /// Bytes that TensorBoard 2.20's `RecordWriter` writes.
    #[test]
    fn records_are_those_of_tensorboard() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(&record(&version_event(1.5))), VERSION);
        assert_eq!(hex(&record(&scalar_event(2.5, 300, &[("loss", 0.25), ("train/rate", 1e-3)]))), SCALARS);
    }

    const VERSION: &str = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c";
    const SCALARS: &str = "2e00000000000000c5cb57fa09000000000000044010ac022a200a0b0a046c6f7373150000803e0a110a0a747261696e2f72617465156f12833ace223480";

    #[test]
    fn a_file_is_its_records_one_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(&folder.path().join("run")).unwrap();
        events.scalars(7, &[("loss", 0.5)]).unwrap();
        let bytes = std::fs::read(&events.path).unwrap();
        let (mut at, mut records) = (0, 0);
        while at < bytes.len() {
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            let checksum = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            assert_eq!(checksum(at + 8), masked_crc(&bytes[at..at + 8]));
            assert_eq!(checksum(at + 12 + length), masked_crc(&bytes[at + 12..at + 12 + length]));
            at += 16 + length;
            records += 1;
        }
        assert_eq!((at, records), (bytes.len(), 2));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(EventFile::create(&file.path().join("run")).is_err());
    }
}
