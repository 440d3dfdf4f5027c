//! A pool's offered load: how many VMs are on their way to it, on the mean, to replace what claims take.
//!
//! a = λT, the rate of claims times the time until what one takes is replaced (Erlang; `faas.md`, "What a pool of paused snapshots
//! changes"). A pool that wants fewer ready than that has its callers wait.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::rate::Mean;
use crate::lately::Lately;

/// λ and T, as they were lately.
#[derive(Debug)]
pub(super) struct OfferedLoad {
    claims: Lately,
    /// When each of those on their way was begun. Which of them is ready first makes no difference to the mean.
    begun: VecDeque<Instant>,
    time: Mean,
}

impl OfferedLoad {
    pub(super) const fn new(now: Instant) -> Self {
        Self { claims: Lately::new(now), begun: VecDeque::new(), time: Mean::new() }
    }

    /// Somebody wants a VM.
    pub(super) fn claimed(&mut self, now: Instant) {
        self.claims.add(1.0, now);
    }

    /// A VM is on its way: it stands in line for its restore, or is being rewound.
    pub(super) fn begins(&mut self, now: Instant) {
        self.begun.push_back(now);
    }

    /// One of them is ready, or has failed.
    pub(super) fn ends(&mut self, now: Instant) {
        if let Some(begun) = self.begun.pop_front() {
            self.time.add(now.duration_since(begun));
        }
    }

    /// In VMs; none until one was on its way and is not any more.
    pub(super) fn vms(&self, now: Instant) -> Option<f64> {
        self.time.get().map(|time| self.claims.per_second(now) * time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Little's law: of a steady stream, those on their way are the rate times the time.
        #[test]
        fn a_steady_stream_is_found_as_it_is(every_ms in 20..400u32, taken_ms in 1..4_000u32, rounds in 100..400u32) {
            let start = Instant::now();
            let (every, taken) = (Duration::from_millis(every_ms.into()), Duration::from_millis(taken_ms.into()));
            let mut load = OfferedLoad::new(start);
            let mut events: Vec<_> = (1..=rounds).flat_map(|n| [(every * n, true), (every * n + taken, false)]).collect();
            events.sort();
            let last = every * rounds;
            for (at, is_claim) in events.into_iter().filter(|(at, _)| *at <= last.max(taken + every)) {
                let now = start + at;
                if is_claim {
                    load.claimed(now);
                    load.begins(now);
                } else {
                    load.ends(now);
                }
            }
            let offered = load.vms(start + last.max(taken + every)).unwrap();
            let wanted = f64::from(taken_ms) / f64::from(every_ms);
            prop_assume!(last >= Duration::from_secs(2) && taken + every <= last);
            prop_assert!((offered / wanted - 1.0).abs() < 0.15, "{offered}, but {wanted}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_said_before_it_is_known_and_a_load_that_ends_fades() {
        let mut load = OfferedLoad::new(Instant::now());
        load.claimed(Instant::now());
        load.begins(Instant::now());
        assert_eq!(load.vms(Instant::now()), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        load.ends(Instant::now());
        assert!(load.vms(Instant::now()).unwrap() > 0.9);
        tokio::time::advance(Duration::from_secs(600)).await;
        assert!(load.vms(Instant::now()).unwrap() < 1e-6);
    }
}
