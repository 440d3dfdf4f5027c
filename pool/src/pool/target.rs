//! How many VMs a pool wants ready: its settings and a moment in, numbers out.

use std::time::Duration;

use stasis_pool_api::{BoundBy, Day, PoolSpec, Window};

const DAY: u64 = 24 * 3600;
const WEEK: u64 = 7 * DAY;

/// A moment of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment {
    /// Seconds since the Unix epoch.
    pub(super) utc: u64,
    /// Since its last claim was over, or it began; zero while there is one.
    pub(super) idle: Duration,
    /// VMs that are claimed.
    pub(super) in_use: u32,
    /// What one of its VMs is promised of the node's memory, in MiB.
    pub(super) vm_mib: u32,
    /// The tenant's pool begins with its first claim, and so has an end.
    pub(super) is_begun_by_claim: bool,
}

/// What it wants then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    /// VMs to keep ready.
    pub(super) ready: u32,
    /// So many of them hot.
    pub(super) hot: u32,
    /// Most VMs that it may have, whatever they do.
    pub(super) most: u32,
    /// Why `ready` is not what the settings ask for.
    pub(super) bound_by: Option<BoundBy>,
    /// Until when this holds, if nothing but time passes. None: for ever.
    pub(super) holds_for: Option<Duration>,
}

/// `ready` = what is wanted, but no more than `max` and `max_memory` leave beside what is in use. Wanted is the largest of `hot`, `min` (or
/// that of the open windows) and, while VMs are in use, `buffer`; nothing once the pool has been idle for `scale_to_zero_after`, unless
/// a window is open.
pub(super) fn target(settings: &PoolSpec, now: Moment) -> Target {
    let open = || settings.schedule.iter().filter(|window| is_open(window, now.utc));
    let scheduled = open().map(|window| window.min).max();
    let patience = match settings.scale_to_zero_after {
        None if now.is_begun_by_claim => PoolSpec::TENANT_IDLE,
        None => Duration::ZERO,
        Some(patience) => patience,
    };
    let ends = !patience.is_zero() && scheduled.is_none() && now.in_use == 0;
    let is_idle = ends && now.idle >= patience;
    let buffer = if now.in_use > 0 { settings.buffer } else { 0 };
    let wanted = settings.hot.max(scheduled.unwrap_or(settings.min)).max(buffer);

    let by_memory = settings.max_memory.map(|most| {
        let vms = (most.as_u64() >> 20) / u64::from(now.vm_mib.max(1));
        u32::try_from(vms).unwrap_or(u32::MAX)
    });
    let most = settings.max.min(by_memory.unwrap_or(u32::MAX));
    let room = most.saturating_sub(now.in_use);
    let (ready, bound_by) = match wanted {
        _ if is_idle => (0, Some(BoundBy::Idle)),
        _ if wanted <= room => (wanted, None),
        _ if most < settings.max => (room, Some(BoundBy::MaxMemory)),
        _ => (room, Some(BoundBy::Max)),
    };
    let boundary = settings.schedule.iter().filter_map(|window| next_boundary(window, now.utc)).min();
    let end = (ends && !is_idle).then(|| patience.saturating_sub(now.idle));
    let holds_for = [boundary, end].into_iter().flatten().min();
    Target { ready, hot: settings.hot.min(ready), most, bound_by, holds_for }
}

/// Seconds into the week at which a window begins on a day, and how long it is open.
fn spans(window: &Window) -> impl Iterator<Item = (u64, u64)> + '_ {
    let (from, to) = (u64::from(window.from.minutes()) * 60, u64::from(window.to.minutes()) * 60);
    let length = (to + DAY - from) % DAY;
    window.days.iter().map(move |day| (place(*day) * DAY + from, length))
}

const fn place(day: Day) -> u64 {
    match day {
        Day::Mon => 0,
        Day::Tue => 1,
        Day::Wed => 2,
        Day::Thu => 3,
        Day::Fri => 4,
        Day::Sat => 5,
        Day::Sun => 6,
    }
}

/// Seconds since Monday, 00:00 UTC. The epoch was a Thursday.
const fn in_week(utc: u64) -> u64 {
    (utc + 3 * DAY) % WEEK
}

fn is_open(window: &Window, utc: u64) -> bool {
    let now = in_week(utc);
    spans(window).any(|(begin, length)| (now + WEEK - begin) % WEEK < length)
}

/// When the window opens or closes next.
fn next_boundary(window: &Window, utc: u64) -> Option<Duration> {
    let now = in_week(utc);
    // In 1 to a whole week's seconds: a boundary that is now has taken effect.
    let until = |then: u64| (then % WEEK + WEEK - now - 1) % WEEK + 1;
    let next = spans(window).map(|(begin, length)| until(begin).min(until(begin + length))).min()?;
    Some(Duration::from_secs(next))
}

#[cfg(test)]
mod tests;
