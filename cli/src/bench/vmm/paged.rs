//! Restores of a compressed image that lies cold on the disk, by a pager.

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    time::Instant,
};

use anyhow::{Context as _, bail};
use rustix::fs::{Advice, MemfdFlags, fadvise, memfd_create};
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::{
    MachineSpec, Packets,
    pager::{FromPager, ImageFormat, PagerReply, PagerReport, PagerRequest},
};

use super::{
    Bench,
    births::{Births, Process, packet_pair},
    guest::{Guest, RESET, Snapshot},
};

const RESTORES: usize = 10;
/// Lives after which a working set is known.
const LIVES_TO_LEARN: u64 = 2;
/// Pages that the guest writes, each once.
const PAGES: u64 = 2048;

pub(super) const NAMES: [&str; 3] = ["pager.cold_ms.mapped", "pager.cold_ms.demand", "pager.cold_ms.working_set"];

/// A template's compressed image, and what the guests restored from it are to find.
struct Image {
    snapshot: Snapshot,
    frames: File,
    bytes: u64,
}

/// A pager process of its own, with nothing in memory yet.
struct Pager {
    packets: Packets,
    memory: File,
    _process: Process,
}

impl Image {
    fn make(births: &Births) -> anyhow::Result<Self> {
        let snapshot = Snapshot::of(births, Guest { pages: PAGES, command: RESET, ..Guest::default() })?;
        snapshot.fill(PAGES)?;
        let frames = tempfile::tempfile()?;
        let bytes = stasis_cow::write_frames(&snapshot.image, &frames)?.bytes;
        Ok(Self { snapshot, frames, bytes })
    }

    fn machine(&self) -> MachineSpec {
        MachineSpec { paged: true, ..self.snapshot.machine.clone() }
    }
}

/// Whatever the page cache has of it goes.
fn chill(file: &File) -> anyhow::Result<()> {
    file.sync_all()?;
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

impl Pager {
    fn start(births: &Births, image: &Image, working_set: &File) -> anyhow::Result<Self> {
        let (process, socket) = births.process("pager")?;
        let memory = File::from(memfd_create("pager", MemfdFlags::CLOEXEC)?);
        memory.set_len(u64::from(image.snapshot.machine.memory_mib) << 20)?;
        let mut pager = Self { packets: Packets::new(socket), memory, _process: process };
        let files = [image.frames.try_clone()?, pager.memory.try_clone()?, working_set.try_clone()?];
        pager.done(PagerRequest::Open { format: ImageFormat::Frames }, files.map(OwnedFd::from).into())?;
        Ok(pager)
    }

    fn ask(&mut self, request: PagerRequest, files: Vec<OwnedFd>) -> anyhow::Result<PagerReply> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.packets.send(&request, &files)?;
        match self.packets.receive()? {
            FromPager::Reply(reply) => Ok(reply),
            FromPager::Lost { reason, .. } => bail!("the pager lost its VM: {reason}"),
        }
    }

    fn done(&mut self, request: PagerRequest, files: Vec<OwnedFd>) -> anyhow::Result<()> {
        match self.ask(request, files)? {
            PagerReply::Done => Ok(()),
            other => bail!("the pager answered {other:?}"),
        }
    }

    /// Runs a guest to its end, and says how long that took and what was done for it.
    fn life(&mut self, births: &Births, image: &Image, vm: u64) -> anyhow::Result<(std::time::Duration, PagerReport)> {
        let mut vmm = births.shell(&image.machine(), Some(image.snapshot.state()?))?;
        let (ours, theirs) = packet_pair()?;
        let memory = File::open(format!("/proc/self/fd/{}", self.memory.as_raw_fd())).context("the pager's memory")?;
        let start = Instant::now();
        self.done(PagerRequest::Attach { vm }, vec![ours])?;
        vmm.restore_and_run(&[&memory, &theirs.into()])?;
        let took = start.elapsed();
        match self.ask(PagerRequest::Settled { vm }, Vec::new())? {
            PagerReply::Settled(report) => Ok((took, report)),
            other => bail!("the pager answered {other:?}"),
        }
    }
}

/// From the disk: mapped from an image that is not compressed, by a pager that only answers faults, and by one that knows the working set.
pub(super) fn restores(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let births = &bench.births;
    let image = Image::make(births)?;
    let known = tempfile::tempfile()?;
    let mut teacher = Pager::start(births, &image, &known)?;
    for vm in 0..LIVES_TO_LEARN {
        teacher.life(births, &image, vm)?;
    }
    if known.metadata()?.len() == 0 {
        bail!("the pager has learnt no working set in {LIVES_TO_LEARN} lives");
    }
    drop(teacher);

    let mut times = NAMES.map(|_| Histogram::new(Unit::Millis));
    let mut reports = [PagerReport::default(); 2];
    for _ in 0..RESTORES {
        times[0].record_time(mapped(births, &image)?);
        for ((times, report), set) in times[1..].iter_mut().zip(&mut reports).zip([&tempfile::tempfile()?, &known]) {
            let mut pager = Pager::start(births, &image, set)?;
            // Its start has read the index.
            chill(&image.frames)?;
            let (took, last) = pager.life(births, &image, 0)?;
            times.record_time(took);
            *report = last;
        }
    }
    let guest = format!(
        "a test guest that touches {} MiB, half of them random bytes, from the restore to its end",
        PAGES / 256
    );
    let notes = [
        format!("{guest}; its image mapped, not compressed, cold on the disk"),
        told(&guest, &image, reports[0]),
        told(&guest, &image, reports[1]),
    ];
    Ok(times.iter().zip(NAMES).zip(notes).map(|((times, name), note)| times.row(name, note)).collect())
}

fn told(guest: &str, image: &Image, report: PagerReport) -> String {
    let PagerReport { faults, ahead, bytes_read, .. } = report;
    format!(
        "{guest}; a pager of its own, image of {} bytes cold on the disk; in the last restore {faults} faults, {ahead} frames put in ahead, {bytes_read} bytes read",
        image.bytes
    )
}

fn mapped(births: &Births, image: &Image) -> anyhow::Result<std::time::Duration> {
    let mut vmm = image.snapshot.shell(births)?;
    chill(&image.snapshot.image)?;
    let start = Instant::now();
    vmm.restore_and_run(&[&image.snapshot.image])?;
    Ok(start.elapsed())
}
