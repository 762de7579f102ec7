//! Shorthands for building graphs. Each checks types as [`Graph::push`] does.

use std::sync::Arc;

use crate::{
    BinaryOp, CompareOp, DType, DTypeClass, Graph, GraphError, NodeId, Op, ReduceOp, Shape, Tensor, TensorType, UnaryOp,
};

impl Graph {
    pub fn constant(&mut self, value: Tensor) -> Result<NodeId, GraphError> {
        self.push(Op::Constant(Arc::new(value)), &[])
    }

    /// `value` in the type of `x`: a scalar constant, broadcast.
    pub fn constant_like(&mut self, x: NodeId, value: f64) -> Result<NodeId, GraphError> {
        let ty = self.ty(x).clone();
        self.splat(&ty, value)
    }

    /// `value` everywhere.
    pub fn splat(&mut self, ty: &TensorType, value: f64) -> Result<NodeId, GraphError> {
        let scalar = self.constant(Tensor::from_f64(ty.dtype, Shape::scalar(), &[value]))?;
        self.broadcast_to(scalar, &ty.shape)
    }

    /// The scalar that every value of `dtype` is at least as large as.
    pub fn lowest(&mut self, dtype: DType) -> Result<NodeId, GraphError> {
        let value = reduce_identity(ReduceOp::Max, dtype);
        self.constant(value)
    }

    pub fn unary(&mut self, op: UnaryOp, x: NodeId) -> Result<NodeId, GraphError> {
        self.push(Op::Unary(op), &[x])
    }

    /// Operands of equal shape.
    pub fn binary(&mut self, op: BinaryOp, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.push(Op::Binary(op), &[a, b])
    }

    pub fn compare(&mut self, op: CompareOp, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.push(Op::Compare(op), &[a, b])
    }

    pub fn add(&mut self, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.binary(BinaryOp::Add, a, b)
    }

    pub fn sub(&mut self, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.binary(BinaryOp::Sub, a, b)
    }

    pub fn mul(&mut self, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.binary(BinaryOp::Mul, a, b)
    }

    pub fn div(&mut self, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.binary(BinaryOp::Div, a, b)
    }

    /// `x * value`
    pub fn scale(&mut self, x: NodeId, value: f64) -> Result<NodeId, GraphError> {
        let value = self.constant_like(x, value)?;
        self.mul(x, value)
    }

    /// `x + value`
    pub fn shift(&mut self, x: NodeId, value: f64) -> Result<NodeId, GraphError> {
        let value = self.constant_like(x, value)?;
        self.add(x, value)
    }

    pub fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.push(Op::Select, &[condition, a, b])
    }

    /// To `dtype`; `x` itself if it has it.
    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Result<NodeId, GraphError> {
        if self.ty(x).dtype == dtype { Ok(x) } else { self.push(Op::Cast(dtype), &[x]) }
    }

    /// To `shape`; `x` itself if it has it.
    pub fn reshape(&mut self, x: NodeId, shape: impl Into<Shape>) -> Result<NodeId, GraphError> {
        let shape = shape.into();
        if self.ty(x).shape == shape { Ok(x) } else { self.push(Op::Reshape(shape), &[x]) }
    }

    /// Output axis `a` is axis `perm[a]` of `x`; `x` itself if nothing moves.
    pub fn transpose(&mut self, x: NodeId, perm: &[usize]) -> Result<NodeId, GraphError> {
        if perm.iter().copied().eq(0..self.ty(x).shape.rank()) {
            return Ok(x);
        }
        self.push(Op::Transpose(perm.to_vec()), &[x])
    }

    /// NumPy's one-sided broadcast of `x` to `shape`: axes align at the end, sizes of 1 repeat.
    pub fn broadcast_to(&mut self, x: NodeId, shape: &Shape) -> Result<NodeId, GraphError> {
        let from = self.ty(x).shape.clone();
        if from == *shape {
            return Ok(x);
        }
        let Some(offset) = shape.rank().checked_sub(from.rank()) else {
            // Let the type rule name the problem.
            return self.push(Op::Broadcast { shape: shape.clone(), axes: (0..from.rank()).collect() }, &[x]);
        };
        let kept: Vec<usize> = (0..from.rank()).filter(|&a| from[a] != 1 || shape[offset + a] == 1).collect();
        let squeezed = self.reshape(x, kept.iter().map(|&a| from[a]).collect::<Shape>())?;
        if self.ty(squeezed).shape == *shape {
            return Ok(squeezed);
        }
        let axes = kept.iter().map(|&a| a + offset).collect();
        self.push(Op::Broadcast { shape: shape.clone(), axes }, &[squeezed])
    }

    /// Undoes the removal of `axes` (of `shape`): repeats `x`, whose shape is `shape` without `axes`, along them.
    pub fn broadcast_without(&mut self, x: NodeId, shape: &Shape, axes: &[usize]) -> Result<NodeId, GraphError> {
        if axes.is_empty() {
            return Ok(x);
        }
        let kept = (0..shape.rank()).filter(|a| !axes.contains(a)).collect();
        self.push(Op::Broadcast { shape: shape.clone(), axes: kept }, &[x])
    }

    /// Both operands at their common NumPy broadcast shape.
    pub fn broadcast_pair(&mut self, a: NodeId, b: NodeId) -> Result<(NodeId, NodeId), GraphError> {
        let (x, y) = (&self.ty(a).shape, &self.ty(b).shape);
        let shape = Shape::broadcast(x, y).unwrap_or_else(|| x.clone());
        Ok((self.broadcast_to(a, &shape)?, self.broadcast_to(b, &shape)?))
    }

    /// `op` over `axes` (sorted, unique), which disappear.
    pub fn reduce(&mut self, op: ReduceOp, x: NodeId, axes: &[usize]) -> Result<NodeId, GraphError> {
        if axes.is_empty() { Ok(x) } else { self.push(Op::Reduce { op, axes: axes.to_vec() }, &[x]) }
    }

    /// `op` over `axes`, repeated back to the shape of `x`.
    pub fn reduce_keep(&mut self, op: ReduceOp, x: NodeId, axes: &[usize]) -> Result<NodeId, GraphError> {
        let shape = self.ty(x).shape.clone();
        let reduced = self.reduce(op, x, axes)?;
        self.broadcast_without(reduced, &shape, axes)
    }

    /// The mean over `axes`, which disappear.
    pub fn mean(&mut self, x: NodeId, axes: &[usize]) -> Result<NodeId, GraphError> {
        let count: usize = axes.iter().map(|&a| self.ty(x).shape[a]).product();
        let sum = self.reduce(ReduceOp::Sum, x, axes)?;
        self.scale(sum, 1.0 / count as f64)
    }

    /// The mean over `axes`, repeated back to the shape of `x`.
    pub fn mean_keep(&mut self, x: NodeId, axes: &[usize]) -> Result<NodeId, GraphError> {
        let shape = self.ty(x).shape.clone();
        let mean = self.mean(x, axes)?;
        self.broadcast_without(mean, &shape, axes)
    }
}

/// The value of an empty reduction, as a scalar of `dtype`.
pub fn reduce_identity(op: ReduceOp, dtype: DType) -> Tensor {
    let (float, int) = match op {
        ReduceOp::Sum => (0.0, 0),
        ReduceOp::Prod => (1.0, 1),
        ReduceOp::Max => (f64::NEG_INFINITY, int_range(dtype).0),
        ReduceOp::Min => (f64::INFINITY, int_range(dtype).1),
    };
    match dtype.class() {
        DTypeClass::Float => Tensor::from_f64(dtype, Shape::scalar(), &[float]),
        DTypeClass::Int => Tensor::from_i64(dtype, Shape::scalar(), &[int]),
        DTypeClass::Bool => Tensor::from_i64(dtype, Shape::scalar(), &[(op == ReduceOp::Min) as i64]),
    }
}

/// Smallest and largest value of an integer dtype as devices hold it: 64-bit integers live as 32-bit.
pub fn int_range(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::I8 => (i8::MIN as i64, i8::MAX as i64),
        DType::I16 => (i16::MIN as i64, i16::MAX as i64),
        DType::U8 => (0, u8::MAX as i64),
        DType::U16 => (0, u16::MAX as i64),
        DType::U32 | DType::U64 => (0, u32::MAX as i64),
        _ => (i32::MIN as i64, i32::MAX as i64),
    }
}
