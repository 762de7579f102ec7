//! As much of a client as tests of the server need.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

/// The status and the JSON body of one request; `Null` where there is no JSON.
pub fn post(address: &str, path: &str, body: &Value) -> std::io::Result<(u16, Value)> {
    let mut stream = TcpStream::connect(address)?;
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| std::io::Error::other(format!("no status: {text:?}")))?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok((status, serde_json::from_str(body).unwrap_or(Value::Null)))
}

/// A tensor as the protocol writes it.
pub fn tensor(name: &str, datatype: &str, shape: &[usize], data: impl IntoIterator<Item = f64>) -> Value {
    let integers = datatype.starts_with("INT");
    let data = data.into_iter().map(|v| if integers { json!(v as i64) } else { json!(v) });
    json!({ "name": name, "datatype": datatype, "shape": shape, "data": data.collect::<Vec<_>>() })
}

/// The data of the only output, and the version of the weights.
pub fn answer(body: &Value) -> (Vec<f32>, u64) {
    let data = body["outputs"][0]["data"].as_array().unwrap_or_else(|| panic!("{body}"));
    let version = body["parameters"]["weight_version"].as_u64().unwrap_or_else(|| panic!("{body}"));
    (data.iter().map(|v| v.as_f64().unwrap() as f32).collect(), version)
}
