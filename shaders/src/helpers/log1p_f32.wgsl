// log(1 + x) for x >= 0: the rounding error of 1 + x is divided out.
fn log1p_f32(x: f32) -> f32 {
    let u = 1.0f + x;
    return select(log(u) * (x / (u - 1.0f)), x, u == 1.0f);
}
