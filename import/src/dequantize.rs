//! Quantised weights as float parameters. Where a file turns an initializer of few bits into floats by numbers that it holds as
//! well, the floats are what a model trains: they become a parameter under the name of the initializer.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use meganeura_ir::interpreter::{Environment, interpret};
use meganeura_ir::{DType, NodeId, Shape, Tensor, TensorType};

use crate::context::Context;
use crate::error::{ImportError, NodeName, OpError, qualified};
use crate::fold::Folder;
use crate::model::{canonical_domain, node_label};
use crate::narrow::{self, narrow};
use crate::ops;
use crate::proto::tensor_proto::DataType;
use crate::proto::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::tensor::{Storage, TensorError, arithmetic};
use crate::value::Value;

/// Operators through which a scale or a zero point may come from the file.
const VIEWS: [&str; 5] = ["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"];

/// How the value of a dequantised initializer follows from the file: nodes and the initializers that they read.
#[derive(Clone, Debug)]
pub(crate) struct Dequantized(GraphProto);

/// Makes float initializers of the quantised ones, as far as their uses allow, and returns how each gets its value, by name. The node
/// that gave the floats becomes an `Identity`.
///
/// The uses are those of `DequantizeLinear`, and of `Cast`, `Sub` and `Mul` in sequence, the subtraction being optional.
pub(crate) fn apply(graph: &mut GraphProto) -> BTreeMap<String, Dequantized> {
    let mut found = BTreeMap::new();
    let uses = Uses::new(graph);
    let mut ends = Vec::new();
    for (index, proto) in graph.initializer.iter().enumerate() {
        if !is_quantized(proto) || uses.elsewhere.contains(&proto.name) {
            continue;
        }
        if let Some(pattern) = dequantize_linear(graph, &uses, proto).or_else(|| cast_and_scale(graph, &uses, proto)) {
            if let Some(recipe) = uses.recipe(graph, &pattern) {
                found.insert(proto.name.clone(), Dequantized(recipe));
                ends.push((index, pattern.ends));
            }
        }
    }
    for (initializer, ends) in ends {
        let proto = &mut graph.initializer[initializer];
        proto.data_type = DataType::Float as i32;
        for end in ends {
            let node = &mut graph.node[end];
            *node = NodeProto {
                op_type: "Identity".to_owned(),
                domain: String::new(),
                input: vec![proto.name.clone()],
                attribute: Vec::new(),
                ..std::mem::take(node)
            };
        }
    }
    found
}

/// Elements of few bits, and more than one of them.
fn is_quantized(proto: &TensorProto) -> bool {
    const INTEGERS: [DataType; 5] = [DataType::Int8, DataType::Uint8, DataType::Int16, DataType::Uint16, DataType::Int32];
    let few_bits = INTEGERS.iter().any(|d| *d as i32 == proto.data_type) || narrow(proto.data_type).is_some();
    few_bits && !proto.dims.contains(&0) && proto.dims.iter().any(|&d| d > 1)
}

/// Nodes between a quantised initializer and its floats.
struct Pattern {
    /// From the initializer to the floats.
    path: Vec<usize>,
    /// Nodes whose first result is the floats: the last of the path, and others that compute the same.
    ends: Vec<usize>,
}

struct Uses {
    /// Nodes that read a value, by its name, once per operand.
    readers: HashMap<String, Vec<usize>>,
    /// The node that gives a value.
    givers: HashMap<String, usize>,
    initializers: HashMap<String, usize>,
    /// Values that outputs or the bodies of nodes read.
    elsewhere: HashSet<String>,
}

impl Uses {
    fn new(graph: &GraphProto) -> Self {
        let mut uses =
            Uses { readers: HashMap::new(), givers: HashMap::new(), initializers: HashMap::new(), elsewhere: HashSet::new() };
        uses.elsewhere.extend(graph.output.iter().map(|o| o.name.clone()));
        for (index, node) in graph.node.iter().enumerate() {
            for name in &node.input {
                uses.readers.entry(name.clone()).or_default().push(index);
            }
            uses.givers.extend(node.output.iter().map(|name| (name.clone(), index)));
            node.attribute.iter().filter_map(|a| a.g.as_ref()).for_each(|body| uses.read_by_body(body));
        }
        uses.initializers.extend(graph.initializer.iter().enumerate().map(|(i, t)| (t.name.clone(), i)));
        uses
    }

    fn read_by_body(&mut self, body: &GraphProto) {
        self.elsewhere.extend(body.output.iter().map(|o| o.name.clone()));
        for node in &body.node {
            self.elsewhere.extend(node.input.iter().cloned());
            node.attribute.iter().filter_map(|a| a.g.as_ref()).for_each(|body| self.read_by_body(body));
        }
    }

    /// The only node that reads `name`.
    fn only_reader(&self, name: &str) -> Option<usize> {
        match self.readers.get(name)?.as_slice() {
            [reader] if !self.elsewhere.contains(name) => Some(*reader),
            _ => None,
        }
    }

    /// The part of the graph that computes the floats of `pattern`; none if it needs more than the file holds.
    fn recipe(&self, graph: &GraphProto, pattern: &Pattern) -> Option<GraphProto> {
        let mut nodes: BTreeSet<usize> = pattern.path.iter().copied().collect();
        let mut initializers = BTreeSet::new();
        let mut needed: Vec<&String> = pattern.path.iter().flat_map(|&n| &graph.node[n].input).collect();
        while let Some(name) = needed.pop() {
            if name.is_empty() {
                continue;
            }
            if let Some(&initializer) = self.initializers.get(name) {
                initializers.insert(initializer);
                continue;
            }
            let &giver = self.givers.get(name)?;
            let node = &graph.node[giver];
            let known = node.op_type == "Constant" || VIEWS.contains(&node.op_type.as_str()) || pattern.path.contains(&giver);
            if !known {
                return None;
            }
            if nodes.insert(giver) {
                needed.extend(&node.input);
            }
        }
        let output = graph.node[*pattern.path.last()?].output.first()?.clone();
        Some(GraphProto {
            node: nodes.into_iter().map(|n| graph.node[n].clone()).collect(),
            initializer: initializers.into_iter().map(|i| graph.initializer[i].clone()).collect(),
            output: vec![ValueInfoProto { name: output, ..ValueInfoProto::default() }],
            ..GraphProto::default()
        })
    }
}

/// All uses dequantise alike.
fn dequantize_linear(graph: &GraphProto, uses: &Uses, proto: &TensorProto) -> Option<Pattern> {
    let readers = uses.readers.get(&proto.name)?;
    let first = &graph.node[*readers.first()?];
    let alike = |&reader: &usize| {
        let node = &graph.node[reader];
        node.op_type == "DequantizeLinear"
            && node.input.first() == Some(&proto.name)
            && (&node.domain, &node.input, &node.attribute) == (&first.domain, &first.input, &first.attribute)
    };
    readers.iter().all(alike).then(|| Pattern { path: vec![readers[0]], ends: readers.clone() })
}

/// `(Cast(x) - zero) * scale`
fn cast_and_scale(graph: &GraphProto, uses: &Uses, proto: &TensorProto) -> Option<Pattern> {
    let cast = uses.only_reader(&proto.name)?;
    if graph.node[cast].op_type != "Cast" {
        return None;
    }
    let shape = dims(proto)?;
    let mut path = vec![cast];
    loop {
        let value = graph.node[*path.last()?].output.first()?;
        let next = uses.only_reader(value)?;
        let node = &graph.node[next];
        let [a, b] = node.input.as_slice() else { return None };
        let (first, other) = if a == value { (true, b) } else { (false, a) };
        let other = stored_shape(graph, uses, other)?;
        if Shape::broadcast(&shape, &other).as_ref() != Some(&shape) {
            return None;
        }
        path.push(next);
        match node.op_type.as_str() {
            "Sub" if first && path.len() == 2 => {}
            "Mul" => return Some(Pattern { ends: vec![next], path }),
            _ => return None,
        }
    }
}

fn dims(proto: &TensorProto) -> Option<Shape> {
    proto.dims.iter().map(|&d| usize::try_from(d).ok()).collect()
}

/// The shape of a value that the file holds, also where it is cast.
fn stored_shape(graph: &GraphProto, uses: &Uses, name: &str) -> Option<Shape> {
    if let Some(&initializer) = uses.initializers.get(name) {
        return dims(&graph.initializer[initializer]);
    }
    let node = &graph.node[*uses.givers.get(name)?];
    match node.op_type.as_str() {
        "Constant" => dims(node.attribute.iter().find(|a| a.name == "value")?.t.as_ref()?),
        "Cast" => {
            let &initializer = uses.initializers.get(node.input.first()?)?;
            dims(&graph.initializer[initializer])
        }
        _ => None,
    }
}

impl Dequantized {
    /// The initializers that the floats follow from.
    pub fn initializers(&self) -> &[TensorProto] {
        &self.0.initializer
    }

    /// The floats, of `shape`, computed in f32. `read` gives the value of an initializer.
    ///
    /// # Errors
    /// If data is damaged or missing, or an operator's operands do not fit.
    pub fn value(
        &self,
        storage: &Storage,
        shape: &Shape,
        read: impl Fn(&TensorProto) -> Result<Tensor, TensorError>,
    ) -> Result<Tensor, ImportError> {
        let graph = &self.0;
        let mut folder = Folder::default();
        let mut values: HashMap<&str, NodeId> = HashMap::new();
        for proto in &graph.initializer {
            let error = |source| ImportError::Tensor { name: proto.name.clone(), source };
            let tensor = read(proto).map_err(error)?;
            values.insert(&proto.name, folder.constant(tensor.cast(arithmetic(tensor.dtype())))?);
        }
        let types = narrow::declared(graph);
        for node in &graph.node {
            let domain = canonical_domain(&node.domain);
            let opset = node.opset.unwrap_or_default();
            let result = lower(&mut folder, storage, node, &values, &types).map_err(|source| {
                let name = NodeName { name: node_label(node), op: qualified(domain, &node.op_type), opset };
                ImportError::Node { node: Box::new(name), source: Box::new(source) }
            })?;
            if let Some(output) = node.output.first() {
                values.insert(output, result);
            }
        }
        let expected = TensorType::new(DType::F32, shape.clone());
        let name = graph.output.first().map_or("", |o| o.name.as_str());
        let result = *values.get(name).ok_or(ImportError::UnknownParameter(name.to_owned()))?;
        let result = folder.graph.broadcast_to(result, shape)?;
        folder.graph.output(name, result)?;
        let misfit = |reason: String| ImportError::Dequantize { name: name.to_owned(), reason };
        let evaluation = interpret::<f32>(&folder.graph, &Environment::default()).map_err(|e| misfit(e.to_string()))?;
        let value = evaluation.value(result).ok_or_else(|| misfit("it has no value".to_owned()))?;
        value.to_tensor(&expected).map_err(|e| misfit(e.to_string()))
    }
}

/// The first result of `node`.
fn lower(
    folder: &mut Folder,
    storage: &Storage,
    node: &NodeProto,
    values: &HashMap<&str, NodeId>,
    types: &HashMap<&str, narrow::Narrow>,
) -> Result<NodeId, OpError> {
    let row = ops::find(canonical_domain(&node.domain), &node.op_type).ok_or_else(|| OpError::unsupported("the operator"))?;
    let inputs = node.input.iter().map(|name| values.get(name.as_str()).copied().map(Value::Tensor)).collect();
    let narrow = node.input.iter().map(|name| types.get(name.as_str()).copied()).collect();
    let wanted = vec![true; node.output.len()];
    let mut context = Context::new(folder, storage, node, node.opset.unwrap_or_default(), inputs, wanted, narrow);
    let results = ops::lower(row, &mut context)?;
    results.first().and_then(Value::tensor).ok_or_else(|| OpError::unsupported("a node without results"))
}
