//! How fast a pool gets VMs ready, how fast the node can start them, and what that means for those who are sent away.

use std::time::Duration;

use stasis_pool_api::{NoCapacity, Resource};
use tokio::time::Instant;

use crate::admission::Full;

/// What a new interval counts in the mean; the last ten or so matter.
const NEW: f64 = 0.2;

/// A mean in which the last ten or so matter.
#[derive(Debug, Clone, Copy, Default)]
struct Mean(Option<Duration>);

impl Mean {
    fn add(&mut self, new: Duration) {
        self.0 = Some(self.0.map_or(new, |mean| mean.mul_f64(1.0 - NEW) + new.mul_f64(NEW)));
    }

    /// How many of them fit in a second, if `at_once` go on beside each other; none until one was added.
    fn per_second(self, at_once: f64) -> Option<f64> {
        self.0.map(|mean| at_once / mean.as_secs_f64().max(1e-6))
    }
}

/// How fast turns begin while others wait for one: as fast as those end that are taken.
#[derive(Debug, Default)]
pub(super) struct Pace(Mean);

impl Pace {
    /// A turn has ended that took so long.
    pub(super) fn ended(&mut self, took: Duration) {
        self.0.add(took);
    }

    /// Turns per second, `at_once` of them at a time; none until one has ended.
    pub(super) fn per_second(&self, at_once: usize) -> Option<f64> {
        self.0.per_second(f64::from(u32::try_from(at_once).unwrap_or(u32::MAX)))
    }
}

/// Where a start would stand in the line for its turn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Standing {
    /// Its number among those that wait, 1 for the first; 0 where a turn is free.
    pub(super) number: usize,
    /// Turns that begin per second, where that was measured.
    pub(super) per_second: Option<f64>,
    /// Turns at a time.
    pub(super) at_once: usize,
}

impl Standing {
    /// Whether it can be done by then: its turn comes after number ÷ rate, and takes `at_once` ÷ rate, as they all do. Else why not, and when
    /// to try again. Where nothing was measured nothing is refused, and where a turn is free neither: so starts go on, and with them the
    /// measuring.
    pub(crate) fn is_done_within(self, time: Duration) -> Result<(), Full> {
        let Some(rate) = self.per_second else { return Ok(()) };
        let (needed, limit) = (self.number as u64, self.at_once as u64);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded down; a cast saturates")]
        let available = ((rate * time.as_secs_f64()) as u64).saturating_sub(limit);
        if needed <= available {
            return Ok(());
        }
        let what = NoCapacity { resource: Resource::Starts, needed, available, limit };
        Err(Full { what, missing: needed - available, retry_after: self.retry_after() })
    }

    /// Its turn has not come in time, whatever was expected.
    pub(super) fn has_not_come(self) -> Full {
        let needed = self.number.max(1) as u64;
        let what = NoCapacity { resource: Resource::Starts, needed, available: 0, limit: self.at_once as u64 };
        Full { what, missing: needed, retry_after: self.retry_after() }
    }

    fn retry_after(self) -> Duration {
        retry_after(u32::try_from(self.number).unwrap_or(u32::MAX), self.per_second)
    }
}

/// Measures the time from one VM that became ready to the next, while some are on their way or wanted.
#[derive(Debug, Default)]
pub(super) struct RefillRate {
    /// The last VM became ready, or the first one was wanted.
    since: Option<Instant>,
    mean: Mean,
}

impl RefillRate {
    /// Whether VMs are on their way, or waited for, from now on.
    pub(super) fn busy(&mut self, is_busy: bool, now: Instant) {
        self.since = is_busy.then(|| self.since.unwrap_or(now));
    }

    pub(super) fn became_ready(&mut self, now: Instant) {
        if let Some(since) = self.since.replace(now) {
            self.mean.add(now.duration_since(since));
        }
    }

    /// VMs per second; none until two have been seen.
    pub(super) fn per_second(&self) -> Option<f64> {
        self.mean.per_second(1.0)
    }

    /// Whether who is `position`-th will have a VM by then, 1 for the first; no where nothing was measured.
    pub(super) fn serves_within(&self, position: u32, time: Duration) -> bool {
        self.per_second().is_some_and(|rate| f64::from(position) <= rate * time.as_secs_f64())
    }

    pub(super) fn retry_after(&self, position: u32) -> Duration {
        retry_after(position, self.per_second())
    }
}

/// When it will be the turn of who is `position`-th, 1 for the first: position ÷ rate in whole seconds, at least one, which is also what
/// is said when nothing was measured yet.
pub(super) fn retry_after(position: u32, per_second: Option<f64>) -> Duration {
    let seconds = per_second.map_or(1.0, |rate| (f64::from(position) / rate).ceil());
    Duration::try_from_secs_f64(seconds.max(1.0)).unwrap_or(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_start_is_refused_when_its_turn_comes_too_late_and_only_then(
            number in 0..10_000usize,
            rate in 0.001..10_000.0f64,
            seconds in 0.0..600.0f64,
            at_once in 1..64usize,
        ) {
            let standing = Standing { number, per_second: Some(rate), at_once };
            let time = Duration::from_secs_f64(seconds);
            let count = number as f64;
            let begin = rate * time.as_secs_f64() - at_once as f64;
            match standing.is_done_within(time) {
                Ok(()) => {
                    prop_assert!(count <= begin || number == 0);
                    prop_assert!(standing.is_done_within(time * 2).is_ok(), "who may wait longer is refused");
                    let earlier = Standing { number: number / 2, ..standing };
                    prop_assert!(earlier.is_done_within(time).is_ok());
                }
                Err(Full { what: full, missing, retry_after }) => {
                    prop_assert_eq!(missing, full.needed - full.available);
                    prop_assert!(count > begin && number > 0);
                    prop_assert_eq!((full.resource, full.needed, full.limit), (Resource::Starts, number as u64, at_once as u64));
                    prop_assert!(full.available < full.needed);
                    let retry = retry_after.as_secs_f64();
                    prop_assert!(retry * rate >= count * (1.0 - 1e-9), "too early");
                    prop_assert!(retry <= 1.0 || (retry - 1.0) * rate < count, "too late");
                }
            }
            let [free, unknown] = [Standing { number: 0, ..standing }, Standing { per_second: None, ..standing }];
            prop_assert!(free.is_done_within(time).is_ok(), "a turn is free");
            prop_assert!(unknown.is_done_within(time).is_ok(), "nothing is known");
        }
    }

    #[test]
    fn turns_begin_as_fast_as_they_end() {
        let mut pace = Pace::default();
        assert_eq!(pace.per_second(4), None);
        for _ in 0..3 {
            pace.ended(Duration::from_millis(500));
        }
        assert_eq!((pace.per_second(1), pace.per_second(4)), (Some(2.0), Some(8.0)));
    }

    #[test]
    fn it_is_position_by_rate_in_whole_seconds() {
        let table = [
            (1, None, 1),
            (9, None, 1),
            (1, Some(10.0), 1),
            (10, Some(10.0), 1),
            (11, Some(10.0), 2),
            (7, Some(0.5), 14),
        ];
        for (position, rate, seconds) in table {
            assert_eq!(retry_after(position, rate), Duration::from_secs(seconds), "{position} at {rate:?}");
        }
    }

    #[test]
    fn only_busy_time_counts() {
        let (mut rate, start) = (RefillRate::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        rate.became_ready(at(0));
        assert_eq!(rate.per_second(), None, "one alone says nothing");
        rate.busy(false, at(0));
        rate.busy(true, at(100));
        rate.became_ready(at(102));
        rate.became_ready(at(104));
        assert_eq!(rate.per_second(), Some(0.5));
        assert_eq!(rate.retry_after(3), Duration::from_secs(6));
    }
}
