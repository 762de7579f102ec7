//! From a graph to results of the device.

use std::sync::Arc;

use meganeura_codegen::program::{Access, Binding};
use meganeura_codegen::{CompileOptions, Program, compile, raise};
use meganeura_ir::{Graph, ParameterId, Tensor};
use meganeura_runtime::{Device, ParameterError, ParameterStore, Session, SessionError};

use crate::refusal::{self, Reason};

/// Why something is refused, with the text of the error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub detail: String,
}

impl Refusal {
    pub fn new(reason: Reason, detail: impl ToString) -> Self {
        Refusal { reason, detail: detail.to_string() }
    }
}

impl From<SessionError> for Refusal {
    fn from(error: SessionError) -> Self {
        Refusal::new(refusal::of_session(&error), error)
    }
}

impl From<ParameterError> for Refusal {
    fn from(error: ParameterError) -> Self {
        SessionError::from(error).into()
    }
}

/// What a program computed.
pub struct Execution {
    /// In the order of the graph's outputs.
    pub outputs: Vec<Tensor>,
    /// For each output, whether a dispatch writes it.
    pub dispatched: Vec<bool>,
}

/// A device, and how programs for it are made.
pub struct Engine {
    pub device: Arc<Device>,
    pub options: CompileOptions,
}

impl Engine {
    /// The graph of a model as it is compiled and differentiated.
    pub fn prepare(&self, graph: Graph) -> Graph {
        if self.options.saturate.is_some() { raise(&graph) } else { graph }
    }

    /// Compiles `graph` and runs it once: `inputs` and `weights` in the order of the graph's.
    pub fn execute(&self, graph: Graph, inputs: &[Tensor], weights: &[Tensor]) -> Result<Execution, Refusal> {
        let verified = graph.verify().map_err(|e| Refusal::new(Reason::Other, e))?;
        let compiled = compile(&verified, self.device.profile(), &self.options);
        let compiled = compiled.map_err(|e| Refusal::new(refusal::of_compile(&e), e))?;
        let program = Arc::new(compiled.program);
        let store = ParameterStore::new(&self.device, &program)?;
        let weights: Vec<(ParameterId, &Tensor)> = (0..).map(ParameterId).zip(weights).collect();
        store.write_parameters(&weights)?;
        let mut session = Session::new(&self.device, program.clone(), &store)?;
        let outputs = session.run_ordered(&inputs.iter().collect::<Vec<_>>())?;
        let dispatched = program.outputs.iter().map(|output| is_dispatched(&program, output)).collect();
        Ok(Execution { outputs, dispatched })
    }
}

/// Whether a dispatch writes `output`.
fn is_dispatched(program: &Program, output: &Binding) -> bool {
    let Some(region) = &output.region else { return false };
    program.dispatches.iter().any(|dispatch| {
        let accesses = program.kernels.get(dispatch.kernel).map_or(&[][..], |kernel| &kernel.access);
        dispatch.regions.iter().zip(accesses).any(|(r, access)| *access == Access::ReadWrite && r.overlaps(region))
    })
}
