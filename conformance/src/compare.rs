//! Whether a result is the expected one.

use meganeura_ir::testing::relative_l2;
use meganeura_ir::{DType, Tensor};

/// How far floats may be off, by the dtype of the expected value.
struct Tolerance {
    /// Of the whole tensor, in the Euclidean norm.
    relative_l2: f64,
    /// Of each element, relative to itself.
    element: f64,
    /// Of each element, relative to the largest.
    largest: f64,
}

/// How the expected values were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digits {
    All,
    /// By hand, to about four digits.
    Rounded,
}

/// 1e-3 per element is ONNX's own tolerance; f32 rounds to 6e-8. Expected values in f16 and bf16 were computed in these dtypes, step
/// by step, where each rounds to 5e-4 and 4e-3: two last places are allowed.
fn tolerance(dtype: DType, digits: Digits) -> Tolerance {
    match dtype {
        _ if digits == Digits::Rounded => Tolerance { relative_l2: 1e-3, element: 1e-3, largest: 1e-4 },
        DType::F16 => Tolerance { relative_l2: 1e-3, element: 2e-3, largest: 5e-4 },
        DType::BF16 => Tolerance { relative_l2: 1e-2, element: 1.6e-2, largest: 4e-3 },
        _ => Tolerance { relative_l2: 1e-4, element: 1e-3, largest: 1e-7 },
    }
}

/// What is wrong with `found`, if anything. Integers and booleans are exact; shape and dtype always are.
pub fn difference(found: &Tensor, expected: &Tensor, digits: Digits) -> Option<String> {
    if found.ty() != expected.ty() {
        return Some(format!("is {}, expected {}", found.ty(), expected.ty()));
    }
    if !expected.dtype().is_float() {
        let (found, expected) = (found.to_i64_vec(), expected.to_i64_vec());
        let at = found.iter().zip(&expected).position(|(f, e)| f != e)?;
        return Some(format!("element {at} is {}, expected {}", found[at], expected[at]));
    }
    let tolerance = tolerance(expected.dtype(), digits);
    let (found, expected) = (found.to_f64_vec(), expected.to_f64_vec());
    let largest = expected.iter().filter(|e| e.is_finite()).fold(0.0, |m: f64, e| m.max(e.abs()));
    let near = |(f, e): (&f64, &f64)| {
        let bound = tolerance.element * e.abs() + tolerance.largest * largest + 1e-7;
        f == e || f.is_nan() && e.is_nan() || (f - e).abs() <= bound
    };
    if let Some(at) = found.iter().zip(&expected).position(|pair| !near(pair)) {
        return Some(format!("element {at} is {}, expected {}", found[at], expected[at]));
    }
    let error = relative_l2(&found, &expected);
    (error > tolerance.relative_l2 && largest > 0.0).then(|| format!("is off by {error:.1e} in the relative L2 norm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(found: &Tensor, expected: &Tensor) -> Option<String> {
        super::difference(found, expected, Digits::All)
    }

    fn f32s(values: &[f32]) -> Tensor {
        Tensor::from_f32([values.len()], values)
    }

    #[test]
    fn floats_may_be_off_a_little_and_integers_not_at_all() {
        let expected = f32s(&[1.0, -2.0, 1e-8]);
        assert_eq!(difference(&f32s(&[1.000_01, -2.0, 0.0]), &expected), None);
        assert!(difference(&f32s(&[1.002, -2.0, 0.0]), &expected).is_some());
        assert!(difference(&f32s(&[1.0005, -2.001, 0.0]), &expected).is_some_and(|d| d.contains("L2")));
        let (three, four) = (Tensor::from_i64(DType::I64, [1], &[3]), Tensor::from_i64(DType::I64, [1], &[4]));
        assert_eq!(difference(&three, &three), None);
        assert!(difference(&three, &four).is_some());
    }

    #[test]
    fn rounded_expectations_are_met_to_their_digits() {
        let (found, expected) = (f32s(&[0.15122, 0.35716]), f32s(&[0.1511, 0.3572]));
        assert!(difference(&found, &expected).is_some());
        assert_eq!(super::difference(&found, &expected, Digits::Rounded), None);
    }

    #[test]
    fn values_that_are_not_finite_must_agree() {
        let expected = f32s(&[f32::NAN, f32::INFINITY, 1.0]);
        assert_eq!(difference(&expected, &expected), None);
        for wrong in [[0.0, f32::INFINITY, 1.0], [f32::NAN, f32::NEG_INFINITY, 1.0], [f32::NAN, f32::INFINITY, f32::NAN]] {
            assert!(difference(&f32s(&wrong), &expected).is_some(), "{wrong:?}");
        }
    }

    #[test]
    fn type_and_shape_must_be_equal() {
        let x = f32s(&[1.0, 2.0]);
        assert!(difference(&x.cast(DType::F64), &x).is_some());
        assert!(difference(&x.clone().reshaped([1, 2]).unwrap(), &x).is_some());
    }
}
