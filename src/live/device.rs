//! The device that several models are on, opened again when it failed.

use std::sync::{Arc, Mutex, PoisonError};

use meganeura_codegen::Precision;
use meganeura_runtime::{Device, DeviceError, DeviceSelector};

/// Opens a device, and another in its place once it is dead. Those who share it notice by [`DeviceSource::current`].
#[derive(Debug)]
pub struct DeviceSource {
    selector: DeviceSelector,
    precision: Precision,
    current: Mutex<Option<Arc<Device>>>,
}

impl DeviceSource {
    /// A source that opens its device when it is first asked for.
    pub fn new(selector: DeviceSelector) -> Self {
        DeviceSource { selector, precision: Precision::Strict, current: Mutex::new(None) }
    }

    /// As [`DeviceSource::new`], for programs of some precision.
    pub fn at(self, precision: Precision) -> Self {
        DeviceSource { precision, ..self }
    }

    /// The device, open and alive.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn current(&self) -> Result<Arc<Device>, DeviceError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|device| device.is_dead()) {
            *current = None;
        }
        match &*current {
            Some(device) => Ok(device.clone()),
            None => {
                let device = Device::open_at(&self.selector, self.precision)?;
                *current = Some(device.clone());
                Ok(device)
            }
        }
    }
}
