//! Optimisers and losses against PyTorch over 20 steps, through the reference interpreter: see fixtures/optimizers.py.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use meganeura_autodiff::{
    Accumulation, EMA_PREFIX, Loss, LossScale, LossScaling, Optimizer, ema_inputs, exponential_moving_average, gradients,
};
use meganeura_ir::interpreter::{Environment, Value, interpret};
use meganeura_ir::{DType, Graph, NodeId, ParameterId, ParameterInfo, ParameterRole, Tensor, TensorType, Verified};
use ndarray::ArrayD;
use ndarray_npy::NpzReader;

const STEPS: u64 = 20;
/// The steps whose weights the reference has.
const KEPT: [u64; 3] = [1, 2, 20];
const WEIGHTS: [&str; 3] = ["matrix", "vector", "kernel"];
const TOLERANCE: f64 = 1e-5;

/// Arrays by name, those of floats and those of integers.
struct Reference {
    floats: HashMap<String, ArrayD<f64>>,
    integers: HashMap<String, ArrayD<i64>>,
}

impl Reference {
    fn read() -> Self {
        Self::open("optimizers.npz")
    }

    fn open(fixture: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(fixture);
        let mut file = NpzReader::new(File::open(path).unwrap()).unwrap();
        let (mut floats, mut integers) = (HashMap::new(), HashMap::new());
        for name in file.names().unwrap() {
            let key = name.trim_end_matches(".npy").to_owned();
            match file.by_name::<ndarray::OwnedRepr<f64>, ndarray::IxDyn>(&name) {
                Ok(array) => drop(floats.insert(key, array)),
                Err(_) => drop(integers.insert(key, file.by_name(&name).unwrap())),
            }
        }
        Reference { floats, integers }
    }

    fn floats(&self, name: &str) -> &ArrayD<f64> {
        self.floats.get(name).unwrap_or_else(|| panic!("the reference has no {name}"))
    }

    /// Row `index` of the first axis.
    fn row(&self, name: &str, index: usize) -> Vec<f64> {
        self.floats(name).index_axis(ndarray::Axis(0), index).iter().copied().collect()
    }

    fn tensor(&self, name: &str) -> Tensor {
        match self.integers.get(name) {
            Some(array) => Tensor::from_i64(DType::I64, array.shape(), &array.iter().copied().collect::<Vec<_>>()),
            None => {
                let array = self.floats(name);
                Tensor::from_f64(DType::F64, array.shape(), &array.iter().copied().collect::<Vec<_>>())
            }
        }
    }
}

fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance * (1.0 + e.abs()), "{what}, element {i}: {f}, PyTorch has {e}");
    }
}

/// A graph with its parameters' values.
struct Machine {
    graph: Verified,
    parameters: Vec<Value<f64>>,
}

impl Machine {
    /// Every parameter zero but those in `values`.
    fn new(graph: Graph, values: &[(&str, &Tensor)]) -> Self {
        let graph = graph.verify().unwrap();
        let zeros = graph.parameters().iter().map(|p| Value::from_tensor(&Tensor::zeros(p.ty.clone())));
        let mut machine = Machine { parameters: zeros.collect(), graph };
        for (name, tensor) in values {
            let id = machine.graph.parameter_id(name).unwrap();
            machine.parameters[id.0 as usize] = Value::from_tensor(tensor);
        }
        machine
    }

    fn parameter(&self, name: &str) -> Vec<f64> {
        let id = self.graph.parameter_id(name).unwrap_or_else(|| panic!("no parameter {name}"));
        self.parameters[id.0 as usize].to_f64_vec()
    }

    /// Runs the graph on inputs by name, and returns its outputs.
    fn run(&mut self, inputs: &HashMap<String, Vec<f64>>) -> Vec<Vec<f64>> {
        assert_eq!(inputs.len(), self.graph.inputs().len(), "inputs that the graph does not read");
        let inputs = self.graph.inputs().iter().map(|i| Value::Float(inputs[&i.name].clone())).collect();
        let environment = Environment { inputs, parameters: self.parameters.clone() };
        let evaluation = interpret(&self.graph, &environment).unwrap();
        let updates: Vec<_> = evaluation.updates().into_iter().map(|(id, value)| (id, value.clone())).collect();
        let outputs = evaluation.outputs().into_iter().map(|value| value.to_f64_vec()).collect();
        for (ParameterId(id), value) in updates {
            self.parameters[id as usize] = value;
        }
        outputs
    }
}

fn weight(g: &mut Graph, name: &str, tensor: &Tensor) -> (ParameterId, NodeId) {
    let info = ParameterInfo { name: name.into(), ty: tensor.ty().clone(), stored: DType::F64, role: ParameterRole::Weight };
    let node = g.parameter(info).unwrap();
    (g.parameter_id(name).unwrap(), node)
}

/// The groups of an optimiser: a share of the learning rate, an optimiser, and weights.
type Groups = Vec<(f64, Optimizer, Vec<&'static str>)>;

/// Weights with gradients `input + weight / 2`, and the updates of `groups`.
fn training_graph(reference: &Reference, groups: &Groups, average: bool) -> Machine {
    let mut g = Graph::new();
    let mut pairs = HashMap::new();
    let start: Vec<Tensor> = WEIGHTS.iter().map(|name| reference.tensor(&format!("weight/{name}"))).collect();
    for (name, tensor) in WEIGHTS.into_iter().zip(&start) {
        let (id, node) = weight(&mut g, name, tensor);
        let slope = g.input(name, tensor.ty().clone()).unwrap();
        let half = g.scale(node, 0.5).unwrap();
        pairs.insert(name, (id, g.add(slope, half).unwrap()));
    }
    for (group, (_, optimizer, weights)) in groups.iter().enumerate() {
        let pairs: Vec<_> = weights.iter().map(|name| pairs[name]).collect();
        optimizer.apply_group(&mut g, group, &pairs).unwrap();
    }
    if average {
        let ids: Vec<_> = WEIGHTS.iter().map(|name| pairs[name].0).collect();
        exponential_moving_average(&mut g, &ids).unwrap();
    }
    let values: Vec<_> = WEIGHTS.into_iter().zip(&start).collect();
    Machine::new(g, &values)
}

/// Trains for 20 steps and compares the weights that the reference has.
fn check_optimizer(reference: &Reference, case: &str, groups: &Groups, average: bool) {
    let mut machine = training_graph(reference, groups, average);
    let rates = reference.floats("learning_rates");
    for step in 1..=STEPS {
        let at = step as usize - 1;
        let mut inputs: HashMap<String, Vec<f64>> =
            WEIGHTS.iter().map(|name| (name.to_string(), reference.row(&format!("gradient/{name}"), at))).collect();
        let mut scalars: Vec<(String, f32)> = Vec::new();
        for (group, (share, optimizer, _)) in groups.iter().enumerate() {
            scalars.extend(optimizer.group_inputs(group, step, share * rates[[at]]));
        }
        scalars.extend(average.then(|| ema_inputs(step, 0.8).unwrap()));
        inputs.extend(scalars.into_iter().map(|(name, value)| (name, vec![f64::from(value)])));
        machine.run(&inputs);
        let Some(kept) = KEPT.iter().position(|&k| k == step) else { continue };
        for name in WEIGHTS {
            let expected = reference.row(&format!("optimizer/{case}/{name}"), kept);
            assert_close(&format!("{case}, {name}, step {step}"), &machine.parameter(name), &expected, TOLERANCE);
            if average {
                let expected = reference.row(&format!("ema/{name}"), kept);
                let found = machine.parameter(&format!("{EMA_PREFIX}{name}"));
                assert_close(&format!("average of {name}, step {step}"), &found, &expected, TOLERANCE);
            }
        }
    }
}

/// Every case of the reference with an optimiser for all weights.
fn optimizers() -> Vec<(&'static str, Optimizer)> {
    let default = |name| Optimizer::from_name(name).unwrap();
    let (beta1, beta2, epsilon, weight_decay) = (0.7, 0.6, 1e-3, 0.3);
    let sgd = |momentum, dampening, nesterov| Optimizer::Sgd { momentum, dampening, nesterov, weight_decay: 0.1 };
    vec![
        ("sgd", default("sgd")),
        ("sgd-momentum", sgd(0.9, 0.3, false)),
        ("sgd-nesterov", sgd(0.8, 0.0, true)),
        ("adam", default("adam")),
        ("adam-amsgrad", Optimizer::Adam { beta1, beta2, epsilon, weight_decay, amsgrad: true }),
        ("adamw", default("adamw")),
        ("adamw-amsgrad", Optimizer::AdamW { beta1, beta2, epsilon, weight_decay, amsgrad: true }),
        ("lion", default("lion")),
        ("lion-decay", Optimizer::Lion { beta1: 0.8, beta2: 0.95, weight_decay: 0.2 }),
        ("adafactor", default("adafactor")),
        (
            "adafactor-clip",
            Optimizer::Adafactor { beta2_decay: -0.5, epsilon1: 1e-2, epsilon2: 0.9, clip_threshold: 1.05, weight_decay: 0.2 },
        ),
        ("rmsprop", default("rmsprop")),
        ("rmsprop-centered", Optimizer::RmsProp { alpha: 0.9, epsilon: 1e-3, momentum: 0.7, centered: true, weight_decay: 0.1 }),
        ("adagrad", default("adagrad")),
        (
            "adagrad-decay",
            Optimizer::Adagrad { learning_rate_decay: 0.1, initial_accumulator: 0.5, epsilon: 1e-3, weight_decay: 0.1 },
        ),
    ]
}

#[test]
fn every_optimizer_reaches_the_weights_of_pytorch() {
    let reference = Reference::read();
    for (case, optimizer) in optimizers() {
        check_optimizer(&reference, case, &vec![(1.0, optimizer, WEIGHTS.to_vec())], false);
    }
    let tested = |name: &str| optimizers().iter().any(|(_, optimizer)| optimizer.name() == name);
    assert!(Optimizer::TABLE.iter().all(|(name, _)| tested(name)));
}

#[test]
fn groups_have_their_own_learning_rate_and_weight_decay() {
    let adamw = Optimizer::from_name("adamw").unwrap();
    let groups = vec![
        (1.0, adamw.with_weight_decay(0.2), vec!["kernel"]),
        (0.1, adamw.with_weight_decay(0.0), vec!["matrix"]),
        (1.0, adamw.with_weight_decay(0.4), vec!["vector"]),
    ];
    check_optimizer(&Reference::read(), "adamw-groups", &groups, false);
}

#[test]
fn the_moving_average_is_that_of_pytorch() {
    let groups = vec![(1.0, Optimizer::from_name("sgd").unwrap(), WEIGHTS.to_vec())];
    check_optimizer(&Reference::read(), "sgd", &groups, true);
}

/// The rule of fixtures/loss_scaling.py.
const LOSS_SCALE: LossScale = LossScale { initial: 1024.0, growth: 2.0, growth_interval: 3, backoff: 0.25 };

#[test]
fn every_optimizer_skips_steps_as_under_the_scaler_of_pytorch() {
    let (reference, expected) = (Reference::read(), Reference::open("loss_scaling.npz"));
    let skipped = expected.floats("skipped");
    for (case, optimizer) in optimizers() {
        let mut g = Graph::new();
        let scaling = LossScaling::new(&mut g, LOSS_SCALE).unwrap();
        let start: Vec<Tensor> = WEIGHTS.iter().map(|name| reference.tensor(&format!("weight/{name}"))).collect();
        let (mut ids, mut scaled) = (Vec::new(), Vec::new());
        for (name, tensor) in WEIGHTS.into_iter().zip(&start) {
            let (id, node) = weight(&mut g, name, tensor);
            let slope = g.input(name, tensor.ty().clone()).unwrap();
            let half = g.scale(node, 0.5).unwrap();
            let gradient = g.add(slope, half).unwrap();
            let seed = scaling.seed(&mut g, gradient).unwrap();
            let seed = g.broadcast_to(seed, tensor.shape()).unwrap();
            ids.push(id);
            scaled.push(g.mul(gradient, seed).unwrap());
        }
        let (gradients, finite) = scaling.unscale(&mut g, &scaled).unwrap();
        let step = scaling.step(&mut g).unwrap();
        let pairs: Vec<_> = ids.into_iter().zip(gradients).collect();
        optimizer.apply_counted(&mut g, 0, &pairs, step).unwrap();
        scaling.guard(&mut g, 0, finite).unwrap();
        let state = LOSS_SCALE.initial_state().map(|(name, value)| (name, Tensor::scalar_f32(value)));
        let values = WEIGHTS.into_iter().zip(&start).chain(state.iter().map(|(name, value)| (*name, value)));
        let mut machine = Machine::new(g, &values.collect::<Vec<_>>());

        let rates = reference.floats("learning_rates");
        for step in 1..=STEPS {
            let at = step as usize - 1;
            let mut inputs: HashMap<String, Vec<f64>> =
                WEIGHTS.iter().map(|name| (name.to_string(), reference.row(&format!("gradient/{name}"), at))).collect();
            let skips = skipped.iter().position(|&s| s == step as f64);
            if let (Some(position), Some(vector)) = (skips, inputs.get_mut("vector")) {
                vector[0] = [f64::INFINITY, f64::NAN][position % 2];
            }
            let before = machine.parameters.clone();
            let (name, rate) = Optimizer::counted_input(0, rates[[at]]);
            inputs.insert(name, vec![f64::from(rate)]);
            machine.run(&inputs);
            let (scale, streak) = (machine.parameter("optimizer/loss_scale"), machine.parameter("optimizer/loss_scale_streak"));
            assert_eq!(
                (scale[0], streak[0]),
                (expected.floats("scale")[[at]], expected.floats("streak")[[at]]),
                "{case}, step {step}"
            );
            if skips.is_some() {
                let moved = ["optimizer/loss_scale", "optimizer/loss_scale_streak"];
                for (index, info) in
                    machine.graph.parameters().iter().enumerate().filter(|(_, p)| !moved.contains(&p.name.as_str()))
                {
                    assert_eq!(machine.parameters[index], before[index], "{case}, skipped step {step}: {}", info.name);
                }
            }
            let Some(kept) = [2, 8, 20].iter().position(|&k| k == step) else { continue };
            for name in WEIGHTS {
                let expected = expected.row(&format!("optimizer/{case}/{name}"), kept);
                assert_close(&format!("{case}, {name}, step {step}"), &machine.parameter(name), &expected, TOLERANCE);
            }
        }
    }
}

/// Every case of the reference.
fn losses() -> Vec<(&'static str, Loss)> {
    let weights: Arc<[f64]> = Arc::from([0.5, 2.0, 0.25, 1.0, 1.5]);
    let ce = |label_smoothing, ignored: Option<i64>, weighted: bool| Loss::CrossEntropy {
        label_smoothing,
        ignore_index: ignored.or(Some(-100)),
        class_weights: weighted.then(|| weights.clone()),
    };
    vec![
        ("indices", ce(0.0, None, false)),
        ("indices-ignore", ce(0.0, Some(2), false)),
        ("indices-smooth", ce(0.1, None, false)),
        ("indices-weights", ce(0.0, None, true)),
        ("indices-smooth-ignore", ce(0.1, Some(2), false)),
        ("indices-weights-ignore", ce(0.0, Some(2), true)),
        ("indices-weights-smooth", ce(0.2, None, true)),
        ("indices-all", ce(0.2, Some(2), true)),
        ("image-all", ce(0.3, Some(1), true)),
        ("probabilities", ce(0.0, None, false)),
        ("probabilities-smooth", ce(0.1, None, false)),
        ("probabilities-weights", ce(0.0, None, true)),
        ("probabilities-all", ce(0.2, None, true)),
        ("mse", Loss::Mse),
        ("l1", Loss::L1),
        ("huber", Loss::Huber { delta: 0.7 }),
        ("smooth-l1", Loss::SmoothL1 { beta: 0.4 }),
        ("smooth-l1-zero", Loss::SmoothL1 { beta: 0.0 }),
        ("bce", Loss::BceWithLogits { pos_weight: None }),
        ("bce-weights", Loss::BceWithLogits { pos_weight: Some(weights.clone()) }),
        ("bce-weight", Loss::BceWithLogits { pos_weight: Some(Arc::from([2.0])) }),
        ("kl", Loss::Kl),
    ]
}

#[test]
fn every_loss_falls_as_in_pytorch() {
    let reference = Reference::read();
    let sgd = Optimizer::from_name("sgd").unwrap();
    for (case, loss) in losses() {
        let array = |part: &str| reference.tensor(&format!("loss/{case}/{part}"));
        let prediction = array("prediction");
        let mut g = Graph::new();
        let (id, x) = weight(&mut g, "prediction", &prediction);
        let target = g.constant(array("target")).unwrap();
        let value = loss.build(&mut g, x, Some(target)).unwrap();
        let dx = gradients(&mut g, value, &[x]).unwrap()[0];
        sgd.apply(&mut g, &[(id, dx)]).unwrap();
        g.output("loss", value).unwrap();
        let mut machine = Machine::new(g, &[("prediction", &prediction)]);
        let values: Vec<f64> = (1..=STEPS)
            .map(|step| {
                let scalars = sgd.step_inputs(step, 0.5).into_iter().map(|(name, value)| (name, vec![f64::from(value)]));
                machine.run(&scalars.collect())[0][0]
            })
            .collect();
        assert_close(&format!("{case}: losses"), &values, &array("values").to_f64_vec(), TOLERANCE);
        assert_close(&format!("{case}: prediction"), &machine.parameter("prediction"), &array("trained").to_f64_vec(), TOLERANCE);
    }
    let tested = |name: &str| name == "output" || losses().iter().any(|(_, loss)| loss.name() == name);
    assert!(Loss::TABLE.iter().all(|(name, _)| tested(name)));
}

/// A linear model of `rows` samples with a squared error; the weight `w` and what accumulates.
fn regression(rows: usize, start: &Tensor) -> (Graph, ParameterId, NodeId, NodeId) {
    let mut g = Graph::new();
    let (id, w) = weight(&mut g, "w", start);
    let x = g.input("x", TensorType::new(DType::F64, [rows, 3])).unwrap();
    let target = g.input("target", TensorType::new(DType::F64, [rows])).unwrap();
    let repeated = g.broadcast_to(w, &meganeura_ir::Shape::from([rows, 3])).unwrap();
    let product = g.mul(x, repeated).unwrap();
    let prediction = g.reduce(meganeura_ir::ReduceOp::Sum, product, &[1]).unwrap();
    let loss = Loss::Mse.build(&mut g, prediction, Some(target)).unwrap();
    let dw = gradients(&mut g, loss, &[w]).unwrap()[0];
    (g, id, loss, dw)
}

#[test]
fn micro_batches_train_as_their_large_batch() {
    const MICRO: usize = 3;
    let start = Tensor::from_f64(DType::F64, [3], &[0.5, -1.0, 2.0]);
    let adam = Optimizer::from_name("adam").unwrap();

    let (mut g, id, loss, dw) = regression(2 * MICRO, &start);
    adam.apply(&mut g, &[(id, dw)]).unwrap();
    g.output("loss", loss).unwrap();
    let mut large = Machine::new(g, &[("w", &start)]);

    let (mut g, id, loss, dw) = regression(2, &start);
    let accumulation = Accumulation::new(&mut g, loss, &[(id, dw)], MICRO).unwrap();
    adam.apply(&mut g, &[(id, accumulation.gradients()[0])]).unwrap();
    let mut first = g.clone();
    first.clear_updates();
    accumulation.keep(&mut first).unwrap();
    accumulation.reset(&mut g).unwrap();
    g.output("loss", accumulation.loss()).unwrap();
    let (mut last, mut first) = (Machine::new(g, &[("w", &start)]), Machine::new(first, &[("w", &start)]));

    for step in 1..=STEPS {
        let value = |i: usize| ((i as f64 + 1.0) * (step as f64 + 0.3)).sin();
        let x: Vec<f64> = (0..6 * MICRO).map(value).collect();
        let target: Vec<f64> = (0..2 * MICRO).map(|i| value(i + 31)).collect();
        let inputs = |x: &[f64], target: &[f64]| {
            let scalars = adam.step_inputs(step, 0.1).into_iter().map(|(name, value)| (name, vec![f64::from(value)]));
            scalars.chain([("x".to_string(), x.to_vec()), ("target".to_string(), target.to_vec())]).collect()
        };
        let expected = large.run(&inputs(&x, &target));
        let mut found = Vec::new();
        for (micro, (x, target)) in x.chunks(6).zip(target.chunks(2)).enumerate() {
            let machine = if micro + 1 < MICRO { &mut first } else { &mut last };
            found = machine.run(&inputs(x, target));
            (first.parameters, last.parameters) = match micro + 1 < MICRO {
                true => (first.parameters.clone(), first.parameters),
                false => (last.parameters.clone(), last.parameters),
            };
        }
        assert_close("loss", &found[0], &expected[0], 1e-12);
        assert_close("weight", &last.parameter("w"), &large.parameter("w"), 1e-9);
    }
}
