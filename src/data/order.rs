//! The order in which an epoch visits the samples.

/// A permutation of `0..samples` that depends on `seed` and `epoch` only: any epoch can be resumed without replaying the ones before it.
///
/// Fisher-Yates over SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so the order is the
/// same on every platform and for every version of this library.
pub fn epoch_order(seed: u64, epoch: u64, samples: usize) -> Vec<usize> {
    let mut order = vec![0; samples];
    write_epoch_order(seed, epoch, &mut order);
    order
}

/// As [`epoch_order`], over `order`, one element per sample.
pub(crate) fn write_epoch_order(seed: u64, epoch: u64, order: &mut [usize]) {
    let mut state = SplitMix64(SplitMix64(seed).next() ^ SplitMix64(!epoch).next());
    order.iter_mut().enumerate().for_each(|(sample, place)| *place = sample);
    for last in (1..order.len()).rev() {
        order.swap(last, state.below(last as u64 + 1) as usize);
    }
}

/// A generator of random numbers whose stream is the same everywhere.
pub(crate) struct SplitMix64(pub u64);

impl SplitMix64 {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from `-bound` to below `bound`, of 53 random bits.
    pub fn symmetric(&mut self, bound: f64) -> f64 {
        ((self.next() >> 11) as f64 * (2.0 / (1u64 << 53) as f64) - 1.0) * bound
    }

    /// A number below `bound`, by the high half of a 128-bit product. Its bias is below `bound / 2^64`.
    fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_visits_every_sample_once() {
        for samples in [0, 1, 7, 1000] {
            let mut order = epoch_order(3, 5, samples);
            order.sort_unstable();
            assert!(order.into_iter().eq(0..samples));
        }
    }

    #[test]
    fn the_order_depends_on_seed_and_epoch_only() {
        assert_eq!(epoch_order(1, 2, 50), epoch_order(1, 2, 50));
        assert_ne!(epoch_order(1, 2, 50), epoch_order(1, 3, 50));
        assert_ne!(epoch_order(1, 2, 50), epoch_order(2, 2, 50));
        assert_ne!(epoch_order(1, 2, 50), epoch_order(2, 1, 50));
    }

    /// First outputs of the reference implementation for seed 1234567.
    #[test]
    fn the_generator_is_splitmix64() {
        let mut state = SplitMix64(1234567);
        assert_eq!([state.next(), state.next()], [6457827717110365317, 3203168211198807973]);
    }
}
