//! Low-rank adapters against PEFT, and the files that they leave in.

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use common::{device, digits, fixture, meganeura, npz, relative_l2, succeed, write_npz};
use meganeura::{
    Dataset, Length, LoraError, LoraOptions, Loss, Model, Objective, Optimizer, Pattern, PeftError, Tensor, TrainOptions, Trainer,
};
use ndarray_npy::NpzReader;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

const TOLERANCE: f64 = 1e-4;
const PREFIX: &str = "base_model.model.";

/// A case of fixtures/lora.py.
struct Case {
    name: &'static str,
    lora: &'static [&'static str],
    train: &'static [&'static str],
}

const CASES: [Case; 2] = [
    Case {
        name: "llama",
        lora: &["*.q_proj.weight:rank=4,alpha=8", "*.v_proj.weight:rank=4,alpha=8", "*.down_proj.weight:rank=2,alpha=3"],
        train: &[],
    },
    Case {
        name: "resnet",
        lora: &["layer1.0.conv1.weight:rank=3,alpha=6", "layer2.0.conv2.weight:rank=3,alpha=6", "fc.weight:rank=3,alpha=6"],
        train: &["layer2.1.bn2.*"],
    },
];

impl Case {
    fn options(&self, length: Length) -> TrainOptions {
        let optimizer = Optimizer::from_name("adamw").unwrap();
        let train = self.train.iter().map(|glob| Pattern::new(glob).unwrap()).collect();
        let objective = Objective::new(Loss::from_name("cross_entropy").unwrap());
        TrainOptions { optimizer, learning_rate: 1e-2, length, train, ..TrainOptions::new(objective) }
    }

    fn data(&self) -> Dataset {
        Dataset::open(fixture(&format!("corpus/{}/data.npz", self.name))).unwrap()
    }

    /// The model with untrained adapters.
    fn adapted(&self) -> Model {
        let mut model = Model::open(fixture(&format!("corpus/{}/model.onnx", self.name))).unwrap();
        let lora = self.lora.iter().map(|text| text.parse().unwrap()).collect();
        let options = TrainOptions { lora, ..self.options(Length::Steps(0)) };
        Trainer::new(&model, &device(), &self.data(), options).unwrap().update(&mut model).unwrap();
        model
    }

    /// The arrays under `part`, by the rest of their names, with their shapes.
    fn expected(&self, part: &str) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
        let mut file = NpzReader::new(File::open(fixture("lora.npz")).unwrap()).unwrap();
        let start = format!("{}/{part}/", self.name);
        let names = file.names().unwrap().into_iter().filter(|name| name.starts_with(&start));
        let read = |name: String| {
            let array: ndarray::ArrayD<f32> = file.by_name(&name).unwrap();
            let name = name[start.len()..].trim_end_matches(".npy").to_owned();
            (name, (array.shape().to_vec(), array.iter().map(|&v| f64::from(v)).collect()))
        };
        names.collect::<Vec<_>>().into_iter().map(read).collect()
    }
}

/// Every tensor of a safetensors file with its shape.
fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |(name, view): (String, TensorView)| {
        let values = match view.dtype() {
            Dtype::I64 => view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
            _ => view.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
        };
        (name, (view.shape().to_vec(), values))
    };
    file.tensors().into_iter().map(read).collect()
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
}

/// The factors of fixtures/lora.py before or after its steps, by their names here.
fn factors(case: &Case, part: &str, name: impl Fn(&str) -> String) -> Vec<(String, Tensor)> {
    let arrays = case.expected(part);
    let factors = arrays.iter().filter(|(name, _)| name.contains(".lora_"));
    let tensor = |(shape, values): &(Vec<usize>, Vec<f64>)| {
        Tensor::from_f32(shape.as_slice(), &values.iter().map(|&v| v as f32).collect::<Vec<_>>())
    };
    factors.map(|(key, array)| (name(&key[PREFIX.len()..]), tensor(array))).collect()
}

/// Ten steps from PEFT's adapters; then all that leaves is compared with PEFT's.
fn ten_steps_agree(case: &Case) {
    let (device, folder) = (device(), tempfile::tempdir().unwrap());
    let mut model = case.adapted();
    let factors = factors(case, "initial", str::to_owned);
    assert_eq!(factors.len(), 2 * model.adapters().len());
    model.set_weights(factors).unwrap();

    let mut trainer = Trainer::new(&model, &device, &case.data(), case.options(Length::Steps(10))).unwrap();
    let mut losses = Vec::new();
    trainer
        .train_to(10, |step| {
            losses.push(step.loss);
            Ok::<_, meganeura::Error>(())
        })
        .unwrap();
    let expected = npz(&fixture("lora.npz"), &format!("{}/losses", case.name));
    for (step, (found, expected)) in losses.iter().zip(&expected).enumerate() {
        assert!((found / expected - 1.0).abs() <= TOLERANCE, "{}, step {step}: {found}, PyTorch has {expected}", case.name);
    }
    let evaluated = trainer.evaluator(&model, &case.data(), None).unwrap().run().unwrap().loss;
    trainer.update(&mut model).unwrap();

    // The adapters alone, in PEFT's layout: the same names and shapes.
    model.export_peft(folder.path()).unwrap();
    let (found, expected) = (tensors(&folder.path().join("adapter_model.safetensors")), case.expected("trained"));
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, (shape, values)) in &found {
        assert_eq!(*shape, expected[name].0, "{name}");
        let error = relative_l2(values, &expected[name].1);
        assert!(error <= TOLERANCE, "{}, {name}: {error:e}", case.name);
    }

    // The artifact is the same model, and so is what has the adapters as part of its weights.
    let artifact = folder.path().join("tuned.safetensors");
    model.save(&artifact).unwrap();
    let mut reopened = Model::open(&artifact).unwrap();
    assert_eq!(reopened.adapters(), model.adapters());
    for (name, (_, expected)) in case.expected("merged") {
        let merged = reopened.weight(&name).unwrap();
        assert!(relative_l2(&merged.to_f64_vec(), &expected) <= TOLERANCE, "{name}");
        assert_eq!(merged, model.weight(&name).unwrap());
    }
    let onnx = folder.path().join("tuned.onnx");
    reopened.export_onnx(&onnx).unwrap();
    reopened.merge_adapters().unwrap();
    let plain = Model::open(&onnx).unwrap();
    for parameter in plain.parameters() {
        assert_eq!(plain.weight(&parameter.name).unwrap(), reopened.weight(&parameter.name).unwrap(), "{}", parameter.name);
    }
    let merged = Trainer::new(&plain, &device, &case.data(), TrainOptions { train: vec![], ..case.options(Length::Steps(0)) });
    let merged = merged.unwrap().evaluator(&plain, &case.data(), None).unwrap().run().unwrap().loss;
    assert!((merged / evaluated - 1.0).abs() <= TOLERANCE, "{merged} with merged weights, {evaluated} with adapters");
}

#[test]
fn adapters_of_projections_train_as_in_peft() {
    ten_steps_agree(&CASES[0]);
}

#[test]
fn adapters_of_convolutions_train_as_in_peft_with_a_norm_beside_them() {
    ten_steps_agree(&CASES[1]);
}

/// The other exporter transposes weights and drops their names.
#[test]
fn adapters_of_transposed_weights_train_as_in_peft() {
    let (device, case) = (device(), &CASES[0]);
    let original = case.adapted();
    let mut model = Model::open(fixture("corpus/llama/model-torchscript.onnx")).unwrap();
    let mut names = BTreeMap::new();
    let mut lora = Vec::new();
    for adapter in original.adapters() {
        let weight = original.weight(adapter.weight()).unwrap();
        let (rows, columns) = (weight.shape()[0], weight.shape()[1]);
        let values = weight.to_f64_vec();
        let transposed: Vec<f64> = (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect();
        let is_it = |name: &str| model.weight(name).unwrap().to_f64_vec() == transposed;
        let found = model.parameters().iter().find(|p| *p.shape == [columns, rows] && is_it(&p.name)).unwrap();
        let pattern = Pattern::new(&Pattern::escape(&found.name)).unwrap();
        lora.push(LoraOptions { pattern, rank: adapter.rank(), alpha: adapter.alpha() });
        names.insert(adapter.module().to_owned(), found.name.clone());
    }
    let options = TrainOptions { lora, ..case.options(Length::Steps(0)) };
    Trainer::new(&model, &device, &case.data(), options).unwrap().update(&mut model).unwrap();
    let name = |name: &str| {
        let (module, factor) = name.split_once(".lora_").unwrap();
        format!("{}.lora_{factor}", names[module])
    };
    model.set_weights(factors(case, "initial", name)).unwrap();
    let mut trainer = Trainer::new(&model, &device, &case.data(), case.options(Length::Steps(10))).unwrap();
    trainer.train_to(10, |_| Ok::<_, meganeura::Error>(())).unwrap();
    trainer.update(&mut model).unwrap();
    for (name, expected) in factors(case, "trained", name) {
        let error = relative_l2(&model.weight(&name).unwrap().to_f64_vec(), &expected.to_f64_vec());
        assert!(error <= TOLERANCE, "{name}: {error:e}");
    }
}

#[test]
fn the_configuration_names_layers_ranks_and_scales() {
    let folder = tempfile::tempdir().unwrap();
    CASES[0].adapted().export_peft(folder.path()).unwrap();
    let found = config(folder.path());
    assert_eq!((&found["peft_type"], &found["task_type"]), (&Value::from("LORA"), &Value::Null));
    assert_eq!((&found["r"], &found["lora_alpha"]), (&Value::from(4), &Value::from(8)));
    assert_eq!(found["target_modules"].as_array().unwrap().len(), 6);
    assert!(found["target_modules"].as_array().unwrap().contains(&Value::from("layers.1.self_attn.v_proj")));
    assert_eq!(found["rank_pattern"]["^layers\\.0\\.mlp\\.down_proj"], 2);
    assert_eq!(found["alpha_pattern"]["^layers\\.1\\.mlp\\.down_proj"], 3);
    assert_eq!((&found["modules_to_save"], &found["base_model_name_or_path"]), (&Value::Null, &Value::from("model.onnx")));

    let mut model = CASES[1].adapted();
    let mut trainer = Trainer::new(&model, &device(), &CASES[1].data(), CASES[1].options(Length::Steps(1))).unwrap();
    trainer.update(&mut model).unwrap();
    model.export_peft(folder.path()).unwrap();
    assert_eq!(config(folder.path())["modules_to_save"], serde_json::json!(["layer2.1.bn2"]));
}

#[test]
fn untrained_adapters_change_nothing_and_only_they_train() {
    let case = &CASES[0];
    let model = case.adapted();
    let before = Model::open(fixture("corpus/llama/model.onnx")).unwrap();
    for parameter in before.parameters() {
        assert_eq!(model.weight(&parameter.name).unwrap(), before.weight(&parameter.name).unwrap());
    }
    let trainer = Trainer::new(&model, &device(), &case.data(), case.options(Length::Steps(1))).unwrap();
    assert_eq!(trainer.trained().len(), 12);
    assert!(trainer.trained().iter().all(|name| name.contains(".lora_")));
}

/// The embedding of this model is its head, too.
#[test]
fn a_tied_weight_is_adapted_wherever_it_is_read() {
    let (device, case) = (device(), &CASES[0]);
    let mut model = Model::open(fixture("corpus/llama/model.onnx")).unwrap();
    let lora: Vec<LoraOptions> = vec!["embed_tokens.weight:rank=4,alpha=8".parse().unwrap()];
    let options = TrainOptions { lora, ..case.options(Length::Steps(3)) };
    let mut trainer = Trainer::new(&model, &device, &case.data(), options).unwrap();
    trainer.train_to(3, |_| Ok::<_, meganeura::Error>(())).unwrap();
    let apart = trainer.evaluator(&model, &case.data(), None).unwrap().run().unwrap().loss;
    trainer.update(&mut model).unwrap();
    assert!(matches!(model.export_peft("unused"), Err(meganeura::Error::Peft(PeftError::Shared(_)))));
    model.merge_adapters().unwrap();
    let options = case.options(Length::Steps(0));
    let merged = Trainer::new(&model, &device, &case.data(), options).unwrap();
    let merged = merged.evaluator(&model, &case.data(), None).unwrap().run().unwrap().loss;
    assert!((merged / apart - 1.0).abs() <= TOLERANCE, "{merged} with merged weights, {apart} with adapters");
}

#[test]
fn what_can_have_no_adapter_is_named_with_what_can() {
    let device = device();
    let model = Model::open(fixture("corpus/resnet/model.onnx")).unwrap();
    let refused_at = |model: &Model, glob: &str, rank: usize| {
        let lora = vec![format!("{glob}:rank={rank}").parse().unwrap()];
        let options = TrainOptions { lora, ..CASES[1].options(Length::Steps(1)) };
        match Trainer::new(model, &device, &CASES[1].data(), TrainOptions { train: vec![], ..options }) {
            Err(meganeura::Error::Lora(error)) => *error,
            Err(other) => panic!("{glob}: {other}"),
            Ok(_) => panic!("{glob} is not refused"),
        }
    };
    let refused = |model: &Model, glob: &str| refused_at(model, glob, 2);
    let text = refused(&model, "absent*").to_string();
    assert!(text.contains("absent*") && text.contains("\"conv1.weight\"") && !text.contains("bn1"), "{text}");
    let text = refused(&model, "bn1.*").to_string();
    assert!(text.contains("\"bn1.weight\"") && text.contains("axes") && text.contains("\"conv1.weight\""), "{text}");
    let text = refused(&model, "*running_mean").to_string();
    assert!(text.contains("running_mean") && text.contains("statistics"), "{text}");
    assert_eq!(refused(&CASES[1].adapted(), "fc.weight"), LoraError::Adapted);
    assert!(matches!(refused_at(&model, "fc.weight", 1 << 16), LoraError::TooLarge { rank: 65536, .. }));
}

#[test]
fn the_command_line_trains_adapters_and_writes_every_form() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (image, label) = digits(12);
    write_npz(&PathBuf::from(file("data.npz")), &[("image", image), ("label", label)]);
    let original = fixture("digits-cnn.onnx").to_str().unwrap().to_string();
    let run = ["--data", &file("data.npz"), "--loss", "cross_entropy", "--lr", "0.05", "--batch", "6", "--steps", "4"];
    let lora = ["--lora", "*.weight:rank=2,alpha=4"];
    let outputs = ["--peft", &file("peft"), "--merged", &file("merged.safetensors"), "-o", &file("tuned.safetensors")];
    succeed([["train", &original].as_slice(), &run, &lora, &outputs].concat());

    // What `export` writes is what `train` wrote.
    succeed(["export", &file("tuned.safetensors"), "--peft", &file("again"), "--safetensors", &file("again.safetensors")]);
    let read = |name: &str| std::fs::read(file(name)).unwrap();
    assert!(read("peft/adapter_model.safetensors") == read("again/adapter_model.safetensors"));
    assert!(read("merged.safetensors") == read("again.safetensors"));
    let plain = Model::open(&original).unwrap();
    let merged = tensors(Path::new(&file("merged.safetensors")));
    assert_eq!(merged.len(), plain.parameters().len());
    assert!(plain.parameters().iter().all(|p| merged[&p.name].0 == *p.shape));
    let changed = |name: &str| merged[name].1 != plain.weight(name).unwrap().to_f64_vec();
    assert!(changed("fc.weight") && changed("conv1.weight") && !changed("fc.bias"));
    assert!(tensors(Path::new(&file("tuned.safetensors"))).contains_key("fc.lora_A.weight"));

    // The artifact runs as the merged model does, trains on, and takes no second adapters.
    for (model, out) in [("tuned.safetensors", "tuned.npz"), ("merged.safetensors", "merged.npz")] {
        succeed(["run", &file(model), "--data", &file("data.npz"), "-o", &file(out)]);
    }
    assert!(read("tuned.npz") == read("merged.npz"));
    let tuned = file("tuned.safetensors");
    let more = ["train", &tuned].into_iter().chain(run).chain(["-o"]).collect::<Vec<_>>();
    succeed([more.as_slice(), &[&file("more.safetensors")]].concat());
    assert!(read("more.safetensors") != read("tuned.safetensors"));
    let refused = meganeura([more.as_slice(), &[&file("no.safetensors")], &lora].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("has adapters already"));
    let refused = meganeura(["export", &original, "--peft", &file("none")]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no adapters"));
}

/// Replaces a part of the header of an artifact, by one of the same length.
fn with_header(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    assert!(header.contains(from) && from.len() == to.len(), "{from}");
    [&bytes[..8], header.replacen(from, to, 1).as_bytes(), &bytes[8 + length..]].concat()
}

#[test]
fn adapters_without_a_form_in_peft_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapted.safetensors");
    CASES[1].adapted().save(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        match Model::open(&path).unwrap().export_peft(folder.path().join("peft")) {
            Err(meganeura::Error::Peft(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let grouped = with_header(&bytes, "\\\"groups\\\":1", "\\\"groups\\\":2");
    assert_eq!(refused(&grouped), PeftError::Groups("layer1.0.conv1.weight".into()));
    let mut model = CASES[1].adapted();
    let train = vec![Pattern::new("fc.bias").unwrap()];
    let options = TrainOptions { train, ..CASES[1].options(Length::Steps(1)) };
    Trainer::new(&model, &device(), &CASES[1].data(), options).unwrap().update(&mut model).unwrap();
    let error = model.export_peft(folder.path().join("peft")).unwrap_err().to_string();
    assert!(error.contains("fc.bias") && error.contains("has an adapter too"), "{error}");
}

#[test]
fn damaged_adapters_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapted.safetensors");
    CASES[0].adapted().save(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for (from, to) in [
        ("\\\"rank\\\":4", "\\\"rank\\\":0"),
        ("\\\"rank\\\":4", "\\\"rank\\\":3"),
        ("\\\"rows\\\":[0]", "\\\"rows\\\":[7]"),
        ("\\\"alpha\\\":8.0", "\\\"alpha\\\":nul"),
        ("layers.0.self_attn.q_proj.lora_A.weight", "layers.0.self_attn.q_proj.lora_C.weight"),
        ("\\\"weight\\\":\\\"layers.0.self_attn.q", "\\\"weight\\\":\\\"layers.0.self_attn.k"),
    ] {
        std::fs::write(&path, with_header(&bytes, from, to)).unwrap();
        let error = Model::open(&path).err().unwrap_or_else(|| panic!("{to} is not refused"));
        assert!(matches!(&error, meganeura::Error::Lora(e) if matches!(**e, LoraError::Damaged(_))), "{to}: {error}");
    }
}
