//! What tests of programs share.

#![allow(dead_code)]

use meganeura_codegen::program::{ALIGNMENT, Access, Region, Space};
use meganeura_codegen::{CompileOptions, DeviceProfile, Program, compile};
use meganeura_ir::{
    Composite, DType, DotDims, Graph, GraphError, NodeId, Op, ParameterId, ParameterInfo, ParameterRole, TensorType,
};

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
                assert!(!(written && r.overlaps(other)), "two bindings of `{}` alias a write\n{program}", kernel.label);
            }
        }
        if d.barrier {
            since_barrier.clear();
        }
        for (r, mode) in &own {
            for (other, other_mode) in &since_barrier {
                let written = *mode == Access::ReadWrite || *other_mode == Access::ReadWrite;
                assert!(!(written && r.overlaps(other)), "a hazard without a barrier before `{}`\n{program}", kernel.label);
            }
            match mode {
                Access::Read if matches!(r.space, Space::Scratch | Space::Outputs) => {
                    let last = written.iter().rfind(|w| w.overlaps(r));
                    assert!(
                        last.is_some_and(|w| w.offset <= r.offset && r.offset + r.size <= w.offset + w.size),
                        "{r:?} is not written"
                    );
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

pub fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

pub fn built(build: impl FnOnce(&mut Graph) -> Result<(), GraphError>) -> Graph {
    let mut g = Graph::new();
    build(&mut g).expect("the graph is well typed");
    g
}

pub fn compiled(graph: &Graph, profile: &DeviceProfile) -> Program {
    let verified = graph.clone().verify().expect("the graph is valid");
    let program =
        compile(&verified, profile, &CompileOptions { saturate: None, memory_limit: None }).expect("the graph compiles").program;
    check(&program, profile);
    program
}

pub fn parameter(g: &mut Graph, name: &str, shape: &[usize]) -> Result<NodeId, GraphError> {
    g.parameter(ParameterInfo { name: name.into(), ty: f32s(shape), stored: DType::F32, role: ParameterRole::Weight })
}

pub fn matmul(g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
    let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
    g.push(Op::Dot(dims), &[a, b])
}

pub fn linear_relu() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[7, 33]))?;
        let w = parameter(g, "w", &[33, 10])?;
        let bias = parameter(g, "bias", &[10])?;
        let y = matmul(g, x, w)?;
        let bias = g.broadcast_to(bias, &[7, 10].into())?;
        let y = g.add(y, bias)?;
        let y = g.push(Op::Composite(Composite::Relu), &[y])?;
        g.output("y", y)
    })
}

pub fn softmax() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[5, 257]))?;
        let y = g.push(Op::Composite(Composite::Softmax { axis: 1 }), &[x])?;
        g.output("y", y)
    })
}

pub fn gelu() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[3, 4, 5]))?;
        let t = g.transpose(x, &[2, 0, 1])?;
        let y = g.push(Op::Composite(Composite::Gelu), &[t])?;
        let y = g.reshape(y, [5, 12])?;
        g.output("y", y)
    })
}

/// `w -= 0.1 * g; m = 0.9 m + g` with a gradient that comes from a contraction.
pub fn momentum_step() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[7, 33]))?;
        let dy = g.input("dy", f32s(&[7, 10]))?;
        let w = parameter(g, "w", &[33, 10])?;
        let info = ParameterInfo { name: "m".into(), ty: f32s(&[33, 10]), stored: DType::F32, role: ParameterRole::Optimizer };
        let m = g.parameter(info)?;
        let dims = DotDims { lhs_contract: vec![0], rhs_contract: vec![0], ..DotDims::default() };
        let gradient = g.push(Op::Dot(dims), &[x, dy])?;
        let m = g.scale(m, 0.9)?;
        let m = g.add(m, gradient)?;
        let step = g.scale(m, 0.1)?;
        let new = g.sub(w, step)?;
        g.update(ParameterId(0), new)?;
        g.update(ParameterId(1), m)
    })
}
