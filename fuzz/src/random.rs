//! Numbers that follow from a seed.

/// Integers at which arithmetic, types and limits change.
const EDGES: [i64; 22] = [
    0,
    1,
    -1,
    2,
    3,
    -2,
    4,
    7,
    8,
    9,
    127,
    255,
    1 << 16,
    (1 << 20) + 1,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 32,
    1 << 62,
    i64::MAX,
    i64::MIN,
    i64::MIN + 1,
];

/// Steele, Lea and Flood's SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = Random(seed);
        Random(random.next() ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        list.get(self.below(list.len()))
    }

    pub fn pick_mut<'a, T>(&mut self, list: &'a mut [T]) -> Option<&'a mut T> {
        let index = self.below(list.len());
        list.get_mut(index)
    }

    /// Mostly small, sometimes an edge.
    pub fn integer(&mut self) -> i64 {
        match self.below(4) {
            0 => EDGES[self.below(EDGES.len())],
            1 => self.below(64) as i64 - 8,
            _ => self.below(6) as i64 - 1,
        }
    }

    pub fn float(&mut self) -> f32 {
        const EDGES: [f32; 9] = [0.0, -0.0, 1.0, -1.0, 0.5, f32::NAN, f32::INFINITY, f32::MAX, 1e-40];
        if self.one_in(2) { EDGES[self.below(EDGES.len())] } else { self.integer() as f32 }
    }
}
