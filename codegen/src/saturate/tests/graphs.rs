//! Whole graphs through [`saturate`].

use meganeura_ir::testing::{random_graph, sample_graphs};
use meganeura_ir::{
    BinaryOp::*, Composite, DType, Graph, Node, Op, ParameterInfo, ParameterRole, ReduceOp, TensorType, UnaryOp::*,
};
use proptest::prelude::*;

use super::sketch::{Sketch, assert_classes_agree, disagreement};
use crate::saturate::analysis::to_egraph;
use crate::saturate::cost::graph_cost;
use crate::saturate::extract::Extraction;
use crate::saturate::rewrite::compile;
use crate::saturate::rules::RULES;
use crate::saturate::{Limits, StopReason, explore, roots, saturate};

fn saturated(graph: &Graph) -> Graph {
    saturate(graph, &Limits::default()).unwrap().0
}

fn live_nodes(graph: &Graph) -> Vec<&Node> {
    graph.live().into_iter().map(|id| graph.node(id)).collect()
}

fn count(graph: &Graph, is: fn(&Op) -> bool) -> usize {
    live_nodes(graph).iter().filter(|n| is(&n.op)).count()
}

fn is_transpose(op: &Op) -> bool {
    matches!(op, Op::Transpose(_))
}

#[test]
fn every_op_survives_the_way_there_and_back() {
    for (name, graph) in sample_graphs() {
        let (egraph, nodes) = to_egraph(&graph);
        let extraction = Extraction::new(&egraph, &nodes, &roots(&graph, &nodes));
        let back = extraction.build(&graph).unwrap();
        let ops = |g: &Graph| {
            let mut ops: Vec<Op> = live_nodes(g).iter().map(|n| n.op.clone()).collect();
            ops.sort();
            ops
        };
        assert_eq!(ops(&back), ops(&graph), "{name}");
        assert_eq!(disagreement(&back, &graph), 0.0, "{name}");
    }
}

#[test]
fn sample_graphs_keep_their_values_and_never_cost_more() {
    for (name, graph) in sample_graphs() {
        for graph in [graph.decomposed().unwrap(), graph] {
            let (result, report) = saturate(&graph, &Limits::default()).unwrap();
            assert!(disagreement(&result, &graph) < 1e-6, "{name}");
            assert_eq!(report.cost_before, graph_cost(&graph), "{name}");
            assert_eq!(report.cost_after, graph_cost(&result), "{name}");
            assert!(report.cost_after <= report.cost_before, "{name}");
            result.verify().unwrap();
        }
    }
}

#[test]
fn transposes_cancel_across_pointwise_ops_and_biases() {
    let mut g = Sketch::default();
    let (x, bias) = (g.x(&[2, 5, 5, 3]), g.x(&[3]));
    let y = g.transpose(x, &[0, 3, 1, 2]);
    let bias = g.broadcast(bias, &[2, 3, 5, 5], &[1]);
    let y = g.binary(Add, y, bias);
    let y = g.push(Op::Composite(Composite::Gelu), &[y]);
    let c = g.c(&[2, 3, 5, 5], 0.5);
    let y = g.binary(Mul, y, c);
    let y = g.transpose(y, &[0, 2, 3, 1]);
    let graph = g.finish(y);
    let result = saturated(&graph);
    assert_eq!(count(&result, is_transpose), 0);
    assert!(disagreement(&result, &graph) < 1e-6);
}

#[test]
fn a_transpose_shared_by_two_dots_goes_into_both() {
    let mut g = Sketch::default();
    let (x, w, dy) = (g.x(&[4, 3]), g.x(&[5, 3]), g.x(&[4, 5]));
    let wt = g.transpose(w, &[1, 0]);
    let y = g.dot(x, wt, &[], &[(1, 0)]);
    let dx = g.dot(dy, wt, &[], &[(1, 1)]);
    g.0.output("dx", dx).unwrap();
    let graph = g.finish(y);
    let result = saturated(&graph);
    assert_eq!(count(&result, is_transpose), 0);
    assert_eq!(count(&result, |op| matches!(op, Op::Dot(_))), 2);
    assert!(disagreement(&result, &graph) < 1e-6);
}

#[test]
fn a_weight_broadcast_over_the_batch_is_read_once() {
    let mut g = Sketch::default();
    let (x, w) = (g.x(&[2, 4, 3]), g.x(&[3, 5]));
    let w = g.broadcast(w, &[2, 3, 5], &[1, 2]);
    let y = g.dot(x, w, &[(0, 0)], &[(2, 1)]);
    let graph = g.finish(y);
    let result = saturated(&graph);
    assert_eq!(count(&result, |op| matches!(op, Op::Broadcast { .. })), 0);
    assert!(disagreement(&result, &graph) < 1e-6);
}

#[test]
fn constants_fold_through_movement_and_arithmetic() {
    let mut g = Sketch::default();
    let (x, two, three) = (g.x(&[2, 3]), g.c(&[3], 2.0), g.c(&[3, 2], 3.0));
    let two = g.broadcast(two, &[2, 3], &[1]);
    let three = g.transpose(three, &[1, 0]);
    let five = g.binary(Add, two, three);
    let five = g.unary(Sqrt, five);
    let y = g.binary(Mul, x, five);
    let graph = g.finish(y);
    let result = saturated(&graph);
    assert_eq!(live_nodes(&result).len(), 4, "x, a scalar, its broadcast and the product");
    assert!(disagreement(&result, &graph) < 1e-6);
}

/// A stack of residual blocks: layer norm, two Dots, gelu; transposes and reshapes as exporters write them.
fn residual_stack(layers: usize) -> Graph {
    let mut g = Sketch::default();
    let mut x = g.x(&[2, 6, 8]);
    for layer in 0..layers {
        let mut weight = |name: &str, shape: &[usize]| {
            let ty = TensorType::new(DType::F32, shape);
            let name = format!("{layer}.{name}");
            g.0.parameter(ParameterInfo { name, ty, stored: DType::F32, role: ParameterRole::Weight }).unwrap()
        };
        let (up, down, bias) = (weight("up", &[16, 8]), weight("down", &[8, 16]), weight("bias", &[16]));
        let sum = g.reduce(ReduceOp::Sum, x, &[2]);
        let eighth = g.c(&[2, 6], 0.125);
        let mean = g.binary(Mul, sum, eighth);
        let mean = g.reshape(mean, &[2, 6, 1]);
        let mean = g.reshape(mean, &[2, 6]);
        let mean = g.broadcast(mean, &[2, 6, 8], &[0, 1]);
        let h = g.binary(Sub, x, mean);
        let h = g.reshape(h, &[12, 8]);
        let up = g.transpose(up, &[1, 0]);
        let h = g.dot(h, up, &[], &[(1, 0)]);
        let bias = g.broadcast(bias, &[12, 16], &[1]);
        let h = g.binary(Add, bias, h);
        let h = g.push(Op::Composite(Composite::Gelu), &[h]);
        let h = g.reshape(h, &[2, 6, 16]);
        let h = g.transpose(h, &[1, 0, 2]);
        let h = g.transpose(h, &[1, 0, 2]);
        let down = g.transpose(down, &[1, 0]);
        let h = g.dot(h, down, &[], &[(2, 0)]);
        x = g.binary(Add, h, x);
    }
    let parameters: Vec<_> = (0..g.0.parameters().len() as u32).map(meganeura_ir::ParameterId).collect();
    for id in parameters {
        let node = g.push(Op::Parameter(id), &[]);
        let shape = g.0.ty(node).shape.to_vec();
        let rate = g.c(&shape, 0.9);
        let next = g.binary(Mul, node, rate);
        let next = g.unary(Neg, next);
        let next = g.unary(Neg, next);
        g.0.update(id, next).unwrap();
    }
    g.0.output("unchanged", x).unwrap();
    g.finish(x)
}

#[test]
fn names_order_and_updates_survive() {
    let graph = residual_stack(3);
    let (result, report) = saturate(&graph, &Limits::default()).unwrap();
    assert_eq!(report.stop, StopReason::Saturated);
    assert!(report.cost_after < report.cost_before, "{report}");
    assert_eq!(result.inputs(), graph.inputs());
    assert_eq!(result.parameters(), graph.parameters());
    let names = |g: &Graph| g.outputs().iter().map(|o| o.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&result), names(&graph));
    let updated = |g: &Graph| g.updates().iter().map(|u| u.parameter).collect::<Vec<_>>();
    assert_eq!(updated(&result), updated(&graph));
    assert_eq!(count(&result, |op| *op == Op::Unary(Neg)), 0);
    assert_eq!(count(&result, is_transpose), 0);
    assert!(disagreement(&result, &graph) < 1e-6);
}

#[test]
fn two_runs_give_one_result() {
    let graph = residual_stack(8);
    let (a, first) = saturate(&graph, &Limits::default()).unwrap();
    let (b, second) = saturate(&graph, &Limits::default()).unwrap();
    assert_eq!(a.nodes(), b.nodes());
    assert_eq!(first, second);
}

#[test]
fn thousands_of_nodes_saturate() {
    let graph = residual_stack(100);
    assert!(graph.nodes().len() > 3000);
    let (result, report) = saturate(&graph, &Limits::default()).unwrap();
    assert_eq!(report.stop, StopReason::Saturated);
    assert_eq!(count(&result, is_transpose), 0);
}

#[test]
fn limits_stop_the_search_and_are_reported() {
    let graph = residual_stack(2);
    let (result, report) = saturate(&graph, &Limits { nodes: 1_000_000, iterations: 1 }).unwrap();
    assert_eq!(report.stop, StopReason::IterationLimit(1));
    assert!(report.to_string().contains("iteration limit"));
    assert!(disagreement(&result, &graph) < 1e-6);
    let (result, report) = saturate(&graph, &Limits { nodes: 10, iterations: 16 }).unwrap();
    assert!(matches!(report.stop, StopReason::NodeLimit(_)));
    assert!(disagreement(&result, &graph) < 1e-6);
}

#[test]
fn a_graph_without_outputs_stays_as_it_is() {
    let (result, report) = saturate(&Graph::new(), &Limits::default()).unwrap();
    assert!(result.nodes().is_empty());
    assert_eq!((report.cost_before, report.cost_after), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_graphs_keep_the_value_of_every_class(choices in prop::collection::vec(any::<[u8; 4]>(), 1..12)) {
        let graph = random_graph([2, 3], &choices);
        let limits = Limits { nodes: 3000, iterations: 6 };
        let explored = explore(&graph, &limits, &compile(RULES).unwrap()).unwrap();
        assert_classes_agree::<f64>(&explored, &graph, 1e-6, "random graph");
        let (result, report) = saturate(&graph, &limits).unwrap();
        prop_assert!(report.cost_after <= report.cost_before);
        prop_assert!(disagreement(&result, &graph) < 1e-6);
    }
}
