//! The elements of constants.

use half::{bf16, f16};

use super::ParseErrorKind;
use crate::{DType, DTypeClass, Tensor, TensorType};

/// The largest number of elements that are listed as values.
const LISTED: usize = 64;

/// The attribute that holds the elements: `values` if there are few and decimal numbers say them exactly, `bytes` otherwise.
pub(super) fn print(tensor: &Tensor) -> (&'static str, String) {
    if tensor.shape().numel() <= LISTED {
        let values = elements(tensor);
        let atoms: Vec<&str> = values.iter().map(String::as_str).collect();
        // Some NaNs and bools have bits that no value stands for.
        if from_values(tensor.ty(), &atoms).is_ok_and(|t| t == *tensor) {
            return ("values", format!("[{}]", values.join(",")));
        }
    }
    ("bytes", tensor.bytes().iter().map(|b| format!("{b:02x}")).collect())
}

fn elements(tensor: &Tensor) -> Vec<String> {
    match tensor.dtype().class() {
        DTypeClass::Float if tensor.dtype() == DType::F64 => tensor.to_f64_vec().iter().map(|v| format!("{v:?}")).collect(),
        DTypeClass::Float => tensor.to_f32_vec().iter().map(|v| format!("{v:?}")).collect(),
        DTypeClass::Int if tensor.dtype() == DType::U64 => tensor.to_i64_vec().iter().map(|&v| (v as u64).to_string()).collect(),
        DTypeClass::Int => tensor.to_i64_vec().iter().map(i64::to_string).collect(),
        DTypeClass::Bool => tensor.to_i64_vec().iter().map(|&v| (v != 0).to_string()).collect(),
    }
}

pub(super) fn from_values(ty: &TensorType, atoms: &[&str]) -> Result<Tensor, ParseErrorKind> {
    let mut bytes = Vec::with_capacity(atoms.len() * ty.dtype.size());
    for text in atoms {
        match element(ty.dtype, text) {
            Some(element) => bytes.extend(element),
            None => return Err(ParseErrorKind::Element { ty: ty.clone(), text: (*text).into() }),
        }
    }
    Ok(Tensor::from_bytes(ty.clone(), bytes)?)
}

pub(super) fn from_hexadecimal(ty: &TensorType, digits: &str) -> Result<Tensor, ParseErrorKind> {
    let byte = |pair: &[u8]| {
        let digit = |c: u8| (c as char).to_digit(16);
        let &[high, low] = pair else { return None };
        Some((digit(high)? * 16 + digit(low)?) as u8)
    };
    let bytes: Option<Vec<u8>> = digits.as_bytes().chunks(2).map(byte).collect();
    let bytes =
        bytes.ok_or(ParseErrorKind::Expected { expected: "bytes in hexadecimal", found: digits.chars().take(20).collect() })?;
    Ok(Tensor::from_bytes(ty.clone(), bytes)?)
}

fn element(dtype: DType, text: &str) -> Option<Vec<u8>> {
    Some(match dtype {
        DType::F32 => text.parse::<f32>().ok()?.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(text.parse().ok()?).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(text.parse().ok()?).to_le_bytes().to_vec(),
        DType::F64 => text.parse::<f64>().ok()?.to_le_bytes().to_vec(),
        DType::I8 => text.parse::<i8>().ok()?.to_le_bytes().to_vec(),
        DType::I16 => text.parse::<i16>().ok()?.to_le_bytes().to_vec(),
        DType::I32 => text.parse::<i32>().ok()?.to_le_bytes().to_vec(),
        DType::I64 => text.parse::<i64>().ok()?.to_le_bytes().to_vec(),
        DType::U8 => text.parse::<u8>().ok()?.to_le_bytes().to_vec(),
        DType::U16 => text.parse::<u16>().ok()?.to_le_bytes().to_vec(),
        DType::U32 => text.parse::<u32>().ok()?.to_le_bytes().to_vec(),
        DType::U64 => text.parse::<u64>().ok()?.to_le_bytes().to_vec(),
        DType::Bool => vec![text.parse::<bool>().ok()?.into()],
    })
}
