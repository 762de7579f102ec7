//! Kernels for Apple's GPUs: each translates to the Metal Shading Language within Metal's limits. There is no such device here: what the
//! driver makes of the text is not tested.

mod common;

use std::collections::HashSet;

use common::fixture;
use meganeura::codegen::program::{Access, Kernel};
use meganeura::codegen::{CompileOptions, DeviceProfile, compile};
use meganeura::ir::Graph;
use meganeura::ir::testing::{contraction_graphs, sample_graphs};
use meganeura::{Bindings, Dataset, Loss, Mode, Model, Objective, Phase, WorkPhase};
use naga::back::msl;

/// Buffers that a kernel of Metal may have.
const BUFFERS: usize = 31;
/// Threadgroup memory of every Apple GPU, in bytes.
const WORKGROUP_BYTES: u32 = 32 << 10;
const INVOCATIONS: u32 = 1024;

/// Translates a kernel as the graphics library does, which needs one buffer more for the sizes of the others.
fn translate(kernel: &Kernel) -> Result<String, String> {
    let module = naga::front::wgsl::parse_str(&kernel.wgsl).map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    let mut validator = naga::valid::Validator::new(naga::valid::ValidationFlags::all(), msl::supported_capabilities());
    let info = validator.validate(&module).map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    let buffers = kernel.access.len() + 1;
    if buffers > BUFFERS {
        return Err(format!("{buffers} buffers"));
    }
    let invocations: u32 = module.entry_points.iter().map(|e| e.workgroup_size.iter().product::<u32>()).sum();
    if invocations > INVOCATIONS {
        return Err(format!("workgroups of {invocations}"));
    }
    // Metal places each array at a multiple of 16 bytes.
    let arrays = module.global_variables.iter().filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup);
    let bytes: u32 = arrays.map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()).next_multiple_of(16)).sum();
    if bytes > WORKGROUP_BYTES {
        return Err(format!("{bytes} bytes of workgroup memory"));
    }
    let resource = |(slot, access): (usize, &Access)| {
        let binding = naga::ResourceBinding { group: 0, binding: slot as u32 };
        let target = msl::BindTarget { buffer: Some(slot as u8), mutable: *access == Access::ReadWrite, ..Default::default() };
        (binding, target)
    };
    let resources = msl::EntryPointResources {
        resources: kernel.access.iter().enumerate().map(resource).collect(),
        sizes_buffer: Some(kernel.access.len() as u8),
        ..Default::default()
    };
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: [("main".to_owned(), resources)].into(),
        fake_missing_bindings: false,
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..msl::Options::default()
    };
    let pipeline =
        msl::PipelineOptions { entry_point: Some((naga::ShaderStage::Compute, "main".to_owned())), ..Default::default() };
    let (text, translated) = msl::write_string(&module, &info, &options, &pipeline).map_err(|e| e.to_string())?;
    translated.entry_point_names.into_iter().collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    Ok(text)
}

/// Translates all kernels of the graphs, with saturation and without, and returns how many different ones there were.
fn translate_all(graphs: impl IntoIterator<Item = (String, Graph)>) -> usize {
    let (mut seen, mut failures) = (HashSet::new(), Vec::new());
    for (name, graph) in graphs {
        let graph = graph.verify().expect("the graph is valid");
        for options in [CompileOptions::default(), CompileOptions { saturate: None, ..CompileOptions::default() }] {
            let program = match compile(&graph, &DeviceProfile::apple(), &options) {
                Ok(compiled) => compiled.program,
                Err(e) => {
                    failures.push(format!("{name}: {e}"));
                    continue;
                }
            };
            for kernel in program.kernels {
                match translate(&kernel) {
                    Ok(text) if text.contains("kernel void") => {}
                    Ok(text) => failures.push(format!("{name}: {}: no kernel in\n{text}", kernel.label)),
                    Err(e) => failures.push(format!("{name}: {}: {e}", kernel.label)),
                }
                seen.insert(kernel.wgsl);
            }
        }
    }
    assert!(failures.is_empty(), "{} kernels fail:\n{}", failures.len(), failures.join("\n"));
    seen.len()
}

#[test]
fn kernels_of_every_op_become_metal() {
    let kernels = translate_all(sample_graphs());
    assert!(kernels > 500, "{kernels}");
}

#[test]
fn kernels_of_every_schedule_of_contractions_become_metal() {
    let kernels = translate_all(contraction_graphs());
    assert!(kernels > 40, "{kernels}");
}

#[test]
fn kernels_of_training_steps_become_metal() {
    let steps = ["action-expert", "llama", "resnet", "resnet-bn-train", "unet", "whisper"].map(|name| {
        let folder = fixture(&format!("corpus/{name}"));
        let model = Model::open(folder.join("model.onnx")).expect("the model");
        let loss = std::fs::read_to_string(folder.join("loss.txt")).expect("the name of the loss");
        let objective = Objective::new(Loss::from_name(loss.trim()).expect("a loss"));
        let data = Dataset::open(folder.join("data.npz")).expect("the data");
        // One exporter drops the training mode of batch normalisation.
        let batch_norm = if name == "resnet-bn-train" { Mode::Train } else { Mode::File };
        let bindings = Bindings { phase: Phase { batch_norm, ..Phase::default() }, ..Bindings::default() };
        let step = model.workload(WorkPhase::Step, Some(&objective), None, Some(&data), &bindings).expect("a training step");
        (name.to_owned(), step.graph)
    });
    let kernels = translate_all(steps);
    assert!(kernels > 100, "{kernels}");
}
