//! The page that the server has for people, in headless Chromium.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::serving::Serving;
use common::{digits, fixture};
use serde_json::{Value, json};

/// Programs that are Chromium, by their names on various systems.
const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// For whatever a person would wait for.
const PATIENCE: Duration = Duration::from_secs(120);

fn chromium() -> Option<PathBuf> {
    if let Some(program) = std::env::var_os("MEGANEURA_CHROMIUM") {
        return Some(program.into());
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = PROGRAMS.iter().find_map(|name| std::env::split_paths(&paths).map(|p| p.join(name)).find(|p| p.is_file()));
    if found.is_none() {
        eprintln!("skipped: no Chromium; `cargo xtask test` installs one");
    }
    found
}

/// A page in a browser of its own, driven over the DevTools protocol: JSON messages that end in a zero byte.
struct Page {
    browser: Child,
    commands: ChildStdin,
    messages: BufReader<ChildStdout>,
    session: Value,
    sent: u64,
    /// Addresses that were asked for.
    requests: Vec<String>,
    /// What the console shows as an error.
    errors: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Page {
    fn open(chromium: PathBuf, address: &str) -> Self {
        let profile = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(profile.path().join("log")).unwrap();
        // The protocol's two ends are the descriptors 3 and 4. Containers and root have no sandbox, and the page is our own.
        let mut browser = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >&2"#])
            .arg(chromium)
            .args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let (commands, messages) = (browser.stdin.take().unwrap(), BufReader::new(browser.stdout.take().unwrap()));
        let (requests, errors) = (Vec::new(), Vec::new());
        let mut page = Page { browser, commands, messages, session: Value::Null, sent: 0, requests, errors, _profile: profile };
        let target = page.command("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = page.command("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        page.session = attached["sessionId"].clone();
        for domain in ["Network", "Runtime", "Log", "Page"] {
            page.command(&format!("{domain}.enable"), json!({}));
        }
        page.command("Page.navigate", json!({ "url": format!("http://{address}/") }));
        page.until("location.protocol === 'http:' && document.readyState === 'complete'");
        page
    }

    /// Has a command carried out. What happens meanwhile is noted.
    fn command(&mut self, method: &str, parameters: Value) -> Value {
        self.sent += 1;
        let mut message = json!({ "id": self.sent, "method": method, "params": parameters });
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.messages.read_until(0, &mut bytes).unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser ended: {}", self.log());
            let message: Value = serde_json::from_slice(&bytes).unwrap();
            if message["id"] == self.sent {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, event: &Value) {
        let parameters = &event["params"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        match event["method"].as_str() {
            Some("Network.requestWillBeSent") => self.requests.push(text(&parameters["request"]["url"])),
            Some("Runtime.exceptionThrown") => self.errors.push(parameters.to_string()),
            Some("Runtime.consoleAPICalled") if parameters["type"] == "error" => self.errors.push(parameters.to_string()),
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => self.errors.push(parameters.to_string()),
            _ => {}
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self._profile.path().join("log")).unwrap_or_default()
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.command("Runtime.evaluate", parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    fn until(&mut self, expression: &str) {
        let started = Instant::now();
        while self.value(expression) != true {
            if started.elapsed() > PATIENCE {
                let text = self.value("document.body.innerText");
                panic!("not so: {expression}\n{text}\n{:?}", self.errors);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn choose(&mut self, model: &str) {
        self.until(&format!("[...$('models').options].some(o => o.value === '{model}')"));
        // The page shows a model by itself first: what comes of that late would clear the form.
        self.until("$('facts').rows.length > 0");
        self.value(&format!("$('models').value = '{model}', $('models').onchange()"));
        self.until(&format!("model && model.name === '{model}' && $('facts').rows.length > 0"));
    }

    /// Types into a field, which its label names.
    fn fill(&mut self, label: &str, text: &str) {
        self.value(&format!("document.querySelector('[aria-label=\"{label}\"]').value = '{text}'"));
    }

    /// Presses the button, and waits for what comes of it.
    fn run(&mut self) {
        self.value("$('answer').replaceChildren(), document.querySelector('#form > button').click()");
        self.until("$('answer').childElementCount > 0");
    }

    /// The data of an output as the page shows it.
    fn shown(&mut self, output: &str) -> Value {
        self.value(&format!(
            "[...$('answer').querySelectorAll('div')].find(d => d.querySelector('code').textContent === '{output}').querySelector('pre').textContent"
        ))
    }

    fn points(&mut self, curve: &str) -> u64 {
        let count =
            format!("document.querySelector('#{curve} polyline').getAttribute('points').split(' ').filter(p => p).length");
        self.value(&count).as_u64().unwrap()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.browser.kill();
        let _ = self.browser.wait();
    }
}

fn path(name: &str) -> String {
    fixture(name).to_str().unwrap().to_string()
}

#[test]
fn a_person_sees_models_tries_them_and_watches_them_learn() {
    let Some(chromium) = chromium() else { return };
    let server = Serving::start(&[&path("digits-cnn.onnx"), &path("serve/mixed.onnx"), "--train-endpoint"]);
    let mut page = Page::open(chromium, &server.address.to_string());

    page.choose("mixed");
    let card = page.value("$('facts').innerText + $('tensors').innerText");
    for word in ["weight version", "parameters", "device", "over the network", "halved", "FP16", "INT64", "BOOL", "[any, 3]"] {
        assert!(card.as_str().unwrap().contains(word), "{word} is not in {card}");
    }
    for (input, shape, data) in [
        ("x", "2, 3", "1, 2, 3, 4, 5, 6"),
        ("h", "2, 2, 2", "1, 2, 3, 4, 5, 6, 7, 8"),
        ("ids", "2, 2", "[[1, 2], [3, -4]]"),
        ("on", "2", "true, false"),
    ] {
        page.fill(&format!("shape of {input}"), shape);
        page.fill(&format!("data of {input}"), data);
    }
    page.run();
    assert_eq!(page.shown("halved"), "0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4");
    assert_eq!(page.shown("next"), "2, 3, 4, -3");
    assert_eq!(page.shown("off"), "false, true");
    assert_eq!(page.shown("y").as_str().unwrap().split(", ").count(), 2 * 5);
    page.value(
        "[...document.querySelectorAll('#inputs button')].filter(b => b.textContent === 'random').forEach(b => b.click())",
    );
    page.run();
    page.until("document.querySelector('#latency polyline').getAttribute('points').split(' ').length === 2");
    assert!(page.value("Number($('latency-now').textContent)").as_f64().unwrap() > 0.0);
    assert_eq!((page.points("loss"), page.value("$('loss-now').textContent")), (0, json!("none yet")));

    page.choose("digits-cnn");
    page.run();
    assert!(page.value("$('answer').innerText").as_str().unwrap().contains("weights of version 0"));
    let (image, label) = digits(2);
    let train = json!({
        "inputs": [{ "name": "image", "datatype": "FP32", "shape": [2, 1, 8, 8], "data": image.to_f64_vec() }],
        "targets": { "name": "label", "datatype": "INT64", "shape": [2], "data": label.to_i64_vec() },
        "loss": "cross_entropy", "lr": 0.001, "steps": 5,
    });
    server.post("/v2/models/digits-cnn/train", &train);
    page.until("document.querySelector('#loss polyline').getAttribute('points').split(' ').length === 5");
    assert!(page.value("Number($('loss-now').textContent)").as_f64().unwrap() > 0.0);
    page.until("$('facts').innerText.includes('weight version\\t1')");
    page.run();
    assert!(page.value("$('answer').innerText").as_str().unwrap().contains("weights of version 1"));

    let policy = page.value("fetch('/').then(answer => answer.headers.get('content-security-policy'))");
    assert!(policy.as_str().unwrap().starts_with("default-src 'self'"), "{policy}");
    assert_eq!(page.errors, [""; 0]);
    let own = [format!("http://{}/", server.address), "data:".into()];
    let foreign: Vec<&String> = page.requests.iter().filter(|url| !own.iter().any(|own| url.starts_with(own))).collect();
    assert!(page.requests.len() > 5 && foreign.is_empty(), "{foreign:?}");
}

#[test]
fn the_page_asks_for_the_token_and_shows_what_is_refused() {
    let Some(chromium) = chromium() else { return };
    let server = Serving::start(&[&path("serve/mixed.onnx"), "--token", "secret"]);
    let mut page = Page::open(chromium, &server.address.to_string());
    page.until("!$('bearer').hidden && $('problem').textContent.includes('token')");
    page.value("$('token').value = 'secret', $('token').dispatchEvent(new Event('change'))");
    page.choose("mixed");
    page.until("$('problem').textContent === ''");
    page.fill("shape of x", "2, 3");
    page.run();
    let told = page.value("document.querySelector('#answer > .error').textContent");
    assert!(told.as_str().unwrap().contains("input \"x\" of shape [2,3] has 6 elements, its data 3"), "{told}");
    // The browser itself tells of answers that are no success.
    let errors: Vec<&String> =
        page.errors.iter().filter(|error| !error.contains("the server responded with a status of 40")).collect();
    assert!(errors.is_empty(), "{errors:?}");
}
