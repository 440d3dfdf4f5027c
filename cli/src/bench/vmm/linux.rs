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
    wake::{FromAgent, FromNode, Wake},
};
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::{Event, MachineSpec, Reply, Request, Secret};

use super::{
    Bench,
    births::{Births, Vmm, checked, from_start},
    figure::against,
};

/// Until it runs, until its agent has answered, and until it has over a connection.
pub(super) const NAMES: [&str; 3] = ["claim.linux_us", "claim.linux_first_answer_us", "claim.linux_connected_us"];
/// An order that nobody obeys, since no life has its number: refused without a step of the repair, which would be the function's as much as ours.
const NOBODYS: Wake = Wake {
    generation: 0,
    entropy: String::new(),
    wall_clock_ns: 0,
    hostname: String::new(),
    machine_id: String::new(),
    boot_nonce: String::new(),
};
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

/// Nobody has repaired its identity, so its gate is shut.
fn refused(answer: &FromAgent) -> anyhow::Result<()> {
    match answer {
        FromAgent::Refused { .. } => Ok(()),
        answer => bail!("the guest's agent answered {answer:?} before it was woken"),
    }
}

/// Beside the bare limit, in turns.
pub(super) fn claims(bench: &Bench, template: &Template) -> anyhow::Result<Vec<Row>> {
    let mut limit = Histogram::new(Unit::Micros);
    let order = serde_json::to_string(&NOBODYS)?;
    let mut ours = NAMES.map(|_| Histogram::new(Unit::Micros));
    for _ in 0..CLAIMS {
        limit.record_time(bench.limit()?);
        let (mut vmm, [memory, disk, app]) = template.prepared(&bench.births)?;
        let (mut near, far) = UnixStream::pair()?;
        near.set_read_timeout(Some(ANSWER_LIMIT))?;
        let start = Instant::now();
        vmm.client.send(&Request::Restore, &[memory.as_fd(), disk.as_fd(), app.as_fd()])?;
        vmm.client.send(&Request::Order { text: Secret(order.clone()) }, &[])?;
        vmm.client.send(&Request::Resume, &[])?;
        checked(vmm.client.reply()?)?;
        let by_page = checked(vmm.client.reply()?)? == Reply::Ordered;
        checked(vmm.client.reply()?)?;
        ours[0].record_time(start.elapsed());
        if by_page {
            let Event::Answered { text } = vmm.client.event()? else { bail!("the test guest did something else") };
            ours[1].record_time(start.elapsed());
            refused(&frame::decode(text.as_bytes())?)?;
        }
        // As the node does: a connection comes after the proof.
        vmm.client.send(&Request::Connect { port: AGENT_PORT }, &[far.as_fd()])?;
        frame::send(&mut near, &FromNode::Forward)?;
        checked(vmm.client.reply()?)?;
        let answer = frame::receive(&mut near).context("the guest's agent does not answer")?;
        ours[2].record_time(start.elapsed());
        if !by_page {
            ours[1].record_time(start.elapsed());
        }
        refused(&answer)?;
    }
    let limit = limit.quantile(0.5);
    let MachineSpec { memory_mib, disks, rng, balloon, .. } = &template.machine;
    let guest =
        format!("a Linux guest of {memory_mib} MiB, with {} disks, vsock, rng: {rng}, balloon: {balloon}", disks.len());
    let [runs, answers, _] = &ours;
    let notes = [
        format!(
            "a shell in a jailed process, from the request to the answer that it runs: {guest}; {}",
            against(runs.quantile(0.5), limit * TIMES_THE_LIMIT, "four times the limit's median")
        ),
        format!(
            "as {}, to the agent's first answer, which it leaves in its wake page where it has one: {guest}; {}",
            NAMES[0],
            against(
                answers.quantile(0.5),
                limit * TIMES_TO_ANSWER,
                "55 times the limit's median, half of Firecracker's"
            )
        ),
        format!("as {}, to the agent's answer over a connection, which is asked for after the first", NAMES[0]),
    ];
    Ok(ours.iter().zip(NAMES).zip(notes).map(|((histogram, name), note)| histogram.row(name, note)).collect())
}
