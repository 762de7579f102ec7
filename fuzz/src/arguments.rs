//! The command line.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Bytes,
    Models,
}

impl Target {
    pub fn name(self) -> &'static str {
        match self {
            Target::Bytes => "bytes",
            Target::Models => "models",
        }
    }
}

#[derive(Debug)]
pub struct Arguments {
    pub target: Target,
    pub time: Duration,
    pub seed: u64,
    /// Only this case.
    pub case: Option<u64>,
    /// Where to put the file of that case.
    pub save: Option<PathBuf>,
}

impl Arguments {
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let target = match arguments.next().as_deref() {
            Some("bytes") => Target::Bytes,
            Some("models") => Target::Models,
            _ => return Err("which target?".to_owned()),
        };
        let mut parsed = Arguments { target, time: Duration::from_secs(60), seed: 1, case: None, save: None };
        while let Some(flag) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{value:?} is no number"));
            match flag.as_str() {
                "--seconds" => parsed.time = Duration::from_secs(number()?),
                "--seed" => parsed.seed = number()?,
                "--case" => parsed.case = Some(number()?),
                "--save" => parsed.save = Some(PathBuf::from(value)),
                _ => return Err(format!("there is no flag {flag}")),
            }
        }
        Ok(parsed)
    }
}
