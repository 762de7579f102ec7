//! What becomes of attention: how many kernels, what they take along, and their text.

use meganeura_codegen::{CompileOptions, DeviceProfile, Program, compile};
use meganeura_ir::testing::rotated_gradients;
use meganeura_ir::{
    AttentionDims, AttentionOperand, Composite, DType, DotDims, Graph, GraphError, NodeId, Op, Shape, SliceDim, TensorType,
};

fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

fn built(build: impl FnOnce(&mut Graph) -> Result<(), GraphError>) -> Graph {
    let mut g = Graph::new();
    build(&mut g).expect("the graph is well typed");
    g
}

fn compiled(graph: &Graph, profile: &DeviceProfile) -> Program {
    let verified = graph.clone().verify().expect("the graph is valid");
    compile(&verified, profile, &CompileOptions::default()).expect("the graph compiles").program
}

fn large() -> DeviceProfile {
    DeviceProfile { max_workgroup_bytes: 48 << 10, ..DeviceProfile::generic() }
}

fn families(program: &Program) -> Vec<&str> {
    program.dispatches.iter().map(|d| program.kernels[d.kernel].label.split(' ').next().unwrap_or_default()).collect()
}

fn attention(g: &mut Graph, dims: AttentionDims, operands: &[NodeId]) -> Result<NodeId, GraphError> {
    g.push(Op::Composite(Composite::Attention(dims)), operands)
}

/// `[batch, sequence, heads * size]` as `[batch, heads, sequence, size]`.
fn heads(g: &mut Graph, x: NodeId, count: usize) -> Result<NodeId, GraphError> {
    let shape = g.ty(x).shape.clone();
    let x = g.reshape(x, [shape[0], shape[1], count, shape[2] / count])?;
    g.transpose(x, &[0, 2, 1, 3])
}

/// `(x1 cos - x2 sin, x2 cos + x1 sin)`, the halves of the last axis.
fn rotated(g: &mut Graph, x: NodeId, cos: NodeId, sin: NodeId) -> Result<NodeId, GraphError> {
    let shape = g.ty(x).shape.clone();
    let half = shape[3] / 2;
    let mut part = |start| {
        let whole = shape[..3].iter().map(|&size| SliceDim { start: 0, step: 1, size });
        g.push(Op::Slice(whole.chain([SliceDim { start, step: 1, size: half }]).collect()), &[x])
    };
    let (a, b) = (part(0)?, part(half)?);
    let halves: Shape = shape[..3].iter().copied().chain([half]).collect();
    let (cos, sin) = (g.broadcast_to(cos, &halves)?, g.broadcast_to(sin, &halves)?);
    let (ac, bs, bc, as_) = (g.mul(a, cos)?, g.mul(b, sin)?, g.mul(b, cos)?, g.mul(a, sin)?);
    let (first, second) = (g.sub(ac, bs)?, g.add(bc, as_)?);
    g.push(Op::Concat { axis: 3 }, &[first, second])
}

/// Projections, rotation, attention of 6 heads in 2 groups, and the projection of its result.
fn layer(sequence: usize) -> Graph {
    built(|g| {
        let x = g.input("x", f32s(&[1, sequence, 96]))?;
        let [cos, sin] = ["cos", "sin"].map(|name| g.input(name, f32s(&[sequence, 8])));
        let (cos, sin) = (cos?, sin?);
        let project = |g: &mut Graph, x: NodeId, name: &str, columns: usize| {
            let w = g.input(name, f32s(&[96, columns]))?;
            g.push(Op::Dot(DotDims { lhs_contract: vec![2], rhs_contract: vec![0], ..DotDims::default() }), &[x, w])
        };
        let (q, k, v) = (project(g, x, "wq", 96)?, project(g, x, "wk", 32)?, project(g, x, "wv", 32)?);
        let (q, k, v) = (heads(g, q, 6)?, heads(g, k, 2)?, heads(g, v, 2)?);
        let (q, k) = (rotated(g, q, cos, sin)?, rotated(g, k, cos, sin)?);
        let q = g.reshape(q, [1, 2, 3, sequence, 16])?;
        let (k, v) = (g.reshape(k, [1, 2, 1, sequence, 16])?, g.reshape(v, [1, 2, 1, sequence, 16])?);
        let dims = AttentionDims { causal: Some(0), ..AttentionDims::scaled(0.25) };
        let y = attention(g, dims, &[q, k, v])?;
        let y = g.reshape(y, [1, 6, sequence, 16])?;
        let y = g.transpose(y, &[0, 2, 1, 3])?;
        let y = g.reshape(y, [1, sequence, 96])?;
        let y = project(g, y, "wo", 96)?;
        g.output("y", y)
    })
}

#[test]
fn attention_reads_and_writes_heads_where_they_lie_and_rotates_short_sequences_on_the_way() {
    let short = compiled(&layer(40), &large());
    assert!(!families(&short).contains(&"map"), "{:?}", families(&short));
    assert_eq!(families(&short).iter().filter(|f| **f == "attention").count(), 1);
    let long = compiled(&layer(400), &large());
    assert!(families(&long).contains(&"map"), "rotated keys are read by many tiles");
}

/// The forward pass with its log-sum-exp, and all derivatives.
fn gradients(mask: bool) -> Graph {
    built(|g| {
        let dims = AttentionDims::scaled(0.5);
        let [q, k, v] = [("q", 9), ("k", 20), ("v", 20)].map(|(name, rows)| g.input(name, f32s(&[3, rows, 8])));
        let (q, k, v) = (q?, k?, v?);
        let mask = mask.then(|| g.input("mask", f32s(&[1, 9, 20]))).transpose()?;
        let with = |nodes: &[NodeId]| nodes.iter().copied().chain(mask).collect::<Vec<_>>();
        let y = attention(g, dims.clone(), &with(&[q, k, v]))?;
        let lse = g.push(Op::Composite(Composite::AttentionLse(dims.clone())), &with(&[q, k]))?;
        let (dy, delta) = (g.input("dy", f32s(&[3, 9, 8]))?, g.input("delta", f32s(&[3, 9]))?);
        g.output("y", y)?;
        for of in [AttentionOperand::Query, AttentionOperand::Key, AttentionOperand::Value] {
            let op = Op::Composite(Composite::AttentionGradient { dims: dims.clone(), of });
            let d = g.push(op, &with(&[q, k, v, dy, lse, delta]))?;
            g.output(format!("{of:?}"), d)?;
        }
        Ok(())
    })
}

#[test]
fn forward_is_one_dispatch_and_backward_another() {
    for mask in [false, true] {
        let families: Vec<String> = families(&compiled(&gradients(mask), &large())).iter().map(|f| f.to_string()).collect();
        assert_eq!(families, ["attention", "attention"]);
    }
}

#[test]
fn what_turns_the_gradients_of_queries_and_keys_ends_their_kernels() {
    for (name, graph) in rotated_gradients() {
        let dispatches = |profile: &DeviceProfile| compiled(&graph, profile).dispatches.len();
        assert_eq!(dispatches(&DeviceProfile::software()), 1, "{name}");
        // An invocation of a tile holds every sixteenth column.
        let expected = if name.contains("size 6") && !name.contains("size 64") { 2 } else { 1 };
        assert_eq!(dispatches(&large()), expected, "{name}");
    }
}

#[test]
fn derivatives_that_bind_too_many_buffers_are_kernels_of_their_own() {
    let narrow = DeviceProfile { max_storage_bindings: 8, ..large() };
    assert_eq!(compiled(&gradients(true), &narrow).dispatches.len(), 4);
}

#[test]
fn what_no_kernel_fits_is_decomposed() {
    let long = built(|g| {
        let (q, k) = (g.input("q", f32s(&[2, 4]))?, g.input("k", f32s(&[40_000, 4]))?);
        let y = attention(g, AttentionDims::scaled(1.0), &[q, k, k])?;
        g.output("y", y)
    });
    assert!(!families(&compiled(&long, &DeviceProfile::software())).contains(&"attention"));
    assert!(families(&compiled(&long, &large())).contains(&"attention"));
}

#[test]
fn attention_prints_readable_wgsl() {
    let small = built(|g| {
        let (q, k, v) =
            (g.input("q", f32s(&[2, 3, 20, 2]))?, g.input("k", f32s(&[2, 1, 33, 2]))?, g.input("v", f32s(&[2, 1, 33, 3]))?);
        let y = attention(g, AttentionDims { causal: Some(13), ..AttentionDims::scaled(0.5) }, &[q, k, v])?;
        g.output("y", y)
    });
    let kernel = |profile: &DeviceProfile| compiled(&small, profile).kernels.remove(0).wgsl;
    insta::assert_snapshot!("direct", kernel(&DeviceProfile::software()));
    insta::assert_snapshot!("tiled", kernel(&DeviceProfile::generic()));
}
