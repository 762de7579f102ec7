//! Recomputation changes no number, and brings memory down to what was asked for.

mod common;

use common::{device, fixture};
use meganeura::codegen::{CompileError, CompileOptions, compile};
use meganeura::{
    Dataset, Error, Length, Loss, Model, Objective, Optimizer, PrefixCache, Tensor, TrainOptions, Trainer, WorkPhase,
};

struct Case {
    model: Model,
    data: Dataset,
    options: TrainOptions,
}

/// A model of fixtures/corpus with its data.
fn case(name: &str, accumulate: usize) -> Case {
    let folder = fixture(&format!("corpus/{name}"));
    let loss = std::fs::read_to_string(folder.join("loss.txt")).unwrap();
    let options = TrainOptions {
        optimizer: Optimizer::from_name("adamw").unwrap(),
        learning_rate: 1e-3,
        accumulate,
        batch: (accumulate > 1).then_some(1),
        length: Length::Steps(3),
        cache: PrefixCache::Off,
        ..TrainOptions::new(Objective::new(Loss::from_name(loss.trim()).unwrap()))
    };
    let data = Dataset::open(folder.join("data.npz")).unwrap();
    Case { model: Model::open(folder.join("model.onnx")).unwrap(), data, options }
}

struct Run {
    memory: u64,
    losses: Vec<f64>,
    weights: Vec<Tensor>,
}

impl Case {
    fn run(&self, recompute: Option<u64>) -> Result<Run, Error> {
        let options = TrainOptions { recompute, ..self.options.clone() };
        let mut trainer = Trainer::new(&self.model, &device(), &self.data, options)?;
        let mut losses = Vec::new();
        trainer.train_to::<Error>(3, |report| {
            losses.push(report.loss);
            Ok(())
        })?;
        Ok(Run { memory: trainer.memory(), losses, weights: trainer.weights()?.into_values().collect() })
    }

    /// The smallest memory that the error names.
    fn smallest(&self) -> u64 {
        match self.run(Some(1)) {
            Err(Error::Compile(CompileError::MemoryLimit { limit: 1, reachable })) => reachable,
            Err(error) => panic!("{error}"),
            Ok(run) => panic!("{} bytes are few enough", run.memory),
        }
    }
}

#[test]
fn a_step_that_computes_values_again_gives_the_same_bits() {
    for (name, accumulate, share) in [("llama", 1, 0.93), ("resnet", 1, 0.95), ("unet", 1, 0.98), ("resnet", 2, 0.98)] {
        let case = case(name, accumulate);
        let plain = case.run(None).unwrap();
        let smallest = case.smallest();
        eprintln!("{name}: {} bytes, {smallest} at the smallest", plain.memory);
        assert!((smallest as f64) < share * plain.memory as f64, "{name}: {smallest} of {}", plain.memory);
        let run = case.run(Some(smallest)).unwrap();
        assert!(run.memory <= smallest, "{name}: {} of {smallest}", run.memory);
        assert_eq!(run.losses, plain.losses, "{name}");
        assert!(run.weights == plain.weights, "{name}: the weights differ");
    }
}

#[test]
fn what_cannot_fit_says_what_can() {
    let case = case("resnet", 1);
    let error = case.run(Some(1 << 10)).err().expect("a kibibyte is too little").to_string();
    let smallest = case.smallest().div_ceil(1 << 20);
    assert!(error.contains("0 MiB") && error.contains(&format!("the smallest that it can do with is {smallest} MiB")), "{error}");
    assert!(case.run(Some(smallest << 20)).is_ok());
}

#[test]
fn the_plan_says_what_the_program_takes() {
    let case = case("resnet", 1);
    let (objective, optimizer, bindings) = (&case.options.objective, case.options.optimizer, &case.options.bindings);
    let step = case.model.workload(WorkPhase::Step, Some(objective), Some(optimizer), Some(&case.data), bindings).unwrap();
    let graph = step.graph.verify().unwrap();
    let report = compile(&graph, device().profile(), &CompileOptions::default()).unwrap().report;
    assert_eq!(report.spaces().map(|(_, bytes)| bytes).sum::<u64>(), report.memory.total());
    assert!(report.activations() >= report.bound && report.activations() as f64 <= 1.1 * report.bound as f64);
    let device = device();
    let before = (device.memory_in_use(), device.context().memory_stats().usage);
    let trainer = Trainer::new(&case.model, &device, &case.data, case.options).unwrap();
    assert_eq!(trainer.memory(), report.memory.total());
    assert_eq!(device.memory_in_use() - before.0, report.memory.total());
    // The graphics library takes memory in blocks; where it counts, they hold what was asked for.
    let counted = device.context().memory_stats().usage.saturating_sub(before.1);
    eprintln!("{} bytes planned, {counted} more in use by the driver's count", report.memory.total());
    drop(trainer);
    assert_eq!(device.memory_in_use(), before.0);
}
