//! A fixed set of bits, one for each message of a block.

use serde::{Deserialize, Serialize};

/// Messages of one block. A block is the unit in which the index and the queues' state are allocated and freed.
pub const BLOCK: u64 = 1024;
const WORDS: usize = (BLOCK / 64) as usize;

/// One bit a message of a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bits([u64; WORDS]);

impl Bits {
    /// The bits of the messages `0..count`.
    pub fn first(count: usize) -> Self {
        let mut bits = Self::default();
        for (word, value) in bits.0.iter_mut().enumerate() {
            let have = count.saturating_sub(word * 64).min(64);
            *value = if have == 64 { u64::MAX } else { (1u64 << have) - 1 };
        }
        bits
    }

    pub fn get(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    pub fn set(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    pub fn clear(&mut self, at: usize) {
        self.0[at / 64] &= !(1 << (at % 64));
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(|w| w.count_ones() as usize).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// The bits that are set here and not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & !b)
    }

    pub fn and(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & b)
    }

    pub fn or(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a | b)
    }

    /// The first set bit at or after `from`.
    pub fn next(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        if word >= WORDS {
            return None;
        }
        let mut value = self.0[word] & (u64::MAX << (from % 64));
        loop {
            if value != 0 {
                return Some(word * 64 + value.trailing_zeros() as usize);
            }
            word += 1;
            if word == WORDS {
                return None;
            }
            value = self.0[word];
        }
    }

    /// All set bits, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let at = self.next(from)?;
            from = at + 1;
            Some(at)
        })
    }

    fn zip(&self, other: &Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let mut bits = *self;
        for (a, b) in bits.0.iter_mut().zip(other.0) {
            *a = f(*a, b);
        }
        bits
    }
}

/// The block a sequence lies in.
pub fn block_of(sequence: u64) -> u64 {
    sequence / BLOCK
}

/// The place of a sequence inside its block.
pub fn offset_of(sequence: u64) -> usize {
    (sequence % BLOCK) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iteration_visits_what_was_set() {
        let mut bits = Bits::default();
        for at in [0, 63, 64, 700, 1023] {
            bits.set(at);
        }
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 63, 64, 700, 1023]);
        assert_eq!(bits.count(), 5);
        assert_eq!(Bits::first(65).count(), 65);
        assert_eq!(Bits::first(1024).count(), 1024);
        assert!(Bits::first(0).is_empty());
    }
}
