//! Which part of the time training gets.

use std::time::{Duration, Instant};

/// How long there is no request before training may use all of the time. Clients that send one request after another are never away so long.
const QUIET: Duration = Duration::from_millis(100);

/// Lets training run between batches of inference, in pieces: a step, or a batch of an evaluation. After a piece training pauses, so
/// that it has its share of the time, until there is no request for a while. So while requests wait at most one piece comes before them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    share: f64,
    /// The end of the pause, where there is one.
    resume: Option<Instant>,
    inferred: Option<Instant>,
}

impl Share {
    /// `share` is of 0 to 1. At 0 training waits for quiet, at 1 it never pauses.
    pub fn new(share: f64) -> Self {
        Share { share, resume: None, inferred: None }
    }

    /// A batch of inference ended at `now`.
    pub fn inferred(&mut self, now: Instant) {
        self.inferred = Some(now);
    }

    /// A piece of training that took `time` ended at `now`.
    pub fn trained(&mut self, time: Duration, now: Instant) {
        let pause = time.as_secs_f64() * (1.0 - self.share) / self.share;
        // At a share of 0, or of almost nothing, only quiet ends the pause.
        self.resume = Duration::try_from_secs_f64(pause).ok().and_then(|pause| now.checked_add(pause));
    }

    /// Whether training may go on at `now`, where requests wait or not.
    pub fn allows(&self, waiting: bool, now: Instant) -> bool {
        let quiet = !waiting && self.quiet_from().is_none_or(|from| now >= from);
        quiet || self.share > 0.0 && self.resume.is_none_or(|resume| now >= resume)
    }

    /// When training may go on if no request comes.
    pub fn resumes_at(&self, now: Instant) -> Instant {
        let quiet = self.quiet_from().unwrap_or(now);
        match self.resume {
            Some(resume) if self.share > 0.0 => resume.min(quiet),
            None if self.share > 0.0 => now,
            _ => quiet,
        }
    }

    fn quiet_from(&self) -> Option<Instant> {
        self.inferred.map(|inferred| inferred + QUIET)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// What clients get beside training.
    struct Measured {
        /// The share of training.
        share: f64,
        /// The longest time from a request to its batch.
        longest_wait: Duration,
    }

    /// Where a batch takes `inference`, a piece `piece`, and clients are away for `away` after each batch.
    fn measured(share: f64, inference: Duration, piece: Duration, away: Duration) -> Measured {
        let start = Instant::now();
        let (mut at, mut now, mut training, mut longest_wait) = (Share::new(share), start, Duration::ZERO, Duration::ZERO);
        for _ in 0..5_000 {
            now += inference;
            at.inferred(now);
            let back = now + away;
            loop {
                let waiting = now >= back;
                if at.allows(waiting, now) {
                    now += piece;
                    training += piece;
                    at.trained(piece, now);
                }
                // What was due before the last piece runs after it; what came during it finds one more at most.
                if waiting {
                    break;
                }
                now = now.max(at.resumes_at(now).min(back));
            }
            longest_wait = longest_wait.max(now - back);
        }
        Measured { share: training.as_secs_f64() / (now - start).as_secs_f64(), longest_wait }
    }

    #[test]
    fn training_has_its_share_whether_requests_wait_or_come_one_after_another() {
        for share in [0.1, 0.5, 0.8] {
            for away in [ms(0), ms(1)] {
                let found = measured(share, ms(1), ms(40), away).share;
                assert!((found - share).abs() < 0.03, "{share} {away:?}: {found}");
            }
        }
        assert_eq!(measured(0.0, ms(1), ms(40), ms(1)).share, 0.0);
    }

    #[test]
    fn up_to_a_share_of_half_a_request_waits_for_one_piece_at_most() {
        for share in [0.0, 0.1, 0.5] {
            for (inference, away) in [(ms(1), ms(0)), (ms(1), ms(3)), (ms(1), ms(41)), (ms(30), ms(7)), (ms(90), ms(99))] {
                let found = measured(share, inference, ms(40), away).longest_wait;
                assert!(found <= ms(40), "{share} {inference:?} {away:?}: {found:?}");
            }
        }
    }

    #[test]
    fn at_saturation_there_is_one_piece_between_two_batches_at_most() {
        assert!((measured(1.0, ms(3), ms(1), ms(0)).share - 0.25).abs() < 1e-3);
        assert!((measured(0.5, ms(30), ms(1), ms(0)).share - 1.0 / 31.0).abs() < 1e-3);
    }

    #[test]
    fn in_quiet_training_does_not_pause() {
        let start = Instant::now();
        for share in [0.0, 0.5] {
            let mut at = Share::new(share);
            assert!(at.allows(false, start));
            at.inferred(start);
            at.trained(Duration::from_secs(9), start);
            assert!(!at.allows(false, start + ms(99)) && at.allows(false, start + ms(100)));
            assert!(!at.allows(true, start + ms(100)));
            assert_eq!(at.resumes_at(start), start + ms(100));
        }
    }
}
