//! The closed list of reasons for which a test is refused, and how errors map to it.

use std::fmt;

use meganeura_codegen::CompileError;
use meganeura_import::{ImportError, OpError, Outline, TensorError, UnsupportedOp, ValueKind};
use meganeura_runtime::{DeviceError, ParameterError, SessionError};
use serde::{Deserialize, Serialize};

/// Why a test is refused. Earlier ones count where several apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    Strings,
    Sequences,
    Optionals,
    NarrowTypes,
    ImageDecoder,
    MachineLearning,
    TrainingGradient,
    RandomNumbers,
    DataDependentShape,
    ControlFlow,
    OldOpset,
    Operator,
    Form,
    IntegerRange,
    FloatRange,
    TooLarge,
    /// Anything else: a fault of ours.
    Other,
}

impl Reason {
    pub const ALL: [Reason; 17] = [
        Reason::Strings,
        Reason::Sequences,
        Reason::Optionals,
        Reason::NarrowTypes,
        Reason::ImageDecoder,
        Reason::MachineLearning,
        Reason::TrainingGradient,
        Reason::RandomNumbers,
        Reason::DataDependentShape,
        Reason::ControlFlow,
        Reason::OldOpset,
        Reason::Operator,
        Reason::Form,
        Reason::IntegerRange,
        Reason::FloatRange,
        Reason::TooLarge,
        Reason::Other,
    ];

    fn text(self) -> &'static str {
        match self {
            Reason::Strings => "strings",
            Reason::Sequences => "sequences",
            Reason::Optionals => "optional values",
            Reason::NarrowTypes => "floats of 8 bits or fewer, integers of fewer than 8",
            Reason::ImageDecoder => "image files",
            Reason::MachineLearning => "operators of ai.onnx.ml",
            Reason::TrainingGradient => "ONNX's own gradient operator",
            Reason::RandomNumbers => "random numbers, which the standard does not fix",
            Reason::DataDependentShape => "shapes that depend on data",
            Reason::ControlFlow => "control flow that depends on data",
            Reason::OldOpset => "operator sets before 6",
            Reason::Operator => "operators without a rule",
            Reason::Form => "attributes, operands or forms of an operator without a rule",
            Reason::IntegerRange => "64-bit integers beyond 32 bits",
            Reason::FloatRange => "64-bit floats beyond the range of 32 bits",
            Reason::TooLarge => "too large for the device",
            Reason::Other => "unexplained",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Operators that are missing for a reason, without their domain.
const OPERATORS: &[(Reason, &[&str])] = &[
    (
        Reason::Strings,
        &[
            "LabelEncoder",
            "RegexFullMatch",
            "StringConcat",
            "StringNormalizer",
            "StringSplit",
            "TfIdfVectorizer",
            "CategoryMapper",
        ],
    ),
    (
        Reason::Sequences,
        &[
            "ConcatFromSequence",
            "SequenceAt",
            "SequenceConstruct",
            "SequenceEmpty",
            "SequenceErase",
            "SequenceInsert",
            "SequenceLength",
            "SequenceMap",
            "SplitToSequence",
        ],
    ),
    (Reason::Optionals, &["Optional", "OptionalGetElement", "OptionalHasElement"]),
    (Reason::ImageDecoder, &["ImageDecoder"]),
    (Reason::TrainingGradient, &["Gradient"]),
    (Reason::DataDependentShape, &["Compress", "NonMaxSuppression", "NonZero", "Unique"]),
    (Reason::ControlFlow, &["If", "Loop", "Scan"]),
];

/// The reason for which a model cannot be imported or specialised.
pub fn of_import(error: &ImportError, outline: &Outline) -> Reason {
    let interface = || outline.inputs.iter().chain(&outline.outputs).filter_map(of_kind).min();
    match error {
        ImportError::UnsupportedOps(ops) => ops.iter().map(of_operator).chain(interface()).min().unwrap_or(Reason::Other),
        ImportError::InputType { .. } | ImportError::OutputType { .. } => interface().unwrap_or(Reason::Other),
        ImportError::Opset(_) => Reason::OldOpset,
        ImportError::Tensor { source, .. } => of_tensor(source),
        ImportError::ValuesNeeded { what: "a shape", .. } => Reason::DataDependentShape,
        ImportError::ValuesNeeded { .. } => Reason::ControlFlow,
        ImportError::Node { source, .. } => of_node(source),
        ImportError::IntegerRange { .. } => Reason::IntegerRange,
        _ => Reason::Other,
    }
}

fn of_kind(kind: &ValueKind) -> Option<Reason> {
    match kind {
        ValueKind::Tensor(name) => of_element(name),
        ValueKind::Sequence => Some(Reason::Sequences),
        ValueKind::Optional => Some(Reason::Optionals),
        ValueKind::SparseTensor | ValueKind::Map | ValueKind::Undeclared => None,
    }
}

/// The reason that lies in an element type, by its name in the standard.
fn of_element(name: &str) -> Option<Reason> {
    const NARROW: [&str; 6] = ["float8", "float4", "int4", "uint4", "int2", "uint2"];
    match name {
        "string" => Some(Reason::Strings),
        _ => NARROW.iter().any(|narrow| name.starts_with(narrow)).then_some(Reason::NarrowTypes),
    }
}

fn of_operator(op: &UnsupportedOp) -> Reason {
    let listed = OPERATORS.iter().find(|(_, names)| names.contains(&op.op.as_str()));
    match (listed, op.domain.as_str()) {
        (Some((reason, _)), _) => *reason,
        (None, "ai.onnx.ml") => Reason::MachineLearning,
        _ => Reason::Operator,
    }
}

fn of_tensor(error: &TensorError) -> Reason {
    match error {
        TensorError::DType(name) => of_element(name).unwrap_or(Reason::Other),
        TensorError::Range(_) => Reason::FloatRange,
        _ => Reason::Other,
    }
}

fn of_node(error: &OpError) -> Reason {
    match error {
        OpError::Unsupported { .. } => Reason::Form,
        OpError::NotStatic { .. } => Reason::DataDependentShape,
        OpError::Undecided { .. } => Reason::ControlFlow,
        OpError::Limit { .. } => Reason::TooLarge,
        OpError::Tensor(source) => of_tensor(source),
        OpError::Inner(source) => of_import(source, &Outline::default()),
        _ => Reason::Other,
    }
}

pub fn of_compile(error: &CompileError) -> Reason {
    match error {
        CompileError::TensorTooLarge { .. } | CompileError::KernelLimit { .. } => Reason::TooLarge,
        _ => Reason::Other,
    }
}

pub fn of_session(error: &SessionError) -> Reason {
    match error {
        SessionError::Word(_) => Reason::IntegerRange,
        SessionError::Device(error) | SessionError::Parameter(ParameterError::Device(error)) => of_device(error),
        SessionError::Parameter(ParameterError::Word(_)) => Reason::IntegerRange,
        _ => Reason::Other,
    }
}

fn of_device(error: &DeviceError) -> Reason {
    if error.is_out_of_memory() { Reason::TooLarge } else { Reason::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsupported(domain: &str, op: &str) -> UnsupportedOp {
        UnsupportedOp { domain: domain.to_owned(), op: op.to_owned(), opset: None, node: String::new(), count: 1 }
    }

    #[test]
    fn every_reason_is_listed_once_and_in_order() {
        assert!(Reason::ALL.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn the_gravest_reason_counts() {
        let missing = |ops: &[(&str, &str)]| {
            let ops = ops.iter().map(|(domain, op)| unsupported(domain, op)).collect();
            of_import(&ImportError::UnsupportedOps(ops), &Outline::default())
        };
        assert_eq!(missing(&[("", "Frobnicate"), ("", "Loop")]), Reason::ControlFlow);
        assert_eq!(missing(&[("", "Loop"), ("", "SequenceInsert")]), Reason::Sequences);
        assert_eq!(missing(&[("ai.onnx.ml", "TreeEnsemble")]), Reason::MachineLearning);
        assert_eq!(missing(&[("", "Frobnicate")]), Reason::Operator);
    }

    #[test]
    fn the_interface_explains_more_than_the_error() {
        let outline = Outline { outputs: vec![ValueKind::Tensor("float8e4m3fn".to_owned())], ..Outline::default() };
        assert_eq!(of_import(&ImportError::UnsupportedOps(vec![unsupported("", "Loop")]), &outline), Reason::NarrowTypes);
        assert_eq!(of_import(&ImportError::NoGraph, &Outline::default()), Reason::Other);
    }
}
