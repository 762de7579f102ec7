//! Models whose meaning was changed: the message is well-formed, what it says may not be.

use prost::Message;

use crate::models::{self, OPERATORS, random_attribute};
use crate::proto::tensor_shape_proto::dimension;
use crate::proto::type_proto::Value;
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use crate::random::Random;

type Mutation = fn(&mut ModelProto, &mut Random);

/// Attributes come first and often: they decide most of what rules compute.
const MUTATIONS: [Mutation; 30] = [
    attribute_value,
    attribute_value,
    attribute_value,
    attribute_type,
    attribute_name,
    add_attribute,
    add_attribute,
    drop_attribute,
    repeat_attribute,
    operand,
    operand,
    drop_operand,
    add_operand,
    output,
    operator,
    operator,
    version,
    drop_node,
    repeat_node,
    swap_nodes,
    tensor_dims,
    tensor_type,
    tensor_data,
    tensor_data,
    drop_tensor,
    input_size,
    input_type,
    drop_input,
    graph_output,
    move_subgraph,
];

pub fn generate(random: &mut Random) -> Vec<u8> {
    let mut model = models::seed(random);
    for _ in 0..random.below(6) {
        let mutation = MUTATIONS[random.below(MUTATIONS.len())];
        mutation(&mut model, random);
    }
    model.encode_to_vec()
}

/// The main graph, a subgraph of it, or one of that.
fn graph<'a>(model: &'a mut ModelProto, random: &mut Random) -> &'a mut GraphProto {
    let mut graph = model.graph.get_or_insert_default();
    while random.one_in(2) && graph.node.iter().flat_map(|n| &n.attribute).any(|a| a.g.is_some()) {
        let inner = graph.node.iter_mut().flat_map(|n| &mut n.attribute).filter_map(|a| a.g.as_mut());
        let mut inner: Vec<&mut GraphProto> = inner.collect();
        let chosen = random.below(inner.len());
        graph = inner.swap_remove(chosen);
    }
    graph
}

/// The nodes of a graph or of a function.
fn nodes<'a>(model: &'a mut ModelProto, random: &mut Random) -> &'a mut Vec<NodeProto> {
    if !model.functions.is_empty() && random.one_in(2) {
        let chosen = random.below(model.functions.len());
        return &mut model.functions[chosen].node;
    }
    &mut graph(model, random).node
}

fn node<'a>(model: &'a mut ModelProto, random: &mut Random) -> Option<&'a mut NodeProto> {
    let nodes = nodes(model, random);
    random.pick_mut(nodes)
}

fn tensor<'a>(model: &'a mut ModelProto, random: &mut Random) -> Option<&'a mut TensorProto> {
    let graph = graph(model, random);
    let sparse = graph.sparse_initializer.iter_mut().flat_map(|s| s.values.iter_mut().chain(&mut s.indices));
    let attributes = graph.node.iter_mut().flat_map(|n| &mut n.attribute).filter_map(|a| a.t.as_mut());
    let mut all: Vec<&mut TensorProto> = graph.initializer.iter_mut().chain(sparse).chain(attributes).collect();
    let chosen = random.below(all.len());
    (!all.is_empty()).then(|| all.swap_remove(chosen))
}

fn input<'a>(model: &'a mut ModelProto, random: &mut Random) -> Option<&'a mut ValueInfoProto> {
    let graph = graph(model, random);
    random.pick_mut(&mut graph.input)
}

/// Some name that occurs in the model, or none.
fn name(model: &ModelProto, random: &mut Random) -> String {
    let Some(graph) = &model.graph else { return String::new() };
    let inner = graph.node.iter().flat_map(|n| &n.attribute).filter_map(|a| a.g.as_ref());
    let all = [graph].into_iter().chain(inner).flat_map(|graph| {
        let values = graph.node.iter().flat_map(|n| n.input.iter().chain(&n.output));
        values.chain(graph.input.iter().map(|i| &i.name)).chain(graph.initializer.iter().map(|t| &t.name))
    });
    let all: Vec<&String> = all.collect();
    match random.pick(&all) {
        Some(name) if !random.one_in(12) => (*name).clone(),
        _ => String::new(),
    }
}

fn edit_integers(list: &mut Vec<i64>, random: &mut Random) {
    match random.below(4) {
        0 => list.push(random.integer()),
        1 => drop(list.pop()),
        2 => list.reverse(),
        _ => {
            let new = random.integer();
            if let Some(value) = random.pick_mut(list) {
                *value = new;
            }
        }
    }
}

fn attribute_value(model: &mut ModelProto, random: &mut Random) {
    let Some(node) = node(model, random) else { return };
    let Some(attribute) = random.pick_mut(&mut node.attribute) else { return };
    match attribute.r#type {
        1 => attribute.f = random.float(),
        2 => attribute.i = random.integer(),
        3 => attribute.s = random_attribute(random).s,
        6 => attribute.floats.push(random.float()),
        7 => edit_integers(&mut attribute.ints, random),
        _ => attribute.ref_attr_name = if random.one_in(2) { "axis".to_owned() } else { String::new() },
    }
}

fn attribute_type(model: &mut ModelProto, random: &mut Random) {
    let ty = random.below(16) as i32;
    if let Some(attribute) = node(model, random).and_then(|n| random.pick_mut(&mut n.attribute)) {
        attribute.r#type = ty;
    }
}

fn attribute_name(model: &mut ModelProto, random: &mut Random) {
    let name = models::ATTRIBUTES[random.below(models::ATTRIBUTES.len())];
    if let Some(attribute) = node(model, random).and_then(|n| random.pick_mut(&mut n.attribute)) {
        attribute.name = name.to_owned();
    }
}

fn add_attribute(model: &mut ModelProto, random: &mut Random) {
    let attribute = random_attribute(random);
    if let Some(node) = node(model, random) {
        node.attribute.retain(|a| a.name != attribute.name);
        node.attribute.push(attribute);
    }
}

fn drop_attribute(model: &mut ModelProto, random: &mut Random) {
    if let Some(node) = node(model, random) {
        node.attribute.pop();
    }
}

fn repeat_attribute(model: &mut ModelProto, random: &mut Random) {
    if let Some(node) = node(model, random) {
        node.attribute.extend(node.attribute.first().cloned());
    }
}

fn operand(model: &mut ModelProto, random: &mut Random) {
    let name = name(model, random);
    if let Some(operand) = node(model, random).and_then(|n| random.pick_mut(&mut n.input)) {
        *operand = name;
    }
}

fn drop_operand(model: &mut ModelProto, random: &mut Random) {
    if let Some(node) = node(model, random) {
        node.input.pop();
    }
}

fn add_operand(model: &mut ModelProto, random: &mut Random) {
    let name = name(model, random);
    if let Some(node) = node(model, random) {
        node.input.push(name);
    }
}

fn output(model: &mut ModelProto, random: &mut Random) {
    let name = name(model, random);
    if let Some(output) = node(model, random).and_then(|n| random.pick_mut(&mut n.output)) {
        *output = name;
    }
}

fn operator(model: &mut ModelProto, random: &mut Random) {
    let (domain, op) = OPERATORS[random.below(OPERATORS.len())];
    if let Some(node) = node(model, random) {
        (node.domain, node.op_type) = (domain.to_owned(), op.to_owned());
    }
}

fn version(model: &mut ModelProto, random: &mut Random) {
    let new = if random.one_in(8) { random.integer() } else { 7 + random.below(20) as i64 };
    if let Some(import) = random.pick_mut(&mut model.opset_import) {
        import.version = new;
    }
}

fn drop_node(model: &mut ModelProto, random: &mut Random) {
    let nodes = nodes(model, random);
    if !nodes.is_empty() {
        nodes.remove(random.below(nodes.len()));
    }
}

fn repeat_node(model: &mut ModelProto, random: &mut Random) {
    let nodes = nodes(model, random);
    if let Some(mut node) = random.pick(nodes).cloned() {
        node.output.iter_mut().for_each(|name| name.push('\''));
        nodes.push(node);
    }
}

fn swap_nodes(model: &mut ModelProto, random: &mut Random) {
    let nodes = nodes(model, random);
    if !nodes.is_empty() {
        let (a, b) = (random.below(nodes.len()), random.below(nodes.len()));
        nodes.swap(a, b);
    }
}

fn tensor_dims(model: &mut ModelProto, random: &mut Random) {
    if let Some(tensor) = tensor(model, random) {
        edit_integers(&mut tensor.dims, random);
    }
}

fn tensor_type(model: &mut ModelProto, random: &mut Random) {
    let data_type = random.below(28) as i32;
    if let Some(tensor) = tensor(model, random) {
        tensor.data_type = data_type;
    }
}

/// New elements, in a shape that fits them or not.
fn tensor_data(model: &mut ModelProto, random: &mut Random) {
    let Some(tensor) = tensor(model, random) else { return };
    match random.below(4) {
        0 => tensor.raw_data.truncate(random.below(tensor.raw_data.len())),
        1 => tensor.float_data = vec![random.float(); random.below(4)],
        _ => {
            let values: Vec<i64> = (0..random.below(6)).map(|_| random.integer()).collect();
            let name = std::mem::take(&mut tensor.name);
            *tensor = models::integers(&name, &[values.len() as i64], &values);
        }
    }
}

fn drop_tensor(model: &mut ModelProto, random: &mut Random) {
    let initializers = &mut graph(model, random).initializer;
    if !initializers.is_empty() {
        initializers.remove(random.below(initializers.len()));
    }
}

fn input_size(model: &mut ModelProto, random: &mut Random) {
    const TEXTS: [&str; 8] = ["n", "2*n", "n//2", "Max(1, n)", "n + m", "((n - 1)//2)", "n**2", ""];
    let value = match random.below(3) {
        0 => dimension::Value::DimParam(TEXTS[random.below(TEXTS.len())].to_owned()),
        _ => dimension::Value::DimValue(random.integer()),
    };
    let Some(Value::TensorType(ty)) = input(model, random).and_then(|i| i.r#type.as_mut()?.value.as_mut()) else { return };
    let dims = &mut ty.shape.get_or_insert_default().dim;
    match random.below(5) {
        0 => ty.shape = None,
        1 => dims.extend(dims.first().cloned()),
        2 => drop(dims.pop()),
        _ => {
            if let Some(dim) = random.pick_mut(dims) {
                dim.value = Some(value);
            }
        }
    }
}

fn input_type(model: &mut ModelProto, random: &mut Random) {
    let data_type = random.below(24) as i32;
    if let Some(Value::TensorType(ty)) = input(model, random).and_then(|i| i.r#type.as_mut()?.value.as_mut()) {
        ty.elem_type = data_type;
    }
}

fn drop_input(model: &mut ModelProto, random: &mut Random) {
    let inputs = &mut graph(model, random).input;
    if !inputs.is_empty() {
        inputs.remove(random.below(inputs.len()));
    }
}

fn graph_output(model: &mut ModelProto, random: &mut Random) {
    let name = name(model, random);
    let outputs = &mut graph(model, random).output;
    if let Some(output) = random.pick_mut(outputs) {
        output.name = name;
    }
}

/// Puts a graph into a graph: itself, or the main one.
fn move_subgraph(model: &mut ModelProto, random: &mut Random) {
    let whole = model.graph.clone();
    let graph = graph(model, random);
    if let Some(attribute) = graph.node.iter_mut().flat_map(|n| &mut n.attribute).find(|a| a.g.is_some()) {
        attribute.g = whole;
    }
}
