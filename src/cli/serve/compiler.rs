//! Programs, compiled beside the thread that owns the device.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use meganeura::ir::SampleAxis;
use meganeura::live::{Compilation, Compiled, InputShapes};
use meganeura::{Bindings, Error, Model};
use meganeura_serve::Wake;

use super::batching::{inference_graph, sample_axes};

/// What a program is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Purpose {
    Inference {
        shapes: InputShapes,
        /// Samples in them, where the model is batched.
        batch: Option<usize>,
    },
    Training,
}

/// A program, and where its outputs have their samples.
pub struct Finished {
    pub purpose: Purpose,
    pub result: Result<(Compiled, Vec<Option<SampleAxis>>), Error>,
}

struct Order {
    purpose: Purpose,
    compilation: Compilation,
    model: Arc<Model>,
    bindings: Bindings,
    wake: Option<Wake>,
}

/// A thread that compiles one program after another.
pub struct Compiler {
    orders: Sender<Order>,
    finished: Receiver<Finished>,
    pending: Vec<Purpose>,
}

impl Compiler {
    /// # Errors
    /// The system has no thread left.
    pub fn new() -> std::io::Result<Self> {
        let (orders, received) = channel::<Order>();
        let (sender, finished) = channel();
        std::thread::Builder::new().name("compiler".into()).spawn(move || {
            for Order { purpose, compilation, model, bindings, wake } in received {
                let axes = match &purpose {
                    Purpose::Inference { shapes, batch: Some(batch) } => {
                        inference_graph(&model, &bindings, shapes).map(|graph| sample_axes(&graph, *batch))
                    }
                    _ => Ok(Vec::new()),
                };
                let result = axes.and_then(|axes| Ok((compilation.run()?, axes)));
                if sender.send(Finished { purpose, result }).is_err() {
                    return;
                }
                if let Some(wake) = wake {
                    wake();
                }
            }
        })?;
        Ok(Compiler { orders, finished, pending: Vec::new() })
    }

    /// Whether a program for this purpose is being made.
    pub fn is_pending(&self, purpose: &Purpose) -> bool {
        self.pending.contains(purpose)
    }

    pub fn order(
        &mut self,
        purpose: Purpose,
        compilation: Compilation,
        model: &Arc<Model>,
        bindings: &Bindings,
        wake: Option<&Wake>,
    ) {
        let order = Order {
            purpose: purpose.clone(),
            compilation,
            model: model.clone(),
            bindings: bindings.clone(),
            wake: wake.cloned(),
        };
        if self.orders.send(order).is_ok() {
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
