//! A command encoder whose command buffers are reused only after the device is done with them.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use blade_graphics::{CommandEncoder, CommandEncoderDesc, Context, SyncPoint};

use crate::device::{Device, DeviceError};
use crate::fault::Site;

/// Records submissions with manual barriers: a batch is one or more submissions, and a new one begins after [`Encoder::wait`].
pub(crate) struct Encoder {
    device: Arc<Device>,
    raw: ManuallyDrop<CommandEncoder>,
    /// The last submission not yet waited for. The queue is in order, so it stands for all before it.
    pending: Option<SyncPoint>,
}

// SAFETY: a `CommandEncoder` is not `Send` for the pointers to its persistently mapped buffers, which it owns and touches only
// through `&mut self`. Vulkan and Metal let any thread use these objects, one at a time.
unsafe impl Send for Encoder {}

impl Encoder {
    /// An encoder for batches of at most `submissions` submissions.
    pub(crate) fn new(device: &Arc<Device>, name: &str, submissions: usize) -> Result<Self, DeviceError> {
        let desc = CommandEncoderDesc { name, buffer_count: submissions.max(1) as u32, manual_barriers: true };
        let raw = device.guard(|context| context.create_command_encoder(desc))?;
        Ok(Encoder { device: device.clone(), raw: ManuallyDrop::new(raw), pending: None })
    }

    /// Records one submission with `record` and hands it to the queue.
    pub(crate) fn submit(&mut self, record: impl FnOnce(&mut CommandEncoder)) -> Result<(), DeviceError> {
        let raw = &mut *self.raw;
        let sync = self.device.guard_at(Site::Submission, |context: &Context| {
            raw.start();
            record(raw);
            context.submit(raw)
        })?;
        self.pending = Some(sync);
        Ok(())
    }

    /// Waits until the device has finished all that was submitted.
    pub(crate) fn wait(&mut self) -> Result<(), DeviceError> {
        let Some(sync) = &self.pending else { return Ok(()) };
        let failed = match self.device.guard_at(Site::Wait, |context| context.wait_for(sync, u32::MAX))? {
            Ok(true) => {
                self.pending = None;
                return Ok(());
            }
            Ok(false) => DeviceError::Failed("waiting for the device ended early".into()),
            Err(error) => error.into(),
        };
        self.device.kill(&failed);
        Err(failed)
    }

    /// The time of each pass of the last submission of an encoder made for one. Empty where the device has no timer.
    pub(crate) fn timings(&mut self) -> Result<blade_graphics::Timings, DeviceError> {
        self.wait()?;
        let mut timings = Vec::new();
        self.submit(|raw| timings.clone_from(raw.timings()))?;
        self.wait()?;
        Ok(timings)
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        if let Some(sync) = self.pending.take() {
            match self.device.release(|context| context.wait_for(&sync, u32::MAX)) {
                Ok(Ok(true) | Err(blade_graphics::DeviceError::DeviceLost)) => {}
                Ok(_) | Err(_) => self.device.abandon(),
            }
        }
        let raw = &mut *self.raw;
        let destroyed = self.device.release(|context| context.destroy_command_encoder(raw));
        if destroyed.is_ok() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.raw) }
        }
    }
}
