//! Tensors by name in JSON: dtype, shape, and the little-endian elements in base64.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use meganeura_ir::{DType, Shape, Tensor, TensorType};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
struct Stored {
    dtype: String,
    shape: Vec<usize>,
    data: String,
}

pub fn serialize<S: Serializer>(values: &BTreeMap<String, Tensor>, serializer: S) -> Result<S::Ok, S::Error> {
    let stored = values.iter().map(|(name, value)| {
        let (dtype, shape) = (value.dtype().name().to_owned(), value.shape().to_vec());
        (name, Stored { dtype, shape, data: BASE64.encode(value.bytes()) })
    });
    serializer.collect_map(stored)
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Tensor>, D::Error> {
    let stored = BTreeMap::<String, Stored>::deserialize(deserializer)?;
    let tensor = |stored: Stored| {
        let dtype = DType::from_name(&stored.dtype).ok_or_else(|| D::Error::custom("unknown dtype"))?;
        let bytes = BASE64.decode(stored.data).map_err(D::Error::custom)?;
        let ty = TensorType::new(dtype, Shape::from(stored.shape));
        Tensor::from_bytes(ty, bytes).map_err(D::Error::custom)
    };
    stored.into_iter().map(|(name, stored)| Ok((name, tensor(stored)?))).collect()
}
