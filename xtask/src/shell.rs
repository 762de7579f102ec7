//! Where things lie, how programs are run, and how steps are told.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, io};

use ndarray_npy::{ReadNpzError, WriteNpzError};

/// Why a task stopped.
#[derive(Debug, thiserror::Error)]
pub enum XtaskError {
    #[error("cannot run {program}: {source}")]
    Spawn { program: String, source: io::Error },
    #[error("`{command}` failed ({status})")]
    Failed { command: String, status: std::process::ExitStatus },
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    ReadNpz { path: PathBuf, source: ReadNpzError },
    #[error("{path}: {source}")]
    WriteNpz { path: PathBuf, source: WriteNpzError },
    #[error("{path}: {problem}")]
    Data { path: PathBuf, problem: String },
    #[error("this task has no option {0:?}")]
    Option(String),
    #[error("{what} is missing; {remedy}")]
    Missing { what: String, remedy: String },
    #[error("accuracy on held-out digits is {found:.3} after fine-tuning, at least {expected} was expected")]
    Accuracy { found: f64, expected: f64 },
}

/// The checkout, which is the working directory, and its build directory.
pub struct Workspace {
    pub root: PathBuf,
    /// Relative to the root where it lies within.
    pub target: PathBuf,
}

impl Workspace {
    /// Enters the checkout that this program was built from.
    pub fn enter() -> Result<Self, XtaskError> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().unwrap_or(manifest).to_path_buf();
        env::set_current_dir(&root).map_err(|source| XtaskError::File { path: root.clone(), source })?;
        let program = env::current_exe().map_err(|source| XtaskError::File { path: "xtask".into(), source })?;
        let target = program.ancestors().nth(2).unwrap_or(Path::new("target"));
        let target = target.strip_prefix(&root).unwrap_or(target).to_path_buf();
        Ok(Workspace { root, target })
    }

    /// The product's command line, as `cargo build --release` leaves it.
    pub fn product(&self) -> PathBuf {
        self.program("meganeura")
    }

    /// A program of the workspace, as `cargo build --release` leaves it.
    pub fn program(&self, name: &str) -> PathBuf {
        self.target.join("release").join(format!("{name}{}", env::consts::EXE_SUFFIX))
    }

    /// `cargo` with `arguments`: the one that runs this program, if any does, with the same build directory.
    pub fn cargo(&self, arguments: &[&str]) -> Invocation {
        let cargo = Invocation::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).arguments(arguments);
        cargo.environment("CARGO_TARGET_DIR", self.root.join(&self.target))
    }
}

/// A program and its arguments. It inherits the terminal.
pub struct Invocation {
    command: Command,
}

impl Invocation {
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Invocation { command: Command::new(program) }
    }

    pub fn arguments(mut self, arguments: &[impl AsRef<OsStr>]) -> Self {
        self.command.args(arguments);
        self
    }

    pub fn environment(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it to its end; an exit status other than 0 is an error.
    pub fn run(mut self) -> Result<(), XtaskError> {
        let status = self.command.status().map_err(|source| XtaskError::Spawn { program: self.program(), source })?;
        if status.success() { Ok(()) } else { Err(XtaskError::Failed { command: self.to_string(), status }) }
    }

    /// What it writes to its standard output, without the line's end; none if it fails.
    pub fn output(mut self) -> Option<String> {
        let output = self.command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Whether it can be run and exits with 0. Its output is not shown.
    pub fn succeeds(mut self) -> bool {
        self.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.command.status().is_ok_and(|status| status.success())
    }

    fn program(&self) -> String {
        let program = Path::new(self.command.get_program());
        program.file_stem().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
    }
}

impl fmt::Display for Invocation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.program())?;
        self.command.get_args().map(OsStr::to_string_lossy).try_for_each(|argument| match argument.contains(' ') {
            true => write!(f, " '{argument}'"),
            false => write!(f, " {argument}"),
        })
    }
}

/// Runs `invocation` under a heading, then tells how long it took.
pub fn step(name: &str, invocation: Invocation) -> Result<Duration, XtaskError> {
    heading(name, &invocation.to_string());
    let started = Instant::now();
    invocation.run()?;
    let elapsed = started.elapsed();
    println!("    {name}: {:.1} s\n", elapsed.as_secs_f64());
    Ok(elapsed)
}

/// Says what comes next.
pub fn heading(name: &str, what: &str) {
    println!("==> {name}: {what}");
}

/// Size of the file at `path`, in bytes.
pub fn file_size(path: &Path) -> Result<u64, XtaskError> {
    let metadata = path.metadata().map_err(|source| XtaskError::File { path: path.into(), source })?;
    Ok(metadata.len())
}

/// The first file of the `PATH` that is called `program`.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let file = OsString::from(format!("{program}{}", env::consts::EXE_SUFFIX));
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(&file)).find(|path| path.is_file())
}
