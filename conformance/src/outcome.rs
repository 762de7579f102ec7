//! What came of a test. The JSON form is what `docs/coverage.json` holds.

use serde::{Deserialize, Serialize};

use crate::refusal::Reason;

/// A test and what came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Folder and name: `node/test_abs`.
    pub test: String,
    /// The operator under test; absent for whole models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opset: Option<i64>,
    #[serde(flatten)]
    pub status: Status,
    /// Absent where the outputs are no float functions of float inputs or weights, and where the test did not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient: Option<Gradient>,
}

/// What came of the forward run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Status {
    /// Right, and the device computed every output from an input.
    Pass,
    /// Right, but some output does not depend on what the model is run on.
    Folded,
    /// An error that says what is not supported.
    Refused { reason: Reason, detail: String },
    /// Another result than expected.
    Wrong { detail: String },
    /// A panic, a crash or a hang.
    Crashed { detail: String },
}

/// What came of comparing the compiled gradient with finite differences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Gradient {
    /// Right along every direction that was `checked`; `kinks` more are no derivative at all.
    Ok {
        checked: usize,
        kinks: usize,
    },
    Wrong {
        detail: String,
    },
    /// No direction has a derivative.
    Kinks {
        kinks: usize,
    },
    /// An operator on the way has no derivative.
    Undefined {
        reason: String,
    },
    /// Not compared.
    Refused {
        reason: String,
    },
}

impl Outcome {
    pub fn folder(&self) -> &str {
        self.test.split_once('/').map_or("", |(folder, _)| folder)
    }

    /// Whether this tests an operator itself and not the function that ONNX defines it by.
    pub fn is_plain(&self) -> bool {
        !self.test.contains("_expanded")
    }

    /// Whether something is wrong that no refusal explains.
    pub fn is_fault(&self) -> bool {
        let fault =
            matches!(self.status, Status::Refused { reason: Reason::Other, .. } | Status::Wrong { .. } | Status::Crashed { .. });
        fault || matches!(self.gradient, Some(Gradient::Wrong { .. }))
    }

    /// Whether two runs agree on all that does not depend on the device's arithmetic or on the wording of messages.
    pub fn agrees(&self, other: &Outcome) -> bool {
        let gradient = |outcome: &Outcome| outcome.gradient.as_ref().map(std::mem::discriminant);
        let identity = |outcome: &Outcome| (outcome.test.clone(), outcome.operator.clone(), outcome.opset);
        identity(self) == identity(other) && self.status.agrees(&other.status) && gradient(self) == gradient(other)
    }
}

impl Status {
    fn agrees(&self, other: &Status) -> bool {
        match (self, other) {
            (Status::Refused { reason: a, .. }, Status::Refused { reason: b, .. }) => a == b,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// One word, and what there is to say.
    pub fn text(&self) -> String {
        match self {
            Status::Pass => "pass".to_owned(),
            Status::Folded => "folded".to_owned(),
            Status::Refused { reason, detail } => format!("refused ({reason}): {detail}"),
            Status::Wrong { detail } => format!("WRONG: {detail}"),
            Status::Crashed { detail } => format!("CRASHED: {detail}"),
        }
    }
}

impl Gradient {
    pub fn text(&self) -> String {
        match self {
            Gradient::Ok { checked, kinks } => format!("gradient right along {checked} directions, {kinks} kinks"),
            Gradient::Wrong { detail } => format!("gradient WRONG: {detail}"),
            Gradient::Kinks { kinks } => format!("gradient: {kinks} kinks only"),
            Gradient::Undefined { reason } => format!("gradient: {reason}"),
            Gradient::Refused { reason } => format!("gradient refused: {reason}"),
        }
    }
}
