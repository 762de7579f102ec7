//! The original ONNX file with today's weights.

use std::io::Write;

use crate::error::{ArtifactError, ImportError};
use crate::model::Model;
use crate::write::{ParameterData, WeightSource, rewritten, write_weight};

/// Protobuf messages end here.
const MAX_MESSAGE: u64 = i32::MAX as u64;

/// Writes the model as ONNX: every byte of the original but the data of the parameters, which `weights` supplies. Names, shapes
/// and dtypes stay; external data moves into the file. Weights are asked for one at a time, as they are written.
///
/// # Errors
/// [`ArtifactError::TooLarge`] above 2 GiB, and [`ArtifactError::Dequantized`], before anything is written; [`ArtifactError::WeightType`] if a supplied weight does
/// not have the type of the parameter; errors of `weights` and of `out`.
pub fn write_onnx(out: &mut dyn Write, model: &Model, weights: &WeightSource) -> Result<(), ImportError> {
    if let Some(name) = model.dequantized().next() {
        return Err(ArtifactError::Dequantized(name.to_owned()).into());
    }
    let rope = rewritten(model, ParameterData::Streamed)?;
    if rope.len() > MAX_MESSAGE {
        return Err(ArtifactError::TooLarge(rope.len()).into());
    }
    rope.write(out, &model.skeleton, |name, _, out| {
        let parameter = model.parameter(name).ok_or_else(|| ImportError::UnknownParameter(name.to_owned()))?;
        write_weight(parameter, weights, out)
    })
}
