//! `cargo xtask corpus`: ONNX's backend tests on this machine's device, and the coverage document from the results.

use std::path::Path;

use crate::shell::{Invocation, Workspace, XtaskError, step};
use crate::{python, vulkan};

/// Where the tests lie in the ONNX package.
const DATA: &str = "backend/test/data";
const JSON: &str = "docs/coverage.json";
const MARKDOWN: &str = "docs/COVERAGE.md";

/// Runs all tests and writes `docs/coverage.json` and `docs/COVERAGE.md`, or compares them if `options` hold `--check`.
/// Options are those of the program `conformance`; with `--filter TEXT` only some tests run, and nothing is written. With `--unsaturated` graphs
/// run as the files say: `--check --unsaturated` shows that rewriting changes no outcome.
pub fn run(workspace: &Workspace, options: &[String]) -> Result<(), XtaskError> {
    vulkan::ensure()?;
    let python = python::ensure(workspace)?;
    conformance(workspace, &python, options)
}

/// As [`run`], where a device and the Python environment are known to be there.
pub fn conformance(workspace: &Workspace, python: &Path, options: &[String]) -> Result<(), XtaskError> {
    step("build", workspace.cargo(&["build", "--release", "--package", "conformance"]))?;
    let data = python::package(python, "onnx")?.join(DATA);
    let mut conformance = Invocation::new(workspace.program("conformance")).arguments(&["--data".as_ref(), data.as_os_str()]);
    if !options.iter().any(|option| option.starts_with("--filter")) {
        let commit = Invocation::new("git").arguments(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]);
        let commit = commit.output().unwrap_or_default();
        conformance = conformance.arguments(&["--commit", &commit, "--json", JSON, "--markdown", MARKDOWN]);
    }
    step("conformance", conformance.arguments(options))?;
    Ok(())
}
