//! Prints a [`Body`] as WGSL.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

use meganeura_ir::{BinaryOp, CompareOp, DType, UnaryOp};
use meganeura_shaders::HELPERS;

use crate::body::{Body, Builtin, Expr, ExprId, Literal, Scalar, SlotId, Stmt, operands};

/// Longest text of an expression that is written where it is used rather than named.
const MAX_INLINE: usize = 96;

/// The WGSL source of a kernel with entry point `main`.
pub fn print(body: &Body) -> String {
    let usage = Usage::of(body);
    let mut p = Printer { body, usage, text: HashMap::new(), helpers: BTreeSet::new(), out: String::new() };
    p.stmts(&body.stmts, 1);
    let mut source = String::new();
    for (position, helper) in HELPERS.iter().enumerate() {
        if p.helpers.contains(&position) {
            source.push_str(helper.source);
            source.push('\n');
        }
    }
    for (i, buffer) in body.buffers.iter().enumerate() {
        let access = if buffer.writable { "read_write" } else { "read" };
        let element = scalar_name(stored(buffer.scalar));
        let _ = writeln!(source, "@group(0) @binding({i}) var<storage, {access}> b{i}: array<{element}>;");
    }
    for array in &body.shared {
        let (slot, length) = (array.slot.0, array.length);
        let element = scalar_name(stored(body.slots[slot as usize]));
        let _ = match array.vectors {
            true => writeln!(source, "var<workgroup> w{slot}: array<vec4<{element}>, {}>;", length / 4),
            false => writeln!(source, "var<workgroup> w{slot}: array<{element}, {length}>;"),
        };
    }
    let [x, y, z] = body.workgroup_size;
    let _ = writeln!(
        source,
        "\n@compute @workgroup_size({x}, {y}, {z})\nfn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{"
    );
    for (var, builtin) in &body.builtins {
        let number = |x: u32, y: u32| match (x, y) {
            (_, 1) if x != 65535 => "group.x".to_string(),
            _ => format!("((group.z * {y}u + group.y) * {x}u + group.x)"),
        };
        let value = match *builtin {
            Builtin::GlobalLinear { workgroups_x, workgroups_y } => {
                format!("i32({} * {}u + lane)", number(workgroups_x, workgroups_y), x * y * z)
            }
            Builtin::GroupLinear { workgroups_x, workgroups_y } => format!("i32({})", number(workgroups_x, workgroups_y)),
            Builtin::Local => "i32(lane)".to_string(),
        };
        let _ = writeln!(source, "    let i{var} = {value};");
    }
    source.push_str(&p.out);
    source.push_str("}\n");
    source
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
    body: &'a Body,
    usage: Usage,
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
                    let kind = scalar_name(self.body.slots[slot.0 as usize]);
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
                    self.line(depth, &format!("b{buffer}[{}] = {};", bare(&index), bare(&value)));
                }
                Stmt::StoreShared { array, index, value } => {
                    let boolean = self.body.slots[array.0 as usize] == Scalar::Bool;
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
        let text = self.expression(&self.body.exprs[i].0.clone());
        let movable = !matches!(
            self.body.exprs[i].0,
            Expr::Load { .. } | Expr::LoadShared { .. } | Expr::LoadSharedVector { .. } | Expr::Read(_)
        );
        let near = self.usage.count[i] == 1 && self.usage.used_in[i] == self.usage.block[i];
        let trivial = matches!(self.body.exprs[i].0, Expr::Var(_) | Expr::Component(..));
        if trivial || movable && near && text.len() <= MAX_INLINE {
            self.text.insert(e, text);
        } else {
            self.line(depth, &format!("let v{i} = {};", bare(&text)));
            self.text.insert(e, format!("v{i}"));
        }
    }

    /// An element of a workgroup array at `index`, counted in scalars.
    fn shared_element(&self, array: SlotId, index: &str) -> String {
        let vectors = self.body.shared.iter().any(|shared| shared.slot == array && shared.vectors);
        match vectors {
            true => format!("w{}[{index} >> 2u][{index} & 3]", array.0),
            false => format!("w{}[{}]", array.0, bare(index)),
        }
    }

    fn operand(&mut self, e: ExprId) -> String {
        if let Expr::Literal(l) = self.body.exprs[e.0 as usize].0 {
            return self.literal(l);
        }
        self.text[&e].clone()
    }

    /// An operand that the shader's front end does not evaluate: it refuses constant expressions that are not finite, such as the
    /// logarithm of 0.
    fn late_operand(&mut self, e: ExprId) -> String {
        match self.body.exprs[e.0 as usize].0 {
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
        let scalar = |e: &ExprId| self.body.exprs[e.0 as usize].1;
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
                let divisor_is_literal = matches!(self.body.exprs[b.0 as usize].0, Expr::Literal(_));
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
            Expr::Load { buffer, index } => format!("b{buffer}[{}]", bare(&self.operand(*index))),
            Expr::LoadShared { array, index } => {
                let index = self.operand(*index);
                let element = self.shared_element(*array, &index);
                if self.body.slots[array.0 as usize] == Scalar::Bool { format!("({element} != 0u)") } else { element }
            }
            Expr::LoadSharedVector { array, index } => format!("w{}[{}]", array.0, bare(&self.operand(*index))),
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
