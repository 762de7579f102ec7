// NaN if either is NaN, by bits: compilers may take comparisons for a maximum that drops NaN.
fn max_f32(a: f32, b: f32) -> f32 {
    return select(select(max(a, b), a, is_nan(a)), b, is_nan(b));
}
