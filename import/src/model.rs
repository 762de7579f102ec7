//! [`Model`]: a checked ONNX model whose sizes may still be symbolic.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto, TypeProto, ValueInfoProto,
    tensor_shape_proto,
};
use meganeura_ir::{DType, ParameterRole, Shape, Tensor};
use prost::Message;

use crate::artifact::{self, Artifact};
use crate::buffers;
use crate::check::{self, Stored};
use crate::dequantize::{self, Dequantized};
use crate::dims::Expr;
use crate::error::{ImportError, StructureError, UnsupportedOp, Warning, qualified};
use crate::flatten::{Flattened, flatten};
use crate::limits::Limits;
use crate::ops;
use crate::roles::{self, Verdict};
use crate::schema;
use crate::sparse;
use crate::specialize::Bindings;
use crate::tensor::{self, Bytes, Storage};
use crate::wire::{self, Locator};
use crate::write::stored_type;

/// The newest opset and IR version whose operators this crate was written against.
const NEWEST_OPSET: i64 = 27;
const OLDEST_OPSET: i64 = 6;
const NEWEST_IR_VERSION: i64 = 13;
/// The number of `ModelProto.metadata_props`.
const METADATA_FIELD: u64 = 14;

/// What to import.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Keep only these outputs, in this order, and what they need.
    pub outputs: Option<Vec<String>>,
    pub limits: Limits,
    /// The model of real numbers that a quantised one stands for: quantised weights become float parameters, which can train, and
    /// data that is quantised only to be dequantised again stays as it is. Otherwise quantised models run as written.
    pub dequantize: bool,
}

/// A size of an input or output.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dim {
    Fixed(usize),
    /// Bound by [`Bindings`](crate::Bindings): a name, or an expression of names such as `2*s0`. A size without a name in the
    /// file is called `input.axis`.
    Symbol(String),
}

impl Dim {
    /// The size, where `sizes` has a value for every name in it.
    pub fn size(&self, sizes: &BTreeMap<String, usize>) -> Option<usize> {
        match self {
            Dim::Fixed(size) => Some(*size),
            Dim::Symbol(text) => sizes.get(text).copied().or_else(|| Expr::parse(text).size(sizes)),
        }
    }
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

/// Versions of the operator sets that a model imports, by domain; the standard domain is the empty one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opsets(BTreeMap<String, i64>);

impl Opsets {
    /// # Errors
    /// A version below 1, or two versions of one operator set.
    pub fn new(imports: &[OperatorSetIdProto]) -> Result<Self, StructureError> {
        let mut versions = BTreeMap::new();
        for import in imports {
            let (domain, version) = (canonical_domain(&import.domain).to_owned(), import.version);
            if version < 1 {
                return Err(StructureError::OpsetVersion { domain, version });
            }
            let first = *versions.entry(domain.clone()).or_insert(version);
            if first != version {
                return Err(StructureError::OpsetTwice { domain, first, second: version });
            }
        }
        Ok(Opsets(versions))
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
    /// Without functions, and without nodes that the kept outputs do not need.
    pub(crate) graph: GraphProto,
    producer: String,
    metadata: BTreeMap<String, String>,
    inputs: Vec<ModelInput>,
    outputs: Vec<ModelOutput>,
    parameters: Vec<ModelParameter>,
    /// Where the data of each parameter is.
    stored: Vec<TensorProto>,
    /// Values that took the place of the file's, by name.
    replaced: HashMap<String, Tensor>,
    /// Parameters by their ordinal among the tensors of the file.
    by_ordinal: HashMap<u64, usize>,
    by_name: HashMap<String, usize>,
    /// How parameters get their values that the file holds as integers; none if nothing was dequantised.
    dequantized: Option<BTreeMap<String, Dequantized>>,
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
        // Opening a pipe would wait for who writes it.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(ImportError::NoFile);
        }
        let file = File::open(path).map_err(io)?;
        let map = tensor::map_file(&file).map_err(io)?;
        if map.is_empty() {
            return Err(ImportError::Empty);
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        if artifact::is_safetensors(&map) {
            let (artifact, structure) = Artifact::open(map, &options.limits)?;
            let options = ImportOptions {
                outputs: options.outputs.clone().or_else(|| artifact.outputs.clone()),
                dequantize: options.dequantize || artifact.dequantized,
                limits: options.limits.clone(),
            };
            let storage = Storage::new(Bytes::Owned(structure), folder, &options.limits);
            let source = artifact.source.clone();
            return Self::build(storage, Some(artifact), source, &options);
        }
        let source = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Self::build(Storage::new(Bytes::Mapped(map), folder, &options.limits), None, source, options)
    }

    /// As [`Model::open_with`], for the bytes of an `.onnx` file without external data.
    ///
    /// # Errors
    /// As [`Model::open_with`].
    pub fn from_onnx(bytes: Vec<u8>, options: &ImportOptions) -> Result<Model, ImportError> {
        if bytes.is_empty() {
            return Err(ImportError::Empty);
        }
        Self::build(Storage::new(Bytes::Owned(bytes), PathBuf::from("."), &options.limits), None, None, options)
    }

    fn build(
        mut storage: Storage,
        artifact: Option<Artifact>,
        source: Option<String>,
        options: &ImportOptions,
    ) -> Result<Model, ImportError> {
        schema::scan(storage.model(), &options.limits)?;
        let mut skeleton = wire::skeleton(storage.model())?;
        let mut proto = ModelProto::decode(skeleton.as_slice())?;
        let mut graph = proto.graph.take().ok_or(ImportError::NoGraph)?;
        let opsets = Opsets::new(&proto.opset_import)?;
        let mut warnings = check_versions(&proto, &opsets)?;
        check::infer_types(&mut graph.node);
        check::structure(&graph, &proto.functions, &opsets, &options.limits)?;
        if !graph.sparse_initializer.is_empty() {
            sparse::densify(&mut graph, &mut storage, &options.limits)?;
            proto.graph = Some(graph);
            skeleton = proto.encode_to_vec();
            graph = proto.graph.take().unwrap_or_default();
        }
        let Flattened { mut graph, function_tensors } = flatten(graph, &proto.functions, &opsets)?;

        let dequantized = if options.dequantize { dequantize::apply(&mut graph) } else { None };
        let outputs = select_outputs(&graph, options.outputs.as_deref())?;
        prune(&mut graph, &mut outputs.iter().map(|o| o.name.clone()).collect());
        if !unsupported_ops(&graph, Branches::Skip).is_empty() {
            return Err(ImportError::UnsupportedOps(unsupported_ops(&graph, Branches::List)));
        }
        let mut op_counts = BTreeMap::new();
        for node in graph.nodes() {
            *op_counts.entry(qualified(canonical_domain(&node.domain), &node.op_type)).or_insert(0) += 1;
        }

        let judge = |parameter: &ModelParameter, proto: &TensorProto, place: buffers::Place| {
            let ty = stored_type(parameter);
            match artifact.as_ref().and_then(|artifact| artifact.bytes(parameter).ok()) {
                Some(bytes) => buffers::recognise(&ty, bytes, place).map(Verdict::Buffer),
                None => storage.peek(proto, |bytes| buffers::recognise(&ty, bytes, place))?.map(|content| {
                    // Weights of an artifact are not in the structure: a constant must be.
                    let literal = content.is_mask() && roles::has_made_up_name(&parameter.name);
                    if literal { Verdict::Literal } else { Verdict::Buffer(content) }
                }),
            }
        };
        let classified = roles::classify(&graph, &outputs, &function_tensors, &judge)?;
        let inputs = model_inputs(&graph, &outputs, options.outputs.is_some())?;
        warnings.extend(roles::warnings(&graph, &classified, &inputs));
        let by_name = classified.iter().enumerate().map(|(i, (p, _))| (p.name.clone(), i)).collect();
        let by_ordinal = classified.iter().enumerate().map(|(i, (_, ordinal))| (*ordinal, i)).collect();
        let parameters: Vec<ModelParameter> = classified.into_iter().map(|(parameter, _)| parameter).collect();
        let mut stored = vec![TensorProto::default(); parameters.len()];
        take_parameters(&mut graph, &by_ordinal, &mut stored);
        let data = Stored {
            graph: &graph,
            parameters: &parameters,
            stored: &stored,
            dequantized: dequantized.as_ref(),
            storage: &storage,
            artifact: artifact.as_ref(),
        };
        data.check(&read_values(&graph, &outputs))?;
        let producer = format!("{} {}", proto.producer_name, proto.producer_version).trim().to_owned();
        let metadata = proto.metadata_props.into_iter().map(|entry| (entry.key, entry.value)).collect();
        let bindings = artifact.as_ref().map(|a| a.bindings.clone()).unwrap_or_default();
        storage.release();
        Ok(Model {
            storage,
            artifact,
            skeleton,
            graph,
            producer,
            metadata,
            inputs,
            outputs,
            parameters,
            stored,
            replaced: HashMap::new(),
            by_ordinal,
            by_name,
            dequantized,
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

    /// What exporters, and [`Model::set_metadata`], noted about the model.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Notes something about the model in the files that it is written to.
    ///
    /// # Errors
    /// None that is known: the structure was decoded before.
    pub fn set_metadata(&mut self, key: &str, value: &str) -> Result<(), ImportError> {
        let entry = StringStringEntryProto { key: key.to_owned(), value: value.to_owned() };
        let entry = ModelProto { metadata_props: vec![entry], ..ModelProto::default() };
        let mut skeleton = Vec::with_capacity(self.skeleton.len() + key.len() + value.len());
        for field in wire::fields(&self.skeleton, 0..self.skeleton.len()) {
            let field = field?;
            let part = &self.skeleton[field.whole];
            let old = field.number == METADATA_FIELD && ModelProto::decode(part)?.metadata_props.iter().any(|old| old.key == key);
            skeleton.extend(if old { &[] } else { part });
        }
        // To append a message is to merge it.
        skeleton.extend(entry.encode_to_vec());
        self.skeleton = skeleton;
        self.metadata.insert(key.to_owned(), value.to_owned());
        Ok(())
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

    /// What an artifact holds beside the model, as whoever wrote it describes it.
    pub fn attached_description(&self) -> Option<&str> {
        self.artifact.as_ref()?.attachments.as_deref()
    }

    /// A float tensor of an artifact, by its name.
    pub fn attached(&self, name: &str) -> Option<Tensor> {
        self.artifact.as_ref()?.tensor(name)
    }

    /// Parameters that the ONNX file holds as integers or narrow floats.
    pub fn dequantized(&self) -> impl Iterator<Item = &str> {
        let names = self.dequantized.iter().flat_map(BTreeMap::keys).map(String::as_str);
        names.filter(|name| self.by_name.contains_key(*name))
    }

    /// Whether the import undid quantisation.
    pub(crate) fn is_dequantized(&self) -> bool {
        self.dequantized.is_some()
    }

    /// The value of a parameter in the file, in the dtype of the file; of a dequantised one, in f32.
    ///
    /// # Errors
    /// If the model has no such parameter, or if its data is damaged, missing, or outside the model's folder.
    pub fn weight(&self, name: &str) -> Result<Tensor, ImportError> {
        let index = *self.by_name.get(name).ok_or_else(|| ImportError::UnknownParameter(name.to_owned()))?;
        if let Some(tensor) = self.replaced.get(name) {
            return Ok(tensor.clone());
        }
        let stored_as_floats = self.artifact.as_ref().is_some_and(|artifact| artifact.dequantized);
        let recipe = self.dequantized.as_ref().and_then(|recipes| recipes.get(name));
        if let (Some(recipe), false) = (recipe, stored_as_floats) {
            let in_artifact = |name: &str| self.artifact.as_ref().and_then(|artifact| artifact.tensor(name));
            let read = |proto: &TensorProto| in_artifact(&proto.name).map_or_else(|| self.storage.read(proto), Ok);
            return recipe.value(&self.storage, &self.parameters[index].shape, read);
        }
        let read = match &self.artifact {
            Some(artifact) => artifact.read(&self.parameters[index]),
            None => self.storage.read(&self.stored[index]),
        };
        read.map_err(|source| ImportError::Tensor { name: name.to_owned(), source })
    }

    /// The position of a parameter.
    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Gives a parameter another value, and its shape.
    pub(crate) fn replace(&mut self, name: &str, value: Tensor) {
        if let Some(parameter) = self.by_name.get(name).and_then(|&index| self.parameters.get_mut(index)) {
            parameter.shape = value.shape().clone();
            self.replaced.insert(name.to_owned(), value);
        }
    }

    /// Edits the declared sizes of the outputs among `values`.
    pub(crate) fn set_output_classes(&mut self, values: &HashSet<String>, edit: impl Fn(&mut [Dim])) {
        for output in self.outputs.iter_mut().filter(|o| values.contains(&o.name)) {
            output.dims.iter_mut().for_each(|dims| edit(dims));
        }
    }

    /// The parameter whose data is the tensor of this ordinal in the file.
    pub(crate) fn stored_parameter(&self, ordinal: u64) -> Option<&ModelParameter> {
        self.parameters.get(self.parameter_index(ordinal)?)
    }

    /// As [`Model::stored_parameter`], its position among the parameters.
    pub(crate) fn parameter_index(&self, ordinal: u64) -> Option<usize> {
        self.by_ordinal.get(&ordinal).copied()
    }
}

fn check_versions(proto: &ModelProto, opsets: &Opsets) -> Result<Vec<Warning>, ImportError> {
    let mut warnings = Vec::new();
    if proto.opset_import.is_empty() {
        return Err(ImportError::NoOpset);
    }
    check_opset(opsets)?;
    if let Some(found) = opsets.get("").filter(|found| *found > NEWEST_OPSET) {
        warnings.push(Warning::Opset { found, newest: NEWEST_OPSET });
    }
    match proto.ir_version {
        found if found < 3 => return Err(ImportError::IrVersion(found)),
        found if found > NEWEST_IR_VERSION => warnings.push(Warning::IrVersion(found)),
        _ => {}
    }
    Ok(warnings)
}

/// Checks the version of the standard operators, of the model or of a function.
pub(crate) fn check_opset(opsets: &Opsets) -> Result<(), ImportError> {
    match opsets.get("") {
        Some(found) if found < OLDEST_OPSET => Err(ImportError::Opset(found)),
        _ => Ok(()),
    }
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

/// Removes nodes, also those of bodies, on which no needed value depends. `needed` becomes all values that are read.
fn prune(graph: &mut GraphProto, needed: &mut HashSet<String>) {
    let mut kept = Vec::with_capacity(graph.node.len());
    for mut node in std::mem::take(&mut graph.node).into_iter().rev() {
        if !node.output.iter().any(|o| needed.contains(o.as_str())) {
            continue;
        }
        for body in node.attribute.iter_mut().filter_map(|a| a.g.as_mut()) {
            needed.extend(body.output.iter().map(|o| o.name.clone()));
            prune(body, needed);
        }
        needed.extend(node.input.iter().filter(|i| !i.is_empty()).cloned());
        kept.push(node);
    }
    kept.reverse();
    graph.node = kept;
}

/// Whether the branches of `If` count. Which of them runs is known when the model is specialised.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Branches {
    List,
    Skip,
}

/// Operators without a rule here.
pub(crate) fn unsupported_ops(graph: &GraphProto, branches: Branches) -> Vec<UnsupportedOp> {
    fn collect(graph: &GraphProto, branches: Branches, found: &mut BTreeMap<(String, String), UnsupportedOp>) {
        for node in &graph.node {
            let domain = canonical_domain(&node.domain);
            if node.opset.is_none() || ops::find(domain, &node.op_type).is_none() {
                let entry = found.entry((domain.to_owned(), node.op_type.clone())).or_insert_with(|| UnsupportedOp {
                    domain: domain.to_owned(),
                    op: node.op_type.clone(),
                    opset: node.opset,
                    node: node_label(node),
                    count: 0,
                });
                entry.count += 1;
            }
            if branches == Branches::List || node.op_type != "If" {
                node.bodies().for_each(|(_, body)| collect(body, branches, found));
            }
        }
    }
    let mut found = BTreeMap::new();
    collect(graph, branches, &mut found);
    found.into_values().collect()
}

/// Moves the tensors of parameters from the graph to `stored`. A locator stays, by which the parameter is found.
fn take_parameters(graph: &mut GraphProto, by_ordinal: &HashMap<u64, usize>, stored: &mut [TensorProto]) {
    let take = |tensor: &mut TensorProto, stored: &mut [TensorProto]| {
        let ordinal = Locator::from_bytes(&tensor.raw_data).map(|locator| locator.ordinal);
        if let Some(&parameter) = ordinal.and_then(|ordinal| by_ordinal.get(&ordinal)) {
            let (name, raw_data) = (tensor.name.clone(), tensor.raw_data.clone());
            stored[parameter] = std::mem::replace(tensor, TensorProto { name, raw_data, ..TensorProto::default() });
        }
    };
    graph.initializer.iter_mut().for_each(|tensor| take(tensor, stored));
    for attribute in graph.node.iter_mut().flat_map(|n| &mut n.attribute) {
        if let Some(tensor) = &mut attribute.t {
            take(tensor, stored);
        }
        if let Some(body) = &mut attribute.g {
            take_parameters(body, by_ordinal, stored);
        }
    }
}

/// `only_needed`: inputs that nothing reads are left out.
fn model_inputs(graph: &GraphProto, outputs: &[ModelOutput], only_needed: bool) -> Result<Vec<ModelInput>, ImportError> {
    let initializers: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let needed = read_values(graph, outputs);
    let supplied = graph.input.iter().filter(|i| !initializers.contains(i.name.as_str()));
    supplied.filter(|i| !only_needed || needed.contains(i.name.as_str())).map(model_input).collect()
}

/// Values that nodes, bodies or outputs read.
pub(crate) fn read_values<'a>(graph: &'a GraphProto, outputs: &'a [ModelOutput]) -> HashSet<&'a str> {
    let mut read: HashSet<&str> = outputs.iter().map(|o| o.name.as_str()).collect();
    read.extend(graph.nodes().into_iter().flat_map(|n| &n.input).map(String::as_str));
    read.extend(graph.graphs().into_iter().skip(1).flat_map(|body| &body.output).map(|o| o.name.as_str()));
    read
}

fn model_input(info: &ValueInfoProto) -> Result<ModelInput, ImportError> {
    let refuse = |found: String| ImportError::InputType { name: info.name.clone(), found };
    let ty = match info.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        Some(TypeValue::TensorType(ty)) => ty,
        Some(TypeValue::SequenceType(_)) => return Err(refuse("a sequence".to_owned())),
        Some(TypeValue::OptionalType(_)) => return Err(refuse("an optional value".to_owned())),
        Some(TypeValue::MapType(_)) => return Err(refuse("a map".to_owned())),
        Some(TypeValue::SparseTensorType(_)) => return Err(refuse("a sparse tensor".to_owned())),
        None => return Err(refuse("of no declared type".to_owned())),
    };
    let dtype = tensor::held_dtype(ty.elem_type).map_err(|e| refuse(format!("a tensor whose {e}")))?;
    let dims = info.r#type.as_ref().and_then(|t| declared_dims(&info.name, t));
    // Exporters write -1 for a size that they do not know.
    let sizes = ty.shape.iter().flat_map(|s| &s.dim).map(|d| dim_value(d).filter(|&size| size >= 0).unwrap_or(1));
    if ty.shape.iter().flat_map(|s| &s.dim).any(|d| dim_value(d).is_some_and(|size| size < -1)) {
        return Err(refuse("a tensor of negative size".to_owned()));
    }
    tensor::checked_shape(&sizes.collect::<Vec<_>>()).map_err(|e| refuse(e.to_string()))?;
    Ok(ModelInput { name: info.name.clone(), dtype, ranked: dims.is_some(), dims: dims.unwrap_or_default() })
}

fn model_output(info: &ValueInfoProto) -> ModelOutput {
    let (dtype, dims) = info.r#type.as_ref().map_or((None, None), |t| (declared_dtype(t), declared_dims(&info.name, t)));
    ModelOutput { name: info.name.clone(), dtype, dims }
}

fn dim_value(dim: &tensor_shape_proto::Dimension) -> Option<i64> {
    match dim.value {
        Some(tensor_shape_proto::dimension::Value::DimValue(size)) => Some(size),
        _ => None,
    }
}

pub(crate) fn declared_dtype(ty: &TypeProto) -> Option<DType> {
    let TypeValue::TensorType(tensor) = ty.value.as_ref()? else { return None };
    tensor::held_dtype(tensor.elem_type).ok()
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
