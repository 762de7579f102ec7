// Maclaurin series below 1, its last coefficient adjusted for the terms left out.
fn erf(x: f32) -> f32 {
    let a = abs(x);
    if a < 1.0f {
        let s = x * x;
        let p = fma(s, fma(s, fma(s, fma(s, fma(s, fma(s, fma(s, fma(s,
            1.4974e-06f, -1.4925651e-05f), 0.00012055332f), -0.00085483270f), 0.0052239776f),
            -0.026866171f), 0.11283792f), -0.37612639f), 1.1283792f);
        return x * p;
    }
    // erfc(a) = t * exp(-a^2 + P(t)), t = 1 / (1 + a / 2): Numerical Recipes, section 6.2.2, relative error below 1.2e-7.
    let t = 1.0f / fma(0.5f, min(a, 10.0f), 1.0f);
    let b = min(a, 10.0f);
    let p = fma(t, fma(t, fma(t, fma(t, fma(t, fma(t, fma(t, fma(t, fma(t,
        0.17087277f, -0.82215223f), 1.48851587f), -1.13520398f), 0.27886807f),
        -0.18628806f), 0.09678418f), 0.37409196f), 1.00002368f), -1.26551223f);
    let y = 1.0f - t * exp(fma(-b, b, p));
    return select(select(y, -y, x < 0.0f), x, x != x);
}
