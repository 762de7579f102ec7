//! How a contraction is divided, by its sizes and the device.

use meganeura_ir::{DType, Graph, NodeId, Op};

use super::cooperative::{MATRIX_TILINGS, MatrixTiling};
use super::tiled::{TILINGS, Tiling};
use crate::access::contract_shape;
use crate::fuse::Sum;
use crate::kernels::{WORKGROUP, Workgroup};
use crate::profile::{DeviceKind, DeviceProfile};

/// How the result is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Each invocation computes `m x n` elements from its own loads.
    Direct { m: usize, n: usize },
    /// For a result that is thin on one side: each workgroup computes `across` positions of the other side, `lanes` invocations each, which
    /// share the sum.
    Lanes { across: usize, lanes: usize },
    /// Through workgroup memory.
    Tiled(Tiling),
    /// Through workgroup memory and matrix units.
    Cooperative(MatrixTiling),
}

/// Positions on the thin side of a result that lanes compute, in registers.
const THIN: usize = 4;
/// Sums shorter than this are not divided.
const SHORT_SUM: usize = 16;
/// Invocations of a workgroup whose lanes share sums.
const LANES_WORKGROUP: usize = 256;

#[cfg(test)]
thread_local! {
    /// The one of [`MATRIX_TILINGS`] that a test tries, whatever it takes.
    pub(crate) static ONLY_MATRIX_TILING: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// The schedule of a contraction, whose sums are of one shape.
pub(super) fn schedule(graph: &Graph, sums: &[Sum], profile: &DeviceProfile) -> Schedule {
    let terms = || sums.iter().flat_map(|sum| &sum.terms);
    let shape = contract_shape(graph, sums[0].terms[0]);
    let [batch, m, n] = [&shape.batch, &shape.m, &shape.n].map(|d| d.iter().product::<usize>());
    let k = terms().map(|&term| contract_shape(graph, term).k.iter().product::<usize>()).sum();
    let sizes = [batch, m, n, k];
    if profile.kind == DeviceKind::Software {
        return Schedule::Direct { m: m.clamp(1, 4), n: n.clamp(1, 4) };
    }
    if k >= SHORT_SUM && m.min(n) <= THIN && profile.max_workgroup_invocations >= LANES_WORKGROUP as u32 {
        let wanted = (batch * m.max(n)).div_ceil(2 * profile.compute_units as usize).next_power_of_two();
        let lanes = (LANES_WORKGROUP / wanted.min(LANES_WORKGROUP)).clamp(4, 64).min(k.next_power_of_two() / 4);
        return Schedule::Lanes { across: LANES_WORKGROUP / lanes, lanes };
    }
    if k >= SHORT_SUM && m > THIN && n > THIN {
        let fitting = TILINGS
            .iter()
            .filter(|tiling| tiling.fits(sums.len(), profile))
            .map(|tiling| (tiling.time(sizes, profile), Schedule::Tiled(*tiling)));
        #[cfg(test)]
        let fitting = fitting.filter(|_| ONLY_MATRIX_TILING.get().is_none());
        // Elements of a window are loaded one by one, which takes longer than matrix units save.
        let halvable = terms().all(|&term| {
            let float = matches!(graph.ty(term).dtype, DType::F32 | DType::F16 | DType::BF16);
            float && matches!(graph.node(term).op, Op::Dot(_))
        });
        let matrix = MATRIX_TILINGS.iter().filter(|tiling| halvable && tiling.fits(sums.len(), profile));
        #[cfg(test)]
        let matrix = matrix.filter(|tiling| ONLY_MATRIX_TILING.get().is_none_or(|only| **tiling == MATRIX_TILINGS[only]));
        let matrix = matrix.map(|tiling| (tiling.time(sizes, profile), Schedule::Cooperative(*tiling)));
        if let Some((_, best)) = fitting.chain(matrix).min_by_key(|(time, _)| *time) {
            return best;
        }
    }
    let outputs = batch * m * n;
    let side = |size: usize| if outputs >= 1 << 18 { size.clamp(1, 4) } else { 1 };
    Schedule::Direct { m: side(m), n: side(n) }
}

/// Whether the contraction `dot` would run on matrix units, if it were alone.
pub fn takes_matrix_units(graph: &Graph, dot: NodeId, profile: &DeviceProfile) -> bool {
    let alone = Sum { value: dot, terms: vec![dot] };
    matches!(schedule(graph, &[alone], profile), Schedule::Cooperative(_))
}

/// What a workgroup of the kernel takes.
pub fn workgroup(graph: &Graph, sums: &[Sum], profile: &DeviceProfile) -> Workgroup {
    let shape = contract_shape(graph, sums[0].terms[0]);
    let thin = [&shape.m, &shape.n].map(|d| d.iter().product::<usize>()).into_iter().min().unwrap_or(1);
    let none = [0, 0];
    let (invocations, vectors, halves, scalars) = match schedule(graph, sums, profile) {
        Schedule::Direct { .. } => (WORKGROUP, none, none, 0),
        Schedule::Lanes { .. } => (LANES_WORKGROUP, none, none, LANES_WORKGROUP * thin * sums.len()),
        Schedule::Tiled(tiling) => (tiling.invocations(), tiling.shared(), none, tiling.exchange()),
        Schedule::Cooperative(tiling) => (tiling.invocations(), none, tiling.halves(), tiling.scalars(sums.len(), profile)),
    };
    Workgroup { invocations: invocations as u32, vectors, halves, scalars }
}
