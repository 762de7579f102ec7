//! The frozen prefix: the part of a model that training cannot change, computed once per sample.
//!
//! A value belongs to it if no weight that trains, no update and no input that is not data reaches it, and if each sample has its part
//! of the value for itself. The graph is cut where such values meet others; the first half runs once per sample, and its results are kept.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use meganeura_ir::{Cut, Graph, NodeId, Op, SampleAxis, SampleDependence, Shape, Split, Tensor, TensorType, sample_dependence};
use meganeura_runtime::{ParameterStore, Session};

use crate::data::{RecordCache, Samples, TARGET_INPUT};
use crate::error::Error;
use crate::objective::Forward;
use crate::predictor::{by_name, compile};
use crate::step_inputs::StepInputs;

/// Whether the values of a frozen prefix are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixCache {
    /// The whole model runs at every step.
    Off,
    /// Up to so many bytes of memory; the rest goes to a temporary file.
    Memory(u64),
}

impl Default for PrefixCache {
    /// 1 GiB of memory.
    fn default() -> Self {
        PrefixCache::Memory(1 << 30)
    }
}

/// What a run keeps instead of computing it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrozenPrefix {
    /// Operations that run once per sample.
    pub operations: usize,
    /// Tensors at the cut.
    pub tensors: usize,
    pub bytes_per_sample: usize,
    /// Of all samples, in a temporary file.
    pub bytes_in_file: u64,
}

/// The first half of a forward pass.
pub(crate) struct Prefix {
    graph: Graph,
    operations: usize,
}

/// Cuts the frozen prefix off, where it is to be kept and worth a cut: where it holds a contraction.
pub(crate) fn cut_frozen_prefix(
    forward: Forward,
    cache: PrefixCache,
    trained: &[String],
    samples: &Samples,
    batch: usize,
) -> Result<(Forward, Option<Prefix>), Error> {
    let cuts = match cache {
        PrefixCache::Off => Vec::new(),
        PrefixCache::Memory(_) => frozen_cuts(&forward, trained, samples, batch),
    };
    if cuts.is_empty() {
        return Ok((forward, None));
    }
    let keep: Vec<NodeId> = [Some(forward.prediction), Some(forward.loss), forward.target].into_iter().flatten().collect();
    let Split { prefix, suffix, kept } = forward.graph.split(&cuts, &keep)?;
    let operations = prefix.nodes().iter().filter(|node| !node.op.is_leaf()).count();
    let target = forward.target.and(kept.get(2).copied());
    match kept[..] {
        [prediction, loss, ..] => Ok((
            Forward { graph: suffix, prediction, softmax: forward.softmax, target, loss },
            Some(Prefix { graph: prefix, operations }),
        )),
        _ => Ok((forward, None)),
    }
}

fn frozen_cuts(forward: &Forward, trained: &[String], samples: &Samples, batch: usize) -> Vec<Cut> {
    let g = &forward.graph;
    let trained: HashSet<&str> = trained.iter().map(String::as_str).collect();
    let updated: HashSet<_> = g.updates().iter().map(|update| update.parameter).collect();
    let varies = |op: &Op| match op {
        Op::Parameter(id) => {
            updated.contains(id) || g.parameters().get(id.0 as usize).is_none_or(|p| trained.contains(p.name.as_str()))
        }
        Op::Input(id) => {
            g.inputs().get(id.0 as usize).is_none_or(|i| i.name == TARGET_INPUT || samples.has_axis(&i.name).is_none())
        }
        _ => false,
    };
    let inputs: Vec<SampleDependence> = g.inputs().iter().map(|input| dependence(samples, &input.name)).collect();
    let dependences = sample_dependence(g, batch, &inputs);

    let (mut frozen, mut heavy) = (Vec::with_capacity(g.nodes().len()), Vec::with_capacity(g.nodes().len()));
    for node in g.nodes() {
        let all = |flags: &[bool]| node.operands.iter().all(|o| flags[o.index()]);
        frozen.push(!varies(&node.op) && all(&frozen));
        heavy.push(matches!(node.op, Op::Dot(_) | Op::Conv(_)) || node.operands.iter().any(|o| heavy[o.index()]));
    }
    let axis = |id: NodeId| match dependences[id.index()] {
        SampleDependence::Separate(at) if frozen[id.index()] => Some(at),
        _ => None,
    };
    let mut needed = vec![false; g.nodes().len()];
    g.roots().chain([forward.loss, forward.prediction]).for_each(|root| needed[root.index()] = true);
    let mut cut: BTreeSet<NodeId> = BTreeSet::new();
    for id in g.ids().rev() {
        if !needed[id.index()] {
            continue;
        }
        if axis(id).is_some() {
            cut.insert(id);
        } else {
            g.node(id).operands.iter().for_each(|o| needed[o.index()] = true);
        }
    }
    // What only moves elements is not worth keeping where its operands are smaller.
    let bytes = |id: NodeId| g.ty(id).bytes();
    let mut settled = BTreeSet::new();
    while let Some(id) = cut.pop_last() {
        let node = g.node(id);
        let operands: Vec<NodeId> = node.operands.iter().copied().filter(|&o| axis(o).is_some()).collect();
        let dear = operands.iter().map(|&o| bytes(o)).sum::<usize>() <= bytes(id) && !operands.is_empty();
        let moves = node.op.is_movement() || matches!(node.op, Op::Cast(_) | Op::Compare(_));
        if moves && dear {
            cut.extend(operands);
        } else if heavy[id.index()] {
            settled.insert(id);
        }
    }
    let named = settled.into_iter().filter_map(|node| Some((node, axis(node)?))).enumerate();
    named.map(|(i, (node, at))| Cut { name: format!("frozen/{i}"), node, first: at.axis }).collect()
}

fn dependence(samples: &Samples, input: &str) -> SampleDependence {
    match samples.has_axis(input) {
        Some(true) => SampleDependence::Separate(SampleAxis { axis: 0, span: 1 }),
        Some(false) => SampleDependence::None,
        None => SampleDependence::Joint,
    }
}

/// Feeds a program with samples: with their arrays, and with the values of the frozen prefix.
pub(crate) struct Feed {
    samples: Samples,
    prefix: Option<CachedPrefix>,
}

struct CachedPrefix {
    session: Session,
    /// Of the prefix's own inputs.
    samples: Samples,
    batch: usize,
    cache: RecordCache,
    /// Of one sample, on the way.
    record: Vec<u8>,
    description: FrozenPrefix,
}

impl Feed {
    /// Feeds a program of the graph `reads` in batches. `store` holds the weights.
    ///
    /// # Errors
    /// The device cannot hold or run the prefix; a temporary file is needed and cannot be made.
    pub fn new(
        samples: Samples,
        prefix: Option<Prefix>,
        reads: &Graph,
        batch: usize,
        store: &Arc<ParameterStore>,
        cache: PrefixCache,
    ) -> Result<Self, Error> {
        let feed = |g: &Graph| samples.only(|name| g.inputs().iter().any(|input| input.name == name));
        let (device, memory) = (store.device(), if let PrefixCache::Memory(bytes) = cache { bytes } else { 0 });
        let prefix = prefix.map(|Prefix { graph, operations }| {
            let (own, tensors) = (feed(&graph), graph.outputs().len());
            let bytes_per_sample = graph.outputs().iter().map(|o| graph.ty(o.node).bytes() / batch.max(1)).sum();
            let session = Session::new(device, compile(graph, device)?, store)?;
            let cache = RecordCache::new(samples.count(), bytes_per_sample, memory).map_err(Error::Cache)?;
            let bytes_in_file = cache.bytes_in_file();
            let description = FrozenPrefix { operations, tensors, bytes_per_sample, bytes_in_file };
            Ok::<_, Error>(CachedPrefix { session, samples: own, batch, cache, record: Vec::new(), description })
        });
        Ok(Feed { prefix: prefix.transpose()?, samples: feed(reads) })
    }

    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    pub fn frozen_prefix(&self) -> Option<FrozenPrefix> {
        self.prefix.as_ref().map(|prefix| prefix.description)
    }

    /// The inputs of the program for the samples at `rows`.
    ///
    /// # Errors
    /// The device fails, or the temporary file of the cache.
    pub fn batch(&mut self, rows: &[usize]) -> Result<Vec<(String, Tensor)>, Error> {
        let mut inputs = self.samples.batch(rows)?;
        if let Some(prefix) = &mut self.prefix {
            prefix.compute(rows)?;
            inputs.extend(prefix.gather(rows)?);
        }
        Ok(inputs)
    }

    /// The inputs of the program for as many samples as its batch has, from other data than its own.
    ///
    /// # Errors
    /// The device fails; an image cannot be read.
    pub fn batch_of(&mut self, samples: &Samples, rows: &[usize]) -> Result<Vec<(String, Tensor)>, Error> {
        let all = samples.batch(rows)?;
        let mut inputs = self.samples.taken(&all);
        if let Some(prefix) = &mut self.prefix {
            let outputs = prefix.session.run(&by_name(&prefix.samples.taken(&all)))?;
            let names = prefix.session.program().outputs.iter().map(|output| output.name.clone());
            inputs.extend(names.zip(outputs));
        }
        Ok(inputs)
    }

    /// Begins to read samples that the next call of [`Feed::batch`] is expected to ask for.
    pub fn prefetch(&self, rows: &[usize]) {
        match &self.prefix {
            None => self.samples.prefetch(rows),
            Some(prefix) => prefix.missing(rows).first().into_iter().for_each(|(batch, _)| prefix.samples.prefetch(batch)),
        }
    }

    /// As [`Feed::batch`], over the tensors of `inputs`.
    ///
    /// # Errors
    /// As [`Feed::batch`].
    pub fn write_batch(&mut self, rows: &[usize], inputs: &mut StepInputs) -> Result<(), Error> {
        self.samples.write_batch(rows, inputs)?;
        match &mut self.prefix {
            Some(prefix) => prefix.compute(rows).and_then(|()| prefix.write(rows, inputs)),
            None => Ok(()),
        }
    }
}

impl CachedPrefix {
    /// As [`CachedPrefix::gather`], over the tensors of `inputs`.
    fn write(&mut self, rows: &[usize], inputs: &mut StepInputs) -> Result<(), Error> {
        for (position, &row) in rows.iter().enumerate() {
            self.record.clear();
            self.cache.read(row, &mut self.record).map_err(Error::Cache)?;
            let mut rest = self.record.as_slice();
            for output in &self.session.program().outputs {
                let (part, after) = rest.split_at(output.ty.bytes() / self.batch);
                rest = after;
                if let Some(tensor) = inputs.get_mut(&output.name) {
                    tensor.bytes_mut()[position * part.len()..][..part.len()].copy_from_slice(part);
                }
            }
        }
        Ok(())
    }

    /// The samples among `rows` that are not there yet, in batches that the last one fills up, and how many differ in each.
    fn missing(&self, rows: &[usize]) -> Vec<(Vec<usize>, usize)> {
        let missing: BTreeSet<usize> = rows.iter().copied().filter(|&row| !self.cache.contains(row)).collect();
        let missing: Vec<usize> = missing.into_iter().collect();
        let full = |chunk: &[usize]| (0..self.batch).filter_map(|i| chunk.get(i).or(chunk.last()).copied()).collect();
        missing.chunks(self.batch).map(|chunk| (full(chunk), chunk.len())).collect()
    }

    /// Computes the samples among `rows` that are not there yet.
    fn compute(&mut self, rows: &[usize]) -> Result<(), Error> {
        for (batch, different) in self.missing(rows) {
            let outputs = self.session.run(&by_name(&self.samples.batch(&batch)?))?;
            for (position, &row) in batch.iter().take(different).enumerate() {
                let mut record = Vec::with_capacity(self.description.bytes_per_sample);
                for output in &outputs {
                    let bytes = output.bytes().len() / self.batch;
                    record.extend_from_slice(&output.bytes()[position * bytes..][..bytes]);
                }
                self.cache.write(row, &record).map_err(Error::Cache)?;
            }
        }
        Ok(())
    }

    /// The values at the cut for the samples at `rows`, which are all there.
    fn gather(&mut self, rows: &[usize]) -> Result<Vec<(String, Tensor)>, Error> {
        let mut records = Vec::with_capacity(rows.len() * self.description.bytes_per_sample);
        for &row in rows {
            self.cache.read(row, &mut records).map_err(Error::Cache)?;
        }
        let mut offset = 0;
        let outputs = &self.session.program().outputs;
        let gathered = outputs.iter().map(|output| {
            let bytes = output.ty.bytes() / self.batch;
            let parts = records.chunks_exact(self.description.bytes_per_sample.max(1)).map(|r| &r[offset..offset + bytes]);
            let data = parts.flatten().copied().collect();
            offset += bytes;
            let ty = rows_of(&output.ty, self.batch, rows.len());
            let tensor = Tensor::from_bytes(ty, data).expect("records of the outputs' size");
            (output.name.clone(), tensor)
        });
        Ok(gathered.collect())
    }
}

/// The type of `rows` samples where `ty` is that of `batch`.
fn rows_of(ty: &TensorType, batch: usize, rows: usize) -> TensorType {
    let first = ty.shape.first().map_or(rows, |size| size / batch.max(1) * rows);
    let shape: Shape = std::iter::once(first).chain(ty.shape.iter().skip(1).copied()).collect();
    TensorType::new(ty.dtype, shape)
}
