//! Programs, compiled beside the thread that owns the device.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use meganeura::Error;
use meganeura::live::{Compilation, Compiled, InputShapes};
use meganeura_serve::Wake;

/// Programs that may be on their way; whoever wants another one waits for one of them.
const MAX_PENDING: usize = 8;

/// What a program is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Purpose {
    Inference(InputShapes),
    /// Of the job with this number.
    Training {
        job: u64,
    },
}

pub struct Finished {
    pub purpose: Purpose,
    pub result: Result<Compiled, Error>,
}

struct Order {
    purpose: Purpose,
    compilation: Compilation,
}

/// A thread that compiles one program after another.
pub struct Compiler {
    orders: Sender<Order>,
    finished: Receiver<Finished>,
    pending: Vec<Purpose>,
    /// Known once somebody waits.
    wake: Arc<OnceLock<Wake>>,
}

impl Compiler {
    /// # Errors
    /// The system has no thread left.
    pub fn new() -> std::io::Result<Self> {
        let (orders, received) = channel::<Order>();
        let (sender, finished) = channel();
        let wake: Arc<OnceLock<Wake>> = Arc::default();
        let waiting = wake.clone();
        std::thread::Builder::new().name("compiler".into()).spawn(move || {
            for Order { purpose, compilation } in received {
                if sender.send(Finished { purpose, result: compilation.run() }).is_err() {
                    return;
                }
                if let Some(wake) = waiting.get() {
                    wake();
                }
            }
        })?;
        Ok(Compiler { orders, finished, pending: Vec::new(), wake })
    }

    /// Whether a program for this purpose is being made.
    pub fn is_pending(&self, purpose: &Purpose) -> bool {
        self.pending.contains(purpose)
    }

    /// Whether no further program is to be ordered now.
    pub fn is_busy(&self) -> bool {
        self.pending.len() >= MAX_PENDING
    }

    /// Calls `wake` whenever a program is there. To miss none, ask for what is [finished](Compiler::finished) after this.
    pub fn wake_by(&self, wake: &Wake) {
        self.wake.get_or_init(|| wake.clone());
    }

    /// Has a program compiled.
    pub fn order(&mut self, purpose: Purpose, compilation: Compilation) {
        if self.orders.send(Order { purpose: purpose.clone(), compilation }).is_ok() {
            self.pending.push(purpose);
        }
    }

    /// The next program that is there, if any.
    pub fn finished(&mut self) -> Option<Finished> {
        let finished = self.finished.try_recv().ok()?;
        self.pending.retain(|purpose| *purpose != finished.purpose);
        Some(finished)
    }
}
