//! Which tensors of a file are parameters, and which of those train.

use std::collections::{HashMap, HashSet};

use crate::proto::{GraphProto, NodeProto, TensorProto};
use meganeura_ir::{DType, ParameterRole, TensorType};

use crate::error::{ImportError, Warning};
use crate::model::{Dim, ModelInput, ModelOutput, ModelParameter, ParameterSource, canonical_domain};
use crate::narrow::narrow;
use crate::ops;
use crate::tensor;

/// A float tensor in a Constant node of at most this many elements and with a name that an exporter made up is a literal of the program.
const LITERAL_ELEMENTS: usize = 16;

/// Last parts of names that frameworks give to tensors which they store and never train.
#[rustfmt::skip]
const BUFFER_NAMES: [&str; 18] = [
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "cos_cached", "sin_cached", "cos", "sin", "anchors",
    "anchor_grid", "attn_mask", "causal_mask", "masked_bias", "relative_coords_table", "pixel_mean", "pixel_std",
    "forward_basis_buffer", "position_ids",
];

/// Marks in the names that exporters give to literals of the program: torch's two exporters and its tracer.
const LITERAL_NAMES: [&str; 5] = ["val_", "onnx::", "/Constant", "Constant_", "scalar_tensor_default"];

/// Ops whose result holds the same elements as their first operand: a role reaches through them to the stored tensor.
const VIEWS: [&str; 9] = ["Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"];

/// Names that torch's exporter gives, with a number, to weights that it transposed.
const FOLDED_VIEWS: [&str; 3] = ["permute", "transpose", "t"];

/// Judges a float tensor by its content: what it is, if it is no weight.
pub(crate) type Judge<'a> = dyn Fn(&ModelParameter, &TensorProto) -> Option<&'static str> + 'a;

/// The parameters among the tensors that the live nodes or the outputs need, in file order: initializers, then Constant nodes.
pub(crate) fn classify(
    graph: &GraphProto,
    live: &[usize],
    outputs: &[ModelOutput],
    judge: &Judge,
) -> Result<Vec<(ModelParameter, ParameterSource)>, ImportError> {
    let uses = Uses::new(graph, live, outputs);
    let mut parameters = Vec::new();
    let mut push = |proto: &TensorProto, name: &str, ty: TensorType, source, (trainable, reason): (bool, &'static str)| {
        let (role, name) = (ParameterRole::Weight, name.to_owned());
        let mut parameter = ModelParameter { name, shape: ty.shape, stored: ty.dtype, role, trainable, reason };
        let buffer = uses.statistics.contains(parameter.name.as_str()).then_some("running statistics of BatchNormalization");
        let buffer = buffer.or_else(|| is_buffer(&parameter.name).then_some("a buffer, by its name"));
        if let Some(reason) = buffer.or_else(|| judge(&parameter, proto)) {
            parameter = ModelParameter { role: ParameterRole::Statistic, trainable: false, reason, ..parameter };
        }
        let trains = parameter.trainable;
        parameters.push((parameter, source));
        trains
    };
    let mut weights_are_initializers = false;
    for (index, proto) in graph.initializer.iter().enumerate() {
        let name = proto.name.as_str();
        let Some(positions) = uses.by_name.get(name) else { continue };
        let error = |source| ImportError::Tensor { name: name.to_owned(), source };
        let ty = tensor::tensor_type(proto).map_err(error)?;
        let literal = ty.shape.numel() == 1 && has_made_up_name(name);
        let only_static = positions.iter().all(|p| *p == Position::Static);
        if !ty.dtype.is_float() || narrow(proto.data_type).is_some() || literal || only_static {
            continue;
        }
        let source = ParameterSource::Initializer(index);
        weights_are_initializers |= push(proto, name, ty, source, (true, "a float initializer"));
    }
    for &node in live {
        let Some((attribute, name)) = constant_tensor(&graph.node[node]) else { continue };
        let Some(proto) = &graph.node[node].attribute[attribute].t else { continue };
        let Ok(ty) = tensor::tensor_type(proto) else { continue };
        let only_static = uses.by_name.get(name).is_some_and(|positions| positions.iter().all(|p| *p == Position::Static));
        let literal = is_literal(name, ty.shape.numel());
        if !ty.dtype.is_float() || narrow(proto.data_type).is_some() || literal || only_static {
            continue;
        }
        let trains = match weights_are_initializers {
            true => (false, "a table in a Constant node; the weights of this file are initializers"),
            false => (true, "a float Constant node of several elements"),
        };
        push(proto, name, ty, ParameterSource::Constant { node, attribute }, trains);
    }
    Ok(parameters)
}

/// The tensor attribute of a Constant node, and the name of the node's result.
fn constant_tensor(node: &NodeProto) -> Option<(usize, &str)> {
    if node.op_type != "Constant" || !canonical_domain(&node.domain).is_empty() {
        return None;
    }
    let attribute = node.attribute.iter().position(|a| a.name == "value" && a.t.is_some())?;
    Some((attribute, node.output.first()?))
}

/// Whether the float tensor of a Constant node is a literal of the program.
fn is_literal(name: &str, elements: usize) -> bool {
    elements <= 1 || elements <= LITERAL_ELEMENTS && has_made_up_name(name)
}

fn has_made_up_name(name: &str) -> bool {
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
    /// Where the standard once had an attribute: bounds, pad values, scales.
    Static,
}

struct Uses<'a> {
    by_name: HashMap<&'a str, Vec<Position>>,
    /// Values that are running statistics, or views of them.
    statistics: HashSet<&'a str>,
}

impl<'a> Uses<'a> {
    fn new(graph: &'a GraphProto, live: &[usize], outputs: &'a [ModelOutput]) -> Self {
        let mut uses = Uses { by_name: HashMap::new(), statistics: HashSet::new() };
        for output in outputs {
            uses.by_name.entry(&output.name).or_default().push(Position::Data);
        }
        for &n in live.iter().rev() {
            let node = &graph.node[n];
            let statics = ops::find(canonical_domain(&node.domain), &node.op_type).map_or(&[][..], |row| row.statics);
            for (i, name) in node.input.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let position = if statics.contains(&i) { Position::Static } else { Position::Data };
                uses.by_name.entry(name).or_default().push(position);
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
}

/// What the graph, the names and the dtypes say about the export.
pub(crate) fn warnings(
    graph: &GraphProto,
    live: &[usize],
    parameters: &[(ModelParameter, ParameterSource)],
    inputs: &[ModelInput],
) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let by_name: HashMap<&str, &ModelParameter> = parameters.iter().map(|(p, _)| (p.name.as_str(), p)).collect();
    let renamed: Vec<&str> = by_file(parameters, |p| p.trainable && is_renamed(&p.name));
    if let Some(example) = renamed.first() {
        warnings.push(Warning::RenamedWeights { count: renamed.len(), example: (*example).to_owned() });
    }
    let nodes = || live.iter().filter_map(|&n| graph.node.get(n));
    let folded = nodes().filter(|node| node.op_type == "Conv" && has_folded_norm(node, &by_name)).count();
    if folded > 0 {
        warnings.push(Warning::FoldedBatchNorm { count: folded });
    }
    warnings.extend(nodes().filter_map(|node| merged(node, &by_name)));
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
fn by_file(parameters: &[(ModelParameter, ParameterSource)], test: impl Fn(&ModelParameter) -> bool) -> Vec<&str> {
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
