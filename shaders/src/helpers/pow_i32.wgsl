fn pow_i32(base: i32, exponent: i32) -> i32 {
    if exponent < 0 {
        return select(select(0, select(1, -1, (exponent & 1) == 1), base == -1), 1, base == 1);
    }
    var result = 1;
    var factor = base;
    var rest = exponent;
    loop {
        if rest == 0 { break; }
        if (rest & 1) == 1 { result = result * factor; }
        factor = factor * factor;
        rest = rest >> 1u;
    }
    return result;
}
