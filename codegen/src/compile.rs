//! The pipeline: decompose, saturate, fuse, emit, plan.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

use meganeura_ir::{CompareOp, DType, Graph, GraphError, NodeId, Op, ReduceOp, Shape, TensorType, Verified, parallel_map};
use serde::{Deserialize, Serialize};

use crate::classes::classes;
use crate::frugal::frugal_order;
use crate::fuse::fuse;
use crate::halve::halve;
use crate::in_place::in_place;
use crate::kernels::{Emitted, attention, copy, emit_launch};
use crate::order::{Launch, edges, order};
use crate::plan::{Layout, layout, place_barriers};
use crate::program::{Access, Dispatch, Kernel, Memory, Program, Region, Space};
use crate::recompute::Sequence;
use crate::saturate::{Limits, Report, SaturateError, saturate};
use crate::{DeviceProfile, wgsl};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CompileOptions {
    /// Limits of equality saturation; `None` leaves the graph as it is.
    pub saturate: Option<Limits>,
    /// The most device memory that the program may take, in bytes. To fit, it computes values again instead of keeping them.
    pub memory_limit: Option<u64>,
}

impl Default for CompileOptions {
    fn default() -> Self {
        CompileOptions { saturate: Some(Limits::default()), memory_limit: None }
    }
}

/// Why a graph cannot become a program for a device.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Saturate(#[from] SaturateError),
    #[error("a tensor {ty} needs {bytes} bytes, more than the {limit} that the device can bind")]
    TensorTooLarge { ty: TensorType, bytes: u64, limit: u64 },
    #[error("a parameter is updated to the value of parameter {name:?}, which the same run updates")]
    UpdateFromUpdated { name: String },
    #[error(
        "the program does not fit {} MiB of device memory; the smallest that it can do with is {} MiB",
        limit >> 20,
        reachable.div_ceil(1 << 20)
    )]
    MemoryLimit { limit: u64, reachable: u64 },
    #[error("the kernel `{label}` is not valid WGSL, which is a bug: {message}\n{wgsl}")]
    InvalidShader { label: String, message: String, wgsl: String },
    #[error("the kernel `{label}` needs {needed} {what}, the device offers {limit}")]
    KernelLimit { label: String, what: &'static str, needed: u64, limit: u64 },
}

/// A program and how it came about.
#[derive(Debug)]
pub struct Compiled {
    pub program: Program,
    pub report: CompileReport,
    /// How long each stage took.
    pub stages: Vec<(&'static str, Duration)>,
}

/// How long stages take that follow each other.
struct Stopwatch {
    since: Instant,
    stages: Vec<(&'static str, Duration)>,
}

impl Stopwatch {
    fn start() -> Self {
        Stopwatch { since: Instant::now(), stages: Vec::new() }
    }

    /// Ends the stage `name`, which began where the last one ended.
    fn lap(&mut self, name: &'static str) {
        let now = Instant::now();
        self.stages.push((name, now - self.since));
        self.since = now;
    }
}

/// What each stage did, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileReport {
    /// Live nodes after decomposition.
    pub nodes: usize,
    pub saturation: Option<Report>,
    /// Live nodes after saturation.
    pub saturated_nodes: usize,
    pub kernels: usize,
    pub dispatches: usize,
    pub barriers: usize,
    /// Dispatches that compute again what was dropped to save memory.
    pub recomputed: usize,
    /// Device bytes of each buffer of each space.
    pub memory: Memory,
    /// The most bytes of intermediate results in use at one dispatch: no placement takes less.
    pub bound: u64,
}

impl CompileReport {
    /// Bytes of each space.
    pub fn spaces(&self) -> impl Iterator<Item = (Space, u64)> + '_ {
        Space::ALL.into_iter().map(|space| (space, self.memory.space(space).iter().sum()))
    }

    /// Bytes that intermediate results take.
    pub fn activations(&self) -> u64 {
        self.memory.scratch.iter().sum()
    }
}

impl fmt::Display for CompileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} nodes, {} after saturation", self.nodes, self.saturated_nodes)?;
        if let Some(report) = &self.saturation {
            writeln!(f, "{report}")?;
        }
        let (dispatches, kernels, phases) = (self.dispatches, self.kernels, self.barriers + 1);
        writeln!(
            f,
            "{dispatches} dispatches of {kernels} kernels in {phases} barrier groups, {} computed again",
            self.recomputed
        )?;
        for (space, bytes) in self.spaces() {
            writeln!(f, "{:<12}{bytes:>14} bytes", space.name())?;
        }
        let (bound, ratio) = (self.bound, self.activations() as f64 / self.bound.max(1) as f64);
        writeln!(f, "{:<12}{:>14} bytes on the device", "peak", self.memory.total())?;
        writeln!(f, "at most {bound} bytes of intermediate results are in use at once; their space is {ratio:.3} times that")
    }
}

/// Compiles a verified graph for a device. What exporters write for composites is found before, by [`raise`](crate::raise).
pub fn compile(graph: &Verified, profile: &DeviceProfile, options: &CompileOptions) -> Result<Compiled, CompileError> {
    let mut stopwatch = Stopwatch::start();
    let graph = split_concats(&lowered(graph, profile)?, profile.max_storage_bindings as usize / 2)?;
    let nodes = graph.live().len();
    stopwatch.lap("decompose");
    let (graph, saturation) = match &options.saturate {
        Some(limits) => {
            let (graph, report) = saturate(&graph, limits)?;
            (lowered(&graph, profile)?, Some(report))
        }
        None => (graph, None),
    };
    let saturated_nodes = graph.live().len();
    stopwatch.lap("saturate");
    let graph = guard_scatters(&halve(&graph, profile)?)?;
    let groups = fuse(&graph, profile);
    stopwatch.lap("fuse");
    let edges = edges(&graph, &groups);
    let in_place = in_place(&graph, &groups, &edges);
    let launches = order(&graph, groups.clone(), &edges, &in_place, profile);
    stopwatch.lap("order");
    let mut launched = Launched::new(&graph, launches, &in_place, profile)?;
    let Launched { launches, layout, emitted, .. } = &launched;
    let sequence = Sequence { graph: &graph, launches, emitted, layout, profile };
    if options.memory_limit.is_some_and(|limit| !sequence.fits(limit)) {
        launched = Launched::new(&graph, frugal_order(&graph, groups, &edges, profile), &in_place, profile)?;
    }
    let Launched { launches, layout, mut emitted, mut first } = launched;
    let mut labels: Vec<String> = launches.iter().map(|launch| label(&graph, launch)).collect();
    stopwatch.lap("emit");
    let sequence = Sequence { graph: &graph, launches: &launches, emitted: &emitted, layout: &layout, profile };
    let (mut schedule, placement) = sequence.fit(options.memory_limit)?;
    let recomputed = schedule.len() - launches.len();
    let mut regions = placement.regions;
    for copy_of in &layout.copies {
        let source = layout.home.get(&copy_of.from).or_else(|| placement.copied.get(&copy_of.from));
        regions.push(source.into_iter().chain([&copy_of.to]).copied().collect());
        schedule.push(emitted.len());
        first.push(emitted.len());
        labels.push("copy".into());
        emitted.push(copy(&graph, copy_of.from, profile));
    }
    stopwatch.lap("place");

    let firsts: Vec<usize> = (0..emitted.len()).filter(|&i| first[i] == i).collect();
    let texts = parallel_map(firsts.len(), |i| {
        let kernel = &emitted[firsts[i]];
        wgsl::print(&kernel.parts, &kernel.buffers, kernel.workgroups)
    });
    stopwatch.lap("print");
    // The first of each text, and by the first of a class the number of its text.
    let mut distinct: Vec<usize> = Vec::new();
    let mut by_text: HashMap<&str, usize> = HashMap::new();
    let number = |(i, text)| {
        let number = *by_text.entry(text).or_insert_with(|| {
            distinct.push(i);
            distinct.len() - 1
        });
        (firsts[i], number)
    };
    let numbers: HashMap<usize, usize> = texts.iter().map(String::as_str).enumerate().map(number).collect();
    let finished = parallel_map(distinct.len(), |i| {
        let (kernel, text) = (firsts[distinct[i]], &texts[distinct[i]]);
        let label = format!("{} {}", emitted[kernel].family, labels[kernel]);
        finish_kernel(&emitted[kernel], label, text.clone(), profile)
    });
    let kernels: Vec<Kernel> = finished.into_iter().collect::<Result<_, _>>()?;
    stopwatch.lap("check");
    let dispatch = |(&step, regions): (&usize, Vec<Region>)| {
        let workgroups = emitted[step].workgroups;
        Dispatch { kernel: numbers[&first[step]], regions, workgroups, barrier: false }
    };
    let mut dispatches: Vec<Dispatch> = schedule.iter().zip(regions).map(dispatch).collect();
    place_barriers(&mut dispatches, |kernel| kernels[kernel].access.clone());
    stopwatch.lap("barriers");
    let program = Program {
        kernels,
        dispatches,
        memory: Memory { scratch: placement.scratch, ..layout.memory },
        inputs: layout.inputs,
        outputs: layout.outputs,
        parameters: layout.parameters,
        constants: layout.constants,
        stores_halves: profile.stores_halves(DType::F16),
    };
    let report = CompileReport {
        nodes,
        saturation,
        saturated_nodes,
        kernels: program.kernels.len(),
        dispatches: program.dispatches.len(),
        barriers: program.dispatches.iter().filter(|d| d.barrier).count(),
        memory: program.memory.clone(),
        bound: placement.live,
        recomputed,
    };
    Ok(Compiled { program, report, stages: stopwatch.stages })
}

/// Launches with the kernels of each, and what these leave where.
struct Launched {
    launches: Vec<Launch>,
    layout: Layout,
    emitted: Vec<Emitted>,
    /// Per kernel: the first one that differs in nothing but the values it reads and writes, itself if there is none before.
    first: Vec<usize>,
}

impl Launched {
    fn new(
        graph: &Graph,
        launches: Vec<Launch>,
        in_place: &BTreeMap<NodeId, NodeId>,
        profile: &DeviceProfile,
    ) -> Result<Self, CompileError> {
        let layout = layout(graph, &launches, in_place, profile)?;
        let members = classes(graph, &launches, in_place);
        let firsts: Vec<usize> = (0..members.len()).filter(|&i| members[i].first == i).collect();
        let kernels = parallel_map(firsts.len(), |i| emit_launch(graph, &launches[firsts[i]], in_place, profile));
        let kernels: HashMap<usize, Emitted> = firsts.into_iter().zip(kernels).collect();
        let emitted =
            members.iter().map(|member| kernels[&member.first].over(&members[member.first].nodes, &member.nodes)).collect();
        Ok(Launched { launches, layout, emitted, first: members.iter().map(|member| member.first).collect() })
    }
}

/// Rows from which it pays to know which a scatter touches, and elements of a row.
const SCATTER_ROWS: usize = 256;
const SCATTER_INNER: usize = 16;

/// Gives large scatters a condition for each row, whether any index names it: the others need not look for theirs.
fn guard_scatters(graph: &Graph) -> Result<Graph, GraphError> {
    graph.rewrite(|g, node, operands| match &node.op {
        Op::Scatter { axis, .. } if node.ty.shape[*axis] >= SCATTER_ROWS && inner(&node.ty, *axis) >= SCATTER_INNER => {
            let rows = node.ty.shape[*axis];
            let count = g.ty(operands[1]).shape.numel();
            let pairs = Shape::from([rows, count]);
            let flat = g.push(Op::Reshape([count].into()), &[operands[1]])?;
            let index = g.push(Op::Broadcast { shape: pairs.clone(), axes: vec![1] }, &[flat])?;
            let row = g.push(Op::Iota { dtype: g.ty(index).dtype, shape: pairs, axis: 0 }, &[])?;
            let equal = g.push(Op::Compare(CompareOp::Eq), &[row, index])?;
            let touched = g.reduce(ReduceOp::Max, equal, &[1])?;
            let touched = g.push(Op::Broadcast { shape: node.ty.shape.clone(), axes: vec![*axis] }, &[touched])?;
            let scattered = g.push(node.op.clone(), operands)?;
            g.push(Op::Select, &[touched, scattered, operands[0]])
        }
        op => g.push(op.clone(), operands),
    })
}

/// Elements for each position along `axis`.
fn inner(ty: &TensorType, axis: usize) -> usize {
    ty.shape.numel() / ty.shape[axis].max(1)
}

/// Primitives, and the composites that have a kernel on such a device.
fn lowered(graph: &Graph, profile: &DeviceProfile) -> Result<Graph, GraphError> {
    let kernels: Vec<bool> = graph.ids().map(|id| attention::has_kernel(graph, id, profile)).collect();
    let mut live = graph.live().into_iter().filter(|&id| !graph.node(id).op.is_leaf());
    graph.rewrite(|g, node, operands| {
        let has_kernel = live.next().is_some_and(|id| kernels[id.index()]);
        match &node.op {
            Op::Composite(c) if !has_kernel => c.decompose(g, operands),
            op => g.push(op.clone(), operands),
        }
    })
}

/// Nests concatenations so that none has more than `limit` operands: each may become a binding.
fn split_concats(graph: &Graph, limit: usize) -> Result<Graph, GraphError> {
    graph.rewrite(|g, node, operands| match &node.op {
        Op::Concat { axis } if operands.len() > limit => {
            let mut parts = operands.to_vec();
            while parts.len() > limit {
                parts = parts
                    .chunks(limit)
                    .map(|chunk| match chunk {
                        [only] => Ok(*only),
                        chunk => g.push(Op::Concat { axis: *axis }, chunk),
                    })
                    .collect::<Result<_, GraphError>>()?;
            }
            g.push(Op::Concat { axis: *axis }, &parts)
        }
        op => g.push(op.clone(), operands),
    })
}

/// Stands between the labels of the parts of a kernel.
const PARTS: &str = " |";

/// The ops of a launch, for people.
fn label(graph: &Graph, launch: &Launch) -> String {
    const MAX: usize = 80;
    let mut label = String::new();
    for (i, group) in launch.groups.iter().enumerate() {
        if i > 0 {
            label.push_str(PARTS);
        }
        for &node in &group.nodes {
            let op = &graph.node(node).op;
            if matches!(op, Op::Reshape(_) | Op::Broadcast { .. }) && node != group.root {
                continue;
            }
            if label.len() > MAX * (i + 1) {
                label.push_str(" ...");
                break;
            }
            if !label.is_empty() {
                label.push(' ');
            }
            label.push_str(op.name());
        }
    }
    label
}

/// Checks a kernel against the device's limits, and its text with naga.
fn finish_kernel(kernel: &Emitted, label: String, wgsl: String, profile: &DeviceProfile) -> Result<Kernel, CompileError> {
    let workgroup_size = kernel.workgroup_size();
    let bodies = || kernel.parts.iter().map(|part| &part.body);
    let iterations = bodies().map(|body| body.iterations()).max().unwrap_or(0);
    let checks = [
        ("storage buffers", kernel.buffers.len() as u64, u64::from(profile.max_storage_bindings)),
        ("bytes of workgroup memory", wgsl::shared_bytes(bodies()), u64::from(profile.max_workgroup_bytes)),
        (
            "invocations per workgroup",
            workgroup_size.iter().map(|&s| u64::from(s)).product(),
            u64::from(profile.max_workgroup_invocations),
        ),
        ("loop iterations per invocation", iterations, profile.max_loop_iterations),
        ("workgroups", u64::from(kernel.workgroups[2]), u64::from(profile.max_workgroups[2])),
    ];
    if let Some(&(what, needed, limit)) = checks.iter().find(|(_, needed, limit)| needed > limit) {
        return Err(CompileError::KernelLimit { label, what, needed, limit });
    }
    validate(&label, &wgsl, profile)?;
    let access = kernel.buffers.iter().map(|b| if b.writable { Access::ReadWrite } else { Access::Read }).collect();
    let wgsl = format!("// {}\n\n{wgsl}", label.replace(PARTS, "\n// |"));
    Ok(Kernel { label, wgsl, workgroup_size, access })
}

fn validate(label: &str, wgsl: &str, profile: &DeviceProfile) -> Result<(), CompileError> {
    let invalid = |message: String| CompileError::InvalidShader { label: label.into(), message, wgsl: wgsl.into() };
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|e| invalid(e.emit_to_string(wgsl)))?;
    let capabilities = match profile.matrix_unit {
        Some(_) => naga::valid::Capabilities::SHADER_FLOAT16 | naga::valid::Capabilities::COOPERATIVE_MATRIX,
        None => naga::valid::Capabilities::empty(),
    };
    naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities)
        .validate(&module)
        .map_err(|e| invalid(e.emit_to_string(wgsl)))?;
    Ok(())
}
