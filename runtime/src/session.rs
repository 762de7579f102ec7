//! One program, ready to run.

use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blade_graphics::{BufferPiece, CommandEncoder};
use meganeura_codegen::program::{Binding, ParameterBinding, Program, Space};
use meganeura_ir::{ParameterId, Tensor, TensorType};

use crate::buffers::check_host_room;
use crate::device::{Device, DeviceError};
use crate::encoder::Encoder;
use crate::parameters::{self, ParameterError, ParameterStore};
use crate::pipeline::{self, KernelError, Pipeline, PipelineError};
use crate::program_check::{self, ProgramError};
use crate::step::{self, BoundDispatch, Slot, Spaces, StagedCopy};
use crate::transfer::Source;
use crate::words::{self, WordError};

/// Steps in flight: while the device computes one, the host records the other.
const SLOTS: usize = 2;

/// Why a session cannot be made, or a step cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    #[error("input {0}")]
    Word(#[from] WordError),
    #[error("the program does not fit the parameter store: {0}")]
    Store(String),
    #[error("there is no input {name:?}; the inputs are {}", known.join(", "))]
    UnknownInput { name: String, known: Vec<String> },
    #[error("input {0:?} is missing")]
    MissingInput(String),
    #[error("input {0:?} is given twice")]
    DuplicateInput(String),
    #[error("{found} inputs are given, the program takes {expected}")]
    InputCount { expected: usize, found: usize },
    #[error("input {name:?} must be {expected}, it is {found}")]
    InputType { name: String, expected: TensorType, found: TensorType },
    #[error("the ticket belongs to another session")]
    ForeignTicket,
    #[error("the outputs of step {0} are gone: two later steps were submitted before it was waited for")]
    ExpiredTicket(u64),
    #[error("dispatches {}..{} of {total} do not exist", range.start, range.end)]
    Chunk { range: Range<usize>, total: usize },
    #[error("this device has no timer")]
    NoTimer,
}

impl From<PipelineError> for SessionError {
    fn from(error: PipelineError) -> Self {
        match error {
            PipelineError::Device(e) => e.into(),
            PipelineError::Kernel(e) => e.into(),
        }
    }
}

/// How much one submission may hold. Drivers kill submissions that keep the device for seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmissionLimits {
    pub dispatches: usize,
    /// The sum of what the dispatches bind, as an estimate of their work.
    pub bytes: u64,
}

impl Default for SubmissionLimits {
    fn default() -> Self {
        SubmissionLimits { dispatches: 512, bytes: 8 << 30 }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    pub submission: SubmissionLimits,
}

/// A step that was submitted. [`Session::wait`] turns it into outputs.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the outputs are read through it"]
pub struct Ticket {
    session: u64,
    step: u64,
}

/// What one dispatch took on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DispatchTime {
    /// Index in [`Program::dispatches`].
    pub dispatch: usize,
    /// The label of its kernel.
    pub label: String,
    pub time: Duration,
}

/// A program with its pipelines and memory.
///
/// Steps run in the order in which they are submitted, whichever session of the device they belong to: what one step writes, to
/// parameters or to optimiser state, the next one sees.
///
/// ```
/// use std::sync::Arc;
///
/// use meganeura_codegen::{CompileOptions, compile};
/// use meganeura_ir::{DType, Graph, ParameterInfo, ParameterRole, Tensor, TensorType};
/// use meganeura_runtime::{Device, DeviceSelector, ParameterStore, Session};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // y = x + total, and the total grows to y.
/// let mut graph = Graph::new();
/// let ty = TensorType::new(DType::F32, [2]);
/// let x = graph.input("x", ty.clone())?;
/// let total = ParameterInfo { name: "total".into(), ty, stored: DType::F32, role: ParameterRole::Weight };
/// let total = graph.parameter(total)?;
/// let y = graph.add(x, total)?;
/// graph.output("y", y)?;
/// let id = graph.parameter_id("total").ok_or("it is declared")?;
/// graph.update(id, y)?;
///
/// let device = Device::open(&DeviceSelector::Auto)?;
/// let program = Arc::new(compile(&graph.verify()?, device.profile(), &CompileOptions::default())?.program);
/// let store = ParameterStore::new(&device, &program)?;
/// let mut session = Session::new(&device, program, &store)?;
/// session.write_parameter(id, &Tensor::from_f32([2], &[10.0, 20.0]))?;
///
/// // Two steps are in flight; the second sees what the first one left.
/// let (one, two) = (Tensor::from_f32([2], &[1.0, 1.0]), Tensor::from_f32([2], &[2.0, 3.0]));
/// let first = session.submit(&[("x", &one)])?;
/// let second = session.submit(&[("x", &two)])?;
/// assert_eq!(session.wait(first)?, [Tensor::from_f32([2], &[11.0, 21.0])]);
/// assert_eq!(session.wait(second)?, [Tensor::from_f32([2], &[13.0, 24.0])]);
/// assert_eq!(session.read_parameter(id)?, Tensor::from_f32([2], &[13.0, 24.0]));
/// # Ok(())
/// # }
/// ```
pub struct Session {
    /// First, so that dropping the session waits for its steps before it frees what they use.
    slots: [Slot; SLOTS],
    id: u64,
    next_step: u64,
    device: Arc<Device>,
    program: Arc<Program>,
    options: SessionOptions,
    submissions: Vec<Range<usize>>,
    dispatches: Vec<BoundDispatch>,
    inputs: Vec<Option<StagedCopy>>,
    outputs: Vec<Option<StagedCopy>>,
    pipelines: Vec<Pipeline>,
    spaces: Spaces,
}

impl Session {
    /// Compiles the kernels of `program` and allocates its memory. `store` must have the program's parameter layout.
    /// Optimiser state is zero at first.
    pub fn new(device: &Arc<Device>, program: Arc<Program>, store: &Arc<ParameterStore>) -> Result<Self, SessionError> {
        Self::with_options(device, program, store, SessionOptions::default())
    }

    /// As [`Session::new`], with other limits.
    pub fn with_options(
        device: &Arc<Device>,
        program: Arc<Program>,
        store: &Arc<ParameterStore>,
        options: SessionOptions,
    ) -> Result<Self, SessionError> {
        Self::build(device, program, store, options, None)
    }

    /// A session of another program over the same parameters and the same optimiser state, which must have this program's layout.
    pub fn beside(&self, program: Arc<Program>) -> Result<Self, SessionError> {
        let state = |program: &Program| -> Vec<ParameterBinding> {
            let own = program.parameters.iter().filter(|p| p.region.is_some_and(|r| r.space == Space::Optimizer));
            own.map(|p| ParameterBinding { updated: false, ..p.clone() }).collect()
        };
        if program.memory.optimizer != self.program.memory.optimizer || state(&program) != state(&self.program) {
            return Err(SessionError::Store("its optimiser state is another".into()));
        }
        Self::build(&self.device, program, &self.spaces.store, self.options, Some(&self.spaces))
    }

    fn build(
        device: &Arc<Device>,
        program: Arc<Program>,
        store: &Arc<ParameterStore>,
        options: SessionOptions,
        state: Option<&Spaces>,
    ) -> Result<Self, SessionError> {
        if !Arc::ptr_eq(device, store.device()) {
            return Err(SessionError::Store("it is on another device".into()));
        }
        program_check::check(&program, &device.info().limits, device.profile())?;
        if let Some(difference) = store.difference(&program) {
            return Err(SessionError::Store(difference));
        }
        let (bytes, limit) = (program.memory.total(), device.info().limits.memory_bytes);
        if bytes > limit {
            return Err(DeviceError::MemoryExceeded { label: "the program".into(), bytes, limit }.into());
        }
        let pipelines = pipeline::create(device, &program.kernels)?;
        let spaces = Spaces::new(device, &program, store, state)?;
        {
            let mut transfer = store.transfer();
            if state.is_none() {
                transfer.zero(spaces.arena(Space::Optimizer))?;
            }
            let constants = program.constants.iter().map(|c| (spaces.piece(&c.region), Source::Words(&c.words)));
            transfer.upload(&constants.collect::<Vec<_>>())?;
        }
        let dispatches = step::bind(&program, &spaces);
        let submissions = step::split(&dispatches, options.submission.dispatches, options.submission.bytes);
        let (inputs, upload) = step::stage(&program.inputs, &spaces);
        let (outputs, download) = step::stage(&program.outputs, &spaces);
        let slot = || Slot::new(device, submissions.len(), upload, download);
        static SESSIONS: AtomicU64 = AtomicU64::new(0);
        Ok(Session {
            slots: [slot()?, slot()?],
            id: SESSIONS.fetch_add(1, Ordering::Relaxed),
            next_step: 0,
            device: device.clone(),
            program,
            options,
            submissions,
            dispatches,
            inputs,
            outputs,
            pipelines,
            spaces,
        })
    }

    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    pub fn store(&self) -> &Arc<ParameterStore> {
        &self.spaces.store
    }

    /// Runs one step on inputs given by name, and returns the outputs in the program's order.
    pub fn run(&mut self, inputs: &[(&str, &Tensor)]) -> Result<Vec<Tensor>, SessionError> {
        let ticket = self.submit(inputs)?;
        self.wait(ticket)
    }

    /// As [`Session::run`], with the inputs in the program's order.
    pub fn run_ordered(&mut self, inputs: &[&Tensor]) -> Result<Vec<Tensor>, SessionError> {
        let ticket = self.submit_ordered(inputs)?;
        self.wait(ticket)
    }

    /// Begins one step on inputs given by name. Two steps may be in flight; a third waits for the first.
    pub fn submit(&mut self, inputs: &[(&str, &Tensor)]) -> Result<Ticket, SessionError> {
        let inputs = ordered(&self.program.inputs, inputs)?;
        self.submit_ordered(&inputs)
    }

    /// As [`Session::submit`], with the inputs in the program's order.
    ///
    /// Once both steps in flight have been used, neither this nor [`Session::wait_into`] allocates.
    pub fn submit_ordered(&mut self, inputs: &[impl Borrow<Tensor>]) -> Result<Ticket, SessionError> {
        self.check_inputs(inputs)?;
        let ticket = Ticket { session: self.id, step: self.next_step };
        let slot = &mut self.slots[ticket.step as usize % SLOTS];
        slot.encoder.wait()?;
        slot.step = None;
        for (copy, tensor) in self.inputs.iter().zip(inputs) {
            if let Some(copy) = copy {
                words::encode(tensor.borrow(), &mut slot.upload.words_mut()[copy.words()], self.device.profile());
            }
        }
        let last = self.submissions.len() - 1;
        for (index, range) in self.submissions.iter().enumerate() {
            slot.encoder.submit(|encoder| {
                if index == 0 {
                    step::record_upload(encoder, &slot.upload, &self.inputs);
                }
                // Without a label: the graphics library keeps a copy of it.
                step::record(encoder, "", &self.pipelines, &self.dispatches[range.clone()]);
                if index == last {
                    step::record_download(encoder, &slot.download, &self.outputs);
                }
            })?;
        }
        slot.step = Some(ticket.step);
        self.next_step += 1;
        Ok(ticket)
    }

    /// Runs one step on the inputs that are on the device, and waits for it. Outputs stay there: see [`Session::read_outputs`].
    pub fn replay(&mut self) -> Result<(), SessionError> {
        let slot = &mut self.slots[self.next_step as usize % SLOTS];
        slot.encoder.wait()?;
        slot.step = None;
        for range in &self.submissions {
            slot.encoder.submit(|encoder| step::record(encoder, "step", &self.pipelines, &self.dispatches[range.clone()]))?;
        }
        self.next_step += 1;
        Ok(slot.encoder.wait()?)
    }

    /// Waits for a step and returns its outputs in the program's order.
    pub fn wait(&mut self, ticket: Ticket) -> Result<Vec<Tensor>, SessionError> {
        check_host_room("outputs", self.outputs.iter().flatten().map(|copy| copy.bytes).sum())?;
        let device = self.device.clone();
        Ok(self.downloaded(ticket)?.map(|(binding, words)| words::decode(&binding.ty, words, device.profile())).collect())
    }

    /// As [`Session::wait`], into tensors of the outputs' types, in the program's order. Others are replaced by new ones.
    pub fn wait_into(&mut self, ticket: Ticket, outputs: &mut [Tensor]) -> Result<(), SessionError> {
        let device = self.device.clone();
        for ((binding, words), output) in self.downloaded(ticket)?.zip(outputs) {
            words::decode_into(&binding.ty, words, output, device.profile());
        }
        Ok(())
    }

    /// Waits for a step: its outputs and their words.
    fn downloaded(&mut self, ticket: Ticket) -> Result<impl Iterator<Item = (&Binding, &[u32])>, SessionError> {
        if ticket.session != self.id {
            return Err(SessionError::ForeignTicket);
        }
        let slot = &mut self.slots[ticket.step as usize % SLOTS];
        if slot.step.take_if(|step| *step == ticket.step).is_none() {
            return Err(SessionError::ExpiredTicket(ticket.step));
        }
        slot.encoder.wait()?;
        let words = slot.download.words();
        let outputs = self.program.outputs.iter().zip(&self.outputs);
        Ok(outputs.map(|(binding, copy)| (binding, copy.map_or(&[][..], |copy| &words[copy.words()]))))
    }

    /// Waits for all steps in flight. Their tickets stay good.
    pub fn finish(&mut self) -> Result<(), SessionError> {
        Ok(self.slots.iter_mut().try_for_each(|slot| slot.encoder.wait())?)
    }

    /// Cuts the program into at most `count` runs of dispatches of about equal work, for [`Session::record`].
    pub fn chunks(&self, count: usize) -> Vec<Range<usize>> {
        let total: u64 = self.dispatches.iter().map(|d| d.bytes).sum();
        let mut chunks = Vec::with_capacity(count);
        let (mut start, mut done) = (0, 0u128);
        for (index, dispatch) in self.dispatches.iter().enumerate() {
            done += u128::from(dispatch.bytes);
            let due = done * count.max(1) as u128 >= u128::from(total) * (chunks.len() as u128 + 1);
            if due || index + 1 == self.dispatches.len() {
                chunks.push(start..index + 1);
                start = index + 1;
            }
        }
        chunks
    }

    /// Records a run of dispatches into the encoder of a host that owns the device, between passes of its own.
    ///
    /// The runs of a program must be recorded in order, all of them, and submitted to the context of this session's device. A
    /// barrier against earlier passes is included; an encoder with manual barriers needs one before the host reads results.
    /// Inputs come from [`Session::write_inputs`] or from passes that write [`Session::input_buffer`]. The host waits for its
    /// submissions before it drops the session.
    ///
    /// Runs of several sessions may alternate unless one updates parameters that another reads: then the step of the one ends before that
    /// of the other begins.
    pub fn record(&mut self, encoder: &mut CommandEncoder, chunk: Range<usize>) -> Result<(), SessionError> {
        let total = self.dispatches.len();
        let dispatches = self.dispatches.get(chunk.clone()).ok_or(SessionError::Chunk { range: chunk, total })?;
        Ok(self.device.guard(|_| step::record(encoder, "meganeura", &self.pipelines, dispatches))?)
    }

    /// Writes inputs for [`Session::record`], after all that was submitted before.
    pub fn write_inputs(&mut self, inputs: &[(&str, &Tensor)]) -> Result<(), SessionError> {
        let inputs = ordered(&self.program.inputs, inputs)?;
        self.check_inputs(&inputs)?;
        let copies = self.inputs.iter().zip(inputs);
        let items: Vec<_> = copies.filter_map(|(copy, tensor)| Some((copy.as_ref()?.device, Source::Tensor(tensor)))).collect();
        Ok(self.spaces.store.transfer().upload(&items)?)
    }

    /// Reads the outputs of a program that a host recorded and submitted.
    pub fn read_outputs(&mut self) -> Result<Vec<Tensor>, SessionError> {
        let outputs = self.program.outputs.iter().zip(&self.outputs);
        let items: Vec<_> = outputs.map(|(binding, copy)| (copy.map(|copy| copy.device), &binding.ty)).collect();
        Ok(self.spaces.store.transfer().download(&items)?)
    }

    /// Where an input lies on the device, one 32-bit word per element, or one f16 where the device's profile
    /// [stores halves](meganeura_codegen::DeviceProfile::stores_halves). Absent if it is unknown, empty or unused.
    pub fn input_buffer(&self, name: &str) -> Option<BufferPiece> {
        self.program.inputs.iter().position(|b| b.name == name).and_then(|index| self.inputs[index]).map(|copy| copy.device)
    }

    /// Where an output lies on the device, as inputs do. Absent if it is unknown or empty.
    pub fn output_buffer(&self, name: &str) -> Option<BufferPiece> {
        self.program.outputs.iter().position(|b| b.name == name).and_then(|index| self.outputs[index]).map(|copy| copy.device)
    }

    /// Makes the optimiser's state zero, as it is at first, after all that was submitted before.
    pub fn clear_optimizer(&mut self) -> Result<(), SessionError> {
        Ok(self.spaces.store.transfer().zero(self.spaces.arena(Space::Optimizer))?)
    }

    /// Replaces the value of a parameter, optimiser state included, after all that was submitted before.
    pub fn write_parameter(&mut self, id: ParameterId, value: &Tensor) -> Result<(), ParameterError> {
        self.write_parameters(&[(id, value)])
    }

    /// Replaces values, all or none.
    pub fn write_parameters(&mut self, values: &[(ParameterId, &Tensor)]) -> Result<(), ParameterError> {
        parameters::write(&mut self.spaces.store.transfer(), &self.program.parameters, values, |_, region| {
            Ok(self.spaces.piece(region))
        })
    }

    /// The value of a parameter, optimiser state included, after all that was submitted before.
    pub fn read_parameter(&mut self, id: ParameterId) -> Result<Tensor, ParameterError> {
        Ok(self.read_parameters(&[id])?.remove(0))
    }

    /// The values of several parameters, of one moment between steps.
    pub fn read_parameters(&mut self, ids: &[ParameterId]) -> Result<Vec<Tensor>, ParameterError> {
        parameters::read(&mut self.spaces.store.transfer(), &self.program.parameters, ids, |_, region| {
            Ok(self.spaces.piece(region))
        })
    }

    /// Runs one step on the inputs that [`Session::write_inputs`] put on the device, each dispatch in a pass of its own, and returns what each
    /// took. The step counts as any other: it updates parameters.
    ///
    /// # Errors
    /// The device has no timer, or fails.
    pub fn profile(&mut self) -> Result<Vec<DispatchTime>, SessionError> {
        let limit = self.options.submission.dispatches.min(blade_graphics::limits::PASS_COUNT - 1);
        let mut encoder = Encoder::new(&self.device, "profile", 1)?;
        let mut times = Vec::with_capacity(self.dispatches.len());
        for range in step::split(&self.dispatches, limit, self.options.submission.bytes) {
            encoder.submit(|encoder| {
                for dispatch in &self.dispatches[range.clone()] {
                    let label = &self.program.kernels[dispatch.kernel].label;
                    step::record(encoder, label, &self.pipelines, std::slice::from_ref(dispatch));
                }
            })?;
            let timings = encoder.timings()?;
            if timings.len() != range.len() {
                return Err(SessionError::NoTimer);
            }
            times.extend(range.zip(timings).map(|(dispatch, (label, time))| DispatchTime { dispatch, label, time }));
        }
        Ok(times)
    }

    /// Checks the inputs against the program's, and that the device can hold their values.
    fn check_inputs(&self, inputs: &[impl Borrow<Tensor>]) -> Result<(), SessionError> {
        let (expected, found) = (self.program.inputs.len(), inputs.len());
        if expected != found {
            return Err(SessionError::InputCount { expected, found });
        }
        for (binding, tensor) in self.program.inputs.iter().zip(inputs) {
            let tensor = tensor.borrow();
            if binding.ty != *tensor.ty() {
                let (expected, found) = (binding.ty.clone(), tensor.ty().clone());
                return Err(SessionError::InputType { name: binding.name.clone(), expected, found });
            }
            words::check(&binding.name, tensor)?;
        }
        Ok(())
    }
}

/// Puts named inputs into the order of `bindings`.
fn ordered<'a>(bindings: &[Binding], inputs: &[(&str, &'a Tensor)]) -> Result<Vec<&'a Tensor>, SessionError> {
    let mut found = vec![None; bindings.len()];
    for &(name, tensor) in inputs {
        let position = bindings.iter().position(|b| b.name == name).ok_or_else(|| SessionError::UnknownInput {
            name: name.into(),
            known: bindings.iter().map(|b| b.name.clone()).collect(),
        })?;
        if found[position].replace(tensor).is_some() {
            return Err(SessionError::DuplicateInput(name.into()));
        }
    }
    let complete = bindings.iter().zip(found).map(|(b, tensor)| tensor.ok_or_else(|| SessionError::MissingInput(b.name.clone())));
    complete.collect()
}

#[cfg(test)]
mod tests;
