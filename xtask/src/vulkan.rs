//! Finds a Vulkan device, or installs the software one.

use ash::{Entry, vk};

use crate::shell::XtaskError;
use crate::system;

/// Returns once Vulkan lists at least one device; Apple systems have Metal instead.
pub fn ensure() -> Result<(), XtaskError> {
    if cfg!(target_vendor = "apple") || has_device() {
        return Ok(());
    }
    let remedy = "install your GPU's Vulkan driver, or Mesa's software one (lavapipe): `mesa-vulkan-drivers` on Fedora, \
                  `vulkan-swrast` and `vulkan-icd-loader` on Arch, `libvulkan_lvp` on openSUSE";
    system::install("a Vulkan driver", "mesa-vulkan-drivers", remedy)?;
    if has_device() {
        return Ok(());
    }
    let remedy = "the package is installed, but Vulkan still lists no device: see `vulkaninfo --summary`";
    Err(XtaskError::Missing { what: "a Vulkan driver".into(), remedy: remedy.into() })
}

/// Whether the Vulkan loader is there and some driver lists a device, a GPU or software.
fn has_device() -> bool {
    // SAFETY: the loader is the system's own; nothing else in this process uses Vulkan, and the instance outlives its only use.
    unsafe {
        let Ok(entry) = Entry::load() else { return false };
        let Ok(instance) = entry.create_instance(&vk::InstanceCreateInfo::default(), None) else { return false };
        let found = instance.enumerate_physical_devices().is_ok_and(|devices| !devices.is_empty());
        instance.destroy_instance(None);
        found
    }
}
