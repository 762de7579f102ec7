//! What the rule of an operator sees: operands, attributes, and the graph that it adds to.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::{Deref, DerefMut};

use crate::proto::attribute_proto::AttributeType;
use crate::proto::{AttributeProto, NodeProto, TypeProto};
use meganeura_ir::{Graph, NodeId, Shape, Tensor, TensorType};

use crate::error::OpError;
use crate::fold::Folder;
use crate::narrow::Narrow;
use crate::phase::{Mode, Phase};
use crate::tensor::Storage;
use crate::value::Value;

/// Sizes, strides, pads and the like are below this, so that index arithmetic cannot overflow.
const MAX_EXTENT: i64 = 1 << 31;

/// Positions of one axis that are computed while the graph is built.
const MAX_TABLE: usize = 1 << 22;

/// One node of the ONNX graph, while it is lowered. Dereferences to the graph under construction.
pub(crate) struct Context<'a> {
    folder: &'a mut Folder,
    storage: &'a Storage,
    node: &'a NodeProto,
    /// Version of the node's operator set.
    pub opset: i64,
    inputs: Vec<Option<Value>>,
    /// By output position: whether anything reads it.
    wanted: Vec<bool>,
    /// By operand position: the element type that a wider dtype holds.
    narrow: Vec<Option<Narrow>>,
    narrow_result: Option<Narrow>,
    read: RefCell<HashSet<&'a str>>,
    notes: Vec<&'static str>,
}

/// What a rule says besides its results.
pub(crate) struct Remarks {
    /// Attributes that it did not read.
    pub unread: Vec<String>,
    pub notes: Vec<&'static str>,
    /// The element type of result 0, where a wider dtype holds it.
    pub narrow: Option<Narrow>,
}

impl Deref for Context<'_> {
    type Target = Graph;
    fn deref(&self) -> &Graph {
        &self.folder.graph
    }
}

impl DerefMut for Context<'_> {
    fn deref_mut(&mut self) -> &mut Graph {
        &mut self.folder.graph
    }
}

impl<'a> Context<'a> {
    pub fn new(
        folder: &'a mut Folder,
        storage: &'a Storage,
        node: &'a NodeProto,
        opset: i64,
        inputs: Vec<Option<Value>>,
        wanted: Vec<bool>,
        narrow: Vec<Option<Narrow>>,
    ) -> Self {
        let (narrow_result, read, notes) = (None, RefCell::default(), Vec::new());
        Context { folder, storage, node, opset, inputs, wanted, narrow, narrow_result, read, notes }
    }

    /// What the rule said besides its results.
    pub fn finish(self) -> Remarks {
        let read = self.read.into_inner();
        let unread = self.node.attribute.iter().map(|a| a.name.as_str()).filter(|name| !read.contains(name));
        Remarks { unread: unread.map(str::to_owned).collect(), notes: self.notes, narrow: self.narrow_result }
    }

    /// Warns about something in this node.
    pub fn note(&mut self, what: &'static str) {
        self.notes.push(what);
    }

    // Operands.

    /// Operands including absent ones in between.
    pub fn input_count(&self) -> usize {
        self.inputs.len()
    }

    pub fn output_count(&self) -> usize {
        self.node.output.len()
    }

    /// Whether the node names output `index`, read or not.
    pub fn declares_output(&self, index: usize) -> bool {
        self.node.output.get(index).is_some_and(|name| !name.is_empty())
    }

    /// Whether anything reads output `index`.
    pub fn has_output(&self, index: usize) -> bool {
        self.wanted.get(index).copied().unwrap_or(false)
    }

    pub fn input(&self, index: usize) -> Result<NodeId, OpError> {
        self.optional(index).ok_or(OpError::MissingInput(index))
    }

    pub fn optional(&self, index: usize) -> Option<NodeId> {
        self.value(index).and_then(Value::tensor)
    }

    /// Operand `index`, of any kind. Rules that do not take values see tensors only.
    pub fn value(&self, index: usize) -> Option<&Value> {
        self.inputs.get(index)?.as_ref()
    }

    /// All operands; none may be absent.
    pub fn all_inputs(&self) -> Result<Vec<NodeId>, OpError> {
        (0..self.input_count()).map(|i| self.input(i)).collect()
    }

    /// The element type of operand `index`, where a wider dtype holds it.
    pub fn narrow(&self, index: usize) -> Option<Narrow> {
        self.narrow.get(index).copied().flatten()
    }

    /// Declares the element type of result 0, where a wider dtype holds it.
    pub fn set_narrow(&mut self, narrow: Option<Narrow>) {
        self.narrow_result = narrow;
    }

    pub fn shape(&self, node: NodeId) -> Shape {
        self.ty(node).shape.clone()
    }

    pub fn rank(&self, node: NodeId) -> usize {
        self.ty(node).shape.rank()
    }

    /// An error about operand `index`.
    pub fn operand_error(&self, index: usize, reason: &'static str) -> OpError {
        match self.optional(index) {
            Some(node) => OpError::Operand { index, found: self.ty(node).clone(), reason },
            None => OpError::MissingInput(index),
        }
    }

    // Values known while the graph is built.

    /// The value of `node`, if it depends on nothing that changes.
    pub fn known(&mut self, node: NodeId) -> Option<Tensor> {
        self.folder.known(node).map(|value| value.as_ref().clone())
    }

    /// The value of operand `index`, which decides the result's type; `None` if it is absent.
    pub fn known_input(&mut self, index: usize) -> Result<Option<Tensor>, OpError> {
        let Some(node) = self.optional(index) else { return Ok(None) };
        self.known(node).map(Some).ok_or(OpError::NotStatic { index })
    }

    /// As [`Context::known_input`], integers.
    pub fn known_ints(&mut self, index: usize) -> Result<Option<Vec<i64>>, OpError> {
        let Some(value) = self.known_input(index)? else { return Ok(None) };
        if value.dtype().is_float() {
            return Err(self.operand_error(index, "integers are needed"));
        }
        Ok(Some(value.to_i64_vec()))
    }

    /// As [`Context::known_input`], one number.
    pub fn known_scalar(&mut self, index: usize) -> Result<Option<f64>, OpError> {
        let Some(value) = self.known_input(index)? else { return Ok(None) };
        value.scalar_f64().map(Some).ok_or_else(|| self.operand_error(index, "one element is needed"))
    }

    /// Whether `node` is known and every element of it equals `value`.
    pub fn is_uniform(&mut self, node: NodeId, value: f64) -> bool {
        self.folder.known(node).is_some_and(|t| t.to_f64_vec().iter().all(|&v| v == value))
    }

    /// Adds a constant.
    pub fn constant_tensor(&mut self, value: Tensor) -> Result<NodeId, OpError> {
        Ok(self.folder.constant(value)?)
    }

    // Training.

    /// Whether a layer of a kind trains: the file says `in_file`.
    pub fn trains(&mut self, layer: &'static str, mode: impl Fn(&Phase) -> Mode, in_file: bool) -> bool {
        let state = &mut self.folder.state;
        let trains = mode(&state.phase).trains(in_file);
        if trains != in_file {
            state.overridden.insert((layer, trains));
        }
        trains
    }

    /// New random numbers in `[0, 1)`.
    pub fn random_uniform(&mut self, shape: Shape) -> Result<NodeId, OpError> {
        Ok(self.folder.state.uniform(&mut self.folder.graph, shape)?)
    }

    /// What a running statistic is after the layers so far.
    pub fn statistic(&self, running: NodeId) -> NodeId {
        self.folder.state.statistic(running)
    }

    /// Makes a run replace the running statistic by `moved`.
    pub fn move_statistic(&mut self, running: NodeId, moved: NodeId) {
        if !self.folder.state.move_statistic(&self.folder.graph, running, moved) {
            self.note("its running statistics are no parameters: they stay as they are");
        }
    }

    // Attributes.

    fn attribute(
        &self,
        name: &str,
        types: &[AttributeType],
        expected: &'static str,
    ) -> Result<Option<&'a AttributeProto>, OpError> {
        let Some(attribute) = self.node.attribute.iter().find(|a| a.name == name) else { return Ok(None) };
        self.read.borrow_mut().insert(&attribute.name);
        // Files older than IR version 4 may leave the type out.
        if attribute.r#type != 0 && !types.iter().any(|t| *t as i32 == attribute.r#type) {
            return Err(OpError::AttributeType { name: name.to_owned(), expected });
        }
        Ok(Some(attribute))
    }

    /// Whether the node has an attribute of this name, of any type.
    pub fn has_attribute(&self, name: &str) -> bool {
        self.node.attribute.iter().any(|a| a.name == name)
    }

    /// Declares that attributes are known and make no difference here.
    pub fn ignore(&self, names: &[&str]) {
        for attribute in self.node.attribute.iter().filter(|a| names.contains(&a.name.as_str())) {
            self.read.borrow_mut().insert(&attribute.name);
        }
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>, OpError> {
        Ok(self.attribute(name, &[AttributeType::Int], "integer")?.map(|a| a.i))
    }

    pub fn int_or(&self, name: &str, default: i64) -> Result<i64, OpError> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool, OpError> {
        Ok(self.int(name)?.map_or(default, |v| v != 0))
    }

    pub fn float(&self, name: &str) -> Result<Option<f64>, OpError> {
        Ok(self.attribute(name, &[AttributeType::Float], "float")?.map(|a| f64::from(a.f)))
    }

    pub fn float_or(&self, name: &str, default: f64) -> Result<f64, OpError> {
        Ok(self.float(name)?.unwrap_or(default))
    }

    pub fn floats(&self, name: &str) -> Result<Option<&'a [f32]>, OpError> {
        Ok(self.attribute(name, &[AttributeType::Floats], "list of floats")?.map(|a| a.floats.as_slice()))
    }

    pub fn ints(&self, name: &str) -> Result<Option<&'a [i64]>, OpError> {
        Ok(self.attribute(name, &[AttributeType::Ints], "list of integers")?.map(|a| a.ints.as_slice()))
    }

    pub fn strings(&self, name: &str) -> Result<Option<Vec<&'a str>>, OpError> {
        let expected = "list of UTF-8 strings";
        let Some(attribute) = self.attribute(name, &[AttributeType::Strings], expected)? else { return Ok(None) };
        let strings = attribute.strings.iter().map(|s| std::str::from_utf8(s)).collect::<Result<_, _>>();
        strings.map(Some).map_err(|_| OpError::AttributeType { name: name.to_owned(), expected })
    }

    pub fn string_or(&self, name: &str, default: &'a str) -> Result<&'a str, OpError> {
        let Some(attribute) = self.attribute(name, &[AttributeType::String], "string")? else { return Ok(default) };
        std::str::from_utf8(&attribute.s).map_err(|_| OpError::AttributeType { name: name.to_owned(), expected: "UTF-8 string" })
    }

    /// A string attribute whose values are a closed list.
    pub fn choice<T: Copy>(&self, name: &'static str, default: &'a str, values: &[(&str, T)]) -> Result<T, OpError> {
        let value = self.string_or(name, default)?;
        let error = || OpError::Attribute { name, value: value.to_owned(), reason: "the standard knows no such value" };
        values.iter().find(|(known, _)| *known == value).map(|(_, meaning)| *meaning).ok_or_else(error)
    }

    /// A tensor attribute, in the dtype of the file.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>, OpError> {
        let attribute = self.attribute(name, &[AttributeType::Tensor], "tensor")?;
        Ok(attribute.and_then(|a| a.t.as_ref()).map(|proto| self.storage.read(proto)).transpose()?)
    }

    /// A list of `count` non-negative integers; `default` everywhere if absent.
    pub fn extents(&self, name: &'static str, count: usize, default: usize) -> Result<Vec<usize>, OpError> {
        let Some(values) = self.ints(name)? else { return Ok(vec![default; count]) };
        let error = |reason| OpError::Attribute { name, value: format!("{values:?}"), reason };
        if values.len() != count {
            return Err(error("one value per spatial axis is needed"));
        }
        if values.iter().any(|v| !(1..MAX_EXTENT).contains(v)) {
            return Err(error("values are at least 1"));
        }
        Ok(values.iter().map(|&v| v as usize).collect())
    }

    /// `pads` for `count` axes: all beginnings, then all ends; zeros if absent.
    pub fn pads(&self, count: usize) -> Result<Vec<(isize, isize)>, OpError> {
        let Some(values) = self.ints("pads")? else { return Ok(vec![(0, 0); count]) };
        let error = |reason| OpError::Attribute { name: "pads", value: format!("{values:?}"), reason };
        if values.len() != 2 * count {
            return Err(error("two values per spatial axis are needed"));
        }
        if values.iter().any(|v| v.unsigned_abs() >= MAX_EXTENT as u64) {
            return Err(error("the values are too large"));
        }
        Ok((0..count).map(|a| (values[a] as isize, values[count + a] as isize)).collect())
    }

    /// A type attribute.
    pub fn type_proto(&self, name: &str) -> Result<Option<&'a TypeProto>, OpError> {
        Ok(self.attribute(name, &[AttributeType::TypeProto], "type")?.and_then(|a| a.tp.as_ref()))
    }

    // Axes and shapes.

    /// The axes of a list that is an attribute before `opset` and operand `index` from then on.
    pub fn attribute_or_input(&mut self, name: &'static str, opset: i64, index: usize) -> Result<Option<Vec<i64>>, OpError> {
        if self.opset < opset {
            return Ok(self.ints(name)?.map(<[i64]>::to_vec));
        }
        if let Some(values) = self.ints(name)? {
            self.note("an attribute of an older opset is used");
            return Ok(Some(values.to_vec()));
        }
        self.known_ints(index)
    }

    /// Sorted axes of a tensor of `rank`; negative ones count from the end.
    pub fn axes(&self, axes: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
        let mut sorted = axes.iter().map(|&a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?;
        sorted.sort_unstable();
        match sorted.windows(2).find(|w| w[0] == w[1]) {
            Some(pair) => Err(OpError::RepeatedAxis(pair[0])),
            None => Ok(sorted),
        }
    }

    /// Every node at the common NumPy broadcast shape of all.
    pub fn broadcast(&mut self, nodes: &[NodeId]) -> Result<Vec<NodeId>, OpError> {
        let mut shape = Shape::scalar();
        for &node in nodes {
            shape = Shape::broadcast(&shape, &self.ty(node).shape).ok_or_else(|| OpError::Broadcast {
                a: TensorType::new(self.ty(node).dtype, shape.clone()),
                b: self.ty(node).clone(),
            })?;
        }
        Ok(nodes.iter().map(|&node| self.broadcast_to(node, &shape)).collect::<Result<_, _>>()?)
    }

    /// `x` at `shape`, which it must broadcast to without `shape` growing.
    pub fn broadcast_into(&mut self, x: NodeId, shape: &Shape) -> Result<NodeId, OpError> {
        if Shape::broadcast(&self.ty(x).shape, shape).as_ref() != Some(shape) {
            let b = TensorType::new(self.ty(x).dtype, shape.clone());
            return Err(OpError::Broadcast { a: self.ty(x).clone(), b });
        }
        Ok(self.broadcast_to(x, shape)?)
    }

    /// A vector along `axis` of `shape`, repeated along the other axes.
    pub fn broadcast_along(&mut self, vector: NodeId, shape: &Shape, axis: usize) -> Result<NodeId, OpError> {
        let found = self.ty(vector).clone();
        if *found.shape != [shape[axis]] {
            return Err(OpError::Broadcast { a: found, b: TensorType::new(self.ty(vector).dtype, shape.clone()) });
        }
        Ok(self.push(meganeura_ir::Op::Broadcast { shape: shape.clone(), axes: vec![axis] }, &[vector])?)
    }
}

/// An axis of a tensor of `rank`; negative ones count from the end.
pub(crate) fn axis(axis: i64, rank: usize) -> Result<usize, OpError> {
    let rank_i64 = rank as i64;
    if (-rank_i64..rank_i64).contains(&axis) {
        Ok(axis.rem_euclid(rank_i64.max(1)) as usize)
    } else {
        Err(OpError::Axis { axis, rank })
    }
}

/// The size of a table of positions that is computed here, checked.
pub(crate) fn table_size(size: usize) -> Result<usize, OpError> {
    if size <= MAX_TABLE { Ok(size) } else { Err(OpError::unsupported(format!("an axis of {size} computed positions"))) }
}

/// A size from the file, checked.
pub(crate) fn extent(name: &'static str, value: i64) -> Result<usize, OpError> {
    if (0..MAX_EXTENT).contains(&value) {
        Ok(value as usize)
    } else {
        Err(OpError::Attribute { name, value: value.to_string(), reason: "sizes lie between 0 and 2^31" })
    }
}
