//! The weights of a model on a device, shared by its sessions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blade_graphics::BufferPiece;
use meganeura_codegen::program::{ParameterBinding, Program, Region, Space};
use meganeura_ir::{ParameterId, Tensor, TensorType};

use crate::buffers::Arena;
use crate::device::{Device, DeviceError};
use crate::program_check::{self, ProgramError};
use crate::transfer::{Source, Transfer};
use crate::words::{self, WordError};

/// Why a parameter cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Word(#[from] WordError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("there is no parameter {}", .0.0)]
    Unknown(ParameterId),
    #[error("parameter {name} is {expected}, the value {found}")]
    Type { name: String, expected: TensorType, found: TensorType },
    #[error("parameter {0} is state of the optimiser: it belongs to a session")]
    Optimizer(String),
}

/// The buffers of [`Space::Parameters`], in the layout of the program that the store was made from. All zero at first.
pub struct ParameterStore {
    device: Arc<Device>,
    layout: Vec<u64>,
    parameters: Vec<ParameterBinding>,
    arena: Arena,
    transfer: Mutex<Transfer>,
}

impl ParameterStore {
    /// Allocates the parameters of `program`, and of every other program with the same layout.
    pub fn new(device: &Arc<Device>, program: &Program) -> Result<Arc<Self>, ParameterError> {
        program_check::check_parameters(program)?;
        let arena = Arena::new(device, "parameters", &program.memory.parameters)?;
        let mut transfer = Transfer::new(device)?;
        transfer.zero(&arena)?;
        Ok(Arc::new(ParameterStore {
            device: device.clone(),
            layout: program.memory.parameters.clone(),
            parameters: program.parameters.clone(),
            arena,
            transfer: Mutex::new(transfer),
        }))
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The parameters of the program that the store was made from.
    pub fn parameters(&self) -> &[ParameterBinding] {
        &self.parameters
    }

    /// Replaces the value of a parameter, which must have its type.
    pub fn write_parameter(&self, id: ParameterId, value: &Tensor) -> Result<(), ParameterError> {
        self.write_parameters(&[(id, value)])
    }

    /// Replaces values, all or none.
    pub fn write_parameters(&self, values: &[(ParameterId, &Tensor)]) -> Result<(), ParameterError> {
        write(&mut self.transfer(), &self.parameters, values, |binding, region| self.owned(binding, region))
    }

    /// The value of a parameter, at the dtype of the graph.
    pub fn read_parameter(&self, id: ParameterId) -> Result<Tensor, ParameterError> {
        Ok(self.read_parameters(&[id])?.remove(0))
    }

    /// The values of several parameters, of one moment between submissions.
    pub fn read_parameters(&self, ids: &[ParameterId]) -> Result<Vec<Tensor>, ParameterError> {
        read(&mut self.transfer(), &self.parameters, ids, |binding, region| self.owned(binding, region))
    }

    fn owned(&self, binding: &ParameterBinding, region: &Region) -> Result<BufferPiece, ParameterError> {
        match region.space {
            Space::Parameters => Ok(self.arena.piece(region)),
            _ => Err(ParameterError::Optimizer(binding.name.clone())),
        }
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// A poisoned lock is taken over: the transfer holds no state between calls.
    pub(crate) fn transfer(&self) -> MutexGuard<'_, Transfer> {
        self.transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first difference between the layout of the store and that of `program`, if any.
    pub(crate) fn difference(&self, program: &Program) -> Option<String> {
        let shared = |p: &&ParameterBinding| p.region.is_none_or(|r| r.space == Space::Parameters);
        if program.memory.parameters != self.layout {
            return Some(format!("buffers of {:?} bytes, not {:?}", program.memory.parameters, self.layout));
        }
        program.parameters.iter().filter(shared).find_map(|p| match self.parameters.iter().find(|q| q.name == p.name) {
            None => p.region.map(|_| format!("parameter {} is not in the store", p.name)),
            Some(q) if q.ty != p.ty => Some(format!("parameter {} is {}, not {}", p.name, p.ty, q.ty)),
            Some(q) if q.region != p.region => Some(format!("parameter {} lies elsewhere", p.name)),
            Some(_) => None,
        })
    }
}

/// Writes parameters to the places that `place` gives. Nothing is written unless all values are right.
pub(crate) fn write(
    transfer: &mut Transfer,
    parameters: &[ParameterBinding],
    values: &[(ParameterId, &Tensor)],
    place: impl Fn(&ParameterBinding, &Region) -> Result<BufferPiece, ParameterError>,
) -> Result<(), ParameterError> {
    let mut items = Vec::with_capacity(values.len());
    for &(id, value) in values {
        let binding = find(parameters, id)?;
        if *value.ty() != binding.ty {
            let (expected, found) = (binding.ty.clone(), value.ty().clone());
            return Err(ParameterError::Type { name: binding.name.clone(), expected, found });
        }
        words::check(&binding.name, value)?;
        if let Some(region) = &binding.region {
            items.push((place(binding, region)?, Source::Tensor(value)));
        }
    }
    Ok(transfer.upload(&items)?)
}

/// Reads parameters from the places that `place` gives.
pub(crate) fn read(
    transfer: &mut Transfer,
    parameters: &[ParameterBinding],
    ids: &[ParameterId],
    place: impl Fn(&ParameterBinding, &Region) -> Result<BufferPiece, ParameterError>,
) -> Result<Vec<Tensor>, ParameterError> {
    let item = |&id| {
        let binding = find(parameters, id)?;
        let piece = binding.region.as_ref().map(|region| place(binding, region)).transpose()?;
        Ok((piece, &binding.ty))
    };
    let items = ids.iter().map(item).collect::<Result<Vec<_>, ParameterError>>()?;
    Ok(transfer.download(&items)?)
}

fn find(parameters: &[ParameterBinding], id: ParameterId) -> Result<&ParameterBinding, ParameterError> {
    parameters.iter().find(|p| p.id == id).ok_or(ParameterError::Unknown(id))
}
