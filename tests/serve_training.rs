//! The server trains what it serves: versions of answers, checkpoints under kill -9, and the way back.

#![cfg(feature = "serve")]

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::http::{answer, post, tensor};
use common::serving::Serving;
use common::{digits, fixture};
use meganeura::live::{DeviceSource, Live, LiveOptions};
use serde_json::{Value, json};

const MODEL: &str = "/v2/models/digits-cnn";

/// A server that learns.
struct Server(Serving);

impl Server {
    fn start(flags: &[&str]) -> Self {
        let model = fixture("digits-cnn.onnx");
        Server(Serving::start(&[&[model.to_str().unwrap(), "--train-endpoint"], flags].concat()))
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.0.request("POST", &format!("{MODEL}{path}"), body)
    }

    fn train(&self, samples: usize, steps: u64, lr: f64) -> Value {
        self.0.post(&format!("{MODEL}/train"), &training(samples, steps, lr))
    }

    fn infer(&self) -> (Vec<f32>, u64) {
        answer(&self.0.post(&format!("{MODEL}/infer"), &image()))
    }
}

fn image() -> Value {
    json!({ "inputs": [tensor("image", "FP32", &[1, 1, 8, 8], digits(1).0.to_f64_vec())] })
}

fn training(samples: usize, steps: u64, lr: f64) -> Value {
    let (images, labels) = digits(samples);
    json!({
        "inputs": [tensor("image", "FP32", &[samples, 1, 8, 8], images.to_f64_vec())],
        "targets": tensor("label", "INT64", &[samples], labels.to_f64_vec()),
        "loss": "cross_entropy", "optimizer": "adamw", "lr": lr, "steps": steps,
    })
}

#[test]
fn answers_are_of_one_version_while_a_client_trains() {
    // One size of batches, so that equal weights give equal bits.
    let server = Server::start(&["--max-batch", "1"]);
    let mut versions = vec![server.infer().0];
    server.train(6, 1, 1e-2);
    versions.push(server.infer().0);
    for _ in 0..3 {
        let done = AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            let ask = || {
                let mut seen = Vec::new();
                while !done.load(Ordering::Acquire) {
                    seen.push(server.infer());
                }
                seen
            };
            let clients: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
            let report = server.train(6, 200, 1e-4);
            assert_eq!((&report["published"], report["losses"].as_array().map(Vec::len)), (&json!(true), Some(200)));
            done.store(true, Ordering::Release);
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<_>>()
        });
        versions.push(server.infer().0);
        assert!(seen.len() >= 12, "{}", seen.len());
        for (logits, version) in seen {
            assert!(version + 2 >= versions.len() as u64 && logits == versions[version as usize], "version {version}");
        }
    }
}

#[test]
fn a_client_writes_checkpoints_and_rolls_back() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&["--checkpoint", folder.path().to_str().unwrap(), "--max-batch", "1"]);
    let (first, _) = server.infer();
    assert_eq!(server.train(6, 2, 1e-2)["weight_version"], 1);
    let (second, _) = server.infer();
    assert_ne!(first, second);
    let (status, saved) = server.post("/checkpoint", &json!({}));
    assert_eq!((status, &saved["weight_version"]), (200, &json!(1)), "{saved}");
    assert!(folder.path().join(saved["checkpoint"].as_str().unwrap()).exists());

    // The loss becomes infinite: nothing of it is served.
    let ruined = server.train(6, 5, 1e30);
    assert_eq!((&ruined["published"], &ruined["weight_version"]), (&json!(false), &json!(1)), "{ruined}");
    assert!(ruined["reason"].as_str().unwrap().contains("loss"), "{ruined}");
    assert_eq!(server.infer(), (second.clone(), 1));

    server.train(6, 2, 1e-2);
    assert_ne!(server.infer().0, second);
    let (status, rollback) = server.post("/rollback", &json!({}));
    assert_eq!((status, &rollback["weight_version"], &rollback["restored_version"]), (200, &json!(3), &json!(1)), "{rollback}");
    assert_eq!(server.infer(), (second, 3));
    let wrong = json!({ "path": "../../secret" });
    let (status, saved) = server.post("/checkpoint", &wrong);
    assert!(status != 200 || saved["checkpoint"] == "version-3.safetensors", "{saved}");
}

#[test]
fn a_kill_during_a_checkpoint_leaves_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--checkpoint", folder.path().to_str().unwrap(), "--max-batch", "1"];
    let mut reached = 0;
    for kill in 0..4u32 {
        let server = Server::start(&flags);
        let address = server.0.address.to_string();
        let busy = std::thread::spawn(move || {
            let mut saved = 0;
            while let Ok((200, _)) = post(&address, &format!("{MODEL}/train"), &training(2, 1, 1e-3)) {
                for _ in 0..20 {
                    let Ok((200, body)) = post(&address, &format!("{MODEL}/checkpoint"), &json!({})) else { return saved };
                    saved = body["weight_version"].as_u64().unwrap();
                }
            }
            saved
        });
        let started = Instant::now();
        while newest(folder.path()) <= reached {
            assert!(started.elapsed() < Duration::from_secs(120));
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_secs_f64(f64::from(kill) * 0.618_033_988_75 % 1.0 * 0.2));
        drop(server);
        let saved = busy.join().unwrap();
        let version = newest(folder.path());
        assert!(version > reached && version >= saved, "kill {kill}: {version} {reached} {saved}");

        let options = LiveOptions { checkpoints: Some(folder.path().into()), ..LiveOptions::default() };
        let devices = std::sync::Arc::new(DeviceSource::new(meganeura::DeviceSelector::Auto));
        let mut live = Live::open(fixture("digits-cnn.onnx"), options, devices).unwrap();
        assert!(live.problems().is_empty(), "{:?}", live.problems());
        let expected = live.infer(&[("image", &digits(1).0)]).unwrap();
        let restarted = Server::start(&flags);
        assert_eq!(restarted.infer(), (expected.outputs[0].1.to_f32_vec(), version));
        reached = version;
    }
}

fn newest(folder: &Path) -> u64 {
    let names = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("version-")?.strip_suffix(".safetensors")?.parse().ok()).max().unwrap_or(0)
}
