fn asinh_f32(x: f32) -> f32 {
    let a = abs(x);
    if a < 0.3f {
        let s = x * x;
        return x * fma(s, fma(s, fma(s, fma(s, 0.030381944f, -0.044642857f), 0.075f), -0.16666667f), 1.0f);
    }
    // For large a the square overflows.
    let y = select(log(a + sqrt(fma(a, a, 1.0f))), log(a) + 0.6931472f, a > 1.0e9f);
    return select(y, -y, x < 0.0f);
}
