//! What tests of programs share.

use meganeura_codegen::program::{ALIGNMENT, Access, Region, Space};
use meganeura_codegen::{DeviceProfile, Program};

/// Invariants of every program: limits, alignment, no aliasing with a write, barriers between all conflicting dispatches, and no read of
/// what nothing has written.
pub fn check(program: &Program, profile: &DeviceProfile) {
    let mut since_barrier: Vec<(Region, Access)> = Vec::new();
    let mut written: Vec<Region> = Vec::new();
    for d in &program.dispatches {
        let kernel = &program.kernels[d.kernel];
        assert_eq!(d.regions.len(), kernel.access.len());
        assert!(d.regions.len() <= profile.max_storage_bindings as usize);
        assert!(d.workgroups.iter().zip(profile.max_workgroups).all(|(&count, limit)| (1..=limit).contains(&count)));
        assert!(kernel.workgroup_size.iter().product::<u32>() <= profile.max_workgroup_invocations);
        let own: Vec<(Region, Access)> = d.regions.iter().copied().zip(kernel.access.iter().copied()).collect();
        for (i, (r, mode)) in own.iter().enumerate() {
            assert_eq!(r.offset % ALIGNMENT, 0);
            assert!(r.offset + r.size <= program.memory.space(r.space)[r.buffer as usize], "{r:?} is inside its buffer");
            for (other, other_mode) in &own[..i] {
                let written = *mode == Access::ReadWrite || *other_mode == Access::ReadWrite;
                assert!(!(written && r.overlaps(other)), "two bindings of one kernel alias a write");
            }
        }
        if d.barrier {
            since_barrier.clear();
        }
        for (r, mode) in &own {
            for (other, other_mode) in &since_barrier {
                let written = *mode == Access::ReadWrite || *other_mode == Access::ReadWrite;
                assert!(!(written && r.overlaps(other)), "a hazard without a barrier");
            }
            match mode {
                Access::Read if matches!(r.space, Space::Scratch | Space::Outputs) => {
                    let last = written.iter().rfind(|w| w.overlaps(r));
                    assert!(last.is_some_and(|w| w.offset <= r.offset && r.offset + r.size <= w.offset + w.size), "{r:?} is not written");
                }
                Access::Read => {}
                Access::ReadWrite => assert!(!matches!(r.space, Space::Inputs | Space::Constants), "{r:?} is written"),
            }
        }
        written.extend(own.iter().filter(|(_, mode)| *mode == Access::ReadWrite).map(|(r, _)| *r));
        since_barrier.extend(own);
    }
    for region in program.outputs.iter().filter_map(|output| output.region).filter(|region| region.space == Space::Outputs) {
        assert!(written.contains(&region), "output {region:?} is not written");
    }
}
