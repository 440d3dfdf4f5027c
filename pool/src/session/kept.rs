//! Sandboxes' VMs outlive a node that is killed, or leaves: what is written down of each, and how the next node finds it.
//!
//! ```text
//!  VM of a sandbox ─ keep ─▶ vms/NAME ─ node gone ─▶ found ─┬─ a record names its process, and it answers ─▶ adopted
//!                               │                           └─ none does, or it does not ─▶ ended
//!                               └─ its process ends ─▶ removed
//! ```
//!
//! The record says who has a VM, since it is written behind it. What is here says how to reach it. One of which nothing here can be read is still
//! known by its process, if a record names that: it can be ended, and nothing else.

mod survivors;
#[cfg(test)]
mod tests;

use std::{fs, io, os::fd::OwnedFd, path::Path};

use rustix::event::Timespec;
use serde::{Deserialize, Serialize};
use stasis_guest_wire::wake::Certificate;
use stasis_pool_api::TemplateInfo;
use stasis_state::Process;

pub(crate) use self::survivors::Survivors;
use super::machine::{Machine, MachineError};
use crate::{
    admission::{Admission, Charge, Reservation},
    vmm::{
        Greeted, Holder, Lease, Place, Spawner, Vmm, VmmError,
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

#[cfg(test)]
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
struct Survivor {
    process: Process,
    handle: OwnedFd,
    /// Where it is written down; none where that cannot be told.
    place: Option<Place>,
    held: Result<Held, String>,
}

/// Who is in it, and what it holds of this node. Why not, where it cannot be taken over: then it can only be left or ended.
#[derive(Debug)]
struct Held {
    holder: Holder,
    guest: Guest,
    uid: Lease,
    memory: Reservation,
}

/// One that could not be ended, with all that it holds.
type Unended = (Box<Survivor>, io::Error);

/// All survivors below `root`. What is left of VMs that live no more is removed.
fn all_below(root: &Path, spawner: &Spawner, admission: &Admission) -> io::Result<Vec<Survivor>> {
    let mut found = Vec::new();
    for place in Place::all(root)? {
        let (holder, handle) = match living(&place) {
            Ok(Some(found)) => found,
            Ok(None) => {
                place.remove();
                continue;
            }
            Err(error) => {
                tracing::error!(%error, "a VM of an earlier node is left as it is: deleting the sandbox whose record names it ends it");
                continue;
            }
        };
        let process = holder.process;
        let held = match (place.read::<Papers>(), spawner.take_uid(holder.uid)) {
            (Ok(Papers { guest, .. }), Some(uid)) => {
                let memory = admission.admit_living(Charge::running(&guest.template));
                Ok(Held { holder, guest, uid, memory })
            }
            (Ok(_), None) => Err("another VM has its uid".to_owned()),
            (Err(error), _) => Err(format!("what was written down of it cannot be read: {error}")),
        };
        found.push(Survivor { process, handle, place: Some(place), held });
    }
    Ok(found)
}

/// Removes what is left of VMs that live no more, and of which nothing can be read.
fn sweep_unreadable(root: &Path) -> io::Result<()> {
    for place in Place::all(root)? {
        let unreadable = |error: io::Error| error.kind() != io::ErrorKind::NotFound;
        if place.read::<Holder>().is_err_and(unreadable) && !place.is_listened_at() {
            place.remove();
        }
    }
    Ok(())
}

/// Kills a process and waits for its end. An error: it may live.
pub(super) fn end_at_once(process: Process, handle: &OwnedFd) -> io::Result<()> {
    kill(handle)?;
    if ended(handle, Some(&END_LIMIT))? {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("VM process {} does not end", process.pid)))
}

/// The process that a folder is of, if it lives. An error: it lives, and nothing of it can be read.
pub(super) fn living(place: &Place) -> io::Result<Option<(Holder, OwnedFd)>> {
    let holder = match place.read::<Holder>() {
        // Its node was killed before there was a VM to be kept.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if place.is_listened_at() => {
            let folder = place.path().display();
            return Err(io::Error::other(format!("a VM lives whose papers in {folder} cannot be read: {error}")));
        }
        Err(_) => return Ok(None),
        Ok(holder) => holder,
    };
    Ok(find(holder.process)?.map(|handle| (holder, handle)))
}

impl Survivor {
    /// One that is known by nothing but its process, if that lives.
    fn unwritten(process: Process) -> io::Result<Option<Self>> {
        let held = || Err("what was written down of it cannot be read, or is gone".to_owned());
        Ok(find(process)?.map(|handle| Self { process, handle, place: None, held: held() }))
    }

    fn is(&self, process: Process) -> bool {
        self.process == process
    }

    /// Why it cannot be taken over; none if it can.
    fn fault(&self) -> Option<&str> {
        self.held.as_ref().err().map(String::as_str)
    }

    /// Makes it this node's, as it is. One that does not answer is ended, as is one that is `given_up` before; one that cannot be ended is
    /// given back. Whoever leaves meanwhile leaves it as it was.
    async fn adopt(
        self,
        spawner: &Spawner,
        given_up: impl Future<Output = ()>,
    ) -> Result<Machine, (Option<Box<Self>>, MachineError)> {
        let greeted = tokio::select! {
            greeted = self.greet() => greeted,
            () = given_up => Err(VmmError::Failed("it was given up before its VM had answered".into())),
        };
        let Self { process, handle, place, held } = self;
        let (greeted, place, held) = match (greeted, place, held) {
            (Ok(greeted), Some(place), Ok(held)) => (greeted, place, held),
            (greeted, place, held) => {
                let why = match (greeted, &held) {
                    (Err(error), _) => error,
                    (Ok(_), Err(reason)) => VmmError::Failed(reason.clone()),
                    (Ok(_), Ok(_)) => VmmError::Failed("nobody knows where it is".into()),
                };
                return Err(match (Self { process, handle, place, held }).end(spawner).await {
                    Ok(()) => (None, why.into()),
                    Err((left, error)) => (Some(left), MachineError::Lives { why: why.to_string(), error }),
                });
            }
        };
        let Held { holder, guest, uid, memory } = held;
        tracing::debug!(pid = process.pid, running = greeted.running, "took over a VM");
        let born = spawner.adopt(&holder, handle, uid);
        let (vmm, files) = Vmm::take(greeted, place.clone(), holder, Some(born), memory);
        taken_over(vmm, place, guest, files).map_err(|error| (None, error))
    }

    /// Ends it, and gives back what it holds once it has ended for sure.
    async fn end(self, spawner: &Spawner) -> Result<(), Unended> {
        let process = self.process;
        let ended = match self.handle.try_clone() {
            Ok(handle) => tokio::task::spawn_blocking(move || end_at_once(process, &handle)).await,
            Err(error) => Ok(Err(error)),
        };
        if let Err(error) = ended.map_err(io::Error::other).and_then(|ended| ended) {
            return Err((Box::new(self), error));
        }
        let Self { handle, place, held, .. } = self;
        if let Ok(Held { holder, uid, memory, .. }) = held {
            // Its control group goes before its uid is another's.
            drop(spawner.adopt(&holder, handle, uid));
            drop(memory);
        }
        if let Some(place) = place {
            place.remove();
        }
        Ok(())
    }

    /// One that cannot be taken over is not asked.
    async fn greet(&self) -> Result<Greeted, VmmError> {
        match (&self.place, self.fault()) {
            (Some(place), None) => Vmm::greet(place).await,
            _ => std::future::pending().await,
        }
    }
}

/// The machine of a VM that was adopted. It may have been told of one life more than it is known to have begun: that is written down before
/// anything is done to it, so that yet another node does not order the same.
pub(super) fn taken_over(vmm: Vmm, place: Place, guest: Guest, files: Vec<OwnedFd>) -> Result<Machine, MachineError> {
    let files = files.into_iter().map(fs::File::from).collect::<Vec<_>>().try_into();
    let files = files.map_err(|_| VmmError::Failed("it was not kept with the files of a sandbox".into()))?;
    let guest = Guest { ordered: guest.ordered + 1, ..guest };
    let holder = vmm.holder().clone();
    let machine = Machine::new(vmm, guest, files).kept_at(place.clone());
    if let Err(error) = note(&place, &holder, machine.guest()) {
        // A full disk is no reason to end it. It is written down with its next life; only a node that has to take it over before would order one
        // that it may have been told of.
        tracing::warn!(pid = holder.process.pid, %error, "what was found out about a VM cannot be written down");
    }
    Ok(machine)
}
