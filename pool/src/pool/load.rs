//! A pool's offered load: how many VMs its claims keep from the next on average. Pure.
//!
//! It is a = λT of the Erlang formulas, claims per second by the time that each takes a VM for, found by Little's law: the mean number of claims
//! that have a VM or wait for one, and of VMs that are on their way back from one. A pool with fewer VMs than that has claims wait.

use std::time::Duration;

use tokio::time::Instant;

use crate::admission::LATELY;

/// Nearer to the number of now than this, the mean is taken for it: a hundredth of a VM is nothing that anybody could add.
const NEAR: f64 = 0.01;

/// A mean over time in which what was [`LATELY`] ago counts a third.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    mean: f64,
    vms: f64,
    since: Instant,
}

impl Load {
    /// Of a pool that begins now.
    pub(super) fn new(now: Instant) -> Self {
        Self { mean: 0.0, vms: 0.0, since: now }
    }

    /// So many from now on.
    pub(super) fn changes_to(&mut self, vms: u32, now: Instant) {
        *self = Self { mean: self.exactly(now), vms: f64::from(vms), since: now };
    }

    fn exactly(&self, now: Instant) -> f64 {
        let left = (-now.duration_since(self.since).as_secs_f64() / LATELY.as_secs_f64()).exp();
        self.vms + (self.mean - self.vms) * left
    }

    pub(super) fn mean(&self, now: Instant) -> f64 {
        let mean = self.exactly(now);
        if (mean - self.vms).abs() < NEAR { self.vms } else { mean }
    }

    /// Until when the mean, if nothing but time passes, is worth telling again: it is then half as far from the number of now. None: it is that.
    pub(super) fn holds_until(&self) -> Option<Instant> {
        let half = Duration::from_secs_f64(LATELY.as_secs_f64() * std::f64::consts::LN_2);
        ((self.mean - self.vms).abs() >= NEAR).then(|| self.since + half)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_steady_load_is_claims_per_second_by_the_time_of_each() {
        // Two claims a second, each of which keeps a VM for three quarters of one: 1.5 VMs.
        let begun = Instant::now();
        let mut load = Load::new(begun);
        let at = |quarters: u32| begun + Duration::from_millis(250) * quarters;
        // At each quarter of a second: how many have begun in the last three.
        for quarter in 0..4 * 240 {
            let vms = (0..3).filter(|ago| quarter >= *ago && (quarter - ago) % 2 == 0).count();
            load.changes_to(u32::try_from(vms).unwrap(), at(quarter));
        }
        let mean = load.mean(at(4 * 240));
        assert!((mean - 1.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn it_is_told_again_until_it_is_what_is_there() {
        let mut now = Instant::now();
        let mut load = Load::new(now);
        assert_eq!(load.holds_until(), None);
        load.changes_to(8, now);
        let mut told = vec![load.mean(now)];
        while let Some(until) = load.holds_until() {
            assert!(until > now && told.len() < 30);
            now = until;
            load.changes_to(8, now);
            told.push(load.mean(now));
        }
        assert!((told[1] - 4.0).abs() < 1e-6 && told[0] == 0.0, "{told:?}");
        assert_eq!(told.last(), Some(&8.0));
    }

    proptest! {
        #[test]
        fn it_lies_between_what_was_and_what_is(before in 0u32..1000, now in 0u32..1000, seconds in 0u64..1000) {
            let begun = Instant::now();
            let mut load = Load::new(begun);
            load.changes_to(before, begun);
            let later = begun + Duration::from_secs(10_000);
            load.changes_to(now, later);
            let mean = load.mean(later + Duration::from_secs(seconds));
            let bounds = f64::from(before.min(now)) - NEAR..=f64::from(before.max(now)) + NEAR;
            prop_assert!(bounds.contains(&mean), "{mean}");
        }
    }
}
