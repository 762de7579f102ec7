//! Each command on a small model, by what it prints and writes.

mod common;

use std::path::{Path, PathBuf};

use common::{digits, fixture, meganeura, npz, relative_l2, safetensors, succeed, write_npz};
use meganeura::data::{Samples, Target};
use meganeura::{Bindings, DType, Dataset, ImageOptions, Model, Tensor};
use serde_json::Value;

struct Scene {
    folder: tempfile::TempDir,
}

impl Scene {
    /// Files: `train.npz` with 37 samples, `test.npz` with 13.
    fn new() -> Self {
        let scene = Scene { folder: tempfile::tempdir().unwrap() };
        for (name, samples) in [("train.npz", 37), ("test.npz", 13)] {
            let (image, label) = digits(samples);
            write_npz(&scene.path(name), &[("image", image), ("label", label)]);
        }
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command line; `@name` stands for a file of the scene, `@model` for the digits model.
    fn run(&self, line: &str) -> String {
        let word = |word: &str| match word.strip_prefix('@') {
            Some("model") => model(),
            Some(name) => self.path(name),
            None => PathBuf::from(word),
        };
        succeed(line.split_whitespace().map(word))
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.run(line)).unwrap()
    }

    fn lines(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn model() -> PathBuf {
    fixture("digits-cnn.onnx")
}

fn names(table: &Value) -> Vec<&str> {
    table.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

#[test]
fn import_reports_and_writes_an_artifact_that_reports_the_same() {
    let scene = Scene::new();
    let first = scene.json("import @model -o @model.safetensors --json");
    assert_eq!(names(&first["inputs"]), ["image"]);
    assert_eq!(names(&first["outputs"]), ["logits"]);
    assert!(names(&first["parameters"]).iter().any(|name| name.ends_with("weight")));
    let again = scene.json("import @model.safetensors --json");
    for part in ["inputs", "outputs", "parameters", "ops"] {
        assert_eq!(first[part], again[part], "{part}");
    }
    scene.run("import @model --dim batch=3 -o @bound.safetensors");
    assert!(scene.run("inspect @bound.safetensors --graph").contains("f32[3,1,8,8]"));
    let text = scene.run("import @model --check");
    for part in ["inputs (1)", "outputs (1)", "parameters (", "operators (", "trainable"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn run_gives_the_same_from_model_and_artifact() {
    let scene = Scene::new();
    scene.run("import @model -o @artifact");
    scene.run("run @model --data @test.npz -o @a.npz");
    let table = scene.json("run @artifact --data @test.npz -o @b.npz --json");
    assert_eq!((table[0]["name"].as_str(), table[0]["shape"].as_str()), (Some("logits"), Some("[13,10]")));
    let (a, b) = (npz(&scene.path("a.npz"), "logits"), npz(&scene.path("b.npz"), "logits"));
    assert_eq!(a.len(), 130);
    assert_eq!(a, b);
}

#[test]
fn inspect_shows_every_stage() {
    let scene = Scene::new();
    assert!(scene.run("inspect @model --dim batch=2 --graph").contains("conv"));
    assert!(scene.run("inspect @model --dim batch=2 --dot").starts_with("digraph"));
    assert!(scene.run("inspect @model --parameters").contains("weight"));
    let plan = scene.run("inspect @model --dim batch=2 --plan");
    assert!(plan.contains("kernel 0") && plan.contains("dispatches") && plan.contains("bytes on the device"), "{plan}");
    let costs = scene.json("inspect @model --dim batch=32 --plan --loss cross_entropy --json");
    let spaces: u64 = costs["bytes"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
    assert_eq!(costs["peak"].as_u64(), Some(spaces), "{costs}");
    assert!(costs["activations"].as_f64() <= costs["bound"].as_f64().map(|bound| 1.1 * bound), "{costs}");
    assert!(scene.run("inspect @model --dim batch=2 --wgsl 0").contains("@compute"));
}

#[test]
fn a_plan_is_compiled_once_and_every_start_computes_the_same() {
    let scene = Scene::new();
    let plan = |cache: &str| {
        let folder = scene.path(cache);
        let cache = if cache == "off" { Path::new("off") } else { &folder };
        let words = ["inspect", "--dim", "batch=3", "--plan", "--timing"].map(PathBuf::from);
        let output = meganeura(words.into_iter().chain([model(), "--plan-cache".into(), cache.into()]));
        assert!(output.status.success());
        (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (first, told) = plan("cache");
    assert!(told.contains("compiled, and kept") && told.contains("saturate"), "{told}");
    let (second, told) = plan("cache");
    assert!(told.contains("from the plan cache") && !told.contains("saturate"), "{told}");
    let (third, told) = plan("off");
    assert!(told.contains("compiled, and not kept"), "{told}");
    assert!(first == second && first == third);

    let train = "train @model --data @train.npz --loss cross_entropy --steps 3 --batch 8 --lr 0.01 --json --plan-cache @plans -o";
    let losses = ["a", "b"].map(|name| scene.json(&format!("{train} @{name}.safetensors"))["loss"].clone());
    assert_eq!(losses[0], losses[1]);
    assert_eq!(std::fs::read(scene.path("a.safetensors")).unwrap(), std::fs::read(scene.path("b.safetensors")).unwrap());
}

#[test]
fn train_improves_logs_plots_and_counts_every_held_out_sample_once() {
    let scene = Scene::new();
    let summary = scene.json(
        "train @model --data @train.npz --eval @test.npz --loss cross_entropy --metric accuracy --epochs 6 --batch 8 --lr 0.01 \
         --schedule cosine --warmup 3 --clip 1.0 --log @run.jsonl --plot @loss.svg -o @tuned.safetensors --json",
    );
    assert_eq!(summary["steps"], 24);
    assert!(summary["after"]["loss"].as_f64().unwrap() < summary["before"]["loss"].as_f64().unwrap(), "{summary}");
    let log = scene.lines("run.jsonl");
    let steps: Vec<&Value> = log.iter().filter(|line| line["event"] == "step").collect();
    assert_eq!(steps.len(), 24);
    assert!(steps[0]["learning_rate"].as_f64().unwrap() < steps[2]["learning_rate"].as_f64().unwrap());
    let evaluations: Vec<&Value> = log.iter().filter(|line| line["event"] == "evaluation").collect();
    assert_eq!(evaluations.len(), 7);
    assert!(evaluations.iter().all(|e| e["samples"] == 13));
    assert!(std::fs::read_to_string(scene.path("loss.svg")).unwrap().contains("evaluation"));

    // The accuracy that was reported is that of the predictions which the tuned model makes.
    scene.run("run @tuned.safetensors --data @test.npz -o @out.npz");
    let logits = npz(&scene.path("out.npz"), "logits");
    let labels = digits(13).1.to_i64_vec();
    let largest = |row: &[f64]| (0..10).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i64;
    let right = logits.chunks(10).zip(&labels).filter(|(row, label)| largest(row) == **label).count();
    let reported = summary["after"]["value"].as_f64().unwrap();
    assert!((reported - right as f64 / 13.0).abs() < 1e-6, "{reported} is not {right} of 13");
    let loss: f64 = logits.chunks(10).zip(&labels).map(|(row, &label)| cross_entropy(row, label as usize)).sum::<f64>() / 13.0;
    assert!((summary["after"]["loss"].as_f64().unwrap() - loss).abs() < 1e-4 * loss.max(1.0));
}

fn cross_entropy(logits: &[f64], label: usize) -> f64 {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logits.iter().map(|v| (v - max).exp()).sum::<f64>().ln() + max - logits[label]
}

#[test]
fn fewer_samples_than_a_batch_are_one_batch_and_are_evaluated_once() {
    let scene = Scene::new();
    let (image, label) = digits(3);
    write_npz(&scene.path("few.npz"), &[("image", image), ("label", label)]);
    let summary =
        scene.json("train @model --data @few.npz --eval @few.npz --loss cross_entropy --steps 2 --batch 8 -o @a --json");
    let log = scene.json("grad @model --data @few.npz --loss cross_entropy -o @grads --json");
    let (before, loss) = (summary["before"]["loss"].as_f64().unwrap(), log["loss"].as_f64().unwrap());
    assert!((before - loss).abs() < 1e-5 * loss, "{before} is not {loss}");

    // Three samples against batches of eight: the model's batch is filled up, the loss counts three rows.
    let line = "train @model --data @train.npz --eval @few.npz --loss cross_entropy --steps 1 --batch 8 -o @b --json";
    let filled = scene.json(line)["before"]["loss"].as_f64().unwrap();
    assert!((filled - loss).abs() < 1e-5 * loss, "{filled} is not {loss}");
}

#[test]
fn frozen_parameters_stay_and_the_others_move() {
    let scene = Scene::new();
    scene.run("import @model -o @before.safetensors");
    let before = safetensors(&scene.path("before.safetensors"));
    let frozen = before.keys().next().unwrap().clone();
    let line = format!(
        "train @model --data @train.npz --loss cross_entropy --steps 2 --batch 8 --freeze {frozen} -o @after.safetensors"
    );
    scene.run(&line);
    let after = safetensors(&scene.path("after.safetensors"));
    assert!(before.keys().eq(after.keys()));
    for (name, weight) in &before {
        assert_eq!(*name == frozen, *weight == after[name], "{name}");
    }
    let line =
        format!("train @model --data @train.npz --loss cross_entropy --steps 2 --batch 8 --train {frozen} -o @only.safetensors");
    scene.run(&line);
    let only = safetensors(&scene.path("only.safetensors"));
    for (name, weight) in &before {
        assert_eq!(*name != frozen, *weight == only[name], "{name}");
    }
}

#[test]
fn grad_agrees_with_a_central_difference_along_itself() {
    let scene = Scene::new();
    let found = scene.json("grad @model --data @test.npz --loss cross_entropy -o @grads.safetensors --json");
    let gradients = safetensors(&scene.path("grads.safetensors"));
    scene.run("import @model -o @weights.safetensors");
    assert!(gradients.keys().eq(safetensors(&scene.path("weights.safetensors")).keys()));
    let squares: f64 = gradients.values().flatten().map(|v| v * v).sum();
    assert!((found["gradient_norm"].as_f64().unwrap() - squares.sqrt()).abs() < 1e-6 * squares.sqrt());

    // A step of SGD against the gradient changes the loss by -lr * |gradient|^2, to first order.
    let lr = 1e-3 / squares;
    scene.run(&format!(
        "train @model --data @test.npz --loss cross_entropy --optimizer sgd --lr {lr:e} --steps 1 --batch 13 -o @moved.safetensors"
    ));
    let moved = scene.json("grad @moved.safetensors --data @test.npz --loss cross_entropy -o @g2.safetensors --json");
    let change = moved["loss"].as_f64().unwrap() - found["loss"].as_f64().unwrap();
    assert!((change / -1e-3 - 1.0).abs() < 0.1, "the loss changed by {change} instead of about -0.001");
}

#[test]
fn gradients_by_inputs_have_the_inputs_names_and_shapes() {
    let scene = Scene::new();
    scene.run("grad @model --data @test.npz --loss cross_entropy --wrt inputs -o @grads.safetensors");
    let gradients = safetensors(&scene.path("grads.safetensors"));
    assert_eq!(gradients.keys().collect::<Vec<_>>(), ["image"]);
    assert_eq!(gradients["image"].len(), 13 * 64);
    assert!(gradients["image"].iter().any(|v| *v != 0.0));
}

#[test]
fn exported_onnx_runs_as_the_tuned_model_does() {
    let scene = Scene::new();
    scene.run("train @model --data @train.npz --loss cross_entropy --steps 3 --batch 8 -o @tuned.safetensors");
    scene.run("export @tuned.safetensors --onnx @tuned.onnx --safetensors @weights.safetensors");
    scene.run("run @tuned.safetensors --data @test.npz -o @a.npz");
    scene.run("run @tuned.onnx --data @test.npz -o @b.npz");
    assert_eq!(npz(&scene.path("a.npz"), "logits"), npz(&scene.path("b.npz"), "logits"));
    assert_eq!(safetensors(&scene.path("weights.safetensors")), safetensors(&scene.path("tuned.safetensors")));
    scene.run("run @model --data @test.npz -o @c.npz");
    assert!(relative_l2(&npz(&scene.path("a.npz"), "logits"), &npz(&scene.path("c.npz"), "logits")) > 1e-6);
}

#[test]
fn devices_lists_a_usable_device_with_its_self_test() {
    let devices: Value = serde_json::from_str(&succeed(["devices", "--json"])).unwrap();
    let usable = devices.as_array().unwrap().iter().find(|d| d["usable"] == true).unwrap();
    assert!(usable["self_test"].as_object().unwrap().values().all(|passed| passed == true));
    assert!(succeed(["devices"]).contains("usable, self-test"));
}

#[test]
fn a_run_stops_where_evaluations_do_not_get_better_and_keeps_the_best() {
    let scene = Scene::new();
    let common = "train @model --data @train.npz --eval @test.npz --loss cross_entropy --batch 8 --epochs 9 --patience 2";
    scene.run(&format!("{common} --lr 0 --log @run.jsonl --tensorboard @events -o @still.safetensors"));
    let stopped = scene.lines("run.jsonl").into_iter().find(|event| event["event"] == "stopped").expect("the run stops");
    // Two epochs of four steps each after the evaluation at the start.
    assert_eq!((stopped["step"].as_u64(), stopped["best_step"].as_u64()), (Some(8), Some(0)));
    let events: Vec<_> = std::fs::read_dir(scene.path("events")).unwrap().collect();
    assert!(events.len() == 1 && events[0].as_ref().unwrap().metadata().unwrap().len() > 500);

    scene.run("import @model -o @before.safetensors");
    // Steps as large as this one only do harm.
    scene.run(&format!("{common} --lr 3 --keep-best --metric f1 -o @best.safetensors"));
    scene.run(&format!("{common} --lr 3 --metric f1 -o @last.safetensors"));
    let [before, best, last] = ["before", "best", "last"].map(|name| safetensors(&scene.path(&format!("{name}.safetensors"))));
    assert_eq!(before, best);
    assert_ne!(before, last);
}

#[test]
fn a_new_head_has_the_classes_that_were_asked_for() {
    let scene = Scene::new();
    let head = "--train fc.* --classes 12 --keep-rows --metric top5";
    scene.run(&format!(
        "train @model --data @train.npz --eval @test.npz --loss cross_entropy --lr 0 {head} -o @tuned.safetensors"
    ));
    scene.run("import @model -o @before.safetensors");
    let [before, tuned] = ["before", "tuned"].map(|name| safetensors(&scene.path(&format!("{name}.safetensors"))));
    let (old, new) = (&before["fc.bias"], &tuned["fc.bias"]);
    assert_eq!((new.len(), &new[..10]), (12, &old[..]));
    assert_eq!(tuned["fc.weight"].len(), before["fc.weight"].len() / 10 * 12);
    let bound = 1.0 / (before["fc.weight"].len() as f64 / 10.0).sqrt();
    assert!(new[10..].iter().all(|v| v.abs() <= bound && *v != 0.0));
}

#[test]
fn a_dry_run_tells_what_trains_and_why_and_writes_nothing() {
    let scene = Scene::new();
    let line = "train @model --data @train.npz --loss cross_entropy --lr 0.5 --train conv* --train fc.* --freeze conv1.* \
                --group fc.*:lr=2x,weight-decay=0.25 --no-decay-norms --classes 3 --dry-run --json";
    let plan = scene.json(line);
    let row = |name: &str| plan.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone();
    assert_eq!(plan.as_array().unwrap().len(), names(&scene.json("inspect @model --parameters --json")).len());
    let (frozen, head) = (row("conv1.weight"), row("fc.weight"));
    assert_eq!((frozen["trains"].as_bool(), frozen["why"].as_str()), (Some(false), Some("--freeze conv1.*")));
    assert!(frozen["learning_rate"].is_null());
    assert_eq!((head["trains"].as_bool(), head["why"].as_str()), (Some(true), Some("the new head")));
    assert_eq!((head["learning_rate"].as_f64(), head["weight_decay"].as_f64()), (Some(1.0), Some(0.25)));
    assert_eq!(head["shape"][0], 3);
    let norm = row("conv2.bias");
    assert_eq!((norm["why"].as_str(), norm["weight_decay"].as_f64()), (Some("--train conv*"), Some(0.0)));

    let output = common::meganeura(["train", model().to_str().unwrap(), "--data", "absent", "--loss", "mse", "--dry-run"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && output.stdout.is_empty());
    for part in ["parameter ", "learning rate", "weight decay", "conv1.weight", "a float initializer", "numbers train"] {
        assert!(told.contains(part), "{part}: {told}");
    }

    scene.run("train @model --data @train.npz --loss cross_entropy --steps 1 --train fc.* --log @run.jsonl -o @tuned");
    let logged = scene.lines("run.jsonl").into_iter().find(|line| line["event"] == "parameters").unwrap();
    assert_eq!(logged["parameters"].as_array().unwrap().iter().filter(|p| p["trains"] == true).count(), 2);
}

#[test]
fn a_folder_of_images_trains_as_the_arrays_that_it_stands_for() {
    let scene = Scene::new();
    let folder = fixture("images/folder");
    std::os::unix::fs::symlink(&folder, scene.path("folder")).unwrap();
    let flags = "--loss cross_entropy --batch 2 --epochs 2 --lr 0.01 --seed 4";
    let images = "--image-resize crop --image-mean 0.5 --image-std 0.25 --image-channels gray";
    let summary =
        scene.json(&format!("train @model --data @folder --eval @folder {flags} {images} -o @tuned.safetensors --json"));
    assert_eq!(summary["steps"], 6);
    let names = ["bright", "dark"].map(String::from);
    let tuned = Model::open(scene.path("tuned.safetensors")).unwrap();
    assert_eq!(tuned.class_names(), Some(names.to_vec()));

    let options = ImageOptions {
        fit: Some("crop".parse().unwrap()),
        mean: Some(vec![0.5]),
        std: Some(vec![0.25]),
        ..ImageOptions::default()
    };
    let preprocessing = tuned.image_preprocessing(&Bindings::default(), options).unwrap();
    let data = Dataset::open_images(&folder, preprocessing, None).unwrap();
    let arrays = Samples::whole(&data, tuned.inputs(), Target::Key(None)).unwrap().tensors();
    write_npz(&scene.path("images.npz"), &[("image", arrays[0].1.clone()), ("label", arrays[1].1.clone())]);
    scene.run(&format!("train @model --data @images.npz {flags} -o @arrays.safetensors"));
    assert_eq!(safetensors(&scene.path("tuned.safetensors")), safetensors(&scene.path("arrays.safetensors")));

    // The names leave with the model, and decide what the folders of another run mean.
    scene.run("export @tuned.safetensors --onnx @tuned.onnx");
    assert_eq!(Model::open(scene.path("tuned.onnx")).unwrap().class_names(), Some(names.to_vec()));
    std::fs::create_dir_all(scene.path("other/dark")).unwrap();
    std::fs::copy(folder.join("dark/a.png"), scene.path("other/dark/a.png")).unwrap();
    let of_folder = scene.json(&format!("grad @tuned.onnx --data @other --loss cross_entropy {images} -o @a --json"));
    let dark = Dataset::open(scene.path("images.npz")).unwrap().array("image").unwrap().rows(&[3]);
    write_npz(&scene.path("one.npz"), &[("image", dark), ("label", Tensor::from_i64(DType::I64, [1], &[1]))]);
    let of_array = scene.json("grad @tuned.onnx --data @one.npz --loss cross_entropy -o @b --json");
    assert_eq!(of_folder, of_array);
    scene.run(&format!("run @tuned.safetensors --data @other {images} -o @out.npz"));
}
