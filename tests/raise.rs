//! Attention in what PyTorch's exporters write: all of it is found, and the raised graph computes the same.

mod common;

use common::fixture;
use meganeura::codegen::raise;
use meganeura::data::{Samples, Target};
use meganeura::import::Bindings;
use meganeura::ir::interpreter::{Environment, interpret};
use meganeura::ir::testing::{random_tensor, relative_l2};
use meganeura::ir::{Composite, Graph, Op};
use meganeura::{Dataset, Model, Tensor};

const TOLERANCE: f64 = 1e-5;

fn count(graph: &Graph, matches: impl Fn(&Composite) -> bool) -> usize {
    graph.live().into_iter().filter(|&id| matches!(&graph.node(id).op, Op::Composite(c) if matches(c))).count()
}

/// Raises the model of a file, of which `data` decides the shapes, and expects `attentions`, that many of them causal.
fn raises(model: &str, data: &str, attentions: usize, causal: usize) {
    let model = Model::open(fixture(model)).unwrap();
    let data = Dataset::open(fixture(data)).unwrap();
    let samples = Samples::whole(&data, model.inputs(), Target::Absent).unwrap().tensors();
    let named: Vec<(&str, &Tensor)> = samples.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let graph = model.imported().specialize_on(&Bindings::default(), &named).unwrap().0.graph;
    let raised = raise(&graph);
    assert_eq!(count(&raised, |c| matches!(c, Composite::Attention(_))), attentions);
    assert_eq!(count(&raised, |c| matches!(c, Composite::Attention(dims) if dims.causal == Some(0))), causal);
    assert_eq!(count(&raised, |c| matches!(c, Composite::Softmax { .. })), 0);

    let inputs: Vec<Tensor> = graph
        .inputs()
        .iter()
        .map(|i| {
            samples.iter().find(|(name, _)| *name == i.name).map_or_else(|| random_tensor(&i.ty, 1), |(_, t)| t.cast(i.ty.dtype))
        })
        .collect();
    let parameters: Vec<Tensor> = graph.parameters().iter().zip(2..).map(|(p, seed)| random_tensor(&p.ty, seed)).collect();
    let environment = Environment::<f64>::from_tensors(&inputs, &parameters);
    let (expected, found) = (interpret(&graph, &environment).unwrap(), interpret(&raised, &environment).unwrap());
    for (expected, found) in expected.outputs().into_iter().zip(found.outputs()) {
        let error = relative_l2(&found.to_f64_vec(), &expected.to_f64_vec());
        assert!(error <= TOLERANCE, "{error:e}");
    }
}

macro_rules! raised {
    ($($test:ident: $model:literal, $data:literal, $attentions:literal, $causal:literal;)*) => {$(
        #[test]
        fn $test() {
            raises(concat!("corpus/", $model, ".onnx"), concat!("corpus/", $data, ".npz"), $attentions, $causal);
        }
    )*};
}

raised!(
    gpt2_by_dynamo: "exports/gpt2-tiny-dynamo", "exports/gpt2-tiny-dynamo", 3, 3;
    gpt2_by_torchscript: "exports/gpt2-tiny-legacy", "exports/gpt2-tiny-legacy", 3, 3;
    llama_with_a_mask_by_dynamo: "exports/llama-tiny-dyn-dynamo", "exports/llama-tiny-dyn-dynamo", 3, 3;
    llama_with_a_mask_by_torchscript: "exports/llama-tiny-legacy", "exports/llama-tiny-legacy", 3, 3;
    unet_by_dynamo: "exports/unet-dynamo", "exports/unet-dynamo", 2, 0;
    vit_by_dynamo: "exports/vit-dynamo", "exports/vit-dynamo", 4, 0;
    vit_by_torchscript: "exports/vit-legacy-train", "exports/vit-legacy-train", 4, 0;
    action_expert_by_dynamo: "action-expert/model", "action-expert/data", 2, 0;
    action_expert_by_torchscript: "action-expert/model-torchscript", "action-expert/data", 2, 0;
    llama_by_dynamo: "llama/model", "llama/data", 2, 2;
    llama_by_torchscript: "llama/model-torchscript", "llama/data", 2, 2;
    whisper_by_dynamo: "whisper/model", "whisper/data", 2, 0;
    whisper_by_torchscript: "whisper/model-torchscript", "whisper/data", 2, 0;
);
