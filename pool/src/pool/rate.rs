//! How fast a pool gets VMs ready, and what that means for those who are sent away.

use std::time::Duration;

use tokio::time::Instant;

/// What a new interval counts in the mean; the last ten or so matter.
const NEW: f64 = 0.2;

/// Measures the time from one VM that became ready to the next, while some are on their way or wanted.
#[derive(Debug, Default)]
pub(super) struct RefillRate {
    /// The last VM became ready, or the first one was wanted.
    since: Option<Instant>,
    mean: Option<Duration>,
}

impl RefillRate {
    /// Whether VMs are on their way, or waited for, from now on.
    pub(super) fn busy(&mut self, is_busy: bool, now: Instant) {
        self.since = is_busy.then(|| self.since.unwrap_or(now));
    }

    pub(super) fn became_ready(&mut self, now: Instant) {
        if let Some(since) = self.since.replace(now) {
            let interval = now.duration_since(since);
            self.mean = Some(self.mean.map_or(interval, |mean| mean.mul_f64(1.0 - NEW) + interval.mul_f64(NEW)));
        }
    }

    /// VMs per second; none until two have been seen.
    pub(super) fn per_second(&self) -> Option<f64> {
        self.mean.map(|mean| 1.0 / mean.as_secs_f64().max(1e-6))
    }

    pub(super) fn retry_after(&self, position: u32) -> Duration {
        retry_after(position, self.per_second())
    }
}

/// When it will be the turn of who is `position`-th, 1 for the first: position ÷ rate in whole seconds, at least one, which is also what
/// is said when nothing was measured yet.
fn retry_after(position: u32, per_second: Option<f64>) -> Duration {
    let seconds = per_second.map_or(1.0, |rate| (f64::from(position) / rate).ceil());
    Duration::try_from_secs_f64(seconds.max(1.0)).unwrap_or(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

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
