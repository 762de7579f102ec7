//! The map and row families.

use crate::body::{Builder, Builtin};
use crate::eval::Lanes;
use crate::fuse::Group;
use crate::index::{Index, unravel};
use crate::kernels::{KernelEmitter, WORKGROUP, Workgroup, global_invocation, workgroup_number};
use crate::profile::{DeviceKind, DeviceProfile};

use meganeura_ir::{CompareOp, Graph, Op};

/// Invocations that keep a multiprocessor busy.
const BUSY: usize = 2048;
/// The most elements that an invocation maps.
const MOST: usize = 16;

/// One invocation per element of the root, or several elements where more workgroups would only take time to begin.
pub fn map(kernel: &mut KernelEmitter, profile: &DeviceProfile) -> [u32; 3] {
    let shape = kernel.root_shape();
    let count: usize = shape.iter().product();
    let each = match profile.kind {
        DeviceKind::Software => 1,
        DeviceKind::Generic => (count / (BUSY * profile.compute_units as usize)).clamp(1, MOST),
    };
    let across = count.div_ceil(each);
    let b = &mut kernel.e.b;
    let (i, workgroups) = global_invocation(b, across, WORKGROUP, profile);
    let zero = b.i32(0);
    let (token, turn) = b.begin_for(zero, each, 1);
    let flat = turn.scale(across as i64).add(&i);
    // With one element each, no invocation is left that has none.
    let within = if each > 1 { b.below(&flat, count) } else { None };
    let flat = if within.is_some() { flat.bounded(0, count as i64 - 1) } else { flat };
    let all: Vec<usize> = (0..kernel.group.stored.len()).collect();
    kernel.store_within(within, &all, &unravel(&flat, shape));
    kernel.e.b.end_for(token);
    workgroups
}

/// Rows over the root's axes `rows`.
pub fn row(kernel: &mut KernelEmitter, rows: &[usize], profile: &DeviceProfile) -> [u32; 3] {
    let shape = kernel.root_shape();
    let row_shape: Vec<usize> = rows.iter().map(|&a| shape[a]).collect();
    let inner: Vec<usize> = (0..shape.len()).filter(|a| !rows.contains(a)).collect();
    let inner_shape: Vec<usize> = inner.iter().map(|&a| shape[a]).collect();
    let count: usize = row_shape.iter().product();
    let lanes = lanes(kernel.graph, kernel.group, count, inner_shape.iter().product(), profile);
    let elements = kernel.graph.ty(kernel.group.root).shape.numel();
    let (per_row, per_element): (Vec<usize>, Vec<usize>) = (0..kernel.group.stored.len())
        .partition(|&i| inner.is_empty() || kernel.graph.ty(kernel.group.stored[i].node).shape.numel() != elements);
    let at = |row: &[Index], element: &[Index]| {
        let mut at = vec![Index::default(); shape.len()];
        rows.iter().zip(row).chain(inner.iter().zip(element)).for_each(|(&axis, index)| at[axis] = index.clone());
        at
    };
    if lanes == 1 {
        let (i, workgroups) = global_invocation(&mut kernel.e.b, count, WORKGROUP, profile);
        let row = unravel(&i, &row_shape);
        let stores = kernel.evaluate(&per_row, &at(&row, &vec![Index::default(); inner.len()]));
        kernel.store(&stores);
        if !per_element.is_empty() {
            let (tokens, element) = kernel.e.b.begin_loops(&inner_shape);
            let stores = kernel.evaluate(&per_element, &at(&row, &element));
            kernel.store(&stores);
            kernel.e.b.end_loops(tokens);
        }
        return workgroups;
    }
    let (i, workgroups) = workgroup_number(&mut kernel.e.b, count, profile);
    let local = kernel.e.b.builtin(Builtin::Local, lanes);
    kernel.e.lanes = Some(Lanes { local: local.clone(), count: lanes });
    let row = unravel(&i, &row_shape);
    let stores = kernel.evaluate(&per_row, &at(&row, &vec![Index::default(); inner.len()]));
    if !stores.is_empty() {
        let first = is_first(&mut kernel.e.b, &local);
        kernel.e.b.begin_if();
        kernel.store(&stores);
        kernel.e.b.end_if(first);
    }
    if !per_element.is_empty() {
        let start = kernel.e.b.index(&local);
        let (token, r) = kernel.e.b.begin_for(start, inner_shape.iter().product(), lanes);
        let stores = kernel.evaluate(&per_element, &at(&row, &unravel(&r, &inner_shape)));
        kernel.store(&stores);
        kernel.e.b.end_for(token);
    }
    workgroups
}

fn is_first(b: &mut Builder, local: &Index) -> crate::body::ExprId {
    let (local, zero) = (b.index(local), b.i32(0));
    b.compare(CompareOp::Eq, local, zero)
}

/// What a workgroup of the kernel takes.
pub fn workgroup(graph: &Graph, group: &Group, rows: &[usize], profile: &DeviceProfile) -> Workgroup {
    let shape = &graph.ty(group.root).shape;
    let count: usize = rows.iter().map(|&a| shape[a]).product();
    let reductions =
        group.nodes.iter().filter(|n| matches!(graph.node(**n).op, Op::Reduce { .. } | Op::ArgReduce { .. })).count();
    match lanes(graph, group, count, shape.numel() / count.max(1), profile) {
        1 => Workgroup { invocations: WORKGROUP as u32, ..Workgroup::default() },
        // An index of the largest element takes an array besides the element's.
        lanes => Workgroup { invocations: lanes as u32, scalars: 2 * reductions * lanes, ..Workgroup::default() },
    }
}

/// Passes over a row that one invocation may make within the device's limit of iterations.
const PASSES: u64 = 16;

/// Invocations per row: one where rows abound or the device is a CPU, else enough to share the longest pass.
fn lanes(graph: &Graph, group: &Group, rows: usize, inner: usize, profile: &DeviceProfile) -> usize {
    let longest = group
        .nodes
        .iter()
        .filter(|n| matches!(graph.node(**n).op, Op::Reduce { .. } | Op::ArgReduce { .. }))
        .map(|&n| graph.ty(graph.node(n).operands[0]).shape.numel() / graph.ty(n).shape.numel())
        .max()
        .unwrap_or(1)
        .max(inner);
    if profile.kind == DeviceKind::Software && longest as u64 <= profile.max_loop_iterations / PASSES {
        return 1;
    }
    if longest <= 32 || inner <= 1 && rows >= 1 << 14 && longest <= 1024 {
        return 1;
    }
    longest.next_power_of_two().clamp(32, (profile.max_workgroup_invocations as usize).min(256))
}
