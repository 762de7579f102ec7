//! Recurrent layers, unrolled over the sequence. Directions are a batch axis: one step advances both.

use meganeura_ir::{CompareOp, Composite, DType, DotDims, NodeId, Op, Shape, Tensor, TensorType, UnaryOp};

use super::activation::{by_sign, clamp, exp_minus_one, hard_sigmoid_of};
use super::movement::{reverse_axes, slice_axis};
use super::{Row, Rule, row};
use crate::context::{Context, table_size};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("GRU",                   3..=6, &[4],    Rule::Many(gru)),
    row("LSTM",                  3..=8, &[4],    Rule::Many(lstm)),
    row("RNN",                   3..=6, &[4],    Rule::Many(rnn)),
];

/// Nodes that one operator may unroll into.
const MAX_UNROLLED_NODES: usize = 1 << 16;

/// The value of `alpha` or `beta` of an activation where the attributes do not say.
#[derive(Clone, Copy)]
enum Default {
    Value(f64),
    /// The standard names none.
    Missing,
    /// The activation has no such number.
    Unused,
}

/// `(x, alpha, beta)`
type Function = fn(&mut Context, NodeId, f64, f64) -> Result<NodeId, OpError>;

/// Activations by name, with the defaults of `alpha` and `beta`.
#[rustfmt::skip]
const ACTIVATIONS: &[(&str, Default, Default, Function)] = &[
    ("Affine",          Default::Missing,     Default::Missing,    affine),
    ("Elu",             Default::Value(1.0),  Default::Unused,     elu),
    ("HardSigmoid",     Default::Value(0.2),  Default::Value(0.5), hard_sigmoid_of),
    ("LeakyRelu",       Default::Value(0.01), Default::Unused,     leaky_relu),
    ("Relu",            Default::Unused,      Default::Unused,     relu),
    ("ScaledTanh",      Default::Missing,     Default::Missing,    scaled_tanh),
    ("Sigmoid",         Default::Unused,      Default::Unused,     |c, x, _, _| Ok(c.unary(UnaryOp::Sigmoid, x)?)),
    ("Softplus",        Default::Unused,      Default::Unused,     |c, x, _, _| Ok(c.unary(UnaryOp::Softplus, x)?)),
    ("Softsign",        Default::Unused,      Default::Unused,     softsign),
    ("Tanh",            Default::Unused,      Default::Unused,     |c, x, _, _| Ok(c.unary(UnaryOp::Tanh, x)?)),
    ("ThresholdedRelu", Default::Value(1.0),  Default::Unused,     thresholded_relu),
];

fn affine(c: &mut Context, x: NodeId, alpha: f64, beta: f64) -> Result<NodeId, OpError> {
    let y = c.scale(x, alpha)?;
    Ok(c.shift(y, beta)?)
}

fn elu(c: &mut Context, x: NodeId, alpha: f64, _: f64) -> Result<NodeId, OpError> {
    let y = exp_minus_one(c, x, 1.0)?;
    let y = c.scale(y, alpha)?;
    by_sign(c, x, x, y)
}

fn leaky_relu(c: &mut Context, x: NodeId, alpha: f64, _: f64) -> Result<NodeId, OpError> {
    let y = c.scale(x, alpha)?;
    by_sign(c, x, x, y)
}

fn relu(c: &mut Context, x: NodeId, _: f64, _: f64) -> Result<NodeId, OpError> {
    Ok(c.push(Op::Composite(Composite::Relu), &[x])?)
}

fn scaled_tanh(c: &mut Context, x: NodeId, alpha: f64, beta: f64) -> Result<NodeId, OpError> {
    let y = c.scale(x, beta)?;
    let y = c.unary(UnaryOp::Tanh, y)?;
    Ok(c.scale(y, alpha)?)
}

fn softsign(c: &mut Context, x: NodeId, _: f64, _: f64) -> Result<NodeId, OpError> {
    let y = c.unary(UnaryOp::Abs, x)?;
    let y = c.shift(y, 1.0)?;
    Ok(c.div(x, y)?)
}

/// `if x >= alpha { x } else { 0 }`, unlike the operator of that name.
fn thresholded_relu(c: &mut Context, x: NodeId, alpha: f64, _: f64) -> Result<NodeId, OpError> {
    let (alpha, zero) = (c.constant_like(x, alpha)?, c.constant_like(x, 0.0)?);
    let above = c.compare(CompareOp::Ge, x, alpha)?;
    Ok(c.select(above, x, zero)?)
}

#[derive(Clone, Copy)]
struct Activation {
    function: Function,
    alpha: f64,
    beta: f64,
}

impl Activation {
    fn same(&self, other: &Activation) -> bool {
        std::ptr::fn_addr_eq(self.function, other.function) && (self.alpha, self.beta) == (other.alpha, other.beta)
    }
}

/// The activations of every direction: those that `defaults` names unless an attribute says. Lists of `alpha` and `beta` go to the
/// activations that have such a number, in order.
fn activations(c: &Context, defaults: &[&str], directions: usize) -> Result<Vec<Vec<Activation>>, OpError> {
    let names = match c.strings("activations")? {
        Some(names) => names,
        None => defaults.repeat(directions),
    };
    let error = |value: String, reason| OpError::Attribute { name: "activations", value, reason };
    if names.len() != defaults.len() * directions {
        return Err(error(format!("{names:?}"), "each direction needs one per place in the formula"));
    }
    let mut alphas = c.floats("activation_alpha")?.unwrap_or_default().iter().copied();
    let mut betas = c.floats("activation_beta")?.unwrap_or_default().iter().copied();
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        let row = ACTIVATIONS.iter().find(|row| row.0.eq_ignore_ascii_case(name));
        let &(_, alpha, beta, function) = row.ok_or_else(|| error(name.to_owned(), "the standard knows no such activation"))?;
        let alpha = number(alpha, &mut alphas, "activation_alpha")?;
        let beta = number(beta, &mut betas, "activation_beta")?;
        all.push(Activation { function, alpha, beta });
    }
    Ok(all.chunks(defaults.len()).map(<[_]>::to_vec).collect())
}

fn number(default: Default, given: &mut impl Iterator<Item = f32>, name: &'static str) -> Result<f64, OpError> {
    match default {
        Default::Unused => Ok(0.0),
        Default::Value(value) => Ok(given.next().map_or(value, f64::from)),
        Default::Missing => given.next().map(f64::from).ok_or(OpError::MissingAttribute(name)),
    }
}

/// What the three operators share. `d` directions, `n` sequences, `h` hidden units, `g` gates; the first step is the first that is
/// computed, which is the last of the sequence where a direction is reversed.
struct Layer {
    steps: usize,
    /// `[d, n, h]`
    state: Shape,
    reversed: Vec<bool>,
    batch_first: bool,
    clip: Option<f64>,
    activations: Vec<Vec<Activation>>,
    /// The products of the inputs with `W`: `[steps, d, n, g * h]`.
    projected: NodeId,
    /// `R`: `[d, g * h, h]`.
    recurrence: NodeId,
    /// The biases of `W` and of `R`: `[d, g * h]` each.
    biases: Option<[NodeId; 2]>,
    lengths: Option<Lengths>,
}

/// Sequences of different lengths.
struct Lengths {
    /// Whether a step lies within the sequence: `[steps, d, n, h]`.
    within: NodeId,
    /// Whether the sequence has any step: `[d, n, h]`.
    any: NodeId,
}

impl Layer {
    /// Reads the attributes and operands that have the same place in all three operators.
    fn new(c: &mut Context, gates: usize, defaults: &[&str]) -> Result<Layer, OpError> {
        let directions: [(&str, &[bool]); 3] = [("forward", &[false]), ("reverse", &[true]), ("bidirectional", &[false, true])];
        let reversed = c.choice("direction", "forward", &directions)?.to_vec();
        let directions = reversed.len();
        let activations = activations(c, defaults, directions)?;
        let clip = c.float("clip")?.filter(|&clip| clip > 0.0);
        let batch_first = c.flag("layout", false)?;
        let declared = c.int("hidden_size")?;
        let (mut x, w, recurrence) = (c.input(0)?, c.input(1)?, c.input(2)?);
        if c.rank(x) != 3 {
            return Err(c.operand_error(0, "three axes are needed"));
        }
        if batch_first {
            x = c.transpose(x, &[1, 0, 2])?;
        }
        let [steps, batch, features] = [0, 1, 2].map(|axis| c.ty(x).shape[axis]);
        let hidden = c.shape(recurrence).last().copied().unwrap_or(0);
        if declared.is_some_and(|declared| declared != hidden as i64) {
            return Err(c.operand_error(2, "hidden_size is another"));
        }
        let rows = hidden.checked_mul(gates).ok_or_else(|| c.operand_error(2, "the weight is too large"))?;
        expect(c, 1, &[directions, rows, features])?;
        expect(c, 2, &[directions, rows, hidden])?;
        expect(c, 3, &[directions, 2 * rows])?;
        expect(c, 4, &[batch])?;
        table_size(steps.saturating_mul(directions))?;

        let dims = DotDims { lhs_contract: vec![2], rhs_contract: vec![2], ..DotDims::default() };
        let product = c.push(Op::Dot(dims), &[x, w])?;
        let product = c.transpose(product, &[0, 2, 1, 3])?;
        let projected = flip(c, product, &reversed)?;
        let biases = match c.optional(3) {
            Some(b) => Some([slice_axis(c, b, 1, 0, rows)?, slice_axis(c, b, 1, rows, rows)?]),
            None => None,
        };
        let state = Shape::from([directions, batch, hidden]);
        let lengths = Lengths::new(c, steps, &state, &reversed)?;
        Ok(Layer { steps, state, reversed, batch_first, clip, activations, projected, recurrence, biases, lengths })
    }

    fn hidden(&self) -> usize {
        self.state[2]
    }

    /// Operand `index` as a state `[d, n, h]`; zeros if absent.
    fn initial(&self, c: &mut Context, index: usize) -> Result<NodeId, OpError> {
        let Some(state) = c.optional(index) else {
            return Ok(c.splat(&TensorType::new(DType::F32, self.state.clone()), 0.0)?);
        };
        let [directions, batch, hidden] = [0, 1, 2].map(|axis| self.state[axis]);
        if !self.batch_first {
            expect(c, index, &[directions, batch, hidden])?;
            return Ok(state);
        }
        expect(c, index, &[batch, directions, hidden])?;
        Ok(c.transpose(state, &[1, 0, 2])?)
    }

    /// `vector: [d, rows]`, repeated for every step and sequence.
    fn add_bias(&mut self, c: &mut Context, vector: NodeId) -> Result<(), OpError> {
        let shape = c.shape(self.projected);
        let repeated = c.push(Op::Broadcast { shape, axes: vec![1, 3] }, &[vector])?;
        self.projected = c.add(self.projected, repeated)?;
        Ok(())
    }

    /// `vector: [d, h]`, repeated for every sequence.
    fn repeat(&self, c: &mut Context, vector: NodeId) -> Result<NodeId, OpError> {
        Ok(c.push(Op::Broadcast { shape: self.state.clone(), axes: vec![0, 2] }, &[vector])?)
    }

    /// Gate number `index` of `x: [d, n, g * h]`.
    fn gate(&self, c: &mut Context, x: NodeId, index: usize) -> Result<NodeId, OpError> {
        slice_axis(c, x, 2, index * self.hidden(), self.hidden())
    }

    /// As [`Layer::activate`], with `x` clipped first: the sums of gates and candidates are, the cell of an LSTM is not.
    fn activate_sum(&self, c: &mut Context, index: usize, mut x: NodeId) -> Result<NodeId, OpError> {
        if let Some(clip) = self.clip {
            let (low, high) = (c.constant_like(x, -clip)?, c.constant_like(x, clip)?);
            x = clamp(c, x, Some(low), Some(high))?;
        }
        self.activate(c, index, x)
    }

    /// Activation number `index` of the formula, on `x: [d, n, h]`.
    fn activate(&self, c: &mut Context, index: usize, x: NodeId) -> Result<NodeId, OpError> {
        let apply = |c: &mut Context, a: &Activation, x| (a.function)(c, x, a.alpha, a.beta);
        let first = &self.activations[0][index];
        if self.activations.iter().all(|of_direction| of_direction[index].same(first)) {
            return apply(c, first, x);
        }
        let mut parts = Vec::with_capacity(self.activations.len());
        for (direction, activations) in self.activations.iter().enumerate() {
            let part = slice_axis(c, x, 0, direction, 1)?;
            parts.push(apply(c, &activations[index], part)?);
        }
        Ok(c.push(Op::Concat { axis: 0 }, &parts)?)
    }

    /// Applies `step`, which takes the projected input `[d, n, g * h]` and the states and returns the next states, to every step.
    /// Returns the operator's results: all hidden states, then the last states.
    fn unroll(
        &self,
        c: &mut Context,
        initial: Vec<NodeId>,
        step: impl Fn(&Layer, &mut Context, NodeId, &[NodeId]) -> Result<Vec<NodeId>, OpError>,
    ) -> Result<Vec<NodeId>, OpError> {
        let zero = c.splat(&TensorType::new(DType::F32, self.state.clone()), 0.0)?;
        let row: Shape = c.shape(self.projected)[1..].into();
        let mut states = initial;
        let mut hidden = Vec::with_capacity(self.steps);
        for t in 0..self.steps {
            let before = c.nodes().len();
            let input = slice_axis(c, self.projected, 0, t, 1)?;
            let input = c.reshape(input, row.clone())?;
            let next = step(self, c, input, &states)?;
            let mut output = next[0];
            if let Some(lengths) = &self.lengths {
                let within = slice_axis(c, lengths.within, 0, t, 1)?;
                let within = c.reshape(within, self.state.clone())?;
                output = c.select(within, output, zero)?;
                for (state, next) in states.iter_mut().zip(next) {
                    *state = c.select(within, next, *state)?;
                }
            } else {
                states = next;
            }
            let lead = [1].into_iter().chain(self.state.iter().copied()).collect::<Shape>();
            hidden.push(c.reshape(output, lead)?);
            let nodes = (c.nodes().len() - before).saturating_mul(self.steps - t);
            if nodes > MAX_UNROLLED_NODES {
                let what = format!(
                    "a sequence of {} steps, which unrolls into {nodes} nodes (limit: {MAX_UNROLLED_NODES}),",
                    self.steps
                );
                return Err(OpError::unsupported(what));
            }
        }
        let mut results = vec![self.all(c, &hidden)?];
        for state in states {
            let last = match &self.lengths {
                Some(lengths) => c.select(lengths.any, state, zero)?,
                None => state,
            };
            results.push(if self.batch_first { c.transpose(last, &[1, 0, 2])? } else { last });
        }
        Ok(results)
    }

    /// The hidden states of all steps, in the order of the sequence.
    fn all(&self, c: &mut Context, hidden: &[NodeId]) -> Result<NodeId, OpError> {
        if hidden.is_empty() {
            let shape: Shape = [0].into_iter().chain(self.state.iter().copied()).collect();
            let empty = c.splat(&TensorType::new(DType::F32, shape), 0.0)?;
            return Ok(if self.batch_first { c.transpose(empty, &[2, 0, 1, 3])? } else { empty });
        }
        let stacked = c.push(Op::Concat { axis: 0 }, hidden)?;
        let y = flip(c, stacked, &self.reversed)?;
        Ok(if self.batch_first { c.transpose(y, &[2, 0, 1, 3])? } else { y })
    }
}

impl Lengths {
    fn new(c: &mut Context, steps: usize, state: &Shape, reversed: &[bool]) -> Result<Option<Lengths>, OpError> {
        let Some(lengths) = c.optional(4) else { return Ok(None) };
        if c.is_uniform(lengths, steps as f64) && steps > 0 {
            return Ok(None);
        }
        let lengths = c.cast(lengths, DType::I32)?;
        let positions: Vec<i64> = (0..steps)
            .flat_map(|t| reversed.iter().map(move |&reversed| if reversed { steps - 1 - t } else { t } as i64))
            .collect();
        let positions = c.constant_tensor(Tensor::from_i64(DType::I32, [steps, reversed.len()], &positions))?;
        let shape: Shape = [steps].into_iter().chain(state.iter().copied()).collect();
        let position = c.push(Op::Broadcast { shape: shape.clone(), axes: vec![0, 1] }, &[positions])?;
        let length = c.push(Op::Broadcast { shape, axes: vec![2] }, &[lengths])?;
        let within = c.compare(CompareOp::Lt, position, length)?;
        let length = c.push(Op::Broadcast { shape: state.clone(), axes: vec![1] }, &[lengths])?;
        let zero = c.constant_like(length, 0.0)?;
        let any = c.compare(CompareOp::Gt, length, zero)?;
        Ok(Some(Lengths { within, any }))
    }
}

/// Operand `index`, if present, has the shape `shape`.
fn expect(c: &Context, index: usize, shape: &[usize]) -> Result<(), OpError> {
    match c.optional(index) {
        Some(node) if *c.ty(node).shape != *shape => {
            Err(c.operand_error(index, "its shape does not fit the other operands and attributes"))
        }
        _ => Ok(()),
    }
}

/// `x: [steps, d, ..]` with the steps of reversed directions in reverse.
fn flip(c: &mut Context, x: NodeId, reversed: &[bool]) -> Result<NodeId, OpError> {
    match reversed {
        [false] => Ok(x),
        [true] => reverse_axes(c, x, &[0]),
        _ => {
            let mut parts = Vec::with_capacity(reversed.len());
            for (direction, &reversed) in reversed.iter().enumerate() {
                let part = slice_axis(c, x, 1, direction, 1)?;
                parts.push(if reversed { reverse_axes(c, part, &[0])? } else { part });
            }
            Ok(c.push(Op::Concat { axis: 1 }, &parts)?)
        }
    }
}

/// `state: [d, n, h]` times the transpose of `weight: [d, rows, h]`.
fn recur(c: &mut Context, state: NodeId, weight: NodeId) -> Result<NodeId, OpError> {
    let dims = DotDims { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![2] };
    Ok(c.push(Op::Dot(dims), &[state, weight])?)
}

/// `h' = f(x W + h R + b)`
fn rnn(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let mut layer = Layer::new(c, 1, &["Tanh"])?;
    let h = layer.initial(c, 5)?;
    for bias in layer.biases.into_iter().flatten() {
        layer.add_bias(c, bias)?;
    }
    layer.unroll(c, vec![h], |layer, c, input, states| {
        let recurrent = recur(c, states[0], layer.recurrence)?;
        let sum = c.add(input, recurrent)?;
        Ok(vec![layer.activate_sum(c, 0, sum)?])
    })
}

/// Gates `z`, `r`, `h`: `h' = (1 - z) g(..) + z h`. Where the reset gate applies after the product with `R`, the bias of `R` belongs
/// to that product.
fn gru(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let reset_after = c.flag("linear_before_reset", false)?;
    let mut layer = Layer::new(c, 3, &["Sigmoid", "Tanh"])?;
    let h = layer.initial(c, 5)?;
    let (hidden, recurrence) = (layer.hidden(), layer.recurrence);
    let for_gates = slice_axis(c, recurrence, 1, 0, 2 * hidden)?;
    let for_candidate = slice_axis(c, recurrence, 1, 2 * hidden, hidden)?;
    let mut inner_bias = None;
    if let Some([input, recurrent]) = layer.biases {
        layer.add_bias(c, input)?;
        if reset_after {
            let gates = slice_axis(c, recurrent, 1, 0, 2 * hidden)?;
            let candidate = slice_axis(c, recurrent, 1, 2 * hidden, hidden)?;
            let zero = c.constant_like(candidate, 0.0)?;
            let outer = c.push(Op::Concat { axis: 1 }, &[gates, zero])?;
            layer.add_bias(c, outer)?;
            inner_bias = Some(layer.repeat(c, candidate)?);
        } else {
            layer.add_bias(c, recurrent)?;
        }
    }
    layer.unroll(c, vec![h], |layer, c, input, states| {
        let h = states[0];
        let recurrent = recur(c, h, for_gates)?;
        let [z, r] = [0, 1].map(|gate| {
            let sum = [layer.gate(c, input, gate)?, layer.gate(c, recurrent, gate)?];
            let sum = c.add(sum[0], sum[1])?;
            layer.activate_sum(c, 0, sum)
        });
        let (z, r) = (z?, r?);
        let recurrent = if reset_after {
            let mut product = recur(c, h, for_candidate)?;
            if let Some(bias) = inner_bias {
                product = c.add(product, bias)?;
            }
            c.mul(r, product)?
        } else {
            let reset = c.mul(r, h)?;
            recur(c, reset, for_candidate)?
        };
        let input = layer.gate(c, input, 2)?;
        let sum = c.add(input, recurrent)?;
        let candidate = layer.activate_sum(c, 1, sum)?;
        let one = c.constant_like(z, 1.0)?;
        let new = c.sub(one, z)?;
        let new = c.mul(new, candidate)?;
        let kept = c.mul(z, h)?;
        Ok(vec![c.add(new, kept)?])
    })
}

/// Gates `i`, `o`, `f`, `c`: `c' = f c + i g(..)`, `h' = o h(c')`. Peepholes add the cell, times a vector, to the gates; the output
/// gate sees the new cell. With `input_forget`, the forget gate is `1 - i`.
fn lstm(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let coupled = c.flag("input_forget", false)?;
    let mut layer = Layer::new(c, 4, &["Sigmoid", "Tanh", "Tanh"])?;
    let (h, cell) = (layer.initial(c, 5)?, layer.initial(c, 6)?);
    for bias in layer.biases.into_iter().flatten() {
        layer.add_bias(c, bias)?;
    }
    let hidden = layer.hidden();
    expect(c, 7, &[layer.reversed.len(), 3 * hidden])?;
    let mut peepholes = Vec::new();
    if let Some(p) = c.optional(7) {
        for gate in 0..3 {
            let vector = slice_axis(c, p, 1, gate * hidden, hidden)?;
            peepholes.push(layer.repeat(c, vector)?);
        }
    }
    layer.unroll(c, vec![h, cell], |layer, c, input, states| {
        let (h, cell) = (states[0], states[1]);
        let recurrent = recur(c, h, layer.recurrence)?;
        let sum = c.add(input, recurrent)?;
        let gate = |c: &mut Context, index: usize, cell: NodeId| {
            let mut x = layer.gate(c, sum, index)?;
            if let Some(&peephole) = peepholes.get(index) {
                let peep = c.mul(peephole, cell)?;
                x = c.add(x, peep)?;
            }
            layer.activate_sum(c, 0, x)
        };
        let i = gate(c, 0, cell)?;
        let f = if coupled {
            let one = c.constant_like(i, 1.0)?;
            c.sub(one, i)?
        } else {
            gate(c, 2, cell)?
        };
        let candidate = layer.gate(c, sum, 3)?;
        let candidate = layer.activate_sum(c, 1, candidate)?;
        let kept = c.mul(f, cell)?;
        let new = c.mul(i, candidate)?;
        let cell = c.add(kept, new)?;
        let o = gate(c, 1, cell)?;
        let squashed = layer.activate(c, 2, cell)?;
        Ok(vec![c.mul(o, squashed)?, cell])
    })
}
