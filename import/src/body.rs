//! Nodes that hold graphs: their bodies become nodes of the graph around them, as often as they run.

use meganeura_ir::{DType, NodeId, TensorType};

use crate::context::Context;
use crate::error::OpError;
use crate::model::{declared_dims, declared_dtype};
use crate::proto::{GraphProto, NodeProto, ValueInfoProto};
use crate::specialize::Builder;
use crate::tensor::arithmetic;
use crate::value::Value;

/// Nodes that the bodies of loops come to in one specialisation, all iterations together.
const MAX_BODY_NODES: usize = 1 << 16;

/// What the rule of a node with bodies sees. Bodies read the values around them by name.
pub(crate) struct Control<'b, 'm> {
    pub builder: &'b mut Builder<'m>,
    pub node: &'m NodeProto,
    pub inputs: Vec<Option<Value>>,
    /// By output position: whether anything reads it.
    pub wanted: Vec<bool>,
}

impl<'m> Control<'_, 'm> {
    /// Operands, attributes and the graph, as other rules see them.
    pub fn context(&mut self) -> Context<'_> {
        let narrow = self.builder.narrow_operands(self.node);
        let Builder { model, folder, .. } = &mut *self.builder;
        let opset = self.node.opset.unwrap_or_default();
        Context::new(folder, &model.storage, self.node, opset, self.inputs.clone(), self.wanted.clone(), narrow)
    }

    /// The graph in an attribute.
    pub fn body(&self, name: &'static str) -> Result<&'m GraphProto, OpError> {
        let bodies = self.node.bodies();
        bodies.into_iter().find_map(|(n, body)| (n == name).then_some(body)).ok_or(OpError::MissingAttribute(name))
    }

    /// The operands from `first` on; none may be absent.
    pub fn inputs_from(&self, first: usize) -> Result<Vec<Value>, OpError> {
        let inputs = self.inputs.iter().enumerate().skip(first);
        inputs.map(|(index, value)| value.clone().ok_or(OpError::MissingInput(index))).collect()
    }

    /// The one element of a value that decides what runs; a boolean is 0 or 1.
    pub fn decided(&mut self, value: &Value, dtype: DType, what: &'static str) -> Result<i64, OpError> {
        let node = value.tensor().ok_or_else(|| OpError::unsupported(format!("{} as {what}", value.kind())))?;
        let found = self.builder.folder.graph.ty(node).clone();
        if found.shape.numel() != 1 || found.dtype != dtype {
            return Err(OpError::unsupported(format!("{found} as {what}")));
        }
        let known = self.builder.folder.known(node).ok_or(OpError::Undecided { what, value: node })?;
        known.to_i64_vec().first().copied().ok_or(OpError::Undecided { what, value: node })
    }

    /// Counts nodes of bodies, or iterations, towards the limit.
    pub fn charge(&mut self, nodes: usize) -> Result<(), OpError> {
        self.builder.body_nodes = self.builder.body_nodes.saturating_add(nodes);
        if self.builder.body_nodes > MAX_BODY_NODES {
            return Err(OpError::Limit { what: "nodes in bodies, those of every iteration counted,", limit: MAX_BODY_NODES });
        }
        Ok(())
    }

    /// Adds the nodes of a body with `arguments` as its inputs, and returns its outputs.
    pub fn run(&mut self, body: &'m GraphProto, arguments: Vec<Value>) -> Result<Vec<Value>, OpError> {
        expect(body.input.len(), "inputs", arguments.len())?;
        self.charge(1 + body.node.len())?;
        for (input, value) in body.input.iter().zip(arguments) {
            self.builder.values.insert(&input.name, value);
        }
        let inner = |error| OpError::Inner(Box::new(error));
        self.builder.initializers(body).map_err(inner)?;
        self.builder.nodes(body).map_err(inner)?;
        let output = |o: &ValueInfoProto| self.builder.values.get(o.name.as_str()).cloned();
        body.output.iter().enumerate().map(|(i, o)| output(o).ok_or(OpError::MissingInput(i))).collect()
    }

    /// The type that a body declares for an output, if that is a tensor of known sizes.
    pub fn declared(&self, output: &ValueInfoProto) -> Option<TensorType> {
        let ty = output.r#type.as_ref()?;
        let dims = declared_dims(&output.name, ty)?;
        let shape = dims.iter().map(|dim| dim.size(&self.builder.dims)).collect::<Option<_>>()?;
        Some(TensorType { dtype: arithmetic(declared_dtype(ty)?), shape })
    }
}

/// Checks a number of inputs or outputs of a body.
pub(crate) fn expect(found: usize, what: &'static str, expected: usize) -> Result<(), OpError> {
    if found == expected { Ok(()) } else { Err(OpError::Body { what, found, expected: expected.to_string() }) }
}

/// The tensors among `values`; another value is an error.
pub(crate) fn tensors(values: Vec<Value>, what: &'static str) -> Result<Vec<NodeId>, OpError> {
    let tensor = |value: Value| value.tensor().ok_or_else(|| OpError::unsupported(format!("{} as {what}", value.kind())));
    values.into_iter().map(tensor).collect()
}
