//! Device profiles: what codegen must respect and what it may assume.

use meganeura_ir::{DType, TensorType};

use crate::program::ALIGNMENT;

/// Limits and traits of a device. The runtime fills the limits from the driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceProfile {
    pub kind: DeviceKind,
    /// Storage buffers that one kernel may bind.
    pub max_storage_bindings: u32,
    /// Bytes that one binding may span.
    pub max_binding_bytes: u64,
    /// Bytes of workgroup memory.
    pub max_workgroup_bytes: u32,
    pub max_workgroup_invocations: u32,
    pub max_workgroups: [u32; 3],
    /// Multiprocessors: how many workgroups it takes to keep the device busy.
    pub compute_units: u32,
    /// Iterations that all loops of one invocation may run together. llvmpipe leaves every loop, silently, when 65,535 are spent.
    pub max_loop_iterations: u64,
    /// Matrix units that products may use, at the price of operands rounded to f16. A device that has them has f16 values in memory.
    pub matrix_unit: Option<MatrixUnit>,
}

/// Units that multiply 16x16 matrices of f16 and add in f32, driven by a subgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixUnit {
    /// Invocations of a subgroup.
    pub subgroup: u32,
}

/// What arithmetic programs may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 32-bit floats throughout.
    #[default]
    Strict,
    /// Products may round their operands to f16, scaled by powers of two, and add in f32, where the device has units for that.
    Accelerated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// A CPU behind Vulkan: one invocation per row, register tiles, no workgroup memory.
    Software,
    /// Any GPU.
    Generic,
}

impl DeviceProfile {
    /// Whether elements of `dtype` lie in device memory as f16: all others take 32 bits.
    pub fn stores_halves(&self, dtype: DType) -> bool {
        dtype == DType::F16 && self.matrix_unit.is_some()
    }

    /// Bytes of a tensor in device memory, a multiple of 4.
    pub fn bytes(&self, ty: &TensorType) -> u64 {
        let elements = ty.shape.numel() as u64;
        if self.stores_halves(ty.dtype) { (2 * elements).next_multiple_of(4) } else { 4 * elements }
    }

    /// What every current Vulkan or Metal device offers: both have more than 16 storage bindings in their common profiles (30 and 31).
    pub fn generic() -> Self {
        DeviceProfile {
            kind: DeviceKind::Generic,
            max_storage_bindings: 16,
            max_binding_bytes: 128 << 20,
            max_workgroup_bytes: 16 << 10,
            max_workgroup_invocations: 256,
            max_workgroups: [65535; 3],
            compute_units: 32,
            max_loop_iterations: u64::MAX,
            matrix_unit: None,
        }
    }

    /// Apple silicon behind Metal. Of the 31 buffers of a kernel one holds the sizes of the others.
    pub fn apple() -> Self {
        DeviceProfile {
            max_storage_bindings: 30,
            max_workgroup_bytes: 32 << 10,
            max_workgroup_invocations: 1024,
            compute_units: 16,
            ..Self::generic()
        }
    }

    /// A large NVIDIA GPU: an H200. Without its matrix units in strict precision.
    pub fn nvidia(precision: Precision) -> Self {
        DeviceProfile {
            max_storage_bindings: 32,
            max_binding_bytes: (1 << 32) - ALIGNMENT,
            max_workgroup_bytes: 48 << 10,
            max_workgroup_invocations: 1024,
            max_workgroups: [(1 << 31) - 1, 65535, 65535],
            compute_units: 132,
            matrix_unit: (precision == Precision::Accelerated).then_some(MatrixUnit { subgroup: 32 }),
            ..Self::generic()
        }
    }

    /// Software Vulkan (lavapipe).
    pub fn software() -> Self {
        DeviceProfile { kind: DeviceKind::Software, max_loop_iterations: 65535, ..Self::generic() }
    }
}
