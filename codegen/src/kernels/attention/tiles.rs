//! How attention is divided among workgroups: which tiles there are, what they take, and which are the fastest.

use std::ops::Range;

use meganeura_ir::AttentionOperand;

use super::tile::{VECTOR, pitch};
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

const GRIDS: [(usize, usize); 3] = [(8, 16), (16, 8), (32, 4)];
const ROWS: [usize; 8] = [9, 8, 6, 5, 4, 3, 2, 1];
const COLUMNS: [usize; 3] = [4, 2, 1];
const DEPTHS: [usize; 2] = [32, 16];

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
        size.next_multiple_of(VECTOR * self.grid.1)
    }

    /// Words of workgroup memory for one stage.
    pub fn stage_words(&self, spec: &Attention) -> usize {
        let (kept, passed, lanes) = (self.kept(), self.passed(), self.grid.1);
        let words = |rows: usize, columns: usize| rows * pitch(columns);
        let depth = self.depth.min(spec.size.max(spec.value_size));
        let products = words(kept, depth) + words(passed, depth);
        let weighted = |size: usize| words(lanes, self.whole(size)) + words(kept, lanes);
        let weighted = match spec.role {
            Role::Output | Role::LogSumExp => weighted(spec.value_size),
            Role::Gradient(AttentionOperand::Query) => weighted(spec.size),
            Role::Gradient(_) => weighted(spec.size) + weighted(spec.value_size),
        };
        products.max(weighted)
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

    fn fits(&self, spec: &Attention, profile: &DeviceProfile) -> bool {
        self.words(spec) * 4 <= profile.max_workgroup_bytes as usize
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
    let name = match spec.role {
        Role::Output => "ATTN_F",
        Role::Gradient(AttentionOperand::Query) => "ATTN_Q",
        _ => "ATTN_K",
    };
    if let Some(t) = std::env::var(name).ok() {
        let n: Vec<usize> = t.split(',').map(|x| x.parse().unwrap()).collect();
        let t = Tiles { grid: (n[0], n[1]), elements: (n[2], n[3]), depth: n[4] };
        if t.fits(spec, profile) { return Some(t); }
        eprintln!("{name} does not fit: {}", t.words(spec) * 4);
    }
    let _ = keeps_keys(spec.role);
    let all = GRIDS.into_iter().flat_map(|grid| {
        ROWS.into_iter().flat_map(move |rows| {
            COLUMNS.into_iter().flat_map(move |columns| {
                DEPTHS.into_iter().map(move |depth| Tiles { grid, elements: (rows, columns), depth })
            })
        })
    });
    all.filter(|tiles| tiles.fits(spec, profile)).next()
}
