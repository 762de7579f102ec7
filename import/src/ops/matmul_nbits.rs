//! Matrix products with weights of few bits, in blocks with a scale each.

use meganeura_ir::{BinaryOp, DType, DotDims, NodeId, Op, Shape};

use super::movement::slice_axis;
use super::{Row, Rule, microsoft};
use crate::context::{Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    microsoft("MatMulNBits",     3..=6, &[],     Rule::One(matmul_nbits)),
];

/// `A W^T + bias`, with `W: [N, K]` of `(q - zero point) * scale`; each block of `block_size` elements along K has a scale and a
/// zero point of its own.
pub(super) fn matmul_nbits(c: &mut Context) -> Result<NodeId, OpError> {
    c.ignore(&["accuracy_level"]);
    let size = |name| extent(name, c.int(name)?.ok_or(OpError::MissingAttribute(name))?);
    let (rows, columns, block) = (size("N")?, size("K")?, size("block_size")?);
    let bits = c.int_or("bits", 4)?;
    if !matches!(bits, 2 | 4 | 8) {
        return Err(OpError::unsupported(format!("MatMulNBits with {bits} bits (2, 4 and 8 are)")));
    }
    if c.int_or("weight_prepacked", 0)? != 0 {
        return Err(OpError::unsupported("MatMulNBits with weights packed for one device"));
    }
    if c.optional(4).is_some() {
        return Err(OpError::unsupported("MatMulNBits with g_idx"));
    }
    if block < 16 || !block.is_power_of_two() {
        let value = block.to_string();
        return Err(OpError::Attribute { name: "block_size", value, reason: "a power of two from 16 on is needed" });
    }
    let blocks = columns.div_ceil(block);
    let (a, packed, scales) = (c.input(0)?, c.input(1)?, c.input(2)?);
    if c.shape(a).last() != Some(&columns) {
        return Err(c.operand_error(0, "its last axis has K elements"));
    }
    let bytes = block / 8 * bits as usize;
    if c.ty(packed).dtype != DType::U8 || *c.shape(packed) != [rows, blocks, bytes] {
        return Err(c.operand_error(1, "N rows of packed blocks are needed"));
    }
    if c.shape(scales).numel() != rows * blocks {
        return Err(c.operand_error(2, "one scale per block is needed"));
    }

    let shape = Shape::from([rows, blocks, block]);
    let quantized = unpack(c, packed, bits)?;
    let quantized = c.cast(quantized, DType::F32)?;
    let quantized = c.reshape(quantized, shape.clone())?;
    let centred = match zero_points(c, [rows, blocks], bits)? {
        Some(zeros) => {
            let zeros = c.push(Op::Broadcast { shape: shape.clone(), axes: vec![0, 1] }, &[zeros])?;
            c.sub(quantized, zeros)?
        }
        None => c.shift(quantized, -f64::from(1 << (bits - 1)))?,
    };
    let scales = c.reshape(scales, [rows, blocks])?;
    let scales = c.push(Op::Broadcast { shape, axes: vec![0, 1] }, &[scales])?;
    let weight = c.mul(centred, scales)?;
    let weight = c.reshape(weight, [rows, blocks * block])?;
    let weight = slice_axis(c, weight, 1, 0, columns)?;

    let contract = c.rank(a) - 1;
    let dims = DotDims { lhs_contract: vec![contract], rhs_contract: vec![1], ..DotDims::default() };
    let y = c.push(Op::Dot(dims), &[a, weight])?;
    let Some(bias) = c.optional(5) else { return Ok(y) };
    let shape = c.shape(y);
    let bias = c.broadcast_along(bias, &shape, contract)?;
    Ok(c.add(y, bias)?)
}

/// Zero points `[rows, blocks]`, which are floats, or packed as the weights are, each row from a byte on.
fn zero_points(c: &mut Context, [rows, blocks]: [usize; 2], bits: i64) -> Result<Option<NodeId>, OpError> {
    let Some(zeros) = c.optional(3) else { return Ok(None) };
    let found = c.ty(zeros).clone();
    let bytes = (blocks * bits as usize).div_ceil(8);
    let zeros = match found.dtype {
        DType::U8 if found.shape.numel() == rows * bytes => {
            let packed = c.reshape(zeros, [rows, bytes])?;
            let zeros = unpack(c, packed, bits)?;
            slice_axis(c, zeros, 1, 0, blocks)?
        }
        dtype if dtype.is_float() && found.shape.numel() == rows * blocks => c.reshape(zeros, [rows, blocks])?,
        _ => return Err(c.operand_error(3, "one zero point per block is needed")),
    };
    Ok(Some(c.cast(zeros, DType::F32)?))
}

/// The elements of the bytes along the last axis, lowest bits first.
fn unpack(c: &mut Context, packed: NodeId, bits: i64) -> Result<NodeId, OpError> {
    if bits == 8 {
        return Ok(packed);
    }
    let mut shape = c.shape(packed).to_vec();
    let last = shape.len() - 1;
    let column = Shape::new([shape.as_slice(), &[1]].concat());
    let each = 8 / bits;
    let mask = c.constant_like(packed, ((1 << bits) - 1) as f64)?;
    let mut parts = Vec::with_capacity(each as usize);
    for position in 0..each {
        // Division truncates, as a shift does.
        let divisor = c.constant_like(packed, (1i64 << (position * bits)) as f64)?;
        let shifted = c.div(packed, divisor)?;
        let part = c.binary(BinaryOp::And, shifted, mask)?;
        parts.push(c.reshape(part, column.clone())?);
    }
    let joined = c.push(Op::Concat { axis: last + 1 }, &parts)?;
    shape[last] *= each as usize;
    Ok(c.reshape(joined, shape)?)
}
