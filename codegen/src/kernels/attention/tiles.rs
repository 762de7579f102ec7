//! How attention is divided among workgroups: which tiles there are, what they take, and which are the fastest.

use std::ops::Range;

use meganeura_ir::AttentionOperand;

use super::tile::{interleaves, pitch, vector_stride};
use crate::attention::{Attention, Role};
use crate::profile::{DeviceKind, DeviceProfile};

/// Invocations of a workgroup.
pub const WORKGROUP: usize = 128;

/// A workgroup keeps a tile of rows of one side, queries or keys, and passes over tiles of the other side's. Its invocations form a grid; each
/// computes `elements.0 x elements.1` scores of a pair of tiles. Of both sides `depth` columns at a time lie in workgroup memory, and for the
/// products with weights as many rows of the side that is passed over as the grid is wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    pub grid: (usize, usize),
    pub elements: (usize, usize),
    depth: usize,
}

const fn tiling(grid: (usize, usize), elements: (usize, usize), depth: usize) -> Tiles {
    Tiles { grid, elements, depth }
}

/// From large tiles, which need the fewest loads, to small ones, which fill a device with little work or fit into little memory. The depths
/// are those that were fastest.
const TILES: [Tiles; 11] = [
    tiling((16, 8), (4, 4), 16),
    tiling((8, 16), (5, 2), 16),
    tiling((8, 16), (4, 2), 16),
    tiling((8, 16), (3, 2), 16),
    tiling((8, 16), (2, 4), 32),
    tiling((8, 16), (2, 2), 32),
    tiling((8, 16), (1, 4), 32),
    tiling((8, 16), (1, 2), 32),
    tiling((16, 8), (2, 2), 16),
    tiling((16, 8), (1, 2), 16),
    tiling((32, 4), (1, 2), 16),
];

/// The most accumulators that an invocation holds.
const MAX_ACCUMULATORS: usize = 192;

impl Tiles {
    /// Rows of a tile that a workgroup keeps.
    pub fn kept(&self) -> usize {
        self.grid.0 * self.elements.0
    }

    /// Rows of a tile that it passes over.
    pub fn passed(&self) -> usize {
        self.grid.1 * self.elements.1
    }

    /// Columns of a row of `size` elements that are in workgroup memory at a time.
    pub fn parts(&self, size: usize) -> Vec<Range<usize>> {
        (0..size).step_by(self.depth).map(|start| start..(start + self.depth).min(size)).collect()
    }

    /// Columns of a tile whose columns are those of a result of `size` columns: each invocation reads whole vectors.
    pub fn whole(&self, size: usize) -> usize {
        size.next_multiple_of(vector_stride(self.grid.1))
    }

    /// The distance between columns of a result's row that one invocation computes.
    pub fn column_stride(&self, size: usize) -> usize {
        if interleaves(size, self.grid.1) { size / 2 } else { vector_stride(self.grid.1) }
    }

    /// Words of workgroup memory for one stage.
    pub fn stage_words(&self, spec: &Attention) -> usize {
        let (kept, lanes) = (self.kept(), self.grid.1);
        let words = |rows: usize, columns: usize| rows * pitch(columns);
        let sizes = Sizes::of(spec);
        let depth = sizes.scored.iter().map(|&size| size.min(self.depth)).max().unwrap_or(0);
        let weighted = sizes.weighted.iter().map(|&size| words(lanes, self.whole(size)) + words(kept, lanes));
        (words(kept, depth) + words(self.passed(), depth)).max(weighted.sum())
    }

    /// The tile through which the invocations of a row agree.
    pub fn shared_row(&self) -> (usize, usize) {
        (self.kept(), self.grid.1)
    }

    /// Words of workgroup memory.
    pub fn words(&self, spec: &Attention) -> usize {
        let (rows, columns) = self.shared_row();
        let row = if spec.role == Role::Output { rows * pitch(columns) } else { 0 };
        2 * self.stage_words(spec) + row
    }

    fn accumulators(&self, spec: &Attention) -> usize {
        let sizes = Sizes::of(spec);
        let weighted: usize = sizes.weighted.iter().map(|&size| self.whole(size) / self.grid.1).sum();
        self.elements.0 * (sizes.scored.len() * self.elements.1 + weighted)
    }

    fn fits(&self, spec: &Attention, profile: &DeviceProfile) -> bool {
        self.words(spec) * 4 <= profile.max_workgroup_bytes as usize
    }

    /// An estimate of the cycles that a kernel takes: a multiprocessor does the arithmetic of its share of the workgroups, and where it has but
    /// one waits for each stage. The constants are measured on an H200.
    fn cycles(&self, spec: &Attention, profile: &DeviceProfile) -> usize {
        const LANES: usize = 128;
        const WAIT: usize = 460;
        let (kept, passed, sizes) = (self.kept(), self.passed(), Sizes::of(spec));
        let (groups, pairs) = if keeps_keys(spec.role) {
            let batch: usize = spec.own_batch().iter().product();
            (batch * spec.keys.div_ceil(kept), spec.sharing() * spec.queries.div_ceil(passed))
        } else {
            (spec.batch.iter().product::<usize>() * spec.queries.div_ceil(kept), spec.keys.div_ceil(passed))
        };
        let weighted = sizes.weighted.iter().map(|&size| self.whole(size));
        let columns: usize = sizes.scored.iter().copied().chain(weighted).sum();
        // The inner loops reach 55 per cent of the peak less what they read from workgroup memory.
        let (rows, own) = self.elements;
        let arithmetic = kept * passed * columns / LANES * (10 * rows * own + 6 * (rows + own)) * 10 / (55 * rows * own);
        let stages = sizes.scored.iter().map(|&size| size.div_ceil(self.depth)).sum::<usize>() + own + 1;
        let share = groups.div_ceil(profile.compute_units as usize);
        pairs * (share * arithmetic).max(arithmetic + stages * WAIT)
    }
}

/// Columns of the products of a kernel: those that are summed for each score, and those of the results that weights are for.
struct Sizes {
    scored: Vec<usize>,
    weighted: Vec<usize>,
}

impl Sizes {
    fn of(spec: &Attention) -> Self {
        let (size, value_size) = (spec.size, spec.value_size);
        let (scored, weighted) = match spec.role {
            Role::Output | Role::LogSumExp => (vec![size], vec![value_size]),
            Role::Gradient(AttentionOperand::Query) => (vec![size, value_size], vec![size]),
            Role::Gradient(_) => (vec![size, value_size], vec![size, value_size]),
        };
        Sizes { scored, weighted }
    }
}

/// Whether the kernels of `role` keep keys and pass over queries.
fn keeps_keys(role: Role) -> bool {
    matches!(role, Role::Gradient(AttentionOperand::Key | AttentionOperand::Value))
}

/// The fastest tiles of those that fit into workgroup memory.
pub fn tiles(spec: &Attention, profile: &DeviceProfile) -> Option<Tiles> {
    if profile.kind == DeviceKind::Software
        || spec.role == Role::LogSumExp
        || (profile.max_workgroup_invocations as usize) < WORKGROUP
    {
        return None;
    }
    let fitting = TILES.iter().filter(|tiles| tiles.fits(spec, profile) && tiles.accumulators(spec) <= MAX_ACCUMULATORS);
    fitting.min_by_key(|tiles| tiles.cycles(spec, profile)).copied()
}
