//! How much a request holds is known before it is decoded: an empty message takes two bytes on the wire, and hundreds in memory.

use bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use crate::json::MAX_ENTRIES;
use crate::refusal::Refusal;

/// Fields of `ModelInferRequest` whose entries hold further entries: `inputs` and `outputs`.
const NESTED: [u32; 2] = [5, 6];
/// The field of an input with its data, whose length only the size of the body bounds.
const CONTENTS: u32 = 5;
/// Bytes of a list of numbers, which is one field on the wire, of [`MAX_ENTRIES`].
const MAX_PACKED: usize = MAX_ENTRIES * 10;
/// Bytes in memory of an element of data, by field: numbers of variable length on the wire.
const WIDTHS: [(u32, usize); 5] = [(1, 1), (2, 4), (3, 8), (4, 4), (5, 8)];

/// Whether a `ModelInferRequest` has few enough fields of every kind to be decoded into `max_bytes`, besides [`MAX_ENTRIES`] of each kind.
///
/// # Errors
/// It has not, or it is no message.
pub fn check(message: &[u8], max_bytes: usize) -> Result<(), Refusal> {
    let mut data = 0;
    for entry in fields(message, MAX_ENTRIES) {
        let (tag, value) = entry?;
        if !NESTED.contains(&tag) {
            continue;
        }
        for entry in fields(value, MAX_ENTRIES) {
            let (tag, value) = entry?;
            // Names, which stand first, are as long as clients like.
            match tag {
                CONTENTS => data += data_bytes(value)?,
                3.. if value.len() > MAX_PACKED => return Err(too_many()),
                _ => {}
            }
        }
    }
    match data {
        _ if data > max_bytes => Err(Refusal::too_large(format!("the data takes more than {max_bytes} bytes"))),
        _ => Ok(()),
    }
}

/// Bytes that `InferTensorContents` takes in memory.
fn data_bytes(contents: &[u8]) -> Result<usize, Refusal> {
    let mut bytes = 0;
    for entry in fields(contents, usize::MAX) {
        let (tag, value) = entry?;
        bytes += match WIDTHS.into_iter().find(|(known, _)| *known == tag) {
            // One number that is not packed has no length.
            Some((_, width)) => value.iter().filter(|byte| **byte < 0x80).count().max(1) * width,
            None => value.len().max(8),
        };
    }
    Ok(bytes)
}

fn too_many() -> Refusal {
    Refusal::invalid(format!("the message has lists of more than {MAX_ENTRIES} entries"))
}

/// The fields of a message by tag, with the bytes of those that have a length; an error beyond `max` of them.
fn fields(message: &[u8], max: usize) -> impl Iterator<Item = Result<(u32, &[u8]), Refusal>> {
    let mut rest = message;
    let mut count = 0;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        count += 1;
        let field = if count > max { Err(too_many()) } else { field(&mut rest) };
        if field.is_err() {
            rest = &[];
        }
        Some(field)
    })
}

fn field<'a>(rest: &mut &'a [u8]) -> Result<(u32, &'a [u8]), Refusal> {
    let malformed = |_| Refusal::invalid("the message is damaged");
    let (tag, wire_type) = decode_key(rest).map_err(malformed)?;
    if wire_type != WireType::LengthDelimited {
        skip_field(wire_type, tag, rest, DecodeContext::default()).map_err(malformed)?;
        return Ok((tag, &[]));
    }
    let length = decode_varint(rest).map_err(malformed)?;
    let value = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let value = value.ok_or_else(|| Refusal::invalid("the message is damaged"))?;
    rest.advance(value.len());
    Ok((tag, value))
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::messages::{InferTensor, InferTensorContents, ModelInferRequest, RequestedOutput};
    use super::*;

    fn check_request(request: ModelInferRequest) -> bool {
        check(&request.encode_to_vec(), 1 << 20).is_ok()
    }

    #[test]
    fn lists_are_bounded_before_they_are_decoded() {
        let input = || InferTensor { name: "x".repeat(100_000), shape: vec![i64::MAX; 8], ..InferTensor::default() };
        let request = |inputs| ModelInferRequest { inputs, ..ModelInferRequest::default() };
        assert!(check_request(request(vec![input(); MAX_ENTRIES])));
        assert!(!check_request(request(vec![InferTensor::default(); MAX_ENTRIES + 1])));
        let long = InferTensor { shape: vec![1; MAX_PACKED + 1], ..input() };
        assert!(!check_request(request(vec![input(), long])));
        let parameter = |i: usize| (i.to_string(), Default::default());
        let many = InferTensor { parameters: (0..2 * MAX_ENTRIES).map(parameter).collect(), ..InferTensor::default() };
        assert!(!check_request(request(vec![many])));
        let outputs = vec![RequestedOutput::default(); MAX_ENTRIES + 1];
        assert!(!check_request(ModelInferRequest { outputs, ..ModelInferRequest::default() }));
        let raw_input_contents = vec![bytes::Bytes::new(); MAX_ENTRIES + 1];
        assert!(!check_request(ModelInferRequest { raw_input_contents, ..ModelInferRequest::default() }));
        let parameters = (0..2 * MAX_ENTRIES).map(parameter).collect();
        assert!(!check_request(ModelInferRequest { parameters, ..ModelInferRequest::default() }));
    }

    #[test]
    fn data_is_as_long_as_it_likes() {
        let contents = InferTensorContents { fp32_contents: vec![0.5; 100_000], ..InferTensorContents::default() };
        let input = InferTensor { contents: Some(contents), ..InferTensor::default() };
        let raw_input_contents = vec![vec![0; 1 << 20].into()];
        let request = |inputs| ModelInferRequest { inputs, ..ModelInferRequest::default() };
        assert!(check_request(ModelInferRequest { raw_input_contents, ..request(vec![input.clone()]) }));
        assert!(!check_request(request(vec![input; 3])));
        // A byte each on the wire.
        let contents = InferTensorContents { int64_contents: vec![1; (1 << 17) + 1], ..InferTensorContents::default() };
        assert!(!check_request(request(vec![InferTensor { contents: Some(contents), ..InferTensor::default() }])));
    }

    #[test]
    fn damaged_messages_are_refused() {
        for message in [&[0x2a][..], &[0x2a, 5, 0], &[0x2a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], &[7], &[0]]
        {
            assert!(check(message, 1 << 20).is_err(), "{message:?}");
        }
        assert!(check(&[], 1 << 20).is_ok());
    }
}
