//! A node that ends, as one of its sandboxes sees it: what is being done to it ends, and its VM goes on without this node.

use stasis_pool_api::SandboxState as State;
use stasis_state::Process;
use tokio::sync::oneshot;

use super::driver::Driver;

/// Whether its VM is to go on without this node.
#[derive(Debug, Default)]
pub(super) enum Departure {
    #[default]
    No,
    /// When nothing is being done to it. Who is then told its process.
    Soon(oneshot::Sender<Option<Process>>),
    /// At once.
    Now(oneshot::Sender<Option<Process>>),
}

impl Driver {
    /// Its VM goes on without this node, now.
    pub(super) fn leaves(&self) -> bool {
        match self.leaving {
            Departure::No => false,
            Departure::Soon(_) => self.work.is_none(),
            Departure::Now(_) => true,
        }
    }

    /// What is left of this task ends with it, but for its VM, if that is to go on.
    pub(super) fn leave(&mut self) {
        let (Departure::Soon(asked) | Departure::Now(asked)) = std::mem::take(&mut self.leaving) else { return };
        let lives = !matches!(self.record.state(), State::Hibernated | State::Failed | State::Killing | State::Gone);
        let machine = self.machine.as_ref().filter(|_| lives);
        let process = machine.and_then(|machine| machine.process().inspect(|_| machine.vmm.leave()));
        // The node may have waited long enough.
        let _ = asked.send(process);
    }
}
