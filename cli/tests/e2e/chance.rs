//! Random moments and choices: every run tries others, and one whose seed is given (`STASIS_E2E_SEED`) tries the same again.

use std::{
    hash::{BuildHasher, RandomState},
    sync::mpsc,
    time::Duration,
};

use crate::lane;

/// `SplitMix64`.
#[derive(Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    /// Says its seed, for whoever looks into a failure.
    pub(crate) fn of(case: &str) -> Self {
        let seed = lane::number("STASIS_E2E_SEED", RandomState::new().hash_one(case) >> 1);
        println!("{case}: STASIS_E2E_SEED={seed}");
        Self(seed)
    }

    /// Another, for another thread.
    pub(crate) fn branch(&mut self) -> Self {
        Self(self.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// One of these.
    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[usize::try_from(self.below(from.len() as u64)).unwrap()]
    }

    /// Lets a random time pass: what is tried is that moment, so there is no event to wait for.
    pub(crate) fn pass(&mut self, most: Duration) {
        pass(Duration::from_micros(self.below(u64::try_from(most.as_micros()).unwrap() + 1)));
    }
}

/// Lets a time pass, to meet a moment of which nothing tells.
pub(crate) fn pass(time: Duration) {
    let (_nobody, says) = mpsc::channel::<()>();
    let _ = says.recv_timeout(time);
}
