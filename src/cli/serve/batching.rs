//! Whether the requests for a model may share executions: which sizes count samples, and whether the model keeps samples apart.

use std::collections::BTreeSet;

use meganeura::ir::{Graph, SampleAxis, SampleDependence, sample_dependence};
use meganeura::live::InputShapes;
use meganeura::{Bindings, DType, Dim, Error, Model, ModelInput, Phase, RANDOM_KEY};

/// Sizes to try for those that requests decide, besides the number of samples: what models of sequences and images take.
const TRIAL_SIZES: [usize; 6] = [8, 32, 64, 224, 1, 1024];
/// A number of samples that other sizes seldom have.
const TRIAL_BATCH: usize = 3;

/// Where samples lie in each output, in order; none where an output mixes them or depends on none.
pub fn sample_axes(graph: &Graph, batch: usize) -> Vec<Option<SampleAxis>> {
    let separate = SampleDependence::Separate(SampleAxis { axis: 0, span: 1 });
    let input = |name: &str| if name == RANDOM_KEY { SampleDependence::Joint } else { separate };
    let inputs: Vec<SampleDependence> = graph.inputs().iter().map(|i| input(&i.name)).collect();
    let found = sample_dependence(graph, batch, &inputs);
    let axis = |dependence: Option<&SampleDependence>| match dependence {
        Some(SampleDependence::Separate(at)) => Some(*at),
        _ => None,
    };
    graph.outputs().iter().map(|output| axis(found.get(output.node.index()))).collect()
}

/// The graph of inference on inputs of these shapes.
pub fn inference_graph(model: &Model, bindings: &Bindings, shapes: &InputShapes) -> Result<Graph, Error> {
    let mut bindings = Bindings { phase: Phase::INFERENCE, ..bindings.clone() };
    bindings.shapes.extend(shapes.clone());
    Ok(model.specialize(&bindings)?.graph)
}

/// What trying a model tells.
pub struct Trial {
    /// The first axis of every input counts samples, and the model keeps them apart.
    pub batched: bool,
    /// Of the outputs, in order; empty where the model did not run at any of the trial sizes.
    pub dtypes: Vec<DType>,
    /// Input shapes for one sample, where requests decide nothing else.
    pub one: Option<InputShapes>,
}

impl Trial {
    pub fn new(model: &Model, bindings: &Bindings) -> Self {
        let inputs = model.bound_inputs(bindings);
        let batch = batch_symbols(&inputs);
        let samples = if batch.is_some() { TRIAL_BATCH } else { 1 };
        let batch = batch.unwrap_or_default();
        let trial = TRIAL_SIZES.into_iter().find_map(|size| {
            let shapes = shapes(&inputs, &batch, samples, size)?;
            inference_graph(model, bindings, &shapes).ok()
        });
        let Some(graph) = trial else { return Trial { batched: false, dtypes: Vec::new(), one: None } };
        let batched = !batch.is_empty() && sample_axes(&graph, samples).iter().all(Option::is_some);
        let dtypes = graph.outputs().iter().map(|output| graph.ty(output.node).dtype).collect();
        let free = |dim: &Dim| matches!(dim, Dim::Symbol(name) if !batch.contains(name.as_str()));
        let decided = inputs.iter().all(|input| input.ranked && !input.dims.iter().any(free));
        let one = if decided { shapes(&inputs, &batch, 1, 1) } else { None };
        Trial { batched, dtypes, one }
    }
}

/// The names of sizes that count samples: the first of every input, if each is a name that stands nowhere else.
fn batch_symbols(inputs: &[ModelInput]) -> Option<BTreeSet<&str>> {
    let is_name = |text: &str| !text.contains(|c: char| "+-*/%() ".contains(c));
    let mut symbols = BTreeSet::new();
    for input in inputs {
        match input.dims.first() {
            Some(Dim::Symbol(name)) if input.ranked && is_name(name) => symbols.insert(name.as_str()),
            _ => return None,
        };
    }
    let elsewhere = |name: &str| {
        let words = inputs.iter().flat_map(|input| input.dims.iter().skip(1)).filter_map(|dim| match dim {
            Dim::Symbol(text) => Some(text),
            Dim::Fixed(_) => None,
        });
        words.into_iter().any(|text| text.split(|c: char| "+-*/%(), ".contains(c)).any(|word| word == name))
    };
    (!symbols.is_empty() && !symbols.iter().any(|name| elsewhere(name))).then_some(symbols)
}

/// Shapes with `samples` for sizes that count samples, and `size` for the others that are open.
fn shapes(inputs: &[ModelInput], batch: &BTreeSet<&str>, samples: usize, size: usize) -> Option<InputShapes> {
    let mut open = Bindings::default();
    for dim in inputs.iter().flat_map(|input| &input.dims) {
        let Dim::Symbol(text) = dim else { continue };
        for word in
            text.split(|c: char| "+-*/%(), ".contains(c)).filter(|word| word.parse::<usize>().is_err() && !word.is_empty())
        {
            open.dims.insert(word.to_string(), if batch.contains(word) { samples } else { size });
        }
    }
    let shape = |input: &ModelInput| {
        let sizes: Option<Vec<usize>> = input.dims.iter().map(|dim| dim.size(&open.dims)).collect();
        input.ranked.then_some((input.name.clone(), sizes?))
    };
    inputs.iter().map(shape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(name: &str, dims: &[&str]) -> ModelInput {
        let dim = |text: &&str| text.parse().map_or_else(|_| Dim::Symbol(text.to_string()), Dim::Fixed);
        ModelInput { name: name.into(), dtype: DType::F32, dims: dims.iter().map(dim).collect(), ranked: true }
    }

    #[test]
    fn samples_are_counted_by_names_that_stand_first_only() {
        let found =
            |inputs: &[ModelInput]| batch_symbols(inputs).map(|names| names.into_iter().map(String::from).collect::<Vec<_>>());
        assert_eq!(found(&[input("x", &["n", "3"]), input("y", &["n", "s"])]), Some(vec!["n".to_string()]));
        assert_eq!(found(&[input("x", &["x.0", "3"]), input("y", &["y.0"])]), Some(vec!["x.0".to_string(), "y.0".to_string()]));
        assert_eq!(found(&[input("x", &["n", "2*n"])]), None);
        assert_eq!(found(&[input("x", &["2*n"])]), None);
        assert_eq!(found(&[input("x", &["n"]), input("y", &["4", "n"])]), None);
        assert_eq!(found(&[input("x", &["n"]), input("y", &[])]), None);
        assert_eq!(found(&[]), None);
    }
}
