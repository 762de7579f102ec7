//! Fusion: divides a graph of primitives into groups, one kernel each.
//!
//! Nodes are visited from results to operands. By the time a node's turn comes, every place that reads it is known, as a set of
//! [`Use`]s: the group, and the symbolic index. The node is then *inlined* into its users' groups, *stored* by one of them on the way, or
//! becomes the *root* of a group of its own.

mod attention;
mod cheap;
mod siblings;
mod sums;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use meganeura_ir::{Graph, NodeId, Op};

use self::cheap::{is_light, is_short};
use self::sums::{alike, contractions};

use crate::access::{Access, ContractAt, contract_lhs, contract_rhs, contract_shape, folded, movement};
use crate::attention::{attention, companions};
use crate::eval::interleaved;
use crate::index::{Index, VarId, ravel};
use crate::profile::{DeviceKind, DeviceProfile};

/// How a group iterates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Domain {
    /// One invocation per element of the root.
    Map,
    /// Rows over `rows` (axes of the root); within a row, reductions and then the root's other axes.
    Row { rows: Vec<usize> },
    /// Contractions of one shape, tile by tile; the rest of the group is their prologue and epilogue.
    Contract { sums: Vec<Sum>, place: Place },
    /// The kernel of the attention `node`; what that reads is its prologue. What follows from a gradient that the kernel computes is its epilogue:
    /// which, and where that lies relative to the root.
    Attention { node: NodeId, epilogue: Option<(NodeId, Place)> },
}

/// Contractions of one shape that add up to `value`, which is the only one itself where there is one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sum {
    pub value: NodeId,
    pub terms: Vec<NodeId>,
}

/// Where, relative to the root's element, a stored node's element lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// At the root's index along these axes; `None` where the node's size is 1.
    Axes(Vec<Option<usize>>),
    /// At the same row-major position.
    Linear,
}

/// A node that a group writes to memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stored {
    pub node: NodeId,
    pub place: Place,
}

/// One kernel: everything between its loads and its stores.
#[derive(Clone, Debug)]
pub struct Group {
    pub root: NodeId,
    pub domain: Domain,
    /// The root comes first.
    pub stored: Vec<Stored>,
    /// Nodes in memory that the group reads, by id.
    pub reads: BTreeSet<NodeId>,
    /// Nodes that the group computes, by id, the root included.
    pub nodes: BTreeSet<NodeId>,
    /// Parameters that the group reads only at the element that it writes: their update may overwrite them in place.
    pub elementwise: BTreeSet<NodeId>,
}

/// A place where a node is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    group: usize,
    at: Vec<Index>,
    /// Whether the index may be out of range.
    guarded: bool,
    /// Whether the reader is a prologue of a contraction.
    prologue: bool,
}

impl Use {
    /// The same in group `to` if it is in group `from`.
    fn moved(self, from: usize, to: usize) -> Use {
        Use { group: if self.group == from { to } else { self.group }, ..self }
    }
}

/// Variables of loops inside a group, as opposed to the axes of its root, count from here.
const FIRST_LOOP_VAR: VarId = 1 << 16;
/// The most sums that the elements of one kernel's tiles hold.
const MAX_SUMS: usize = 2;
/// How often one group may compute a node at different indices. What only moves is not computed.
const MAX_USES_IN_GROUP: usize = 4;

/// Divides the live nodes of `graph` (primitives only) into groups, in execution order.
///
/// No dependency cycle can arise: a group only reads nodes that groups of smaller rank store. A new group's rank is its root; a node is stored
/// by the group with the smallest rank that reads it, or is itself a root; and what becomes one group takes a rank that suits both.
pub fn fuse(graph: &Graph, profile: &DeviceProfile) -> Vec<Group> {
    let (contractions, parts) = contractions(graph);
    let mut fuser = Fuser {
        graph,
        profile,
        max_bindings: profile.max_storage_bindings as usize,
        tiles: profile.kind != DeviceKind::Software,
        uses: HashMap::new(),
        groups: Vec::new(),
        ranks: Vec::new(),
        frontier: Vec::new(),
        next_var: FIRST_LOOP_VAR,
        opaque: BTreeMap::new(),
        contractions,
        parts,
        root_indices: Vec::new(),
        leaf_reads: Vec::new(),
        companions: companions(graph, profile.max_storage_bindings as usize).into_iter().collect(),
    };
    let must_store: BTreeSet<NodeId> = graph.roots().collect();
    for id in graph.live().into_iter().rev() {
        if graph.ty(id).shape.numel() > 0 && !fuser.parts.contains(&id) {
            fuser.place(id, must_store.contains(&id));
        }
    }
    fuser.finish()
}

struct Fuser<'a> {
    graph: &'a Graph,
    profile: &'a DeviceProfile,
    max_bindings: usize,
    /// Whether the device reads operands tile by tile.
    tiles: bool,
    uses: HashMap<NodeId, BTreeSet<Use>>,
    groups: Vec<Group>,
    /// Per group: its place in an order of execution.
    ranks: Vec<NodeId>,
    /// Per group: nodes that it reads, decided or not.
    frontier: Vec<BTreeSet<NodeId>>,
    next_var: VarId,
    opaque: BTreeMap<(NodeId, Vec<Index>), u32>,
    contractions: HashMap<NodeId, Sum>,
    /// Nodes that only exist in the accumulators of a contraction.
    parts: BTreeSet<NodeId>,
    /// Per group: the index of the root's element.
    root_indices: Vec<Vec<Index>>,
    /// Per group: where parameters are read.
    leaf_reads: Vec<Vec<(NodeId, Vec<Index>)>>,
    /// Nodes that the kernel of another one stores on the way, by [`companions`].
    companions: BTreeMap<NodeId, NodeId>,
}

impl Fuser<'_> {
    fn place(&mut self, id: NodeId, must_store: bool) {
        let mut uses = self.uses.remove(&id).unwrap_or_default();
        let op = &self.graph.node(id).op;
        if op.is_leaf() {
            if in_memory(self.graph, id) {
                for u in &uses {
                    self.groups[u.group].reads.insert(id);
                    self.leaf_reads[u.group].push((id, u.at.clone()));
                }
            }
            return;
        }
        if !must_store && self.contractions.contains_key(&id) {
            self.unite_readers(id, &mut uses);
        }
        let users: BTreeSet<usize> = uses.iter().map(|u| u.group).collect();
        if matches!(op, Op::Composite(_)) {
            let ends = users.iter().min_by_key(|&&g| self.ranks[g]).is_some_and(|&g| self.can_inline(id, g, &uses));
            let apart = self.companions.contains_key(&id) && !ends;
            if apart || self.join_companion(id, &users) {
                users.iter().for_each(|&g| {
                    self.groups[g].reads.insert(id);
                });
                return;
            }
        }
        let everywhere = users.len() == 1
            || is_light(self.graph, id)
            || self.is_minor(id, &uses)
            || self.is_centered(id) && uses.iter().all(|u| !u.prologue)
            || users.iter().all(|&g| self.suits_attention(id, g));
        if !must_store && !users.is_empty() && everywhere && users.iter().all(|&g| self.can_inline(id, g, &uses)) {
            for g in users {
                self.inline(id, g, &uses);
            }
            return;
        }
        if users.is_empty()
            && let Some(g) = self.beside(id)
        {
            let at = self.root_indices[g].clone();
            self.groups[g].stored.push(Stored { node: id, place: Place::Axes((0..at.len()).map(Some).collect()) });
            self.expand(id, g, &at, false, false);
            return;
        }
        // The user with the smallest rank runs first: what it stores, all others can load.
        let owner = users.iter().copied().min_by_key(|&g| self.ranks[g]);
        let place = owner.and_then(|g| self.can_inline(id, g, &uses).then(|| self.stored_place(id, g, &uses))).flatten();
        let owner = match (owner, place) {
            (Some(g), Some(place)) if self.bindings_with(id, g) < self.max_bindings => {
                if let Some(domain) = self.row_of_statistic(id, g, &uses) {
                    self.groups[g].domain = domain;
                }
                self.inline(id, g, &uses);
                self.groups[g].stored.push(Stored { node: id, place });
                g
            }
            _ => self.new_group(id),
        };
        for g in users {
            if g != owner {
                self.groups[g].reads.insert(id);
            }
        }
    }

    /// A group that may store the result `id` too, since it reads an operand of it at the same element.
    ///
    /// Nothing reads `id`, so that no cycle can arise.
    fn beside(&self, id: NodeId) -> Option<usize> {
        let n = self.graph.node(id);
        if !n.op.is_pointwise() {
            return None;
        }
        let computed = n.operands.iter().filter(|&&o| !self.graph.node(o).op.is_leaf() && !is_light(self.graph, o));
        let mut readers = computed.filter_map(|o| self.uses.get(o)).flatten().filter(|u| !u.guarded && !u.prologue);
        readers.find_map(|u| {
            let group = &self.groups[u.group];
            let alike = self.graph.ty(group.root).shape == n.ty.shape && u.at == self.root_indices[u.group];
            let suits = matches!(group.domain, Domain::Map) && !self.has_loops(u.group);
            let added = n.operands.iter().filter(|o| in_memory(self.graph, **o) && !self.frontier[u.group].contains(o)).count();
            let bindings = self.frontier[u.group].len() + added + group.stored.len() + 1;
            (alike && suits && bindings <= self.max_bindings).then_some(u.group)
        })
    }

    fn new_group(&mut self, root: NodeId) -> usize {
        let shape = &self.graph.ty(root).shape;
        let at: Vec<Index> = shape.iter().enumerate().map(|(axis, &size)| Index::var(axis as VarId, size)).collect();
        let group = self.groups.len();
        let rank = shape.rank();
        let node = self.graph.node(root);
        let whole = Place::Axes((0..rank).map(Some).collect());
        let domain = match &node.op {
            _ if self.contractions.contains_key(&root) => {
                Domain::Contract { sums: vec![self.contractions[&root].clone()], place: whole.clone() }
            }
            Op::Reduce { .. } | Op::ArgReduce { .. } if !is_short(self.graph, root) => Domain::Row { rows: (0..rank).collect() },
            Op::Composite(_) => Domain::Attention { node: root, epilogue: None },
            _ => Domain::Map,
        };
        let stored = [Stored { node: root, place: whole }].into_iter().chain(self.beside_attention(root)).collect();
        self.groups.push(Group {
            root,
            domain,
            stored,
            reads: BTreeSet::new(),
            nodes: BTreeSet::new(),
            elementwise: BTreeSet::new(),
        });
        self.ranks.push(root);
        self.frontier.push(BTreeSet::new());
        self.root_indices.push(at.clone());
        self.leaf_reads.push(Vec::new());
        self.expand(root, group, &at, false, false);
        group
    }

    /// Whether group `g` can compute `id` wherever it reads it.
    fn can_inline(&self, id: NodeId, g: usize, uses: &BTreeSet<Use>) -> bool {
        let node = self.graph.node(id);
        let mine: Vec<&Use> = uses.iter().filter(|u| u.group == g).collect();
        let moves = matches!(node.op, Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast { .. } | Op::Slice(_));
        if mine.len() > MAX_USES_IN_GROUP && !moves {
            return false;
        }
        if self.bindings_with(id, g) > self.max_bindings && !self.is_light_movement(id) {
            return false;
        }
        match &node.op {
            _ if self.contractions.contains_key(&id) => {
                let place = self.stored_place(id, g, uses);
                let joins = match &self.groups[g].domain {
                    Domain::Map => place.is_some(),
                    Domain::Contract { sums, place: current } => {
                        let first = |sum: &Sum| sum.terms[0];
                        sums.len() < MAX_SUMS
                            && place.as_ref() == Some(current)
                            && alike(self.graph, first(&sums[0]), first(&self.contractions[&id]))
                    }
                    _ => false,
                };
                joins
                    && mine.len() == 1
                    && node.ty.shape.numel() == self.graph.ty(self.groups[g].root).shape.numel()
                    && !self.has_loops(g)
            }
            // A prologue runs once per tile and per element of it.
            Op::RandomUniform { .. } => mine.iter().all(|u| !u.prologue),
            Op::Composite(_) => self.epilogue_place(id, g, uses).is_some(),
            _ if mine.iter().any(|u| u.prologue) => is_light(self.graph, id) || self.suits_attention(id, g),
            op if op.is_pointwise() || op.is_movement() || matches!(op, Op::Gather { .. }) => true,
            Op::Reduce { .. } | Op::ArgReduce { .. } => {
                let [only] = mine[..] else { return false };
                self.row_of(id, g, only).is_some()
            }
            Op::Fold { .. } | Op::Scatter { .. } => {
                let [only] = mine[..] else { return false };
                !self.has_loops(g)
                    && !only.guarded
                    && self.groups[g].domain == Domain::Map
                    && self.evaluations(only, g) == Some(node.ty.shape.numel())
            }
            _ => false,
        }
    }

    /// Buffers that group `g` binds once it computes `id`, which it reads now. Storing `id` too takes one more.
    fn bindings_with(&self, id: NodeId, g: usize) -> usize {
        let computed = self.contractions.get(&id).map_or(std::slice::from_ref(&id), |sum| &sum.terms);
        let operands: BTreeSet<NodeId> = computed.iter().flat_map(|&n| &self.graph.node(n).operands).copied().collect();
        let added = operands.into_iter().filter(|&o| in_memory(self.graph, o) && !self.frontier[g].contains(&o)).count();
        self.frontier[g].len() - 1 + added + self.groups[g].stored.len()
    }

    /// Whether inlining cannot add bindings.
    fn is_light_movement(&self, id: NodeId) -> bool {
        let n = self.graph.node(id);
        n.op.is_movement() && n.operands.iter().filter(|o| in_memory(self.graph, **o)).count() <= 1
    }

    /// Whether the group contains a reduction that runs inside a map.
    fn has_loops(&self, g: usize) -> bool {
        self.groups[g].nodes.iter().any(|&n| {
            matches!(self.graph.node(n).op, Op::Reduce { .. } | Op::ArgReduce { .. } | Op::Fold { .. } | Op::Scatter { .. })
        })
    }

    /// How often the group evaluates a node that it reads at `u`; `None` inside loops.
    fn evaluations(&self, u: &Use, g: usize) -> Option<usize> {
        let shape = &self.graph.ty(self.groups[g].root).shape;
        let vars: BTreeSet<VarId> = u.at.iter().flat_map(Index::vars).collect();
        vars.into_iter().map(|v| shape.get(v as usize).copied()).product()
    }

    /// The rows over which group `g` would have to iterate to compute the reduction `id` once per row and never twice.
    fn row_of(&self, id: NodeId, g: usize, u: &Use) -> Option<Domain> {
        let group = &self.groups[g];
        let root = &self.graph.ty(group.root).shape;
        if u.guarded || self.evaluations(u, g)? != self.graph.ty(id).shape.numel() {
            return None;
        }
        let vars: BTreeSet<VarId> = u.at.iter().flat_map(Index::vars).collect();
        let rows: Vec<usize> = (0..root.rank()).filter(|&a| root[a] == 1 || vars.contains(&(a as VarId))).collect();
        let whole = rows.len() == root.rank();
        match &group.domain {
            Domain::Map if whole && is_short(self.graph, id) => Some(Domain::Map),
            Domain::Map if self.has_loops(g) => None,
            Domain::Map => {
                let count: usize = rows.iter().map(|&a| root[a]).product();
                let inner = root.numel() / count;
                let enough_rows = whole || count >= 64 || inner <= 8192;
                enough_rows.then_some(Domain::Row { rows })
            }
            Domain::Row { rows: current } => (*current == rows).then(|| group.domain.clone()),
            Domain::Contract { .. } | Domain::Attention { .. } => None,
        }
    }

    /// The rows over which the map `g` would have to iterate to compute and store `id` once per row, where `id` rests on a reduction
    /// that belongs into the same kernel.
    fn row_of_statistic(&self, id: NodeId, g: usize, uses: &BTreeSet<Use>) -> Option<Domain> {
        let is_reduction = matches!(self.graph.node(id).op, Op::Reduce { .. } | Op::ArgReduce { .. });
        if is_reduction || self.groups[g].domain != Domain::Map || !self.rests_on_reduction(id) {
            return None;
        }
        let u = uses.iter().find(|u| u.group == g)?;
        self.row_of(id, g, u).filter(|domain| *domain != Domain::Map)
    }

    /// Where `id` lies relative to the root of `g`, if the group passes over each element exactly once.
    fn stored_place(&self, id: NodeId, g: usize, uses: &BTreeSet<Use>) -> Option<Place> {
        if matches!(self.graph.node(id).op, Op::Composite(_)) {
            return self.epilogue_place(id, g, uses);
        }
        // What is about to make the group a row kernel is stored once per row.
        let becomes_row = || {
            matches!(self.graph.node(id).op, Op::Reduce { .. } | Op::ArgReduce { .. })
                || self.row_of_statistic(id, g, uses).is_some()
        };
        let root_shape = &self.graph.ty(self.groups[g].root).shape;
        uses.iter().filter(|u| u.group == g && !u.guarded && !u.prologue).find_map(|u| {
            let place = self.place_of(id, g, &u.at)?;
            let Place::Axes(axes) = &place else { return Some(place) };
            let used: BTreeSet<usize> = axes.iter().flatten().copied().collect();
            let whole = (0..root_shape.rank()).all(|a| root_shape[a] == 1 || used.contains(&a));
            let row = match &self.groups[g].domain {
                Domain::Row { rows } => {
                    rows.iter().all(|a| root_shape[*a] == 1 || used.contains(a)) && used.iter().all(|a| rows.contains(a))
                }
                _ => false,
            };
            (whole || row || becomes_row()).then_some(place)
        })
    }

    /// Where `id`, which `g` reads at `at`, lies relative to the root: along axes of the root, which may be fewer than all.
    fn place_of(&self, id: NodeId, g: usize, at: &[Index]) -> Option<Place> {
        let shape = &self.graph.ty(id).shape;
        let (root, root_shape) = (&self.root_indices[g], &self.graph.ty(self.groups[g].root).shape);
        let axis_of = |(i, &size): (&Index, &usize)| {
            if size == 1 && i.as_constant() == Some(0) {
                return Some(None);
            }
            let axis = root.iter().position(|r| r == i && r.as_constant().is_none())?;
            (root_shape[axis] == size).then_some(Some(axis))
        };
        match at.iter().zip(shape.iter()).map(axis_of).collect::<Option<Vec<_>>>() {
            Some(axes) => {
                let used: BTreeSet<usize> = axes.iter().flatten().copied().collect();
                (used.len() == axes.iter().flatten().count()).then_some(Place::Axes(axes))
            }
            None => {
                let linear = ravel(at, shape) == ravel(root, root_shape);
                (linear && shape.numel() == root_shape.numel()).then_some(Place::Linear)
            }
        }
    }

    fn inline(&mut self, id: NodeId, g: usize, uses: &BTreeSet<Use>) {
        self.frontier[g].remove(&id);
        let mut mine: Vec<Use> = uses.iter().filter(|u| u.group == g).cloned().collect();
        match &self.graph.node(id).op {
            _ if self.contractions.contains_key(&id) => {
                if let Some(place) = self.stored_place(id, g, uses) {
                    let sum = self.contractions[&id].clone();
                    match &mut self.groups[g].domain {
                        Domain::Contract { sums, .. } => sums.push(sum),
                        domain => *domain = Domain::Contract { sums: vec![sum], place },
                    }
                }
            }
            Op::Reduce { .. } | Op::ArgReduce { .. } => {
                if let Some(domain) = self.row_of(id, g, &mine[0]) {
                    self.groups[g].domain = domain;
                }
            }
            Op::Composite(_) => {
                if let Some(place) = self.epilogue_place(id, g, uses) {
                    self.end_attention(id, g, place);
                }
                // Whichever columns are read, the kernel computes all.
                mine.truncate(1);
            }
            _ => {}
        }
        for u in mine {
            self.expand(id, g, &u.at, u.guarded, u.prologue);
        }
    }

    /// Records what computing `id` at `at` in group `g` reads.
    fn expand(&mut self, id: NodeId, g: usize, at: &[Index], guarded: bool, prologue: bool) {
        self.groups[g].nodes.insert(id);
        let n = self.graph.node(id).clone();
        let plain = |operand: NodeId, at: Vec<Index>| Access { guards: Vec::new(), operand, at };
        let mut in_prologue = prologue;
        let accesses: Vec<Access> = match &n.op {
            _ if self.contractions.contains_key(&id) => {
                in_prologue = true;
                let terms = self.contractions[&id].terms.clone();
                self.groups[g].nodes.extend(&terms);
                let shape = contract_shape(self.graph, terms[0]);
                let batch = self.loop_vars(shape.batch.iter().copied());
                let m = self.loop_vars(shape.m.iter().copied());
                let n = self.loop_vars(shape.n.iter().copied());
                let mut accesses = Vec::new();
                for term in terms {
                    let k = self.loop_vars(contract_shape(self.graph, term).k);
                    accesses.push(contract_lhs(self.graph, term, &ContractAt { batch: &batch, free: &m, k: &k }));
                    accesses.push(contract_rhs(self.graph, term, &ContractAt { batch: &batch, free: &n, k: &k }));
                }
                accesses
            }
            op if op.is_pointwise() => n.operands.iter().map(|&o| plain(o, at.to_vec())).collect(),
            op if op.is_movement() => movement(self.graph, id, at),
            Op::RandomUniform { .. } => (0..4).map(|word| plain(n.operands[0], vec![Index::constant(word)])).collect(),
            Op::Gather { axis } => {
                let rank = self.graph.ty(n.operands[1]).shape.rank();
                let size = self.graph.ty(n.operands[0]).shape[*axis];
                let indices = at[*axis..axis + rank].to_vec();
                let vars = indices.iter().flat_map(Index::vars).collect();
                let next = self.opaque.len() as u32;
                let opaque = *self.opaque.entry((n.operands[1], indices.clone())).or_insert(next);
                let mut source = at[..*axis].to_vec();
                source.push(Index::opaque(opaque, size, vars));
                source.extend_from_slice(&at[axis + rank..]);
                vec![plain(n.operands[0], source), plain(n.operands[1], indices)]
            }
            Op::Reduce { axes, .. } => {
                let shape = self.graph.ty(n.operands[0]).shape.clone();
                let inner = self.loop_vars(axes.iter().map(|&a| shape[a]));
                vec![plain(n.operands[0], interleaved(at, axes, &inner))]
            }
            Op::ArgReduce { axis, .. } => {
                let size = self.graph.ty(n.operands[0]).shape[*axis];
                let inner = self.loop_vars([size]);
                vec![plain(n.operands[0], interleaved(at, &[*axis], &inner))]
            }
            Op::Fold { window, .. } => {
                let k = self.loop_vars(window.size.iter().copied());
                vec![folded(self.graph, id, at, &k)]
            }
            Op::Scatter { axis, .. } => {
                let shape = self.graph.ty(n.operands[1]).shape.clone();
                let j = self.loop_vars(shape.iter().copied());
                let source = at[..*axis].iter().chain(&j).chain(&at[axis + 1..]).cloned().collect();
                vec![plain(n.operands[0], at.to_vec()), plain(n.operands[1], j), plain(n.operands[2], source)]
            }
            op => match attention(self.graph, id) {
                Some(a) => {
                    in_prologue = true;
                    self.attention_reads(&a)
                }
                None => unreachable!("{} has no fusion rule", op.name()),
            },
        };
        for access in accesses {
            if self.graph.ty(access.operand).shape.numel() == 0 {
                continue;
            }
            let guarded = guarded || !access.guards.is_empty() || n.op.is_movement() && n.operands.len() > 1;
            if in_memory(self.graph, access.operand) {
                self.frontier[g].insert(access.operand);
            }
            let use_ = Use { group: g, at: access.at, guarded, prologue: in_prologue };
            self.uses.entry(access.operand).or_default().insert(use_);
        }
    }

    fn loop_vars(&mut self, extents: impl IntoIterator<Item = usize>) -> Vec<Index> {
        extents
            .into_iter()
            .map(|extent| {
                self.next_var += 1;
                Index::var(self.next_var - 1, extent)
            })
            .collect()
    }

    fn finish(mut self) -> Vec<Group> {
        for (g, group) in self.groups.iter_mut().enumerate() {
            let root_shape = &self.graph.ty(group.root).shape;
            let position = ravel(&self.root_indices[g], root_shape);
            let reads = &self.leaf_reads[g];
            group.elementwise = group
                .reads
                .iter()
                .copied()
                .filter(|&n| {
                    let shape = &self.graph.ty(n).shape;
                    shape.numel() == root_shape.numel()
                        && reads.iter().filter(|(r, _)| *r == n).all(|(_, at)| ravel(at, shape) == position)
                })
                .filter(|n| matches!(self.graph.node(*n).op, Op::Parameter(_)))
                .collect();
        }
        let mut ranked: Vec<(NodeId, Group)> = self.ranks.into_iter().zip(self.groups).collect();
        ranked.retain(|(_, group)| !group.stored.is_empty());
        ranked.sort_by_key(|(rank, _)| *rank);
        ranked.into_iter().map(|(_, group)| group).collect()
    }
}

/// By node that is stored: the group that does.
pub fn writers(groups: &[Group]) -> HashMap<NodeId, usize> {
    let stored = groups.iter().enumerate().flat_map(|(g, group)| group.stored.iter().map(move |stored| (stored.node, g)));
    stored.collect()
}

/// Whether a node occupies memory when it is not inlined. Counters and scalar constants are text.
pub fn in_memory(graph: &Graph, id: NodeId) -> bool {
    match &graph.node(id).op {
        Op::Iota { .. } => false,
        Op::Constant(value) => value.shape().numel() > 1,
        _ => graph.ty(id).shape.numel() > 0,
    }
}
