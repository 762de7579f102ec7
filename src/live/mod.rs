//! [`Live`]: a model that answers requests and is trained at the same time.
//!
//! The device holds two sets of weights. Inference reads the *served* one. Training steps in its *twin*, which is made with the first
//! training request and takes as much device memory again, apart from the optimiser's state. When a request's steps are done and their
//! result is accepted, one submission copies what changed from the twin to the served weights: every answer is of one version. The
//! host keeps the weights of the version that is served, as the mapped file and the tensors that differ from it, so that a device that
//! failed is replaced by another with the same version; only steps that were not published are lost.
//!
//! Whoever owns a [`Live`] is the one thread that uses the device. Training is cut into pieces ([`Live::advance`]) for it to put between
//! batches of inference; compiling ([`Compilation`]) and writing checkpoints ([`Snapshot`]) may go to other threads.

mod checkpoints;
mod device;
mod job;
mod program;
mod share;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use glob::Pattern;
use meganeura_autodiff::Optimizer;
use meganeura_codegen::Program;
use meganeura_import::{Bindings, ImportOptions, RANDOM_KEY};
use meganeura_ir::{DType, ParameterId, SampleDependence, Tensor};
use meganeura_runtime::{Device, DeviceError, ParameterStore, Session};

use crate::data::{Dataset, Samples, widens};
use crate::error::Error;
use crate::evaluator::{Evaluation, Evaluator};
use crate::model::Model;
use crate::objective::Objective;
use crate::predictor::{place_weights, random_input, write_weights};
use crate::prefix::PrefixCache;
use crate::selection::{self, Selection};
use crate::trainer;
use checkpoints::Folder;
use job::Job;
use program::{CompiledKind, Compiler, InferenceProgram, Recent, TrainingProgram, Wanted};
use share::Share;

pub use checkpoints::{Saved, Snapshot};
pub use device::DeviceSource;
pub use job::{Outcome, Rejection, TrainReport, TrainRequest};
pub use program::{Compilation, Compiled, InputShapes};

/// What is particular to a live model.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    #[error("the model is served without training")]
    NoTraining,
    #[error("a training request is in progress")]
    Busy,
    #[error("{setting} is {value}, {expected} is needed")]
    Setting { setting: &'static str, value: f64, expected: &'static str },
    #[error("the model is served without an evaluation set")]
    NoEvaluation,
    #[error("the model is served without a folder for checkpoints")]
    NoFolder,
    #[error("the checkpoint {} belongs to another model: {difference}", path.display())]
    ForeignCheckpoint { path: PathBuf, difference: String },
}

/// How a model is served.
#[derive(Clone, Debug)]
pub struct LiveOptions {
    pub import: ImportOptions,
    /// Sizes that requests do not decide, and the phase of training steps. Inference is always in inference.
    pub bindings: Bindings,
    /// Inference programs to keep, one for each set of input shapes.
    pub specializations: usize,
    /// Decides all random numbers.
    pub seed: u64,
    /// Absent where the model is not to be trained.
    pub training: Option<LiveTraining>,
    /// The folder of this model's checkpoints. The newest one is what is served.
    pub checkpoints: Option<PathBuf>,
    /// Checkpoints that stay, at least one.
    pub keep: usize,
}

impl Default for LiveOptions {
    /// Inference in eight shapes.
    fn default() -> Self {
        LiveOptions {
            import: ImportOptions::default(),
            bindings: Bindings::default(),
            specializations: 8,
            seed: 0,
            training: None,
            checkpoints: None,
            keep: 3,
        }
    }
}

/// How a model is trained while it is served.
#[derive(Clone, Debug)]
pub struct LiveTraining {
    /// The share of the time, of 0 to 1, that training gets while there are requests. Without any for a while it gets all.
    pub share: f64,
    /// Which weights train: those with a matching name. All that train by default where this is empty.
    pub train: Vec<Pattern>,
    /// Which of those do not train after all.
    pub freeze: Vec<Pattern>,
    /// The largest Euclidean norm of all gradients together; larger ones are scaled down to it.
    pub clip: Option<f64>,
    /// Training programs to keep, at least two.
    pub specializations: usize,
    /// Judges what training made before it is published.
    pub evaluation: Option<EvaluationSet>,
}

impl Default for LiveTraining {
    /// Half of the time, every weight, two programs, no evaluation.
    fn default() -> Self {
        LiveTraining { share: 0.5, train: Vec::new(), freeze: Vec::new(), clip: None, specializations: 2, evaluation: None }
    }
}

/// Data on which the loss must not rise.
#[derive(Clone, Debug)]
pub struct EvaluationSet {
    pub data: Dataset,
    pub objective: Objective,
    /// Samples per batch. Without it, what the model's inputs fix, else 32; at most what the data holds.
    pub batch: Option<usize>,
    /// By which part of itself the loss may rise over that of the version before.
    pub tolerance: f64,
}

/// The outputs of the model, and the version of the weights that all of them were computed with.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// In the order of the model's outputs.
    pub outputs: Vec<(String, Tensor)>,
    /// For each output, how it depends on the samples, where the first axis of every input counts them.
    pub samples: Arc<[SampleDependence]>,
    pub version: u64,
}

/// What [`Live::rollback`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollback {
    /// The new version, which has the weights of an older one.
    pub version: u64,
    /// The version of the checkpoint; absent where there is none, and the weights are those that were served first.
    pub checkpoint: Option<u64>,
    /// Whether a training request was in progress, and was given up.
    pub interrupted: bool,
}

/// Where a live model stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    pub version: u64,
    /// Training steps so far, published or not.
    pub steps: u64,
    pub training: bool,
    /// The loss of the served version on the evaluation set, where it was evaluated.
    pub evaluation: Option<f64>,
    pub inference_programs: usize,
    pub training_programs: usize,
    /// Bytes of device memory that weights take, in both versions.
    pub parameter_bytes: u64,
}

/// A model that answers and learns.
pub struct Live {
    /// What the weights differ from.
    model: Arc<Model>,
    options: LiveOptions,
    devices: Arc<DeviceSource>,
    folder: Option<Folder>,
    problems: Vec<String>,
    /// Names of the weights that train.
    trained: Vec<String>,
    /// The weights of the served version that differ from the model's, as f32.
    changed: Arc<BTreeMap<String, Tensor>>,
    version: u64,
    share: Share,
    steps: u64,
    /// Before the programs' owner, the device: sessions are dropped first.
    inference: Recent<InferenceProgram>,
    training: Recent<TrainingProgram>,
    job: Option<Job>,
    on_device: Option<OnDevice>,
}

/// What exists on the device that is open now, besides sessions.
struct OnDevice {
    device: Arc<Device>,
    served: Option<Arc<ParameterStore>>,
    twin: Option<Twin>,
}

/// The weights in training.
struct Twin {
    evaluator: Option<Evaluator>,
    store: Arc<ParameterStore>,
    /// The optimiser whose state the training sessions share, and its steps.
    optimizer: Option<Optimizer>,
    steps: u64,
    /// The evaluation loss of the served version.
    accepted: Option<f64>,
}

impl Live {
    /// Opens a model, or its newest checkpoint where there is one. Nothing is on the device yet.
    ///
    /// # Errors
    /// The file cannot be opened, the newest checkpoint is of another model, the folder cannot be used, or an option is out of range.
    pub fn open(path: impl AsRef<Path>, options: LiveOptions, devices: Arc<DeviceSource>) -> Result<Self, Error> {
        let mut model = Model::open_with(path, &options.import)?;
        let (mut version, mut problems) = (0, Vec::new());
        let folder = options.checkpoints.as_deref().map(|path| Folder::create(path, options.keep)).transpose()?;
        if let Some(folder) = &folder {
            let newest = folder.newest(&model, &options.import)?;
            problems = newest.problems;
            if let Some((number, found)) = newest.found {
                (version, model) = (number, found);
            }
        }
        // What is served, trained and kept is the weights as they act.
        model.merge_adapters()?;
        let (mut share, mut trained) = (Share::new(0.0), Vec::new());
        if let Some(training) = &options.training {
            check_setting("the share of training", training.share, "a number of 0 to 1", |v| (0.0..=1.0).contains(&v))?;
            if let Some(set) = &training.evaluation {
                check_setting("the tolerance of the evaluation", set.tolerance, "a number of at least 0", |v| v >= 0.0)?;
                set.batch(&model, &options.bindings)?;
            }
            share = Share::new(training.share);
            trained = selection::trained(&model, &[], Selection { train: &training.train, freeze: &training.freeze })?;
        }
        let programs = options.training.as_ref().map_or(1, |training| training.specializations);
        Ok(Live {
            model: Arc::new(model),
            devices,
            folder,
            problems,
            trained,
            changed: Arc::default(),
            version,
            share,
            steps: 0,
            inference: Recent::new(options.specializations),
            // With one, a batch of another size would lose the state of the optimiser.
            training: Recent::new(programs.max(2)),
            job: None,
            on_device: None,
            options,
        })
    }

    /// The model; its weights may differ from those that are served.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The version that is served. Every publication makes it larger; it counts on from that of the checkpoint.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What is wrong with checkpoints that are newer than the one being served.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    pub fn status(&self) -> Status {
        let on_device = self.on_device.as_ref();
        let twin = on_device.and_then(|d| d.twin.as_ref());
        let stores = on_device.into_iter().flat_map(|d| d.served.iter().chain(twin.map(|twin| &twin.store)));
        Status {
            version: self.version,
            steps: self.steps,
            training: self.job.is_some(),
            evaluation: twin.and_then(|twin| twin.accepted),
            inference_programs: self.inference.len(),
            training_programs: self.training.len(),
            parameter_bytes: stores.map(|store| store.bytes()).sum(),
        }
    }

    /// The program that inference of these shapes needs and that is not there yet. Without it, [`Live::infer`] compiles.
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn missing_inference(&mut self, shapes: &InputShapes) -> Result<Option<Compilation>, Error> {
        match self.inference.find(|program| program.shapes == *shapes) {
            Some(_) => Ok(None),
            None => Ok(Some(Compilation { compiler: self.compiler()?, wanted: Wanted::Inference(shapes.clone()) })),
        }
    }

    /// Keeps a program that was compiled. The least recently used one may be forgotten for it.
    pub fn install(&mut self, compiled: Compiled) {
        match compiled.0 {
            CompiledKind::Inference(program) => {
                if self.inference.find(|p| p.shapes == program.shapes).is_none() {
                    self.inference.touch(&program);
                }
            }
            CompiledKind::Training(program) => {
                if self.training.find(|p| p.key == program.key).is_none() {
                    self.training.touch(&program);
                }
            }
        }
    }

    /// Runs the model on inputs of any sizes that it takes; those that widen to the dtype of the graph are cast.
    ///
    /// # Errors
    /// An input is missing, unknown or does not fit; the device fails or has no memory left ([`Error::device`]). After a failure the next
    /// call opens the device again, with the weights of the same version.
    pub fn infer(&mut self, inputs: &[(&str, &Tensor)]) -> Result<Answer, Error> {
        let sized = inputs.iter().filter(|(name, _)| *name != RANDOM_KEY);
        let shapes: InputShapes = sized.map(|(name, tensor)| ((*name).to_string(), tensor.shape().to_vec())).collect();
        let answer = match self.try_infer(&shapes, inputs) {
            // What other shapes hold may be what is missing.
            Err(error) if error.device().is_some_and(|e| e.is_out_of_memory()) && self.is_alive() => {
                self.inference.close();
                self.try_infer(&shapes, inputs)
            }
            result => result,
        };
        self.share.inferred(Instant::now());
        self.settled(answer)
    }

    fn try_infer(&mut self, shapes: &InputShapes, inputs: &[(&str, &Tensor)]) -> Result<Answer, Error> {
        let compiled = self.inference_program(shapes)?;
        let program = &compiled.program;
        let (device, store) = self.served(program)?;
        let entry = self.inference.touch(&compiled);
        let session = match entry.session.take() {
            Some(session) => session,
            None => Session::new(&device, program.clone(), &store)?,
        };
        let session = entry.session.insert(session);
        let dtype = |name: &str| program.inputs.iter().find(|input| input.name == name).map(|input| input.ty.dtype);
        let cast = |(name, tensor): &(&str, &Tensor)| {
            let to = dtype(name).filter(|&to| to != tensor.dtype() && widens(tensor.dtype(), to))?;
            Some(((*name).to_string(), tensor.cast(to)))
        };
        let mut own: Vec<(String, Tensor)> = inputs.iter().filter_map(cast).collect();
        if !inputs.iter().any(|(name, _)| *name == RANDOM_KEY) {
            own.extend(random_input(program, self.options.seed, 0));
        }
        let given = inputs.iter().copied().filter(|(name, _)| !own.iter().any(|(cast, _)| cast == name));
        let inputs: Vec<(&str, &Tensor)> = given.chain(own.iter().map(|(name, tensor)| (name.as_str(), tensor))).collect();
        let outputs = session.run(&inputs)?;
        let outputs = program.outputs.iter().map(|output| output.name.clone()).zip(outputs).collect();
        Ok(Answer { outputs, samples: compiled.samples.clone(), version: self.version })
    }

    /// The program for inputs of these shapes.
    fn inference_program(&mut self, shapes: &InputShapes) -> Result<Arc<InferenceProgram>, Error> {
        if let Some(program) = self.inference.find(|p| p.shapes == *shapes) {
            return Ok(program.clone());
        }
        let compiled = self.compiler()?.inference(shapes.clone())?;
        self.inference.touch(&compiled);
        Ok(compiled)
    }

    /// The weights that are served, for a checkpoint. It takes nothing from the device.
    ///
    /// # Errors
    /// There is no folder for checkpoints.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        let folder = self.folder.clone().ok_or(LiveError::NoFolder)?;
        Ok(Snapshot { model: self.model.clone(), changed: self.changed.clone(), version: self.version, folder })
    }

    /// Writes a checkpoint of the weights that are served, see [`Snapshot::save`].
    ///
    /// # Errors
    /// There is no folder for checkpoints, or it cannot be written.
    pub fn checkpoint(&self) -> Result<Saved, Error> {
        self.snapshot()?.save()
    }

    /// Publishes the weights of the newest checkpoint as a new version; those that were served first where there is none. Training begins
    /// anew, without the state of the optimiser.
    ///
    /// # Errors
    /// The folder cannot be read, or the checkpoint is of another model; nothing changes then. Where the device fails, it is opened again with
    /// the new version.
    pub fn rollback(&mut self) -> Result<Rollback, Error> {
        let mut checkpoint = None;
        if let Some(folder) = &self.folder {
            let newest = folder.newest(&self.model, &self.options.import)?;
            self.problems = newest.problems;
            if let Some((number, model)) = newest.found {
                checkpoint = Some(number);
                self.model = Arc::new(model);
            }
        }
        self.changed = Arc::default();
        self.version += 1;
        let interrupted = self.job.take().is_some();
        // What is on the device after an error is of no version.
        self.restore().inspect_err(|_| self.close_device())?;
        Ok(Rollback { version: self.version, checkpoint, interrupted })
    }

    /// Gives what is on the device the weights of the host.
    fn restore(&mut self) -> Result<(), Error> {
        let Some(on_device) = self.on_device.as_mut().filter(|d| !d.device.is_dead()) else { return Ok(()) };
        let Some(served) = &on_device.served else { return Ok(()) };
        write_weights(&self.model, &[], served)?;
        write_changed(served, &self.changed)?;
        let Some(twin) = &mut on_device.twin else { return Ok(()) };
        twin.accepted = None;
        let names: Vec<&str> = self.model.parameters().iter().map(|p| p.name.as_str()).collect();
        let known = |name: &&str| served.parameters().iter().any(|p| p.name == **name);
        twin.store.copy_from(served, names.into_iter().filter(known))?;
        self.clear_optimizer()
    }

    /// Runs the evaluation set on the weights that are served.
    ///
    /// # Errors
    /// The model is served without an evaluation set, a training request is in progress, or the device fails.
    pub fn evaluate(&mut self) -> Result<Evaluation, Error> {
        if self.job.is_some() {
            return Err(LiveError::Busy.into());
        }
        let evaluated = self.try_evaluate();
        self.settled(evaluated)
    }

    fn try_evaluate(&mut self) -> Result<Evaluation, Error> {
        let set = self.options.training.as_ref().and_then(|training| training.evaluation.as_ref());
        let shapes = set.ok_or(LiveError::NoEvaluation)?.batch(&self.model, &self.options.bindings)?.1;
        let program = self.inference_program(&shapes)?;
        // Without a request in progress the twin holds what is served.
        let twin = self.twin(&program.program)?;
        let evaluation = twin.evaluator.as_mut().ok_or(LiveError::NoEvaluation)?.run()?;
        twin.accepted = Some(evaluation.loss);
        Ok(evaluation)
    }

    /// Takes everything off the device, so that it can be opened again. The host keeps the version that is served; a training request in
    /// progress begins anew.
    pub fn close_device(&mut self) {
        self.inference.close();
        self.training.close();
        self.on_device = None;
    }

    /// Forgets the weights in training.
    fn close_twin(&mut self) {
        self.training.close();
        if let Some(on_device) = &mut self.on_device {
            on_device.twin = None;
        }
    }

    fn is_alive(&self) -> bool {
        self.on_device.as_ref().is_some_and(|d| !d.device.is_dead())
    }

    /// Leaves the device where it is dead: that gives back what it holds.
    fn settled<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if result.is_err() && !self.is_alive() {
            self.job = None;
            self.close_device();
        }
        result
    }

    fn compiler(&mut self) -> Result<Compiler, Error> {
        let profile = self.devices.current()?.profile().clone();
        Ok(Compiler { model: self.model.clone(), profile, bindings: self.options.bindings.clone() })
    }

    /// Makes sure that the device is open and alive.
    fn open_device(&mut self) -> Result<(), Error> {
        if self.on_device.as_ref().is_some_and(|d| d.device.is_dead()) {
            self.job = None;
            self.close_device();
        }
        let device = self.devices.current()?;
        match &self.on_device {
            Some(open) if Arc::ptr_eq(&open.device, &device) => {}
            _ => {
                self.job = None;
                self.close_device();
                self.on_device = Some(OnDevice { device, served: None, twin: None });
            }
        }
        Ok(())
    }

    /// The device, and the weights of the served version on it, in the layout of `program`.
    fn served(&mut self, program: &Program) -> Result<(Arc<Device>, Arc<ParameterStore>), Error> {
        self.open_device()?;
        let Some(on_device) = &mut self.on_device else { return Err(DeviceError::Dead.into()) };
        let store = match &on_device.served {
            Some(store) => store.clone(),
            None => {
                let store = place_weights(&self.model, &[], &on_device.device, program)?;
                write_changed(&store, &self.changed)?;
                on_device.served.insert(store).clone()
            }
        };
        Ok((on_device.device.clone(), store))
    }

    /// The weights in training, with the evaluation of them.
    fn twin(&mut self, program: &Program) -> Result<&mut Twin, Error> {
        let (_, served) = self.served(program)?;
        let Some(on_device) = &mut self.on_device else { return Err(DeviceError::Dead.into()) };
        let twin = match on_device.twin.take() {
            Some(twin) => twin,
            None => {
                let store = served.twin()?;
                let set = self.options.training.as_ref().and_then(|training| training.evaluation.as_ref());
                let bindings = &self.options.bindings;
                let evaluator = set.map(|set| set.evaluator(&self.model, &store, bindings)).transpose()?;
                Twin { evaluator, store, optimizer: None, steps: 0, accepted: None }
            }
        };
        Ok(on_device.twin.insert(twin))
    }

    fn clear_optimizer(&mut self) -> Result<(), Error> {
        if let Some(twin) = self.on_device.as_mut().and_then(|d| d.twin.as_mut()) {
            twin.steps = 0;
        }
        // All share the state, if there is any.
        if let Some(session) = self.training.sessions().next() {
            session.clear_optimizer()?;
        }
        Ok(())
    }
}

impl EvaluationSet {
    /// Samples per batch, and the shapes of the inputs then.
    fn batch(&self, model: &Model, bindings: &Bindings) -> Result<(usize, InputShapes), Error> {
        let inputs = model.bound_inputs(bindings);
        let samples = Samples::bind(&self.data, &inputs, self.objective.data_target())?;
        let batch = trainer::batch_size(&inputs, &samples, self.batch)?;
        Ok((batch, samples.shapes(Some(batch))))
    }

    fn evaluator(&self, model: &Model, store: &Arc<ParameterStore>, bindings: &Bindings) -> Result<Evaluator, Error> {
        let (batch, _) = self.batch(model, bindings)?;
        let unfrozen = (PrefixCache::Off, [].as_slice(), [].as_slice());
        Evaluator::new(model, store, &self.data, &self.objective, None, batch, bindings, unfrozen)
    }
}

/// Writes values that differ from the model's.
fn write_changed(store: &ParameterStore, changed: &BTreeMap<String, Tensor>) -> Result<(), Error> {
    let id = |name: &str| store.parameters().iter().find(|p| p.name == name).map(|p| p.id);
    let values: Vec<(ParameterId, &Tensor)> = changed.iter().filter_map(|(name, tensor)| Some((id(name)?, tensor))).collect();
    debug_assert!(changed.values().all(|tensor| tensor.dtype() == DType::F32));
    Ok(store.write_parameters(&values)?)
}

fn check_setting(setting: &'static str, value: f64, expected: &'static str, fits: impl Fn(f64) -> bool) -> Result<(), LiveError> {
    if fits(value) { Ok(()) } else { Err(LiveError::Setting { setting, value, expected }) }
}
