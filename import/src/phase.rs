//! Layers that act differently in training: what they do, and what they need beside their operands.

use std::collections::{BTreeMap, BTreeSet};

use meganeura_ir::{Graph, GraphError, NodeId, Op, ParameterId, Shape, random_key_type};

/// The input that random numbers depend on, of the type [`random_key_type`]. A specialisation has it if it draws any.
pub const RANDOM_KEY: &str = "random/key";

/// Whether a layer acts as in training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// As each node of the file says.
    #[default]
    File,
    Train,
    /// As in inference.
    Off,
}

impl Mode {
    /// Whether a node trains, of which the file says `in_file`.
    pub(crate) fn trains(self, in_file: bool) -> bool {
        match self {
            Mode::File => in_file,
            Mode::Train => true,
            Mode::Off => false,
        }
    }
}

/// What the layers do that act differently in training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// In training, Dropout drops elements at random.
    pub dropout: Mode,
    /// In training, BatchNormalization normalises by the statistics of the batch, and the running statistics follow them: the variance
    /// by the biased one of the batch, as the standard says. Otherwise it is affine.
    pub batch_norm: Mode,
}

impl Phase {
    /// Inference, whatever the file says.
    pub const INFERENCE: Phase = Phase { dropout: Mode::Off, batch_norm: Mode::Off };
}

/// What the rules of a specialisation share.
#[derive(Debug, Default)]
pub(crate) struct PhaseState {
    pub phase: Phase,
    key: Option<NodeId>,
    /// Random tensors so far.
    streams: u32,
    /// By parameter: what it holds after the run.
    statistics: BTreeMap<NodeId, NodeId>,
    /// Kinds of nodes that train, or do not, against what the file says.
    pub overridden: BTreeSet<(&'static str, bool)>,
}

impl PhaseState {
    /// New random numbers.
    pub fn uniform(&mut self, graph: &mut Graph, shape: Shape) -> Result<NodeId, GraphError> {
        let key = match self.key {
            Some(key) => key,
            None => graph.input(RANDOM_KEY, random_key_type())?,
        };
        self.key = Some(key);
        let stream = self.streams;
        self.streams += 1;
        graph.push(Op::RandomUniform { shape, stream }, &[key])
    }

    /// What a running statistic is after the layers so far.
    pub fn statistic(&self, running: NodeId) -> NodeId {
        self.statistics.get(&running).copied().unwrap_or(running)
    }

    /// Makes a run replace `running`, if that is a parameter; whether it is.
    pub fn move_statistic(&mut self, graph: &Graph, running: NodeId, moved: NodeId) -> bool {
        let is_parameter = matches!(graph.node(running).op, Op::Parameter(_));
        if is_parameter {
            self.statistics.insert(running, moved);
        }
        is_parameter
    }

    /// The statistics that a run moves, with their values after it.
    pub fn moved(&self, graph: &Graph) -> Vec<(ParameterId, NodeId)> {
        let of = |(running, moved): (&NodeId, &NodeId)| match graph.node(*running).op {
            Op::Parameter(parameter) => Some((parameter, *moved)),
            _ => None,
        };
        self.statistics.iter().filter_map(of).collect()
    }
}
