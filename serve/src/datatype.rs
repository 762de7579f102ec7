//! The protocol's names of element types.

use meganeura_ir::DType;

use crate::refusal::Refusal;

/// Name in the protocol, and number in `ModelConfig.DataType`.
const DATATYPES: [(DType, &str, i32); 13] = [
    (DType::Bool, "BOOL", 1),
    (DType::U8, "UINT8", 2),
    (DType::U16, "UINT16", 3),
    (DType::U32, "UINT32", 4),
    (DType::U64, "UINT64", 5),
    (DType::I8, "INT8", 6),
    (DType::I16, "INT16", 7),
    (DType::I32, "INT32", 8),
    (DType::I64, "INT64", 9),
    (DType::F16, "FP16", 10),
    (DType::F32, "FP32", 11),
    (DType::F64, "FP64", 12),
    (DType::BF16, "BF16", 14),
];

fn row(dtype: DType) -> (DType, &'static str, i32) {
    DATATYPES.into_iter().find(|(known, ..)| *known == dtype).unwrap_or((dtype, "", 0))
}

pub(crate) fn name(dtype: DType) -> &'static str {
    row(dtype).1
}

/// Its number in a model's configuration.
pub(crate) fn number(dtype: DType) -> i32 {
    row(dtype).2
}

/// The dtype of that name. `place` is what errors name.
pub(crate) fn parse(place: &str, name: &str) -> Result<DType, Refusal> {
    match DATATYPES.into_iter().find(|(_, known, _)| *known == name) {
        Some((dtype, ..)) => Ok(dtype),
        None if name == "BYTES" => {
            Err(Refusal::invalid(format!("{place}: datatype BYTES is not supported: models take numbers")))
        }
        None => {
            let known: Vec<&str> = DATATYPES.iter().map(|(_, name, _)| *name).collect();
            let shown: String = name.chars().take(32).collect();
            Err(Refusal::invalid(format!("{place}: datatype {shown:?} is unknown; there are {}", known.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_a_name_of_its_own() {
        for dtype in DType::ALL {
            assert_eq!(parse("x", name(dtype)), Ok(dtype));
            assert_ne!(number(dtype), 0);
        }
        assert!(parse("x", "BYTES").is_err_and(|e| e.message.contains("BYTES")));
        assert!(parse("x", "fp32").is_err());
    }
}
