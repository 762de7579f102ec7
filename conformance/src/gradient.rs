//! The compiled backward program against finite differences of the reference interpreter in f64.

use std::cell::LazyCell;
use std::ops::Deref;

use meganeura_autodiff::{AutodiffError, vjp};
use meganeura_ir::interpreter::{Environment, InterpretError, Value, interpret};
use meganeura_ir::testing::random_tensor;
use meganeura_ir::{DType, Graph, GraphError, NodeId, Op, Tensor, TensorType};

use crate::execute::{Engine, Refusal};
use crate::outcome::Gradient;
use crate::run::Prepared;

/// Random directions through all floats at once.
const DIRECTIONS: u64 = 3;
/// Single elements at least and at most, over all tensors.
const ELEMENTS: (usize, usize) = (1, 96);
/// Elementary operations that finite differences of one test may take in the interpreter, and those that they should take.
const BUDGET: (u64, u64) = (600_000_000, 40_000_000);
/// Evaluations for the slope along one direction.
const EVALUATIONS: u64 = 4;
/// The larger of the two steps.
const STEP: f64 = 1e-5;
/// Allowed deviation, relative to the slope and to the root mean square of the tensor's gradient.
const TOLERANCE: f64 = 1e-3;
/// Allowed beyond that: a multiple of what the same arithmetic loses in the interpreter when it rounds to f32.
const ROUNDING: f64 = 4.0;

/// Compares; none where no output is a float function of a float input or weight.
pub fn check(engine: &Engine, prepared: &Prepared) -> Option<Gradient> {
    let graph = match prepared.graph.decomposed() {
        Ok(graph) => graph,
        Err(e) => return Some(Gradient::Refused { reason: e.to_string() }),
    };
    let wrt = differentiable_leaves(&prepared.graph);
    if wrt.is_empty() {
        return None;
    }
    if cost(&graph) * EVALUATIONS * (DIRECTIONS + ELEMENTS.0 as u64) > BUDGET.0 {
        return Some(Gradient::Refused { reason: "too large for finite differences".to_owned() });
    }
    let outcome = Objective::new(&graph, prepared).map_err(Failure::from).and_then(|objective| {
        let backward = Backward::new(prepared, &wrt, &objective.cotangents)?;
        let execution = engine.execute(backward.graph.clone(), &backward.inputs, &prepared.weights)?;
        let found: Vec<Vec<f64>> = execution.outputs.iter().map(Tensor::to_f64_vec).collect();
        let rounding = LazyCell::new(|| backward.rounding(&prepared.weights));
        Ok(compare(&objective, &wrt, &found, &rounding))
    });
    Some(outcome.unwrap_or_else(|failure| match failure {
        Failure::Undefined(reason) => Gradient::Undefined { reason },
        Failure::Other(reason) => Gradient::Refused { reason },
    }))
}

enum Failure {
    Undefined(String),
    Other(String),
}

impl From<AutodiffError> for Failure {
    fn from(error: AutodiffError) -> Self {
        match error {
            AutodiffError::NotDifferentiable { op, reason, .. } => Failure::Undefined(format!("{op}: {reason}")),
            error => Failure::Other(error.to_string()),
        }
    }
}

impl From<GraphError> for Failure {
    fn from(error: GraphError) -> Self {
        Failure::Other(error.to_string())
    }
}

impl From<InterpretError> for Failure {
    fn from(error: InterpretError) -> Self {
        Failure::Other(error.to_string())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Failure::Other(refusal.detail)
    }
}

/// An input or parameter to differentiate by.
#[derive(Clone, Copy, Debug)]
struct Leaf {
    node: NodeId,
    place: Place,
}

/// Which of an environment's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Input(usize),
    Parameter(usize),
}

/// The float inputs and parameters that a float output depends on through floats.
fn differentiable_leaves(graph: &Graph) -> Vec<Leaf> {
    let mut needed = vec![false; graph.nodes().len()];
    for output in graph.outputs() {
        needed[output.node.index()] = graph.ty(output.node).dtype.is_float();
    }
    let mut leaves = Vec::new();
    for id in graph.ids().rev().filter(|id| graph.ty(*id).dtype.is_float()) {
        if !needed[id.index()] {
            continue;
        }
        let node = graph.node(id);
        match node.op {
            Op::Input(i) => leaves.push(Leaf { node: id, place: Place::Input(i.0 as usize) }),
            Op::Parameter(p) => leaves.push(Leaf { node: id, place: Place::Parameter(p.0 as usize) }),
            _ => node.operands.iter().for_each(|o| needed[o.index()] |= graph.ty(*o).dtype.is_float()),
        }
    }
    leaves.retain(|leaf| graph.ty(leaf.node).shape.numel() > 0);
    leaves.reverse();
    leaves
}

/// About how many elementary operations the interpreter takes for `graph`.
fn cost(graph: &Graph) -> u64 {
    let elements = |id: NodeId| graph.ty(id).shape.numel() as u64;
    let of = |id: NodeId| {
        let node = graph.node(id);
        let operands = || node.operands.iter().map(|o| elements(*o)).sum::<u64>();
        let inner: usize = match &node.op {
            Op::Dot(dims) => dims.lhs_contract.iter().map(|&a| graph.ty(node.operands[0]).shape[a]).product(),
            Op::Conv(_) => graph.ty(node.operands[1]).shape[1..].iter().product(),
            _ => return elements(id).max(operands()),
        };
        elements(id) * inner as u64
    };
    graph.live().into_iter().map(of).sum::<u64>().max(1)
}

/// The sum of all float outputs, each times a fixed random cotangent.
struct Objective<'a> {
    graph: &'a Graph,
    base: Environment<f64>,
    /// By output of the graph; none for outputs that are no floats. Zero where the output is not finite.
    cotangents: Vec<Option<Tensor>>,
    /// At the test's own inputs.
    value: f64,
}

impl<'a> Objective<'a> {
    fn new(graph: &'a Graph, prepared: &Prepared) -> Result<Self, InterpretError> {
        let base = Environment::from_tensors(&prepared.inputs, &prepared.weights);
        let outputs = interpret(graph, &base)?;
        let cotangent = |(index, value): (usize, &Value<f64>)| {
            let Value::Float(values) = value else { return None };
            let ty = TensorType::new(DType::F32, [values.len()]);
            let random = random_tensor(&ty, 1 + index as u64).to_f64_vec();
            let masked: Vec<f64> = random.iter().zip(values).map(|(c, v)| if v.is_finite() { *c } else { 0.0 }).collect();
            Some(Tensor::from_f64(DType::F32, [values.len()], &masked))
        };
        let cotangents = outputs.outputs().into_iter().enumerate().map(cotangent).collect();
        let mut objective = Objective { graph, base, cotangents, value: 0.0 };
        objective.value = objective.at(&objective.base)?;
        Ok(objective)
    }

    /// Whether a gradient that the device found belongs to an output that is not finite, and so not in the sum: a root of -1 has none.
    fn leaves_out(&self, gradient: f64) -> bool {
        let masked = |cotangent: &Tensor| cotangent.to_f64_vec().contains(&0.0);
        !gradient.is_finite() && self.cotangents.iter().flatten().any(masked)
    }

    fn at(&self, environment: &Environment<f64>) -> Result<f64, InterpretError> {
        let outputs = interpret(self.graph, environment)?;
        let terms = |(value, cotangent): (&Value<f64>, &Option<Tensor>)| {
            let (Value::Float(values), Some(cotangent)) = (value, cotangent) else { return 0.0 };
            let weighted = values.iter().zip(cotangent.to_f64_vec()).filter(|(_, c)| *c != 0.0);
            weighted.map(|(v, c)| v * c).sum::<f64>()
        };
        Ok(outputs.outputs().into_iter().zip(&self.cotangents).map(terms).sum())
    }

    /// The derivative along `direction`, by leaf and element; none where there is no derivative, or not near enough to see.
    fn slope(&self, direction: &Direction, floor: f64) -> Option<f64> {
        let at = |by: f64| self.at(&direction.moved(&self.base, by)).ok().filter(|v| v.is_finite());
        let differences = |step: f64| {
            let (after, before) = (at(step)?, at(-step)?);
            // The slope, and by how much the slopes to both sides differ.
            Some(((after - before) / (2.0 * step), ((after - 2.0 * self.value + before) / step).abs()))
        };
        let ((coarse, coarse_gap), (fine, fine_gap)) = (differences(STEP)?, differences(STEP / 2.0)?);
        let noise = 1e-9 * (1.0 + self.value.abs());
        let significant = TOLERANCE * (fine.abs() + floor) + noise;
        // Where the function is smooth the gap halves with the step; at a kink it stays.
        let kink = fine_gap > significant && fine_gap > 0.75 * coarse_gap;
        // The error of each is quadratic in its step: this combination cancels it.
        ((coarse - fine).abs() <= significant && !kink).then_some((4.0 * fine - coarse) / 3.0)
    }
}

/// A change of some elements of some tensors.
struct Direction(Vec<(Place, Vec<(usize, f64)>)>);

impl Direction {
    fn moved(&self, base: &Environment<f64>, by: f64) -> Environment<f64> {
        let mut moved = base.clone();
        for (place, changes) in &self.0 {
            let value = match place {
                Place::Input(i) => moved.inputs.get_mut(*i),
                Place::Parameter(i) => moved.parameters.get_mut(*i),
            };
            let Some(Value::Float(values)) = value else { continue };
            for (at, change) in changes {
                values[*at] += by * change;
            }
        }
        moved
    }
}

/// The gradients by each leaf, as a graph, and its inputs.
struct Backward {
    graph: Graph,
    inputs: Vec<Tensor>,
}

impl Backward {
    fn new(prepared: &Prepared, wrt: &[Leaf], cotangents: &[Option<Tensor>]) -> Result<Self, Failure> {
        let mut graph = prepared.graph.clone();
        let mut inputs = prepared.inputs.clone();
        let mut seeds = Vec::new();
        for (index, output) in prepared.graph.outputs().iter().enumerate() {
            let Some(Some(cotangent)) = cotangents.get(index) else { continue };
            let ty = graph.ty(output.node).clone();
            let seed = graph.input(format!("cotangent of output {index}"), ty.clone())?;
            let cotangent = cotangent.clone().reshaped(ty.shape).map_err(|e| Failure::Other(e.to_string()))?;
            inputs.push(cotangent.cast(ty.dtype));
            seeds.push((output.node, seed));
        }
        let leaves: Vec<NodeId> = wrt.iter().map(|leaf| leaf.node).collect();
        let gradients = vjp(&mut graph, &seeds, &leaves)?;
        graph.clear_outputs();
        for (index, gradient) in gradients.into_iter().enumerate() {
            graph.output(format!("gradient {index}"), gradient)?;
        }
        Ok(Backward { graph, inputs })
    }

    /// By how much the reference interpreter in f32 is off from itself in f64, at most, by leaf: what 24 bits cost where terms cancel
    /// or functions saturate. Nothing where it cannot be evaluated.
    fn rounding(&self, weights: &[Tensor]) -> Vec<f64> {
        let exact = interpret(&self.graph, &Environment::<f64>::from_tensors(&self.inputs, weights));
        let rounded = interpret(&self.graph, &Environment::<f32>::from_tensors(&self.inputs, weights));
        let (Ok(exact), Ok(rounded)) = (exact, rounded) else { return Vec::new() };
        let worst = |(exact, rounded): (&Value<f64>, &Value<f32>)| {
            let pairs = exact.to_f64_vec().into_iter().zip(rounded.to_f64_vec());
            pairs.map(|(e, r)| (e - r).abs()).filter(|error| error.is_finite()).fold(0.0, f64::max)
        };
        exact.outputs().into_iter().zip(rounded.outputs()).map(worst).collect()
    }
}

/// `rounding` is what arithmetic in f32 costs, by leaf; it is asked for where a deviation shows.
fn compare(objective: &Objective, wrt: &[Leaf], found: &[Vec<f64>], rounding: &dyn Deref<Target = Vec<f64>>) -> Gradient {
    let cost_of_rounding = |leaf: usize| ROUNDING * rounding.get(leaf).copied().unwrap_or(0.0);
    let evaluations = BUDGET.1 / cost(objective.graph);
    let elements = (evaluations / EVALUATIONS).saturating_sub(DIRECTIONS) as usize;
    let per_leaf = (elements.clamp(ELEMENTS.0, ELEMENTS.1) / wrt.len()).max(1);
    let (mut checked, mut kinks) = (0, Vec::new());
    for (index, (leaf, gradient)) in wrt.iter().zip(found).enumerate() {
        let floor = root_mean_square(gradient);
        for at in spread(gradient.len(), per_leaf) {
            let slope = objective.slope(&Direction(vec![(leaf.place, vec![(at, 1.0)])]), floor);
            let Some(expected) = slope.filter(|slope| !(objective.leaves_out(gradient[at]) && *slope == 0.0)) else {
                kinks.push((leaf.place, at));
                continue;
            };
            checked += 1;
            if let Some(detail) = deviation(gradient[at], expected, floor, || cost_of_rounding(index)) {
                return Gradient::Wrong { detail: format!("element {at} by {:?}: {detail}", leaf.place) };
            }
        }
    }
    let mut unseen = 0;
    for seed in 0..DIRECTIONS {
        let direction = random_direction(objective, wrt, found, seed, &kinks);
        let terms: Vec<f64> = direction.0.iter().zip(found).flat_map(|((_, c), g)| c.iter().map(|(at, c)| g[*at] * c)).collect();
        let floor = terms.iter().map(|t| t * t).sum::<f64>().sqrt();
        let Some(expected) = objective.slope(&direction, floor).filter(|_| !terms.is_empty()) else {
            unseen += 1;
            continue;
        };
        checked += 1;
        let extra = || {
            let length = |changes: &[(usize, f64)]| changes.iter().map(|(_, c)| c * c).sum::<f64>().sqrt();
            direction.0.iter().enumerate().map(|(leaf, (_, changes))| cost_of_rounding(leaf) * length(changes)).sum()
        };
        if let Some(detail) = deviation(terms.iter().sum(), expected, floor, extra) {
            return Gradient::Wrong { detail: format!("along direction {seed}: {detail}") };
        }
    }
    let kinks = kinks.len() + unseen;
    if checked == 0 { Gradient::Kinks { kinks } } else { Gradient::Ok { checked, kinks } }
}

/// A random change of every element but those of `fixed`, and those that only undefined outputs depend on.
fn random_direction(objective: &Objective, wrt: &[Leaf], found: &[Vec<f64>], seed: u64, fixed: &[(Place, usize)]) -> Direction {
    let change = |(index, (leaf, gradient)): (usize, (&Leaf, &Vec<f64>))| {
        let ty = TensorType::new(DType::F64, [gradient.len()]);
        let random = random_tensor(&ty, 1000 * (seed + 1) + index as u64).to_f64_vec();
        let moves = |at: usize| !fixed.contains(&(leaf.place, at)) && !objective.leaves_out(gradient[at]);
        (leaf.place, random.into_iter().enumerate().filter(|(at, _)| moves(*at)).collect())
    };
    Direction(wrt.iter().zip(found).enumerate().map(change).collect())
}

/// At most `count` positions of `0..n`, evenly spread.
fn spread(n: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(n);
    (0..count).map(move |i| i * n / count)
}

fn root_mean_square(values: &[f64]) -> f64 {
    let finite = || values.iter().filter(|v| v.is_finite());
    (finite().map(|v| v * v).sum::<f64>() / finite().count().max(1) as f64).sqrt()
}

/// `extra` is allowed where the tolerance alone does not do.
fn deviation(found: f64, expected: f64, floor: f64, extra: impl FnOnce() -> f64) -> Option<String> {
    let (error, tolerance) = ((found - expected).abs(), TOLERANCE * (expected.abs() + floor) + 1e-6);
    let near = error <= tolerance || error <= tolerance + extra();
    (!near).then(|| format!("{found:.6e}, numerically {expected:.6e}"))
}

#[cfg(test)]
mod tests {
    use meganeura_ir::{Composite, UnaryOp};

    use super::*;

    /// `build` of an f32 input that holds `x`, ready to be differentiated.
    fn prepared(x: &[f32], build: impl Fn(&mut Graph, NodeId) -> Result<NodeId, GraphError>) -> Prepared {
        let mut graph = Graph::new();
        let input = graph.input("x", TensorType::new(DType::F32, [x.len()])).unwrap();
        let y = build(&mut graph, input).unwrap();
        graph.output("y", y).unwrap();
        Prepared { graph, inputs: vec![Tensor::from_f32([x.len()], x)], weights: Vec::new() }
    }

    /// The outcome if the device found `factor` times `derivative` for each element.
    fn outcome(prepared: &Prepared, derivative: impl Fn(f64) -> f64, factor: f64) -> Gradient {
        let graph = prepared.graph.decomposed().unwrap();
        let objective = Objective::new(&graph, prepared).unwrap();
        let cotangent = objective.cotangents[0].as_ref().unwrap().to_f64_vec();
        let x = prepared.inputs[0].to_f64_vec();
        let found = x.iter().zip(cotangent).map(|(x, c)| factor * c * derivative(*x)).collect();
        let leaves = differentiable_leaves(&prepared.graph);
        let Ok(backward) = Backward::new(prepared, &leaves, &objective.cotangents) else { panic!("a derivative exists") };
        compare(&objective, &leaves, &[found], &LazyCell::new(|| backward.rounding(&[])))
    }

    #[test]
    fn a_derivative_that_is_off_by_a_percent_is_wrong() {
        let sine = prepared(&[0.1, -0.7, 2.5], |g, x| g.unary(UnaryOp::Sin, x));
        assert_eq!(outcome(&sine, f64::cos, 1.0), Gradient::Ok { checked: 6, kinks: 0 });
        for factor in [0.0, 0.99, 1.01, -1.0, f64::NAN] {
            assert!(matches!(outcome(&sine, f64::cos, factor), Gradient::Wrong { .. }), "{factor}");
        }
    }

    #[test]
    fn a_saturated_function_may_lose_the_digits_that_f32_loses() {
        // 1 - tanh(x)^2 from a rounded tanh(x).
        let slope_of = |tanh: f64| 1.0 - tanh * tanh;
        let saturated = prepared(&[6.0, 7.5], |g, x| g.unary(UnaryOp::Tanh, x).and_then(|y| g.scale(y, 100.0)));
        let rounded = |x: f64| 100.0 * slope_of(f64::from(x.tanh() as f32));
        assert!(matches!(outcome(&saturated, rounded, 1.0), Gradient::Ok { .. }));
        assert!(matches!(outcome(&saturated, rounded, 1.5), Gradient::Wrong { .. }));
    }

    #[test]
    fn a_kink_is_excluded_and_hides_nothing_else() {
        let relu = prepared(&[1.0, 0.0, -1.0], |g, x| g.push(Op::Composite(Composite::Relu), &[x]));
        let step = |x: f64| if x > 0.0 { 1.0 } else { 0.0 };
        assert_eq!(outcome(&relu, step, 1.0), Gradient::Ok { checked: 5, kinks: 1 });
        assert!(matches!(outcome(&relu, step, 0.5), Gradient::Wrong { .. }));
        let jump = prepared(&[2.0], |g, x| g.unary(UnaryOp::Floor, x));
        assert_eq!(outcome(&jump, |_| 0.0, 1.0), Gradient::Kinks { kinks: 4 });
    }

    #[test]
    fn values_without_a_finite_slope_are_excluded() {
        let root = prepared(&[0.0, 4.0], |g, x| g.unary(UnaryOp::Sqrt, x));
        assert_eq!(outcome(&root, |x| 0.5 / x.sqrt(), 1.0), Gradient::Ok { checked: 4, kinks: 1 });
    }

    #[test]
    fn what_only_undefined_outputs_depend_on_has_no_gradient() {
        let root = prepared(&[-1.0, 4.0, 9.0], |g, x| g.unary(UnaryOp::Sqrt, x));
        assert_eq!(outcome(&root, |x| 0.5 / x.sqrt(), 1.0), Gradient::Ok { checked: 5, kinks: 1 });
        let wrong = outcome(&root, |x| if x == 4.0 { f64::NAN } else { 0.5 / x.sqrt() }, 1.0);
        assert!(matches!(wrong, Gradient::Wrong { .. }), "{wrong:?}");
    }

    #[test]
    fn only_floats_are_differentiated() {
        let counted = prepared(&[1.0], |g, x| g.cast(x, DType::I32));
        assert!(differentiable_leaves(&counted.graph).is_empty());
        let floats = prepared(&[1.0], |g, x| g.mul(x, x));
        assert_eq!(differentiable_leaves(&floats.graph).len(), 1);
    }
}
