//! A terse graph builder, and the check that every e-node of a class computes the class's value.

use std::collections::HashMap;
use std::sync::Arc;

use egg::{Id, Language};
use meganeura_ir::interpreter::{Environment, Value, evaluate_node, interpret};
use meganeura_ir::testing::{random_tensor, relative_l2};
use meganeura_ir::{
    BinaryOp, DType, DotDims, Graph, InputId, NodeId, Op, ParameterId, ReduceOp, Shape, SliceDim, Tensor, TensorType, UnaryOp,
};

use crate::saturate::analysis::{TensorGraph, op_of, tensor_type};
use crate::saturate::language::TensorLang;

#[derive(Default)]
pub struct Sketch(pub Graph);

impl Sketch {
    pub fn push(&mut self, op: Op, operands: &[NodeId]) -> NodeId {
        self.0.push(op, operands).unwrap()
    }

    pub fn typed(&mut self, dtype: DType, shape: &[usize]) -> NodeId {
        let name = format!("x{}", self.0.inputs().len());
        self.0.input(name, TensorType::new(dtype, shape)).unwrap()
    }

    /// A new f32 input.
    pub fn x(&mut self, shape: &[usize]) -> NodeId {
        self.typed(DType::F32, shape)
    }

    /// `value` in every element, as one constant tensor.
    pub fn c_typed(&mut self, dtype: DType, shape: &[usize], value: f64) -> NodeId {
        let count = shape.iter().product();
        self.push(Op::Constant(Arc::new(Tensor::from_f64(dtype, shape, &vec![value; count]))), &[])
    }

    pub fn c(&mut self, shape: &[usize], value: f64) -> NodeId {
        self.c_typed(DType::F32, shape, value)
    }

    pub fn transpose(&mut self, x: NodeId, perm: &[usize]) -> NodeId {
        self.push(Op::Transpose(perm.to_vec()), &[x])
    }

    pub fn reshape(&mut self, x: NodeId, shape: &[usize]) -> NodeId {
        self.push(Op::Reshape(Shape::from(shape)), &[x])
    }

    pub fn broadcast(&mut self, x: NodeId, shape: &[usize], axes: &[usize]) -> NodeId {
        self.push(Op::Broadcast { shape: Shape::from(shape), axes: axes.to_vec() }, &[x])
    }

    pub fn slice(&mut self, x: NodeId, ranges: &[(usize, isize, usize)]) -> NodeId {
        let ranges = ranges.iter().map(|&(start, step, size)| SliceDim { start, step, size });
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
pub fn random_environment(graph: &Graph) -> Environment<f64> {
    let types = graph.inputs().iter().map(|i| &i.ty).chain(graph.parameters().iter().map(|p| &p.ty));
    let tensors: Vec<Tensor> = types.enumerate().map(|(seed, ty)| random_tensor(ty, seed as u64 + 1)).collect();
    let (inputs, parameters) = tensors.split_at(graph.inputs().len());
    Environment::from_tensors(inputs, parameters)
}

/// The largest relative error of any output or update of `actual`.
pub fn disagreement(actual: &Graph, expected: &Graph) -> f64 {
    let environment = random_environment(expected);
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

/// Evaluates every e-node and panics where one differs from the value that the given graph has in its class.
pub fn assert_classes_agree(egraph: &TensorGraph, nodes: &[(NodeId, TensorLang, Id)], graph: &Graph, context: &str) {
    let environment = random_environment(graph);
    let mut values: HashMap<Id, Value<f64>> = HashMap::new();
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
                    assert!(error < 1e-6, "{context}: {node:?} is off by {error:e}");
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

fn evaluate(
    egraph: &TensorGraph,
    node: &TensorLang,
    class: Id,
    values: &HashMap<Id, Value<f64>>,
    environment: &Environment<f64>,
) -> Option<Value<f64>> {
    let operands: Option<Vec<&Value<f64>>> = node.operands().iter().map(|o| values.get(&egraph.find(*o))).collect();
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
