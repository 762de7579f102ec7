//! Helpers for the tests of every crate: random tensors, an error measure, and a matrix of small graphs.

mod attention;
mod composites;
mod contraction;
mod indexing;
mod movement;
mod pointwise;
mod random;
mod reduction;
mod schedules;

pub use attention::rotated_gradients;
pub use schedules::{contraction_graphs, random_graph};

use crate::{DType, DTypeClass, Graph, GraphError, NodeId, Shape, Tensor, TensorType};

/// Steele, Lea and Flood's SplitMix64: the next state and a number of 64 random bits.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A tensor that depends on `ty` and `seed` alone.
///
/// Floats lie in `-2..2`, all different, with gaps of at least `2 / n` between any two of the `n` elements before they round to the
/// dtype. Integers lie in `-4..=4`, or `0..=8` if unsigned.
pub fn random_tensor(ty: &TensorType, seed: u64) -> Tensor {
    let mut state = seed;
    let n = ty.shape.numel();
    match ty.dtype.class() {
        DTypeClass::Float => {
            let mut strata: Vec<usize> = (0..n).collect();
            for i in (1..n).rev() {
                strata.swap(i, (splitmix(&mut state) % (i as u64 + 1)) as usize);
            }
            let values: Vec<f64> = strata
                .into_iter()
                .map(|stratum| {
                    let uniform = (splitmix(&mut state) >> 11) as f64 / (1u64 << 53) as f64;
                    4.0 * (stratum as f64 + 0.25 + 0.5 * uniform) / n as f64 - 2.0
                })
                .collect();
            Tensor::from_f64(ty.dtype, ty.shape.clone(), &values)
        }
        DTypeClass::Int => {
            let lowest = if is_unsigned(ty.dtype) { 0 } else { -4 };
            let values: Vec<i64> = (0..n).map(|_| (splitmix(&mut state) % 9) as i64 + lowest).collect();
            Tensor::from_i64(ty.dtype, ty.shape.clone(), &values)
        }
        DTypeClass::Bool => {
            let values: Vec<i64> = (0..n).map(|_| (splitmix(&mut state) >> 63) as i64).collect();
            Tensor::from_i64(ty.dtype, ty.shape.clone(), &values)
        }
    }
}

fn is_unsigned(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64)
}

/// `|a - b| / |b|` in the Euclidean norm; `|a|` where `b` is zero.
///
/// Elements where both are NaN, or the same infinity, count as equal; any other element that is not finite makes the result infinite.
///
/// # Panics
/// If the lengths differ.
pub fn relative_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "lengths");
    let (mut difference, mut reference) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        if a == b && a.is_infinite() || a.is_nan() && b.is_nan() {
            continue;
        }
        if !a.is_finite() || !b.is_finite() {
            return f64::INFINITY;
        }
        difference += (a - b) * (a - b);
        reference += b * b;
    }
    if reference > 0.0 { (difference / reference).sqrt() } else { difference.sqrt() }
}

/// Small graphs that together hold every op, with every kind of attribute, at odd shapes.
///
/// Each has a unique name, inputs `x0`, `x1`, .. (meant for [`random_tensor`]) and one output, `y`. A few ops stand beside the one under
/// test where they keep its operands in its domain. None needs more than about 100 thousand multiplications.
pub fn sample_graphs() -> Vec<(String, Graph)> {
    let mut samples = Samples(Vec::new());
    pointwise::add(&mut samples);
    movement::add(&mut samples);
    contraction::add(&mut samples);
    reduction::add(&mut samples);
    indexing::add(&mut samples);
    random::add(&mut samples);
    composites::add(&mut samples);
    attention::add(&mut samples);
    samples.0
}

struct Samples(Vec<(String, Graph)>);

impl Samples {
    /// Adds the graph `y = build(x0, x1, ..)`.
    fn add(
        &mut self,
        name: String,
        inputs: &[TensorType],
        build: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId, GraphError>,
    ) {
        match graph_of(inputs, build) {
            Ok(g) => self.0.push((name, g)),
            Err(e) => panic!("sample {name} is wrong: {e}"),
        }
    }
}

fn graph_of(
    inputs: &[TensorType],
    build: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId, GraphError>,
) -> Result<Graph, GraphError> {
    let mut g = Graph::new();
    let x = inputs.iter().enumerate().map(|(i, ty)| g.input(format!("x{i}"), ty.clone())).collect::<Result<Vec<_>, _>>()?;
    let y = build(&mut g, &x)?;
    g.output("y", y)?;
    Ok(g)
}

fn typed(dtype: DType, shape: &[usize]) -> TensorType {
    TensorType::new(dtype, Shape::from(shape))
}

fn f32s(shape: &[usize]) -> TensorType {
    typed(DType::F32, shape)
}

#[cfg(test)]
mod tests;
