//! Whether a program is fit to run: what the driver would not check, and blade would turn into undefined behaviour.

use meganeura_codegen::profile::DeviceProfile;
use meganeura_codegen::program::{ALIGNMENT, Dispatch, Program, Region};
use meganeura_ir::{DType, TensorType};

use crate::adapter::{Limits, MAX_BINDINGS};

/// A program that breaks its own rules or the limits of the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    #[error("{what} lies at {region:?}, outside its buffer or not aligned")]
    Region { what: String, region: Region },
    #[error("{what} of type {ty} has {found} bytes of device memory")]
    Size { what: String, ty: TensorType, found: u64 },
    #[error("{what} is f16, of {} bytes an element in this program but not on this device: compile for its profile", if *two_bytes { 2 } else { 4 })]
    Halves { what: String, two_bytes: bool },
    #[error("dispatch {dispatch} uses kernel {kernel}, which does not exist")]
    Kernel { dispatch: usize, kernel: usize },
    #[error("dispatch {dispatch} binds {found} buffers, kernel {label:?} has {expected}")]
    Bindings { dispatch: usize, label: String, expected: usize, found: usize },
    #[error("kernel {label:?} binds {found} buffers; this device permits {limit}")]
    TooManyBindings { label: String, found: usize, limit: u32 },
    #[error("kernel {label:?} has workgroups of {found:?}; this device permits {limit:?}, and {invocations} invocations")]
    WorkgroupSize { label: String, found: [u32; 3], limit: [u32; 3], invocations: u32 },
    #[error("dispatch {dispatch} has {found:?} workgroups; this device permits {limit:?}")]
    Workgroups { dispatch: usize, found: [u32; 3], limit: [u32; 3] },
}

/// Checks all of `program` against itself, `limits`, and the sizes of tensors by `profile`.
pub(crate) fn check(program: &Program, limits: &Limits, profile: &DeviceProfile) -> Result<(), ProgramError> {
    for kernel in &program.kernels {
        let (label, found) = (kernel.label.clone(), kernel.access.len());
        let limit = limits.storage_bindings.min(MAX_BINDINGS);
        if found > limit as usize {
            return Err(ProgramError::TooManyBindings { label, found, limit });
        }
        let (size, invocations) = (kernel.workgroup_size, limits.workgroup_invocations);
        let product: u64 = size.iter().map(|&n| u64::from(n)).product();
        if !within(size, limits.workgroup_size) || product > invocations.into() {
            return Err(ProgramError::WorkgroupSize { label, found: size, limit: limits.workgroup_size, invocations });
        }
    }
    for (index, dispatch) in program.dispatches.iter().enumerate() {
        check_dispatch(program, limits, index, dispatch)?;
    }
    for binding in program.inputs.iter().chain(&program.outputs) {
        check_tensor(program, &binding.name, &binding.ty, binding.region, profile)?;
    }
    for constant in &program.constants {
        check_region(program, "a constant", constant.region)?;
        if constant.words.len() as u64 * 4 != constant.region.size {
            return Err(ProgramError::Region { what: "a constant".into(), region: constant.region });
        }
    }
    check_parameters(program, profile)
}

/// Checks where the parameters of `program` lie.
pub(crate) fn check_parameters(program: &Program, profile: &DeviceProfile) -> Result<(), ProgramError> {
    program.parameters.iter().try_for_each(|p| check_tensor(program, &p.name, &p.ty, p.region, profile))
}

fn check_dispatch(program: &Program, limits: &Limits, index: usize, dispatch: &Dispatch) -> Result<(), ProgramError> {
    let kernel = program.kernels.get(dispatch.kernel);
    let kernel = kernel.ok_or(ProgramError::Kernel { dispatch: index, kernel: dispatch.kernel })?;
    let (expected, found) = (kernel.access.len(), dispatch.regions.len());
    if expected != found {
        return Err(ProgramError::Bindings { dispatch: index, label: kernel.label.clone(), expected, found });
    }
    if !within(dispatch.workgroups, limits.workgroups) {
        let (found, limit) = (dispatch.workgroups, limits.workgroups);
        return Err(ProgramError::Workgroups { dispatch: index, found, limit });
    }
    dispatch.regions.iter().try_for_each(|&region| check_region(program, &kernel.label, region))
}

fn check_tensor(
    program: &Program,
    name: &str,
    ty: &TensorType,
    region: Option<Region>,
    profile: &DeviceProfile,
) -> Result<(), ProgramError> {
    let Some(region) = region else { return Ok(()) };
    check_region(program, name, region)?;
    if ty.dtype == DType::F16 && program.stores_halves != profile.stores_halves(DType::F16) {
        return Err(ProgramError::Halves { what: name.into(), two_bytes: program.stores_halves });
    }
    if region.size != profile.bytes(ty) {
        return Err(ProgramError::Size { what: name.into(), ty: ty.clone(), found: region.size });
    }
    Ok(())
}

fn check_region(program: &Program, what: &str, region: Region) -> Result<(), ProgramError> {
    let buffer = program.memory.space(region.space).get(region.buffer as usize);
    let end = region.offset.checked_add(region.size);
    match (buffer, end) {
        (Some(&bytes), Some(end)) if end <= bytes && region.offset.is_multiple_of(ALIGNMENT) && region.size > 0 => Ok(()),
        _ => Err(ProgramError::Region { what: what.into(), region }),
    }
}

fn within(sizes: [u32; 3], limits: [u32; 3]) -> bool {
    sizes.iter().zip(limits).all(|(&size, limit)| (1..=limit).contains(&size))
}

#[cfg(test)]
mod tests {
    use meganeura_codegen::program::{Access, Space};

    use super::*;
    use crate::assemble::Assembler;
    use crate::testing::device;

    fn broken(edit: impl FnOnce(&mut Program)) -> ProgramError {
        let mut a = Assembler::new();
        let x = a.input("x", TensorType::new(DType::F32, [4]));
        let y = a.output("y", TensorType::new(DType::F32, [4]));
        let copy = a.kernel("copy", "", [4, 1, 1], &[Access::Read, Access::ReadWrite]);
        a.dispatch(copy, &[x, y], [1, 1, 1], false);
        let mut program = a.finish();
        check(&program, &device().info().limits, device().profile()).unwrap();
        edit(&mut program);
        check(&program, &device().info().limits, device().profile()).unwrap_err()
    }

    #[test]
    fn each_broken_rule_is_named() {
        let limits = device().info().limits;
        type E = ProgramError;
        assert!(matches!(broken(|p| p.dispatches[0].kernel = 1), E::Kernel { dispatch: 0, kernel: 1 }));
        assert!(matches!(broken(|p| p.dispatches[0].regions.truncate(1)), E::Bindings { expected: 2, found: 1, .. }));
        assert!(matches!(broken(|p| p.dispatches[0].workgroups[1] = 0), E::Workgroups { .. }));
        assert!(matches!(broken(|p| p.dispatches[0].workgroups[2] = limits.workgroups[2] + 1), E::Workgroups { .. }));
        assert!(matches!(broken(|p| p.kernels[0].workgroup_size = limits.workgroup_size), E::WorkgroupSize { .. }));
        assert!(matches!(broken(|p| p.dispatches[0].regions[0].offset = 4), E::Region { .. }));
        assert!(matches!(broken(|p| p.dispatches[0].regions[0].size = u64::MAX), E::Region { .. }));
        assert!(matches!(broken(|p| p.dispatches[0].regions[0].space = Space::Scratch), E::Region { .. }));
        assert!(matches!(broken(|p| p.memory.outputs[0] = 8), E::Region { what, .. } if what == "copy"));
        assert!(matches!(broken(|p| p.inputs[0].ty = TensorType::new(DType::F32, [3])), E::Size { what, .. } if what == "x"));
        let half = |p: &mut Program| (p.inputs[0].ty, p.stores_halves) = (TensorType::new(DType::F16, [4]), true);
        assert!(matches!(broken(half), E::Halves { what, two_bytes: true } if what == "x"));
        assert!(matches!(broken(|p| p.kernels[0].access = vec![Access::Read; 1 << 20]), E::TooManyBindings { .. }));
    }
}
