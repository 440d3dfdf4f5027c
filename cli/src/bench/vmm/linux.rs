//! Claims of a Linux guest, with the files of a template as a node published it.

use std::{
    fs::File,
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use stasis_cow::Snapshot;
use stasis_guest_wire::{
    AGENT_PORT, frame,
    wake::{FromAgent, FromNode},
};
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::{MachineSpec, Request};

use super::{
    Bench,
    births::{Births, Vmm, checked, from_start},
    figure::against,
};

/// Until it runs, and until its agent has answered.
pub(super) const NAMES: [&str; 2] = ["claim.linux_us", "claim.linux_first_answer_us"];
const CLAIMS: usize = 50;
/// How often the limit a claim may take.
const TIMES_THE_LIMIT: f64 = 4.0;
/// As above, with the first answer: half of what Firecracker takes for the same, from its start to its guest's first answer over vsock.
const TIMES_TO_ANSWER: f64 = 55.0;
/// Longest time that the agent may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

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
pub(super) fn claims(bench: &Bench, template: &Template) -> anyhow::Result<Vec<Row>> {
    let mut limit = Histogram::new(Unit::Micros);
    let mut ours = NAMES.map(|_| Histogram::new(Unit::Micros));
    for _ in 0..CLAIMS {
        limit.record_time(bench.limit()?);
        let (mut vmm, [memory, disk, app]) = template.prepared(&bench.births)?;
        let (mut near, far) = UnixStream::pair()?;
        near.set_read_timeout(Some(ANSWER_LIMIT))?;
        let start = Instant::now();
        vmm.order_restore(&[&memory, &disk, &app])?;
        vmm.client.send(&Request::Connect { port: AGENT_PORT }, &[far.as_fd()])?;
        frame::send(&mut near, &FromNode::Forward)?;
        vmm.is_restored()?;
        ours[0].record_time(start.elapsed());
        checked(vmm.client.reply()?)?;
        let answer = frame::receive(&mut near).context("the guest's agent does not answer")?;
        ours[1].record_time(start.elapsed());
        // Nobody has repaired its identity, so its gate is shut.
        if !matches!(answer, FromAgent::Refused { .. }) {
            bail!("the guest's agent answered {answer:?} before it was woken");
        }
    }
    let limit = limit.quantile(0.5);
    let MachineSpec { memory_mib, disks, rng, balloon, .. } = &template.machine;
    let guest =
        format!("a Linux guest of {memory_mib} MiB, with {} disks, vsock, rng: {rng}, balloon: {balloon}", disks.len());
    let [runs, answers] = &ours;
    let notes = [
        format!(
            "a shell in a jailed process, from the request to the answer that it runs: {guest}; {}",
            against(runs.quantile(0.5), limit * TIMES_THE_LIMIT, "four times the limit's median")
        ),
        format!(
            "as {}, to the agent's first answer over vsock: {guest}; {}",
            NAMES[0],
            against(
                answers.quantile(0.5),
                limit * TIMES_TO_ANSWER,
                "55 times the limit's median, half of Firecracker's"
            )
        ),
    ];
    Ok(ours.iter().zip(NAMES).zip(notes).map(|((histogram, name), note)| histogram.row(name, note)).collect())
}
