//! Samples for training, evaluation and inference: named arrays from `.npz`, `.safetensors` or `.csv` files, and images in folders.
//!
//! The first axis of every array is the sample axis. Uncompressed files are memory-mapped: a batch copies the rows it needs and nothing
//! else, so a data set may be larger than memory.
//!
//! An input `x` of a model is read from the array `x`, `in/x` or `in_x`; a target from `target`, `label` or `y`, or from the array that
//! the caller names.

mod array;
mod cache;
mod csv;
mod images;
mod npy;
mod npz;
mod order;
mod safetensors;
mod samples;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meganeura_ir::{DType, Shape, Tensor, TensorType};

pub use array::Array;
pub(crate) use cache::RecordCache;
pub use images::{Channels, Filter, Fit, ImageFolder, ImageOptions, ImagePreprocessing, Layout, PreprocessingError};
pub(crate) use images::{NAMES_KEY, class_names, described, written_names};
pub use npz::write_npz;
pub(crate) use order::SplitMix64;
pub use order::epoch_order;
pub(crate) use order::write_epoch_order;
pub use samples::{Samples, TARGET_INPUT, Target};

/// Keys under which a target is looked for, in this order, when the caller names none.
pub const TARGET_KEYS: [&str; 3] = ["target", "label", "y"];

/// What is wrong with a data file, and where.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("cannot read {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} is no data file that can be read here: give an .npz, .safetensors or .csv file")]
    UnknownFormat { path: PathBuf },
    #[error("{path} is damaged or incomplete: {reason}")]
    Damaged { path: PathBuf, reason: String },
    #[error("{path}: array {array:?} {reason}")]
    Array { path: PathBuf, array: String, reason: String },
    #[error("{path} has no array for {role}: looked for {}; the file holds {}", quoted(.looked_for), quoted(.found))]
    Missing { path: PathBuf, role: String, looked_for: Vec<String>, found: Vec<String> },
    #[error(
        "{path}: array {array:?} is {found}, {role} takes {expected}; save it as {expected}, for instance with .astype({numpy:?})"
    )]
    DType { path: PathBuf, array: String, role: String, found: DType, expected: DType, numpy: &'static str },
    #[error("{path}: array {array:?} has shape {found}, {role} takes {expected}")]
    Shape { path: PathBuf, array: String, role: String, found: Shape, expected: String },
    #[error("{path}: array {array:?} is a scalar: its first axis must be the sample axis")]
    NoSampleAxis { path: PathBuf, array: String },
    #[error(
        "{path}: array {array:?} holds {found} samples, {other:?} holds {expected}: the first axis is the sample axis of every array"
    )]
    SampleCount { path: PathBuf, array: String, found: usize, other: String, expected: usize },
    #[error("{path}: {reason}")]
    ImageFolder { path: PathBuf, reason: String },
    #[error("cannot use the image {path}: {reason}")]
    Image { path: PathBuf, reason: String },
    #[error("{path} holds no samples")]
    Empty { path: PathBuf },
}

fn quoted(names: &[String]) -> String {
    match names {
        [] => "nothing".to_string(),
        _ => names.iter().map(|n| format!("{n:?}")).collect::<Vec<_>>().join(", "),
    }
}

/// The named arrays of one file, or of memory.
#[derive(Clone, Debug, Default)]
pub struct Dataset {
    path: PathBuf,
    arrays: BTreeMap<String, Array>,
    /// From a table: columns that no key claims form the input of a model that has one input only.
    tabular: bool,
    /// What feeds the input of images.
    images: Option<Arc<ImageFolder>>,
}

/// Where labels of an image folder are among the arrays.
const LABEL_KEY: &str = "label";

impl Dataset {
    /// Opens an `.npz`, `.safetensors` or `.csv` file, recognised by its content and, for text, by its name.
    ///
    /// # Errors
    /// [`DataError`] where the file is missing, damaged, of another format, or holds an element type that no model takes.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = path.as_ref();
        if path.is_dir() {
            let reason = "it is a folder: what a model wants images to be must be known to read them".to_owned();
            return Err(DataError::ImageFolder { path: path.to_path_buf(), reason });
        }
        let map = array::map(path)?;
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
        let tabular = extension == "csv";
        let arrays = if npz::recognises(&map) || extension == "npz" {
            npz::read(path, map)?
        } else if safetensors::recognises(&map) || extension == "safetensors" {
            safetensors::read(path, map)?
        } else if tabular {
            csv::read(path, &map)?
        } else {
            return Err(DataError::UnknownFormat { path: path.to_path_buf() });
        };
        Ok(Dataset { path: path.to_path_buf(), arrays, tabular, images: None })
    }

    /// Images in a folder for each class, for the input that `preprocessing` names; the array `label` holds the index of each image's class in
    /// `classes`, or in the folders in order of their names. [`Model::image_preprocessing`](crate::Model::image_preprocessing) and
    /// [`Model::class_names`](crate::Model::class_names) tell what a model wants.
    ///
    /// # Errors
    /// As [`ImageFolder::open`]. Images are decoded when they are needed.
    pub fn open_images(
        path: impl AsRef<Path>,
        preprocessing: ImagePreprocessing,
        classes: Option<&[String]>,
    ) -> Result<Self, DataError> {
        let path = path.as_ref();
        let images = ImageFolder::open(path, preprocessing, classes)?;
        let labels = Tensor::from_i64(DType::I64, [images.labels().len()], images.labels());
        let arrays = [(LABEL_KEY.to_owned(), Array::from(labels))].into();
        Ok(Dataset { path: path.to_path_buf(), arrays, tabular: false, images: Some(Arc::new(images)) })
    }

    /// The images, where the data is a folder of images.
    pub fn images(&self) -> Option<&Arc<ImageFolder>> {
        self.images.as_ref()
    }

    /// A data set in memory. The first axis of every tensor is the sample axis.
    pub fn from_tensors<N: Into<String>>(tensors: impl IntoIterator<Item = (N, Tensor)>) -> Self {
        let arrays = tensors.into_iter().map(|(name, tensor)| (name.into(), Array::from(tensor))).collect();
        Dataset { path: PathBuf::from("<memory>"), arrays, tabular: false, images: None }
    }

    /// Where the data came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names and arrays, by name.
    pub fn arrays(&self) -> impl Iterator<Item = (&str, &Array)> {
        self.arrays.iter().map(|(name, array)| (name.as_str(), array))
    }

    pub fn array(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)
    }

    /// The array for the model input `name`, and the key under which it was found. `sole` says that the model has no other input:
    /// then all columns of a table form it, except the usual target columns and `target`.
    ///
    /// # Errors
    /// [`DataError::Missing`] with the keys that were tried and those that the file has.
    pub fn input(&self, name: &str, sole: bool, target: Option<&str>) -> Result<(String, Array), DataError> {
        let keys = [name.to_string(), format!("in/{name}"), format!("in_{name}")];
        if let Some(found) = self.find(&keys) {
            return Ok(found);
        }
        if self.tabular {
            let grouped = |column: &str| column.strip_prefix(name).is_some_and(is_column_suffix);
            let rest = |column: &str| sole && !TARGET_KEYS.contains(&column) && target != Some(column);
            for claims in [&grouped as &dyn Fn(&str) -> bool, &rest] {
                if let Some(joined) = csv::join(self.arrays.iter().filter(|(column, _)| claims(column))) {
                    return Ok((name.to_string(), joined));
                }
            }
        }
        Err(self.missing(format!("input {name:?}"), &keys))
    }

    /// The array of targets, under `key` or the first of [`TARGET_KEYS`] that is present.
    ///
    /// # Errors
    /// [`DataError::Missing`] with the keys that were tried and those that the file has.
    pub fn target(&self, key: Option<&str>) -> Result<(String, Array), DataError> {
        let keys: Vec<String> = match key {
            Some(key) => vec![key.to_string()],
            None => TARGET_KEYS.map(String::from).to_vec(),
        };
        self.find(&keys).ok_or_else(|| self.missing("the target".to_string(), &keys))
    }

    fn find(&self, keys: &[String]) -> Option<(String, Array)> {
        keys.iter().find_map(|key| self.arrays.get(key).map(|array| (key.clone(), array.clone())))
    }

    fn missing(&self, role: String, looked_for: &[String]) -> DataError {
        let found = self.arrays.keys().cloned().collect();
        DataError::Missing { path: self.path.clone(), role, looked_for: looked_for.to_vec(), found }
    }
}

/// `.0`, `_0` or `[0]`: the rest of the name of a column that is one element of an array.
fn is_column_suffix(rest: &str) -> bool {
    let digits = rest.strip_prefix(['.', '_']).or_else(|| rest.strip_prefix('[').and_then(|r| r.strip_suffix(']')));
    digits.is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether every value of `from` is a value of `to`.
pub(crate) fn widens(from: DType, to: DType) -> bool {
    use meganeura_ir::DTypeClass::{Bool, Float, Int};
    let unsigned = |d: DType| matches!(d, DType::U8 | DType::U16 | DType::U32 | DType::U64);
    match (from.class(), to.class()) {
        _ if from == to => true,
        (Float, Float) => from.size() < to.size(),
        (Bool, Int) => true,
        (Int, Int) => from.size() < to.size() && (unsigned(from) || !unsigned(to)),
        _ => false,
    }
}

/// NumPy's name of a dtype.
pub(crate) fn numpy_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 | DType::BF16 => "float32",
        DType::F16 => "float16",
        DType::F64 => "float64",
        DType::I8 => "int8",
        DType::I16 => "int16",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::U8 => "uint8",
        DType::U16 => "uint16",
        DType::U32 => "uint32",
        DType::U64 => "uint64",
        DType::Bool => "bool",
    }
}

/// The type of a batch of `samples` rows of an array of type `ty`.
pub(crate) fn batch_type(ty: &TensorType, samples: usize) -> TensorType {
    let shape: Shape = std::iter::once(samples).chain(ty.shape.iter().skip(1).copied()).collect();
    TensorType::new(ty.dtype, shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels() -> Tensor {
        Tensor::from_i64(DType::I64, [3], &[0, 1, 2])
    }

    #[test]
    fn an_input_is_found_under_its_name_and_both_prefixes() {
        for key in ["x", "in/x", "in_x"] {
            let data = Dataset::from_tensors([(key, labels())]);
            assert_eq!(data.input("x", true, None).unwrap().0, key);
        }
    }

    #[test]
    fn a_missing_input_names_the_keys_tried_and_found() {
        let data = Dataset::from_tensors([("image", labels())]);
        let message = data.input("x", true, None).unwrap_err().to_string();
        for part in ["input \"x\"", "\"in/x\"", "\"in_x\"", "holds \"image\""] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn targets_are_found_in_order_of_the_conventional_keys() {
        let data = Dataset::from_tensors([("y", labels()), ("label", labels())]);
        assert_eq!(data.target(None).unwrap().0, "label");
        assert_eq!(data.target(Some("y")).unwrap().0, "y");
        assert!(matches!(data.target(Some("z")), Err(DataError::Missing { .. })));
    }

    #[test]
    fn only_lossless_conversions_widen() {
        assert!(widens(DType::I32, DType::I64) && widens(DType::U8, DType::I16) && widens(DType::F16, DType::F32));
        assert!(widens(DType::Bool, DType::I64));
        assert!(!widens(DType::U64, DType::I64) && !widens(DType::I8, DType::U16) && !widens(DType::F64, DType::F32));
        assert!(!widens(DType::F16, DType::BF16) && !widens(DType::I64, DType::F32) && !widens(DType::F32, DType::I64));
    }
}
