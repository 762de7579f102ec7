// IEEE pow: WGSL's is undefined for negative bases.
fn pow_f32(a: f32, b: f32) -> f32 {
    if b == 0.0f || a == 1.0f {
        return 1.0f;
    }
    if b == 1.0f {
        return a;
    }
    if b == 2.0f {
        return a * a;
    }
    if b == 3.0f {
        return a * a * a;
    }
    let whole = floor(b) == b;
    let odd = whole && abs(b) < 16777216.0f && floor(b * 0.5f) * 2.0f != b;
    if a == 0.0f {
        let magnitude = select(f32_bits(0x7f800000u), 0.0f, b > 0.0f);
        return select(magnitude, select(magnitude, -magnitude, (bitcast<u32>(a) >> 31u) == 1u), odd);
    }
    let magnitude = exp2(b * log2(abs(a)));
    if a < 0.0f {
        return select(f32_bits(0x7fc00000u), select(magnitude, -magnitude, odd), whole);
    }
    return magnitude;
}
