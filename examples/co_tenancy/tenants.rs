//! The guests of the host: a session that infers and one that trains, over the same weights.

use std::sync::Arc;

use meganeura::codegen::{CompileOptions, compile};
use meganeura::runtime::Session;
use meganeura::{Bindings, Device, Error, Loss, Model, Objective, Tensor, WorkPhase};

/// A session and the inputs of its steps.
pub struct Tenant {
    pub session: Session,
    inputs: Vec<(String, Tensor)>,
}

impl Tenant {
    /// Places the inputs of the next step on the device.
    pub fn prepare(&mut self) -> Result<(), Error> {
        Ok(self.session.write_inputs(&named(&self.inputs))?)
    }

    /// A step without a host: what a recorded one must equal.
    pub fn run(&mut self) -> Result<Vec<Tensor>, Error> {
        Ok(self.session.run(&named(&self.inputs))?)
    }
}

fn named(inputs: &[(String, Tensor)]) -> Vec<(&str, &Tensor)> {
    inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect()
}

/// Inference and training of one model, whose weights both sessions share: each training step changes what the next inference sees.
pub struct Tenants {
    pub inference: Tenant,
    pub training: Tenant,
}

impl Tenants {
    /// Both sessions on batches of `batch` samples.
    pub fn new(device: &Arc<Device>, model: &Model, batch: usize) -> Result<Self, Error> {
        let bindings = Bindings { dims: [("batch".to_owned(), batch)].into(), ..Bindings::default() };
        let objective = Objective::new(Loss::from_name("cross_entropy")?);
        let workload = |phase| model.workload(phase, Some(&objective), None, None, &bindings);
        let (inference, training) = (workload(WorkPhase::Inference)?, workload(WorkPhase::Step)?);
        let program = |graph: meganeura::ir::Graph| {
            let compiled = compile(&graph.verify()?, device.profile(), &CompileOptions::default())?;
            Ok::<_, Error>(Arc::new(compiled.program))
        };
        let (infer, train) = (program(inference.graph)?, program(training.graph)?);
        let store = model.place(device, &train)?;
        Ok(Tenants {
            inference: Tenant { session: Session::new(device, infer, &store)?, inputs: inference.inputs },
            training: Tenant { session: Session::new(device, train, &store)?, inputs: training.inputs },
        })
    }
}
