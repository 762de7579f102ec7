//! The protocol over HTTP, on a model without a device.

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Client, INFER, Running, Work, infer_body};
use meganeura_serve::Options;
use serde_json::json;

#[test]
fn server_and_models_describe_themselves() {
    let server = Running::start(Options::default());
    assert_eq!(server.get("/v2/health/live").status, 200);
    assert_eq!(server.get("/v2/health/ready").status, 200);
    let about = server.get("/v2").json();
    assert_eq!((about["name"].as_str(), about["extensions"][0].as_str()), (Some("meganeura"), Some("binary_tensor_data")));
    let metadata = server.get("/v2/models/fake/versions/1").json();
    assert_eq!(metadata["inputs"][0], json!({ "name": "x", "datatype": "FP32", "shape": [-1, -1] }));
    assert_eq!(metadata["outputs"][1], json!({ "name": "next", "datatype": "INT64", "shape": [2, -1] }));
    assert_eq!(server.get("/v2/models/fake/ready").status, 200);
    assert_eq!(server.get("/v2/models/fake/config").json()["max_batch_size"], 16);
    assert_eq!(server.post("/v2/repository/index", "").json()[0]["state"], "READY");
    assert_eq!(server.get("/v2/models/fake/stats").json()["model_stats"][0]["execution_count"], 0);
    assert!(server.get("/").text().contains("<html") || server.get("/").text().contains("<!doctype"));
}

#[test]
fn json_in_json_out() {
    let server = Running::start(Options::default());
    let reply = server.post(INFER, &infer_body(3, 2, 0.75));
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("weight-version"), Some("0"));
    let answer = reply.json();
    assert_eq!((answer["id"].as_str(), answer["model_version"].as_str()), (Some("42"), Some("1")));
    assert_eq!(answer["parameters"]["weight_version"], 0);
    assert_eq!(answer["parameters"]["batch_size"], 4);
    let y = json!({ "name": "y", "datatype": "FP16", "shape": [3, 2], "data": [1.5, 1.5, 1.5, 1.5, 1.5, 1.5] });
    assert_eq!(answer["outputs"][0], y);
    assert_eq!(answer["outputs"][1], json!({ "name": "next", "datatype": "INT64", "shape": [2, 3], "data": [8, 8, 8, 8, 8, 8] }));
    assert_eq!(answer["outputs"][2]["data"], json!([false, false, false]));
}

#[test]
fn outputs_are_chosen_in_any_order() {
    let server = Running::start(Options::default());
    let mut request: serde_json::Value = serde_json::from_str(&infer_body(1, 1, 1.0)).unwrap();
    request["outputs"] = json!([{ "name": "off" }, { "name": "y" }]);
    let outputs = server.post(INFER, &request.to_string()).json()["outputs"].clone();
    let names: Vec<&str> = outputs.as_array().unwrap().iter().map(|o| o["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["off", "y"]);
}

/// `x` and the rest of a request in binary, after its JSON; and the length of that.
fn binary_request(parameters: serde_json::Value) -> (Vec<u8>, usize) {
    let json = json!({
        "inputs": [
            { "name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": { "binary_data_size": 8 } },
            { "name": "ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2] },
            { "name": "on", "datatype": "BOOL", "shape": [1], "parameters": { "binary_data_size": 1 } },
        ],
        "parameters": parameters,
    })
    .to_string();
    let mut body = json.clone().into_bytes();
    body.extend([0.5f32, -1.0].iter().flat_map(|v| v.to_le_bytes()));
    body.push(1);
    (body, json.len())
}

#[test]
fn tensors_travel_in_binary() {
    let server = Running::start(Options::default());
    let (body, length) = binary_request(json!({ "binary_data_output": true }));
    let length = length.to_string();
    let reply = server.client().request("POST", INFER, &[("Inference-Header-Content-Length", &length)], &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let json_length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&reply.body[..json_length]).unwrap();
    assert_eq!(answer["outputs"][0]["parameters"]["binary_data_size"], 4);
    // 1.0 and -2.0 as halves, 2 and 3 as 64-bit integers, false.
    let expected = [&[0x00, 0x3c, 0x00, 0xc0][..], &2i64.to_le_bytes(), &3i64.to_le_bytes(), &[0]].concat();
    assert_eq!(reply.body[json_length..], expected);
}

#[test]
fn bodies_are_packed_both_ways() {
    let server = Running::start(Options::default());
    let plain = infer_body(8, 64, 1.0);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(plain.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    let headers = [("Content-Encoding", "gzip"), ("Accept-Encoding", "gzip")];
    let reply = server.client().request("POST", INFER, &headers, &gzip);
    assert_eq!((reply.status, reply.header("content-encoding")), (200, Some("gzip")));
    let mut text = String::new();
    flate2::read::GzDecoder::new(&reply.body[..]).read_to_string(&mut text).unwrap();
    assert!(text.contains("\"shape\":[8,64]"), "{text}");
    let reply = server.client().request("POST", INFER, &[("Content-Encoding", "gzip")], &gzip[..20]);
    assert_eq!(reply.status, 400);
    let reply = server.client().request("POST", INFER, &[("Content-Encoding", "br")], b"x");
    assert_eq!(reply.status, 415);
}

#[test]
fn a_small_body_that_unpacks_to_a_large_one_is_refused() {
    let server = Running::start(Options { max_body: 1 << 16, ..Options::default() });
    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    bomb.write_all(&vec![b' '; 4 << 20]).unwrap();
    let reply = server.client().request("POST", INFER, &[("Content-Encoding", "gzip")], &bomb.finish().unwrap());
    assert_eq!(reply.status, 413, "{}", reply.text());
}

#[test]
fn requests_share_executions_and_keep_their_rows() {
    let options = Options { max_delay: Duration::from_millis(50), ..Options::default() };
    let server = Running::start(options);
    server.knobs.slow.store(20, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for client in 0..16 {
            let server = &server;
            scope.spawn(move || {
                let mut connection = server.client();
                for round in 0..10 {
                    let (rows, x) = (1 + (client + round) % 3, (client * 10 + round) as f64);
                    let answer = connection.request("POST", INFER, &[], infer_body(rows, 2, x).as_bytes());
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    let y = &answer.json()["outputs"][0];
                    assert_eq!(y["shape"], json!([rows, 2]));
                    assert!(y["data"].as_array().unwrap().iter().all(|v| v.as_f64() == Some(2.0 * x)), "{y}");
                }
            });
        }
    });
    let executions = server.knobs.executions.load(Ordering::Relaxed);
    assert!(executions <= 60, "{executions} executions of 160 requests");
    assert!(server.knobs.largest.load(Ordering::Relaxed) <= 16);
    assert_eq!(server.metric("meganeura_executions_total") as usize, executions);
    assert_eq!(server.metric("meganeura_latency_seconds_count") as usize, 160);
}

#[test]
fn requests_of_other_sizes_wait_for_their_program() {
    let server = Running::start_lazy(Options::default(), true);
    for width in 1..5 {
        let answer = server.post(INFER, &infer_body(2, width, 1.0));
        assert_eq!((answer.status, &answer.json()["outputs"][0]["shape"]), (200, &json!([2, width])));
    }
    let reply = server.post(INFER, &infer_body(1, 13, 1.0));
    assert_eq!((reply.status, reply.error().as_str()), (400, "13 is no size for this model"));
}

#[test]
fn a_device_that_fails_is_unavailable_once() {
    let server = Running::start(Options::default());
    server.knobs.failures.store(1, Ordering::Relaxed);
    let reply = server.post(INFER, &infer_body(1, 1, 1.0));
    assert_eq!((reply.status, reply.error().as_str()), (503, "the device was lost"));
    assert_eq!(server.post(INFER, &infer_body(1, 1, 1.0)).status, 200);
}

#[test]
fn a_full_queue_and_a_deadline_are_told() {
    let options = Options { max_queue: 2, max_batch: 1, deadline: Duration::from_millis(300), ..Options::default() };
    let server = Running::start(options);
    server.knobs.slow.store(200, Ordering::Relaxed);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let post = || server.post(INFER, &infer_body(1, 1, 1.0)).status;
        let clients: Vec<_> = (0..8).map(|_| scope.spawn(post)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let count = |status: u16| statuses.iter().filter(|&&s| s == status).count();
    assert!(count(200) >= 1 && count(429) >= 4, "{statuses:?}");
    assert_eq!(count(200) + count(429) + count(503), 8, "{statuses:?}");
    server.knobs.slow.store(0, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.post(INFER, &infer_body(1, 1, 1.0)).status, 200);
    assert_eq!(server.metric("meganeura_queue_requests"), 0.0);
}

#[test]
fn slow_clients_are_cut_off() {
    let (body_timeout, header_timeout) = (Duration::from_millis(200), Duration::from_millis(300));
    let server = Running::start(Options { body_timeout, header_timeout, ..Options::default() });
    let started = Instant::now();
    let mut silent = server.client();
    let mut slow_head = server.client();
    slow_head.send(b"GET /v2 HT");
    let mut slow_body = server.client();
    slow_body.send(b"POST /v2/models/fake/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{");
    assert_eq!(slow_body.reply().unwrap().status, 408);
    assert!(slow_head.reply().is_none_or(|reply| reply.status == 408));
    assert!(silent.reply().is_none());
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_half_closed_connection_gets_its_answer() {
    let server = Running::start(Options::default());
    let mut client = server.client();
    let body = infer_body(1, 1, 1.0);
    client.send(format!("POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
    client.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.reply().unwrap().status, 200);
}

#[test]
fn connections_beyond_the_limit_are_told() {
    let server = Running::start(Options { max_connections: 2, ..Options::default() });
    let mut open: Vec<Client> = (0..2).map(|_| server.client()).collect();
    open.iter_mut().for_each(|client| assert_eq!(client.request("GET", "/v2", &[], b"").status, 200));
    let refused = server.client().reply().unwrap();
    assert_eq!((refused.status, refused.error().as_str()), (503, "there are no connections left"));
    open.pop();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.get("/v2").status, 200);
}

#[test]
fn a_token_is_needed_where_one_is_set() {
    let server = Running::start(Options { token: Some("secret".into()), ..Options::default() });
    let get = |path: &str, value: &str| server.client().request("GET", path, &[("Authorization", value)], b"").status;
    assert_eq!(server.get("/v2/health/live").status, 200);
    assert_eq!(server.get("/v2").status, 401);
    assert_eq!([get("/v2", "Bearer secret"), get("/v2", "Bearer secreT"), get("/v2", "Basic secret")], [200, 401, 401]);
    assert_eq!(get("/metrics", "Bearer secret"), 200);
}

#[test]
fn a_stopping_server_finishes_what_it_began() {
    let server = Running::start(Options::default());
    server.knobs.slow.store(300, Ordering::Relaxed);
    let mut client = server.client();
    let body = infer_body(1, 1, 1.0);
    client.send(format!("POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
    std::thread::sleep(Duration::from_millis(100));
    server.stop();
    assert_eq!(client.reply().unwrap().status, 200);
    let started = Instant::now();
    server.join().unwrap();
    assert!(started.elapsed() < Duration::from_secs(3));
}

fn train_body(loss: &str, steps: u64) -> String {
    let infer: serde_json::Value = serde_json::from_str(&infer_body(1, 1, 1.0)).unwrap();
    json!({
        "inputs": infer["inputs"],
        "targets": { "name": "t", "datatype": "FP32", "shape": [1, 1], "data": [1] },
        "loss": loss, "optimizer": "adamw", "lr": 0.1, "steps": steps,
    })
    .to_string()
}

#[test]
fn training_goes_through_the_engine() {
    let server = Running::start(Options { max_train_steps: 10, ..Options::default() });
    let reply = server.post("/v2/models/fake/train", &train_body("mse", 3));
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json(), json!({ "losses": [1.0, 0.5, 1.0 / 3.0], "weight_version": 1, "published": true }));
    assert_eq!(server.post(INFER, &infer_body(1, 1, 1.0)).header("weight-version"), Some("1"));
    assert_eq!(server.metric("meganeura_training_steps_total"), 3.0);
    assert_eq!(server.post("/v2/models/fake/checkpoint", "").json()["checkpoint"], "version-1");
    assert_eq!(server.post("/v2/models/fake/rollback", "").json()["weight_version"], 2);
    assert_eq!(server.metric("meganeura_weight_version"), 2.0);
    assert_eq!(server.post("/v2/models/fake/train", &train_body("other", 1)).status, 400);
    assert_eq!(server.post("/v2/models/fake/train", &train_body("mse", 11)).status, 400);
    assert_eq!(server.get("/v2/models/fake/curves").json()["loss"].as_array().unwrap().len(), 3);
}

#[test]
fn between_two_batches_that_wait_there_is_one_piece_of_training() {
    const REQUESTS: usize = 20;
    let server = Running::start(Options { max_train_steps: 100, max_batch: 1, ..Options::default() });
    server.knobs.held.store(true, Ordering::Release);
    let until = |reached: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !reached() {
            assert!(started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| server.post("/v2/models/fake/train", &train_body("mse", 100)));
        until(&|| !server.knobs.work.lock().unwrap().is_empty());
        for _ in 0..REQUESTS {
            scope.spawn(|| assert_eq!(server.post(INFER, &infer_body(1, 1, 1.0)).status, 200));
        }
        until(&|| server.metric("meganeura_queue_requests") as usize == REQUESTS);
        server.knobs.held.store(false, Ordering::Release);
    });
    let work = server.knobs.work.lock().unwrap().clone();
    // The first piece was on its way before there were requests.
    let expected = [Work::Piece, Work::Batch].repeat(REQUESTS);
    assert_eq!(work.get(1..=expected.len()), Some(&expected[..]));
}

#[test]
fn what_is_wrong_with_a_training_request_is_told_with_its_field() {
    let server = Running::start(Options { max_train_steps: 10, ..Options::default() });
    let changed = |place: &str, value: serde_json::Value| {
        let mut request: serde_json::Value = serde_json::from_str(&train_body("mse", 1)).unwrap();
        match request.pointer_mut(place) {
            Some(field) => *field = value,
            None => request[place.trim_start_matches('/')] = value,
        }
        request.to_string()
    };
    for (place, value, told) in [
        ("/inputs", json!([]), "inputs: \"x\" is missing"),
        ("/inputs/1/name", json!("x"), "inputs: \"x\" is given twice"),
        ("/inputs/1/name", json!("z"), "inputs: model \"fake\" has no input \"z\""),
        ("/inputs/0/shape/1", json!("1"), "inputs[0].shape[1]: "),
        ("/inputs/0/data", json!([1, 2]), "data of input \"x\": there are more elements"),
        ("/inputs/0/datatype", json!("FP99"), "input \"x\": datatype \"FP99\""),
        ("/targets", json!(3), "targets: invalid type"),
        ("/targets/shape", json!([-1]), "targets.shape[0]: "),
        ("/targets/shape", json!([2]), "targets of shape [2] has 2 elements, its data 1"),
        ("/targets/datatype", json!("BYTES"), "targets: datatype BYTES"),
        ("/targets/data", json!(["1"]), "data of targets: "),
        ("/loss", json!(7), "loss: invalid type"),
        ("/lr", json!("fast"), "lr: invalid type"),
        ("/lr", json!(-1), "lr must be"),
        ("/steps", json!(-1), "steps: invalid value"),
        ("/steps", json!(0), "steps is 0"),
        ("/optimizer", json!({}), "optimizer: invalid type"),
        ("/output", json!(1), "output: invalid type"),
        ("/rate", json!(1), "unknown field `rate`"),
    ] {
        let reply = server.post("/v2/models/fake/train", &changed(place, value));
        assert!(reply.status == 400 && reply.error().contains(told), "{place}: {} {}", reply.status, reply.text());
    }
}

#[test]
fn training_does_not_exist_unless_the_operator_wants_it() {
    let server = Running::start(Options::default());
    assert_eq!(server.post("/v2/models/fake/train", &train_body("mse", 1)).status, 404);
}
