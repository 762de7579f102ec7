//! Checkpoints survive kills, and a resumed run goes on as if nothing had happened.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use common::{digits, fixture, succeed, write_npz};
use meganeura::checkpoint;
use safetensors::SafeTensors;
use serde_json::Value;

const KILLS: u64 = 20;

fn data(folder: &Path) -> PathBuf {
    let path = folder.join("train.npz");
    let (image, label) = digits(10);
    write_npz(&path, &[("image", image), ("label", label)]);
    path
}

/// `meganeura train` on the digits model, with a checkpoint after every step.
fn arguments(data: &Path, checkpoints: &Path, steps: u64, out: &Path) -> Vec<String> {
    let text = |path: &Path| path.to_str().unwrap().to_string();
    let mut args = vec!["train".to_string(), text(&fixture("digits-cnn.onnx")), "--data".into(), text(data)];
    args.extend(["--loss", "cross_entropy", "--batch", "4", "--lr", "0.01", "--every", "1"].map(String::from));
    args.extend(["--steps".into(), steps.to_string(), "--checkpoint".into(), text(checkpoints), "-o".into(), text(out)]);
    args
}

fn newest_step(folder: &Path) -> u64 {
    checkpoint::newest(folder).map_or(0, |(found, _)| found.progress.step)
}

/// Waits for a checkpoint of `step` steps, or for the end of the process.
fn wait_for(child: &mut Child, folder: &Path, step: u64) {
    let started = Instant::now();
    while newest_step(folder) < step && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(300), "no checkpoint of step {step}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_kill_at_any_moment_leaves_readable_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let (data, checkpoints, out) = (data(folder.path()), folder.path().join("run"), folder.path().join("tuned"));
    // Kills spread over the writing of checkpoints: their times walk through a step by an irrational share of it.
    let mut reached = 0;
    for kill in 0..KILLS {
        let mut args = arguments(&data, &checkpoints, 1_000_000, &out);
        if reached > 0 {
            args.extend(["--resume".to_string(), checkpoints.to_str().unwrap().to_string()]);
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_meganeura"));
        let mut child = command.args(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_for(&mut child, &checkpoints, reached + 1 + kill % 3);
        let share = (kill as f64 * 0.618_033_988_75).fract();
        std::thread::sleep(Duration::from_secs_f64(share * 0.05));
        assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();

        for entry in std::fs::read_dir(&checkpoints).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let bytes = std::fs::read(&path).unwrap();
                SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("kill {kill}: {}: {e}", path.display()));
            }
        }
        let (found, problems) = checkpoint::newest(&checkpoints).unwrap();
        assert!(problems.is_empty() && found.progress.step > reached, "kill {kill}: {problems:?}");
        reached = found.progress.step;
        assert!(!out.exists());
    }
    let mut args = arguments(&data, &checkpoints, reached + 2, &out);
    args.extend(["--resume".to_string(), checkpoints.to_str().unwrap().to_string()]);
    succeed(&args);
    assert!(out.exists());
    assert_eq!(newest_step(&checkpoints), reached + 2);
}

/// Runs seven steps as a whole and with an interruption after the third.
fn interruption_changes_nothing(flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let data = data(folder.path());
    let path = |name: &str| folder.path().join(name);
    let schedule = |mut args: Vec<String>| {
        args.extend(["--schedule", "linear", "--warmup", "2", "--seed", "7"].map(String::from));
        args.extend(flags.iter().map(|flag| flag.to_string()));
        args
    };
    // Seven steps of two per epoch end within an epoch, and so does the checkpoint of step 3.
    succeed(schedule(arguments(&data, &path("whole"), 7, &path("whole.safetensors"))));
    let mut first = schedule(arguments(&data, &path("part"), 7, &path("part.safetensors")));
    first.extend(["--keep".into(), "10".into()]);
    succeed(&first);
    for step in 4..=7 {
        std::fs::remove_file(path("part").join(format!("step-{step}.safetensors"))).unwrap();
    }
    std::fs::remove_file(path("part.safetensors")).unwrap();
    first.extend(["--resume".to_string(), path("part").to_str().unwrap().to_string()]);
    succeed(&first);
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    assert!(read("whole.safetensors") == read("part.safetensors"));
}

#[test]
fn a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one() {
    interruption_changes_nothing(&[]);
}

#[test]
fn a_resumed_run_goes_on_with_its_averages_and_groups() {
    let groups = ["--no-decay-norms", "--group", "conv1.*:lr=0.5x"];
    let flags = ["--optimizer", "adamw", "--amsgrad", "--accumulate", "2", "--ema", "0.9"];
    interruption_changes_nothing(&[flags.as_slice(), groups.as_slice()].concat());
}

/// What a log says of losses, rates and evaluations, without times.
fn results(log: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_results = |event: &Value| matches!(event["event"].as_str(), Some("step" | "evaluation" | "stopped"));
    let without_times = |mut event: Value| {
        let fields = event.as_object_mut().unwrap();
        ["seconds", "samples_per_second"].iter().for_each(|time| drop(fields.remove(*time)));
        event
    };
    events.filter(of_results).map(without_times).collect()
}

/// Weights, the optimiser's state, the schedule, the best weights and the log are those of a run that nobody killed.
#[test]
fn a_run_killed_at_random_steps_ends_bit_for_bit_as_an_uninterrupted_one() {
    const STEPS: u64 = 60;
    let folder = tempfile::tempdir().unwrap();
    let (data, path) = (data(folder.path()), |name: &str| folder.path().join(name));
    let held_out = path("test.npz");
    let (image, label) = digits(7);
    write_npz(&held_out, &[("image", image), ("label", label)]);
    let arguments = |name: &str| {
        let mut args = arguments(&data, &path(name), STEPS, &path(&format!("{name}.safetensors")));
        let log = path(&format!("{name}.jsonl"));
        args.extend(["--eval", held_out.to_str().unwrap(), "--log", log.to_str().unwrap()].map(String::from));
        let flags = "--seed 5 --amsgrad --ema 0.9 --keep-best --metric f1 --patience 1000 --schedule plateau:factor=0.7,patience=0,by=metric --warmup 5";
        args.extend(flags.split(' ').map(String::from));
        args
    };
    succeed(arguments("whole"));

    let resumed = |args: &mut Vec<String>| args.extend(["--resume".to_string(), path("killed").to_str().unwrap().to_string()]);
    let (mut kills, mut reached) = (Vec::new(), 0);
    for kill in 0..3 {
        let mut args = arguments("killed");
        if reached > 0 {
            resumed(&mut args);
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_meganeura"));
        let mut child = command.args(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let random = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos() as u64;
        wait_for(&mut child, &path("killed"), reached + 1 + random % 12);
        std::thread::sleep(Duration::from_micros(random % 20_000));
        assert!(child.try_wait().unwrap().is_none(), "the run ended before kill {kill}");
        // SIGKILL
        child.kill().unwrap();
        child.wait().unwrap();
        reached = newest_step(&path("killed"));
        kills.push(reached);
    }
    let mut args = arguments("killed");
    resumed(&mut args);
    succeed(args);
    let bytes = |file: String| std::fs::read(path(&file)).unwrap();
    for file in [".safetensors".to_string(), format!("/step-{STEPS}.safetensors")] {
        assert!(bytes(format!("whole{file}")) == bytes(format!("killed{file}")), "{file} after kills at {kills:?}");
    }
    let [whole, killed] = ["whole.jsonl", "killed.jsonl"].map(|name| results(&path(name)));
    assert_eq!(whole, killed, "after kills at {kills:?}");
    assert!(whole.len() as u64 > STEPS);
    let rates: Vec<f64> = whole.iter().filter_map(|event| event["learning_rate"].as_f64()).collect();
    assert!(rates[STEPS as usize - 1] < 0.01 && rates[4] == 0.01, "the schedule reduces the rate: {rates:?}");
}

/// `args` with another value of a flag, or with the flag.
fn with(args: &[String], flag: &str, value: &str) -> Vec<String> {
    let mut args = args.to_vec();
    match args.iter().position(|arg| arg == flag) {
        Some(at) => args[at + 1] = value.to_string(),
        None => args.extend([flag, value].map(String::from)),
    }
    args
}

#[test]
fn a_resumed_run_goes_on_with_its_loss_scale() {
    let flags = ["--loss-scale", "dynamic", "--optimizer", "adam", "--accumulate", "2", "--ema", "0.9"];
    interruption_changes_nothing(&flags);
    interruption_changes_nothing(&["--loss-scale", "8", "--optimizer", "sgd", "--momentum", "0.9"]);
}

#[test]
fn a_resumed_run_goes_on_with_its_adapters() {
    let adapters = ["--lora", "conv*.weight:rank=2,alpha=6", "--lora", "fc.weight:rank=3", "--train", "fc.bias"];
    let flags = ["--group", "*.lora_B.weight:lr=4x", "--ema", "0.8"];
    interruption_changes_nothing(&[adapters.as_slice(), flags.as_slice()].concat());
}

#[test]
fn a_run_with_other_options_does_not_resume() {
    let folder = tempfile::tempdir().unwrap();
    let (data, checkpoints, out) = (data(folder.path()), folder.path().join("run"), folder.path().join("tuned"));
    succeed(arguments(&data, &checkpoints, 1, &out));
    std::fs::remove_file(&out).unwrap();
    let resume = with(&arguments(&data, &checkpoints, 2, &out), "--resume", checkpoints.to_str().unwrap());
    let refused = |args: &[String]| {
        let output = common::meganeura(args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(!out.exists());
        message
    };
    for (flag, value, change) in [
        ("--seed", "3", "--seed 0 became 3"),
        ("--lr", "0.02", "--lr 0.01 became 0.02"),
        ("--batch", "5", "--batch 4 became 5"),
        ("--loss", "mse", ""),
        ("--label-smoothing", "0.1", "--label-smoothing 0 became 0.1"),
        ("--optimizer", "sgd", "--optimizer adamw became sgd"),
        ("--weight-decay", "0", "--weight-decay 0.01 became 0"),
        ("--betas", "0.9,0.99", "--betas 0.9,0.999 became 0.9,0.99"),
        ("--accumulate", "2", "--accumulate 1 became 2"),
        ("--schedule", "step:every=3", "--schedule constant became step:every=3,gamma=0.1"),
        ("--warmup", "3", "--warmup 0 became 3"),
        ("--clip", "0.5", "--clip none became 0.5"),
        ("--dropout", "off", "--dropout file became off"),
        ("--batchnorm", "train", "--batchnorm file became train"),
        ("--freeze", "conv*", "--freeze none became conv*"),
        ("--lora", "fc.weight:rank=2", "--lora none became fc.weight:rank=2,alpha=2"),
        ("--loss-scale", "dynamic", "--loss-scale off became dynamic"),
    ] {
        let message = refused(&with(&resume, flag, value));
        assert!(message.contains(change), "{flag}: {message}");
        assert!(change.is_empty() || message.contains("--resume-override"), "{flag}: {message}");
    }
    refused(&with(&arguments(&data, &checkpoints, 2, &out), "--resume", "absent"));
    refused(&arguments(&data, &checkpoints, 2, &out));

    let mut overriding = with(&resume, "--lr", "0.02");
    overriding.push("--resume-override".to_string());
    succeed(&overriding);
    assert!(out.exists());
    // The checkpoints that follow are of the new options.
    succeed(with(&with(&resume, "--lr", "0.02"), "--steps", "3"));
}
