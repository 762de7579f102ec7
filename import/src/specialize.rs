//! [`Model::specialize`]: symbolic sizes get values, and the model becomes a typed graph.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::proto::NodeProto;
use meganeura_ir::{DType, Graph, NodeId, Op, ParameterInfo, Shape, Tensor, TensorType, int_range};
use serde::{Deserialize, Serialize};

use crate::context::Context;
use crate::error::{BindingError, ImportError, MissingDim, NodeName, OpError, Warning, qualified};
use crate::fold::Folder;
use crate::model::{Dim, Model, ModelInput, canonical_domain, declared_dims, declared_dtype, node_label};
use crate::ops;
use crate::tensor::arithmetic;

/// Sizes for a specialisation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bindings {
    /// Symbolic sizes by name.
    pub dims: BTreeMap<String, usize>,
    /// Shapes of inputs by name. They bind the symbols in the declared shape, and override its fixed sizes.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Values of inputs that decide shapes, by name, in the dtype of the model. Such an input is a constant of the specialisation.
    #[serde(with = "crate::values")]
    pub values: BTreeMap<String, Tensor>,
}

/// Inputs of at most this many elements are specialised on their values where these decide shapes.
const MAX_BOUND_ELEMENTS: usize = 1 << 12;

/// A model at concrete sizes.
#[derive(Clone, Debug)]
pub struct Specialized {
    /// Inputs and outputs in the order of the model, under their names, without the inputs that are bound to values; parameters as
    /// in [`Model::parameters`], so that ids agree between specialisations. Constants are folded, dead nodes are gone.
    pub graph: Graph,
    /// Value of every symbolic size of the inputs.
    pub dims: BTreeMap<String, usize>,
    pub warnings: Vec<Warning>,
}

impl Model {
    /// Binds symbolic sizes and builds the graph. Floats compute in f32 whatever the file stores; other dtypes are kept.
    ///
    /// # Errors
    /// [`ImportError::Binding`] if sizes are missing (all are named), unknown, or contradict each other; [`ImportError::Node`] if
    /// an operator's operands or attributes do not fit, or ask for what this crate cannot express; [`ImportError::ValuesNeeded`] if
    /// the values of inputs decide a shape.
    pub fn specialize(&self, bindings: &Bindings) -> Result<Specialized, ImportError> {
        let mut warnings = Vec::new();
        let mut bindings = bindings.clone();
        for (name, value) in &self.bindings().values {
            bindings.values.entry(name.clone()).or_insert_with(|| value.clone());
        }
        let resolved = resolve(self.inputs(), &bindings, self.bindings(), &mut warnings)?;
        let mut builder = Builder {
            model: self,
            folder: Folder::default(),
            values: HashMap::new(),
            warnings,
            declared: declared_values(self),
            needed: needed_values(self),
            dims: resolved.dims,
        };
        builder.declare(&resolved.shapes, &bindings.values)?;
        for &n in &self.live {
            let node = &self.graph.node[n];
            if let Err(source) = builder.node(node) {
                return Err(builder.node_error(node, source));
            }
        }
        builder.finish()
    }

    /// As [`Model::specialize`], for data that the model is to run on: inputs take the shapes in `data` unless `bindings` tells
    /// others, and inputs whose values decide shapes are bound to their values. Also returns the bindings with these values; the graph lacks the inputs that they name.
    ///
    /// # Errors
    /// As [`Model::specialize`]; [`ImportError::ValuesNeeded`] only if `data` lacks an input or it is no small tensor.
    pub fn specialize_on(&self, bindings: &Bindings, data: &[(&str, &Tensor)]) -> Result<(Specialized, Bindings), ImportError> {
        let mut bindings = bindings.clone();
        for (name, tensor) in data {
            bindings.shapes.entry((*name).to_owned()).or_insert_with(|| tensor.shape().to_vec());
        }
        let value = |name: &str| data.iter().find(|(n, _)| *n == name).map(|(_, value)| *value);
        for name in self.bindings().values.keys() {
            if let Some(value) = value(name) {
                bindings.values.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        loop {
            let (node, inputs) = match self.specialize(&bindings) {
                Err(ImportError::ValuesNeeded { node, inputs }) => (node, inputs),
                done => return done.map(|specialized| (specialized, bindings)),
            };
            let mut bound = false;
            for name in &inputs {
                if let Some(value) = value(name).filter(|value| value.shape().numel() <= MAX_BOUND_ELEMENTS) {
                    bound |= bindings.values.insert(name.clone(), value.clone()).is_none();
                }
            }
            if !bound {
                return Err(ImportError::ValuesNeeded { node, inputs });
            }
        }
    }
}

struct Resolved {
    dims: BTreeMap<String, usize>,
    /// By input order.
    shapes: Vec<Vec<usize>>,
}

/// `defaults` count where `bindings` leave a size open.
fn resolve(
    inputs: &[ModelInput],
    bindings: &Bindings,
    defaults: &Bindings,
    warnings: &mut Vec<Warning>,
) -> Result<Resolved, BindingError> {
    let names = || inputs.iter().map(|i| i.name.clone()).collect();
    if let Some(name) = bindings.shapes.keys().chain(bindings.values.keys()).find(|name| !inputs.iter().any(|i| i.name == **name))
    {
        return Err(BindingError::UnknownInput { name: name.clone(), known: names() });
    }
    let mut shapes = bindings.shapes.clone();
    for input in inputs {
        let Some(value) = bindings.values.get(&input.name) else { continue };
        let (name, found) = (&input.name, value.ty());
        if found.dtype != input.dtype || shapes.get(name).is_some_and(|shape| *shape != *found.shape) {
            return Err(BindingError::Value { input: name.clone(), found: found.clone() });
        }
        shapes.insert(name.clone(), found.shape.to_vec());
    }
    let symbols = symbols(inputs);
    if let Some(name) = bindings.dims.keys().find(|name| !symbols.iter().any(|s| s.name == **name)) {
        let known = symbols.into_iter().map(|s| s.name).collect();
        return Err(BindingError::UnknownDim { name: name.clone(), known });
    }

    let mut dims = bindings.dims.clone();
    for input in inputs {
        let Some(shape) = shapes.get(&input.name) else { continue };
        if input.ranked && input.dims.len() != shape.len() {
            let (input, expected) = (input.name.clone(), input.dims.len());
            return Err(BindingError::Rank { input, expected, found: shape.clone() });
        }
        for (dim, &size) in input.dims.iter().zip(shape) {
            let Dim::Symbol(name) = dim else { continue };
            let first = *dims.entry(name.clone()).or_insert(size);
            if first != size {
                return Err(BindingError::Contradiction { name: name.clone(), first, second: size });
            }
        }
        if input.dims.iter().zip(shape).any(|(dim, size)| matches!(dim, Dim::Fixed(fixed) if fixed != size)) {
            let declared = shape_text(&input.dims);
            warnings.push(Warning::OverriddenShape { input: input.name.clone(), declared, found: shape.clone() });
        }
    }

    for input in inputs {
        for (dim, &size) in input.dims.iter().zip(defaults.shapes.get(&input.name).into_iter().flatten()) {
            if let Dim::Symbol(name) = dim {
                dims.entry(name.clone()).or_insert(size);
            }
        }
    }
    for symbol in &symbols {
        if let (false, Some(&size)) = (dims.contains_key(&symbol.name), defaults.dims.get(&symbol.name)) {
            dims.insert(symbol.name.clone(), size);
        }
    }
    let missing: Vec<MissingDim> = symbols.into_iter().filter(|s| !dims.contains_key(&s.name)).collect();
    if !missing.is_empty() {
        return Err(BindingError::Missing(missing));
    }
    let shapes = inputs
        .iter()
        .map(|input| match shapes.get(&input.name) {
            Some(shape) => Ok(shape.clone()),
            None if !input.ranked => {
                let shape = defaults.shapes.get(&input.name).cloned();
                shape.ok_or_else(|| BindingError::MissingShape { input: input.name.clone() })
            }
            None => Ok(input.dims.iter().map(|dim| size(dim, &dims).unwrap_or(0)).collect()),
        })
        .collect::<Result<_, _>>()?;
    Ok(Resolved { dims, shapes })
}

/// Every symbolic size, at its first occurrence.
fn symbols(inputs: &[ModelInput]) -> Vec<MissingDim> {
    let mut seen = HashSet::new();
    let mut symbols = Vec::new();
    for input in inputs {
        for (axis, dim) in input.dims.iter().enumerate() {
            if let Dim::Symbol(name) = dim
                && seen.insert(name)
            {
                symbols.push(MissingDim { name: name.clone(), input: input.name.clone(), axis });
            }
        }
    }
    symbols
}

fn size(dim: &Dim, dims: &BTreeMap<String, usize>) -> Option<usize> {
    match dim {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(name) => dims.get(name).copied(),
    }
}

fn shape_text(dims: &[Dim]) -> String {
    format!("[{}]", dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(","))
}

/// What the file says about a value.
struct Declared {
    dtype: Option<DType>,
    dims: Option<Vec<Dim>>,
}

fn declared_values(model: &Model) -> HashMap<&str, Declared> {
    let infos = model.graph.value_info.iter().chain(&model.graph.output);
    infos
        .filter_map(|info| {
            let ty = info.r#type.as_ref()?;
            let declared = Declared { dtype: declared_dtype(ty), dims: declared_dims(&info.name, ty) };
            Some((info.name.as_str(), declared))
        })
        .collect()
}

fn needed_values(model: &Model) -> HashSet<&str> {
    let read = model.live.iter().flat_map(|&n| &model.graph.node[n].input).map(String::as_str);
    model.outputs().iter().map(|o| o.name.as_str()).chain(read).collect()
}

struct Builder<'m> {
    model: &'m Model,
    folder: Folder,
    /// Nodes by ONNX value name.
    values: HashMap<&'m str, NodeId>,
    warnings: Vec<Warning>,
    declared: HashMap<&'m str, Declared>,
    /// Values that live nodes or the outputs read.
    needed: HashSet<&'m str>,
    dims: BTreeMap<String, usize>,
}

impl<'m> Builder<'m> {
    /// Inputs, parameters, and the constants among the initializers.
    fn declare(&mut self, shapes: &[Vec<usize>], values: &BTreeMap<String, Tensor>) -> Result<(), ImportError> {
        for (input, shape) in self.model.inputs().iter().zip(shapes) {
            let dtype = arithmetic(input.dtype);
            let node = match values.get(&input.name) {
                Some(value) => self.folder.constant(value.cast(dtype))?,
                None => self.folder.graph.input(&input.name, TensorType::new(dtype, shape.as_slice()))?,
            };
            self.values.insert(&input.name, node);
        }
        for parameter in self.model.parameters() {
            let node = self.folder.graph.parameter(ParameterInfo {
                name: parameter.name.clone(),
                ty: TensorType::new(arithmetic(parameter.stored), parameter.shape.clone()),
                stored: parameter.stored,
                role: parameter.role,
            })?;
            self.values.insert(&parameter.name, node);
        }
        for proto in &self.model.graph.initializer {
            let name = proto.name.as_str();
            if !self.needed.contains(name) || self.values.contains_key(name) {
                continue;
            }
            let error = |source| ImportError::Tensor { name: name.to_owned(), source };
            let tensor = self.model.storage.read(proto).map_err(error)?;
            let node = self.folder.constant(tensor.cast(arithmetic(tensor.dtype())))?;
            self.values.insert(name, node);
        }
        Ok(())
    }

    fn name(&self, node: &NodeProto) -> NodeName {
        let domain = canonical_domain(&node.domain);
        NodeName {
            name: node_label(node),
            op: qualified(domain, &node.op_type),
            opset: self.model.opsets.get(domain).unwrap_or_default(),
        }
    }

    /// An error at `node`. Where a value should be known and is not, the inputs that it depends on are to blame.
    fn node_error(&self, node: &NodeProto, source: OpError) -> ImportError {
        let name = Box::new(self.name(node));
        if let OpError::NotStatic { index } = source
            && let Some(&operand) = node.input.get(index).and_then(|name| self.values.get(name.as_str()))
        {
            let inputs = self.inputs_of(operand);
            if !inputs.is_empty() {
                return ImportError::ValuesNeeded { node: name, inputs };
            }
        }
        ImportError::Node { node: name, source: Box::new(source) }
    }

    /// Names of the inputs whose values `node` depends on.
    fn inputs_of(&self, node: NodeId) -> Vec<String> {
        let graph = &self.folder.graph;
        let mut reached = vec![false; graph.nodes().len()];
        reached[node.index()] = true;
        let mut inputs = Vec::new();
        for id in graph.ids().rev() {
            match &graph.node(id).op {
                _ if !reached[id.index()] => {}
                Op::Input(input) => inputs.push(graph.inputs()[input.0 as usize].name.clone()),
                _ => graph.node(id).operands.iter().for_each(|o| reached[o.index()] = true),
            }
        }
        inputs.reverse();
        inputs
    }

    fn node(&mut self, node: &'m NodeProto) -> Result<(), OpError> {
        // A Constant node that is a parameter has its value already.
        if node.op_type == "Constant" && node.output.first().is_some_and(|o| self.values.contains_key(o.as_str())) {
            return Ok(());
        }
        let domain = canonical_domain(&node.domain);
        let row = ops::find(domain, &node.op_type).ok_or_else(|| OpError::unsupported("the operator"))?;
        let mut inputs = Vec::with_capacity(node.input.len());
        for (index, name) in node.input.iter().enumerate() {
            inputs.push(match name.as_str() {
                "" => None,
                name => Some(*self.values.get(name).ok_or(OpError::MissingInput(index))?),
            });
        }
        let opset = self.model.opsets.get(domain).unwrap_or_default();
        let before = self.folder.graph.nodes().len();
        let wanted: Vec<bool> = node.output.iter().map(|name| self.needed.contains(name.as_str())).collect();
        let mut context = Context::new(&mut self.folder, &self.model.storage, node, opset, inputs, wanted.clone());
        let results = ops::lower(row, &mut context)?;
        let (ignored, notes) = context.finish();
        if !ignored.is_empty() || !notes.is_empty() {
            let (label, op) = (node_label(node), node.op_type.clone());
            let attribute = |attribute| Warning::IgnoredAttribute { node: label.clone(), op: op.clone(), attribute };
            self.warnings.extend(ignored.into_iter().map(attribute));
            self.warnings.extend(notes.into_iter().map(|what| Warning::Node { node: label.clone(), op: op.clone(), what }));
        }
        self.folder.settle(before);

        for (index, name) in node.output.iter().enumerate().filter(|(index, _)| wanted[*index]) {
            let Some(&result) = results.get(index) else {
                return Err(OpError::unsupported(format!("output {index} ({name:?})")));
            };
            let value = self.folder.materialized(result)?;
            self.check_declared(name, value);
            self.values.insert(name, value);
        }
        Ok(())
    }

    /// Declared types are hints: what was inferred counts.
    fn check_declared(&mut self, name: &str, value: NodeId) {
        let Some(declared) = self.declared.get(name) else { return };
        let found = self.folder.graph.ty(value);
        let dtype_differs = declared.dtype.is_some_and(|d| arithmetic(d) != found.dtype);
        let shape_differs = declared.dims.as_ref().is_some_and(|dims| {
            let differs = |(dim, &found): (&Dim, &usize)| size(dim, &self.dims).is_some_and(|size| size != found);
            dims.len() != found.shape.rank() || dims.iter().zip(found.shape.iter()).any(differs)
        });
        if dtype_differs || shape_differs {
            let dtype = declared.dtype.map_or("?", DType::name);
            let dims = declared.dims.as_deref().map_or_else(|| "[?]".to_owned(), shape_text);
            let (value, found) = (name.to_owned(), found.to_string());
            self.warnings.push(Warning::DeclaredType { value, declared: format!("{dtype}{dims}"), found });
        }
    }

    fn finish(self) -> Result<Specialized, ImportError> {
        let mut graph = self.folder.graph;
        for output in self.model.outputs() {
            let Some(&node) = self.values.get(output.name.as_str()) else { continue };
            graph.output(&output.name, node)?;
        }
        let graph = graph.rewrite::<ImportError>(|g, node, operands| Ok(g.push(node.op.clone(), operands)?))?;
        check_integer_range(&graph)?;
        Ok(Specialized { graph, dims: self.dims, warnings: self.warnings })
    }
}

/// Devices hold 64-bit integers in 32 bits: every constant that is left must fit.
fn check_integer_range(graph: &Graph) -> Result<(), ImportError> {
    for id in graph.live() {
        let Op::Constant(tensor) = &graph.node(id).op else { continue };
        if !matches!(tensor.dtype(), DType::I64 | DType::U64) {
            continue;
        }
        let (low, high) = int_range(tensor.dtype());
        if let Some(value) = tensor.to_i64_vec().into_iter().find(|v| !(low..=high).contains(v)) {
            let output = graph.outputs().iter().find(|o| reaches(graph, id, o.node)).map_or_else(String::new, |o| o.name.clone());
            return Err(ImportError::IntegerRange { output, value, dtype: tensor.dtype() });
        }
    }
    Ok(())
}

/// Whether `to` depends on `from`.
fn reaches(graph: &Graph, from: NodeId, to: NodeId) -> bool {
    let mut dependent = vec![false; graph.nodes().len()];
    dependent[from.index()] = true;
    for id in graph.ids() {
        if graph.node(id).operands.iter().any(|o| dependent[o.index()]) {
            dependent[id.index()] = true;
        }
    }
    dependent[to.index()]
}

/// The shape as ONNX writes shapes: a vector of i64.
pub(crate) fn as_i64(shape: &Shape) -> Vec<i64> {
    shape.iter().map(|&d| d as i64).collect()
}
