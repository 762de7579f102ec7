//! What the two output formats share: parameters of the model as bytes, and tensors of a skeleton edited for writing.

use std::io::Write;

use crate::proto::TensorProto;
use meganeura_ir::{Tensor, TensorType};
use prost::Message;

use crate::error::{ArtifactError, ImportError};
use crate::model::{Model, ModelParameter};
use crate::tensor::{self, TensorError, arithmetic};
use crate::wire::{self, Edit, Locator, Part, Rope, Site};

/// Where today's value of each parameter comes from, by name: in the dtype of the file or in that of the graph (f32).
pub type WeightSource<'a> = dyn Fn(&str) -> Result<Tensor, ImportError> + 'a;

/// What stands for the data of a parameter in a rewritten model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParameterData {
    Absent,
    Streamed,
}

/// The type of a parameter in files.
pub(crate) fn stored_type(parameter: &ModelParameter) -> TensorType {
    TensorType::new(parameter.stored, parameter.shape.clone())
}

/// Writes the value of a parameter in the dtype of the file.
pub(crate) fn write_weight<W: Write + ?Sized>(
    parameter: &ModelParameter,
    weights: &WeightSource,
    out: &mut W,
) -> Result<(), ImportError> {
    let tensor = weights(&parameter.name)?;
    let expected = stored_type(parameter);
    let known = [expected.dtype, arithmetic(expected.dtype)].contains(&tensor.dtype());
    if !known || *tensor.shape() != expected.shape {
        let (name, found) = (parameter.name.clone(), tensor.ty().clone());
        return Err(ArtifactError::WeightType { name, found, expected }.into());
    }
    let tensor = if tensor.dtype() == expected.dtype { tensor } else { tensor.cast(expected.dtype) };
    out.write_all(tensor.bytes()).map_err(ArtifactError::Write)?;
    Ok(())
}

/// The model as a serialised `ModelProto` that depends on no other file, apart from the data of its parameters.
pub(crate) fn rewritten(model: &Model, data: ParameterData) -> Result<Rope, ImportError> {
    wire::rewrite(&model.skeleton, &mut |site| edit(model, site, data))
}

fn edit(model: &Model, site: &Site, data: ParameterData) -> Result<Edit, ImportError> {
    let locator = site.raw_data.as_ref().and_then(|range| Locator::from_bytes(&model.skeleton[range.clone()]));
    if let Some(parameter) = locator.as_ref().and_then(|locator| model.stored_parameter(locator.ordinal)) {
        return Ok(Edit::Replace(match data {
            ParameterData::Absent => None,
            ParameterData::Streamed => {
                Some(Part::Weight { name: parameter.name.clone(), len: stored_type(parameter).bytes() as u64 })
            }
        }));
    }
    let error = |source| {
        let name = String::from_utf8_lossy(site.name).into_owned();
        ImportError::Tensor { name, source }
    };
    if site.external {
        let proto = TensorProto::decode(site.message)?;
        // Narrow elements stay packed, as they are.
        let stored = tensor::packed(&proto).map_err(error)?.map_or(proto, |(_, packed)| packed);
        let tensor = model.storage.read(&stored).map_err(error)?;
        return Ok(Edit::Replace(Some(Part::Literal(tensor.into_bytes()))));
    }
    let Some(range) = locator.and_then(|locator| locator.range) else { return Ok(Edit::RawData(None)) };
    let bytes = model.storage.located(range).ok_or_else(|| error(TensorError::OutOfFile))?;
    Ok(Edit::RawData(Some(Part::Literal(bytes.to_vec()))))
}
