//! How long tilings take, by measurement.

use crate::profile::DeviceProfile;

/// What a workgroup takes on a multiprocessor, in nanoseconds. An H200's are fitted to the times of sixteen products from 16x720x640 to
/// 4096^3 (3 to 15 %, small tiles on matrix units 25 %); among devices only their proportions count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace {
    /// Of a step, where loads and barriers decide.
    step: usize,
    /// Of a step for each of the workgroups that run beside each other, where arithmetic decides.
    share: usize,
    /// From the last step to the last result.
    finish: usize,
    /// How many run beside each other.
    beside: usize,
}

impl Pace {
    pub(super) const fn new(step: usize, share: usize, finish: usize, beside: usize) -> Self {
        Pace { step, share, finish, beside }
    }

    /// An estimate of the time of a contraction of sizes `[batch, m, n, k]`, of which a workgroup computes a tile of `m x n` in steps of
    /// `depth` along the sum.
    pub(super) fn estimate(
        &self,
        [batch, m, n, k]: [usize; 4],
        tile: (usize, usize),
        depth: usize,
        profile: &DeviceProfile,
    ) -> usize {
        let tiles = batch * m.div_ceil(tile.0) * n.div_ceil(tile.1);
        self.time(tiles.div_ceil(profile.compute_units as usize), k.div_ceil(depth))
    }

    /// An estimate of the time that `workgroups` of `steps` each take on one multiprocessor, in nanoseconds.
    fn time(&self, workgroups: usize, steps: usize) -> usize {
        let round = |count: usize| match count {
            0 => 0,
            _ => steps * self.step.max(count * self.share) + count * self.finish,
        };
        workgroups / self.beside * round(self.beside) + round(workgroups % self.beside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workgroups_share_a_multiprocessor_and_wait_for_those_before() {
        let pace = Pace::new(100, 40, 10, 3);
        assert_eq!([0, 1, 2, 3, 4].map(|count| pace.time(count, 5)), [0, 510, 520, 630, 1140]);
    }
}
