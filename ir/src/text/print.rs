//! Graph to text.

use std::fmt;

use super::op::attributes;
use super::role_name;
use crate::{Graph, InputId, Node, NodeId, Op, ParameterId};

impl fmt::Display for Graph {
    /// The [text form](crate::text).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for input in self.inputs() {
            writeln!(f, "input {:?} : {}", input.name, input.ty)?;
        }
        for p in self.parameters() {
            writeln!(f, "parameter {:?} : {} {{stored={}, role={}}}", p.name, p.ty, p.stored, role_name(p.role))?;
        }
        for id in self.ids() {
            write_node(f, self, id, self.node(id))?;
        }
        for output in self.outputs() {
            writeln!(f, "output {:?} = %{}", output.name, output.node.0)?;
        }
        for update in self.updates() {
            let name = &self.parameters()[update.parameter.0 as usize].name;
            writeln!(f, "update {name:?} = %{}", update.node.0)?;
        }
        Ok(())
    }
}

fn write_node(f: &mut fmt::Formatter<'_>, g: &Graph, id: NodeId, node: &Node) -> fmt::Result {
    write!(f, "%{} = {}", id.0, node.op.name())?;
    match node.op {
        Op::Input(InputId(i)) => write!(f, " {:?}", g.inputs()[i as usize].name)?,
        Op::Parameter(ParameterId(p)) => write!(f, " {:?}", g.parameters()[p as usize].name)?,
        _ => {}
    }
    for operand in &node.operands {
        write!(f, " %{}", operand.0)?;
    }
    let attributes: Vec<String> = attributes(&node.op).into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    if !attributes.is_empty() {
        write!(f, " {{{}}}", attributes.join(", "))?;
    }
    writeln!(f, " : {}", node.ty)
}
