use meganeura_ir::interpreter::{Environment, Value, interpret};
use meganeura_ir::{DType, Tensor, TensorType};

use super::*;
use crate::gradients;
use crate::testing::{assert_close, grid, indices};

const RANK: usize = 2;
const SCALE: f64 = 0.75;

/// A graph with the weight `w` and what reads it.
struct Case {
    name: &'static str,
    weight: &'static [usize],
    inputs: Vec<Tensor>,
    /// The rows of the weight, and the groups of its convolution.
    matrix: (&'static [usize], Option<usize>),
    /// Whether the factors act on the data everywhere.
    beside: bool,
    build: fn(&mut Graph, NodeId, &[NodeId]) -> Result<NodeId, GraphError>,
}

fn contract(lhs: usize, rhs: usize) -> Op {
    Op::Dot(DotDims { lhs_contract: vec![lhs], rhs_contract: vec![rhs], ..DotDims::default() })
}

fn conv(groups: usize) -> Op {
    Op::Conv(ConvDims {
        stride: vec![1, 2],
        pads: vec![(1, 0), (0, 1)],
        input_dilation: vec![1, 1],
        kernel_dilation: vec![1, 2],
        groups,
    })
}

fn cases() -> Vec<Case> {
    let x = |shape: &[usize]| vec![grid(shape, -1.0, 1.2)];
    let case = |name, weight, inputs, matrix, beside, build| Case { name, weight, inputs, matrix, beside, build };
    vec![
        case("[in, out]", &[5, 3], x(&[4, 5]), (&[1], None), true, |g, w, x| g.push(contract(1, 0), &[x[0], w])),
        case("[out, in]", &[3, 5], x(&[2, 4, 5]), (&[0], None), true, |g, w, x| g.push(contract(2, 1), &[x[0], w])),
        case("the left operand", &[3, 5], x(&[5, 4]), (&[0], None), true, |g, w, x| g.push(contract(1, 0), &[w, x[0]])),
        case("transposed", &[3, 5], x(&[4, 5]), (&[0], None), true, |g, w, x| {
            let w = g.transpose(w, &[1, 0])?;
            g.push(contract(1, 0), &[x[0], w])
        }),
        case("one output", &[1, 5], x(&[4, 5]), (&[], None), true, |g, w, x| g.push(contract(1, 1), &[x[0], w])),
        case("heads", &[6, 5], x(&[4, 5]), (&[0], None), true, |g, w, x| {
            let heads = g.reshape(w, [2, 1, 3, 5])?;
            let moved = g.transpose(heads, &[3, 2, 0, 1])?;
            g.push(contract(1, 0), &[x[0], moved])
        }),
        case("contracted axes in another order", &[2, 3, 4], x(&[5, 3, 2]), (&[2], None), true, |g, w, x| {
            let dims = DotDims { lhs_contract: vec![2, 1], rhs_contract: vec![0, 1], ..DotDims::default() };
            g.push(Op::Dot(dims), &[x[0], w])
        }),
        case("tied", &[5, 3], x(&[4, 5]), (&[1], None), true, |g, w, x| {
            let h = g.push(contract(1, 0), &[x[0], w])?;
            g.push(contract(1, 1), &[h, w])
        }),
        case("embedding and head", &[7, 3], vec![indices([4], &[0, 6, 2, 2])], (&[0], None), true, |g, w, x| {
            let h = g.push(Op::Gather { axis: 0 }, &[w, x[0]])?;
            g.push(contract(1, 1), &[h, w])
        }),
        case("columns chosen", &[3, 7], vec![indices([4], &[0, 6, 2, 2])], (&[1], None), true, |g, w, x| {
            let h = g.push(Op::Gather { axis: 1 }, &[w, x[0]])?;
            g.push(contract(0, 0), &[h, w])
        }),
        case("also read as it is", &[5, 3], x(&[4, 5]), (&[1], None), false, |g, w, x| {
            let doubled = g.add(w, w)?;
            let y = g.push(contract(1, 0), &[x[0], w])?;
            let z = g.push(contract(1, 0), &[x[0], doubled])?;
            g.mul(y, z)
        }),
        case("also through a mixing change of shape", &[4, 3], x(&[4, 4]), (&[1], None), false, |g, w, x| {
            let y = g.push(contract(1, 0), &[x[0], w])?;
            let flat = g.reshape(w, [12])?;
            let sum = g.push(contract(0, 0), &[flat, flat])?;
            let sum = g.broadcast_to(sum, &[4, 3].into())?;
            g.mul(y, sum)
        }),
        case("a square with itself", &[3, 3], x(&[4, 3]), (&[0], None), false, |g, w, x| {
            let y = g.push(contract(1, 1), &[x[0], w])?;
            let square = g.push(contract(1, 0), &[w, w])?;
            g.push(contract(1, 0), &[y, square])
        }),
        case("convolution", &[4, 3, 2, 2], x(&[2, 3, 4, 6]), (&[0], Some(1)), true, |g, w, x| g.push(conv(1), &[x[0], w])),
        case("groups", &[6, 2, 2, 3], x(&[2, 4, 4, 7]), (&[0], Some(2)), true, |g, w, x| g.push(conv(2), &[x[0], w])),
        case("depthwise", &[3, 1, 2, 2], x(&[2, 3, 4, 6]), (&[0], Some(3)), true, |g, w, x| g.push(conv(3), &[x[0], w])),
        case("a matrix as a kernel", &[4, 3], x(&[2, 3, 4, 4]), (&[0], None), true, |g, w, x| {
            let w = g.reshape(w, [4, 3, 1, 1])?;
            g.push(conv(1), &[x[0], w])
        }),
        case("a kernel that is turned round", &[3, 4, 2, 2], x(&[2, 3, 4, 4]), (&[1], None), true, |g, w, x| {
            let w = g.transpose(w, &[1, 0, 2, 3])?;
            g.push(conv(1), &[x[0], w])
        }),
    ]
}

/// The graph of a case with its result as output, and the weight.
fn graph(case: &Case) -> (Graph, ParameterId) {
    let mut g = Graph::new();
    let ty = TensorType::new(DType::F64, case.weight);
    let w = g.parameter(ParameterInfo { name: "w".into(), ty, stored: DType::F64, role: ParameterRole::Weight }).unwrap();
    let inputs: Vec<NodeId> =
        case.inputs.iter().enumerate().map(|(i, t)| g.input(i.to_string(), t.ty().clone()).unwrap()).collect();
    let y = (case.build)(&mut g, w, &inputs).unwrap();
    g.output("y", y).unwrap();
    (g, ParameterId(0))
}

fn run(g: &Graph, inputs: &[Tensor], parameters: &[&Tensor]) -> Vec<Vec<f64>> {
    let values = |tensors: &mut dyn Iterator<Item = &Tensor>| tensors.map(Value::from_tensor).collect::<Vec<Value<f64>>>();
    let environment = Environment { inputs: values(&mut inputs.iter()), parameters: values(&mut parameters.iter().copied()) };
    interpret(g, &environment).unwrap().outputs().into_iter().map(|v| v.to_f64_vec()).collect()
}

fn attached(g: &Graph, matrix: &WeightMatrix) -> Graph {
    let (a, b) = ("w.lora_A".to_owned(), "w.lora_B".to_owned());
    attach_low_rank(g, &[LowRank { weight: ParameterId(0), matrix: matrix.clone(), rank: RANK, scale: SCALE, a, b }]).unwrap()
}

/// The sum of the squares of the first output.
fn loss(g: &mut Graph) -> NodeId {
    let y = g.outputs()[0].node;
    let square = g.mul(y, y).unwrap();
    let axes: Vec<usize> = (0..g.ty(y).shape.rank()).collect();
    g.reduce(meganeura_ir::ReduceOp::Sum, square, &axes).unwrap()
}

#[test]
fn an_adapted_graph_computes_with_the_sum_of_weight_and_product() {
    for case in cases() {
        let (g, w) = graph(&case);
        let matrix = weight_matrices(&g)[&w].clone().unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!((matrix.rows(), matrix.groups()), case.matrix, "{}", case.name);
        let otherwise = ["tied", "embedding and head", "columns chosen", "a square with itself"].contains(&case.name);
        assert_eq!(matrix.has_other_readers(), otherwise || !case.beside, "{}", case.name);
        let weight = grid(case.weight, -0.7, 0.9);
        let (a, b) = (grid(matrix.a_shape(RANK), -1.0, 0.8), grid(matrix.b_shape(RANK), -0.9, 1.1));
        let product = matrix.product(RANK, &a.to_f64_vec(), &b.to_f64_vec());
        let merged: Vec<f64> = weight.to_f64_vec().iter().zip(&product).map(|(w, p)| w + SCALE * p).collect();
        let expected = run(&g, &case.inputs, &[&Tensor::from_f64(DType::F64, case.weight, &merged)]);

        let adapted = attached(&g, &matrix).verify().unwrap().into_inner();
        let found = run(&adapted, &case.inputs, &[&weight, &a, &b]);
        assert_close(case.name, &found[0], &expected[0], 1e-12);
        let untrained = Tensor::zeros(b.ty().clone());
        let before = run(&g, &case.inputs, &[&weight]);
        assert_eq!(run(&adapted, &case.inputs, &[&weight, &a, &untrained]), before, "{}", case.name);
    }
}

#[test]
fn the_product_is_that_of_the_matrices_in_the_order_of_the_weight() {
    let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let b = [1.0, 0.0, 10.0, 100.0];
    let rows_first = WeightMatrix::new([2, 3].into(), vec![0], None).unwrap();
    assert_eq!(rows_first.product(2, &a, &b), [1.0, 2.0, 3.0, 410.0, 520.0, 630.0]);
    let rows_last = WeightMatrix::new([3, 2].into(), vec![1], None).unwrap();
    assert_eq!(rows_last.product(2, &a, &b), [1.0, 410.0, 2.0, 520.0, 3.0, 630.0]);
    assert!(WeightMatrix::new([3].into(), vec![0], None).is_none());
    assert!(WeightMatrix::new([3, 2].into(), vec![2], None).is_none());
    assert!(WeightMatrix::new([3, 2].into(), vec![1, 0], None).is_none());
    assert!(WeightMatrix::new([3, 2, 1].into(), vec![1], Some(1)).is_none());
}

#[test]
fn gradients_cost_the_rank_where_products_read_the_weight() {
    for case in cases() {
        let (g, w) = graph(&case);
        let matrix = weight_matrices(&g)[&w].clone().unwrap();
        let mut adapted = attached(&g, &matrix);
        let loss = loss(&mut adapted);
        let factors = [1, 2].map(|id| adapted.push(Op::Parameter(ParameterId(id)), &[]).unwrap());
        let by = gradients(&mut adapted, loss, &factors).unwrap();
        adapted.clear_outputs();
        by.iter().enumerate().for_each(|(i, &node)| adapted.output(i.to_string(), node).unwrap());
        let weight = adapted.push(Op::Parameter(w), &[]).unwrap();
        let live = adapted.live();
        let dense = gradients(&mut adapted, loss, &[weight]).unwrap()[0];
        assert!(!case.beside || !live.contains(&dense), "{}", case.name);

        // Central differences along one direction through both factors.
        let weight = grid(case.weight, -0.7, 0.9);
        let start = [grid(matrix.a_shape(RANK), -1.0, 0.8), grid(matrix.b_shape(RANK), -0.9, 1.1)];
        let direction = [grid(matrix.a_shape(RANK), -0.6, 1.0), grid(matrix.b_shape(RANK), -1.0, 0.4)];
        let found = run(&adapted, &case.inputs, &[&weight, &start[0], &start[1]]);
        let slope: f64 = found.iter().zip(&direction).flat_map(|(f, d)| f.iter().zip(d.to_f64_vec()).map(|(f, d)| f * d)).sum();
        adapted.clear_outputs();
        adapted.output("loss", loss).unwrap();
        let moved = |by: f64| {
            let at = |i: usize| {
                let values: Vec<f64> =
                    start[i].to_f64_vec().iter().zip(direction[i].to_f64_vec()).map(|(s, d)| s + by * d).collect();
                Tensor::from_f64(DType::F64, start[i].shape().clone(), &values)
            };
            run(&adapted, &case.inputs, &[&weight, &at(0), &at(1)])[0][0]
        };
        let difference = |h: f64| (moved(h) - moved(-h)) / (2.0 * h);
        let expected = (4.0 * difference(5e-4) - difference(1e-3)) / 3.0;
        assert_close(case.name, &[slope], &[expected], 1e-7);
    }
}

#[test]
fn a_weight_that_is_no_matrix_says_why() {
    let outcome = |shape: &[usize], build: &dyn Fn(&mut Graph, NodeId) -> NodeId| {
        let mut g = Graph::new();
        let ty = TensorType::new(DType::F64, shape);
        let w = g.parameter(ParameterInfo { name: "w".into(), ty, stored: DType::F64, role: ParameterRole::Weight }).unwrap();
        let y = build(&mut g, w);
        g.output("y", y).unwrap();
        weight_matrices(&g)[&ParameterId(0)].clone()
    };
    let input = |g: &mut Graph, shape: &[usize]| g.input("x", TensorType::new(DType::F64, shape)).unwrap();
    assert_eq!(outcome(&[3], &|g, w| g.add(w, w).unwrap()), Err(MatrixError::Rank(1)));
    assert_eq!(outcome(&[3, 2], &|g, w| g.add(w, w).unwrap()), Err(MatrixError::NoProduct(vec!["add"])));
    assert_eq!(outcome(&[3, 2], &|_, w| w), Err(MatrixError::Output));
    let batch = |g: &mut Graph, w| {
        let x = input(g, &[2, 4, 3]);
        let dims = DotDims { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![1] };
        g.push(Op::Dot(dims), &[x, w]).unwrap()
    };
    assert_eq!(outcome(&[2, 3, 5], &batch), Err(MatrixError::Batch));
    let mixed = |g: &mut Graph, w| {
        let x = input(g, &[4, 2]);
        let w = g.reshape(w, [2, 6]).unwrap();
        g.push(contract(1, 0), &[x, w]).unwrap()
    };
    assert_eq!(outcome(&[3, 4], &mixed), Err(MatrixError::Mixed));
}
