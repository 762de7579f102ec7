//! Programs written by hand: for the self-test, which must not depend on the compiler, and for this crate's tests.

use meganeura_codegen::profile::DeviceProfile;
use meganeura_codegen::program::{ALIGNMENT, Access, Binding, ConstantData, Dispatch, Kernel, Memory, Program, Region, Space};
use meganeura_ir::TensorType;

/// Lays tensors out one after another, each space in one buffer.
pub(crate) struct Assembler {
    program: Program,
}

impl Assembler {
    pub(crate) fn new() -> Self {
        Assembler {
            program: Program {
                kernels: Vec::new(),
                dispatches: Vec::new(),
                memory: Memory::default(),
                inputs: Vec::new(),
                outputs: Vec::new(),
                parameters: Vec::new(),
                constants: Vec::new(),
                stores_halves: false,
            },
        }
    }

    /// A new region of `size` bytes.
    pub(crate) fn region(&mut self, space: Space, size: u64) -> Region {
        let memory = &mut self.program.memory;
        let buffers = match space {
            Space::Parameters => &mut memory.parameters,
            Space::Optimizer => &mut memory.optimizer,
            Space::Inputs => &mut memory.inputs,
            Space::Outputs => &mut memory.outputs,
            Space::Constants => &mut memory.constants,
            Space::Scratch => &mut memory.scratch,
        };
        if buffers.is_empty() {
            buffers.push(0);
        }
        let offset = buffers[0];
        buffers[0] += size.next_multiple_of(ALIGNMENT);
        Region { space, buffer: 0, offset, size }
    }

    fn tensor(&mut self, space: Space, ty: &TensorType) -> Region {
        self.region(space, DeviceProfile::generic().bytes(ty))
    }

    #[cfg(test)]
    pub(crate) fn input(&mut self, name: &str, ty: TensorType) -> Region {
        let region = self.tensor(Space::Inputs, &ty);
        self.program.inputs.push(Binding { name: name.into(), ty, region: Some(region) });
        region
    }

    pub(crate) fn output(&mut self, name: &str, ty: TensorType) -> Region {
        let region = self.tensor(Space::Outputs, &ty);
        self.output_at(name, ty, Some(region));
        region
    }

    /// Names a region that exists, or none, as an output.
    pub(crate) fn output_at(&mut self, name: &str, ty: TensorType, region: Option<Region>) {
        self.program.outputs.push(Binding { name: name.into(), ty, region });
    }

    /// A tensor that persists, in `space`: parameters or optimizer.
    #[cfg(test)]
    pub(crate) fn parameter(&mut self, space: Space, name: &str, ty: TensorType) -> Region {
        use meganeura_codegen::program::ParameterBinding;

        let place = self.tensor(space, &ty);
        let id = meganeura_ir::ParameterId(self.program.parameters.len() as u32);
        let region = (place.size > 0).then_some(place);
        self.program.parameters.push(ParameterBinding { id, name: name.into(), ty, region, updated: true });
        place
    }

    pub(crate) fn constant(&mut self, words: Vec<u32>) -> Region {
        let region = self.region(Space::Constants, words.len() as u64 * 4);
        self.program.constants.push(ConstantData { region, words });
        region
    }

    pub(crate) fn kernel(&mut self, label: &str, wgsl: &str, workgroup_size: [u32; 3], access: &[Access]) -> usize {
        let (label, wgsl, access) = (label.into(), wgsl.into(), access.to_vec());
        self.program.kernels.push(Kernel { label, wgsl, workgroup_size, access });
        self.program.kernels.len() - 1
    }

    pub(crate) fn dispatch(&mut self, kernel: usize, regions: &[Region], workgroups: [u32; 3], barrier: bool) {
        self.program.dispatches.push(Dispatch { kernel, regions: regions.to_vec(), workgroups, barrier });
    }

    pub(crate) fn finish(self) -> Program {
        self.program
    }
}
