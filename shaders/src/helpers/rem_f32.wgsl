// C's fmod for quotients below 2^24.
fn rem_f32(a: f32, b: f32) -> f32 {
    let r = fma(-trunc(a / b), b, a);
    // The rounded quotient may be off by one.
    let fixed = select(select(r, r - abs(b), abs(r) >= abs(b) && r > 0.0f), r + abs(b), abs(r) >= abs(b) && r < 0.0f);
    let wrong_sign = (fixed < 0.0f && a > 0.0f) || (fixed > 0.0f && a < 0.0f);
    return select(fixed, fixed + sign(a) * abs(b), wrong_sign);
}
