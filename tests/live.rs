//! A model that is trained while it answers: every answer is of one version, whatever fails in between.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{digits, fixture, relative_l2, safetensors};
use meganeura::data::{Samples, TARGET_INPUT, Target};
use meganeura::ir::{SampleAxis, SampleDependence};
use meganeura::live::{
    DeviceSource, EvaluationSet, Live, LiveError, LiveOptions, LiveTraining, Outcome, Rejection, Saved, TrainRequest,
};
use meganeura::runtime::DeviceError;
use meganeura::runtime::fault::{Fault, Site};
use meganeura::{
    Bindings, Dataset, DeviceSelector, Error, Length, Loss, Model, Objective, Optimizer, Tensor, TrainOptions, Trainer,
};

fn source() -> Arc<DeviceSource> {
    Arc::new(DeviceSource::new(DeviceSelector::Auto))
}

fn open(options: LiveOptions) -> Live {
    Live::open(fixture("digits-cnn.onnx"), options, source()).unwrap()
}

fn trainable() -> LiveOptions {
    LiveOptions { training: Some(LiveTraining::default()), ..LiveOptions::default() }
}

fn evaluated(tolerance: f64) -> LiveOptions {
    let (image, label) = digits(20);
    let evaluation = EvaluationSet {
        data: Dataset::from_tensors([("image", image), ("label", label)]),
        objective: Objective::new(Loss::from_name("cross_entropy").unwrap()),
        batch: Some(8),
        tolerance,
    };
    LiveOptions {
        training: Some(LiveTraining { evaluation: Some(evaluation), ..LiveTraining::default() }),
        ..LiveOptions::default()
    }
}

fn with_folder(options: LiveOptions, folder: &Path) -> LiveOptions {
    LiveOptions { checkpoints: Some(folder.to_path_buf()), ..options }
}

fn request(samples: usize, steps: u64) -> TrainRequest {
    let (image, label) = digits(samples);
    TrainRequest {
        inputs: vec![("image".into(), image)],
        target: Some(label),
        loss: Loss::from_name("cross_entropy").unwrap(),
        output: None,
        optimizer: Optimizer::from_name("adamw").unwrap(),
        learning_rate: 1e-2,
        steps,
    }
}

/// The logits of `samples` images, and their version.
fn answer(live: &mut Live, samples: usize) -> (Tensor, u64) {
    try_answer(live, samples).unwrap()
}

fn try_answer(live: &mut Live, samples: usize) -> Result<(Tensor, u64), Error> {
    let (image, _) = digits(samples);
    let mut answer = live.infer(&[("image", &image)])?;
    Ok((answer.outputs.remove(0).1, answer.version))
}

/// What the model in a file answers.
fn of_file(path: &Path, samples: usize) -> Tensor {
    let bindings = Bindings { shapes: [("image".to_string(), vec![samples, 1, 8, 8])].into(), ..Bindings::default() };
    let mut predictor = Model::open(path).unwrap().predictor(&common::device(), &bindings).unwrap();
    predictor.run(&[("image", &digits(samples).0)]).unwrap().remove(0).1
}

#[test]
fn answers_are_bitwise_of_one_version_while_training_runs() {
    let mut live = open(trainable());
    let shapes = [1, 3, 8];
    let mut versions: Vec<Vec<Tensor>> = vec![shapes.iter().map(|&n| answer(&mut live, n).0).collect()];
    for round in 1..=3 {
        live.start(&request(6, 4)).unwrap();
        let mut asked = 0;
        let report = loop {
            let done = live.advance().unwrap();
            assert!(done.is_some() || live.losses().len() == (asked / shapes.len() + 1).min(4));
            for (i, &samples) in shapes.iter().enumerate() {
                let (logits, version) = answer(&mut live, samples);
                assert_eq!(version, if done.is_some() { round } else { round - 1 });
                match versions.get(version as usize) {
                    Some(of) => assert!(logits == of[i], "round {round}, {samples} samples"),
                    None => assert!(done.is_some()),
                }
                asked += 1;
            }
            if let Some(report) = done {
                break report;
            }
        };
        assert_eq!((report.outcome, report.version, report.losses.len()), (Outcome::Published, round, 4));
        versions.push(shapes.iter().map(|&n| answer(&mut live, n).0).collect());
        assert_ne!(versions[round as usize], versions[round as usize - 1]);
        assert!(asked >= 12);
    }
    let status = live.status();
    assert_eq!((status.version, status.steps, status.inference_programs), (3, 12, 3));
    assert_eq!(status.parameter_bytes % 2, 0);
}

#[test]
fn three_steps_are_pytorchs() {
    let folder = fixture("corpus/whisper");
    let options = LiveOptions { training: Some(LiveTraining::default()), ..LiveOptions::default() };
    let checkpoints = tempfile::tempdir().unwrap();
    let mut live = Live::open(folder.join("model.onnx"), with_folder(options, checkpoints.path()), source()).unwrap();
    let data = Dataset::open(folder.join("data.npz")).unwrap();
    let samples = Samples::bind(&data, live.model().inputs(), Target::Key(None)).unwrap();
    let mut batch = samples.batch(&(0..samples.count()).collect::<Vec<_>>()).unwrap();
    let target = batch.iter().position(|(name, _)| name == TARGET_INPUT).map(|at| batch.remove(at).1);
    let request = TrainRequest {
        inputs: batch,
        target,
        loss: Loss::from_name("mse").unwrap(),
        output: None,
        optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, amsgrad: false },
        learning_rate: 1e-3,
        steps: 1,
    };
    // The state of the optimiser goes on from one request to the next.
    for steps in [2, 1] {
        assert_eq!(live.train(&TrainRequest { steps, ..request.clone() }).unwrap().outcome, Outcome::Published);
    }
    let Saved { version, path } = live.checkpoint().unwrap();
    assert_eq!(version, 2);
    let (found, expected) = (Model::open(path).unwrap(), safetensors(&folder.join("adamw3.safetensors")));
    for (name, values) in expected {
        let error = relative_l2(&found.weight(&name).unwrap().to_f64_vec(), &values);
        assert!(error <= 1e-4, "{name}: {error:e}");
    }
}

/// Adapters are part of the weights that are served, so a checkpoint that kept them apart as well would add them twice.
#[test]
fn a_checkpoint_of_an_adapted_model_answers_as_the_server_did() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Model::open(fixture("digits-cnn.onnx")).unwrap();
    let (image, label) = digits(20);
    let options = TrainOptions {
        learning_rate: 5e-2,
        lora: vec!["fc.weight:rank=2,alpha=4".parse().unwrap()],
        length: Length::Steps(3),
        ..TrainOptions::new(Objective::new(Loss::from_name("cross_entropy").unwrap()))
    };
    let data = Dataset::from_tensors([("image", image), ("label", label)]);
    let mut trainer = Trainer::new(&model, &common::device(), &data, options).unwrap();
    trainer.train_to::<Error>(3, |_| Ok(())).unwrap();
    trainer.update(&mut model).unwrap();
    assert_eq!(model.adapters().len(), 1);
    let adapted = folder.path().join("adapted.safetensors");
    model.save(&adapted).unwrap();

    let options = with_folder(trainable(), &folder.path().join("checkpoints"));
    let mut live = Live::open(&adapted, options, source()).unwrap();
    assert_eq!(answer(&mut live, 2).0, of_file(&adapted, 2));
    live.train(&request(6, 2)).unwrap();
    let (trained, _) = answer(&mut live, 2);
    assert_eq!(of_file(&live.checkpoint().unwrap().path, 2), trained);
}

#[test]
fn a_restart_serves_the_last_checkpoint_and_a_rollback_returns_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = open(with_folder(trainable(), folder.path()));
    let (first, _) = answer(&mut live, 2);
    live.train(&request(6, 2)).unwrap();
    let (second, _) = answer(&mut live, 2);
    let rolled_back = live.rollback().unwrap();
    assert_eq!((rolled_back.version, rolled_back.checkpoint, rolled_back.interrupted), (2, None, false));
    assert_eq!(answer(&mut live, 2), (first.clone(), 2));

    // Without the state of the optimiser, the same request makes the same weights.
    live.train(&request(6, 2)).unwrap();
    assert_eq!(answer(&mut live, 2), (second.clone(), 3));
    let saved = live.checkpoint().unwrap();
    assert_eq!(saved.version, 3);
    assert_eq!(of_file(&saved.path, 2), second);
    live.start(&request(6, 3)).unwrap();
    live.advance().unwrap();
    let rolled_back = live.rollback().unwrap();
    assert_eq!((rolled_back.version, rolled_back.checkpoint, rolled_back.interrupted), (4, Some(3), true));
    assert_eq!(answer(&mut live, 2), (second.clone(), 4));
    assert!(live.advance().unwrap().is_none());

    let mut restarted = open(with_folder(trainable(), folder.path()));
    assert_eq!(answer(&mut restarted, 2), (second.clone(), 3));
    assert_eq!(restarted.train(&request(6, 1)).unwrap().version, 4);

    // What cannot be read is passed over, and said.
    std::fs::write(folder.path().join("version-9.safetensors"), b"x").unwrap();
    let mut restarted = open(with_folder(trainable(), folder.path()));
    assert_eq!(answer(&mut restarted, 2), (second, 3));
    assert!(restarted.problems().len() == 1 && restarted.problems()[0].contains("version-9"), "{:?}", restarted.problems());
}

#[test]
fn checkpoints_of_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    open(with_folder(trainable(), folder.path())).checkpoint().unwrap();
    let options = with_folder(LiveOptions::default(), folder.path());
    let error = Live::open(fixture("corpus/mlp/mlp-dyn-dynamo.onnx"), options, source()).err();
    assert!(matches!(error, Some(Error::Live(LiveError::ForeignCheckpoint { .. }))), "{error:?}");
}

#[test]
fn only_the_newest_checkpoints_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = open(LiveOptions { keep: 2, ..with_folder(trainable(), folder.path()) });
    for _ in 0..3 {
        live.train(&request(2, 1)).unwrap();
        live.checkpoint().unwrap();
    }
    let mut names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["version-2.safetensors", "version-3.safetensors"]);
}

#[test]
fn a_rising_evaluation_loss_is_not_published() {
    let mut live = open(evaluated(0.0));
    let baseline = live.evaluate().unwrap().loss;
    let report = live.train(&request(20, 5)).unwrap();
    let better = report.evaluation.unwrap();
    assert!(report.outcome == Outcome::Published && better < baseline, "{report:?}");
    assert_eq!(live.status().evaluation, Some(better));
    let (logits, version) = answer(&mut live, 2);

    let mut wrong = request(20, 100);
    wrong.target =
        wrong.target.map(|t| Tensor::from_i64(t.dtype(), [20], &t.to_i64_vec().iter().map(|v| (v + 1) % 10).collect::<Vec<_>>()));
    let report = live.train(&wrong).unwrap();
    let Outcome::RolledBack(Rejection::Evaluation { before, after }) = report.outcome else { panic!("{report:?}") };
    assert!(before == better && after > before && report.version == version, "{report:?}");
    assert_eq!(answer(&mut live, 2), (logits, version));
    assert!((live.evaluate().unwrap().loss - better).abs() == 0.0);
    assert_eq!(live.train(&request(20, 1)).unwrap().outcome, Outcome::Published);
}

#[test]
fn a_loss_or_weight_that_is_no_number_is_not_published() {
    let mut live = open(trainable());
    let before = answer(&mut live, 2);
    let huge = TrainRequest { learning_rate: 1e38, optimizer: Optimizer::from_name("sgd").unwrap(), ..request(6, 6) };
    let report = live.train(&huge).unwrap();
    assert!(matches!(report.outcome, Outcome::RolledBack(Rejection::Loss { .. })), "{report:?}");
    assert_eq!(answer(&mut live, 2), before);
    // Its only step has a finite loss.
    let mut infinite = request(6, 1);
    infinite.optimizer = huge.optimizer;
    infinite.learning_rate = 1e39;
    let report = live.train(&infinite).unwrap();
    assert!(matches!(report.outcome, Outcome::RolledBack(Rejection::Weight { .. })), "{report:?}");
    assert_eq!(answer(&mut live, 2), before);
    assert_eq!(live.train(&request(6, 1)).unwrap().outcome, Outcome::Published);
}

#[test]
fn requests_that_do_not_fit_change_nothing() {
    let mut live = open(trainable());
    let before = answer(&mut live, 1);
    let mut label = request(3, 1);
    label.target = Some(Tensor::from_i64(meganeura::DType::I64, [3], &[0, 10, 1]));
    assert!(matches!(live.train(&label), Err(Error::Class { .. })));
    assert!(matches!(live.train(&request(3, 0)), Err(Error::Live(LiveError::Setting { .. }))));
    let rate = TrainRequest { learning_rate: f64::NAN, ..request(3, 1) };
    assert!(matches!(live.train(&rate), Err(Error::Live(LiveError::Setting { .. }))));
    let mut shape = request(3, 1);
    shape.inputs[0].1 = Tensor::from_f32([3, 1, 8, 7], &[0.0; 168]);
    assert!(matches!(live.train(&shape), Err(Error::Data(_))));
    assert!(live.infer(&[("image", &shape.inputs[0].1)]).is_err());
    assert!(live.infer(&[("picture", &digits(1).0)]).is_err());
    assert!(matches!(live.evaluate(), Err(Error::Live(LiveError::NoEvaluation))));
    assert!(matches!(live.checkpoint(), Err(Error::Live(LiveError::NoFolder))));
    live.start(&request(3, 1)).unwrap();
    assert!(matches!(live.start(&request(3, 1)), Err(Error::Live(LiveError::Busy))));
    assert_eq!(answer(&mut live, 1), before);
    let mut untrained = open(LiveOptions::default());
    assert!(matches!(untrained.train(&request(3, 1)), Err(Error::Live(LiveError::NoTraining))));
}

#[test]
fn programs_compile_on_another_thread_and_the_least_recent_is_forgotten() {
    let mut live = open(LiveOptions { specializations: 2, ..trainable() });
    let shapes = |samples: usize| [("image".to_string(), vec![samples, 1, 8, 8])].into();
    let missing = live.missing_inference(&shapes(4)).unwrap().unwrap();
    let compiled = std::thread::spawn(|| missing.run()).join().unwrap().unwrap();
    live.install(compiled);
    assert!(live.missing_inference(&shapes(4)).unwrap().is_none());
    let missing = live.missing_training(&request(4, 1)).unwrap().unwrap();
    live.install(std::thread::spawn(|| missing.run()).join().unwrap().unwrap());
    assert!(live.missing_training(&request(4, 9)).unwrap().is_none());
    for samples in [4, 5, 4, 6] {
        answer(&mut live, samples);
    }
    assert!(live.missing_inference(&shapes(5)).unwrap().is_some() && live.missing_inference(&shapes(4)).unwrap().is_none());
}

#[test]
fn outputs_say_which_samples_they_belong_to() {
    fn sent<T: Send>() {}
    sent::<Live>();
    let mut live = open(LiveOptions::default());
    let answer = live.infer(&[("image", &digits(3).0)]).unwrap();
    assert_eq!(answer.samples[..], [SampleDependence::Separate(SampleAxis { axis: 0, span: 1 })]);
}

/// Faults at every site, early and late, while the model answers and while it trains.
#[test]
fn a_failed_device_is_replaced_and_serves_the_same_version() {
    let devices = source();
    let path = fixture("digits-cnn.onnx");
    let mut live = Live::open(&path, trainable(), devices.clone()).unwrap();
    let mut neighbour = Live::open(&path, LiveOptions::default(), devices.clone()).unwrap();
    let untrained = answer(&mut neighbour, 2);
    live.train(&request(6, 2)).unwrap();
    let trained = answer(&mut live, 2);
    let faults = [(Fault::Lost, DeviceError::Lost), (Fault::OutOfMemory, DeviceError::OutOfMemory)];
    for (site, (fault, expected)) in [Site::Submission, Site::Wait].into_iter().flat_map(|s| faults.clone().map(|f| (s, f))) {
        devices.current().unwrap().inject(site, 0, fault);
        let error = try_answer(&mut live, 2).unwrap_err();
        assert_eq!(error.device(), Some(&expected), "{error}");
        // The model and its neighbour on the same device go on.
        assert_eq!(answer(&mut live, 2), trained);
        assert_eq!(answer(&mut neighbour, 2), untrained);

        for after in [0, 2] {
            live.start(&request(6, 4)).unwrap();
            live.advance().unwrap();
            devices.current().unwrap().inject(site, after, fault);
            let failed = loop {
                match live.advance() {
                    Ok(report) => assert!(report.is_none()),
                    Err(error) => break error,
                }
            };
            assert_eq!(failed.device(), Some(&expected), "{failed}");
            assert!(!live.status().training);
            assert_eq!(answer(&mut live, 2), trained);
        }
    }
    // A new shape needs memory.
    devices.current().unwrap().inject(Site::Allocation, 1, Fault::OutOfMemory);
    assert_eq!(try_answer(&mut live, 3).unwrap_err().device(), Some(&DeviceError::OutOfMemory));
    answer(&mut live, 3);
    assert_eq!(answer(&mut live, 2), trained);
    devices.current().unwrap().inject(Site::Submission, 0, Fault::Lost);
    live.rollback().unwrap_err();
    assert_eq!(answer(&mut live, 2).0, untrained.0);
    assert_eq!(live.train(&request(6, 1)).unwrap().outcome, Outcome::Published);
}

/// Runs a test of this file in a process of its own, which finds `value` in the environment variable `name`.
fn again(test: &str, name: &str, value: &Path, kilobytes: Option<u64>) -> Command {
    let limit = kilobytes.map_or(String::new(), |limit| format!("ulimit -v {limit} && "));
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{limit}exec \"$0\" --exact {test} --nocapture --test-threads 1"));
    command.arg(std::env::current_exe().unwrap()).env(name, value);
    command
}

/// Memory of this process in kilobytes: `VmPeak` is the most addresses that it had, `VmRSS` what is resident now.
#[cfg(target_os = "linux")]
fn kilobytes(of: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(of)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn devices_that_failed_leave_no_memory_behind() {
    const TEST: &str = "devices_that_failed_leave_no_memory_behind";
    const CHILD: &str = "MEGANEURA_TEST_LEAKS";
    if std::env::var_os(CHILD).is_none() {
        let output = again(TEST, CHILD, Path::new("1"), None).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let devices = source();
    let path = fixture("corpus/mlp/mlp-dyn-dynamo.onnx");
    let mut live = Live::open(path, LiveOptions::default(), devices.clone()).unwrap();
    let x = Tensor::from_f32([1000, 784], &vec![0.5; 1000 * 784]);
    let mut resident = Vec::new();
    for cycle in 0..16 {
        live.infer(&[("x", &x)]).unwrap();
        let (site, fault) = [(Site::Submission, Fault::Lost), (Site::Wait, Fault::OutOfMemory)][cycle % 2];
        devices.current().unwrap().inject(site, 0, fault);
        live.infer(&[("x", &x)]).unwrap_err();
        resident.push(kilobytes("VmRSS"));
    }
    eprintln!("{resident:?}");
    // Inputs and both of their copies take 9 MiB a cycle.
    assert!(resident[15] < resident[5] + (24 << 10), "{resident:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_that_runs_out_is_an_error_and_smaller_requests_go_on() {
    const TEST: &str = "memory_that_runs_out_is_an_error_and_smaller_requests_go_on";
    const STAGE: &str = "MEGANEURA_TEST_MEMORY";
    let mut live = match std::env::var_os(STAGE) {
        None => {
            if !common::device().info().is_software() {
                eprintln!("skipped: the memory of this device cannot be limited");
                return;
            }
            let folder = tempfile::tempdir().unwrap();
            let measured = folder.path().join("measure");
            assert!(again(TEST, STAGE, &measured, None).status().unwrap().success());
            let peak: u64 = std::fs::read_to_string(&measured).unwrap().parse().unwrap();
            let limited = again(TEST, STAGE, Path::new("limited"), Some(peak + (64 << 10))).output().unwrap();
            let text = String::from_utf8_lossy(&limited.stderr);
            assert!(limited.status.success(), "{}\n{text}", limited.status);
            assert!(text.contains("refused: "), "{text}");
            return;
        }
        Some(stage) => {
            let mut live = open(trainable());
            answer(&mut live, 4);
            live.train(&request(4, 1)).unwrap();
            if stage != "limited" {
                std::fs::write(PathBuf::from(stage), kilobytes("VmPeak").to_string()).unwrap();
                return;
            }
            live
        }
    };
    let before = answer(&mut live, 4);
    let mut refused = 0;
    for samples in [200, 8_000, 24_000] {
        let (image, _) = digits(samples);
        for _ in 0..2 {
            match live.infer(&[("image", &image)]) {
                Ok(answer) => assert!(answer.outputs[0].1.shape()[..] == [samples, 10] && samples < 24_000),
                Err(error) => {
                    assert!(samples > 200, "{error}");
                    assert!(error.device().is_some_and(DeviceError::is_out_of_memory), "{error}");
                    eprintln!("refused: {error}");
                    refused += 1;
                }
            }
            assert_eq!(answer(&mut live, 4), before);
        }
    }
    assert!(refused > 0);
    assert_eq!(live.train(&request(4, 1)).unwrap().outcome, Outcome::Published);
}

#[test]
fn a_kill_while_checkpoints_are_written_leaves_the_one_before() {
    const TEST: &str = "a_kill_while_checkpoints_are_written_leaves_the_one_before";
    const FOLDER: &str = "MEGANEURA_TEST_CHECKPOINTS";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let mut live = open(with_folder(trainable(), Path::new(&folder)));
        loop {
            live.train(&request(2, 1)).unwrap();
            for _ in 0..50 {
                live.checkpoint().unwrap();
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let newest = || {
        let names = std::fs::read_dir(folder.path()).unwrap().filter_map(|e| e.unwrap().file_name().into_string().ok());
        names.filter_map(|n| n.strip_prefix("version-")?.strip_suffix(".safetensors")?.parse::<u64>().ok()).max().unwrap_or(0)
    };
    let mut reached = 0;
    for kill in 0..6u32 {
        let mut child = again(TEST, FOLDER, folder.path(), None).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let started = Instant::now();
        while newest() <= reached {
            assert!(started.elapsed() < Duration::from_secs(300) && child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_secs_f64(f64::from(kill) * 0.618_033_988_75 % 1.0 * 0.2));
        child.kill().unwrap();
        child.wait().unwrap();
        let latest = newest();
        let mut live = open(with_folder(LiveOptions::default(), folder.path()));
        assert!(live.problems().is_empty(), "{:?}", live.problems());
        let (logits, version) = answer(&mut live, 2);
        assert!(version == latest && version > reached, "kill {kill}: {version} {latest} {reached}");
        assert_eq!(logits, of_file(&folder.path().join(format!("version-{version}.safetensors")), 2));
        reached = version;
    }
}

/// Requests that arrive at any moment wait for one piece of training at most.
#[test]
fn latency_while_training_is_bounded_by_a_step() {
    let mut live = open(trainable());
    let samples = 4;
    answer(&mut live, samples);
    let timed = |live: &mut Live| {
        let started = Instant::now();
        answer(live, samples);
        started.elapsed()
    };
    let percentile = |mut times: Vec<Duration>, p: f64| {
        times.sort();
        times[((times.len() - 1) as f64 * p) as usize]
    };
    let idle = percentile((0..200).map(|_| timed(&mut live)).collect(), 0.99);
    // Software devices compile at the first step.
    live.train(&request(16, 2)).unwrap();
    live.start(&request(16, 100_000)).unwrap();
    let (mut pieces, mut latencies) = (Vec::new(), Vec::new());
    for _ in 0..400 {
        // The request arrives at the worst moment: a piece has just begun.
        let arrived = Instant::now();
        if live.may_advance(true) {
            live.advance().unwrap();
            pieces.push(arrived.elapsed());
        }
        answer(&mut live, samples);
        latencies.push(arrived.elapsed());
    }
    let spent: Duration = pieces.iter().sum();
    let share = spent.as_secs_f64() / latencies.iter().sum::<Duration>().as_secs_f64();
    let (piece, p99) = (percentile(pieces.clone(), 0.99), percentile(latencies, 0.99));
    eprintln!("idle p99 {idle:?}, step p99 {piece:?}, training p99 {p99:?}, share of training {share:.2}");
    assert!(p99 < 2 * idle + piece, "{p99:?}");
    assert!((0.3..0.7).contains(&share), "{share}");
}
