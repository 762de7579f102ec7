//! Ensembles of decision trees. All rows of the data walk all trees at once, one level per step.

use std::collections::BTreeSet;

use meganeura_ir::{
    BinaryOp, CompareOp, Composite, DType, NodeId, Op, ReduceOp, Shape, Tensor, TensorType, UnaryOp, reduce_identity,
};

use super::indexing::{add_position, position};
use super::ml::ml;
use super::scatter::pick;
use super::{Row, Rule};
use crate::context::{Context, extent, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    ml("TreeEnsemble",           1, Rule::One(tree_ensemble)),
];

/// Levels of a tree.
const MAX_DEPTH: usize = 64;

/// By `nodes_modes`: how a node compares the feature with its threshold.
const COMPARISONS: [CompareOp; 6] = [CompareOp::Le, CompareOp::Lt, CompareOp::Ge, CompareOp::Gt, CompareOp::Eq, CompareOp::Ne];
/// The mode of a node that asks whether the feature is one of a set.
const MEMBER: i64 = 6;

/// Tables by node: the interior nodes, then the leaves, which lead to themselves.
struct Trees {
    roots: Vec<i64>,
    interior: usize,
    feature: Vec<i64>,
    split: Vec<f64>,
    mode: Vec<i64>,
    on_true: Vec<i64>,
    on_false: Vec<i64>,
    missing_is_true: Vec<i64>,
    /// The values of set nodes: node and value.
    members: Vec<(i64, f64)>,
    leaf_target: Vec<i64>,
    leaf_weight: Vec<f64>,
}

fn error(name: &'static str, value: impl ToString, reason: &'static str) -> OpError {
    OpError::Attribute { name, value: value.to_string(), reason }
}

impl Trees {
    /// Reads the attributes, and checks that every index is in range.
    fn read(c: &Context, features: usize, targets: usize) -> Result<Trees, OpError> {
        let ints = |name: &'static str| c.ints(name)?.ok_or(OpError::MissingAttribute(name));
        let table = |name: &'static str| -> Result<Vec<f64>, OpError> {
            Ok(c.tensor(name)?.ok_or(OpError::MissingAttribute(name))?.to_f64_vec())
        };
        c.ignore(&["nodes_hitrates"]);
        let feature = ints("nodes_featureids")?;
        let interior = table_size(feature.len())?;
        let mode: Vec<i64> = table("nodes_modes")?.into_iter().map(|mode| mode as i64).collect();
        let (split, leaf_weight, leaf_target) = (table("nodes_splits")?, table("leaf_weights")?, ints("leaf_targetids")?);
        let leaves = table_size(leaf_target.len())?;
        let child = |ids: &'static str, leafs: &'static str| -> Result<Vec<i64>, OpError> {
            let (ids, leafs) = (ints(ids)?, ints(leafs)?);
            if [ids.len(), leafs.len()] != [interior; 2] {
                return Err(error("nodes_featureids", interior, "the lists of nodes have different lengths"));
            }
            let pairs = ids.iter().zip(leafs).map(|(&id, &leaf)| {
                let (count, offset) = if leaf == 0 { (interior, 0) } else { (leaves, interior) };
                if (0..count as i64).contains(&id) {
                    Ok(id + offset as i64)
                } else {
                    Err(OpError::Index { index: id, size: count })
                }
            });
            pairs.chain((interior..interior + leaves).map(|own| Ok(own as i64))).collect()
        };
        let on_true = child("nodes_truenodeids", "nodes_trueleafs")?;
        let on_false = child("nodes_falsenodeids", "nodes_falseleafs")?;
        let missing_is_true = c.ints("nodes_missing_value_tracks_true")?.map_or_else(|| vec![0; interior], <[i64]>::to_vec);
        if [mode.len(), split.len(), missing_is_true.len()] != [interior; 3] || leaf_weight.len() != leaves {
            return Err(error("nodes_featureids", interior, "the lists of nodes have different lengths"));
        }
        let in_range = |values: &[i64], size: usize| match values.iter().find(|v| !(0..size as i64).contains(v)) {
            Some(&index) => Err(OpError::Index { index, size }),
            None => Ok(()),
        };
        let roots = ints("tree_roots")?.to_vec();
        in_range(&roots, interior)?;
        in_range(feature, features)?;
        in_range(leaf_target, targets)?;
        in_range(&mode, COMPARISONS.len() + 1)?;

        let values = match c.tensor("membership_values")? {
            Some(values) => values.to_f64_vec(),
            None => Vec::new(),
        };
        // One list per set node, each ended by a NaN.
        let mut lists = values.split(|value| value.is_nan());
        let mut members = Vec::new();
        for node in (0..interior).filter(|&node| mode[node] == MEMBER) {
            let list = lists.next().ok_or_else(|| error("membership_values", values.len(), "a set node has no list"))?;
            members.extend(list.iter().map(|&value| (node as i64, value)));
        }
        let with_leaves = |nodes: &[i64]| nodes.iter().copied().chain(vec![0; leaves]).collect();
        Ok(Trees {
            roots,
            interior,
            feature: with_leaves(feature),
            split: split.into_iter().chain(vec![0.0; leaves]).collect(),
            mode: with_leaves(&mode),
            on_true,
            on_false,
            missing_is_true: with_leaves(&missing_is_true),
            members,
            leaf_target: leaf_target.to_vec(),
            leaf_weight,
        })
    }

    /// The largest number of interior nodes on a way to a leaf.
    fn depth(&self) -> Result<usize, OpError> {
        let mut level: BTreeSet<i64> = self.roots.iter().copied().collect();
        for depth in 0..=MAX_DEPTH {
            if level.is_empty() {
                return Ok(depth);
            }
            let children = level.iter().flat_map(|&node| [self.on_true[node as usize], self.on_false[node as usize]]);
            level = children.filter(|&child| child < self.interior as i64).collect();
        }
        Err(OpError::unsupported(format!("a tree of more than {MAX_DEPTH} levels")))
    }
}

/// `[rows, features] -> [rows, targets]`: the weights of the leaves that each row reaches, aggregated by target.
pub(super) fn tree_ensemble(c: &mut Context) -> Result<NodeId, OpError> {
    let (aggregate, transform) = (c.int_or("aggregate_function", 1)?, c.int_or("post_transform", 0)?);
    let targets = extent("n_targets", c.int("n_targets")?.ok_or(OpError::MissingAttribute("n_targets"))?)?;
    let x = c.input(0)?;
    let &[rows, features] = &c.shape(x)[..] else { return Err(c.operand_error(0, "it is [rows, features]")) };
    let trees = Trees::read(c, features, targets)?;
    let count = trees.roots.len();
    let grid = Shape::from([rows, count]);
    let roots = integers(c, &trees.roots)?;
    let mut node = c.broadcast_without(roots, &grid, &[0])?;
    for _ in 0..trees.depth()? {
        node = descend(c, &trees, x, node)?;
    }
    let leaf = c.shift(node, -(trees.interior as f64))?;
    let weight = reals(c, &trees.leaf_weight)?;
    let weight = lookup(c, weight, leaf)?;
    let target = integers(c, &trees.leaf_target)?;
    let target = lookup(c, target, leaf)?;

    let wide = Shape::from([rows, count, targets]);
    let here = position(c, DType::I64, &wide, 2)?;
    let target = c.broadcast_without(target, &wide, &[2])?;
    let hit = c.compare(CompareOp::Eq, target, here)?;
    let weight = c.broadcast_without(weight, &wide, &[2])?;
    let y = match aggregate {
        0 => {
            let sum = pick(c, hit, weight, &[1])?;
            c.scale(sum, 1.0 / count as f64)?
        }
        1 => pick(c, hit, weight, &[1])?,
        2 => extreme(c, ReduceOp::Min, hit, weight)?,
        3 => extreme(c, ReduceOp::Max, hit, weight)?,
        other => return Err(error("aggregate_function", other, "it is 0 (average), 1 (sum), 2 (min) or 3 (max)")),
    };
    match transform {
        0 => Ok(y),
        1 => Ok(c.push(Op::Composite(Composite::Softmax { axis: 1 }), &[y])?),
        2 => Ok(c.unary(UnaryOp::Sigmoid, y)?),
        other => Err(error("post_transform", other, "0 (none), 1 (softmax) and 2 (logistic) are supported")),
    }
}

/// The extreme weight among the hits along axis 1; 0 where nothing hits.
fn extreme(c: &mut Context, op: ReduceOp, hit: NodeId, weight: NodeId) -> Result<NodeId, OpError> {
    let shape = c.shape(weight);
    let identity = c.constant_tensor(reduce_identity(op, c.ty(weight).dtype))?;
    let identity = c.broadcast_to(identity, &shape)?;
    let weight = c.select(hit, weight, identity)?;
    let extreme = c.reduce(op, weight, &[1])?;
    let any = c.reduce(ReduceOp::Max, hit, &[1])?;
    let zero = c.constant_like(extreme, 0.0)?;
    Ok(c.select(any, extreme, zero)?)
}

fn integers(c: &mut Context, values: &[i64]) -> Result<NodeId, OpError> {
    c.constant_tensor(Tensor::from_i64(DType::I64, [values.len()], values))
}

fn reals(c: &mut Context, values: &[f64]) -> Result<NodeId, OpError> {
    c.constant_tensor(Tensor::from_f64(DType::F32, [values.len()], values))
}

/// `table[indices]`
fn lookup(c: &mut Context, table: NodeId, indices: NodeId) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Gather { axis: 0 }, &[table, indices])?)
}

/// From `node: [rows, trees]` to the children that the features of each row ask for.
fn descend(c: &mut Context, trees: &Trees, x: NodeId, node: NodeId) -> Result<NodeId, OpError> {
    let grid = c.shape(node);
    let features = c.shape(x)[1];
    let feature = integers(c, &trees.feature)?;
    let feature = lookup(c, feature, node)?;
    let place = add_position(c, feature, &grid, 0, features)?;
    let elements = c.shape(x).numel();
    let flat = c.reshape(x, [elements])?;
    let value = lookup(c, flat, place)?;
    let split = reals(c, &trees.split)?;
    let split = lookup(c, split, node)?;

    let mode = integers(c, &trees.mode)?;
    let mode = lookup(c, mode, node)?;
    let mut taken = c.splat(&TensorType::new(DType::Bool, grid.clone()), 0.0)?;
    let modes: BTreeSet<i64> = trees.mode[..trees.interior].iter().copied().collect();
    for of in modes {
        let holds = match COMPARISONS.get(of as usize) {
            Some(&op) => c.compare(op, value, split)?,
            None => is_member(c, trees, node, value)?,
        };
        let of = c.constant_like(mode, of as f64)?;
        let this = c.compare(CompareOp::Eq, mode, of)?;
        taken = c.select(this, holds, taken)?;
    }
    if trees.missing_is_true.iter().any(|&v| v != 0) {
        let tracks = integers(c, &trees.missing_is_true)?;
        let tracks = lookup(c, tracks, node)?;
        let tracks = c.cast(tracks, DType::Bool)?;
        let missing = c.unary(UnaryOp::IsNan, value)?;
        let missing = c.binary(BinaryOp::And, missing, tracks)?;
        taken = c.binary(BinaryOp::Or, taken, missing)?;
    }
    let (on_true, on_false) = (integers(c, &trees.on_true)?, integers(c, &trees.on_false)?);
    let (on_true, on_false) = (lookup(c, on_true, node)?, lookup(c, on_false, node)?);
    Ok(c.select(taken, on_true, on_false)?)
}

/// Whether `value` is in the set of `node`.
fn is_member(c: &mut Context, trees: &Trees, node: NodeId, value: NodeId) -> Result<NodeId, OpError> {
    let (owners, values): (Vec<i64>, Vec<f64>) = trees.members.iter().copied().unzip();
    let shape = c.shape(node);
    let wide: Shape = shape.iter().copied().chain([owners.len()]).collect();
    let (owners, values) = (integers(c, &owners)?, reals(c, &values)?);
    let (owners, values) = (c.broadcast_without(owners, &wide, &[0, 1])?, c.broadcast_without(values, &wide, &[0, 1])?);
    let (node, value) = (c.broadcast_without(node, &wide, &[2])?, c.broadcast_without(value, &wide, &[2])?);
    let (own, equal) = (c.compare(CompareOp::Eq, node, owners)?, c.compare(CompareOp::Eq, value, values)?);
    let hit = c.binary(BinaryOp::And, own, equal)?;
    Ok(c.reduce(ReduceOp::Max, hit, &[2])?)
}
