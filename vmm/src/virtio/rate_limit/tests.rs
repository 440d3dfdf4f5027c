use std::{
    cell::Cell,
    num::NonZeroU64,
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Arc, LazyLock},
};

use proptest::prelude::*;

use super::*;
use crate::virtio::watch::Watch;

thread_local! {
    static ELAPSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// A clock that stands still until the test moves it.
pub(crate) fn clock() -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    *START + ELAPSED.get()
}

pub(crate) fn advance(by: Duration) {
    ELAPSED.set(ELAPSED.get() + by);
}

/// Watches nothing.
pub(crate) struct NoWatch;

impl Watch for NoWatch {
    fn watch(&self, _: BorrowedFd<'_>, _: u64, _: Events) -> std::io::Result<()> {
        Ok(())
    }
}

pub(crate) fn nowhere() -> Sources {
    Sources::new(Arc::new(NoWatch), 0)
}

pub(crate) fn bucket(per_second: u64, burst: u64) -> Option<TokenBucket> {
    Some(TokenBucket { per_second: NonZeroU64::new(per_second).unwrap(), burst: NonZeroU64::new(burst).unwrap() })
}

/// Limits by the test's clock.
pub(crate) fn limiter(bytes: Option<TokenBucket>, operations: Option<TokenBucket>) -> Limiter {
    Limiter::with_clock(RateLimit { bytes, operations }, &nowhere(), 0, clock).unwrap()
}

/// Waits until a descriptor is readable, for as long as tests are patient.
pub(crate) fn wait_for(fd: BorrowedFd<'_>) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 30_000) }, 1);
}

#[test]
fn a_burst_passes_then_what_flows_in() {
    let mut limiter = limiter(None, bucket(10, 3));
    for _ in 0..3 {
        assert!(limiter.admits());
        limiter.charge(u64::MAX);
    }
    assert!(!limiter.admits());
    advance(Duration::from_millis(99));
    assert!(!limiter.admits());
    advance(Duration::from_millis(1));
    assert!(limiter.admits());
    limiter.charge(0);
    assert!(!limiter.admits());
    advance(Duration::from_secs(3600));
    assert_eq!(
        (0..10).filter(|_| limiter.admits().then(|| limiter.charge(0)).is_some()).count(),
        3,
        "no more than a burst"
    );
}

#[test]
fn both_limits_hold_and_what_is_larger_is_paid_off() {
    let mut limiter = limiter(bucket(1000, 500), bucket(1, 2));
    assert!(limiter.admits());
    limiter.charge(2500); // 2000 beyond what there was
    advance(Duration::from_millis(2000));
    assert!(!limiter.admits(), "there is nothing in it yet");
    advance(Duration::from_millis(1));
    assert!(limiter.admits());
    limiter.charge(1);
    advance(Duration::from_millis(500));
    assert!(limiter.admits(), "of the two seconds' operations one is left");
    limiter.charge(1);
    assert!(!limiter.admits());
}

#[test]
fn the_timer_tells_when() {
    let mut limiter = limiter(None, bucket(1000, 1));
    limiter.charge(0);
    assert!(!limiter.admits());
    wait_for(limiter.timer());
    limiter.disarm();
    let mut poll = libc::pollfd { fd: limiter.timer().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 0) }, 0, "once");
}

#[test]
fn no_limit_is_none() {
    let mut limiter = limiter(None, None);
    limiter.charge(u64::MAX);
    assert!(limiter.admits());
}

proptest! {
    /// Over any time, no more passes than a burst, what flowed in, and one last that overdrew.
    #[test]
    fn the_rate_is_kept(
        per_second in 1u64..1 << 40, burst in 1u64..1 << 40,
        steps in proptest::collection::vec((0u64..1 << 32, 0u64..1 << 41), 1..100),
    ) {
        let start = clock();
        let mut limiter = limiter(bucket(per_second, burst), None);
        let (mut passed, mut last) = (0u128, 0u128);
        for (nanoseconds, size) in steps {
            advance(Duration::from_nanos(nanoseconds));
            if limiter.admits() {
                limiter.charge(size);
                passed += u128::from(size);
                last = last.max(u128::from(size));
            }
        }
        let flowed = (clock() - start).as_nanos() * u128::from(per_second) / 1_000_000_000 + 1;
        prop_assert!(passed <= u128::from(burst) + flowed + last);
    }
}
