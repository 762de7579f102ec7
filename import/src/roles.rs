//! Which tensors of a file are parameters, and which of those train.

use std::collections::{HashMap, HashSet};

use crate::proto::{GraphProto, NodeProto, TensorProto};
use meganeura_ir::{DType, ParameterRole, TensorType};

use crate::buffers::{Content, Place};
use crate::error::{ImportError, Warning};
use crate::model::{Dim, ModelInput, ModelOutput, ModelParameter, canonical_domain};
use crate::narrow::narrow;
use crate::ops::{self, Rule};
use crate::tensor;
use crate::wire::Locator;

/// A float tensor in a Constant node of at most this many elements and with a name that an exporter made up is a literal of the program.
const LITERAL_ELEMENTS: usize = 16;

/// Last parts of names that frameworks give to tensors which they store and never train.
#[rustfmt::skip]
const BUFFER_NAMES: [&str; 20] = [
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "cos_cached", "sin_cached", "cos_cache", "sin_cache", "cos",
    "sin", "anchors", "anchor_grid", "attn_mask", "causal_mask", "masked_bias", "relative_coords_table", "pixel_mean", "pixel_std",
    "forward_basis_buffer", "position_ids",
];

/// Marks in the names that exporters give to literals of the program: torch's two exporters and its tracer.
const LITERAL_NAMES: [&str; 5] = ["val_", "onnx::", "/Constant", "Constant_", "scalar_tensor_default"];

/// Ops whose result holds the same elements as their first operand: a role reaches through them to the stored tensor.
const VIEWS: [&str; 9] = ["Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"];

/// Ops whose operands after the first are weights.
const LAYERS: [&str; 7] = ["Conv", "ConvTranspose", "Gemm", "BatchNormalization", "LSTM", "GRU", "RNN"];

/// Names that torch's exporter gives, with a number, to weights that it transposed.
const FOLDED_VIEWS: [&str; 3] = ["permute", "transpose", "t"];

/// What a float tensor is that is no weight.
pub(crate) enum Verdict {
    /// A parameter that does not train.
    Buffer(Content),
    /// No parameter: a constant of the program.
    Literal,
}

/// Judges a float tensor by its content, unless it may be a weight.
pub(crate) type Judge<'a> = dyn Fn(&ModelParameter, &TensorProto, Place) -> Option<Verdict> + 'a;

/// The parameters among the tensors that the nodes or the outputs need, in file order: initializers, then Constant nodes, those of
/// bodies after those around them. Each comes with its ordinal in the file. `function_tensors` names those that functions hold.
pub(crate) fn classify(
    graph: &GraphProto,
    outputs: &[ModelOutput],
    function_tensors: &HashMap<u64, String>,
    judge: &Judge,
) -> Result<Vec<(ModelParameter, u64)>, ImportError> {
    let uses = Uses::new(graph, outputs);
    let mut parameters = Vec::new();
    let mut ordinals = HashSet::new();
    let mut push = |proto: &TensorProto, name: &str, ty: TensorType, (trainable, reason): (bool, &'static str)| {
        let Some(ordinal) = ordinal(proto).filter(|ordinal| ordinals.insert(*ordinal)) else { return false };
        let (role, stored_as) = (ParameterRole::Weight, function_tensors.get(&ordinal).map_or(name, String::as_str).to_owned());
        let mut parameter = ModelParameter { name: stored_as, shape: ty.shape, stored: ty.dtype, role, trainable, reason };
        let buffer = uses.statistics.contains(name).then_some("running statistics of BatchNormalization");
        let buffer = buffer.or_else(|| is_buffer(&parameter.name).then_some("a buffer, by its name"));
        let judged = if buffer.is_none() { judge(&parameter, proto, uses.place(name)) } else { None };
        let reason = match judged {
            Some(Verdict::Literal) => return false,
            Some(Verdict::Buffer(content)) => Some(content.reason()),
            None => buffer,
        };
        if let Some(reason) = reason {
            parameter = ModelParameter { role: ParameterRole::Statistic, trainable: false, reason, ..parameter };
        }
        let trains = parameter.trainable;
        parameters.push((parameter, ordinal));
        trains
    };
    let mut weights_are_initializers = false;
    for proto in graph.graphs().into_iter().flat_map(|g| &g.initializer) {
        let name = proto.name.as_str();
        let Some(positions) = uses.by_name.get(name) else { continue };
        let error = |source| ImportError::Tensor { name: name.to_owned(), source };
        let ty = tensor::tensor_type(proto).map_err(error)?;
        let literal = ty.shape.numel() == 1 && has_made_up_name(name) && !uses.weights.contains(name);
        let only_static = positions.iter().all(|p| *p == Position::Static);
        if !ty.dtype.is_float() || narrow(proto.data_type).is_some() || literal || only_static {
            continue;
        }
        weights_are_initializers |= push(proto, name, ty, (true, "a float initializer"));
    }
    for node in graph.nodes() {
        let Some((proto, name)) = constant_tensor(node) else { continue };
        let Ok(ty) = tensor::tensor_type(proto) else { continue };
        let only_static = uses.by_name.get(name).is_some_and(|positions| positions.iter().all(|p| *p == Position::Static));
        let literal = is_literal(name, ty.shape.numel()) && !uses.weights.contains(name);
        if !ty.dtype.is_float() || narrow(proto.data_type).is_some() || literal || only_static {
            continue;
        }
        let trains = match weights_are_initializers {
            true => (false, "a table in a Constant node; the weights of this file are initializers"),
            false => (true, "a float Constant node of several elements"),
        };
        push(proto, name, ty, trains);
    }
    Ok(parameters)
}

fn ordinal(proto: &TensorProto) -> Option<u64> {
    Locator::from_bytes(&proto.raw_data).map(|locator| locator.ordinal)
}

/// The tensor attribute of a Constant node, and the name of the node's result.
pub(crate) fn constant_tensor(node: &NodeProto) -> Option<(&TensorProto, &str)> {
    if node.op_type != "Constant" || !canonical_domain(&node.domain).is_empty() {
        return None;
    }
    let tensor = node.attribute.iter().filter(|a| a.name == "value").find_map(|a| a.t.as_ref())?;
    Some((tensor, node.output.first()?))
}

/// Whether the float tensor of a Constant node is a literal of the program.
fn is_literal(name: &str, elements: usize) -> bool {
    elements <= 1 || elements <= LITERAL_ELEMENTS && has_made_up_name(name)
}

/// Whether an exporter gave the name to a literal of the program.
pub(crate) fn has_made_up_name(name: &str) -> bool {
    LITERAL_NAMES.iter().any(|mark| name.contains(mark))
}

fn is_buffer(name: &str) -> bool {
    let last = name.rsplit(['.', '/']).next().unwrap_or(name);
    BUFFER_NAMES.contains(&last)
}

/// How a node reads an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// As data.
    Data,
    /// Where the standard once had an attribute: bounds, pad values, scales. Also where no gradient comes from.
    Static,
}

#[derive(Default)]
struct Uses<'a> {
    by_name: HashMap<&'a str, Vec<Position>>,
    /// Values that are running statistics, or views of them.
    statistics: HashSet<&'a str>,
    /// Values where layers have their weights, however few elements these have.
    weights: HashSet<&'a str>,
    /// Scales and biases of InstanceNormalization.
    instance_norms: HashSet<&'a str>,
}

impl<'a> Uses<'a> {
    fn new(graph: &'a GraphProto, outputs: &'a [ModelOutput]) -> Self {
        let mut uses = Uses::default();
        let bodies = graph.graphs().into_iter().skip(1).flat_map(|body| &body.output).map(|o| &o.name);
        for output in outputs.iter().map(|o| &o.name).chain(bodies) {
            uses.by_name.entry(output).or_default().push(Position::Data);
        }
        for node in graph.nodes().into_iter().rev() {
            let row = ops::find(canonical_domain(&node.domain), &node.op_type);
            let statics = row.map_or(&[][..], |row| row.statics);
            // No gradient passes a comparison, or a cast to what is no float.
            let compares = row.is_some_and(|row| matches!(row.rule, Rule::Compare(_))) || casts_to_discrete(node);
            for (i, name) in node.input.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let position = if compares || statics.contains(&i) { Position::Static } else { Position::Data };
                uses.by_name.entry(name).or_default().push(position);
            }
            if LAYERS.contains(&node.op_type.as_str()) {
                uses.weights.extend(node.input.iter().skip(1).map(String::as_str));
            }
            if node.op_type == "InstanceNormalization" {
                uses.instance_norms.extend(node.input.iter().skip(1).map(String::as_str));
            }
            if node.op_type == "BatchNormalization" {
                uses.statistics.extend(node.input.iter().skip(3).map(String::as_str));
            }
            let views_statistic = VIEWS.contains(&node.op_type.as_str())
                && node.output.first().is_some_and(|o| uses.statistics.contains(o.as_str()));
            if let (true, Some(x)) = (views_statistic, node.input.first()) {
                uses.statistics.insert(x);
            }
        }
        uses
    }

    fn place(&self, name: &str) -> Place {
        if has_made_up_name(name) && self.instance_norms.contains(name) { Place::MadeNorm } else { Place::Anywhere }
    }
}

/// Whether the node is a Cast to integers or booleans.
fn casts_to_discrete(node: &NodeProto) -> bool {
    let to = node.attribute.iter().find(|a| a.name == "to").and_then(|a| i32::try_from(a.i).ok());
    let discrete = |to| narrow(to).is_none() && tensor::held_dtype(to).is_ok_and(|dtype| !dtype.is_float());
    node.op_type == "Cast" && to.is_some_and(discrete)
}

/// What the graph, the names and the dtypes say about the export.
pub(crate) fn warnings(graph: &GraphProto, parameters: &[(ModelParameter, u64)], inputs: &[ModelInput]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let by_name: HashMap<&str, &ModelParameter> = parameters.iter().map(|(p, _)| (p.name.as_str(), p)).collect();
    let renamed: Vec<&str> = by_file(parameters, |p| p.trainable && is_renamed(&p.name));
    if let Some(example) = renamed.first() {
        warnings.push(Warning::RenamedWeights { count: renamed.len(), example: (*example).to_owned() });
    }
    let nodes = graph.nodes();
    let folded = nodes.iter().filter(|node| node.op_type == "Conv" && has_folded_norm(node, &by_name)).count();
    if folded > 0 {
        warnings.push(Warning::FoldedBatchNorm { count: folded });
    }
    warnings.extend(nodes.iter().filter_map(|node| merged(node, &by_name)));
    let buffers = by_file(parameters, |p| p.reason.ends_with("by its content") || p.reason.ends_with("by their content"));
    if let Some(example) = buffers.first() {
        warnings.push(Warning::Buffers { count: buffers.len(), example: (*example).to_owned() });
    }
    let wide = parameters.iter().map(|(p, _)| (p.stored, &p.name)).chain(inputs.iter().map(|i| (i.dtype, &i.name)));
    let wide: Vec<&String> = wide.filter(|(dtype, _)| *dtype == DType::F64).map(|(_, name)| name).collect();
    if let Some(example) = wide.first() {
        warnings.push(Warning::ReducedPrecision { count: wide.len(), example: (*example).clone() });
    }
    for input in inputs.iter().filter(|input| input.dims.contains(&Dim::Fixed(0))) {
        warnings.push(Warning::ZeroSize { input: input.name.clone() });
    }
    warnings
}

/// Names of the parameters that pass a test, in file order.
fn by_file(parameters: &[(ModelParameter, u64)], test: impl Fn(&ModelParameter) -> bool) -> Vec<&str> {
    parameters.iter().filter(|(p, _)| test(p)).map(|(p, _)| p.name.as_str()).collect()
}

/// Whether an exporter made up the name: `onnx::MatMul_30`, `val_7`, `permute_3`.
fn is_renamed(name: &str) -> bool {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('_');
    name.starts_with("onnx::") || name.starts_with("val_") || FOLDED_VIEWS.contains(&stem)
}

/// Whether the bias of a convolution shows that a batch normalisation was merged into it: torch's exporters rename the bias,
/// one to `onnx::Conv_12`, the other after the weight.
fn has_folded_norm(node: &NodeProto, parameters: &HashMap<&str, &ModelParameter>) -> bool {
    let [_, weight, bias] = node.input.as_slice() else { return false };
    parameters.contains_key(bias.as_str()) && (bias.starts_with("onnx::Conv_") || *bias == format!("{weight}_bias"))
}

/// An Identity node that stands for a second tensor of the original model which was equal to a stored one.
fn merged(node: &NodeProto, parameters: &HashMap<&str, &ModelParameter>) -> Option<Warning> {
    let (kept, lost) = (node.input.first()?, node.output.first()?);
    let is_name = lost.contains('.') && !lost.starts_with('/') && !lost.contains("::");
    let is_merged = node.op_type == "Identity" && is_name && parameters.contains_key(kept.as_str());
    is_merged.then(|| Warning::MergedTensors { kept: kept.clone(), lost: lost.clone() })
}
