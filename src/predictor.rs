//! A model on a device, for inference; and how graphs and weights get there.

use std::sync::Arc;

use meganeura_codegen::profile::DeviceProfile;
use meganeura_codegen::{CompileOptions, Program};
use meganeura_import::RANDOM_KEY;
use meganeura_ir::{DType, Graph, ParameterId, Tensor, random_key};
use meganeura_runtime::{Device, ParameterStore, Session};

use crate::error::Error;
use crate::lora::Adapter;
use crate::model::Model;
use crate::plan_cache;
use crate::rewriting::compile_options;

/// Host memory that an upload of weights may take at once, in bytes.
const UPLOAD_BYTES: usize = 256 << 20;

/// A compiled model with its weights on a device. Sizes are fixed.
pub struct Predictor {
    session: Session,
}

impl Predictor {
    pub(crate) fn new(model: &Model, device: &Arc<Device>, graph: Graph) -> Result<Self, Error> {
        let program = compile(graph, device)?;
        let store = place_weights(model, &[], device, &program)?;
        Ok(Predictor { session: Session::new(device, program, &store)? })
    }

    /// With the weights of a store, which others may change.
    pub(crate) fn sharing(store: &Arc<ParameterStore>, graph: Graph) -> Result<Self, Error> {
        let device = store.device();
        Ok(Predictor { session: Session::new(device, compile(graph, device)?, store)? })
    }

    /// Runs the model: inputs by name, results under the names of the outputs. A model that draws random numbers takes their key as
    /// [`RANDOM_KEY`], made by [`random_key`].
    ///
    /// # Errors
    /// An input is missing, unknown, or of another type than the graph's; the device fails.
    pub fn run(&mut self, inputs: &[(&str, &Tensor)]) -> Result<Vec<(String, Tensor)>, Error> {
        let outputs = self.session.run(inputs)?;
        let names = self.session.program().outputs.iter().map(|binding| binding.name.clone());
        Ok(names.zip(outputs).collect())
    }
}

/// The program of a graph for a device.
pub(crate) fn compile(graph: Graph, device: &Device) -> Result<Arc<Program>, Error> {
    compile_with(graph, device, &compile_options())
}

pub(crate) fn compile_with(graph: Graph, device: &Device, options: &CompileOptions) -> Result<Arc<Program>, Error> {
    compile_for(graph, device.profile(), options)
}

/// The program of a graph for devices of a profile.
pub(crate) fn compile_for(graph: Graph, profile: &DeviceProfile, options: &CompileOptions) -> Result<Arc<Program>, Error> {
    let planned = plan_cache::compile(&graph.verify()?, profile, options)?;
    Ok(Arc::new(planned.compiled.program))
}

/// A store with today's weights of `model`, in the layout of `program`: with its adapters, or without them and beside `adapters`, whose factors
/// are parameters of the program then.
pub(crate) fn place_weights(
    model: &Model,
    adapters: &[Adapter],
    device: &Arc<Device>,
    program: &Program,
) -> Result<Arc<ParameterStore>, Error> {
    let store = ParameterStore::new(device, program)?;
    write_weights(model, adapters, &store)?;
    Ok(store)
}

/// Gives a store today's weights of `model`, as [`place_weights`].
pub(crate) fn write_weights(model: &Model, adapters: &[Adapter], store: &ParameterStore) -> Result<(), Error> {
    let mut waiting: Vec<(ParameterId, Tensor)> = Vec::new();
    let mut bytes = 0;
    let upload = |waiting: &mut Vec<(ParameterId, Tensor)>| {
        let values: Vec<(ParameterId, &Tensor)> = waiting.iter().map(|(id, tensor)| (*id, tensor)).collect();
        let written = store.write_parameters(&values);
        waiting.clear();
        written
    };
    for binding in store.parameters() {
        let factor = adapters.iter().flat_map(Adapter::factors).find(|(name, _)| *name == binding.name);
        let tensor = match (factor, model.imported().parameter(&binding.name)) {
            (Some((_, factor)), _) => factor.clone(),
            (None, Some(_)) if adapters.is_empty() => model.weight(&binding.name)?,
            (None, Some(_)) => model.base_weight(&binding.name)?,
            (None, None) => continue,
        };
        let tensor = tensor.cast_finite(DType::F32);
        let tensor = tensor.map_err(|source| Error::WeightRange { name: binding.name.clone(), source })?;
        bytes += tensor.bytes().len();
        waiting.push((binding.id, tensor));
        if bytes >= UPLOAD_BYTES {
            upload(&mut waiting)?;
            bytes = 0;
        }
    }
    Ok(upload(&mut waiting)?)
}

/// The key of a step's random numbers, as an input, where `program` draws any.
pub(crate) fn random_input(program: &Program, seed: u64, step: u64) -> Option<(String, Tensor)> {
    let draws = program.inputs.iter().any(|input| input.name == RANDOM_KEY);
    draws.then(|| (RANDOM_KEY.to_string(), random_key(seed, step)))
}

/// Names and tensors as a session takes them.
pub(crate) fn by_name(tensors: &[(String, Tensor)]) -> Vec<(&str, &Tensor)> {
    tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect()
}
