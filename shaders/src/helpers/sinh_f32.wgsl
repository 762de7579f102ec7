fn sinh_f32(x: f32) -> f32 {
    if abs(x) < 0.5f {
        let s = x * x;
        return x * fma(s, fma(s, fma(s, 0.0001984127f, 0.008333334f), 0.16666667f), 1.0f);
    }
    // Halved before the exponential, which overflows earlier than the result.
    let e = exp(abs(x) * 0.5f);
    let half = 0.5f * e;
    let y = half * e - 0.5f / (e * e);
    return select(y, -y, x < 0.0f);
}
