//! Time that passes, by the time stamp counter. Nothing here knows the time of day.

use core::{arch::x86_64::_rdtsc, time::Duration};

use crate::apic;

/// For how long the counter is compared with the APIC's timer.
const COMPARED: u32 = 2_000_000;

/// The counter's rate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    ticks_per_us: u64,
}

impl Clock {
    /// Compares the counter with the local APIC's timer, which must be enabled.
    pub(crate) fn calibrate() -> Self {
        apic::ring_in(u32::MAX);
        let (begun, first) = (now(), apic::left());
        let (ended, passed) = loop {
            let passed = first.wrapping_sub(apic::left());
            if passed >= COMPARED {
                break (now(), passed);
            }
        };
        apic::ring_in(0);
        Self { ticks_per_us: ((ended - begun) * 1000 / u64::from(passed)).max(1) }
    }

    /// The counter's value in so long.
    pub(crate) fn after(self, time: Duration) -> u64 {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        now().saturating_add(us.saturating_mul(self.ticks_per_us))
    }

    /// Nanoseconds until the counter has this value.
    pub(crate) fn until(self, tick: u64) -> u32 {
        let us = tick.saturating_sub(now()) / self.ticks_per_us;
        u32::try_from(us.saturating_mul(1000)).unwrap_or(u32::MAX)
    }
}

/// The counter.
pub(crate) fn now() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and user mode may use it unless CR4.TSD is set, which nothing here does.
    unsafe { _rdtsc() }
}
