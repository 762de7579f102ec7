//! Tables with a header row. A column of whole numbers is int64, any other float32.

use std::collections::BTreeMap;
use std::path::Path;

use meganeura_ir::{DType, Tensor};

use super::{Array, DataError};

/// Every column as an array of shape `[rows]`.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, Array>, DataError> {
    let damaged = |reason: String| DataError::Damaged { path: path.to_path_buf(), reason };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(bytes);
    let names: Vec<String> = reader.headers().map_err(|e| damaged(e.to_string()))?.iter().map(String::from).collect();
    let mut columns = vec![Vec::new(); names.len()];
    for (row, record) in reader.records().enumerate() {
        let record = record.map_err(|e| damaged(e.to_string()))?;
        for ((column, name), text) in columns.iter_mut().zip(&names).zip(&record) {
            let value: f64 =
                text.parse().map_err(|_| damaged(format!("row {}, column {name:?}: {text:?} is not a number", row + 1)))?;
            column.push(value);
        }
    }
    let mut arrays = BTreeMap::new();
    for (name, values) in names.into_iter().zip(columns) {
        let whole = values.iter().all(|v| v.fract() == 0.0 && v.abs() < 2f64.powi(53));
        let dtype = if whole { DType::I64 } else { DType::F32 };
        let column = Array::from(Tensor::from_f64(dtype, [values.len()], &values));
        if arrays.insert(name.clone(), column).is_some() {
            return Err(damaged(format!("two columns are named {name:?}")));
        }
    }
    Ok(arrays)
}

/// The columns side by side, as float32 of shape `[rows, columns]`; those that end in a number come in its order. `None` without columns.
pub(super) fn join<'a>(columns: impl Iterator<Item = (&'a String, &'a Array)>) -> Option<Array> {
    let mut columns: Vec<(&String, &Array)> = columns.collect();
    columns.sort_by_key(|(name, _)| (trailing_number(name), *name));
    let values: Vec<Vec<f64>> = columns.iter().map(|(_, column)| column.tensor().to_f64_vec()).collect();
    let rows = values.first()?.len();
    let joined: Vec<f32> = (0..rows).flat_map(|row| values.iter().map(move |column| column[row] as f32)).collect();
    Some(Array::from(Tensor::from_f32([rows, values.len()], &joined)))
}

/// The number at the end of a column name, before any closing bracket.
fn trailing_number(name: &str) -> Option<u64> {
    let name = name.strip_suffix(']').unwrap_or(name);
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Dataset;

    fn open(text: &str) -> Result<Dataset, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.csv");
        std::fs::write(&path, text).unwrap();
        Dataset::open(path)
    }

    #[test]
    fn numbered_columns_form_one_input_in_numeric_order() {
        let data = open("x.10,x.2,label\n1.5,2,0\n3,4,1\n").unwrap();
        let (_, x) = data.input("x", false, None).unwrap();
        assert_eq!(x.tensor(), Tensor::from_f32([2, 2], &[2.0, 1.5, 4.0, 3.0]));
        assert_eq!(data.target(None).unwrap().1.tensor(), Tensor::from_i64(DType::I64, [2], &[0, 1]));
    }

    #[test]
    fn the_sole_input_takes_every_column_but_the_target() {
        let data = open("height,width,y\n1,2,0.5\n3,4,0.25\n").unwrap();
        let (_, x) = data.input("features", true, None).unwrap();
        assert_eq!(x.tensor(), Tensor::from_f32([2, 2], &[1.0, 2.0, 3.0, 4.0]));
        assert!(data.input("features", false, None).is_err());
    }

    #[test]
    fn a_cell_that_is_no_number_is_named() {
        let message = open("a,b\n1,2\n3,cat\n").unwrap_err().to_string();
        assert!(message.contains("row 2, column \"b\": \"cat\""), "{message}");
    }

    #[test]
    fn rows_of_different_lengths_are_an_error() {
        assert!(matches!(open("a,b\n1,2\n3\n"), Err(DataError::Damaged { .. })));
    }
}
