//! The command `serve` as a process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// A server of its own process.
pub struct Serving {
    child: Child,
    pub address: SocketAddr,
    /// Its messages before it served.
    pub said: Vec<String>,
}

impl Serving {
    /// Serves what the arguments say, at a port that is free.
    pub fn start(arguments: &[&str]) -> Self {
        Self::spawn(&mut Command::new(env!("CARGO_BIN_EXE_meganeura")), arguments)
    }

    /// As [`Serving::start`], with so many kilobytes of addresses. The C library sets none aside for threads, so that peaks can be compared.
    #[cfg(target_os = "linux")]
    pub fn start_within(kilobytes: Option<u64>, arguments: &[&str]) -> Self {
        let limit = kilobytes.map_or("unlimited".into(), |kilobytes| kilobytes.to_string());
        let limited = format!("ulimit -v {limit} && MALLOC_ARENA_MAX=1 exec \"$0\" \"$@\"");
        Self::spawn(Command::new("sh").args(["-c", &limited, env!("CARGO_BIN_EXE_meganeura")]), arguments)
    }

    fn spawn(command: &mut Command, arguments: &[&str]) -> Self {
        let command = command.args(["serve", "--listen", "127.0.0.1:0"]).args(arguments);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = Vec::new();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let address = line.strip_prefix("serving at http://").and_then(|address| address.parse().ok());
            seen.push(line);
            address
        });
        // Whatever comes later is read, so that the server does not wait for it.
        std::thread::spawn(move || lines.for_each(drop));
        let address = address.unwrap_or_else(|| panic!("it does not serve:\n{}", seen.join("\n")));
        Serving { child, address, said: seen }
    }

    /// The most kilobytes of addresses that it had.
    #[cfg(target_os = "linux")]
    pub fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap();
        peak.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// The status and the JSON of a request; `Null` where there is none.
    pub fn request(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
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

    /// What a request is answered with that must succeed.
    pub fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.request("POST", path, body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Asks it to stop, as a service manager does; whether it ended well.
    #[cfg(unix)]
    pub fn terminate(mut self) -> bool {
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
