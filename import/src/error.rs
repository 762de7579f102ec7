//! Errors and warnings of the import.

use std::fmt;
use std::io;
use std::path::PathBuf;

use meganeura_ir::{DType, GraphError, NodeId, TensorType};

pub use crate::check::AttributeError;
use crate::head::HeadError;
use crate::limits::LimitError;
use crate::tensor::TensorError;
use crate::wire::WireError;

/// Why a model cannot be imported, specialised, or written.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("the file cannot be read: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("the file is empty")]
    Empty,
    #[error("it is no regular file")]
    NoFile,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the file is no ONNX model: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error("the model has no graph: the file is truncated or no ONNX model")]
    NoGraph,
    #[error("ONNX IR version {0} is not supported: 3 and newer are")]
    IrVersion(i64),
    #[error("the model imports no operator set: the file is truncated or no ONNX model")]
    NoOpset,
    #[error("opset {0} is not supported: 6 and newer are. Convert the model with onnx.version_converter, or export it again")]
    Opset(i64),
    #[error(transparent)]
    Structure(#[from] StructureError),
    #[error("the file is refused: {0}")]
    Limit(#[from] LimitError),
    #[error("the model has no output {name:?}; its outputs are {}", list(.known))]
    UnknownOutput { name: String, known: Vec<String> },
    #[error("{} not supported:{}", counted(.0.len(), "operator is", "operators are"), lines(.0))]
    UnsupportedOps(Vec<UnsupportedOp>),
    #[error("tensor {name:?}: {source}")]
    Tensor { name: String, source: TensorError },
    #[error("the quantised weight {name:?} does not dequantise: {reason}")]
    Dequantize { name: String, reason: String },
    #[error("input {name:?} is {found}: only tensors of numbers and booleans can be inputs")]
    InputType { name: String, found: String },
    #[error("the model has no parameter {0:?}")]
    UnknownParameter(String),
    #[error(transparent)]
    Binding(#[from] BindingError),
    #[error("node {node}: {source}")]
    Node { node: Box<NodeName>, source: Box<OpError> },
    #[error("output {name:?} is {found}: only tensors can be outputs")]
    OutputType { name: String, found: String },
    #[error("node {node}: the values of {} {} decide {what}{}; run the model on data, or bind the values", if inputs.len() == 1 { "input" } else { "inputs" }, list(inputs), chain(path))]
    ValuesNeeded {
        node: Box<NodeName>,
        /// What must be known: a shape, a condition.
        what: &'static str,
        inputs: Vec<String>,
        /// Values on the way from one of the inputs to what must be known.
        path: Vec<String>,
    },
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error("a constant that output {output:?} needs holds {value}, outside the 32-bit range of {dtype} on devices")]
    IntegerRange { output: String, value: i64, dtype: DType },
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Head(#[from] HeadError),
}

impl ImportError {
    /// The error of a node in a body of the node `outer`.
    pub(crate) fn inside(mut self, outer: &str) -> Self {
        if let ImportError::Node { node, .. } | ImportError::ValuesNeeded { node, .. } = &mut self {
            node.name = format!("{} in {outer}", node.name);
        }
        self
    }
}

/// A graph that breaks a rule of the ONNX standard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    #[error("the value {name:?} is defined twice: the second time by {by}")]
    Duplicate { name: String, by: String },
    #[error("the value {name:?} of an enclosing graph is defined again by {by}")]
    Shadowed { name: String, by: String },
    #[error("{user} reads {name:?}, which only a later node defines: the nodes are not in topological order")]
    Order { name: String, user: String },
    #[error("{user} reads {name:?}, which depends on that node itself: the graph has a cycle")]
    Cycle { name: String, user: String },
    #[error("{user} reads {name:?}, which nothing defines")]
    Undefined { name: String, user: String },
    #[error("an initializer has no name")]
    UnnamedInitializer,
    #[error("a graph input has no name")]
    UnnamedInput,
    #[error("a graph output has no name")]
    UnnamedOutput,
    #[error("a model-local function has no name")]
    UnnamedFunction,
    #[error("node {node} names no operator")]
    NoOperator { node: String },
    #[error("node {node}: {source}")]
    Attribute { node: Box<NodeName>, source: AttributeError },
    #[error("the model-local function {name:?} is defined twice")]
    DuplicateFunction { name: String },
    #[error("model-local functions call each other without end: {}", .path.join(" calls "))]
    Recursion { path: Vec<String> },
    #[error("node {node} does not fit the function {function} that it calls: {reason}")]
    Call { node: String, function: String, reason: &'static str },
    #[error("node {node} takes attribute {attribute:?} from {found}: {reason}")]
    AttributeReference { node: String, attribute: String, found: String, reason: &'static str },
    #[error("graphs and function calls are nested more than {0} deep")]
    Nesting(usize),
    #[error("the functions of the model expand to more than {0} bytes")]
    Expansion(usize),
    #[error("the operator set {domain:?} is imported in version {first} and in version {second}")]
    OpsetTwice { domain: String, first: i64, second: i64 },
    #[error("the operator set {domain:?} is imported in version {version}: versions begin at 1")]
    OpsetVersion { domain: String, version: i64 },
    #[error("the model is refused: {0}")]
    Limit(#[from] LimitError),
}

/// An operator that the import has no rule for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedOp {
    /// Empty for the standard operators.
    pub domain: String,
    pub op: String,
    /// Version of the operator set that the model imports; `None` where it imports none of that domain.
    pub opset: Option<i64>,
    /// The first node that uses it: its name, or what it computes.
    pub node: String,
    /// Nodes that use it.
    pub count: usize,
}

impl fmt::Display for UnsupportedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", qualified(&self.domain, &self.op))?;
        match self.opset {
            Some(opset) => write!(f, " (opset {opset})")?,
            None => write!(f, " (its domain is not imported)")?,
        }
        write!(f, ", {}, first {}", counted(self.count, "node", "nodes"), self.node)
    }
}

/// Sizes that do not fit the model's inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindingError {
    #[error("sizes are missing: {}. Give each as --dim NAME=N, or the shape of the input", list(.0))]
    Missing(Vec<MissingDim>),
    #[error("the shape of input {input:?} is not in the file: give it")]
    MissingShape { input: String },
    #[error("the model has no symbolic size {name:?}; it has {}", list(.known))]
    UnknownDim { name: String, known: Vec<String> },
    #[error("the model has no input {name:?}; its inputs are {}", list(.known))]
    UnknownInput { name: String, known: Vec<String> },
    #[error("input {input:?} has rank {expected}, the given shape {found:?} has not")]
    Rank { input: String, expected: usize, found: Vec<usize> },
    #[error("input {input:?} is bound to a value of type {found}, which is not its type")]
    Value { input: String, found: TensorType },
    #[error("size {name:?} is bound to {first} and to {second}")]
    Contradiction { name: String, first: usize, second: usize },
    #[error("no size makes {text:?} equal to {size}{}", given(.known))]
    Expression { text: String, size: usize, known: Vec<String> },
    #[error("the size {text:?} is negative, no integer, or too large for the sizes that are given")]
    NoSize { text: String },
}

fn given(known: &[String]) -> String {
    if known.is_empty() { String::new() } else { format!(" where {}", list(known)) }
}

/// A symbolic size without a value, and where it occurs first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingDim {
    pub name: String,
    pub input: String,
    pub axis: usize,
}

impl fmt::Display for MissingDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (axis {} of input {})", self.name, self.axis, self.input)
    }
}

/// The node at which a specialisation failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeName {
    pub name: String,
    /// Operator with its domain, e.g. `Conv` or `com.microsoft::FusedMatMul`.
    pub op: String,
    pub opset: i64,
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, opset {})", self.name, self.op, self.opset)
    }
}

/// Why one node cannot be expressed in the graph.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("it has {found} inputs, {expected} are allowed")]
    InputCount { found: usize, expected: String },
    #[error("input {0} is missing")]
    MissingInput(usize),
    #[error("attribute {0:?} is missing")]
    MissingAttribute(&'static str),
    #[error("attribute {name:?} is no {expected}")]
    AttributeType { name: String, expected: &'static str },
    #[error("attribute {name} = {value} is not allowed: {reason}")]
    Attribute { name: &'static str, value: String, reason: &'static str },
    #[error("input {index} must be known when the graph is built, but it depends on what the model is run on")]
    NotStatic { index: usize },
    #[error("{what} must be known when the graph is built, but it depends on what the model is run on")]
    Undecided { what: &'static str, value: NodeId },
    #[error("input {index} is {found}: {reason}")]
    Value { index: usize, found: String, reason: &'static str },
    #[error("the body has {found} {what}, {expected} are needed")]
    Body { what: &'static str, found: usize, expected: String },
    #[error("{what} are limited to {limit}")]
    Limit { what: &'static str, limit: usize },
    /// In the body of the node.
    #[error(transparent)]
    Inner(Box<ImportError>),
    #[error("axis {axis} of a tensor of rank {rank}")]
    Axis { axis: i64, rank: usize },
    #[error("axis {0} is given twice")]
    RepeatedAxis(usize),
    #[error("{a} and {b} do not broadcast")]
    Broadcast { a: TensorType, b: TensorType },
    #[error("input {index} is {found}: {reason}")]
    Operand { index: usize, found: TensorType, reason: &'static str },
    #[error("{found} does not reshape to {target:?}")]
    Reshape { found: TensorType, target: Vec<i64> },
    #[error("index {index} of an axis of {size}")]
    Index { index: i64, size: usize },
    #[error("{what} is not supported")]
    Unsupported { what: String },
}

impl OpError {
    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        OpError::Unsupported { what: what.into() }
    }
}

/// Why an artifact or an ONNX file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("the safetensors file is malformed: {0}")]
    Malformed(#[from] safetensors::SafeTensorError),
    #[error("the safetensors file holds weights without a model: open the .onnx file, or a file that `import` wrote")]
    NoStructure,
    #[error("the artifact has format {found}; this program reads format {expected}")]
    Format { found: String, expected: &'static str },
    #[error("the model structure in the artifact is damaged: {0}")]
    Structure(String),
    #[error("the model structure takes {found} bytes in the header, {limit} are allowed: too much data is in constants")]
    HeaderTooLarge { found: usize, limit: usize },
    #[error("a safetensors file cannot hold a tensor named {0:?}")]
    ReservedName(String),
    #[error("a tensor named {0:?} cannot be attached: it is a parameter of the model, or holds no floats")]
    Attachment(String),
    #[error("weight {name:?} is {found}, the model has {expected}")]
    WeightType { name: String, found: TensorType, expected: TensorType },
    #[error("the ONNX file would take {0} bytes; protobuf allows 2 GiB. Write safetensors instead")]
    TooLarge(u64),
    #[error("weight {0:?} is quantised in the ONNX file and was dequantised at import: write safetensors instead")]
    Dequantized(String),
    #[error("writing failed: {0}")]
    Write(#[from] io::Error),
}

/// Something that is worth knowing about an imported model and does not stop it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Warning {
    IrVersion(i64),
    Opset {
        found: i64,
        newest: i64,
    },
    /// The exporter dropped the original names of these weights.
    RenamedWeights {
        count: usize,
        example: String,
    },
    /// Weight names show that the exporter merged batch normalisation into convolutions.
    FoldedBatchNorm {
        count: usize,
    },
    /// Two tensors of the original model were equal when it was exported, and the exporter stored one.
    MergedTensors {
        kept: String,
        lost: String,
    },
    /// Float tensors whose content shows that they are no weights.
    Buffers {
        count: usize,
        example: String,
    },
    /// An input without elements: some exporters write 0 for a size that is not known.
    ZeroSize {
        input: String,
    },
    /// Weights, inputs or constants of 64-bit floats: computed in f32.
    ReducedPrecision {
        count: usize,
        example: String,
    },
    /// The file declares another type than its nodes give.
    DeclaredType {
        value: String,
        declared: String,
        found: String,
    },
    /// An input is specialised to sizes other than the declared ones.
    OverriddenShape {
        input: String,
        declared: String,
        found: Vec<usize>,
    },
    IgnoredAttribute {
        node: String,
        op: String,
        attribute: String,
    },
    /// Layers act in training or in inference against what the file says.
    Phase {
        layers: &'static str,
        trains: bool,
    },
    /// Something in a node that is not what the standard says, and was understood anyway.
    Node {
        node: String,
        op: String,
        what: &'static str,
    },
}

/// How torch's two exporters leave a model as it is.
const KEEP_AS_IS: &str = "To keep the model as it is, export again with torch.onnx.export(..., dynamo=True, optimize=False), or \
                          with dynamo=False, do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE";

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::IrVersion(found) => write!(f, "ONNX IR version {found} is newer than this program"),
            Warning::Opset { found, newest } => {
                write!(f, "opset {found} is newer than {newest}, the newest that this program knows: operators may have changed")
            }
            Warning::RenamedWeights { count, example } => {
                let weights = counted(*count, "weight", "weights");
                write!(f, "{weights} lost the original name in the export, e.g. {example}. {KEEP_AS_IS}")
            }
            Warning::FoldedBatchNorm { count } => {
                let convolutions = counted(*count, "convolution", "convolutions");
                write!(
                    f,
                    "the exporter merged batch normalisation into {convolutions}: training will run without normalisation. "
                )?;
                f.write_str(KEEP_AS_IS)
            }
            Warning::MergedTensors { kept, lost } => {
                write!(
                    f,
                    "the exporter stored {kept} for {lost} too, as both were equal: they stay one tensor. To keep them apart, \
                     export again with torch.onnx.export(..., keep_initializers_as_inputs=True), or with dynamo=True"
                )
            }
            Warning::Buffers { count, example } => {
                let tensors = counted(*count, "float tensor is no weight", "float tensors are no weights");
                write!(f, "{tensors} by the content and will not train, e.g. {example}")
            }
            Warning::ZeroSize { input } => {
                write!(f, "input {input} has an axis of size 0: if any size is meant, give the shape, --input {input}=SHAPE")
            }
            Warning::ReducedPrecision { count, example } => {
                write!(f, "{} of f64 will be computed in f32, e.g. {example}", counted(*count, "tensor", "tensors"))
            }
            Warning::DeclaredType { value, declared, found } => {
                write!(f, "{value} is declared {declared} but is {found}")
            }
            Warning::OverriddenShape { input, declared, found } => {
                write!(f, "input {input} is declared {declared}; it is specialised to {found:?}")
            }
            Warning::IgnoredAttribute { node, op, attribute } => {
                write!(f, "attribute {attribute} of {node} ({op}) is unknown and was ignored")
            }
            Warning::Phase { layers, trains } => {
                let phase = |trains| if trains { "training" } else { "inference" };
                write!(f, "{layers} acts as in {}, where the file says {}", phase(*trains), phase(!trains))
            }
            Warning::Node { node, op, what } => write!(f, "{node} ({op}): {what}"),
        }
    }
}

/// `Add`, or `com.microsoft::FusedMatMul`.
pub(crate) fn qualified(domain: &str, op: &str) -> String {
    if domain.is_empty() { op.to_owned() } else { format!("{domain}::{op}") }
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// ` (a → b → c)`, without what lies in the middle of a long way.
fn chain(values: &[String]) -> String {
    let shown = match values {
        [] | [_] => return String::new(),
        [first @ .., _, _] if first.len() > 6 => [&first[..3], &["…".to_owned()], &values[values.len() - 3..]].concat(),
        all => all.to_vec(),
    };
    format!(" ({})", shown.join(" → "))
}

fn lines<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(|item| format!("\n  {item}")).collect()
}
