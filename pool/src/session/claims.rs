//! Which VMs of an earlier node are named by records: each is ended with the last one that names it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use stasis_state::Process;

/// What records name, once for each record that does.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<Vec<Process>>);

impl Claims {
    fn named(&self) -> MutexGuard<'_, Vec<Process>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A record names it.
    pub(super) fn add(&self, process: Process) {
        self.named().push(process);
    }

    /// Another record names it too.
    pub(super) fn are_several(&self, process: Process) -> bool {
        self.named().iter().filter(|named| **named == process).count() > 1
    }

    /// One that names it is to go. Whether that was the last: then it ends. Of two that go at once, the later one is.
    pub(super) fn withdraw(&self, process: Process) -> bool {
        let mut named = self.named();
        if let Some(at) = named.iter().position(|named| *named == process) {
            named.swap_remove(at);
        }
        !named.contains(&process)
    }

    /// All that are named.
    pub(super) fn all(&self) -> Vec<Process> {
        self.named().clone()
    }
}
