//! Reads the digits, and judges predictions of them.

use std::fs::File;
use std::io;
use std::path::Path;

use ndarray::{Array1, Array2, Array4, s};
use ndarray_npy::{NpzReader, NpzWriter, ReadNpzError, ReadableElement};

use crate::shell::XtaskError;

/// Images f32 [n, 1, 8, 8] from 0 to 1, and which digit each shows.
pub struct Digits {
    pub images: Array4<f32>,
    pub labels: Array1<i64>,
}

/// The arrays `image` and `label` of an npz file.
pub fn read(path: &Path) -> Result<Digits, XtaskError> {
    let digits = Digits { images: read_array(path, "image")?, labels: read_array(path, "label")? };
    if digits.images.len_of(ndarray::Axis(0)) != digits.labels.len() {
        return Err(XtaskError::Data { path: path.into(), problem: "image and label have different lengths".into() });
    }
    Ok(digits)
}

/// The array `logits` f32 [n, classes] of an npz file.
pub fn read_logits(path: &Path) -> Result<Array2<f32>, XtaskError> {
    read_array(path, "logits")
}

/// Writes sample `index` as the only one of a new npz file, without its label.
pub fn write_one(digits: &Digits, index: usize, path: &Path) -> Result<(), XtaskError> {
    let file = File::create(path).map_err(|source| XtaskError::File { path: path.into(), source })?;
    let image = digits.images.slice(s![index..index + 1, .., .., ..]);
    let mut npz = NpzWriter::new(file);
    let written = npz.add_array("image", &image).and_then(|()| npz.finish().map(drop));
    written.map_err(|source| XtaskError::WriteNpz { path: path.into(), source })
}

/// The share of rows of `logits` [n, classes] whose largest element is at the label; 0 where there are no rows.
pub fn accuracy(logits: &Array2<f32>, labels: &Array1<i64>) -> f64 {
    let right = logits.rows().into_iter().zip(labels).filter(|(row, label)| argmax(row.iter()) == Some(**label as usize)).count();
    right as f64 / labels.len().max(1) as f64
}

/// The index of the first of the largest elements.
pub fn argmax<'a>(row: impl Iterator<Item = &'a f32>) -> Option<usize> {
    row.enumerate().reduce(|best, candidate| if candidate.1 > best.1 { candidate } else { best }).map(|(index, _)| index)
}

/// An image as text, two columns a pixel, darker where the ink is.
pub fn draw(digits: &Digits, index: usize) -> String {
    const INK: [&str; 5] = ["  ", "░░", "▒▒", "▓▓", "██"];
    let image = digits.images.slice(s![index, 0, .., ..]);
    let line = |row: ndarray::ArrayView1<f32>| {
        row.iter().map(|ink| INK[((ink.clamp(0.0, 1.0) * 4.0).round()) as usize]).collect::<String>()
    };
    image.rows().into_iter().map(|row| format!("    {}\n", line(row))).collect()
}

fn read_array<T: ReadableElement, D: ndarray::Dimension>(path: &Path, name: &str) -> Result<ndarray::Array<T, D>, XtaskError> {
    let read = |source| XtaskError::ReadNpz { path: path.into(), source };
    let file = File::open(path).map_err(|source| XtaskError::File { path: path.into(), source })?;
    let mut npz = NpzReader::new(io::BufReader::new(file)).map_err(read)?;
    npz.by_name(name).map_err(|source| match source {
        ReadNpzError::Zip(_) => XtaskError::Data { path: path.into(), problem: format!("has no array {name:?}") },
        source => read(source),
    })
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn accuracy_is_the_share_of_rows_that_peak_at_their_label() {
        let logits = array![[0.1, 0.9, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0], [5.0, 4.0, 3.0]];
        assert_eq!(accuracy(&logits, &array![1, 0, 2, 2]), 0.75);
        assert_eq!(accuracy(&Array2::zeros((0, 3)), &array![]), 0.0);
    }

    #[test]
    fn the_first_of_equal_maxima_wins() {
        assert_eq!(argmax([1.0, 3.0, 3.0].iter()), Some(1));
        assert_eq!(argmax([].iter()), None);
    }

    #[test]
    fn the_fixtures_hold_all_ten_digits_at_unit_scale() -> Result<(), XtaskError> {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
        for (file, count) in [("digits-train.npz", 1437), ("digits-test.npz", 360)] {
            let digits = read(&fixtures.join(file))?;
            assert_eq!(digits.images.shape(), [count, 1, 8, 8]);
            assert!(digits.images.iter().all(|ink| (0.0..=1.0).contains(ink)));
            assert!((0..10).all(|digit| digits.labels.iter().filter(|label| **label == digit).count() >= 30));
        }
        Ok(())
    }

    #[test]
    fn one_sample_survives_the_way_through_a_file() -> Result<(), Box<dyn std::error::Error>> {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/digits-test.npz");
        let digits = read(&fixture)?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("one.npz");
        write_one(&digits, 7, &path)?;
        let image: Array4<f32> = read_array(&path, "image")?;
        assert_eq!(image, digits.images.slice(s![7..8, .., .., ..]));
        assert!(matches!(read_logits(&path), Err(XtaskError::Data { .. })));
        Ok(())
    }
}
