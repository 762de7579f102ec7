//! Runs compiled [`Program`](meganeura_codegen::program::Program)s on Vulkan and Metal devices. The only crate that knows blade.
//!
//! [`Device::open`] picks an adapter, reads its limits and checks it with the [self-test](self_test). A [`ParameterStore`] holds
//! the weights of one model on the device; any number of [`Session`]s, each one program with its own inputs, outputs and scratch
//! memory, share it. [`Session::run`] executes a step; [`Session::submit`] and [`Session::wait`] keep two steps in flight, so that
//! the host prepares one while the device computes the other. A host that owns device and command encoder wraps its context with
//! [`Device::with_context`] and records a session between its own passes with [`Session::record`].
//!
//! No panic of blade crosses this interface where panics unwind: a lost device or exhausted memory is a [`DeviceError`], after
//! which the [`Device`] and all that was made from it answer [`DeviceError::Dead`]. Dropping them gives back what they hold, and the
//! device can be opened again. What is seen not to fit before it is allocated is [`DeviceError::NoRoom`], and the device lives on.
//!
//! The Metal side (macOS, iOS) compiles against the same interface with conservative limits; it has never been run.

mod adapter;
mod assemble;
mod buffers;
pub mod checkpoint;
mod device;
mod encoder;
#[doc(hidden)]
pub mod fault;
mod parameters;
mod pipeline;
mod program_check;
pub mod self_test;
mod session;
mod step;
#[cfg(test)]
mod testing;
mod transfer;
mod words;

pub use adapter::{AdapterKind, DeviceInfo, Limits};
pub use checkpoint::{CheckpointError, atomic_write};
pub use device::{Device, DeviceError, DeviceSelector};
pub use parameters::{ParameterError, ParameterStore};
pub use pipeline::KernelError;
pub use program_check::ProgramError;
pub use session::{DispatchTime, Session, SessionError, SessionOptions, SubmissionLimits, Ticket};
pub use words::WordError;
