//! How soon a pool whose VMs fail tries again by itself.

use std::time::Duration;

use tokio::time::Instant;

/// Failures in a row that do not make a pool wait.
const FREE: u32 = 2;
/// The first wait; each failure after it doubles the wait.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// Counts failures in a row. A claim does not wait for it.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// A VM failed.
    pub(super) fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
        self.until = wait_after(self.failures).map(|wait| Instant::now() + wait);
    }

    /// A VM did what it should.
    pub(super) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// When the pool may fill itself again, if it may not now.
    pub(super) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// The wait is over. The next failure waits longer.
    pub(super) fn over(&mut self) {
        self.until = None;
    }
}

fn wait_after(failures: u32) -> Option<Duration> {
    let doublings = failures.checked_sub(FREE + 1)?;
    Some(SHORTEST.saturating_mul(1 << doublings.min(16)).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit() {
        let waits: Vec<_> = (1..=9).map(|failures| wait_after(failures).map(|wait| wait.as_secs())).collect();
        assert_eq!(waits, [None, None, Some(1), Some(2), Some(4), Some(8), Some(16), Some(30), Some(30)]);
        assert_eq!(wait_after(u32::MAX), Some(LONGEST));
    }
}
