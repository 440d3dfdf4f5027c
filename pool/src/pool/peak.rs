//! How many VMs were lately used at once.

/// Releases without a new peak after which it is lowered by one.
const PATIENCE: u32 = 50;

/// The most VMs that were claimed at once lately.
#[derive(Debug, Default)]
pub(super) struct Peak {
    claimed: u32,
    /// Releases since it was reached last, or lowered.
    since: u32,
}

impl Peak {
    pub(super) const fn claimed(&self) -> u32 {
        self.claimed
    }

    /// So many are claimed now.
    pub(super) fn claimed_now(&mut self, now: u32) {
        if now >= self.claimed {
            *self = Self { claimed: now, since: 0 };
        }
    }

    pub(super) fn released(&mut self) {
        self.since += 1;
        if self.since > PATIENCE {
            *self = Self { claimed: self.claimed.saturating_sub(1), since: 0 };
        }
    }
}
