//! Host tensors as the 32-bit words that lie in device memory, and back.

use half::{bf16, f16};
use meganeura_codegen::profile::DeviceProfile;
use meganeura_codegen::program::packed;
use meganeura_ir::{DType, Tensor, TensorType};

/// A value that the device cannot hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: element {index} is {value}, outside the 32-bit range in which devices hold {dtype}")]
pub struct WordError {
    /// The tensor.
    pub name: String,
    /// Row-major position.
    pub index: usize,
    pub value: i128,
    pub dtype: DType,
}

/// Elements of `bytes` as arrays of their little-endian bytes.
fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

/// Checks that every element of `tensor` has a word: 64-bit integers may not.
pub(crate) fn check(name: &str, tensor: &Tensor) -> Result<(), WordError> {
    let error = |(index, value)| WordError { name: name.into(), index, value, dtype: tensor.dtype() };
    let outside = match tensor.dtype() {
        DType::I64 => elements(tensor.bytes())
            .map(i64::from_le_bytes)
            .enumerate()
            .find(|&(_, v)| i32::try_from(v).is_err())
            .map(|(i, v)| (i, v.into())),
        DType::U64 => elements(tensor.bytes())
            .map(u64::from_le_bytes)
            .enumerate()
            .find(|&(_, v)| u32::try_from(v).is_err())
            .map(|(i, v)| (i, v.into())),
        _ => None,
    };
    outside.map_or(Ok(()), |found| Err(error(found)))
}

/// Writes the words of a [checked](check) tensor: floats as `f32` (rounded), integers widened or narrowed, bools as 0 or 1. What the device
/// [stores as halves](DeviceProfile::stores_halves) is two to a word.
pub(crate) fn encode(tensor: &Tensor, words: &mut [u32], profile: &DeviceProfile) {
    let bytes = tensor.bytes();
    if profile.stores_halves(tensor.dtype()) {
        words.iter_mut().zip(packed(bytes)).for_each(|(word, packed)| *word = packed);
        return;
    }
    fn fill<const N: usize>(words: &mut [u32], bytes: &[u8], word: impl Fn([u8; N]) -> u32) {
        words.iter_mut().zip(elements(bytes)).for_each(|(w, element)| *w = word(element));
    }
    match tensor.dtype() {
        DType::F32 | DType::I32 | DType::U32 => fill(words, bytes, u32::from_le_bytes),
        DType::F16 => fill(words, bytes, |b| f16::from_le_bytes(b).to_f32().to_bits()),
        DType::BF16 => fill(words, bytes, |b| bf16::from_le_bytes(b).to_f32().to_bits()),
        DType::F64 => fill(words, bytes, |b| (f64::from_le_bytes(b) as f32).to_bits()),
        DType::I8 => fill(words, bytes, |b| i8::from_le_bytes(b) as i32 as u32),
        DType::I16 => fill(words, bytes, |b| i16::from_le_bytes(b) as i32 as u32),
        DType::I64 => fill(words, bytes, |b| i64::from_le_bytes(b) as u32),
        DType::U8 => fill(words, bytes, |[b]| b.into()),
        DType::U16 => fill(words, bytes, |b| u16::from_le_bytes(b).into()),
        DType::U64 => fill(words, bytes, |b| u64::from_le_bytes(b) as u32),
        DType::Bool => fill(words, bytes, |[b]| (b != 0).into()),
    }
}

/// The tensor of type `ty` whose words are `words`: floats round to their dtype, integers wrap to theirs.
pub(crate) fn decode(ty: &TensorType, words: &[u32], profile: &DeviceProfile) -> Tensor {
    fn collect<const N: usize>(words: &[u32], element: impl Fn(u32) -> [u8; N]) -> Vec<u8> {
        words.iter().flat_map(|&w| element(w)).collect()
    }
    let bytes = match ty.dtype {
        _ if profile.stores_halves(ty.dtype) => {
            let mut bytes = collect(words, u32::to_le_bytes);
            bytes.truncate(ty.bytes());
            bytes
        }
        DType::F32 | DType::I32 | DType::U32 if cfg!(target_endian = "little") => bytemuck::cast_slice(words).to_vec(),
        DType::F32 | DType::I32 | DType::U32 => collect(words, u32::to_le_bytes),
        DType::F16 => collect(words, |w| f16::from_f32(f32::from_bits(w)).to_le_bytes()),
        DType::BF16 => collect(words, |w| bf16::from_f32(f32::from_bits(w)).to_le_bytes()),
        DType::F64 => collect(words, |w| f64::from(f32::from_bits(w)).to_le_bytes()),
        DType::I8 => collect(words, |w| (w as i8).to_le_bytes()),
        DType::I16 => collect(words, |w| (w as i16).to_le_bytes()),
        DType::I64 => collect(words, |w| i64::from(w as i32).to_le_bytes()),
        DType::U8 => collect(words, |w| [w as u8]),
        DType::U16 => collect(words, |w| (w as u16).to_le_bytes()),
        DType::U64 => collect(words, |w| u64::from(w).to_le_bytes()),
        DType::Bool => collect(words, |w| [(w != 0).into()]),
    };
    Tensor::from_bytes(ty.clone(), bytes).expect("a word for each element, or for two")
}

/// As [`decode`], into a tensor; without an allocation where it has the type, and the device holds that as it is.
pub(crate) fn decode_into(ty: &TensorType, words: &[u32], tensor: &mut Tensor, profile: &DeviceProfile) {
    let words_of_it = matches!(ty.dtype, DType::F32 | DType::I32 | DType::U32);
    let as_it_is = cfg!(target_endian = "little") && (words_of_it || profile.stores_halves(ty.dtype));
    let bytes: &[u8] = bytemuck::cast_slice(words);
    match bytes.get(..ty.bytes()) {
        Some(bytes) if as_it_is && tensor.ty() == ty => tensor.bytes_mut().copy_from_slice(bytes),
        _ => *tensor = decode(ty, words, profile),
    }
}

#[cfg(test)]
mod tests {
    use meganeura_codegen::profile::MatrixUnit;

    use super::*;

    fn words_on(profile: &DeviceProfile, tensor: &Tensor) -> Vec<u32> {
        let mut words = vec![u32::MAX; profile.bytes(tensor.ty()) as usize / 4];
        check("x", tensor).unwrap();
        encode(tensor, &mut words, profile);
        words
    }

    fn words(tensor: &Tensor) -> Vec<u32> {
        words_on(&DeviceProfile::generic(), tensor)
    }

    /// A device with matrix units, and one without.
    fn profiles() -> [DeviceProfile; 2] {
        let matrix_unit = Some(MatrixUnit { subgroup: 32 });
        [DeviceProfile { matrix_unit, ..DeviceProfile::generic() }, DeviceProfile::generic()]
    }

    #[test]
    fn every_dtype_survives_the_round_trip() {
        for dtype in DType::ALL {
            let values: &[f64] = match dtype {
                DType::Bool => &[0.0, 1.0, 1.0, 0.0, 1.0],
                DType::U8 | DType::U16 | DType::U32 | DType::U64 => &[0.0, 1.0, 255.0, 7.0, 200.0],
                DType::I8 | DType::I16 | DType::I32 | DType::I64 => &[0.0, -1.0, 127.0, -128.0, 5.0],
                _ => &[0.0, -1.5, 0.25, 1024.0, f64::INFINITY],
            };
            let tensor = Tensor::from_f64(dtype, [5], values);
            for profile in profiles() {
                let words = words_on(&profile, &tensor);
                assert_eq!(decode(tensor.ty(), &words, &profile), tensor, "{dtype}");
                let mut into = Tensor::from_f64(dtype, [5], &[0.0; 5]);
                decode_into(tensor.ty(), &words, &mut into, &profile);
                assert_eq!(into, tensor, "{dtype}");
            }
        }
    }

    #[test]
    fn words_are_what_kernels_expect() {
        assert_eq!(words(&Tensor::from_i64(DType::I8, [2], &[-1, 3])), [u32::MAX, 3]);
        assert_eq!(words(&Tensor::from_i64(DType::U16, [1], &[65535])), [65535]);
        assert_eq!(words(&Tensor::from_f64(DType::BF16, [1], &[-2.0])), [(-2.0f32).to_bits()]);
        assert_eq!(words(&Tensor::from_f64(DType::F64, [1], &[0.1])), [0.1f32.to_bits()]);
        assert_eq!(words(&Tensor::from_bytes(TensorType::new(DType::Bool, [2]), vec![7, 0]).unwrap()), [1, 0]);
    }

    #[test]
    fn halves_lie_two_to_a_word() {
        let [halves, words] = profiles();
        let tensor = Tensor::from_f64(DType::F16, [3], &[1.0, -2.0, 0.5]);
        assert_eq!(words_on(&halves, &tensor), [0xc000_3c00, 0x3800]);
        assert_eq!(words_on(&words, &tensor), [1.0f32, -2.0, 0.5].map(f32::to_bits));
        assert_eq!(words_on(&halves, &Tensor::from_f64(DType::BF16, [1], &[1.0])), [1.0f32.to_bits()]);
    }

    #[test]
    fn the_ends_of_the_32_bit_range_are_inside() {
        let ends = Tensor::from_i64(DType::I64, [2], &[i32::MIN.into(), i32::MAX.into()]);
        assert_eq!(decode(ends.ty(), &words(&ends), &DeviceProfile::generic()), ends);
        let ends = Tensor::from_i64(DType::U64, [2], &[0, u32::MAX.into()]);
        assert_eq!(decode(ends.ty(), &words(&ends), &DeviceProfile::generic()), ends);
    }

    #[test]
    fn wide_integers_are_refused_by_name() {
        let wide = Tensor::from_i64(DType::I64, [3], &[0, i64::from(i32::MAX) + 1, 0]);
        let error = check("ids", &wide).unwrap_err();
        assert_eq!((error.name.as_str(), error.index, error.value), ("ids", 1, 1 << 31));
        let wide = Tensor::from_i64(DType::U64, [1], &[-1]);
        assert_eq!(check("ids", &wide).unwrap_err().value, u64::MAX.into());
        assert_eq!(check("ids", &Tensor::from_i64(DType::I64, [1], &[i64::MIN])).unwrap_err().index, 0);
    }
}
