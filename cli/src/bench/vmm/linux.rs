//! Claims of a Linux guest, with the files of a template as a node published it.

use std::{fs::File, path::Path, time::Instant};

use anyhow::Context as _;
use stasis_cow::Snapshot;
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::MachineSpec;

use super::{
    Bench,
    births::{Births, Vmm, from_start},
    figure::against,
};

pub(super) const NAME: &str = "claim.linux_us";
const CLAIMS: usize = 50;
/// How often the limit a claim may take.
const TIMES_THE_LIMIT: f64 = 4.0;

/// A published template.
pub(super) struct Template {
    snapshot: Snapshot,
    machine: MachineSpec,
}

impl Template {
    /// Opens and verifies the one in `folder`.
    pub(super) fn open(folder: &Path) -> anyhow::Result<Self> {
        let what = || format!("{}: no folder of a published template", folder.display());
        let snapshot = Snapshot::open(folder).with_context(what)?;
        let machine = stasis_vmm::machine_of(&from_start(snapshot.part("state")?)?).with_context(what)?;
        Ok(Self { snapshot, machine })
    }

    /// A shell for it, and what the claim will bring: memory, a root disk of its own, the function's folder.
    fn prepared(&self, births: &Births) -> anyhow::Result<(Vmm, [File; 3])> {
        let vmm = births.shell(&self.machine, Some(from_start(self.snapshot.part("state")?)?))?;
        let memory = self.snapshot.part("memory").context("the template's memory is compressed: measure another")?;
        let disk = stasis_cow::clone_nameless(self.snapshot.part("disk")?, self.snapshot.folder())?;
        Ok((vmm, [memory.try_clone()?, disk, self.snapshot.part("app")?.try_clone()?]))
    }
}

/// Beside the bare limit, in turns.
pub(super) fn claims(bench: &Bench, template: &Template) -> anyhow::Result<Row> {
    let (mut limit, mut ours) = (Histogram::new(Unit::Micros), Histogram::new(Unit::Micros));
    for _ in 0..CLAIMS {
        limit.record_time(bench.limit()?);
        let (mut vmm, [memory, disk, app]) = template.prepared(&bench.births)?;
        let start = Instant::now();
        vmm.restore_and_resume(&[&memory, &disk, &app])?;
        ours.record_time(start.elapsed());
    }
    let target = against(ours.quantile(0.5), limit.quantile(0.5) * TIMES_THE_LIMIT, "four times the limit's median");
    let MachineSpec { memory_mib, disks, rng, balloon, .. } = &template.machine;
    let note = format!(
        "a shell in a jailed process, from the request to the answer that a Linux guest of {memory_mib} MiB runs, with {} disks, vsock, rng: {rng}, balloon: {balloon}; {target}",
        disks.len()
    );
    Ok(ours.row(NAME, note))
}
