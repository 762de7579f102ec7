//! Control flow, decided while the graph is built: one branch of a conditional, and every iteration of a loop.

use meganeura_ir::{DType, NodeId, Shape, Tensor, TensorType};

use super::sequence::{item, stack};
use super::{ANY, Row, Rule, row};
use crate::body::{Control, expect, tensors};
use crate::context;
use crate::error::{ImportError, OpError};
use crate::model::{Branches, unsupported_ops};
use crate::proto::GraphProto;
use crate::value::Value;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("If",                    1..=1, &[0],    Rule::Control(conditional)),
    row("Loop",                  1..=ANY, &[0, 1], Rule::Control(repeat)),
    row("Scan",                  1..=ANY, &[],   Rule::Control(scan)),
];

fn conditional(c: &mut Control) -> Result<Vec<Value>, OpError> {
    let condition = c.inputs[0].clone().ok_or(OpError::MissingInput(0))?;
    let condition = c.decided(&condition, DType::Bool, "the condition")?;
    let (then_branch, else_branch) = (c.body("then_branch")?, c.body("else_branch")?);
    expect(else_branch.output.len(), "outputs", then_branch.output.len())?;
    let branch = if condition != 0 { then_branch } else { else_branch };
    let unsupported = unsupported_ops(branch, Branches::Skip);
    if !unsupported.is_empty() {
        return Err(OpError::Inner(Box::new(ImportError::UnsupportedOps(unsupported))));
    }
    if branch.output.len() < c.node.output.len() {
        let (found, expected) = (branch.output.len(), c.node.output.len().to_string());
        return Err(OpError::Body { what: "outputs", found, expected });
    }
    c.run(branch, Vec::new())
}

/// What the iterations of a loop have given so far: each scan output, iteration by iteration.
type Collected = Vec<Vec<NodeId>>;

fn repeat<'m>(c: &mut Control<'_, 'm>) -> Result<Vec<Value>, OpError> {
    let body = c.body("body")?;
    let (trips, condition) = (c.inputs[0].clone(), c.inputs.get(1).cloned().flatten());
    let trips = trips.map(|trips| c.decided(&trips, DType::I64, "the trip count")).transpose()?;
    let mut goes_on = match &condition {
        Some(condition) => c.decided(condition, DType::Bool, "the condition")? != 0,
        None => true,
    };
    if trips.is_none() && condition.is_none() {
        return Err(OpError::unsupported("a loop without trip count and condition"));
    }
    let mut carried = c.inputs_from(2.min(c.inputs.len()))?;
    let count = carried.len();
    let scans = body.output.len().checked_sub(1 + count).ok_or_else(|| OpError::Body {
        what: "outputs",
        found: body.output.len(),
        expected: format!("at least {}", 1 + count),
    })?;
    expect(body.input.len(), "inputs", 2 + count)?;
    let mut collected: Collected = vec![Vec::new(); scans];
    let mut iteration = 0;
    let trips_left = |iteration| trips.is_none_or(|trips| iteration < trips);
    while goes_on && trips_left(iteration) {
        let mut results = step(c, body, iteration, &carried)?;
        let outputs = tensors(results.split_off(1 + count), "a scan output")?;
        for (all, output) in collected.iter_mut().zip(outputs) {
            all.push(output);
        }
        carried = results.split_off(1);
        iteration += 1;
        if trips_left(iteration) {
            goes_on = c.decided(&results[0], DType::Bool, "the condition of the loop")? != 0;
            // The standard ignores what the body says where the loop has no condition; other programs heed it.
            if !goes_on && condition.is_none() {
                return Err(OpError::unsupported("a loop without condition whose body ends it"));
            }
        }
    }
    let types = |c: &mut Control<'_, 'm>, k: usize| -> Result<TensorType, OpError> {
        if let Some(ty) = c.declared(&body.output[1 + count + k]) {
            return Ok(ty);
        }
        let mut results = step(c, body, 0, &carried)?;
        let outputs = tensors(results.split_off(1 + count), "a scan output")?;
        Ok(c.context().ty(outputs[k]).clone())
    };
    let stacked = finish(c, collected, &vec![Cut::default(); scans], types)?;
    Ok(carried.into_iter().chain(stacked).collect())
}

/// One iteration of a loop.
fn step<'m>(c: &mut Control<'_, 'm>, body: &'m GraphProto, iteration: i64, carried: &[Value]) -> Result<Vec<Value>, OpError> {
    let mut context = c.context();
    let iteration = context.constant_tensor(Tensor::from_i64(DType::I64, Shape::scalar(), &[iteration]))?;
    let condition = context.constant_tensor(Tensor::from_i64(DType::Bool, Shape::scalar(), &[1]))?;
    let own = [iteration, condition].map(Value::Tensor);
    c.run(body, own.into_iter().chain(carried.iter().cloned()).collect())
}

/// Where the iterations of a loop lie in a tensor.
#[derive(Clone, Copy, Default)]
struct Cut {
    axis: i64,
    /// The first iteration lies last.
    reversed: bool,
}

/// Joins what the iterations gave along a new axis of each scan output. `element` gives the type of one iteration where there was
/// none.
fn finish<'b, 'm>(
    c: &mut Control<'b, 'm>,
    collected: Collected,
    cuts: &[Cut],
    mut element: impl FnMut(&mut Control<'b, 'm>, usize) -> Result<TensorType, OpError>,
) -> Result<Vec<Value>, OpError> {
    let mut joined = Vec::with_capacity(collected.len());
    for (k, (mut items, &Cut { axis, reversed })) in collected.into_iter().zip(cuts).enumerate() {
        if reversed {
            items.reverse();
        }
        joined.push(Value::Tensor(if items.is_empty() {
            let TensorType { dtype, shape } = element(c, k)?;
            let mut sizes = shape.to_vec();
            sizes.insert(context::axis(axis, shape.rank() + 1)?, 0);
            c.context().constant_tensor(Tensor::zeros(TensorType::new(dtype, sizes)))?
        } else {
            stack(&mut c.context(), &items, axis)?
        }));
    }
    Ok(joined)
}

fn scan<'m>(c: &mut Control<'_, 'm>) -> Result<Vec<Value>, OpError> {
    let body = c.body("body")?;
    let batched = c.node.opset.unwrap_or_default() < 9;
    let first = usize::from(batched);
    let operands = tensors(c.inputs_from(first)?, "an operand of Scan")?;
    let context = c.context();
    let scanned = context.int("num_scan_inputs")?.ok_or(OpError::MissingAttribute("num_scan_inputs"))?;
    let misfit = |reason| OpError::Attribute { name: "num_scan_inputs", value: scanned.to_string(), reason };
    let count = usize::try_from(scanned).ok().filter(|n| *n > 0).and_then(|n| operands.len().checked_sub(n));
    let count = count.ok_or_else(|| misfit("it is positive and at most the number of operands"))?;
    let (inputs, outputs) = (operands.len() - count, body.output.len().checked_sub(count));
    let outputs = outputs.ok_or_else(|| OpError::Body {
        what: "outputs",
        found: body.output.len(),
        expected: format!("at least {count}"),
    })?;
    let list = |name: &'static str, length: usize| match context.ints(name)? {
        None => Ok(vec![0; length]),
        Some(values) if values.len() == length => Ok(values.to_vec()),
        Some(values) => {
            let value = format!("{values:?}");
            Err(OpError::Attribute { name, value, reason: "one value per scanned operand or result is needed" })
        }
    };
    let cuts = |axes: Vec<i64>, name: &'static str, length: usize| -> Result<Vec<Cut>, OpError> {
        let reversed = |direction: i64| match direction {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(OpError::Attribute { name, value: other.to_string(), reason: "directions are 0 and 1" }),
        };
        let directions = list(name, length)?.into_iter().map(reversed);
        axes.into_iter().zip(directions).map(|(axis, reversed)| Ok(Cut { axis, reversed: reversed? })).collect()
    };
    let (from, to) = if batched {
        (cuts(vec![0; inputs], "directions", inputs)?, vec![Cut::default(); outputs])
    } else {
        let from = cuts(list("scan_input_axes", inputs)?, "scan_input_directions", inputs)?;
        (from, cuts(list("scan_output_axes", outputs)?, "scan_output_directions", outputs)?)
    };
    let (state, scanned) = operands.split_at(count);
    if !batched {
        return Ok(scan_once(c, body, state, scanned, &from, &to)?.into_iter().map(Value::Tensor).collect());
    }

    // Opset 8: each sample of the batch is a scan of its own.
    let batch = c.context().shape(operands[0]).first().copied().unwrap_or(0);
    if operands.iter().any(|&o| c.context().shape(o).first() != Some(&batch)) || batch == 0 {
        return Err(OpError::unsupported("a Scan of opset 8 whose operands do not share a batch axis"));
    }
    let lengths = c.context().known_ints(0)?.unwrap_or_default();
    let full = scanned.first().and_then(|&x| c.context().shape(x).get(1).copied()).unwrap_or(0);
    if lengths.iter().any(|&length| length != full as i64) {
        return Err(OpError::unsupported("a Scan over sequences of different lengths"));
    }
    c.charge(batch)?;
    let mut samples: Collected = vec![Vec::new(); count + outputs];
    for sample in 0..batch {
        let mut cut = |nodes: &[NodeId]| -> Result<Vec<NodeId>, OpError> {
            nodes.iter().map(|&node| item(&mut c.context(), node, 0, sample)).collect()
        };
        let (state, scanned) = (cut(state)?, cut(scanned)?);
        let results = scan_once(c, body, &state, &scanned, &from, &to)?;
        samples.iter_mut().zip(results).for_each(|(all, result)| all.push(result));
    }
    samples.iter().map(|items| Ok(Value::Tensor(stack(&mut c.context(), items, 0)?))).collect()
}

/// Runs the body for each slice of `scanned`. Returns the last state, then the scan outputs.
fn scan_once<'m>(
    c: &mut Control<'_, 'm>,
    body: &'m GraphProto,
    state: &[NodeId],
    scanned: &[NodeId],
    from: &[Cut],
    to: &[Cut],
) -> Result<Vec<NodeId>, OpError> {
    expect(body.input.len(), "inputs", state.len() + scanned.len())?;
    let context = c.context();
    let axes =
        scanned.iter().zip(from).map(|(&x, cut)| context::axis(cut.axis, context.rank(x))).collect::<Result<Vec<_>, _>>()?;
    let lengths: Vec<usize> = scanned.iter().zip(&axes).map(|(&x, &axis)| context.shape(x)[axis]).collect();
    let length = lengths.first().copied().unwrap_or(0);
    if lengths.iter().any(|&l| l != length) {
        return Err(OpError::unsupported(format!("a Scan over axes of different sizes {lengths:?}")));
    }
    let mut state = state.to_vec();
    let mut collected: Collected = vec![Vec::new(); to.len()];
    for t in 0..length {
        let mut arguments = state.clone();
        for ((&x, &axis), cut) in scanned.iter().zip(&axes).zip(from) {
            let at = if cut.reversed { length - 1 - t } else { t };
            arguments.push(item(&mut c.context(), x, axis, at)?);
        }
        let results = c.run(body, arguments.into_iter().map(Value::Tensor).collect())?;
        let mut results = tensors(results, "a result of Scan")?;
        let outputs = results.split_off(state.len());
        collected.iter_mut().zip(outputs).for_each(|(all, output)| all.push(output));
        state = results;
    }
    let count = state.len();
    let initial = state.clone();
    let element = |c: &mut Control<'_, 'm>, k: usize| -> Result<TensorType, OpError> {
        if let Some(ty) = c.declared(&body.output[count + k]) {
            return Ok(ty);
        }
        let mut arguments = initial.clone();
        for (&x, &axis) in scanned.iter().zip(&axes) {
            let mut context = c.context();
            let (dtype, shape) = (context.ty(x).dtype, context.shape(x).without(&[axis]));
            arguments.push(context.splat(&TensorType::new(dtype, shape), 0.0)?);
        }
        let results = tensors(c.run(body, arguments.into_iter().map(Value::Tensor).collect())?, "a result of Scan")?;
        Ok(c.context().ty(results[count + k]).clone())
    };
    let stacked = finish(c, collected, to, element)?;
    Ok(state.into_iter().chain(tensors(stacked, "a result of Scan")?).collect())
}
