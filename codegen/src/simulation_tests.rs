//! Runs kernels on the host, for tests of what no device of the build machine has: all invocations of a workgroup take each statement
//! together, so what differs between invocations is seen, and races are not.

use std::collections::HashMap;

use meganeura_ir::{BinaryOp, CompareOp, UnaryOp};

use crate::body::{Body, Builtin, Elements, Expr, ExprId, Literal, MATRIX, MatrixPlace, MatrixStmt, Role, Scalar, SlotId, Stmt};
use crate::index::VarId;
use crate::kernels::Emitted;

/// Invocations of a subgroup.
const SUBGROUP: usize = 32;

type Lane = [u32; 4];
type Matrix = Vec<f32>;

struct Workgroup<'a> {
    body: &'a Body,
    bindings: &'a [usize],
    buffers: &'a mut [Vec<u32>],
    /// Per invocation; scalars lie in the first word.
    values: HashMap<ExprId, Vec<Lane>>,
    slots: HashMap<SlotId, Vec<u32>>,
    vars: HashMap<VarId, Vec<i32>>,
    shared: HashMap<SlotId, Vec<u32>>,
    /// Per subgroup.
    matrices: HashMap<SlotId, Vec<Matrix>>,
    left: Vec<bool>,
}

/// Runs the kernel on the words of its buffers.
pub fn run(kernel: &Emitted, buffers: &mut [Vec<u32>]) {
    for part in kernel.parts.iter() {
        let lanes = part.body.workgroup_size.iter().product::<u32>() as usize;
        for number in 0..part.workgroups as usize {
            let mut workgroup = Workgroup {
                body: &part.body,
                bindings: &part.bindings,
                buffers: &mut *buffers,
                values: HashMap::new(),
                slots: HashMap::new(),
                vars: HashMap::new(),
                // Not zero: workgroup memory begins with anything.
                shared: part.body.shared.iter().map(|s| (s.slot, vec![0x7fc0_1234; s.length as usize])).collect(),
                matrices: HashMap::new(),
                left: vec![false; lanes],
            };
            for &(var, builtin) in &part.body.builtins {
                let of = |lane: usize| match builtin {
                    Builtin::GlobalLinear { .. } => number * lanes + lane,
                    Builtin::GroupLinear { .. } => number,
                    Builtin::Local => lane,
                };
                workgroup.vars.insert(var, (0..lanes).map(|lane| of(lane) as i32).collect());
            }
            workgroup.stmts(&part.body.stmts, &vec![true; lanes]);
        }
    }
}

impl Workgroup<'_> {
    fn stmts(&mut self, stmts: &[Stmt], mask: &[bool]) {
        for stmt in stmts {
            let active: Vec<usize> = (0..mask.len()).filter(|&lane| mask[lane] && !self.left[lane]).collect();
            self.stmt(stmt, mask, &active);
        }
    }

    fn stmt(&mut self, stmt: &Stmt, mask: &[bool], active: &[usize]) {
        match stmt {
            Stmt::Let(e) => self.define(*e, active),
            Stmt::Declare { slot, value } | Stmt::Assign { slot, value } => {
                for &lane in active {
                    let value = self.word(*value, lane);
                    self.slots.entry(*slot).or_insert_with(|| vec![0; mask.len()])[lane] = value;
                }
            }
            Stmt::For { var, start, end, step, body } => {
                self.vars.insert(*var, (0..mask.len()).map(|_| 0).collect());
                for &lane in active {
                    let start = self.word(*start, lane) as i32;
                    self.set_var(*var, lane, start);
                }
                loop {
                    let inside: Vec<bool> =
                        (0..mask.len()).map(|lane| active.contains(&lane) && self.vars[var][lane] < *end).collect();
                    if !inside.contains(&true) {
                        break;
                    }
                    self.stmts(body, &inside);
                    (0..mask.len()).filter(|&lane| inside[lane]).for_each(|lane| {
                        let next = self.vars[var][lane] + step;
                        self.set_var(*var, lane, next);
                    });
                }
            }
            Stmt::If { condition, body } => {
                let holds: Vec<bool> =
                    (0..mask.len()).map(|lane| active.contains(&lane) && self.word(*condition, lane) != 0).collect();
                if holds.contains(&true) {
                    self.stmts(body, &holds);
                }
            }
            Stmt::Store { buffer, index, value } => {
                for &lane in active {
                    let (index, value) = (self.word(*index, lane) as usize, self.word(*value, lane));
                    self.buffers[self.bindings[*buffer]][index] = value;
                }
            }
            Stmt::StoreShared { array, index, value } => {
                for &lane in active {
                    let (index, value) = (self.word(*index, lane) as usize, self.word(*value, lane));
                    self.shared.get_mut(array).unwrap()[index] = value;
                }
            }
            Stmt::StoreSharedVector { array, index, values } => {
                for &lane in active {
                    let index = self.word(*index, lane) as usize;
                    for (i, value) in values.iter().enumerate() {
                        let value = self.word(*value, lane);
                        self.shared.get_mut(array).unwrap()[4 * index + i] = value;
                    }
                }
            }
            Stmt::AtomicMax { array, index, value } => {
                for &lane in active {
                    let (index, value) = (self.word(*index, lane) as usize, self.word(*value, lane));
                    let place = &mut self.shared.get_mut(array).unwrap()[index];
                    *place = (*place).max(value);
                }
            }
            Stmt::Matrix(stmt) => self.matrix(stmt, active),
            Stmt::Barrier => assert!(mask.iter().all(|&m| m), "barriers are for all"),
            Stmt::Return => active.iter().for_each(|&lane| self.left[lane] = true),
        }
    }

    fn set_var(&mut self, var: VarId, lane: usize, value: i32) {
        self.vars.get_mut(&var).unwrap()[lane] = value;
    }

    /// The subgroups that are active, each with its first invocation.
    fn subgroups(&self, active: &[usize]) -> Vec<(usize, usize)> {
        let count = self.left.len() / SUBGROUP;
        let all = (0..count).map(|s| (s, s * SUBGROUP)).filter(|(_, first)| active.contains(first)).collect::<Vec<_>>();
        assert_eq!(all.len() * SUBGROUP, active.len(), "subgroups act as one");
        all
    }

    /// The words of a matrix in workgroup memory.
    fn cells(&self, place: &MatrixPlace, first: usize) -> Vec<usize> {
        let vectors = self.body.shared.iter().any(|s| s.slot == place.array && s.elements == Elements::Vectors);
        let unit = if vectors { 4 } else { 1 };
        let start = self.word(place.first, first) as usize * unit;
        (first..first + SUBGROUP).for_each(|lane| assert_eq!(self.word(place.first, lane) as usize * unit, start));
        let pitch = place.pitch as usize * unit;
        let at = |row: usize, column: usize| if place.transposed { column * pitch + row } else { row * pitch + column };
        (0..MATRIX * MATRIX).map(|i| start + at(i / MATRIX, i % MATRIX)).collect()
    }

    fn matrix(&mut self, stmt: &MatrixStmt, active: &[usize]) {
        for (subgroup, first) in self.subgroups(active) {
            match stmt {
                MatrixStmt::Load { slot, place, role } => {
                    let cells = self.cells(place, first);
                    assert_eq!(self.body.slots[place.array.0 as usize] == Scalar::F16, *role != Role::C);
                    let matrix = cells.iter().map(|&cell| f32::from_bits(self.shared[&place.array][cell])).collect();
                    let count = self.left.len() / SUBGROUP;
                    self.matrices.entry(*slot).or_insert_with(|| vec![Vec::new(); count])[subgroup] = matrix;
                }
                MatrixStmt::MultiplyAdd { a, b, c } => {
                    let (x, y) = (self.matrices[a][subgroup].clone(), self.matrices[b][subgroup].clone());
                    let sums = &mut self.matrices.get_mut(c).unwrap()[subgroup];
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum += (0..MATRIX).map(|k| x[i / MATRIX * MATRIX + k] * y[k * MATRIX + i % MATRIX]).sum::<f32>();
                    }
                }
                MatrixStmt::Scale { c, factor } => {
                    let factor = f32::from_bits(self.word(*factor, first));
                    self.matrices.get_mut(c).unwrap()[subgroup].iter_mut().for_each(|x| *x *= factor);
                }
                MatrixStmt::Store { c, place } => {
                    let cells = self.cells(place, first);
                    let matrix = self.matrices[c][subgroup].clone();
                    let shared = self.shared.get_mut(&place.array).unwrap();
                    cells.iter().zip(matrix).for_each(|(&cell, value)| shared[cell] = value.to_bits());
                }
            }
        }
    }

    fn lane(&self, e: ExprId, lane: usize) -> Lane {
        if let Expr::Literal(literal) = self.body.exprs[e.0 as usize].0 {
            return [
                match literal {
                    Literal::F32(bits) | Literal::U32(bits) => bits,
                    Literal::I32(value) => value as u32,
                    Literal::Bool(value) => value.into(),
                },
                0,
                0,
                0,
            ];
        }
        self.values[&e][lane]
    }

    fn word(&self, e: ExprId, lane: usize) -> u32 {
        self.lane(e, lane)[0]
    }

    fn define(&mut self, e: ExprId, active: &[usize]) {
        let expr = self.body.exprs[e.0 as usize].0.clone();
        for &lane in active {
            let value = self.value(&expr, lane);
            let count = self.left.len();
            self.values.entry(e).or_insert_with(|| vec![[0; 4]; count])[lane] = value;
        }
    }

    fn value(&self, expr: &Expr, lane: usize) -> Lane {
        let word = |e: ExprId| self.word(e, lane);
        let float = |e: ExprId| f32::from_bits(word(e));
        let kind = |e: ExprId| self.body.exprs[e.0 as usize].1;
        let one = |word: u32| [word, 0, 0, 0];
        match *expr {
            Expr::Literal(_) => unreachable!("literals are not defined"),
            Expr::Var(var) => one(self.vars[&var][lane] as u32),
            Expr::Unary(op, x) => one(match (op, kind(x)) {
                (UnaryOp::Not, Scalar::Bool) => u32::from(word(x) == 0),
                (op, Scalar::F32) => unary_f32(op, float(x)).to_bits(),
                other => unknown(other),
            }),
            Expr::Binary(op, a, b) => one(match kind(a) {
                Scalar::F32 => binary_f32(op, float(a), float(b)).to_bits(),
                Scalar::I32 => binary_i32(op, word(a) as i32, word(b) as i32) as u32,
                Scalar::U32 | Scalar::Bool => binary_u32(op, word(a), word(b)),
                Scalar::F16 => unknown(op),
            }),
            Expr::Compare(op, a, b) => {
                let ordering = match kind(a) {
                    Scalar::F32 => float(a).partial_cmp(&float(b)),
                    Scalar::I32 => Some((word(a) as i32).cmp(&(word(b) as i32))),
                    _ => Some(word(a).cmp(&word(b))),
                };
                one(u32::from(match op {
                    CompareOp::Eq => ordering.is_some_and(|o| o.is_eq()),
                    CompareOp::Ne => !ordering.is_some_and(|o| o.is_eq()),
                    CompareOp::Lt => ordering.is_some_and(|o| o.is_lt()),
                    CompareOp::Le => ordering.is_some_and(|o| o.is_le()),
                    CompareOp::Gt => ordering.is_some_and(|o| o.is_gt()),
                    CompareOp::Ge => ordering.is_some_and(|o| o.is_ge()),
                }))
            }
            Expr::Select(condition, a, b) => one(if word(condition) != 0 { word(a) } else { word(b) }),
            Expr::Convert(to, x) => one(match (kind(x), to) {
                (Scalar::F32, Scalar::F16) => round_f16(float(x)).to_bits(),
                (Scalar::F16, Scalar::F32) => word(x),
                (Scalar::I32, Scalar::F32) => (word(x) as i32 as f32).to_bits(),
                (Scalar::U32, Scalar::F32) => (word(x) as f32).to_bits(),
                (Scalar::I32, Scalar::U32) | (Scalar::U32, Scalar::I32) => word(x),
                other => unknown(other),
            }),
            Expr::IndexDiv(x, c) => one(word(x) / c as u32),
            Expr::IndexMod(x, c) => one(word(x) % c as u32),
            Expr::Load { buffer, index } => one(self.buffers[self.bindings[buffer]][word(index) as usize]),
            Expr::LoadVector { buffer, index } => {
                let start = 4 * word(index) as usize;
                [0, 1, 2, 3].map(|i| self.buffers[self.bindings[buffer]][start + i])
            }
            Expr::LoadShared { array, index } => one(self.shared[&array][word(index) as usize]),
            Expr::LoadSharedVector { array, index } => {
                let start = 4 * word(index) as usize;
                [0, 1, 2, 3].map(|i| self.shared[&array][start + i])
            }
            Expr::Component(vector, i) => one(self.lane(vector, lane)[usize::from(i)]),
            Expr::Read(slot) => one(self.slots[&slot][lane]),
            Expr::MulAdd(a, b, c) => one(float(a).mul_add(float(b), float(c)).to_bits()),
            Expr::MaxMagnitude(a, b) => one(float(a).max(float(b).abs()).to_bits()),
            Expr::Bitcast(_, x) => one(word(x)),
            Expr::Quantize(..) | Expr::RandomUniform { .. } => unknown(expr),
        }
    }
}

/// What no kernel of these tests has.
fn unknown(what: impl std::fmt::Debug) -> ! {
    panic!("{what:?} is not simulated")
}

fn unary_f32(op: UnaryOp, x: f32) -> f32 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Reciprocal => 1.0 / x,
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        op => unknown(op),
    }
}

fn binary_f32(op: BinaryOp, a: f32, b: f32) -> f32 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Max | BinaryOp::Min if a.is_nan() || b.is_nan() => f32::NAN,
        BinaryOp::Max => a.max(b),
        BinaryOp::Min => a.min(b),
        op => unknown(op),
    }
}

fn binary_i32(op: BinaryOp, a: i32, b: i32) -> i32 {
    match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Div => a / b,
        BinaryOp::Rem => a % b,
        BinaryOp::Max => a.max(b),
        BinaryOp::Min => a.min(b),
        op => unknown(op),
    }
}

fn binary_u32(op: BinaryOp, a: u32, b: u32) -> u32 {
    match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::And => a & b,
        BinaryOp::Or => a | b,
        BinaryOp::Max => a.max(b),
        BinaryOp::Min => a.min(b),
        op => unknown(op),
    }
}

fn round_f16(x: f32) -> f32 {
    half::f16::from_f32(x).to_f32()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use meganeura_ir::interpreter::{Environment, interpret};
    use meganeura_ir::testing::{contraction_graphs, random_tensor, relative_l2};
    use meganeura_ir::{DType, DotDims, Graph, Op, Shape, Tensor, TensorType, WindowDims};

    use super::*;
    use crate::fuse::fuse;
    use crate::kernels::contract::{MATRIX_TILINGS, ONLY_MATRIX_TILING};
    use crate::kernels::{Bound, emit_launch};
    use crate::order::Launch;
    use crate::{DeviceProfile, MatrixUnit};

    fn profile() -> DeviceProfile {
        DeviceProfile {
            max_workgroup_bytes: 48 << 10,
            max_workgroup_invocations: 1024,
            matrix_unit: Some(MatrixUnit { subgroup: SUBGROUP as u32 }),
            ..DeviceProfile::generic()
        }
    }

    /// Each tiling on matrix units, and a profile under which contractions that can take it do.
    fn tilings() -> impl Iterator<Item = (usize, DeviceProfile)> {
        (0..MATRIX_TILINGS.len()).map(|tiling| {
            ONLY_MATRIX_TILING.set(Some(tiling));
            (tiling, profile())
        })
    }

    /// Runs a graph of one kernel; whether it used matrices, and its outputs.
    fn simulated(g: &Graph, inputs: &[Tensor], profile: &DeviceProfile) -> Option<(bool, Vec<Vec<f32>>)> {
        let groups = fuse(g, profile);
        if groups.len() > 1 {
            return None;
        }
        let kernel = emit_launch(g, &Launch { groups, level: 0 }, &BTreeMap::new(), profile);
        let words = |t: &Tensor| t.to_f32_vec().iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let input = |node| g.ids().filter(|&id| matches!(g.node(id).op, Op::Input(_))).position(|id| id == node);
        let mut buffers: Vec<Vec<u32>> = kernel
            .bound
            .iter()
            .map(|bound| match *bound {
                Bound::Read(node) => words(&inputs[input(node).expect("kernels read inputs")]),
                other => vec![0; g.ty(other.node()).shape.numel()],
            })
            .collect();
        run(&kernel, &mut buffers);
        let found = |node| kernel.bound.iter().position(|bound| !matches!(bound, Bound::Read(_)) && bound.node() == node);
        let outputs = g.outputs().iter().map(|o| {
            let buffer = &buffers[found(o.node).expect("outputs are stored")];
            buffer.iter().map(|&word| f32::from_bits(word)).collect()
        });
        let matrices = |body: &Body| body.shared.iter().any(|s| body.slots[s.slot.0 as usize] == Scalar::F16);
        Some((kernel.parts.iter().any(|part| matrices(&part.body)), outputs.collect()))
    }

    /// Compares what `made` makes of every contraction of f32 with the interpreter, with each tiling on matrix units.
    fn check_on_matrices(made: impl Fn(&Graph) -> Graph, tolerance: f64) {
        let mut on_matrices = 0;
        for (name, graph) in contraction_graphs() {
            if graph.inputs().iter().any(|input| input.ty.dtype != DType::F32) {
                continue;
            }
            let graph = made(&graph);
            let inputs: Vec<Tensor> = graph.inputs().iter().zip(1..).map(|(info, seed)| random_tensor(&info.ty, seed)).collect();
            let expected = interpret(&graph, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
            for (tiling, profile) in tilings() {
                let Some((matrices, found)) = simulated(&graph, &inputs, &profile) else { continue };
                on_matrices += usize::from(matrices);
                for (found, expected) in found.iter().zip(expected.outputs()) {
                    let found: Vec<f64> = found.iter().map(|&x| x.into()).collect();
                    let error = relative_l2(&found, &expected.to_f64_vec());
                    assert!(error <= if matrices { tolerance } else { 2e-6 }, "{name}, tiling {tiling}: {error:e}");
                }
            }
        }
        assert!(on_matrices >= 40, "{on_matrices}");
    }

    #[test]
    fn contractions_on_matrix_units_agree_with_the_interpreter() {
        check_on_matrices(Graph::clone, 1e-3);
    }

    #[test]
    fn operands_of_f16_are_multiplied_as_they_are() {
        check_on_matrices(of_halves, 2e-6);
    }

    /// The graph over inputs of f16, which become f32 at once.
    fn of_halves(graph: &Graph) -> Graph {
        let mut g = Graph::new();
        let mut nodes = Vec::new();
        for id in graph.ids() {
            let node = graph.node(id);
            nodes.push(match &node.op {
                Op::Input(input) => {
                    let info = &graph.inputs()[input.0 as usize];
                    let half = g.input(info.name.clone(), TensorType::new(DType::F16, info.ty.shape.clone())).unwrap();
                    g.cast(half, DType::F32).unwrap()
                }
                op => g.push(op.clone(), &node.operands.iter().map(|o| nodes[o.index()]).collect::<Vec<_>>()).unwrap(),
            });
        }
        for output in graph.outputs() {
            g.output(output.name.clone(), nodes[output.node.index()]).unwrap();
        }
        g
    }

    #[test]
    fn what_a_large_map_computes_once_stands_before_its_turns() {
        let count = 2048 * 2 + 1;
        let mut g = Graph::new();
        let (x, y) = (g.input("x", TensorType::new(DType::F32, [1, 3])).unwrap(), g.input("y", f32s(count)).unwrap());
        let window = WindowDims { size: vec![3], stride: vec![1], dilation: vec![1], pads: vec![(1, 1)] };
        let one = g.push(Op::Fold { window, sizes: vec![1] }, &[x]).unwrap();
        let one = g.reshape(one, Shape::scalar()).unwrap();
        let one = g.broadcast_to(one, &[count].into()).unwrap();
        let sum = g.add(one, y).unwrap();
        g.output("sum", sum).unwrap();
        let inputs = [random_tensor(&TensorType::new(DType::F32, [1, 3]), 1), random_tensor(&f32s(count), 2)];
        let expected = interpret(&g, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
        let (_, found) = simulated(&g, &inputs, &DeviceProfile { compute_units: 1, ..DeviceProfile::generic() }).unwrap();
        let found: Vec<f64> = found[0].iter().map(|&x| x.into()).collect();
        assert!(relative_l2(&found, &expected.outputs()[0].to_f64_vec()) <= 1e-6);
    }

    fn f32s(count: usize) -> TensorType {
        TensorType::new(DType::F32, [count])
    }

    #[test]
    fn an_invocation_maps_several_elements_where_there_are_many() {
        for count in [2048 * 3, 2048 * 3 - 1, 2048 * 40 + 5, 100] {
            let mut g = Graph::new();
            let x = g.input("x", f32s(count)).unwrap();
            let y = g.mul(x, x).unwrap();
            g.output("y", y).unwrap();
            let input = random_tensor(&f32s(count), 1);
            let small = DeviceProfile { compute_units: 1, ..DeviceProfile::generic() };
            let (_, found) = simulated(&g, std::slice::from_ref(&input), &small).unwrap();
            let expected: Vec<f32> = input.to_f32_vec().iter().map(|x| x * x).collect();
            assert_eq!(found[0], expected, "{count}");
        }
    }

    /// `x @ y` of sizes `m x k` and `k x n`, whose elements are scaled by functions of their position.
    fn product([m, n, k]: [usize; 3], x: impl Fn(usize, usize) -> f32, y: impl Fn(usize, usize) -> f32) -> (Vec<f64>, Vec<f32>) {
        let mut g = Graph::new();
        let ty = |shape: [usize; 2]| TensorType::new(DType::F32, shape);
        let (a, b) = (g.input("x", ty([m, k])).unwrap(), g.input("y", ty([k, n])).unwrap());
        let dims = DotDims { lhs_contract: vec![1], rhs_contract: vec![0], ..DotDims::default() };
        let product = g.push(Op::Dot(dims), &[a, b]).unwrap();
        g.output("z", product).unwrap();
        let scaled = |shape: [usize; 2], seed, by: &dyn Fn(usize, usize) -> f32| {
            let values = random_tensor(&ty(shape), seed).to_f32_vec();
            let values: Vec<f32> = values.iter().enumerate().map(|(i, v)| v * by(i / shape[1], i % shape[1])).collect();
            Tensor::from_f32(shape, &values)
        };
        let inputs = [scaled([m, k], 1, &x), scaled([k, n], 2, &y)];
        let expected = interpret(&g, &Environment::<f64>::from_tensors(&inputs, [])).unwrap();
        ONLY_MATRIX_TILING.set(Some(MATRIX_TILINGS.len() - 1));
        let (matrices, found) = simulated(&g, &inputs, &profile()).expect("one kernel");
        assert!(matrices);
        (expected.outputs()[0].to_f64_vec(), found.into_iter().next().unwrap())
    }

    const SIZES: [usize; 3] = [40, 72, 200];

    #[test]
    fn magnitudes_that_f16_cannot_hold_survive() {
        type Scale = fn(usize, usize) -> f32;
        let one: Scale = |_, _| 1.0;
        let cases: [(&str, Scale, Scale); 7] = [
            ("small", |_, _| 1e-22, |_, _| 1e-12),
            ("large", |_, _| 1e18, |_, _| 1e15),
            ("zero at first", |_, k| if k < 150 { 0.0 } else { 1e-9 }, one),
            ("growing", |_, k| if k < 64 { 1e-20 } else { 1e10 }, one),
            ("growing and shrinking", |_, k| 10f32.powf(k as f32 / 20.0), |k, _| 10f32.powf(-(k as f32) / 20.0)),
            ("all zero", |_, _| 0.0, one),
            ("subnormal", |_, _| 1e-41, |_, _| 1e30),
        ];
        for (name, x, y) in cases {
            let (expected, found) = product(SIZES, x, y);
            let found: Vec<f64> = found.iter().map(|&x| x.into()).collect();
            let error = if expected.iter().all(|&x| x == 0.0) { found[0] } else { relative_l2(&found, &expected) };
            assert!(error <= 2e-3, "{name}: {error:e}");
        }
    }

    #[test]
    fn values_that_are_not_finite_stay_in_their_row() {
        let (expected, found) = product(SIZES, |m, k| if (m, k) == (7, 130) { f32::INFINITY } else { 1e-9 }, |_, _| 1.0);
        let rows = found.chunks(SIZES[1]).zip(expected.chunks(SIZES[1]));
        for (m, (found, expected)) in rows.enumerate() {
            if m == 7 {
                assert!(found.iter().all(|x| !x.is_finite()), "{found:?}");
            } else {
                let found: Vec<f64> = found.iter().map(|&x| x.into()).collect();
                assert!(relative_l2(&found, expected) <= 1e-3);
            }
        }
    }
}
