//! From a fused group to the body of its kernel and the grid that runs it.

pub mod attention;
pub(crate) mod contract;
mod rows;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use meganeura_ir::{CompareOp, Graph, NodeId, Op};

pub use self::contract::takes_matrix_units;
use crate::body::{Body, Buffer, Builder, Builtin, ExprId, Scalar, Stmt};
use crate::eval::Evaluator;
use crate::fuse::{Domain, Group, Place, Stored};
use crate::index::{Index, ravel, unravel};
use crate::order::Launch;
use crate::profile::DeviceProfile;
use crate::wgsl::Part;

/// What a buffer of the kernel holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Read(NodeId),
    Write(NodeId),
    /// The parameter `from` is read and then overwritten by `node`, element by element.
    InPlace {
        from: NodeId,
        node: NodeId,
    },
}

impl Bound {
    /// The value that the buffer holds after the kernel.
    pub fn node(self) -> NodeId {
        match self {
            Bound::Read(node) | Bound::Write(node) | Bound::InPlace { node, .. } => node,
        }
    }
}

/// A kernel before its text.
#[derive(Clone, Debug)]
pub struct Emitted {
    pub family: &'static str,
    /// Of one workgroup size.
    pub parts: Arc<Vec<Part>>,
    pub buffers: Vec<Buffer>,
    /// One per buffer.
    pub bound: Vec<Bound>,
    pub workgroups: [u32; 3],
}

impl Emitted {
    fn new(family: &'static str, body: Body, bound: Vec<Bound>, workgroups: [u32; 3]) -> Self {
        let buffers = body.buffers.clone();
        let part = Part { body, bindings: (0..buffers.len()).collect(), workgroups: workgroups.iter().product() };
        Emitted { family, parts: Arc::new(vec![part]), buffers, bound, workgroups }
    }

    /// The kernel over other values: `to` where it has `from`, which are in order.
    pub fn over(&self, from: &[NodeId], to: &[NodeId]) -> Self {
        let moved = |node: NodeId| from.binary_search(&node).map_or(node, |place| to[place]);
        let bound = self.bound.iter().map(|bound| match *bound {
            Bound::Read(node) => Bound::Read(moved(node)),
            Bound::Write(node) => Bound::Write(moved(node)),
            Bound::InPlace { from, node } => Bound::InPlace { from: moved(from), node: moved(node) },
        });
        Emitted { bound: bound.collect(), ..self.clone() }
    }

    /// `all`, whose workgroups then do what those of `kernels`, of the same workgroup size, do too.
    fn join(mut all: Emitted, kernels: impl Iterator<Item = Emitted>, profile: &DeviceProfile) -> Self {
        for kernel in kernels {
            let places: Vec<usize> = kernel
                .bound
                .iter()
                .zip(&kernel.buffers)
                .map(|(bound, buffer)| {
                    let known = all.bound.iter().position(|b| b == bound && matches!(bound, Bound::Read(_)));
                    if let Some(known) = known {
                        all.buffers[known].vectors |= buffer.vectors;
                    }
                    known.unwrap_or_else(|| {
                        all.bound.push(*bound);
                        all.buffers.push(*buffer);
                        all.bound.len() - 1
                    })
                })
                .collect();
            Arc::make_mut(&mut all.parts).extend(kernel.parts.iter().map(|part| {
                let bindings = part.bindings.iter().map(|&b| places[b]).collect();
                Part { bindings, ..part.clone() }
            }));
            (all.workgroups, _) = grid(all.parts.iter().map(|part| part.workgroups as usize).sum(), profile);
        }
        all
    }

    pub fn workgroup_size(&self) -> [u32; 3] {
        self.parts.first().map_or([1; 3], |part| part.body.workgroup_size)
    }
}

/// Invocations per workgroup where nothing else decides.
const WORKGROUP: usize = 64;

/// What a workgroup of a kernel takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workgroup {
    pub invocations: u32,
    /// Lengths of arrays of vectors in workgroup memory, in scalars.
    pub vectors: [usize; 2],
    /// The same of f16, in scalars of two bytes.
    pub halves: [usize; 2],
    /// Scalars in workgroup memory besides.
    pub scalars: usize,
}

impl Workgroup {
    pub fn of(graph: &Graph, group: &Group, profile: &DeviceProfile) -> Self {
        match &group.domain {
            Domain::Map => Workgroup { invocations: WORKGROUP as u32, ..Workgroup::default() },
            Domain::Row { rows } => rows::workgroup(graph, group, rows, profile),
            Domain::Contract { sums, .. } => contract::workgroup(graph, sums, profile),
            Domain::Attention { node, .. } => attention::workgroup(graph, *node, profile),
        }
    }

    /// Bytes of workgroup memory of a kernel that runs one of these, at most.
    pub fn shared_bytes(all: &[Workgroup]) -> usize {
        let most = |of: fn(&Workgroup) -> usize| all.iter().map(of).max().unwrap_or(0);
        let words = most(|w| w.vectors[0]) + most(|w| w.vectors[1]) + most(|w| w.scalars);
        4 * words + 2 * (most(|w| w.halves[0]) + most(|w| w.halves[1]))
    }
}

/// Emits the kernel of a launch. `in_place` maps stored nodes to the parameters that they overwrite.
pub fn emit_launch(graph: &Graph, launch: &Launch, in_place: &BTreeMap<NodeId, NodeId>, profile: &DeviceProfile) -> Emitted {
    let mut kernels = launch.groups.iter().map(|group| emit(graph, group, in_place, profile));
    let Some(first) = kernels.next() else { unreachable!("a launch has groups") };
    Emitted::join(first, kernels, profile)
}

/// Emits the kernel of `group`. `in_place` maps stored nodes to the parameters that they overwrite.
fn emit(graph: &Graph, group: &Group, in_place: &BTreeMap<NodeId, NodeId>, profile: &DeviceProfile) -> Emitted {
    let mut kernel = KernelEmitter::new(graph, group, in_place, profile);
    let (family, workgroups) = match &group.domain {
        Domain::Map => ("map", rows::map(&mut kernel, profile)),
        Domain::Row { rows } => ("row", rows::row(&mut kernel, rows, profile)),
        Domain::Contract { sums, place } => ("contract", contract::contract(&mut kernel, sums, place, profile)),
        Domain::Attention { node, epilogue } => ("attention", attention::emit(&mut kernel, *node, epilogue.as_ref(), profile)),
    };
    let invocations = Workgroup::of(graph, group, profile).invocations;
    Emitted::new(family, kernel.e.b.finish([invocations, 1, 1]), kernel.bound, workgroups)
}

/// A kernel that writes a value which lies in memory, or counts, to a second place.
pub fn copy(graph: &Graph, from: NodeId, profile: &DeviceProfile) -> Emitted {
    let shape = &graph.ty(from).shape;
    let scalar = Scalar::stored(graph.ty(from).dtype, profile);
    let mut e = Evaluator::new(graph);
    let mut bound = Vec::new();
    if !matches!(graph.node(from).op, Op::Iota { .. }) {
        e.buffers.insert(from, e.b.buffer(Buffer::read(scalar)));
        bound.push(Bound::Read(from));
    }
    let target = e.b.buffer(Buffer::write(scalar));
    bound.push(Bound::Write(from));
    let (i, workgroups) = global_invocation(&mut e.b, shape.numel(), WORKGROUP, profile);
    let value = e.eval(from, &unravel(&i, shape));
    let index = e.b.index(&i);
    e.b.store(target, index, value);
    Emitted::new("map", e.b.finish([WORKGROUP as u32, 1, 1]), bound, workgroups)
}

struct KernelEmitter<'a> {
    graph: &'a Graph,
    group: &'a Group,
    e: Evaluator<'a>,
    bound: Vec<Bound>,
    /// The buffer of each stored node, in the group's order.
    targets: Vec<usize>,
}

impl<'a> KernelEmitter<'a> {
    fn new(graph: &'a Graph, group: &'a Group, in_place: &BTreeMap<NodeId, NodeId>, profile: &DeviceProfile) -> Self {
        let mut e = Evaluator::new(graph);
        let mut bound = Vec::new();
        let overwritten: BTreeSet<NodeId> = group.stored.iter().filter_map(|s| in_place.get(&s.node)).copied().collect();
        for &node in group.reads.difference(&overwritten) {
            let scalar = Scalar::stored(graph.ty(node).dtype, profile);
            e.buffers.insert(node, e.b.buffer(Buffer::read(scalar)));
            bound.push(Bound::Read(node));
        }
        let mut targets = Vec::new();
        for stored in &group.stored {
            let scalar = Scalar::stored(graph.ty(stored.node).dtype, profile);
            let buffer = e.b.buffer(Buffer::write(scalar));
            targets.push(buffer);
            bound.push(match in_place.get(&stored.node) {
                Some(&from) => {
                    if group.reads.contains(&from) {
                        e.buffers.insert(from, buffer);
                    }
                    Bound::InPlace { from, node: stored.node }
                }
                None => Bound::Write(stored.node),
            });
        }
        KernelEmitter { graph, group, e, bound, targets }
    }

    fn root_shape(&self) -> &'a [usize] {
        &self.graph.ty(self.group.root).shape
    }

    /// The root's index where that of `node`, which lies at `place`, is `at`.
    fn root_at(&self, node: NodeId, place: &Place, at: &[Index]) -> Vec<Index> {
        let root_shape = self.root_shape();
        match place {
            Place::Axes(axes) => {
                let mut root = vec![Index::default(); root_shape.len()];
                for (axis, index) in axes.iter().zip(at) {
                    if let Some(axis) = axis {
                        root[*axis] = index.clone();
                    }
                }
                root
            }
            Place::Linear => unravel(&ravel(at, &self.graph.ty(node).shape), root_shape),
        }
    }

    /// The index of `stored` where the root's is `at`.
    fn stored_at(&self, stored: &Stored, at: &[Index]) -> Vec<Index> {
        let shape = &self.graph.ty(stored.node).shape;
        match &stored.place {
            Place::Axes(axes) => axes.iter().map(|a| a.map_or(Index::default(), |a| at[a].clone())).collect(),
            Place::Linear => unravel(&ravel(at, self.root_shape()), shape),
        }
    }

    /// Evaluates the stored nodes `which` at the root's index `at`: position and value of each store.
    fn evaluate(&mut self, which: &[usize], at: &[Index]) -> Vec<(usize, ExprId, ExprId)> {
        which
            .iter()
            .map(|&i| {
                let stored = &self.group.stored[i];
                let own = self.stored_at(stored, at);
                let value = self.e.eval(stored.node, &own);
                let linear = ravel(&own, &self.graph.ty(stored.node).shape);
                (self.targets[i], self.e.b.index(&linear), value)
            })
            .collect()
    }

    /// Evaluates and stores the nodes `which` at the root's index `at`, which exists where `within` holds.
    fn store_within(&mut self, within: Option<ExprId>, which: &[usize], at: &[Index]) {
        let outer = self.e.begin_guard(within);
        if within.is_some() {
            self.e.b.begin_if();
        }
        let stores = self.evaluate(which, at);
        self.store(&stores);
        if let Some(within) = within {
            self.e.b.end_if(within);
        }
        self.e.end_guard(outer);
    }

    /// All values first, then all stores: a store may overwrite what another value reads.
    fn store(&mut self, stores: &[(usize, ExprId, ExprId)]) {
        for &(buffer, index, value) in stores {
            self.e.b.store(buffer, index, value);
        }
    }
}

/// A grid of at least `groups` workgroups, and whether it has more.
fn grid(groups: usize, profile: &DeviceProfile) -> ([u32; 3], bool) {
    let limit = profile.max_workgroups.map(|l| l as usize);
    let x = groups.clamp(1, limit[0]);
    let y = groups.div_ceil(x).clamp(1, limit[1]);
    let z = groups.div_ceil(x * y).max(1);
    ([x as u32, y as u32, z as u32], x * y * z > groups)
}

/// The invocation's number in a grid that covers `count` of them; invocations past the end return.
fn global_invocation(b: &mut Builder, count: usize, workgroup: usize, profile: &DeviceProfile) -> (Index, [u32; 3]) {
    let (workgroups, _) = grid(count.div_ceil(workgroup), profile);
    let i = b.builtin(Builtin::GlobalLinear { workgroups_x: workgroups[0], workgroups_y: workgroups[1] }, count.max(2));
    let total = workgroups.iter().map(|&w| w as usize).product::<usize>() * workgroup;
    if total > count {
        return_past(b, &i, count);
    }
    (i, workgroups)
}

/// The workgroup's number in a grid that covers `count` of them; workgroups past the end return.
fn workgroup_number(b: &mut Builder, count: usize, profile: &DeviceProfile) -> (Index, [u32; 3]) {
    let (workgroups, surplus) = grid(count, profile);
    let i = b.builtin(Builtin::GroupLinear { workgroups_x: workgroups[0], workgroups_y: workgroups[1] }, count);
    if surplus {
        return_past(b, &i, count);
    }
    (i, workgroups)
}

fn return_past(b: &mut Builder, i: &Index, count: usize) {
    let (position, end) = (b.index(i), b.i32(count as i32));
    let past = b.compare(CompareOp::Ge, position, end);
    b.begin_if();
    b.stmt(Stmt::Return);
    b.end_if(past);
}
