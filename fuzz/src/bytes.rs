//! Files that were damaged byte by byte.

use prost::Message;

use crate::models;
use crate::random::Random;

type Damage = fn(&mut Vec<u8>, &mut Random);

const DAMAGES: [Damage; 8] = [
    |bytes, random| flip(bytes, random),
    |bytes, random| overwrite(bytes, random),
    grow_number,
    cut,
    remove,
    repeat,
    insert,
    splice,
];

/// A file after some damage; now and then one of random bytes.
pub fn generate(random: &mut Random) -> Vec<u8> {
    if random.one_in(50) {
        let length = random.below(300);
        return (0..length).map(|_| random.next() as u8).collect();
    }
    let mut bytes = models::seed(random).encode_to_vec();
    for _ in 0..=random.below(3) {
        let damage = DAMAGES[random.below(DAMAGES.len())];
        damage(&mut bytes, random);
    }
    bytes
}

fn flip(bytes: &mut [u8], random: &mut Random) {
    let bit = 1 << random.below(8);
    if let Some(byte) = random.pick_mut(bytes) {
        *byte ^= bit;
    }
}

fn overwrite(bytes: &mut [u8], random: &mut Random) {
    const BYTES: [u8; 8] = [0, 1, 2, 0x7f, 0x80, 0xfe, 0xff, 8];
    let new = if random.one_in(2) { BYTES[random.below(BYTES.len())] } else { random.next() as u8 };
    if let Some(byte) = random.pick_mut(bytes) {
        *byte = new;
    }
}

/// Makes some byte the begin of a large integer.
fn grow_number(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len());
    let count = 1 + random.below(10);
    let end = (at + 1).min(bytes.len());
    bytes.splice(at..end, (0..count).map(|_| 0xff).chain([random.below(3) as u8]));
}

fn cut(bytes: &mut Vec<u8>, random: &mut Random) {
    bytes.truncate(random.below(bytes.len()));
}

fn range(bytes: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    let start = random.below(bytes.len());
    start..(start + random.below(40)).min(bytes.len())
}

fn remove(bytes: &mut Vec<u8>, random: &mut Random) {
    let range = range(bytes, random);
    bytes.drain(range);
}

fn repeat(bytes: &mut Vec<u8>, random: &mut Random) {
    let range = range(bytes, random);
    let piece = bytes[range.clone()].repeat(1 + random.below(50));
    bytes.splice(range.end..range.end, piece);
}

fn insert(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len());
    let count = random.below(12);
    bytes.splice(at..at, (0..count).map(|_| random.next() as u8));
}

/// Puts a piece of another model into this one.
fn splice(bytes: &mut Vec<u8>, random: &mut Random) {
    let other = models::seed(random).encode_to_vec();
    let (here, there) = (range(bytes, random), range(&other, random));
    bytes.splice(here, other[there].iter().copied());
}
