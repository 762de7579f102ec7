fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    let y = select(e / (1.0f + e), 1.0f / (1.0f + e), x >= 0.0f);
    return select(y, x, x != x);
}
