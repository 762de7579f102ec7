//! Tensors that a model computes with and never trains, recognised by what they hold: masks, position tables, frequencies.
//!
//! Training leaves no weight with such values, and a weight that is merely initialised is random, zero or one.

use meganeura_ir::{DType, TensorType};

use half::{bf16, f16};

/// Values at or below this exclude a position from attention.
const EXCLUDED: f64 = -1e4;
/// Rows of a position table that are compared with sines.
const TABLE_ROWS: usize = 8;
/// Deviation of a table in bf16 from the recurrence of sines.
const TABLE_ERROR: f64 = 3e-2;
/// Relative deviation of a frequency in half precision from its geometric series.
const SERIES_ERROR: f64 = 1e-2;

/// Where a tensor is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Anywhere,
    /// Where InstanceNormalization has its scale or bias, under a name that an exporter made up. PyTorch's exporters write a group norm so, whose
    /// own scale and bias come after it.
    MadeNorm,
}

/// What a tensor holds that is no weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Mask,
    CausalMask,
    Sines,
    Frequencies,
    /// A norm's scale of ones, or its bias of zeros.
    Neutral,
}

impl Content {
    pub fn is_mask(self) -> bool {
        matches!(self, Content::Mask | Content::CausalMask)
    }

    pub fn reason(self) -> &'static str {
        match self {
            Content::Mask => "a mask, by its content",
            Content::CausalMask => "a causal mask, by its content",
            Content::Sines => "a position table of sines, by its content",
            Content::Frequencies => "frequencies, by their content",
            Content::Neutral => "a norm's scale or bias that does nothing, by its content",
        }
    }
}

/// What a float tensor is, if it is no weight. `bytes` are its elements, little-endian.
pub(crate) fn recognise(ty: &TensorType, bytes: &[u8], place: Place) -> Option<Content> {
    let sizes: Vec<usize> = ty.shape.iter().copied().filter(|&size| size != 1).collect();
    let at = |index: usize| element(ty.dtype, bytes, index).unwrap_or(f64::NAN);
    let count = ty.shape.numel();
    if is_mask(count, at) {
        return Some(Content::Mask);
    }
    if place == Place::MadeNorm && [0.0, 1.0].iter().any(|&fill| (0..count).all(|i| at(i) == fill)) {
        return Some(Content::Neutral);
    }
    match *sizes.as_slice() {
        [n] if n >= 4 => series(n, at),
        [.., rows, columns] if is_triangles(&sizes, rows, columns, at) => Some(Content::CausalMask),
        [rows, columns] if is_table(rows, columns, &|row, column| at(row * columns + column)) => Some(Content::Sines),
        _ => None,
    }
}

fn element(dtype: DType, bytes: &[u8], index: usize) -> Option<f64> {
    fn word<const N: usize>(bytes: &[u8], index: usize) -> Option<[u8; N]> {
        bytes.get(index.checked_mul(N)?..)?.first_chunk().copied()
    }
    Some(match dtype {
        DType::F32 => f32::from_le_bytes(word(bytes, index)?).into(),
        DType::F64 => f64::from_le_bytes(word(bytes, index)?),
        DType::F16 => f16::from_le_bytes(word(bytes, index)?).into(),
        DType::BF16 => bf16::from_le_bytes(word(bytes, index)?).into(),
        _ => return None,
    })
}

fn series(n: usize, at: impl Fn(usize) -> f64) -> Option<Content> {
    let (first, ratio) = (at(0), at(1) / at(0));
    let starts = first == 1.0 || (first - ratio).abs() <= SERIES_ERROR * ratio;
    let is_geometric = (1..n).all(|i| (at(i) / at(i - 1) / ratio - 1.0).abs() <= SERIES_ERROR);
    (starts && ratio > 0.0 && ratio < 1.0 && is_geometric).then_some(Content::Frequencies)
}

/// Whether every element is 0 or excludes a position, and there are both.
fn is_mask(count: usize, at: impl Fn(usize) -> f64) -> bool {
    let excludes = |index: usize| at(index) <= EXCLUDED;
    (0..count).all(|i| at(i) == 0.0 || excludes(i)) && (0..count).any(excludes) && !(0..count).all(excludes)
}

/// Whether every plane of the last two axes is a lower triangle of ones, or all are lower triangles of zeros, and the rest the other.
fn is_triangles(sizes: &[usize], rows: usize, columns: usize, at: impl Fn(usize) -> f64) -> bool {
    let count: usize = sizes.iter().product();
    let lies_below = |index: usize| index % columns <= index / columns % rows;
    let all = |below: f64, above: f64| (0..count).all(|i| at(i) == if lies_below(i) { below } else { above });
    rows == columns && rows >= 4 && (all(1.0, 0.0) || all(0.0, 1.0))
}

/// Whether row `n` holds the sines and cosines of `n` times the frequencies of the columns, one of which is 1. Both functions
/// obey `f(n + 1) = 2 cos(frequency) f(n) - f(n - 1)`.
fn is_table(rows: usize, columns: usize, at: &dyn Fn(usize, usize) -> f64) -> bool {
    let has_start = (0..columns).all(|c| at(0, c) == 0.0 || at(0, c) == 1.0);
    if rows < 4 || columns < 2 || !has_start {
        return false;
    }
    let cosine = |c: usize| if at(0, c) == 0.0 { (1.0 - at(1, c).powi(2)).sqrt() } else { at(1, c) };
    let next = |r: usize, c: usize| 2.0 * cosine(c) * at(r - 1, c) - at(r - 2, c);
    (0..columns).any(|c| (cosine(c) - 1f64.cos()).abs() < TABLE_ERROR)
        && (2..rows.min(TABLE_ROWS)).all(|r| (0..columns).all(|c| (at(r, c) - next(r, c)).abs() < TABLE_ERROR))
}

#[cfg(test)]
mod tests {
    use meganeura_ir::Tensor;
    use meganeura_ir::testing::random_tensor;

    use super::*;

    fn judge(dtype: DType, shape: &[usize], value: impl Fn(usize) -> f64) -> Option<Content> {
        let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
        let tensor = Tensor::from_f64(dtype, shape, &values);
        recognise(tensor.ty(), tensor.bytes(), Place::Anywhere)
    }

    /// Position `row` and `column` of the angles of a table with 16 columns: every frequency twice, as rotary embeddings have it.
    fn angle(index: usize) -> f64 {
        (index / 16) as f64 * 10000f64.powf(-((index % 8) as f64) / 8.0)
    }

    #[test]
    fn what_models_compute_with_is_recognised() {
        let future = |i: usize| i % 6 > i / 6;
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let mask = judge(dtype, &[1, 1, 6, 6], |i| if future(i) { f64::NEG_INFINITY } else { 0.0 });
            assert_eq!(mask, Some(Content::Mask), "{dtype}");
            assert!(judge(dtype, &[6, 6], |i| if future(i) { -65504.0 } else { 0.0 }).is_some());
            assert!(
                judge(dtype, &[2, 1, 6, 6], |i| if future(i % 36) { -65504.0 } else { 0.0 }).is_some(),
                "one for each sample"
            );
            assert!(
                judge(dtype, &[3, 1, 4], |i| if i == 5 { f64::NEG_INFINITY } else { 0.0 }).is_some(),
                "one key of one sample"
            );
            assert!(judge(dtype, &[2, 1, 6, 6], |i| f64::from(u8::from(!future(i % 36)))).is_some(), "ones for each sample");
            assert!(judge(dtype, &[1, 1, 6, 6], |i| f64::from(u8::from(!future(i)))).is_some(), "ones that are kept");
            assert!(judge(dtype, &[6, 6], |i| f64::from(u8::from(future(i)))).is_some(), "ones that are dropped");
            assert!(judge(dtype, &[1, 12, 16], |i| angle(i).cos()).is_some());
            assert!(judge(dtype, &[12, 16], |i| angle(i).sin()).is_some());
            let half = |i: usize| angle(i / 16 * 16 + i % 16 / 2);
            let mixed = |i: usize| if i.is_multiple_of(2) { half(i).sin() } else { half(i).cos() };
            assert!(judge(dtype, &[12, 1, 16], mixed).is_some());
            assert!(judge(dtype, &[1, 8, 1], |i| 10000f64.powf(-(i as f64) / 8.0)).is_some());
            assert!(judge(dtype, &[8], |i| 0.5f64.powi(i as i32 + 1)).is_some(), "slopes of ALiBi");
        }
    }

    #[test]
    fn weights_are_not_recognised() {
        for shape in [&[6, 6][..], &[8], &[12, 16], &[1, 1, 6, 6]] {
            let random = random_tensor(&TensorType::new(DType::F32, shape), 7).to_f64_vec();
            assert_eq!(judge(DType::F32, shape, |i| random[i]), None);
            assert_eq!(judge(DType::F32, shape, |_| 0.0), None);
            assert_eq!(judge(DType::F32, shape, |_| 1.0), None);
        }
        assert_eq!(judge(DType::F32, &[6, 6], |i| f64::from(u8::from(i.is_multiple_of(7)))), None, "an identity");
        assert_eq!(judge(DType::F32, &[2, 6, 6], |i| f64::from(u8::from(i < 36 && i % 6 <= i / 6))), None, "one triangle of two");
        assert_eq!(judge(DType::F32, &[4], |_| -1e6), None, "nothing is kept");
        assert_eq!(judge(DType::F32, &[16], |i| i as f64), None);
        assert_eq!(judge(DType::F32, &[0, 4], |_| 0.0), None);
    }
}
