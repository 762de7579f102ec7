//! Which tensors of a file are parameters, and which of those train.

use std::collections::{HashMap, HashSet};

use crate::proto::{GraphProto, NodeProto};
use meganeura_ir::{DType, ParameterRole};

use crate::error::{ImportError, Warning};
use crate::model::{ModelInput, ModelOutput, ModelParameter, ParameterSource, canonical_domain};
use crate::ops;
use crate::tensor::{self, TensorError};

/// A float tensor in a Constant node of at most this many elements and with a name that an exporter made up is a literal of the program.
const LITERAL_ELEMENTS: usize = 16;

/// Last parts of names that frameworks give to tensors which they store and never train.
const BUFFER_NAMES: [&str; 8] =
    ["running_mean", "running_var", "num_batches_tracked", "inv_freq", "cos_cached", "sin_cached", "cos", "sin"];

/// Marks in the names that exporters give to literals of the program: torch's two exporters and its tracer.
const LITERAL_NAMES: [&str; 5] = ["val_", "onnx::", "/Constant", "Constant_", "scalar_tensor_default"];

/// Ops whose result holds the same elements as their first operand: a role reaches through them to the stored tensor.
const VIEWS: [&str; 9] = ["Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"];

/// The parameters among the tensors that the live nodes or the outputs need, in file order: initializers, then Constant nodes.
pub(crate) fn classify(
    graph: &GraphProto,
    live: &[usize],
    outputs: &[ModelOutput],
) -> Result<Vec<(ModelParameter, ParameterSource)>, ImportError> {
    let uses = Uses::new(graph, live, outputs);
    let mut parameters = Vec::new();
    for (index, proto) in graph.initializer.iter().enumerate() {
        let name = proto.name.as_str();
        let Some(positions) = uses.by_name.get(name) else { continue };
        let error = |source| ImportError::Tensor { name: name.to_owned(), source };
        let ty = tensor::tensor_type(proto).map_err(error)?;
        let literal = ty.shape.numel() == 1 && has_made_up_name(name);
        let only_static = positions.iter().all(|p| *p == Position::Static);
        if !ty.dtype.is_float() || literal || only_static {
            continue;
        }
        let (role, trainable, reason) = if uses.statistics.contains(name) {
            (ParameterRole::Statistic, false, "running statistics of BatchNormalization")
        } else if is_buffer(name) {
            (ParameterRole::Statistic, false, "a buffer, by its name")
        } else {
            (ParameterRole::Weight, true, "a float initializer")
        };
        let parameter = ModelParameter { name: name.to_owned(), shape: ty.shape, stored: ty.dtype, role, trainable, reason };
        parameters.push((parameter, ParameterSource::Initializer(index)));
    }
    let weights_are_initializers = parameters.iter().any(|(p, _)| p.trainable);
    for &node in live {
        let Some((attribute, name)) = constant_tensor(&graph.node[node]) else { continue };
        let Some(proto) = &graph.node[node].attribute[attribute].t else { continue };
        let Ok(ty) = tensor::tensor_type(proto) else { continue };
        let only_static = uses.by_name.get(name).is_some_and(|positions| positions.iter().all(|p| *p == Position::Static));
        if !ty.dtype.is_float() || is_literal(name, ty.shape.numel()) || only_static {
            continue;
        }
        let (role, trainable, reason) = if uses.statistics.contains(name) {
            (ParameterRole::Statistic, false, "running statistics of BatchNormalization")
        } else if weights_are_initializers {
            (ParameterRole::Weight, false, "a table in a Constant node; the weights of this file are initializers")
        } else {
            (ParameterRole::Weight, true, "a float Constant node of several elements")
        };
        let parameter = ModelParameter { name: name.to_owned(), shape: ty.shape, stored: ty.dtype, role, trainable, reason };
        parameters.push((parameter, ParameterSource::Constant { node, attribute }));
    }
    if let Some(sparse) =
        graph.sparse_initializer.iter().find_map(|s| s.values.as_ref().filter(|v| uses.by_name.contains_key(v.name.as_str())))
    {
        let source = TensorError::DType("sparse".to_owned());
        return Err(ImportError::Tensor { name: sparse.name.clone(), source });
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

/// What the names and dtypes of parameters and inputs say about the export.
pub(crate) fn warnings(parameters: &[(ModelParameter, ParameterSource)], inputs: &[ModelInput]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let named = |test: &dyn Fn(&str) -> bool| -> Vec<&str> {
        let trainable = parameters.iter().filter(|(p, _)| p.trainable);
        trainable.map(|(p, _)| p.name.as_str()).filter(|name| test(name)).collect()
    };
    let renamed = named(&|name| name.starts_with("onnx::") || name.starts_with("val_"));
    if let Some(example) = renamed.first() {
        warnings.push(Warning::RenamedWeights { count: renamed.len(), example: (*example).to_owned() });
    }
    let folded = parameters.iter().filter(|(p, _)| p.name.starts_with("onnx::Conv_") && p.shape.rank() == 1).count();
    if folded > 0 {
        warnings.push(Warning::FoldedBatchNorm { count: folded });
    }
    let wide = parameters.iter().map(|(p, _)| (p.stored, &p.name)).chain(inputs.iter().map(|i| (i.dtype, &i.name)));
    let wide: Vec<&String> = wide.filter(|(dtype, _)| *dtype == DType::F64).map(|(_, name)| name).collect();
    if let Some(example) = wide.first() {
        warnings.push(Warning::ReducedPrecision { count: wide.len(), example: (*example).clone() });
    }
    warnings
}
