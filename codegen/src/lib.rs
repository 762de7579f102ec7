//! From a verified graph to a [`Program`]: equality saturation, fusion, schedules, WGSL, and the memory plan. Knows no GPU.

pub mod profile;
pub mod program;

pub use profile::{DeviceKind, DeviceProfile};
pub use program::Program;
