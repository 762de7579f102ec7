//! A classifier of other classes: another number of rows in the last layer.

use meganeura_import::{Head, HeadTensor};
use meganeura_ir::{Shape, Tensor};

use crate::data::SplitMix64;
use crate::error::Error;
use crate::lora::LoraError;
use crate::model::Model;

/// The head that a model is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadOptions {
    pub classes: usize,
    /// The output that the head leads to. May be absent where the model has one only.
    pub output: Option<String>,
    /// The weight of the head; by default that of the last layer before the output.
    pub weight: Option<String>,
    /// Old classes keep what they have learned; only further ones begin anew. Otherwise all do.
    pub keep_rows: bool,
    /// Decides the values of what begins anew.
    pub seed: u64,
}

impl HeadOptions {
    /// A new head of `classes` classes before the model's only output.
    pub fn new(classes: usize) -> Self {
        HeadOptions { classes, output: None, weight: None, keep_rows: false, seed: 0 }
    }
}

impl Model {
    /// Gives the model another number of classes. New values are distributed as those of a new `torch.nn.Linear` or `torch.nn.Conv2d`:
    /// weight and bias uniformly between `-1 / sqrt(fan_in)` and `1 / sqrt(fan_in)`. Files that the model is written to have the new
    /// sizes. Returns what was there before.
    ///
    /// # Errors
    /// There is no head, it is shared or quantised, or the model holds its number of classes elsewhere too; the model is unchanged then.
    pub fn resize_head(&mut self, options: &HeadOptions) -> Result<Head, Error> {
        if options.classes == 0 {
            return Err(Error::NoClasses);
        }
        let head = self.imported().head(options.output.as_deref(), options.weight.as_deref());
        let head = head.map_err(|e| self.import_error(e))?;
        if self.adapters().iter().any(|adapter| adapter.weight() == head.weight.name) {
            return Err(LoraError::AdaptedHead(head.weight.name).into());
        }
        let old = self.weight(&head.weight.name)?;
        let fan_in = old.shape().numel() / head.classes.max(1);
        let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
        let mut random = SplitMix64(options.seed);
        let mut resized = |place: &HeadTensor, old: &Tensor| resize(old, place.axis, options, || random.symmetric(bound));
        let weight = resized(&head.weight, &old);
        let bias = head.bias.as_ref().map(|place| Ok::<_, Error>(resized(place, &self.weight(&place.name)?))).transpose()?;
        self.set_head(&head, weight, bias)?;
        Ok(head)
    }
}

/// `old` with another size of `axis`: rows of `old` where they are kept, and `new` values.
fn resize(old: &Tensor, axis: usize, options: &HeadOptions, mut new: impl FnMut() -> f64) -> Tensor {
    let (size, classes) = (old.shape().get(axis).copied().unwrap_or(0), options.classes);
    let shape: Shape = old.shape().iter().enumerate().map(|(a, &s)| if a == axis { classes } else { s }).collect();
    let inner: usize = old.shape().iter().skip(axis + 1).product();
    let values = old.to_f64_vec();
    let value = |position: usize| {
        let (outer, class, rest) = (position / (inner * classes), position / inner % classes, position % inner);
        let fresh = new();
        let kept = (options.keep_rows && class < size).then(|| values.get((outer * size + class) * inner + rest));
        kept.flatten().copied().unwrap_or(fresh)
    };
    Tensor::from_f64(old.dtype(), shape.clone(), &(0..shape.numel()).map(value).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_or_begin_anew() {
        let old = Tensor::from_f32([2, 3], &[1., 2., 3., 4., 5., 6.]);
        let mut options = HeadOptions { keep_rows: true, ..HeadOptions::new(4) };
        assert_eq!(resize(&old, 1, &options, || 0.5), Tensor::from_f32([2, 4], &[1., 2., 3., 0.5, 4., 5., 6., 0.5]));
        assert_eq!(resize(&old, 0, &options, || 0.5).to_f64_vec()[4..], [5., 6., 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]);
        options = HeadOptions { keep_rows: true, ..HeadOptions::new(1) };
        assert_eq!(resize(&old, 1, &options, || 0.5), Tensor::from_f32([2, 1], &[1., 4.]));
        assert_eq!(resize(&old, 1, &HeadOptions::new(2), || 0.5), Tensor::from_f32([2, 2], &[0.5; 4]));
    }
}
