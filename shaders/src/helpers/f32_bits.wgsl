// A value by its bits: WGSL has no literal for infinities and NaN.
fn f32_bits(bits: u32) -> f32 {
    return bitcast<f32>(bits);
}
