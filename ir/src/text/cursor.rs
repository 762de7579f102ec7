//! Tokens of one line.

use std::str::FromStr;

use super::ParseErrorKind;
use crate::{DType, NodeId, Shape, TensorType};

/// What is left of a line. Every method skips white space first.
pub(super) struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(line: &'a str) -> Self {
        Cursor { rest: line.trim() }
    }

    pub(super) fn at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// An error about what stands here.
    pub(super) fn expected(&self, expected: &'static str) -> ParseErrorKind {
        ParseErrorKind::Expected { expected, found: self.rest.chars().take(20).collect() }
    }

    fn advance(&mut self, bytes: usize) {
        self.rest = self.rest[bytes..].trim_start();
    }

    /// Whether `token` stands next.
    pub(super) fn sees(&self, token: &str) -> bool {
        self.rest.starts_with(token)
    }

    /// Takes `token` if it stands next.
    pub(super) fn eat(&mut self, token: &'static str) -> bool {
        let found = self.sees(token);
        if found {
            self.advance(token.len());
        }
        found
    }

    pub(super) fn expect(&mut self, token: &'static str) -> Result<(), ParseErrorKind> {
        if self.eat(token) { Ok(()) } else { Err(self.expected(token)) }
    }

    /// The longest run of characters that satisfy `belongs`; at least one.
    fn run(&mut self, expected: &'static str, belongs: fn(char) -> bool) -> Result<&'a str, ParseErrorKind> {
        let end = self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(self.expected(expected));
        }
        let text = &self.rest[..end];
        self.advance(end);
        Ok(text)
    }

    /// Letters, digits and underscores.
    pub(super) fn word(&mut self, expected: &'static str) -> Result<&'a str, ParseErrorKind> {
        self.run(expected, |c| c.is_ascii_alphanumeric() || c == '_')
    }

    /// A number, or a word in the place of one.
    pub(super) fn atom(&mut self) -> Result<&'a str, ParseErrorKind> {
        self.run("a value", |c| c.is_ascii_alphanumeric() || "_+-.:".contains(c))
    }

    /// `[a,b,..]`
    pub(super) fn list(&mut self) -> Result<Vec<&'a str>, ParseErrorKind> {
        self.expect("[")?;
        let mut atoms = Vec::new();
        if self.eat("]") {
            return Ok(atoms);
        }
        loop {
            atoms.push(self.atom()?);
            if self.eat("]") {
                return Ok(atoms);
            }
            self.expect(",")?;
        }
    }

    /// `%7`
    pub(super) fn node(&mut self) -> Result<NodeId, ParseErrorKind> {
        self.expect("%")?;
        let found = self.expected("the number of a node");
        self.word("the number of a node")?.parse().map(NodeId).map_err(|_| found)
    }

    /// `: f32[8,10]`, to the end of the line or an attribute.
    pub(super) fn ty(&mut self) -> Result<TensorType, ParseErrorKind> {
        self.expect(":")?;
        let found = self.expected("a dtype");
        let dtype = DType::from_str(self.word("a dtype")?).map_err(|()| found)?;
        let found = self.expected("sizes");
        let sizes = self.list()?.into_iter().map(str::parse).collect::<Result<Shape, _>>();
        Ok(TensorType::new(dtype, sizes.map_err(|_| found)?))
    }

    /// A name in double quotes, with the escapes of a Rust string.
    pub(super) fn name(&mut self) -> Result<String, ParseErrorKind> {
        let unclosed = self.expected("a name in double quotes");
        if !self.sees("\"") {
            return Err(unclosed);
        }
        let mut name = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.advance(at + 1);
                    return Ok(name);
                }
                '\\' => name.push(escaped(&mut chars).ok_or_else(|| unclosed.clone())?),
                c => name.push(c),
            }
        }
        Err(unclosed)
    }
}

/// The character that an escape stands for, after its backslash.
fn escaped(chars: &mut impl Iterator<Item = (usize, char)>) -> Option<char> {
    match chars.next()?.1 {
        'n' => Some('\n'),
        'r' => Some('\r'),
        't' => Some('\t'),
        '0' => Some('\0'),
        c @ ('\\' | '"' | '\'') => Some(c),
        'u' => {
            let (_, '{') = chars.next()? else { return None };
            let digits: String = chars.map(|(_, c)| c).take_while(|&c| c != '}').take(7).collect();
            char::from_u32(u32::from_str_radix(&digits, 16).ok()?)
        }
        _ => None,
    }
}
