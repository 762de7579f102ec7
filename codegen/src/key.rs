//! The name of a plan: all that decides which program a graph becomes.

use std::fmt;
use std::hash::{Hash, Hasher};

use meganeura_ir::Verified;
use sha2::{Digest, Sha256};

use crate::{CompileOptions, DeviceProfile};

/// A hash of a graph with its attributes, names and constants, of the device's profile, of the options, and of the compiler itself. Equal
/// keys mean equal programs. Keys of other machines and versions mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanKey([u8; 32]);

impl PlanKey {
    pub fn new(graph: &Verified, profile: &DeviceProfile, options: &CompileOptions) -> Self {
        let mut hasher = Sha256Hasher(Sha256::new());
        (env!("CARGO_PKG_VERSION"), env!("MEGANEURA_CODEGEN_SOURCES"), usize::BITS, profile, options).hash(&mut hasher);
        (graph.inputs(), graph.parameters(), graph.nodes(), graph.outputs(), graph.updates()).hash(&mut hasher);
        PlanKey(hasher.0.finalize().into())
    }

    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for PlanKey {
    /// Hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Feeds what [`Hash`] tells of a value to SHA-256: derived, it tells all of it, and no value's bytes begin another's.
struct Sha256Hasher(Sha256);

impl Hasher for Sha256Hasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = self.0.clone().finalize().into();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::{DType, Graph, Tensor, TensorType, UnaryOp};

    use super::*;
    use crate::saturate::Limits;

    fn graph(input: &str, output: &str, op: UnaryOp, constant: f32) -> Verified {
        let mut g = Graph::new();
        let x = g.input(input, TensorType::new(DType::F32, [2, 3])).unwrap();
        let c = g.constant(Tensor::from_f32([2, 3], &[constant; 6])).unwrap();
        let y = g.unary(op, x).unwrap();
        let y = g.add(y, c).unwrap();
        g.output(output, y).unwrap();
        g.verify().unwrap()
    }

    #[test]
    fn whatever_changes_the_program_changes_the_key() {
        let profile = DeviceProfile::generic();
        let options = CompileOptions::default();
        let known = graph("x", "y", UnaryOp::Exp, 1.0);
        let key = |graph: &Verified| PlanKey::new(graph, &profile, &options);
        assert_eq!(key(&known), key(&graph("x", "y", UnaryOp::Exp, 1.0)));
        let others = [
            key(&graph("z", "y", UnaryOp::Exp, 1.0)),
            key(&graph("x", "z", UnaryOp::Exp, 1.0)),
            key(&graph("x", "y", UnaryOp::Log, 1.0)),
            key(&graph("x", "y", UnaryOp::Exp, f32::from_bits(1.0f32.to_bits() + 1))),
            PlanKey::new(&known, &DeviceProfile::software(), &options),
            PlanKey::new(&known, &DeviceProfile { compute_units: 33, ..profile.clone() }, &options),
            PlanKey::new(&known, &profile, &CompileOptions { saturate: None, ..options.clone() }),
            PlanKey::new(&known, &profile, &CompileOptions { memory_limit: Some(1 << 20), ..options.clone() }),
            PlanKey::new(
                &known,
                &profile,
                &CompileOptions { saturate: Some(Limits { iterations: 3, ..Limits::default() }), ..options.clone() },
            ),
        ];
        for (i, other) in others.iter().enumerate() {
            assert!(*other != key(&known) && !others[..i].contains(other), "change {i}");
        }
    }
}
