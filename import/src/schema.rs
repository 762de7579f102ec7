//! The messages of `onnx.proto` on the wire: what each field holds, and a scan that checks a file against it and against the
//! [`Limits`] before anything is decoded.

use std::ops::Range;

use crate::limits::{Limit, Limits};
use crate::proto;
use crate::wire::{self, Field, WireError, fields, varint};

/// Nesting of messages. A subgraph takes three levels.
pub(crate) const MAX_DEPTH: usize = 60;

/// A message of `onnx.proto`. Messages that are not listed are skipped as unknown fields are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Model,
    OperatorSetId,
    StringStringEntry,
    TrainingInfo,
    Graph,
    Node,
    Function,
    Attribute,
    ValueInfo,
    Tensor,
    Segment,
    SparseTensor,
    Type,
    TensorType,
    SequenceType,
    MapType,
    Shape,
    Dimension,
}

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// A number in the varint encoding.
    Integer,
    /// A number of four bytes.
    Fixed32,
    /// A string that names something.
    Name,
    /// Any other string, or bytes.
    Bytes,
    /// Elements of a tensor: they stay in the file.
    RawData,
    Message(Message),
    /// The same, any number of them. Numbers may be packed.
    Integers,
    Fixed32s,
    Fixed64s,
    Names,
    ByteStrings,
    Messages(Message),
}

impl Content {
    fn repeats(self) -> bool {
        use Content::{ByteStrings, Fixed32s, Fixed64s, Integers, Messages, Names};
        matches!(self, Integers | Fixed32s | Fixed64s | Names | ByteStrings | Messages(_))
    }

    /// The wire types in which this content may come.
    fn wire_types(self) -> &'static [u8] {
        match self {
            Content::Integer => &[VARINT],
            Content::Fixed32 => &[FIXED32],
            Content::Integers => &[VARINT, DELIMITED],
            Content::Fixed32s => &[FIXED32, DELIMITED],
            Content::Fixed64s => &[FIXED64, DELIMITED],
            _ => &[DELIMITED],
        }
    }
}

pub(crate) const VARINT: u8 = 0;
pub(crate) const FIXED64: u8 = 1;
pub(crate) const DELIMITED: u8 = 2;
pub(crate) const FIXED32: u8 = 5;

/// Fields of one message, by number.
type Fields = &'static [(u64, Content)];

impl Message {
    /// The fields that the import reads, and the memory that one decoded message takes.
    #[rustfmt::skip]
    fn layout(self) -> (Fields, usize) {
        use Content::{ByteStrings, Bytes, Fixed32, Fixed32s, Fixed64s, Integer, Integers, Name, Names, RawData};
        use Content::{Message as One, Messages as Many};
        use Message::*;
        match self {
            Model => (&[(1, Integer), (2, Bytes), (3, Bytes), (4, Name), (5, Integer), (6, Bytes), (7, One(Graph)),
                        (8, Many(OperatorSetId)), (14, Many(StringStringEntry)), (20, Many(TrainingInfo)),
                        (25, Many(Function))], size_of::<proto::ModelProto>()),
            OperatorSetId => (&[(1, Name), (2, Integer)], size_of::<proto::OperatorSetIdProto>()),
            StringStringEntry => (&[(1, Bytes), (2, Bytes)], size_of::<proto::StringStringEntryProto>()),
            TrainingInfo => (&[(1, One(Graph)), (2, One(Graph))], 0),
            Graph => (&[(1, Many(Node)), (2, Name), (5, Many(Tensor)), (10, Bytes), (11, Many(ValueInfo)), (12, Many(ValueInfo)),
                        (13, Many(ValueInfo)), (15, Many(SparseTensor))], size_of::<proto::GraphProto>()),
            Node => (&[(1, Names), (2, Names), (3, Name), (4, Name), (5, Many(Attribute)), (6, Bytes), (7, Name), (8, Name)],
                     size_of::<proto::NodeProto>()),
            Function => (&[(1, Name), (4, Names), (5, Names), (6, Names), (7, Many(Node)), (9, Many(OperatorSetId)), (10, Name),
                           (11, Many(Attribute)), (12, Many(ValueInfo)), (13, Name)], size_of::<proto::FunctionProto>()),
            Attribute => (&[(1, Name), (2, Fixed32), (3, Integer), (4, Bytes), (5, One(Tensor)), (6, One(Graph)), (7, Fixed32s),
                            (8, Integers), (9, ByteStrings), (10, Many(Tensor)), (11, Many(Graph)), (13, Bytes), (14, One(Type)),
                            (15, Many(Type)), (20, Integer), (21, Name), (22, One(SparseTensor)), (23, Many(SparseTensor))],
                          size_of::<proto::AttributeProto>()),
            ValueInfo => (&[(1, Name), (2, One(Type)), (3, Bytes)], size_of::<proto::ValueInfoProto>()),
            Tensor => (&[(1, Integers), (2, Integer), (3, One(Segment)), (4, Fixed32s), (5, Integers), (6, ByteStrings),
                         (7, Integers), (8, Name), (9, RawData), (10, Fixed64s), (11, Integers), (12, Bytes),
                         (13, Many(StringStringEntry)), (14, Integer)], size_of::<proto::TensorProto>()),
            Segment => (&[(1, Integer), (2, Integer)], 0),
            SparseTensor => (&[(1, One(Tensor)), (2, One(Tensor)), (3, Integers)], size_of::<proto::SparseTensorProto>()),
            Type => (&[(1, One(TensorType)), (4, One(SequenceType)), (5, One(MapType)), (6, Bytes), (8, One(TensorType)),
                       (9, One(SequenceType))], size_of::<proto::TypeProto>()),
            TensorType => (&[(1, Integer), (2, One(Shape))], 0),
            SequenceType => (&[(1, One(Type))], 0),
            MapType => (&[(1, Integer), (2, One(Type))], 0),
            Shape => (&[(1, Many(Dimension))], 0),
            Dimension => (&[(1, Integer), (2, Name), (3, Bytes)], size_of::<proto::tensor_shape_proto::Dimension>()),
        }
    }

    fn content(self, number: u64) -> Option<Content> {
        self.layout().0.iter().find(|(n, _)| *n == number).map(|(_, content)| *content)
    }

    /// The message in the length-delimited field `number`, where it can lead to a tensor.
    pub fn child(self, number: u64) -> Option<Message> {
        let (Content::Message(child) | Content::Messages(child)) = self.content(number)? else { return None };
        use Message::{Attribute, Function, Graph, Node, SparseTensor, Tensor, TrainingInfo};
        matches!(child, Graph | Node | Function | Attribute | Tensor | SparseTensor | TrainingInfo).then_some(child)
    }
}

/// Checks that `file` is a well-formed `ModelProto` within the limits: the wire type of every known field, fields that may
/// occur once, packed numbers, and the memory that decoding will take. Nothing is allocated.
pub(crate) fn scan(file: &[u8], limits: &Limits) -> Result<(), WireError> {
    limits.check(Limit::FileBytes, file.len() as u64)?;
    let mut scanner = Scanner { bytes: file, limits, memory: 0, nodes: 0 };
    scanner.message(Message::Model, 0..file.len(), 0, 0)
}

struct Scanner<'a> {
    bytes: &'a [u8],
    limits: &'a Limits,
    /// Bytes that the decoded messages will take.
    memory: u64,
    nodes: u64,
}

impl Scanner<'_> {
    /// `graphs`: graphs around this message.
    fn message(&mut self, kind: Message, range: Range<usize>, depth: usize, graphs: u64) -> Result<(), WireError> {
        if depth > MAX_DEPTH {
            return Err(WireError::Depth);
        }
        let (layout, size) = kind.layout();
        self.grow(size)?;
        match kind {
            Message::Node => {
                self.nodes += 1;
                self.limits.check(Limit::Nodes, self.nodes)?;
            }
            Message::Graph if graphs > 0 => self.limits.check(Limit::SubgraphDepth, graphs)?,
            _ => {}
        }
        let graphs = graphs + u64::from(kind == Message::Graph);
        let resident = if kind == Message::Tensor { wire::located(self.bytes, range.clone())? } else { None };
        let (mut seen, mut attributes) = (0u32, 0);
        for field in fields(self.bytes, range) {
            let field = field?;
            let Some(position) = layout.iter().position(|(number, _)| *number == field.number) else { continue };
            let content = layout[position].1;
            if !content.wire_types().contains(&field.wire_type) {
                let (offset, field, wire_type) = (field.whole.start, field.number, field.wire_type);
                return Err(WireError::WireType { offset, field, wire_type });
            }
            if !content.repeats() {
                if seen & 1 << position != 0 {
                    return Err(WireError::Repeated { offset: field.whole.start, field: field.number });
                }
                seen |= 1 << position;
            }
            if content == Content::Messages(Message::Attribute) {
                attributes += 1;
                self.limits.check(Limit::Attributes, attributes)?;
            }
            if resident.as_ref().is_none_or(|(number, _)| *number != field.number) {
                self.field(content, &field, depth, graphs)?;
            }
        }
        Ok(())
    }

    fn field(&mut self, content: Content, field: &Field, depth: usize, graphs: u64) -> Result<(), WireError> {
        let Some(payload) = field.payload.clone() else {
            return self.grow(if content.repeats() { size_of::<u64>() } else { 0 });
        };
        match content {
            Content::Message(child) | Content::Messages(child) => self.message(child, payload, depth + 1, graphs),
            Content::Name | Content::Names => {
                self.limits.check(Limit::NameBytes, payload.len() as u64)?;
                self.grow(size_of::<String>() + payload.len())
            }
            Content::Bytes | Content::ByteStrings => self.grow(size_of::<Vec<u8>>() + payload.len()),
            Content::Integers => {
                let mut at = payload.start;
                while at < payload.end {
                    varint(self.bytes, &mut at, payload.end)?;
                    self.grow(size_of::<u64>())?;
                }
                Ok(())
            }
            Content::Fixed32s | Content::Fixed64s => {
                let size = if content == Content::Fixed32s { 4 } else { 8 };
                if payload.len() % size != 0 {
                    return Err(WireError::Packed { offset: field.whole.start, field: field.number, bytes: payload.len(), size });
                }
                self.grow(payload.len())
            }
            Content::Integer | Content::Fixed32 | Content::RawData => Ok(()),
        }
    }

    fn grow(&mut self, bytes: usize) -> Result<(), WireError> {
        self.memory = self.memory.saturating_add(bytes as u64);
        Ok(self.limits.check(Limit::StructureBytes, self.memory)?)
    }
}
