//! Progress of a training run: a bar on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// The shortest time between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

pub struct Progress {
    bar: Option<ProgressBar>,
    last_line: Instant,
    started: Instant,
    first_step: u64,
    total: u64,
    batch: usize,
}

impl Progress {
    /// Of steps `first_step + 1` to `total`.
    pub fn new(first_step: u64, total: u64, batch: usize) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}  {msg}");
            ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())).with_position(first_step)
        });
        let now = Instant::now();
        Progress { bar, last_line: now, started: now, first_step, total, batch }
    }

    /// Training began now: what came before does not count for the speed.
    pub fn start(&mut self) {
        self.started = Instant::now();
        self.last_line = self.started;
    }

    /// Samples per second since the start.
    pub fn speed(&self, step: u64) -> f64 {
        let samples = (step - self.first_step) as f64 * self.batch as f64;
        samples / self.started.elapsed().as_secs_f64().max(1e-9)
    }

    pub fn step(&mut self, step: u64, loss: f64) {
        let speed = self.speed(step);
        let left = (self.total - step) as f64 * self.batch as f64 / speed;
        let message = format!("loss {loss:.5}  {speed:.0} samples/s  {} left", duration(left));
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(message);
            }
            None if self.last_line.elapsed() >= LINE_INTERVAL || step == self.total => {
                self.last_line = Instant::now();
                eprintln!("step {step}/{}  {message}", self.total);
            }
            None => {}
        }
    }

    /// A line of its own, above the bar.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// `12 s`, `3 min 5 s`, `2 h 10 min`
fn duration(seconds: f64) -> String {
    let s = seconds.clamp(0.0, 1e9).round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_naturally() {
        assert_eq!(duration(12.4), "12 s");
        assert_eq!(duration(185.0), "3 min 5 s");
        assert_eq!(duration(7800.0), "2 h 10 min");
        assert_eq!(duration(f64::INFINITY), "277777 h 46 min");
    }
}
