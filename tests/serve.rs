//! The command `serve`, from outside: as a client sees it, and as the operator does.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{digits, fixture, python};
use meganeura::{Bindings, Device, DeviceSelector, Model, Tensor};
use serde_json::{Value, json};

/// A server of its own process.
struct Serving {
    child: Child,
    address: SocketAddr,
}

impl Serving {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_meganeura"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = Vec::new();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let address = line.strip_prefix("serving at http://").and_then(|address| address.parse().ok());
            seen.push(line);
            address
        });
        // Whatever comes later is read, so that the server does not wait for it.
        std::thread::spawn(move || lines.for_each(drop));
        Serving { child, address: address.unwrap_or_else(|| panic!("it does not serve:\n{}", seen.join("\n"))) }
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let length = body.len();
        write!(stream, "{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or(Value::Null))
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.request("POST", path, body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Asks it to stop, as a service manager does; whether it ended well.
    #[cfg(unix)]
    fn terminate(mut self) -> bool {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.child.wait().unwrap().success()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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
