//! A sandbox that an earlier node has left, until its VM has answered: it is listed as its record says, and whatever is asked of it waits.
//!
//! ```text
//!                  ┌─ answers ────────────────▶ it goes on as `Session::adopt` says
//!  its VM lives ───┼─ not in time, or killed ─▶ ended: failed, with that reason
//!                  │                            └─ cannot be ended: failed, tried again until it has ended
//!                  └─ the node leaves ────────▶ left as it was
//! ```
//! Each sandbox for itself: one that does not answer holds up no other, and not the node's start.

use futures_util::future::{BoxFuture, FutureExt};
use stasis_pool_api::{SandboxInfo, SandboxState as State, Timestamp};
use stasis_state::Session;
use tokio::sync::oneshot;

use super::{
    driver::Driver,
    machine::{Machine, MachineError},
    message::Message,
    service::limits,
};

pub(super) struct Adoption {
    /// Its VM; none if it does not live.
    pub(super) outcome: BoxFuture<'static, Result<Option<Machine>, MachineError>>,
    /// Dropped, it is given up.
    pub(super) wanted: oneshot::Sender<()>,
}

impl Adoption {
    /// What is to be adopted by what `adopt` makes of the end of the want for it.
    pub(super) fn by<F>(adopt: impl FnOnce(BoxFuture<'static, ()>) -> F) -> Self
    where
        F: Future<Output = Result<Option<Machine>, MachineError>> + Send + 'static,
    {
        let (wanted, given_up) = oneshot::channel();
        Self { outcome: adopt(given_up.map(drop).boxed()).boxed(), wanted }
    }
}

impl Driver {
    /// Waits for its VM, and then does what was asked meanwhile.
    /// False where the node leaves before that.
    pub(super) async fn take_over(&mut self, Adoption { mut outcome, wanted }: Adoption) -> bool {
        let (mut wanted, mut asked) = (Some(wanted), Vec::new());
        let named = self.record.facts().owner.as_ref().and_then(|owner| owner.process);
        let adopted = loop {
            let message = tokio::select! {
                // A VM that does not live is not told of as one that is left.
                biased;
                adopted = &mut outcome => break adopted,
                message = self.inbox.recv() => message,
            };
            match message {
                Some(Message::Inspect(reply)) => {
                    let info = self.info();
                    drop(reply.send(SandboxInfo { pid: named.map(|process| process.pid), ..info }));
                }
                // Nothing has been done to it yet.
                Some(Message::Leave(reply)) => {
                    // The node may have waited long enough.
                    let _ = reply.send(named);
                    return false;
                }
                None => return false,
                Some(message) => {
                    if matches!(message, Message::Kill(_)) {
                        wanted = None;
                    }
                    asked.push(message);
                }
            }
        };
        drop(wanted);
        let machine = adopted.unwrap_or_else(|error| {
            tracing::error!(sandbox = %self.record.id(), %error, "the VM of a sandbox cannot be taken over");
            self.trouble = Some(error);
            None
        });
        if let Some(machine) = &machine {
            tracing::info!(sandbox = %self.record.id(), state = %self.record.state(), pid = machine.vmm.pid(), "took over a sandbox");
        }
        let limits = limits(self.record.facts().lifetime);
        // What is left of one that needs no VM is freed as soon as it can be ended.
        let may_live = matches!(self.trouble, Some(MachineError::Lives { .. }));
        let is_left = may_live && matches!(self.record.state(), State::Hibernated | State::Failed);
        let lives = machine.is_some() || is_left;
        let (core, first) = Session::adopt(&self.record, lives, limits, Timestamp::now());
        (self.core, self.machine) = (core, machine.map(std::sync::Arc::new));
        self.perform(first.into()).await;
        for message in asked {
            self.hear(message).await;
        }
        true
    }
}
