//! A graph as a picture: Graphviz source.

use std::fmt::Write;

use meganeura::ir::{Graph, Op};

/// The live part of a graph: one box per node with its op and type, inputs and parameters by name.
pub fn dot(graph: &Graph) -> String {
    let mut out = String::from("digraph {\n  node [shape=box, fontname=monospace]\n");
    for id in graph.live() {
        let node = graph.node(id);
        let (label, style) = match &node.op {
            Op::Input(i) => (graph.inputs()[i.0 as usize].name.clone(), ", style=filled, fillcolor=lightblue"),
            Op::Parameter(p) => (graph.parameters()[p.0 as usize].name.clone(), ", style=filled, fillcolor=lightyellow"),
            op => (op.name().to_string(), ""),
        };
        let label = format!("{label}\n{}", node.ty);
        let _ = writeln!(out, "  n{} [label={label:?}{style}]", id.0);
        for operand in &node.operands {
            let _ = writeln!(out, "  n{} -> n{}", operand.0, id.0);
        }
    }
    for (index, output) in graph.outputs().iter().enumerate() {
        let _ = writeln!(out, "  o{index} [label={:?}, shape=oval]\n  n{} -> o{index}", output.name, output.node.0);
    }
    out.push_str("}\n");
    out
}

#[cfg(test)]
mod tests {
    use meganeura::ir::UnaryOp;
    use meganeura::{DType, TensorType};

    use super::*;

    #[test]
    fn nodes_edges_and_outputs_are_drawn_and_dead_nodes_are_not() {
        let mut g = Graph::new();
        let x = g.input("a \"quoted\" name", TensorType::new(DType::F32, [2])).unwrap();
        let y = g.unary(UnaryOp::Exp, x).unwrap();
        g.unary(UnaryOp::Neg, x).unwrap();
        g.output("y", y).unwrap();
        let dot = dot(&g);
        assert!(dot.contains(r#"n0 [label="a \"quoted\" name\nf32[2]""#), "{dot}");
        assert!(dot.contains("n0 -> n1") && dot.contains("n1 -> o0") && !dot.contains("neg"), "{dot}");
    }
}
