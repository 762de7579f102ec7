fn softplus(x: f32) -> f32 {
    let y = select(0.0f, x, x > 0.0f) + log1p_f32(exp(-abs(x)));
    return select(y, x, x != x);
}
