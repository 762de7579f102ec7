//! Resizing as `Image.resize` of Pillow up to version 12 does it: a filter that widens with the reduction, so that it antialiases, first along
//! rows and then along columns, each in fixed point and rounded to bytes. Results equal Pillow's to the bit.

use std::str::FromStr;

/// Bits of a coefficient after the point: those of an i32 without the sign, a byte, and a bit that sums of coefficients may need.
const PRECISION: u32 = 32 - 8 - 2;

/// The filter by which pixels are averaged or interpolated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// Pillow's `BILINEAR`, a triangle.
    #[default]
    Bilinear,
    /// Pillow's `BICUBIC`, Keys' cubic with `a = -0.5`.
    Bicubic,
}

impl Filter {
    /// Distance from the centre beyond which the filter is 0.
    fn support(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Filter::Bilinear => (1.0 - x).max(0.0),
            Filter::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Filter::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            Filter::Bicubic => 0.0,
        }
    }
}

impl FromStr for Filter {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "bilinear" => Ok(Filter::Bilinear),
            "bicubic" => Ok(Filter::Bicubic),
            _ => Err("choose bilinear or bicubic".to_owned()),
        }
    }
}

/// Interleaved bytes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    /// `[height, width, channels]`
    pub data: Vec<u8>,
}

/// What one element of a resized axis is made of: coefficients for the elements from `first` on.
struct Taps {
    first: usize,
    coefficients: Vec<i32>,
}

/// The taps of each of `to` elements, made of `from`.
fn taps(from: usize, to: usize, filter: Filter) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let reduction = scale.max(1.0);
    let support = filter.support() * reduction;
    let of_element = |element: usize| {
        let centre = (element as f64 + 0.5) * scale;
        let first = (centre - support + 0.5).max(0.0) as usize;
        let last = ((centre + support + 0.5) as usize).min(from);
        let weights: Vec<f64> = (first..last).map(|x| filter.at((x as f64 - centre + 0.5) / reduction)).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let share = if sum == 0.0 { *weight } else { weight / sum } * f64::from(1 << PRECISION);
            (share + 0.5_f64.copysign(share)) as i32
        };
        Taps { first, coefficients: weights.iter().map(fixed).collect() }
    };
    (0..to).map(of_element).collect()
}

impl Pixels {
    /// The image at another size, both of whose sides are at least 1.
    pub fn resized(self, width: usize, height: usize, filter: Filter) -> Pixels {
        let image = if width == self.width { self } else { self.with_width(width, filter) };
        if height == image.height { image } else { image.with_height(height, filter) }
    }

    fn with_width(&self, width: usize, filter: Filter) -> Pixels {
        let taps = taps(self.width, width, filter);
        let mut data = Vec::with_capacity(self.height * width * self.channels);
        for row in self.data.chunks_exact(self.width * self.channels) {
            for tap in &taps {
                let pixels = || row.chunks_exact(self.channels).skip(tap.first);
                data.extend((0..self.channels).map(|c| weighted(&tap.coefficients, pixels().map(|pixel| pixel[c]))));
            }
        }
        Pixels { width, data, ..*self }
    }

    fn with_height(&self, height: usize, filter: Filter) -> Pixels {
        let row = self.width * self.channels;
        let mut data = Vec::with_capacity(height * row);
        for tap in taps(self.height, height, filter) {
            let rows = || self.data.chunks_exact(row).skip(tap.first);
            data.extend((0..row).map(|x| weighted(&tap.coefficients, rows().map(|row| row[x]))));
        }
        Pixels { height, data, ..*self }
    }

    /// The part of a given size from (`left`, `top`) on; what lies outside of the image is `padding`.
    pub fn window(&self, left: isize, top: isize, width: usize, height: usize, padding: u8) -> Pixels {
        let mut data = vec![padding; width * height * self.channels];
        for (y, out) in data.chunks_exact_mut(width * self.channels).enumerate() {
            for (x, out) in out.chunks_exact_mut(self.channels).enumerate() {
                let at = |base: isize, offset: usize, size: usize| {
                    base.checked_add_unsigned(offset)?.try_into().ok().filter(|&i: &usize| i < size)
                };
                if let (Some(x), Some(y)) = (at(left, x, self.width), at(top, y, self.height)) {
                    out.copy_from_slice(&self.data[(y * self.width + x) * self.channels..][..self.channels]);
                }
            }
        }
        Pixels { width, height, data, ..*self }
    }
}

fn weighted(coefficients: &[i32], values: impl Iterator<Item = u8>) -> u8 {
    let half = 1 << (PRECISION - 1);
    let sum: i32 = coefficients.iter().zip(values).map(|(c, v)| c * i32::from(v)).sum::<i32>() + half;
    (sum >> PRECISION).clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use ndarray::Array3;
    use ndarray_npy::NpzReader;

    use super::*;

    #[test]
    fn every_size_and_filter_is_pillows() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/images/expect.npz");
        let mut reference = NpzReader::new(File::open(path).unwrap()).unwrap();
        let mut array = |name: &str| -> Pixels {
            let array: Array3<u8> = reference.by_name(&format!("{name}.npy")).unwrap();
            let (height, width, channels) = array.dim();
            Pixels { width, height, channels, data: array.iter().copied().collect() }
        };
        let image = array("image");
        let mut compared = 0;
        for (name, filter) in [("bilinear", Filter::Bilinear), ("bicubic", Filter::Bicubic)] {
            for (width, height) in [(7, 5), (37, 29), (16, 64), (90, 11), (1, 1), (37, 80)] {
                let found = image.clone().resized(width, height, filter);
                assert_eq!(found, array(&format!("{name}/{width}x{height}")), "{name} {width}x{height}");
                compared += 1;
            }
        }
        assert_eq!(compared, 12);
    }

    #[test]
    fn a_window_reaches_beyond_the_image() {
        let image = Pixels { width: 2, height: 2, channels: 1, data: vec![1, 2, 3, 4] };
        assert_eq!(image.window(-1, 1, 4, 2, 9).data, [9, 3, 4, 9, 9, 9, 9, 9]);
        assert_eq!(image.window(1, 0, 1, 2, 9).data, [2, 4]);
    }
}
