//! What the guest uses.

use std::{
    fs,
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::Serialize;

use crate::{
    answer::{self, Refusal},
    envd::Envd,
};

const MIB: u64 = 1024 * 1024;

/// All sizes in bytes but where the name says MiB.
#[derive(Debug, PartialEq, Serialize)]
struct Metrics {
    /// Seconds since 1970.
    ts: u64,
    cpu_count: usize,
    /// Of all processors together, since this was last asked (or since the boot), with two decimals.
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    /// Of the root file system.
    disk_used: u64,
    disk_total: u64,
}

/// The processors' time when it was last asked, in ticks.
#[derive(Debug, Default)]
pub(crate) struct LastTicks(Mutex<Ticks>);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    all: u64,
}

pub(super) async fn answer(State(envd): State<Envd>) -> Response {
    match read(envd.last_ticks()) {
        Ok(metrics) => answer::json(StatusCode::OK, &metrics),
        Err(error) => {
            Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("error reading metrics: {error}")).into_response()
        }
    }
}

fn read(last: &LastTicks) -> std::io::Result<Metrics> {
    let (ticks, cpu_count) = ticks(&fs::read_to_string("/proc/stat")?);
    let memory = fs::read_to_string("/proc/meminfo")?;
    let disk = rustix::fs::statvfs("/")?;
    let before = std::mem::replace(&mut *last.0.lock().unwrap_or_else(PoisonError::into_inner), ticks);
    let (total, cache) =
        (memory_of(&memory, "MemTotal:"), memory_of(&memory, "Cached:") + memory_of(&memory, "SReclaimable:"));
    let used = total.saturating_sub(memory_of(&memory, "MemFree:") + memory_of(&memory, "Buffers:") + cache);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Ok(Metrics {
        ts: now.as_secs(),
        cpu_count,
        cpu_used_pct: percent(before, ticks),
        mem_total: total,
        mem_used: used,
        mem_cache: cache,
        mem_total_mib: total / MIB,
        mem_used_mib: used / MIB,
        disk_used: disk.f_blocks.saturating_sub(disk.f_bavail) * disk.f_frsize,
        disk_total: disk.f_blocks * disk.f_frsize,
    })
}

/// The sum over all processors, and their number: `cpu user nice system idle iowait irq softirq steal …`.
fn ticks(stat: &str) -> (Ticks, usize) {
    let mut all = stat.lines().filter(|line| line.starts_with("cpu"));
    // The time of guests is in the user's already.
    let fields = all.next().unwrap_or_default().split_whitespace().skip(1).take(8);
    let times: Vec<u64> = fields.map(|field| field.parse().unwrap_or_default()).collect();
    let sum: u64 = times.iter().sum();
    let idle: u64 = times.iter().skip(3).take(2).sum();
    (Ticks { busy: sum - idle, all: sum }, all.count())
}

/// Of the time between the two.
fn percent(before: Ticks, now: Ticks) -> f64 {
    let all = now.all.saturating_sub(before.all);
    if all == 0 {
        return 0.0;
    }
    let share = now.busy.saturating_sub(before.busy) as f64 / all as f64;
    (share * 10_000.0).round() / 100.0
}

/// A line of `/proc/meminfo`, which counts in KiB.
fn memory_of(memory: &str, name: &str) -> u64 {
    let line = memory.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or_default() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_the_time_between() {
        let (before, count) = ticks("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1 2\ncpu1 1 2\nintr 5\n");
        assert_eq!((before, count), (Ticks { busy: 20, all: 100 }, 2));
        assert_eq!(percent(before, Ticks { busy: 21, all: 103 }), 33.33);
        assert_eq!(percent(before, before), 0.0);
        assert_eq!(ticks(""), (Ticks::default(), 0));
    }

    #[test]
    fn memory_is_read_by_its_lines_name() {
        let text = "MemTotal:        1000 kB\nCached:  3 kB\nSwapCached:  9 kB\nHugePages_Total:       7\n";
        assert_eq!(
            (memory_of(text, "MemTotal:"), memory_of(text, "Cached:"), memory_of(text, "Nothing:")),
            (1_024_000, 3072, 0)
        );
        assert_eq!(memory_of(text, "HugePages_Total:"), 0);
    }
}
