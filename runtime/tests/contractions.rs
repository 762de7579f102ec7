//! Contractions under the profiles of devices that are not here: every schedule must be right on any device.

use std::sync::{Arc, OnceLock};

use meganeura_codegen::{CompileOptions, DeviceProfile, compile};
use meganeura_ir::interpreter::{Environment, interpret};
use meganeura_ir::testing::{random_tensor, relative_l2};
use meganeura_ir::{BinaryOp, ConvDims, DType, DotDims, Graph, Op, Tensor, TensorType, UnaryOp};
use meganeura_runtime::{Device, DeviceSelector, ParameterStore, Session};

fn device() -> &'static Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(&DeviceSelector::Auto).expect("a Vulkan device"))
}

/// Profiles under which the same contraction is divided in different ways.
fn profiles() -> [(&'static str, DeviceProfile); 5] {
    let own = DeviceProfile { max_loop_iterations: device().profile().max_loop_iterations, ..DeviceProfile::generic() };
    let roomy = DeviceProfile { max_workgroup_bytes: device().profile().max_workgroup_bytes, ..own.clone() };
    [
        ("generic", own.clone()),
        ("one unit", DeviceProfile { compute_units: 1, ..own.clone() }),
        ("one unit with memory", DeviceProfile { compute_units: 1, ..roomy.clone() }),
        ("many units with memory", DeviceProfile { compute_units: 132, ..roomy }),
        ("a crowd of units", DeviceProfile { compute_units: 1 << 14, ..own }),
    ]
}

/// Compares with the interpreter in f64.
fn check(name: &str, g: &Graph) {
    let inputs: Vec<Tensor> = g.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
    let expected = interpret(g, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
    let verified = g.clone().verify().unwrap();
    for (kind, profile) in profiles() {
        let program = Arc::new(compile(&verified, &profile, &CompileOptions::default()).unwrap().program);
        let store = ParameterStore::new(device(), &program).unwrap();
        let found = Session::new(device(), program, &store).unwrap().run_ordered(&inputs.iter().collect::<Vec<_>>()).unwrap();
        for ((output, found), expected) in g.outputs().iter().zip(found).zip(expected.outputs()) {
            let error = relative_l2(&found.to_f64_vec(), &expected.to_f64_vec());
            assert!(error <= 2e-6, "{name}, {}, {kind}: {error:e}", output.name);
        }
    }
}

/// A product of matrices, each transposed or not, with a batch, a bias, a residual and an activation around it.
fn product(batch: usize, m: usize, n: usize, k: usize, lhs_k_last: bool, rhs_k_last: bool) -> Graph {
    let mut g = Graph::default();
    let shape = |free: usize, k_last: bool| if k_last { [batch, free, k] } else { [batch, k, free] };
    let a = g.input("a", TensorType::new(DType::F32, shape(m, lhs_k_last))).unwrap();
    let b = g.input("b", TensorType::new(DType::F32, shape(n, rhs_k_last))).unwrap();
    let bias = g.input("bias", TensorType::new(DType::F32, [n])).unwrap();
    let residual = g.input("residual", TensorType::new(DType::F32, [batch, m, n])).unwrap();
    let axis = |k_last: bool| vec![if k_last { 2 } else { 1 }];
    let dims = DotDims { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: axis(lhs_k_last), rhs_contract: axis(rhs_k_last) };
    let dot = g.push(Op::Dot(dims), &[a, b]).unwrap();
    let bias = g.push(Op::Broadcast { shape: [batch, m, n].into(), axes: vec![2] }, &[bias]).unwrap();
    let sum = g.binary(BinaryOp::Add, dot, bias).unwrap();
    let zero = g.constant_like(sum, 0.0).unwrap();
    let relu = g.binary(BinaryOp::Max, sum, zero).unwrap();
    let y = g.binary(BinaryOp::Add, relu, residual).unwrap();
    g.output("y", y).unwrap();
    g.output("sum", sum).unwrap();
    g
}

#[test]
fn products_of_all_shapes_and_layouts_agree_under_every_schedule() {
    let shapes = [
        (1, 1, 37, 41),
        (1, 37, 1, 300),
        (3, 2, 130, 70),
        (1, 3, 5, 1030),
        (1, 130, 131, 33),
        (2, 17, 33, 65),
        (1, 64, 64, 16),
        (1, 5, 7, 500),
        (1, 257, 40, 20),
        (2, 6, 130, 19),
    ];
    for (batch, m, n, k) in shapes {
        for (lhs, rhs) in [(true, true), (true, false), (false, true), (false, false)] {
            check(&format!("{batch} x {m} x {n} x {k}, {lhs} {rhs}"), &product(batch, m, n, k, lhs, rhs));
        }
    }
}

#[test]
fn convolutions_agree_under_every_schedule() {
    // (input, kernel, stride, pads, kernel dilation, input dilation, groups)
    type Case = ([usize; 4], [usize; 4], [usize; 2], [(isize, isize); 2], [usize; 2], [usize; 2], usize);
    let cases: [Case; 5] = [
        ([2, 5, 13, 11], [7, 5, 3, 2], [2, 1], [(1, 2), (0, 1)], [1, 2], [1, 1], 1),
        ([1, 8, 9, 9], [64, 8, 3, 3], [1, 1], [(1, 1), (1, 1)], [1, 1], [1, 1], 1),
        ([1, 6, 7, 8], [9, 2, 3, 3], [1, 2], [(2, -1), (1, 0)], [1, 1], [2, 3], 3),
        ([1, 16, 12, 12], [16, 1, 3, 3], [1, 1], [(1, 1), (1, 1)], [1, 1], [1, 1], 16),
        ([3, 40, 5, 5], [1, 40, 1, 1], [1, 1], [(0, 0), (0, 0)], [1, 1], [1, 1], 1),
    ];
    for (index, (input, kernel, stride, pads, kernel_dilation, input_dilation, groups)) in cases.into_iter().enumerate() {
        let mut g = Graph::default();
        let x = g.input("x", TensorType::new(DType::F32, input)).unwrap();
        let w = g.input("w", TensorType::new(DType::F32, kernel)).unwrap();
        let dims = ConvDims {
            stride: stride.to_vec(),
            pads: pads.to_vec(),
            input_dilation: input_dilation.to_vec(),
            kernel_dilation: kernel_dilation.to_vec(),
            groups,
        };
        let y = g.push(Op::Conv(dims), &[x, w]).unwrap();
        g.output("y", y).unwrap();
        check(&format!("convolution {index}"), &g);
    }
}

#[test]
fn integer_products_are_exact_under_every_schedule() {
    let mut g = Graph::default();
    let a = g.input("a", TensorType::new(DType::I32, [19, 130])).unwrap();
    let b = g.input("b", TensorType::new(DType::I32, [23, 130])).unwrap();
    let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() };
    let y = g.push(Op::Dot(dims), &[a, b]).unwrap();
    g.output("y", y).unwrap();
    check("integers", &g);
}

#[test]
fn sums_of_contractions_agree_under_every_schedule() {
    for (m, n, ks) in [(33, 70, vec![40, 65, 17]), (2, 90, vec![100, 33]), (5, 3, vec![9, 4]), (130, 129, vec![18, 200])] {
        let mut g = Graph::default();
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() };
        let mut sum = None;
        for (i, k) in ks.into_iter().enumerate() {
            let a = g.input(format!("a{i}"), TensorType::new(DType::F32, [m, k])).unwrap();
            let b = g.input(format!("b{i}"), TensorType::new(DType::F32, [n, k])).unwrap();
            let dot = g.push(Op::Dot(dims.clone()), &[a, b]).unwrap();
            sum = Some(sum.map_or(dot, |sum| g.binary(BinaryOp::Add, sum, dot).unwrap()));
        }
        let residual = g.input("residual", TensorType::new(DType::F32, [m, n])).unwrap();
        let y = g.binary(BinaryOp::Mul, sum.unwrap(), residual).unwrap();
        g.output("y", y).unwrap();
        let program =
            compile(&g.clone().verify().unwrap(), &DeviceProfile::generic(), &CompileOptions::default()).unwrap().program;
        assert_eq!(program.dispatches.len(), 1, "{m} x {n}");
        check(&format!("sum of {m} x {n}"), &g);
    }
}

#[test]
fn two_contractions_of_one_kernel_agree_under_every_schedule() {
    for (m, n, k) in [(33, 70, 40), (2, 90, 100), (5, 3, 9), (128, 129, 65), (40, 33, 600)] {
        let mut g = Graph::default();
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![1], ..DotDims::default() };
        let x = g.input("x", TensorType::new(DType::F32, [m, k])).unwrap();
        let [gate, up] = ["gate", "up"].map(|name| {
            let w = g.input(name, TensorType::new(DType::F32, [n, k])).unwrap();
            g.push(Op::Dot(dims.clone()), &[x, w]).unwrap()
        });
        let gate = g.unary(UnaryOp::Sigmoid, gate).unwrap();
        let y = g.binary(BinaryOp::Mul, gate, up).unwrap();
        g.output("y", y).unwrap();
        let program =
            compile(&g.clone().verify().unwrap(), &DeviceProfile::generic(), &CompileOptions::default()).unwrap().program;
        assert_eq!(program.dispatches.len(), 1, "{m} x {n}");
        check(&format!("gate of {m} x {n}"), &g);
    }
}
