mod composites;
mod contraction;
mod indexing;
mod movement;
mod pointwise;
mod reduction;

use super::*;
use crate::testing::{random_tensor, relative_l2, sample_graphs};
use crate::{DType, ParameterInfo, ParameterRole, Shape, UnaryOp};

fn f64s(shape: impl Into<Shape>, values: &[f64]) -> Tensor {
    Tensor::from_f64(DType::F64, shape, values)
}

fn i64s(shape: impl Into<Shape>, values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::I64, shape, values)
}

fn bools(shape: impl Into<Shape>, values: &[bool]) -> Tensor {
    Tensor::from_i64(DType::Bool, shape, &values.iter().map(|&v| v.into()).collect::<Vec<_>>())
}

fn eval(op: Op, operands: &[Tensor]) -> Tensor {
    fold(&op, &operands.iter().collect::<Vec<_>>()).unwrap_or_else(|e| panic!("{}: {e}", op.name()))
}

/// Checks shape, dtype and elements, which may differ by a few units in the last place.
fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.ty(), expected.ty(), "{what}");
    for (f, e) in found.to_f64_vec().into_iter().zip(expected.to_f64_vec()) {
        let same = f == e || f.is_nan() && e.is_nan() || (f - e).abs() <= 4.0 * f64::EPSILON * e.abs();
        assert!(same, "{what}: {f:e} instead of {e:e}");
    }
}

fn weights() -> ParameterInfo {
    ParameterInfo { name: "w".into(), ty: TensorType::new(DType::F32, [2]), stored: DType::F32, role: ParameterRole::Weight }
}

#[test]
fn a_step_reads_old_parameters_and_reports_new_ones() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [2])).unwrap();
    let w = g.parameter(weights()).unwrap();
    let dead = g.unary(UnaryOp::Exp, x).unwrap();
    let y = g.mul(x, w).unwrap();
    let next = g.sub(w, y).unwrap();
    g.output("y", y).unwrap();
    g.update(ParameterId(0), next).unwrap();
    let env = Environment { inputs: vec![Value::Float(vec![2.0, 3.0])], parameters: vec![Value::Float(vec![10.0, 20.0])] };
    let evaluation = interpret::<f32>(&g, &env).unwrap();
    assert_eq!(evaluation.outputs(), [&Value::Float(vec![20.0, 60.0])]);
    assert_eq!(evaluation.updates(), [(ParameterId(0), &Value::Float(vec![-10.0, -40.0]))]);
    assert_eq!(evaluation.value(w), Some(&Value::Float(vec![10.0, 20.0])));
    assert_eq!(evaluation.value(dead), None);
    assert_eq!(evaluation.value(NodeId(99)), None);
}

#[test]
fn an_environment_must_fit_the_graph() {
    let mut g = Graph::new();
    g.input("x", TensorType::new(DType::F32, [2])).unwrap();
    g.parameter(weights()).unwrap();
    let two = Value::Float(vec![1.0, 2.0]);
    let run = |inputs: Vec<Value<f64>>, parameters| interpret(&g, &Environment { inputs, parameters }).map(|_| ());
    run(vec![two.clone()], vec![two.clone()]).unwrap();
    assert_eq!(run(vec![], vec![two.clone()]), Err(InterpretError::InputCount { expected: 1, found: 0 }));
    assert_eq!(run(vec![two.clone()], vec![]), Err(InterpretError::ParameterCount { expected: 1, found: 0 }));
    let wrong_class = run(vec![Value::Int(vec![1, 2])], vec![two.clone()]).unwrap_err();
    assert_eq!(wrong_class.to_string(), "input \"x\": f32[2] needs 2 elements, found 2 elements of class Int");
    let wrong_count = run(vec![two], vec![Value::Float(vec![1.0])]).unwrap_err();
    assert_eq!(wrong_count.to_string(), "parameter \"w\": f32[2] needs 2 elements, found 1 elements of class Float");
}

#[test]
fn evaluating_a_node_checks_types_and_values() {
    let (vector, scalar) = (TensorType::new(DType::F32, [2]), TensorType::scalar(DType::F32));
    let two = Value::Float(vec![1.0f32, -2.0]);
    let abs = Op::Unary(UnaryOp::Abs);
    assert_eq!(evaluate_node(&abs, &[&vector], &[&two], &vector), Ok(Value::Float(vec![1.0, 2.0])));
    assert!(matches!(evaluate_node(&abs, &[&vector], &[&two], &scalar), Err(InterpretError::Result { .. })));
    assert!(matches!(evaluate_node(&abs, &[&scalar], &[&two], &scalar), Err(InterpretError::Operand { operand: 0, .. })));
    assert!(matches!(evaluate_node::<f32>(&abs, &[&vector], &[], &vector), Err(InterpretError::OperandCount { .. })));
    assert!(matches!(evaluate_node::<f32>(&abs, &[], &[], &vector), Err(InterpretError::Type(_))));
    let input = Op::Input(InputId(0));
    assert_eq!(evaluate_node::<f32>(&input, &[], &[], &vector), Err(InterpretError::Leaf("input")));
    assert_eq!(fold(&Op::Parameter(ParameterId(0)), &[]), Err(InterpretError::Leaf("parameter")));
}

#[test]
fn values_convert_from_and_to_tensors() {
    for dtype in DType::ALL {
        let tensor = random_tensor(&TensorType::new(dtype, [7, 3]), 5);
        assert_eq!(Value::<f64>::from_tensor(&tensor).to_tensor(tensor.ty()).unwrap(), tensor);
        if dtype != DType::F64 {
            assert_eq!(Value::<f32>::from_tensor(&tensor).to_tensor(tensor.ty()).unwrap(), tensor);
        }
        Value::<f64>::from_tensor(&tensor).to_tensor(&TensorType::new(dtype, [7])).unwrap_err();
    }
    let half = Value::Float(vec![1.0 + 1e-4]).to_tensor(&TensorType::scalar(DType::F16)).unwrap();
    assert_eq!(half.to_f64_vec(), [1.0]);
}

#[test]
fn folding_rounds_once_to_the_dtype() {
    let (a, b) = (Tensor::from_f32([1], &[16777216.0]), Tensor::from_f32([1], &[1.0]));
    assert_eq!(eval(Op::Binary(crate::BinaryOp::Add), &[a, b]), Tensor::from_f32([1], &[16777216.0]));
    let big = Tensor::from_i64(DType::I64, [1], &[(1 << 62) + 1]);
    assert_eq!(eval(Op::Binary(crate::BinaryOp::Add), &[big.clone(), big]), i64s([1], &[i64::MIN + 2]));
}

#[test]
fn both_precisions_agree_on_every_sample() {
    for (name, g) in sample_graphs() {
        let inputs: Vec<Tensor> = g.inputs().iter().enumerate().map(|(i, x)| random_tensor(&x.ty, 31 + i as u64)).collect();
        // The inputs are exact in both only if f32 holds them.
        if g.inputs().iter().any(|x| x.ty.dtype == DType::F64) {
            continue;
        }
        let single = interpret::<f32>(&g, &Environment::from_tensors(&inputs, [])).unwrap();
        let double = interpret::<f64>(&g, &Environment::from_tensors(&inputs, [])).unwrap();
        let (a, b) = (single.outputs()[0].to_f64_vec(), double.outputs()[0].to_f64_vec());
        let error = relative_l2(&a, &b);
        assert!(error < 1e-5, "{name}: {error:e}");
    }
}
