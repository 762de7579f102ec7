//! [`Model`]: a checked ONNX model whose sizes may still be symbolic.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, tensor_shape_proto};
use meganeura_ir::{DType, ParameterRole, Shape, Tensor};
use prost::Message;

use crate::artifact::{self, Artifact};
use crate::check;
use crate::error::{ImportError, UnsupportedOp, Warning, qualified};
use crate::ops;
use crate::roles;
use crate::specialize::Bindings;
use crate::tensor::{self, Bytes, Storage, TensorError};
use crate::wire;

/// The newest opset and IR version whose operators this crate was written against.
const NEWEST_OPSET: i64 = 27;
const NEWEST_IR_VERSION: i64 = 13;

/// What to import.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Keep only these outputs, in this order, and what they need.
    pub outputs: Option<Vec<String>>,
}

/// A size of an input or output.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dim {
    Fixed(usize),
    /// Bound by [`Bindings`](crate::Bindings). A size without a name in the file is called `input.axis`.
    Symbol(String),
}

impl std::fmt::Display for Dim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Symbol(name) => f.write_str(name),
        }
    }
}

/// A tensor that the caller supplies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInput {
    pub name: String,
    /// The dtype in the file. Floats enter the graph as f32.
    pub dtype: DType,
    pub dims: Vec<Dim>,
    /// False if the file does not say how many axes the input has; `dims` is empty then.
    pub ranked: bool,
}

/// A result of the model, as the file declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelOutput {
    pub name: String,
    /// Absent if not declared or no tensor of numbers.
    pub dtype: Option<DType>,
    /// Absent if not declared.
    pub dims: Option<Vec<Dim>>,
}

/// A weight or a statistic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelParameter {
    /// The name in the file.
    pub name: String,
    pub shape: Shape,
    /// The dtype in the file, which exports keep. The graph computes in f32.
    pub stored: DType,
    pub role: ParameterRole,
    pub trainable: bool,
    /// Why it is trainable, or why not.
    pub reason: &'static str,
}

/// Where the data of a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParameterSource {
    Initializer(usize),
    /// The tensor attribute of a Constant node.
    Constant {
        node: usize,
        attribute: usize,
    },
}

/// Versions of the operator sets that a model imports, by domain; the standard domain is the empty one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opsets(BTreeMap<String, i64>);

impl Opsets {
    pub fn new(proto: &ModelProto) -> Self {
        Opsets(proto.opset_import.iter().map(|o| (canonical_domain(&o.domain).to_owned(), o.version)).collect())
    }

    pub fn into_inner(self) -> BTreeMap<String, i64> {
        self.0
    }

    pub fn get(&self, domain: &str) -> Option<i64> {
        self.0.get(canonical_domain(domain)).copied()
    }
}

/// The standard domain has two spellings.
pub(crate) fn canonical_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// A checked model: inputs, outputs and parameters under their names in the file, and every operator known.
///
/// Weights stay in the mapped file until [`Model::weight`] reads them.
#[derive(Debug)]
pub struct Model {
    pub(crate) storage: Storage,
    artifact: Option<Artifact>,
    /// The serialised model with locators instead of raw data; see [`wire::skeleton`].
    pub(crate) skeleton: Vec<u8>,
    pub(crate) graph: GraphProto,
    producer: String,
    pub(crate) opsets: Opsets,
    /// Nodes that the kept outputs need, in order.
    pub(crate) live: Vec<usize>,
    inputs: Vec<ModelInput>,
    outputs: Vec<ModelOutput>,
    parameters: Vec<ModelParameter>,
    sources: Vec<ParameterSource>,
    by_name: HashMap<String, usize>,
    kept_outputs: Option<Vec<String>>,
    bindings: Bindings,
    source: Option<String>,
    op_counts: BTreeMap<String, usize>,
    warnings: Vec<Warning>,
}

impl Model {
    /// Opens an `.onnx` file, or an artifact that [`write_artifact`](crate::write_artifact) wrote: the content decides which.
    ///
    /// # Errors
    /// If the file cannot be read, is malformed, breaks the rules of the ONNX standard, or uses operators without a rule here:
    /// [`ImportError::UnsupportedOps`] lists all of them.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, ImportError> {
        Self::open_with(path, &ImportOptions::default())
    }

    /// As [`Model::open`], for some of the outputs.
    ///
    /// # Errors
    /// As [`Model::open`]; [`ImportError::UnknownOutput`] if the model lacks a requested one.
    pub fn open_with(path: impl AsRef<Path>, options: &ImportOptions) -> Result<Model, ImportError> {
        let path = path.as_ref();
        let io = |source| ImportError::Io { path: path.to_owned(), source };
        if std::fs::metadata(path).map_err(io)?.len() == 0 {
            return Err(ImportError::Empty);
        }
        let map = tensor::map_file(path).map_err(io)?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        if artifact::is_safetensors(&map) {
            let (artifact, structure) = Artifact::open(map)?;
            let options = ImportOptions { outputs: options.outputs.clone().or_else(|| artifact.outputs.clone()) };
            let source = artifact.source.clone();
            return Self::build(Storage::new(Bytes::Owned(structure), folder), Some(artifact), source, &options);
        }
        let source = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Self::build(Storage::new(Bytes::Mapped(map), folder), None, source, options)
    }

    /// As [`Model::open_with`], for the bytes of an `.onnx` file without external data.
    ///
    /// # Errors
    /// As [`Model::open_with`].
    pub fn from_onnx(bytes: Vec<u8>, options: &ImportOptions) -> Result<Model, ImportError> {
        if bytes.is_empty() {
            return Err(ImportError::Empty);
        }
        Self::build(Storage::new(Bytes::Owned(bytes), PathBuf::from(".")), None, None, options)
    }

    fn build(
        storage: Storage,
        artifact: Option<Artifact>,
        source: Option<String>,
        options: &ImportOptions,
    ) -> Result<Model, ImportError> {
        let skeleton = wire::skeleton(storage.main.as_slice())?;
        let mut proto = ModelProto::decode(skeleton.as_slice())?;
        let graph = proto.graph.take().ok_or(ImportError::NoGraph)?;
        let opsets = Opsets::new(&proto);
        let mut warnings = check_versions(&proto, &opsets)?;
        check::structure(&graph)?;

        let outputs = select_outputs(&graph, options.outputs.as_deref())?;
        let live = live_nodes(&graph, outputs.iter().map(|o| o.name.as_str()));
        let unsupported = unsupported_ops(&graph, &live, &opsets);
        if !unsupported.is_empty() {
            return Err(ImportError::UnsupportedOps(unsupported));
        }
        let mut op_counts = BTreeMap::new();
        for &n in &live {
            *op_counts.entry(qualified(canonical_domain(&graph.node[n].domain), &graph.node[n].op_type)).or_insert(0) += 1;
        }

        let classified = roles::classify(&graph, &live, &outputs)?;
        let inputs = model_inputs(&graph, &live, &outputs, options.outputs.is_some())?;
        warnings.extend(roles::warnings(&classified, &inputs));
        let by_name = classified.iter().enumerate().map(|(i, (p, _))| (p.name.clone(), i)).collect();
        let (parameters, sources) = classified.into_iter().unzip();
        let producer = format!("{} {}", proto.producer_name, proto.producer_version).trim().to_owned();
        let bindings = artifact.as_ref().map(|a| a.bindings.clone()).unwrap_or_default();
        Ok(Model {
            storage,
            artifact,
            skeleton,
            graph,
            producer,
            opsets,
            live,
            inputs,
            outputs,
            parameters,
            sources,
            by_name,
            kept_outputs: options.outputs.clone(),
            bindings,
            source,
            op_counts,
            warnings,
        })
    }

    /// What the caller supplies. Initializers that are also listed as inputs are parameters and not here.
    pub fn inputs(&self) -> &[ModelInput] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[ModelOutput] {
        &self.outputs
    }

    /// Every parameter that the kept outputs need, in file order: the order of ids in every specialisation.
    pub fn parameters(&self) -> &[ModelParameter] {
        &self.parameters
    }

    pub fn parameter(&self, name: &str) -> Option<&ModelParameter> {
        self.by_name.get(name).map(|&i| &self.parameters[i])
    }

    /// Nodes by operator, e.g. `Conv` or `com.microsoft::FusedMatMul`.
    pub fn op_counts(&self) -> &BTreeMap<String, usize> {
        &self.op_counts
    }

    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The program that wrote the model, with its version.
    pub fn producer(&self) -> &str {
        &self.producer
    }

    /// The outputs that the import was restricted to.
    pub fn kept_outputs(&self) -> Option<&[String]> {
        self.kept_outputs.as_deref()
    }

    /// The name of the file that was imported, also where the model came from an artifact of it.
    pub fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// Sizes that [`Model::specialize`] uses where it is given none. An artifact keeps them.
    pub fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    pub fn set_bindings(&mut self, bindings: Bindings) {
        self.bindings = bindings;
    }

    /// The value of a parameter in the file, in the dtype of the file.
    ///
    /// # Errors
    /// If the model has no such parameter, or if its data is damaged, missing, or outside the model's folder.
    pub fn weight(&self, name: &str) -> Result<Tensor, ImportError> {
        let index = *self.by_name.get(name).ok_or_else(|| ImportError::UnknownParameter(name.to_owned()))?;
        let read = match &self.artifact {
            Some(artifact) => artifact.read(name, &self.parameters[index]),
            None => self.parameter_proto(index).ok_or(TensorError::OutOfFile).and_then(|proto| self.storage.read(proto)),
        };
        read.map_err(|source| ImportError::Tensor { name: name.to_owned(), source })
    }

    fn parameter_proto(&self, index: usize) -> Option<&TensorProto> {
        match self.sources[index] {
            ParameterSource::Initializer(i) => self.graph.initializer.get(i),
            ParameterSource::Constant { node, attribute } => self.graph.node.get(node)?.attribute.get(attribute)?.t.as_ref(),
        }
    }

    /// Groups of parameters with equal type and content, of more than one axis: copies of one weight that the exporter made, or
    /// weights that were initialised alike. Reads every weight.
    ///
    /// # Errors
    /// As [`Model::weight`].
    pub fn tied_copies(&self) -> Result<Vec<Vec<String>>, ImportError> {
        let mut groups: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
        for (i, p) in self.parameters.iter().enumerate() {
            if p.shape.rank() > 1 {
                groups.entry((p.shape.numel(), hash(&self.weight(&p.name)?))).or_default().push(i);
            }
        }
        let mut tied: Vec<Vec<usize>> = groups.into_values().filter(|g| g.len() > 1).collect();
        tied.sort();
        Ok(tied.into_iter().map(|g| g.into_iter().map(|i| self.parameters[i].name.clone()).collect()).collect())
    }
}

fn hash(tensor: &Tensor) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    tensor.hash(&mut hasher);
    hasher.finish()
}

fn check_versions(proto: &ModelProto, opsets: &Opsets) -> Result<Vec<Warning>, ImportError> {
    let mut warnings = Vec::new();
    if proto.opset_import.is_empty() {
        return Err(ImportError::NoOpset);
    }
    match opsets.get("") {
        Some(found) if found < 7 => return Err(ImportError::Opset(found)),
        Some(found) if found > NEWEST_OPSET => warnings.push(Warning::Opset { found, newest: NEWEST_OPSET }),
        _ => {}
    }
    match proto.ir_version {
        found if found < 3 => return Err(ImportError::IrVersion(found)),
        found if found > NEWEST_IR_VERSION => warnings.push(Warning::IrVersion(found)),
        _ => {}
    }
    Ok(warnings)
}

/// A node in messages: its name, or what it computes.
pub(crate) fn node_label(node: &NodeProto) -> String {
    match (node.name.as_str(), node.output.iter().find(|o| !o.is_empty())) {
        ("", Some(output)) => format!("that computes {output:?}"),
        (name, _) => format!("{name:?}"),
    }
}

fn select_outputs(graph: &GraphProto, wanted: Option<&[String]>) -> Result<Vec<ModelOutput>, ImportError> {
    let declared: Vec<ModelOutput> = graph.output.iter().map(model_output).collect();
    let Some(wanted) = wanted else {
        return Ok(declared);
    };
    let mut selected: Vec<ModelOutput> = Vec::new();
    for name in wanted {
        let output = declared.iter().find(|o| o.name == *name).ok_or_else(|| ImportError::UnknownOutput {
            name: name.clone(),
            known: declared.iter().map(|o| o.name.clone()).collect(),
        })?;
        if !selected.contains(output) {
            selected.push(output.clone());
        }
    }
    Ok(selected)
}

fn live_nodes<'a>(graph: &'a GraphProto, outputs: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let mut needed: HashSet<&str> = outputs.collect();
    let mut live = Vec::new();
    for (index, node) in graph.node.iter().enumerate().rev() {
        if node.output.iter().any(|o| needed.contains(o.as_str())) {
            needed.extend(node.input.iter().filter(|i| !i.is_empty()).map(String::as_str));
            live.push(index);
        }
    }
    live.reverse();
    live
}

fn unsupported_ops(graph: &GraphProto, live: &[usize], opsets: &Opsets) -> Vec<UnsupportedOp> {
    let mut found: BTreeMap<(&str, &str), UnsupportedOp> = BTreeMap::new();
    for &n in live {
        let node = &graph.node[n];
        let domain = canonical_domain(&node.domain);
        let opset = opsets.get(domain);
        if opset.is_some() && ops::find(domain, &node.op_type).is_some() {
            continue;
        }
        let entry = found.entry((domain, &node.op_type)).or_insert_with(|| UnsupportedOp {
            domain: domain.to_owned(),
            op: node.op_type.clone(),
            opset,
            node: node_label(node),
            count: 0,
        });
        entry.count += 1;
    }
    found.into_values().collect()
}

/// `only_needed`: inputs that nothing reads are left out.
fn model_inputs(
    graph: &GraphProto,
    live: &[usize],
    outputs: &[ModelOutput],
    only_needed: bool,
) -> Result<Vec<ModelInput>, ImportError> {
    let initializers: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let mut needed: HashSet<&str> = outputs.iter().map(|o| o.name.as_str()).collect();
    needed.extend(live.iter().flat_map(|&n| &graph.node[n].input).map(String::as_str));
    let supplied = graph.input.iter().filter(|i| !initializers.contains(i.name.as_str()));
    supplied.filter(|i| !only_needed || needed.contains(i.name.as_str())).map(model_input).collect()
}

fn model_input(info: &ValueInfoProto) -> Result<ModelInput, ImportError> {
    let refuse = |found: String| ImportError::InputType { name: info.name.clone(), found };
    let Some(TypeValue::TensorType(ty)) = info.r#type.as_ref().and_then(|t| t.value.as_ref()) else {
        return Err(refuse("no tensor".to_owned()));
    };
    let dtype = tensor::dtype(ty.elem_type).map_err(|e| refuse(format!("a tensor whose {e}")))?;
    let dims = info.r#type.as_ref().and_then(|t| declared_dims(&info.name, t));
    Ok(ModelInput { name: info.name.clone(), dtype, ranked: dims.is_some(), dims: dims.unwrap_or_default() })
}

fn model_output(info: &ValueInfoProto) -> ModelOutput {
    let (dtype, dims) = info.r#type.as_ref().map_or((None, None), |t| (declared_dtype(t), declared_dims(&info.name, t)));
    ModelOutput { name: info.name.clone(), dtype, dims }
}

pub(crate) fn declared_dtype(ty: &TypeProto) -> Option<DType> {
    let TypeValue::TensorType(tensor) = ty.value.as_ref()? else { return None };
    tensor::dtype(tensor.elem_type).ok()
}

/// The declared sizes of the value `name`; unnamed ones are called `name.axis`.
pub(crate) fn declared_dims(name: &str, ty: &TypeProto) -> Option<Vec<Dim>> {
    use tensor_shape_proto::dimension::Value;
    let TypeValue::TensorType(tensor) = ty.value.as_ref()? else { return None };
    let dims = &tensor.shape.as_ref()?.dim;
    Some(
        dims.iter()
            .enumerate()
            .map(|(axis, dim)| match &dim.value {
                Some(Value::DimValue(size)) if *size >= 0 => Dim::Fixed(*size as usize),
                // Exporters write `?` for sizes that need not be equal.
                Some(Value::DimParam(symbol)) if !symbol.is_empty() && symbol != "?" => Dim::Symbol(symbol.clone()),
                _ => Dim::Symbol(format!("{name}.{axis}")),
            })
            .collect(),
    )
}
