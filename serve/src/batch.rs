//! Several requests as one execution, and its outputs as several answers.

use std::collections::VecDeque;

use meganeura_ir::{SampleAxis, Shape, Tensor, TensorType};

use crate::engine::InferJob;
use crate::refusal::Refusal;
use crate::served::{Answer, Served};

/// The sizes of executions: powers of two up to `max`, and `max` itself. The smallest that holds `rows` samples.
pub(crate) fn bucket(rows: usize, max: usize) -> usize {
    rows.next_power_of_two().min(max).max(rows)
}

/// The shape of `samples` samples, where `shape` is that of any number.
pub(crate) fn shape_of(shape: &Shape, samples: usize) -> Shape {
    std::iter::once(samples).chain(shape.iter().skip(1).copied()).collect()
}

/// Joins tensors of equal type but for their first axis, which gets `samples` entries: those that are missing repeat the first.
pub(crate) fn join(parts: &[&Tensor], samples: usize) -> Result<Tensor, Refusal> {
    let [first, ..] = parts else { return Err(Refusal::internal("a batch without samples")) };
    let ty = TensorType::new(first.dtype(), shape_of(first.shape(), samples));
    let row = ty.bytes() / samples.max(1);
    let mut bytes = Vec::with_capacity(ty.bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part.bytes()));
    while bytes.len() < ty.bytes() && row > 0 {
        bytes.extend_from_slice(&first.bytes()[..row]);
    }
    Tensor::from_bytes(ty, bytes).map_err(|e| Refusal::internal(format!("a batch does not fit: {e}")))
}

/// The part of an output that belongs to `count` samples from `first` on.
pub(crate) fn cut(output: &Tensor, at: SampleAxis, first: usize, count: usize) -> Result<Tensor, Refusal> {
    let shape = output.shape();
    let Some(&size) = shape.get(at.axis) else { return Err(Refusal::internal("an output lacks its axis of samples")) };
    let outer: usize = shape.iter().take(at.axis).product();
    let inner = shape.iter().skip(at.axis + 1).product::<usize>() * output.dtype().size();
    let (start, rows) = (first * at.span, count * at.span);
    if start + rows > size {
        return Err(Refusal::internal("an output has fewer samples than its batch"));
    }
    let mut bytes = Vec::with_capacity(outer * rows * inner);
    for block in 0..outer {
        let from = (block * size + start) * inner;
        bytes.extend_from_slice(&output.bytes()[from..from + rows * inner]);
    }
    let cut: Shape = shape.iter().enumerate().map(|(axis, &size)| if axis == at.axis { rows } else { size }).collect();
    Tensor::from_bytes(TensorType::new(output.dtype(), cut), bytes).map_err(|e| Refusal::internal(e.to_string()))
}

/// The oldest requests that fit `size` samples together.
pub(crate) fn take_rows(jobs: &mut VecDeque<InferJob>, size: usize) -> Vec<InferJob> {
    let mut taken = Vec::new();
    let mut rows = 0;
    while let Some(next) = jobs.front().and_then(|job| job.rows)
        && rows + next <= size
        && let Some(job) = jobs.pop_front()
    {
        rows += next;
        taken.push(job);
    }
    taken
}

/// Outputs of each request.
type Parts = Vec<Vec<(String, Tensor)>>;

/// Runs requests as one execution of `size` samples, or one request as it is. Returns the version of the weights, and the outputs of each request.
pub(crate) fn execute(served: &mut dyn Served, jobs: &[InferJob], size: Option<usize>) -> Result<(u64, Parts), Refusal> {
    let [first, ..] = jobs else { return Ok((served.weight_version(), Vec::new())) };
    let Some(size) = size else {
        let Answer { outputs, weight_version } = served.run(&first.inputs)?;
        return Ok((weight_version, vec![outputs.into_iter().map(|output| (output.name, output.tensor)).collect()]));
    };
    let joined = (0..first.inputs.len()).map(|input| {
        let parts: Vec<&Tensor> = jobs.iter().filter_map(|job| job.inputs.get(input)).collect();
        join(&parts, size)
    });
    let joined = joined.collect::<Result<Vec<_>, _>>()?;
    let Answer { outputs, weight_version } = served.run(&joined)?;
    let mut row = 0;
    let parts = jobs.iter().map(|job| {
        let (start, rows) = (row, job.rows.unwrap_or(0));
        row += rows;
        let own = outputs.iter().map(|output| {
            if rows == size {
                return Ok((output.name.clone(), output.tensor.clone()));
            }
            let at = output.samples.ok_or_else(|| Refusal::internal(format!("output {:?} mixes samples", output.name)))?;
            Ok((output.name.clone(), cut(&output.tensor, at, start, rows)?))
        });
        own.collect()
    });
    Ok((weight_version, parts.collect::<Result<Parts, Refusal>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_f32(shape, values)
    }

    #[test]
    fn buckets_are_powers_of_two_up_to_the_limit() {
        assert_eq!([1, 2, 3, 4, 5, 9, 12].map(|rows| bucket(rows, 12)), [1, 2, 4, 4, 8, 12, 12]);
        assert_eq!(bucket(1, 1), 1);
    }

    #[test]
    fn rows_are_joined_and_padded() {
        let (a, b) = (tensor(&[1, 2], &[1.0, 2.0]), tensor(&[2, 2], &[3.0, 4.0, 5.0, 6.0]));
        assert_eq!(join(&[&a, &b], 4), Ok(tensor(&[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0])));
        assert_eq!(join(&[&tensor(&[1, 0], &[])], 2), Ok(tensor(&[2, 0], &[])));
    }

    #[test]
    fn samples_are_cut_out_of_any_axis() {
        let rows = tensor(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(cut(&rows, SampleAxis { axis: 0, span: 1 }, 1, 2), Ok(tensor(&[2, 2], &[3.0, 4.0, 5.0, 6.0])));
        let columns = tensor(&[2, 4], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(cut(&columns, SampleAxis { axis: 1, span: 2 }, 1, 1), Ok(tensor(&[2, 2], &[2.0, 3.0, 6.0, 7.0])));
        assert!(cut(&rows, SampleAxis { axis: 0, span: 1 }, 2, 2).is_err());
    }
}
