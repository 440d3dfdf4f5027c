//! The conversations with the agent inside a guest.

use std::{
    io,
    os::unix::net::UnixStream as StdUnixStream,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Serialize, de::DeserializeOwned};
use stasis_guest_wire::{
    exec::{Exec, Part},
    frame::{self, FrameError},
    wake::{Certificate, FromAgent, FromNode, Step, Unproved, Wake},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use uuid::Uuid;

/// Why the agent's part failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// The connection broke, or its bytes made no sense.
    #[error("the agent cannot be talked to: {0}")]
    Wire(#[from] FrameError),
    /// The agent refused.
    #[error("the agent refused{}: {reason}", step.map(|step| format!(" at the repair step {step:?}")).unwrap_or_default())]
    Refused {
        /// The step that failed.
        step: Option<Step>,
        /// Why.
        reason: String,
    },
    /// Its guest runs no commands.
    #[error("the guest runs no commands")]
    NoCommands,
    /// The certificate does not prove the repair.
    #[error("the repair is not proved: {0}")]
    Unproved(#[from] Unproved),
    /// The agent answered out of turn.
    #[error("the agent answered out of turn")]
    OutOfTurn,
    /// The host's own random generator or clock failed.
    #[error("the host has no {0} to give")]
    Host(&'static str),
}

/// Sends one message.
pub(crate) async fn send<T: Serialize>(to: &mut UnixStream, message: &T) -> Result<(), FrameError> {
    Ok(to.write_all(&frame::encode(message)?).await?)
}

/// Receives one message, and not one byte beyond it.
pub(crate) async fn receive<T: DeserializeOwned>(from: &mut UnixStream) -> Result<T, FrameError> {
    let mut header = [0; 4];
    from.read_exact(&mut header).await?;
    let mut body = vec![0; frame::body_length(header)?];
    from.read_exact(&mut body).await?;
    frame::decode(&body)
}

/// A connected pair: the node's end, and the end to hand to a VMM process.
pub(crate) fn stream_pair() -> io::Result<(UnixStream, StdUnixStream)> {
    let (near, far) = StdUnixStream::pair()?;
    near.set_nonblocking(true)?;
    Ok((UnixStream::from_std(near)?, far))
}

/// The host's wall clock, nanoseconds since the Unix epoch.
pub(crate) fn wall_clock_ns() -> Result<u64, AgentError> {
    let since: Duration =
        SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| AgentError::Host("wall clock after 1970"))?;
    u64::try_from(since.as_nanos()).map_err(|_| AgentError::Host("wall clock before 2554"))
}

/// What makes a VM different from all others: `vm` names it, everything else is drawn anew.
pub(crate) fn new_identity(vm: Uuid, generation: u64) -> Result<Wake, AgentError> {
    let mut entropy = [0; 64];
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())
        .map_err(|_| AgentError::Host("entropy"))?;
    Ok(Wake {
        generation,
        entropy: entropy.iter().map(|byte| format!("{byte:02x}")).collect(),
        wall_clock_ns: wall_clock_ns()?,
        hostname: format!("vm-{}", &vm.simple().to_string()[..12]),
        machine_id: Uuid::new_v4().simple().to_string(),
        boot_nonce: Uuid::new_v4().to_string(),
    })
}

/// Another life of a VM that stays who it was: only entropy and clock are new.
pub(crate) fn next_life(last: &Certificate, generation: u64) -> Result<Wake, AgentError> {
    let fresh = new_identity(Uuid::new_v4(), generation)?;
    Ok(Wake {
        hostname: last.hostname.clone(),
        machine_id: last.machine_id.clone(),
        boot_nonce: last.boot_nonce.clone(),
        ..fresh
    })
}

/// An order as a wake page has it.
pub(crate) fn order_text(wake: &Wake) -> Result<String, AgentError> {
    Ok(serde_json::to_string(wake).map_err(FrameError::from)?)
}

/// Asks for one more connection to the function of a VM that is awake.
pub(crate) async fn forward(stream: &mut UnixStream) -> Result<(), AgentError> {
    send(stream, &FromNode::Forward).await?;
    match receive(stream).await? {
        FromAgent::Forwarding => Ok(()),
        FromAgent::Refused { step, reason } => Err(AgentError::Refused { step, reason }),
        _ => Err(AgentError::OutOfTurn),
    }
}

/// Has a command run in a VM that is awake. Afterwards the connection brings its parts.
pub(crate) async fn execute(stream: &mut UnixStream, exec: Exec) -> Result<(), AgentError> {
    send(stream, &FromNode::Exec(exec)).await?;
    match receive(stream).await? {
        FromAgent::Executing => Ok(()),
        FromAgent::NoCommands => Err(AgentError::NoCommands),
        FromAgent::Refused { step, reason } => Err(AgentError::Refused { step, reason }),
        _ => Err(AgentError::OutOfTurn),
    }
}

/// The next part of a command's output, or its end.
pub(crate) async fn receive_part(stream: &mut UnixStream) -> Result<Part, FrameError> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).await?;
    let mut body = vec![0; frame::body_length(header)?];
    stream.read_exact(&mut body).await?;
    Ok(Part::decode(&body).map_err(io::Error::other)?)
}

/// What the function of a VM that is awake has printed last.
pub(crate) async fn logs(stream: &mut UnixStream) -> Result<String, AgentError> {
    send(stream, &FromNode::Logs).await?;
    match receive(stream).await? {
        FromAgent::Logs { output } => Ok(output),
        FromAgent::Refused { step, reason } => Err(AgentError::Refused { step, reason }),
        _ => Err(AgentError::OutOfTurn),
    }
}

/// Orders the repair over a fresh connection and opens the gate only for a full proof. Afterwards the connection leads to the function.
pub(crate) async fn wake(
    stream: &mut UnixStream,
    wake: Wake,
    template_boot_id: &str,
) -> Result<Certificate, AgentError> {
    let order = FromNode::Wake(wake);
    send(stream, &order).await?;
    let FromNode::Wake(wake) = order else { return Err(AgentError::OutOfTurn) };
    judge(receive(stream).await?, &wake, template_boot_id)
}

/// The same of an answer that the agent left in its wake page.
pub(crate) fn proved(answer: &str, wake: &Wake, template_boot_id: &str) -> Result<Certificate, AgentError> {
    judge(frame::decode(answer.as_bytes())?, wake, template_boot_id)
}

fn judge(answer: FromAgent, wake: &Wake, template_boot_id: &str) -> Result<Certificate, AgentError> {
    match answer {
        FromAgent::Awake(certificate) => {
            certificate.verify(wake, template_boot_id)?;
            Ok(certificate)
        }
        FromAgent::Refused { step, reason } => Err(AgentError::Refused { step, reason }),
        _ => Err(AgentError::OutOfTurn),
    }
}

/// Has a connection lead to the function of a VM that is awake, or will be when it is heard. No answer comes but the function's.
pub(crate) async fn pass(stream: &mut UnixStream) -> Result<(), FrameError> {
    send(stream, &FromNode::Pass).await
}
