//! The engine: one thread that owns all models and their device, runs batches, and trains between them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use meganeura_ir::{Shape, Tensor};
use tokio::sync::oneshot;

use crate::batch::{bucket, execute, shape_of, take_rows};
use crate::metrics::Metrics;
use crate::refusal::Refusal;
use crate::served::{Checkpoint, ModelCard, Preparation, Progress, Rollback, Served, Timing, TrainJob, TrainOutcome, Wake};

/// Training jobs of one model that wait, besides the one in progress.
const MAX_TRAIN_QUEUE: usize = 4;

/// The answer to one request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reply {
    /// In the order of the card.
    pub outputs: Vec<(String, Tensor)>,
    pub weight_version: u64,
    /// Samples of the execution, padding included; 0 where the model is not batched.
    pub batch: usize,
    pub timing: Timing,
}

type ReplyTo<T> = oneshot::Sender<Result<T, Refusal>>;

/// A checked request.
pub(crate) struct InferJob {
    pub model: usize,
    /// In the order of the card.
    pub inputs: Vec<Tensor>,
    /// Samples in it, where the model is batched.
    pub rows: Option<usize>,
    pub arrived: Instant,
    pub deadline: Instant,
    pub reply: ReplyTo<Reply>,
}

enum Message {
    Infer(InferJob),
    Train {
        model: usize,
        job: TrainJob,
        reply: ReplyTo<TrainOutcome>,
    },
    Checkpoint {
        model: usize,
        reply: ReplyTo<Checkpoint>,
    },
    Rollback {
        model: usize,
        reply: ReplyTo<Rollback>,
    },
    /// The checkpoint of a model that was being written is there, or is not.
    Saved(usize),
    /// Something that was pending may be there.
    Wake,
    Stop,
}

/// How the engine forms batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batching {
    pub max_batch: usize,
    pub max_delay: Duration,
}

/// How handlers reach the engine.
#[derive(Clone)]
pub(crate) struct EngineHandle {
    sender: Sender<Message>,
    queued: Arc<AtomicUsize>,
    max_queue: usize,
}

impl EngineHandle {
    /// Queues a request.
    ///
    /// # Errors
    /// The queue is full, or the engine has stopped.
    pub fn infer(&self, job: InferJob) -> Result<(), Refusal> {
        if self.queued.fetch_add(1, Ordering::AcqRel) >= self.max_queue {
            self.queued.fetch_sub(1, Ordering::AcqRel);
            return Err(Refusal::busy(format!("{} requests wait already; try again later", self.max_queue)));
        }
        self.send(Message::Infer(job)).inspect_err(|_| {
            self.queued.fetch_sub(1, Ordering::AcqRel);
        })
    }

    pub async fn train(&self, model: usize, job: TrainJob) -> Result<TrainOutcome, Refusal> {
        self.ask(|reply| Message::Train { model, job, reply }).await
    }

    pub async fn checkpoint(&self, model: usize) -> Result<Checkpoint, Refusal> {
        self.ask(|reply| Message::Checkpoint { model, reply }).await
    }

    pub async fn roll_back(&self, model: usize) -> Result<Rollback, Refusal> {
        self.ask(|reply| Message::Rollback { model, reply }).await
    }

    /// Requests that wait.
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Acquire)
    }

    /// Answers what waits, then ends the thread. A training job is given up.
    pub fn stop(&self) {
        // An engine that is gone has stopped.
        let _ = self.sender.send(Message::Stop);
    }

    async fn ask<T>(&self, message: impl FnOnce(ReplyTo<T>) -> Message) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(message(reply))?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    fn send(&self, message: Message) -> Result<(), Refusal> {
        self.sender.send(message).map_err(|_| stopped())
    }
}

pub(crate) fn stopped() -> Refusal {
    Refusal::unavailable("the server is stopping, or gave this up")
}

/// What the engine's thread starts with: models by [`Served`], made on that thread.
pub type Load<E> = Box<dyn FnOnce() -> Result<Vec<Box<dyn Served>>, E> + Send>;

/// A started engine.
pub(crate) struct Started {
    pub handle: EngineHandle,
    pub cards: Vec<ModelCard>,
    pub thread: JoinHandle<()>,
}

/// Does something when it is dropped, after a panic too.
struct Finally<F: FnMut()>(F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Starts the thread, and returns once its models are loaded. `ended` is called when the thread ends, whatever ends it.
///
/// # Errors
/// What `load` says; `None` if the thread ended without a word.
pub(crate) fn start<E: Send + 'static>(
    load: Load<E>,
    batching: Batching,
    max_queue: usize,
    metrics: Arc<Metrics>,
    ended: impl FnMut() + Send + 'static,
) -> Result<Started, Option<E>> {
    let (sender, receiver) = channel();
    let queued = Arc::new(AtomicUsize::new(0));
    let handle = EngineHandle { sender: sender.clone(), queued: queued.clone(), max_queue };
    let (loaded, cards) = channel();
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
        let _ended = Finally(ended);
        let models = match load() {
            Ok(models) => models,
            Err(e) => {
                let _ = loaded.send(Err(e));
                return;
            }
        };
        let waker = sender.clone();
        let wake: Wake = Arc::new(move || {
            let _ = waker.send(Message::Wake);
        });
        let cards: Vec<ModelCard> = models.iter().map(|model| model.card()).collect();
        let models = models.into_iter().zip(&cards);
        let models = models.map(|(served, card)| Model::new(served, card.batched)).collect();
        if loaded.send(Ok(cards)).is_ok() {
            Engine { models, batching, sender, receiver, queued, metrics, wake, stopping: false, next_to_train: 0 }.run();
        }
    });
    let thread = thread.map_err(|_| None)?;
    match cards.recv() {
        Ok(Ok(cards)) => Ok(Started { handle, cards, thread }),
        Ok(Err(e)) => Err(Some(e)),
        Err(_) => Err(None),
    }
}

/// Requests that can share an execution, oldest first.
struct Group {
    shapes: Vec<Shape>,
    jobs: VecDeque<InferJob>,
    /// The model asked to wait for something that this group needs.
    pending: bool,
}

impl Group {
    fn rows(&self) -> usize {
        self.jobs.iter().filter_map(|job| job.rows).sum()
    }
}

struct Training {
    losses: u64,
    reply: ReplyTo<TrainOutcome>,
    waits: bool,
}

struct Model {
    served: Box<dyn Served>,
    batched: bool,
    groups: Vec<Group>,
    /// Requests to expect before a batch is worth running: those of the last one, and those that came while it ran.
    expected: usize,
    training: Option<Training>,
    train_queue: VecDeque<(TrainJob, ReplyTo<TrainOutcome>)>,
    /// While a checkpoint is being written: who wants one of the weights that are served after it.
    saving: Option<Vec<ReplyTo<Checkpoint>>>,
}

impl Model {
    fn new(served: Box<dyn Served>, batched: bool) -> Self {
        let train_queue = VecDeque::new();
        Model { served, batched, groups: Vec::new(), expected: 1, training: None, train_queue, saving: None }
    }

    fn waiting(&self) -> usize {
        self.groups.iter().map(|group| group.jobs.len()).sum()
    }

    /// Whether there are requests that could run, now or after a delay.
    fn requests_wait(&self) -> bool {
        self.groups.iter().any(|group| !group.pending && !group.jobs.is_empty())
    }
}

struct Engine {
    models: Vec<Model>,
    batching: Batching,
    /// For threads that the engine starts.
    sender: Sender<Message>,
    receiver: Receiver<Message>,
    queued: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    wake: Wake,
    stopping: bool,
    next_to_train: usize,
}

/// What to do next.
enum Next {
    /// Run a batch of a group of a model.
    Batch(usize, usize),
    /// Nothing can run before.
    At(Instant),
    Idle,
}

impl Engine {
    fn run(mut self) {
        self.publish();
        loop {
            self.drain();
            self.expire();
            let next = self.next(Instant::now());
            // A request that may still be joined by others waits too.
            let trained = self.train(self.models.iter().any(Model::requests_wait));
            match next {
                Next::Batch(model, group) => self.batch(model, group),
                _ if trained => {}
                Next::Idle if self.stopping && self.queued.load(Ordering::Acquire) == 0 => return,
                Next::Idle => self.wait(self.may_train_at()),
                Next::At(when) => self.wait(self.may_train_at().map_or(Some(when), |at| Some(at.min(when)))),
            }
        }
    }

    /// Takes in what has come.
    fn drain(&mut self) {
        loop {
            match self.receiver.try_recv() {
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
            }
        }
    }

    fn wait(&mut self, until: Option<Instant>) {
        let received = match until {
            None => self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => self.receiver.recv_timeout(until.saturating_duration_since(Instant::now())),
        };
        match received {
            Ok(message) => self.take(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.stopping = true,
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Infer(job) => {
                let Some(model) = self.models.get_mut(job.model) else { return };
                let samples = |tensor: &Tensor| match job.rows {
                    Some(_) => shape_of(tensor.shape(), 1),
                    None => tensor.shape().clone(),
                };
                let shapes: Vec<Shape> = job.inputs.iter().map(samples).collect();
                match model.groups.iter_mut().find(|group| group.shapes == shapes) {
                    Some(group) => group.jobs.push_back(job),
                    None => model.groups.push(Group { shapes, jobs: [job].into(), pending: false }),
                }
            }
            Message::Train { model, job, reply } => self.queue_training(model, job, reply),
            Message::Checkpoint { model, reply } => match self.models.get_mut(model).and_then(|model| model.saving.as_mut()) {
                Some(waiting) => waiting.push(reply),
                None => self.save(model, vec![reply]),
            },
            Message::Saved(model) => {
                let waiting = self.models.get_mut(model).and_then(|model| model.saving.take());
                self.save(model, waiting.unwrap_or_default());
            }
            Message::Rollback { model, reply } => {
                let Some(model) = self.models.get_mut(model) else { return };
                let done = model.served.roll_back();
                if done.as_ref().is_ok_and(|rollback| rollback.interrupted)
                    && let Some(training) = model.training.take()
                {
                    let _ = training.reply.send(Err(Refusal::unavailable("the job was given up for a rollback")));
                }
                let _ = reply.send(done);
                self.publish();
            }
            Message::Wake => {
                for model in &mut self.models {
                    model.groups.iter_mut().for_each(|group| group.pending = false);
                    if let Some(training) = &mut model.training {
                        training.waits = false;
                    }
                }
            }
            Message::Stop => {
                self.stopping = true;
                for model in &mut self.models {
                    let waiting = model.train_queue.drain(..).map(|(_, reply)| reply);
                    for reply in waiting.chain(model.training.take().map(|training| training.reply)) {
                        let _ = reply.send(Err(stopped()));
                    }
                }
            }
        }
    }

    /// Has a checkpoint written on a thread of its own, one at a time, for all who wait for it.
    fn save(&mut self, m: usize, replies: Vec<ReplyTo<Checkpoint>>) {
        let Some(model) = self.models.get_mut(m).filter(|_| !replies.is_empty()) else { return };
        let answer = |replies: Vec<ReplyTo<Checkpoint>>, result: Result<Checkpoint, Refusal>| {
            for reply in replies {
                // Whoever does not wait any more has gone away.
                let _ = reply.send(result.clone());
            }
        };
        let write = match model.served.checkpoint() {
            Ok(write) => write,
            Err(refusal) => return answer(replies, Err(refusal)),
        };
        let sender = self.sender.clone();
        let writer = std::thread::Builder::new().name("checkpoint".into()).spawn(move || {
            let _saved = Finally(|| drop(sender.send(Message::Saved(m))));
            answer(replies, write());
        });
        if writer.is_ok() {
            model.saving = Some(Vec::new());
        }
    }

    /// Drops requests whose time is over or whose client went away.
    fn expire(&mut self) {
        let now = Instant::now();
        for model in &mut self.models {
            for group in &mut model.groups {
                let before = group.jobs.len();
                if group.jobs.iter().all(|job| job.deadline > now && !job.reply.is_closed()) {
                    continue;
                }
                for job in std::mem::take(&mut group.jobs) {
                    if job.deadline > now && !job.reply.is_closed() {
                        group.jobs.push_back(job);
                    } else {
                        let _ = job.reply.send(Err(Refusal::unavailable("the request waited until its deadline")));
                    }
                }
                self.queued.fetch_sub(before - group.jobs.len(), Ordering::AcqRel);
            }
            model.groups.retain(|group| !group.jobs.is_empty());
        }
    }

    /// The group that has waited longest among those that are due.
    fn next(&self, now: Instant) -> Next {
        let Batching { max_batch, max_delay } = self.batching;
        let mut due: Option<(Instant, usize, usize)> = None;
        let mut at: Option<Instant> = None;
        let mut sooner = |when: Instant| at = Some(at.map_or(when, |at| at.min(when)));
        for (m, model) in self.models.iter().enumerate() {
            for (g, group) in model.groups.iter().enumerate() {
                let Some(oldest) = group.jobs.front() else { continue };
                let crowded = model.batched && group.jobs.len() < model.expected && group.rows() < max_batch;
                let ready = if crowded && !self.stopping { oldest.arrived + max_delay } else { oldest.arrived };
                if group.pending {
                    group.jobs.iter().for_each(|job| sooner(job.deadline));
                } else if ready > now {
                    sooner(ready);
                } else if due.is_none_or(|(first, ..)| oldest.arrived < first) {
                    due = Some((oldest.arrived, m, g));
                }
            }
        }
        match (due, at) {
            (Some((_, model, group)), _) => Next::Batch(model, group),
            (None, Some(at)) => Next::At(at),
            (None, None) => Next::Idle,
        }
    }

    fn batch(&mut self, m: usize, g: usize) {
        let Some(model) = self.models.get_mut(m) else { return };
        let Some(group) = model.groups.get_mut(g) else { return };
        let prepared = prepare(model.served.as_mut(), group, self.batching.max_batch, &self.wake);
        let size = match prepared {
            Ok(Some(size)) => size,
            Ok(None) => {
                group.pending = true;
                return;
            }
            Err(refusal) => {
                let jobs = std::mem::take(&mut group.jobs);
                self.queued.fetch_sub(jobs.len(), Ordering::AcqRel);
                for job in jobs {
                    let _ = job.reply.send(Err(refusal.clone()));
                }
                return;
            }
        };
        let jobs = match size {
            None => group.jobs.pop_front().into_iter().collect(),
            Some(size) => take_rows(&mut group.jobs, size),
        };
        self.queued.fetch_sub(jobs.len(), Ordering::AcqRel);
        let started = Instant::now();
        let result = execute(model.served.as_mut(), &jobs, size);
        let device = started.elapsed();
        let rows: usize = jobs.iter().map(|job| job.rows.unwrap_or(1)).sum();
        self.metrics.execution(m, rows, device);
        let count = jobs.len();
        // A client whose answer is not awaited any more has gone away.
        match result {
            Ok((answer, parts)) => {
                for (job, outputs) in jobs.into_iter().zip(parts) {
                    let timing = Timing { queue: started.saturating_duration_since(job.arrived), device };
                    let (weight_version, batch) = (answer, size.unwrap_or(0));
                    let _ = job.reply.send(Ok(Reply { outputs, weight_version, batch, timing }));
                }
            }
            Err(refusal) => {
                for job in jobs {
                    let _ = job.reply.send(Err(refusal.clone()));
                }
            }
        }
        self.drain();
        if let Some(model) = self.models.get_mut(m) {
            model.expected = if count > 1 || model.waiting() > 1 { count + model.waiting() } else { 1 };
        }
        self.publish();
    }

    fn queue_training(&mut self, m: usize, job: TrainJob, reply: ReplyTo<TrainOutcome>) {
        let Some(model) = self.models.get_mut(m) else { return };
        if self.stopping {
            let _ = reply.send(Err(stopped()));
        } else if model.train_queue.len() >= MAX_TRAIN_QUEUE {
            let _ = reply.send(Err(Refusal::busy(format!("{MAX_TRAIN_QUEUE} training jobs wait already; try again later"))));
        } else {
            model.train_queue.push_back((job, reply));
        }
    }

    /// Runs one piece of training, if there is one and it may run now.
    fn train(&mut self, requests_wait: bool) -> bool {
        let mut trained = false;
        let count = self.models.len();
        for turn in 0..count {
            // Whoever trained last is asked last.
            let m = (self.next_to_train + turn) % count;
            let Some(model) = self.models.get_mut(m) else { continue };
            while model.training.is_none()
                && let Some((job, reply)) = model.train_queue.pop_front()
            {
                match model.served.begin_training(job) {
                    Ok(()) => model.training = Some(Training { losses: 0, reply, waits: false }),
                    Err(refusal) => {
                        let _ = reply.send(Err(refusal));
                    }
                }
            }
            let Some(training) = &mut model.training else { continue };
            if trained || training.waits || !model.served.may_train(requests_wait) {
                continue;
            }
            trained = true;
            self.next_to_train = m + 1;
            let started = Instant::now();
            let progress = model.served.train(&self.wake);
            match progress {
                Ok(Progress::Continues { loss }) => {
                    training.losses += u64::from(loss.is_some());
                    self.metrics.training_piece(m, started.elapsed(), loss);
                }
                Ok(Progress::Waits) => training.waits = true,
                Ok(Progress::Done(outcome)) => {
                    let missing = outcome.losses.get(training.losses as usize..).unwrap_or_default();
                    missing.iter().for_each(|&loss| self.metrics.training_piece(m, Duration::ZERO, Some(loss)));
                    self.metrics.training_piece(m, started.elapsed(), None);
                    if let Some(training) = model.training.take() {
                        let _ = training.reply.send(Ok(outcome));
                    }
                }
                Err(refusal) => {
                    if let Some(training) = model.training.take() {
                        let _ = training.reply.send(Err(refusal));
                    }
                }
            }
        }
        if trained {
            self.publish();
        }
        trained
    }

    /// When a job that pauses may go on.
    fn may_train_at(&self) -> Option<Instant> {
        let running = |model: &&Model| model.training.as_ref().is_some_and(|training| !training.waits);
        self.models.iter().filter(running).filter_map(|model| model.served.may_train_at()).min()
    }

    /// Tells the metrics what may have changed.
    fn publish(&self) {
        for (m, model) in self.models.iter().enumerate() {
            self.metrics.model_state(m, model.served.weight_version(), model.served.device_bytes());
        }
    }
}

/// Finds the size in which a group can run now: the smallest that holds all its samples, or one below while that is being made.
/// `Ok(Some(None))` is one request as it is; `Ok(None)` means that nothing is ready.
fn prepare(served: &mut dyn Served, group: &Group, max_batch: usize, wake: &Wake) -> Result<Option<Option<usize>>, Refusal> {
    let Some(oldest) = group.jobs.front() else { return Ok(None) };
    let Some(first) = oldest.rows else {
        return Ok(match served.prepare(&group.shapes, wake)? {
            Preparation::Ready => Some(None),
            Preparation::Pending => None,
        });
    };
    let mut size = bucket(group.rows().min(max_batch.max(first)), max_batch);
    loop {
        let shapes: Vec<Shape> = group.shapes.iter().map(|shape| shape_of(shape, size)).collect();
        match served.prepare(&shapes, wake)? {
            Preparation::Ready => return Ok(Some(Some(size))),
            Preparation::Pending if size / 2 >= first.max(1) => size = bucket(size / 2, max_batch),
            Preparation::Pending => return Ok(None),
        }
    }
}
