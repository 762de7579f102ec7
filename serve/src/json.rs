//! Tensors as JSON, and requests and answers of the HTTP protocol around them.

use std::marker::PhantomData;

use half::{bf16, f16};
use meganeura_ir::{DType, Shape, Tensor, TensorType};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeSeq, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::infer::shown;
use crate::refusal::Refusal;

/// How deep the elements of a tensor may be nested.
const MAX_NESTING: usize = 16;
/// Entries of any list in a request but that of a tensor's elements: values take far more memory than the text that they stand in.
pub(crate) const MAX_ENTRIES: usize = 1024;

/// The body of an infer request, or its JSON part.
#[derive(Debug, Deserialize)]
pub(crate) struct InferRequestJson<'a> {
    pub id: Option<String>,
    #[serde(default, deserialize_with = "parameters")]
    pub parameters: Map<String, Value>,
    #[serde(borrow, deserialize_with = "few")]
    pub inputs: Vec<TensorJson<'a>>,
    #[serde(default, deserialize_with = "few")]
    pub outputs: Vec<RequestedOutputJson>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct TensorJson<'a> {
    pub name: String,
    #[serde(deserialize_with = "few")]
    pub shape: Vec<usize>,
    pub datatype: String,
    #[serde(default, deserialize_with = "parameters")]
    pub parameters: Map<String, Value>,
    #[serde(borrow)]
    pub data: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RequestedOutputJson {
    pub name: String,
    #[serde(default, deserialize_with = "parameters")]
    pub parameters: Map<String, Value>,
}

/// What `json` says, or in which field it does not.
pub(crate) fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, Refusal> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let parsed = serde_path_to_error::deserialize(&mut deserializer).map_err(|e| match e.path().iter().next() {
        None => e.into_inner().to_string(),
        Some(_) => format!("{}: {}", shown(&e.path().to_string()), e.inner()),
    });
    let whole = parsed.and_then(|parsed| deserializer.end().map(|()| parsed).map_err(|e| e.to_string()));
    whole.map_err(|e| Refusal::invalid(format!("the request is not what it should be: {e}")))
}

/// A list of at most [`MAX_ENTRIES`].
pub(crate) fn few<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Few<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Few<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
            write!(f, "a list of at most {MAX_ENTRIES} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(entry) = sequence.next_element()? {
                if list.len() == MAX_ENTRIES {
                    return Err(A::Error::invalid_length(MAX_ENTRIES + 1, &self));
                }
                list.push(entry);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(Few(PhantomData))
}

/// At most [`MAX_ENTRIES`] parameters, of which none holds others.
fn parameters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    struct Parameters;

    impl<'de> Visitor<'de> for Parameters {
        type Value = Map<String, Value>;

        fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
            write!(f, "at most {MAX_ENTRIES} parameters")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut parameters = Map::new();
            let mut entries = 0..MAX_ENTRIES;
            while let Some((name, Parameter(value))) = map.next_entry()? {
                if entries.next().is_none() {
                    return Err(A::Error::invalid_length(MAX_ENTRIES + 1, &self));
                }
                parameters.insert(name, value);
            }
            Ok(parameters)
        }
    }

    deserializer.deserialize_map(Parameters)
}

/// The value of a parameter.
struct Parameter(Value);

impl<'de> Deserialize<'de> for Parameter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;

        impl Visitor<'_> for Scalar {
            type Value = Parameter;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a number, a text, true or false")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Parameter, E> {
                Ok(Parameter(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Parameter, E> {
                Ok(Parameter(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Parameter, E> {
                Ok(Parameter(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Parameter, E> {
                Ok(Parameter(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Parameter, E> {
                Ok(Parameter(value.into()))
            }

            fn visit_unit<E>(self) -> Result<Parameter, E> {
                Ok(Parameter(Value::Null))
            }
        }

        deserializer.deserialize_any(Scalar)
    }
}

/// A parameter that is a bool, false where it is absent.
pub(crate) fn flag(parameters: &Map<String, Value>, name: &str) -> Result<bool, Refusal> {
    match parameters.get(name) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(Refusal::invalid(format!("parameter {name:?} must be true or false"))),
    }
}

/// A parameter that is a whole number.
pub(crate) fn number(parameters: &Map<String, Value>, name: &str) -> Result<Option<u64>, Refusal> {
    let wrong = || Refusal::invalid(format!("parameter {name:?} must be a whole number of at least 0"));
    parameters.get(name).map(|value| value.as_u64().ok_or_else(wrong)).transpose()
}

/// The type of a tensor that a client describes, if it may be that large. `place` is what errors name.
pub(crate) fn tensor_type(place: &str, dtype: DType, shape: &[usize], max_bytes: usize) -> Result<TensorType, Refusal> {
    if shape.len() > meganeura_ir::MAX_RANK {
        return Err(Refusal::invalid(format!(
            "{place} has {} axes, at most {} are supported",
            shape.len(),
            meganeura_ir::MAX_RANK
        )));
    }
    let shape = Shape::from(shape);
    let bytes = shape.checked_numel().and_then(|n| n.checked_mul(dtype.size().max(4)));
    match bytes.filter(|&bytes| bytes <= max_bytes) {
        Some(_) => Ok(TensorType::new(dtype, shape)),
        None => Err(Refusal::too_large(format!("{place} of shape {shape} takes more than {max_bytes} bytes"))),
    }
}

/// The tensor whose elements stand in `data`, in row-major order, nested as anyone likes.
pub(crate) fn parse_tensor(place: &str, ty: TensorType, data: &RawValue) -> Result<Tensor, Refusal> {
    let elements = ty.shape.numel();
    // Every element takes a digit and a comma at least, whatever the shape promises.
    let possible = (data.get().len() / 2 + 1).saturating_mul(ty.dtype.size());
    let bytes = Vec::with_capacity(ty.bytes().min(possible));
    let mut parser = Elements { dtype: ty.dtype, bytes, limit: ty.bytes(), depth: 0 };
    let mut json = serde_json::Deserializer::from_str(data.get());
    if let Err(e) = parser.deserialize_root(&mut json) {
        return Err(Refusal::invalid(format!("data of {place}: {}", without_position(&e))));
    }
    let found = parser.bytes.len() / ty.dtype.size();
    let shape = ty.shape.clone();
    Tensor::from_bytes(ty, parser.bytes)
        .map_err(|_| Refusal::invalid(format!("{place} of shape {shape} has {elements} elements, its data {found}")))
}

/// The text of an error, without a position: that would be one within the data.
fn without_position(e: &serde_json::Error) -> String {
    let text = e.to_string();
    text.split(" at line ").next().unwrap_or_default().to_string()
}

struct Elements {
    dtype: DType,
    bytes: Vec<u8>,
    limit: usize,
    depth: usize,
}

impl Elements {
    fn deserialize_root<'de, D: Deserializer<'de>>(&mut self, deserializer: D) -> Result<(), D::Error> {
        DeserializeSeed::deserialize(self, deserializer)
    }

    fn push<E: serde::de::Error>(&mut self, bytes: &[u8]) -> Result<(), E> {
        if self.bytes.len() >= self.limit {
            return Err(E::custom("there are more elements than the shape has"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn integer<E: serde::de::Error>(&mut self, value: i128) -> Result<(), E> {
        let outside = |_| E::custom(format!("{value} is outside the range of {}", crate::datatype::name(self.dtype)));
        match self.dtype {
            DType::I8 => i8::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::I16 => i16::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::I32 => i32::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::I64 => i64::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::U8 => u8::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::U16 => u16::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::U32 => u32::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::U64 => u64::try_from(value).map_err(outside).and_then(|v| self.push(&v.to_le_bytes())),
            DType::Bool => Err(E::custom(format!("{value} is not true or false"))),
            DType::F32 | DType::F16 | DType::BF16 | DType::F64 => self.float(value as f64),
        }
    }

    fn float<E: serde::de::Error>(&mut self, value: f64) -> Result<(), E> {
        let (bytes, finite): ([u8; 8], bool) = match self.dtype {
            DType::F64 => (value.to_le_bytes(), value.is_finite()),
            DType::F32 => (wide((value as f32).to_le_bytes()), (value as f32).is_finite()),
            DType::F16 => (wide(f16::from_f64(value).to_le_bytes()), f16::from_f64(value).is_finite()),
            DType::BF16 => (wide(bf16::from_f64(value).to_le_bytes()), bf16::from_f64(value).is_finite()),
            dtype => return Err(E::custom(format!("{value} is not a value of {}", crate::datatype::name(dtype)))),
        };
        if !finite {
            return Err(E::custom(format!("{value} is outside the range of {}", crate::datatype::name(self.dtype))));
        }
        self.push(bytes.get(..self.dtype.size()).unwrap_or_default())
    }
}

fn wide<const N: usize>(bytes: [u8; N]) -> [u8; 8] {
    let mut wide = [0; 8];
    wide.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    wide
}

impl<'de> DeserializeSeed<'de> for &mut Elements {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Elements {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("numbers, true or false, or arrays of them")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        match self.dtype {
            DType::Bool => self.push(&[u8::from(value)]),
            dtype => Err(E::custom(format!("{value} is not a value of {}", crate::datatype::name(dtype)))),
        }
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.integer(value.into())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.integer(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.float(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        if self.depth == MAX_NESTING {
            return Err(A::Error::custom(format!("it is nested deeper than {MAX_NESTING} levels")));
        }
        self.depth += 1;
        while sequence.next_element_seed(&mut *self)?.is_some() {}
        self.depth -= 1;
        Ok(())
    }
}

/// The elements of a tensor as one flat array.
pub(crate) struct Data<'a>(pub &'a Tensor);

impl Data<'_> {
    /// JSON has no words for these.
    pub fn holds_non_finite(&self) -> bool {
        fn any<const N: usize>(bytes: &[u8], finite: impl Fn([u8; N]) -> bool) -> bool {
            !bytes.as_chunks::<N>().0.iter().all(|chunk| finite(*chunk))
        }
        let bytes = self.0.bytes();
        match self.0.dtype() {
            DType::F32 => any(bytes, |b| f32::from_le_bytes(b).is_finite()),
            DType::F16 => any(bytes, |b| f16::from_le_bytes(b).is_finite()),
            DType::BF16 => any(bytes, |b| bf16::from_le_bytes(b).is_finite()),
            DType::F64 => any(bytes, |b| f64::from_le_bytes(b).is_finite()),
            _ => false,
        }
    }
}

impl Serialize for Data<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        fn sequence<const N: usize, T: Serialize, S: Serializer>(
            serializer: S,
            bytes: &[u8],
            element: impl Fn([u8; N]) -> T,
        ) -> Result<S::Ok, S::Error> {
            let chunks = bytes.as_chunks::<N>().0;
            let mut sequence = serializer.serialize_seq(Some(chunks.len()))?;
            chunks.iter().try_for_each(|chunk| sequence.serialize_element(&element(*chunk)))?;
            sequence.end()
        }
        let (s, bytes) = (serializer, self.0.bytes());
        match self.0.dtype() {
            DType::F32 => sequence(s, bytes, f32::from_le_bytes),
            DType::F16 => sequence(s, bytes, |b| f16::from_le_bytes(b).to_f32()),
            DType::BF16 => sequence(s, bytes, |b| bf16::from_le_bytes(b).to_f32()),
            DType::F64 => sequence(s, bytes, f64::from_le_bytes),
            DType::I8 => sequence(s, bytes, i8::from_le_bytes),
            DType::I16 => sequence(s, bytes, i16::from_le_bytes),
            DType::I32 => sequence(s, bytes, i32::from_le_bytes),
            DType::I64 => sequence(s, bytes, i64::from_le_bytes),
            DType::U8 => sequence(s, bytes, u8::from_le_bytes),
            DType::U16 => sequence(s, bytes, u16::from_le_bytes),
            DType::U32 => sequence(s, bytes, u32::from_le_bytes),
            DType::U64 => sequence(s, bytes, u64::from_le_bytes),
            DType::Bool => sequence(s, bytes, |[b]| b != 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(dtype: DType, shape: &[usize], data: &str) -> Result<Tensor, Refusal> {
        let raw = RawValue::from_string(data.to_string()).map_err(|e| Refusal::invalid(e.to_string()))?;
        parse_tensor("x", TensorType::new(dtype, shape), &raw)
    }

    #[test]
    fn every_dtype_survives_json() {
        for dtype in DType::ALL {
            let tensor = match dtype {
                DType::Bool => Tensor::from_i64(dtype, [3], &[1, 0, 1]),
                _ => Tensor::from_f64(dtype, [3], &[0.0, 1.0, 100.0]),
            };
            let text = serde_json::to_string(&Data(&tensor)).unwrap();
            assert_eq!(parse(dtype, &[3], &text).unwrap(), tensor, "{text}");
        }
        assert_eq!(serde_json::to_string(&Data(&Tensor::from_f32([1], &[0.1]))).unwrap(), "[0.1]");
    }

    #[test]
    fn what_json_cannot_say_is_found_in_every_float() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
            for (value, finite) in [(1.0, true), (f64::NAN, false), (f64::INFINITY, false)] {
                assert_eq!(Data(&Tensor::from_f64(dtype, [2], &[0.0, value])).holds_non_finite(), !finite, "{dtype} {value}");
            }
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_field() {
        let message = |text: &str| super::parse::<InferRequestJson>(text.as_bytes()).unwrap_err().message;
        for (text, place) in [
            (r#"{"inputs":[{"name":"x","shape":[1,"2"],"datatype":"FP32","data":[1]}]}"#, "inputs[0].shape[1]: invalid type"),
            (r#"{"inputs":[{"name":"x","datatype":"FP32","data":[1]}]}"#, "inputs[0]: missing field `shape`"),
            (r#"{"inputs":[],"outputs":[{"name":3}]}"#, "outputs[0].name: invalid type"),
            (r#"{"inputs":[],"parameters":{"a":[1]}}"#, "parameters.a: invalid type: sequence, expected a number"),
            (r#"{}"#, ": missing field `inputs`"),
            (r#"{"inputs":[]} x"#, "trailing characters"),
        ] {
            assert!(message(text).contains(place), "{}", message(text));
        }
    }

    #[test]
    fn lists_are_bounded_before_they_are_in_memory() {
        let parsed = |text: String| super::parse::<InferRequestJson>(text.as_bytes()).map(drop).map_err(|e| e.message);
        let list = |entry: &str, count: usize| vec![entry; count].join(",");
        let parameters = |count: usize| (0..count).map(|i| format!("\"p{i}\":{i}")).collect::<Vec<_>>().join(",");
        for count in [MAX_ENTRIES, MAX_ENTRIES + 1] {
            let tensor = |shape: &str| format!(r#"{{"name":"x","shape":[{shape}],"datatype":"FP32"}}"#);
            for text in [
                format!(r#"{{"inputs":[{}]}}"#, list(&tensor("1"), count)),
                format!(r#"{{"inputs":[{}]}}"#, tensor(&list("1", count))),
                format!(r#"{{"inputs":[],"outputs":[{}]}}"#, list(r#"{"name":"y"}"#, count)),
                format!(r#"{{"inputs":[],"parameters":{{{}}}}}"#, parameters(count)),
            ] {
                let result = parsed(text);
                assert_eq!(result.is_ok(), count == MAX_ENTRIES, "{result:?}");
                assert!(result.is_ok() || result.unwrap_err().contains("at most 1024"));
            }
        }
    }

    #[test]
    fn nesting_is_free_up_to_a_depth() {
        let expected = Tensor::from_f32([2, 2], &[1.0, 2.0, 3.0, 4.5]);
        assert_eq!(parse(DType::F32, &[2, 2], "[[1,2],[3,4.5]]").unwrap(), expected);
        assert_eq!(parse(DType::F32, &[2, 2], "[1,2,3,4.5]").unwrap(), expected);
        assert_eq!(parse(DType::F32, &[], "7").unwrap(), Tensor::scalar_f32(7.0));
        let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(parse(DType::F32, &[], &deep).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let cases = [
            (DType::F32, "[1]"),
            (DType::F32, "[1,2,3]"),
            (DType::F32, "[1,\"2\"]"),
            (DType::F32, "[1,null]"),
            (DType::F32, "[1,{}]"),
            (DType::F32, "[1,true]"),
            (DType::F32, "[1,1e39]"),
            (DType::F16, "[1,70000]"),
            (DType::F64, "[1,1e400]"),
            (DType::I8, "[1,128]"),
            (DType::U8, "[1,-1]"),
            (DType::I64, "[1,9223372036854775808]"),
            (DType::I32, "[1,1.5]"),
            (DType::Bool, "[true,1]"),
            (DType::F32, "{}"),
        ];
        for (dtype, data) in cases {
            assert!(parse(dtype, &[2], data).is_err(), "{dtype} {data}");
        }
    }

    #[test]
    fn huge_shapes_are_refused_before_anything_is_allocated() {
        assert!(tensor_type("x", DType::F32, &[usize::MAX, 2], 1 << 20).is_err());
        assert!(tensor_type("x", DType::U8, &[1 << 19], 1 << 20).is_err(), "device words count");
        assert!(tensor_type("x", DType::U8, &[1; 9], 1 << 20).is_err());
        assert!(tensor_type("x", DType::U8, &[usize::MAX, 0], 1 << 20).is_ok());
    }
}
