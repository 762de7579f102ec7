//! Random graphs on the device against the interpreter, saturated or not, under several profiles.

use std::sync::{Arc, OnceLock};

use meganeura_codegen::saturate::Limits;
use meganeura_codegen::{CompileOptions, DeviceProfile, compile};
use meganeura_ir::interpreter::{Environment, interpret};
use meganeura_ir::testing::{random_graph, random_tensor, relative_l2};
use meganeura_ir::{Graph, ParameterId, Tensor};
use meganeura_runtime::{Device, DeviceSelector, ParameterStore, Session};
use proptest::prelude::*;

/// Rounding that sums of several hundred terms accumulate.
const TOLERANCE: f64 = 2e-5;

fn device() -> &'static Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(&DeviceSelector::Auto).expect("a Vulkan device"))
}

/// Outputs and updated parameters of one step.
fn run(graph: &Graph, inputs: &[Tensor], weight: &Tensor, profile: &DeviceProfile, saturate: Option<Limits>) -> Vec<Tensor> {
    let options = CompileOptions { saturate, memory_limit: None };
    let program = compile(&graph.clone().verify().unwrap(), profile, &options).unwrap().program;
    let program = Arc::new(program);
    let store = ParameterStore::new(device(), &program).unwrap();
    let mut session = Session::new(device(), program, &store).unwrap();
    session.write_parameter(ParameterId(0), weight).unwrap();
    let mut results = session.run_ordered(&inputs.iter().collect::<Vec<_>>()).unwrap();
    results.extend(graph.updates().iter().map(|update| session.read_parameter(update.parameter).unwrap()));
    results
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_graphs_agree_with_the_interpreter(
        sizes in prop::sample::select(vec![[2, 3], [5, 33], [17, 20]]),
        choices in prop::collection::vec(any::<[u8; 4]>(), 1..16),
        max_storage_bindings in prop::sample::select(vec![4u32, 8, 16]),
        profile in prop::sample::select(vec![DeviceProfile::generic(), DeviceProfile::software()]),
    ) {
        let graph = random_graph(sizes, &choices);
        let own = device().profile();
        let profile = DeviceProfile { max_storage_bindings, max_loop_iterations: own.max_loop_iterations, ..profile };
        let inputs: Vec<Tensor> = graph.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
        let weight = random_tensor(&graph.parameters()[0].ty, 9);
        let expected = interpret(&graph, &Environment::<f64>::from_tensors(&inputs, std::slice::from_ref(&weight))).unwrap();
        let expected: Vec<Vec<f64>> = {
            let updates = expected.updates().into_iter().map(|(_, value)| value);
            expected.outputs().into_iter().chain(updates).map(|value| value.to_f64_vec()).collect()
        };
        for saturate in [None, Some(Limits { nodes: 3000, iterations: 6 })] {
            let found = run(&graph, &inputs, &weight, &profile, saturate);
            prop_assert_eq!(found.len(), expected.len());
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // Sums of as many positive as negative numbers are judged by the size of their terms.
                let norm = expected.iter().map(|v| v * v).sum::<f64>().sqrt();
                let size = norm.max((expected.len() as f64).sqrt());
                let error = if norm > 0.0 { relative_l2(&found.to_f64_vec(), expected) * norm / size } else { relative_l2(&found.to_f64_vec(), expected) };
                prop_assert!(error <= TOLERANCE, "result {} is off by {:e}, saturated: {}\n{}", index, error, saturate.is_some(), graph);
            }
        }
    }
}
