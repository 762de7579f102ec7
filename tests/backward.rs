//! Compiled derivatives on the device against the reference interpreter: every op that has one, at odd shapes, under both profiles.
//!
//! That the graphs themselves are right, finite differences in `autodiff` show.

use std::sync::{Arc, OnceLock};

use meganeura::autodiff::vjp;
use meganeura::codegen::{CompileOptions, DeviceKind, DeviceProfile, compile};
use meganeura::ir::interpreter::{Environment, interpret};
use meganeura::ir::testing::{random_tensor, relative_l2, sample_graphs};
use meganeura::ir::{DType, Graph, NodeId, TensorType};
use meganeura::runtime::{ParameterStore, Session};
use meganeura::{Device, DeviceSelector, Tensor};

fn device() -> &'static Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(&DeviceSelector::Auto).expect("a Vulkan device"))
}

/// The sample with the derivatives of a random combination of its output as its outputs; none where no input is a float.
fn backward(sample: &Graph) -> Option<Graph> {
    let mut g = sample.clone();
    let y = g.outputs()[0].node;
    let is_input = |g: &Graph, id: &NodeId| matches!(g.node(*id).op, meganeura::ir::Op::Input(_));
    let inputs: Vec<NodeId> = g.ids().filter(|id| is_input(&g, id) && g.ty(*id).dtype.is_float()).collect();
    if inputs.is_empty() || !g.ty(y).dtype.is_float() {
        return None;
    }
    let cotangent = g.input("cotangent", g.ty(y).clone()).expect("the name is free");
    let gradients = vjp(&mut g, &[(y, cotangent)], &inputs).ok()?;
    g.clear_outputs();
    for (i, gradient) in gradients.into_iter().enumerate() {
        g.output(format!("dx{i}"), gradient).expect("the name is free");
    }
    Some(g)
}

fn check(kind: DeviceKind) {
    let profile = DeviceProfile { kind, ..device().profile().clone() };
    let (mut failures, mut count) = (Vec::new(), 0);
    for (name, sample) in sample_graphs() {
        let Some(graph) = backward(&sample) else { continue };
        count += 1;
        let inputs: Vec<Tensor> =
            graph.inputs().iter().enumerate().map(|(i, info)| random_tensor(&info.ty, i as u64 + 1)).collect();
        let wanted = interpret(&graph, &Environment::<f64>::from_tensors(&inputs, [])).expect("samples evaluate");
        let verified = graph.clone().verify().expect("derivatives are well typed");
        let program = match compile(&verified, &profile, &CompileOptions::default()) {
            Ok(compiled) => Arc::new(compiled.program),
            Err(e) => {
                failures.push(format!("{name}: {e}"));
                continue;
            }
        };
        let store = ParameterStore::new(device(), &program).expect("no parameters");
        let mut session = Session::new(device(), program, &store).expect("the program fits");
        let outputs = session.run_ordered(&inputs.iter().collect::<Vec<_>>()).expect("the program runs");
        for (output, (info, want)) in outputs.iter().zip(graph.outputs().iter().zip(wanted.outputs())) {
            let ty = graph.ty(info.node);
            let want = want.to_tensor(&TensorType::new(DType::F64, ty.shape.clone())).expect("a float");
            let error = relative_l2(&output.to_f64_vec(), &want.to_f64_vec());
            // Some derivatives are sums that nearly cancel: their error is relative to the terms.
            let tolerance = match ty.dtype {
                DType::F16 => 1e-3,
                DType::BF16 => 8e-3,
                _ => 5e-4,
            };
            if error > tolerance {
                failures.push(format!("{} of {name}: relative error {error:.3e}", info.name));
            }
        }
    }
    assert!(count > 100, "{count} samples have derivatives");
    assert!(failures.is_empty(), "{} derivatives fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_derivative_agrees_with_the_interpreter_under_the_software_profile() {
    check(DeviceKind::Software);
}

#[test]
fn every_derivative_agrees_with_the_interpreter_under_the_generic_profile() {
    check(DeviceKind::Generic);
}
