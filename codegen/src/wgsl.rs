//! Prints a [`Body`] as WGSL.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

use meganeura_ir::{BinaryOp, CompareOp, DType, UnaryOp};
use meganeura_shaders::HELPERS;

use crate::body::{Body, Buffer, Builtin, Expr, ExprId, Literal, Scalar, SlotId, Stmt, operands};

/// Longest text of an expression that is written where it is used rather than named.
const MAX_INLINE: usize = 96;

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
        let usage = Usage::of(&part.body);
        let names = arrays.name(&part.body);
        let depth = if several { 2 } else { 1 };
        let mut p = Printer { part, usage, arrays: names, text: HashMap::new(), helpers: BTreeSet::new(), out: String::new() };
        p.stmts(&part.body.stmts, depth);
        if several {
            let otherwise = if first == 0 { "    " } else { " else " };
            let _ = writeln!(text, "{otherwise}if number < {}u {{", first + part.workgroups);
        }
        let indent = "    ".repeat(depth);
        for (var, builtin) in &part.body.builtins {
            let number = match (several, first, *builtin) {
                (
                    false,
                    _,
                    Builtin::GlobalLinear { workgroups_x, workgroups_y } | Builtin::GroupLinear { workgroups_x, workgroups_y },
                ) => linear(workgroups_x, workgroups_y),
                (true, 0, _) | (false, _, Builtin::Local) => "number".to_string(),
                (true, ..) => format!("(number - {first}u)"),
            };
            let value = match *builtin {
                Builtin::GlobalLinear { .. } => {
                    format!("i32({number} * {}u + lane)", part.body.workgroup_size.iter().product::<u32>())
                }
                Builtin::GroupLinear { .. } => format!("i32({number})"),
                Builtin::Local => "i32(lane)".to_string(),
            };
            let _ = writeln!(text, "{indent}let i{var} = {value};");
        }
        text.push_str(&p.out);
        if several {
            text.push_str("    }");
        }
        helpers.append(&mut p.helpers);
        first += part.workgroups;
    }
    if several {
        text.push('\n');
    }
    let mut source = String::new();
    for (position, helper) in HELPERS.iter().enumerate() {
        if helpers.contains(&position) {
            source.push_str(helper.source);
            source.push('\n');
        }
    }
    for (i, buffer) in buffers.iter().enumerate() {
        let access = if buffer.writable { "read_write" } else { "read" };
        let element = scalar_name(stored(buffer.scalar));
        let _ = writeln!(source, "@group(0) @binding({i}) var<storage, {access}> b{i}: array<{element}>;");
    }
    for (i, array) in arrays.0.iter().enumerate() {
        let element = scalar_name(array.scalar);
        let _ = match array.vectors {
            true => writeln!(source, "var<workgroup> w{i}: array<vec4<{element}>, {}>;", array.length / 4),
            false => writeln!(source, "var<workgroup> w{i}: array<{element}, {}>;", array.length),
        };
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

/// The number of a workgroup in its grid.
fn linear(workgroups_x: u32, workgroups_y: u32) -> String {
    match (workgroups_x, workgroups_y) {
        (x, 1) if x != 65535 => "group.x".to_string(),
        (x, y) => format!("((group.z * {y}u + group.y) * {x}u + group.x)"),
    }
}

/// Workgroup arrays of a kernel. A workgroup runs one part, so parts share them.
#[derive(Default)]
struct Arrays(Vec<Array>);

struct Array {
    scalar: Scalar,
    vectors: bool,
    length: u32,
}

impl Arrays {
    /// The arrays that a body uses, by its slots.
    fn name(&mut self, body: &Body) -> HashMap<SlotId, usize> {
        let mut taken = HashMap::new();
        for shared in &body.shared {
            let scalar = stored(body.slots[shared.slot.0 as usize]);
            let alike = |i: &usize| {
                let array = &self.0[*i];
                array.scalar == scalar && array.vectors == shared.vectors && !taken.values().any(|used| used == i)
            };
            let index = (0..self.0.len()).find(alike).unwrap_or(self.0.len());
            match self.0.get_mut(index) {
                Some(array) => array.length = array.length.max(shared.length),
                None => self.0.push(Array { scalar, vectors: shared.vectors, length: shared.length }),
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
    arrays.0.iter().map(|array| u64::from(array.length) * 4).sum()
}

fn scalar_name(s: Scalar) -> &'static str {
    match s {
        Scalar::F32 => "f32",
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
                Stmt::Store { index, value, .. } | Stmt::StoreShared { index, value, .. } => {
                    roots.extend([(*index, block), (*value, block)]);
                }
                Stmt::Barrier | Stmt::Return => {}
            }
        }
    }
}

struct Printer<'a> {
    part: &'a Part,
    usage: Usage,
    arrays: HashMap<SlotId, usize>,
    /// How each printed expression is written where it is used.
    text: HashMap<ExprId, String>,
    helpers: BTreeSet<usize>,
    out: String,
}

impl Printer<'_> {
    fn line(&mut self, depth: usize, line: &str) {
        for _ in 0..depth {
            self.out.push_str("    ");
        }
        self.out.push_str(line);
        self.out.push('\n');
    }

    fn stmts(&mut self, stmts: &[Stmt], depth: usize) {
        for stmt in stmts {
            match stmt {
                Stmt::Let(e) => self.define(*e, depth),
                Stmt::Declare { slot, value } => {
                    let kind = scalar_name(self.part.body.slots[slot.0 as usize]);
                    let value = self.operand(*value);
                    self.line(depth, &format!("var s{}: {kind} = {value};", slot.0));
                }
                Stmt::Assign { slot, value } => {
                    let value = self.operand(*value);
                    self.line(depth, &format!("s{} = {value};", slot.0));
                }
                Stmt::For { var, start, end, step, body } => {
                    let start = self.operand(*start);
                    self.line(depth, &format!("for (var i{var} = {start}; i{var} < {end}; i{var} += {step}) {{"));
                    self.stmts(body, depth + 1);
                    self.line(depth, "}");
                }
                Stmt::If { condition, body } => {
                    let condition = self.operand(*condition);
                    self.line(depth, &format!("if {condition} {{"));
                    self.stmts(body, depth + 1);
                    self.line(depth, "}");
                }
                Stmt::Store { buffer, index, value } => {
                    let (index, value) = (self.operand(*index), self.operand(*value));
                    let buffer = self.part.bindings[*buffer];
                    self.line(depth, &format!("b{buffer}[{}] = {};", bare(&index), bare(&value)));
                }
                Stmt::StoreShared { array, index, value } => {
                    let boolean = self.part.body.slots[array.0 as usize] == Scalar::Bool;
                    let (index, value) = (self.operand(*index), self.operand(*value));
                    let value = if boolean { format!("u32({value})") } else { value };
                    let element = self.shared_element(*array, &index);
                    self.line(depth, &format!("{element} = {};", bare(&value)));
                }
                Stmt::Barrier => self.line(depth, "workgroupBarrier();"),
                Stmt::Return => self.line(depth, "return;"),
            }
        }
    }

    fn define(&mut self, e: ExprId, depth: usize) {
        let i = e.0 as usize;
        if self.usage.count[i] == 0 {
            return;
        }
        let text = self.expression(&self.part.body.exprs[i].0.clone());
        let movable = !matches!(
            self.part.body.exprs[i].0,
            Expr::Load { .. } | Expr::LoadShared { .. } | Expr::LoadSharedVector { .. } | Expr::Read(_)
        );
        let near = self.usage.count[i] == 1 && self.usage.used_in[i] == self.usage.block[i];
        let trivial = matches!(self.part.body.exprs[i].0, Expr::Var(_) | Expr::Component(..));
        if trivial || movable && near && text.len() <= MAX_INLINE {
            self.text.insert(e, text);
        } else {
            self.line(depth, &format!("let v{i} = {};", bare(&text)));
            self.text.insert(e, format!("v{i}"));
        }
    }

    /// An element of a workgroup array at `index`, counted in scalars.
    fn shared_element(&self, array: SlotId, index: &str) -> String {
        let name = self.arrays[&array];
        let vectors = self.part.body.shared.iter().any(|shared| shared.slot == array && shared.vectors);
        match vectors {
            true => format!("w{name}[{index} >> 2u][{index} & 3]"),
            false => format!("w{name}[{}]", bare(index)),
        }
    }

    fn operand(&mut self, e: ExprId) -> String {
        if let Expr::Literal(l) = self.part.body.exprs[e.0 as usize].0 {
            return self.literal(l);
        }
        self.text[&e].clone()
    }

    /// An operand that the shader's front end does not evaluate: it refuses constant expressions that are not finite, such as the
    /// logarithm of 0.
    fn late_operand(&mut self, e: ExprId) -> String {
        match self.part.body.exprs[e.0 as usize].0 {
            Expr::Literal(Literal::F32(bits)) => self.by_bits(bits),
            _ => self.operand(e),
        }
    }

    fn by_bits(&mut self, bits: u32) -> String {
        self.call("f32_bits", &[format!("{bits:#x}u")])
    }

    fn literal(&mut self, l: Literal) -> String {
        match l {
            Literal::F32(bits) => {
                let value = f32::from_bits(bits);
                if !value.is_finite() || value.is_subnormal() {
                    self.by_bits(bits)
                } else if value.is_sign_negative() {
                    format!("({value:?}f)")
                } else {
                    format!("{value:?}f")
                }
            }
            Literal::I32(i32::MIN) => "i32(-2147483648)".to_string(),
            Literal::I32(v) if v < 0 => format!("({v})"),
            Literal::I32(v) => v.to_string(),
            Literal::U32(v) => format!("{v}u"),
            Literal::Bool(v) => v.to_string(),
        }
    }

    /// A call of one of the helpers.
    fn call(&mut self, name: &str, arguments: &[String]) -> String {
        self.need(name);
        let arguments: Vec<&str> = arguments.iter().map(|a| bare(a)).collect();
        format!("{name}({})", arguments.join(", "))
    }

    fn need(&mut self, name: &str) {
        let position = HELPERS.iter().position(|h| h.name == name).expect("every helper that is called exists");
        if self.helpers.insert(position) {
            HELPERS[position].needs.iter().for_each(|n| self.need(n));
        }
    }

    fn expression(&mut self, expr: &Expr) -> String {
        let scalar = |e: &ExprId| self.part.body.exprs[e.0 as usize].1;
        match expr {
            Expr::Literal(l) => self.literal(*l),
            Expr::Var(v) => format!("i{v}"),
            Expr::Unary(op, x) => {
                let kind = scalar(x);
                let x = self.late_operand(*x);
                self.unary(*op, kind, x)
            }
            Expr::Binary(op, a, b) => {
                let kind = scalar(a);
                let divisor_is_literal = matches!(self.part.body.exprs[b.0 as usize].0, Expr::Literal(_));
                let a = if divisor_is_literal { self.late_operand(*a) } else { self.operand(*a) };
                let b = self.operand(*b);
                self.binary(*op, kind, divisor_is_literal, a, b)
            }
            Expr::Compare(op, a, b) => {
                let boolean = scalar(a) == Scalar::Bool;
                let (mut a, mut b) = (self.operand(*a), self.operand(*b));
                let symbol = match op {
                    CompareOp::Eq => "==",
                    CompareOp::Ne => "!=",
                    CompareOp::Lt => "<",
                    CompareOp::Le => "<=",
                    CompareOp::Gt => ">",
                    CompareOp::Ge => ">=",
                };
                if boolean && !matches!(op, CompareOp::Eq | CompareOp::Ne) {
                    (a, b) = (format!("u32({})", bare(&a)), format!("u32({})", bare(&b)));
                }
                format!("({a} {symbol} {b})")
            }
            Expr::Select(c, a, b) => {
                let [c, a, b] = [c, a, b].map(|e| self.operand(*e));
                format!("select({}, {}, {})", bare(&b), bare(&a), bare(&c))
            }
            Expr::Convert(to, x) => format!("{}({})", scalar_name(*to), bare(&self.operand(*x))),
            Expr::IndexDiv(x, c) => match power_of_two(*c) {
                Some(shift) => format!("({} >> {shift}u)", self.operand(*x)),
                None => format!("i32(u32({}) / {c}u)", bare(&self.operand(*x))),
            },
            Expr::IndexMod(x, c) => match power_of_two(*c) {
                Some(_) => format!("({} & {})", self.operand(*x), c - 1),
                None => format!("i32(u32({}) % {c}u)", bare(&self.operand(*x))),
            },
            Expr::Load { buffer, index } => format!("b{}[{}]", self.part.bindings[*buffer], bare(&self.operand(*index))),
            Expr::LoadShared { array, index } => {
                let index = self.operand(*index);
                let element = self.shared_element(*array, &index);
                if self.part.body.slots[array.0 as usize] == Scalar::Bool { format!("({element} != 0u)") } else { element }
            }
            Expr::LoadSharedVector { array, index } => {
                let index = self.operand(*index);
                format!("w{}[{}]", self.arrays[array], bare(&index))
            }
            Expr::Component(vector, i) => format!("{}.{}", self.operand(*vector), ["x", "y", "z", "w"][usize::from(*i)]),
            Expr::Read(slot) => format!("s{}", slot.0),
            Expr::MulAdd(a, b, c) => {
                let float = scalar(a) == Scalar::F32;
                let [a, b, c] = [a, b, c].map(|e| self.operand(*e));
                if float { format!("fma({}, {}, {})", bare(&a), bare(&b), bare(&c)) } else { format!("({a} * {b} + {c})") }
            }
            Expr::RandomUniform { key, stream, index } => {
                let mut arguments: Vec<String> = key.iter().map(|word| self.operand(*word)).collect();
                arguments.extend([format!("{stream}u"), self.operand(*index)]);
                self.call("random_uniform", &arguments)
            }
            Expr::Quantize(to, x) => {
                let x = self.operand(*x);
                self.call(if *to == DType::F16 { "round_f16" } else { "round_bf16" }, &[x])
            }
        }
    }

    fn unary(&mut self, op: UnaryOp, kind: Scalar, x: String) -> String {
        use UnaryOp::*;
        let function = |name: &str| format!("{name}({})", bare(&x));
        match (op, kind) {
            (Neg, Scalar::U32) => format!("(0u - {x})"),
            (Neg, _) => format!("(-{x})"),
            (Abs, Scalar::U32) => x,
            (Abs, _) => function("abs"),
            (Sign, Scalar::U32) => format!("min({}, 1u)", bare(&x)),
            (Sign, _) => function("sign"),
            (Not, Scalar::Bool) => format!("(!{x})"),
            (Not, _) => format!("(~{x})"),
            (Exp, _) => function("exp"),
            (Log, _) => function("log"),
            (Sqrt, _) => function("sqrt"),
            (Rsqrt, _) => function("inverseSqrt"),
            (Reciprocal, _) => format!("(1.0f / {x})"),
            (Cosh, _) => function("cosh"),
            (Acosh, _) => function("acosh"),
            (Floor, _) => function("floor"),
            (Ceil, _) => function("ceil"),
            (Round, _) => function("round"),
            (Sin, _) => self.call("sin_cos", &[x, "0".into()]),
            (Cos, _) => self.call("sin_cos", &[x, "1".into()]),
            (Tan, _) => {
                let sine = self.call("sin_cos", &[x.clone(), "0".into()]);
                let cosine = self.call("sin_cos", &[x, "1".into()]);
                format!("({sine} / {cosine})")
            }
            (Asin, _) => self.call("asin_f32", &[x]),
            (Acos, _) => self.call("acos_f32", &[x]),
            (Atan, _) => self.call("atan_f32", &[x]),
            (Sinh, _) => self.call("sinh_f32", &[x]),
            (Tanh, _) => self.call("tanh_f32", &[x]),
            (Asinh, _) => self.call("asinh_f32", &[x]),
            (Atanh, _) => self.call("atanh_f32", &[x]),
            (Sigmoid, _) => self.call("sigmoid", &[x]),
            (Softplus, _) => self.call("softplus", &[x]),
            (Erf, _) => self.call("erf", &[x]),
            (IsNan, _) => self.call("is_nan", &[x]),
            (IsInf, _) => self.call("is_inf", &[x]),
        }
    }

    fn binary(&mut self, op: BinaryOp, kind: Scalar, literal_divisor: bool, a: String, b: String) -> String {
        use BinaryOp::*;
        let helper = match (op, kind) {
            (Max, Scalar::F32) => Some("max_f32"),
            (Min, Scalar::F32) => Some("min_f32"),
            (Div, Scalar::F32) => Some("div_f32"),
            (Rem, Scalar::F32) => Some("rem_f32"),
            (Pow, Scalar::F32) => Some("pow_f32"),
            (Pow, Scalar::I32) => Some("pow_i32"),
            (Pow, _) => Some("pow_u32"),
            (Div, Scalar::I32) if !literal_divisor => Some("div_i32"),
            (Rem, Scalar::I32) if !literal_divisor => Some("rem_i32"),
            (Div, Scalar::U32) if !literal_divisor => Some("div_u32"),
            (Rem, Scalar::U32) if !literal_divisor => Some("rem_u32"),
            _ => None,
        };
        if let Some(helper) = helper {
            return self.call(helper, &[a, b]);
        }
        let symbol = match op {
            Add => "+",
            Sub => "-",
            Mul => "*",
            Div => "/",
            Rem => "%",
            And => "&",
            Or => "|",
            Xor if kind == Scalar::Bool => "!=",
            Xor => "^",
            Max => return format!("max({}, {})", bare(&a), bare(&b)),
            Min => return format!("min({}, {})", bare(&a), bare(&b)),
            Pow => unreachable!("pow is a helper"),
        };
        format!("({a} {symbol} {b})")
    }
}

fn power_of_two(c: i32) -> Option<u32> {
    (c as u32).is_power_of_two().then(|| c.trailing_zeros())
}

/// `text` without parentheses that enclose all of it.
fn bare(text: &str) -> &str {
    let Some(inner) = text.strip_prefix('(').and_then(|t| t.strip_suffix(')')) else { return text };
    let mut depth = 0i32;
    for c in inner.chars() {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        if depth < 0 {
            return text;
        }
    }
    inner
}
