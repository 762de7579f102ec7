//! Quantisation: `y = saturate(round(x / scale) + zero point)`, and back.

use meganeura_ir::{BinaryOp, CompareOp, DType, NodeId, Op, ReduceOp, Shape, UnaryOp, int_range};

use super::movement::slice_axis;
use super::narrow::{self, RoundMode};
use super::{Row, Rule, microsoft, row};
use crate::context::{self, Context, extent};
use crate::error::OpError;
use crate::narrow::Narrow;
use crate::tensor;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("DequantizeLinear",           2..=3, &[1, 2], Rule::One(dequantize_linear)),
    row("DynamicQuantizeLinear",      1..=1, &[],     Rule::Many(dynamic_quantize_linear)),
    row("QuantizeLinear",             2..=3, &[1, 2], Rule::One(quantize_linear)),
    microsoft("DequantizeLinear",     2..=3, &[1, 2], Rule::One(dequantize_linear)),
    microsoft("QuantizeLinear",       2..=3, &[1, 2], Rule::One(quantize_linear)),
];

/// Elements of a quantised tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Int { dtype: DType, range: (i64, i64) },
    Narrow(Narrow),
}

impl Element {
    fn of_data_type(data_type: i64) -> Result<Element, OpError> {
        let data_type = i32::try_from(data_type).unwrap_or(0);
        match crate::narrow::narrow(data_type) {
            Some(narrow) => Ok(Element::of_narrow(narrow)),
            None => Element::of_dtype(tensor::dtype(data_type)?),
        }
    }

    fn of_narrow(narrow: Narrow) -> Element {
        match narrow {
            Narrow::Int { bits, signed: true } => {
                Element::Int { dtype: narrow.held(), range: (-1 << (bits - 1), (1 << (bits - 1)) - 1) }
            }
            Narrow::Int { bits, signed: false } => Element::Int { dtype: narrow.held(), range: (0, (1 << bits) - 1) },
            _ => Element::Narrow(narrow),
        }
    }

    /// # Errors
    /// If the range is too large for exact arithmetic in f32.
    pub fn of_dtype(dtype: DType) -> Result<Element, OpError> {
        match dtype {
            DType::I8 | DType::U8 | DType::I16 | DType::U16 => Ok(Element::Int { dtype, range: int_range(dtype) }),
            other => Err(OpError::unsupported(format!("quantisation to {other}"))),
        }
    }

    /// The elements of operand `index`.
    pub fn of_operand(c: &Context, index: usize) -> Result<Element, OpError> {
        match c.narrow(index) {
            Some(narrow) => Ok(Element::of_narrow(narrow)),
            None => Element::of_dtype(c.ty(c.input(index)?).dtype),
        }
    }
}

/// The scale and the zero point of a tensor, at its shape, in f32.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub scale: NodeId,
    pub zero: Option<NodeId>,
}

impl Affine {
    /// From operands, each of which is one number or a vector along `axis` of `shape`, or has blocks of `block` elements along it.
    pub fn read(c: &mut Context, [scale, zero]: [usize; 2], shape: &Shape, axis: i64, block: usize) -> Result<Affine, OpError> {
        let scale = spread(c, scale, shape, axis, block)?;
        let zero = match c.optional(zero) {
            Some(node) if c.is_uniform(node, 0.0) => None,
            Some(_) => Some(spread(c, zero, shape, axis, block)?),
            None => None,
        };
        Ok(Affine { scale, zero })
    }

    /// `(x - zero) * scale`
    pub fn dequantize(self, c: &mut Context, x: NodeId) -> Result<NodeId, OpError> {
        let mut y = c.cast(x, DType::F32)?;
        if let Some(zero) = self.zero {
            y = c.sub(y, zero)?;
        }
        Ok(c.mul(y, self.scale)?)
    }

    /// `saturate(round(x / scale) + zero)`
    pub fn quantize(self, c: &mut Context, x: NodeId, to: Element, saturate: bool) -> Result<NodeId, OpError> {
        let x = c.cast(x, DType::F32)?;
        let y = c.div(x, self.scale)?;
        round(c, y, self.zero, to, saturate)
    }
}

/// `saturate(round(x) + zero)`. Narrow floats round after the sum.
pub(super) fn round(c: &mut Context, x: NodeId, zero: Option<NodeId>, to: Element, saturate: bool) -> Result<NodeId, OpError> {
    let add = |c: &mut Context, y| zero.map_or(Ok(y), |zero| c.add(y, zero));
    match to {
        Element::Int { dtype, range: (low, high) } => {
            let y = c.unary(UnaryOp::Round, x)?;
            let y = add(c, y)?;
            let (low, high) = (c.constant_like(y, low as f64)?, c.constant_like(y, high as f64)?);
            let y = c.binary(BinaryOp::Max, y, low)?;
            let y = c.binary(BinaryOp::Min, y, high)?;
            Ok(c.cast(y, dtype)?)
        }
        Element::Narrow(narrow) => {
            let y = add(c, x)?;
            narrow::cast(c, y, narrow, saturate, RoundMode::Up)
        }
    }
}

/// Operand `index`, a scale or a zero point, as `dtype` at `shape`: one number, a vector along `axis`, or what broadcasts.
pub(super) fn setting(c: &mut Context, index: usize, shape: &Shape, axis: i64, dtype: DType) -> Result<NodeId, OpError> {
    let x = c.input(index)?;
    let x = c.cast(x, dtype)?;
    let found = c.shape(x);
    if found.numel() == 1 && found.rank() <= 1 {
        let scalar = c.reshape(x, Shape::scalar())?;
        return Ok(c.broadcast_to(scalar, shape)?);
    }
    if found.rank() == 1 {
        let axis = context::axis(axis, shape.rank())?;
        return c.broadcast_along(x, shape, axis);
    }
    c.broadcast_into(x, shape)
}

/// As [`setting`], in f32; with a `block` size, each number is for so many elements along `axis`.
fn spread(c: &mut Context, index: usize, shape: &Shape, axis: i64, block: usize) -> Result<NodeId, OpError> {
    let x = c.input(index)?;
    let found = c.shape(x);
    if block == 0 || found.rank() <= 1 && found.numel() == 1 {
        return setting(c, index, shape, axis, DType::F32);
    }
    let x = c.cast(x, DType::F32)?;
    let axis = context::axis(axis, shape.rank())?;
    let expected = shape.iter().enumerate().map(|(a, &n)| if a == axis { n.div_ceil(block) } else { n });
    if !expected.eq(found.iter().copied()) {
        return Err(c.operand_error(index, "its shape does not fit the tensor, the axis and the block size"));
    }
    let (lead, tail) = (&found[..=axis], &found[axis + 1..]);
    let repeated: Shape = lead.iter().copied().chain([block]).chain(tail.iter().copied()).collect();
    let axes = (0..repeated.rank()).filter(|&a| a != axis + 1).collect();
    let x = c.push(Op::Broadcast { shape: repeated, axes }, &[x])?;
    let mut whole = found.to_vec();
    whole[axis] = found[axis].checked_mul(block).ok_or_else(|| c.operand_error(index, "the blocks are too large"))?;
    let x = c.reshape(x, whole)?;
    slice_axis(c, x, axis, 0, shape[axis])
}

fn block_size(c: &Context) -> Result<usize, OpError> {
    extent("block_size", c.int_or("block_size", 0)?)
}

/// The type of the result is that of the zero point, or what `output_dtype` says, or u8. Divisions are in f32.
fn quantize_linear(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["precision"]);
    let (axis, block, saturate) = (c.int_or("axis", 1)?, block_size(c)?, c.flag("saturate", true)?);
    let declared = c.int_or("output_dtype", 0)?;
    let to = match c.optional(2) {
        Some(_) => Element::of_operand(c, 2)?,
        None if declared != 0 => Element::of_data_type(declared)?,
        None => Element::of_dtype(DType::U8)?,
    };
    if declared != 0 && Element::of_data_type(declared)? != to {
        return Err(c.operand_error(2, "output_dtype is another"));
    }
    let x = c.input(0)?;
    let shape = c.shape(x);
    let affine = Affine::read(c, [1, 2], &shape, axis, block)?;
    let narrow = if declared != 0 { crate::narrow::narrow(declared as i32) } else { None };
    c.set_narrow(c.narrow(2).or(narrow));
    affine.quantize(c, x, to, saturate)
}

/// The result is f32, whatever float it is declared as.
fn dequantize_linear(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["output_dtype"]);
    let (axis, block) = (c.int_or("axis", 1)?, block_size(c)?);
    let x = c.input(0)?;
    let shape = c.shape(x);
    let affine = Affine::read(c, [1, 2], &shape, axis, block)?;
    affine.dequantize(c, x)
}

/// The range of `x`, extended to 0, on 0 to 255. Results: the elements, the scale, the zero point.
fn dynamic_quantize_linear(c: &mut Context) -> Result<Vec<NodeId>, OpError> {
    let x = c.input(0)?;
    let Dynamic { elements, scale, zero } = Dynamic::of(c, x)?;
    Ok(vec![elements, scale, zero])
}

/// A tensor quantised to u8 by its own range.
pub(super) struct Dynamic {
    pub elements: NodeId,
    pub scale: NodeId,
    pub zero: NodeId,
}

impl Dynamic {
    pub fn of(c: &mut Context, x: NodeId) -> Result<Dynamic, OpError> {
        let shape = c.shape(x);
        let axes: Vec<usize> = (0..shape.rank()).collect();
        let (low, high) = (c.reduce(ReduceOp::Min, x, &axes)?, c.reduce(ReduceOp::Max, x, &axes)?);
        let nothing = c.constant_like(low, 0.0)?;
        let low = c.binary(BinaryOp::Min, low, nothing)?;
        let high = c.binary(BinaryOp::Max, high, nothing)?;
        let range = c.sub(high, low)?;
        let levels = c.constant_like(range, 255.0)?;
        let scale = c.div(range, levels)?;
        // Zeros alone: any scale will do.
        let empty = c.compare(CompareOp::Eq, range, nothing)?;
        let one = c.constant_like(scale, 1.0)?;
        let scale = c.select(empty, one, scale)?;
        let zero = c.sub(nothing, low)?;
        let zero = c.div(zero, scale)?;
        let to = Element::of_dtype(DType::U8)?;
        let zero = round(c, zero, None, to, true)?;
        let offset = c.cast(zero, DType::F32)?;
        let affine = Affine { scale: c.broadcast_to(scale, &shape)?, zero: Some(c.broadcast_to(offset, &shape)?) };
        Ok(Dynamic { elements: affine.quantize(c, x, to, true)?, scale, zero })
    }
}
