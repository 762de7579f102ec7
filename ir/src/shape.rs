//! Concrete shapes and tensor types.

use std::fmt;
use std::ops::Deref;

use crate::DType;

/// The largest rank of any tensor.
pub const MAX_RANK: usize = 8;

/// Sizes of a tensor, outermost axis first. Rank 0 (a scalar) and zero sizes are legal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape(Vec<usize>);

impl Shape {
    pub fn new(sizes: impl Into<Vec<usize>>) -> Self {
        Shape(sizes.into())
    }

    /// The shape of a scalar.
    pub fn scalar() -> Self {
        Shape(Vec::new())
    }

    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements. The verifier bounds it, so that it cannot overflow.
    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }

    /// Number of elements, or `None` past `usize`.
    pub fn checked_numel(&self) -> Option<usize> {
        if self.0.contains(&0) {
            return Some(0);
        }
        self.0.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.rank()];
        for axis in (1..self.rank()).rev() {
            strides[axis - 1] = strides[axis] * self.0[axis];
        }
        strides
    }

    /// The multi-index of row-major position `linear`.
    pub fn unravel(&self, mut linear: usize) -> Vec<usize> {
        let mut index = vec![0; self.rank()];
        for axis in (0..self.rank()).rev() {
            index[axis] = linear % self.0[axis];
            linear /= self.0[axis];
        }
        index
    }

    /// The row-major position of `index`.
    pub fn ravel(&self, index: &[usize]) -> usize {
        index.iter().zip(&self.0).fold(0, |n, (&i, &d)| n * d + i)
    }

    /// This shape without `axes` (sorted, unique).
    pub fn without(&self, axes: &[usize]) -> Shape {
        Shape((0..self.rank()).filter(|a| !axes.contains(a)).map(|a| self.0[a]).collect())
    }

    /// NumPy's two-sided broadcast of two shapes, or `None` where sizes conflict.
    pub fn broadcast(a: &Shape, b: &Shape) -> Option<Shape> {
        let rank = a.rank().max(b.rank());
        let size = |s: &Shape, axis: usize| (axis + s.rank()).checked_sub(rank).map_or(1, |i| s.0[i]);
        (0..rank)
            .map(|axis| match (size(a, axis), size(b, axis)) {
                (x, y) if x == y => Some(x),
                (1, y) => Some(y),
                (x, 1) => Some(x),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
            .map(Shape)
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(iter: I) -> Self {
        Shape(iter.into_iter().collect())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(sizes: [usize; N]) -> Self {
        Shape(sizes.to_vec())
    }
}

impl From<Vec<usize>> for Shape {
    fn from(sizes: Vec<usize>) -> Self {
        Shape(sizes)
    }
}

impl From<&[usize]> for Shape {
    fn from(sizes: &[usize]) -> Self {
        Shape(sizes.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { "," } else { "" })?;
        }
        f.write_str("]")
    }
}

/// Element type and sizes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorType {
    pub dtype: DType,
    pub shape: Shape,
}

impl TensorType {
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        TensorType { dtype, shape: shape.into() }
    }

    pub fn scalar(dtype: DType) -> Self {
        TensorType { dtype, shape: Shape::scalar() }
    }

    /// Bytes on the host, at the dtype's own width.
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }
}

impl fmt::Display for TensorType {
    /// `f32[8,10]`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
