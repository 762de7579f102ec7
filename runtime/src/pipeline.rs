//! Compute pipelines from the kernels of a program.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use blade_graphics::{
    BufferPiece, ComputePipeline, ComputePipelineDesc, PipelineContext, ShaderBindable, ShaderBinding, ShaderData,
    ShaderDataLayout, ShaderDesc,
};
use meganeura_codegen::program::Kernel;
use meganeura_ir::parallel_map;

use crate::adapter::MAX_BINDINGS;
use crate::device::{Device, DeviceError};

/// A kernel that does not become a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel {label:?}: {message}")]
pub struct KernelError {
    pub label: String,
    /// What is wrong with the shader.
    pub message: String,
}

/// Why pipelines cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PipelineError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Names of the bindings: blade matches shader variables by name, and wants names that live forever.
const BINDING_NAMES: [&str; MAX_BINDINGS as usize] = [
    "b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9", "b10", "b11", "b12", "b13", "b14", "b15", "b16", "b17", "b18",
    "b19", "b20", "b21", "b22", "b23", "b24", "b25", "b26", "b27", "b28", "b29", "b30", "b31",
];

/// A compiled kernel, destroyed on drop. Whoever drops it has waited for the device.
pub(crate) struct Pipeline {
    device: Arc<Device>,
    raw: ManuallyDrop<ComputePipeline>,
}

impl Pipeline {
    pub(crate) fn raw(&self) -> &ComputePipeline {
        &self.raw
    }

    fn new(device: &Arc<Device>, kernel: &Kernel) -> Result<Self, PipelineError> {
        let error = |message| KernelError { label: kernel.label.clone(), message };
        let module = unbound_module(kernel).map_err(error)?;
        let bindings = BINDING_NAMES[..kernel.access.len()].iter().map(|&name| (name, ShaderBinding::Buffer)).collect();
        let layout = ShaderDataLayout { bindings };
        let raw = device.guard(|context| {
            let shader = context.try_create_shader(ShaderDesc { source: &kernel.wgsl, naga_module: Some(module) })?;
            let desc = ComputePipelineDesc { name: &kernel.label, data_layouts: &[&layout], compute: shader.at("main") };
            Ok(context.create_compute_pipeline(desc))
        })?;
        let raw = raw.map_err(|message: &str| error(message.into()))?;
        Ok(Pipeline { device: device.clone(), raw: ManuallyDrop::new(raw) })
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        let raw = &mut *self.raw;
        if self.device.release(|context| context.destroy_compute_pipeline(raw)).is_ok() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.raw) }
        }
    }
}

/// The kernel's module with its storage buffers named by position and their `@binding`s removed: blade assigns those itself.
fn unbound_module(kernel: &Kernel) -> Result<naga::Module, String> {
    let mut module = naga::front::wgsl::parse_str(&kernel.wgsl).map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    if !module.entry_points.iter().any(|e| e.name == "main" && e.stage == naga::ShaderStage::Compute) {
        return Err("there is no compute entry point `main`".into());
    }
    for (_, variable) in module.global_variables.iter_mut() {
        let Some(binding) = variable.binding.take() else { continue };
        let index = binding.binding as usize;
        if binding.group != 0 || index >= kernel.access.len() {
            return Err(format!("@group({}) @binding({index}) is not one of its {} buffers", binding.group, kernel.access.len()));
        }
        variable.name = Some(BINDING_NAMES[index].into());
    }
    Ok(module)
}

/// One pipeline per kernel, made by as many threads as the machine has: drivers compile slowly, and one at a time per thread.
pub(crate) fn create(device: &Arc<Device>, kernels: &[Kernel]) -> Result<Vec<Pipeline>, PipelineError> {
    parallel_map(kernels.len(), |index| Pipeline::new(device, &kernels[index])).into_iter().collect()
}

/// The buffers of one dispatch, in the order of the kernel's bindings.
pub(crate) struct Bindings(pub(crate) Vec<BufferPiece>);

impl ShaderData for Bindings {
    /// Unused: the number of buffers is known per kernel only, see [`Pipeline::new`].
    fn layout() -> ShaderDataLayout {
        ShaderDataLayout { bindings: Vec::new() }
    }

    fn fill(&self, mut context: PipelineContext) {
        for (index, piece) in self.0.iter().enumerate() {
            piece.bind_to(&mut context, index as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use meganeura_codegen::program::Access;

    use super::*;
    use crate::testing::device;

    fn kernel(wgsl: &str) -> Kernel {
        Kernel { label: "test".into(), wgsl: wgsl.into(), workgroup_size: [1; 3], access: vec![Access::ReadWrite] }
    }

    fn message(wgsl: &str) -> String {
        match create(device(), &[kernel(wgsl)]) {
            Err(PipelineError::Kernel(error)) => error.to_string(),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("accepted: {wgsl}"),
        }
    }

    #[test]
    fn a_broken_shader_is_an_error_that_names_the_kernel() {
        let syntax = message("@compute @workgroup_size(1) fn main() { let x = ; }");
        assert!(syntax.contains("\"test\"") && syntax.contains("expected"), "{syntax}");
        assert!(message("fn helper() {}").contains("main"));
        let types = "@group(0) @binding(0) var<storage, read_write> b0: array<f32>;
            @compute @workgroup_size(1) fn main() { b0[0] = 1i; }";
        assert!(message(types).contains("test"));
        let stray = "@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
            @compute @workgroup_size(1) fn main() { b3[0] = 1.0; }";
        assert!(message(stray).contains("@binding(3)"));
        assert!(!device().is_dead());
    }

    #[test]
    fn many_kernels_become_pipelines_in_order() {
        let size = |n| {
            format!(
                "@group(0) @binding(0) var<storage, read_write> b0: array<u32>;
                @compute @workgroup_size({n}) fn main() {{ b0[0] = {n}u; }}"
            )
        };
        let kernels: Vec<Kernel> = (1..=12).map(|n| kernel(&size(n))).collect();
        let made = create(device(), &kernels).unwrap();
        let sizes: Vec<u32> = made.iter().map(|p| p.raw().get_workgroup_size()[0]).collect();
        assert_eq!(sizes, (1..=12).collect::<Vec<u32>>());
    }
}
