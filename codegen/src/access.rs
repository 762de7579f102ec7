//! Where each op reads its operands: the movement of data as index arithmetic.

use meganeura_ir::{ConvDims, Graph, NodeId, Op, Shape, WindowDims};

use crate::index::{Index, ravel, unravel};

/// A condition on an index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Guard {
    /// `0 <= index < extent`
    Within {
        index: Index,
        extent: usize,
    },
    /// `index` is a multiple.
    Multiple {
        index: Index,
        of: usize,
    },
    Never,
}

/// Read `operand` at `at` if all guards hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    pub guards: Vec<Guard>,
    pub operand: NodeId,
    pub at: Vec<Index>,
}

impl Access {
    fn new(operand: NodeId, at: Vec<Index>) -> Self {
        Access { guards: Vec::new(), operand, at }
    }
}

/// Collects guards, leaving out those that interval analysis proves.
#[derive(Default)]
struct Guards(Vec<Guard>);

impl Guards {
    /// `index`, now known to lie in `0..extent`.
    fn within(&mut self, index: Index, extent: usize) -> Index {
        let (low, high) = index.range();
        if extent == 0 || high < 0 || low >= extent as i64 {
            self.0.push(Guard::Never);
            return Index::constant(0);
        }
        if low < 0 || high >= extent as i64 {
            self.0.push(Guard::Within { index: index.clone(), extent });
        }
        index.bounded(0, extent as i64 - 1)
    }

    /// `index / of`, now known to be exact; `index` in `0..=limit`.
    fn quotient(&mut self, index: Index, of: usize) -> Index {
        if of > 1 && index.rem(of as i64) != Index::constant(0) {
            self.0.push(Guard::Multiple { index: index.clone(), of });
        }
        index.div(of as i64)
    }
}

/// For a movement op at output position `at`: the alternatives, of which the first whose guards hold gives the value. The last has no guards.
pub fn movement(graph: &Graph, node: NodeId, at: &[Index]) -> Vec<Access> {
    let n = graph.node(node);
    let x = n.operands[0];
    let from = &graph.ty(x).shape;
    match &n.op {
        Op::Reshape(to) => vec![Access::new(x, reshaped(at, to, from))],
        Op::Transpose(perm) => {
            let mut source = vec![Index::default(); perm.len()];
            for (i, &axis) in at.iter().zip(perm) {
                source[axis] = i.clone();
            }
            vec![Access::new(x, source)]
        }
        Op::Broadcast { axes, .. } => vec![Access::new(x, axes.iter().map(|&a| at[a].clone()).collect())],
        Op::Slice(dims) => {
            let source = at.iter().zip(dims).map(|(i, d)| i.scale(d.step as i64).shift(d.start as i64)).collect();
            vec![Access::new(x, source)]
        }
        Op::Pad(dims) => {
            let mut guards = Guards::default();
            let source = at
                .iter()
                .zip(dims)
                .zip(from.iter())
                .map(|((i, p), &size)| {
                    let span = if size == 0 { 0 } else { (size - 1) * (p.interior + 1) + 1 };
                    let inner = guards.within(i.shift(-(p.low as i64)), span);
                    guards.quotient(inner, p.interior + 1)
                })
                .collect();
            vec![Access { guards: guards.0, operand: x, at: source }, Access::new(n.operands[1], Vec::new())]
        }
        Op::Concat { axis } => {
            let mut offset = 0;
            n.operands
                .iter()
                .enumerate()
                .filter(|(_, o)| graph.ty(**o).shape[*axis] > 0)
                .map(|(_, &operand)| {
                    let size = graph.ty(operand).shape[*axis];
                    let mut guards = Guards::default();
                    let mut source = at.to_vec();
                    source[*axis] = guards.within(at[*axis].shift(-(offset as i64)), size);
                    offset += size;
                    Access { guards: guards.0, operand, at: source }
                })
                .collect()
        }
        Op::Unfold(window) => {
            let spatial = window.size.len();
            let lead = from.rank() - spatial;
            let mut guards = Guards::default();
            let source = at[..lead]
                .iter()
                .cloned()
                .chain((0..spatial).map(|a| {
                    let position = window_position(window, a, &at[lead + a], &at[lead + spatial + a]);
                    guards.within(position, from[lead + a])
                }))
                .collect();
            vec![Access { guards: guards.0, operand: x, at: source }, Access::new(n.operands[1], Vec::new())]
        }
        op => unreachable!("{} is not a movement op", op.name()),
    }
}

/// The position in a tensor of shape `from` of element `at` of its reshape to `to`.
fn reshaped(at: &[Index], to: &Shape, from: &Shape) -> Vec<Index> {
    // Groups of axes that hold the same elements are regrouped on their own: whatever happens in one stays out of the others.
    let mut source = vec![Index::default(); from.rank()];
    let (mut i, mut j) = (0, 0);
    while i < from.rank() || j < to.rank() {
        let (start_i, start_j) = (i, j);
        let (mut a, mut b) = (1usize, 1usize);
        loop {
            if a == b && i > start_i && j > start_j {
                break;
            }
            if (a <= b && i < from.rank()) || j == to.rank() {
                if i == from.rank() {
                    break;
                }
                a *= from[i];
                i += 1;
            } else {
                b *= to[j];
                j += 1;
            }
        }
        let linear = ravel(&at[start_j..j], &to[start_j..j]);
        source.splice(start_i..i, unravel(&linear, &from[start_i..i]));
    }
    source
}

fn window_position(window: &WindowDims, axis: usize, out: &Index, k: &Index) -> Index {
    out.scale(window.stride[axis] as i64).add(&k.scale(window.dilation[axis] as i64)).shift(-(window.pads[axis].0 as i64))
}

/// For a [`Op::Fold`] at `at`, the window element `k` (one index per spatial axis) that lands there, if the guards hold.
pub fn folded(graph: &Graph, node: NodeId, at: &[Index], k: &[Index]) -> Access {
    let n = graph.node(node);
    let Op::Fold { window, sizes } = &n.op else { unreachable!("fold") };
    let windows = &graph.ty(n.operands[0]).shape;
    let lead = at.len() - sizes.len();
    let mut guards = Guards::default();
    let mut source = at[..lead].to_vec();
    for a in 0..sizes.len() {
        let position = at[lead + a].shift(window.pads[a].0 as i64).add(&k[a].scale(-(window.dilation[a] as i64)));
        let span = (windows[lead + a].max(1) - 1) * window.stride[a] + usize::from(windows[lead + a] > 0);
        let position = guards.within(position, span);
        source.push(guards.quotient(position, window.stride[a]));
    }
    source.extend_from_slice(k);
    Access { guards: guards.0, operand: n.operands[0], at: source }
}

/// How a contraction's result axes and sums map to its operands: `c[b, m, n] = sum_k a[b, m, k] * b[b, n, k]`, each of the four
/// a list of axis sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContractShape {
    pub batch: Vec<usize>,
    pub m: Vec<usize>,
    pub n: Vec<usize>,
    pub k: Vec<usize>,
}

/// One operand position of a contraction.
pub struct ContractAt<'a> {
    pub batch: &'a [Index],
    /// `m` for the left operand, `n` for the right.
    pub free: &'a [Index],
    pub k: &'a [Index],
}

pub fn contract_shape(graph: &Graph, node: NodeId) -> ContractShape {
    let n = graph.node(node);
    let (a, b) = (&graph.ty(n.operands[0]).shape, &graph.ty(n.operands[1]).shape);
    let pick = |shape: &Shape, axes: &[usize]| axes.iter().map(|&i| shape[i]).collect();
    match &n.op {
        Op::Dot(d) => ContractShape {
            batch: pick(a, &d.lhs_batch),
            m: pick(a, &d.lhs_free(a.rank())),
            n: pick(b, &d.rhs_free(b.rank())),
            k: pick(a, &d.lhs_contract),
        },
        // Left: the kernel, so that the output's fastest axes are the right operand's free axes.
        Op::Conv(d) => ContractShape {
            batch: vec![d.groups],
            m: vec![b[0] / d.groups],
            n: [a[0]].into_iter().chain(n.ty.shape[2..].iter().copied()).collect(),
            k: b[1..].to_vec(),
        },
        op => unreachable!("{} is not a contraction", op.name()),
    }
}

/// The result position of `(batch, m, n)`.
pub fn contract_result(graph: &Graph, node: NodeId, batch: &[Index], m: &[Index], n: &[Index]) -> Vec<Index> {
    match &graph.node(node).op {
        Op::Dot(_) => [batch, m, n].concat(),
        Op::Conv(d) => {
            let outputs = (graph.ty(node).shape[1] / d.groups) as i64;
            let mut at = vec![n[0].clone(), batch[0].scale(outputs).add(&m[0])];
            at.extend_from_slice(&n[1..]);
            at
        }
        op => unreachable!("{} is not a contraction", op.name()),
    }
}

/// Where the left operand of the contraction is read.
pub fn contract_lhs(graph: &Graph, node: NodeId, at: &ContractAt) -> Access {
    let n = graph.node(node);
    match &n.op {
        Op::Dot(d) => {
            Access::new(n.operands[0], dot_operand(&d.lhs_batch, &d.lhs_free(rank(graph, n.operands[0])), &d.lhs_contract, at))
        }
        Op::Conv(d) => {
            let outputs = (graph.ty(node).shape[1] / d.groups) as i64;
            let mut source = vec![at.batch[0].scale(outputs).add(&at.free[0])];
            source.extend_from_slice(at.k);
            Access::new(n.operands[1], source)
        }
        op => unreachable!("{} is not a contraction", op.name()),
    }
}

/// Where the right operand of the contraction is read; outside its guards it is zero.
pub fn contract_rhs(graph: &Graph, node: NodeId, at: &ContractAt) -> Access {
    let n = graph.node(node);
    match &n.op {
        Op::Dot(d) => {
            Access::new(n.operands[1], dot_operand(&d.rhs_batch, &d.rhs_free(rank(graph, n.operands[1])), &d.rhs_contract, at))
        }
        Op::Conv(d) => conv_input(graph, node, d, at),
        op => unreachable!("{} is not a contraction", op.name()),
    }
}

fn rank(graph: &Graph, node: NodeId) -> usize {
    graph.ty(node).shape.rank()
}

fn dot_operand(batch: &[usize], free: &[usize], contract: &[usize], at: &ContractAt) -> Vec<Index> {
    let mut source = vec![Index::default(); batch.len() + free.len() + contract.len()];
    for (axes, indices) in [(batch, at.batch), (free, at.free), (contract, at.k)] {
        for (&axis, index) in axes.iter().zip(indices) {
            source[axis] = index.clone();
        }
    }
    source
}

fn conv_input(graph: &Graph, node: NodeId, d: &ConvDims, at: &ContractAt) -> Access {
    let x = graph.node(node).operands[0];
    let shape = &graph.ty(x).shape;
    let per_group = (shape[1] / d.groups) as i64;
    let mut guards = Guards::default();
    let mut source = vec![at.free[0].clone(), at.batch[0].scale(per_group).add(&at.k[0])];
    for a in 0..d.stride.len() {
        let position = at.free[1 + a].scale(d.stride[a] as i64).add(&at.k[1 + a].scale(d.kernel_dilation[a] as i64));
        let size = shape[2 + a];
        let span = if size == 0 { 0 } else { (size - 1) * d.input_dilation[a] + 1 };
        let position = guards.within(position.shift(-(d.pads[a].0 as i64)), span);
        source.push(guards.quotient(position, d.input_dilation[a]));
    }
    Access { guards: guards.0, operand: x, at: source }
}
