// Sine (quarter 0) or cosine (quarter 1): Cody and Waite's reduction in three steps, Cephes' polynomials. Absolute error about 1e-7 up to
// 10^5; beyond, the driver's function. Vulkan itself promises 2^-11 only.
fn sin_cos(x: f32, quarter: i32) -> f32 {
    if !(abs(x) < 1.0e5f) {
        return select(sin(x), cos(x), quarter == 1);
    }
    let k = round(x * 0.63661975f);
    let r = fma(-k, 7.549790e-8f, fma(-k, 4.837513e-4f, fma(-k, 1.5703125f, x)));
    let s = r * r;
    let sine = fma(r * s, fma(s, fma(s, -1.9515296e-4f, 8.332161e-3f), -0.16666655f), r);
    let cosine = fma(s * s, fma(s, fma(s, 2.4433157e-5f, -1.3887316e-3f), 4.1666646e-2f), fma(-0.5f, s, 1.0f));
    let q = (i32(k) + quarter) & 3;
    let y = select(sine, cosine, (q & 1) == 1);
    return select(y, -y, q >= 2);
}
