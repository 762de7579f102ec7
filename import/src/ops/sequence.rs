//! Sequences and optional values: lists of tensors whose lengths and positions are known while the graph is built.

use meganeura_ir::{DType, NodeId, Op, Shape, Tensor};

use super::movement::slice_axis;
use super::{ANY, Row, Rule, row, value_error};
use crate::body::{Control, expect, tensors};
use crate::context::{self, Context, extent};
use crate::error::OpError;
use crate::model::declared_dtype;
use crate::proto::type_proto::Value as TypeValue;
use crate::tensor::{self, arithmetic};
use crate::value::{Sequence, Value};

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("ConcatFromSequence",    1..=1, &[],     Rule::Values(concat_from_sequence)),
    row("Optional",              0..=1, &[],     Rule::Values(optional)),
    row("OptionalGetElement",    1..=1, &[],     Rule::Values(optional_get_element)),
    row("OptionalHasElement",    0..=1, &[],     Rule::Values(optional_has_element)),
    row("SequenceAt",            2..=2, &[1],    Rule::Values(at)),
    row("SequenceConstruct",     1..=ANY, &[],   Rule::Values(construct)),
    row("SequenceEmpty",         0..=0, &[],     Rule::Values(empty)),
    row("SequenceErase",         1..=2, &[1],    Rule::Values(erase)),
    row("SequenceInsert",        2..=3, &[2],    Rule::Values(insert)),
    row("SequenceLength",        1..=1, &[],     Rule::Values(length)),
    row("SequenceMap",           1..=ANY, &[],   Rule::Control(map)),
    row("SplitToSequence",       1..=2, &[1],    Rule::Values(split_to_sequence)),
];

/// Tensors in one sequence.
const MAX_ITEMS: usize = 1 << 14;

fn sequence(c: &Context, index: usize) -> Result<Sequence, OpError> {
    match c.value(index) {
        Some(Value::Sequence(sequence)) => Ok(sequence.clone()),
        other => Err(value_error(index, other, "a sequence is needed")),
    }
}

fn tensor_input(c: &Context, index: usize) -> Result<NodeId, OpError> {
    c.optional(index).ok_or_else(|| value_error(index, c.value(index), "a tensor is needed"))
}

fn check_length(length: usize) -> Result<(), OpError> {
    if length > MAX_ITEMS { Err(OpError::Limit { what: "tensors in a sequence", limit: MAX_ITEMS }) } else { Ok(()) }
}

fn from_items(dtype: DType, items: Vec<NodeId>) -> Result<Value, OpError> {
    check_length(items.len())?;
    Ok(Value::Sequence(Sequence { dtype, items }))
}

/// A position that operand `index` gives, in `0..end`; negative ones count from `length`.
fn position(c: &mut Context, index: usize, length: usize, end: usize) -> Result<Option<usize>, OpError> {
    let Some(given) = c.known_ints(index)? else { return Ok(None) };
    let [given] = given[..] else { return Err(c.operand_error(index, "one position is needed")) };
    let from_start = if given < 0 { given.saturating_add(length as i64) } else { given };
    match usize::try_from(from_start) {
        Ok(position) if position < end => Ok(Some(position)),
        _ => Err(OpError::Index { index: given, size: length }),
    }
}

fn construct(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let items: Vec<NodeId> = (0..c.input_count()).map(|i| tensor_input(c, i)).collect::<Result<_, _>>()?;
    let dtype = c.ty(tensor_input(c, 0)?).dtype;
    if let Some(other) = items.iter().position(|&item| c.ty(item).dtype != dtype) {
        return Err(c.operand_error(other, "the tensors of a sequence have one dtype"));
    }
    Ok(vec![from_items(dtype, items)?])
}

fn empty(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let dtype = match c.int("dtype")? {
        Some(number) => arithmetic(tensor::dtype(i32::try_from(number).unwrap_or(0))?),
        None => DType::F32,
    };
    Ok(vec![from_items(dtype, Vec::new())?])
}

/// Before the tensor at the position; at the end by default.
fn insert(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let Sequence { dtype, mut items } = sequence(c, 0)?;
    let x = tensor_input(c, 1)?;
    if c.ty(x).dtype != dtype {
        return Err(c.operand_error(1, "the tensors of a sequence have one dtype"));
    }
    let length = items.len();
    let at = position(c, 2, length, length + 1)?.unwrap_or(length);
    items.insert(at, x);
    Ok(vec![from_items(dtype, items)?])
}

/// The last tensor goes by default.
fn erase(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let Sequence { dtype, mut items } = sequence(c, 0)?;
    let length = items.len();
    let at = position(c, 1, length, length)?.or(length.checked_sub(1)).ok_or(OpError::Index { index: -1, size: 0 })?;
    items.remove(at);
    Ok(vec![from_items(dtype, items)?])
}

fn at(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let Sequence { items, .. } = sequence(c, 0)?;
    let at = position(c, 1, items.len(), items.len())?.ok_or(OpError::MissingInput(1))?;
    Ok(vec![Value::Tensor(items[at])])
}

fn length(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let length = sequence(c, 0)?.items.len() as i64;
    Ok(vec![Value::Tensor(c.constant_tensor(Tensor::from_i64(DType::I64, Shape::scalar(), &[length]))?)])
}

/// `x` at `index` of `axis`, which disappears.
pub(super) fn item(c: &mut Context, x: NodeId, axis: usize, index: usize) -> Result<NodeId, OpError> {
    let shape = c.shape(x).without(&[axis]);
    let slice = slice_axis(c, x, axis, index, 1)?;
    Ok(c.reshape(slice, shape)?)
}

/// Tensors of one shape along a new axis.
pub(super) fn stack(c: &mut Context, items: &[NodeId], axis: i64) -> Result<NodeId, OpError> {
    let shape = items.first().map(|&x| c.shape(x)).unwrap_or_default();
    if let Some(other) = items.iter().map(|&x| c.shape(x)).find(|other| *other != shape) {
        return Err(OpError::unsupported(format!("tensors of shapes {shape} and {other} along a new axis")));
    }
    let axis = context::axis(axis, shape.rank() + 1)?;
    let mut sizes = shape.to_vec();
    sizes.insert(axis, 1);
    let items = items.iter().map(|&x| c.reshape(x, sizes.as_slice())).collect::<Result<Vec<_>, _>>()?;
    join(c, &items, axis)
}

fn join(c: &mut Context, items: &[NodeId], axis: usize) -> Result<NodeId, OpError> {
    match items {
        [one] => Ok(*one),
        items => Ok(c.push(Op::Concat { axis }, items)?),
    }
}

fn concat_from_sequence(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let axis = c.int("axis")?.ok_or(OpError::MissingAttribute("axis"))?;
    let new_axis = c.flag("new_axis", false)?;
    let Sequence { items, .. } = sequence(c, 0)?;
    let Some(&first) = items.first() else {
        return Err(value_error(0, c.value(0), "an empty sequence has nothing to join"));
    };
    let joined = if new_axis {
        stack(c, &items, axis)?
    } else {
        let axis = context::axis(axis, c.rank(first))?;
        join(c, &items, axis)?
    };
    Ok(vec![Value::Tensor(joined)])
}

/// Parts of one size (the last may be smaller), of given sizes, or of size 1, whose axis goes without `keepdims`.
fn split_to_sequence(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let axis = c.int_or("axis", 0)?;
    let keep = c.flag("keepdims", true)?;
    let split = c.known_input(1)?;
    let x = tensor_input(c, 0)?;
    let axis = context::axis(axis, c.rank(x))?;
    let total = c.shape(x)[axis];
    let (dtype, squeezed) = (c.ty(x).dtype, split.is_none() && !keep);
    let misfit = |value: &dyn std::fmt::Debug| OpError::Attribute {
        name: "split",
        value: format!("{value:?}"),
        reason: "the parts are positive or add up to the axis",
    };
    let sizes: Vec<usize> = match split {
        Some(sizes) if sizes.shape().rank() == 1 => {
            sizes.to_i64_vec().into_iter().map(|s| extent("split", s)).collect::<Result<_, _>>()?
        }
        chunk => {
            let chunk = chunk.map_or(1, |chunk| chunk.to_i64_vec().first().copied().unwrap_or(0));
            let chunk = usize::try_from(chunk).ok().filter(|chunk| *chunk > 0).ok_or_else(|| misfit(&chunk))?;
            check_length(total.div_ceil(chunk))?;
            (0..total).step_by(chunk).map(|start| chunk.min(total - start)).collect()
        }
    };
    if sizes.iter().sum::<usize>() != total {
        return Err(misfit(&sizes));
    }
    check_length(sizes.len())?;
    let mut start = 0;
    let mut items = Vec::with_capacity(sizes.len());
    for size in sizes {
        items.push(if squeezed { item(c, x, axis, start)? } else { slice_axis(c, x, axis, start, size)? });
        start += size;
    }
    Ok(vec![from_items(dtype, items)?])
}

/// The body on each tensor of the first operand, with those at the same positions of other sequences, and with whole tensors.
fn map(c: &mut Control) -> Result<Vec<Value>, OpError> {
    let body = c.body("body")?;
    let operands = c.inputs_from(0)?;
    let Some(Value::Sequence(first)) = operands.first().cloned() else {
        return Err(value_error(0, operands.first(), "a sequence is needed"));
    };
    let differs = |value: &Value| matches!(value, Value::Sequence(s) if s.items.len() != first.items.len());
    if let Some(index) = operands.iter().position(differs) {
        return Err(value_error(index, operands.get(index), "it is as long as the first one"));
    }
    expect(body.input.len(), "inputs", operands.len())?;
    let mut collected: Vec<Vec<NodeId>> = vec![Vec::new(); body.output.len()];
    for i in 0..first.items.len() {
        let argument = |value: &Value| match value {
            Value::Sequence(sequence) => Value::Tensor(sequence.items[i]),
            other => other.clone(),
        };
        let results = tensors(c.run(body, operands.iter().map(argument).collect())?, "a result of SequenceMap")?;
        collected.iter_mut().zip(results).for_each(|(all, result)| all.push(result));
    }
    let mut sequences = Vec::with_capacity(collected.len());
    for (items, output) in collected.into_iter().zip(&body.output) {
        let dtype = match items.first() {
            Some(&item) => c.context().ty(item).dtype,
            None => {
                let declared = output.r#type.as_ref().and_then(declared_dtype).map(arithmetic);
                declared.ok_or_else(|| OpError::unsupported("an empty result of a body that declares no type"))?
            }
        };
        if let Some(&other) = items.iter().find(|&&item| c.context().ty(item).dtype != dtype) {
            let found = c.context().ty(other).dtype;
            return Err(OpError::unsupported(format!("{found} in a sequence of {dtype}")));
        }
        sequences.push(from_items(dtype, items)?);
    }
    Ok(sequences)
}

/// The operand, or nothing of the type that an attribute gives.
fn optional(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let declared = c.type_proto("type")?;
    match (c.value(0), declared.and_then(|ty| ty.value.as_ref())) {
        (Some(value), _) => Ok(vec![value.clone()]),
        (None, Some(TypeValue::TensorType(_) | TypeValue::SequenceType(_))) => Ok(vec![Value::Nothing]),
        (None, _) => Err(OpError::MissingAttribute("type")),
    }
}

fn optional_has_element(c: &mut Context) -> Result<Vec<Value>, OpError> {
    let present = c.value(0).is_some_and(|value| *value != Value::Nothing);
    Ok(vec![Value::Tensor(c.constant_tensor(Tensor::from_i64(DType::Bool, Shape::scalar(), &[i64::from(present)]))?)])
}

fn optional_get_element(c: &mut Context) -> Result<Vec<Value>, OpError> {
    match c.value(0) {
        Some(value) if *value != Value::Nothing => Ok(vec![value.clone()]),
        other => Err(value_error(0, other, "there is no element to get")),
    }
}
