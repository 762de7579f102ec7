//! The tests on disk: folders of ONNX's backend test data.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use meganeura_import::{ImportError, Outline, read_tensor};
use meganeura_ir::{DType, Tensor};

use crate::compare::Digits;

/// Tests whose expected values were written by hand.
const ROUNDED: [&str; 1] = ["test_averagepool_2d_ceil_last_window_starts_on_pad"];

/// Why test data cannot be used. These are faults of the data, not of what is tested.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    Import { path: PathBuf, source: Box<ImportError> },
    #[error("{0}: one data set is expected")]
    DataSets(PathBuf),
    #[error("there is no test {0:?}")]
    Unknown(String),
}

/// A folder of the test data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Folder {
    Node,
    Simple,
    PytorchConverted,
    PytorchOperator,
    Light,
}

impl Folder {
    pub const ALL: [Folder; 5] = [Folder::Node, Folder::Simple, Folder::PytorchConverted, Folder::PytorchOperator, Folder::Light];

    pub fn name(self) -> &'static str {
        match self {
            Folder::Node => "node",
            Folder::Simple => "simple",
            Folder::PytorchConverted => "pytorch-converted",
            Folder::PytorchOperator => "pytorch-operator",
            Folder::Light => "light",
        }
    }
}

/// One test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    pub folder: Folder,
    /// The name in its folder, e.g. `test_abs`.
    pub name: String,
    pub model: PathBuf,
}

impl Test {
    /// `node/test_abs`
    pub fn id(&self) -> String {
        format!("{}/{}", self.folder.name(), self.name)
    }

    /// The name of the test of the operator itself, where this one tests the function that ONNX defines it by.
    pub fn plain_name(&self) -> &str {
        self.name.split_once("_expanded").map_or(&self.name, |(plain, _)| plain)
    }

    pub fn digits(&self) -> Digits {
        if ROUNDED.contains(&self.name.as_str()) { Digits::Rounded } else { Digits::All }
    }

    /// The outline of the model.
    pub fn outline(&self) -> Result<Outline, SuiteError> {
        outline(&self.model)
    }

    /// The operator under test and the opset of the model, for tests of single operators.
    pub fn operator(&self) -> Result<Option<(String, i64)>, SuiteError> {
        if self.folder != Folder::Node {
            return Ok(None);
        }
        let own = self.outline()?;
        let plain = self.model.parent().and_then(Path::parent).map(|folder| folder.join(self.plain_name()).join("model.onnx"));
        let mut operators = match plain {
            Some(plain) if plain != self.model && plain.is_file() => outline(&plain)?.operators,
            _ => own.operators,
        };
        let opset = own.opsets.get("").or_else(|| own.opsets.values().next()).copied().unwrap_or_default();
        Ok((!operators.is_empty()).then(|| (operators.swap_remove(0), opset)))
    }

    /// The tensors of `input_0.pb`, ... or `output_0.pb`, ...
    pub fn tensors(&self, kind: Kind) -> Result<Vec<Tensor>, SuiteError> {
        (0..).map(|index| self.file(kind, index)).take_while(|path| path.is_file()).map(|path| tensor(&path)).collect()
    }

    fn file(&self, kind: Kind, index: usize) -> PathBuf {
        match self.folder {
            Folder::Light => self.model.with_file_name(format!("{}_{}_{index}.pb", self.name, kind.name())),
            _ => self.model.with_file_name("test_data_set_0").join(format!("{}_{index}.pb", kind.name())),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Input,
    Output,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Input => "input",
            Kind::Output => "output",
        }
    }
}

/// What ONNX's test runner feeds models of the `light` folder: a ramp from 0 to 1.
pub fn ramp(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| i as f64 / count as f64).collect();
    Tensor::from_f64(DType::F32, shape, &values)
}

/// Every test below `data`, by folder and name.
pub fn discover(data: &Path) -> Result<Vec<Test>, SuiteError> {
    let mut tests = Vec::new();
    for folder in Folder::ALL {
        let mut found = Vec::new();
        for entry in entries(&data.join(folder.name()))? {
            let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if let (Folder::Light, Some(name)) = (folder, name.strip_suffix(".onnx")) {
                found.push(Test { folder, name: name.to_owned(), model: entry });
            } else if folder != Folder::Light && entry.join("model.onnx").is_file() {
                if entry.join("test_data_set_1").exists() {
                    return Err(SuiteError::DataSets(entry));
                }
                found.push(Test { folder, name, model: entry.join("model.onnx") });
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        tests.extend(found);
    }
    Ok(tests)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, SuiteError> {
    let error = |source| SuiteError::Io { path: folder.to_owned(), source };
    let entries = fs::read_dir(folder).map_err(error)?;
    entries.map(|entry| entry.map(|e| e.path()).map_err(error)).collect()
}

fn outline(model: &Path) -> Result<Outline, SuiteError> {
    Outline::read(&read(model)?).map_err(|source| SuiteError::Import { path: model.to_owned(), source: source.into() })
}

fn tensor(path: &Path) -> Result<Tensor, SuiteError> {
    let read = read_tensor(&read(path)?);
    read.map(|(_, tensor)| tensor).map_err(|source| SuiteError::Import { path: path.to_owned(), source: source.into() })
}

fn read(path: &Path) -> Result<Vec<u8>, SuiteError> {
    fs::read(path).map_err(|source| SuiteError::Io { path: path.to_owned(), source })
}
