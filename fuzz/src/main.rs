//! Feeds hostile models to the import: `fuzz bytes` mutates files, `fuzz models` mutates what files mean.
//!
//! A case is import, all weights, specialisation, verification, and for models that pass all of it export and import again. It
//! fails if it panics, takes more than five seconds or 1 GiB, accepts what does not verify, or exports what it cannot import.
//! Cases follow from the seed and their number alone: `--case` repeats one.

mod arguments;
mod bytes;
mod case;
mod guard;
mod models;
mod mutate;
#[allow(dead_code, reason = "the messages of the import, of which mutations need some")]
#[path = "../../import/src/proto.rs"]
mod proto;
mod random;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use arguments::{Arguments, Target};
use case::Outcome;
use random::Random;

/// Distinct findings after which a run stops.
const MAX_FINDINGS: usize = 20;

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}\nusage: fuzz bytes|models [--seconds N] [--seed S] [--case N] [--save FILE]");
            return ExitCode::from(2);
        }
    };
    guard::install();
    let began = Instant::now();
    let mut tally: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut findings: BTreeMap<String, u64> = BTreeMap::new();
    let first = arguments.case.unwrap_or(0);
    let mut number = first;
    while findings.len() < MAX_FINDINGS {
        let input = guard::watched(number, || input(&arguments, number));
        if let (Some(path), Some(_)) = (&arguments.save, arguments.case)
            && let Err(error) = std::fs::write(path, &input)
        {
            eprintln!("{}: {error}", path.display());
            return ExitCode::from(2);
        }
        let outcome = guard::watched(number, || case::run(&input));
        *tally.entry(outcome.name()).or_default() += 1;
        if let Outcome::Finding(what) = outcome
            && !findings.contains_key(&what)
        {
            eprintln!("case {number}: {what}");
            findings.insert(what, number);
        }
        number += 1;
        if arguments.case.is_some() || began.elapsed() >= arguments.time {
            break;
        }
    }
    let counts: Vec<String> = tally.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let (cases, seconds) = (number - first, began.elapsed().as_secs_f64());
    println!("{}: {cases} cases in {seconds:.0} s, seed {}: {}", arguments.target.name(), arguments.seed, counts.join(", "));
    println!("memory at its peak {} MiB", guard::peak() >> 20);
    match findings.len() {
        0 => ExitCode::SUCCESS,
        count => {
            println!("{count} findings");
            ExitCode::FAILURE
        }
    }
}

fn input(arguments: &Arguments, number: u64) -> Vec<u8> {
    let mut random = Random::new(arguments.seed, number);
    match arguments.target {
        Target::Bytes => bytes::generate(&mut random),
        Target::Models => mutate::generate(&mut random),
    }
}
