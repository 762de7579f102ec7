//! The reference interpreter: evaluates a graph on the host, op by op, in `f32` or `f64`.
//!
//! It is the oracle of tests and folds constants at import. Pointwise functions are computed in `f64` and rounded to the chosen
//! precision, reductions and contractions accumulate in `f64`: each result is as good as one rounding allows. Every float dtype of the graph is
//! computed in the chosen precision, without rounding to `f16` or `bf16` in between. Integers wrap to the width of their dtype.

mod contraction;
mod indexing;
mod movement;
mod pointwise;
mod reduction;
mod value;
mod walk;

pub use value::{Real, Value, ValueError};

use crate::typing::{TypeError, infer};
use crate::{Composite, Graph, GraphError, InputId, NodeId, Op, ParameterId, Tensor, TensorType, Update};

/// Everything that a graph reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Environment<T> {
    /// By [`InputId`].
    pub inputs: Vec<Value<T>>,
    /// By [`ParameterId`].
    pub parameters: Vec<Value<T>>,
}

impl<T: Real> Environment<T> {
    /// The values of `inputs` and `parameters`, each in the order of their ids.
    pub fn from_tensors<'a>(
        inputs: impl IntoIterator<Item = &'a Tensor>,
        parameters: impl IntoIterator<Item = &'a Tensor>,
    ) -> Self {
        Environment {
            inputs: inputs.into_iter().map(Value::from_tensor).collect(),
            parameters: parameters.into_iter().map(Value::from_tensor).collect(),
        }
    }
}

/// Why a graph or an op cannot be evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InterpretError {
    #[error("the graph has {expected} inputs, found {found} values")]
    InputCount { expected: usize, found: usize },
    #[error("the graph has {expected} parameters, found {found} values")]
    ParameterCount { expected: usize, found: usize },
    #[error("input {name:?}: {source}")]
    Input { name: String, source: ValueError },
    #[error("parameter {name:?}: {source}")]
    Parameter { name: String, source: ValueError },
    #[error("operand {operand} of {op}: {source}")]
    Operand { op: &'static str, operand: usize, source: ValueError },
    #[error("{op} takes {expected} operands, found {found} values")]
    OperandCount { op: &'static str, expected: usize, found: usize },
    #[error("the value of {0} belongs to a graph")]
    Leaf(&'static str),
    #[error("{op} gives {inferred}, not {expected}")]
    Result { op: &'static str, inferred: TensorType, expected: TensorType },
    #[error(transparent)]
    Type(#[from] TypeError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Value(#[from] ValueError),
}

/// The values of a graph's live nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation<T> {
    values: Vec<Option<Value<T>>>,
    outputs: Vec<NodeId>,
    updates: Vec<Update>,
}

impl<T> Evaluation<T> {
    /// The value of `node`; none if no output or update needs it.
    pub fn value(&self, node: NodeId) -> Option<&Value<T>> {
        self.values.get(node.index())?.as_ref()
    }

    /// The values of the graph's outputs, in their order.
    pub fn outputs(&self) -> Vec<&Value<T>> {
        self.outputs.iter().filter_map(|&n| self.value(n)).collect()
    }

    /// What each updated parameter holds after the run, in the order of the graph's updates.
    pub fn updates(&self) -> Vec<(ParameterId, &Value<T>)> {
        self.updates.iter().filter_map(|u| Some((u.parameter, self.value(u.node)?))).collect()
    }
}

/// Evaluates every live node of `g`.
///
/// # Errors
/// If the environment does not hold exactly one value of the right class and element count per input and parameter.
pub fn interpret<T: Real>(g: &Graph, env: &Environment<T>) -> Result<Evaluation<T>, InterpretError> {
    check_environment(g, env)?;
    let mut values: Vec<Option<Value<T>>> = vec![None; g.nodes().len()];
    for id in g.live() {
        let node = g.node(id);
        let value = match &node.op {
            Op::Input(InputId(i)) => env.inputs[*i as usize].clone(),
            Op::Parameter(ParameterId(p)) => env.parameters[*p as usize].clone(),
            op => {
                let types: Vec<&TensorType> = node.operands.iter().map(|&o| g.ty(o)).collect();
                let operands: Vec<&Value<T>> = node.operands.iter().filter_map(|o| values[o.index()].as_ref()).collect();
                evaluate(op, &types, &operands, &node.ty)?
            }
        };
        values[id.index()] = Some(value);
    }
    let outputs = g.outputs().iter().map(|o| o.node).collect();
    Ok(Evaluation { values, outputs, updates: g.updates().to_vec() })
}

fn check_environment<T: Real>(g: &Graph, env: &Environment<T>) -> Result<(), InterpretError> {
    if env.inputs.len() != g.inputs().len() {
        return Err(InterpretError::InputCount { expected: g.inputs().len(), found: env.inputs.len() });
    }
    if env.parameters.len() != g.parameters().len() {
        return Err(InterpretError::ParameterCount { expected: g.parameters().len(), found: env.parameters.len() });
    }
    for (info, value) in g.inputs().iter().zip(&env.inputs) {
        value.check(&info.ty).map_err(|source| InterpretError::Input { name: info.name.clone(), source })?;
    }
    for (info, value) in g.parameters().iter().zip(&env.parameters) {
        value.check(&info.ty).map_err(|source| InterpretError::Parameter { name: info.name.clone(), source })?;
    }
    Ok(())
}

/// The value of `op`, of type `result`, on `operands` of `types`.
///
/// # Errors
/// If the types break the type rule of `op`, or if a value does not have its type.
pub fn evaluate_node<T: Real>(
    op: &Op,
    types: &[&TensorType],
    operands: &[&Value<T>],
    result: &TensorType,
) -> Result<Value<T>, InterpretError> {
    let inferred = infer_node(op, types)?;
    if inferred != *result {
        return Err(InterpretError::Result { op: op.name(), inferred, expected: result.clone() });
    }
    if operands.len() != types.len() {
        return Err(InterpretError::OperandCount { op: op.name(), expected: types.len(), found: operands.len() });
    }
    for (operand, (value, ty)) in operands.iter().zip(types).enumerate() {
        value.check(ty).map_err(|source| InterpretError::Operand { op: op.name(), operand, source })?;
    }
    evaluate(op, types, operands, result)
}

/// The value of `op` on constants: floats computed in `f64` and rounded once to the result's dtype, integers exact.
///
/// # Errors
/// If the operands break the type rule of `op`, or if it is an input or a parameter.
pub fn fold(op: &Op, operands: &[&Tensor]) -> Result<Tensor, InterpretError> {
    let types: Vec<&TensorType> = operands.iter().map(|t| t.ty()).collect();
    let result = infer_node(op, &types)?;
    let values: Vec<Value<f64>> = operands.iter().map(|t| Value::from_tensor(t)).collect();
    let value = evaluate(op, &types, &values.iter().collect::<Vec<_>>(), &result)?;
    Ok(value.to_tensor(&result)?)
}

fn infer_node(op: &Op, types: &[&TensorType]) -> Result<TensorType, InterpretError> {
    match op {
        Op::Input(_) | Op::Parameter(_) => Err(InterpretError::Leaf(op.name())),
        _ => Ok(infer(op, types)?),
    }
}

/// Types and values are known to match.
fn evaluate<T: Real>(
    op: &Op,
    types: &[&TensorType],
    operands: &[&Value<T>],
    result: &TensorType,
) -> Result<Value<T>, InterpretError> {
    Ok(match op {
        Op::Input(_) | Op::Parameter(_) => return Err(InterpretError::Leaf(op.name())),
        Op::Constant(tensor) => Value::from_tensor(tensor),
        Op::Iota { axis, .. } => indexing::iota(*axis, result),
        Op::RandomUniform { stream, .. } => indexing::random_uniform(*stream, operands[0], result),
        Op::Unary(u) => pointwise::unary(*u, types[0].dtype, operands[0]),
        Op::Binary(b) => pointwise::binary(*b, types[0].dtype, operands[0], operands[1]),
        Op::Compare(c) => pointwise::compare(*c, types[0].dtype, operands[0], operands[1]),
        Op::Select => pointwise::select(operands[0], operands[1], operands[2]),
        Op::Cast(dtype) => pointwise::cast(types[0].dtype, *dtype, operands[0]),
        Op::Reshape(_) => operands[0].clone(),
        Op::Transpose(perm) => movement::transpose(perm, types[0], operands[0], result),
        Op::Broadcast { axes, .. } => movement::broadcast(axes, types[0], operands[0], result),
        Op::Slice(dims) => movement::slice(dims, types[0], operands[0]),
        Op::Pad(dims) => movement::pad(dims, types[0], operands[0], operands[1], result),
        Op::Concat { axis } => movement::concat(*axis, types, operands, result),
        Op::Unfold(window) => movement::unfold(window, types[0], operands[0], operands[1]),
        Op::Fold { window, sizes } => movement::fold(window, sizes, operands[0], result),
        Op::Dot(dims) => contraction::dot(dims, types[0], types[1], operands[0], operands[1]),
        Op::Conv(dims) => contraction::conv(dims, types[0], types[1], operands[0], operands[1], result),
        Op::Reduce { op, axes } => reduction::reduce(*op, axes, types[0], operands[0], result),
        Op::ArgReduce { op, axis } => reduction::arg_reduce(*op, *axis, types[0], operands[0]),
        Op::Gather { axis } => indexing::gather(*axis, types[0], types[1], operands[0], operands[1]),
        Op::Scatter { op, axis } => indexing::scatter(*op, *axis, types[0], types[1], operands),
        Op::Composite(c) => composite(c, types, operands)?,
    })
}

fn composite<T: Real>(c: &Composite, types: &[&TensorType], operands: &[&Value<T>]) -> Result<Value<T>, InterpretError> {
    let mut g = Graph::new();
    let inputs = types.iter().enumerate().map(|(i, ty)| g.input(i.to_string(), (*ty).clone())).collect::<Result<Vec<_>, _>>()?;
    let y = c.decompose(&mut g, &inputs)?;
    g.output("y", y)?;
    let env = Environment { inputs: operands.iter().map(|v| (*v).clone()).collect(), parameters: Vec::new() };
    let mut evaluation = interpret(&g, &env)?;
    evaluation.values[y.index()].take().ok_or(InterpretError::Leaf(c.name()))
}

#[cfg(test)]
mod tests;
