//! Text to graph.

use std::str::FromStr;

use super::attributes::Attributes;
use super::cursor::Cursor;
use super::{ParseError, ParseErrorKind, ROLES, op, role_name};
use crate::{DType, Graph, InputId, InputInfo, NodeId, Op, ParameterInfo};

/// The graph that `text` describes; every line is type-checked.
///
/// # Errors
/// The first line that is malformed, or that no graph can hold.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let mut g = Graph::new();
    for (i, line) in text.lines().enumerate() {
        parse_line(&mut g, line).map_err(|kind| ParseError { line: i + 1, kind })?;
    }
    Ok(g)
}

fn parse_line(g: &mut Graph, line: &str) -> Result<(), ParseErrorKind> {
    let mut cursor = Cursor::new(line);
    if cursor.at_end() || cursor.sees("#") {
        return Ok(());
    }
    if cursor.sees("%") {
        node(g, &mut cursor)?;
    } else {
        let unknown = cursor.expected("a declaration, a node, an output or an update");
        match cursor.word("a line of a graph")? {
            "input" => {
                g.declare_input(InputInfo { name: cursor.name()?, ty: cursor.ty()? })?;
            }
            "parameter" => {
                g.declare_parameter(parameter(&mut cursor)?)?;
            }
            "output" => {
                let (name, node) = named_node(&mut cursor)?;
                g.output(name, node)?;
            }
            "update" => {
                let (name, node) = named_node(&mut cursor)?;
                let parameter = g.parameter_id(&name).ok_or(ParseErrorKind::UnknownName(name))?;
                g.update(parameter, node)?;
            }
            _ => return Err(unknown),
        }
    }
    if cursor.at_end() { Ok(()) } else { Err(cursor.expected("the end of the line")) }
}

/// `"name" = %7`
fn named_node(cursor: &mut Cursor) -> Result<(String, NodeId), ParseErrorKind> {
    let name = cursor.name()?;
    cursor.expect("=")?;
    Ok((name, cursor.node()?))
}

fn parameter(cursor: &mut Cursor) -> Result<ParameterInfo, ParseErrorKind> {
    let (name, ty) = (cursor.name()?, cursor.ty()?);
    let mut attributes = Attributes::parse(cursor)?;
    let stored = attributes.atom("stored")?;
    let role = attributes.atom("role")?;
    attributes.finish()?;
    let unexpected = |expected, found: &str| ParseErrorKind::Expected { expected, found: found.into() };
    Ok(ParameterInfo {
        name,
        ty,
        stored: DType::from_str(stored).map_err(|()| unexpected("a dtype", stored))?,
        role: ROLES.into_iter().find(|&r| role_name(r) == role).ok_or_else(|| unexpected("a role", role))?,
    })
}

/// `%7 = op "name" %3 %5 {key=value} : f32[8,10]`
fn node(g: &mut Graph, cursor: &mut Cursor) -> Result<(), ParseErrorKind> {
    let id = cursor.node()?;
    if id.index() != g.nodes().len() {
        return Err(ParseErrorKind::Numbering(g.nodes().len()));
    }
    cursor.expect("=")?;
    let name = cursor.word("the name of an op")?;
    let leaf = match name {
        "input" => {
            let name = cursor.name()?;
            let at = g.inputs().iter().position(|i| i.name == name).ok_or(ParseErrorKind::UnknownName(name))?;
            Some(Op::Input(InputId(at as u32)))
        }
        "parameter" => {
            let name = cursor.name()?;
            Some(Op::Parameter(g.parameter_id(&name).ok_or(ParseErrorKind::UnknownName(name))?))
        }
        _ => None,
    };
    let mut operands = Vec::new();
    while leaf.is_none() && cursor.sees("%") {
        operands.push(cursor.node()?);
    }
    let mut attributes = Attributes::parse(cursor)?;
    let declared = cursor.ty()?;
    let op = match leaf {
        Some(op) => op,
        None => op::parse(name, &mut attributes, &declared)?,
    };
    attributes.finish()?;
    let pushed = g.push(op, &operands)?;
    if pushed != id {
        return Err(ParseErrorKind::Duplicate(pushed.0));
    }
    let inferred = g.ty(pushed);
    if *inferred != declared {
        return Err(ParseErrorKind::Type { declared, inferred: inferred.clone() });
    }
    Ok(())
}
