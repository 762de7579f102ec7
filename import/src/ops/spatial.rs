//! Images cut up, put together and framed.

use meganeura_ir::{NodeId, Op, PadDim, Shape, Tensor, WindowDims};

use super::movement;
use super::{Row, Rule, row};
use crate::context::{self, Context, extent};
use crate::error::OpError;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    row("CenterCropPad",         2..=2, &[1],    Rule::One(center_crop_pad)),
    row("Col2Im",                3..=3, &[1, 2], Rule::One(col2im)),
    row("DepthToSpace",          1..=1, &[],     Rule::One(depth_to_space)),
    row("SpaceToDepth",          1..=1, &[],     Rule::One(space_to_depth)),
];

/// `[n, c, h, w]` of operand 0, and the size of a block.
fn image_and_block(c: &Context) -> Result<(NodeId, [usize; 4], usize), OpError> {
    let size = c.int("blocksize")?.ok_or(OpError::MissingAttribute("blocksize"))?;
    let error = || OpError::Attribute { name: "blocksize", value: size.to_string(), reason: "blocks have at least one element" };
    let block = extent("blocksize", size).ok().filter(|&b| b > 0).ok_or_else(error)?;
    let x = c.input(0)?;
    let sizes = <[usize; 4]>::try_from(&c.shape(x)[..]);
    let sizes = sizes.map_err(|_| c.operand_error(0, "batch, channels, height and width are needed"))?;
    Ok((x, sizes, block))
}

/// Whether channels name the place in a block first, or last.
pub(super) fn depth_to_space(c: &mut Context) -> Result<NodeId, OpError> {
    let block_first = c.choice("mode", "DCR", &[("DCR", true), ("CRD", false)])?;
    let (x, [n, channels, h, w], block) = image_and_block(c)?;
    if !block.checked_mul(block).is_some_and(|area| channels.is_multiple_of(area)) {
        return Err(c.operand_error(0, "the area of a block must divide the channels"));
    }
    let depth = channels / (block * block);
    let (split, perm) = if block_first {
        ([n, block, block, depth, h, w], [0, 3, 4, 1, 5, 2])
    } else {
        ([n, depth, block, block, h, w], [0, 1, 4, 2, 5, 3])
    };
    let x = c.reshape(x, split)?;
    let x = c.transpose(x, &perm)?;
    Ok(c.reshape(x, [n, depth, h * block, w * block])?)
}

pub(super) fn space_to_depth(c: &mut Context) -> Result<NodeId, OpError> {
    let (x, [n, channels, h, w], block) = image_and_block(c)?;
    if !h.is_multiple_of(block) || !w.is_multiple_of(block) {
        return Err(c.operand_error(0, "blocks must divide height and width"));
    }
    let x = c.reshape(x, [n, channels, h / block, block, w / block, block])?;
    let x = c.transpose(x, &[0, 3, 5, 1, 2, 4])?;
    Ok(c.reshape(x, [n, block * block * channels, h / block, w / block])?)
}

/// The middle of the operand, or the operand in the middle of zeros; what cannot be halved is longer at the end.
pub(super) fn center_crop_pad(c: &mut Context) -> Result<NodeId, OpError> {
    let target = c.known_ints(1)?.ok_or(OpError::MissingInput(1))?;
    let mut x = c.input(0)?;
    let rank = c.rank(x);
    let axes = match c.ints("axes")? {
        Some(axes) => {
            c.axes(axes, rank)?;
            axes.iter().map(|&a| context::axis(a, rank)).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..rank).collect(),
    };
    if target.len() != axes.len() {
        return Err(c.operand_error(1, "one size per axis is needed"));
    }
    let mut pads = vec![PadDim::default(); rank];
    for (&axis, &to) in axes.iter().zip(&target) {
        let (from, to) = (c.shape(x)[axis], extent("shape", to)?);
        match to.checked_sub(from) {
            Some(missing) => pads[axis] = PadDim { low: missing / 2, high: missing - missing / 2, interior: 0 },
            None => x = movement::slice_axis(c, x, axis, (from - to) / 2, to)?,
        }
    }
    if pads.iter().all(|p| *p == PadDim::default()) {
        return Ok(x);
    }
    let zero = c.constant_tensor(Tensor::from_f64(c.ty(x).dtype, Shape::scalar(), &[0.0]))?;
    Ok(c.push(Op::Pad(pads), &[x, zero])?)
}

/// Adds the columns, one per position of a block, back into images: `[n, c * block.., positions] -> [n, c, image..]`.
pub(super) fn col2im(c: &mut Context) -> Result<NodeId, OpError> {
    let [image, block] = [1, 2].map(|i| c.known_ints(i)?.ok_or(OpError::MissingInput(i)));
    let (image, block) = (image?, block?);
    let image = image.into_iter().map(|d| extent("image_shape", d)).collect::<Result<Vec<_>, _>>()?;
    let block = block.into_iter().map(|d| extent("block_shape", d)).collect::<Result<Vec<_>, _>>()?;
    let spatial = image.len();
    let window = WindowDims {
        size: block.clone(),
        stride: c.extents("strides", spatial, 1)?,
        dilation: c.extents("dilations", spatial, 1)?,
        pads: c.pads(spatial)?,
    };
    let x = c.input(0)?;
    let shape = c.shape(x);
    let area = Shape::new(block.clone()).checked_numel().filter(|&area| area > 0);
    let (Some(area), true) = (area, block.len() == spatial) else {
        return Err(c.operand_error(2, "a block has one size of at least 1 per axis of the image"));
    };
    let positions: Vec<usize> = (0..spatial).map(|a| window.output_size(a, image[a])).collect();
    if shape.rank() != 3 || !shape[1].is_multiple_of(area) || Shape::new(positions.clone()).checked_numel() != Some(shape[2]) {
        return Err(c.operand_error(0, "these are not the blocks of such an image"));
    }
    let split: Shape = [shape[0], shape[1] / area].into_iter().chain(block).chain(positions).collect();
    let x = c.reshape(x, split)?;
    let perm: Vec<usize> = [0, 1].into_iter().chain(2 + spatial..2 + 2 * spatial).chain(2..2 + spatial).collect();
    let windows = c.transpose(x, &perm)?;
    Ok(c.push(Op::Fold { window, sizes: image }, &[windows])?)
}
