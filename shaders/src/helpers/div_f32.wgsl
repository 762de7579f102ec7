// The nearest f32 unless the quotient is subnormal. Vulkan's own quotient may be off by 2.5 units in the last place.
fn div_f32(a: f32, b: f32) -> f32 {
    let quotient = a / b;
    let corrected = quotient + fma(-quotient, b, a) / b;
    // What is infinite or NaN has no remainder.
    return select(quotient, corrected, (bitcast<u32>(corrected) & 0x7f800000u) != 0x7f800000u);
}
