// NaN if either is NaN, by bits: compilers may take comparisons for a minimum that drops NaN.
fn min_f32(a: f32, b: f32) -> f32 {
    return select(select(min(a, b), a, is_nan(a)), b, is_nan(b));
}
