//! The adapters of this machine and their limits, as the driver reports them.

use std::fmt;

use meganeura_codegen::profile::{DeviceProfile, MatrixUnit};

use crate::device::{DeviceError, catch};

/// Storage buffers that one kernel may bind, whatever the driver permits: each binding needs a name (`b0`, `b1`, ..).
pub(crate) const MAX_BINDINGS: u32 = 32;

/// What stands behind an adapter. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AdapterKind {
    Discrete,
    Integrated,
    Virtual,
    Other,
    /// A CPU.
    Software,
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdapterKind::Discrete => "discrete GPU",
            AdapterKind::Integrated => "integrated GPU",
            AdapterKind::Virtual => "virtual GPU",
            AdapterKind::Other => "other",
            AdapterKind::Software => "software",
        })
    }
}

/// An adapter that [`Device::open`](crate::Device::open) may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Position in [`Device::list`](crate::Device::list).
    pub index: usize,
    pub name: String,
    pub driver: String,
    /// The driver's own words about its version.
    pub driver_info: String,
    pub kind: AdapterKind,
    /// PCI vendor id, or a Khronos one.
    pub vendor_id: u32,
    /// PCI device id. Twin cards share it.
    pub device_id: u32,
    pub limits: Limits,
    /// Multiprocessors or compute units, where the driver tells.
    pub multiprocessors: Option<u32>,
    /// Units that multiply matrices of f16.
    pub matrix_unit: Option<MatrixUnit>,
    /// Why the adapter cannot be opened.
    pub unsupported: Option<String>,
}

impl DeviceInfo {
    /// Whether a CPU does the work.
    pub fn is_software(&self) -> bool {
        self.kind == AdapterKind::Software
    }

    /// What codegen must respect on this adapter, in strict precision.
    pub fn profile(&self) -> DeviceProfile {
        let limits = &self.limits;
        let base = if self.is_software() { DeviceProfile::software() } else { DeviceProfile::generic() };
        DeviceProfile {
            max_storage_bindings: limits.storage_bindings.min(MAX_BINDINGS),
            max_binding_bytes: limits.buffer_bytes(),
            max_workgroup_bytes: limits.workgroup_bytes,
            max_workgroup_invocations: limits.workgroup_invocations,
            max_workgroups: limits.workgroups,
            compute_units: self.multiprocessors.unwrap_or(base.compute_units),
            ..base
        }
    }
}

/// Limits of an adapter. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Storage buffers that one compute stage may bind.
    pub storage_bindings: u32,
    /// What one storage binding may span.
    pub storage_binding_bytes: u64,
    /// The largest single allocation.
    pub allocation_bytes: u64,
    /// All memory local to the device.
    pub memory_bytes: u64,
    pub workgroup_bytes: u32,
    pub workgroup_invocations: u32,
    pub workgroup_size: [u32; 3],
    /// Workgroups per dispatch.
    pub workgroups: [u32; 3],
}

impl Limits {
    /// The largest buffer that kernels may use: bindings reach to the end of their buffer.
    pub fn buffer_bytes(&self) -> u64 {
        let alignment = meganeura_codegen::program::ALIGNMENT;
        self.storage_binding_bytes.min(self.allocation_bytes) / alignment * alignment
    }
}

/// All adapters, in the driver's order.
pub(crate) fn list() -> Result<Vec<DeviceInfo>, DeviceError> {
    let mut adapters = platform::list()?;
    if adapters.is_empty() {
        return Err(DeviceError::NoDriver);
    }
    let reports = catch(blade_graphics::Context::enumerate)?.map_err(|e| DeviceError::Unavailable(e.to_string()))?;
    for (index, adapter) in adapters.iter_mut().enumerate() {
        adapter.index = index;
        let report = reports.iter().find(|r| r.device_id == adapter.device_id && r.information.device_name == adapter.name);
        adapter.unsupported = match report.map(|r| &r.status) {
            Some(blade_graphics::DeviceReportStatus::Available { .. }) => None,
            Some(blade_graphics::DeviceReportStatus::Rejected(reason)) => Some(reason.clone()),
            None => Some("the graphics library does not see it".into()),
        };
        let tile = match report.map(|r| &r.status) {
            Some(blade_graphics::DeviceReportStatus::Available { caps, .. }) => caps.cooperative_matrix.f16_tile,
            _ => 0,
        };
        // Every adapter has subgroups; the graphics library knows which multiply matrices.
        adapter.matrix_unit = adapter.matrix_unit.filter(|_| tile == 16);
    }
    Ok(adapters)
}

#[cfg(not(any(target_os = "macos", target_os = "ios")))]
mod platform {
    use std::ffi::{CStr, c_char};

    use ash::vk;

    use super::{AdapterKind, DeviceInfo, Limits, MatrixUnit};
    use crate::device::DeviceError;

    pub(super) fn list() -> Result<Vec<DeviceInfo>, DeviceError> {
        // SAFETY: the system's Vulkan loader is trusted as blade trusts it; the entry outlives the instance below.
        let entry = unsafe { ash::Entry::load() }.map_err(|e| DeviceError::NoLoader(e.to_string()))?;
        let app = vk::ApplicationInfo::default().engine_name(c"meganeura").api_version(vk::API_VERSION_1_1);
        let create_info = vk::InstanceCreateInfo::default().application_info(&app);
        // SAFETY: `create_info` is complete and lives through the call.
        let instance = unsafe { entry.create_instance(&create_info, None) }.map_err(|e| match e {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => DeviceError::NoDriver,
            other => DeviceError::Unavailable(other.to_string()),
        })?;
        // SAFETY: the instance is live, its handles do not leave this block, and it is destroyed once.
        unsafe {
            let adapters = instance.enumerate_physical_devices().map(|devices| {
                let supported = devices
                    .into_iter()
                    .filter(|&d| instance.get_physical_device_properties(d).api_version >= vk::API_VERSION_1_1);
                supported.map(|device| describe(&instance, device)).collect()
            });
            instance.destroy_instance(None);
            adapters.map_err(|e| DeviceError::Unavailable(e.to_string()))
        }
    }

    /// # Safety
    /// `device` belongs to `instance`, which has at least Vulkan 1.1, as has the device.
    unsafe fn describe(instance: &ash::Instance, device: vk::PhysicalDevice) -> DeviceInfo {
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut allocation = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut properties2 = vk::PhysicalDeviceProperties2::default().push_next(&mut driver).push_next(&mut allocation);
        // SAFETY: by this function's contract.
        let memory = unsafe {
            instance.get_physical_device_properties2(device, &mut properties2);
            instance.get_physical_device_memory_properties(device)
        };
        let properties = properties2.properties;
        // SAFETY: by this function's contract.
        let multiprocessors = unsafe { multiprocessors(instance, device) };
        let limits = &properties.limits;
        let heaps = &memory.memory_heaps[..memory.memory_heap_count as usize];
        let local = heaps.iter().filter(|h| h.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        DeviceInfo {
            index: 0,
            name: text(&properties.device_name),
            driver: text(&driver.driver_name),
            driver_info: text(&driver.driver_info),
            kind: match properties.device_type {
                vk::PhysicalDeviceType::DISCRETE_GPU => AdapterKind::Discrete,
                vk::PhysicalDeviceType::INTEGRATED_GPU => AdapterKind::Integrated,
                vk::PhysicalDeviceType::VIRTUAL_GPU => AdapterKind::Virtual,
                vk::PhysicalDeviceType::CPU => AdapterKind::Software,
                _ => AdapterKind::Other,
            },
            vendor_id: properties.vendor_id,
            device_id: properties.device_id,
            limits: Limits {
                storage_bindings: limits.max_per_stage_descriptor_storage_buffers.min(limits.max_per_stage_resources),
                storage_binding_bytes: limits.max_storage_buffer_range.into(),
                allocation_bytes: allocation.max_memory_allocation_size,
                memory_bytes: local.map(|h| h.size).sum(),
                workgroup_bytes: limits.max_compute_shared_memory_size,
                workgroup_invocations: limits.max_compute_work_group_invocations,
                workgroup_size: limits.max_compute_work_group_size,
                workgroups: limits.max_compute_work_group_count,
            },
            multiprocessors,
            // SAFETY: by this function's contract.
            matrix_unit: Some(MatrixUnit { subgroup: unsafe { subgroup(instance, device) } }),
            unsupported: None,
        }
    }

    /// Invocations of a subgroup.
    ///
    /// # Safety
    /// As of [`describe`].
    unsafe fn subgroup(instance: &ash::Instance, device: vk::PhysicalDevice) -> u32 {
        let mut subgroups = vk::PhysicalDeviceSubgroupProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut subgroups);
        // SAFETY: by this function's contract; the chained structure belongs to Vulkan 1.1.
        unsafe { instance.get_physical_device_properties2(device, &mut properties) };
        subgroups.subgroup_size
    }

    /// # Safety
    /// As of [`describe`].
    unsafe fn multiprocessors(instance: &ash::Instance, device: vk::PhysicalDevice) -> Option<u32> {
        // SAFETY: by this function's contract.
        let extensions = unsafe { instance.enumerate_device_extension_properties(device) }.ok()?;
        let has = |name: &CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
        if has(ash::nv::shader_sm_builtins::NAME) {
            let mut nvidia = vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut nvidia);
            // SAFETY: the device has the extension that defines the chained structure.
            unsafe { instance.get_physical_device_properties2(device, &mut properties) };
            return Some(nvidia.shader_sm_count).filter(|&count| count > 0);
        }
        if has(ash::amd::shader_core_properties::NAME) {
            let mut amd = vk::PhysicalDeviceShaderCorePropertiesAMD::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut amd);
            // SAFETY: as above.
            unsafe { instance.get_physical_device_properties2(device, &mut properties) };
            let count = amd.shader_engine_count * amd.shader_arrays_per_engine_count * amd.compute_units_per_shader_array;
            return Some(count).filter(|&count| count > 0);
        }
        None
    }

    /// The text before the first NUL of a fixed array.
    fn text(array: &[c_char]) -> String {
        let bytes: Vec<u8> = array.iter().map(|&c| c as u8).collect();
        CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// Untested: limits are those that every Metal device of Apple silicon offers.
#[cfg(any(target_os = "macos", target_os = "ios"))]
mod platform {
    use super::{AdapterKind, DeviceInfo, Limits};
    use crate::device::{DeviceError, catch};

    pub(super) fn list() -> Result<Vec<DeviceInfo>, DeviceError> {
        let reports = catch(blade_graphics::Context::enumerate)?.map_err(|e| DeviceError::Unavailable(e.to_string()))?;
        let describe = |report: blade_graphics::DeviceReport| DeviceInfo {
            index: 0,
            name: report.information.device_name,
            driver: report.information.driver_name,
            driver_info: report.information.driver_info,
            kind: if report.information.is_software_emulated { AdapterKind::Software } else { AdapterKind::Integrated },
            vendor_id: 0x106b,
            device_id: report.device_id,
            limits: Limits {
                storage_bindings: 8,
                storage_binding_bytes: 128 << 20,
                allocation_bytes: 256 << 20,
                memory_bytes: 4 << 30,
                workgroup_bytes: 16 << 10,
                workgroup_invocations: 256,
                workgroup_size: [256; 3],
                workgroups: [65535; 3],
            },
            multiprocessors: None,
            matrix_unit: None,
            unsupported: None,
        };
        Ok(reports.into_iter().map(describe).collect())
    }
}
