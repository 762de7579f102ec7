use super::{Samples, f32s, is_unsigned, typed};
use crate::{BinaryOp, CompareOp, DType, DTypeClass, Graph, GraphError, NodeId, Op, Shape, Tensor, TensorType, UnaryOp, infer};

const SHAPES: [&[usize]; 6] = [&[257], &[7, 33], &[1], &[], &[0, 7], &[3, 1, 5]];

pub(super) fn add(samples: &mut Samples) {
    unary(samples);
    binary(samples);
    special(samples);
    compare(samples);
    select(samples);
    cast(samples);
}

/// The shapes to test at: one for most dtypes, all of them for f32.
fn shapes(dtype: DType) -> &'static [&'static [usize]] {
    if dtype == DType::F32 { &SHAPES } else { &SHAPES[1..2] }
}

fn unary(samples: &mut Samples) {
    for &op in UnaryOp::ALL {
        for dtype in DType::ALL {
            let negative = matches!(op, UnaryOp::Neg | UnaryOp::Not);
            if infer(&Op::Unary(op), &[&TensorType::scalar(dtype)]).is_err() || dtype == DType::U64 && negative {
                continue;
            }
            for (i, shape) in shapes(dtype).iter().enumerate() {
                // Functions differ in their loads and stores no more than any two shapes do.
                if i >= 2 && op as usize % 4 + 2 != i {
                    continue;
                }
                let ty = typed(dtype, shape);
                samples.add(format!("{} {ty}", op.name()), &[ty], |g, x| {
                    let x = in_domain(g, op, x[0])?;
                    g.unary(op, x)
                });
            }
        }
    }
}

/// Maps -2..2 into the domain of `op`, away from its poles.
fn in_domain(g: &mut Graph, op: UnaryOp, x: NodeId) -> Result<NodeId, GraphError> {
    match op {
        UnaryOp::Log | UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Reciprocal => {
            let x = g.unary(UnaryOp::Abs, x)?;
            g.shift(x, 0.25)
        }
        UnaryOp::Acosh => {
            let x = g.unary(UnaryOp::Abs, x)?;
            g.shift(x, 1.25)
        }
        UnaryOp::Asin | UnaryOp::Acos | UnaryOp::Atanh => g.scale(x, 0.375),
        UnaryOp::Tan => g.scale(x, 0.5),
        UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => g.scale(x, 3.0),
        UnaryOp::IsNan | UnaryOp::IsInf => with_specials(g, x),
        _ => Ok(x),
    }
}

/// `x` flattened, followed by NaN, both infinities, both zeros and a number.
fn with_specials(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let ty = g.ty(x).clone();
    let flat = g.reshape(x, [ty.shape.numel()])?;
    let specials = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.5];
    let specials = g.constant(Tensor::from_f64(ty.dtype, [specials.len()], &specials))?;
    g.push(Op::Concat { axis: 0 }, &[flat, specials])
}

fn binary(samples: &mut Samples) {
    for &op in BinaryOp::ALL {
        for dtype in DType::ALL {
            let scalar = TensorType::scalar(dtype);
            if infer(&Op::Binary(op), &[&scalar, &scalar]).is_err() || dtype == DType::U64 && op == BinaryOp::Sub {
                continue;
            }
            for shape in shapes(dtype) {
                let ty = typed(dtype, shape);
                samples.add(format!("{} {ty}", op.name()), &[ty.clone(), ty.clone()], |g, x| {
                    let (a, b) = match (op, dtype.is_float()) {
                        (BinaryOp::Div | BinaryOp::Rem, true) => (x[0], away_from_zero(g, x[1])?),
                        (BinaryOp::Pow, true) => (away_from_zero(g, x[0])?, x[1]),
                        // Negative exponents of integers leave the integers.
                        (BinaryOp::Pow, false) => (x[0], g.unary(UnaryOp::Abs, x[1])?),
                        _ => (x[0], x[1]),
                    };
                    g.binary(op, a, b)
                });
            }
        }
        if !matches!(op, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Pow) {
            samples.add(format!("{} of a scalar, broadcast", op.name()), &[f32s(&[7, 33]), f32s(&[])], |g, x| {
                let (a, b) = g.broadcast_pair(x[0], x[1])?;
                let b = away_from_zero(g, b)?;
                g.binary(op, a, b)
            });
        }
    }
}

/// NaN beside literals, which compilers know not to be NaN.
fn special(samples: &mut Samples) {
    for op in [BinaryOp::Max, BinaryOp::Min] {
        samples.add(format!("{} of NaN and a literal", op.name()), &[f32s(&[33])], |g, x| {
            let x = with_specials(g, x[0])?;
            let bound = g.constant_like(x, 0.75)?;
            let y = g.binary(op, x, bound)?;
            g.unary(UnaryOp::IsNan, y)
        });
    }
}

fn away_from_zero(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let x = g.unary(UnaryOp::Abs, x)?;
    g.shift(x, 0.5)
}

fn compare(samples: &mut Samples) {
    for &op in CompareOp::ALL {
        for dtype in DType::ALL {
            let ty = typed(dtype, &[7, 33]);
            samples.add(format!("{} {ty}", op.name()), &[ty.clone(), ty], |g, x| match dtype.class() {
                // Rounded, so that some are equal.
                DTypeClass::Float => {
                    let (a, b) = (g.unary(UnaryOp::Round, x[0])?, g.unary(UnaryOp::Round, x[1])?);
                    g.compare(op, a, b)
                }
                _ => g.compare(op, x[0], x[1]),
            });
        }
        for shape in [&[][..], &[0, 3], &[257]] {
            let ty = f32s(shape);
            samples.add(format!("{} {ty}", op.name()), &[ty.clone(), ty], |g, x| g.compare(op, x[0], x[1]));
        }
    }
}

fn select(samples: &mut Samples) {
    for dtype in DType::ALL {
        for shape in shapes(dtype) {
            let (condition, ty) = (typed(DType::Bool, shape), typed(dtype, shape));
            samples.add(format!("select {ty}"), &[condition, ty.clone(), ty], |g, x| g.select(x[0], x[1], x[2]));
        }
    }
    samples.add("select past a NaN".into(), &[f32s(&[33])], |g, x| {
        let nan = g.constant_like(x[0], f64::NAN)?;
        let zero = g.constant_like(x[0], 0.0)?;
        let positive = g.compare(CompareOp::Gt, x[0], zero)?;
        g.select(positive, x[0], nan).and_then(|y| g.select(positive, y, zero))
    });
}

fn cast(samples: &mut Samples) {
    for from in DType::ALL {
        for to in DType::ALL {
            let ty = typed(from, &[7, 5]);
            samples.add(format!("cast {ty} to {to}"), &[ty], |g, x| {
                // Negative numbers have no unsigned form.
                let x = match from.class() {
                    DTypeClass::Bool => x[0],
                    _ if is_unsigned(to) && !is_unsigned(from) => g.unary(UnaryOp::Abs, x[0])?,
                    _ => x[0],
                };
                g.push(Op::Cast(to), &[x])
            });
        }
    }
    for shape in SHAPES {
        let ty = TensorType::new(DType::I32, Shape::from(shape));
        samples.add(format!("cast {ty} to f32"), &[ty], |g, x| g.cast(x[0], DType::F32));
    }
}
