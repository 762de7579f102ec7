//! Worker processes: a crash, a lost device or a hang costs one test, not the run.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use meganeura_codegen::CompileOptions;
use meganeura_runtime::{Device, DeviceError, DeviceSelector};

use crate::execute::Engine;
use crate::outcome::{Outcome, Status};
use crate::run::run;
use crate::suite::{SuiteError, Test, discover};

/// A worker that answers nothing for this long is killed.
const PATIENCE: Duration = Duration::from_secs(300);

/// Why the run as a whole stops.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Suite(#[from] SuiteError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("a worker process: {0}")]
    Io(#[from] io::Error),
    #[error("a worker process: {0}")]
    Json(#[from] serde_json::Error),
}

/// Answers every line of stdin, the id of a test, with its outcome as a line of JSON on stdout.
pub fn serve(data: &Path, device: &DeviceSelector, options: CompileOptions) -> Result<(), WorkerError> {
    // The parent tells what went wrong.
    std::panic::set_hook(Box::new(|_| {}));
    let tests: BTreeMap<String, Test> = discover(data)?.into_iter().map(|test| (test.id(), test)).collect();
    let mut engine = Engine { device: Device::open(device)?, options };
    for id in io::stdin().lock().lines() {
        let id = id?;
        let test = tests.get(&id).ok_or_else(|| SuiteError::Unknown(id.clone()))?;
        let outcome = outcome(&engine, test)?;
        let mut stdout = io::stdout().lock();
        serde_json::to_writer(&mut stdout, &outcome)?;
        writeln!(stdout)?;
        if engine.device.is_dead() {
            engine.device = Device::open(device)?;
        }
    }
    Ok(())
}

fn outcome(engine: &Engine, test: &Test) -> Result<Outcome, SuiteError> {
    let (operator, opset) = test.operator()?.unzip();
    let (status, gradient) = match catch_unwind(AssertUnwindSafe(|| run(engine, test))) {
        Ok(done) => done?,
        Err(payload) => (Status::Crashed { detail: format!("panic: {}", message(payload.as_ref())) }, None),
    };
    Ok(Outcome { test: test.id(), operator, opset, status, gradient })
}

fn message(payload: &(dyn Any + Send)) -> &str {
    payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied()).unwrap_or("without a text")
}

/// How worker processes are started.
pub struct Pool<'a> {
    pub data: &'a Path,
    /// As on the command line.
    pub device: &'a str,
    pub unsaturated: bool,
    pub jobs: usize,
}

impl Pool<'_> {
    /// Runs `tests`, and tells each outcome to `progress` as it comes. The result is in the order of `tests`.
    pub fn run(&self, tests: &[Test], mut progress: impl FnMut(&Outcome)) -> Result<Vec<Outcome>, WorkerError> {
        // The last folders hold the largest models.
        let queue = Mutex::new((0..tests.len()).rev().collect::<VecDeque<usize>>());
        let (sender, results) = mpsc::channel();
        let mut outcomes: Vec<Option<Outcome>> = vec![None; tests.len()];
        thread::scope(|scope| {
            for _ in 0..self.jobs.clamp(1, tests.len().max(1)) {
                let (sender, queue) = (sender.clone(), &queue);
                scope.spawn(move || {
                    let done = self.work(tests, queue, &sender);
                    if let Err(e) = done {
                        // The receiver stops at the first error.
                        let _ = sender.send(Err(e));
                    }
                });
            }
            drop(sender);
            for result in results {
                let (index, outcome) = match result {
                    Ok(result) => result,
                    Err(e) => {
                        queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
                        return Err(e);
                    }
                };
                progress(&outcome);
                outcomes[index] = Some(outcome);
            }
            Ok(())
        })?;
        Ok(outcomes.into_iter().flatten().collect())
    }

    fn work(
        &self,
        tests: &[Test],
        queue: &Mutex<VecDeque<usize>>,
        results: &Sender<Result<(usize, Outcome), WorkerError>>,
    ) -> Result<(), WorkerError> {
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let mut worker = None;
        while let Some(index) = next() {
            let test = &tests[index];
            let running = match worker.take() {
                Some(running) => running,
                None => Worker::start(self)?,
            };
            let outcome = match running.ask(&test.id())? {
                Answer::Outcome(outcome, running) => {
                    worker = Some(running);
                    *outcome
                }
                Answer::None(detail) => {
                    let (operator, opset) = test.operator()?.unzip();
                    Outcome { test: test.id(), operator, opset, status: Status::Crashed { detail }, gradient: None }
                }
            };
            if results.send(Ok((index, outcome))).is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// A process that runs [`serve`].
struct Worker {
    child: Child,
    /// Dropping it ends the process.
    questions: Option<ChildStdin>,
    answers: Receiver<io::Result<String>>,
}

enum Answer {
    Outcome(Box<Outcome>, Worker),
    /// The process is gone.
    None(String),
}

impl Worker {
    fn start(pool: &Pool) -> Result<Self, WorkerError> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--data").arg(pool.data).arg("--device").arg(pool.device).arg("--worker");
        command.args(pool.unsaturated.then_some("--unsaturated"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let questions = child.stdin.take();
        let (sender, answers) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || BufReader::new(stdout).lines().try_for_each(|line| sender.send(line)));
        }
        Ok(Worker { child, questions, answers })
    }

    fn ask(mut self, test: &str) -> Result<Answer, WorkerError> {
        let asked = self.questions.as_mut().map_or(Ok(()), |stdin| writeln!(stdin, "{test}").and_then(|()| stdin.flush()));
        let detail = match (asked, self.answers.recv_timeout(PATIENCE)) {
            (Ok(()), Ok(line)) => return Ok(Answer::Outcome(serde_json::from_str(&line?)?, self)),
            (_, Err(RecvTimeoutError::Timeout)) => format!("no answer within {} s", PATIENCE.as_secs()),
            _ => {
                let status = self.child.wait()?;
                format!("the process ended: {status}")
            }
        };
        Ok(Answer::None(detail))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.questions.take());
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            // It has nothing left to say.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
