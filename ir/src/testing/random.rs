use super::{Samples, f32s};
use crate::{CompareOp, DotDims, Graph, GraphError, NodeId, Op, ReduceOp, Shape, random_key_type};

pub(super) fn add(samples: &mut Samples) {
    let shapes: [&[usize]; 6] = [&[], &[1], &[257], &[7, 33], &[3, 1, 5], &[0, 7]];
    for (stream, shape) in (0..).zip(shapes) {
        let name = format!("random_uniform {} of stream {stream}", Shape::from(shape));
        samples.add(name, &[random_key_type()], |g, x| uniform(g, x[0], shape, stream));
    }
    samples.add("random_uniform of the last stream, moved".into(), &[random_key_type()], |g, x| {
        let numbers = uniform(g, x[0], &[5, 12], u32::MAX)?;
        let moved = g.transpose(numbers, &[1, 0])?;
        g.reshape(moved, [3, 4, 5])
    });
    samples.add("random_uniform summed along rows".into(), &[random_key_type()], |g, x| {
        let numbers = uniform(g, x[0], &[9, 130], 1)?;
        g.reduce(ReduceOp::Sum, numbers, &[1])
    });
    samples
        .add("dropout by random_uniform".into(), &[f32s(&[7, 33]), random_key_type()], |g, x| dropout(g, x[0], x[1], &[7, 33]));
    samples.add("dropout by random_uniform before a dot".into(), &[f32s(&[6, 17]), random_key_type(), f32s(&[17, 5])], |g, x| {
        let dropped = dropout(g, x[0], x[1], &[6, 17])?;
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
        g.push(Op::Dot(dims), &[dropped, x[2]])
    });
    samples.add("dot of random_uniform".into(), &[random_key_type(), f32s(&[17, 5])], |g, x| {
        let numbers = uniform(g, x[0], &[6, 17], 2)?;
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
        g.push(Op::Dot(dims), &[numbers, x[1]])
    });
}

fn uniform(g: &mut Graph, key: NodeId, shape: &[usize], stream: u32) -> Result<NodeId, GraphError> {
    g.push(Op::RandomUniform { shape: Shape::from(shape), stream }, &[key])
}

/// A quarter of the elements of `x`, zero.
fn dropout(g: &mut Graph, x: NodeId, key: NodeId, shape: &[usize]) -> Result<NodeId, GraphError> {
    let numbers = uniform(g, key, shape, 0)?;
    let ratio = g.constant_like(numbers, 0.25)?;
    let kept = g.compare(CompareOp::Ge, numbers, ratio)?;
    let (scale, zero) = (g.constant_like(x, 4.0 / 3.0)?, g.constant_like(x, 0.0)?);
    let factor = g.select(kept, scale, zero)?;
    g.mul(x, factor)
}
