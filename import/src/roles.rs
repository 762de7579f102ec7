//! Which tensors of a file are parameters, and which of those train.

use std::collections::{HashMap, HashSet};

use crate::proto::{GraphProto, NodeProto, TensorProto};
use meganeura_ir::{DType, ParameterRole};

use crate::error::{ImportError, Warning};
use crate::model::{ModelInput, ModelOutput, ModelParameter, canonical_domain};
use crate::ops::{self, Rule};
use crate::tensor::{self, TensorError};
use crate::wire::Locator;

/// A float tensor in a Constant node of at most this many elements is a constant: exporters write literals of the program so.
const LITERAL_ELEMENTS: usize = 16;

/// Last parts of names that frameworks give to tensors which they store and never train.
const BUFFER_NAMES: [&str; 10] = [
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "inv_freq",
    "cos_cached",
    "sin_cached",
    "cos_cache",
    "sin_cache",
    "cos",
    "sin",
];

/// Marks in the names that exporters give to literals of the program: torch's two exporters and its tracer.
const LITERAL_NAMES: [&str; 4] = ["val_", "onnx::", "/Constant", "scalar_tensor_default"];

/// Ops whose result holds the same elements as their first operand: a role reaches through them to the stored tensor.
const VIEWS: [&str; 9] = ["Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"];

/// The parameters among the tensors that the nodes or the outputs need, in file order: initializers, then Constant nodes, those of
/// bodies after those around them. Each comes with its ordinal in the file. `function_tensors` names those that functions hold.
pub(crate) fn classify(
    graph: &GraphProto,
    outputs: &[ModelOutput],
    function_tensors: &HashMap<u64, String>,
) -> Result<Vec<(ModelParameter, u64)>, ImportError> {
    let uses = Uses::new(graph, outputs);
    let mut parameters = Vec::new();
    let mut ordinals = HashSet::new();
    for proto in graph.graphs().into_iter().flat_map(|g| &g.initializer) {
        let name = proto.name.as_str();
        let Some(positions) = uses.by_name.get(name) else { continue };
        let error = |source| ImportError::Tensor { name: name.to_owned(), source };
        let ty = tensor::tensor_type(proto).map_err(error)?;
        let literal = ty.shape.numel() == 1 && LITERAL_NAMES.iter().any(|mark| name.contains(mark));
        let only_static = !positions.is_empty() && positions.iter().all(|p| *p == Position::Static);
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
        let Some(ordinal) = ordinal(proto).filter(|ordinal| ordinals.insert(*ordinal)) else { continue };
        let name = function_tensors.get(&ordinal).map_or(name, String::as_str).to_owned();
        parameters.push((ModelParameter { name, shape: ty.shape, stored: ty.dtype, role, trainable, reason }, ordinal));
    }
    let weights_are_initializers = parameters.iter().any(|(p, _)| p.trainable);
    for node in graph.nodes() {
        let Some((proto, name)) = constant_tensor(node) else { continue };
        let Ok(ty) = tensor::tensor_type(proto) else { continue };
        if !ty.dtype.is_float() || ty.shape.numel() <= LITERAL_ELEMENTS {
            continue;
        }
        let (role, trainable, reason) = if uses.statistics.contains(name) {
            (ParameterRole::Statistic, false, "running statistics of BatchNormalization")
        } else if weights_are_initializers {
            (ParameterRole::Weight, false, "a table in a Constant node; the weights of this file are initializers")
        } else {
            (ParameterRole::Weight, true, "a float Constant node of more than 16 elements")
        };
        let Some(ordinal) = ordinal(proto).filter(|ordinal| ordinals.insert(*ordinal)) else { continue };
        let name = function_tensors.get(&ordinal).map_or(name, String::as_str).to_owned();
        parameters.push((ModelParameter { name, shape: ty.shape, stored: ty.dtype, role, trainable, reason }, ordinal));
    }
    if let Some(sparse) = graph
        .graphs()
        .into_iter()
        .flat_map(|g| &g.sparse_initializer)
        .find_map(|s| s.values.as_ref().filter(|v| uses.by_name.contains_key(v.name.as_str())))
    {
        let source = TensorError::DType("sparse".to_owned());
        return Err(ImportError::Tensor { name: sparse.name.clone(), source });
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

struct Uses<'a> {
    by_name: HashMap<&'a str, Vec<Position>>,
    /// Values that are running statistics, or views of them.
    statistics: HashSet<&'a str>,
}

impl<'a> Uses<'a> {
    fn new(graph: &'a GraphProto, outputs: &'a [ModelOutput]) -> Self {
        let mut uses = Uses { by_name: HashMap::new(), statistics: HashSet::new() };
        let bodies = graph.graphs().into_iter().skip(1).flat_map(|body| &body.output).map(|o| &o.name);
        for output in outputs.iter().map(|o| &o.name).chain(bodies) {
            uses.by_name.entry(output).or_default().push(Position::Data);
        }
        for node in graph.nodes().into_iter().rev() {
            let row = ops::find(canonical_domain(&node.domain), &node.op_type);
            let statics = row.map_or(&[][..], |row| row.statics);
            // No gradient passes a comparison.
            let compares = row.is_some_and(|row| matches!(row.rule, Rule::Compare(_)));
            for (i, name) in node.input.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let position = if compares || statics.contains(&i) { Position::Static } else { Position::Data };
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
pub(crate) fn warnings(parameters: &[(ModelParameter, u64)], inputs: &[ModelInput]) -> Vec<Warning> {
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
