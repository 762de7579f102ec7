// To the nearest f16, halves to even.
fn round_f16(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    if magnitude >= 0x477ff000u {
        // From 65520 on: infinity, or NaN as it is.
        return select(f32_bits((bits & 0x80000000u) | 0x7f800000u), x, magnitude > 0x7f800000u);
    }
    if magnitude < 0x38800000u {
        // Subnormal: multiples of 2^-24, the unit in the last place of 0.5.
        let y = (abs(x) + 0.5f) - 0.5f;
        return select(y, -y, x < 0.0f);
    }
    return bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
}
