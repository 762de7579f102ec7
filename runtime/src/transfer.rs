//! Copies between host and device outside of steps.

use std::sync::Arc;

use blade_graphics::BufferPiece;
use meganeura_codegen::profile::DeviceProfile;
use meganeura_ir::{Tensor, TensorType};

use crate::buffers::{Arena, Staging, check_host_room};
use crate::device::{Device, DeviceError};
use crate::encoder::Encoder;
use crate::words;

/// Bytes of staging memory that one submission uses, unless a single tensor needs more.
const BATCH_BYTES: u64 = 256 << 20;

/// Host data on its way to the device.
pub(crate) enum Source<'a> {
    /// Already [checked](words::check).
    Tensor(&'a Tensor),
    Words(&'a [u32]),
}

impl Source<'_> {
    fn bytes(&self, profile: &DeviceProfile) -> u64 {
        match self {
            Source::Tensor(tensor) => profile.bytes(tensor.ty()),
            Source::Words(words) => size_of_val(*words) as u64,
        }
    }

    fn write(&self, words: &mut [u32], profile: &DeviceProfile) {
        match self {
            Source::Tensor(tensor) => words::encode(tensor, words, profile),
            Source::Words(source) => words.copy_from_slice(source),
        }
    }
}

/// A range of device memory and where it goes.
#[derive(Clone, Copy)]
pub(crate) struct DeviceCopy {
    pub(crate) from: BufferPiece,
    pub(crate) to: BufferPiece,
    pub(crate) bytes: u64,
}

/// Moves data in as few submissions as staging memory allows, and waits for it.
pub(crate) struct Transfer {
    device: Arc<Device>,
    encoder: Encoder,
}

impl Transfer {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Transfer { device: device.clone(), encoder: Encoder::new(device, "transfer", 1)? })
    }

    /// Fills all buffers of `arena` with zeros.
    pub(crate) fn zero(&mut self, arena: &Arena) -> Result<(), DeviceError> {
        if arena.buffers().is_empty() {
            return Ok(());
        }
        self.encoder.submit(|encoder| {
            let mut pass = encoder.transfer("zero");
            for &buffer in arena.buffers() {
                pass.fill_buffer(buffer.into(), buffer.size(), 0);
            }
        })?;
        self.encoder.wait()
    }

    /// Copies ranges of device memory, each from one place to another, in one submission: what is submitted before or after sees all of
    /// them as they were, or as they are then.
    pub(crate) fn copy(&mut self, copies: &[DeviceCopy]) -> Result<(), DeviceError> {
        if copies.is_empty() {
            return Ok(());
        }
        self.encoder.submit(|encoder| {
            let mut pass = encoder.transfer("copy");
            for copy in copies {
                pass.copy_buffer_to_buffer(copy.from, copy.to, copy.bytes);
            }
        })?;
        self.encoder.wait()
    }

    /// Writes each source to its place. Empty ones are skipped.
    pub(crate) fn upload(&mut self, items: &[(BufferPiece, Source)]) -> Result<(), DeviceError> {
        let profile = self.device.profile();
        let bytes = |source: &Source| source.bytes(profile);
        for batch in batches(items, |(_, source)| bytes(source)) {
            let total: u64 = batch.iter().map(|(_, source)| bytes(source)).sum();
            if total == 0 {
                continue;
            }
            let mut staging = Staging::upload(&self.device, total)?;
            let mut rest = staging.words_mut();
            for (_, source) in batch {
                let (words, tail) = rest.split_at_mut(bytes(source) as usize / 4);
                source.write(words, profile);
                rest = tail;
            }
            self.encoder.submit(|encoder| {
                let mut pass = encoder.transfer("upload");
                let mut offset = 0;
                for (piece, source) in batch.iter().filter(|(_, source)| bytes(source) > 0) {
                    pass.copy_buffer_to_buffer(staging.at(offset), *piece, bytes(source));
                    offset += bytes(source);
                }
            })?;
            self.encoder.wait()?;
        }
        Ok(())
    }

    /// Reads a tensor from each place; an absent place stands for an empty tensor.
    pub(crate) fn download(&mut self, items: &[(Option<BufferPiece>, &TensorType)]) -> Result<Vec<Tensor>, DeviceError> {
        let profile = self.device.profile();
        let bytes = |(piece, ty): &(Option<BufferPiece>, &TensorType)| piece.map_or(0, |_| profile.bytes(ty));
        check_host_room("downloaded tensors", items.iter().map(bytes).sum())?;
        let mut tensors = Vec::with_capacity(items.len());
        for batch in batches(items, bytes) {
            let total: u64 = batch.iter().map(bytes).sum();
            if total == 0 {
                tensors.extend(batch.iter().map(|(_, ty)| words::decode(ty, &[], profile)));
                continue;
            }
            let staging = Staging::download(&self.device, total)?;
            self.encoder.submit(|encoder| {
                let mut pass = encoder.transfer("download");
                let mut offset = 0;
                for item in batch {
                    if let Some(piece) = item.0 {
                        pass.copy_buffer_to_buffer(piece, staging.at(offset), bytes(item));
                        offset += bytes(item);
                    }
                }
            })?;
            self.encoder.wait()?;
            let mut rest = staging.words();
            for item in batch {
                let (words, tail) = rest.split_at(bytes(item) as usize / 4);
                tensors.push(words::decode(item.1, words, profile));
                rest = tail;
            }
        }
        Ok(tensors)
    }
}

/// Cuts `items` where their sum would pass [`BATCH_BYTES`].
fn batches<T>(items: &[T], bytes: impl Fn(&T) -> u64) -> impl Iterator<Item = &[T]> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let mut sum = 0u64;
        let fits = rest.iter().take_while(|item| {
            sum += bytes(item);
            sum <= BATCH_BYTES
        });
        let count = fits.count().max(1);
        let (batch, tail) = rest.split_at_checked(count)?;
        rest = tail;
        Some(batch)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_order_and_respect_the_limit() {
        let sizes = [BATCH_BYTES / 2, BATCH_BYTES / 2, 1, BATCH_BYTES * 3, 5, 0];
        let cut: Vec<&[u64]> = batches(&sizes, |&s| s).collect();
        assert_eq!(cut, [&sizes[..2], &sizes[2..3], &sizes[3..4], &sizes[4..]]);
        assert_eq!(batches(&[], |&s: &u64| s).count(), 0);
    }
}
