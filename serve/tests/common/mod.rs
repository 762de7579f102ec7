//! A model without a device, a server around it, and clients.

#![allow(dead_code)]

pub mod client;
pub mod hostile;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use meganeura_serve::{
    Answer, AxisSize, Checkpoint, DType, EngineFailed, ModelCard, Options, Output, Preparation, Progress, Refusal, Rollback,
    SampleAxis, Served, Server, Shape, Stop, Tensor, TensorCard, TensorType, TrainJob, TrainOutcome, Wake,
};

pub use client::{Client, Reply};

/// What the tests see and decide of a [`Fake`].
#[derive(Default)]
pub struct Knobs {
    pub executions: AtomicUsize,
    pub largest: AtomicUsize,
    /// Milliseconds of an execution.
    pub slow: AtomicU64,
    /// Executions that fail from now on.
    pub failures: AtomicUsize,
    /// Whether the next execution panics.
    pub panics: AtomicBool,
    /// While it is set, executions and pieces of training do not end.
    pub held: AtomicBool,
    /// What the engine had run, in order.
    pub work: Mutex<Vec<Work>>,
    /// How many numbers a sample of `y` has, where that is not 0.
    pub long: AtomicUsize,
    pub checkpoints: AtomicUsize,
    /// Checkpoints that are being written, and the most that ever were.
    pub writers: AtomicUsize,
    pub most_writers: AtomicUsize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Batch,
    Piece,
}

impl Knobs {
    fn begin(&self, work: Work) {
        self.work.lock().expect("no test panics here").push(work);
        while self.held.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Doubles `x`, counts `ids` up by one, and inverts `on`; every sample for itself.
pub struct Fake {
    pub knobs: Arc<Knobs>,
    prepared: Vec<Vec<Shape>>,
    version: u64,
    job: Option<(TrainJob, Vec<f64>)>,
    /// Shapes are ready at the second call only.
    lazy: bool,
}

impl Fake {
    pub fn new(knobs: Arc<Knobs>, lazy: bool) -> Self {
        Fake { knobs, prepared: Vec::new(), version: 0, job: None, lazy }
    }
}

fn tensor_card(name: &str, dtype: DType, shape: &[i64]) -> TensorCard {
    let size = |&size: &i64| usize::try_from(size).map_or_else(|_| AxisSize::Any(format!("s{}", -size)), AxisSize::Fixed);
    TensorCard { name: name.into(), dtype, shape: Some(shape.iter().map(size).collect()) }
}

impl Served for Fake {
    fn card(&self) -> ModelCard {
        ModelCard {
            name: "fake".into(),
            inputs: vec![
                tensor_card("x", DType::F32, &[-1, -2]),
                tensor_card("ids", DType::I64, &[-1, 2]),
                tensor_card("on", DType::Bool, &[-1]),
            ],
            outputs: vec![
                tensor_card("y", DType::F16, &[-1, -2]),
                tensor_card("next", DType::I64, &[2, -1]),
                tensor_card("off", DType::Bool, &[-1]),
            ],
            batched: true,
            facts: vec![("kind".into(), "fake".into())],
        }
    }

    fn weight_version(&self) -> u64 {
        self.version
    }

    fn prepare(&mut self, shapes: &[Shape], wake: &Wake) -> Result<Preparation, Refusal> {
        if shapes[0].get(1) == Some(&13) {
            return Err(Refusal::invalid("13 is no size for this model"));
        }
        if !self.lazy || self.prepared.iter().any(|known| known == shapes) {
            return Ok(Preparation::Ready);
        }
        self.prepared.push(shapes.to_vec());
        let wake = wake.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            wake();
        });
        Ok(Preparation::Pending)
    }

    fn run(&mut self, inputs: &[Tensor]) -> Result<Answer, Refusal> {
        self.knobs.begin(Work::Batch);
        let slow = self.knobs.slow.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(slow));
        if self.knobs.failures.load(Ordering::Relaxed) > 0 {
            self.knobs.failures.fetch_sub(1, Ordering::Relaxed);
            return Err(Refusal::unavailable("the device was lost"));
        }
        assert!(!self.knobs.panics.load(Ordering::Relaxed), "a bug");
        let [x, ids, on] = inputs else { return Err(Refusal::internal("three inputs")) };
        let samples = x.shape()[0];
        self.knobs.executions.fetch_add(1, Ordering::Relaxed);
        self.knobs.largest.fetch_max(samples, Ordering::Relaxed);
        let y = match self.knobs.long.load(Ordering::Relaxed) {
            0 => Tensor::from_f64(DType::F32, x.shape().clone(), &x.to_f64_vec().iter().map(|v| v * 2.0).collect::<Vec<_>>()),
            long => Tensor::from_f64(DType::F32, [samples, long], &vec![0.0; samples * long]),
        };
        let ids = ids.to_i64_vec();
        let next: Vec<i64> = (0..2).flat_map(|c| ids.iter().skip(c).step_by(2).map(|v| v + 1).collect::<Vec<_>>()).collect();
        let off: Vec<u8> = on.bytes().iter().map(|b| 1 - b).collect();
        let row = Some(SampleAxis { axis: 0, span: 1 });
        let output = |name: &str, tensor, samples| Output { name: name.into(), tensor, samples };
        Ok(Answer {
            outputs: vec![
                output("y", y, row),
                output("next", Tensor::from_i64(DType::I64, [2, samples], &next), Some(SampleAxis { axis: 1, span: 1 })),
                output("off", Tensor::from_bytes(TensorType::new(DType::Bool, [samples]), off).unwrap(), row),
            ],
            weight_version: self.version,
        })
    }

    fn begin_training(&mut self, job: TrainJob) -> Result<(), Refusal> {
        if job.loss != "mse" {
            return Err(Refusal::invalid(format!("there is no loss {:?}", job.loss)));
        }
        self.job = Some((job, Vec::new()));
        Ok(())
    }

    fn may_train(&self, _: bool) -> bool {
        true
    }

    fn train(&mut self, _: &Wake) -> Result<Progress, Refusal> {
        self.knobs.begin(Work::Piece);
        let Some((job, losses)) = &mut self.job else { return Err(Refusal::internal("no job")) };
        losses.push(1.0 / (losses.len() + 1) as f64);
        let loss = losses.last().copied();
        if (losses.len() as u64) < job.steps {
            return Ok(Progress::Continues { loss });
        }
        let losses = std::mem::take(losses);
        self.version += 1;
        self.job = None;
        let (weight_version, published, reason, evaluation) = (self.version, true, None, None);
        Ok(Progress::Done(TrainOutcome { losses, weight_version, published, reason, evaluation }))
    }

    fn checkpoint(&mut self) -> Result<Box<dyn FnOnce() -> Result<Checkpoint, Refusal> + Send>, Refusal> {
        let (weight_version, knobs) = (self.version, self.knobs.clone());
        Ok(Box::new(move || {
            let writers = knobs.writers.fetch_add(1, Ordering::AcqRel) + 1;
            knobs.most_writers.fetch_max(writers, Ordering::AcqRel);
            std::thread::sleep(Duration::from_millis(knobs.slow.load(Ordering::Relaxed)));
            knobs.writers.fetch_sub(1, Ordering::AcqRel);
            knobs.checkpoints.fetch_add(1, Ordering::AcqRel);
            Ok(Checkpoint { checkpoint: format!("version-{weight_version}"), weight_version })
        }))
    }

    fn roll_back(&mut self) -> Result<Rollback, Refusal> {
        self.version += 1;
        let interrupted = self.job.take().is_some();
        Ok(Rollback { weight_version: self.version, restored_version: Some(0), interrupted })
    }
}

/// A server in this process.
pub struct Running {
    pub address: SocketAddr,
    pub knobs: Arc<Knobs>,
    stop: Stop,
    thread: Option<JoinHandle<Result<(), EngineFailed>>>,
}

impl Running {
    pub fn start(options: Options) -> Self {
        Self::start_lazy(options, false)
    }

    pub fn start_lazy(options: Options, lazy: bool) -> Self {
        let knobs = Arc::new(Knobs::default());
        let options = Options { listen: SocketAddr::from(([127, 0, 0, 1], 0)), ..options };
        let fake = knobs.clone();
        let load = move || Ok::<_, String>(vec![Box::new(Fake::new(fake, lazy)) as Box<dyn Served>]);
        let server = Server::start(options, Box::new(load)).expect("the server starts");
        let (address, stop) = (server.addresses()[0], server.stopper());
        Running { address, knobs, stop, thread: Some(std::thread::spawn(|| server.run())) }
    }

    /// Begins to stop.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Stops, and says how that ended.
    pub fn join(mut self) -> Result<(), EngineFailed> {
        self.stop.stop();
        self.thread.take().expect("not joined yet").join().expect("the server ends")
    }

    /// Whether it ended by itself.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub fn client(&self) -> Client {
        Client::connect(self.address)
    }

    pub fn get(&self, path: &str) -> Reply {
        self.client().request("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &str) -> Reply {
        self.client().request("POST", path, &[], body.as_bytes())
    }

    /// The value of a line of the metrics.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub const INFER: &str = "/v2/models/fake/infer";

/// A request of `rows` samples, of `width` numbers `x` each.
pub fn infer_body(rows: usize, width: usize, x: f64) -> String {
    let (xs, ids, on) = (vec![x; rows * width], vec![7; rows * 2], vec![true; rows]);
    serde_json::json!({
        "id": "42",
        "inputs": [
            { "name": "x", "datatype": "FP32", "shape": [rows, width], "data": xs },
            { "name": "ids", "datatype": "INT64", "shape": [rows, 2], "data": ids },
            { "name": "on", "datatype": "BOOL", "shape": [rows], "data": on },
        ],
    })
    .to_string()
}
