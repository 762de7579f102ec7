//! Clipping of gradients.

use meganeura_ir::{BinaryOp, DType, Graph, NodeId, TensorType, UnaryOp};

use super::OptimizerError;
use crate::formula::formula;

/// Gradients after [`clip_by_global_norm`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clipped {
    /// In the order and the types of the gradients given.
    pub gradients: Vec<NodeId>,
    /// The norm before clipping, a scalar f32 (f64 where every gradient is).
    pub norm: NodeId,
}

/// `torch.nn.utils.clip_grad_norm_`: scales all gradients by `min(1, max_norm / (norm + 1e-6))`, where `norm` is the Euclidean norm of
/// all of them together.
///
/// # Errors
/// `max_norm` is negative or not finite, or a gradient is not a float.
pub fn clip_by_global_norm(g: &mut Graph, gradients: &[NodeId], max_norm: f64) -> Result<Clipped, OptimizerError> {
    if !(max_norm >= 0.0 && max_norm.is_finite()) {
        let expected = "a number of at least 0";
        return Err(OptimizerError::Attribute { optimizer: "clipping", attribute: "max_norm", value: max_norm, expected });
    }
    let wide = !gradients.is_empty() && gradients.iter().all(|&d| g.ty(d).dtype == DType::F64);
    let dtype = if wide { DType::F64 } else { DType::F32 };
    let mut total = g.splat(&TensorType::scalar(dtype), 0.0)?;
    for &gradient in gradients {
        total = formula(g, |f| {
            let [total, gradient] = f.terms([total, gradient]);
            let gradient = gradient.cast(dtype);
            total + (gradient * gradient).sum()
        })?;
    }
    let norm = g.unary(UnaryOp::Sqrt, total)?;
    let scale = formula(g, |f| {
        let [norm] = f.terms([norm]);
        (max_norm / (norm + 1e-6)).binary(BinaryOp::Min, 1.0)
    })?;
    let clip = |&gradient: &NodeId| {
        formula(g, |f| {
            let [gradient, scale] = f.terms([gradient, scale]);
            gradient * scale.splat_like(gradient)
        })
    };
    Ok(Clipped { gradients: gradients.iter().map(clip).collect::<Result<_, _>>()?, norm })
}
