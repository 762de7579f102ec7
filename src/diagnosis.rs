//! Which tensor of a step went bad first: the step runs again on the same weights and data, as programs that show its values in turn.

use std::fmt;

use meganeura_codegen::CompileOptions;
use meganeura_codegen::saturate::{Limits, saturate};
use meganeura_ir::{
    BinaryOp, CompareOp, DType, Graph, GraphError, NodeId, Op, PadDim, ParameterId, ReduceOp, Tensor, TensorType, UnaryOp,
};
use meganeura_runtime::Session;

use crate::error::Error;
use crate::predictor::{by_name, compile_with};

/// Values that one program looks at, and the bytes that they may take together.
const VALUES: usize = 128;
const BYTES: u64 = 256 << 20;

/// The first tensor of a step, in the order of execution, that is not finite though its operands could have made it so.
#[derive(Clone, Debug, PartialEq)]
pub struct BadTensor {
    /// What computes it.
    pub op: &'static str,
    /// The node of the model that it belongs to, where it belongs to one.
    pub origin: Option<String>,
    pub pass: Pass,
    pub ty: TensorType,
    /// The first element that is not finite, and its value.
    pub element: Option<(Vec<usize>, f64)>,
    pub operands: Vec<Range>,
}

/// The part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// What a tensor holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Range {
    /// What computes it; of an input or parameter the name.
    pub what: String,
    pub ty: TensorType,
    /// Of the finite elements.
    pub min: f64,
    pub max: f64,
    /// Elements that are not finite.
    pub bad: usize,
}

impl fmt::Display for BadTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        write!(f, "the first tensor that is not finite is {} of {} in the {pass} pass", self.ty, self.op)?;
        match (&self.origin, self.pass) {
            (Some(origin), Pass::Forward) => write!(f, ", node {origin}")?,
            (Some(origin), Pass::Backward) => write!(f, ", the derivative of node {origin}")?,
            (None, _) => {}
        }
        if let Some((index, value)) = &self.element {
            write!(f, "; element {index:?} is {value}")?;
        }
        self.operands.iter().try_for_each(|operand| write!(f, "; {operand}"))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operand {} {} is in {:e}..={:e}", self.what, self.ty, self.min, self.max)?;
        if self.bad > 0 { write!(f, ", with {} elements that are not finite", self.bad) } else { Ok(()) }
    }
}

/// A step up to its gradients, with all of its nodes.
#[derive(Clone, Debug)]
pub(crate) struct Diagnosis {
    /// Declares what the training step declares; has no outputs and no updates.
    pub graph: Graph,
    /// Nodes from here on belong to the backward pass.
    pub backward: NodeId,
    /// The loss and the gradients.
    pub roots: Vec<NodeId>,
}

impl Diagnosis {
    /// Runs the step on `inputs` and on the weights of `session`, which takes the same inputs; `infinite` names the parameters that are not
    /// finite and meant so. `None` if all values are finite.
    ///
    /// # Errors
    /// The device fails.
    pub fn find(
        &self,
        session: &Session,
        inputs: &[(String, Tensor)],
        infinite: &[ParameterId],
    ) -> Result<Option<BadTensor>, Error> {
        if let Some(found) = self.search(session, inputs, infinite)? {
            return Ok(Some(found));
        }
        // Rewrites may overflow where the graph as written does not.
        let mut graph = self.graph.clone();
        for (index, &root) in self.roots.iter().enumerate() {
            graph.output(format!("root/{index}"), root)?;
        }
        let (mut graph, _) = saturate(&graph, &Limits::default()).map_err(meganeura_codegen::CompileError::from)?;
        let roots: Vec<NodeId> = graph.outputs().iter().map(|o| o.node).collect();
        graph.clear_outputs();
        let loss = roots.first().map_or(0, |loss| loss.0);
        Diagnosis { graph, backward: NodeId(loss + 1), roots }.search(session, inputs, infinite)
    }

    fn search(
        &self,
        session: &Session,
        inputs: &[(String, Tensor)],
        infinite: &[ParameterId],
    ) -> Result<Option<BadTensor>, Error> {
        let (g, profile) = (&self.graph, session.store().device().profile());
        let computed = self.needed();
        let values: Vec<NodeId> = computed.into_iter().filter(|&id| is_float(g, id)).collect();
        // Infinity that comes from a constant, such as a mask's, is meant.
        let constant = |op: &Op| match op {
            Op::Parameter(id) if infinite.contains(id) => Infinities { negative: true, positive: true },
            Op::Constant(value) if value.dtype().is_float() => Infinities::of(value),
            _ => Infinities::default(),
        };
        let mut meant: Vec<Infinities> = g.nodes().iter().map(|node| constant(&node.op)).collect();
        let mut rest = values.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |&&id: &&NodeId| {
                bytes += profile.bytes(g.ty(id));
                bytes <= BYTES
            };
            let (chunk, after) = rest.split_at(rest.iter().take(VALUES).take_while(fits).count().max(1));
            rest = after;
            for (&id, flag) in chunk.iter().zip(self.flags(session, inputs, chunk)?) {
                let through = passed(&g.node(id).op, g.node(id).operands.iter().map(|o| meant[o.index()]));
                match flag {
                    Flag::Finite => {}
                    Flag::Infinite(sign) if through.has(sign) => meant[id.index()] = through,
                    Flag::Infinite(_) | Flag::NaN => return self.describe(session, inputs, id).map(Some),
                }
            }
        }
        Ok(None)
    }

    /// The nodes that the loss and the gradients need, in order.
    fn needed(&self) -> Vec<NodeId> {
        let mut needed = vec![false; self.graph.nodes().len()];
        self.roots.iter().for_each(|root| needed[root.index()] = true);
        for id in self.graph.ids().rev() {
            if needed[id.index()] {
                self.graph.node(id).operands.iter().for_each(|o| needed[o.index()] = true);
            }
        }
        self.graph.ids().filter(|id| needed[id.index()]).collect()
    }

    /// What each of `nodes` holds.
    fn flags(&self, session: &Session, inputs: &[(String, Tensor)], nodes: &[NodeId]) -> Result<Vec<Flag>, Error> {
        let mut g = self.graph.clone();
        for (index, &node) in nodes.iter().enumerate() {
            let worst = worst(&mut g, node)?;
            g.output(format!("flag/{index}"), worst)?;
        }
        let outputs = run(session, g, inputs)?;
        let flag = |tensor: &Tensor| match tensor.scalar_f64() {
            Some(0.0) => Flag::Finite,
            Some(1.0) => Flag::Infinite(Sign::Negative),
            Some(2.0) => Flag::Infinite(Sign::Positive),
            _ => Flag::NaN,
        };
        Ok(outputs.iter().map(flag).collect())
    }

    fn describe(&self, session: &Session, inputs: &[(String, Tensor)], id: NodeId) -> Result<BadTensor, Error> {
        let mut g = self.graph.clone();
        let node = g.node(id).clone();
        let mut shown = vec![id];
        shown.extend(node.operands.iter().filter(|o| g.ty(**o).dtype.is_float()));
        for (index, &value) in shown.iter().enumerate() {
            g.output(format!("value/{index}"), value)?;
        }
        let values = run(session, g, inputs)?;
        let element = values.first().and_then(|tensor| {
            let values = tensor.to_f64_vec();
            let position = values.iter().position(|v| !v.is_finite())?;
            Some((coordinates(position, tensor.shape()), values[position]))
        });
        let operands = shown.iter().zip(&values).skip(1).map(|(&operand, tensor)| self.range(operand, tensor));
        Ok(BadTensor {
            op: node.op.name(),
            origin: self.graph.origin(id).map(|origin| origin.to_string()),
            pass: if id < self.backward { Pass::Forward } else { Pass::Backward },
            ty: node.ty,
            element,
            operands: operands.collect(),
        })
    }

    fn range(&self, id: NodeId, tensor: &Tensor) -> Range {
        let g = &self.graph;
        let what = match &g.node(id).op {
            Op::Input(input) => g.inputs().get(input.0 as usize).map(|i| format!("input {:?}", i.name)),
            Op::Parameter(parameter) => g.parameters().get(parameter.0 as usize).map(|p| format!("parameter {:?}", p.name)),
            op => g.origin(id).map(|origin| format!("{} of node {origin}", op.name())),
        };
        let what = what.unwrap_or_else(|| g.node(id).op.name().to_owned());
        let values = tensor.to_f64_vec();
        let finite = || values.iter().copied().filter(|v| v.is_finite());
        let (min, max) = (finite().fold(f64::INFINITY, f64::min), finite().fold(f64::NEG_INFINITY, f64::max));
        Range { what, ty: tensor.ty().clone(), min, max, bad: values.len() - finite().count() }
    }
}

/// What a tensor holds at worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flag {
    Finite,
    Infinite(Sign),
    NaN,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    Negative,
    Positive,
}

/// Which infinities a tensor may hold because they are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Infinities {
    negative: bool,
    positive: bool,
}

impl Infinities {
    fn of(value: &Tensor) -> Self {
        let values = value.to_f64_vec();
        Infinities { negative: values.contains(&f64::NEG_INFINITY), positive: values.contains(&f64::INFINITY) }
    }

    fn has(self, sign: Sign) -> bool {
        match sign {
            Sign::Negative => self.negative,
            Sign::Positive => self.positive,
        }
    }
}

/// The infinities of the operands that an op hands on.
fn passed(op: &Op, operands: impl Iterator<Item = Infinities>) -> Infinities {
    let all = operands.fold(Infinities::default(), |all, one| Infinities {
        negative: all.negative || one.negative,
        positive: all.positive || one.positive,
    });
    let any = all.negative || all.positive;
    match op {
        Op::Binary(BinaryOp::Add | BinaryOp::Max | BinaryOp::Min) | Op::Select | Op::Cast(_) | Op::Reduce { .. } => all,
        op if op.is_movement() || matches!(op, Op::Gather { .. } | Op::Scatter { .. }) => all,
        Op::Binary(_) | Op::Unary(UnaryOp::Neg | UnaryOp::Abs) => Infinities { negative: any, positive: any },
        _ => Infinities::default(),
    }
}

fn is_float(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    node.ty.dtype.is_float() && !node.op.is_leaf() && node.ty.shape.numel() > 0
}

/// Elements that one workgroup reduces.
const ROW: usize = 1024;

/// 3 if an element is NaN, else 2 if one is infinite, else 1 if one is minus infinity, else 0.
fn worst(g: &mut Graph, node: NodeId) -> Result<NodeId, GraphError> {
    let ty = TensorType { dtype: DType::F32, ..g.ty(node).clone() };
    let (nan, infinite) = (g.unary(UnaryOp::IsNan, node)?, g.unary(UnaryOp::IsInf, node)?);
    let zeros = g.constant_like(node, 0.0)?;
    let positive = g.compare(CompareOp::Gt, node, zeros)?;
    let [zero, one, two, three] = [g.splat(&ty, 0.0)?, g.splat(&ty, 1.0)?, g.splat(&ty, 2.0)?, g.splat(&ty, 3.0)?];
    let sign = g.select(positive, two, one)?;
    let infinite = g.select(infinite, sign, zero)?;
    let flags = g.select(nan, three, infinite)?;
    let padding = g.splat(&TensorType::scalar(DType::F32), 0.0)?;
    let mut size = ty.shape.numel();
    let mut flags = g.reshape(flags, [size])?;
    while size > ROW {
        let rows = size.div_ceil(ROW);
        let high = rows * ROW - size;
        if high > 0 {
            flags = g.push(Op::Pad(vec![PadDim { high, ..PadDim::default() }]), &[flags, padding])?;
        }
        let matrix = g.reshape(flags, [rows, ROW])?;
        flags = g.reduce(ReduceOp::Max, matrix, &[1])?;
        size = rows;
    }
    g.reduce(ReduceOp::Max, flags, &[0])
}

fn run(session: &Session, graph: Graph, inputs: &[(String, Tensor)]) -> Result<Vec<Tensor>, Error> {
    let options = CompileOptions { saturate: None, ..CompileOptions::default() };
    let program = compile_with(graph, session.store().device(), &options)?;
    Ok(session.beside(program)?.run(&by_name(inputs))?)
}

/// The index of an element from its row-major position.
fn coordinates(position: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = position;
    let mut index: Vec<usize> = shape.iter().rev().map(|&size| (rest % size.max(1), rest /= size.max(1)).0).collect();
    index.reverse();
    index
}
