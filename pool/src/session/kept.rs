//! Sandboxes' VMs outlive a node that is killed: what is written down of each, and how the next node finds it.
//!
//! ```text
//!  VM of a sandbox ─ keep ─▶ vms/NAME ─ node killed ─▶ found ─┬─ a record names its process ─▶ adopted
//!                               │                             └─ none does ─▶ ended
//!                               └─ its process ends ─▶ removed
//! ```
//!
//! The record says who has a VM, since it is written behind it. What is here says how to reach it.

#[cfg(test)]
mod tests;

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::event::Timespec;
use serde::{Deserialize, Serialize};
use stasis_guest_wire::wake::Certificate;
use stasis_pool_api::TemplateInfo;
use stasis_state::Process;

use super::machine::{Machine, MachineError};
use crate::{
    admission::{Admission, Reservation},
    vmm::{
        Holder, Lease, Place, Spawner, Vmm, VmmError,
        process::{ended, find, kill},
    },
};

/// Longest time that the kernel may take to end a killed process: it frees all of its memory.
const END_LIMIT: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// Below the data folder.
pub(crate) const VMS: &str = "vms";

/// What is written down of a VM.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Papers {
    #[serde(flatten)]
    holder: Holder,
    #[serde(flatten)]
    guest: Guest,
}

/// Who is in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Guest {
    pub(super) template: TemplateInfo,
    /// What its agent proved last.
    pub(super) certificate: Certificate,
    /// The latest life that it may have been told to begin: that of the certificate, or one that was never proved.
    pub(super) ordered: u64,
}

impl Guest {
    /// One that has proved every life that it was told to begin.
    pub(super) fn proved(template: TemplateInfo, certificate: Certificate) -> Self {
        let ordered = certificate.generation;
        Self { template, certificate, ordered }
    }
}

/// Writes it down.
pub(super) fn note(place: &Place, holder: &Holder, guest: Guest) -> io::Result<()> {
    place.write(&Papers { holder: holder.clone(), guest })
}

impl Papers {
    pub(super) fn is(&self, process: Process) -> bool {
        self.holder.process == process
    }

    pub(super) fn into_parts(self) -> (Holder, Guest) {
        (self.holder, self.guest)
    }
}

/// A VM that lives, and whose node does not. Dropping it does not end it.
#[derive(Debug)]
pub(crate) struct Survivor {
    place: Place,
    papers: Papers,
    handle: OwnedFd,
    uid: Lease,
    memory: Reservation,
}

/// All survivors below `root`, before anything of this node starts: their memory and uids are theirs. What is left of VMs that live no more is
/// removed.
pub(crate) fn survivors(root: &Path, spawner: &Spawner, admission: &Admission) -> io::Result<Vec<Survivor>> {
    let mut found = Vec::new();
    for place in Place::all(root)? {
        let Some((holder, handle)) = living(&place)? else {
            place.remove();
            continue;
        };
        let uid = spawner.take_uid(holder.uid);
        match (place.read::<Papers>(), uid) {
            (Ok(papers), Some(uid)) => {
                let memory = admission.reserve_for_living(papers.guest.template.spec.memory_mib());
                found.push(Survivor { place, papers, handle, uid, memory });
            }
            (papers, _) => {
                let reason =
                    papers.err().map_or_else(|| "another VM has its uid".to_owned(), |error| error.to_string());
                tracing::error!(
                    pid = holder.process.pid,
                    reason,
                    "a VM of an earlier node cannot be taken over, and ends"
                );
                end_at_once(&holder, &handle)?;
                place.remove();
            }
        }
    }
    Ok(found)
}

fn end_at_once(holder: &Holder, handle: &OwnedFd) -> io::Result<()> {
    kill(handle)?;
    if ended(handle, Some(&END_LIMIT))? {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("VM process {} does not end", holder.process.pid)))
}

/// The process that a folder is of, if it lives.
fn living(place: &Place) -> io::Result<Option<(Holder, OwnedFd)>> {
    // Its node was killed before there was a VM to be kept, or the host was.
    let Ok(holder) = place.read::<Holder>() else { return Ok(None) };
    Ok(find(holder.process)?.map(|handle| (holder, handle)))
}

impl Survivor {
    pub(super) fn is(&self, process: Process) -> bool {
        self.papers.is(process)
    }

    /// Makes it this node's, as it is.
    pub(super) async fn adopt(self, spawner: &Spawner) -> Result<Machine, MachineError> {
        let Self { place, papers, handle, uid, memory } = self;
        let (holder, guest) = papers.into_parts();
        let born = spawner.adopt(&holder, handle, uid);
        let (vmm, running, files) = Vmm::adopt(place.clone(), holder, Some(born), memory).await?;
        tracing::debug!(pid = vmm.pid(), running, "took over a VM");
        taken_over(vmm, place, guest, files)
    }

    /// Ends it.
    pub(super) async fn end(self, spawner: &Spawner) -> io::Result<()> {
        let mut born = spawner.adopt(&self.papers.holder, self.handle, self.uid);
        born.end().await?;
        self.place.remove();
        drop(self.memory);
        Ok(())
    }
}

/// The machine of a VM that was adopted. It may have been told of one life more than it is known to have begun: nothing is done to it before that
/// is written down, so that yet another node does not order the same.
pub(super) fn taken_over(vmm: Vmm, place: Place, guest: Guest, files: Vec<OwnedFd>) -> Result<Machine, MachineError> {
    let files = files.into_iter().map(fs::File::from).collect::<Vec<_>>().try_into();
    let files = files.map_err(|_| VmmError::Failed("it was not kept with the files of a sandbox".into()))?;
    let guest = Guest { ordered: guest.ordered + 1, ..guest };
    let holder = vmm.holder().clone();
    let machine = Machine::new(vmm, guest, files).kept_at(place.clone());
    note(&place, &holder, machine.guest()).map_err(MachineError::Keep)?;
    Ok(machine)
}

/// Ends the VMs that a killed node has left below a data folder, where no other is to take them over, and waits for their end. How many there
/// were.
///
/// # Errors
/// Where one cannot be ended.
pub fn end_kept(data: &Path) -> io::Result<usize> {
    let root: PathBuf = data.join(VMS);
    if !root.exists() {
        return Ok(0);
    }
    let mut count = 0;
    for place in Place::all(&root)? {
        if let Some((holder, handle)) = living(&place)? {
            end_at_once(&holder, &handle)?;
            count += 1;
        }
        place.remove();
    }
    Ok(count)
}
