//! Element types narrower than the graph's dtypes. Their values are held in a wider dtype, which holds them exactly: integers of 2
//! and 4 bits in i8 or u8, floats of 4 and 8 bits in f32. What a value was declared as counts where something is cast to that type.

use std::collections::HashMap;

use meganeura_ir::{DType, Shape, Tensor};

use crate::proto::tensor_proto::DataType;
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::roles::constant_tensor;

/// An element type that a wider dtype holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Narrow {
    Int {
        bits: u32,
        signed: bool,
    },
    Float(FloatFormat),
    /// Powers of two from 2^-127 to 2^127, and NaN.
    Exponent,
}

/// A sign, then exponent and mantissa of so many bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FloatFormat {
    pub exponent: u32,
    pub mantissa: u32,
    pub bias: i32,
    pub specials: Specials,
}

/// Which bit patterns are no finite numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Specials {
    /// The largest exponent: infinity, or NaN.
    Ieee,
    /// All ones: NaN.
    AllOnes,
    /// Minus zero: NaN.
    MinusZero,
    None,
}

const fn float(exponent: u32, mantissa: u32, bias: i32, specials: Specials) -> Narrow {
    Narrow::Float(FloatFormat { exponent, mantissa, bias, specials })
}

#[rustfmt::skip]
const NARROW: [(DataType, Narrow); 10] = [
    (DataType::Int2,           Narrow::Int { bits: 2, signed: true }),
    (DataType::Uint2,          Narrow::Int { bits: 2, signed: false }),
    (DataType::Int4,           Narrow::Int { bits: 4, signed: true }),
    (DataType::Uint4,          Narrow::Int { bits: 4, signed: false }),
    (DataType::Float4e2m1,     float(2, 1, 1, Specials::None)),
    (DataType::Float8e4m3fn,   float(4, 3, 7, Specials::AllOnes)),
    (DataType::Float8e4m3fnuz, float(4, 3, 8, Specials::MinusZero)),
    (DataType::Float8e5m2,     float(5, 2, 15, Specials::Ieee)),
    (DataType::Float8e5m2fnuz, float(5, 2, 16, Specials::MinusZero)),
    (DataType::Float8e8m0,     Narrow::Exponent),
];

/// The narrow type of a `TensorProto.DataType` number, if it is one.
pub(crate) fn narrow(data_type: i32) -> Option<Narrow> {
    let data_type = DataType::try_from(data_type).ok()?;
    NARROW.iter().find(|(d, _)| *d == data_type).map(|(_, narrow)| *narrow)
}

impl Narrow {
    /// The dtype that holds its values.
    pub fn held(self) -> DType {
        match self {
            Narrow::Int { signed: true, .. } => DType::I8,
            Narrow::Int { signed: false, .. } => DType::U8,
            Narrow::Float(_) | Narrow::Exponent => DType::F32,
        }
    }

    fn bits(self) -> usize {
        match self {
            Narrow::Int { bits, .. } => bits as usize,
            Narrow::Float(f) => (1 + f.exponent + f.mantissa) as usize,
            Narrow::Exponent => 8,
        }
    }

    /// A tensor of this type as the packed bytes that files hold; none if its shape is malformed.
    pub fn packed(self, proto: &TensorProto) -> Option<TensorProto> {
        let elements = proto.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d))?;
        let bits = elements.checked_mul(self.bits() as i64)?;
        let bytes = bits.checked_add(7)? / 8;
        Some(TensorProto { dims: vec![bytes], data_type: DataType::Uint8 as i32, ..proto.clone() })
    }

    /// The elements of a tensor of `shape` from its packed bytes, the first in the lowest bits. Bytes that are missing read as 0.
    pub fn unpack(self, shape: Shape, bytes: &[u8]) -> Tensor {
        let bits = self.bits();
        let codes = (0..shape.numel()).map(|i| {
            let byte = bytes.get(i * bits / 8).copied().unwrap_or(0);
            u32::from(byte) >> (i * bits % 8) & ((1 << bits) - 1)
        });
        match self {
            Narrow::Int { bits, signed } => {
                let value = |code: u32| {
                    let negative = signed && code >> (bits - 1) == 1;
                    i64::from(code) - if negative { 1 << bits } else { 0 }
                };
                Tensor::from_i64(self.held(), shape, &codes.map(value).collect::<Vec<_>>())
            }
            Narrow::Float(format) => Tensor::from_f64(DType::F32, shape, &codes.map(|c| format.value(c)).collect::<Vec<_>>()),
            Narrow::Exponent => {
                let value = |code: u32| if code == 255 { f64::NAN } else { 2f64.powi(code as i32 - 127) };
                Tensor::from_f64(DType::F32, shape, &codes.map(value).collect::<Vec<_>>())
            }
        }
    }
}

impl FloatFormat {
    /// The number that a bit pattern stands for.
    fn value(self, code: u32) -> f64 {
        let (magnitude, sign) = (code & ((1 << (self.exponent + self.mantissa)) - 1), code >> (self.exponent + self.mantissa));
        let (exponent, mantissa) = (magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1));
        let largest_exponent = exponent == (1 << self.exponent) - 1;
        let all_ones = magnitude == (1 << (self.exponent + self.mantissa)) - 1;
        match self.specials {
            Specials::Ieee if largest_exponent && mantissa == 0 => {
                return if sign == 1 { f64::NEG_INFINITY } else { f64::INFINITY };
            }
            Specials::Ieee if largest_exponent => return f64::NAN,
            Specials::AllOnes if all_ones => return f64::NAN,
            Specials::MinusZero if magnitude == 0 && sign == 1 => return f64::NAN,
            _ => {}
        }
        let value = match exponent {
            0 => f64::from(mantissa) * self.smallest(),
            _ => f64::from(mantissa | 1 << self.mantissa) * 2f64.powi(exponent as i32 - self.bias - self.mantissa as i32),
        };
        if sign == 1 { -value } else { value }
    }

    /// The exponent of the smallest normal number.
    pub fn min_exponent(self) -> i32 {
        1 - self.bias
    }

    /// The exponent of the largest number.
    pub fn max_exponent(self) -> i32 {
        let reserved = if self.specials == Specials::Ieee { 2 } else { 1 };
        (1 << self.exponent) - reserved - self.bias
    }

    /// The smallest positive number.
    pub fn smallest(self) -> f64 {
        2f64.powi(self.min_exponent() - self.mantissa as i32)
    }

    /// The largest finite number.
    pub fn largest(self) -> f64 {
        let missing = if self.specials == Specials::AllOnes { 2 } else { 1 };
        f64::from((2 << self.mantissa) - missing) * 2f64.powi(self.max_exponent() - self.mantissa as i32)
    }
}

/// Operators whose results have the element type of their first operand.
const MOVEMENT: [&str; 15] = [
    "Concat",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
];

/// Whether the results of `node` have the element type of its first operand.
pub(crate) fn moves(node: &NodeProto) -> bool {
    MOVEMENT.contains(&node.op_type.as_str())
}

/// The values that the graph and the bodies in it declare with a narrow type, by name.
pub(crate) fn declared(graph: &GraphProto) -> HashMap<&str, Narrow> {
    let graphs = graph.graphs();
    let infos = graphs.iter().flat_map(|g| g.input.iter().chain(&g.output).chain(&g.value_info)).filter_map(|info| {
        let Some(TypeValue::TensorType(ty)) = info.r#type.as_ref()?.value.as_ref() else { return None };
        Some((info.name.as_str(), narrow(ty.elem_type)?))
    });
    let initializers = graphs.iter().flat_map(|g| &g.initializer);
    let initializers = initializers.filter_map(|t| Some((t.name.as_str(), narrow(t.data_type)?)));
    let constants = graph.nodes().into_iter().filter_map(|node| {
        let (tensor, name) = constant_tensor(node)?;
        Some((name, narrow(tensor.data_type)?))
    });
    infos.chain(initializers).chain(constants).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(data_type: DataType, codes: &[u8], count: usize) -> Vec<f64> {
        narrow(data_type as i32).unwrap().unpack(Shape::from([count]), codes).to_f64_vec()
    }

    /// Table 1 of the OCP 8-bit floating point specification, and ONNX's tables of the fnuz types.
    #[test]
    fn bit_patterns_are_the_numbers_of_the_standard() {
        let cases: [(DataType, &[(u8, f64)]); 6] = [
            (DataType::Float8e4m3fn, &[(0x01, 2f64.powi(-9)), (0x08, 2f64.powi(-6)), (0x38, 1.0), (0x7e, 448.0), (0xfe, -448.0)]),
            (DataType::Float8e4m3fnuz, &[(0x01, 2f64.powi(-10)), (0x40, 1.0), (0x7f, 240.0), (0xff, -240.0)]),
            (DataType::Float8e5m2, &[(0x01, 2f64.powi(-16)), (0x3c, 1.0), (0x7b, 57344.0), (0xfc, f64::NEG_INFINITY)]),
            (DataType::Float8e5m2fnuz, &[(0x01, 2f64.powi(-17)), (0x40, 1.0), (0x7f, 57344.0)]),
            (DataType::Float4e2m1, &[(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (5, 3.0), (7, 6.0), (15, -6.0)]),
            (DataType::Float8e8m0, &[(0, 2f64.powi(-127)), (127, 1.0), (254, 2f64.powi(127))]),
        ];
        for (data_type, numbers) in cases {
            for &(code, expected) in numbers {
                assert_eq!(values(data_type, &[code], 1), [expected], "{data_type:?} {code:#x}");
            }
        }
        let nans = [(DataType::Float8e4m3fn, 0x7f), (DataType::Float8e4m3fnuz, 0x80), (DataType::Float8e5m2, 0x7d)];
        for (data_type, code) in nans.into_iter().chain([(DataType::Float8e5m2fnuz, 0x80), (DataType::Float8e8m0, 0xff)]) {
            assert!(values(data_type, &[code], 1)[0].is_nan(), "{data_type:?} {code:#x}");
        }
    }

    #[test]
    fn the_largest_number_is_that_of_the_type() {
        let largest = |data_type: DataType| match narrow(data_type as i32) {
            Some(Narrow::Float(format)) => format.largest(),
            other => panic!("{other:?}"),
        };
        let types = [DataType::Float4e2m1, DataType::Float8e4m3fn, DataType::Float8e4m3fnuz, DataType::Float8e5m2];
        assert_eq!(types.map(largest), [6.0, 448.0, 240.0, 57344.0]);
        assert_eq!(largest(DataType::Float8e5m2fnuz), 57344.0);
    }

    #[test]
    fn the_first_of_packed_elements_lies_in_the_lowest_bits() {
        assert_eq!(values(DataType::Int4, &[0x8f, 0x07], 3), [-1.0, -8.0, 7.0]);
        assert_eq!(values(DataType::Uint4, &[0x8f, 0x07], 3), [15.0, 8.0, 7.0]);
        assert_eq!(values(DataType::Int2, &[0b01_10_11_00, 0b10], 5), [0.0, -1.0, -2.0, 1.0, -2.0]);
        assert_eq!(values(DataType::Uint2, &[0b01_10_11_00], 4), [0.0, 3.0, 2.0, 1.0]);
    }
}
