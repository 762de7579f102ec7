//! [`Model::specialize`]: symbolic sizes get values, and the model becomes a typed graph.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::proto::{GraphProto, NodeProto, TensorProto};
use meganeura_ir::{DType, Graph, NodeId, Op, ParameterInfo, Shape, Tensor, TensorType, int_range};
use serde::{Deserialize, Serialize};

use crate::body::Control;
use crate::context::{Context, Remarks};
use crate::dims::{Expr, Sizes, Solution};
use crate::error::{BindingError, ImportError, MissingDim, NodeName, OpError, Warning, qualified};
use crate::fold::Folder;
use crate::model::{Dim, Model, ModelInput, canonical_domain, declared_dims, declared_dtype, node_label, read_values};
use crate::narrow::{self, Narrow};
use crate::ops::{self, Rule};
use crate::phase::Phase;
use crate::roles::constant_tensor;
use crate::tensor::arithmetic;
use crate::value::Value;
use crate::wire::Locator;

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
    /// What the layers do that act differently in training. An artifact does not keep it.
    #[serde(skip)]
    pub phase: Phase,
}

/// Inputs of at most this many elements are specialised on their values where these decide shapes.
const MAX_BOUND_ELEMENTS: usize = 1 << 12;

/// A model at concrete sizes.
#[derive(Clone, Debug)]
pub struct Specialized {
    /// Inputs and outputs in the order of the model, under their names, without the inputs that are bound to values; parameters as
    /// in [`Model::parameters`], so that ids agree between specialisations. Constants are folded, dead nodes are gone. If the graph
    /// draws random numbers, its last input is [`RANDOM_KEY`](crate::RANDOM_KEY). Its updates move the running statistics of layers
    /// that train.
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
            parameters: Vec::new(),
            values: HashMap::new(),
            warnings,
            declared: declared_values(self),
            narrow: narrow::declared(&self.graph),
            needed: read_values(&self.graph, self.outputs()),
            dims: resolved.dims,
            body_nodes: 0,
        };
        builder.folder.state.phase = bindings.phase;
        builder.declare(&resolved.shapes, &bindings.values)?;
        builder.nodes(&self.graph)?;
        builder.finish()
    }

    /// As [`Model::specialize`], for data that the model is to run on: inputs take the shapes in `data` unless `bindings` tells
    /// others, and inputs whose values decide shapes are bound to their values. Tensors that are no inputs of the model count for
    /// nothing. Also returns the bindings with these values; the graph lacks the inputs that they name.
    ///
    /// # Errors
    /// As [`Model::specialize`]; [`ImportError::ValuesNeeded`] only if `data` lacks an input or it is no small tensor.
    pub fn specialize_on(&self, bindings: &Bindings, data: &[(&str, &Tensor)]) -> Result<(Specialized, Bindings), ImportError> {
        let mut bindings = bindings.clone();
        for (name, tensor) in data.iter().filter(|(name, _)| self.inputs().iter().any(|input| input.name == *name)) {
            bindings.shapes.entry((*name).to_owned()).or_insert_with(|| tensor.shape().to_vec());
        }
        let value = |name: &str| data.iter().find(|(n, _)| *n == name).map(|(_, value)| *value);
        for name in self.bindings().values.keys() {
            if let Some(value) = value(name) {
                bindings.values.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        loop {
            let result = self.specialize(&bindings);
            let Err(ImportError::ValuesNeeded { inputs, .. }) = &result else {
                return result.map(|specialized| (specialized, bindings));
            };
            let mut bound = false;
            for name in inputs {
                if let Some(value) = value(name).filter(|value| value.shape().numel() <= MAX_BOUND_ELEMENTS) {
                    bound |= bindings.values.insert(name.clone(), value.clone()).is_none();
                }
            }
            if !bound {
                return result.map(|specialized| (specialized, bindings));
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
    let is_known = |name: &String| {
        symbols.iter().any(|s| s.name == *name) || inputs.iter().flat_map(|i| &i.dims).any(|d| *d == Dim::Symbol(name.clone()))
    };
    if let Some(name) = bindings.dims.keys().find(|name| !is_known(name)) {
        let known = symbols.into_iter().map(|s| s.name).collect();
        return Err(BindingError::UnknownDim { name: name.clone(), known });
    }

    for input in inputs {
        let Some(shape) = shapes.get(&input.name) else { continue };
        if input.ranked && input.dims.len() != shape.len() {
            let (input, expected) = (input.name.clone(), input.dims.len());
            return Err(BindingError::Rank { input, expected, found: shape.clone() });
        }
        if input.dims.iter().zip(shape).any(|(dim, size)| matches!(dim, Dim::Fixed(fixed) if fixed != size)) {
            let declared = shape_text(&input.dims);
            warnings.push(Warning::OverriddenShape { input: input.name.clone(), declared, found: shape.clone() });
        }
    }
    let mut dims = Sizes::new();
    let given = equations(inputs, &bindings.dims, &shapes);
    settle(&given, &mut dims)?;
    for (_, expr, size) in equations(inputs, &defaults.dims, &defaults.shapes) {
        if let Solution::Solved(name, size) = expr.solve(size, &dims) {
            dims.insert(name, size);
            settle(&given, &mut dims)?;
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
            None => {
                input.dims.iter().map(|d| d.size(&dims).ok_or_else(|| BindingError::NoSize { text: d.to_string() })).collect()
            }
        })
        .collect::<Result<_, _>>()?;
    Ok(Resolved { dims, shapes })
}

/// What named sizes and shapes of inputs say: the text of a size, its expression, and its value.
fn equations<'a>(
    inputs: &'a [ModelInput],
    dims: &'a Sizes,
    shapes: &BTreeMap<String, Vec<usize>>,
) -> Vec<(&'a str, Expr, usize)> {
    let named = dims.iter().map(|(text, size)| (text.as_str(), *size));
    let shaped = inputs.iter().flat_map(|input| {
        let sizes = shapes.get(&input.name).into_iter().flatten();
        input.dims.iter().zip(sizes).filter_map(|(dim, size)| match dim {
            Dim::Symbol(text) => Some((text.as_str(), *size)),
            Dim::Fixed(_) => None,
        })
    });
    named.chain(shaped).map(|(text, size)| (text, Expr::parse(text), size)).collect()
}

/// Solves equations until no more sizes follow from them.
fn settle(equations: &[(&str, Expr, usize)], dims: &mut Sizes) -> Result<(), BindingError> {
    loop {
        let known = dims.len();
        for (text, expr, size) in equations {
            match (expr.solve(*size, dims), expr) {
                (Solution::Solved(name, size), _) => {
                    dims.insert(name, size);
                }
                (Solution::Known(true) | Solution::Open, _) => {}
                (_, Expr::Symbol(name)) => {
                    let first = dims.get(name).copied().unwrap_or_default();
                    return Err(BindingError::Contradiction { name: name.clone(), first, second: *size });
                }
                _ => {
                    let known = expr.symbols().into_iter().filter_map(|n| Some(format!("{n} = {}", dims.get(n)?))).collect();
                    return Err(BindingError::Expression { text: (*text).to_owned(), size: *size, known });
                }
            }
        }
        if dims.len() == known {
            return Ok(());
        }
    }
}

/// Every symbolic size, at its first occurrence.
fn symbols(inputs: &[ModelInput]) -> Vec<MissingDim> {
    let mut seen = HashSet::new();
    let mut symbols = Vec::new();
    for input in inputs {
        for (axis, dim) in input.dims.iter().enumerate() {
            let Dim::Symbol(text) = dim else { continue };
            let expr = Expr::parse(text);
            let new = expr.symbols().into_iter().filter(|name| seen.insert((*name).to_owned()));
            symbols.extend(new.map(|name| MissingDim { name: name.to_owned(), input: input.name.clone(), axis }));
        }
    }
    symbols
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

/// The graph of one specialisation while it is built.
pub(crate) struct Builder<'m> {
    pub model: &'m Model,
    pub folder: Folder,
    /// Nodes of the parameters.
    parameters: Vec<NodeId>,
    /// By ONNX value name. Each iteration of a loop overwrites the values of its body.
    pub values: HashMap<&'m str, Value>,
    warnings: Vec<Warning>,
    declared: HashMap<&'m str, Declared>,
    /// Element types that wider dtypes hold, by ONNX value name.
    narrow: HashMap<&'m str, Narrow>,
    /// Values that nodes or the outputs read.
    pub needed: HashSet<&'m str>,
    pub dims: BTreeMap<String, usize>,
    /// Nodes that bodies have come to so far.
    pub body_nodes: usize,
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
            self.values.insert(&input.name, Value::Tensor(node));
        }
        for parameter in self.model.parameters() {
            let node = self.folder.graph.parameter(ParameterInfo {
                name: parameter.name.clone(),
                ty: TensorType::new(arithmetic(parameter.stored), parameter.shape.clone()),
                stored: parameter.stored,
                role: parameter.role,
            })?;
            self.parameters.push(node);
        }
        self.initializers(&self.model.graph)
    }

    /// The values of the initializers of a graph.
    pub fn initializers(&mut self, graph: &'m GraphProto) -> Result<(), ImportError> {
        for proto in &graph.initializer {
            let name = proto.name.as_str();
            if !self.needed.contains(name) || self.values.contains_key(name) {
                continue;
            }
            let node = match self.parameter(proto) {
                Some(parameter) => parameter,
                None => {
                    let error = |source| ImportError::Tensor { name: name.to_owned(), source };
                    let tensor = self.model.storage.read(proto).map_err(error)?;
                    let tensor = tensor.cast_finite(arithmetic(tensor.dtype())).map_err(|e| error(e.into()))?;
                    self.folder.constant(tensor)?
                }
            };
            self.values.insert(name, Value::Tensor(node));
        }
        Ok(())
    }

    /// The parameter that a tensor holds the data of.
    fn parameter(&self, proto: &TensorProto) -> Option<NodeId> {
        let Locator { ordinal, .. } = Locator::from_bytes(&proto.raw_data)?;
        self.parameters.get(self.model.parameter_index(ordinal)?).copied()
    }

    /// Adds the nodes of a graph, in order.
    pub fn nodes(&mut self, graph: &'m GraphProto) -> Result<(), ImportError> {
        graph.node.iter().try_for_each(|node| {
            self.folder.graph.set_origin(Some(node_label(node).into()));
            self.node(node).map_err(|source| self.node_error(node, source))
        })
    }

    fn name(&self, node: &NodeProto) -> NodeName {
        let domain = canonical_domain(&node.domain);
        NodeName { name: node_label(node), op: qualified(domain, &node.op_type), opset: node.opset.unwrap_or_default() }
    }

    /// An error at `node`. Where a value should be known and is not, the inputs that it depends on are to blame.
    fn node_error(&self, node: &NodeProto, source: OpError) -> ImportError {
        let name = Box::new(self.name(node));
        let undecided = match &source {
            OpError::NotStatic { index } => {
                let operand = node.input.get(*index).and_then(|name| self.values.get(name.as_str()));
                operand.and_then(Value::tensor).map(|value| ("a shape", value))
            }
            OpError::Undecided { what, value } => Some((*what, *value)),
            _ => None,
        };
        if let Some((what, value)) = undecided {
            let (inputs, path) = self.dependence(value);
            if !inputs.is_empty() {
                return ImportError::ValuesNeeded { node: name, what, inputs, path };
            }
        }
        match source {
            OpError::Inner(error) => error.inside(&name.name),
            source => ImportError::Node { node: name, source: Box::new(source) },
        }
    }

    /// Names of the inputs whose values `node` depends on, and the values on the way from one of them.
    fn dependence(&self, node: NodeId) -> (Vec<String>, Vec<String>) {
        let graph = &self.folder.graph;
        let size = graph.nodes().len();
        let (mut reached, mut next) = (vec![false; size], vec![None; size]);
        reached[node.index()] = true;
        let mut inputs = Vec::new();
        let mut first = None;
        for id in graph.ids().rev().filter(|id| id.index() <= node.index()) {
            if !reached[id.index()] {
                continue;
            }
            if let Op::Input(input) = &graph.node(id).op {
                inputs.push(graph.inputs()[input.0 as usize].name.clone());
                first = Some(id);
            }
            for operand in &graph.node(id).operands {
                reached[operand.index()] = true;
                next[operand.index()].get_or_insert(id);
            }
        }
        inputs.reverse();
        let named: HashMap<NodeId, &str> =
            self.values.iter().filter_map(|(name, value)| Some((value.tensor()?, *name))).collect();
        let way = std::iter::successors(first, |id| next[id.index()]);
        (inputs, way.filter_map(|id| named.get(&id)).map(|name| (*name).to_owned()).collect())
    }

    fn node(&mut self, node: &'m NodeProto) -> Result<(), OpError> {
        if let Some((proto, name)) = constant_tensor(node) {
            // The body of a loop gives its constants once.
            if self.values.contains_key(name) {
                return Ok(());
            }
            if let Some(parameter) = self.parameter(proto) {
                self.values.insert(name, Value::Tensor(parameter));
                return Ok(());
            }
        }
        let domain = canonical_domain(&node.domain);
        let row = ops::find(domain, &node.op_type).ok_or_else(|| OpError::unsupported("the operator"))?;
        let mut inputs = Vec::with_capacity(node.input.len());
        for (index, name) in node.input.iter().enumerate() {
            inputs.push(match name.as_str() {
                "" => None,
                name => Some(self.values.get(name).ok_or(OpError::MissingInput(index))?.clone()),
            });
        }
        let opset = node.opset.unwrap_or_default();
        let before = self.folder.graph.nodes().len();
        let wanted: Vec<bool> = node.output.iter().map(|name| self.needed.contains(name.as_str())).collect();
        ops::check_inputs(row, &inputs)?;
        let results = if let Rule::Control(rule) = row.rule {
            rule(&mut Control { builder: self, node, inputs, wanted: wanted.clone() })?
        } else {
            let held = self.narrow_operands(node);
            let moved = if narrow::moves(node) { held.first().copied().flatten() } else { None };
            let mut context = Context::new(&mut self.folder, &self.model.storage, node, opset, inputs, wanted.clone(), held);
            let results = ops::lower(row, &mut context)?;
            let Remarks { unread, notes, narrow } = context.finish();
            for (name, narrow) in node.output.iter().zip(moved.or(narrow).into_iter().cycle()) {
                self.narrow.insert(name, narrow);
            }
            self.report(node, unread, notes);
            results
        };
        self.folder.settle(before);

        for (index, name) in node.output.iter().enumerate().filter(|(index, _)| wanted[*index]) {
            let Some(result) = results.get(index) else {
                return Err(OpError::unsupported(format!("output {index} ({name:?})")));
            };
            let value = match result {
                Value::Tensor(node) => Value::Tensor(self.folder.materialized(*node)?),
                other => other.clone(),
            };
            if let Value::Tensor(node) = value {
                self.check_declared(name, node);
            }
            self.values.insert(name, value);
        }
        Ok(())
    }

    /// The element types of the operands that wider dtypes hold.
    pub fn narrow_operands(&self, node: &NodeProto) -> Vec<Option<Narrow>> {
        node.input.iter().map(|name| self.narrow.get(name.as_str()).copied()).collect()
    }

    /// Warns of attributes that a rule did not read, and passes its notes on.
    fn report(&mut self, node: &NodeProto, ignored: Vec<String>, notes: Vec<&'static str>) {
        if !ignored.is_empty() || !notes.is_empty() {
            let (label, op) = (node_label(node), node.op_type.clone());
            let attribute = |attribute| Warning::IgnoredAttribute { node: label.clone(), op: op.clone(), attribute };
            self.warnings.extend(ignored.into_iter().map(attribute));
            self.warnings.extend(notes.into_iter().map(|what| Warning::Node { node: label.clone(), op: op.clone(), what }));
        }
    }

    /// Declared types are hints: what was inferred counts.
    fn check_declared(&mut self, name: &str, value: NodeId) {
        let Some(declared) = self.declared.get(name) else { return };
        let found = self.folder.graph.ty(value);
        let dtype_differs = declared.dtype.is_some_and(|d| arithmetic(d) != found.dtype);
        let shape_differs = declared.dims.as_ref().is_some_and(|dims| {
            let differs = |(dim, &found): (&Dim, &usize)| dim.size(&self.dims).is_some_and(|size| size != found);
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
        let Folder { mut graph, state, .. } = self.folder;
        for (parameter, moved) in state.moved(&graph) {
            graph.update(parameter, moved)?;
        }
        let mut warnings = self.warnings;
        warnings.extend(state.overridden.into_iter().map(|(layers, trains)| Warning::Phase { layers, trains }));
        for output in self.model.outputs() {
            let refuse = |found: &str| ImportError::OutputType { name: output.name.clone(), found: found.to_owned() };
            match self.values.get(output.name.as_str()) {
                Some(Value::Tensor(node)) => graph.output(&output.name, *node)?,
                other => return Err(refuse(other.map_or("not computed", Value::kind))),
            };
        }
        let graph = graph.rewrite::<ImportError>(|g, node, operands| Ok(g.push(node.op.clone(), operands)?))?;
        check_integer_range(&graph)?;
        Ok(Specialized { graph, dims: self.dims, warnings })
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
