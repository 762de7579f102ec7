//! Compiled programs on the device against the reference interpreter: every op, at odd shapes, under every profile.

use std::sync::{Arc, OnceLock};

use meganeura_codegen::{CompileOptions, DeviceKind, DeviceProfile, compile};
use meganeura_ir::interpreter::{Environment, interpret};
use meganeura_ir::testing::{random_tensor, relative_l2, rotated_gradients, sample_graphs};
use meganeura_ir::{
    ArgOp, Composite, DType, DotDims, Graph, Op, ReduceOp, Shape, Tensor, TensorType, random_key, random_key_type,
};
use meganeura_runtime::{Device, DeviceSelector, ParameterStore, Session};

/// One device for all tests of this process: some drivers crash where two threads open theirs at once.
fn device() -> &'static Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(&DeviceSelector::Auto).expect("a Vulkan device"))
}

fn run(device: &Arc<Device>, graph: &Graph, inputs: &[Tensor], profile: &DeviceProfile) -> Result<Vec<Tensor>, String> {
    let verified = graph.clone().verify().map_err(|e| e.to_string())?;
    let compiled = compile(&verified, profile, &CompileOptions::default()).map_err(|e| e.to_string())?;
    let program = Arc::new(compiled.program);
    let store = ParameterStore::new(device, &program).map_err(|e| e.to_string())?;
    let mut session = Session::new(device, program, &store).map_err(|e| e.to_string())?;
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    session.run_ordered(&inputs).map_err(|e| e.to_string())
}

/// The largest relative error of a correct kernel: half a unit in the last place of narrow dtypes, and more where drivers approximate.
fn tolerance(name: &str, dtype: DType) -> f64 {
    const APPROXIMATE: [&str; 8] = ["pow", "acosh", "cosh", "exp", "log", "reduce_prod", "scatter_mul", "attention"];
    match dtype {
        DType::F16 => 5e-4,
        DType::BF16 => 4e-3,
        // Sums of as many positive as negative numbers: the error is relative to their sizes, not to the sum.
        _ if name.starts_with("reduce_sum") => 2e-4,
        _ if APPROXIMATE.iter().any(|a| name.contains(a)) => 1e-5,
        _ => 2e-6,
    }
}

fn check_all_samples(kind: DeviceKind) {
    let device = device();
    let profile = DeviceProfile { kind, ..device.profile().clone() };
    let only = std::env::var("MEGANEURA_SAMPLE").ok();
    let mut failures = Vec::new();
    for (name, graph) in sample_graphs() {
        if only.as_ref().is_some_and(|o| !name.contains(o.as_str())) {
            continue;
        }
        let inputs: Vec<Tensor> =
            graph.inputs().iter().enumerate().map(|(i, info)| random_tensor(&info.ty, i as u64 + 1)).collect();
        let environment = Environment::<f64>::from_tensors(&inputs, []);
        let expected = interpret(&graph, &environment).expect("samples evaluate");
        let outputs = match run(device, &graph, &inputs, &profile) {
            Ok(outputs) => outputs,
            Err(e) => {
                failures.push(format!("{name}: {e}"));
                continue;
            }
        };
        let ty = graph.ty(graph.outputs()[0].node);
        let want = expected.outputs()[0].to_tensor(&if ty.dtype.is_float() {
            meganeura_ir::TensorType::new(DType::F64, ty.shape.clone())
        } else {
            ty.clone()
        });
        let want = want.expect("the interpreter's value has the output's type");
        let error = relative_l2(&outputs[0].to_f64_vec(), &want.to_f64_vec());
        if outputs[0].ty() != ty || error > tolerance(&name, ty.dtype) || !ty.dtype.is_float() && outputs[0] != want {
            failures.push(format!("{name}: relative error {error:.3e}"));
        }
    }
    assert!(failures.is_empty(), "{} samples fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_op_agrees_with_the_interpreter_under_the_software_profile() {
    check_all_samples(DeviceKind::Software);
}

#[test]
fn every_op_agrees_with_the_interpreter_under_the_generic_profile() {
    check_all_samples(DeviceKind::Generic);
}

#[test]
fn what_follows_from_attentions_gradients_agrees_with_the_interpreter() {
    for (name, g) in rotated_gradients() {
        let inputs: Vec<Tensor> = g.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
        let expected = interpret(&g, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
        let roomy = DeviceProfile { max_workgroup_bytes: device().profile().max_workgroup_bytes, ..DeviceProfile::generic() };
        for profile in [DeviceProfile::software(), DeviceProfile::generic(), roomy] {
            let found = run(device(), &g, &inputs, &profile).unwrap();
            for ((output, found), expected) in g.outputs().iter().zip(found).zip(expected.outputs()) {
                let error = relative_l2(&found.to_f64_vec(), &expected.to_f64_vec());
                assert!(error <= 1e-5, "{name}, {}, {:?}: {error:e}", output.name, profile.kind);
            }
        }
    }
}

/// Some drivers leave a loop after 65,535 iterations of one invocation, without a word.
#[test]
fn loops_longer_than_a_driver_allows_are_divided() {
    const LONG: usize = 70_001;
    let mut g = Graph::default();
    let x = g.input("x", TensorType::new(DType::F32, [2, LONG])).unwrap();
    let w = g.input("w", TensorType::new(DType::F32, [3, LONG])).unwrap();
    let sum = g.reduce(ReduceOp::Sum, x, &[1]).unwrap();
    let largest = g.push(Op::ArgReduce { op: ArgOp::Max, axis: 1 }, &[x]).unwrap();
    let softmax = g.push(Op::Composite(Composite::Softmax { axis: 1 }), &[x]).unwrap();
    let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() };
    let dot = g.push(Op::Dot(dims), &[x, w]).unwrap();
    for (name, node) in [("sum", sum), ("largest", largest), ("softmax", softmax), ("dot", dot)] {
        g.output(name, node).unwrap();
    }
    let inputs: Vec<Tensor> = g.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
    let expected = interpret(&g, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
    let found = run(device(), &g, &inputs, device().profile()).unwrap();
    for ((output, found), expected) in g.outputs().iter().zip(found).zip(expected.outputs()) {
        let error = relative_l2(&found.to_f64_vec(), &expected.to_f64_vec());
        assert!(error <= 2e-5, "{}: {error:e}", output.name);
    }
}

#[test]
fn random_numbers_are_the_interpreters_to_the_bit() {
    let mut g = Graph::default();
    let key = g.input("key", random_key_type()).unwrap();
    for stream in [0, 1, u32::MAX] {
        let shape = Shape::from([13, 77]);
        let numbers = g.push(Op::RandomUniform { shape, stream }, &[key]).unwrap();
        g.output(stream.to_string(), numbers).unwrap();
    }
    for (seed, step) in [(0, 0), (7, 1), (u64::MAX, u64::MAX), (1 << 33 | 5, 1 << 34 | 3)] {
        let key = [random_key(seed, step)];
        let expected = interpret(&g, &Environment::<f32>::from_tensors(&key, [])).unwrap();
        let found = run(device(), &g, &key, device().profile()).unwrap();
        for (found, expected) in found.iter().zip(expected.outputs()) {
            assert!(*found == expected.to_tensor(found.ty()).unwrap(), "seed {seed}, step {step}");
        }
    }
}

/// Rows that no index names keep what they hold, and several indices may name one.
#[test]
fn large_scatters_agree_with_the_interpreter() {
    use meganeura_ir::ScatterOp::{Add, Max, Min, Mul, Set};
    for (axis, shape, count) in [(0, [300, 20, 1], 37), (1, [3, 257, 18], 5), (0, [256, 4, 4], 700)] {
        let mut g = Graph::default();
        let x = g.input("x", TensorType::new(DType::F32, shape)).unwrap();
        let indices: Vec<f64> = (0..count).map(|i| ((i * i + 3 * i) % (shape[axis] / 2)) as f64).collect();
        let index = g.constant(Tensor::from_f64(DType::I64, [count], &indices)).unwrap();
        let mut from = shape;
        from[axis] = count;
        let updates = g.input("updates", TensorType::new(DType::F32, from)).unwrap();
        for op in [Add, Mul, Max, Min, Set] {
            let y = g.push(Op::Scatter { op, axis }, &[x, index, updates]).unwrap();
            g.output(format!("{op:?}"), y).unwrap();
        }
        let inputs: Vec<Tensor> = g.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
        let expected = interpret(&g, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
        for kind in [DeviceKind::Software, DeviceKind::Generic] {
            let found = run(device(), &g, &inputs, &DeviceProfile { kind, ..device().profile().clone() }).unwrap();
            for ((output, found), expected) in g.outputs().iter().zip(found).zip(expected.outputs()) {
                let error = relative_l2(&found.to_f64_vec(), &expected.to_f64_vec());
                assert!(error <= 2e-6, "{} along {axis} of {shape:?}: {error:e}", output.name);
            }
        }
    }
}
