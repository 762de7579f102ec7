//! Statements and expressions as text: what is used once is written where it is used, without parentheses that the grammar can do without.

use std::collections::{BTreeSet, HashMap};

use meganeura_ir::{BinaryOp, CompareOp, DType, UnaryOp};
use meganeura_shaders::HELPERS;

use super::{Part, Usage, builtin_name, scalar_name};
use crate::body::{Buffer, Elements, Expr, ExprId, Literal, MATRIX, MatrixPlace, MatrixStmt, Role, Scalar, SlotId, Stmt};
use crate::index::VarId;

/// Longest text of an expression that is written where it is used rather than named.
const MAX_INLINE: usize = 96;

/// How tightly the outermost operator of a text binds. The grammar of WGSL orders only some of its operators: what follows a level needs
/// parentheses as its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Binds {
    /// Names, calls and elements.
    Primary,
    Unary,
    Product,
    Sum,
    Shift,
    And,
    Or,
    Xor,
    Compare,
}

/// What may change between the place where an expression is defined and the one where it is written.
#[derive(Clone, Debug, Default)]
struct Sources {
    slots: BTreeSet<SlotId>,
    memory: bool,
}

impl Sources {
    fn add(&mut self, other: &Sources) {
        self.slots.extend(&other.slots);
        self.memory |= other.memory;
    }
}

/// An expression as it is written where it is used.
#[derive(Clone, Debug)]
struct Printed {
    text: String,
    binds: Binds,
    sources: Sources,
}

fn primary(text: String) -> (String, Binds) {
    (text, Binds::Primary)
}

pub struct Printer<'a> {
    part: &'a Part,
    /// The kernel's bindings.
    buffers: &'a [Buffer],
    usage: Usage,
    arrays: HashMap<SlotId, usize>,
    printed: HashMap<ExprId, Printed>,
    /// Expressions with sources that are not written yet.
    waiting: Vec<ExprId>,
    /// The sources of what was taken as an operand.
    taken: Sources,
    helpers: BTreeSet<usize>,
    /// Matrices loaded or stored so far.
    matrices: usize,
    out: String,
}

impl<'a> Printer<'a> {
    /// A printer of the body of `part` in a kernel with bindings `buffers`; `arrays` are the workgroup arrays of its slots.
    pub fn new(part: &'a Part, buffers: &'a [Buffer], arrays: HashMap<SlotId, usize>) -> Self {
        Printer {
            part,
            buffers,
            usage: Usage::of(&part.body),
            arrays,
            printed: HashMap::new(),
            waiting: Vec::new(),
            taken: Sources::default(),
            helpers: BTreeSet::new(),
            matrices: 0,
            out: String::new(),
        }
    }

    /// The text of the body at a depth of indentation, and the positions of the helpers that it calls.
    pub fn print(mut self, depth: usize) -> (String, BTreeSet<usize>) {
        self.stmts(&self.part.body.stmts, depth);
        (self.out, self.helpers)
    }

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
                    let value = self.argument(*value);
                    self.line(depth, &format!("var s{}: {kind} = {value};", slot.0));
                }
                Stmt::Assign { slot, value } => {
                    let value = self.argument(*value);
                    self.settle(stmt, depth);
                    self.line(depth, &format!("s{} = {value};", slot.0));
                }
                Stmt::For { var, start, end, step, body } => {
                    let start = self.argument(*start);
                    self.settle(stmt, depth);
                    let name = self.variable(*var);
                    self.line(depth, &format!("for (var {name} = {start}; {name} < {end}; {name} += {step}) {{"));
                    self.stmts(body, depth + 1);
                    self.line(depth, "}");
                }
                Stmt::If { condition, body } => {
                    let condition = self.argument(*condition);
                    self.settle(stmt, depth);
                    self.line(depth, &format!("if {condition} {{"));
                    self.stmts(body, depth + 1);
                    self.line(depth, "}");
                }
                Stmt::Store { buffer, index, value } => {
                    let (element, value) = (self.buffer_element(*buffer, *index), self.argument(*value));
                    self.settle(stmt, depth);
                    self.line(depth, &format!("{element} = {value};"));
                }
                Stmt::StoreShared { array, index, value } => {
                    let boolean = self.part.body.slots[array.0 as usize] == Scalar::Bool;
                    let element = self.shared_element(*array, *index);
                    let value = self.argument(*value);
                    let value = if boolean { format!("u32({value})") } else { value };
                    self.settle(stmt, depth);
                    match self.elements(*array) {
                        Some(Elements::Atomics) => self.line(depth, &format!("atomicStore(&{element}, {value});")),
                        _ => self.line(depth, &format!("{element} = {value};")),
                    }
                }
                Stmt::StoreSharedVector { array, index, values } => {
                    let index = self.argument(*index);
                    let element = scalar_name(self.part.body.slots[array.0 as usize]);
                    let values = values.map(|value| self.argument(value)).join(", ");
                    self.settle(stmt, depth);
                    self.line(depth, &format!("w{}[{index}] = vec4<{element}>({values});", self.arrays[array]));
                }
                Stmt::AtomicMax { array, index, value } => {
                    let (element, value) = (self.shared_element(*array, *index), self.argument(*value));
                    self.settle(stmt, depth);
                    self.line(depth, &format!("atomicMax(&{element}, {value});"));
                }
                Stmt::Matrix(matrix) => self.matrix(matrix, stmt, depth),
                Stmt::Barrier => {
                    self.settle(stmt, depth);
                    self.line(depth, "workgroupBarrier();");
                }
                Stmt::Return => self.line(depth, "return;"),
            }
        }
    }

    fn matrix(&mut self, matrix: &MatrixStmt, stmt: &Stmt, depth: usize) {
        match matrix {
            MatrixStmt::Load { slot, role, place } => {
                let (pointer, name) = self.matrix_place(place, stmt, depth, "coopLoad");
                let (keyword, element, role) = match role {
                    Role::A => ("let", "f16", "A"),
                    Role::B => ("let", "f16", "B"),
                    Role::C => ("var", "f32", "C"),
                };
                let ty = format!("coop_mat{MATRIX}x{MATRIX}<{element}, {role}>");
                self.line(depth, &format!("{keyword} s{} = {name}<{ty}>({pointer}, {}u);", slot.0, place.pitch));
            }
            MatrixStmt::MultiplyAdd { a, b, c } => {
                self.settle(stmt, depth);
                self.line(depth, &format!("s{2} = coopMultiplyAdd(s{0}, s{1}, s{2});", a.0, b.0, c.0));
            }
            MatrixStmt::Scale { c, factor } => {
                let factor = self.argument(*factor);
                self.settle(stmt, depth);
                self.line(depth, &format!("s{0} = s{0} * {factor};", c.0));
            }
            MatrixStmt::Store { c, place } => {
                let (pointer, name) = self.matrix_place(place, stmt, depth, "coopStore");
                self.line(depth, &format!("{name}(s{}, {pointer}, {}u);", c.0, place.pitch));
            }
        }
    }

    /// A pointer to the first element of a matrix, and the function of the name that reads or writes rows, or columns. The front end wants
    /// the index named.
    fn matrix_place(&mut self, place: &MatrixPlace, stmt: &Stmt, depth: usize, function: &str) -> (String, String) {
        let index = self.argument(place.first);
        self.settle(stmt, depth);
        let name = format!("m{}", self.matrices);
        self.matrices += 1;
        self.line(depth, &format!("let {name} = {index};"));
        (format!("&w{}[{name}]", self.arrays[&place.array]), format!("{function}{}", if place.transposed { "" } else { "T" }))
    }

    fn define(&mut self, e: ExprId, depth: usize) {
        let i = e.0 as usize;
        if self.usage.count[i] == 0 {
            return;
        }
        self.taken = Sources::default();
        let expr = &self.part.body.exprs[i].0;
        let (text, binds) = self.expression(expr);
        let mut sources = std::mem::take(&mut self.taken);
        match expr {
            Expr::Load { .. } | Expr::LoadVector { .. } | Expr::LoadShared { .. } => sources.memory = true,
            Expr::Read(slot) => {
                sources.slots.insert(*slot);
            }
            _ => {}
        }
        let near = self.usage.count[i] == 1 && self.usage.used_in[i] == self.usage.block[i];
        let trivial = matches!(expr, Expr::Var(_) | Expr::Component(..));
        let vector = matches!(expr, Expr::LoadVector { .. } | Expr::LoadSharedVector { .. });
        if trivial || near && !vector && text.len() <= MAX_INLINE {
            if sources.memory || !sources.slots.is_empty() {
                self.waiting.push(e);
            }
            self.printed.insert(e, Printed { text, binds, sources });
        } else {
            self.name(e, &text, depth);
        }
    }

    fn name(&mut self, e: ExprId, text: &str, depth: usize) {
        let name = format!("v{}", e.0);
        self.line(depth, &format!("let {name} = {text};"));
        self.printed.insert(e, Printed { text: name, binds: Binds::Primary, sources: Sources::default() });
    }

    /// Gives names to the expressions that must be evaluated before `stmt`, whose own operands are taken: those whose sources it changes.
    /// Loads keep their order with all that is stored.
    fn settle(&mut self, stmt: &Stmt, depth: usize) {
        let mut assigned = BTreeSet::new();
        assigns(stmt, &mut assigned);
        let orders_memory = !matches!(stmt, Stmt::Assign { .. });
        for e in std::mem::take(&mut self.waiting) {
            let Printed { text, sources, .. } = &self.printed[&e];
            if sources.memory && orders_memory || !sources.slots.is_disjoint(&assigned) {
                let text = text.clone();
                self.name(e, &text, depth);
            } else {
                self.waiting.push(e);
            }
        }
    }

    /// The name of an iteration variable.
    fn variable(&self, var: VarId) -> String {
        let builtin = self.part.body.builtins.iter().find(|(v, _)| *v == var).map(|(_, builtin)| builtin);
        match builtin {
            Some(builtin) => builtin_name(*builtin).to_string(),
            None => format!("i{var}"),
        }
    }

    /// An element of a storage buffer at `index`, counted in scalars.
    fn buffer_element(&mut self, buffer: usize, index: ExprId) -> String {
        let binding = self.part.bindings[buffer];
        if self.buffers[binding].vectors {
            let index = self.operand(index, Binds::Unary);
            format!("b{binding}[{index} >> 2u][{index} & 3]")
        } else {
            format!("b{binding}[{}]", self.argument(index))
        }
    }

    /// What a workgroup array consists of.
    fn elements(&self, array: SlotId) -> Option<Elements> {
        self.part.body.shared.iter().find(|shared| shared.slot == array).map(|shared| shared.elements)
    }

    /// An element of a workgroup array at `index`, counted in scalars.
    fn shared_element(&mut self, array: SlotId, index: ExprId) -> String {
        let name = self.arrays[&array];
        if self.elements(array) == Some(Elements::Vectors) {
            let index = self.operand(index, Binds::Unary);
            format!("w{name}[{index} >> 2u][{index} & 3]")
        } else {
            format!("w{name}[{}]", self.argument(index))
        }
    }

    /// An expression as an operand of what binds no tighter than `most` without parentheses.
    fn operand(&mut self, e: ExprId, most: Binds) -> String {
        let Printed { text, binds, sources } = self.take(e);
        self.taken.add(&sources);
        if binds <= most { text } else { format!("({text})") }
    }

    /// An expression that stands alone.
    fn argument(&mut self, e: ExprId) -> String {
        self.operand(e, Binds::Compare)
    }

    fn take(&mut self, e: ExprId) -> Printed {
        if let Expr::Literal(l) = self.part.body.exprs[e.0 as usize].0 {
            let (text, binds) = self.literal(l);
            return Printed { text, binds, sources: Sources::default() };
        }
        self.waiting.retain(|waiting| *waiting != e);
        self.printed[&e].clone()
    }

    /// An operand that the shader's front end does not evaluate: it refuses constant expressions that are not finite, such as the
    /// logarithm of 0.
    fn late_operand(&mut self, e: ExprId, most: Binds) -> String {
        match self.part.body.exprs[e.0 as usize].0 {
            Expr::Literal(Literal::F32(bits)) => self.by_bits(bits),
            _ => self.operand(e, most),
        }
    }

    fn by_bits(&mut self, bits: u32) -> String {
        self.call("f32_bits", &[format!("{bits:#x}u")])
    }

    fn literal(&mut self, l: Literal) -> (String, Binds) {
        let signed = |text: String, negative: bool| (text, if negative { Binds::Unary } else { Binds::Primary });
        match l {
            Literal::F32(bits) => {
                let value = f32::from_bits(bits);
                if !value.is_finite() || value.is_subnormal() {
                    primary(self.by_bits(bits))
                } else {
                    signed(format!("{value:?}f"), value.is_sign_negative())
                }
            }
            Literal::I32(i32::MIN) => primary("i32(-2147483648)".to_string()),
            Literal::I32(v) => signed(v.to_string(), v < 0),
            Literal::U32(v) => primary(format!("{v}u")),
            Literal::Bool(v) => primary(v.to_string()),
        }
    }

    /// A call of one of the helpers.
    fn call(&mut self, name: &str, arguments: &[String]) -> String {
        self.need(name);
        format!("{name}({})", arguments.join(", "))
    }

    fn need(&mut self, name: &str) {
        let position = HELPERS.iter().position(|h| h.name == name).expect("every helper that is called exists");
        if self.helpers.insert(position) {
            HELPERS[position].needs.iter().for_each(|n| self.need(n));
        }
    }

    fn infix(&mut self, binds: Binds, symbol: &str, a: ExprId, b: ExprId) -> (String, Binds) {
        let (left, right) = operand_levels(binds);
        let (a, b) = (self.infix_left(a, binds, left), self.operand(b, right));
        (format!("{a} {symbol} {b}"), binds)
    }

    /// The left operand of an infix operator: bitwise ones chain with themselves only.
    fn infix_left(&mut self, e: ExprId, binds: Binds, most: Binds) -> String {
        let chains = matches!(binds, Binds::And | Binds::Or | Binds::Xor);
        let same = chains && self.printed.get(&e).is_some_and(|printed| printed.binds == binds);
        self.operand(e, if same { binds } else { most })
    }

    fn expression(&mut self, expr: &Expr) -> (String, Binds) {
        let scalar = |e: &ExprId| self.part.body.exprs[e.0 as usize].1;
        match expr {
            Expr::Literal(l) => self.literal(*l),
            Expr::Var(v) => primary(self.variable(*v)),
            Expr::Unary(op, x) => {
                let kind = scalar(x);
                self.unary(*op, kind, *x)
            }
            Expr::Binary(op, a, b) => {
                let kind = scalar(a);
                self.binary(*op, kind, *a, *b)
            }
            Expr::Compare(op, a, b) => {
                let boolean = scalar(a) == Scalar::Bool;
                let symbol = match op {
                    CompareOp::Eq => "==",
                    CompareOp::Ne => "!=",
                    CompareOp::Lt => "<",
                    CompareOp::Le => "<=",
                    CompareOp::Gt => ">",
                    CompareOp::Ge => ">=",
                };
                if boolean && !matches!(op, CompareOp::Eq | CompareOp::Ne) {
                    let [a, b] = [a, b].map(|e| self.argument(*e));
                    return (format!("u32({a}) {symbol} u32({b})"), Binds::Compare);
                }
                self.infix(Binds::Compare, symbol, *a, *b)
            }
            Expr::Select(c, a, b) => {
                let [c, a, b] = [c, a, b].map(|e| self.argument(*e));
                primary(format!("select({b}, {a}, {c})"))
            }
            Expr::Convert(to, x) => primary(format!("{}({})", scalar_name(*to), self.argument(*x))),
            Expr::IndexDiv(x, c) => match power_of_two(*c) {
                Some(shift) => (format!("{} >> {shift}u", self.operand(*x, Binds::Unary)), Binds::Shift),
                None => primary(format!("i32(u32({}) / {c}u)", self.argument(*x))),
            },
            Expr::IndexMod(x, c) => match power_of_two(*c) {
                Some(_) => (format!("{} & {}", self.operand(*x, Binds::Unary), c - 1), Binds::And),
                None => primary(format!("i32(u32({}) % {c}u)", self.argument(*x))),
            },
            Expr::Load { buffer, index } => primary(self.buffer_element(*buffer, *index)),
            Expr::LoadVector { buffer, index } => primary(format!("b{}[{}]", self.part.bindings[*buffer], self.argument(*index))),
            Expr::LoadShared { array, index } => {
                let element = self.shared_element(*array, *index);
                if self.elements(*array) == Some(Elements::Atomics) {
                    return primary(format!("atomicLoad(&{element})"));
                }
                match self.part.body.slots[array.0 as usize] {
                    Scalar::Bool => (format!("{element} != 0u"), Binds::Compare),
                    _ => primary(element),
                }
            }
            Expr::LoadSharedVector { array, index } => {
                let index = self.argument(*index);
                primary(format!("w{}[{index}]", self.arrays[array]))
            }
            Expr::Component(vector, i) => {
                primary(format!("{}.{}", self.operand(*vector, Binds::Primary), ["x", "y", "z", "w"][usize::from(*i)]))
            }
            Expr::Read(slot) => primary(format!("s{}", slot.0)),
            Expr::MulAdd(a, b, c) if scalar(a) == Scalar::F32 => {
                let [a, b, c] = [a, b, c].map(|e| self.argument(*e));
                primary(format!("fma({a}, {b}, {c})"))
            }
            Expr::MulAdd(a, b, c) => {
                let (left, right) = operand_levels(Binds::Product);
                let (a, b, c) = (self.operand(*a, left), self.operand(*b, right), self.operand(*c, Binds::Product));
                (format!("{a} * {b} + {c}"), Binds::Sum)
            }
            Expr::RandomUniform { key, stream, index } => {
                let mut arguments: Vec<String> = key.iter().map(|word| self.argument(*word)).collect();
                arguments.extend([format!("{stream}u"), self.argument(*index)]);
                primary(self.call("random_uniform", &arguments))
            }
            Expr::MaxMagnitude(a, b) => {
                let [a, b] = [a, b].map(|e| self.argument(*e));
                primary(format!("max({a}, abs({b}))"))
            }
            Expr::Bitcast(to, x) => primary(format!("bitcast<{}>({})", scalar_name(*to), self.argument(*x))),
            Expr::Quantize(to, x) => {
                let x = self.argument(*x);
                primary(self.call(if *to == DType::F16 { "round_f16" } else { "round_bf16" }, &[x]))
            }
        }
    }

    fn unary(&mut self, op: UnaryOp, kind: Scalar, x: ExprId) -> (String, Binds) {
        use UnaryOp::*;
        let prefix = match (op, kind) {
            (Neg, Scalar::U32) => return (format!("0u - {}", self.operand(x, Binds::Product)), Binds::Sum),
            (Reciprocal, _) => return (format!("1.0f / {}", self.late_operand(x, Binds::Unary)), Binds::Product),
            (Abs, Scalar::U32) => return (self.late_operand(x, Binds::Primary), Binds::Primary),
            (Neg, _) => Some("-"),
            (Not, Scalar::Bool) => Some("!"),
            (Not, _) => Some("~"),
            _ => None,
        };
        if let Some(prefix) = prefix {
            return (format!("{prefix}{}", self.late_operand(x, Binds::Primary)), Binds::Unary);
        }
        let x = self.late_operand(x, Binds::Compare);
        let helper = match (op, kind) {
            (Sign, Scalar::U32) => return primary(format!("min({x}, 1u)")),
            (Sin, _) => return primary(self.call("sin_cos", &[x, "0".into()])),
            (Cos, _) => return primary(self.call("sin_cos", &[x, "1".into()])),
            (Tan, _) => {
                let sine = self.call("sin_cos", &[x.clone(), "0".into()]);
                let cosine = self.call("sin_cos", &[x, "1".into()]);
                return (format!("{sine} / {cosine}"), Binds::Product);
            }
            (Asin, _) => "asin_f32",
            (Acos, _) => "acos_f32",
            (Atan, _) => "atan_f32",
            (Sinh, _) => "sinh_f32",
            (Tanh, _) => "tanh_f32",
            (Asinh, _) => "asinh_f32",
            (Atanh, _) => "atanh_f32",
            (Sigmoid, _) => "sigmoid",
            (Softplus, _) => "softplus",
            (Erf, _) => "erf",
            (IsNan, _) => "is_nan",
            (IsInf, _) => "is_inf",
            (Rsqrt, _) => return primary(format!("inverseSqrt({x})")),
            (Abs | Sign | Exp | Log | Sqrt | Cosh | Acosh | Floor | Ceil | Round, _) => {
                return primary(format!("{}({x})", op.name()));
            }
            (Neg | Not | Reciprocal, _) => unreachable!("not functions"),
        };
        primary(self.call(helper, &[x]))
    }

    fn binary(&mut self, op: BinaryOp, kind: Scalar, a: ExprId, b: ExprId) -> (String, Binds) {
        use BinaryOp::*;
        let literal_divisor = matches!(self.part.body.exprs[b.0 as usize].0, Expr::Literal(_));
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
        let (binds, symbol) = match op {
            Add => (Binds::Sum, "+"),
            Sub => (Binds::Sum, "-"),
            Mul => (Binds::Product, "*"),
            Div => (Binds::Product, "/"),
            Rem => (Binds::Product, "%"),
            And => (Binds::And, "&"),
            Or => (Binds::Or, "|"),
            Xor if kind == Scalar::Bool => (Binds::Compare, "!="),
            Xor => (Binds::Xor, "^"),
            Max | Min | Pow => (Binds::Primary, ""),
        };
        let (left, right) =
            if symbol.is_empty() || helper.is_some() { (Binds::Compare, Binds::Compare) } else { operand_levels(binds) };
        let a = if literal_divisor { self.late_operand(a, left) } else { self.infix_left(a, binds, left) };
        let b = self.operand(b, right);
        match helper {
            Some(helper) => primary(self.call(helper, &[a, b])),
            None if symbol.is_empty() => primary(format!("{}({a}, {b})", op.name())),
            None => (format!("{a} {symbol} {b}"), binds),
        }
    }
}

/// The variables that a statement assigns to, with those inside it.
fn assigns(stmt: &Stmt, slots: &mut BTreeSet<SlotId>) {
    match stmt {
        Stmt::Assign { slot, .. } => {
            slots.insert(*slot);
        }
        Stmt::For { body, .. } | Stmt::If { body, .. } => body.iter().for_each(|stmt| assigns(stmt, slots)),
        _ => {}
    }
}

/// What the operands of an infix operator may be without parentheses. Sums and products stay in the order in which they are computed.
fn operand_levels(binds: Binds) -> (Binds, Binds) {
    match binds {
        Binds::Sum => (Binds::Sum, Binds::Product),
        Binds::Product => (Binds::Product, Binds::Unary),
        Binds::Compare => (Binds::Shift, Binds::Shift),
        _ => (Binds::Unary, Binds::Unary),
    }
}

fn power_of_two(c: i32) -> Option<u32> {
    (c as u32).is_power_of_two().then(|| c.trailing_zeros())
}
