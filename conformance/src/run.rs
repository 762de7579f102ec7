//! One test: import, compile, run, compare.

use std::collections::BTreeMap;

use meganeura_import::{Bindings, Dim, ImportError, Model, ModelInput, RANDOM_KEY, Specialized};
use meganeura_ir::{Graph, Op, Tensor};

use crate::compare;
use crate::execute::{Engine, Refusal};
use crate::gradient;
use crate::outcome::{Gradient, Status};
use crate::refusal::{self, Reason};
use crate::suite::{Folder, Kind, SuiteError, Test, ramp};

/// Runs `test` forward, and backward if it passes.
pub fn run(engine: &Engine, test: &Test) -> Result<(Status, Option<Gradient>), SuiteError> {
    let outline = test.outline()?;
    let refused = |e: ImportError| refused(Refusal::new(refusal::of_import(&e, &outline), e));
    let model = match Model::open(&test.model) {
        Ok(model) => model,
        Err(e) => return Ok((refused(e), None)),
    };
    let supplied = inputs(test, &model)?;
    let specialized = match specialize(&model, &supplied) {
        Ok(specialized) => specialized,
        Err(e) => return Ok((refused(e), None)),
    };
    if specialized.graph.inputs().iter().any(|input| input.name == RANDOM_KEY) {
        return Ok((self::refused(Refusal::new(Reason::RandomNumbers, "the model draws random numbers")), None));
    }
    let specialized = Specialized { graph: engine.prepare(specialized.graph), ..specialized };
    let prepared = match Prepared::new(&model, specialized, &supplied) {
        Ok(prepared) => prepared,
        Err(e) => return Ok((refused(e), None)),
    };
    forward(engine, test, &model, &prepared)
}

fn refused(refusal: Refusal) -> Status {
    Status::Refused { reason: refusal.reason, detail: refusal.detail }
}

/// A graph, and what it runs on.
pub struct Prepared {
    pub graph: Graph,
    /// By input of the graph.
    pub inputs: Vec<Tensor>,
    /// By parameter of the graph, as it computes with them.
    pub weights: Vec<Tensor>,
}

impl Prepared {
    fn new(model: &Model, specialized: Specialized, supplied: &BTreeMap<String, Tensor>) -> Result<Self, ImportError> {
        let graph = specialized.graph;
        let computed = |name: &str, tensor: &Tensor, dtype| {
            tensor.cast_finite(dtype).map_err(|e| ImportError::Tensor { name: name.to_owned(), source: e.into() })
        };
        let given = graph.inputs().iter().filter_map(|info| Some((info, supplied.get(&info.name)?)));
        let inputs = given.map(|(info, tensor)| computed(&info.name, tensor, info.ty.dtype)).collect::<Result<_, _>>()?;
        let weight = |info: &meganeura_ir::ParameterInfo| computed(&info.name, &model.weight(&info.name)?, info.ty.dtype);
        let weights = graph.parameters().iter().map(weight).collect::<Result<_, ImportError>>()?;
        Ok(Prepared { graph, inputs, weights })
    }

    /// For each node whether it depends on an element of an input.
    fn depending_on_inputs(&self) -> Vec<bool> {
        let mut depends = vec![false; self.graph.nodes().len()];
        for id in self.graph.ids() {
            let node = self.graph.node(id);
            let is_read = matches!(node.op, Op::Input(_)) && node.ty.shape.numel() > 0;
            depends[id.index()] = is_read || node.operands.iter().any(|o| depends[o.index()]);
        }
        depends
    }
}

/// The tensors that the test supplies, by name.
fn inputs(test: &Test, model: &Model) -> Result<BTreeMap<String, Tensor>, SuiteError> {
    let name = |input: &ModelInput| input.name.clone();
    if test.folder == Folder::Light {
        let size = |dim: &Dim| if let Dim::Fixed(size) = dim { *size } else { 1 };
        let shape = |input: &ModelInput| input.dims.iter().map(size).collect::<Vec<_>>();
        return Ok(model.inputs().iter().map(|input| (name(input), ramp(&shape(input)))).collect());
    }
    Ok(model.inputs().iter().map(name).zip(test.tensors(Kind::Input)?).collect())
}

fn specialize(model: &Model, supplied: &BTreeMap<String, Tensor>) -> Result<Specialized, ImportError> {
    let shapes = supplied.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
    let data: Vec<(&str, &Tensor)> = supplied.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    Ok(model.specialize_on(&Bindings { shapes, ..Bindings::default() }, &data)?.0)
}

fn forward(engine: &Engine, test: &Test, model: &Model, prepared: &Prepared) -> Result<(Status, Option<Gradient>), SuiteError> {
    let execution = match engine.execute(prepared.graph.clone(), &prepared.inputs, &prepared.weights) {
        Ok(execution) => execution,
        Err(refusal) => return Ok((refused(refusal), None)),
    };
    let expected = test.tensors(Kind::Output)?;
    if expected.len() != execution.outputs.len() {
        let detail = format!("{} outputs, expected {}", execution.outputs.len(), expected.len());
        return Ok((Status::Wrong { detail }, None));
    }
    for ((found, expected), output) in execution.outputs.iter().zip(&expected).zip(model.outputs()) {
        // The graph computes floats in f32; users get the dtype that the file declares.
        let found = match output.dtype {
            Some(dtype) if dtype.is_float() && found.dtype().is_float() => found.cast(dtype),
            _ => found.clone(),
        };
        if let Some(difference) = compare::difference(&found, expected, test.digits()) {
            return Ok((Status::Wrong { detail: format!("output {} {difference}", output.name) }, None));
        }
    }
    let depends = prepared.depending_on_inputs();
    let computed = |(output, dispatched): (&meganeura_ir::OutputInfo, &bool)| depends[output.node.index()] && *dispatched;
    if !prepared.graph.outputs().iter().zip(&execution.dispatched).all(computed) {
        return Ok((Status::Folded, None));
    }
    Ok((Status::Pass, gradient::check(engine, prepared)))
}
