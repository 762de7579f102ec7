//! `cargo xtask demo`: the whole path on a small model, driven through the command line as a user would.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::digits::{self, Digits};
use crate::shell::{Invocation, Workspace, XtaskError, file_size, step};
use crate::vulkan;

const MODEL: &str = "fixtures/digits-cnn.onnx";
const TRAIN: &str = "fixtures/digits-train.npz";
const TEST: &str = "fixtures/digits-test.npz";

/// Held-out accuracy that fine-tuning must reach; the imported model starts near 0.5.
const EXPECTED_ACCURACY: f64 = 0.95;

/// AdamW with a cosine schedule: PyTorch reaches 0.967 to 0.972 with these over eight seeds.
const TRAINING: &str = "--loss cross_entropy --metric accuracy --optimizer adamw --lr 0.01 --schedule cosine \
                        --epochs 4 --batch 32 --seed 0";

/// Imports the digits CNN, evaluates, fine-tunes, evaluates again, predicts one digit, and exports.
///
/// Writes under `target/demo/`. Fails if accuracy stays below [`EXPECTED_ACCURACY`].
pub fn run(workspace: &Workspace) -> Result<(), XtaskError> {
    vulkan::ensure()?;
    step("build", workspace.cargo(&["build", "--release", "--package", "meganeura", "--bin", "meganeura"]))?;
    let folder = prepare(workspace)?;
    let file = |name: &str| folder.join(name);
    let (imported, tuned) = (file("digits.safetensors"), file("tuned.safetensors"));
    let (before, after) = (file("before.npz"), file("after.npz"));
    let (one, prediction) = (file("one.npz"), file("prediction.npz"));

    let held_out = digits::read(Path::new(TEST))?;
    let sample = held_out.labels.iter().position(|label| *label == 7).unwrap_or(0);
    digits::write_one(&held_out, sample, &one)?;

    let settings: Vec<&str> = TRAINING.split(' ').collect();
    let (log, plot) = (file("train.jsonl"), file("loss.svg"));
    let train: &[&dyn AsRef<OsStr>] =
        &[&"train", &imported, &"--data", &TRAIN, &"--eval", &TEST, &"--log", &log, &"--plot", &plot, &"-o", &tuned];
    let meganeura = |arguments: &[&dyn AsRef<OsStr>]| Invocation::new(workspace.product()).arguments(arguments);
    let stages = [
        ("devices", meganeura(&[&"devices"])),
        ("import", meganeura(&[&"import", &MODEL, &"-o", &imported])),
        ("evaluate before", meganeura(&[&"run", &imported, &"--data", &TEST, &"-o", &before])),
        ("fine-tune", meganeura(train).arguments(&settings)),
        ("evaluate after", meganeura(&[&"run", &tuned, &"--data", &TEST, &"-o", &after])),
        ("predict", meganeura(&[&"run", &tuned, &"--data", &one, &"-o", &prediction])),
        ("export safetensors", meganeura(&[&"export", &tuned, &"--safetensors", &file("weights.safetensors")])),
        ("export ONNX", meganeura(&[&"export", &tuned, &"--onnx", &file("tuned.onnx")])),
    ];
    let mut times = Vec::new();
    for (name, invocation) in stages {
        times.push((name, step(name, invocation)?));
    }

    print_prediction(&held_out, sample, &prediction)?;
    print_times(&times);
    print_files(&folder)?;
    let (before, after) = (accuracy(&before, &held_out)?, accuracy(&after, &held_out)?);
    println!("accuracy on {} held-out digits: {before:.3} before, {after:.3} after fine-tuning", held_out.labels.len());
    if after < EXPECTED_ACCURACY {
        return Err(XtaskError::Accuracy { found: after, expected: EXPECTED_ACCURACY });
    }
    Ok(())
}

/// An empty `target/demo/`.
fn prepare(workspace: &Workspace) -> Result<PathBuf, XtaskError> {
    let folder = workspace.target.join("demo");
    let error = |source| XtaskError::File { path: folder.clone(), source };
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(error)?;
    }
    fs::create_dir_all(&folder).map_err(error)?;
    Ok(folder)
}

/// The share of held-out digits that the logits in `path` are right about.
fn accuracy(path: &Path, held_out: &Digits) -> Result<f64, XtaskError> {
    let logits = digits::read_logits(path)?;
    let (rows, samples) = (logits.nrows(), held_out.labels.len());
    if rows != samples {
        return Err(XtaskError::Data { path: path.into(), problem: format!("{rows} rows for {samples} samples") });
    }
    Ok(digits::accuracy(&logits, &held_out.labels))
}

fn print_prediction(held_out: &Digits, sample: usize, prediction: &Path) -> Result<(), XtaskError> {
    let logits = digits::read_logits(prediction)?;
    let Some(found) = digits::argmax(logits.iter()) else {
        return Err(XtaskError::Data { path: prediction.into(), problem: "no logits".into() });
    };
    println!("one held-out digit\n{}    predicted {found}, is {}\n", digits::draw(held_out, sample), held_out.labels[sample]);
    Ok(())
}

fn print_times(stages: &[(&str, Duration)]) {
    println!("time");
    let total = stages.iter().map(|(_, time)| *time).sum::<Duration>();
    for (name, time) in stages.iter().copied().chain([("total", total)]) {
        println!("    {:>7.2} s  {name}", time.as_secs_f64());
    }
    println!();
}

fn print_files(folder: &Path) -> Result<(), XtaskError> {
    let error = |source| XtaskError::File { path: folder.into(), source };
    let entries = fs::read_dir(folder).map_err(error)?.collect::<Result<Vec<_>, _>>().map_err(error)?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.sort();
    println!("files written");
    for path in &paths {
        println!("    {:>9} bytes  {}", file_size(path)?, path.display());
    }
    println!();
    Ok(())
}
