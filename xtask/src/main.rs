//! The commands that a newcomer needs after cloning, and CI with them: `cargo xtask demo` and `cargo xtask test`; and
//! `cargo xtask corpus`, which measures what of ONNX works, and `cargo xtask bench`, which measures how fast.
//!
//! All install what they miss where they can, say what they run, and stop at the first step that fails.

mod bench;
mod chromium;
mod corpus;
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
    /// Gets what stands after the name.
    run: fn(&Workspace, &[String]) -> Result<(), XtaskError>,
}

const TASKS: &[Task] = &[
    Task {
        name: "demo",
        help: "fine-tune a small CNN on the digits it has never seen, and export it",
        run: |w, o| no_options(o).and_then(|()| demo::run(w)),
    },
    Task {
        name: "test",
        help: "format, lints, documentation, the release binary and its size, ONNX's backend tests, all tests",
        run: |w, o| no_options(o).and_then(|()| test::run(w)),
    },
    Task {
        name: "corpus",
        help: "ONNX's backend tests, into docs/; --check compares, also --unsaturated; --filter TEXT runs some",
        run: corpus::run,
    },
    Task {
        name: "bench",
        help: "what the exported workloads take on this machine, into docs/; --render renders what is there",
        run: bench::run,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, options @ ..] = arguments.as_slice() else { return usage() };
    let Some(task) = TASKS.iter().find(|t| t.name == name) else { return usage() };
    match Workspace::enter().and_then(|workspace| (task.run)(&workspace, options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask {name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn no_options(options: &[String]) -> Result<(), XtaskError> {
    options.first().map_or(Ok(()), |option| Err(XtaskError::Option(option.clone())))
}

fn usage() -> ExitCode {
    eprintln!("usage: cargo xtask TASK");
    for task in TASKS {
        eprintln!("  {:<6} {}", task.name, task.help);
    }
    ExitCode::from(2)
}
