//! What fuses, what is planned, and the text of one kernel per family.

mod common;

use common::{built, compiled, f32s, gelu, linear_relu, matmul, momentum_step, parameter, softmax};
use meganeura_codegen::program::{Access, Space};
use meganeura_codegen::{CompileError, CompileOptions, DeviceProfile, compile};
use meganeura_ir::{
    BinaryOp, CompareOp, Composite, ConvDims, DType, DotDims, Op, ParameterId, Real, ReduceOp, TensorType, UnaryOp,
    random_key_type,
};

#[test]
fn bias_and_activation_ride_on_the_contraction() {
    for profile in [DeviceProfile::software(), DeviceProfile::generic()] {
        assert_eq!(compiled(&linear_relu(), &profile).dispatches.len(), 1);
    }
}

#[test]
fn softmax_is_one_row_kernel() {
    for profile in [DeviceProfile::software(), DeviceProfile::generic()] {
        assert_eq!(compiled(&softmax(), &profile).dispatches.len(), 1);
    }
}

#[test]
fn normalization_with_scale_is_one_row_kernel() {
    let g = built(|g| {
        let x = g.input("x", f32s(&[7, 96]))?;
        let scale = parameter(g, "scale", &[96])?;
        let y = g.push(Op::Composite(Composite::Normalize { axes: vec![1], epsilon: Real(1e-5) }), &[x])?;
        let scale = g.broadcast_to(scale, &[7, 96].into())?;
        let y = g.mul(y, scale)?;
        g.output("y", y)
    });
    assert_eq!(compiled(&g, &DeviceProfile::generic()).dispatches.len(), 1);
}

#[test]
fn chains_of_pointwise_and_movement_are_one_map() {
    assert_eq!(compiled(&gelu(), &DeviceProfile::generic()).dispatches.len(), 1);
}

#[test]
fn a_convolution_takes_its_padding_bias_and_activation_along() {
    let g = built(|g| {
        let x = g.input("x", f32s(&[2, 3, 9, 7]))?;
        let w = parameter(g, "w", &[4, 3, 3, 3])?;
        let b = parameter(g, "b", &[4])?;
        let dims = ConvDims {
            stride: vec![2, 1],
            pads: vec![(1, 0), (0, 2)],
            input_dilation: vec![1, 1],
            kernel_dilation: vec![1, 1],
            groups: 1,
        };
        let y = g.push(Op::Conv(dims), &[x, w])?;
        let shape = g.ty(y).shape.clone();
        let b = g.broadcast_without(b, &shape, &[0, 2, 3])?;
        let y = g.add(y, b)?;
        let y = g.unary(UnaryOp::Sigmoid, y)?;
        g.output("y", y)
    });
    assert_eq!(compiled(&g, &DeviceProfile::software()).dispatches.len(), 1);
}

#[test]
fn an_optimiser_step_overwrites_its_parameters_in_place() {
    let program = compiled(&momentum_step(), &DeviceProfile::generic());
    assert_eq!(program.dispatches.len(), 1, "the update is the epilogue of the gradient");
    assert!(program.memory.scratch.is_empty());
    let written: Vec<Space> = program.dispatches[0]
        .regions
        .iter()
        .zip(&program.kernels[0].access)
        .filter(|(_, a)| **a == Access::ReadWrite)
        .map(|(r, _)| r.space)
        .collect();
    assert_eq!(written.len(), 2);
    assert!(written.contains(&Space::Parameters) && written.contains(&Space::Optimizer));
}

#[test]
fn an_update_waits_for_other_readers_of_the_old_value() {
    let g = built(|g| {
        let x = g.input("x", f32s(&[33, 33]))?;
        let w = parameter(g, "w", &[33, 33])?;
        let new = matmul(g, x, w)?;
        let new = g.add(new, w)?;
        let y = matmul(g, w, x)?;
        g.output("y", y)?;
        g.update(ParameterId(0), new)
    });
    let program = compiled(&g, &DeviceProfile::generic());
    let w = program.parameters[0].region.expect("w is not empty");
    let last = program.dispatches.last().expect("dispatches");
    assert!(last.regions.contains(&w), "the parameter is replaced last");
    for d in &program.dispatches[..program.dispatches.len() - 1] {
        for (r, access) in d.regions.iter().zip(&program.kernels[d.kernel].access) {
            assert!(*access == Access::Read || *r != w);
        }
    }
}

#[test]
fn equal_layers_share_their_kernels() {
    let g = built(|g| {
        let mut x = g.input("x", f32s(&[7, 32]))?;
        for layer in 0..6 {
            let w = parameter(g, &format!("w{layer}"), &[32, 32])?;
            x = matmul(g, x, w)?;
            x = g.unary(UnaryOp::Tanh, x)?;
        }
        g.output("y", x)
    });
    let program = compiled(&g, &DeviceProfile::generic());
    assert_eq!((program.kernels.len(), program.dispatches.len()), (1, 6));
    let scratch: u64 = program.memory.scratch.iter().sum();
    assert_eq!(scratch, 2 * 1024, "two intermediate results of 896 bytes take turns");
}

#[test]
fn a_kernel_never_exceeds_the_binding_limit() {
    let g = built(|g| {
        let mut sum = g.input("x0", f32s(&[33]))?;
        let mut parts = vec![sum];
        for i in 1..30 {
            let x = g.input(format!("x{i}"), f32s(&[33]))?;
            parts.push(x);
            sum = g.add(sum, x)?;
        }
        let joined = g.push(Op::Concat { axis: 0 }, &parts)?;
        g.output("sum", sum)?;
        g.output("joined", joined)
    });
    for bindings in [4, 8] {
        compiled(&g, &DeviceProfile { max_storage_bindings: bindings, ..DeviceProfile::generic() });
    }
}

#[test]
fn a_tensor_that_is_never_in_memory_may_be_larger_than_a_binding() {
    let g = built(|g| {
        let x = g.input("x", f32s(&[1, 40]))?;
        let ones = g.splat(&f32s(&[40, 30]), 1.0)?;
        let y = matmul(g, x, ones)?;
        g.output("y", y)
    });
    compiled(&g, &DeviceProfile { max_binding_bytes: 256, ..DeviceProfile::software() });
}

#[test]
fn tensors_spread_over_buffers_of_the_bindable_size() {
    let g = built(|g| {
        let a = parameter(g, "a", &[40])?;
        let b = parameter(g, "b", &[40])?;
        let y = g.add(a, b)?;
        g.output("y", y)
    });
    let small = DeviceProfile { max_binding_bytes: 256, ..DeviceProfile::generic() };
    assert_eq!(compiled(&g, &small).memory.parameters, vec![256, 256]);
    let tiny = DeviceProfile { max_binding_bytes: 128, ..DeviceProfile::generic() };
    let error = compile(&g.verify().expect("valid"), &tiny, &CompileOptions { saturate: None, memory_limit: None })
        .expect_err("too large");
    assert!(matches!(error, CompileError::TensorTooLarge { .. }), "{error}");
}

#[test]
fn a_scalar_statistic_does_not_serialise_the_tensor_that_uses_it() {
    let g = built(|g| {
        let x = g.input("x", f32s(&[64, 1024]))?;
        let norm = g.mul(x, x)?;
        let norm = g.reduce(ReduceOp::Sum, norm, &[0, 1])?;
        let norm = g.broadcast_to(norm, &[64, 1024].into())?;
        let y = g.binary(BinaryOp::Div, x, norm)?;
        g.output("y", y)
    });
    let program = compiled(&g, &DeviceProfile::generic());
    assert_eq!(program.dispatches.len(), 2);
    assert_eq!(program.dispatches[1].workgroups[0], 1024);
}

/// A dropout before a linear layer, forward and backward.
#[test]
fn random_numbers_are_drawn_again_rather_than_stored() {
    let g = built(|g| {
        let key = g.input("key", random_key_type())?;
        let (x, dy) = (g.input("x", f32s(&[7, 33]))?, g.input("dy", f32s(&[7, 10]))?);
        let w = parameter(g, "w", &[33, 10])?;
        let numbers = g.push(Op::RandomUniform { shape: [7, 33].into(), stream: 0 }, &[key])?;
        let (ratio, scale, zero) = (g.constant_like(x, 0.5)?, g.constant_like(x, 2.0)?, g.constant_like(x, 0.0)?);
        let kept = g.compare(CompareOp::Ge, numbers, ratio)?;
        let factor = g.select(kept, scale, zero)?;
        let dropped = g.mul(x, factor)?;
        let y = matmul(g, dropped, w)?;
        g.output("y", y)?;
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() };
        let dx = g.push(Op::Dot(dims), &[dy, w])?;
        let dx = g.mul(dx, factor)?;
        g.output("dx", dx)
    });
    let program = compiled(&g, &DeviceProfile::generic());
    let drawing = program.kernels.iter().filter(|kernel| kernel.wgsl.contains("fn random_uniform"));
    assert_eq!((program.dispatches.len(), drawing.count()), (3, 2));
    let scratch: u64 = program.memory.scratch.iter().sum();
    assert_eq!(scratch, 1024, "the dropped tensor of 924 bytes alone");
}

#[test]
fn a_value_that_is_stored_on_the_way_takes_a_binding() {
    let g = built(|g| {
        let condition = g.input("condition", TensorType::new(DType::Bool, [33]))?;
        let (a, b) = (g.input("a", f32s(&[33]))?, g.input("b", f32s(&[33]))?);
        let chosen = g.select(condition, a, b)?;
        let mut sum = chosen;
        for i in 0..4 {
            let x = g.input(format!("x{i}"), f32s(&[33]))?;
            sum = g.add(sum, x)?;
        }
        g.output("chosen", chosen)?;
        g.output("sum", sum)
    });
    compiled(&g, &DeviceProfile { max_storage_bindings: 8, ..DeviceProfile::generic() });
}

#[test]
fn an_output_that_is_replaced_by_what_another_kernel_computes_counts_twice() {
    let g = built(|g| {
        let x = g.input("x", f32s(&[17, 20]))?;
        let w = parameter(g, "w", &[17, 20])?;
        g.output("w", w)?;
        let y = g.unary(UnaryOp::Tanh, x)?;
        g.output("y", y)?;
        let z = g.reshape(y, [20, 17])?;
        g.output("z", z)?;
        let new = g.unary(UnaryOp::Abs, w)?;
        g.update(ParameterId(0), new)
    });
    compiled(&g, &DeviceProfile { max_storage_bindings: 4, ..DeviceProfile::generic() });
}

#[test]
fn a_parameter_that_keeps_its_value_is_left_alone() {
    let g = built(|g| {
        let w = parameter(g, "w", &[6])?;
        g.update(ParameterId(0), w)
    });
    assert!(compiled(&g, &DeviceProfile::generic()).dispatches.is_empty());
}

#[test]
fn constant_expressions_that_are_not_finite_are_left_to_the_device() {
    let graph = built(|g| {
        let x = g.input("x", f32s(&[3, 0]))?;
        let zero = g.reduce(ReduceOp::Sum, x, &[1])?;
        let log = g.unary(UnaryOp::Log, zero)?;
        g.output("log", log)?;
        let inverse = g.unary(UnaryOp::Reciprocal, zero)?;
        g.output("inverse", inverse)?;
        let ratio = g.div(zero, zero)?;
        g.output("ratio", ratio)
    });
    compiled(&graph, &DeviceProfile::software());
}

#[test]
fn deviations_of_a_product_from_its_mean_are_never_in_memory() {
    let g = built(|g| {
        let (x, w) = (g.input("x", f32s(&[8, 300]))?, parameter(g, "w", &[300, 1 << 14])?);
        let product = matmul(g, x, w)?;
        let mean = g.mean_keep(product, &[1])?;
        let mean = g.broadcast_to(mean, &[8, 1 << 14].into())?;
        let deviation = g.sub(product, mean)?;
        let square = g.mul(deviation, deviation)?;
        let variance = g.mean_keep(square, &[1])?;
        let scale = g.unary(UnaryOp::Rsqrt, variance)?;
        let scale = g.broadcast_to(scale, &[8, 1 << 14].into())?;
        let y = g.mul(deviation, scale)?;
        g.output("y", y)
    });
    let program = compiled(&g, &DeviceProfile::generic());
    let families: Vec<&str> =
        program.dispatches.iter().map(|d| program.kernels[d.kernel].label.split(' ').next().unwrap_or_default()).collect();
    assert_eq!(families, ["contract", "row", "map"]);
}

#[test]
fn comparisons_with_counters_are_never_in_memory() {
    let g = built(|g| {
        let (x, class) = (g.input("x", f32s(&[300, 500]))?, g.input("class", TensorType::new(DType::I32, [300]))?);
        let shape = g.ty(x).shape.clone();
        let class = g.push(Op::Broadcast { shape: shape.clone(), axes: vec![0] }, &[class])?;
        let number = g.push(Op::Iota { dtype: DType::I32, shape, axis: 1 }, &[])?;
        let is_class = g.compare(CompareOp::Eq, number, class)?;
        let zero = g.constant_like(x, 0.0)?;
        let chosen = g.select(is_class, x, zero)?;
        let rows = g.reduce(ReduceOp::Sum, chosen, &[1])?;
        g.output("rows", rows)?;
        let others = g.select(is_class, zero, x)?;
        let columns = g.reduce(ReduceOp::Max, others, &[0])?;
        g.output("columns", columns)
    });
    assert!(compiled(&g, &DeviceProfile::generic()).memory.scratch.is_empty());
}
