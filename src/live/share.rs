//! Which part of the device's time training gets.

use std::time::Duration;

/// Lets training run between batches of inference, so that it takes a given share of the time while requests wait, and all of it otherwise.
///
/// Training runs in pieces, a step or a batch of an evaluation each. After a piece, requests that wait come first until they have had
/// their share; so between two batches of inference there is at most one piece, whatever the share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    share: f64,
    /// Time that inference is still owed, in seconds of training.
    debt: f64,
}

impl Share {
    /// `share` is of 0 to 1. At 0 training waits for a moment without requests, at 1 a piece runs after every batch.
    pub fn new(share: f64) -> Self {
        Share { share, debt: 0.0 }
    }

    /// Inference took `time`.
    pub fn inferred(&mut self, time: Duration) {
        if self.share < 1.0 {
            self.debt = (self.debt - time.as_secs_f64() * self.share / (1.0 - self.share)).max(0.0);
        }
    }

    /// A piece of training took `time`.
    pub fn trained(&mut self, time: Duration) {
        self.debt = time.as_secs_f64();
    }

    /// Whether training may go on, where requests wait or not.
    pub fn allows(&self, waiting: bool) -> bool {
        match self.share {
            _ if !waiting => true,
            share if share <= 0.0 => false,
            share if share >= 1.0 => true,
            _ => self.debt <= 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of training at saturation, where batches take `inference` and pieces take `piece` milliseconds.
    fn measured(share: f64, inference: u64, piece: u64) -> f64 {
        let (mut at, mut training, mut total) = (Share::new(share), 0, 0);
        for _ in 0..10_000 {
            at.inferred(Duration::from_millis(inference));
            total += inference;
            if at.allows(true) {
                at.trained(Duration::from_millis(piece));
                training += piece;
                total += piece;
            }
        }
        training as f64 / total as f64
    }

    #[test]
    fn training_gets_its_share_while_requests_wait() {
        for share in [0.1, 0.5, 0.8] {
            let found = measured(share, 1, 40);
            assert!((found - share).abs() < 0.02, "{share}: {found}");
        }
        assert_eq!(measured(0.0, 1, 40), 0.0);
    }

    #[test]
    fn between_two_batches_there_is_one_piece_at_most() {
        assert!((measured(1.0, 3, 1) - 0.25).abs() < 1e-3);
        assert!((measured(0.5, 30, 1) - 1.0 / 31.0).abs() < 1e-3);
    }

    #[test]
    fn without_requests_training_always_goes_on() {
        let mut share = Share::new(0.0);
        share.trained(Duration::from_secs(1));
        assert!(share.allows(false) && !share.allows(true));
    }
}
