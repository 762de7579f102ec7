//! Reverse-mode differentiation, losses and optimisers, all as graph -> graph.
//!
//! [`gradients`] appends to a graph the derivative of a scalar; [`Loss`] builds that scalar from a prediction and a target;
//! [`Optimizer`] turns gradients into updates of the graph, so that a training step is one static graph:
//!
//! ```
//! use meganeura_autodiff::{Loss, Optimizer, gradients};
//! use meganeura_ir::{DType, DotDims, Graph, Op, ParameterId, ParameterInfo, ParameterRole, TensorType};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut g = Graph::new();
//! let x = g.input("x", TensorType::new(DType::F32, [8, 3]))?;
//! let target = g.input("target", TensorType::new(DType::I64, [8]))?;
//! let ty = TensorType::new(DType::F32, [3, 5]);
//! let w = g.parameter(ParameterInfo { name: "w".into(), ty, stored: DType::F32, role: ParameterRole::Weight })?;
//! let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
//! let logits = g.push(Op::Dot(dims), &[x, w])?;
//!
//! let loss = Loss::from_name("cross_entropy")?.build(&mut g, logits, Some(target))?;
//! let dw = gradients(&mut g, loss, &[w])?[0];
//! let optimizer = Optimizer::from_name("adamw")?;
//! optimizer.apply(&mut g, &[(ParameterId(0), dw)])?;
//! g.output("loss", loss)?;
//! for (input, value) in optimizer.step_inputs(1, 1e-3) {
//!     println!("{input} = {value}");
//! }
//! # Ok(())
//! # }
//! ```

mod formula;
mod losses;
mod low_rank;
mod optimizers;
mod reverse;
mod rules;
#[cfg(test)]
mod testing;

pub use losses::{Loss, LossError, TargetType};
pub use low_rank::{LowRank, MatrixError, WeightMatrix, attach_low_rank, weight_matrices};
pub use optimizers::{
    Accumulation, Clipped, EMA_PREFIX, LossScale, LossScaling, Optimizer, OptimizerError, clip_by_global_norm, ema_inputs,
    ema_value, exponential_moving_average,
};
pub use reverse::{AutodiffError, gradients, vjp};
