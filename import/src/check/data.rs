//! The data of stored tensors: there, within the limits, and as long as the shapes say. None of it is read.

use std::collections::{BTreeMap, HashSet};

use crate::artifact::Artifact;
use crate::dequantize::Dequantized;
use crate::error::ImportError;
use crate::limits::Limit;
use crate::model::ModelParameter;
use crate::proto::{GraphProto, TensorProto};
use crate::tensor::{Storage, TensorError};
use crate::write::stored_type;

/// Where a model keeps its tensors.
pub(crate) struct Stored<'a> {
    pub graph: &'a GraphProto,
    pub parameters: &'a [ModelParameter],
    /// The tensor of each parameter.
    pub stored: &'a [TensorProto],
    pub dequantized: Option<&'a BTreeMap<String, Dequantized>>,
    pub storage: &'a Storage,
    pub artifact: Option<&'a Artifact>,
}

impl Stored<'_> {
    /// Checks parameters, and those of the other initializers that are `needed`.
    pub fn check(&self, needed: &HashSet<&str>) -> Result<(), ImportError> {
        let mut total = 0u64;
        for (parameter, proto) in self.parameters.iter().zip(self.stored) {
            self.parameter(parameter, proto).map_err(|source| ImportError::Tensor { name: parameter.name.clone(), source })?;
            total = total.saturating_add(stored_type(parameter).bytes() as u64);
        }
        let parameters: HashSet<&str> = self.parameters.iter().map(|p| p.name.as_str()).collect();
        for proto in self.graph.graphs().into_iter().flat_map(|g| &g.initializer) {
            let name = proto.name.as_str();
            if needed.contains(name) && !parameters.contains(name) {
                let checked = self.storage.check(proto);
                let ty = checked.map_err(|source| ImportError::Tensor { name: name.to_owned(), source })?;
                total = total.saturating_add(ty.bytes() as u64);
            }
        }
        Ok(self.storage.limits().check(Limit::WeightBytes, total)?)
    }

    fn parameter(&self, parameter: &ModelParameter, proto: &TensorProto) -> Result<(), TensorError> {
        let stored_as_floats = self.artifact.is_some_and(|artifact| artifact.dequantized);
        if let (Some(recipe), false) = (self.dequantized.and_then(|recipes| recipes.get(&parameter.name)), stored_as_floats) {
            return recipe.initializers().iter().try_for_each(|proto| self.initializer(proto));
        }
        if let Some(artifact) = self.artifact {
            return artifact.bytes(parameter).map(|_| ());
        }
        self.storage.check(proto).map(|_| ())
    }

    /// What a dequantised weight follows from: in the artifact where that holds it, in the model otherwise.
    fn initializer(&self, proto: &TensorProto) -> Result<(), TensorError> {
        match self.artifact {
            Some(artifact) if artifact.holds(&proto.name) => Ok(()),
            _ => self.storage.check(proto).map(|_| ()),
        }
    }
}
