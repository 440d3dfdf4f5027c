//! Snapshots of a running guest, and its children.

use std::{
    fs::File,
    time::{Duration, Instant},
};

use anyhow::bail;
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::{Event, LiveReport, Request};

use super::{
    Bench,
    births::{Vmm, checked, from_start},
    figure::against,
    guest::{DONE, Guest, Snapshot},
};

/// Snapshots of one guest; forks, per number of children.
const SNAPSHOTS: usize = 20;
const FORKS: usize = 5;
pub(super) const CHILDREN: [usize; 3] = [1, 10, 50];
/// What a parent of children has written.
const PARENT_MIB: u64 = 8;
/// Longest pause for each GiB that the guest has written, in ms; a disk's clone, which may come on top, the test guest has none.
const PAUSE_PER_GIB_MS: f64 = 10.0;
const PAGES_OF_A_MIB: u64 = 256;

/// Whose snapshot is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    name: &'static str,
    memory_mib: u32,
    dirty_mib: u64,
    /// It writes all of that again and again, while its snapshot is taken.
    busy: bool,
}

pub(super) const SUBJECTS: [Subject; 7] = [
    Subject { name: "8", memory_mib: 1024, dirty_mib: 8, busy: false },
    Subject { name: "128", memory_mib: 1024, dirty_mib: 128, busy: false },
    Subject { name: "512", memory_mib: 1024, dirty_mib: 512, busy: false },
    Subject { name: "guest_128", memory_mib: 128, dirty_mib: 8, busy: false },
    Subject { name: "guest_512", memory_mib: 512, dirty_mib: 8, busy: false },
    Subject { name: "guest_2048", memory_mib: 2048, dirty_mib: 8, busy: false },
    Subject { name: "busy", memory_mib: 1024, dirty_mib: 8, busy: true },
];

impl Subject {
    pub(super) fn names(&self) -> [String; 2] {
        ["pause", "total"].map(|what| format!("snapshot.{what}_ms.{}", self.name))
    }
}

pub(super) fn fork_names(children: usize) -> [String; 2] {
    ["pause", "ready"].map(|what| format!("fork.{what}_ms.{children}"))
}

/// A running guest that has written, and what it was restored from.
fn parent(bench: &Bench, memory_mib: u32, dirty_mib: u64, again: bool) -> anyhow::Result<(Vmm, Snapshot)> {
    let guest = Guest { memory_mib, pages: dirty_mib * PAGES_OF_A_MIB, again, ..Guest::default() };
    let snapshot = Snapshot::of(&bench.births, guest)?;
    let mut vmm = snapshot.shell(&bench.births)?;
    vmm.restore_and_resume(&[&snapshot.image])?;
    vmm.console_has(DONE)?;
    Ok((vmm, snapshot))
}

/// Begins one, and returns the files that it will be in.
fn begin(vmm: &mut Vmm, image: File) -> anyhow::Result<[File; 2]> {
    let state = tempfile::tempfile()?;
    vmm.expect(&Request::LiveSnapshot, &[&image, &state])?;
    Ok([image, state])
}

fn finished(vmm: &mut Vmm) -> anyhow::Result<LiveReport> {
    match vmm.client.event()? {
        Event::LiveSnapshot(report) => Ok(report),
        other => bail!("a live snapshot ended in {other:?}"),
    }
}

pub(super) fn snapshots(bench: &Bench, subject: Subject) -> anyhow::Result<Vec<Row>> {
    let Subject { memory_mib, dirty_mib, busy, .. } = subject;
    let (mut vmm, snapshot) = parent(bench, memory_mib, dirty_mib, busy)?;
    let mut paused_kib = Histogram::new(Unit::Mebibytes);
    let (mut pause, mut total) = (Histogram::new(Unit::Millis), Histogram::new(Unit::Millis));
    for _ in 0..SNAPSHOTS {
        begin(&mut vmm, snapshot.clone_of_image()?)?;
        let report = finished(&mut vmm)?;
        pause.record_time(report.pause);
        total.record_time(report.total);
        #[allow(clippy::cast_precision_loss, reason = "no guest has 2^53 bytes")]
        paused_kib.record(report.paused_bytes as f64 / f64::from(1 << 20));
    }
    let what = if busy { "writes them again and again meanwhile" } else { "runs and writes nothing meanwhile" };
    let note = format!("a test guest of {memory_mib} MiB that has written {dirty_mib} MiB and {what}");
    #[allow(clippy::cast_precision_loss, reason = "some hundred")]
    let most = PAUSE_PER_GIB_MS * dirty_mib as f64 / 1024.0;
    let target = against(pause.quantile(0.5), most, "10 ms for each GiB written; the guest has no disk to clone");
    let copied = paused_kib.quantile(0.5);
    let [pause_name, total_name] = subject.names();
    Ok(vec![
        pause.row(
            pause_name,
            format!("how long its vCPU stands still, in which {copied:.3} MiB are copied; {note}; {target}"),
        ),
        total.row(total_name, format!("from the request to the whole snapshot, in files in the page cache; {note}")),
    ])
}

/// One snapshot of a running parent, and children that are born, prepared and restored from it, all counted from the request on.
pub(super) fn forks(bench: &Bench, children: usize) -> anyhow::Result<Vec<Row>> {
    let (mut vmm, snapshot) = parent(bench, super::guest::MEMORY_MIB, PARENT_MIB, false)?;
    let (mut pause, mut ready) = (Histogram::new(Unit::Millis), Histogram::new(Unit::Millis));
    for _ in 0..FORKS {
        let image = snapshot.clone_of_image()?;
        let start = Instant::now();
        let [image, state] = begin(&mut vmm, image)?;
        pause.record_time(finished(&mut vmm)?.pause);
        let mut born = Vec::new();
        for _ in 0..children {
            born.push(bench.births.unprepared(&snapshot.machine, Some(from_start(&state)?))?);
        }
        // None runs before all are born: each keeps a processor busy.
        for child in &born {
            child.order_restore(&[&image])?;
        }
        for child in &mut born {
            ready.record_time(is_ready(child, start)?);
        }
    }
    let note = format!(
        "a running test guest of {} MiB that has written {PARENT_MIB} MiB, and {children} children",
        super::guest::MEMORY_MIB
    );
    let [pause_name, ready_name] = fork_names(children);
    #[allow(clippy::cast_precision_loss, reason = "some hundred")]
    let most = PAUSE_PER_GIB_MS * PARENT_MIB as f64 / 1024.0;
    let target = against(pause.quantile(0.5), most, "10 ms for each GiB written; the guest has no disk to clone");
    Ok(vec![
        pause.row(pause_name, format!("how long the parent stands still; {note}; {target}")),
        ready.row(
            ready_name,
            format!("each child from the request for the parent's snapshot to the answer that it runs, its process's birth included; {note}"),
        ),
    ])
}

fn is_ready(child: &mut Vmm, start: Instant) -> anyhow::Result<Duration> {
    checked(child.client.reply()?)?;
    child.is_restored()?;
    Ok(start.elapsed())
}
