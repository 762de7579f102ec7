//! `cargo xtask test`: everything that CI checks.

use crate::shell::{Invocation, Workspace, XtaskError, file_size, heading, step};
use crate::{bench, chromium, corpus, published, python, vulkan};

/// rustup components that the checks need, each with the command that shows it is there.
const COMPONENTS: &[(&str, &[&str])] = &[("rustfmt", &["fmt", "--version"]), ("clippy", &["clippy", "--version"])];

/// Programs that show how the library is used.
const EXAMPLES: [&str; 2] = ["fine_tune", "personalise"];

/// Steps between the preparations and the tests: name, arguments of cargo. One profile throughout, so dependencies are built once.
const CHECKS: &[(&str, &[&str])] = &[
    ("format", &["fmt", "--all", "--check"]),
    ("lints", &["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ("binary", &["build", "--release", "--package", "meganeura", "--bin", "meganeura"]),
    ("documentation tests", &["test", "--release", "--workspace", "--doc"]),
];

/// How long each fuzz target runs.
const FUZZ_SECONDS: &str = "60";

const NEXTEST: &[&str] = &["nextest", "run", "--release", "--workspace"];
const LIBTEST: &[&str] = &["test", "--release", "--workspace", "--tests"];

/// Prepares the machine, then checks format, lints, documentation tests, that the import bears damaged
/// files, that ONNX's backend tests give what `docs/` says, and last all tests, whose summary ends the output.
///
/// Tests find the Python of the interoperability test in `MEGANEURA_PYTHON`, and the browser that looks at the server's page in
/// `MEGANEURA_CHROMIUM`.
pub fn run(workspace: &Workspace) -> Result<(), XtaskError> {
    vulkan::ensure()?;
    for (component, probe) in COMPONENTS {
        ensure_component(workspace, component, probe)?;
    }
    let python = python::ensure(workspace)?;
    let chromium = chromium::ensure()?;
    published::fetch(&python)?;
    for (name, arguments) in CHECKS {
        step(name, workspace.cargo(arguments))?;
    }
    for example in EXAMPLES {
        let arguments = ["run", "--release", "--quiet", "--package", "meganeura", "--example", example];
        step("example", workspace.cargo(&arguments))?;
    }
    print_size(workspace)?;
    bench::check()?;
    for target in ["bytes", "models"] {
        let fuzz = ["run", "--release", "--quiet", "--package", "fuzz", "--", target, "--seconds", FUZZ_SECONDS];
        step("fuzz", workspace.cargo(&fuzz))?;
    }
    corpus::conformance(workspace, &python, &["--check".to_owned()])?;
    let has_nextest = workspace.cargo(&["nextest", "--version"]).succeeds();
    let tests = workspace.cargo(if has_nextest { NEXTEST } else { LIBTEST }).environment("MEGANEURA_PYTHON", python);
    let tests = tests.environment("MEGANEURA_CHROMIUM", chromium);
    heading("tests", &tests.to_string());
    tests.run()
}

fn ensure_component(workspace: &Workspace, component: &str, probe: &[&str]) -> Result<(), XtaskError> {
    if workspace.cargo(probe).succeeds() {
        return Ok(());
    }
    step(component, Invocation::new("rustup").arguments(&["component", "add", component]))?;
    Ok(())
}

fn print_size(workspace: &Workspace) -> Result<(), XtaskError> {
    let product = workspace.product();
    let mebibytes = file_size(&product)? as f64 / f64::from(1 << 20);
    println!("    stripped release binary {}: {mebibytes:.2} MiB\n", product.display());
    Ok(())
}
