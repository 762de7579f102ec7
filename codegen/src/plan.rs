//! The memory and dispatch plan: where every tensor lies, and which dispatches must wait for others.

use std::collections::{BTreeMap, HashMap};

use meganeura_ir::{Graph, NodeId, Op, ParameterRole};

use crate::eval::device_words;
use crate::fuse::in_memory;
use crate::kernels::Emitted;
use crate::liveness::Liveness;
use crate::order::Launch;
use crate::pack::pack;
use crate::program::{ALIGNMENT, Access, Binding, ConstantData, Dispatch, Memory, ParameterBinding, Region, Space};
use crate::{CompileError, DeviceProfile};

/// Bump allocation into buffers of limited size.
#[derive(Default)]
struct Arena {
    buffers: Vec<u64>,
}

impl Arena {
    fn place(&mut self, space: Space, size: u64, limit: u64) -> Region {
        let aligned = size.next_multiple_of(ALIGNMENT);
        match self.buffers.last_mut() {
            Some(end) if *end + aligned <= limit => {
                let offset = *end;
                *end += aligned;
                Region { space, buffer: self.buffers.len() as u32 - 1, offset, size }
            }
            _ => {
                self.buffers.push(aligned);
                Region { space, buffer: self.buffers.len() as u32 - 1, offset: 0, size }
            }
        }
    }
}

/// Fixed places: everything but intermediate results.
pub struct Layout {
    pub memory: Memory,
    pub inputs: Vec<Binding>,
    pub outputs: Vec<Binding>,
    pub parameters: Vec<ParameterBinding>,
    pub constants: Vec<ConstantData>,
    /// Where leaves and results lie.
    pub home: HashMap<NodeId, Region>,
    /// Values to copy after everything else.
    pub copies: Vec<Copy>,
}

/// A value that must also be written to a second place.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub from: NodeId,
    pub to: Region,
}

/// Places leaves, outputs and updates, those of [`in_place`](crate::in_place::in_place) where their parameter lies.
pub fn layout(
    graph: &Graph,
    launches: &[Launch],
    in_place: &BTreeMap<NodeId, NodeId>,
    profile: &DeviceProfile,
) -> Result<Layout, CompileError> {
    let groups = || launches.iter().flat_map(|launch| &launch.groups);
    let limit = profile.max_binding_bytes;
    let size_of = |id: NodeId| profile.bytes(graph.ty(id));
    let leaves = graph.live().into_iter().filter(|id| graph.node(*id).op.is_leaf() && in_memory(graph, *id));
    let stored = groups().flat_map(|group| &group.stored).map(|stored| stored.node);
    for id in leaves.chain(stored) {
        if size_of(id) > limit {
            return Err(CompileError::TensorTooLarge { ty: graph.ty(id).clone(), bytes: size_of(id), limit });
        }
    }
    let mut home = HashMap::new();
    let live: HashMap<&Op, NodeId> =
        graph.live().into_iter().filter(|id| graph.node(*id).op.is_leaf()).map(|id| (&graph.node(id).op, id)).collect();

    let (mut weights, mut state, mut inputs_arena) = (Arena::default(), Arena::default(), Arena::default());
    let mut parameters = Vec::new();
    for (i, info) in graph.parameters().iter().enumerate() {
        let id = meganeura_ir::ParameterId(i as u32);
        let bytes = profile.bytes(&info.ty);
        if bytes > limit {
            return Err(CompileError::TensorTooLarge { ty: info.ty.clone(), bytes, limit });
        }
        let (arena, space) = match info.role {
            ParameterRole::Optimizer => (&mut state, Space::Optimizer),
            ParameterRole::Weight | ParameterRole::Statistic => (&mut weights, Space::Parameters),
        };
        let region = (bytes > 0).then(|| arena.place(space, bytes, limit));
        if let (Some(region), Some(&node)) = (region, live.get(&Op::Parameter(id))) {
            home.insert(node, region);
        }
        let updated = graph.updates().iter().any(|u| u.parameter == id);
        parameters.push(ParameterBinding { id, name: info.name.clone(), ty: info.ty.clone(), region, updated });
    }
    let mut inputs = Vec::new();
    for (i, info) in graph.inputs().iter().enumerate() {
        let node = live.get(&Op::Input(meganeura_ir::InputId(i as u32)));
        let bytes = profile.bytes(&info.ty);
        let region = (bytes > 0 && node.is_some()).then(|| inputs_arena.place(Space::Inputs, bytes, limit));
        if let (Some(region), Some(&node)) = (region, node) {
            home.insert(node, region);
        }
        inputs.push(Binding { name: info.name.clone(), ty: info.ty.clone(), region });
    }
    let mut constants_arena = Arena::default();
    let mut constants = Vec::new();
    let read: std::collections::BTreeSet<NodeId> = groups().flat_map(|g| g.reads.iter().copied()).chain(graph.roots()).collect();
    for id in read {
        if let Op::Constant(value) = &graph.node(id).op
            && size_of(id) > 0
        {
            let region = constants_arena.place(Space::Constants, size_of(id), limit);
            home.insert(id, region);
            constants.push(ConstantData { region, words: device_words(value, profile) });
        }
    }
    let mut outputs_arena = Arena::default();
    let mut outputs = Vec::new();
    let mut copies = Vec::new();
    for o in graph.outputs() {
        let bytes = size_of(o.node);
        let region = (bytes > 0).then(|| outputs_arena.place(Space::Outputs, bytes, limit));
        if let Some(region) = region {
            if home.contains_key(&o.node) || matches!(graph.node(o.node).op, Op::Iota { .. }) {
                copies.push(Copy { from: o.node, to: region });
            } else {
                home.insert(o.node, region);
            }
        }
        outputs.push(Binding { name: o.name.clone(), ty: graph.ty(o.node).clone(), region });
    }
    for u in graph.updates() {
        let Some(region) = parameters[u.parameter.0 as usize].region else { continue };
        let parameter = live.get(&Op::Parameter(u.parameter)).copied();
        if parameter == Some(u.node) {
            continue;
        }
        // Nothing reads a parameter that is not live.
        let replaces = match parameter {
            Some(parameter) => in_place.get(&u.node) == Some(&parameter),
            None => groups().flat_map(|group| &group.stored).any(|stored| stored.node == u.node),
        };
        if replaces && !home.contains_key(&u.node) {
            home.insert(u.node, region);
        } else {
            // A copy would read what another update has already replaced.
            if let Op::Parameter(source) = graph.node(u.node).op
                && source != u.parameter
                && graph.updates().iter().any(|other| other.parameter == source)
            {
                return Err(CompileError::UpdateFromUpdated { name: graph.parameters()[source.0 as usize].name.clone() });
            }
            copies.push(Copy { from: u.node, to: region });
        }
    }
    let memory = Memory {
        parameters: weights.buffers,
        optimizer: state.buffers,
        inputs: inputs_arena.buffers,
        outputs: outputs_arena.buffers,
        constants: constants_arena.buffers,
        scratch: Vec::new(),
    };
    Ok(Layout { memory, inputs, outputs, parameters, constants, home, copies })
}

/// Where intermediate results lie, and what that costs.
pub struct Placement {
    /// Per step of the schedule: the region of each buffer of its kernel.
    pub regions: Vec<Vec<Region>>,
    /// Bytes of the buffers of scratch memory.
    pub scratch: Vec<u64>,
    /// The most bytes of intermediate results in use at one step.
    pub live: u64,
    /// Where values lie that copies read after the last step.
    pub copied: HashMap<NodeId, Region>,
}

/// Places intermediate results, with reuse, and binds every kernel's buffers. `schedule` indexes `emitted`, in execution order; `levels` are
/// the levels of its steps.
pub fn bind(
    graph: &Graph,
    emitted: &[Emitted],
    schedule: &[usize],
    levels: &[usize],
    layout: &Layout,
    profile: &DeviceProfile,
) -> Placement {
    let mut liveness = Liveness::new(graph, emitted, schedule, &layout.home, &layout.copies, profile);
    let live = liveness.peak();
    liveness.last_through(levels);
    let packing = pack(&liveness.lifetimes, live, profile.max_binding_bytes);
    let place = |index: usize| {
        let (buffer, offset) = packing.places[index];
        Region { space: Space::Scratch, buffer: buffer as u32, offset, size: liveness.lifetimes[index].size }
    };
    let regions = schedule.iter().zip(&liveness.touched).map(|(&kernel, touched)| {
        let bound = emitted[kernel].bound.iter().zip(touched);
        bound.map(|(bound, lifetime)| lifetime.map_or_else(|| layout.home[&bound.node()], place)).collect()
    });
    let regions = regions.collect();
    let copied = liveness.copied.iter().map(|(&node, &index)| (node, place(index))).collect();
    Placement { regions, live, copied, scratch: packing.buffers }
}

/// Sets `barrier` exactly where a dispatch reads what an earlier one wrote, or writes what an earlier one read or wrote, since the last barrier.
pub fn place_barriers(dispatches: &mut [Dispatch], access: impl Fn(usize) -> Vec<Access>) {
    let (mut reads, mut writes): (Vec<Region>, Vec<Region>) = Default::default();
    for d in dispatches {
        let modes = access(d.kernel);
        let own: Vec<(Region, Access)> = d.regions.iter().copied().zip(modes).collect();
        let hit = |set: &[Region], r: &Region| set.iter().any(|s| s.overlaps(r));
        d.barrier = own.iter().any(|(r, mode)| hit(&writes, r) || *mode == Access::ReadWrite && hit(&reads, r));
        if d.barrier {
            reads.clear();
            writes.clear();
        }
        for (r, mode) in own {
            match mode {
                Access::Read => reads.push(r),
                Access::ReadWrite => writes.push(r),
            }
        }
    }
}
