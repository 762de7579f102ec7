//! How attention is divided among workgroups: which tiles there are, what they take, and which are the fastest.

use meganeura_ir::AttentionOperand;

use super::tile::{VECTOR, pitch};
use crate::attention::{Attention, Role};
use crate::profile::{DeviceKind, DeviceProfile};

/// A workgroup keeps a tile of rows of one side, queries or keys, and passes over tiles of the other side's. Its invocations form a grid; each
/// computes `elements.0 x elements.1` scores of a pair of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    pub grid: (usize, usize),
    pub elements: (usize, usize),
}

const fn tiling(grid: (usize, usize), elements: (usize, usize)) -> Tiles {
    Tiles { grid, elements }
}

const TILES: [Tiles; 12] = [
    tiling((8, 8), (8, 4)),
    tiling((16, 8), (4, 4)),
    tiling((8, 8), (4, 4)),
    tiling((16, 16), (4, 2)),
    tiling((16, 16), (2, 2)),
    tiling((16, 8), (2, 4)),
    tiling((8, 8), (2, 4)),
    tiling((8, 8), (2, 2)),
    tiling((8, 8), (2, 1)),
    tiling((16, 4), (4, 4)),
    tiling((16, 4), (2, 2)),
    tiling((8, 4), (1, 1)),
];

impl Tiles {
    pub fn invocations(&self) -> usize {
        self.grid.0 * self.grid.1
    }

    /// Rows of a tile that a workgroup keeps.
    pub fn kept(&self) -> usize {
        self.grid.0 * self.elements.0
    }

    /// Rows of a tile that it passes over.
    pub fn passed(&self) -> usize {
        self.grid.1 * self.elements.1
    }

    /// Rows and columns of the tiles in workgroup memory, in the order in which the kernel of each role takes them.
    pub fn shapes(&self, spec: &Attention) -> Vec<(usize, usize)> {
        let (kept, passed) = (self.kept(), self.passed());
        let [size, value_size] = [spec.size, spec.value_size].map(|size| size.next_multiple_of(VECTOR));
        // Of a tile whose columns are those of a result each invocation reads whole vectors.
        let whole = |size: usize| size.next_multiple_of(VECTOR * self.grid.1);
        let weights = (kept, passed);
        match spec.role {
            Role::Output | Role::LogSumExp => {
                vec![(kept, size), (passed, size), (passed, whole(value_size)), weights, (kept, self.grid.1)]
            }
            Role::Gradient(AttentionOperand::Query) => {
                vec![(kept, size), (kept, value_size), (passed, whole(size)), (passed, value_size), weights]
            }
            Role::Gradient(_) => {
                vec![(kept, size), (kept, value_size), (passed, whole(size)), (passed, whole(value_size)), weights, weights]
            }
        }
    }

    /// Words of workgroup memory.
    pub fn words(&self, spec: &Attention) -> usize {
        self.shapes(spec).into_iter().map(|(rows, columns)| rows * pitch(columns)).sum()
    }

    fn fits(&self, spec: &Attention, profile: &DeviceProfile) -> bool {
        self.words(spec) * 4 <= profile.max_workgroup_bytes as usize
            && self.invocations() <= profile.max_workgroup_invocations as usize
    }
}

/// Whether the kernels of `role` keep keys and pass over queries.
fn keeps_keys(role: Role) -> bool {
    matches!(role, Role::Gradient(AttentionOperand::Key | AttentionOperand::Value))
}

/// The fastest tiles of those that fit into workgroup memory.
pub fn tiles(spec: &Attention, profile: &DeviceProfile) -> Option<Tiles> {
    if profile.kind == DeviceKind::Software || spec.role == Role::LogSumExp {
        return None;
    }
    let name = match spec.role {
        Role::Output => "ATTN_F",
        Role::Gradient(AttentionOperand::Query) => "ATTN_Q",
        _ => "ATTN_K",
    };
    if let Some(t) = std::env::var(name).ok() {
        let n: Vec<usize> = t.split(',').map(|x| x.parse().unwrap()).collect();
        let t = tiling((n[0], n[1]), (n[2], n[3]));
        if t.fits(spec, profile) { return Some(t); }
        eprintln!("{name} does not fit: {}", t.words(spec) * 4);
    }
    let _ = keeps_keys(spec.role);
    TILES.iter().find(|tiles| tiles.fits(spec, profile)).copied()
}
