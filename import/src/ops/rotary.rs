//! Rotary position embedding.

use meganeura_ir::{DType, NodeId, Op, Shape, TensorType};

use super::attention::{head_count, separate_heads};
use super::movement::slice_axis;
use super::{Row, Rule, microsoft, row};
use crate::context::{Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("RotaryEmbedding",       3..=4, &[],     Rule::One(standard)),
    microsoft("RotaryEmbedding", 4..=4, &[],     Rule::One(contributed)),
];

/// Tables of angles, `[positions, pairs]`.
#[derive(Clone, Copy)]
pub(super) struct Angles {
    pub cos: NodeId,
    pub sin: NodeId,
    /// Whether the two elements of a pair are neighbours, rather than a half of the rotated part apart.
    pub interleaved: bool,
}

impl Angles {
    /// The angles at `positions: [batch, sequence]`, as `[batch, sequence, pairs]`. `index` is the operand that is to blame.
    pub fn at(self, c: &mut Context, positions: NodeId, index: usize) -> Result<Self, OpError> {
        let table = c.shape(self.cos);
        if table.rank() != 2 || c.shape(self.sin) != table {
            return Err(OpError::Broadcast { a: c.ty(self.cos).clone(), b: c.ty(self.sin).clone() });
        }
        if c.rank(positions) != 2 || !c.ty(positions).dtype.is_int() {
            return Err(c.operand_error(index, "one position per token is needed"));
        }
        if let Some(known) = c.known(positions)
            && let Some(&index) = known.to_i64_vec().iter().find(|p| !(0..table[0] as i64).contains(p))
        {
            return Err(OpError::Index { index, size: table[0] });
        }
        let cos = c.push(Op::Gather { axis: 0 }, &[self.cos, positions])?;
        let sin = c.push(Op::Gather { axis: 0 }, &[self.sin, positions])?;
        Ok(Angles { cos, sin, ..self })
    }

    /// Rotates the leading part of the last axis of `x`, of 4 axes; the angles are `[batch, sequence, pairs]`, and `sequence`
    /// is the axis of `x` that they go along.
    pub fn rotate(self, c: &mut Context, x: NodeId, sequence: usize) -> Result<NodeId, OpError> {
        let shape = c.shape(x);
        let (cos, sin) = (c.shape(self.cos), c.shape(self.sin));
        let fits = cos.rank() == 3 && cos == sin && shape.rank() == 4 && cos[..2] == [shape[0], shape[sequence]];
        if !fits || 2 * cos[2] > shape[3] {
            let (a, b) = (c.ty(x).clone(), c.ty(self.cos).clone());
            return Err(OpError::Broadcast { a, b });
        }
        let pairs = cos[2];
        let mut half = shape.to_vec();
        half[3] = pairs;
        let half = Shape::new(half);
        let [cos, sin] =
            [self.cos, self.sin].map(|angle| c.push(Op::Broadcast { shape: half.clone(), axes: vec![0, sequence, 3] }, &[angle]));
        let (cos, sin) = (cos?, sin?);

        let rotated = slice_axis(c, x, 3, 0, 2 * pairs)?;
        let (real, imaginary) = if self.interleaved {
            let paired: Shape = half.iter().copied().chain([2]).collect();
            let paired = c.reshape(rotated, paired)?;
            let (real, imaginary) = (slice_axis(c, paired, 4, 0, 1)?, slice_axis(c, paired, 4, 1, 1)?);
            (c.reshape(real, half.clone())?, c.reshape(imaginary, half.clone())?)
        } else {
            (slice_axis(c, rotated, 3, 0, pairs)?, slice_axis(c, rotated, 3, pairs, pairs)?)
        };
        let (real_cos, imaginary_sin) = (c.mul(real, cos)?, c.mul(imaginary, sin)?);
        let (real_sin, imaginary_cos) = (c.mul(real, sin)?, c.mul(imaginary, cos)?);
        let (mut real, mut imaginary) = (c.sub(real_cos, imaginary_sin)?, c.add(real_sin, imaginary_cos)?);
        if self.interleaved {
            let column: Shape = half.iter().copied().chain([1]).collect();
            (real, imaginary) = (c.reshape(real, column.clone())?, c.reshape(imaginary, column)?);
        }
        let axis = if self.interleaved { 4 } else { 3 };
        let joined = c.push(Op::Concat { axis }, &[real, imaginary])?;
        let rotated_shape = c.shape(rotated);
        let joined = c.reshape(joined, rotated_shape)?;
        if 2 * pairs == shape[3] {
            return Ok(joined);
        }
        let rest = slice_axis(c, x, 3, 2 * pairs, shape[3] - 2 * pairs)?;
        Ok(c.push(Op::Concat { axis: 3 }, &[joined, rest])?)
    }
}

/// Elements of a head that are rotated: half of them is the width of the tables.
fn check_dim(c: &Context, dim: usize, angles: Angles, index: usize) -> Result<(), OpError> {
    let width = |node| c.shape(node).last().copied();
    if width(angles.cos) != Some(dim / 2) || !dim.is_multiple_of(2) {
        return Err(c.operand_error(index, "one angle per pair of rotated elements is needed"));
    }
    if c.shape(angles.cos) != c.shape(angles.sin) {
        return Err(c.operand_error(index + 1, "as many sines as cosines are needed"));
    }
    Ok(())
}

fn rotary_dim(c: &Context) -> Result<usize, OpError> {
    let dim = c.int_or("rotary_embedding_dim", 0)?;
    extent("rotary_embedding_dim", dim)
}

/// The standard's operator: positions are optional, without them the tables hold one row per token.
pub(super) fn standard(c: &mut Context) -> Result<NodeId, OpError> {
    let (interleaved, dim) = (c.flag("interleaved", false)?, rotary_dim(c)?);
    let (x, cos, sin) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let shape = c.shape(x);
    let (heads, sequence) = match shape.rank() {
        3 => {
            let heads = head_count(c, "num_heads")?;
            (separate_heads(c, x, heads, 0)?, 1)
        }
        4 => {
            c.ignore(&["num_heads"]);
            (x, 2)
        }
        _ => return Err(c.operand_error(0, "3 or 4 axes are needed")),
    };
    let mut angles = Angles { cos, sin, interleaved };
    let dim = if dim == 0 { c.shape(heads)[3] } else { dim };
    check_dim(c, dim, angles, 1)?;
    if let Some(positions) = c.optional(3) {
        angles = angles.at(c, positions, 3)?;
    }
    let y = angles.rotate(c, heads, sequence)?;
    Ok(c.reshape(y, shape)?)
}

/// onnxruntime's operator. One position, or none per token, is that of the first token.
pub(super) fn contributed(c: &mut Context) -> Result<NodeId, OpError> {
    let (interleaved, dim) = (c.flag("interleaved", false)?, rotary_dim(c)?);
    if c.flag("is_packed_batching", false)? {
        return Err(OpError::unsupported("RotaryEmbedding with is_packed_batching = 1"));
    }
    if c.float_or("scale", 1.0)? != 1.0 {
        return Err(OpError::unsupported("RotaryEmbedding with a scale"));
    }
    let (x, positions, cos, sin) = (c.input(0)?, c.input(1)?, c.input(2)?, c.input(3)?);
    let (shape, table) = (c.shape(x), c.shape(cos));
    if table.rank() != 2 {
        return Err(c.operand_error(2, "a table of angles is a matrix"));
    }
    let (heads, sequence) = match shape.rank() {
        3 => {
            let heads = match dim {
                0 => shape[2].checked_div(2 * table[1]).unwrap_or(0),
                _ => head_count(c, "num_heads")?,
            };
            (separate_heads(c, x, heads, 0)?, 1)
        }
        4 => (x, 2),
        _ => return Err(c.operand_error(0, "3 or 4 axes are needed")),
    };
    c.ignore(&["num_heads"]);
    let angles = Angles { cos, sin, interleaved };
    check_dim(c, if dim == 0 { c.shape(heads)[3] } else { dim }, angles, 2)?;
    let positions = token_positions(c, positions, shape[0], c.shape(heads)[sequence])?;
    let angles = angles.at(c, positions, 1)?;
    let y = angles.rotate(c, heads, sequence)?;
    Ok(c.reshape(y, shape)?)
}

/// `[batch, sequence]` positions: those given, or those that follow the one given.
fn token_positions(c: &mut Context, given: NodeId, batch: usize, sequence: usize) -> Result<NodeId, OpError> {
    if c.rank(given) == 2 {
        return Ok(given);
    }
    if c.shape(given).numel() != 1 {
        return Err(c.operand_error(1, "one position, or one per token, is needed"));
    }
    let first = c.reshape(given, Shape::scalar())?;
    let first = c.cast(first, DType::I64)?;
    let ty = TensorType::new(DType::I64, [batch, sequence]);
    let first = c.broadcast_to(first, &ty.shape)?;
    let offset = c.push(Op::Iota { dtype: DType::I64, shape: ty.shape, axis: 1 }, &[])?;
    Ok(c.add(first, offset)?)
}
