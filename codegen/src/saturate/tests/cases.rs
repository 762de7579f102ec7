//! For each rule of [`RULES`](super::super::rules::RULES): a graph in which it fires, and one, as close as possible, in which it must not.

use meganeura_ir::{BinaryOp::*, Composite, DType, Op, ReduceOp, UnaryOp::*};

#[rustfmt::skip]
cases! {
    "transpose-identity": |g| { let x = g.x(&[2, 3]); g.transpose(x, &[0, 1]) },
        not { let x = g.x(&[3, 3]); g.transpose(x, &[1, 0]) };
    "reshape-identity": |g| { let x = g.x(&[2, 3]); g.reshape(x, &[2, 3]) },
        not { let x = g.x(&[2, 3]); g.reshape(x, &[3, 2]) };
    "broadcast-identity": |g| { let x = g.x(&[2, 3]); g.broadcast(x, &[2, 3], &[0, 1]) },
        not { let x = g.x(&[3]); g.broadcast(x, &[1, 3], &[1]) };
    "slice-identity": |g| { let x = g.x(&[4, 1]); g.slice(x, &[(0, 1, 4), (0, 7, 1)]) },
        not { let x = g.x(&[4, 1]); g.slice(x, &[(3, -1, 4), (0, 1, 1)]) };
    "cast-identity": |g| { let x = g.x(&[3]); g.cast(x, DType::F32) },
        not { let x = g.x(&[3]); g.cast(x, DType::F64) };

    "transpose-transpose": |g| { let x = g.x(&[2, 3, 4]); let y = g.transpose(x, &[1, 2, 0]); g.transpose(y, &[0, 2, 1]) },
        not { let x = g.x(&[2, 3, 4]); let y = g.transpose(x, &[1, 2, 0]); let y = g.unary(Exp, y); g.transpose(y, &[0, 2, 1]) };
    "reshape-reshape": |g| { let x = g.x(&[2, 6]); let y = g.reshape(x, &[12]); g.reshape(y, &[3, 4]) },
        not { let x = g.x(&[2, 6]); let y = g.transpose(x, &[1, 0]); g.reshape(y, &[3, 4]) };
    "broadcast-broadcast": |g| { let x = g.x(&[3]); let y = g.broadcast(x, &[3, 2], &[0]); g.broadcast(y, &[3, 5, 2], &[0, 2]) },
        not { let x = g.x(&[3]); let y = g.broadcast(x, &[3, 2], &[0]); let y = g.transpose(y, &[1, 0]); g.broadcast(y, &[5, 2, 3], &[1, 2]) };
    "slice-slice": |g| { let x = g.x(&[9, 5]); let y = g.slice(x, &[(8, -2, 4), (1, 1, 4)]); g.slice(y, &[(3, -1, 3), (1, 2, 2)]) },
        not { let x = g.x(&[9]); let y = g.slice(x, &[(8, -2, 4)]); let y = g.unary(Neg, y); g.slice(y, &[(3, -1, 3)]) };
    "cast-cast": |g| { let x = g.typed(DType::I16, &[5]); let y = g.cast(x, DType::F32); g.cast(y, DType::I32) },
        not { let x = g.x(&[5]); let y = g.cast(x, DType::I32); g.cast(y, DType::F32) };

    "transpose-as-reshape": |g| { let x = g.x(&[2, 1, 3]); g.transpose(x, &[1, 0, 2]) },
        not { let x = g.x(&[2, 1, 3]); g.transpose(x, &[1, 2, 0]) };
    "broadcast-as-reshape": |g| { let x = g.x(&[2, 3]); g.broadcast(x, &[2, 1, 3], &[0, 2]) },
        not { let x = g.x(&[2, 3]); g.broadcast(x, &[2, 2, 3], &[0, 2]) };
    "reduce-as-reshape": |g| { let x = g.x(&[2, 1, 3]); g.reduce(ReduceOp::Prod, x, &[1]) },
        not { let x = g.x(&[2, 1, 3]); g.reduce(ReduceOp::Prod, x, &[1, 2]) };

    "broadcast-of-reshape": |g| { let x = g.x(&[2, 3]); let y = g.reshape(x, &[2, 1, 3]); g.broadcast(y, &[2, 1, 4, 3], &[0, 1, 3]) },
        not { let x = g.x(&[6]); let y = g.reshape(x, &[2, 1, 3]); g.broadcast(y, &[2, 1, 4, 3], &[0, 1, 3]) };
    "reshape-of-broadcast": |g| { let x = g.x(&[1, 3]); let y = g.broadcast(x, &[1, 2, 3], &[0, 2]); g.reshape(y, &[2, 1, 3]) },
        not { let x = g.x(&[1, 3]); let y = g.broadcast(x, &[1, 2, 3], &[0, 2]); g.reshape(y, &[1, 6]) };
    "transpose-of-broadcast": |g| { let x = g.x(&[2, 3]); let y = g.broadcast(x, &[2, 4, 3], &[0, 2]); g.transpose(y, &[2, 1, 0]) },
        not { let x = g.x(&[2, 3]); let y = g.reshape(x, &[2, 1, 3]); g.transpose(y, &[2, 1, 0]) };
    "slice-of-broadcast": |g| { let x = g.x(&[3, 5]); let y = g.broadcast(x, &[3, 4, 5], &[0, 2]); g.slice(y, &[(2, -1, 2), (1, 1, 3), (0, 2, 3)]) },
        not { let x = g.x(&[3, 4, 5]); let y = g.transpose(x, &[0, 2, 1]); g.slice(y, &[(2, -1, 2), (1, 1, 3), (0, 2, 2)]) };
    "slice-of-transpose": |g| { let x = g.x(&[3, 4, 5]); let y = g.transpose(x, &[1, 2, 0]); g.slice(y, &[(3, -1, 2), (1, 1, 3), (0, 2, 2)]) },
        not { let x = g.x(&[3, 4, 5]); let y = g.reshape(x, &[4, 5, 3]); g.slice(y, &[(3, -1, 2), (1, 1, 3), (0, 2, 2)]) };

    "unary-of-transpose": |g| { let x = g.x(&[2, 3]); let y = g.transpose(x, &[1, 0]); g.push(Op::Composite(Composite::Gelu), &[y]) },
        not { let x = g.x(&[2, 3]); let y = g.transpose(x, &[1, 0]); g.push(Op::Composite(Composite::Softmax { axis: 0 }), &[y]) };
    "unary-of-reshape": |g| { let x = g.x(&[2, 3]); let y = g.reshape(x, &[6]); g.unary(Exp, y) },
        not { let x = g.x(&[2, 3]); let y = g.reshape(x, &[6]); g.push(Op::Composite(Composite::Softmax { axis: 0 }), &[y]) };
    "unary-of-broadcast": |g| { let x = g.x(&[3]); let y = g.broadcast(x, &[2, 3], &[1]); g.unary(Sin, y) },
        not { let x = g.x(&[3]); let y = g.broadcast(x, &[2, 3], &[1]); g.cast(y, DType::I32) };
    "cast-of-transpose": |g| { let x = g.x(&[2, 3]); let y = g.transpose(x, &[1, 0]); g.cast(y, DType::I32) },
        not { let x = g.x(&[2, 3]); let y = g.transpose(x, &[1, 0]); g.unary(Exp, y) };
    "cast-of-reshape": |g| { let x = g.x(&[2, 3]); let y = g.reshape(x, &[6]); g.cast(y, DType::I32) },
        not { let x = g.x(&[2, 3]); let y = g.reshape(x, &[6]); g.unary(Exp, y) };
    "cast-of-broadcast": |g| { let x = g.x(&[3]); let y = g.broadcast(x, &[2, 3], &[1]); g.cast(y, DType::I32) },
        not { let x = g.x(&[3]); let y = g.broadcast(x, &[2, 3], &[1]); g.unary(Exp, y) };
    "binary-of-transposes": |g| { let (x, y) = (g.x(&[2, 3]), g.x(&[2, 3])); let (x, y) = (g.transpose(x, &[1, 0]), g.transpose(y, &[1, 0])); g.binary(Sub, x, y) },
        not { let (x, y) = (g.x(&[3, 3]), g.x(&[3, 3])); let (x, y) = (g.transpose(x, &[1, 0]), g.transpose(y, &[0, 1])); g.binary(Sub, x, y) };
    "binary-of-reshapes": |g| { let (x, y) = (g.x(&[2, 3]), g.x(&[2, 3])); let (x, y) = (g.reshape(x, &[6]), g.reshape(y, &[6])); g.binary(Div, x, y) },
        not { let (x, y) = (g.x(&[2, 3]), g.x(&[3, 2])); let (x, y) = (g.reshape(x, &[6]), g.reshape(y, &[6])); g.binary(Div, x, y) };
    "binary-of-broadcasts": |g| { let (x, y) = (g.x(&[3]), g.x(&[3])); let (x, y) = (g.broadcast(x, &[3, 3], &[1]), g.broadcast(y, &[3, 3], &[1])); g.binary(Sub, x, y) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); let (x, y) = (g.broadcast(x, &[3, 3], &[1]), g.broadcast(y, &[3, 3], &[0])); g.binary(Sub, x, y) };
    "transpose-by-constant": |g| { let (x, c) = (g.x(&[2, 3]), g.c(&[3, 2], 3.0)); let y = g.transpose(x, &[1, 0]); g.binary(Sub, y, c) },
        not { let (x, c) = (g.x(&[2, 3]), g.x(&[3, 2])); let y = g.transpose(x, &[1, 0]); g.binary(Sub, y, c) };
    "reshape-by-constant": |g| { let (x, c) = (g.x(&[2, 3]), g.c(&[6], 3.0)); let y = g.reshape(x, &[6]); g.binary(Sub, y, c) },
        not { let (x, c) = (g.x(&[2, 3]), g.x(&[6])); let y = g.reshape(x, &[6]); g.binary(Sub, y, c) };
    "broadcast-by-constant": |g| { let (x, c) = (g.x(&[3]), g.c(&[2, 3], 3.0)); let y = g.broadcast(x, &[2, 3], &[1]); g.binary(Sub, y, c) },
        not { let (x, c) = (g.x(&[3]), g.x(&[2, 3])); let y = g.broadcast(x, &[2, 3], &[1]); g.binary(Sub, y, c) };
    "constant-by-transpose": |g| { let (x, c) = (g.x(&[2, 3]), g.c(&[3, 2], 3.0)); let y = g.transpose(x, &[1, 0]); g.binary(Sub, c, y) },
        not { let (x, c) = (g.x(&[2, 3]), g.x(&[3, 2])); let y = g.transpose(x, &[1, 0]); g.binary(Sub, c, y) };
    "constant-by-reshape": |g| { let (x, c) = (g.x(&[2, 3]), g.c(&[6], 3.0)); let y = g.reshape(x, &[6]); g.binary(Sub, c, y) },
        not { let (x, c) = (g.x(&[2, 3]), g.x(&[6])); let y = g.reshape(x, &[6]); g.binary(Sub, c, y) };
    "constant-by-broadcast": |g| { let (x, c) = (g.x(&[3]), g.c(&[2, 3], 3.0)); let y = g.broadcast(x, &[2, 3], &[1]); g.binary(Sub, c, y) },
        not { let (x, c) = (g.x(&[3]), g.x(&[2, 3])); let y = g.broadcast(x, &[2, 3], &[1]); g.binary(Sub, c, y) };
    "transpose-by-broadcast": |g| { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[4, 2])); let x = g.transpose(x, &[2, 1, 0]); let y = g.broadcast(y, &[4, 3, 2], &[0, 2]); g.binary(Sub, x, y) },
        not { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[4, 3, 2])); let x = g.transpose(x, &[2, 1, 0]); g.binary(Sub, x, y) };
    "broadcast-by-transpose": |g| { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[4, 2])); let x = g.transpose(x, &[1, 2, 0]); let y = g.broadcast(y, &[3, 4, 2], &[1, 2]); g.binary(Sub, y, x) },
        not { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[4, 3, 2])); let x = g.transpose(x, &[2, 1, 0]); g.binary(Sub, y, x) };

    "canonical-order": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 2.0)); g.binary(Add, c, x) },
        not { let (c, x) = (g.c(&[3], 2.0), g.x(&[3])); g.binary(Sub, c, x) };
    "add-zero": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 0.0)); g.binary(Add, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 1e-30)); g.binary(Add, x, c) };
    "sub-zero": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 0.0)); g.binary(Sub, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 0.0)); g.binary(Sub, c, x) };
    "sub-from-zero": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 0.0)); g.binary(Sub, c, x) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 0.0)); g.binary(Sub, x, c) };
    "mul-one": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 1.0)); g.binary(Mul, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], -1.0)); g.binary(Mul, x, c) };
    "mul-zero": |g| { let (x, c) = (g.typed(DType::I32, &[3]), g.c_typed(DType::I32, &[3], 0.0)); g.binary(Mul, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 0.0)); g.binary(Mul, x, c) };
    "div-one": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 1.0)); g.binary(Div, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 1.0)); g.binary(Div, c, x) };
    "div-power-of-two": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], -8.0)); g.binary(Div, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 3.0)); g.binary(Div, x, c) };
    "one-over": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 1.0)); g.binary(Div, c, x) },
        not { let (x, c) = (g.typed(DType::I32, &[3]), g.c_typed(DType::I32, &[3], 1.0)); g.binary(Div, c, x) };
    "mul-mul": |g| { let (x, c, d) = (g.x(&[3]), g.c(&[3], 0.3), g.c(&[3], 0.7)); let y = g.binary(Mul, x, c); g.binary(Mul, y, d) },
        not { let (x, c, d) = (g.x(&[3]), g.c(&[3], 1e-20), g.c(&[3], 1e-20)); let y = g.binary(Mul, x, c); g.binary(Mul, y, d) };
    "div-of-mul": |g| { let (x, c, d) = (g.x(&[3]), g.c(&[3], 0.3), g.c(&[3], 0.7)); let y = g.binary(Mul, x, c); g.binary(Div, y, d) },
        not { let (x, c, d) = (g.x(&[3]), g.c(&[3], 0.3), g.c(&[3], 0.0)); let y = g.binary(Mul, x, c); g.binary(Div, y, d) };
    "mul-of-div": |g| { let (x, c, d) = (g.x(&[3]), g.c(&[3], 0.3), g.c(&[3], 0.7)); let y = g.binary(Div, x, c); g.binary(Mul, y, d) },
        not { let (x, c, d) = (g.x(&[3]), g.c(&[3], 0.3), g.c(&[3], 0.7)); let y = g.binary(Div, c, x); g.binary(Mul, y, d) };
    "neg-of-mul": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 0.3)); let y = g.binary(Mul, x, c); g.unary(Neg, y) },
        not { let (x, c) = (g.x(&[3]), g.x(&[3])); let y = g.binary(Mul, x, c); g.unary(Neg, y) };
    "mul-of-neg": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 0.3)); let y = g.unary(Neg, x); g.binary(Mul, y, c) },
        not { let (x, c) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Neg, x); g.binary(Mul, y, c) };
    "pow-one": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 1.0)); g.binary(Pow, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 1.0)); g.binary(Pow, c, x) };
    "pow-two": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 2.0)); g.binary(Pow, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 2.0)); g.binary(Pow, c, x) };
    "pow-three": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 3.0)); g.binary(Pow, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 3.5)); g.binary(Pow, x, c) };
    "pow-half": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], 0.5)); g.binary(Pow, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 0.25)); g.binary(Pow, x, c) };
    "pow-minus-half": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], -0.5)); g.binary(Pow, x, c) },
        not { let (x, c) = (g.x(&[3]), g.c(&[3], 0.5)); g.binary(Pow, x, c) };
    "pow-minus-one": |g| { let (x, c) = (g.x(&[3]), g.c(&[3], -1.0)); g.binary(Pow, x, c) },
        not { let (x, c) = (g.typed(DType::I32, &[3]), g.c_typed(DType::I32, &[3], -1.0)); g.binary(Pow, x, c) };
    "select-constant-true": |g| { let (c, x, y) = (g.c_typed(DType::Bool, &[3], 1.0), g.x(&[3]), g.x(&[3])); g.push(Op::Select, &[c, x, y]) },
        not { let (c, x, y) = (g.c_typed(DType::Bool, &[3], 0.0), g.x(&[3]), g.x(&[3])); g.push(Op::Select, &[c, x, y]) };
    "select-constant-false": |g| { let (c, x, y) = (g.c_typed(DType::Bool, &[3], 0.0), g.x(&[3]), g.x(&[3])); g.push(Op::Select, &[c, x, y]) },
        not { let (c, x, y) = (g.typed(DType::Bool, &[3]), g.x(&[3]), g.x(&[3])); g.push(Op::Select, &[c, x, y]) };
    "select-same": |g| { let (c, x) = (g.typed(DType::Bool, &[3]), g.x(&[3])); g.push(Op::Select, &[c, x, x]) },
        not { let (c, x, y) = (g.typed(DType::Bool, &[3]), g.x(&[3]), g.x(&[3])); g.push(Op::Select, &[c, x, y]) };

    "involution": |g| { let x = g.x(&[3]); let y = g.unary(Neg, x); g.unary(Neg, y) },
        not { let x = g.x(&[3]); let y = g.unary(Reciprocal, x); g.unary(Reciprocal, y) };
    "idempotence": |g| { let x = g.x(&[3]); let y = g.unary(Floor, x); g.unary(Floor, y) },
        not { let x = g.x(&[3]); let y = g.unary(Floor, x); g.unary(Ceil, y) };
    "sub-of-neg": |g| { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Neg, y); g.binary(Sub, x, y) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Neg, y); g.binary(Sub, y, x) };
    "add-of-neg": |g| { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Neg, y); g.binary(Add, x, y) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Abs, y); g.binary(Add, x, y) };
    "neg-plus": |g| { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Neg, y); g.binary(Add, y, x) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.unary(Neg, y); g.binary(Mul, y, x) };
    "neg-of-sub": |g| { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.binary(Sub, x, y); g.unary(Neg, y) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); let y = g.binary(Sub, x, y); g.unary(Abs, y) };
    "reciprocal-of-sqrt": |g| { let x = g.x(&[3]); let y = g.unary(Sqrt, x); g.unary(Reciprocal, y) },
        not { let x = g.x(&[3]); let y = g.unary(Reciprocal, x); g.unary(Sqrt, y) };
    "div-by-sqrt": |g| { let (x, y) = (g.x(&[3]), g.x(&[3])); let x = g.unary(Sqrt, x); g.binary(Div, y, x) },
        not { let (x, y) = (g.x(&[3]), g.x(&[3])); let x = g.unary(Sqrt, x); g.binary(Div, x, y) };

    "reduce-reduce": |g| { let x = g.x(&[2, 3, 4, 5]); let y = g.reduce(ReduceOp::Max, x, &[1]); g.reduce(ReduceOp::Max, y, &[0, 2]) },
        not { let x = g.x(&[2, 3, 4, 5]); let y = g.reduce(ReduceOp::Max, x, &[1]); g.reduce(ReduceOp::Sum, y, &[0, 2]) };
    "reduce-of-transpose": |g| { let x = g.x(&[2, 3, 4, 5]); let y = g.transpose(x, &[3, 0, 2, 1]); g.reduce(ReduceOp::Sum, y, &[1]) },
        not { let x = g.x(&[2, 3, 4, 5]); let y = g.reshape(x, &[5, 2, 4, 3]); g.reduce(ReduceOp::Sum, y, &[1]) };
    "reduce-of-reshape": |g| { let x = g.x(&[2, 3, 4, 5]); let y = g.reshape(x, &[6, 1, 4, 5]); g.reduce(ReduceOp::Sum, y, &[0, 3]) },
        not { let x = g.x(&[2, 3, 4, 5]); let y = g.reshape(x, &[6, 2, 2, 5]); g.reduce(ReduceOp::Sum, y, &[1, 3]) };
    "extremum-of-broadcast": |g| { let x = g.x(&[2, 4]); let y = g.broadcast(x, &[2, 3, 4, 5], &[0, 2]); g.reduce(ReduceOp::Min, y, &[1, 2]) },
        not { let x = g.x(&[2, 4]); let y = g.broadcast(x, &[2, 3, 4, 5], &[0, 2]); g.reduce(ReduceOp::Prod, y, &[1, 2]) };
    "sum-of-broadcast": |g| { let x = g.x(&[2, 4]); let y = g.broadcast(x, &[2, 3, 4, 5], &[0, 2]); g.reduce(ReduceOp::Sum, y, &[0, 1]) },
        not { let x = g.x(&[2, 4]); let y = g.broadcast(x, &[2, 0, 4, 5], &[0, 2]); g.reduce(ReduceOp::Sum, y, &[0, 1]) };
    "sum-of-scaled": |g| { let (x, c) = (g.x(&[2, 4]), g.c(&[2, 4], 0.3)); let y = g.binary(Mul, x, c); g.reduce(ReduceOp::Sum, y, &[1]) },
        not { let (x, c) = (g.x(&[2, 4]), g.c(&[2, 4], 0.3)); let y = g.binary(Mul, x, c); g.reduce(ReduceOp::Max, y, &[1]) };
    "sum-of-neg": |g| { let x = g.x(&[2, 4]); let y = g.unary(Neg, x); g.reduce(ReduceOp::Sum, y, &[1]) },
        not { let x = g.x(&[2, 4]); let y = g.unary(Neg, x); g.reduce(ReduceOp::Max, y, &[1]) };

    "dot-of-lhs-transpose": |g| { let (x, y) = (g.x(&[2, 3, 4, 5]), g.x(&[5, 7, 3])); let x = g.transpose(x, &[2, 1, 3, 0]); g.dot(x, y, &[(1, 2)], &[(2, 0)]) },
        not { let (x, y) = (g.x(&[3, 4]), g.x(&[4, 5])); let y = g.transpose(y, &[1, 0]); g.dot(x, y, &[], &[(1, 1)]) };
    "dot-of-rhs-transpose": |g| { let (x, y) = (g.x(&[5, 7, 3]), g.x(&[2, 3, 4, 5])); let y = g.transpose(y, &[2, 1, 3, 0]); g.dot(x, y, &[(2, 1)], &[(0, 2)]) },
        not { let (x, y) = (g.x(&[4, 3]), g.x(&[5, 4])); let x = g.transpose(x, &[1, 0]); g.dot(x, y, &[], &[(1, 1)]) };
    "dot-of-lhs-broadcast": |g| { let (x, y) = (g.x(&[4, 5, 3]), g.x(&[2, 3, 6, 5])); let x = g.broadcast(x, &[4, 2, 5, 3], &[0, 2, 3]); g.dot(x, y, &[(3, 1), (1, 0)], &[(2, 3)]) },
        not { let (x, y) = (g.x(&[3, 5]), g.x(&[3, 5])); let x = g.broadcast(x, &[2, 3, 5], &[1, 2]); g.dot(x, y, &[(1, 0)], &[(2, 1)]) };
    "dot-of-rhs-broadcast": |g| { let (x, y) = (g.x(&[3, 2, 6, 5]), g.x(&[4, 5, 3])); let y = g.broadcast(y, &[4, 2, 5, 3], &[0, 2, 3]); g.dot(x, y, &[(0, 3), (1, 1)], &[(3, 2)]) },
        not { let (x, y) = (g.x(&[3, 2, 5]), g.x(&[3, 4])); let y = g.broadcast(y, &[2, 3, 4, 5], &[1, 2]); g.dot(x, y, &[(0, 1), (1, 0)], &[(2, 3)]) };
    "dot-of-lhs-reshape": |g| { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[4, 5])); let x = g.reshape(x, &[6, 4]); g.dot(x, y, &[], &[(1, 0)]) },
        not { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[12, 5])); let x = g.reshape(x, &[2, 12]); g.dot(x, y, &[], &[(1, 0)]) };
    "dot-of-rhs-reshape": |g| { let (x, y) = (g.x(&[5, 2, 4]), g.x(&[2, 12, 4])); let y = g.reshape(y, &[2, 3, 4, 4]); g.dot(x, y, &[(1, 0)], &[(2, 3)]) },
        not { let (x, y) = (g.x(&[5, 2, 4]), g.x(&[8, 3])); let y = g.reshape(y, &[2, 4, 3]); g.dot(x, y, &[(1, 0)], &[(2, 1)]) };
    "transpose-swaps-dot": |g| { let (x, y) = (g.x(&[2, 3, 4, 5]), g.x(&[3, 5, 2, 6])); let d = g.dot(x, y, &[(0, 2), (1, 0)], &[(3, 1)]); g.transpose(d, &[1, 0, 3, 2]) },
        not { let (x, y) = (g.x(&[2, 3, 4]), g.x(&[4, 6])); let d = g.dot(x, y, &[], &[(2, 0)]); g.transpose(d, &[2, 1, 0]) };
    "transpose-of-dot-batch": |g| { let (x, y) = (g.x(&[2, 3, 4, 5]), g.x(&[3, 5, 2, 6])); let d = g.dot(x, y, &[(0, 2), (1, 0)], &[(3, 1)]); g.transpose(d, &[1, 0, 2, 3]) },
        not { let (x, y) = (g.x(&[2, 3, 4, 5]), g.x(&[3, 5, 2, 6])); let d = g.dot(x, y, &[(0, 2), (1, 0)], &[(3, 1)]); g.transpose(d, &[1, 0, 3, 2]) };
}
