//! A host that renders frames shares its context and its encoder with sessions.

#[allow(dead_code)]
#[path = "../examples/co_tenancy/host.rs"]
mod host;
#[path = "../examples/co_tenancy/renderer.rs"]
mod renderer;
#[path = "../examples/co_tenancy/tenants.rs"]
mod tenants;

mod common;

use std::sync::Arc;

use blade_graphics::{Context, ContextDesc};
use common::fixture;
use host::{Host, Pass};
use meganeura::ir::ParameterId;
use meganeura::runtime::Session;
use meganeura::{Device, Model, Tensor};
use tenants::Tenants;

/// The weights and the optimiser's state.
fn state(session: &mut Session) -> Vec<Tensor> {
    let ids: Vec<ParameterId> = session.program().parameters.iter().map(|binding| binding.id).collect();
    session.read_parameters(&ids).expect("the parameters")
}

#[test]
fn frames_and_sessions_are_as_if_each_were_alone() {
    const FRAMES: usize = 5;
    // SAFETY: nothing else is asked of the driver than in `Device::open`.
    let context = Arc::new(unsafe { Context::init(ContextDesc::default()) }.expect("a Vulkan device"));
    let device = Device::with_context(context.clone()).expect("the context serves");
    let model = Model::open(fixture("digits-cnn.onnx")).expect("the model");

    let mut alone = Tenants::new(&device, &model, 5).expect("sessions");
    let results: Vec<_> =
        (0..FRAMES).map(|_| (alone.inference.run().expect("infers"), alone.training.run().expect("trains"))).collect();
    assert_ne!(results[0].0, results[1].0, "training changes what inference sees");
    let after = state(&mut alone.training.session);

    for chunks in [1, 2, 7] {
        let mut tenants = Tenants::new(&device, &model, 5).expect("sessions");
        let mut host = Host::new(&context);
        for (inferred, trained) in &results {
            let frame = host.render(&mut tenants, chunks).expect("a frame");
            assert!(frame.pixels == renderer::expected(frame.number), "frame {} with {chunks} chunks", frame.number);
            assert!(frame.inferred == *inferred && frame.trained == *trained, "frame {} with {chunks} chunks", frame.number);
            let count = |of: Pass| frame.passes.iter().filter(|pass| **pass == of).count();
            for guest in [Pass::Inference, Pass::Training] {
                assert!((chunks.min(3)..=chunks).contains(&count(guest)), "{:?}", frame.passes);
            }
        }
        assert!(state(&mut tenants.training.session) == after, "{chunks} chunks");
    }
}

#[test]
fn the_device_of_a_host_is_described_as_if_it_had_been_opened() {
    // SAFETY: as above.
    let context = Arc::new(unsafe { Context::init(ContextDesc::default()) }.expect("a Vulkan device"));
    let shared = Device::with_context(context).expect("the context serves");
    assert_eq!(shared.info(), &Device::list().expect("adapters")[shared.info().index]);
    assert!(shared.probes().iter().all(|probe| probe.passed));
}
