//! Adapters as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json` in one folder.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::path::Path;

use meganeura_ir::{DType, Shape, Tensor};
use meganeura_runtime::{CheckpointError, atomic_write};
use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::lora::Adapter;
use crate::model::Model;
use crate::tensor_file::write_tensors;

/// What PEFT puts before the name of a layer.
const PREFIX: &str = "base_model.model.";

/// Why adapters have no form in PEFT.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeftError {
    #[error("the model has no adapters: train it with --lora")]
    NoAdapters,
    #[error(
        "PEFT has no adapter that fits {0:?}: it is the kernel of a convolution of several groups; export merged weights instead"
    )]
    Groups(String),
    #[error(
        "PEFT has no adapter that fits {0:?}: it is neither a matrix nor the kernel of a convolution; export merged weights instead"
    )]
    Layer(String),
    #[error("PEFT has no adapter that fits {0:?}: more than one kind of layer reads it; export merged weights instead")]
    Shared(String),
    #[error("{name:?} was trained with the adapters, and PEFT keeps whole layers: {reason}; export merged weights instead")]
    Trained { name: String, reason: &'static str },
}

impl Model {
    /// Writes the adapters into a folder, for `peft.PeftModel.from_pretrained`: names and layout are PEFT's, for a PyTorch model whose layers
    /// have the names of this model's weights. Layers that were trained as a whole with them go along.
    ///
    /// # Errors
    /// [`PeftError`], or the files cannot be written.
    pub fn export_peft(&self, folder: impl AsRef<Path>) -> Result<(), Error> {
        let folder = folder.as_ref();
        let adapters = self.adapters();
        if adapters.is_empty() {
            return Err(PeftError::NoAdapters.into());
        }
        for adapter in adapters {
            let name = || adapter.weight().to_owned();
            if adapter.matrix().has_other_readers() {
                return Err(PeftError::Shared(name()).into());
            }
            match adapter.matrix().groups() {
                Some(1) => {}
                Some(_) => return Err(PeftError::Groups(name()).into()),
                None if adapter.matrix().shape().rank() == 2 => {}
                None => return Err(PeftError::Layer(name()).into()),
            }
        }
        let layers = self.trained_layers(adapters)?;
        let factors = adapters.iter().flat_map(Adapter::factors);
        let mut tensors: BTreeMap<String, Tensor> = factors.map(|(name, t)| (format!("{PREFIX}{name}"), t.clone())).collect();
        for parameter in self.parameters() {
            if parameter.name.rsplit_once('.').is_some_and(|(layer, _)| layers.contains(layer)) {
                tensors.insert(format!("{PREFIX}{}", parameter.name), self.weight(&parameter.name)?);
            }
            // PyTorch's norms count batches too; ONNX has no such number.
            if let Some(layer) = parameter.name.strip_suffix(".running_mean").filter(|layer| layers.contains(layer)) {
                let count = Tensor::from_i64(DType::I64, Shape::scalar(), &[0]);
                tensors.insert(format!("{PREFIX}{layer}.num_batches_tracked"), count);
            }
        }
        let base = self.imported().source().map(str::to_owned).unwrap_or_else(|| self.path().display().to_string());
        let config = config(adapters, &layers, &base);
        let failed = |source| CheckpointError { action: "make the folder", path: folder.to_path_buf(), source };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        write_tensors(&folder.join("adapter_model.safetensors"), &tensors, metadata)?;
        atomic_write(folder.join("adapter_config.json"), |file| writeln!(file, "{config:#}"))?;
        Ok(())
    }

    /// Layers of parameters that trained with the adapters.
    fn trained_layers(&self, adapters: &[Adapter]) -> Result<BTreeSet<&str>, PeftError> {
        let layer = |name: &'_ String| {
            let refuse = |reason| PeftError::Trained { name: name.clone(), reason };
            let known = self.parameters().iter().find(|p| p.name == *name);
            let (layer, _) = known.and_then(|p| p.name.rsplit_once('.')).ok_or_else(|| refuse("its name names none"))?;
            match adapters.iter().any(|adapter| adapter.module() == layer) {
                true => Err(refuse("its layer has an adapter too")),
                false => Ok(layer),
            }
        };
        self.trained_with_adapters().iter().map(layer).collect()
    }
}

/// `adapter_config.json`.
fn config(adapters: &[Adapter], layers: &BTreeSet<&str>, base: &str) -> Value {
    let settings: Vec<(usize, f64)> = adapters.iter().map(|adapter| (adapter.rank(), adapter.alpha())).collect();
    let count = |setting: &(usize, f64)| settings.iter().filter(|other| *other == setting).count();
    let (rank, alpha) = settings.iter().copied().max_by_key(count).unwrap_or((1, 1.0));
    let pattern = |value: &dyn Fn(&Adapter) -> Option<Value>| -> Map<String, Value> {
        adapters.iter().filter_map(|adapter| Some((format!("^{}", escaped(adapter.module())), value(adapter)?))).collect()
    };
    let alpha_value = |alpha: f64| if alpha.fract() == 0.0 && alpha.abs() < 1e15 { json!(alpha as i64) } else { json!(alpha) };
    let modules_to_save: Vec<&&str> = layers.iter().collect();
    json!({
        "peft_type": "LORA",
        "task_type": null,
        "base_model_name_or_path": base,
        "auto_mapping": null,
        "revision": null,
        "inference_mode": true,
        "r": rank,
        "lora_alpha": alpha_value(alpha),
        "lora_dropout": 0.0,
        "target_modules": adapters.iter().map(Adapter::module).collect::<Vec<_>>(),
        "modules_to_save": if layers.is_empty() { Value::Null } else { json!(modules_to_save) },
        "rank_pattern": pattern(&|a| (a.rank() != rank).then(|| json!(a.rank()))),
        "alpha_pattern": pattern(&|a| (a.alpha() != alpha).then(|| alpha_value(a.alpha()))),
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "use_rslora": false,
        "use_dora": false,
        "layers_to_transform": null,
        "layers_pattern": null,
    })
}

/// A name as a regular expression that matches it.
fn escaped(name: &str) -> String {
    let special = |c: char| !(c.is_alphanumeric() || c == '_');
    name.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}
