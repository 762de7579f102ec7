//! Contractions under the profiles of devices that are not here: every schedule must be right on any device.

use std::sync::{Arc, OnceLock};

use meganeura_codegen::{CompileOptions, DeviceProfile, compile};
use meganeura_ir::interpreter::{Environment, interpret};
use meganeura_ir::testing::{contraction_graphs, random_tensor, relative_l2};
use meganeura_ir::{Graph, Tensor};
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

/// Checks the contractions whose names begin with `name`.
fn check_all(name: &str) {
    let graphs = contraction_graphs();
    let mut named = graphs.iter().filter(|(own, _)| own.starts_with(name)).peekable();
    assert!(named.peek().is_some(), "there is no {name}");
    named.for_each(|(name, graph)| check(name, graph));
}

#[test]
fn products_of_all_shapes_and_layouts_agree_under_every_schedule() {
    check_all("product");
}

#[test]
fn convolutions_agree_under_every_schedule() {
    check_all("convolution");
}

#[test]
fn integer_products_are_exact_under_every_schedule() {
    check_all("integers");
}

#[test]
fn sums_of_contractions_agree_under_every_schedule() {
    check_all("sum");
}

#[test]
fn a_product_and_what_gates_it_agree_under_every_schedule() {
    check_all("gate");
}

#[test]
fn contractions_that_are_added_up_or_gate_each_other_are_one_dispatch() {
    for (name, graph) in contraction_graphs().into_iter().filter(|(name, _)| name.starts_with("sum") || name.starts_with("gate"))
    {
        let verified = graph.verify().unwrap();
        let program = compile(&verified, &DeviceProfile::generic(), &CompileOptions::default()).unwrap().program;
        assert_eq!(program.dispatches.len(), 1, "{name}");
    }
}
