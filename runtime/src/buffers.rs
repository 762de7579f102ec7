//! Device memory with an owner.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blade_graphics::{Buffer, BufferDesc, BufferPiece, Memory};
use meganeura_codegen::program::Region;

use crate::device::{Device, DeviceError};
use crate::fault::Site;

/// The buffers of one space, freed on drop. Whoever drops it has waited for the device.
pub(crate) struct Arena {
    device: Arc<Device>,
    buffers: Vec<Buffer>,
    bytes: u64,
}

impl Arena {
    /// Allocates buffers of `sizes` bytes in device memory, contents undefined. `label` names them in errors and debuggers.
    pub(crate) fn new(device: &Arc<Device>, label: &str, sizes: &[u64]) -> Result<Self, DeviceError> {
        let limits = &device.info().limits;
        let limit = limits.buffer_bytes();
        if let Some(&bytes) = sizes.iter().find(|&&bytes| bytes > limit) {
            return Err(DeviceError::BufferTooLarge { label: label.into(), bytes, limit });
        }
        let bytes = sizes.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        if bytes > limits.memory_bytes {
            return Err(DeviceError::MemoryExceeded { label: label.into(), bytes, limit: limits.memory_bytes });
        }
        let mut arena = Arena { device: device.clone(), buffers: Vec::with_capacity(sizes.len()), bytes: 0 };
        for &size in sizes {
            arena.buffers.push(allocate(device, label, size, Memory::Device)?);
            arena.bytes += size;
            device.counters().bytes.fetch_add(size, Ordering::Relaxed);
        }
        Ok(arena)
    }

    /// Where `region` of this space begins.
    pub(crate) fn piece(&self, region: &Region) -> BufferPiece {
        self.buffers[region.buffer as usize].at(region.offset)
    }

    pub(crate) fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.device.counters().bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        free(&self.device, self.buffers.drain(..));
    }
}

/// A buffer that the host sees as 32-bit words.
pub(crate) struct Staging {
    device: Arc<Device>,
    buffer: Buffer,
    words: usize,
}

impl Staging {
    /// For the host to write and the device to read.
    pub(crate) fn upload(device: &Arc<Device>, bytes: u64) -> Result<Self, DeviceError> {
        Self::new(device, "upload", bytes, Memory::Upload)
    }

    /// For the device to write and the host to read.
    pub(crate) fn download(device: &Arc<Device>, bytes: u64) -> Result<Self, DeviceError> {
        Self::new(device, "download", bytes, Memory::Download)
    }

    fn new(device: &Arc<Device>, label: &str, bytes: u64, memory: Memory) -> Result<Self, DeviceError> {
        let bytes = bytes.max(4);
        let limit = device.info().limits.allocation_bytes;
        if bytes > limit {
            return Err(DeviceError::BufferTooLarge { label: label.into(), bytes, limit });
        }
        let buffer = allocate(device, label, bytes, memory)?;
        Ok(Staging { device: device.clone(), buffer, words: bytes as usize / 4 })
    }

    pub(crate) fn at(&self, offset: u64) -> BufferPiece {
        self.buffer.at(offset)
    }

    /// All words. The device must not be writing them.
    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: the mapping is `words` words long, aligned, lives as long as `self`, and any bits are a valid `u32`. The
        // session waits for the device before it reads.
        unsafe { std::slice::from_raw_parts(self.buffer.data().cast(), self.words) }
    }

    /// All words. The device must not be reading them.
    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `words`, and `&mut self` is the only access of the host.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.data().cast(), self.words) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        free(&self.device, [self.buffer]);
    }
}

fn allocate(device: &Device, name: &str, size: u64, memory: Memory) -> Result<Buffer, DeviceError> {
    let size = size.max(4);
    check_room(device, name, size, memory)?;
    device.counters().buffers.fetch_add(1, Ordering::Relaxed);
    device.guard_at(Site::Allocation, |context| context.create_buffer(BufferDesc { name, size, memory }))
}

/// What a software device may allocate beyond a buffer: the allocator's largest chunk, and memory for the driver, which aborts without.
const SOFTWARE_ROOM: u64 = 128 << 20;

/// Refuses what will not fit: blade panics where an allocation fails, and no memory of its context is ever freed then.
fn check_room(device: &Device, label: &str, bytes: u64, memory: Memory) -> Result<(), DeviceError> {
    if device.info().is_software() {
        let refused = |_| DeviceError::NoRoom { label: label.into(), bytes };
        check_host_room(label, bytes.saturating_add(SOFTWARE_ROOM)).map_err(refused)
    } else if memory == Memory::Device {
        match device.memory() {
            Some((usage, budget)) if usage.saturating_add(bytes) > budget => {
                Err(DeviceError::NoRoom { label: label.into(), bytes })
            }
            _ => Ok(()),
        }
    } else {
        check_host_room(label, bytes)
    }
}

/// Whether the process can allocate so much.
pub(crate) fn check_host_room(label: &str, bytes: u64) -> Result<(), DeviceError> {
    let error = || DeviceError::NoRoom { label: label.into(), bytes };
    let size = usize::try_from(bytes).map_err(|_| error())?;
    // An optimiser may remove an allocation that nothing uses.
    std::hint::black_box(Vec::<u8>::new()).try_reserve_exact(std::hint::black_box(size)).map_err(|_| error())
}

fn free(device: &Device, buffers: impl IntoIterator<Item = Buffer>) {
    for buffer in buffers {
        if let Err(error) = device.release(|context| context.destroy_buffer(buffer)) {
            tracing::debug!(%error, "a buffer was leaked with its device");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::device;

    #[test]
    fn sizes_beyond_the_limits_are_refused_before_allocating() {
        let limits = device().info().limits;
        let too_large = Arena::new(device(), "scratch", &[limits.buffer_bytes() + 1]).err();
        assert!(matches!(too_large, Some(DeviceError::BufferTooLarge { label, .. }) if label == "scratch"));
        let buffers = vec![limits.buffer_bytes(); (limits.memory_bytes / limits.buffer_bytes() + 1) as usize];
        assert!(matches!(Arena::new(device(), "scratch", &buffers).err(), Some(DeviceError::MemoryExceeded { .. })));
        assert!(!device().is_dead());
    }

    /// The path on which blade panics, for what [`check_room`] does not foresee: in a process of its own, whose memory is limited.
    #[cfg(target_os = "linux")]
    #[test]
    fn an_allocation_that_fails_in_the_driver_kills_the_device_only() {
        const TEST: &str = "buffers::tests::an_allocation_that_fails_in_the_driver_kills_the_device_only";
        const LIMITED: &str = "MEGANEURA_TEST_LIMITED";
        if !device().info().is_software() {
            return;
        }
        if std::env::var_os(LIMITED).is_none() {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let peak =
                status.lines().find_map(|line| line.strip_prefix("VmPeak:")?.split_whitespace().next()?.parse::<u64>().ok());
            let mut command = std::process::Command::new("sh");
            let limit = peak.unwrap() + (1 << 20);
            command.arg("-c").arg(format!("ulimit -v {limit} && exec \"$0\" --exact {TEST} --nocapture"));
            let output = command.arg(std::env::current_exe().unwrap()).env(LIMITED, "1").output().unwrap();
            assert!(output.status.success(), "{}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
            return;
        }
        for _ in 0..2 {
            let failing = Device::open(&crate::DeviceSelector::Auto).unwrap();
            let small = Arena::new(&failing, "small", &[4096]).unwrap();
            let desc = BufferDesc { name: "large", size: 16 << 30, memory: Memory::Device };
            assert_eq!(failing.guard(|context| context.create_buffer(desc)).err(), Some(DeviceError::OutOfMemory));
            assert!(failing.is_dead());
            drop((small, failing));
        }
        assert!(Arena::new(device(), "small", &[4096]).is_ok());
    }
}
