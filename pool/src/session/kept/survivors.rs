//! The VMs that an earlier node has left, until each is this node's or has ended.
//!
//! ```text
//!  found ─┬─ adopted ─▶ a sandbox's
//!         ├─ ended ─▶ what it holds is given back
//!         ├─ cannot be ended ─▶ found: it may live, and keeps what it holds
//!         └─ the node leaves ─▶ the next one's
//! ```

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures_util::future::join_all;
use stasis_state::Process;

use super::{Survivor, all_below, sweep_unreadable};
use crate::{
    admission::Admission,
    session::machine::{Machine, MachineError},
    vmm::Spawner,
};

/// See the module.
#[derive(Debug)]
pub(crate) struct Survivors {
    root: PathBuf,
    spawner: Spawner,
    left: Mutex<Vec<Survivor>>,
}

impl Survivors {
    /// All below `root`, before anything of this node starts: their memory and uids are theirs.
    pub(crate) fn find(root: &Path, spawner: &Spawner, admission: &Admission) -> io::Result<Self> {
        let left = Mutex::new(all_below(root, spawner, admission)?);
        Ok(Self { root: root.to_owned(), spawner: spawner.clone(), left })
    }

    /// Where VMs are written down.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn left(&self) -> MutexGuard<'_, Vec<Survivor>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, process: Process) -> Option<Survivor> {
        let mut left = self.left();
        let at = left.iter().position(|survivor| survivor.is(process));
        at.map(|at| left.swap_remove(at))
    }

    /// The machine of this process; none if it is not here. One that does not answer, or is given up, is ended.
    pub(crate) async fn adopt(
        &self,
        process: Process,
        given_up: impl Future<Output = ()>,
    ) -> Result<Option<Machine>, MachineError> {
        let Some(survivor) = self.take(process) else { return Ok(None) };
        survivor.adopt(&self.spawner, given_up).await.map(Some).map_err(|(unended, error)| {
            self.left().extend(unended.map(|unended| *unended));
            error
        })
    }

    /// Ends the VM of this process, if it is here. While it cannot be ended it stays here.
    pub(crate) async fn end(&self, process: Process) -> Result<(), MachineError> {
        let Some(survivor) = self.take(process) else { return Ok(()) };
        let is_unwritten = survivor.place.is_none();
        if let Err((unended, error)) = survivor.end(&self.spawner).await {
            self.left().push(*unended);
            return Err(MachineError::Lives { why: "it is to end".into(), error });
        }
        if is_unwritten && let Err(error) = sweep_unreadable(&self.root) {
            tracing::warn!(%error, "what is left of a VM that has ended cannot be removed");
        }
        Ok(())
    }

    /// Why the VM of this process, which a record names, cannot be taken over; none if it can, or does not live. One that is written down
    /// nowhere is known from now on.
    pub(crate) fn fault(&self, process: Process) -> Option<String> {
        let mut left = self.left();
        if let Some(known) = left.iter().find(|survivor| survivor.is(process)) {
            return known.fault().map(str::to_owned);
        }
        match Survivor::unwritten(process) {
            Ok(found) => {
                let found = found?;
                let fault = found.fault().map(str::to_owned);
                left.push(found);
                fault
            }
            Err(error) => Some(format!("it cannot be looked for: {error}")),
        }
    }

    /// Ends those that none of these names.
    pub(crate) async fn end_the_rest(&self, named: Vec<Process>) {
        let rest: Vec<_> =
            self.left().extract_if(.., |survivor| !named.iter().any(|process| survivor.is(*process))).collect();
        for ended in join_all(rest.into_iter().map(|survivor| survivor.end(&self.spawner))).await {
            match ended {
                Ok(()) => tracing::warn!("a VM that no record names was ended"),
                Err((unended, error)) => {
                    tracing::error!(%error, "a VM that no record names cannot be ended: it keeps its memory until the next start tries again");
                    self.left().push(*unended);
                }
            }
        }
    }

    /// Leaves them as they are, for the next node.
    pub(crate) fn leave(&self) -> Vec<Process> {
        std::mem::take(&mut *self.left()).into_iter().map(|survivor| survivor.process).collect()
    }
}
