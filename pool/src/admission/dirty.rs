//! What a life of a template's VM writes, as measured when it is rewound.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Lives that are remembered, and those that are needed before they are relied upon. Chosen, not measured: nothing breaks where they are
/// wrong (see [`super::budget`]).
const REMEMBERED: usize = 256;
const LEAST: usize = 20;

/// The last lives of one template. They are counted when one ends, and asked for whenever a VM is started.
#[derive(Debug, Default)]
pub(crate) struct Dirty(Mutex<Lives>);

#[derive(Debug, Default)]
struct Lives {
    /// The oldest first.
    by_age: VecDeque<u64>,
    /// The same, the smallest first.
    by_size: Vec<u64>,
}

impl Dirty {
    fn lives(&self) -> MutexGuard<'_, Lives> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A life has ended that wrote so many bytes.
    pub(crate) fn record(&self, bytes: u64) {
        let mut lives = self.lives();
        if lives.by_age.len() == REMEMBERED
            && let Some(oldest) = lives.by_age.pop_front()
            && let Ok(place) = lives.by_size.binary_search(&oldest)
        {
            lives.by_size.remove(place);
        }
        lives.by_age.push_back(bytes);
        let place = lives.by_size.partition_point(|other| *other < bytes);
        lives.by_size.insert(place, bytes);
    }

    /// How many are remembered, and what 99 of 100 of them have written at most if there were enough.
    pub(crate) fn measured(&self) -> (usize, Option<u64>) {
        let lives = self.lives();
        (lives.by_size.len(), p99(&lives.by_size))
    }
}

/// The 99th percentile by nearest rank, of enough sorted values.
fn p99(sorted: &[u64]) -> Option<u64> {
    (sorted.len() >= LEAST).then(|| sorted.get((sorted.len() * 99).div_ceil(100) - 1).copied()).flatten()
}

/// What a paused VM of `guest` bytes counts with: a quarter more than the 99th percentile, and never more than all; all of it until that is
/// known.
pub(crate) fn expected(p99: Option<u64>, guest: u64) -> u64 {
    p99.map_or(guest, |bytes| bytes.saturating_add(bytes / 4).min(guest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_that_of_the_last_lives_in_whatever_order(lives in proptest::collection::vec(0u64..50, 0..600)) {
            let dirty = Dirty::default();
            lives.iter().for_each(|bytes| dirty.record(*bytes));
            let mut last = lives[lives.len().saturating_sub(REMEMBERED)..].to_vec();
            last.sort_unstable();
            prop_assert_eq!(dirty.measured(), (last.len(), p99(&last)));
        }
    }

    #[test]
    fn it_is_all_of_the_memory_until_enough_lives_were_measured() {
        let dirty = Dirty::default();
        for _ in 1..LEAST {
            dirty.record(100);
        }
        assert_eq!(dirty.measured(), (LEAST - 1, None));
        assert_eq!(expected(None, 1000), 1000);
        dirty.record(200);
        assert_eq!(dirty.measured(), (LEAST, Some(200)), "of few lives, the one that wrote most");
        assert_eq!((expected(Some(200), 1000), expected(Some(900), 1000)), (250, 1000));
    }

    #[test]
    fn one_in_a_hundred_may_have_written_more_and_old_lives_are_forgotten() {
        let dirty = Dirty::default();
        for bytes in [vec![9999], vec![10; 99]].concat() {
            dirty.record(bytes);
        }
        assert_eq!(dirty.measured(), (100, Some(10)));
        for _ in 0..REMEMBERED {
            dirty.record(20);
        }
        assert_eq!(dirty.measured(), (REMEMBERED, Some(20)));
    }
}
