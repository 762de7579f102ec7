//! `cargo xtask demo`: the whole path on a small model, driven through the command line as a user would.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::digits::{self, Digits};
use crate::shell::{Invocation, Workspace, XtaskError, file_size, step};
use crate::vulkan;

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
    let demo = Demo::prepare(workspace)?;
    let (train, test) = (workspace.root.join("fixtures/digits-train.npz"), workspace.root.join("fixtures/digits-test.npz"));
    let held_out = digits::read(&test)?;

    let mut stages = Vec::new();
    let mut stage = |name: &'static str, invocation: Invocation| {
        stages.push((name, step(name, invocation)?));
        Ok(())
    };
    stage("devices", demo.meganeura("devices"))?;

    let model = workspace.root.join("fixtures/digits-cnn.onnx");
    let imported = demo.file("digits.safetensors");
    stage("import", demo.meganeura("import").argument(&model).argument("-o").argument(&imported))?;

    let before = demo.file("before.npz");
    stage("evaluate before", demo.run(&imported, &test, &before))?;

    let tuned = demo.file("tuned.safetensors");
    let training =
        demo.meganeura("train").argument(&imported).argument("--data").argument(&train).argument("--eval").argument(&test);
    let training =
        training.arguments(&TRAINING.split(' ').collect::<Vec<_>>()).argument("--log").argument(demo.file("train.jsonl"));
    let training = training.argument("--plot").argument(demo.file("loss.svg")).argument("-o").argument(&tuned);
    stage("fine-tune", training)?;

    let after = demo.file("after.npz");
    stage("evaluate after", demo.run(&tuned, &test, &after))?;

    let sample = first_of(&held_out, 7);
    let (one, prediction) = (demo.file("one.npz"), demo.file("prediction.npz"));
    digits::write_one(&held_out, sample, &one)?;
    stage("predict", demo.run(&tuned, &one, &prediction))?;

    let exports = [("export safetensors", "--safetensors", "weights.safetensors"), ("export ONNX", "--onnx", "tuned.onnx")];
    for (name, flag, file) in exports {
        stage(name, demo.meganeura("export").argument(&tuned).argument(flag).argument(demo.file(file)))?;
    }

    print_prediction(&held_out, sample, &prediction)?;
    print_times(&stages);
    demo.print_files()?;
    let accuracy = |path: &Path| Ok(digits::accuracy(&judged(path, &held_out)?, &held_out.labels));
    let (before, after): (f64, f64) = (accuracy(&before)?, accuracy(&after)?);
    println!("accuracy on {} held-out digits: {before:.3} before, {after:.3} after fine-tuning", held_out.labels.len());
    if after < EXPECTED_ACCURACY {
        return Err(XtaskError::Accuracy { found: after, expected: EXPECTED_ACCURACY });
    }
    Ok(())
}

/// Where the demonstration runs, and where it writes.
struct Demo<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl<'a> Demo<'a> {
    /// An empty `target/demo/`.
    fn prepare(workspace: &'a Workspace) -> Result<Self, XtaskError> {
        let folder = workspace.target.join("demo");
        let file = |source| XtaskError::File { path: folder.clone(), source };
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(file)?;
        }
        fs::create_dir_all(&folder).map_err(file)?;
        Ok(Demo { workspace, folder })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn meganeura(&self, command: &str) -> Invocation {
        Invocation::new(self.workspace.product()).argument(command).directory(&self.workspace.root)
    }

    fn run(&self, model: &Path, data: &Path, out: &Path) -> Invocation {
        self.meganeura("run").argument(model).argument("--data").argument(data).argument("-o").argument(out)
    }

    fn print_files(&self) -> Result<(), XtaskError> {
        let error = |source| XtaskError::File { path: self.folder.clone(), source };
        let entries = fs::read_dir(&self.folder).map_err(error)?.collect::<Result<Vec<_>, _>>().map_err(error)?;
        let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
        paths.sort();
        println!("files written");
        for path in &paths {
            println!("    {:>9} bytes  {}", file_size(path)?, self.workspace.display(path));
        }
        println!();
        Ok(())
    }
}

/// The logits of every held-out digit.
fn judged(path: &Path, held_out: &Digits) -> Result<ndarray::Array2<f32>, XtaskError> {
    let logits = digits::read_logits(path)?;
    let (rows, samples) = (logits.nrows(), held_out.labels.len());
    if rows == samples {
        Ok(logits)
    } else {
        Err(XtaskError::Data { path: path.into(), problem: format!("{rows} rows for {samples} samples") })
    }
}

/// The index of the first image that shows `digit`, else 0.
fn first_of(digits: &Digits, digit: i64) -> usize {
    digits.labels.iter().position(|label| *label == digit).unwrap_or(0)
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
