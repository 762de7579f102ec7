// Cephes asinf: a polynomial on [0, 1/2], and asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)) above. Drivers' own may err by 2e-4.
fn asin_f32(x: f32) -> f32 {
    let a = abs(x);
    let large = a > 0.5f;
    let s = select(x * x, 0.5f * (1.0f - a), large);
    let r = select(a, sqrt(s), large);
    let p = fma(s, fma(s, fma(s, fma(s, 0.0421632f, 0.02418131f), 0.045470026f), 0.074953005f), 0.16666752f);
    let y = fma(r * s, p, r);
    let z = select(y, 1.5707964f - 2.0f * y, large);
    return select(z, -z, x < 0.0f);
}
