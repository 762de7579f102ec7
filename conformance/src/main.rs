//! Runs ONNX's backend tests through compiled programs, forward and backward, and writes what came of each.

mod compare;
mod execute;
mod gradient;
mod outcome;
mod refusal;
mod report;
mod run;
mod suite;
mod table;
mod worker;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use meganeura_codegen::CompileOptions;
use meganeura_runtime::{Device, DeviceSelector};

use outcome::Outcome;
use report::{Report, ReportError, describe};
use suite::discover;
use worker::{Pool, WorkerError, serve};

/// ONNX's backend tests through compiled programs
#[derive(Debug, Parser)]
struct Arguments {
    /// ONNX's test data: the folder that holds node/, simple/, ...
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Run the tests whose name contains this text, and print the outcome of each
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["json", "markdown"], group = "unwritten")]
    filter: Option<String>,
    /// Worker processes; one per core if not given
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// auto, a number, or a part of a device's name
    #[arg(long, default_value = "auto")]
    device: String,
    /// The commit of the tree that is measured
    #[arg(long, default_value = "")]
    commit: String,
    /// The raw results
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The coverage document
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write nothing: compare with the files, and fail where they differ
    #[arg(long, group = "unwritten")]
    check: bool,
    /// Leave graphs as the files say; the outcomes are not written down, since they must be the same
    #[arg(long, requires = "unwritten")]
    unsaturated: bool,
    /// Answer the questions of another process of this program
    #[arg(long, hide = true, group = "unwritten")]
    worker: bool,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("{0}")]
    Check(String),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let device = match arguments.device.parse::<DeviceSelector>() {
        Ok(device) => device,
        Err(never) => match never {},
    };
    let saturate = CompileOptions::default().saturate.filter(|_| !arguments.unsaturated);
    let options = CompileOptions { saturate, ..CompileOptions::default() };
    let done = match arguments.worker {
        true => serve(&arguments.data, &device, options).map_err(Failure::from),
        false => conformance(&arguments, &device),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("conformance: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn conformance(arguments: &Arguments, device: &DeviceSelector) -> Result<(), Failure> {
    let mut tests = discover(&arguments.data).map_err(WorkerError::from)?;
    if let Some(filter) = &arguments.filter {
        tests.retain(|test| test.id().contains(filter));
    }
    let jobs = arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let name = Device::open(device).map_err(WorkerError::from)?.info().name.clone();
    let unsaturated = arguments.unsaturated;
    let pool = Pool { data: &arguments.data, device: &arguments.device, unsaturated, jobs };
    let started = Instant::now();
    let mut done = 0;
    let outcomes = pool.run(&tests, |outcome| {
        done += 1;
        progress(arguments, outcome, done, tests.len());
    })?;
    eprintln!("{} tests in {:.1} s on {name}", outcomes.len(), started.elapsed().as_secs_f64());

    let report = Report::new(arguments.commit.clone(), name, outcomes);
    print!("{}", table::summary(&report));
    if let Some(path) = &arguments.json {
        if arguments.check {
            check(&report, &Report::read(path)?)?;
        } else {
            report.write(path)?;
        }
    }
    if let Some(path) = &arguments.markdown {
        document(&report, path, arguments.check)?;
    }
    Ok(())
}

/// Tells what is not as it should be, everything where a filter is given, and now and then how far the run is.
fn progress(arguments: &Arguments, outcome: &Outcome, done: usize, total: usize) {
    if arguments.filter.is_some() || outcome.is_fault() {
        eprintln!("{}: {}", outcome.test, describe(outcome));
    }
    if done.is_multiple_of(100) {
        eprintln!("{done} of {total}");
    }
}

fn check(report: &Report, committed: &Report) -> Result<(), Failure> {
    let differences = report.differences(committed);
    if !differences.is_empty() {
        let first: Vec<&str> = differences.iter().take(40).map(String::as_str).collect();
        let text = format!("{} outcomes differ from the committed ones:\n{}", differences.len(), first.join("\n"));
        return Err(Failure::Check(text));
    }
    let faults = report.tests.iter().filter(|outcome| outcome.is_fault()).count();
    if faults > 0 {
        return Err(Failure::Check(format!(
            "{faults} tests are wrong, in their results or gradients, crash, or are refused for no reason of the list"
        )));
    }
    Ok(())
}

/// Writes the coverage document, or compares it.
fn document(report: &Report, path: &Path, check: bool) -> Result<(), Failure> {
    let name = |(domain, op): (&str, &str)| if domain.is_empty() { op.to_owned() } else { format!("{domain}::{op}") };
    let imported: BTreeSet<String> = meganeura_import::operators().map(name).collect();
    let text = table::markdown(report, &imported);
    let error = |source| ReportError::Io { path: path.to_owned(), source };
    if !check {
        return Ok(fs::write(path, text).map_err(error)?);
    }
    if fs::read_to_string(path).map_err(error)? != text {
        let text = format!("{} is not what the results give: run `cargo xtask corpus` and commit what it writes", path.display());
        return Err(Failure::Check(text));
    }
    Ok(())
}
