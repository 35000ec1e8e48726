//! A hash map with `u64` keys and a fixed hash. The standard map is seeded at random, and equal runs must execute equal
//! instructions.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Map from `u64` to `V`. No result may depend on the order of its entries.
pub(crate) type FixedMap<V> = HashMap<u64, V, BuildHasherDefault<FixedHasher>>;

/// Hashes a key by one multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FixedHasher(u64);

impl Hasher for FixedHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64");
    }

    fn write_u64(&mut self, key: u64) {
        let wide = u128::from(key) * 0x9e37_79b9_7f4a_7c15;
        #[allow(clippy::cast_possible_truncation, reason = "the two halves of the product, folded")]
        let folded = wide as u64 ^ (wide >> 64) as u64;
        self.0 = folded;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
