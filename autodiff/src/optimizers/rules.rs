//! The formulas: what each optimiser keeps of a weight's gradients, and the direction that it takes from them.

use meganeura_ir::{
    BinaryOp, Graph, GraphError, NodeId, Op, ParameterId, ParameterInfo, ParameterRole, ReduceOp, TensorType, UnaryOp,
};

use super::{OptimizerError, info, input, input_name, scalar};
use crate::formula::{Term, formula};

/// One weight while its update is built.
pub(super) struct Weight<'g> {
    g: &'g mut Graph,
    id: ParameterId,
    group: usize,
    /// Numbers of the step that the graph computes; others are inputs.
    scalars: &'g [(&'static str, NodeId)],
    ty: TensorType,
    /// What the step will start from.
    p: NodeId,
    pub(super) gradient: NodeId,
}

impl<'g> Weight<'g> {
    pub(super) fn new(
        g: &'g mut Graph,
        id: ParameterId,
        gradient: NodeId,
        group: usize,
        scalars: &'g [(&'static str, NodeId)],
    ) -> Result<Self, OptimizerError> {
        let ty = info(g, id)?.ty.clone();
        let p = g.push(Op::Parameter(id), &[])?;
        Ok(Weight { g, id, group, scalars, ty, p, gradient })
    }

    fn scalar(&mut self, name: &str) -> Result<NodeId, GraphError> {
        match self.scalars.iter().find(|(given, _)| *given == name) {
            Some((_, node)) => Ok(*node),
            None => scalar(self.g, &input_name(name, self.group)),
        }
    }

    /// State of the weight's type without `axes`.
    fn state_without(&mut self, quantity: &str, axes: &[usize]) -> Result<(ParameterId, NodeId), OptimizerError> {
        let info = info(self.g, self.id)?;
        let ty = TensorType::new(info.ty.dtype, info.ty.shape.without(axes));
        Ok(state(self.g, format!("optimizer/{quantity}/{}", info.name), ty)?)
    }

    fn state(&mut self, quantity: &str) -> Result<(ParameterId, NodeId), OptimizerError> {
        self.state_without(quantity, &[])
    }

    /// State that `next` replaces, which is given the state and the gradient.
    fn moving(
        &mut self,
        quantity: &str,
        next: impl for<'f> FnOnce(Term<'f>, Term<'f>) -> Term<'f>,
    ) -> Result<NodeId, OptimizerError> {
        let (id, value) = self.state(quantity)?;
        let gradient = self.gradient;
        let next = formula(self.g, |f| {
            let [value, gradient] = f.terms([value, gradient]);
            next(value, gradient)
        })?;
        self.g.update(id, next)?;
        Ok(next)
    }

    /// `gradient + weight_decay * p`
    pub(super) fn decay_gradient(&mut self, weight_decay: f64) -> Result<(), OptimizerError> {
        if weight_decay != 0.0 {
            let (p, gradient) = (self.p, self.gradient);
            self.gradient = formula(self.g, |f| {
                let [p, gradient] = f.terms([p, gradient]);
                gradient + weight_decay * p
            })?;
        }
        Ok(())
    }

    /// `shrink * p`
    pub(super) fn shrink(&mut self) -> Result<(), OptimizerError> {
        let (p, shrink) = (self.p, self.scalar(input::SHRINK)?);
        self.p = formula(self.g, |f| {
            let [p, shrink] = f.terms([p, shrink]);
            p * shrink.splat_like(p)
        })?;
        Ok(())
    }

    /// The update `p - size * direction`, where `size` names an input.
    pub(super) fn step(&mut self, size: &str, direction: NodeId) -> Result<(), OptimizerError> {
        let (p, size) = (self.p, self.scalar(size)?);
        let next = formula(self.g, |f| {
            let [p, size, direction] = f.terms([p, size, direction]);
            p - size.splat_like(direction) * direction
        })?;
        Ok(self.g.update(self.id, next)?)
    }

    /// `buffer = momentum * buffer + (1 - dampening) * gradient` (at the first step the gradient itself), and with Nesterov
    /// `gradient + momentum * buffer`.
    pub(super) fn momentum(&mut self, momentum: f64, dampening: f64, nesterov: bool) -> Result<NodeId, OptimizerError> {
        let gradient = self.gradient;
        let added = match dampening {
            0.0 => gradient,
            _ => {
                let weight = self.scalar(input::GRADIENT_WEIGHT)?;
                formula(self.g, |f| {
                    let [weight, gradient] = f.terms([weight, gradient]);
                    weight.splat_like(gradient) * gradient
                })?
            }
        };
        let (id, buffer) = self.state("momentum_buffer")?;
        let buffer = formula(self.g, |f| {
            let [buffer, added] = f.terms([buffer, added]);
            momentum * buffer + added
        })?;
        self.g.update(id, buffer)?;
        if !nesterov {
            return Ok(buffer);
        }
        Ok(formula(self.g, |f| {
            let [buffer, gradient] = f.terms([buffer, gradient]);
            gradient + momentum * buffer
        })?)
    }

    /// `m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon)` with the moving averages `m` of the gradient and `v` of its square, or the largest
    /// `v` so far.
    pub(super) fn adam(&mut self, [beta1, beta2]: [f64; 2], epsilon: f64, amsgrad: bool) -> Result<NodeId, OptimizerError> {
        let m = self.moving("exp_avg", |m, gradient| m + (1.0 - beta1) * (gradient - m))?;
        let mut v = self.moving("exp_avg_sq", |v, gradient| beta2 * v + (1.0 - beta2) * gradient * gradient)?;
        if amsgrad {
            let (id, largest) = self.state("max_exp_avg_sq")?;
            v = self.g.binary(BinaryOp::Max, largest, v)?;
            self.g.update(id, v)?;
        }
        let correction = self.scalar(input::BIAS_CORRECTION)?;
        Ok(formula(self.g, |f| {
            let [m, v, correction] = f.terms([m, v, correction]);
            m / (v.unary(UnaryOp::Sqrt) / correction.splat_like(v) + epsilon)
        })?)
    }

    /// `sign(beta1 * m + (1 - beta1) * gradient)`, then `m = beta2 * m + (1 - beta2) * gradient`.
    pub(super) fn lion(&mut self, [beta1, beta2]: [f64; 2]) -> Result<NodeId, OptimizerError> {
        let (id, m) = self.state("exp_avg")?;
        let gradient = self.gradient;
        let mix = |g: &mut Graph, beta: f64| {
            formula(g, |f| {
                let [m, gradient] = f.terms([m, gradient]);
                beta * m + (1.0 - beta) * gradient
            })
        };
        let next = mix(self.g, beta2)?;
        self.g.update(id, next)?;
        let direction = mix(self.g, beta1)?;
        Ok(self.g.unary(UnaryOp::Sign, direction)?)
    }

    /// `gradient / (sqrt(v) + epsilon)` with the moving average `v` of the gradient's square, less the square of its mean if `centered`;
    /// with momentum the buffer of these.
    pub(super) fn rmsprop(&mut self, alpha: f64, epsilon: f64, momentum: f64, centered: bool) -> Result<NodeId, OptimizerError> {
        let mut v = self.moving("square_avg", |v, gradient| alpha * v + (1.0 - alpha) * gradient * gradient)?;
        if centered {
            let mean = self.moving("grad_avg", |mean, gradient| mean + (1.0 - alpha) * (gradient - mean))?;
            // Rounding can make a variance of zero negative.
            v = formula(self.g, |f| {
                let [v, mean] = f.terms([v, mean]);
                (v - mean * mean).binary(BinaryOp::Max, 0.0)
            })?;
        }
        let gradient = self.gradient;
        self.gradient = formula(self.g, |f| {
            let [v, gradient] = f.terms([v, gradient]);
            gradient / (v.unary(UnaryOp::Sqrt) + epsilon)
        })?;
        match momentum {
            0.0 => Ok(self.gradient),
            _ => self.moving("momentum_buffer", |buffer, direction| momentum * buffer + direction),
        }
    }

    /// `gradient / (sqrt(initial + sum) + epsilon)` with the sum of the gradient's squares.
    pub(super) fn adagrad(&mut self, initial: f64, epsilon: f64) -> Result<NodeId, OptimizerError> {
        let sum = self.moving("sum", |sum, gradient| sum + gradient * gradient)?;
        let gradient = self.gradient;
        Ok(formula(self.g, |f| {
            let [sum, gradient] = f.terms([sum, gradient]);
            gradient / ((initial + sum).unary(UnaryOp::Sqrt) + epsilon)
        })?)
    }

    /// `max(epsilon2, rms(p)) * update / max(1, rms(update) / threshold)` with `update = gradient / sqrt(variance)`.
    pub(super) fn adafactor(&mut self, [epsilon1, epsilon2]: [f64; 2], threshold: f64) -> Result<NodeId, OptimizerError> {
        let variance = self.factored_variance(epsilon1)?;
        let (p, gradient) = (self.p, self.gradient);
        Ok(formula(self.g, |f| {
            let [variance, p, gradient] = f.terms([variance, p, gradient]);
            let update = gradient * variance.binary(BinaryOp::Max, epsilon1 * epsilon1).unary(UnaryOp::Rsqrt);
            let clipped = (rms(update) / threshold).binary(BinaryOp::Max, 1.0);
            let scale = rms(p).binary(BinaryOp::Max, epsilon2) / clipped;
            scale.splat_like(update) * update
        })?)
    }

    /// The estimate of the gradient's mean square: of matrices and their batches, the product of row and column means over the mean of
    /// rows; of others, the moving average itself.
    fn factored_variance(&mut self, epsilon: f64) -> Result<NodeId, OptimizerError> {
        let (shape, rank) = (self.ty.shape.clone(), self.ty.shape.rank());
        if rank < 2 {
            return self.averaged_square("variance", &[]);
        }
        let rows = self.averaged_square("row_var", &[rank - 1])?;
        let columns = self.averaged_square("col_var", &[rank - 2])?;
        Ok(formula(self.g, |f| {
            let [rows, columns] = f.terms([rows, columns]);
            let mean = rows.mean_keep(&[rank - 2]).binary(BinaryOp::Max, epsilon);
            rows.broadcast_without(&shape, &[rank - 1]) * columns.broadcast_without(&shape, &[rank - 2])
                / mean.broadcast_without(&shape, &[rank - 1])
        })?)
    }

    /// `v + w * (mean(gradient^2) - v)` with the mean over `axes`, which disappear, and the weight `w` of the step.
    fn averaged_square(&mut self, quantity: &str, axes: &[usize]) -> Result<NodeId, OptimizerError> {
        let weight = self.scalar(input::VARIANCE_WEIGHT)?;
        let (id, v) = self.state_without(quantity, axes)?;
        let count: usize = axes.iter().map(|&axis| self.ty.shape[axis]).product();
        let gradient = self.gradient;
        let next = formula(self.g, |f| {
            let [v, weight, gradient] = f.terms([v, weight, gradient]);
            let square = (gradient * gradient).reduce(ReduceOp::Sum, axes) / count as f64;
            v + weight.splat_like(v) * (square - v)
        })?;
        self.g.update(id, next)?;
        Ok(next)
    }
}

/// The root of the mean square.
fn rms(x: Term) -> Term {
    (x * x).mean().unary(UnaryOp::Sqrt)
}

/// State of the optimiser, zero before the first step.
pub(super) fn state(g: &mut Graph, name: String, ty: TensorType) -> Result<(ParameterId, NodeId), GraphError> {
    let stored = ty.dtype;
    let node = g.parameter(ParameterInfo { name, ty, stored, role: ParameterRole::Optimizer })?;
    Ok((ParameterId(g.parameters().len() as u32 - 1), node))
}
