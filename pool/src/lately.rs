//! How much of something there was lately, the older the less. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// What counts as lately. What was so long ago counts a third of what is now.
pub(crate) const LATELY: Duration = Duration::from_secs(30);
/// Over no shorter time is anything a rate.
const SHORTEST: Duration = Duration::from_secs(1);

/// An amount that fades.
#[derive(Debug)]
pub(crate) struct Lately {
    since: Instant,
    at: Instant,
    amount: f64,
}

impl Lately {
    /// Of something that begins now.
    pub(crate) const fn new(now: Instant) -> Self {
        Self { since: now, at: now, amount: 0.0 }
    }

    /// There was so much more of it.
    pub(crate) fn add(&mut self, amount: f64, now: Instant) {
        self.amount = self.amount * decay(now.duration_since(self.at)) + amount;
        self.at = self.at.max(now);
    }

    /// What there was lately, by the time for which that counts: a steady rate is found as it is from the first second on.
    pub(crate) fn per_second(&self, now: Instant) -> f64 {
        let age = now.duration_since(self.since).max(SHORTEST);
        let seconds = LATELY.as_secs_f64() * (1.0 - decay(age));
        self.amount * decay(now.duration_since(self.at)) / seconds
    }
}

fn decay(time: Duration) -> f64 {
    (-time.as_secs_f64() / LATELY.as_secs_f64()).exp()
}
