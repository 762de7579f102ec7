//! Attributes that convolutions and pooling share: windows over spatial axes and their padding.

use meganeura_ir::WindowDims;

use crate::context::Context;
use crate::error::OpError;

/// Elements that a dilated window spans.
pub(super) fn span(size: usize, dilation: usize) -> isize {
    (size as isize - 1) * dilation as isize + 1
}

/// The window over spatial axes of sizes `input`. `kernel` is the kernel size where a weight tells it; else `kernel_shape` does.
pub(super) fn window(c: &Context, input: &[usize], kernel: Option<&[usize]>) -> Result<WindowDims, OpError> {
    let spatial = input.len();
    let declared = match c.ints("kernel_shape")? {
        Some(_) => Some(c.extents("kernel_shape", spatial, 1)?),
        None => None,
    };
    let size = match (kernel, declared) {
        (Some(kernel), Some(declared)) if kernel != declared => {
            let value = format!("{declared:?}");
            return Err(OpError::Attribute { name: "kernel_shape", value, reason: "the weight has another shape" });
        }
        (Some(kernel), _) => kernel.to_vec(),
        (None, declared) => declared.ok_or(OpError::MissingAttribute("kernel_shape"))?,
    };
    let stride = c.extents("strides", spatial, 1)?;
    let dilation = c.extents("dilations", spatial, 1)?;
    let pads = match c.string_or("auto_pad", "NOTSET")? {
        "NOTSET" | "" => c.pads(spatial)?,
        "VALID" => {
            c.ignore(&["pads"]);
            vec![(0, 0); spatial]
        }
        same @ ("SAME_UPPER" | "SAME_LOWER") => {
            c.ignore(&["pads"]);
            (0..spatial)
                .map(|a| {
                    let output = input[a].div_ceil(stride[a]) as isize;
                    let needed = (output - 1) * stride[a] as isize + span(size[a], dilation[a]) - input[a] as isize;
                    halves(needed.max(0), same == "SAME_UPPER")
                })
                .collect()
        }
        other => return Err(unknown_auto_pad(other)),
    };
    Ok(WindowDims { size, stride, dilation, pads })
}

/// `total` in two halves, the larger one last if `upper`.
pub(super) fn halves(total: isize, upper: bool) -> (isize, isize) {
    let (small, large) = (total / 2, total - total / 2);
    if upper { (small, large) } else { (large, small) }
}

pub(super) fn unknown_auto_pad(value: &str) -> OpError {
    OpError::Attribute { name: "auto_pad", value: value.to_owned(), reason: "the standard knows no such value" }
}
