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
use crate::proto::attribute_proto::AttributeType;
use crate::proto::tensor_proto::DataType;
use crate::proto::{AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::roles::has_made_up_name;
use crate::tensor::{Storage, TensorError, arithmetic};
use crate::value::Value;

/// Operators through which a scale or a zero point may come from the file.
const VIEWS: [&str; 5] = ["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"];

/// How the value of a dequantised initializer follows from the file: nodes and the initializers that they read.
#[derive(Clone, Debug)]
pub(crate) struct Dequantized(GraphProto);

/// Makes float initializers of the quantised ones, as far as their uses allow, and returns how each gets its value, by name; none
/// if nothing in the graph is quantised so.
///
/// The uses are those of `DequantizeLinear`; of `Cast`, `Sub` and `Mul` in sequence, the subtraction being optional; and of products
/// with data that `DynamicQuantizeLinear` quantises. Data that is quantised only to be dequantised again stays as it is: what trains
/// is the model of real numbers that the quantised one stands for.
pub(crate) fn apply(graph: &mut GraphProto) -> Option<BTreeMap<String, Dequantized>> {
    let uses = Uses::new(graph);
    let mut found = BTreeMap::new();
    let mut types = Vec::new();
    let mut edits = quantize_and_dequantize(graph, &uses);
    for (index, proto) in graph.initializer.iter().enumerate() {
        if !is_quantized(proto) || uses.elsewhere.contains(&proto.name) {
            continue;
        }
        let Some(pattern) = PATTERNS.iter().find_map(|pattern| pattern(graph, &uses, proto)) else { continue };
        found.insert(proto.name.clone(), Dequantized(pattern.recipe));
        types.push(index);
        edits.extend(pattern.edits);
    }
    if edits.is_empty() {
        return None;
    }
    for initializer in types {
        graph.initializer[initializer].data_type = DataType::Float as i32;
    }
    for (node, edited) in edits {
        graph.node[node] = edited;
    }
    Some(found)
}

/// What a node becomes, by its index.
type Edit = (usize, NodeProto);

/// A use of a quantised initializer.
struct Pattern {
    /// What computes the floats.
    recipe: GraphProto,
    edits: Vec<Edit>,
}

/// Finds the use of an initializer.
type Matcher = fn(&GraphProto, &Uses, &TensorProto) -> Option<Pattern>;

const PATTERNS: [Matcher; 3] = [dequantize_linear, cast_and_scale, dynamic_product];

/// What `node` becomes where `input` is its first result.
fn identity(node: &NodeProto, input: &str) -> NodeProto {
    NodeProto {
        op_type: "Identity".to_owned(),
        domain: String::new(),
        input: vec![input.to_owned()],
        attribute: Vec::new(),
        ..node.clone()
    }
}

/// Elements of few bits that are no literal of the program.
fn is_quantized(proto: &TensorProto) -> bool {
    const INTEGERS: [DataType; 5] = [DataType::Int8, DataType::Uint8, DataType::Int16, DataType::Uint16, DataType::Int32];
    let few_bits = INTEGERS.iter().any(|d| *d as i32 == proto.data_type) || narrow(proto.data_type).is_some();
    let literal = proto.dims.iter().all(|&d| d == 1) && has_made_up_name(&proto.name);
    few_bits && !literal
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

    /// The node that gives `name`, if it is an `op_type`.
    fn giver<'g>(&self, graph: &'g GraphProto, name: &str, op_type: &str) -> Option<&'g NodeProto> {
        let node = &graph.node[*self.givers.get(name)?];
        (node.op_type == op_type).then_some(node)
    }

    /// `path`, whose last node gives the floats, with what it needs; none if that is more than the file holds.
    fn recipe(&self, graph: &GraphProto, path: &[NodeProto]) -> Option<GraphProto> {
        let mut nodes = BTreeSet::new();
        let mut initializers = BTreeSet::new();
        let mut needed: Vec<&String> = path.iter().flat_map(|node| &node.input).collect();
        while let Some(name) = needed.pop() {
            if name.is_empty() || path.iter().any(|node| node.output.contains(name)) {
                continue;
            }
            if let Some(&initializer) = self.initializers.get(name) {
                initializers.insert(initializer);
                continue;
            }
            let &giver = self.givers.get(name)?;
            let node = &graph.node[giver];
            if node.op_type != "Constant" && !VIEWS.contains(&node.op_type.as_str()) {
                return None;
            }
            if nodes.insert(giver) {
                needed.extend(&node.input);
            }
        }
        let output = path.last()?.output.first()?.clone();
        Some(GraphProto {
            node: nodes.into_iter().map(|n| &graph.node[n]).chain(path).cloned().collect(),
            initializer: initializers.into_iter().map(|i| graph.initializer[i].clone()).collect(),
            output: vec![ValueInfoProto { name: output, ..ValueInfoProto::default() }],
            ..GraphProto::default()
        })
    }
}

/// Pairs that quantise and dequantise by the same numbers.
fn quantize_and_dequantize(graph: &GraphProto, uses: &Uses) -> Vec<Edit> {
    let settings = |node: &NodeProto| {
        let number = |name: &str, default| node.attribute.iter().find(|a| a.name == name).map_or(default, |a| a.i);
        (number("axis", 1), number("block_size", 0))
    };
    let pair = |(index, node): (usize, &NodeProto)| {
        if node.op_type != "DequantizeLinear" {
            return None;
        }
        let quantize = uses.giver(graph, node.input.first()?, "QuantizeLinear")?;
        let alike = node.input.get(1..) == quantize.input.get(1..) && settings(node) == settings(quantize);
        alike.then(|| Some((index, identity(node, quantize.input.first()?))))?
    };
    graph.node.iter().enumerate().filter_map(pair).collect()
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
    if !readers.iter().all(alike) {
        return None;
    }
    let edits = readers.iter().map(|&reader| (reader, identity(&graph.node[reader], &proto.name))).collect();
    Some(Pattern { recipe: uses.recipe(graph, std::slice::from_ref(first))?, edits })
}

/// `(Cast(x) - zero) * scale`
fn cast_and_scale(graph: &GraphProto, uses: &Uses, proto: &TensorProto) -> Option<Pattern> {
    let cast = &graph.node[uses.only_reader(&proto.name)?];
    if cast.op_type != "Cast" {
        return None;
    }
    let shape = dims(proto)?;
    let mut path = vec![cast.clone()];
    loop {
        let value = path.last()?.output.first()?;
        let next = uses.only_reader(value)?;
        let node = &graph.node[next];
        let [a, b] = node.input.as_slice() else { return None };
        let (first, other) = if a == value { (true, b) } else { (false, a) };
        let other = stored_shape(graph, uses, other)?;
        if Shape::broadcast(&shape, &other).as_ref() != Some(&shape) {
            return None;
        }
        path.push(node.clone());
        match node.op_type.as_str() {
            "Sub" if first && path.len() == 2 => {}
            "Mul" => {
                let edits = vec![(next, identity(node, &proto.name))];
                return Some(Pattern { recipe: uses.recipe(graph, &path)?, edits });
            }
            _ => return None,
        }
    }
}

/// Products that replace those of integers, with the axis of the weight that a vector of scales lies along.
const PRODUCTS: [(&str, &str, Option<usize>); 2] = [("MatMulInteger", "MatMul", Some(1)), ("ConvInteger", "Conv", None)];

/// `Cast(x' * w) * (scale of x' * scale)`, where `x'` is `x` quantised by its own range.
fn dynamic_product(graph: &GraphProto, uses: &Uses, proto: &TensorProto) -> Option<Pattern> {
    let product = uses.only_reader(&proto.name)?;
    let node = &graph.node[product];
    let (_, real, axis) = PRODUCTS.iter().find(|(integer, ..)| node.op_type == *integer)?;
    let (data, weight) = (node.input.first()?, node.input.get(1)?);
    let quantize = uses.giver(graph, data, "DynamicQuantizeLinear")?;
    let [elements, data_scale, data_zero] = quantize.output.as_slice() else { return None };
    if weight != &proto.name || data != elements || node.input.get(2) != Some(data_zero) {
        return None;
    }
    let cast = &graph.node[uses.only_reader(node.output.first()?)?];
    let sum = cast.output.first()?;
    let scaled = uses.only_reader(sum)?;
    if cast.op_type != "Cast" || graph.node[scaled].op_type != "Mul" {
        return None;
    }
    let scales = graph.node[scaled].input.iter().find(|name| *name != sum)?;
    let scales = uses.giver(graph, scales, "Mul")?;
    let scale = match scales.input.as_slice() {
        [a, b] if a == data_scale => b,
        [a, b] if b == data_scale => a,
        _ => return None,
    };
    let shape = dims(proto)?;
    let found = stored_shape(graph, uses, scale)?;
    let along = axis.filter(|&axis| shape.rank() == axis + 1 && *found == [shape[axis]]);
    if found.numel() != 1 && along.is_none() {
        return None;
    }
    let mut input = vec![proto.name.clone(), scale.clone()];
    input.extend(node.input.get(3).filter(|zero| !zero.is_empty()).cloned());
    let axis = AttributeProto {
        name: "axis".to_owned(),
        r#type: AttributeType::Int as i32,
        i: along.unwrap_or(0) as i64,
        ..AttributeProto::default()
    };
    let dequantize =
        NodeProto { op_type: "DequantizeLinear".to_owned(), input, attribute: vec![axis], ..graph.node[scaled].clone() };
    let real = NodeProto {
        op_type: (*real).to_owned(),
        input: vec![quantize.input.first()?.clone(), proto.name.clone()],
        ..node.clone()
    };
    let edits = vec![(product, real), (scaled, identity(&graph.node[scaled], sum))];
    Some(Pattern { recipe: uses.recipe(graph, &[dequantize])?, edits })
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
