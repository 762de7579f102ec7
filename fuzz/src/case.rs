//! One case: what the import makes of a file.

use meganeura_import::{BindingError, Bindings, ImportError, ImportOptions, Model, Specialized, write_artifact, write_onnx};

use crate::guard;

pub enum Outcome {
    /// Not opened.
    Refused,
    /// Opened, and no graph made of it.
    NotSpecialised,
    Passed,
    /// A defect of the import.
    Finding(String),
}

impl Outcome {
    pub fn name(&self) -> &'static str {
        match self {
            Outcome::Refused => "refused",
            Outcome::NotSpecialised => "opened",
            Outcome::Passed => "passed",
            Outcome::Finding(_) => "findings",
        }
    }
}

pub fn run(file: &[u8]) -> Outcome {
    guard::caught(|| import(file)).unwrap_or_else(|panic| Outcome::Finding(format!("panic: {panic}")))
}

fn import(file: &[u8]) -> Outcome {
    let Ok(model) = Model::from_onnx(file.to_vec(), &ImportOptions::default()) else { return Outcome::Refused };
    for parameter in model.parameters() {
        if model.weight(&parameter.name).is_err() {
            return Outcome::NotSpecialised;
        }
    }
    let Ok(specialized) = specialize(&model) else { return Outcome::NotSpecialised };
    if let Err(error) = specialized.graph.verify() {
        return Outcome::Finding(format!("a graph that does not verify: {error}"));
    }
    match exported(&model) {
        Ok(()) => Outcome::Passed,
        Err(what) => Outcome::Finding(what),
    }
}

/// Specialises at small sizes wherever the model leaves them open.
fn specialize(model: &Model) -> Result<Specialized, ImportError> {
    let mut bindings = Bindings::default();
    for size in [2, 1, 3] {
        match model.specialize(&bindings) {
            Err(ImportError::Binding(BindingError::Missing(missing))) => {
                bindings.dims.extend(missing.into_iter().map(|dim| (dim.name, size)));
            }
            Err(ImportError::Binding(BindingError::MissingShape { input })) => {
                bindings.shapes.insert(input, vec![size, 3]);
            }
            result => return result,
        }
    }
    model.specialize(&bindings)
}

/// What is exported can be imported, with the same parameters.
fn exported(model: &Model) -> Result<(), String> {
    let (mut onnx, mut artifact) = (Vec::new(), Vec::new());
    let weights = |name: &str| model.weight(name);
    write_onnx(&mut onnx, model, &weights).map_err(|e| format!("no ONNX export: {e}"))?;
    let reserved = model.parameters().iter().any(|p| p.name == "__metadata__");
    if !reserved {
        write_artifact(&mut artifact, model, &weights).map_err(|e| format!("no artifact: {e}"))?;
    }
    let again = Model::from_onnx(onnx, &ImportOptions::default()).map_err(|e| format!("an export that is refused: {e}"))?;
    if again.parameters() == model.parameters() { Ok(()) } else { Err("an export with other parameters".to_owned()) }
}
