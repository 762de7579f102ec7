//! The NPY format: a header that is a Python dictionary, then the elements.
//!
//! Format: NumPy Enhancement Proposal 1 and `numpy.lib.format`, versions 1 to 3.

use meganeura_ir::{DType, Tensor, TensorType};

const MAGIC: &[u8] = b"\x93NUMPY";

/// What an NPY header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub ty: TensorType,
    pub big_endian: bool,
    /// Column-major.
    pub fortran: bool,
    /// Offset of the elements in the file.
    pub data: usize,
}

/// Codes of `descr` after the byte order.
const DESCR: [(&str, DType); 12] = [
    ("f4", DType::F32),
    ("f2", DType::F16),
    ("f8", DType::F64),
    ("i1", DType::I8),
    ("i2", DType::I16),
    ("i4", DType::I32),
    ("i8", DType::I64),
    ("u1", DType::U8),
    ("u2", DType::U16),
    ("u4", DType::U32),
    ("u8", DType::U64),
    ("b1", DType::Bool),
];

/// Reads the header at the start of `bytes`. The error completes the sentence "array x ...".
pub(super) fn parse_header(bytes: &[u8]) -> Result<Header, String> {
    let damaged = || "has a damaged header".to_string();
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| "is not an NPY array".to_string())?;
    let (length, start) = match *rest {
        [1, _, a, b, ..] => (u16::from_le_bytes([a, b]) as usize, 10),
        [2 | 3, _, a, b, c, d, ..] => (u32::from_le_bytes([a, b, c, d]) as usize, 12),
        _ => return Err(damaged()),
    };
    let data = start + length;
    let text = bytes.get(start..data).and_then(|h| std::str::from_utf8(h).ok()).ok_or_else(damaged)?;
    let descr = field(text, "descr").ok_or_else(damaged)?;
    let fortran = field(text, "fortran_order").ok_or_else(damaged)?.starts_with("True");
    let shape = field(text, "shape").and_then(parse_shape).ok_or_else(damaged)?;
    let (dtype, big_endian) = parse_descr(descr)?;
    Ok(Header { ty: TensorType::new(dtype, shape), big_endian, fortran, data })
}

/// What follows `'name':` in the dictionary.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let key = text.find(&format!("'{name}'")).map(|at| at + name.len() + 2)?;
    text[key..].trim_start().strip_prefix(':').map(str::trim_start)
}

fn parse_shape(text: &str) -> Option<Vec<usize>> {
    let inner = text.strip_prefix('(')?.split_once(')')?.0;
    inner.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| s.parse().ok()).collect()
}

fn parse_descr(text: &str) -> Result<(DType, bool), String> {
    let code = text.strip_prefix('\'').and_then(|t| t.split_once('\'')).map(|(code, _)| code);
    let known = code.and_then(|code| {
        let (order, kind) = code.split_at_checked(1)?;
        let dtype = DESCR.iter().find(|(name, _)| *name == kind)?.1;
        matches!(order, "<" | "|" | "=" | ">").then_some((dtype, order == ">"))
    });
    known.ok_or_else(|| {
        let shown: String = code.unwrap_or(text).chars().take(40).collect();
        format!("has elements of NumPy type {shown}; save it as float32 or int64")
    })
}

/// The header of a little-endian, row-major array, padded so that the elements start at a multiple of 64 bytes. NumPy has no bfloat16.
pub(super) fn header(ty: &TensorType) -> Vec<u8> {
    let code = DESCR.iter().find(|(_, dtype)| *dtype == ty.dtype).map_or("f4", |(code, _)| code);
    let order = if ty.dtype.size() == 1 { '|' } else { '<' };
    let shape: String = ty.shape.iter().map(|d| format!("{d},")).collect();
    let mut text = format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': ({shape}), }}");
    let unpadded = MAGIC.len() + 4 + text.len() + 1;
    text.extend(std::iter::repeat_n(' ', unpadded.next_multiple_of(64) - unpadded));
    text.push('\n');
    let length = text.len() as u16;
    [MAGIC, &[1, 0], &length.to_le_bytes(), text.as_bytes()].concat()
}

/// Elements as a tensor: little-endian and row-major, whatever the header says about the bytes.
pub(super) fn to_tensor(header: &Header, mut bytes: Vec<u8>) -> Result<Tensor, String> {
    let size = header.ty.dtype.size();
    if header.big_endian {
        bytes.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
    if header.fortran && header.ty.shape.rank() > 1 && bytes.len() == header.ty.bytes() {
        bytes = to_row_major(&header.ty, &bytes);
    }
    Tensor::from_bytes(header.ty.clone(), bytes).map_err(|e| format!("is incomplete: {e}"))
}

fn to_row_major(ty: &TensorType, bytes: &[u8]) -> Vec<u8> {
    let size = ty.dtype.size();
    let column_strides: Vec<usize> = ty
        .shape
        .iter()
        .scan(1, |stride, &d| {
            let own = *stride;
            *stride *= d;
            Some(own)
        })
        .collect();
    let mut out = Vec::with_capacity(bytes.len());
    for linear in 0..ty.shape.numel() {
        let from: usize = ty.shape.unravel(linear).iter().zip(&column_strides).map(|(i, s)| i * s).sum();
        out.extend_from_slice(&bytes[from * size..][..size]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header as `numpy.save` writes it.
    fn numpy_header(dict: &str) -> Vec<u8> {
        let mut text = dict.to_string();
        while !(10 + text.len() + 1).is_multiple_of(64) {
            text.push(' ');
        }
        text.push('\n');
        [b"\x93NUMPY\x01\x00".as_slice(), &(text.len() as u16).to_le_bytes(), text.as_bytes()].concat()
    }

    #[test]
    fn headers_of_numpy_are_read() {
        let cases = [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 7, 8), }", DType::F32, vec![2, 7, 8], false, false),
            ("{'descr': '>i8', 'fortran_order': True, 'shape': (4,), }", DType::I64, vec![4], true, true),
            ("{'descr': '|b1', 'fortran_order': False, 'shape': (), }", DType::Bool, vec![], false, false),
        ];
        for (dict, dtype, shape, big_endian, fortran) in cases {
            let bytes = numpy_header(dict);
            let data = bytes.len();
            assert_eq!(parse_header(&bytes), Ok(Header { ty: TensorType::new(dtype, shape), big_endian, fortran, data }));
        }
    }

    #[test]
    fn foreign_element_types_are_refused_by_name() {
        for descr in ["'<c8'", "'|O'", "[('a', '<f4')]", "'<U5'"] {
            let dict = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}");
            let error = parse_header(&numpy_header(&dict)).unwrap_err();
            assert!(error.contains("NumPy type"), "{error}");
        }
    }

    #[test]
    fn damaged_headers_are_errors() {
        let good = numpy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }");
        for end in 0..good.len() {
            let _ = parse_header(&good[..end]).unwrap_err();
        }
        assert!(parse_header(&numpy_header("{'descr': '<f4', 'shape': (2,), }")).is_err());
        assert!(parse_header(&numpy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }")).is_err());
    }

    #[test]
    fn written_headers_are_read_back() {
        for shape in [vec![], vec![3], vec![1, 0, 5]] {
            for (_, dtype) in DESCR {
                let ty = TensorType::new(dtype, shape.clone());
                let bytes = header(&ty);
                assert_eq!(bytes.len() % 64, 0);
                assert_eq!(parse_header(&bytes).unwrap().ty, ty);
            }
        }
    }

    #[test]
    fn column_major_and_big_endian_elements_are_reordered() {
        let ty = TensorType::new(DType::I16, [2, 3]);
        let bytes: Vec<u8> = [0i16, 10, 1, 11, 2, 12].iter().flat_map(|v| v.to_be_bytes()).collect();
        let tensor = to_tensor(&Header { ty, big_endian: true, fortran: true, data: 0 }, bytes).unwrap();
        assert_eq!(tensor.to_i64_vec(), [0, 1, 2, 10, 11, 12]);
    }
}
