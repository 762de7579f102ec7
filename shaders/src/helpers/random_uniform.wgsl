// A multiple of 2^-24 in [0, 1): the first word of Philox-4x32-10 (Salmon et al., SC 2011). Exact.
fn random_uniform(key0: u32, key1: u32, step0: u32, step1: u32, stream: u32, index: u32) -> f32 {
    var key = vec2<u32>(key0, key1);
    var word = vec4<u32>(index, stream, step0, step1);
    for (var round = 0; round < 10; round += 1) {
        let high = vec2<u32>(mul_high(0xd2511f53u, word.x), mul_high(0xcd9e8d57u, word.z));
        word = vec4<u32>(high.y ^ word.y ^ key.x, 0xcd9e8d57u * word.z, high.x ^ word.w ^ key.y, 0xd2511f53u * word.x);
        key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return f32(word.x >> 8u) * 5.9604644775390625e-8f;
}
