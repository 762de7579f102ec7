//! Counters, in the text format of Prometheus.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Upper bounds of the latency histogram, in seconds.
const LATENCIES: [f64; 14] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0];
/// Upper bounds of the histogram of samples per execution.
const SAMPLES: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
/// Points of the curves that the page shows.
const CURVE: usize = 256;

struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds.
    counts: Vec<AtomicU64>,
    /// In millionths.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Histogram { bounds, counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    fn observe(&self, value: f64) {
        let index = self.bounds.partition_point(|&bound| bound < value);
        if let Some(count) = self.counts.get(index) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum.fetch_add((value * 1e6) as u64, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    fn write(&self, text: &mut String, name: &str, labels: &str) {
        let mut below = 0;
        let bounds = self.bounds.iter().map(f64::to_string).chain(["+Inf".to_string()]);
        for (bound, count) in bounds.zip(&self.counts) {
            below += count.load(Ordering::Relaxed);
            let _ = writeln!(text, "{name}_bucket{{{labels}{}le=\"{bound}\"}} {below}", if labels.is_empty() { "" } else { "," });
        }
        let sum = self.sum.load(Ordering::Relaxed) as f64 / 1e6;
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(text, "{name}_sum{labels} {sum}\n{name}_count{labels} {below}");
    }
}

/// What a metric is of one model.
type OfModel<T> = fn(&ModelMetrics) -> T;
type HistogramOf = fn(&ModelMetrics) -> &Histogram;

/// What is counted for one model.
struct ModelMetrics {
    name: String,
    /// Requests for an inference that were answered, and refused.
    successes: AtomicU64,
    failures: AtomicU64,
    success_ns: AtomicU64,
    failure_ns: AtomicU64,
    queue_ns: AtomicU64,
    latency: Histogram,
    samples: Histogram,
    execution_ns: AtomicU64,
    training_ns: AtomicU64,
    training_steps: AtomicU64,
    weight_version: AtomicU64,
    device_bytes: AtomicU64,
    curves: Mutex<Curves>,
}

/// The latest points, for the page.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(crate) struct Curves {
    /// Milliseconds of the latest answers.
    pub latency: VecDeque<f64>,
    /// Losses of the latest training steps.
    pub loss: VecDeque<f64>,
}

fn push(curve: &mut VecDeque<f64>, value: f64) {
    if curve.len() >= CURVE {
        curve.pop_front();
    }
    curve.push_back(value);
}

/// Totals of a model, as `ModelStatistics` tells them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub successes: u64,
    pub failures: u64,
    pub success_ns: u64,
    pub failure_ns: u64,
    pub queue_ns: u64,
    pub samples: u64,
    pub executions: u64,
    pub execution_ns: u64,
}

/// Everything that is counted.
pub(crate) struct Metrics {
    started: Instant,
    models: OnceLock<Vec<ModelMetrics>>,
    /// By protocol and code.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    connections: AtomicU64,
    connections_refused: AtomicU64,
}

impl Metrics {
    pub fn new() -> Self {
        Metrics {
            started: Instant::now(),
            models: OnceLock::new(),
            requests: Mutex::default(),
            connections: AtomicU64::new(0),
            connections_refused: AtomicU64::new(0),
        }
    }

    /// Names the models. Counts before are of none.
    pub fn name_models<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let _ = self.models.set(names.map(model_metrics).collect());
    }

    fn model(&self, model: usize) -> Option<&ModelMetrics> {
        self.models.get()?.get(model)
    }

    /// A request ended with an HTTP status, or a gRPC code.
    pub fn request(&self, protocol: &'static str, code: u16) {
        *lock(&self.requests).entry((protocol, code)).or_default() += 1;
    }

    pub fn connection(&self, change: i64) {
        self.connections.fetch_add(change as u64, Ordering::Relaxed);
    }

    pub fn connection_refused(&self) {
        self.connections_refused.fetch_add(1, Ordering::Relaxed);
    }

    /// A request for an inference ended.
    pub fn inference(&self, model: usize, succeeded: bool, latency: Duration, queue: Duration) {
        let Some(model) = self.model(model) else { return };
        let ns = latency.as_nanos() as u64;
        if succeeded {
            model.successes.fetch_add(1, Ordering::Relaxed);
            model.success_ns.fetch_add(ns, Ordering::Relaxed);
            model.queue_ns.fetch_add(queue.as_nanos() as u64, Ordering::Relaxed);
            model.latency.observe(latency.as_secs_f64());
            push(&mut lock(&model.curves).latency, latency.as_secs_f64() * 1e3);
        } else {
            model.failures.fetch_add(1, Ordering::Relaxed);
            model.failure_ns.fetch_add(ns, Ordering::Relaxed);
        }
    }

    pub fn execution(&self, model: usize, samples: usize, time: Duration) {
        let Some(model) = self.model(model) else { return };
        model.samples.observe(samples as f64);
        model.execution_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// A piece of training; with a loss where it made a step.
    pub fn training_piece(&self, model: usize, time: Duration, loss: Option<f64>) {
        let Some(model) = self.model(model) else { return };
        model.training_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        if let Some(loss) = loss {
            model.training_steps.fetch_add(1, Ordering::Relaxed);
            push(&mut lock(&model.curves).loss, loss);
        }
    }

    pub fn model_state(&self, model: usize, weight_version: u64, device_bytes: u64) {
        let Some(model) = self.model(model) else { return };
        model.weight_version.store(weight_version, Ordering::Relaxed);
        model.device_bytes.store(device_bytes, Ordering::Relaxed);
    }

    pub fn weight_version(&self, model: usize) -> u64 {
        self.model(model).map_or(0, |model| model.weight_version.load(Ordering::Relaxed))
    }

    pub fn curves(&self, model: usize) -> Curves {
        self.model(model).map(|model| lock(&model.curves).clone()).unwrap_or_default()
    }

    pub fn totals(&self, model: usize) -> Totals {
        let Some(model) = self.model(model) else { return Totals::default() };
        Totals {
            successes: load(&model.successes),
            failures: load(&model.failures),
            success_ns: load(&model.success_ns),
            failure_ns: load(&model.failure_ns),
            queue_ns: load(&model.queue_ns),
            samples: load(&model.samples.sum) / 1_000_000,
            executions: model.samples.count(),
            execution_ns: load(&model.execution_ns),
        }
    }

    /// Everything as text. `queued` requests wait.
    pub fn text(&self, queued: usize) -> String {
        let mut text = String::new();
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        head(&mut text, "meganeura_requests_total", "counter", "Requests by protocol and by HTTP status or gRPC code.");
        for ((protocol, code), count) in lock(&self.requests).iter() {
            let _ = writeln!(text, "meganeura_requests_total{{protocol=\"{protocol}\",code=\"{code}\"}} {count}");
        }
        let single: [(&str, &str, &str, f64); 5] = [
            ("meganeura_queue_requests", "gauge", "Requests that wait for the engine.", queued as f64),
            ("meganeura_connections", "gauge", "Open connections.", load(&self.connections) as i64 as f64),
            (
                "meganeura_connections_refused_total",
                "counter",
                "Connections beyond the limit.",
                load(&self.connections_refused) as f64,
            ),
            ("meganeura_uptime_seconds", "gauge", "Since the start.", self.started.elapsed().as_secs_f64()),
            ("meganeura_resident_bytes", "gauge", "Resident memory of the process.", resident_bytes() as f64),
        ];
        for (name, kind, help, value) in single {
            head(&mut text, name, kind, help);
            let _ = writeln!(text, "{name} {value}");
        }
        let models = self.models.get().map(Vec::as_slice).unwrap_or_default();
        let label = |model: &ModelMetrics| format!("model=\"{}\"", escape(&model.name));
        let of_each: [(&str, &str, &str, OfModel<f64>); 7] = [
            ("meganeura_executions_total", "counter", "Executions on the device.", |m| m.samples.count() as f64),
            ("meganeura_device_seconds_total", "counter", "Time in executions.", |m| seconds(&m.execution_ns)),
            ("meganeura_training_seconds_total", "counter", "Time in training.", |m| seconds(&m.training_ns)),
            ("meganeura_training_steps_total", "counter", "Training steps.", |m| load(&m.training_steps) as f64),
            ("meganeura_weight_version", "gauge", "The version of the weights that is served.", |m| {
                load(&m.weight_version) as f64
            }),
            ("meganeura_device_bytes", "gauge", "Device memory of a model.", |m| load(&m.device_bytes) as f64),
            ("meganeura_inference_failures_total", "counter", "Requests for an inference without answer.", |m| {
                load(&m.failures) as f64
            }),
        ];
        for (name, kind, help, value) in of_each {
            head(&mut text, name, kind, help);
            for model in models {
                let _ = writeln!(text, "{name}{{{}}} {}", label(model), value(model));
            }
        }
        let histograms: [(&str, &str, HistogramOf); 2] = [
            ("meganeura_latency_seconds", "From a complete request to its answer.", |m| &m.latency),
            ("meganeura_batch_samples", "Samples per execution, without padding.", |m| &m.samples),
        ];
        for (name, help, histogram) in histograms {
            head(&mut text, name, "histogram", help);
            for model in models {
                histogram(model).write(&mut text, name, &label(model));
            }
        }
        text
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn seconds(counter: &AtomicU64) -> f64 {
    load(counter) as f64 / 1e9
}

fn model_metrics(name: &str) -> ModelMetrics {
    let zero = || AtomicU64::new(0);
    ModelMetrics {
        name: name.to_string(),
        successes: zero(),
        failures: zero(),
        success_ns: zero(),
        failure_ns: zero(),
        queue_ns: zero(),
        latency: Histogram::new(&LATENCIES),
        samples: Histogram::new(&SAMPLES),
        execution_ns: zero(),
        training_ns: zero(),
        training_steps: zero(),
        weight_version: zero(),
        device_bytes: zero(),
        curves: Mutex::default(),
    }
}

/// A poisoned lock is taken over: counters are whole at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Resident memory, where the system tells it; else 0.
fn resident_bytes() -> u64 {
    const PAGE: u64 = 4096;
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).map_or(0, |pages| pages * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_holds_cumulative_histograms_and_escaped_names() {
        let metrics = Metrics::new();
        metrics.name_models(["a\"b"].into_iter());
        metrics.execution(0, 3, Duration::from_millis(2));
        metrics.execution(0, 16, Duration::from_millis(2));
        metrics.request("http", 400);
        let text = metrics.text(7);
        for line in [
            r#"meganeura_batch_samples_bucket{model="a\"b",le="2"} 0"#,
            r#"meganeura_batch_samples_bucket{model="a\"b",le="4"} 1"#,
            r#"meganeura_batch_samples_bucket{model="a\"b",le="+Inf"} 2"#,
            r#"meganeura_batch_samples_sum{model="a\"b"} 19"#,
            r#"meganeura_executions_total{model="a\"b"} 2"#,
            r#"meganeura_device_seconds_total{model="a\"b"} 0.004"#,
            r#"meganeura_requests_total{protocol="http",code="400"} 1"#,
            "meganeura_queue_requests 7",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert_eq!(metrics.totals(0).samples, 19);
    }

    #[test]
    fn curves_keep_the_latest_points() {
        let metrics = Metrics::new();
        metrics.name_models(["m"].into_iter());
        (0..CURVE + 5).for_each(|i| metrics.training_piece(0, Duration::ZERO, Some(i as f64)));
        let loss = metrics.curves(0).loss;
        assert_eq!((loss.len(), loss.front()), (CURVE, Some(&5.0)));
    }
}
