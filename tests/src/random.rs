//! Numbers for random tests. The same seed gives the same numbers, so that a failure can be repeated
//! as far as the moments of a machine can be.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// splitmix64: each number is the seed's next multiple of a constant, with its bits mixed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The number in the environment variable `name`, or another one each time.
    pub fn seed(name: &str) -> u64 {
        let wanted = std::env::var(name).ok();
        let drawn = || RandomState::new().build_hasher().finish();
        wanted.map_or_else(drawn, |seed| {
            seed.parse().unwrap_or_else(|error| panic!("{name}={seed}: not a number: {error}"))
        })
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Less than `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// An index into something of this length, which is not empty.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    pub fn pick<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        &among[self.index(among.len())]
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend(self.number().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_gives_the_same_numbers_again() {
        let numbers = |seed| {
            let mut random = Random::new(seed);
            (random.below(1000), random.bytes(11), *random.pick(&[1, 2, 3]))
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
        assert_eq!(numbers(7).1.len(), 11);
    }
}
