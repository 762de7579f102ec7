//! The raw results as a file: one test a line, so that changes read well.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::outcome::Outcome;

/// Why a report cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
}

/// All outcomes of a run, and of what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The commit of the tree that was measured.
    pub commit: String,
    pub device: String,
    /// Sorted by test.
    pub tests: Vec<Outcome>,
}

impl Report {
    pub fn new(commit: String, device: String, mut tests: Vec<Outcome>) -> Self {
        tests.sort_by(|a, b| a.test.cmp(&b.test));
        Report { commit, device, tests }
    }

    pub fn read(path: &Path) -> Result<Self, ReportError> {
        let text = fs::read_to_string(path).map_err(|source| ReportError::Io { path: path.to_owned(), source })?;
        serde_json::from_str(&text).map_err(|source| ReportError::Json { path: path.to_owned(), source })
    }

    pub fn write(&self, path: &Path) -> Result<(), ReportError> {
        let text = self.text().map_err(|source| ReportError::Json { path: path.to_owned(), source })?;
        fs::write(path, text).map_err(|source| ReportError::Io { path: path.to_owned(), source })
    }

    fn text(&self) -> Result<String, serde_json::Error> {
        let tests = self.tests.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        let (commit, device) = (serde_json::to_string(&self.commit)?, serde_json::to_string(&self.device)?);
        Ok(format!("{{\"commit\": {commit},\n\"device\": {device},\n\"tests\": [\n{}\n]}}\n", tests.join(",\n")))
    }

    /// What differs from `committed`, in words: tests that came, went, or have another outcome.
    pub fn differences(&self, committed: &Report) -> Vec<String> {
        let by_test = |report: &Report| -> BTreeMap<String, Outcome> {
            report.tests.iter().map(|outcome| (outcome.test.clone(), outcome.clone())).collect()
        };
        let (now, before) = (by_test(self), by_test(committed));
        let gone = before.keys().filter(|test| !now.contains_key(*test)).map(|test| format!("{test}: gone"));
        let changed = now.iter().filter_map(|(test, outcome)| match before.get(test) {
            None => Some(format!("{test}: new")),
            Some(was) if was.agrees(outcome) => None,
            Some(was) => Some(format!("{test}: {}; it was {}", describe(outcome), describe(was))),
        });
        gone.chain(changed).collect()
    }
}

/// An outcome on one line.
pub fn describe(outcome: &Outcome) -> String {
    let gradient = outcome.gradient.as_ref().map_or_else(String::new, |g| format!(", {}", g.text()));
    format!("{}{gradient}", outcome.status.text())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Gradient, Status};
    use crate::refusal::Reason;

    fn outcome(test: &str, status: Status, gradient: Option<Gradient>) -> Outcome {
        Outcome { test: test.to_owned(), operator: Some("Abs".to_owned()), opset: Some(13), status, gradient }
    }

    fn report(tests: Vec<Outcome>) -> Report {
        Report::new("c0ffee".to_owned(), "a device".to_owned(), tests)
    }

    #[test]
    fn a_report_survives_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("coverage.json");
        let refused = Status::Refused { reason: Reason::RandomNumbers, detail: "no \"rule\"".to_owned() };
        let tests =
            vec![outcome("node/b", Status::Pass, Some(Gradient::Ok { checked: 3, kinks: 1 })), outcome("node/a", refused, None)];
        let written = report(tests);
        written.write(&path).unwrap();
        assert_eq!(Report::read(&path).unwrap(), written);
        assert_eq!(written.tests[0].test, "node/a");
    }

    #[test]
    fn differences_are_outcomes_not_wordings() {
        let refused = |reason, detail: &str| Status::Refused { reason, detail: detail.to_owned() };
        let before = report(vec![
            outcome("a", Status::Pass, Some(Gradient::Ok { checked: 3, kinks: 0 })),
            outcome("b", refused(Reason::Form, "x"), None),
            outcome("c", Status::Pass, None),
        ]);
        let same = report(vec![
            outcome("a", Status::Pass, Some(Gradient::Ok { checked: 5, kinks: 1 })),
            outcome("b", refused(Reason::Form, "y"), None),
            outcome("c", Status::Pass, None),
        ]);
        assert_eq!(same.differences(&before), Vec::<String>::new());
        let other = report(vec![
            outcome("a", Status::Pass, None),
            outcome("b", refused(Reason::ControlFlow, "x"), None),
            outcome("d", Status::Pass, None),
        ]);
        let found = other.differences(&before);
        assert_eq!(found.iter().map(|d| &d[..1]).collect::<Vec<_>>(), ["c", "a", "b", "d"], "{found:?}");
    }
}
