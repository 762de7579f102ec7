//! The text of one kernel per family and variant, and of a plan.

mod common;

use common::{built, compiled, f32s, gelu, linear_relu, matmul, momentum_step, parameter, softmax};
use meganeura_codegen::{DeviceProfile, Precision};
use meganeura_ir::{BinaryOp, ConvDims, DType, Graph, NodeId, Op, ReduceOp, ScatterOp, TensorType, UnaryOp};

/// `x @ w` of sizes `m x k` and `k x n`.
fn product([m, n, k]: [usize; 3]) -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[m, k]))?;
        let w = parameter(g, "w", &[k, n])?;
        let y = matmul(g, x, w)?;
        g.output("y", y)
    })
}

/// The same of f16 operands, with a result that is rounded to f16.
fn product_of_halves([m, n, k]: [usize; 3]) -> Graph {
    built(|g| {
        let half = |shape: [usize; 2]| TensorType::new(DType::F16, shape);
        let (x, y) = (g.input("x", half([m, k]))?, g.input("y", half([k, n]))?);
        let (x, y) = (g.cast(x, DType::F32)?, g.cast(y, DType::F32)?);
        let z = matmul(g, x, y)?;
        let z = g.cast(z, DType::F16)?;
        g.output("z", z)
    })
}

/// Arithmetic on f16 values.
fn map_of_halves() -> Graph {
    built(|g| {
        let x = g.input("x", TensorType::new(DType::F16, [9]))?;
        let x = g.cast(x, DType::F32)?;
        let y = g.unary(UnaryOp::Tanh, x)?;
        let y = g.cast(y, DType::F16)?;
        g.output("y", y)
    })
}

/// Two products with the same left operand, and what `join` makes of them.
fn products(join: impl FnOnce(&mut Graph, NodeId, NodeId) -> Result<(), meganeura_ir::GraphError>) -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[33, 40]))?;
        let (a, b) = (parameter(g, "a", &[40, 36])?, parameter(g, "b", &[40, 36])?);
        let (a, b) = (matmul(g, x, a)?, matmul(g, x, b)?);
        join(g, a, b)
    })
}

fn gate() -> Graph {
    products(|g, up, gate| {
        let gate = g.unary(UnaryOp::Sigmoid, gate)?;
        let y = g.mul(up, gate)?;
        g.output("y", y)
    })
}

fn joined_products() -> Graph {
    products(|g, query, key| {
        g.output("query", query)?;
        g.output("key", key)
    })
}

fn sum_of_products() -> Graph {
    built(|g| {
        let (x, y) = (g.input("x", f32s(&[33, 40]))?, g.input("y", f32s(&[33, 24]))?);
        let (a, b) = (parameter(g, "a", &[40, 36])?, parameter(g, "b", &[24, 36])?);
        let (a, b) = (matmul(g, x, a)?, matmul(g, y, b)?);
        let y = g.add(a, b)?;
        g.output("y", y)
    })
}

fn convolution() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[2, 3, 9, 7]))?;
        let w = parameter(g, "w", &[8, 3, 3, 3])?;
        let (stride, pads) = (vec![2, 1], vec![(1, 0), (0, 2)]);
        let dims = ConvDims { stride, pads, input_dilation: vec![1, 1], kernel_dilation: vec![1, 1], groups: 1 };
        let y = g.push(Op::Conv(dims), &[x, w])?;
        g.output("y", y)
    })
}

fn scatter() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[7, 33]))?;
        let indices = g.input("indices", TensorType::new(DType::I32, [5]))?;
        let updates = g.input("updates", f32s(&[5, 33]))?;
        let y = g.push(Op::Scatter { op: ScatterOp::Add, axis: 0 }, &[x, indices, updates])?;
        g.output("y", y)
    })
}

/// Two maps that read the same tensor, of different sizes.
fn joined_maps() -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[12, 10]))?;
        let first = g.unary(UnaryOp::Tanh, x)?;
        let halves = g.reduce(ReduceOp::Max, x, &[1])?;
        g.output("tanh", first)?;
        g.output("max", halves)
    })
}

/// A pointwise chain with a constant that is not finite and one that is negative, and every kind of operator next to each other.
fn precedence() -> Graph {
    built(|g| {
        let (x, y) = (g.input("x", f32s(&[9]))?, g.input("y", f32s(&[9]))?);
        let sum = g.sub(x, y)?;
        let sum = g.sub(x, sum)?;
        let product = g.mul(sum, y)?;
        let product = g.mul(x, product)?;
        let negative = g.unary(UnaryOp::Neg, product)?;
        let shifted = g.shift(negative, -2.0)?;
        let infinite = g.constant_like(x, f64::INFINITY)?;
        let capped = g.binary(BinaryOp::Min, shifted, infinite)?;
        g.output("z", capped)
    })
}

#[test]
fn each_family_and_variant_prints_readable_wgsl() {
    let (generic, software) = (DeviceProfile::generic(), DeviceProfile::software());
    let small = DeviceProfile { compute_units: 1, ..DeviceProfile::generic() };
    let matrices = DeviceProfile::nvidia(Precision::Accelerated);
    let kernels: [(&str, Graph, &DeviceProfile); 21] = [
        ("map", gelu(), &generic),
        ("map_precedence", precedence(), &generic),
        ("map_joined", joined_maps(), &generic),
        ("scatter", scatter(), &generic),
        ("row_serial", softmax(), &software),
        ("row_lanes", softmax(), &generic),
        ("contract_direct", linear_relu(), &software),
        ("contract_lanes", product([2, 90, 64]), &generic),
        ("contract_slices", product([100, 72, 64]), &generic),
        ("contract_tiled", product([256, 256, 16]), &small),
        ("contract_matrices", product([512, 512, 1024]), &matrices),
        ("contract_matrices_large", product([4096, 4096, 256]), &matrices),
        ("contract_matrices_halves", product_of_halves([512, 512, 1024]), &matrices),
        ("map_halves", map_of_halves(), &matrices),
        ("contract_two_sums", gate(), &generic),
        ("contract_terms", sum_of_products(), &generic),
        ("contract_joined", joined_products(), &software),
        ("contract_conv", convolution(), &generic),
        ("contract_conv_direct", convolution(), &software),
        ("in_place", momentum_step(), &software),
        ("in_place_lanes", momentum_step(), &generic),
    ];
    for (name, graph, profile) in kernels {
        let mut program = compiled(&graph, profile);
        assert_eq!(program.kernels.len(), 1, "{name}");
        insta::assert_snapshot!(name, program.kernels.remove(0).wgsl);
    }
}

#[test]
fn a_plan_names_what_each_dispatch_reads_and_writes() {
    let graph = built(|g| {
        let x = g.input("image", f32s(&[64, 1024]))?;
        let w = parameter(g, "head.weight", &[1024, 10])?;
        let norm = g.mul(x, x)?;
        let norm = g.reduce(ReduceOp::Sum, norm, &[0, 1])?;
        let norm = g.broadcast_to(norm, &[64, 1024].into())?;
        let y = g.binary(BinaryOp::Div, x, norm)?;
        let y = matmul(g, y, w)?;
        let best = g.reduce(ReduceOp::Max, y, &[1])?;
        g.output("logits", y)?;
        g.output("best", best)
    });
    insta::assert_snapshot!("plan", compiled(&graph, &DeviceProfile::generic()));
    insta::assert_snapshot!("plan_of_an_update", compiled(&momentum_step(), &DeviceProfile::generic()));
}
