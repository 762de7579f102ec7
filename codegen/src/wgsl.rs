//! Prints a [`Body`] as WGSL.

mod printer;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

use meganeura_shaders::HELPERS;

use self::printer::Printer;
use crate::body::{Body, Buffer, Builtin, Elements, ExprId, MatrixStmt, Scalar, SlotId, Stmt, operands};

/// A body in a kernel, which may have several.
#[derive(Clone, Debug)]
pub struct Part {
    pub body: Body,
    /// The kernel's binding of each buffer of the body.
    pub bindings: Vec<usize>,
    /// The workgroups that run it.
    pub workgroups: u32,
}

/// The WGSL source of a kernel with entry point `main`: the parts, of one workgroup size, divide the workgroups of a grid of `grid` among
/// themselves in order. `buffers` are the bindings.
pub fn print(parts: &[Part], buffers: &[Buffer], grid: [u32; 3]) -> String {
    let mut helpers = BTreeSet::new();
    let mut arrays = Arrays::default();
    let mut text = String::new();
    let (mut first, several) = (0, parts.len() > 1);
    for part in parts {
        let depth = if several { 2 } else { 1 };
        let (body, needed) = Printer::new(part, buffers, arrays.name(&part.body)).print(depth);
        if several {
            let otherwise = if first == 0 { "    " } else { " else " };
            let _ = writeln!(text, "{otherwise}if number < {}u {{", first + part.workgroups);
        }
        let indent = "    ".repeat(depth);
        for (_, builtin) in &part.body.builtins {
            let number = match (several, first, *builtin) {
                (
                    false,
                    _,
                    Builtin::GlobalLinear { workgroups_x, workgroups_y } | Builtin::GroupLinear { workgroups_x, workgroups_y },
                ) => linear(workgroups_x, workgroups_y),
                (true, 0, _) | (false, _, Builtin::Local) => "number".to_string(),
                (true, ..) => format!("number - {first}u"),
            };
            let value = match *builtin {
                Builtin::GlobalLinear { .. } => {
                    let number = if number.contains(' ') { format!("({number})") } else { number };
                    format!("i32({number} * {}u + lane)", part.body.workgroup_size.iter().product::<u32>())
                }
                Builtin::GroupLinear { .. } => format!("i32({number})"),
                Builtin::Local => "i32(lane)".to_string(),
            };
            let _ = writeln!(text, "{indent}let {} = {value};", builtin_name(*builtin));
        }
        text.push_str(&body);
        if several {
            text.push_str("    }");
        }
        helpers.extend(needed);
        first += part.workgroups;
    }
    if several {
        text.push('\n');
    }
    let mut source = String::new();
    let scalars = buffers.iter().map(|buffer| buffer.scalar).chain(arrays.0.iter().map(|array| array.scalar));
    let matrices = parts.iter().any(|part| uses_matrices(&part.body.stmts));
    if scalars.clone().any(|scalar| scalar == Scalar::F16) {
        source.push_str("enable f16;\n");
    }
    if matrices {
        source.push_str("enable wgpu_cooperative_matrix;\n");
    }
    if !source.is_empty() {
        source.push('\n');
    }
    for (position, helper) in HELPERS.iter().enumerate() {
        if helpers.contains(&position) {
            source.push_str(helper.source);
            source.push('\n');
        }
    }
    for (i, buffer) in buffers.iter().enumerate() {
        let access = if buffer.writable { "read_write" } else { "read" };
        let element = scalar_name(stored(buffer.scalar));
        let element = if buffer.vectors { format!("vec4<{element}>") } else { element.to_string() };
        let _ = writeln!(source, "@group(0) @binding({i}) var<storage, {access}> b{i}: array<{element}>;");
    }
    for (i, array) in arrays.0.iter().enumerate() {
        let element = scalar_name(array.scalar);
        let (element, length) = match array.elements {
            Elements::Scalars => (element.to_string(), array.length),
            Elements::Vectors => (format!("vec4<{element}>"), array.length / 4),
            Elements::Atomics => (format!("atomic<{element}>"), array.length),
        };
        let _ = writeln!(source, "var<workgroup> w{i}: array<{element}, {length}>;");
    }
    let [x, y, z] = parts.first().map_or([1; 3], |part| part.body.workgroup_size);
    let _ = writeln!(
        source,
        "\n@compute @workgroup_size({x}, {y}, {z})\nfn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{"
    );
    if several {
        let _ = writeln!(source, "    let number = {};", linear(grid[0], grid[1]));
    }
    source.push_str(&text);
    source.push_str("}\n");
    source
}

fn uses_matrices(stmts: &[Stmt]) -> bool {
    stmts.iter().any(|stmt| match stmt {
        Stmt::Matrix(_) => true,
        Stmt::For { body, .. } | Stmt::If { body, .. } => uses_matrices(body),
        _ => false,
    })
}

/// The number of a workgroup in its grid.
fn linear(workgroups_x: u32, workgroups_y: u32) -> String {
    match (workgroups_x, workgroups_y) {
        (x, 1) if x != 65535 => "group.x".to_string(),
        (x, y) => format!("(group.z * {y}u + group.y) * {x}u + group.x"),
    }
}

/// Bytes of which each workgroup array has a multiple. Drivers lay arrays out one after another, and read matrices from multiples of this
/// only.
const ARRAY_ALIGNMENT: u32 = 16;

/// Workgroup arrays of a kernel. A workgroup runs one part, so parts share them.
#[derive(Default)]
struct Arrays(Vec<Array>);

struct Array {
    scalar: Scalar,
    elements: Elements,
    length: u32,
}

impl Arrays {
    /// The arrays that a body uses, by its slots.
    fn name(&mut self, body: &Body) -> HashMap<SlotId, usize> {
        let mut taken = HashMap::new();
        for shared in &body.shared {
            let scalar = stored(body.slots[shared.slot.0 as usize]);
            let length = shared.length.next_multiple_of(ARRAY_ALIGNMENT / scalar.shared_bytes());
            let alike = |i: &usize| {
                let array = &self.0[*i];
                array.scalar == scalar && array.elements == shared.elements && !taken.values().any(|used| used == i)
            };
            let index = (0..self.0.len()).find(alike).unwrap_or(self.0.len());
            match self.0.get_mut(index) {
                Some(array) => array.length = array.length.max(length),
                None => self.0.push(Array { scalar, elements: shared.elements, length }),
            }
            taken.insert(shared.slot, index);
        }
        taken
    }
}

/// Bytes of workgroup memory that the parts of a kernel need.
pub fn shared_bytes<'a>(bodies: impl IntoIterator<Item = &'a Body>) -> u64 {
    let mut arrays = Arrays::default();
    for body in bodies {
        arrays.name(body);
    }
    arrays.0.iter().map(|array| u64::from(array.length * array.scalar.shared_bytes())).sum()
}

fn scalar_name(s: Scalar) -> &'static str {
    match s {
        Scalar::F32 => "f32",
        Scalar::F16 => "f16",
        Scalar::I32 => "i32",
        Scalar::U32 => "u32",
        Scalar::Bool => "bool",
    }
}

/// How a scalar lies in memory that the host can see.
fn stored(s: Scalar) -> Scalar {
    if s == Scalar::Bool { Scalar::U32 } else { s }
}

/// How often each expression is used, and in which blocks it is defined and used.
struct Usage {
    count: Vec<u32>,
    /// The block that defines the expression.
    block: Vec<u32>,
    /// The block of its last use.
    used_in: Vec<u32>,
}

impl Usage {
    fn of(body: &Body) -> Self {
        let n = body.exprs.len();
        let mut u = Usage { count: vec![0; n], block: vec![0; n], used_in: vec![0; n] };
        let mut roots = Vec::new();
        let mut next = 0;
        u.visit(&body.stmts, &mut next, &mut roots);
        let mut live = vec![false; n];
        while let Some((e, block)) = roots.pop() {
            let i = e.0 as usize;
            u.count[i] += 1;
            u.used_in[i] = block;
            if !live[i] {
                live[i] = true;
                roots.extend(operands(&body.exprs[i].0).map(|o| (o, u.block[i])));
            }
        }
        u
    }

    fn visit(&mut self, stmts: &[Stmt], next: &mut u32, roots: &mut Vec<(ExprId, u32)>) {
        let block = *next;
        *next += 1;
        for stmt in stmts {
            match stmt {
                Stmt::Let(e) => self.block[e.0 as usize] = block,
                Stmt::Declare { value, .. } | Stmt::Assign { value, .. } => roots.push((*value, block)),
                Stmt::For { start, body, .. } => {
                    roots.push((*start, block));
                    self.visit(body, next, roots);
                }
                Stmt::If { condition, body } => {
                    roots.push((*condition, block));
                    self.visit(body, next, roots);
                }
                Stmt::Store { index, value, .. }
                | Stmt::StoreShared { index, value, .. }
                | Stmt::AtomicMax { index, value, .. } => {
                    roots.extend([(*index, block), (*value, block)]);
                }
                Stmt::StoreSharedVector { index, values, .. } => {
                    roots.extend([index].into_iter().chain(values).map(|e| (*e, block)));
                }
                Stmt::Matrix(stmt) => roots.extend(matrix_operand(stmt).map(|e| (e, block))),
                Stmt::Barrier | Stmt::Return => {}
            }
        }
    }
}

/// The expression that a statement on matrices reads.
fn matrix_operand(stmt: &MatrixStmt) -> Option<ExprId> {
    match stmt {
        MatrixStmt::Load { place, .. } | MatrixStmt::Store { place, .. } => Some(place.first),
        MatrixStmt::Scale { factor, .. } => Some(*factor),
        MatrixStmt::MultiplyAdd { .. } => None,
    }
}

fn builtin_name(builtin: Builtin) -> &'static str {
    match builtin {
        Builtin::GlobalLinear { .. } => "invocation",
        Builtin::GroupLinear { .. } => "workgroup",
        Builtin::Local => "local",
    }
}
