//! The server trains what it serves: versions of answers, checkpoints under kill -9, the way back, and how long answers take meanwhile.

#![cfg(feature = "serve")]

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::http::{answer, post, tensor};
use common::{digits, fixture};
use meganeura::live::{DeviceSource, Live, LiveOptions};
use serde_json::{Value, json};

const MODEL: &str = "/v2/models/digits-cnn";

/// A running server, killed on drop.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_meganeura"));
        command.arg("serve").arg(fixture("digits-cnn.onnx")).args(["--listen", "127.0.0.1:0", "--train-endpoint"]).args(flags);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("the server says where it listens").unwrap();
            if let Some(address) = line.strip_prefix("serving at http://") {
                break address.to_string();
            }
        };
        std::thread::spawn(move || lines.for_each(drop));
        Server { child, address }
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        post(&self.address, &format!("{MODEL}{path}"), body).unwrap()
    }

    fn train(&self, samples: usize, steps: u64, lr: f64) -> Value {
        let (status, body) = self.post("/train", &training(samples, steps, lr));
        assert_eq!(status, 200, "{body}");
        body
    }

    fn infer(&self) -> (Vec<f32>, u64) {
        let (status, body) = self.post("/infer", &image());
        assert_eq!(status, 200, "{body}");
        answer(&body)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
        let address = server.address.clone();
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

#[test]
fn latency_while_training_stays_below_twice_idle_and_a_step() {
    let server = Server::start(&["--max-batch", "4", "--train-share", "0.5"]);
    let ask = |seconds: u64| {
        let clients = || {
            let started = Instant::now();
            let mut times = Vec::new();
            while started.elapsed() < Duration::from_secs(seconds) {
                let asked = Instant::now();
                server.infer();
                times.push(asked.elapsed());
            }
            times
        };
        let mut times: Vec<Duration> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..2).map(|_| scope.spawn(clients)).collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        times.sort();
        (times[(times.len() - 1) * 99 / 100], times.len())
    };
    // Software devices compile at the first run.
    server.train(16, 2, 1e-3);
    ask(1);
    let mut steps: Vec<Duration> = (0..20)
        .map(|_| {
            let started = Instant::now();
            server.train(16, 1, 1e-3);
            started.elapsed()
        })
        .collect();
    steps.sort();
    let (idle, answers) = ask(3);
    let (training, meanwhile) = std::thread::scope(|scope| {
        let trained = scope.spawn(|| server.post("/train", &training(16, 1000, 1e-5)));
        let measured = ask(3);
        assert!(!trained.is_finished(), "training ended too early");
        server.post("/rollback", &json!({}));
        assert_eq!(trained.join().unwrap().0, 503);
        measured
    });
    let step = steps[steps.len() - 1];
    eprintln!("idle p99 {idle:?} ({answers} answers), while training {training:?} ({meanwhile} answers), a step {step:?}");
    assert!(training < 2 * idle + step, "{training:?}");
}
