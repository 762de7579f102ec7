//! Derivatives of Dot and Conv, which are again Dots and Convs.

use meganeura_ir::{ConvDims, DotDims, Graph, GraphError, NodeId, Op};

use super::Cotangent::{self, Value, Zero};
use super::movement::{inverse_permutation, reverse};

/// The other operand against `dy`, contracted over the axes that only the two have.
pub(super) fn dot(
    g: &mut Graph,
    dims: &DotDims,
    [a, b]: [NodeId; 2],
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    let (a_free, b_free) = (dims.lhs_free(g.ty(a).shape.rank()), dims.rhs_free(g.ty(b).shape.rank()));
    let batch = dims.lhs_batch.len();
    // Axes of dy: batch, free axes of a, free axes of b.
    let dy_batch: Vec<usize> = (0..batch).collect();
    let dy_a: Vec<usize> = (batch..batch + a_free.len()).collect();
    let dy_b: Vec<usize> = (batch + a_free.len()..batch + a_free.len() + b_free.len()).collect();
    if operand == 0 {
        let dot = DotDims { lhs_batch: dy_batch, rhs_batch: dims.rhs_batch.clone(), lhs_contract: dy_b, rhs_contract: b_free };
        let da = g.push(Op::Dot(dot), &[dy, b])?;
        let contracted = paired_in_order(&dims.rhs_contract, &dims.lhs_contract);
        let axes: Vec<usize> = dims.lhs_batch.iter().copied().chain(a_free).chain(contracted).collect();
        g.transpose(da, &inverse_permutation(&axes)).map(Value)
    } else {
        let dot = DotDims { lhs_batch: dims.lhs_batch.clone(), rhs_batch: dy_batch, lhs_contract: a_free, rhs_contract: dy_a };
        let db = g.push(Op::Dot(dot), &[a, dy])?;
        let contracted = paired_in_order(&dims.lhs_contract, &dims.rhs_contract);
        let axes: Vec<usize> = dims.rhs_batch.iter().copied().chain(contracted).chain(b_free).collect();
        g.transpose(db, &inverse_permutation(&axes)).map(Value)
    }
}

/// The partners of `axes`, by increasing axis.
fn paired_in_order(axes: &[usize], partners: &[usize]) -> Vec<usize> {
    let mut pairs: Vec<_> = axes.iter().zip(partners).collect();
    pairs.sort_unstable();
    pairs.into_iter().map(|(_, &partner)| partner).collect()
}

pub(super) fn conv(
    g: &mut Graph,
    dims: &ConvDims,
    [x, w]: [NodeId; 2],
    dy: NodeId,
    operand: usize,
) -> Result<Cotangent, GraphError> {
    if [x, w, dy].iter().any(|&n| g.ty(n).shape.numel() == 0) {
        return Ok(Zero);
    }
    if operand == 0 { conv_input(g, dims, x, w, dy).map(Value) } else { conv_kernel(g, dims, x, w, dy).map(Value) }
}

/// Elements along an axis after dilation by `dilation`.
fn dilated(size: usize, dilation: usize) -> isize {
    ((size - 1) * dilation + 1) as isize
}

/// `dx[n, c, q] = sum_{o, p, k} dy[n, o, p] w[o, c, k]` over `q * input_dilation = p * stride - low + k * kernel_dilation`: the
/// convolution of `dy`, dilated by the stride, with the flipped kernel, at the stride of the input dilation.
fn conv_input(g: &mut Graph, dims: &ConvDims, x: NodeId, w: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    let [x_shape, w_shape, y_shape] = [x, w, dy].map(|n| g.ty(n).shape.clone());
    let spatial = dims.stride.len();
    let pads = (0..spatial).map(|a| {
        let extent = dilated(w_shape[2 + a], dims.kernel_dilation[a]);
        let low = extent - 1 - dims.pads[a].0;
        // Exactly the input's size comes out, whatever remainder the stride left.
        let padded = extent - 1 + dilated(x_shape[2 + a], dims.input_dilation[a]);
        (low, padded - low - dilated(y_shape[2 + a], dims.stride[a]))
    });
    let transposed = ConvDims {
        pads: pads.collect(),
        stride: dims.input_dilation.clone(),
        input_dilation: dims.stride.clone(),
        kernel_dilation: dims.kernel_dilation.clone(),
        groups: dims.groups,
    };
    // [g * o, c, kernel..] -> [g * c, o, kernel..], flipped.
    let (outputs, channels) = (w_shape[0] / dims.groups, w_shape[1]);
    let kernel = &w_shape[2..];
    let flipped = reverse(g, w, &(2..2 + spatial).collect::<Vec<_>>())?;
    let grouped = [&[dims.groups, outputs, channels], kernel].concat();
    let grouped = g.reshape(flipped, grouped)?;
    let swapped = g.transpose(grouped, &swap_axes(3 + spatial, 1, 2))?;
    let swapped = g.reshape(swapped, [&[dims.groups * channels, outputs], kernel].concat())?;
    g.push(Op::Conv(transposed), &[dy, swapped])
}

/// `dw[o, c, k] = sum_{n, p} dy[n, o, p] x[n, c, p * stride - low + k * kernel_dilation]`: a convolution whose batch is `c` and whose
/// channels are the samples, with stride and kernel dilation exchanged.
fn conv_kernel(g: &mut Graph, dims: &ConvDims, x: NodeId, w: NodeId, dy: NodeId) -> Result<NodeId, GraphError> {
    let [x_shape, w_shape, y_shape] = [x, w, dy].map(|n| g.ty(n).shape.clone());
    let spatial = dims.stride.len();
    let pads = (0..spatial).map(|a| {
        let low = dims.pads[a].0;
        // Exactly the kernel's size comes out.
        let padded = dilated(y_shape[2 + a], dims.stride[a]) - 1 + dilated(w_shape[2 + a], dims.kernel_dilation[a]);
        (low, padded - low - dilated(x_shape[2 + a], dims.input_dilation[a]))
    });
    let correlation = ConvDims {
        pads: pads.collect(),
        stride: dims.kernel_dilation.clone(),
        input_dilation: dims.input_dilation.clone(),
        kernel_dilation: dims.stride.clone(),
        groups: dims.groups,
    };
    // [n, g * c, spatial..] -> [c, g * n, spatial..]
    let (samples, channels) = (x_shape[0], w_shape[1]);
    let sizes = &x_shape[2..];
    let grouped = g.reshape(x, [&[samples, dims.groups, channels], sizes].concat())?;
    let swapped = g.transpose(grouped, &swap_axes(3 + spatial, 0, 2))?;
    let swapped = g.reshape(swapped, [&[channels, dims.groups * samples], sizes].concat())?;
    let swap_leading = swap_axes(2 + spatial, 0, 1);
    let kernel = g.transpose(dy, &swap_leading)?;
    let dw = g.push(Op::Conv(correlation), &[swapped, kernel])?;
    g.transpose(dw, &swap_leading)
}

/// The permutation of `rank` axes that exchanges `a` and `b`.
fn swap_axes(rank: usize, a: usize, b: usize) -> Vec<usize> {
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(a, b);
    perm
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, grid};

    #[test]
    fn dot_in_every_layout() {
        let dims = |lb: &[usize], rb: &[usize], lc: &[usize], rc: &[usize]| DotDims {
            lhs_batch: lb.to_vec(),
            rhs_batch: rb.to_vec(),
            lhs_contract: lc.to_vec(),
            rhs_contract: rc.to_vec(),
        };
        let cases: [(&str, &[usize], &[usize], DotDims); 9] = [
            ("nn", &[3, 5], &[5, 2], dims(&[], &[], &[1], &[0])),
            ("nt", &[3, 5], &[2, 5], dims(&[], &[], &[1], &[1])),
            ("tn", &[5, 3], &[5, 2], dims(&[], &[], &[0], &[0])),
            ("tt", &[5, 3], &[2, 5], dims(&[], &[], &[0], &[1])),
            ("batches in the middle", &[2, 3, 4], &[4, 5, 3], dims(&[1], &[2], &[2], &[0])),
            ("two batches, crossed", &[2, 3, 4, 1], &[3, 5, 2, 4], dims(&[0, 1], &[2, 0], &[2], &[3])),
            ("two contractions, crossed", &[2, 3, 4], &[4, 5, 2], dims(&[], &[], &[2, 0], &[0, 2])),
            ("outer product", &[3], &[2, 2], dims(&[], &[], &[], &[])),
            ("empty contraction", &[3, 0], &[0, 2], dims(&[], &[], &[1], &[0])),
        ];
        for (name, a, b, dims) in cases {
            check(name, &[grid(a, -1.0, 1.0), grid(b, -1.0, 1.3)], |g, x| g.push(Op::Dot(dims.clone()), x));
        }
    }

    /// One spatial axis per entry: input, kernel, stride, pads, input dilation, kernel dilation.
    type Axis = (usize, usize, usize, (isize, isize), usize, usize);

    fn check_conv(name: &str, [samples, channels, outputs, groups]: [usize; 4], axes: &[Axis]) {
        let dims = ConvDims {
            stride: axes.iter().map(|a| a.2).collect(),
            pads: axes.iter().map(|a| a.3).collect(),
            input_dilation: axes.iter().map(|a| a.4).collect(),
            kernel_dilation: axes.iter().map(|a| a.5).collect(),
            groups,
        };
        let x: Vec<usize> = [samples, channels].into_iter().chain(axes.iter().map(|a| a.0)).collect();
        let w: Vec<usize> = [outputs, channels / groups].into_iter().chain(axes.iter().map(|a| a.1)).collect();
        check(name, &[grid(x, -1.0, 1.0), grid(w, -1.0, 1.3)], |g, x| g.push(Op::Conv(dims.clone()), x));
    }

    #[test]
    fn conv_with_every_attribute() {
        check_conv("plain", [2, 2, 3, 1], &[(4, 3, 1, (0, 0), 1, 1), (5, 2, 1, (0, 0), 1, 1)]);
        check_conv("pointwise", [2, 3, 2, 1], &[(3, 1, 1, (0, 0), 1, 1), (2, 1, 1, (0, 0), 1, 1)]);
        check_conv("asymmetric pads", [1, 2, 2, 1], &[(4, 3, 1, (2, 0), 1, 1), (3, 2, 1, (0, 1), 1, 1)]);
        check_conv("a stride that leaves a remainder", [1, 1, 2, 1], &[(8, 3, 3, (1, 0), 1, 1), (6, 2, 2, (0, 1), 1, 1)]);
        check_conv("a stride beyond the kernel", [2, 1, 1, 1], &[(9, 2, 4, (0, 0), 1, 1)]);
        check_conv("negative pads", [1, 2, 1, 1], &[(7, 2, 1, (-1, -2), 1, 1), (5, 2, 2, (-1, 1), 1, 1)]);
        check_conv("kernel dilation", [1, 1, 2, 1], &[(7, 3, 2, (1, 2), 1, 2)]);
        check_conv("input dilation", [2, 2, 1, 1], &[(4, 3, 1, (2, 1), 3, 1), (3, 2, 2, (0, 1), 2, 1)]);
        check_conv("everything", [2, 4, 6, 2], &[(4, 2, 3, (2, -1), 2, 3)]);
        check_conv("groups", [2, 6, 4, 2], &[(3, 2, 1, (1, 0), 1, 1)]);
        check_conv("depthwise", [2, 3, 6, 3], &[(4, 3, 2, (1, 1), 1, 1)]);
        check_conv("pads beyond the kernel", [1, 1, 1, 1], &[(3, 2, 2, (4, 3), 1, 1)]);
        check_conv("no axes", [3, 2, 4, 2], &[]);
    }

    #[test]
    fn conv_of_three_axes() {
        check_conv("three axes", [1, 2, 2, 1], &[(3, 2, 1, (1, 0), 1, 1), (3, 1, 2, (0, 0), 1, 1), (4, 2, 2, (0, 1), 1, 2)]);
    }

    #[test]
    fn conv_of_nothing_has_zero_gradients() {
        check_conv("no samples", [0, 2, 3, 1], &[(4, 3, 1, (0, 0), 1, 1)]);
        check_conv("no channels", [2, 0, 3, 1], &[(4, 3, 1, (0, 0), 1, 1)]);
        check_conv("no outputs", [2, 2, 0, 1], &[(4, 3, 1, (0, 0), 1, 1)]);
        check_conv("a kernel too large", [2, 2, 3, 1], &[(2, 5, 1, (1, 1), 1, 1)]);
        check_conv("padding only", [1, 1, 2, 1], &[(0, 2, 1, (2, 2), 1, 1)]);
    }
}
