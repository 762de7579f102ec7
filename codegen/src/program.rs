//! What codegen produces and the runtime executes: shaders, dispatches, and where every tensor lies.

use meganeura_ir::{ParameterId, TensorType};
use serde::{Deserialize, Serialize};

/// A compiled graph. It is static: sizes, offsets and workgroup counts are constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Distinct shaders; several dispatches may share one.
    pub kernels: Vec<Kernel>,
    /// In execution order.
    pub dispatches: Vec<Dispatch>,
    pub memory: Memory,
    /// By input order of the graph. Inputs that nothing reads have no region.
    pub inputs: Vec<Binding>,
    /// By output order of the graph.
    pub outputs: Vec<Binding>,
    /// Every parameter of the graph, by id, whether or not the program reads it.
    pub parameters: Vec<ParameterBinding>,
    /// Host data to place once before the first run.
    pub constants: Vec<ConstantData>,
    /// Whether tensors of f16 lie in memory as such: what [`DeviceProfile::stores_halves`](crate::DeviceProfile::stores_halves) said.
    pub stores_halves: bool,
}

/// Bytes of each buffer of each space. A buffer is at most the device's storage-binding limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Weights and statistics: the same layout for every program of one model, so that sessions share them. Persistent.
    pub parameters: Vec<u64>,
    /// State of the optimiser. Persistent.
    pub optimizer: Vec<u64>,
    /// Written by the host before a run.
    pub inputs: Vec<u64>,
    /// Read by the host after a run.
    pub outputs: Vec<u64>,
    /// Filled once from [`Program::constants`].
    pub constants: Vec<u64>,
    /// Intermediate results; undefined between runs.
    pub scratch: Vec<u64>,
}

impl Memory {
    pub fn space(&self, space: Space) -> &[u64] {
        match space {
            Space::Parameters => &self.parameters,
            Space::Optimizer => &self.optimizer,
            Space::Inputs => &self.inputs,
            Space::Outputs => &self.outputs,
            Space::Constants => &self.constants,
            Space::Scratch => &self.scratch,
        }
    }

    /// Bytes that the program needs on the device.
    pub fn total(&self) -> u64 {
        Space::ALL.iter().flat_map(|&s| self.space(s)).sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Space {
    Parameters,
    Optimizer,
    Inputs,
    Outputs,
    Constants,
    Scratch,
}

impl Space {
    pub const ALL: [Space; 6] =
        [Space::Parameters, Space::Optimizer, Space::Inputs, Space::Outputs, Space::Constants, Space::Scratch];

    pub fn name(self) -> &'static str {
        match self {
            Space::Parameters => "parameters",
            Space::Optimizer => "optimizer",
            Space::Inputs => "inputs",
            Space::Outputs => "outputs",
            Space::Constants => "constants",
            Space::Scratch => "scratch",
        }
    }
}

/// A range of one buffer. `offset` is a multiple of [`ALIGNMENT`]; `size` is what [`DeviceProfile::bytes`](crate::DeviceProfile::bytes) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    pub space: Space,
    pub buffer: u32,
    pub offset: u64,
    pub size: u64,
}

impl Region {
    pub fn overlaps(&self, other: &Region) -> bool {
        self.space == other.space
            && self.buffer == other.buffer
            && self.offset < other.offset + other.size
            && other.offset < self.offset + self.size
    }
}

/// Alignment of every region, in bytes: the largest `minStorageBufferOffsetAlignment` that Vulkan permits.
pub const ALIGNMENT: u64 = 256;

/// A named tensor that the host writes or reads, at device width: one 32-bit word per element (see `DType::device`), or one f16 where the
/// profile [stores halves](crate::DeviceProfile::stores_halves).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub name: String,
    pub ty: TensorType,
    /// Absent for empty tensors and for inputs that nothing reads.
    pub region: Option<Region>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterBinding {
    pub id: ParameterId,
    pub name: String,
    pub ty: TensorType,
    /// Absent for empty tensors.
    pub region: Option<Region>,
    /// Whether a run replaces its value.
    pub updated: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConstantData {
    pub region: Region,
    /// In device form, as 32-bit words.
    pub words: Vec<u32>,
}

/// Bytes as they lie in device memory, in words; the last one is filled up with zeros.
pub fn packed(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks(4).map(|bytes| {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(word)
    })
}

/// A compute shader. Bindings are `@group(0) @binding(i)`, named `b0`, `b1`, ...: storage buffers of `f32`, `f16`, `i32` or
/// `u32`, one by one or as vectors of four.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Kernel {
    /// For people and profiles: the family, then the ops, as in `row reduce_max exp reduce_sum div`.
    pub label: String,
    /// One entry point, `main`. Validated by naga.
    pub wgsl: String,
    pub workgroup_size: [u32; 3],
    pub access: Vec<Access>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    Read,
    /// Declared `read_write`; the kernel may also read what it overwrites.
    ReadWrite,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispatch {
    /// Index in [`Program::kernels`].
    pub kernel: usize,
    /// One per binding of the kernel.
    pub regions: Vec<Region>,
    /// Workgroups, each at least 1 and within the device's limits.
    pub workgroups: [u32; 3],
    /// Whether earlier dispatches (since the last barrier) must be complete and visible first.
    pub barrier: bool,
}
