//! Random numbers as a function of key and counter: Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011.

use crate::{DType, Tensor, TensorType};

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// What a round adds to the key: the golden ratio and the square root of 3, less 1.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Four random words.
fn philox(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [x, y] = [(0, 0), (1, 2)].map(|(multiplier, word)| u64::from(MULTIPLIERS[multiplier]) * u64::from(counter[word]));
        counter = [(y >> 32) as u32 ^ counter[1] ^ key[0], y as u32, (x >> 32) as u32 ^ counter[3] ^ key[1], x as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The number at row-major position `index` of an [`Op::RandomUniform`](crate::Op::RandomUniform): a multiple of 2^-24 in `[0, 1)`.
pub(crate) fn uniform(key: [u32; 4], stream: u32, index: u32) -> f64 {
    let [word, ..] = philox([key[0], key[1]], [index, stream, key[2], key[3]]);
    f64::from(word >> 8) / f64::from(1u32 << 24)
}

/// The type of the key of an [`Op::RandomUniform`](crate::Op::RandomUniform).
pub fn random_key_type() -> TensorType {
    TensorType::new(DType::U32, [4])
}

/// The key of a step of a run. Different pairs give different keys.
pub fn random_key(seed: u64, step: u64) -> Tensor {
    Tensor::from_i64(DType::U32, [4], &random_key_words(seed, step).map(i64::from))
}

/// The elements of [`random_key`].
pub fn random_key_words(seed: u64, step: u64) -> [u32; 4] {
    [seed, seed >> 32, step, step >> 32].map(|word| word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that Random123 publishes.
    #[test]
    fn philox_gives_the_published_words() {
        let cases = [
            ([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 2], [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (key, counter, expected) in cases {
            assert_eq!(philox(key, counter), expected);
        }
    }

    const COUNT: u32 = 1 << 14;

    fn numbers(key: [u32; 4], stream: u32) -> Vec<f64> {
        (0..COUNT).map(|index| uniform(key, stream, index)).collect()
    }

    fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = values.len() as f64;
        values.sum::<f64>() / count
    }

    fn covariance(a: &[f64], b: &[f64]) -> f64 {
        mean(a.iter().zip(b).map(|(a, b)| (a - 0.5) * (b - 0.5)))
    }

    /// Five standard deviations of an estimate of `count` samples.
    fn bound(deviation: f64) -> f64 {
        5.0 * deviation / f64::from(COUNT).sqrt()
    }

    #[test]
    fn numbers_are_uniform() {
        for (key, stream) in [([0; 4], 0), ([7, 0, 3, 0], 1), ([u32::MAX; 4], 5)] {
            let x = numbers(key, stream);
            assert!(x.iter().all(|v| (0.0..1.0).contains(v)));
            // Moments of the uniform distribution: mean 1/2, variance 1/12, fourth central moment 1/80.
            assert!((mean(x.iter().copied()) - 0.5).abs() < bound((1.0f64 / 12.0).sqrt()));
            assert!((covariance(&x, &x) - 1.0 / 12.0).abs() < bound((1.0f64 / 80.0 - 1.0 / 144.0).sqrt()));
            for tenth in 0..10 {
                let share = mean(x.iter().map(|v| f64::from((*v * 10.0) as usize == tenth)));
                assert!((share - 0.1).abs() < bound(0.3), "{tenth}: {share}");
            }
        }
    }

    #[test]
    fn seeds_steps_streams_and_neighbours_are_uncorrelated() {
        let base = numbers([1, 0, 1, 0], 0);
        let others = [
            ("seed", numbers([2, 0, 1, 0], 0)),
            ("upper seed", numbers([1, 1, 1, 0], 0)),
            ("step", numbers([1, 0, 2, 0], 0)),
            ("upper step", numbers([1, 0, 1, 1], 0)),
            ("stream", numbers([1, 0, 1, 0], 1)),
            ("neighbour", [&base[1..], &base[..1]].concat()),
        ];
        for (what, other) in others {
            let found = covariance(&base, &other);
            assert!(found.abs() < bound(1.0 / 12.0), "{what}: {found}");
        }
    }

    #[test]
    fn keys_tell_seeds_and_steps_apart() {
        let words = |seed, step| random_key(seed, step).to_i64_vec();
        assert_eq!(words(1 << 32 | 5, 3 << 32 | 9), [5, 1, 9, 3]);
        assert_eq!(words(u64::MAX, 0), [0xffff_ffff, 0xffff_ffff, 0, 0]);
        assert_eq!(*random_key(0, 0).ty(), random_key_type());
    }
}
