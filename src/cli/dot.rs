//! A graph as a picture: Graphviz source.

use std::fmt::Write;

use meganeura::ir::{Graph, Op};

/// The most elements of a constant that is drawn with its values.
const MAX_ELEMENTS: usize = 4;

/// The live part of a graph: one box per node with its op, attributes and type; inputs, parameters, outputs and what is updated by name.
pub fn dot(graph: &Graph) -> String {
    let mut out = String::from("digraph {\n  node [shape=box, fontname=monospace]\n");
    for id in graph.live() {
        let node = graph.node(id);
        let (label, style) = match &node.op {
            Op::Input(i) => (graph.inputs()[i.0 as usize].name.clone(), ", style=filled, fillcolor=lightblue"),
            Op::Parameter(p) => (graph.parameters()[p.0 as usize].name.clone(), ", style=filled, fillcolor=lightyellow"),
            op => (described(op), ""),
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
    for (index, update) in graph.updates().iter().enumerate() {
        let Some(parameter) = graph.parameters().get(update.parameter.0 as usize) else { continue };
        let _ = writeln!(out, "  u{index} [label={:?}, shape=oval, style=filled, fillcolor=lightyellow]", parameter.name);
        let _ = writeln!(out, "  n{} -> u{index}", update.node.0);
    }
    out.push_str("}\n");
    out
}

/// The name of an op, and a line per attribute. Of constants only small ones show their values.
fn described(op: &Op) -> String {
    if matches!(op, Op::Constant(tensor) if tensor.shape().numel() > MAX_ELEMENTS) {
        return op.name().to_string();
    }
    let attributes = op.attributes().into_iter().map(|(name, value)| format!("\n{name} {value}"));
    std::iter::once(op.name().to_string()).chain(attributes).collect()
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
        let y = g.reshape(y, [2, 1]).unwrap();
        let y = g.transpose(y, &[1, 0]).unwrap();
        g.output("y", y).unwrap();
        let dot = dot(&g);
        assert!(dot.contains(r#"n0 [label="a \"quoted\" name\nf32[2]""#), "{dot}");
        assert!(dot.contains("n0 -> n1") && dot.contains("n4 -> o0") && !dot.contains("neg"), "{dot}");
        assert!(dot.contains(r#"[label="transpose\nperm [1,0]\nf32[1,2]"]"#), "{dot}");
    }
}
