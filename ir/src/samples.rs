//! How values over a batch depend on its samples: whether each sample has a part of a value for itself, and where.

use std::collections::HashMap;

use crate::{Composite, Graph, Node, NodeId, Op, Shape};

/// Where the samples of a batch lie in a value: index `i` of `axis` belongs to sample `i / span`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleAxis {
    pub axis: usize,
    /// Indices per sample.
    pub span: usize,
}

/// How a value over a batch depends on the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleDependence {
    /// On none of them.
    None,
    /// Each part on its own sample only, wherever that is in the batch.
    Separate(SampleAxis),
    /// On several samples at once, on a sample's place in the batch, or in a way that nobody looked into.
    Joint,
}

/// The dependence of every node on the `batch` samples of the inputs, which depend on them as `inputs` says, by [`InputId`](crate::InputId).
pub fn sample_dependence(graph: &Graph, batch: usize, inputs: &[SampleDependence]) -> Vec<SampleDependence> {
    let mut analysis = Analysis { graph, batch, found: Vec::with_capacity(graph.nodes().len()), periodic: HashMap::new() };
    for node in graph.nodes() {
        let found = match &node.op {
            Op::Input(id) => inputs.get(id.0 as usize).copied().unwrap_or(SampleDependence::Joint),
            _ => analysis.node(node),
        };
        analysis.found.push(found);
    }
    analysis.found
}

struct Analysis<'g> {
    graph: &'g Graph,
    batch: usize,
    /// Of the nodes before the current one.
    found: Vec<SampleDependence>,
    periodic: HashMap<(NodeId, usize, usize), bool>,
}

impl Analysis<'_> {
    fn node(&mut self, node: &Node) -> SampleDependence {
        let operands: Vec<SampleDependence> = node.operands.iter().map(|o| self.found[o.index()]).collect();
        if operands.iter().all(|d| *d == SampleDependence::None) {
            return SampleDependence::None;
        }
        if operands.contains(&SampleDependence::Joint) {
            return SampleDependence::Joint;
        }
        if let Op::Composite(composite) = &node.op {
            return self.composite(composite, node, &operands);
        }
        self.separate(node).map_or(SampleDependence::Joint, SampleDependence::Separate)
    }

    /// Of a node at least one operand of which has a sample axis.
    fn separate(&mut self, node: &Node) -> Option<SampleAxis> {
        let operand = |position: usize| node.operands.get(position).copied();
        let shape = |position: usize| Some(&self.graph.ty(operand(position)?).shape);
        match &node.op {
            op if op.is_pointwise() => self.common(&node.operands),
            Op::Concat { axis } => self.common(&node.operands).filter(|at| at.axis != *axis),
            Op::Reshape(to) => reshaped(self.batch, shape(0)?, self.axis(operand(0)?)?, to),
            Op::Transpose(perm) => {
                let at = self.axis(operand(0)?)?;
                Some(SampleAxis { axis: perm.iter().position(|&axis| axis == at.axis)?, ..at })
            }
            Op::Broadcast { axes, .. } => {
                let at = self.axis(operand(0)?)?;
                Some(SampleAxis { axis: *axes.get(at.axis)?, ..at })
            }
            Op::Slice(dims) => {
                let at = self.axis(operand(0)?)?;
                let (dim, size) = (dims.get(at.axis)?, *shape(0)?.get(at.axis)?);
                (dim.start == 0 && dim.step == 1 && dim.size == size).then_some(at)
            }
            Op::Pad(dims) => {
                let at = self.axis(operand(0)?)?;
                let dim = dims.get(at.axis)?;
                (!self.depends(operand(1)?) && (dim.low, dim.high, dim.interior) == (0, 0, 0)).then_some(at)
            }
            Op::Unfold(window) => {
                let at = self.axis(operand(0)?)?;
                let lead = shape(0)?.rank().checked_sub(window.size.len())?;
                (!self.depends(operand(1)?) && at.axis < lead).then_some(at)
            }
            Op::Fold { window, .. } => {
                let at = self.axis(operand(0)?)?;
                let lead = shape(0)?.rank().checked_sub(2 * window.size.len())?;
                (at.axis < lead).then_some(at)
            }
            Op::Dot(dims) => {
                let (lhs, rhs) = (operand(0)?, operand(1)?);
                let paired = |axis: usize, batch: &[usize]| batch.iter().position(|&b| b == axis);
                let batches = dims.lhs_batch.len();
                let (lhs_free, rhs_free) = (dims.lhs_free(shape(0)?.rank()), dims.rhs_free(shape(1)?.rank()));
                match (self.axis(lhs), self.axis(rhs)) {
                    (Some(left), Some(right)) => {
                        let axis = paired(left.axis, &dims.lhs_batch)?;
                        let agree = paired(right.axis, &dims.rhs_batch) == Some(axis) && left.span == right.span;
                        agree.then_some(SampleAxis { axis, ..left })
                    }
                    (Some(left), None) => match paired(left.axis, &dims.lhs_batch) {
                        Some(axis) => self.periodic(rhs, SampleAxis { axis: *dims.rhs_batch.get(axis)?, ..left }, axis),
                        None => Some(SampleAxis { axis: batches + paired(left.axis, &lhs_free)?, ..left }),
                    },
                    (None, Some(right)) => match paired(right.axis, &dims.rhs_batch) {
                        Some(axis) => self.periodic(lhs, SampleAxis { axis: *dims.lhs_batch.get(axis)?, ..right }, axis),
                        None => Some(SampleAxis { axis: batches + lhs_free.len() + paired(right.axis, &rhs_free)?, ..right }),
                    },
                    (None, None) => None,
                }
            }
            Op::Conv(_) => {
                self.axis(operand(0)?).filter(|at| at.axis == 0).filter(|_| operand(1).is_some_and(|w| !self.depends(w)))
            }
            Op::Reduce { axes, .. } => {
                let at = self.axis(operand(0)?)?;
                let before = axes.iter().filter(|&&axis| axis < at.axis).count();
                (!axes.contains(&at.axis)).then_some(SampleAxis { axis: at.axis - before, ..at })
            }
            Op::ArgReduce { axis, .. } => {
                let at = self.axis(operand(0)?)?;
                (at.axis != *axis).then_some(SampleAxis { axis: at.axis - usize::from(*axis < at.axis), ..at })
            }
            Op::Gather { axis } => match (self.axis(operand(0)?), self.axis(operand(1)?)) {
                (None, Some(at)) => Some(SampleAxis { axis: axis + at.axis, ..at }),
                (Some(at), None) if at.axis < *axis => Some(at),
                (Some(at), None) if at.axis > *axis => Some(SampleAxis { axis: at.axis + shape(1)?.rank() - 1, ..at }),
                _ => None,
            },
            _ => None,
        }
    }

    fn axis(&self, node: NodeId) -> Option<SampleAxis> {
        match self.found[node.index()] {
            SampleDependence::Separate(at) => Some(at),
            _ => None,
        }
    }

    fn depends(&self, node: NodeId) -> bool {
        self.found[node.index()] != SampleDependence::None
    }

    /// The sample axis of operands of one shape, if they have the same one, and those without one are the same for every sample.
    fn common(&mut self, operands: &[NodeId]) -> Option<SampleAxis> {
        let at = operands.iter().find_map(|&o| self.axis(o))?;
        let agree = operands.iter().all(|&o| match self.axis(o) {
            Some(other) => other == at,
            None => self.is_periodic(o, at),
        });
        agree.then_some(at)
    }

    /// `at` on another axis, if a value that depends on no sample is the same for each.
    fn periodic(&mut self, node: NodeId, at: SampleAxis, axis: usize) -> Option<SampleAxis> {
        self.is_periodic(node, at).then_some(SampleAxis { axis, ..at })
    }

    /// Whether a value that depends on no sample repeats along `at.axis` every `at.span` indices.
    fn is_periodic(&mut self, id: NodeId, at: SampleAxis) -> bool {
        let key = (id, at.axis, at.span);
        if let Some(&known) = self.periodic.get(&key) {
            return known;
        }
        let graph = self.graph;
        let node = graph.node(id);
        let moved = |axis: usize| SampleAxis { axis, ..at };
        let operand = node.operands.first().copied();
        let periodic = match (&node.op, operand) {
            _ if node.ty.shape.get(at.axis) == Some(&at.span) => true,
            (Op::Constant(tensor), _) => {
                let outer: usize = node.ty.shape.iter().take(at.axis).product();
                let run = tensor.bytes().len() / outer.max(1);
                let period = run * at.span / node.ty.shape.get(at.axis).copied().unwrap_or(1).max(1);
                period > 0 && tensor.bytes().chunks(run).all(|run| run.iter().zip(run.iter().skip(period)).all(|(a, b)| a == b))
            }
            (Op::Iota { axis, .. }, _) => *axis != at.axis,
            (Op::Broadcast { axes, .. }, Some(x)) => match axes.iter().position(|&axis| axis == at.axis) {
                Some(axis) => self.is_periodic(x, moved(axis)),
                None => true,
            },
            (Op::Transpose(perm), Some(x)) => perm.get(at.axis).is_some_and(|&axis| self.is_periodic(x, moved(axis))),
            (Op::Reshape(_), Some(x)) => {
                let origin = reshaped(self.batch, &node.ty.shape, at, &graph.ty(x).shape);
                origin.is_some_and(|at| self.is_periodic(x, at))
            }
            (op, _) if op.is_pointwise() => node.operands.iter().all(|&x| self.is_periodic(x, at)),
            _ => false,
        };
        self.periodic.insert(key, periodic);
        periodic
    }

    /// A composite depends on samples as its decomposition does.
    fn composite(&self, composite: &Composite, node: &Node, operands: &[SampleDependence]) -> SampleDependence {
        let mut inner = Graph::new();
        let inputs = node.operands.iter().enumerate().map(|(i, &o)| inner.input(i.to_string(), self.graph.ty(o).clone()));
        let result = inputs.collect::<Result<Vec<NodeId>, _>>().and_then(|inputs| composite.decompose(&mut inner, &inputs));
        match result {
            Ok(result) => sample_dependence(&inner, self.batch, operands)[result.index()],
            Err(_) => SampleDependence::Joint,
        }
    }
}

/// Where the sample axis `at` of `from` is after a change of shape; none if samples end up in several axes.
fn reshaped(batch: usize, from: &Shape, at: SampleAxis, to: &Shape) -> Option<SampleAxis> {
    let outer: usize = from.iter().take(at.axis).product();
    let mut before = 1;
    for (axis, &size) in to.iter().enumerate() {
        if before == outer && size > 0 && size % batch.max(1) == 0 {
            return Some(SampleAxis { axis, span: size / batch.max(1) });
        }
        before *= size;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConvDims, DType, DotDims, ParameterInfo, ParameterRole, ReduceOp, Tensor, TensorType, UnaryOp};

    const BATCH: usize = 4;

    fn float(shape: &[usize]) -> TensorType {
        TensorType::new(DType::F32, shape)
    }

    /// The dependence of what `build` makes of an input `[4, 3, 6]` and a parameter of `shape`.
    fn dependence(shape: &[usize], build: impl FnOnce(&mut Graph, NodeId, NodeId) -> NodeId) -> SampleDependence {
        let mut g = Graph::new();
        let x = g.input("x", float(&[BATCH, 3, 6])).unwrap();
        let info = ParameterInfo { name: "w".into(), ty: float(shape), stored: DType::F32, role: ParameterRole::Weight };
        let w = g.parameter(info).unwrap();
        let y = build(&mut g, x, w);
        let input = SampleDependence::Separate(SampleAxis { axis: 0, span: 1 });
        sample_dependence(&g, BATCH, &[input])[y.index()]
    }

    fn at(axis: usize, span: usize) -> SampleDependence {
        SampleDependence::Separate(SampleAxis { axis, span })
    }

    fn dot(lhs: usize, rhs: usize) -> Op {
        Op::Dot(DotDims { lhs_contract: vec![lhs], rhs_contract: vec![rhs], ..DotDims::default() })
    }

    #[test]
    fn layers_keep_samples_apart() {
        assert_eq!(dependence(&[6, 5], |g, x, w| g.push(dot(2, 0), &[x, w]).unwrap()), at(0, 1));
        assert_eq!(dependence(&[5, 6], |g, x, w| g.push(dot(1, 2), &[w, x]).unwrap()), at(1, 1));
        let conv = Op::Conv(ConvDims {
            stride: vec![1],
            pads: vec![(0, 0)],
            input_dilation: vec![1],
            kernel_dilation: vec![1],
            groups: 1,
        });
        assert_eq!(dependence(&[2, 3, 2], |g, x, w| g.push(conv, &[x, w]).unwrap()), at(0, 1));
        assert_eq!(dependence(&[], |g, x, _| g.push(Op::Composite(Composite::Softmax { axis: 1 }), &[x]).unwrap()), at(0, 1));
        assert_eq!(dependence(&[], |g, x, _| g.reduce(ReduceOp::Sum, x, &[1, 2]).unwrap()), at(0, 1));
    }

    #[test]
    fn the_sample_axis_moves_and_merges() {
        assert_eq!(dependence(&[], |g, x, _| g.push(Op::Transpose(vec![1, 0, 2]), &[x]).unwrap()), at(1, 1));
        assert_eq!(dependence(&[], |g, x, _| g.push(Op::Reshape([12, 6].into()), &[x]).unwrap()), at(0, 3));
        let flattened = |g: &mut Graph, x, w| {
            let rows = g.push(Op::Reshape([12, 6].into()), &[x]).unwrap();
            let y = g.push(dot(1, 0), &[rows, w]).unwrap();
            g.push(Op::Reshape([4, 15].into()), &[y]).unwrap()
        };
        assert_eq!(dependence(&[6, 5], flattened), at(0, 1));
        let split = |g: &mut Graph, x, _| g.push(Op::Reshape([2, 2, 18].into()), &[x]).unwrap();
        assert_eq!(dependence(&[], split), SampleDependence::Joint);
    }

    #[test]
    fn statistics_of_a_batch_join_its_samples() {
        let centred = |g: &mut Graph, x, _| {
            let mean = g.mean_keep(x, &[0]).unwrap();
            g.sub(x, mean).unwrap()
        };
        assert_eq!(dependence(&[], centred), SampleDependence::Joint);
        let softmax = |g: &mut Graph, x, _| g.push(Op::Composite(Composite::Softmax { axis: 0 }), &[x]).unwrap();
        assert_eq!(dependence(&[], softmax), SampleDependence::Joint);
    }

    #[test]
    fn a_value_that_differs_by_place_joins_unless_it_repeats() {
        let add = |values: Vec<f32>| {
            move |g: &mut Graph, x, _| {
                let places = g.constant(Tensor::from_f32([4, 3, 6], &values)).unwrap();
                g.add(x, places).unwrap()
            }
        };
        assert_eq!(dependence(&[], add((0..72).map(|i| i as f32).collect())), SampleDependence::Joint);
        assert_eq!(dependence(&[], add((0..72).map(|i| (i % 18) as f32).collect())), at(0, 1));
        assert_eq!(dependence(&[4, 3, 6], |g, x, w| g.add(x, w).unwrap()), SampleDependence::Joint);
        let shared = |g: &mut Graph, x, w| {
            let w = g.unary(UnaryOp::Exp, w).unwrap();
            let w = g.push(Op::Broadcast { shape: [4, 3, 6].into(), axes: vec![1, 2] }, &[w]).unwrap();
            g.add(x, w).unwrap()
        };
        assert_eq!(dependence(&[3, 6], shared), at(0, 1));
        let merged = |g: &mut Graph, x, w| {
            let w = g.push(Op::Broadcast { shape: [4, 3, 6].into(), axes: vec![1, 2] }, &[w]).unwrap();
            let [x, w] = [x, w].map(|v| g.push(Op::Reshape([12, 6].into()), &[v]).unwrap());
            g.add(x, w).unwrap()
        };
        assert_eq!(dependence(&[3, 6], merged), at(0, 3));
    }
}
