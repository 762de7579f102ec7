//! The head of a model: the layer that gives one value per class, which another number of classes needs anew.

use std::collections::{BTreeSet, HashMap, HashSet};

use meganeura_ir::{Shape, Tensor};
use prost::Message;

use crate::error::ImportError;
use crate::limits::Limit;
use crate::model::{Dim, Model, canonical_domain, node_label};
use crate::proto::tensor_shape_proto::dimension::Value as DimValue;
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use crate::roles::constant_tensor;
use crate::tensor::{TensorError, checked_shape};
use crate::wire::Locator;

/// Integer constants of at most this many elements may hold shapes.
const SHAPE_ELEMENTS: usize = 16;

/// A parameter of the head, and its axis of classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadTensor {
    pub name: String,
    pub axis: usize,
}

/// The layer that gives one value per class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub weight: HeadTensor,
    /// Absent if the layer has none, or one value for all classes.
    pub bias: Option<HeadTensor>,
    /// Values that the layer gives today.
    pub classes: usize,
    /// The output that was asked for, or the only one.
    pub output: String,
    /// The result of the layer.
    layer: usize,
}

/// Why a model has no head that another one could replace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    #[error("the model has several outputs, {}: name the one whose head to replace", known.join(", "))]
    Ambiguous { known: Vec<String> },
    #[error("no MatMul, Gemm or Conv with a weight leads to output {output:?}")]
    NoLayer { output: String },
    #[error("no MatMul, Gemm or Conv on the way to output {output:?} has the weight {weight:?}")]
    NoSuchWeight { output: String, weight: String },
    #[error("node {node} cannot be replaced: {reason}")]
    Layer { node: String, reason: String },
    #[error(
        "{what} {name:?}, after the head, also holds the number of classes, {classes}: a model with another number needs a new export"
    )]
    Elsewhere { what: &'static str, name: String, classes: usize },
    #[error("the new head {name:?} has shape {found}, {expected} is needed")]
    Shape { name: String, found: Shape, expected: String },
}

impl Model {
    /// The head before an output, which may be absent where the model has one: the last MatMul, Gemm or Conv whose weight is a parameter,
    /// or the one with the weight `weight`.
    ///
    /// # Errors
    /// There is none, it is shared or quantised, or what follows it also holds the number of classes.
    pub fn head(&self, output: Option<&str>, weight: Option<&str>) -> Result<Head, ImportError> {
        let known = || self.outputs().iter().map(|o| o.name.clone()).collect::<Vec<_>>();
        let output = match (output, self.outputs()) {
            (Some(name), outputs) if outputs.iter().any(|o| o.name == name) => name.to_owned(),
            (Some(name), _) => return Err(ImportError::UnknownOutput { name: name.to_owned(), known: known() }),
            (None, [only]) => only.name.clone(),
            (None, _) => return Err(HeadError::Ambiguous { known: known() }.into()),
        };
        let values = Values::new(self);
        let layers = values.before(&output).into_iter().rev().filter_map(|node| Some((node, values.weight(node)?)));
        let mut layers = layers.filter(|(_, found)| weight.is_none_or(|name| found.parameter.name == name));
        let (layer, found) = layers.next().ok_or_else(|| match weight {
            None => HeadError::NoLayer { output: output.clone() },
            Some(weight) => HeadError::NoSuchWeight { output: output.clone(), weight: weight.to_owned() },
        })?;
        Ok(values.head(output, layer, found)?)
    }

    /// Gives the head other tensors, whose shapes differ in the axes of classes only, and the model's outputs that number of classes.
    ///
    /// # Errors
    /// The shapes do not fit; the model is unchanged then.
    pub fn set_head(&mut self, head: &Head, weight: Tensor, bias: Option<Tensor>) -> Result<(), ImportError> {
        let classes = weight.shape().get(head.weight.axis).copied().unwrap_or(0);
        let tensors: Vec<(&HeadTensor, Tensor)> =
            std::iter::once((&head.weight, weight)).chain(head.bias.as_ref().zip(bias)).collect();
        let mut shapes = HashMap::new();
        let mut total = 0u64;
        for (place, tensor) in &tensors {
            let index = self.index_of(&place.name).ok_or_else(|| ImportError::UnknownParameter(place.name.clone()))?;
            let parameter = &self.parameters()[index];
            let expected = with_size(&parameter.shape, place.axis, classes);
            let fits = classes > 0 && *tensor.shape() == expected && tensor.dtype() == parameter.stored;
            if !fits {
                let (name, found) = (place.name.clone(), tensor.shape().clone());
                let expected = format!("{}{expected}", parameter.stored);
                return Err(HeadError::Shape { name, found, expected }.into());
            }
            total = total.saturating_add(tensor.bytes().len() as u64);
            shapes.insert(index, expected);
        }
        self.storage.limits().check(Limit::WeightBytes, total)?;

        let after = Values::new(self).after(head.layer);
        let values: HashSet<String> =
            after.iter().filter_map(|&node| self.graph.node.get(node)).flat_map(|n| n.output.clone()).collect();
        let mut proto = ModelProto::decode(self.skeleton.as_slice())?;
        for_each_tensor(&mut proto, &mut |tensor| {
            let index = Locator::from_bytes(&tensor.raw_data).and_then(|l| self.parameter_index(l.ordinal));
            if let Some(shape) = index.and_then(|index| shapes.get(&index)) {
                tensor.dims = shape.iter().map(|&size| size as i64).collect();
            }
        });
        for graph in [proto.graph.as_mut(), Some(&mut self.graph)].into_iter().flatten() {
            graph.value_info.retain(|info| !values.contains(&info.name));
            graph.output.iter_mut().filter(|o| values.contains(&o.name)).for_each(|o| set_classes(o, head, classes));
        }
        self.skeleton = proto.encode_to_vec();
        for (place, tensor) in tensors {
            self.replace(&place.name, tensor);
        }
        self.set_output_classes(&values, |dims| set_dims(dims, head, classes));
        Ok(())
    }
}

/// `shape` with another size of one axis.
pub(crate) fn with_size(shape: &Shape, axis: usize, size: usize) -> Shape {
    shape.iter().enumerate().map(|(a, &old)| if a == axis { size } else { old }).collect()
}

/// The axis of classes among the sizes of a value after the head: the one of that size; of several, the second.
fn class_axis(sizes: &[Option<usize>], classes: usize) -> Option<usize> {
    let fit: Vec<usize> = (0..sizes.len()).filter(|&axis| sizes.get(axis).copied().flatten() == Some(classes)).collect();
    fit.iter().find(|&&axis| axis == 1).or(fit.last()).copied()
}

fn set_dims(dims: &mut [Dim], head: &Head, classes: usize) {
    let sizes: Vec<Option<usize>> = dims.iter().map(|d| if let Dim::Fixed(size) = d { Some(*size) } else { None }).collect();
    if let Some(dim) = class_axis(&sizes, head.classes).and_then(|axis| dims.get_mut(axis)) {
        *dim = Dim::Fixed(classes);
    }
}

fn set_classes(info: &mut ValueInfoProto, head: &Head, classes: usize) {
    let Some(TypeValue::TensorType(ty)) = info.r#type.as_mut().and_then(|t| t.value.as_mut()) else { return };
    let Some(shape) = &mut ty.shape else { return };
    let size = |value: &Option<DimValue>| match value {
        Some(DimValue::DimValue(size)) => usize::try_from(*size).ok(),
        _ => None,
    };
    let sizes: Vec<Option<usize>> = shape.dim.iter().map(|d| size(&d.value)).collect();
    if let Some(dim) = class_axis(&sizes, head.classes).and_then(|axis| shape.dim.get_mut(axis)) {
        dim.value = Some(DimValue::DimValue(classes as i64));
    }
}

fn for_each_tensor(proto: &mut ModelProto, visit: &mut dyn FnMut(&mut TensorProto)) {
    fn nodes(list: &mut [NodeProto], visit: &mut dyn FnMut(&mut TensorProto)) {
        for attribute in list.iter_mut().flat_map(|n| &mut n.attribute) {
            attribute.t.iter_mut().chain(&mut attribute.tensors).for_each(&mut *visit);
            attribute.g.iter_mut().chain(&mut attribute.graphs).for_each(|g| graph(g, visit));
        }
    }
    fn graph(g: &mut GraphProto, visit: &mut dyn FnMut(&mut TensorProto)) {
        g.initializer.iter_mut().for_each(&mut *visit);
        nodes(&mut g.node, visit);
    }
    proto.graph.iter_mut().for_each(|g| graph(g, visit));
    proto.functions.iter_mut().for_each(|f| nodes(&mut f.node, visit));
}

/// A parameter behind a value of the graph, perhaps transposed.
struct Found<'m> {
    parameter: &'m crate::ModelParameter,
    /// Values between the parameter and its reader, the parameter included.
    names: Vec<&'m str>,
    /// The axis of the parameter that the axis of classes is.
    axis: usize,
}

/// Who computes and who reads the values of the main graph.
struct Values<'m> {
    model: &'m Model,
    producer: HashMap<&'m str, usize>,
    readers: HashMap<&'m str, Vec<usize>>,
    /// Parameters by the name of their value.
    parameters: HashMap<&'m str, usize>,
}

impl<'m> Values<'m> {
    fn new(model: &'m Model) -> Self {
        let (mut producer, mut readers) = (HashMap::new(), HashMap::<&str, Vec<usize>>::new());
        let mut parameters = HashMap::new();
        let index = |tensor: &TensorProto| model.parameter_index(Locator::from_bytes(&tensor.raw_data)?.ordinal);
        let graph = &model.graph;
        parameters.extend(graph.initializer.iter().filter_map(|t| Some((t.name.as_str(), index(t)?))));
        for (position, node) in graph.node.iter().enumerate() {
            parameters.extend(constant_tensor(node).and_then(|(tensor, name)| Some((name, index(tensor)?))));
            producer.extend(node.output.iter().map(|name| (name.as_str(), position)));
            let bodies = node.attribute.iter().filter_map(|a| a.g.as_ref()).flat_map(|body| body.nodes());
            let inner = bodies.flat_map(|n| &n.input);
            node.input.iter().chain(inner).for_each(|name| readers.entry(name).or_default().push(position));
        }
        Values { model, producer, readers, parameters }
    }

    fn node(&self, position: usize) -> Option<&'m NodeProto> {
        self.model.graph.node.get(position)
    }

    /// Nodes on which a value depends, in file order.
    fn before(&self, value: &str) -> BTreeSet<usize> {
        let (mut found, mut waiting) = (BTreeSet::new(), vec![value]);
        while let Some(value) = waiting.pop() {
            let Some(&position) = self.producer.get(value) else { continue };
            if found.insert(position) {
                waiting.extend(self.node(position).into_iter().flat_map(|n| &n.input).map(String::as_str));
            }
        }
        found
    }

    /// A node and those that depend on it.
    fn after(&self, position: usize) -> BTreeSet<usize> {
        let (mut found, mut waiting) = (BTreeSet::new(), vec![position]);
        while let Some(position) = waiting.pop() {
            if found.insert(position) {
                let outputs = self.node(position).into_iter().flat_map(|n| &n.output);
                waiting.extend(outputs.filter_map(|o| self.readers.get(o.as_str())).flatten());
            }
        }
        found
    }

    /// The parameter behind a value, where `axis_of` says which axis of its shape counts.
    fn parameter(&self, value: &'m str, axis_of: impl Fn(&Shape) -> Option<usize>) -> Option<Found<'m>> {
        let (mut value, mut names, mut perms) = (value, vec![value], Vec::new());
        loop {
            if let Some(&index) = self.parameters.get(value) {
                let parameter = self.model.parameters().get(index)?;
                let seen = perms.iter().rev().fold(parameter.shape.clone(), |shape, perm: &Vec<usize>| {
                    perm.iter().filter_map(|&axis| shape.get(axis).copied()).collect()
                });
                let axis = perms.iter().try_fold(axis_of(&seen)?, |axis, perm| perm.get(axis).copied())?;
                return Some(Found { parameter, names, axis });
            }
            let node = self.node(*self.producer.get(value)?)?;
            match node.op_type.as_str() {
                "Identity" | "Cast" => {}
                "Transpose" => {
                    let perm = node.attribute.iter().find(|a| a.name == "perm").map(|a| &a.ints);
                    let perm = perm.map(|p| p.iter().map(|&axis| axis.max(0) as usize).collect());
                    perms.push(perm.unwrap_or_else(|| vec![1, 0]));
                }
                _ => return None,
            }
            value = node.input.first()?;
            names.push(value);
        }
    }

    /// The weight of a layer, and its axis of classes.
    fn weight(&self, position: usize) -> Option<Found<'m>> {
        let node = self.node(position).filter(|n| canonical_domain(&n.domain).is_empty())?;
        let operand = node.input.get(1)?;
        let transposed = node.attribute.iter().any(|a| a.name == "transB" && a.i != 0);
        match node.op_type.as_str() {
            "MatMul" => self.parameter(operand, |shape| (shape.rank() == 2).then_some(1)),
            "Gemm" => self.parameter(operand, |_| Some(if transposed { 0 } else { 1 })),
            "Conv" => self.parameter(operand, |_| Some(0)),
            _ => None,
        }
    }

    fn head(&self, output: String, layer: usize, weight: Found<'m>) -> Result<Head, HeadError> {
        let node = self.node(layer).ok_or_else(|| HeadError::NoLayer { output: output.clone() })?;
        let refuse = |reason: String| HeadError::Layer { node: node_label(node), reason };
        let classes = weight.parameter.shape.get(weight.axis).copied().unwrap_or(0);
        if node.attribute.iter().any(|a| a.name == "group" && a.i > 1) {
            return Err(refuse("it is a convolution of several groups".to_owned()));
        }
        let bias = self.bias(layer, node, weight.parameter.shape.rank(), classes);
        let own: Vec<&Found> = std::iter::once(&weight).chain(&bias).collect();
        for found in &own {
            let name = &found.parameter.name;
            if found.names.iter().any(|value| self.readers.get(value).is_none_or(|readers| readers.len() != 1)) {
                return Err(refuse(format!("its parameter {name:?} has other uses")));
            }
            if self.model.dequantized().any(|dequantized| dequantized == name) {
                return Err(refuse(format!("its parameter {name:?} is quantised in the file")));
            }
        }
        let after = self.after(layer);
        for value in after.iter().filter_map(|&n| self.node(n)).flat_map(|n| &n.input) {
            let what = self.holds(value, classes, &own);
            if let Some(what) = what {
                return Err(HeadError::Elsewhere { what, name: value.clone(), classes });
            }
        }
        let tensor = |found: &Found| HeadTensor { name: found.parameter.name.clone(), axis: found.axis };
        Ok(Head { weight: tensor(&weight), bias: bias.as_ref().map(tensor), classes, output, layer })
    }

    /// The bias of a layer: its third operand, or what is added to its result.
    fn bias(&self, layer: usize, node: &'m NodeProto, rank: usize, classes: usize) -> Option<Found<'m>> {
        // Aligned to the result, whose axis of classes is the second for convolutions and the last otherwise.
        let trailing = if node.op_type == "Conv" { rank - 2 } else { 0 };
        let added = |shape: &Shape| {
            let axis = shape.rank().checked_sub(1 + trailing)?;
            (shape.get(axis) == Some(&classes)).then_some(axis)
        };
        let operand = |shape: &Shape| {
            let axis = shape.rank().checked_sub(1)?;
            (shape.get(axis) == Some(&classes)).then_some(axis)
        };
        if let Some(third) = node.input.get(2).filter(|name| !name.is_empty()) {
            return self.parameter(third, operand);
        }
        let result = node.output.first()?;
        let [reader] = self.readers.get(result.as_str())?.as_slice() else { return None };
        let add = self.node(*reader).filter(|n| n.op_type == "Add" && *reader != layer)?;
        let other = add.input.iter().find(|name| *name != result)?;
        self.parameter(other, added)
    }

    /// Whether a value that is stored, and no part of the head, holds the number of classes.
    fn holds(&self, value: &'m str, classes: usize, own: &[&Found]) -> Option<&'static str> {
        if own.iter().any(|found| found.names.contains(&value)) {
            return None;
        }
        if let Some(&index) = self.parameters.get(value) {
            let shape = &self.model.parameters().get(index)?.shape;
            return (classes > 1 && shape.contains(&classes)).then_some("parameter");
        }
        let initializer = self.model.graph.initializer.iter().find(|t| t.name == *value);
        let constant = || constant_tensor(self.node(*self.producer.get(value)?)?).map(|(tensor, _)| tensor);
        let proto = initializer.or_else(constant)?;
        let small = |proto: &TensorProto| checked_shape(&proto.dims).is_ok_and(|s| s.numel() <= SHAPE_ELEMENTS);
        let read = |proto: &TensorProto| -> Result<Tensor, TensorError> { self.model.storage.read(proto) };
        let tensor = small(proto).then(|| read(proto).ok()).flatten().filter(|t| t.dtype().is_int())?;
        (classes > 1 && tensor.to_i64_vec().contains(&(classes as i64))).then_some("constant")
    }
}
