use meganeura_ir::interpreter::{Environment, Value, interpret};
use meganeura_ir::{ParameterRole, Tensor};

use super::*;
use crate::testing::{assert_close, evaluate, reals};

const STEPS: u64 = 20;
const WEIGHTS: [f64; 3] = [0.7, -1.3, 0.0];

/// A gradient that changes from step to step and with the weight.
fn gradient(step: u64, index: usize, weight: f64) -> f64 {
    (step as f64 * 0.7 + index as f64).sin() + 0.5 * weight
}

/// A learning rate that changes from step to step.
fn learning_rate(step: u64) -> f64 {
    0.05 / step as f64
}

/// The weights after [`STEPS`] steps of the graph that `optimizer` builds.
fn train(optimizer: Optimizer) -> Vec<f64> {
    let ty = TensorType::new(DType::F64, [WEIGHTS.len()]);
    let mut g = Graph::new();
    let slope = g.input("gradient", ty.clone()).unwrap();
    let w = ParameterInfo { name: "w".into(), ty: ty.clone(), stored: DType::F64, role: ParameterRole::Weight };
    g.parameter(w).unwrap();
    optimizer.apply(&mut g, &[(ParameterId(0), slope)]).unwrap();
    let g = g.verify().unwrap();
    let mut parameters: Vec<Value<f64>> =
        g.parameters().iter().map(|p| Value::from_tensor(&Tensor::zeros(p.ty.clone()))).collect();
    parameters[0] = Value::Float(WEIGHTS.to_vec());
    for step in 1..=STEPS {
        let weights = parameters[0].to_f64_vec();
        let slopes = weights.iter().enumerate().map(|(i, &w)| gradient(step, i, w)).collect();
        let mut inputs = vec![Value::Float(slopes)];
        let scalars = optimizer.step_inputs(step, learning_rate(step));
        assert_eq!(scalars.len() + 1, g.inputs().len());
        for info in &g.inputs()[1..] {
            let (_, value) = scalars.iter().find(|(name, _)| *name == info.name).unwrap();
            inputs.push(Value::Float(vec![(*value).into()]));
        }
        let evaluation = interpret(&g, &Environment { inputs, parameters: parameters.clone() }).unwrap();
        let updates: Vec<_> = evaluation.updates().into_iter().map(|(id, value)| (id, value.clone())).collect();
        for (ParameterId(id), value) in updates {
            parameters[id as usize] = value;
        }
    }
    parameters[0].to_f64_vec()
}

/// `torch.optim.SGD`'s documented algorithm for one weight.
fn reference_sgd(index: usize, momentum: f64, dampening: f64, nesterov: bool, weight_decay: f64) -> f64 {
    let mut weight = WEIGHTS[index];
    let mut buffer = None;
    for t in 1..=STEPS {
        let mut g = gradient(t, index, weight) + weight_decay * weight;
        if momentum != 0.0 {
            let b = match buffer {
                Some(b) => momentum * b + (1.0 - dampening) * g,
                None => g,
            };
            buffer = Some(b);
            g = if nesterov { g + momentum * b } else { b };
        }
        weight -= learning_rate(t) * g;
    }
    weight
}

/// `torch.optim.Adam`'s and `AdamW`'s documented algorithms for one weight.
fn reference_adam(index: usize, decoupled: bool, [b1, b2, epsilon, weight_decay]: [f64; 4]) -> f64 {
    let mut weight = WEIGHTS[index];
    let (mut m, mut v) = (0.0, 0.0);
    for t in 1..=STEPS {
        let mut g = gradient(t, index, weight);
        if decoupled {
            weight -= learning_rate(t) * weight_decay * weight;
        } else {
            g += weight_decay * weight;
        }
        m = b1 * m + (1.0 - b1) * g;
        v = b2 * v + (1.0 - b2) * g * g;
        let m_hat = m / (1.0 - b1.powi(t as i32));
        let v_hat: f64 = v / (1.0 - b2.powi(t as i32));
        weight -= learning_rate(t) * m_hat / (v_hat.sqrt() + epsilon);
    }
    weight
}

fn each(reference: impl Fn(usize) -> f64) -> Vec<f64> {
    (0..WEIGHTS.len()).map(reference).collect()
}

#[test]
fn sgd_follows_pytorch() {
    for (momentum, dampening, nesterov, weight_decay) in
        [(0.0, 0.0, false, 0.0), (0.0, 0.0, false, 0.1), (0.9, 0.0, false, 0.0), (0.9, 0.3, false, 0.1), (0.8, 0.0, true, 0.1)]
    {
        let found = train(Optimizer::Sgd { momentum, dampening, nesterov, weight_decay });
        let expected = each(|i| reference_sgd(i, momentum, dampening, nesterov, weight_decay));
        // The scalars of a step are f32.
        assert_close(&format!("momentum {momentum}"), &found, &expected, 1e-6);
    }
}

#[test]
fn adam_and_adamw_follow_pytorch() {
    for attributes in [[0.9, 0.999, 1e-8, 0.0], [0.8, 0.95, 1e-3, 0.3]] {
        let [beta1, beta2, epsilon, weight_decay] = attributes;
        let adam = train(Optimizer::Adam { beta1, beta2, epsilon, weight_decay, amsgrad: false });
        assert_close("adam", &adam, &each(|i| reference_adam(i, false, attributes)), 1e-6);
        let adamw = train(Optimizer::AdamW { beta1, beta2, epsilon, weight_decay, amsgrad: false });
        assert_close("adamw", &adamw, &each(|i| reference_adam(i, true, attributes)), 1e-6);
    }
}

/// Weights that PyTorch 2.9 reaches, in double precision.
#[test]
fn weights_after_twenty_steps_are_those_of_pytorch() {
    let [beta1, beta2, epsilon, weight_decay] = [0.8, 0.95, 1e-3, 0.3];
    for (optimizer, expected) in [
        (
            Optimizer::Sgd { momentum: 0.9, dampening: 0.3, nesterov: false, weight_decay: 0.1 },
            [0.38897656550790105, -1.031108769310272, 0.02091005861313893],
        ),
        (
            Optimizer::Sgd { momentum: 0.8, dampening: 0.0, nesterov: true, weight_decay: 0.1 },
            [0.357454866969232, -0.9986906413422785, 0.02893329256315197],
        ),
        (
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay, amsgrad: false },
            [0.5584320057679069, -1.1405345416446384, -0.019017764797474166],
        ),
        (
            Optimizer::AdamW { beta1, beta2, epsilon, weight_decay, amsgrad: false },
            [0.5372833669997502, -1.2264228830075694, -0.01918322845394422],
        ),
    ] {
        assert_close(optimizer.name(), &train(optimizer), &expected, 1e-6);
    }
}

#[test]
fn state_is_named_after_its_weight() {
    let ty = TensorType::new(DType::F32, [2]);
    let mut g = Graph::new();
    let slope = g.input("gradient", ty.clone()).unwrap();
    for name in ["a", "b"] {
        let role = ParameterRole::Weight;
        g.parameter(ParameterInfo { name: name.into(), ty: ty.clone(), stored: DType::F16, role }).unwrap();
    }
    let optimizer = Optimizer::from_name("adam").unwrap();
    optimizer.apply(&mut g, &[(ParameterId(0), slope), (ParameterId(1), slope)]).unwrap();
    let state: Vec<&ParameterInfo> = g.parameters().iter().filter(|p| p.role == ParameterRole::Optimizer).collect();
    let names: Vec<&str> = state.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["optimizer/exp_avg/a", "optimizer/exp_avg_sq/a", "optimizer/exp_avg/b", "optimizer/exp_avg_sq/b"]);
    assert!(state.iter().all(|p| p.ty == ty && p.stored == DType::F32));
    assert_eq!((g.updates().len(), g.inputs().len()), (6, 3));
}

#[test]
fn clipping_scales_by_the_norm_of_all_gradients() {
    let mut g = Graph::new();
    let a = g.input("a", TensorType::new(DType::F64, [2])).unwrap();
    let b = g.input("b", TensorType::new(DType::F64, [1, 1])).unwrap();
    let tensors = [reals([2], &[1.0, 2.0]), reals([1, 1], &[-2.0])];
    for (max_norm, coefficient) in [(1.0, 1.0 / (3.0 + 1e-6)), (6.0, 1.0), (0.0, 0.0)] {
        let clipped = clip_by_global_norm(&mut g, &[a, b], max_norm).unwrap();
        let nodes = [clipped.gradients[0], clipped.gradients[1], clipped.norm];
        let values = evaluate(&g, &tensors, &nodes).concat();
        assert_close("clip", &values, &[coefficient, 2.0 * coefficient, -2.0 * coefficient, 3.0], 1e-14);
    }
    assert!(clip_by_global_norm(&mut g, &[a], f64::NAN).is_err());
}

#[test]
fn wrong_attributes_and_types_are_errors() {
    let mut g = Graph::new();
    let slope = g.input("gradient", TensorType::new(DType::F32, [2])).unwrap();
    let ty = TensorType::new(DType::F32, [3]);
    g.parameter(ParameterInfo { name: "w".into(), ty, stored: DType::F32, role: ParameterRole::Weight }).unwrap();
    let sgd = |momentum, dampening, nesterov| Optimizer::Sgd { momentum, dampening, nesterov, weight_decay: 0.0 };
    let mut apply = |optimizer: Optimizer, parameter| optimizer.apply(&mut g, &[(ParameterId(parameter), slope)]);
    assert_eq!(apply(sgd(0.9, 0.1, true), 0), Err(OptimizerError::Nesterov));
    assert!(matches!(apply(sgd(-1.0, 0.0, false), 0), Err(OptimizerError::Attribute { .. })));
    assert!(matches!(apply(sgd(0.0, 0.0, false), 0), Err(OptimizerError::GradientType { .. })));
    assert_eq!(apply(sgd(0.0, 0.0, false), 7), Err(OptimizerError::UnknownParameter(7)));
    let beta = Optimizer::Adam { beta1: 1.0, beta2: 0.9, epsilon: 1e-8, weight_decay: 0.0, amsgrad: false };
    assert!(matches!(apply(beta, 0), Err(OptimizerError::Attribute { attribute: "beta1", .. })));
    assert!(Optimizer::from_name("lbfgs").unwrap_err().to_string().contains("sgd, adam, adamw, lion"));
}
