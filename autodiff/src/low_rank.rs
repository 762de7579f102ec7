//! Low-rank adapters: `W + scale * B A` stands for a weight `W`, after Hu et al., LoRA: Low-Rank Adaptation of Large Language Models
//! (2021).
//!
//! Where a product reads the weight, `B (A x)` is added to its result, so that a step costs the rank and no gradient of the size of `W`
//! exists. Whatever else reads the weight reads the sum itself.

mod factors;
#[cfg(test)]
mod tests;
mod view;

use std::collections::{BTreeMap, BTreeSet};

use meganeura_ir::{ConvDims, DotDims, Graph, GraphError, Node, NodeId, Op, ParameterId, ParameterInfo, ParameterRole, Shape};

use factors::Factors;
use view::{Side, View, views};

/// Which axes of a weight are the rows (what leaves the layer) and which the columns (what enters it) of its matrix. Rows and columns count
/// in the order of the axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightMatrix {
    /// Sorted.
    rows: Vec<usize>,
    /// The groups of the convolution whose kernel the weight is: its factors are kernels too.
    groups: Option<usize>,
    shape: Shape,
    /// Whether something else reads the weight than one kind of product.
    other_readers: bool,
}

/// Why a weight is no matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    #[error("it has {0} axes, and a matrix at least 2")]
    Rank(usize),
    #[error("a product reads it as a batch of matrices")]
    Batch,
    #[error("it is read through a change of shape that mixes rows and columns")]
    Mixed,
    #[error("no matrix product or convolution reads it, only {}", readers(.0))]
    NoProduct(Vec<&'static str>),
    #[error("an output of the model is the weight itself")]
    Output,
}

fn readers(ops: &[&'static str]) -> String {
    if ops.is_empty() { "nothing".to_owned() } else { ops.join(", ") }
}

impl WeightMatrix {
    /// The matrix of a weight of `shape` whose rows are the axes `rows`; `None` if these are not increasing axes of it, or not those of a
    /// kernel.
    pub fn new(shape: Shape, rows: Vec<usize>, groups: Option<usize>) -> Option<Self> {
        let increasing = rows.is_sorted_by(|a, b| a < b) && rows.last().is_none_or(|&last| last < shape.rank());
        let kernel = groups.is_none_or(|groups| rows == [0] && shape.rank() > 2 && groups > 0);
        (increasing && kernel && shape.rank() > 1).then_some(WeightMatrix { rows, groups, shape, other_readers: false })
    }

    /// The same matrix of a weight that is, or is not, read otherwise too: looked up, added, or contracted over other axes.
    pub fn with_other_readers(self, other_readers: bool) -> Self {
        WeightMatrix { other_readers, ..self }
    }

    pub fn has_other_readers(&self) -> bool {
        self.other_readers
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The groups of the convolution whose kernel the weight is, if it is one.
    pub fn groups(&self) -> Option<usize> {
        self.groups
    }

    fn is_row(&self, axis: usize) -> bool {
        self.rows.contains(&axis)
    }

    fn size(&self, rows: bool) -> usize {
        self.shape.iter().enumerate().filter(|(axis, _)| self.is_row(*axis) == rows).map(|(_, size)| size).product()
    }

    /// Elements that one element of the layer's result is summed from.
    pub fn fan_in(&self) -> usize {
        self.size(false)
    }

    /// The shape of `A`: `[rank, columns]`, of a convolution `[rank, channels, kernel..]`.
    pub fn a_shape(&self, rank: usize) -> Shape {
        match self.groups {
            Some(_) => std::iter::once(rank).chain(self.shape.iter().skip(1).copied()).collect(),
            None => [rank, self.size(false)].into(),
        }
    }

    /// The shape of `B`: `[rows, rank]`, of a convolution `[outputs, rank, 1..]`.
    pub fn b_shape(&self, rank: usize) -> Shape {
        let kernel = if self.groups.is_some() { self.shape.rank() - 2 } else { 0 };
        [self.size(true), rank].into_iter().chain(std::iter::repeat_n(1, kernel)).collect()
    }

    /// `B A`, in the order of the weight's elements.
    pub fn product(&self, rank: usize, a: &[f64], b: &[f64]) -> Vec<f64> {
        let columns = self.size(false);
        // For each axis: its stride in the weight, its size, and its stride among the rows or the columns.
        let (mut row_stride, mut column_stride) = (1, 1);
        let mut axes = Vec::new();
        for (axis, (&size, stride)) in self.shape.iter().zip(self.shape.strides()).enumerate().rev() {
            let own = if self.is_row(axis) { &mut row_stride } else { &mut column_stride };
            axes.push((stride.max(1), size.max(1), *own, self.is_row(axis)));
            *own *= size;
        }
        let element = |position: usize| {
            let (mut row, mut column) = (0, 0);
            for &(stride, size, own, is_row) in &axes {
                *(if is_row { &mut row } else { &mut column }) += position / stride % size * own;
            }
            let left = b.iter().skip(row * rank).take(rank);
            left.zip(a.iter().skip(column).step_by(columns.max(1))).map(|(b, a)| b * a).sum()
        };
        (0..self.shape.numel()).map(element).collect()
    }

    fn side(&self, axes: u64, size: usize) -> Option<Side> {
        let mask = self.rows.iter().fold(0, |mask, axis| mask | 1 << axis);
        match (size, axes & mask != 0, axes & !mask != 0) {
            (1, ..) => Some(Side::Unit),
            (_, true, false) => Some(Side::Row),
            (_, false, true) => Some(Side::Column),
            _ => None,
        }
    }
}

/// For every parameter that outputs and updates of the graph need: its matrix, as the first product that reads it has it.
pub fn weight_matrices(g: &Graph) -> BTreeMap<ParameterId, Result<WeightMatrix, MatrixError>> {
    let views = views(g);
    let mut found: BTreeMap<ParameterId, Result<WeightMatrix, MatrixError>> = BTreeMap::new();
    let mut others: BTreeMap<ParameterId, Vec<&'static str>> = BTreeMap::new();
    let mut differing = BTreeSet::new();
    for id in g.live() {
        let node = g.node(id);
        if let Op::Parameter(parameter) = node.op {
            others.entry(parameter).or_default();
        }
        for (operand, value) in node.operands.iter().enumerate() {
            let Some(view) = views.get(value) else { continue };
            let matrix = match (&node.op, operand) {
                (Op::Dot(dims), _) => dot_matrix(g, view, dims, operand),
                (Op::Conv(dims), 1) => conv_matrix(g, view, dims),
                _ if views.contains_key(&id) => continue,
                _ => {
                    let ops = others.entry(view.parameter).or_default();
                    if !ops.contains(&node.op.name()) {
                        ops.push(node.op.name());
                    }
                    continue;
                }
            };
            match found.get(&view.parameter) {
                Some(Ok(first)) if Ok(first) == matrix.as_ref() => {}
                Some(Ok(_)) => drop(differing.insert(view.parameter)),
                Some(Err(_)) if matrix.is_err() => {}
                earlier => {
                    differing.extend(earlier.map(|_| view.parameter));
                    found.insert(view.parameter, matrix);
                }
            }
        }
    }
    for (parameter, ops) in others {
        let other_readers = !ops.is_empty() || differing.contains(&parameter);
        let matrix = found.remove(&parameter).unwrap_or(Err(MatrixError::NoProduct(ops)));
        found.insert(parameter, matrix.map(|matrix| matrix.with_other_readers(other_readers)));
    }
    for view in g.roots().filter_map(|root| views.get(&root)) {
        found.insert(view.parameter, Err(MatrixError::Output));
    }
    for (parameter, matrix) in &mut found {
        let rank = g.parameters().get(parameter.0 as usize).map_or(0, |p| p.ty.shape.rank());
        if rank < 2 {
            *matrix = Err(MatrixError::Rank(rank));
        }
    }
    found
}

fn dot_matrix(g: &Graph, view: &View, dims: &DotDims, operand: usize) -> Result<WeightMatrix, MatrixError> {
    let (batch, contracted) = match operand {
        0 => (&dims.lhs_batch, &dims.lhs_contract),
        _ => (&dims.rhs_batch, &dims.rhs_contract),
    };
    if batch.iter().any(|&axis| view.size(axis) != 1) {
        return Err(MatrixError::Batch);
    }
    let free = (0..view.axes.len()).filter(|axis| !contracted.contains(axis));
    matrix(g, view, view.sources(free), view.sources(contracted.iter().copied()), None)
}

fn conv_matrix(g: &Graph, view: &View, dims: &ConvDims) -> Result<WeightMatrix, MatrixError> {
    let groups = (view.is_parameter(g) && view.axes.len() > 2).then_some(dims.groups);
    matrix(g, view, view.sources(0..1), view.sources(1..view.axes.len()), groups)
}

/// The matrix of the parameter behind a view, whose axes `rows` and `columns` a product tells apart.
fn matrix(g: &Graph, view: &View, rows: u64, columns: u64, groups: Option<usize>) -> Result<WeightMatrix, MatrixError> {
    if rows & columns != 0 {
        return Err(MatrixError::Mixed);
    }
    let shape = g.parameters().get(view.parameter.0 as usize).map(|p| p.ty.shape.clone()).unwrap_or_default();
    // Axes of one element belong to either side.
    let is_row = |axis: &usize| if groups.is_some() { *axis == 0 } else { rows >> axis & 1 == 1 };
    let rank = shape.rank();
    WeightMatrix::new(shape, (0..rank).filter(is_row).collect(), groups).ok_or(MatrixError::Rank(rank))
}

/// An adapter that a graph is to have.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    pub weight: ParameterId,
    /// As [`weight_matrices`] has it.
    pub matrix: WeightMatrix,
    pub rank: usize,
    /// What `B A` is multiplied by: alpha / rank.
    pub scale: f64,
    /// The names of the two factors, which become parameters.
    pub a: String,
    pub b: String,
}

/// The graph with adapters: for each two parameters, after those that there are, of the shapes that [`WeightMatrix::a_shape`] and
/// [`WeightMatrix::b_shape`] give.
///
/// # Errors
/// A name is taken, or a factor is too large.
pub fn attach_low_rank(g: &Graph, adapters: &[LowRank]) -> Result<Graph, GraphError> {
    let mut g = g.clone();
    let mut attached: BTreeMap<ParameterId, Attached> = BTreeMap::new();
    for adapter in adapters {
        let weight = g.parameters().get(adapter.weight.0 as usize).ok_or(GraphError::UnknownNode(adapter.weight.0))?;
        let dtype = weight.ty.dtype;
        let mut declare = |name: &str, shape: Shape| {
            let ty = meganeura_ir::TensorType::new(dtype, shape);
            g.parameter(ParameterInfo { name: name.to_owned(), ty, stored: dtype, role: ParameterRole::Weight })?;
            Ok::<_, GraphError>(ParameterId(g.parameters().len() as u32 - 1))
        };
        let a = declare(&adapter.a, adapter.matrix.a_shape(adapter.rank))?;
        let b = declare(&adapter.b, adapter.matrix.b_shape(adapter.rank))?;
        attached.insert(adapter.weight, Attached { adapter, a, b });
    }
    let mut edit = Edit { g: &g, attached, views: BTreeMap::new() };
    edit.views = views(&g).into_iter().filter(|(_, view)| edit.is_separable(view)).collect();
    g.rewrite(|out, node, operands| edit.node(out, node, operands))
}

/// An adapter with its parameters.
struct Attached<'a> {
    adapter: &'a LowRank,
    a: ParameterId,
    b: ParameterId,
}

struct Edit<'a> {
    /// As it was.
    g: &'a Graph,
    attached: BTreeMap<ParameterId, Attached<'a>>,
    /// Values that are an adapted weight whose rows and columns can be told apart.
    views: BTreeMap<NodeId, View>,
}

impl Edit<'_> {
    fn node(&self, out: &mut Graph, node: &Node, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let through = node.operands.first().and_then(|operand| self.views.get(operand)?.through(&node.op));
        if through.is_some_and(|view| self.is_separable(&view)) {
            return out.push(node.op.clone(), operands);
        }
        let adapted: Vec<usize> = (0..operands.len()).filter(|&o| self.views.contains_key(&node.operands[o])).collect();
        let added = match (adapted.as_slice(), &node.op) {
            (&[o], Op::Dot(dims)) => self.dot(out, node, operands, dims, o)?,
            (&[1], Op::Conv(dims)) => self.conv(out, node, operands, dims)?,
            (&[0], Op::Gather { axis }) => self.gather(out, node, operands, *axis)?,
            _ => None,
        };
        if let Some(added) = added {
            let y = out.push(node.op.clone(), operands)?;
            return out.add(y, added);
        }
        let mut operands = operands.to_vec();
        for o in adapted {
            let sum = self.factors(out, node.operands[o])?.map(|factors| factors.sum(out)).transpose()?;
            if let Some(sum) = sum {
                operands[o] = out.add(operands[o], sum)?;
            }
        }
        out.push(node.op.clone(), &operands)
    }

    fn is_separable(&self, view: &View) -> bool {
        self.attached.get(&view.parameter).is_some_and(|found| view.sides(&found.adapter.matrix).is_some())
    }

    fn factors(&self, out: &mut Graph, value: NodeId) -> Result<Option<Factors>, GraphError> {
        let Some(view) = self.views.get(&value) else { return Ok(None) };
        match self.attached.get(&view.parameter) {
            Some(found) => Factors::build((self.g, &self.views), out, value, found).map(Some),
            None => Ok(None),
        }
    }

    /// What a product of data and weight lacks: `scale * B (A x)`. `None` where it does not contract rows, or columns, as a whole.
    fn dot(
        &self,
        out: &mut Graph,
        node: &Node,
        operands: &[NodeId],
        dims: &DotDims,
        weight: usize,
    ) -> Result<Option<NodeId>, GraphError> {
        let Some(factors) = self.factors(out, node.operands[weight])? else { return Ok(None) };
        let (batch, contracted, others) = match weight {
            0 => (&dims.lhs_batch, &dims.lhs_contract, &dims.rhs_contract),
            _ => (&dims.rhs_batch, &dims.rhs_contract, &dims.lhs_contract),
        };
        let free: Vec<usize> = (0..factors.rank()).filter(|axis| !contracted.contains(axis)).collect();
        if !batch.is_empty() {
            return Ok(None);
        }
        let sides = [(Side::Column, Side::Row), (Side::Row, Side::Column)];
        let fits = |&&(inner, outer): &&(Side, Side)| factors.are(contracted, inner) && factors.are(&free, outer);
        let Some(&(inner, outer)) = sides.iter().find(fits) else { return Ok(None) };
        let x = operands[1 - weight];
        let first = factors.factor(out, inner, contracted)?;
        let reduced =
            DotDims { lhs_contract: others.clone(), rhs_contract: (0..contracted.len()).collect(), ..DotDims::default() };
        let t = out.push(Op::Dot(reduced), &[x, first])?;
        let last = out.ty(t).shape.rank() - 1;
        let second = factors.factor(out, outer, &free)?;
        let (operands, contract) = match weight {
            0 => ([second, t], [free.len(), last]),
            _ => ([t, second], [last, free.len()]),
        };
        let dims = DotDims { lhs_contract: vec![contract[0]], rhs_contract: vec![contract[1]], ..DotDims::default() };
        let low = out.push(Op::Dot(dims), &operands)?;
        out.scale(low, factors.scale).map(Some)
    }

    /// As [`Edit::dot`], of a convolution. Groups share `A`: it reads the channels of each.
    fn conv(&self, out: &mut Graph, node: &Node, operands: &[NodeId], dims: &ConvDims) -> Result<Option<NodeId>, GraphError> {
        let (Some(factors), &[x, weight]) = (self.factors(out, node.operands[1])?, operands) else { return Ok(None) };
        let columns: Vec<usize> = (1..factors.rank()).collect();
        if !factors.are(&[0], Side::Row) || !factors.are(&columns, Side::Column) {
            return Ok(None);
        }
        let kernel = out.ty(weight).shape.clone();
        let last = columns.len();
        let a = factors.factor(out, Side::Column, &columns)?;
        let a = out.transpose(a, &std::iter::once(last).chain(0..last).collect::<Vec<_>>())?;
        let b = factors.factor(out, Side::Row, &[0])?;
        let ones = std::iter::repeat_n(1, kernel.rank() - 2);
        let b = out.reshape(b, [kernel[0], factors.adapter_rank].into_iter().chain(ones).collect::<Shape>())?;

        let shape = out.ty(x).shape.clone();
        let groups = dims.groups;
        let apart: Shape = [shape[0] * groups, kernel[1]].into_iter().chain(shape.iter().skip(2).copied()).collect();
        let x = out.reshape(x, apart)?;
        let t = out.push(Op::Conv(ConvDims { groups: 1, ..dims.clone() }), &[x, a])?;
        let sizes: Vec<usize> = out.ty(t).shape.iter().skip(2).copied().collect();
        let joined: Shape = [shape[0], groups * factors.adapter_rank].into_iter().chain(sizes.iter().copied()).collect();
        let t = out.reshape(t, joined)?;
        let n = sizes.len();
        let pointwise = ConvDims {
            stride: vec![1; n],
            pads: vec![(0, 0); n],
            input_dilation: vec![1; n],
            kernel_dilation: vec![1; n],
            groups,
        };
        let low = out.push(Op::Conv(pointwise), &[t, b])?;
        out.scale(low, factors.scale).map(Some)
    }

    /// As [`Edit::dot`], of rows or columns of a matrix that indices choose.
    fn gather(&self, out: &mut Graph, node: &Node, operands: &[NodeId], axis: usize) -> Result<Option<NodeId>, GraphError> {
        let (Some(factors), &[_, indices]) = (self.factors(out, node.operands[0])?, operands) else { return Ok(None) };
        let sides = [(Side::Row, Side::Column), (Side::Column, Side::Row)];
        let fits = |&&(chosen, other): &&(Side, Side)| {
            factors.rank() == 2 && factors.are(&[axis], chosen) && factors.are(&[1 - axis], other)
        };
        let Some(&(chosen, other)) = sides.iter().find(fits) else { return Ok(None) };
        let table = factors.factor(out, chosen, &[axis])?;
        let rows = out.push(Op::Gather { axis: 0 }, &[table, indices])?;
        let last = out.ty(rows).shape.rank() - 1;
        let second = factors.factor(out, other, &[1 - axis])?;
        let (operands, contract) = match axis {
            0 => ([rows, second], [last, 1]),
            _ => ([second, rows], [1, last]),
        };
        let dims = DotDims { lhs_contract: vec![contract[0]], rhs_contract: vec![contract[1]], ..DotDims::default() };
        let low = out.push(Op::Dot(dims), &operands)?;
        out.scale(low, factors.scale).map(Some)
    }
}
