//! Derivatives of functions of one element.

use meganeura_ir::{BinaryOp, CompareOp, Graph, GraphError, NodeId, UnaryOp};

use super::Cotangent::{self, Value, Zero};
use super::{INTEGER_OPERAND, INTEGER_RESULT, rule};
use crate::formula::Operand;

/// `2 / sqrt(pi)`, the derivative of erf at 0.
const ERF_SCALE: f64 = std::f64::consts::FRAC_2_SQRT_PI;

pub(super) fn unary(g: &mut Graph, op: UnaryOp, x: NodeId, y: NodeId, dy: NodeId) -> Result<Cotangent, GraphError> {
    use UnaryOp::*;
    rule(g, |f| {
        let [x, y, dy] = f.terms([x, y, dy]);
        Ok(match op {
            Neg => -dy,
            Abs => dy * x.unary(Sign),
            Exp => dy * y,
            Log => dy / x,
            Sqrt => dy / (2.0 * y),
            Rsqrt => -0.5 * dy * y * y * y,
            Reciprocal => -dy * y * y,
            Sin => dy * x.unary(Cos),
            Cos => -dy * x.unary(Sin),
            Tan => dy * (1.0 + y * y),
            Asin => dy * (1.0 - x * x).unary(Rsqrt),
            Acos => -dy * (1.0 - x * x).unary(Rsqrt),
            Atan => dy / (1.0 + x * x),
            Sinh => dy * x.unary(Cosh),
            Cosh => dy * x.unary(Sinh),
            Tanh => dy * (1.0 - y * y),
            Asinh => dy * (x * x + 1.0).unary(Rsqrt),
            Acosh => dy * (x * x - 1.0).unary(Rsqrt),
            Atanh => dy / (1.0 - x * x),
            Sigmoid => dy * y * (1.0 - y),
            Softplus => dy * x.unary(Sigmoid),
            Erf => dy * ERF_SCALE * (-(x * x)).unary(Exp),
            Sign | Floor | Ceil | Round => return Err(Zero),
            Not | IsNan | IsInf => return Err(INTEGER_RESULT),
        })
    })
}

pub(super) fn binary(
    g: &mut Graph,
    op: BinaryOp,
    [a, b]: [NodeId; 2],
    y: NodeId,
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    use BinaryOp::*;
    let left = operand == 0;
    rule(g, |f| {
        let [a, b, y, dy] = f.terms([a, b, y, dy]);
        Ok(match op {
            Add => dy,
            Sub => {
                if left {
                    dy
                } else {
                    -dy
                }
            }
            Mul => dy * if left { b } else { a },
            Div => {
                if left {
                    dy / b
                } else {
                    -dy * y / b
                }
            }
            // a - b * trunc(a / b)
            Rem => {
                if left {
                    dy
                } else {
                    -dy * ((a - y) / b).unary(UnaryOp::Round)
                }
            }
            // Where b = 0, and where a = 0 <= b, the limits are 0 and the formulas give 0 * inf.
            Pow if left => b.compare(CompareOp::Ne, 0.0).select(dy * b * a.binary(Pow, b - 1.0), 0.0),
            Pow => {
                let curved = a.compare(CompareOp::Ne, 0.0).binary(Or, b.compare(CompareOp::Lt, 0.0));
                curved.select(dy * y * a.unary(UnaryOp::Log), 0.0)
            }
            // Half to each of equal operands, as torch.maximum.
            Max | Min => {
                let loses = if (op == Max) == left { CompareOp::Lt } else { CompareOp::Gt };
                let shared = a.compare(CompareOp::Eq, b).select(0.5 * dy, dy);
                a.compare(loses, b).select(0.0.like(dy), shared)
            }
            And | Or | Xor => return Err(INTEGER_RESULT),
        })
    })
}

pub(super) fn select(g: &mut Graph, condition: NodeId, dy: NodeId, operand: usize) -> Result<Cotangent, GraphError> {
    let zero = g.constant_like(dy, 0.0)?;
    match operand {
        1 => g.select(condition, dy, zero).map(Value),
        2 => g.select(condition, zero, dy).map(Value),
        _ => Ok(INTEGER_OPERAND),
    }
}

/// Between floats; integers have no cotangents.
pub(super) fn cast(g: &mut Graph, x: NodeId, dy: NodeId) -> Result<Cotangent, GraphError> {
    let (from, to) = (g.ty(x).dtype, g.ty(dy).dtype);
    match (from.is_float(), to.is_float()) {
        (true, true) => g.cast(dy, from).map(Value),
        (false, _) => Ok(INTEGER_OPERAND),
        (_, false) => Ok(INTEGER_RESULT),
    }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::{DType, Op, Tensor};

    use super::*;
    use crate::testing::{assert_close, check, graph_of, grid, input_cotangents, reals};

    /// An interval without kinks on which the function is defined; none where the result is no float.
    fn domain(op: UnaryOp) -> Option<(f64, f64)> {
        use UnaryOp::*;
        match op {
            Neg | Exp | Sin | Cos | Atan | Sinh | Cosh | Tanh | Asinh | Sigmoid | Softplus | Erf => Some((-3.0, 3.0)),
            Tan => Some((-1.3, 1.3)),
            Asin | Acos | Atanh => Some((-0.9, 0.9)),
            Abs | Sign => Some((-2.0, 2.0)),
            Log | Sqrt | Rsqrt | Reciprocal => Some((0.2, 3.0)),
            Acosh => Some((1.2, 4.0)),
            Floor | Ceil => Some((1.05, 1.95)),
            Round => Some((0.55, 1.45)),
            Not | IsNan | IsInf => None,
        }
    }

    #[test]
    fn every_unary_derivative_is_the_limit_of_differences() {
        for &op in UnaryOp::ALL {
            let Some((low, high)) = domain(op) else { continue };
            for shape in [vec![], vec![3, 7], vec![0, 3]] {
                check(op.name(), &[grid(shape, low, high)], |g, x| g.unary(op, x[0]));
            }
        }
    }

    #[test]
    fn every_binary_derivative_is_the_limit_of_differences() {
        use BinaryOp::*;
        for &op in BinaryOp::ALL {
            let (a, b) = match op {
                And | Or | Xor => continue,
                Pow => ((0.2, 2.0), (-2.0, 2.0)),
                _ => ((-3.0, 3.1), (0.4, 2.9)),
            };
            for shape in [vec![], vec![3, 5], vec![0, 3]] {
                check(op.name(), &[grid(shape.clone(), a.0, a.1), grid(shape, b.0, b.1)], |g, x| g.binary(op, x[0], x[1]));
            }
        }
    }

    #[test]
    fn an_operand_used_twice_gets_both_cotangents() {
        check("x * x", &[grid([5], -1.0, 1.0)], |g, x| g.mul(x[0], x[0]));
    }

    #[test]
    fn select_passes_the_side_taken() {
        check("select", &[grid([2, 3], -1.0, 1.0), grid([2, 3], -2.0, 1.0), grid([2, 3], -1.0, 2.0)], |g, x| {
            let zero = g.constant_like(x[0], 0.0)?;
            let positive = g.compare(CompareOp::Gt, x[0], zero)?;
            g.select(positive, x[1], x[2])
        });
    }

    #[test]
    fn casts_between_floats_pass_the_cotangent_and_integers_stop_it() {
        let x = grid([4], -3.0, 3.0);
        let (g, y) = graph_of(std::slice::from_ref(&x), |g, x| g.cast(x[0], DType::F32));
        let (direct, same) = graph_of(std::slice::from_ref(&x), |g, x| g.unary(UnaryOp::Neg, x[0]));
        let cast = input_cotangents(&g, y, std::slice::from_ref(&x));
        let negated = input_cotangents(&direct, same, std::slice::from_ref(&x));
        assert_close("cast", &cast[0], &negated[0].iter().map(|v| -v).collect::<Vec<_>>(), 1e-6);

        let (g, y) = graph_of(std::slice::from_ref(&x), |g, x| {
            let truncated = g.cast(x[0], DType::I32)?;
            g.cast(truncated, DType::F64)
        });
        assert_eq!(input_cotangents(&g, y, &[x])[0], [0.0; 4]);
    }

    /// The cotangents of both operands of `op` at `a`, `b`, for a cotangent of 1.
    fn slopes(op: BinaryOp, a: f64, b: f64) -> (f64, f64) {
        let tensors: Vec<Tensor> = vec![reals([], &[a]), reals([], &[b])];
        let (mut g, y) = graph_of(&tensors, |g, x| g.push(Op::Binary(op), x));
        let wrt = crate::testing::float_inputs(&mut g);
        let d = crate::gradients(&mut g, y, &wrt).unwrap();
        let values = crate::testing::evaluate(&g, &tensors, &d);
        (values[0][0], values[1][0])
    }

    #[test]
    fn ties_and_limits_are_those_of_pytorch() {
        assert_eq!(slopes(BinaryOp::Max, 2.0, 2.0), (0.5, 0.5));
        assert_eq!(slopes(BinaryOp::Min, 2.0, 2.0), (0.5, 0.5));
        assert_eq!(slopes(BinaryOp::Max, 2.0, 1.0), (1.0, 0.0));
        assert_eq!(slopes(BinaryOp::Min, 2.0, 1.0), (0.0, 1.0));
        assert_eq!(slopes(BinaryOp::Pow, 0.0, 0.0), (0.0, 0.0));
        assert_eq!(slopes(BinaryOp::Pow, 0.0, 2.0), (0.0, 0.0));
        assert_eq!(slopes(BinaryOp::Pow, -3.0, 2.0).0, -6.0);
        assert_eq!(slopes(BinaryOp::Rem, -7.0, 2.0), (1.0, 3.0));
    }
}
