//! `{key=value, ..}`: what a line says beyond names, operands and types.

use std::str::FromStr;

use super::ParseErrorKind;
use super::cursor::Cursor;
use crate::Real;

enum Content<'a> {
    /// `1`
    Atom(&'a str),
    /// `[0,2]`
    List(Vec<&'a str>),
    /// `[1]x[0]`
    Pair(Vec<&'a str>, Vec<&'a str>),
}

/// The attributes of a line that have not been read yet.
pub(super) struct Attributes<'a>(Vec<(&'a str, Content<'a>)>);

impl<'a> Attributes<'a> {
    /// None, if no brace stands next.
    pub(super) fn parse(cursor: &mut Cursor<'a>) -> Result<Self, ParseErrorKind> {
        let mut attributes: Vec<(&str, Content)> = Vec::new();
        if !cursor.eat("{") {
            return Ok(Attributes(attributes));
        }
        loop {
            let key = cursor.word("an attribute")?;
            if attributes.iter().any(|(k, _)| *k == key) {
                return Err(ParseErrorKind::UnexpectedAttribute(key.into()));
            }
            cursor.expect("=")?;
            let content = if !cursor.sees("[") {
                Content::Atom(cursor.atom()?)
            } else {
                let left = cursor.list()?;
                if cursor.eat("x") { Content::Pair(left, cursor.list()?) } else { Content::List(left) }
            };
            attributes.push((key, content));
            if cursor.eat("}") {
                return Ok(Attributes(attributes));
            }
            cursor.expect(",")?;
        }
    }

    fn take(&mut self, key: &'static str) -> Option<Content<'a>> {
        let at = self.0.iter().position(|(k, _)| *k == key)?;
        Some(self.0.remove(at).1)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(k, _)| *k == key)
    }

    pub(super) fn atom(&mut self, key: &'static str) -> Result<&'a str, ParseErrorKind> {
        match self.take(key) {
            Some(Content::Atom(text)) => Ok(text),
            Some(_) => Err(ParseErrorKind::UnexpectedAttribute(key.into())),
            None => Err(ParseErrorKind::MissingAttribute(key)),
        }
    }

    pub(super) fn list(&mut self, key: &'static str) -> Result<Vec<&'a str>, ParseErrorKind> {
        match self.take(key) {
            Some(Content::List(atoms)) => Ok(atoms),
            Some(_) => Err(ParseErrorKind::UnexpectedAttribute(key.into())),
            None => Err(ParseErrorKind::MissingAttribute(key)),
        }
    }

    pub(super) fn number<T: FromStr>(&mut self, key: &'static str) -> Result<T, ParseErrorKind> {
        number(self.atom(key)?)
    }

    pub(super) fn numbers<T: FromStr>(&mut self, key: &'static str) -> Result<Vec<T>, ParseErrorKind> {
        self.list(key)?.into_iter().map(number).collect()
    }

    /// `[1:0,-2:3]`
    pub(super) fn pads(&mut self, key: &'static str) -> Result<Vec<(isize, isize)>, ParseErrorKind> {
        let pad = |text: &'a str| {
            let (low, high) = text.split_once(':').ok_or_else(|| not_a_number(text))?;
            Ok((number(low)?, number(high)?))
        };
        self.list(key)?.into_iter().map(pad).collect()
    }

    /// Two lists of axes; both empty if the attribute is absent.
    pub(super) fn axis_pair(&mut self, key: &'static str) -> Result<(Vec<usize>, Vec<usize>), ParseErrorKind> {
        let axes = |atoms: Vec<&'a str>| atoms.into_iter().map(number).collect::<Result<Vec<usize>, _>>();
        match self.take(key) {
            Some(Content::Pair(left, right)) => Ok((axes(left)?, axes(right)?)),
            Some(_) => Err(ParseErrorKind::UnexpectedAttribute(key.into())),
            None => Ok((Vec::new(), Vec::new())),
        }
    }

    /// A decimal number, or the bits of an `f64` in hexadecimal.
    pub(super) fn real(&mut self, key: &'static str) -> Result<Real, ParseErrorKind> {
        let text = self.atom(key)?;
        match text.strip_prefix("0x") {
            Some(digits) => {
                u64::from_str_radix(digits, 16).map(|bits| Real(f64::from_bits(bits))).map_err(|_| not_a_number(text))
            }
            None => number(text).map(Real),
        }
    }

    /// Checks that every attribute has been read.
    pub(super) fn finish(self) -> Result<(), ParseErrorKind> {
        match self.0.first() {
            Some((key, _)) => Err(ParseErrorKind::UnexpectedAttribute((*key).into())),
            None => Ok(()),
        }
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, ParseErrorKind> {
    text.parse().map_err(|_| not_a_number(text))
}

fn not_a_number(text: &str) -> ParseErrorKind {
    ParseErrorKind::Expected { expected: "a number that fits", found: text.chars().take(20).collect() }
}
