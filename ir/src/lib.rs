//! The typed static graph that every stage of meganeura shares.
//!
//! A [`Graph`] is an append-only arena of interned [`Node`]s with concrete [`TensorType`]s. [`infer`] holds the type rule of each
//! [`Op`], [`Graph::verify`] checks a whole graph, the text form prints and parses it, and [`interpret`](interpreter::interpret) evaluates it in
//! `f32` or `f64`: the oracle of all tests, and the folder of constants.

pub mod attention;
mod builder;
pub mod composite;
mod dtype;
mod graph;
pub mod interpreter;
mod op;
mod parallel;
mod random;
mod samples;
mod shape;
mod split;
mod tensor;
pub mod testing;
pub mod text;
mod typing;

pub use attention::{AttentionDims, AttentionOperand};
pub use builder::{int_range, reduce_identity};
pub use composite::Composite;
pub use dtype::{DType, DTypeClass, DeviceType};
pub use graph::{
    Graph, GraphError, InputInfo, Node, NodeId, OutputInfo, ParameterInfo, ParameterRole, Update, Verified, VerifyError,
};
pub use op::{
    ArgOp, BinaryOp, CompareOp, ConvDims, DotDims, InputId, Op, PadDim, ParameterId, Real, ReduceOp, ScatterOp, SliceDim,
    UnaryOp, WindowDims,
};
pub use parallel::parallel_map;
pub use random::{random_key, random_key_type, random_key_words};
pub use samples::{SampleAxis, SampleDependence, sample_dependence};
pub use shape::{MAX_RANK, Shape, TensorType};
pub use split::{Cut, Split};
pub use tensor::{RangeError, Tensor, TensorSizeError};
pub use typing::{MAX_ELEMENTS, TypeError, gathered_shape, infer};
