fn pow_u32(base: u32, exponent: u32) -> u32 {
    var result = 1u;
    var factor = base;
    var rest = exponent;
    loop {
        if rest == 0u { break; }
        if (rest & 1u) == 1u { result = result * factor; }
        factor = factor * factor;
        rest = rest >> 1u;
    }
    return result;
}
