//! The two commands that a newcomer needs after cloning, and CI with them: `cargo xtask demo` and `cargo xtask test`.
//!
//! Both install what they miss where they can, say what they run, and stop at the first step that fails.

mod demo;
mod digits;
mod published;
mod python;
mod shell;
mod system;
mod test;
mod vulkan;

use std::process::ExitCode;

use shell::{Workspace, XtaskError};

struct Task {
    name: &'static str,
    help: &'static str,
    run: fn(&Workspace) -> Result<(), XtaskError>,
}

const TASKS: &[Task] = &[
    Task { name: "demo", help: "fine-tune a small CNN on the digits it has never seen, and export it", run: demo::run },
    Task { name: "test", help: "format, lints, documentation, the release binary and its size, all tests", run: test::run },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name] = arguments.as_slice() else { return usage() };
    let Some(task) = TASKS.iter().find(|t| t.name == name) else { return usage() };
    match Workspace::enter().and_then(|workspace| (task.run)(&workspace)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask {name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: cargo xtask TASK");
    for task in TASKS {
        eprintln!("  {:<6} {}", task.name, task.help);
    }
    ExitCode::from(2)
}
