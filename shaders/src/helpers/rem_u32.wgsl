fn rem_u32(a: u32, b: u32) -> u32 {
    return select(a % select(b, 1u, b == 0u), 0u, b == 0u);
}
