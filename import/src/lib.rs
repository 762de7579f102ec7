//! ONNX import for meganeura: from a file to a typed static graph, and back to files.
//!
//! [`Model::open`] reads an `.onnx` file, or the artifact that [`write_artifact`] made of one. The file is mapped; a scan of the
//! protobuf wire format (`wire`) records where tensor data lies and leaves it there, the messages of `proto` decode the rest, and
//! `flatten` expands the model's own functions, `check` and `roles` establish names, order, and which tensors are parameters. [`Model::specialize`] binds symbolic sizes and
//! builds a [`meganeura_ir::Graph`] by the table in `ops`, folding constants on the way.
//! [`write_onnx`] and [`write_artifact`] put today's weights into the original file or into safetensors, streaming.
//!
//! No path from a file panics: malformed input is an [`ImportError`].

mod artifact;
mod body;
mod buffers;
mod check;
mod context;
mod dequantize;
mod dims;
mod error;
mod export;
mod external;
mod flatten;
mod fold;
mod head;
mod limits;
mod model;
mod narrow;
mod ops;
mod outline;
mod phase;
mod proto;
mod roles;
mod schema;
mod sharing;
mod sparse;
mod specialize;
mod tensor;
mod value;
mod values;
mod wire;
mod write;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use artifact::{Attachments, write_artifact, write_artifact_with};
pub use error::{
    ArtifactError, AttributeError, BindingError, ImportError, MissingDim, NodeName, OpError, StructureError, UnsupportedOp,
    Warning,
};
pub use export::write_onnx;
pub use head::{Head, HeadError, HeadTensor};
pub use limits::{Limit, LimitError, LimitSettingError, Limits};
pub use model::{Dim, ImportOptions, Model, ModelInput, ModelOutput, ModelParameter};
pub use outline::{Outline, ValueKind};
pub use phase::{Mode, Phase, RANDOM_KEY};
pub use sharing::Copies;
pub use specialize::{Bindings, Specialized};
pub use tensor::{TensorError, read_tensor};
pub use wire::WireError;
pub use write::WeightSource;

/// Domain and name of every operator that the import knows. The standard domain is the empty one.
pub fn operators() -> impl Iterator<Item = (&'static str, &'static str)> {
    ops::table()
}
