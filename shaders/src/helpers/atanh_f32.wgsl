fn atanh_f32(x: f32) -> f32 {
    if abs(x) < 0.2f {
        let s = x * x;
        return x * fma(s, fma(s, fma(s, fma(s, 0.11111111f, 0.14285715f), 0.2f), 0.33333334f), 1.0f);
    }
    return 0.5f * log((1.0f + x) / (1.0f - x));
}
