//! A terse graph builder, and the check that every e-node of a class computes the class's value.

use std::collections::HashMap;
use std::sync::Arc;

use egg::{Id, Language};
use meganeura_ir::interpreter::{Environment, Real, Value, evaluate_node, interpret};
use meganeura_ir::testing::{random_tensor, relative_l2};
use meganeura_ir::{
    BinaryOp, DType, DotDims, Graph, GraphError, InputId, NodeId, Op, ParameterId, ReduceOp, Shape, SliceDim, Tensor, TensorType,
    UnaryOp,
};

use crate::saturate::Saturated;
use crate::saturate::analysis::{TensorGraph, op_of, tensor_type};
use crate::saturate::language::TensorLang;

/// What stands for the factors 2, 3 and 5 of every size, so that shapes of equal numbers of elements keep them equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes([usize; 3]);

impl Default for Sizes {
    fn default() -> Self {
        Sizes::AS_WRITTEN
    }
}

impl Sizes {
    pub const AS_WRITTEN: Sizes = Sizes([2, 3, 5]);
    pub const ALL: [Sizes; 8] = [
        Sizes::AS_WRITTEN,
        Sizes([3, 5, 7]),
        Sizes([1, 3, 5]),
        Sizes([2, 1, 5]),
        Sizes([2, 3, 1]),
        Sizes([0, 3, 5]),
        Sizes([2, 0, 5]),
        Sizes([2, 3, 0]),
    ];

    fn of(self, mut size: usize) -> usize {
        let mut product = 1;
        for (factor, stands) in [2, 3, 5].into_iter().zip(self.0) {
            while size > 0 && size.is_multiple_of(factor) {
                (size, product) = (size / factor, product * stands);
            }
        }
        size * product
    }
}

#[derive(Default)]
pub struct Sketch(pub Graph, Sizes, Option<GraphError>);

impl Sketch {
    /// The graph that `build` sketches; `None` where it needs the sizes that are written.
    pub fn graph(sizes: Sizes, build: fn(&mut Sketch) -> NodeId) -> Option<Graph> {
        let mut sketch = Sketch(Graph::new(), sizes, None);
        let y = build(&mut sketch);
        match &sketch.2 {
            Some(error) if sizes == Sizes::AS_WRITTEN => panic!("{error}"),
            Some(_) => None,
            None => Some(sketch.finish(y)),
        }
    }

    /// After an error the node is any: [`Sketch::graph`] discards it.
    pub fn push(&mut self, op: Op, operands: &[NodeId]) -> NodeId {
        self.0.push(op, operands).unwrap_or_else(|error| {
            self.2.get_or_insert(error);
            operands.first().copied().unwrap_or(NodeId(0))
        })
    }

    pub fn shape(&self, shape: &[usize]) -> Shape {
        shape.iter().map(|&size| self.1.of(size)).collect()
    }

    pub fn typed(&mut self, dtype: DType, shape: &[usize]) -> NodeId {
        let name = format!("x{}", self.0.inputs().len());
        let ty = TensorType::new(dtype, self.shape(shape));
        self.0.input(name, ty).unwrap()
    }

    /// A new f32 input.
    pub fn x(&mut self, shape: &[usize]) -> NodeId {
        self.typed(DType::F32, shape)
    }

    /// `value` in every element, as one constant tensor.
    pub fn c_typed(&mut self, dtype: DType, shape: &[usize], value: f64) -> NodeId {
        let shape = self.shape(shape);
        let count = shape.numel();
        self.push(Op::Constant(Arc::new(Tensor::from_f64(dtype, shape, &vec![value; count]))), &[])
    }

    pub fn c(&mut self, shape: &[usize], value: f64) -> NodeId {
        self.c_typed(DType::F32, shape, value)
    }

    pub fn transpose(&mut self, x: NodeId, perm: &[usize]) -> NodeId {
        self.push(Op::Transpose(perm.to_vec()), &[x])
    }

    pub fn reshape(&mut self, x: NodeId, shape: &[usize]) -> NodeId {
        self.push(Op::Reshape(self.shape(shape)), &[x])
    }

    pub fn broadcast(&mut self, x: NodeId, shape: &[usize], axes: &[usize]) -> NodeId {
        self.push(Op::Broadcast { shape: self.shape(shape), axes: axes.to_vec() }, &[x])
    }

    pub fn slice(&mut self, x: NodeId, ranges: &[(usize, isize, usize)]) -> NodeId {
        let sizes = self.0.ty(x).shape.clone();
        let ranges = ranges.iter().zip(sizes.iter()).map(|(&(start, step, size), &whole)| match whole {
            0 => SliceDim { start: 0, step: 1, size: 0 },
            _ => SliceDim { start, step, size },
        });
        self.push(Op::Slice(ranges.collect()), &[x])
    }

    pub fn cast(&mut self, x: NodeId, dtype: DType) -> NodeId {
        self.push(Op::Cast(dtype), &[x])
    }

    pub fn unary(&mut self, f: UnaryOp, x: NodeId) -> NodeId {
        self.push(Op::Unary(f), &[x])
    }

    pub fn binary(&mut self, f: BinaryOp, x: NodeId, y: NodeId) -> NodeId {
        self.push(Op::Binary(f), &[x, y])
    }

    pub fn reduce(&mut self, op: ReduceOp, x: NodeId, axes: &[usize]) -> NodeId {
        self.push(Op::Reduce { op, axes: axes.to_vec() }, &[x])
    }

    /// A Dot with one list of pairs for the batch axes and one for the contracted axes.
    pub fn dot(&mut self, x: NodeId, y: NodeId, batch: &[(usize, usize)], contract: &[(usize, usize)]) -> NodeId {
        let split = |pairs: &[(usize, usize)]| pairs.iter().copied().unzip();
        let ((lhs_batch, rhs_batch), (lhs_contract, rhs_contract)) = (split(batch), split(contract));
        self.push(Op::Dot(DotDims { lhs_batch, rhs_batch, lhs_contract, rhs_contract }), &[x, y])
    }

    pub fn finish(mut self, y: NodeId) -> Graph {
        self.0.output("y", y).unwrap();
        self.0
    }
}

/// A random value for every input and parameter of `graph`.
pub fn random_environment<T: Real>(graph: &Graph) -> Environment<T> {
    let types = graph.inputs().iter().map(|i| &i.ty).chain(graph.parameters().iter().map(|p| &p.ty));
    let tensors: Vec<Tensor> = types.enumerate().map(|(seed, ty)| random_tensor(ty, seed as u64 + 1)).collect();
    let (inputs, parameters) = tensors.split_at(graph.inputs().len());
    Environment::from_tensors(inputs, parameters)
}

/// The largest relative error of any output or update of `actual`.
pub fn disagreement(actual: &Graph, expected: &Graph) -> f64 {
    let environment = random_environment::<f64>(expected);
    let actual = interpret(actual, &environment).unwrap();
    let expected = interpret(expected, &environment).unwrap();
    let values = |e: &meganeura_ir::interpreter::Evaluation<f64>| -> Vec<Vec<f64>> {
        let updates = e.updates().into_iter().map(|(_, value)| value);
        e.outputs().into_iter().chain(updates).map(|v| v.to_f64_vec()).collect()
    };
    let (actual, expected) = (values(&actual), values(&expected));
    assert_eq!(actual.len(), expected.len());
    actual.iter().zip(&expected).map(|(a, e)| relative_l2(a, e)).fold(0.0, f64::max)
}

/// Evaluates every e-node and panics where one differs from the value that the given graph has in its class by more than `tolerance`.
pub fn assert_classes_agree<T: Real>(saturated: &Saturated, graph: &Graph, tolerance: f64, context: &str) {
    let Saturated { egraph, nodes, .. } = saturated;
    let environment = random_environment::<T>(graph);
    let mut values: HashMap<Id, Value<T>> = HashMap::new();
    for (_, node, class) in nodes {
        let value = evaluate(egraph, node, *class, &values, &environment).unwrap();
        values.entry(egraph.find(*class)).or_insert(value);
    }
    loop {
        let known = values.len();
        for class in egraph.classes().filter(|c| tensor_type(egraph, c.id).is_some()) {
            for node in &class.nodes {
                if let Some(value) = evaluate(egraph, node, class.id, &values, &environment) {
                    let expected = values.entry(class.id).or_insert_with(|| value.clone());
                    let error = relative_l2(&value.to_f64_vec(), &expected.to_f64_vec());
                    assert!(error < tolerance, "{context}: {node:?} is off by {error:e}");
                }
            }
        }
        if values.len() == known {
            break;
        }
    }
    // Attention whose products are not found is no op.
    let is_op = |node: &TensorLang| !matches!(node, TensorLang::Attend(_));
    let tensors = egraph.classes().filter(|c| tensor_type(egraph, c.id).is_some() && c.nodes.iter().any(is_op)).count();
    assert_eq!(values.len(), tensors, "{context}: every class has a value");
}

fn evaluate<T: Real>(
    egraph: &TensorGraph,
    node: &TensorLang,
    class: Id,
    values: &HashMap<Id, Value<T>>,
    environment: &Environment<T>,
) -> Option<Value<T>> {
    let operands: Option<Vec<&Value<T>>> = node.operands().iter().map(|o| values.get(&egraph.find(*o))).collect();
    let operands = operands?;
    Some(match op_of(egraph, node)? {
        Op::Input(InputId(i)) => environment.inputs[i as usize].clone(),
        Op::Parameter(ParameterId(p)) => environment.parameters[p as usize].clone(),
        op => {
            let types: Vec<&TensorType> = node.operands().iter().map(|&o| tensor_type(egraph, o).unwrap()).collect();
            assert_eq!(types.len() + node.attributes().len(), node.children().len());
            evaluate_node(&op, &types, &operands, tensor_type(egraph, class).unwrap()).unwrap()
        }
    })
}
