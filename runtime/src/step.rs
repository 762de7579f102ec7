//! How a program is recorded: its dispatches, cut into submissions, between the copies of inputs and outputs.

use std::ops::Range;
use std::sync::Arc;

use blade_graphics::{BufferPiece, CommandEncoder};
use meganeura_codegen::program::{Binding, Program, Region, Space};

use crate::buffers::{Arena, Staging};
use crate::device::{Device, DeviceError};
use crate::encoder::Encoder;
use crate::parameters::ParameterStore;
use crate::pipeline::{Bindings, Pipeline};

/// The memory of a program: parameters are shared, optimiser state may be, the other spaces are its own.
pub(crate) struct Spaces {
    pub(crate) store: Arc<ParameterStore>,
    /// In the order of [`Space::ALL`], without buffers for the parameters.
    own: Vec<Arc<Arena>>,
}

impl Spaces {
    /// Allocates all spaces but the parameters, and the optimiser state unless that of another program is given; contents undefined.
    pub(crate) fn new(
        device: &Arc<Device>,
        program: &Program,
        store: &Arc<ParameterStore>,
        state: Option<&Spaces>,
    ) -> Result<Self, DeviceError> {
        const LABELS: [&str; 6] = ["parameters", "optimiser state", "inputs", "outputs", "constants", "intermediate results"];
        let own = Space::ALL.into_iter().zip(LABELS).map(|(space, label)| {
            let sizes = match (space, state) {
                (Space::Optimizer, Some(shared)) => return Ok(shared.own[space as usize].clone()),
                (Space::Parameters, _) => &[],
                _ => program.memory.space(space),
            };
            Arena::new(device, label, sizes).map(Arc::new)
        });
        Ok(Spaces { store: store.clone(), own: own.collect::<Result<_, _>>()? })
    }

    pub(crate) fn arena(&self, space: Space) -> &Arena {
        match space {
            Space::Parameters => self.store.arena(),
            _ => &self.own[space as usize],
        }
    }

    pub(crate) fn piece(&self, region: &Region) -> BufferPiece {
        self.arena(region.space).piece(region)
    }
}

/// A tensor's place on the device and in staging memory.
#[derive(Clone, Copy)]
pub(crate) struct StagedCopy {
    pub(crate) device: BufferPiece,
    /// Byte offset in the staging buffer.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl StagedCopy {
    /// The words of the tensor in its staging buffer.
    pub(crate) fn words(&self) -> Range<usize> {
        self.offset as usize / 4..(self.offset + self.bytes) as usize / 4
    }
}

/// Lays the tensors of `bindings` out in a staging buffer, and returns its size. Those without a region have no copy.
pub(crate) fn stage(bindings: &[Binding], spaces: &Spaces) -> (Vec<Option<StagedCopy>>, u64) {
    let mut offset = 0;
    let copies = bindings.iter().map(|binding| {
        let region = binding.region.as_ref()?;
        let copy = StagedCopy { device: spaces.piece(region), offset, bytes: region.size };
        offset += region.size;
        Some(copy)
    });
    (copies.collect(), offset)
}

/// A dispatch with its buffers resolved.
pub(crate) struct BoundDispatch {
    pub(crate) kernel: usize,
    bindings: Bindings,
    workgroups: [u32; 3],
    barrier: bool,
    /// Bytes of the regions that it touches, at least 1.
    pub(crate) bytes: u64,
}

pub(crate) fn bind(program: &Program, spaces: &Spaces) -> Vec<BoundDispatch> {
    let bound = program.dispatches.iter().map(|dispatch| BoundDispatch {
        kernel: dispatch.kernel,
        bindings: Bindings(dispatch.regions.iter().map(|region| spaces.piece(region)).collect()),
        workgroups: dispatch.workgroups,
        barrier: dispatch.barrier,
        bytes: dispatch.regions.iter().map(|region| region.size).sum::<u64>().max(1),
    });
    bound.collect()
}

/// Records `dispatches` as one compute pass, after a barrier against whatever the encoder did before.
pub(crate) fn record(encoder: &mut CommandEncoder, label: &str, pipelines: &[Pipeline], dispatches: &[BoundDispatch]) {
    if dispatches.is_empty() {
        return;
    }
    encoder.barrier();
    let mut pass = encoder.compute(label);
    for (index, dispatch) in dispatches.iter().enumerate() {
        if dispatch.barrier && index > 0 {
            pass.barrier();
        }
        let mut pipeline = pass.with(pipelines[dispatch.kernel].raw());
        pipeline.bind(0, &dispatch.bindings);
        pipeline.dispatch(dispatch.workgroups);
    }
}

/// Cuts dispatches into runs of at most `count` and at most `bytes`, each of at least one; a single empty run where there are none.
pub(crate) fn split(dispatches: &[BoundDispatch], count: usize, bytes: u64) -> Vec<Range<usize>> {
    split_sizes(dispatches.iter().map(|d| d.bytes), count, bytes)
}

fn split_sizes(sizes: impl Iterator<Item = u64>, count: usize, bytes: u64) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let (mut start, mut end, mut sum) = (0, 0, 0u64);
    for size in sizes {
        if end > start && (end - start >= count || sum.saturating_add(size) > bytes) {
            runs.push(start..end);
            (start, sum) = (end, 0);
        }
        end += 1;
        sum = sum.saturating_add(size);
    }
    runs.push(start..end);
    runs
}

/// What one step in flight needs for itself: a command encoder and staging memory.
pub(crate) struct Slot {
    /// First, so that dropping the slot waits before it frees the memory.
    pub(crate) encoder: Encoder,
    pub(crate) upload: Staging,
    pub(crate) download: Staging,
    /// The step whose outputs are, or will be, in `download`.
    pub(crate) step: Option<u64>,
}

impl Slot {
    pub(crate) fn new(device: &Arc<Device>, submissions: usize, upload: u64, download: u64) -> Result<Self, DeviceError> {
        Ok(Slot {
            encoder: Encoder::new(device, "step", submissions)?,
            upload: Staging::upload(device, upload)?,
            download: Staging::download(device, download)?,
            step: None,
        })
    }
}

/// Records the copies from staging memory to the inputs.
pub(crate) fn record_upload(encoder: &mut CommandEncoder, staging: &Staging, copies: &[Option<StagedCopy>]) {
    if copies.iter().any(Option::is_some) {
        encoder.barrier();
        let mut pass = encoder.transfer("");
        for copy in copies.iter().flatten() {
            pass.copy_buffer_to_buffer(staging.at(copy.offset), copy.device, copy.bytes);
        }
    }
}

/// Records the copies from the outputs to staging memory.
pub(crate) fn record_download(encoder: &mut CommandEncoder, staging: &Staging, copies: &[Option<StagedCopy>]) {
    if copies.iter().any(Option::is_some) {
        encoder.barrier();
        let mut pass = encoder.transfer("");
        for copy in copies.iter().flatten() {
            pass.copy_buffer_to_buffer(copy.device, staging.at(copy.offset), copy.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(sizes: &[u64], count: usize, bytes: u64) -> Vec<Range<usize>> {
        split_sizes(sizes.iter().copied(), count, bytes)
    }

    #[test]
    fn submissions_respect_both_limits() {
        assert_eq!(cut(&[1; 7], 3, 100), [0..3, 3..6, 6..7]);
        assert_eq!(cut(&[4, 4, 4, 9, 1], 100, 8), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(cut(&[1, 1], 0, 0), [0..1, 1..2]);
        assert_eq!(cut(&[], 3, 100), [0..0; 1]);
        assert_eq!(cut(&[u64::MAX, u64::MAX], 9, u64::MAX - 1), [0..1, 1..2]);
    }
}
