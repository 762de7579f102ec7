// Cephes atanf: three ranges and a polynomial. Relative error about 2e-7.
fn atan_f32(x: f32) -> f32 {
    let a = abs(x);
    let far = a > 2.4142137f;
    let middle = a > 0.41421357f && !far;
    let r = select(select(a, (a - 1.0f) / (a + 1.0f), middle), -1.0f / a, far);
    let offset = select(select(0.0f, 0.7853982f, middle), 1.5707964f, far);
    let s = r * r;
    let p = fma(s, fma(s, fma(s, 0.080537446f, -0.13877685f), 0.19977711f), -0.33332950f);
    let y = offset + fma(r * s, p, r);
    return select(select(y, -y, x < 0.0f), x, x != x);
}
