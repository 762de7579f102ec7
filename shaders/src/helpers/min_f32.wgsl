// NaN if either is NaN.
fn min_f32(a: f32, b: f32) -> f32 {
    return select(select(a, b, b < a), b, b != b);
}
