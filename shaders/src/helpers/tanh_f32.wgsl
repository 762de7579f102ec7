// Some drivers compute tanh from overflowing exponentials, and lose all digits near 0.
fn tanh_f32(x: f32) -> f32 {
    let a = abs(x);
    if a < 0.3f {
        let s = x * x;
        return x * fma(s, fma(s, fma(s, fma(s, 0.021869488f, -0.053968254f), 0.13333334f), -0.33333334f), 1.0f);
    }
    let t = 1.0f - 2.0f / (exp(2.0f * min(a, 20.0f)) + 1.0f);
    return select(select(t, -t, x < 0.0f), x, x != x);
}
