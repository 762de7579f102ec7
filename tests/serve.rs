//! The command `serve`, from outside: as a client sees it, and as the operator does.

mod common;

use std::path::Path;
use std::process::Command;

use common::serving::Serving;
use common::{digits, fixture, python};
use meganeura::{Bindings, Device, DeviceSelector, Model, Precision, Tensor};
use serde_json::{Value, json};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn tensor(name: &str, datatype: &str, tensor: &Tensor) -> Value {
    let data = if tensor.dtype().is_float() { json!(tensor.to_f64_vec()) } else { json!(tensor.to_i64_vec()) };
    json!({ "name": name, "datatype": datatype, "shape": tensor.shape().to_vec(), "data": data })
}

const DIGITS: &str = "/v2/models/digits-cnn";

#[test]
fn tritonclient_works_unchanged() {
    let Some(python) = python() else {
        eprintln!("skipped: no Python environment; `cargo xtask test` makes one");
        return;
    };
    let folder = fixture("serve");
    let server = Serving::start(&[text(&folder)]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve_client.py");
    let output = Command::new(python).arg(script).arg(server.address.to_string()).arg(&folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn answers_are_those_of_the_model() {
    let model = fixture("digits-cnn.onnx");
    let server = Serving::start(&[text(&model)]);
    let (image, _) = digits(4);
    let device = Device::open(&DeviceSelector::Auto).unwrap();
    let expected = Model::open(&model).unwrap().run_with(&device, &[("image", &image)], &Bindings::default()).unwrap();
    let answer = server.post(&format!("{DIGITS}/infer"), &json!({ "inputs": [tensor("image", "FP32", &image)] }));
    let found: Vec<f32> = serde_json::from_value(answer["outputs"][0]["data"].clone()).unwrap();
    assert_eq!(found, expected[0].1.to_f32_vec());
}

#[test]
fn a_precision_that_the_device_does_not_offer_is_noted() {
    let device = Device::open_at(&DeviceSelector::Auto, Precision::Accelerated).unwrap();
    let server = Serving::start(&[text(&fixture("digits-cnn.onnx")), "--precision", "accelerated"]);
    let noted = server.said.iter().any(|line| line.starts_with("note: ") && line.contains("no matrix units"));
    assert_eq!(noted, device.profile().matrix_unit.is_none(), "{:?}", server.said);
}

#[cfg(unix)]
#[test]
fn a_served_model_learns_and_a_restart_serves_what_it_learned() {
    let (model, folder) = (fixture("digits-cnn.onnx"), tempfile::tempdir().unwrap());
    let arguments = [text(&model), "--train-endpoint", "--checkpoint", text(folder.path()), "--max-batch", "4"];
    let (image, label) = digits(8);
    let train = json!({
        "inputs": [tensor("image", "FP32", &image)], "targets": tensor("label", "INT64", &label),
        "loss": "cross_entropy", "optimizer": "adamw", "lr": 0.001, "steps": 5,
    });
    let (one, _) = digits(1);
    let infer = json!({ "inputs": [tensor("image", "FP32", &one)] });
    let outputs = |answer: &Value| (answer["parameters"]["weight_version"].clone(), answer["outputs"][0]["data"].clone());

    let server = Serving::start(&arguments);
    let first = outputs(&server.post(&format!("{DIGITS}/infer"), &infer));
    let trained = server.post(&format!("{DIGITS}/train"), &train);
    let losses: Vec<f64> = serde_json::from_value(trained["losses"].clone()).unwrap();
    assert!(losses.len() == 5 && losses[4] < losses[0], "{losses:?}");
    assert_eq!((&trained["published"], &trained["weight_version"]), (&json!(true), &json!(1)));
    let learned = outputs(&server.post(&format!("{DIGITS}/infer"), &infer));
    assert_eq!((&first.0, &learned.0), (&json!(0), &json!(1)));
    assert_ne!(first.1, learned.1);
    let checkpoint = server.post(&format!("{DIGITS}/checkpoint"), &Value::Null);
    assert_eq!(checkpoint, json!({ "checkpoint": "version-1.safetensors", "weight_version": 1 }));

    server.post(&format!("{DIGITS}/train"), &train);
    let back = server.post(&format!("{DIGITS}/rollback"), &Value::Null);
    assert_eq!(back, json!({ "weight_version": 3, "restored_version": 1, "interrupted": false }));
    assert_eq!(outputs(&server.post(&format!("{DIGITS}/infer"), &infer)).1, learned.1);
    assert!(server.terminate());

    let server = Serving::start(&arguments);
    assert_eq!(outputs(&server.post(&format!("{DIGITS}/infer"), &infer)), learned);
    assert_eq!(server.request("POST", &format!("{DIGITS}/train"), &json!({})).0, 400);
}

#[test]
fn what_is_wrong_with_a_training_request_is_told_with_its_field() {
    let (digits_cnn, mixed) = (fixture("digits-cnn.onnx"), fixture("serve/mixed.onnx"));
    let server = Serving::start(&[text(&digits_cnn), text(&mixed), "--train-endpoint"]);
    let (image, label) = digits(2);
    let request = json!({
        "inputs": [tensor("image", "FP32", &image)], "targets": tensor("label", "INT64", &label), "loss": "cross_entropy", "lr": 0.1,
    });
    let without = |field: &str| {
        let mut request = request.clone();
        request.as_object_mut().unwrap().remove(field);
        request
    };
    let with = |place: &str, value: Value| {
        let mut request = request.clone();
        match request.pointer_mut(place) {
            Some(field) => *field = value,
            None => request[place.trim_start_matches('/')] = value,
        }
        request
    };
    let targets = |datatype: &str, shape: &[usize], data: Value| {
        with("/targets", json!({ "name": "t", "datatype": datatype, "shape": shape, "data": data }))
    };
    let refused = |path: &str, request: &Value, told: &str| {
        let (status, body) = server.request("POST", path, request);
        let error = body["error"].as_str().unwrap_or_default();
        assert!(status == 400 && error.contains(told) && !error.contains("memory>"), "{told:?}: {status} {body}");
    };
    for (request, told) in [
        (without("inputs"), "missing field `inputs`"),
        (without("targets"), "targets is missing"),
        (without("loss"), "missing field `loss`"),
        (without("lr"), "missing field `lr`"),
        (with("/loss", json!("hinge")), "loss: there is no loss \"hinge\""),
        (with("/loss", json!("output")), "targets: the loss \"output\" takes none"),
        (with("/optimizer", json!("sgdm2")), "optimizer: there is no optimizer \"sgdm2\""),
        (with("/output", json!("probabilities")), "output: the model has no output \"probabilities\""),
        (with("/inputs", json!([])), "inputs: \"image\" is missing"),
        (with("/inputs/0/shape", json!([2, 8, 8])), "inputs: \"image\" has shape [samples,1,8,8], not [2,8,8]"),
        (with("/inputs/0/datatype", json!("BOOL")), "data of input \"image\""),
        (targets("INT64", &[2], json!([1, 10])), "targets, sample 1: 10 is not one of the model's 10 classes"),
        (targets("INT64", &[3], json!([1, 2, 3])), "targets holds 3 samples, inputs: \"image\" holds 2"),
        (targets("INT64", &[], json!(3)), "targets is a scalar"),
        (targets("FP32", &[2, 3], json!([0, 0, 0, 0, 0, 0])), "targets: cross_entropy of a prediction"),
    ] {
        refused(&format!("{DIGITS}/train"), &request, told);
    }
    let inputs = json!([
        { "name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6] },
        { "name": "h", "datatype": "FP16", "shape": [2, 2, 2], "data": [1, 2, 3, 4, 5, 6, 7, 8] },
        { "name": "ids", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 4] },
        { "name": "on", "datatype": "BOOL", "shape": [2], "data": [true, false] },
    ]);
    refused("/v2/models/mixed/train", &with("/inputs", inputs), "output is missing: the model has several, y, halved, next, off");
    server.post(&format!("{DIGITS}/train"), &request);
    // Whatever the bodies of these say, they name no files.
    for path in ["checkpoint", "rollback"] {
        let (status, body) = server.request("POST", &format!("{DIGITS}/{path}"), &json!({ "path": "../../x" }));
        match path {
            "checkpoint" => {
                assert!(status == 501 && body["error"].as_str().unwrap().contains("folder for checkpoints"), "{body}")
            }
            _ => assert_eq!((status, &body["weight_version"]), (200, &json!(2)), "{body}"),
        }
    }
}

#[test]
fn requests_of_many_sizes_at_once_all_get_their_programs() {
    let model = fixture("serve/sequence.onnx");
    let server = Serving::start(&[text(&model), "--max-specializations", "4"]);
    let sum = |length: usize| {
        let x = json!({ "name": "x", "datatype": "FP32", "shape": [1, length, 4], "data": vec![1; length * 4] });
        let answer = server.post("/v2/models/sequence/infer", &json!({ "inputs": [x] }));
        serde_json::from_value::<Vec<f64>>(answer["outputs"][0]["data"].clone()).unwrap()
    };
    // The model sums over the steps of a sequence, which are all alike.
    let one = sum(1);
    std::thread::scope(|scope| {
        for length in 2..34 {
            let (sum, one) = (&sum, &one);
            scope.spawn(move || {
                for (found, one) in sum(length).iter().zip(one) {
                    assert!((found - one * length as f64).abs() < 1e-4 * (1.0 + found.abs()), "{length}: {found} {one}");
                }
            });
        }
    });
}

#[cfg(target_os = "linux")]
#[test]
fn memory_that_runs_out_is_503_and_smaller_requests_go_on() {
    if !common::device().info().is_software() {
        eprintln!("skipped: the memory of this device cannot be limited");
        return;
    }
    let model = fixture("digits-cnn.onnx");
    let arguments = [text(&model), "--max-batch", "24000"];
    let infer = |server: &Serving, samples: usize| {
        let data: Vec<usize> = (0..samples * 64).map(|i| i % 7).collect();
        let image = json!({ "name": "image", "datatype": "FP32", "shape": [samples, 1, 8, 8], "data": data });
        server.request("POST", &format!("{DIGITS}/infer"), &json!({ "inputs": [image] }))
    };
    let unlimited = Serving::start_within(None, &arguments);
    let (status, expected) = infer(&unlimited, 4);
    assert_eq!(status, 200, "{expected}");
    let server = Serving::start_within(Some(unlimited.peak() + (128 << 10)), &arguments);
    let mut refused = 0;
    for samples in [200, 8_000, 24_000, 24_000] {
        let (status, body) = infer(&server, samples);
        if status != 200 {
            assert_eq!((status, samples > 200), (503, true), "{samples}: {body}");
            assert!(body["error"].as_str().unwrap().contains("memory"), "{body}");
            refused += 1;
        }
        let (status, body) = infer(&server, 4);
        assert_eq!((status, &body["outputs"]), (200, &expected["outputs"]), "{body}");
    }
    assert!(refused >= 2);
}

#[test]
fn what_the_operator_gets_wrong_is_said_at_the_start() {
    let model = fixture("digits-cnn.onnx");
    let empty = tempfile::tempdir().unwrap();
    let model = text(&model);
    let cases: [(&[&str], &str); 6] = [
        (&[text(empty.path())], "there is no model in"),
        (&["missing.onnx"], "missing.onnx"),
        (&[model, model], "two models have the name"),
        (&[model, "--model-name", "a/b"], "is no name for a model"),
        (&[model, "--token-file", "/nonexistent/token"], "cannot read"),
        (&[model, "--checkpoint", "run"], "--train-endpoint"),
    ];
    for (arguments, reason) in cases {
        let output = common::meganeura(["serve", "--listen", "127.0.0.1:0"].iter().chain(arguments));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && message.contains(reason), "{:?}: {message}", output.status);
    }
}
