//! Token buckets of a device, and the timer that says when there is something in them again.
//!
//! ```text
//! admits ── yes ──► serve, charge ──► admits …
//!    └──── no: the timer is set, the queue is left ──► the event loop: source ready ──► admits …
//! ```
//!
//! A restored device starts with full buckets; one that is rewound keeps what its last life has left.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use stasis_vmm_api::{RateLimit, TokenBucket};

use super::watch::{Events, Sources};
use crate::error::{Error, Host};

/// Parts of a token: what flows in at one per second in a nanosecond.
const PARTS: i128 = 1_000_000_000;

/// The limits of one direction of a device.
pub(crate) struct Limiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
    timer: TimerFd,
    clock: fn() -> Instant,
}

impl Limiter {
    /// Full buckets, whose timer is the device's source of this number.
    pub(crate) fn new(limit: RateLimit, sources: &Sources, number: u8) -> Result<Self, Error> {
        Self::with_clock(limit, sources, number, Instant::now)
    }

    /// The same with a clock of one's own.
    pub(crate) fn with_clock(
        limit: RateLimit,
        sources: &Sources,
        number: u8,
        clock: fn() -> Instant,
    ) -> Result<Self, Error> {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)
            .host("timerfd_create")?;
        sources.watch(timer.as_fd(), number, Events::READ).host("epoll_ctl of a timer")?;
        let full = |bucket| Bucket::full(bucket, clock());
        Ok(Self { bytes: limit.bytes.map(full), operations: limit.operations.map(full), timer, clock })
    }

    /// Whether one more may be served. If not, the timer is set for when it may.
    pub(crate) fn admits(&mut self) -> bool {
        let now = (self.clock)();
        let wait = [&mut self.bytes, &mut self.operations].into_iter().flatten().map(|bucket| bucket.wait(now)).max();
        let wait = wait.unwrap_or_default();
        if wait.is_zero() {
            return true;
        }
        let expiration = Expiration::OneShot(TimeSpec::from_duration(wait));
        match self.timer.set(expiration, TimerSetTimeFlags::empty()) {
            Ok(()) => false,
            Err(error) => {
                // A limit that cannot be kept is better than a device that nothing wakes.
                tracing::error!(%error, "a rate limit's timer cannot be set");
                true
            }
        }
    }

    /// One was served, of this size.
    pub(crate) fn charge(&mut self, bytes: u64) {
        for (bucket, spent) in [(&mut self.bytes, bytes), (&mut self.operations, 1)] {
            if let Some(bucket) = bucket {
                bucket.spend(spent);
            }
        }
    }

    /// The timer is no longer waited for, or has done its work.
    pub(crate) fn disarm(&self) {
        if let Err(error) = self.timer.unset() {
            tracing::error!(%error, "a rate limit's timer cannot be stopped");
        }
    }

    /// The timer's descriptor, for tests that wait for it.
    #[cfg(test)]
    pub(crate) fn timer(&self) -> std::os::fd::BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

struct Bucket {
    /// In parts of a token; below zero, what was taken beyond what there was.
    level: i128,
    full: i128,
    per_second: i128,
    filled: Instant,
}

impl Bucket {
    fn full(TokenBucket { per_second, burst }: TokenBucket, now: Instant) -> Self {
        let full = i128::from(burst.get()) * PARTS;
        Self { level: full, full, per_second: i128::from(per_second.get()), filled: now }
    }

    /// How long until there is something in it.
    fn wait(&mut self, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(self.filled);
        let flown_in = i128::try_from(elapsed.as_nanos()).unwrap_or(i128::MAX).saturating_mul(self.per_second);
        self.level = self.level.saturating_add(flown_in).min(self.full);
        self.filled = now.max(self.filled);
        // A whole token, so that a slow trickle does not wake the device for nothing.
        let missing = (PARTS - self.level).max(0);
        let nanoseconds = (missing + self.per_second - 1) / self.per_second;
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    fn spend(&mut self, tokens: u64) {
        self.level -= i128::from(tokens) * PARTS;
    }
}

#[cfg(test)]
pub(crate) mod tests;
