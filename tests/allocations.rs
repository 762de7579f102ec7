//! Training allocates nothing once every command buffer has been used: no heap memory, no device memory.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{device, fixture};
use meganeura::codegen::{CompileOptions, compile};
use meganeura::{
    Bindings, DType, Dataset, Error, Length, Loss, LossScale, Model, Objective, Optimizer, Tensor, TrainOptions, Trainer,
    WorkPhase,
};

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts { handles: 0, others: 0, live: 0 }) };
}

/// What a thread has allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    /// Allocations of 8 bytes: the Vulkan bindings return each descriptor set in a vector of its own.
    handles: u64,
    others: u64,
    /// Bytes in use.
    live: i64,
}

/// Counts what each thread allocates.
struct Counting;

fn count(allocated: Option<usize>, freed: usize) {
    COUNTS.with(|counts| {
        let Counts { handles, others, live } = counts.get();
        let handle = u64::from(allocated == Some(8) && freed == 0);
        let other = u64::from(allocated.is_some()) - handle;
        let live = live + allocated.unwrap_or(0) as i64 - freed as i64;
        counts.set(Counts { handles: handles + handle, others: others + other, live });
    });
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(Some(layout.size()), 0);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(None, layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(Some(size), layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Trains on seven samples in batches of two, and counts after the first steps, in which buffers find their sizes. Returns the descriptor sets
/// of a step.
fn train(steps: u64, accumulate: usize, clip: Option<f64>, ema: Option<f64>, loss_scale: Option<LossScale>) -> u64 {
    const FIRST: u64 = 8;
    let device = device();
    let model = Model::open(fixture("nonfinite/quotient.onnx")).unwrap();
    let x = Tensor::from_f64(DType::F32, [7, 3], &(0..21).map(|i| 0.5 + f64::from(i) * 0.01).collect::<Vec<_>>());
    let y = Tensor::from_f64(DType::F32, [7, 4], &[1.0; 28]);
    let options = TrainOptions {
        optimizer: Optimizer::from_name("adamw").unwrap(),
        learning_rate: 1e-4,
        batch: Some(2),
        accumulate,
        clip,
        ema,
        loss_scale,
        length: Length::Steps(FIRST + steps),
        ..TrainOptions::new(Objective::new(Loss::from_name("mse").unwrap()))
    };
    let data = Dataset::from_tensors([("x", x), ("y", y)]);
    let mut trainer = Trainer::new(&model, &device, &data, options).unwrap();
    let mut losses = 0.0;
    let mut train_to = |last| {
        let trained = trainer.train_to::<Error>(last, |report| {
            losses += report.loss;
            Ok(())
        });
        trained.unwrap();
        (COUNTS.with(Cell::get), device.buffers_created(), device.memory_in_use(), device.context().memory_stats().usage)
    };
    let before = train_to(FIRST);
    let after = train_to(FIRST + steps);
    let handles = after.0.handles - before.0.handles;
    let expected = (Counts { handles: after.0.handles, ..before.0 }, before.1, before.2, before.3);
    assert_eq!(after, expected, "allocations, buffers and bytes of device memory after {steps} steps, {losses}");
    assert_eq!(handles % steps, 0, "{handles} descriptor sets");
    handles / steps
}

#[test]
fn ten_thousand_steps_allocate_nothing() {
    let model = Model::open(fixture("nonfinite/quotient.onnx")).unwrap();
    let objective = Objective::new(Loss::from_name("mse").unwrap());
    let bindings = Bindings { dims: [("batch".to_owned(), 2)].into(), ..Bindings::default() };
    let step = model.workload(WorkPhase::Step, Some(&objective), None, None, &bindings).unwrap();
    let plan = compile(&step.graph.verify().unwrap(), device().profile(), &CompileOptions::default()).unwrap();
    // A set that its pool has no room for costs two attempts.
    let dispatches = plan.program.dispatches.len() as u64;
    assert!((dispatches..=2 * dispatches).contains(&train(10_000, 1, None, None, None)));
}

#[test]
fn neither_do_micro_batches_clipping_averages_and_scaled_losses() {
    train(300, 3, Some(1.0), Some(0.99), None);
    train(300, 1, Some(1.0), None, Some(LossScale::default()));
}
