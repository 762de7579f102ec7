//! From a verified graph to a [`Program`]: equality saturation, fusion, schedules, WGSL, and the memory plan. Knows no GPU.

mod access;
mod attention;
mod body;
mod classes;
mod compile;
mod eval;
mod frugal;
mod fuse;
mod halve;
mod in_place;
mod index;
mod kernels;
mod key;
mod listing;
mod liveness;
mod order;
mod pack;
mod plan;
pub mod profile;
pub mod program;
mod recompute;
pub mod saturate;
#[cfg(test)]
mod simulation_tests;
mod stored;
mod wgsl;

pub use compile::{CompileError, CompileOptions, CompileReport, Compiled, compile};
pub use key::PlanKey;
pub use profile::{DeviceKind, DeviceProfile, MatrixUnit, Precision};
pub use program::Program;
pub use saturate::raise;
pub use stored::{StoredError, from_bytes, to_bytes};
