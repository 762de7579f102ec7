//! Clients that ask for much in few bytes, do not read, or come all at once; and a bug of our own.

mod common;

use std::io::Read;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{INFER, Running, infer_body};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use meganeura_serve::{EngineFailed, Options};
use serde_json::{Value, json};

/// What a gRPC call ends with: its code, and its message.
fn call(server: &Running, method: &str, message: &[u8]) -> (String, String) {
    let exchange = async {
        let stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let body = [&[0], &length[..], message].concat();
        let request = hyper::Request::post(format!("http://test/inference.GRPCInferenceService/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let answer = sender.send_request(request.body(Full::new(bytes::Bytes::from(body))).unwrap()).await.unwrap();
        let head = answer.headers().clone();
        let trailers = answer.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
        let found = |name: &str| head.get(name).or(trailers.get(name)).map(|value| value.to_str().unwrap().to_string());
        (found("grpc-status").unwrap(), found("grpc-message").unwrap_or_default())
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(exchange)
}

#[test]
fn calls_of_many_tiny_messages_are_refused() {
    let server = Running::start(Options::default());
    let name = [&[10, 4][..], b"fake"].concat();
    assert_eq!(call(&server, "ModelReady", &name).0, "0");
    // The tags of parameters, inputs, outputs and raw contents, each with a message of no bytes.
    for tag in [0x2a, 0x32, 0x3a, 0x22] {
        let (code, message) = call(&server, "ModelInfer", &[&name[..], &[tag, 0].repeat(1 << 20)].concat());
        assert!(code == "3" && message.contains("1024"), "{tag}: {code} {message}");
    }
    assert_eq!(call(&server, "ModelInfer", &[&name[..], &[0x2a, 5, 1]].concat()).0, "3");
    assert_eq!(call(&server, "ModelInfer", &name).0, "3");
    assert_eq!(call(&server, "ModelReady", &name).0, "0");
}

#[test]
fn an_output_is_answered_once() {
    let server = Running::start(Options::default());
    let mut request: Value = serde_json::from_str(&infer_body(1, 1, 1.0)).unwrap();
    request["outputs"] = json!([{ "name": "y" }, { "name": "off" }, { "name": "y" }]);
    let reply = server.post(INFER, &request.to_string());
    assert_eq!((reply.status, reply.error().as_str()), (400, "output \"y\" is asked for twice"));
}

#[test]
fn a_body_in_tiny_chunks_takes_no_more_memory_than_another() {
    let server = Running::start(Options { max_memory: 64 << 10, ..Options::default() });
    let chunks: String = infer_body(2, 3, 1.0).chars().map(|c| format!("1\r\n{c}\r\n")).collect();
    let mut client = server.client();
    client.send(format!("POST {INFER} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n").as_bytes());
    assert_eq!(client.reply().unwrap().status, 200);
}

#[test]
fn clients_that_do_not_read_cannot_fill_the_memory() {
    const LONG: usize = 8 << 20;
    let mut request: Value = serde_json::from_str(&infer_body(1, 1, 1.0)).unwrap();
    request["parameters"] = json!({ "binary_data_output": true });
    let body = request.to_string();
    let deaf = |header_timeout: Duration| {
        let server = Running::start(Options { max_memory: 3 * LONG, header_timeout, ..Options::default() });
        server.knobs.long.store(LONG, Ordering::Relaxed);
        let mut client = server.client();
        client.send(format!("POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
        let mut bytes = [0; 12];
        client.0.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"HTTP/1.1 200");
        (server, client)
    };
    let answered = |server: &Running| {
        let started = Instant::now();
        loop {
            let reply = server.post(INFER, &body);
            if reply.status != 429 {
                assert_eq!((reply.status, reply.body.len() > 2 * LONG), (200, true));
                return;
            }
            assert!(started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let (server, client) = deaf(Duration::from_secs(60));
    assert_eq!(server.post(INFER, &body).status, 429);
    drop(client);
    answered(&server);
    // A connection that does not move is closed.
    let (server, _client) = deaf(Duration::from_millis(500));
    answered(&server);
}

#[test]
fn requests_sent_at_once_on_one_connection_are_answered_in_order() {
    let server = Running::start(Options::default());
    let mut client = server.client();
    let requests = (1..=50).map(|rows| {
        let body = infer_body(1 + rows % 4, 2, rows as f64);
        format!("POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    });
    client.send(requests.collect::<String>().as_bytes());
    for rows in 1..=50 {
        let reply = client.reply().unwrap();
        assert_eq!((reply.status, &reply.json()["outputs"][0]["data"][0]), (200, &json!(2.0 * f64::from(rows))));
    }
}

#[test]
fn pages_of_other_sites_cannot_post() {
    let server = Running::start(Options { max_train_steps: 1, ..Options::default() });
    let status = |method: &str, path: &str, site: &str| {
        server.client().request(method, path, &[("Sec-Fetch-Site", site)], infer_body(1, 1, 1.0).as_bytes()).status
    };
    for path in [INFER, "/v2/models/fake/rollback"] {
        assert_eq!(
            ["cross-site", "same-site", "same-origin", "none"].map(|site| status("POST", path, site)),
            [403, 403, 200, 200]
        );
    }
    assert_eq!(status("GET", "/", "cross-site"), 200);
}

#[test]
fn checkpoints_are_written_one_at_a_time_for_all_who_wait() {
    let server = Running::start(Options { max_train_steps: 1, ..Options::default() });
    server.knobs.slow.store(50, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| assert_eq!(server.post("/v2/models/fake/checkpoint", "").json()["checkpoint"], "version-0"));
        }
    });
    assert_eq!(server.knobs.most_writers.load(Ordering::Relaxed), 1);
    assert!(server.knobs.checkpoints.load(Ordering::Relaxed) < 24);
    assert_eq!(server.post("/v2/models/fake/checkpoint", "").status, 200);
}

#[test]
fn training_checkpoints_rollbacks_and_inference_come_all_at_once() {
    let server = Running::start(Options { max_train_steps: 10, max_batch: 4, ..Options::default() });
    server.knobs.slow.store(1, Ordering::Relaxed);
    let train = json!({
        "inputs": serde_json::from_str::<Value>(&infer_body(1, 1, 1.0)).unwrap()["inputs"],
        "targets": { "name": "t", "datatype": "FP32", "shape": [1, 1], "data": [1] },
        "loss": "mse", "lr": 0.1, "steps": 10,
    })
    .to_string();
    let (train, body) = (train.as_str(), infer_body(1, 1, 1.0));
    let (server, body) = (&server, body.as_str());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            for (path, body, allowed) in [
                ("/train", train, &[200, 429, 503][..]),
                ("/checkpoint", "", &[200]),
                ("/rollback", "", &[200]),
                ("/infer", body, &[200]),
            ] {
                scope.spawn(move || {
                    for _ in 0..25 {
                        let reply = server.post(&format!("/v2/models/fake{path}"), body);
                        assert!(allowed.contains(&reply.status), "{path}: {} {}", reply.status, reply.text());
                    }
                });
            }
        }
    });
    assert_eq!(server.knobs.most_writers.load(Ordering::Relaxed), 1);
    assert_eq!(server.post("/v2/models/fake/train", train).status, 200);
}

#[test]
fn a_panic_of_the_engine_ends_the_server() {
    let server = Running::start(Options::default());
    server.knobs.panics.store(true, Ordering::Relaxed);
    assert_eq!(server.post(INFER, &infer_body(1, 1, 1.0)).status, 503);
    let started = Instant::now();
    while !server.has_ended() {
        assert!(started.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.join(), Err(EngineFailed));
}
