// To the nearest bf16, halves to even.
fn round_bf16(x: f32) -> f32 {
    if is_nan(x) {
        return x;
    }
    let bits = bitcast<u32>(x);
    return bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u);
}
