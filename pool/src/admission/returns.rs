//! How fast memory and vCPUs come back on this node, and what that means for those who are refused. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::budget::Amount;
use crate::lately::Lately;

/// Nobody is told to come back sooner: the unit of `Retry-After` is a second.
pub(crate) const SOONEST: Duration = Duration::from_secs(1);
/// Nor later, be it that nothing comes back. Chosen: a caller shall not stay away much longer than a sandbox may happen to end.
pub(crate) const LATEST: Duration = Duration::from_secs(30);

/// What has come back lately.
#[derive(Debug)]
pub(crate) struct Returns {
    bytes: Lately,
    vcpus: Lately,
}

/// How much comes back per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    pub(crate) bytes: f64,
    pub(crate) vcpus: f64,
}

impl Returns {
    /// Of a node that starts now.
    pub(crate) const fn new(now: Instant) -> Self {
        Self { bytes: Lately::new(now), vcpus: Lately::new(now) }
    }

    /// So much has come back.
    #[expect(clippy::cast_precision_loss, reason = "no node has 2^53 bytes")]
    pub(crate) fn came_back(&mut self, amount: Amount, now: Instant) {
        self.bytes.add(amount.bytes as f64, now);
        self.vcpus.add(amount.vcpus as f64, now);
    }

    pub(crate) fn per_second(&self, now: Instant) -> Rates {
        Rates { bytes: self.bytes.per_second(now), vcpus: self.vcpus.per_second(now) }
    }
}

/// When so much will have come back: missing ÷ rate in whole seconds, at least [`SOONEST`] and at most [`LATEST`].
#[expect(clippy::cast_precision_loss, reason = "no node has 2^53 bytes")]
pub(crate) fn retry_after(missing: u64, per_second: f64) -> Duration {
    let seconds = (missing as f64 / per_second).ceil();
    // Neither where nothing comes back nor where nothing is missing.
    Duration::try_from_secs_f64(seconds).unwrap_or(LATEST).clamp(SOONEST, LATEST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lately::LATELY;

    #[test]
    fn it_is_what_is_missing_by_the_rate_in_whole_seconds_between_the_bounds() {
        let table = [
            (100, 0.0, 30),
            (0, 0.0, 30),
            (0, 5.0, 1),
            (1, 100.0, 1),
            (100, 10.0, 10),
            (101, 10.0, 11),
            (1000, 1.0, 30),
        ];
        for (missing, rate, seconds) in table {
            assert_eq!(retry_after(missing, rate), Duration::from_secs(seconds), "{missing} at {rate}");
        }
    }

    proptest! {
        #[test]
        fn who_lacks_more_waits_no_shorter_and_a_faster_node_has_nobody_wait_longer(
            missing in 0..1u64 << 40,
            more in 0..1u64 << 40,
            rate in 0.0..1e12f64,
            faster in 0.0..1e12f64,
        ) {
            let when = retry_after(missing, rate);
            prop_assert!((SOONEST..=LATEST).contains(&when) && when.subsec_nanos() == 0);
            prop_assert!(retry_after(missing + more, rate) >= when);
            prop_assert!(retry_after(missing, rate + faster) <= when);
            let enough = rate * when.as_secs_f64() >= missing as f64 * (1.0 - 1e-9);
            prop_assert!(enough || when == LATEST, "too early");
        }

        /// Something comes back every so often, from the node's start on.
        #[test]
        fn a_steady_rate_is_found_and_forgotten(every_ms in 10..500u64, bytes in 1..1u64 << 30, rounds in 20..2_000u32) {
            let start = Instant::now();
            let (mut returns, every) = (Returns::new(start), Duration::from_millis(every_ms));
            let amount = Amount { bytes, vcpus: 1 };
            (1..=rounds).for_each(|round| returns.came_back(amount, start + every * round));
            let now = start + (every * rounds).max(SOONEST);
            if every * rounds >= SOONEST {
                let (rates, true_rate) = (returns.per_second(now), 1.0 / every.as_secs_f64());
                prop_assert!((rates.vcpus / true_rate - 1.0).abs() < 0.1, "{rates:?}, but {true_rate}");
                prop_assert!((rates.bytes / (true_rate * bytes as f64) - 1.0).abs() < 0.1);
            }
            prop_assert!(returns.per_second(now + LATELY * 20).vcpus < 1e-6 / every.as_secs_f64());
        }
    }
}
