use super::*;
use crate::{BinaryOp, Composite, DType, ReduceOp, Tensor, UnaryOp};

fn vector(n: usize) -> TensorType {
    TensorType::new(DType::F32, [n])
}

fn weight(name: &str, n: usize) -> ParameterInfo {
    ParameterInfo { name: name.into(), ty: vector(n), stored: DType::F16, role: ParameterRole::Weight }
}

#[test]
fn equal_ops_on_equal_operands_are_one_node() {
    let mut g = Graph::new();
    let x = g.input("x", vector(7)).unwrap();
    let y = g.input("y", vector(7)).unwrap();
    let a = g.add(x, y).unwrap();
    assert_eq!(g.add(x, y).unwrap(), a);
    assert_ne!(g.add(y, x).unwrap(), a);
    assert_ne!(g.sub(x, y).unwrap(), a);
    let one = g.constant(Tensor::scalar_f32(1.0)).unwrap();
    assert_eq!(g.constant(Tensor::scalar_f32(1.0)).unwrap(), one);
    assert_ne!(g.constant(Tensor::scalar_f32(-1.0)).unwrap(), one);
    // Zeros of either sign are different constants.
    let zero = g.constant(Tensor::scalar_f32(0.0)).unwrap();
    assert_ne!(g.constant(Tensor::scalar_f32(-0.0)).unwrap(), zero);
}

#[test]
fn names_are_unique_per_kind() {
    let mut g = Graph::new();
    let x = g.input("x", vector(7)).unwrap();
    g.parameter(weight("x", 7)).unwrap();
    g.output("x", x).unwrap();
    let taken = GraphError::DuplicateName("x".into());
    assert_eq!(g.input("x", vector(1)), Err(taken.clone()));
    assert_eq!(g.parameter(weight("x", 7)), Err(taken.clone()));
    assert_eq!(g.output("x", x), Err(taken));
}

#[test]
fn strangers_are_refused() {
    let mut g = Graph::new();
    let x = g.input("x", vector(7)).unwrap();
    let stranger = NodeId(9);
    assert_eq!(g.unary(UnaryOp::Exp, stranger), Err(GraphError::UnknownNode(9)));
    assert_eq!(g.output("y", stranger), Err(GraphError::UnknownNode(9)));
    assert_eq!(g.update(ParameterId(0), x), Err(GraphError::UnknownNode(0)));
    assert_eq!(g.push(Op::Input(InputId(4)), &[]), Err(GraphError::UnknownNode(4)));
}

#[test]
fn an_update_has_the_type_of_its_parameter_and_is_the_only_one() {
    let mut g = Graph::new();
    let w = g.parameter(weight("w", 7)).unwrap();
    let sum = g.reduce(ReduceOp::Sum, w, &[0]).unwrap();
    let scalar = TensorType::scalar(DType::F32);
    let expected = GraphError::UpdateType { name: "w".into(), expected: vector(7), found: scalar };
    assert_eq!(g.update(ParameterId(0), sum), Err(expected));
    let half = g.scale(w, 0.5).unwrap();
    g.update(ParameterId(0), half).unwrap();
    assert_eq!(g.update(ParameterId(0), w), Err(GraphError::DuplicateUpdate("w".into())));
}

#[test]
fn what_outputs_and_updates_need_is_live() {
    let mut g = Graph::new();
    let x = g.input("x", vector(7)).unwrap();
    let dead = g.unary(UnaryOp::Exp, x).unwrap();
    let w = g.parameter(weight("w", 7)).unwrap();
    let y = g.unary(UnaryOp::Neg, x).unwrap();
    let next = g.mul(w, y).unwrap();
    g.output("y", y).unwrap();
    g.update(ParameterId(0), next).unwrap();
    assert_eq!(g.live(), [x, w, y, next]);
    assert!(!g.live().contains(&dead));
}

#[test]
fn rewriting_drops_dead_nodes_and_keeps_declarations() {
    let mut g = Graph::new();
    let x = g.input("x", vector(7)).unwrap();
    g.input("unused", vector(3)).unwrap();
    g.unary(UnaryOp::Exp, x).unwrap();
    let w = g.parameter(weight("w", 7)).unwrap();
    let y = g.add(x, w).unwrap();
    g.output("y", y).unwrap();
    g.update(ParameterId(0), y).unwrap();
    let swapped: Graph = g
        .rewrite(|g, node, operands| match node.op {
            Op::Binary(BinaryOp::Add) => g.sub(operands[1], operands[0]),
            _ => g.push(node.op.clone(), operands),
        })
        .unwrap();
    assert_eq!((swapped.inputs(), swapped.parameters()), (g.inputs(), g.parameters()));
    let names: Vec<_> = swapped.nodes().iter().map(|n| n.op.name()).collect();
    assert_eq!(names, ["input", "parameter", "sub"]);
    assert_eq!(swapped.node(NodeId(2)).operands, [NodeId(1), NodeId(0)]);
    assert_eq!(swapped.output_node("y"), Some(NodeId(2)));
    assert_eq!(swapped.updates(), [Update { parameter: ParameterId(0), node: NodeId(2) }]);
    swapped.verify().unwrap();
}

#[test]
fn decomposing_leaves_primitives() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3, 7])).unwrap();
    let y = g.push(Op::Composite(Composite::Softmax { axis: 1 }), &[x]).unwrap();
    let y = g.push(Op::Composite(Composite::Gelu), &[y]).unwrap();
    g.output("y", y).unwrap();
    let primitives = g.decomposed().unwrap().verify().unwrap();
    assert!(!primitives.nodes().iter().any(|n| matches!(n.op, Op::Composite(_))));
    assert_eq!(primitives.ty(primitives.outputs()[0].node), g.ty(y));
}

#[test]
fn verification_finds_each_broken_invariant() {
    let graph = || {
        let mut g = Graph::new();
        let x = g.input("x", vector(7)).unwrap();
        g.unary(UnaryOp::Exp, x).unwrap();
        g
    };
    graph().verify().unwrap();

    let mut g = graph();
    g.nodes[1].operands = vec![NodeId(1)];
    let order = VerifyError::Order { node: NodeId(1), operand: NodeId(1) };
    assert_eq!(g.verify().unwrap_err(), order);

    let mut g = graph();
    g.nodes[1].ty = vector(8);
    let declared = VerifyError::Declared { node: NodeId(1), declared: vector(8), inferred: vector(7) };
    assert_eq!(g.verify().unwrap_err(), declared);

    let mut g = graph();
    g.nodes[1].operands.clear();
    assert!(matches!(g.verify().unwrap_err(), VerifyError::Type { node: NodeId(1), .. }));

    let mut g = graph();
    g.nodes[0].ty = vector(8);
    assert!(matches!(g.verify().unwrap_err(), VerifyError::Declared { node: NodeId(0), .. }));
}
