//! What the tests of this crate share.

use std::sync::{Arc, OnceLock};

use crate::{Device, DeviceSelector};

/// The device of this machine; on a test machine that is software Vulkan.
pub(crate) fn device() -> &'static Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(&DeviceSelector::Auto).expect("the tests need a Vulkan driver"))
}
