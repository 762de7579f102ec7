fn acos_f32(x: f32) -> f32 {
    if abs(x) <= 0.5f {
        return 1.5707964f - asin_f32(x);
    }
    let y = 2.0f * asin_f32(sqrt(0.5f * (1.0f - abs(x))));
    return select(y, 3.1415927f - y, x < 0.0f);
}
