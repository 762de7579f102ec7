//! The text form of graphs, for golden tests and bug reports.
//!
//! One line declares an input or a parameter, defines a node, names an output, or states an update:
//!
//! ```text
//! input "x" : f32[8,10]
//! parameter "fc.weight" : f32[10,10] {stored=f16, role=weight}
//! %0 = input "x" : f32[8,10]
//! %1 = parameter "fc.weight" : f32[10,10]
//! %2 = dot %0 %1 {contract=[1]x[1]} : f32[8,10]
//! output "y" = %2
//! update "fc.weight" = %1
//! ```
//!
//! Nodes are numbered in order, from 0. Attributes that the result's type holds (the dtype of a cast, the shape of a reshape) are not
//! repeated. Constants of up to 64 elements list their `values`, others their little-endian `bytes` in hexadecimal. Empty lines and lines that start with `#` mean nothing.

mod attributes;
mod constant;
mod cursor;
mod op;
mod parse;
mod print;

pub use parse::parse;

use crate::{Graph, GraphError, ParameterRole, TensorSizeError, TensorType};

/// The text form of `g`, from which [`parse`] makes an equal graph.
pub fn print(g: &Graph) -> String {
    g.to_string()
}

/// A line that is not part of a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {kind}")]
pub struct ParseError {
    /// Counted from 1.
    pub line: usize,
    pub kind: ParseErrorKind,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseErrorKind {
    #[error("expected {expected}, found {found:?}")]
    Expected { expected: &'static str, found: String },
    #[error("no op is called {0:?}")]
    UnknownOp(String),
    #[error("no input or parameter is called {0:?}")]
    UnknownName(String),
    #[error("the next node is %{0}")]
    Numbering(usize),
    #[error("this is %{0} again")]
    Duplicate(u32),
    #[error("{0} is missing")]
    MissingAttribute(&'static str),
    #[error("the attribute {0:?} does not belong here")]
    UnexpectedAttribute(String),
    #[error("the op gives {inferred}, not {declared}")]
    Type { declared: TensorType, inferred: TensorType },
    #[error("{ty} has no element {text:?}")]
    Element { ty: TensorType, text: String },
    #[error(transparent)]
    Size(#[from] TensorSizeError),
    #[error(transparent)]
    Graph(#[from] GraphError),
}

const ROLES: [ParameterRole; 3] = [ParameterRole::Weight, ParameterRole::Statistic, ParameterRole::Optimizer];

fn role_name(role: ParameterRole) -> &'static str {
    match role {
        ParameterRole::Weight => "weight",
        ParameterRole::Statistic => "statistic",
        ParameterRole::Optimizer => "optimizer",
    }
}

#[cfg(test)]
mod tests;
