//! The protobuf wire format of an ONNX file: enough of it to find tensor data and to replace it, without decoding the message.
//!
//! [`rewrite`] walks a serialised `ModelProto` and asks, for every `TensorProto` in it, what becomes of its data. Everything else
//! is copied byte for byte, fields of newer ONNX versions included. The result is a [`Rope`], so that weights need not be in
//! memory when a file is written. Field numbers are those of `onnx.proto`.

use std::io::{self, Write};
use std::ops::Range;

use crate::limits::LimitError;
use crate::proto::tensor_proto::DataType;
use crate::schema::{DELIMITED, FIXED32, FIXED64, MAX_DEPTH, Message, VARINT};

/// A malformed protobuf message. Offsets are bytes from the start of the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("the message ends inside a field at byte {offset}: the file is truncated or no ONNX model")]
    Truncated { offset: usize },
    #[error("a malformed integer at byte {offset}: this is no ONNX model")]
    Varint { offset: usize },
    #[error("wire type {wire_type} of field {field} at byte {offset}: this is no ONNX model")]
    WireType { offset: usize, field: u64, wire_type: u8 },
    #[error("messages are nested more than {MAX_DEPTH} deep")]
    Depth,
    #[error("field {field} at byte {offset} occurs twice in one message")]
    Repeated { offset: usize, field: u64 },
    #[error("the packed field {field} at byte {offset} takes {bytes} bytes, no multiple of {size}")]
    Packed { offset: usize, field: u64, bytes: usize, size: usize },
    #[error("the file is refused: {0}")]
    Limit(#[from] LimitError),
}

/// One field of a message.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub number: u64,
    pub wire_type: u8,
    /// Tag, length and payload.
    pub whole: Range<usize>,
    /// The content of a length-delimited field.
    pub payload: Option<Range<usize>>,
    /// The value of a varint.
    integer: Option<u64>,
}

pub(crate) fn varint(bytes: &[u8], at: &mut usize, end: usize) -> Result<u64, WireError> {
    let start = *at;
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        if *at >= end {
            return Err(WireError::Truncated { offset: start });
        }
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return if shift == 63 && byte > 1 { Err(WireError::Varint { offset: start }) } else { Ok(value) };
        }
    }
    Err(WireError::Varint { offset: start })
}

/// The fields of the message that occupies `range`.
pub(crate) fn fields(bytes: &[u8], range: Range<usize>) -> impl Iterator<Item = Result<Field, WireError>> + '_ {
    let (mut at, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let field = field(bytes, &mut at, end);
        if field.is_err() {
            at = end;
        }
        Some(field)
    })
}

fn field(bytes: &[u8], at: &mut usize, end: usize) -> Result<Field, WireError> {
    let start = *at;
    let tag = varint(bytes, at, end)?;
    let (number, wire_type) = (tag >> 3, (tag & 7) as u8);
    let (mut payload, mut integer) = (None, None);
    let size = match wire_type {
        VARINT => {
            integer = Some(varint(bytes, at, end)?);
            0
        }
        FIXED64 => 8,
        DELIMITED => {
            let length = varint(bytes, at, end)?;
            if length > (end - *at) as u64 {
                return Err(WireError::Truncated { offset: start });
            }
            payload = Some(*at..*at + length as usize);
            length as usize
        }
        FIXED32 => 4,
        _ => return Err(WireError::WireType { offset: start, field: number, wire_type }),
    };
    if number == 0 {
        return Err(WireError::WireType { offset: start, field: number, wire_type });
    }
    if size > end - *at {
        return Err(WireError::Truncated { offset: start });
    }
    *at += size;
    Ok(Field { number, wire_type, whole: start..*at, payload, integer })
}

const TENSOR_DATA_TYPE: u64 = 2;
const TENSOR_FLOAT_DATA: u64 = 4;
const TENSOR_NAME: u64 = 8;
const TENSOR_RAW_DATA: u64 = 9;
const TENSOR_DOUBLE_DATA: u64 = 10;
const TENSOR_EXTERNAL_DATA: u64 = 13;
/// `float_data`, `int32_data`, `string_data`, `int64_data`, `raw_data`, `double_data`, `uint64_data`, `external_data`,
/// `data_location`.
const TENSOR_DATA: [u64; 9] = [TENSOR_FLOAT_DATA, 5, 6, 7, TENSOR_RAW_DATA, TENSOR_DOUBLE_DATA, 11, TENSOR_EXTERNAL_DATA, 14];

/// A tensor that [`rewrite`] came across.
#[derive(Clone, Debug)]
pub(crate) struct Site<'a> {
    /// Tensors before this one in the message.
    pub ordinal: u64,
    pub name: &'a [u8],
    /// The serialised `TensorProto`.
    pub message: &'a [u8],
    /// Where the elements lie as they are: little-endian, without gaps.
    pub raw_data: Option<Range<usize>>,
    /// The field of these elements.
    raw_field: u64,
    pub external: bool,
}

/// What becomes of a tensor's data.
#[derive(Clone, Debug)]
pub(crate) enum Edit {
    /// The elements that lie as they are become this, in `raw_data`, or go; other fields stay.
    RawData(Option<Part>),
    /// Every data field goes; this becomes `raw_data`.
    Replace(Option<Part>),
}

/// A piece of a rewritten message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Bytes of the original.
    Copy(Range<usize>),
    Literal(Vec<u8>),
    /// The data of the parameter `name`, `len` bytes, supplied when the rope is written.
    Weight {
        name: String,
        len: u64,
    },
}

impl Part {
    fn len(&self) -> u64 {
        match self {
            Part::Copy(range) => range.len() as u64,
            Part::Literal(bytes) => bytes.len() as u64,
            Part::Weight { len, .. } => *len,
        }
    }
}

/// A message in pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rope {
    parts: Vec<Part>,
    len: u64,
}

impl Rope {
    /// Bytes of the whole message.
    pub fn len(&self) -> u64 {
        self.len
    }

    fn push(&mut self, part: Part) {
        self.len += part.len();
        match (self.parts.last_mut(), part) {
            (Some(Part::Copy(last)), Part::Copy(next)) if last.end == next.start => last.end = next.end,
            (Some(Part::Literal(last)), Part::Literal(next)) => last.extend(next),
            (_, part) => self.parts.push(part),
        }
    }

    fn push_field(&mut self, number: u64, content: Rope) {
        let mut head = Vec::with_capacity(12);
        push_varint(&mut head, number << 3 | 2);
        push_varint(&mut head, content.len);
        self.push(Part::Literal(head));
        for part in content.parts {
            self.push(part);
        }
    }

    /// Writes the message. `original` is what it was rewritten from; `weight` writes the data of a parameter.
    pub fn write<W: Write + ?Sized, E: From<io::Error>>(
        &self,
        out: &mut W,
        original: &[u8],
        mut weight: impl FnMut(&str, u64, &mut W) -> Result<(), E>,
    ) -> Result<(), E> {
        for part in &self.parts {
            match part {
                Part::Copy(range) => out.write_all(&original[range.clone()])?,
                Part::Literal(bytes) => out.write_all(bytes)?,
                Part::Weight { name, len } => weight(name, *len, out)?,
            }
        }
        Ok(())
    }
}

fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The serialised `ModelProto` in `bytes` with the data of each tensor edited as `edit` says.
pub(crate) fn rewrite<E: From<WireError>>(bytes: &[u8], edit: &mut dyn FnMut(&Site) -> Result<Edit, E>) -> Result<Rope, E> {
    let mut rewriter = Rewriter { bytes, edit, tensors: 0 };
    rewriter.message(Message::Model, 0..bytes.len(), 0)
}

/// The elements of the tensor message in `range` that lie in the file as they are in memory, and their field: `raw_data`, or a
/// typed field that is packed whole.
pub(crate) fn located(bytes: &[u8], range: Range<usize>) -> Result<Option<(u64, Range<usize>)>, WireError> {
    let (mut raw, mut typed, mut pieces, mut data_type) = (None, None, 0, 0);
    for field in fields(bytes, range) {
        let field = field?;
        match (field.number, field.payload) {
            (TENSOR_DATA_TYPE, _) => data_type = field.integer.unwrap_or(0),
            (TENSOR_RAW_DATA, payload) => raw = payload,
            (number @ (TENSOR_FLOAT_DATA | TENSOR_DOUBLE_DATA), payload) => {
                pieces += 1;
                typed = payload.map(|payload| (number, payload));
            }
            _ => {}
        }
    }
    let as_in_memory = |number: u64| {
        let element = if number == TENSOR_FLOAT_DATA { DataType::Float } else { DataType::Double };
        data_type == element as u64
    };
    let typed = typed.filter(|(number, _)| pieces == 1 && as_in_memory(*number));
    Ok(raw.map(|range| (TENSOR_RAW_DATA, range)).or(typed))
}

struct Rewriter<'a, 'e, E> {
    bytes: &'a [u8],
    edit: &'e mut dyn FnMut(&Site) -> Result<Edit, E>,
    tensors: u64,
}

impl<'a, E: From<WireError>> Rewriter<'a, '_, E> {
    fn message(&mut self, kind: Message, range: Range<usize>, depth: usize) -> Result<Rope, E> {
        if depth > MAX_DEPTH {
            return Err(WireError::Depth.into());
        }
        if kind == Message::Tensor {
            return self.tensor(range);
        }
        let mut rope = Rope::default();
        for field in fields(self.bytes, range) {
            let field = field?;
            match (kind.child(field.number), field.payload) {
                (Some(child), Some(payload)) => {
                    let content = self.message(child, payload, depth + 1)?;
                    rope.push_field(field.number, content);
                }
                _ => rope.push(Part::Copy(field.whole)),
            }
        }
        Ok(rope)
    }

    fn tensor(&mut self, range: Range<usize>) -> Result<Rope, E> {
        let (name, message) = (self.first(range.clone(), TENSOR_NAME)?, &self.bytes[range.clone()]);
        let located = located(self.bytes, range.clone())?;
        let (raw_data, raw_field) = located.map_or((None, TENSOR_RAW_DATA), |(field, range)| (Some(range), field));
        let external = !self.first(range.clone(), TENSOR_EXTERNAL_DATA)?.is_empty();
        let ordinal = self.tensors;
        self.tensors += 1;
        let site = Site { ordinal, name, message, raw_data, raw_field, external };
        let (dropped, data): (&[u64], _) = match (self.edit)(&site)? {
            Edit::RawData(part) => (&[TENSOR_RAW_DATA, site.raw_field], part),
            Edit::Replace(part) => (&TENSOR_DATA, part),
        };
        let mut rope = Rope::default();
        for field in fields(self.bytes, range) {
            let field = field?;
            if !dropped.contains(&field.number) {
                rope.push(Part::Copy(field.whole));
            }
        }
        if let Some(data) = data {
            let mut content = Rope::default();
            content.push(data);
            rope.push_field(TENSOR_RAW_DATA, content);
        }
        Ok(rope)
    }

    /// The content of the first field `number` of a message; empty where there is none.
    fn first(&self, range: Range<usize>, number: u64) -> Result<&'a [u8], WireError> {
        for field in fields(self.bytes, range) {
            let field = field?;
            if let (true, Some(payload)) = (field.number == number, field.payload) {
                return Ok(&self.bytes[payload]);
            }
        }
        Ok(&[])
    }
}

/// What stands for the `raw_data` of a tensor in a skeleton: which tensor of the file it is, and where its bytes lie there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Locator {
    /// Tensors before this one in the file. Copies of a tensor, which inlined functions hold, keep it.
    pub ordinal: u64,
    /// Absent if the tensor has no `raw_data`.
    pub range: Option<Range<u64>>,
}

impl Locator {
    /// What stands in `raw_data` for the bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let range = self.range.iter().flat_map(|range| [range.start, range.end]);
        std::iter::once(self.ordinal).chain(range).flat_map(u64::to_le_bytes).collect()
    }

    /// Reads a locator from the `raw_data` of a tensor of a skeleton.
    pub fn from_bytes(bytes: &[u8]) -> Option<Locator> {
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().map(u64::from_le_bytes));
        let ordinal = words.next()?.ok()?;
        let range = match (words.next(), words.next()) {
            (Some(Ok(start)), Some(Ok(end))) => Some(start..end),
            _ => None,
        };
        Some(Locator { ordinal, range })
    }
}

/// The bytes of `file` in `range`, if it has them.
pub(crate) fn slice(file: &[u8], range: Range<u64>) -> Option<&[u8]> {
    file.get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
}

/// The model in `file` with a [`Locator`] as the `raw_data` of every tensor.
pub(crate) fn skeleton(file: &[u8]) -> Result<Vec<u8>, WireError> {
    let rope = rewrite::<WireError>(file, &mut |site| {
        let range = site.raw_data.as_ref().map(|range| range.start as u64..range.end as u64);
        let locator = Locator { ordinal: site.ordinal, range };
        Ok(Edit::RawData(Some(Part::Literal(locator.to_bytes()))))
    })?;
    let mut bytes = Vec::with_capacity(rope.len() as usize);
    for part in &rope.parts {
        match part {
            Part::Copy(range) => bytes.extend(&file[range.clone()]),
            Part::Literal(literal) => bytes.extend(literal),
            Part::Weight { .. } => {}
        }
    }
    Ok(bytes)
}
