//! A command that runs in a sandbox: its parts become events, until it ends or nobody listens.

use bytes::Bytes;
use stasis_guest_wire::exec::{Exec, Part};
use stasis_pool_api::{Command, CommandEvent, CommandEvents, Written};
use tokio::{net::UnixStream, sync::mpsc};

use super::visit::Visit;
use crate::agent;

/// Events that may wait for a slow reader; then the command waits.
const EVENTS: usize = 16;

/// As the agent is told.
pub(super) fn order(command: Command) -> Exec {
    let Command { command, env, directory, stdin } = command;
    Exec { command, env, directory, stdin }
}

/// Follows a command that was started. It holds the sandbox awake; dropping the events ends it.
pub(super) fn follow(visit: Visit) -> CommandEvents {
    let (events, told) = mpsc::channel(EVENTS);
    tokio::spawn(async move {
        let Visit { stream, lease, .. } = visit;
        tokio::select! {
            // Closing the connection has the command killed.
            () = events.closed() => {}
            () = tell(stream, &events) => {}
        }
        drop(lease);
    });
    told
}

async fn tell(mut stream: UnixStream, events: &mpsc::Sender<CommandEvent>) {
    loop {
        let (event, last) = match agent::receive_part(&mut stream).await {
            Ok(Part::Stdout(bytes)) => (CommandEvent::Stdout(Written(Bytes::from(bytes))), false),
            Ok(Part::Stderr(bytes)) => (CommandEvent::Stderr(Written(Bytes::from(bytes))), false),
            Ok(Part::Exited(status)) => (CommandEvent::Exited { status }, true),
            Ok(Part::Killed(signal)) => (CommandEvent::Killed { signal }, true),
            Err(error) => {
                let reason = format!("its sandbox was paused, killed or has ended: {error}");
                (CommandEvent::Lost { reason }, true)
            }
        };
        if events.send(event).await.is_err() || last {
            return;
        }
    }
}
