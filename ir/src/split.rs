//! Cuts a graph in two: what lies before some values, and the rest with these values as inputs.

use std::collections::HashMap;

use crate::{Graph, GraphError, InputId, NodeId, Op, TensorType};

/// A value at which [`Graph::split`] cuts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Of the output and the input that it becomes.
    pub name: String,
    pub node: NodeId,
    /// The axis that comes first in that output and input.
    pub first: usize,
}

/// The two halves of a graph. Both declare all its parameters, and the inputs that they read.
#[derive(Clone, Debug)]
pub struct Split {
    /// Its outputs are the values at the cut.
    pub prefix: Graph,
    /// Its last inputs are the values at the cut; it has the outputs and updates of the graph.
    pub suffix: Graph,
    /// Of the suffix: the nodes that were asked for.
    pub kept: Vec<NodeId>,
}

impl Graph {
    /// Cuts the graph at some values. `keep` names nodes that the second half has in any case.
    ///
    /// # Errors
    /// A node does not exist, or an input has the name of a cut.
    pub fn split(&self, cuts: &[Cut], keep: &[NodeId]) -> Result<Split, GraphError> {
        let cut_nodes: Vec<NodeId> = cuts.iter().map(|cut| cut.node).collect();
        let mut prefix = self.with_parameters();
        let mut map = HashMap::new();
        self.copy_into(&mut prefix, &mut map, &cut_nodes)?;
        for cut in cuts {
            let node = move_axis(&mut prefix, map[&cut.node], cut.first, Direction::ToFront)?;
            prefix.output(&cut.name, node)?;
        }

        let mut suffix = self.with_parameters();
        let roots: Vec<NodeId> = self.roots().chain(keep.iter().copied()).collect();
        let mut map: HashMap<NodeId, NodeId> = HashMap::new();
        for info in self.inputs_read(&roots, &cut_nodes)? {
            suffix.declare_input(self.inputs()[info.0 as usize].clone())?;
        }
        for cut in cuts {
            let ty = self.ty(cut.node);
            let shape = std::iter::once(ty.shape[cut.first]).chain(ty.shape.without(&[cut.first]).iter().copied()).collect();
            let input = suffix.input(&cut.name, TensorType { shape, ..ty.clone() })?;
            map.insert(cut.node, move_axis(&mut suffix, input, cut.first, Direction::FromFront)?);
        }
        self.copy_into(&mut suffix, &mut map, &roots)?;
        for output in self.outputs() {
            suffix.output(&output.name, map[&output.node])?;
        }
        for update in self.updates() {
            suffix.update(update.parameter, map[&update.node])?;
        }
        Ok(Split { prefix, suffix, kept: keep.iter().map(|node| map[node]).collect() })
    }

    fn with_parameters(&self) -> Graph {
        let mut graph = Graph::new();
        for info in self.parameters() {
            // Names were unique and sizes checked when this graph declared them.
            let _ = graph.declare_parameter(info.clone());
        }
        graph
    }

    /// The nodes on which `roots` depend, without what lies before `given`, operands before users.
    fn needed(&self, roots: &[NodeId], given: impl Fn(NodeId) -> bool) -> Result<Vec<NodeId>, GraphError> {
        let mut needed = vec![false; self.nodes().len()];
        for root in roots {
            *needed.get_mut(root.index()).ok_or(GraphError::UnknownNode(root.0))? = true;
        }
        for id in self.ids().rev() {
            if needed[id.index()] && !given(id) {
                self.node(id).operands.iter().for_each(|o| needed[o.index()] = true);
            }
        }
        Ok(self.ids().filter(|&id| needed[id.index()] && !given(id)).collect())
    }

    fn inputs_read(&self, roots: &[NodeId], given: &[NodeId]) -> Result<Vec<InputId>, GraphError> {
        let needed = self.needed(roots, |id| given.contains(&id))?;
        let mut inputs: Vec<InputId> = needed.iter().filter_map(|&id| self.input_of(id)).collect();
        inputs.sort_unstable();
        Ok(inputs)
    }

    fn input_of(&self, id: NodeId) -> Option<InputId> {
        match self.node(id).op {
            Op::Input(input) => Some(input),
            _ => None,
        }
    }

    /// Copies what `roots` need to `out`. `map` says what is there already, and grows.
    fn copy_into(&self, out: &mut Graph, map: &mut HashMap<NodeId, NodeId>, roots: &[NodeId]) -> Result<(), GraphError> {
        for id in self.needed(roots, |id| map.contains_key(&id))? {
            let node = self.node(id);
            out.set_origin(self.origin(id).cloned());
            let copy = match &node.op {
                Op::Input(input) => {
                    let info = &self.inputs()[input.0 as usize];
                    match out.inputs().iter().position(|i| i.name == info.name) {
                        Some(position) => out.push(Op::Input(InputId(position as u32)), &[])?,
                        None => out.input(&info.name, info.ty.clone())?,
                    }
                }
                op => {
                    let operands: Vec<NodeId> = node.operands.iter().map(|o| map[o]).collect();
                    out.push(op.clone(), &operands)?
                }
            };
            map.insert(id, copy);
        }
        out.set_origin(None);
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Direction {
    ToFront,
    FromFront,
}

fn move_axis(g: &mut Graph, x: NodeId, axis: usize, direction: Direction) -> Result<NodeId, GraphError> {
    if axis == 0 {
        return Ok(x);
    }
    let rank = g.ty(x).shape.rank();
    let perm = match direction {
        Direction::ToFront => std::iter::once(axis).chain((0..rank).filter(|&a| a != axis)).collect(),
        Direction::FromFront => (1..=axis).chain([0]).chain(axis + 1..rank).collect(),
    };
    g.push(Op::Transpose(perm), &[x])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interpreter::{Environment, interpret};
    use crate::{BinaryOp, DType, ParameterInfo, ParameterRole, Tensor, UnaryOp};

    fn float(shape: &[usize]) -> TensorType {
        TensorType::new(DType::F32, shape)
    }

    /// `y = (exp(a) * w)^T + b`, cut at the product, whose second axis comes first.
    #[test]
    fn the_halves_give_what_the_whole_gives() {
        let mut g = Graph::new();
        let a = g.input("a", float(&[2, 3])).unwrap();
        let unread = g.input("unread", float(&[9])).unwrap();
        let b = g.input("b", float(&[3, 2])).unwrap();
        let info = ParameterInfo { name: "w".into(), ty: float(&[2, 3]), stored: DType::F32, role: ParameterRole::Weight };
        let w = g.parameter(info).unwrap();
        g.unary(UnaryOp::Neg, unread).unwrap();
        let exp = g.unary(UnaryOp::Exp, a).unwrap();
        let product = g.mul(exp, w).unwrap();
        let transposed = g.push(Op::Transpose(vec![1, 0]), &[product]).unwrap();
        let y = g.binary(BinaryOp::Add, transposed, b).unwrap();
        g.output("y", y).unwrap();

        let cut = Cut { name: "cut".into(), node: product, first: 1 };
        let Split { prefix, suffix, kept } = g.split(&[cut], &[transposed]).unwrap();
        let names = |g: &Graph| g.inputs().iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        assert_eq!((names(&prefix), names(&suffix)), (vec!["a".to_owned()], vec!["b".to_owned(), "cut".to_owned()]));
        assert_eq!(*suffix.ty(kept[0]), float(&[3, 2]));
        assert_eq!((prefix.parameters(), suffix.parameters()), (g.parameters(), g.parameters()));

        let a = Tensor::from_f32([2, 3], &[0.0, 1.0, 2.0, -1.0, 0.5, 0.25]);
        let b = Tensor::from_f32([3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let w = Tensor::from_f32([2, 3], &[1.5, -2.0, 3.0, 4.0, -5.0, 6.0]);
        let unread = Tensor::from_f32([9], &[0.0; 9]);
        let run = |g: &Graph, inputs: &[&Tensor]| {
            let environment = Environment::<f64>::from_tensors(inputs.iter().copied(), [&w]);
            interpret(g, &environment).unwrap().outputs()[0].to_f64_vec()
        };
        let whole = run(&g, &[&a, &unread, &b]);
        let cut = Tensor::from_f64(DType::F64, [3, 2], &run(&prefix, &[&a]));
        assert_eq!(run(&suffix, &[&b, &cut]), whole);
    }

    #[test]
    fn a_node_that_does_not_exist_is_an_error() {
        let cut = Cut { name: "cut".into(), node: NodeId(7), first: 0 };
        assert_eq!(Graph::new().split(&[cut], &[]).unwrap_err(), GraphError::UnknownNode(7));
    }
}
