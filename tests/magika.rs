//! A published model learns a class that it did not know: Magika, which tells types of files apart, learns WGSL.
//!
//! `cargo xtask test` fetches the model, WGSL shaders that others published, and other files from their packages into
//! `.corpus/published/`; where they are not there, the test says so and passes. Ten shaders and twenty other files train a head of one more
//! class; the others keep the class that the published model gives them. Unseen shaders, those of this project's own kernels among them,
//! must be found, and other files must not be taken for shaders.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{device, fixture, published};
use meganeura::codegen::{CompileOptions, compile};
use meganeura::{
    Bindings, DType, Dataset, Device, Dim, HeadOptions, Length, Loss, Model, Objective, Optimizer, Pattern, Tensor, TrainOptions,
    Trainer,
};

/// Classes of the published model; the new one comes after them.
const CLASSES: usize = 214;
const WGSL: usize = CLASSES;
const BATCH: usize = 10;

/// The features of a file as Magika's Python package takes them (version 1.0.3, `config.min.json` of `standard_v3_3`): its first and its last
/// 1024 bytes, without white space at its ends, with 256 where there are none.
fn features(content: &[u8]) -> Vec<i64> {
    const BLOCK: usize = 4096;
    const SIZE: usize = 1024;
    const PADDING: i64 = 256;
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c);
    let start = &content[..content.len().min(BLOCK)];
    let start: Vec<i64> = start.iter().skip_while(|b| is_space(b)).take(SIZE).map(|&b| b.into()).collect();
    let end = &content[content.len() - content.len().min(BLOCK)..];
    let mut end: Vec<i64> = end.iter().rev().skip_while(|b| is_space(b)).take(SIZE).map(|&b| b.into()).collect();
    end.resize(SIZE, PADDING);
    let padding = vec![PADDING; SIZE - start.len()];
    start.into_iter().chain(padding).chain(end.into_iter().rev()).collect()
}

/// The content of every file below a folder, by path.
fn files_below(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// Published shaders. Some files of the package are fragments that other shaders include within their functions; they are none.
fn shaders(folder: &Path) -> Vec<Vec<u8>> {
    let is_module = |content: &[u8]| String::from_utf8_lossy(content).contains("fn ");
    files_below(folder).into_iter().map(|(_, content)| content).filter(|content| is_module(content)).collect()
}

/// The shaders of the kernels that this project makes of a model.
fn kernels(model: &Path, device: &Device) -> Vec<Vec<u8>> {
    let bindings = Bindings { shapes: [("x".to_string(), vec![2, 3, 48, 192])].into(), ..Bindings::default() };
    let graph = Model::open(model).unwrap().specialize(&bindings).unwrap().graph.verify().unwrap();
    let program = compile(&graph, device.profile(), &CompileOptions::default()).unwrap().program;
    program.kernels.into_iter().map(|kernel| kernel.wgsl.into_bytes()).collect()
}

/// `count` files of many types: for each extension in turn, one that is evenly far from the one before.
fn varied(files: Vec<(PathBuf, Vec<u8>)>, count: usize) -> Vec<Vec<u8>> {
    let mut by_extension = std::collections::BTreeMap::<String, Vec<Vec<u8>>>::new();
    for (path, content) in files.into_iter().filter(|(_, content)| content.len() >= 64) {
        let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        by_extension.entry(extension).or_default().push(content);
    }
    let share = |files: Vec<Vec<u8>>| files.iter().step_by((files.len() / 16).max(1)).cloned().collect::<Vec<_>>();
    let mut queues: Vec<_> = by_extension.into_values().map(|files| share(files).into_iter()).collect();
    let mut chosen = Vec::new();
    while chosen.len() < count && queues.iter().any(|queue| queue.len() > 0) {
        chosen.extend(queues.iter_mut().filter_map(Iterator::next));
    }
    chosen.truncate(count);
    chosen
}

fn bytes(files: &[Vec<u8>]) -> Tensor {
    let values: Vec<i64> = files.iter().flat_map(|content| features(content)).collect();
    Tensor::from_i64(DType::I32, [files.len(), 2048], &values)
}

/// The most probable class of each file.
fn classes(model: &Model, device: &Arc<Device>, files: &[Vec<u8>]) -> Vec<usize> {
    let bindings = Bindings { shapes: [("bytes".to_string(), vec![BATCH, 2048])].into(), ..Bindings::default() };
    let mut predictor = model.predictor(device, &bindings).unwrap();
    let mut found = Vec::new();
    for files in files.chunks(BATCH) {
        let full: Vec<Vec<u8>> = (0..BATCH).map(|i| files.get(i).unwrap_or(&files[0]).clone()).collect();
        let outputs = predictor.run(&[("bytes", &bytes(&full))]).unwrap();
        let probabilities = outputs[0].1.to_f64_vec();
        let rows = probabilities.chunks(probabilities.len() / BATCH).take(files.len());
        found.extend(rows.map(|row| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()));
    }
    found
}

fn share_of_wgsl(classes: &[usize]) -> f64 {
    classes.iter().filter(|&&class| class == WGSL).count() as f64 / classes.len() as f64
}

#[test]
fn magika_learns_wgsl_from_ten_files() {
    let [Some(path), Some(wgsl), Some(sphinx), Some(ocr)] =
        ["magika_v3_3.onnx", "wgsl", "sphinx", "ppocr_v2_cls.onnx"].map(published)
    else {
        return;
    };
    let device = device();
    let (seen, mut unseen): (Vec<_>, Vec<_>) = shaders(&wgsl).into_iter().enumerate().partition(|(i, _)| i % 5 < 2 && *i < 25);
    unseen.extend(kernels(&ocr, &device).into_iter().enumerate());
    let [seen, unseen] = [seen, unseen].map(|files| files.into_iter().map(|(_, content)| content).collect::<Vec<_>>());
    let unseen = &unseen[..40];
    let mut others = files_below(&sphinx);
    ["src", "codegen/src", "docs"].iter().for_each(|folder| others.extend(files_below(&fixture("..").join(folder))));
    let others = varied(others, 120);
    let (known, unknown): (Vec<_>, Vec<_>) = others.into_iter().enumerate().partition(|(i, _)| i % 6 == 0);
    let [known, unknown] = [known, unknown].map(|files| files.into_iter().map(|(_, content)| content).collect::<Vec<_>>());
    assert_eq!((seen.len(), known.len(), unseen.len(), unknown.len()), (10, 20, 40, 100));

    let mut model = Model::open(path).unwrap();
    let labels = classes(&model, &device, &known).into_iter().chain(vec![WGSL; seen.len()]).map(|class| class as i64);
    let labels = Tensor::from_i64(DType::I64, [30], &labels.collect::<Vec<_>>());
    let data = Dataset::from_tensors([("bytes", bytes(&[known, seen].concat())), ("label", labels)]);

    let started = Instant::now();
    let head = model.resize_head(&HeadOptions { keep_rows: true, ..HeadOptions::new(CLASSES + 1) }).unwrap();
    let names = [&head.weight].into_iter().chain(&head.bias).map(|tensor| Pattern::new(&Pattern::escape(&tensor.name)).unwrap());
    let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
    let options = TrainOptions {
        optimizer: Optimizer::from_name("adam").unwrap(),
        learning_rate: 3e-3,
        batch: Some(15),
        length: Length::Epochs(15),
        train: names.collect(),
        ..TrainOptions::new(objective)
    };
    let mut trainer = Trainer::new(&model, &device, &data, options).unwrap();
    let frozen = trainer.frozen_prefix().expect("the backbone is frozen");
    assert!(frozen.bytes_per_sample <= 4096, "{frozen:?}");
    assert!(trainer.reads_logits());
    let mut losses = Vec::new();
    let steps = trainer.total_steps();
    trainer
        .train_to::<meganeura::Error>(steps, |report| {
            losses.push(report.loss);
            Ok(())
        })
        .unwrap();
    trainer.update(&mut model).unwrap();
    let took = started.elapsed();
    assert_eq!(losses.len(), 30);

    // What leaves as ONNX has the new class.
    let folder = tempfile::tempdir().unwrap();
    let tuned = folder.path().join("tuned.onnx");
    model.export_onnx(&tuned).unwrap();
    let tuned = Model::open(&tuned).unwrap();
    assert_eq!(tuned.outputs()[0].dims.as_ref().and_then(|dims| dims.last()), Some(&Dim::Fixed(CLASSES + 1)));
    let recall = share_of_wgsl(&classes(&tuned, &device, unseen));
    let false_alarms = share_of_wgsl(&classes(&tuned, &device, &unknown));
    eprintln!("recall {recall:.3}, false alarms {false_alarms:.3}, training {:.1} s, {frozen:?}", took.as_secs_f64());
    assert!(recall >= 0.95 && false_alarms <= 0.02);
    assert!(took < Duration::from_secs(120), "{took:?}");
}

#[test]
fn features_are_the_ends_of_a_file_without_white_space() {
    let found = features(b" \n ab c\t");
    assert_eq!(found[..6], [97, 98, 32, 99, 9, 256]);
    assert_eq!(found[2040..], [256, 32, 10, 32, 97, 98, 32, 99]);
    assert_eq!((found.len(), found[1023], found[1024]), (2048, 256, 256));
    let long = features(&[vec![b'x'; 5000], vec![b'y'; 1024]].concat());
    assert_eq!((long[0], long[1023], long[1024], long[2047]), (120, 120, 121, 121));
}
