//! [`Model`]: an imported model and the weights it has today.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meganeura_codegen::Program;
use meganeura_import::{
    ArtifactError, Bindings, Copies, Dim, Head, ImportError, ImportOptions, ModelInput, ModelOutput, ModelParameter, RANDOM_KEY,
    Specialized, Warning,
};
use meganeura_ir::{Graph, Tensor, TensorType, random_key};
use meganeura_runtime::{Device, ParameterStore, atomic_write};

use crate::error::Error;
use crate::lora::{Adaptation, Adapter};
use crate::predictor::{Predictor, place_weights};
use crate::rewriting::raised;

/// A model: the structure that was imported, and today's weights on the host.
///
/// Weights that nobody changed stay in the mapped file.
///
/// ```
/// use meganeura::{Device, DeviceSelector, Model, Tensor};
///
/// # fn main() -> Result<(), meganeura::Error> {
/// let mut model = Model::open("fixtures/digits-cnn.onnx")?;
/// assert_eq!(model.inputs()[0].name, "image");
/// assert!(model.parameters().iter().all(|parameter| parameter.trainable));
///
/// // One run; to run a model often, keep a predictor.
/// let device = Device::open(&DeviceSelector::Auto)?;
/// let image = Tensor::from_f32([2, 1, 8, 8], &[0.5; 128]);
/// let outputs = model.run(&device, &[("image", &image)])?;
/// assert_eq!((outputs[0].0.as_str(), outputs[0].1.shape().to_vec()), ("logits", vec![2, 10]));
///
/// // Weights can be read and replaced, and leave under the names that they came with.
/// let bias = model.weight("fc.bias")?;
/// model.set_weights([("fc.bias".to_owned(), Tensor::from_f32([10], &[0.0; 10]))])?;
/// assert_ne!(model.weight("fc.bias")?, bias);
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("changed.onnx");
/// model.export_onnx(&path)?;
/// assert_eq!(Model::open(&path)?.weight("fc.bias")?, model.weight("fc.bias")?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    imported: meganeura_import::Model,
    /// Weights that differ from the file's, in the dtype of the file.
    changed: BTreeMap<String, Tensor>,
    adaptation: Adaptation,
}

impl Model {
    /// Opens an `.onnx` file, or a `.safetensors` file that [`Model::save`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or holds operators that are not supported: all of them are listed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path, &ImportOptions::default())
    }

    /// As [`Model::open`], for some of the outputs.
    ///
    /// # Errors
    /// As [`Model::open`], and where the model lacks one of the outputs.
    pub fn open_with(path: impl AsRef<Path>, options: &ImportOptions) -> Result<Self, Error> {
        let path = path.as_ref().to_path_buf();
        match meganeura_import::Model::open_with(&path, options) {
            Ok(imported) => {
                let adaptation = Adaptation::read(&imported)?;
                Ok(Model { path, imported, changed: BTreeMap::new(), adaptation })
            }
            Err(source) => Err(Error::Import { path, source: source.into() }),
        }
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn inputs(&self) -> &[ModelInput] {
        self.imported.inputs()
    }

    pub fn outputs(&self) -> &[ModelOutput] {
        self.imported.outputs()
    }

    /// Weights and statistics, in file order.
    pub fn parameters(&self) -> &[ModelParameter] {
        self.imported.parameters()
    }

    /// What is worth knowing about the export.
    pub fn warnings(&self) -> &[Warning] {
        self.imported.warnings()
    }

    /// Structure and provenance as imported.
    pub fn imported(&self) -> &meganeura_import::Model {
        &self.imported
    }

    /// Low-rank adapters, in the order of the weights that they belong to.
    pub fn adapters(&self) -> &[Adapter] {
        &self.adaptation.adapters
    }

    /// Parameters that have changed with the adapters.
    pub(crate) fn trained_with_adapters(&self) -> &[String] {
        &self.adaptation.trained
    }

    /// Gives the model adapters in place of those that it has, and says which parameters were trained with them.
    pub(crate) fn adapt(&mut self, adapters: Vec<Adapter>, trained: impl IntoIterator<Item = String>) -> Result<(), Error> {
        let fits = |a: &Adapter| self.imported.parameter(a.weight()).is_some_and(|p| p.shape == *a.matrix().shape());
        if let Some(adapter) = adapters.iter().find(|adapter| !fits(adapter)) {
            return Err(Error::UnknownParameter(adapter.weight().to_owned()));
        }
        let mut all: BTreeSet<String> = std::mem::take(&mut self.adaptation.trained).into_iter().collect();
        all.extend(trained);
        self.adaptation = Adaptation { adapters, trained: all.into_iter().collect() };
        Ok(())
    }

    /// Makes the adapters part of the weights that they belong to.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn merge_adapters(&mut self) -> Result<(), Error> {
        for adapter in self.adapters().to_vec() {
            let merged = self.weight(adapter.weight())?;
            self.changed.insert(adapter.weight().to_owned(), merged);
        }
        self.adaptation = Adaptation::default();
        Ok(())
    }

    /// Today's value of a parameter, in the dtype of the file: of a weight that has an adapter, with it. Also the value of a factor of an
    /// adapter.
    ///
    /// # Errors
    /// The model has no such parameter, or the file is damaged.
    pub fn weight(&self, name: &str) -> Result<Tensor, Error> {
        match self.adaptation.factor(name) {
            Some(factor) => Ok(factor.clone()),
            None => Ok(self.adaptation.merged(name, self.base_weight(name)?)),
        }
    }

    /// As [`Model::weight`], without its adapter.
    pub(crate) fn base_weight(&self, name: &str) -> Result<Tensor, Error> {
        self.today(name).map_err(|e| self.import_error(e))
    }

    /// Weights of the file that are copies of each other.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn copies(&self) -> Result<Copies, Error> {
        self.imported.copies().map_err(|e| self.import_error(e))
    }

    /// Replaces weights and factors of adapters, all or none. Values are rounded to the dtype of the file. A weight that has an adapter keeps
    /// it.
    ///
    /// # Errors
    /// The model has no such parameter, or a shape differs.
    pub fn set_weights(&mut self, weights: impl IntoIterator<Item = (String, Tensor)>) -> Result<(), Error> {
        let mut changed = Vec::new();
        for (name, tensor) in weights {
            let factor = self.adaptation.factor(&name).map(|factor| factor.ty().clone());
            let parameter = self.imported.parameter(&name).map(|p| TensorType::new(p.stored, p.shape.clone()));
            let expected = factor.or(parameter).ok_or_else(|| Error::UnknownParameter(name.clone()))?;
            let found = tensor.ty().clone();
            if found.shape != expected.shape || !found.dtype.is_float() {
                return Err(Error::WeightType { name, found, expected });
            }
            changed.push((name, tensor.cast(expected.dtype)));
        }
        for (name, tensor) in changed {
            match self.adaptation.factor(&name) {
                Some(_) => self.adaptation.set_factor(&name, tensor),
                None => drop(self.changed.insert(name, tensor)),
            }
        }
        Ok(())
    }

    /// Notes something about the model in the files that it is written to.
    pub(crate) fn set_metadata(&mut self, key: &str, value: &str) -> Result<(), Error> {
        self.imported.set_metadata(key, value).map_err(|source| Error::Import { path: self.path.clone(), source: source.into() })
    }

    /// Gives the head of the model other tensors. What was set for the old ones is forgotten.
    pub(crate) fn set_head(&mut self, head: &Head, weight: Tensor, bias: Option<Tensor>) -> Result<(), Error> {
        self.imported.set_head(head, weight, bias).map_err(|e| self.import_error(e))?;
        for tensor in std::iter::once(&head.weight).chain(&head.bias) {
            self.changed.remove(&tensor.name);
        }
        Ok(())
    }

    /// The typed graph for concrete sizes: symbolic dimensions by name, or inputs by shape. Composites such as attention stand in it for what
    /// exporters write in many nodes, unless [`rewrite_graphs`](crate::rewrite_graphs) says otherwise: their derivatives are composites too.
    ///
    /// # Errors
    /// Sizes are missing, contradict each other, or do not fit an operator.
    pub fn specialize(&self, bindings: &Bindings) -> Result<Specialized, Error> {
        self.imported.specialize(bindings).map(raised).map_err(|e| self.import_error(e))
    }

    /// As [`Model::specialize`], for data that the model is to run on: small inputs whose values decide shapes become constants.
    ///
    /// # Errors
    /// As [`Model::specialize`].
    pub fn specialize_on(&self, bindings: &Bindings, data: &[(&str, &Tensor)]) -> Result<Specialized, Error> {
        self.imported.specialize_on(bindings, data).map(|(specialized, _)| raised(specialized)).map_err(|e| self.import_error(e))
    }

    /// Makes `bindings` the sizes that count where [`Model::specialize`] is given none. [`Model::save`] keeps them.
    pub fn set_bindings(&mut self, bindings: Bindings) {
        self.imported.set_bindings(bindings);
    }

    /// The inputs, with the sizes that `bindings` decide.
    pub fn bound_inputs(&self, bindings: &Bindings) -> Vec<ModelInput> {
        let bound = |dim: &Dim| match dim {
            Dim::Symbol(_) => dim.size(&bindings.dims).map_or(dim.clone(), Dim::Fixed),
            Dim::Fixed(_) => dim.clone(),
        };
        let inputs = self.inputs().iter().map(|input| match bindings.shapes.get(&input.name) {
            Some(shape) => {
                ModelInput { dims: shape.iter().map(|&size| Dim::Fixed(size)).collect(), ranked: true, ..input.clone() }
            }
            None => ModelInput { dims: input.dims.iter().map(bound).collect(), ..input.clone() },
        });
        inputs.collect()
    }

    /// The model on a device, ready to run on inputs of the bound sizes.
    ///
    /// # Errors
    /// As [`Model::specialize`]; the device cannot hold or run the model.
    pub fn predictor(&self, device: &Arc<Device>, bindings: &Bindings) -> Result<Predictor, Error> {
        Predictor::new(self, device, self.specialize(bindings)?.graph)
    }

    /// A store on a device with today's weights, for sessions of programs of this model: all of them share it. `program` is any of them.
    ///
    /// # Errors
    /// The device cannot hold the weights, or the file is damaged.
    pub fn place(&self, device: &Arc<Device>, program: &Program) -> Result<Arc<ParameterStore>, Error> {
        place_weights(self, &[], device, program)
    }

    /// Runs the model once: inputs by name, results under the names of the outputs. Small inputs whose values decide shapes become
    /// constants. Layers act as the file says; random numbers follow from an input [`RANDOM_KEY`], else from seed 0. To run a model
    /// often, keep a [`Model::predictor`].
    ///
    /// # Errors
    /// As [`Model::predictor`]; an input is missing or does not fit.
    pub fn run(&self, device: &Arc<Device>, inputs: &[(&str, &Tensor)]) -> Result<Vec<(String, Tensor)>, Error> {
        self.run_with(device, inputs, &Bindings::default())
    }

    /// As [`Model::run`], with sizes that the inputs leave open, and in a phase.
    ///
    /// # Errors
    /// As [`Model::run`]; sizes contradict each other.
    pub fn run_with(
        &self,
        device: &Arc<Device>,
        inputs: &[(&str, &Tensor)],
        bindings: &Bindings,
    ) -> Result<Vec<(String, Tensor)>, Error> {
        self.run_specialized(device, self.specialize_on(bindings, inputs)?, inputs)
    }

    /// As [`Model::run`], of a specialisation of this model.
    ///
    /// # Errors
    /// As [`Model::predictor`]; an input is missing or does not fit.
    pub fn run_specialized(
        &self,
        device: &Arc<Device>,
        specialized: Specialized,
        inputs: &[(&str, &Tensor)],
    ) -> Result<Vec<(String, Tensor)>, Error> {
        self.run_graph(device, specialized.graph, inputs)
    }

    /// Runs a graph over the weights of this model once, on those of `inputs` that it takes.
    pub(crate) fn run_graph(
        &self,
        device: &Arc<Device>,
        graph: Graph,
        inputs: &[(&str, &Tensor)],
    ) -> Result<Vec<(String, Tensor)>, Error> {
        let key = random_key(0, 0);
        let inputs = supplied(&graph, inputs, &key);
        Predictor::new(self, device, graph)?.run(&inputs)
    }

    /// Writes today's weights and the structure as one safetensors file: every command opens it, and any safetensors library reads the
    /// weights under their original names, shapes and dtypes. Adapters stay apart from the weights that they belong to; see
    /// [`Model::merge_adapters`].
    ///
    /// # Errors
    /// The file cannot be written; what was there before is untouched.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let attachments = self.adaptation.attachments()?;
        let today = |name: &str| self.today(name);
        self.write(path.as_ref(), |out| meganeura_import::write_artifact_with(out, &self.imported, &today, &attachments))
    }

    /// As [`Model::save`], with other values of some of the weights, rounded to the dtype of the file.
    pub(crate) fn save_with(&self, path: &Path, weights: &BTreeMap<String, Tensor>) -> Result<(), Error> {
        let mut rounded = BTreeMap::new();
        for (name, tensor) in weights {
            let parameter = self.imported.parameter(name).ok_or_else(|| Error::UnknownParameter(name.clone()))?;
            let tensor = tensor.cast_finite(parameter.stored);
            rounded.insert(name, tensor.map_err(|source| Error::WeightRange { name: name.clone(), source })?);
        }
        let weight = |name: &str| rounded.get(&name.to_string()).map_or_else(|| self.today(name), |tensor| Ok((*tensor).clone()));
        let attachments = self.adaptation.attachments()?;
        self.write(path, |out| meganeura_import::write_artifact_with(out, &self.imported, &weight, &attachments))
    }

    /// Writes the original ONNX model with today's weights, which adapters are part of.
    ///
    /// # Errors
    /// As [`Model::save`].
    pub fn export_onnx(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let merged = |name: &str| Ok(self.adaptation.merged(name, self.today(name)?));
        self.write(path.as_ref(), |out| meganeura_import::write_onnx(out, &self.imported, &merged))
    }

    fn today(&self, name: &str) -> Result<Tensor, ImportError> {
        self.changed.get(name).cloned().map_or_else(|| self.imported.weight(name), Ok)
    }

    fn write(&self, path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<(), ImportError>) -> Result<(), Error> {
        let mut refused = None;
        let written = atomic_write(path, |file| {
            let mut out = BufWriter::new(file);
            match write(&mut out) {
                Ok(()) => out.flush(),
                Err(ImportError::Artifact(ArtifactError::Write(e))) => Err(e),
                Err(e) => {
                    refused = Some(e);
                    Err(io::ErrorKind::InvalidInput.into())
                }
            }
        });
        match refused {
            Some(e) => Err(self.import_error(e)),
            None => Ok(written?),
        }
    }

    pub(crate) fn import_error(&self, source: ImportError) -> Error {
        Error::Import { path: self.path.clone(), source: source.into() }
    }
}

/// The tensors among `inputs` that `graph` still takes as inputs, and `key` where it draws random numbers and `inputs` hold no key.
fn supplied<'a>(graph: &Graph, inputs: &[(&'a str, &'a Tensor)], key: &'a Tensor) -> Vec<(&'a str, &'a Tensor)> {
    let given = inputs.iter().any(|(name, _)| *name == RANDOM_KEY);
    let inputs = inputs.iter().copied().chain((!given).then_some((RANDOM_KEY, key)));
    inputs.filter(|(name, _)| graph.inputs().iter().any(|input| input.name == *name)).collect()
}
