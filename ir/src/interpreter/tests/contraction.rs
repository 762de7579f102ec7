use super::*;
use crate::{ConvDims, DotDims};

/// Every dot product as its definition states it: by multi-indices of the result and of the contracted axes.
fn direct_dot(dims: &DotDims, a: &Tensor, b: &Tensor, shape: &Shape) -> Vec<f64> {
    let (lhs_free, rhs_free) = (dims.lhs_free(a.shape().rank()), dims.rhs_free(b.shape().rank()));
    let contracted: Shape = dims.lhs_contract.iter().map(|&x| a.shape()[x]).collect();
    let (av, bv) = (a.to_f64_vec(), b.to_f64_vec());
    let element = |out: usize| {
        let index = shape.unravel(out);
        let (batch, free) = index.split_at(dims.lhs_batch.len());
        let (row, column) = free.split_at(lhs_free.len());
        let term = |k: usize| {
            let k = contracted.unravel(k);
            let place = |rank: usize, axes: [(&[usize], &[usize]); 3]| {
                let mut index = vec![0; rank];
                for (axes, values) in axes {
                    axes.iter().zip(values).for_each(|(&a, &v)| index[a] = v);
                }
                index
            };
            let i = place(a.shape().rank(), [(&dims.lhs_batch, batch), (&lhs_free, row), (&dims.lhs_contract, &k)]);
            let j = place(b.shape().rank(), [(&dims.rhs_batch, batch), (&rhs_free, column), (&dims.rhs_contract, &k)]);
            av[a.shape().ravel(&i)] * bv[b.shape().ravel(&j)]
        };
        (0..contracted.numel()).map(term).sum()
    };
    (0..shape.numel()).map(element).collect()
}

#[test]
fn dot_matches_its_definition_in_every_layout() {
    let mut tested = 0;
    for (name, g) in sample_graphs() {
        let Some(node) = g.nodes().iter().find(|n| matches!(n.op, Op::Dot(_))) else { continue };
        let Op::Dot(dims) = &node.op else { continue };
        if node.ty.dtype != DType::F32 {
            continue;
        }
        let operand = |i: usize| random_tensor(&TensorType::new(DType::F64, g.ty(node.operands[i]).shape.clone()), i as u64);
        let (a, b) = (operand(0), operand(1));
        let found = eval(node.op.clone(), &[a.clone(), b.clone()]);
        assert_eq!(found.shape(), &node.ty.shape);
        let expected = direct_dot(dims, &a, &b, &node.ty.shape);
        assert!(relative_l2(&found.to_f64_vec(), &expected) < 1e-13, "{name}");
        tested += 1;
    }
    assert!(tested >= 24);
}

#[test]
fn dot_of_small_matrices() {
    let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
    let (a, b) = (f64s([2, 2], &[1.0, 2.0, 3.0, 4.0]), f64s([2, 3], &[1.0, 0.0, 2.0, 0.0, 1.0, 3.0]));
    assert_eq!(eval(Op::Dot(dims.clone()), &[a, b]), f64s([2, 3], &[1.0, 2.0, 8.0, 3.0, 4.0, 18.0]));
    let u8s = |shape: [usize; 2], v: &[i64]| Tensor::from_i64(DType::U8, shape, v);
    let y = eval(Op::Dot(dims.clone()), &[u8s([1, 2], &[200, 3]), u8s([2, 1], &[2, 5])]);
    assert_eq!(y, u8s([1, 1], &[415 - 256]));
    // The sum of no products is zero.
    assert_eq!(eval(Op::Dot(dims), &[f64s([2, 0], &[]), f64s([0, 1], &[])]), f64s([2, 1], &[0.0, 0.0]));
}

#[test]
fn sums_of_products_accumulate_in_double_precision() {
    let dims = DotDims { lhs_contract: vec![0], rhs_contract: vec![0], ..DotDims::default() };
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3])).unwrap();
    let one = g.splat(&TensorType::new(DType::F32, [3]), 1.0).unwrap();
    let y = g.push(Op::Dot(dims), &[x, one]).unwrap();
    g.output("y", y).unwrap();
    let env = Environment { inputs: vec![Value::Float(vec![16777216.0f32, 1.0, 1.0])], parameters: vec![] };
    assert_eq!(interpret(&g, &env).unwrap().outputs(), [&Value::Float(vec![16777218.0])]);
}

/// A tensor over three spatial axes.
struct Volume {
    size: [usize; 3],
    values: Vec<f64>,
}

impl Volume {
    fn zeros(size: [usize; 3]) -> Self {
        Volume { size, values: vec![0.0; size.iter().product()] }
    }

    /// Zero outside.
    fn at(&self, p: [isize; 3]) -> f64 {
        let inside = (0..3).all(|a| p[a] >= 0 && (p[a] as usize) < self.size[a]);
        if inside { self.values[self.index(p.map(|c| c as usize))] } else { 0.0 }
    }

    fn index(&self, p: [usize; 3]) -> usize {
        (p[0] * self.size[1] + p[1]) * self.size[2] + p[2]
    }

    fn points(size: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
        (0..size[0]).flat_map(move |i| (0..size[1]).flat_map(move |j| (0..size[2]).map(move |k| [i, j, k])))
    }

    /// With `dilation - 1` zeros between neighbours.
    fn dilated(&self, dilation: [usize; 3]) -> Volume {
        let mut out = Volume::zeros([0, 1, 2].map(|a| if self.size[a] == 0 { 0 } else { (self.size[a] - 1) * dilation[a] + 1 }));
        for p in Self::points(self.size) {
            let to = out.index([0, 1, 2].map(|a| p[a] * dilation[a]));
            out.values[to] = self.values[self.index(p)];
        }
        out
    }
}

/// Convolution on explicitly dilated input and kernel. Missing spatial axes have size 1.
fn direct_conv(dims: &ConvDims, x: &Tensor, w: &Tensor, shape: &Shape) -> Vec<f64> {
    fn three<E: Copy>(v: &[E], one: E) -> [E; 3] {
        [0, 1, 2].map(|a| v.get(a).copied().unwrap_or(one))
    }
    let spatial = |shape: &Shape| three(&shape[2..], 1);
    let (xs, ws) = (x.shape(), w.shape());
    let volume = |t: &Tensor, i: usize, c: usize| {
        let size = spatial(t.shape());
        let n: usize = size.iter().product();
        let start = (i * t.shape()[1] + c) * n;
        Volume { size, values: t.to_f64_vec()[start..start + n].to_vec() }
    };
    let (stride, pads) = (three(&dims.stride, 1), three(&dims.pads, (0, 0)));
    let mut out = Vec::new();
    for n in 0..xs[0] {
        for o in 0..ws[0] {
            let group = o * dims.groups / ws[0];
            let mut sums = Volume::zeros(spatial(shape));
            for c in 0..ws[1] {
                let input = volume(x, n, group * ws[1] + c).dilated(three(&dims.input_dilation, 1));
                let kernel = volume(w, o, c).dilated(three(&dims.kernel_dilation, 1));
                for p in Volume::points(sums.size) {
                    let corner = [0, 1, 2].map(|a| (p[a] * stride[a]) as isize - pads[a].0);
                    let i = sums.index(p);
                    sums.values[i] += Volume::points(kernel.size)
                        .map(|k| input.at([0, 1, 2].map(|a| corner[a] + k[a] as isize)) * kernel.values[kernel.index(k)])
                        .sum::<f64>();
                }
            }
            out.extend(sums.values);
        }
    }
    out
}

#[test]
fn conv_matches_a_direct_loop() {
    let mut tested = 0;
    for (name, g) in sample_graphs() {
        let Some(node) = g.nodes().iter().find(|n| matches!(n.op, Op::Conv(_))) else { continue };
        let Op::Conv(dims) = &node.op else { continue };
        let operand = |i: usize| random_tensor(&TensorType::new(DType::F64, g.ty(node.operands[i]).shape.clone()), i as u64);
        let (x, w) = (operand(0), operand(1));
        let found = eval(node.op.clone(), &[x.clone(), w.clone()]);
        let expected = direct_conv(dims, &x, &w, &node.ty.shape);
        assert!(relative_l2(&found.to_f64_vec(), &expected) < 1e-13, "{name}");
        tested += 1;
    }
    assert!(tested >= 24);
}

#[test]
fn conv_of_small_signals() {
    let conv = |stride, pads, input_dilation| {
        let dims = ConvDims {
            stride: vec![stride],
            pads: vec![pads],
            input_dilation: vec![input_dilation],
            kernel_dilation: vec![1],
            groups: 1,
        };
        eval(Op::Conv(dims), &[f64s([1, 1, 4], &[1.0, 2.0, 3.0, 4.0]), f64s([1, 1, 2], &[10.0, 1.0])])
    };
    // A cross-correlation: the kernel is not flipped.
    assert_eq!(conv(1, (0, 0), 1), f64s([1, 1, 3], &[12.0, 23.0, 34.0]));
    assert_eq!(conv(2, (1, 0), 1), f64s([1, 1, 2], &[1.0, 23.0]));
    assert_eq!(conv(1, (-2, 1), 1), f64s([1, 1, 2], &[34.0, 40.0]));
    assert_eq!(conv(1, (0, 0), 2), f64s([1, 1, 6], &[10.0, 2.0, 20.0, 3.0, 30.0, 4.0]));
}
