//! `cargo xtask bench`: what the workloads take on this machine, into `docs/bench/`, and the tables of `docs/PERFORMANCE.md` from that.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::shell::{Invocation, Workspace, XtaskError, step};
use crate::{python, vulkan};

const FOLDER: &str = "docs/bench";
const DOCUMENT: &str = "docs/PERFORMANCE.md";
const SCRIPT: &str = "xtask/bench.py";
/// Between these lines of the document stands what the raw figures give.
const BEGIN: &str = "<!-- begin: cargo xtask bench --render -->\n";
const END: &str = "<!-- end -->\n";

/// The raw figures of one machine, all of one commit.
#[derive(Debug, Deserialize)]
struct Machine {
    commit: String,
    date: String,
    device: String,
    driver: String,
    method: String,
    /// Its version, and where it ran.
    pytorch: Option<String>,
    /// Per workload and phase: what no program of this arithmetic can beat.
    #[serde(default)]
    floors_ms: BTreeMap<String, BTreeMap<String, f64>>,
    #[serde(default)]
    gates: Vec<Gate>,
    cells: Vec<Cell>,
}

/// How far a workload is from PyTorch's numbers.
#[derive(Debug, Deserialize)]
struct Gate {
    workload: String,
    mode: String,
    /// `None` where nobody judged.
    passed: Option<bool>,
    forward_l2: Option<f64>,
    worst_gradient_norm: Option<f64>,
    worst_gradient_cosine: Option<f64>,
}

/// One workload in one phase.
#[derive(Debug, Deserialize)]
struct Cell {
    workload: String,
    mode: String,
    phase: String,
    median_ms: f64,
    pytorch_ms: Option<f64>,
    dispatches: u64,
    barrier_groups: u64,
    memory_bytes: u64,
    compile_ms: f64,
}

/// With `--render` only renders what is there; otherwise measures first, with the options of `xtask/bench.py`.
pub fn run(workspace: &Workspace, options: &[String]) -> Result<(), XtaskError> {
    if options != ["--render"] {
        measure(workspace, options)?;
    }
    let text = rendered()?;
    fs::write(DOCUMENT, text).map_err(|source| XtaskError::File { path: DOCUMENT.into(), source })?;
    println!("wrote {DOCUMENT}");
    Ok(())
}

/// Fails unless the document is what the raw figures give.
pub fn check() -> Result<(), XtaskError> {
    if read(Path::new(DOCUMENT))? == rendered()? {
        return Ok(());
    }
    let problem = format!("is not what {FOLDER} gives; `cargo xtask bench --render` writes it");
    Err(XtaskError::Data { path: DOCUMENT.into(), problem })
}

fn measure(workspace: &Workspace, options: &[String]) -> Result<(), XtaskError> {
    vulkan::ensure()?;
    let python = python::ensure(workspace)?;
    step("build", workspace.cargo(&["build", "--release", "--package", "meganeura", "--bin", "meganeura"]))?;
    let commit = Invocation::new("git").arguments(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]);
    let remedy = "figures belong to a commit: run this in a checkout".to_owned();
    let commit = commit.output().ok_or_else(|| XtaskError::Missing { what: "the commit".into(), remedy })?;
    let script = Invocation::new(python).arguments(&[SCRIPT, "--commit", &commit, "--meganeura"]);
    step("bench", script.arguments(&[workspace.product()]).arguments(options))?;
    Ok(())
}

/// The document, with today's tables.
fn rendered() -> Result<String, XtaskError> {
    let failed = |source| XtaskError::File { path: FOLDER.into(), source };
    let entries = fs::read_dir(FOLDER).map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let mut tables = String::new();
    for path in paths {
        let machine: Machine = serde_json::from_str(&read(&path)?)
            .map_err(|error| XtaskError::Data { path: path.clone(), problem: error.to_string() })?;
        tables.push_str(&section(&machine, &path));
    }
    let problem = || XtaskError::Data { path: DOCUMENT.into(), problem: format!("lacks the lines {BEGIN:?} and {END:?}") };
    insert(&read(Path::new(DOCUMENT))?, &tables).ok_or_else(problem)
}

fn read(path: &Path) -> Result<String, XtaskError> {
    fs::read_to_string(path).map_err(|source| XtaskError::File { path: path.into(), source })
}

/// `document` with `tables` between its two marks.
fn insert(document: &str, tables: &str) -> Option<String> {
    let (before, rest) = document.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{tables}{END}{after}"))
}

fn section(machine: &Machine, path: &Path) -> String {
    let Machine { commit, date, device, driver, method, pytorch, floors_ms, gates, cells } = machine;
    let mut text = format!("\n## {device}\n\n{date}, driver {driver}, commit `{commit}`, raw figures in `{}`.\n", path.display());
    let _ = writeln!(text, "Times are the {method}.");
    let _ = match pytorch {
        Some(pytorch) => writeln!(text, "PyTorch at its best: {pytorch}."),
        None => writeln!(text, "PyTorch did not run."),
    };
    text.push_str("A ratio above 1 means that PyTorch is faster.\n\n");
    text.push_str(
        "| workload | mode | phase | ms | PyTorch, ms | ratio | floor, ms | dispatches | groups | peak MiB | compile ms |\n",
    );
    text.push_str("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for cell in cells {
        let Cell { workload, mode, phase, median_ms, pytorch_ms, dispatches, barrier_groups, memory_bytes, compile_ms } = cell;
        // The floors are those of f32.
        let floor = floors_ms.get(workload).and_then(|floors| floors.get(phase)).filter(|_| mode == "strict");
        let (pytorch, ratio) = (number(*pytorch_ms, 2), number(pytorch_ms.map(|theirs| median_ms / theirs), 2));
        let (floor, mebibytes) = (number(floor.copied(), 2), *memory_bytes as f64 / f64::from(1 << 20));
        let _ = writeln!(
            text,
            "| {workload} | {mode} | {phase} | {median_ms:.2} | {pytorch} | {ratio} | {floor} | {dispatches} | {barrier_groups} | \
             {mebibytes:.0} | {compile_ms:.0} |"
        );
    }
    if gates.is_empty() {
        return text;
    }
    text.push_str("\n| workload | mode | forward rel. L2 | gradient norm error, worst | gradient cosine, worst | contract |\n");
    text.push_str("| --- | --- | --- | --- | --- | --- |\n");
    for Gate { workload, mode, passed, forward_l2, worst_gradient_norm, worst_gradient_cosine } in gates {
        let exponent = |value: &Option<f64>| value.map_or("-".into(), |value| format!("{value:.1e}"));
        let verdict = passed.map_or("not judged", |passed| if passed { "pass" } else { "FAIL" });
        let cosine = number(*worst_gradient_cosine, 6);
        let (forward, norm) = (exponent(forward_l2), exponent(worst_gradient_norm));
        let _ = writeln!(text, "| {workload} | {mode} | {forward} | {norm} | {cosine} | {verdict} |");
    }
    text
}

/// With so many decimals; `-` where there is none.
fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.decimals$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = r#"{
        "commit": "abc", "date": "2026-11-30", "device": "Some GPU", "driver": "1.2", "method": "median of 3",
        "pytorch": "2.11.0, on the same machine", "floors_ms": { "unet": { "inference": 0.064 } },
        "gates": [
            { "workload": "unet", "mode": "strict", "passed": true,
              "forward_l2": 1.66e-6, "worst_gradient_norm": 0.00018, "worst_gradient_cosine": 0.9999996 },
            { "workload": "unet", "mode": "accelerated", "passed": false,
              "forward_l2": 0.02, "worst_gradient_norm": 0.1, "worst_gradient_cosine": 0.5 },
            { "workload": "other", "mode": "strict", "passed": null,
              "forward_l2": null, "worst_gradient_norm": null, "worst_gradient_cosine": null }
        ],
        "cells": [
            { "workload": "unet", "mode": "strict", "phase": "inference", "median_ms": 0.663, "pytorch_ms": 1.02, "times_ms": [0.663],
              "dispatches": 64, "barrier_groups": 60, "memory_bytes": 93323264, "compile_ms": 41.7 },
            { "workload": "unet", "mode": "accelerated", "phase": "inference", "median_ms": 2.04, "pytorch_ms": 1.02,
              "dispatches": 64, "barrier_groups": 60, "memory_bytes": 93323264, "compile_ms": 41.7 },
            { "workload": "other", "mode": "strict", "phase": "step", "median_ms": 12.0, "pytorch_ms": null,
              "dispatches": 7, "barrier_groups": 3, "memory_bytes": 1048576, "compile_ms": 1200.2 }
        ]
    }"#;

    #[test]
    fn every_cell_is_shown_with_its_losses() -> Result<(), serde_json::Error> {
        let text = section(&serde_json::from_str(RAW)?, Path::new("docs/bench/some.json"));
        for line in [
            "## Some GPU",
            "2026-11-30, driver 1.2, commit `abc`, raw figures in `docs/bench/some.json`.",
            "PyTorch at its best: 2.11.0, on the same machine.",
            "| unet | strict | inference | 0.66 | 1.02 | 0.65 | 0.06 | 64 | 60 | 89 | 42 |",
            "| unet | accelerated | inference | 2.04 | 1.02 | 2.00 | - | 64 | 60 | 89 | 42 |",
            "| other | strict | step | 12.00 | - | - | - | 7 | 3 | 1 | 1200 |",
            "| unet | strict | 1.7e-6 | 1.8e-4 | 1.000000 | pass |",
            "| unet | accelerated | 2.0e-2 | 1.0e-1 | 0.500000 | FAIL |",
            "| other | strict | - | - | - | not judged |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\nis missing in\n{text}");
        }
        Ok(())
    }

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let document = format!("before\n{BEGIN}old\n{END}after\n");
        let replaced = insert(&document, "new\n");
        assert_eq!(replaced, Some(format!("before\n{BEGIN}new\n{END}after\n")));
        assert_eq!(replaced.and_then(|text| insert(&text, "old\n")), Some(document));
        assert_eq!(insert("no marks", "new"), None);
    }
}
