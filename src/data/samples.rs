//! A data set bound to a model: which array feeds which input, with shapes and dtypes checked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meganeura_import::{Dim, ModelInput};
use meganeura_ir::{DType, Tensor, TensorType};

use super::{Array, DataError, Dataset, ImageFolder, batch_type, numpy_name, widens};
use crate::step_inputs::StepInputs;

/// The arrays that a model reads from a data set, and the target.
#[derive(Clone, Debug)]
pub struct Samples {
    path: PathBuf,
    inputs: Vec<Column>,
    target: Option<Column>,
    count: usize,
}

/// An array in its role. Batches leave it with `dtype`.
#[derive(Clone, Debug)]
struct Column {
    /// The name of the input in the graph.
    name: String,
    /// The name in the file.
    key: String,
    values: Values,
    dtype: DType,
}

/// Where the elements of a column come from.
#[derive(Clone, Debug)]
enum Values {
    Array(Array),
    Images(Arc<ImageFolder>),
}

impl Values {
    fn ty(&self) -> TensorType {
        match self {
            Values::Array(array) => array.ty().clone(),
            Values::Images(images) => images.ty(),
        }
    }

    fn samples(&self) -> Option<usize> {
        self.ty().shape.first().copied()
    }

    fn rows(&self, indices: &[usize]) -> Result<Tensor, DataError> {
        match self {
            Values::Array(array) => Ok(array.rows(indices)),
            Values::Images(images) => images.rows(indices),
        }
    }

    /// As [`Values::rows`], cast to the dtype of `tensor`, over it.
    fn write_rows(&self, indices: &[usize], tensor: &mut Tensor) -> Result<(), DataError> {
        match self {
            Values::Array(array) => array.write_rows(indices, tensor),
            Values::Images(images) => *tensor = images.rows(indices)?.cast(tensor.dtype()),
        }
        Ok(())
    }
}

/// Which target a data set must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target<'a> {
    /// The loss takes none.
    Absent,
    /// Under this key, or under one of [`TARGET_KEYS`](super::TARGET_KEYS).
    Key(Option<&'a str>),
}

impl Samples {
    /// Finds an array for every input and for the target, for use in batches: the first axis of every array (scalars excepted) is the
    /// sample axis, and the others fit the model. The first axis of the model's inputs is not looked at.
    ///
    /// # Errors
    /// Missing arrays, shapes that do not fit, dtypes that do not widen to the model's without loss, unequal numbers of samples.
    pub fn bind(dataset: &Dataset, inputs: &[ModelInput], target: Target<'_>) -> Result<Self, DataError> {
        let mut samples = Self::find(dataset, inputs, target, 1)?;
        if let Some(target) = samples.target.as_ref().filter(|t| t.values.samples().is_none()) {
            return Err(DataError::NoSampleAxis { path: samples.path, array: target.key.clone() });
        }
        let counted = |c: &Column| Some((c.key.clone(), c.values.samples()?));
        let counts: Vec<(String, usize)> = samples.columns().filter_map(counted).collect();
        let path = dataset.path().to_path_buf();
        match counts.first().cloned() {
            None | Some((_, 0)) => Err(DataError::Empty { path }),
            Some((other, expected)) => match counts.into_iter().find(|(_, count)| *count != expected) {
                Some((array, found)) => Err(DataError::SampleCount { path, array, found, other, expected }),
                None => {
                    samples.count = expected;
                    Ok(samples)
                }
            },
        }
    }

    /// Finds an array for every input and for the target, for use as they are: all axes fit the model, and no axis is special.
    ///
    /// # Errors
    /// As [`Samples::bind`], the number of samples excepted; an image cannot be read.
    pub fn whole(dataset: &Dataset, inputs: &[ModelInput], target: Target<'_>) -> Result<Self, DataError> {
        let mut samples = Self::find(dataset, inputs, target, 0)?;
        for column in &mut samples.inputs {
            if let Values::Images(images) = &column.values {
                let all: Vec<usize> = (0..images.labels().len()).collect();
                column.values = Values::Array(Array::from(images.rows(&all)?));
            }
        }
        Ok(samples)
    }

    fn find(dataset: &Dataset, inputs: &[ModelInput], target: Target<'_>, first_axis: usize) -> Result<Self, DataError> {
        let path = dataset.path();
        let key = match target {
            Target::Key(key) => key,
            Target::Absent => None,
        };
        let bind = |input: &ModelInput| {
            let images = dataset.images().filter(|images| images.preprocessing().input == input.name);
            let (key, values) = match images {
                Some(images) => (input.name.clone(), Values::Images(images.clone())),
                None => dataset.input(&input.name, inputs.len() == 1, key).map(|(key, array)| (key, Values::Array(array)))?,
            };
            check(path, &key, &values, input, first_axis)?;
            Ok(Column { name: input.name.clone(), key, values, dtype: graph_dtype(input) })
        };
        let inputs = inputs.iter().map(bind).collect::<Result<_, DataError>>()?;
        let target = match target {
            Target::Absent => None,
            Target::Key(key) => {
                let (key, array) = dataset.target(key)?;
                let dtype = array.ty().dtype;
                Some(Column { name: TARGET_INPUT.to_string(), key, values: Values::Array(array), dtype })
            }
        };
        Ok(Samples { path: path.to_path_buf(), inputs, target, count: 0 })
    }

    fn columns(&self) -> impl Iterator<Item = &Column> {
        self.inputs.iter().chain(&self.target)
    }

    /// The number of samples; 0 where the arrays are used as they are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The same samples with only the columns whose input in the graph `keep` names.
    pub(crate) fn only(&self, keep: impl Fn(&str) -> bool) -> Samples {
        let kept = |column: &&Column| keep(&column.name);
        Samples {
            inputs: self.inputs.iter().filter(kept).cloned().collect(),
            target: self.target.as_ref().filter(kept).cloned(),
            ..self.clone()
        }
    }

    /// Those of some inputs that these samples have a column for.
    pub(crate) fn taken(&self, inputs: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
        inputs.iter().filter(|(name, _)| self.columns().any(|column| column.name == *name)).cloned().collect()
    }

    /// Whether the array of an input has an axis of samples; `None` if no array feeds the input.
    pub(crate) fn has_axis(&self, input: &str) -> Option<bool> {
        self.inputs.iter().find(|c| c.name == input).map(|c| c.values.samples().is_some())
    }

    /// The shapes of the model's inputs in a batch of `batch` samples, or as they are.
    pub fn shapes(&self, batch: Option<usize>) -> BTreeMap<String, Vec<usize>> {
        self.inputs.iter().map(|c| (c.name.clone(), c.ty(batch).shape.to_vec())).collect()
    }

    /// The type of the target in the file, for a batch of `batch` samples or as it is.
    pub fn target_type(&self, batch: Option<usize>) -> Option<TensorType> {
        self.target.as_ref().map(|c| c.ty(batch))
    }

    /// The key of the target in the file.
    pub fn target_key(&self) -> Option<&str> {
        self.target.as_ref().map(|c| c.key.as_str())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes batches hold the target as `dtype`.
    pub fn convert_target(&mut self, dtype: DType) {
        if let Some(target) = &mut self.target {
            target.dtype = dtype;
        }
    }

    /// The samples at `indices`, by name of the graph's input; the target under [`TARGET_INPUT`].
    ///
    /// # Errors
    /// An image cannot be read.
    pub fn batch(&self, indices: &[usize]) -> Result<Vec<(String, Tensor)>, DataError> {
        self.columns().map(|c| Ok((c.name.clone(), c.values.rows(indices)?.cast(c.dtype)))).collect()
    }

    /// Begins to read the samples at `indices`, where that takes time: the next call of [`Samples::batch`] is expected to ask for them.
    pub fn prefetch(&self, indices: &[usize]) {
        for column in &self.inputs {
            if let Values::Images(images) = &column.values {
                images.prefetch(indices);
            }
        }
    }

    /// As [`Samples::batch`], over the tensors of `inputs`.
    ///
    /// # Errors
    /// An image cannot be read.
    pub(crate) fn write_batch(&self, indices: &[usize], inputs: &mut StepInputs) -> Result<(), DataError> {
        for column in self.columns() {
            if let Some(tensor) = inputs.get_mut(&column.name) {
                column.values.write_rows(indices, tensor)?;
            }
        }
        Ok(())
    }

    /// The targets of the samples at `indices`, in the dtype of the graph.
    pub fn targets(&self, indices: &[usize]) -> Option<Tensor> {
        self.target.as_ref().and_then(|c| Some(c.array()?.rows(indices).cast(c.dtype)))
    }

    /// All arrays as they are, by name of the graph's input; the target under [`TARGET_INPUT`].
    pub fn tensors(&self) -> Vec<(String, Tensor)> {
        self.columns().filter_map(|c| Some((c.name.clone(), c.array()?.tensor().cast(c.dtype)))).collect()
    }
}

/// The name of the graph's input for targets.
pub const TARGET_INPUT: &str = "loss/target";

impl Column {
    fn ty(&self, batch: Option<usize>) -> TensorType {
        match batch {
            Some(batch) if self.values.samples().is_some() => batch_type(&self.values.ty(), batch),
            _ => self.values.ty(),
        }
    }

    /// The array, where it is one: that of a target, or of data that is used whole, always is.
    fn array(&self) -> Option<&Array> {
        match &self.values {
            Values::Array(array) => Some(array),
            Values::Images(_) => None,
        }
    }
}

/// The dtype that the graph takes: models of every float compute in f32.
fn graph_dtype(input: &ModelInput) -> DType {
    if input.dtype.is_float() { DType::F32 } else { input.dtype }
}

/// Whether an array fits an input, apart from the axes before `first_axis`.
fn check(path: &Path, key: &str, values: &Values, input: &ModelInput, first_axis: usize) -> Result<(), DataError> {
    let found = values.ty();
    let role = || format!("input {:?}", input.name);
    let fits = |(dim, &size): (&Dim, &usize)| !matches!(dim, Dim::Fixed(fixed) if *fixed != size);
    let fits = !input.ranked
        || input.dims.len() == found.shape.rank() && input.dims.iter().zip(found.shape.iter()).skip(first_axis).all(fits);
    if !fits {
        let (found, expected) = (found.shape.clone(), describe(&input.dims, first_axis));
        return Err(DataError::Shape { path: path.to_path_buf(), array: key.to_string(), role: role(), found, expected });
    }
    if !widens(found.dtype, input.dtype) && !widens(found.dtype, graph_dtype(input)) {
        let (found, expected, numpy) = (found.dtype, input.dtype, numpy_name(input.dtype));
        let (path, array) = (path.to_path_buf(), key.to_string());
        return Err(DataError::DType { path, array, role: role(), found, expected, numpy });
    }
    if found.dtype == DType::F64
        && let Values::Array(array) = values
        && let Err(range) = array.tensor().cast_finite(DType::F32)
    {
        return Err(DataError::Array { path: path.to_path_buf(), array: key.to_string(), reason: format!("holds {range}") });
    }
    Ok(())
}

fn describe(dims: &[Dim], first_axis: usize) -> String {
    let name = |(axis, dim): (usize, &Dim)| if axis < first_axis { "samples".to_string() } else { dim.to_string() };
    format!("[{}]", dims.iter().enumerate().map(name).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(name: &str, dtype: DType, dims: Vec<Dim>) -> ModelInput {
        ModelInput { name: name.to_string(), dtype, dims, ranked: true }
    }

    fn image() -> ModelInput {
        input("image", DType::F32, vec![Dim::Symbol("batch".into()), Dim::Fixed(2)])
    }

    fn images(samples: usize) -> Tensor {
        Tensor::from_f32([samples, 2], &vec![0.5; samples * 2])
    }

    fn labels(values: &[i64]) -> Tensor {
        Tensor::from_i64(DType::I32, [values.len()], values)
    }

    #[test]
    fn a_batch_has_every_input_and_the_converted_target() {
        let data = Dataset::from_tensors([("image", images(3)), ("label", labels(&[7, 8, 9]))]);
        let mut samples = Samples::bind(&data, &[image()], Target::Key(None)).unwrap();
        samples.convert_target(DType::I64);
        assert_eq!(samples.count(), 3);
        assert_eq!(samples.shapes(Some(2))["image"], [2, 2]);
        let batch = samples.batch(&[2, 0]).unwrap();
        assert_eq!(batch[1], (TARGET_INPUT.to_string(), Tensor::from_i64(DType::I64, [2], &[9, 7])));
    }

    #[test]
    fn a_wrong_shape_names_array_input_and_what_fits() {
        let data = Dataset::from_tensors([("image", Tensor::from_f32([2, 3], &[0.0; 6]))]);
        let message = Samples::bind(&data, &[image()], Target::Absent).unwrap_err().to_string();
        assert!(message.contains("array \"image\" has shape [2,3], input \"image\" takes [samples,2]"), "{message}");
    }

    #[test]
    fn a_wrong_dtype_says_how_to_convert() {
        let data = Dataset::from_tensors([("image", images(2).cast(DType::F64))]);
        let message = Samples::bind(&data, &[image()], Target::Absent).unwrap_err().to_string();
        assert!(message.contains("f64") && message.contains(".astype(\"float32\")"), "{message}");
    }

    #[test]
    fn a_model_of_half_floats_takes_f32_which_is_what_it_computes_in() {
        let half = ModelInput { dtype: DType::F16, ..image() };
        for dtype in [DType::F16, DType::F32] {
            let data = Dataset::from_tensors([("image", images(2).cast(dtype))]);
            let samples = Samples::bind(&data, std::slice::from_ref(&half), Target::Absent).unwrap();
            assert_eq!(samples.batch(&[0]).unwrap()[0].1.dtype(), DType::F32);
        }
    }

    #[test]
    fn unequal_sample_counts_are_an_error() {
        let data = Dataset::from_tensors([("image", images(3)), ("label", labels(&[1, 2]))]);
        assert!(matches!(
            Samples::bind(&data, &[image()], Target::Key(None)),
            Err(DataError::SampleCount { found: 2, expected: 3, .. })
        ));
    }

    #[test]
    fn no_samples_is_an_error() {
        let data = Dataset::from_tensors([("image", images(0))]);
        assert!(matches!(Samples::bind(&data, &[image()], Target::Absent), Err(DataError::Empty { .. })));
    }

    #[test]
    fn used_whole_every_axis_must_fit_and_none_is_counted() {
        let fixed = input("image", DType::F32, vec![Dim::Fixed(3), Dim::Fixed(2)]);
        let data = Dataset::from_tensors([("image", images(3)), ("scale", Tensor::scalar_f32(1.0))]);
        let scale = input("scale", DType::F32, vec![]);
        let samples = Samples::whole(&data, &[fixed.clone(), scale], Target::Absent).unwrap();
        assert_eq!(samples.tensors().len(), 2);
        let data = Dataset::from_tensors([("image", images(4))]);
        assert!(matches!(Samples::whole(&data, &[fixed], Target::Absent), Err(DataError::Shape { .. })));
    }
}
