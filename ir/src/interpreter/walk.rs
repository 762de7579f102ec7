//! Iteration over affine index maps, without allocation per element.

use crate::WindowDims;

/// Calls `visit` with `offset + sum(index[a] * strides[a])` for every index of `shape`, in row-major order.
pub(super) fn walk(shape: &[usize], strides: &[isize], offset: isize, mut visit: impl FnMut(usize)) {
    if shape.contains(&0) {
        return;
    }
    let Some((&inner, outer)) = shape.split_last() else {
        return visit(offset as usize);
    };
    let step = strides[outer.len()];
    let mut index = vec![0; outer.len()];
    let mut base = offset;
    loop {
        let mut position = base;
        for _ in 0..inner {
            visit(position as usize);
            position += step;
        }
        let mut axis = outer.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            base += strides[axis];
            if index[axis] < outer[axis] {
                break;
            }
            base -= strides[axis] * outer[axis] as isize;
            index[axis] = 0;
        }
    }
}

/// All positions of [`walk`].
pub(super) fn positions(shape: &[usize], strides: &[isize], offset: isize) -> Vec<usize> {
    let mut positions = Vec::with_capacity(shape.iter().product());
    walk(shape, strides, offset, |p| positions.push(p));
    positions
}

/// For each output position and then each position in the window, the row-major position in a plane of `sizes`, or none outside it.
pub(super) fn window_positions(window: &WindowDims, sizes: &[usize]) -> Vec<Option<usize>> {
    let rank = sizes.len();
    let counts: Vec<usize> = (0..rank).map(|a| window.output_size(a, sizes[a])).collect();
    let shape: Vec<usize> = counts.iter().chain(&window.size).copied().collect();
    let mut index = vec![0; 2 * rank];
    let total = if shape.contains(&0) { 0 } else { shape.iter().product() };
    let mut table = Vec::with_capacity(total);
    for _ in 0..total {
        let position = (0..rank).try_fold(0, |position, a| {
            let at = (index[a] * window.stride[a] + index[rank + a] * window.dilation[a]) as isize - window.pads[a].0;
            (0..sizes[a] as isize).contains(&at).then(|| position * sizes[a] + at as usize)
        });
        table.push(position);
        advance(&mut index, &shape);
    }
    table
}

/// The next index of `shape` in row-major order; after the last, the first.
pub(super) fn advance(index: &mut [usize], shape: &[usize]) {
    for (i, &size) in index.iter_mut().zip(shape).rev() {
        *i += 1;
        if *i < size {
            return;
        }
        *i = 0;
    }
}
