//! A seam for tests: makes a device fail as a driver would, at a place and time of the test's choosing.

use std::sync::{Mutex, PoisonError};

/// What the driver seems to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Lost,
    OutOfMemory,
}

/// The call that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    Allocation,
    Submission,
    Wait,
}

/// Faults that wait for their calls.
#[derive(Debug, Default)]
pub(crate) struct Faults(Mutex<Vec<Pending>>);

#[derive(Debug)]
struct Pending {
    site: Site,
    /// Calls that still succeed.
    after: u32,
    fault: Fault,
}

impl Faults {
    pub(crate) fn arm(&self, site: Site, after: u32, fault: Fault) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Pending { site, after, fault });
    }

    /// Panics in the words of blade where a fault of this call is due.
    pub(crate) fn trip(&self, site: Site) {
        if let Some(fault) = self.due(site) {
            match fault {
                Fault::Lost => panic!("injected: ERROR_DEVICE_LOST"),
                Fault::OutOfMemory => panic!("injected: ERROR_OUT_OF_DEVICE_MEMORY"),
            }
        }
    }

    fn due(&self, site: Site) -> Option<Fault> {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let position = pending.iter().position(|p| p.site == site)?;
        match &mut pending[position].after {
            0 => Some(pending.remove(position).fault),
            after => {
                *after -= 1;
                None
            }
        }
    }
}
