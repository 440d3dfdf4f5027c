//! Suspended and hibernated guests, and their return.

use std::{
    fs::File,
    io::Write as _,
    time::{Duration, Instant},
};

use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::Request;

use super::{
    Bench,
    births::{Vmm, from_start},
    figure::against,
    guest::{DONE, Guest, Snapshot},
};

const TIMES: usize = 20;
const HIBERNATIONS: usize = 10;
pub(super) const DIRTY_MIB: [u64; 2] = [8, 128];
/// What a guest has written that is resumed.
const RESUMED_MIB: u64 = 8;
const PAGES_OF_A_MIB: u64 = 256;
/// How often the time to write the same bytes a hibernation may take.
const TIMES_THE_WRITE: f64 = 1.2;

pub(super) const RESUMES: [&str; 2] = ["resume_ms.suspended", "resume_ms.hibernated"];

pub(super) fn hibernate_names(mib: u64) -> [String; 2] {
    [format!("hibernate_ms.{mib}"), format!("hibernate_ms.{mib}.write")]
}

/// A running guest that has written `mib` MiB, and what it was restored from.
fn running(bench: &Bench, mib: u64) -> anyhow::Result<(Vmm, Snapshot)> {
    let guest = Guest { pages: mib * PAGES_OF_A_MIB, ..Guest::default() };
    let snapshot = Snapshot::of(&bench.births, guest)?;
    let vmm = started(bench, &snapshot)?;
    Ok((vmm, snapshot))
}

fn started(bench: &Bench, snapshot: &Snapshot) -> anyhow::Result<Vmm> {
    let mut vmm = snapshot.shell(&bench.births)?;
    vmm.restore_and_resume(&[&snapshot.image])?;
    vmm.console_has(DONE)?;
    Ok(vmm)
}

/// Pauses it and brings memory and state to the disk.
fn hibernate(vmm: &mut Vmm, image: &File, state: &File) -> anyhow::Result<()> {
    vmm.expect(&Request::Pause, &[])?;
    vmm.expect(&Request::Snapshot, &[image, state])?;
    Ok(())
}

pub(super) fn resumes(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let (mut suspended, mut hibernated) = (Histogram::new(Unit::Millis), Histogram::new(Unit::Millis));
    let (mut vmm, snapshot) = running(bench, RESUMED_MIB)?;
    for _ in 0..TIMES {
        vmm.expect(&Request::Pause, &[])?;
        let start = Instant::now();
        vmm.expect(&Request::Resume, &[])?;
        suspended.record_time(start.elapsed());
    }
    let (image, state) = (snapshot.clone_of_image()?, tempfile::tempfile()?);
    hibernate(&mut vmm, &image, &state)?;
    drop(vmm);
    for _ in 0..TIMES {
        let state = from_start(&state)?;
        let start = Instant::now();
        let mut vmm = bench.births.unprepared(&snapshot.machine, Some(state))?;
        vmm.order_restore(&[&image])?;
        super::births::checked(vmm.client.reply()?)?;
        vmm.is_restored()?;
        hibernated.record_time(start.elapsed());
    }
    let note = format!("a test guest that has written {RESUMED_MIB} MiB");
    Ok(vec![
        suspended.row(RESUMES[0], format!("{note}, paused: from the request to the answer that it runs")),
        hibernated.row(
            RESUMES[1],
            format!("{note}, hibernated, its image in the page cache: from nothing to the answer that it runs, its process's birth included"),
        ),
    ])
}

/// Each beside the writing of as many bytes, in turns, so that whatever else the disk does befalls both.
pub(super) fn hibernations(bench: &Bench, mib: u64) -> anyhow::Result<Vec<Row>> {
    let [mut ours, mut bare, mut end] = [(); 3].map(|()| Histogram::new(Unit::Millis));
    let (first, snapshot) = running(bench, mib)?;
    let mut next = Some(first);
    for _ in 0..HIBERNATIONS {
        let mut vmm = match next.take() {
            Some(first) => first,
            None => started(bench, &snapshot)?,
        };
        let (image, state) = (snapshot.clone_of_image()?, tempfile::tempfile()?);
        image.sync_all()?;
        let start = Instant::now();
        hibernate(&mut vmm, &image, &state)?;
        ours.record_time(start.elapsed());
        let start = Instant::now();
        drop(vmm);
        end.record_time(start.elapsed());
        bare.record_time(written(mib)?);
    }
    let target = against(ours.quantile(0.5), bare.quantile(0.5) * TIMES_THE_WRITE, "the write's median and 20 %");
    let note = format!(
        "a running test guest of 256 MiB that has written {mib} MiB: paused, its changes and state on the disk; then {:.1} ms for the end of its process",
        end.quantile(0.5)
    );
    let [name, bare_name] = hibernate_names(mib);
    Ok(vec![
        ours.row(name, format!("{note}; {target}")),
        bare.row(bare_name, format!("{mib} MiB written to a new file on the same disk, and fdatasync")),
    ])
}

fn written(mib: u64) -> anyhow::Result<Duration> {
    let content = [0x5a; 1 << 20];
    let mut file = tempfile::tempfile()?;
    let start = Instant::now();
    for _ in 0..mib {
        file.write_all(&content)?;
    }
    file.sync_data()?;
    Ok(start.elapsed())
}
