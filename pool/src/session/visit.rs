//! A request in a sandbox.

use std::{
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream as StdUnixStream},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use stasis_guest_wire::exec::Exec;
use stasis_pool_api::{Lease, SandboxError, SandboxId, StartKind, TemplateInfo};
use stasis_state::{Refusal, RequestId};
use tokio::{net::UnixStream, sync::mpsc};

use super::{
    machine::{ATTEMPTS, Machine, MachineError},
    message::{Message, Reply},
    saved::SaveError,
    service::LIMIT,
};
use crate::{
    agent::{self, AgentError},
    restore::RestoreError,
};

/// Longest time that the agent may take to take one more connection. All who waited for a resume connect at once, which took sixteen of them
/// more than 20 s in a guest whose kernel is interpreted, on a busy machine.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

/// A connection to the function.
pub(super) struct Visit {
    pub(super) stream: UnixStream,
    pub(super) lease: Presence,
    pub(super) template: TemplateInfo,
    pub(super) start: StartKind,
    /// From its coming to being let in.
    pub(super) waited: Duration,
    /// From there to the connection.
    pub(super) connected: Duration,
}

/// Keeps a sandbox awake until it is dropped.
pub(super) struct Presence {
    pub(super) sandbox: SandboxId,
    pub(super) request: RequestId,
    pub(super) task: mpsc::UnboundedSender<Message>,
    /// What its task cuts it with.
    pub(super) cut: Cut,
}

impl Lease for Presence {
    fn report_failure(&self, request: &str, reason: &str) {
        tracing::warn!(sandbox = %self.sandbox, %request, reason, "the function broke a request off");
    }

    fn taken_back(&self) -> Option<SandboxError> {
        let id = self.sandbox.clone();
        Some(match self.cut.reason()? {
            Refusal::Killed | Refusal::Moved => SandboxError::Gone { id },
            _ => SandboxError::Cut { id },
        })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        // A task that has ended holds nothing any more.
        let _ = self.task.send(Message::Over(self.request));
    }
}

/// What a request wants to be connected to.
#[derive(Debug, Clone)]
pub(super) enum Opening {
    /// The function's port.
    Function,
    /// A command, which is started for it.
    Command(Exec, Beginning),
}

/// Whether a command may have begun: what happens first holds, that its guest is told of it or that its caller gives up.
#[derive(Debug, Clone, Default)]
pub(super) struct Beginning(Arc<OnceLock<bool>>);

impl Beginning {
    /// Its guest is told of it from now on. False: it was given up, and must not be.
    fn begins(&self) -> bool {
        *self.0.get_or_init(|| true)
    }

    /// Nobody waits for it. Whether it has not begun, and will not.
    pub(super) fn give_up(&self) -> bool {
        !*self.0.get_or_init(|| false)
    }
}

impl Opening {
    pub(super) const fn is_command(&self) -> bool {
        matches!(self, Self::Command(..))
    }

    /// That of a command.
    pub(super) fn beginning(&self) -> Option<Beginning> {
        match self {
            Self::Function => None,
            Self::Command(_, beginning) => Some(beginning.clone()),
        }
    }
}

/// A request as its sandbox's task knows it.
pub(super) enum Visitor {
    /// It waits for a connection, which it may for so long. `life`: that of the VM when it came.
    Waiting { reply: Reply<Visit>, opening: Opening, came: Instant, patience: Duration, life: Option<u64> },
    /// Somebody wants the sandbox to run, and nothing else.
    Resumer { reply: Reply<(stasis_pool_api::SandboxInfo, bool)>, life: Option<u64> },
    /// It is in.
    Inside(Cut),
}

impl Visitor {
    /// How long it may wait yet.
    pub(super) fn patience(&self) -> Option<Duration> {
        match self {
            Self::Waiting { came, patience, .. } => Some(patience.saturating_sub(came.elapsed())),
            Self::Resumer { .. } => Some(LIMIT),
            Self::Inside(_) => None,
        }
    }

    pub(super) fn cut(&self, why: Refusal) {
        if let Self::Inside(connection) = self {
            connection.cut(why);
        }
    }
}

/// Why a request that was let in has no connection.
fn failure(lease: &Presence, machine: &Machine, opening: &Opening, error: MachineError) -> SandboxError {
    let id = lease.sandbox.clone();
    if let Some(taken) = lease.taken_back() {
        return match taken {
            // Nothing of a request was sent. Of a command that may have begun its caller hears so: `half_begun`.
            SandboxError::Gone { .. } => SandboxError::Unknown { id: id.to_string() },
            cut => cut,
        };
    }
    let reason = error.to_string();
    match (error, opening) {
        (MachineError::Restore(RestoreError::Agent(AgentError::NoCommands)), _) => {
            SandboxError::NoExec { id, template: machine.template.spec.name.clone() }
        }
        (MachineError::Restore(RestoreError::Agent(AgentError::Refused { reason, .. })), Opening::Command(..)) => {
            SandboxError::Command { id, reason }
        }
        (MachineError::Restore(RestoreError::Agent(_) | RestoreError::Vmm(_)) | MachineError::Ended, _) => {
            SandboxError::Guest { id, reason }
        }
        _ => SandboxError::NotDone { id, wanted: "take a connection", reason },
    }
}

/// Begins to connect a request that was let in. What is returned cuts it.
pub(super) fn enter(
    machine: &Arc<Machine>,
    lease: Presence,
    reply: Reply<Visit>,
    opening: Opening,
    (came, paused): (Instant, bool),
    connecting: &mut tokio::task::JoinSet<()>,
) -> Visitor {
    let cut = lease.cut.clone();
    let inside = Visitor::Inside(cut.clone());
    let (machine, admitted) = (Arc::clone(machine), Instant::now());
    connecting.spawn(async move {
        let connected = tokio::time::timeout(CONNECT_LIMIT, connect(&machine, &cut, &opening)).await;
        let visit = match connected {
            Ok(Ok(stream)) => Ok(Visit {
                stream,
                lease,
                template: machine.template.clone(),
                start: if paused { StartKind::Resumed } else { StartKind::Running },
                waited: admitted - came,
                connected: admitted.elapsed(),
            }),
            Ok(Err(error)) => Err(failure(&lease, &machine, &opening, error)),
            Err(_) => {
                let (id, limit) = (lease.sandbox.clone(), CONNECT_LIMIT);
                Err(SandboxError::Late { id, wanted: "take a connection", limit })
            }
        };
        drop(machine);
        // Whoever asked may have left: the lease is dropped then, and the request over.
        let _ = reply.send(visit);
    });
    inside
}

/// A connection, if it must be by one more attempt: see [`Machine::connect`]. One that ends unanswered while the VM lives was refused by the
/// guest's kernel, behind which nobody has seen what was asked: so a command is not begun twice.
async fn connect(machine: &Machine, cut: &Cut, opening: &Opening) -> Result<UnixStream, MachineError> {
    if opening.beginning().is_some_and(|beginning| !beginning.begins()) {
        return Err(MachineError::Ended);
    }
    let mut attempt = 1;
    loop {
        let (near, far) = agent::stream_pair().map_err(SaveError::Io)?;
        if !cut.watch(near.as_fd().try_clone_to_owned().map_err(SaveError::Io)?.into()) {
            return Err(MachineError::Ended);
        }
        match machine.connect(near, far, opening).await {
            Err(MachineError::Restore(RestoreError::Agent(AgentError::Wire(_))))
                if attempt < ATTEMPTS && machine.vmm.is_alive() =>
            {
                attempt += 1;
            }
            connected => return connected,
        }
    }
}

/// What ends a request's connection, whichever it has by then.
#[derive(Debug, Clone, Default)]
pub(super) struct Cut(Arc<Mutex<Connection>>);

#[derive(Debug, Default)]
enum Connection {
    #[default]
    None,
    At(StdUnixStream),
    Cut(Refusal),
}

impl Cut {
    /// Takes the place of the one before. False: the request was cut.
    fn watch(&self, stream: StdUnixStream) -> bool {
        let mut connection = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = !matches!(*connection, Connection::Cut(_));
        if goes_on {
            *connection = Connection::At(stream);
        }
        goes_on
    }

    /// Why it was cut, if it was.
    fn reason(&self) -> Option<Refusal> {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Connection::Cut(why) => Some(why),
            Connection::None | Connection::At(_) => None,
        }
    }

    /// Whoever sees the connection end finds the reason.
    fn cut(&self, why: Refusal) {
        let connection =
            std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), Connection::Cut(why));
        if let Connection::At(stream) = connection
            && let Err(error) = stream.shutdown(Shutdown::Both)
        {
            tracing::debug!(%error, "a connection had ended before it was cut");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_was_given_up_does_not_begin_and_one_that_has_begun_is_not_given_up() {
        let first = Beginning::default();
        assert!(first.give_up() && !first.begins() && first.give_up());
        let second = Beginning::default();
        assert!(second.begins() && !second.give_up() && second.begins());
    }
}
