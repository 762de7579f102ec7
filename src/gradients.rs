//! One forward and backward pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use meganeura_autodiff::{gradients, vjp};
use meganeura_import::{Bindings, RANDOM_KEY};
use meganeura_ir::{Graph, InputId, NodeId, Op, ParameterId, Tensor, random_key};
use meganeura_runtime::Device;

use crate::data::{Dataset, Samples, TARGET_INPUT};
use crate::error::Error;
use crate::model::Model;
use crate::objective::{Forward, Objective};
use crate::predictor::by_name;

/// What to differentiate by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithRespectTo {
    /// Every weight that trains by default.
    Parameters,
    /// Every input of floats.
    Inputs,
}

/// A loss and its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    pub loss: f64,
    /// d loss / d tensor, by the tensor's name, in f32; zeros where the loss does not depend on it.
    pub gradients: BTreeMap<String, Tensor>,
}

impl Model {
    /// The loss of the whole of `data` as one batch, and its gradient. Random numbers follow from seed 0.
    ///
    /// # Errors
    /// The data does not fit the model or the loss, an op has no derivative, or the device fails.
    pub fn gradients(
        &self,
        device: &Arc<Device>,
        data: &Dataset,
        objective: &Objective,
        wrt: WithRespectTo,
        bindings: &Bindings,
    ) -> Result<Gradients, Error> {
        self.gradients_of_seed(device, data, objective, wrt, bindings, 0)
    }

    /// As [`Model::gradients`], with random numbers that follow from `seed`.
    ///
    /// # Errors
    /// As [`Model::gradients`].
    pub fn gradients_of_seed(
        &self,
        device: &Arc<Device>,
        data: &Dataset,
        objective: &Objective,
        wrt: WithRespectTo,
        bindings: &Bindings,
        seed: u64,
    ) -> Result<Gradients, Error> {
        let mut samples = Samples::whole(data, &self.bound_inputs(bindings), objective.data_target())?;
        let graph = objective.specialize(self, &samples, None, bindings)?;
        let mut forward = objective.build(self, graph, &mut samples, None)?;
        let nodes = self.differentiable(&mut forward.graph, wrt)?;
        if nodes.is_empty() {
            return Err(Error::NothingToTrain { reason: "the model has no float tensor of that kind" });
        }
        let graph = gradient_graph(forward, nodes)?;
        let (tensors, key) = (samples.tensors(), random_key(seed, 0));
        let inputs = [by_name(&tensors), vec![(RANDOM_KEY, &key)]].concat();
        let mut outputs = self.run_graph(device, graph, &inputs)?.into_iter();
        let loss = outputs.next().and_then(|(_, loss)| loss.scalar_f64()).unwrap_or(f64::NAN);
        Ok(Gradients { loss, gradients: outputs.collect() })
    }

    /// Gradients of `sum(output * cotangent)` over the outputs that `cotangents` names, by every parameter, statistics included, in f32.
    ///
    /// # Errors
    /// As [`Model::run_with`]; the model has no such output, a cotangent is not of its output's shape, or an op has no derivative.
    pub fn vjp(
        &self,
        device: &Arc<Device>,
        inputs: &[(&str, &Tensor)],
        cotangents: &[(&str, &Tensor)],
        bindings: &Bindings,
    ) -> Result<BTreeMap<String, Tensor>, Error> {
        let mut graph = self.specialize_on(bindings, inputs)?.graph;
        let mut pairs = Vec::new();
        for (name, cotangent) in cotangents {
            let output = graph.output_node(name).ok_or_else(|| {
                let known = graph.outputs().iter().map(|output| output.name.clone()).collect();
                Error::UnknownOutput { name: (*name).to_owned(), known }
            })?;
            let dtype = graph.ty(output).dtype;
            let cotangent = graph.constant(cotangent.cast(dtype))?;
            pairs.push((output, cotangent));
        }
        let ids = 0..graph.parameters().len() as u32;
        let parameters: Vec<NodeId> = ids.map(|id| graph.push(Op::Parameter(ParameterId(id)), &[])).collect::<Result<_, _>>()?;
        let by = vjp(&mut graph, &pairs, &parameters)?;
        graph.clear_outputs();
        let names: Vec<String> = graph.parameters().iter().map(|p| p.name.clone()).collect();
        for (name, &gradient) in names.iter().zip(&by) {
            graph.output(name, gradient)?;
        }
        Ok(self.run_graph(device, graph, inputs)?.into_iter().collect())
    }

    pub(crate) fn differentiable(&self, graph: &mut Graph, wrt: WithRespectTo) -> Result<Vec<(String, NodeId)>, Error> {
        let named: Vec<(String, Op)> = match wrt {
            WithRespectTo::Parameters => {
                let trainable = self.parameters().iter().filter(|p| p.trainable);
                trainable.filter_map(|p| Some((p.name.clone(), Op::Parameter(graph.parameter_id(&p.name)?)))).collect()
            }
            WithRespectTo::Inputs => {
                let inputs = (0..).zip(graph.inputs()).filter(|(_, i)| i.ty.dtype.is_float() && i.name != TARGET_INPUT);
                inputs.map(|(id, info)| (info.name.clone(), Op::Input(InputId(id)))).collect()
            }
        };
        named.into_iter().map(|(name, op)| Ok((name, graph.push(op, &[])?))).collect()
    }
}

/// A graph whose first output is the loss, and whose others are its gradients by `nodes`, under their names.
pub(crate) fn gradient_graph(forward: Forward, nodes: Vec<(String, NodeId)>) -> Result<Graph, Error> {
    let Forward { mut graph, loss, .. } = forward;
    let by = gradients(&mut graph, loss, &nodes.iter().map(|(_, node)| *node).collect::<Vec<_>>())?;
    graph.output(LOSS_OUTPUT, loss)?;
    for ((name, _), gradient) in nodes.into_iter().zip(by) {
        graph.output(name, gradient)?;
    }
    Ok(graph)
}

/// The name of the loss among the outputs of a program.
pub(crate) const LOSS_OUTPUT: &str = "loss/value";
