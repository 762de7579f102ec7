//! LoRA: low-rank adapters of a model's weights, which train in their place.
//!
//! An adapted model is a model whose weights are `W + alpha / rank * B A`: so it runs, and so it leaves as ONNX. Only a [`Trainer`] sees the
//! weight and the factors apart.
//!
//! [`Trainer`]: crate::Trainer

use std::fmt;
use std::str::FromStr;

use glob::Pattern;
use meganeura_autodiff::{LowRank, MatrixError, WeightMatrix, attach_low_rank, weight_matrices};
use meganeura_import::Attachments;
use meganeura_ir::{DType, Graph, ParameterId, ParameterRole, Shape, Tensor, TensorType};
use serde::{Deserialize, Serialize};

use crate::data::SplitMix64;
use crate::error::Error;
use crate::model::Model;
use crate::trainer::TrainOptions;

/// The largest rank: above it an adapter is no smaller than any weight.
const MAX_RANK: usize = 1 << 16;
/// Elements that the factors of an adapter may have, even if their weight has fewer.
const SMALL: usize = 1 << 20;
/// Weights that a message lists.
const LISTED: usize = 12;

/// Which weights get adapters, and which. Of several that match a weight, the first counts.
///
/// On the command line `GLOB:rank=R,alpha=A`; without `alpha` the adapter is not scaled.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    pub pattern: Pattern,
    /// Columns of `B` and rows of `A`.
    pub rank: usize,
    /// `B A` counts `alpha / rank` times.
    pub alpha: f64,
}

impl FromStr for LoraOptions {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write GLOB:rank=R,alpha=A, for instance *.q_proj.weight:rank=8,alpha=16";
        let (pattern, settings) = text.rsplit_once(':').ok_or(FORM)?;
        let pattern = Pattern::new(pattern).map_err(|e| format!("{pattern:?}: {e}"))?;
        let (mut rank, mut alpha) = (None, None);
        for setting in settings.split(',') {
            match setting.split_once('=').ok_or(FORM)? {
                ("rank", value) => rank = Some(checked_rank(value)?),
                ("alpha", value) => {
                    let found = value.trim().parse::<f64>().ok().filter(|alpha| alpha.is_finite());
                    alpha = Some(found.ok_or_else(|| format!("{value:?} is not a number"))?);
                }
                (key, _) => return Err(format!("an adapter has no setting {key:?}: {FORM}")),
            }
        }
        let rank = rank.ok_or(FORM)?;
        Ok(LoraOptions { pattern, rank, alpha: alpha.unwrap_or(rank as f64) })
    }
}

impl fmt::Display for LoraOptions {
    /// As on the command line.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:rank={},alpha={}", self.pattern, self.rank, self.alpha)
    }
}

fn checked_rank(text: &str) -> Result<usize, String> {
    let rank = text.trim().parse().ok().filter(|rank| (1..=MAX_RANK).contains(rank));
    rank.ok_or_else(|| format!("{text:?} is not a rank from 1 to {MAX_RANK}"))
}

/// Why adapters cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoraError {
    #[error("no parameter matches {pattern:?}; adapters can be had for {}", list(candidates))]
    NoMatch { pattern: String, candidates: Vec<String> },
    #[error("{pattern:?} matches {name:?}, which can have no adapter: {reason}; adapters can be had for {}", list(candidates))]
    NoMatrix { pattern: String, name: String, reason: MatrixError, candidates: Vec<String> },
    #[error("{pattern:?} matches {name:?}, which is no weight: it is {reason}; adapters can be had for {}", list(candidates))]
    NoWeight { pattern: String, name: String, reason: &'static str, candidates: Vec<String> },
    #[error("the rank {0} of an adapter is not from 1 to {MAX_RANK}")]
    Rank(usize),
    #[error("an adapter of rank {rank} has {elements} elements, its weight {name:?} only {weight}: choose a lower rank")]
    TooLarge { name: String, rank: usize, elements: usize, weight: usize },
    #[error(
        "the model has adapters already: train on without new ones, or make them part of its weights first (export --safetensors)"
    )]
    Adapted,
    #[error("{0:?} has an adapter, so that its size cannot change")]
    AdaptedHead(String),
    #[error("the adapters in the file are damaged: {0}")]
    Damaged(String),
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none of this model".to_owned(),
        _ => {
            let first: Vec<String> = names.iter().take(LISTED).map(|name| format!("{name:?}")).collect();
            let more = names.len().saturating_sub(LISTED);
            first.join(", ") + &(if more > 0 { format!(" and {more} more") } else { String::new() })
        }
    }
}

/// The adapter of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    weight: String,
    rank: usize,
    alpha: f64,
    matrix: WeightMatrix,
    a: Tensor,
    b: Tensor,
}

impl Adapter {
    /// The name of the weight.
    pub fn weight(&self) -> &str {
        &self.weight
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// The layer of the weight, as PyTorch names layers: the name of the weight without `.weight`.
    pub fn module(&self) -> &str {
        self.weight.strip_suffix(".weight").unwrap_or(&self.weight)
    }

    /// Rows and columns of the weight.
    pub fn matrix(&self) -> &WeightMatrix {
        &self.matrix
    }

    /// The names of the factors A, `[rank, columns]`, and B, `[rows, rank]`, and their values.
    pub fn factors(&self) -> [(String, &Tensor); 2] {
        [(format!("{}.lora_A.weight", self.module()), &self.a), (format!("{}.lora_B.weight", self.module()), &self.b)]
    }

    /// Weight, rank and alpha, as `--lora` has them.
    pub fn describe(&self) -> String {
        format!("{}:rank={},alpha={}", self.weight, self.rank, self.alpha)
    }

    fn factor_mut(&mut self, name: &str) -> Option<&mut Tensor> {
        let position = self.factors().iter().position(|(factor, _)| factor == name)?;
        Some(if position == 0 { &mut self.a } else { &mut self.b })
    }

    fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// `weight + alpha / rank * B A`, in the dtype of the weight.
    fn merged(&self, weight: &Tensor) -> Tensor {
        let product = self.matrix.product(self.rank, &self.a.to_f64_vec(), &self.b.to_f64_vec());
        let values = weight.to_f64_vec().into_iter().zip(product).map(|(w, p)| w + self.scale() * p);
        Tensor::from_f64(weight.dtype(), weight.shape().clone(), &values.collect::<Vec<_>>())
    }

    /// As PEFT begins: `A` is uniform between `-1 / sqrt(columns)` and `1 / sqrt(columns)`, which is `kaiming_uniform_` with `a = sqrt(5)`;
    /// `B` is zero. An adapter begins the same whichever others there are.
    fn initial(weight: &str, options: &LoraOptions, matrix: WeightMatrix, seed: u64) -> Self {
        let (a, b) = (matrix.a_shape(options.rank), matrix.b_shape(options.rank));
        let bound = 1.0 / (matrix.fan_in().max(1) as f64).sqrt();
        let mut random = SplitMix64(SplitMix64(seed).next() ^ fnv1a(weight));
        let values: Vec<f64> = (0..a.numel()).map(|_| random.symmetric(bound)).collect();
        Adapter {
            weight: weight.to_owned(),
            rank: options.rank,
            alpha: options.alpha,
            a: Tensor::from_f64(DType::F32, a, &values),
            b: Tensor::zeros(TensorType::new(DType::F32, b)),
            matrix,
        }
    }
}

/// The hash of Fowler, Noll and Vo, which is the same everywhere.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The adapters that train with `options`: new ones of the weights in `graph`, a specialisation of `model`, or those that it has.
pub(crate) fn adapters(model: &Model, graph: &Graph, options: &TrainOptions) -> Result<Vec<Adapter>, Error> {
    match options.lora.as_slice() {
        [] => Ok(model.adapters().to_vec()),
        lora => new_adapters(model, graph, lora, options.seed),
    }
}

/// New adapters of the weights in `graph`, a specialisation of `model`, that the options name, in the order of the model.
fn new_adapters(model: &Model, graph: &Graph, options: &[LoraOptions], seed: u64) -> Result<Vec<Adapter>, Error> {
    if !model.adapters().is_empty() {
        return Err(LoraError::Adapted.into());
    }
    let matrices = weight_matrices(graph);
    let matrix = |name: &str| {
        let found = graph.parameter_id(name).and_then(|id| matrices.get(&id));
        found.cloned().unwrap_or(Err(MatrixError::NoProduct(Vec::new())))
    };
    let weights = model.parameters().iter().filter(|p| p.role == ParameterRole::Weight);
    let candidates = || weights.clone().filter(|p| matrix(&p.name).is_ok()).map(|p| p.name.clone()).collect();
    for LoraOptions { pattern, rank, .. } in options {
        if !(1..=MAX_RANK).contains(rank) {
            return Err(LoraError::Rank(*rank).into());
        }
        let mut matching = model.parameters().iter().filter(|p| pattern.matches(&p.name)).peekable();
        let pattern = pattern.as_str().to_owned();
        if matching.peek().is_none() {
            return Err(LoraError::NoMatch { pattern, candidates: candidates() }.into());
        }
        for parameter in matching {
            let name = parameter.name.clone();
            if parameter.role != ParameterRole::Weight {
                let reason = parameter.reason;
                return Err(LoraError::NoWeight { pattern, name, reason, candidates: candidates() }.into());
            }
            if let Err(reason) = matrix(&name) {
                return Err(LoraError::NoMatrix { pattern, name, reason, candidates: candidates() }.into());
            }
        }
    }
    let mut adapters = Vec::new();
    for parameter in model.parameters() {
        let Some(option) = options.iter().find(|option| option.pattern.matches(&parameter.name)) else { continue };
        if let Ok(matrix) = matrix(&parameter.name) {
            let (rank, weight) = (option.rank, parameter.shape.numel());
            let sizes = [matrix.a_shape(rank), matrix.b_shape(rank)].map(|shape| shape.checked_numel().unwrap_or(usize::MAX));
            let elements = sizes[0].saturating_add(sizes[1]);
            if elements > SMALL.max(weight) {
                return Err(LoraError::TooLarge { name: parameter.name.clone(), rank, elements, weight }.into());
            }
            adapters.push(Adapter::initial(&parameter.name, option, matrix, seed));
        }
    }
    Ok(adapters)
}

/// The graph of a model with the factors of its adapters as further parameters.
pub(crate) fn attach(graph: Graph, adapters: &[Adapter]) -> Result<Graph, Error> {
    if adapters.is_empty() {
        return Ok(graph);
    }
    let low_rank = |adapter: &Adapter| {
        let [(a, _), (b, _)] = adapter.factors();
        let weight: ParameterId =
            graph.parameter_id(&adapter.weight).ok_or_else(|| Error::UnknownParameter(adapter.weight.clone()))?;
        Ok(LowRank { weight, matrix: adapter.matrix.clone(), rank: adapter.rank, scale: adapter.scale(), a, b })
    };
    let low_rank = adapters.iter().map(low_rank).collect::<Result<Vec<_>, Error>>()?;
    Ok(attach_low_rank(&graph, &low_rank)?)
}

/// The adapters of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Adaptation {
    pub adapters: Vec<Adapter>,
    /// Parameters of the file that have changed with them.
    pub trained: Vec<String>,
}

/// An [`Adaptation`] in the metadata of an artifact; the factors are tensors of it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    adapters: Vec<AdapterRecord>,
    trained: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct AdapterRecord {
    weight: String,
    rank: usize,
    alpha: f64,
    /// Axes of the weight.
    rows: Vec<usize>,
    /// Of the convolution whose kernel the weight is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    groups: Option<usize>,
    #[serde(default)]
    other_readers: bool,
}

impl Adaptation {
    /// What the artifact of a model holds.
    ///
    /// # Errors
    /// [`LoraError::Damaged`] where that is not what [`Adaptation::attachments`] made.
    pub fn read(model: &meganeura_import::Model) -> Result<Self, LoraError> {
        let Some(description) = model.attached_description() else { return Ok(Adaptation::default()) };
        let record: Record = serde_json::from_str(description).map_err(|e| LoraError::Damaged(e.to_string()))?;
        let adapters = record.adapters.into_iter().map(|adapter| read_adapter(model, adapter)).collect::<Result<Vec<_>, _>>()?;
        let twice = |(i, adapter): (usize, &Adapter)| adapters.iter().take(i).any(|earlier| earlier.weight == adapter.weight);
        if adapters.iter().enumerate().any(twice) {
            return Err(LoraError::Damaged("a weight has two adapters".to_owned()));
        }
        Ok(Adaptation { adapters, trained: record.trained })
    }

    /// What an artifact is to hold.
    pub fn attachments(&self) -> Result<Attachments, LoraError> {
        if self.adapters.is_empty() {
            return Ok(Attachments::default());
        }
        let record = |adapter: &Adapter| AdapterRecord {
            weight: adapter.weight.clone(),
            rank: adapter.rank,
            alpha: adapter.alpha,
            rows: adapter.matrix.rows().to_vec(),
            groups: adapter.matrix.groups(),
            other_readers: adapter.matrix.has_other_readers(),
        };
        let record = Record { adapters: self.adapters.iter().map(record).collect(), trained: self.trained.clone() };
        let description = serde_json::to_string(&record).map_err(|e| LoraError::Damaged(e.to_string()))?;
        let factors = self.adapters.iter().flat_map(Adapter::factors).map(|(name, tensor)| (name, tensor.clone()));
        Ok(Attachments { description: Some(description), tensors: factors.collect() })
    }

    /// The factor of that name.
    pub fn factor(&self, name: &str) -> Option<&Tensor> {
        self.adapters.iter().flat_map(Adapter::factors).find(|(factor, _)| factor == name).map(|(_, tensor)| tensor)
    }

    /// Replaces the factor of that name, which must be of the type of `value`.
    pub fn set_factor(&mut self, name: &str, value: Tensor) {
        if let Some(factor) = self.adapters.iter_mut().find_map(|adapter| adapter.factor_mut(name)) {
            *factor = value;
        }
    }

    /// A weight with its adapter, where it has one.
    pub fn merged(&self, name: &str, weight: Tensor) -> Tensor {
        match self.adapters.iter().find(|adapter| adapter.weight == name) {
            Some(adapter) => adapter.merged(&weight),
            None => weight,
        }
    }
}

fn read_adapter(model: &meganeura_import::Model, record: AdapterRecord) -> Result<Adapter, LoraError> {
    let AdapterRecord { weight, rank, alpha, rows, groups, other_readers } = record;
    let damaged = |what: &str| LoraError::Damaged(format!("the adapter of {weight:?}: {what}"));
    let shape = model.parameter(&weight).map(|p| p.shape.clone()).ok_or_else(|| damaged("the model has no such weight"))?;
    let matrix = WeightMatrix::new(shape, rows, groups).ok_or_else(|| damaged("its rows are not axes of the weight"))?;
    let matrix = matrix.with_other_readers(other_readers);
    if !(1..=MAX_RANK).contains(&rank) || !alpha.is_finite() {
        return Err(damaged("its rank or alpha is out of range"));
    }
    let empty = Tensor::zeros(TensorType::new(DType::F32, [0]));
    let mut adapter = Adapter { weight: weight.clone(), rank, alpha, a: empty.clone(), b: empty, matrix };
    let [(a, _), (b, _)] = adapter.factors();
    let factor = |name: &str, shape: Shape| {
        let found = model.attached(name).filter(|tensor| *tensor.ty() == TensorType::new(DType::F32, shape));
        found.ok_or_else(|| damaged(&format!("the tensor {name:?} is missing or of another type")))
    };
    let (a, b) = (factor(&a, adapter.matrix.a_shape(rank))?, factor(&b, adapter.matrix.b_shape(rank))?);
    (adapter.a, adapter.b) = (a, b);
    Ok(adapter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> LoraOptions {
        text.parse().unwrap()
    }

    #[test]
    fn settings_are_read_and_wrong_ones_named() {
        let LoraOptions { pattern, rank, alpha } = options("*.q_proj.weight:rank=8,alpha=16");
        assert!(pattern.matches("layers.0.q_proj.weight") && (rank, alpha) == (8, 16.0));
        assert_eq!(options("dense/kernel:0:rank=4").alpha, 4.0);
        for (text, part) in [
            ("fc.weight", "GLOB:rank=R"),
            ("fc.weight:alpha=1", "GLOB:rank=R"),
            ("fc.weight:rank=0", "from 1 to"),
            ("fc.weight:rank=99999999", "from 1 to"),
            ("fc.weight:rank=2,alpha=x", "not a number"),
            ("fc.weight:rank=2,dropout=0.1", "no setting"),
            ("[:rank=2", "\"[\""),
        ] {
            let message = text.parse::<LoraOptions>().unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn adapters_begin_as_in_peft_and_by_their_own_name_and_seed() {
        let matrix = || WeightMatrix::new([6, 100].into(), vec![0], None).unwrap();
        let begin = |name: &str, seed| Adapter::initial(name, &options("*:rank=50"), matrix(), seed);
        let adapter = begin("fc.weight", 1);
        let a = adapter.a.to_f64_vec();
        assert!(a.iter().all(|v| v.abs() <= 0.1) && a.iter().any(|v| *v > 0.099) && a.iter().any(|v| *v < -0.099));
        let mean_square = a.iter().map(|v| v * v).sum::<f64>() / a.len() as f64;
        assert!((mean_square / (0.01 / 3.0) - 1.0).abs() < 0.05, "{mean_square}");
        assert!(adapter.b.to_f64_vec().iter().all(|v| *v == 0.0));
        assert_eq!(adapter, begin("fc.weight", 1));
        assert!(adapter.a != begin("fc.weight", 2).a && adapter.a != begin("fd.weight", 1).a);
        assert_eq!(adapter.factors().map(|(name, _)| name), ["fc.lora_A.weight", "fc.lora_B.weight"]);
    }

    #[test]
    fn a_merged_weight_has_the_scaled_product_added() {
        let matrix = WeightMatrix::new([2, 2].into(), vec![1], None).unwrap();
        let mut adapter = Adapter::initial("w", &options("w:rank=1,alpha=0.5"), matrix, 0);
        (adapter.a, adapter.b) = (Tensor::from_f32([1, 2], &[1.0, 2.0]), Tensor::from_f32([2, 1], &[10.0, 100.0]));
        let weight = Tensor::from_f64(DType::F16, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(adapter.merged(&weight), Tensor::from_f64(DType::F16, [2, 2], &[6.0, 52.0, 13.0, 104.0]));
    }
}
