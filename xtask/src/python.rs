//! The Python environment of the interoperability test, where PyTorch, ONNX and onnxruntime read what meganeura writes. The ONNX
//! package also holds the tests that `cargo xtask corpus` runs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::shell::{Invocation, Workspace, XtaskError, find_program, heading, step};
use crate::system;

/// Every package with its version, dependencies included.
const REQUIREMENTS: &str = include_str!("../python-requirements.txt");

/// Makes `.venv/` at the root of the checkout unless it holds [`REQUIREMENTS`] already; returns its interpreter.
pub fn ensure(workspace: &Workspace) -> Result<PathBuf, XtaskError> {
    let environment = workspace.root.join(".venv");
    let python = environment.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    let installed = environment.join("requirements.txt");
    if fs::read_to_string(&installed).is_ok_and(|text| text == REQUIREMENTS) && python.is_file() {
        return Ok(python);
    }
    heading("python", "making .venv for the interoperability test; PyTorch is large, this takes minutes");
    let system_python = system_python()?;
    step("venv", Invocation::new(system_python).arguments(&["-m", "venv", "--clear", ".venv"]))?;
    let pip = Invocation::new(&python).arguments(&["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    let pip = pip.arguments(&["--no-compile", "--no-deps", "--requirement", "xtask/python-requirements.txt"]);
    step("packages", pip)?;
    fs::write(&installed, REQUIREMENTS).map_err(|source| XtaskError::File { path: installed, source })?;
    Ok(python)
}

/// The folder of an installed package, found through the interpreter that [`ensure`] returned.
pub fn package(python: &Path, name: &str) -> Result<PathBuf, XtaskError> {
    let script = format!("import importlib.util as u; print(*u.find_spec('{name}').submodule_search_locations)");
    let found = Invocation::new(python).arguments(&["-c", &script]).output();
    let remedy = "remove .venv and try again".to_owned();
    found.map(PathBuf::from).ok_or_else(|| XtaskError::Missing { what: format!("the Python package {name}"), remedy })
}

/// A Python that can make virtual environments with pip in them.
fn system_python() -> Result<PathBuf, XtaskError> {
    let usable = || {
        let found = ["python3", "python"].into_iter().filter_map(find_program);
        found.into_iter().find(|python| Invocation::new(python).arguments(&["-c", "import venv, ensurepip"]).succeeds())
    };
    if let Some(python) = usable() {
        return Ok(python);
    }
    let remedy = "install Python 3.10 or newer with its venv module";
    system::install("Python's venv module", "python3-venv", remedy)?;
    usable().ok_or_else(|| XtaskError::Missing { what: "Python's venv module".into(), remedy: remedy.into() })
}
