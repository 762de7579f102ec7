//! Requests that break a rule, from a seed: each must get a status of 4xx, or an end of the connection where no request was complete.

use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::client::{Client, Reply};

/// Numbers that look random (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// The server under attack, and a request that it answers.
pub struct Target {
    pub address: SocketAddr,
    pub model: String,
    /// As JSON, for one sample.
    pub valid: Value,
    /// Bytes that a body may have.
    pub max_body: usize,
}

/// What must come of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// A status of 4xx, with JSON that says why.
    Refusal,
    /// A status of 4xx or 5xx other than 500, or an end: what is sent is no HTTP.
    NoHttp,
    /// Nothing that can be seen: the connection is cut.
    Anything,
}

/// Changes a valid request.
type Change = fn(&mut Random, &mut Value);
/// Sends something of its own.
type Attack = fn(&mut Random, &Target, &mut Client) -> Option<Reply>;

fn first(request: &mut Value) -> &mut Map<String, Value> {
    request["inputs"][0].as_object_mut().expect("an input")
}

fn set(request: &mut Value, field: &str, value: Value) {
    first(request).insert(field.into(), value);
}

fn rank(request: &Value) -> usize {
    request["inputs"][0]["shape"].as_array().map_or(0, Vec::len)
}

/// Replaces a size of the first input.
fn size(random: &mut Random, request: &mut Value, value: Value) {
    let axis = random.below(rank(request));
    request["inputs"][0]["shape"][axis] = value;
}

fn element(random: &mut Random, request: &mut Value, value: Value) {
    let data = request["inputs"][0]["data"].as_array_mut().expect("elements");
    let at = random.below(data.len());
    data[at] = value;
}

const CHANGES: &[(&str, Change)] = &[
    ("negative size", |r, q| size(r, q, json!(-1))),
    ("very negative size", |r, q| size(r, q, json!(i64::MIN))),
    ("size as a string", |r, q| size(r, q, json!("3"))),
    ("size with a fraction", |r, q| size(r, q, json!(1.5))),
    ("size null", |r, q| size(r, q, Value::Null)),
    ("size as an array", |r, q| size(r, q, json!([1]))),
    ("huge size", |r, q| size(r, q, json!(u64::MAX))),
    ("size beyond all numbers", |r, q| size(r, q, json!(1e300))),
    ("sizes whose product overflows", |_, q| set(q, "shape", json!([1u64 << 33, 1u64 << 33]))),
    ("no samples", |_, q| {
        let mut shape = q["inputs"][0]["shape"].clone();
        shape[0] = json!(0);
        set(q, "shape", shape);
        set(q, "data", json!([]));
    }),
    ("another axis", |_, q| q["inputs"][0]["shape"].as_array_mut().expect("a shape").push(json!(1))),
    ("scalar", |_, q| set(q, "shape", json!([]))),
    ("many axes", |r, q| set(q, "shape", json!(vec![1; 9 + r.below(500)]))),
    ("no shape", |_, q| drop(first(q).remove("shape"))),
    ("shape as an object", |_, q| set(q, "shape", json!({ "0": 1 }))),
    ("no data", |_, q| drop(first(q).remove("data"))),
    ("too few elements", |_, q| drop(q["inputs"][0]["data"].as_array_mut().expect("elements").pop())),
    ("too many elements", |r, q| {
        let data = q["inputs"][0]["data"].as_array_mut().expect("elements");
        data.extend(vec![json!(0); 1 + r.below(1000)]);
    }),
    ("element as a string", |r, q| element(r, q, json!("1.0"))),
    ("element null", |r, q| element(r, q, Value::Null)),
    ("element as an object", |r, q| element(r, q, json!({}))),
    ("element true", |r, q| element(r, q, json!(true))),
    ("element out of range", |r, q| element(r, q, json!(1e300))),
    ("data as an object", |_, q| set(q, "data", json!({ "a": 1 }))),
    ("data as a string", |_, q| set(q, "data", json!("AAAA"))),
    ("unknown datatype", |r, q| {
        let name = r.pick(&["FP31", "fp32", "", "FLOAT", "\u{1f600}"]);
        set(q, "datatype", json!(name));
    }),
    ("datatype BYTES", |_, q| set(q, "datatype", json!("BYTES"))),
    ("another datatype", |_, q| set(q, "datatype", json!("FP64"))),
    ("datatype as a number", |r, q| set(q, "datatype", json!(r.below(20)))),
    ("no datatype", |_, q| drop(first(q).remove("datatype"))),
    ("unknown input", |r, q| set(q, "name", json!("x".repeat(1 + r.below(5000))))),
    ("name as a number", |_, q| set(q, "name", json!(1))),
    ("no name", |_, q| drop(first(q).remove("name"))),
    ("input given twice", |_, q| {
        let input = q["inputs"][0].clone();
        q["inputs"].as_array_mut().expect("inputs").push(input);
    }),
    ("an input is missing", |_, q| drop(q["inputs"].as_array_mut().expect("inputs").pop())),
    ("no inputs", |_, q| q["inputs"] = json!([])),
    ("inputs as an object", |_, q| q["inputs"] = json!({})),
    ("inputs null", |_, q| q["inputs"] = Value::Null),
    ("inputs are gone", |_, q| drop(q.as_object_mut().expect("a request").remove("inputs"))),
    ("input as a number", |_, q| q["inputs"][0] = json!(7)),
    ("unknown output", |_, q| q["outputs"] = json!([{ "name": "no such output" }])),
    ("outputs as a string", |_, q| q["outputs"] = json!("y")),
    ("an output twice", |_, q| q["outputs"] = json!([{ "name": "y" }, { "name": "y" }])),
    ("an output very often", |r, q| q["outputs"] = json!(vec![json!({ "name": "y" }); 2_000 + r.below(20_000)])),
    ("inputs without end", |r, q| {
        let input = json!({ "name": "x", "datatype": "FP32", "shape": [0], "data": [] });
        q["inputs"] = json!(vec![input; 2_000 + r.below(2_000)]);
    }),
    ("output without a name", |_, q| q["outputs"] = json!([{}])),
    ("output by classification", |_, q| q["outputs"] = json!([{ "name": "y", "parameters": { "classification": 3 } }])),
    ("binary_data as a string", |_, q| q["outputs"] = json!([{ "name": "y", "parameters": { "binary_data": "yes" } }])),
    ("id as a number", |_, q| q["id"] = json!(1)),
    ("parameters as an array", |_, q| q["parameters"] = json!([1])),
    ("parameters in a parameter", |_, q| q["parameters"] = json!({ "a": { "b": 1 } })),
    ("a list as a parameter", |r, q| q["parameters"] = json!({ "a": vec![0; r.below(100_000)] })),
    ("parameters without end", |r, q| {
        let parameters: Map<String, Value> = (0..2_000 + r.below(20_000)).map(|i| (i.to_string(), json!(i))).collect();
        q["parameters"] = json!(parameters);
    }),
    ("timeout as a string", |_, q| q["parameters"] = json!({ "timeout": "1" })),
    ("binary_data_output as a number", |_, q| q["parameters"] = json!({ "binary_data_output": 1 })),
    ("shared memory", |_, q| set(q, "parameters", json!({ "shared_memory_region": "/etc/passwd" }))),
    ("data and binary data", |_, q| set(q, "parameters", json!({ "binary_data_size": 4 }))),
    ("binary data that is not there", |r, q| {
        first(q).remove("data");
        set(q, "parameters", json!({ "binary_data_size": 1 + r.below(1 << 20) }));
    }),
    ("binary data of negative size", |_, q| {
        first(q).remove("data");
        set(q, "parameters", json!({ "binary_data_size": -4 }));
    }),
    ("binary data of a size that is text", |_, q| {
        first(q).remove("data");
        set(q, "parameters", json!({ "binary_data_size": "4" }));
    }),
];

fn post(client: &mut Client, target: &Target, headers: &[(&str, &str)], body: &[u8]) -> Option<Reply> {
    client.try_request("POST", &format!("/v2/models/{}/infer", target.model), headers, body)
}

fn raw(client: &mut Client, bytes: &[u8]) -> Option<Reply> {
    client.send(bytes);
    client.reply()
}

fn head(target: &Target, headers: &str) -> String {
    format!("POST /v2/models/{}/infer HTTP/1.1\r\nhost: a\r\n{headers}\r\n", target.model)
}

/// A token in the place of an element.
fn token(target: &Target, client: &mut Client, token: &str) -> Option<Reply> {
    let mut request = target.valid.clone();
    request["inputs"][0]["data"][0] = json!("TOKEN");
    post(client, target, &[], request.to_string().replace("\"TOKEN\"", token).as_bytes())
}

/// The valid request with its first input in binary of another length than it should have.
fn binary(target: &Target, client: &mut Client, change: i64) -> Option<Reply> {
    let mut request = target.valid.clone();
    let elements = request["inputs"][0]["data"].as_array().map_or(0, Vec::len) as i64;
    first(&mut request).remove("data");
    set(&mut request, "parameters", json!({ "binary_data_size": elements * 4 }));
    let mut body = request.to_string().into_bytes();
    let length = body.len().to_string();
    body.resize(body.len() + (elements * 4 + change).max(0) as usize, 0);
    post(client, target, &[("Inference-Header-Content-Length", &length)], &body)
}

const ATTACKS: &[(&str, Expect, Attack)] = &[
    ("NaN", Expect::Refusal, |_, t, c| token(t, c, "NaN")),
    ("Infinity", Expect::Refusal, |_, t, c| token(t, c, "-Infinity")),
    ("1e400", Expect::Refusal, |_, t, c| token(t, c, "1e400")),
    ("hexadecimal", Expect::Refusal, |_, t, c| token(t, c, "0x10")),
    ("a number of many digits", Expect::Refusal, |r, t, c| token(t, c, &format!("1{}", "0".repeat(400 + r.below(1000))))),
    ("deep elements", Expect::Refusal, |r, t, c| {
        let depth = 20 + r.below(20_000);
        token(t, c, &format!("{}1{}", "[".repeat(depth), "]".repeat(depth)))
    }),
    ("deep parameters", Expect::Refusal, |r, t, c| {
        let depth = 200 + r.below(20_000);
        let body = format!("{{\"parameters\":{}1{},\"inputs\":[]}}", "{\"a\":".repeat(depth), "}".repeat(depth));
        post(c, t, &[], body.as_bytes())
    }),
    ("random bytes", Expect::Refusal, |r, t, c| {
        let length = 1 + r.below(5000);
        post(c, t, &[], &r.bytes(length))
    }),
    ("empty body", Expect::Refusal, |_, t, c| post(c, t, &[], b"")),
    ("another JSON", Expect::Refusal, |r, t, c| post(c, t, &[], r.pick(&["1", "[]", "\"x\"", "null", "{}"]).as_bytes())),
    ("truncated JSON", Expect::Refusal, |r, t, c| {
        let text = t.valid.to_string();
        post(c, t, &[], &text.as_bytes()[..r.below(text.len())])
    }),
    ("changed bytes", Expect::Refusal, |r, t, c| {
        let mut body = t.valid.to_string().into_bytes();
        body[0] = b'[';
        let at = r.below(body.len());
        body[at] = 0xff;
        post(c, t, &[], &body)
    }),
    ("JSON and more", Expect::Refusal, |_, t, c| post(c, t, &[], format!("{} x", t.valid).as_bytes())),
    ("truncated binary part", Expect::Refusal, |_, t, c| binary(t, c, -1)),
    ("binary part without end", Expect::Refusal, |r, t, c| binary(t, c, 1 + r.below(100) as i64)),
    ("JSON part longer than the body", Expect::Refusal, |_, t, c| {
        post(c, t, &[("Inference-Header-Content-Length", "99999999")], t.valid.to_string().as_bytes())
    }),
    ("length of the JSON part is no number", Expect::Refusal, |r, t, c| {
        let length = r.pick(&["-1", "x", "", "1e3", "18446744073709551616"]);
        post(c, t, &[("Inference-Header-Content-Length", length)], t.valid.to_string().as_bytes())
    }),
    ("JSON part cut in two", Expect::Refusal, |_, t, c| {
        post(c, t, &[("Inference-Header-Content-Length", "10")], t.valid.to_string().as_bytes())
    }),
    ("a body that is announced as too large", Expect::Refusal, |_, t, c| {
        let length = (t.max_body as u64 * 2).to_string();
        raw(c, head(t, &format!("content-length: {length}\r\n")).as_bytes())
    }),
    ("a length beyond all numbers", Expect::NoHttp, |_, t, c| {
        raw(c, head(t, "content-length: 99999999999999999999999\r\n").as_bytes())
    }),
    ("a negative length", Expect::NoHttp, |_, t, c| raw(c, head(t, "content-length: -5\r\n").as_bytes())),
    ("two lengths", Expect::NoHttp, |_, t, c| raw(c, head(t, "content-length: 5\r\ncontent-length: 6\r\n").as_bytes())),
    ("chunks without size", Expect::Refusal, |_, t, c| {
        raw(c, format!("{}zz\r\nhello\r\n", head(t, "transfer-encoding: chunked\r\n")).as_bytes())
    }),
    ("a transfer coding that nobody knows", Expect::NoHttp, |_, t, c| raw(c, head(t, "transfer-encoding: zip\r\n").as_bytes())),
    ("packed garbage", Expect::Refusal, |r, t, c| {
        let (coding, bytes) = (r.pick(&["gzip", "deflate"]), r.bytes(200));
        post(c, t, &[("Content-Encoding", coding)], &bytes)
    }),
    ("an unknown coding", Expect::Refusal, |_, t, c| post(c, t, &[("Content-Encoding", "br")], b"xx")),
    ("an unknown model", Expect::Refusal, |r, _, c| {
        let name = r.pick(&["nobody", "%00", "..%2f..%2fetc%2fpasswd", "%ff", "a b"].map(|n| n.replace(' ', "%20")));
        c.try_request("POST", &format!("/v2/models/{name}/infer"), &[], b"{}")
    }),
    ("an unknown version", Expect::Refusal, |_, t, c| {
        c.try_request("POST", &format!("/v2/models/{}/versions/7/infer", t.model), &[], b"{}")
    }),
    ("a page of another site", Expect::Refusal, |r, t, c| {
        let site = r.pick(&["cross-site", "same-site"]);
        post(c, t, &[("Sec-Fetch-Site", site)], t.valid.to_string().as_bytes())
    }),
    ("another method", Expect::Refusal, |r, t, c| {
        let method = r.pick(&["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"]);
        c.try_request(method, &format!("/v2/models/{}/infer", t.model), &[], b"")
    }),
    ("an unknown path", Expect::Refusal, |r, _, c| {
        let path = r.pick(&["/v3", "/v2/models", "/../../etc/passwd", "//", "/v2/models//infer"]);
        c.try_request("GET", path, &[], b"")
    }),
    ("a long path", Expect::NoHttp, |r, _, c| {
        c.try_request("GET", &format!("/{}", "a".repeat(3000 + r.below(90_000))), &[], b"")
    }),
    ("many headers", Expect::NoHttp, |r, t, c| {
        let headers: String = (0..200 + r.below(500)).map(|i| format!("x-{i}: 1\r\n")).collect();
        raw(c, head(t, &headers).as_bytes())
    }),
    ("a large header", Expect::NoHttp, |r, t, c| {
        raw(c, head(t, &format!("x: {}\r\n", "a".repeat(100_000 + r.below(100_000)))).as_bytes())
    }),
    ("a line that is no request", Expect::NoHttp, |r, _, c| {
        let mut bytes = r.bytes(100);
        bytes.iter_mut().for_each(|b| *b = *b % 90 + 33);
        bytes.extend(b"\r\n\r\n");
        raw(c, &bytes)
    }),
    ("another version of HTTP", Expect::NoHttp, |_, _, c| raw(c, b"GET /v2 HTTP/9.9\r\nhost: a\r\n\r\n")),
    ("HTTP/2 that is none", Expect::Anything, |r, _, c| {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(r.bytes(200));
        c.send(&bytes);
        let _ = c.0.shutdown(Shutdown::Write);
        None
    }),
    ("gRPC over HTTP/1 that is none", Expect::Anything, |r, _, c| {
        let body = r.bytes(50);
        c.try_request("POST", "/inference.GRPCInferenceService/ModelInfer", &[("content-type", "application/grpc")], &body)
    }),
    ("a call without gRPC", Expect::Refusal, |_, _, c| {
        c.try_request("POST", "/inference.GRPCInferenceService/ModelInfer", &[], b"{}")
    }),
    ("a body that comes too slowly", Expect::Refusal, |_, t, c| {
        c.send(head(t, "content-length: 50\r\n").as_bytes());
        c.send(b"{");
        c.reply()
    }),
    ("a body that ends early", Expect::NoHttp, |_, t, c| {
        c.send(head(t, "content-length: 5000\r\n").as_bytes());
        c.send(b"{\"inputs\":");
        let _ = c.0.shutdown(Shutdown::Write);
        c.reply()
    }),
    ("a connection that goes away", Expect::Anything, |r, t, c| {
        let text = format!("{}{}", head(t, "content-length: 100\r\n"), "x".repeat(100));
        c.send(&text.as_bytes()[..r.below(text.len())]);
        None
    }),
    ("an answer that nobody reads", Expect::Anything, |_, t, c| {
        let body = t.valid.to_string();
        c.send(format!("{}{body}", head(t, &format!("content-length: {}\r\n", body.len()))).as_bytes());
        None
    }),
];

/// How many kinds of requests there are.
pub fn kinds() -> usize {
    CHANGES.len() + ATTACKS.len()
}

/// Sends one request of a kind.
///
/// # Errors
/// What came instead of what must come.
pub fn attack(kind: usize, seed: u64, target: &Target) -> Result<(), String> {
    let random = &mut Random(seed);
    let mut client = Client::connect(target.address);
    let (name, expect, reply) = match CHANGES.get(kind) {
        Some((name, change)) => {
            let mut request = target.valid.clone();
            change(random, &mut request);
            (name, Expect::Refusal, post(&mut client, target, &[], request.to_string().as_bytes()))
        }
        None => {
            let (name, expect, attack) = &ATTACKS[kind - CHANGES.len()];
            (name, *expect, attack(random, target, &mut client))
        }
    };
    let told = |reply: &Reply| (400..500).contains(&reply.status);
    let explained = |reply: &Reply| {
        let json: Option<Value> = serde_json::from_slice(&reply.body).ok();
        json.is_some_and(|json| json["error"].is_string())
    };
    let right = match (expect, &reply) {
        (Expect::Anything, _) | (Expect::NoHttp, None) => true,
        (Expect::Refusal, Some(reply)) => told(reply) && explained(reply),
        (Expect::NoHttp, Some(reply)) => told(reply) || reply.status == 505 || reply.status == 501,
        (Expect::Refusal, None) => false,
    };
    match right {
        true => Ok(()),
        false => Err(format!("{name} (seed {seed}): {reply:?}")),
    }
}

/// Whether the server is well: it says so, and answers the valid request.
pub fn check_health(target: &Target) -> Result<(), String> {
    let mut client = Client::connect(target.address);
    client.0.set_read_timeout(Some(Duration::from_secs(60))).map_err(|e| e.to_string())?;
    let ready = client.try_request("GET", "/v2/health/ready", &[], b"");
    let reply = post(&mut client, target, &[], target.valid.to_string().as_bytes());
    match (ready.map(|reply| reply.status), reply) {
        (Some(200), Some(reply)) if reply.status == 200 => Ok(()),
        (ready, reply) => Err(format!("the server is not well: {ready:?}, {reply:?}")),
    }
}
