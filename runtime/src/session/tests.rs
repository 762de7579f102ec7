use std::cell::Cell;
use std::sync::Once;

use blade_graphics::{BufferDesc, CommandEncoderDesc, Context, ContextDesc, Memory};
use meganeura_codegen::program::Access::{self, Read, ReadWrite};
use meganeura_codegen::program::Region;
use meganeura_ir::DType;

use super::*;
use crate::assemble::Assembler;
use crate::fault::{Fault, Site};
use crate::testing::device;

const LANES: usize = 64;

fn f32s(n: usize) -> TensorType {
    TensorType::new(DType::F32, [n])
}

/// `value` for each `i < n`, from buffers `b0`, `b1`, .. of which the last is written.
fn map(a: &mut Assembler, access: &[Access], types: &[&str], n: usize, value: &str) -> usize {
    let mut wgsl = String::new();
    for (index, (access, ty)) in access.iter().zip(types).enumerate() {
        let mode = if *access == Read { "read" } else { "read_write" };
        wgsl += &format!("@group(0) @binding({index}) var<storage, {mode}> b{index}: array<{ty}>;\n");
    }
    wgsl += &format!(
        "@compute @workgroup_size({LANES})
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
            let i = id.x;
            if (i < {n}u) {{ b{}[i] = {value}; }}
        }}",
        access.len() - 1
    );
    a.kernel(value, &wgsl, [LANES as u32, 1, 1], access)
}

fn groups(n: usize) -> [u32; 3] {
    [n.div_ceil(LANES) as u32, 1, 1]
}

fn ramp(n: usize, from: f32) -> Tensor {
    Tensor::from_f32([n], &(0..n).map(|i| from + i as f32).collect::<Vec<_>>())
}

fn session(program: Program) -> Session {
    session_with(program, SessionOptions::default())
}

fn session_with(program: Program, options: SessionOptions) -> Session {
    let store = ParameterStore::new(device(), &program).unwrap();
    Session::with_options(device(), Arc::new(program), &store, options).unwrap()
}

/// `y[i] = 2 x[i] + 1`
fn affine(n: usize) -> Program {
    let mut a = Assembler::new();
    let (x, y) = (a.input("x", f32s(n)), a.output("y", f32s(n)));
    let kernel = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, "2.0 * b0[i] + 1.0");
    a.dispatch(kernel, &[x, y], groups(n), false);
    a.finish()
}

/// `w += x`, then `y = w`: the output shows all inputs so far.
fn accumulate(n: usize) -> Program {
    let mut a = Assembler::new();
    let w = a.parameter(Space::Parameters, "w", f32s(n));
    let (x, y) = (a.input("x", f32s(n)), a.output("y", f32s(n)));
    let add = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, "b1[i] + b0[i]");
    let copy = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, "b0[i]");
    a.dispatch(add, &[x, w], groups(n), false);
    a.dispatch(copy, &[w, y], groups(n), true);
    a.finish()
}

/// `count` dispatches, each reading its neighbour's result of the one before: `y[i] = x[(i + count) % n] + count`.
fn chain(n: usize, count: usize) -> Program {
    let mut a = Assembler::new();
    let (x, y) = (a.input("x", f32s(n)), a.output("y", f32s(n)));
    let scratch = [a.region(Space::Scratch, n as u64 * 4), a.region(Space::Scratch, n as u64 * 4)];
    let step = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, &format!("b0[(i + 1u) % {n}u] + 1.0"));
    for index in 0..count {
        let from = if index == 0 { x } else { scratch[index % 2] };
        let to = if index + 1 == count { y } else { scratch[(index + 1) % 2] };
        a.dispatch(step, &[from, to], groups(n), index > 0);
    }
    a.finish()
}

fn chained(n: usize, count: usize, from: f32) -> Tensor {
    Tensor::from_f32([n], &(0..n).map(|i| from + ((i + count) % n) as f32 + count as f32).collect::<Vec<_>>())
}

#[test]
fn a_step_computes_its_outputs_at_odd_sizes() {
    for n in [1, 7, 33, 257, 1000] {
        let y = session(affine(n)).run(&[("x", &ramp(n, -3.0))]).unwrap();
        let expected: Vec<f32> = (0..n).map(|i| 2.0 * (i as f32 - 3.0) + 1.0).collect();
        assert_eq!(y, [Tensor::from_f32([n], &expected)]);
    }
}

#[test]
fn a_chain_of_dispatches_sees_every_write() {
    let (n, count) = (1027, 100);
    let mut session = session(chain(n, count));
    for from in [0.0, 5.0, -9.0] {
        assert_eq!(session.run_ordered(&[&ramp(n, from)]).unwrap(), [chained(n, count, from)]);
    }
}

#[test]
fn splitting_into_submissions_changes_nothing() {
    let (n, count) = (300, 40);
    for dispatches in [1, 7, 39, 40] {
        let submission = SubmissionLimits { dispatches, ..SubmissionLimits::default() };
        let mut session = session_with(chain(n, count), SessionOptions { submission });
        assert_eq!(session.submissions.len(), count.div_ceil(dispatches));
        for from in [1.0, 2.0, 3.0] {
            assert_eq!(session.run_ordered(&[&ramp(n, from)]).unwrap(), [chained(n, count, from)]);
        }
    }
}

#[test]
fn parameters_are_updated_in_place_and_persist() {
    let n = 100;
    let mut session = session(accumulate(n));
    assert_eq!(session.read_parameter(ParameterId(0)).unwrap(), Tensor::zeros(f32s(n)));
    session.write_parameter(ParameterId(0), &ramp(n, 0.0)).unwrap();
    let ones = Tensor::from_f32([n], &vec![1.0; n]);
    for step in 1..=5 {
        let y = session.run(&[("x", &ones)]).unwrap();
        assert_eq!(y, [ramp(n, step as f32)]);
    }
    assert_eq!(session.read_parameter(ParameterId(0)).unwrap(), ramp(n, 5.0));
    assert_eq!(session.store().read_parameter(ParameterId(0)).unwrap(), ramp(n, 5.0));
}

#[test]
fn double_buffering_equals_serial_execution() {
    let n = 5000;
    let inputs: Vec<Tensor> = (0..10).map(|step| ramp(n, step as f32 * 7.0)).collect();
    let mut serial = session(accumulate(n));
    let expected: Vec<_> = inputs.iter().map(|x| serial.run_ordered(&[x]).unwrap()).collect();

    let mut pipelined = session(accumulate(n));
    let mut outputs = Vec::new();
    let mut before: Option<Ticket> = None;
    for x in &inputs {
        let ticket = pipelined.submit_ordered(&[x]).unwrap();
        if let Some(before) = before.replace(ticket) {
            outputs.push(pipelined.wait(before).unwrap());
        }
    }
    outputs.push(pipelined.wait(before.unwrap()).unwrap());
    assert_eq!(outputs, expected);
    let last: Vec<f32> = (0..n).map(|i| (0..10).map(|step| (i + step * 7) as f32).sum()).collect();
    assert_eq!(outputs[9], [Tensor::from_f32([n], &last)]);
}

#[test]
fn tickets_are_good_once_for_two_steps_and_for_their_session() {
    let (mut one, mut two) = (session(affine(3)), session(affine(3)));
    let x = ramp(3, 0.0);
    let first = one.submit_ordered(&[&x]).unwrap();
    let second = one.submit_ordered(&[&x]).unwrap();
    let third = one.submit_ordered(&[&x]).unwrap();
    assert_eq!(one.wait(first), Err(SessionError::ExpiredTicket(0)));
    one.finish().unwrap();
    assert_eq!(two.wait(second), Err(SessionError::ForeignTicket));
    assert!(one.wait(third).is_ok());
    assert_eq!(one.wait(Ticket { session: one.id, step: 2 }), Err(SessionError::ExpiredTicket(2)));
}

#[test]
fn sessions_share_parameters_and_own_their_optimizer_state() {
    let n = 10;
    let state = || {
        let mut a = Assembler::new();
        let w = a.parameter(Space::Parameters, "w", f32s(n));
        let m = a.parameter(Space::Optimizer, "m", f32s(n));
        let x = a.input("x", f32s(n));
        let add = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, "b1[i] + b0[i]");
        a.dispatch(add, &[x, m], groups(n), false);
        a.dispatch(add, &[m, w], groups(n), true);
        a.finish()
    };
    let reader = Arc::new(accumulate(n));
    let store = ParameterStore::new(device(), &reader).unwrap();
    let mut reader = Session::new(device(), reader, &store).unwrap();
    let mut trainers = [0; 2].map(|_| Session::new(device(), Arc::new(state()), &store).unwrap());
    let (one, zero) = (Tensor::from_f32([n], &vec![1.0; n]), Tensor::zeros(f32s(n)));
    for _ in 0..2 {
        assert!(trainers[0].run_ordered(&[&one]).unwrap().is_empty());
    }
    trainers[1].run_ordered(&[&one]).unwrap();
    // 1 + 2 from the first, 1 from the second.
    assert_eq!(reader.run_ordered(&[&zero]).unwrap(), [Tensor::from_f32([n], &vec![4.0; n])]);

    let ids = [ParameterId(1), ParameterId(0)];
    assert_eq!(trainers[0].read_parameters(&ids).unwrap()[0], Tensor::from_f32([n], &vec![2.0; n]));
    assert_eq!(trainers[1].read_parameters(&ids).unwrap()[0], one);
    trainers[1].write_parameter(ParameterId(1), &zero).unwrap();
    assert_eq!(trainers[1].read_parameter(ParameterId(1)).unwrap(), zero);
    assert_eq!(store.read_parameter(ParameterId(1)), Err(ParameterError::Unknown(ParameterId(1))));
    let own = ParameterStore::new(device(), &state()).unwrap();
    assert_eq!(own.read_parameter(ParameterId(1)), Err(ParameterError::Optimizer("m".into())));
}

#[test]
fn a_store_of_another_layout_is_refused() {
    let refusal = |stored: Program, wanted: Program| {
        let store = ParameterStore::new(device(), &stored).unwrap();
        match Session::new(device(), Arc::new(wanted), &store).err() {
            Some(SessionError::Store(reason)) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert!(refusal(accumulate(10), accumulate(100)).contains("512"));
    let mut renamed = accumulate(10);
    renamed.parameters[0].name = "v".into();
    assert_eq!(refusal(accumulate(10), renamed), "parameter v is not in the store");
    assert!(refusal(accumulate(10), accumulate(11)).contains("w is f32[11], not f32[10]"));
    assert!(refusal(affine(10), accumulate(10)).contains("buffers"));
}

#[test]
fn wrong_inputs_are_named() {
    let mut session = session(affine(4));
    let x = ramp(4, 0.0);
    assert_eq!(session.run(&[]), Err(SessionError::MissingInput("x".into())));
    assert_eq!(session.run(&[("x", &x), ("x", &x)]), Err(SessionError::DuplicateInput("x".into())));
    let unknown = session.run(&[("y", &x)]).unwrap_err();
    assert_eq!(unknown.to_string(), "there is no input \"y\"; the inputs are x");
    assert_eq!(session.run_ordered(&[]), Err(SessionError::InputCount { expected: 1, found: 0 }));
    for wrong in [ramp(5, 0.0), Tensor::from_f64(DType::F64, [4], &[0.0; 4]), ramp(4, 0.0).reshaped([2, 2]).unwrap()] {
        let error = session.run(&[("x", &wrong)]).unwrap_err();
        assert_eq!(error.to_string(), format!("input \"x\" must be f32[4], it is {}", wrong.ty()));
    }
    assert!(session.run(&[("x", &x)]).is_ok());
}

#[test]
fn wrong_parameter_values_change_nothing() {
    let n = 4;
    let mut session = session(accumulate(n));
    session.write_parameter(ParameterId(0), &ramp(n, 1.0)).unwrap();
    let error = session.write_parameters(&[(ParameterId(0), &ramp(n, 9.0)), (ParameterId(7), &ramp(n, 9.0))]);
    assert_eq!(error, Err(ParameterError::Unknown(ParameterId(7))));
    let error = session.write_parameter(ParameterId(0), &ramp(n + 1, 9.0)).unwrap_err();
    assert_eq!(error.to_string(), "parameter w is f32[4], the value f32[5]");
    assert_eq!(session.read_parameter(ParameterId(0)).unwrap(), ramp(n, 1.0));
}

#[test]
fn every_dtype_passes_through_a_step() {
    for dtype in DType::ALL {
        let word = match dtype.class() {
            meganeura_ir::DTypeClass::Float => "f32",
            _ if dtype.device() == meganeura_ir::DeviceType::I32 => "i32",
            _ => "u32",
        };
        let ty = TensorType::new(dtype, [3, 2]);
        let mut a = Assembler::new();
        let (x, y) = (a.input("x", ty.clone()), a.output("y", ty));
        let kernel = map(&mut a, &[Read, ReadWrite], &[word; 2], 6, "b0[5u - i]");
        a.dispatch(kernel, &[x, y], groups(6), false);
        let values = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0];
        let reversed: Vec<f64> = values.iter().rev().copied().collect();
        let y = session(a.finish()).run_ordered(&[&Tensor::from_f64(dtype, [3, 2], &values)]).unwrap();
        assert_eq!(y, [Tensor::from_f64(dtype, [3, 2], &reversed)]);
    }
}

#[test]
fn an_index_beyond_32_bits_is_refused_by_name() {
    let ty = TensorType::new(DType::I64, [2]);
    let mut a = Assembler::new();
    let (x, y) = (a.input("ids", ty.clone()), a.output("y", ty));
    let kernel = map(&mut a, &[Read, ReadWrite], &["i32"; 2], 2, "b0[i]");
    a.dispatch(kernel, &[x, y], groups(2), false);
    let mut session = session(a.finish());
    let error = session.run(&[("ids", &Tensor::from_i64(DType::I64, [2], &[3, 1 << 40]))]).unwrap_err();
    assert!(error.to_string().starts_with("input ids: element 1 is 1099511627776"), "{error}");
    let fine = Tensor::from_i64(DType::I64, [2], &[-3, 1 << 20]);
    assert_eq!(session.run(&[("ids", &fine)]).unwrap(), [fine]);
}

#[test]
fn empty_tensors_and_empty_programs_run() {
    let empty = TensorType::new(DType::F16, [0, 3]);
    let mut a = Assembler::new();
    a.parameter(Space::Parameters, "nothing", f32s(0));
    a.output_at("none", empty.clone(), None);
    let mut program = a.finish();
    program.inputs.push(Binding { name: "x".into(), ty: empty.clone(), region: None });
    program.inputs.push(Binding { name: "unused".into(), ty: f32s(2), region: None });
    program.memory.parameters.clear();
    let mut session = session(program);
    let x = Tensor::zeros(empty.clone());
    let y = session.run(&[("unused", &ramp(2, 0.0)), ("x", &x)]).unwrap();
    assert_eq!(y, [Tensor::zeros(empty)]);
    assert_eq!(session.read_parameter(ParameterId(0)).unwrap(), Tensor::zeros(f32s(0)));
    session.write_parameter(ParameterId(0), &Tensor::zeros(f32s(0))).unwrap();
    assert!(session.chunks(3).is_empty() && session.profile().unwrap().is_empty());
}

#[test]
fn outputs_may_be_constants_or_parameters() {
    let mut a = Assembler::new();
    let c = a.constant(vec![7, 8, 9]);
    let w = a.parameter(Space::Parameters, "w", f32s(2));
    a.output_at("c", TensorType::new(DType::I32, [3]), Some(c));
    a.output_at("w", f32s(2), Some(w));
    let mut session = session(a.finish());
    session.write_parameter(ParameterId(0), &ramp(2, 5.0)).unwrap();
    assert_eq!(session.run(&[]).unwrap(), [Tensor::from_i64(DType::I32, [3], &[7, 8, 9]), ramp(2, 5.0)]);
}

#[test]
fn chunks_cover_the_program_once() {
    let session = session(chain(16, 10));
    for count in [0, 1, 3, 10, 99] {
        let chunks = session.chunks(count);
        assert!(chunks.len() <= count.max(1) && chunks.iter().all(|c| !c.is_empty()), "{chunks:?}");
        assert_eq!(chunks.into_iter().flatten().collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    }
    assert_eq!(session.chunks(5).len(), 5);
}

#[test]
fn a_host_records_a_session_between_its_own_passes() {
    // SAFETY: nothing else is asked of the driver than in `Device::open`.
    let context = Arc::new(unsafe { Context::init(ContextDesc::default()) }.unwrap());
    let device = Device::with_context(context.clone()).unwrap();
    let (n, count) = (500, 12);
    let program = Arc::new(chain(n, count));
    let store = ParameterStore::new(&device, &program).unwrap();
    let mut session = Session::new(&device, program, &store).unwrap();
    let size = n as u64 * 4;
    let kept = context.create_buffer(BufferDesc { name: "kept", size, memory: Memory::Download });

    for manual_barriers in [false, true] {
        let desc = CommandEncoderDesc { name: "host", buffer_count: 1, manual_barriers };
        let mut encoder = context.create_command_encoder(desc);
        session.write_inputs(&[("x", &ramp(n, 50.0))]).unwrap();
        encoder.start();
        for chunk in session.chunks(4) {
            // The host's own pass overwrites nothing of the session's.
            encoder.transfer("host").fill_buffer(kept.into(), size, 0xff);
            session.record(&mut encoder, chunk).unwrap();
        }
        encoder.barrier();
        let result = session.output_buffer("y").unwrap();
        encoder.transfer("keep").copy_buffer_to_buffer(result, kept.into(), size);
        let sync = context.submit(&mut encoder);
        assert_eq!(context.wait_for(&sync, u32::MAX), Ok(true));
        // SAFETY: `kept` is mapped, `n` floats long, and the device is done with it.
        let words = unsafe { std::slice::from_raw_parts(kept.data().cast::<f32>(), n) };
        assert_eq!(Tensor::from_f32([n], words), chained(n, count, 50.0));
        assert_eq!(session.read_outputs().unwrap(), [chained(n, count, 50.0)]);
        context.destroy_command_encoder(&mut encoder);
    }
    assert_eq!(session.run_ordered(&[&ramp(n, 1.0)]).unwrap(), [chained(n, count, 1.0)]);
    assert!(session.input_buffer("x").is_some() && session.input_buffer("y").is_none());
    context.destroy_buffer(kept);
}

#[test]
fn a_chunk_outside_the_program_is_an_error() {
    let mut session = session(affine(2));
    let desc = CommandEncoderDesc { name: "host", buffer_count: 1, manual_barriers: false };
    let mut encoder = device().context().create_command_encoder(desc);
    assert_eq!(session.record(&mut encoder, 0..2), Err(SessionError::Chunk { range: 0..2, total: 1 }));
    device().context().destroy_command_encoder(&mut encoder);
}

#[test]
fn a_profile_times_every_dispatch_and_counts_as_a_step() {
    let n = 8;
    let mut accumulating = session(accumulate(n));
    accumulating.write_inputs(&[("x", &ramp(n, 0.0))]).unwrap();
    let times = accumulating.profile().unwrap();
    let labels: Vec<&str> = times.iter().map(|t| t.label.as_str()).collect();
    assert_eq!(labels, ["b1[i] + b0[i]", "b0[i]"]);
    assert_eq!(accumulating.read_parameter(ParameterId(0)).unwrap(), ramp(n, 0.0));

    let count = blade_graphics::limits::PASS_COUNT + 7;
    let submission = SubmissionLimits { dispatches: usize::MAX, ..SubmissionLimits::default() };
    let mut long = session_with(chain(n, count), SessionOptions { submission });
    long.write_inputs(&[("x", &ramp(n, 0.0))]).unwrap();
    let times = long.profile().unwrap();
    assert!(times.iter().map(|t| t.dispatch).eq(0..count));
    assert!(times.iter().map(|t| t.time).sum::<Duration>() > Duration::ZERO);
    assert_eq!(long.read_outputs().unwrap(), [chained(n, count, 0.0)]);
}

#[test]
fn a_program_that_breaks_its_rules_is_refused() {
    let mut program = affine(4);
    program.dispatches[0].workgroups = [0, 1, 1];
    let store = ParameterStore::new(device(), &program).unwrap();
    let error = Session::new(device(), Arc::new(program), &store).err();
    assert!(matches!(error, Some(SessionError::Program(ProgramError::Workgroups { dispatch: 0, .. }))), "{error:?}");
}

#[test]
fn a_dead_device_answers_with_errors_and_drops_cleanly() {
    let device = Device::with_context(device().context().clone()).unwrap();
    let program = Arc::new(accumulate(4));
    let store = ParameterStore::new(&device, &program).unwrap();
    let mut session = Session::new(&device, program, &store).unwrap();
    let ticket = session.submit_ordered(&[&ramp(4, 0.0)]).unwrap();
    session.finish().unwrap();
    device.kill(&DeviceError::OutOfMemory);
    assert_eq!(session.run_ordered(&[&ramp(4, 0.0)]), Err(SessionError::Device(DeviceError::Dead)));
    assert_eq!(session.read_parameter(ParameterId(0)), Err(ParameterError::Device(DeviceError::Dead)));
    drop((ticket, session, store));
}

#[test]
fn a_fault_anywhere_is_an_error_and_another_device_goes_on() {
    let steps = |device: &Arc<Device>| {
        let program = Arc::new(accumulate(4));
        let store = ParameterStore::new(device, &program)?;
        let mut session = Session::new(device, program, &store)?;
        let first = session.submit_ordered(&[&ramp(4, 0.0)])?;
        let second = session.submit_ordered(&[&ramp(4, 1.0)])?;
        session.wait(first)?;
        session.wait(second)
    };
    let whole = steps(device()).unwrap();
    let faults = [(Fault::Lost, DeviceError::Lost), (Fault::OutOfMemory, DeviceError::OutOfMemory)];
    for (site, fault) in
        [Site::Allocation, Site::Submission, Site::Wait].into_iter().flat_map(|site| faults.iter().map(move |f| (site, f)))
    {
        let mut failures = 0;
        for after in 0.. {
            let failing = Device::with_context(device().context().clone()).unwrap();
            failing.inject(site, after, fault.0);
            match steps(&failing) {
                Ok(outputs) => {
                    assert_eq!(outputs, whole);
                    break;
                }
                Err(SessionError::Device(error) | SessionError::Parameter(ParameterError::Device(error))) => {
                    assert_eq!(error, fault.1, "{site:?} {after}");
                    assert!(failing.is_dead());
                    assert_eq!(steps(&failing).unwrap_err().to_string(), DeviceError::Dead.to_string());
                    failures += 1;
                }
                Err(other) => panic!("{site:?} {after}: {other}"),
            }
        }
        assert!(failures >= 3, "{site:?} failed {failures} times");
    }
    assert_eq!(steps(device()).unwrap(), whole);
}

#[test]
fn sessions_move_between_threads() {
    let mut session = session(affine(5));
    let moved = std::thread::spawn(move || session.run_ordered(&[&ramp(5, 0.0)]).unwrap());
    assert_eq!(moved.join().unwrap()[0].to_f32_vec(), [1.0, 3.0, 5.0, 7.0, 9.0]);
    fn shared<T: Send + Sync>() {}
    shared::<ParameterStore>();
    shared::<Device>();
}

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what blade reports as created, per thread.
struct AllocationCounter;

impl log::Log for AllocationCounter {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        if record.target().starts_with("blade_graphics") && record.args().to_string().starts_with("Creating") {
            ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        }
    }

    fn flush(&self) {}
}

#[test]
fn steps_allocate_nothing_after_the_second() {
    static LOGGER: Once = Once::new();
    LOGGER.call_once(|| {
        log::set_logger(&AllocationCounter).unwrap();
        log::set_max_level(log::LevelFilter::Info);
    });
    let n = 70;
    let mut a = Assembler::new();
    let x = a.input("x", f32s(n));
    let y = a.output("y", f32s(n));
    let scratch = [0; 5].map(|_| a.region(Space::Scratch, n as u64 * 4));
    let sum = ["b0[i]", "b0[i] + b1[i]", "b0[i] + b1[i] + b2[i]", "b0[i] + b1[i] + b2[i] + b3[i]"];
    for index in 0..200 {
        let count = index % sum.len() + 1;
        let access: Vec<Access> = (0..count).map(|_| Read).chain([ReadWrite]).collect();
        let kernel = map(&mut a, &access, &vec!["f32"; count + 1], n, sum[count - 1]);
        let target = if index == 199 { y } else { scratch[4] };
        let regions: Vec<Region> = [x].into_iter().chain(scratch).take(count).chain([target]).collect();
        a.dispatch(kernel, &regions, groups(n), true);
    }
    let mut program = a.finish();
    for dispatch in &mut program.dispatches {
        dispatch.kernel %= sum.len();
    }
    program.kernels.truncate(sum.len());
    let mut session = session(program);
    assert!(ALLOCATIONS.get() > 0, "blade reports what it creates");
    let input = ramp(n, 0.0);
    for step in 0..12 {
        ALLOCATIONS.set(0);
        session.run_ordered(&[&input]).unwrap();
        let settled = step >= SLOTS;
        assert!(!settled || ALLOCATIONS.get() == 0, "step {step} created {}", ALLOCATIONS.get());
    }
}

/// `s += x` in the optimiser's state, then `y = s`.
fn stateful(n: usize) -> Program {
    let mut a = Assembler::new();
    let s = a.parameter(Space::Optimizer, "s", f32s(n));
    let (x, y) = (a.input("x", f32s(n)), a.output("y", f32s(n)));
    let add = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, "b1[i] + b0[i]");
    let copy = map(&mut a, &[Read, ReadWrite], &["f32"; 2], n, "b0[i]");
    a.dispatch(add, &[x, s], groups(n), false);
    a.dispatch(copy, &[s, y], groups(n), true);
    a.finish()
}

#[test]
fn sessions_beside_each_other_share_the_state_of_the_optimiser() {
    let n = 5;
    let mut first = session(stateful(n));
    let mut second = first.beside(Arc::new(stateful(n))).unwrap();
    let mut apart = Session::new(device(), Arc::new(stateful(n)), first.store()).unwrap();
    let one = ramp(n, 1.0);
    let run = |session: &mut Session| session.run(&[("x", &one)]).unwrap().remove(0);
    let times = |count: f64| one.to_f64_vec().iter().map(|v| v * count).collect::<Vec<_>>();
    assert_eq!(run(&mut first).to_f64_vec(), times(1.0));
    assert_eq!(run(&mut second).to_f64_vec(), times(2.0));
    drop(first);
    assert_eq!(run(&mut second).to_f64_vec(), times(3.0));
    assert_eq!(run(&mut apart).to_f64_vec(), times(1.0));
    assert!(matches!(second.beside(Arc::new(stateful(n + 1))), Err(SessionError::Store(_))));
}
