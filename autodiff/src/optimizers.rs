//! Optimisers: gradients to updates of the graph, by PyTorch's formulas.

use meganeura_ir::{
    BinaryOp, DType, Graph, GraphError, InputId, NodeId, Op, ParameterId, ParameterInfo, ParameterRole, TensorType, UnaryOp,
};

use crate::formula::formula;

/// How gradients change weights.
///
/// State is one parameter of role [`ParameterRole::Optimizer`] per weight and quantity, named `optimizer/<quantity>/<weight>`, which
/// starts at zero. What changes from step to step is a scalar f32 input of the graph: see [`Optimizer::step_inputs`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.SGD`
    Sgd { momentum: f64, dampening: f64, nesterov: bool, weight_decay: f64 },
    /// `torch.optim.Adam`: weight decay is added to the gradient.
    Adam { beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64 },
    /// `torch.optim.AdamW`: weight decay shrinks the weight, apart from the gradient.
    AdamW { beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64 },
}

/// Why an optimiser cannot be applied.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OptimizerError {
    #[error("there is no optimizer {name:?}; there are {}", known.join(", "))]
    UnknownName { name: String, known: Vec<&'static str> },
    #[error("{optimizer}: {attribute} is {value}, {expected} is needed")]
    Attribute { optimizer: &'static str, attribute: &'static str, value: f64, expected: &'static str },
    #[error("sgd: Nesterov momentum needs a momentum and no dampening")]
    Nesterov,
    #[error("the graph has no parameter {0}")]
    UnknownParameter(u32),
    #[error("the gradient of {name:?} is {found}, the parameter {expected}")]
    GradientType { name: String, expected: TensorType, found: TensorType },
    #[error("{name:?} is {ty}: only floats are trained")]
    NotFloat { name: String, ty: TensorType },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// Names of the graph inputs that change from step to step.
mod input {
    pub const LEARNING_RATE: &str = "optimizer/learning_rate";
    /// What a gradient adds to the momentum buffer: `1 - dampening`, but 1 at the first step.
    pub const GRADIENT_WEIGHT: &str = "optimizer/gradient_weight";
    /// `learning_rate / (1 - beta1^step)`
    pub const STEP_SIZE: &str = "optimizer/step_size";
    /// `sqrt(1 - beta2^step)`
    pub const BIAS_CORRECTION: &str = "optimizer/bias_correction2_sqrt";
    /// `1 - learning_rate * weight_decay`
    pub const SHRINK: &str = "optimizer/shrink";
}

impl Optimizer {
    /// Every optimiser by its name on the command line, with PyTorch's defaults.
    pub const TABLE: [(&'static str, Optimizer); 3] = [
        ("sgd", Optimizer::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }),
        ("adam", Optimizer::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }),
        ("adamw", Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }),
    ];

    /// The optimiser of that name, with its defaults.
    pub fn from_name(name: &str) -> Result<Optimizer, OptimizerError> {
        Self::TABLE.iter().find(|(n, _)| *n == name).map(|(_, o)| *o).ok_or_else(|| OptimizerError::UnknownName {
            name: name.to_owned(),
            known: Self::TABLE.iter().map(|(n, _)| *n).collect(),
        })
    }

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Adam { .. } => "adam",
            Optimizer::AdamW { .. } => "adamw",
        }
    }

    /// The values of the graph's inputs at `step` (from 1), computed in f64.
    pub fn step_inputs(&self, step: u64, learning_rate: f64) -> Vec<(&'static str, f32)> {
        let first = step <= 1;
        let bias_correction = |beta: f64| 1.0 - beta.powf(step.max(1) as f64);
        let values: Vec<(&'static str, f64)> = match *self {
            Optimizer::Sgd { momentum, dampening, .. } => {
                let mut values = vec![(input::LEARNING_RATE, learning_rate)];
                if momentum != 0.0 && dampening != 0.0 {
                    values.push((input::GRADIENT_WEIGHT, if first { 1.0 } else { 1.0 - dampening }));
                }
                values
            }
            Optimizer::Adam { beta1, beta2, .. } => vec![
                (input::STEP_SIZE, learning_rate / bias_correction(beta1)),
                (input::BIAS_CORRECTION, bias_correction(beta2).sqrt()),
            ],
            Optimizer::AdamW { beta1, beta2, weight_decay, .. } => vec![
                (input::STEP_SIZE, learning_rate / bias_correction(beta1)),
                (input::BIAS_CORRECTION, bias_correction(beta2).sqrt()),
                (input::SHRINK, 1.0 - learning_rate * weight_decay),
            ],
        };
        values.into_iter().map(|(name, value)| (name, value as f32)).collect()
    }

    /// Appends the state and the update of each parameter from its gradient, and the inputs that [`Optimizer::step_inputs`] fills.
    ///
    /// # Errors
    /// An attribute is out of its range, or a parameter is unknown, not a float, or of another type than its gradient.
    pub fn apply(&self, g: &mut Graph, gradients: &[(ParameterId, NodeId)]) -> Result<(), OptimizerError> {
        self.check_attributes()?;
        for &(parameter, gradient) in gradients {
            check_gradient(g, parameter, gradient)?;
        }
        for &(parameter, gradient) in gradients {
            match *self {
                Optimizer::Sgd { momentum, dampening, nesterov, weight_decay } => {
                    let lr = scalar(g, input::LEARNING_RATE)?;
                    let gradient = decayed(g, parameter, gradient, weight_decay)?;
                    let direction = match momentum {
                        0.0 => gradient,
                        _ => momentum_direction(g, parameter, gradient, momentum, dampening, nesterov)?,
                    };
                    step(g, parameter, None, lr, direction)?;
                }
                Optimizer::Adam { beta1, beta2, epsilon, weight_decay } => {
                    let size = scalar(g, input::STEP_SIZE)?;
                    let gradient = decayed(g, parameter, gradient, weight_decay)?;
                    let direction = adam_direction(g, parameter, gradient, [beta1, beta2], epsilon)?;
                    step(g, parameter, None, size, direction)?;
                }
                Optimizer::AdamW { beta1, beta2, epsilon, .. } => {
                    let size = scalar(g, input::STEP_SIZE)?;
                    let direction = adam_direction(g, parameter, gradient, [beta1, beta2], epsilon)?;
                    let shrink = scalar(g, input::SHRINK)?;
                    step(g, parameter, Some(shrink), size, direction)?;
                }
            }
        }
        Ok(())
    }

    fn check_attributes(&self) -> Result<(), OptimizerError> {
        const NOT_NEGATIVE: &str = "a number of at least 0";
        const FRACTION: &str = "a number from 0 up to 1";
        let not_negative = |value: f64| value >= 0.0 && value.is_finite();
        let fraction = |value: f64| (0.0..1.0).contains(&value);
        let attributes = match *self {
            Optimizer::Sgd { momentum, dampening, weight_decay, .. } => vec![
                ("momentum", momentum, not_negative(momentum), NOT_NEGATIVE),
                ("dampening", dampening, dampening.is_finite(), "a finite number"),
                ("weight_decay", weight_decay, not_negative(weight_decay), NOT_NEGATIVE),
            ],
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay }
            | Optimizer::AdamW { beta1, beta2, epsilon, weight_decay } => vec![
                ("beta1", beta1, fraction(beta1), FRACTION),
                ("beta2", beta2, fraction(beta2), FRACTION),
                ("epsilon", epsilon, not_negative(epsilon), NOT_NEGATIVE),
                ("weight_decay", weight_decay, not_negative(weight_decay), NOT_NEGATIVE),
            ],
        };
        if let Some((attribute, value, _, expected)) = attributes.into_iter().find(|(_, _, fits, _)| !fits) {
            return Err(OptimizerError::Attribute { optimizer: self.name(), attribute, value, expected });
        }
        match *self {
            Optimizer::Sgd { momentum, dampening, nesterov: true, .. } if momentum == 0.0 || dampening != 0.0 => {
                Err(OptimizerError::Nesterov)
            }
            _ => Ok(()),
        }
    }
}

fn check_gradient(g: &Graph, parameter: ParameterId, gradient: NodeId) -> Result<(), OptimizerError> {
    let info = info(g, parameter)?;
    if !info.ty.dtype.is_float() {
        return Err(OptimizerError::NotFloat { name: info.name.clone(), ty: info.ty.clone() });
    }
    let found = &g.nodes().get(gradient.index()).ok_or(GraphError::UnknownNode(gradient.0))?.ty;
    if *found != info.ty {
        let (name, expected, found) = (info.name.clone(), info.ty.clone(), found.clone());
        return Err(OptimizerError::GradientType { name, expected, found });
    }
    Ok(())
}

fn info(g: &Graph, parameter: ParameterId) -> Result<&ParameterInfo, OptimizerError> {
    g.parameters().get(parameter.0 as usize).ok_or(OptimizerError::UnknownParameter(parameter.0))
}

/// The scalar input of that name, declared at first use.
fn scalar(g: &mut Graph, name: &str) -> Result<NodeId, GraphError> {
    match g.inputs().iter().position(|i| i.name == name) {
        Some(index) => g.push(Op::Input(InputId(index as u32)), &[]),
        None => g.input(name, TensorType::scalar(DType::F32)),
    }
}

/// State of the parameter's type, zero before the first step.
fn state(g: &mut Graph, quantity: &str, parameter: ParameterId) -> Result<(ParameterId, NodeId), OptimizerError> {
    let info = info(g, parameter)?;
    let state = ParameterInfo {
        name: format!("optimizer/{quantity}/{}", info.name),
        ty: info.ty.clone(),
        stored: info.ty.dtype,
        role: ParameterRole::Optimizer,
    };
    let node = g.parameter(state)?;
    Ok((ParameterId(g.parameters().len() as u32 - 1), node))
}

fn weight(g: &mut Graph, parameter: ParameterId) -> Result<NodeId, GraphError> {
    g.push(Op::Parameter(parameter), &[])
}

/// `gradient + weight_decay * p`
fn decayed(g: &mut Graph, parameter: ParameterId, gradient: NodeId, weight_decay: f64) -> Result<NodeId, GraphError> {
    if weight_decay == 0.0 {
        return Ok(gradient);
    }
    let p = weight(g, parameter)?;
    formula(g, |f| {
        let [p, gradient] = f.terms([p, gradient]);
        gradient + weight_decay * p
    })
}

/// `buffer = momentum * buffer + (1 - dampening) * gradient` (at the first step the gradient itself), and with Nesterov
/// `gradient + momentum * buffer`.
fn momentum_direction(
    g: &mut Graph,
    parameter: ParameterId,
    gradient: NodeId,
    momentum: f64,
    dampening: f64,
    nesterov: bool,
) -> Result<NodeId, OptimizerError> {
    let (buffer_id, buffer) = state(g, "momentum_buffer", parameter)?;
    let gradient_weight = match dampening {
        0.0 => None,
        _ => Some(scalar(g, input::GRADIENT_WEIGHT)?),
    };
    let buffer = formula(g, |f| {
        let [buffer, gradient] = f.terms([buffer, gradient]);
        let added = match gradient_weight {
            Some(weight) => f.terms([weight])[0].splat_like(gradient) * gradient,
            None => gradient,
        };
        momentum * buffer + added
    })?;
    g.update(buffer_id, buffer)?;
    if !nesterov {
        return Ok(buffer);
    }
    Ok(formula(g, |f| {
        let [buffer, gradient] = f.terms([buffer, gradient]);
        gradient + momentum * buffer
    })?)
}

/// `m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon)` with the moving averages `m` of the gradient and `v` of its square.
fn adam_direction(
    g: &mut Graph,
    parameter: ParameterId,
    gradient: NodeId,
    [beta1, beta2]: [f64; 2],
    epsilon: f64,
) -> Result<NodeId, OptimizerError> {
    let (m_id, m) = state(g, "exp_avg", parameter)?;
    let (v_id, v) = state(g, "exp_avg_sq", parameter)?;
    let m = formula(g, |f| {
        let [m, gradient] = f.terms([m, gradient]);
        m + (1.0 - beta1) * (gradient - m)
    })?;
    let v = formula(g, |f| {
        let [v, gradient] = f.terms([v, gradient]);
        beta2 * v + (1.0 - beta2) * gradient * gradient
    })?;
    g.update(m_id, m)?;
    g.update(v_id, v)?;
    let correction = scalar(g, input::BIAS_CORRECTION)?;
    Ok(formula(g, |f| {
        let [m, v, correction] = f.terms([m, v, correction]);
        m / (v.unary(UnaryOp::Sqrt) / correction.splat_like(v) + epsilon)
    })?)
}

/// `p = shrink * p - size * direction`
fn step(
    g: &mut Graph,
    parameter: ParameterId,
    shrink: Option<NodeId>,
    size: NodeId,
    direction: NodeId,
) -> Result<(), OptimizerError> {
    let p = weight(g, parameter)?;
    let next = formula(g, |f| {
        let [p, size, direction] = f.terms([p, size, direction]);
        let kept = match shrink {
            Some(shrink) => p * f.terms([shrink])[0].splat_like(p),
            None => p,
        };
        kept - size.splat_like(direction) * direction
    })?;
    Ok(g.update(parameter, next)?)
}

/// Gradients after [`clip_by_global_norm`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clipped {
    /// In the order and the types of the gradients given.
    pub gradients: Vec<NodeId>,
    /// The norm before clipping, a scalar f32 (f64 where every gradient is).
    pub norm: NodeId,
}

/// `torch.nn.utils.clip_grad_norm_`: scales all gradients by `min(1, max_norm / (norm + 1e-6))`, where `norm` is the Euclidean norm of
/// all of them together.
///
/// # Errors
/// `max_norm` is negative or not finite, or a gradient is not a float.
pub fn clip_by_global_norm(g: &mut Graph, gradients: &[NodeId], max_norm: f64) -> Result<Clipped, OptimizerError> {
    if !(max_norm >= 0.0 && max_norm.is_finite()) {
        let expected = "a number of at least 0";
        return Err(OptimizerError::Attribute { optimizer: "clipping", attribute: "max_norm", value: max_norm, expected });
    }
    let wide = !gradients.is_empty() && gradients.iter().all(|&d| g.ty(d).dtype == DType::F64);
    let dtype = if wide { DType::F64 } else { DType::F32 };
    let mut total = g.splat(&TensorType::scalar(dtype), 0.0)?;
    for &gradient in gradients {
        total = formula(g, |f| {
            let [total, gradient] = f.terms([total, gradient]);
            let gradient = gradient.cast(dtype);
            total + (gradient * gradient).sum()
        })?;
    }
    let norm = g.unary(UnaryOp::Sqrt, total)?;
    let scale = formula(g, |f| {
        let [norm] = f.terms([norm]);
        (max_norm / (norm + 1e-6)).binary(BinaryOp::Min, 1.0)
    })?;
    let clip = |&gradient: &NodeId| {
        formula(g, |f| {
            let [gradient, scale] = f.terms([gradient, scale]);
            gradient * scale.splat_like(gradient)
        })
    };
    Ok(Clipped { gradients: gradients.iter().map(clip).collect::<Result<_, _>>()?, norm })
}

#[cfg(test)]
mod tests {
    use meganeura_ir::Tensor;
    use meganeura_ir::interpreter::{Environment, Value, interpret};

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
        for (momentum, dampening, nesterov, weight_decay) in [
            (0.0, 0.0, false, 0.0),
            (0.0, 0.0, false, 0.1),
            (0.9, 0.0, false, 0.0),
            (0.9, 0.3, false, 0.1),
            (0.8, 0.0, true, 0.1),
        ] {
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
            let adam = train(Optimizer::Adam { beta1, beta2, epsilon, weight_decay });
            assert_close("adam", &adam, &each(|i| reference_adam(i, false, attributes)), 1e-6);
            let adamw = train(Optimizer::AdamW { beta1, beta2, epsilon, weight_decay });
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
                Optimizer::Adam { beta1, beta2, epsilon, weight_decay },
                [0.5584320057679069, -1.1405345416446384, -0.019017764797474166],
            ),
            (
                Optimizer::AdamW { beta1, beta2, epsilon, weight_decay },
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
        let beta = Optimizer::Adam { beta1: 1.0, beta2: 0.9, epsilon: 1e-8, weight_decay: 0.0 };
        assert!(matches!(apply(beta, 0), Err(OptimizerError::Attribute { attribute: "beta1", .. })));
        assert!(Optimizer::from_name("lbfgs").unwrap_err().to_string().contains("sgd, adam, adamw"));
    }
}
