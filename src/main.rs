//! The command line of meganeura.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
