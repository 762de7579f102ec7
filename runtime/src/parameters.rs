//! The weights of a model on a device, shared by its sessions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blade_graphics::BufferPiece;
use meganeura_codegen::program::{ALIGNMENT, ParameterBinding, Program, Region, Space};
use meganeura_ir::{ParameterId, Tensor, TensorType};

use crate::buffers::Arena;
use crate::device::{Device, DeviceError};
use crate::program_check::{self, ProgramError};
use crate::transfer::{DeviceCopy, Source, Transfer};
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
    #[error("the parameters are those of another model, or on another device")]
    ForeignStore,
}

/// The buffers of [`Space::Parameters`], in the layout of the program that the store was made from. All zero at first.
///
/// Where a model is trained while it answers, one store holds the version that inference reads, and its [twin](Self::twin) the one that
/// training changes; [`ParameterStore::copy_from`] publishes.
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
        program_check::check_parameters(program, device.profile())?;
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

    /// A second store for programs of the same layout, with the same values. It takes as much device memory again.
    pub fn twin(&self) -> Result<Arc<Self>, ParameterError> {
        let twin = Arc::new(ParameterStore {
            device: self.device.clone(),
            layout: self.layout.clone(),
            parameters: self.parameters.clone(),
            arena: Arena::new(&self.device, "a second version of the parameters", &self.layout)?,
            transfer: Mutex::new(Transfer::new(&self.device)?),
        });
        let pairs = self.arena.buffers().iter().zip(twin.arena.buffers());
        let whole = pairs.map(|(&from, &to)| DeviceCopy { from: from.into(), to: to.into(), bytes: from.size() });
        twin.transfer().copy(&whole.collect::<Vec<_>>())?;
        Ok(twin)
    }

    /// Gives the named parameters the values that they have in `source`, on the device and in one submission: a step that was submitted
    /// before reads all of them as they were, a later one reads all of them as they are in `source`.
    ///
    /// # Errors
    /// The stores differ in layout or device, or have no such parameter; the device fails.
    pub fn copy_from<'a>(&self, source: &ParameterStore, names: impl IntoIterator<Item = &'a str>) -> Result<(), ParameterError> {
        if !Arc::ptr_eq(&self.device, &source.device) || self.layout != source.layout || self.parameters != source.parameters {
            return Err(ParameterError::ForeignStore);
        }
        let mut regions = Vec::new();
        for name in names {
            let binding = self.parameters.iter().find(|p| p.name == name).ok_or(ParameterError::ForeignStore)?;
            regions.extend(binding.region.filter(|region| region.space == Space::Parameters));
        }
        let copies = merged(regions).into_iter().map(|region| DeviceCopy {
            from: source.arena.piece(&region),
            to: self.arena.piece(&region),
            bytes: region.size,
        });
        Ok(self.transfer().copy(&copies.collect::<Vec<_>>())?)
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        self.layout.iter().sum()
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

/// Joins regions between which nothing but padding lies.
fn merged(mut regions: Vec<Region>) -> Vec<Region> {
    regions.sort_unstable();
    let mut merged: Vec<Region> = Vec::new();
    for region in regions {
        let end = region.offset + region.size;
        match merged.last_mut() {
            Some(last)
                if last.buffer == region.buffer && region.offset <= (last.offset + last.size).next_multiple_of(ALIGNMENT) =>
            {
                last.size = last.size.max(end - last.offset);
            }
            _ => merged.push(region),
        }
    }
    merged
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

#[cfg(test)]
mod tests {
    use meganeura_ir::{DType, TensorType};

    use super::*;
    use crate::assemble::Assembler;
    use crate::testing::device;

    fn region(buffer: u32, offset: u64, size: u64) -> Region {
        Region { space: Space::Parameters, buffer, offset, size }
    }

    #[test]
    fn neighbours_are_copied_as_one() {
        let regions = vec![region(0, 512, 4), region(0, 0, 12), region(0, 256, 256), region(1, 0, 8), region(0, 1024, 4)];
        assert_eq!(merged(regions), [region(0, 0, 516), region(0, 1024, 4), region(1, 0, 8)]);
    }

    fn store() -> Arc<ParameterStore> {
        let mut a = Assembler::new();
        for name in ["a", "b", "c"] {
            a.parameter(Space::Parameters, name, TensorType::new(DType::F32, [2]));
        }
        ParameterStore::new(device(), &a.finish()).unwrap()
    }

    fn values(store: &ParameterStore) -> Vec<f64> {
        let ids: Vec<ParameterId> = store.parameters().iter().map(|p| p.id).collect();
        store.read_parameters(&ids).unwrap().iter().flat_map(Tensor::to_f64_vec).collect()
    }

    #[test]
    fn a_twin_begins_with_the_same_values_and_publishes_what_is_named() {
        let served = store();
        let pair = |v: f32| Tensor::from_f32([2], &[v, -v]);
        let ids: Vec<ParameterId> = served.parameters().iter().map(|p| p.id).collect();
        let [one, two, three] = [1.0, 2.0, 3.0].map(pair);
        served.write_parameters(&[(ids[0], &one), (ids[1], &two), (ids[2], &three)]).unwrap();
        let trained = served.twin().unwrap();
        assert_eq!(values(&trained), values(&served));
        let new = [4.0, 5.0, 6.0].map(pair);
        trained.write_parameters(&ids.iter().copied().zip(&new).collect::<Vec<_>>()).unwrap();
        assert_eq!(values(&served), [1.0, -1.0, 2.0, -2.0, 3.0, -3.0]);
        served.copy_from(&trained, ["c", "a"]).unwrap();
        assert_eq!(values(&served), [4.0, -4.0, 2.0, -2.0, 6.0, -6.0]);
        trained.copy_from(&served, ["a", "b", "c"]).unwrap();
        assert_eq!(values(&trained), values(&served));
    }

    #[test]
    fn stores_of_other_models_and_unknown_names_are_refused() {
        let (served, mut other) = (store(), Assembler::new());
        other.parameter(Space::Parameters, "a", TensorType::new(DType::F32, [2]));
        let other = ParameterStore::new(device(), &other.finish()).unwrap();
        assert_eq!(served.copy_from(&other, ["a"]), Err(ParameterError::ForeignStore));
        assert_eq!(served.copy_from(&served.twin().unwrap(), ["d"]), Err(ParameterError::ForeignStore));
    }
}
