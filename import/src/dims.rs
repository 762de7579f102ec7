//! Sizes that exporters write as expressions of other sizes, such as `2*s0`, `(s77 + 1)//2` or `Max(1, batch)`.
//!
//! A text that is no expression, such as `batch x heads`, is the name of a size. So is everything made of letters, digits, `_`,
//! `.`, `:`, `#`, and hyphens between letters.

use std::collections::{BTreeMap, BTreeSet};

/// Nesting of parentheses and signs.
const MAX_DEPTH: usize = 32;
/// Bytes of an expression: a longer text is a name.
const MAX_BYTES: usize = 512;

/// A size in terms of named sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expr {
    Number(i64),
    Symbol(String),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Floor(Box<Expr>),
    Ceiling(Box<Expr>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Sub,
    Mul,
    /// Exact: a size that does not divide is no size.
    Div,
    Power,
    Mod,
    Max,
    Min,
}

/// What a function makes of its arguments; `None` if it does not take as many.
type Build = fn(Vec<Expr>) -> Option<Expr>;

/// Functions that PyTorch writes, with what they mean for sizes.
#[rustfmt::skip]
const FUNCTIONS: [(&str, Build); 13] = [
    ("floor",         |a| rounded(Expr::Floor, one(a)?)),
    ("ceiling",       |a| rounded(Expr::Ceiling, one(a)?)),
    ("ceil",          |a| rounded(Expr::Ceiling, one(a)?)),
    ("CeilToInt",     |a| rounded(Expr::Ceiling, one(a)?)),
    ("FloorToInt",    |a| rounded(Expr::Floor, one(a)?)),
    ("TruncToInt",    |a| rounded(Expr::Floor, one(a)?)),
    ("ToFloat",       one),
    ("FloorDiv",      |a| rounded(Expr::Floor, two(Operator::Div, a)?)),
    ("CleanDiv",      |a| two(Operator::Div, a)),
    ("IntTrueDiv",    |a| two(Operator::Div, a)),
    ("Mod",           |a| two(Operator::Mod, a)),
    ("Max",           |a| many(Operator::Max, a)),
    ("Min",           |a| many(Operator::Min, a)),
];

fn one(arguments: Vec<Expr>) -> Option<Expr> {
    let [argument]: [Expr; 1] = arguments.try_into().ok()?;
    Some(argument)
}

fn two(operator: Operator, arguments: Vec<Expr>) -> Option<Expr> {
    let [a, b]: [Expr; 2] = arguments.try_into().ok()?;
    Some(binary(operator, a, b))
}

fn many(operator: Operator, arguments: Vec<Expr>) -> Option<Expr> {
    arguments.into_iter().reduce(|a, b| binary(operator, a, b))
}

fn rounded(round: fn(Box<Expr>) -> Expr, argument: Expr) -> Option<Expr> {
    Some(round(Box::new(argument)))
}

fn binary(operator: Operator, a: Expr, b: Expr) -> Expr {
    Expr::Binary(operator, Box::new(a), Box::new(b))
}

/// Values of named sizes.
pub(crate) type Sizes = BTreeMap<String, usize>;

/// What an equation says about sizes that are not known yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Solution {
    /// Both sides are known: whether they are equal.
    Known(bool),
    Solved(String, usize),
    /// No size solves it.
    Impossible,
    /// Several sizes are unknown, or the expression is not linear in the one.
    Open,
}

impl Expr {
    /// The expression that `text` writes; where it is none, the size of that name.
    pub fn parse(text: &str) -> Expr {
        let name = || Expr::Symbol(text.to_owned());
        if text.len() > MAX_BYTES {
            return name();
        }
        let mut parser = Parser { rest: text, depth: 0 };
        parser.sum().filter(|_| parser.rest.trim().is_empty()).unwrap_or_else(name)
    }

    /// Names in the expression.
    pub fn symbols(&self) -> BTreeSet<&str> {
        match self {
            Expr::Number(_) => BTreeSet::new(),
            Expr::Symbol(name) => BTreeSet::from([name.as_str()]),
            Expr::Floor(a) | Expr::Ceiling(a) => a.symbols(),
            Expr::Binary(_, a, b) => a.symbols().into_iter().chain(b.symbols()).collect(),
        }
    }

    /// The size, if every name has a value and the result is a size.
    pub fn size(&self, sizes: &Sizes) -> Option<usize> {
        match self {
            Expr::Symbol(name) => sizes.get(name).copied(),
            _ => usize::try_from(self.affine(sizes)?.constant()?.integer()?).ok(),
        }
    }

    /// What follows from this expression being `size`.
    pub fn solve(&self, size: usize, sizes: &Sizes) -> Solution {
        let Some(affine) = self.affine(sizes) else {
            let unknown = self.symbols().into_iter().any(|name| !sizes.contains_key(name));
            return if unknown { Solution::Open } else { Solution::Known(false) };
        };
        let Some((name, slope)) = affine.symbol else {
            return Solution::Known(affine.offset.integer() == i64::try_from(size).ok());
        };
        let target = i64::try_from(size).ok().map(Ratio::from).and_then(|size| size.sub(affine.offset)?.div(slope));
        match target.and_then(Ratio::integer).and_then(|n| usize::try_from(n).ok()) {
            Some(value) => Solution::Solved(name, value),
            None => Solution::Impossible,
        }
    }

    /// `slope * symbol + offset` with one unknown symbol at most; `None` for all else, and past 64 bits.
    fn affine(&self, sizes: &Sizes) -> Option<Affine> {
        Some(match self {
            Expr::Number(n) => Affine::from(Ratio::from(*n)),
            Expr::Symbol(name) => match sizes.get(name) {
                Some(&size) => Affine::from(Ratio::from(i64::try_from(size).ok()?)),
                None => Affine { symbol: Some((name.clone(), Ratio::from(1))), offset: Ratio::from(0) },
            },
            Expr::Floor(a) => Affine::from(a.affine(sizes)?.constant()?.floor()),
            Expr::Ceiling(a) => Affine::from(a.affine(sizes)?.constant()?.ceiling()?),
            Expr::Binary(operator, a, b) => {
                let (a, b) = (a.affine(sizes)?, b.affine(sizes)?);
                match operator {
                    Operator::Add => a.add(b)?,
                    Operator::Sub => a.add(b.scale(Ratio::from(-1))?)?,
                    Operator::Mul if a.symbol.is_none() => b.scale(a.offset)?,
                    Operator::Mul => a.scale(b.constant()?)?,
                    Operator::Div => a.scale(Ratio::from(1).div(b.constant()?)?)?,
                    Operator::Power => Affine::from(a.constant()?.power(b.constant()?.integer()?)?),
                    Operator::Mod => {
                        let (a, b) = (a.constant()?, b.constant()?);
                        Affine::from(a.sub(b.mul(a.div(b)?.floor())?)?)
                    }
                    Operator::Max => Affine::from(a.constant()?.pick(b.constant()?, true)?),
                    Operator::Min => Affine::from(a.constant()?.pick(b.constant()?, false)?),
                }
            }
        })
    }
}

/// `slope * symbol + offset`, or `offset` alone. A slope is never zero.
struct Affine {
    symbol: Option<(String, Ratio)>,
    offset: Ratio,
}

impl From<Ratio> for Affine {
    fn from(offset: Ratio) -> Self {
        Affine { symbol: None, offset }
    }
}

impl Affine {
    fn constant(self) -> Option<Ratio> {
        self.symbol.is_none().then_some(self.offset)
    }

    fn add(self, other: Affine) -> Option<Affine> {
        let symbol = match (self.symbol, other.symbol) {
            (Some((a, slope)), Some((b, more))) if a == b => {
                Some((a, slope.add(more)?)).filter(|(_, slope)| slope.numerator != 0)
            }
            (Some(_), Some(_)) => return None,
            (a, b) => a.or(b),
        };
        Some(Affine { symbol, offset: self.offset.add(other.offset)? })
    }

    fn scale(self, by: Ratio) -> Option<Affine> {
        let symbol = match self.symbol {
            Some((name, slope)) => Some((name, slope.mul(by)?)).filter(|(_, slope)| slope.numerator != 0),
            None => None,
        };
        Some(Affine { symbol, offset: self.offset.mul(by)? })
    }
}

/// A rational number in lowest terms; the denominator is positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ratio {
    numerator: i64,
    denominator: i64,
}

impl From<i64> for Ratio {
    fn from(numerator: i64) -> Self {
        Ratio { numerator, denominator: 1 }
    }
}

impl Ratio {
    fn new(numerator: i128, denominator: i128) -> Option<Ratio> {
        let divisor = gcd(numerator.unsigned_abs(), denominator.unsigned_abs());
        let divisor = i128::try_from(divisor).ok().filter(|d| *d != 0)? * denominator.signum();
        let lowest = |n: i128| i64::try_from(n.checked_div(divisor)?).ok();
        (denominator != 0).then_some(())?;
        Some(Ratio { numerator: lowest(numerator)?, denominator: lowest(denominator)? })
    }

    fn parts(self) -> (i128, i128) {
        (self.numerator.into(), self.denominator.into())
    }

    fn add(self, other: Ratio) -> Option<Ratio> {
        let ((a, b), (c, d)) = (self.parts(), other.parts());
        Ratio::new(a.checked_mul(d)?.checked_add(c.checked_mul(b)?)?, b * d)
    }

    fn sub(self, other: Ratio) -> Option<Ratio> {
        self.add(other.mul(Ratio::from(-1))?)
    }

    fn mul(self, other: Ratio) -> Option<Ratio> {
        let ((a, b), (c, d)) = (self.parts(), other.parts());
        Ratio::new(a * c, b * d)
    }

    fn div(self, other: Ratio) -> Option<Ratio> {
        let ((a, b), (c, d)) = (self.parts(), other.parts());
        Ratio::new(a * d, b * c)
    }

    fn floor(self) -> Ratio {
        Ratio::from(self.numerator.div_euclid(self.denominator))
    }

    fn ceiling(self) -> Option<Ratio> {
        Ratio::from(0).sub(Ratio::from(0).sub(self)?.floor())
    }

    fn power(self, exponent: i64) -> Option<Ratio> {
        let exponent = u32::try_from(exponent).ok()?;
        let power = |n: i64| i128::from(n).checked_pow(exponent);
        Ratio::new(power(self.numerator)?, power(self.denominator)?)
    }

    fn pick(self, other: Ratio, larger: bool) -> Option<Ratio> {
        Some(if (self.sub(other)?.numerator > 0) == larger { self } else { other })
    }

    fn integer(self) -> Option<i64> {
        (self.denominator == 1).then_some(self.numerator)
    }
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Recursive descent; every method returns `None` where the text is no expression.
struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn take(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn sum(&mut self) -> Option<Expr> {
        let mut left = self.product()?;
        loop {
            left = if self.take("+") {
                binary(Operator::Add, left, self.product()?)
            } else if self.take("-") {
                binary(Operator::Sub, left, self.product()?)
            } else {
                return Some(left);
            }
        }
    }

    fn product(&mut self) -> Option<Expr> {
        let mut left = self.signed()?;
        loop {
            left = if self.take("*") {
                binary(Operator::Mul, left, self.signed()?)
            } else if self.take("//") {
                Expr::Floor(Box::new(binary(Operator::Div, left, self.signed()?)))
            } else if self.take("/") {
                binary(Operator::Div, left, self.signed()?)
            } else if self.take("%") {
                binary(Operator::Mod, left, self.signed()?)
            } else {
                return Some(left);
            }
        }
    }

    /// A sign binds less than a power and more than a product.
    fn signed(&mut self) -> Option<Expr> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let expr = match self.take("-") {
            true => binary(Operator::Mul, Expr::Number(-1), self.signed()?),
            false => self.power()?,
        };
        self.depth -= 1;
        Some(expr)
    }

    fn power(&mut self) -> Option<Expr> {
        let base = self.atom()?;
        Some(if self.take("**") { binary(Operator::Power, base, self.signed()?) } else { base })
    }

    fn atom(&mut self) -> Option<Expr> {
        if self.take("(") {
            let inner = self.sum()?;
            return self.take(")").then_some(inner);
        }
        let word = self.word();
        if word.is_empty() {
            return None;
        }
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.parse().ok().map(Expr::Number);
        }
        if !self.take("(") {
            return Some(Expr::Symbol(word.to_owned()));
        }
        let (_, build) = FUNCTIONS.iter().find(|(name, _)| *name == word)?;
        let mut arguments = Vec::new();
        loop {
            arguments.push(self.sum()?);
            if self.take(")") {
                return build(arguments);
            }
            if !self.take(",") {
                return None;
            }
        }
    }

    /// Letters, digits and what joins them in names. A hyphen joins only where a letter follows.
    fn word(&mut self) -> &'a str {
        let text = self.rest.trim_start();
        let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ':' | '#');
        let mut end = 0;
        while let Some(c) = text[end..].chars().next() {
            let next = text[end + c.len_utf8()..].chars().next();
            let joins = c == '-' && end > 0 && next.is_some_and(char::is_alphabetic);
            if !is_plain(c) && !joins {
                break;
            }
            end += c.len_utf8();
        }
        self.rest = &text[end..];
        &text[..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(list: &[(&str, usize)]) -> Sizes {
        list.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect()
    }

    #[test]
    fn expressions_of_exporters_are_computed() {
        let known = sizes(&[("s0", 7), ("s77", 4), ("batch", 2), ("seq", 5), ("past_sequence_length", 3)]);
        let cases = [
            ("2*s0", Some(14)),
            ("s0 + s77", Some(11)),
            ("s77 - 1", Some(3)),
            ("(s0 - 1)", Some(6)),
            ("s0//2", Some(3)),
            ("((s77 + 1)//2)", Some(2)),
            ("floor(s0/2)", Some(3)),
            ("ceiling(s0/2)", Some(4)),
            ("CeilToInt(IntTrueDiv(s0, 2))", Some(4)),
            ("FloorDiv(s0 - 1, 2) + 1", Some(4)),
            ("Max(1, s0)", Some(7)),
            ("Min(s0, 3, batch)", Some(2)),
            ("Mod(s0, 4)", Some(3)),
            ("s0 % 4", Some(3)),
            ("s0**2 - 9", Some(40)),
            ("-s0 + 10", Some(3)),
            ("-2**2 + s0", Some(3)),
            ("batch*seq", Some(10)),
            ("past_sequence_length + 1", Some(4)),
            ("2 - s0", None),
            ("s0/2", None),
            ("s0//0", None),
            ("unknown + 1", None),
            ("9223372036854775807*s0", None),
        ];
        for (text, expected) in cases {
            assert_eq!(Expr::parse(text).size(&known), expected, "{text}");
        }
    }

    #[test]
    fn names_of_exporters_are_names() {
        let long = "(".repeat(100) + "s0" + &")".repeat(100);
        let names = [
            "s77",
            "unk__214",
            "p2o.DynamicDimension.0",
            "DynamicDimension.0",
            "batch-size",
            "batch_size x num_heads",
            "Unknown(1)",
            "x.0",
            "input:0.1",
            "?",
            "a b",
            "0.5*n",
            "2 +",
            "größe",
            "",
            long.as_str(),
        ];
        for name in names {
            assert_eq!(Expr::parse(name), Expr::Symbol(name.to_owned()), "{name}");
        }
    }

    #[test]
    fn linear_equations_are_solved_for_one_unknown() {
        let known = sizes(&[("seq", 5)]);
        let solved = |name: &str, size| Solution::Solved(name.to_owned(), size);
        let cases = [
            ("2*half", 8, solved("half", 4)),
            ("2*half", 7, Solution::Impossible),
            ("n - 1", 3, solved("n", 4)),
            ("10 - n", 3, solved("n", 7)),
            ("10 - n", 13, Solution::Impossible),
            ("batch*seq", 10, solved("batch", 2)),
            ("n + n + seq", 11, solved("n", 3)),
            ("n/2 + 1", 4, solved("n", 6)),
            ("n - n + seq", 5, Solution::Known(true)),
            ("seq + 1", 5, Solution::Known(false)),
            ("seq/2", 2, Solution::Known(false)),
            ("n*n", 9, Solution::Open),
            ("a + b", 9, Solution::Open),
            ("n//2", 4, Solution::Open),
            ("Max(1, n)", 4, Solution::Open),
            ("0*n", 1, Solution::Known(false)),
        ];
        for (text, size, expected) in cases {
            assert_eq!(Expr::parse(text).solve(size, &known), expected, "{text} = {size}");
        }
    }

    #[test]
    fn names_of_an_expression_are_listed() {
        assert_eq!(Expr::parse("Max(s1, 2*s0) + s1").symbols(), BTreeSet::from(["s0", "s1"]));
    }
}
